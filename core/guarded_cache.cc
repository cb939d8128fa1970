#include "core/guarded_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "core/dense_tensor.h"
#include "core/huge_pages.h"
#include "core/index.h"
#include "core/names.h"
#include "core/refusals.h"
#include "core/state_checks.h"

namespace kvtwin {
namespace {

Status CheckTensor(std::string_view name, const TensorView& tensor) {
  if (tensor.data == nullptr) return Invalid("{} has no data", name);
  // Strides may repeat elements, so that memory does not limit their number.
  return CheckShape(name, tensor.shape, tensor.dtype);
}

Status CheckIndices(std::string_view name, std::span<const int> indices,
                    int batch) {
  for (const int index : indices) {
    if (index < 0 || index >= batch) {
      return Invalid("{} index {} is outside of the batch of {} tokens", name,
                     index, batch);
    }
  }
  return {};
}

RowDims DimsOf(const TensorView& key, const TensorView& value) {
  return {AsInt(key.shape[0]), AsInt(key.shape[1]), AsInt(value.shape[0])};
}

// Copies the rows of the held cells out of the rows of all cells.
void SaveRows(const TensorView& all, const std::vector<CellEntry>& entries,
              VLayout layout, DenseTensor& out) {
  const TensorView row = RowOf(all, layout, 0);
  out.dtype = all.dtype;
  out.shape = row.shape;
  out.shape[2] = CountHeld(entries);
  const std::size_t bytes = DenseBytes(out.dtype, out.shape);
  ReserveHugePages(bytes, out.bytes);
  out.bytes.resize(bytes);
  std::byte* to = out.bytes.data();
  const auto row_bytes = DenseBytes(row.dtype, row.shape);
  // Dense rows are copied fast: the explorer takes a snapshot after each
  // operation.
  const Shape expected = DenseView(nullptr, row.dtype, row.shape).stride;
  const bool dense =
      std::equal(expected.begin(), expected.begin() + 2, row.stride.begin());
  ForEachHeld(entries, [&](int cell) {
    const TensorView held = RowOf(all, layout, cell);
    if (dense) {
      std::memcpy(to, held.data, row_bytes);
      to += row_bytes;
    } else {
      to = WriteDense(held, all.dtype, to);
    }
  });
}

// Marks the cache as busy while the caller's shift function may run.
class Busy {
 public:
  explicit Busy(bool& busy) : busy_(busy) { busy_ = true; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { busy_ = false; }

 private:
  bool& busy_;
};

// Returns the lowest free cells, at least `count` of them.
std::vector<int> FreeCells(const std::vector<CellEntry>& entries,
                           std::size_t count) {
  std::vector<int> free;
  int next = 0;
  const auto add = [&](int end) {
    for (; next < end && free.size() < count; ++next) free.push_back(next);
    next = end + 1;
  };
  ForEachHeld(entries, add);
  add(kOpenEnd - 1);
  return free;
}

// "8", "8 and 9", "8 to 10".
std::string RangeText(std::int64_t first, std::int64_t last) {
  if (first == last) return fmt::format("{}", first);
  return fmt::format("{} {} {}", first, first + 1 == last ? "and" : "to", last);
}

}  // namespace

// Refuses calls before Init and after Close (S1).
Status GuardedCache::CheckReady() const {
  if (life_ == Life::kNew) return Untimely("the cache is used before Init");
  if (life_ == Life::kClosed) return Untimely("the cache is used after Close");
  if (*busy_) return Untimely("the cache is called by its own shift function");
  return {};
}

Status GuardedCache::CheckPass() const {
  if (Status status = CheckReady(); !status.ok()) return status;
  if (!active_) return Untimely("no pass has begun: call StartForward");
  return {};
}

Status GuardedCache::CheckConfig(const CacheConfig& config) const {
  if (life_ == Life::kClosed) return CheckReady();
  if (configured_) return Untimely("SetConfig is called a second time");
  if (life_ == Life::kReady) return Untimely("SetConfig is called after Init");
  Status status = AtLeastOne("cache_padding", config.cache_padding);
  if (status.ok()) {
    status = AtLeastOne("mask_batch_padding", config.mask_batch_padding);
  }
  if (status.ok()) {
    status = CheckEnum("v_layout", config.v_layout, kVLayouts.size());
  }
  if (status.ok()) status = CheckDType("mask_dtype", config.mask_dtype);
  if (status.ok() && config.v_layout == VLayout::kTiled &&
      config.cache_padding % kTileCells != 0) {
    return Invalid("cache_padding is {}, tiled V needs a multiple of {}",
                   config.cache_padding, kTileCells);
  }
  if (status.ok() && !IsMaskDType(config.mask_dtype)) {
    return Invalid("mask_dtype is {}, masks are f32, f16, bf16 or bits",
                   DTypeName(config.mask_dtype));
  }
  if (!status.ok() || !config.v_dtype) return status;
  return CheckRowDType("v_dtype", *config.v_dtype);
}

Status GuardedCache::SetConfig(const CacheConfig& config) {
  if (Status status = CheckConfig(config); !status.ok()) return status;
  config_ = config;
  configured_ = true;
  return {};
}

Status GuardedCache::CheckInit(const InitArgs& args) {
  if (life_ == Life::kClosed) return CheckReady();
  if (life_ == Life::kReady) return Untimely("Init is called a second time");
  Status status = CheckRowDType("dtype", args.dtype);
  if (status.ok()) status = AtLeastOne("max_sequences", args.max_sequences);
  if (status.ok()) status = AtLeastOne("capacity", args.capacity);
  if (status.ok()) status = AtLeastOne("max_batch", args.max_batch);
  if (!status.ok()) return status;
  const DType v_dtype = config_.v_dtype.value_or(args.dtype);
  if (config_.v_layout != VLayout::kPlain && IsBlockDType(v_dtype)) {
    return Invalid("{} V is {}, whose blocks would be of {} tokens",
                   VLayoutName(config_.v_layout), DTypeName(v_dtype),
                   kBlockElements);
  }
  const Result<std::int64_t> cells = DoCheckInit(args);
  if (!cells.ok()) return cells.status();
  constexpr int kMax = std::numeric_limits<int>::max();
  if (*cells > kMax) {
    return Invalid("the cache would have {} cells, there can be {}", *cells,
                   kMax);
  }
  cells_ = *cells;
  return {};
}

int GuardedCache::CellCount() const {
  return life_ == Life::kReady ? AsInt(cells_) : 0;
}

Status GuardedCache::Init(const InitArgs& args) {
  if (Status status = CheckInit(args); !status.ok()) return status;
  init_ = args;
  life_ = Life::kReady;
  DoInit();
  return {};
}

void GuardedCache::Close() {
  if (life_ == Life::kClosed || *busy_) return;
  life_ = Life::kClosed;
  EndPass();
  rows_.clear();
  DropAllDrafts();
  DoClose();
}

Status GuardedCache::SetLayer(int layer) {
  if (Status status = CheckReady(); !status.ok()) return status;
  if (Status status = NotNegative("layer", layer); !status.ok()) return status;
  layer_ = layer;
  return {};
}

Status GuardedCache::CheckBatch(const Batch& batch, bool reserve) const {
  if (Status status = CheckReady(); !status.ok()) return status;
  const std::size_t tokens = batch.positions.size();
  if (tokens == 0) return Invalid("the batch is empty");
  if (batch.sequences.size() != tokens) {
    return Invalid("the batch has {} positions and {} sequences", tokens,
                   batch.sequences.size());
  }
  if (tokens > AsSize(init_.max_batch)) {
    return Invalid("the batch has {} tokens, max_batch is {}", tokens,
                   init_.max_batch);
  }
  for (std::size_t i = 0; i < tokens; ++i) {
    if (batch.positions[i] >= 0) continue;
    return NotNegative(fmt::format("the position of token {}", i),
                       batch.positions[i]);
  }
  for (std::size_t i = 0; i < tokens; ++i) {
    if (batch.sequences[i] >= 0) continue;
    return NotNegative(fmt::format("the sequence of token {}", i),
                       batch.sequences[i]);
  }
  Status status = CheckIndices("multimodal", batch.multimodal, AsInt(tokens));
  if (status.ok()) status = CheckDrafts(batch);
  return status.ok() && !reserve ? DoCheckBatch(batch) : status;
}

// Most batches have no drafts, and neither have their sequences (D2, D4).
Status GuardedCache::CheckDrafts(const Batch& batch) const {
  if (batch.parents.empty() && drafts_.empty()) return {};
  return drafts_.CheckBatch(batch, [this](int seq) {
    return TakesDrafts() ? DoLastPosition(seq) : -1;
  });
}

Status GuardedCache::CheckTakesDrafts() const {
  if (TakesDrafts()) return {};
  return {StatusCode::kNotSupported, "this cache has no drafts"};
}

Status GuardedCache::StartForward(const Batch& batch, bool reserve) {
  Status status = CheckBatch(batch, reserve);
  if (!status.ok()) return status;
  EndPass();
  if (HasDrafts(batch)) status = CheckTakesDrafts();
  return status.ok() ? StartChecked(batch, reserve) : status;
}

Status GuardedCache::StartChecked(const Batch& batch, bool reserve) {
  reserving_ = reserve;
  batch_.clear();
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    batch_.push_back({batch.positions[i], batch.sequences[i], false});
  }
  batch_cells_.clear();
  if (HasDrafts(batch) && !reserve) drafts_.Add(batch, batch_);
  Status status = DoStartForward(batch, reserve);
  active_ = status.ok();
  if (!active_) drafts_.TakeBack(batch_);
  return status;
}

std::span<const int> GuardedCache::BatchCells() const {
  if (!active_) return {};
  return batch_cells_;
}

void GuardedCache::GiveBack() {
  if (active_ && !reserving_) {
    DoGiveBack();
    drafts_.TakeBack(batch_);
  }
  EndPass();
}

Status GuardedCache::SetCausal(std::span<const int> except) {
  if (Status status = CheckPass(); !status.ok()) return status;
  if (IsEncoder()) {
    return {StatusCode::kNotSupported, "an encoder cache has no mask"};
  }
  if (IsRecurrent()) {
    return {StatusCode::kNotSupported, "a state has no later positions"};
  }
  Status status = CheckIndices("except", except, Size(batch_));
  if (!status.ok()) return status;
  for (BatchToken& token : batch_) token.excepted = false;
  for (const int i : except) {
    At(batch_, i).excepted = true;
  }
  DoBuildMask();
  return {};
}

Status GuardedCache::CheckDTypes(const TensorView& key,
                                 const TensorView& value) const {
  Status status = CheckRowsToStore("key", key, "cache", k_dtype());
  if (!status.ok()) return status;
  return CheckRowsToStore("value", value, "cache", v_dtype());
}

Status GuardedCache::CheckRows(const TensorView& key,
                               const TensorView& value) const {
  for (const auto& [name, tensor, stored] :
       {std::tuple("key", &key, k_dtype()),
        std::tuple("value", &value, v_dtype())}) {
    if (tensor->shape[2] != std::ssize(batch_) || tensor->shape[3] != 1) {
      return Invalid("{} has shape {}, the batch has {} tokens", name,
                     ShapeText(tensor->shape), batch_.size());
    }
    Status status = CheckWholeBlocks(name, tensor->shape[0], stored);
    if (!status.ok()) return status;
  }
  if (key.shape[1] != value.shape[1]) {
    return Invalid("key has {} kv_heads, value has {}", key.shape[1],
                   value.shape[1]);
  }
  return CheckDims(layer_, DimsOf(key, value));
}

// Returns an error unless `dims` are those of the layer's first Put.
Status GuardedCache::CheckDims(int layer, const RowDims& dims) const {
  const auto known = rows_.find(layer);
  if (known != rows_.end() && known->second != dims) {
    return Invalid(
        "layer {} holds K [{}, {}] and V [{}, {}], not [{}, {}] "
        "and [{}, {}]",
        layer, known->second.k_head_dim, known->second.kv_heads,
        known->second.v_head_dim, known->second.kv_heads, dims.k_head_dim,
        dims.kv_heads, dims.v_head_dim, dims.kv_heads);
  }
  return {};
}

Status GuardedCache::CheckEncoderRows(const TensorView& value) const {
  if (config_.v_layout == VLayout::kPermuted && value.shape[3] != 1) {
    return Invalid("value has shape {}, permuted V takes three dimensions",
                   ShapeText(value.shape));
  }
  return {};
}

Status GuardedCache::Put(const TensorView& key, const TensorView& value) {
  Status status = CheckPass();
  if (status.ok()) status = CheckTensor("key", key);
  if (status.ok()) status = CheckTensor("value", value);
  if (status.ok()) status = CheckDTypes(key, value);
  if (status.ok()) {
    status = IsEncoder() ? CheckEncoderRows(value) : CheckRows(key, value);
  }
  if (!status.ok()) return status;
  DoPut(key, value);
  // Only after DoPut, which may throw for lack of memory for a new layer.
  rows_.try_emplace(layer_, DimsOf(key, value));
  return {};
}

void GuardedCache::DoPut(const TensorView& key, const TensorView& value) {
  DoStoreRows(layer_, reserving_ ? std::span<const int>() : batch_cells_, key,
              value);
}

Result<KvView> GuardedCache::Get() {
  if (Status status = CheckPass(); !status.ok()) return status;
  if (rows_.contains(layer_)) return DoGet();
  return Untimely("nothing was ever put into layer {}", layer_);
}

Status GuardedCache::CheckCopyPrefix(int src, int dst, std::int32_t len) const {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("src", src);
  if (status.ok()) status = NotNegative("dst", dst);
  if (status.ok()) status = NotNegative("len", len);
  if (status.ok() && IsEncoder()) {
    return {StatusCode::kNotSupported,
            "an encoder cache holds one sequence, which cannot be copied"};
  }
  return status;
}

// The pass and its view stay as they are (S25).
Status GuardedCache::CopyPrefix(int src, int dst, std::int32_t len) {
  Status status = CheckCopyPrefix(src, dst, len);
  if (!status.ok()) return status;
  KeepDrafts(dst, {});
  DoCopyPrefix(src, dst, len);
  return status;
}

Result<bool> GuardedCache::CanResume(int seq, std::int32_t pos) {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("seq", seq);
  if (status.ok()) status = NotNegative("pos", pos);
  if (!status.ok()) return status;
  return DoCanResume(seq, pos);
}

std::int32_t GuardedCache::DoResumeBefore(int seq, std::int32_t pos) const {
  std::vector<CellEntry> entries;
  ListCommitted(entries);
  std::int32_t end = 0;
  for (const CellEntry& entry : entries) {
    const bool before = entry.sequence == seq && entry.position < pos;
    if (before) end = std::max(end, entry.position + 1);
  }
  return DoCanResume(seq, end) ? end : 0;
}

Result<std::int32_t> GuardedCache::ResumeBefore(int seq, std::int32_t pos) {
  const Result<bool> can = CanResume(seq, pos);
  if (!can.ok()) return can.status();
  return *can ? pos : DoResumeBefore(seq, pos);
}

// "no state at 12; the latest before it is at 8".
std::string GuardedCache::WhyNoState(int seq, std::int32_t pos) const {
  const std::int32_t latest = DoResumeBefore(seq, pos);
  if (latest == 0) return fmt::format("no state at or before {}", pos);
  return fmt::format("no state at {}; the latest before it is at {}", pos,
                     latest);
}

// Looks at all cells: it is for people.
Result<std::string> GuardedCache::WhyNotResume(int seq, std::int32_t pos) {
  const Result<bool> can = CanResume(seq, pos);
  if (!can.ok()) return can.status();
  if (*can) return std::string();
  if (IsRecurrent()) return WhyNoState(seq, pos);
  std::vector<CellEntry> entries;
  ListCommitted(entries);
  std::erase_if(entries, [&](const auto& at) { return at.sequence != seq; });
  if (entries.empty()) return fmt::format("sequence {} holds nothing", seq);
  const auto [first, last] =
      std::ranges::minmax(entries, {}, &CellEntry::position);
  const std::int64_t needed = std::max<std::int64_t>(0, pos - DoWindow());
  if (pos - 1 > last.position) {
    return fmt::format(
        "position {} needs {}; sequence {} ends at {}", pos,
        RangeText(std::min<std::int64_t>(needed, pos - 1), pos - 1), seq,
        last.position);
  }
  if (needed == pos) {
    return fmt::format("the positions before {} were evicted", first.position);
  }
  const std::int64_t missing = std::min(first.position, pos) - 1;
  return fmt::format("position {} needs {}; {} {} evicted", pos,
                     RangeText(needed, pos - 1), RangeText(needed, missing),
                     needed == missing ? "was" : "were");
}

// Refusals come before any change: not_supported, shared_cells (S48).
Status GuardedCache::PrepareRemove(int seq, std::int32_t begin,
                                   std::int32_t end) {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("seq", seq);
  if (status.ok()) status = NotNegative("begin", begin);
  if (!status.ok()) return status;
  if (begin > end) return Invalid("begin is {}, end is {}", begin, end);
  const Busy busy(*busy_);
  return DoPrepareRemove(seq, begin, end);
}

Status GuardedCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  Status status = PrepareRemove(seq, begin, end);
  if (status.ok()) CommitRemove(seq, begin, end);
  return status;
}

