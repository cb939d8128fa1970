// The argument checks of caches (S47): an argument just outside of what the
// rules allow is refused and changes nothing; one just inside is accepted. The
// table is written from docs/semantics.md, because all twins share these
// checks.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "props/testing/gate_bounds.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Does = std::function<Status(Cache&)>;
using Positions = std::vector<std::int32_t>;
using Numbers = std::vector<int>;

using CacheBound = Bound<Cache>;
using CacheBounds = std::vector<CacheBound>;

// The tested cache takes batches of 3 and has a pass of 2 tokens, with rows in
// layer 0.
constexpr int kMaxBatch = 3;
constexpr int kTokens = 2;
constexpr Shape kKey = {2, 2, kTokens, 1};
constexpr Shape kValue = {3, 2, kTokens, 1};

Does Start(const Positions& positions, const Numbers& sequences,
           const Numbers& multimodal = {}) {
  return [=](Cache& cache) {
    return cache.StartForward({positions, sequences, multimodal}, false);
  };
}

// Puts rows of these shapes, whose elements are all one element in memory.
Does PutOf(const Shape& key, const Shape& value, DType dtype = DType::kF32,
           DType v_dtype = DType::kF32) {
  return [=](Cache& cache) {
    static const std::array<double, 64> kZeros = {};
    TensorView k = DenseView(kZeros.data(), dtype, key);
    TensorView v = DenseView(kZeros.data(), v_dtype, value);
    k.stride = v.stride = {0, 0, 0, 1};
    return cache.Put(k, v);
  };
}

Does PutWith(bool key, void (*change)(TensorView& view)) {
  return [=](Cache& cache) {
    const std::array<float, 64> zeros = {};
    TensorView k = DenseView(zeros.data(), DType::kF32, kKey);
    TensorView v = DenseView(zeros.data(), DType::kF32, kValue);
    change(key ? k : v);
    return cache.Put(k, v);
  };
}

Does Except(const Numbers& except) {
  return [=](Cache& cache) { return cache.SetCausal(except); };
}
Does Layer(int layer) {
  return [=](Cache& cache) { return cache.SetLayer(layer); };
}
Does Copy(int source, int target, std::int32_t len) {
  return [=](Cache& cache) { return cache.CopyPrefix(source, target, len); };
}
Does Cut(int sequence, std::int32_t begin, std::int32_t end) {
  return [=](Cache& cache) { return cache.Remove(sequence, begin, end); };
}
Does Resume(int sequence, std::int32_t position) {
  return [=](Cache& cache) {
    return cache.CanResume(sequence, position).status();
  };
}

CacheBounds BatchBounds() {
  return {
      {"no token", Start({}, {}), "empty", Start({9}, {0})},
      {"fewer sequences", Start({9, 10}, {0}), "2 positions",
       Start({9, 10}, {0, 0})},
      {"fewer positions", Start({9}, {0, 0}), "1 positions", Start({9}, {0})},
      {"max_batch", Start({9, 10, 11, 12}, {0, 0, 0, 0}), "4 tokens",
       Start({9, 10, 11}, {0, 0, 0})},
      {"a position", Start({9, -1}, {0, 0}), "the position of token 1 is -1",
       Start({9, 0}, {0, 0})},
      {"the least position", Start({kLeast}, {0}), "-2147483648",
       Start({0}, {0})},
      {"the largest position", Start({-1}, {0}), "-1", Start({kMax}, {0})},
      {"a sequence", Start({9, 9}, {0, -1}), "-1", Start({9, 9}, {0, 0})},
      {"the largest sequence", Start({9}, {kLeast}), "-2147483648",
       Start({9}, {kMax})},
      {"multimodal from", Start({9, 10}, {0, 0}, {0, -1}), "-1",
       Start({9, 10}, {0, 0}, {0, 0})},
      {"multimodal to", Start({9, 10}, {0, 0}, {2}), "2",
       Start({9, 10}, {0, 0}, {1})},
  };
}

