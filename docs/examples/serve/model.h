// A Llama: RMSNorm, RoPE, attention over kvtwin's cache, SwiGLU. Products of
// matrices are by oneDNN, all else by Eigen.

#ifndef SERVE_MODEL_H_
#define SERVE_MODEL_H_

#include <kvtwin/attention.h>
#include <kvtwin/rows.h>
#include <kvtwin/sessions.h>

#include <Eigen/Core>
#include <array>
#include <cmath>
#include <dnnl.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace serve {

using dnnl::memory, dnnl::matmul;
using DataType = memory::data_type;
using Eigen::ArrayXf, Eigen::Index, kvtwin::DType;
using Json = nlohmann::json;

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

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelConfig, hidden, layers, heads, kv_heads,
                                   head_dim, inner, vocab, context, end,
                                   epsilon, rope_base, tied);

inline ModelConfig Checked(const ModelConfig& c) {
  const auto [least, most] =
      std::minmax({c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.inner,
                   c.vocab, c.context});
  if (least < 1 || most > 1 << 20 || c.heads % c.kv_heads != 0 ||
      c.head_dim % 2 != 0 || std::int64_t{c.heads} * c.head_dim > 1 << 20 ||
      !(c.epsilon > 0) || !(c.rope_base >= 1)) {
    throw std::runtime_error(
        "sizes and heads * head_dim must be from 1 to 1048576, head_dim be "
        "even, heads share KV heads evenly, epsilon > 0, rope_base >= 1");
  }
  return c;
}

// Numbers of some tokens, [numbers, tokens], or weights, [inputs, outputs].
using Rows = Eigen::ArrayXXf;

// The order of the weights is chosen for batches of this size.
constexpr int kUsualRows = 16;
inline const std::map<std::string, DType> kDTypes = {
    {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}};

// A safetensors file.
class Weights {
 public:
  explicit Weights(const std::string& path)
      : file_(std::filesystem::file_size(path), '\0') {
    std::ifstream(path, std::ios::binary).read(file_.data(), std::ssize(file_));
    std::uint64_t length = 0;
    file_.copy(reinterpret_cast<char*>(&length), sizeof length);
    header_ = Json::parse(file_.substr(sizeof length, length));
    data_ = std::string_view(file_).substr(sizeof length + length);
  }

  // Returns the numbers of a tensor, [columns, rows]. A tensor of one row has
  // only columns in the file.
  Rows Read(const std::string& name, int columns, int rows = 1) const {
    const Json& entry = header_.at(name + ".weight");
    const Json shape = rows > 1 ? Json{rows, columns} : Json::array({columns});
    const Json& begin = entry.at("data_offsets").at(0);
    const Json& end = entry["data_offsets"].at(1);
    if (entry.at("shape") != shape || !begin.is_number_unsigned() ||
        !end.is_number_unsigned() || begin > end || end > data_.size()) {
      throw std::runtime_error(name + " is not in the file as " + shape.dump());
    }
    const std::string_view bytes = data_.substr(0, end).substr(begin);
    Rows numbers(columns, rows);
    Check(kvtwin::RowToF32(
        std::as_bytes(std::span(bytes)), kDTypes.at(entry.at("dtype")),
        {numbers.data(), static_cast<std::size_t>(numbers.size())}));
    return numbers;
  }

 private:
  std::string file_;
  Json header_;
  std::string_view data_;  // The part of the file after the header.
};

inline const dnnl::engine kCpu(dnnl::engine::kind::cpu, 0);

inline memory::desc Dense(Index rows, Index columns, DataType dtype) {
  return {{rows, columns}, dtype, memory::format_tag::ab};
}

// Copies numbers into memory of another dtype or order.
inline void Convert(const memory::desc& from, const Rows& numbers, memory& to) {
  memory given(from, kCpu, const_cast<float*>(numbers.data()));
  dnnl::stream stream(kCpu);
  dnnl::reorder(given, to).execute(stream, given, to);
  stream.wait();
}

// The product of `rows` rows with weights. The numbers of both factors are of
// the weights' dtype, sums are f32.
inline matmul::primitive_desc Product(Index rows, const memory::desc& weights) {
  const memory::dims size = weights.dims();
  return {{Dense(rows, size[0], weights.data_type()), weights,
           Dense(rows, size[1], DataType::f32)},
          kCpu};
}

