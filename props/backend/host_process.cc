#include "props/backend/host_process.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <csignal>
#include <filesystem>
#include <limits>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "kvtwin/pool_backend.h"
#include "props/backend/host/host.h"
#include "props/backend/host_child.h"
#include "props/base/program.h"

namespace kvtwin::props {
namespace {

// About as many steps as the explorer tries in a state.
constexpr std::size_t kStepsOfAState = 1000;

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr auto kFunctions = std::to_array<std::string_view>(
    {"loading", "init", "close", "start_forward", "put", "get",
     "get (reading what it returned)", "remove", "copy_prefix", "can_resume",
     "shift", "set_causal", "set_layer_type", "encoder_cached", "cells",
     "snapshot", "restore", "attend", "find_prefix", "checkpoint",
     // Functions of pools.
     "open", "fork", "seq_len", "append", "commit", "commit_unknown", "views",
     "views_packed", "contiguous_kv", "truncate", "free", "usage", "table",
     "csr", "slots", "group_table", "group_csr", "group_slots", "add_media",
     "group_usage", "find", "resume_before"});

RunResult EndedByNonsense(std::size_t operations,
                          const Json::exception& error) {
  RunResult result = {.ran = true};
  result.failure = MakeFailure("backend: crash", WroteNonsense(error.what()));
  result.failure->step = operations;
  return result;
}

// A host wrote JSON that has a wrong number.
class WrongNumber : public Json::exception {
 public:
  explicit WrongNumber(const std::string& text) : exception(0, text.c_str()) {}
};

// The largest count and the largest place that a host may write: sums of counts
// fit into 64 bits, and sums of places into 32.
constexpr std::int64_t kCountMax = std::int64_t{1} << 40;
constexpr int kPlaceMax = 1 << 28;

// Returns the integer `json`, which the host wrote as `name`.
template <std::integral Integer>
Integer IntegerOf(const Json& json, std::string_view name, Integer least,
                  Integer most) {
  const auto fits = [&](auto number) {
    return std::cmp_less_equal(least, number) &&
           std::cmp_less_equal(number, most);
  };
  if (json.is_number_unsigned()
          ? fits(json.get<std::uint64_t>())
          : json.is_number_integer() && fits(json.get<std::int64_t>())) {
    return json.get<Integer>();
  }
  throw WrongNumber(fmt::format(
      "{} is {}, it must be an integer from {} to {}", name,
      json.is_number() ? json.dump() : json.type_name(), least, most));
}

template <std::integral Integer>
Integer IntegerAt(const Json& json, const char* key, Integer least = 0,
                  Integer most = std::numeric_limits<Integer>::max()) {
  return IntegerOf(json.at(key), key, least, most);
}

std::int64_t CountAt(const Json& json, const char* key) {
  return IntegerAt(json, key, std::int64_t{0}, kCountMax);
}

int PlaceAt(const Json& json, const char* key) {
  return IntegerAt(json, key, -1, kPlaceMax);
}

template <class Enum>
Enum EnumAt(const Json& json, const char* key, Enum last) {
  return static_cast<Enum>(IntegerAt(json, key, 0, AsInt(last)));
}

std::vector<Level> LevelsAt(const Json& json, const char* key) {
  std::vector<Level> levels;
  for (const Json& one : json.at(key).get_ref<const Json::array_t&>()) {
    const int level = IntegerOf(one, key, 0, AsInt(Level::kAttention));
    levels.push_back(static_cast<Level>(level));
  }
  return levels;
}

std::vector<int> IntegersOf(const Json& json, std::string_view name) {
  std::vector<int> integers;
  for (const Json& one : json.get_ref<const Json::array_t&>()) {
    integers.push_back(IntegerOf(one, name, 0, kPlaceMax));
  }
  return integers;
}

// Returns whether a process may get another history: not after it wrote outside
// of its memory, or leaked.
bool IsSound(const Failure& failure) {
  return failure.party() != Party::kBackend;
}

}  // namespace

Json ToJson(const Failure& failure) {
  Json json = {
      {"step", failure.step},         {"check", failure.check},
      {"text", failure.text},         {"row", failure.row},
      {"column", failure.column},     {"first_cell", failure.first_cell},
      {"function", failure.function}, {"part", failure.part},
      {"of_left", failure.of_left},   {"of_window", failure.of_window}};
  if (failure.call) json["call"] = *failure.call;
  if (failure.pool_call) json["pool_call"] = *failure.pool_call;
  if (failure.pool_change) json["pool_change"] = *failure.pool_change;
  return json;
}

Failure FailureFromJson(const Json& json) {
  Failure failure = {.step = AsSize(CountAt(json, "step")),
                     .check = json.at("check").get<std::string>(),
                     .text = json.at("text").get<std::string>(),
                     .row = PlaceAt(json, "row"),
                     .column = PlaceAt(json, "column"),
                     // As the backend said it.
                     .first_cell = IntegerAt(json, "first_cell",
                                             std::numeric_limits<int>::min()),
                     .function = json.at("function").get<std::string>(),
                     .part = EnumAt(json, "part", WrongPart::kEncoder),
                     .of_left = json.at("of_left").get<bool>(),
                     .of_window = json.at("of_window").get<bool>()};
  if (json.contains("call")) {
    failure.call = EnumAt(json, "call", OpKind::kFind);
  }
  if (json.contains("pool_call")) {
    failure.pool_call = EnumAt(json, "pool_call", PagedTraceOpKind::kAttend);
  }
  if (json.contains("pool_change")) {
    failure.pool_change =
        EnumAt(json, "pool_change", PagedTraceOpKind::kAttend);
  }
  return failure;
}

Json ToJson(const RunResult& result) {
  Json json = {{"ran", result.ran},
               {"operations", result.operations},
               {"views", result.views},
               {"digest", result.digest},
               {"answers", result.answers.Numbers()}};
  if (!result.failure) return json;
  json["failure"] = ToJson(*result.failure);
  for (const Step& step : result.failure->trace) {
    json["trace"].push_back({{"number", step.number}, {"call", step.call}});
  }
  return json;
}

RunResult RunResultFromJson(const Json& json) {
  RunResult result;
  result.ran = json.at("ran").get<bool>();
  result.operations = CountAt(json, "operations");
  result.views = CountAt(json, "views");
  result.digest = IntegerAt<std::uint64_t>(json, "digest");
  result.answers =
      AnswerCounts::Of(json.at("answers").get<AnswerCounts::AllNumbers>());
  if (!json.contains("failure")) return result;
  result.failure = FailureFromJson(json.at("failure"));
  for (const Json& step : json.value("trace", Json::array())) {
    Step& call = result.failure->trace.emplace_back();
    call.number = CountAt(step, "number");
    call.call = step.at("call").get<std::string>();
  }
  return result;
}

namespace {

// The counts of coverage, by name.
constexpr auto kPoolCounts =
    std::to_array<std::pair<const char*, std::int64_t PagedCoverageCounts::*>>(
        {{"operations", &PagedCoverageCounts::operations},
         {"not_made", &PagedCoverageCounts::not_made},
         {"found", &PagedCoverageCounts::found},
         {"copied", &PagedCoverageCounts::copied},
         {"evicted", &PagedCoverageCounts::evicted},
         {"truncated", &PagedCoverageCounts::truncated},
         {"full", &PagedCoverageCounts::full},
         {"longest", &PagedCoverageCounts::longest},
         {"whole", &PagedCoverageCounts::whole},
         {"outputs", &PagedCoverageCounts::outputs}});

}  // namespace

Json ToJson(const PagedCoverageCounts& counts) {
  Json json;
  for (const auto& [name, count] : kPoolCounts) json[name] = counts.*count;
  return json;
}

PagedCoverageCounts PagedCountsFromJson(const Json& json) {
  PagedCoverageCounts counts;
  for (const auto& [name, count] : kPoolCounts) {
    counts.*count = CountAt(json, name);
  }
  return counts;
}

int FunctionNumber(std::string_view name) {
  const auto* at = std::ranges::find(kFunctions, name);
  return at == kFunctions.end() ? -1 : AsInt(at - kFunctions.begin());
}

std::string_view FunctionName(int number) {
  const auto at = AsSize(number);
  return number < 0 || at >= kFunctions.size() ? "" : kFunctions[at];
}

Json ToJson(const BackendInfo& info) {
  const Abilities& abilities = info.abilities;
  return {{"name", info.name},
          {"profile", info.profile},
          {"claims", info.claims},
          {"kinds", abilities.kinds},
          {"can", abilities.can},
          {"dtypes", abilities.dtypes},
          {"v_layouts", abilities.v_layouts},
          {"shifts", abilities.shifts},
          {"mask_dtypes", abilities.mask_dtypes},
          {"max_sequences", abilities.max_sequences},
          {"max_layers", abilities.max_layers},
          {"max_padding", abilities.max_padding},
          {"max_mask_padding", abilities.max_mask_padding},
          {"max_position", abilities.max_position},
          {"placements", abilities.placements},
          {"cannot", abilities.cannot},
          {"can_resume", abilities.can_resume},
          {"set_causal", abilities.set_causal},
          {"shift", abilities.shift},
          {"snapshots", abilities.snapshots},
          {"tolerance", info.tolerance},
          {"attend", info.attend.has_value()},
          {"attend_dtype", info.attend.value_or(AttendInfo()).dtype},
          {"query_heads", info.attend.value_or(AttendInfo()).query_heads},
          {"attend_tolerance", info.attend.value_or(AttendInfo()).tolerance},
          {"has_get", info.has_get},
          {"has_cells", info.has_cells},
          {"lacks", info.lacks}};
}

BackendInfo BackendInfoFromJson(const Json& json) {
  BackendInfo info;
  Abilities& abilities = info.abilities;
  json.at("name").get_to(info.name);
  json.at("profile").get_to(info.profile);
  if (const auto rules = ParseRules(info.profile); rules.ok()) {
    info.rules = *rules;
  }
  info.claims = EnumAt(json, "claims", Level::kAttention);
  const auto read = [&](const char* key, auto& number) {
    number = IntegerAt<std::remove_reference_t<decltype(number)>>(json, key);
  };
  read("kinds", abilities.kinds);
  read("can", abilities.can);
  read("dtypes", abilities.dtypes);
  read("v_layouts", abilities.v_layouts);
  read("shifts", abilities.shifts);
  read("mask_dtypes", abilities.mask_dtypes);
  read("max_sequences", abilities.max_sequences);
  read("max_layers", abilities.max_layers);
  read("max_padding", abilities.max_padding);
  read("max_mask_padding", abilities.max_mask_padding);
  read("max_position", abilities.max_position);
  read("placements", abilities.placements);
  read("cannot", abilities.cannot);
  json.at("can_resume").get_to(abilities.can_resume);
  json.at("set_causal").get_to(abilities.set_causal);
  json.at("shift").get_to(abilities.shift);
  json.at("snapshots").get_to(abilities.snapshots);
  json.at("tolerance").get_to(info.tolerance);
  if (json.at("attend").get<bool>()) {
    info.attend = {.dtype = EnumAt(json, "attend_dtype", DType::kBits),
                   .query_heads = IntegerAt<int>(json, "query_heads"),
                   .tolerance = json.at("attend_tolerance").get<double>()};
  }
  json.at("has_get").get_to(info.has_get);
  json.at("has_cells").get_to(info.has_cells);
  json.at("lacks").get_to(info.lacks);
  return info;
}

Json ToJson(const Expansion& expansion) {
  Json found = Json::array();
  for (const Expansion::Found& one : expansion.found) {
    found.push_back(Json::array({one.state, one.step, one.names}));
  }
  Json json = {{"checked", expansion.checked},
               {"differences", expansion.differences},
               {"not_made", expansion.not_made},
               {"found", found}};
  if (!expansion.failure) return json;
  const Expansion::StepTaken& failed = expansion.failed;
  json["failure"] = ToJson(*expansion.failure);
  json["failed"] = {{"step", failed.step},
                    {"except", failed.except},
                    {"reserved", failed.reserved},
                    {"reserved_again", failed.reserved_again},
                    {"positions", failed.positions},
                    {"sequences", failed.sequences}};
  return json;
}

Expansion ExpansionFromJson(const Json& json) {
  Expansion expansion;
  expansion.checked = CountAt(json, "checked");
  expansion.differences = CountAt(json, "differences");
  json.at("not_made").get_to(expansion.not_made);
  for (const Json& value : json.at("found")) {
    constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
    expansion.found.push_back(
        {IntegerOf(value.at(0), "found", std::uint64_t{0}, kMost),
         IntegerOf(value.at(1), "found", 0U, std::uint32_t{kPlaceMax}),
         IntegersOf(value.at(2), "found")});
  }
  if (!json.contains("failure")) return expansion;
  expansion.failure = FailureFromJson(json.at("failure"));
  const Json& said = json.at("failed");
  Expansion::StepTaken& failed = expansion.failed;
  failed.step = PlaceAt(said, "step");
  failed.except = IntegersOf(said.at("except"), "except");
  said.at("reserved").get_to(failed.reserved);
  said.at("reserved_again").get_to(failed.reserved_again);
  failed.positions = IntegersOf(said.at("positions"), "positions");
  failed.sequences = IntegersOf(said.at("sequences"), "sequences");
  return expansion;
}

Host::Host(HostOptions options) : options_(std::move(options)) {
  std::signal(SIGPIPE, SIG_IGN);  // Host notices a dead process otherwise.
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  // dlopen would look elsewhere for a name without a slash.
  options_.library = fs::absolute(options_.library).string();
}

Host::~Host() = default;

// Starts a host and returns its first line.
Result<Json> Host::Greet() {
  const auto wrong = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  std::error_code error;
  if (!fs::is_regular_file(options_.library, error)) {
    return wrong(fmt::format("the file {} does not exist", options_.library));
  }
  auto process = std::make_unique<HostProcess>(options_);
  if (!process->alive()) return wrong(process->died().text);
  std::optional<Json> said = process->Answer(options_.call_seconds);
  if (!said) return wrong(process->died().text);
  if (said->contains("error")) {
    const Json& error = said->at("error");
    return wrong(error.is_string() ? error.get<std::string>()
                                   : WroteNonsense(error.dump()));
  }
  process->Remember();
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(process));
  return *std::move(said);
}

