// The caches and pools of the shared library as C++ classes: every call goes
// through <kvtwin/kvtwin.h>. So each test of a cache also tests the C
// interface.

#ifndef KVTWIN_PROPS_C_API_C_API_ADAPTERS_H_
#define KVTWIN_PROPS_C_API_C_API_ADAPTERS_H_

#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/state_checks.h"
#include "kvtwin/kvtwin.h"
#include "kvtwin/save.h"
#include "props/backend/c_conversions.h"
#include "props/compare/runner.h"

namespace kvtwin::props {

// Converts the status of a call, with its message.
inline Status FromC(kvtwin_status status) {
  if (status == KVTWIN_OK) return {};
  const std::string text = kvtwin_last_error();
  // C++ has neither of these statuses: a test that gets one fails.
  if (status == KVTWIN_INTERNAL || status == KVTWIN_OUT_OF_MEMORY) {
    throw std::runtime_error(kvtwin_status_name(status) + (": " + text));
  }
  return {StatusFromC(status), text};
}

inline TensorView ViewFromC(const kvtwin_tensor& tensor) {
  return *TensorFromC("a view", &tensor);
}

// Returns a list that a C function writes: `call` gets the list, its room, and
// the count.
template <class T, class Call>
Result<std::vector<T>> ListByC(const Call& call) {
  std::vector<T> list;
  std::size_t count = 0;
  for (int i = 0; i < 2; ++i) {
    list.resize(count);
    Status status = FromC(call(list.data(), list.size(), &count));
    if (!status.ok()) return status;
  }
  return list;
}

struct DestroyC {
  void operator()(kvtwin_cache* cache) const { kvtwin_cache_destroy(cache); }
  void operator()(kvtwin_state* state) const { kvtwin_state_destroy(state); }
  void operator()(kvtwin_pool* pool) const { kvtwin_pool_destroy(pool); }
};
using StateHandle = std::unique_ptr<kvtwin_state, DestroyC>;

inline Result<CacheState> StateByC(const kvtwin_state& handle) {
  void* bytes = nullptr;
  std::size_t count = 0;
  Status status = FromC(kvtwin_state_to_bytes(&handle, "by C", &bytes, &count));
  if (!status.ok()) return status;
  Result<CacheState> state =
      StateFromBytes({static_cast<const std::byte*>(bytes), count}, "by C");
  kvtwin_free(bytes);
  return state;
}

inline Result<StateHandle> StateToC(const CacheState& state) {
  if (Status status = CheckState(state); !status.ok()) return status;
  const std::vector<std::byte> bytes = StateToBytes(state);
  kvtwin_state* made = nullptr;
  Status status = FromC(
      kvtwin_state_from_bytes(bytes.data(), bytes.size(), nullptr, &made));
  if (!status.ok()) return status;
  return StateHandle(made);
}

// Gives `params` the custom function of `spec` as a function of C. Requires:
// `spec` lives as long as the cache.
inline void ShiftByC(const CacheSpec& spec, kvtwin_cache_params& params) {
  if (spec.shift.kind != ShiftKind::kCustom) return;
  params.shift.user = const_cast<ShiftFn*>(&spec.shift.fn);
  params.shift.fn = [](void* user, std::int32_t layer, std::int32_t offset,
                       std::int32_t k_head_dim, std::int32_t kv_heads,
                       float* key) -> int {
    const auto& fn = *static_cast<const ShiftFn*>(user);
    const std::size_t size = AsSize(k_head_dim) * AsSize(kv_heads);
    return fn(layer, offset, k_head_dim, kv_heads, {key, size}).ok()
               ? KVTWIN_OK
               : KVTWIN_INTERNAL;
  };
}

class CacheByC : public Cache {
 public:
  CacheByC(CacheSpec spec, std::string twin)
      : spec_(std::move(spec)), twin_(std::move(twin)) {}

