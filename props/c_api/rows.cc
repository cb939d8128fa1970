// Rows as numbers, and the elements of tensors.

#include "kvtwin/rows.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/index.h"
#include "core/names.h"
#include "props/backend/c_conversions.h"
#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

namespace {

Result<DType> DTypeFromC(const kvtwin_dtype& dtype) {
  const int raw = RawEnum(dtype);
  if (raw < 0 || raw > KVTWIN_Q4_0) {
    return Invalid("dtype is {}, rows have 0 to {}", raw, AsInt(KVTWIN_Q4_0));
  }
  return static_cast<DType>(raw);
}

// Errors: null, an unknown dtype, no data, or an index outside of the shape.
Result<TensorView> WithElement(std::string_view name,
                               const kvtwin_tensor* tensor,
                               const Shape& index) {
  if (Status status = NeedAll({{name, tensor}}); !status.ok()) return status;
  Result<TensorView> view = TensorFromC(name, tensor);
  if (!view.ok()) return view;
  if (view->data == nullptr) return Invalid("{}.data is NULL", name);
  for (std::size_t dim = 0; dim < index.size(); ++dim) {
    if (index[dim] >= 0 && index[dim] < view->shape[dim]) continue;
    return Invalid("index {} is {}, {} has the shape {}", dim, index[dim], name,
                   ShapeText(view->shape));
  }
  return view;
}

}  // namespace

kvtwin_status kvtwin_row_bytes(kvtwin_dtype dtype, size_t count,
                               size_t* bytes) {
  return Answer([&]() -> Status {
    if (Status status = NeedAll({{"bytes", bytes}}); !status.ok()) {
      return status;
    }
    const auto known = DTypeFromC(dtype);
    if (!known.ok()) return known.status();
    if (count > PTRDIFF_MAX / sizeof(float)) {
      return Invalid("count is {}", count);
    }
    if (IsBlockDType(*known) && count % kBlockElements != 0) {
      return Invalid("{} has blocks of {} elements, the row has {}",
                     DTypeName(*known), kBlockElements, count);
    }
    *bytes =
        static_cast<size_t>(RunBytes(*known, static_cast<std::int64_t>(count)));
    return {};
  });
}

kvtwin_status kvtwin_row_to_f32(kvtwin_dtype dtype, const void* row,
                                size_t bytes, float* numbers, size_t count) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"row", row}, {"numbers", numbers}});
    if (!status.ok()) return status;
    const auto known = DTypeFromC(dtype);
    if (!known.ok()) return known.status();
    return RowToF32({static_cast<const std::byte*>(row), bytes}, *known,
                    {numbers, count});
  });
}

kvtwin_status kvtwin_row_from_f32(kvtwin_dtype dtype, const float* numbers,
                                  size_t count, void* row, size_t bytes) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"numbers", numbers}, {"row", row}});
    if (!status.ok()) return status;
    const auto known = DTypeFromC(dtype);
    if (!known.ok()) return known.status();
    return RowFromF32({numbers, count}, *known,
                      {static_cast<std::byte*>(row), bytes});
  });
}

kvtwin_status kvtwin_tensor_element(const kvtwin_tensor* tensor, int64_t i,
                                    int64_t j, int64_t k, int64_t l,
                                    float* number) {
  return Answer([&]() -> Status {
    if (Status status = NeedAll({{"number", number}}); !status.ok()) {
      return status;
    }
    const auto view = WithElement("tensor", tensor, {i, j, k, l});
    if (!view.ok()) return view.status();
    if (!IsRowDType(view->dtype)) {
      return Invalid("dtype is {}, which rows cannot have",
                     DTypeName(view->dtype));
    }
    *number = ElementAsF32(*view, i, j, k, l);
    return {};
  });
}

kvtwin_status kvtwin_mask_may_attend(const kvtwin_tensor* mask, int64_t column,
                                     int64_t row, int32_t* yes) {
  return Answer([&]() -> Status {
    if (Status status = NeedAll({{"yes", yes}}); !status.ok()) return status;
    const auto view = WithElement("mask", mask, {column, row, 0, 0});
    if (!view.ok()) return view.status();
    if (!IsMaskDType(view->dtype)) {
      return Invalid("masks cannot have the dtype {}", DTypeName(view->dtype));
    }
    *yes = MayAttend(*view, column, row) ? 1 : 0;
    return {};
  });
}
