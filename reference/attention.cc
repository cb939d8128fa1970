// Attention of the reference twin: the formula of reference/attention.h, row by
// row. A pool's sequence is copied to a view, and its rows to a mask.

#include "reference/attention.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_attention.h"
#include "core/twin.h"

namespace kvtwin::reference {
namespace {

// The cells, or the tokens of a sequence, that rows of a pass see.
struct Seen {
  DenseTensor mask;  // [columns, rows]
  // For a sequence: the block of each column's token, and its place there.
  std::vector<std::int32_t> blocks = {};
  std::vector<std::int32_t> slots = {};
};

// The dimensions of a tensor of blocks that count heads, and tokens of a block.
struct BlockDims {
  int heads;
  int tokens;
};

// Returns the rows of the tokens in `seen`, [head_dim, kv_heads, tokens].
DenseTensor RowsOf(const TensorView& blocks, const BlockDims& dims,
                   const Seen& seen) {
  const Shape shape = {blocks.shape[0], At(blocks.shape, dims.heads),
                       std::ssize(seen.blocks), 1};
  DenseTensor rows = FilledTensor(DType::kF32, shape, 0);
  auto* to = reinterpret_cast<float*>(rows.bytes.data());
  for (std::size_t token = 0; token < seen.blocks.size(); ++token) {
    TensorView row = blocks;
    row.data = blocks.at(0) +
               At(blocks.stride, dims.tokens) * seen.slots[token] +
               blocks.stride[3] * seen.blocks[token];
    row.stride[1] = At(blocks.stride, dims.heads);
    for (std::int64_t head = 0; head < shape[1]; ++head) {
      for (std::int64_t i = 0; i < shape[0]; ++i) {
        *to++ = LoadFrom(row, i, head);
      }
    }
  }
  return rows;
}

class TwinAttention final : public GuardedAttention {
 protected:
  void DoPlan(const TensorView& mask, int rows, int first_row) override {
    Seen seen = {.mask = HidingMask(DType::kF32, mask.shape[0], rows)};
    for (int row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
        if (!MaskAllows(mask, column, first_row + row)) continue;
        AllowInMask(seen.mask, column, row);
      }
    }
    sequences_.assign(1, std::move(seen));
  }

  void DoPlan(const AttentionTable& table) override {
    sequences_.clear();
    for (int i = 0; i < Size(table.lengths); ++i) {
      const int length = At(table.lengths, i);
      const int rows = At(table.query_rows, i);
      if (rows == 0) continue;
      // Blocks before the window of the first row may be any: the gate accepts
      // entries that no row uses.
      const auto first =
          table.sees_all ? 0
                         : AsInt(std::max<std::int64_t>(
                               0, std::int64_t{length} - rows - table.window));
      Seen seen = {.mask = HidingMask(DType::kF32, length - first, rows)};
      for (int position = first; position < length; ++position) {
        const int column = position / table.block_size;
        seen.blocks.push_back(
            At(table.blocks, std::int64_t{i} * table.columns + column));
        seen.slots.push_back(position % table.block_size);
        for (int row = 0; row < rows; ++row) {
          const int behind = length - rows + row - position;
          const bool sees = behind >= 0 && behind <= table.window;
          if (!sees && !table.sees_all) continue;
          AllowInMask(seen.mask, position - first, row);
        }
      }
      sequences_.push_back(std::move(seen));
    }
  }

  void DoAttend(const TensorView& query, const KvView& view, VLayout v_layout,
                const AttentionOptions& options,
                const AttentionOut& out) override {
    KvView planned = view;
    planned.mask = sequences_.front().mask.view();
    AttendRows(query, planned, v_layout, options, /*first_row=*/0, out);
  }

  void DoAttend(const TensorView& query, const PagedKv& blocks,
                PagedLayout layout, const AttentionOptions& options,
                const AttentionOut& out) override {
    const bool head_major = layout == PagedLayout::kHeadMajor;
    const BlockDims dims = {.heads = head_major ? 2 : 1,
                            .tokens = head_major ? 1 : 2};
    std::int64_t first_row = 0;
    for (const Seen& seen : sequences_) {
      const DenseTensor key = RowsOf(blocks.key, dims, seen);
      const DenseTensor value = RowsOf(blocks.value, dims, seen);
      const KvView view = {
          .key = key.view(), .value = value.view(), .mask = seen.mask.view()};
      AttendRows(query, view, VLayout::kPlain, options, first_row, out);
      first_row += seen.mask.shape[1];
    }
  }

 private:
  // Row 0 of the view's mask is row `first_row` of the query.
  static void AttendRows(const TensorView& query, const KvView& view,
                         VLayout v_layout, const AttentionOptions& options,
                         std::int64_t first_row, const AttentionOut& out) {
    const std::int64_t heads = query.shape[1];
    Eigen::MatrixXd queries(query.shape[0], heads);
    for (std::int64_t row = 0; row < view.mask.shape[1]; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t i = 0; i < queries.rows(); ++i) {
          queries(i, head) = LoadFrom(query, i, head, first_row + row);
        }
      }
      const AttendedRow result = AttendRow(view, v_layout, row, queries,
                                           {.scale = options.scale,
                                            .soft_cap = options.soft_cap,
                                            .sinks = options.sinks});
      const std::int64_t results = (first_row + row) * heads;
      Eigen::Map<Eigen::MatrixXf>(out.out + results * result.out.rows(),
                                  result.out.rows(), heads) =
          result.out.cast<float>();
      if (out.log_sum_exp == nullptr) continue;
      Eigen::Map<Eigen::VectorXf>(out.log_sum_exp + results, heads) =
          result.log_sum_exp.cast<float>();
    }
  }

  std::vector<Seen> sequences_;  // A view counts as one sequence.
};

}  // namespace

std::unique_ptr<Attention> MakeAttention() {
  return std::make_unique<TwinAttention>();
}

}  // namespace kvtwin::reference
