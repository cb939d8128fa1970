// States as bytes and as files: what was saved is loaded, and nothing else.

#include "kvtwin/save.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "props/testing/test_cache.h"
#include "props/testing/test_states.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Floats = std::vector<float>;

class Save : public WithFolder {};

TEST_F(Save, LoadsASavedState) {
  std::vector<CacheState> states = {CacheState(), SomeState(5, 3),
                                    OfAWrapper()};
  for (const DType dtype : kRowDTypes) {
    states.push_back(SomeState(1, 2, dtype));
  }
  states.back().layers[0].value = FilledTensor(DType::kQ8, {32, 2, 1, 1}, 3);
  for (const CacheState& state : states) {
    const Result<CacheState> read = StateFromBytes(StateToBytes(state));
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    EXPECT_TRUE(*read == state);
    ASSERT_TRUE(SaveState(state, Path()).ok());
    const Result<CacheState> loaded = LoadState(Path());
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_TRUE(*loaded == state);
  }
}

TEST_F(Save, RefusesTheStateOfAnotherModel) {
  const CacheState state = SomeState(2, 3);
  const std::string model = "ours, 7B \"quoted\"\n \u00e9";
  const std::vector<std::byte> bytes = StateToBytes(state, model);
  ASSERT_TRUE(StateFromBytes(bytes, model).ok());
  EXPECT_TRUE(*StateFromBytes(bytes, model) == state);
  EXPECT_EQ(
      StateFromBytes(StateToBytes(state, "ours"), "theirs").status().message(),
      "the state is of model 'ours', not of 'theirs'");
  EXPECT_FALSE(StateFromBytes(bytes).ok());
  ASSERT_TRUE(SaveState(state, Path(), model).ok());
  EXPECT_TRUE(LoadState(Path(), model).ok());
  EXPECT_EQ(LoadState(Path()).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Save, NamesTheModelOfAFile) {
  for (const std::string model : {"ours, 7B \"quoted\"\n \u00e9", ""}) {
    ASSERT_TRUE(SaveState(SomeState(2, 3), Path(), model).ok());
    EXPECT_TRUE(LoadState(Path(), model).ok());
    EXPECT_TRUE(
        StateFromBytes(StateToBytes(SomeState(2, 3), model), model).ok());
    EXPECT_FALSE(LoadState(Path(), model + "x").ok());
    const Result<std::string> found = ModelOf(Path());
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    EXPECT_EQ(*found, model);
  }
  // JSON has no such text: bytes would be replaced, as those of another model.
  const std::string wrong = "model is '\\xff', it must be UTF-8";
  const CacheState state = SomeState(2, 3);
  EXPECT_EQ(SaveState(state, Path(), "\xff").message(), wrong);
  EXPECT_THAT(LoadState(Path(), "\xff").status().message(),
              HasSubstr(": " + wrong));
  EXPECT_TRUE(StateToBytes(state, "\xff").empty());
  EXPECT_TRUE(LoadState(Path(), *ModelOf(Path())).ok());
  fs::resize_file(Path(), 100);
  EXPECT_EQ(
      ModelOf(Path()).status().message(),
      fmt::format("'{}': this is not a state of a cache: its header is of "
                  "448 bytes, all of it of 100",
                  Path()));
  EXPECT_EQ(ModelOf(folder_).status().code(), StatusCode::kFailedPrecondition);
}

// No cache has these states: reading them would go past the ends of arrays.
TEST_F(Save, RefusesImpossibleStates) {
  const auto refused = [this](CacheState state, const auto& damage) {
    damage(state);
    const bool read = StateFromBytes(StateToBytes(state)).ok();
    const Status status = SaveState(state, Path());
    EXPECT_EQ(status.code(),
              read ? StatusCode::kOk : StatusCode::kInvalidArgument);
    EXPECT_EQ(std::filesystem::remove(Path()), read);
    return !read;
  };
  const auto whole = [](CacheState&) {};
  const CacheState state = SomeState(3, 1);
  EXPECT_FALSE(refused(state, whole));
  using State = CacheState&;
  EXPECT_TRUE(refused(state, [](State s) { s.cells.pop_back(); }));
  EXPECT_TRUE(refused(state, [](State s) { s.cells[0].cell = -1; }));
  EXPECT_TRUE(refused(state, [](State s) { s.cells[2].cell = kOpenEnd; }));
  EXPECT_TRUE(refused(state, [](State s) { s.cells[0].position = -1; }));
  EXPECT_TRUE(refused(state, [](State s) { s.cells[0].sequence = -1; }));
  EXPECT_TRUE(refused(state, [](State s) { s.cells[2].cell = 0; }));
  EXPECT_TRUE(refused(state, [](State s) { s.cached = true; }));
  EXPECT_TRUE(refused(state, [](State s) { s.next_position = 3; }));
  EXPECT_TRUE(refused(state, [](State s) { s.layers[-2] = s.layers[0]; }));
  for (const Shape& shape : {Shape{4, 1, 3, 1}, Shape{4, 2, 2, 1},
                             Shape{4, 2, 4, 1}, Shape{4, 2, 3, 2}}) {
    EXPECT_TRUE(refused(state, [&](State s) {
      s.layers[7].value = FilledTensor(DType::kF16, shape, 1);
    })) << ShapeText(shape);
  }
  EXPECT_TRUE(refused(CacheState(), [](State s) {
    const Shape huge = {kOpenEnd, kOpenEnd, 0, kOpenEnd};
    s.layers[0] = {{DType::kF32, huge, {}}, {DType::kF32, huge, {}}};
  }));
  // A tensor has other bytes than its shape says.
  CacheState half = state;
  half.layers[7].value.bytes.pop_back();
  EXPECT_TRUE(StateToBytes(half).empty());
  EXPECT_TRUE(refused(half, whole));
  // A sequence may have no tokens yet.
  EXPECT_FALSE(refused(SomeState(0, 1), whole));
  EXPECT_FALSE(refused(OfAWrapper(), whole));
  EXPECT_TRUE(
      refused(OfAWrapper(), [](State s) { s.caches[0].cells.pop_back(); }));
  EXPECT_TRUE(
      refused(OfAWrapper(), [](State s) { s.caches[1].layers.clear(); }));
  EXPECT_TRUE(refused(OfAWrapper(), [](State s) { s.position = 1; }));
  EXPECT_TRUE(refused(OfAWrapper(), [](State s) { s.cells = {{}}; }));
}

// A saved state stays readable for good: a new format has a new version.
TEST_F(Save, KeepsItsFormat) {
  CacheState cache;
  cache.cells = {{0, 0, 0}, {0, 0, 1}, {1, 1, 0}, {1, 1, 1},
                 {2, 2, 0}, {4, 2, 1}, {5, 3, 1}};
  for (const int layer : {0, 1, 3}) {
    cache.layers[layer] = {FilledTensor(DType::kF16, {4, 2, 5, 1}, 1),
                           FilledTensor(DType::kBF16, {3, 2, 5, 1}, 2)};
  }
  CacheState encoder;
  encoder.cached = true;
  encoder.position = 5;
  encoder.next_position = 6;
  encoder.layers[2] = {FilledTensor(DType::kF16, {2, 3, 1, 2}, 3),
                       FilledTensor(DType::kF32, {1, 1, 1, 1}, 4)};
  CacheState wrapper;
  wrapper.caches = {cache, encoder};
  ASSERT_TRUE(SaveState(wrapper, Path(), "a model").ok());
  EXPECT_EQ(ReadFile(Path()), ReadFile(KVTWIN_RECORDINGS "/state.safetensors"));
}

// The header is padded to a multiple of 8 bytes, and no further.
TEST_F(Save, PadsItsHeader) {
  for (std::size_t name = 0; name < 8; ++name) {
    const std::vector<std::byte> bytes =
        StateToBytes(CacheState(), std::string(name, 'm'));
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    ASSERT_EQ(bytes.size(), 8 + length);
    EXPECT_EQ(length % 8, 0U);
    EXPECT_NE(bytes[bytes.size() - 8], std::byte{' '}) << name;
  }
}

// A byte that is changed, missing or extra is refused.
TEST_F(Save, RefusesDamagedFiles) {
  for (const CacheState& state :
       {CacheState(), SomeState(2, 3), OfAWrapper()}) {
    const std::vector<std::byte> bytes = StateToBytes(state);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      std::vector<std::byte> damaged = bytes;
      for (const int bit : {0, 3, 7}) {
        damaged[i] = bytes[i] ^ std::byte{1} << bit;
        const Result<CacheState> read = StateFromBytes(damaged);
        ASSERT_FALSE(read.ok()) << "bit " << bit << " of byte " << i;
        ASSERT_EQ(read.status().code(), StatusCode::kInvalidArgument);
      }
      ASSERT_FALSE(StateFromBytes(std::span(bytes).first(i)).ok()) << i;
    }
    std::vector<std::byte> longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(StateFromBytes(longer).ok());
  }
}

