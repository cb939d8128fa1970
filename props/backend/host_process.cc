#include "props/backend/host_process.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "kvtwin/pool_backend.h"
#include "props/backend/host/host.h"
#include "props/backend/host_child.h"
#include "props/base/program.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr auto kFunctions = std::to_array<std::string_view>(
    {"loading", "init", "close", "start_forward", "put", "get",
     "get (reading what it returned)", "remove", "copy_prefix", "can_resume",
     "shift", "set_causal", "set_layer_type", "encoder_cached", "cells",
     "snapshot", "restore",
     // Functions of pools.
     "open", "fork", "seq_len", "append", "commit", "commit_unknown", "views",
     "views_packed", "contiguous_kv", "truncate", "free", "usage", "table",
     "csr", "slots", "group_table", "group_csr", "group_slots", "add_media",
     "group_usage", "find", "resume_before"});

constexpr std::string_view kNonsense = "wrote nonsense to its harness: ";

RunResult WroteNonsense(std::size_t operations, const Json::exception& error) {
  RunResult result = {.ran = true};
  result.failure =
      MakeFailure("backend: crash", std::string(kNonsense) + error.what());
  result.failure->step = operations;
  return result;
}

// Returns whether a process may get another history: not after it wrote outside
// of its memory, or leaked.
bool IsSound(const Failure& failure) {
  return failure.party() != Party::kBackend;
}

}  // namespace

Json ToJson(const Failure& failure) {
  return {{"step", failure.step},     {"check", failure.check},
          {"text", failure.text},     {"row", failure.row},
          {"column", failure.column}, {"first_cell", failure.first_cell}};
}

Failure FailureFromJson(const Json& json) {
  return {.step = json.at("step").get<std::size_t>(),
          .check = json.at("check").get<std::string>(),
          .text = json.at("text").get<std::string>(),
          .row = json.at("row").get<int>(),
          .column = json.at("column").get<int>(),
          .first_cell = json.at("first_cell").get<int>()};
}

Json ToJson(const RunResult& result) {
  Json json = {{"ran", result.ran},
               {"operations", result.operations},
               {"views", result.views},
               {"digest", result.digest}};
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
  result.operations = json.at("operations").get<std::int64_t>();
  result.views = json.at("views").get<std::int64_t>();
  result.digest = json.at("digest").get<std::uint64_t>();
  if (!json.contains("failure")) return result;
  result.failure = FailureFromJson(json.at("failure"));
  for (const Json& step : json.value("trace", Json::array())) {
    Step& call = result.failure->trace.emplace_back();
    call.number = step.at("number").get<std::int64_t>();
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
         {"longest", &PagedCoverageCounts::longest}});

}  // namespace

Json ToJson(const PagedCoverageCounts& counts) {
  Json json;
  for (const auto& [name, count] : kPoolCounts) json[name] = counts.*count;
  return json;
}

