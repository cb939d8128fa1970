// The instruction set that the kernels run on. By default it is the best that
// the CPU has; KVTWIN_TARGET or SelectTarget forces another one. All of them
// must give the same bytes.

#ifndef KVTWIN_OPTIMIZED_TARGETS_H_
#define KVTWIN_OPTIMIZED_TARGETS_H_

#include <string>
#include <string_view>
#include <vector>

namespace kvtwin::optimized {

// The targets that this binary contains and this CPU can run, best first:
// "AVX3", "AVX2", "SSE4", ...
std::vector<std::string> SupportedTargets();

// From now on the kernels run on `name`. Returns false, and changes nothing, if
// `name` is not in SupportedTargets(). Not while another thread is in a kernel.
bool SelectTarget(std::string_view name);

// Applies the environment variable KVTWIN_TARGET, if it is set and not empty.
// Returns false if it names no supported target, and is then ignored. Only the
// first call has an effect, and none after a SelectTarget; later calls return
// the same answer. MakeCache calls it.
bool UseTargetFromEnvironment();

// The target of the kernels that a call now would run.
std::string ActiveTarget();

// Whether the processor is one of Intel's, which do some things at another
// speed than others with the same instruction set.
bool IsIntel();

// Whether the first-level cache has 48 KiB or more, which Intel's processors
// have since Ice Lake and AMD's since Zen 5. False if the system does not say.
bool HasLargeFirstLevel();

// Whether rows are fetched into the first-level cache shortly before they are
// read, rather than a tile before into the second: where this was measured to
// be faster (docs/performance.md), with 48 KiB and on AMD's Zen 3, but not on
// its Zen 4. Other processors without AVX-512 fetch as Zen 3 does.
bool FetchesIntoFirstLevel();

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_TARGETS_H_
