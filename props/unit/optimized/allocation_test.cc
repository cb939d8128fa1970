// After the first pass over the layers, a reserving pass included, passes
// allocate nothing: neither StartForward nor Put nor Get.
//
// This is a separate program because it counts the allocations of the whole
// program: it replaces operator new, and the linker wraps the C library's
// functions.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "kvtwin/serving.h"
#include "optimized/fast_paths.h"
#include "optimized/row_shift.h"
#include "props/unit/optimized/allocations.h"

namespace kvtwin::props {

std::atomic<std::size_t> allocations = 0;
std::atomic<std::int64_t> live_bytes = 0;
thread_local int allocations_left = -1;

}  // namespace kvtwin::props

namespace {

// Counts a new allocation.
void* Counted(void* memory) {
  ++kvtwin::props::allocations;
  kvtwin::props::live_bytes +=
      static_cast<std::int64_t>(malloc_usable_size(memory));
  return memory;
}

// Whether the thread may not allocate.
bool IsOut() {
  int& left = kvtwin::props::allocations_left;
  if (left == 0) return true;
  if (left > 0) --left;
  return false;
}

void GivenBack(void* memory) {
  kvtwin::props::live_bytes -=
      static_cast<std::int64_t>(malloc_usable_size(memory));
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the linker names these.
void* __real_malloc(std::size_t bytes);
void* __real_calloc(std::size_t count, std::size_t bytes);
void* __real_realloc(void* memory, std::size_t bytes);
void __real_free(void* memory);
void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
int __real_posix_memalign(void** memory, std::size_t alignment,
                          std::size_t bytes);
void* __real_mmap(void* address, std::size_t bytes, int protection, int flags,
                  int file, off_t offset);
int __real_munmap(void* address, std::size_t bytes);

void* __wrap_malloc(std::size_t bytes) { return Counted(__real_malloc(bytes)); }
void* __wrap_calloc(std::size_t count, std::size_t bytes) {
  return Counted(__real_calloc(count, bytes));
}
void* __wrap_realloc(void* memory, std::size_t bytes) {
  GivenBack(memory);
  return Counted(__real_realloc(memory, bytes));
}
void __wrap_free(void* memory) {
  GivenBack(memory);
  __real_free(memory);
}
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return Counted(__real_aligned_alloc(alignment, bytes));
}
int __wrap_posix_memalign(void** memory, std::size_t alignment,
                          std::size_t bytes) {
  const int error = __real_posix_memalign(memory, alignment, bytes);
  if (error == 0) Counted(*memory);
  return error;
}
void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags,
                  int file, off_t offset) {
  ++kvtwin::props::allocations;
  kvtwin::props::live_bytes += static_cast<std::int64_t>(bytes);
  return __real_mmap(address, bytes, protection, flags, file, offset);
}
int __wrap_munmap(void* address, std::size_t bytes) {
  kvtwin::props::live_bytes -= static_cast<std::int64_t>(bytes);
  return __real_munmap(address, bytes);
}
// NOLINTEND
}

// The other forms of new call these two.
void* operator new(std::size_t bytes) {
  void* memory = IsOut() ? nullptr : std::malloc(bytes);  // NOLINT
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto line = kvtwin::AsSize(alignment);
  void* memory = std::aligned_alloc(line, (bytes + line - 1) / line * line);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }  // NOLINT
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);  // NOLINT
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);  // NOLINT
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);  // NOLINT
}

namespace kvtwin::props {
namespace {

constexpr int kLayers = 3;
constexpr int kSequences = 4;
constexpr int kCapacity = 512;
constexpr int kBatch = 64;
constexpr std::int64_t kHeadDim = 40;
constexpr std::int64_t kHeads = 3;

struct Case {
  CacheSpec spec;
  CacheConfig config;
  DType dtype = DType::kF32;
  bool strided = false;
};

class Client {
 public:
  explicit Client(const Case& variant)
      : cache_(*MakeCache(variant.spec)),
        positions_(kBatch, 0),
        sequences_(kBatch, 0),
        numbers_(kNumbers, 1.5F),
        strided_(variant.strided) {
    EXPECT_TRUE(cache_->SetConfig(variant.config).ok());
    EXPECT_TRUE(
        cache_->Init({variant.dtype, kSequences, kCapacity, kBatch}).ok());
  }