  Status SetConfig(const CacheConfig& config) override {
    if (cache_ != nullptr) return Untimely("SetConfig after Init");
    Status status = (*MakeCache(spec_))->SetConfig(config);
    if (status.ok()) config_ = config;
    return status;
  }
  Status Init(const InitArgs& args) override {
    if (cache_ != nullptr) return Untimely("Init a second time");
    std::vector<kvtwin_cache_params> caches;
    kvtwin_cache_params params = CCacheParams({spec_, config_, args}, caches);
    ShiftByC(spec_, params);
    for (std::size_t i = 0; i < caches.size(); ++i) {
      ShiftByC(spec_.caches[i], caches[i]);
    }
    kvtwin_cache* made = nullptr;
    Status status = FromC(kvtwin_cache_create(&params, twin_.c_str(), &made));
    cache_.reset(made);
    return status;
  }
  void Close() override { cache_.reset(); }
  Status SetLayer(int layer) override {
    if (Status status = NotNegative("layer", layer); !status.ok()) {
      return status;
    }
    layer_ = layer;
    return {};
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    const auto parents = batch.parents.size();
    if (batch.positions.size() != batch.sequences.size() ||
        (parents != 0 && parents != batch.positions.size())) {
      return Invalid("C has one number of tokens");
    }
    kvtwin_batch to{};
    to.parents = parents == 0 ? nullptr : batch.parents.data();
    to.size = sizeof(to);
    to.positions = batch.positions.data();
    to.sequences = batch.sequences.data();
    to.tokens = static_cast<std::int32_t>(batch.positions.size());
    to.multimodal = batch.multimodal.data();
    to.multimodal_count = static_cast<std::int32_t>(batch.multimodal.size());
    return FromC(
        kvtwin_cache_start_forward(cache_.get(), &to, reserve ? 1 : 0));
  }
  Status SetCausal(std::span<const int> except) override {
    return FromC(
        kvtwin_cache_set_causal(cache_.get(), except.data(), except.size()));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    const kvtwin_tensor k = CTensor(key);
    const kvtwin_tensor v = CTensor(value);
    return FromC(kvtwin_cache_put(cache_.get(), layer_, &k, &v));
  }
  Result<KvView> Get() override {
    kvtwin_view view{};
    view.size = sizeof(view);
    Status status = FromC(kvtwin_cache_get(cache_.get(), layer_, &view));
    if (!status.ok()) return status;
    return KvView{ViewFromC(view.key), ViewFromC(view.value),
                  ViewFromC(view.mask), view.first_cell};
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return FromC(kvtwin_cache_copy_prefix(cache_.get(), src, dst, len));
  }
  Status Commit(int seq, std::span<const int> path) override {
    return FromC(
        kvtwin_cache_commit(cache_.get(), seq, path.data(), path.size()));
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    std::int32_t yes = -1;
    Status status =
        FromC(kvtwin_cache_can_resume(cache_.get(), seq, pos, &yes));
    if (!status.ok()) return status;
    return yes == 1;
  }
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) override {
    std::int32_t at = -1;
    Status status =
        FromC(kvtwin_cache_resume_before(cache_.get(), seq, pos, &at));
    if (!status.ok()) return status;
    return at;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return FromC(kvtwin_cache_remove(cache_.get(), seq, begin, end));
  }
  Status Checkpoint(int seq) override {
    return FromC(kvtwin_cache_checkpoint(cache_.get(), seq));
  }
  Status SetLayerType(int type) override {
    return FromC(kvtwin_cache_set_layer_type(cache_.get(), type));
  }
  Cache* UnderlyingCache() override {
    kvtwin_cache* active = nullptr;
    const Status status = FromC(kvtwin_cache_underlying(cache_.get(), &active));
    const bool wrapper = IsWrapper(spec_.kind);
    return status.ok() && (active != cache_.get()) == wrapper ? this : nullptr;
  }
  Result<bool> EncoderCached() override {
    std::int32_t yes = -1;
    Status status = FromC(kvtwin_cache_encoder_cached(cache_.get(), &yes));
    if (!status.ok()) return status;
    return yes == 1;
  }
  Status SnapshotTo(CacheState& state) const override {
    kvtwin_state* made = nullptr;
    Status status = FromC(kvtwin_cache_snapshot(cache_.get(), &made));
    return Take(status, StateHandle(made), state);
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    kvtwin_state* made = nullptr;
    Status status =
        FromC(kvtwin_cache_snapshot_of(cache_.get(), sequence, &made));
    CacheState state;
    status = Take(status, StateHandle(made), state);
    if (!status.ok()) return status;
    return state;
  }
  Status Restore(const CacheState& state) override {
    const Result<StateHandle> handle = StateToC(state);
    if (!handle.ok()) return handle.status();
    Status status = FromC(kvtwin_cache_restore(cache_.get(), handle->get()));
    if (status.ok()) layer_ = 0;
    return status;
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    const Result<StateHandle> handle = StateToC(added);
    if (!handle.ok()) return handle.status();
    Status status =
        FromC(kvtwin_cache_add_sequence(cache_.get(), sequence, handle->get()));
    if (status.ok()) layer_ = 0;
    return status;
  }
  int CellCount() const override {
    std::int32_t cells = -1;
    return kvtwin_cache_cell_count(cache_.get(), &cells) == KVTWIN_OK ? cells
                                                                      : 0;
  }
  std::span<const int> BatchCells() const override {
    auto cells = ListByC<int>([&](int* list, auto room, auto* count) {
      return kvtwin_cache_batch_cells(cache_.get(), list, room, count);
    });
    if (cells.ok()) batch_cells_ = std::move(*cells);
    return batch_cells_;
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    const auto cells =
        ListByC<kvtwin_cell>([&](kvtwin_cell* list, auto room, auto* count) {
          return kvtwin_cache_cells(cache_.get(), list, room, count);
        });
    out.clear();
    if (!cells.ok()) return;
    for (const kvtwin_cell& cell : *cells) {
      out.push_back({cell.cell, cell.position, cell.sequence});
    }
  }

