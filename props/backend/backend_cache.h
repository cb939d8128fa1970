// A third-party cache, called by the functions of its table.

#ifndef KVTWIN_PROPS_BACKEND_BACKEND_CACHE_H_
#define KVTWIN_PROPS_BACKEND_BACKEND_CACHE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"
#include "props/backend/c_conversions.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Watches what a backend does to memory; see props/backend/host/.
class MemoryWatch {
 public:
  virtual ~MemoryWatch() = default;
  // Enclose each call of `function`. Memory allocated in between belongs to the
  // backend.
  virtual void Enter(const char* function) = 0;
  virtual void Leave() = 0;
  // Returns what is wrong with the backend's memory, if anything.
  virtual std::optional<std::string> Damage() = 0;
  // Returns the number of bytes from `data` to the end of its buffer; nullopt
  // if the buffer is unknown.
  virtual std::optional<std::size_t> BytesFrom(const void* data) = 0;
};

// Throws a Failure if a call of `function`, which has returned, damaged memory
// or wrote to an input argument. `watch` may be null.
void CheckMemory(std::string_view function, MemoryWatch* watch, Lender& lender);

// Calls `attend` with a copy of `out`, which lies between two margins, copies
// the numbers back, and returns the status. Throws a Failure if a margin
// changed.
Status CallAttend(std::span<float> out,
                  const std::function<Status(float* out)>& attend);

// Returns a cache whose calls are calls of the table. A call that damages
// memory, or whose answer makes no sense, throws a Failure. `sinks`: for each
// query head, or empty. `padded`: the expected mask has padding rows. Requires:
// `watch`, if not null, outlives the cache.
std::unique_ptr<Cache> MakeBackendCache(const kvtwin_backend_v1& table,
                                        const Setup& setup,
                                        std::vector<float> sinks, bool padded,
                                        MemoryWatch* watch);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_BACKEND_CACHE_H_
