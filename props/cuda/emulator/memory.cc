// Device memory and pinned memory. A piece lies between inaccessible pages; its
// end is as close to the second one as its alignment allows.

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "props/cuda/emulator/internal.h"

namespace kvtwin::emulator {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlign = 256;
constexpr std::byte kCanary{0xa5};

std::size_t RoundUp(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}

std::size_t FromEnvironment(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

}  // namespace

Memory::Memory()
    : limit_(FromEnvironment("KVTWIN_EMULATOR_MEMORY", std::size_t{8} << 30)),
      protect_(FromEnvironment("KVTWIN_EMULATOR_PROTECT", 0) != 0) {}

cudaError_t Memory::Allocate(Kind kind, std::size_t bytes, Random& random,
                             void** out) {
  ReportFaults();
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (kind == Kind::kDevice && bytes > limit_ - std::min(limit_, used_)) {
    return cudaErrorMemoryAllocation;
  }
  const std::size_t room = RoundUp(bytes, kAlign);
  const std::size_t pages = RoundUp(room, kPage);
  Piece piece = {kind, bytes, nullptr, pages + 2 * kPage, CurrentDevice()};
  void* mapped = mmap(nullptr, piece.mapped_bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
  piece.mapped = static_cast<std::byte*>(mapped);
  mprotect(piece.mapped + kPage, pages, PROT_READ | PROT_WRITE);

  std::byte* const begin = piece.mapped + kPage + pages - room;
  std::memset(piece.mapped + kPage, static_cast<int>(kCanary), pages - room);
  std::memset(begin + bytes, static_cast<int>(kCanary), room - bytes);
  if ((random.Next() >> 63) != 0) {
    std::memset(begin, kGarbage, bytes);
  } else {
    for (std::size_t i = 0; i < bytes; i += 8) {
      const std::uint64_t bits = random.Next();
      std::memcpy(begin + i, &bits, std::min<std::size_t>(8, bytes - i));
    }
  }
  if (kind == Kind::kDevice) used_ += bytes;
  pieces_.emplace(begin, piece);
  Protect(piece);
  *out = begin;
  return cudaSuccess;
}

void Memory::Free(void* begin) {
  const auto at = pieces_.find(static_cast<std::byte*>(begin));
  if (at == pieces_.end()) {
    std::fprintf(stderr, "emulator: cudaFreeAsync of what is free already\n");
    std::abort();
  }
  const Piece piece = at->second;
  Open();
  const std::byte* const bytes = at->first;
  const std::byte* const end = piece.mapped + piece.mapped_bytes - kPage;
  for (const std::byte* i = piece.mapped + kPage; i < end; ++i) {
    if (i == bytes) i += piece.bytes;
    if (i < end && *i != kCanary) {
      std::fprintf(stderr,
                   "emulator: byte %td of an allocation of %zu was written\n",
                   i - bytes, piece.bytes);
      std::abort();
    }
  }
  Close();
  if (piece.kind == Kind::kDevice) used_ -= piece.bytes;
  pieces_.erase(at);
  munmap(piece.mapped, piece.mapped_bytes);
}

const Memory::Piece* Memory::Find(const void* begin) const {
  const auto at = pieces_.find(static_cast<const std::byte*>(begin));
  return at == pieces_.end() ? nullptr : &at->second;
}

const Memory::Piece* Memory::Around(const void* address,
                                    std::size_t* offset) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  auto at = pieces_.upper_bound(byte);
  if (at == pieces_.begin()) return nullptr;
  --at;
  *offset = static_cast<std::size_t>(byte - at->first);
  return *offset < at->second.bytes ? &at->second : nullptr;
}

const Memory::Piece* Memory::Near(const void* address,
                                  std::ptrdiff_t* offset) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  for (const auto& [begin, piece] : pieces_) {
    if (byte < piece.mapped || byte >= piece.mapped + piece.mapped_bytes) {
      continue;
    }
    *offset = byte - begin;
    return &piece;
  }
  return nullptr;
}

bool Memory::Holds(Kind kind, const void* address, std::size_t bytes) const {
  std::size_t offset = 0;
  const Piece* const piece = Around(address, &offset);
  return piece != nullptr && piece->kind == kind &&
         bytes <= piece->bytes - offset;
}

