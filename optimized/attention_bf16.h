// Attention whose products are of bf16 and whose sums are f32, by the
// instructions that some x86 processors have for it. The other steps are those
// of attention_kernels.h.
//
// Two numbers of bf16 lie in the 32 bits of a float, the first in the lower
// half: the instructions add the two products of a pair to one sum.
//
// Tiles of AMX also compute products of f32: three numbers of bf16, the terms,
// are exactly one of f32, and six products of terms are nearly its product with
// another. AMX computes 16 products of bf16 in the time of one of f32.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_BF16_H_
#define KVTWIN_OPTIMIZED_ATTENTION_BF16_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "optimized/attention_kernels.h"

namespace kvtwin::optimized {

// The largest number of terms, and the numbers of bf16 whose sum is a number
// of a dtype.
inline constexpr std::size_t kMostTerms = 3;
constexpr std::size_t TermsOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kF8:
      return 1;
    case DType::kF16:  // 11 bits.
    case DType::kQ4:   // At most 4 bits times 11.
      return 2;
    default:
      return kMostTerms;
  }
}

// A matrix that is a sum of `count` matrices, the larger numbers first.
struct Bf16Terms {
  std::size_t count = 1;
  std::size_t stride = 0;  // Pairs from term to term.
};

// c = a b, or c += a b. From `pairs` to the next multiple of kPairsOfTile, the
// pairs of a and b are zeros. Products of terms i and j with i + j >=
// kMostTerms are left out. Both factors have one term, or a has kMostTerms.
struct Bf16Product {
  const float* a;     // [pairs, rows], a pair of elements of a row.
  std::size_t a_row;  // Pairs from row to row.
  std::size_t rows;
  std::size_t pairs;
  const float* b;       // [columns, pairs], a pair of elements of a column.
  std::size_t columns;  // A multiple of kHeadPadding.
  float* c;             // [columns, rows]
  std::size_t c_row;    // Numbers from row to row.
  bool add;
  Bf16Terms a_terms = {};
  Bf16Terms b_terms = {};
};
inline constexpr std::size_t kPairsOfTile = 16;

// Products that are computed one after another, in steps, so that other work
// can be done between them.
struct Bf16Work {
  std::span<const Bf16Product> products;
  // Whether the last step releases the tiles. Otherwise other work follows,
  // which takes over `configured`.
  bool last = true;
  // Where the next step begins.
  std::size_t product = 0;
  std::size_t row = 0;
  std::size_t column = 0;
  std::size_t pair = 0;
  std::size_t terms = 0;
  std::size_t configured = 0;  // The rows for which tiles are configured.
};

// Computes the next steps of the work, at most `steps`.
using MultiplyBf16 = void (*)(Bf16Work& work, std::size_t steps);
inline constexpr std::size_t kAllSteps =
    std::numeric_limits<std::size_t>::max();

// Returns the fastest way of this processor, or null if it has none, or if an
// older instruction set is selected (targets.h): AMX, or else AVX-512 BF16.
MultiplyBf16 Bf16Multiplier();
// From now on Bf16Multiplier returns `multiply` instead, where it would not
// return null. Null: as before. For tests, while no attention is computed.
void ForceBf16Multiplier(MultiplyBf16 multiply);

// Whether pairs of few queries and of rows of a dtype are multiplied in less
// time than their f32. AMD's processors do as many products of each since Zen
// 5, which HasLargeFirstLevel tells from others with MultiplyInRegisters: then
// this is so for f8, which becomes bf16 faster than f32. True while a
// multiplier is forced.
bool PairsOfFewPay(DType dtype);

// Returns Bf16Multiplier() if it is faster than f32 for products of terms, or
// null:
// tiles of AMX.
MultiplyBf16 TermsMultiplier();

// Multiplies by AVX-512 BF16, all products in one step. Requires:
// Bf16Multiplier() is not null, and factors of one term.
void MultiplyInRegisters(Bf16Work& work, std::size_t steps);

// Rounds queries as AttendFewInBf16 takes them for such keys.
void RoundFewToBf16(const TileRows& keys, MultiplyBf16 multiply, float* rows,
                    std::size_t padded, std::size_t count);

// Does what AttendFew does, with queries that RoundFewToBf16 has rounded, for
// the same `multiply`. Rows of q8_0 are multiplied as integers
// (attention_q8.h); those of bf16 and f8 as pairs if `multiply` is
// MultiplyInRegisters.
void AttendFewInBf16(const AttentionTile& tile, const QueryHeads* heads,
                     std::size_t head_count, ScoreScale scale,
                     MultiplyBf16 multiply, float* scratch);

// Tiles and queries that AttendManyInBf16 computes at once. The sums of AMX are
// loaded and stored for these tiles together, which takes longer than the
// products of one tile.
inline constexpr std::size_t kManyBf16Tiles = 4;
inline constexpr std::size_t kManyBf16Queries = 32;

// The terms of the factors. With one term each, numbers are rounded to bf16.
struct ManyTerms {
  std::size_t queries = 1;  // And weights.
  std::size_t keys = 1;
  std::size_t values = 1;
};

// Replaces the scores [width, count] of queries by their weights, which are 0
// for cells that are not seen; `width` counts the cells of full tiles. Weights
// of kMostTerms terms become pairs of cells, [width / 2, count], the first
// terms where the scores were; weights of one term stay numbers of f32.
// Meanwhile, does steps of `work`: the unit for tiles multiplies while the
// vectors compute weights. Requires: Bf16Multiplier() is not null; weights have
// one term or kMostTerms; !work.last.
void WeighMany(const WeighedQueries& queries, float* scores, Bf16Terms terms,
               Bf16Work& work, MultiplyBf16 multiply);

// The floats of scratch that AttendManyInBf16 needs.
std::size_t ManyBf16Scratch(std::size_t k_head_dim, std::size_t v_head_dim,
                            ManyTerms terms);

// Splits rows of `padded` numbers into terms: the first terms lie where the
// rows were, the others behind the place of all rows. Requires:
// Bf16Multiplier() is not null.
void SplitQueries(float* rows, std::size_t padded, std::size_t count,
                  std::size_t terms);

// Does what AttendMany does, with up to kManyBf16Tiles tiles, of which all but
// the last are full, and with queries that SplitQueries has split.
void AttendManyInBf16(std::span<const GroupTile> tiles, const QueryHeads& head,
                      std::size_t queries_per_row, ScoreScale scale,
                      ManyTerms terms, MultiplyBf16 multiply, float* scratch);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_BF16_H_
