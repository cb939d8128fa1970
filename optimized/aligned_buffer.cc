#include "optimized/aligned_buffer.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#include "core/huge_pages.h"

namespace kvtwin::optimized {
namespace {

constexpr std::size_t kLine = 64;

// Whether a buffer gains from huge pages: the memory lost at its ends to
// alignment is then small in comparison.
bool IsLarge(std::size_t bytes) { return bytes >= 4 * kHugePage; }

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
  const std::size_t alignment = IsLarge(bytes) ? kHugePage : kLine;
  if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
  // Uses calloc, not aligned_alloc and memset: the operating system zeroes the
  // pages of a large calloc when they are first used.
  memory_.reset(std::calloc(1, bytes + alignment));
  if (memory_ == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  const std::size_t skip = (alignment - address % alignment) % alignment;
  data_ = static_cast<std::byte*>(memory_.get()) + skip;
  if (IsLarge(bytes)) AskForHugePages(data_, bytes);
}

void AlignedBuffer::Free::operator()(void* memory) const { std::free(memory); }

}  // namespace kvtwin::optimized
