// The names of the checks.

#include "props/base/check_name.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace kvtwin::props {
namespace {

TEST(CheckNames, AreDistinct) {
  const std::set<std::string_view> names(kCheckNames.begin(),
                                         kCheckNames.end());
  EXPECT_EQ(names.size(), kCheckNames.size());
}

}  // namespace
}  // namespace kvtwin::props
