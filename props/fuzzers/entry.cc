// The entry point of libFuzzer, and of other engines with its interface.
// KVTWIN_FUZZER is the function of fuzzers.h that this binary runs.

#include <cstdio>
#include <cstdlib>

#include "props/fuzzers/fuzzers.h"

#ifndef KVTWIN_FUZZER  // clang-tidy does not define it.
#define KVTWIN_FUZZER FuzzHistory
#endif

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string wrong = kvtwin::props::KVTWIN_FUZZER({data, size});
  if (wrong.empty()) return 0;
  std::fprintf(stderr, "%s\n", wrong.c_str());
  std::abort();
}
