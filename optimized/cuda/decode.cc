// Decode attention as declared in <kvtwin/cuda.h>: checks the arguments.

#include <fmt/format.h>

#include <string_view>

#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/cuda.h"
#include "optimized/cache_memory.h"
#include "optimized/cuda/attention.h"
#include "optimized/cuda/gpu.h"

namespace kvtwin {
namespace {

Status CheckQuery(const DecodeQuery& query, const PagedKv& rows,
                  std::int64_t kv_heads, const void* scratch) {
  for (const auto& [name, pointer] :
       {std::pair<std::string_view, const void*>("query", query.query),
        {"out", query.out},
        {"key", rows.key.data},
        {"value", rows.value.data},
        {"scratch", scratch}}) {
    if (pointer == nullptr) return Invalid("{} is null", name);
  }
  Status status = AtLeastOne("kv_heads", kv_heads);
  if (status.ok()) status = AtLeastOne("rows", query.rows);
  if (status.ok()) status = AtLeastOne("heads", query.heads);
  if (status.ok()) status = NotNegative("splits", query.splits);
  if (!status.ok()) return status;
  if (query.heads % kv_heads != 0) {
    return Invalid("heads is {}, not a multiple of the {} KV heads",
                   query.heads, kv_heads);
  }
  return {};
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

Status Decode(const DecodeQuery& query, const KvView& view, VLayout v_layout,
              void* scratch, CudaStream stream) {
  if (view.device != Device::kCuda) {
    return Invalid("the view is in the memory of the host");
  }
  Status status =
      CheckQuery(query, {view.key, view.value}, view.key.shape[1], scratch);
  if (!status.ok()) return status;
  if (view.mask.data != nullptr && query.rows > view.mask.shape[1]) {
    return Invalid("rows is {}, the mask has {}", query.rows,
                   view.mask.shape[1]);
  }
  return Launched(
      optimized::cuda::DecodeView(query, view, v_layout, scratch, stream));
}

Status Decode(const DecodeQuery& query, const PagedKv& blocks,
              PagedLayout layout, const DecodeTable& table, void* scratch,
              CudaStream stream) {
  const bool by_head = layout == PagedLayout::kHeadMajor;
  const auto kv_heads = AsInt(blocks.key.shape[by_head ? 2 : 1]);
  Status status = CheckQuery(query, blocks, kv_heads, scratch);
  if (status.ok()) status = AtLeastOne("most_blocks", table.most_blocks);
  if (!status.ok()) return status;
  if (table.blocks == nullptr) return Invalid("the table's blocks are null");
  if (table.lengths == nullptr) return Invalid("the table's lengths are null");
  return Launched(optimized::cuda::DecodePaged(
      query,
      {.key = blocks.key.at(0),
       .value = blocks.value.at(0),
       .k_dtype = blocks.key.dtype,
       .v_dtype = blocks.value.dtype,
       .k_head_dim = AsInt(blocks.key.shape[0]),
       .v_head_dim = AsInt(blocks.value.shape[0]),
       .kv_heads = kv_heads,
       .block_size = AsInt(blocks.key.shape[by_head ? 1 : 2]),
       .head_major = by_head,
       .table = table.blocks,
       .most_blocks = table.most_blocks,
       .lengths = table.lengths},
      scratch, stream));
}

}  // namespace kvtwin
