// Conversations on disk, and folders with files that are damaged, forged or of
// others.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/save.h"
#include "kvtwin/serving.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"
#include "props/unit/include/parking_server.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST_F(Parked, AConversationOutlivesItsServer) {
  const Prompt prompt = PromptOf({5, 6, 7, 8, 9});
  ParkedFile(prompt);
  const auto parking = Open();
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 1}));
  EXPECT_EQ(Unparked(*parking, prompt), 5);
  EXPECT_EQ(Unparked(*parking, PromptOf({5, 6, 7, 8, 9, 10, 11})), 5);
  EXPECT_EQ(Unparked(*parking, PromptOf({5, 6, 7, 1})), 3);
  EXPECT_EQ(Unparked(*parking, PromptOf({5, 6, 7, 1}), 4), 0);
  EXPECT_EQ(Unparked(*parking, PromptOf({6, 5})), 0);
  EXPECT_EQ(Unparked(*parking, {}), 0);
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 1, .loaded = 3}));

  // The session continues as if it had computed the prefix itself.
  ParkingServer server;
  EXPECT_EQ(*parking->Unpark(server.sessions(), server.cache(), 0, prompt, 1),
            5);
  const Prompt longer = PromptOf({5, 6, 7, 8, 9, 10, 11});
  const int slot = server.Compute(longer);
  EXPECT_EQ(slot, 0);
  EXPECT_EQ(server.Rows(slot), RowsOfPrompt(longer, 7));
  EXPECT_EQ(server.sessions().Gauges().hit_tokens, 5);
}

TEST_F(Parked, TheLongestCommonPrefixIsLoaded) {
  const auto parking = Open();
  ParkAll(*parking,
          {PromptOf({1, 2, 3}), PromptOf({1, 2, 4, 5}), PromptOf({2, 2})});
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 4, 5, 6})), 4);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3, 5, 6})), 3);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 7})), 1);
}

TEST_F(Parked, AConversationReplacesItsBeginning) {
  const auto parking = Open();
  ParkAll(*parking, {PromptOf({1, 2}), PromptOf({3}), PromptOf({1, 2, 3})});
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 2, .written = 3}));
  EXPECT_EQ(Files().size(), 2);
  // Nothing is written for a part of it.
  ParkAll(*parking, {PromptOf({1, 2}), PromptOf({1, 2, 3})});
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 2, .written = 3}));
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 3);
}

TEST_F(Parked, TheOldestLeavesOverTheLimit) {
  {
    const auto parking = Open(3);
    ParkAll(*parking,
            {PromptOf({1}), PromptOf({2}), PromptOf({3}), PromptOf({4})});
    EXPECT_EQ(parking->Gauges().parked, 3);
    EXPECT_EQ(Files().size(), 3);
    EXPECT_EQ(Unparked(*parking, PromptOf({1})), 0);
    EXPECT_EQ(Unparked(*parking, PromptOf({2})), 1);
  }
  // A smaller limit holds from the next file on.
  const auto parking = Open(1);
  EXPECT_EQ(parking->Gauges().parked, 3);
  ParkAll(*parking, {PromptOf({5})});
  EXPECT_EQ(Files().size(), 1);
  EXPECT_EQ(Unparked(*parking, PromptOf({5})), 1);
}

TEST_F(Parked, AFolderMayEndWithASlash) {
  ParkingSpec spec = Spec();
  spec.folder += "/";
  spec.limit = 2;
  for (const int first : {1, 3}) {
    const auto parking = *MakeParkingLot(spec);
    ParkAll(*parking, {PromptOf({first}), PromptOf({first + 1})});
  }
  const auto parking = *MakeParkingLot(spec);
  EXPECT_EQ(Unparked(*parking, PromptOf({1})), 0);
  EXPECT_EQ(Unparked(*parking, PromptOf({2})), 0);
  EXPECT_EQ(Unparked(*parking, PromptOf({3})), 1);
  EXPECT_EQ(Unparked(*parking, PromptOf({4})), 1);
}

