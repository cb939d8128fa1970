#include <cstdlib>

#include "props/c_api/c_api.h"

namespace kvtwin::props {
namespace {

thread_local std::string kept_text;
thread_local const char* last_error = "";

}  // namespace

kvtwin_status Report(kvtwin_status status, std::string_view text) noexcept {
  try {
    kept_text = text;
    last_error = kept_text.c_str();
  } catch (const std::bad_alloc&) {
    last_error = "there is not enough memory for a message";
  }
  return status;
}

void* CopyOut(std::span<const std::byte> bytes) {
  // There is one byte more, so that a copy of no bytes is not NULL, and a text
  // ends with a zero.
  auto* copy = static_cast<std::byte*>(std::malloc(bytes.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::copy(bytes.begin(), bytes.end(), copy);
  copy[bytes.size()] = std::byte{0};
  return copy;
}

}  // namespace kvtwin::props

const char* kvtwin_status_name(int status) {
  switch (status) {
    case KVTWIN_OK:
      return "ok";
    case KVTWIN_CACHE_FULL:
      return "cache_full";
    case KVTWIN_NOT_SUPPORTED:
      return "not_supported";
    case KVTWIN_SHARED_CELLS:
      return "shared_cells";
    case KVTWIN_INVALID_ARGUMENT:
      return "invalid_argument";
    case KVTWIN_FAILED_PRECONDITION:
      return "failed_precondition";
    case KVTWIN_OUT_OF_MEMORY:
      return "out_of_memory";
    case KVTWIN_INTERNAL:
      return "internal";
    case KVTWIN_DEVICE_ERROR:
      return "device_error";
    default:
      return "unknown";
  }
}

const char* kvtwin_last_error(void) { return kvtwin::props::last_error; }

const char* kvtwin_version(void) { return KVTWIN_VERSION; }

void kvtwin_free(void* memory) { std::free(memory); }
