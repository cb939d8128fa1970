// The same work on several threads.

#ifndef KVTWIN_CORE_THREADS_H_
#define KVTWIN_CORE_THREADS_H_

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtwin {

// Calls work() on this thread and on others at the same time, `threads` in all,
// or fewer if the system starts no more. After all of them have ended, throws
// the first exception again.
template <class Work>
void OnThreads(int threads, const Work& work) {
  std::exception_ptr thrown;
  std::once_flag once;
  const auto guarded = [&] {
    try {
      work();
    } catch (...) {
      std::call_once(once, [&] { thrown = std::current_exception(); });
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads; ++i) others.emplace_back(guarded);
  } catch (const std::exception&) {
    // The threads that run do the whole work.
  }
  guarded();
  for (std::thread& other : others) other.join();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_THREADS_H_