CacheBounds ArgumentBounds() {
  return {
      {"layer", Layer(-1), "-1", Layer(0)},
      {"the largest layer", Layer(kLeast), "-2147483648", Layer(kMax)},
      {"src", Copy(-1, 0, 1), "src is -1", Copy(0, 1, 1)},
      {"dst", Copy(0, -1, 1), "dst is -1", Copy(1, 0, 1)},
      {"len", Copy(0, 1, -1), "len is -1", Copy(0, 1, 0)},
      {"the largest len", Copy(0, 1, kLeast), "len", Copy(0, 1, kMax)},
      {"numbers of sequences", Copy(kLeast, 1, 1), "src", Copy(kMax, kMax, 1)},
      {"Remove's seq", Cut(-1, 0, 1), "seq is -1", Cut(0, 0, 1)},
      {"Remove's begin", Cut(0, -1, 1), "begin is -1", Cut(0, 0, 1)},
      {"Remove's end", Cut(0, 2, 1), "end is 1", Cut(0, 2, 2)},
      {"a negative end", Cut(0, 0, -1), "end is -1", Cut(0, 0, 0)},
      {"the last position", Cut(0, kMax, kMax - 1), "2147483646",
       Cut(0, kMax, kMax)},
      {"before the open end", Cut(0, kMax, 0), "begin is 2147483647",
       Cut(0, kMax - 1, kMax - 1)},
      {"CanResume's seq", Resume(-1, 0), "seq is -1", Resume(0, 0)},
      {"CanResume's pos", Resume(0, -1), "pos is -1", Resume(0, kMax)},
      {"except from", Except({0, -1}), "-1", Except({0, 0})},
      {"except to", Except({2}), "2", Except({1, 0})},
      {"far except", Except({kMax}), "2147483647", Except({})},
  };
}

Does Draft(const Positions& positions, const Numbers& sequences,
           const Numbers& parents) {
  return [=](Cache& cache) {
    return cache.StartForward({positions, sequences, {}, parents}, false);
  };
}
Does Commit(int sequence, const Numbers& path) {
  return [=](Cache& cache) { return cache.Commit(sequence, path); };
}

// Sequence 0 has four tokens, sequence 1 has one.
CacheBounds DraftBounds() {
  const Does one = Draft({4}, {0}, {-1});
  const Does chain = Draft({4, 5}, {0, 0}, {-1, 0});
  return {
      {"parents", Draft({4}, {0}, {-1, -1}), "1 positions and 2 parents", one},
      {"a parent", Draft({4}, {0}, {-3}), "the parent of token 0 is -3", one},
      {"the least parent", Draft({4}, {0}, {kLeast}), "-2147483648", one},
      {"a draft before it", Draft({4, 5}, {0, 0}, {-1, 1}),
       "token 1 of the batch follows draft 1, sequence 0 has 1 drafts", chain},
      {"the first draft", Draft({4}, {0}, {0}),
       "token 0 of the batch follows draft 0, sequence 0 has 0 drafts", one},
      {"the largest parent", Draft({4}, {0}, {kMax}), "2147483647", one},
      {"a position too far", Draft({5}, {0}, {-1}), "at position 5", one},
      {"a position too near", Draft({3}, {0}, {-1}), "at position 3", one},
      {"the position after a draft", Draft({4, 4}, {0, 0}, {-1, 0}),
       "token 1 of the batch is at position 4", chain},
      {"Commit's seq", Commit(-1, {}), "seq is -1", Commit(0, {})},
      {"Commit's least seq", Commit(kLeast, {}), "seq is -2147483648",
       Commit(kMax, {})},
      {"the path", Commit(0, {0}), "draft 0, sequence 0 has 0 drafts",
       Commit(0, {})},
      {"a negative draft", Commit(0, {-1}), "draft -1", Commit(0, {})},
  };
}

// A shape that differs by `delta` in one extent.
Shape With(Shape shape, std::size_t extent, std::int64_t delta) {
  shape[extent] += delta;
  return shape;
}

