// Copies and fills.

#include <cstring>
#include <memory>
#include <vector>

#include "props/cuda/emulator/internal.h"

using kvtwin::emulator::Call;
using kvtwin::emulator::Device;
using kvtwin::emulator::Do;
using kvtwin::emulator::Work;
using Kind = kvtwin::emulator::Memory::Kind;

namespace {

// `height` rows of `width` bytes; a pitch is the distance between two rows.
struct Copy {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch;
  std::size_t width;
  std::size_t height;
};

std::size_t Extent(std::size_t pitch, const Copy& copy) {
  return pitch * (copy.height - 1) + copy.width;
}

void Do(const Copy& copy) {
  for (std::size_t i = 0; i < copy.height; ++i) {
    std::memmove(static_cast<std::byte*>(copy.to) + i * copy.to_pitch,
                 static_cast<const std::byte*>(copy.from) + i * copy.from_pitch,
                 copy.width);
  }
}

bool IsDevice(const Device& device, const void* address) {
  std::size_t offset = 0;
  const auto* const piece = device.memory.Around(address, &offset);
  return piece != nullptr && piece->kind == Kind::kDevice;
}

// Whether `address` may be the source or target of a copy, on the device or
// not.
bool Fits(const Device& device, const void* address, std::size_t bytes,
          bool on_device) {
  return on_device ? device.memory.Holds(Kind::kDevice, address, bytes)
                   : !IsDevice(device, address);
}

// `waits`: the call returns when the copy is done, unless it is from device to
// device.
cudaError_t Put(Device& device, Copy copy, cudaMemcpyKind kind,
                cudaStream_t stream, bool waits) {
  const cudaStream_t found = device.streams.Find(stream);
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return cudaErrorInvalidMemcpyDirection;
  }
  if (copy.width > copy.to_pitch || copy.width > copy.from_pitch) {
    return cudaErrorInvalidPitchValue;
  }
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  const bool to_device =
      kind == cudaMemcpyDefault
          ? IsDevice(device, copy.to)
          : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device =
      kind == cudaMemcpyDefault
          ? IsDevice(device, copy.from)
          : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const std::size_t to_bytes = Extent(copy.to_pitch, copy);
  const std::size_t from_bytes = Extent(copy.from_pitch, copy);
  if (!Fits(device, copy.to, to_bytes, to_device) ||
      !Fits(device, copy.from, from_bytes, from_device)) {
    return cudaErrorInvalidValue;
  }

  const bool pageable_to =
      !to_device && !device.memory.Holds(Kind::kPinned, copy.to, to_bytes);
  const bool pageable_from =
      !from_device &&
      !device.memory.Holds(Kind::kPinned, copy.from, from_bytes);
  if ((pageable_to || pageable_from) && found->capture != nullptr) {
    // The copy would wait, or read bytes that a run of the graph cannot read
    // again.
    found->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  if (pageable_from && to_device && !waits) {
    // The host's bytes are read now: the caller may overwrite them afterwards.
    const auto* const begin = static_cast<const std::byte*>(copy.from);
    auto staged =
        std::make_shared<std::vector<std::byte>>(begin, begin + from_bytes);
    copy.from = staged->data();
    return device.streams.Put(found, [copy, staged] { Do(copy); });
  }
  const cudaError_t error = device.streams.Put(found, [copy] { Do(copy); });
  if (error == cudaSuccess &&
      (pageable_to || (waits && !(to_device && from_device)))) {
    device.streams.Finish(found);
  }
  return error;
}

cudaError_t Fill(Device& device, void* to, int value, std::size_t bytes,
                 cudaStream_t stream) {
  const cudaStream_t found = device.streams.Find(stream);
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  if (!device.memory.Holds(Kind::kDevice, to, bytes) &&
      !device.memory.Holds(Kind::kPinned, to, bytes)) {
    return cudaErrorInvalidValue;
  }
  return device.streams.Put(found,
                            [=] { std::memset(to, value & 0xff, bytes); });
}

}  // namespace

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                       cudaMemcpyKind kind) {
  return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from,
                         std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
  return Do(Call::kCopy, [&](Device& device) {
    return Put(device, {to, to_pitch, from, from_pitch, width, height}, kind,
               nullptr, /*waits=*/true);
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width,
                              std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return Do(Call::kCopy, [&](Device& device) {
    return Put(device, {to, to_pitch, from, from_pitch, width, height}, kind,
               stream, /*waits=*/false);
  });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return Do(Call::kCopy, [&](Device& device) {
    return Fill(device, to, value, bytes, nullptr);
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes,
                            cudaStream_t stream) {
  return Do(Call::kCopy, [&](Device& device) {
    return Fill(device, to, value, bytes, stream);
  });
}
