// Corners that random histories reach seldom or never (docs/coverage.md).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/shift_row.h"
#include "kvtwin/legacy.h"
#include "kvtwin/save.h"
#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"
#include "optimized/fast_paths.h"
#include "optimized/id_map.h"
#include "optimized/kernels.h"
#include "optimized/mask.h"
#include "optimized/parallel.h"
#include "optimized/row_shift.h"
#include "optimized/targets.h"
#include "props/search/explore_state.h"
#include "props/search/fuzz.h"
#include "props/testing/test_cache.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr auto kUntimely = StatusCode::kFailedPrecondition;

void ExpectAgreement(const History& history) {
  const Subject subject = TwinSubject("optimized");
  const RunResult result = RunHistory(history, subject);
  EXPECT_TRUE(result.ran) << ToText(history);
  EXPECT_FALSE(result.difference)
      << FailureText(history, *result.difference, subject);
}

class OnEachTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(optimized::SelectTarget(GetParam())); }
  void TearDown() override {
    EXPECT_TRUE(optimized::SelectTarget(optimized::SupportedTargets().front()));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, OnEachTarget,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

TEST_P(OnEachTarget, TheTwinsAgreeAtCorners) {
  for (const std::string line : {
           // A token at the last position that there is, removed by the open
           // end and by a range that ends there.
           "kvt1 | put 0*1@+2147483632 | put 0*1@+100 | drop 0:5-",
           "kvt1 | put 0*1@+2147483632 | put 0*1@+100 | drop 0:5-^100",
           "kvt1 shift=add | put 0*2 | put 0*1@+2147483632 | put 0*1@+100 | "
           "drop 0:1-2",
           "kvt1 kind=encoder seqs=1 batch=20 | put 0*20@+2147483632 image=19 "
           "| drop 0:5-",
           "kvt1 kind=encoder seqs=1 | put 0*1@+9 image=0 | drop 0:0-9",
           "kvt1 kind=encoder seqs=1 | put 0*1@+9 image=0 | drop 0:0-10",
           // More sequences than the first table of ids has room for.
           "kvt1 cap=40 batch=40 | put 0*1 1*1 2*1 3*1 4*1 5*1 6*1 7*1 8*1 9*1 "
           "10*1 11*1 12*1 13*1 14*1 15*1 16*1 17*1 | drop 9:0- | drop 3:0- | "
           "put 20*1 3*1 | copy 17>9:1",
           // Whole vectors of pairs, and heads of several widths.
           "kvt1 shift=rope dims=96,2,3 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=rope_halves dims=96,2,3 | put 0*3 | drop 0:0-1 | put "
           "0*1",
           "kvt1 shift=rope dims=1,1,1 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=tag_add dims=1,2,1 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=add | put 0*3 | drop 0:1-1 | put 0*1",
           // A sequence over several words, of which some are not its own.
           "kvt1 kind=swa window=3 cap=300 batch=300 seqs=1 shift=add | "
           "put 0*20 | put 1*130 | put 0*20 | drop 1:3-9 | put 0*1 | put 1*1",
           "kvt1 cap=400 batch=200 shift=add | put 0*3 | put 1*200 | put 0*3 | "
           "drop 0:1-2 | put 0*1 | drop 1:4-190 | put 0*90",
       }) {
    SCOPED_TRACE(line);
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    ExpectAgreement(*history);
  }
}

// Turns by an angle that is no number.
TEST_P(OnEachTarget, TheTwinsAgreeOnRopesOfNaN) {
  for (const double base : {1e-300, 1e300}) {
    History history = *ParseHistory(
        "kvt1 shift=rope dims=8,1,1 | put 0*3 | drop 0:0-1 | get");
    history.setup.spec.shift.rope.base = base;
    history.setup.spec.shift.rope.scale = 1e300;
    ExpectAgreement(history);
  }
}

std::string WhyNot(const CacheSpec& spec) {
  return MakeCache(spec, "reference").status().message();
}

TEST(Corners, SpecsThatAreWrongInside) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kRope;
  Rope& rope = spec.shift.rope;
  constexpr double kEndless = std::numeric_limits<double>::infinity();
  rope.base = kEndless;
  EXPECT_EQ(WhyNot(spec), "rope base is inf");
  rope = {.scale = kEndless};
  EXPECT_EQ(WhyNot(spec), "rope scale is inf");
  for (const int dims : {-2, 3}) {
    rope = {.dims = dims};
    EXPECT_NE(WhyNot(spec).find("it must be even"), std::string::npos);
  }
  CacheSpec wrapper;
  wrapper.kind = Kind::kWrapper;
  wrapper.caches = {CacheSpec(), spec};
  EXPECT_NE(WhyNot(wrapper).find("it must be even"), std::string::npos);
  EXPECT_EQ(LegacyCache::Make(wrapper).status().code(), kInvalid);
  wrapper.caches.pop_back();
  EXPECT_TRUE(LegacyCache::Make(wrapper).ok());
}

