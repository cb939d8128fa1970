// The emulator's functions of optimized/cuda/intrinsics.h, which documents
// them. They detect more mistakes than a device:
//   a lane that does not come, or an address that is not a multiple of 16, ends
//     the process;
//   the target of CopyAsync16 holds garbage until the wait, and the source is
//     read at the wait.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_EMULATED_INTRINSICS_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_EMULATED_INTRINSICS_H_

#include <cstdint>

#include "props/cuda/emulator/device_code.h"

namespace kvtwin::emulator {

// Sums are f32, added in the order of columns.
void MmaF16(uint4 left, uint2 right, float (&sums)[4]);
void MmaBF16(uint4 left, uint2 right, float (&sums)[4]);

uint4 LdMatrix4(const void* shared);
uint4 LdMatrix4Trans(const void* shared);

void CopyAsync16Zero(void* shared, const void* global, int bytes);
inline void CopyAsync16If(bool wanted, void* shared, const void* global) {
  if (wanted) CopyAsync16Zero(shared, global, 16);
}
void CopyAsyncCommit();
void FinishCopies(int but_groups);
template <int kGroups>
void CopyAsyncWait() {
  FinishCopies(kGroups);
}

std::uint32_t PackHalf2(float low, float high);
std::uint32_t HalvesFromF8(std::uint32_t bytes);

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_EMULATED_INTRINSICS_H_
