#include "props/history/misuse.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <limits>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr StatusCode kUntimely = StatusCode::kFailedPrecondition;

// The actual answer, and the expected code.
struct Answer {
  Status status;
  StatusCode expected = kInvalid;
};

Status Start(Cache& cache, const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences,
             const std::vector<int>& multimodal = {}) {
  return cache.StartForward({positions, sequences, multimodal}, false);
}

// A Put of rows whose shapes differ from the right shapes in one place.
struct Wrong {
  std::int64_t k_dim = 0, k_heads = 0, v_dim = 0, v_heads = 0, tokens = 0;
  std::int64_t fourth = 1;
  DType dtype = DType::kF32;
  bool no_key = false;
  bool no_value = false;
  bool huge = false;  // Strides of 0, more elements than can be counted.
};
Status PutWrong(Cache& cache, const MisuseContext& context,
                const Wrong& wrong) {
  const RowDims& rows = context.setup.rows;
  const std::int64_t tokens = context.pass_tokens + wrong.tokens;
  const Shape k = {rows.k_head_dim + wrong.k_dim, rows.kv_heads + wrong.k_heads,
                   tokens, 1};
  const Shape v = {rows.v_head_dim + wrong.v_dim, rows.kv_heads + wrong.v_heads,
                   tokens, wrong.fourth};
  // Large enough for the right shapes, so that extents of zero have memory too.
  const std::vector<std::byte> memory(std::size_t{1} << 16);
  TensorView key = DenseView(memory.data(), wrong.dtype, k);
  TensorView value = DenseView(memory.data(), wrong.dtype, v);
  if (wrong.no_key) key.data = nullptr;
  if (wrong.no_value) value.data = nullptr;
  if (wrong.huge) {
    key.shape = {1 << 30, 1 << 30, 16, 1};
    key.stride = {0, 0, 0, 0};
  }
  return cache.Put(key, value);
}

// Damages a snapshot of the cache, or that of a wrapper's last cache in it.
// Restore must refuse the result.
Answer RestoreDamaged(Cache& cache,
                      const std::function<void(CacheState&)>& damage) {
  Result<CacheState> state = cache.Snapshot();
  if (!state.ok()) return {state.status(), StatusCode::kNotSupported};
  damage(state->caches.empty() ? *state : state->caches.back());
  return {cache.Restore(*state)};
}

// Returns the expected code of a Put whose arguments are wrong.
StatusCode DueForPut(const MisuseContext& context) {
  return context.pass_tokens == 0 ? kUntimely : kInvalid;
}

using TryFn = Answer (*)(Cache&, const MisuseContext&);
struct Entry {
  std::string_view name;
  TryFn run;
  bool sets_causal = false;  // Calls SetCausal.
};

using Context = MisuseContext;
// Entries that are legal in the context (for an encoder, say) try an empty
// batch.
Answer EmptyBatch(Cache& cache, const Context&) {
  return {Start(cache, {}, {})};
}