// Returns `read` of a part of the first line.
template <class Read>
auto ReadGreeting(const Json& part, const Read& read)
    -> Result<decltype(read(part))> {
  try {
    return read(part);
  } catch (const Json::exception& error) {
    return Status(StatusCode::kInvalidArgument, WroteNonsense(error.what()));
  }
}

Result<BackendInfo> Host::Describe() {
  const Result<Json> said = Greet();
  if (!said.ok()) return said.status();
  if (said->contains("cache")) {
    return ReadGreeting(said->at("cache"), [&](const Json& cache) {
      BackendInfo info = BackendInfoFromJson(cache);
      UseProfile(options_.profile, info);
      return info;
    });
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} is a pool of blocks, not a cache; a history of "
                            "a pool begins with kvp1",
                            options_.library));
}

Result<PoolInfo> Host::DescribePool() {
  const Result<Json> said = Greet();
  if (!said.ok()) return said.status();
  if (!said->contains("pool")) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} is not a pool: it exports no {}",
                              options_.library, KVTWIN_GET_POOL_BACKEND_V1));
  }
  return ReadGreeting(said->at("pool"), [](const Json& pool) {
    PoolInfo info;
    pool.at("name").get_to(info.name);
    info.claims = EnumAt(pool, "claims", Level::kAttention);
    info.levels = LevelsAt(pool, "levels");
    pool.at("groups").get_to(info.groups);
    pool.at("laws").get_to(info.laws);
    pool.at("not_declared").get_to(info.not_declared);
    info.abilities.can = IntegerAt<std::uint32_t>(pool, "can");
    info.abilities.dtypes = IntegerAt<std::uint32_t>(pool, "dtypes");
    const auto multiple = [&](const char* key) {
      return IntegerOf(pool.at(key), key, 1, kPoolMultipleMost);
    };
    info.abilities.block_multiple = multiple("block_multiple");
    info.abilities.head_dim_multiple = multiple("head_dim_multiple");
    return info;
  });
}

