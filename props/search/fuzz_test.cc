// Tests that a failure found by a fuzz run shrinks to one line, the same for
// every seed, and gets its bucket.

#include "props/search/fuzz.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/cache.h"
#include "optimized/targets.h"
#include "props/base/forwarding_cache.h"
#include "props/history/generate.h"
#include "props/history/history.h"
#include "props/search/explain.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

template <class Backend>
Subject SubjectOf() {
  return {.name = "faulty",
          .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
            auto cache = MakeCache(spec, "reference");
            if (!cache.ok()) return cache.status();
            return std::unique_ptr<Cache>(
                std::make_unique<Backend>(std::move(*cache)));
          }};
}

class RemovesOneMore : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool more = end != kOpenEnd && end > begin + 1;
    return ForwardingCache::Remove(seq, begin, more ? kOpenEnd : end);
  }
};

class CopiesOneLess : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return ForwardingCache::CopyPrefix(src, dst, len > 1 ? len - 1 : len);
  }
};

class HidesTheFirstColumn : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    if (!view.ok() || view->mask.data == nullptr) return view;
    if (view->mask.shape[0] < 3) return view;
    mask_ = CopyOf(view->mask, view->mask.dtype);
    if (mask_.dtype == DType::kBits) {
      mask_.bytes[0] &= std::byte{0xFE};
    } else {
      std::fill_n(mask_.bytes.begin(), SizeOf(mask_.dtype), std::byte{0x7F});
    }
    view->mask = mask_.view();
    return view;
  }

 private:
  DenseTensor mask_;
};

// Returns the first failing history of the seed.
History FirstFailure(std::uint64_t seed, int ops, const Subject& subject) {
  for (std::uint64_t number = 0;; ++number) {
    History history = MakeHistory(seed, number, {}, ops);
    if (RunHistory(history, subject).failure) return history;
  }
}

template <class Backend>
void SameBugSameLine(const std::string& line) {
  const Subject subject = SubjectOf<Backend>();
  std::map<std::string, int> lines;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const History shrunk = Shrink(FirstFailure(seed, 60, subject), subject);
    EXPECT_LE(shrunk.ops.size(), 3U) << ToText(shrunk);
    EXPECT_LE(shrunk.setup.init.capacity, 4) << ToText(shrunk);
    ++lines[ToText(shrunk)];
  }
  EXPECT_GE(lines[line], 18) << testing::PrintToString(lines);
}

TEST(Shrink, GivesOneLineForARemoveThatTakesTooMuch) {
  SameBugSameLine<RemovesOneMore>("kvt1 cells=1 | put 0*1 | drop 0:1-3");
}
TEST(Shrink, GivesOneLineForACopyThatTakesTooLittle) {
  SameBugSameLine<CopiesOneLess>("kvt1 cells=2 | put 0*2 | copy 0>0:2");
}
TEST(Shrink, GivesOneLineForAMaskThatHides) {
  SameBugSameLine<HidesTheFirstColumn>("kvt1 cells=3 | put 0*3");
}

TEST(Shrink, MakesAThousandOperationsTwo) {
  const Subject subject = SubjectOf<CopiesOneLess>();
  History history;
  std::size_t step = 0;
  for (std::uint64_t number = 0; step < 900; ++number) {
    history = MakeHistory(2, number, Kind::kCausal, 1500);
    auto difference = RunHistory(history, subject).failure;
    while (difference && difference->step < 1000) {
      step = difference->step;
      if (step >= 900) break;
      history.ops.erase(IteratorAt(history.ops, step));
      difference = RunHistory(history, subject).failure;
    }
  }
  EXPECT_EQ(ToText(Shrink(history, subject)),
            "kvt1 cells=2 | put 0*2 | copy 0>0:2");
}

