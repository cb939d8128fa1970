// Conversions between the types of <kvtwin/kvtwin.h> and those of C++, and the
// reading and writing of structs that begin with their size.

#ifndef KVTWIN_PROPS_BACKEND_C_CONVERSIONS_H_
#define KVTWIN_PROPS_BACKEND_C_CONVERSIONS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/guarded_cache.h"
#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"
#include "kvtwin/paged.h"

namespace kvtwin::props {

// Converts a status to C, and an answer from C back. A number that C++ has no
// status for becomes not_supported.
kvtwin_status CStatus(StatusCode code);
StatusCode StatusFromC(int status);

// Returns the name of an error that C++ has no status for, such as "internal";
// of another number, "5".
std::string ErrorName(int status);

// Returns the first 500 bytes of a message, such as a traceback, line by line.
std::string PrintableLines(std::string_view message);

// Errors: an argument is null; the message names the first one.
Status NeedAll(
    std::initializer_list<std::pair<std::string_view, const void*>> arguments);

// Returns the number in an enum, to which a caller may have written anything.
template <class Enum>
int RawEnum(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int raw = 0;
  std::memcpy(&raw, &value, sizeof(raw));
  return raw;
}

// No struct is larger: a larger size was never set.
inline constexpr std::size_t kStructBytesMax = 4096;

// Returns the size field with which the struct at `from` begins. Errors: null;
// a size below `ours`, the smallest that is accepted, or above kStructBytesMax.
Result<std::size_t> SizeOfStruct(std::string_view name, const void* from,
                                 std::size_t ours);

// Checks that the bytes after `ours`, which only a newer caller knows, are 0.
Status CheckRest(std::string_view name, const void* from, std::size_t ours,
                 std::size_t size);

// Reads the struct into `to`, which has the defaults. `first` is the smallest
// size that is accepted.
template <class T>
Status ReadStruct(std::string_view name, const T* from, T& to,
                  std::size_t first = sizeof(T)) {
  const auto size = SizeOfStruct(name, from, first);
  if (!size.ok()) return size.status();
  Status status = CheckRest(name, from, sizeof(T), *size);
  if (status.ok()) std::memcpy(&to, from, std::min(*size, sizeof(T)));
  return status;
}

// Writes as much of the answer as fits in the caller's struct. Requires:
// SizeOfStruct(to) is ok.
template <class T>
void WriteStruct(T answer, T* to) {
  answer.size = to->size;
  std::memcpy(to, &answer, std::min(answer.size, sizeof(T)));
}

// Writes the defaults for a caller that says how large its struct is.
template <class T>
Status WriteDefaults(std::string_view name, T defaults, T* to,
                     std::size_t size) {
  if (Status status = NeedAll({{name, to}}); !status.ok()) return status;
  const auto checked = SizeOfStruct(name, &size, sizeof(T));
  if (!checked.ok()) return checked.status();
  defaults.size = size;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(to, &defaults, std::min(size, sizeof(T)));
  return {};
}

// Errors: an unknown dtype. Null becomes a tensor without data. Strides that
// are all 0 become dense, unless the shape is invalid or too large to count.
Result<TensorView> TensorFromC(std::string_view name,
                               const kvtwin_tensor* tensor);
kvtwin_tensor CTensor(const TensorView& tensor);

// The pointers stay the caller's. Errors: a count that is negative or larger
// than any list can be, or that has no list.
Result<Batch> BatchFromC(const kvtwin_batch* batch);
template <class T, class Count>
Result<std::span<const T>> ListFromC(std::string_view name, const T* list,
                                     Count count) {
  if (std::cmp_less(count, 0) ||
      std::cmp_greater(count, PTRDIFF_MAX / sizeof(T))) {
    return Invalid("{} has {} entries", name, count);
  }
  if (list == nullptr && count != 0) {
    return Invalid("{} is NULL, it should have {} entries", name, count);
  }
  return std::span<const T>(list, AsSize(count));
}

// Lends a backend copies of the input arguments of a call. An inaccessible page
// follows each copy, so that most reads past the end crash. A copy begins at a
// multiple of 16 bytes, as memory of malloc does.
class Lender {
 public:
  Lender() = default;
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  ~Lender();

  // Returns a copy, valid until Return; of an empty list or tensor, the
  // argument itself. `name` is a literal. Requires: the memory of the tensor
  // has all bytes from its first element to its last element.
  template <class T>
  const T* Lend(const char* name, std::span<const T> list) {
    if (list.empty()) return list.data();
    return reinterpret_cast<const T*>(Copy(name, std::as_bytes(list)));
  }
  kvtwin_tensor Lend(const char* name, const TensorView& tensor);
  // Takes all copies back. Returns the name of an argument that the backend
  // wrote to, or just past; null if it wrote to none.
  const char* Return();

 private:
  // `usable` bytes, and an inaccessible page after them.
  struct Pages {
    std::byte* begin = nullptr;
    std::size_t usable = 0;
  };
  struct Loan {
    const char* name;
    std::span<const std::byte> bytes;  // The copy, up to the inaccessible page.
    std::uint64_t hash;                // Of the bytes when they were lent.
  };
  const std::byte* Copy(const char* name, std::span<const std::byte> bytes);

  std::vector<Pages> pages_;  // One for each loan of a call.
  std::vector<Loan> loans_;
};
// Whether the address is in an inaccessible page after a copy. May be called in
// a signal handler.
bool EndsALoan(const void* address);

// The contents of kvtwin_cache_params.
struct CacheParts {
  CacheSpec spec;
  CacheConfig config;
  InitArgs init;
};
kvtwin_cache_params DefaultCacheParams();
Result<CacheParts> CachePartsFromC(const kvtwin_cache_params* params);

// Converts back. The result points to `caches`, which gets the caches of a
// wrapper. A custom shift has no function here.
kvtwin_cache_params CCacheParams(const CacheParts& parts,
                                 std::vector<kvtwin_cache_params>& caches);

// Points to the tokens and the key. Requires: both outlive this object.
class CPrompt {
 public:
  CPrompt(std::span<const std::int32_t> tokens, const PrefixKey& key);
  CPrompt(const CPrompt&) = delete;
  CPrompt& operator=(const CPrompt&) = delete;

  const kvtwin_prompt* get() const { return &prompt_; }

 private:
  std::vector<const char*> extra_;
  std::vector<kvtwin_media> media_;
  kvtwin_prompt prompt_{};
};

kvtwin_pool_params DefaultPoolParams();
Result<PagedSpec> PagedSpecFromC(const kvtwin_pool_params* params);
// Without the groups.
kvtwin_pool_params CPoolParams(const PagedSpec& spec);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_C_CONVERSIONS_H_
