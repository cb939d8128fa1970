#include "optimized/encoder.h"

#include <fmt/format.h>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "optimized/aligned_buffer.h"
#include "optimized/storage.h"

namespace kvtwin::optimized {

std::shared_ptr<std::byte> SlotMemory::Allocate(std::size_t bytes) {
  const auto buffer = std::make_shared<AlignedBuffer>(bytes);
  return {buffer, buffer->data()};
}

void SlotMemory::Store(const TensorView& from, std::byte* to) {
  CopyDense(from, to);
}

KvView SlotMemory::Show(const TensorView& key, const TensorView& value) {
  return {.key = key, .value = value, .mask = {}, .first_cell = 0};
}

DenseTensor SlotMemory::Load(const TensorView& view) const {
  return CopyOf(view, view.dtype);
}

Result<std::int64_t> EncoderCache::DoCheckInit(const InitArgs& args) {
  if (args.max_sequences > 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("max_sequences is {}, an encoder cache has 1",
                              args.max_sequences));
  }
  if (config().cache_padding != 1) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("cache_padding is {}, that of an encoder cache is 1",
                    config().cache_padding));
  }
  return 0;
}

Status EncoderCache::DoStartForward(const Batch& batch, bool reserve) {
  if (reserve) return {};
  position_before_ = pending_position_;
  if (!batch.multimodal.empty()) {
    pending_position_ = At(batch.positions, batch.multimodal.back());
  }
  return {};
}

// A zeroed tensor of the shape of `like`, or `copy` if it has that shape.
EncoderCache::Copy EncoderCache::Reshaped(const TensorView& like,
                                          const Copy& copy) const {
  if (copy.rows != nullptr && copy.view.shape == like.shape &&
      copy.view.dtype == like.dtype) {
    return copy;
  }
  // GuardedCache has already checked that this size does not overflow.
  auto rows = memory_->Allocate(DenseBytes(like.dtype, like.shape));
  const TensorView view = DenseView(rows.get(), like.dtype, like.shape);
  return {std::move(rows), view};
}

void EncoderCache::Store(const TensorView& from, const Copy& to) {
  memory_->Store(from, to.rows.get());
}

void EncoderCache::DoPut(const TensorView& key, const TensorView& value) {
  const auto known = slots_.find(layer());
  if (reserving() && known != slots_.end()) return;
  const Slot before = known == slots_.end() ? Slot() : known->second;
  const bool permuted = config().v_layout == VLayout::kPermuted;
  const TensorView ordered = permuted ? PermutedView(value) : value;
  // Allocates both before storing either: allocation may fail.
  const Slot slot = {Reshaped(key, before.key),
                     Reshaped(ordered, before.value)};
  slots_[layer()] = slot;
  if (reserving()) return;
  Store(key, slot.key);
  Store(ordered, slot.value);
  cached_ = true;
  position_ = pending_position_;
}

KvView EncoderCache::DoGet() {
  const Slot& slot = slots_.at(layer());
  return memory_->Show(slot.key.view, slot.value.view);
}

void EncoderCache::DoSaveSlots(CacheState& state) const {
  state.layers.clear();
  for (const auto& [layer, slot] : slots_) {
    state.layers[layer] = {memory_->Load(slot.key.view),
                           memory_->Load(slot.value.view)};
  }
  state.cached = cached_;
  state.position = position_;
  state.next_position = pending_position_;
}

void EncoderCache::DoLoadSlots(const CacheState& state) {
  slots_.clear();
  for (const auto& [layer, rows] : state.layers) {
    const Slot slot = {Reshaped(rows.key.view(), {}),
                       Reshaped(rows.value.view(), {})};
    slots_[layer] = slot;
    Store(rows.key.view(), slot.key);
    Store(rows.value.view(), slot.value);
  }
  cached_ = state.cached;
  position_ = state.position;
  pending_position_ = state.next_position;
}

void EncoderCache::DoCommitRemove(int, std::int32_t begin, std::int32_t end) {
  if (begin <= position_ && (position_ < end || end == kOpenEnd)) {
    cached_ = false;
  }
}

}  // namespace kvtwin::optimized
