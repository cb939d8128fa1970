#include "bench/twins.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "bench/limits.h"
#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"

namespace kvtwin::bench {

void Wrong(std::string_view name, std::string_view what) {
  fmt::print(stderr, "kvtwin-bench: {}: wrong, so not measured: {}\n", name,
             what);
  std::exit(1);
}

void Must(const Status& status) {
  if (!status.ok()) Wrong("a call that must be done", status.ToString());
}

std::unique_ptr<Cache> Make(const CacheSetup& setup, std::string_view twin) {
  auto cache = Must(MakeCache(setup.spec, twin));
  Must(cache->SetConfig(setup.config));
  Must(cache->Init(
      {setup.dtype, setup.max_sequences, setup.capacity, setup.max_batch}));
  return cache;
}

CacheState Interleaved(int count, int sequences) {
  CacheState state;
  for (int i = 0; i < count; ++i) {
    state.cells.push_back({i, i / sequences, i % sequences});
  }
  return state;
}

Tokens NextTokens(int stored, int count, int sequences) {
  Tokens tokens;
  for (int sequence = 0; sequence < sequences; ++sequence) {
    for (int i = 0; i < count / sequences; ++i) {
      tokens.Add(stored / sequences + i, sequence);
    }
  }
  return tokens;
}

void AddTinyLayer(Cache& cache) {
  Tokens tokens;
  tokens.Add(0, 0);
  Must(cache.StartForward(tokens, /*reserve=*/true));
  const float element = 0;
  const TensorView row = DenseView(&element, DType::kF32, {1, 1, 1, 1});
  Must(cache.Put(row, row));
}

double TimeForward(Cache& cache, const Batch& batch) {
  Status status;
  const double time =
      Time([&] { status = cache.StartForward(batch, /*reserve=*/false); });
  Must(status);
  return time;
}

void CheckTensors(std::string_view name, const TensorView& a,
                  const TensorView& b) {
  if (a.shape != b.shape || a.dtype != b.dtype || a.stride[0] != b.stride[0]) {
    Wrong(name, fmt::format("{} of {} and {} of {}", ShapeText(a.shape),
                            DTypeName(a.dtype), ShapeText(b.shape),
                            DTypeName(b.dtype)));
  }
  const auto line = AsSize(RunBytes(a.dtype, a.shape[0]));
  for (std::int64_t k = 0; k < a.shape[2]; ++k) {
    for (std::int64_t j = 0; j < a.shape[1]; ++j) {
      if (std::memcmp(a.at(0, j, k), b.at(0, j, k), line) != 0) {
        Wrong(name, fmt::format("bytes differ at [:, {}, {}]", j, k));
      }
    }
  }
}

void CheckMasks(std::string_view name, Cache& a, Cache& b) {
  const KvView view = Must(a.Get());
  const KvView other = Must(b.Get());
  if (view.first_cell != other.first_cell) {
    Wrong(name, fmt::format("views begin at cells {} and {}", view.first_cell,
                            other.first_cell));
  }
  CheckTensors(name, view.mask, other.mask);
}

void CheckCells(std::string_view name, const Cache& a, const Cache& b) {
  std::vector<CellEntry> cells;
  std::vector<CellEntry> others;
  a.ListCells(cells);
  b.ListCells(others);
  if (cells != others) Wrong(name, "the cells hold other tokens");
}

bool Visible(const TensorView& mask, std::int64_t row, std::int64_t column) {
  if (mask.dtype == DType::kBits) {
    const auto* bits = static_cast<const std::uint8_t*>(mask.data);
    return (bits[mask.stride[1] * row + column / 8] >> column % 8 & 1) != 0;
  }
  // Masks of numbers hold zeros and -inf only.
  static constexpr std::byte kZero[sizeof(float)] = {};
  return std::memcmp(mask.at(column, row), kZero, SizeOf(mask.dtype)) == 0;
}

DenseTensor SomeRows(DType dtype, const Shape& shape, std::uint32_t seed) {
  DenseTensor rows = FilledTensor(DType::kF32, shape, 0);
  const auto count = AsSize(rows.view().elements());
  for (std::size_t i = 0; i < count; ++i) {
    seed = seed * 1664525 + 1013904223;
    const float value = static_cast<float>(seed >> 8) / (1 << 23) - 1;
    std::memcpy(rows.bytes.data() + i * sizeof(float), &value, sizeof(float));
  }
  return dtype == DType::kF32 ? rows : CopyOf(rows.view(), dtype);
}

}  // namespace kvtwin::bench
