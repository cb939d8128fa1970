// The goals of Put into a cache of 32k cells, beside copies of as many bytes
// from the same source to memory that is as cold.

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bench/goals.h"
#include "bench/putter.h"
#include "core/names.h"

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

void JudgeColumns(Goals& goals, PutCase what, VLayout v_layout, int cells) {
  std::unique_ptr<Putter> columns;
  std::unique_ptr<Putter> plain;
  for (const int threads : ThreadCounts()) {
    const std::string name = fmt::format(
        "put {} rows, {}, {} V / plain, {}", what.batch, TypesName(what),
        VLayoutName(v_layout), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    if (columns == nullptr) {
      what.v_layout = VLayout::kPlain;
      plain = std::make_unique<Putter>(what, cells);
      what.v_layout = v_layout;
      columns = std::make_unique<Putter>(what, cells);
    }
    plain->Check(name);
    columns->Check(name);
    goals.Judge(
        name, 1 / 0.45, [&] { return columns->Time(); },
        OnAnyThreads({[&] { return plain->Time(); }}), 51);
  }
}

void JudgeOne(Goals& goals, DType dtype, VLayout v_layout, int cells) {
  const std::string name =
      fmt::format("put 1 row, {}, {} V / touch of its lines", DTypeName(dtype),
                  VLayoutName(v_layout));
  if (!goals.Wanted(name)) return;
  OnePutter putter(dtype, v_layout, cells);
  putter.Check(name);
  goals.Judge(
      name, 1.3, [&] { return putter.Time(); },
      {[&] { return putter.TimeTouch(v_layout); }}, 151);
}

// A seventh of permuted V's time, or, where the processor reaches fewer than
// seven lines that follow each other in the time of one that does not, nine
// tenths of the speed of touching its own lines. f32 is not compared: a column
// of an f32 tile is two cache lines, and processors that fetch lines in pairs
// fetch both, although one is written: then tiled V takes at least a sixth of
// the time of permuted V.
void JudgeTiledBesidePermuted(Goals& goals, int cells) {
  constexpr double kShare = 1.0 / 7;
  const std::string name =
      "put 1 row, f16, tiled V / touch of permuted V's lines";
  if (!goals.Wanted(name)) return;
  OnePutter putter(DType::kF16, VLayout::kTiled, cells);
  putter.Check(name);
  goals.Judge(
      name, kShare, [&] { return putter.Time(); }, {[&] {
        return std::max(putter.TimeTouch(VLayout::kPermuted),
                        putter.TimeTouch(VLayout::kTiled) / 0.9 / kShare);
      }},
      151);
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
    JudgeColumns(goals, {.source = kF32, .stored = kF16, .batch = batch},
                 VLayout::kPermuted, cells);
  }
  JudgeColumns(goals, {.source = kF32, .stored = kF32}, VLayout::kPermuted,
               cells);
  for (const DType dtype : {kF32, kF16}) {
    JudgeOne(goals, dtype, VLayout::kPermuted, cells);
  }
  for (const int batch : {32, 512}) {
    JudgeColumns(goals, {.source = kF32, .stored = kF16, .batch = batch},
                 VLayout::kTiled, cells);
  }
  for (const DType dtype : {kF32, kF16}) {
    JudgeOne(goals, dtype, VLayout::kTiled, cells);
  }
  JudgeTiledBesidePermuted(goals, cells);
}

}  // namespace kvtwin::bench
