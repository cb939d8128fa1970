// A device, as one cache or pool uses it: its memory, the stream of calls, and
// data on its way to the device. Errors of CUDA are thrown as MemoryError,
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

// Throws unless `error` is a success. `what` describes the failed operation.
void Check(cudaError_t error, std::string_view what);

// Sets the calling thread's device while this object lives, then restores the
// previous one.
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
  // With `host_views`, views of rows are copies in host memory.
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

  // All functions below require that the device is open and current.
  //
  // Puts later calls on this stream, after everything that was put on the
  // stream before. (While the stream is captured, ordering is left to the
  // caller.)
  void Use(cudaStream_t stream);
  cudaStream_t stream() const { return stream_; }
  bool Captures() const;
  // Throws if the stream is captured: `what` cannot be part of a graph.
  void RefuseCapture(std::string_view what) const;

  // Freed with its last owner; freeing may wait for the device.
  std::shared_ptr<std::byte> Allocate(std::size_t bytes);
  std::shared_ptr<std::byte> AllocateZeroed(std::size_t bytes);

  // Host memory, and the device memory that it is sent to. Valid for work that
  // is put on the stream before the next Stage. Stage waits if all segments are
  // still in use.
  struct Staged {
    std::byte* host;
    std::byte* device;
    std::size_t bytes;
  };
  Staged Stage(std::size_t bytes);
  void Send(const Staged& staged);
  // Stages and sends several parts, and returns their addresses on the device.
  // They are valid as long as memory from Stage.
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

  // Copies to the host, and waits for the copy.
  void Download(const std::byte* from, std::span<std::byte> to) const;
  // Does the same for a view. Whatever the caller writes to `to` before the
  // next call is then written back to the device: tests (props/) overwrite the
  // rows of free cells in this way.
  void Show(std::byte* from, std::span<std::byte> to);
  void Hide() { shown_.clear(); }

  // Holds: whether a tensor is in device memory. StageCopy: a dense copy of a
  // host tensor, staged for the device.
  bool Holds(const TensorView& tensor) const;
  TensorView StageCopy(const TensorView& tensor);

  // Data of more bytes than this is better staged in parts.
  static constexpr std::size_t kSegmentBytes = std::size_t{256} << 10;

 private:
  static constexpr std::size_t kSegments = 4;
  static constexpr std::size_t Padded(std::size_t bytes) {
    return (bytes + 15) / 16 * 16;
  }

  // Segments of staged memory, used in turn. `done` is recorded after the last
  // use.
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
  // The last stream that was used and not captured.
  cudaStream_t last_ = nullptr;
  bool used_ = false;  // Whether `last_` is set.
  cudaEvent_t behind_ = nullptr;
  std::vector<Shown> shown_;
  std::array<Segment, kSegments> segments_;
  std::size_t segment_bytes_ = 0;
  std::size_t segment_ = 0;
  std::size_t filled_ = 0;  // Bytes in use of the current segment.
};

// Host copies of device memory: the parts that were shown, at the same offsets.
class Mirror {
 public:
  // Shows a view of the `bytes` bytes from `base` on, as a view of host memory.
  TensorView Show(Gpu& gpu, const TensorView& view, std::byte* base,
                  std::size_t bytes);

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_GPU_H_
