// This is the source that only kvtwin-host has: its main function, and malloc
// and related functions for its whole process. Buffers that a backend allocates
// get guard zones that no one may write to, and are kept for a while after they
// are freed.

#include <optional>
#include <string>

#include "props/backend/host/host.h"

namespace kvtwin::props {
namespace {

// There is only one process, so all objects share their state.
class Guard final : public ProcessMemory {
 public:
  void Enter(const char* function) override;
  void Leave() override;
  std::optional<std::string> Damage() override;
  std::optional<std::size_t> BytesFrom(const void* data) override;
  std::size_t Live() override;
  const char* LatestFunction() override;
  void TellRefusals(std::atomic<int>* to) override;
  void LimitShared(std::size_t bytes) override;
  void Forget() override;
};

}  // namespace
}  // namespace kvtwin::props

#ifdef KVTWIN_SANITIZED  // Sanitizers have such a malloc.

namespace kvtwin::props {

void Guard::Enter(const char*) {}
void Guard::Leave() {}
std::size_t Guard::Live() { return 0; }
void Guard::Forget() {}
void Guard::TellRefusals(std::atomic<int>*) {}
void Guard::LimitShared(std::size_t) {}
const char* Guard::LatestFunction() { return ""; }
std::optional<std::string> Guard::Damage() { return std::nullopt; }
std::optional<std::size_t> Guard::BytesFrom(const void*) {
  return std::nullopt;
}

}  // namespace kvtwin::props

#else

#include <errno.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/index.h"

extern "C" {
// glibc's own functions, exported for this purpose.
void* __libc_malloc(std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* data);
}

namespace kvtwin::props {
namespace {

constexpr std::uint64_t kPlain = 0x6b767477696e3031;
constexpr std::uint64_t kTheirs = 0x6b767477696e3032;
constexpr std::uint64_t kFreed = 0x6b767477696e3033;
constexpr std::size_t kZone = 64;  // Bytes before and after a backend's buffer.
constexpr unsigned char kZoneByte = 0xF9;
constexpr unsigned char kNewByte = 0xAB;
constexpr unsigned char kFreedByte = 0xDD;
// The most bytes of a new buffer that are filled, and the most freed bytes that
// are kept in all. A larger buffer is given back at once.
constexpr std::size_t kWatchedMax = 4 << 20;
constexpr std::size_t kKeptBlocksMax = 256;
// A larger number is not a size, but negative or the sum of two pointers.
constexpr std::size_t kSizeMax = std::size_t{1} << 46;

// Stands right before the front zone of each buffer.
struct Block {
  Block* previous;
  Block* next;
  void* start;  // The start of glibc's buffer.
  std::size_t size;
  const char* function;
  std::uint64_t unused;
  std::uint64_t unused_too;
  std::uint64_t magic;
};
static_assert(sizeof(Block) == 64);
constexpr std::size_t kFront = sizeof(Block) + kZone;

struct List {
  Block* first = nullptr;
  Block* last = nullptr;
  std::size_t bytes = 0;
  std::size_t count = 0;

