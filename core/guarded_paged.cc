#include "core/guarded_paged.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

#include "core/index.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

Status CheckTensor(std::string_view name, const TensorView& tensor,
                   DType stored, const Shape& expected) {
  if (tensor.data == nullptr) return Invalid("{} has no data", name);
  Status status = CheckRowsToStore(name, tensor, "pool", stored);
  if (!status.ok()) return status;
  if (tensor.shape[2] < 1) {
    return Invalid("{} has shape {}, it must have at least one token", name,
                   ShapeText(tensor.shape));
  }
  if (tensor.shape != expected) {
    return Invalid("{} has shape {}, it must be {}", name,
                   ShapeText(tensor.shape), ShapeText(expected));
  }
  return {};
}

// Returns the view as [head_dim, tokens, kv_heads].
TensorView Packed(TensorView view) {
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.stride[1], view.stride[2]);
  return view;
}

// Refuses media that are not in the order of their positions.
Status CheckMedia(std::span<const PrefixMedia> media) {
  int last = 0;
  for (const PrefixMedia& one : media) {
    Status status = NotNegative("a position of media", one.position);
    if (!status.ok()) return status;
    if (one.position < last) {
      return Invalid("media at {} come after media at {}", one.position, last);
    }
    last = one.position;
  }
  return {};
}

Status CheckGroups(const PagedSpec& spec) {
  std::int64_t whole = 1;
  std::int64_t layers = 0;
  std::int64_t blocks = 0;
  for (const PagedSpec& group : spec.groups) {
    if (!group.groups.empty()) return Invalid("groups: a group has groups");
    if (Status status = CheckPagedSpec(group); !status.ok()) return status;
    whole = std::lcm(whole, std::int64_t{group.block_size});
    layers += group.layers;
    blocks += group.blocks;
    for (const auto& [name, value] : {std::pair("block_size", whole),
                                      {"layers", layers},
                                      {"blocks", blocks}}) {
      if (value > std::numeric_limits<std::int32_t>::max()) {
        return Invalid("groups: {} of all is {}", name, value);
      }
    }
  }
  return AtLeastOne("max_seq_len", spec.max_seq_len);
}

}  // namespace

int GroupOf(const PagedSpec& spec, int& layer) {
  int group = 0;
  for (const PagedSpec& one : spec.groups) {
    if (layer < one.layers) break;
    layer -= one.layers;
    ++group;
  }
  return group;
}

Status NoSuchGroup(const PagedSpec& spec, int group) {
  return Invalid("group is {}, it must be 0 to {}", group,
                 std::max(1, Size(spec.groups)) - 1);
}

const PagedSpec& SpecOfLayer(const PagedSpec& spec, int layer) {
  return spec.groups.empty() ? spec : At(spec.groups, GroupOf(spec, layer));
}

PagedSpec Completed(PagedSpec spec) {
  if (spec.groups.empty()) return spec;
  spec.block_size = 1;
  spec.layers = 0;
  spec.blocks = 0;
  for (PagedSpec& group : spec.groups) {
    group.max_seq_len = spec.max_seq_len;
    spec.block_size = std::lcm(spec.block_size, group.block_size);
    spec.layers += group.layers;
    spec.blocks += group.blocks;
  }
  return spec;
}

Status CheckPagedSpec(const PagedSpec& spec) {
  if (!spec.groups.empty()) return CheckGroups(spec);
  if (spec.window) {
    Status status = AtLeastOne("window", *spec.window);
    if (!status.ok()) return status;
  }
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
  return Invalid("sequence {} does not exist", sequence);
}

Status GuardedPaged::CheckLayer(int layer) const {
  if (layer >= 0 && layer < spec_.layers) return {};
  return Invalid("layer is {}, it must be 0 to {}", layer, spec_.layers - 1);
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
  return unused_.empty() ? Size(sequences_) : unused_.begin()->first;
}

