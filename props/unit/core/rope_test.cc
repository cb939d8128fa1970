// RoPE and the adding shifts compared with long double, written from the text
// of kvtwin/shift.h alone, because all twins share one definition
// (core/shift_row.h).

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/index.h"
#include "core/shift_row.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr std::array kOffsets = {
    1,       -1,       2,      -2,      3,        -5,         63,
    -64,     1000,     -1000,  4095,    65535,    -65536,     65537,
    99999,   100003,   100003, -100003, 16777215, -16777217,  1 << 28,
    1 << 30, kMax - 1, kMax,   -kMax,   -100001,  -(1 << 30), -1234567890};

std::vector<Rope> Ropes() {
  std::vector<Rope> ropes;
  for (const double base : {10000.0, 500000.0, 1e6, 2.0, 0.5}) {
    for (const double scale : {1.0, 0.25, 1.0 / 3, -1.0, 8.0}) {
      ropes.push_back({.base = base, .scale = scale});
    }
  }
  return ropes;
}

struct Range {
  float low;
  float high;
  bool Has(float value) const { return low <= value && value <= high; }
};

// The f32 numbers that a number within `error` of `exact` may be rounded to.
Range Rounded(long double exact, long double error) {
  return {static_cast<float>(exact - error), static_cast<float>(exact + error)};
}

struct ExactTurn {
  Range cosine;
  Range sine;
};

// The exact turn, and by how much a computation in double may differ: the
// exponent, the power, and two products are rounded, each by 2^-53 of itself
// (the power by twice that, as the C library's is within one unit of the last
// place); the exponent's error e counts as e * ln(base). Pair 0 has the power
// 1, so its angle is exact if the first product is. cos and sin change by no
// more than the angle, and are rounded to double themselves, within one unit.
ExactTurn Exactly(const Rope& rope, int dims, int p, std::int32_t offset) {
  const long double exponent = -2.0L * p / dims;
  const long double base = rope.base;
  const long double angle = static_cast<long double>(offset) *
                            static_cast<long double>(rope.scale) *
                            std::pow(base, exponent);
  const long double steps = 4 + std::fabs(exponent * std::log(base));
  const bool exact = p == 0 && static_cast<double>(angle) == angle;
  const long double rounded = exact ? 0 : std::fabs(angle) * steps * 0x1p-53L;
  const long double error = rounded + 0x1p-52L;
  return {Rounded(std::cos(angle), error), Rounded(std::sin(angle), error)};
}

TEST(Rope, TurnsByTheGivenAngle) {
  int pinned = 0;
  int all = 0;
  for (const Rope& rope : Ropes()) {
    for (const int dims : {2, 6, 64, 128}) {
      for (const std::int32_t offset : kOffsets) {
        for (int p = 0; p < dims / 2; ++p) {
          const Turn turn = RopeTurn(rope, dims, p, offset);
          const auto [cosine, sine] = Exactly(rope, dims, p, offset);
          ASSERT_TRUE(cosine.Has(turn.cosine) && sine.Has(turn.sine))
              << fmt::format("base {} scale {} dims {} pair {} offset {}",
                             rope.base, rope.scale, dims, p, offset);
          pinned += cosine.low == cosine.high && sine.low == sine.high ? 1 : 0;
          ++all;
        }
      }
    }
  }
  // Mostly, only one f32 is right.
  EXPECT_GT(pinned, all * 3 / 4);
}

// Small offsets determine the result to the last bit.
TEST(Rope, TurnsBySmallOffsetsToTheBit) {
  for (const auto pairing :
       {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
    for (const std::int32_t offset : {1, -1, 2, -3}) {
      for (const int dims : {64, 128}) {
        const Rope rope = {.pairing = pairing};
        for (int p = 0; p < dims / 2; ++p) {
          const long double angle =
              offset * std::pow(10000.0L, -2.0L * p / dims);
          const Turn turn = RopeTurn(rope, dims, p, offset);
          EXPECT_EQ(turn.cosine, static_cast<float>(std::cos(angle))) << p;
          EXPECT_EQ(turn.sine, static_cast<float>(std::sin(angle))) << p;
        }
      }
    }
  }
}

// Multiplies f32 numbers and rounds to f32. A double has more than twice the
// digits, so rounding twice gives the same as rounding once.
float Times(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}
float Plus(float a, float b) {
  return static_cast<float>(static_cast<double>(a) + static_cast<double>(b));
}

// Returns the two elements of pair p of a head (see kvtwin/shift.h).
std::array<std::size_t, 2> PairOf(const Rope& rope, std::size_t dims,
                                  std::size_t p) {
  if (rope.pairing == Rope::Pairing::kHalves) return {p, p + dims / 2};
  return {2 * p, 2 * p + 1};
}

std::vector<float> Numbers(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    const float unit = static_cast<float>(random() >> 8) * 0x1p-24F;
    number = std::ldexp(unit * 2 - 1, AsInt(random() % 20) - 10);
  }
  return numbers;
}