// Why a file of this header and `data` zeros is refused.
std::string RefusalOf(const std::string& header, std::size_t data = 64) {
  const std::uint64_t length = header.size();
  std::vector<std::byte> bytes(8 + header.size() + data);
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  const std::string message = StateFromBytes(bytes).status().message();
  const std::string begin = "this is not a state of a cache: ";
  EXPECT_TRUE(message.starts_with(begin)) << message;
  return message.substr(std::min(begin.size(), message.size()));
}

// Why a file of these tensors is refused, after the right metadata.
std::string RefusalOfTensors(const std::string& tensors, std::size_t data) {
  return RefusalOf(
      R"({"__metadata__":{"kvtwin_state":"2","model":""},)" + tensors + "}",
      data);
}

TEST_F(Save, RefusesHostileHeaders) {
  EXPECT_EQ(RefusalOf(""), "an empty line");
  EXPECT_EQ(RefusalOf("{}"), "its metadata has no 'kvtwin_state'");
  EXPECT_THAT(RefusalOf(std::string(100000, '[')), HasSubstr("nested"));
  EXPECT_EQ(RefusalOf(R"({"__metadata__":7})"),
            "its metadata has no 'kvtwin_state'");
  EXPECT_EQ(RefusalOf(R"({"__metadata__":{"kvtwin_state":"1","model":""}})"),
            "its version is '1', not '2'");
  const std::vector<std::byte> huge(8, std::byte{0xFF});
  EXPECT_THAT(StateFromBytes(huge).status().message(),
              HasSubstr("its header is of 18446744073709551615 bytes"));
}