CacheBounds RowBounds() {
  const Does right = PutOf(kKey, kValue);
  CacheBounds bounds = {
      {"no key", PutWith(true, NoData), "key has no data", right},
      {"no value", PutWith(false, NoData), "value has no data", right},
      {"no strides of K", PutWith(true, NoStrides), "key has no strides",
       right},
      {"no strides of V", PutWith(false, NoStrides), "value has no strides",
       right},
      {"bits", PutOf(kKey, kValue, DType::kBits), "bits", right},
      {"heads of K alone", PutOf(With(kKey, 1, 1), kValue), "3", right},
      {"heads of V alone", PutOf(kKey, With(kValue, 1, 1)), "3", right},
  };
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8}) {
    bounds.push_back({fmt::format("K of {}", DTypeName(dtype)),
                      PutOf(kKey, kValue, dtype), "f32", right});
    bounds.push_back({fmt::format("V of {}", DTypeName(dtype)),
                      PutOf(kKey, kValue, DType::kF32, dtype), "f32", right});
  }
  for (const std::size_t extent : {0U, 1U, 2U, 3U}) {
    for (const std::int64_t delta : {-1, 1}) {
      const Shape key = With(kKey, extent, delta);
      const Shape value = With(kValue, extent, delta);
      const std::string name = fmt::format("{} by {}", extent, delta);
      bounds.push_back({"K " + name, PutOf(key, kValue), "", right});
      bounds.push_back({"V " + name, PutOf(kKey, value), "", right});
      // K and V change together. Only a new layer may have other heads.
      bounds.push_back({"both " + name, PutOf(key, value), "", right});
    }
    Shape none = kKey;
    none[extent] = 0;
    bounds.push_back(
        {fmt::format("{} is 0", extent), PutOf(none, kValue), "0", right});
    none[extent] = std::int64_t{kMax} + 1;
    bounds.push_back({fmt::format("{} is too large", extent),
                      PutOf(none, kValue), "2147483648", right});
  }
  return bounds;
}

// All kinds with tokens, and a wrapper of two of them.
std::vector<CacheSpec> Specs() {
  std::vector<CacheSpec> specs;
  for (const Kind kind :
       {Kind::kCausal, Kind::kSwa, Kind::kSwaMem, Kind::kChunked}) {
    for (const Placement placement :
         {Placement::kContiguous, Placement::kScatter}) {
      CacheSpec spec;
      spec.kind = kind;
      spec.placement = placement;
      spec.window = 4;
      spec.chunk = 5;
      spec.shift.kind = ShiftKind::kAdd;
      specs.push_back(spec);
    }
  }
  CacheSpec wrapper;
  wrapper.kind = Kind::kWrapper;
  wrapper.caches = {specs[2], specs[0]};
  specs.push_back(wrapper);
  return specs;
}

std::unique_ptr<Cache> Prepared(const CacheSpec& spec,
                                const std::string& twin) {
  auto cache = *MakeCache(spec, twin);
  EXPECT_TRUE(cache->Init({DType::kF32, 2, 8, kMaxBatch}).ok());
  std::vector<float> numbers(3 * 2 * 3);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i + 1);
  }
  for (const auto& [positions, sequences] :
       {std::pair(Positions{0, 1, 2}, Numbers{0, 0, 0}),
        std::pair(Positions{3, 0}, Numbers{0, 1})}) {
    EXPECT_TRUE(Start(positions, sequences)(*cache).ok());
    const auto tokens = std::ssize(positions);
    EXPECT_TRUE(
        cache
            ->Put(DenseView(numbers.data(), DType::kF32, {2, 2, tokens, 1}),
                  DenseView(numbers.data(), DType::kF32, {3, 2, tokens, 1}))
            .ok());
  }
  EXPECT_TRUE(cache->SetCausal(Numbers{1}).ok());
  return cache;
}

// Expects that everything visible of two caches is equal.
void ExpectAlike(Cache& cache, Cache& expected) {
  EXPECT_TRUE(*cache.Snapshot() == *expected.Snapshot());
  EXPECT_TRUE(std::ranges::equal(cache.BatchCells(), expected.BatchCells()));
  EXPECT_EQ(cache.CellCount(), expected.CellCount());
  const Result<KvView> actual = cache.Get();
  const Result<KvView> view = expected.Get();
  ASSERT_EQ(actual.status().code(), view.status().code());
  if (!view.ok()) return;
  EXPECT_EQ(actual->first_cell, view->first_cell);
  EXPECT_EQ(Dense(actual->key), Dense(view->key));
  EXPECT_EQ(Dense(actual->value), Dense(view->value));
  EXPECT_EQ(Dense(actual->mask), Dense(view->mask));
}