std::optional<Json> Host::AskOnce(const Json& asked, std::size_t operations,
                                  bool known_to_hang,
                                  std::unique_ptr<HostProcess>& process) {
  process = Take();
  if (!process->alive() ||
      !process->Ask(asked, options_.SecondsOf(operations))) {
    return std::nullopt;
  }
  std::optional<Json> said = process->Answer(Patience(known_to_hang));
  if (said && said->contains("error")) {  // The host itself failed.
    throw std::logic_error("kvtwin-host cannot read what kvtwin asks: " +
                           said->at("error").get<std::string>());
  }
  return said;
}

void Host::GiveBack(std::unique_ptr<HostProcess> process) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(process));
}

LawResult Host::Judge(const Law& law, const History& history, Level level,
                      bool known_to_hang) {
  std::unique_ptr<HostProcess> process;
  try {
    const std::optional<Json> said =
        AskOnce({{"law", law.name},
                 {"history", ToText(history)},
                 {"level", level},
                 {"profile", options_.profile}},
                history.ops.size(), known_to_hang, process);
    if (!said) return {.judged = 1, .failure = process->died()};
    LawResult result = {.judged = CountAt(*said, "judged")};
    if (said->contains("failure")) {
      result.failure = FailureFromJson(said->at("failure"));
    }
    if (!result.failure || IsSound(*result.failure)) {
      GiveBack(std::move(process));
    }
    return result;
  } catch (const Json::exception& error) {
    return {.judged = 1, .failure = EndedByNonsense(0, error).failure};
  }
}

