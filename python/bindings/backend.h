// A cache that is written in Python, as the table that the harness drives.

#ifndef KVTWIN_PYTHON_BINDINGS_BACKEND_H_
#define KVTWIN_PYTHON_BINDINGS_BACKEND_H_

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "kvtwin/kvtwin.h"

namespace kvtwin::python {

namespace nb = nanobind;

// Ctrl-C, or whatever else is no Exception, that came up in a call of theirs.
// Thrown through the harness, which takes a std::exception for a finding.
struct Interrupted {
  nb::python_error error;
};

// Returns what `fn` returns. An Interrupted that it throws goes on as the
// Python exception which ended the run from outside.
template <class Fn>
auto Raising(const Fn& fn) {
  try {
    return fn();
  } catch (Interrupted& interrupted) {
    throw nb::python_error(interrupted.error);
  }
}

// The kvtwin_status of an exception that the backend raised, and its message.
int StatusOf(nb::python_error& error, bool refuses_misuse,
             std::string& message);

// Calls them.
template <class Fn>
int Guarded(std::string& message, bool refuses_misuse, const Fn& fn) {
  message.clear();
  try {
    fn();
    return KVTWIN_OK;
  } catch (nb::python_error& error) {
    return StatusOf(error, refuses_misuse, message);
  } catch (const std::bad_alloc&) {
    return KVTWIN_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    message = error.what();
    return KVTWIN_INTERNAL;
  }
}

nb::list Ints(const std::int32_t* numbers, std::size_t count);
// A copy: theirs to keep.
nb::object Rows(const kvtwin_tensor& rows);
// Points to an array that is dense.
void Point(nb::handle array, kvtwin_tensor& tensor);

// The functions of a table do not say whose they are: there is one backend at a
// time on each thread, and its calls come on that thread.
class Backend {
 public:
  // `adapter` is a kvtwin._live.Backend. Errors: raised.
  explicit Backend(nb::object adapter);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const kvtwin_backend_v1& table() const { return table_; }

  // What the last init that failed raised, which no message tells; and whether
  // there ever was one that did not.
  const std::string& init_error() const { return init_error_; }
  bool made_one() const { return made_one_; }

 private:
  struct Instance;

  template <class Fn>
  int Guarded(std::string& message, const Fn& fn);
  template <class Fn>
  static int On(void* cache, const Fn& fn);
  int Describe(kvtwin_description_v1* out);
  int Init(const kvtwin_setup_v1* setup, void** cache);
  static void Get(Instance& one, int layer, kvtwin_view* view);
  static void FillOptional(nb::handle adapter, kvtwin_backend_v1& table);

  static thread_local Backend* current_;

  nb::object adapter_;
  kvtwin_backend_v1 table_ = {};
  std::string name_;
  std::string profile_;
  std::string init_error_;
  bool made_one_ = false;
};

}  // namespace kvtwin::python

#endif  // KVTWIN_PYTHON_BINDINGS_BACKEND_H_
