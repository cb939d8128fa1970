// The memory that holds the rows of a paged pool: host memory (here) or device
// memory (optimized/cuda/). Other code decides which block holds which tokens.

#ifndef KVTWIN_OPTIMIZED_POOL_MEMORY_H_
#define KVTWIN_OPTIMIZED_POOL_MEMORY_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/index.h"
#include "kvtwin/paged.h"
#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"

namespace kvtwin::optimized {

// The K or V rows of all blocks of a layer, dense, block by block.
struct PoolRows {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::size_t head_dim = 0;
  std::size_t heads = 0;
  std::size_t block_size = 0;  // In tokens.
  PagedLayout layout = PagedLayout::kTokenMajor;

  std::size_t head_bytes() const {
    return AsSize(RunBytes(dtype, static_cast<std::int64_t>(head_dim)));
  }
  std::size_t block_bytes() const { return block_size * heads * head_bytes(); }
  // `count` rows from `slot` on, in one block or in consecutive blocks:
  // [head_dim, heads, count].
  TensorView View(std::size_t slot, int count) const;
};

class PoolMemory {
 public:
  virtual ~PoolMemory() = default;

  // Returns zeroed memory, which lives as long as this object.
  virtual std::byte* Allocate(std::size_t bytes) = 0;

  // Stores the rows of K and V at positions from `start` on, in the blocks of a
  // sequence.
  virtual void Store(std::span<const int> blocks, int start,
                     const TensorView& key, const PoolRows& keys,
                     const TensorView& value, const PoolRows& values) = 0;

  // Copies a block in each of the tensors.
  virtual void CopyBlock(std::span<const PoolRows> tensors, int from,
                         int to) = 0;

  // Converts a view of PoolRows to the view that callers of the pool get.
  virtual TensorView Show(const TensorView& view) = 0;
  virtual Device device() const = 0;
};

class HostPoolMemory final : public PoolMemory {
 public:
  std::byte* Allocate(std::size_t bytes) override;
  void Store(std::span<const int> blocks, int start, const TensorView& key,
             const PoolRows& keys, const TensorView& value,
             const PoolRows& values) override;
  void CopyBlock(std::span<const PoolRows> tensors, int from, int to) override;
  TensorView Show(const TensorView& view) override { return view; }
  Device device() const override { return Device::kCpu; }

 private:
  std::vector<AlignedBuffer> buffers_;
  std::vector<int> cells_;  // Cells of the rows that are being stored.
};

// Requires: CheckPagedSpec accepts it.
std::unique_ptr<PagedPool> MakePool(const PagedSpec& spec,
                                    std::unique_ptr<PoolMemory> memory);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_POOL_MEMORY_H_
