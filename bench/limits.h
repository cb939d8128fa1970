// What the machine takes for as many bytes: the limits that the optimized twin
// is measured against. Memory is what the cache's is, so that both have pages
// of the same size, and all of it was written to before.

#ifndef KVTWIN_BENCH_LIMITS_H_
#define KVTWIN_BENCH_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "optimized/aligned_buffer.h"

namespace kvtwin::bench {

using Buffer = optimized::AlignedBuffer;

// A buffer whose pages are all there.
Buffer WrittenBuffer(std::size_t bytes);

// Pieces of memory, each of which was written long ago when its turn comes: it
// is in no cache if all of them together are larger than those.
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

// So that the compiler believes that somebody reads it.
template <class T>
void KeepAlive(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

// From now on, of OpenMP: the optimized twin's, and the limits'.
void UseThreads(int threads);

// Does a thing once; the nanoseconds that it took.
using Timing = std::function<double()>;

// Each of these on as many threads as are to be used, and on one: on a busy
// machine threads wait for each other, which is no limit.
std::vector<Timing> OnAnyThreads(const std::vector<Timing>& runs);

// Nanoseconds of each of these, on as many threads.
double SetBytes(std::byte* to, int value, std::size_t bytes);
double CopyBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// The same past the caches. Requires: `to` on a cache-line boundary.
double StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// Reads f32 and writes half as many bytes, without computing anything, into the
// caches or past them. Requires: a whole number of cache lines to write, on a
// boundary.
double HalveBytes(const std::byte* from, std::byte* to, std::size_t from_bytes,
                  bool stream);
// Reads, changes and writes all of them where they are.
double ModifyBytes(std::byte* bytes, std::size_t count);
// Reads all of them, on one thread.
double ReadBytes(const std::byte* bytes, std::size_t count);

// Writes to cache lines that are in no cache, each of which says where the next
// one is.
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
