#include "props/history/setup_text.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>

namespace kvtwin::props {
namespace {

TEST(SetupText, SaysWhichMemoryAWindowHas) {
  const std::array<std::pair<const char*, const char*>, 7> cases = {
      {{"kvt1 cells=1",
        "causal; 1 sequence of at most 1 token, batches of at most 1; f32"},
       {"kvt1 kind=swa window=2",
        "swa: window 2, memory 3 (S3: window + 1, since there are several "
        "sequences); 2 sequences of at most 8 tokens, batches of at most 8; "
        "f32"},
       {"kvt1 kind=swa window=2 seqs=1",
        "swa: window 2, memory 2; 1 sequence of at most 8 tokens, batches of "
        "at most 8; f32"},
       {"kvt1 kind=swa_mem window=2 memory=5 dtype=f16 vdtype=bf16",
        "swa_mem: window 2, memory 5; 2 sequences of at most 8 tokens, batches "
        "of at most 8; f16 (V bf16)"},
       {"kvt1 kind=swa window=7",
        "swa: window 7, memory unbounded (S3: the capacity); 2 sequences of at "
        "most 8 tokens, batches of at most 8; f32"},
       {"kvt1 kind=chunked chunk=3 shift=rope layers=2",
        "chunked: chunks of 3 tokens, shift rope; 2 sequences of at most 8 "
        "tokens, batches of at most 8; f32; 2 layers"},
       {"kvt1 cells=1 softcap=4 sinks=1",
        "causal; 1 sequence of at most 1 token, batches of at most 1; f32; "
        "soft cap 4; sinks"}}};
  for (const auto& [line, text] : cases) {
    const Result<History> bare = ParseHistory(line);
    ASSERT_TRUE(bare.ok()) << bare.status().ToString();
    EXPECT_EQ(SetupText(bare->setup, {}), text) << line;
  }
}

// S3 says nothing about windows that count the query, or tokens that stay.
TEST(SetupText, LeavesOutTheMemoryOfOtherRules) {
  const Result<History> bare = ParseHistory("kvt1 kind=swa window=7");
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(SetupText(bare->setup, {.window = Rules::Window::kWithQuery}),
            "swa: window 7 with the query; 2 sequences of at most 8 tokens, "
            "batches of at most 8; f32");
  EXPECT_EQ(SetupText(bare->setup, {.first = Rules::First::kStay}),
            "swa: window 7; 2 sequences of at most 8 tokens, batches of at "
            "most 8; f32");
  EXPECT_EQ(SetupText(bare->setup, {.mask_rows = Rules::MaskRows::kBatch}),
            SetupText(bare->setup, {}));
}

}  // namespace
}  // namespace kvtwin::props
