#include "props/backend/pool_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "props/backend/c_conversions.h"
#include "props/paged/paged_client.h"
#include "props/paged/pool_recorder.h"
#include "props/report/show_pool.h"

namespace kvtwin::props {
namespace {

// No list of a history's pool is longer.
constexpr std::size_t kListMax = 1 << 20;
constexpr std::int64_t kStrideMax = std::int64_t{1} << 40;

template <class... Args>
[[noreturn]] void Fault(fmt::format_string<Args...> format, Args&&... args) {
  throw PoolFailure(fmt::format(format, std::forward<Args>(args)...));
}

class BackendPool final : public PagedPool, public PoolAttending {
 public:
  BackendPool(const PoolBackend& backend, const PagedSpec& spec, void* pool)
      : backend_(backend), spec_(Completed(spec)), pool_(pool) {
    int layer = 0;
    for (int group = 0; group < Size(spec_.groups); ++group) {
      groups_.emplace_back(new BackendPool(*this, group, layer));
      layer += At(spec_.groups, group).layers;
    }
  }
  BackendPool(const BackendPool&) = delete;
  BackendPool& operator=(const BackendPool&) = delete;
  ~BackendPool() override {
    if (group_) return;
    In("close").close(pool_);
    if (backend_.watch != nullptr) backend_.watch->Leave();
  }