TEST_F(Save, RefusesHostileMetadata) {
  const std::string header =
      R"({{"__metadata__":{{"kvtwin_state":"2","model":"","{}":"{}"}}}})";
  for (const auto& [name, value] : {std::pair("caches.9.encoder", "0 0 0"),
                                    {"encoder", "0 x 0"},
                                    {"encoder", "0 0"},
                                    {"layers.0.rows", "q8_0"},
                                    {"layers.0.key", "q9"},
                                    {"layers.0.key", "f32"},
                                    {"layers.x.key", "q8_0"},
                                    {"other", "1"}}) {
    EXPECT_EQ(RefusalOf(fmt::format(fmt::runtime(header), name, value)),
              fmt::format("its metadata has a wrong '{}'", name))
        << value;
  }
}

TEST_F(Save, RefusesHostileTensors) {
  const std::string unsure = "its checksum does not hold";
  // A cache that is named twice must not be read by two threads.
  const std::string cells =
      R"("{}cells":{{"dtype":"I32","shape":[1,3],"data_offsets":[{},{}]}})";
  for (const auto& [name, refusal] :
       {std::pair("caches.1.", unsure),
        {"caches.00.", "its tensor 'caches.00.cells' is wrong"},
        {"caches.2.", "its tensor 'caches.2.cells' is wrong"},
        {"caches.-1.", "its tensor 'caches.-1.cells' is wrong"}}) {
    const std::string first =
        fmt::format(fmt::runtime(cells), "caches.0.", 0, 12);
    const std::string second = fmt::format(fmt::runtime(cells), name, 12, 24);
    EXPECT_EQ(RefusalOfTensors(first + "," + second, 24), refusal);
  }
  for (const char* tensor :
       {R"({"dtype":7,"shape":[0,3],"data_offsets":[0,0]})",
        R"({"dtype":"I32","shape":3,"data_offsets":[0,0]})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":0})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":[0]})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":[-1,0]})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":[4,0]})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":[0,99]})",
        R"({"dtype":"I32","shape":[1e300,3],"data_offsets":[0,1e300]})",
        R"({"dtype":"I32","shape":[0,3],"data_offsets":[0,5]})", "7"}) {
    EXPECT_EQ(RefusalOfTensors(fmt::format(R"("cells":{})", tensor), 5),
              "its tensor 'cells' is wrong")
        << tensor;
  }
  EXPECT_EQ(RefusalOfTensors(fmt::format(fmt::runtime(cells), "", 0, 12), 13),
            "it has other bytes as well");
  const auto key = [](int layer, const char* dtype, const char* shape) {
    return RefusalOfTensors(
        fmt::format(R"("layers.{}.key":{{"dtype":"{}","shape":{},)"
                    R"("data_offsets":[0,4]}})",
                    layer, dtype, shape),
        4);
  };
  EXPECT_EQ(key(0, "F32", "[1,1,1,1]"), unsure);
  EXPECT_EQ(key(-1, "F32", "[1,1,1,1]"), unsure);
  for (const char* shape : {"[1,1,1]", "[1,1,1,-1]", "[1,1,1,1e10]",
                            "[1,1,1,2]", "[65536,65536,65536,65536]"}) {
    EXPECT_EQ(key(0, "F32", shape), "its tensor 'layers.0.key' is wrong");
  }
  for (const char* dtype : {"U8", "I8"}) {
    EXPECT_EQ(key(0, dtype, "[1,1,1,4]"), "its tensor 'layers.0.key' is wrong");
  }
}

