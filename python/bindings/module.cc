#include <fmt/format.h>

#include <string>
#include <string_view>

#include "bindings.h"
#include "optimized/fast_paths.h"
#include "optimized/targets.h"

namespace kvtwin::python {
namespace {

// Reads the same environment variables as the command `kvtwin`.
void UseEnvironment() {
  if (!optimized::UseTargetFromEnvironment()) {
    throw nb::import_error("KVTWIN_TARGET names no target of this machine");
  }
  if (!optimized::UseFastPathsFromEnvironment()) {
    throw nb::import_error("KVTWIN_FAST_PATHS is not on or off");
  }
}

}  // namespace

nb::object ErrorType(const char* name) {
  return nb::module_::import_("kvtwin._errors").attr(name);
}

void Raise(const Status& status) {
  const auto type = [&]() -> nb::object {
    switch (status.code()) {
      case StatusCode::kCacheFull:
        return ErrorType("CacheFull");
      case StatusCode::kNotSupported:
        return ErrorType("NotSupported");
      case StatusCode::kSharedCells:
        return ErrorType("SharedCells");
      case StatusCode::kInvalidArgument:
        return nb::borrow(PyExc_ValueError);
      default:
        return nb::borrow(PyExc_RuntimeError);
    }
  };
  PyErr_SetString(type().ptr(), status.ToString().c_str());
  throw nb::python_error();
}

std::string TextOf(nb::handle object) {
  const nb::str text(object);
  const auto bytes = nb::steal<nb::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {bytes.c_str(), bytes.size()};
}

void Wrong(std::string_view name, nb::handle value, std::string_view expected) {
  std::string shown;
  try {
    shown = TextOf(nb::repr(value));
  } catch (const nb::python_error&) {  // Such as an int of thousands of digits.
    shown = fmt::format("of the type {}", nb::inst_name(value).c_str());
  }
  throw nb::value_error(
      fmt::format("{} is {}, it must be {}", name, shown, expected).c_str());
}

}  // namespace kvtwin::python

NB_MODULE(_kvtwin, m) {
  m.doc() = "The compiled part of kvtwin.";
  kvtwin::python::UseEnvironment();
  kvtwin::python::BindCache(m);
  kvtwin::python::BindAttention(m);
  kvtwin::python::BindCheck(m);
  kvtwin::python::BindLive(m);
  kvtwin::python::BindPagedPool(m);
  kvtwin::python::BindPool(m);
  kvtwin::python::BindSessions(m);
}
