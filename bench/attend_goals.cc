// The goals of attention: 32 query heads on 8 KV heads of 128 elements. The
// limits of decode are to read K and V, and to do no more than its products
// with them; the limit of prefill is to do its multiplications and additions in
// registers; the limit of decode over the blocks of many sequences is decode
// over a view with as many cells.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"
#include "optimized/attention_bf16.h"

namespace kvtwin::bench {
namespace {

constexpr int kElements = kDecodeElements;
constexpr int kSharedHeads = 8;
constexpr int kQueryHeads = kSharedHeads * kDecodeQueries;

struct AttendCase {
  DType dtype = DType::kF32;
  int cells = 0;
  int rows = 1;  // They are the last tokens; each sees its past and itself.
  // 0: K and V are a view. Otherwise they are blocks of a pool, each row is the
  // last token of another sequence, and `cells` is the sum of the lengths.
  int block_size = 0;
  bool bf16_products = false;
};

// Random lengths of at least 1.
std::vector<std::int32_t> RandomLengths(int sequences, int sum) {
  std::mt19937 random(1);
  std::vector<std::int32_t> ends(AsSize(sequences));
  for (std::int32_t& end : ends) {
    end = AsInt(random() % AsSize(sum - sequences + 1));
  }
  ends.back() = sum - sequences;
  std::ranges::sort(ends);
  std::vector<std::int32_t> lengths(ends.size());
  std::adjacent_difference(ends.begin(), ends.end(), lengths.begin());
  for (std::int32_t& length : lengths) ++length;
  return lengths;
}

// Rows of a cache's layer, or queries: [kElements, heads, rows].
struct Rows {
  Rows(DType dtype, std::int64_t heads, std::int64_t rows)
      : buffer(DenseBytes(dtype, {kElements, heads, rows, 1})),
        view(DenseView(buffer.data(), dtype, {kElements, heads, rows, 1})) {
    constexpr std::int64_t kPeriod = 999;  // Then the numbers repeat.
    std::uint32_t random = 1;
    std::vector<float> numbers(kElements);
    const TensorView from =
        DenseView(numbers.data(), DType::kF32, {kElements, 1, 1, 1});
    for (std::int64_t i = 0; i < heads * rows; ++i) {
      std::byte* to = buffer.data() + i * view.stride[1];
      if (i >= kPeriod) {
        std::memcpy(to, to - kPeriod * view.stride[1], AsSize(view.stride[1]));
        continue;
      }
      for (float& number : numbers) {
        random = random * 1664525 + 1013904223;
        number = static_cast<float>(random >> 8) / (1 << 23) - 1;
      }
      CopyRun(from, 0, 0, 0, to, view.stride[0], dtype);
    }
  }

  Buffer buffer;
  TensorView view;
};

// One layer of a pass.
class Attender {
 public:
  Attender(const AttendCase& drawn, std::string_view twin)
      : attention_(*MakeAttention(twin)),
        block_size_(drawn.block_size),
        bf16_products_(drawn.bf16_products),
        key_(drawn.dtype, kSharedHeads, StoredCells(drawn)),
        value_(drawn.dtype, kSharedHeads, StoredCells(drawn)),
        query_(DType::kF32, kQueryHeads, drawn.rows),
        out_(AsSize(kElements * kQueryHeads * drawn.rows)) {
    if (drawn.block_size == 0) {
      PlanMask(drawn);
    } else {
      PlanTable(drawn);
    }
  }

  std::size_t bytes() const {
    return key_.buffer.bytes() + value_.buffer.bytes();
  }
  const std::vector<float>& out() const { return out_; }

  // The time of the products alone.
  double TimeProducts(bool fetch) const {
    double time = 0;
    for (const Rows* rows : {&key_, &value_}) {
      time += MultiplyRows(rows->view.dtype, rows->buffer.data(),
                           AsSize(rows->view.shape[1] * rows->view.shape[2]),
                           fetch);
    }
    return time;
  }

  double Time() {
    const AttentionOptions options = {.scale = 1 / std::sqrt(float{kElements}),
                                      .bf16_products = bf16_products_};
    const AttentionOut out = {.out = out_.data()};
    return bench::Time([&] {
      if (block_size_ == 0) {
        Require(attention_->Attend(
            query_.view,
            {.key = key_.view, .value = value_.view, .mask = mask_.view()},
            VLayout::kPlain, options, out));
      } else {
        Require(attention_->Attend(
            query_.view, {.key = InBlocks(key_), .value = InBlocks(value_)},
            PagedLayout::kTokenMajor, options, out));
      }
    });
  }