// Headers have a largest size, and a largest number of names.
TEST_F(Save, SavesOnlyWhatReadsBack) {
  const auto saved = [&](const CacheState& state, const std::string& model) {
    const bool read = StateFromBytes(StateToBytes(state, model), model).ok();
    const Status status = SaveState(state, Path(), model);
    EXPECT_EQ(status.ok(), read) << status.ToString();
    EXPECT_EQ(status.code(),
              read ? StatusCode::kOk : StatusCode::kInvalidArgument);
    if (read) {
      const Result<CacheState> loaded = LoadState(Path(), model);
      EXPECT_TRUE(loaded.ok() && *loaded == state);
    }
    return read;
  };
  CacheState state = SomeState(1, 1);
  const KvRows rows = state.layers[0];
  for (const int layers : {384, 1024}) {
    for (int layer = 0; layer < layers; ++layer) state.layers[layer] = rows;
    EXPECT_EQ(saved(state, ""), layers == 384);
  }
  constexpr std::size_t kMax = std::size_t{16} << 20;  // Bytes of a header.
  state = SomeState(1, 1);
  std::uint64_t length = 0;
  std::memcpy(&length, StateToBytes(state).data(), sizeof(length));
  EXPECT_TRUE(saved(state, std::string(kMax - length, 'm')));
  EXPECT_FALSE(saved(state, std::string(kMax - length + 8, 'm')));
}

// A sequence of one cache continues in another one, fragmented, beside others,
// with another padding, placement and V layout, as it would in its own cache.
TEST_F(Save, ASequenceMovesToACacheThatIsInUse) {
  for (const char* twin : {"reference", "optimized"}) {
    SCOPED_TRACE(twin);
    TestCache home({}, twin);
    ASSERT_EQ(home.Init(3, 8, 8), StatusCode::kOk);
    home.Append(0, 0, {1, 2});
    home.Append(1, 0, {3, 4, 5});
    home.Append(0, 2, {6});
    ASSERT_TRUE(home->CopyPrefix(1, 2, 2).ok());
    ASSERT_TRUE(SaveState(SequenceOf(*home->Snapshot(), 1), Path()).ok());

    CacheSpec scatter;
    scatter.placement = Placement::kScatter;
    TestCache away(scatter, twin,
                   {.cache_padding = 3, .v_layout = VLayout::kPermuted});
    ASSERT_EQ(away.Init(3, 8, 8), StatusCode::kOk);
    away.Append(0, 0, {7, 8, 9});
    ASSERT_TRUE(away->CopyPrefix(0, 1, 1).ok());
    ASSERT_TRUE(away->Remove(0, 2, kOpenEnd).ok());
    const int cells[] = {away->CellCount()};
    const CacheState saved = *LoadState(Path());
    EXPECT_EQ(saved.cells.size(), 3U);
    const auto both = WithSequence(*away->Snapshot(), 5, saved, cells);
    ASSERT_TRUE(both.ok()) << both.status().ToString();
    ASSERT_TRUE(away->Restore(*both).ok());
    EXPECT_EQ(SequenceOf(*away->Snapshot(), 0).cells.size(), 2U);
    away.Append(5, 3, {10});
    EXPECT_EQ(away.SeenK(0), (Floats{3, 4, 5, 10}));
    away.Append(0, 2, {11});
    EXPECT_EQ(away.SeenK(0), (Floats{7, 8, 11}));

    // A sequence that does not fit, or that exists already.
    const int few[] = {3};
    EXPECT_EQ(WithSequence(*away->Snapshot(), 6, saved, few).status().code(),
              StatusCode::kCacheFull);
    EXPECT_EQ(WithSequence(*away->Snapshot(), 5, saved, cells).status().code(),
              StatusCode::kInvalidArgument);
    CacheState half = saved;
    half.layers[0].key = CopyOf(half.layers[0].key.view(), DType::kF16);
    EXPECT_EQ(WithSequence(*away->Snapshot(), 6, half, cells).status().code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(WithSequence(OfAWrapper(), 6, saved, cells).status().code(),
              StatusCode::kInvalidArgument);
  }
}

CacheState OfLayers(const std::vector<int>& layers, int tokens) {
  CacheState state;
  for (int i = 0; i < tokens; ++i) state.cells.push_back({i, i, 1});
  for (const int layer : layers) {
    state.layers[layer] = {FilledTensor(DType::kF32, {2, 2, tokens, 1}, 1),
                           FilledTensor(DType::kF32, {3, 2, tokens, 1}, 2)};
  }
  return state;
}

class Sequences : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Twins, Sequences,
                         ::testing::Values("reference", "optimized"),
                         [](const auto& info) { return info.param; });

