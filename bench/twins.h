// Caches to measure, and checks that they are right.

#ifndef KVTWIN_BENCH_TWINS_H_
#define KVTWIN_BENCH_TWINS_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::bench {

// Reports on stderr that NAME is wrong, and ends the program with 1: a wrong
// result is not measured.
[[noreturn]] void Wrong(std::string_view name, std::string_view what);

// Ends the program like Wrong if a call that must succeed failed.
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
  int capacity = 1;  // Cells of each.
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
// The next batch after Interleaved: `count` tokens, those of a sequence
// together. Requires: as many tokens for each sequence.
Tokens NextTokens(int stored, int count, int sequences);

// Makes a layer with rows of one element, so that Get succeeds. Ends the pass.
void AddTinyLayer(Cache& cache);

// Nanoseconds of StartForward.
double TimeForward(Cache& cache, const Batch& batch);

// Checks that both have the same mask, and views that begin at the same cell.
// Requires: a pass and a layer in both.
void CheckMasks(std::string_view name, Cache& a, Cache& b);
// Checks that both hold the same tokens in the same cells.
void CheckCells(std::string_view name, const Cache& a, const Cache& b);
// Checks that two tensors have the same shape and bytes; strides may differ.
void CheckTensors(std::string_view name, const TensorView& a,
                  const TensorView& b);

// Whether the mask lets this row attend to this column.
bool Visible(const TensorView& mask, std::int64_t row, std::int64_t column);

// Rows of numbers that differ between elements and between seeds: [head_dim,
// heads, tokens], f32 or rounded to `dtype`.
DenseTensor SomeRows(DType dtype, const Shape& shape, std::uint32_t seed);

inline constexpr DType kMaskTypes[] = {DType::kF32, DType::kF16, DType::kBF16,
                                       DType::kBits};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_TWINS_H_