Expansion Host::Expand(const ExploreSize& size, const ExploreCase& what,
                       const ExploreWay& way) {
  std::unique_ptr<HostProcess> process;
  Json path = Json::array();
  for (const auto& [step, names] : way.path) {
    path.push_back({{"step", step}, {"names", names}});
  }
  const auto ended = [&](const Failure& failure) -> Expansion {
    return {.differences = 1,
            .ended = true,
            .failure = failure,
            .failed = {.step = process->step()}};
  };
  try {
    const std::optional<Json> said = AskOnce({{"explore", what.name},
                                              {"cells", size.cells},
                                              {"sequences", size.sequences},
                                              {"positions", size.positions},
                                              {"dtype", size.dtype},
                                              {"setup", ToText(what.setup)},
                                              {"drafts", size.drafts},
                                              {"state", way.base},
                                              {"path", path},
                                              {"names", way.names},
                                              {"level", Level::kIdentity},
                                              {"profile", options_.profile}},
                                             kStepsOfAState,
                                             /*known_to_hang=*/false, process);
    if (!said) return ended(process->died());
    Expansion expansion = ExpansionFromJson(*said);
    const bool sound = !expansion.failure || IsSound(*expansion.failure);
    if (sound) GiveBack(std::move(process));
    expansion.ended = !sound;
    return expansion;
  } catch (const Json::exception& error) {
    return ended(*EndedByNonsense(0, error).failure);
  }
}

