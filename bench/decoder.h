// Decode: every sequence gets one token more, in a cache that is 15/16 full. A
// view that grows to the next multiple of the padding gets a new mask; what is
// measured are the steps until then.

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
  // mean of `rounds` times all the steps until the view grows, or the first
  // `most` of them.
  double Time(int rounds = 8, int most = 255);

  // Every step of a small cache; of a large one the first few, and the last
  // one, whose mask holds what all before it wrote.
  void Check(const std::string& name);

 private:
  // Those that are measured at most: not the one that starts them.
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
