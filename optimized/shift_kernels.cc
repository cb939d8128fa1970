// See shift_kernels.h. Highway compiles this file once for each target.
//
// Sums of products rely on -ffp-contract=off: a fused multiply-add rounds once
// where ShiftRow rounds twice.

#include "optimized/shift_kernels.h"

#include <algorithm>
#include <cstddef>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/shift_kernels.cc"
// These headers must come after the target is chosen.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/narrow-inl.h"
#include "optimized/targets.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using OneF32 = hn::CappedTag<float, 1>;

// SingleRows and NarrowRows handle rows of f32 and of narrower dtypes: how
// elements are stored (D is a tag of as many floats), and what results are
// stored.
struct SingleRows {
  using T = float;
  template <class D>
  using Stored = D;

  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D, hn::Vec<D> stored) {
    return stored;
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Added(D, hn::Vec<D>, hn::Vec<D> sum) {
    return sum;
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Rounded(D, hn::Vec<D> turned) {
    return turned;
  }
  // A NaN keeps its bits; a new NaN is the quiet NaN 0x7FC00000.
  template <class D>
  HWY_INLINE static hn::Vec<D> Turned(D d, hn::Vec<D> before,
                                      hn::Vec<D> turned) {
    const auto quiet = hn::BitCast(d, hn::Set(IntsOf<D>(), 0x7FC00000));
    const auto after = hn::IfThenElse(hn::IsNaN(turned), quiet, turned);
    return hn::IfThenElse(hn::IsNaN(before), before, after);
  }
};

template <class Format>
struct NarrowRows {
  using T = typename Format::T;
  template <class D>
  using Stored = hn::Rebind<T, D>;

  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D d, hn::Vec<Stored<D>> stored) {
    return Format::Floats(d, stored);
  }
  // A sum with a NaN is that NaN, made quiet: an element that was a quiet NaN
  // is unchanged, any other sum is rounded.
  template <class D>
  HWY_INLINE static hn::Vec<Stored<D>> Added(D d, hn::Vec<Stored<D>> before,
                                             hn::Vec<D> sum) {
    return hn::IfThenElse(Format::IsQuiet(d, before), before,
                          Format::Canonical(d, sum));
  }
  template <class D>
  HWY_INLINE static hn::Vec<Stored<D>> Rounded(D d, hn::Vec<D> turned) {
    return Format::Rounded(d, turned);
  }
  // An element that was a NaN keeps its bits.
  template <class D>
  HWY_INLINE static hn::Vec<Stored<D>> Turned(D d, hn::Vec<Stored<D>> before,
                                              hn::Vec<D> turned) {
    const auto rounded = Format::Rounded(d, turned);
    const auto quiet = hn::Set(Stored<D>(), Format::kQuiet);
    const auto after =
        hn::IfThenElse(Format::IsNaN(d, rounded), quiet, rounded);
    return hn::IfThenElse(Format::IsNaN(d, before), before, after);
  }
};

template <class Rows, class D>
HWY_INLINE void AddToVector(D d, typename Rows::T* elements, float offset) {
  const typename Rows::template Stored<D> stored;
  const auto before = hn::LoadU(stored, elements);
  const auto sum = hn::Add(Rows::Floats(d, before), hn::Set(d, offset));
  hn::StoreU(Rows::Added(d, before, sum), stored, elements);
}

template <class Rows>
HWY_INLINE void AddTo(typename Rows::T* elements, std::size_t count,
                      float offset) {
  const std::size_t lanes = hn::Lanes(F32());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    AddToVector<Rows>(F32(), elements + i, offset);
  }
  for (; i < count; ++i) AddToVector<Rows>(OneF32(), elements + i, offset);
}

