// The thread contract of the headers: other threads may read the views of a
// batch while requests come and go, and servers may run side by side.
// ThreadSanitizer watches in ./dev sanitize.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/index.h"
#include "kvtwin/attention.h"
#include "kvtwin/rows.h"
#include "kvtwin/sessions.h"
#include "props/sessions/session_play.h"

namespace kvtwin::props {
namespace {

constexpr SessionsSpec kThreadsSpec = {.slots = 4, .context = 64, .batch = 32};
constexpr int kHeadDim = 8;

std::vector<SessionInput> PromptFrom(int first, int count) {
  std::vector<SessionInput> prompt(AsSize(count));
  for (int i = 0; i < count; ++i) At(prompt, i).token = first + i;
  return prompt;
}

// Calls `read` in several threads, again and again, while `write` runs.
template <typename Read, typename Write>
void ReadBeside(const Read& read, const Write& write) {
  const auto expected = read();
  std::atomic<bool> over = false;
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 3; ++i) {
      readers.emplace_back([&] {
        do {
          wrong += read() == expected ? 0 : 1;
        } while (!over);
      });
    }
    write();
    over = true;
  }
  EXPECT_EQ(wrong, 0);
}

// The attention of a batch, by an object of the thread's own.
std::vector<float> AttentionOf(const KvView& view, int rows) {
  std::vector<float> query(AsSize(rows * kHeadDim));
  std::iota(query.begin(), query.end(), 0.F);
  std::vector<float> out(query.size());
  const auto attention = *MakeAttention();
  const TensorView queries =
      DenseView(query.data(), DType::kF32, {kHeadDim, 1, rows, 1});
  Status status = attention->Plan(view.mask, rows);
  if (status.ok()) {
    status = attention->Attend(queries, view, VLayout::kPlain, {.scale = 0.1F},
                               {.out = out.data()});
  }
  EXPECT_TRUE(status.ok());
  return out;
}

// The numbers of the rows of a sequence of a pool.
std::vector<float> RowsOf(const std::vector<PagedView>& views) {
  std::vector<float> numbers;
  for (const PagedView& view : views) {
    for (int i = 0; i < view.length; ++i) {
      numbers.push_back(ElementOf<float>(view.key, 0, 0, i));
      numbers.push_back(ElementOf<float>(view.value, 0, 0, i));
    }
  }
  return numbers;
}

Status PutBatch(Cache& cache, const SessionBatch& batch) {
  std::vector<float> numbers;
  for (const SessionInput& input : batch.inputs) {
    numbers.insert(numbers.end(), kHeadDim, static_cast<float>(input.token));
  }
  const TensorView rows = DenseView(numbers.data(), DType::kF32,
                                    {kHeadDim, 1, Size(batch.inputs), 1});
  return cache.Put(rows, rows);
}

// Every call that leaves a batch's views valid.
void ComeAndGo(Sessions& sessions, const Cache& cache,
               const SessionBatch& batch) {
  for (const int output : batch.outputs) {
    const int request = At(batch.requests, output);
    EXPECT_TRUE(sessions.Sampled(request, 7).ok());
    if (sessions.Request(request)->answered == 6) {
      EXPECT_TRUE(sessions.Finish(request, 1).ok());
    }
  }
  const int request =
      *sessions.Submit(PromptFrom(AsInt(sessions.Gauges().batches % 3), 20));
  if (request % 4 == 0) {
    EXPECT_TRUE(sessions.Cancel(request).ok());
  }
  for (int slot = 0; slot < kThreadsSpec.slots; ++slot) {
    const SlotInfo info = *sessions.Slot(slot);
    if (info.request >= 0) continue;
    const std::vector<SessionInput> record(info.record.begin(),
                                           info.record.end());
    EXPECT_TRUE(sessions.Adopt(slot, record).ok());
  }
  EXPECT_TRUE(CheckSessions(sessions, cache).ok());
  EXPECT_FALSE(DumpSessions(sessions, cache).empty());
}

TEST(SessionThreads, OthersAttendToABatchWhileRequestsComeAndGo) {
  for (const std::string_view twin : {"reference", "optimized"}) {
    CacheSpec spec;
    spec.shift.kind = ShiftKind::kIdentity;
    const auto cache = *MakeCache(spec, twin);
    ASSERT_TRUE(cache->Init(InitOf(kThreadsSpec, DType::kF32)).ok());
    const auto sessions = *MakeSessions(*cache, kThreadsSpec, twin);
    ASSERT_TRUE(sessions->Submit(PromptFrom(0, 40)).ok());
    for (int pass = 0; pass < 40; ++pass) {
      const SessionBatch batch = *sessions->NextBatch();
      ASSERT_TRUE(PutBatch(*cache, batch).ok());
      const KvView view = *cache->Get();
      const int rows = Size(batch.inputs);
      ReadBeside([&] { return AttentionOf(view, rows); },
                 [&] { ComeAndGo(*sessions, *cache, batch); });
    }
    EXPECT_GT(sessions->Gauges().hit_tokens, 0);
  }
}

TEST(SessionThreads, OthersReadAPoolWhileRequestsComeAndGo) {
  for (const std::string_view twin : {"reference", "optimized"}) {
    PagedSpec spec;
    spec.block_size = 4;
    spec.blocks = AsInt(BlocksFor(kThreadsSpec, spec.block_size));
    spec.max_seq_len = kThreadsSpec.context;
    spec.k_head_dim = spec.v_head_dim = kHeadDim;
    spec.dtype = DType::kF32;
    const auto pool = *MakePagedPool(spec, twin);
    const auto slots = *MakePoolSlots(*pool, kThreadsSpec);
    const auto sessions = *MakeSessions(*slots, kThreadsSpec, twin);
    ASSERT_TRUE(sessions->Submit(PromptFrom(0, 40)).ok());
    for (int pass = 0; pass < 40; ++pass) {
      const SessionBatch batch = *sessions->NextBatch();
      ASSERT_TRUE(PutBatch(*slots, batch).ok());
      const auto views =
          *pool->Views(*slots->Sequence(batch.sequences.front()), 0);
      ReadBeside([&] { return RowsOf(views); },
                 [&] { ComeAndGo(*sessions, *slots, batch); });
    }
    EXPECT_GT(sessions->Gauges().hit_tokens, 0);
  }
}

TEST(SessionThreads, ServersShareNothing) {
  std::vector<std::string> wrong(4);
  std::vector<PlayCounts> counts(wrong.size());
  {
    std::vector<std::jthread> servers;
    for (std::size_t i = 0; i < wrong.size(); ++i) {
      servers.emplace_back([&, i] {
        for (std::uint64_t seed = 1; seed <= 30 && wrong[i].empty(); ++seed) {
          wrong[i] = PlaySessions(1000 * i + seed, SessionsOf("optimized"), {},
                                  counts[i]);
        }
      });
    }
  }
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    EXPECT_EQ(wrong[i], "");
    EXPECT_GT(counts[i].judged, 100);
  }
}

}  // namespace
}  // namespace kvtwin::props
