// Edges that no other test looks at: mutants stood there (docs/mutants.md).

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "core/elements.h"
#include "core/json_line.h"
#include "core/shift_row.h"
#include "core/trace/trace.h"
#include "optimized/row_kernels.h"
#include "optimized/row_shift.h"
#include "optimized/targets.h"
#include "props/testing/test_cache.h"
#include "reference/attention.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

// What a cache of the header needs, from what it has: cells with positions,
// rows, a mask.
void ExpectBound(const TraceHeader& header, const RowDims& rows) {
  auto cache = *MakeCache(header.spec);
  ASSERT_TRUE(cache->SetConfig(header.config).ok());
  const InitArgs& init = header.init;
  ASSERT_TRUE(
      cache->Init(init.dtype, init.max_sequences, init.capacity, init.max_batch)
          .ok());
  const auto element = static_cast<double>(SizeOf(init.dtype));
  const double row = element * header.layers * rows.kv_heads *
                     (rows.k_head_dim + rows.v_head_dim);
  const auto mask = static_cast<double>(
      DenseBytes(header.config.mask_dtype,
                 {cache->CellCount(), std::max(init.max_batch, 1), 1, 1}));
  const double need = cache->CellCount() * (4 + row) + mask;
  const double bound = CacheBytesBound(header, rows, 0);
  EXPECT_GE(bound, need);
  EXPECT_LE(bound, 2 * need + 200.0 * cache->CellCount());
  EXPECT_GE(CacheBytesBound(header, rows, 80000),
            bound + 10000.0 * cache->CellCount());
}

TEST(Trace, BoundsTheBytesOfACache) {
  TraceHeader header;
  header.init = {DType::kF16, 10, 4096, 2};
  header.layers = 3;
  const RowDims small{1, 1, 1};
  const RowDims large{900, 7, 300};
  for (const Kind kind : {Kind::kCausal, Kind::kSwa, Kind::kSwaMem}) {
    header.spec.kind = kind;
    if (kind != Kind::kCausal) header.spec.window = 3;
    if (kind == Kind::kSwaMem) header.spec.memory = 20;
    header.init.max_batch = 2;
    ExpectBound(header, small);
    ExpectBound(header, large);
    header.init.max_batch = 1000;  // Masks are what is large.
    for (const DType dtype :
         {DType::kBF16, DType::kBits, DType::kF16, DType::kF32}) {
      header.config.mask_dtype = dtype;
      ExpectBound(header, small);
    }
  }
  header.spec = {};
  const double one = CacheBytesBound(header, large, 5);
  CacheSpec encoder;
  encoder.kind = Kind::kEncoder;
  const std::vector<CacheSpec> caches = {header.spec, encoder, header.spec};
  header.spec = encoder;
  EXPECT_EQ(CacheBytesBound(header, large, 5), 0);
  header.spec.kind = Kind::kWrapper;
  header.spec.caches = caches;
  EXPECT_EQ(CacheBytesBound(header, large, 5), 2 * one);
}

// A header and operations as text, for tests that change a part of it.
std::string HeaderText(const TraceHeader& header) {
  std::ostringstream out;
  EXPECT_TRUE(WriteTraceHeader(header, out).ok());
  return out.str();
}

TraceHeader AnyHeader() {
  TraceHeader header;
  header.init = {DType::kF32, 1, 4, 2};
  header.layers = 1;
  header.rows = {1, 1, 1};
  return header;
}

std::string Without(std::string text, const std::string& part) {
  const std::size_t at = text.find(part);
  EXPECT_NE(at, text.npos) << part << " in " << text;
  return at == text.npos ? text : text.erase(at, part.size());
}

TraceHeader ReadBack(const std::string& text) {
  std::istringstream in(text);
  TraceReader reader(in);
  EXPECT_TRUE(reader.ReadHeader()) << reader.error()->reason;
  return reader.header();
}