 private:
  static Status Take(Status status, const StateHandle& handle,
                     CacheState& state) {
    if (!status.ok()) return status;
    Result<CacheState> read = StateByC(*handle);
    if (read.ok()) state = std::move(*read);
    return read.status();
  }

  CacheSpec spec_;
  std::string twin_;
  CacheConfig config_;
  std::unique_ptr<kvtwin_cache, DestroyC> cache_;  // From Init to Close.
  int layer_ = 0;
  mutable std::vector<int> batch_cells_;
};

// Each cache exists in C only from Init to Close.
inline Subject SubjectByC(const std::string& twin) {
  return {
      .name = twin,
      .make = [twin](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        if (const auto made = MakeCache(spec); !made.ok()) {
          return made.status();
        }
        return std::unique_ptr<Cache>(std::make_unique<CacheByC>(spec, twin));
      },
      .can_be_poisoned = true,
      .tried_outside_of_life = false};
}

class PoolByC : public PagedPool {
 public:
  static Result<std::unique_ptr<PagedPool>> Make(const PagedSpec& spec,
                                                 std::string_view twin) {
    const kvtwin_pool_params params = CPoolParams(spec);
    kvtwin_pool* made = nullptr;
    Status status =
        FromC(kvtwin_pool_create(&params, std::string(twin).c_str(), &made));
    if (!status.ok()) return status;
    return std::unique_ptr<PagedPool>(new PoolByC(spec, made));
  }

