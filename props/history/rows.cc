#include "props/history/rows.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

constexpr std::byte kNaNByte{0xFF};  // Repeated, it is a NaN in every dtype.
// Repeated, it is a finite number in every dtype (a shift may change the
// payload of a NaN), and is not the first element of any row.
constexpr std::byte kPoisonByte{0x5A};

// Returns a number in [1, 2) or (-2, -1] that lies halfway between two numbers
// of f16, bf16 or f8, so that the rule for ties shows.
float Tie(std::int64_t number) {
  constexpr std::array<int, 3> kDigits = {10, 7, 3};
  const std::int64_t one = std::int64_t{2} << At(kDigits, number % 3);
  const std::int64_t odd = 2 * (number % (one / 2)) + 1;
  const auto size = static_cast<float>(one + odd) / static_cast<float>(one);
  return number % 5 < 2 ? -size : size;
}

// Returns one of 48 numbers, at random: +-8/64 to 15/64 times 1, 2 or 4.
float Distinct(const RowSource& source, std::int64_t token,
               std::int64_t index) {
  const std::array<std::int64_t, 4> name = {
      token, index, source.layer, source.role == RowRole::kKey ? 1 : 2};
  const std::uint64_t bits = HashBytes(name.data(), sizeof(name), 0);
  const auto size = static_cast<float>((8 + bits % 8) << (bits >> 3) % 3) / 64;
  return (bits >> 32) % 2 == 0 ? size : -size;
}

// Returns a number that is easily stored wrongly: a zero of either sign, a
// number that is subnormal in f8 or in f16, or too large for them. With `all`,
// it may also be subnormal in f32, or infinite.
float Extreme(std::int64_t number, bool all) {
  constexpr std::array<float, 8> kExtremes = {
      0.0F,   -0.0F, 0.011F, -3e-6F,
      500.0F, -7e4F, 1e-39F, std::numeric_limits<float>::infinity()};
  return At(kExtremes, number % (all ? 8 : 6));
}

// The first element names token and layer, exactly in f32, f16 and bf16, and is
// not too large for f8. The other elements have fractions, so that rounding
// shows; for one token in eight they are ties, and for another one they may be
// extreme: half of these rows have zeros in all blocks but the first. The
// second element is a NaN now and then.
float Element(const RowSource& source, std::int64_t token, std::int64_t index) {
  if (source.distinct) return Distinct(source, token, index);
  if (source.plain) {
    const std::int64_t role = source.role == RowRole::kKey ? 1 : 2;
    const std::int64_t mixed =
        (token * 31 + source.layer * 17 + index * 11) * role % 199;
    return static_cast<float>(mixed - 99) / 99;
  }
  if (index == 0) {
    // bf16 has room for eight bits and an exponent.
    const std::int64_t tag = (token * 4 + source.layer) % 2048;
    return static_cast<float>((128 + tag % 128) << tag / 128) / 0x8000;
  }
  const std::int64_t role = source.role == RowRole::kKey ? 1 : 2;
  const std::int64_t mixed =
      (token * 13 + std::int64_t{source.layer} * 5 + index * 7) * role % 601;
  if (token % 8 == 3) return Tie(mixed);
  if (token % 8 == 6 && source.extremes) {
    const bool zero = token % 16 == 14 && index >= kBlockElements;
    return zero ? 0 : Extreme(token + index, source.nan);
  }
  return static_cast<float>(mixed) * 0.37F - 50.0F;
}

// Stores a NaN with a payload, which only a plain copy keeps.
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
                           const RowSource& source, bool gaps) {
  TensorView view = DenseView(nullptr, dtype, shape);
  if (gaps) {
    const auto size = static_cast<std::int64_t>(SizeOf(dtype));
    // Runs of blocks are contiguous: only between runs are there gaps.
    const std::int64_t run = RunBytes(dtype, shape[0]);
    view.stride[0] = 2 * size;
    view.stride[1] = (size == 0 ? 1 : 2) * run + size;
    view.stride[2] = view.stride[1] * shape[1] + (size == 0 ? 3 : 3 * size);
    view.stride[3] = view.stride[2] * shape[2];
  }
  bytes_.resize(AsSize(view.stride[3]));
  if (gaps) std::fill(bytes_.begin(), bytes_.end(), kNaNByte);
  view.data = bytes_.data();
  for (std::int64_t k = 0; k < shape[2]; ++k) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      const std::int64_t token =
          source.tokens.empty() ? source.first + k : At(source.tokens, k);
      std::byte* run = &At(bytes_, view.stride[1] * j + view.stride[2] * k);
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
      // The NaN is element 1 of the row, or the scale of its block.
      const std::int64_t nan = 1 - j * shape[0];
      if (token % 16 == 5 && nan >= 0 && nan < shape[0] && source.nan) {
        StoreNaN(run + view.stride[0] * nan, dtype);
      }
    }
  }
  return view;
}

void PoisonFreeCells(const KvView& view, const std::vector<CellEntry>& used,
                     VLayout v_layout) {
  std::vector<bool> is_used;
  if (!used.empty()) {
    is_used.resize(AsSize(used.back().cell) + 1);
  }
  for (const CellEntry& entry : used) {
    At(is_used, entry.cell) = true;
  }
  const auto poison = [&](const TensorView& tensor, VLayout layout) {
    for (std::int64_t cell = 0; cell < ColumnsOf(tensor, layout); ++cell) {
      const auto at = AsSize(cell);
      if (at < is_used.size() && is_used[at]) continue;
      TensorView row = RowOf(tensor, layout, cell);
      auto size = SizeOf(row.dtype);
      if (IsBlockDType(row.dtype)) {  // A run of blocks is one element.
        size = AsSize(row.stride[1]);
        row.shape[0] = 1;
      }
      for (std::int64_t i = 0; i < row.shape[0]; ++i) {
        for (std::int64_t j = 0; j < row.shape[1]; ++j) {
          // This is the cache's own memory, which only a test may write to.
          std::memset(const_cast<std::byte*>(row.at(i, j)), AsInt(kPoisonByte),
                      size);
        }
      }
    }
  };
  poison(view.key, VLayout::kPlain);
  poison(view.value, v_layout);
}

}  // namespace kvtwin::props
