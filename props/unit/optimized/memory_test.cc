// Memory is linear in what is stored now, and does not grow with the past.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/huge_pages.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/save.h"
#include "kvtwin/sessions.h"
#include "optimized/aligned_buffer.h"
#include "props/unit/optimized/allocations.h"

namespace kvtwin::props {
namespace {

constexpr int kLayers = 2;

std::vector<float> Numbers() { return std::vector<float>(64, 1.5F); }

// Many sequences --------------------------------------------------------------

struct Many {
  CacheSpec spec;
  int sequences = 0;
  int tokens = 1;  // In each sequence. The sequences take turns.
};

// The bytes for each sequence, of the cache and all that it allocated.
double BytesForEach(const Many& what) {
  const std::vector<float> numbers = Numbers();
  const TensorView row = DenseView(numbers.data(), DType::kF16, {1, 1, 1, 1});
  const std::int64_t before = live_bytes;
  const std::unique_ptr<Cache> cache = *MakeCache(what.spec);
  EXPECT_TRUE(cache->Init({DType::kF16, what.sequences, 16, 1}).ok());
  bool done = true;
  for (int position = 0; position < what.tokens; ++position) {
    for (int sequence = 0; sequence < what.sequences; ++sequence) {
      done = done &&
             cache
                 ->StartForward(
                     {.positions = {&position, 1}, .sequences = {&sequence, 1}},
                     /*reserve=*/false)
                 .ok() &&
             cache->Put(row, row).ok() && cache->Get().ok();
    }
  }
  EXPECT_TRUE(done);
  return static_cast<double>(live_bytes - before) / what.sequences;
}

void ExpectLinear(Many what, int max = 20'000) {
  what.sequences = 1000;
  const double few = BytesForEach(what);
  what.sequences = max;
  const double many = BytesForEach(what);
  EXPECT_LE(few, 4096);
  EXPECT_LE(many, 4096);
  EXPECT_LE(many, 1.25 * few);
}

CacheSpec SpecOf(Kind kind, Placement placement = Placement::kContiguous) {
  CacheSpec spec;
  spec.kind = kind;
  spec.placement = placement;
  spec.shift.kind = ShiftKind::kAdd;
  spec.window = 3;
  spec.memory = 5;
  spec.chunk = 3;
  return spec;
}

CacheSpec Scattered(Kind kind) { return SpecOf(kind, Placement::kScatter); }

TEST(Memory, IsLinearInSequencesOfOneToken) {
  ExpectLinear({.spec = SpecOf(Kind::kCausal)});
  ExpectLinear({.spec = Scattered(Kind::kCausal)});
  // Each pass looks at all sequences.
  ExpectLinear({.spec = Scattered(Kind::kSwa)}, 5000);
}

// Each sequence's tokens lie far apart.
TEST(Memory, IsLinearInSequencesThatGrowInTurns) {
  ExpectLinear({.spec = Scattered(Kind::kCausal), .tokens = 4});
}

// Each sequence in turn gets a fifth of the cells, and then keeps one token
// only. (While it is long, it may keep a bit for every cell.)
TEST(Memory, IsGivenBackBySequencesThatBecomeShort) {
  constexpr int kBatch = 500;
  constexpr int kCapacity = 40'000;
  std::vector<std::int32_t> positions(kBatch);
  std::vector<int> sequences(kBatch);
  const std::unique_ptr<Cache> cache = *MakeCache({});
  CacheConfig config;
  config.mask_dtype = DType::kBits;
  ASSERT_TRUE(cache->SetConfig(config).ok());
  ASSERT_TRUE(cache->Init({DType::kF16, 1, kCapacity, kBatch}).ok());
  const auto turn = [&](int sequence) {
    bool done = true;
    std::ranges::fill(sequences, sequence);
    for (std::int32_t at = 0; at < kCapacity / 5; at += kBatch) {
      std::ranges::generate(positions,
                            [next = at]() mutable { return next++; });
      done = done && cache->StartForward({positions, sequences}, false).ok();
    }
    return done && cache->Remove(sequence, 1, kOpenEnd).ok();
  };
  bool done = true;
  for (int sequence = 0; sequence < 10; ++sequence) {
    done = done && turn(sequence);
  }
  const std::int64_t before = live_bytes;
  for (int sequence = 10; sequence < 30; ++sequence) {
    done = done && turn(sequence);
  }
  EXPECT_TRUE(done);
  EXPECT_LE((live_bytes - before) / 20, 1024);
}

// The last sequence that ended keeps its memory for the next; the others do
// not.
TEST(Memory, IsGivenBackBySequencesThatEnd) {
  constexpr int kTokens = 8'000;
  constexpr int kCopies = 30;
  const std::unique_ptr<Cache> cache = *MakeCache({});
  ASSERT_TRUE(cache->Init({DType::kF16, 1, 5 * kTokens, kTokens}).ok());
  std::vector<std::int32_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int> sequences(kTokens, 0);
  ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  const auto copy_and_end = [&](int count) {
    bool done = true;
    for (int copy = 1; copy <= count; ++copy) {
      done = done && cache->CopyPrefix(0, copy, kTokens).ok();
    }
    for (int copy = 1; copy <= count; ++copy) {
      done = done && cache->Remove(copy, 0, kOpenEnd).ok();
    }
    return done;
  };
  ASSERT_TRUE(copy_and_end(1));
  const std::int64_t before = live_bytes;
  ASSERT_TRUE(copy_and_end(kCopies));
  EXPECT_LE((live_bytes - before) / kCopies, 1024);
}

// Windowed sequences also keep their cells in order of position.
TEST(Memory, IsGivenBackByWindowedSequencesThatEnd) {
  constexpr int kTokens = 1'000;
  constexpr int kSequences = 30;
  CacheSpec spec;
  spec.kind = Kind::kSwa;
  spec.window = kSequences * kTokens;
  const std::unique_ptr<Cache> cache = *MakeCache(spec);
  CacheConfig config;
  config.mask_dtype = DType::kBits;
  ASSERT_TRUE(cache->SetConfig(config).ok());
  ASSERT_TRUE(
      cache->Init({DType::kF16, 1, 2 * kSequences * kTokens, kTokens}).ok());
  std::vector<std::int32_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const auto fill_and_end = [&](int count) {
    bool done = true;
    for (int sequence = 0; sequence < count; ++sequence) {
      const std::vector<int> sequences(kTokens, sequence);
      done = done && cache->StartForward({positions, sequences}, false).ok();
    }
    for (int sequence = 0; sequence < count; ++sequence) {
      done = done && cache->Remove(sequence, 0, kOpenEnd).ok();
    }
    return done;
  };
  ASSERT_TRUE(fill_and_end(1));
  const std::int64_t before = live_bytes;
  ASSERT_TRUE(fill_and_end(kSequences));
  EXPECT_LE((live_bytes - before) / kSequences, 1024);
}

// Long runs -------------------------------------------------------------------

// Records the peak of live bytes in each tenth of a run: a cache that grows has
// more at the end.
class Watch {
 public:
  explicit Watch(int steps) : steps_(steps) {}

