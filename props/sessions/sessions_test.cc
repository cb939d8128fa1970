// Cases of sessions that the plays reach rarely, and misuse.

#include "kvtwin/sessions.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "props/base/text_file.h"
#include "props/sessions/stand_in_model.h"

namespace kvtwin::props {
namespace {

using Inputs = std::vector<SessionInput>;

class SessionsTest : public testing::TestWithParam<std::string> {
 protected:
  Sessions& Make(const SessionsSpec& spec,
                 ShiftKind shift = ShiftKind::kIdentity) {
    CacheSpec cache_spec;
    cache_spec.shift.kind = shift;
    cache_ = *MakeCache(cache_spec, GetParam());
    EXPECT_TRUE(cache_->Init(InitOf(spec, DType::kF32)).ok());
    sessions_ = *MakeSessions(*cache_, spec, GetParam());
    return *sessions_;
  }
  // Texts only, with groups of the given sizes at these positions.
  static Inputs Prompt(int size, int group = 0,
                       const std::vector<int>& begins = {}) {
    Inputs inputs;
    for (int i = 0; i < size; ++i) inputs.push_back({.token = i});
    for (const int begin : begins) At(inputs, begin).same_batch = group - 1;
    return inputs;
  }

  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Sessions> sessions_;
};

INSTANTIATE_TEST_SUITE_P(, SessionsTest,
                         testing::Values("reference", "optimized"),
                         [](const auto& twin) { return twin.param; });

// The number of inputs that a shift drops, as in the tests of ollama's runner.
TEST_P(SessionsTest, AShiftDropsHalfAndWholeGroups) {
  struct Case {
    int context;
    int keep;
    int group;
    std::vector<int> begins;
    int dropped;
  };
  for (const Case& test : std::vector<Case>{{2048, 5, 0, {}, 1021},
                                            {2048, 2047, 0, {}, 1},
                                            {2048, 0, 0, {}, 1024},
                                            {2048, 5, 512, {1024}, 1531},
                                            {2048, 5, 512, {10}, 1021},
                                            {32, 0, 10, {0, 10, 20}, 20},
                                            {32, 0, 10, {4, 8, 14}, 24},
                                            {1, 0, 0, {}, 1}}) {
    Sessions& sessions =
        Make({.slots = 1, .context = test.context, .batch = 2048});
    const int request = *sessions.Submit(
        Prompt(test.context, test.group, test.begins), {.keep = test.keep});
    ASSERT_TRUE(sessions.NextBatch().ok());
    ASSERT_TRUE(sessions.Sampled(request, 9).ok());
    const SessionBatch batch = *sessions.NextBatch();
    ASSERT_EQ(batch.positions.size(), 1);
    EXPECT_EQ(test.context - batch.positions[0], test.dropped);
  }
}

TEST_P(SessionsTest, ATruncatedPromptKeepsItsEnds) {
  Sessions& sessions = Make({.slots = 1, .context = 8, .batch = 8});
  const RequestOptions options = {.keep = 2, .truncate = true};
  ASSERT_TRUE(sessions.Submit(Prompt(12), options).ok());
  SessionBatch batch = *sessions.NextBatch();
  std::vector<int> tokens;
  for (const SessionInput& input : batch.inputs) tokens.push_back(input.token);
  EXPECT_EQ(tokens, (std::vector<int>{0, 1, 6, 7, 8, 9, 10, 11}));
  ASSERT_TRUE(sessions.Cancel(0).ok());
  // The group at 5 to 7 would lose 5: all of it goes.
  ASSERT_TRUE(sessions.Submit(Prompt(12, 3, {5}), options).ok());
  EXPECT_EQ(sessions.Request(1)->prompt, 6);
}

TEST_P(SessionsTest, ALongPromptLeavesRoomForAnswers) {
  Sessions& sessions = Make({.slots = 3, .context = 32, .batch = 4});
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(sessions.Submit(Prompt(1), {.reuse = false}).ok());
  }
  ASSERT_TRUE(sessions.NextBatch().ok());
  ASSERT_TRUE(sessions.Submit(Prompt(20), {.reuse = false}).ok());
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(sessions.Sampled(0, 5).ok());
    ASSERT_TRUE(sessions.Sampled(1, 5).ok());
    const SessionBatch batch = *sessions.NextBatch();
    EXPECT_EQ(batch.inputs.size(), 4);
    EXPECT_EQ(batch.outputs.size(), 2);
  }
}

