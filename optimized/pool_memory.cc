#include "optimized/pool_memory.h"

#include <algorithm>
#include <cstring>

#include "core/index.h"
#include "optimized/parallel.h"
#include "optimized/put_rows.h"

namespace kvtwin::optimized {
namespace {

// Stores rows head by head, block by block. `cells` is scratch.
void StoreHeads(std::span<const int> blocks, int start, const TensorView& from,
                const PoolRows& to, std::vector<int>& cells) {
  const std::size_t size = to.block_size;
  const auto begin = AsSize(start);
  const std::size_t end = begin + AsSize(from.shape[2]);
  for (std::size_t at = begin; at < end;) {
    const std::size_t offset = at % size;
    const std::size_t count = std::min(size - offset, end - at);
    cells.clear();
    for (std::size_t i = 0; i < count; ++i) {
      cells.push_back(AsInt(offset + i));
    }
    std::byte* block = to.data + AsSize(blocks[at / size]) * to.block_bytes();
    for (std::size_t head = 0; head < to.heads; ++head) {
      TensorView part = from;
      part.data = from.at(0, static_cast<std::int64_t>(head),
                          static_cast<std::int64_t>(at - begin));
      part.shape[1] = 1;
      part.shape[2] = static_cast<std::int64_t>(count);
      PutRows(part, cells, 0, count,
              {block + head * size * to.head_bytes(), to.dtype, to.head_bytes(),
               /*stream=*/false});
    }
    at += count;
  }
}

}  // namespace

TensorView PoolRows::View(std::size_t slot, int count) const {
  const auto head = static_cast<std::int64_t>(head_bytes());
  TensorView view = DenseView(data, dtype,
                              {static_cast<std::int64_t>(head_dim),
                               static_cast<std::int64_t>(heads), count, 1});
  std::size_t before = slot * heads * head_bytes();
  if (layout == PagedLayout::kHeadMajor) {
    view.stride[1] = head * static_cast<std::int64_t>(block_size);
    view.stride[2] = head;
    view.stride[3] = head * count;
    before =
        slot / block_size * block_bytes() + slot % block_size * head_bytes();
  }
  view.data = data + before;
  return view;
}

std::byte* HostPoolMemory::Allocate(std::size_t bytes) {
  return buffers_.emplace_back(bytes).data();
}

void HostPoolMemory::Store(std::span<const int> blocks, int start,
                           const TensorView& key, const PoolRows& keys,
                           const TensorView& value, const PoolRows& values) {
  if (keys.layout == PagedLayout::kHeadMajor) {
    StoreHeads(blocks, start, key, keys, cells_);
    StoreHeads(blocks, start, value, values, cells_);
    return;
  }
  cells_.clear();
  for (std::int64_t i = 0; i < key.shape[2]; ++i) {
    const auto position = AsSize(start + i);
    cells_.push_back(blocks[position / keys.block_size] *
                         AsInt(keys.block_size) +
                     AsInt(position % keys.block_size));
  }
  const auto stored = [](const PoolRows& rows) {
    return StoredRows{rows.data, rows.dtype, rows.heads * rows.head_bytes(),
                      /*stream=*/false};
  };
  const StoredRows to_keys = stored(keys);
  const StoredRows to_values = stored(values);
  // As many bytes are read as are stored, or twice as many.
  const std::size_t touched =
      2 * cells_.size() * (to_keys.stride + to_values.stride);
  ParallelShares(1, touched, [&](std::size_t, Share share) {
    const std::size_t begin = share.Begin(cells_.size());
    const std::size_t end = share.End(cells_.size());
    PutRows(key, cells_, begin, end, to_keys);
    PutRows(value, cells_, begin, end, to_values);
  });
}

void HostPoolMemory::CopyBlock(std::span<const PoolRows> tensors, int from,
                               int to) {
  for (const PoolRows& rows : tensors) {
    const std::size_t bytes = rows.block_bytes();
    std::memcpy(rows.data + AsSize(to) * bytes,
                rows.data + AsSize(from) * bytes, bytes);
  }
}

}  // namespace kvtwin::optimized
