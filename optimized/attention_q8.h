// Attention of few queries over rows of q8_0 with products of integers, by
// AVX-512 VNNI, which every processor with AVX-512 BF16 has. The numbers of K
// and V are taken as they are. Queries and weights become integers in units of
// the largest one: of 16 bits each in the place of bf16, or of 24 and 30 bits
// in the place of f32.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_Q8_H_
#define KVTWIN_OPTIMIZED_ATTENTION_Q8_H_

#include <cstddef>
#include <optional>

#include "optimized/attention_kernels.h"
#include "optimized/tile_walk.h"

namespace kvtwin::optimized {

enum class Integers { kOfBf16, kOfF32 };

// Whether the functions below read such rows.
bool HasIntegers(const TileRows& rows);

// Whether integers multiply rows of q8_0 in less time than f32 does: on Intel's
// processors with AVX-512 VNNI. False if an older instruction set is selected.
bool IntegersPay();
// From now on IntegersPay returns `pay` on every processor with AVX-512 VNNI.
// Nothing: as before. For tests, while no attention is computed.
void ForceIntegers(std::optional<bool> pay);

// Rounds queries where they lie.
void RoundToIntegers(Integers integers, float* queries, std::size_t padded,
                     std::size_t count);

// scores[q * kAttentionTile + t] = queries[q] . keys[t] for up to four queries
// and the cells of a tile. Meanwhile, other rows are fetched.
void IntegerDots(Integers integers, const float* queries, std::size_t padded,
                 std::size_t count, CellsRows keys, std::size_t cells,
                 std::size_t head_dim, EvenFetches& ahead, float* scores);

// out[q] += weights[q * kAttentionTile + t] * values[t] over the cells of a
// tile, for up to kFewQueries queries. The weights are lost.
void AddIntegerValues(Integers integers, float* weights, std::size_t padded,
                      std::size_t count, CellsRows values, std::size_t cells,
                      std::size_t head_dim, EvenFetches& ahead, float* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_Q8_H_
