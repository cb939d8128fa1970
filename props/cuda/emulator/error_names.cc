// The names and texts of errors.

#include "props/cuda/emulator/host_api.h"

namespace {

struct Text {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define KVTWIN_ERROR(error, text) \
  { error, #error, text }
constexpr Text kTexts[] = {
    KVTWIN_ERROR(cudaSuccess, "no error"),
    KVTWIN_ERROR(cudaErrorInvalidValue, "invalid argument"),
    KVTWIN_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    KVTWIN_ERROR(cudaErrorInitializationError, "initialization error"),
    KVTWIN_ERROR(cudaErrorInvalidConfiguration,
                 "invalid configuration argument"),
    KVTWIN_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    KVTWIN_ERROR(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    KVTWIN_ERROR(cudaErrorInvalidMemcpyDirection,
                 "invalid copy direction for memcpy"),
    KVTWIN_ERROR(cudaErrorInsufficientDriver,
                 "CUDA driver version is insufficient for CUDA runtime "
                 "version"),
    KVTWIN_ERROR(cudaErrorDevicesUnavailable,
                 "CUDA-capable device(s) is/are busy or unavailable"),
    KVTWIN_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    KVTWIN_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    KVTWIN_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    KVTWIN_ERROR(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    KVTWIN_ERROR(cudaErrorNoKernelImageForDevice,
                 "no kernel image is available for execution on the device"),
    KVTWIN_ERROR(cudaErrorECCUncorrectable,
                 "uncorrectable ECC error encountered"),
    KVTWIN_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    KVTWIN_ERROR(cudaErrorIllegalState,
                 "the operation cannot be performed in the present state"),
    KVTWIN_ERROR(cudaErrorNotReady, "device not ready"),
    KVTWIN_ERROR(cudaErrorIllegalAddress,
                 "an illegal memory access was encountered"),
    KVTWIN_ERROR(cudaErrorLaunchOutOfResources,
                 "too many resources requested for launch"),
    KVTWIN_ERROR(cudaErrorLaunchTimeout,
                 "the launch timed out and was terminated"),
    KVTWIN_ERROR(cudaErrorAssert, "device-side assert triggered"),
    KVTWIN_ERROR(cudaErrorIllegalInstruction,
                 "an illegal instruction was encountered"),
    KVTWIN_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    KVTWIN_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    KVTWIN_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    KVTWIN_ERROR(cudaErrorNotSupported, "operation not supported"),
    KVTWIN_ERROR(cudaErrorSystemNotReady, "system not yet initialized"),
    KVTWIN_ERROR(cudaErrorStreamCaptureUnsupported,
                 "operation not permitted when stream is capturing"),
    KVTWIN_ERROR(cudaErrorStreamCaptureInvalidated,
                 "operation failed due to a previous error during capture"),
    KVTWIN_ERROR(cudaErrorStreamCaptureMerge,
                 "operation would result in a merge of separate capture "
                 "sequences"),
    KVTWIN_ERROR(cudaErrorStreamCaptureUnmatched,
                 "capture was not ended in the same stream as it began"),
    KVTWIN_ERROR(cudaErrorStreamCaptureUnjoined,
                 "capturing stream has unjoined work"),
    KVTWIN_ERROR(cudaErrorStreamCaptureIsolation,
                 "dependency created on uncaptured work in another stream"),
    KVTWIN_ERROR(cudaErrorStreamCaptureImplicit,
                 "operation would make the legacy stream depend on a "
                 "capturing blocking stream"),
    KVTWIN_ERROR(cudaErrorCapturedEvent,
                 "operation not permitted on an event last recorded in a "
                 "capturing stream"),
    KVTWIN_ERROR(cudaErrorStreamCaptureWrongThread,
                 "attempt to terminate a thread-local capture sequence from "
                 "another thread"),
    KVTWIN_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef KVTWIN_ERROR

const Text* Find(cudaError_t error) {
  for (const Text& text : kTexts) {
    if (text.error == error) return &text;
  }
  return nullptr;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  const Text* const text = Find(error);
  return text == nullptr ? "unrecognized error code" : text->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Text* const text = Find(error);
  return text == nullptr ? "unrecognized error code" : text->text;
}
