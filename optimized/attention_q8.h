// Attention of few queries over rows of q8_0 with products of integers, by
// AVX-512 VNNI, which every processor with AVX-512 BF16 has. The numbers of K
// and V are taken as they are. Queries and weights become integers of 15 and 16
// bits, in units of the largest one.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_Q8_H_
#define KVTWIN_OPTIMIZED_ATTENTION_Q8_H_

#include <cstddef>

#include "optimized/attention_kernels.h"
#include "optimized/tile_walk.h"

namespace kvtwin::optimized {

// Whether the functions below read such rows.
bool HasIntegers(const TileRows& rows);

// Rounds queries where they lie.
void RoundToIntegers(float* queries, std::size_t padded, std::size_t count);

// scores[q * kAttentionTile + t] = queries[q] . keys[t] for up to four queries
// and the cells of a tile. Meanwhile, other rows are fetched.
void IntegerDots(const float* queries, std::size_t padded, std::size_t count,
                 CellsRows keys, std::size_t cells, std::size_t head_dim,
                 EvenFetches& ahead, float* scores);

// out[q] += weights[q * kAttentionTile + t] * values[t] over the cells of a
// tile, for up to kFewQueries queries. The weights are lost.
void AddIntegerValues(float* weights, std::size_t padded, std::size_t count,
                      CellsRows values, std::size_t cells, std::size_t head_dim,
                      EvenFetches& ahead, float* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_Q8_H_