// Files that were written before the clock was set back are the older ones.
TEST_F(Parked, TheClockMayBeSetBack) {
  {
    const auto parking = Open(2);
    ParkAll(*parking, {PromptOf({1}), PromptOf({2})});
  }
  const std::vector<std::string> files = Files();
  for (const char* name : {"08999999999999999998", "08999999999999999999"}) {
    fs::rename(At(files, name[19] - '8'),
               fmt::format("{}/{}.safetensors", Spec().folder, name));
  }
  const auto parking = Open(2);
  ParkAll(*parking, {PromptOf({3}), PromptOf({4}), PromptOf({5})});
  EXPECT_EQ(Unparked(*parking, PromptOf({2})), 0);
  EXPECT_EQ(Unparked(*parking, PromptOf({3})), 0);
  EXPECT_EQ(Unparked(*parking, PromptOf({4})), 1);
  EXPECT_EQ(Unparked(*parking, PromptOf({5})), 1);
}

TEST_F(Parked, InputsThatAreNotTextAreKept) {
  Prompt prompt = PromptOf({1, 2, 3, 4});
  prompt[1].multimodal = ~std::uint64_t{0};
  prompt[1].same_batch = 2;
  ParkedFile(prompt);
  const auto parking = Open();
  EXPECT_EQ(Unparked(*parking, prompt), 4);
  // A group of inputs is loaded as a whole, or left out.
  Prompt other = prompt;
  other[3].token = 9;
  EXPECT_EQ(Unparked(*parking, other), 1);
  EXPECT_EQ(Unparked(*parking, other, 2), 0);
  other = prompt;
  other[1].multimodal = 5;
  EXPECT_EQ(Unparked(*parking, other), 1);
}

// An input with `multimodal` or `same_batch` differs from the plain token.
TEST_F(Parked, AnImageIsNotAToken) {
  const Prompt text = PromptOf({1, 2, 3, 4});
  Prompt image = text, group = text;
  image[2].multimodal = 7;
  group[2].same_batch = 1;
  for (const Prompt& prompt : {image, group}) {
    fs::remove_all(Spec().folder);
    ParkedFile(prompt);
    const auto parking = Open();
    EXPECT_EQ(Unparked(*parking, text), 2);
    EXPECT_EQ(Unparked(*parking, prompt), 4);
  }
}

TEST_F(Parked, OtherModelsAndRowsAreLeftAlone) {
  const Prompt prompt = PromptOf({1, 2, 3});
  ParkedFile(prompt);
  for (const auto& [model, rows] :
       std::vector<std::pair<std::string, DType>>{{"m 2", DType::kF32},
                                                  {"m", DType::kF32},
                                                  {"m 1\nf32", DType::kF32},
                                                  {"m 1", DType::kF16},
                                                  {"m 1", DType::kQ8},
                                                  {"", DType::kF32}}) {
    ParkingSpec spec = Spec();
    spec.model = model;
    spec.rows = rows;
    const auto parking = *MakeParkingLot(spec);
    EXPECT_EQ(parking->Gauges().parked, 0) << model;
    EXPECT_EQ(Unparked(*parking, prompt), 0) << model;
  }
  EXPECT_EQ(Files().size(), 1);
  // Rows of another dtype are not parked.
  for (const auto& [rows, v_rows, found] :
       {std::tuple(DType::kF16, DType::kF16, "of f16,"),
        std::tuple(DType::kF32, DType::kBF16, "of f32 and bf16,")}) {
    ParkingServer server({}, rows, v_rows);
    const int slot = server.Compute(PromptOf({4}));
    const Status status = Open()->Park(server.sessions(), server.cache(), slot);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(found));
  }
  ParkingServer server(
      {.kind = Kind::kWrapper,
       .caches = {{.kind = Kind::kCausal}, {.kind = Kind::kSwa, .window = 3}}},
      DType::kF16);
  const int slot = server.Compute(PromptOf({4}));
  const Status status = Open()->Park(server.sessions(), server.cache(), slot);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Files().size(), 1);
}

