// Several caches behind one interface; a layer type picks the active one. What
// changes sequences changes all of them or none.

#ifndef KVTWIN_OPTIMIZED_WRAPPER_H_
#define KVTWIN_OPTIMIZED_WRAPPER_H_

#include <cstdint>

#include "core/wrapper_base.h"

namespace kvtwin::optimized {

class WrapperCache final : public WrapperBase {
 public:
  using WrapperBase::WrapperBase;

  Status StartForward(const Batch& batch, bool reserve) override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override;
  Result<bool> CanResume(int seq, std::int32_t pos) override;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_WRAPPER_H_
