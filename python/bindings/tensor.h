// Converts tensors to Python and back. The shapes of numpy are in reverse
// order: its last dimension is the fastest.

#ifndef KVTWIN_PYTHON_BINDINGS_TENSOR_H_
#define KVTWIN_PYTHON_BINDINGS_TENSOR_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "kvtwin/tensor.h"

namespace kvtwin::python {

namespace nb = nanobind;

// Returns a numpy array over the memory of `tensor`: read-only; elements for
// which numpy has no type are bytes or 16-bit words. Dimensions above `rank`
// must be 1. The array keeps `owner` alive.
nb::object NumpyView(const TensorView& tensor, std::size_t rank,
                     std::shared_ptr<const void> owner);

// The same for DLPack, which has the types bf16 and f8.
nb::object DlpackView(const TensorView& tensor, std::size_t rank,
                      std::shared_ptr<const void> owner);

// Returns the elements as a new numpy array of float32. Bits become 0 and -inf.
nb::object Float32Copy(const TensorView& tensor, std::size_t rank);

// Returns what `object` shows, if it is a kvtwin.Tensor. Errors: its view has
// ended; raised as a StaleViewError.
std::optional<TensorView> ViewOfTensor(nb::handle object);

// Returns the shape as numpy has it, counted in elements, also for blocks.
nb::tuple ShapeOf(const TensorView& tensor, std::size_t rank);

// An argument that is an array, or can be converted to one. The cache checks
// whether it accepts the array. Elements of 16-bit words are bf16; bytes are
// f8, or blocks if `dtype` is a block dtype. Errors: raised as Python
// exceptions.
class ArrayArgument {
 public:
  ArrayArgument(nb::handle object, const char* name, DType dtype);
  const TensorView& view() const { return view_; }

 private:
  nb::ndarray<nb::ro, nb::device::cpu> array_;
  TensorView view_;
};

// Returns what a tensor of torch shows, [batch, heads, tokens, head_dim], as
// [head_dim, heads, batch * tokens], without a copy and without DLPack, which
// takes microseconds. Errors: raised, if the rows do not lie at equal
// distances.
TensorView TorchRows(nb::handle tensor, DType dtype);

}  // namespace kvtwin::python

#endif  // KVTWIN_PYTHON_BINDINGS_TENSOR_H_