GuardedPaged::Length& GuardedPaged::Add(int sequence, int len) {
  sequences_.insert(unused_.extract(sequence));
  Length& added = sequences_[sequence];
  added.len = len;
  added.appended.assign(AsSize(spec_.layers), 0);
  return added;
}

// Prompts are long: compilers turn the inner loop into one instruction or two.
Status GuardedPaged::CheckTokens(std::span<const std::int32_t> tokens) {
  constexpr std::size_t kStep = 8;
  std::array<std::int32_t, kStep> signs = {};
  for (std::size_t i = 0; i + kStep <= tokens.size(); i += kStep) {
    for (std::size_t j = 0; j < kStep; ++j) signs[j] |= tokens[i + j];
  }
  std::int32_t sign = 0;
  for (const std::int32_t one : signs) sign |= one;
  const std::size_t checked = tokens.size() - tokens.size() % kStep;
  for (std::size_t i = sign < 0 ? 0 : checked; i < tokens.size(); ++i) {
    if (tokens[i] >= 0) continue;
    return NotNegative(fmt::format("token {}", i), tokens[i]);
  }
  return {};
}

Result<int> GuardedPaged::Find(std::span<const std::int32_t> prompt,
                               const PrefixKey& key) const {
  Status status = CheckPrompt(prompt, key);
  if (!status.ok()) return status;
  return DoFind(prompt, key);
}

Status GuardedPaged::CheckPrompt(std::span<const std::int32_t> prompt,
                                 const PrefixKey& key) {
  Status status = CheckTokens(prompt);
  return status.ok() ? CheckMedia(key.media) : status;
}

Result<int> GuardedPaged::Open(std::span<const std::int32_t> prompt,
                               const PrefixKey& key) {
  Status status = CheckPrompt(prompt, key);
  if (!status.ok()) return status;
  const int sequence = NextSequence();
  Add(sequence, DoOpen(sequence, prompt, key));
  return sequence;
}

Status GuardedPaged::AddMedia(int sequence, const PrefixMedia& media) {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  const int len = sequences_.at(sequence).len;
  if (media.position < len) {
    return Invalid("a position of media is {}, sequence {} has {} tokens",
                   media.position, sequence, len);
  }
  DoAddMedia(sequence, media);
  return {};
}

Result<int> GuardedPaged::ResumeBefore(int sequence, int len) const {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  const int all = sequences_.at(sequence).len;
  if (len < 0 || len > all) {
    return Invalid("len is {}, sequence {} has {} tokens", len, sequence, all);
  }
  return DoResumeBefore(sequence, all, len);
}

Result<int> GuardedPaged::Fork(int sequence, int len) {
  const Result<int> kept = ResumeBefore(sequence, len);
  if (!kept.ok()) return kept;
  const int added = NextSequence();
  DoFork(sequence, added, *kept);
  Add(added, *kept);
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
  if (tokens > spec_.max_seq_len - to.len) {
    return Status(StatusCode::kCacheFull,
                  fmt::format("{} tokens and {} more are above max_seq_len {}",
                              to.len, tokens, spec_.max_seq_len));
  }
  const int end = to.len + AsInt(tokens);
  if (!DoReserve(sequence, to.len, end)) {
    const PagedUsage usage = Usage();
    return Status(
        StatusCode::kCacheFull,
        fmt::format("there are not enough blocks for {} tokens more: {} are "
                    "free, {} could be evicted",
                    tokens, usage.free, usage.cached));
  }
  DoStore(sequence, layer, to.len, key, value);
  At(to.appended, layer) = AsInt(tokens);
  return PagedAppend{to.len, ViewsOf(sequence, layer, to.len, end)};
}

