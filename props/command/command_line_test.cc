// Tests what the command says about a subcommand that its build lacks.

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "props/base/program.h"
#include "props/command/command.h"

namespace kvtwin::props {
namespace {

TEST(CommandLine, TheMuseumNeedsAFullBuild) {
  std::string program = Program();
  std::string museum = "museum";
  std::array<char*, 2> arguments = {program.data(), museum.data()};
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(RunCommandLine(2, arguments.data(), /*more=*/nullptr), 2);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "kvtwin: museum is only in a full build: run ./dev build\n");
}

}  // namespace
}  // namespace kvtwin::props