RunResult Host::AskPool(const PagedHistory& history, Level level,
                        const PoolLaw* law, const PoolRunOptions& options) {
  std::unique_ptr<HostProcess> process;
  Json asked = {{"pool", ToText(history)}, {"level", level}};
  if (law != nullptr) asked["law"] = law->name;
  const std::optional<Json> said =
      AskOnce(asked, history.ops.size(), options.known_to_hang, process);
  RunResult result = {.ran = true};
  if (!said) {
    result.failure = process->died();
    result.failure->step = history.ops.size();
    result.failure->trace = process->PoolSteps();
    return result;
  }
  result = RunResultFromJson(*said);
  if (options.counts != nullptr) {
    PagedCoverageCounts counted = PagedCountsFromJson(said->at("counts"));
    if (result.ran) AddDTypes(history.spec, counted);
    options.counts->Add(counted);
  }
  if (!result.failure || IsSound(*result.failure)) GiveBack(std::move(process));
  return result;
}

Subject Host::SubjectAt(const PoolInfo& info, Level level,
                        std::string arguments, const PoolLaw* law) {
  const auto run = [this, level, law](const PagedHistory& history,
                                      const PoolRunOptions& options) {
    try {
      return AskPool(history, level, law, options);
    } catch (const Json::exception& error) {
      return EndedByNonsense(history.ops.size(), error);
    }
  };
  return {.name = info.name,
          .run_pool = run,
          .shrink_seconds = options_.shrink_seconds,
          .level = level,
          .abilities = info.abilities,
          .arguments = std::move(arguments)};
}

