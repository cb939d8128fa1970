// Views as DLPack tensors, which PyTorch, JAX, CuPy, NumPy and others take
// without a copy. Needs <dlpack/dlpack.h> (Debian: libdlpack-dev).

#ifndef KVTWIN_DLPACK_H_
#define KVTWIN_DLPACK_H_

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Returns the tensor of a view with its last dimension first, as those
// libraries expect: K is [1, cells, kv_heads, head_dim]. It does not keep the
// view's memory alive. Its owner calls its deleter, once. f8_e4m3 is given as
// bytes. `device_id`: which of several CUDA devices. Errors: not_supported for
// bits and blocks, whose elements have no address; invalid_argument if the view
// has no data, or a stride is not a multiple of the element size.
inline Result<DLManagedTensor*> ToDLPack(const TensorView& view, Device device,
                                         int device_id = 0) {
  const auto size = static_cast<std::int64_t>(SizeOf(view.dtype));
  if (size == 0) {
    return Status(StatusCode::kNotSupported,
                  std::string(DTypeName(view.dtype)) +
                      " has no elements that DLPack could point to");
  }
  if (view.data == nullptr) {
    return Status(StatusCode::kInvalidArgument, "the view has no data");
  }
  struct Owned {
    DLManagedTensor managed;
    std::array<std::int64_t, 4> shape;
    std::array<std::int64_t, 4> strides;  // In elements.
  };
  auto owned = std::make_unique<Owned>();
  for (std::size_t d = 0; d < 4; ++d) {
    if (view.stride[d] % size != 0) {
      return Status(StatusCode::kInvalidArgument,
                    "stride " + std::to_string(d) + " is " +
                        std::to_string(view.stride[d]) + ", elements have " +
                        std::to_string(size) + " bytes");
    }
    owned->shape[3 - d] = view.shape[d];
    owned->strides[3 - d] = view.stride[d] / size;
  }
  DLTensor& tensor = owned->managed.dl_tensor;
  tensor.data = const_cast<void*>(view.data);
  tensor.device.device_type = device == Device::kCuda ? kDLCUDA : kDLCPU;
  tensor.device.device_id = device == Device::kCuda ? device_id : 0;
  tensor.ndim = 4;
  const bool bytes = view.dtype == DType::kF8;
  tensor.dtype.code =
      static_cast<std::uint8_t>(bytes                        ? kDLUInt
                                : view.dtype == DType::kBF16 ? kDLBfloat
                                                             : kDLFloat);
  tensor.dtype.bits = static_cast<std::uint8_t>(8 * size);
  tensor.dtype.lanes = 1;
  tensor.shape = owned->shape.data();
  tensor.strides = owned->strides.data();
  tensor.byte_offset = 0;
  owned->managed.manager_ctx = owned.get();
  owned->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<Owned*>(self->manager_ctx);
  };
  return &owned.release()->managed;
}

}  // namespace kvtwin

#endif  // KVTWIN_DLPACK_H_
