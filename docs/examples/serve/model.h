// A model of the Llama type, whose K and V rows are in a cache of kvtwin.

#ifndef SERVE_MODEL_H_
#define SERVE_MODEL_H_

#include <kvtwin/attention.h>
#include <kvtwin/cache.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "linear.h"
#include "safetensors.h"

namespace serve {

// The numbers of config.json.
struct ModelConfig {
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, inner = 0;
  int vocab = 0;
  int context = 0;  // Positions.
  float epsilon = 0;
  double rope_base = 0;
  bool tied = false;  // The output layer has the weights of the embedding.
  int end = 0;        // The token that ends an answer.
};

class Model {
 public:
  // Reads config.json and model.safetensors of a folder. The products are of
  // `dtype`, f32 or bf16. Errors: invalid_argument, with the name of the file.
  static kvtwin::Result<std::unique_ptr<Model>> Load(const std::string& folder,
                                                     kvtwin::DType dtype);

  const ModelConfig& config() const { return config_; }

  // The spec of a cache for this model, which moves K rows to other positions.
  kvtwin::CacheSpec cache_spec() const;

  // Computes the batch of the cache's pass, which StartForward began, and puts
  // its K and V rows into the cache. Returns the logits after the tokens at the
  // indices `outputs`, [vocab, outputs], which are valid until the next call.
  kvtwin::Result<std::span<const float>> Forward(
      kvtwin::Cache& cache, std::span<const std::int32_t> tokens,
      std::span<const std::int32_t> positions, std::span<const int> outputs);

 private:
  struct Layer {
    std::vector<float> attention_norm, inner_norm;
    Linear qkv, out;       // Rows of Q, K and V, one after another.
    Linear gate_up, down;  // Rows of gate and up.
  };

  kvtwin::Status LoadWeights(const Safetensors& file);
  kvtwin::Result<Layer> LoadLayer(const Safetensors& file, int layer);
  kvtwin::Status Attend(kvtwin::Cache& cache, int layer,
                        std::span<const std::int32_t> positions);
  void Inner(const Layer& layer, int rows);

  ModelConfig config_;
  kvtwin::DType dtype_ = kvtwin::DType::kF32;  // Products have this dtype.
  std::vector<float> embedding_, final_norm_;
  std::vector<Layer> layers_;
  Linear logits_;
  std::vector<float> cosines_, sines_;  // [head_dim / 2, positions]
  std::unique_ptr<kvtwin::Attention> attention_;
  // The batch between the steps of a pass: [hidden, tokens] and so on.
  std::vector<float> hidden_rows_, normed_, qkv_, attended_, gates_, output_;
};

}  // namespace serve

#endif  // SERVE_MODEL_H_