double Host::Patience(bool known_to_hang) const {
  return known_to_hang ? std::min(options_.call_seconds, 0.2)
                       : options_.call_seconds;
}

std::unique_ptr<HostProcess> Host::Take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<HostProcess> process = std::move(idle_.back());
      idle_.pop_back();
      return process;
    }
  }
  auto process = std::make_unique<HostProcess>(options_);
  if (process->alive() && process->Answer(options_.call_seconds)) {
    process->Remember();
  }
  return process;
}

RunResult Host::Ask(const History& history, Level level,
                    const RunOptions& options, const Rules* rules,
                    const std::string& arguments, std::string* page) {
  CallTrace* const trace = options.trace;
  std::unique_ptr<HostProcess> process = Take();
  RunResult result;
  std::string begun;  // The call that is not answered yet.
  const auto died = [&] {
    result.failure = process->died();
    if (trace != nullptr) {  // The call that did not return.
      Step& step = trace->steps.emplace_back();
      step.number = std::ssize(trace->steps);
      step.call = begun.empty() ? process->function() : begun;
    }
    const std::int64_t step = process->step();
    result.failure->step = step < 0 ? history.ops.size() : AsSize(step);
    result.ran = true;
    return result;
  };
  const std::vector<int> values =
      rules == nullptr ? std::vector<int>() : ValuesOf(*rules);
  if (!process->alive() ||
      !process->Ask({{"history", ToText(history)},
                     {"level", level},
                     {"with_trace", trace != nullptr},
                     {"page", page != nullptr},
                     {"arguments", arguments},
                     {"profile", options_.profile},
                     {"program", Program()},
                     {"rules", values}},
                    options_.SecondsOf(history.ops.size()))) {
    return died();
  }
  for (;;) {
    const std::optional<Json> said =
        process->Answer(Patience(options.known_to_hang));
    if (!said) return died();
    if (said->contains("begun")) {
      begun = said->value("begun", "");
      continue;
    }
    if (said->contains("step")) {
      begun.clear();
      if (trace == nullptr) continue;
      Step& step = trace->steps.emplace_back();
      step.number = std::ssize(trace->steps);
      step.call = said->at("step").get<std::string>();
      step.code = EnumAt(*said, "code", StatusCode::kDeviceError);
      step.begins_pass = said->value("begins_pass", false);
      if (said->contains("own_call")) {
        step.own_call = EnumAt(*said, "own_call", OwnCall::kCommit);
      }
      continue;
    }
    if (said->contains("error")) {
      result.failure = MakeFailure("backend: error",
                                   "kvtwin-host: " + said->value("error", ""));
      result.failure->step = history.ops.size();
      break;
    }
    result = RunResultFromJson(*said);
    if (page != nullptr) *page = said->value("page", "");
    break;
  }
  if (!result.failure || IsSound(*result.failure)) GiveBack(std::move(process));
  return result;
}

RunResult Host::Run(const History& history, Level level,
                    const RunOptions& options, const Rules* rules) {
  try {
    return Ask(history, level, options, rules);
  } catch (const Json::exception& error) {
    return EndedByNonsense(history.ops.size(), error);
  }
}

std::string Host::Page(const History& history, Level level,
                       const std::string& arguments) {
  std::string html;
  try {
    Ask(history, level, {}, nullptr, arguments, &html);
    // A host that writes nonsense has no page.
  } catch (const Json::exception&) {
    html.clear();
  }
  return html;
}

Subject Host::SubjectAt(const BackendInfo& info, Level level,
                        std::string arguments) {
  Subject subject;
  subject.name = info.name;
  subject.level = level;
  subject.rules = RulesAt(info, level);
  subject.abilities = info.abilities;
  SetAttend(info, subject);
  subject.arguments = std::move(arguments);
  subject.run = [this, level](const History& history,
                              const RunOptions& options) {
    return Run(history, level, options);
  };
  subject.shrink_seconds = options_.shrink_seconds;
  return subject;
}

}  // namespace kvtwin::props
