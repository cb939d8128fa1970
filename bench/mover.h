// Moves rows of 8 heads of 128 to other cells, or to other positions.

#ifndef KVTWIN_BENCH_MOVER_H_
#define KVTWIN_BENCH_MOVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "bench/limits.h"
#include "bench/twins.h"

namespace kvtwin::bench {

// Defrags a cache of 4 layers of f32 rows, half of which are holes: each batch
// has two sequences, one of which was removed.
class Defragger {
 public:
  // The holes are random cells, or runs of 64.
  Defragger(int cells, bool runs, std::string_view twin = "optimized");

  // Nanoseconds of a StartForward that finds no run of free cells that is long
  // enough.
  double Time();
  // Nanoseconds of copying as many bytes as the last defrag had to move.
  double TimeCopy();

  // Checks that every token has its rows after the first defrag, and that no
  // holes are left. Requires: Time was not called before, because later defrags
  // move rows that were never filled in.
  void Check(const std::string& name);

 private:
  static constexpr int kLayers = 4;
  static constexpr int kBatch = 512;
  static constexpr int kRun = 64;

  // The sequence of the batch that needs room.
  int Coming() const { return 2 * cells_ / kBatch; }
  void Fill(bool with_rows);
  void PutRows(const Tokens& tokens);
  static float Element(std::int32_t position, int sequence, int which,
                       std::size_t i);
  static void CheckRow(const std::string& name, const CellEntry& entry,
                       const TensorView& rows, int which);

  int cells_;
  bool runs_;
  std::uint32_t random_ = 1;
  std::unique_ptr<Cache> cache_;
  bool defragged_ = false;
  int kept_ = 0;
  std::size_t moved_ = 0;
  Buffer from_;
  Buffer to_;
};

// A sequence of K rows; V has one element per head. Its first token is removed,
// and all others move down by one; that can be done some hundred times.
class Shifter {
 public:
  Shifter(DType dtype, int rows, std::string_view twin = "optimized");

  // Nanoseconds of the Remove.
  double Time();
  // Nanoseconds of reading, changing and writing as many bytes in place.
  double TimeModify();

  void Check(const std::string& name);

 private:
  std::size_t bytes() const;

  int rows_;
  CacheSetup setup_;
  std::unique_ptr<Cache> cache_;
  Buffer memory_;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_MOVER_H_
