#include "core/guarded_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/mask_elements.h"
#include "core/refusals.h"
#include "kvtwin/rows.h"

namespace kvtwin {
namespace {

constexpr int kSplitsMax = 65536;
constexpr std::int64_t kRowsMax = 16777216;  // Rows of a plan.
constexpr std::int64_t kDimMax = std::numeric_limits<std::int32_t>::max();

Status CheckRange(std::string_view name, std::int64_t value, std::int64_t least,
                  std::int64_t most) {
  if (least <= value && value <= most) return {};
  return Invalid("{} is {}, it must be {} to {}", name, value, least, most);
}

Status CheckDims(std::string_view name, const TensorView& tensor) {
  if (tensor.data == nullptr) return Invalid("{} has no data", name);
  for (const std::int64_t dim : tensor.shape) {
    if (dim >= 1 && dim <= kDimMax) continue;
    return Invalid("{} has shape {}, each dimension must be 1 to {}", name,
                   ShapeText(tensor.shape), kDimMax);
  }
  return {};
}

// `blocks_too`: whether dtypes in blocks are taken.
Status CheckRows(std::string_view name, const TensorView& rows,
                 const Shape& expected, bool blocks_too) {
  Status status = CheckDims(name, rows);
  if (status.ok()) status = CheckRowDType(name, rows.dtype);
  if (status.ok()) status = CheckFirstStride(name, rows);
  if (!status.ok()) return status;
  if (rows.shape != expected) {
    return Invalid("{} has shape {}, it must be {}", name,
                   ShapeText(rows.shape), ShapeText(expected));
  }
  if (blocks_too) return CheckWholeBlocks(name, rows.shape[0], rows.dtype);
  if (!IsBlockDType(rows.dtype)) return {};
  return Invalid("{} is {}, which only plain V can be", name,
                 DTypeName(rows.dtype));
}

Status CheckMask(const TensorView& mask) {
  Status status = CheckDims("mask", mask);
  if (status.ok()) status = CheckDType("the dtype of the mask", mask.dtype);
  if (!status.ok()) return status;
  if (!IsMaskDType(mask.dtype)) {
    return Invalid("mask is {}, masks are f32, f16, bf16 or bits",
                   DTypeName(mask.dtype));
  }
  if (mask.shape[2] != 1 || mask.shape[3] != 1) {
    return Invalid("mask has shape {}, it must be [columns, rows]",
                   ShapeText(mask.shape));
  }
  const bool words = reinterpret_cast<std::uintptr_t>(mask.data) % 8 == 0 &&
                     mask.stride[1] % 8 == 0;
  if (mask.dtype == DType::kBits && !words) {
    return Invalid("mask is bits, its rows must be on 8-byte boundaries");
  }
  return CheckFirstStride("mask", mask);
}

Status CheckElements(const TensorView& mask, int rows, int first_row) {
  if (mask.stride[1] == 0) rows = 1;
  for (std::int64_t row = first_row; row < first_row + rows; ++row) {
    if (!HasNeither(mask, row)) continue;
    for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
      if (MaskElementAt(mask, column, row) != MaskElement::kNeither) continue;
      return Invalid("mask is {} in column {} of row {}, it must be 0 or -inf",
                     ElementAsF32(mask, column, row), column, row);
    }
  }
  return {};
}

// Checks that tiles divide the columns of the view.
Status CheckTiles(VLayout layout, std::int64_t columns) {
  if (layout != VLayout::kTiled || columns % kTileCells == 0) return {};
  return Invalid("value is in tiles of {} columns, the mask has {}", kTileCells,
                 columns);
}

// Returns the shape that V must have. Requires: CheckTiles accepts the columns.
Shape ValueShape(const TensorView& value, VLayout layout, std::int64_t kv_heads,
                 std::int64_t columns) {
  if (layout == VLayout::kPlain) return {value.shape[0], kv_heads, columns, 1};
  if (layout == VLayout::kPermuted) {
    return {columns, value.shape[1], kv_heads, 1};
  }
  return {kTileCells, value.shape[1], kv_heads, columns / kTileCells};
}

// The entries of the table whose tokens a row of the sequence sees.
std::span<const std::int32_t> SeenBlocks(const AttentionTable& table,
                                         int sequence) {
  const std::int64_t end = At(table.lengths, sequence);
  const std::int64_t rows = At(table.query_rows, sequence);
  if (rows == 0 || end == 0) return {};
  const std::int64_t begin =
      table.sees_all ? 0 : std::max<std::int64_t>(end - rows - table.window, 0);
  const std::int64_t first = begin / table.block_size;
  const std::int64_t count = (end - 1) / table.block_size + 1 - first;
  return table.blocks.subspan(
      AsSize(std::int64_t{sequence} * table.columns + first), AsSize(count));
}

Status CheckSequence(const AttentionTable& table, int sequence) {
  const int length = At(table.lengths, sequence);
  const int rows = At(table.query_rows, sequence);
  const std::int64_t room = std::int64_t{table.columns} * table.block_size;
  if (length < 0 || length > room) {
    return Invalid("lengths[{}] is {}, it must be 0 to {}", sequence, length,
                   room);
  }
  const std::int64_t most = table.sees_all ? kRowsMax : length;
  if (rows < 0 || rows > most) {
    return Invalid("query_rows[{}] is {}, it must be 0 to {}", sequence, rows,
                   most);
  }
  for (const std::int32_t& block : SeenBlocks(table, sequence)) {
    if (block >= 0) continue;
    return Invalid("blocks[{}] is {}, a row of sequence {} sees it",
                   &block - table.blocks.data(), block, sequence);
  }
  return {};
}

Status CheckTable(const AttentionTable& table) {
  const std::int64_t sequences = std::ssize(table.lengths);
  for (const auto& [name, value] : {std::pair("sequences", sequences),
                                    {"block_size", table.block_size},
                                    {"columns", table.columns}}) {
    if (Status status = CheckRange(name, value, 1, kDimMax); !status.ok()) {
      return status;
    }
  }
  if (std::ssize(table.query_rows) != sequences) {
    return Invalid("query_rows has {} entries, lengths has {}",
                   table.query_rows.size(), sequences);
  }
  if (std::ssize(table.blocks) != sequences * table.columns) {
    return Invalid("blocks has {} entries, {} columns of {} sequences are {}",
                   table.blocks.size(), table.columns, sequences,
                   sequences * table.columns);
  }
  if (Status status = NotNegative("window", table.window); !status.ok()) {
    return status;
  }
  if (table.sees_all && table.window != kOpenEnd) {
    return Invalid("window is {}, rows that see all have none", table.window);
  }
  std::int64_t rows = 0;
  for (int i = 0; i < sequences; ++i) {
    if (Status status = CheckSequence(table, i); !status.ok()) return status;
    rows += At(table.query_rows, i);
  }
  return CheckRange("the sum of query_rows", rows, 1, kRowsMax);
}

// Merges result `at` of the parts: the weight of each part is
// exp(log_sum_exp) / sum.
void MergeResult(std::span<const AttentionPart> parts, std::int64_t v_head_dim,
                 std::int64_t at, std::vector<double>& weights,
                 const AttentionOut& out) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const AttentionPart& part : parts) {
    largest = std::fmax(largest, part.log_sum_exp[at]);
  }
  double sum = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double logarithm = parts[i].log_sum_exp[at];
    // The part saw no cell: exp(-inf - -inf) would be NaN.
    const bool empty = std::isinf(logarithm) && logarithm < 0;
    weights[i] = empty ? 0 : std::exp(logarithm - largest);
    sum += weights[i];
  }
  for (std::int64_t v = at * v_head_dim; v < (at + 1) * v_head_dim; ++v) {
    double merged = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (weights[i] != 0) merged += weights[i] / sum * parts[i].out[v];
    }
    out.out[v] = static_cast<float>(merged);
  }
  if (out.log_sum_exp != nullptr) {
    out.log_sum_exp[at] = static_cast<float>(largest + std::log(sum));
  }
}

}  // namespace

