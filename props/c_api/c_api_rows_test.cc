// Rows, masks and lists as the C interface takes them.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtwin/kvtwin.h"

namespace kvtwin::props {
namespace {

using ::testing::StartsWith;

TEST(CInterface, RowsBecomeNumbersAndBack) {
  const std::array<float, 3> numbers = {1, -1.5F, 448};
  for (const kvtwin_dtype dtype :
       {KVTWIN_F32, KVTWIN_F16, KVTWIN_BF16, KVTWIN_F8_E4M3}) {
    std::size_t bytes = 0;
    ASSERT_EQ(kvtwin_row_bytes(dtype, 3, &bytes), KVTWIN_OK);
    std::vector<std::byte> row(bytes);
    ASSERT_EQ(kvtwin_row_from_f32(dtype, numbers.data(), 3, row.data(), bytes),
              KVTWIN_OK);
    std::array<float, 3> again = {};
    ASSERT_EQ(kvtwin_row_to_f32(dtype, row.data(), bytes, again.data(), 3),
              KVTWIN_OK);
    EXPECT_EQ(again, numbers);
    kvtwin_tensor tensor{};
    tensor.data = row.data();
    tensor.dtype = dtype;
    std::fill_n(tensor.shape, 4, 1);
    tensor.shape[0] = 3;
    float number = 0;
    ASSERT_EQ(kvtwin_tensor_element(&tensor, 1, 0, 0, 0, &number), KVTWIN_OK);
    EXPECT_EQ(number, -1.5F);
    EXPECT_EQ(kvtwin_tensor_element(&tensor, 3, 0, 0, 0, &number),
              KVTWIN_INVALID_ARGUMENT);
    EXPECT_STREQ(kvtwin_last_error(),
                 "index 0 is 3, tensor has the shape [3, 1, 1]");
  }
  std::size_t bytes = 0;
  EXPECT_EQ(kvtwin_row_bytes(KVTWIN_Q8_0, 64, &bytes), KVTWIN_OK);
  EXPECT_EQ(bytes, 68U);
  EXPECT_EQ(kvtwin_row_bytes(KVTWIN_Q4_0, 33, &bytes), KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_row_bytes(KVTWIN_BITS, 64, &bytes), KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "dtype is 6, rows have 0 to 5");
}

// Their bytes cannot be counted, or end past the end of all memory.
TEST(CInterface, CountsThatNoListHasAreRefused) {
  const auto refused = [](kvtwin_status status, const std::string& why) {
    EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), StartsWith(why));
  };
  std::array<float, 34> row = {};
  float* const at = row.data();
  for (const std::size_t count : {std::size_t{1} << 61, std::size_t{1} << 62,
                                  std::size_t{1} << 63, SIZE_MAX - 31}) {
    const std::string why = fmt::format(
        "numbers has {} elements, a row has at most 2305843009213693951",
        count);
    refused(kvtwin_row_to_f32(KVTWIN_F32, at, 0, at, count), why);
    refused(kvtwin_row_to_f32(KVTWIN_Q8_0, at, 34, at, count), why);
    refused(kvtwin_row_from_f32(KVTWIN_F16, at, count, at, 0), why);
  }
  kvtwin_verdict verdict{};
  verdict.size = sizeof(verdict);
  refused(kvtwin_check_memory("x", SIZE_MAX, nullptr, &verdict),
          "bytes has 18446744073709551615 entries");
  const kvtwin_attention_part part = {at, at};
  kvtwin_attention_out out{};
  out.size = sizeof(out);
  out.out = at;
  out.out_count = 1;
  refused(kvtwin_attention_merge(&part, SIZE_MAX, 1, 1, &out),
          "parts has 18446744073709551615 entries");
}

TEST(CInterface, MasksSayWhoMayAttend) {
  const std::array<std::uint64_t, 2> bits = {0, 5};
  kvtwin_tensor mask{};
  mask.data = bits.data();
  mask.dtype = KVTWIN_BITS;
  std::fill_n(mask.shape, 4, 1);
  mask.shape[0] = 3;
  mask.shape[1] = 2;
  std::int32_t yes = -1;
  ASSERT_EQ(kvtwin_mask_may_attend(&mask, 2, 1, &yes), KVTWIN_OK);
  EXPECT_EQ(yes, 1);
  ASSERT_EQ(kvtwin_mask_may_attend(&mask, 2, 0, &yes), KVTWIN_OK);
  EXPECT_EQ(yes, 0);
  EXPECT_EQ(kvtwin_mask_may_attend(&mask, 0, 2, &yes), KVTWIN_INVALID_ARGUMENT);
  mask.dtype = KVTWIN_Q8_0;
  EXPECT_EQ(kvtwin_mask_may_attend(&mask, 0, 0, &yes), KVTWIN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvtwin::props
