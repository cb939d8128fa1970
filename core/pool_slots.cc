// The slots of sessions in a pool: each is a sequence of the pool.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/sessions.h"

namespace kvtwin {
namespace {

// The tokens [begin, begin + count) of [head_dim, kv_heads, tokens].
TensorView TokensOf(TensorView view, int begin, int count) {
  view.data = view.at(0, 0, begin);
  view.shape[2] = count;
  return view;
}

class PoolSlotsOf final : public PoolSlots {
 public:
  // Requires: the pool is large enough.
  PoolSlotsOf(PagedPool& pool, std::vector<int> sequences)
      : pool_(&pool), sequences_(std::move(sequences)) {}
  ~PoolSlotsOf() override { Close(); }
  PoolSlotsOf(const PoolSlotsOf&) = delete;
  PoolSlotsOf& operator=(const PoolSlotsOf&) = delete;

  Result<int> Sequence(int slot) const override {
    if (Status status = CheckOpen(); !status.ok()) return status;
    if (slot < 0 || slot >= Size(sequences_)) {
      return Invalid("slot is {}, it must be 0 to {}", slot,
                     sequences_.size() - 1);
    }
    return At(sequences_, slot);
  }

  Status SetConfig(const CacheConfig&) override {
    return Unsupported("config");
  }
  Status Init(const InitArgs&) override {
    return Untimely("the slots of a pool need no Init");
  }
  void Close() override {
    for (const int sequence : sequences_) (void)pool_->Free(sequence).ok();
    sequences_.clear();
    parts_.clear();
    lacking_.clear();
  }
  Status SetLayer(int layer) override {
    if (Status status = CheckOpen(); !status.ok()) return status;
    if (layer < 0 || layer >= pool_->spec().layers) {
      return Invalid("layer is {}, the pool has {}", layer,
                     pool_->spec().layers);
    }
    layer_ = layer;
    return {};
  }

  Status StartForward(const Batch& batch, bool reserve) override {
    if (Status status = CheckOpen(); !status.ok()) return status;
    if (reserve) return Unsupported("reserve");
    if (std::ranges::any_of(batch.parents,
                            [](int parent) { return parent != kNotADraft; })) {
      return Unsupported("drafts");
    }
    if (batch.positions.empty() ||
        batch.positions.size() != batch.sequences.size()) {
      return Invalid("the batch has {} positions and {} sequences",
                     batch.positions.size(), batch.sequences.size());
    }
    std::vector<Part> parts;
    for (int i = 0; i < Size(batch.sequences); ++i) {
      Status status = AddTo(parts, At(batch.sequences, i), i);
      if (!status.ok()) return status;
    }
    Status status;
    // A pass without its rows ends in an error, whatever comes next.
    if (lacking_.empty()) status = CheckPositions(parts, batch.positions);
    if (status.ok()) status = EndPass();
    if (!status.ok()) return status;
    parts_ = std::move(parts);
    for (int layer = 0; layer < pool_->spec().layers; ++layer) {
      lacking_.insert(layer);
    }
    return {};
  }

  Status SetCausal(std::span<const int>) override {
    return Unsupported("SetCausal");
  }

  Status Put(const TensorView& key, const TensorView& value) override {
    if (Status status = CheckOpen(); !status.ok()) return status;
    if (parts_.empty()) return Untimely("no pass has begun: call StartForward");
    const int tokens = parts_.back().begin + parts_.back().count;
    for (const TensorView* rows : {&key, &value}) {
      if (rows->data == nullptr) return Invalid("a tensor has no data");
      if (rows->shape[2] == tokens) continue;
      return Invalid("rows are of {} tokens, the batch has {}", rows->shape[2],
                     tokens);
    }
    for (const Part& part : parts_) {
      const auto appended =
          pool_->Append(At(sequences_, part.slot), layer_,
                        TokensOf(key, part.begin, part.count),
                        TokensOf(value, part.begin, part.count));
      if (!appended.ok()) return appended.status();
    }
    lacking_.erase(layer_);
    return {};
  }