constexpr auto
    kMisuses =
        std::
            to_array<Entry>(
                {
                    {"an empty batch", EmptyBatch},
                    {"more positions than sequences",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {0, 1}, {0})};
                     }},
                    {"more sequences than positions",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {0}, {0, 1})};
                     }},
                    {"a batch larger than max_batch",
                     [](Cache& c, const Context& at) -> Answer {
                       const auto n = AsSize(at.setup.init.max_batch) + 1;
                       return {Start(c, std::vector<std::int32_t>(n),
                                     std::vector<int>(n))};
                     }},
                    {"a negative position",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {-1}, {0})};
                     }},
                    {"a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {0}, {-1})};
                     }},
                    {"a multimodal index beyond the batch",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {0}, {0}, {1})};
                     }},
                    {"a negative multimodal index",
                     [](Cache& c, const Context&) -> Answer {
                       return {Start(c, {0}, {0}, {-1})};
                     }},
                    {"Remove of a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.Remove(-1, 0, 1)};
                     }},
                    {"Remove from a negative position",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.Remove(0, -1, 1)};
                     }},
                    {"Remove with begin > end",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.Remove(0, 2, 1)};
                     }},
                    {"CopyPrefix from a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.CopyPrefix(-1, 0, 1)};
                     }},
                    {"CopyPrefix to a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.CopyPrefix(0, -1, 1)};
                     }},
                    {"CopyPrefix of a negative length",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.CopyPrefix(0, 1, -1)};
                     }},
                    {"CanResume of a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.CanResume(-1, 0).status()};
                     }},
                    {"CanResume at a negative position",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.CanResume(0, -1).status()};
                     }},
                    {"a negative layer",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.SetLayer(-1)};
                     }},
                    {"a negative layer type",
                     [](Cache& c, const Context& at) -> Answer {
                       const bool wrapper = IsWrapper(at.setup.spec.kind);
                       return {c.SetLayerType(-1),
                               wrapper ? kInvalid : StatusCode::kNotSupported};
                     }},
                    {"a layer type that the wrapper does not have",
                     [](Cache& c, const Context& at) -> Answer {
                       const bool wrapper = IsWrapper(at.setup.spec.kind);
                       return {c.SetLayerType(Size(at.setup.spec.caches)),
                               wrapper ? kInvalid : StatusCode::kNotSupported};
                     }},
                    {"SetCausal of an index beyond the batch",
                     [](Cache& c, const Context& at) -> Answer {
                       const std::array<int, 2> except = {0, at.pass_tokens};
                       if (at.pass_tokens == 0)
                         return {c.SetCausal(except), kUntimely};
                       return {
                           c.SetCausal(except),
                           at.no_causal ? StatusCode::kNotSupported : kInvalid};
                     },
                     /*sets_causal=*/true},
                    {"SetCausal of a negative index",
                     [](Cache& c, const Context& at) -> Answer {
                       const std::array<int, 1> except = {-1};
                       if (at.pass_tokens == 0)
                         return {c.SetCausal(except), kUntimely};
                       return {
                           c.SetCausal(except),
                           at.no_causal ? StatusCode::kNotSupported : kInvalid};
                     },
                     /*sets_causal=*/true},
                    {"Init a second time",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.Init({DType::kF32, 1, 1, 1}), kUntimely};
                     }},
                    {"SetConfig after Init",
                     [](Cache& c, const Context&) -> Answer {
                       return {c.SetConfig({}), kUntimely};
                     }},
                    {"Get of a layer that was never put",
                     [](Cache& c, const Context& at) -> Answer {
                       Status status = c.SetLayer(1 << 20);
                       if (status.ok()) status = c.Get().status();
                       if (!c.SetLayer(at.layer).ok()) return {};
                       return {status, kUntimely};
                     }},
                    {"Put without K",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at, {.no_key = true}),
                               DueForPut(at)};
                     }},
                    {"Put without V",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at, {.no_value = true}),
                               DueForPut(at)};
                     }},
                    {"Put of K with an extent of zero",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at,
                                        {.k_dim = -at.setup.rows.k_head_dim}),
                               DueForPut(at)};
                     }},
                    {"Put of V with an extent of zero",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at,
                                        {.v_dim = -at.setup.rows.v_head_dim}),
                               DueForPut(at)};
                     }},
                    {"Put of more elements than can be counted",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at, {.huge = true}), DueForPut(at)};
                     }},
                    {"Put with a fourth dimension",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder) return EmptyBatch(c, at);
                       return {PutWrong(c, at, {.fourth = 2}), DueForPut(at)};
                     }},
                    {"Put of fewer tokens than the batch has",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder || at.pass_tokens < 2)
                         return EmptyBatch(c, at);
                       return {PutWrong(c, at, {.tokens = -1}), DueForPut(at)};
                     }},
                    {"Put of more tokens than the batch has",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder) return EmptyBatch(c, at);
                       return {PutWrong(c, at, {.tokens = 1}), DueForPut(at)};
                     }},
                    {"Put of other dimensions than the layer has",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder || !at.layer_put)
                         return EmptyBatch(c, at);
                       return {PutWrong(c, at, {.v_dim = 1}), DueForPut(at)};
                     }},
                    {"Put with fewer heads in V than in K",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder) return EmptyBatch(c, at);
                       return {PutWrong(c, at, {.k_heads = 1}), DueForPut(at)};
                     }},
                    {"Put of f16 rows into an f32 cache",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder || at.setup.init.dtype == DType::kF16) {
                         return EmptyBatch(c, at);
                       }
                       return {PutWrong(c, at, {.dtype = DType::kF16}),
                               DueForPut(at)};
                     }},
                    {"Put of bf16 rows into another cache",
                     [](Cache& c, const Context& at) -> Answer {
                       if (at.encoder || at.setup.init.dtype == DType::kBF16) {
                         return EmptyBatch(c, at);
                       }
                       return {PutWrong(c, at, {.dtype = DType::kBF16}),
                               DueForPut(at)};
                     }},
                    {"Put of rows of bits",
                     [](Cache& c, const Context& at) -> Answer {
                       return {PutWrong(c, at, {.dtype = DType::kBits}),
                               DueForPut(at)};
                     }},
                    {"Restore of a cell that is not there",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells.push_back({kOpenEnd, 0, 0});
                       });
                     }},
                    {"Restore of a negative position",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells = {{0, -1, 0}};
                       });
                     }},
                    {"Restore of a negative sequence",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells = {{0, 0, -1}};
                       });
                     }},
                    {"Restore of a cell at two positions",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells = {{0, 1, 0}, {0, 2, 1}};
                       });
                     }},
                    {"Restore of cells out of order",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells = {{0, 1, 1}, {0, 1, 0}};
                       });
                     }},
                    {"Restore of a membership that is there twice",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cells = {{0, 1, 0}, {0, 1, 0}};
                       });
                     }},
                    {"Restore of rows with a byte too many",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.layers[0].key.bytes.push_back({});
                       });
                     }},
                    {"Restore of rows of bits",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.layers[0].key.dtype = DType::kBits;
                       });
                     }},
                    {"Restore of rows without heads",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.layers[0].value.shape[1] = 0;
                       });
                     }},
                    {"Restore of rows of too few cells",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.layers[0] = {{DType::kF32, {1, 1, -1, 1}, {}}, {}};
                       });
                     }},
                    {"Restore of a negative layer",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(
                           c, [](CacheState& s) { s.layers[-1]; });
                     }},
                    {"Restore of more bytes than can be counted",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.layers[0].key.shape = {kOpenEnd, kOpenEnd, kOpenEnd,
                                                  1};
                       });
                     }},
                    {"Restore of a wrapper's state into one of its caches",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(
                           c, [](CacheState& s) { s.caches.emplace_back(); });
                     }},
                    {"Restore of a slot with nothing in it",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(c, [](CacheState& s) {
                         s.cached = true;
                         s.layers.clear();
                       });
                     }},
                    {"Restore of an encoder's negative position",
                     [](Cache& c, const Context&) -> Answer {
                       return RestoreDamaged(
                           c, [](CacheState& s) { s.next_position = -1; });
                     }},
                    // A well-formed state of a larger cache.
                    {"Restore of more tokens than there are cells",
                     [](Cache& c, const Context&) -> Answer {
                       const int cells = c.CellCount();
                       return RestoreDamaged(c, [&](CacheState& s) {
                         s.cells.clear();
                         s.layers.clear();
                         for (int i = 0; i < 1024 || i <= cells; ++i) {
                           s.cells.push_back({i, i, 0});
                         }
                       });
                     }},
                });

