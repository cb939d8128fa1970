// What only we can get wrong: on in every build, one fact a line.

#ifndef KVTWIN_CORE_ASSERT_H_
#define KVTWIN_CORE_ASSERT_H_

#include <cstdio>
#include <cstdlib>

#define KVTWIN_ASSERT(fact)                                                   \
  do {                                                                        \
    if (!(fact)) {                                                            \
      std::fprintf(stderr, "%s:%d: kvtwin bug: %s does not hold\n", __FILE__, \
                   __LINE__, #fact);                                          \
      std::abort();                                                           \
    }                                                                         \
  } while (false)

#endif  // KVTWIN_CORE_ASSERT_H_
