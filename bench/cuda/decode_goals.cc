// The goals of decode attention: 64 sequences of 32k tokens, 32 heads of 128
// that share 8 heads of K and V, beside a read of all K and V.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "bench/cuda/gpu.h"
#include "bench/cuda/suite.h"
#include "bench/twins.h"
#include "core/elements.h"
#include "core/index.h"
#include "optimized/cuda/attention.h"

namespace kvtwin::bench {
namespace {

using optimized::cuda::DecodePaged;
using optimized::cuda::DecodeQuery;
using optimized::cuda::DecodeScratchBytes;
using optimized::cuda::DecodeView;
using optimized::cuda::PagedRows;

constexpr int kGroup = 4;
constexpr int kQueryHeads = kHeads * kGroup;
constexpr int kBlock = 16;  // Tokens of a block.
constexpr double kGoal = 1 / 0.8;

// Far above rounding errors, and below the effect of losing a warp's tokens.
constexpr double kTolerance = 5e-5;

struct Batch64 {
  explicit Batch64(const Goals& goals)
      : rows(goals.quick() ? 2 : 64), tokens(goals.quick() ? 64 : 1 << 15) {}

  std::int64_t all() const { return std::int64_t{rows} * tokens; }

  int rows;
  int tokens;  // Tokens of each row.
};

// The result of head `head` for `query`, computed on the host in double: token
// i is at cells[i] of rows [kHeadDim, kHeads, any].
std::vector<double> Attend(const TensorView& key, const TensorView& value,
                           const std::vector<std::int64_t>& cells,
                           const float* query, int head) {
  const int kv_head = head / kGroup;
  double sum = 0;
  std::vector<double> out(kHeadDim);
  for (const std::int64_t cell : cells) {
    double score = 0;
    for (int i = 0; i < kHeadDim; ++i) {
      score +=
          double{query[i]} * LoadElement(key.at(i, kv_head, cell), key.dtype);
    }
    const double weight = std::exp(score / std::sqrt(kHeadDim));
    sum += weight;
    for (std::size_t i = 0; i < kHeadDim; ++i) {
      out[i] += weight * LoadElement(value.at(static_cast<std::int64_t>(i),
                                              kv_head, cell),
                                     value.dtype);
    }
  }
  for (double& element : out) element /= sum;
  return out;
}

// K and V of a batch, one after the other, on the device and on the host.
class Rows {
 public:
  Rows(DType dtype, std::int64_t cells)
      : shape_{kHeadDim, kHeads, cells, 1},
        bytes_(static_cast<std::int64_t>(DenseBytes(dtype, shape_))),
        dtype_(dtype),
        memory_(2 * bytes_) {
    // The random rows are repeated, because random numbers are slow to make.
    // The period is such that no two sequences, and no two blocks, begin with
    // the same row.
    const std::int64_t period = std::min<std::int64_t>(cells, 65521);
    const std::int64_t piece = period * RowBytes(dtype);
    for (int which = 0; which < 2; ++which) {
      parts_[which] = RandomElements(dtype, period * kHeads * kHeadDim,
                                     static_cast<std::uint64_t>(which) + 5);
      for (std::int64_t at = 0; at < bytes_; at += piece) {
        Must(cudaMemcpy(
            memory_.data() + which * bytes_ + at, parts_[which].data(),
            AsSize(std::min(piece, bytes_ - at)), cudaMemcpyHostToDevice));
      }
    }
  }

  std::int64_t bytes() const { return 2 * bytes_; }
  const std::byte* key() const { return memory_.data(); }
  const std::byte* value() const { return memory_.data() + bytes_; }
  TensorView View(const std::byte* data) const {
    return DenseView(data, dtype_, shape_);
  }

  // Checks one row of the result.
  void Check(const std::string& name, const std::vector<std::int64_t>& cells,
             const std::vector<float>& query, const std::vector<float>& out,
             int row) const {
    const auto rows = std::ssize(parts_[0]) / RowBytes(dtype_);
    std::vector<std::int64_t> on_host;
    for (const std::int64_t cell : cells) on_host.push_back(cell % rows);
    const auto view = [&](const std::vector<std::byte>& part) {
      return DenseView(part.data(), dtype_, {kHeadDim, kHeads, rows, 1});
    };
    for (const int head : {0, kQueryHeads - 1}) {
      const std::size_t at =
          (AsSize(row) * kQueryHeads + AsSize(head)) * kHeadDim;
      const auto want = Attend(view(parts_[0]), view(parts_[1]), on_host,
                               query.data() + at, head);
      for (std::size_t i = 0; i < kHeadDim; ++i) {
        if (std::abs(out[at + i] - want[i]) <= kTolerance) continue;
        Wrong(name, fmt::format("row {}, head {}, element {} is {}, not {}",
                                row, head, i, out[at + i], want[i]));
      }
    }
  }

