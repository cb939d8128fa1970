// Puts rows of 8 heads of 128 into one layer. The source was just computed, so
// it is in a CPU cache; the destination was written long ago.

#ifndef KVTWIN_BENCH_PUTTER_H_
#define KVTWIN_BENCH_PUTTER_H_

#include <memory>
#include <string>
#include <string_view>

#include "bench/limits.h"
#include "bench/twins.h"

namespace kvtwin::bench {

struct PutCase {
  DType source = DType::kF32;
  DType stored = DType::kF32;
  int batch = 512;
  VLayout v_layout = VLayout::kPlain;
};

// Each batch goes to the next sequence, so that views and masks, which are not
// timed, stay small.
class Putter {
 public:
  Putter(const PutCase& what, int cells, std::string_view twin = "optimized");

  // Nanoseconds of a Put to the next cells.
  double Time();

  // Checks two batches, so that one is not at the start of the layer.
  void Check(const std::string& name);

  // The rows that are put.
  const DenseTensor& key() const { return key_; }
  const DenseTensor& value() const { return value_; }

 private:
  static constexpr int kSequences = 1024;

  CacheSetup Setup(int cells) const;
  void Forward(Cache& cache, int number) const;
  void TakeBack();

  PutCase what_;
  int cells_;
  DenseTensor key_;
  DenseTensor value_;
  std::unique_ptr<Cache> cache_;
  int batches_ = 0;  // Batches that are stored.
};

// Copies as many bytes to memory that was written long ago, as Putter does.
class CopyLimit {
 public:
  CopyLimit(const PutCase& what, int cells);

  // Nanoseconds of a copy through the caches, or past them.
  double Time(const Putter& from, bool stream);

 private:
  double CopyOne(const DenseTensor& from, std::byte* to, bool stream) const;

  std::size_t to_bytes_;
  bool halves_;
  ColdMemory key_;
  ColdMemory value_;
};

// Puts one token, with V permuted or tiled: each of its elements goes to
// another cache line. Only one cell in 64 is free, so that no line was written
// recently. The K row takes few lines: it has one element per head.
class OnePutter {
 public:
  OnePutter(DType dtype, VLayout v_layout, int cells,
            std::string_view twin = "optimized");

  double Time();
  // Nanoseconds of storing the same elements in the same order to separate
  // memory, at the places that they would have in this layout.
  double TimeTouch(VLayout v_layout);

  void Check(const std::string& name);

 private:
  static constexpr int kStep = 64;

  CacheSetup Setup() const;
  CacheState State() const;
  template <class T>
  double Touch(VLayout v_layout);

  VLayout v_layout_;
  int cells_;
  DenseTensor key_;
  DenseTensor value_;
  std::unique_ptr<Cache> cache_;
  int sequences_ = 0;
  Buffer touched_key_;
  Buffer touched_value_;
  int at_ = 0;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_PUTTER_H_