TEST(Corners, OfASpecOnlyWhatItsKindHasCounts) {
  CacheSpec spec;
  spec.window = spec.memory = spec.chunk = -1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kEncoder;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kChunked;
  EXPECT_NE(WhyNot(spec), "");
  spec.chunk = 1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kSwa;
  EXPECT_NE(WhyNot(spec), "");
  spec.window = 1;
  EXPECT_EQ(WhyNot(spec), "");
  spec.kind = Kind::kSwaMem;
  EXPECT_NE(WhyNot(spec), "");
}

TEST(Corners, NamesThatNobodyHas) {
  EXPECT_EQ(DTypeFromName("f64"), std::nullopt);
}

TEST(Corners, AShiftByNothing) {
  Shift shift;
  shift.kind = ShiftKind::kCustom;  // Without a function to call.
  std::array<float, 2> key = {1, 2};
  EXPECT_TRUE(ShiftRow(shift, 0, 0, 2, 1, key).ok());
  EXPECT_EQ(key[1], 2);
  optimized::RowShift row_shift;
  shift.kind = ShiftKind::kRope;
  for (const int head_dim : {2, 1, 2}) {  // Not what was prepared before.
    row_shift.Prepare(shift, -1, head_dim);
    EXPECT_EQ(row_shift.idle(), head_dim == 1);
  }
  for (const ShiftKind kind : {ShiftKind::kNone, ShiftKind::kIdentity,
                               ShiftKind::kAdd, ShiftKind::kTagAdd}) {
    const bool adds = kind == ShiftKind::kAdd || kind == ShiftKind::kTagAdd;
    shift = {.kind = kind, .rope = {}, .fn = {}};
    row_shift.Prepare(shift, -1, 2);
    EXPECT_EQ(row_shift.idle(), !adds);
  }
}

// The ledger by itself -------------------------------------------------------

TEST(Corners, TheLedgerAnswersAlone) {
  reference::CacheLedger causal({});
  EXPECT_EQ(causal.Init({}, {DType::kF32, 1 << 20, 1 << 20, 1}).code(),
            kInvalid);
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  EXPECT_TRUE(reference::CacheLedger(spec).slots().layers.empty());

  spec.kind = Kind::kCausal;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [](int, std::int32_t, int, int, std::span<float>) {
    return Status(StatusCode::kNotSupported, "not this one");
  };
  reference::CacheLedger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 2, 8, 8}).ok());
  const std::array<std::int32_t, 3> positions = {0, 1, 0};
  const std::array<int, 3> sequences = {0, 0, 1};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const std::array<float, 3> rows = {1, 2, 3};
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 3, 1});
  ledger.Put(0, view, view);
  EXPECT_EQ(ledger.Remove(0, 0, 1).message(), "not this one");
  EXPECT_EQ(ledger.tokens().size(), 3);
}

