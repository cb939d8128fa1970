// Runs the calls of a cache or a pool on its device: turns exceptions into
// statuses, and refuses calls after a change was left unfinished.

#ifndef KVTWIN_OPTIMIZED_CUDA_SESSION_H_
#define KVTWIN_OPTIMIZED_CUDA_SESSION_H_

#include <fmt/format.h>

#include <string_view>

#include "kvtwin/status.h"
#include "optimized/cuda/gpu.h"

namespace kvtwin::optimized::cuda {

class Session {
 public:
  Session(int device, bool host_views) : gpu_(device, host_views) {}

  Gpu& gpu() { return gpu_; }

  // Sets the stream of the next calls.
  void On(cudaStream_t stream) { stream_ = stream; }

  // Opens the device. Must come before all other calls that need a device.
  Status Open() {
    return Try([&] {
      gpu_.Open();
      return Status();
    });
  }

  // Runs a call that changes nothing if it fails.
  template <class Call>
  auto Try(const Call& call) -> decltype(call()) {
    if (!lost_.ok()) return lost_;
    try {
      // Before Init, the cache itself reports that the call is too early.
      if (!gpu_.open()) return call();
      const CurrentDevice current(gpu_.device());
      gpu_.Use(stream_);
      return call();
    } catch (const MemoryError& error) {
      return error.status();
    }
  }

  // Runs a call that may be half done when it fails, and that cannot be part of
  // a graph.
  template <class Call>
  auto Change(std::string_view what, const Call& call) -> decltype(call()) {
    return Try([&]() -> decltype(call()) {
      if (gpu_.open()) gpu_.RefuseCapture(what);
      try {
        return call();
      } catch (const MemoryError& error) {
        lost_ = {error.status().code(),
                 fmt::format("{}; {} was not finished, and what it was called "
                             "of can only be closed",
                             error.status().message(), what)};
        return lost_;
      }
    });
  }

 private:
  Gpu gpu_;
  cudaStream_t stream_ = nullptr;
  Status lost_;
};

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_SESSION_H_