  const PagedSpec& spec() const override { return spec_; }

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const CPrompt to(prompt, key);
    return Number("open", [&](auto* made) {
      return In("open").open(pool_, to.get(), made);
    });
  }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    if (table().find == nullptr) return Missing("find");
    const CPrompt to(prompt, key);
    return Number("find", [&](auto* length) {
      return In("find").find(pool_, to.get(), length);
    });
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    if (table().add_media == nullptr) return Missing("add_media");
    const kvtwin_media to{media.position, media.hash.c_str()};
    return Said("add_media", In("add_media").add_media(pool_, sequence, &to));
  }
  Result<int> ResumeBefore(int sequence, int len) const override {
    if (spec_.groups.empty()) return PagedPool::ResumeBefore(sequence, len);
    if (table().resume_before == nullptr) return Missing("resume_before");
    return Number("resume_before", [&](auto* resume) {
      return In("resume_before").resume_before(pool_, sequence, len, resume);
    });
  }
  const PagedPool* Group(int group) const override {
    const bool exists = group >= 0 && group < Size(groups_);
    return exists ? At(groups_, group).get() : PagedPool::Group(group);
  }
  Result<int> Fork(int sequence, int len) override {
    if (table().fork == nullptr) return Missing("fork");
    return Number("fork", [&](auto* made) {
      return In("fork").fork(pool_, sequence, len, made);
    });
  }
  Result<int> SeqLen(int sequence) const override {
    return Number("seq_len", [&](auto* len) {
      return In("seq_len").seq_len(pool_, sequence, len);
    });
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override;
  Status Commit(int sequence, int new_tokens) override {
    if (table().commit_unknown == nullptr) return Missing("commit_unknown");
    return Said(
        "commit_unknown",
        In("commit_unknown").commit_unknown(pool_, sequence, new_tokens));
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    const std::int32_t* lent = lender_.Lend("tokens", tokens);
    return Said("commit",
                In("commit").commit(pool_, sequence, lent, tokens.size()));
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return ViewsBy("views", table().views, sequence, layer, /*packed=*/false);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return ViewsBy("views_packed", table().views_packed, sequence, layer,
                   /*packed=*/true);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override;
  Status Truncate(int sequence, int len) override {
    if (table().truncate == nullptr) return Missing("truncate");
    return Said("truncate", In("truncate").truncate(pool_, sequence, len));
  }
  Status Free(int sequence) override {
    return Said("free", In("free").free(pool_, sequence));
  }
  Result<Device> LayerDevice(int layer) const override {
    if (layer >= 0 && layer < spec_.layers) return Device::kCpu;
    return Invalid("layer is {}, there are {}", layer, spec_.layers);
  }
  PagedUsage Usage() const override;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const override;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    if ((group_ ? table().group_slots == nullptr : table().slots == nullptr)) {
      return Missing(group_ ? "group_slots" : "slots");
    }
    auto slots =
        List<std::int64_t>("slots", [&](auto* list, auto room, auto* count) {
          return group_ ? In("group_slots")
                              .group_slots(pool_, *group_, sequence, begin, end,
                                           list, room, count)
                        : In("slots").slots(pool_, sequence, begin, end, list,
                                            room, count);
        });
    if (!slots.ok()) return slots;
    for (const std::int64_t slot : *slots) {
      if (!std::in_range<std::int32_t>(slot)) Fault("slots gives {}", slot);
    }
    return slots;
  }
  Result<PagedKv> Blocks(int /*layer*/) const override {
    return Missing("blocks");
  }
  Status AttendLast(std::span<const int> sequences,
                    std::span<const int> query_rows, int layer,
                    const TensorView& query, const AttentionOptions& options,
                    std::span<float> out) override;

 private:
  // A group of `whole`, which owns it.
  BackendPool(const BackendPool& whole, int group, int layer)
      : backend_(whole.backend_),
        spec_(At(whole.spec_.groups, group)),
        pool_(whole.pool_),
        group_(group),
        first_layer_(layer) {}

  const kvtwin_pool_backend_v1& table() const { return backend_.table; }
  // Begins a call, which Said ends.
  const kvtwin_pool_backend_v1& In(const char* function) const {
    if (backend_.watch != nullptr) backend_.watch->Enter(function);
    return backend_.table;
  }

  static Status Missing(std::string_view function) {
    return {StatusCode::kNotSupported,
            fmt::format("the backend has no {}", function)};
  }

  Status Said(std::string_view function, int status) const {
    if (backend_.watch != nullptr) backend_.watch->Leave();
    CheckMemory(function, backend_.watch, lender_);
    if (status == KVTWIN_OK) return {};
    const char* message =
        table().message == nullptr ? nullptr : table().message(pool_);
    const std::string text = message == nullptr ? "" : PrintableLines(message);
    if (status > KVTWIN_SHARED_CELLS || status < KVTWIN_FAILED_PRECONDITION) {
      Fault("{} answers {}: {}", function, ErrorName(status), text);
    }
    return {StatusFromC(status), text};
  }

  template <class Call>
  Result<int> Number(std::string_view function, const Call& call) const {
    std::int32_t number = -1;
    Status status = Said(function, call(&number));
    if (!status.ok()) return status;
    if (number < 0) Fault("{} gives {}", function, number);
    return number;
  }

  // Asks for the length, and then for the list.
  template <class T, class Call>
  Result<std::vector<T>> List(std::string_view function,
                              const Call& call) const {
    std::vector<T> list;
    std::size_t count = 0;
    for (int i = 0; i < 2; ++i) {
      list.resize(count);
      Status status = Said(function, call(list.data(), list.size(), &count));
      if (!status.ok()) return status;
      if (count > kListMax) Fault("{} gives a list of {}", function, count);
    }
    if (count != list.size()) {
      Fault("{} gives {} entries, and then {}", function, list.size(), count);
    }
    return list;
  }

  using ViewsFn = decltype(kvtwin_pool_backend_v1::views);
  Result<std::vector<PagedView>> ViewsBy(std::string_view function, ViewsFn fn,
                                         int sequence, int layer,
                                         bool packed) const;
  // Returns a view of K or V, checked.
  TensorView View(std::string_view function, std::string_view name,
                  const kvtwin_tensor& tensor, int layer, std::int64_t length,
                  bool key, bool packed) const;

  const PoolBackend backend_;
  const PagedSpec spec_;
  void* const pool_;
  const std::optional<int> group_ =
      {};                      // The group's number; unset for a pool.
  const int first_layer_ = 0;  // The group's first layer.
  std::vector<std::unique_ptr<BackendPool>> groups_;
  mutable Lender lender_;
};

TensorView BackendPool::View(std::string_view function, std::string_view name,
                             const kvtwin_tensor& tensor, int layer,
                             std::int64_t length, bool key, bool packed) const {
  const Result<TensorView> view = TensorFromC(name, &tensor);
  if (!view.ok()) Fault("{}: {}", function, view.status().message());
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  const DType expected = key ? spec.dtype : spec.v_dtype.value_or(spec.dtype);
  Shape shape = {key ? spec.k_head_dim : spec.v_head_dim, spec.kv_heads, length,
                 1};
  if (packed) std::swap(shape[1], shape[2]);
  if (view->dtype != expected || view->shape != shape) {
    Fault("{}: {} is {} {}, expected is {} {}", function, name,
          DTypeName(view->dtype), ShapeText(view->shape), DTypeName(expected),
          ShapeText(shape));
  }
  if (view->data == nullptr) Fault("{}: {} is NULL", function, name);
  for (const std::int64_t stride : view->stride) {
    if (stride < -kStrideMax || stride > kStrideMax) {
      Fault("{}: {} has a stride of {}", function, name, stride);
    }
  }
  return *view;
}

Result<std::vector<PagedView>> BackendPool::ViewsBy(std::string_view function,
                                                    ViewsFn fn, int sequence,
                                                    int layer,
                                                    bool packed) const {
  if (fn == nullptr) return Missing(function);
  const auto list = List<kvtwin_paged_view>(
      function, [&](auto* views, auto room, auto* count) {
        In(function.data());
        return fn(pool_, sequence, first_layer_ + layer, views, room, count);
      });
  if (!list.ok()) return list.status();
  std::vector<PagedView> views;
  for (const kvtwin_paged_view& view : *list) {
    if (view.length < 1 || view.length > spec_.max_seq_len || view.start < 0 ||
        view.block < -1) {
      Fault("{}: a view has {} tokens from {} on, in block {}", function,
            view.length, view.start, view.block);
    }
    views.push_back(
        {View(function, "key", view.key, layer, view.length, true, packed),
         View(function, "value", view.value, layer, view.length, false, packed),
         view.start, view.length, view.block});
  }
  return views;
}

// The returned views are those of Views, from the first appended row on.
Result<PagedAppend> BackendPool::Append(int sequence, int layer,
                                        const TensorView& key,
                                        const TensorView& value) {
  const kvtwin_tensor k = lender_.Lend("key", key);
  const kvtwin_tensor v = lender_.Lend("value", value);
  Status status =
      Said("append", In("append").append(pool_, sequence, layer, &k, &v));
  if (!status.ok()) return status;
  const Result<int> start = SeqLen(sequence);
  if (!start.ok()) return start.status();
  if (table().views == nullptr) return PagedAppend{*start, {}};
  auto views = Views(sequence, layer);
  if (!views.ok()) return views.status();
  PagedAppend append{*start, {}};
  for (PagedView& view : *views) {
    const int skip = std::clamp(*start - view.start, 0, view.length);
    if (skip == view.length) continue;
    for (TensorView* part : {&view.key, &view.value}) {
      part->data = part->at(0, 0, skip);
      part->shape[2] -= skip;
    }
    view.start += skip;
    view.length -= skip;
    append.views.push_back(view);
  }
  return append;
}

Result<std::optional<PagedKv>> BackendPool::ContiguousKV(int sequence,
                                                         int layer,
                                                         int kv_len) const {
  if (table().contiguous_kv == nullptr) return Missing("contiguous_kv");
  kvtwin_tensor key{};
  kvtwin_tensor value{};
  const Result<int> yes = Number("contiguous_kv", [&](auto* answer) {
    return In("contiguous_kv")
        .contiguous_kv(pool_, sequence, first_layer_ + layer, kv_len, answer,
                       &key, &value);
  });
  if (!yes.ok()) return yes.status();
  if (*yes == 0) return std::optional<PagedKv>();
  return std::optional(PagedKv{
      View("contiguous_kv", "key", key, layer, kv_len, true, false),
      View("contiguous_kv", "value", value, layer, kv_len, false, false)});
}

PagedUsage BackendPool::Usage() const {
  kvtwin_usage usage{};
  usage.size = sizeof(usage);
  if ((group_ ? table().group_usage == nullptr : table().usage == nullptr)) {
    Fault("the backend has no {}", group_ ? "group_usage" : "usage");
  }
  const Status status =
      group_ ? Said("group_usage",
                    In("group_usage").group_usage(pool_, *group_, &usage))
             : Said("usage", In("usage").usage(pool_, &usage));
  if (!status.ok()) Fault("usage is {}", status.ToString());
  return {usage.free, usage.cached, usage.used, usage.shared};
}

Result<PagedCsr> BackendPool::ExportCsr(std::span<const int> sequences) const {
  if ((group_ ? table().group_csr == nullptr : table().csr == nullptr)) {
    return Missing(group_ ? "group_csr" : "csr");
  }
  PagedCsr csr;
  csr.indptr.resize(sequences.size() + 1);
  csr.last_page_len.resize(sequences.size());
  auto indices =
      List<std::int32_t>("csr", [&](auto* list, auto room, auto* count) {
        if (group_) {
          return In("group_csr")
              .group_csr(pool_, *group_, sequences.data(), sequences.size(),
                         csr.indptr.data(), list, room, count,
                         csr.last_page_len.data());
        }
        return In("csr").csr(pool_, sequences.data(), sequences.size(),
                             csr.indptr.data(), list, room, count,
                             csr.last_page_len.data());
      });
  if (!indices.ok()) return indices.status();
  csr.indices = std::move(*indices);
  return csr;
}

Result<PagedTable> BackendPool::ExportTable(
    std::span<const int> sequences) const {
  if ((group_ ? table().group_table == nullptr : table().table == nullptr)) {
    return Missing(group_ ? "group_table" : "table");
  }
  PagedTable answer;
  answer.seq_lens.resize(sequences.size());
  auto blocks =
      List<std::int32_t>("table", [&](auto* list, auto room, auto* count) {
        if (group_) {
          return In("group_table")
              .group_table(pool_, *group_, sequences.data(), sequences.size(),
                           &answer.columns, list, room, count,
                           answer.seq_lens.data());
        }
        return In("table").table(pool_, sequences.data(), sequences.size(),
                                 &answer.columns, list, room, count,
                                 answer.seq_lens.data());
      });
  if (!blocks.ok()) return blocks.status();
  answer.blocks = std::move(*blocks);
  return answer;
}

Status BackendPool::AttendLast(std::span<const int> sequences,
                               std::span<const int> query_rows, int layer,
                               const TensorView& query,
                               const AttentionOptions& options,
                               std::span<float> out) {
  if (table().attend == nullptr) return Missing("attend");
  const kvtwin_attention_options in_c = {
      .size = sizeof(in_c),
      .scale = options.scale,
      .soft_cap = options.soft_cap,
      .sinks = options.sinks.empty() ? nullptr : options.sinks.data(),
      .sink_count = options.sinks.size(),
      .splits = options.splits,
      .bf16_products = options.bf16_products ? 1 : 0};
  const kvtwin_tensor asked = lender_.Lend("query", query);
  const int* of = lender_.Lend("sequences", sequences);
  const int* rows = lender_.Lend("query_rows", query_rows);
  return CallAttend(out, [&](float* to) {
    return Said("attend",
                In("attend").attend(pool_, layer, of, rows, sequences.size(),
                                    &asked, &in_c, to));
  });
}

PoolAbilities AbilitiesOf(const PoolBackend& backend, bool has_groups) {
  const kvtwin_pool_backend_v1& table = backend.table;
  PoolAbilities abilities = {.fork = table.fork != nullptr,
                             .truncate = table.truncate != nullptr,
                             .commit_unknown = table.commit_unknown != nullptr,
                             .usage = table.usage != nullptr,
                             .table = table.table != nullptr,
                             .csr = table.csr != nullptr,
                             .slots = table.slots != nullptr,
                             .views = table.views != nullptr,
                             .max_sequences = backend.abilities.max_sequences,
                             .attention = backend.attention};
  if (!has_groups) return abilities;
  abilities.table = table.group_table != nullptr;
  abilities.csr = table.group_csr != nullptr;
  abilities.slots = table.group_slots != nullptr;
  abilities.media = backend.media;
  return abilities;
}

// Returns the backend with the attention that a history asks for.
PoolBackend WithAttention(const PoolBackend& backend,
                          const PagedHistory& history) {
  PoolBackend with = backend;
  if (!with.attention) return with;
  const Abilities& able = backend.abilities;
  with.attention->soft_cap =
      able.Can(KVTWIN_CAN_SOFT_CAP) ? history.soft_cap : 0;
  with.attention->sinks = history.sinks && able.Can(KVTWIN_CAN_SINKS);
  return with;
}

// Returns the pools of the backend, which `run` runs, as a subject.
Subject SubjectOf(const PoolBackend& backend, Level level, auto run) {
  return {.name = backend.name,
          .run_pool = run,
          .level = level,
          .abilities = backend.abilities};
}

// Runs the backend in place of the optimized twin.
RunResult RunIdentity(const PoolBackend& backend, const PagedHistory& history,
                      PagedCoverageCounts* counts, PoolCalls& calls) {
  const PagedMaker make = [&](const PagedSpec& spec, std::string_view twin) {
    return twin == "reference" ? MakePagedPool(spec, twin)
                               : MakeBackendPool(backend, spec);
  };
  return RunPaged(history, counts, make, /*same_messages=*/false, &calls,
                  backend.attention);
}

std::optional<TraceAttention> TraceOf(
    const std::optional<PoolAttention>& attention) {
  if (!attention) return std::nullopt;
  return TraceAttention{attention->precision.dtype,
                        attention->precision.tolerance};
}

// Returns what is wrong with the answers to a history.
RunResult RunRecorded(const PoolBackend& backend, const PagedHistory& history,
                      PagedCoverageCounts* counts, PoolCalls& calls,
                      std::unique_ptr<PagedPool> pool) {
  RunResult result = {.ran = true};
  const PagedTraceHeader header = {.producer = backend.name,
                                   .visibility_only = true,
                                   .spec = pool->spec(),
                                   .rules = backend.rules,
                                   .attention = TraceOf(backend.attention)};
  std::vector<PagedTraceOp> ops;
  std::string not_judged;  // Why the first call that is not in `ops` is not.
  PagedPool& unrecorded = *pool;
  auto recorder = std::make_unique<PoolRecorder>(
      std::make_unique<PoolLog>(std::move(pool), calls), [&](PagedTraceOp op) {
        const std::string_view name = TraceOpName(op.kind);
        Result<PagedTraceOp> read = AsRead(std::move(op), header);
        if (read.ok()) {
          read->line = std::ssize(ops) + 2;
          ops.push_back(std::move(*read));
        } else if (not_judged.empty()) {
          not_judged = fmt::format("{}: {}", name, read.status().message());
        }
      });
  auto& failure = result.failure;
  std::size_t step = 0;
  const auto can = AbilitiesOf(backend, !history.spec.groups.empty());
  PoolWorkload workload(*recorder, can, backend.rules, counts);
  try {
    for (; step < history.ops.size(); ++step, ++result.operations) {
      workload.Do(history.ops[step]);
    }
    workload.End();
    // Usage shows blocks that are lost; without it, a lack of room does.
    if (backend.table.usage == nullptr && workload.was_full()) {
      const auto room = FillAndFree(unrecorded, backend.rules, workload.Room());
      recorder.reset();
      ExpectNoMoreRoom(*Need(MakeBackendPool(backend, history.spec), "init"),
                       backend.rules, workload.Room(), room);
    }
  } catch (const Failure& found) {
    failure = found;
  } catch (const std::exception& error) {
    failure = PoolFailure(error.what());
  }
  result.answers.opens = workload.opens();
  for (const PagedTraceOp& op : ops) {
    result.digest = HashAnswers(op, result.digest);
  }
  const Judgement judgement = Judge(header, ops, {"reference"});
  result.views = judgement.judged.rows + judgement.judged.output_rows_judged;
  const bool of_backend = failure && failure->party() == Party::kBackend;
  if (!of_backend && judgement.verdict() != Verdict::kAccept) {
    failure = PoolFailure(judgement.reason());
    if (judgement.failure) {
      failure->pool_call = judgement.failure->pool_call;
      failure->pool_change = judgement.failure->pool_change;
    }
    failure->trace = PoolSteps(ops, judgement.line());
  } else if (failure) {
    failure->pool_call = calls.LastCall();
    failure->pool_change = calls.LastChange();
  } else if (!not_judged.empty()) {
    failure = PoolFailure(not_judged);
  }
  if (!failure) return result;
  failure->step = step;
  failure->of_window = backend.rules.window.has_value();
  if (failure->trace.empty()) failure->trace = calls.Steps();
  return result;
}

}  // namespace

