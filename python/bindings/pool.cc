// A pool of blocks that is written in Python, as the table of functions that
// the harness drives.

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "bindings.h"
#include "core/index.h"
#include "core/names.h"
#include "props/backend/backend_laws.h"
#include "props/backend/c_conversions.h"
#include "props/backend/host_process.h"
#include "props/backend/pool_backend.h"
#include "props/certify/certificate.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_log.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "tensor.h"

namespace kvtwin::python {
namespace {

// The harness gives up a backend that has made no pool after this many
// histories.
constexpr std::int64_t kVainHistories = 250;

// The object that `init` returns as the pool.
struct Instance {
  nb::object pool;  // A kvtwin._pool.PoolInstance.
  std::string message;
  // The views whose number the harness asked for, before it asks for them; and
  // their sequence and layer.
  std::optional<std::tuple<std::int32_t, std::int32_t, nb::list>> counted = {};
};

// Like Backend for caches: at most one at a time on each thread.
class Pools {
 public:
  // `adapter` is a kvtwin._pool.PoolBackend.
  explicit Pools(nb::object adapter) : adapter_(std::move(adapter)) {
    if (current_ != nullptr) {
      Raise({StatusCode::kFailedPrecondition,
             "a backend cannot be driven from within another one"});
    }
    const auto said = nb::cast<nb::tuple>(adapter_.attr("describe")());
    name_ = TextOf(said[0]);
    can_ = nb::cast<std::uint32_t>(said[1]);
    window_ = nb::cast<std::int32_t>(said[2]);
    attend_dtype_ = nb::cast<int>(said[3]);
    max_query_heads_ = nb::cast<std::int32_t>(said[4]);
    attend_tolerance_ = nb::cast<double>(said[5]);
    dtypes_ = nb::cast<std::uint32_t>(said[6]);
    block_multiple_ = nb::cast<int>(said[7]);
    head_dim_multiple_ = nb::cast<int>(said[8]);
    max_sequences_ = nb::cast<int>(said[9]);
    FillNeeded();
    FillOptional();
    current_ = this;
  }
  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;
  ~Pools() { current_ = nullptr; }

  const kvtwin_pool_backend_v1& table() const { return table_; }
  const std::string& init_error() const { return init_error_; }
  bool made_one() const { return made_one_; }
  // Returns a failure of close since the last call.
  std::optional<props::Failure> TakeCloseFailure() const {
    return std::exchange(close_failure_, std::nullopt);
  }

 private:
  template <class Fn>
  static int On(void* pool, const Fn& fn) {
    auto& instance = *static_cast<Instance*>(pool);
    return Guarded(instance.message, Refusals::kNone,
                   [&] { fn(instance.pool); });
  }
  void FillNeeded();
  void FillOptional();
  static int Attend(void* pool, std::int32_t layer,
                    const std::int32_t* sequences,
                    const std::int32_t* query_rows, std::size_t sequence_count,
                    const kvtwin_tensor* query,
                    const kvtwin_attention_options* options, float* out);
  int Init(const kvtwin_pool_params* params, void** pool);
  static int Open(void* pool, const kvtwin_prompt* prompt,
                  std::int32_t* sequence);
  static int Views(void* pool, std::int32_t sequence, std::int32_t layer,
                   kvtwin_paged_view* views, std::size_t room,
                   std::size_t* count);
  // `group` is set for a pool with groups.
  static int Table(void* pool, std::optional<int> group,
                   const std::int32_t* sequences, std::size_t sequence_count,
                   std::int32_t* columns, std::int32_t* blocks,
                   std::size_t room, std::size_t* count,
                   std::int32_t* seq_lens);
  static int Slots(void* pool, std::optional<int> group, std::int32_t sequence,
                   std::int32_t begin, std::int32_t end, std::int64_t* slots,
                   std::size_t room, std::size_t* count);

  static thread_local Pools* current_;

