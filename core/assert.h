// KVTWIN_ASSERT, for facts that only a bug of kvtwin can break. It is checked
// in every build except coverage builds. One fact per line.

#ifndef KVTWIN_CORE_ASSERT_H_
#define KVTWIN_CORE_ASSERT_H_

#include <cstdio>
#include <cstdlib>

#ifdef KVTWIN_COVERAGE  // The branch that is never taken is not counted.
#define KVTWIN_ASSERT(fact) static_cast<void>(0)
#else
#define KVTWIN_ASSERT(fact)                                                   \
  do {                                                                        \
    if (!(fact)) {                                                            \
      std::fprintf(stderr, "%s:%d: kvtwin bug: %s does not hold\n", __FILE__, \
                   __LINE__, #fact);                                          \
      std::abort();                                                           \
    }                                                                         \
  } while (false)
#endif

#endif  // KVTWIN_CORE_ASSERT_H_
