// The goals of kvtwin's speed, each a ratio of two times that are measured in
// this process, one right after the other: of something that the optimized
// twin does, and of a limit, which is what the machine or the reference twin
// takes for as much. A goal is met if value / limit <= goal; nine tenths of the
// speed of memset is 1.11 of its time.
//
// Nothing is measured that was not found right in the same run.

#ifndef KVTWIN_BENCH_GOALS_H_
#define KVTWIN_BENCH_GOALS_H_

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/limits.h"

namespace kvtwin::bench {

struct Goal {
  std::string name;
  double value = 0;  // Nanoseconds, as is the limit.
  double limit = 0;
  double ratio = 0;  // value / limit
  double goal = 0;   // ratio <= goal?
  bool met = false;
};

struct GoalOptions {
  bool json = false;
  bool quick = false;    // Small and few: to see that it works, not how fast.
  std::string only;      // Rows whose name contains this.
  std::string workload;  // The file of chat requests.
  std::string save;      // Where the JSON goes as well, if anywhere.
  double spin = 0;       // Seconds for a profiler, see main.cc.
};

// Measures and collects rows.
class Goals {
 public:
  explicit Goals(GoalOptions options) : options_(std::move(options)) {}

  const GoalOptions& options() const { return options_; }
  bool quick() const { return options_.quick; }
  // Of a size that a quick run makes smaller.
  int Cells(int cells) const { return quick() ? cells / 16 : cells; }

  // Whether a row is asked for.
  bool Wanted(std::string_view name) const;

  // Measures value and limits in turns, `rounds` times. Of each limit it takes
  // the round with the median ratio; the row is that of the limit which is the
  // hardest to meet. (The best limit of each single round would be luck.) The
  // machine has other things to do, which can make a thing only slower: a row
  // that misses by little gets more tries.
  void Judge(const std::string& name, double goal, const Timing& value,
             const std::vector<Timing>& limits, int rounds = 15);

  // Adds a row that is measured already.
  void Add(const std::string& name, double goal, double value, double limit);

  const std::vector<Goal>& rows() const { return rows_; }

 private:
  GoalOptions options_;
  std::vector<Goal> rows_;
};

// Some of the rows.
using GoalPart = void (*)(Goals& goals);

// Prints the rows as they come, `about` what is measured on what, or as JSON at
// the end. The exit code: 0 if all goals are met or, in a quick run, measured;
// 1 if not; 2 if there are none.
int RunGoals(const GoalOptions& options, std::string_view about,
             std::span<const GoalPart> parts);
// Those of the optimized twin.
int RunGoals(const GoalOptions& options);

// These, in order. Each file has its part of them.
void DecodeGoals(Goals& goals);
void MaskGoals(Goals& goals);
void FindGoals(Goals& goals);
void PutGoals(Goals& goals);
void MoveGoals(Goals& goals);
void MetadataGoals(Goals& goals);
void SaveGoals(Goals& goals);
void ChatGoals(Goals& goals);

// "4k", "1M".
std::string SizeName(int size);
// "34.1 ns", "5.02 ms".
std::string TimeText(double nanoseconds);

// The numbers of threads that rows are measured with: 1, and 2 if there are as
// many processors.
std::vector<int> ThreadCounts();
// "1 thread", "2 threads".
std::string ThreadsName(int threads);

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_GOALS_H_