// Compares `found` with `before` turned, except for the pairs whose turn is not
// known to the bit. Adds the number of the other pairs to `known`.
void ExpectTurned(const Shift& shift, std::int32_t offset, std::size_t head_dim,
                  const std::vector<float>& before,
                  const std::vector<float>& actual, int& known) {
  const Rope& rope = shift.rope;
  const auto wished = AsSize(rope.dims);
  const std::size_t dims =
      (wished == 0 ? head_dim : std::min(wished, head_dim)) / 2 * 2;
  std::vector<float> expected = before;
  for (std::size_t head = 0; head < before.size(); head += head_dim) {
    for (std::size_t p = 0; p < dims / 2; ++p) {
      const auto [cosine, sine] = Exactly(rope, AsInt(dims), AsInt(p), offset);
      const auto [x, y] = PairOf(rope, dims, p);
      float& due_x = expected[head + x];
      float& due_y = expected[head + y];
      if (cosine.low != cosine.high || sine.low != sine.high) {
        due_x = actual[head + x];
        due_y = actual[head + y];
        continue;
      }
      const float old_x = due_x;
      const float old_y = due_y;
      due_x = Plus(Times(old_x, cosine.low), -Times(old_y, sine.low));
      due_y = Plus(Times(old_x, sine.low), Times(old_y, cosine.low));
      ++known;
    }
  }
  ASSERT_EQ(actual, expected)
      << fmt::format("offset {} head_dim {} dims {} base {}", offset, head_dim,
                     dims, rope.base);
}

TEST(Rope, RoundsEachOperation) {
  int known = 0;
  int all = 0;
  for (const auto pairing :
       {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
    for (Rope rope : Ropes()) {
      rope.pairing = pairing;
      for (const auto& [head_dim, dims] :
           {std::pair(2, 0), {7, 0}, {64, 0}, {66, 48}, {10, 64}}) {
        rope.dims = dims;
        const Shift shift = {ShiftKind::kRope, rope, {}};
        for (const std::int32_t offset : kOffsets) {
          const auto size = AsSize(3 * head_dim);
          const std::vector<float> before =
              Numbers(size, static_cast<std::uint32_t>(offset));
          std::vector<float> found = before;
          ASSERT_TRUE(ShiftRow(shift, 0, offset, head_dim, 3, found).ok());
          ExpectTurned(shift, offset, AsSize(head_dim), before, found, known);
          all += 3 * (std::min(head_dim, dims == 0 ? head_dim : dims) / 2);
        }
      }
    }
  }
  EXPECT_GT(known, all * 3 / 4);
}

TEST(Rope, SumsAddTheOffsetAsAnF32) {
  for (const bool tagged : {false, true}) {
    const Shift shift = {tagged ? ShiftKind::kTagAdd : ShiftKind::kAdd, {}, {}};
    for (const std::int32_t offset : kOffsets) {
      const std::vector<float> before = Numbers(15, 7);
      std::vector<float> found = before;
      ASSERT_TRUE(ShiftRow(shift, 0, offset, 5, 3, found).ok());
      for (std::size_t i = 0; i < before.size(); ++i) {
        const bool stays = tagged && i % 5 == 0;
        // An offset has 31 bits: a double holds it, and it is rounded once.
        const auto number = static_cast<float>(static_cast<double>(offset));
        EXPECT_EQ(found[i], stays ? before[i] : Plus(before[i], number));
      }
    }
  }
}

// In a whole cache: a token lies at a large position, and the tokens before it
// leave.
class RopeOf : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, RopeOf, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(RopeOf, MovesTokensFar) {
  constexpr int kHeadDim = 64;
  int known = 0;
  int all = 0;
  for (const auto pairing :
       {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
    for (const std::int32_t gap :
         {1, 5, 1000, 65537, 100003, 16777217, 1 << 30, kMax - 1}) {
      CacheSpec spec;
      spec.shift = {ShiftKind::kRope, {.pairing = pairing}, {}};
      TestCache cache(spec, GetParam());
      ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
      ASSERT_EQ(cache.Start({gap}, {0}), StatusCode::kOk);
      const std::vector<float> before =
          Numbers(2 * kHeadDim, static_cast<std::uint32_t>(gap));
      const TensorView rows =
          DenseView(before.data(), DType::kF32, {kHeadDim, 2, 1, 1});
      ASSERT_TRUE(cache->Put(rows, rows).ok());
      ASSERT_TRUE(cache->Remove(0, 0, gap).ok());
      const CacheState state = *cache->Snapshot();
      ASSERT_EQ(state.cells, (std::vector<CellEntry>{{0, 0, 0}}));
      std::vector<float> found(before.size());
      const auto& key = state.layers.at(0).key.bytes;
      ASSERT_EQ(key.size(), found.size() * sizeof(float));
      std::memcpy(found.data(), key.data(), key.size());
      ExpectTurned(spec.shift, -gap, kHeadDim, before, found, known);
      all += kHeadDim;
      const auto& value = state.layers.at(0).value.bytes;
      EXPECT_EQ(std::memcmp(value.data(), before.data(), value.size()), 0);
    }
  }
  EXPECT_GT(known, all * 3 / 4);
}

}  // namespace
}  // namespace kvtwin::props
