#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "props/fuzzers/fuzzers.h"
#include "props/history/rows.h"

namespace kvtwin::props {
namespace {

using CachePtr = std::unique_ptr<Cache>;

// Both twins; null if no cache can be made of the setup.
using Twins = std::array<CachePtr, 2>;

CachePtr Made(const Setup& setup, std::string_view twin) {
  Result<CachePtr> made = MakeCache(setup.spec, twin);
  if (!made.ok()) return nullptr;
  const bool ready =
      (*made)->SetConfig(setup.config).ok() && (*made)->Init(setup.init).ok();
  return ready ? std::move(*made) : nullptr;
}

Twins MadeTwins(const Setup& setup) {
  return {Made(setup, "reference"), Made(setup, "optimized")};
}

// Runs a pass of some tokens, with rows in some layers, in both caches.
void DoPass(const Pick& pick, const Setup& setup, const Twins& twins) {
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::vector<int> images;
  const int tokens = pick(1, setup.init.max_batch);
  for (int i = 0; i < tokens; ++i) {
    positions.push_back(pick(0, 7));
    sequences.push_back(pick(0, setup.init.max_sequences));
  }
  if (pick(0, 1) == 0) images.push_back(pick(0, tokens - 1));
  const bool reserve = pick(0, 7) == 0;
  const bool wrapper = IsWrapper(setup.spec.kind);
  const int types = wrapper ? Size(setup.spec.caches) : 1;
  const RowDims& rows = setup.rows;
  for (const CachePtr& cache : twins) {
    if (!cache->StartForward({positions, sequences, images}, reserve).ok()) {
      continue;
    }
    for (int layer = 0; layer < setup.layers; ++layer) {
      RowBuffer keys;
      RowBuffer values;
      if (wrapper) (void)cache->SetLayerType(layer % types);
      (void)cache->SetLayer(layer);
      (void)cache->Put(
          keys.Fill({rows.k_head_dim, rows.kv_heads, tokens, 1}, DType::kF32,
                    {RowRole::kKey, layer, 0}, false),
          values.Fill({rows.v_head_dim, rows.kv_heads, tokens, 1}, DType::kF32,
                      {RowRole::kValue, layer, 0}, false));
    }
  }
}

int DrawNumber(const Pick& pick) {
  constexpr std::array kNumbers = {0, 1,  2,  3,        4,
                                   7, 64, -1, kOpenEnd, -kOpenEnd};
  return At(kNumbers, pick(0, std::ssize(kNumbers) - 1));
}

void DamageCells(const Pick& pick, std::vector<CellEntry>& cells) {
  const int count = Size(cells);
  const int i = pick(0, count);
  if (i == count) {
    cells.push_back({DrawNumber(pick), DrawNumber(pick), DrawNumber(pick)});
    return;
  }
  CellEntry& entry = At(cells, i);
  const int number = DrawNumber(pick);
  switch (pick(0, 4)) {
    case 0:
      entry.cell = number;
      return;
    case 1:
      entry.position = number;
      return;
    case 2:
      entry.sequence = number;
      return;
    case 3:
      return void(cells.erase(cells.begin() + i));
    default:
      std::swap(entry, At(cells, pick(0, count - 1)));
  }
}

// Changes an extent alone, or with the bytes that belong to it.
void DamageTensor(const Pick& pick, DenseTensor& tensor) {
  constexpr std::int64_t kMost = 1 << 16;
  const int way = pick(0, 3);
  if (way == 0) {
    tensor.dtype = static_cast<DType>(pick(0, kDTypeNames.size() - 1));
  } else if (way == 1) {
    tensor.bytes.resize(AsSize(pick(0, 40)));
    return;
  } else {
    // Without rows a layer may have any width, but must not fill the memory.
    const bool empty = std::count(tensor.shape.begin(), tensor.shape.end(), 0);
    const int number = DrawNumber(pick);
    At(tensor.shape, pick(0, 3)) = empty ? std::min(number, 64) : number;
  }
  if (way != 3) return;
  std::int64_t elements = 1;
  for (const std::int64_t extent : tensor.shape) {
    elements *= std::clamp<std::int64_t>(extent, 0, 64);
  }
  if (elements <= kMost) {
    tensor.bytes.resize(AsSize(RunBytes(tensor.dtype, elements)));
  }
}

void Damage(const Pick& pick, CacheState& state) {
  switch (pick(0, 7)) {
    case 0:
    case 1:
      return DamageCells(pick, state.cells);
    case 2:
      return DamageTensor(pick, state.layers[pick(-1, 3)].key);
    case 3:
      return DamageTensor(pick, state.layers[pick(0, 3)].value);
    case 4:
      state.layers.erase(pick(0, 3));
      return;
    case 5: {
      const auto layer = state.layers[pick(0, 3)];
      state.layers[pick(0, 3)] = layer;
      return;
    }
    case 6:
      state.cached = pick(0, 1) == 0;
      (pick(0, 1) == 0 ? state.position : state.next_position) =
          DrawNumber(pick);
      return;
    default:
      if (state.caches.empty() || pick(0, 3) == 0) {
        state.caches.resize(AsSize(pick(0, 3)));
        return;
      }
      const auto last = Size(state.caches) - 1;
      Damage(pick, At(state.caches, pick(0, last)));
  }
}

}  // namespace

std::string FuzzSnapshot(Bytes bytes) {
  const Pick pick = PickFrom(bytes);
  const Setup setup = DrawSetup(pick, std::nullopt);
  const Twins twins = MadeTwins(setup);
  const auto& [reference, optimized] = twins;
  if (!reference || !optimized) return "";
  for (int left = pick(0, 3); left > 0; --left) DoPass(pick, setup, twins);
  const CacheState before = *reference->Snapshot();
  if (*optimized->Snapshot() != before) return "the twins' states differ";

  CacheState state = before;
  if (pick(0, 3) == 0) {  // A state of another cache.
    const Setup other = DrawSetup(pick, std::nullopt);
    const Twins others = MadeTwins(other);
    if (!others[0] || !others[1]) return "";
    DoPass(pick, other, others);
    state = *others[1]->Snapshot();
  }
  for (int left = pick(0, 3); left > 0; --left) Damage(pick, state);
  const Status by_reference = reference->Restore(state);
  const Status by_optimized = optimized->Restore(state);
  if (by_reference.ToString() != by_optimized.ToString()) {
    return fmt::format("Restore is '{}' by the reference, '{}' by optimized",
                       by_reference.ToString(), by_optimized.ToString());
  }
  const CacheState& expected = by_reference.ok() ? state : before;
  if (*reference->Snapshot() != expected)
    return "the reference is not as restored";
  if (*optimized->Snapshot() != expected) return "optimized is not as restored";
  DoPass(pick, setup, twins);
  if (*optimized->Snapshot() == *reference->Snapshot()) return "";
  return "the twins continue differently";
}

}  // namespace kvtwin::props
