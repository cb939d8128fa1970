#include "props/laws/seen.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvtwin::props {
namespace {

// Returns the difference between two rows of sequence 1 at position 4.
std::string Difference(const std::vector<SeenToken>& left,
                       const std::vector<SeenToken>& right) {
  const Query query = {.position = 4, .seq = 1};
  return CompareRows({{.query = query, .tokens = left}},
                     {{.query = query, .tokens = right}}, DType::kF32,
                     /*slack=*/0)
      .value_or("none");
}

TEST(SeenRows, DifferencesNameFreeCells) {
  const SeenToken free = {.position = -1};
  const SeenToken other = {.position = -1, .key = std::vector<std::byte>(4)};
  const SeenToken first = {.position = 0};
  const std::string row = "in layer 0, sequence 1 at position 4 ";
  EXPECT_EQ(Difference({free, first}, {free, first}), "none");
  EXPECT_EQ(Difference({free, first}, {first}),
            row + "sees positions [0], free cells: 1, and positions [0]");
  EXPECT_EQ(Difference({free}, {other}),
            row + "sees another K row in a free cell");
  EXPECT_EQ(Difference({first}, {{.position = 0, .key = other.key}}),
            row + "sees another K row at position 0");
}

}  // namespace
}  // namespace kvtwin::props
