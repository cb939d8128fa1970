#include "props/paged/paged_runner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "optimized/fast_paths.h"
#include "props/attention/attending_twin.h"
#include "props/paged/pool_recorder.h"

namespace kvtwin::props {

namespace {

// Runs the history on pools that `driver` makes, and that live as long as it.
RunResult PlayOnPools(const PagedHistory& history, PagedDriver& driver) {
  RunResult result = {.ran = true};
  std::size_t step = history.ops.size();
  try {
    driver.SetUp();
    for (step = 0; step < history.ops.size(); ++step) {
      ++result.operations;
      driver.Do(history.ops[step]);
    }
    driver.End();
  } catch (const Failure& failure) {
    result.failure = failure;
    result.failure->step = step;
  }
  result.digest = driver.digest();
  return result;
}

}  // namespace

RunResult RunPaged(const PagedHistory& history, PagedCoverageCounts* counts,
                   const PagedMaker& make, bool same_messages, PoolCalls* calls,
                   const std::optional<PoolAttention>& attention) {
  const optimized::SharesInTurn shares_in_turn;
  PoolCalls own;
  PoolCalls& noted = calls == nullptr ? own : *calls;
  const PagedMaker make_noted =
      [&](const PagedSpec& spec,
          std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = make(spec, twin);
    if (!pool.ok() || twin == "reference") return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<PoolLog>(std::move(*pool), noted));
  };
  PagedDriver driver(history.spec, counts, make_noted, same_messages,
                     attention);
  if (counts != nullptr) AddDTypes(history.spec, *counts);
  RunResult result = PlayOnPools(history, driver);
  if (!result.failure) return result;
  result.failure->trace = noted.Steps();
  if (!result.failure->pool_call) result.failure->pool_call = noted.LastCall();
  result.failure->pool_change = noted.LastChange();
  return result;
}

RunResult RunHistory(const PagedHistory& history, const Subject& subject,
                     PoolRunOptions options) {
  options.known_to_hang = options.known_to_hang || subject.known_to_hang;
  if (subject.run_pool) return subject.run_pool(history, options);
  // The twin takes the place of the optimized pool.
  const bool attends = subject.level == Level::kAttention;
  const auto make =
      [&](const PagedSpec& spec,
          std::string_view name) -> Result<std::unique_ptr<PagedPool>> {
    const bool tested = name == "optimized";
    auto pool = MakePagedPool(spec, tested ? subject.name : name);
    if (!pool.ok() || !tested || !attends) return pool;
    return std::unique_ptr<PagedPool>(std::make_unique<AttendingPool>(
        std::move(*pool), *MakeAttention(subject.name),
        *MakeAttention(subject.name)));
  };
  std::optional<PoolAttention> attention;
  if (attends)
    attention = {.soft_cap = history.soft_cap, .sinks = history.sinks};
  return RunPaged(history, options.counts, make, /*same_messages=*/true,
                  /*calls=*/nullptr, attention);
}

Result<std::int64_t> WritePagedRecording(PagedHistory history,
                                         std::string_view twin,
                                         std::ostream& out,
                                         const PagedMaker& make) {
  std::erase_if(history.ops, [](const PagedOp& op) {
    return op.kind == PagedOpKind::kMisuse;
  });
  PagedTraceHeader header;
  header.producer = fmt::format("kvtwin gen, {}", twin);
  std::vector<PagedTraceOp> ops;
  const auto make_recorded =
      [&](const PagedSpec& spec,
          std::string_view name) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = make(spec, name);
    if (!pool.ok() || name != twin) return pool;
    header.spec = (*pool)->spec();
    return std::unique_ptr<PagedPool>(std::make_unique<PoolRecorder>(
        std::move(*pool),
        [&](PagedTraceOp op) { ops.push_back(std::move(op)); }));
  };
  PagedDriver driver(history.spec, nullptr, make_recorded);
  const RunResult result = PlayOnPools(history, driver);
  std::ostringstream first;
  Status status = WriteTraceHeader(header, first);
  if (!status.ok()) return status;
  auto with_history = nlohmann::ordered_json::parse(first.str());
  with_history["history"] = ToText(history);
  out << with_history.dump() << '\n';
  for (const PagedTraceOp& op : ops) {
    status = WriteTraceOp(op, out);
    if (!status.ok()) return status;
  }
  if (result.failure) {
    return Status(StatusCode::kFailedPrecondition, result.failure->text);
  }
  return std::ssize(ops);
}

namespace {

// Returns the description of the history's pool: "kvp1 block=2 ...".
std::string PoolPartOf(const PagedHistory& history) {
  const std::string line = ToText(history);
  return line.substr(0, line.find(" | "));
}

// Returns the dtypes of K and V in all layers.
std::set<DType> DTypesOfAll(const PagedSpec& spec) {
  if (spec.groups.empty()) {
    return {spec.dtype, spec.v_dtype.value_or(spec.dtype)};
  }
  std::set<DType> all;
  for (const PagedSpec& group : spec.groups) all.merge(DTypesOfAll(group));
  return all;
}

// Returns the names of the dtypes that the backend declares: "f32, f16".
std::string NamesOfDTypes(std::uint32_t dtypes) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kDTypeNames.size(); ++i) {
    if (HasBit(dtypes, static_cast<DType>(i))) names.push_back(kDTypeNames[i]);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::vector<std::string> NotRun(const PagedHistory& history, Level level,
                                const std::vector<std::string>& not_declared) {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    const PagedOp& op = history.ops[i];
    const std::string_view name = At(kPagedOpNames, op.kind);
    std::string why;
    if (op.kind == PagedOpKind::kMisuse && level != Level::kIdentity) {
      why = "misuse is tried at identity only";
    } else if (std::ranges::count(not_declared, name) > 0) {
      why = fmt::format("it does not declare {}", name);
    }
    // The first operation opens a sequence, whichever it is.
    if (why.empty() || i == 0) continue;
    std::ostringstream text;
    text << op;
    texts.push_back(fmt::format("{}: {}", text.str(), why));
  }
  return texts;
}

std::string WhyNoPool(std::string_view name, const Abilities& abilities,
                      bool has_groups, const PagedHistory& history) {
  const PagedSpec& spec = history.spec;
  if (!spec.groups.empty() && !has_groups) {
    return fmt::format("the pool of the line has groups, and {} declares none",
                       name);
  }
  if (FitsPool(abilities, spec)) {
    return fmt::format("the init of {} refuses such a pool: '{}'", name,
                       PoolPartOf(history));
  }
  for (const DType dtype : DTypesOfAll(spec)) {
    if (HasBit(abilities.dtypes, dtype)) continue;
    const std::string names = NamesOfDTypes(abilities.dtypes);
    return fmt::format(
        "the line has rows of {} ({}), and {} declares the dtypes {}: write "
        "dtype={} in the line",
        At(kDTypeNames, dtype), PoolPartOf(history), name, names,
        names.substr(0, names.find(',')));
  }
  return fmt::format(
      "{} declares blocks of a multiple of {} tokens, and heads of a multiple "
      "of {} elements, which the line does not have: '{}'",
      name, abilities.block_multiple, abilities.head_dim_multiple,
      PoolPartOf(history));
}

}  // namespace kvtwin::props
