// The argument checks of pools (P11), and of the specs of caches and pools: an
// argument just outside of what the rules allow is refused and changes nothing;
// one just inside is accepted. The table is written from docs/semantics.md,
// because all twins share these checks.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/paged.h"
#include "props/testing/gate_bounds.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Numbers = std::vector<int>;
using Tokens = std::vector<std::int32_t>;

PagedSpec Spec() {
  PagedSpec spec;
  spec.block_size = 2;
  spec.blocks = 12;
  spec.max_seq_len = 9;
  spec.layers = 2;
  spec.kv_heads = 2;
  spec.k_head_dim = 2;
  spec.v_head_dim = 3;
  spec.dtype = DType::kF16;
  spec.layout = PagedLayout::kHeadMajor;
  return spec;
}

using Does = std::function<Status(PagedPool&)>;

using PoolBound = Bound<PagedPool>;
using PoolBounds = std::vector<PoolBound>;

Does Append(int sequence, int layer, const Shape& key, const Shape& value,
            DType dtype = DType::kF32, DType v_dtype = DType::kF32) {
  return [=](PagedPool& pool) {
    std::array<float, 200> numbers;
    std::iota(numbers.begin(), numbers.end(), 1.0F);
    TensorView k = DenseView(numbers.data(), dtype, key);
    TensorView v = DenseView(numbers.data(), v_dtype, value);
    return pool.Append(sequence, layer, k, v).status();
  };
}
Does AppendTokens(int sequence, int layer, std::int64_t tokens) {
  return Append(sequence, layer, {2, 2, tokens, 1}, {3, 2, tokens, 1});
}
// All tokens have the same row.
Does AppendRepeated(std::int64_t tokens) {
  return [=](PagedPool& pool) {
    const std::array<float, 6> numbers = {};
    TensorView k = DenseView(numbers.data(), DType::kF32, {2, 2, 1, 1});
    TensorView v = DenseView(numbers.data(), DType::kF32, {3, 2, 1, 1});
    for (TensorView* rows : {&k, &v}) {
      rows->shape[2] = tokens;
      rows->stride[2] = 0;
    }
    return pool.Append(0, 0, k, v).status();
  };
}
Does AppendWith(bool key, void (*change)(TensorView& view)) {
  return [=](PagedPool& pool) {
    const std::array<float, 12> numbers = {};
    TensorView k = DenseView(numbers.data(), DType::kF32, {2, 2, 1, 1});
    TensorView v = DenseView(numbers.data(), DType::kF32, {3, 2, 1, 1});
    change(key ? k : v);
    return pool.Append(0, 0, k, v).status();
  };
}
Does Open(const Tokens& prompt) {
  return [=](PagedPool& pool) { return pool.Open(prompt).status(); };
}
Does Fork(int sequence, int len) {
  return [=](PagedPool& pool) { return pool.Fork(sequence, len).status(); };
}
Does Commit(int sequence, int count) {
  return [=](PagedPool& pool) { return pool.Commit(sequence, count); };
}
Does CommitTokens(int sequence, const Tokens& tokens) {
  return [=](PagedPool& pool) {
    return pool.Commit(sequence, std::span<const std::int32_t>(tokens));
  };
}
Does Truncate(int sequence, int len) {
  return [=](PagedPool& pool) { return pool.Truncate(sequence, len); };
}
Does Free(int sequence) {
  return [=](PagedPool& pool) { return pool.Free(sequence); };
}
Does Views(int sequence, int layer, bool packed) {
  return [=](PagedPool& pool) {
    return packed ? pool.ViewsPacked(sequence, layer).status()
                  : pool.Views(sequence, layer).status();
  };
}
Does Contiguous(int sequence, int layer, int kv_len) {
  return [=](PagedPool& pool) {
    return pool.ContiguousKV(sequence, layer, kv_len).status();
  };
}
Does Export(const Numbers& sequences, bool table) {
  return [=](PagedPool& pool) {
    return table ? pool.ExportTable(sequences).status()
                 : pool.ExportCsr(sequences).status();
  };
}
Does LayerTable(const Numbers& sequences, int layer) {
  return [=](PagedPool& pool) {
    return pool.ExportLayerTable(sequences, layer).status();
  };
}
Does Slots(int sequence, int begin, int end) {
  return [=](PagedPool& pool) {
    return pool.SlotMapping(sequence, begin, end).status();
  };
}
Does Length(int sequence) {
  return [=](PagedPool& pool) { return pool.SeqLen(sequence).status(); };
}
Does LayerOf(int layer) {
  return [=](PagedPool& pool) { return pool.LayerDevice(layer).status(); };
}

