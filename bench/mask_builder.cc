#include "bench/mask_builder.h"

namespace kvtwin::bench {
namespace {

constexpr int kOther = 1000;  // A sequence that is not stored.

}  // namespace

MaskBuilder::MaskBuilder(const MaskCase& what, std::string_view twin)
    : what_(what) {
  setup_.config.mask_dtype = what.dtype;
  setup_.max_sequences = what.sequences;
  setup_.capacity = what.cells / what.sequences;
  cache_ = Make(setup_, twin);
  Prepare(*cache_);
  tokens_ = NextTokens(stored(), what.batch, what.sequences);
  // The other batch has another shape, also if the batch is one token.
  other_.Add(stored() / what.sequences, what.batch == 1 ? kOther : 0);
}

void MaskBuilder::Prepare(Cache& cache) const {
  Must(cache.Restore(Interleaved(stored(), what_.sequences)));
  AddTinyLayer(cache);
}

void MaskBuilder::TakeBack() {
  Must(cache_->Remove(kOther, 0, kOpenEnd));
  for (int sequence = 0; sequence < what_.sequences; ++sequence) {
    Must(cache_->Remove(sequence, stored() / what_.sequences, kOpenEnd));
  }
}

double MaskBuilder::Time() {
  TakeBack();
  Must(cache_->StartForward(other_, /*reserve=*/false));
  TakeBack();
  return TimeForward(*cache_, tokens_);
}

void MaskBuilder::Check(const std::string& name) {
  const std::unique_ptr<Cache> reference = Make(setup_, "reference");
  Prepare(*reference);
  Must(reference->StartForward(tokens_, /*reserve=*/false));
  Time();
  CheckMasks(name, *cache_, *reference);
}

}  // namespace kvtwin::bench
