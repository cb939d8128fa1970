// The reference twin of the causal family: cells, ranges and masks in the most
// obvious way, to be checked by eye against docs/semantics.md.

#include "reference/causal.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/row_store.h"

namespace kvtwin::reference {
namespace {

constexpr std::int64_t kUnbounded = kOpenEnd;

struct Cell {
  std::int32_t position = 0;
  std::set<int> sequences;  // Empty: the cell is free.

  bool IsFree() const { return sequences.empty(); }
  bool Holds(int seq) const { return sequences.contains(seq); }
};

struct Layer {
  RowStore keys;
  RowStore values;
};

struct BatchToken {
  std::int32_t position;
  int sequence;
  bool excepted;
};

class CausalCache final : public GuardedCache {
 public:
  explicit CausalCache(const CacheSpec& spec) : spec_(spec) {}

  int CellCount() const override { return static_cast<int>(cells_.size()); }

  std::span<const int> BatchCells() const override {
    return pass().active ? std::span(batch_cells_) : std::span<const int>();
  }

  void ListCells(std::vector<CellEntry>& out) const override {
    out.clear();
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      for (const int seq : cells_[i].sequences) {
        out.push_back({static_cast<int>(i), cells_[i].position, seq});
      }
    }
  }

 private:
  // S2 to S4.
  struct Bounds {
    std::optional<std::int64_t> window;  // Absent: unbounded.
    std::optional<std::int64_t> memory;
    std::int64_t cells = 0;
  };

  Bounds BoundsFor(const InitArgs& args) const {
    std::int64_t window = kUnbounded;
    std::int64_t memory = kUnbounded;
    if (spec_.kind == Kind::kSwa || spec_.kind == Kind::kSwaMem) {
      window = memory = spec_.window.value_or(kUnbounded);
    }
    if (spec_.kind == Kind::kSwaMem) memory = spec_.memory.value_or(memory);
    // Room for the stop token, which the next request will not have.
    if (memory != kUnbounded && args.max_sequences > 1) {
      memory = std::max(memory, window + 1);
    }
    Bounds bounds;
    if (window != kUnbounded) bounds.window = window;
    if (memory < args.capacity) bounds.memory = memory;
    const std::int64_t each = bounds.memory.value_or(args.capacity);
    const int more = bounds.memory ? args.max_batch : 0;
    bounds.cells =
        RoundUp(args.max_sequences * each + more, config().cache_padding);
    return bounds;
  }

  static std::int64_t RoundUp(std::int64_t length, std::int64_t padding) {
    return (length + padding - 1) / padding * padding;
  }

  Status DoCheckInit(const InitArgs& args) const override {
    const auto [window, memory, cells] = BoundsFor(args);
    if (memory && *memory < window.value_or(kUnbounded)) {
      return {StatusCode::kInvalidArgument,
              fmt::format("memory is {}, less than the window", *memory)};
    }
    if (cells <= kUnbounded) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("max_sequences {} of capacity {} need {} cells, more "
                        "than can be counted",
                        args.max_sequences, args.capacity, cells)};
  }

  void DoInit(const InitArgs& args) override {
    bounds_ = BoundsFor(args);
    cells_.resize(static_cast<std::size_t>(bounds_.cells));
  }

  void DoClose() override {
    cells_.clear();
    layers_.clear();
  }

  Cell& CellAt(int i) { return cells_[static_cast<std::size_t>(i)]; }

