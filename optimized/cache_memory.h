// Where a cache keeps the rows of its layers and the mask of its pass: in the
// memory of the host, here, or of a device (optimized/cuda/). What is kept in
// which cell, and who sees it, is decided elsewhere.

#ifndef KVTWIN_OPTIMIZED_CACHE_MEMORY_H_
#define KVTWIN_OPTIMIZED_CACHE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/guarded_cache.h"
#include "kvtwin/shift.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"
#include "optimized/cell_table.h"
#include "optimized/mask.h"
#include "optimized/row_shift.h"
#include "optimized/storage.h"

namespace kvtwin::optimized {

// Thrown where there is no memory, or it fails.
class MemoryError final : public std::exception {
 public:
  explicit MemoryError(Status status) : status_(std::move(status)) {}
  const Status& status() const { return status_; }
  const char* what() const noexcept override {
    return status_.message().c_str();
  }

 private:
  Status status_;
};

class CacheMemory {
 public:
  virtual ~CacheMemory() = default;

  // From now on there are no layers.
  virtual void Forget() = 0;

  // Makes the layer, of zeros, unless it is there.
  virtual void NeedLayer(int layer, const RowDims& dims,
                         const LayerFormat& format) = 0;

  // Where the Puts of a pass go: row i of their tensors to cells[i], which stay
  // as they are until then. No pass has more than `most`. The mask is built
  // next. Requires: distinct cells.
  virtual void SetCells(std::span<const int> cells, std::size_t most) = 0;
  virtual void Put(int layer, const TensorView& key,
                   const TensorView& value) = 0;
  // The same, outside of a pass.
  virtual void Store(int layer, std::span<const int> cells,
                     const TensorView& key, const TensorView& value) = 0;

  // In all layers. Requires: no cell is in two moves.
  virtual void Move(std::span<const CellMove> moves) = 0;

  // Shifts the K rows of the selected cells in all layers. Requires: offset is
  // not 0; no custom function.
  virtual void ShiftKeys(const Selection& cells, const Shift& shift,
                         std::int32_t offset) = 0;

  // The K rows of the selected cells as f32, one after another; and back,
  // where what did not change keeps its bits.
  virtual void LoadKeys(int layer, const Selection& cells,
                        std::span<float> rows) = 0;
  virtual void StoreKeys(int layer, const Selection& cells,
                         std::span<const float> rows) = 0;

  // K and V of these cells, and the mask, for those who call Get.
  virtual KvView Rows(int layer, CellSpan cells) = 0;
  // K and V of all cells, in the memory of the host, until the next call: to
  // be read only.
  virtual KvView HostRows(int layer) = 0;

  virtual Mask& mask() = 0;
  virtual TensorView MaskView() = 0;
};

class HostMemory final : public CacheMemory {
 public:
  void Forget() override;
  void NeedLayer(int layer, const RowDims& dims,
                 const LayerFormat& format) override;
  void SetCells(std::span<const int> cells, std::size_t) override {
    cells_ = cells;
  }
  void Put(int layer, const TensorView& key, const TensorView& value) override;
  void Store(int layer, std::span<const int> cells, const TensorView& key,
             const TensorView& value) override;
  void Move(std::span<const CellMove> moves) override;
  void ShiftKeys(const Selection& cells, const Shift& shift,
                 std::int32_t offset) override;
  void LoadKeys(int layer, const Selection& cells,
                std::span<float> rows) override;
  void StoreKeys(int layer, const Selection& cells,
                 std::span<const float> rows) override;
  KvView Rows(int layer, CellSpan cells) override;
  KvView HostRows(int layer) override;
  Mask& mask() override { return mask_; }
  TensorView MaskView() override { return mask_.view(); }

 private:
  Layer* FindLayer(int layer) const;
  Layer& LayerOf(int layer) const;
  std::size_t KeyRowBytes() const;

  std::map<int, std::unique_ptr<Layer>> layers_;
  std::vector<Layer*> layer_list_;  // By layer.
  mutable int found_id_ = -1;       // Whose `found_` is.
  mutable Layer* found_ = nullptr;
  std::map<int, RowShift> shifts_;  // By k_head_dim.
  std::span<const int> cells_;
  HostMask mask_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CACHE_MEMORY_H_