// Returns weights rounded to a dtype, in the order that oneDNN chooses.
inline memory Pack(const Rows& weights, DataType dtype) {
  const memory::dims size = {weights.rows(), weights.cols()};
  const memory::desc any(size, dtype, memory::format_tag::any);
  memory packed(Product(kUsualRows, any).weights_desc(), kCpu);
  Convert({size, DataType::f32, memory::format_tag::ba}, weights, packed);
  return packed;
}

inline Rows Multiply(const Rows& in, const memory& weights) {
  // oneDNN compiles a kernel for each shape. Layers of one shape share it.
  static std::map<std::array<Index, 4>, matmul> kernels;
  static dnnl::stream stream(kCpu);
  const memory::desc desc = weights.get_desc();
  const Index rows = in.cols(), inputs = in.rows(), outputs = desc.dims()[1];
  const auto dtype = desc.data_type();
  auto& kernel = kernels[{rows, inputs, outputs, Index(dtype)}];
  if (!kernel) kernel = matmul(Product(rows, desc));
  memory rounded(Dense(rows, inputs, dtype), kCpu);
  Convert(Dense(rows, inputs, DataType::f32), in, rounded);
  Rows out(outputs, rows);
  const memory to(Dense(rows, outputs, DataType::f32), kCpu, out.data());
  kernel.execute(stream, {{DNNL_ARG_SRC, rounded},
                          {DNNL_ARG_WEIGHTS, weights},
                          {DNNL_ARG_DST, to}});
  stream.wait();
  return out;
}

struct Layer {
  ArrayXf attention_norm, inner_norm;
  memory qkv, out;       // Q, K and V, one after another.
  memory gate_up, down;  // Gate and up, one after another.
};

// A model of the Llama type, whose K and V rows are in a cache of kvtwin.
class Llama {
 public:
  // Products are of bf16 or f32. Throws an std::exception if the config or the
  // file of the weights, which convert.py made, is wrong.
  Llama(const ModelConfig& model, const std::string& weights, bool bf16)
      : config(Checked(model)), bf16_(bf16) {
    const Weights file(weights);
    const auto pack = [&](const std::string& name, int columns, int rows) {
      return Pack(file.Read(name, columns, rows),
                  bf16 ? DataType::bf16 : DataType::f32);
    };
    const int hidden = config.hidden, inner = config.inner;
    const int q = config.heads * config.head_dim;
    const int qkv = q + 2 * config.kv_heads * config.head_dim;
    const std::string embedding = "model.embed_tokens";
    embedding_ = file.Read(embedding, hidden, config.vocab);
    final_norm_ = file.Read("model.norm", hidden);
    logits_ = pack(config.tied ? embedding : "lm_head", hidden, config.vocab);
    for (int i = 0; i < config.layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      layers_.push_back({file.Read(layer + "input_layernorm", hidden),
                         file.Read(layer + "post_attention_layernorm", hidden),
                         pack(layer + "self_attn.qkv_proj", hidden, qkv),
                         pack(layer + "self_attn.o_proj", q, hidden),
                         pack(layer + "mlp.gate_up_proj", hidden, 2 * inner),
                         pack(layer + "mlp.down_proj", inner, hidden)});
    }
  }

  // Makes a cache for this model, which moves K rows to other positions.
  std::unique_ptr<kvtwin::Cache> MakeCache(const kvtwin::InitArgs& init) const {
    kvtwin::CacheSpec spec{.placement = kvtwin::Placement::kScatter};
    spec.shift.kind = kvtwin::ShiftKind::kRope;
    spec.shift.rope = {.pairing = kvtwin::Rope::Pairing::kHalves,
                       .base = config.rope_base};
    auto cache = Value(kvtwin::MakeCache(spec));
    Check(cache->SetConfig({.mask_dtype = DType::kBits}));
    Check(cache->Init(init));
    return cache;
  }