class GateOf : public EachTwin {
 protected:
  static void ExpectBound(const CacheSpec& spec, const CacheBound& bound) {
    SCOPED_TRACE(fmt::format("{}, {}", KindName(spec.kind), bound.name));
    const auto tried = Prepared(spec, GetParam());
    const auto other = Prepared(spec, GetParam());
    props::ExpectBound(bound, *tried, *other, ExpectAlike);
  }
};
INSTANTIATE_TEST_SUITE_P(Twins, GateOf, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(GateOf, ArgumentsAtTheirBounds) {
  for (const CacheSpec& spec : Specs()) {
    for (const CacheBound& bound : BatchBounds()) ExpectBound(spec, bound);
    for (const CacheBound& bound : ArgumentBounds()) ExpectBound(spec, bound);
    for (const CacheBound& bound : RowBounds()) ExpectBound(spec, bound);
    if (GetParam() == "cuda") continue;  // cuda takes no drafts.
    for (const CacheBound& bound : DraftBounds()) ExpectBound(spec, bound);
  }
}

TEST_P(GateOf, LayerTypesAtTheirBounds) {
  const auto type = [](int number) -> Does {
    return [=](Cache& cache) { return cache.SetLayerType(number); };
  };
  const CacheSpec wrapper = Specs().back();
  ExpectBound(wrapper, {"below", type(-1), "-1", type(0)});
  ExpectBound(wrapper, {"above", type(2), "2", type(1)});
  const auto cache = Prepared(CacheSpec(), GetParam());
  for (const int number : {-1, 0, 1}) {
    EXPECT_EQ(cache->SetLayerType(number).code(), StatusCode::kNotSupported);
  }
}

// Rows may have the stored dtype, or f32.
TEST_P(GateOf, RowDTypes) {
  for (const DType stored : kRowDTypes) {
    for (const DType given : kRowDTypes) {
      const bool v_other = stored == DType::kF16;
      const auto cache = *MakeCache({}, GetParam());
      if (v_other) {
        ASSERT_TRUE(cache->SetConfig({.v_dtype = DType::kBF16}).ok());
      }
      ASSERT_TRUE(cache->Init({stored, 1, 4, 4}).ok());
      ASSERT_TRUE(Start({0, 1}, {0, 0})(*cache).ok());
      const DenseTensor rows = FilledTensor(given, {64, 2, 2, 1}, 1);
      const DenseTensor right = FilledTensor(DType::kF32, {64, 2, 2, 1}, 1);
      const bool fits = given == DType::kF32 || given == stored;
      const DType v_stored = v_other ? DType::kBF16 : stored;
      const bool v_fits = given == DType::kF32 || given == v_stored;
      EXPECT_EQ(cache->Put(rows.view(), right.view()).code(),
                fits ? StatusCode::kOk : kInvalid);
      EXPECT_EQ(cache->Put(right.view(), rows.view()).code(),
                v_fits ? StatusCode::kOk : kInvalid);
    }
  }
}

// Rows of q8_0 and q4_0 have whole blocks of 32 elements in each head.
TEST_P(GateOf, WholeBlocks) {
  for (const DType dtype : kRowDTypes) {
    for (const std::int64_t dim : {1, 31, 32, 33, 63, 64, 65, 96}) {
      for (const bool key : {true, false}) {
        const auto cache = *MakeCache({}, GetParam());
        ASSERT_TRUE(cache->Init({dtype, 1, 4, 4}).ok());
        ASSERT_TRUE(Start({0}, {0})(*cache).ok());
        const DenseTensor rows = FilledTensor(DType::kF32, {dim, 2, 1, 1}, 1);
        const DenseTensor right = FilledTensor(DType::kF32, {32, 2, 1, 1}, 1);
        const Status status = key ? cache->Put(rows.view(), right.view())
                                  : cache->Put(right.view(), rows.view());
        const bool blocks = dtype == DType::kQ8 || dtype == DType::kQ4;
        EXPECT_EQ(status.code(),
                  blocks && dim % 32 != 0 ? kInvalid : StatusCode::kOk)
            << DTypeName(dtype) << ' ' << dim;
        // A refused layer has no dimensions yet.
        EXPECT_TRUE(cache->Put(right.view(), right.view()).ok() ||
                    (status.ok() && dim != 32));
      }
    }
  }
}

struct ConfigCase {
  CacheConfig config;
  bool ok;
};

std::vector<ConfigCase> ConfigCases() {
  std::vector<ConfigCase> cases = {
      {{.cache_padding = 0}, false},
      {{.cache_padding = -1}, false},
      {{.cache_padding = kLeast}, false},
      {{.cache_padding = 1}, true},
      {{.mask_batch_padding = 0}, false},
      {{.mask_batch_padding = -32}, false},
      {{.mask_batch_padding = 1}, true},
      {{.v_dtype = DType::kBits}, false},
      {{.mask_dtype = DType::kBits}, true},
  };
  for (const int padding : {1, 16, 31, 33, 48, 63, 65}) {
    cases.push_back(
        {{.cache_padding = padding, .v_layout = VLayout::kTiled}, false});
    cases.push_back(
        {{.cache_padding = padding, .v_layout = VLayout::kPermuted}, true});
  }
  for (const int padding : {32, 64, 96, 32000}) {
    cases.push_back(
        {{.cache_padding = padding, .v_layout = VLayout::kTiled}, true});
  }
  for (const DType dtype : kRowDTypes) {
    cases.push_back({{.v_dtype = dtype}, true});
    const bool mask =
        dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
    cases.push_back({{.mask_dtype = dtype}, mask});
  }
  return cases;
}

TEST_P(GateOf, Configurations) {
  for (const CacheSpec& spec : Specs()) {
    for (const auto& [config, ok] : ConfigCases()) {
      const auto cache = *MakeCache(spec, GetParam());
      EXPECT_EQ(cache->SetConfig(config).code(),
                ok ? StatusCode::kOk : kInvalid)
          << config.cache_padding << ' ' << config.mask_batch_padding;
      // A refused configuration leaves room for another; a second configuration
      // is refused.
      EXPECT_EQ(cache->SetConfig({}).code(), ok ? kUntimely : StatusCode::kOk);
      EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
    }
  }
}

struct InitCase {
  InitArgs args;
  bool ok;
};

TEST_P(GateOf, FirstCalls) {
  std::vector<InitCase> cases = {
      {{DType::kBits, 1, 1, 1}, false}, {{DType::kF32, 0, 1, 1}, false},
      {{DType::kF32, 1, 0, 1}, false},  {{DType::kF32, 1, 1, 0}, false},
      {{DType::kF32, -1, 4, 4}, false}, {{DType::kF32, 4, -1, 4}, false},
      {{DType::kF32, 4, 4, -1}, false}, {{DType::kF32, kLeast, 4, 4}, false}};
  for (const DType dtype : kRowDTypes) {
    cases.push_back({{dtype, 1, 1, 1}, true});
  }
  for (const CacheSpec& spec : Specs()) {
    for (const InitCase& init_case : cases) {
      const auto cache = *MakeCache(spec, GetParam());
      const auto init = [&] { return cache->Init(init_case.args).code(); };
      EXPECT_EQ(init(), init_case.ok ? StatusCode::kOk : kInvalid);
      // A refused Init leaves the cache as it was.
      EXPECT_EQ(cache->SetLayer(0).ok(), init_case.ok);
      EXPECT_EQ(cache->Init({DType::kF32, 1, 1, 1}).code(),
                init_case.ok ? kUntimely : StatusCode::kOk);
    }
  }
}

TEST_P(GateOf, BlocksOfVLayouts) {
  for (const DType dtype : kRowDTypes) {
    for (const VLayout layout : kVLayouts) {
      for (const bool only_v : {false, true}) {
        const auto cache = *MakeCache({}, GetParam());
        CacheConfig config = ConfigOf(layout);
        if (only_v) config.v_dtype = dtype;
        ASSERT_TRUE(cache->SetConfig(config).ok());
        const bool blocks = dtype == DType::kQ8 || dtype == DType::kQ4;
        EXPECT_EQ(
            cache->Init({only_v ? DType::kF32 : dtype, 1, 4, 4}).code(),
            blocks && layout != VLayout::kPlain ? kInvalid : StatusCode::kOk);
      }
    }
  }
}

TEST_P(GateOf, MemoryAndWindow) {
  for (const std::int32_t memory : {2, 3, 4, 5}) {
    for (const int sequences : {1, 2}) {
      CacheSpec spec;
      spec.kind = Kind::kSwaMem;
      spec.window = 4;
      spec.memory = memory;
      const auto cache = *MakeCache(spec, GetParam());
      // With several sequences the memory is raised to the window + 1 (S3).
      EXPECT_EQ(cache->Init({DType::kF32, sequences, 100, 4}).code(),
                memory < 4 && sequences == 1 ? kInvalid : StatusCode::kOk)
          << memory;
    }
  }
}

// Calls that need a pass, in turn: without a pass, and during one.
TEST_P(GateOf, PassesAndTheirCalls) {
  const Does put = PutOf({1, 1, 1, 1}, {1, 1, 1, 1});
  const Does get = [](Cache& cache) { return cache.Get().status(); };
  for (const CacheSpec& spec : Specs()) {
    const auto cache = *MakeCache(spec, GetParam());
    ASSERT_TRUE(cache->Init({DType::kF32, 1, 2, 2}).ok());
    const auto expect = [&](StatusCode code) {
      EXPECT_EQ(put(*cache).code(), code);
      EXPECT_EQ(get(*cache).code(), code);
      EXPECT_EQ(cache->SetCausal(Numbers{0}).code(), code);
    };
    expect(kUntimely);
    ASSERT_TRUE(Start({0}, {0})(*cache).ok());
    EXPECT_EQ(get(*cache).code(), kUntimely);  // Nothing was put yet.
    expect(StatusCode::kOk);
    ASSERT_TRUE(cache->SetLayer(1).ok());
    EXPECT_EQ(get(*cache).code(), kUntimely);
    EXPECT_EQ(Start({1, 2, 3}, {0, 0, 0})(*cache).code(), kInvalid);
    expect(StatusCode::kOk);  // The pass continues.
    ASSERT_TRUE(cache->Restore(*cache->Snapshot()).ok());
    expect(kUntimely);
    while (Start({0}, {0})(*cache).ok()) expect(StatusCode::kOk);
    expect(kUntimely);  // The cache was full.
    cache->Close();
    expect(kUntimely);
  }
}

TEST_P(GateOf, EncodersAtTheirBounds) {
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  for (const bool padded : {false, true}) {
    for (const int sequences : {1, 2}) {
      const auto cache = *MakeCache(spec, GetParam());
      ASSERT_TRUE(cache->SetConfig({.cache_padding = padded ? 2 : 1}).ok());
      EXPECT_EQ(cache->Init({DType::kF32, sequences, 4, 4}).code(),
                padded || sequences > 1 ? kInvalid : StatusCode::kOk);
    }
  }
  const auto cache = *MakeCache(spec, GetParam());
  ASSERT_TRUE(cache->Init({DType::kF16, 1, 4, 4}).ok());
  EXPECT_EQ(PutOf(kKey, kValue)(*cache).code(), kUntimely);
  ASSERT_TRUE(Start({0}, {0}, {0})(*cache).ok());
  EXPECT_EQ(cache->Get().status().code(), kUntimely);
  EXPECT_EQ(PutOf(kKey, kValue, DType::kBF16)(*cache).code(), kInvalid);
  EXPECT_EQ(PutOf({0, 1, 1, 1}, kValue)(*cache).code(), kInvalid);
  EXPECT_EQ(PutWith(true, NoData)(*cache).code(), kInvalid);
  EXPECT_FALSE(*cache->EncoderCached());
  // An encoder takes any shape, in f32 or the stored dtype.
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    EXPECT_TRUE(PutOf({1, 2, 3, 4}, {7, 1, 5, 2}, dtype)(*cache).ok());
  }
  EXPECT_EQ(cache->SetCausal(Numbers{}).code(), StatusCode::kNotSupported);
  EXPECT_EQ(Copy(0, 1, 1)(*cache).code(), StatusCode::kNotSupported);
  EXPECT_EQ(Cut(-1, 0, 1)(*cache).code(), kInvalid);
  EXPECT_EQ(Cut(0, 1, 0)(*cache).code(), kInvalid);
  EXPECT_EQ(Resume(0, -1)(*cache).code(), kInvalid);
  EXPECT_TRUE(Resume(0, kMax)(*cache).ok());
  EXPECT_TRUE(*cache->EncoderCached());
}