TEST(Corners, TheLedgerCopiesWhatIsSharedIfAsked) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  reference::CacheLedger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 2, 8, 8}).ok());
  const std::array<std::int32_t, 4> positions = {0, 1, 2, 3};
  const std::array<int, 4> sequences = {0, 0, 0, 0};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  ASSERT_TRUE(ledger.CopyPrefix(0, 1, 3).ok());
  EXPECT_EQ(ledger.Remove(0, 0, 2).code(), StatusCode::kSharedCells);
  ASSERT_TRUE(ledger.Remove(0, 0, 2, StatusCode::kOk).ok());
  // Token 2 is now two, of which the other one's is as it was.
  std::vector<std::tuple<std::int64_t, std::set<int>, int>> found;
  for (const reference::LedgerToken& token : ledger.tokens()) {
    found.emplace_back(token.position, token.sequences, token.row);
  }
  EXPECT_THAT(found,
              ::testing::UnorderedElementsAre(
                  std::tuple(0, std::set{1}, 0), std::tuple(1, std::set{1}, 1),
                  std::tuple(2, std::set{1}, 2), std::tuple(0, std::set{0}, -1),
                  std::tuple(1, std::set{0}, 3)));
}

TEST(Corners, TheLedgerTakesTheStateOfAWrapper) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {CacheSpec(), CacheSpec()};
  spec.caches[1].kind = Kind::kEncoder;
  TestCache cache(spec, "reference");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  ASSERT_TRUE(cache->SetLayerType(1).ok());
  ASSERT_EQ(cache.Put({3}), StatusCode::kOk);
  reference::Ledger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 4, 4}).ok());
  ledger.Restore(*cache->Snapshot());
  EXPECT_EQ(ledger.parts()[0].tokens().size(), 2);
  EXPECT_TRUE(ledger.parts()[0].slots().layers.empty());
  EXPECT_EQ(ledger.parts()[1].slots(), cache->Snapshot()->caches[1]);
}

// The gate -------------------------------------------------------------------

