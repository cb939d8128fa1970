#include "props/sessions/stand_in_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/index.h"
#include "kvtwin/rows.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

// The numbers of a row: the position and the state of its token.
using Row = std::pair<std::int64_t, std::uint64_t>;

constexpr std::uint64_t kHalf = 1 << 24;  // A float holds each number below.

std::uint64_t Mix(std::uint64_t state, const std::vector<Row>& seen) {
  for (const auto& [position, seen_state] : seen) {
    const std::uint64_t numbers[] = {static_cast<std::uint64_t>(position),
                                     seen_state};
    state = HashBytes(numbers, sizeof(numbers), state);
  }
  return state % (kHalf * kHalf);
}

std::uint64_t FirstState(const SessionInput& input) {
  const std::uint64_t numbers[] = {static_cast<std::uint64_t>(input.token),
                                   input.multimodal};
  return HashBytes(numbers, sizeof(numbers), 0) % (kHalf * kHalf);
}

// K is the lower half and the position, V both halves. A shift changes the
// position alone.
Status PutStates(Cache& cache, const SessionBatch& batch,
                 const std::vector<States>& states) {
  std::vector<float> key;
  std::vector<float> value;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::uint64_t state = states[i].back();
    const auto low = static_cast<float>(state % kHalf);
    key.insert(key.end(), {low, static_cast<float>(batch.positions[i])});
    value.insert(value.end(), {low, static_cast<float>(state / kHalf)});
  }
  const auto tokens = std::ssize(states);
  return cache.Put(DenseView(key.data(), DType::kF32, {2, 1, tokens, 1}),
                   DenseView(value.data(), DType::kF32, {2, 1, tokens, 1}));
}

// Returns the rows that a token of the batch sees, by position.
std::vector<Row> Seen(const KvView& view, std::int64_t token,
                      std::string& wrong) {
  std::vector<Row> seen;
  for (std::int64_t cell = 0; cell < view.mask.shape[0]; ++cell) {
    if (!MayAttend(view.mask, cell, token)) continue;
    const float low = ElementOf<float>(view.value, 0, 0, cell);
    const float high = ElementOf<float>(view.value, 1, 0, cell);
    if (ElementOf<float>(view.key, 0, 0, cell) != low) {
      wrong = fmt::format("K and V of cell {} are of different tokens",
                          view.first_cell + cell);
    }
    seen.emplace_back(
        static_cast<std::int64_t>(ElementOf<float>(view.key, 1, 0, cell)),
        static_cast<std::uint64_t>(high) * kHalf +
            static_cast<std::uint64_t>(low));
  }
  std::ranges::sort(seen);
  return seen;
}

// The rows of a sequence up to a position.
std::vector<Row> SeenInPool(const std::vector<PagedView>& views,
                            std::int32_t position) {
  std::vector<Row> seen;
  for (const PagedView& view : views) {
    for (int i = 0; i < view.length && view.start + i <= position; ++i) {
      const float low = ElementOf<float>(view.value, 0, 0, i);
      const float high = ElementOf<float>(view.value, 1, 0, i);
      const float at = ElementOf<float>(view.key, 1, 0, i);
      seen.emplace_back(static_cast<std::int64_t>(at),
                        static_cast<std::uint64_t>(high) * kHalf +
                            static_cast<std::uint64_t>(low));
    }
  }
  return seen;
}

Sight SightOf(const CacheSpec& spec, int type) {
  Sight sight = {.window = {}, .chunk = 0, .type = type};
  if (IsWindowed(spec.kind)) sight.window = spec.window;
  if (spec.kind == Kind::kChunked) sight.chunk = spec.chunk;
  return sight;
}

}  // namespace

std::vector<Sight> SightsOf(const CacheSpec& spec) {
  std::vector<Sight> sights;
  for (int layer = 0; layer < kModelLayers; ++layer) {
    const int type = IsWrapper(spec.kind) ? layer % Size(spec.caches) : 0;
    sights.push_back(
        SightOf(IsWrapper(spec.kind) ? At(spec.caches, type) : spec, type));
  }
  return sights;
}

Computed Compute(Cache& cache, const std::vector<Sight>& sights,
                 const SessionBatch& batch) {
  Computed computed;
  std::vector<States>& states = computed.states;
  for (const SessionInput& input : batch.inputs) {
    states.push_back({FirstState(input)});
  }
  for (int layer = 0; layer < Size(sights); ++layer) {
    Status status;
    if (layer > 0 || At(sights, layer).type > 0) {
      const bool wraps = cache.UnderlyingCache() != &cache;
      if (wraps) status = cache.SetLayerType(At(sights, layer).type);
    }
    if (status.ok()) status = cache.SetLayer(layer);
    if (status.ok()) status = PutStates(cache, batch, states);
    const Result<KvView> view = cache.Get();
    if (status.ok() && !view.ok()) status = view.status();
    if (!status.ok()) {
      computed.wrong = status.ToString();
      return computed;
    }
    for (int i = 0; i < Size(states); ++i) {
      States& own = At(states, i);
      own.push_back(Mix(own.back(), Seen(*view, i, computed.wrong)));
    }
  }
  return computed;
}

Computed Compute(PagedPool& pool, PoolSlots& slots, const SessionBatch& batch) {
  Computed computed;
  std::vector<States>& states = computed.states;
  for (const SessionInput& input : batch.inputs) {
    states.push_back({FirstState(input)});
  }
  for (int layer = 0; layer < kModelLayers; ++layer) {
    Status status = slots.SetLayer(layer);
    if (status.ok()) status = PutStates(slots, batch, states);
    for (int i = 0; status.ok() && i < Size(states); ++i) {
      const int sequence = *slots.Sequence(At(batch.sequences, i));
      const auto views = pool.Views(sequence, layer);
      if (!views.ok()) {
        status = views.status();
        break;
      }
      States& own = At(states, i);
      own.push_back(
          Mix(own.back(), SeenInPool(*views, At(batch.positions, i))));
    }
    if (!status.ok()) computed.wrong = status.ToString();
    if (!status.ok()) return computed;
  }
  return computed;
}

PagedSpec PoolOf(const SessionsSpec& spec, int block_size) {
  PagedSpec pool;
  pool.block_size = block_size;
  pool.blocks = AsInt(BlocksFor(spec, block_size));
  pool.max_seq_len = spec.context;
  pool.layers = kModelLayers;
  pool.k_head_dim = 2;
  pool.v_head_dim = 2;
  pool.dtype = DType::kF32;
  return pool;
}

const States& Story::Add(const SessionInput& input) {
  const int position = size();
  inputs_.push_back(input);
  states_.push_back({FirstState(input)});
  for (int layer = 0; layer < Size(sights_); ++layer) {
    const Sight& sight = At(sights_, layer);
    int first = 0;
    if (sight.window) first = std::max(first, position - *sight.window);
    if (sight.chunk > 0) first = position - position % sight.chunk;
    std::vector<Row> seen;
    for (int i = first; i <= position; ++i) {
      seen.emplace_back(i, At(At(states_, i), layer));
    }
    States& own = states_.back();
    own.push_back(Mix(own.back(), seen));
  }
  return states_.back();
}

void Story::Erase(int begin, int end) {
  inputs_.erase(IteratorAt(inputs_, begin), IteratorAt(inputs_, end));
  states_.erase(IteratorAt(states_, begin), IteratorAt(states_, end));
}

}  // namespace kvtwin::props