 private:
  Shape shape_;
  std::int64_t bytes_;
  DType dtype_;
  GpuBuffer memory_;
  std::vector<std::byte> parts_[2];
};

// Queries and results of a batch.
struct Question {
  explicit Question(const Batch64& batch, std::int64_t cells)
      : query(AsSize(batch.rows) * kQueryHeads * kHeadDim),
        on_device(Random(query)),
        out(static_cast<std::int64_t>(query.size() * sizeof(float))),
        ask{.query = on_device.as<float>(),
            .out = out.as<float>(),
            .heads = kQueryHeads,
            .rows = batch.rows,
            .scale = 1 / std::sqrt(static_cast<float>(kHeadDim)),
            .splits = 0},
        scratch(static_cast<std::int64_t>(
            DecodeScratchBytes(ask, kHeads, kHeadDim, cells))) {}

  std::vector<float> Answer() const {
    std::vector<float> answer(query.size());
    const auto bytes = out.Download();
    std::memcpy(answer.data(), bytes.data(), bytes.size());
    return answer;
  }

  static const std::vector<float>& Random(std::vector<float>& values) {
    std::mt19937 random(1);
    for (float& value : values) {
      value = static_cast<float>(random() >> 8) / (1 << 23) - 1;
    }
    return values;
  }

  std::vector<float> query;
  GpuBuffer on_device;
  GpuBuffer out;
  DecodeQuery ask;
  GpuBuffer scratch;
};

std::string NameOf(const char* what, DType dtype) {
  return fmt::format("decode {}, {}, 64 x 32k tokens / read", what,
                     DTypeName(dtype));
}

void JudgePaged(Goals& goals, DType dtype) {
  const std::string name = NameOf("over blocks", dtype);
  if (!goals.Wanted(name)) return;
  const Batch64 batch(goals);
  const Rows rows(dtype, batch.all());
  std::vector<int> table(AsSize(batch.all() / kBlock));
  std::iota(table.begin(), table.end(), 0);
  std::ranges::shuffle(table, std::mt19937(1));
  const GpuBuffer device_table(table);
  const std::vector<int> lengths(AsSize(batch.rows), batch.tokens);
  const GpuBuffer device_lengths(lengths);
  const Question question(batch, batch.tokens);
  const PagedRows stored = {.key = rows.key(),
                            .value = rows.value(),
                            .k_dtype = dtype,
                            .v_dtype = dtype,
                            .k_head_dim = kHeadDim,
                            .v_head_dim = kHeadDim,
                            .kv_heads = kHeads,
                            .block_size = kBlock,
                            .head_major = false,
                            .table = device_table.as<int>(),
                            .most_blocks = batch.tokens / kBlock,
                            .lengths = device_lengths.as<int>()};
  const GpuWork decode = [&](cudaStream_t stream) {
    return DecodePaged(question.ask, stored, question.scratch.data(), stream);
  };
  RunOnGpu(decode);
  for (const int row : {0, batch.rows - 1}) {
    std::vector<std::int64_t> cells;
    for (int token = 0; token < batch.tokens; ++token) {
      const int block = At(table, row * stored.most_blocks + token / kBlock);
      cells.push_back(std::int64_t{block} * kBlock + token % kBlock);
    }
    rows.Check(name, cells, question.query, question.Answer(), row);
  }
  const ReadLimit limit(rows.key(), rows.bytes());
  goals.Judge(name, kGoal, OnGpu(decode), {limit.timing()});
}

// The cells of a sequence lie together. Its row of the mask, of bits, has to be
// read as well.
void JudgeView(Goals& goals, DType dtype) {
  const std::string name = NameOf("over cells", dtype);
  if (!goals.Wanted(name)) return;
  const Batch64 batch(goals);
  const Rows rows(dtype, batch.all());
  const std::int64_t row_bytes = RunBytes(DType::kBits, batch.all());
  std::vector<std::byte> bits(AsSize(batch.rows * row_bytes));
  for (int row = 0; row < batch.rows; ++row) {
    std::memset(bits.data() + row * (row_bytes + batch.tokens / 8), 0xff,
                AsSize(batch.tokens) / 8);
  }
  const GpuBuffer mask(bits);
  const Question question(batch, batch.all());
  KvView view;
  view.key = rows.View(rows.key());
  view.value = rows.View(rows.value());
  view.mask =
      DenseView(mask.data(), DType::kBits, {batch.all(), batch.rows, 1, 1});
  const GpuWork decode = [&](cudaStream_t stream) {
    return DecodeView(question.ask, view, VLayout::kPlain,
                      question.scratch.data(), stream);
  };
  RunOnGpu(decode);
  for (const int row : {0, batch.rows - 1}) {
    std::vector<std::int64_t> cells(AsSize(batch.tokens));
    std::iota(cells.begin(), cells.end(), std::int64_t{row} * batch.tokens);
    rows.Check(name, cells, question.query, question.Answer(), row);
  }
  const ReadLimit limit(rows.key(), rows.bytes());
  goals.Judge(name, kGoal, OnGpu(decode), {limit.timing()});
}

}  // namespace

void CudaDecodeGoals(Goals& goals) {
  for (const DType dtype : {DType::kF16, DType::kF8}) {
    JudgePaged(goals, dtype);
    JudgeView(goals, dtype);
  }
}

}  // namespace kvtwin::bench
