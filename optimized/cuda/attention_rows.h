// Rows in shared memory as the operands of products, for attention_kernel.h.
//
// A product is one of tensor cores: 16 rows of 16 numbers times 16 rows of 8
// numbers, of 16 bits each, summed as f32. The left operand is queries or
// weights: rows 0 to 7 are those of 8 heads, rounded, and rows 8 to 15 the
// remainders of rounding. This doubles the digits of these f32 at no cost: the
// rows would otherwise be padding. The sums of rows h and h + 8 are in the same
// lane.
//
// The right operand is K or V. Numbers of more than 16 bits are split as well:
// into the upper 8 digits, the next 8 and the last, which together are the f32
// exactly.

#ifndef KVTWIN_OPTIMIZED_CUDA_ATTENTION_ROWS_H_
#define KVTWIN_OPTIMIZED_CUDA_ATTENTION_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/tensor.h"
#include "optimized/cuda/elements.h"
#include "optimized/cuda/intrinsics.h"

namespace kvtwin::optimized::cuda {

// Unrolls loops over registers.
#ifdef __CUDACC__
#define KVTWIN_UNROLL _Pragma("unroll")
#define KVTWIN_UNROLL_4 _Pragma("unroll 4")
#else
#define KVTWIN_UNROLL
#define KVTWIN_UNROLL_4
#endif

inline constexpr int kTile = 32;        // Cells; a warp has as many lanes.
inline constexpr int kGroup = 8;        // Heads in a group.
inline constexpr int kPieceDims = 128;  // Elements of K or V in a piece.
inline constexpr int kStep = 16;        // Numbers that a product sums over.
inline constexpr int kGranule = 16;     // Bytes in a granule.
static_assert(kTile == kTileCells);

// The dtype of K and V, if both have it, lie on 16-byte boundaries and have
// whole steps of elements; kAny is everything else. It is slower, because it
// reads element by element.
enum class Form { kF16, kBF16, kF8, kAny };

template <Form kForm>
inline constexpr int kRightParts = kForm == Form::kAny ? 3 : 1;
template <Form kForm>
inline constexpr int kLeftParts = kForm == Form::kAny ? 2 : 1;

// This lane's share of an operand. With g = lane / 4 and t = lane % 4, left:
// rows g and g + 8 at 2t and 2t + 1, then at 2t + 8 and 2t + 9; right: 2t and
// 2t + 1 of column g, then 2t + 8 and 2t + 9. A lane's sums are columns 2t and
// 2t + 1 of row g, then of row g + 8.
template <Form kForm>
struct Left {
  uint4 part[kLeftParts<kForm>];
};
template <Form kForm>
struct Right {
  uint2 part[kRightParts<kForm>];
};

// Returns the first digits of two numbers, and leaves the rest in them.
template <Form kForm>
__device__ __forceinline__ unsigned TakeDigits(float& x, float& y) {
  if constexpr (kForm == Form::kF16 || kForm == Form::kF8) {
    const unsigned halves = PackHalf2(x, y);
    x -= HalfFormat::Float(static_cast<std::uint16_t>(halves));
    y -= HalfFormat::Float(static_cast<std::uint16_t>(halves >> 16));
    return halves;
  } else {
    constexpr unsigned kUpper = 0xFFFF0000;
    const unsigned low = __float_as_uint(x) & kUpper;
    const unsigned high = __float_as_uint(y) & kUpper;
    x -= __uint_as_float(low);
    y -= __uint_as_float(high);
    return low >> 16 | high;
  }
}

// Splits a row's numbers at 2t and 2t + 1 (near), and 2t + 8 and 2t + 9 (far).
template <Form kForm>
__device__ __forceinline__ Left<kForm> LeftOf(float2 near, float2 far) {
  Left<kForm> left;
  left.part[0].x = TakeDigits<kForm>(near.x, near.y);
  left.part[0].y = TakeDigits<kForm>(near.x, near.y);
  left.part[0].z = TakeDigits<kForm>(far.x, far.y);
  left.part[0].w = TakeDigits<kForm>(far.x, far.y);
  if constexpr (kForm == Form::kAny) {
    left.part[1].x = TakeDigits<kForm>(near.x, near.y);
    left.part[1].y = 0;
    left.part[1].z = TakeDigits<kForm>(far.x, far.y);
    left.part[1].w = 0;
  }
  return left;
}

// Does the same for a column's numbers; `near_mask` and `far_mask` have zeros
// for missing numbers.
__device__ __forceinline__ Right<Form::kAny> RightOf(float2 near, float2 far,
                                                     unsigned near_mask,
                                                     unsigned far_mask) {
  Right<Form::kAny> right;
  KVTWIN_UNROLL
  for (int i = 0; i < kRightParts<Form::kAny>; ++i) {
    right.part[i].x = TakeDigits<Form::kAny>(near.x, near.y) & near_mask;
    right.part[i].y = TakeDigits<Form::kAny>(far.x, far.y) & far_mask;
  }
  return right;
}

// For kAny, adds all products of digits but those below 2^-24 of the largest.
template <Form kForm>
__device__ __forceinline__ void AddProduct(const Left<kForm>& left,
                                           const Right<kForm>& right,
                                           float (&sums)[4]) {
  if constexpr (kForm == Form::kF16 || kForm == Form::kF8) {
    MmaF16(left.part[0], right.part[0], sums);
  } else {
    if constexpr (kForm == Form::kAny) {
      MmaBF16(left.part[0], right.part[2], sums);
      MmaBF16(left.part[1], right.part[0], sums);
      MmaBF16(left.part[0], right.part[1], sums);
    }
    MmaBF16(left.part[0], right.part[0], sums);
  }
}

// The orders of elements and cells.
//
// Summation may run in any order that left and right share, and columns may
// come in any order that the sums are then written in. f8 is loaded two at a
// time where f16 is loaded one at a time, which gives a lane neighbours.

// The first of the two elements that a lane has as `near` or `far` of a step.
template <Form kForm>
__device__ __forceinline__ int KeyDim(int lane, bool far) {
  const int t = lane % 4;
  return kForm == Form::kF8 ? 4 * t + (far ? 2 : 0) : 2 * t + (far ? 8 : 0);
}

// The cell of a tile that is summed as the `k`-th: f8 by column needs another
// order.
template <Form kForm, bool kColumns>
__device__ __forceinline__ int CellAt(int k) {
  if constexpr (kForm == Form::kF8 && kColumns) {
    const int i = k % kStep;
    return k - i + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
  } else {
    return k;
  }
}

// The index, within 16 neighbouring elements of V, of column `column` in the
// first or second 8.
template <Form kForm, bool kColumns>
__device__ __forceinline__ int ValueDim(int half, int column) {
  if constexpr (kForm == Form::kF8 && !kColumns) return 2 * column + half;
  return 8 * half + column;
}

// How pieces are loaded.

// A piece of a tile in shared memory: runs, `pitch` bytes apart. K has a run
// for each cell; so does V, or one for each element (by column). For kAny, run
// i begins shifts[i] bytes late, as far as it was from a 16-byte boundary.
struct Piece {
  const std::byte* runs;
  int pitch;
  const std::uint8_t* shifts;
  DType dtype;
  int dims;  // Number of elements of a row in this piece.

