#include "optimized/cuda/memory.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "core/assert.h"
#include "core/index.h"
#include "core/refusals.h"
#include "optimized/cuda/copy.h"
#include "optimized/distinct.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized::cuda {
namespace {

template <class T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

template <class T>
const T* As(const std::byte* bytes) {
  return reinterpret_cast<const T*>(bytes);
}

std::vector<int> ListOf(const Selection& cells) {
  std::vector<int> list;
  list.reserve(cells.count);
  ForEachCell(cells, [&](std::size_t cell) { list.push_back(AsInt(cell)); });
  return list;
}

// Calls put(rows, first) for the tensor, [head_dim, heads, tokens], on the
// device. A host tensor is staged in parts, one after another; `first` is the
// first token of each part.
template <class Put>
void ForEachPart(Gpu& gpu, const TensorView& from, const Put& put) {
  if (gpu.Holds(from)) return put(from, 0);
  const std::int64_t row =
      std::max<std::int64_t>(RunBytes(from.dtype, from.shape[0]), 1) *
      from.shape[1];
  const std::int64_t max = std::max<std::int64_t>(
      static_cast<std::int64_t>(Gpu::kSegmentBytes) / row, 1);
  for (std::int64_t first = 0; first < from.shape[2]; first += max) {
    TensorView part = from;
    part.data = from.at(0, 0, first);
    part.shape[2] = std::min(max, from.shape[2] - first);
    put(gpu.StageCopy(part), first);
  }
}

std::size_t Product(std::int64_t a, std::size_t b) {
  std::size_t product;
  if (__builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
  return product;
}

}  // namespace

// Cells -----------------------------------------------------------------------

void DeviceCells::NeedRoom(Gpu& gpu, std::size_t count) {
  if (count <= room_) return;
  const std::size_t room = std::max(count, 2 * room_);
  room_ = 0;
  memory_ = nullptr;
  memory_ = gpu.Allocate(room * sizeof(int));
  room_ = room;
}

void DeviceCells::Send(Gpu& gpu, std::span<const int> cells) {
  NeedRoom(gpu, cells.size());
  const Gpu::Staged staged = gpu.Stage(cells.size_bytes());
  std::memcpy(staged.host, cells.data(), cells.size_bytes());
  Check(cudaMemcpyAsync(memory_.get(), staged.host, cells.size_bytes(),
                        cudaMemcpyHostToDevice, gpu.stream()),
        "sending cells");
}

// Layers ----------------------------------------------------------------------

std::int64_t DeviceMemory::Tensor::row_bytes() const {
  return RunBytes(rows.dtype, rows.head_dim) * rows.heads;
}

std::size_t DeviceMemory::Tensor::bytes() const {
  return AsSize(row_bytes() * rows.cells);
}

TensorView DeviceMemory::Tensor::View(CellSpan cells) const {
  return RowsView(rows.data, rows.dtype, rows.layout, rows.head_dim, rows.heads,
                  AsSize(rows.cells) * SizeOf(rows.dtype), cells);
}

TensorView DeviceMemory::Tensor::Show(Gpu& gpu, CellSpan cells) {
  return mirror.Show(gpu, View(cells), rows.data, bytes());
}

// Copies the whole tensor to host memory.
TensorView DeviceMemory::Tensor::Load(Gpu& gpu,
                                      std::vector<std::byte>& to) const {
  to.resize(bytes());
  gpu.Download(rows.data, to);
  TensorView loaded = View({0, AsSize(rows.cells)});
  loaded.data = to.data();
  return loaded;
}

void DeviceMemory::Release() {
  layers_.clear();
  host_rows_ = {};
}

DeviceMemory::Tensor DeviceMemory::MakeTensor(DType dtype, VLayout layout,
                                              int head_dim, int heads,
                                              std::size_t cells) const {
  Tensor tensor;
  tensor.rows = {.data = nullptr,
                 .dtype = dtype,
                 .layout = layout,
                 .head_dim = head_dim,
                 .heads = heads,
                 .cells = static_cast<std::int64_t>(cells)};
  tensor.memory = gpu_.AllocateZeroed(Product(tensor.row_bytes(), cells));
  tensor.rows.data = tensor.memory.get();
  return tensor;
}

void DeviceMemory::NeedLayer(int layer, const RowDims& dims,
                             const LayerFormat& format) {
  const auto known = layers_.find(layer);
  // A layer with other dimensions is left over from a first Put that failed.
  if (known != layers_.end() && known->second.dims == dims) return;
  // Allocates both before storing either: allocation may fail.
  Tensor key = MakeTensor(format.k_dtype, VLayout::kPlain, dims.k_head_dim,
                          dims.kv_heads, format.cells);
  Tensor value = MakeTensor(format.v_dtype, format.v_layout, dims.v_head_dim,
                            dims.kv_heads, format.cells);
  layers_[layer] = {dims, std::move(key), std::move(value)};
}

void DeviceMemory::SetCells(std::span<const int> cells, std::size_t max) {
  KVTWIN_DCHECK(AreDistinct(cells));
  // Reserves room for the largest pass: a captured Put refers to this address.
  cells_.NeedRoom(gpu_, max);
  mask_.SendAlong(cells, cells_.data());
}

void DeviceMemory::PutTo(const Layer& layer, const int* cells,
                         const TensorView& key, const TensorView& value) {
  const auto put = [&](const TensorView& from, const StoredRows& to) {
    ForEachPart(gpu_, from, [&](const TensorView& rows, std::int64_t first) {
      Check(PutRows(rows, cells + first, to, gpu_.stream()), "storing rows");
    });
  };
  put(key, layer.key.rows);
  put(value, layer.value.rows);
}

void DeviceMemory::Put(int layer, const TensorView& key,
                       const TensorView& value) {
  PutTo(layers_.at(layer), cells_.data(), key, value);
}

void DeviceMemory::Store(int layer, std::span<const int> cells,
                         const TensorView& key, const TensorView& value) {
  other_cells_.Send(gpu_, cells);
  PutTo(layers_.at(layer), other_cells_.data(), key, value);
}

void DeviceMemory::Move(std::span<const CellMove> moves) {
  KVTWIN_DCHECK(AreIndependent(moves));
  std::vector<StoredRows> tensors;
  std::int64_t bytes = 0;
  std::int64_t elements = 0;
  for (const auto& [id, layer] : layers_) {
    for (const Tensor* tensor : {&layer.key, &layer.value}) {
      tensors.push_back(tensor->rows);
      bytes = std::max(bytes, tensor->row_bytes());
      elements = std::max(
          elements, std::int64_t{tensor->rows.head_dim} * tensor->rows.heads);
    }
  }
  if (tensors.empty()) return;
  OrderMoves(moves, chains_);
  const auto [rows, cells, begins, cycles] =
      gpu_.Upload<4>({Bytes(tensors), Bytes(chains_.cells),
                      Bytes(chains_.begins), Bytes(chains_.cycles)});
  Check(MoveRows(As<StoredRows>(rows), Size(tensors),
                 {As<int>(cells), As<int>(begins), As<int>(cycles),
                  Size(chains_.cycles)},
                 bytes, elements, gpu_.stream()),
        "moving rows");
}

void DeviceMemory::ShiftKeys(const Selection& cells, const Shift& shift,
                             std::int32_t offset) {
  const std::vector<int> list = ListOf(cells);
  for (const auto& [id, layer] : layers_) {
    const int head_dim = layer.key.rows.head_dim;
    RowShift& prepared = shifts_[head_dim];
    prepared.Prepare(shift, offset, head_dim);
    if (prepared.idle()) continue;
    const bool halves = shift.rope.pairing == Rope::Pairing::kHalves;
    using Kind = DeviceShift::Kind;
    const Kind kind = shift.kind == ShiftKind::kAdd      ? Kind::kAdd
                      : shift.kind == ShiftKind::kTagAdd ? Kind::kTagAdd
                      : halves                           ? Kind::kTurnHalves
                                                         : Kind::kTurnAdjacent;
    const auto [device_cells, cosines, sines] =
        gpu_.Upload<3>({Bytes(list), std::as_bytes(prepared.cosines()),
                        std::as_bytes(prepared.sines())});
    Check(ShiftRows(layer.key.rows, As<int>(device_cells), std::ssize(list),
                    {.kind = kind,
                     .offset = static_cast<float>(offset),
                     .pairs = AsInt(prepared.cosines().size() / 2),
                     .cosines = As<float>(cosines),
                     .sines = As<float>(sines)},
                    gpu_.stream()),
          "shifting rows");
  }
}

// The stored rows of the cells, in host memory.
std::vector<std::byte> DeviceMemory::Gather(const Tensor& from,
                                            std::span<const int> cells) {
  std::vector<std::byte> rows(Product(from.row_bytes(), cells.size()));
  const std::shared_ptr<std::byte> gathered = gpu_.Allocate(rows.size());
  const auto [device_cells] = gpu_.Upload<1>({std::as_bytes(cells)});
  Check(GatherRows(from.rows, As<int>(device_cells), std::ssize(cells),
                   gathered.get(), gpu_.stream()),
        "gathering rows");
  gpu_.Download(gathered.get(), rows);
  return rows;
}

void DeviceMemory::LoadKeys(int layer, const Selection& cells,
                            std::span<float> rows) {
  if (rows.empty()) return;
  const Tensor& from = layers_.at(layer).key;
  const std::vector<std::byte> stored = Gather(from, ListOf(cells));
  if (from.rows.dtype == DType::kF32) {
    std::memcpy(rows.data(), stored.data(), rows.size_bytes());
  } else {
    WidenToF32(from.rows.dtype, stored.data(), rows.data(), rows.size());
  }
}

void DeviceMemory::StoreKeys(int layer, const Selection& cells,
                             std::span<const float> rows) {
  if (rows.empty()) return;
  const Tensor& to = layers_.at(layer).key;
  const std::vector<int> list = ListOf(cells);
  std::vector<std::byte> stored;
  if (to.rows.dtype == DType::kF32) {
    const auto bytes = std::as_bytes(rows);
    stored.assign(bytes.begin(), bytes.end());
  } else {
    stored = Gather(to, list);
    StoreChanged(to.rows.dtype, rows, stored.data());
  }
  const auto [device_rows, device_cells] =
      gpu_.Upload<2>({Bytes(stored), Bytes(list)});
  Check(
      PutRows(DenseView(device_rows, to.rows.dtype,
                        {to.rows.head_dim, to.rows.heads, std::ssize(list), 1}),
              As<int>(device_cells), to.rows, gpu_.stream()),
      "storing rows");
}

KvView DeviceMemory::Rows(int layer, CellSpan cells) {
  Layer& rows = layers_.at(layer);
  if (gpu_.host_views()) {
    return {.key = rows.key.Show(gpu_, cells),
            .value = rows.value.Show(gpu_, cells),
            .mask = {},
            .first_cell = AsInt(cells.first)};
  }
  return {.key = rows.key.View(cells),
          .value = rows.value.View(cells),
          .mask = {},
          .first_cell = AsInt(cells.first),
          .device = Device::kCuda,
          .stream = gpu_.stream()};
}

KvView DeviceMemory::HostRows(int layer) {
  const Layer& rows = layers_.at(layer);
  return {.key = rows.key.Load(gpu_, host_rows_[0]),
          .value = rows.value.Load(gpu_, host_rows_[1]),
          .mask = {},
          .first_cell = 0};
}

// Slots -----------------------------------------------------------------------

std::shared_ptr<std::byte> DeviceSlotMemory::Allocate(std::size_t bytes) {
  return gpu_.AllocateZeroed(bytes);
}

void DeviceSlotMemory::Store(const TensorView& from, std::byte* to) {
  const TensorView rows = gpu_.Holds(from) ? from : gpu_.StageCopy(from);
  Check(CopyDense(rows, to, gpu_.stream()), "storing a slot");
}

TensorView DeviceSlotMemory::Mirrored(const TensorView& view) {
  // The address is one that Allocate returned.
  auto* data = static_cast<std::byte*>(const_cast<void*>(view.data));
  return mirrors_[data].Show(gpu_, view, data,
                             DenseBytes(view.dtype, view.shape));
}

KvView DeviceSlotMemory::Show(const TensorView& key, const TensorView& value) {
  if (gpu_.host_views()) {
    return SlotMemory::Show(Mirrored(key), Mirrored(value));
  }
  KvView view = SlotMemory::Show(key, value);
  view.device = Device::kCuda;
  view.stream = gpu_.stream();
  return view;
}

DenseTensor DeviceSlotMemory::Load(const TensorView& view) const {
  DenseTensor loaded{view.dtype, view.shape, {}};
  loaded.bytes.resize(DenseBytes(view.dtype, view.shape));
  gpu_.Download(static_cast<const std::byte*>(view.data), loaded.bytes);
  return loaded;
}

// Pools -----------------------------------------------------------------------

std::byte* DevicePoolMemory::Allocate(std::size_t bytes) {
  buffers_.push_back({gpu_.AllocateZeroed(bytes), bytes, {}});
  return buffers_.back().memory.get();
}

void DevicePoolMemory::Store(std::span<const int> blocks, int start,
                             const TensorView& key, const PoolRows& keys,
                             const TensorView& value, const PoolRows& values) {
  const bool by_head = keys.layout == PagedLayout::kHeadMajor;
  const auto size = AsInt(keys.block_size);
  // In the head-major layout, PutRows stores the rows of one head at a time. A
  // block begins with the rows of its first head.
  const int step = by_head ? size * AsInt(keys.heads) : size;
  cells_.clear();
  for (int i = 0; i < AsInt(key.shape[2]); ++i) {
    const int position = start + i;
    cells_.push_back(At(blocks, position / size) * step + position % size);
  }
  device_cells_.Send(gpu_, cells_);
  const auto put = [&](const TensorView& from, const PoolRows& to) {
    const int parts = by_head ? AsInt(to.heads) : 1;
    ForEachPart(gpu_, from, [&](const TensorView& rows, std::int64_t first) {
      for (int part = 0; part < parts; ++part) {
        TensorView of_part = rows;
        of_part.data = rows.at(0, part);
        of_part.shape[1] /= parts;
        Check(PutRows(of_part, device_cells_.data() + first,
                      {.data = to.data + AsSize(part * size) * to.head_bytes(),
                       .dtype = to.dtype,
                       .layout = VLayout::kPlain,
                       .head_dim = AsInt(to.head_dim),
                       .heads = AsInt(of_part.shape[1]),
                       .cells = std::numeric_limits<int>::max()},
                      gpu_.stream()),
              "storing rows");
      }
    });
  };
  put(key, keys);
  put(value, values);
}

void DevicePoolMemory::CopyBlock(std::span<const PoolRows> tensors, int from,
                                 int to) {
  std::vector<StoredBlocks> blocks;
  std::int64_t bytes = 0;
  for (const PoolRows& rows : tensors) {
    blocks.push_back(
        {rows.data, static_cast<std::int64_t>(rows.block_bytes())});
    bytes = std::max(bytes, blocks.back().block_bytes);
  }
  const std::vector<int> pair = {from, to};
  const auto [device_blocks, device_pair] =
      gpu_.Upload<2>({Bytes(blocks), Bytes(pair)});
  Check(CopyBlocks(As<StoredBlocks>(device_blocks), Size(blocks),
                   As<int>(device_pair), 1, bytes, gpu_.stream()),
        "copying a block");
}

TensorView DevicePoolMemory::Show(const TensorView& view) {
  if (!gpu_.host_views()) return view;
  const auto* data = static_cast<const std::byte*>(view.data);
  for (Buffer& buffer : buffers_) {
    std::byte* begin = buffer.memory.get();
    if (std::less_equal<>()(begin, data) &&
        std::less<>()(data, begin + buffer.bytes)) {
      return buffer.mirror.Show(gpu_, view, begin, buffer.bytes);
    }
  }
  KVTWIN_ASSERT(false);
  return view;
}

}  // namespace kvtwin::optimized::cuda
