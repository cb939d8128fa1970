// The optimized twin of the encoder cache: what an encoder made of one image
// or sound, of any shape, without positions, cells or a mask.

#ifndef KVTWIN_OPTIMIZED_ENCODER_H_
#define KVTWIN_OPTIMIZED_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "core/guarded_cache.h"
#include "optimized/aligned_buffer.h"

namespace kvtwin::optimized {

class EncoderCache final : public GuardedCache {
 public:
  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

 private:
  // A dense copy of a tensor.
  struct Copy {
    AlignedBuffer buffer;
    TensorView view;
  };
  struct Slot {
    Copy key;
    Copy value;
  };

  Status DoCheckInit(const InitArgs& args) const override;
  void DoInit(const InitArgs&) override {}
  void DoClose() override { slots_.clear(); }
  Status DoStartForward(const Batch& batch, bool reserve) override;
  void DoGiveBack() override { pending_position_ = position_before_; }
  void DoSetCausal(std::span<const int>) override {}  // Refused before.
  void DoPut(const TensorView& key, const TensorView& value) override;
  std::optional<KvView> DoGet() override;
  void DoCopyPrefix(int, int, std::int32_t) override {}  // Refused before.
  bool DoCanResume(int, std::int32_t) const override { return true; }
  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override;
  void DoCommitRemove() override;
  bool DoEncoderCached() const override { return cached_; }
  bool IsEncoder() const override { return true; }

  static void Reshape(const TensorView& like, Copy& copy);

  bool cached_ = false;
  std::int32_t position_ = 0;          // Of what is cached.
  std::int32_t pending_position_ = 0;  // Of what the next Put brings.
  std::int32_t position_before_ = 0;   // pending_position_, one pass ago.
  std::map<int, Slot> slots_;          // By layer.

  std::int32_t remove_begin_ = 0;
  std::int32_t remove_end_ = 0;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ENCODER_H_
