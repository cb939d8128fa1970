// The optimized twin of the encoder cache: what an encoder made of one image
// or sound, of any shape, without positions, cells or a mask.

#ifndef KVTWIN_OPTIMIZED_ENCODER_H_
#define KVTWIN_OPTIMIZED_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/guarded_cache.h"

namespace kvtwin::optimized {

// Where the slots are: in the memory of the host, or of a device, which
// overrides all of it.
class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  // Zeroed.
  virtual std::shared_ptr<std::byte> Allocate(std::size_t bytes);
  // Makes a dense copy there, dtype unchanged.
  virtual void Store(const TensorView& from, std::byte* to);
  // Dense tensors that are there, for those who call Get.
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
  std::int32_t position_ = 0;          // Of what is cached.
  std::int32_t pending_position_ = 0;  // Of what the next Put brings.
  std::int32_t position_before_ = 0;   // pending_position_, one pass ago.
  std::map<int, Slot> slots_;          // By layer.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ENCODER_H_
