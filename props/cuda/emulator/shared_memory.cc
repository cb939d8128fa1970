// The __shared__ variables of kernels. The compiler may not put those of a
// template and of a function in one section, so each variable has a numbered
// section, whose bounds the linker knows.

#include <cstring>

#include "props/cuda/emulator/internal.h"

// clang-format 14 breaks these lines differently each time it runs.
// clang-format off
#define KVTWIN_TEN_TIMES(X, n)                          \
  X(n##0) X(n##1) X(n##2) X(n##3) X(n##4)               \
  X(n##5) X(n##6) X(n##7) X(n##8) X(n##9)
#define KVTWIN_ALL_SECTIONS(X)                          \
  KVTWIN_TEN_TIMES(X, ) KVTWIN_TEN_TIMES(X, 1)          \
  KVTWIN_TEN_TIMES(X, 2) KVTWIN_TEN_TIMES(X, 3)         \
  KVTWIN_TEN_TIMES(X, 4) KVTWIN_TEN_TIMES(X, 5)         \
  KVTWIN_TEN_TIMES(X, 6) KVTWIN_TEN_TIMES(X, 7)         \
  KVTWIN_TEN_TIMES(X, 8) KVTWIN_TEN_TIMES(X, 9)
// clang-format on

// If a section does not exist, both bounds are null.
#define KVTWIN_DECLARE_BOUNDS(n)                         \
  extern "C" __attribute__((weak, visibility("hidden"))) \
  std::byte __start_kvtwin_shared_##n[];                 \
  extern "C" __attribute__((weak, visibility("hidden"))) \
  std::byte __stop_kvtwin_shared_##n[];
// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): the
// names are the linker's.
KVTWIN_ALL_SECTIONS(KVTWIN_DECLARE_BOUNDS)
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)

namespace kvtwin::emulator {
namespace {

struct Bounds {
  std::byte* begin;
  std::byte* end;
};
#define KVTWIN_BOUNDS(n) {__start_kvtwin_shared_##n, __stop_kvtwin_shared_##n},
const Bounds kSections[] = {KVTWIN_ALL_SECTIONS(KVTWIN_BOUNDS)};

}  // namespace

void ForgetShared() {
  for (const Bounds& section : kSections) {
    if (section.begin == section.end) continue;
    std::memset(section.begin, kGarbage,
                static_cast<std::size_t>(section.end - section.begin));
  }
}

}  // namespace kvtwin::emulator