class Gate : public EachTwin {
 protected:
  static std::unique_ptr<Cache> Made(Kind kind) {
    CacheSpec spec;
    spec.kind = kind;
    if (kind == Kind::kWrapper) spec.caches = {CacheSpec(), CacheSpec()};
    return *MakeCache(spec, GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(Twins, Gate, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(Gate, KnowsTheOrderOfTheFirstCalls) {
  for (const Kind kind : {Kind::kCausal, Kind::kEncoder, Kind::kWrapper}) {
    const auto cache = Made(kind);
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
    EXPECT_EQ(cache->Init(DType::kF32, 0, 1, 1).code(), kInvalid);
    EXPECT_EQ(cache->Init(DType::kF32, 1, 0, 1).code(), kInvalid);
    EXPECT_EQ(cache->Init(DType::kF32, 1, 1, 0).code(), kInvalid);
    EXPECT_TRUE(cache->Init(DType::kF32, 1, 1, 1).ok());
    EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
    cache->Close();
    cache->Close();
    EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
    EXPECT_EQ(cache->Init(DType::kF32, 1, 1, 1).code(), kUntimely);
  }
}

TEST_P(Gate, RefusesTensorsThatCannotBe) {
  const auto cache = Made(Kind::kEncoder);
  ASSERT_TRUE(cache->SetConfig({.v_layout = VLayout::kPermuted}).ok());
  ASSERT_TRUE(cache->Init(DType::kF32, 1, 1, 1).ok());
  const std::array<std::int32_t, 1> positions = {0};
  const std::array<int, 1> sequences = {0};
  ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  const std::array<float, 2> elements = {1, 2};
  const auto put = [&](const Shape& shape) {
    TensorView view = DenseView(elements.data(), DType::kF32, {1, 1, 1, 1});
    const TensorView key = view;
    view.shape = shape;  // Each of its elements is the same one.
    view.stride = {0, 0, 0, 0};
    return cache->Put(key, view).message();
  };
  const auto large = [](const std::string& message) {
    return message.find("too large") != std::string::npos;
  };
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_TRUE(large(put({kMost + 1, 1, 1, 1})));
  EXPECT_TRUE(large(put({1, kMost + 1, 1, 1})));
  EXPECT_TRUE(large(put({kMost, kMost, kMost, 1})));
  EXPECT_EQ(put({1, 1, 1, 2}),
            "value has shape [1, 1, 1, 2], permuted V takes three dimensions");
  EXPECT_EQ(put({1, 1, 1, 1}), "");
}

TEST_P(Gate, ACustomShiftIsCalledWhenRowsMove) {
  int calls = 0;
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [&calls](int, std::int32_t, int, int, std::span<float>) {
    ++calls;
    return Status(StatusCode::kNotSupported, "none");
  };
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3, 4});
  EXPECT_TRUE(cache->Remove(0, 1, 1).ok());  // Nothing moves.
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(cache->Remove(0, 0, 1).message(), "none");
  EXPECT_EQ(calls, 1);  // It is not asked again.
}

// Elements that lie as no array would have them.
TEST_P(Gate, TakesRowsFromAnywhere) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 2), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0, 1}, {0, 0}), StatusCode::kOk);
  std::array<std::byte, 32> bytes = {};
  std::int64_t step = 6;
  for (const std::size_t first : {0U, 2U}) {
    StoreElement(1, &bytes[first], DType::kF32);
    StoreElement(2, &bytes[first + static_cast<std::size_t>(step)],
                 DType::kF32);
    TensorView rows = DenseView(&bytes[first], DType::kF32, {1, 1, 2, 1});
    rows.stride[2] = step;
    ASSERT_TRUE(cache->Put(rows, rows).ok());
    EXPECT_EQ(cache.SeenK(1), (std::vector<float>{1, 2}));
    EXPECT_EQ(cache.SeenV(1), (std::vector<float>{1, 2}));
    step = 8;
  }
}

TEST_P(Gate, PassesOnThatMemoryRanOut) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 1 << 20, 1), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0}, {0}), StatusCode::kOk);
  const float element = 0;
  TensorView rows = DenseView(&element, DType::kF32, {1, 1, 1, 1});
  rows.shape = {1 << 30, 1 << 30, 1, 1};  // All of them the same element.
  rows.stride = {0, 0, 0, 0};
  EXPECT_THROW((void)cache->Put(rows, rows), std::bad_alloc);
  cache->Close();
}

// Restores what `damage` makes of the state; it must be refused.
void ExpectRefused(Cache& cache,
                   const std::function<void(CacheState&)>& damage) {
  const CacheState whole = *cache.Snapshot();
  CacheState state = whole;
  damage(state);
  const Status status = cache.Restore(state);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_NE(status.message(), "");
  EXPECT_EQ(*cache.Snapshot(), whole);
}

TEST_P(Gate, RefusesEachDamageOfAState) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 2), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const auto refused = [&](const std::function<void(CacheState&)>& damage) {
    ExpectRefused(*cache, damage);
  };
  refused([](auto& state) {
    state.layers.clear();
    state.cells[0].cell = -1;
  });
  refused([](auto& state) { std::swap(state.cells[0], state.cells[1]); });
  refused([](auto& state) { state.position = -1; });
  refused([](auto& state) { state.position = 1; });
  refused([](auto& state) { state.next_position = 1; });
  const auto wide = [](DenseTensor& tensor, std::size_t dim) {
    tensor.shape[dim] *= 2;
    tensor.bytes.resize(2 * tensor.bytes.size());
  };
  const auto half = [](DenseTensor& tensor) {
    tensor.dtype = DType::kF16;
    tensor.bytes.resize(tensor.bytes.size() / 2);
  };
  refused([&](auto& state) { half(state.layers[0].key); });
  refused([&](auto& state) { half(state.layers[0].value); });
  for (const std::size_t dim : {1U, 2U, 3U}) {
    refused([&](auto& state) { wide(state.layers[0].key, dim); });
    refused([&](auto& state) { wide(state.layers[0].value, dim); });
  }
  refused([](auto& state) {
    state.layers[0].key.shape.fill(std::int64_t{1} << 40);
  });
  refused([](auto& state) { state.layers[0].key.shape[2] = 0; });
}