TEST(Trace, FillsInWhatAHeaderLeavesOut) {
  TraceHeader header = AnyHeader();
  header.spec.shift.kind = ShiftKind::kRope;
  const std::string text = HeaderText(header);
  const Rope rope =
      ReadBack(Without(Without(text, R"(,"dims":0)"), R"(,"scale":1)"))
          .spec.shift.rope;
  EXPECT_EQ(rope.dims, 0);
  EXPECT_EQ(rope.scale, 1);
  header.config = {.cache_padding = 0, .mask_batch_padding = 0};
  const CacheConfig config = ReadBack(HeaderText(header)).config;
  EXPECT_EQ(config.cache_padding, 1);
  EXPECT_EQ(config.mask_batch_padding, 1);
}

TEST(Trace, WritesWrappersByTheirCaches) {
  TraceHeader header = AnyHeader();
  header.spec.kind = Kind::kWrapper;
  CacheSpec inner;
  inner.placement = Placement::kScatter;
  header.spec.caches = {inner};
  EXPECT_EQ(ReadBack(HeaderText(header)).spec.caches[0].placement,
            Placement::kScatter);
  inner.shift.kind = ShiftKind::kCustom;
  header.spec.caches.push_back(inner);
  std::ostringstream out;
  EXPECT_FALSE(WriteTraceHeader(header, out).ok());
}

TEST(Trace, WritesOfACacheWhatItsKindHas) {
  TraceHeader header = AnyHeader();
  header.spec.window = 3;
  header.spec.memory = 4;
  header.spec.chunk = 5;
  const auto written = [&](Kind kind) {
    header.spec.kind = kind;
    const std::string text = HeaderText(header);
    std::string found;
    for (const std::string key : {"window", "memory", "chunk"}) {
      if (text.find("\"" + key + "\":") != text.npos) found += key + " ";
    }
    return found;
  };
  EXPECT_EQ(written(Kind::kCausal), "");
  EXPECT_EQ(written(Kind::kSwa), "window ");
  EXPECT_EQ(written(Kind::kSwaMem), "window memory ");
  EXPECT_EQ(written(Kind::kChunked), "chunk ");
  EXPECT_EQ(written(Kind::kEncoder), "");
}

TEST(Trace, RefusesAHeaderWithANought) {
  for (const std::string key :
       {"max_sequences", "capacity", "max_batch", "layers", "k_head_dim",
        "kv_heads", "v_head_dim"}) {
    std::string text = HeaderText(AnyHeader());
    const std::size_t at = text.find("\"" + key + "\":") + key.size() + 3;
    std::istringstream in(text.replace(at, 1, "0"));
    TraceReader reader(in);
    EXPECT_FALSE(reader.ReadHeader()) << text;
    EXPECT_NE(reader.error()->reason.find(key + " is 0"), std::string::npos);
  }
}

// Why the line after the header cannot be read.
std::string WhyNot(const std::string& line) {
  std::istringstream in(HeaderText(AnyHeader()) + line + "\n");
  TraceReader reader(in);
  TraceOp op;
  EXPECT_TRUE(reader.ReadHeader());
  EXPECT_FALSE(reader.ReadOp(op)) << line;
  return reader.error() ? reader.error()->reason : "";
}

TEST(Trace, RefusesAnswersJustBesideTheRight) {
  EXPECT_EQ(WhyNot(R"({"op":"reserved_mask","shape":[4,2],"first_cell":-1})"),
            "first_cell is -1, it must be an integer from 0 to 2147483647");
  const std::string get =
      R"({"op":"get","layer":0,"key":{"shape":[1,1,2],"data":[1,2]},)"
      R"("value":{"shape":[1,1,2],"data":[1,2]},"mask":{"shape":[2,1],"rows":)";
  EXPECT_EQ(WhyNot(get + R"(["1/"]}})"), "mask.rows[0] must be 2 times 0 or 1");
  EXPECT_EQ(WhyNot(get + "{}}}"),
            "mask.rows is an object, it must be a list of strings");
  EXPECT_EQ(WhyNot(R"({"op":"put","layer":0,"key":{"shape":[1,1,1],)"
                   R"("data":[1,2]},"value":{"shape":[1,1,1],"data":[1]}})"),
            "key.data has 2 numbers, its shape is [1, 1, 1]");
  EXPECT_EQ(WhyNot(R"({"op":"start_forward","positions":[0],"sequences":[0],)"
                   R"("result":"ok","cells":[]})"),
            "cells has 0 numbers, positions has 1");
  EXPECT_EQ(WhyNot(R"({"op":"start_forward","positions":[0],"sequences":[0],)"
                   R"("result":"ok","cells":[-1]})"),
            "cells[0] is -1, it must not be negative");
  EXPECT_EQ(WhyNot(R"({"op":"can_resume","seq":0,"pos":0,"result":1})"),
            "result is 1, it must be true or false");
}

