// The goals of operations on sequences, beside the reference twin and a read of
// one position for every cell.
//
// Only copying half of a single sequence has the goal of 1/200 of the reference
// twin's time, the others 1/50: where an operation has to read or write a word
// for every 64 cells and the positions of half of them, the reference is only
// some fifty times slower than the memory itself; see docs/performance.md.

#include <fmt/format.h>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/operations.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

void JudgeOperations(Goals& goals, int cells, int sequences) {
  const std::string where = fmt::format(
      "{} cells of {}", SizeName(cells),
      sequences == 1 ? "1 sequence" : fmt::format("{} interleaved", sequences));
  const auto name = [&](const char* operation, const char* limit) {
    return fmt::format("{}, {} / {}", operation, where, limit);
  };
  const std::string remove[] = {name("remove middle", "reference"),
                                name("remove middle", "read of positions")};
  const std::string copy[] = {name("copy half", "reference"),
                              name("copy half", "read of positions")};
  if (!goals.Wanted(remove[0]) && !goals.Wanted(remove[1]) &&
      !goals.Wanted(copy[0]) && !goals.Wanted(copy[1])) {
    return;
  }
  const std::size_t bytes = AsSize(cells) * sizeof(std::int32_t);
  const Buffer positions = WrittenBuffer(bytes);
  const auto read = [&] { return ReadBytes(positions.data(), bytes); };
  Operations fast(cells, sequences);
  Operations slow(cells, sequences, "reference");
  fast.Check(remove[0], slow);
  // One untimed run first: since both run in turns, each finds the caches full
  // of the other's data.
  const auto remove_from = [](Operations& cache) {
    return [&] {
      cache.TimeRemove();
      return cache.TimeRemove();
    };
  };
  const auto copy_in = [](Operations& cache) {
    return [&] {
      cache.TimeCopy();
      return cache.TimeCopy();
    };
  };
  // 1/200 where the memory allows it; see above.
  const double of_copy = sequences == 1 ? 1 / 200.0 : 1 / 50.0;
  goals.Judge(remove[1], 6, remove_from(fast), {read}, 25);
  goals.Judge(copy[1], 6, copy_in(fast), {read}, 25);
  goals.Judge(remove[0], 1 / 50.0, remove_from(fast), {remove_from(slow)}, 5);
  goals.Judge(copy[0], of_copy, copy_in(fast), {copy_in(slow)}, 5);
}

void JudgeResume(Goals& goals) {
  const int large = goals.Cells(1 << 20);
  const int small = goals.Cells(1 << 12);
  const std::string name =
      fmt::format("can resume (lowest and highest position), {} / {} cells",
                  SizeName(large), SizeName(small));
  if (!goals.Wanted(name)) return;
  Resumer above(large);
  Resumer below(small);
  above.Check(name);
  below.Check(name);
  // Both run the same instructions; the half allows for noise of nanoseconds.
  goals.Judge(name, 1.5, [&] { return above.Time(); },
              {[&] { return below.Time(); }});
}

// Accepting drafts takes as long in a large cache, and at most 2 microseconds.
void JudgeCommit(Goals& goals) {
  const int large = goals.Cells(1 << 20);
  const int small = goals.Cells(1 << 12);
  const std::string name =
      fmt::format("commit 8 of 64 drafts, {} cells", SizeName(large));
  const std::string of_small = fmt::format("{} / {}", name, SizeName(small));
  const std::string of_time = name + " / 2 us";
  if (!goals.Wanted(of_small) && !goals.Wanted(of_time)) return;
  Committer above(large);
  Committer below(small);
  Committer slow(small, "reference");
  below.Check(of_small, slow);
  goals.Judge(
      of_small, 1.5, [&] { return above.Time(); },
      {[&] { return below.Time(); }}, 101);
  goals.Judge(
      of_time, 1, [&] { return above.Time(); }, {[] { return 2000.0; }}, 101);
}

}  // namespace

void MetadataGoals(Goals& goals) {
  for (const int sequences : {1, 64}) {
    JudgeOperations(goals, goals.Cells(1 << 20), sequences);
  }
  JudgeResume(goals);
  JudgeCommit(goals);
}

}  // namespace kvtwin::bench