Status CheckAttentionOptions(const AttentionOptions& options,
                             std::int64_t heads) {
  // Twins multiply and divide these numbers in f32, which must not overflow.
  constexpr float kSmallest = 0x1p-50F;
  constexpr float kLargest = 0x1p50F;
  const float scale = std::fabs(options.scale);
  if (!(scale >= kSmallest && scale <= kLargest)) {
    return Invalid("scale is {}, its magnitude must be from 2^-50 to 2^50",
                   options.scale);
  }
  const float soft_cap = options.soft_cap;
  if (!(soft_cap >= kSmallest && soft_cap <= kLargest) && soft_cap != 0) {
    return Invalid("soft_cap is {}, it must be 0 (none), or from 2^-50 to 2^50",
                   soft_cap);
  }
  if (!options.sinks.empty() && std::ssize(options.sinks) != heads) {
    return Invalid("sinks are {}, there are {} heads", options.sinks.size(),
                   heads);
  }
  for (const float sink : options.sinks) {
    const bool none = std::isinf(sink) && sink < 0;
    if (std::fabs(sink) <= kLargest || none) continue;
    return Invalid("a sink is {}, it must be from -2^50 to 2^50, or -inf",
                   sink);
  }
  return CheckRange("splits", options.splits, 0, kSplitsMax);
}

