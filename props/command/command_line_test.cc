// Tests what the command says about a subcommand that its build lacks, and
// about values that every option refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/base/program.h"
#include "props/command/command.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Returns what the command prints to stderr when it refuses these words.
std::string Refusal(std::vector<std::string> words) {
  words.insert(words.begin(), Program());
  std::vector<char*> arguments;
  std::ranges::transform(words, std::back_inserter(arguments),
                         [](std::string& word) { return word.data(); });
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(RunCommandLine(Size(arguments), arguments.data(), /*more=*/nullptr),
            2);
  return ::testing::internal::GetCapturedStderr();
}

TEST(CommandLine, TheMuseumNeedsAFullBuild) {
  EXPECT_EQ(Refusal({"museum"}),
            "kvtwin: museum is only in a full build: run ./dev build\n");
}

TEST(CommandLine, NoNumberIsOctal) {
  for (const auto& [command, option] :
       std::vector<std::pair<std::string, std::string>>{{"fuzz", "--seed"},
                                                        {"fuzz", "--ops"},
                                                        {"fuzz", "--threads"},
                                                        {"gen", "--seed"},
                                                        {"laws", "--seed"},
                                                        {"certify", "--seed"},
                                                        {"explore", "--cells"},
                                                        {"state", "--sequence"},
                                                        {"shrink", "--runs"}}) {
    for (const std::string value : {"010", "09", "00", "0x9", "+07"}) {
      EXPECT_THAT(Refusal({command, option, value}),
                  StartsWith("kvtwin " + command + ": " + option + ": '" +
                             value + "' begins with 0: numbers are decimal\n"));
    }
  }
  // Other numbers are judged by their range, and seconds have fractions.
  EXPECT_THAT(Refusal({"fuzz", "--ops", "0"}), HasSubstr("not in range 1 to"));
  EXPECT_THAT(Refusal({"fuzz", "--ops=+"}), HasSubstr("--ops: "));
  EXPECT_THAT(Refusal({"fuzz", "--seed", "x"}),
              HasSubstr("--seed: 'x' is not a whole number from 0"));
  EXPECT_THAT(Refusal({"fuzz", "--seconds", "0.05", "--threads", "0"}),
              HasSubstr("--threads: "));
}

// CI has such values where a variable is not set.
TEST(CommandLine, NoValueIsEmpty) {
  const auto refused = [](const std::vector<std::string>& words,
                          const std::string& option) {
    EXPECT_THAT(Refusal(words), StartsWith("kvtwin " + words[0] + ": " +
                                           option + ": the value is empty\n"));
  };
  for (const std::string command : {"gen", "run", "bisect"}) {
    refused({command, ""}, "history");
  }
  for (const std::string option : {"--compare", "--junit", "--backend"}) {
    refused({"certify", option, ""}, option);
  }
  refused({"laws", "--law", "frame", "--history", ""}, "--history");
  refused({"check", "some.jsonl", ""}, "path");
  refused({"check", "some.jsonl", "--html", ""}, "--html");
  refused({"shrink", "some.jsonl", "--with", "cat", "--out", ""}, "--out");
  // A state may be of the model ''.
  EXPECT_THAT(Refusal({"state", "no/such/state", "--model", ""}),
              HasSubstr("'no/such/state'"));
}

}  // namespace
}  // namespace kvtwin::props