  // Runs a pass of `tokens` tokens for each sequence in [first, last).
  bool Pass(int first, int last, int tokens, bool reserve = false) {
    std::size_t count = 0;
    for (int seq = first; seq < last; ++seq) {
      auto& next = At(next_, seq);
      for (int i = 0; i < tokens; ++i, ++count) {
        positions_[count] = next + i;
        sequences_[count] = seq;
      }
      if (!reserve) next += tokens;
    }
    const Batch batch{.positions = std::span(positions_).first(count),
                      .sequences = std::span(sequences_).first(count)};
    bool done = cache_->StartForward(batch, reserve).ok();
    TensorView rows =
        DenseView(numbers_.data(), DType::kF32,
                  {kHeadDim, kHeads, static_cast<std::int64_t>(count), 1});
    if (strided_) {
      rows.stride = {8, 8 * kHeadDim + 4, (8 * kHeadDim + 4) * kHeads, 0};
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      done = done && cache_->SetLayer(layer).ok() &&
             cache_->Put(rows, rows).ok() && cache_->Get().ok();
    }
    return done;
  }

 private:
  static constexpr std::size_t kNumbers =
      std::size_t{kBatch} * (2 * kHeadDim + 1) * kHeads;

  std::unique_ptr<Cache> cache_;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  std::array<std::int32_t, kSequences> next_ = {};
  std::vector<float> numbers_;
  bool strided_;
};

// Behaves like a server: prompts first, then one token for each sequence, with
// a longer piece of a prompt now and then.
void ExpectNone(const Case& variant) {
  Client client(variant);
  ASSERT_TRUE(client.Pass(0, 1, kBatch, /*reserve=*/true));
  ASSERT_TRUE(client.Pass(0, kSequences, kBatch / kSequences));
  if (variant.spec.window) {
    // The first token that leaves a window may allocate, too.
    ASSERT_TRUE(client.Pass(0, 1, kBatch));
    ASSERT_TRUE(client.Pass(0, 1, 1));
  }
  const std::size_t before = allocations;
  bool done = true;
  for (int i = 0; i < 100; ++i) {
    done = done && client.Pass(0, kSequences, 1);
    if (i % 25 == 0) done = done && client.Pass(0, 1, kBatch);
    done = done && client.Pass(i % kSequences, i % kSequences + 1, 1);
  }
  const std::size_t after = allocations;
  EXPECT_TRUE(done);
  EXPECT_EQ(after - before, 0U);
}

void ExpectNoneForRows(const CacheSpec& spec) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const VLayout layout : kVLayouts) {
      for (const bool strided : {false, true}) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) +
                     fmt::format(", {} V", VLayoutName(layout)) +
                     (strided ? ", strided" : ""));
        ExpectNone({.spec = spec,
                    .config = {.cache_padding = kTileCells, .v_layout = layout},
                    .dtype = dtype,
                    .strided = strided});
      }
    }
  }
}

TEST(Allocations, AreCounted) {
  // No code reads it, but g++ may remove an allocation that is not stored.
  [[maybe_unused]] static const void* volatile kept;
  std::size_t before = allocations;
  const std::vector<int> numbers(1000);
  kept = numbers.data();
  EXPECT_EQ(allocations - before, 1U);
  struct alignas(128) Aligned {
    std::array<char, 128> bytes;
  };
  before = allocations;
  const std::vector<Aligned> aligned(3);
  kept = aligned.data();
  EXPECT_EQ(allocations - before, 1U);
  // The storage of each layer takes more than one allocation.
  before = allocations;
  Client client({});
  ASSERT_TRUE(client.Pass(0, 1, 1));
  EXPECT_GT(allocations - before, 2U * kLayers);
}

TEST(Allocations, NoneByScatteredPasses) {
  CacheSpec spec;
  spec.placement = Placement::kScatter;
  ExpectNoneForRows(spec);
}

TEST(Allocations, NoneByContiguousPasses) { ExpectNoneForRows({}); }

TEST(Allocations, NoneWhereTheWindowMoves) {
  CacheSpec spec;
  spec.placement = Placement::kScatter;
  spec.kind = Kind::kSwa;
  spec.window = 50;
  ExpectNoneForRows(spec);
}

