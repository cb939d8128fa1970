// A language model and its tokenizer, as the engine needs them.

#ifndef SERVE_MODEL_H_
#define SERVE_MODEL_H_

#include <kvtwin/sessions.h>

#include <Eigen/Core>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace serve {

// Tokens, as sessions have them.
using Tokens = std::vector<kvtwin::SessionInput>;

// Check and Value throw the status if it is an error.
inline void Check(const kvtwin::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
template <class T>
T Value(kvtwin::Result<T> result) {
  Check(result.status());
  return *std::move(result);
}

// The part "model" of serve.json.
struct ModelConfig {
  int hidden, layers, heads, kv_heads, head_dim, inner, vocab;
  int context;  // Positions, at most.
  int end;      // The token that ends an answer.
  float epsilon;
  double rope_base;
  bool tied;  // The output layer has the weights of the embedding.
};

// A model of the Llama type, whose K and V rows are in a cache of kvtwin.
struct Model {
  explicit Model(const ModelConfig& numbers) : config(numbers) {}
  virtual ~Model() = default;

  // Makes a cache for this model, which moves K rows to other positions.
  virtual std::unique_ptr<kvtwin::Cache> MakeCache(
      const kvtwin::InitArgs& init) const = 0;

  // Computes a batch, which StartForward began, and puts its K and V rows into
  // the cache. Returns the logits after the tokens of its outputs, [vocab,
  // outputs]. Throws what the cache refuses.
  virtual Eigen::ArrayXXf Forward(kvtwin::Cache& cache,
                                  const kvtwin::SessionBatch& batch) = 0;

  const ModelConfig config;
};

// A byte-level BPE tokenizer.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Adds the tokens of a text, which is UTF-8, to others. Special tokens, such
  // as "<|im_end|>", are found in it only if `special`.
  virtual void Encode(std::string_view text, bool special,
                      Tokens& tokens) const = 0;

  // Returns the bytes of a token: of some characters, or a part of one. Those
  // of a special token are empty.
  virtual const std::string& Bytes(std::int32_t token) const = 0;
};

// Read files of convert.py: a folder's serve.json and model.safetensors for a
// model whose products are of f32 or bf16; serve.json for the tokenizer of a
// model. Throw an std::exception that names the file.
std::unique_ptr<Model> LoadModel(const std::string& folder,
                                 kvtwin::DType dtype);
std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& folder, int vocab);

}  // namespace serve

#endif  // SERVE_MODEL_H_
