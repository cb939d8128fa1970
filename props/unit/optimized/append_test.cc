// Append of a pool looks only at the blocks that it writes to, not at all
// blocks of the sequence.

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "core/guarded_paged.h"
#include "core/index.h"

namespace kvtwin::props {
namespace {

constexpr int kBlocks = 1000;
constexpr int kBlockSize = 4;

// A pool without rows that counts how often rows are looked at.
class CountingPool final : public GuardedPaged {
 public:
  CountingPool()
      : GuardedPaged({.block_size = kBlockSize,
                      .blocks = kBlocks,
                      .max_seq_len = kBlocks * kBlockSize,
                      .dtype = DType::kF32,
                      .v_dtype = DType::kF32}),
        blocks_(kBlocks) {
    std::iota(blocks_.begin(), blocks_.end(), 0);
  }

  PagedUsage Usage() const override { return {}; }
  int looks() const { return looks_; }

 private:
  int DoOpen(int, std::span<const std::int32_t>, const PrefixKey&) override {
    return 0;
  }
  void DoFork(int, int, int) override {}
  bool DoReserve(int, int, int) override { return true; }
  void DoStore(int, int, int, const TensorView&, const TensorView&) override {}
  int DoFind(std::span<const std::int32_t>, const PrefixKey&) const override {
    return 0;
  }
  void DoAddMedia(int, const PrefixMedia&) override {}
  void DoCommit(int, int, int, std::span<const std::int32_t>) override {}
  void DoTruncate(int, int, int) override {}
  void DoFree(int) override {}
  std::span<const int> DoBlocks(int) const override { return blocks_; }
  PagedKv DoRows(int, std::int64_t, int) const override {
    ++looks_;
    return {};
  }
  PagedKv DoAllRows(int) const override { return {}; }

  std::vector<int> blocks_;
  mutable int looks_ = 0;
};

// Appends `tokens` rows to the sequence.
PagedAppend Appended(CountingPool& pool, int sequence, int tokens) {
  const std::vector<float> numbers(AsSize(tokens));
  const TensorView rows =
      DenseView(numbers.data(), DType::kF32, {1, 1, tokens, 1});
  return *pool.Append(sequence, 0, rows, rows);
}

TEST(Append, ChecksTheStoredRows) {
  CountingPool pool;
  const int sequence = *pool.Open({}, {});
  for (int len = 0; len + 6 < kBlocks * kBlockSize; len += 6) {
    const int before = pool.looks();
    const PagedAppend appended = Appended(pool, sequence, 6);
    // Six tokens take two or three blocks of four.
    const auto blocks = AsSize((len + 5) / kBlockSize - len / kBlockSize + 1);
    ASSERT_EQ(pool.looks() - before, AsInt(blocks));
    ASSERT_EQ(appended.views.size(), blocks);
    int start = len;
    for (const PagedView& view : appended.views) {
      ASSERT_EQ(view.start, start);
      ASSERT_EQ(view.block, start / kBlockSize);
      start += view.length;
    }
    ASSERT_EQ(start, len + 6);
    ASSERT_TRUE(pool.Commit(sequence, 6).ok());
  }
}

}  // namespace
}  // namespace kvtwin::props