TEST(Json, PrintsWhateverTheBytesAre) {
  EXPECT_EQ(Printable(" ~\x1f\x7f\xe4", 5), " ~\\x1f\\x7f\\xe4");
  EXPECT_EQ(Printable("abc", 3), "abc");
  EXPECT_EQ(Printable("abcd", 3), "abc...");
}

TEST(Json, SaysAtWhichColumnItStops) {
  JsonValue object;
  EXPECT_TRUE(ParseJsonLine("{?", object).starts_with("not JSON: column 2: "));
}

TEST(ShiftFunctions, RopeTurnsAllOfAHeadIfNotToldOtherwise) {
  EXPECT_EQ(RopeDims({.dims = 0}, 6), 6);
  EXPECT_EQ(RopeDims({.dims = 0}, 7), 6);
  EXPECT_EQ(RopeDims({.dims = 4}, 6), 4);
  EXPECT_EQ(RopeDims({.dims = 10}, 7), 6);
}

// Bits, for a NaN is not equal to itself.
template <class T>
std::vector<std::uint32_t> Bits(const std::vector<T>& numbers) {
  std::vector<std::uint32_t> bits;
  bits.reserve(numbers.size());
  for (const T number : numbers) {
    if constexpr (sizeof(T) == 4) {
      bits.push_back(std::bit_cast<std::uint32_t>(number));
    } else {
      bits.push_back(number);
    }
  }
  return bits;
}

// Tests that hold for each instruction set by name.
class EachTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    before_ = optimized::ActiveTarget();
    ASSERT_TRUE(optimized::SelectTarget(GetParam()));
    ASSERT_EQ(optimized::ActiveTarget(), GetParam());
  }
  void TearDown() override { (void)optimized::SelectTarget(before_); }

 private:
  std::string before_;
};
INSTANTIATE_TEST_SUITE_P(Targets, EachTarget,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

// Heads from a pair to several vectors and a rest.
TEST_P(EachTarget, ShiftsRowsAsTheDefinitionDoes) {
  for (const ShiftKind kind :
       {ShiftKind::kAdd, ShiftKind::kTagAdd, ShiftKind::kRope}) {
    for (const auto pairing :
         {Rope::Pairing::kAdjacent, Rope::Pairing::kHalves}) {
      for (int head_dim = 2; head_dim < 150; head_dim += 7) {
        Shift shift;
        shift.kind = kind;
        shift.rope.pairing = pairing;
        shift.rope.scale = 0.3;
        optimized::RowShift fast;
        fast.Prepare(shift, -5, head_dim);
        Floats due(static_cast<std::size_t>(3 * head_dim));
        for (std::size_t i = 0; i < due.size(); ++i) {
          due[i] = std::sin(static_cast<float>(i * i)) * 9;
        }
        for (const bool with_nan : {false, true}) {
          if (with_nan) due.back() = std::nanf("");
          Floats found = due;
          fast.Apply(DType::kF32, std::as_writable_bytes(std::span(found)));
          ASSERT_TRUE(ShiftRow(shift, 0, -5, head_dim, 3, due).ok());
          EXPECT_EQ(Bits(found), Bits(due)) << head_dim;
        }
      }
    }
  }
}

void ExpectConversions(DType dtype) {
  const std::size_t size = SizeOf(dtype);
  const std::size_t all = std::size_t{1} << (8 * size);
  std::vector<std::byte> codes(all * size);
  Floats due(all);
  for (std::size_t i = 0; i < all; ++i) {
    std::memcpy(&codes[i * size], &i, size);
    due[i] = LoadElement(&codes[i * size], dtype);
  }
  Floats floats(all);
  optimized::WidenToF32(dtype, codes.data(), floats.data(), floats.size());
  EXPECT_EQ(Bits(floats), Bits(due));
  // Each number, halfway to the next, and just beside both.
  Floats from;
  from.reserve(12 * floats.size());
  for (const float one : floats) {
    const auto bits = std::bit_cast<std::uint32_t>(one);
    for (const std::uint32_t step :
         {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x7FFFU, 0x8000U, 0x8001U, 0x7FFFFU,
          0x80000U, 0x80001U, ~0U}) {
      from.push_back(std::bit_cast<float>(bits + step));
    }
  }
  std::vector<std::byte> rounded(from.size() * size);
  for (std::size_t i = 0; i < from.size(); ++i) {
    StoreElement(from[i], &rounded[i * size], dtype);
  }
  // As many at a time as make whole vectors, and a few more.
  for (const std::size_t count : {std::size_t{1}, std::size_t{37}}) {
    std::vector<std::byte> found(rounded.size());
    for (std::size_t i = 0; i < from.size(); i += count) {
      optimized::RoundF32(dtype, &from[i], &found[i * size],
                          std::min(count, from.size() - i));
    }
    EXPECT_TRUE(found == rounded);
  }
}

TEST_P(EachTarget, ConvertsAsTheDefinitionDoes) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8}) {
    SCOPED_TRACE(DTypeName(dtype));
    ExpectConversions(dtype);
  }
}