TEST_P(GateOf, OrderOfTheFirstCalls) {
  for (const Kind kind : {Kind::kCausal, Kind::kEncoder, Kind::kWrapper}) {
    const auto cache = MakeOfKind(kind, GetParam());
    EXPECT_EQ(cache->CellCount(), 0);
    std::vector<CellEntry> cells(1);
    cache->ListCells(cells);
    EXPECT_TRUE(cells.empty());
    EXPECT_EQ(cache->SetConfig({.cache_padding = 0}).code(), kInvalid);
    EXPECT_EQ(cache->SetConfig({.mask_batch_padding = 0}).code(), kInvalid);
    EXPECT_EQ(cache->SetConfig({.v_dtype = DType::kBits}).code(), kInvalid);
    EXPECT_EQ(
        cache->SetConfig({.cache_padding = 48, .v_layout = VLayout::kTiled})
            .message(),
        "cache_padding is 48, tiled V needs a multiple of 32");
    EXPECT_EQ(cache->Init({DType::kF32, 0, 1, 1}).code(), kInvalid);
    EXPECT_EQ(cache->Init({DType::kF32, 1, 0, 1}).code(), kInvalid);
    EXPECT_EQ(cache->Init({DType::kF32, 1, 1, 0}).code(), kInvalid);
    EXPECT_TRUE(cache->Init({DType::kF32, 1, 1, 1}).ok());
    EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
    cache->Close();
    cache->Close();
    EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
    EXPECT_EQ(cache->Init({DType::kF32, 1, 1, 1}).code(), kUntimely);
  }
}

