#include "bench/mover.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/index.h"

namespace kvtwin::bench {
namespace {

constexpr int kHeads = 8;
constexpr int kHeadDim = 128;
constexpr std::size_t kRow = std::size_t{kHeads} * kHeadDim;

// A view of all cells, from a reserving pass.
KvView ViewAll(Cache& cache, int layer) {
  Tokens any;
  any.Add(0, 0);
  Must(cache.StartForward(any, /*reserve=*/true));
  Must(cache.SetLayer(layer));
  return Must(cache.Get());
}

}  // namespace

Defragger::Defragger(int cells, bool runs, std::string_view twin)
    : cells_(cells), runs_(runs) {
  CacheSetup setup;
  setup.dtype = DType::kF32;
  setup.capacity = cells;
  cache_ = Make(setup, twin);
  Fill(/*with_rows=*/true);
}

double Defragger::Time() {
  if (defragged_) {
    for (int sequence = 0; sequence <= Coming(); ++sequence) {
      Must(cache_->Remove(sequence, 0, kOpenEnd));
    }
    Fill(/*with_rows=*/false);
  }
  defragged_ = true;
  Tokens tokens;
  for (int i = 0; i < 2 * kRun; ++i) tokens.Add(i, Coming());
  return TimeForward(*cache_, tokens);
}

double Defragger::TimeCopy() {
  const std::size_t bytes = moved_ * 2 * kRow * sizeof(float) * kLayers;
  if (from_.bytes() < bytes) {
    from_ = WrittenBuffer(bytes + bytes / 8);
    to_ = WrittenBuffer(bytes + bytes / 8);
  }
  return CopyBytes(from_.data(), to_.data(), bytes);
}

void Defragger::Check(const std::string& name) {
  Time();
  std::vector<CellEntry> cells;
  cache_->ListCells(cells);
  if (cells.back().cell + 1 != std::ssize(cells)) Wrong(name, "holes are left");
  if (std::ssize(cells) != kept_ + 2 * kRun) Wrong(name, "tokens are missing");
  for (int layer = 0; layer < kLayers; ++layer) {
    const KvView view = ViewAll(*cache_, layer);
    for (const CellEntry& entry : cells) {
      if (entry.sequence == Coming()) continue;
      CheckRow(name, entry, view.key, 2 * layer);
      CheckRow(name, entry, view.value, 2 * layer + 1);
    }
  }
}

void Defragger::Fill(bool with_rows) {
  std::vector<int> kept;
  for (int batch = 0; batch < cells_ / kBatch; ++batch) {
    Tokens tokens;
    std::int32_t next[2] = {0, 0};
    for (int i = 0; i < kBatch; ++i) {
      random_ = random_ * 1664525 + 1013904223;
      const int hole = runs_ ? i / kRun % 2 : AsInt(random_ >> 31);
      tokens.Add(next[hole]++, 2 * batch + hole);
    }
    Must(cache_->StartForward(tokens, /*reserve=*/false));
    for (std::size_t i = 0; i < kBatch; ++i) {
      if (tokens.sequences[i] % 2 == 0) kept.push_back(cache_->BatchCells()[i]);
    }
    if (with_rows) PutRows(tokens);
  }
  for (int batch = 0; batch < cells_ / kBatch; ++batch) {
    Must(cache_->Remove(2 * batch + 1, 0, kOpenEnd));
  }
  kept_ = Size(kept);
  moved_ = AsSize(
      std::ranges::count_if(kept, [&](int cell) { return cell >= kept_; }));
}

// An element of a token's row; `which` numbers the K and V rows of all layers.
float Defragger::Element(std::int32_t position, int sequence, int which,
                         std::size_t i) {
  const std::int64_t token = std::int64_t{sequence} * kBatch + position;
  return static_cast<float>((token * 2 * kLayers + which) % (1 << 23)) +
         static_cast<float>(i % 3);
}

void Defragger::PutRows(const Tokens& tokens) {
  const Shape shape = {kHeadDim, kHeads, kBatch, 1};
  for (int layer = 0; layer < kLayers; ++layer) {
    std::vector<float> rows[2];
    for (int which = 0; which < 2; ++which) {
      for (std::size_t token = 0; token < kBatch; ++token) {
        for (std::size_t i = 0; i < kRow; ++i) {
          rows[which].push_back(Element(tokens.positions[token],
                                        tokens.sequences[token],
                                        2 * layer + which, i));
        }
      }
    }
    Must(cache_->SetLayer(layer));
    Must(cache_->Put(DenseView(rows[0].data(), DType::kF32, shape),
                     DenseView(rows[1].data(), DType::kF32, shape)));
  }
}

void Defragger::CheckRow(const std::string& name, const CellEntry& entry,
                         const TensorView& rows, int which) {
  const auto* row = reinterpret_cast<const float*>(rows.at(0, 0, entry.cell));
  for (std::size_t i = 0; i < kRow; ++i) {
    if (row[i] != Element(entry.position, entry.sequence, which, i)) {
      Wrong(name, fmt::format("cell {} has another row", entry.cell));
    }
  }
}

Shifter::Shifter(DType dtype, int rows, std::string_view twin)
    : rows_(rows + 256) {
  setup_.spec.shift.kind = ShiftKind::kRope;
  setup_.dtype = dtype;
  setup_.capacity = rows_;
  CacheState state = Interleaved(rows_, 1);
  state.layers[0] = {.key = SomeRows(dtype, {kHeadDim, kHeads, rows_, 1}, 1),
                     .value = SomeRows(dtype, {1, kHeads, rows_, 1}, 2)};
  cache_ = Make(setup_, twin);
  Must(cache_->Restore(state));
  memory_ = WrittenBuffer(bytes());
}

std::size_t Shifter::bytes() const {
  return AsSize(rows_) * kRow * SizeOf(setup_.dtype);
}

double Shifter::Time() {
  Status status;
  const double time = bench::Time([&] { status = cache_->Remove(0, 0, 1); });
  Must(status);
  --rows_;
  return time;
}

double Shifter::TimeModify() { return ModifyBytes(memory_.data(), bytes()); }

void Shifter::Check(const std::string& name) {
  const auto reference = Make(setup_, "reference");
  Must(reference->Restore(Must(cache_->Snapshot())));
  Must(reference->Remove(0, 0, 1));
  Time();
  // The contents of free cells, which come first, do not matter.
  const auto used = [&](Cache& cache) {
    TensorView rows = ViewAll(cache, 0).key;
    rows.data = rows.at(0, 0, rows.shape[2] - rows_);
    rows.shape[2] = rows_;
    return rows;
  };
  CheckTensors(name, used(*cache_), used(*reference));
}

}  // namespace kvtwin::bench
