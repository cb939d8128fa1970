// A device, as one cache or pool uses it: its memory, the stream that calls are
// on, and what is on its way there. What CUDA refuses is thrown as MemoryError,
// whose message begins with the error's name.

#ifndef KVTWIN_OPTIMIZED_CUDA_GPU_H_
#define KVTWIN_OPTIMIZED_CUDA_GPU_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvtwin/tensor.h"
#include "optimized/cache_memory.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

// Throws unless it is a success. `what` was tried.
void Check(cudaError_t error, std::string_view what);

// While it is there, this is the calling thread's device; then the one that was
// it before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

class Gpu {
 public:
  // With `host_views`, who asks for rows gets copies in the memory of the host.
  Gpu(int device, bool host_views) : device_(device), host_views_(host_views) {}
  ~Gpu() { Close(); }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Throws if there is no such device.
  void Open();
  void Close();

  int device() const { return device_; }
  bool open() const { return open_; }
  bool host_views() const { return host_views_; }
  Device view_device() const {
    return host_views_ ? Device::kCpu : Device::kCuda;
  }

  // Requires, of all below: opened, and that it is the current device.
  //
  // What is called from now on is put on this stream, behind all that was put
  // on the one before. (Not while it is captured: then that is the caller's.)
  void Use(cudaStream_t stream);
  cudaStream_t stream() const { return stream_; }
  bool Captures() const;
  // Throws if the stream is captured: `what` cannot be.
  void RefuseCapture(std::string_view what) const;

  // Freed with its last owner, which may wait for the device.
  std::shared_ptr<std::byte> Allocate(std::size_t bytes);
  std::shared_ptr<std::byte> AllocateZeroed(std::size_t bytes);

  // Memory of the host, and of the device, where that is going to. Good for
  // what is put on the stream before the next Stage. Waits if the last many
  // are all on their way still.
  struct Staged {
    std::byte* host;
    std::byte* device;
    std::size_t bytes;
  };
  Staged Stage(std::size_t bytes);
  void Send(const Staged& staged);
  // Both, of several parts: answers where each is. Good for as long.
  template <std::size_t count>
  std::array<const std::byte*, count> Upload(
      const std::array<std::span<const std::byte>, count>& parts) {
    std::size_t bytes = 0;
    for (const auto part : parts) bytes += Padded(part.size());
    const Staged staged = Stage(bytes);
    std::array<const std::byte*, count> places;
    std::size_t at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::copy(parts[i].begin(), parts[i].end(), staged.host + at);
      places[i] = staged.device + at;
      at += Padded(parts[i].size());
    }
    Send(staged);
    return places;
  }

  // Waits for the stream, and has the bytes then.
  void Download(const std::byte* from, std::span<std::byte> to) const;
  // The same, for a view: what is written there until the next call is written
  // back then, as who spoils the rows of free cells expects it (props/).
  void Show(std::byte* from, std::span<std::byte> to);
  void Hide() { shown_.clear(); }

  // Whether a tensor is in the memory of a device, or of the host; of that, a
  // dense copy that is staged.
  bool Holds(const TensorView& tensor) const;
  TensorView StageCopy(const TensorView& tensor);

  // More than so much at once is better staged in parts.
  static constexpr std::size_t kSegmentBytes = std::size_t{256} << 10;

 private:
  static constexpr std::size_t kSegments = 4;
  static constexpr std::size_t Padded(std::size_t bytes) {
    return (bytes + 15) / 16 * 16;
  }

  // Of the staged: used in turn. `done` is recorded behind the last use.
  struct Segment {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    cudaEvent_t done = nullptr;
    bool used = false;
  };

  void MakeSegments(std::size_t bytes);
  void FreeSegments();

  struct Shown {
    std::byte* from;
    std::span<std::byte> to;
  };

  const int device_;
  const bool host_views_;
  bool open_ = false;
  cudaStream_t stream_ = nullptr;
  cudaStream_t last_ = nullptr;  // That was used and not captured.
  bool used_ = false;            // There is such a one.
  cudaEvent_t behind_ = nullptr;
  std::vector<Shown> shown_;
  std::array<Segment, kSegments> segments_;
  std::size_t segment_bytes_ = 0;
  std::size_t segment_ = 0;
  std::size_t filled_ = 0;  // Of that one.
};

// The memory of a device, in the memory of the host as well: what of it was
// shown, at the same places.
class Mirror {
 public:
  // The view, of `bytes` from `base` on, as the host sees it.
  TensorView Show(Gpu& gpu, const TensorView& view, std::byte* base,
                  std::size_t bytes);

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_GPU_H_
