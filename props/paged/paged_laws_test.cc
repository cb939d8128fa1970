// Tests the laws of paged pools (docs/laws.md) on each twin alone, without the
// ledger or the other twin.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "props/base/hash.h"
#include "props/history/generate.h"
#include "props/paged/paged_runner.h"

namespace kvtwin::props {
namespace {

using Prompt = std::vector<std::int32_t>;

// A client of one pool. A row follows from the tokens up to its own.
class PoolClient {
 public:
  PoolClient(const PagedSpec& spec, std::string_view twin)
      : pool_(*MakePagedPool(spec, twin)) {}

  PagedPool& pool() { return *pool_; }
  const std::map<int, Prompt>& tokens() const { return tokens_; }

  int Open(const Prompt& prompt) {
    const int opened = *pool_->Open(prompt);
    const auto taken = AsSize(*pool_->SeqLen(opened));
    tokens_[opened] =
        Prompt(prompt.begin(), prompt.begin() + static_cast<long>(taken));
    return opened;
  }
  int Fork(int from, int len) {
    const int forked = *pool_->Fork(from, len);
    tokens_[forked] = tokens_.at(from);
    tokens_[forked].resize(AsSize(len));
    return forked;
  }
  // Appends to all layers and commits; returns false if an append was refused.
  bool Add(int sequence, const Prompt& more) {
    Prompt all = tokens_.at(sequence);
    const std::size_t before = all.size();
    all.insert(all.end(), more.begin(), more.end());
    const PagedSpec& spec = pool_->spec();
    for (int layer = 0; layer < spec.layers; ++layer) {
      const DenseTensor key = Rows(all, before, layer, spec.k_head_dim);
      const DenseTensor value = Rows(all, before, -layer, spec.v_head_dim);
      if (!pool_->Append(sequence, layer, key.view(), value.view()).ok()) {
        return false;
      }
    }
    EXPECT_TRUE(pool_->Commit(sequence, more).ok());
    tokens_[sequence] = all;
    return true;
  }
  void Truncate(int sequence, int len) {
    EXPECT_TRUE(pool_->Truncate(sequence, len).ok());
    tokens_[sequence].resize(AsSize(len));
  }
  void Free(int sequence) {
    EXPECT_TRUE(pool_->Free(sequence).ok());
    tokens_.erase(sequence);
  }

  // Returns all rows of a sequence's first `len` tokens, layer by layer.
  std::vector<std::byte> Seen(int sequence, int len) const {
    std::vector<std::byte> seen;
    const auto add = [&](const TensorView& row) {
      const DenseTensor dense = CopyOf(row, row.dtype);
      seen.insert(seen.end(), dense.bytes.begin(), dense.bytes.end());
    };
    for (int layer = 0; layer < pool_->spec().layers; ++layer) {
      const std::vector<PagedView> views = *pool_->Views(sequence, layer);
      for (const PagedView& view : views) {
        for (int i = 0; i < std::min(view.length, len - view.start); ++i) {
          add(Slice(view.key, 2, i));
          add(Slice(view.value, 2, i));
        }
      }
    }
    return seen;
  }
  std::vector<std::byte> Seen(int sequence) const {
    return Seen(sequence, *pool_->SeqLen(sequence));
  }
  std::vector<std::vector<std::byte>> SeenByAll() const {
    std::vector<std::vector<std::byte>> seen;
    for (const auto& [sequence, tokens] : tokens_) {
      seen.push_back(Seen(sequence));
    }
    return seen;
  }