  void Step(int step) {
    const int tenth = step * 10 / steps_;
    auto& max = At(max_, tenth);
    max = std::max<std::int64_t>(max, live_bytes);
  }

  // Compares the peak of the last part of the run with the peak of the first
  // part.
  std::int64_t growth() const { return max_.back() - max_.front(); }

 private:
  int steps_;
  std::array<std::int64_t, 10> max_ = {};
};

constexpr std::int64_t kNoGrowth = 16 * 1024;

class Random {
 public:
  // Draws a number of 0 .. count - 1.
  int Pick(int count) {
    return AsInt(engine_() % static_cast<std::uint32_t>(count));
  }
  bool OneIn(int count) { return Pick(count) == 0; }

 private:
  std::mt19937 engine_{1};
};

// Makes every call of the interface, with sequence ids that never come again,
// and misuse.
class CacheClient {
 public:
  CacheClient(const CacheSpec& spec, std::string_view twin)
      : spec_(spec), cache_(*MakeCache(spec, twin)), numbers_(Numbers()) {
    const bool is_single = spec.kind == Kind::kEncoder || HasEncoder(spec);
    EXPECT_TRUE(cache_->Init({DType::kF32, is_single ? 1 : 3, 8, 4}).ok());
  }

  void Step() {
    switch (random_.Pick(16)) {
      case 0:
        return Copy();
      case 1:
        return Remove(random_.Pick(4), random_.Pick(8));
      case 2:
        return Misuse();
      case 3:
        return Restore();
      case 4:
        return Add();
      case 5:
        return Ask();
      default:
        return Pass();
    }
  }

