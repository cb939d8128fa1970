// A cache that is written in Python, as the table of functions that the harness
// drives.

#ifndef KVTWIN_PYTHON_BINDINGS_BACKEND_H_
#define KVTWIN_PYTHON_BINDINGS_BACKEND_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kvtwin/kvtwin.h"
#include "props/base/level.h"
#include "props/certify/certificate.h"
#include "props/search/fuzz.h"

namespace kvtwin::python {

namespace nb = nanobind;

// The fields of kvtwin.Finding.
using Finding = std::tuple<std::string, std::string, std::string, std::string,
                           std::string, std::string, std::string>;

// The level that holds, whether the backend does what it claims, whether no
// view was compared, operations, histories, findings, the number of known
// findings by bucket, and notes on answers that never came.
using Fuzzed = std::tuple<std::string, bool, bool, std::int64_t, std::int64_t,
                          std::vector<Finding>, props::PassedOver,
                          std::vector<std::string>>;

// A run of one history: the calls, the finding, the operations that were not
// run, and why nothing was judged ("" if something was).
using Ran = std::tuple<std::vector<std::string>, std::optional<Finding>,
                       std::vector<std::string>, std::string>;

// A Python exception that ends the program, such as Ctrl-C, raised in a call
// of the backend. It is thrown through the harness, and is not a
// std::exception, because the harness takes these for findings.
struct Interrupted {
  nb::python_error error;
};

// Returns the result of `fn`. If `fn` throws Interrupted, throws the Python
// exception that interrupted the run.
template <class Fn>
auto Raising(const Fn& fn) {
  try {
    return fn();
  } catch (Interrupted& interrupted) {
    throw nb::python_error(interrupted.error);
  }
}

// Which exceptions of a call are statuses, in addition to those of kvtwin.
// Other exceptions are KVTWIN_INTERNAL.
enum class Refusals : std::uint8_t {
  kNone,
  kInvalid,  // ValueError, of a call that the rules may refuse.
  kMisuse,   // ValueError and RuntimeError, of a class that refuses misuse.
};

// Returns the kvtwin_status of an exception that the backend raised, and sets
// `message` to its message.
int StatusOf(nb::python_error& error, Refusals refusals, std::string& message);

// Calls `fn`, a call of the backend, and returns its kvtwin_status.
template <class Fn>
int Guarded(std::string& message, Refusals refusals, const Fn& fn) {
  message.clear();
  try {
    fn();
    return KVTWIN_OK;
  } catch (nb::python_error& error) {
    return StatusOf(error, refusals, message);
  } catch (const std::bad_alloc&) {
    return KVTWIN_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    message = error.what();
    return KVTWIN_INTERNAL;
  }
}

// Calls the method `close` of a kvtwin._live.Instance or a
// kvtwin._pool.PoolInstance. Returns what it raises, if anything. Ctrl-C is
// raised again by a later call.
std::optional<props::Failure> FailureOfClose(nb::handle instance);

Finding FindingOf(const props::Failure& failure, props::Level level);

nb::list Ints(const std::int32_t* numbers, std::size_t count);
// Returns a copy, which the backend may keep.
nb::object Rows(const kvtwin_tensor& rows);
// Makes `tensor` point to the memory of a dense array.
void Point(nb::handle array, kvtwin_tensor& tensor);

// The functions of a table do not get their Backend as an argument. So each
// thread has at most one Backend at a time, and calls it only on that thread.
class Backend {
 public:
  // `adapter` is a kvtwin._live.Backend. Errors: raised as Python exceptions.
  explicit Backend(nb::object adapter);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const kvtwin_backend_v1& table() const { return table_; }

  // The exception of the last init that failed, which no message() returns; and
  // whether any init succeeded.
  const std::string& init_error() const { return init_error_; }
  bool made_one() const { return made_one_; }

 private:
  struct Instance;

  // `refusals` are those of a class that does not refuse misuse.
  template <class Fn>
  int Guarded(std::string& message, Refusals refusals, const Fn& fn);
  template <class Fn>
  static int On(void* cache, const Fn& fn, Refusals refusals = Refusals::kNone);
  int Describe(kvtwin_description_v1* out);
  int Init(const kvtwin_setup_v1* setup, void** cache);
  static void Get(Instance& instance, int layer, kvtwin_view* view);
  static void FillOptional(nb::handle adapter, kvtwin_backend_v1& table);
  static void FillGet(kvtwin_backend_v1& table);
  static void FillAttend(kvtwin_backend_v1& table);
  static void FillCommit(kvtwin_backend_v1& table);
  static void FillFindPrefix(kvtwin_backend_v1& table);
  static void FillCheckpoint(kvtwin_backend_v1& table);
  static void FillCells(kvtwin_backend_v1& table);

  static thread_local Backend* current_;

  nb::object adapter_;
  kvtwin_backend_v1 table_ = {};
  std::string name_;
  std::string profile_;
  std::string init_error_;
  bool made_one_ = false;
};

// Returns the level with the name `asked`. Raises ValueError if it is not one
// of `levels`, at which the class can be compared.
props::Level AskedLevel(const std::string& asked,
                        const std::vector<props::Level>& levels);

// Returns the fields of kvtwin.Certificate. `old` is the text of an earlier
// certificate.
nb::typed<nb::dict, nb::str, nb::any> CertificateDict(
    const props::Certificate& certificate,
    const std::optional<std::string>& old);

}  // namespace kvtwin::python

#endif  // KVTWIN_PYTHON_BINDINGS_BACKEND_H_
