// A table of faults, for tests that the harness finds each fault with the check
// that is meant for it.

#ifndef KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_
#define KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

inline void Change(std::byte& byte) { byte ^= std::byte{1}; }

using View = std::function<void(OwnedView&)>;

// Changes the first or the last element of a tensor.
inline View First(DenseTensor OwnedView::*tensor) {
  return [=](OwnedView& view) { Change((view.*tensor).bytes.front()); };
}
inline View Last(DenseTensor OwnedView::*tensor) {
  return [=](OwnedView& view) { Change((view.*tensor).bytes.back()); };
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

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_FAULTY_TWINS_H_