// A sequence that histories do not use: it has neither tokens nor drafts.
constexpr int kUnused = 1 << 20;

Status Draft(Cache& cache, const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences,
             const std::vector<int>& parents) {
  return cache.StartForward({positions, sequences, {}, parents}, false);
}

// The first cache that refuses a Commit decides.
Answer Commit(Cache& cache, const Context& at, int seq,
              const std::vector<int>& path) {
  const CacheSpec& spec = at.setup.spec;
  const CacheSpec& first = spec.caches.empty() ? spec : spec.caches[0];
  const bool no_drafts = first.kind == Kind::kEncoder ||
                         (first.kind == Kind::kRecurrent && first.drafts == 0);
  const bool refuses = no_drafts && seq >= 0;
  return {cache.Commit(seq, path),
          refuses ? StatusCode::kNotSupported : kInvalid};
}

const auto kDraftMisuses = std::to_array<Entry>({
    {"a batch with more parents than tokens",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0}, {kUnused}, {-1, -1})};
     }},
    {"a parent below -2",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0}, {kUnused}, {-3})};
     }},
    {"a draft that follows a draft that is not there",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0}, {0}, {1 << 20})};
     }},
    {"a draft that follows itself",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0}, {kUnused}, {0})};
     }},
    {"a draft that follows a later draft",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {1, 0}, {kUnused, kUnused}, {1, -1})};
     }},
    {"siblings at two positions",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {3, 4}, {kUnused, kUnused}, {-1, -1})};
     }},
    {"a draft that leaves out a position",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0, 2}, {kUnused, kUnused}, {-1, 0})};
     }},
    {"drafts and ordinary tokens of one sequence",
     [](Cache& c, const Context&) -> Answer {
       return {Draft(c, {0, 1}, {kUnused, kUnused}, {-1, -2})};
     }},
    {"Commit of a negative sequence",
     [](Cache& c, const Context& at) { return Commit(c, at, -1, {}); }},
    {"Commit of a draft that is not there",
     [](Cache& c, const Context& at) { return Commit(c, at, kUnused, {0}); }},
    {"Commit of a negative draft",
     [](Cache& c, const Context& at) { return Commit(c, at, 0, {-1}); }},
    {"Commit of a draft twice",
     [](Cache& c, const Context& at) {
       return Commit(c, at, 0, {0, 0});
     }},
});

