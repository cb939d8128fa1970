#include "linear.h"

#include <tuple>
#include <vector>

namespace serve {
namespace {

using dnnl::memory, dnnl::matmul;
using DataType = memory::data_type;

// The order of the weights is chosen for batches of this size.
constexpr int kUsualRows = 16;

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::desc Dense(int rows, int columns, DataType dtype) {
  return {{rows, columns}, dtype, memory::format_tag::ab};
}

matmul::primitive_desc Describe(int rows, int inputs, int outputs,
                                DataType dtype, const memory::desc& weights) {
  return {{Dense(rows, inputs, dtype), weights,
           Dense(rows, outputs, DataType::f32)},
          Engine()};
}

}  // namespace

Linear::Linear(std::span<const float> weights, int inputs, int outputs,
               kvtwin::DType dtype)
    : inputs_(inputs),
      outputs_(outputs),
      dtype_(dtype == kvtwin::DType::kBF16 ? DataType::bf16 : DataType::f32) {
  const memory::dims size = {inputs, outputs};
  const auto chosen = Describe(kUsualRows, inputs, outputs, dtype_,
                               {size, dtype_, memory::format_tag::any})
                          .weights_desc();
  memory given({size, DataType::f32, memory::format_tag::ba}, Engine(),
               const_cast<float*>(weights.data()));
  weights_ = memory(chosen, Engine());
  dnnl::stream stream(Engine());
  dnnl::reorder(given, weights_).execute(stream, given, weights_);
  stream.wait();
}

void Linear::Run(const float* in, int rows, float* out) const {
  // oneDNN compiles a kernel for each shape. Layers of one shape share it.
  thread_local std::map<std::tuple<int, int, int, DataType>, matmul> kernels;
  thread_local dnnl::stream stream(Engine());
  thread_local std::vector<std::uint16_t> rounded;
  auto& kernel = kernels[{rows, inputs_, outputs_, dtype_}];
  if (!kernel) {
    kernel =
        matmul(Describe(rows, inputs_, outputs_, dtype_, weights_.get_desc()));
  }
  memory from(Dense(rows, inputs_, DataType::f32), Engine(),
              const_cast<float*>(in));
  memory factor = from;
  if (dtype_ == DataType::bf16) {
    rounded.resize(static_cast<std::size_t>(rows) *
                   static_cast<std::size_t>(inputs_));
    factor = memory(Dense(rows, inputs_, dtype_), Engine(), rounded.data());
    dnnl::reorder(from, factor).execute(stream, from, factor);
  }
  const memory to(Dense(rows, outputs_, DataType::f32), Engine(), out);
  kernel.execute(stream, {{DNNL_ARG_SRC, factor},
                          {DNNL_ARG_WEIGHTS, weights_},
                          {DNNL_ARG_DST, to}});
  stream.wait();
}

}  // namespace serve