Does AllBlocks(int layer) {
  return [=](PagedPool& pool) { return pool.Blocks(layer).status(); };
}

// Bounds of the sequence number. The pool below has sequences 0 and 1; sequence
// 0 has 5 tokens, then 2 more rows in layer 0 and 3 in layer 1.
PoolBounds SequenceBounds() {
  PoolBounds bounds;
  for (const int none : {-1, 2, kMax, kLeast}) {
    const std::string text = fmt::format("{}", none);
    const auto add = [&](const std::string& name, const Does& outside,
                         const Does& inside) {
      bounds.push_back({name + " of " + text, outside, text, inside});
    };
    add("fork", Fork(none, 0), Fork(1, 0));
    add("length", Length(none), Length(1));
    add("append", AppendTokens(none, 0, 1), AppendTokens(1, 0, 1));
    add("commit", Commit(none, 0), Commit(1, 0));
    add("commit of tokens", CommitTokens(none, {}), CommitTokens(1, {}));
    add("truncate", Truncate(none, 0), Truncate(1, 0));
    add("free", Free(none), Free(1));
    add("views", Views(none, 0, false), Views(1, 0, false));
    add("packed views", Views(none, 0, true), Views(1, 0, true));
    add("one tensor", Contiguous(none, 0, 1), Contiguous(0, 0, 1));
    add("table of a layer", LayerTable({0, none}, 0), LayerTable({0, 1}, 0));
  }
  for (const int none : {-1, 2, kMax, kLeast}) {
    const std::string text = fmt::format("layer is {}", none);
    const auto add = [&](const Does& outside, const Does& inside) {
      bounds.push_back({text, outside, text, inside});
    };
    add(AppendTokens(0, none, 1), AppendTokens(0, 1, 1));
    add(Views(0, none, false), Views(0, 1, false));
    add(Views(0, none, true), Views(0, 1, true));
    add(Contiguous(0, none, 1), Contiguous(0, 1, 1));
    add(LayerTable({0}, none), LayerTable({0}, 1));
    add(LayerOf(none), LayerOf(1));
    add(AllBlocks(none), AllBlocks(1));
  }
  return bounds;
}

// Bounds of tables and slots, which a pool with groups has only by group.
PoolBounds TableBounds() {
  PoolBounds bounds = {
      {"slots from", Slots(0, -1, 2), "-1", Slots(0, 0, 2)},
      {"slots to", Slots(0, 0, 9), "9", Slots(0, 0, 8)},
      {"slots backwards", Slots(0, 3, 2), "3 to 2", Slots(0, 3, 3)},
  };
  for (const int none : {-1, 2, kMax, kLeast}) {
    const std::string text = fmt::format("{}", none);
    bounds.push_back(
        {"slots of " + text, Slots(none, 0, 0), text, Slots(1, 0, 0)});
    for (const bool table : {false, true}) {
      bounds.push_back({"export of " + text, Export({0, none}, table), text,
                        Export({0, 1}, table)});
    }
  }
  return bounds;
}

PoolBounds LengthBounds() {
  return {
      {"a token", Open({1, -1}), "-1", Open({1, 0})},
      {"the largest token", Open({kLeast}), "-2147483648", Open({kMax})},
      {"fork below", Fork(0, -1), "-1", Fork(0, 0)},
      {"fork above", Fork(0, 6), "6", Fork(0, 5)},
      {"truncate below", Truncate(0, -1), "-1", Truncate(0, 0)},
      {"truncate above", Truncate(0, 6), "6", Truncate(0, 5)},
      {"commit below", Commit(0, -1), "-1", Commit(0, 0)},
      {"a committed token", CommitTokens(0, {3, -1}), "-1",
       CommitTokens(0, {3, 0})},
      // Every layer has 2 appended rows.
      {"commit above", Commit(0, 3), "3", Commit(0, 2), kUntimely},
      {"tokens above", CommitTokens(0, {1, 2, 3}), "3", CommitTokens(0, {1, 2}),
       kUntimely},
      {"one tensor of none", Contiguous(0, 0, 0), "0", Contiguous(0, 0, 1)},
      {"one tensor above", Contiguous(0, 0, 8), "8", Contiguous(0, 0, 7)},
      {"of another layer", Contiguous(0, 1, 9), "9", Contiguous(0, 1, 8)},
      {"above max_seq_len", AppendTokens(0, 0, 5), "max_seq_len 9",
       AppendTokens(0, 0, 4), StatusCode::kCacheFull},
      {"the most tokens", AppendRepeated(INT64_MAX),
       "9223372036854775807 more are above max_seq_len 9", AppendRepeated(4),
       StatusCode::kCacheFull},
      {"no rows", AppendTokens(0, 0, 0), "at least one", AppendTokens(0, 0, 1)},
      {"no key", AppendWith(true, NoData), "key has no data",
       AppendTokens(0, 0, 1)},
      {"no value", AppendWith(false, NoData), "value has no data",
       AppendTokens(0, 0, 1)},
      {"no strides", AppendWith(false, NoStrides), "value has no strides",
       AppendTokens(0, 0, 1)},
  };
}

