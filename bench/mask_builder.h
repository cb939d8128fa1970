// Builds the mask of a batch that fills its cache. Nothing of the previous
// pass's mask can be reused: its batch had another shape.

#ifndef KVTWIN_BENCH_MASK_BUILDER_H_
#define KVTWIN_BENCH_MASK_BUILDER_H_

#include <memory>
#include <string>
#include <string_view>

#include "bench/twins.h"

namespace kvtwin::bench {

struct MaskCase {
  int cells = 0;
  int batch = 512;
  int sequences = 1;  // Interleaved.
  DType dtype = DType::kF32;
};

class MaskBuilder {
 public:
  explicit MaskBuilder(const MaskCase& what,
                       std::string_view twin = "optimized");

  // Nanoseconds of the StartForward that builds the mask.
  double Time();

  void Check(const std::string& name);

 private:
  int stored() const { return what_.cells - what_.batch; }
  void Prepare(Cache& cache) const;
  void TakeBack();

  MaskCase what_;
  CacheSetup setup_;
  std::unique_ptr<Cache> cache_;
  Tokens tokens_;
  Tokens other_;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_MASK_BUILDER_H_