  nb::object adapter_;
  kvtwin_pool_backend_v1 table_ = {};
  std::string name_;
  std::uint32_t can_ = 0;
  std::int32_t window_ = 0;
  int attend_dtype_ = 0;
  std::int32_t max_query_heads_ = 0;
  double attend_tolerance_ = 0;
  std::uint32_t dtypes_ = 0;
  int block_multiple_ = 0;
  int head_dim_multiple_ = 0;
  int max_sequences_ = 0;
  std::string init_error_;
  bool made_one_ = false;
  mutable std::optional<props::Failure> close_failure_;
};

thread_local Pools* Pools::current_ = nullptr;

void Pools::FillNeeded() {
  table_.size = sizeof(table_);
  table_.describe = [](kvtwin_pool_description_v1* out) {
    out->name = current_->name_.c_str();
    out->can = current_->can_;
    out->window = current_->window_;
    const bool shows = current_->table_.views != nullptr;
    out->level = shows ? KVTWIN_VISIBILITY : KVTWIN_ATTENTION;
    out->attend_dtype = static_cast<kvtwin_dtype>(current_->attend_dtype_);
    out->max_query_heads = current_->max_query_heads_;
    out->attend_tolerance = current_->attend_tolerance_;
    out->dtypes = current_->dtypes_;
    out->block_multiple = current_->block_multiple_;
    out->head_dim_multiple = current_->head_dim_multiple_;
    out->max_sequences = current_->max_sequences_;
    return AsInt(KVTWIN_OK);
  };
  table_.init = [](const kvtwin_pool_params* params, void** pool) {
    return current_->Init(params, pool);
  };
  table_.close = [](void* pool) {
    const std::unique_ptr<Instance> instance(static_cast<Instance*>(pool));
    auto failure = FailureOfClose(instance->pool);
    if (failure) current_->close_failure_ = std::move(failure);
  };
  table_.open = Open;
  table_.seq_len = [](void* pool, std::int32_t sequence, std::int32_t* length) {
    return On(pool, [&](nb::object& instance) {
      *length = nb::cast<std::int32_t>(instance.attr("seq_len")(sequence));
    });
  };
  table_.append = [](void* pool, std::int32_t sequence, std::int32_t layer,
                     const kvtwin_tensor* key, const kvtwin_tensor* value) {
    return On(pool, [&](nb::object& instance) {
      instance.attr("append")(sequence, layer, Rows(*key), Rows(*value));
    });
  };
  table_.commit = [](void* pool, std::int32_t sequence,
                     const std::int32_t* tokens, std::size_t count) {
    return On(pool, [&](nb::object& instance) {
      instance.attr("commit")(sequence, Ints(tokens, count));
    });
  };
  table_.free = [](void* pool, std::int32_t sequence) {
    return On(pool,
              [&](nb::object& instance) { instance.attr("free")(sequence); });
  };
  table_.message = [](void* pool) {
    return pool == nullptr ? "" : static_cast<Instance*>(pool)->message.c_str();
  };
}

void Pools::FillOptional() {
  const nb::object methods = adapter_.attr("has");
  const auto has = [&](const char* name) {
    return nb::cast<bool>(methods.attr("__contains__")(name));
  };
  if (has("views")) table_.views = Views;
  if (has("attend")) table_.attend = Attend;
  if (has("fork")) {
    table_.fork = [](void* pool, std::int32_t sequence, std::int32_t length,
                     std::int32_t* made) {
      return On(pool, [&](nb::object& instance) {
        *made = nb::cast<std::int32_t>(instance.attr("fork")(sequence, length));
      });
    };
  }
  if (has("truncate")) {
    table_.truncate = [](void* pool, std::int32_t sequence,
                         std::int32_t length) {
      return On(pool, [&](nb::object& instance) {
        instance.attr("truncate")(sequence, length);
      });
    };
  }
  if (has("commit_unknown")) {
    table_.commit_unknown = [](void* pool, std::int32_t sequence,
                               std::int32_t count) {
      return On(pool, [&](nb::object& instance) {
        instance.attr("commit_unknown")(sequence, count);
      });
    };
  }
  if (has("usage")) {
    table_.usage = [](void* pool, kvtwin_usage* usage) {
      return On(pool, [&](nb::object& instance) {
        std::tie(usage->free, usage->cached, usage->used, usage->shared) =
            nb::cast<std::tuple<int, int, int, int>>(instance.attr("usage")());
      });
    };
  }
  if (has("add_media")) {
    table_.add_media = [](void* pool, std::int32_t sequence,
                          const kvtwin_media* media) {
      return On(pool, [&](nb::object& instance) {
        instance.attr("add_media")(sequence, media->position, media->hash);
      });
    };
  }
  if (has("table")) {
    table_.table = [](void* pool, auto... rest) {
      return Table(pool, std::nullopt, rest...);
    };
    table_.group_table = [](void* pool, std::int32_t group, auto... rest) {
      return Table(pool, group, rest...);
    };
  }
  if (!has("slots")) return;
  table_.slots = [](void* pool, auto... rest) {
    return Slots(pool, std::nullopt, rest...);
  };
  table_.group_slots = [](void* pool, std::int32_t group, auto... rest) {
    return Slots(pool, group, rest...);
  };
}

int Pools::Attend(void* pool, std::int32_t layer, const std::int32_t* sequences,
                  const std::int32_t* query_rows, std::size_t sequence_count,
                  const kvtwin_tensor* query,
                  const kvtwin_attention_options* options, float* out) {
  return On(pool, [&](nb::object& instance) {
    const std::vector<float> sinks(options->sinks,
                                   options->sinks + options->sink_count);
    const nb::object answer =
        instance.attr("attend")(layer, Ints(sequences, sequence_count),
                                Ints(query_rows, sequence_count), Rows(*query),
                                options->soft_cap, sinks);
    const auto numbers = nb::cast<Numbers>(answer);
    std::copy_n(numbers.data(), numbers.size(), out);
  });
}

int Pools::Slots(void* pool, std::optional<int> group, std::int32_t sequence,
                 std::int32_t begin, std::int32_t end, std::int64_t* slots,
                 std::size_t room, std::size_t* count) {
  return On(pool, [&](nb::object& instance) {
    const auto found = nb::cast<std::vector<std::int64_t>>(
        instance.attr("slots")(sequence, begin, end, group));
    *count = found.size();
    std::copy_n(found.begin(), std::min(room, found.size()), slots);
  });
}

// The fields of kvtwin.PoolSetup, without its groups.
nb::dict FieldsOf(const kvtwin_pool_params& params) {
  const auto named = [](kvtwin_dtype dtype) {
    const std::string_view name = kDTypeNames.at(AsSize(dtype));
    return nb::str(name.data(), name.size());
  };
  nb::dict fields;
  fields["block_size"] = params.block_size;
  fields["blocks"] = params.blocks;
  fields["max_seq_len"] = params.max_seq_len;
  fields["layers"] = params.layers;
  fields["kv_heads"] = params.kv_heads;
  fields["k_head_dim"] = params.k_head_dim;
  fields["v_head_dim"] = params.v_head_dim;
  fields["dtype"] = named(params.dtype);
  fields["v_dtype"] = named(params.v_dtype);
  fields["layout"] =
      params.layout == KVTWIN_HEAD_MAJOR ? "head_major" : "token_major";
  fields["window"] =
      params.window == 0 ? nb::object(nb::none()) : nb::int_(params.window);
  fields["states"] = params.states != 0;
  return fields;
}

int Pools::Init(const kvtwin_pool_params* params, void** pool) {
  std::string message;
  const int status = Guarded(message, Refusals::kNone, [&] {
    nb::dict fields = FieldsOf(*params);
    nb::list groups;
    for (std::size_t i = 0; i < params->group_count; ++i) {
      groups.append(FieldsOf(params->groups[i]));
    }
    fields["groups"] = groups;
    auto instance = std::make_unique<Instance>();
    instance->pool = adapter_.attr("init")(fields);
    *pool = instance.release();
    made_one_ = true;
  });
  if (!message.empty()) init_error_ = props::PrintableLines(message);
  return status;
}

int Pools::Open(void* pool, const kvtwin_prompt* prompt,
                std::int32_t* sequence) {
  return On(pool, [&](nb::object& instance) {
    nb::list extra;
    for (std::size_t i = 0; i < prompt->extra_count; ++i) {
      extra.append(prompt->extra[i]);
    }
    nb::list media;
    for (std::size_t i = 0; i < prompt->media_count; ++i) {
      const kvtwin_media& one = prompt->media[i];
      media.append(nb::make_tuple(one.position, one.hash));
    }
    *sequence = nb::cast<std::int32_t>(instance.attr("open")(
        Ints(prompt->tokens, prompt->token_count),
        prompt->salt == nullptr ? "" : prompt->salt, extra, media));
  });
}

int Pools::Views(void* pool, std::int32_t sequence, std::int32_t layer,
                 kvtwin_paged_view* views, std::size_t room,
                 std::size_t* count) {
  auto counted = std::exchange(static_cast<Instance*>(pool)->counted, {});
  return On(pool, [&](nb::object& instance) {
    const bool again = counted && std::get<0>(*counted) == sequence &&
                       std::get<1>(*counted) == layer;
    const nb::list shown =
        again ? std::get<2>(*counted)
              : nb::list(instance.attr("views")(sequence, layer));
    if (!again)
      static_cast<Instance*>(pool)->counted = {sequence, layer, shown};
    *count = shown.size();
    const nb::object setup = instance.attr("setup").attr("of_layer")(layer);
    const auto number = [&](const char* name) {
      return nb::cast<std::int64_t>(setup.attr(name));
    };
    const auto dtype = [&](const char* name) {
      const auto text = nb::cast<std::string>(setup.attr(name));
      return static_cast<kvtwin_dtype>(
          *FromName<DType>(kDTypeNames, std::string_view(text)));
    };
    const auto kv_heads = number("kv_heads");
    const std::array dims = {number("k_head_dim"), number("v_head_dim")};
    const std::array dtypes = {dtype("dtype"), dtype("v_dtype")};
    for (std::size_t i = 0; i < std::min(room, shown.size()); ++i) {
      const nb::tuple view(shown[i]);
      const auto length =
          nb::cast<std::int32_t>(view[0].attr("shape")[nb::int_(0)]);
      views[i] = {.key = {.data = nullptr,
                          .dtype = dtypes[0],
                          .shape = {dims[0], kv_heads, length, 1},
                          .stride = {}},
                  .value = {.data = nullptr,
                            .dtype = dtypes[1],
                            .shape = {dims[1], kv_heads, length, 1},
                            .stride = {}},
                  .start = nb::cast<std::int32_t>(view[3]),
                  .length = length,
                  .block = nb::cast<std::int32_t>(view[2])};
      Point(view[0], views[i].key);
      Point(view[1], views[i].value);
    }
  });
}

int Pools::Table(void* pool, std::optional<int> group,
                 const std::int32_t* sequences, std::size_t sequence_count,
                 std::int32_t* columns, std::int32_t* blocks, std::size_t room,
                 std::size_t* count, std::int32_t* seq_lens) {
  return On(pool, [&](nb::object& instance) {
    const auto rows = nb::cast<std::vector<std::vector<std::int32_t>>>(
        instance.attr("table")(Ints(sequences, sequence_count), group));
    if (rows.size() != sequence_count) {
      throw nb::value_error("table returns another number of rows");
    }
    std::size_t widest = 0;
    for (const auto& row : rows) widest = std::max(widest, row.size());
    *columns = static_cast<std::int32_t>(widest);
    *count = widest * rows.size();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      seq_lens[i] =
          nb::cast<std::int32_t>(instance.attr("seq_len")(sequences[i]));
    }
    for (std::size_t i = 0; i < std::min(room, *count); ++i) {
      const auto& row = rows[i / widest];
      const std::size_t column = i % widest;
      blocks[i] = column < row.size() ? row[column] : -1;
    }
  });
}

class PoolDriver {
 public:
  PoolDriver(nb::object adapter, nb::object rerun)
      : pools_(std::move(adapter)),
        backend_(Value(props::DescribePoolBackend(&pools_.table()))),
        rerun_(std::move(rerun)) {}

