// SequenceOf and WithSequence of save.h: take one sequence out of a state, and
// add it to another state (S57).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/refusals.h"
#include "core/state_checks.h"
#include "kvtwin/save.h"

namespace kvtwin {
namespace {

// Maps each held cell to the index of its row in the tensors of a state.
std::map<int, std::int64_t> RowsByCell(const CacheState& state) {
  std::map<int, std::int64_t> rows;
  for (const CellEntry& entry : state.cells) rows.try_emplace(entry.cell, 0);
  std::int64_t row = 0;
  for (auto& [cell, at] : rows) at = row++;
  return rows;
}

// A row of a tensor [.., .., rows].
struct Row {
  const DenseTensor* tensor;
  std::int64_t at;
};

// Returns a tensor of these rows one after another, with the dtype and first
// dimensions of `like`. A row without a tensor is zeros.
DenseTensor Joined(const std::vector<Row>& rows, const DenseTensor& like) {
  DenseTensor joined{like.dtype, like.shape, {}};
  joined.shape[2] = std::ssize(rows);
  const std::size_t bytes =
      DenseBytes(like.dtype, {like.shape[0], like.shape[1], 1, 1});
  joined.bytes.resize(bytes * rows.size());
  std::byte* to = joined.bytes.data();
  for (const Row& row : rows) {
    if (row.tensor != nullptr) {
      std::memcpy(to, row.tensor->bytes.data() + AsSize(row.at) * bytes, bytes);
    }
    to += bytes;
  }
  return joined;
}

bool Alike(const DenseTensor& a, const DenseTensor& b) {
  return a.dtype == b.dtype && a.shape[0] == b.shape[0] &&
         a.shape[1] == b.shape[1];
}

Result<CacheState> WithTokens(const CacheState& state, int sequence,
                              const CacheState& added, int cells) {
  const std::map<int, std::int64_t> old_rows = RowsByCell(state);
  const std::map<int, std::int64_t> new_rows = RowsByCell(added);
  CacheState both = state;
  Status status = CheckRoom(std::ssize(old_rows), cells, std::ssize(new_rows));
  if (!status.ok()) return status;
  // The new cell of each cell of `added`.
  std::map<int, int> places;
  int free = 0;
  for (const auto& [cell, row] : new_rows) {
    while (old_rows.contains(free)) ++free;
    places[cell] = free++;
  }
  for (const CellEntry& entry : added.cells) {
    both.cells.push_back({places.at(entry.cell), entry.position, sequence});
  }
  std::sort(both.cells.begin(), both.cells.end(),
            [](const CellEntry& a, const CellEntry& b) {
              return std::pair(a.cell, a.sequence) <
                     std::pair(b.cell, b.sequence);
            });
  std::set<int> layers;
  for (const auto& [layer, rows] : state.layers) layers.insert(layer);
  for (const auto& [layer, rows] : added.layers) layers.insert(layer);
  // By cell: whether its row comes from `added`, and the index of the row.
  std::map<int, std::pair<bool, std::int64_t>> sources;
  for (const auto& [cell, row] : old_rows) sources[cell] = {false, row};
  for (const auto& [cell, row] : new_rows) sources[places[cell]] = {true, row};
  for (const int layer : layers) {
    const auto of = [&](const CacheState& single) {
      const auto found = single.layers.find(layer);
      return found == single.layers.end() ? nullptr : &found->second;
    };
    const KvRows* old_layer = of(state);
    const KvRows* new_layer = of(added);
    const KvRows& like = old_layer != nullptr ? *old_layer : *new_layer;
    if (new_layer != nullptr && (!Alike(like.key, new_layer->key) ||
                                 !Alike(like.value, new_layer->value))) {
      return Invalid(
          "layer {} of the sequence has K {} of {} and V {} of {}, "
          "the state {} of {} and {} of {}",
          layer, ShapeText(new_layer->key.shape),
          DTypeName(new_layer->key.dtype), ShapeText(new_layer->value.shape),
          DTypeName(new_layer->value.dtype), ShapeText(like.key.shape),
          DTypeName(like.key.dtype), ShapeText(like.value.shape),
          DTypeName(like.value.dtype));
    }
    std::vector<Row> keys;
    std::vector<Row> values;
    for (const auto& [cell, source] : sources) {
      const KvRows* rows = source.first ? new_layer : old_layer;
      keys.push_back({rows == nullptr ? nullptr : &rows->key, source.second});
      values.push_back(
          {rows == nullptr ? nullptr : &rows->value, source.second});
    }
    both.layers[layer] = {Joined(keys, like.key), Joined(values, like.value)};
  }
  return both;
}

// Requires: a state that CheckState accepts.
CacheState Extract(const CacheState& state, int sequence) {
  CacheState single;
  for (const CacheState& part : state.caches) {
    single.caches.push_back(Extract(part, sequence));
  }
  const std::map<int, std::int64_t> rows = RowsByCell(state);
  std::vector<std::int64_t> kept;
  for (const CellEntry& entry : state.cells) {
    if (entry.sequence != sequence) continue;
    single.cells.push_back(entry);
    kept.push_back(rows.at(entry.cell));
  }
  if (kept.empty()) return single;
  for (const auto& [layer, all] : state.layers) {
    const auto of = [&](const DenseTensor& tensor) {
      std::vector<Row> chosen;
      for (const std::int64_t row : kept) chosen.push_back({&tensor, row});
      return Joined(chosen, tensor);
    };
    single.layers[layer] = {of(all.key), of(all.value)};
  }
  return single;
}

}  // namespace

CacheState SequenceOf(const CacheState& state, int sequence) {
  return CheckState(state).ok() ? Extract(state, sequence) : CacheState();
}

Result<CacheState> WithSequence(const CacheState& state, int sequence,
                                const CacheState& added,
                                std::span<const int> cells) {
  const std::size_t caches = std::max<std::size_t>(1, state.caches.size());
  if (added.caches.size() != state.caches.size() || cells.size() != caches) {
    return Invalid("the state is of {} caches, the sequence of {}, cells of {}",
                   caches, std::max<std::size_t>(1, added.caches.size()),
                   cells.size());
  }
  Status status = CheckState(state);
  if (status.ok()) status = CheckAdded(sequence, added);
  if (!status.ok()) return status;
  CacheState result = state;
  for (std::size_t i = 0; i < caches; ++i) {
    const bool wrapper = !state.caches.empty();
    const CacheState& part = wrapper ? state.caches[i] : state;
    for (const CellEntry& entry : part.cells) {
      if (entry.sequence == sequence) {
        return Invalid("the state has a sequence {} already", sequence);
      }
    }
    const CacheState& more = wrapper ? added.caches[i] : added;
    if (cells[i] < 0) {
      return Invalid("cells[{}] is {}, it must be at least 0", i, cells[i]);
    }
    if (more.cells.empty()) continue;
    Result<CacheState> both = WithTokens(part, sequence, more, cells[i]);
    if (!both.ok()) return both;
    (wrapper ? result.caches[i] : result) = std::move(*both);
  }
  return result;
}

}  // namespace kvtwin
