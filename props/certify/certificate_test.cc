// Certificates: reading, comparing and JUnit. The script certify_test.py makes
// them.

#include "props/certify/certificate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvtwin::props {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Certificate Example() {
  return {
      .backend = "mine <3>",
      .profile = "ollama-0.15",
      .differs = {"copy adds (kvtwin: replaces)"},
      .claims = "visibility",
      .right = true,
      .seed = 7,
      .operations = 1000,
      .histories = 12,
      .levels = {{"identity", Outcome::kNotJudged, "not tried"},
                 {"visibility", Outcome::kHolds, "holds"}},
      .laws = {{"frame", "S26", Outcome::kHolds, 200, 60, "", ""},
               {"copy_twice", "S27", Outcome::kNotJudged, 0, 0, "none", ""}},
      .rules = {"S2", "S16"},
      .not_declared = {"CAN_MIX"},
      .marks = {{"filled", 3}, {"shift", 0}},
      .findings = {{"visibility", "subject: rows", "mine-rows", "S2",
                    "row 0 misses \"a\" token", "kvt1 | put 0*1",
                    "kvtwin run"}}};
}

std::string TextOf(const Certificate& certificate) {
  return ToJson(certificate).dump();
}

TEST(Certificate, IsReadAsItWasWritten) {
  const std::string text = TextOf(Example());
  const Result<Certificate> read = ReadCertificate(text + "\n");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(TextOf(*read), text);
  EXPECT_THAT(ChangesSince(Example(), *read), IsEmpty());
}

TEST(Certificate, WithChangesIsRead) {
  nlohmann::ordered_json json = ToJson(Example());
  json["changes"] = {{{"change", "seed"}, {"worse", false}}};
  EXPECT_TRUE(ReadCertificate(json.dump()).ok());
}

TEST(Certificate, DamageIsRefused) {
  const auto message = [](std::string text) {
    return ReadCertificate(text).status().message();
  };
  EXPECT_THAT(message(""), HasSubstr("not a certificate"));
  EXPECT_THAT(message("{}"), HasSubstr("certificate is missing"));
  EXPECT_THAT(message("[]"), HasSubstr("not a certificate"));
  EXPECT_THAT(message(std::string(100000, '[')),
              HasSubstr("not a certificate"));
  std::string text = TextOf(Example());
  text.replace(text.find("\"right\":true"), 12, "\"right\":null");
  EXPECT_THAT(message(text), HasSubstr("right is null"));
  text = TextOf(Example());
  text.replace(text.find("\"seed\":7"), 8, "\"seed\":8");
  EXPECT_THAT(message(text), HasSubstr("its hash is wrong"));
  text = TextOf(Example());
  text.replace(text.find("\"filled\":3"), 10, "\"filled\":[");
  EXPECT_THAT(message(text), HasSubstr("not a certificate"));
  text = TextOf(Example());
  text.replace(text.find("\"outcome\":\"holds\""), 17, "\"outcome\":\"great\"");
  EXPECT_THAT(message(text), HasSubstr("levels[1].outcome is 'great'"));
}

// The changes from Example() to `now`, those that are worse with "!".
std::vector<std::string> Changes(const Certificate& now) {
  std::vector<std::string> texts;
  for (const Change& change : ChangesSince(Example(), now)) {
    texts.push_back((change.worse ? "! " : "") + change.text);
  }
  return texts;
}

TEST(Certificate, ChangesAreNamed) {
  Certificate now = Example();
  now.levels[0].outcome = Outcome::kHolds;
  now.levels[1].outcome = Outcome::kBroken;
  EXPECT_THAT(Changes(now),
              ElementsAre("level identity: not judged before, now holds",
                          "! level visibility: holds before, now broken"));
  now = Example();
  now.laws[0].outcome = Outcome::kNotJudged;
  now.laws.pop_back();
  EXPECT_THAT(Changes(now),
              ElementsAre("! law frame: holds before, now not judged",
                          "law copy_twice: not judged before, now absent"));
  now = Example();
  now.findings[0].bucket = "mine-mask";
  EXPECT_THAT(Changes(now), ElementsAre("finding gone: mine-rows",
                                        "! new finding: mine-mask"));
  now = Example();
  now.rules = {"S2", "S3"};
  EXPECT_THAT(Changes(now), ElementsAre("! lost rule: S16", "added rule: S3"));
  now = Example();
  now.not_declared = {"CAN_SHARE"};
  EXPECT_THAT(Changes(now), ElementsAre("declared ability: CAN_MIX",
                                        "! withdrawn ability: CAN_SHARE"));
  now = Example();
  now.marks = {{"filled", 0}, {"shift", 1}};
  EXPECT_THAT(Changes(now), ElementsAre("! lost rare state: filled",
                                        "added rare state: shift"));
  now = Example();
  now.version = "0.2.0";
  now.seed = 8;
  now.differs.clear();
  EXPECT_THAT(Changes(now),
              ElementsAre(HasSubstr("now '0.2.0'"), "seed: '7' before, now '8'",
                          HasSubstr("no longer differs in a rule")));
}

TEST(Certificate, JUnitHasEachLevelAndLaw) {
  Certificate broken = Example();
  broken.right = false;
  broken.levels[1] = {"visibility", Outcome::kBroken, "does not hold"};
  const std::string text = JUnitText(broken);
  EXPECT_THAT(text, HasSubstr("name=\"kvtwin certify mine &lt;3&gt;\" "
                              "tests=\"4\" failures=\"1\" skipped=\"2\""));
  EXPECT_THAT(text,
              HasSubstr("<failure message=\"does not hold\">does not hold\nrow "
                        "0 misses &quot;a&quot; token\nhistory: kvt1 | put 0*1"
                        "\nrerun: kvtwin run</failure>"));
  EXPECT_THAT(text, HasSubstr("<testcase classname=\"kvtwin.law\" "
                              "name=\"frame\"/>"));
}

TEST(Certificate, BrokenLevelAboveTheClaimIsNoFailure) {
  Certificate right = Example();
  right.levels[0].outcome = Outcome::kBroken;
  EXPECT_THAT(JUnitText(right), HasSubstr("failures=\"0\""));
}

// Only pools without groups take rows.
TEST(Certificate, PoolsWithAndWithoutGroupsAreJudgedApart) {
  for (const bool groups : {false, true}) {
    const auto subject = [](Level level, const PoolLaw*) {
      Subject made = {.name = "mine", .level = level};
      made.run_pool = [](const PagedHistory& history,
                         const PoolRunOptions& options) {
        if (options.counts != nullptr) {
          const bool takes = history.spec.groups.empty();
          (takes ? options.counts->whole : options.counts->full) += 1;
        }
        return RunResult{.ran = true, .operations = 1, .views = 1};
      };
      return made;
    };
    const PoolInfo info = {
        .name = "mine", .levels = {Level::kVisibility}, .groups = groups};
    CertifyOptions options;
    options.fuzz.operations = 20;
    const Certificate made = CertifyPool(
        info, options, subject, [](const auto&...) { return std::string(); });
    EXPECT_EQ(made.levels.at(1).outcome,
              groups ? Outcome::kNotJudged : Outcome::kHolds);
    EXPECT_EQ(made.rules.empty(), groups);
  }
}

}  // namespace
}  // namespace kvtwin::props