 private:
  static int BlocksOf(int length, int block_size) {
    return (length + block_size - 1) / block_size;
  }
  static int StoredCells(const AttendCase& drawn) {
    if (drawn.block_size == 0) return drawn.cells;
    int blocks = 0;
    for (const int length : RandomLengths(drawn.rows, drawn.cells)) {
      blocks += BlocksOf(length, drawn.block_size);
    }
    return blocks * drawn.block_size;
  }

  void PlanMask(const AttendCase& drawn) {
    mask_ = HidingMask(DType::kBits, drawn.cells, drawn.rows);
    for (int row = 0; row < drawn.rows; ++row) {
      for (int cell = 0; cell <= drawn.cells - drawn.rows + row; ++cell) {
        AllowInMask(mask_, cell, row);
      }
    }
    Require(attention_->Plan(mask_.view(), drawn.rows));
  }

  // The blocks of the sequences are in random order.
  void PlanTable(const AttendCase& drawn) {
    const std::vector<std::int32_t> lengths =
        RandomLengths(drawn.rows, drawn.cells);
    const int columns =
        BlocksOf(*std::ranges::max_element(lengths), block_size_);
    std::vector<std::int32_t> order(
        AsSize(key_.view.shape[2] / drawn.block_size));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, std::mt19937(1));
    std::vector<std::int32_t> blocks(lengths.size() * AsSize(columns), -1);
    std::size_t used = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto count = AsSize(BlocksOf(lengths[i], block_size_));
      std::copy_n(order.begin() + AsInt(used), count,
                  blocks.begin() + AsInt(i) * columns);
      used += count;
    }
    const std::vector<std::int32_t> query_rows(lengths.size(), 1);
    Require(attention_->Plan({.blocks = blocks,
                              .columns = columns,
                              .lengths = lengths,
                              .query_rows = query_rows,
                              .block_size = block_size_}));
  }

  TensorView InBlocks(const Rows& rows) const {
    TensorView view = rows.view;
    view.shape[2] = block_size_;
    view.shape[3] = rows.view.shape[2] / block_size_;
    view.stride[3] = view.stride[2] * block_size_;
    return view;
  }

  static void Require(const Status& status) {
    if (status.ok()) return;
    fmt::print(stderr, "kvtwin-bench: attention: {}\n", status.message());
    std::exit(2);
  }

  std::unique_ptr<Attention> attention_;
  int block_size_;
  bool bf16_products_;
  Rows key_;
  Rows value_;
  Rows query_;
  DenseTensor mask_;
  std::vector<float> out_;
};

// Ends the program if the twins differ for a case like this one, but small.
void CheckAttention(const std::string& name, AttendCase like) {
  like.cells = 300;
  like.rows = std::min(like.rows, 80);
  Attender expected(like, "reference");
  Attender got(like, "optimized");
  expected.Time();
  got.Time();
  for (std::size_t i = 0; i < got.out().size(); ++i) {
    // Sums of 300 numbers below 1, or, rounded to bf16, errors of 2^-7 of each:
    // docs/attention.md has the exact bounds.
    const float bound = like.bf16_products ? 1e-2f : 1e-5f;
    if (std::abs(got.out()[i] - expected.out()[i]) < bound) continue;
    fmt::print(stderr, "kvtwin-bench: {}: element {} is {} instead of {}\n",
               name, i, got.out()[i], expected.out()[i]);
    std::exit(2);
  }
}

struct Row {
  DType dtype;
  int cells;
  double share;  // The least speed, as a part of the speed of the limit.
  bool bf16_products = false;
};

// The least speed of decode, as a part of the speed of its products alone.
constexpr double kShareOfProducts = 0.9;

