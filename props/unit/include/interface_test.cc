// The public interface at its edges: the factory, the older interface, shift
// functions.

#include <complex>

#include "core/shift_row.h"
#include "kvtwin/attention.h"
#include "kvtwin/legacy.h"
#include "kvtwin/paged.h"
#include "kvtwin/serving.h"
#include "kvtwin/sessions.h"
#include "kvtwin/state.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

// An initializer that names one member of a public struct gets no warning about
// the other members: with -Wextra, g++ warns about a member without a default.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wmissing-field-initializers"
template <typename... Structs>
constexpr void Use(const Structs&... /*structs*/) {}
#define KVTWIN_NAME_ONE_MEMBER(type, first, last) \
  Use(type{.first = {}}, type{.last = {}})

[[maybe_unused]] void NameOneMember() {
  KVTWIN_NAME_ONE_MEMBER(AttentionOptions, scale, bf16_products);
  KVTWIN_NAME_ONE_MEMBER(AttentionOut, out, log_sum_exp);
  KVTWIN_NAME_ONE_MEMBER(AttentionPart, out, log_sum_exp);
  KVTWIN_NAME_ONE_MEMBER(AttentionTable, blocks, sees_all);
  KVTWIN_NAME_ONE_MEMBER(AnswerPart, text, status);
  KVTWIN_NAME_ONE_MEMBER(Batch, positions, parents);
  KVTWIN_NAME_ONE_MEMBER(CacheConfig, cache_padding, v_dtype);
  KVTWIN_NAME_ONE_MEMBER(CacheSpec, kind, caches);
  KVTWIN_NAME_ONE_MEMBER(CacheState, cells, caches);
  KVTWIN_NAME_ONE_MEMBER(CellEntry, cell, sequence);
  KVTWIN_NAME_ONE_MEMBER(CellGauges, cells, memberships);
  KVTWIN_NAME_ONE_MEMBER(DenseTensor, dtype, bytes);
  KVTWIN_NAME_ONE_MEMBER(InitArgs, dtype, max_batch);
  KVTWIN_NAME_ONE_MEMBER(KvRows, key, value);
  KVTWIN_NAME_ONE_MEMBER(KvView, key, stream);
  KVTWIN_NAME_ONE_MEMBER(PagedAppend, start, views);
  KVTWIN_NAME_ONE_MEMBER(PagedCsr, indptr, last_page_len);
  KVTWIN_NAME_ONE_MEMBER(PagedKv, key, value);
  KVTWIN_NAME_ONE_MEMBER(PagedSpec, block_size, groups);
  KVTWIN_NAME_ONE_MEMBER(PagedTable, columns, seq_lens);
  KVTWIN_NAME_ONE_MEMBER(PagedUsage, free, shared);
  KVTWIN_NAME_ONE_MEMBER(PagedView, key, block);
  KVTWIN_NAME_ONE_MEMBER(ParkingGauges, parked, failed);
  KVTWIN_NAME_ONE_MEMBER(ParkingSpec, folder, limit);
  KVTWIN_NAME_ONE_MEMBER(PrefixKey, salt, media);
  KVTWIN_NAME_ONE_MEMBER(PrefixMedia, position, hash);
  KVTWIN_NAME_ONE_MEMBER(RequestInfo, slot, missed);
  KVTWIN_NAME_ONE_MEMBER(RequestOptions, keep, truncate);
  KVTWIN_NAME_ONE_MEMBER(Rope, pairing, dims);
  KVTWIN_NAME_ONE_MEMBER(ServiceModel, forward, end);
  KVTWIN_NAME_ONE_MEMBER(ServiceRequest, prompt, sample);
  KVTWIN_NAME_ONE_MEMBER(ServiceSpec, sessions, log);
  KVTWIN_NAME_ONE_MEMBER(SessionBatch, inputs, outputs);
  KVTWIN_NAME_ONE_MEMBER(SessionGauges, waiting, refusals);
  KVTWIN_NAME_ONE_MEMBER(SessionInput, token, same_batch);
  KVTWIN_NAME_ONE_MEMBER(SessionsSpec, slots, ahead);
  KVTWIN_NAME_ONE_MEMBER(Shift, kind, fn);
  KVTWIN_NAME_ONE_MEMBER(SlotInfo, request, reusable);
  KVTWIN_NAME_ONE_MEMBER(TensorView, data, stride);
}
#pragma GCC diagnostic pop

