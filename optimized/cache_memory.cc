#include "optimized/cache_memory.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/parallel.h"

namespace kvtwin::optimized {

void HostMemory::Release() {
  layers_.clear();
  layer_list_.clear();
  found_ = nullptr;
}

Layer* HostMemory::FindLayer(int layer) const {
  if (found_ == nullptr || found_id_ != layer) {
    const auto found = layers_.find(layer);
    found_ = found == layers_.end() ? nullptr : found->second.get();
    found_id_ = layer;
  }
  return found_;
}

Layer& HostMemory::LayerOf(int layer) const {
  Layer* found = FindLayer(layer);
  KVTWIN_ASSERT(found != nullptr);
  return *found;
}

void HostMemory::NeedLayer(int layer, const RowDims& dims,
                           const LayerFormat& format) {
  if (FindLayer(layer) != nullptr) return;
  layers_.emplace(layer, std::make_unique<Layer>(dims, format));
  layer_list_.clear();
  for (const auto& [id, stored] : layers_) layer_list_.push_back(stored.get());
  found_ = nullptr;
}

void HostMemory::Put(int layer, const TensorView& key,
                     const TensorView& value) {
  Store(layer, cells_, key, value);
}

void HostMemory::Store(int layer, std::span<const int> cells,
                       const TensorView& key, const TensorView& value) {
  LayerOf(layer).Put(key, value, cells);
}

// The bytes of the K rows of one cell, in all layers.
std::size_t HostMemory::KeyRowBytes() const {
  std::size_t bytes = 0;
  for (const Layer* layer : layer_list_) bytes += layer->key_row_bytes();
  return bytes;
}

void HostMemory::Move(std::span<const CellMove> moves) {
  KVTWIN_DCHECK(AreIndependent(moves));
  // Each K and V byte is read and written.
  ParallelShares(
      layer_list_.size(), 4 * moves.size() * KeyRowBytes(),
      [&](std::size_t i, Share share) { layer_list_[i]->Move(moves, share); });
}

void HostMemory::ShiftKeys(const Selection& cells, const Shift& shift,
                           std::int32_t offset) {
  std::size_t scratch_size = 0;
  for (const Layer* layer : layer_list_) {
    const int head_dim = layer->dims().k_head_dim;
    RowShift& prepared = shifts_[head_dim];
    prepared.Prepare(shift, offset, head_dim);
    scratch_size =
        std::max(scratch_size, prepared.ScratchSize(layer->k_dtype()));
  }
  const std::size_t bytes = KeyRowBytes() * cells.count;
  // Shares of different layers may run at once.
  std::vector<float> scratch(layer_list_.size() * ShareCount(bytes) *
                             scratch_size);
  ParallelShares(layer_list_.size(), bytes, [&](std::size_t i, Share share) {
    Layer& layer = *layer_list_[i];
    const std::size_t first = (i * share.count + share.index) * scratch_size;
    layer.Shift(cells, shifts_.find(layer.dims().k_head_dim)->second,
                std::span(scratch).subspan(first, scratch_size), share);
  });
}

void HostMemory::LoadKeys(int layer, const Selection& cells,
                          std::span<float> rows) {
  const Layer& from = LayerOf(layer);
  const std::size_t elements = from.key_row_elements();
  float* next = rows.data();
  ForEachCell(cells, [&](std::size_t cell) {
    from.LoadKey(cell, {next, elements});
    next += elements;
  });
}

void HostMemory::StoreKeys(int layer, const Selection& cells,
                           std::span<const float> rows) {
  Layer& to = LayerOf(layer);
  const std::size_t elements = to.key_row_elements();
  const float* next = rows.data();
  ForEachCell(cells, [&](std::size_t cell) {
    to.StoreKey(cell, {next, elements});
    next += elements;
  });
}

KvView HostMemory::Rows(int layer, CellSpan cells) {
  const Layer& rows = LayerOf(layer);
  return {.key = rows.KeyView(cells),
          .value = rows.ValueView(cells),
          .mask = {},
          .first_cell = AsInt(cells.first)};
}

KvView HostMemory::HostRows(int layer) {
  return Rows(layer, {.first = 0, .end = LayerOf(layer).cells()});
}

}  // namespace kvtwin::optimized
