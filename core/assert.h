// KVTWIN_ASSERT and KVTWIN_DCHECK, for facts that only a bug of kvtwin can
// break, such as what a function requires of its callers. Both print the fact
// and abort. One fact per line.
//
// KVTWIN_ASSERT is checked in every build but coverage builds. KVTWIN_DCHECK,
// for inner loops, is checked if KVTWIN_CHECKS is defined as well.

#ifndef KVTWIN_CORE_ASSERT_H_
#define KVTWIN_CORE_ASSERT_H_

#include <cstdio>
#include <cstdlib>

namespace kvtwin {

[[noreturn]] inline void AssertFailed(const char* file, int line,
                                      const char* fact) {
  std::fprintf(stderr, "%s:%d: kvtwin bug: %s does not hold\n", file, line,
               fact);
  std::abort();
}

}  // namespace kvtwin

// Compiles the fact, and does not evaluate it.
#define KVTWIN_UNCHECKED(fact) \
  do {                         \
    if (false && (fact)) {     \
    }                          \
  } while (false)

#ifdef KVTWIN_COVERAGE  // The branch that is never taken is not counted.
#define KVTWIN_ASSERT(fact) KVTWIN_UNCHECKED(fact)
#else
#define KVTWIN_ASSERT(fact)                                         \
  do {                                                              \
    if (!(fact)) ::kvtwin::AssertFailed(__FILE__, __LINE__, #fact); \
  } while (false)
#endif

#if defined(KVTWIN_CHECKS) && !defined(__CUDA_ARCH__)  // Not on a GPU.
#define KVTWIN_DCHECK(fact) KVTWIN_ASSERT(fact)
#else
#define KVTWIN_DCHECK(fact) KVTWIN_UNCHECKED(fact)
#endif

#endif  // KVTWIN_CORE_ASSERT_H_