// Turns the vectors at elements `x` and `y` of a head. The other element of
// each pair is in the other vector, or is a neighbour.
template <class Rows, bool kNeighbours, class D>
HWY_INLINE void TurnVectors(D d, typename Rows::T* head, std::size_t x,
                            std::size_t y, const Turns& turns) {
  const typename Rows::template Stored<D> stored;
  const auto x_cosines = hn::LoadU(d, turns.cosines + x);
  const auto y_cosines = hn::LoadU(d, turns.cosines + y);
  const auto x_sines = hn::LoadU(d, turns.sines + x);
  const auto y_sines = hn::LoadU(d, turns.sines + y);
  const auto x_before = hn::LoadU(stored, head + x);
  const auto y_before = hn::LoadU(stored, head + y);
  const auto x_float = Rows::Floats(d, x_before);
  const auto y_float = Rows::Floats(d, y_before);
  auto x_other = y_float;
  auto y_other = x_float;
  if constexpr (kNeighbours) {
    x_other = hn::Reverse2(d, x_float);
    y_other = hn::Reverse2(d, y_float);
  }
  const auto x_turned =
      hn::Add(hn::Mul(x_float, x_cosines), hn::Mul(x_other, x_sines));
  const auto y_turned =
      hn::Add(hn::Mul(y_float, y_cosines), hn::Mul(y_other, y_sines));
  // One test for both: a sum with a NaN is a NaN. (A sum of infinities may be
  // a NaN, too.)
  if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(hn::Add(x_turned, y_turned))))) {
    hn::StoreU(Rows::Rounded(d, x_turned), stored, head + x);
    hn::StoreU(Rows::Rounded(d, y_turned), stored, head + y);
  } else {
    hn::StoreU(Rows::Turned(d, x_before, x_turned), stored, head + x);
    hn::StoreU(Rows::Turned(d, y_before, y_turned), stored, head + y);
  }
}

template <class Rows>
HWY_INLINE void TurnHalvesOf(typename Rows::T* head, const Turns& turns) {
  const std::size_t lanes = hn::Lanes(F32());
  std::size_t p = 0;
  for (; p + lanes <= turns.pairs; p += lanes) {
    TurnVectors<Rows, /*kNeighbours=*/false>(F32(), head, p, p + turns.pairs,
                                             turns);
  }
  for (; p < turns.pairs; ++p) {
    TurnVectors<Rows, /*kNeighbours=*/false>(OneF32(), head, p, p + turns.pairs,
                                             turns);
  }
}

template <class Rows>
HWY_INLINE void TurnAdjacentOf(typename Rows::T* head, const Turns& turns) {
  const std::size_t end = 2 * turns.pairs;
  std::size_t i = 0;
  if constexpr (hn::MaxLanes(F32()) > 1) {
    const std::size_t lanes = hn::Lanes(F32());
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      TurnVectors<Rows, /*kNeighbours=*/true>(F32(), head, i, i + lanes, turns);
    }
    if (i + lanes <= end) {
      // A single vector is left: it is read twice, then written twice.
      TurnVectors<Rows, /*kNeighbours=*/true>(F32(), head, i, i, turns);
      i += lanes;
    }
  }
  for (; i < end; i += 2) {
    TurnVectors<Rows, /*kNeighbours=*/false>(OneF32(), head, i, i + 1, turns);
  }
}

// This is not inlined: each number of vectors would have a copy, for rows with
// a NaN.
template <class Rows, bool kNeighbours>
HWY_NOINLINE void TurnHead(typename Rows::T* head, const Turns& turns) {
  if constexpr (kNeighbours) {
    TurnAdjacentOf<Rows>(head, turns);
  } else {
    TurnHalvesOf<Rows>(head, turns);
  }
}

// Turns heads whose pairs are kVectors vectors. A line is read, then written,
// by few instructions, and lines in the order of their addresses: then AMD's
// processors fetch far enough ahead. Intel's take half as long for rows of 16
// bits if the program fetches.
template <class Rows, bool kNeighbours, std::size_t kVectors>
HWY_INLINE void TurnVectorsOf(typename Rows::T* heads, std::size_t count,
                              std::size_t head_dim, const Turns& turns) {
  const F32 d;
  const typename Rows::template Stored<F32> stored;
  const std::size_t lanes = hn::Lanes(d);
  constexpr std::size_t kAhead = 2048;  // Bytes from a fetch to its use.
  const bool fetches = sizeof(*heads) < sizeof(float) && IsIntel();
  hn::Vec<F32> cosines[kVectors];
  hn::Vec<F32> sines[kVectors];
  HWY_UNROLL(8)
  for (std::size_t v = 0; v < kVectors; ++v) {
    cosines[v] = hn::LoadU(d, turns.cosines + v * lanes);
    sines[v] = hn::LoadU(d, turns.sines + v * lanes);
  }
  for (std::size_t h = 0; h < count; ++h, heads += head_dim) {
    if (fetches) {
      const auto* ahead = reinterpret_cast<const std::byte*>(heads) + kAhead;
      for (std::size_t i = 0; i < kVectors * lanes * sizeof(*heads); i += 64) {
        __builtin_prefetch(ahead + i, /*rw=*/1);
      }
    }
    hn::Vec<F32> before[kVectors];
    hn::Vec<F32> turned[kVectors];
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      before[v] = Rows::Floats(d, hn::LoadU(stored, heads + v * lanes));
    }
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto other = kNeighbours ? hn::Reverse2(d, before[v])
                                     : before[(v + kVectors / 2) % kVectors];
      turned[v] =
          hn::Add(hn::Mul(before[v], cosines[v]), hn::Mul(other, sines[v]));
    }
    auto sum = hn::Zero(d);
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; v += 2) {
      sum = hn::MulAdd(turned[v], turned[v + 1], sum);
    }
    // One test for all, as in TurnVectors: a product with a NaN is a NaN. (So
    // may be the sum of products of large numbers.)
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(sum)))) {
      TurnHead<Rows, kNeighbours>(heads, turns);
      continue;
    }
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      hn::StoreU(Rows::Rounded(d, turned[v]), stored, heads + v * lanes);
    }
  }
}