// All lists of up to three memberships, of which a cache has one only if it is
// sorted by cell and then by sequence, has none twice, and gives each cell one
// position.
TEST_P(Gate, TakesMembershipsAsACacheListsThem) {
  constexpr int kEntries = 3 * 2 * 2;
  const auto entry = [](int i) { return CellEntry{i / 4, i / 2 % 2, i % 2}; };
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 3, 3), StatusCode::kOk);
  int taken = 0;
  for (int list = 0; list < kEntries * kEntries * kEntries; ++list) {
    CacheState state;
    for (int rest = list; rest > 0 || state.cells.size() < 2;
         rest /= kEntries) {
      state.cells.push_back(entry(rest % kEntries));
    }
    const auto before = [](const CellEntry& a, const CellEntry& b) {
      return a.cell < b.cell || (a.cell == b.cell && a.position == b.position &&
                                 a.sequence < b.sequence);
    };
    const bool due =
        std::ranges::adjacent_find(state.cells, [&](auto& a, auto& b) {
          return !before(a, b);
        }) == state.cells.end();
    ASSERT_EQ(cache->Restore(state).ok(), due) << CellsText(state.cells);
    ASSERT_EQ(StateFromBytes(StateToBytes(state)).ok(), due);
    if (!due) continue;
    ++taken;
    ASSERT_EQ(*cache->Snapshot(), state);
  }
  EXPECT_GT(taken, 100);
}

TEST_P(Gate, ASnapshotReplacesWhateverTheStateHeld) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 2), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  CacheState state;
  state.cells = {{3, 3, 3}};
  state.layers[0].key.bytes.resize(100);
  state.layers[7];
  state.caches.resize(2);
  state.cached = true;
  state.position = 5;
  ASSERT_TRUE(cache->SnapshotTo(state).ok());
  EXPECT_EQ(state, *cache->Snapshot());
  EXPECT_EQ(state.cells.size(), 2);
}

TEST_P(Gate, RefusesEachDamageOfAnEncodersState) {
  for (const VLayout layout : {VLayout::kPlain, VLayout::kPermuted}) {
    const auto cache = Made(Kind::kEncoder);
    ASSERT_TRUE(cache->SetConfig({.v_layout = layout}).ok());
    ASSERT_TRUE(cache->Init(DType::kF32, 1, 1, 1).ok());
    const DenseTensor row{DType::kF32, {1, 1, 1, 1}, {4, std::byte{}}};
    const KvRows rows = {row, row};
    const auto refused = [&](const std::function<void(CacheState&)>& damage) {
      ExpectRefused(*cache, [&](CacheState& state) {
        state.layers[0] = rows;
        damage(state);
      });
    };
    const DenseTensor none{DType::kF32, {1, 1, 0, 1}, {}};
    const DenseTensor half{DType::kF16, {1, 1, 1, 1}, {2, std::byte{}}};
    refused([&](auto& state) { state.layers[0].key = none; });
    refused([&](auto& state) { state.layers[0].value = none; });
    refused([&](auto& state) { state.layers[0].key = half; });
    refused([&](auto& state) { state.layers[0].value = half; });
    refused([](auto& state) { state.cells.push_back({0, 0, 0}); });
    CacheState state;
    const DenseTensor four{DType::kF32, {1, 1, 1, 2}, {8, std::byte{}}};
    state.layers[0] = {row, four};
    EXPECT_EQ(cache->Restore(state).ok(), layout == VLayout::kPlain);
    state.layers[0] = rows;
    EXPECT_TRUE(cache->Restore(state).ok());
    EXPECT_EQ(*cache->Snapshot(), state);
  }
}

