// Prints a line for each kind of attention, with a digest of its results:
// identical_test.sh compares them between builds and numbers of threads
// (OMP_NUM_THREADS).

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "optimized/targets.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

constexpr int kHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kBlockSize = 16;
constexpr int kCells = 40 * kBlockSize;
// Enough that a row is split into parts.
constexpr int kManyCells = 12288;
constexpr int kPrefillRows = 20;

constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16,
                                DType::kF8,  DType::kQ8,  DType::kQ4};

// Returns numbers from -1 to 1, which look random.
DenseTensor Numbers(const Shape& shape, std::uint32_t random) {
  DenseTensor numbers = FilledTensor(DType::kF32, shape, 0);
  auto* to = reinterpret_cast<float*>(numbers.bytes.data());
  for (std::size_t i = 0; i < numbers.bytes.size() / sizeof(float); ++i) {
    random = random * 1664525 + 1013904223;
    to[i] = static_cast<float>(random >> 8) / (1 << 23) - 1;
  }
  return numbers;
}

class Digester {
 public:
  Digester(DType k_dtype, DType v_dtype, int cells = kCells)
      : cells_(cells),
        name_(fmt::format("attention, K {}, V {}", DTypeName(k_dtype),
                          DTypeName(v_dtype))),
        key_(
            CopyOf(Numbers({kHeadDim, kKvHeads, cells, 1}, 1).view(), k_dtype)),
        value_(CopyOf(Numbers({kHeadDim, kKvHeads, cells, 1}, 2).view(),
                      v_dtype)) {}

  void PrintAll() {
    for (const int rows : {1, kPrefillRows}) {
      PrintView(rows, {.scale = 0.125f});
      PrintView(rows, {.scale = 0.5f, .soft_cap = 3, .splits = 3});
      PrintView(rows, {.scale = 0.5f, .sinks = kSinks, .splits = 5});
    }
    PrintTable();
  }

  // Each row sees its past, except for every seventh cell.
  void PrintView(int rows, const AttentionOptions& options) {
    DenseTensor mask = HidingMask(DType::kBits, cells_, rows);
    for (int row = 0; row < rows; ++row) {
      for (int cell = 0; cell <= cells_ - rows + row; ++cell) {
        if (cell % 7 != 0) AllowInMask(mask, cell, row);
      }
    }
    Print(
        fmt::format("{} rows over {} cells, cap {}, {} splits{}", rows, cells_,
                    options.soft_cap, options.splits,
                    options.bf16_products ? ", products of bf16" : ""),
        rows, attention_->Plan(mask.view(), rows),
        [&](const TensorView& query, const AttentionOut& out) {
          return attention_->Attend(
              query,
              {.key = key_.view(), .value = value_.view(), .mask = mask.view()},
              VLayout::kPlain, options, out);
        });
  }

 private:
  static constexpr std::array<float, kHeads> kSinks = {1, -2, 0, 3,
                                                       0, 1,  2, -1};

  void PrintTable() {
    constexpr std::array<std::int32_t, 3> kLengths = {kCells, 70, 1};
    constexpr std::array<std::int32_t, 3> kQueryRows = {1, kPrefillRows, 1};
    constexpr int kColumns = kCells / kBlockSize;
    std::vector<std::int32_t> blocks(3 * kColumns);
    for (int i = 0; i < Size(blocks); ++i) At(blocks, i) = i * 7 % kColumns;
    const auto in_blocks = [](DenseTensor& rows) {
      TensorView view = rows.view();
      view.shape[2] = kBlockSize;
      view.shape[3] = kColumns;
      view.stride[3] = view.stride[2] * kBlockSize;
      return view;
    };
    Print("table", kPrefillRows + 2,
          attention_->Plan({.blocks = blocks,
                            .columns = kColumns,
                            .lengths = kLengths,
                            .query_rows = kQueryRows,
                            .block_size = kBlockSize}),
          [&](const TensorView& query, const AttentionOut& out) {
            return attention_->Attend(
                query,
                PagedKv{.key = in_blocks(key_), .value = in_blocks(value_)},
                PagedLayout::kTokenMajor, {.scale = 0.125f}, out);
          });
  }

  template <class Attend>
  void Print(std::string_view what, int rows, const Status& planned,
             const Attend& attend) {
    const DenseTensor query = Numbers({kHeadDim, kHeads, rows, 1}, 3);
    std::vector<float> out(AsSize(kHeadDim * kHeads * rows));
    std::vector<float> log_sum_exp(AsSize(kHeads * rows));
    Status status = planned;
    if (status.ok()) {
      status = attend(query.view(),
                      {.out = out.data(), .log_sum_exp = log_sum_exp.data()});
    }
    const auto hash = [](const std::vector<float>& numbers) {
      return HashBytes(numbers.data(), numbers.size() * sizeof(float), 0);
    };
    fmt::print("{}, {}: {:016x} {:016x} {}\n", name_, what, hash(out),
               hash(log_sum_exp), status.message());
  }

  int cells_;
  std::string name_;
  DenseTensor key_;
  DenseTensor value_;
  std::unique_ptr<Attention> attention_ = *MakeAttention();
};

}  // namespace
}  // namespace kvtwin::props

int main() {
  using kvtwin::props::Digester;
  using kvtwin::props::kDTypes;
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    Digester(kDTypes[i], kDTypes[i]).PrintAll();
    Digester(kDTypes[i], kDTypes[(i + 1) % kDTypes.size()]).PrintAll();
  }
  Digester(kDTypes[0], kDTypes[0], kvtwin::props::kManyCells)
      .PrintView(1, {.scale = 0.125f});
  // Enough queries that AMX multiplies in terms of bf16.
  Digester(kDTypes[0], kDTypes[1]).PrintView(60, {.scale = 0.125f});
  // The same as with products of f32 on processors without an instruction.
  for (const kvtwin::DType dtype : {kDTypes[0], kDTypes[2]}) {
    Digester(dtype, dtype)
        .PrintView(20, {.scale = 0.125f, .bf16_products = true});
  }
  for (const kvtwin::DType dtype : kDTypes) {
    Digester(dtype, dtype, kvtwin::props::kManyCells)
        .PrintView(1, {.scale = 0.125f, .bf16_products = true});
  }
  fmt::print("target {}\n", kvtwin::optimized::ActiveTarget());
}