CacheSpec Spec(Kind kind, std::optional<std::int32_t> window = std::nullopt,
               std::optional<std::int32_t> memory = std::nullopt) {
  CacheSpec spec;
  spec.kind = kind;
  spec.window = window;
  spec.memory = memory;
  return spec;
}

std::string WhyNot(const CacheSpec& spec, std::string_view twin = "optimized") {
  const auto cache = MakeCache(spec, twin);
  EXPECT_EQ(cache.status().code(), StatusCode::kInvalidArgument);
  return cache.status().message();
}

TEST(Factory, NamesTheWrongField) {
  EXPECT_EQ(WhyNot({}, "third"),
            "twin is 'third', there are reference, optimized");
  EXPECT_EQ(WhyNot(Spec(Kind::kSwa, -1)),
            "window is -1, it must not be negative");
  EXPECT_EQ(WhyNot(Spec(Kind::kSwaMem, 1, -2)),
            "memory is -2, it must not be negative");
  EXPECT_EQ(WhyNot(Spec(Kind::kChunked)), "chunk is 0, it must be at least 1");
  CacheSpec wrapper = Spec(Kind::kWrapper);
  EXPECT_EQ(WhyNot(wrapper), "caches: a wrapper needs some");
  wrapper.caches = {Spec(Kind::kWrapper)};
  EXPECT_EQ(WhyNot(wrapper), "caches: a wrapper holds another wrapper");
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  EXPECT_EQ(WhyNot(spec), "shift is custom, but there is no function");
  spec.shift.kind = ShiftKind::kRope;
  spec.shift.rope.base = 0;
  EXPECT_EQ(WhyNot(spec), "rope base is 0");
}

