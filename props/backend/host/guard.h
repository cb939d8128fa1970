// Watches what a backend does to memory, through the malloc of this process
// (props/backend/host/guard.cc), which all loaded libraries share.

#ifndef KVTWIN_PROPS_BACKEND_HOST_GUARD_H_
#define KVTWIN_PROPS_BACKEND_HOST_GUARD_H_

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

#include "props/backend/backend.h"

namespace kvtwin::props {

// There is only one process, so all objects share their state.
class Guard final : public MemoryWatch {
 public:
  void Enter(const char* function) override;
  void Leave() override;
  std::optional<std::string> Damage() override;
  std::optional<std::size_t> BytesFrom(const void* data) override;

  // The bytes that were allocated or mapped between Enter and Leave and are not
  // freed, and the function that took the latest of them.
  static std::size_t Live();
  static const char* LatestFunction();

  // Sets *refused, once, when a request for memory is refused, to the number of
  // the function plus 2.
  static void TellRefusals(std::atomic<int>* refused);
  // Limits the bytes of shared mappings, such as those shared with children.
  static void LimitShared(std::size_t bytes);

  // Stops watching freed buffers, so that calls need not check them.
  static void Forget();
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_GUARD_H_