  std::int64_t passes() const { return passes_; }

 private:
  struct Request {
    int id;
    std::int32_t next;
  };

  static bool HasEncoder(const CacheSpec& spec) {
    return std::ranges::any_of(spec.caches, [](const CacheSpec& part) {
      return part.kind == Kind::kEncoder;
    });
  }

  Request& Some() {
    if (requests_.empty()) requests_.push_back({next_id_++, 0});
    return At(requests_, random_.Pick(Size(requests_)));
  }

  void Pass() {
    if (requests_.size() < 4 && random_.OneIn(3)) {
      requests_.push_back({next_id_++, 0});
    }
    Request& request = Some();
    const int tokens = 1 + random_.Pick(4);
    std::vector<std::int32_t> positions;
    const std::vector<int> sequences(AsSize(tokens), request.id);
    for (int i = 0; i < tokens; ++i) positions.push_back(request.next + i);
    const std::vector<int> images(random_.OneIn(2) ? 1 : 0, 0);
    const bool reserve = random_.OneIn(9);
    if (!cache_->StartForward({positions, sequences, images}, reserve).ok()) {
      return End(request.id);
    }
    ++passes_;
    if (!reserve) request.next += tokens;
    (void)cache_->SetCausal(std::array{random_.Pick(tokens)});
    const TensorView rows =
        DenseView(numbers_.data(), DType::kF32, {2, 1, tokens, 1});
    for (int layer = 0; layer < kLayers; ++layer) {
      (void)cache_->SetLayer(layer);
      (void)cache_->SetLayerType(random_.Pick(2));
      (void)cache_->Put(rows, rows);
      (void)cache_->Get();
    }
    if (request.next > 20) End(request.id);
  }

  void End(int id) {
    (void)cache_->Remove(id, 0, kOpenEnd);
    std::erase_if(requests_,
                  [id](const Request& waiting) { return waiting.id == id; });
  }

  void Copy() {
    const Request from = Some();
    if (requests_.size() > 4) End(requests_.front().id);
    const int to = random_.OneIn(4) ? from.id : next_id_++;
    const std::int32_t len = random_.Pick(from.next + 1);
    if (!cache_->CopyPrefix(from.id, to, len).ok()) return;
    std::erase_if(requests_,
                  [to](const Request& waiting) { return waiting.id == to; });
    requests_.push_back({to, len});
  }

  void Remove(std::int32_t begin, std::int32_t length) {
    Request& request = Some();
    const std::int32_t end = begin + length;
    if (end >= request.next) return End(request.id);
    if (cache_->Remove(request.id, begin, end).ok()) request.next -= length;
  }

  void Misuse() {
    const int never = std::numeric_limits<int>::max() - next_id_;
    (void)cache_->StartForward({}, false);
    (void)cache_->SetLayer(-1);
    (void)cache_->SetLayerType(-1);
    (void)cache_->Put({}, {});
    (void)cache_->CopyPrefix(never, never - 1, -1);
    (void)cache_->CopyPrefix(never, next_id_++, 3);
    (void)cache_->Remove(never, 3, 1);
    (void)cache_->Remove(never, 0, kOpenEnd);
    (void)cache_->CanResume(never, 1);
    CacheState damaged;
    damaged.position = -1;
    (void)cache_->Restore(damaged);
    (void)cache_->SetCausal(std::array{-1});
    (void)cache_->AddSequence(-1, {});
  }

  void Restore() {
    const Result<CacheState> state = cache_->Snapshot();
    if (!state.ok()) return;
    const auto bytes = StateToBytes(*state, "model");
    (void)cache_->Restore(*StateFromBytes(bytes, "model"));
  }

  void Add() {
    const int id = Some().id;
    const std::int32_t next = Some().next;
    const Result<CacheState> state = cache_->SnapshotOf(id);
    if (!state.ok()) return;
    if (random_.OneIn(2)) End(id);
    if (!cache_->AddSequence(next_id_, *state).ok()) return;
    requests_.push_back({next_id_++, next});
    if (requests_.size() > 5) End(requests_.front().id);
  }

