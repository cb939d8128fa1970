// The goals of decode, with the steps of decoder.h.

#include <fmt/format.h>

#include "bench/decoder.h"
#include "bench/goals.h"
#include "bench/limits.h"

namespace kvtwin::bench {
namespace {

// Judges the time of one case by that of another one, or by a limit.
class Pair {
 public:
  Pair(Goals& goals, const std::string& name, double goal)
      : goals_(goals), name_(name), goal_(goal) {}

  void Judge(const DecodeCase& value, const DecodeCase& limit) {
    if (!goals_.Wanted(name_)) return;
    Decoder above(value);
    Decoder below(limit);
    above.Check(name_);
    below.Check(name_);
    goals_.Judge(name_, goal_, [&] { return above.Time(); },
                 {[&] { return below.Time(); }});
  }

  void Judge(const DecodeCase& value, const Timing& limit) {
    Decoder decoder(value);
    decoder.Check(name_);
    goals_.Judge(name_, goal_, [&] { return decoder.Time(); }, {limit});
  }

 private:
  Goals& goals_;
  std::string name_;
  double goal_;
};

}  // namespace

void DecodeGoals(Goals& goals) {
  UseThreads(ThreadCounts().back());
  const int large = goals.Cells(1 << 20);
  const int small = goals.Cells(1 << 12);
  const int padding = goals.quick() ? 16 : 256;
  const std::string sizes =
      fmt::format("{} / {} cells", SizeName(large), SizeName(small));
  for (const Placement placement :
       {Placement::kContiguous, Placement::kScatter}) {
    const bool scatter = placement == Placement::kScatter;
    Pair(
        goals,
        fmt::format("decode, 1 token{}, {}", scatter ? ", scatter" : "", sizes),
        2)
        .Judge({.cells = large, .padding = padding, .placement = placement},
               {.cells = small, .padding = padding, .placement = placement});
  }
  Pair(goals, fmt::format("decode, 1 token and 1 evicted, {}", sizes), 2)
      .Judge({.cells = large, .padding = padding, .evicts = true},
             {.cells = small, .padding = padding, .evicts = true});

  const std::string line =
      fmt::format("decode, 1 token, {} cells / write of a line in no cache",
                  SizeName(large));
  if (goals.Wanted(line)) {
    LineChase chase(std::size_t{1} << (goals.quick() ? 24 : 30));
    Pair(goals, line, 10).Judge({.cells = large, .padding = padding}, [&] {
      return chase.Time();
    });
  }

  const int middle = goals.Cells(1 << 18);
  Pair(goals,
       fmt::format("decode, {} cells, 64 sequences / 1", SizeName(middle)), 64)
      .Judge({.cells = middle, .sequences = 64, .padding = 16 * padding},
             {.cells = middle, .padding = 16 * padding});
}

}  // namespace kvtwin::bench
