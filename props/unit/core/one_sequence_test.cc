// Takes one sequence out of a state and adds it to another state (S57),
// compared with tokens in maps: all twins share core/one_sequence.cc, and a
// part of AddSequence.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/save.h"
#include "props/base/forwarding_cache.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

// A token, and the numbers that its K and V rows have in each layer.
struct Token {
  std::int32_t position = 0;
  std::set<int> owners;
  std::map<int, std::pair<float, float>> rows;
};
using Tokens = std::map<int, Token>;  // By cell.

constexpr int kCells = 12;
constexpr int kGone = 9;  // A sequence that ended: free cells keep its rows.

// The state that S55 defines for these tokens, with these layers.
CacheState StateOf(const Tokens& tokens, const std::set<int>& layers) {
  CacheState state;
  for (const auto& [cell, token] : tokens) {
    for (const int owner : token.owners) {
      state.cells.push_back({cell, token.position, owner});
    }
  }
  const auto count = std::ssize(tokens);
  for (const int layer : layers) {
    KvRows& rows = state.layers[layer];
    rows.key = FilledTensor(DType::kF32, {layer + 1, 2, count, 1}, 0);
    rows.value = FilledTensor(DType::kF32, {2, 2, count, 1}, 0);
    std::size_t at = 0;
    for (const auto& [cell, token] : tokens) {
      const auto found = token.rows.find(layer);
      const std::size_t row = at++;
      if (found == token.rows.end()) continue;  // The rows are zeros.
      const auto [key, value] = found->second;
      const auto fill = [row](DenseTensor& tensor, float number) {
        const auto size = AsSize(tensor.shape[0] * tensor.shape[1]);
        for (std::size_t i = 0; i < size; ++i) {
          std::memcpy(&tensor.bytes[(row * size + i) * sizeof(float)], &number,
                      sizeof(float));
          number += 0.125F;
        }
      };
      fill(rows.key, key);
      fill(rows.value, value);
    }
  }
  return state;
}

class OneSequence : public EachTwin {
 protected:
  int Pick(int end) { return AsInt(random_() % static_cast<unsigned>(end)); }

  // Tokens of up to three sequences, at random cells.
  Tokens SomeTokens(const std::set<int>& layers) {
    Tokens tokens;
    for (int cell = 0; cell < kCells; ++cell) {
      if (Pick(3) == 0) continue;
      Token token;
      token.position = Pick(20);
      token.owners.insert(Pick(3));
      if (Pick(3) == 0) token.owners.insert(Pick(3));
      for (const int layer : layers) {
        token.rows[layer] = {static_cast<float>(1 + Pick(1000)),
                             static_cast<float>(1 + Pick(1000))};
      }
      tokens[cell] = token;
    }
    return tokens;
  }

  // Adds tokens of the sequence kGone in all cells that are free.
  Tokens Crowded(Tokens tokens, const std::set<int>& layers) {
    for (int cell = 0; cell < kCells; ++cell) {
      Token token = {.position = 0, .owners = {kGone}, .rows = {}};
      for (const int layer : layers) token.rows[layer] = {-1, -1};
      tokens.try_emplace(cell, token);
    }
    return tokens;
  }

  std::mt19937 random_{1};
};
INSTANTIATE_TEST_SUITE_P(Twins, OneSequence, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

Tokens TokensOf(const Tokens& tokens, int sequence) {
  Tokens found;
  for (const auto& [cell, token] : tokens) {
    if (!token.owners.contains(sequence)) continue;
    found[cell] = token;
    found[cell].owners = {sequence};
  }
  return found;
}

// Adds the tokens as `sequence`, in order, at the lowest free cells.
Tokens Joined(const Tokens& tokens, int sequence, const Tokens& added) {
  Tokens joined = tokens;
  for (const auto& [from, token] : added) {
    int cell = 0;
    while (joined.contains(cell)) ++cell;
    joined[cell] = token;
    joined[cell].owners = {sequence};
  }
  return joined;
}

TEST_P(OneSequence, IsExtractedAndInserted) {
  int fit = 0;
  for (int i = 0; i < 400; ++i) {
    // Some layers exist on one side only.
    const std::set<int> layers = {0, 2};
    const std::set<int> other_layers =
        i % 2 == 0 ? layers : std::set{i % 4 - 1, 5};
    const Tokens tokens = SomeTokens(layers);
    const int sequence = Pick(4);
    const Tokens added = TokensOf(SomeTokens(other_layers), sequence);
    const CacheState state = StateOf(tokens, layers);
    const CacheState single = SequenceOf(state, sequence);
    const Tokens expected = TokensOf(tokens, sequence);
    ASSERT_TRUE(single ==
                StateOf(expected, expected.empty() ? std::set<int>() : layers));

    const CacheState more =
        StateOf(added, added.empty() ? std::set<int>() : other_layers);
    const int number = 7;
    const int cells[] = {kCells};
    const Result<CacheState> both = WithSequence(state, number, more, cells);
    auto cache = *MakeCache({}, GetParam());
    ASSERT_TRUE(cache->Init({DType::kF32, 1, kCells, 1}).ok());
    ASSERT_TRUE(cache->Restore(StateOf(Crowded(tokens, layers), layers)).ok());
    ASSERT_TRUE(cache->Remove(kGone, 0, kOpenEnd).ok());
    ASSERT_TRUE(*cache->SnapshotOf(sequence) == single);
    const Status status = cache->AddSequence(number, more);
    if (tokens.size() + added.size() > kCells) {
      EXPECT_EQ(both.status().code(), StatusCode::kCacheFull);
      EXPECT_EQ(status.code(), StatusCode::kCacheFull);
      ASSERT_TRUE(*cache->Snapshot() == state);
      continue;
    }
    std::set<int> all = layers;
    if (!added.empty()) all.insert(other_layers.begin(), other_layers.end());
    const CacheState joined = StateOf(Joined(tokens, number, added), all);
    ASSERT_TRUE(both.ok()) << both.status().ToString();
    ASSERT_TRUE(*both == joined);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(*cache->Snapshot() == joined);
    fit += added.empty() ? 0 : 1;
  }
  EXPECT_GT(fit, 50);
}

// A third-party cache whose snapshots have tokens out of order.
class OutOfOrder final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status SnapshotTo(CacheState& state) const override {
    Status status = ForwardingCache::SnapshotTo(state);
    std::swap(state.cells.front(), state.cells.back());
    return status;
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    return Cache::SnapshotOf(sequence);
  }
};

TEST(OneSequence, IsNotTakenOutOfABrokenSnapshot) {
  OutOfOrder cache(*MakeCache({.kind = Kind::kCausal}));
  ASSERT_TRUE(
      cache.Init({.max_sequences = 1, .capacity = 4, .max_batch = 2}).ok());
  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences = {0, 0};
  ASSERT_TRUE(cache.StartForward({positions, sequences}, false).ok());
  ASSERT_TRUE(cache.SetLayer(0).ok());
  const DenseTensor rows = FilledTensor(DType::kF32, {1, 1, 2, 1}, 1);
  ASSERT_TRUE(cache.Put(rows.view(), rows.view()).ok());
  const Status status = cache.SnapshotOf(0).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(status.message().starts_with(
      "Snapshot returned a state that no cache can have: "))
      << status.message();
}

}  // namespace
}  // namespace kvtwin::props