void AttendDecodeGoals(Goals& goals, int threads) {
  for (const Row& row :
       {Row{DType::kF32, 1 << 15, 0.9}, Row{DType::kF32, 1 << 18, 0.9},
        Row{DType::kF16, 1 << 15, 0.85}, Row{DType::kF16, 1 << 18, 0.85},
        Row{DType::kBF16, 1 << 15, 0.85}, Row{DType::kQ8, 1 << 15, 0.65},
        Row{DType::kF8, 1 << 15, 0.65}, Row{DType::kBF16, 1 << 15, 0.85, true},
        Row{DType::kQ8, 1 << 15, 0.65, true},
        Row{DType::kF8, 1 << 15, 0.65, true}}) {
    const int cells = goals.Cells(row.cells);
    const auto name_of = [&](std::string_view limit) {
      return fmt::format("attend, decode {}{}, {} cells / {}, {}",
                         DTypeName(row.dtype),
                         row.bf16_products ? " in bf16" : "", SizeName(cells),
                         limit, ThreadsName(threads));
    };
    const std::string name = name_of("read");
    const std::string of_products = name_of("products");
    const bool has_products = !row.bf16_products && goals.Wanted(of_products);
    if (!goals.Wanted(name) && !has_products) continue;
    const AttendCase decode = {
        .dtype = row.dtype, .cells = cells, .bf16_products = row.bf16_products};
    CheckAttention(name, decode);
    Attender attender(decode, "optimized");
    const Timing time = [&] { return attender.Time(); };
    if (goals.Wanted(name)) {
      const Buffer read = WrittenBuffer(attender.bytes());
      goals.Judge(name, 1 / row.share, time,
                  {[&] { return ReadOnThreads(read.data(), read.bytes()); }},
                  7);
    }
    if (has_products) {
      goals.Judge(of_products, 1 / kShareOfProducts, time,
                  {[&] { return attender.TimeProducts(/*fetch=*/false); },
                   [&] { return attender.TimeProducts(/*fetch=*/true); }},
                  7);
    }
  }
}

void AttendBlocksGoals(Goals& goals, int threads) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const int block_size : {16, 32}) {
      const int cells = goals.Cells(1 << 15);
      const std::string name = fmt::format(
          "attend, decode {}, 64 sequences in blocks of {} / view, {}",
          DTypeName(dtype), block_size, ThreadsName(threads));
      if (!goals.Wanted(name)) continue;
      const AttendCase ragged = {
          .dtype = dtype, .cells = cells, .rows = 64, .block_size = block_size};
      CheckAttention(name, ragged);
      Attender over_blocks(ragged, "optimized");
      Attender over_view({.dtype = dtype, .cells = cells}, "optimized");
      goals.Judge(
          name, 1 / 0.95, [&] { return over_blocks.Time(); },
          {[&] { return over_view.Time(); }}, 7);
    }
  }
}

void AttendPrefillGoals(Goals& goals, int threads) {
  const bool amx =
      optimized::Bf16Multiplier() != optimized::MultiplyInRegisters;
  const double in_bf16 = amx ? 2 : 1.4;
  for (const Row& row :
       {Row{DType::kF32, 1 << 13, 0.75}, Row{DType::kF16, 1 << 13, 0.55},
        Row{DType::kQ8, 1 << 13, 0.55},
        Row{DType::kBF16, 1 << 13, in_bf16, true},
        Row{DType::kF16, 1 << 13, in_bf16, true},
        Row{DType::kQ8, 1 << 13, in_bf16, true}}) {
    const int cells = goals.Cells(row.cells);
    const int rows = goals.Cells(512);
    const std::string name =
        fmt::format("attend, prefill {}{}, {} over {} / FMA, {}",
                    DTypeName(row.dtype), row.bf16_products ? " in bf16" : "",
                    rows, SizeName(cells), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    const AttendCase prefill = {.dtype = row.dtype,
                                .cells = cells,
                                .rows = rows,
                                .bf16_products = row.bf16_products};
    CheckAttention(name, prefill);
    Attender attender(prefill, "optimized");
    // For K and for V: the cells that each row sees, and each element.
    const auto seen = AsSize(rows) * AsSize(2 * cells - rows + 1) / 2;
    const std::size_t operations = 2 * seen * kQueryHeads * kElements;
    goals.Judge(
        name, 1 / row.share, [&] { return attender.Time(); },
        {[&] { return MultiplyAdd(operations); }}, 3);
  }
}

}  // namespace

void AttendGoals(Goals& goals) {
  for (const int threads : ThreadCounts()) {
    UseThreads(threads);
    AttendDecodeGoals(goals, threads);
    AttendBlocksGoals(goals, threads);
    AttendPrefillGoals(goals, threads);
  }
}

}  // namespace kvtwin::bench