TEST_P(SessionsTest, WithoutAShiftAnAnswerEndsWhenItsSlotIsFull) {
  for (const bool ahead : {false, true}) {
    Sessions& sessions =
        Make({.slots = 1, .context = 4, .batch = 4, .ahead = ahead});
    ASSERT_TRUE(sessions.Submit(Prompt(3), {.shift = false}).ok());
    ASSERT_TRUE(sessions.NextBatch().ok());
    if (ahead) {
      ASSERT_TRUE(sessions.NextBatch().ok());
    }
    EXPECT_EQ(*sessions.Sampled(0, 7), Ending::kNone);
    if (!ahead) {
      ASSERT_TRUE(sessions.NextBatch().ok());
    }
    EXPECT_EQ(*sessions.Sampled(0, 8), Ending::kContext);
    EXPECT_EQ(sessions.Slot(0)->request, -1);
    EXPECT_EQ(sessions.Slot(0)->record.size(), 4);
  }
}

// A cache that is smaller than InitOf refuses; nothing of the batch is lost.
TEST_P(SessionsTest, ARefusedBatchIsPlannedAgain) {
  const SessionsSpec spec = {.slots = 2, .context = 4, .batch = 8};
  const auto small = *MakeCache({}, GetParam());
  ASSERT_TRUE(small->Init({DType::kF32, 1, 4, 8}).ok());
  const auto sessions = *MakeSessions(*small, spec, GetParam());
  ASSERT_TRUE(sessions->Submit(Prompt(3), {.reuse = false}).ok());
  ASSERT_TRUE(sessions->Submit(Prompt(3), {.reuse = false}).ok());
  EXPECT_EQ(sessions->NextBatch().status().code(), StatusCode::kCacheFull);
  EXPECT_EQ(sessions->Gauges().refusals, 1);
  ASSERT_TRUE(sessions->Cancel(0).ok());
  EXPECT_EQ(sessions->NextBatch()->inputs.size(), 3);
}

TEST_P(SessionsTest, AWaitingRequestCanBeCancelled) {
  Sessions& sessions = Make({.slots = 1, .context = 4, .batch = 8});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(sessions.Submit(Prompt(2)).ok());
  ASSERT_TRUE(sessions.NextBatch().ok());
  ASSERT_TRUE(sessions.Cancel(1).ok());
  EXPECT_EQ(sessions.Gauges().waiting, 1);
  ASSERT_TRUE(sessions.Cancel(0).ok());
  EXPECT_EQ(sessions.NextBatch()->requests.front(), 2);
  EXPECT_EQ(sessions.NextBatch()->inputs.size(), 0);
}

// A server that was restarted puts a saved sequence into a free slot.
TEST_P(SessionsTest, AnAdoptedSlotIsReused) {
  const SessionsSpec spec = {.slots = 3, .context = 16, .batch = 16};
  Sessions& before = Make(spec);
  ASSERT_TRUE(before.Submit(Prompt(8)).ok());
  ASSERT_TRUE(before.NextBatch().ok());
  const CacheState saved = *cache_->SnapshotOf(0);

  Sessions& sessions = Make(spec);
  ASSERT_TRUE(cache_->AddSequence(0, saved).ok());
  ASSERT_TRUE(sessions.Adopt(0, Prompt(8)).ok());
  EXPECT_EQ(sessions.Slot(0)->reusable, 8);
  // It was used last: another prompt takes another slot.
  const int other = *sessions.Submit({{{.token = 99}}});
  const int same = *sessions.Submit(Prompt(10));
  const SessionBatch batch = *sessions.NextBatch();
  EXPECT_EQ(sessions.Request(other)->slot, 1);
  EXPECT_EQ(sessions.Request(same)->slot, 0);
  EXPECT_EQ(sessions.Request(same)->reused, 8);
  EXPECT_EQ(std::vector(batch.positions.begin(), batch.positions.end()),
            (std::vector<std::int32_t>{8, 9, 0}));

  const auto refused = [&](int slot, const Inputs& record) {
    return sessions.Adopt(slot, record).message();
  };
  EXPECT_EQ(refused(3, {}), "slot is 3, it must be 0 to 2");
  EXPECT_EQ(refused(0, {}), "slot 0 is in use by request 1");
  EXPECT_EQ(refused(2, Prompt(17)), "record has 17 inputs, the context 16");
  EXPECT_EQ(refused(2, {{.token = -1}}),
            "record[0].token is -1, it must not be negative");
  EXPECT_EQ(refused(2, Prompt(2, 3, {0})),
            "record[0].same_batch is 2, 1 inputs follow");
  EXPECT_TRUE(sessions.Adopt(2, {}).ok());
}

