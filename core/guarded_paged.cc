#include "core/guarded_paged.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/index.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

Status CheckTensor(std::string_view name, const TensorView& tensor,
                   DType stored, const Shape& expected) {
  if (tensor.data == nullptr) return Invalid("{} has no data", name);
  if (tensor.dtype != DType::kF32 && tensor.dtype != stored) {
    return Invalid("{} is {}, the pool takes f32 or {}", name,
                   DTypeName(tensor.dtype), DTypeName(stored));
  }
  if (tensor.shape[2] < 1 || tensor.shape != expected) {
    return Invalid("{} has shape {}, it must be {} and at least one token",
                   name, ShapeText(tensor.shape), ShapeText(expected));
  }
  return {};
}

// Returns the view as [head_dim, tokens, kv_heads].
TensorView Packed(TensorView view) {
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.stride[1], view.stride[2]);
  return view;
}

}  // namespace

Status CheckPagedSpec(const PagedSpec& spec) {
  for (const auto& [name, value] : {std::pair("block_size", spec.block_size),
                                    {"blocks", spec.blocks},
                                    {"max_seq_len", spec.max_seq_len},
                                    {"layers", spec.layers},
                                    {"kv_heads", spec.kv_heads},
                                    {"k_head_dim", spec.k_head_dim},
                                    {"v_head_dim", spec.v_head_dim}}) {
    if (Status status = AtLeastOne(name, value); !status.ok()) return status;
  }
  Status status = CheckEnum("layout", spec.layout, 2);
  if (status.ok()) status = CheckRowDType("dtype", spec.dtype);
  if (status.ok()) {
    status = CheckRowDType("v_dtype", spec.v_dtype.value_or(spec.dtype));
  }
  if (status.ok()) {
    status = CheckWholeBlocks("K", spec.k_head_dim, spec.dtype);
  }
  if (status.ok()) {
    status = CheckWholeBlocks("V", spec.v_head_dim,
                              spec.v_dtype.value_or(spec.dtype));
  }
  if (!status.ok()) return status;
  const std::int64_t tokens = std::int64_t{spec.blocks} * spec.block_size;
  for (const std::int64_t head_bytes :
       {RunBytes(spec.dtype, spec.k_head_dim),
        RunBytes(spec.v_dtype.value_or(spec.dtype), spec.v_head_dim)}) {
    std::int64_t bytes = head_bytes;
    if (__builtin_mul_overflow(bytes, tokens, &bytes) ||
        __builtin_mul_overflow(bytes, spec.kv_heads, &bytes)) {
      return Invalid(
          "a layer of {} tokens of {} heads of {} bytes is too large", tokens,
          spec.kv_heads, head_bytes);
    }
  }
  if (tokens > std::numeric_limits<std::int32_t>::max()) {
    return Invalid("{} blocks of {} tokens are too many", spec.blocks,
                   spec.block_size);
  }
  return {};
}

// Misuse is refused before anything changes (P11).
Status GuardedPaged::CheckSequence(int sequence) const {
  if (sequences_.contains(sequence)) return {};
  return Invalid("there is no sequence {}", sequence);
}

Status GuardedPaged::CheckLayer(int layer) const {
  if (layer >= 0 && layer < spec_.layers) return {};
  return Invalid("layer is {}, there are {}", layer, spec_.layers);
}

Status GuardedPaged::CheckRowsOf(int sequence, int layer) const {
  Status status = CheckSequence(sequence);
  return status.ok() ? CheckLayer(layer) : status;
}

Status GuardedPaged::CheckRows(const TensorView& key,
                               const TensorView& value) const {
  const std::int64_t tokens = key.shape[2];
  Status status = CheckTensor("key", key, k_dtype(),
                              {spec_.k_head_dim, spec_.kv_heads, tokens, 1});
  if (!status.ok()) return status;
  return CheckTensor("value", value, v_dtype(),
                     {spec_.v_head_dim, spec_.kv_heads, tokens, 1});
}

Status GuardedPaged::CheckSequences(std::span<const int> sequences) const {
  for (const int sequence : sequences) {
    if (Status status = CheckSequence(sequence); !status.ok()) return status;
  }
  return {};
}

int GuardedPaged::NextSequence() const {
  int lowest = 0;
  for (const auto& [sequence, state] : sequences_) {
    if (sequence != lowest) break;
    ++lowest;
  }
  return lowest;
}

GuardedPaged::Length& GuardedPaged::Add(int sequence, int len) {
  Length& added = sequences_[sequence];
  added.len = len;
  added.appended.assign(AsSize(spec_.layers), 0);
  return added;
}

