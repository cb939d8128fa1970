// The encoder cache of the reference twin (S37 to S40): one slot for each
// layer.

#include "core/dense_tensor.h"
#include "core/index.h"
#include "reference/make.h"

namespace kvtwin::reference {
namespace {

using enum StatusCode;

class EncoderCache final : public GuardedCache {
  bool IsEncoder() const override { return true; }
  void DoClose() override { slots_ = {}; }
  void DoSaveSlots(CacheState& state) const override { state = slots_; }
  void DoLoadSlots(const CacheState& state) override { slots_ = state; }
  bool DoEncoderCached() const override { return slots_.cached; }
  void DoGiveBack() override { slots_.next_position = position_before_; }

  Result<std::int64_t> DoCheckInit(const InitArgs& args) override {
    if (args.max_sequences == 1 && config().cache_padding == 1) return 0;
    return Status(kInvalidArgument, "one sequence and no padding only");
  }

  Status DoStartForward(const Batch& batch, bool reserve) override {
    position_before_ = slots_.next_position;
    if (!reserve && !batch.multimodal.empty()) {
      const auto last = AsSize(batch.multimodal.back());
      slots_.next_position = batch.positions[last];
    }
    return {};
  }

  void DoPut(const TensorView& key, const TensorView& value) override {
    const bool permuted = config().v_layout == VLayout::kPermuted;
    const TensorView stored = permuted ? PermutedView(value) : value;
    KvRows& slot = slots_.layers[layer()];
    if (!reserving()) {
      slot = {CopyOf(key, key.dtype), CopyOf(stored, stored.dtype)};
      slots_.cached = true;
      slots_.position = slots_.next_position;
    } else if (slot.key.bytes.empty()) {  // It is new.
      slot = {ZerosLike(key), ZerosLike(stored)};
    }
  }

  KvView DoGet() override {
    const auto& [key, value] = slots_.layers.at(layer());
    return {key.view(), value.view(), {}, 0};
  }

  void DoCommitRemove(int, std::int32_t begin, std::int32_t end) override {
    const bool before_end = slots_.position < end || end == kOpenEnd;
    if (begin <= slots_.position && before_end) slots_.cached = false;
  }

  CacheState slots_;
  std::int32_t position_before_ = 0;  // slots_.next_position before the pass.
};

}  // namespace

std::unique_ptr<GuardedCache> MakeEncoder() {
  return std::make_unique<EncoderCache>();
}

}  // namespace kvtwin::reference
