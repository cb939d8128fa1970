// The optimized twin of the encoder cache: what an encoder made of one image
// or sound, of any shape, without positions, cells or a mask.

#ifndef KVTWIN_OPTIMIZED_ENCODER_H_
#define KVTWIN_OPTIMIZED_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/guarded_cache.h"
#include "optimized/aligned_buffer.h"

namespace kvtwin::optimized {

class EncoderCache final : public GuardedCache {
  // A dense copy of a tensor.
  struct Copy {
    AlignedBuffer buffer;
    TensorView view;
  };
  struct Slot {
    Copy key;
    Copy value;
  };

  Result<std::int64_t> DoCheckInit(const InitArgs& args) override;
  void DoClose() override { slots_.clear(); }
  Status DoStartForward(const Batch& batch, bool reserve) override;
  void DoGiveBack() override { pending_position_ = position_before_; }
  void DoPut(const TensorView& key, const TensorView& value) override;
  KvView DoGet() override;
  void DoCommitRemove(int seq, std::int32_t begin, std::int32_t end) override;
  bool DoEncoderCached() const override { return cached_; }
  bool IsEncoder() const override { return true; }
  void DoSaveSlots(CacheState& state) const override;
  void DoLoadSlots(const CacheState& state) override;

  static void Reshape(const TensorView& like, Copy& copy);

  bool cached_ = false;
  std::int32_t position_ = 0;          // Of what is cached.
  std::int32_t pending_position_ = 0;  // Of what the next Put brings.
  std::int32_t position_before_ = 0;   // pending_position_, one pass ago.
  std::map<int, Slot> slots_;          // By layer.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ENCODER_H_
