#include "optimized/cuda/gpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/index.h"
#include "core/refusals.h"
#include "optimized/storage.h"

namespace kvtwin::optimized::cuda {
namespace {

// Parts of staged memory begin on this boundary.
constexpr std::size_t kBoundary = 256;

std::size_t RoundUp(std::size_t bytes) {
  return (bytes + kBoundary - 1) / kBoundary * kBoundary;
}

bool IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Check(cudaStreamIsCapturing(stream, &status), "asking for a capture");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void Check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // Clears the error, unless it is sticky.
  throw MemoryError({StatusCode::kDeviceError,
                     fmt::format("{}: {}: {}", cudaGetErrorName(error), what,
                                 cudaGetErrorString(error))});
}

CurrentDevice::CurrentDevice(int device) {
  Check(cudaGetDevice(&before_), "asking for the device");
  Check(cudaSetDevice(device), "taking the device");
}

CurrentDevice::~CurrentDevice() { (void)cudaSetDevice(before_); }

void Gpu::Open() {
  if (open_) return;
  int count = 0;
  Check(cudaGetDeviceCount(&count), "looking for a device");
  if (device_ < 0 || device_ >= count) {
    throw MemoryError(
        Invalid("device is {}, there are {} of them", device_, count));
  }
  const CurrentDevice current(device_);
  Check(cudaEventCreateWithFlags(&behind_, cudaEventDisableTiming),
        "making an event");
  open_ = true;
  try {
    MakeSegments(kSegmentBytes);
  } catch (const MemoryError&) {
    Close();
    throw;
  }
}

void Gpu::Close() {
  if (!open_) return;
  FreeSegments();
  (void)cudaEventDestroy(behind_);
  behind_ = nullptr;
  open_ = false;
}

void Gpu::Use(cudaStream_t stream) {
  stream_ = stream;
  for (const Shown& shown : std::exchange(shown_, {})) {
    Check(cudaMemcpyAsync(shown.from, shown.to.data(), shown.to.size(),
                          cudaMemcpyHostToDevice, stream_),
          "writing back what was shown");
  }
  if (stream == last_ || Captures()) return;
  if (used_) {
    // This stream would be captured from then on, too.
    if (IsCaptured(last_)) {
      throw MemoryError(
          Untimely("the stream of the call before is being captured"));
    }
    Check(cudaEventRecord(behind_, last_), "ordering two streams");
    Check(cudaStreamWaitEvent(stream, behind_, 0), "ordering two streams");
  }
  last_ = stream;
  used_ = true;
}

bool Gpu::Captures() const { return IsCaptured(stream_); }

void Gpu::RefuseCapture(std::string_view what) const {
  if (!Captures()) return;
  throw MemoryError(Untimely(
      "the stream is being captured, and {} cannot be part of a graph", what));
}

std::shared_ptr<std::byte> Gpu::Allocate(std::size_t bytes) {
  RefuseCapture("new memory");
  void* memory = nullptr;
  // Allocates at least a byte, so that there is always an address.
  Check(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)),
        fmt::format("allocating {} bytes", bytes));
  return {static_cast<std::byte*>(memory),
          [](std::byte* freed) { (void)cudaFree(freed); }};
}

std::shared_ptr<std::byte> Gpu::AllocateZeroed(std::size_t bytes) {
  std::shared_ptr<std::byte> memory = Allocate(bytes);
  Check(cudaMemsetAsync(memory.get(), 0, bytes, stream_), "zeroing memory");
  return memory;
}

void Gpu::MakeSegments(std::size_t bytes) {
  for (Segment& segment : segments_) {
    void* host = nullptr;
    void* device = nullptr;
    const cudaError_t error = cudaMallocHost(&host, bytes);
    segment.host = static_cast<std::byte*>(host);
    Check(error, fmt::format("allocating {} pinned bytes", bytes));
    Check(cudaMalloc(&device, bytes),
          fmt::format("allocating {} bytes", bytes));
    segment.device = static_cast<std::byte*>(device);
    Check(cudaEventCreateWithFlags(&segment.done, cudaEventDisableTiming),
          "making an event");
  }
  segment_bytes_ = bytes;
}

void Gpu::FreeSegments() {
  for (Segment& segment : segments_) {
    // These functions ignore null.
    (void)cudaFree(segment.device);
    (void)cudaFreeHost(segment.host);
    if (segment.done != nullptr) (void)cudaEventDestroy(segment.done);
    segment = Segment();
  }
  segment_bytes_ = segment_ = filled_ = 0;
}

Gpu::Staged Gpu::Stage(std::size_t bytes) {
  RefuseCapture("what the host says");
  const std::size_t needed = RoundUp(std::max<std::size_t>(bytes, 1));
  if (needed > segment_bytes_) {
    Check(cudaStreamSynchronize(stream_), "waiting for what is staged");
    FreeSegments();
    MakeSegments(std::max(2 * needed, kSegmentBytes));
  }
  if (filled_ + needed > segment_bytes_) {
    Segment& full = segments_[segment_];
    Check(cudaEventRecord(full.done, stream_), "marking what is staged");
    full.used = true;
    segment_ = (segment_ + 1) % kSegments;
    filled_ = 0;
    Segment& next = segments_[segment_];
    if (next.used) {
      Check(cudaEventSynchronize(next.done), "waiting for what is staged");
      next.used = false;
    }
  }
  const Segment& segment = segments_[segment_];
  const Staged staged{segment.host + filled_, segment.device + filled_, bytes};
  filled_ += needed;
  return staged;
}

void Gpu::Send(const Staged& staged) {
  if (staged.bytes == 0) return;
  Check(cudaMemcpyAsync(staged.device, staged.host, staged.bytes,
                        cudaMemcpyHostToDevice, stream_),
        "sending what is staged");
}

void Gpu::Download(const std::byte* from, std::span<std::byte> to) const {
  RefuseCapture("a download");
  Check(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost,
                        stream_),
        "downloading");
  Check(cudaStreamSynchronize(stream_), "downloading");
}

void Gpu::Show(std::byte* from, std::span<std::byte> to) {
  Download(from, to);
  shown_.push_back({from, to});
}

bool Gpu::Holds(const TensorView& tensor) const {
  cudaPointerAttributes attributes = {};
  Check(cudaPointerGetAttributes(&attributes, tensor.data),
        "asking where a tensor is");
  return attributes.type == cudaMemoryTypeDevice ||
         attributes.type == cudaMemoryTypeManaged;
}

TensorView Gpu::StageCopy(const TensorView& tensor) {
  const Staged staged = Stage(DenseBytes(tensor.dtype, tensor.shape));
  CopyDense(tensor, staged.host);
  Send(staged);
  return DenseView(staged.device, tensor.dtype, tensor.shape);
}

TensorView Mirror::Show(Gpu& gpu, const TensorView& view, std::byte* base,
                        std::size_t bytes) {
  bytes_.resize(bytes);
  const auto* first = static_cast<const std::byte*>(view.data);
  const bool runs = view.stride[0] == 0;  // The view is of bits or of blocks.
  const std::byte* last =
      view.at(runs ? 0 : view.shape[0] - 1, view.shape[1] - 1,
              view.shape[2] - 1, view.shape[3] - 1);
  const auto shown =
      AsSize(last - first + RunBytes(view.dtype, runs ? view.shape[0] : 1));
  std::byte* here = bytes_.data() + (first - base);
  gpu.Show(base + (first - base), {here, shown});
  TensorView mirrored = view;
  mirrored.data = here;
  return mirrored;
}

}  // namespace kvtwin::optimized::cuda