std::vector<Level> LevelsOf(const PoolBackend& backend) {
  std::vector<Level> levels;
  if (backend.level == Level::kIdentity) levels.push_back(Level::kIdentity);
  if (backend.table.views != nullptr) levels.push_back(Level::kVisibility);
  if (backend.attention) levels.push_back(Level::kAttention);
  return levels;
}

Result<std::unique_ptr<PagedPool>> MakeBackendPool(const PoolBackend& backend,
                                                   const PagedSpec& spec) {
  if (!spec.groups.empty() && !backend.groups) {
    return Status(StatusCode::kNotSupported,
                  "the backend declares no groups (KVTWIN_POOL_HAS_GROUPS)");
  }
  if (!FitsPool(backend.abilities, spec)) {
    return Status(StatusCode::kNotSupported,
                  "the backend declares other dtypes or multiples");
  }
  const auto in_c = [](const PagedSpec& of) {
    kvtwin_pool_params params = CPoolParams(of);
    if (!of.v_dtype) params.v_dtype = params.dtype;
    return params;
  };
  const PagedSpec whole = Completed(spec);
  kvtwin_pool_params params = in_c(whole);
  std::vector<kvtwin_pool_params> groups;
  for (const PagedSpec& group : whole.groups) {
    groups.push_back(in_c(group));
  }
  params.groups = groups.data();
  params.group_count = groups.size();
  void* pool = nullptr;
  if (backend.watch != nullptr) backend.watch->Enter("init");
  const int code = backend.table.init(&params, &pool);
  if (backend.watch != nullptr) backend.watch->Leave();
  if (code == KVTWIN_NOT_SUPPORTED) {
    return Status(StatusCode::kNotSupported, "the backend has no such pool");
  }
  if (code != KVTWIN_OK) {
    return Invalid("init answers {}", ErrorName(code));
  }
  return std::unique_ptr<PagedPool>(
      std::make_unique<BackendPool>(backend, spec, pool));
}

