#include "model.h"

#include <kvtwin/rows.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

namespace serve {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelConfig, hidden, layers, heads, kv_heads,
                                   head_dim, inner, vocab, context, end,
                                   epsilon, rope_base, tied);

namespace {

using dnnl::memory, dnnl::matmul;
using DataType = memory::data_type;
using Json = nlohmann::json;
using kvtwin::DType;

// The order of the weights is chosen for batches of this size.
constexpr int kUsualRows = 16;
constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr int kMaxNumber = 1 << 20;

ModelConfig ReadConfig(const std::string& path) try {
  const ModelConfig config = Json::parse(std::ifstream(path)).at("model");
  for (const int number :
       {config.hidden, config.layers, config.heads, config.kv_heads,
        config.head_dim, config.inner, config.vocab, config.context}) {
    if (number < 1 || number > kMaxNumber) {
      throw std::runtime_error("a number of the model is not from 1 to " +
                               std::to_string(kMaxNumber));
    }
  }
  if (config.heads % config.kv_heads != 0 || config.head_dim % 2 != 0 ||
      !(config.epsilon > 0) || !(config.rope_base >= 1)) {
    throw std::runtime_error(
        "heads must share KV heads evenly, head_dim be "
        "even, epsilon > 0, rope_base >= 1");
  }
  return config;
} catch (const std::exception& error) {
  throw std::runtime_error(path + ": " + error.what());
}

// A safetensors file.
class Weights {
 public:
  explicit Weights(const std::string& path)
      : size_(std::filesystem::file_size(path)), file_(path, std::ios::binary) {
    file_.exceptions(std::ios::failbit | std::ios::badbit);
    std::uint64_t length = 0;
    file_.read(reinterpret_cast<char*>(&length), sizeof length);
    if (length > kMaxHeader) throw std::runtime_error("its header is too long");
    std::string header(length, '\0');
    file_.read(header.data(), static_cast<std::streamsize>(length));
    header_ = Json::parse(header);
    begin_ = sizeof length + length;
  }

  // Returns the numbers of a tensor: [columns, rows], or, without rows,
  // [columns].
  Rows Read(std::string name, int columns, int rows = 0) {
    static const std::map<std::string, DType> kDTypes = {
        {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}};
    name += ".weight";
    const Json& entry = header_.at(name);
    const auto dtype = kDTypes.find(entry.at("dtype"));
    const std::array<std::uint64_t, 2> range = entry.at("data_offsets");
    const std::uint64_t size = range[1] - range[0];
    const Json shape =
        rows > 0 ? Json::array({rows, columns}) : Json::array({columns});
    Rows numbers(columns, std::max(rows, 1));
    if (dtype == kDTypes.end() || entry.at("shape") != shape ||
        range[1] > size_ ||
        size != static_cast<std::uint64_t>(
                    kvtwin::RunBytes(dtype->second, numbers.size()))) {
      throw std::runtime_error(name + " is " + entry.dump() +
                               ", expected the shape " + shape.dump());
    }
    std::vector<std::byte> bytes(size);
    file_.seekg(static_cast<std::streamoff>(begin_ + range[0]));
    file_.read(reinterpret_cast<char*>(bytes.data()),
               static_cast<std::streamsize>(size));
    Check(kvtwin::RowToF32(
        bytes, dtype->second,
        {numbers.data(), static_cast<std::size_t>(numbers.size())}));
    return numbers;
  }

 private:
  std::uint64_t size_, begin_ = 0;
  std::ifstream file_;
  Json header_;
};

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::desc Dense(memory::dim rows, memory::dim columns, DataType dtype) {
  return {{rows, columns}, dtype, memory::format_tag::ab};
}

matmul::primitive_desc Describe(memory::dim rows, memory::dim inputs,
                                memory::dim outputs, DataType dtype,
                                const memory::desc& weights) {
  return {{Dense(rows, inputs, dtype), weights,
           Dense(rows, outputs, DataType::f32)},
          Engine()};
}

// out = in * weights / sqrt(mean(in^2) + epsilon), for each token.
void Normalize(const Rows& in, const Eigen::ArrayXf& weights, float epsilon,
               Rows& out) {
  out = (in.rowwise() * (in.square().colwise().mean() + epsilon).rsqrt())
            .colwise() *
        weights;
}

}  // namespace

