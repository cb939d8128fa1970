// Memory in huge pages: otherwise page faults take most of the time when a
// large buffer is written for the first time.

#ifndef KVTWIN_CORE_HUGE_PAGES_H_
#define KVTWIN_CORE_HUGE_PAGES_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/assert.h"

namespace kvtwin {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Asks for huge pages wherever a whole one fits. Does nothing if the system has
// none or does not grant them.
inline void AskForHugePages([[maybe_unused]] std::byte* data,
                            [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::size_t before = (kHugePage - address % kHugePage) % kHugePage;
  if (bytes < before + kHugePage) return;
  (void)madvise(data + before, (bytes - before) / kHugePage * kHugePage,
                MADV_HUGEPAGE);
#endif
}

// Asks for small pages, on systems that give huge ones unasked, too. Requires:
// `data` and `bytes` are multiples of kHugePage.
inline void AskForSmallPages([[maybe_unused]] std::byte* data,
                             [[maybe_unused]] std::size_t bytes) {
  KVTWIN_DCHECK(reinterpret_cast<std::uintptr_t>(data) % kHugePage == 0);
  KVTWIN_DCHECK(bytes % kHugePage == 0);
#ifdef MADV_NOHUGEPAGE
  (void)madvise(data, bytes, MADV_NOHUGEPAGE);
#endif
}

// Like bytes.reserve(size), in huge pages.
inline void ReserveHugePages(std::size_t size, std::vector<std::byte>& bytes) {
  if (size <= bytes.capacity()) return;
  bytes.reserve(size);
  AskForHugePages(bytes.data(), size);
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_HUGE_PAGES_H_