Status GuardedPaged::CheckCommit(int sequence, std::int64_t new_tokens) const {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  Status status = NotNegative("new_tokens", new_tokens);
  if (!status.ok()) return status;
  const auto& [len, appended] = sequences_.at(sequence);
  const auto least = std::min_element(appended.begin(), appended.end());
  if (new_tokens > *least) {
    return Untimely("new_tokens is {}, layer {} of sequence {} has {}",
                    new_tokens, least - appended.begin(), sequence, *least);
  }
  const std::int64_t end = len + new_tokens;
  if (!spec_.states || end % spec_.block_size == 0) return {};
  for (const int count : appended) {
    if (new_tokens == 0 || new_tokens == count) continue;
    return Untimely("sequence {} has no state at {}: it has the states at {}",
                    sequence, end, len + count);
  }
  return {};
}

Status GuardedPaged::Commit(int sequence, int new_tokens) {
  if (Status status = CheckCommit(sequence, new_tokens); !status.ok()) {
    return status;
  }
  const int before = sequences_.at(sequence).len;
  DoCommit(sequence, before, before + new_tokens, {});
  Add(sequence, before + new_tokens);
  return {};
}

Status GuardedPaged::Commit(int sequence,
                            std::span<const std::int32_t> tokens) {
  Status status = CheckCommit(sequence, std::ssize(tokens));
  if (status.ok()) status = CheckTokens(tokens);
  if (!status.ok()) return status;
  const int before = sequences_.at(sequence).len;
  const int len = before + Size(tokens);
  DoCommit(sequence, before, len, tokens);
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

PagedView GuardedPaged::RowsOf(int layer, int start, int length,
                               int block) const {
  const int size = RowsPerBlock();
  const int offset = spec_.states ? 0 : start % size;
  const PagedKv rows =
      DoRows(layer, std::int64_t{block} * size + offset, length);
  return {rows.key, rows.value, start, length, block};
}

// Returns the rows at positions begin .. end - 1, block by block.
std::vector<PagedView> GuardedPaged::ViewsOf(int sequence, int layer, int begin,
                                             int end) const {
  if (spec_.states) return StatesOf(sequence, layer, begin, end);
  const int size = spec_.block_size;
  std::vector<PagedView> views;
  const std::span<const int> blocks = DoBlocks(sequence);
  auto index = AsSize(begin / size);
  int start = begin;
  for (; start < end && index < blocks.size(); ++index) {
    const int length = std::min(size - start % size, end - start);
    if (blocks[index] != kNoBlock) {
      views.push_back(RowsOf(layer, start, length, blocks[index]));
    }
    start += length;
  }
  return views;
}

// Returns the states after the tokens at positions begin .. end - 1 (P13).
std::vector<PagedView> GuardedPaged::StatesOf(int sequence, int layer,
                                              int begin, int end) const {
  const int len = sequences_.at(sequence).len;
  std::vector<PagedView> views;
  if (DoBlocks(sequence).empty()) return views;  // A pool may hold nothing.
  const auto add = [&](int after, int block) {
    if (after <= begin || block == kNoBlock) return;
    views.push_back(RowsOf(layer, after - 1, 1, block));
  };
  // The end of a block, or `last` if that is before.
  const auto end_of = [&](std::int64_t block, int last) {
    return AsInt(std::min<std::int64_t>((block + 1) * spec_.block_size, last));
  };
  const CommittedBlocks committed = Committed(sequence);
  for (int i = 0; i < Size(committed); ++i) {
    add(end_of(i, len), committed[AsSize(i)]);
  }
  const std::span<const int> blocks = DoBlocks(sequence);
  for (int i = len / spec_.block_size; i < BlocksFor(end); ++i) {
    const int after = end_of(i, end);
    if (after > len) add(after, At(blocks, i));
  }
  return views;
}

GuardedPaged::CommittedBlocks GuardedPaged::Committed(int sequence) const {
  const int len = sequences_.at(sequence).len;
  return {DoBlocks(sequence).first(AsSize(BlocksFor(len))),
          DoReadBlock(sequence)};
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
  if (spec_.states || blocks[0] == kNoBlock) return std::optional<PagedKv>();
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
  const Result<int> kept = ResumeBefore(sequence, len);
  if (!kept.ok()) return kept.status();
  DoTruncate(sequence, sequences_.at(sequence).len, *kept);
  Add(sequence, *kept);
  return {};
}

Status GuardedPaged::Free(int sequence) {
  if (Status status = CheckSequence(sequence); !status.ok()) return status;
  DoFree(sequence);
  unused_.insert(sequences_.extract(sequence));
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
    Committed(sequence).AppendTo(csr.indices);
    csr.indptr.push_back(static_cast<std::int32_t>(csr.indices.size()));
    csr.last_page_len.push_back(len == 0 ? 0
                                         : (len - 1) % spec_.block_size + 1);
  }
  return csr;
}

