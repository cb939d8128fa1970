// Device versions of the memories of optimized/: for the layers and the mask of
// a cache, for the slots of an encoder, for a pool.

#ifndef KVTWIN_OPTIMIZED_CUDA_MEMORY_H_
#define KVTWIN_OPTIMIZED_CUDA_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "optimized/cache_memory.h"
#include "optimized/cuda/gpu.h"
#include "optimized/cuda/mask.h"
#include "optimized/cuda/rows.h"
#include "optimized/encoder.h"
#include "optimized/pool_memory.h"

namespace kvtwin::optimized::cuda {

// A list of cells on the device. Its address changes only if it must grow.
class DeviceCells {
 public:
  void NeedRoom(Gpu& gpu, std::size_t count);
  void Send(Gpu& gpu, std::span<const int> cells);
  int* data() const { return reinterpret_cast<int*>(memory_.get()); }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t room_ = 0;
};

class DeviceMemory final : public CacheMemory {
 public:
  // `gpu` must outlive this object.
  explicit DeviceMemory(Gpu& gpu) : gpu_(gpu), mask_(gpu) {}

  void Release() override;
  void NeedLayer(int layer, const RowDims& dims,
                 const LayerFormat& format) override;
  void SetCells(std::span<const int> cells, std::size_t max) override;
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
  TensorView MaskView() override { return mask_.Show(); }

 private:
  struct Tensor {
    std::shared_ptr<std::byte> memory;
    StoredRows rows;
    Mirror mirror;

    std::int64_t row_bytes() const;
    std::size_t bytes() const;
    TensorView View(CellSpan cells) const;
    TensorView Show(Gpu& gpu, CellSpan cells);
    TensorView Load(Gpu& gpu, std::vector<std::byte>& to) const;
  };
  struct Layer {
    RowDims dims;
    Tensor key;
    Tensor value;
  };

  Tensor MakeTensor(DType dtype, VLayout layout, int head_dim, int heads,
                    std::size_t cells) const;
  void PutTo(const Layer& layer, const int* cells, const TensorView& key,
             const TensorView& value);
  std::vector<std::byte> Gather(const Tensor& from, std::span<const int> cells);

  Gpu& gpu_;
  DeviceMask mask_;
  std::map<int, Layer> layers_;
  DeviceCells cells_;        // Cells of the pass.
  DeviceCells other_cells_;  // Cells of rows stored outside of a pass.
  std::array<std::vector<std::byte>, 2> host_rows_;
  std::map<int, RowShift> shifts_;  // Keyed by k_head_dim.
  MoveChains chains_;
};

class DeviceSlotMemory final : public SlotMemory {
 public:
  explicit DeviceSlotMemory(Gpu& gpu) : gpu_(gpu) {}

  std::shared_ptr<std::byte> Allocate(std::size_t bytes) override;
  void Store(const TensorView& from, std::byte* to) override;
  KvView Show(const TensorView& key, const TensorView& value) override;
  DenseTensor Load(const TensorView& view) const override;

 private:
  TensorView Mirrored(const TensorView& view);

  Gpu& gpu_;
  std::map<std::byte*, Mirror> mirrors_;
};

class DevicePoolMemory final : public PoolMemory {
 public:
  explicit DevicePoolMemory(Gpu& gpu) : gpu_(gpu) {}

  std::byte* Allocate(std::size_t bytes) override;
  void Store(std::span<const int> blocks, int start, const TensorView& key,
             const PoolRows& keys, const TensorView& value,
             const PoolRows& values) override;
  void CopyBlock(std::span<const PoolRows> tensors, int from, int to) override;
  TensorView Show(const TensorView& view) override;
  Device device() const override { return gpu_.view_device(); }

 private:
  struct Buffer {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes;
    Mirror mirror;
  };

  Gpu& gpu_;
  std::vector<Buffer> buffers_;
  std::vector<int> cells_;  // Cells of the rows that are being stored.
  DeviceCells device_cells_;
};

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_MEMORY_H_