  void Ask() {
    const Request& request = Some();
    (void)cache_->CanResume(request.id, request.next);
    (void)cache_->EncoderCached();
    (void)cache_->BatchCells();
    cache_->ListCells(entries_);
  }

  CacheSpec spec_;
  std::unique_ptr<Cache> cache_;
  std::vector<float> numbers_;
  Random random_;
  std::vector<Request> requests_;
  std::vector<CellEntry> entries_;
  int next_id_ = 0;
  std::int64_t passes_ = 0;
};

std::vector<CacheSpec> Specs() {
  std::vector<CacheSpec> specs = {Scattered(Kind::kCausal)};
  for (const Kind kind : {Kind::kCausal, Kind::kSwa, Kind::kSwaMem,
                          Kind::kChunked, Kind::kEncoder}) {
    specs.push_back(SpecOf(kind));
  }
  for (const Kind first : {Kind::kSwa, Kind::kEncoder}) {
    specs.push_back(SpecOf(Kind::kWrapper));
    specs.back().caches = {SpecOf(first), SpecOf(Kind::kCausal)};
  }
  return specs;
}

TEST(Memory, OfACacheDoesNotGrow) {
  constexpr int kSteps = 30'000;
  for (const std::string_view twin : {"reference", "optimized"}) {
    for (std::size_t i = 0; const CacheSpec& spec : Specs()) {
      SCOPED_TRACE(testing::Message() << twin << ", case " << i++);
      CacheClient client(spec, twin);
      Watch watch(kSteps);
      for (int step = 0; step < kSteps; ++step) {
        client.Step();
        watch.Step(step);
      }
      EXPECT_GT(client.passes(), kSteps / 4);
      EXPECT_LE(watch.growth(), kNoGrowth);
    }
  }
}

// Prompts of tokens, salts and keys that never come again, beside some that do.
class PoolClient {
 public:
  explicit PoolClient(std::string_view twin)
      : pool_(*MakePagedPool({.block_size = 2,
                              .blocks = 4,
                              .max_seq_len = 6,
                              .layers = kLayers,
                              .dtype = DType::kF32,
                              .layout = PagedLayout::kHeadMajor},
                             twin)),
        numbers_(Numbers()) {}

  void Step() {
    if (sequences_.empty()) return Open();
    switch (random_.Pick(8)) {
      case 0:
        return Open();
      case 1:
        return Fork();
      case 2:
        (void)pool_->Truncate(Some(), random_.Pick(4));
        return;
      case 3:
        return Free(random_.Pick(Size(sequences_)));
      case 4:
        return Ask();
      case 5:
        return Misuse();
      default:
        return Pass();
    }
  }

  int commits() const { return commits_; }

 private:
  int Some() { return At(sequences_, random_.Pick(Size(sequences_))); }

  std::int32_t Token() { return random_.OneIn(2) ? random_.Pick(2) : ++token_; }

  PrefixKey Key() {
    PrefixKey key;
    if (random_.OneIn(3)) key.salt = "salt " + std::to_string(++token_);
    if (random_.OneIn(3)) key.extra = {"key " + std::to_string(++token_)};
    return key;
  }

  void Open() {
    if (sequences_.size() > 3) return Free(0);
    std::vector<std::int32_t> prompt;
    for (int i = random_.Pick(7); i > 0; --i) prompt.push_back(Token());
    sequences_.push_back(*pool_->Open(prompt, Key()));
  }

  void Fork() {
    if (sequences_.size() > 3) return Free(0);
    const int from = Some();
    sequences_.push_back(
        *pool_->Fork(from, random_.Pick(*pool_->SeqLen(from) + 1)));
  }

  void Free(int index) {
    EXPECT_TRUE(pool_->Free(At(sequences_, index)).ok());
    sequences_.erase(sequences_.begin() + index);
  }

