// The mask of a pass in device memory. Mask decides on the host which columns
// change; here they are written. The device has a copy of the positions, and of
// the cells of each sequence that was used in a mask: each Build sends the
// changes.

#ifndef KVTWIN_OPTIMIZED_CUDA_MASK_H_
#define KVTWIN_OPTIMIZED_CUDA_MASK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "optimized/cuda/gpu.h"
#include "optimized/cuda/mask_kernels.h"
#include "optimized/mask.h"

namespace kvtwin::optimized::cuda {

class DeviceMask final : public Mask {
 public:
  explicit DeviceMask(Gpu& gpu) : gpu_(gpu) {}

  // The view of the mask, as Get returns it.
  TensorView Show();

  // The next Build also sends these cells to `to` on the device.
  void SendAlong(std::span<const int> cells, int* to) {
    cells_due_ = cells;
    cells_to_ = to;
  }

 private:
  // The device's copy of a sequence's cells.
  struct Copy {
    std::shared_ptr<std::byte> words;
    // Sequence::changes (> kRecent) when copied; 0 if never.
    std::uint64_t changes = 0;
  };

  std::byte* Allocate(std::size_t bytes) override;
  void Write(const CellTable& table, CellSpan view, DType dtype) override;

  void NeedTable(const CellTable& table);
  void ForgetTable();
  const std::uint64_t* AskFor(const CellTable& table, const Sequence& sequence);
  void AddUpdate(const CellTable& table, const Sequence& sequence,
                 const Copy& copy, std::size_t word);
  void Send(DType dtype, std::int64_t longest);

  Gpu& gpu_;
  std::shared_ptr<std::byte> rows_;
  std::size_t row_bytes_ = 0;  // Bytes of all rows.
  Mirror mirror_;

  std::size_t cells_ = 0;
  std::shared_ptr<std::byte> positions_;
  std::shared_ptr<std::byte> ranges_;
  std::map<const Sequence*, Copy> copies_;

  // Scratch.
  std::span<const int> cells_due_;
  int* cells_to_ = nullptr;
  std::vector<WordUpdate> updates_;
  std::vector<MaskPiece> out_;
};

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_MASK_H_
