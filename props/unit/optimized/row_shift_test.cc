// Compares the shift of rows with its definition, on each instruction set.

#include "optimized/row_shift.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/index.h"
#include "core/shift_row.h"
#include "optimized/bit_tree.h"
#include "optimized/targets.h"
#include "props/history/history.h"
#include "props/testing/agreement.h"
#include "props/testing/each_target.h"
#include "props/testing/float_bits.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

class RowShiftOn : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, RowShiftOn,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

// Heads from a pair to several vectors and a rest, and of 4 and 8 vectors on
// every target.
TEST_P(RowShiftOn, ShiftsRowsAsTheDefinitionDoes) {
  for (const ShiftKind kind :
       {ShiftKind::kAdd, ShiftKind::kTagAdd, ShiftKind::kRope}) {
    for (const auto pairing :
         {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
      for (int head_dim = 2; head_dim < 150; ++head_dim) {
        Shift shift;
        shift.kind = kind;
        shift.rope.pairing = pairing;
        shift.rope.scale = 0.3;
        optimized::RowShift fast;
        fast.Prepare(shift, -5, head_dim);
        Floats expected(AsSize(3 * head_dim));
        for (std::size_t i = 0; i < expected.size(); ++i) {
          expected[i] = std::sin(static_cast<float>(i * i)) * 9;
        }
        for (const bool with_nan : {false, true}) {
          // Its bits are kept, and its pair's other element gets others.
          if (with_nan) expected.back() = std::bit_cast<float>(0xFFC01234);
          Floats actual = expected;
          fast.Apply(DType::kF32, std::as_writable_bytes(std::span(actual)));
          ASSERT_TRUE(ShiftRow(shift, 0, -5, head_dim, 3, expected).ok());
          EXPECT_EQ(FloatBits(actual), FloatBits(expected)) << head_dim;
        }
      }
    }
  }
}

TEST_P(RowShiftOn, AgreesWithTheReferenceOnAnglesThatAreNaN) {
  for (const double base : {1e-300, 1e300}) {
    History history = *ParseHistory(
        "kvt1 shift=rope dims=8,1,1 | put 0*3 | drop 0:0-1 | get");
    history.setup.spec.shift.rope.base = base;
    history.setup.spec.shift.rope.scale = 1e300;
    ExpectAgreement(history);
  }
}

// A head of 4,096 elements is wider than the 2,048 that are converted at a
// time, and the keys have more than 1 MiB, so that threads share them.
TEST(RowShift, WideHeadsAreShiftedByManyThreads) {
  for (const char* shift : {"add", "tag_add", "rope"}) {
    ExpectAgreement(*ParseHistory(
        std::string("kvt1 dtype=q8_0 layers=2 dims=4096,1,32 cap=300 batch=300 "
                    "shift=") +
        shift + " | put 0*300 | drop 0:0-1 | put 0*1 | get"));
  }
}

TEST(RowShift, AShiftWithoutEffectIsIdle) {
  Shift shift;
  shift.kind = ShiftKind::kCustom;  // The function is null.
  std::array<float, 2> key = {1, 2};
  EXPECT_TRUE(ShiftRow(shift, 0, 0, 2, 1, key).ok());
  EXPECT_EQ(key[1], 2);
  optimized::RowShift row_shift;
  shift.kind = ShiftKind::kRope;
  for (const int head_dim : {2, 1, 2}) {  // Each call prepares anew.
    row_shift.Prepare(shift, -1, head_dim);
    EXPECT_EQ(row_shift.idle(), head_dim == 1);
  }
  for (const ShiftKind kind : {ShiftKind::kNone, ShiftKind::kIdentity,
                               ShiftKind::kAdd, ShiftKind::kTagAdd}) {
    const bool adds = kind == ShiftKind::kAdd || kind == ShiftKind::kTagAdd;
    shift = {.kind = kind, .rope = {}, .fn = {}};
    row_shift.Prepare(shift, -1, 2);
    EXPECT_EQ(row_shift.idle(), !adds);
  }
}

}  // namespace
}  // namespace kvtwin::props