TEST_F(Parked, VRowsMayHaveAnotherDType) {
  const Prompt prompt = PromptOf({1, 2, 3});
  ParkingSpec spec = Spec();
  spec.rows = DType::kF16;
  spec.v_rows = DType::kF32;
  {
    const auto parking = *MakeParkingLot(spec);
    ParkingServer server({}, DType::kF16, DType::kF32);
    const int slot = server.Compute(prompt);
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  }
  ParkingServer server({}, DType::kF16, DType::kF32);
  const auto parking = *MakeParkingLot(spec);
  EXPECT_EQ(*parking->Unpark(server.sessions(), server.cache(), 1, prompt, 1),
            3);
  EXPECT_EQ(server.Rows(1), RowsOfPrompt(prompt, 3));
  // A cache whose V rows have the dtype of K leaves the file alone.
  spec.v_rows = {};
  EXPECT_EQ((*MakeParkingLot(spec))->Gauges().parked, 0);
}

// A sliding window holds the last tokens. Tokens after which it cannot resume
// are not loaded.
TEST_F(Parked, LoadsWhatTheCacheCanResumeAfter) {
  const CacheSpec spec = {.kind = Kind::kSwa, .window = 2};
  const Prompt prompt = PromptOf({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  const auto parking = Open();
  ParkingServer server(spec);
  const int slot = server.Compute(prompt);
  ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  for (const auto& [common, loaded] : {std::pair(12, 12), std::pair(3, 0)}) {
    Prompt next = prompt;
    next.resize(AsSize(common));
    next.push_back({99});
    ParkingServer other(spec);
    const Result<int> tokens =
        parking->Unpark(other.sessions(), other.cache(), 0, next, 1);
    ASSERT_TRUE(tokens.ok()) << tokens.status().ToString();
    EXPECT_EQ(*tokens, loaded);
    other.Compute(next);
    EXPECT_EQ(other.sessions().Gauges().hit_tokens, loaded);
  }
  // A file that cannot be loaded is not read again.
  fs::remove(Files().front());
  ParkingServer other(spec);
  for (const auto& [common, tokens] :
       {std::pair(2, 0), std::pair(3, 0), std::pair(4, -1)}) {
    const Prompt next(prompt.begin(), prompt.begin() + common);
    const bool reads = tokens != 0;
    EXPECT_EQ(parking->Fetch(next, 1, true) != Fetched::kNothing, reads);
    EXPECT_EQ(
        TokensOf(parking->Unpark(other.sessions(), other.cache(), 0, next, 1)),
        tokens);
  }
}

// A window holds the tokens of its last batch until the next pass: a cache can
// be full while a slot is free.
TEST_F(Parked, AFullCacheForgetsNothing) {
  const CacheSpec spec = {.kind = Kind::kSwaMem, .window = 4, .memory = 10};
  std::vector<int> tokens(16);
  for (int i = 0; i < 16; ++i) At(tokens, i) = 1 + i;
  const Prompt prompt = PromptOf(tokens);
  const auto parking = Open();
  ParkingServer before(spec), after(spec);
  int slot = before.Compute(prompt);
  ASSERT_TRUE(parking->Park(before.sessions(), before.cache(), slot).ok());
  slot = after.Compute(Prompt(16, SessionInput{99}));
  const auto unpark = [&] {
    const Result<int> loaded =
        parking->Unpark(after.sessions(), after.cache(), 1 - slot, prompt, 1);
    EXPECT_TRUE(CheckSessions(after.sessions(), after.cache()).ok());
    EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
    const int reusable = after.sessions().Slot(1 - slot)->reusable;
    EXPECT_TRUE(!loaded.ok() || reusable == *loaded);
    return reusable;
  };
  EXPECT_EQ(unpark(), 0);
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 1, .written = 1}));
  slot = after.Compute(PromptOf({99, 99}));
  EXPECT_EQ(unpark(), 16);
  EXPECT_EQ(parking->Gauges(),
            (ParkingGauges{.parked = 1, .written = 1, .loaded = 1}));
}