template <class Rows, bool kNeighbours>
HWY_INLINE void Turn(typename Rows::T* heads, std::size_t count,
                     std::size_t head_dim, const Turns& turns) {
  if constexpr (hn::MaxLanes(F32()) > 1) {
    const std::size_t vectors = 2 * turns.pairs / hn::Lanes(F32());
    const bool whole = 2 * turns.pairs % hn::Lanes(F32()) == 0;
    if (whole && vectors == 4) {
      return TurnVectorsOf<Rows, kNeighbours, 4>(heads, count, head_dim, turns);
    }
    if (whole && vectors == 8) {
      return TurnVectorsOf<Rows, kNeighbours, 8>(heads, count, head_dim, turns);
    }
  }
  for (std::size_t h = 0; h < count; ++h) {
    TurnHead<Rows, kNeighbours>(heads + h * head_dim, turns);
  }
}

// Calls does(rows) with the row type that is stored as `dtype`.
template <class Does>
HWY_INLINE void WithRows(DType dtype, const Does& does) {
  if (dtype == DType::kF32) return does(SingleRows());
  if (dtype == DType::kF16) return does(NarrowRows<HalfFormat>());
  if (dtype == DType::kBF16) return does(NarrowRows<UpperFormat>());
  does(NarrowRows<F8Format>());
}

template <class Rows>
HWY_INLINE typename Rows::T* ElementsOf(Rows, std::byte* bytes) {
  return reinterpret_cast<typename Rows::T*>(bytes);
}

void AddToAny(DType dtype, std::byte* elements, std::size_t count,
              float offset) {
  WithRows(dtype, [&](auto rows) HWY_ATTR {
    AddTo<decltype(rows)>(ElementsOf(rows, elements), count, offset);
  });
}

template <bool kNeighbours>
HWY_INLINE void TurnAny(DType dtype, std::byte* heads, std::size_t count,
                        std::size_t head_dim, const Turns& turns) {
  WithRows(dtype, [&](auto rows) HWY_ATTR {
    Turn<decltype(rows), kNeighbours>(ElementsOf(rows, heads), count, head_dim,
                                      turns);
  });
}

void TurnAdjacentAny(DType dtype, std::byte* heads, std::size_t count,
                     std::size_t head_dim, const Turns& turns) {
  TurnAny</*kNeighbours=*/true>(dtype, heads, count, head_dim, turns);
}
void TurnHalvesAny(DType dtype, std::byte* heads, std::size_t count,
                   std::size_t head_dim, const Turns& turns) {
  TurnAny</*kNeighbours=*/false>(dtype, heads, count, head_dim, turns);
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(AddToAny);
HWY_EXPORT(TurnAdjacentAny);
HWY_EXPORT(TurnHalvesAny);

void AddToElements(DType dtype, std::byte* elements, std::size_t count,
                   float offset) {
  HWY_DYNAMIC_DISPATCH(AddToAny)(dtype, elements, count, offset);
}

void TurnAdjacent(DType dtype, std::byte* heads, std::size_t count,
                  std::size_t head_dim, const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnAdjacentAny)(dtype, heads, count, head_dim, turns);
}

void TurnHalves(DType dtype, std::byte* heads, std::size_t count,
                std::size_t head_dim, const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnHalvesAny)(dtype, heads, count, head_dim, turns);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
