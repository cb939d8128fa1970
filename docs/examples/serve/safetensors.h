// The weights of a model: a safetensors file, mapped into memory.

#ifndef SERVE_SAFETENSORS_H_
#define SERVE_SAFETENSORS_H_

#include <kvtwin/status.h>
#include <kvtwin/tensor.h>

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace serve {

class Safetensors {
 public:
  // Errors: invalid_argument, with the name of the file, if it cannot be read
  // or is not a whole safetensors file. Tensors of dtypes other than f32, f16
  // and bf16 are left out.
  static kvtwin::Result<Safetensors> Open(const std::string& path);

  // Returns a matrix, [columns, rows], as f32 numbers. Errors:
  // invalid_argument if the file has no such matrix.
  kvtwin::Result<std::vector<float>> Matrix(const std::string& name, int rows,
                                            int columns) const;
  bool Has(const std::string& name) const { return tensors_.contains(name); }

 private:
  kvtwin::Status ReadHeader();

  std::string path_;
  std::shared_ptr<const std::byte> mapped_;
  std::span<const std::byte> bytes_;
  std::map<std::string, kvtwin::TensorView> tensors_;
};

// Errors: invalid_argument, with the name of the file.
kvtwin::Result<std::string> ReadFile(const std::string& path);

// Returns a status that says what is wrong with an input.
inline kvtwin::Status Invalid(std::string message) {
  return {kvtwin::StatusCode::kInvalidArgument, std::move(message)};
}

}  // namespace serve

#endif  // SERVE_SAFETENSORS_H_
