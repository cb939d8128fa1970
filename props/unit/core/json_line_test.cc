// Messages about lines that are not JSON.

#include "core/json_line.h"

#include <gtest/gtest.h>

namespace kvtwin::props {
namespace {

TEST(JsonLine, PrintsAnyBytes) {
  EXPECT_EQ(Printable(" ~\x1f\x7f\xe4", 5), " ~\\x1f\\x7f\\xe4");
  EXPECT_EQ(Printable("abc", 3), "abc");
  EXPECT_EQ(Printable("abcd", 3), "abc...");
}

TEST(JsonLine, NamesTheColumnOfAnError) {
  JsonValue object;
  EXPECT_TRUE(ParseJsonLine("{?", object).starts_with("not JSON: column 2: "));
  EXPECT_EQ(ParseJsonLine(std::string("{\0}", 3), object),
            "not JSON: a NUL at column 2");
}

}  // namespace
}  // namespace kvtwin::props
