// Reports of `check`, `show` and `gen`: how much was judged, the keys of
// --json, the bits of NaN in a difference, a column with rows of two tokens,
// and calls for pools that lack an ability.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "props/compare/visibility.h"
#include "props/report/show.h"
#include "props/search/gen.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

TEST(ShowReport, NamesColumnsWithOneRowOfAToken) {
  const auto shown = [](const std::string& from, const std::string& to) {
    const std::string header = Replaced(kHeader, "contiguous", "other");
    std::istringstream in(
        Lines({header, kStart, kPut, Replaced(kGet, from, to)}));
    ::testing::internal::CaptureStdout();
    Show(in, "test", {.twins = kTwins});
    return ::testing::internal::GetCapturedStdout();
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(shown("[100,200]}", "[100,201]}"),
              HasSubstr("    rows of  0@0    0@1\n"
                        "    column 1 has the K row of 0@1 only\n"));
  EXPECT_THAT(shown("[100,1000,200,1001]", "[101,1000,200,1001]"),
              HasSubstr("    column 0 has the V row of 0@0 only\n"));
}

TEST(CheckReport, CountsWhatWasJudged) {
  const Judged cache =
      JudgeText(Lines({kHeader, kStart, kPut, kGet, kRemove})).judged;
  EXPECT_EQ(JudgedText(cache), "4 calls: 1 get of 2 rows");
  EXPECT_EQ(cache.answers, 3);
  // A misspelled key is an unknown key, which the format ignores.
  const std::string no_value = Replaced(kGet, "value", "valu");
  EXPECT_EQ(
      JudgedText(
          JudgeText(Lines({kHeader, kStart, kPut, kGet, no_value})).judged),
      "4 calls: 2 gets of 4 rows; V of 1 get was not recorded");
  EXPECT_EQ(
      JudgedText(JudgeText(Lines({kHeader, kStart, kPut, no_value})).judged),
      "3 calls: 1 get of 2 rows");
  const std::vector<std::string> refused = {
      kHeader, kStart, kPut, R"({"op":"copy_prefix","src":0,"dst":1,"len":2})",
      R"({"op":"remove","seq":0,"begin":0,"end":1,"result":"shared_cells"})"};
  EXPECT_EQ(JudgedText(JudgeText(Lines(refused)).judged),
            "4 calls: 0 gets of 0 rows, 1 refusal");
  std::vector<std::string> lines = kPoolLines;
  const Judged pool = JudgeText(Lines(lines)).judged;
  EXPECT_EQ(JudgedText(pool), "15 calls: 1 get of 4 rows");
  EXPECT_EQ(pool.answers, 11);
  // At visibility, what an open that finds nothing, a fork or an append
  // answers is its own affair.
  lines[0] = Replaced(lines[0], "lowest", "other");
  EXPECT_EQ(JudgeText(Lines(lines)).judged.answers, 7);
  lines.push_back(
      R"({"op":"open","prompt":[7,8,9],"salt":"s","extra":["x","y"],)"
      R"("len":2,"result":0})");
  lines.push_back(Replaced(
      Replaced(lines[5], R"("result":"ok")", R"("result":"cache_full")"),
      R"("start":3,)", ""));
  EXPECT_EQ(JudgedText(JudgeText(Lines(lines)).judged),
            "17 calls: 1 get of 4 rows, 1 refusal, 1 prefix found");
  // Up to the first wrong line, and with it.
  lines[8] = Replaced(lines[8], "400,1003]", "100,1003]");
  EXPECT_EQ(JudgeText(Lines(lines)).judged.calls, 8);
}

TEST(CheckReport, SaysWhenNothingWasJudged) {
  const auto reason = [](const std::vector<std::string>& lines) {
    const Judgement judgement = JudgeText(Lines(lines));
    EXPECT_EQ(judgement.verdict(), Verdict::kAccept) << judgement.reason();
    EXPECT_EQ(judgement.reason().empty(), judgement.judged.answers > 0);
    return judgement.reason().substr(0, 18);
  };
  const std::string other = Replaced(kHeader, "contiguous", "other");
  EXPECT_EQ(reason({kHeader}), "nothing was judged");
  EXPECT_EQ(reason({other, kStart, kPut}), "nothing was judged");
  EXPECT_EQ(reason({kHeader, kStart}), "");
  EXPECT_EQ(reason({other, kStart, kPut, kGet}), "");
  // No rule says what a get shows after a remove in the same pass.
  EXPECT_EQ(reason({other, kStart, kPut,
                    R"({"op":"remove","seq":0,"begin":1,"end":2147483647,)"
                    R"("result":"ok"})",
                    kGet}),
            "nothing was judged");
  // A yes is a promise, a no is not.
  const std::string resumes =
      R"({"op":"can_resume","seq":0,"pos":1,"result":true})";
  EXPECT_EQ(reason({other, kStart, resumes}), "");
  EXPECT_EQ(reason({other, kStart, Replaced(resumes, "true", "false")}),
            "nothing was judged");
  EXPECT_EQ(reason({kPoolLines[0]}), "nothing was judged");
  const std::string pool = Replaced(kPoolLines[0], "lowest", "other");
  EXPECT_EQ(reason({pool, kPoolLines[1], kPoolLines[2], kPoolLines[3]}),
            "nothing was judged");
}

void AddKeys(const Json& object, const std::string& before,
             std::set<std::string>& keys) {
  for (const auto& [key, value] : object.items()) {
    keys.insert(before + key);
    if (value.is_object()) AddKeys(value, before + key + ".", keys);
  }
}

TEST(CheckReport, HasTheKeysThatTheDocsName) {
  const std::string docs = ReadFile(KVTWIN_DOCS "/adapter.md");
  const std::size_t begin = docs.find("### What check says");
  ASSERT_NE(begin, std::string::npos);
  std::istringstream section(
      docs.substr(begin, docs.find("\n## ", begin) - begin));
  std::set<std::string> named;
  for (std::string line; std::getline(section, line);) {
    if (!line.starts_with("| `")) continue;
    named.insert(line.substr(3, line.find('`', 3) - 3));
  }
  Judgement judgement = JudgeText(Lines({kHeader}));
  judgement.failure = Failure{.twin = "reference", .rules = "S16"};
  std::set<std::string> keys;
  AddKeys(Json::parse(JudgementJson("a file", judgement)), "", keys);
  EXPECT_EQ(keys, named);
}

template <class Bits>
std::string TextOf(DType dtype, std::vector<Bits> bits) {
  return ElementText(DenseView(bits.data(), dtype, {std::ssize(bits), 1, 1, 1}),
                     1);
}

TEST(CheckReport, ShowsTheBitsOfNaN) {
  using U32 = std::vector<std::uint32_t>;
  using U16 = std::vector<std::uint16_t>;
  EXPECT_EQ(TextOf(DType::kF32, U32{0, 0x7FC00001}), "nan (0x7fc00001)");
  EXPECT_EQ(TextOf(DType::kF32, U32{0, 0xFFC00000}), "nan (0xffc00000)");
  EXPECT_EQ(TextOf(DType::kF16, U16{0, 0x7E01}), "nan (0x7e01)");
  EXPECT_EQ(TextOf(DType::kBF16, U16{0, 0x7FC1}), "nan (0x7fc1)");
  EXPECT_EQ(TextOf(DType::kF8, std::vector<std::uint8_t>{0, 0xFF}),
            "nan (0xff)");
  EXPECT_EQ(TextOf(DType::kF32, U32{0, std::bit_cast<std::uint32_t>(0.1F)}),
            "0.1");
  const U32 rows = {0x7FC00000, 0x7FC00001};
  KvView view;
  view.key = DenseView(rows.data(), DType::kF32, {2, 1, 1, 1});
  EXPECT_EQ(RowText(view, 0, VLayout::kPlain),
            "K [nan (0x7fc00000), nan (0x7fc00001)]");
}

// Calls of pools
// ---------------------------------------------------------------------------

constexpr int kHistories = 8;

std::string Calls(const PoolLimits& limits) {
  std::ostringstream out;
  EXPECT_TRUE(Generate({.seed = 8,
                        .kind = {},
                        .paged = true,
                        .limits = limits,
                        .histories = kHistories},
                       out)
                  .ok());
  return out.str();
}

TEST(CheckReport, CallsOfPoolsCanBeLimited) {
  const auto has = [](const std::string& text, const char* what) {
    return text.find(what) != std::string::npos;
  };
  constexpr const char* kFork = R"("op":"fork")";
  constexpr const char* kTruncate = R"("op":"truncate")";
  constexpr const char* kUnknown = R"("new_tokens":)";
  const std::string all = Calls({});
  for (const char* what : {kFork, kTruncate, kUnknown, R"("salt":)",
                           R"("extra":)", R"("dtype":"q4_0")"}) {
    EXPECT_TRUE(has(all, what)) << what;
  }
  const std::string no_fork = Calls({.fork = true, .dtype = {}});
  EXPECT_FALSE(has(no_fork, kFork));
  EXPECT_TRUE(has(no_fork, kTruncate));
  const std::string no_truncate = Calls({.truncate = true, .dtype = {}});
  EXPECT_FALSE(has(no_truncate, kTruncate));
  EXPECT_TRUE(has(no_truncate, kUnknown));
  EXPECT_FALSE(has(Calls({.commit_unknown = true, .dtype = {}}), kUnknown));
  const std::string keyless = Calls({.keys = true, .dtype = {}});
  EXPECT_FALSE(has(keyless, R"("salt":)"));
  EXPECT_FALSE(has(keyless, R"("extra":)"));
  EXPECT_TRUE(has(keyless, kFork));
  for (const DType dtype : {DType::kBF16, DType::kQ8}) {
    std::istringstream lines(Calls({.dtype = dtype}));
    int headers = 0;
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (!json.contains("kvtrace")) continue;
      ++headers;
      EXPECT_EQ(json.at("pool").at("dtype"), DTypeName(dtype));
      EXPECT_FALSE(json.at("pool").contains("v_dtype"));
    }
    EXPECT_EQ(headers, kHistories);
  }
}

}  // namespace
}  // namespace kvtwin::props
