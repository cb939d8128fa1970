// Rows that become columns, for elements of 2 and 4 bytes. Included once for
// each target by the kernels, see targets.h.

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

#if defined(KVTWIN_OPTIMIZED_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTWIN_OPTIMIZED_TRANSPOSE_INL_H_
#undef KVTWIN_OPTIMIZED_TRANSPOSE_INL_H_
#else
#define KVTWIN_OPTIMIZED_TRANSPOSE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

// Calls write(tag, row, column, vector) for all elements of `count` rows of
// `columns`, which are whole blocks of 16 bytes: the vector has the elements of
// rows [row, row + its lanes) in that column. Rows up to the next cache line of
// a column are read, too.
template <class T, class Write>
HWY_INLINE void TransposeTile(const T* rows, std::size_t row_stride,
                              std::size_t count, const Write& write,
                              std::size_t columns) {
  const hn::CappedTag<T, 1> d;
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t c = 0; c < columns; ++c) {
      write(d, r, c, hn::LoadU(d, rows + r * row_stride + c));
    }
  }
}

#else

template <class D, class V>
HWY_INLINE void Zip(D d, V& low, V& high) {
  const V upper = hn::InterleaveUpper(d, low, high);
  low = hn::InterleaveLower(d, low, high);
  high = upper;
}

// A vector of 16-byte blocks, loaded `step` elements apart.
template <class T, class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const T* from, std::size_t step) {
  if constexpr (hn::MaxLanes(d) * sizeof(T) <= 16) {
    return hn::LoadU(d, from);
  } else {
    const hn::Half<D> half;
    const std::size_t blocks = hn::MaxLanes(half) * sizeof(T) / 16;
    return hn::Combine(d, LoadBlocks(half, from + step * blocks, step),
                       LoadBlocks(half, from, step));
  }
}

// Zips the vectors that are kHalf apart, then half of that, and so on.
template <std::size_t kHalf, std::size_t kCount, class D>
HWY_INLINE void ZipAll(D d, hn::Vec<D> (&vectors)[kCount]) {
  HWY_UNROLL(8)
  for (std::size_t i = 0; i < kCount; ++i) {
    if ((i & kHalf) == 0) Zip(d, vectors[i], vectors[i + kHalf]);
  }
  if constexpr (kHalf > 1) ZipAll<kHalf / 2>(d, vectors);
}

// Transposes square blocks of 16 bytes each way, side by side in a vector. Each
// round zips vectors that are half a block apart, then a quarter, and so on: it
// exchanges one bit of an element's row with one of its column.
template <class D, class T, class Write>
HWY_INLINE void TransposeBlocks(D d, const T* rows, std::size_t stride,
                                const Write& write) {
  constexpr std::size_t kRows = 16 / sizeof(T);
  hn::Vec<D> vectors[kRows];
  HWY_UNROLL(8)
  for (std::size_t i = 0; i < kRows; ++i) {
    vectors[i] = LoadBlocks(d, rows + i * stride, kRows * stride);
  }
  ZipAll<kRows / 2>(d, vectors);
  HWY_UNROLL(8)
  for (std::size_t i = 0; i < kRows; ++i) write(i, vectors[i]);
}

// Calls write(tag, row, column, vector) for all elements of `count` rows of
// `columns`, which are whole blocks of 16 bytes: the vector has the elements of
// rows [row, row + its lanes) in that column. Rows up to the next cache line of
// a column are read, too.
template <class T, class Write>
HWY_INLINE void TransposeTile(const T* rows, std::size_t row_stride,
                              std::size_t count, const Write& write,
                              std::size_t columns) {
  const hn::CappedTag<T, 64 / sizeof(T)> d;
  for (std::size_t c = 0; c < columns; c += 16 / sizeof(T)) {
    for (std::size_t r = 0; r < count; r += hn::Lanes(d)) {
      TransposeBlocks(d, rows + r * row_stride + c, row_stride,
                      [&](std::size_t column, auto vector)
                          HWY_ATTR { write(d, r, c + column, vector); });
    }
  }
}

#endif  // HWY_TARGET

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVTWIN_OPTIMIZED_TRANSPOSE_INL_H_
