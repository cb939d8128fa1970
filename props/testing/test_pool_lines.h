// Lines of recordings for tests of pools: the pool of kPoolLines with placement
// "other" and one number in a row.

#ifndef KVTWIN_PROPS_TESTING_TEST_POOL_LINES_H_
#define KVTWIN_PROPS_TESTING_TEST_POOL_LINES_H_

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "props/testing/test_trace.h"

namespace kvtwin::props {

using Recording = std::vector<std::string>;

inline std::string Other(const std::vector<std::string>& lines) {
  std::vector<std::string> all = {
      Replaced(Replaced(kPoolLines[0], "lowest", "other"), R"("k_head_dim":2)",
               R"("k_head_dim":1)")};
  all.insert(all.end(), lines.begin(), lines.end());
  return Lines(all);
}

inline std::string Tensor(const std::vector<int>& rows) {
  return fmt::format(R"({{"shape":[1,1,{}],"data":[{}]}})", rows.size(),
                     fmt::join(rows, ","));
}
inline std::string Open(int sequence, const std::vector<int>& prompt = {},
                        int len = 0, const std::string& salt = "") {
  return fmt::format(
      R"({{"op":"open","prompt":[{}],"salt":"{}","len":{},"result":{}}})",
      fmt::join(prompt, ","), salt, len, sequence);
}
inline std::string Append(int sequence, const std::vector<int>& rows,
                          const std::string& result = "ok") {
  return fmt::format(
      R"({{"op":"append","seq":{},"layer":0,"key":{},"value":{},)"
      R"("result":"{}"}})",
      sequence, Tensor(rows), Tensor(rows), result);
}
inline std::string Commit(int sequence, const std::vector<int>& tokens) {
  return fmt::format(R"({{"op":"commit","seq":{},"tokens":[{}]}})", sequence,
                     fmt::join(tokens, ","));
}
inline std::string Fork(int sequence, int len, int id) {
  return fmt::format(R"({{"op":"fork","seq":{},"len":{},"result":{}}})",
                     sequence, len, id);
}
inline std::string Truncate(int sequence, int len) {
  return fmt::format(R"({{"op":"truncate","seq":{},"len":{}}})", sequence, len);
}
inline std::string Free(int sequence) {
  return fmt::format(R"({{"op":"free","seq":{}}})", sequence);
}
inline std::string Views(int sequence, const std::vector<int>& rows) {
  return fmt::format(
      R"({{"op":"views","seq":{},"layer":0,"key":{},"value":{}}})", sequence,
      Tensor(rows), Tensor(rows));
}
inline std::string Blocks(int sequence, const std::vector<int>& blocks,
                          int last) {
  return fmt::format(R"({{"op":"csr","seqs":[{}],"indptr":[0,{}],)"
                     R"("indices":[{}],"last_page_len":[{}]}})",
                     sequence, blocks.size(), fmt::join(blocks, ","), last);
}
inline std::string Usage(int free, int cached, int used, int shared) {
  return fmt::format(
      R"({{"op":"usage","free":{},"cached":{},"used":{},"shared":{}}})", free,
      cached, used, shared);
}

inline void ExpectOther(const Recording& lines) {
  ExpectAccept(Other(lines), Level::kVisibility);
}

// Expects that the recording is rejected at its last line.
inline void ExpectWrong(const Recording& lines, const std::string& reason) {
  const Judgement judgement = JudgeText(Other(lines));
  EXPECT_EQ(VerdictName(judgement.verdict()), "reject") << Other(lines);
  EXPECT_EQ(judgement.line(), std::ssize(lines) + 1) << judgement.reason();
  EXPECT_NE(judgement.reason().find(reason), std::string::npos)
      << "'" << judgement.reason() << "' lacks '" << reason << "'";
}

// Sequence 4 with tokens 7, 8, 9 and rows 1, 2, 3.
inline const Recording kThree = {Open(4, {7, 8, 9}), Append(4, {1, 2, 3}),
                                 Commit(4, {7, 8, 9})};

inline Recording operator+(Recording lines, const Recording& more) {
  lines.insert(lines.end(), more.begin(), more.end());
  return lines;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_TEST_POOL_LINES_H_