// A backend's process is asked by lines, and refuses what no line says.
TEST(Shrink, TriesOnlyHistoriesThatCanBeRead) {
  const auto fills = [](const Op& op) {
    return std::ranges::any_of(op.segments, [](const Segment& segment) {
      return segment.count > Segment::kMost;
    });
  };
  for (const char* line :
       {"kvt1 cells=8 | put 0*2 | put 0*free-1 | drop 0:0-",
        "kvt1 legal=1 | put 0-2*free+0 1*free@-1 | put 0*3"}) {
    Shrink(*ParseHistory(line),
           [&](const History& candidate) -> std::optional<Failure> {
             EXPECT_TRUE(ParseHistory(ToText(candidate)).ok())
                 << ToText(candidate);
             if (std::ranges::none_of(candidate.ops, fills)) return {};
             return Failure{.step = candidate.ops.size()};
           });
  }
}

// A cache of `cells=9000` has batches of 9,000 tokens, whose mask no line has.
TEST(Shrink, TriesOnlySizesThatCanBeRead) {
  const auto shrunk = Shrink(
      *ParseHistory("kvt1 cap=20000 batch=100 | put 0*100 | put 0*100"),
      [](const History& candidate) -> std::optional<Failure> {
        EXPECT_TRUE(ParseHistory(ToText(candidate)).ok()) << ToText(candidate);
        if (candidate.setup.init.capacity < 9000) return {};
        return Failure{.step = candidate.ops.size()};
      });
  EXPECT_EQ(ToText(shrunk), "kvt1 cells=9000 batch=1");
}

// Says that a sequence can resume where it cannot, and the reverse.
class SaysTheOpposite : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> yes = ForwardingCache::CanResume(seq, pos);
    return yes.ok() ? Result<bool>(!*yes) : yes;
  }
};

TEST(Report, CitesWhatARefusedBatchLeaves) {
  const auto rules = [](const std::string& line) {
    const Subject faulty = SubjectOf<SaysTheOpposite>();
    const History history = *ParseHistory(line);
    return Explain(history, *RunHistory(history, faulty).failure, faulty).rules;
  };
  const std::string full =
      "kvt1 kind=swa window=1 seqs=1 batch=2 | put 0*1 1*1";
  EXPECT_EQ(rules(full + " | ask 0@0"), "S7, S28, S44");
  EXPECT_EQ(rules(full + " | put 2*2 | ask 0@0"), "S7, S28, S44, S12");
}

// How far a backend comes until it is killed differs from run to run: a report
// names the last of the calls that it shows.
TEST(Report, NamesTheCallInWhichABackendWasKilled) {
  Subject killed;
  killed.name = "killed";
  killed.level = Level::kVisibility;
  const auto runs = std::make_shared<int>(0);
  killed.run = [=](const History&, const RunOptions& options) {
    const bool first = (*runs)++ == 0;
    if (options.trace != nullptr) {
      options.trace->Begin(first ? "Get(layer 0)" : "Init", false);
    }
    RunResult result = {.ran = true};
    result.failure = MakeFailure(
        "backend: memory", first ? "get has allocated more than 1024 MiB"
                                 : "init has allocated more than 1024 MiB");
    result.failure->function = first ? "get" : "init";
    return result;
  };
  const History history = *ParseHistory("kvt1 | put 0*1");
  const Failure failure = *RunHistory(history, killed).failure;
  EXPECT_TRUE(failure.text.starts_with("get ")) << failure.text;
  EXPECT_THAT(Explain(history, failure, killed).report,
              HasSubstr("\n  init has allocated more than 1024 MiB\n"));
}

// Refuses to resume at every third call, counted over all histories.
class ResumesAtTimes : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    static int calls = 0;
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() && *can && ++calls % 3 == 0 ? Result<bool>(false) : can;
  }
};

TEST(Report, NamesTheCallWhoseAnswerVaries) {
  Subject subject = SubjectOf<ResumesAtTimes>();
  subject.level = Level::kVisibility;
  const History history = *ParseHistory("kvt1 | put 0*2 | ask 0@1 | ask 0@2");
  EXPECT_NE(RunHistory(history, subject).digest,
            RunHistory(history, subject).digest);
  Failure failure;
  failure.check = "harness: not the same twice";
  EXPECT_EQ(Explain(history, failure, subject).note,
            "Call 5 varies: CanResume(0, 2) -> no; then CanResume(0, 2) -> "
            "yes.");
}

