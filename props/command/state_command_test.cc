// Tests the command `kvtwin state` on files that SaveState wrote.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>

#include "core/dense_tensor.h"
#include "kvtwin/save.h"
#include "props/base/scratch_folder.h"
#include "props/command/command.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class StateCommand : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return (folder_ / name).string();
  }

  // Runs the command, sets `text` to its output, and returns the exit code.
  int Run(const std::string& arguments) {
    CLI::App app;
    int exit_code = 0;
    AddStateCommand(app, exit_code);
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    app.parse("state " + arguments);
    text = ::testing::internal::GetCapturedStdout();
    text += ::testing::internal::GetCapturedStderr();
    return exit_code;
  }

  const ScratchFolder scratch_{"state"};
  const fs::path folder_ = scratch_.path();
  std::string text;
};

// Returns a state with sequences 0 and 1, of `tokens` tokens each; they share
// the first two.
CacheState TwoSequences(int tokens) {
  CacheState state;
  for (int i = 0; i < tokens; ++i) {
    state.cells.push_back({i, i, 0});
    if (i < 2) state.cells.push_back({i, i, 1});
  }
  for (int i = 2; i < tokens; ++i) {
    state.cells.push_back({tokens + i, i + 1, 1});
  }
  state.layers[0] = {FilledTensor(DType::kF16, {4, 2, 2 * tokens - 2, 1}, 1),
                     FilledTensor(DType::kF8, {3, 2, 2 * tokens - 2, 1}, 2)};
  return state;
}

TEST_F(StateCommand, DrawsSmallStates) {
  ASSERT_TRUE(SaveState(TwoSequences(3), Path("small"), "ours").ok());
  EXPECT_EQ(Run(Path("small")), 0);
  EXPECT_EQ(text, Path("small") + R"(: whole, of model 'ours'
  cache: 4 tokens, 6 memberships, 1 layers, 88 bytes of rows
    layers 0: 2 kv_heads, K of 4 f16, V of 3 f8_e4m3
    sequence  tokens  shared  positions
           0       3       2  0-2
           1       3       2  0-1, 3
    cell   0      1      2      5
    token  0+1@0  0+1@1  0@2    1@3
    free   3-4
)");
}

TEST_F(StateCommand, CountsLargeStates) {
  ASSERT_TRUE(SaveState(TwoSequences(500), Path("large")).ok());
  EXPECT_EQ(Run(Path("large")), 0);
  EXPECT_THAT(text, HasSubstr("998 tokens, 1000 memberships"));
  EXPECT_THAT(text, HasSubstr("1     500       2  0-1, 3-500"));
  EXPECT_THAT(text, Not(HasSubstr("token  ")));
  CacheState many;
  for (int i = 0; i < 60; ++i) many.cells.push_back({i, 0, i});
  ASSERT_TRUE(SaveState(many, Path("many")).ok());
  EXPECT_EQ(Run(Path("many")), 0);
  EXPECT_THAT(text, HasSubstr("47       1       0  0\n    ... and 12 more\n"));
}

TEST_F(StateCommand, ShowsEachCacheOfAWrapper) {
  EXPECT_EQ(Run(KVTWIN_RECORDINGS "/state.safetensors"), 0);
  EXPECT_THAT(text, HasSubstr("'a model'"));
  EXPECT_THAT(text, HasSubstr("cache 0: 5 tokens, 7 memberships, 3 layers"));
  EXPECT_THAT(text, HasSubstr("layers 0-1, 3: 2 kv_heads, K of 4 f16"));
  EXPECT_THAT(text, HasSubstr("cache 1: an encoder's, position 5, next "
                              "position 6, 1 layers, 28 bytes"));
  EXPECT_THAT(text, HasSubstr("layers 2: K [2, 3, 1, 2] f16, V [1, 1, 1] f32"));
}

TEST_F(StateCommand, WritesOneSequence) {
  const CacheState state = TwoSequences(5);
  ASSERT_TRUE(SaveState(state, Path("both"), "ours").ok());
  const std::string out = Path("one");
  EXPECT_EQ(Run(fmt::format("{} --sequence 1 --out {}", Path("both"), out)), 0);
  const Result<CacheState> single = LoadState(out, "ours");
  ASSERT_TRUE(single.ok()) << single.status().ToString();
  EXPECT_TRUE(*single == SequenceOf(state, 1));

  EXPECT_EQ(Run(fmt::format("{} --sequence 2 --out {}", out, Path("2"))), 2);
  EXPECT_THAT(text, HasSubstr("kvtwin state: '" + out + "' has no sequence 2"));
  EXPECT_FALSE(fs::exists(Path("2")));
  EXPECT_EQ(Run(fmt::format("{0} {0} --sequence 1 --out {0}", out)), 2);
  EXPECT_EQ(Run(fmt::format("{} --sequence 1 --out {}/2", out, out)), 2);
  EXPECT_THAT(text, HasSubstr("Not a directory"));
}

TEST_F(StateCommand, ReportsWhyAFileIsRefused) {
  ASSERT_TRUE(SaveState(TwoSequences(3), Path("whole"), "ours").ok());
  EXPECT_EQ(Run(Path("whole") + " --model ours"), 0);
  EXPECT_EQ(Run(Path("whole") + " --model theirs"), 2);
  EXPECT_EQ(text, "kvtwin state: '" + Path("whole") +
                      "': the state is of model 'ours', not of 'theirs'\n");
  fs::copy(Path("whole"), Path("short"));
  fs::resize_file(Path("short"), fs::file_size(Path("whole")) - 1);
  // Files after a bad one are shown, too.
  EXPECT_EQ(Run(Path("short") + " " + Path("whole")), 2);
  EXPECT_THAT(text, HasSubstr("short': this is not a state of a cache: "));
  EXPECT_THAT(text, HasSubstr("whole: whole"));
}

}  // namespace
}  // namespace kvtwin::props
