#include "tensor.h"

#include <fmt/format.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/elements.h"
#include "core/index.h"

namespace kvtwin::python {
namespace {

using Code = nb::dlpack::dtype_code;

constexpr nb::dlpack::dtype Type(Code code, std::uint8_t bits) {
  return {static_cast<std::uint8_t>(code), bits, 1};
}

nb::dlpack::dtype NumpyType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return Type(Code::Float, 32);
    case DType::kF16:
      return Type(Code::Float, 16);
    case DType::kBF16:
      return Type(Code::UInt, 16);
    default:
      return Type(Code::UInt, 8);
  }
}

nb::dlpack::dtype DlpackType(DType dtype) {
  if (dtype == DType::kBF16) return Type(Code::Bfloat, 16);
  if (dtype == DType::kF8) return Type(Code::Float8_E4M3FN, 8);
  return NumpyType(dtype);
}

nb::capsule Keep(std::shared_ptr<const void> owner) {
  auto kept = std::make_unique<std::shared_ptr<const void>>(std::move(owner));
  nb::capsule capsule(kept.get(), [](void* memory) noexcept {
    delete static_cast<std::shared_ptr<const void>*>(memory);
  });
  kept.release();
  return capsule;
}

template <class Array>
nb::object ViewAs(const TensorView& tensor, std::size_t rank,
                  nb::dlpack::dtype dtype, std::shared_ptr<const void> owner) {
  // Blocks and bits are bytes, one after another.
  const bool bytes = SizeOf(tensor.dtype) == 0;
  const std::int64_t size = dtype.bits / 8;
  std::vector<std::size_t> shape(rank);
  std::vector<std::int64_t> strides(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    shape[rank - 1 - i] = AsSize(tensor.shape[i]);
    strides[rank - 1 - i] = tensor.stride[i] / size;
  }
  if (bytes) {
    shape.back() = AsSize(RunBytes(tensor.dtype, tensor.shape[0]));
    strides.back() = 1;
  }
  const nb::capsule keeper = Keep(std::move(owner));
  return nb::cast(Array(tensor.data, rank, shape.data(), keeper, strides.data(),
                        dtype, nb::device::cpu::value));
}

bool BitAt(const TensorView& bits, std::int64_t i, std::int64_t j) {
  const auto byte = std::to_integer<unsigned>(*(bits.at(0, j) + i / 8));
  return ((byte >> (i % 8)) & 1U) != 0;
}

}  // namespace

nb::object NumpyView(const TensorView& tensor, std::size_t rank,
                     std::shared_ptr<const void> owner) {
  return ViewAs<nb::ndarray<nb::numpy, nb::ro>>(
      tensor, rank, NumpyType(tensor.dtype), std::move(owner));
}

nb::object DlpackView(const TensorView& tensor, std::size_t rank,
                      std::shared_ptr<const void> owner) {
  return ViewAs<nb::ndarray<nb::array_api, nb::ro>>(
      tensor, rank, DlpackType(tensor.dtype), std::move(owner));
}

nb::object Float32Copy(const TensorView& tensor, std::size_t rank) {
  const auto numbers = std::make_shared<std::vector<float>>();
  numbers->reserve(AsSize(tensor.elements()));
  const Shape& shape = tensor.shape;
  for (std::int64_t l = 0; l < shape[3]; ++l) {
    for (std::int64_t k = 0; k < shape[2]; ++k) {
      for (std::int64_t j = 0; j < shape[1]; ++j) {
        for (std::int64_t i = 0; i < shape[0]; ++i) {
          numbers->push_back(
              tensor.dtype != DType::kBits ? LoadFrom(tensor, i, j, k, l)
              : BitAt(tensor, i, j)        ? 0.0F
                                    : -std::numeric_limits<float>::infinity());
        }
      }
    }
  }
  std::vector<std::size_t> sizes(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    sizes[rank - 1 - i] = AsSize(shape[i]);
  }
  const nb::capsule keeper = Keep(numbers);
  return nb::cast(nb::ndarray<nb::numpy, float>(numbers->data(), rank,
                                                sizes.data(), keeper));
}