  // Computes a batch, which StartForward began, and puts its K and V rows into
  // the cache. Returns the logits after the tokens of its outputs, [vocab,
  // outputs]. Throws what the cache refuses.
  Rows Forward(kvtwin::Cache& cache, const kvtwin::SessionBatch& batch) {
    const Index rows = std::ssize(batch.inputs), half = config.head_dim / 2;
    Rows hidden(config.hidden, rows);
    cosines_.resize(half, rows);
    sines_.resize(half, rows);
    for (Index row = 0; row < rows; ++row) {
      hidden.col(row) = embedding_.col(batch.inputs[row].token);
      const Eigen::ArrayXd angles = batch.positions[row] * frequencies_;
      cosines_.col(row) = angles.cos().cast<float>();
      sines_.col(row) = angles.sin().cast<float>();
    }
    for (int i = 0; i < config.layers; ++i) {
      const Layer& layer = layers_[i];
      Rows qkv = Multiply(Normalize(hidden, layer.attention_norm), layer.qkv);
      hidden += Multiply(Attend(cache, i, qkv), layer.out);
      const Rows gate_up =
          Multiply(Normalize(hidden, layer.inner_norm), layer.gate_up);
      const auto gate = gate_up.topRows(config.inner);
      const Rows inner =  // SwiGLU.
          gate / (1 + (-gate).exp()) * gate_up.bottomRows(config.inner);
      hidden += Multiply(inner, layer.down);
    }
    if (batch.outputs.empty()) return {};
    return Multiply(Normalize(hidden(Eigen::all, batch.outputs), final_norm_),
                    logits_);
  }

  const ModelConfig config;

 private:
  // Returns in * weights / sqrt(mean(in^2) + epsilon), for each token.
  Rows Normalize(const Rows& in, const ArrayXf& weights) const {
    const auto mean = in.square().colwise().mean() + config.epsilon;
    return (in.rowwise() * mean.rsqrt()).colwise() * weights;
  }

  // Attention. This is all that a model has to do with kvtwin.
  Rows Attend(kvtwin::Cache& cache, int layer, Rows& qkv) {
    const int head_dim = config.head_dim, half = head_dim / 2;
    const int turning = config.heads + config.kv_heads;  // Heads of Q and K.
    const Index rows = qkv.cols();
    for (Index row = 0; row < rows; ++row) {
      Eigen::Map<Rows> heads(qkv.col(row).data(), head_dim, turning);
      const Rows low = heads.topRows(half), high = heads.bottomRows(half);
      const ArrayXf cosine = cosines_.col(row), sine = sines_.col(row);
      heads.topRows(half) = low.colwise() * cosine - high.colwise() * sine;
      heads.bottomRows(half) = low.colwise() * sine + high.colwise() * cosine;
    }
    // Q, K and V are columns of the same rows.
    const auto part = [&](int first, int count) {
      kvtwin::TensorView view =
          DenseView(qkv.data() + first * head_dim, DType::kF32,
                    {head_dim, turning + config.kv_heads, rows, 1});
      view.shape[1] = count;
      return view;
    };
    Check(cache.SetLayer(layer));
    Check(cache.Put(part(config.heads, config.kv_heads),
                    part(turning, config.kv_heads)));
    const kvtwin::KvView view = Value(cache.Get());
    // All layers have the same mask.
    if (layer == 0) Check(attention_->Plan(view.mask, rows));
    Rows out(config.heads * head_dim, rows);
    Check(attention_->Attend(
        part(0, config.heads), view, kvtwin::VLayout::kPlain,
        {.scale = 1 / std::sqrt(float(head_dim)), .bf16_products = bf16_},
        {.out = out.data()}));
    return out;
  }

  const bool bf16_;  // Products are of bf16.
  const Eigen::ArrayXd frequencies_ = Eigen::pow(
      config.rope_base, -Eigen::ArrayXd::LinSpaced(config.head_dim / 2, 0,
                                                   1 - 2. / config.head_dim));
  Rows embedding_;
  ArrayXf final_norm_;
  memory logits_;
  std::vector<Layer> layers_;
  const std::unique_ptr<kvtwin::Attention> attention_ =
      Value(kvtwin::MakeAttention());
  Rows cosines_, sines_;  // For a batch: [head_dim / 2, tokens].
};

}  // namespace serve

#endif  // SERVE_MODEL_H_
