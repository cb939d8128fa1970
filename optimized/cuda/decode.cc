// Decode attention as declared in <kvtwin/cuda.h>: checks the arguments.

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/guarded_attention.h"
#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/cuda.h"
#include "optimized/cache_memory.h"
#include "optimized/cuda/attention.h"
#include "optimized/cuda/gpu.h"

namespace kvtwin {
namespace {

using optimized::cuda::DecodeQuery;

template <class... Args>
Status NotSupported(fmt::format_string<Args...> format, Args&&... args) {
  return {StatusCode::kNotSupported,
          "Decode on CUDA does not have " +
              fmt::format(format, std::forward<Args>(args)...)};
}

// Refuses what the other twins have.
Status CheckSupported(const TensorView& query, const AttentionOptions& options,
                      const AttentionOut& out) {
  if (Status status = CheckDType("query", query.dtype); !status.ok()) {
    return status;
  }
  if (options.soft_cap != 0) return NotSupported("soft_cap");
  if (!options.sinks.empty()) return NotSupported("sinks");
  if (out.log_sum_exp != nullptr) return NotSupported("log_sum_exp");
  if (query.dtype != DType::kF32) {
    return NotSupported("a query of {}", DTypeName(query.dtype));
  }
  const TensorView dense = DenseView(query.data, DType::kF32, query.shape);
  for (std::size_t i = 0; i < dense.shape.size(); ++i) {
    if (query.shape[i] > 1 && query.stride[i] != dense.stride[i]) {
      return NotSupported("a query that is not dense");
    }
  }
  return {};
}

Status CheckSupported(const AttentionTable& table) {
  if (table.window != kOpenEnd) return NotSupported("a window of a table");
  if (table.sees_all) return NotSupported("sees_all of a table");
  if (!table.query_rows.empty()) {
    return NotSupported("query_rows: each sequence has one row");
  }
  return {};
}

Status CheckPointers(const TensorView& query, const PagedKv& rows,
                     const AttentionOut& out, const void* scratch) {
  for (const auto& [name, pointer] :
       {std::pair<std::string_view, const void*>("query", query.data),
        {"out", out.out},
        {"key", rows.key.data},
        {"value", rows.value.data},
        {"scratch", scratch}}) {
    if (pointer == nullptr) return Invalid("{} is null", name);
  }
  return {};
}

Status CheckQuery(const TensorView& query, const PagedKv& rows,
                  std::int64_t kv_heads, const AttentionOptions& options,
                  const AttentionOut& out, const void* scratch) {
  Status status = CheckSupported(query, options, out);
  if (status.ok()) status = CheckPointers(query, rows, out, scratch);
  if (status.ok()) status = AtLeastOne("kv_heads", kv_heads);
  if (status.ok()) status = AtLeastOne("heads", query.shape[1]);
  if (status.ok()) status = AtLeastOne("rows", query.shape[2]);
  if (status.ok()) status = CheckAttentionOptions(options, query.shape[1]);
  if (!status.ok()) return status;
  if (query.shape[0] != rows.key.shape[0] || query.shape[3] != 1) {
    return Invalid("query has shape {}, K has a head_dim of {}",
                   ShapeText(query.shape), rows.key.shape[0]);
  }
  if (query.shape[1] % kv_heads != 0) {
    return Invalid("heads is {}, not a multiple of the {} KV heads",
                   query.shape[1], kv_heads);
  }
  return {};
}

Status CheckTable(const TensorView& query, std::int64_t block_size,
                  const AttentionTable& table) {
  const std::int64_t rows = query.shape[2];
  if (Status status = CheckSupported(table); !status.ok()) return status;
  if (Status status = AtLeastOne("columns", table.columns); !status.ok()) {
    return status;
  }
  if (table.block_size != block_size) {
    return Invalid("block_size is {}, the blocks have {} tokens",
                   table.block_size, block_size);
  }
  if (std::ssize(table.lengths) != rows) {
    return Invalid("lengths has {} entries, the query has {} rows",
                   table.lengths.size(), rows);
  }
  if (std::ssize(table.blocks) != rows * table.columns) {
    return Invalid("blocks has {} entries, {} columns of {} sequences are {}",
                   table.blocks.size(), table.columns, rows,
                   rows * table.columns);
  }
  if (table.blocks.data() == nullptr) return Invalid("blocks is null");
  if (table.lengths.data() == nullptr) return Invalid("lengths is null");
  return {};
}

DecodeQuery QueryOf(const TensorView& query, const AttentionOptions& options,
                    const AttentionOut& out) {
  return {.query = static_cast<const float*>(query.data),
          .out = out.out,
          .heads = AsInt(query.shape[1]),
          .rows = AsInt(query.shape[2]),
          .scale = options.scale,
          .splits = options.splits};
}

Status Launched(cudaError_t error) {
  try {
    optimized::cuda::Check(error, "decode attention");
  } catch (const optimized::MemoryError& refused) {
    return refused.status();
  }
  return {};
}

}  // namespace

std::size_t DecodeScratchBytes(const Shape& query, int kv_heads, int v_head_dim,
                               std::int64_t cells, int splits) {
  const DecodeQuery of_shape = {.query = nullptr,
                                .out = nullptr,
                                .heads = AsInt(query[1]),
                                .rows = AsInt(query[2]),
                                .scale = 1,
                                .splits = splits};
  return optimized::cuda::DecodeScratchBytes(of_shape, kv_heads, v_head_dim,
                                             cells);
}

Status Decode(const TensorView& query, const KvView& view, VLayout v_layout,
              const AttentionOptions& options, const AttentionOut& out,
              void* scratch, CudaStream stream) {
  if (view.device != Device::kCuda) {
    return Invalid("the view is in the memory of the host");
  }
  Status status = CheckQuery(query, {view.key, view.value}, view.key.shape[1],
                             options, out, scratch);
  if (!status.ok()) return status;
  if (view.mask.data != nullptr && query.shape[2] > view.mask.shape[1]) {
    return Invalid("rows is {}, the mask has {}", query.shape[2],
                   view.mask.shape[1]);
  }
  return Launched(optimized::cuda::DecodeView(QueryOf(query, options, out),
                                              view, v_layout, scratch, stream));
}

Status Decode(const TensorView& query, const PagedKv& blocks,
              PagedLayout layout, const AttentionTable& table,
              const AttentionOptions& options, const AttentionOut& out,
              void* scratch, CudaStream stream) {
  const bool by_head = layout == PagedLayout::kHeadMajor;
  const std::int64_t kv_heads = blocks.key.shape[by_head ? 2 : 1];
  const std::int64_t block_size = blocks.key.shape[by_head ? 1 : 2];
  Status status = CheckQuery(query, blocks, kv_heads, options, out, scratch);
  if (status.ok()) status = CheckTable(query, block_size, table);
  if (!status.ok()) return status;
  return Launched(
      optimized::cuda::DecodePaged(QueryOf(query, options, out),
                                   {.key = blocks.key.at(0),
                                    .value = blocks.value.at(0),
                                    .k_dtype = blocks.key.dtype,
                                    .v_dtype = blocks.value.dtype,
                                    .k_head_dim = AsInt(blocks.key.shape[0]),
                                    .v_head_dim = AsInt(blocks.value.shape[0]),
                                    .kv_heads = AsInt(kv_heads),
                                    .block_size = table.block_size,
                                    .head_major = by_head,
                                    .table = table.blocks.data(),
                                    .most_blocks = table.columns,
                                    .lengths = table.lengths.data()},
                                   scratch, stream));
}

}  // namespace kvtwin