  const Pools& pools() const { return pools_; }
  bool groups() const { return backend_.groups; }

  // The level that the user asks for, or else the level that the class claims.
  props::Level LevelOf(const std::optional<std::string>& asked) const {
    return asked ? AskedLevel(*asked, props::LevelsOf(backend_))
                 : backend_.level;
  }
  props::Subject SubjectAt(props::Level level,
                           props::PoolCalls* calls = nullptr) const {
    return Watched(props::BackendSubject(backend_, level, calls));
  }
  std::string WhyNoPool(const props::PagedHistory& history) const {
    const std::string why = props::WhyNoPool(backend_.name, backend_.abilities,
                                             backend_.groups, history);
    const std::string& error = pools_.init_error();
    return error.empty() ? why : why + ": " + error;
  }
  std::vector<std::string> NotRun(const props::PagedHistory& history,
                                  props::Level level) const {
    return props::NotRun(history, level, props::NotDeclared(backend_));
  }
  // Returns the class as a subject, which `law` judges if it is not null.
  props::Subject SubjectOf(const props::PoolLaw* law,
                           props::Level level) const {
    return law == nullptr ? SubjectAt(level)
                          : Watched(props::LawSubject(backend_, *law));
  }
  props::PoolInfo Info() const {
    props::PoolInfo info{.name = backend_.name,
                         .claims = backend_.level,
                         .levels = props::LevelsOf(backend_),
                         .groups = backend_.groups,
                         .laws = {},
                         .not_declared = props::NotDeclared(backend_)};
    for (const props::PoolLaw& law : props::PoolLaws()) {
      if (props::MayBeJudged(backend_, law)) info.laws.emplace_back(law.name);
    }
    return info;
  }

