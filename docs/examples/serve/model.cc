#include "model.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace serve {
namespace {

using kvtwin::DType, kvtwin::Result, kvtwin::Status, kvtwin::TensorView;
using Json = nlohmann::json;
using Array = Eigen::Map<Eigen::ArrayXf>;
using ConstArray = Eigen::Map<const Eigen::ArrayXf>;

// Reads a whole number from 1 to `max` of a configuration; adds to `wrong`.
int Number(const Json& json, const char* name, int max, std::string& wrong) {
  const Json value = json.value(name, Json());
  if (value.is_number_unsigned() && value >= 1 && value <= max) return value;
  wrong += std::string(" ") + name + " is not from 1 to " +
           std::to_string(max) + ";";
  return 1;
}

Result<ModelConfig> ReadConfig(const std::string& path) {
  const Result<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  const Json json = Json::parse(*text, nullptr, false);
  if (!json.is_object()) return Invalid(path + ": is not a JSON object");
  std::string wrong;
  ModelConfig config;
  config.hidden = Number(json, "hidden_size", 1 << 16, wrong);
  config.layers = Number(json, "num_hidden_layers", 1 << 10, wrong);
  config.heads = Number(json, "num_attention_heads", 1 << 10, wrong);
  config.kv_heads = Number(json, "num_key_value_heads", 1 << 10, wrong);
  config.head_dim = Number(json, "head_dim", 1 << 10, wrong);
  config.inner = Number(json, "intermediate_size", 1 << 18, wrong);
  config.vocab = Number(json, "vocab_size", 1 << 20, wrong);
  config.context = Number(json, "max_position_embeddings", 1 << 20, wrong);
  config.end = Number(json, "eos_token_id", config.vocab - 1, wrong);
  const Json epsilon = json.value("rms_norm_eps", Json());
  const Json base = json.value("rope_theta", Json());
  if (epsilon.is_number()) config.epsilon = epsilon;
  if (base.is_number()) config.rope_base = base;
  config.tied = json.value("tie_word_embeddings", Json()) == true;
  if (json.value("model_type", Json()) != "llama") {
    wrong += " model_type is not llama;";
  }
  if (json.contains("rope_scaling") && !json["rope_scaling"].is_null()) {
    wrong += " rope_scaling is not supported;";
  }
  if (!(config.epsilon > 0) || !(config.rope_base >= 1)) {
    wrong += " rms_norm_eps or rope_theta is missing;";
  }
  if (config.heads % config.kv_heads != 0 || config.head_dim % 2 != 0) {
    wrong += " the heads cannot share KV heads, or an odd head_dim;";
  }
  if (!wrong.empty()) return Invalid(path + ":" + wrong);
  return config;
}

// out = in * weights / sqrt(mean(in^2) + epsilon), for each row.
void Normalize(const std::vector<float>& in, const std::vector<float>& weights,
               float epsilon, std::vector<float>& out) {
  const auto size = static_cast<Eigen::Index>(weights.size());
  out.resize(in.size());
#pragma omp parallel for if (in.size() > 8192)
  for (std::size_t at = 0; at < in.size(); at += weights.size()) {
    const ConstArray row(in.data() + at, size);
    const float scale = 1 / std::sqrt(row.square().mean() + epsilon);
    Array(out.data() + at, size) =
        row * scale * ConstArray(weights.data(), size);
  }
}

// Turns the halves of a head by its position.
void Turn(float* head, int head_dim, const float* cosines, const float* sines) {
  const int half = head_dim / 2;
  Array low(head, half), high(head + half, half);
  const ConstArray cosine(cosines, half), sine(sines, half);
  const Eigen::ArrayXf turned = low * cosine - high * sine;
  high = low * sine + high * cosine;
  low = turned;
}

void Add(std::vector<float>& sum, const std::vector<float>& added) {
  const auto size = static_cast<Eigen::Index>(sum.size());
  Array(sum.data(), size) += ConstArray(added.data(), size);
}

}  // namespace