// Returns the blocks of the committed tokens, and of the rows that were
// appended to `layer`, if it is given.
PagedTable GuardedPaged::TableOf(std::span<const int> sequences,
                                 std::optional<int> layer) const {
  const auto appended = [&](int sequence) {
    return layer ? At(sequences_.at(sequence).appended, *layer) : 0;
  };
  PagedTable table;
  for (const int sequence : sequences) {
    const int len = sequences_.at(sequence).len + appended(sequence);
    table.seq_lens.push_back(len);
    table.columns = std::max(table.columns, BlocksFor(len));
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    CommittedBlocks blocks = Committed(sequences[i]);
    if (appended(sequences[i]) > 0) {
      const auto count = AsSize(BlocksFor(table.seq_lens[i]));
      blocks = {DoBlocks(sequences[i]).first(count)};
    }
    blocks.AppendTo(table.blocks);
    table.blocks.resize((i + 1) * AsSize(table.columns), -1);
  }
  return table;
}

Result<PagedTable> GuardedPaged::ExportTable(
    std::span<const int> sequences) const {
  if (Status status = CheckSequences(sequences); !status.ok()) return status;
  return TableOf(sequences, std::nullopt);
}

Result<PagedTable> GuardedPaged::ExportLayerTable(
    std::span<const int> sequences, int layer) const {
  Status status = CheckSequences(sequences);
  if (status.ok()) status = CheckLayer(layer);
  if (!status.ok()) return status;
  return TableOf(sequences, layer);
}

Result<PagedKv> GuardedPaged::Blocks(int layer) const {
  if (Status status = CheckLayer(layer); !status.ok()) return status;
  PagedKv all = DoAllRows(layer);
  for (TensorView* rows : {&all.key, &all.value}) {
    Shape shape = {rows->shape[0], spec_.kv_heads, RowsPerBlock(),
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
  const CommittedBlocks committed = Committed(sequence);
  const std::span<const int> now = DoBlocks(sequence);
  const int size = RowsPerBlock();
  std::vector<std::int64_t> slots;
  for (int p = begin; p < end; ++p) {
    const auto index = AsSize(p / spec_.block_size);
    const int block = p < of.len ? committed[index] : now[index];
    const int after = p + 1;
    const bool has_row = !spec_.states || after % spec_.block_size == 0 ||
                         after == of.len || after == all;
    slots.push_back(block == kNoBlock || !has_row
                        ? kNoBlock
                        : std::int64_t{block} * size + p % size);
  }
  return slots;
}

Result<int> PagedPool::Find(std::span<const std::int32_t>,
                            const PrefixKey&) const {
  return Status(StatusCode::kNotSupported, "this pool has no Find");
}

Result<PagedTable> PagedPool::ExportLayerTable(std::span<const int>,
                                               int) const {
  return Status(StatusCode::kNotSupported, "this pool has no ExportLayerTable");
}

Status PagedPool::AddMedia(int, const PrefixMedia&) {
  return {StatusCode::kNotSupported, "this pool has no media"};
}

Result<int> PagedPool::ResumeBefore(int sequence, int len) const {
  const Result<int> all = SeqLen(sequence);
  if (!all.ok()) return all;
  if (len >= 0 && len <= *all) return len;
  return Invalid("len is {}, sequence {} has {} tokens", len, sequence, *all);
}

}  // namespace kvtwin