Status GuardedAttention::Plan(const TensorView& mask, int rows, int first_row) {
  Status status = CheckMask(mask);
  if (status.ok()) {
    status = CheckRange("rows", rows, 1, std::min(mask.shape[1], kRowsMax));
  }
  if (status.ok()) {
    status = CheckRange("first_row", first_row, 0, mask.shape[1] - rows);
  }
  if (status.ok()) status = CheckElements(mask, rows, first_row);
  if (!status.ok()) return status;
  planned_ = {};
  DoPlan(mask, rows, first_row);
  planned_ = {.what = For::kMask, .rows = rows, .columns = mask.shape[0]};
  return {};
}

Status GuardedAttention::Plan(const AttentionTable& table) {
  if (Status status = CheckTable(table); !status.ok()) return status;
  Planned planned = {.what = For::kTable, .block_size = table.block_size};
  for (int i = 0; i < Size(table.lengths); ++i) {
    planned.rows += At(table.query_rows, i);
    for (const std::int32_t block : SeenBlocks(table, i)) {
      planned.last_block = std::max<std::int64_t>(planned.last_block, block);
    }
  }
  planned_ = {};
  DoPlan(table);
  planned_ = planned;
  return {};
}

Status GuardedAttention::CheckAttend(const TensorView& query,
                                     std::int64_t k_head_dim,
                                     std::int64_t kv_heads,
                                     std::int64_t v_head_dim,
                                     const AttentionOptions& options,
                                     const AttentionOut& out) const {
  if (Status status = CheckDims("query", query); !status.ok()) return status;
  if (query.dtype != DType::kF32 && query.dtype != DType::kF16 &&
      query.dtype != DType::kBF16) {
    Status status = CheckDType("query", query.dtype);
    if (!status.ok()) return status;
    return Invalid("query is {}, it must be f32, f16 or bf16",
                   DTypeName(query.dtype));
  }
  if (Status status = CheckStrides("query", query); !status.ok()) return status;
  const std::int64_t heads = query.shape[1];
  const Shape expected = {k_head_dim, heads, planned_.rows, 1};
  if (query.shape != expected) {
    return Invalid("query has shape {}, it must be {}", ShapeText(query.shape),
                   ShapeText(expected));
  }
  if (heads % kv_heads != 0) {
    return Invalid("query has {} heads, which {} KV heads cannot share", heads,
                   kv_heads);
  }
  if (Status status = CheckAttentionOptions(options, heads); !status.ok()) {
    return status;
  }
  std::int64_t bytes = heads * planned_.rows;
  if (__builtin_mul_overflow(bytes, v_head_dim, &bytes) ||
      __builtin_mul_overflow(bytes, std::int64_t{sizeof(float)}, &bytes)) {
    return Invalid(
        "a result of {} elements for {} heads of {} rows is too large",
        v_head_dim, heads, planned_.rows);
  }
  if (out.out == nullptr) return Invalid("out is null");
  return {};
}

