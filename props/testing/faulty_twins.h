// Tables of faults and of coverage marks, for tests that the harness finds each
// fault with the check that is meant for it, and counts the right states.

#ifndef KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_
#define KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/compare/differential_driver.h"
#include "props/testing/tampered_cache.h"

namespace kvtwin::props {

// Where the fault is: in the cache under test, in the reference, or in both
// alike.
enum class Who { kSubject, kReference, kBoth };

struct Case {
  std::string name;
  std::string history;  // Without the leading "kvt1 ".
  Fault fault;
  std::string check;
  std::string text;  // Part of the difference's text.
  Who who = Who::kSubject;
};

inline Result<std::unique_ptr<Cache>> MakeTampered(const CacheSpec& spec,
                                                   const Fault& fault) {
  auto cache = MakeReference(spec);
  if (!cache.ok()) return cache;
  return std::unique_ptr<Cache>(
      std::make_unique<TamperedCache>(std::move(*cache), fault));
}

inline Subject Tampered(const Fault& fault, Level level) {
  Subject subject;
  subject.name = "faulty";
  subject.level = level;
  subject.mask_rows_too = true;
  subject.tolerance = 1e-6;
  subject.make = [=](const CacheSpec& spec) {
    return MakeTampered(spec, fault);
  };
  return subject;
}

// The difference that a history shows at this level.
inline std::optional<Failure> Seen(const std::string& history,
                                   const Fault& fault, Level level,
                                   Who who = Who::kSubject) {
  const Result<History> read = ParseHistory("kvt1 " + history);
  if (!read.ok())
    return Failure{.check = "no history", .text = read.status().message()};
  const Subject subject =
      Tampered(who == Who::kReference ? Fault() : fault, level);
  if (who == Who::kSubject) return RunHistory(*read, subject).failure;
  const auto make = [&](const CacheSpec& spec) {
    return MakeTampered(spec, fault);
  };
  return RunAgainst(make, *read, subject).failure;
}

inline void ExpectFound(const std::vector<Case>& cases, Level level) {
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    const auto right = Seen(test.history, {}, level);
    EXPECT_FALSE(right) << right->text;
    const auto wrong = Seen(test.history, test.fault, level, test.who);
    EXPECT_TRUE(wrong) << "was not found";
    if (!wrong) continue;
    EXPECT_EQ(wrong->check, test.check) << wrong->text;
    EXPECT_NE(wrong->text.find(test.text), std::string::npos) << wrong->text;
  }
}

inline void ChangeByte(std::byte& byte) { byte ^= std::byte{1}; }

using View = std::function<void(OwnedView&)>;

// Changes the first or the last element of a tensor.
inline View First(DenseTensor OwnedView::*tensor) {
  return [=](OwnedView& view) { ChangeByte((view.*tensor).bytes.front()); };
}
inline View Last(DenseTensor OwnedView::*tensor) {
  return [=](OwnedView& view) { ChangeByte((view.*tensor).bytes.back()); };
}

// Turns the order of the columns around. Requires: V is plain, and the mask is
// f32.
inline void TurnColumns(OwnedView& view) {
  if (view.view->mask.data == nullptr) return;
  const std::size_t columns = AsSize(view.mask.shape[0]);
  const auto turn = [=](std::span<std::byte> bytes) {
    const std::size_t size = bytes.size() / columns;
    for (std::size_t i = 0; i < columns / 2; ++i) {
      std::ranges::swap_ranges(bytes.subspan(i * size, size),
                               bytes.subspan((columns - 1 - i) * size, size));
    }
  };
  turn(view.key.bytes);
  turn(view.value.bytes);
  const std::size_t row = columns * sizeof(float);
  for (std::size_t at = 0; at < view.mask.bytes.size(); at += row) {
    turn(std::span(view.mask.bytes).subspan(at, row));
  }
}

// Faults in one answer.
inline Fault Refuses(const std::string& call,
                     StatusCode with = StatusCode::kNotSupported) {
  return {.call = call, .with = with};
}
inline Fault Shows(View view, int layer = -1, int type = -1) {
  return {.view = std::move(view), .layer = layer, .type = type};
}
inline Fault Misused(std::function<Status(Cache&, Status)> misuse) {
  return {.misuse = std::move(misuse)};
}
inline Fault Resumes(std::function<bool(bool)> resume) {
  return {.resume = std::move(resume)};
}

inline constexpr auto kKey = &OwnedView::key;
inline constexpr auto kValue = &OwnedView::value;
inline constexpr auto kMask = &OwnedView::mask;

inline const std::string kWrapper =
    "kind=wrapper caches=swa:w2/causal layers=2 seqs=1 ";

// Histories that hit a coverage mark, and near misses, without "kvt1 ". There
// are several hits if a condition has two ends, or an alternative.
struct MarkRow {
  std::string_view mark;
  std::vector<std::string_view> hits;
  std::vector<std::string_view> misses;
};

// Returns the counts of one history, which must run on the twin.
inline CoverageCounts CountsOf(std::string_view line,
                               std::string_view twin = "reference") {
  CoverageCounts counts;
  const Result<History> history = ParseHistory("kvt1 " + std::string(line));
  EXPECT_TRUE(history.ok()) << line << history.status().ToString();
  if (!history.ok()) return counts;
  const RunResult result =
      RunHistory(*history, TwinSubject(twin), {.counts = &counts});
  EXPECT_TRUE(result.ran && !result.failure) << line;
  EXPECT_EQ(counts.histories, 1) << line;
  EXPECT_EQ(counts.discarded, 0) << line;
  return counts;
}

inline std::int64_t HitsOf(std::string_view mark,
                           const CoverageCounts& counts) {
  const auto found =
      std::ranges::find(kCoverageMarks, mark, &CoverageMark::name);
  return At(counts.hits, found - kCoverageMarks.begin());
}

// Checks on both twins the rows of all marks from `first` to before `last`.
inline void CheckMarkRows(std::span<const MarkRow> rows, std::string_view first,
                          std::string_view last) {
  std::multiset<std::string_view> found;
  for (const MarkRow& row : rows) {
    found.insert(row.mark);
    EXPECT_FALSE(row.hits.empty() || row.misses.empty()) << row.mark;
    for (const std::string_view twin : {"reference", "optimized"}) {
      for (const auto line : row.hits) {
        EXPECT_GT(HitsOf(row.mark, CountsOf(line, twin)), 0)
            << row.mark << ": " << line;
      }
      for (const auto line : row.misses) {
        EXPECT_EQ(HitsOf(row.mark, CountsOf(line, twin)), 0)
            << row.mark << ": " << line;
      }
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

#endif  // KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_