  // Raises NotSupported, because no history could make a pool.
  void RefuseVain() const {
    Raise({StatusCode::kNotSupported,
           fmt::format("each __init__ refused: {}", pools_.init_error())});
  }

  Finding Report(props::Failure failure, props::Level level) const {
    if (failure.function == "init") {
      failure.text += ": " + pools_.init_error();
    }
    failure.rerun = TextOf(rerun_(failure.history));
    failure.report.clear();
    failure.report = props::FailureText(failure);
    return FindingOf(failure, level);
  }

 private:
  // Returns the subject. Before each history it sees interrupts; a history
  // whose close fails is a finding.
  props::Subject Watched(props::Subject subject) const {
    subject.run_pool = [this, run = subject.run_pool](
                           const props::PagedHistory& history,
                           const props::PoolRunOptions& options) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      props::RunResult result = run(history, options);
      auto of_close = pools_.TakeCloseFailure();
      if (!result.failure) result.failure = std::move(of_close);
      return result;
    };
    return subject;
  }

  Pools pools_;
  props::PoolBackend backend_;
  nb::object rerun_;
};

// Runs random histories; if `depth` is above 0, all histories of that many
// operations.
Fuzzed FuzzPool(nb::object adapter, nb::object rerun, std::int64_t operations,
                double seconds, std::uint64_t seed,
                const std::vector<std::string>& known, double shrink_seconds,
                const std::optional<std::string>& asked, int depth) {
  return Raising([&]() -> Fuzzed {
    const PoolDriver driver(std::move(adapter), std::move(rerun));
    const auto refuse_if_vain = [&] {
      if (!driver.pools().made_one()) driver.RefuseVain();
    };
    const props::Level level = driver.LevelOf(asked);
    props::Subject subject = driver.SubjectAt(level);
    subject.shrink_seconds = shrink_seconds;
    std::int64_t ran = 0;
    subject.run_pool = [&, run = subject.run_pool](
                           const props::PagedHistory& history,
                           const props::PoolRunOptions& options) {
      props::RunResult result = run(history, options);
      if (++ran > kVainHistories && !result.failure) refuse_if_vain();
      return result;
    };
    props::FuzzOptions options;
    options.seed = seed;
    options.groups = driver.groups();
    options.operations = operations;
    options.seconds = seconds;
    options.known_buckets = {known.begin(), known.end()};
    const props::PagedFuzzResult result =
        depth > 0 ? props::ExplorePaged(depth, options, subject)
                  : props::FuzzPools(options, subject);
    std::vector<Finding> findings;
    if (result.failure) {
      findings.push_back(driver.Report(*result.failure, level));
    } else {
      refuse_if_vain();
    }
    const bool stored_nothing =
        findings.empty() && result.counts.StoredNothing();
    const bool right = findings.empty() && !stored_nothing;
    return {right ? std::string(props::LevelName(level)) : "none",
            right,
            /*not judged*/ stored_nothing,
            result.counts.operations,
            result.ran,
            std::move(findings),
            result.passed_over,
            props::NotesOn(result.answers)};
  });
}

