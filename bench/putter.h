// Rows of 8 heads of 128 that are put into one layer. What is put was just
// computed, so that it is in a cache of the processor; where it goes to was
// written long ago.

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

// Batches are of one sequence after the other, so that views, and masks, which
// nobody times, are small.
class Putter {
 public:
  Putter(const PutCase& what, int cells, std::string_view twin = "optimized");

  // Nanoseconds of a Put to the next cells.
  double Time();

  // Two batches, so that one is not where the layer begins.
  void Check(const std::string& name);

  // What is put.
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
  int batches_ = 0;  // That are stored.
};

// As many bytes to memory that was written long ago, as often as Putter.
class CopyLimit {
 public:
  CopyLimit(const PutCase& what, int cells);

  // Nanoseconds, through the caches, or past them.
  double Time(const Putter& from, bool stream);

 private:
  double CopyOne(const DenseTensor& from, std::byte* to, bool stream) const;

  std::size_t to_bytes_;
  bool halves_;
  ColdMemory key_;
  ColdMemory value_;
};

// One token into V that is permuted or tiled: its elements go to a cache line
// each. Only one cell of 64 is free, so that no line was written shortly
// before. Of K there is a line.
class OnePutter {
 public:
  OnePutter(DType dtype, VLayout v_layout, int cells,
            std::string_view twin = "optimized");

  double Time();
  // Stores the same elements in the same order to the same places of memory of
  // its own, if V were of this layout.
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