void GuardedCache::CommitRemove(int seq, std::int32_t begin, std::int32_t end) {
  KeepDrafts(seq, {});
  DoCommitRemove(seq, begin, end);
}

Status GuardedCache::CheckCommit(int seq, std::span<const int> path) const {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("seq", seq);
  if (status.ok()) status = CheckTakesDrafts();
  if (status.ok()) status = drafts_.CheckPath(seq, path);
  return status;
}

// The pass and its view stay as they are (S25, D5).
Status GuardedCache::Commit(int seq, std::span<const int> path) {
  Status status = CheckCommit(seq, path);
  if (status.ok()) KeepDrafts(seq, path);
  return status;
}

Status GuardedCache::Checkpoint(int seq) {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("seq", seq);
  if (!status.ok()) return status;
  if (!HasPins()) {
    return {StatusCode::kNotSupported, "this cache pins no states"};
  }
  DoCheckpoint(seq);
  return {};
}

void GuardedCache::KeepDrafts(int seq, std::span<const int> path) {
  if (!drafts_.Has(seq)) return;
  DoCommit(seq, path);
  drafts_.Drop(seq);
}

void GuardedCache::DropAllDrafts() {
  while (!drafts_.empty()) KeepDrafts(drafts_.AnySequence(), {});
}

// Lists the cells that are not of drafts (D7).
void GuardedCache::ListCommitted(std::vector<CellEntry>& out) const {
  ListCells(out);
  if (drafts_.empty()) return;
  std::erase_if(out, [&](const CellEntry& entry) {
    return drafts_.IsDraft(entry.sequence, entry.position);
  });
}

