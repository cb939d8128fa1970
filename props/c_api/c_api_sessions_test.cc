// Sessions through the C interface.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kvtwin/kvtwin.h"

namespace {

class CSessions : public testing::Test {
 protected:
  void SetUp() override {
    kvtwin_cache_params cache{};
    ASSERT_EQ(kvtwin_cache_default_params(&cache, sizeof(cache)), KVTWIN_OK);
    cache.max_sequences = 2;
    cache.capacity = 8;
    cache.max_batch = 4;
    ASSERT_EQ(kvtwin_cache_create(&cache, "reference", &cache_), KVTWIN_OK)
        << kvtwin_last_error();
    ASSERT_EQ(kvtwin_sessions_default_params(&params_, sizeof(params_)),
              KVTWIN_OK);
    params_.slots = 2;
    params_.context = 8;
    params_.batch = 4;
    ASSERT_EQ(kvtwin_sessions_create(cache_, &params_, nullptr, &sessions_),
              KVTWIN_OK);
  }
  void TearDown() override {
    kvtwin_sessions_destroy(sessions_);
    kvtwin_cache_destroy(cache_);
  }

  int Submit(const std::vector<int32_t>& tokens) {
    std::vector<kvtwin_session_input> prompt;
    for (const int32_t token : tokens) prompt.push_back({token, 0, 0});
    kvtwin_request_options options{};
    EXPECT_EQ(kvtwin_sessions_default_options(&options, sizeof(options)),
              KVTWIN_OK);
    options.limit = 2;
    int32_t request = -1;
    EXPECT_EQ(kvtwin_sessions_submit(sessions_, prompt.data(), prompt.size(),
                                     &options, &request),
              KVTWIN_OK);
    return request;
  }

  kvtwin_session_batch Next() {
    kvtwin_session_batch batch{};
    batch.size = sizeof(batch);
    EXPECT_EQ(kvtwin_sessions_next_batch(sessions_, &batch), KVTWIN_OK);
    EXPECT_EQ(kvtwin_sessions_check(sessions_), KVTWIN_OK);
    return batch;
  }