Linear::Linear(const Rows& weights, DType dtype)
    : inputs_(weights.rows()),
      outputs_(weights.cols()),
      dtype_(dtype == DType::kBF16 ? DataType::bf16 : DataType::f32) {
  const memory::dims size = {inputs_, outputs_};
  const memory::desc any(size, dtype_, memory::format_tag::any);
  memory given({size, DataType::f32, memory::format_tag::ba}, Engine(),
               const_cast<float*>(weights.data()));
  weights_ = memory(
      Describe(kUsualRows, inputs_, outputs_, dtype_, any).weights_desc(),
      Engine());
  dnnl::stream stream(Engine());
  dnnl::reorder(given, weights_).execute(stream, given, weights_);
  stream.wait();
}

void Linear::Run(const Rows& in, Rows& out) const {
  // oneDNN compiles a kernel for each shape. Layers of one shape share it.
  thread_local std::map<std::array<memory::dim, 4>, matmul> kernels;
  thread_local dnnl::stream stream(Engine());
  thread_local std::vector<std::uint16_t> rounded;
  const memory::dim rows = in.cols();
  auto& kernel = kernels[{rows, inputs_, outputs_, memory::dim(dtype_)}];
  if (!kernel) {
    kernel =
        matmul(Describe(rows, inputs_, outputs_, dtype_, weights_.get_desc()));
  }
  memory from(Dense(rows, inputs_, DataType::f32), Engine(),
              const_cast<float*>(in.data()));
  memory factor = from;
  if (dtype_ == DataType::bf16) {
    rounded.resize(static_cast<std::size_t>(in.size()));
    factor = memory(Dense(rows, inputs_, dtype_), Engine(), rounded.data());
    dnnl::reorder(from, factor).execute(stream, from, factor);
  }
  out.resize(outputs_, rows);
  const memory to(Dense(rows, outputs_, DataType::f32), Engine(), out.data());
  kernel.execute(stream, {{DNNL_ARG_SRC, factor},
                          {DNNL_ARG_WEIGHTS, weights_},
                          {DNNL_ARG_DST, to}});
  stream.wait();
}

