// Caches to be measured, and whether they are right.

#ifndef KVTWIN_BENCH_TWINS_H_
#define KVTWIN_BENCH_TWINS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::bench {

// Says on stderr that NAME is wrong, and ends the program with 1: what is wrong
// is not measured.
[[noreturn]] void Wrong(std::string_view name, std::string_view what);

// The same, of a call that should have been done.
void Must(const Status& status);
template <class T>
T Must(Result<T> result) {
  Must(result.status());
  return std::move(*result);
}

struct CacheSetup {
  CacheSpec spec;
  CacheConfig config;
  DType dtype = DType::kF16;
  int max_sequences = 1;
  int capacity = 1;  // Of each.
  int max_batch = 512;
};

std::unique_ptr<Cache> Make(const CacheSetup& setup, std::string_view twin);

// The tokens of a batch.
struct Tokens {
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;

  void Add(std::int32_t position, int sequence) {
    positions.push_back(position);
    sequences.push_back(sequence);
  }
  operator Batch() const {  // NOLINT: a batch is a view of this.
    return {.positions = positions, .sequences = sequences, .multimodal = {}};
  }
};

// Cells 0 .. count - 1: cell i holds position i / sequences of sequence
// i % sequences.
CacheState Interleaved(int count, int sequences);
// The batch that goes on there: `count` tokens, those of a sequence together.
// Requires: a whole number of tokens for each sequence.
Tokens NextTokens(int stored, int count, int sequences);

// Makes a layer of rows of one element, so that Get has an answer. Ends the
// pass.
void AddTinyLayer(Cache& cache);

// Nanoseconds of StartForward.
double TimeForward(Cache& cache, const Batch& batch);

// That both have the same mask, and the view at the same place. Requires: a
// pass and a layer in both.
void CheckMasks(std::string_view name, Cache& a, Cache& b);
// That both hold the same tokens in the same cells.
void CheckCells(std::string_view name, const Cache& a, const Cache& b);
// That two tensors have the same shape and bytes, if not the same strides.
void CheckTensors(std::string_view name, const TensorView& a,
                  const TensorView& b);

// What the mask says of one element.
bool Visible(const TensorView& mask, std::int64_t row, std::int64_t column);

// Rows of numbers that differ from element to element and from seed to seed:
// [head_dim, heads, tokens], f32 or rounded to f16.
DenseTensor SomeRows(DType dtype, const Shape& shape, std::uint32_t seed);

// Bits, if this build has masks of them.
std::vector<DType> MaskTypes();
bool IsBits(DType dtype);

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_TWINS_H_
