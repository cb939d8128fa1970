// What a backend does to memory, seen by the malloc of this process
// (props/backend/host/guard.cc), which every library that is loaded shares.

#ifndef KVTWIN_PROPS_BACKEND_HOST_GUARD_H_
#define KVTWIN_PROPS_BACKEND_HOST_GUARD_H_

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "props/backend/backend.h"

namespace kvtwin::props {

// There is only one process, so that all objects are the same.
class Guard final : public MemoryWatch {
 public:
  void Enter(const char* function) override;
  void Leave() override;
  std::optional<std::string> Damage() override;
  std::optional<std::size_t> BytesFrom(const void* data) override;

  // Memory that was allocated or mapped between Enter and Leave, and is not
  // freed: its bytes, and the function that took the latest of it.
  static std::size_t Live();
  static const char* LatestFunction();

  // Set, once, when memory was asked for that is not given, to 2 more than the
  // number of the function.
  static void TellRefusals(std::atomic<int>* refused);
  // Bytes that may be mapped and shared, as with children.
  static void LimitShared(std::size_t bytes);

  // What was freed is watched no more, so that calls need not look at it.
  static void Forget();
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_GUARD_H_