Result<std::unique_ptr<Model>> Model::Load(const std::string& folder,
                                           DType dtype) {
  auto model = std::make_unique<Model>();
  const Result<ModelConfig> config = ReadConfig(folder + "/config.json");
  if (!config.ok()) return config.status();
  model->config_ = *config;
  model->dtype_ = dtype;
  const auto file = Safetensors::Open(folder + "/model.safetensors");
  if (!file.ok()) return file.status();
  const Status status = model->LoadWeights(*file);
  if (!status.ok()) return status;
  const int half = config->head_dim / 2;
  for (int position = 0; position < config->context; ++position) {
    for (int pair = 0; pair < half; ++pair) {
      const double angle =
          position * std::pow(config->rope_base, -double(pair) / half);
      model->cosines_.push_back(static_cast<float>(std::cos(angle)));
      model->sines_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  auto attention = kvtwin::MakeAttention();
  if (!attention.ok()) return attention.status();
  model->attention_ = *std::move(attention);
  return model;
}

Status Model::LoadWeights(const Safetensors& file) {
  const auto embedding =
      file.Matrix("model.embed_tokens.weight", config_.vocab, config_.hidden);
  if (!embedding.ok()) return embedding.status();
  embedding_ = *embedding;
  const auto norm = file.Matrix("model.norm.weight", 1, config_.hidden);
  if (!norm.ok()) return norm.status();
  final_norm_ = *norm;
  const auto logits = config_.tied ? embedding
                                   : file.Matrix("lm_head.weight",
                                                 config_.vocab, config_.hidden);
  if (!logits.ok()) return logits.status();
  logits_ = Linear(*logits, config_.hidden, config_.vocab, dtype_);
  for (int layer = 0; layer < config_.layers; ++layer) {
    auto loaded = LoadLayer(file, layer);
    if (!loaded.ok()) return loaded.status();
    layers_.push_back(*std::move(loaded));
  }
  return {};
}

Result<Model::Layer> Model::LoadLayer(const Safetensors& file, int layer) {
  const int hidden = config_.hidden, inner = config_.inner;
  const int q = config_.heads * config_.head_dim;
  const int kv = config_.kv_heads * config_.head_dim;
  Status status;
  // Appends the rows of a matrix.
  const auto read = [&](const std::string& name, int rows, int columns,
                        std::vector<float> before = {}) {
    const auto matrix = file.Matrix(
        "model.layers." + std::to_string(layer) + "." + name + ".weight", rows,
        columns);
    if (matrix.ok())
      before.insert(before.end(), matrix->begin(), matrix->end());
    if (!matrix.ok() && status.ok()) status = matrix.status();
    return before;
  };
  Layer result;
  result.attention_norm = read("input_layernorm", 1, hidden);
  result.inner_norm = read("post_attention_layernorm", 1, hidden);
  const auto qkv = read("self_attn.v_proj", kv, hidden,
                        read("self_attn.k_proj", kv, hidden,
                             read("self_attn.q_proj", q, hidden)));
  const auto out = read("self_attn.o_proj", hidden, q);
  const auto gate_up =
      read("mlp.up_proj", inner, hidden, read("mlp.gate_proj", inner, hidden));
  const auto down = read("mlp.down_proj", hidden, inner);
  if (!status.ok()) return status;
  result.qkv = Linear(qkv, hidden, q + 2 * kv, dtype_);
  result.out = Linear(out, q, hidden, dtype_);
  result.gate_up = Linear(gate_up, hidden, 2 * inner, dtype_);
  result.down = Linear(down, inner, hidden, dtype_);
  return result;
}

kvtwin::CacheSpec Model::cache_spec() const {
  kvtwin::CacheSpec spec{.placement = kvtwin::Placement::kScatter};
  spec.shift.kind = kvtwin::ShiftKind::kRope;
  spec.shift.rope = {.pairing = kvtwin::Rope::Pairing::kHalves,
                     .base = config_.rope_base};
  return spec;
}

Result<std::span<const float>> Model::Forward(
    kvtwin::Cache& cache, std::span<const std::int32_t> tokens,
    std::span<const std::int32_t> positions, std::span<const int> outputs) {
  const int rows = static_cast<int>(tokens.size());
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  hidden_rows_.clear();
  for (const std::int32_t token : tokens) {
    const auto from = embedding_.begin() + token * config_.hidden;
    hidden_rows_.insert(hidden_rows_.end(), from, from + config_.hidden);
  }
  for (int layer = 0; layer < config_.layers; ++layer) {
    const Status status = Attend(cache, layer, positions);
    if (!status.ok()) return status;
    Inner(layers_[static_cast<std::size_t>(layer)], rows);
  }
  std::vector<float> chosen;
  for (const int output : outputs) {
    const auto from = hidden_rows_.begin() + output * config_.hidden;
    chosen.insert(chosen.end(), from, from + config_.hidden);
  }
  Normalize(chosen, final_norm_, config_.epsilon, normed_);
  output_.resize(outputs.size() * static_cast<std::size_t>(config_.vocab));
  if (!outputs.empty()) {
    logits_.Run(normed_.data(), static_cast<int>(normed_.size() / hidden),
                output_.data());
  }
  return std::span<const float>(output_);
}

// The first half of a layer. This is all that a model has to do with kvtwin.
Status Model::Attend(kvtwin::Cache& cache, int index,
                     std::span<const std::int32_t> positions) {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const int head_dim = config_.head_dim, half = head_dim / 2;
  const int turning = config_.heads + config_.kv_heads;  // Those of Q and K.
  const int heads = turning + config_.kv_heads;
  const auto rows = static_cast<std::int64_t>(positions.size());
  Normalize(hidden_rows_, layer.attention_norm, config_.epsilon, normed_);
  qkv_.resize(positions.size() * static_cast<std::size_t>(heads * head_dim));
  layer.qkv.Run(normed_.data(), static_cast<int>(rows), qkv_.data());
#pragma omp parallel for if (rows > 16)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t angle = positions[static_cast<std::size_t>(row)] * half;
    for (int head = 0; head < turning; ++head) {
      Turn(qkv_.data() + (row * heads + head) * head_dim, head_dim,
           cosines_.data() + angle, sines_.data() + angle);
    }
  }
  // Q, K and V are columns of the same rows.
  const auto part = [&](int first, int count) {
    TensorView view = DenseView(qkv_.data() + first * head_dim, DType::kF32,
                                {head_dim, heads, rows, 1});
    view.shape[1] = count;
    return view;
  };
  Status status = cache.SetLayer(index);
  if (status.ok()) {
    status = cache.Put(part(config_.heads, config_.kv_heads),
                       part(turning, config_.kv_heads));
  }
  if (!status.ok()) return status;
  const Result<kvtwin::KvView> view = cache.Get();
  if (!view.ok()) return view.status();
  // All layers have the same mask.
  if (index == 0) status = attention_->Plan(view->mask, static_cast<int>(rows));
  attended_.resize(positions.size() *
                   static_cast<std::size_t>(config_.heads * head_dim));
  if (status.ok()) {
    status = attention_->Attend(
        part(0, config_.heads), *view, kvtwin::VLayout::kPlain,
        {.scale = 1 / std::sqrt(static_cast<float>(head_dim)),
         .bf16_products = dtype_ == DType::kBF16},
        {.out = attended_.data()});
  }
  normed_.resize(hidden_rows_.size());
  layer.out.Run(attended_.data(), static_cast<int>(rows), normed_.data());
  Add(hidden_rows_, normed_);
  return status;
}

// The second half of a layer: SwiGLU.
void Model::Inner(const Layer& layer, int rows) {
  const auto inner = static_cast<std::size_t>(config_.inner);
  Normalize(hidden_rows_, layer.inner_norm, config_.epsilon, normed_);
  gates_.resize(static_cast<std::size_t>(rows) * 2 * inner);
  attended_.resize(static_cast<std::size_t>(rows) * inner);
  layer.gate_up.Run(normed_.data(), rows, gates_.data());
#pragma omp parallel for if (rows > 4)
  for (int row = 0; row < rows; ++row) {
    const auto at = static_cast<std::size_t>(row) * inner;
    const ConstArray gate(gates_.data() + 2 * at, config_.inner);
    const ConstArray up(gates_.data() + 2 * at + inner, config_.inner);
    Array(attended_.data() + at, config_.inner) =
        gate / (1 + (-gate).exp()) * up;
  }
  layer.down.Run(attended_.data(), rows, normed_.data());
  Add(hidden_rows_, normed_);
}

}  // namespace serve
