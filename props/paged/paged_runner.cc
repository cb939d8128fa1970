#include "props/paged/paged_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/guarded_paged.h"
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
  std::stringstream lines;
  const PoolRecorder* recorder = nullptr;
  const auto make_recorded =
      [&](const PagedSpec& spec,
          std::string_view name) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = make(spec, name);
    if (!pool.ok() || name != twin) return pool;
    auto recorded = std::make_unique<PoolRecorder>(
        std::move(*pool), fmt::format("kvtwin gen, {}", twin), lines);
    recorder = recorded.get();
    return std::unique_ptr<PagedPool>(std::move(recorded));
  };
  // The recorder is read after the run, so the pools live on.
  PagedDriver driver(history.spec, nullptr, make_recorded);
  const RunResult result = PlayOnPools(history, driver);
  std::string line;
  std::getline(lines, line);
  auto header = nlohmann::ordered_json::parse(line);
  header["history"] = ToText(history);
  out << header.dump() << '\n';
  std::int64_t count = 0;
  for (; std::getline(lines, line); ++count) out << line << '\n';
  if (!recorder->status().ok()) return recorder->status();
  if (result.failure) {
    return Status(StatusCode::kFailedPrecondition, result.failure->text);
  }
  return count;
}

}  // namespace kvtwin::props
