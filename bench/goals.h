// The goals of kvtwin's speed. Each is a ratio of two times, measured in this
// process right after each other: the time of an operation of the optimized
// twin, and a limit, the time of the machine or of the reference twin for the
// same amount of work. A goal is met if value / limit <= goal; 90 % of the
// speed of memset is 1.11 of its time.
//
// Only operations that were found right in the same run are measured.

#ifndef KVTWIN_BENCH_GOALS_H_
#define KVTWIN_BENCH_GOALS_H_

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
  double goal = 0;   // Met if ratio <= goal.
  bool met = false;
};

struct GoalOptions {
  bool json = false;
  bool quick = false;    // Small sizes: checks that it works, not its speed.
  std::string only;      // Rows whose name contains this.
  std::string workload;  // The file of chat requests.
  std::string save;      // File that the JSON is also written to, if any.
  double spin = 0;       // Seconds for a profiler, see main.cc.
};

// Measures and collects rows.
class Goals {
 public:
  explicit Goals(GoalOptions options) : options_(std::move(options)) {}

  const GoalOptions& options() const { return options_; }
  bool quick() const { return options_.quick; }
  // A size that a quick run makes smaller.
  int Cells(int cells) const { return quick() ? cells / 16 : cells; }

  // Whether the user asked for this row.
  bool Wanted(std::string_view name) const;

  // Measures value and limits in turns, `rounds` times. For each limit it takes
  // the round with the median ratio; the row is that of the limit which is
  // hardest to meet. (Taking the best limit of each round would be luck.) Other
  // load on the machine can only make a time longer: a row that misses narrowly
  // gets more tries.
  void Judge(const std::string& name, double goal, const Timing& value,
             const std::vector<Timing>& limits, int rounds = 15);

  // Adds a row that has been measured already.
  void Add(const std::string& name, double goal, double value, double limit);

  const std::vector<Goal>& rows() const { return rows_; }

 private:
  GoalOptions options_;
  std::vector<Goal> rows_;
};

// Measures some of the rows.
using GoalPart = void (*)(Goals& goals);

// Runs the parts and prints the rows as they come, after a headline `about`, or
// as JSON at the end. Returns the exit code: 0 if all goals are met or, in a
// quick run, measured; 1 if not; 2 if there are no rows.
int RunGoals(const GoalOptions& options, std::string_view about,
             std::span<const GoalPart> parts);
// Runs the goals of the optimized twin.
int RunGoals(const GoalOptions& options);
// Runs the goals of the twin cuda; null in programs without that twin.
extern int (*run_cuda_goals)(const GoalOptions& options);

// The parts of RunGoals, in order. Each has its own file.
void DecodeGoals(Goals& goals);
void MaskGoals(Goals& goals);
void FindGoals(Goals& goals);
void PrefixGoals(Goals& goals);
void PutGoals(Goals& goals);
void MoveGoals(Goals& goals);
void MetadataGoals(Goals& goals);
void StateGoals(Goals& goals);
void PassGoals(Goals& goals);
void SaveGoals(Goals& goals);
void AttendGoals(Goals& goals);
void ChatGoals(Goals& goals);

// "4k", "1M".
std::string SizeName(int size);
// "34.1 ns", "5.02 ms".
std::string TimeText(double nanoseconds);

// The numbers of threads to measure with: 1, and 2 if there are at least two
// processors.
std::vector<int> ThreadCounts();
// "1 thread", "2 threads".
std::string ThreadsName(int threads);

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_GOALS_H_