class CommitsNothing : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Commit(int seq, std::span<const int> /*path*/) override {
    return cache_->Commit(seq, {});
  }
};

TEST(Report, NamesTheCommitOfALegalClient) {
  Subject faulty = SubjectOf<CommitsNothing>();
  faulty.level = Level::kVisibility;
  const History history =
      *ParseHistory("kvt1 legal=1 | put 0*1 | put 0*1:-1 | put 0*1");
  const auto difference = RunHistory(history, faulty).failure;
  ASSERT_TRUE(difference);
  const Failure failure = Explain(history, *difference, faulty);
  EXPECT_THAT(failure.report,
              HasSubstr("Commit(0, [0]) -> ok   (by the client itself)\n"));
  EXPECT_THAT(failure.rules, HasSubstr("D5"));
}

// A legal client makes room by itself: no operation of the line is a removal.
TEST(Bucket, NamesWhatALegalClientRemoves) {
  const std::string line = "kvt1 shift=add cells=4 legal=1 | put 0*4 | put 0*2";
  Subject faulty = SubjectOf<RemovesOneMore>();
  faulty.level = Level::kVisibility;
  const std::string drops =
      "kvt1 shift=add cells=4 legal=1 | put 0*4 | drop 0:0-2 | put 0*2";
  EXPECT_EQ(BucketOf(*ParseHistory(line), faulty),
            "faulty-subject-rows+put+put+remove");
  EXPECT_EQ(BucketOf(*ParseHistory(drops), faulty),
            "faulty-subject-rows+put+drop+put");
  const auto report = [&](const std::string& text) {
    const History history = *ParseHistory(text);
    return Explain(history, *RunHistory(history, faulty).failure, faulty)
        .report;
  };
  EXPECT_THAT(report(line),
              HasSubstr("Remove(0, 0, 2) -> ok   (by the client itself)\n"));
  EXPECT_THAT(report(drops), HasSubstr("Remove(0, 0, 2) -> ok\n"));
  faulty.make = [](CacheSpec spec) {  // It does not shift K rows.
    spec.shift.kind = ShiftKind::kIdentity;
    return MakeCache(spec, "reference");
  };
  EXPECT_EQ(BucketOf(*ParseHistory(line), faulty),
            "faulty-subject-rows+put+put+shift");
}

TEST(Bucket, NamesTheSubjectAndTheCheck) {
  const Subject copies = SubjectOf<CopiesOneLess>();
  EXPECT_EQ(BucketOf(Shrink(FirstFailure(1, 60, copies), copies), copies),
            "faulty-subject-cells+put+copy");
  const Subject hides = SubjectOf<HidesTheFirstColumn>();
  const History shrunk = Shrink(FirstFailure(1, 60, hides), hides);
  EXPECT_EQ(BucketOf(shrunk, hides), "faulty-subject-mask-bytes+put");
  const std::string text =
      FailureText(shrunk, *RunHistory(shrunk, hides).failure, hides);
  EXPECT_NE(text.find("\n  bucket: faulty-subject-mask-bytes+put\n"),
            text.npos);
}

class RemovesOneLess : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool leaves = end != kOpenEnd && end - begin > 1;
    return ForwardingCache::Remove(seq, begin, leaves ? end - 1 : end);
  }
};

// A cache with three bugs: copies lose a token, removals in the middle leave a
// token, and the first column of windows is hidden.
Result<std::unique_ptr<Cache>> MakeWithThreeBugs(const CacheSpec& spec) {
  auto made = MakeCache(spec, "reference");
  if (!made.ok()) return made.status();
  std::unique_ptr<Cache> cache = std::move(*made);
  cache = std::make_unique<CopiesOneLess>(std::move(cache));
  cache = std::make_unique<RemovesOneLess>(std::move(cache));
  if (spec.kind != Kind::kSwa) return cache;
  return std::unique_ptr<Cache>(
      std::make_unique<HidesTheFirstColumn>(std::move(cache)));
}

