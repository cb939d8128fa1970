#include "optimized/encoder.h"

#include <fmt/format.h>

#include "core/dense_tensor.h"
#include "optimized/storage.h"

namespace kvtwin::optimized {

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
    pending_position_ =
        batch.positions[static_cast<std::size_t>(batch.multimodal.back())];
  }
  return {};
}

// Makes `copy` a zeroed tensor of that shape, unless it has it.
void EncoderCache::Reshape(const TensorView& like, Copy& copy) {
  if (copy.view.data != nullptr && copy.view.shape == like.shape &&
      copy.view.dtype == like.dtype) {
    return;
  }
  // The gate has seen to it that this does not overflow.
  copy.buffer = AlignedBuffer(DenseBytes(like.dtype, like.shape));
  copy.view = DenseView(copy.buffer.data(), like.dtype, like.shape);
}

void EncoderCache::DoPut(const TensorView& key, const TensorView& value) {
  const bool known = slots_.contains(layer());
  if (reserving() && known) return;
  Slot& slot = slots_[layer()];
  const bool permuted = config().v_layout == VLayout::kPermuted;
  const TensorView ordered = permuted ? PermutedView(value) : value;
  Reshape(key, slot.key);
  Reshape(ordered, slot.value);
  if (reserving()) return;
  CopyDense(key, slot.key.buffer.data());
  CopyDense(ordered, slot.value.buffer.data());
  cached_ = true;
  position_ = pending_position_;
}

KvView EncoderCache::DoGet() {
  const Slot& slot = slots_.at(layer());
  return {.key = slot.key.view,
          .value = slot.value.view,
          .mask = {},
          .first_cell = 0};
}

void EncoderCache::DoSaveSlots(CacheState& state) const {
  state.layers.clear();
  for (const auto& [layer, slot] : slots_) {
    state.layers[layer] = {CopyOf(slot.key.view, slot.key.view.dtype),
                           CopyOf(slot.value.view, slot.value.view.dtype)};
  }
  state.cached = cached_;
  state.position = position_;
  state.next_position = pending_position_;
}

void EncoderCache::DoLoadSlots(const CacheState& state) {
  slots_.clear();
  for (const auto& [layer, rows] : state.layers) {
    Slot& slot = slots_[layer];
    Reshape(rows.key.view(), slot.key);
    Reshape(rows.value.view(), slot.value);
    CopyDense(rows.key.view(), slot.key.buffer.data());
    CopyDense(rows.value.view(), slot.value.buffer.data());
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