// Only a wrapper has layer types (S46).
Status GuardedCache::SetLayerType(int type) {
  if (Status status = CheckReady(); !status.ok()) return status;
  return {StatusCode::kNotSupported,
          fmt::format("layer type {}: this cache is not a wrapper", type)};
}

Result<bool> GuardedCache::EncoderCached() {
  if (Status status = CheckReady(); !status.ok()) return status;
  if (!IsEncoder()) {
    return Status(StatusCode::kNotSupported, "this is not an encoder cache");
  }
  return DoEncoderCached();
}

Status GuardedCache::SnapshotTo(CacheState& state) const {
  if (Status status = CheckReady(); !status.ok()) return status;
  state.caches.clear();
  if (IsEncoder()) {
    state.cells.clear();
    DoSaveSlots(state);
    return {};
  }
  state.cached = false;
  state.position = state.next_position = 0;
  ListCommitted(state.cells);
  std::erase_if(state.layers, [&](const auto& layer) {
    return !rows_.contains(layer.first);
  });
  SaveLayers(state);
  return {};
}

// Saves the rows of the state's cells.
void GuardedCache::SaveLayers(CacheState& state) const {
  for (const auto& [layer, dims] : rows_) {
    const KvView all = DoAllRows(layer);
    KvRows& rows = state.layers[layer];
    SaveRows(all.key, state.cells, VLayout::kPlain, rows.key);
    SaveRows(all.value, state.cells, config_.v_layout, rows.value);
  }
}

