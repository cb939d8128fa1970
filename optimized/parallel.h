// Loops over independent pieces of work, on several threads if that pays off.
// They also work in a child of fork(), which starts threads of its own.

#ifndef KVTWIN_OPTIMIZED_PARALLEL_H_
#define KVTWIN_OPTIMIZED_PARALLEL_H_

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstddef>

#include "core/index.h"
#include "optimized/fast_paths.h"
#include "optimized/targets.h"

namespace kvtwin::optimized {

#ifdef _OPENMP
// Whether to share work that touches this many bytes among threads. On a quiet
// machine, handing work to another thread costs as much as writing about 64
// KiB; on a busy machine the other thread may have to wait milliseconds for its
// turn, so that only much larger work is worth it.
bool WorthSharing(std::size_t bytes);
#endif

// Calls body(i) for every i < count, in any order. `bytes` is the amount that
// all calls together touch. Without OpenMP there is one thread. `body` must not
// throw.
template <class Body>
void ParallelFor(std::size_t count, std::size_t bytes, const Body& body) {
#ifdef _OPENMP
  if (count > 1 && WorthSharing(bytes)) {
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
#endif
  (void)bytes;
  if (SharesInTurn::On()) {
    for (std::size_t i = count; i-- > 0;) body(i);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) body(i);
}

// One of `count` nearly equal parts of some work.
struct Share {
  std::size_t index = 0;
  std::size_t count = 1;

  // This share has the items [Begin(n), End(n)) of n items in a row.
  std::size_t Begin(std::size_t n) const { return n * index / count; }
  std::size_t End(std::size_t n) const { return n * (index + 1) / count; }
};

// The number of shares for work that touches this many bytes: one per thread.
inline std::size_t ShareCount(std::size_t bytes) {
#ifdef _OPENMP
  if (WorthSharing(bytes)) {
    return AsSize(omp_get_max_threads());
  }
#endif
  return SharesInTurn::Count(bytes);
}

// Calls body(i, worker) for every i < count, in any order, for pieces of
// different sizes. `worker` is less than ShareCount(bytes), and calls that run
// at once have different workers.
template <class Body>
void ParallelForUneven(std::size_t count, std::size_t bytes, const Body& body) {
#ifdef _OPENMP
  if (count > 1 && WorthSharing(bytes)) {
#pragma omp parallel for schedule(dynamic)
    for (std::size_t i = 0; i < count; ++i) {
      body(i, AsSize(omp_get_thread_num()));
    }
    return;
  }
#endif
  if (SharesInTurn::On()) {
    const std::size_t workers = ShareCount(bytes);
    for (std::size_t i = count; i-- > 0;) body(i, i % workers);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) body(i, std::size_t{0});
}

// How much of the touched bytes may stay in the caches of the threads: 1 MiB
// for each thread, or 0 if one thread does all of the work. Also 0 for Intel's
// processors, which take twice as long to write cold memory through their
// caches as past them.
inline std::size_t OwnCacheBytes(std::size_t bytes) {
  const std::size_t shares = IsIntel() ? 1 : ShareCount(bytes);
  return shares * std::min<std::size_t>(shares - 1, 1) << 20;
}

// Calls body(i, share) for every i < count and every share.
template <class Body>
void ParallelShares(std::size_t count, std::size_t bytes, const Body& body) {
  const std::size_t shares = ShareCount(bytes);
  ParallelFor(count * shares, bytes, [&](std::size_t i) {
    body(i / shares, Share{.index = i % shares, .count = shares});
  });
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_PARALLEL_H_