Status GuardedAttention::Attend(const TensorView& query, const KvView& view,
                                VLayout v_layout,
                                const AttentionOptions& options,
                                const AttentionOut& out) {
  if (planned_.what != For::kMask) return Untimely("no mask is planned");
  if (view.device != Device::kCpu) {
    return Invalid("view is on device {}, it must be in host memory",
                   static_cast<int>(view.device));
  }
  Status status = CheckEnum("v_layout", v_layout, 3);
  if (!status.ok()) return status;
  const std::int64_t columns = planned_.columns;
  const std::int64_t kv_heads = view.key.shape[1];
  status = CheckTiles(v_layout, columns);
  if (status.ok()) {
    status =
        CheckRows("key", view.key, {view.key.shape[0], kv_heads, columns, 1},
                  /*blocks_too=*/true);
  }
  const bool plain = v_layout == VLayout::kPlain;
  if (status.ok()) {
    status =
        CheckRows("value", view.value,
                  ValueShape(view.value, v_layout, kv_heads, columns), plain);
  }
  if (status.ok()) {
    status = CheckAttend(query, view.key.shape[0], kv_heads,
                         view.value.shape[plain ? 0 : 1], options, out);
  }
  if (!status.ok()) return status;
  const Planned planned = std::exchange(planned_, {});
  DoAttend(query, view, v_layout, options, out);
  planned_ = planned;
  return {};
}

Status GuardedAttention::Attend(const TensorView& query, const PagedKv& blocks,
                                PagedLayout layout,
                                const AttentionOptions& options,
                                const AttentionOut& out) {
  if (planned_.what != For::kTable) return Untimely("no table is planned");
  Status status = CheckEnum("layout", layout, 2);
  if (!status.ok()) return status;
  const bool head_major = layout == PagedLayout::kHeadMajor;
  const std::int64_t kv_heads = blocks.key.shape[head_major ? 2 : 1];
  const std::int64_t count = blocks.key.shape[3];
  for (const auto& [name, rows] :
       {std::pair("key", &blocks.key), {"value", &blocks.value}}) {
    Shape expected = {rows->shape[0], kv_heads, planned_.block_size, count};
    if (head_major) std::swap(expected[1], expected[2]);
    status = CheckRows(name, *rows, expected, /*blocks_too=*/true);
    if (!status.ok()) return status;
  }
  if (count <= planned_.last_block) {
    return Invalid("key has {} blocks, the table uses block {}", count,
                   planned_.last_block);
  }
  status = CheckAttend(query, blocks.key.shape[0], kv_heads,
                       blocks.value.shape[0], options, out);
  if (!status.ok()) return status;
  const Planned planned = std::exchange(planned_, {});
  DoAttend(query, blocks, layout, options, out);
  planned_ = planned;
  return {};
}

Status MergeAttention(std::span<const AttentionPart> parts, int v_head_dim,
                      std::int64_t count, const AttentionOut& out) {
  if (parts.empty()) return Invalid("parts: there are none");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].out == nullptr) return Invalid("parts[{}].out is null", i);
    if (parts[i].log_sum_exp != nullptr) continue;
    return Invalid("parts[{}].log_sum_exp is null", i);
  }
  Status status = AtLeastOne("v_head_dim", v_head_dim);
  if (status.ok()) status = AtLeastOne("count", count);
  if (!status.ok()) return status;
  std::int64_t bytes = count;
  if (__builtin_mul_overflow(bytes, v_head_dim, &bytes) ||
      __builtin_mul_overflow(bytes, std::int64_t{sizeof(float)}, &bytes)) {
    return Invalid("{} results of {} elements are too large", count,
                   v_head_dim);
  }
  if (out.out == nullptr) return Invalid("out is null");
  std::vector<double> weights(parts.size());
  for (std::int64_t at = 0; at < count; ++at) {
    MergeResult(parts, v_head_dim, at, weights, out);
  }
  return {};
}

}  // namespace kvtwin