Result<CacheState> GuardedCache::SnapshotOf(int sequence) const {
  Status status = CheckReady();
  if (status.ok()) status = NotNegative("sequence", sequence);
  if (!status.ok()) return status;
  CacheState state;
  ListCommitted(state.cells);
  std::erase_if(state.cells, [&](const CellEntry& entry) {
    return entry.sequence != sequence;
  });
  if (!state.cells.empty()) SaveLayers(state);
  return state;
}

Status GuardedCache::CheckLayer(int layer, const KvRows& rows,
                                std::int64_t held) const {
  const auto& [key, value] = rows;
  Status status = CheckTensors(layer, rows);
  if (!status.ok()) return status;
  if (IsEncoder()) {
    status = CheckDTypes(key.view(), value.view());
    if (!status.ok() ||
        (key.view().elements() > 0 && value.view().elements() > 0 &&
         (config_.v_layout != VLayout::kPermuted || value.shape[3] == 1))) {
      return status;
    }
  } else if (key.dtype == k_dtype() && value.dtype == v_dtype() &&
             AreRowsOf(rows, held)) {
    return {};
  }
  return Invalid(
      "layer {} of the state has K {} of {} and V {} of {}, which "
      "do not fit {} cells of {} and {}",
      layer, ShapeText(key.shape), DTypeName(key.dtype), ShapeText(value.shape),
      DTypeName(value.dtype), held, DTypeName(k_dtype()), DTypeName(v_dtype()));
}