  Status DoStartForward(const Batch& batch, bool reserve) override {
    batch_.clear();
    batch_cells_.clear();
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      batch_.push_back({batch.positions[i], batch.sequences[i], false});
      if (reserve) batch_cells_.push_back(static_cast<int>(i));
    }
    view_first_ = 0;
    view_cells_ = CellCount();
    if (!reserve) {
      if (bounds_.memory) Evict();
      batch_cells_ = FindCells();
      if (batch_cells_.empty() && spec_.placement == Placement::kContiguous) {
        Defrag();
        batch_cells_ = FindCells();
      }
      if (batch_cells_.empty()) return Full();
      for (std::size_t i = 0; i < batch_.size(); ++i) {
        CellAt(batch_cells_[i]) = {batch_[i].position, {batch_[i].sequence}};
      }
      SetView();
    }
    BuildMask();
    return {};
  }

  Status Full() const {
    const auto free = std::count_if(cells_.begin(), cells_.end(),
                                    [](auto& cell) { return cell.IsFree(); });
    return {StatusCode::kCacheFull,
            fmt::format("{} of {} cells are free, the batch has {} tokens",
                        free, cells_.size(), batch_.size())};
  }

  // The lowest position that `seq` has in the batch; none if it is not there.
  std::optional<std::int64_t> LowestInBatch(int seq) const {
    std::optional<std::int64_t> low;
    for (const BatchToken& token : batch_) {
      if (token.sequence != seq) continue;
      low = std::min<std::int64_t>(low.value_or(kUnbounded), token.position);
    }
    return low;
  }

  // S7.
  void Evict() {
    std::map<int, std::int64_t> low;  // By sequence.
    for (const Cell& cell : cells_) {
      for (const int seq : cell.sequences) {
        low[seq] = std::max(low[seq], std::int64_t{cell.position} + 1);
      }
    }
    for (auto& [seq, lowest] : low) {
      lowest = LowestInBatch(seq).value_or(lowest);
      for (Cell& cell : cells_) {
        const bool old = cell.position < lowest - *bounds_.memory;
        if (old) cell.sequences.erase(seq);
      }
    }
  }

  // The cell of each batch token; empty if there is no room.
  std::vector<int> FindCells() const {
    std::vector<int> found;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      if (cells_[i].IsFree()) {
        found.push_back(static_cast<int>(i));
      } else if (spec_.placement == Placement::kContiguous) {
        found.clear();
      }
      if (found.size() == batch_.size()) return found;
    }
    return {};
  }

  // One token at a time, so that rows and cells stay together.
  void Defrag() {
    int last = CellCount() - 1;
    for (int hole = 0; hole < last; ++hole) {
      if (!CellAt(hole).IsFree()) continue;
      while (last > hole && CellAt(last).IsFree()) --last;
      if (last == hole) return;
      std::swap(CellAt(hole), CellAt(last));
      for (auto& [id, layer] : layers_) {
        layer.keys.Copy(last, hole);
        layer.values.Copy(last, hole);
      }
    }
  }

  // With the batch's own cells in place, which it therefore spans.
  void SetView() {
    int first = CellCount();
    int last = -1;
    for (const BatchToken& token : batch_) {
      const std::int64_t low = *LowestInBatch(token.sequence);
      for (int i = 0; i < CellCount(); ++i) {
        if (!CellAt(i).Holds(token.sequence)) continue;
        const std::int64_t position = CellAt(i).position;
        if (bounds_.memory && position < low - *bounds_.window) continue;
        first = std::min(first, i);
        last = std::max(last, i);
      }
    }
    const int padding = config().cache_padding;
    view_first_ = first / padding * padding;
    view_cells_ = static_cast<int>(RoundUp(last + 1, padding)) - view_first_;
  }

  bool Sees(const BatchToken& token, const Cell& cell) const {
    const std::int64_t now = token.position;
    if (!cell.Holds(token.sequence)) return false;
    if (cell.position > now && !token.excepted) return false;
    if (bounds_.window && cell.position < now - *bounds_.window) return false;
    if (spec_.kind != Kind::kChunked) return true;
    return cell.position >= now - now % spec_.chunk;
  }

  void BuildMask() {
    const std::int64_t rows =
        RoundUp(std::ssize(batch_), config().mask_batch_padding);
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    mask_ =
        FilledTensor(config().mask_dtype, {view_cells_, rows, 1, 1}, kHidden);
    std::byte* element = mask_.bytes.data();
    for (const BatchToken& token : batch_) {
      for (int column = 0; column < view_cells_; ++column) {
        const bool sees = Sees(token, CellAt(view_first_ + column));
        if (sees) StoreElement(0.0F, element, mask_.dtype);
        element += SizeOf(mask_.dtype);
      }
    }
  }

  void DoGiveBack() override {
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      CellAt(batch_cells_[i]).sequences.erase(batch_[i].sequence);
    }
  }

  void DoSetCausal(std::span<const int> except) override {
    for (BatchToken& token : batch_) token.excepted = false;
    for (const int i : except) {
      batch_[static_cast<std::size_t>(i)].excepted = true;
    }
    BuildMask();
  }

  void DoPut(const TensorView& key, const TensorView& value) override {
    if (!layers_.contains(layer())) {
      const auto& [k_head_dim, kv_heads, v_head_dim] = row_dims();
      const RowStore keys(dtype(), k_head_dim, kv_heads, CellCount(), false);
      const RowStore values(dtype(), v_head_dim, kv_heads, CellCount(),
                            config().permuted_v);
      layers_.try_emplace(layer(), Layer{keys, values});
    }
    Layer& to = layers_.at(layer());
    if (pass().reserve) return;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      const auto k = static_cast<std::int64_t>(i);
      to.keys.Store(batch_cells_[i], Slice(key, 2, k));
      to.values.Store(batch_cells_[i], Slice(value, 2, k));
    }
  }

  std::optional<KvView> DoGet() override {
    const auto at = layers_.find(layer());
    if (at == layers_.end()) return std::nullopt;
    return KvView{at->second.keys.View(view_first_, view_cells_),
                  at->second.values.View(view_first_, view_cells_),
                  mask_.view(), view_first_};
  }

  void DoCopyPrefix(int src, int dst, std::int32_t len) override {
    for (Cell& cell : cells_) {
      const bool copied = cell.Holds(src) && cell.position < len;
      cell.sequences.erase(dst);
      if (copied) cell.sequences.insert(dst);
    }
  }

  bool DoCanResume(int seq, std::int32_t pos) const override {
    if (!bounds_.memory) return true;
    std::set<std::int64_t> stored;
    for (const Cell& cell : cells_) {
      if (cell.Holds(seq)) stored.insert(cell.position);
    }
    if (stored.empty()) return false;
    const std::int64_t oldest_seen = pos - *bounds_.window;
    return *stored.begin() <= std::max<std::int64_t>(0, oldest_seen) &&
           pos <= *stored.rbegin() + 1;
  }

  Status CheckRemove(int seq, std::int32_t begin, std::int32_t end) const {
    if (end == kOpenEnd) return {};
    bool remains = false;
    for (const Cell& cell : cells_) {
      if (!cell.Holds(seq)) continue;
      remains = remains || cell.position < begin || cell.position >= end;
      if (cell.position >= end && cell.sequences.size() > 1) {
        return {StatusCode::kSharedCells,
                fmt::format("seq {} would move its token at position {}, which "
                            "other sequences hold too",
                            seq, cell.position)};
      }
    }
    if (remains && spec_.shift.kind == ShiftKind::kNone) {
      return {StatusCode::kNotSupported,
              fmt::format("seq {} would need a shift function", seq)};
    }
    return {};
  }

  // Leaves in removal_ what DoCommitRemove is to do.
  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override {
    removal_.clear();
    if (Status why = CheckRemove(seq, begin, end); !why.ok()) return why;
    for (int i = 0; i < CellCount(); ++i) {
      Cell& cell = CellAt(i);
      if (!cell.Holds(seq) || cell.position < begin) continue;
      if (cell.position < end || end == kOpenEnd) {
        removal_.push_back([&cell, seq] { cell.sequences.erase(seq); });
        continue;
      }
      removal_.push_back([&cell, begin, end] { cell.position -= end - begin; });
      for (auto& [id, layer] : layers_) {
        DenseTensor key = layer.keys.Load(i);
        Status status = ShiftStored(spec_.shift, id, begin - end, key);
        if (!status.ok()) return status;
        removal_.push_back(
            [&to = layer.keys, i, key] { to.Store(i, key.view()); });
      }
    }
    return {};
  }

  void DoCommitRemove() override {
    for (const auto& change : removal_) change();
  }

  const CacheSpec spec_;
  Bounds bounds_;
  std::vector<Cell> cells_;
  std::map<int, Layer> layers_;
  std::vector<std::function<void()>> removal_;

  // The current pass.
  std::vector<BatchToken> batch_;
  std::vector<int> batch_cells_;
  int view_first_ = 0;
  int view_cells_ = 0;
  DenseTensor mask_;  // [view_cells, rows]
};

}  // namespace

std::unique_ptr<GuardedCache> MakeCausal(const CacheSpec& spec) {
  return std::make_unique<CausalCache>(spec);
}

}  // namespace kvtwin::reference