class Edges : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, Edges, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(Edges, RestoreRefusesRowsOfAnotherDType) {
  std::vector<CacheState> states;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    TestCache cache({}, GetParam());
    ASSERT_TRUE(cache->Init(dtype, 1, 4, 4).ok());
    cache.Append(0, 0, {1, 2});
    for (const CacheState& other : states) {
      EXPECT_FALSE(cache->Restore(other).ok());
    }
    states.push_back(*cache->Snapshot());
  }
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  EXPECT_FALSE(cache->Restore(states[1]).ok());
  EXPECT_TRUE(cache->Restore(states[0]).ok());
  TestCache half({}, GetParam());
  ASSERT_TRUE(half->Init(DType::kF16, 1, 4, 4).ok());
  CacheState mixed = states[1];
  std::swap(mixed.layers[0].key, states[0].layers[0].key);
  EXPECT_FALSE(half->Restore(mixed).ok());
  std::swap(mixed.layers[0].key, states[0].layers[0].key);
  std::swap(mixed.layers[0].value, states[0].layers[0].value);
  EXPECT_FALSE(half->Restore(mixed).ok());
}

TEST_P(Edges, RestoreRefusesACellAtTwoPositions) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 4), StatusCode::kOk);
  for (const std::int32_t second : {1, 3}) {
    CacheState state;
    state.cells = {{0, 2, 0}, {0, second, 1}};
    EXPECT_FALSE(cache->Restore(state).ok());
  }
}

TEST_P(Edges, AfterRestoreTheLayerIsTheFirst) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  const CacheState empty = *cache->Snapshot();
  ASSERT_TRUE(cache->SetLayer(7).ok());
  ASSERT_TRUE(cache->Restore(empty).ok());
  cache.Append(0, 0, {1});
  EXPECT_TRUE(cache->Snapshot()->layers.contains(0));
}

