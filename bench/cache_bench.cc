// What a cache costs beside attention, on both twins: StartForward with its
// mask, Put, Remove. Caches are filled first, so sizes are of used cells;
// those beyond 32k cells do not stay in L2.
//
// Every twin is verified in the same run before it is timed, and the limits
// that rates compare to are measured beside them.

#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kvtwin/cache.h"
#include "optimized/targets.h"
#include "props/fuzz.h"

namespace kvtwin {
namespace {

constexpr int kPrefill = 512;

// One sequence that fills all of `cells` but room for a batch.
std::unique_ptr<Cache> Filled(const char* twin, int cells) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  auto cache = std::move(*MakeCache(spec, twin));
  if (!cache->Init(DType::kF16, 1, cells, kPrefill).ok()) return nullptr;
  std::vector<std::int32_t> positions(kPrefill);
  const std::vector<int> sequences(kPrefill, 0);
  for (int first = 0; first + 2 * kPrefill <= cells; first += kPrefill) {
    for (int i = 0; i < kPrefill; ++i) {
      positions[static_cast<std::size_t>(i)] = first + i;
    }
    if (!cache->StartForward({positions, sequences}, false).ok()) {
      return nullptr;
    }
  }
  return cache;
}

// `tokens` more tokens, then the same number taken back.
void StartForward(benchmark::State& state, const char* twin, int tokens) {
  const auto cells = static_cast<int>(state.range(0));
  const auto cache = Filled(twin, cells);
  if (cache == nullptr) return state.SkipWithError("the cache is full");
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), cells - kPrefill);
  const std::vector<int> sequences(positions.size(), 0);
  for (auto _ : state) {
    if (!cache->StartForward({positions, sequences}, false).ok() ||
        !cache->Remove(0, positions[0], kOpenEnd).ok()) {
      return state.SkipWithError("refused");
    }
  }
  // Of the f32 mask, to be compared with memset.
  state.SetBytesProcessed(state.iterations() * tokens * cells * 4);
}

void DecodeStep(benchmark::State& state, const char* twin) {
  StartForward(state, twin, 1);
}
void PrefillMask(benchmark::State& state, const char* twin) {
  StartForward(state, twin, kPrefill);
}

// A batch's rows of 8 heads of 128, f32 into f16.
void Put(benchmark::State& state, const char* twin) {
  const auto tokens = static_cast<std::int64_t>(state.range(0));
  const auto cache = Filled(twin, 4096);
  const std::vector<float> rows(static_cast<std::size_t>(tokens) * 8 * 128, 1);
  const TensorView view =
      DenseView(rows.data(), DType::kF32, {128, 8, tokens, 1});
  const std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens),
                                            4000);
  const std::vector<int> sequences(positions.size(), 1);
  if (!cache->StartForward({positions, sequences}, false).ok()) {
    return state.SkipWithError("refused");
  }
  for (auto _ : state) {
    if (!cache->Put(view, view).ok()) return state.SkipWithError("refused");
  }
  state.SetBytesProcessed(state.iterations() * 2 * view.elements() * 2);
}

// Half of a sequence to another one, which then goes.
void CopyPrefix(benchmark::State& state, const char* twin) {
  const auto cells = static_cast<int>(state.range(0));
  const auto cache = Filled(twin, cells);
  for (auto _ : state) {
    if (!cache->CopyPrefix(0, 1, cells / 2).ok() ||
        !cache->Remove(1, 0, kOpenEnd).ok()) {
      return state.SkipWithError("refused");
    }
  }
}

void LimitMemset(benchmark::State& state) {
  std::vector<char> buffer(static_cast<std::size_t>(state.range(0)));
  for (auto _ : state) {
    std::memset(buffer.data(), 1, buffer.size());
    benchmark::DoNotOptimize(buffer.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

bool Verified(std::string_view twin) {
  props::FuzzOptions options;
  options.operations = 20000;
  const props::Subject subject = props::TwinSubject(twin);
  const props::FuzzResult result = props::Fuzz(options, subject);
  if (!result.failure) return true;
  std::fprintf(stderr, "%s is wrong, so it is not timed\n%s",
               std::string(twin).c_str(),
               props::FailureText(result.failure->shrunk,
                                  result.failure->difference, subject)
                   .c_str());
  return false;
}

using BenchFn = void (*)(benchmark::State&, const char*);

void Register(const char* name, const char* twin, BenchFn run,
              const std::vector<std::int64_t>& sizes) {
  auto* bench = benchmark::RegisterBenchmark(
      (std::string(name) + "/" + twin).c_str(),
      [run, twin](benchmark::State& state) { run(state, twin); });
  for (const std::int64_t size : sizes) bench->Arg(size);
}

}  // namespace
}  // namespace kvtwin

int main(int argc, char** argv) {
  using namespace kvtwin;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const char* twin : {"optimized", "reference"}) {
    if (!Verified(twin)) return 1;
    const bool reference = std::strcmp(twin, "reference") == 0;
    Register("DecodeStep", twin, DecodeStep,
             reference ? std::vector<std::int64_t>{4096, 32768}
                       : std::vector<std::int64_t>{4096, 32768, 262144});
    Register("PrefillMask", twin, PrefillMask, {reference ? 4096 : 32768});
    Register("Put", twin, Put, {1, 32});
    Register("CopyPrefix", twin, CopyPrefix, {32768});
  }
  benchmark::RegisterBenchmark("Limit/memset", LimitMemset)
      ->Arg(std::int64_t{32768} * 4)
      ->Arg(std::int64_t{512} * 32768 * 4);
  benchmark::AddCustomContext("kvtwin_target", optimized::ActiveTarget());
  benchmark::RunSpecifiedBenchmarks();
}