 private:
  DenseTensor Rows(const Prompt& all, std::size_t begin, int role,
                   int head_dim) const {
    const int heads = pool_->spec().kv_heads;
    DenseTensor rows = FilledTensor(
        DType::kF32,
        {head_dim, heads, static_cast<std::int64_t>(all.size() - begin), 1}, 0);
    auto* to = reinterpret_cast<float*>(rows.bytes.data());
    for (std::size_t i = begin; i < all.size(); ++i) {
      const auto seed = static_cast<std::uint64_t>(role + 64);
      std::uint64_t hash =
          HashBytes(all.data(), (i + 1) * sizeof(all[0]), seed);
      for (int e = 0; e < head_dim * heads; ++e, hash = hash * 5 + 1) {
        *to++ = static_cast<float>(hash >> 56) - 99;
      }
    }
    return rows;
  }

  std::unique_ptr<PagedPool> pool_;
  std::map<int, Prompt> tokens_;
};

Prompt DrawPrompt(const Pick& pick, int least, int most) {
  Prompt prompt(AsSize(pick(least, most)));
  for (std::int32_t& token : prompt) token = pick(0, 1);
  return prompt;
}

// Checks a law at a random moment of a random history, on one of the sequences.
using Judge = std::function<void(PoolClient&, const Pick&, int sequence)>;

void Play(const Judge& judge) {
  for (const std::string_view twin : TwinNames()) {
    for (std::uint64_t number = 0; number < 60; ++number) {
      SCOPED_TRACE(std::string(twin) + ", history " + std::to_string(number));
      const Pick pick = SeededPick(11, number);
      PagedSpec spec = MakePagedHistory(11, number).spec;
      spec.blocks += 4;
      PoolClient client(spec, twin);
      for (int step = 0; step < 60; ++step) {
        if (client.tokens().size() < 5) client.Open(DrawPrompt(pick, 0, 6));
        const int at = pick(0, Size(client.tokens()) - 1);
        const int sequence = std::next(client.tokens().begin(), at)->first;
        const auto len = Size(client.tokens().at(sequence));
        switch (pick(0, 7)) {
          case 0:
            client.Free(sequence);
            break;
          case 1:
            client.Truncate(sequence, pick(0, len));
            break;
          case 2:
            judge(client, pick, sequence);
            break;
          case 3:
            if (client.tokens().size() < 7) client.Fork(sequence, pick(0, len));
            break;
          default:
            client.Add(sequence, DrawPrompt(pick, 1, 4));
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(PagedLaws, AForkShowsItsSourceAndThenDiverges) {
  int judged = 0;
  Play([&](PoolClient& client, const Pick& pick, int sequence) {
    const auto all = Size(client.tokens().at(sequence));
    const int len = pick(0, all);
    const std::vector<std::byte> expected = client.Seen(sequence, len);
    const std::vector<std::byte> source = client.Seen(sequence);
    const int forked = client.Fork(sequence, len);
    EXPECT_EQ(client.Seen(forked), expected);
    judged += client.Add(forked, DrawPrompt(pick, 1, 4)) ? 1 : 0;
    EXPECT_EQ(client.Seen(sequence), source);
    EXPECT_EQ(client.Seen(forked, len), expected);
    const std::vector<std::byte> own = client.Seen(forked);
    client.Add(sequence, DrawPrompt(pick, 1, 4));
    client.Truncate(sequence, len);
    EXPECT_EQ(client.Seen(forked), own);
    client.Free(forked);
    EXPECT_EQ(client.Seen(sequence), expected);
  });
  EXPECT_GT(judged, 100);
}

TEST(PagedLaws, AFoundPromptChangesNoView) {
  int found = 0;
  Play([&](PoolClient& client, const Pick&, int sequence) {
    const Prompt prompt = client.tokens().at(sequence);
    const int opened = client.Open(prompt);
    const Prompt taken = client.tokens().at(opened);
    found += taken.empty() ? 0 : 1;
    // Whole blocks were found, and at least one token is left to compute.
    EXPECT_EQ(taken.size() % AsSize(client.pool().spec().block_size), 0U);
    EXPECT_LT(taken.size(), std::max<std::size_t>(prompt.size(), 1));
    const Prompt rest(prompt.begin() + static_cast<long>(taken.size()),
                      prompt.end());
    if (rest.empty() || client.Add(opened, rest)) {
      EXPECT_EQ(client.Seen(opened), client.Seen(sequence));
    }
    client.Free(opened);
  });
  EXPECT_GT(found, 100);
}

TEST(PagedLaws, TruncatingAndAppendingAgainChangesNoView) {
  int judged = 0;
  Play([&](PoolClient& client, const Pick& pick, int sequence) {
    const Prompt all = client.tokens().at(sequence);
    const std::vector<std::byte> expected = client.Seen(sequence);
    const int len = pick(0, Size(all));
    client.Truncate(sequence, len);
    const Prompt rest(all.begin() + len, all.end());
    if (rest.empty() || !client.Add(sequence, rest)) return;
    EXPECT_EQ(client.Seen(sequence), expected);
    ++judged;
  });
  EXPECT_GT(judged, 100);
}

TEST(PagedLaws, ARefusedAppendChangesNothing) {
  int judged = 0;
  Play([&](PoolClient& client, const Pick&, int sequence) {
    const PagedSpec& spec = client.pool().spec();
    const auto seen = client.SeenByAll();
    const PagedUsage usage = client.pool().Usage();
    const Prompt much(AsSize(spec.max_seq_len) + 1);
    EXPECT_FALSE(client.Add(sequence, much));
    const Prompt large(AsSize(spec.blocks * spec.block_size) + 1);
    EXPECT_FALSE(client.Add(sequence, large));
    EXPECT_EQ(client.SeenByAll(), seen);
    EXPECT_EQ(client.pool().Usage(), usage);
    ++judged;
  });
  EXPECT_GT(judged, 100);
}

TEST(PagedLaws, TablesNameTheBlocksOfViews) {
  int judged = 0;
  Play([&](PoolClient& client, const Pick&, int sequence) {
    PagedPool& pool = client.pool();
    const int len = *pool.SeqLen(sequence);
    const int sequences[] = {sequence, sequence};
    const PagedCsr csr = *pool.ExportCsr(sequences);
    const PagedTable table = *pool.ExportTable(sequences);
    const std::vector<std::int64_t> slots = *pool.SlotMapping(sequence, 0, len);
    const int size = pool.spec().block_size;
    std::size_t at = 0;
    const std::vector<PagedView> views = *pool.Views(sequence, 0);
    for (const PagedView& view : views) {
      if (view.start >= len) break;  // Not committed.
      for (const auto half : {0, 1}) {
        const auto first = AsSize(At(csr.indptr, half));
        EXPECT_EQ(csr.indices.at(first + at), view.block);
        EXPECT_EQ(table.blocks.at(AsSize(half * table.columns) + at),
                  view.block);
      }
      for (int i = 0; i < std::min(view.length, len - view.start); ++i) {
        EXPECT_EQ(slots.at(AsSize(view.start + i)),
                  std::int64_t{view.block} * size + i);
        ++judged;
      }
      ++at;
    }
    EXPECT_EQ(csr.indptr[1], static_cast<std::int32_t>(at));
    EXPECT_EQ(csr.last_page_len[0],
              len == 0 ? 0 : len - (AsInt(at) - 1) * size);
  });
  EXPECT_GT(judged, 100);
}

TEST(PagedLaws, FreeingInAnyOrderLeavesNothing) {
  int judged = 0;
  Play([&](PoolClient& client, const Pick& pick, int) {
    while (!client.tokens().empty()) {
      const int at = pick(0, Size(client.tokens()) - 1);
      client.Free(std::next(client.tokens().begin(), at)->first);
    }
    const PagedUsage usage = client.pool().Usage();
    EXPECT_EQ(usage.used, 0);
    EXPECT_EQ(usage.shared, 0);
    EXPECT_EQ(usage.free + usage.cached, client.pool().spec().blocks);
    ++judged;
  });
  EXPECT_GT(judged, 100);
}

}  // namespace
}  // namespace kvtwin::props