TEST_P(SessionsTest, MisuseIsRefusedWithTheValue) {
  Sessions& sessions = Make({.slots = 1, .context = 4, .batch = 3});
  const auto refused = [&](const Inputs& prompt,
                           const RequestOptions& options = {}) {
    return sessions.Submit(prompt, options).status().message();
  };
  EXPECT_EQ(refused({}), "prompt is empty");
  EXPECT_EQ(refused({{.token = -1}}),
            "prompt[0].token is -1, it must not be negative");
  EXPECT_EQ(refused({{}, {.same_batch = -2}}),
            "prompt[1].same_batch is -2, it must not be negative");
  EXPECT_EQ(refused({{}, {.same_batch = 2147483647}}),
            "prompt[1].same_batch is 2147483647, 0 inputs follow");
  EXPECT_EQ(refused(Prompt(4, 4, {0})),
            "prompt[0].same_batch is 3, which makes a group of 4 inputs; a "
            "batch or the context has 3");
  EXPECT_EQ(refused(Prompt(5)), "prompt has 5 inputs, the context 4");
  EXPECT_EQ(refused({{}}, {.keep = -2}), "keep is -2, it must be at least -1");
  EXPECT_EQ(refused({{}}, {.limit = -1}),
            "limit is -1, it must not be negative");
  EXPECT_EQ(sessions.Request(0).status().message(),
            "request is 0, there is none");
  EXPECT_EQ(sessions.Slot(1).status().message(),
            "slot is 1, it must be 0 to 0");
  ASSERT_TRUE(sessions.Submit(Prompt(2)).ok());
  EXPECT_EQ(sessions.Sampled(0, 1).status().message(),
            "request 0 has no output to sample from");
  ASSERT_TRUE(sessions.NextBatch().ok());
  EXPECT_EQ(sessions.Sampled(0, -1).status().message(),
            "token is -1, it must not be negative");
  EXPECT_EQ(sessions.Finish(0, 1).message(),
            "removed is 1, the answer has 0 tokens");
  EXPECT_EQ(MakeSessions(*cache_, {.slots = 0}).status().message(),
            "slots is 0, it must be at least 1");
  EXPECT_EQ(MakeSessions(*cache_, {.choice = SlotChoice{7}}).status().message(),
            "choice is 7, it must be 0 to 1");
}

