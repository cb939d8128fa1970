// Decode: every sequence gets one more token, in a cache that is 15/16 full.
// When the view grows to the next multiple of the padding, the whole mask is
// rebuilt; measured are the steps before that.

#ifndef KVTWIN_BENCH_DECODER_H_
#define KVTWIN_BENCH_DECODER_H_

#include <memory>
#include <string>
#include <string_view>

#include "bench/twins.h"

namespace kvtwin::bench {

struct DecodeCase {
  int cells = 0;
  int sequences = 1;  // Interleaved.
  int padding = 256;
  bool evicts = false;  // One sequence, whose window fills the cache.
  Placement placement = Placement::kContiguous;
  DType mask = DType::kF32;
};

class Decoder {
 public:
  explicit Decoder(const DecodeCase& what, std::string_view twin = "optimized");

  // Nanoseconds of a step: all of StartForward, the mask included, and Get. The
  // mean over `rounds` rounds of all the steps until the view grows, or of the
  // first `max` steps.
  double Time(int rounds = 8, int max = 255);

  // Checks every step of a small cache; of a large one, the first few steps and
  // the last one, whose mask holds what all earlier steps wrote.
  void Check(const std::string& name);

 private:
  // The most steps that are measured; excludes the step that starts a round.
  int steps() const;
  void Step();
  void Rewind();
  void CopyTo(Cache& to) const;
  void CheckStep(const std::string& name, Cache& reference);

  DecodeCase what_;
  int stored_;
  std::unique_ptr<Cache> cache_;
  Tokens tokens_;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_DECODER_H_
