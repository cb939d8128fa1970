#include "props/history/misuse.h"

#include <gtest/gtest.h>

#include <string_view>

namespace kvtwin::props {
namespace {

// Caches without SetCausal are not asked for these misuses.
TEST(Misuses, SayWhetherTheyCallSetCausal) {
  int count = 0;
  for (int which = 0; which < MisuseCount(); ++which) {
    const bool sets_causal = MisuseSetsCausal(which);
    EXPECT_EQ(sets_causal, MisuseName(which).starts_with("SetCausal"))
        << MisuseName(which);
    count += sets_causal ? 1 : 0;
  }
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace kvtwin::props
