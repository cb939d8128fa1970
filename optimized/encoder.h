// The optimized twin of the encoder cache: the output of an encoder for one
// image or sound, of any shape, without positions, cells or a mask.

#ifndef KVTWIN_OPTIMIZED_ENCODER_H_
#define KVTWIN_OPTIMIZED_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "core/guarded_cache.h"

namespace kvtwin::optimized {

// The memory of the slots: host memory, or device memory in a subclass, which
// overrides all functions.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  // Returns zeroed memory.
  virtual std::shared_ptr<std::byte> Allocate(std::size_t bytes);
  // Makes a dense copy in `to`, dtype unchanged.
  virtual void Store(const TensorView& from, std::byte* to);
  // Dense tensors in this memory, as Get returns them.
  virtual KvView Show(const TensorView& key, const TensorView& value);
  virtual DenseTensor Load(const TensorView& view) const;
};

class EncoderCache final : public GuardedCache {
 public:
  explicit EncoderCache(std::unique_ptr<SlotMemory> memory)
      : memory_(std::move(memory)) {}

 private:
  // A dense copy of a tensor.
  struct Copy {
    std::shared_ptr<std::byte> rows;
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

  Copy Reshaped(const TensorView& like, const Copy& copy) const;
  void Store(const TensorView& from, const Copy& to);

  std::unique_ptr<SlotMemory> memory_;
  bool cached_ = false;
  std::int32_t position_ = 0;          // Position of what is cached.
  std::int32_t pending_position_ = 0;  // Position that the next Put will have.
  std::int32_t position_before_ = 0;   // pending_position_, one pass ago.
  std::map<int, Slot> slots_;          // Keyed by layer.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ENCODER_H_
