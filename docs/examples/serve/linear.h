// A linear layer: products with a matrix of weights, by oneDNN.

#ifndef SERVE_LINEAR_H_
#define SERVE_LINEAR_H_

#include <kvtwin/tensor.h>

#include <dnnl.hpp>
#include <map>
#include <span>

namespace serve {

class Linear {
 public:
  Linear() = default;
  // `weights` is [inputs, outputs], `dtype` f32 or bf16: the numbers of both
  // factors are rounded to it before they are multiplied. Sums are f32.
  Linear(std::span<const float> weights, int inputs, int outputs,
         kvtwin::DType dtype);

  // Computes out = [outputs, rows] from in = [inputs, rows].
  void Run(const float* in, int rows, float* out) const;

 private:
  int inputs_ = 0, outputs_ = 0;
  dnnl::memory::data_type dtype_ = dnnl::memory::data_type::undef;
  dnnl::memory weights_;  // In the order that oneDNN has chosen.
};

}  // namespace serve

#endif  // SERVE_LINEAR_H_
