// The goals of Put: into a cache of 32k cells, beside copies of as many bytes
// from the same source to memory as cold.

#include <fmt/format.h>

#include <memory>

#include "bench/goals.h"
#include "bench/putter.h"

namespace kvtwin::bench {
namespace {

std::string TypesName(const PutCase& what) {
  return what.source == what.stored
             ? std::string(DTypeName(what.stored))
             : fmt::format("{} to {}", DTypeName(what.source),
                           DTypeName(what.stored));
}

void JudgePlain(Goals& goals, const PutCase& what, int cells) {
  std::unique_ptr<Putter> putter;
  std::unique_ptr<CopyLimit> limit;
  const bool same = what.source == what.stored;
  for (const int threads : ThreadCounts()) {
    const std::string name = fmt::format(
        "put {} rows, {} / {}, {}", what.batch, TypesName(what),
        same ? "copy" : "copy of upper halves", ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    if (putter == nullptr) {
      putter = std::make_unique<Putter>(what, cells);
      limit = std::make_unique<CopyLimit>(what, cells);
    }
    putter->Check(name);
    goals.Judge(
        name, 1 / (same ? 0.9 : 0.85), [&] { return putter->Time(); },
        OnAnyThreads({[&] { return limit->Time(*putter, /*stream=*/false); },
                      [&] { return limit->Time(*putter, /*stream=*/true); }}),
        51);
  }
}

void JudgePermuted(Goals& goals, PutCase what, int cells) {
  std::unique_ptr<Putter> permuted;
  std::unique_ptr<Putter> plain;
  for (const int threads : ThreadCounts()) {
    const std::string name =
        fmt::format("put {} rows, {}, permuted V / plain, {}", what.batch,
                    TypesName(what), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    if (permuted == nullptr) {
      what.permuted = false;
      plain = std::make_unique<Putter>(what, cells);
      what.permuted = true;
      permuted = std::make_unique<Putter>(what, cells);
    }
    plain->Check(name);
    permuted->Check(name);
    goals.Judge(
        name, 1 / 0.45, [&] { return permuted->Time(); },
        OnAnyThreads({[&] { return plain->Time(); }}), 51);
  }
}

void JudgeOnePermuted(Goals& goals, DType dtype, int cells) {
  const std::string name = fmt::format(
      "put 1 row, {}, permuted V / touch of its lines", DTypeName(dtype));
  if (!goals.Wanted(name)) return;
  OnePutter putter(dtype, cells);
  putter.Check(name);
  goals.Judge(
      name, 1.3, [&] { return putter.Time(); },
      {[&] { return putter.TimeTouch(); }}, 151);
}

}  // namespace

void PutGoals(Goals& goals) {
  const int cells = goals.Cells(1 << 15);
  constexpr DType kF32 = DType::kF32;
  constexpr DType kF16 = DType::kF16;
  JudgePlain(goals, {.source = kF32, .stored = kF32}, cells);
  JudgePlain(goals, {.source = kF16, .stored = kF16}, cells);
  JudgePlain(goals, {.source = kF32, .stored = kF16}, cells);
  for (const int batch : {32, 512}) {
    JudgePermuted(goals, {.source = kF32, .stored = kF16, .batch = batch},
                  cells);
  }
  JudgePermuted(goals, {.source = kF32, .stored = kF32}, cells);
  for (const DType dtype : {kF32, kF16}) JudgeOnePermuted(goals, dtype, cells);
}

}  // namespace kvtwin::bench
