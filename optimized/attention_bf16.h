// Attention whose products are of bf16 and whose sums are f32, by the
// instructions that some x86 processors have for it. The steps around the
// products are those of attention_kernels.h.
//
// Two numbers of bf16 lie in the 32 bits of a float, the first in the lower
// half: the instructions add the two products of a pair to one sum.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_BF16_H_
#define KVTWIN_OPTIMIZED_ATTENTION_BF16_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimized/attention_kernels.h"

namespace kvtwin::optimized {

// c = a b, or c += a b. From `pairs` to the next multiple of kPairsOfTile, the
// pairs of a and b are zeros.
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
};
inline constexpr std::size_t kPairsOfTile = 16;

// Computes products that have equally many rows.
using MultiplyBf16 = void (*)(std::span<const Bf16Product> products);

// Returns the fastest way of this processor, or null if it has none, or if an
// older instruction set is selected (targets.h): AMX, or else AVX-512 BF16.
MultiplyBf16 Bf16Multiplier();
// From now on Bf16Multiplier returns `multiply` instead, where it would not
// return null. Null: as before. For tests, while no attention is computed.
void ForceBf16Multiplier(MultiplyBf16 multiply);

// Multiplies by AVX-512 BF16. Requires: Bf16Multiplier() is not null.
void MultiplyInRegisters(std::span<const Bf16Product> products);

// Rounds rows of `padded` numbers where they lie: a row begins with its pairs,
// and zeros up to a multiple of kPairsOfTile. Requires: Bf16Multiplier() is not
// null.
void RoundToBf16(float* rows, std::size_t padded, std::size_t count);

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
inline constexpr std::size_t kManyBf16Queries = 64;

// The floats of scratch that AttendManyInBf16 needs.
std::size_t ManyBf16Scratch(std::size_t k_head_dim, std::size_t v_head_dim);

// Does what AttendMany does, with up to kManyBf16Tiles tiles, of which all but
// the last are full, and with queries that RoundToBf16 has rounded.
void AttendManyInBf16(std::span<const GroupTile> tiles, const QueryHeads& head,
                      std::size_t queries_per_row, ScoreScale scale,
                      MultiplyBf16 multiply, float* scratch);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_BF16_H_
