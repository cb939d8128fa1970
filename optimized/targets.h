// Which instruction set the kernels run on. By default the best that the CPU
// has; KVTWIN_TARGET or SelectTarget forces another one. All of them must give
// the same bytes.

#ifndef KVTWIN_OPTIMIZED_TARGETS_H_
#define KVTWIN_OPTIMIZED_TARGETS_H_

#include <string>
#include <string_view>
#include <vector>

namespace kvtwin::optimized {

// The targets that this binary holds and this CPU can run, best first:
// "AVX3", "AVX2", "SSE4", ...
std::vector<std::string> SupportedTargets();

// From now on the kernels run on `name`. False, and no change, if that is not
// one of SupportedTargets(). Not while another thread is in a kernel.
bool SelectTarget(std::string_view name);

// Does what KVTWIN_TARGET asks for, if it is set and not empty; false if it
// names no supported target, which is then ignored. Only the first call, or
// none after a SelectTarget, has an effect; later ones repeat its answer.
// MakeCache calls it.
bool UseTargetFromEnvironment();

// The target that a kernel, called now, finds itself compiled for.
std::string ActiveTarget();

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_TARGETS_H_