  Result<KvView> Get() override { return Unsupported("Get"); }

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = CheckSlot(src);
    if (status.ok()) status = CheckSlot(dst);
    if (status.ok()) status = NotNegative("len", len);
    if (status.ok()) status = EndPass();
    if (!status.ok()) return status;
    if (src == dst) return Truncate(dst, len);
    const int kept = std::min(len, Length(src));
    const Result<int> forked = pool_->Fork(At(sequences_, src), kept);
    if (!forked.ok()) return forked.status();
    return pool_->Free(std::exchange(At(sequences_, dst), *forked));
  }

  Result<bool> CanResume(int seq, std::int32_t pos) override {
    Status status = CheckSlot(seq);
    if (status.ok()) status = NotNegative("pos", pos);
    if (!status.ok()) return status;
    return pos <= NextPosition(seq);
  }

  // Tokens of a pool do not move (S32).
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    Status status = CheckSlot(seq);
    if (status.ok()) status = NotNegative("begin", begin);
    if (status.ok() && begin > end) {
      status = Invalid("begin is {}, end {}", begin, end);
    }
    if (status.ok()) status = EndPass();
    if (!status.ok()) return status;
    const bool keeps = begin > 0 || end < Length(seq);
    if (end != kOpenEnd && keeps) return Unsupported("a shift");
    return Truncate(seq, begin);
  }

  Status Commit(int, std::span<const int>) override {
    return Unsupported("drafts");
  }
  Status Checkpoint(int) override { return Unsupported("a pinned state"); }
  Status SnapshotTo(CacheState&) const override {
    return Unsupported("a snapshot");
  }
  Status Restore(const CacheState&) override {
    return Unsupported("a snapshot");
  }
  Status AddSequence(int, const CacheState&) override {
    return Unsupported("a snapshot");
  }

  Status SetLayerType(int) override { return Unsupported("SetLayerType"); }
  Cache* UnderlyingCache() override { return this; }
  Result<bool> EncoderCached() override { return Unsupported("an encoder"); }

  // A cell is a place of a block.
  int CellCount() const override {
    return pool_->spec().blocks * pool_->spec().block_size;
  }
  std::span<const int> BatchCells() const override { return {}; }
  // With the tokens of the current pass once they are put.
  void ListCells(std::vector<CellEntry>& out) const override {
    out.clear();
    for (int slot = 0; slot < Size(sequences_); ++slot) {
      int end = Length(slot);
      for (const Part& part : parts_) end += part.slot == slot ? part.count : 0;
      auto places = pool_->SlotMapping(At(sequences_, slot), 0, end);
      if (!places.ok()) {
        places = pool_->SlotMapping(At(sequences_, slot), 0, Length(slot));
      }
      for (int i = 0; places.ok() && i < Size(*places); ++i) {
        out.push_back({AsInt(At(*places, i)), i, slot});
      }
    }
    std::ranges::sort(out, {}, [](const CellEntry& entry) {
      return std::pair(entry.cell, entry.sequence);
    });
  }

 private:
  // Tokens of a batch: those of one slot.
  struct Part {
    int slot = 0;
    int begin = 0;
    int count = 0;
  };

  int Length(int slot) const {
    const Result<int> length = pool_->SeqLen(At(sequences_, slot));
    return length.ok() ? *length : 0;
  }

  // The length of a slot once the last pass has ended.
  int NextPosition(int slot) const {
    const auto part = std::ranges::find(parts_, slot, &Part::slot);
    const bool grows = part != parts_.end() && lacking_.empty();
    return Length(slot) + (grows ? part->count : 0);
  }

  // Refuses calls after Close (S1).
  Status CheckOpen() const {
    if (!sequences_.empty()) return {};
    return Untimely("the slots of a pool are used after Close");
  }

