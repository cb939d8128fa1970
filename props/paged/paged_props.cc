// Properties of paged pools: random histories, and a few large ones.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/testing/pools.h"

namespace rc {

template <>
struct Arbitrary<kvtwin::props::PagedOp> {
  static Gen<kvtwin::props::PagedOp> arbitrary() {
    using kvtwin::props::PagedOp;
    using kvtwin::props::PagedOpKind;
    const auto number = [] { return gen::inRange(0, 64); };
    return gen::build<PagedOp>(
        gen::set(&PagedOp::kind, gen::weightedElement<PagedOpKind>(
                                     {{3, PagedOpKind::kOpen},
                                      {2, PagedOpKind::kFork},
                                      {8, PagedOpKind::kAppend},
                                      {8, PagedOpKind::kCommit},
                                      {1, PagedOpKind::kCommitUnknown},
                                      {3, PagedOpKind::kTruncate},
                                      {2, PagedOpKind::kFree},
                                      {1, PagedOpKind::kMisuse}})),
        gen::set(&PagedOp::a, number()), gen::set(&PagedOp::b, number()),
        gen::set(&PagedOp::c, number()));
  }
};

}  // namespace rc

namespace kvtwin::props {
namespace {

RC_GTEST_PROP(Paged, TwinsAndLedgerAgree, ()) {
  PagedHistory history =
      MakePagedHistory(2, *rc::gen::inRange<std::uint64_t>(0, 1000));
  history.ops =
      *rc::gen::container<std::vector<PagedOp>>(rc::gen::arbitrary<PagedOp>());
  const std::string wrong = TextOf(RunPaged(history));
  if (!wrong.empty()) RC_LOG() << wrong << "\n" << ToText(history);
  RC_ASSERT(wrong.empty());
}

// Random histories reach every rare event often.
TEST(Paged, HistoriesReachSharingCopiesEvictionAndTruncation) {
  const PagedFuzzResult result =
      FuzzPools(/*seed=*/1, /*operations=*/20000, TwinSubject("optimized"));
  EXPECT_EQ(TextOf(result.failure), "") << ToText(result.shrunk);
  EXPECT_GT(result.counts.found, 100);
  EXPECT_GT(result.counts.copied, 50);
  EXPECT_GT(result.counts.evicted, 100);
  EXPECT_GT(result.counts.truncated, 100);
  EXPECT_GT(result.counts.full, 100);
  EXPECT_GT(result.counts.longest, 64);
}

// Appends have from one token up to one more than the pool holds.
TEST(Paged, AppendsAreOfAllLengths) {
  std::map<std::size_t, int> longer;  // Appends of more than this many tokens.
  int full = 0;
  int too_long = 0;
  for (std::uint64_t number = 0; number < 10000; ++number) {
    const PagedHistory history = MakePagedHistory(1, number);
    const PagedSpec& spec = history.spec;
    const int room = TokensOf(spec);
    for (const PagedOp& op : history.ops) {
      if (op.kind != PagedOpKind::kAppend) continue;
      const std::size_t count = DrawTokens(op, spec).size();
      if (std::cmp_greater(count, room)) ++too_long;
      if (std::cmp_equal(count, room)) ++full;
      if (std::cmp_greater(count, room)) continue;
      for (const std::size_t than : {2U, 64U, 128U, 256U}) {
        if (count > than) ++longer[than];
      }
    }
  }
  EXPECT_GT(longer[2], 5000);
  EXPECT_GT(longer[64], 30);
  EXPECT_GT(longer[128], 10);
  EXPECT_GT(longer[256], 2);
  EXPECT_GT(full, 1000);
  EXPECT_GT(too_long, 1000);
}

TEST(Paged, RunsTheNamedTwin) {
  const PagedHistory history = MakePagedHistory(1, 0);
  EXPECT_EQ(TextOf(RunHistory(history, TwinSubject("reference"))), "");
  const std::string wrong = TextOf(RunHistory(history, TwinSubject("third")));
  EXPECT_NE(wrong.find("twin is 'third'"), std::string::npos) << wrong;
}

void ExpectReadAsWritten(const PagedHistory& history) {
  const std::string text = ToText(history);
  const Result<PagedHistory> read = ParsePagedHistory(text);
  ASSERT_TRUE(read.ok()) << read.status().ToString() << "\n" << text;
  ASSERT_EQ(ToText(*read), text);
}

// Most numbers are drawn as the smallest or the largest possible, so that a
// pool is large in many ways at once.
RC_GTEST_PROP(Paged, AnyHistoryThatIsDrawnCanBeRead, ()) {
  const Pick any = SeededPick(*rc::gen::arbitrary<std::uint64_t>(), 0);
  const Pick pick = [&](int least, int most) {
    const int way = any(0, 7);
    if (way > 5) return any(least, most);
    return way > 3 ? least : most;
  };
  for (int i = 0; i < 50; ++i) ExpectReadAsWritten(DrawPagedHistory(pick));
}

TEST(Paged, LinesAreReadBackAsWritten) {
  for (std::uint64_t number = 0; number < 500; ++number) {
    ExpectReadAsWritten(MakePagedHistory(3, number));
  }
  for (const char* text :
       {"", "kvt1", "kvp1 block", "kvp1 block=0", "kvp1 block=1x",
        "kvp1 size=3", "kvp1 dtype=bits", "kvp1 layout=flat", "kvp1 | append",
        "kvp1 | append 1 2 x", "kvp1 | put 1 2 3",
        "kvp1 | append 1 2 99999999999", "kvp1 blocks=16384 block=16384"}) {
    EXPECT_FALSE(ParsePagedHistory(text).ok()) << text;
  }
}

// The recording ends where a twin fails; its first part is written.
TEST(Paged, RecordingsThatEndEarlyAreErrors) {
  const auto make = [](PagedSpec spec, std::string_view twin) {
    if (twin == "optimized") ++spec.blocks;
    return MakePagedPool(spec, twin);
  };
  std::ostringstream out;
  const auto written =
      WritePagedRecording(MakePagedHistory(1, 0), "reference", out, make);
  EXPECT_EQ(written.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(written.status().message(), "");
  EXPECT_TRUE(out.str().starts_with(R"({"kvtrace":1,)"));
}

// Every method of seed 003's interface (docs/seeds.md).
TEST(Paged, ASequenceIsACacheOfOneSequence) {
  for (const char* twin : {"reference", "optimized"}) {
    SCOPED_TRACE(twin);
    const PagedSpec spec = {.block_size = 2,
                            .blocks = 4,
                            .max_seq_len = 5,
                            .layers = 2,
                            .k_head_dim = 2,
                            .dtype = DType::kF32,
                            .layout = PagedLayout::kHeadMajor};
    const auto pool = *MakePagedPool(spec, twin);
    PagedSequence cache(*pool, *pool->Open());
    EXPECT_EQ(cache.SeqLen(), 0);
    EXPECT_EQ(cache.MaxSeqLen(), 5);
    EXPECT_FALSE(cache.IsOnGPU());
    EXPECT_EQ(*cache.LayerDevice(1), Device::kCpu);
    EXPECT_FALSE(cache.LayerDevice(2).ok());
    const DenseTensor key = FilledTensor(DType::kF32, {2, 1, 3, 1}, 7);
    const DenseTensor value = FilledTensor(DType::kF32, {1, 1, 3, 1}, 8);
    for (const int layer : {0, 1}) {
      const auto appended = cache.Append(layer, key.view(), value.view());
      ASSERT_TRUE(appended.ok());
      EXPECT_EQ(appended->start, 0);
      EXPECT_EQ(appended->views.size(), 2U);
    }
    EXPECT_EQ(cache.SeqLen(), 0);
    ASSERT_TRUE(cache.Commit(3).ok());
    EXPECT_EQ(cache.SeqLen(), 3);
    EXPECT_EQ(cache.Append(0, key.view(), value.view()).status().code(),
              StatusCode::kCacheFull);
    const auto views = *cache.Views(0);
    const auto packed = *cache.ViewsPacked(0);
    ASSERT_EQ(views.size(), 2U);
    EXPECT_EQ(views[1].start, 2);
    EXPECT_EQ(views[1].key.shape, (Shape{2, 1, 1, 1}));
    EXPECT_EQ(packed[0].key.shape, (Shape{2, 2, 1, 1}));
    EXPECT_FALSE(cache.ContiguousKV(0, 3)->has_value());  // It has two blocks.
    ASSERT_TRUE(cache.Truncate(2).ok());
    const std::optional<PagedKv> whole = *cache.ContiguousKV(0, 2);
    ASSERT_TRUE(whole.has_value());
    EXPECT_EQ(whole->value.shape, (Shape{1, 1, 2, 1}));
    ASSERT_TRUE(cache.Free().ok());
    EXPECT_EQ(cache.SeqLen(), 0);
    EXPECT_EQ(pool->Usage(), (PagedUsage{.free = 4}));
  }
}

// Misuse that Paged.TwinsAndLedgerAgree does not draw.
TEST(Paged, RefusesInvalidLines) {
  const PagedSpec spec = {
      .block_size = 2, .blocks = 4, .max_seq_len = 8, .dtype = DType::kF32};
  const auto refused = [](const auto& result) {
    return result.status().code() == StatusCode::kInvalidArgument;
  };
  const auto bad = [&](const auto& change) {
    PagedSpec other = spec;
    change(other);
    return refused(MakePagedPool(other));
  };
  EXPECT_TRUE(bad([](PagedSpec& s) { s.block_size = 0; }));
  EXPECT_TRUE(bad([](PagedSpec& s) { s.dtype = DType::kBits; }));
  EXPECT_TRUE(bad([](PagedSpec& s) { s.v_dtype = DType::kBits; }));
  EXPECT_TRUE(bad([](PagedSpec& s) { s.block_size = s.blocks = 1 << 16; }));
  EXPECT_TRUE(refused(MakePagedPool(spec, "third")));
  const auto pool = *MakePagedPool(spec);
  const int open = *pool->Open();
  const DenseTensor row = FilledTensor(DType::kF32, {1, 1, 1, 1}, 1);
  const DenseTensor half = FilledTensor(DType::kF16, {1, 1, 1, 1}, 1);
  TensorView none = row.view();
  none.shape[2] = 0;
  EXPECT_TRUE(refused(pool->Append(open, 0, half.view(), row.view())));
  EXPECT_TRUE(refused(pool->Append(open, 0, none, none)));
  ASSERT_TRUE(pool->Append(open, 0, row.view(), row.view()).ok());
  const std::int32_t negative[] = {-1};
  EXPECT_EQ(pool->Commit(open, negative).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->Commit(7, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool->Truncate(7, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(refused(pool->Fork(open, -1)));
  EXPECT_TRUE(refused(pool->Views(7, 0)));
  EXPECT_TRUE(refused(pool->ViewsPacked(7, 0)));
  EXPECT_TRUE(refused(pool->ContiguousKV(7, 0, 1)));
  EXPECT_TRUE(refused(pool->ContiguousKV(open, 1, 1)));
  EXPECT_TRUE(refused(pool->ContiguousKV(open, 0, 2)));
  EXPECT_TRUE(refused(pool->SlotMapping(7, 0, 0)));
  EXPECT_TRUE(refused(pool->SlotMapping(open, -1, 0)));
  EXPECT_TRUE(refused(pool->SlotMapping(open, 0, 2)));
}

// An Open cannot find more tokens than were committed, a part of a block, or
// more than max_seq_len tokens.
TEST(Paged, TheLedgerRefusesImpossiblePrefixes) {
  const PagedSpec spec = {.block_size = 2, .blocks = 4, .max_seq_len = 4};
  const reference::PagedLedger ledger(spec);
  const std::vector<std::int32_t> prompt(9);
  EXPECT_TRUE(ledger.MayOpen(prompt, {}, 0));
  EXPECT_FALSE(ledger.MayOpen(prompt, {}, 1));
  EXPECT_FALSE(ledger.MayOpen(prompt, {}, 2));
  EXPECT_FALSE(ledger.MayOpen(prompt, {}, 6));
  EXPECT_FALSE(ledger.MayOpen(prompt, {}, 10));
}

// Prints
// "1048576 tokens: 64 blocks free, 0 cached, 65536 used, 0 of them shared".
void PrintUsage(std::string_view when, const PagedPool& pool) {
  const PagedUsage usage = pool.Usage();
  fmt::print("{}: {} blocks free, {} cached, {} used, {} of them shared\n",
             when, usage.free, usage.cached, usage.used, usage.shared);
}

// Forks a pool of a million tokens 64 times; no block is left in use.
TEST(Paged, AMillionTokensAreForkedTruncatedAndFreed) {
  constexpr int kTokens = 1 << 20;
  constexpr int kForks = 64;
  const PagedSpec spec = {.block_size = 16,
                          .blocks = kTokens / 16 + kForks,
                          .max_seq_len = kTokens + 1,
                          .layers = 1,
                          .kv_heads = 1,
                          .k_head_dim = 2,
                          .v_head_dim = 2};
  const auto pool = *MakePagedPool(spec);
  const int first = *pool->Open();
  constexpr int kBatch = 1 << 14;
  const DenseTensor rows = FilledTensor(DType::kF32, {2, 1, kBatch, 1}, 1);
  std::vector<std::int32_t> tokens(kBatch);
  for (int done = 0; done < kTokens; done += kBatch) {
    for (int i = 0; i < kBatch; ++i) {
      At(tokens, i) = done + i;
    }
    ASSERT_TRUE(pool->Append(first, 0, rows.view(), rows.view()).ok());
    ASSERT_TRUE(pool->Commit(first, tokens).ok());
  }
  PrintUsage(fmt::format("{} tokens", kTokens), *pool);
  const DenseTensor one = FilledTensor(DType::kF32, {2, 1, 1, 1}, 2);
  for (int i = 0; i < kForks; ++i) {
    const int fork = *pool->Fork(first, kTokens - i - 1);
    ASSERT_TRUE(pool->Append(fork, 0, one.view(), one.view()).ok());
    ASSERT_TRUE(pool->Commit(fork, 1).ok());
  }
  PrintUsage(fmt::format("{} forks, each with a token more", kForks), *pool);
  EXPECT_GT(pool->Usage().shared, kTokens / 16 - kForks);
  for (int i = kForks; i > 0; --i) {
    ASSERT_TRUE(pool->Truncate(i, kTokens / (i + 1)).ok());
    ASSERT_TRUE(pool->Free(i).ok());
  }
  PrintUsage("forks truncated and freed", *pool);
  ASSERT_TRUE(pool->Free(first).ok());
  PrintUsage("all freed", *pool);
  const PagedUsage usage = pool->Usage();
  EXPECT_EQ(usage.used, 0);
  EXPECT_EQ(usage.shared, 0);
  EXPECT_EQ(usage.free + usage.cached, spec.blocks);
}

}  // namespace
}  // namespace kvtwin::props