PagedCoverageCounts PagedCountsFromJson(const Json& json) {
  PagedCoverageCounts counts;
  for (const auto& [name, count] : kPoolCounts) {
    counts.*count = json.at(name).get<std::int64_t>();
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
  json.at("claims").get_to(info.claims);
  json.at("kinds").get_to(abilities.kinds);
  json.at("can").get_to(abilities.can);
  json.at("dtypes").get_to(abilities.dtypes);
  json.at("v_layouts").get_to(abilities.v_layouts);
  json.at("shifts").get_to(abilities.shifts);
  json.at("mask_dtypes").get_to(abilities.mask_dtypes);
  json.at("max_sequences").get_to(abilities.max_sequences);
  json.at("max_layers").get_to(abilities.max_layers);
  json.at("max_padding").get_to(abilities.max_padding);
  json.at("max_mask_padding").get_to(abilities.max_mask_padding);
  json.at("max_position").get_to(abilities.max_position);
  json.at("placements").get_to(abilities.placements);
  json.at("cannot").get_to(abilities.cannot);
  json.at("can_resume").get_to(abilities.can_resume);
  json.at("set_causal").get_to(abilities.set_causal);
  json.at("shift").get_to(abilities.shift);
  json.at("snapshots").get_to(abilities.snapshots);
  json.at("tolerance").get_to(info.tolerance);
  if (json.at("attend").get<bool>()) {
    info.attend = {.dtype = json.at("attend_dtype").get<DType>(),
                   .query_heads = json.at("query_heads").get<int>(),
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
  json.at("checked").get_to(expansion.checked);
  json.at("differences").get_to(expansion.differences);
  json.at("not_made").get_to(expansion.not_made);
  for (const Json& value : json.at("found")) {
    expansion.found.push_back({value.at(0).get<std::uint64_t>(),
                               value.at(1).get<std::uint32_t>(),
                               value.at(2).get<std::vector<int>>()});
  }
  if (!json.contains("failure")) return expansion;
  expansion.failure = FailureFromJson(json.at("failure"));
  const Json& said = json.at("failed");
  Expansion::StepTaken& failed = expansion.failed;
  said.at("step").get_to(failed.step);
  said.at("except").get_to(failed.except);
  said.at("reserved").get_to(failed.reserved);
  said.at("reserved_again").get_to(failed.reserved_again);
  said.at("positions").get_to(failed.positions);
  said.at("sequences").get_to(failed.sequences);
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
                                   : std::string(kNonsense) + error.dump());
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
    return Status(StatusCode::kInvalidArgument,
                  std::string(kNonsense) + error.what());
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
                fmt::format("{} is a pool of blocks: use fuzz or explore with "
                            "--kind paged or --kind groups, or run with a "
                            "history of pools",
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
    return PoolInfo{pool.at("name").get<std::string>(),
                    pool.at("claims").get<Level>(),
                    pool.at("groups").get<bool>(),
                    pool.at("laws").get<std::vector<std::string>>(),
                    pool.at("not_declared").get<std::vector<std::string>>()};
  });
}

std::optional<Json> Host::AskOnce(const Json& asked, bool known_to_hang,
                                  std::unique_ptr<HostProcess>& process) {
  process = Take();
  if (!process->alive() || !process->Ask(asked)) return std::nullopt;
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
    const std::optional<Json> said = AskOnce({{"law", law.name},
                                              {"history", ToText(history)},
                                              {"level", level},
                                              {"profile", options_.profile}},
                                             known_to_hang, process);
    if (!said) return {.judged = 1, .failure = process->died()};
    LawResult result = {.judged = said->at("judged").get<std::int64_t>()};
    if (said->contains("failure")) {
      result.failure = FailureFromJson(said->at("failure"));
    }
    if (!result.failure || IsSound(*result.failure)) {
      GiveBack(std::move(process));
    }
    return result;
  } catch (const Json::exception& error) {
    return {.judged = 1, .failure = WroteNonsense(0, error).failure};
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
                                             /*known_to_hang=*/false, process);
    if (!said) return ended(process->died());
    Expansion expansion = ExpansionFromJson(*said);
    const bool sound = !expansion.failure || IsSound(*expansion.failure);
    if (sound) GiveBack(std::move(process));
    expansion.ended = !sound;
    return expansion;
  } catch (const Json::exception& error) {
    return ended(*WroteNonsense(0, error).failure);
  }
}

RunResult Host::AskPool(const PagedHistory& history, Level level,
                        const PoolLaw* law, const PoolRunOptions& options) {
  std::unique_ptr<HostProcess> process;
  Json asked = {{"pool", ToText(history)}, {"level", level}};
  if (law != nullptr) asked["law"] = law->name;
  const std::optional<Json> said =
      AskOnce(asked, options.known_to_hang, process);
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
      return WroteNonsense(history.ops.size(), error);
    }
  };
  return {.name = info.name,
          .run_pool = run,
          .shrink_seconds = options_.shrink_seconds,
          .level = level,
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
  const auto died = [&] {
    result.failure = process->died();
    if (trace != nullptr) {  // The call that did not return.
      Step& step = trace->steps.emplace_back();
      step.number = std::ssize(trace->steps);
      step.call = process->function();
    }
    const std::int64_t step = process->step();
    result.failure->step = step < 0 ? history.ops.size() : AsSize(step);
    result.ran = true;
    return result;
  };
  const std::vector<int> values =
      rules == nullptr ? std::vector<int>() : ValuesOf(*rules);
  if (!process->alive() || !process->Ask({{"history", ToText(history)},
                                          {"level", level},
                                          {"with_trace", trace != nullptr},
                                          {"page", page != nullptr},
                                          {"arguments", arguments},
                                          {"profile", options_.profile},
                                          {"program", Program()},
                                          {"rules", values}})) {
    return died();
  }
  for (;;) {
    const std::optional<Json> said =
        process->Answer(Patience(options.known_to_hang));
    if (!said) return died();
    if (said->contains("step")) {
      if (trace == nullptr) continue;
      Step& step = trace->steps.emplace_back();
      step.number = std::ssize(trace->steps);
      step.call = said->at("step").get<std::string>();
      step.by_client = said->value("by_client", false);
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
    return WroteNonsense(history.ops.size(), error);
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