PoolBounds ShapeBounds() {
  constexpr Shape kKey = {2, 2, 2, 1};
  constexpr Shape kValue = {3, 2, 2, 1};
  const Does right = Append(0, 0, kKey, kValue);
  PoolBounds bounds;
  for (const std::size_t extent : {0U, 1U, 2U, 3U}) {
    for (const std::int64_t delta : {-1, 1}) {
      Shape key = kKey;
      Shape value = kValue;
      key[extent] += delta;
      value[extent] += delta;
      // (If both change, they may have any number of tokens.)
      bounds.push_back({"K", Append(0, 0, key, kValue), "", right});
      bounds.push_back({"V", Append(0, 0, kKey, value), "", right});
    }
  }
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8, DType::kBits}) {
    if (dtype == DType::kF32 || dtype == DType::kF16) continue;
    const std::string name(DTypeName(dtype));
    bounds.push_back({"K of " + name, Append(0, 0, kKey, kValue, dtype), name,
                      Append(0, 0, kKey, kValue, DType::kF16)});
    bounds.push_back({"V of " + name,
                      Append(0, 0, kKey, kValue, DType::kF16, dtype), name,
                      Append(0, 0, kKey, kValue, DType::kF32, DType::kF16)});
  }
  return bounds;
}

Does AddMedia(int sequence, int position) {
  return [=](PagedPool& pool) {
    return pool.AddMedia(sequence, {position, "a"});
  };
}
Does OpenWith(const std::vector<PrefixMedia>& media) {
  return [=](PagedPool& pool) {
    return pool.Open(Tokens{1}, {.media = media}).status();
  };
}
Does Before(int sequence, int len) {
  return [=](PagedPool& pool) {
    return pool.ResumeBefore(sequence, len).status();
  };
}

PoolBounds MediaBounds() {
  return {
      {"media of a prompt", OpenWith({{-1, "a"}}), "position of media is -1",
       OpenWith({{0, "a"}})},
      {"the order of media", OpenWith({{2, "a"}, {1, "b"}}),
       "media at 1 come after media at 2", OpenWith({{2, "a"}, {2, "b"}})},
      {"media of an unknown sequence", AddMedia(2, 5),
       "sequence 2 does not exist", AddMedia(1, 0)},
      {"media of committed tokens", AddMedia(0, 4),
       "position of media is 4, sequence 0 has 5 tokens", AddMedia(0, 5)},
      {"resume of an unknown sequence", Before(2, 0),
       "sequence 2 does not exist", Before(1, 0)},
      {"resume below", Before(0, -1), "len is -1", Before(0, 0)},
      {"resume above", Before(0, 6), "len is 6, sequence 0 has 5 tokens",
       Before(0, 5)},
  };
}

// Returns a pool of two groups of one layer, otherwise like Spec().
PagedSpec GroupedSpec() {
  PagedSpec group = Spec();
  group.layers = 1;
  PagedSpec spec;
  spec.max_seq_len = group.max_seq_len;
  spec.groups = {group, group};
  return spec;
}

std::unique_ptr<PagedPool> Prepared(const std::string& twin,
                                    const PagedSpec& spec = Spec()) {
  auto pool = *MakePagedPool(spec, twin);
  EXPECT_EQ(*pool->Open(), 0);
  EXPECT_EQ(*pool->Open(), 1);
  for (const int layer : {0, 1}) {
    EXPECT_TRUE(AppendTokens(0, layer, 5)(*pool).ok());
  }
  EXPECT_TRUE(CommitTokens(0, {1, 2, 3, 4, 5})(*pool).ok());
  EXPECT_TRUE(AppendTokens(0, 0, 2)(*pool).ok());
  EXPECT_TRUE(AppendTokens(0, 1, 3)(*pool).ok());
  return pool;
}