// V has a fourth dimension, which permuted V has no place for.
TEST_P(Edges, AnEncoderKeepsFourDimensionsUnlessPermuted) {
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  const Floats rows(4, 1);
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 2, 2});
  TestCache plain(spec, GetParam());
  ASSERT_EQ(plain.Init(1, 4, 4), StatusCode::kOk);
  ASSERT_EQ(plain.Start({0}, {0}), StatusCode::kOk);
  ASSERT_TRUE(plain->Put(view, view).ok());
  const CacheState state = *plain->Snapshot();
  EXPECT_TRUE(plain->Restore(state).ok());
  TestCache permuted(spec, GetParam(), {.v_layout = VLayout::kPermuted});
  ASSERT_EQ(permuted.Init(1, 4, 4), StatusCode::kOk);
  EXPECT_FALSE(permuted->Restore(state).ok());
  ASSERT_EQ(permuted.Start({0}, {0}), StatusCode::kOk);
  EXPECT_FALSE(permuted->Put(view, view).ok());
  // K is not permuted.
  const TensorView three = DenseView(rows.data(), DType::kF32, {1, 2, 2, 1});
  EXPECT_TRUE(permuted->Put(view, three).ok());
  const CacheState mixed = *permuted->Snapshot();
  EXPECT_TRUE(permuted->Restore(mixed).ok());
}

// Rows of several elements in several layers, with a function of the user's
// that does what the one of ours does.
TEST_P(Edges, ACustomShiftDoesWhatItsFunctionDoes) {
  constexpr std::int64_t kTokens = 70;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    std::vector<CacheState> states;
    for (const ShiftKind kind : {ShiftKind::kAdd, ShiftKind::kCustom}) {
      CacheSpec spec;
      spec.shift.kind = kind;
      spec.shift.fn = [](int, std::int32_t offset, int, int,
                         std::span<float> key) -> Status {
        for (float& element : key) element += static_cast<float>(offset);
        return {};
      };
      auto cache = *MakeCache(spec, GetParam());
      ASSERT_TRUE(cache->Init(dtype, 1, 128, kTokens).ok());
      std::vector<std::int32_t> positions(kTokens);
      std::iota(positions.begin(), positions.end(), 0);
      Floats rows(kTokens * 6);
      std::iota(rows.begin(), rows.end(), 0.0F);
      const std::vector<int> sequences(kTokens, 0);
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      for (const int layer : {0, 3, 1}) {
        ASSERT_TRUE(cache->SetLayer(layer).ok());
        const TensorView view =
            DenseView(rows.data(), DType::kF32, {3, 2, kTokens, 1});
        ASSERT_TRUE(cache->Put(view, view).ok());
      }
      ASSERT_TRUE(cache->Remove(0, 2, 5).ok());
      ASSERT_TRUE(cache->Remove(0, 40, 41).ok());
      states.push_back(*cache->Snapshot());
    }
    EXPECT_TRUE(states[0] == states[1]);
  }
}

// Rows lie anywhere: repeated, at odd addresses, with heads of one element.
TEST_P(Edges, TakesRowsOfAnyStrides) {
  std::vector<std::byte> bytes(4096);
  for (std::size_t i = 0; i + 8 < bytes.size(); i += 4) {
    const auto number = static_cast<float>(i);
    std::memcpy(&bytes[i + 1], &number, sizeof(number));
  }
  const std::vector<std::array<std::int64_t, 4>> strides = {
      {4, 12, 24, 0}, {0, 12, 24, 0}, {4, 0, 24, 0},  {4, 12, 25, 0},
      {4, 12, 0, 0},  {8, 4, 24, 0},  {2, 12, 24, 0}, {4, 16, 48, 0}};
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    for (const VLayout layout : kVLayouts) {
      for (const auto& stride : strides) {
        for (const std::int64_t head_dim : {1, 3}) {
          TensorView view;
          view.data = &bytes[stride[2] % 4 == 0 ? 401 : 403];
          view.shape = {head_dim, 2, 5, 1};
          view.stride = stride;
          TestCache cache({}, GetParam(), ConfigOf(layout));
          ASSERT_TRUE(cache->Init(dtype, 1, 8, 8).ok());
          ASSERT_EQ(cache.Start({0, 1, 2, 3, 4}, {0, 0, 0, 0, 0}),
                    StatusCode::kOk);
          ASSERT_TRUE(cache->Put(view, view).ok());
          const CacheState state = *cache->Snapshot();
          EXPECT_TRUE(state.layers.at(0).key == CopyOf(view, dtype));
          EXPECT_TRUE(state.layers.at(0).value == CopyOf(view, dtype));
        }
      }
    }
  }
}

