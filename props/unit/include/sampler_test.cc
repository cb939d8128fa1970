// A sampler draws tokens by their weights, and by its seed alone.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/index.h"
#include "kvtwin/serving.h"

namespace kvtwin::props {
namespace {

TEST(Sampler, DrawsByTheWeights) {
  const std::vector<float> logits = {std::log(1.F), std::log(2.F),
                                     std::log(5.F), -1000};
  const auto counts = [&](double temperature, double top_p) {
    Sampler sampler(temperature, top_p, 1);
    std::vector<int> drawn(4);
    for (int i = 0; i < 8000; ++i) ++At(drawn, sampler(logits));
    return drawn;
  };
  EXPECT_EQ(counts(0, 1)[2], 8000);
  EXPECT_EQ(counts(1, 0)[2], 8000);
  const std::vector<int> all = counts(1, 1);
  EXPECT_NEAR(all[0], 1000, 150);
  EXPECT_NEAR(all[1], 2000, 200);
  EXPECT_EQ(all[3], 0);
  // The weights 1, 4 and 25.
  EXPECT_NEAR(counts(0.5, 1)[0], 8000 / 30, 80);
  // The first two have 7/8 of the weight.
  EXPECT_EQ(counts(1, 0.87)[0], 0);
  EXPECT_NEAR(counts(1, 0.87)[1], 8000 * 2 / 7, 200);
  EXPECT_GT(counts(1, 0.88)[0], 0);
}

// The likeliest token has exactly half of the weight: the others have a
// quarter.
TEST(Sampler, DrawsNothingBeyondAnExactPart) {
  Sampler sampler(1 / std::log(2.0), 0.5, 1);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(sampler(std::vector{-1.F, 0.F, -1.F}), 1);
  }
}

TEST(Sampler, EqualSamplersDrawEqualTokens) {
  const std::vector<float> logits(100, 1);
  const auto drawn = [&](std::uint64_t seed) {
    Sampler sampler(1, 1, seed);
    std::vector<int> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler(logits));
    return tokens;
  };
  EXPECT_EQ(drawn(1), drawn(1));
  EXPECT_NE(drawn(1), drawn(2));
}

// Weights are summed in blocks of 256. Tokens that a grammar excludes have
// -infinity.
TEST(Sampler, DrawsFromAllBlocks) {
  std::vector<float> logits(700, -std::numeric_limits<float>::infinity());
  const std::vector<std::int64_t> allowed = {0, 255, 256, 511, 512, 699};
  for (const std::int64_t token : allowed) At(logits, token) = 3;
  Sampler sampler(1, 1, 1);
  std::vector<int> drawn(logits.size());
  for (int i = 0; i < 6000; ++i) ++At(drawn, sampler(logits));
  for (const std::int64_t token : allowed) {
    EXPECT_NEAR(At(drawn, token), 1000, 150) << token;
    At(drawn, token) = 0;
  }
  EXPECT_EQ(drawn, std::vector<int>(logits.size()));
}

TEST(Sampler, HasAnAnswerToAnyLogits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  Sampler sampler(1, 0.9, 1);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(sampler(std::vector{kNan, 1.F, kNan}), 1);
    EXPECT_EQ(sampler(std::vector{0.F, kInfinite}), 1);
    EXPECT_EQ(sampler(std::vector{-kInfinite, 3.F}), 1);
    EXPECT_EQ(sampler(std::vector{kNan, kNan}), 0);
    EXPECT_EQ(sampler(std::vector{-kInfinite, -kInfinite}), 0);
    EXPECT_EQ(sampler(std::vector{2.F}), 0);
  }
}

}  // namespace
}  // namespace kvtwin::props
