// The memory that holds the rows of a cache's layers and the mask of its pass:
// host memory (here) or device memory (optimized/cuda/). Other code decides
// which cell holds which token, and which tokens are visible.

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

#include "core/assert.h"
#include "core/guarded_cache.h"
#include "kvtwin/shift.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"
#include "optimized/cell_table.h"
#include "optimized/distinct.h"
#include "optimized/mask.h"
#include "optimized/row_shift.h"
#include "optimized/storage.h"

namespace kvtwin::optimized {

// Thrown when memory cannot be allocated, or fails.
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

  // Removes all layers.
  virtual void Release() = 0;

  // Creates the layer, zeroed, unless it exists.
  virtual void NeedLayer(int layer, const RowDims& dims,
                         const LayerFormat& format) = 0;

  // Sets where the Puts of a pass go: row i of their tensors to cells[i]. The
  // caller keeps `cells` unchanged until then. No pass has more than `max`
  // cells. The caller builds the mask next. Requires: distinct cells.
  virtual void SetCells(std::span<const int> cells, std::size_t max) = 0;
  virtual void Put(int layer, const TensorView& key,
                   const TensorView& value) = 0;
  // Stores rows as Put does, outside of a pass.
  virtual void Store(int layer, std::span<const int> cells,
                     const TensorView& key, const TensorView& value) = 0;

  // Moves rows in all layers. Requires: no cell is in two moves.
  virtual void Move(std::span<const CellMove> moves) = 0;

  // Shifts the K rows of the selected cells in all layers. Requires: offset is
  // not 0; no custom function.
  virtual void ShiftKeys(const Selection& cells, const Shift& shift,
                         std::int32_t offset) = 0;

  // LoadKeys reads the K rows of the selected cells as f32, one after another;
  // StoreKeys writes them back, and elements that did not change keep their
  // bits.
  virtual void LoadKeys(int layer, const Selection& cells,
                        std::span<float> rows) = 0;
  virtual void StoreKeys(int layer, const Selection& cells,
                         std::span<const float> rows) = 0;

  // The K and V of these cells, and the mask, as Get returns them.
  virtual KvView Rows(int layer, CellSpan cells) = 0;
  // The K and V of all cells, in host memory, valid until the next call and
  // read-only.
  virtual KvView HostRows(int layer) = 0;

  virtual Mask& mask() = 0;
  virtual TensorView MaskView() = 0;
};

class HostMemory final : public CacheMemory {
 public:
  void Release() override;
  void NeedLayer(int layer, const RowDims& dims,
                 const LayerFormat& format) override;
  void SetCells(std::span<const int> cells, std::size_t) override {
    KVTWIN_DCHECK(AreDistinct(cells));
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
  std::vector<Layer*> layer_list_;  // Sorted by layer number.
  mutable int found_id_ = -1;       // The layer number of `found_`.
  mutable Layer* found_ = nullptr;
  std::map<int, RowShift> shifts_;  // Keyed by k_head_dim.
  std::span<const int> cells_;
  HostMask mask_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CACHE_MEMORY_H_
