// Sessions make the calls of a real server: the traces and the cases of slot
// choice of ollama's runner at 0.15.4, as its authors tested them.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/sessions.h"
#include "props/base/forwarding_cache.h"

namespace kvtwin::props {
namespace {

using Texts = std::vector<std::string>;

// Writes the calls that change the cache, and those that ask it.
class CallLog : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;

  Status StartForward(const Batch& batch, bool reserve) override {
    std::map<int, std::vector<std::int32_t>> positions;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      positions[batch.sequences[i]].push_back(batch.positions[i]);
    }
    std::string text = "SF";
    for (const auto& [sequence, all] : positions) {
      text += fmt::format(" {}{}", sequence, all);
    }
    return Log(text, ForwardingCache::StartForward(batch, reserve));
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return Log(fmt::format("copy {}>{}:{}", src, dst, len),
               ForwardingCache::CopyPrefix(src, dst, len));
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const std::string till = end == kOpenEnd ? "max" : fmt::format("{}", end);
    return Log(fmt::format("rm {}:{}-{}", seq, begin, till),
               ForwardingCache::Remove(seq, begin, end));
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    Result<bool> can = ForwardingCache::CanResume(seq, pos);
    if (!can.ok() || !*can) calls.push_back(fmt::format("no {}@{}", seq, pos));
    return can;
  }

  // The calls since the last Take.
  Texts Take() { return std::exchange(calls, {}); }
  Texts calls;

 private:
  Status Log(const std::string& text, Status status) {
    calls.push_back(status.ok()
                        ? text
                        : text + " " + std::string(StatusName(status.code())));
    return status;
  }
};

std::vector<SessionInput> Prompt(const std::vector<std::int32_t>& tokens) {
  std::vector<SessionInput> prompt;
  for (const std::int32_t token : tokens) prompt.push_back({.token = token});
  return prompt;
}

CacheSpec Shifting() {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  return spec;
}

struct Server {
  Server(const std::string& twin, const SessionsSpec& spec,
         const CacheSpec& cache_spec = Shifting())
      : cache(*MakeCache(cache_spec, twin)) {
    EXPECT_TRUE(cache.Init(InitOf(spec, DType::kF32)).ok());
    sessions = *MakeSessions(cache, spec, twin);
  }

  int Submit(const std::vector<std::int32_t>& prompt,
             const RequestOptions& options = {}) {
    return *sessions->Submit(Prompt(prompt), options);
  }
  void Next(int times = 1) {
    for (int i = 0; i < times; ++i) ASSERT_TRUE(sessions->NextBatch().ok());
  }
  void Sampled(int request, std::int32_t token) {
    ASSERT_TRUE(sessions->Sampled(request, token).ok());
  }
  void Finish(int request, int removed = 0) {
    ASSERT_TRUE(sessions->Finish(request, removed).ok());
  }
  std::vector<std::int32_t> Record(int slot) {
    std::vector<std::int32_t> tokens;
    const SlotInfo info = *sessions->Slot(slot);
    for (const SessionInput& input : info.record) {
      tokens.push_back(input.token);
    }
    return tokens;
  }

  CallLog cache;
  std::unique_ptr<Sessions> sessions;
};

class GoldenSessions : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(, GoldenSessions,
                         testing::Values("reference", "optimized"),
                         [](const auto& twin) { return twin.param; });

TEST_P(GoldenSessions, ALongAnswerShiftsTheContext) {
  Server server(GetParam(), {.slots = 1, .context = 8, .batch = 4});
  const int request = server.Submit({1, 2, 3, 4, 5, 6}, {.keep = 2});
  server.Next(2);
  EXPECT_EQ(server.cache.Take(),
            (Texts{"rm 0:0-max", "SF 0[0, 1, 2, 3]", "SF 0[4, 5]"}));
  for (int token = 7; token < 15; ++token) {
    server.Sampled(request, token);
    server.Next();
  }
  EXPECT_EQ(server.cache.Take(),
            (Texts{"SF 0[6]", "SF 0[7]", "rm 0:2-5", "SF 0[5]", "SF 0[6]",
                   "SF 0[7]", "rm 0:2-5", "SF 0[5]", "SF 0[6]", "SF 0[7]"}));
  EXPECT_EQ(server.Record(0),
            (std::vector<std::int32_t>{1, 2, 9, 10, 11, 12, 13, 14}));
  EXPECT_EQ(server.sessions->Slot(0)->reusable, 2);
}

