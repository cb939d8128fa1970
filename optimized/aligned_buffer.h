// Zeroed memory on a cache-line boundary.

#ifndef KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_
#define KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvtwin::optimized {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;

  // Throws std::bad_alloc.
  explicit AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes > SIZE_MAX - kAlignment) throw std::bad_alloc();
    // Not aligned_alloc and memset: a large calloc is pages that cost nothing
    // before they are used, and most of a new cache never is.
    memory_.reset(std::calloc(1, bytes + kAlignment));
    if (memory_ == nullptr) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    const std::size_t skip = (kAlignment - address % kAlignment) % kAlignment;
    data_ = static_cast<std::byte*>(memory_.get()) + skip;
  }

  std::size_t bytes() const { return bytes_; }
  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  static constexpr std::size_t kAlignment = 64;

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  std::unique_ptr<void, Free> memory_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_
