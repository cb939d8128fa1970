// Zeroed memory on a cache-line boundary, in huge pages if it is large.

#ifndef KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_
#define KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvtwin::optimized {

inline constexpr std::size_t kCacheLine = 64;

inline bool IsOnCacheLine(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kCacheLine == 0;
}

class AlignedBuffer {
 public:
  AlignedBuffer() = default;

  // A large buffer takes no physical memory before it is written to: most of a
  // new cache never is. Throws std::bad_alloc.
  explicit AlignedBuffer(std::size_t bytes);

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
  struct Free {
    std::size_t mapped;  // Bytes of a mapping; 0: the memory is malloc's.
    void operator()(void* memory) const;
  };

  std::unique_ptr<void, Free> memory_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ALIGNED_BUFFER_H_
