// Tests which failures are skipped because they are known.

#include "props/report/finding_filter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

TEST(FindingFilter, ABucketEndsInKindsAndOperations) {
  const auto bucket = [](const std::string& line) {
    std::string text = "a-rows";
    AppendHistory(*ParseHistory(line), text);
    return text;
  };
  EXPECT_EQ(bucket("kvt1 | put 0*1 | copy 0>1:1 | get"), "a-rows+put+copy+get");
  EXPECT_EQ(bucket("kvt1 kind=swa window=1 | put 0*1"), "a-rows+swa+put");
  EXPECT_EQ(bucket("kvt1 kind=wrapper caches=causal/swa:w2 | put 0*1"),
            "a-rows+wrapper+swa+put");
}

// A bucket is a word of a shell, and its first "+" ends the check.
TEST(FindingFilter, ABucketIsOneWord) {
  EXPECT_EQ(NameInBucket("ollama-0.12_x"), "ollama-0.12_x");
  EXPECT_EQ(NameInBucket("Zwischenl\xc3\xa4ger"), "Zwischenl\xc3\xa4ger");
  const std::string name = "block pool+1 'n' $(rm)";
  const std::string word = "block-pool-1--n----rm-";
  Subject subject = TwinSubject("optimized");
  subject.name = name;
  EXPECT_EQ(BucketOf(*ParseHistory("kvt1 | put 0*1"), subject),
            word + "-not-reproduced");
  const Failure failure = {.check = "subject: pool", .text = "views: 3 rows"};
  Subject pools = TwinSubject("optimized");
  pools.name = name;
  // The first operation of a pool opens a sequence, whatever it is.
  EXPECT_EQ(Explain(*ParsePagedHistory("kvp1 | append 0 0 0 | append 0 0 0"),
                    failure, pools)
                .bucket,
            word + "-views-rows+open+append");
}

// The bucket of a pool has the telling words of the sentence, and no more.
TEST(FindingFilter, TheSentenceOfAPoolBecomesFewWords) {
  const auto signature = [](std::string text) {
    return SignatureOf("p",
                       {.check = "subject: pool", .text = std::move(text)});
  };
  EXPECT_EQ(signature("views: position 1 of sequence 0 has as its V that of a "
                      "row that was never appended\nmore"),
            "p-views-v-row-never-appended");
  EXPECT_EQ(signature("usage: one two three four five six seven"),
            "p-usage-one-two-three-four-five");
  EXPECT_EQ(signature("1 2"), "p");
}

TEST(FindingFilter, AKnownFindingIsABucketOrACheck) {
  const KnownFinding whole("a-rows+swa+put+copy");
  EXPECT_TRUE(whole.Is("a-rows+swa+put+copy"));
  EXPECT_FALSE(whole.Is("a-rows+swa+put+copy+get"));
  EXPECT_FALSE(whole.Is("a-rows"));
  const KnownFinding check("a-rows");
  EXPECT_TRUE(check.Is("a-rows"));
  EXPECT_TRUE(check.Is("a-rows+put"));
  EXPECT_FALSE(check.Is("a-rows-too+put"));

  EXPECT_TRUE(whole.IsIn({"swa"}, {"put", "get", "copy"}));
  EXPECT_TRUE(whole.IsIn({"wrapper", "swa"}, {"put", "copy"}));
  EXPECT_FALSE(whole.IsIn({}, {"put", "copy"}));
  EXPECT_FALSE(whole.IsIn({"swa"}, {"copy", "put"}));
  EXPECT_FALSE(check.IsIn({}, {"put"}));
}

// A filter of findings of one check. Records the histories that the filter runs
// and shrinks.
class Filters {
 public:
  explicit Filters(const std::set<std::string>& known) : filter_(known) {}

  bool Passes(const std::string& line, std::int64_t operations = 0) {
    ran.clear();
    shrunk.clear();
    const auto run = [&](const History& history) -> std::optional<std::string> {
      ran.push_back(ToText(history));
      return fails_without ? std::optional<std::string>("a-rows")
                           : std::nullopt;
    };
    const auto bucket_of =
        [&](const History& tried,
            const FindingFilter::IsKnown<History>& is_known) {
          shrunk.push_back(ToText(tried));
          for (const std::string& plainer : shorter) {
            if (is_known && is_known(*ParseHistory(plainer), "a-rows"))
              continue;
            std::string made = "a-rows";
            AppendHistory(*ParseHistory(plainer), made);
            return made;
          }
          return bucket;
        };
    return filter_.Passes(*ParseHistory(line), "a-rows", operations, run,
                          bucket_of, passed_over);
  }

