// The machine's time for a number of bytes: the limits that the optimized twin
// is measured against. Buffers are allocated like those of the cache, so that
// both have pages of the same size, and all of them were written to before.

#ifndef KVTWIN_BENCH_LIMITS_H_
#define KVTWIN_BENCH_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"

namespace kvtwin::bench {

using Buffer = optimized::AlignedBuffer;

// A buffer whose pages all exist.
Buffer WrittenBuffer(std::size_t bytes);

// Pieces of memory that are used in turn, so that each was written long before:
// it is in no CPU cache if all pieces together are larger than the caches.
class ColdMemory {
 public:
  ColdMemory(std::size_t piece_bytes, std::size_t pieces)
      : buffer_(WrittenBuffer(piece_bytes * pieces)), bytes_(piece_bytes) {}

  std::byte* Next() {
    at_ = at_ + 2 * bytes_ > buffer_.bytes() ? 0 : at_ + bytes_;
    return buffer_.data() + at_;
  }

 private:
  Buffer buffer_;
  std::size_t bytes_;
  std::size_t at_ = 0;
};

// Nanoseconds of run().
template <class Run>
double Time(const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::nano>(end - start).count();
}

// Makes the compiler assume that the value is read.
template <class T>
void KeepAlive(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

// Sets the number of OpenMP threads of the optimized twin and of the limits.
void UseThreads(int threads);

// Does one run; returns its nanoseconds.
using Timing = std::function<double()>;

// Each run on the current number of threads, and on one thread: on a busy
// machine threads wait for each other, so that several may be slower than one.
std::vector<Timing> OnAnyThreads(const std::vector<Timing>& runs);

// Nanoseconds of each operation, on the current number of threads.
double SetBytes(std::byte* to, int value, std::size_t bytes);
double CopyBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// Copies past the caches. Requires: `to` on a cache-line boundary.
double StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// Reads f32 and writes half as many bytes, without computing anything, through
// the caches or past them. Requires: the written bytes are whole cache lines,
// on a boundary.
double HalveBytes(const std::byte* from, std::byte* to, std::size_t from_bytes,
                  bool stream);
// Reads, changes and writes all bytes in place.
double ModifyBytes(std::byte* bytes, std::size_t count);
// Reads all bytes, on one thread, and on the current number of threads.
double ReadBytes(const std::byte* bytes, std::size_t count);
double ReadOnThreads(const std::byte* bytes, std::size_t count);
// Multiplies and adds this many floats, in registers.
double MultiplyAdd(std::size_t operations);

// Does the least work of attention over K or V: loads each head of each cell,
// kDecodeElements numbers of a dtype, converts them to f32, and does their
// products with kDecodeQueries queries. `fetch`: into the second-level
// cache ahead, besides the fetches that the processor does. Rows are dense.
inline constexpr std::size_t kDecodeQueries = 4;
inline constexpr std::size_t kDecodeElements = 128;
double MultiplyRows(DType dtype, const std::byte* rows, std::size_t count,
                    bool fetch);

// Prints for each line of stdin, a number of threads, the bytes that they read
// and the floats that they multiply or add, in billions a second. Returns the
// exit code.
int ServeLimits();

// Writes to cache lines that are in no CPU cache. Each line holds the number of
// the next one.
class LineChase {
 public:
  // Requires: a power of two.
  explicit LineChase(std::size_t bytes);

  // Nanoseconds of one write.
  double Time();

 private:
  Buffer buffer_;
  std::uint32_t next_ = 0;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_LIMITS_H_
