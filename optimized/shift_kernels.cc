// See shift_kernels.h. Highway compiles this file once for each target.
//
// Sums of products rely on -ffp-contract=off: a fused multiply-add rounds once
// where ShiftRow rounds twice.

#include "optimized/shift_kernels.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/shift_kernels.cc"
// After the target is chosen.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/half-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using OneF32 = hn::CappedTag<float, 1>;

// Rows of f32 and of f16: the elements as they are stored, D being the tag of
// as many floats, and what becomes of them.
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
  // A NaN keeps its bits; what becomes one is the quiet NaN 0x7FC00000.
  template <class D>
  HWY_INLINE static hn::Vec<D> Turned(D d, hn::Vec<D> before,
                                      hn::Vec<D> turned) {
    const auto quiet = hn::BitCast(d, hn::Set(IntsOf<D>(), 0x7FC00000));
    const auto after = hn::IfThenElse(hn::IsNaN(turned), quiet, turned);
    return hn::IfThenElse(hn::IsNaN(before), before, after);
  }
};

struct HalfRows {
  using T = std::uint16_t;
  template <class D>
  using Stored = HalvesOf<D>;

  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D d, hn::Vec<HalvesOf<D>> stored) {
    return FromHalves(d, stored);
  }
  // A sum with a NaN is that NaN, made quiet: one that was quiet did not
  // change, any other one is rounded.
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Added(D d, hn::Vec<HalvesOf<D>> before,
                                               hn::Vec<D> sum) {
    return hn::IfThenElse(IsAbove(d, before, 0x7DFF), before,
                          ToCanonicalHalves(d, sum));
  }
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Turned(D d,
                                                hn::Vec<HalvesOf<D>> before,
                                                hn::Vec<D> turned) {
    const auto rounded = ToHalves(d, turned);
    const auto nan = IsNaN16(d, rounded);
    // What was a NaN still is one, if perhaps another.
    if (HWY_LIKELY(hn::AllFalse(HalvesOf<D>(), nan))) return rounded;
    const auto quiet = hn::Set(HalvesOf<D>(), 0x7E00);
    const auto after = hn::IfThenElse(nan, quiet, rounded);
    return hn::IfThenElse(IsNaN16(d, before), before, after);
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

// Turns a vector of x and one of y, elements `x` and `y` of a head.
template <class Rows, class D>
HWY_INLINE void TurnPairs(D d, typename Rows::T* head, std::size_t x,
                          std::size_t y, hn::Vec<D> cosines, hn::Vec<D> x_sines,
                          hn::Vec<D> y_sines) {
  const typename Rows::template Stored<D> stored;
  const auto x_before = hn::LoadU(stored, head + x);
  const auto y_before = hn::LoadU(stored, head + y);
  const auto x_float = Rows::Floats(d, x_before);
  const auto y_float = Rows::Floats(d, y_before);
  const auto x_turned =
      hn::Add(hn::Mul(x_float, cosines), hn::Mul(y_float, x_sines));
  const auto y_turned =
      hn::Add(hn::Mul(y_float, cosines), hn::Mul(x_float, y_sines));
  hn::StoreU(Rows::Turned(d, x_before, x_turned), stored, head + x);
  hn::StoreU(Rows::Turned(d, y_before, y_turned), stored, head + y);
}

// Of so many heads, the vectors of x and of y at elements `x` and `y`.
template <class Rows, class D>
HWY_INLINE void TurnPairsOf(D d, typename Rows::T* heads, std::size_t count,
                            std::size_t head_dim, std::size_t x, std::size_t y,
                            const Turns& turns) {
  const auto cosines = hn::LoadU(d, turns.cosines + x);
  const auto x_sines = hn::LoadU(d, turns.sines + x);
  const auto y_sines = hn::LoadU(d, turns.sines + y);
  for (std::size_t h = 0; h < count; ++h, heads += head_dim) {
    TurnPairs<Rows>(d, heads, x, y, cosines, x_sines, y_sines);
  }
}

template <class Rows>
HWY_INLINE void TurnHalvesOf(typename Rows::T* heads, std::size_t count,
                             std::size_t head_dim, const Turns& turns) {
  const std::size_t lanes = hn::Lanes(F32());
  constexpr std::size_t kHeads = 8;  // So many stay in the nearest cache.
  while (count > 0) {
    const std::size_t some = std::min(count, kHeads);
    std::size_t p = 0;
    for (; p + lanes <= turns.pairs; p += lanes) {
      TurnPairsOf<Rows>(F32(), heads, some, head_dim, p, p + turns.pairs,
                        turns);
    }
    for (; p < turns.pairs; ++p) {
      TurnPairsOf<Rows>(OneF32(), heads, some, head_dim, p, p + turns.pairs,
                        turns);
    }
    heads += some * head_dim;
    count -= some;
  }
}

// Turns a vector of pairs, from element i of a head on.
template <class Rows, class D>
HWY_INLINE void TurnNeighbours(D d, typename Rows::T* head, std::size_t i,
                               const Turns& turns) {
  const typename Rows::template Stored<D> stored;
  const auto before = hn::LoadU(stored, head + i);
  const auto floats = Rows::Floats(d, before);
  const auto turned =
      hn::Add(hn::Mul(floats, hn::LoadU(d, turns.cosines + i)),
              hn::Mul(hn::Reverse2(d, floats), hn::LoadU(d, turns.sines + i)));
  hn::StoreU(Rows::Turned(d, before, turned), stored, head + i);
}

template <class Rows>
HWY_INLINE void TurnAdjacentOf(typename Rows::T* heads, std::size_t count,
                               std::size_t head_dim, const Turns& turns) {
  const std::size_t lanes = hn::Lanes(F32());
  const std::size_t end = 2 * turns.pairs;
  for (std::size_t h = 0; h < count; ++h, heads += head_dim) {
    std::size_t i = 0;
    if constexpr (hn::MaxLanes(F32()) > 1) {
      for (; i + lanes <= end; i += lanes) {
        TurnNeighbours<Rows>(F32(), heads, i, turns);
      }
    }
    for (; i < end; i += 2) {
      TurnPairsOf<Rows>(OneF32(), heads, 1, head_dim, i, i + 1, turns);
    }
  }
}

void AddToF32(float* elements, std::size_t count, float offset) {
  AddTo<SingleRows>(elements, count, offset);
}
void AddToF16(std::uint16_t* elements, std::size_t count, float offset) {
  AddTo<HalfRows>(elements, count, offset);
}
void TurnAdjacentF32(float* heads, std::size_t count, std::size_t head_dim,
                     const Turns& turns) {
  TurnAdjacentOf<SingleRows>(heads, count, head_dim, turns);
}
void TurnAdjacentF16(std::uint16_t* heads, std::size_t count,
                     std::size_t head_dim, const Turns& turns) {
  TurnAdjacentOf<HalfRows>(heads, count, head_dim, turns);
}
void TurnHalvesF32(float* heads, std::size_t count, std::size_t head_dim,
                   const Turns& turns) {
  TurnHalvesOf<SingleRows>(heads, count, head_dim, turns);
}
void TurnHalvesF16(std::uint16_t* heads, std::size_t count,
                   std::size_t head_dim, const Turns& turns) {
  TurnHalvesOf<HalfRows>(heads, count, head_dim, turns);
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(AddToF32);
HWY_EXPORT(AddToF16);
HWY_EXPORT(TurnAdjacentF32);
HWY_EXPORT(TurnAdjacentF16);
HWY_EXPORT(TurnHalvesF32);
HWY_EXPORT(TurnHalvesF16);

void AddToElements(float* elements, std::size_t count, float offset) {
  HWY_DYNAMIC_DISPATCH(AddToF32)(elements, count, offset);
}
void AddToElements(std::uint16_t* elements, std::size_t count, float offset) {
  HWY_DYNAMIC_DISPATCH(AddToF16)(elements, count, offset);
}

void TurnAdjacent(float* heads, std::size_t count, std::size_t head_dim,
                  const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnAdjacentF32)(heads, count, head_dim, turns);
}
void TurnAdjacent(std::uint16_t* heads, std::size_t count, std::size_t head_dim,
                  const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnAdjacentF16)(heads, count, head_dim, turns);
}

void TurnHalves(float* heads, std::size_t count, std::size_t head_dim,
                const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnHalvesF32)(heads, count, head_dim, turns);
}
void TurnHalves(std::uint16_t* heads, std::size_t count, std::size_t head_dim,
                const Turns& turns) {
  HWY_DYNAMIC_DISPATCH(TurnHalvesF16)(heads, count, head_dim, turns);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