// Taking or adding one sequence has the same result as whole snapshots.
TEST_P(Sequences, AreParkedAndAddedAlone) {
  TestCache home({}, GetParam());
  ASSERT_EQ(home.Init(3, 8, 8), StatusCode::kOk);
  home.Append(0, 0, {1, 2});
  home.Append(1, 0, {3, 4, 5});
  ASSERT_TRUE(home->CopyPrefix(1, 2, 2).ok());
  const CacheState parked = *home->SnapshotOf(1);
  EXPECT_TRUE(parked == SequenceOf(*home->Snapshot(), 1));
  EXPECT_TRUE(*home->SnapshotOf(9) == CacheState());

  TestCache away({}, GetParam(),
                 {.cache_padding = 3, .v_layout = VLayout::kPermuted});
  ASSERT_EQ(away.Init(1, 6, 6), StatusCode::kOk);
  ASSERT_TRUE(away->SetLayer(1).ok());
  away.Append(0, 0, {7, 8, 9});
  ASSERT_TRUE(away->Remove(0, 1, kOpenEnd).ok());
  const int cells[] = {6};
  const CacheState expected =
      *WithSequence(*away->Snapshot(), 5, parked, cells);
  ASSERT_TRUE(away->AddSequence(5, parked).ok());
  // The sequence's rows in layer 1 are zeros, not those that were removed.
  EXPECT_TRUE(*away->Snapshot() == expected);
  EXPECT_EQ(away.Put({0}), StatusCode::kFailedPrecondition);
  away.Append(5, 3, {10});
  EXPECT_EQ(away.SeenK(0), (Floats{3, 4, 5, 10}));
}

TEST_P(Sequences, AreAddedCompletelyOrNotAtAll) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 6, 6), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  const CacheState before = *cache->Snapshot();
  const CacheState whole = SequenceOf(before, 0);
  const auto code = [&](int sequence, const CacheState& added) {
    const Status status = cache->AddSequence(sequence, added);
    EXPECT_TRUE(status.ok() || *cache->Snapshot() == before);
    return status.code();
  };
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code(-1, whole), kInvalid);
  EXPECT_EQ(code(0, whole), kInvalid);
  EXPECT_EQ(code(1, OfAWrapper()), kInvalid);
  EXPECT_EQ(code(1, OfLayers({0}, 4)), StatusCode::kCacheFull);
  CacheState other = whole;
  other.cells[1].cell = 0;  // The cell of another token.
  EXPECT_EQ(code(1, other), kInvalid);
  other.cells[1] = {0, 0, 1};
  EXPECT_EQ(code(1, other), kInvalid);
  other = CacheState();  // Two sequences in a cell.
  other.cells = {{0, 0, 0}, {0, 0, 1}};
  EXPECT_EQ(code(1, other), kInvalid);
  const int cells[] = {6};
  EXPECT_FALSE(WithSequence(before, 1, other, cells).ok());
  other = whole;
  other.cells.pop_back();
  EXPECT_EQ(code(1, other), kInvalid);
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    const std::int64_t dim = dtype == DType::kF16 ? 1 : 2;
    other = whole;
    other.layers[0].value = FilledTensor(dtype, {dim, 1, 3, 1}, 1);
    EXPECT_EQ(code(1, other), kInvalid);
  }
  EXPECT_EQ(code(0, CacheState()), kInvalid);
  EXPECT_EQ(code(1, CacheState()), StatusCode::kOk);
  EXPECT_EQ(cache->SnapshotOf(-1).status().code(), kInvalid);
  other = whole;  // Two sequences, each in its own cells.
  other.cells[2].sequence = 9;
  EXPECT_EQ(cache->AddSequence(1, other).message(),
            "what is added as sequence 1 is of several: 0 and 9");
  EXPECT_FALSE(WithSequence(before, 1, other, cells).ok());
  EXPECT_EQ(code(1, whole), StatusCode::kOk);
  EXPECT_TRUE(cache->SnapshotOf(1)->layers == whole.layers);
}

