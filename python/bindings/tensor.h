// Tensors on their way to Python and back. numpy's shapes are ours backwards:
// its last dimension is the fastest.

#ifndef KVTWIN_PYTHON_BINDINGS_TENSOR_H_
#define KVTWIN_PYTHON_BINDINGS_TENSOR_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>

#include "kvtwin/tensor.h"

namespace kvtwin::python {

namespace nb = nanobind;

// A tensor of somebody else's, as numpy has it: read-only, elements that numpy
// has no type for as bytes or words. Dimensions above `rank` must be 1. What
// `owner` points to lives as long as the array.
nb::object NumpyView(const TensorView& tensor, std::size_t rank,
                     std::shared_ptr<const void> owner);

// The same for DLPack, which knows bf16 and f8.
nb::object DlpackView(const TensorView& tensor, std::size_t rank,
                      std::shared_ptr<const void> owner);

// As numbers: a new numpy array of float32. Of bits, 0 and -inf.
nb::object Float32Copy(const TensorView& tensor, std::size_t rank);

// What numpy would call the shape; of elements, also where they are in blocks.
nb::tuple ShapeOf(const TensorView& tensor, std::size_t rank);

// An argument that is an array, or can become one: whether the cache takes it,
// the cache says. Words are bf16, bytes f8, or blocks if `dtype` is one of
// those. Errors: raised.
class ArrayArgument {
 public:
  ArrayArgument(nb::handle object, const char* name, DType dtype);
  const TensorView& view() const { return view_; }

 private:
  nb::ndarray<nb::ro, nb::device::cpu> array_;
  TensorView view_;
};

}  // namespace kvtwin::python

#endif  // KVTWIN_PYTHON_BINDINGS_TENSOR_H_