  void Pass() {
    const int sequence = Some();
    const int count = 1 + random_.Pick(3);
    const TensorView rows =
        DenseView(numbers_.data(), DType::kF32, {1, 1, count, 1});
    for (int layer = 0; layer < kLayers; ++layer) {
      if (!pool_->Append(sequence, layer, rows, rows).ok()) {
        return Free(0);
      }
    }
    if (random_.OneIn(5)) {
      (void)pool_->Commit(sequence, random_.Pick(count + 1));
      return;
    }
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(Token());
    if (pool_->Commit(sequence, tokens).ok()) ++commits_;
  }

  void Ask() {
    const int sequence = Some();
    const int len = *pool_->SeqLen(sequence);
    (void)pool_->Views(sequence, 0);
    (void)pool_->ViewsPacked(sequence, 1);
    (void)pool_->ContiguousKV(sequence, 0, len);
    (void)pool_->ExportCsr(sequences_);
    (void)pool_->ExportTable(sequences_);
    (void)pool_->SlotMapping(sequence, 0, len);
    (void)pool_->Usage();
  }

  void Misuse() {
    const int never = 100 + ++token_;
    (void)pool_->Open(std::array{-1}, Key());
    (void)pool_->Fork(never, 0);
    (void)pool_->Fork(Some(), 7);
    (void)pool_->Append(never, 0, {}, {});
    (void)pool_->Append(Some(), kLayers, {}, {});
    (void)pool_->Commit(never, 1);
    (void)pool_->Commit(Some(), 7);
    (void)pool_->Truncate(never, 0);
    (void)pool_->Free(never);
    (void)pool_->Views(never, 0);
    (void)pool_->SlotMapping(never, 0, 1);
  }

  std::unique_ptr<PagedPool> pool_;
  std::vector<float> numbers_;
  Random random_;
  std::vector<int> sequences_;
  int commits_ = 0;
  std::int32_t token_ = 2;
};

TEST(Memory, OfAPoolDoesNotGrow) {
  constexpr int kSteps = 200'000;
  for (const std::string_view twin : {"reference", "optimized"}) {
    SCOPED_TRACE(twin);
    PoolClient client(twin);
    Watch watch(kSteps);
    for (int step = 0; step < kSteps; ++step) {
      client.Step();
      watch.Step(step);
    }
    EXPECT_GT(client.commits(), kSteps / 100);
    EXPECT_LE(watch.growth(), kNoGrowth);
  }
}

// All slots are busy, so that each request waits until it is cancelled.
TEST(Memory, OfSessionsDoesNotGrowWithCancelledRequests) {
  constexpr int kSteps = 1'000'000;
  for (const std::string_view twin : {"reference", "optimized"}) {
    SCOPED_TRACE(twin);
    const SessionsSpec spec = {.slots = 2, .context = 8, .batch = 8};
    const auto cache = *MakeCache({}, twin);
    ASSERT_TRUE(cache->Init(InitOf(spec, DType::kF32)).ok());
    const auto sessions = *MakeSessions(*cache, spec, twin);
    const std::vector<SessionInput> prompt = {{.token = 1}, {.token = 2}};
    for (int i = 0; i < spec.slots; ++i) (void)*sessions->Submit(prompt);
    (void)*sessions->NextBatch();
    Watch watch(kSteps);
    bool cancelled = true;
    for (int step = 0; step < kSteps; ++step) {
      const int request = *sessions->Submit(prompt);
      if (step % 1000 == 0) (void)*sessions->NextBatch();
      cancelled = cancelled && sessions->Cancel(request).ok();
      watch.Step(step);
    }
    EXPECT_TRUE(cancelled);
    EXPECT_EQ(sessions->Requests().size(), 2U);
    EXPECT_LE(watch.growth(), kNoGrowth);
  }
}

// Physical memory ------------------------------------------------------------

// The pages of memory that a buffer takes.
std::ptrdiff_t PagesOf(optimized::AlignedBuffer& buffer) {
  const std::size_t page = AsSize(sysconf(_SC_PAGESIZE));
  const std::size_t before =
      reinterpret_cast<std::uintptr_t>(buffer.data()) % page;
  const std::size_t bytes = before + buffer.bytes();
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  EXPECT_EQ(mincore(buffer.data() - before, bytes, resident.data()), 0);
  return std::ranges::count_if(resident, [](int r) { return r & 1; });
}

TEST(Memory, ALargeBufferHasNoPagesBeforeItIsWritten) {
  // calloc would take a hole that the program has left, and write all of it.
  constexpr std::size_t kBytes = std::size_t{6} << 20;
  for (int i = 0; i < 2; ++i) {
    std::vector<std::vector<char>> used(8, std::vector<char>(2 * kBytes, 'x'));
    for (int j = 0; j < 8; j += 2) used[AsSize(j)] = {};
  }
  for (int i = 0; i < 8; ++i) {
    optimized::AlignedBuffer buffer(kBytes);
    EXPECT_EQ(PagesOf(buffer), 0);
    EXPECT_EQ(buffer.data()[kBytes - 1], std::byte{0});
  }
}

TEST(Memory, ALargeBufferTakesLittleForFewTokens) {
  for (const std::size_t huge_pages : {2U, 3U, 16U}) {
    optimized::AlignedBuffer buffer(huge_pages * kHugePage);
    buffer.data()[0] = std::byte{1};
    EXPECT_EQ(PagesOf(buffer), 1);
    buffer.data()[kHugePage - 1] = std::byte{1};
    EXPECT_EQ(PagesOf(buffer), 2);
  }
}

// Whether the process has a page at this address.
bool IsMapped(const void* address) {
  const std::size_t page = AsSize(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<std::uintptr_t>(address) / page * page;
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(at), 1, &resident) == 0;
}

// A causal cache of one sequence, to which passes append.
class Appended {
 public:
  Appended() {
    EXPECT_TRUE(cache_->SetConfig({.mask_dtype = DType::kBits}).ok());
    EXPECT_TRUE(cache_->Init({DType::kF16, 1, 8000, kLongest}).ok());
  }
  // Appends tokens, and returns the mask of the pass.
  TensorView Append(int tokens) {
    std::vector<int> positions(AsSize(tokens));
    std::iota(positions.begin(), positions.end(), length_);
    length_ += tokens;
    const std::vector<int> sequences(AsSize(tokens), 0);
    EXPECT_TRUE(cache_->StartForward({positions, sequences}, false).ok());
    const TensorView rows =
        DenseView(numbers_.data(), DType::kF16, {1, 1, tokens, 1});
    EXPECT_TRUE(cache_->Put(rows, rows).ok());
    return cache_->Get()->mask;
  }
  int length() const { return length_; }