// Expects that everything visible of two pools is equal.
void ExpectAlike(const PagedPool& pool, const PagedPool& expected) {
  EXPECT_EQ(pool.Usage(), expected.Usage());
  for (int sequence = 0; sequence < 4; ++sequence) {
    const Result<int> actual = pool.SeqLen(sequence);
    const Result<int> len = expected.SeqLen(sequence);
    ASSERT_EQ(actual.ok(), len.ok());
    if (!len.ok()) continue;
    EXPECT_EQ(*actual, *len);
    if (pool.spec().groups.empty()) {
      const Numbers single = {sequence};
      EXPECT_EQ(*pool.ExportTable(single), *expected.ExportTable(single));
    }
    for (const int layer : {0, 1}) {
      const auto views = *pool.Views(sequence, layer);
      const auto due_views = *expected.Views(sequence, layer);
      ASSERT_EQ(views.size(), due_views.size());
      for (std::size_t i = 0; i < views.size(); ++i) {
        EXPECT_EQ(views[i].start, due_views[i].start);
        EXPECT_EQ(views[i].block, due_views[i].block);
        ASSERT_EQ(views[i].length, due_views[i].length);
        EXPECT_EQ(Dense(views[i].key), Dense(due_views[i].key));
        EXPECT_EQ(Dense(views[i].value), Dense(due_views[i].value));
      }
    }
  }
}