Result<int> GuardedPaged::Open(std::span<const std::int32_t> prompt,
                               const PrefixKey& key) {
  for (const std::int32_t token : prompt) {
    if (Status status = NotNegative("a token", token); !status.ok()) {
      return status;
    }
  }
  const int sequence = NextSequence();
  Add(sequence, DoOpen(sequence, prompt, key));
  return sequence;
}

Result<int> GuardedPaged::Fork(int sequence, int len) {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  const int all = sequences_.at(sequence).len;
  if (len < 0 || len > all) {
    return Invalid("len is {}, sequence {} has {} tokens", len, sequence, all);
  }
  const int added = NextSequence();
  DoFork(sequence, added, len);
  Add(added, len);
  return added;
}

Result<int> GuardedPaged::SeqLen(int sequence) const {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  return sequences_.at(sequence).len;
}

Result<PagedAppend> GuardedPaged::Append(int sequence, int layer,
                                         const TensorView& key,
                                         const TensorView& value) {
  Status status = CheckRowsOf(sequence, layer);
  if (status.ok()) status = CheckRows(key, value);
  if (!status.ok()) return status;
  Length& to = sequences_.at(sequence);
  const std::int64_t tokens = key.shape[2];
  if (to.len + tokens > spec_.max_seq_len) {
    return Status(StatusCode::kCacheFull,
                  fmt::format("{} tokens and {} more are above max_seq_len {}",
                              to.len, tokens, spec_.max_seq_len));
  }
  const int end = to.len + AsInt(tokens);
  if (!DoReserve(sequence, to.len, end)) {
    return Status(
        StatusCode::kCacheFull,
        fmt::format("there are not enough blocks for {} tokens more", tokens));
  }
  DoStore(sequence, layer, to.len, key, value);
  At(to.appended, layer) = AsInt(tokens);
  return PagedAppend{to.len, ViewsOf(sequence, layer, to.len, end)};
}

Status GuardedPaged::CheckCommit(int sequence, std::int64_t new_tokens) const {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  Status status = NotNegative("new_tokens", new_tokens);
  if (!status.ok()) return status;
  const auto& appended = sequences_.at(sequence).appended;
  const int max = *std::min_element(appended.begin(), appended.end());
  if (new_tokens <= max) return {};
  return Untimely("new_tokens is {}, every layer of sequence {} has {}",
                  new_tokens, sequence, max);
}

Status GuardedPaged::Commit(int sequence, int new_tokens) {
  if (Status status = CheckCommit(sequence, new_tokens); !status.ok()) {
    return status;
  }
  const int len = sequences_.at(sequence).len + new_tokens;
  DoCommit(sequence, len, {});
  Add(sequence, len);
  return {};
}

Status GuardedPaged::Commit(int sequence,
                            std::span<const std::int32_t> tokens) {
  Status status = CheckCommit(sequence, std::ssize(tokens));
  if (!status.ok()) return status;
  for (const std::int32_t token : tokens) {
    status = NotNegative("a token", token);
    if (!status.ok()) return status;
  }
  const int len = sequences_.at(sequence).len + Size(tokens);
  DoCommit(sequence, len, tokens);
  Add(sequence, len);
  return {};
}

Result<std::vector<PagedView>> GuardedPaged::Views(int sequence,
                                                   int layer) const {
  Status status = CheckRowsOf(sequence, layer);
  if (!status.ok()) return status;
  const Length& of = sequences_.at(sequence);
  return ViewsOf(sequence, layer, 0, of.len + At(of.appended, layer));
}

// Returns the rows at positions begin .. end - 1, block by block.
std::vector<PagedView> GuardedPaged::ViewsOf(int sequence, int layer, int begin,
                                             int end) const {
  const int size = spec_.block_size;
  std::vector<PagedView> views;
  const std::span<const int> blocks = DoBlocks(sequence);
  auto index = AsSize(begin / size);
  int start = begin;
  for (; start < end && index < blocks.size(); ++index) {
    const int block = blocks[index];
    const int offset = start % size;
    const int length = std::min(size - offset, end - start);
    const PagedKv rows =
        DoRows(layer, std::int64_t{block} * size + offset, length);
    views.push_back({rows.key, rows.value, start, length, block});
    start += length;
  }
  return views;
}

Result<std::vector<PagedView>> GuardedPaged::ViewsPacked(int sequence,
                                                         int layer) const {
  Result<std::vector<PagedView>> views = Views(sequence, layer);
  if (!views.ok()) return views;
  if (spec_.layout != PagedLayout::kHeadMajor) {
    return Status(StatusCode::kNotSupported, "blocks are not head-major");
  }
  for (PagedView& view : *views) {
    view.key = Packed(view.key);
    view.value = Packed(view.value);
  }
  return views;
}