TEST_P(Gate, AWrapperRefusesStatesOfOthers) {
  const auto cache = Made(Kind::kWrapper);
  ASSERT_TRUE(cache->Init(DType::kF32, 1, 4, 1).ok());
  ExpectRefused(*cache, [](auto& state) { state.caches.pop_back(); });
  ExpectRefused(*cache, [](auto& state) { state.position = 1; });
  for (const std::size_t i : {0U, 1U}) {
    ExpectRefused(*cache, [i](auto& state) {
      state.caches[1 - i].cells = {{0, 0, 0}};
      state.caches[i].cells = {{-1, 0, 0}};
    });
  }
}

TEST_P(Gate, NamesTheArgumentThatIsNegative) {
  const auto names = [](const Status& status, const std::string& name) {
    return status.message().find(name) != std::string::npos;
  };
  for (const Kind kind : {Kind::kCausal, Kind::kWrapper}) {
    const auto cache = Made(kind);
    ASSERT_TRUE(cache->Init(DType::kF32, 1, 4, 1).ok());
    EXPECT_TRUE(names(cache->CopyPrefix(-1, 0, 0), "src"));
    EXPECT_TRUE(names(cache->CopyPrefix(0, -1, 0), "dst"));
    EXPECT_TRUE(names(cache->CopyPrefix(0, 0, -1), "len"));
    EXPECT_TRUE(names(cache->Remove(-1, 0, 0), "seq"));
    EXPECT_TRUE(names(cache->Remove(0, -1, 0), "begin"));
    EXPECT_TRUE(names(cache->CanResume(-1, 0).status(), "seq"));
    EXPECT_TRUE(names(cache->CanResume(0, -1).status(), "pos"));
  }
}

// What the optimized twin is made of ------------------------------------------

// Volatile, so that the compiler neither knows the size nor leaves it out.
void Allocate(std::size_t bytes) {
  const volatile std::size_t size = bytes;
  const optimized::AlignedBuffer buffer(size);
  [[maybe_unused]] const volatile bool made = buffer.data() != nullptr;
}

TEST(Corners, MemoryThatIsNotThere) {
  EXPECT_THROW(Allocate(SIZE_MAX - 7), std::bad_alloc);
  EXPECT_THROW(Allocate(SIZE_MAX / 2), std::bad_alloc);
}

TEST(Corners, AMaskThatIsMoreThanAllMemory) {
  const optimized::CellTable table(64, 1, 0);
  optimized::HostMask mask;
  EXPECT_THROW(mask.Build(table, {}, SIZE_MAX / 64, {.first = 0, .end = 64},
                          DType::kF32),
               std::bad_alloc);
}

TEST(Corners, FastPathsAreForced) {
  using optimized::FastPaths;
  EXPECT_EQ(optimized::FastPathsFromName(""), FastPaths::kAuto);
  EXPECT_EQ(optimized::FastPathsFromName("on"), FastPaths::kOn);
  EXPECT_EQ(optimized::FastPathsFromName("off"), FastPaths::kOff);
  EXPECT_FALSE(optimized::FastPathsFromName("of"));
  EXPECT_FALSE(optimized::FastPathsFromName("one"));
  for (const bool pays : {false, true}) {
    optimized::ForceFastPaths(FastPaths::kOn);
    EXPECT_TRUE(optimized::TakeFastPath(pays));
    optimized::ForceFastPaths(FastPaths::kOff);
    EXPECT_FALSE(optimized::TakeFastPath(pays));
    optimized::ForceFastPaths(FastPaths::kAuto);
    EXPECT_EQ(optimized::TakeFastPath(pays), pays);
  }
}