TEST_P(Sequences, AreInAllCachesOfAWrapperOrInNone) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 6, 6), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  const CacheState before = *cache->Snapshot();
  const CacheState parked = *cache->SnapshotOf(0);
  EXPECT_TRUE(parked == SequenceOf(before, 0));
  CacheState half = parked;
  half.caches[1] = OfLayers({0}, 4);
  for (CellEntry& entry : half.caches[1].cells) entry.sequence = 0;
  EXPECT_EQ(cache->AddSequence(1, half).code(), StatusCode::kCacheFull);
  EXPECT_FALSE(cache->AddSequence(1, parked.caches[0]).ok());
  // Tokens of another sequence in the other cache.
  half = parked;
  for (CellEntry& entry : half.caches[1].cells) entry.sequence = 5;
  EXPECT_EQ(cache->AddSequence(1, half).code(), StatusCode::kInvalidArgument);
  half = parked;
  half.position = 1;
  EXPECT_FALSE(cache->AddSequence(1, half).ok());
  EXPECT_TRUE(*cache->Snapshot() == before);
  const Cache* first = cache->UnderlyingCache();
  ASSERT_TRUE(cache->SetLayerType(1).ok());
  ASSERT_TRUE(cache->AddSequence(1, parked).ok());
  EXPECT_EQ(cache->UnderlyingCache(), first);
  const int cells[] = {6, 6};
  EXPECT_TRUE(*cache->Snapshot() == *WithSequence(before, 1, parked, cells));
  half = parked;
  for (CellEntry& entry : half.caches[0].cells) entry.sequence = 5;
  EXPECT_FALSE(WithSequence(before, 1, half, cells).ok());
}

// A layer that exists on one side only has zero rows for the other's tokens.
TEST_F(Save, ASequenceMayHaveOtherLayers) {
  const CacheState state = OfLayers({0, 1}, 2);
  const CacheState added = OfLayers({1, 2}, 3);
  const int cells[] = {5};
  const CacheState both = *WithSequence(state, 4, added, cells);
  ASSERT_EQ(both.layers.size(), 3U);
  const std::vector<float> sums = {2, 5, 3};
  for (const int layer : {0, 1, 2}) {
    const TensorView key = both.layers.at(layer).key.view();
    EXPECT_EQ(key.shape, (Shape{2, 2, 5, 1}));
    float sum = 0;
    for (int i = 0; i < 5; ++i) sum += LoadElement(key.at(1, 1, i), key.dtype);
    EXPECT_EQ(sum, At(sums, layer));
  }
  EXPECT_EQ(SequenceOf(both, 4).cells.size(), 3U);
  EXPECT_TRUE(SequenceOf(both, 9).cells.empty());
  EXPECT_TRUE(*WithSequence(state, 4, SequenceOf(both, 9), cells) == state);
  for (const Shape& shape : {Shape{1, 2, 3, 1}, Shape{2, 1, 3, 1}}) {
    CacheState other = added;
    other.layers[1].key = FilledTensor(DType::kF32, shape, 1);
    EXPECT_FALSE(WithSequence(state, 4, other, cells).ok());
    other.layers[1].key = added.layers.at(1).key;
    other.layers[1].value = FilledTensor(DType::kF32, shape, 1);
    EXPECT_FALSE(WithSequence(state, 4, other, cells).ok());
  }
  EXPECT_FALSE(WithSequence(state, -1, added, cells).ok());
  CacheState odd = state;
  odd.cells.push_back({9, 0, 0});  // A token without rows.
  const int many[] = {99};
  EXPECT_FALSE(WithSequence(odd, 4, added, many).ok());
  EXPECT_TRUE(WithSequence(state, 4, added, many).ok());
  EXPECT_FALSE(WithSequence(state, 4, added, {}).ok());
}