  static constexpr int kLongest = 3000;

 private:
  std::unique_ptr<Cache> cache_ = *MakeCache(Scattered(Kind::kCausal));
  std::vector<float> numbers_ = std::vector<float>(kLongest, 1.5F);
  int length_ = 0;
};

TEST(Memory, TheMaskOfALongPromptIsFreedAfterSixteenShortPasses) {
  Appended cache;
  const TensorView prompt = cache.Append(Appended::kLongest);  // 1.1 MB.
  for (int i = 0; i < 15; ++i) cache.Append(1);
  EXPECT_TRUE(IsMapped(prompt.data));
  // A pass that needs an eighth of the mask starts the count anew.
  cache.Append(Appended::kLongest / 5);
  for (int i = 0; i < 15; ++i) {
    cache.Append(1);
    ASSERT_TRUE(IsMapped(prompt.data)) << i;
  }
  const TensorView mask = cache.Append(1);
  EXPECT_FALSE(IsMapped(prompt.data));
  for (int i = 0; i < mask.shape[0]; ++i) {
    const bool seen = MaskElementAt(mask, i, 0) == MaskElement::kAllows;
    EXPECT_EQ(seen, i < cache.length()) << i;
  }
}

// A mask with one row for all rows.
TEST(Memory, APlanStoresARowOnce) {
  constexpr int kRows = 4096;
  const std::vector<std::uint64_t> seen(64, ~std::uint64_t{0});
  TensorView mask =
      DenseView(seen.data(), DType::kBits, {64 * 64, kRows, 1, 1});
  mask.stride[1] = 0;
  const std::int64_t before = live_bytes;
  const auto attention = *MakeAttention();
  ASSERT_TRUE(attention->Plan(mask, kRows).ok());
  EXPECT_LE(live_bytes - before, 100'000);
}

}  // namespace
}  // namespace kvtwin::props