  kvtwin_cache* cache_ = nullptr;
  kvtwin_sessions_params params_{};
  kvtwin_sessions* sessions_ = nullptr;
};

TEST_F(CSessions, AnAnswerAndAFork) {
  const int first = Submit({1, 2, 3, 4, 5});
  EXPECT_EQ(Next().count, 4);
  kvtwin_session_batch batch = Next();
  ASSERT_EQ(batch.count, 1);
  ASSERT_EQ(batch.output_count, 1);
  EXPECT_EQ(batch.inputs[0].token, 5);
  EXPECT_EQ(batch.positions[0], 4);
  EXPECT_EQ(batch.requests[batch.outputs[0]], first);
  kvtwin_ending ending = KVTWIN_ENDS_BY_CONTEXT;
  ASSERT_EQ(kvtwin_sessions_sampled(sessions_, first, 6, &ending), KVTWIN_OK);
  EXPECT_EQ(ending, KVTWIN_GOES_ON);
  Submit({1, 2, 9});
  batch = Next();
  ASSERT_EQ(batch.count, 2);
  EXPECT_EQ(batch.sequences[1], 1);
  EXPECT_EQ(batch.positions[1], 2);
  ASSERT_EQ(kvtwin_sessions_sampled(sessions_, first, 7, &ending), KVTWIN_OK);
  EXPECT_EQ(ending, KVTWIN_ENDS_BY_LIMIT);
  ASSERT_EQ(kvtwin_sessions_finish(sessions_, 1, 0), KVTWIN_OK);
  EXPECT_EQ(Next().count, 0);

  kvtwin_session_gauges gauges{};
  gauges.size = sizeof(gauges);
  ASSERT_EQ(kvtwin_sessions_gauges(sessions_, &gauges), KVTWIN_OK);
  EXPECT_EQ(gauges.hit_tokens, 2);
  EXPECT_EQ(gauges.forks, 1);
  EXPECT_EQ(gauges.batches, 3);
  EXPECT_GT(gauges.bytes, 0);
  char* text = nullptr;
  ASSERT_EQ(kvtwin_sessions_dump(sessions_, &text), KVTWIN_OK);
  EXPECT_NE(std::string(text).find("2 slots of 8 tokens"), std::string::npos);
  kvtwin_free(text);
}

TEST_F(CSessions, ASlotAdoptsWhatTheCallerPutThere) {
  const int first = Submit({1, 2, 3, 4});
  EXPECT_EQ(Next().count, 4);
  ASSERT_EQ(kvtwin_sessions_finish(sessions_, first, 0), KVTWIN_OK);
  ASSERT_EQ(kvtwin_cache_copy_prefix(cache_, 0, 1, 3), KVTWIN_OK);
  const std::vector<kvtwin_session_input> record = {
      {1, 0, 0}, {2, 0, 0}, {3, 0, 0}};
  ASSERT_EQ(kvtwin_sessions_adopt(sessions_, 1, record.data(), record.size()),
            KVTWIN_OK);
  Submit({1, 2, 3, 9});
  const kvtwin_session_batch batch = Next();
  ASSERT_EQ(batch.count, 1);
  EXPECT_EQ(batch.positions[0], 3);
  EXPECT_EQ(kvtwin_sessions_adopt(sessions_, 2, nullptr, 0),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "slot is 2, it must be 0 to 1");
  EXPECT_EQ(kvtwin_sessions_adopt(sessions_, 0, nullptr, 1),
            KVTWIN_INVALID_ARGUMENT);
}

// Two requests share a block; attention would read the views of the slots.
TEST_F(CSessions, OverAPool) {
  kvtwin_pool_params params{};
  ASSERT_EQ(kvtwin_pool_default_params(&params, sizeof(params)), KVTWIN_OK);
  params.block_size = 2;
  params.blocks = 7;
  params.max_seq_len = 8;
  params.dtype = params.v_dtype = KVTWIN_F32;
  kvtwin_pool* pool = nullptr;
  ASSERT_EQ(kvtwin_pool_create(&params, nullptr, &pool), KVTWIN_OK);
  kvtwin_cache* cache = nullptr;
  EXPECT_EQ(kvtwin_pool_cache_create(pool, &params_, &cache),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(),
               "the pool has 7 blocks, 2 slots of 8 tokens need 8");
  kvtwin_pool_destroy(pool);
  params.blocks = 8;
  ASSERT_EQ(kvtwin_pool_create(&params, nullptr, &pool), KVTWIN_OK);
  ASSERT_EQ(kvtwin_pool_cache_create(pool, &params_, &cache), KVTWIN_OK);
  kvtwin_sessions_destroy(sessions_);
  ASSERT_EQ(kvtwin_sessions_create(cache, &params_, nullptr, &sessions_),
            KVTWIN_OK);

  Submit({1, 2, 3});
  for (int pass = 0; pass < 2; ++pass) {
    kvtwin_session_batch batch{};
    batch.size = sizeof(batch);
    ASSERT_EQ(kvtwin_sessions_next_batch(sessions_, &batch), KVTWIN_OK);
    std::vector<float> numbers;
    for (size_t i = 0; i < batch.count; ++i) {
      numbers.push_back(static_cast<float>(batch.inputs[i].token));
    }
    kvtwin_tensor rows{};
    rows.data = numbers.data();
    rows.dtype = KVTWIN_F32;
    const int64_t count = static_cast<int64_t>(batch.count);
    const int64_t shape[] = {1, 1, count, 1};
    const int64_t stride[] = {4, 4, 4, 4 * count};
    std::memcpy(rows.shape, shape, sizeof(shape));
    std::memcpy(rows.stride, stride, sizeof(stride));
    ASSERT_EQ(kvtwin_cache_put(cache, 0, &rows, &rows), KVTWIN_OK)
        << kvtwin_last_error();
    EXPECT_EQ(kvtwin_sessions_check(sessions_), KVTWIN_OK);
    if (pass == 0) Submit({1, 2, 3, 4});
  }
  int32_t sequence = -1;
  ASSERT_EQ(kvtwin_pool_cache_sequence(cache, 1, &sequence), KVTWIN_OK);
  kvtwin_paged_view views[2];
  size_t count = 0;
  ASSERT_EQ(kvtwin_pool_views(pool, sequence, 0, views, 2, &count), KVTWIN_OK);
  ASSERT_EQ(count, 2U);
  float last = 0;
  std::memcpy(
      &last,
      static_cast<const char*>(views[1].key.data) + views[1].key.stride[2],
      sizeof(last));
  EXPECT_EQ(last, 4);
  EXPECT_EQ(kvtwin_pool_cache_sequence(cache, 2, &sequence),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_pool_cache_sequence(cache_, 0, &sequence),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "the cache is not over a pool");
  kvtwin_sessions_destroy(sessions_);
  sessions_ = nullptr;
  kvtwin_cache_destroy(cache);
  kvtwin_pool_destroy(pool);
}

TEST_F(CSessions, MisuseIsRefused) {
  int32_t request = 0;
  EXPECT_EQ(kvtwin_sessions_submit(sessions_, nullptr, 2, nullptr, &request),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "prompt is NULL, it should have 2 entries");
  EXPECT_EQ(kvtwin_sessions_next_batch(nullptr, nullptr),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_sessions_next_batch(sessions_, nullptr),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_sessions_finish(sessions_, 7, 0), KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "request is 7, there is none");
  const int unknown = 3;
  std::memcpy(&params_.choice, &unknown, sizeof(unknown));
  kvtwin_sessions* none = nullptr;
  EXPECT_EQ(kvtwin_sessions_create(cache_, &params_, nullptr, &none),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "choice is 3, it must be 0 to 1");
  EXPECT_EQ(none, nullptr);
}

}  // namespace
