// Helpers of the functions of <kvtwin/kvtwin.h>: no exception leaves them, and
// kvtwin_last_error returns the message of the last error.

#ifndef KVTWIN_PROPS_C_API_C_API_H_
#define KVTWIN_PROPS_C_API_C_API_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"
#include "kvtwin/paged.h"
#include "kvtwin/state.h"
#include "props/backend/c_conversions.h"

struct kvtwin_cache {
  kvtwin::Cache* cache = nullptr;
  std::unique_ptr<kvtwin::Cache> owned;  // Null for a wrapper's inner cache.
  // Handles of a wrapper's caches, made when they are asked for.
  std::map<kvtwin::Cache*, std::unique_ptr<kvtwin_cache>> inner;
  std::vector<kvtwin::CellEntry> cells;  // Kept to reuse its memory.
};

struct kvtwin_pool {
  std::unique_ptr<kvtwin::PagedPool> pool;
};

struct kvtwin_state {
  kvtwin::CacheState state;
};

namespace kvtwin::props {

// Keeps the text for kvtwin_last_error, and returns the status.
kvtwin_status Report(kvtwin_status status, std::string_view text) noexcept;

// Returns the status of `call`, or the status for its exception.
template <class Call>
kvtwin_status Answer(const Call& call) noexcept {
  try {
    const Status status = call();
    if (status.ok()) return KVTWIN_OK;
    return Report(CStatus(status.code()), status.message());
  } catch (const std::bad_alloc&) {
    return Report(KVTWIN_OUT_OF_MEMORY, "there is not enough memory");
  } catch (const std::exception& error) {
    return Report(KVTWIN_INTERNAL, error.what());
  } catch (...) {
    return Report(KVTWIN_INTERNAL, "something was thrown");
  }
}

// Errors: a list that is null but has room; a null `count`.
inline Status CheckList(std::string_view name, const void* list,
                        std::size_t room, const std::size_t* count) {
  if (Status status = NeedAll({{"count", count}}); !status.ok()) return status;
  if (list != nullptr || room == 0) return {};
  return Invalid("{} is NULL, but has room for {}", name, room);
}

// Writes as many entries as fit, and the number of all. Requires: CheckList is
// ok.
template <class From, class To>
void WriteList(const From& from, To* list, std::size_t room,
               std::size_t* count) {
  *count = std::size(from);
  std::copy_n(std::begin(from), std::min(room, std::size(from)), list);
}

// Returns the text, or `none` for NULL.
inline std::string_view TextOf(const char* text, std::string_view none = "") {
  return text == nullptr ? none : std::string_view(text);
}

// Returns a copy that kvtwin_free frees. Throws std::bad_alloc.
void* CopyOut(std::span<const std::byte> bytes);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_C_API_C_API_H_
