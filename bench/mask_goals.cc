// The goals of masks: 512 tokens that fill a cache of 32k cells, beside memset
// of as many bytes. Masks of bits are measured beside f32 masks, or beside
// memset of as many bytes as those have, whichever is slower.

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/mask_builder.h"
#include "bench/twins.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

constexpr int kBatch = 512;

// This many masks do not fit into the caches: their memory is as cold as that
// of a mask that is written past the caches.
constexpr std::size_t kMemories = 4;

std::string SequencesName(int sequences) {
  return sequences == 1 ? "1 sequence"
                        : fmt::format("{} interleaved", sequences);
}

void JudgeNumbers(Goals& goals, DType dtype, int cells, int sequences) {
  const std::size_t bytes = std::size_t{kBatch} * AsSize(cells) * SizeOf(dtype);
  const MaskCase what = {
      .cells = cells, .batch = kBatch, .sequences = sequences, .dtype = dtype};
  std::unique_ptr<MaskBuilder> builder;
  std::unique_ptr<ColdMemory> memory;
  for (const int threads : ThreadCounts()) {
    const std::string name = fmt::format(
        "mask {}, {} x {}, {} / memset, {}", DTypeName(dtype), kBatch,
        SizeName(cells), SequencesName(sequences), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    if (builder == nullptr) {
      builder = std::make_unique<MaskBuilder>(what);
      memory = std::make_unique<ColdMemory>(bytes, kMemories);
    }
    builder->Check(name);
    goals.Judge(
        name, 1 / (dtype == DType::kF32 ? 0.9 : 0.85),
        [&] { return builder->Time(); },
        OnAnyThreads({[&] { return SetBytes(memory->Next(), 0xff, bytes); }}));
  }
}

void JudgeBits(Goals& goals, DType bits, int cells, int sequences) {
  for (const int threads : ThreadCounts()) {
    const std::string name =
        fmt::format("mask bits, {} x {}, {} / f32, {}", kBatch, SizeName(cells),
                    SequencesName(sequences), ThreadsName(threads));
    if (!goals.Wanted(name)) continue;
    UseThreads(threads);
    MaskCase what = {.cells = cells, .batch = kBatch, .sequences = sequences};
    MaskBuilder floats(what);
    what.dtype = bits;
    MaskBuilder builder(what);
    builder.Check(name);
    floats.Check(name);
    const std::size_t bytes =
        std::size_t{kBatch} * AsSize(cells) * sizeof(float);
    ColdMemory memory(bytes, kMemories);
    goals.Judge(
        name, 1 / 15.0,
        [&] {
          // One untimed build first: since the limit runs in between, the
          // caches are full of its data, which is far larger than they are.
          builder.Time();
          return builder.Time();
        },
        OnAnyThreads({[&] {
          return std::max(floats.Time(), SetBytes(memory.Next(), 0xff, bytes));
        }}));
  }
}

}  // namespace

void MaskGoals(Goals& goals) {
  const int cells = goals.Cells(1 << 15);
  for (const DType dtype : kMaskTypes) {
    for (const int sequences : {1, 8}) {
      if (dtype == DType::kBits) {
        JudgeBits(goals, dtype, cells, sequences);
      } else {
        JudgeNumbers(goals, dtype, cells, sequences);
      }
    }
  }
}

}  // namespace kvtwin::bench
