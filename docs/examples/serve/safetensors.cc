#include "safetensors.h"

#include <fcntl.h>
#include <kvtwin/rows.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace serve {
namespace {

using kvtwin::DType, kvtwin::Result, kvtwin::Status, kvtwin::TensorView;
using Json = nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;

// Reads a list of `count` numbers, each at most `max`.
bool ReadNumbers(const Json& list, std::size_t count, std::uint64_t max,
                 std::uint64_t* out) {
  if (!list.is_array() || list.size() != count) return false;
  for (std::size_t i = 0; i < count; ++i) {
    if (!list[i].is_number_unsigned() || list[i] > max) return false;
    out[i] = list[i];
  }
  return true;
}

// Reads a tensor's entry in the header. Its `data` is set only if the dtype and
// the number of dimensions can be those of weights.
Status ReadTensor(const Json& entry, std::span<const std::byte> data,
                  TensorView& tensor) {
  static const std::map<std::string, DType> kDTypes = {
      {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}};
  if (!entry.is_object() || !entry.contains("dtype") ||
      !entry.contains("shape") || !entry.contains("data_offsets") ||
      !entry["dtype"].is_string()) {
    return Invalid("needs dtype, shape and data_offsets");
  }
  std::uint64_t range[2], shape[2] = {1, 1};  // Shape: rows, columns.
  if (!ReadNumbers(entry["data_offsets"], 2, data.size(), range) ||
      range[0] > range[1]) {
    return Invalid("data_offsets are outside of the file");
  }
  const auto dtype = kDTypes.find(entry["dtype"].get<std::string>());
  const std::size_t dims = entry["shape"].size();
  if (dtype == kDTypes.end() || dims < 1 || dims > 2) return {};
  if (!ReadNumbers(entry["shape"], dims, INT32_MAX, &shape[2 - dims])) {
    return Invalid("the shape is not a list of sizes");
  }
  tensor = DenseView(data.data() + range[0], dtype->second,
                     {static_cast<std::int64_t>(shape[1]),
                      static_cast<std::int64_t>(shape[0]), 1, 1});
  if (DenseBytes(tensor.dtype, tensor.shape) == range[1] - range[0]) return {};
  return Invalid("has other data than its shape " +
                 kvtwin::ShapeText(tensor.shape));
}

}  // namespace

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) return Invalid(path + ": cannot read");
  return std::move(text).str();
}

Result<Safetensors> Safetensors::Open(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info = {};
  const bool regular =
      file >= 0 && fstat(file, &info) == 0 && S_ISREG(info.st_mode);
  const auto size = static_cast<std::size_t>(info.st_size);
  void* mapped = MAP_FAILED;
  if (regular && size > 0) {
    mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  }
  if (file >= 0) close(file);
  if (mapped == MAP_FAILED) return Invalid(path + ": cannot be mapped");
  Safetensors weights;
  weights.path_ = path;
  weights.mapped_ = std::shared_ptr<const std::byte>(
      static_cast<const std::byte*>(mapped),
      [mapped, size](const std::byte*) { munmap(mapped, size); });
  weights.bytes_ = {weights.mapped_.get(), size};
  const Status status = weights.ReadHeader();
  if (!status.ok()) return Invalid(path + ": " + status.message());
  return weights;
}

Status Safetensors::ReadHeader() {
  std::uint64_t length = 0;
  if (bytes_.size() < sizeof length) return Invalid("too short");
  std::memcpy(&length, bytes_.data(), sizeof length);
  const auto rest = bytes_.subspan(sizeof length);
  if (length > kMaxHeader || length > rest.size()) {
    return Invalid("its header has a length of " + std::to_string(length) +
                   " bytes, of " + std::to_string(rest.size()) +
                   " in the file");
  }
  const char* text = reinterpret_cast<const char*>(rest.data());
  const Json header = Json::parse(text, text + length, nullptr, false);
  if (!header.is_object()) return Invalid("its header is not JSON");
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    TensorView tensor;
    const Status status = ReadTensor(entry, rest.subspan(length), tensor);
    if (!status.ok()) return Invalid(name + ": " + status.message());
    if (tensor.data != nullptr) tensors_[name] = tensor;
  }
  return {};
}

Result<std::vector<float>> Safetensors::Matrix(const std::string& name,
                                               int rows, int columns) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return Invalid(path_ + ": has no " + name);
  const TensorView& tensor = found->second;
  if (tensor.shape != kvtwin::Shape{columns, rows, 1, 1}) {
    return Invalid(path_ + ": " + name + " is " +
                   kvtwin::ShapeText(tensor.shape) + ", expected [" +
                   std::to_string(columns) + ", " + std::to_string(rows) + "]");
  }
  std::vector<float> numbers(static_cast<std::size_t>(tensor.elements()));
  const Status status =
      kvtwin::RowToF32({static_cast<const std::byte*>(tensor.data),
                        DenseBytes(tensor.dtype, tensor.shape)},
                       tensor.dtype, numbers);
  if (!status.ok()) return status;
  return numbers;
}

}  // namespace serve
