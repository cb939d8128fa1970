// Counts all allocations of the program; allocation_test.cc defines the
// counters.

#ifndef KVTWIN_PROPS_UNIT_OPTIMIZED_ALLOCATIONS_H_
#define KVTWIN_PROPS_UNIT_OPTIMIZED_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvtwin::props {

// The number of allocations.
extern std::atomic<std::size_t> allocations;

// Allocated bytes that were not freed, without mmap's.
extern std::atomic<std::int64_t> live_bytes;

// How many allocations by `new` the thread may still make; all later ones throw
// bad_alloc. -1: any number.
extern thread_local int allocations_left;

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_UNIT_OPTIMIZED_ALLOCATIONS_H_
