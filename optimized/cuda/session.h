// A cache or a pool on its device: where what was thrown becomes what a call
// answers, and what cannot go on says so.

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

  // Where the work of the next calls is put.
  void On(cudaStream_t stream) { stream_ = stream; }

  // Before anything else that needs a device.
  Status Open() {
    return Try([&] {
      gpu_.Open();
      return Status();
    });
  }

  // A call that changes nothing if it fails.
  template <class Call>
  auto Try(const Call& call) -> decltype(call()) {
    if (!lost_.ok()) return lost_;
    try {
      // Before Init the cache says itself that it is too early.
      if (!gpu_.open()) return call();
      const CurrentDevice current(gpu_.device());
      gpu_.Use(stream_);
      return call();
    } catch (const MemoryError& error) {
      return error.status();
    }
  }

  // One that may then have done half of it, and that no graph can repeat.
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