  // Element i of a run.
  __device__ float At(int run, int i) const {
    const std::byte* from = runs + run * pitch + shifts[run];
    switch (dtype) {
      case DType::kF32:
        return reinterpret_cast<const float*>(from)[i];
      case DType::kF16:
        return HalfFormat::Float(
            reinterpret_cast<const std::uint16_t*>(from)[i]);
      case DType::kBF16:
        return UpperFormat::Float(
            reinterpret_cast<const std::uint16_t*>(from)[i]);
      case DType::kF8:
        return F8Format::Float(static_cast<std::uint8_t>(from[i]));
      case DType::kQ8:
        return Q8Format::Number(from + i / 32 * int{Q8Format::kBytes},
                                static_cast<unsigned>(i % 32));
      default:
        return Q4Format::Number(from + i / 32 * int{Q4Format::kBytes},
                                static_cast<unsigned>(i % 32));
    }
  }
};

// Loads elements from kStep * step on of the K rows of a tile's cells: right[i]
// has those of cells 8i to 8i + 7 (in the order of CellAt).
template <Form kForm, bool kColumns>
__device__ __forceinline__ void LoadKeys(const Piece& piece, int lane, int step,
                                         Right<kForm> (&right)[kTile / 8]) {
  if constexpr (kForm == Form::kAny) {
    const int dim = kStep * step;
    const int near = dim + KeyDim<kForm>(lane, false);
    const int far = dim + KeyDim<kForm>(lane, true);
    KVTWIN_UNROLL
    for (int i = 0; i < kTile / 8; ++i) {
      const auto at = [&](int j) {
        return j < piece.dims ? piece.At(8 * i + lane / 4, j) : 0.0F;
      };
      right[i] =
          RightOf({at(near), at(near + 1)}, {at(far), at(far + 1)}, ~0U, ~0U);
    }
  } else if constexpr (kForm == Form::kF8) {
    const int cell = CellAt<kForm, kColumns>(lane);
    const uint4 four =
        LdMatrix4(piece.runs + cell * piece.pitch + kGranule * step);
    const unsigned bytes[4] = {four.x, four.y, four.z, four.w};
    KVTWIN_UNROLL
    for (int i = 0; i < kTile / 8; ++i) {
      right[i].part[0] = {HalvesFromF8(bytes[i]), HalvesFromF8(bytes[i] >> 16)};
    }
  } else {
    // Lanes 0 to 7 point to the first 8 elements of 8 cells, the next 8 lanes
    // to their next 8 elements; the other lanes point to those of the next 8
    // cells.
    const int cell = lane / 16 * 8 + lane % 8;
    const std::byte* from = piece.runs + cell * piece.pitch +
                            2 * kGranule * step + lane / 8 % 2 * kGranule;
    KVTWIN_UNROLL
    for (int i = 0; i < kTile / 8; i += 2) {
      const uint4 four = LdMatrix4(from + 8 * i * piece.pitch);
      right[i].part[0] = {four.x, four.y};
      right[i + 1].part[0] = {four.z, four.w};
    }
  }
}

// Which of the cells that this lane sums over are visible: 16 bits set, or
// none, for each cell, as `near` and `far` of both steps of a tile.
template <Form kForm, bool kColumns>
__device__ __forceinline__ void SpreadWord(unsigned word, int lane,
                                           unsigned (&visible)[kTile / 8]) {
  KVTWIN_UNROLL
  for (int i = 0; i < kTile / 8; ++i) {
    const int cell = CellAt<kForm, kColumns>(8 * i + lane % 4 * 2);
    const unsigned two = word >> cell & 3;
    visible[i] = (two & 1) * 0xFFFFU | (two >> 1) * 0xFFFF0000U;
  }
}

// Replaces the elements of hidden cells by zeros.
template <Form kForm>
__device__ __forceinline__ void HideValues(const unsigned (&visible)[kTile / 8],
                                           Right<kForm> (&right)[2][2]) {
  KVTWIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint2& part = right[i / 2][i % 2].part[0];
    part.x &= visible[i / 2 * 2];
    part.y &= visible[i / 2 * 2 + 1];
  }
}

