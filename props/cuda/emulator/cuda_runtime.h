// The CUDA runtime of the emulator (see emulator.h): found in place of the
// real one where props/cuda/emulator/ comes first on the include path.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#define KVTWIN_CUDA_EMULATED 1

#include "props/cuda/emulator/device_code.h"
#include "props/cuda/emulator/host_api.h"

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_CUDA_RUNTIME_H_
