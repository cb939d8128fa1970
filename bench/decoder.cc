#include "bench/decoder.h"

#include <algorithm>

#include "bench/limits.h"

namespace kvtwin::bench {
namespace {

CacheSetup SetupOf(const DecodeCase& what) {
  CacheSetup setup;
  setup.spec.placement = what.placement;
  setup.config.cache_padding = what.padding;
  setup.config.mask_dtype = what.mask;
  setup.max_sequences = what.sequences;
  setup.capacity = what.cells / what.sequences;
  setup.max_batch = what.padding;
  if (what.evicts) {
    setup.spec.kind = Kind::kSwa;
    setup.spec.window = what.cells - what.padding;
    setup.capacity = what.cells;
  }
  return setup;
}

}  // namespace

Decoder::Decoder(const DecodeCase& what, std::string_view twin)
    : what_(what),
      stored_(what.evicts ? what.cells - what.padding : what.cells / 16 * 15),
      cache_(Make(SetupOf(what), twin)) {
  Must(cache_->Restore(Interleaved(stored_, what.sequences)));
  AddTinyLayer(*cache_);
  tokens_ = NextTokens(stored_, what.sequences, what.sequences);
}

int Decoder::steps() const { return what_.padding / what_.sequences - 1; }

void Decoder::Step() {
  Must(cache_->StartForward(tokens_, /*reserve=*/false));
  KeepAlive(cache_->Get()->mask.data);
  for (std::int32_t& position : tokens_.positions) ++position;
}

double Decoder::Time(int rounds, int max) {
  const int count = std::min(max, steps());
  double time = 0;
  for (int i = 0; i < rounds; ++i) {
    Rewind();
    Step();
    time += bench::Time([&] {
      for (int step = 0; step < count; ++step) Step();
    });
  }
  return time / (rounds * count);
}

void Decoder::Check(const std::string& name) {
  const std::unique_ptr<Cache> reference = Make(SetupOf(what_), "reference");
  Rewind();
  CopyTo(*reference);
  const int checked = what_.cells <= 4096 ? steps() + 1 : 3;
  for (int i = 0; i < checked; ++i) CheckStep(name, *reference);
  for (int i = checked; i < steps(); ++i) Step();
  if (checked <= steps()) {
    CopyTo(*reference);
    CheckStep(name, *reference);
  }
}

// Takes back the steps. Evicted tokens do not return: decoding then continues.
void Decoder::Rewind() {
  if (what_.evicts) return;
  const std::int32_t first = stored_ / what_.sequences;
  for (std::int32_t& position : tokens_.positions) position = first;
  for (int sequence = 0; sequence < what_.sequences; ++sequence) {
    Must(cache_->Remove(sequence, first, kOpenEnd));
  }
}

void Decoder::CopyTo(Cache& to) const {
  CacheState state = Must(cache_->Snapshot());
  state.layers.clear();
  Must(to.Restore(state));
  AddTinyLayer(to);
}

void Decoder::CheckStep(const std::string& name, Cache& reference) {
  Must(reference.StartForward(tokens_, /*reserve=*/false));
  Step();
  CheckMasks(name, *cache_, reference);
}

}  // namespace kvtwin::bench
