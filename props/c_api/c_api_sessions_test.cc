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