Model::Model(const std::string& folder, DType dtype)
    : config_(ReadConfig(folder + "/serve.json")),
      bf16_(dtype == DType::kBF16),
      attention_(Value(kvtwin::MakeAttention())) {
  const std::string path = folder + "/model.safetensors";
  try {
    LoadWeights(path, dtype);
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

void Model::LoadWeights(const std::string& path, DType dtype) {
  Weights file(path);
  const int hidden = config_.hidden, inner = config_.inner;
  const int q = config_.heads * config_.head_dim;
  const int kv = config_.kv_heads * config_.head_dim;
  embedding_ = file.Read("model.embed_tokens", hidden, config_.vocab);
  final_norm_ = file.Read("model.norm", hidden);
  logits_ = Linear(
      config_.tied ? embedding_ : file.Read("lm_head", hidden, config_.vocab),
      dtype);
  for (int i = 0; i < config_.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    Rows qkv(hidden, q + 2 * kv), gate_up(hidden, 2 * inner);
    qkv << file.Read(layer + "self_attn.q_proj", hidden, q),
        file.Read(layer + "self_attn.k_proj", hidden, kv),
        file.Read(layer + "self_attn.v_proj", hidden, kv);
    gate_up << file.Read(layer + "mlp.gate_proj", hidden, inner),
        file.Read(layer + "mlp.up_proj", hidden, inner);
    layers_.push_back(
        {.attention_norm = file.Read(layer + "input_layernorm", hidden),
         .inner_norm = file.Read(layer + "post_attention_layernorm", hidden),
         .qkv = Linear(qkv, dtype),
         .out = Linear(file.Read(layer + "self_attn.o_proj", q, hidden), dtype),
         .gate_up = Linear(gate_up, dtype),
         .down =
             Linear(file.Read(layer + "mlp.down_proj", inner, hidden), dtype)});
  }
}

kvtwin::CacheSpec Model::cache_spec() const {
  kvtwin::CacheSpec spec{.placement = kvtwin::Placement::kScatter};
  spec.shift.kind = kvtwin::ShiftKind::kRope;
  spec.shift.rope = {.pairing = kvtwin::Rope::Pairing::kHalves,
                     .base = config_.rope_base};
  return spec;
}

const Rows& Model::Forward(kvtwin::Cache& cache,
                           std::span<const std::int32_t> tokens,
                           std::span<const std::int32_t> positions,
                           std::span<const int> outputs) {
  const auto rows = static_cast<Eigen::Index>(tokens.size());
  const int half = config_.head_dim / 2;
  const Eigen::ArrayXd frequencies = Eigen::pow(
      config_.rope_base, -Eigen::ArrayXd::LinSpaced(half, 0, half - 1) / half);
  hidden_.resize(config_.hidden, rows);
  cosines_.resize(half, rows);
  sines_.resize(half, rows);
  for (Eigen::Index row = 0; row < rows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    hidden_.col(row) = embedding_.col(tokens[at]);
    const Eigen::ArrayXd angles = positions[at] * frequencies;
    cosines_.col(row) = angles.cos().cast<float>();
    sines_.col(row) = angles.sin().cast<float>();
  }
  for (int layer = 0; layer < config_.layers; ++layer) {
    Attend(cache, layer);
    Inner(layers_[static_cast<std::size_t>(layer)]);
  }
  const Rows last = hidden_(Eigen::all, outputs);
  Normalize(last, final_norm_, config_.epsilon, normed_);
  output_.resize(config_.vocab, 0);
  if (!outputs.empty()) logits_.Run(normed_, output_);
  return output_;
}

// The first half of a layer. This is all that a model has to do with kvtwin.
void Model::Attend(kvtwin::Cache& cache, int index) {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const int head_dim = config_.head_dim, half = head_dim / 2;
  const int turning = config_.heads + config_.kv_heads;  // Those of Q and K.
  const Eigen::Index rows = hidden_.cols();
  Normalize(hidden_, layer.attention_norm, config_.epsilon, normed_);
  layer.qkv.Run(normed_, qkv_);
#pragma omp parallel for if (rows > 16)
  for (Eigen::Index row = 0; row < rows; ++row) {
    Eigen::Map<Rows> heads(qkv_.col(row).data(), head_dim, turning);
    const Rows low = heads.topRows(half), high = heads.bottomRows(half);
    const Eigen::ArrayXf cosine = cosines_.col(row), sine = sines_.col(row);
    heads.topRows(half) = low.colwise() * cosine - high.colwise() * sine;
    heads.bottomRows(half) = low.colwise() * sine + high.colwise() * cosine;
  }
  // Q, K and V are columns of the same rows.
  const auto part = [&](int first, int count) {
    kvtwin::TensorView view =
        DenseView(qkv_.data() + first * head_dim, DType::kF32,
                  {head_dim, turning + config_.kv_heads, rows, 1});
    view.shape[1] = count;
    return view;
  };
  Check(cache.SetLayer(index));
  Check(cache.Put(part(config_.heads, config_.kv_heads),
                  part(turning, config_.kv_heads)));
  const kvtwin::KvView view = Value(cache.Get());
  // All layers have the same mask.
  if (index == 0) Check(attention_->Plan(view.mask, static_cast<int>(rows)));
  attended_.resize(config_.heads * head_dim, rows);
  Check(
      attention_->Attend(part(0, config_.heads), view, kvtwin::VLayout::kPlain,
                         {.scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                          .bf16_products = bf16_},
                         {.out = attended_.data()}));
  layer.out.Run(attended_, normed_);
  hidden_ += normed_;
}

// The second half of a layer: SwiGLU.
void Model::Inner(const Layer& layer) {
  Normalize(hidden_, layer.inner_norm, config_.epsilon, normed_);
  layer.gate_up.Run(normed_, gates_);
  attended_.resize(config_.inner, gates_.cols());
#pragma omp parallel for if (gates_.cols() > 4)
  for (Eigen::Index row = 0; row < gates_.cols(); ++row) {
    const auto gate = gates_.col(row).head(config_.inner);
    const auto up = gates_.col(row).tail(config_.inner);
    attended_.col(row) = gate / (1 + (-gate).exp()) * up;
  }
  layer.down.Run(attended_, normed_);
  hidden_ += normed_;
}

}  // namespace serve