namespace {

// Makes the pool of a history; without it, returns what is wrong with init, or
// counts the history as one that the backend does not support.
std::unique_ptr<PagedPool> PoolFor(const PoolBackend& backend,
                                   const PagedSpec& spec, RunResult& result,
                                   PagedCoverageCounts* counts) {
  auto pool = MakeBackendPool(backend, spec);
  if (pool.ok()) return std::move(*pool);
  if (pool.status().code() != StatusCode::kNotSupported) {
    result.failure = PoolFailure(pool.status().message());
    result.failure->function = "init";
  } else if (counts != nullptr) {
    ++counts->not_made;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> NotDeclared(const PoolBackend& backend) {
  const PoolAbilities can = AbilitiesOf(backend, /*has_groups=*/false);
  const PoolAbilities by_group = AbilitiesOf(backend, /*has_groups=*/true);
  const bool shows_rows = !can.attention;
  const Abilities& able = backend.abilities;
  std::vector<std::string> missing;
  for (const auto& [name, has] :
       {std::pair("fork", can.fork),
        {"truncate", can.truncate},
        {"commit_unknown", can.commit_unknown},
        {"usage", can.usage},
        {"table", can.table},
        {"csr", can.csr},
        {"slots", can.slots},
        {"views", can.views},
        {"attend", !shows_rows},
        {"soft_cap", shows_rows || able.Can(KVTWIN_CAN_SOFT_CAP)},
        {"sinks", shows_rows || able.Can(KVTWIN_CAN_SINKS)},
        {"groups", backend.groups},
        {"group_table", !backend.groups || by_group.table},
        {"group_csr", !backend.groups || by_group.csr},
        {"group_slots", !backend.groups || by_group.slots},
        {"media", backend.media}}) {
    if (!has) missing.emplace_back(name);
  }
  return missing;
}

// Laws compare views, so they cannot judge a pool without views.
bool MayBeJudged(const PoolBackend& backend, const PoolLaw& law) {
  if (backend.table.views == nullptr) return false;
  return law.applies(AbilitiesOf(backend, /*has_groups=*/false),
                     backend.rules) ||
         (backend.groups &&
          law.applies(AbilitiesOf(backend, true), backend.rules));
}

Subject LawSubject(const PoolBackend& backend, const PoolLaw& law,
                   PoolCalls* calls) {
  const auto run = [given = backend, &law, calls](
                       const PagedHistory& history,
                       const PoolRunOptions& options) {
    const PoolBackend backend = WithAttention(given, history);
    RunResult result;
    auto pool = PoolFor(backend, history.spec, result, options.counts);
    if (pool == nullptr) return result;
    const auto can = AbilitiesOf(backend, !history.spec.groups.empty());
    if (!law.applies(can, backend.rules)) return result;
    return JudgePool(law, history, std::move(pool), can, backend.rules,
                     options.counts, calls);
  };
  return SubjectOf(backend, backend.level, run);
}

Subject BackendSubject(const PoolBackend& backend, Level level,
                       PoolCalls* calls) {
  PoolBackend compared = backend;
  if (level == Level::kAttention) compared.table.views = nullptr;
  const auto run = [compared, level, calls](const PagedHistory& history,
                                            const PoolRunOptions& options) {
    const PoolBackend backend = WithAttention(compared, history);
    PagedCoverageCounts* const counts = options.counts;
    RunResult result;
    auto pool = PoolFor(backend, history.spec, result, counts);
    if (pool == nullptr) return result;
    PoolCalls own;
    PoolCalls& noted = calls == nullptr ? own : *calls;
    if (level == Level::kIdentity) {
      pool.reset();
      return RunIdentity(backend, history, counts, noted);
    }
    if (counts != nullptr) {
      AddDTypes(history.spec, *counts);
    }
    return RunRecorded(backend, history, counts, noted, std::move(pool));
  };
  return SubjectOf(backend, level, run);
}

}  // namespace kvtwin::props