// Returns a hash of everything that a caller can see.
std::uint64_t Fingerprint(Cache& cache) {
  std::vector<CellEntry> cells;
  cache.ListCells(cells);
  const auto batch = cache.BatchCells();
  std::uint64_t hash =
      HashBytes(cells.data(), cells.size() * sizeof(cells[0]), 0);
  const auto add = [&](const void* data, std::size_t size) {
    hash = HashBytes(data, size, hash);
  };
  add(batch.data(), batch.size_bytes());
  const Result<KvView> view = cache.Get();
  if (!view.ok()) return hash;
  add(&view->first_cell, sizeof(view->first_cell));
  for (const TensorView* tensor : {&view->key, &view->value, &view->mask}) {
    if (tensor->data == nullptr) continue;
    const DenseTensor copy = CopyOf(*tensor, tensor->dtype);
    add(copy.bytes.data(), copy.bytes.size());
    add(&copy.shape, sizeof(copy.shape));
  }
  return hash;
}

}  // namespace

int MisuseCount() { return Size(kMisuses); }

int DraftMisuseCount() { return Size(kDraftMisuses); }

namespace {

const Entry& EntryOf(int which) {
  if (which < kDraftMisuse) return At(kMisuses, which % MisuseCount());
  return At(kDraftMisuses, (which - kDraftMisuse) % DraftMisuseCount());
}

}  // namespace

std::string_view MisuseName(int which) { return EntryOf(which).name; }

bool MisuseSetsCausal(int which) { return EntryOf(which).sets_causal; }

std::optional<std::string> TryMisuse(Cache& cache, int which,
                                     const MisuseContext& context) {
  const Entry& entry = EntryOf(which);
  const std::uint64_t before = Fingerprint(cache);
  const Answer answer = entry.run(cache, context);
  if (answer.status.code() != answer.expected) {
    return fmt::format("{} is '{}', expected {}", entry.name,
                       answer.status.ToString(), StatusName(answer.expected));
  }
  if (answer.status.message().empty()) {
    return fmt::format("{} is refused without a message", entry.name);
  }
  if (Fingerprint(cache) != before) {
    return fmt::format("{} is refused, but changes the cache", entry.name);
  }
  return std::nullopt;
}

std::optional<std::string> MisuseOutsideOfLife(Cache& cache) {
  const float element = 0;
  const TensorView row = DenseView(&element, DType::kF32, {1, 1, 1, 1});
  struct Refusal {
    std::string_view name;
    Status status;
    bool optional = false;  // A cache may lack the call.
  };
  const std::array<Refusal, 17> refusals = {{
      {"SetLayer", cache.SetLayer(0)},
      {"StartForward", Start(cache, {0}, {0})},
      {"SetCausal", cache.SetCausal({})},
      {"Put", cache.Put(row, row)},
      {"Get", cache.Get().status()},
      {"CopyPrefix", cache.CopyPrefix(0, 1, 1)},
      {"CanResume", cache.CanResume(0, 0).status()},
      {"ResumeBefore", cache.ResumeBefore(0, 0).status()},
      {"Remove", cache.Remove(0, 0, 1)},
      {"SetLayerType", cache.SetLayerType(0)},
      {"EncoderCached", cache.EncoderCached().status()},
      {"Snapshot", cache.Snapshot().status(), true},
      {"Restore", cache.Restore({}), true},
      {"SnapshotOf", cache.SnapshotOf(0).status(), true},
      {"AddSequence", cache.AddSequence(0, {}), true},
      {"Commit", cache.Commit(0, {}), true},
      {"Checkpoint", cache.Checkpoint(0), true},
  }};
  for (const auto& [name, status, optional] : refusals) {
    if (status.code() == kUntimely && !status.message().empty()) continue;
    if (optional && status.code() == StatusCode::kNotSupported) continue;
    return fmt::format("{} is '{}', expected {}", name, status.ToString(),
                       StatusName(kUntimely));
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
