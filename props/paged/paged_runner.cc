#include "props/paged/paged_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "props/paged/pool_recorder.h"

namespace kvtwin::props {

namespace {

// Runs the history on pools that `trio` makes, and that live as long as it.
RunResult Play(const PagedHistory& history, PagedDriver& trio) {
  RunResult result = {.ran = true};
  std::size_t step = history.ops.size();
  try {
    trio.SetUp();
    for (step = 0; step < history.ops.size(); ++step) {
      ++result.operations;
      trio.Do(history.ops[step]);
    }
    trio.End();
  } catch (const Failure& failure) {
    result.failure = failure;
    result.failure->step = step;
  }
  result.digest = trio.digest();
  return result;
}

}  // namespace

RunResult RunPaged(const PagedHistory& history, PagedCoverageCounts* counts,
                   const PagedMaker& make, bool same_messages,
                   PoolCalls* calls) {
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
  PagedDriver trio(history.spec, counts, make_noted, same_messages);
  if (counts != nullptr) {
    const PagedSpec& spec = history.spec;
    counts->dtypes.emplace(spec.dtype, spec.v_dtype.value_or(spec.dtype));
  }
  RunResult result = Play(history, trio);
  if (result.failure) result.failure->trace = noted.Steps();
  return result;
}

PagedSubject TwinPools(std::string twin) {
  const auto make = [twin](const PagedSpec& spec, std::string_view name) {
    return MakePagedPool(spec, name == "optimized" ? twin : name);
  };
  PagedSubject subject;
  subject.name = std::move(twin);
  subject.run = [make](const PagedHistory& history, PagedCoverageCounts* counts,
                       bool) { return RunPaged(history, counts, make); };
  return subject;
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
  PagedDriver trio(history.spec, nullptr, make_recorded);
  const RunResult result = Play(history, trio);
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
