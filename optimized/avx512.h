// The intrinsics of AVX-512.

#ifndef KVTWIN_OPTIMIZED_AVX512_H_
#define KVTWIN_OPTIMIZED_AVX512_H_

// GCC 12 warns of operands that the intrinsics leave open, as they are ignored.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#endif  // KVTWIN_OPTIMIZED_AVX512_H_