TEST_P(SessionsTest, TheDumpSaysWhyAPrefixWasMissed) {
  CacheSpec cache_spec;
  cache_spec.kind = Kind::kSwa;
  cache_spec.window = 2;
  const SessionsSpec spec = {.slots = 2, .context = 16, .batch = 4};
  const auto cache = *MakeCache(cache_spec, GetParam());
  ASSERT_TRUE(cache->Init(InitOf(spec, DType::kF32)).ok());
  const auto sessions = *MakeSessions(*cache, spec, GetParam());
  ASSERT_TRUE(sessions->Submit(Prompt(12)).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(sessions->NextBatch().ok());
  ASSERT_TRUE(sessions->Sampled(0, 7).ok());
  ASSERT_TRUE(sessions->NextBatch().ok());
  ASSERT_TRUE(sessions->Submit(Prompt(11)).ok());
  ASSERT_TRUE(sessions->Submit(Prompt(3)).ok());
  ASSERT_TRUE(sessions->NextBatch().ok());
  EXPECT_TRUE(CheckSessions(*sessions, *cache).ok());
  EXPECT_EQ(DumpSessions(*sessions, *cache),
            "2 slots of 16 tokens, batches of 4, prefixes of all slots\n"
            "slot 0: request 0, 13 tokens, 13 reusable, 1 answered, 1 outputs "
            "to sample; 0 of 12 prompt tokens reused\n"
            "slot 1: request 1, 4 tokens, 4 reusable, 0 answered, 0 outputs to "
            "sample; 0 of 11 prompt tokens reused; missed slot 0: position 10 "
            "needs 8 and 9; 8 was evicted\n"
            "request 2 waits with 3 prompt tokens\n"
            "7 of 10 cells used, 0 shared\n"
            "2 running, 1 waiting, 648 bytes of inputs; 0 of 23 prompt tokens "
            "reused, 0 forks, 1 "
            "prefixes missed, 0 tokens evicted\n"
            "17 tokens in 5 batches, 0 refused; 0 shifts, 0 computed again\n");
}

TEST_P(SessionsTest, ARequestThatIsCancelledWhileItWaitsLeavesAtOnce) {
  Sessions& sessions = Make({.slots = 1, .context = 8, .batch = 8});
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(sessions.Submit(Prompt(4)).ok());
  ASSERT_TRUE(sessions.NextBatch().ok());
  EXPECT_EQ(sessions.Gauges().bytes, std::int64_t{16 * sizeof(SessionInput)});
  ASSERT_TRUE(sessions.Cancel(1).ok());
  EXPECT_EQ(sessions.Requests(), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(sessions.Gauges().waiting, 2);
  EXPECT_EQ(sessions.Gauges().bytes, std::int64_t{12 * sizeof(SessionInput)});
  // The others wait for slots as before.
  ASSERT_TRUE(sessions.Cancel(0).ok());
  ASSERT_TRUE(sessions.NextBatch().ok());
  EXPECT_EQ(sessions.Slot(0)->request, 2);
}

TEST_P(SessionsTest, TheCheckFindsWhatSomeoneElseChanged) {
  struct Case {
    std::int32_t begin;
    std::int32_t end;
    std::string message;
  };
  for (const Case& test : std::vector<Case>{
           {0, 0, ""},
           {1, 2, "slot 0 lacks one of the positions 0 to 3"},
           {3, kOpenEnd, "slot 0 lacks one of the positions 0 to 3"}}) {
    Sessions& sessions = Make({.slots = 1, .context = 8, .batch = 8});
    ASSERT_TRUE(sessions.Submit(Prompt(4)).ok());
    ASSERT_TRUE(sessions.NextBatch().ok());
    ASSERT_TRUE(cache_->Remove(0, test.begin, test.end).ok());
    EXPECT_EQ(CheckSessions(sessions, *cache_).message(), test.message);
  }
  ASSERT_TRUE(cache_->StartForward({{{7}}, {{3}}}, false).ok());
  EXPECT_EQ(CheckSessions(*sessions_, *cache_).message(),
            "cell 3 belongs to sequence 3, there are 1 slots");
}

TEST_P(SessionsTest, CachesSayWhyTheyCannotResume) {
  CacheSpec spec;
  spec.kind = Kind::kSwaMem;
  spec.window = 4;
  spec.memory = 4;
  CacheSpec both;
  both.kind = Kind::kWrapper;
  both.caches = {CacheSpec(), spec};
  for (const bool wrapped : {false, true}) {
    const auto cache = *MakeCache(wrapped ? both : spec, GetParam());
    ASSERT_TRUE(cache->Init({DType::kF32, 1, 64, 32}).ok());
    std::vector<std::int32_t> positions;
    for (int i = 0; i < 14; ++i) positions.push_back(i);
    const std::vector<int> sequences(14, 0);
    ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
    ASSERT_TRUE(cache->StartForward({{{14}}, {{0}}}, false).ok());
    const std::string of = wrapped ? "caches[1]: " : "";
    const auto why = [&](int seq, int pos) {
      EXPECT_EQ(cache->WhyNotResume(seq, pos)->empty(),
                *cache->CanResume(seq, pos));
      return *cache->WhyNotResume(seq, pos);
    };
    EXPECT_EQ(why(0, 12),
              of + "position 12 needs 8 to 11; 8 and 9 were evicted");
    EXPECT_EQ(why(0, 13), of + "position 13 needs 9 to 12; 9 was evicted");
    EXPECT_EQ(why(0, 10), of + "position 10 needs 6 to 9; 6 to 9 were evicted");
    EXPECT_EQ(why(0, 14), "");
    EXPECT_EQ(why(0, 15), "");
    EXPECT_EQ(why(0, 16),
              of + "position 16 needs 12 to 15; sequence 0 ends at 14");
    EXPECT_EQ(why(1, 0), of + "sequence 1 holds nothing");
    EXPECT_EQ(cache->WhyNotResume(0, -1).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST_P(SessionsTest, SlotsOfAPoolShareBlocks) {
  const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
  const PagedSpec pool_spec = PoolOf(spec, 2);
  EXPECT_EQ(pool_spec.blocks, 8);
  const auto pool = *MakePagedPool(pool_spec, GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  const auto sessions = *MakeSessions(*slots, spec, GetParam());
  const auto next = [&] {
    const SessionBatch batch = *sessions->NextBatch();
    EXPECT_EQ(Compute(*pool, *slots, batch).wrong, "");
    EXPECT_TRUE(CheckSessions(*sessions, *slots).ok());
    return batch.inputs.size();
  };
  ASSERT_TRUE(sessions->Submit(Prompt(5)).ok());
  EXPECT_EQ(next(), 5);
  ASSERT_TRUE(sessions->Submit(Prompt(7)).ok());
  EXPECT_EQ(next(), 2);
  EXPECT_EQ(sessions->Request(1)->reused, 5);
  EXPECT_EQ(pool->Usage().shared, 2);  // The third is copied on write.
  EXPECT_EQ(pool->Usage().used, 5);
  EXPECT_EQ(CountCells(*slots).shared, 4);
}

// The model fails, in a batch of all slots, before the last layer.
TEST_P(SessionsTest, SlotsOfAPoolGoOnAfterAFailedPass) {
  const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
  const auto pool = *MakePagedPool(PoolOf(spec, 2), GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  const auto sessions = *MakeSessions(*slots, spec, GetParam());
  const std::vector<float> zeros(2 * 8);
  const auto put = [&](int layer, std::int64_t tokens) {
    const TensorView rows =
        DenseView(zeros.data(), DType::kF32, {2, 1, tokens, 1});
    ASSERT_TRUE(slots->SetLayer(layer).ok());
    ASSERT_TRUE(slots->Put(rows, rows).ok());
  };
  for (const int request : {0, 1}) {
    ASSERT_EQ(*sessions->Submit(Prompt(3), {.reuse = false}), request);
  }
  ASSERT_EQ(sessions->NextBatch()->inputs.size(), 6);
  put(0, 6);
  for (const int request : {0, 1}) {
    ASSERT_TRUE(sessions->Cancel(request).ok());
  }
  // The records of both slots have tokens that are gone.
  for (const int request : {2, 3}) {
    ASSERT_EQ(*sessions->Submit(Prompt(4)), request);
  }
  const Result<SessionBatch> batch = sessions->NextBatch();
  ASSERT_TRUE(batch.ok()) << batch.status().ToString();
  EXPECT_EQ(Compute(*pool, *slots, *batch).wrong, "");
  EXPECT_TRUE(CheckSessions(*sessions, *slots).ok());
  EXPECT_EQ(sessions->Request(2)->reused, 0);
  EXPECT_EQ(sessions->Request(3)->reused, 0);
  // Each call that ends a pass says it once.
  const auto start = [&](const std::vector<std::int32_t>& positions,
                         const std::vector<int>& sequences) {
    return slots->StartForward({positions, sequences}, false);
  };
  const std::array<std::function<Status()>, 3> calls = {
      [&] { return start({4}, {0}); },
      [&] { return slots->Remove(0, 4, kOpenEnd); },
      [&] { return slots->CopyPrefix(0, 1, 4); }};
  for (const auto& call : calls) {
    ASSERT_TRUE(start({4}, {0}).ok());
    put(0, 1);
    EXPECT_FALSE(*slots->CanResume(0, 5));
    const Status failed = call();
    EXPECT_EQ(failed.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(failed.message(),
              "layer 1 has no rows of the last batch: its tokens are dropped");
    EXPECT_EQ(call().message(), "");
    EXPECT_EQ(*pool->SeqLen(*slots->Sequence(0)), 4);
    (void)slots->Remove(0, 4, kOpenEnd).ok();
  }
}

// S5: an invalid_argument changes nothing.
TEST_P(SessionsTest, APassOverAPoolContinuesAfterARefusedOne) {
  const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
  const auto pool = *MakePagedPool(PoolOf(spec, 2), GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  const std::vector<float> zeros(2 * 8);
  const TensorView rows = DenseView(zeros.data(), DType::kF32, {2, 1, 2, 1});
  const auto start = [&](const std::vector<std::int32_t>& positions,
                         const std::vector<int>& sequences) {
    return slots->StartForward({positions, sequences}, false).message();
  };
  ASSERT_EQ(start({0, 1}, {0, 0}), "");
  for (int layer = 0; layer < kModelLayers; ++layer) {
    ASSERT_TRUE(slots->SetLayer(layer).ok());
    ASSERT_TRUE(slots->Put(rows, rows).ok());
    EXPECT_EQ(start({0}, {2}), "sequence is 2, there are 2 slots");
  }
  EXPECT_EQ(start({1}, {0}),
            "token 0 has position 1, sequence 0 continues at 2");
  EXPECT_EQ(start({0, 1, 1}, {1, 1, 1}),
            "token 2 has position 1, sequence 1 continues at 2");
  EXPECT_EQ(*pool->SeqLen(*slots->Sequence(0)), 0);
  EXPECT_TRUE(slots->Put(rows, rows).ok());
  EXPECT_EQ(start({0, 2}, {1, 0}), "");
  EXPECT_EQ(*pool->SeqLen(*slots->Sequence(0)), 2);
}

// The recovery that sessions.h describes, over cells and over a pool, for two
// slots in a batch.
TEST_P(SessionsTest, AModelThatFailsLosesItsPassAlone) {
  const SessionsSpec spec = {.slots = 2, .context = 16, .batch = 8};
  const auto pool = *MakePagedPool(PoolOf(spec, 2), GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  const auto cells = *MakeCache({}, GetParam());
  ASSERT_TRUE(cells->Init(InitOf(spec, DType::kF32)).ok());
  const std::vector<float> zeros(2 * 8);
  for (Cache* cache : {cells.get(), static_cast<Cache*>(slots.get())}) {
    const bool over_pool = cache != cells.get();
    const auto sessions = *MakeSessions(*cache, spec, GetParam());
    const std::vector<SessionInput> first(6, SessionInput{.token = 5});
    const std::vector<SessionInput> second(6, SessionInput{.token = 7});
    const int requests[] = {*sessions->Submit(first),
                            *sessions->Submit(second)};
    ASSERT_EQ(sessions->NextBatch()->inputs.size(), 8U);
    const std::int64_t head_dim = over_pool ? 2 : 1;
    const TensorView rows =
        DenseView(zeros.data(), DType::kF32, {head_dim, 1, 8, 1});
    for (int layer = 0; layer < kModelLayers; ++layer) {
      ASSERT_TRUE(cache->SetLayer(layer).ok());
      ASSERT_TRUE(cache->Put(rows, rows).ok());
    }
    ASSERT_TRUE(sessions->Sampled(requests[0], 3).ok());
    const SessionBatch lost = *sessions->NextBatch();  // It gets no rows.
    std::map<int, int> begins;  // By slot: its first position in the batch.
    for (int i = 0; i < Size(lost.inputs); ++i) {
      begins.try_emplace(At(lost.sequences, i), At(lost.positions, i));
    }
    ASSERT_EQ(begins.size(), 2U);
    for (const int request : requests) {
      ASSERT_TRUE(sessions->Cancel(request).ok());
    }
    if (over_pool) {
      EXPECT_EQ(cache->Remove(0, begins.at(0), kOpenEnd).code(),
                StatusCode::kFailedPrecondition);
    }
    for (const auto& [slot, begin] : begins) {
      EXPECT_TRUE(cache->Remove(slot, begin, kOpenEnd).ok());
      const auto record = sessions->Slot(slot)->record;
      const std::vector<SessionInput> left(record.begin(),
                                           record.begin() + begin);
      ASSERT_TRUE(sessions->Adopt(slot, left).ok());
    }
    EXPECT_EQ(CheckSessions(*sessions, *cache).message(), "");
    const int again = *sessions->Submit(second);
    ASSERT_TRUE(sessions->NextBatch().ok());
    EXPECT_EQ(sessions->Request(again)->reused, begins.at(1));
    EXPECT_GT(begins.at(1), 0);
  }
}

// S1.
TEST_P(SessionsTest, SlotsOfAPoolAreNotUsedAfterClose) {
  const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
  const auto pool = *MakePagedPool(PoolOf(spec, 2), GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  const std::vector<int> zero = {0};
  ASSERT_TRUE(slots->StartForward({zero, zero}, false).ok());
  slots->Close();
  slots->Close();
  EXPECT_EQ(pool->Usage().used, 0);
  for (const Status& status : {slots->SetConfig({}),
                               slots->Init({}),
                               slots->SetLayer(0),
                               slots->StartForward({zero, zero}, false),
                               slots->StartForward({zero, zero}, true),
                               slots->StartForward({}, false),
                               slots->SetCausal({}),
                               slots->Put({}, {}),
                               slots->Get().status(),
                               slots->CopyPrefix(0, 1, 1),
                               slots->CanResume(0, 0).status(),
                               slots->Remove(0, 0, kOpenEnd),
                               slots->SetLayerType(0),
                               slots->EncoderCached().status(),
                               slots->Sequence(0).status(),
                               slots->Commit(0, {}),
                               slots->Checkpoint(0),
                               slots->Snapshot().status(),
                               slots->SnapshotOf(0).status(),
                               slots->Restore({}),
                               slots->AddSequence(0, {})}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition)
        << status.ToString();
  }
  EXPECT_EQ(slots->Put({}, {}).message(),
            "the slots of a pool are used after Close");
}

// Sessions whose requests have the numbers after 2^31 - 3.
class LateSessions final : public GuardedSessions {
 public:
  LateSessions() : GuardedSessions({.slots = 1, .context = 8, .batch = 8}) {}
  Result<SessionBatch> NextBatch() override { return SessionBatch(); }
  std::vector<int> Requests() const override { return {}; }
  SessionGauges Gauges() const override { return {}; }

 protected:
  int DoSubmit(std::span<const SessionInput>, const RequestOptions&) override {
    return next_++;
  }
  Ending DoSampled(int, std::int32_t) override { return Ending::kNone; }
  void DoFinish(int, std::int64_t) override {}
  void DoAdopt(int, std::span<const SessionInput>) override {}
  const RequestInfo* DoRequest(int) const override { return nullptr; }
  SlotInfo DoSlot(int) const override { return {}; }

 private:
  int next_ = std::numeric_limits<int>::max() - 2;
};

// The number of a request is an int (Q1).
TEST(Sessions, RefuseRequestsThatCannotBeNumbered) {
  LateSessions sessions;
  const Inputs prompt = {{.token = 1}};
  EXPECT_EQ(*sessions.Submit(prompt, {}), 2147483645);
  EXPECT_EQ(*sessions.Submit(prompt, {}), 2147483646);
  for (int i = 0; i < 2; ++i) {
    const Status refused = sessions.Submit(prompt, {}).status();
    EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(refused.message(),
              "2147483647 requests were submitted: all numbers of requests are "
              "taken");
  }
}

TEST_P(SessionsTest, SlotsOfAPoolRefuseMisuse) {
  const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
  PagedSpec small = PoolOf(spec, 3);
  EXPECT_EQ(small.blocks, 6);
  --small.blocks;
  auto pool = *MakePagedPool(small, GetParam());
  EXPECT_EQ(MakePoolSlots(*pool, spec).status().message(),
            "the pool has 5 blocks, 2 slots of 8 tokens need 6");
  small = PoolOf(spec, 3);
  small.max_seq_len = 7;
  pool = *MakePagedPool(small, GetParam());
  EXPECT_EQ(MakePoolSlots(*pool, spec).status().message(),
            "max_seq_len is 7, the context 8");
  pool = *MakePagedPool(PoolOf(spec, 3), GetParam());
  const auto slots = *MakePoolSlots(*pool, spec);
  SessionsSpec none = spec;
  none.slots = 0;
  EXPECT_EQ(MakePoolSlots(*pool, none).status().message(),
            "slots is 0, it must be at least 1");
  none = spec;
  none.context = -8;
  EXPECT_EQ(MakePoolSlots(*pool, none).status().message(),
            "context is -8, it must be at least 1");
  const auto start = [&](const std::vector<std::int32_t>& positions,
                         const std::vector<int>& sequences) {
    return slots->StartForward({positions, sequences}, false).message();
  };
  EXPECT_EQ(start({}, {}), "the batch has 0 positions and 0 sequences");
  EXPECT_EQ(start({0}, {2}), "sequence is 2, there are 2 slots");
  const std::vector<int> parents = {kCommitted};
  const std::vector<int> zero = {0};
  const Batch draft = {
      .positions = zero, .sequences = zero, .parents = parents};
  EXPECT_EQ(slots->StartForward(draft, false).message(),
            "drafts: the slots of a pool have none");
  EXPECT_EQ(start({1}, {0}),
            "token 0 has position 1, sequence 0 continues at 0");
  EXPECT_EQ(start({0, 0, 1}, {0, 1, 0}),
            "token 2: the tokens of sequence 0 lie apart");
  EXPECT_EQ(slots->SetLayer(2).message(), "layer is 2, the pool has 2");
  EXPECT_EQ(slots->Put({}, {}).message(),
            "no pass has begun: call StartForward");
  EXPECT_EQ(slots->Get().status().code(), StatusCode::kNotSupported);
  EXPECT_EQ(slots->SnapshotOf(0).status().ToString(),
            "not_supported: a snapshot: the slots of a pool have none");
  EXPECT_EQ(slots->Remove(0, 2, 1).message(), "begin is 2, end 1");
  EXPECT_EQ(slots->CopyPrefix(0, 1, -1).message(),
            "len is -1, it must not be negative");
}

TEST(SessionsRules, EachIsCitedWhereItIsKept) {
  const std::string rules = ReadFile(KVTWIN_DOCS "/semantics.md");
  const std::string root = KVTWIN_DOCS "/../";
  const std::string gate = ReadFile(root + "core/guarded_sessions.cc");
  const std::string both[] = {ReadFile(root + "reference/sessions.cc"),
                              ReadFile(root + "optimized/sessions.cc")};
  const auto cites = [](const std::string& code, int rule) {
    const std::string name = "Q" + std::to_string(rule);
    for (const char* end : {")", ","}) {
      if (code.find(name + end) != std::string::npos) return true;
    }
    return false;
  };
  int count = 0;
  while (rules.find("**Q" + std::to_string(count + 1) + "**") !=
         std::string::npos) {
    ++count;
  }
  ASSERT_EQ(count, 13);
  for (int rule = 1; rule <= count; ++rule) {
    if (rule == 12) continue;  // It is about the cache.
    const bool cited = rule == 1 ? cites(gate, rule)
                                 : cites(both[0], rule) && cites(both[1], rule);
    EXPECT_TRUE(cited) << "Q" << rule;
  }
}

}  // namespace
}  // namespace kvtwin::props
