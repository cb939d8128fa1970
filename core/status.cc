#include "kvtwin/status.h"

#include <array>

#include "core/index.h"

namespace kvtwin {

std::string_view StatusName(StatusCode code) {
  constexpr std::array<std::string_view, 7> kNames = {
      "ok",           "cache_full",       "not_supported",
      "shared_cells", "invalid_argument", "failed_precondition",
      "device_error"};
  return At(kNames, code);
}

std::string Status::ToString() const {
  std::string text(StatusName(code_));
  if (!message_.empty()) text += ": " + message_;
  return text;
}

}  // namespace kvtwin
