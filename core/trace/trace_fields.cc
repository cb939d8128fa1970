#include "core/trace/trace_fields.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"

namespace kvtwin {
namespace {

// Whether a tensor of this shape has `count` elements. The product fits into
// 64 bits: the loop ends once it is larger than any list.
bool MultipliesOutTo(const Shape& shape, std::size_t count) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    product *= extent;
    if (product > static_cast<std::int64_t>(kJsonElementsMax)) return false;
  }
  return AsSize(product) == count;
}

// Whether a number becomes infinite in `dtype`, which it does from half a step
// above the largest number on. For f8, which has no infinity: whether it is
// above the largest number.
bool OutOfRange(double number, DType dtype) {
  if (dtype == DType::kF16) return std::abs(number) >= 65520;
  if (dtype == DType::kF8) return std::abs(number) > 448;
  return std::abs(number) >=
         (dtype == DType::kF32 ? 0x1.ffffffp127 : 0x1.ffp127);
}

// Returns the dtype in which the numbers of a recording are held.
DType DTypeInMemory(DType stored) {
  return IsBlockDType(stored) ? DType::kF32 : stored;
}

// Stores the numbers, rounded from f32 as in Put. Returns the index of the
// first number that is not finite in `dtype`, if there is such a number.
template <class Number>
std::optional<std::size_t> Store(std::span<const Number> numbers, DType dtype,
                                 std::vector<std::byte>& bytes) {
  const std::size_t size = SizeOf(dtype);
  bytes.resize(numbers.size() * size);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto number = static_cast<double>(numbers[i]);
    const bool finite = std::isfinite(number) &&
                        !OutOfRange(number, DType::kF32) &&
                        !OutOfRange(static_cast<float>(number), dtype);
    if (!finite) return i;
    StoreElement(static_cast<float>(number), &bytes[i * size], dtype);
  }
  return std::nullopt;
}

// Appends the shortest decimals that read back equal. Errors: a number that is
// not finite.
Status AppendNumbers(const DenseTensor& tensor, std::string& text) {
  if (tensor.bytes.empty()) return {};
  const DenseTensor numbers = CopyOf(tensor.view(), DType::kF32);
  for (std::size_t i = 0; i * sizeof(float) < numbers.bytes.size(); ++i) {
    const float number = LoadAs<float>(&numbers.bytes[i * sizeof(float)]);
    if (!std::isfinite(number)) {
      return {StatusCode::kInvalidArgument,
              fmt::format("element {} is {}, which no recording can hold", i,
                          number)};
    }
    // (fmt::format_to compiles all of fmt here, which takes two seconds.)
    text += fmt::format("{}{}", i == 0 ? "" : ",", number);
  }
  return {};
}

}  // namespace

DenseTensor ReadTensor(const JsonFields& op, std::string_view key,
                       DType stored) {
  const DType dtype = DTypeInMemory(stored);
  const JsonFields fields = op.Object(key);
  DenseTensor tensor{dtype, fields.Extents("shape", 1, 4), {}};
  const JsonValue* data = fields.Need("data");
  if (!op.ok()) return tensor;
  if (!data->IsNumbers()) {
    fields.WrongList("data", *data, "a number");
    return tensor;
  }
  if (!MultipliesOutTo(tensor.shape, data->numbers.size())) {
    fields.Fail("data",
                fmt::format("has {} numbers, its shape is {}",
                            data->numbers.size(), ShapeText(tensor.shape)));
    return tensor;
  }
  const std::span<const double> numbers = data->numbers;
  if (const auto wrong = Store(numbers, dtype, tensor.bytes)) {
    fields.Fail(fmt::format("data[{}]", *wrong),
                fmt::format("is {}, out of the range of {}", numbers[*wrong],
                            DTypeName(dtype)));
  }
  return tensor;
}

Status StoreTensor(std::string_view key, DType stored, DenseTensor& tensor) {
  const std::vector<std::byte> bytes = std::exchange(tensor.bytes, {});
  const std::span<const float> numbers(
      reinterpret_cast<const float*>(bytes.data()),
      bytes.size() / sizeof(float));
  tensor.dtype = DTypeInMemory(stored);
  const auto wrong = Store(numbers, tensor.dtype, tensor.bytes);
  if (!wrong) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: element {} is {}, which no recording can hold", key,
                      *wrong, numbers[*wrong])};
}

Status AppendTensor(std::string_view key, const DenseTensor& tensor,
                    std::string& text) {
  text += fmt::format(R"(,"{}":{{"shape":[{},{},{})", key, tensor.shape[0],
                      tensor.shape[1], tensor.shape[2]);
  if (tensor.shape[3] != 1) text += fmt::format(",{}", tensor.shape[3]);
  text += R"(],"data":[)";
  Status status = AppendNumbers(tensor, text);
  text += "]}";
  if (status.ok()) return status;
  return {status.code(), fmt::format("{}: {}", key, status.message())};
}

TraceAttention ReadTraceAttention(const JsonFields& attend) {
  constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16};
  constexpr std::array<std::string_view, 3> kNames = {"f32", "f16", "bf16"};
  TraceAttention attention;
  if (attend.Find("dtype") != nullptr) {
    attention.dtype = At(kDTypes, attend.Name("dtype", kNames));
  }
  if (attend.Find("tolerance") == nullptr) return attention;
  attention.tolerance = attend.Real("tolerance");
  if (!(attention.tolerance >= 0)) {
    attend.Fail("tolerance", fmt::format("is {}, it must not be negative",
                                         attention.tolerance));
  }
  return attention;
}

double ReadSoftCap(const JsonFields& fields) {
  if (fields.Find("soft_cap") == nullptr) return 0;
  const double soft_cap = fields.Real("soft_cap");
  if (!(soft_cap >= 0)) {
    fields.Fail("soft_cap",
                fmt::format("is {}, it must not be negative", soft_cap));
  }
  if (soft_cap > kLogitMost) fields.Fail("soft_cap", "is above 2^50");
  return soft_cap;
}

std::vector<float> ReadSinks(const JsonFields& fields) {
  const JsonValue* const sinks = fields.Find("sinks");
  if (sinks == nullptr) return {};
  if (!sinks->IsNumbers()) fields.WrongList("sinks", *sinks, "a number");
  std::vector<float> numbers;
  for (const double sink : sinks->numbers) {
    if (!(std::abs(sink) <= kLogitMost)) {
      fields.Fail("sinks",
                  fmt::format("has {}, which is not from -2^50 to 2^50", sink));
      return {};
    }
    numbers.push_back(static_cast<float>(sink));
  }
  return numbers;
}

}  // namespace kvtwin