void Memory::Protect(const Piece& piece) const {
  if (!protect_ || piece.kind != Kind::kDevice) return;
  mprotect(piece.mapped + kPage, piece.mapped_bytes - 2 * kPage,
           open_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void Memory::SetProtect(bool protect) {
  Open();  // Pieces that are protected now have to be opened.
  protect_ = protect;
  Close();
}

void Memory::Open() {
  if (open_++ > 0 || !protect_) return;
  for (const auto& [begin, piece] : pieces_) Protect(piece);
}

void Memory::Close() {
  if (--open_ > 0 || !protect_) return;
  for (const auto& [begin, piece] : pieces_) Protect(piece);
}

}  // namespace kvtwin::emulator

namespace {

using kvtwin::emulator::Call;
using kvtwin::emulator::Device;
using kvtwin::emulator::Do;
using Kind = kvtwin::emulator::Memory::Kind;

cudaError_t FreeNow(Device& device, Kind kind, void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto* const piece = device.memory.Find(pointer);
  if (piece == nullptr || piece->kind != kind) return cudaErrorInvalidValue;
  device.streams.FinishAll();
  device.memory.Free(pointer);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return Do(Call::kMalloc, [&](Device& device) {
    if (pointer == nullptr) return cudaErrorInvalidValue;
    const cudaError_t error = kvtwin::emulator::RefuseInCapture();
    if (error != cudaSuccess) return error;
    return device.memory.Allocate(Kind::kDevice, bytes, device.streams.random(),
                                  pointer);
  });
}

cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes,
                            cudaStream_t stream) {
  return Do(Call::kMalloc, [&](Device& device) {
    if (pointer == nullptr) return cudaErrorInvalidValue;
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) return cudaErrorNotSupported;
    return device.memory.Allocate(Kind::kDevice, bytes, device.streams.random(),
                                  pointer);
  });
}

cudaError_t cudaMallocHost(void** pointer, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(pointer, bytes, flags);
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  return Do(Call::kMallocHost, [&](Device& device) {
    if (pointer == nullptr || flags > 7) return cudaErrorInvalidValue;
    const cudaError_t error = kvtwin::emulator::RefuseInCapture();
    if (error != cudaSuccess) return error;
    return device.memory.Allocate(Kind::kPinned, bytes, device.streams.random(),
                                  pointer);
  });
}

cudaError_t cudaFree(void* pointer) {
  return Do(Call::kFree, [&](Device& device) {
    const cudaError_t error = kvtwin::emulator::RefuseInCapture();
    if (error != cudaSuccess) return error;
    return FreeNow(device, Kind::kDevice, pointer);
  });
}

cudaError_t cudaFreeHost(void* pointer) {
  return Do(Call::kFree, [&](Device& device) {
    const cudaError_t error = kvtwin::emulator::RefuseInCapture();
    if (error != cudaSuccess) return error;
    return FreeNow(device, Kind::kPinned, pointer);
  });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return Do(Call::kFree, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) return cudaErrorNotSupported;
    if (pointer == nullptr) return cudaSuccess;
    const auto* const piece = device.memory.Find(pointer);
    if (piece == nullptr || piece->kind != Kind::kDevice) {
      return cudaErrorInvalidValue;
    }
    return device.streams.Put(
        found, [&device, pointer] { device.memory.Free(pointer); });
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return Do(Call::kDevice, [&](Device& device) {
    if (free_bytes == nullptr || total_bytes == nullptr) {
      return cudaErrorInvalidValue;
    }
    *total_bytes = device.memory.limit();
    *free_bytes = *total_bytes - std::min(*total_bytes, device.memory.used());
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* pointer) {
  return Do(Call::kQuery, [&](Device& device) {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr,
                   const_cast<void*>(pointer)};
    std::size_t offset = 0;
    const auto* const piece = device.memory.Around(pointer, &offset);
    if (piece == nullptr) return cudaSuccess;
    attributes->device = piece->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->type = cudaMemoryTypeHost;
    if (piece->kind == Kind::kDevice) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->hostPointer = nullptr;
    }
    return cudaSuccess;
  });
}