TEST(Storage, BeginsOnACacheLine) {
  TestCache cache({}, "optimized");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0}, {0}), StatusCode::kOk);
  for (int layer = 0; layer < 8; ++layer) {
    ASSERT_TRUE(cache->SetLayer(layer).ok());
    ASSERT_EQ(cache.Put({1}), StatusCode::kOk);
    const KvView view = *cache->Get();
    for (const TensorView& tensor : {view.key, view.value, view.mask}) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % 64, 0U);
    }
  }
}

// What a cache forgot, for Restore and when a batch is given back.
TEST_P(Edges, GivesBackAfterARestoreInPlace) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  spec.caches[0].kind = Kind::kSwa;
  spec.caches[0].window = 1;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 4), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0, 1, 2, 3}, {0, 0, 0, 0}), StatusCode::kOk);
  ASSERT_EQ(cache.Start({4, 5, 6}, {0, 0, 0}), StatusCode::kOk);
  const CacheState seven = *cache->Snapshot();
  ASSERT_EQ(cache.Start({0}, {1}), StatusCode::kOk);
  ASSERT_TRUE(cache->Restore(seven).ok());
  ASSERT_EQ(cache.Start({0, 1}, {1, 1}), StatusCode::kCacheFull);
  const CacheState after = *cache->Snapshot();
  EXPECT_TRUE(after.caches[1] == seven.caches[1]);
  for (const CellEntry& entry : after.caches[0].cells) {
    EXPECT_EQ(entry.sequence, 0);
  }
}

// Two tokens with K = V = 1 and 2, a query of 3, a scale of a half.
TEST(Attention, WeighsByTheProducts) {
  TestCache cache({}, "reference");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const Eigen::MatrixXd query = Eigen::MatrixXd::Constant(1, 1, 3);
  const double seen =
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 0.5)(0, 0);
  const double one = std::exp(3 * 1 * 0.5);
  const double two = std::exp(3 * 2 * 0.5);
  EXPECT_NEAR(seen, (one * 1 + two * 2) / (one + two), 1e-12);
  // What weighs more than a double holds is all there is.
  EXPECT_EQ(
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 200)(0, 0),
      2);
  // What is infinite has no weight that could be told; it is not hidden.
  cache.Append(0, 2, {std::numeric_limits<float>::infinity()});
  EXPECT_TRUE(std::isnan(
      reference::Attend(*cache->Get(), VLayout::kPlain, 0, query, 0.5)(0, 0)));
}

TEST(Ledger, RestoresEveryCacheOfAWrapper) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  spec.caches[1].kind = Kind::kSwa;
  spec.caches[1].window = 1;
  TestCache cache(spec, "reference");
  ASSERT_EQ(cache.Init(1, 8, 8), StatusCode::kOk);
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(cache.Start({i}, {0}), StatusCode::kOk);
  }
  reference::Ledger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 8, 8}).ok());
  ledger.Restore(*cache->Snapshot());
  ASSERT_EQ(ledger.parts().size(), 2U);
  EXPECT_EQ(ledger.parts()[0].tokens().size(), 5U);
  EXPECT_EQ(ledger.parts()[1].tokens().size(), 2U);
}

// Whole words of 64 cells are shared, and nothing else.
TEST_P(Edges, ALaterTokenIsSharedInAFullWord) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(3, 64, 64), StatusCode::kOk);
  const Floats tags(64, 1);
  cache.Append(5, 0, tags);
  cache.Append(6, 64, tags);
  ASSERT_TRUE(cache->CopyPrefix(6, 7, 128).ok());
  const Status refused = cache->Remove(7, 0, 10);
  EXPECT_EQ(refused.code(), StatusCode::kSharedCells);
  if (GetParam() == "optimized") {
    EXPECT_EQ(refused.message(),
              "sequence 7 shares its token at position 64, in cell 64, with "
              "another sequence");
  }
  EXPECT_EQ(cache->Remove(5, 0, 10).code(), StatusCode::kOk);
}

}  // namespace
}  // namespace kvtwin::props
