// Tests of coverage marks: histories that hit a mark, and near misses.

#ifndef KVTWIN_PROPS_TESTING_MARK_ROWS_H_
#define KVTWIN_PROPS_TESTING_MARK_ROWS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/index.h"
#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The histories have no "kvt1 " in front.
struct MarkRow {
  std::string_view mark;
  std::vector<std::string_view> hits;
  std::vector<std::string_view> misses;
};

inline bool HitsMark(std::string_view name, std::string_view line) {
  CoverageCounts counts;
  const Result<History> history = ParseHistory("kvt1 " + std::string(line));
  EXPECT_TRUE(history.ok()) << line << history.status().ToString();
  if (!history.ok()) return false;
  const RunResult result =
      RunHistory(*history, TwinSubject("optimized"), {.counts = &counts});
  EXPECT_TRUE(result.ran && !result.failure) << line;
  const auto mark =
      std::ranges::find(kCoverageMarks, name, &CoverageMark::name);
  return At(counts.hits, mark - kCoverageMarks.begin()) > 0;
}

// Checks the rows of all marks from `first` to before `last`.
inline void CheckMarkRows(std::span<const MarkRow> rows, std::string_view first,
                          std::string_view last) {
  std::multiset<std::string_view> found;
  for (const MarkRow& row : rows) {
    found.insert(row.mark);
    for (const auto line : row.hits) {
      EXPECT_TRUE(HitsMark(row.mark, line)) << row.mark << ": " << line;
    }
    for (const auto line : row.misses) {
      EXPECT_FALSE(HitsMark(row.mark, line)) << row.mark << ": " << line;
    }
  }
  const auto at = [](std::string_view name) {
    return std::ranges::find(kCoverageMarks, name, &CoverageMark::name);
  };
  std::multiset<std::string_view> expected;
  for (auto mark = at(first); mark != at(last); ++mark) {
    expected.insert(mark->name);
  }
  EXPECT_EQ(found, expected);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_MARK_ROWS_H_
