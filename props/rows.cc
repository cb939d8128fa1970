#include "props/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/elements.h"

namespace kvtwin::props {
namespace {

constexpr std::byte kNaNByte{0xFF};  // Repeated: a NaN in every dtype.
// Repeated: finite in every dtype, since the payload of a NaN that is shifted
// is anybody's guess, and no row's first element.
constexpr std::byte kPoisonByte{0x5A};

// The first element names token and layer, exactly in f32, f16 and bf16, and is
// not too large for f8; the others
// have fractions, so that rounding shows. The second is a NaN now and then.
float Element(const RowSource& source, std::int64_t token, std::int64_t index) {
  if (index == 0) {
    // Eight bits and an exponent are what bf16 has room for.
    const std::int64_t tag = (token * 4 + source.layer) % 2048;
    return static_cast<float>((128 + tag % 128) << tag / 128) / 0x8000;
  }
  const std::int64_t role = source.role == RowRole::kKey ? 1 : 2;
  const std::int64_t mixed =
      (token * 13 + std::int64_t{source.layer} * 5 + index * 7) * role % 601;
  return static_cast<float>(mixed) * 0.37F - 50.0F;
}

// With a payload, which only a plain copy keeps.
void StoreNaN(std::byte* to, DType dtype) {
  const std::uint32_t f32 = 0x7FC12345;
  const std::uint16_t f16 = 0x7E12;
  const std::uint16_t bf16 = 0x7FD2;
  if (dtype == DType::kF32) std::memcpy(to, &f32, sizeof(f32));
  if (dtype == DType::kF16) std::memcpy(to, &f16, sizeof(f16));
  if (dtype == DType::kBF16) std::memcpy(to, &bf16, sizeof(bf16));
  if (dtype == DType::kF8) *to = kNaNByte;
  if (IsBlockDType(dtype)) std::memcpy(to, &f16, sizeof(f16));  // The scale.
}

}  // namespace

TensorView RowBuffer::Fill(const Shape& shape, DType dtype,
                           const RowSource& source, bool strided) {
  TensorView view = DenseView(nullptr, dtype, shape);
  if (strided) {
    const auto size = static_cast<std::int64_t>(SizeOf(dtype));
    // Of blocks, runs are whole: only they have gaps.
    const std::int64_t run = RunBytes(dtype, shape[0]);
    view.stride[0] = 2 * size;
    view.stride[1] = (size == 0 ? 1 : 2) * run + size;
    view.stride[2] = view.stride[1] * shape[1] + (size == 0 ? 3 : 3 * size);
    view.stride[3] = view.stride[2] * shape[2];
  }
  bytes_.resize(static_cast<std::size_t>(view.stride[3]));
  if (strided) std::fill(bytes_.begin(), bytes_.end(), kNaNByte);
  view.data = bytes_.data();
  for (std::int64_t k = 0; k < shape[2]; ++k) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      const std::int64_t token = source.first + k;
      std::byte* run = &bytes_[static_cast<std::size_t>(view.stride[1] * j +
                                                        view.stride[2] * k)];
      std::vector<float> numbers;
      for (std::int64_t i = 0; i < shape[0]; ++i) {
        numbers.push_back(Element(source, token, j * shape[0] + i));
      }
      if (IsBlockDType(dtype)) {
        StoreBlocks(numbers, dtype, run);
      } else {
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          StoreElement(numbers[i],
                       run + view.stride[0] * static_cast<std::int64_t>(i),
                       dtype);
        }
      }
      // Element 1 of the row, or its block.
      const std::int64_t nan = 1 - j * shape[0];
      if (token % 16 == 5 && nan >= 0 && nan < shape[0]) {
        StoreNaN(run + view.stride[0] * nan, dtype);
      }
    }
  }
  return view;
}

void PoisonFreeCells(const KvView& view, const std::vector<CellEntry>& used,
                     bool permuted_v) {
  std::vector<bool> is_used;
  if (!used.empty()) {
    is_used.resize(static_cast<std::size_t>(used.back().cell) + 1);
  }
  for (const CellEntry& entry : used) {
    is_used[static_cast<std::size_t>(entry.cell)] = true;
  }
  const auto poison = [&](TensorView tensor, std::size_t cell_dim) {
    auto size = SizeOf(tensor.dtype);
    if (IsBlockDType(tensor.dtype)) {  // Runs of them as one element.
      size = static_cast<std::size_t>(tensor.stride[1]);
      tensor.shape[0] = 1;
    }
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
      for (std::int64_t j = 0; j < tensor.shape[1]; ++j) {
        for (std::int64_t k = 0; k < tensor.shape[2]; ++k) {
          const auto cell = static_cast<std::size_t>(cell_dim == 0 ? i : k);
          if (cell < is_used.size() && is_used[cell]) continue;
          // The cache's own memory, which only a test may write to.
          std::memset(const_cast<std::byte*>(tensor.at(i, j, k)),
                      static_cast<int>(kPoisonByte), size);
        }
      }
    }
  };
  poison(view.key, 2);
  poison(view.value, permuted_v ? 0 : 2);
}

}  // namespace kvtwin::props
