// Loops over independent pieces of work, on several threads if that pays.

#ifndef KVTWIN_OPTIMIZED_PARALLEL_H_
#define KVTWIN_OPTIMIZED_PARALLEL_H_

#include <cstddef>

#include "optimized/fast_paths.h"

namespace kvtwin::optimized {

// Calls body(i) for every i < count, in any order. `bytes` is what all of them
// touch together. On a quiet machine handing work to another thread costs as
// much as writing about 64 KiB; on a busy one the other thread may first have
// to wait for its turn, milliseconds, so only much larger work is shared out.
// Without OpenMP there is one thread. `body` must not throw.
template <class Body>
void ParallelFor(std::size_t count, std::size_t bytes, const Body& body) {
#ifdef _OPENMP
  constexpr std::size_t kWorthwhile = std::size_t{2} << 20;
  if (count > 1 && TakeFastPath(bytes > kWorthwhile)) {
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
#endif
  (void)bytes;
  for (std::size_t i = 0; i < count; ++i) body(i);
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_PARALLEL_H_
