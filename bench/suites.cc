#include "bench/suites.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "bench/decoder.h"
#include "bench/goals.h"
#include "bench/mask_builder.h"
#include "bench/mover.h"
#include "bench/operations.h"
#include "bench/putter.h"
#include "core/index.h"
#include "core/names.h"
#include "optimized/targets.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"

namespace kvtwin::bench {
namespace {

// Makes the run to time, for one of the twins. It is made when its turn comes,
// because it may take much memory.
using Maker = std::function<Timing(std::string_view twin)>;

bool Verified(std::string_view twin) {
  props::FuzzOptions options;
  options.operations = 20000;
  const props::Subject subject = props::TwinSubject(twin);
  const props::FuzzResult result = props::Fuzz(options, subject);
  if (!result.failure) return true;
  fmt::print(stderr, "{} on {} is wrong, so it is not timed\n{}", twin,
             optimized::ActiveTarget(), props::FailureText(*result.failure));
  return false;
}

// `bytes`: the bytes that a run reads or writes, if they limit it; else 0.
void Run(benchmark::State& state, const Maker& make, std::string_view twin,
         const std::string& target, std::size_t bytes) {
  optimized::SelectTarget(target);
  const Timing timing = make(twin);
  for (auto _ : state) state.SetIterationTime(timing() * 1e-9);
  if (bytes > 0) {
    state.SetBytesProcessed(state.iterations() *
                            static_cast<std::int64_t>(bytes));
  }
}

void RegisterOn(const std::string& name, std::string_view twin,
                const std::string& target, std::size_t bytes,
                const Maker& make) {
  // The timed part is often a small part of an iteration, so that Google
  // Benchmark cannot choose the number of iterations.
  const int iterations = twin == "reference" ? 3 : 20;
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) { Run(state, make, twin, target, bytes); })
      ->UseManualTime()
      ->Iterations(iterations);
}

// Registers NAME/TWIN/..., the optimized twin on every target.
void Register(const std::string& name, const std::string& sizes,
              std::size_t bytes, const Maker& make) {
  const auto targets = optimized::SupportedTargets();
  for (const std::string& target : targets) {
    RegisterOn(fmt::format("{}/optimized/{}/{}", name, sizes, target),
               "optimized", target, bytes, make);
  }
  RegisterOn(fmt::format("{}/reference/{}", name, sizes), "reference",
             targets.front(), bytes, make);
}

// Requires: Subject is constructible from args and a twin, and has Time().
template <class Subject, class... Args>
Maker MakerOf(Args... args) {
  return [=](std::string_view twin) -> Timing {
    const auto subject = std::make_shared<Subject>(args..., twin);
    return [subject] { return subject->Time(); };
  };
}

constexpr int kSizes[] = {1 << 12, 1 << 15, 1 << 18, 1 << 20};

void RegisterDecode() {
  for (const int cells : kSizes) {
    for (const int sequences : {1, 8, 64}) {
      const DecodeCase what = {.cells = cells,
                               .sequences = sequences,
                               .padding = sequences == 1 ? 256 : 4 * sequences};
      Register("Decode", fmt::format("cells:{}/sequences:{}", cells, sequences),
               0, [=](std::string_view twin) -> Timing {
                 const auto decoder = std::make_shared<Decoder>(what, twin);
                 const int max = twin == "reference" ? 3 : 255;
                 return [=] { return decoder->Time(1, max); };
               });
    }
  }
}

void RegisterMask() {
  constexpr std::size_t kMax = std::size_t{1} << 27;  // Elements.
  for (const DType dtype : kMaskTypes) {
    for (const int cells : kSizes) {
      for (const int batch : {1, 32, 512}) {
        for (const int sequences : {1, 8, 64}) {
          const auto elements = AsSize(cells) * AsSize(batch);
          if (batch < sequences || elements > kMax) continue;
          const MaskCase what = {cells, batch, sequences, dtype};
          Register(
              fmt::format("Mask/{}", DTypeName(dtype)),
              fmt::format("cells:{}/batch:{}/sequences:{}", cells, batch,
                          sequences),
              dtype == DType::kBits ? elements / 8 : elements * SizeOf(dtype),
              MakerOf<MaskBuilder>(what));
        }
      }
    }
  }
}

void RegisterPut() {
  constexpr int kCells = 1 << 15;
  constexpr DType kF32 = DType::kF32;
  constexpr DType kF16 = DType::kF16;
  for (const VLayout layout : kVLayouts) {
    for (const int batch : {1, 32, 512}) {
      for (const auto& [source, stored] :
           {std::pair(kF32, kF32), std::pair(kF16, kF16),
            std::pair(kF32, kF16)}) {
        const PutCase what = {source, stored, batch, layout};
        Register(
            fmt::format("Put/{}_to_{}{}", DTypeName(source), DTypeName(stored),
                        layout == VLayout::kPlain
                            ? ""
                            : fmt::format("/{}", VLayoutName(layout))),
            fmt::format("batch:{}", batch),
            AsSize(batch) * 2 * 8 * 128 * SizeOf(stored),
            MakerOf<Putter>(what, kCells));
      }
    }
  }
}

void RegisterMoves() {
  for (const bool runs : {false, true}) {
    for (const int cells : {1 << 12, 1 << 15}) {
      Register(runs ? "Defrag/runs" : "Defrag/random",
               fmt::format("cells:{}", cells), 0,
               MakerOf<Defragger>(cells, runs));
    }
  }
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    constexpr int kRows = 1 << 15;
    Register(fmt::format("Shift/{}", DTypeName(dtype)),
             fmt::format("rows:{}", kRows),
             std::size_t{kRows} * 8 * 128 * SizeOf(dtype),
             [=](std::string_view twin) -> Timing {
               // A few hundred runs use up its rows.
               auto shifter = std::make_shared<Shifter>(dtype, kRows, twin);
               return [=, times = 0]() mutable {
                 if (++times % 200 == 0) {
                   shifter = std::make_shared<Shifter>(dtype, kRows, twin);
                 }
                 return shifter->Time();
               };
             });
  }
}

void RegisterOperations() {
  for (const int cells : kSizes) {
    for (const int sequences : {1, 8, 64}) {
      const auto sizes = fmt::format("cells:{}/sequences:{}", cells, sequences);
      Register("RemoveMiddle", sizes, 0, [=](std::string_view twin) -> Timing {
        // Makes a new cache before no tokens are left.
        auto cache = std::make_shared<Operations>(cells, sequences, twin);
        return [=, left = 0]() mutable {
          if (left-- == 0) {
            cache = std::make_shared<Operations>(cells, sequences, twin);
            left = cells / sequences / 16;
          }
          return cache->TimeRemove();
        };
      });
      Register("CopyPrefix", sizes, 0, [=](std::string_view twin) -> Timing {
        const auto cache = std::make_shared<Operations>(cells, sequences, twin);
        return [=] { return cache->TimeCopy(); };
      });
    }
    Register("CanResume", fmt::format("cells:{}", cells), 0,
             [=](std::string_view twin) -> Timing {
               const auto cache = std::make_shared<Resumer>(cells, twin);
               const int rounds = twin == "reference" ? 1 : 1000;
               return [=] { return cache->Time(rounds); };
             });
  }
}

}  // namespace

int RunSuites() {
  if (!Verified("reference")) return 1;
  for (const std::string& target : optimized::SupportedTargets()) {
    optimized::SelectTarget(target);
    if (!Verified("optimized")) return 1;
  }
  RegisterDecode();
  RegisterMask();
  RegisterPut();
  RegisterMoves();
  RegisterOperations();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace kvtwin::bench