  bool fails_without = false;  // Whether it fails without the known operations.
  std::vector<std::string> shorter;  // The results of shrinking, if unknown;
  std::string bucket;                // otherwise this bucket.
  std::vector<std::string> ran;
  std::vector<std::string> shrunk;
  std::map<std::string, std::int64_t> passed_over;

 private:
  FindingFilter filter_;
};

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(FindingFilter, RunsAHistoryWithoutKnownFindings) {
  Filters filter({"a-rows+put+copy"});
  const std::string line = "kvt1 | put 0*1 | copy 0>1:1 | get | copy 0>1:1";
  EXPECT_TRUE(filter.Passes(line));
  EXPECT_THAT(filter.ran, ElementsAre("kvt1 | put 0*1 | get",
                                      "kvt1 | copy 0>1:1 | get | copy 0>1:1"));
  EXPECT_THAT(filter.shrunk, IsEmpty());
  EXPECT_THAT(filter.passed_over, ElementsAre(Pair("a-rows+put+copy", 1)));
  filter.fails_without = true;
  filter.bucket = "a-rows+put+get";
  EXPECT_FALSE(filter.Passes(line));
  EXPECT_THAT(filter.shrunk, ElementsAre("kvt1 | put 0*1 | get"));
  // Shrinking may lead to the known one all the same.
  filter.bucket = "a-rows+put+copy";
  EXPECT_TRUE(filter.Passes(line));
  EXPECT_THAT(filter.shrunk, Contains("kvt1 | put 0*1 | get").Times(2));
}

TEST(FindingFilter, LeavesOutAnOperationOfEachFinding) {
  Filters filter({"a-rows+put+copy", "b-mask+put+drop", "a-rows+swa+put"});
  EXPECT_TRUE(filter.Passes("kvt1 | put 0*1 | copy 0>1:1 | drop 0:0-1"));
  EXPECT_THAT(filter.ran, ElementsAre("kvt1 | put 0*1", "kvt1 | drop 0:0-1",
                                      "kvt1 | copy 0>1:1",
                                      "kvt1 | copy 0>1:1 | drop 0:0-1"));
}

// Shrinking may lead to a known bug that the history has not.
TEST(FindingFilter, ShrinksAgainWithoutKnownFindings) {
  const std::string line = "kvt1 | put 0*1 | get | copy 0>1:1";
  for (const std::string plainer :
       {"kvt1 kind=swa window=1 | put 0*1", "kvt1 | put 0*1 | drop 0:0-1",
        "kvt1 kind=swa window=1 | put 0*1 | copy 0>1:1"}) {
    Filters filter({"a-rows+swa+put", "a-rows+put+drop", "a-rows+put+get",
                    "a-rows+swa+put+copy"});
    filter.fails_without = true;
    filter.shorter = {plainer, "kvt1 | put 0*1 | copy 0>1:1"};
    EXPECT_FALSE(filter.Passes(line)) << plainer;
    EXPECT_EQ(filter.shrunk.size(), 2U) << plainer;
  }
}

TEST(FindingFilter, SkipsEveryFailureOfACheck) {
  Filters filter({"a-rows"});
  EXPECT_TRUE(filter.Passes("kvt1 | put 0*1"));
  EXPECT_THAT(filter.ran, IsEmpty());
  EXPECT_THAT(filter.shrunk, IsEmpty());
  EXPECT_THAT(filter.passed_over, ElementsAre(Pair("a-rows", 1)));
}

TEST(FindingFilter, LimitsHowOftenABucketIsComputed) {
  constexpr std::int64_t kOnce = FindingFilter::kOperationsABucket;
  Filters filter({"a-mask"});
  const std::string line = "kvt1 | put 0*1";
  filter.bucket = "a-mask+put";
  EXPECT_TRUE(filter.Passes(line, 5));
  EXPECT_EQ(filter.shrunk.size(), 2U);  // Also past what is known.
  filter.bucket = "a-cells+put";
  EXPECT_TRUE(filter.Passes(line, 6));
  EXPECT_TRUE(filter.Passes(line, 4 + kOnce));
  EXPECT_THAT(filter.shrunk, IsEmpty());
  EXPECT_FALSE(filter.Passes(line, 5 + kOnce));
  EXPECT_FALSE(filter.Passes(line, 5 + kOnce));  // Not known: asked for again.
  EXPECT_EQ(filter.shrunk.size(), 1U);
  EXPECT_THAT(filter.passed_over, ElementsAre(Pair("a-mask", 3)));
}

}  // namespace
}  // namespace kvtwin::props