class Interface : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, Interface, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(Interface, RefusesMoreCellsThanCanBeCounted) {
  TestCache cache({}, GetParam());
  EXPECT_EQ(cache.Init(1 << 20, 1 << 20, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.Init(1, 4, 1), StatusCode::kOk);
}

TEST_P(Interface, RefusesAMemoryBelowTheWindow) {
  TestCache cache(Spec(Kind::kSwaMem, 4, 2), GetParam());
  EXPECT_EQ(cache.Init(1, 8, 1), StatusCode::kInvalidArgument);
  // With several sequences the memory is raised to 5.
  EXPECT_EQ(cache.Init(2, 8, 1), StatusCode::kOk);
  EXPECT_EQ(cache->CellCount(), 2 * 5 + 1);
}

TEST_P(Interface, ACustomShiftThatFailsChangesNothing) {
  int calls = 0;
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [&calls](int, std::int32_t offset, int, int,
                           std::span<float> key) -> Status {
    if (++calls == 2) return {StatusCode::kNotSupported, "not this one"};
    key[0] += static_cast<float>(10 * offset);
    return {};
  };
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 8, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  const std::vector<CellEntry> before = cache.Cells();
  const Status status = cache->Remove(0, 0, 1);
  EXPECT_EQ(status.message(), "not this one");
  EXPECT_EQ(cache.Cells(), before);
  cache.Append(0, 3, {4});
  EXPECT_EQ(cache.SeenK(0), (Floats{1, 2, 3, 4}));
  ASSERT_TRUE(cache->Remove(0, 0, 1).ok());
  cache.Append(0, 3, {5});
  // The removed token's cell is the lowest free one.
  EXPECT_EQ(cache.SeenK(0), (Floats{5, -8, -7, -6}));
  EXPECT_EQ(cache.SeenV(0), (Floats{5, 2, 3, 4}));
}

TEST_P(Interface, LegacyCacheIsAnAdapter) {
  std::vector<CacheSpec> specs = {Spec(Kind::kCausal), Spec(Kind::kChunked),
                                  Spec(Kind::kSwa, 1), Spec(Kind::kSwaMem, 1)};
  specs[1].chunk = 1;
  specs[3].memory = 2;
  // A wrapper has each of these kinds as one of its caches.
  CacheSpec wrapper;
  wrapper.kind = Kind::kWrapper;
  for (std::size_t i = 0; i < 4; ++i) {
    wrapper.caches = {specs[i], specs[0]};
    specs.push_back(wrapper);
    wrapper.caches = {specs[0], specs[i]};
    specs.push_back(wrapper);
  }
  for (const CacheSpec& spec : specs) {
    SCOPED_TRACE(&spec - specs.data());
    Result<LegacyCache> legacy = LegacyCache::Make(spec, GetParam());
    ASSERT_TRUE(legacy.ok());
    ASSERT_TRUE(legacy->Init(DType::kF32, 4).ok());
    const std::vector<std::int32_t> positions = {0, 1, 0};
    const std::vector<int> sequences = {0, 0, 1};
    ASSERT_TRUE(legacy->StartForward(positions, sequences).ok());
    const std::vector<std::int32_t> next = {2};
    const std::vector<int> of = {0};
    ASSERT_TRUE(legacy->StartForward(next, of).ok());
    // The window is only a mask: no cache ever evicts anything.
    EXPECT_EQ(legacy->StartForward(next, of).code(), StatusCode::kCacheFull);
    for (int i = 0; i < std::ssize(spec.caches); ++i) {
      EXPECT_TRUE(legacy->cache().SetLayerType(i).ok());
      EXPECT_EQ(legacy->cache().CellCount(), 4);
      std::vector<CellEntry> cells;
      legacy->cache().ListCells(cells);
      EXPECT_EQ(cells.size(), 4);
    }
    EXPECT_EQ(legacy->cache().CellCount(), 4);
  }
}

// Compares RoPE with complex numbers in double.
TEST(ShiftFunctions, RopeTurnsPairs) {
  for (const auto pairing :
       {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
    Shift shift{
        .kind = ShiftKind::kRope,
        .rope = {.pairing = pairing, .base = 100, .scale = 0.5, .dims = 6},
        .fn = {}};
    const Floats before = {1, -2, 3, 0.5F, -4, 2, 7, 8, 1, 1, 2, 2, 3, 3, 9, 9};
    Floats key = before;
    ASSERT_TRUE(ShiftRow(shift, 0, -3, 8, 2, key).ok());
    const bool halves = pairing == Rope::Pairing::kHalves;
    for (std::size_t head = 0; head < 16; head += 8) {
      for (std::size_t p = 0; p < 3; ++p) {
        const std::size_t x = head + (halves ? p : 2 * p);
        const std::size_t y = head + (halves ? p + 3 : 2 * p + 1);
        const std::complex<double> expected =
            std::complex<double>(before[x], before[y]) *
            std::polar(
                1.0,
                -3 * 0.5 * std::pow(100.0, -2.0 / 6 * static_cast<double>(p)));
        // Three f32 roundings of numbers below 16.
        EXPECT_NEAR(key[x], expected.real(), 3e-6);
        EXPECT_NEAR(key[y], expected.imag(), 3e-6);
      }
      EXPECT_EQ(key[head + 6], before[head + 6]);
      EXPECT_EQ(key[head + 7], before[head + 7]);
    }
  }
}

TEST(ShiftFunctions, AddsToAllOrToAllButTheFirst) {
  Floats key = {1, 2, 3, 4};
  ASSERT_TRUE(ShiftRow({ShiftKind::kAdd, {}, {}}, 0, -2, 2, 2, key).ok());
  EXPECT_EQ(key, (Floats{-1, 0, 1, 2}));
  ASSERT_TRUE(ShiftRow({ShiftKind::kTagAdd, {}, {}}, 0, -2, 2, 2, key).ok());
  EXPECT_EQ(key, (Floats{-1, -2, 1, 0}));
  ASSERT_TRUE(ShiftRow({ShiftKind::kIdentity, {}, {}}, 0, -2, 2, 2, key).ok());
  EXPECT_EQ(key, (Floats{-1, -2, 1, 0}));
}

}  // namespace
}  // namespace kvtwin::props
