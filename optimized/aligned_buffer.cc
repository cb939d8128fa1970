#include "optimized/aligned_buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "core/huge_pages.h"

namespace kvtwin::optimized {
namespace {

constexpr std::size_t kLine = 64;
// A buffer of this size or more is a mapping of memory.
constexpr std::size_t kMapped = std::size_t{1} << 20;

// Whether a buffer has huge pages. Its first bytes, as many as a huge page has,
// are in small ones: cells are used from the first on, so that a cache with few
// tokens takes little memory, however many it has room for.
bool IsLarge(std::size_t bytes) { return bytes >= 2 * kHugePage; }

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
  const std::size_t alignment = IsLarge(bytes) ? kHugePage : kLine;
  if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
  const std::size_t total = bytes + alignment;
  // The operating system zeroes the pages of a mapping when they are first
  // used. calloc may take memory that was freed before, even many MiB, and
  // write all of it.
  if (total >= kMapped) {
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = std::unique_ptr<void, Free>(memory, Free{.mapped = total});
  } else {
    memory_.reset(std::calloc(1, total));
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  const std::size_t skip = (alignment - address % alignment) % alignment;
  data_ = static_cast<std::byte*>(memory_.get()) + skip;
  if (!IsLarge(bytes)) return;
  AskForSmallPages(data_, kHugePage);
  AskForHugePages(data_ + kHugePage, bytes - kHugePage);
}

void AlignedBuffer::Free::operator()(void* memory) const {
  if (mapped > 0) {
    (void)munmap(memory, mapped);
  } else {
    std::free(memory);
  }
}

}  // namespace kvtwin::optimized
