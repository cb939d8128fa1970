// The status of an operation: ok, a refusal, or misuse.
//
// A refusal (cache_full, not_supported, shared_cells) is an outcome that a
// correct client expects and handles. invalid_argument and failed_precondition
// mean that the caller is wrong; the message names the argument and its value.
// No refusal and no misuse changes the cache, with one exception: a
// StartForward that answers cache_full has ended the previous pass, and its
// eviction and defrag stay (docs/semantics.md, S5 and S12).

#ifndef KVTWIN_STATUS_H_
#define KVTWIN_STATUS_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvtwin {

// The outcome of a call.
enum class StatusCode {
  kOk,
  kCacheFull,           // No cells for the batch.
  kNotSupported,        // This kind of cache cannot do what was asked.
  kSharedCells,         // A token that would move belongs to other sequences.
  kInvalidArgument,     // An argument is wrong in itself.
  kFailedPrecondition,  // The call comes at the wrong time.
  kDeviceError,         // CUDA returned an error. The message begins with its
                        // name. Only caches and pools on a device.
};

// The name used in recordings and messages: "ok", "cache_full", ...
std::string_view StatusName(StatusCode code);

// A code, and for every code except kOk a message.
class [[nodiscard]] Status {
 public:
  // Makes kOk.
  Status() = default;
  // Makes another status; the message names the argument and its value.
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  // The parts of the status. The message of kOk is empty.
  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "cache_full: 3 of 16 cells are free, the batch has 5 tokens".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the status that says why there is no value.
template <class T>
class [[nodiscard]] Result {
 public:
  // Makes a result of a value or of a status, which must not be kOk.
  Result(T value) : value_(std::move(value)) {}          // NOLINT
  Result(Status status) : status_(std::move(status)) {}  // NOLINT

  // Whether the result has a value. The status is kOk if it has.
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Requires: ok(). Checked if the standard library has its assertions on, as
  // with -D_GLIBCXX_ASSERTIONS.
  const T& operator*() const& { return *value_; }
  T& operator*() & { return *value_; }
  // By value, so that `for (auto& x : *F())` does not iterate over a destroyed
  // temporary.
  T operator*() && { return std::move(*value_); }
  const T* operator->() const { return &*value_; }
  T* operator->() { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace kvtwin

#endif  // KVTWIN_STATUS_H_
