// Buffers of about the size of a huge page, and too large for memory.

#include "optimized/aligned_buffer.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace kvtwin::props {
namespace {

// The variables are volatile so that the compiler keeps the allocation.
void Allocate(std::size_t bytes) {
  const volatile std::size_t size = bytes;
  const optimized::AlignedBuffer buffer(size);
  [[maybe_unused]] const volatile bool made = buffer.data() != nullptr;
}

TEST(AlignedBuffer, ThrowsWhenThereIsNoMemory) {
  EXPECT_THROW(Allocate(SIZE_MAX - 7), std::bad_alloc);
  EXPECT_THROW(Allocate(SIZE_MAX / 2), std::bad_alloc);
}

TEST(AlignedBuffer, IsZeroAtBothEnds) {
  for (const std::size_t n : {std::size_t{2} << 20, std::size_t{4} << 20}) {
    for (const std::size_t bytes : {n - 1, n, n + 1}) {
      optimized::AlignedBuffer buffer(bytes);
      ASSERT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0U);
      EXPECT_EQ(buffer.data()[0], std::byte{0});
      EXPECT_EQ(buffer.data()[bytes - 1], std::byte{0});
      std::memset(buffer.data(), 1, bytes);
      EXPECT_EQ(buffer.data()[bytes - 1], std::byte{1});
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