// Returns the buckets that searches find one after another, when each bucket
// found before is known: as a whole bucket, or by its check.
std::set<std::string> FoundOneByOne(const Subject& subject, bool whole) {
  FuzzOptions options;
  options.operations = 20'000;
  while (const auto failure = Fuzz(options, subject).failure) {
    const std::string bucket = failure->bucket;
    const std::size_t end = whole ? bucket.size() : bucket.find('+');
    const bool is_new =
        options.known_buckets.insert(bucket.substr(0, end)).second;
    EXPECT_TRUE(is_new) << bucket;
    if (!is_new || options.known_buckets.size() > 9) break;
  }
  return options.known_buckets;
}

TEST(Bucket, AKnownBucketHidesNoOther) {
  using ::testing::IsSupersetOf;
  const Subject subject = {.name = "faulty", .make = MakeWithThreeBugs};
  const auto whole = FoundOneByOne(subject, true);
  EXPECT_THAT(whole, IsSupersetOf({"faulty-subject-cells+put+copy",
                                   "faulty-subject-mask-bytes+swa+put",
                                   "faulty-subject-result+put+drop"}));
  const auto checks = FoundOneByOne(subject, false);
  EXPECT_THAT(checks,
              IsSupersetOf({"faulty-subject-cells", "faulty-subject-mask-bytes",
                            "faulty-subject-result"}));
  // A bug may be reported again if it fails in other ways, but rarely.
  EXPECT_LT(whole.size(), 6U) << testing::PrintToString(whole);
  EXPECT_LT(checks.size(), 6U) << testing::PrintToString(checks);
}

TEST(Bucket, SaysWhenTheFailureIsNotReproduced) {
  EXPECT_EQ(BucketOf(*ParseHistory("kvt1 cells=4 | put 0*2"),
                     TwinSubject("optimized")),
            "optimized-not-reproduced");
}

TEST(Bucket, NamesTheTargetWhereItMatters) {
  if (optimized::SupportedTargets().size() < 2) {
    // The bucket names the target only if another target passes.
    GTEST_SKIP() << "this machine has one target only";
  }
  const std::string best = optimized::ActiveTarget();
  Subject subject = SubjectOf<CopiesOneLess>();
  subject.make = [best, faulty = subject.make](const CacheSpec& spec) {
    return optimized::ActiveTarget() == best ? faulty(spec) : MakeCache(spec);
  };
  const History shrunk = Shrink(FirstFailure(1, 60, subject), subject);
  EXPECT_EQ(BucketOf(shrunk, subject),
            "faulty-" + best + "-subject-cells+put+copy");
  EXPECT_EQ(optimized::ActiveTarget(), best);
}

using Notes = std::vector<std::string>;

TEST(Answers, ThoseThatNeverCameAreNoted) {
  AnswerCounts counts;
  EXPECT_EQ(NotesOn(counts), Notes());
  counts.prefixes.Count(false);
  counts.prefixes.Count(false);
  counts.resumes.Count(false);
  counts.opens.Count(false);
  EXPECT_EQ(NotesOn(counts), (Notes{"find_prefix found nothing in 2 prompts",
                                    "can_resume was never true in 1 calls",
                                    "open found nothing in 1 prompts"}));
  AnswerCounts more;
  more.resumes.Count(true);
  more.opens.Count(true);
  counts.Add(more);
  EXPECT_EQ(NotesOn(counts), Notes{"find_prefix found nothing in 2 prompts"});
}

TEST(Answers, AnotherProcessGetsAllCounts) {
  const AnswerCounts counts = {{6, 1}, {5, 2}, {4, 3}};
  const AnswerCounts same = AnswerCounts::Of(counts.Numbers());
  EXPECT_EQ(same.Numbers(), (AnswerCounts::AllNumbers{6, 1, 5, 2, 4, 3}));
  EXPECT_EQ(same.opens.came, 3);
}

}  // namespace
}  // namespace kvtwin::props
