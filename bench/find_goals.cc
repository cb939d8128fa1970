// Finds 512 free cells in the worst places, in the cell table itself, because
// no call of the interface does only that. The limit is the way of programs
// without an index: to look at one cell after the other.

#include <fmt/format.h>

#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"
#include "optimized/cell_table.h"

namespace kvtwin::bench {
namespace {

using optimized::CellTable;
using optimized::kNone;

constexpr std::size_t kWanted = 512;

enum class Layout {
  kScattered,  // Every other cell of the last quarter is free.
  kHoles,      // Every other cell is free, and the last 512.
  kShortRuns,  // Runs of 511 are free, and the last 512.
};

bool IsFree(Layout layout, std::size_t cell, std::size_t cells) {
  if (layout == Layout::kScattered) {
    return cell >= cells / 4 * 3 && cell % 2 == 1;
  }
  if (cell == cells - kWanted - 1) return false;
  return cell >= cells - kWanted ||
         (layout == Layout::kHoles ? cell % 2 == 1
                                   : cell % kWanted != kWanted - 1);
}

// A cell table, and its equivalent as a flat array.
class Finder {
 public:
  Finder(Layout layout, std::size_t cells)
      : contiguous_(layout != Layout::kScattered),
        table_(cells, /*sequences=*/1, /*max_ordered=*/0) {
    for (std::size_t cell = 0; cell < cells; ++cell) {
      const bool free = IsFree(layout, cell, cells);
      positions_.push_back(free ? -1 : static_cast<std::int32_t>(cell));
      if (!free) table_.Add(0, cell, static_cast<std::int32_t>(cell));
    }
    found_.reserve(kWanted);
  }

  void Find() { contiguous_ ? FindRun() : FindScattered(); }
  void Scan() { contiguous_ ? ScanRun() : ScanScattered(); }

  void Check(const std::string& name) {
    Scan();
    const std::vector<int> expected = found_;
    Find();
    if (found_ != expected || found_.empty()) {
      Wrong(name, "found other cells than a scan does");
    }
  }

  double TimeFind() {
    constexpr int kTimes = 200;
    return Time([&] {
             for (int i = 0; i < kTimes; ++i) {
               if (contiguous_) {  // In a register: nothing waits for it.
                 KeepAlive(table_.FindRun(kWanted));
               } else {
                 FindScattered();
                 KeepAlive(found_.data());
               }
             }
           }) /
           kTimes;
  }
  double TimeScan() {
    return Time([&] {
      Scan();
      KeepAlive(found_.data());
    });
  }

 private:
  void FindRun() {
    found_.clear();
    const std::size_t first = table_.FindRun(kWanted);
    if (first != kNone) found_.push_back(AsInt(first));
  }
  void FindScattered() { table_.FindFree(kWanted, found_); }

  void ScanRun() {
    found_.clear();
    std::size_t run = 0;
    for (std::size_t cell = 0; cell < positions_.size(); ++cell) {
      run = positions_[cell] < 0 ? run + 1 : 0;
      if (run < kWanted) continue;
      found_.push_back(AsInt(cell + 1 - kWanted));
      return;
    }
  }
  void ScanScattered() {
    found_.clear();
    for (std::size_t cell = 0; found_.size() < kWanted; ++cell) {
      if (positions_[cell] < 0) found_.push_back(AsInt(cell));
    }
  }

  bool contiguous_;
  CellTable table_;
  std::vector<std::int32_t> positions_;
  std::vector<int> found_;
};

void Judge(Goals& goals, Layout layout, const std::string& what) {
  const int large = goals.Cells(1 << 20);
  const int small = 1 << 12;
  const std::string by_scan =
      fmt::format("find 512 of {} cells, {} / scan", SizeName(large), what);
  const std::string by_size = fmt::format("find 512, {}, {} / {} cells", what,
                                          SizeName(large), SizeName(small));
  if (!goals.Wanted(by_scan) && !goals.Wanted(by_size)) return;
  Finder above(layout, AsSize(large));
  Finder below(layout, small);
  above.Check(by_scan);
  below.Check(by_size);
  goals.Judge(by_scan, 1e-3, [&] { return above.TimeFind(); },
              {[&] { return above.TimeScan(); }});
  goals.Judge(by_size, 2, [&] { return above.TimeFind(); },
              {[&] { return below.TimeFind(); }});
}

}  // namespace

void FindGoals(Goals& goals) {
  Judge(goals, Layout::kScattered, "scattered");
  Judge(goals, Layout::kHoles, "a run among holes");
  Judge(goals, Layout::kShortRuns, "a run among runs of 511");
}

}  // namespace kvtwin::bench