  void Add(Block* block) {
    block->previous = last;
    block->next = nullptr;
    (last == nullptr ? first : last->next) = block;
    last = block;
    bytes += block->size;
    ++count;
  }
  void Remove(Block* block) {
    (block->previous == nullptr ? first : block->previous->next) = block->next;
    (block->next == nullptr ? last : block->next->previous) = block->previous;
    bytes -= block->size;
    --count;
  }
};

// A backend may have threads.
std::atomic_flag lock = ATOMIC_FLAG_INIT;
class Locked {
 public:
  Locked() {
    while (lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { lock.clear(std::memory_order_release); }
};

std::atomic<const char*> inside = nullptr;  // The function that runs.
List live;
List kept;                        // Freed buffers.
const char* complaint = nullptr;  // The first error of a free.
const char* complaint_of = nullptr;

std::atomic<int>* refused = nullptr;
void Refuse() {
  const char* function = inside.load(std::memory_order_relaxed);
  int none = 0;
  if (refused == nullptr) return;
  refused->compare_exchange_strong(
      none, FunctionNumber(function == nullptr ? "" : function) + 2);
}

// A region that was mapped between Enter and Leave. The list starts with the
// latest one; its nodes come from glibc's malloc.
struct Region {
  Region* next;
  std::uintptr_t begin;
  std::uintptr_t end;
  bool shared;
  const char* function;
};
Region* regions = nullptr;
std::size_t mapped = 0;  // Bytes of all regions.
std::size_t shared = 0;  // Bytes of shared regions.
std::size_t shared_max = SIZE_MAX;

void Count(const Region& region, std::size_t sign) {
  const std::size_t bytes = sign * (region.end - region.begin);
  mapped += bytes;
  if (region.shared) shared += bytes;
}

// Returns null if there is no memory for it.
Region* NewRegion(const Region& what) {
  auto* region = static_cast<Region*>(__libc_malloc(sizeof(Region)));
  if (region == nullptr) return nullptr;
  *region = what;
  Count(what, 1);
  return region;
}

// Requires: the lock.
void AddRegion(std::uintptr_t begin, std::size_t bytes, bool is_shared,
               const char* function) {
  Region* region =
      NewRegion({regions, begin, begin + bytes, is_shared, function});
  if (region != nullptr) regions = region;
}

// Takes a range of addresses out of all regions. Requires: the lock.
void CutRegions(std::uintptr_t begin, std::uintptr_t end) {
  for (Region** at = &regions; *at != nullptr;) {
    Region* region = *at;
    if (region->end <= begin || end <= region->begin) {
      at = &region->next;
      continue;
    }
    Count(*region, -std::size_t{1});
    *at = region->next;
    // The parts that are left take its place.
    for (const auto& [from, to] :
         {std::pair(region->begin, begin), std::pair(end, region->end)}) {
      if (from >= to) continue;
      Region* rest =
          NewRegion({*at, from, to, region->shared, region->function});
      if (rest == nullptr) continue;
      *at = rest;
      at = &rest->next;
    }
    __libc_free(region);
  }
}

unsigned char* UserOf(Block* block) {
  return reinterpret_cast<unsigned char*>(block) + kFront;
}
Block* BlockOf(void* data) {
  return reinterpret_cast<Block*>(static_cast<unsigned char*>(data) - kFront);
}

bool AllAre(const unsigned char* bytes, std::size_t count, unsigned char byte) {
  // The first byte is right, and each byte equals the next: memcmp is fast.
  return count == 0 ||
         (bytes[0] == byte && std::memcmp(bytes, bytes + 1, count - 1) == 0);
}

void* Allocate(std::size_t alignment, std::size_t size) {
  const std::size_t front = (kFront + alignment - 1) / alignment * alignment;
  if (size > kSizeMax || alignment > kSizeMax) {
    Refuse();
    errno = ENOMEM;
    return nullptr;
  }
  const std::size_t all = front + size + kZone;
  auto* start = static_cast<unsigned char*>(
      alignment <= 16 ? __libc_malloc(all) : __libc_memalign(alignment, all));
  if (start == nullptr) {
    Refuse();
    return nullptr;
  }
  unsigned char* user = start + front;
  Block* block = BlockOf(user);
  const char* function = inside.load(std::memory_order_relaxed);
  *block = {.previous = nullptr,
            .next = nullptr,
            .start = start,
            .size = size,
            .function = function,
            .unused = 0,
            .unused_too = 0,
            .magic = function == nullptr ? kPlain : kTheirs};
  if (function == nullptr) return user;
  std::memset(user - kZone, kZoneByte, kZone);
  std::memset(user + size, kZoneByte, kZone);
  std::memset(user, kNewByte, std::min(size, kWatchedMax));
  const Locked locked;
  live.Add(block);
  return user;
}

void Complain(const char* what) {
  if (complaint == nullptr) {
    complaint = what;
    complaint_of = inside.load(std::memory_order_relaxed);
  }
}

bool ZonesHold(Block* block) {
  const unsigned char* user = UserOf(block);
  return AllAre(user - kZone, kZone, kZoneByte) &&
         AllAre(user + block->size, kZone, kZoneByte);
}

// Gives the oldest freed buffer back to glibc.
void GiveBack() {
  Block* oldest = kept.first;
  kept.Remove(oldest);
  if (!AllAre(UserOf(oldest), oldest->size, kFreedByte)) {
    Complain("wrote to a buffer that it had freed");
  }
  oldest->magic = 0;
  __libc_free(oldest->start);
}

void Free(void* data) {
  if (data == nullptr) return;
  Block* block = BlockOf(data);
  if (block->magic == kPlain) {
    block->magic = 0;
    return __libc_free(block->start);
  }
  const Locked locked;
  if (block->magic == kFreed) return Complain("frees what it freed before");
  if (block->magic != kTheirs) {
    return Complain("frees what no malloc gave, or wrote before its begin");
  }
  if (!ZonesHold(block)) {
    Complain("wrote beyond a buffer that it then freed");
  }
  live.Remove(block);
  block->magic = kFreed;
  if (block->size > kWatchedMax) return __libc_free(block->start);
  std::memset(data, kFreedByte, block->size);
  kept.Add(block);
  while (kept.bytes > kWatchedMax || kept.count > kKeptBlocksMax) GiveBack();
}

// Maps memory as the kernel does, and reports a refusal.
void* Map(void* address, std::size_t length, int protection, int flags,
          int file, off_t offset) {
  const char* function = inside.load(std::memory_order_relaxed);
  const bool counts = function != nullptr && (flags & MAP_ANONYMOUS) != 0 &&
                      (protection & PROT_WRITE) != 0;
  const bool is_shared = (flags & MAP_SHARED) != 0;
  const Locked locked;
  // The kernel's own limit does not count shared memory.
  if (counts && is_shared &&
      (length > shared_max || shared > shared_max - length)) {
    Refuse();
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* data = reinterpret_cast<void*>(
      syscall(SYS_mmap, address, length, protection, flags, file, offset));
  if (data == MAP_FAILED) {
    if (errno == ENOMEM) Refuse();
    return data;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if ((flags & MAP_FIXED) != 0) CutRegions(begin, begin + length);
  if (counts) AddRegion(begin, length, is_shared, function);
  return data;
}

int Unmap(void* data, std::size_t length) {
  constexpr std::uintptr_t kPage = 4096;
  const Locked locked;
  const auto result = AsInt(syscall(SYS_munmap, data, length));
  if (result == 0) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    CutRegions(begin, begin + (length + kPage - 1) / kPage * kPage);
  }
  return result;
}

void* Remap(void* data, std::size_t before, std::size_t after, int flags,
            void* wanted) {
  const Locked locked;
  const auto old = reinterpret_cast<std::uintptr_t>(data);
  Region found = {};
  for (const Region* region = regions; region != nullptr;
       region = region->next) {
    if (region->begin <= old && old < region->end) found = *region;
  }
  void* moved = reinterpret_cast<void*>(
      syscall(SYS_mremap, data, before, after, flags, wanted));
  if (moved == MAP_FAILED) {
    if (errno == ENOMEM) Refuse();
    return moved;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(moved);
  CutRegions(old, old + before);
  if (found.end != 0) {
    AddRegion(begin, after, found.shared, found.function);
  }
  return moved;
}

}  // namespace

void Guard::Enter(const char* function) { inside = function; }
void Guard::Leave() { inside = nullptr; }
void Guard::TellRefusals(std::atomic<int>* to) { refused = to; }
void Guard::LimitShared(std::size_t bytes) { shared_max = bytes; }
std::size_t Guard::Live() { return live.bytes + mapped; }
const char* Guard::LatestFunction() {
  if (regions != nullptr) return regions->function;
  return live.last == nullptr ? "" : live.last->function;
}

void Guard::Forget() {
  const Locked locked;
  while (kept.first != nullptr) GiveBack();
}

std::optional<std::string> Guard::Damage() {
  const Locked locked;
  if (complaint != nullptr) {
    const std::string text = fmt::format(
        "it {}{}{}", complaint, complaint_of == nullptr ? "" : ", in ",
        complaint_of == nullptr ? "" : complaint_of);
    complaint = nullptr;
    return text;
  }
  for (Block* block = live.first; block != nullptr; block = block->next) {
    if (ZonesHold(block)) continue;
    const bool past_end = AllAre(UserOf(block) - kZone, kZone, kZoneByte);
    return fmt::format(
        "it wrote {} a buffer of {} bytes that was allocated in "
        "{}",
        past_end ? "past the end of" : "before the start of", block->size,
        block->function);
  }
  for (Block* block = kept.first; block != nullptr; block = block->next) {
    if (AllAre(UserOf(block), block->size, kFreedByte)) continue;
    return fmt::format("it wrote to a buffer of {} bytes that it had freed",
                       block->size);
  }
  return std::nullopt;
}

std::optional<std::size_t> Guard::BytesFrom(const void* data) {
  const Locked locked;
  const auto* at = static_cast<const unsigned char*>(data);
  for (const List* list : {&live, &kept}) {
    for (Block* block = list->first; block != nullptr; block = block->next) {
      const unsigned char* user = UserOf(block);
      if (at < user || at >= user + block->size + (block->size == 0)) continue;
      if (list == &kept) return 0;
      return AsSize(user + block->size - at);
    }
  }
  return std::nullopt;
}

}  // namespace kvtwin::props

// GCC confuses these with the functions that they replace, and warns.
#pragma GCC diagnostic ignored "-Wattributes"
extern "C" {

void* malloc(std::size_t size) { return kvtwin::props::Allocate(16, size); }

void free(void* data) { kvtwin::props::Free(data); }

void* calloc(std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) {
    errno = ENOMEM;
    return nullptr;
  }
  void* data = kvtwin::props::Allocate(16, bytes);
  if (data != nullptr) std::memset(data, 0, bytes);
  return data;
}

void* realloc(void* data, std::size_t size) {
  if (data == nullptr) return malloc(size);
  const std::size_t before = malloc_usable_size(data);
  if (size == 0) {
    free(data);
    return nullptr;
  }
  void* moved = malloc(size);
  if (moved == nullptr) return nullptr;
  std::memcpy(moved, data, before < size ? before : size);
  free(data);
  return moved;
}

std::size_t malloc_usable_size(void* data) {
  return data == nullptr ? 0 : kvtwin::props::BlockOf(data)->size;
}

void* memalign(std::size_t alignment, std::size_t size) {
  return kvtwin::props::Allocate(alignment < 16 ? 16 : alignment, size);
}

void* aligned_alloc(std::size_t alignment, std::size_t size) {
  return memalign(alignment, size);
}

int posix_memalign(void** data, std::size_t alignment, std::size_t size) {
  *data = memalign(alignment, size);
  return *data == nullptr ? ENOMEM : 0;
}

void* mmap(void* address, std::size_t length, int protection, int flags,
           int file, off_t offset) {
  return kvtwin::props::Map(address, length, protection, flags, file, offset);
}
void* mmap64(void* address, std::size_t length, int protection, int flags,
             int file, off_t offset) {
  return kvtwin::props::Map(address, length, protection, flags, file, offset);
}
int munmap(void* data, std::size_t length) {
  return kvtwin::props::Unmap(data, length);
}
void* mremap(void* data, std::size_t before, std::size_t after, int flags,
             ...) {
  va_list rest;
  va_start(rest, flags);
  void* wanted = (flags & MREMAP_FIXED) != 0 ? va_arg(rest, void*) : nullptr;
  va_end(rest);
  return kvtwin::props::Remap(data, before, after, flags, wanted);
}

void* valloc(std::size_t size) { return memalign(4096, size); }
void* pvalloc(std::size_t size) {
  return memalign(4096, (size + 4095) & ~std::size_t{4095});
}

}  // extern "C"

#endif

int main(int argc, char** argv) {
  kvtwin::props::Guard guard;
  return kvtwin::props::RunHost(argc, argv, guard);
}