  const PagedSpec& spec() const override { return spec_; }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const CPrompt made_of(prompt, key);
    kvtwin_prompt to = *made_of.get();
    if (key.salt.empty()) to.salt = nullptr;  // NULL means the same.
    const bool bare = prompt.empty() && key == PrefixKey();
    return Number([&](std::int32_t* made) {
      return kvtwin_pool_open(pool_.get(), bare ? nullptr : &to, made);
    });
  }
  Result<int> Fork(int sequence, int len) override {
    return Number([&](std::int32_t* made) {
      return kvtwin_pool_fork(pool_.get(), sequence, len, made);
    });
  }
  Result<int> SeqLen(int sequence) const override {
    return Number([&](std::int32_t* len) {
      return kvtwin_pool_seq_len(pool_.get(), sequence, len);
    });
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    const kvtwin_tensor k = CTensor(key);
    const kvtwin_tensor v = CTensor(value);
    PagedAppend append;
    // The second call stores the same rows in the same place, and fills the
    // list.
    const auto views = ViewsBy([&](auto* list, auto room, auto* count) {
      return kvtwin_pool_append(pool_.get(), sequence, layer, &k, &v,
                                &append.start, list, room, count);
    });
    if (!views.ok()) return views.status();
    append.views = *views;
    return append;
  }
  Status Commit(int sequence, int new_tokens) override {
    return FromC(kvtwin_pool_commit_unknown(pool_.get(), sequence, new_tokens));
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    return FromC(kvtwin_pool_commit(pool_.get(), sequence, tokens.data(),
                                    tokens.size()));
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return ViewsBy([&](auto* list, auto room, auto* count) {
      return kvtwin_pool_views(pool_.get(), sequence, layer, list, room, count);
    });
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return ViewsBy([&](auto* list, auto room, auto* count) {
      return kvtwin_pool_views_packed(pool_.get(), sequence, layer, list, room,
                                      count);
    });
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    std::int32_t yes = -1;
    kvtwin_tensor key{};
    kvtwin_tensor value{};
    Status status = FromC(kvtwin_pool_contiguous_kv(
        pool_.get(), sequence, layer, kv_len, &yes, &key, &value));
    if (!status.ok()) return status;
    if (yes == 0) return std::optional<PagedKv>();
    return std::optional(PagedKv{ViewFromC(key), ViewFromC(value)});
  }
  Status Truncate(int sequence, int len) override {
    return FromC(kvtwin_pool_truncate(pool_.get(), sequence, len));
  }
  Status Free(int sequence) override {
    return FromC(kvtwin_pool_free(pool_.get(), sequence));
  }
  Result<Device> LayerDevice(int layer) const override {
    const Result<int> device = Number([&](std::int32_t* to) {
      return kvtwin_pool_layer_device(pool_.get(), layer, to);
    });
    if (!device.ok()) return device.status();
    return static_cast<Device>(*device);
  }
  PagedUsage Usage() const override {
    kvtwin_usage usage{};
    usage.size = sizeof(usage);
    const Status status = FromC(kvtwin_pool_usage(pool_.get(), &usage));
    if (!status.ok()) return {-1, -1, -1, -1};
    return {usage.free, usage.cached, usage.used, usage.shared};
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    PagedCsr csr;
    csr.indptr.resize(sequences.size() + 1);
    csr.last_page_len.resize(sequences.size());
    auto indices = ListByC<int>([&](int* list, auto room, auto* count) {
      return kvtwin_pool_csr(pool_.get(), sequences.data(), sequences.size(),
                             csr.indptr.data(), list, room, count,
                             csr.last_page_len.data());
    });
    if (!indices.ok()) return indices.status();
    csr.indices = std::move(*indices);
    return csr;
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return TableByC(sequences, [&](auto... rest) {
      return kvtwin_pool_table(pool_.get(), sequences.data(), sequences.size(),
                               rest...);
    });
  }
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override {
    return TableByC(sequences, [&](auto... rest) {
      return kvtwin_pool_layer_table(pool_.get(), layer, sequences.data(),
                                     sequences.size(), rest...);
    });
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return ListByC<std::int64_t>([&](auto* list, auto room, auto* count) {
      return kvtwin_pool_slots(pool_.get(), sequence, begin, end, list, room,
                               count);
    });
  }
  Result<PagedKv> Blocks(int layer) const override {
    kvtwin_tensor key{};
    kvtwin_tensor value{};
    Status status = FromC(kvtwin_pool_blocks(pool_.get(), layer, &key, &value));
    if (!status.ok()) return status;
    return PagedKv{ViewFromC(key), ViewFromC(value)};
  }

 private:
  PoolByC(const PagedSpec& spec, kvtwin_pool* pool)
      : spec_(spec), pool_(pool) {}

  // Calls with the arguments after the sequences.
  template <class Call>
  static Result<PagedTable> TableByC(std::span<const int> sequences,
                                     const Call& call) {
    PagedTable table;
    table.seq_lens.resize(sequences.size());
    auto blocks = ListByC<int>([&](int* list, auto room, auto* count) {
      return call(&table.columns, list, room, count, table.seq_lens.data());
    });
    if (!blocks.ok()) return blocks.status();
    table.blocks = std::move(*blocks);
    return table;
  }
  template <class Call>
  static Result<int> Number(const Call& call) {
    std::int32_t number = -1;
    Status status = FromC(call(&number));
    if (!status.ok()) return status;
    return number;
  }
  template <class Call>
  static Result<std::vector<PagedView>> ViewsBy(const Call& call) {
    const auto views = ListByC<kvtwin_paged_view>(call);
    if (!views.ok()) return views.status();
    std::vector<PagedView> out;
    for (const kvtwin_paged_view& view : *views) {
      out.push_back({ViewFromC(view.key), ViewFromC(view.value), view.start,
                     view.length, view.block});
    }
    return out;
  }

  PagedSpec spec_;
  std::unique_ptr<kvtwin_pool, DestroyC> pool_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_C_API_C_API_ADAPTERS_H_