  Status Unsupported(std::string_view call) const {
    if (Status status = CheckOpen(); !status.ok()) return status;
    return {StatusCode::kNotSupported,
            fmt::format("{}: the slots of a pool have none", call)};
  }

  Status CheckSlot(int slot) const {
    if (Status status = CheckOpen(); !status.ok()) return status;
    if (slot >= 0 && slot < Size(sequences_)) return {};
    return Invalid("sequence is {}, there are {} slots", slot,
                   sequences_.size());
  }

  // Adds token `index` of a batch to the part of its slot.
  Status AddTo(std::vector<Part>& parts, int slot, int index) const {
    if (Status status = CheckSlot(slot); !status.ok()) return status;
    if (parts.empty() || parts.back().slot != slot) {
      if (std::ranges::find(parts, slot, &Part::slot) != parts.end()) {
        return Invalid("token {}: the tokens of sequence {} lie apart", index,
                       slot);
      }
      parts.push_back({slot, index, 0});
    }
    ++parts.back().count;
    return {};
  }

  // Refuses a batch that does not continue its slots.
  Status CheckPositions(const std::vector<Part>& parts,
                        std::span<const std::int32_t> positions) const {
    for (const auto& [slot, begin, count] : parts) {
      int next = NextPosition(slot);
      for (int i = begin; i < begin + count; ++i, ++next) {
        if (At(positions, i) == next) continue;
        return Invalid("token {} has position {}, sequence {} continues at {}",
                       i, At(positions, i), slot, next);
      }
    }
    return {};
  }

  // Commits the rows of the last batch. If a layer lacks them, drops the batch,
  // and returns the error once.
  Status EndPass() {
    Status ended;
    if (!lacking_.empty()) {
      ended = Untimely(
          "layer {} has no rows of the last batch: its tokens are dropped",
          *lacking_.begin());
    }
    for (const Part& part : parts_) {
      const int sequence = At(sequences_, part.slot);
      Status status = lacking_.empty()
                          ? pool_->Commit(sequence, part.count)
                          : pool_->Truncate(sequence, Length(part.slot));
      if (ended.ok()) ended = status;
    }
    parts_.clear();
    lacking_.clear();
    return ended;
  }

  Status Truncate(int slot, std::int32_t len) {
    if (len >= Length(slot)) return {};
    return pool_->Truncate(At(sequences_, slot), len);
  }

  PagedPool* pool_;
  std::vector<int> sequences_;  // By slot.
  int layer_ = 0;
  std::vector<Part> parts_;  // The batch, until its rows are committed.
  std::set<int> lacking_;    // The layers that lack rows of the batch.
};

}  // namespace

Result<std::unique_ptr<PoolSlots>> MakePoolSlots(PagedPool& pool,
                                                 const SessionsSpec& spec) {
  if (Status status = CheckSessionsSpec(spec); !status.ok()) return status;
  if (pool.spec().window || pool.spec().states || !pool.spec().groups.empty()) {
    return Status(StatusCode::kNotSupported,
                  "slots are for pools without windows, states and groups");
  }
  const std::int64_t needed = BlocksFor(spec, pool.spec().block_size);
  if (pool.spec().blocks < needed) {
    return Invalid("the pool has {} blocks, {} slots of {} tokens need {}",
                   pool.spec().blocks, spec.slots, spec.context, needed);
  }
  if (pool.spec().max_seq_len < spec.context) {
    return Invalid("max_seq_len is {}, the context {}", pool.spec().max_seq_len,
                   spec.context);
  }
  std::vector<int> sequences;
  for (int slot = 0; slot < spec.slots; ++slot) {
    const Result<int> opened = pool.Open();
    if (!opened.ok()) return opened.status();
    sequences.push_back(*opened);
  }
  std::unique_ptr<PoolSlots> slots =
      std::make_unique<PoolSlotsOf>(pool, std::move(sequences));
  return slots;
}

}  // namespace kvtwin
