// Declarations that the sources of the Python module share.

#ifndef KVTWIN_PYTHON_BINDINGS_BINDINGS_H_
#define KVTWIN_PYTHON_BINDINGS_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/guarded_cache.h"
#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"

namespace kvtwin::python {

namespace nb = nanobind;

// Returns the class `name` of kvtwin._errors.
nb::object ErrorType(const char* name);

// Raises the Python exception for a status. Requires: the status is not ok.
[[noreturn]] void Raise(const Status& status);

inline void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}
template <class T>
T Value(Result<T> result) {
  Check(result.status());
  return std::move(*result);
}

// Returns str(object) as UTF-8, with lone surrogates escaped. Raises what str()
// raises.
std::string TextOf(nb::handle object);

// Raises a ValueError that names an argument and its value.
[[noreturn]] void Wrong(std::string_view name, nb::handle value,
                        std::string_view expected);

// The path of a file, which Python gives as a str, bytes or an os.PathLike.
struct FilePath {
  std::string text;
};

// A kvtwin.Setup without its model.
struct Making {
  CacheSpec spec;
  CacheConfig config;
  InitArgs init;
};
// Errors: raised as Python exceptions that name the field.
Making MakingOf(nb::handle setup);
// Does the same with a kvtwin.PoolSetup.
PagedSpec PagedSpecOf(nb::handle setup);

// Returns what a kvtwin.Cache or a kvtwin.Pool is made of, or null for another
// object. Errors: raised: the cache is closed.
std::shared_ptr<Cache> CacheOf(nb::handle object);
std::shared_ptr<PagedPool> PoolOf(nb::handle object);
// Ends the views of a kvtwin.Cache: a pass began without its start_forward.
void EndViews(nb::handle cache);

// Returns the attention of an AttentionTwin.
Attention& AttentionOf(nb::handle twin);

// In the order of the enum.
inline constexpr std::array<std::string_view, 2> kPagedLayoutNames = {
    "token_major", "head_major"};

// Visits the object that kHeld(self) returns, or that is null there, for
// Python's garbage collector. Takes no reference, as collectors require.
template <PyObject* (*kHeld)(PyObject*)>
int Traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  PyObject* const held = kHeld(self);
  Py_VISIT(held);
  return 0;
}
template <PyObject* (*kHeld)(PyObject*)>
PyType_Slot TraverseSlot() {
  return {Py_tp_traverse, reinterpret_cast<void*>(&Traverse<kHeld>)};
}

void BindAttention(nb::module_& m);
void BindCache(nb::module_& m);
void BindCheck(nb::module_& m);
void BindLive(nb::module_& m);
void BindPagedPool(nb::module_& m);
void BindPool(nb::module_& m);
void BindSessions(nb::module_& m);

}  // namespace kvtwin::python

template <>
struct nanobind::detail::type_caster<kvtwin::python::FilePath> {
  NB_TYPE_CASTER(kvtwin::python::FilePath,
                 const_name("str | bytes | os.PathLike[typing.Any]"))

  bool from_python(handle source, std::uint32_t /*flags*/,
                   cleanup_list* /*cleanup*/) noexcept {
    PyObject* path = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &path) == 0) {
      PyErr_Clear();
      return false;
    }
    const auto owned = steal<bytes>(path);
    value.text.assign(owned.c_str(), owned.size());
    return true;
  }
};

#endif  // KVTWIN_PYTHON_BINDINGS_BINDINGS_H_