// Windows leave holes, so that a batch needs a defrag.
TEST(Allocations, NoneByDefrags) {
  CacheSpec spec;
  spec.kind = Kind::kSwa;
  spec.window = 50;
  ExpectNoneForRows(spec);
}

TEST(Allocations, NoneBySequencesThatComeLater) {
  for (const Placement placement :
       {Placement::kContiguous, Placement::kScatter}) {
    CacheSpec spec;
    spec.placement = placement;
    Client client({.spec = spec, .config = {}});
    ASSERT_TRUE(client.Pass(0, kSequences, kBatch / kSequences,
                            /*reserve=*/true));
    ASSERT_TRUE(client.Pass(0, 1, 1));
    const std::size_t before = allocations;
    bool done = true;
    for (int seq = 1; seq < kSequences; ++seq) {
      done = done && client.Pass(seq, seq + 1, 2);
    }
    const std::size_t after = allocations;
    EXPECT_TRUE(done);
    EXPECT_EQ(after - before, 0U);
  }
}

TEST(Allocations, NoneOnFastPaths) {
  optimized::ForceFastPaths(optimized::FastPaths::kOn);
  for (const VLayout layout : kVLayouts) {
    ExpectNone({.spec = {},
                .config = {.cache_padding = kTileCells, .v_layout = layout},
                .dtype = DType::kF16});
  }
  optimized::ForceFastPaths(optimized::FastPaths::kAuto);
}

// Several threads shift rows at once, where an exception would end the program.
TEST(Allocations, ShiftsOfWideHeadsAllocateNothing) {
  constexpr int kWide = 4096;
  Shift shift;
  shift.kind = ShiftKind::kRope;
  optimized::RowShift prepared;
  prepared.Prepare(shift, -1, kWide);
  std::vector<float> scratch(prepared.ScratchSize(DType::kQ8));
  std::vector<std::byte> rows(AsSize(RunBytes(DType::kQ8, kWide)));
  const std::size_t before = allocations;
  prepared.Apply(DType::kQ8, rows, scratch);
  EXPECT_EQ(allocations, before);
}

// The thread of the service has no memory left at some moment after the second
// token. Each answer ends nevertheless, and so does the service.
TEST(Allocations, AnswersEndWithoutMemory) {
  const SessionsSpec sizes{.slots = 2, .context = 16, .batch = 8};
  const std::vector<float> logits(4), rows(16);
  std::map<Finish, int> ends;
  int without_text = 0;
  for (int left = 0; left < 60; ++left) {
    const std::unique_ptr<Cache> cache = *MakeCache({});
    ASSERT_TRUE(cache->Init(InitOf(sizes, DType::kF32)).ok());
    std::atomic<int> drawn = 0;
    const auto forward = [&](Cache& computed, const SessionBatch& batch) {
      const TensorView row = DenseView(rows.data(), DType::kF32,
                                       {1, 1, std::ssize(batch.inputs), 1});
      EXPECT_TRUE(computed.Put(row, row).ok());
      return std::span(logits).first(batch.outputs.size());
    };
    const auto bytes = [&](std::int32_t /*token*/) {
      if (++drawn == 2) allocations_left = left;
      return std::string("x");
    };
    std::unique_ptr<Service> service =
        *MakeService(*cache, {.sessions = sizes}, {forward, bytes});
    const std::vector<SessionInput> prompt = {{1}, {2}};
    const auto ask = [&](int limit) {
      return *service->Ask(
          {.prompt = prompt, .limit = limit, .sample = [](auto) { return 1; }});
    };
    const std::unique_ptr<Answer> first = ask(2), second = ask(3);
    for (Answer* answer : {first.get(), second.get()}) {
      const AnswerPart part =
          answer->Next(/*whole=*/true, std::chrono::seconds(20));
      EXPECT_NE(part.finish, Finish::kNone) << left;
      ++ends[part.finish];
      without_text += part.status.message() == "no memory" ? 1 : 0;
    }
    service.reset();  // The thread ends without memory, too.
  }
  EXPECT_GT(ends[Finish::kFailed], 0);
  EXPECT_GT(ends[Finish::kLength], 0);
  EXPECT_GT(without_text, 0);
}

}  // namespace
}  // namespace kvtwin::props
