// The goal of a decode step of 64 sequences: the host time that StartForward
// takes, beside 20 microseconds.

#include <fmt/format.h>

#include "bench/cuda/gpu.h"
#include "bench/cuda/suite.h"
#include "bench/goals.h"
#include "bench/twins.h"
#include "kvtwin/cuda.h"

namespace kvtwin::bench {
namespace {

constexpr double kBudget = 20e3;  // Nanoseconds.
constexpr int kSequences = 64;

// Decodes a token of each sequence again and again; the sequences grow.
class Stepper {
 public:
  explicit Stepper(int tokens) : stored_(tokens * kSequences) {
    CacheSetup setup;
    setup.capacity = tokens + 4096;
    setup.max_sequences = kSequences;
    setup.config.mask_dtype = DType::kF16;
    made_ = Must(CudaCache::Make(setup.spec));
    Cache& cache = made_->On(nullptr);
    Must(cache.SetConfig(setup.config));
    Must(cache.Init(
        {setup.dtype, setup.max_sequences, setup.capacity, setup.max_batch}));
    Must(cache.Restore(Interleaved(stored_, kSequences)));
    reference_ = bench::Make(setup, "optimized");
    Must(reference_->Restore(Interleaved(stored_, kSequences)));
  }

  double Time() {
    const Tokens tokens = NextTokens(stored_, kSequences, kSequences);
    stored_ += kSequences;
    const double time = TimeForward(made_->On(nullptr), tokens);
    Must(cudaDeviceSynchronize());
    return time;
  }

  // Checks that the tokens are in the same cells as in the host's twin.
  void Check(const std::string& name) {
    const Tokens tokens = NextTokens(stored_, kSequences, kSequences);
    Time();
    Must(reference_->StartForward(tokens, /*reserve=*/false));
    CheckCells(name, made_->On(nullptr), *reference_);
  }

 private:
  int stored_;
  std::unique_ptr<CudaCache> made_;
  std::unique_ptr<Cache> reference_;
};

}  // namespace

void CudaStepGoals(Goals& goals) {
  const int tokens = goals.quick() ? 16 : 4096;
  const std::string name = fmt::format(
      "start of a decode step, 64 x {} tokens, host / 20 us", SizeName(tokens));
  if (!goals.Wanted(name)) return;
  Stepper stepper(tokens);
  for (int i = 0; i < 3; ++i) stepper.Check(name);
  goals.Judge(
      name, 1, [&] { return stepper.Time(); }, {[] { return kBudget; }}, 101);
}

}  // namespace kvtwin::bench
