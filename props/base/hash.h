// The hash function of the harness. It is inlined, since most inputs are small.

#ifndef KVTWIN_PROPS_BASE_HASH_H_
#define KVTWIN_PROPS_BASE_HASH_H_

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

namespace kvtwin::props {

inline std::uint64_t HashBytes(const void* data, std::size_t size,
                               std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_HASH_H_
