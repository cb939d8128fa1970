#include "core/state_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "core/json_line.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

// Checks that a tensor of a state has all its bytes and is not too large.
Status CheckOwned(std::string_view name, const DenseTensor& tensor) {
  const bool empty = tensor.shape[2] == 0;  // No rows yet.
  Shape shape = tensor.shape;
  if (empty) shape[2] = 1;
  Status status = CheckShape(name, shape, tensor.dtype);
  if (!status.ok()) return status;
  const std::size_t bytes = empty ? 0 : DenseBytes(tensor.dtype, tensor.shape);
  if (bytes == tensor.bytes.size()) return {};
  return Invalid("{} has shape {} and {} bytes, which do not match", name,
                 ShapeText(tensor.shape), tensor.bytes.size());
}

// Checks the state of a cache that is not a wrapper.
Status CheckPart(const CacheState& state) {
  Status status = CheckSlots(state);
  if (status.ok()) status = CheckCells(state, std::numeric_limits<int>::max());
  if (!status.ok()) return status;
  const std::int64_t held = CountHeld(state.cells);
  const bool encoder = IsOfEncoder(state);
  if (encoder && held > 0) {
    return Invalid("the state is of an encoder, and has {} cells", held);
  }
  for (const auto& [layer, rows] : state.layers) {
    status = CheckTensors(layer, rows);
    if (!status.ok()) return status;
    // An encoder has slots of rows, whatever their shapes.
    const bool put = rows.key.shape[2] > 0 && rows.value.shape[2] > 0;
    if (encoder ? put : AreRowsOf(rows, held)) continue;
    return Invalid("layer {} of the state has K {} and V {}, of {} cells",
                   layer, ShapeText(rows.key.shape),
                   ShapeText(rows.value.shape), held);
  }
  return {};
}

}  // namespace

Status CheckShape(std::string_view name, const Shape& shape, DType dtype) {
  if (Status status = CheckRowDType(name, dtype); !status.ok()) return status;
  // The bytes of one element; for block dtypes an upper bound.
  std::int64_t bytes = IsBlockDType(dtype) ? 2 : RunBytes(dtype, 1);
  bool too_large = false;
  for (const std::int64_t extent : shape) {
    if (extent < 1) {
      return Invalid("{} has shape {}, every extent must be at least 1", name,
                     ShapeText(shape));
    }
    too_large = too_large ||
                extent > std::numeric_limits<std::int32_t>::max() ||
                __builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (too_large) {
    return Invalid("{} has shape {}, which is too large", name,
                   ShapeText(shape));
  }
  return CheckWholeBlocks(name, shape[0], dtype);
}

std::int64_t CountHeld(const std::vector<CellEntry>& entries) {
  std::int64_t held = 0;
  ForEachHeld(entries, [&](int) { ++held; });
  return held;
}

Status CheckCells(const CacheState& state, int cells) {
  const CellEntry* before = nullptr;
  for (const CellEntry& entry : state.cells) {
    const auto& [cell, position, sequence] = entry;
    if (cell < 0 || cell >= cells) {
      return Invalid("the state has cell {}, a cell here is 0 to {}", cell,
                     cells - 1);
    }
    Status status = NotNegative("a position of the state", position);
    if (status.ok()) status = NotNegative("a sequence of the state", sequence);
    if (!status.ok()) return status;
    const bool same = before != nullptr && before->cell == cell;
    if (before != nullptr &&
        (before->cell > cell || (same && before->sequence >= sequence))) {
      return Invalid("cell {}, sequence {} of the state is out of order", cell,
                     sequence);
    }
    if (same && before->position != position) {
      return Invalid("cell {} of the state has positions {} and {}", cell,
                     before->position, position);
    }
    before = &entry;
  }
  return {};
}

Status CheckSlots(const CacheState& state) {
  Status status = NotNegative("position of the state", state.position);
  if (status.ok()) {
    status = NotNegative("next_position of the state", state.next_position);
  }
  if (!status.ok() || !state.cached || !state.layers.empty()) return status;
  return Invalid("the state is of an encoder that caches nothing");
}

Status CheckTensors(int layer, const KvRows& rows) {
  Status status = NotNegative("a layer of the state", layer);
  if (status.ok()) status = CheckOwned("a key of the state", rows.key);
  if (status.ok()) status = CheckOwned("a value of the state", rows.value);
  return status;
}

bool HasWholeTensors(const CacheState& state) {
  return std::ranges::all_of(
             state.layers,
             [](const auto& layer) {
               return CheckTensors(layer.first, layer.second).ok();
             }) &&
         std::ranges::all_of(state.caches, HasWholeTensors);
}

bool AreRowsOf(const KvRows& rows, std::int64_t held) {
  const Shape& key = rows.key.shape;
  const Shape& value = rows.value.shape;
  return key[1] == value[1] && key[2] == held && value[2] == held &&
         key[3] == 1 && value[3] == 1;
}

bool HasSlots(const CacheState& state) {
  return state.cached || state.position != 0 || state.next_position != 0;
}

bool IsOfEncoder(const CacheState& state) {
  const auto has_rows = [](const auto& layer) {
    return layer.second.key.shape[2] > 0;
  };
  return HasSlots(state) ||
         (state.cells.empty() && std::ranges::any_of(state.layers, has_rows));
}

bool IsBare(const CacheState& state) {
  return state.cells.empty() && state.layers.empty() && !HasSlots(state);
}

Status CheckState(const CacheState& state) {
  if (state.caches.empty()) return CheckPart(state);
  if (!IsBare(state)) {
    return Invalid("the state is of a wrapper, and has more than its caches");
  }
  for (const CacheState& part : state.caches) {
    if (!part.caches.empty()) {
      return Invalid("the state is of a wrapper in a wrapper");
    }
    if (Status status = CheckPart(part); !status.ok()) return status;
  }
  return {};
}

Status CheckStates(const std::vector<CellEntry>& entries) {
  std::set<std::pair<int, std::int32_t>> known;
  for (const auto& [cell, position, sequence] : entries) {
    if (known.insert({sequence, position}).second) continue;
    return Invalid("the state has two cells of sequence {} at position {}",
                   sequence, position);
  }
  return {};
}

Status CheckAdded(int sequence, const CacheState& added) {
  Status status = NotNegative("sequence", sequence);
  if (status.ok()) status = CheckState(added);
  if (!status.ok()) return status;
  std::set<int> sequences;
  const auto collect = [&](const CacheState& state) {
    for (const CellEntry& entry : state.cells) sequences.insert(entry.sequence);
  };
  collect(added);
  std::ranges::for_each(added.caches, collect);
  if (sequences.size() < 2) return {};
  return Invalid("what is added as sequence {} is of several: {} and {}{}",
                 sequence, *sequences.begin(), *std::next(sequences.begin()),
                 sequences.size() > 2 ? ", ..." : "");
}

Status CheckModel(std::string_view model) {
  if (IsUtf8(std::string(model))) return {};
  return Invalid("model is '{}', it must be UTF-8", Printable(model, 200));
}

Status CheckRoom(std::int64_t held, std::int64_t cells, std::int64_t tokens) {
  if (tokens <= cells - held) return {};
  return {StatusCode::kCacheFull,
          fmt::format("{} of {} cells are held, the sequence has {} tokens",
                      held, cells, tokens)};
}

}  // namespace kvtwin