nb::tuple ShapeOf(const TensorView& tensor, std::size_t rank) {
  nb::list shape;
  for (std::size_t i = rank; i > 0; --i) shape.append(tensor.shape[i - 1]);
  return nb::tuple(shape);
}

ArrayArgument::ArrayArgument(nb::handle object, const char* name, DType dtype) {
  const auto raise = [&](std::string_view why) {
    Raise({StatusCode::kInvalidArgument, fmt::format("{} {}", name, why)});
  };
  nb::object kept = nb::borrow(object);
  // Whether the array has a known type. Lists and other types become float32.
  const auto known = [&] {
    if (!nb::ndarray_check(kept) || !nb::try_cast(kept, array_)) return false;
    const nb::dlpack::dtype type = array_.dtype();
    if (type == Type(Code::Float, 32)) {
      view_.dtype = DType::kF32;
    } else if (type == Type(Code::Float, 16)) {
      view_.dtype = DType::kF16;
    } else if (type == Type(Code::Bfloat, 16)) {
      view_.dtype = DType::kBF16;
    } else if (type == Type(Code::Float8_E4M3FN, 8)) {
      view_.dtype = DType::kF8;
    } else if (type == Type(Code::UInt, 16)) {
      view_.dtype = DType::kBF16;
    } else if (type == Type(Code::UInt, 8)) {
      view_.dtype = IsBlockDType(dtype) ? dtype : DType::kF8;
    } else {
      return false;
    }
    return true;
  };
  if (object.is_none()) return;  // A tensor without data.
  if (!known()) {
    kept = nb::module_::import_("numpy").attr("asarray")(kept, "float32");
    if (!known()) raise("cannot be made an array of float32");
  }
  if (array_.ndim() < 1 || array_.ndim() > 4) {
    raise(fmt::format("has {} dimensions, it must have 1 to 4", array_.ndim()));
  }
  const auto is_broadcast = [&] {
    for (std::size_t i = 0; i < array_.ndim(); ++i) {
      if (array_.stride(i) != 0) return false;
    }
    return array_.size() > 1;
  };
  // Strides that are all 0 would say that the view has none.
  if (is_broadcast()) {
    kept = nb::module_::import_("numpy").attr("array")(kept,
                                                       nb::arg("order") = "C");
    if (!known()) raise("cannot be made an array of float32");
  }
  view_.data = array_.data();
  const auto size = static_cast<std::int64_t>(array_.itemsize());
  std::int64_t dense = size;
  for (std::size_t i = 0; i < 4; ++i) {
    if (i < array_.ndim()) {
      const std::size_t at = array_.ndim() - 1 - i;
      view_.shape[i] = static_cast<std::int64_t>(array_.shape(at));
      view_.stride[i] = array_.stride(at) * size;
    } else {
      view_.stride[i] = dense;
    }
    dense = view_.stride[i] * view_.shape[i];
  }
  if (!IsBlockDType(view_.dtype)) return;
  const std::int64_t block = RunBytes(view_.dtype, kBlockElements);
  if (view_.shape[0] % block != 0 || view_.stride[0] != 1) {
    raise(
        fmt::format("has rows of {} bytes, which are not {} bytes a block "
                    "without gaps",
                    view_.shape[0], block));
  }
  view_.shape[0] = view_.shape[0] / block * kBlockElements;
  view_.stride[0] = 0;
}

TensorView TorchRows(nb::handle tensor, DType dtype) {
  using Four = std::array<std::int64_t, 4>;
  const auto shape = nb::cast<Four>(tensor.attr("shape"));
  const auto stride = nb::cast<Four>(tensor.attr("stride")());
  const auto [batch, heads, tokens, head_dim] = shape;
  if (batch > 1 && tokens > 1 && stride[0] != tokens * stride[2]) {
    Raise({StatusCode::kInvalidArgument,
           "the rows of the batch do not lie at equal distances"});
  }
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const std::int64_t row = tokens > 1 ? stride[2] : stride[0];
  TensorView view;
  view.data = reinterpret_cast<const void*>(
      nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
  view.dtype = dtype;
  view.shape = {head_dim, heads, batch * tokens, 1};
  view.stride = {stride[3] * size, stride[1] * size, row * size,
                 row * size * batch * tokens};
  return view;
}

}  // namespace kvtwin::python