Result<std::optional<PagedKv>> GuardedPaged::ContiguousKV(int sequence,
                                                          int layer,
                                                          int kv_len) const {
  Status status = CheckRowsOf(sequence, layer);
  if (!status.ok()) return status;
  const Length& of = sequences_.at(sequence);
  const int end = of.len + At(of.appended, layer);
  if (kv_len < 1 || kv_len > end) {
    return Invalid("kv_len is {}, the layer has {} tokens", kv_len, end);
  }
  const auto blocks = DoBlocks(sequence).first(AsSize(BlocksFor(kv_len)));
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    const bool next = blocks[i] == blocks[i - 1] + 1;
    // With kHeadMajor, the rows of a head are contiguous in one block only.
    if (!next || spec_.layout == PagedLayout::kHeadMajor) {
      return std::optional<PagedKv>();
    }
  }
  return std::optional<PagedKv>(
      DoRows(layer, std::int64_t{blocks[0]} * spec_.block_size, kv_len));
}

Status GuardedPaged::Truncate(int sequence, int len) {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  const int all = sequences_.at(sequence).len;
  if (len < 0 || len > all) {
    return Invalid("len is {}, sequence {} has {} tokens", len, sequence, all);
  }
  DoTruncate(sequence, len);
  Add(sequence, len);
  return {};
}

Status GuardedPaged::Free(int sequence) {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  DoFree(sequence);
  sequences_.erase(sequence);
  return {};
}

Result<Device> GuardedPaged::LayerDevice(int layer) const {
  if (Status status = CheckLayer(layer); !status.ok()) return status;
  return DoDevice();
}

Result<PagedCsr> GuardedPaged::ExportCsr(std::span<const int> sequences) const {
  if (Status status = CheckSequences(sequences); !status.ok()) return status;
  PagedCsr csr;
  csr.indptr.push_back(0);
  for (const int sequence : sequences) {
    const int len = sequences_.at(sequence).len;
    const auto blocks = DoBlocks(sequence).first(AsSize(BlocksFor(len)));
    csr.indices.insert(csr.indices.end(), blocks.begin(), blocks.end());
    csr.indptr.push_back(static_cast<std::int32_t>(csr.indices.size()));
    csr.last_page_len.push_back(len == 0 ? 0
                                         : (len - 1) % spec_.block_size + 1);
  }
  return csr;
}

Result<PagedTable> GuardedPaged::ExportTable(
    std::span<const int> sequences) const {
  if (Status status = CheckSequences(sequences); !status.ok()) return status;
  PagedTable table;
  for (const int sequence : sequences) {
    const int len = sequences_.at(sequence).len;
    table.seq_lens.push_back(len);
    table.columns = std::max(table.columns, BlocksFor(len));
  }
  for (const int sequence : sequences) {
    const auto blocks = DoBlocks(sequence).first(
        AsSize(BlocksFor(sequences_.at(sequence).len)));
    table.blocks.insert(table.blocks.end(), blocks.begin(), blocks.end());
    table.blocks.resize(
        table.blocks.size() + AsSize(table.columns) - blocks.size(), -1);
  }
  return table;
}

Result<PagedKv> GuardedPaged::Blocks(int layer) const {
  if (Status status = CheckLayer(layer); !status.ok()) return status;
  PagedKv all = DoAllRows(layer);
  for (TensorView* rows : {&all.key, &all.value}) {
    Shape shape = {rows->shape[0], spec_.kv_heads, spec_.block_size,
                   spec_.blocks};
    if (spec_.layout == PagedLayout::kHeadMajor) std::swap(shape[1], shape[2]);
    *rows = DenseView(rows->data, rows->dtype, shape);
  }
  return all;
}

Result<std::vector<std::int64_t>> GuardedPaged::SlotMapping(int sequence,
                                                            int begin,
                                                            int end) const {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  const Length& of = sequences_.at(sequence);
  const int all =
      of.len + *std::max_element(of.appended.begin(), of.appended.end());
  if (begin < 0 || begin > end || end > all) {
    return Invalid("positions {} to {} are not within the {} of sequence {}",
                   begin, end, all, sequence);
  }
  const std::span<const int> blocks = DoBlocks(sequence);
  std::vector<std::int64_t> slots;
  for (int p = begin; p < end; ++p) {
    const int block = At(blocks, p / spec_.block_size);
    slots.push_back(std::int64_t{block} * spec_.block_size +
                    p % spec_.block_size);
  }
  return slots;
}

}  // namespace kvtwin
