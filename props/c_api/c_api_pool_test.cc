// Compares the pools of the C interface with those of C++; pools with groups.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "props/c_api/c_api_adapters.h"
#include "props/c_api/small_cache.h"
#include "props/paged/paged_runner.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

TEST(CInterface, PoolsAreThoseOfCpp) {
  std::int64_t operations = 0;
  for (std::uint64_t number = 0; number < 300; ++number) {
    PagedCoverageCounts counts;
    const PagedHistory history = MakePagedHistory(7, number);
    ASSERT_EQ(TextOf(RunPaged(history, &counts, PoolByC::Make)), "")
        << ToText(history);
    operations += counts.operations;
  }
  EXPECT_GT(operations, 5000);
}

// A pool of two groups: full attention with blocks of two tokens, and states
// with blocks of four. It has seven tokens, and an image after the fifth token.
class GroupsInC : public testing::Test {
 protected:
  void SetUp() override {
    for (Later<kvtwin_pool_params>& group : groups) {
      group.known.block_size = 2;
      group.known.blocks = 9;
      group.known.dtype = KVTWIN_F32;
    }
    groups[1].known.block_size = 4;
    groups[1].known.states = 1;
    params.known.max_seq_len = 16;
    params.known.groups = &groups[0].known;
    params.known.group_count = groups.size();
    ASSERT_EQ(kvtwin_pool_create(&params.known, nullptr, &pool), KVTWIN_OK);
    static constexpr std::array<float, 7> kRows = {};
    const kvtwin_tensor rows{kRows.data(), KVTWIN_F32, {1, 1, 7, 1}, {}};
    prompt.known.tokens = kTokens.data();
    prompt.known.token_count = kTokens.size();
    std::int32_t sequence = -1;
    ASSERT_EQ(kvtwin_pool_open(pool, &prompt.known, &sequence), KVTWIN_OK);
    const kvtwin_media image = {5, "image"};
    ASSERT_EQ(kvtwin_pool_add_media(pool, 0, &image), KVTWIN_OK);
    for (const int layer : {0, 1}) {
      ASSERT_EQ(kvtwin_pool_append(pool, 0, layer, &rows, &rows, nullptr,
                                   nullptr, 0, nullptr),
                KVTWIN_OK);
    }
    ASSERT_EQ(kvtwin_pool_commit(pool, 0, kTokens.data(), 7), KVTWIN_OK);
  }
  void TearDown() override { kvtwin_pool_destroy(pool); }

  static constexpr std::array<std::int32_t, 8> kTokens = {0, 1, 2, 3,
                                                          4, 5, 6, 7};
  std::array<Later<kvtwin_pool_params>, 2> groups{
      Later(&kvtwin_pool_default_params), Later(&kvtwin_pool_default_params)};
  Later<kvtwin_pool_params> params{&kvtwin_pool_default_params};
  kvtwin_pool* pool = nullptr;
  Later<kvtwin_prompt> prompt;
};

TEST_F(GroupsInC, ServeOnePrefix) {
  std::int32_t length = -1;
  // 4, not 6: there are states at 4 and 7.
  EXPECT_EQ(kvtwin_pool_find(pool, &prompt.known, &length), KVTWIN_OK);
  EXPECT_EQ(length, 4);
  EXPECT_EQ(kvtwin_pool_resume_before(pool, 0, 6, &length), KVTWIN_OK);
  EXPECT_EQ(length, 4);
  const kvtwin_media early = {1, "image"};
  prompt.known.media = &early;
  prompt.known.media_count = 1;
  EXPECT_EQ(kvtwin_pool_find(pool, &prompt.known, &length), KVTWIN_OK);
  EXPECT_EQ(length, 0);
  const kvtwin_media nameless = {1, nullptr};
  prompt.known.media = &nameless;
  EXPECT_EQ(kvtwin_pool_find(pool, &prompt.known, &length),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_pool_add_media(pool, 0, &early), KVTWIN_INVALID_ARGUMENT);
}

TEST_F(GroupsInC, HaveTablesOfTheirOwn) {
  std::int32_t columns = 0;
  std::int32_t seq_len = 0;
  std::array<std::int32_t, 4> blocks = {-2, -2, -2, -2};
  std::size_t count = 0;
  constexpr std::int32_t kFirst = 0;
  EXPECT_EQ(kvtwin_pool_table(pool, &kFirst, 1, &columns, blocks.data(),
                              blocks.size(), &count, &seq_len),
            KVTWIN_NOT_SUPPORTED);
  EXPECT_EQ(
      kvtwin_pool_group_table(pool, 1, &kFirst, 1, &columns, blocks.data(),
                              blocks.size(), &count, &seq_len),
      KVTWIN_OK);
  EXPECT_EQ(columns, 2);  // Two blocks of four tokens.
  EXPECT_EQ(seq_len, 7);
  EXPECT_EQ(blocks, (std::array<std::int32_t, 4>{0, 1, -2, -2}));
  EXPECT_EQ(
      kvtwin_pool_layer_table(pool, 0, &kFirst, 1, &columns, blocks.data(),
                              blocks.size(), &count, &seq_len),
      KVTWIN_OK);
  EXPECT_EQ(columns, 4);  // Of two tokens.
  EXPECT_EQ(
      kvtwin_pool_layer_table(pool, 2, &kFirst, 1, &columns, blocks.data(),
                              blocks.size(), &count, &seq_len),
      KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("layer is 2, it must be 0 to 1"));
  std::array<std::int64_t, 3> slots = {};
  EXPECT_EQ(kvtwin_pool_group_slots(pool, 1, 0, 3, 6, slots.data(),
                                    slots.size(), &count),
            KVTWIN_OK);
  EXPECT_EQ(slots,
            (std::array<std::int64_t, 3>{0, -1, -1}));  // The state at 4.
  std::array<std::int32_t, 2> indptr = {};
  EXPECT_EQ(
      kvtwin_pool_group_csr(pool, 0, &kFirst, 1, indptr.data(), blocks.data(),
                            blocks.size(), &count, &seq_len),
      KVTWIN_OK);
  EXPECT_EQ(indptr[1], 4);
  Later<kvtwin_usage> usage;
  EXPECT_EQ(kvtwin_pool_group_usage(pool, 1, &usage.known), KVTWIN_OK);
  EXPECT_EQ(usage.known.used, 2);
  EXPECT_EQ(kvtwin_pool_group_usage(pool, 2, &usage.known),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("group is 2, it must be 0 to 1"));
}

TEST_F(GroupsInC, HaveNoGroups) {
  groups[1].known.groups = &groups[0].known;
  groups[1].known.group_count = 1;
  kvtwin_pool* none = nullptr;
  EXPECT_EQ(kvtwin_pool_create(&params.known, nullptr, &none),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("a group has groups"));
}

}  // namespace
}  // namespace kvtwin::props