TEST_P(GateOf, RefusesImpossibleTensors) {
  const auto cache = MakeOfKind(Kind::kEncoder, GetParam());
  ASSERT_TRUE(cache->SetConfig({.v_layout = VLayout::kPermuted}).ok());
  ASSERT_TRUE(cache->Init({DType::kF32, 1, 1, 1}).ok());
  const std::array<std::int32_t, 1> positions = {0};
  const std::array<int, 1> sequences = {0};
  ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  const std::array<float, 2> elements = {1, 2};
  const auto put = [&](const Shape& shape) {
    TensorView view = DenseView(elements.data(), DType::kF32, {1, 1, 1, 1});
    const TensorView key = view;
    view.shape = shape;  // All elements are the same one.
    view.stride = {0, 0, 0, 1};
    return cache->Put(key, view).message();
  };
  const auto large = [](const std::string& message) {
    return message.find("too large") != std::string::npos;
  };
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  EXPECT_TRUE(large(put({kMax + 1, 1, 1, 1})));
  EXPECT_TRUE(large(put({1, kMax + 1, 1, 1})));
  EXPECT_TRUE(large(put({kMax, kMax, kMax, 1})));
  EXPECT_EQ(put({1, 1, 1, 2}),
            "value has shape [1, 1, 1, 2], permuted V takes three dimensions");
  EXPECT_EQ(put({1, 1, 1, 1}), "");
}

TEST_P(GateOf, NamesTheArgumentThatIsNegative) {
  const auto names = [](const Status& status, const std::string& name) {
    return status.message().find(name) != std::string::npos;
  };
  for (const Kind kind : {Kind::kCausal, Kind::kWrapper}) {
    const auto cache = MakeOfKind(kind, GetParam());
    ASSERT_TRUE(cache->Init({DType::kF32, 1, 4, 1}).ok());
    EXPECT_TRUE(names(cache->CopyPrefix(-1, 0, 0), "src"));
    EXPECT_TRUE(names(cache->CopyPrefix(0, -1, 0), "dst"));
    EXPECT_TRUE(names(cache->CopyPrefix(0, 0, -1), "len"));
    EXPECT_TRUE(names(cache->Remove(-1, 0, 0), "seq"));
    EXPECT_TRUE(names(cache->Remove(0, -1, 0), "begin"));
    EXPECT_TRUE(names(cache->CanResume(-1, 0).status(), "seq"));
    EXPECT_TRUE(names(cache->CanResume(0, -1).status(), "pos"));
  }
}

}  // namespace
}  // namespace kvtwin::props
