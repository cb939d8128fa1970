// A model of the Llama type, whose K and V rows are in a cache of kvtwin.

#ifndef SERVE_MODEL_H_
#define SERVE_MODEL_H_

#include <kvtwin/attention.h>
#include <kvtwin/cache.h>

#include <Eigen/Core>
#include <cstdint>
#include <dnnl.hpp>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace serve {

// Check and Value throw the status if it is an error.
inline void Check(const kvtwin::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
template <class T>
T Value(kvtwin::Result<T> result) {
  Check(result.status());
  return *std::move(result);
}

// Numbers of some tokens, [numbers, tokens], or weights, [inputs, outputs].
using Rows = Eigen::ArrayXXf;

// A linear layer: products with a matrix of weights, by oneDNN.
class Linear {
 public:
  Linear() = default;
  // `dtype` is f32 or bf16: the numbers of both factors are rounded to it
  // before they are multiplied. Sums are f32.
  Linear(const Rows& weights, kvtwin::DType dtype);

  void Run(const Rows& in, Rows& out) const;

 private:
  dnnl::memory::dim inputs_ = 0, outputs_ = 0;
  dnnl::memory::data_type dtype_ = dnnl::memory::data_type::undef;
  dnnl::memory weights_;  // In the order that oneDNN has chosen.
};

// The part "model" of the file serve.json.
struct ModelConfig {
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, inner = 0;
  int vocab = 0;
  int context = 0;  // Positions.
  int end = 0;      // The token that ends an answer.
  float epsilon = 0;
  double rope_base = 0;
  bool tied = false;  // The output layer has the weights of the embedding.
};

class Model {
 public:
  // Reads serve.json and model.safetensors of a folder. The products are of
  // `dtype`, f32 or bf16. Throws an std::exception that names the file.
  Model(const std::string& folder, kvtwin::DType dtype);

  const ModelConfig& config() const { return config_; }

  // The spec of a cache for this model, which moves K rows to other positions.
  kvtwin::CacheSpec cache_spec() const;

  // Computes the batch of the cache's pass, which StartForward began, and puts
  // its K and V rows into the cache. Returns the logits after the tokens at the
  // indices `outputs`, [vocab, outputs], which are valid until the next call.
  // Throws what the cache refuses.
  const Rows& Forward(kvtwin::Cache& cache,
                      std::span<const std::int32_t> tokens,
                      std::span<const std::int32_t> positions,
                      std::span<const int> outputs);

 private:
  struct Layer {
    Eigen::ArrayXf attention_norm, inner_norm;
    Linear qkv, out;       // Rows of Q, K and V, one after another.
    Linear gate_up, down;  // Rows of gate and up.
  };

  void LoadWeights(const std::string& path, kvtwin::DType dtype);
  void Attend(kvtwin::Cache& cache, int layer);
  void Inner(const Layer& layer);

  ModelConfig config_;
  bool bf16_;  // Products are of bf16.
  Rows embedding_;
  Eigen::ArrayXf final_norm_;
  std::vector<Layer> layers_;
  Linear logits_;
  std::unique_ptr<kvtwin::Attention> attention_;
  // The batch between the steps of a pass.
  Rows cosines_, sines_;  // [head_dim / 2, tokens]
  Rows hidden_, normed_, qkv_, attended_, gates_, output_;
};

}  // namespace serve

#endif  // SERVE_MODEL_H_
