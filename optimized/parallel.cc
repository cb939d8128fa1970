#include "optimized/parallel.h"

#ifdef _OPENMP
#include <pthread.h>

namespace kvtwin::optimized {
namespace {

// A child of fork() has none of the threads that OpenMP keeps, and a loop would
// wait for them forever. So the forking thread ends its OpenMP threads first;
// it and the child start new ones when they need them.
void EndThreads() { (void)omp_pause_resource_all(omp_pause_soft); }

// Registered when the library is loaded: other code in the process may use
// OpenMP too.
[[maybe_unused]] const int registered =
    pthread_atfork(EndThreads, nullptr, nullptr);

}  // namespace

bool WorthSharing(std::size_t bytes) {
  return TakeFastPath(bytes > (std::size_t{1} << 20));
}

}  // namespace kvtwin::optimized
#endif