// Loads elements from 16 * sixteen on of the V rows of a tile's cells, zeros
// for hidden cells: right[step][half] has those of the cells of a step, in the
// order of ValueDim.
template <Form kForm, bool kColumns>
__device__ __forceinline__ void LoadValues(const Piece& piece, int lane,
                                           int sixteen,
                                           const unsigned (&visible)[kTile / 8],
                                           Right<kForm> (&right)[2][2]) {
  if constexpr (kForm == Form::kAny) {
    KVTWIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int step = i / 2;
      const int dim = 16 * sixteen + i % 2 * 8 + lane / 4;
      const int cell = kStep * step + lane % 4 * 2;
      const auto at = [&](int k) {
        if (dim >= piece.dims) return 0.0F;
        return kColumns ? piece.At(dim, k) : piece.At(k, dim);
      };
      right[step][i % 2] =
          RightOf({at(cell), at(cell + 1)}, {at(cell + 8), at(cell + 9)},
                  visible[2 * step], visible[2 * step + 1]);
    }
  } else if constexpr (kColumns && kForm == Form::kF8) {
    const int dim = 16 * sixteen + lane / 16 * 8 + lane % 8;
    const uint4 four =
        LdMatrix4(piece.runs + dim * piece.pitch + lane / 8 % 2 * kGranule);
    const unsigned bytes[4] = {four.x, four.y, four.z, four.w};
    KVTWIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      right[i % 2][i / 2].part[0] = {HalvesFromF8(bytes[i]),
                                     HalvesFromF8(bytes[i] >> 16)};
    }
  } else if constexpr (kColumns) {
    const std::byte* from = piece.runs +
                            (16 * sixteen + lane % 8) * piece.pitch +
                            lane / 8 * kGranule;
    KVTWIN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint4 four = LdMatrix4(from + 8 * half * piece.pitch);
      right[0][half].part[0] = {four.x, four.y};
      right[1][half].part[0] = {four.z, four.w};
    }
  } else if constexpr (kForm == Form::kF8) {
    // Two elements of a cell are moved as one of 16 bits: a lane gets two
    // elements of one cell and two of the next.
    const uint4 four =
        LdMatrix4Trans(piece.runs + lane * piece.pitch + kGranule * sixteen);
    const unsigned bytes[4] = {four.x, four.y, four.z, four.w};
    unsigned halves[2][4];
    KVTWIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const unsigned pair = HalvesFromF8(bytes[i]);
      const unsigned next = HalvesFromF8(bytes[i] >> 16);
      halves[0][i] = (pair & 0xFFFF) | next << 16;
      halves[1][i] = pair >> 16 | (next & 0xFFFF0000);
    }
    KVTWIN_UNROLL
    for (int half = 0; half < 2; ++half) {
      right[0][half].part[0] = {halves[half][0], halves[half][1]};
      right[1][half].part[0] = {halves[half][2], halves[half][3]};
    }
  } else {
    const std::byte* from = piece.runs + lane % 16 * piece.pitch +
                            2 * kGranule * sixteen + lane / 16 * kGranule;
    KVTWIN_UNROLL
    for (int step = 0; step < 2; ++step) {
      const uint4 four = LdMatrix4Trans(from + kStep * step * piece.pitch);
      right[step][0].part[0] = {four.x, four.y};
      right[step][1].part[0] = {four.z, four.w};
    }
  }
  if constexpr (kForm != Form::kAny) HideValues(visible, right);
}

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ATTENTION_ROWS_H_