TEST(Corners, ThreadsShareWhatIsLarge) {
  const auto threads = [](std::size_t bytes) {
    std::mutex mutex;
    std::set<std::thread::id> ids;
    std::size_t done = 0;
    optimized::ParallelFor(1000, bytes, [&](std::size_t) {
      const std::scoped_lock lock(mutex);
      ids.insert(std::this_thread::get_id());
      ++done;
    });
    EXPECT_EQ(done, 1000);
    return ids.size();
  };
  EXPECT_EQ(threads(1 << 20), 1);
#ifdef _OPENMP
  EXPECT_EQ(threads(1 << 22), omp_get_max_threads());
#else
  EXPECT_EQ(threads(1 << 22), 1);
#endif
}

TEST(Corners, SetsOfCells) {
  for (const std::size_t size : {1U, 64U, 65U, 5000U}) {
    optimized::BitTree set(size);
    EXPECT_EQ(set.First(), optimized::kNone);
    EXPECT_EQ(set.Last(), optimized::kNone);
    EXPECT_EQ(set.NextWord(0), optimized::kNone);
    EXPECT_TRUE(set.empty());
    const std::size_t last = size - 1;
    set.Set(last);
    EXPECT_FALSE(set.empty());
    EXPECT_EQ(set.First(), last);
    EXPECT_EQ(set.Last(), last);
    EXPECT_EQ(set.NextWord(0), last / 64);
    EXPECT_EQ(set.NextWord(set.word_count()), optimized::kNone);
    EXPECT_EQ(last == 0 ? optimized::kNone : set.Prev(last - 1),
              optimized::kNone);
    set.SetWord(last / 64, 0);
    EXPECT_TRUE(set.empty());
  }
}

TEST(Corners, MapsOfIds) {
  std::array<int, 100> values = {};
  // Each grows at other ids, that lie at other places.
  for (int step = 1; step < 8000; step += 61) {
    optimized::IdMap<int> map;
    for (int id = 0; id < 100; ++id) {
      map.Insert(id * step, &values[static_cast<std::size_t>(id)]);
    }
    for (int id = 0; id < 100; id += 2) {
      EXPECT_EQ(map.Find(id * step), &values[static_cast<std::size_t>(id)]);
      map.Erase(id * step);
    }
    for (int id = 0; id < 100; ++id) {
      EXPECT_EQ(map.Find(id * step),
                id % 2 == 0 ? nullptr : &values[static_cast<std::size_t>(id)]);
    }
  }
}

TEST_P(OnEachTarget, WordsWithoutTheCellThatIsAskedFor) {
  std::array<std::int32_t, 192> positions = {};
  positions[70] = 5;
  const std::array<std::uint64_t, 3> words = {0, std::uint64_t{1} << 6, 0};
  const std::array<std::uint64_t, 3> free = {~words[0], ~words[1], ~words[2]};
  // As wide as it may be.
  const std::array<optimized::PosRange, 3> ranges = {{{0, 9}, {0, 9}, {0, 9}}};
  const optimized::Members members = {.positions = positions.data(),
                                      .words = words.data(),
                                      .free = free.data(),
                                      .ranges = ranges.data(),
                                      .word_count = 3};
  EXPECT_EQ(FirstCellIn(members, {5, 5}), 70);
  EXPECT_EQ(LastCellIn(members, {5, 5}), 70);
  EXPECT_EQ(FirstCellIn(members, {6, 9}), SIZE_MAX);
  EXPECT_EQ(LastCellIn(members, {6, 9}), SIZE_MAX);
  const optimized::PosRange range =
      optimized::RangeOf(&positions[64], words[1]);
  EXPECT_EQ(range.first, 5);
  EXPECT_EQ(range.last, 5);
  optimized::AddToPositions(&positions[64], words[1], 2);
  EXPECT_EQ(positions[70], 7);
  EXPECT_EQ(positions[0], 0);
}

}  // namespace
}  // namespace kvtwin::props