// A server with fewer cells: the file is read once, and another takes its
// place.
TEST_F(Parked, AConversationThatNeverFitsIsLeftAlone) {
  const CacheSpec causal, swa = {.kind = Kind::kSwa, .window = 3};
  constexpr SessionsSpec kSmall = {.slots = 1, .context = 8, .batch = 8};
  const Prompt longer = PromptOf({1, 2, 3, 4, 5, 6, 7, 8, 9});
  const Prompt shorter = PromptOf({1, 2, 3, 9}), part = PromptOf({1, 2, 3, 4});
  for (const CacheSpec& spec : std::vector<CacheSpec>{
           causal,
           {.kind = Kind::kWrapper, .caches = {swa, causal}},
           {.kind = Kind::kWrapper, .caches = {causal, swa}}}) {
    fs::remove_all(Spec().folder);
    const auto parking = Open();
    for (const Prompt& prompt : {longer, shorter}) {
      ParkingServer server(spec);
      const int slot = server.Compute(prompt);
      EXPECT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
    }
    EXPECT_TRUE(parking->Wait().ok());
    ParkingServer small(spec, DType::kF32, {}, kSmall);
    const auto unpark = [&](int least) {
      return TokensOf(
          parking->Unpark(small.sessions(), small.cache(), 0, part, least));
    };
    EXPECT_EQ(unpark(1), 0);
    fs::remove(Files().front());
    EXPECT_EQ(parking->Fetch(part, 4, true), Fetched::kNothing);
    EXPECT_EQ(unpark(4), 0);
    EXPECT_EQ(unpark(1), 3);
    EXPECT_EQ(parking->Gauges(),
              (ParkingGauges{.parked = 2, .written = 2, .loaded = 1}));
    // Its beginning is parked beside it.
    const int slot = small.Compute(part);
    EXPECT_TRUE(parking->Park(small.sessions(), small.cache(), slot).ok());
    EXPECT_TRUE(parking->Wait().ok());
    EXPECT_EQ(unpark(4), 4);
  }
}