Ran RunPool(nb::object adapter, nb::object rerun, const std::string& line,
            const std::optional<std::string>& asked) {
  return Raising([&]() -> Ran {
    const PoolDriver driver(std::move(adapter), std::move(rerun));
    const props::PagedHistory history = Value(props::ParsePagedHistory(line));
    const props::Level level = driver.LevelOf(asked);
    props::PoolCalls noted;
    const props::Subject subject = driver.SubjectAt(level, &noted);
    const props::RunResult result = props::RunHistory(history, subject);
    if (!result.ran && !result.failure) {
      Raise({StatusCode::kNotSupported, driver.WhyNoPool(history)});
    }
    std::vector<std::string> calls;
    for (const props::Step& step : noted.Steps()) {
      calls.push_back(props::CallLineOf(step));
    }
    const bool judged =
        result.failure || props::HasJudged(result, subject.level);
    Ran ran = {std::move(calls), std::nullopt, driver.NotRun(history, level),
               judged ? "" : std::string(props::kNothingJudged)};
    if (result.failure) {
      std::get<1>(ran) = driver.Report(
          props::Explain(history, *result.failure, driver.SubjectAt(level)),
          level);
    }
    return ran;
  });
}

std::vector<std::string> PoolLawNames() {
  std::vector<std::string> names;
  for (const props::PoolLaw& law : props::PoolLaws()) {
    names.emplace_back(law.name);
  }
  return names;
}

