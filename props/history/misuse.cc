#include "props/history/misuse.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/hash.h"
#include "props/history/abilities.h"

namespace kvtwin::props {
namespace {

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr StatusCode kUntimely = StatusCode::kFailedPrecondition;

// The actual answer, and the expected code.
struct Answer {
  Answer(Status status, StatusCode expected = kInvalid)  // NOLINT: implicit.
      : status(std::move(status)), expected(expected) {}
  Status status;
  StatusCode expected;
};

using Context = MisuseContext;

Status Start(Cache& cache, const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences,
             const std::vector<int>& multimodal = {}) {
  return cache.StartForward({positions, sequences, multimodal}, false);
}

Answer SetLayerType(Cache& cache, const Context& at, int type) {
  const bool wrapper = IsWrapper(at.setup.spec.kind);
  return {cache.SetLayerType(type),
          wrapper ? kInvalid : StatusCode::kNotSupported};
}

Answer SetCausal(Cache& cache, const Context& at,
                 const std::vector<int>& except) {
  return {cache.SetCausal(except), at.pass_tokens == 0 ? kUntimely
                                   : at.no_causal ? StatusCode::kNotSupported
                                                  : kInvalid};
}

// A Put of rows whose shapes differ from the right shapes in one place.
struct Wrong {
  std::int64_t k_heads = 0, v_dim = 0, tokens = 0;
  std::int64_t fourth = 1;
  DType dtype = DType::kF32;
  bool zero_k = false, zero_v = false;  // The head_dim is 0.
  bool no_key = false;
  bool no_value = false;
  bool huge = false;  // Strides of 0, more elements than can be counted.
};
Status PutWrong(Cache& cache, const Context& at, const Wrong& wrong) {
  const RowDims& rows = at.setup.rows;
  const std::int64_t tokens = at.pass_tokens + wrong.tokens;
  const Shape k = {wrong.zero_k ? 0 : rows.k_head_dim,
                   rows.kv_heads + wrong.k_heads, tokens, 1};
  const Shape v = {wrong.zero_v ? 0 : rows.v_head_dim + wrong.v_dim,
                   rows.kv_heads, tokens, wrong.fourth};
  // Large enough for the right shapes, so that extents of zero have memory too.
  const std::vector<std::byte> memory(std::size_t{1} << 16);
  TensorView key = DenseView(memory.data(), wrong.dtype, k);
  TensorView value = DenseView(memory.data(), wrong.dtype, v);
  if (wrong.no_key) key.data = nullptr;
  if (wrong.no_value) value.data = nullptr;
  if (wrong.huge) {
    key.shape = {1 << 30, 1 << 30, 16, 1};
    key.stride = {0, 0, 0, 1};
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
  return cache.Restore(*state);
}

bool IsEncoder(const Context& at) { return at.encoder; }

// Whether a cache has the call that a misuse makes.
using HasCall = bool (*)(const Abilities&);

bool HasRemove(const Abilities& can) {
  return can.Can(KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_REMOVE_MIDDLE);
}
bool HasCopyPrefix(const Abilities& can) {
  return can.Can(KVTWIN_CAN_COPY_PREFIX);
}
bool HasCanResume(const Abilities& can) { return can.can_resume; }
bool HasSetCausal(const Abilities& can) { return can.set_causal; }

// A misuse: a call, a Put of wrong rows, or a Restore of a damaged state.
struct Entry {
  using Call = Answer (*)(Cache&, const Context&);
  using Damage = void (*)(CacheState&);
  using Legal = bool (*)(const Context&);

  Entry(std::string_view name, Call call, HasCall has_call = nullptr)
      : name(name), call(call), has_call(has_call) {}
  Entry(std::string_view name, Damage damage) : name(name), damage(damage) {}
  // Where `legal` says that the rows are not wrong, it tries an empty batch.
  Entry(std::string_view name, const Wrong& rows, Legal legal = nullptr)
      : name(name), rows(rows), legal(legal) {}

  Answer Run(Cache& cache, const Context& at) const {
    if (call != nullptr) return call(cache, at);
    if (damage != nullptr) return RestoreDamaged(cache, damage);
    if (legal != nullptr && legal(at)) return Start(cache, {}, {});
    return {PutWrong(cache, at, rows),
            at.pass_tokens == 0 ? kUntimely : kInvalid};
  }

  std::string_view name;
  Call call = nullptr;
  HasCall has_call = nullptr;  // Null: every cache has the call.
  Damage damage = nullptr;
  Wrong rows = {};
  Legal legal = nullptr;
};

const std::vector<Entry> kMisuses = {
    {"an empty batch",
     [](auto& c, auto&) -> Answer { return Start(c, {}, {}); }},
    {"more positions than sequences",
     [](auto& c, auto&) -> Answer {
       return Start(c, {0, 1}, {0});
     }},
    {"more sequences than positions",
     [](auto& c, auto&) -> Answer {
       return Start(c, {0}, {0, 1});
     }},
    {"a batch larger than max_batch",
     [](auto& c, auto& at) -> Answer {
       const auto n = AsSize(at.setup.init.max_batch) + 1;
       return Start(c, std::vector<std::int32_t>(n), std::vector<int>(n));
     }},
    {"a negative position",
     [](auto& c, auto&) -> Answer { return Start(c, {-1}, {0}); }},
    {"a negative sequence",
     [](auto& c, auto&) -> Answer { return Start(c, {0}, {-1}); }},
    {"a multimodal index beyond the batch",
     [](auto& c, auto&) -> Answer { return Start(c, {0}, {0}, {1}); }},
    {"a negative multimodal index",
     [](auto& c, auto&) -> Answer { return Start(c, {0}, {0}, {-1}); }},
    {"Remove of a negative sequence",
     [](auto& c, auto&) -> Answer { return c.Remove(-1, 0, 1); }, HasRemove},
    {"Remove from a negative position",
     [](auto& c, auto&) -> Answer { return c.Remove(0, -1, 1); }, HasRemove},
    {"Remove with begin > end",
     [](auto& c, auto&) -> Answer { return c.Remove(0, 2, 1); }, HasRemove},
    {"CopyPrefix from a negative sequence",
     [](auto& c, auto&) -> Answer { return c.CopyPrefix(-1, 0, 1); },
     HasCopyPrefix},
    {"CopyPrefix to a negative sequence",
     [](auto& c, auto&) -> Answer { return c.CopyPrefix(0, -1, 1); },
     HasCopyPrefix},
    {"CopyPrefix of a negative length",
     [](auto& c, auto&) -> Answer { return c.CopyPrefix(0, 1, -1); },
     HasCopyPrefix},
    {"CanResume of a negative sequence",
     [](auto& c, auto&) -> Answer { return c.CanResume(-1, 0).status(); },
     HasCanResume},
    {"CanResume at a negative position",
     [](auto& c, auto&) -> Answer { return c.CanResume(0, -1).status(); },
     HasCanResume},
    {"a negative layer",
     [](auto& c, auto& at) -> Answer {
       // A backend refuses a layer in `get`, which may report first that it
       // has no pass.
       Status status = c.SetLayer(-1);
       const bool untimely = at.pass_tokens == 0 && status.code() == kUntimely;
       return {std::move(status), untimely ? kUntimely : kInvalid};
     }},
    {"a negative layer type",
     [](auto& c, auto& at) -> Answer { return SetLayerType(c, at, -1); }},
    {"a layer type that the wrapper does not have",
     [](auto& c, auto& at) -> Answer {
       return SetLayerType(c, at, Size(at.setup.spec.caches));
     }},
    {"SetCausal of an index beyond the batch",
     [](auto& c, auto& at) -> Answer {
       return SetCausal(c, at, {0, at.pass_tokens});
     },
     HasSetCausal},
    {"SetCausal of a negative index",
     [](auto& c, auto& at) -> Answer { return SetCausal(c, at, {-1}); },
     HasSetCausal},
    {"Init a second time",
     [](auto& c, auto&) -> Answer {
       return {c.Init({DType::kF32, 1, 1, 1}), kUntimely};
     }},
    {"SetConfig after Init",
     [](auto& c, auto&) -> Answer {
       return {c.SetConfig({}), kUntimely};
     }},
    {"Get of a layer that was never put",
     [](auto& c, auto& at) -> Answer {
       Status status = c.SetLayer(1 << 20);
       if (status.ok()) status = c.Get().status();
       if (!c.SetLayer(at.layer).ok()) return Status();
       return {status, kUntimely};
     }},
    {"Put without K", {.no_key = true}},
    {"Put without V", {.no_value = true}},
    {"Put of K with an extent of zero", {.zero_k = true}},
    {"Put of V with an extent of zero", {.zero_v = true}},
    {"Put of more elements than can be counted", {.huge = true}},
    {"Put with a fourth dimension", {.fourth = 2}, IsEncoder},
    {"Put of fewer tokens than the batch has",
     {.tokens = -1},
     [](auto& at) { return at.encoder || at.pass_tokens < 2; }},
    {"Put of more tokens than the batch has", {.tokens = 1}, IsEncoder},
    {"Put of other dimensions than the layer has",
     {.v_dim = 1},
     [](auto& at) { return at.encoder || !at.layer_put; }},
    {"Put with fewer heads in V than in K", {.k_heads = 1}, IsEncoder},
    {"Put of f16 rows into an f32 cache",
     {.dtype = DType::kF16},
     [](auto& at) { return at.encoder || at.setup.init.dtype == DType::kF16; }},
    {"Put of bf16 rows into another cache",
     {.dtype = DType::kBF16},
     [](auto& at) {
       return at.encoder || at.setup.init.dtype == DType::kBF16;
     }},
    {"Put of rows of bits", {.dtype = DType::kBits}},
    {"Restore of a cell that is not there",
     [](auto& s) {
       s.cells.push_back({kOpenEnd, 0, 0});
     }},
    {"Restore of a negative position",
     [](auto& s) {
       s.cells = {{0, -1, 0}};
     }},
    {"Restore of a negative sequence",
     [](auto& s) {
       s.cells = {{0, 0, -1}};
     }},
    {"Restore of a cell at two positions",
     [](auto& s) {
       s.cells = {{0, 1, 0}, {0, 2, 1}};
     }},
    {"Restore of cells out of order",
     [](auto& s) {
       s.cells = {{0, 1, 1}, {0, 1, 0}};
     }},
    {"Restore of a membership that is there twice",
     [](auto& s) {
       s.cells = {{0, 1, 0}, {0, 1, 0}};
     }},
    {"Restore of rows with a byte too many",
     [](auto& s) { s.layers[0].key.bytes.push_back({}); }},
    {"Restore of rows of bits",
     [](auto& s) { s.layers[0].key.dtype = DType::kBits; }},
    {"Restore of rows without heads",
     [](auto& s) { s.layers[0].value.shape[1] = 0; }},
    {"Restore of rows of too few cells",
     [](auto& s) {
       s.layers[0] = {{DType::kF32, {1, 1, -1, 1}, {}}, {}};
     }},
    {"Restore of a negative layer", [](auto& s) { s.layers[-1]; }},
    {"Restore of more bytes than can be counted",
     [](auto& s) {
       s.layers[0].key.shape = {kOpenEnd, kOpenEnd, kOpenEnd, 1};
     }},
    {"Restore of a wrapper's state into one of its caches",
     [](auto& s) { s.caches.emplace_back(); }},
    {"Restore of a slot with nothing in it",
     [](auto& s) {
       s.cached = true;
       s.layers.clear();
     }},
    {"Restore of an encoder's negative position",
     [](auto& s) { s.next_position = -1; }},
    // A well-formed state of a larger cache.
    {"Restore of more tokens than there are cells",
     [](auto& c, auto&) -> Answer {
       const int cells = c.CellCount();
       return RestoreDamaged(c, [&](CacheState& s) {
         s.cells.clear();
         s.layers.clear();
         for (int i = 0; i < 1024 || i <= cells; ++i) {
           s.cells.push_back({i, i, 0});
         }
       });
     }},
};

// A sequence that histories do not use: it has neither tokens nor drafts.
constexpr int kUnused = 1 << 20;

Status Draft(Cache& cache, const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences,
             const std::vector<int>& parents) {
  return cache.StartForward({positions, sequences, {}, parents}, false);
}

// Whether a cache has no room for drafts (R11, D8).
bool LacksDrafts(const CacheSpec& spec) {
  return spec.kind == Kind::kEncoder ||
         (spec.kind == Kind::kRecurrent && spec.drafts == 0);
}

// A cache without drafts may look at the path first, or refuse the call: our
// own let the first part decide, and others may do either.
Answer Commit(Cache& cache, const Context& at, int seq,
              const std::vector<int>& path) {
  const CacheSpec& spec = at.setup.spec;
  const bool first = LacksDrafts(spec.caches.empty() ? spec : spec.caches[0]);
  const bool any = first || std::ranges::any_of(spec.caches, LacksDrafts);
  const bool of_others = at.hash_sights != nullptr;
  Status status = cache.Commit(seq, path);
  const bool refused = status.code() == StatusCode::kNotSupported;
  const bool refuses = seq >= 0 && (of_others ? any && refused : first);
  return {std::move(status), refuses ? StatusCode::kNotSupported : kInvalid};
}

const std::vector<Entry> kDraftMisuses = {
    {"a batch with more parents than tokens",
     [](auto& c, auto&) -> Answer {
       return Draft(c, {0}, {kUnused}, {-1, -1});
     }},
    {"a parent below -2",
     [](auto& c, auto&) -> Answer { return Draft(c, {0}, {kUnused}, {-3}); }},
    {"a draft that follows a draft that is not there",
     [](auto& c, auto&) -> Answer { return Draft(c, {0}, {0}, {1 << 20}); }},
    {"a draft that follows itself",
     [](auto& c, auto&) -> Answer { return Draft(c, {0}, {kUnused}, {0}); }},
    {"a draft that follows a later draft",
     [](auto& c, auto&) -> Answer {
       return Draft(c, {1, 0}, {kUnused, kUnused}, {1, -1});
     }},
    {"siblings at two positions",
     [](auto& c, auto&) -> Answer {
       return Draft(c, {3, 4}, {kUnused, kUnused}, {-1, -1});
     }},
    {"a draft that leaves out a position",
     [](auto& c, auto&) -> Answer {
       return Draft(c, {0, 2}, {kUnused, kUnused}, {-1, 0});
     }},
    {"drafts and ordinary tokens of one sequence",
     [](auto& c, auto&) -> Answer {
       return Draft(c, {0, 1}, {kUnused, kUnused}, {-1, -2});
     }},
    {"Commit of a negative sequence",
     [](auto& c, auto& at) -> Answer { return Commit(c, at, -1, {}); }},
    {"Commit of a draft that is not there",
     [](auto& c, auto& at) -> Answer { return Commit(c, at, kUnused, {0}); }},
    {"Commit of a negative draft",
     [](auto& c, auto& at) -> Answer { return Commit(c, at, 0, {-1}); }},
    {"Commit of a draft twice",
     [](auto& c, auto& at) -> Answer {
       return Commit(c, at, 0, {0, 0});
     }},
};

// Returns a hash of everything that a caller can see.
std::uint64_t Fingerprint(Cache& cache, const Context& at) {
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
  const bool masked = view->mask.data != nullptr;
  const bool shows_nothing =
      !masked && (view->key.data == nullptr || view->key.elements() == 0);
  if (at.hash_sights != nullptr && (masked || shows_nothing)) {
    const std::uint64_t sights =
        masked ? at.hash_sights(*view, at.setup.config.v_layout) : 0;
    add(&sights, sizeof(sights));
    return hash;
  }
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

bool HasMisuse(const Abilities& can, const CacheSpec& spec, int which) {
  if (which >= kDraftMisuse) return can.CanDraft(spec);
  const HasCall has_call = EntryOf(which).has_call;
  return has_call == nullptr || has_call(can);
}

std::optional<std::string> TryMisuse(Cache& cache, int which,
                                     const MisuseContext& context) {
  const Entry& entry = EntryOf(which);
  const std::uint64_t before = Fingerprint(cache, context);
  const Answer answer = entry.Run(cache, context);
  if (answer.status.code() != answer.expected) {
    return fmt::format("{} is '{}', expected {}", entry.name,
                       answer.status.ToString(), StatusName(answer.expected));
  }
  if (answer.status.message().empty()) {
    return fmt::format("{} is refused without a message", entry.name);
  }
  if (Fingerprint(cache, context) != before) {
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