TEST_F(Save, ASequenceOfAWrapperIsInAllItsCaches) {
  CacheState wrapper;
  wrapper.caches = {OfLayers({0}, 2), OfLayers({1}, 3)};
  const CacheState state = SequenceOf(wrapper, 1);
  EXPECT_TRUE(state == wrapper);
  const int cells[] = {4, 6};
  const auto both = WithSequence(wrapper, 2, state, cells);
  ASSERT_TRUE(both.ok()) << both.status().ToString();
  EXPECT_EQ(both->caches[1].cells.size(), 6U);
  const int few[] = {4, 5};
  EXPECT_EQ(WithSequence(wrapper, 2, state, few).status().code(),
            StatusCode::kCacheFull);
}

// A state that some program made: its rows may be shorter than their shapes, or
// fewer than the cells.
TEST_F(Save, AStateWithoutAllItsRowsHasNoSequences) {
  const CacheState whole = OfLayers({0}, 2);
  ASSERT_FALSE(SequenceOf(whole, 1).cells.empty());
  std::vector<CacheState> states(4, whole);
  states[0].layers[0].key.bytes.resize(1);
  states[1].layers[0].value.bytes.clear();
  for (DenseTensor* tensor :
       {&states[2].layers[0].key, &states[2].layers[0].value}) {
    *tensor = FilledTensor(DType::kF32, {2, 2, 1, 1}, 1);
  }
  states[3].layers[0].key = {};
  for (const CacheState& state : states) {
    EXPECT_TRUE(SequenceOf(state, 1) == CacheState());
    CacheState wrapper;
    wrapper.caches = {whole, state};
    EXPECT_TRUE(SequenceOf(wrapper, 1) == CacheState());
  }
}

// A checksum is computed in parts of 1 MiB.
TEST_F(Save, StatesAroundAMebibyte) {
  for (const int tokens : {127, 128, 129, 255, 256, 257, 513}) {
    CacheState state;
    DenseTensor key = FilledTensor(DType::kF32, {1024, 1, tokens, 1}, 1);
    for (std::size_t i = 0; i < key.bytes.size(); i += 1 << 12) {
      key.bytes[i] = static_cast<std::byte>(i >> 12);
    }
    for (int i = 0; i < tokens; ++i) state.cells.push_back({i, i, 0});
    state.layers[0] = {key, FilledTensor(DType::kF32, {1024, 1, tokens, 1}, 2)};
    ASSERT_TRUE(SaveState(state, Path()).ok());
    const Result<CacheState> loaded = LoadState(Path());
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_TRUE(*loaded == state);
    std::vector<std::byte> bytes = StateToBytes(state);
    EXPECT_TRUE(*StateFromBytes(bytes) == state);
    for (const std::size_t from_end : {1U, 1U << 12, 1U << 19}) {
      std::byte& spoiled = bytes[bytes.size() - from_end];
      spoiled ^= std::byte{1};
      EXPECT_FALSE(StateFromBytes(bytes).ok()) << tokens << " " << from_end;
      spoiled ^= std::byte{1};
    }
  }
  // A checksum covers every byte of a tensor of many parts.
  constexpr std::size_t kPart = std::size_t{1} << 20;
  const DenseTensor many = FilledTensor(DType::kF32, {1 << 18, 1, 21, 1}, 1);
  CacheState state;
  for (int i = 0; i < 21; ++i) state.cells.push_back({i, i, 0});
  state.layers[0] = {many, FilledTensor(DType::kF32, {1, 1, 21, 1}, 2)};
  std::vector<std::byte> bytes = StateToBytes(state);
  ASSERT_TRUE(*StateFromBytes(bytes) == state);
  const std::size_t end = bytes.size() - 21 * sizeof(float);  // The end of K.
  for (std::size_t from_end = 1; from_end < many.bytes.size();
       from_end += kPart / 2) {
    std::byte& spoiled = bytes[end - from_end];
    spoiled ^= std::byte{1};
    EXPECT_FALSE(StateFromBytes(bytes).ok()) << from_end;
    spoiled ^= std::byte{1};
  }
}

}  // namespace
}  // namespace kvtwin::props
