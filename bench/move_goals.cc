// The goals of defrag and of shifts, beside copying or changing as many bytes
// in memory.

#include <fmt/format.h>

#include <memory>

#include "bench/goals.h"
#include "bench/mover.h"

namespace kvtwin::bench {
namespace {

void JudgeDefrag(Goals& goals, bool runs) {
  const int cells = goals.Cells(1 << 15);
  for (const int threads : ThreadCounts()) {
    const std::string name = fmt::format(
        "defrag of {}, {} / memcpy, {}", goals.quick() ? "64 MiB" : "1 GiB",
        runs ? "holes in runs of 64" : "random half holes",
        ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    Defragger defragger(cells, runs);
    defragger.Check(name);
    goals.Judge(
        name, 1 / (runs ? 0.85 : 0.6), [&] { return defragger.Time(); },
        OnAnyThreads({[&] { return defragger.TimeCopy(); }}), 7);
  }
}

void JudgeShift(Goals& goals, DType dtype) {
  const int rows = goals.Cells(1 << 15);
  std::unique_ptr<Shifter> shifter;
  for (const int threads : ThreadCounts()) {
    const std::string name =
        fmt::format("shift {} rows, {} / read, change and write, {}",
                    SizeName(rows), DTypeName(dtype), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    if (shifter == nullptr) shifter = std::make_unique<Shifter>(dtype, rows);
    shifter->Check(name);
    goals.Judge(
        name, 1 / (dtype == DType::kF32 ? 0.9 : 0.8),
        [&] { return shifter->Time(); },
        OnAnyThreads({[&] { return shifter->TimeModify(); }}));
  }
}

}  // namespace

void MoveGoals(Goals& goals) {
  for (const bool runs : {false, true}) JudgeDefrag(goals, runs);
  for (const DType dtype : {DType::kF32, DType::kF16}) JudgeShift(goals, dtype);
}

}  // namespace kvtwin::bench