Status GuardedCache::CheckRestore(const CacheState& state) const {
  if (Status status = CheckReady(); !status.ok()) return status;
  if (!state.caches.empty()) {
    return Invalid("the state is of a wrapper of {} caches",
                   state.caches.size());
  }
  Status status = CheckSlots(state);
  if (status.ok()) status = CheckCells(state, CellCount());
  if (status.ok() && IsRecurrent()) status = CheckStates(state.cells);
  if (!status.ok()) return status;
  if (HasSlots(state) && !IsEncoder()) {
    return Invalid("the state is of an encoder");
  }
  const std::int64_t held = CountHeld(state.cells);
  for (const auto& [layer, rows] : state.layers) {
    status = CheckLayer(layer, rows, held);
    if (!status.ok()) return status;
  }
  return {};
}

Status GuardedCache::Restore(const CacheState& state) {
  if (Status status = CheckRestore(state); !status.ok()) return status;
  EndPass();
  layer_ = 0;
  rows_.clear();
  DropAllDrafts();
  DoInit();
  DoLoadSlots(state);
  for (const CellEntry& entry : state.cells) DoAddEntry(entry);
  batch_cells_.clear();
  ForEachHeld(state.cells, [&](int cell) { batch_cells_.push_back(cell); });
  for (const auto& [layer, rows] : state.layers) {
    const auto& [key, value] = rows;
    rows_.emplace(layer, DimsOf(key.view(), value.view()));
    DoStoreRows(layer, batch_cells_, key.view(), value.view());
  }
  return {};
}