TEST_P(GoldenSessions, TwoSlotsShareAPrefixAndTheTokenAheadIsDropped) {
  Server server(GetParam(),
                {.slots = 2, .context = 16, .batch = 8, .ahead = true});
  const int a = server.Submit({1, 2, 3, 4});
  server.Next(2);
  server.Sampled(a, 5);
  server.Next();
  server.Finish(a);
  EXPECT_EQ(server.cache.Take(),
            (Texts{"rm 0:0-max", "SF 0[0, 1, 2, 3]", "SF 0[4]", "SF 0[5]"}));
  EXPECT_EQ(server.Record(0), (std::vector<std::int32_t>{1, 2, 3, 4, 5}));

  const int b = server.Submit({1, 2, 9});
  server.Next();
  EXPECT_EQ(server.cache.Take(),
            (Texts{"copy 0>1:2", "rm 1:2-max", "SF 1[2]"}));
  EXPECT_EQ(server.sessions->Request(b)->reused, 2);
  EXPECT_EQ(server.sessions->Request(b)->source, 0);
  ASSERT_TRUE(server.sessions->Cancel(b).ok());

  server.Submit({1, 2, 3, 4, 5, 7});
  server.Next();
  EXPECT_EQ(server.cache.Take(), (Texts{"rm 0:5-max", "SF 0[5]"}));
}

TEST_P(GoldenSessions, TheSamePromptLeavesOneTokenToCompute) {
  Server server(GetParam(), {.slots = 1, .context = 8, .batch = 8});
  for (int i = 0; i < 2; ++i) {
    const int request = server.Submit({1, 2, 3});
    server.Next();
    server.Finish(request);
  }
  EXPECT_EQ(server.cache.Take(),
            (Texts{"rm 0:0-max", "SF 0[0, 1, 2]", "rm 0:2-max", "SF 0[2]"}));
}

// A context of 4 shifts by 2 tokens: the shared ones only leave. In a context
// of 3 the token at position 1 would move, but it is shared.
TEST_P(GoldenSessions, AShiftAfterAForkNeverMovesSharedTokens) {
  for (const int context : {4, 3}) {
    Server server(GetParam(), {.slots = 2, .context = context, .batch = 8});
    server.Finish([&] {
      const int request = server.Submit({1, 2, 3});
      server.Next();
      return request;
    }());
    const int fork = server.Submit({1, 2, 9});
    server.Next();
    server.Sampled(fork, 10);
    server.cache.Take();
    server.Next();
    if (context == 4) {
      server.Sampled(fork, 11);
      server.Next();
      EXPECT_EQ(server.cache.Take(), (Texts{"SF 1[3]", "rm 1:0-2", "SF 1[2]"}));
      EXPECT_EQ(server.sessions->Gauges().reprocessed, 0);
    } else {
      EXPECT_EQ(server.cache.Take(), (Texts{"rm 1:0-1 shared_cells",
                                            "rm 1:0-max", "SF 1[0, 1, 2]"}));
      EXPECT_EQ(server.Record(1), (std::vector<std::int32_t>{2, 9, 10}));
      EXPECT_EQ(server.sessions->Slot(1)->reusable, 3);
      EXPECT_EQ(server.sessions->Gauges().reprocessed, 1);
    }
    EXPECT_EQ(server.Record(0), (std::vector<std::int32_t>{1, 2, 3}));
  }
}

// Each case: the records of the slots, those in use and the prompt; then where
// the longest prefix is, and what is copied, for both choices.
struct ChoiceCase {
  std::vector<std::vector<std::int32_t>> records;
  std::vector<int> order;  // Slots, from the least recently used one.
  std::vector<bool> busy;
  std::vector<std::int32_t> prompt;
  int own;
  int any;
  std::string copy;
};

// Makes the slots hold the records. Requests go to the first slots that are
// free, and leave in the given order.
void Fill(Server& server, const ChoiceCase& test) {
  std::vector<int> requests;
  for (const auto& record : test.records) {
    requests.push_back(
        server.Submit(record.empty() ? std::vector<std::int32_t>{99} : record,
                      {.reuse = false}));
  }
  server.Next();
  for (const int slot : test.order) {
    if (!test.busy[AsSize(slot)]) server.Finish(requests[AsSize(slot)]);
  }
  server.cache.Take();
}

TEST_P(GoldenSessions, RequestsChooseTheirSlots) {
  const std::vector<ChoiceCase> tests = {
      {{{1}, {1, 2}}, {0, 1}, {false, false}, {1, 2}, 1, 1, ""},
      {{{1, 2}, {}}, {1, 0}, {false, false}, {1, 7}, 0, 1, "copy 0>1:1"},
      {{{1}, {1, 2}}, {1, 0}, {false, false}, {2, 3}, 0, 1, ""},
      {{{1, 2}, {1}}, {0, 1}, {true, false}, {1, 2}, 1, 1, "copy 0>1:2"},
  };
  for (const ChoiceCase& test : tests) {
    for (const bool own : {true, false}) {
      Server server(GetParam(), {.slots = 2,
                                 .context = 8,
                                 .batch = 8,
                                 .choice = own ? SlotChoice::kOwnPrefix
                                               : SlotChoice::kAnyPrefix});
      Fill(server, test);
      const int request = server.Submit(test.prompt);
      server.Next();
      EXPECT_EQ(server.sessions->Request(request)->slot,
                own ? test.own : test.any);
      const std::string first = server.cache.Take().front();
      EXPECT_EQ(first.starts_with("copy") ? first : "", own ? "" : test.copy);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
