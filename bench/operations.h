// Operations on sequences in a cache without rows: only cells and positions
// change.

#ifndef KVTWIN_BENCH_OPERATIONS_H_
#define KVTWIN_BENCH_OPERATIONS_H_

#include <memory>
#include <string>
#include <string_view>

#include "bench/twins.h"

namespace kvtwin::bench {

// A cache that is 15/16 full of interleaved sequences.
class Operations {
 public:
  Operations(int cells, int sequences, std::string_view twin = "optimized");

  // Nanoseconds of a Remove: two tokens in the middle leave, and the later ones
  // move down. That can be done some hundred times.
  double TimeRemove();
  // Nanoseconds of a CopyPrefix of the first half of a sequence to a new one.
  double TimeCopy();

  // Does these operations on both and compares the cells. Requires: both had
  // the same calls before.
  void Check(const std::string& name, Operations& reference);

 private:
  std::int32_t half_;  // Half of the tokens of a sequence.
  std::unique_ptr<Cache> cache_;
};

// A sequence with a tree of 64 drafts, of which 8 are accepted.
class Committer {
 public:
  explicit Committer(int cells, std::string_view twin = "optimized");

  // Nanoseconds of a Commit. The tokens that it adds leave again.
  double Time();

  void Check(const std::string& name, Committer& reference);

 private:
  static constexpr int kDrafts = 64;

  std::int32_t length_;
  std::unique_ptr<Cache> cache_;
};

// A sequence that fills a sliding window with memory, and has lost its first
// tokens.
class Resumer {
 public:
  explicit Resumer(int cells, std::string_view twin = "optimized");

  // Nanoseconds of CanResume.
  double Time(int rounds = 20000);

  // Checks both ends of the positions that can be resumed, and beyond.
  void Check(const std::string& name);

 private:
  CacheSetup setup_;
  CacheState state_;
  std::int32_t window_;
  std::int32_t last_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_OPERATIONS_H_