class PoolGate : public EachTwin {
 protected:
  static void ExpectBound(const PoolBound& bound,
                          const PagedSpec& spec = Spec()) {
    SCOPED_TRACE(bound.name);
    const auto tried = Prepared(GetParam(), spec);
    const auto other = Prepared(GetParam(), spec);
    props::ExpectBound(bound, *tried, *other, ExpectAlike);
  }
};
INSTANTIATE_TEST_SUITE_P(Twins, PoolGate, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(PoolGate, ArgumentsAtTheirBounds) {
  for (const PoolBounds& bounds :
       {SequenceBounds(), TableBounds(), LengthBounds(), ShapeBounds()}) {
    for (const PoolBound& bound : bounds) ExpectBound(bound);
  }
}

// The twins with groups and media: all except cuda.
class GroupsGate : public PoolGate {
 public:
  static std::vector<std::string> Twins() {
    std::vector<std::string> twins = TwinList();
    std::erase(twins, "cuda");
    return twins;
  }
};
INSTANTIATE_TEST_SUITE_P(Twins, GroupsGate,
                         ::testing::ValuesIn(GroupsGate::Twins()),
                         TwinTestName);

TEST_P(GroupsGate, ArgumentsAtTheirBounds) {
  for (const PoolBounds& bounds :
       {SequenceBounds(), LengthBounds(), ShapeBounds(), MediaBounds()}) {
    for (const PoolBound& bound : bounds) ExpectBound(bound, GroupedSpec());
  }
  for (const PoolBound& bound : MediaBounds()) ExpectBound(bound);
}

TEST_P(GroupsGate, SpecsAtTheirBounds) {
  const auto refusal = [](const std::function<void(PagedSpec&)>& change) {
    PagedSpec spec = GroupedSpec();
    change(spec);
    return MakePagedPool(spec, GetParam()).status().message();
  };
  EXPECT_EQ(refusal([](PagedSpec&) {}), "");
  EXPECT_EQ(refusal([](PagedSpec& spec) { spec.groups[1].block_size = 0; }),
            "block_size is 0, it must be at least 1");
  EXPECT_EQ(refusal([](PagedSpec& spec) { spec.max_seq_len = 0; }),
            "max_seq_len is 0, it must be at least 1");
  EXPECT_EQ(refusal([](PagedSpec& spec) { spec.groups[0].groups.resize(1); }),
            "groups: a group has groups");
  EXPECT_EQ(refusal([](PagedSpec& spec) {
              spec.groups[0].block_size = (1 << 16) - 1;
              spec.groups[1].block_size = 1 << 16;
            }),
            "groups: block_size of all is 4294901760");
}

TEST_P(PoolGate, MessagesNameTheTokenAndTheFreeBlocks) {
  PagedSpec spec = Spec();
  spec.blocks = 3;
  const auto pool = *MakePagedPool(spec, GetParam());
  // Tokens are checked eight at a time.
  for (const int wrong : {0, 7, 8, 9}) {
    Tokens prompt(10, 3);
    At(prompt, wrong) = -5;
    EXPECT_EQ(pool->Open(prompt).status().message(),
              fmt::format("token {} is -5, it must not be negative", wrong));
  }
  ASSERT_TRUE(pool->Open().ok());
  EXPECT_TRUE(AppendTokens(0, 0, 3)(*pool).ok());
  ASSERT_TRUE(pool->Open().ok());
  const Status full = AppendTokens(1, 0, 3)(*pool);
  EXPECT_EQ(full.code(), StatusCode::kCacheFull);
  EXPECT_EQ(full.message(),
            "there are not enough blocks for 3 tokens more: 1 are free, 0 "
            "could be evicted");
}

// P1.
TEST_P(PoolGate, SequencesGetTheLowestUnusedNumbers) {
  const auto pool = *MakePagedPool(Spec(), GetParam());
  for (const int number : {0, 1, 2, 3}) EXPECT_EQ(*pool->Open(), number);
  for (const int number : {2, 0, 1}) EXPECT_TRUE(pool->Free(number).ok());
  EXPECT_EQ(*pool->Open(), 0);
  EXPECT_EQ(*pool->Fork(3, 0), 1);
  EXPECT_TRUE(pool->Free(3).ok());
  EXPECT_EQ(*pool->Fork(0, 0), 2);
  EXPECT_EQ(*pool->Open(), 3);
  EXPECT_EQ(*pool->Open(), 4);
}

TEST_P(PoolGate, PackedViewsAreOfHeadMajorBlocks) {
  PagedSpec spec = Spec();
  for (const bool packed : {false, true}) {
    spec.layout = packed ? PagedLayout::kHeadMajor : PagedLayout::kTokenMajor;
    const auto pool = *MakePagedPool(spec, GetParam());
    ASSERT_EQ(*pool->Open(), 0);
    EXPECT_EQ(Views(0, 0, true)(*pool).code(),
              packed ? StatusCode::kOk : StatusCode::kNotSupported);
    EXPECT_EQ(Views(1, 0, true)(*pool).code(), kInvalid);
  }
}

TEST_P(PoolGate, SpecsAtTheirBounds) {
  const auto code = [](const PagedSpec& spec) {
    return MakePagedPool(spec, GetParam()).status().code();
  };
  for (const auto member :
       {&PagedSpec::block_size, &PagedSpec::blocks, &PagedSpec::max_seq_len,
        &PagedSpec::layers, &PagedSpec::kv_heads, &PagedSpec::k_head_dim,
        &PagedSpec::v_head_dim}) {
    for (const int value : {kLeast, -1, 0, 1}) {
      PagedSpec spec = Spec();
      spec.*member = value;
      EXPECT_EQ(code(spec), value == 1 ? StatusCode::kOk : kInvalid) << value;
    }
  }
  for (const DType dtype : kRowDTypes) {
    const bool blocks = dtype == DType::kQ8 || dtype == DType::kQ4;
    for (const int dim : {1, 31, 32, 33, 64}) {
      for (const bool key : {true, false}) {
        PagedSpec spec = Spec();
        spec.dtype = key ? dtype : DType::kF32;
        spec.v_dtype = key ? DType::kF32 : dtype;
        (key ? spec.k_head_dim : spec.v_head_dim) = dim;
        EXPECT_EQ(code(spec),
                  blocks && dim % 32 != 0 ? kInvalid : StatusCode::kOk);
      }
    }
  }
  PagedSpec spec = Spec();
  spec.dtype = DType::kBits;
  EXPECT_EQ(code(spec), kInvalid);
  spec = Spec();
  spec.v_dtype = DType::kBits;
  EXPECT_EQ(code(spec), kInvalid);
  // The pool has more tokens than can be counted: it is refused before any
  // memory is allocated.
  spec = Spec();
  spec.blocks = 1 << 20;
  spec.block_size = 1 << 11;
  EXPECT_EQ(code(spec), kInvalid);
  spec.k_head_dim = spec.kv_heads = kMax;
  EXPECT_EQ(code(spec), kInvalid);
}

// Commits many rows of zeros, all of which lie at one address.
Status CommitZeros(PagedPool& pool, int tokens) {
  constexpr std::array<float, 1> kZero = {};
  TensorView rows = DenseView(kZero.data(), DType::kF32, {1, 1, tokens, 1});
  rows.stride[2] = 0;
  const auto appended = pool.Append(0, 0, rows, rows);
  return appended.ok() ? pool.Commit(0, tokens) : appended.status();
}

TEST_P(GroupsGate, AWindowMayReachFartherThanAnyToken) {
  PagedSpec spec = {.block_size = 4, .blocks = 3, .max_seq_len = 12};
  spec.window = kMax;
  const auto pool = *MakePagedPool(spec, GetParam());
  const Tokens prompt = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  ASSERT_EQ(*pool->Open(prompt), 0);
  ASSERT_TRUE(Append(0, 0, {1, 1, 9, 1}, {1, 1, 9, 1})(*pool).ok());
  ASSERT_TRUE(CommitTokens(0, prompt)(*pool).ok());
  EXPECT_EQ(*pool->Find(prompt), 8);
  // Another sequence gets the second block, and the first one stays.
  ASSERT_TRUE(Free(0)(*pool).ok());
  ASSERT_EQ(*pool->Open(), 0);
  ASSERT_TRUE(CommitZeros(*pool, 8).ok());
  EXPECT_EQ(*pool->Find(prompt), 4);
}

// The reference would store each state.
TEST(PoolOfStates, HasAsManyTokensAsCanBeCounted) {
  PagedSpec spec = {.block_size = 1 << 29, .blocks = 3, .max_seq_len = kMax};
  spec.states = true;
  spec.window = 1;
  const auto pool = *MakePagedPool(spec, "optimized");
  ASSERT_EQ(*pool->Open(), 0);
  for (const int tokens : {1 << 30, (1 << 30) - 1}) {
    ASSERT_TRUE(CommitZeros(*pool, tokens).ok());
    const auto views = *pool->Views(0, 0);
    ASSERT_FALSE(views.empty());
    EXPECT_EQ(views.back().start, *pool->SeqLen(0) - 1);
  }
  EXPECT_EQ(*pool->SeqLen(0), kMax);
  EXPECT_EQ(CommitZeros(*pool, 1).code(), StatusCode::kCacheFull);
}

TEST_P(PoolGate, SpecsOfCachesAtTheirBounds) {
  const auto code = [](const CacheSpec& spec) {
    return MakeCache(spec, GetParam()).status().code();
  };
  const auto expected = [](bool ok) { return ok ? StatusCode::kOk : kInvalid; };
  for (const std::int32_t value : {kLeast, -1, 0, 1, kMax}) {
    for (const Kind kind : {Kind::kSwa, Kind::kSwaMem}) {
      CacheSpec spec;
      spec.kind = kind;
      spec.window = value;
      EXPECT_EQ(code(spec), expected(value >= 0)) << value;
    }
    CacheSpec spec;
    spec.kind = Kind::kSwaMem;
    spec.window = 0;
    spec.memory = value;
    EXPECT_EQ(code(spec), expected(value >= 0)) << value;
    spec.kind = Kind::kChunked;
    spec.chunk = value;
    EXPECT_EQ(code(spec), expected(value >= 1)) << value;
    spec.kind = Kind::kCausal;  // This kind has no window.
    spec.window = value;
    EXPECT_EQ(code(spec), StatusCode::kOk);
  }
  for (const double base :
       {-1.0, 0.0, 1e-300, 1.0, 1e300, std::numeric_limits<double>::infinity(),
        std::nan("")}) {
    CacheSpec spec;
    spec.shift.kind = ShiftKind::kRope;
    spec.shift.rope.base = base;
    EXPECT_EQ(code(spec), expected(base > 0 && std::isfinite(base))) << base;
    spec.shift.rope.base = 1;
    spec.shift.rope.scale = base;
    EXPECT_EQ(code(spec), expected(std::isfinite(base))) << base;
    spec.shift.kind = ShiftKind::kAdd;  // This shift has no RoPE.
    EXPECT_EQ(code(spec), StatusCode::kOk);
  }
  for (const int dims : {-2, -1, 0, 1, 2, 3, 64}) {
    CacheSpec spec;
    spec.shift.kind = ShiftKind::kRope;
    spec.shift.rope.dims = dims;
    EXPECT_EQ(code(spec), expected(dims >= 0 && dims % 2 == 0)) << dims;
  }
  CacheSpec wrapper;
  wrapper.kind = Kind::kWrapper;
  EXPECT_EQ(code(wrapper), kInvalid);
  wrapper.caches.resize(1);
  EXPECT_EQ(code(wrapper), StatusCode::kOk);
  wrapper.caches.push_back(wrapper);
  EXPECT_EQ(code(wrapper), kInvalid);
}

}  // namespace
}  // namespace kvtwin::props