// A recurrent cache has states of some tokens, and after a stop string not that
// of the last one.
TEST_F(Parked, StatesAreLoaded) {
  const CacheSpec recurrent = {
      .kind = Kind::kRecurrent, .checkpoint_every = 4, .checkpoints = 4};
  const CacheSpec hybrid = {.kind = Kind::kHybrid,
                            .caches = {recurrent, {.kind = Kind::kCausal}}};
  const Prompt prompt = PromptOf({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (const CacheSpec& spec : {recurrent, hybrid}) {
    for (const auto& [removed, loaded] : std::map<int, int>{{0, 10}, {2, 8}}) {
      fs::remove_all(Spec().folder);
      const auto parking = Open();
      ParkingServer before(spec), after(spec);
      const int slot = before.Compute(prompt, removed);
      ASSERT_TRUE(parking->Park(before.sessions(), before.cache(), slot).ok());
      const Result<int> tokens =
          parking->Unpark(after.sessions(), after.cache(), 1, prompt, 1);
      ASSERT_TRUE(tokens.ok()) << tokens.status().ToString();
      EXPECT_EQ(*tokens, loaded);
      EXPECT_TRUE(*after.cache().CanResume(1, loaded));
    }
  }
}

// The only state is that of a stop string: nothing is left to be parked.
TEST_F(Parked, NoTokensMakeNoFile) {
  const auto parking = Open();
  ParkingServer server(
      {.kind = Kind::kRecurrent, .checkpoint_every = 4, .checkpoints = 4});
  const int slot = server.Compute(PromptOf({1, 2}), 2);
  EXPECT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  EXPECT_TRUE(parking->Wait().ok());
  EXPECT_EQ(parking->Gauges(), ParkingGauges());
  EXPECT_TRUE(Files().empty());
}

// An encoder takes one sequence, which cannot be copied.
TEST_F(Parked, AllKindsAreLoaded) {
  const CacheSpec causal, swa = {.kind = Kind::kSwa, .window = 3};
  const CacheSpec recurrent = {
      .kind = Kind::kRecurrent, .checkpoint_every = 4, .checkpoints = 2};
  const CacheSpec encoder = {.kind = Kind::kEncoder};
  const SessionsSpec sizes = {.slots = 1, .context = 16, .batch = 8};
  const Prompt longer = PromptOf({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  const Prompt prompt(longer.begin(), longer.end() - 1);
  for (const CacheSpec& spec : std::vector<CacheSpec>{
           causal,
           swa,
           {.kind = Kind::kSwa, .window = 0},
           {.kind = Kind::kSwaMem, .window = 3, .memory = 5},
           {.kind = Kind::kChunked, .chunk = 4},
           recurrent,
           {.kind = Kind::kWrapper, .caches = {causal, swa}},
           {.kind = Kind::kWrapper, .caches = {encoder, causal}},
           {.kind = Kind::kHybrid, .caches = {causal, swa, recurrent}}}) {
    fs::remove_all(Spec().folder);
    const auto parking = Open();
    ParkingServer before(spec, DType::kF32, {}, sizes);
    ParkingServer after(spec, DType::kF32, {}, sizes);
    before.Compute(prompt);
    ASSERT_TRUE(parking->Park(before.sessions(), before.cache(), 0).ok());
    after.Compute(PromptOf({1, 2, 11, 12}));
    const Result<int> loaded =
        parking->Unpark(after.sessions(), after.cache(), 0, prompt, 1);
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_EQ(*loaded, 10);
    EXPECT_TRUE(*after.cache().CanResume(0, 10));
    const Result<bool> cached = after.cache().EncoderCached();
    EXPECT_FALSE(cached.ok() && *cached);
    after.Compute(longer);
    EXPECT_EQ(after.sessions().Gauges().hit_tokens, 10);
  }
}

// A state that divides a group of inputs is passed over.
TEST_F(Parked, AGroupIsNotDividedByStates) {
  const CacheSpec spec = {
      .kind = Kind::kHybrid,
      .caches = {
          {.kind = Kind::kCausal},
          {.kind = Kind::kRecurrent, .checkpoint_every = 2, .checkpoints = 4}}};
  Prompt prompt = PromptOf({1, 2, 3, 4, 5, 6, 7, 8});
  prompt[5].same_batch = 2;  // The state of 6 inputs divides the group.
  const auto parking = Open();
  ParkingServer before(spec), after(spec);
  const int slot = before.Compute(prompt);
  ASSERT_TRUE(parking->Park(before.sessions(), before.cache(), slot).ok());
  prompt[7].token = 99;
  const Result<int> loaded =
      parking->Unpark(after.sessions(), after.cache(), 1, prompt, 1);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  EXPECT_EQ(*loaded, 4);
  EXPECT_TRUE(*after.cache().CanResume(1, 4));
  EXPECT_EQ(after.sessions().Slot(1)->reusable, 4);
  const Status status = CheckSessions(after.sessions(), after.cache());
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(Parked, AFileThatIsDamagedIsForgotten) {
  const Prompt prompt = PromptOf({1, 2, 3});
  const std::string file = ParkedFile(prompt);
  const std::string whole = ReadFile(file);
  std::string flipped = whole;
  flipped.back() ^= 1;
  for (const std::string& damaged :
       {whole.substr(0, whole.size() - 1), flipped, whole + "x"}) {
    const auto parking = Open();
    ASSERT_EQ(parking->Gauges().parked, 1);
    std::ofstream(file, std::ios::binary) << damaged;
    EXPECT_EQ(Unparked(*parking, prompt), -1);
    EXPECT_THAT(error_, HasSubstr(file));
    EXPECT_EQ(parking->Gauges(), (ParkingGauges{.failed = 1}));
    EXPECT_EQ(Unparked(*parking, prompt), 0);
    std::ofstream(file, std::ios::binary) << whole;
  }
  // A file that vanishes.
  const auto parking = Open();
  fs::remove(file);
  EXPECT_EQ(Unparked(*parking, prompt), -1);
}

TEST_F(Parked, AFolderMayHoldAnything) {
  const Prompt prompt = PromptOf({1, 2, 3});
  const std::string file = ParkedFile(prompt);
  const std::string folder = Spec().folder, whole = ReadFile(file);
  for (std::size_t size = 0; size < 100; ++size) {
    std::ofstream(fmt::format("{}/cut{}", folder, size), std::ios::binary)
        << whole.substr(0, size);
  }
  fs::create_directory(folder + "/folder.safetensors");
  fs::create_symlink("nothing", folder + "/nothing.safetensors");
  fs::create_symlink(folder, folder + "/loop.safetensors");
  ASSERT_EQ(mkfifo((folder + "/pipe.safetensors").c_str(), 0600), 0);
  std::ofstream(folder + "/unreadable") << whole;
  fs::permissions(folder + "/unreadable", fs::perms::none);
  const CacheState state = *LoadState(file, *ModelOf(file));
  for (const std::string label :
       {"m 1\nf32\n1 2 x ", "m 1\nf32\n-1 ", "m 1\nf32\n1", "m 1\nf32\n01 ",
        "m 1\nf32\n1  2 ", "m 1\nf32\n99999999999 ", "m 1\nf32\n1:2 ",
        "m 1\nf32\n1:0:0 ", "m 1\nf32\n1:5:-1x ", "m 1\nf32", "m 1", "", "\n",
        "m 1\nf32\n \n", "m 1\nf32\n1:2:3:4 "}) {
    ASSERT_TRUE(SaveState(state, folder + "/label" + label, label).ok() ||
                label.find('\n') == std::string::npos);
  }
  const std::size_t files = Files().size();
  const auto parking = Open();
  // As root, the file that is not readable is the same conversation again.
  EXPECT_EQ(parking->Gauges().parked, geteuid() == 0 ? 2 : 1);
  EXPECT_EQ(Unparked(*parking, prompt), 3);
  EXPECT_EQ(Files().size(), files);
}

// Returns a state, whose rows are single floats, without a position.
CacheState Without(CacheState state, int position) {
  const auto cell =
      std::ranges::find(state.cells, position, &CellEntry::position);
  const auto index = cell - state.cells.begin();
  for (auto& [layer, rows] : state.layers) {
    for (DenseTensor* tensor : {&rows.key, &rows.value}) {
      --tensor->shape[2];
      const auto at = IteratorAt(tensor->bytes, 4 * index);
      tensor->bytes.erase(at, at + 4);
    }
  }
  state.cells.erase(cell);
  return state;
}

// Files that are whole, but do not hold what their labels say.
TEST_F(Parked, AForgedLabelIsNoticed) {
  const std::string file = ParkedFile(PromptOf({1, 2, 3}));
  const CacheState whole = *LoadState(file, *ModelOf(file));
  CacheState twice = whole;
  twice.cells[2].position = 1;
  for (const auto& [state, label] :
       std::vector<std::pair<CacheState, int>>{{whole, 5},
                                               {Without(whole, 0), 3},
                                               {Without(whole, 1), 3},
                                               {twice, 2},
                                               {CacheState(), 3}}) {
    std::string tokens;
    for (int i = 1; i <= label; ++i) tokens += std::to_string(i) + " ";
    ASSERT_TRUE(SaveState(state, file, "m 1\nf32\n" + tokens).ok());
    const auto parking = Open();
    ASSERT_EQ(parking->Gauges().parked, 1);
    EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3, 4, 5})), -1) << tokens;
    EXPECT_EQ(parking->Gauges().failed, 1);
  }
}

// A state lacks a position in the middle: in a window, or in one cache of a
// wrapper.
TEST_F(Parked, AHoleIsNoticed) {
  const CacheSpec causal, swa = {.kind = Kind::kSwa, .window = 4};
  const Prompt prompt = PromptOf({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  for (const CacheSpec& spec : std::vector<CacheSpec>{
           swa,
           {.kind = Kind::kWrapper, .caches = {causal, swa}},
           {.kind = Kind::kWrapper, .caches = {swa, causal}}}) {
    // Without a part to damage, -1, every cache is whole.
    for (int part = std::max(Size(spec.caches), 1) - 1; part >= -1; --part) {
      fs::remove_all(Spec().folder);
      ParkingServer before(spec), after(spec);
      const int slot = before.Compute(prompt);
      ASSERT_TRUE(Open()->Park(before.sessions(), before.cache(), slot).ok());
      const std::string file = Files().front(), label = *ModelOf(file);
      CacheState state = *LoadState(file, label);
      if (part >= 0) {
        CacheState& holed =
            state.caches.empty() ? state : At(state.caches, part);
        holed = Without(std::move(holed), 10);
      }
      ASSERT_TRUE(SaveState(state, file, label).ok());
      EXPECT_EQ(TokensOf(Open()->Unpark(after.sessions(), after.cache(), 1,
                                        prompt, 1)),
                part < 0 ? 12 : -1)
          << part;
    }
  }
}

// A label names fewer tokens than its file has, as after a stop string.
TEST_F(Parked, AFileMayHaveMoreThanItsLabel) {
  constexpr SessionsSpec kLong = {.slots = 2, .context = 512, .batch = 512};
  const Prompt prompt(500, SessionInput{3});
  ParkingServer before({}, DType::kF32, {}, kLong);
  {
    const auto parking = Open();
    const int slot = before.Compute(prompt);
    ASSERT_TRUE(parking->Park(before.sessions(), before.cache(), slot).ok());
  }
  const std::string file = Files().front();
  ASSERT_TRUE(
      SaveState(*LoadState(file, *ModelOf(file)), file, "m 1\nf32\n3 3 3 ")
          .ok());
  ParkingServer after({}, DType::kF32, {}, kLong);
  EXPECT_EQ(TokensOf(Open()->Unpark(after.sessions(), after.cache(), 1,
                                    PromptOf({3, 3, 3, 4}), 1)),
            3);
  EXPECT_EQ(after.Rows(1).size(), 3);
}

// The state of a server with a larger context.
TEST_F(Parked, ALongerContextIsCut) {
  std::vector<int> tokens(16);
  for (int i = 0; i < 16; ++i) At(tokens, i) = 100 + i;
  const std::string file = ParkedFile(PromptOf(tokens));
  constexpr SessionsSpec kSmall = {.slots = 2, .context = 8, .batch = 8};
  const auto cache = *MakeCache({});
  ASSERT_TRUE(cache->Init(InitOf(kSmall, DType::kF32)).ok());
  const auto sessions = *MakeSessions(*cache, kSmall);
  const auto parking = Open();
  const Result<int> loaded =
      parking->Unpark(*sessions, *cache, 0, PromptOf(tokens), 1);
  ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
  EXPECT_EQ(*loaded, 8);
  EXPECT_EQ(CountCells(*cache).used, 8);
}

TEST_F(Parked, MisuseIsRefused) {
  ParkingSpec spec = Spec();
  for (const auto& [change, message] :
       std::vector<std::pair<void (*)(ParkingSpec&), std::string>>{
           {[](ParkingSpec& s) { s.folder = ""; }, "the folder has no name"},
           {[](ParkingSpec& s) { s.folder += '\0'; }, "NUL"},
           {[](ParkingSpec& s) { s.limit = 0; }, "limit is 0"},
           {[](ParkingSpec& s) { s.model = "m\xe9"; },
            "model is 'm\\xe9', it must be UTF-8"},
           {[](ParkingSpec& s) { s.rows = DType::kBits; }, "rows is bits"},
           {[](ParkingSpec& s) { s.v_rows = DType::kBits; },
            "v_rows is bits"}}) {
    ParkingSpec wrong = spec;
    change(wrong);
    EXPECT_THAT(MakeParkingLot(wrong).status().message(), HasSubstr(message));
  }
  const auto parking = Open();
  ParkingServer server;
  const int request = *server.sessions().Submit(PromptOf({1}));
  ASSERT_TRUE(server.sessions().NextBatch().ok());
  const int used = server.sessions().Request(request)->slot;
  for (const int slot : {-1, 2, used}) {
    EXPECT_FALSE(parking->Park(server.sessions(), server.cache(), slot).ok());
    EXPECT_FALSE(
        parking
            ->Unpark(server.sessions(), server.cache(), slot, PromptOf({1}), 1)
            .ok());
  }
  EXPECT_EQ(parking->Gauges(), ParkingGauges());
  // An empty slot has nothing to park.
  EXPECT_TRUE(parking->Park(server.sessions(), server.cache(), 1 - used).ok());
  EXPECT_TRUE(Files().empty());
}

TEST_F(Parked, AFolderThatCannotBeMadeIsRefused) {
  const std::string file = folder_.File("file");
  std::ofstream(file) << "x";
  for (const std::string& folder :
       {file, file + "/below", std::string("/proc/nothing")}) {
    ParkingSpec spec = Spec();
    spec.folder = folder;
    const Result<std::unique_ptr<ParkingLot>> parking = MakeParkingLot(spec);
    EXPECT_EQ(parking.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(parking.status().message(), HasSubstr(folder));
  }
}

}  // namespace
}  // namespace kvtwin::props