Status GuardedCache::CheckAddSequence(int sequence,
                                      const CacheState& added) const {
  Status status = CheckReady();
  if (status.ok()) status = CheckAdded(sequence, added);
  if (status.ok() && IsRecurrent()) status = CheckStates(added.cells);
  if (!status.ok()) return status;
  if (!added.caches.empty()) {
    return Invalid("the sequence is of a wrapper of {} caches",
                   added.caches.size());
  }
  std::vector<CellEntry> entries;
  ListCommitted(entries);
  for (const CellEntry& entry : entries) {
    if (entry.sequence != sequence) continue;
    return Invalid("the cache has a sequence {} already", sequence);
  }
  if (added.cells.empty()) return {};
  const std::int64_t tokens = std::ssize(added.cells);
  status = CheckRoom(CountHeld(entries), CellCount(), tokens);
  if (!status.ok()) return status;
  for (const auto& [layer, rows] : added.layers) {
    status = CheckLayer(layer, rows, tokens);
    if (status.ok()) {
      status = CheckDims(layer, DimsOf(rows.key.view(), rows.value.view()));
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status GuardedCache::AddSequence(int sequence, const CacheState& added) {
  Status status = CheckAddSequence(sequence, added);
  if (!status.ok()) return status;
  EndPass();
  layer_ = 0;
  DropAllDrafts();
  std::vector<CellEntry> entries;
  ListCells(entries);
  const std::vector<int> cells = FreeCells(entries, added.cells.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    DoAddEntry({cells[i], added.cells[i].position, sequence});
  }
  if (cells.empty()) return {};
  const std::int64_t tokens = std::ssize(cells);
  for (const auto& [layer, rows] : added.layers) {
    rows_.emplace(layer, DimsOf(rows.key.view(), rows.value.view()));
    DoStoreRows(layer, cells, rows.key.view(), rows.value.view());
  }
  // In layers without rows in `added`, the cells get zeros: free cells may
  // still have the rows of their last tokens.
  for (const auto& [layer, dims] : rows_) {
    if (added.layers.contains(layer)) continue;
    const DenseTensor key =
        FilledTensor(k_dtype(), {dims.k_head_dim, dims.kv_heads, tokens, 1}, 0);
    const DenseTensor value =
        FilledTensor(v_dtype(), {dims.v_head_dim, dims.kv_heads, tokens, 1}, 0);
    DoStoreRows(layer, cells, key.view(), value.view());
  }
  return {};
}

}  // namespace kvtwin
