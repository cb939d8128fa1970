// Counts all allocations of the program; allocation_test.cc defines the
// counters.

#ifndef KVTWIN_PROPS_TESTING_ALLOCATIONS_H_
#define KVTWIN_PROPS_TESTING_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvtwin::props {

// How often memory was asked for.
extern std::atomic<std::size_t> allocations;

// Bytes that were asked for and not given back, without mmap's.
extern std::atomic<std::int64_t> live_bytes;

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_ALLOCATIONS_H_
