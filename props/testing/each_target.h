// Tests that run on each instruction set, and with each choice of fast paths.

#ifndef KVTWIN_PROPS_TESTING_EACH_TARGET_H_
#define KVTWIN_PROPS_TESTING_EACH_TARGET_H_

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "core/index.h"
#include "optimized/fast_paths.h"
#include "optimized/targets.h"

namespace kvtwin::props {

// The parameter names an instruction set.
class EachTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    before_ = optimized::ActiveTarget();
    ASSERT_TRUE(optimized::SelectTarget(GetParam()));
    ASSERT_EQ(optimized::ActiveTarget(), GetParam());
  }
  void TearDown() override { EXPECT_TRUE(optimized::SelectTarget(before_)); }

 private:
  std::string before_;
};

// Fast paths are taken always, never, or where they pay.
class EachPath : public ::testing::TestWithParam<optimized::FastPaths> {
 public:
  static std::string Name(
      const ::testing::TestParamInfo<optimized::FastPaths>& info) {
    constexpr std::array kNames = {"auto", "on", "off"};
    return kNames.at(AsSize(info.param));
  }

 protected:
  void SetUp() override { optimized::ForceFastPaths(GetParam()); }
  void TearDown() override {
    optimized::ForceFastPaths(optimized::FastPaths::kAuto);
  }
};
inline constexpr std::array kEachPath = {optimized::FastPaths::kAuto,
                                         optimized::FastPaths::kOn,
                                         optimized::FastPaths::kOff};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_EACH_TARGET_H_