// Judges a history, or about `count` random histories, by a law. Returns the
// fields of kvtwin.LawResult.
nb::dict JudgeByLaw(const PoolDriver& driver, const props::PoolLaw& law,
                    std::uint64_t seed, std::int64_t count,
                    const std::optional<props::PagedHistory>& history,
                    const nb::object& rerun) {
  const props::PoolInfo info = driver.Info();
  std::string why_not = props::WhyNotJudged(law, info);
  props::PagedFuzzResult result;
  if (why_not.empty()) {
    props::FuzzOptions options;
    options.seed = seed;
    options.groups = driver.groups();
    result = props::JudgePools(options, count, history,
                               driver.SubjectOf(&law, info.claims));
  }
  const std::string shrunk = result.failure ? props::ToText(result.shrunk) : "";
  nb::dict fields;
  fields["name"] = std::string(law.name);
  fields["statement"] = std::string(law.statement);
  fields["rules"] = std::string(law.rules);
  fields["histories"] = result.ran;
  fields["judged"] = result.judged;
  if (why_not.empty() && result.ran == 0) {
    why_not = "__init__ refuses the pools of all histories: " +
              driver.pools().init_error();
  }
  fields["not_judged"] = why_not;
  fields["check"] = result.failure ? std::string(law.name) : "";
  fields["reason"] = result.failure ? result.failure->text : "";
  fields["history"] = shrunk;
  fields["rerun"] =
      result.failure ? TextOf(rerun(std::string(law.name), shrunk)) : "";
  return fields;
}

nb::typed<nb::list, nb::any> JudgePoolLaws(
    nb::object adapter, const nb::object& rerun,
    const std::vector<std::string>& names, std::uint64_t seed,
    std::int64_t count, const std::optional<std::string>& history) {
  return Raising([&] {
    const PoolDriver driver(std::move(adapter), rerun);
    std::optional<props::PagedHistory> parsed;
    if (history) parsed = Value(props::ParsePagedHistory(*history));
    nb::list answers;
    for (const std::string& name : names) {
      answers.append(JudgeByLaw(driver, *props::FindPoolLaw(name), seed, count,
                                parsed, rerun));
    }
    return answers;
  });
}

// Like Certify for caches (live.cc).
nb::typed<nb::dict, nb::str, nb::any> CertifyPools(
    nb::object adapter, const nb::object& rerun, const nb::object& rerun_law,
    std::int64_t operations, std::int64_t histories, std::uint64_t seed,
    const std::optional<std::string>& old) {
  return Raising([&] {
    if (old)
      Value(props::ReadCertificate(*old));  // Refuse it before a long run.
    const PoolDriver driver(std::move(adapter), rerun);
    props::CertifyOptions options;
    options.fuzz.operations = operations;
    options.fuzz.seed = seed;
    options.laws.count = histories;
    props::Certificate certificate = props::CertifyPool(
        driver.Info(), options,
        [&](props::Level level, const props::PoolLaw* law) {
          return driver.SubjectOf(law, level);
        },
        [&](const props::PoolLaw& law, const props::PagedHistory& history,
            const props::Subject& /*subject*/) {
          return TextOf(
              rerun_law(std::string(law.name), props::ToText(history)));
        });
    if (certificate.none_made) driver.RefuseVain();
    for (props::CertifiedFinding& finding : certificate.findings) {
      finding.rerun = TextOf(rerun(finding.history));
    }
    return CertificateDict(certificate, old);
  });
}

}  // namespace

void BindPool(nb::module_& m) {
  m.def("pool_law_names", &PoolLawNames);
  m.def("judge_pool_laws", &JudgePoolLaws, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("names"), nb::arg("seed"), nb::arg("count"),
        nb::arg("history").none());
  m.def("certify_pool", &CertifyPools, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("rerun_law"), nb::arg("operations"), nb::arg("histories"),
        nb::arg("seed"), nb::arg("old").none());
  m.def("fuzz_pool", &FuzzPool, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("operations"), nb::arg("seconds"), nb::arg("seed"),
        nb::arg("known"), nb::arg("shrink_seconds"), nb::arg("level").none(),
        nb::arg("depth"));
  m.def("run_pool", &RunPool, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("history"), nb::arg("level").none());
}

}  // namespace kvtwin::python
