// Specifications that MakeCache refuses.

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "kvtwin/cache.h"
#include "kvtwin/legacy.h"

namespace kvtwin::props {
namespace {

std::string WhyNot(const CacheSpec& spec) {
  return MakeCache(spec, "reference").status().message();
}

TEST(Factory, RefusesWrongSpecsInsideAWrapper) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kRope;
  Rope& rope = spec.shift.rope;
  constexpr double kEndless = std::numeric_limits<double>::infinity();
  rope.base = kEndless;
  EXPECT_EQ(WhyNot(spec), "rope base is inf");
  rope = {.scale = kEndless};
  EXPECT_EQ(WhyNot(spec), "rope scale is inf");
  for (const int dims : {-2, 3}) {
    rope = {.dims = dims};
    EXPECT_NE(WhyNot(spec).find("it must be even"), std::string::npos);
  }
  CacheSpec wrapper;
  wrapper.kind = Kind::kWrapper;
  wrapper.caches = {CacheSpec(), spec};
  EXPECT_NE(WhyNot(wrapper).find("it must be even"), std::string::npos);
  EXPECT_EQ(LegacyCache::Make(wrapper).status().code(),
            StatusCode::kInvalidArgument);
  wrapper.caches.pop_back();
  EXPECT_TRUE(LegacyCache::Make(wrapper).ok());
}

TEST(Factory, ChecksOnlyTheFieldsThatAKindHas) {
  CacheSpec spec;
  spec.window = spec.memory = spec.chunk = -1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kEncoder;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kChunked;
  EXPECT_NE(WhyNot(spec), "");
  spec.chunk = 1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kSwa;
  EXPECT_NE(WhyNot(spec), "");
  spec.window = 1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kSwaMem;
  EXPECT_NE(WhyNot(spec), "");
}

}  // namespace
}  // namespace kvtwin::props
