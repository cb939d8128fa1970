// See WeighMany. Highway compiles this file once for each target.

#include <cstddef>
#include <cstdint>

#include "core/assert.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/attention_weigh.cc"
#include "hwy/foreach_target.h"
// These headers must come after the target is chosen.
#include "hwy/highway.h"
#include "optimized/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {

#if HWY_TARGET <= HWY_AVX3
// Stores the terms of weights as pairs of cells: the first terms from `scores`
// on, where the scores of the first query begin. Digits are cut off rather than
// rounded, which takes a third of the time.
struct StoreTerms {
  float* scores;
  std::size_t stride;  // From term to term.

  HWY_INLINE void operator()(const float* place, V a, V b) const {
    const hn::Repartition<std::uint16_t, F32> halves;
    float* to = scores + (place - scores) / 2;
    const V upper = hn::BitCast(F32(), hn::Set(I32(), ~0xFFFF));
    HWY_UNROLL(3)
    for (std::size_t term = 0; term < kMostTerms; ++term) {
      hn::Store(hn::BitCast(F32(), hn::ConcatOdd(halves, hn::BitCast(halves, b),
                                                 hn::BitCast(halves, a))),
                F32(), to + term * stride);
      a = hn::Sub(a, hn::And(a, upper));
      b = hn::Sub(b, hn::And(b, upper));
    }
  }
};

// Does what WeighMany does; each step is a call.
template <class Store>
void WeighWithCalls(const WeighedQueries& queries, float* scores,
                    const Store& store, Bf16Work& work, MultiplyBf16 multiply) {
  WeighQueries<kFewPieces>(
      queries, scores, store,
      [&](std::size_t /*cell*/, std::size_t /*piece*/) { multiply(work, 1); });
}

#ifdef KVTWIN_AMX
// Returns the number of the step that follows a piece if `steps` steps are
// spread over `pieces` pieces; `steps` if no step follows it.
constexpr std::size_t StepAfter(std::size_t piece, std::size_t pieces,
                                std::size_t steps) {
  std::size_t step = 0;
  while (step < steps && step * pieces / steps != piece) ++step;
  return step;
}

// Does what WeighMany does for kManyBf16Tiles tiles. The function contains the
// steps: for each query, the steps of a tile of pairs. In front of a call, or
// of a branch that is hard to foresee, the processor computes few weights while
// it multiplies. Requires: HasWholeBlocks(work), with these numbers of terms.
template <std::size_t a_count, std::size_t b_count, class Store>
void WeighWithSteps(const WeighedQueries& queries, float* scores,
                    const Store& store, Bf16Work& work) {
  KVTWIN_DCHECK(HasWholeBlocks(work));
  KVTWIN_DCHECK(work.products[0].a_terms.count == a_count);
  KVTWIN_DCHECK(work.products[0].b_terms.count == b_count);
  constexpr std::size_t kPieces = kManyBf16Tiles * kTile / kPiece;
  constexpr std::size_t kSteps = StepsOfTerms(a_count, b_count).count();
  static_assert(kSteps <= kPieces);
  TileBlock<AmxTiles, true> block;
  WeighQueries<kPieces>(
      queries, scores, store,
      [&](std::size_t /*cell*/, auto piece) HWY_ATTR
      __attribute__((always_inline)) {
        constexpr std::size_t kStep = StepAfter(piece, kPieces, kSteps);
        if constexpr (kStep < kSteps) {
          if (work.product == work.products.size()) return;
          DoStep<AmxTiles, true, a_count, b_count, kStep>(work, block);
        }
      });
}
#endif

void Weigh(const WeighedQueries& queries, float* scores, Bf16Terms terms,
           Bf16Work& work, MultiplyBf16 multiply) {
  const StoreTerms store = {.scores = scores, .stride = terms.stride};
#ifdef KVTWIN_AMX
  if (multiply == MultiplyInTiles<AmxTiles> &&
      queries.tiles.size() == kManyBf16Tiles && HasWholeBlocks(work)) {
    return WithTerms(work.products[0], [&](auto a_count, auto b_count) {
      if constexpr (a_count == 1) {
        WeighWithSteps<a_count, b_count>(queries, scores, StoreInPlace(), work);
      } else {
        WeighWithSteps<a_count, b_count>(queries, scores, store, work);
      }
    });
  }
#endif
  if (terms.count == 1) {
    WeighWithCalls(queries, scores, StoreInPlace(), work, multiply);
  } else {
    WeighWithCalls(queries, scores, store, work, multiply);
  }
}
#else
// These targets have no products of bf16: WeighMany is not called.
void Weigh(const WeighedQueries&, float*, Bf16Terms, Bf16Work&, MultiplyBf16) {}
#endif

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(Weigh);

void WeighMany(const WeighedQueries& queries, float* scores, Bf16Terms terms,
               Bf16Work& work, MultiplyBf16 multiply) {
  KVTWIN_DCHECK(Bf16Multiplier() != nullptr);
  KVTWIN_DCHECK(terms.count == 1 || terms.count == kMostTerms);
  KVTWIN_DCHECK(!work.last);
  HWY_DYNAMIC_DISPATCH(Weigh)(queries, scores, terms, work, multiply);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
