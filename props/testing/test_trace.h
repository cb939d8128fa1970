// Recordings for tests, as text, and the oracle's expected verdicts on them.

#ifndef KVTWIN_PROPS_TESTING_TEST_TRACE_H_
#define KVTWIN_PROPS_TESTING_TEST_TRACE_H_

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "props/base/text_file.h"
#include "props/oracle/judge.h"

namespace kvtwin::props {

// In a RapidCheck property: returns the text with one to four bytes replaced.
inline std::string WithChangedBytes(std::string text) {
  const int count = *rc::gen::inRange(1, 5);
  for (int i = 0; i < count; ++i) {
    char& byte = text[*rc::gen::inRange<std::size_t>(0, text.size())];
    // Most replacements keep it JSON.
    byte = *rc::gen::weightedOneOf<char>(
        {{4, rc::gen::inRange('0', ':')},
         {2, rc::gen::elementOf(std::string("[]{},:\"-.e \n"))},
         {1, rc::gen::arbitrary<char>()}});
  }
  return text;
}

inline const std::vector<std::string> kTwins = {"reference", "optimized"};

// Two tokens; the first one is then removed (docs/trace_format.md).
inline constexpr const char* kHeader =
    R"({"kvtrace":1,"producer":"test","placement":"contiguous",)"
    R"("cache":{"type":"causal","shift":"tag_add"},)"
    R"("config":{"cache_padding":1,"mask_batch_padding":1,)"
    R"("permuted_v":false,"mask_dtype":"f32"},)"
    R"("init":{"dtype":"f32","max_sequences":1,"capacity":4,"max_batch":2},)"
    R"("model":{"layers":1,"k_head_dim":2,"kv_heads":1,"v_head_dim":1}})";
inline constexpr const char* kStart =
    R"({"op":"start_forward","positions":[0,1],"sequences":[0,0],)"
    R"("result":"ok","cells":[0,1]})";
inline constexpr const char* kPut =
    R"({"op":"put","layer":0,)"
    R"("key":{"shape":[2,1,2],"data":[100,1000,200,1001]},)"
    R"("value":{"shape":[1,1,2],"data":[100,200]}})";
inline constexpr const char* kGet =
    R"({"op":"get","layer":0,"first_cell":0,)"
    R"("key":{"shape":[2,1,2],"data":[100,1000,200,1001]},)"
    R"("value":{"shape":[1,1,2],"data":[100,200]},)"
    R"("mask":{"shape":[2,2],"rows":["10","11"]}})";
inline constexpr const char* kRemove =
    R"({"op":"remove","seq":0,"begin":0,"end":1,"result":"ok"})";

// A pool: three tokens, and a fork that gets one more (docs/trace_format.md).
inline const std::vector<std::string> kPoolLines = {
    R"({"kvtrace":1,"producer":"test","placement":"lowest",)"
    R"("cache":{"type":"paged"},"pool":{"block_size":2,"blocks":4,)"
    R"("max_seq_len":8,"layers":1,"kv_heads":1,"k_head_dim":2,)"
    R"("v_head_dim":1,"dtype":"f32","layout":"token_major"}})",
    R"({"op":"open","prompt":[7,8,9],"salt":"s","extra":["x","y"],)"
    R"("len":0,"result":0})",
    R"({"op":"append","seq":0,"layer":0,"start":0,"result":"ok",)"
    R"("key":{"shape":[2,1,3],"data":[100,1000,200,1001,300,1002]},)"
    R"("value":{"shape":[1,1,3],"data":[100,200,300]}})",
    R"({"op":"commit","seq":0,"tokens":[7,8,9]})",
    R"({"op":"fork","seq":0,"len":3,"result":1})",
    R"({"op":"append","seq":1,"layer":0,"start":3,"result":"ok",)"
    R"("key":{"shape":[2,1,1],"data":[400,1003]},)"
    R"("value":{"shape":[1,1,1],"data":[400]}})",
    R"({"op":"commit","seq":1,"new_tokens":1})",
    R"({"op":"seq_len","seq":1,"len":4})",
    R"({"op":"views","seq":1,"layer":0,"blocks":[0,2],)"
    R"("key":{"shape":[2,1,4],"data":[100,1000,200,1001,300,1002,400,1003]},)"
    R"("value":{"shape":[1,1,4],"data":[100,200,300,400]}})",
    R"({"op":"slots","seq":0,"begin":1,"slots":[1,2]})",
    R"({"op":"csr","seqs":[0,1],"indptr":[0,2,4],"indices":[0,1,0,2],)"
    R"("last_page_len":[1,2]})",
    R"({"op":"table","seqs":[1,0],"columns":2,"blocks":[0,2,0,1],)"
    R"("seq_lens":[4,3]})",
    R"({"op":"usage","free":1,"cached":0,"used":3,"shared":1})",
    R"({"op":"truncate","seq":1,"len":1})",
    R"({"op":"free","seq":0})",
    R"({"op":"table","seqs":[1],"columns":1,"blocks":[0],"seq_lens":[1]})",
};

inline std::string Replaced(std::string text, const std::string& from,
                            const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, text.npos) << from << " in " << text;
  return at == text.npos ? text : text.replace(at, from.size(), to);
}

inline std::string Lines(const std::vector<std::string>& lines) {
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

inline Judgement JudgeText(const std::string& text) {
  std::istringstream in(text);
  return Judge(in, kTwins);
}

using Verdicts = std::vector<std::pair<Verdict, std::int64_t>>;

// Judges recordings that follow one another. Returns the verdict and the line
// of each.
inline Verdicts JudgeSeveral(std::istream& in) {
  TraceReader reader(in, /*several=*/true);
  Verdicts verdicts;
  do {
    const Judgement judgement = Judge(reader, {"reference"});
    verdicts.emplace_back(judgement.verdict(), judgement.line());
  } while (reader.SkipToHeader());
  EXPECT_FALSE(reader.error());
  return verdicts;
}

inline void ExpectBadInput(const std::string& text, std::int64_t line,
                           const std::string& reason) {
  const Judgement judgement = JudgeText(text);
  EXPECT_EQ(VerdictName(judgement.verdict()), "bad_input") << text;
  EXPECT_EQ(LevelName(judgement.level), "none");
  EXPECT_EQ(judgement.line(), line) << judgement.reason() << "\n" << text;
  EXPECT_NE(judgement.reason().find(reason), std::string::npos)
      << "'" << judgement.reason() << "' lacks '" << reason << "'";
}

inline void ExpectReject(const std::string& text, std::int64_t line,
                         Level level) {
  const Judgement judgement = JudgeText(text);
  EXPECT_EQ(VerdictName(judgement.verdict()), "reject") << judgement.reason();
  EXPECT_EQ(judgement.line(), line) << judgement.reason();
  EXPECT_EQ(LevelName(judgement.level), LevelName(level)) << judgement.reason();
}

inline void ExpectAccept(const std::string& text, Level level) {
  const Judgement judgement = JudgeText(text);
  EXPECT_EQ(VerdictName(judgement.verdict()), "accept")
      << judgement.line() << ": " << judgement.reason();
  EXPECT_EQ(LevelName(judgement.level), LevelName(level));
}

inline std::vector<std::filesystem::path> Recordings(
    const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           std::filesystem::path(KVTWIN_RECORDINGS) / folder)) {
    if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  EXPECT_FALSE(files.empty());
  return files;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_TEST_TRACE_H_
