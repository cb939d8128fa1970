// A pool of blocks of kvtwin's own (kvtwin/paged.h).

#include "kvtwin/paged.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "tensor.h"

namespace kvtwin::python {
namespace {

// The key, the value, the block and the position of the first row.
using PyView = std::tuple<nb::object, nb::object, int, int>;

// Arrays of the pool's memory keep the pool alive.
class PyPool {
 public:
  PyPool(nb::handle setup, const std::string& twin)
      : setup_(nb::borrow(setup)),
        pool_(Value(MakePagedPool(PagedSpecOf(setup), twin))) {}

  const nb::object& setup() const { return setup_; }
  std::shared_ptr<PagedPool> shared() const { return pool_; }
  using Media = std::vector<std::pair<int, std::string>>;
  int Open(const std::vector<std::int32_t>& prompt, const std::string& salt,
           const std::vector<std::string>& extra, const Media& media) {
    return Value(pool_->Open(prompt, KeyOf(salt, extra, media)));
  }
  int Find(const std::vector<std::int32_t>& prompt, const std::string& salt,
           const std::vector<std::string>& extra, const Media& media) const {
    return Value(pool_->Find(prompt, KeyOf(salt, extra, media)));
  }
  void AddMedia(int sequence, int position, const std::string& hash) {
    Check(pool_->AddMedia(sequence, {position, hash}));
  }
  int Fork(int sequence, int length) {
    return Value(pool_->Fork(sequence, length));
  }
  int SeqLen(int sequence) const { return Value(pool_->SeqLen(sequence)); }
  int Append(int sequence, int layer, nb::handle key, nb::handle value) {
    Value(pool_->LayerDevice(layer));  // The layer exists.
    const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
    const ArrayArgument k(key, "key", spec.dtype);
    const ArrayArgument v(value, "value", *spec.v_dtype);
    return Value(pool_->Append(sequence, layer, k.view(), v.view())).start;
  }
  void Commit(int sequence, const std::vector<std::int32_t>& tokens) {
    Check(pool_->Commit(sequence, std::span(tokens)));
  }
  void CommitUnknown(int sequence, int count) {
    Check(pool_->Commit(sequence, count));
  }
  std::vector<PyView> Views(int sequence, int layer) const {
    std::vector<PyView> views;
    for (const PagedView& view : Value(pool_->Views(sequence, layer))) {
      views.emplace_back(NumpyView(view.key, 3, pool_),
                         NumpyView(view.value, 3, pool_), view.block,
                         view.start);
    }
    return views;
  }
  void Truncate(int sequence, int length) {
    Check(pool_->Truncate(sequence, length));
  }
  void Free(int sequence) { Check(pool_->Free(sequence)); }
  std::tuple<int, int, int, int> Usage(std::optional<int> group) const {
    const PagedUsage usage = GroupOf(group).Usage();
    return {usage.free, usage.cached, usage.used, usage.shared};
  }
  std::vector<std::vector<int>> Table(const std::vector<int>& sequences,
                                      std::optional<int> group) const {
    const PagedCsr csr = Value(GroupOf(group).ExportCsr(sequences));
    std::vector<std::vector<int>> table;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      table.emplace_back(IteratorAt(csr.indices, csr.indptr[i]),
                         IteratorAt(csr.indices, csr.indptr[i + 1]));
    }
    return table;
  }
  std::pair<std::vector<std::vector<int>>, std::vector<int>> LayerTable(
      const std::vector<int>& sequences, int layer) const {
    PagedTable table = Value(pool_->ExportLayerTable(sequences, layer));
    std::vector<std::vector<int>> rows;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const auto columns = std::span(table.blocks)
                               .subspan(i * AsSize(table.columns))
                               .first(AsSize(table.columns));
      rows.emplace_back(columns.begin(), columns.end());
    }
    return {std::move(rows), std::move(table.seq_lens)};
  }
  std::vector<std::int64_t> Slots(int sequence, int begin, int end,
                                  std::optional<int> group) const {
    return Value(GroupOf(group).SlotMapping(sequence, begin, end));
  }
  int ResumeBefore(int sequence, int length) const {
    return Value(pool_->ResumeBefore(sequence, length));
  }
  nb::tuple Blocks(int layer) const {
    const PagedKv blocks = Value(pool_->Blocks(layer));
    return nb::make_tuple(NumpyView(blocks.key, 4, pool_),
                          NumpyView(blocks.value, 4, pool_));
  }

 private:
  // Returns a group, or the pool itself.
  const PagedPool& GroupOf(std::optional<int> group) const {
    const PagedPool* const of = group ? pool_->Group(*group) : pool_.get();
    if (of == nullptr) Raise(NoSuchGroup(pool_->spec(), *group));
    return *of;
  }
  static PrefixKey KeyOf(const std::string& salt,
                         const std::vector<std::string>& extra,
                         const Media& media) {
    PrefixKey key = {.salt = salt, .extra = extra};
    for (const auto& [position, hash] : media) {
      key.media.push_back({position, hash});
    }
    return key;
  }

  nb::object setup_;
  std::shared_ptr<PagedPool> pool_;
};

// Python's garbage collector calls this to find cycles.
PyObject* SetupOf(PyObject* self) {
  return nb::inst_ptr<PyPool>(self)->setup().ptr();
}
PyType_Slot pool_type_slots[] = {TraverseSlot<SetupOf>(), {0, nullptr}};

}  // namespace

std::shared_ptr<PagedPool> PoolOf(nb::handle object) {
  if (!nb::isinstance<PyPool>(object)) return nullptr;
  return nb::cast<const PyPool&>(object).shared();
}

namespace {

// The calls that take prompts or their parts.
void BindPrompts(nb::class_<PyPool>& pool) {
  pool.def("open", &PyPool::Open,
           nb::arg("prompt") = std::vector<std::int32_t>(),
           nb::arg("salt") = "", nb::arg("extra") = std::vector<std::string>(),
           nb::arg("media") = PyPool::Media(),
           nb::sig("def open(self, prompt: collections.abc.Sequence[int] = (), "
                   "salt: str = '', extra: collections.abc.Sequence[str] = (), "
                   "media: collections.abc.Sequence[tuple[int, str]] = ()) "
                   "-> int"),
           "Makes a sequence, which begins with the blocks of the prompt that "
           "are stored. An image is a pair of its position and its hash.")
      .def("find", &PyPool::Find,
           nb::arg("prompt") = std::vector<std::int32_t>(),
           nb::arg("salt") = "", nb::arg("extra") = std::vector<std::string>(),
           nb::arg("media") = PyPool::Media(),
           nb::sig("def find(self, prompt: collections.abc.Sequence[int] = (), "
                   "salt: str = '', extra: collections.abc.Sequence[str] = (), "
                   "media: collections.abc.Sequence[tuple[int, str]] = ()) "
                   "-> int"),
           "With how many tokens of the prompt a sequence would begin.")
      .def("add_media", &PyPool::AddMedia, nb::arg("sequence"),
           nb::arg("position"), nb::arg("hash"),
           "Adds an image for tokens that are committed later.");
}

}  // namespace

void BindPagedPool(nb::module_& m) {
  nb::class_<PyPool> pool(m, "Pool", nb::type_slots(pool_type_slots),
                          "A pool of blocks of kvtwin's own "
                          "(docs/semantics.md). One thread at a time.");
  BindPrompts(pool);
  pool.def(nb::init<nb::handle, std::string>(), nb::arg("setup"),
           nb::arg("twin") = "optimized",
           nb::sig("def __init__(self, setup: kvtwin.PoolSetup, twin: "
                   "typing.Literal['optimized', 'reference'] = 'optimized') "
                   "-> None"))
      .def_prop_ro("setup", &PyPool::setup,
                   nb::sig("def setup(self) -> kvtwin.PoolSetup"),
                   "The setup with which the pool was made.")
      .def("fork", &PyPool::Fork, nb::arg("sequence"), nb::arg("length"),
           "Makes a sequence of the first tokens of another one.")
      .def("seq_len", &PyPool::SeqLen, nb::arg("sequence"),
           "The number of committed tokens.")
      .def("append", &PyPool::Append, nb::arg("sequence"), nb::arg("layer"),
           nb::arg("key").none(), nb::arg("value").none(),
           nb::sig("def append(self, sequence: int, layer: int, key: "
                   "numpy.typing.ArrayLike, value: numpy.typing.ArrayLike) -> "
                   "int"),
           "Stores rows after the committed ones, (tokens, kv_heads, "
           "head_dim): float32, or\nthe pool's dtype as `views` has it. "
           "Returns the position of the first, or raises\nCacheFull.")
      .def("commit", &PyPool::Commit, nb::arg("sequence"), nb::arg("tokens"),
           "Adds appended tokens, by their ids, to the sequence.")
      .def("commit_unknown", &PyPool::CommitUnknown, nb::arg("sequence"),
           nb::arg("count"),
           "Adds appended tokens whose ids are unknown: no prompt finds them.")
      .def("views", &PyPool::Views, nb::arg("sequence"), nb::arg("layer"),
           nb::sig("def views(self, sequence: int, layer: int) -> "
                   "list[tuple[kvtwin.Array, kvtwin.Array, int, int]]"),
           "The committed rows, then the appended ones: (key, value, block, "
           "start) for each\nblock, read-only arrays of the pool's memory.")
      .def("truncate", &PyPool::Truncate, nb::arg("sequence"),
           nb::arg("length"), "Keeps the first tokens.")
      .def("free", &PyPool::Free, nb::arg("sequence"), "Ends a sequence.")
      .def("resume_before", &PyPool::ResumeBefore, nb::arg("sequence"),
           nb::arg("length"),
           "The greatest length up to `length` at which the sequence can "
           "resume: `fork`\nand `truncate` take effect there.")
      .def("usage", &PyPool::Usage, nb::arg("group") = nb::none(),
           "How many blocks are free, cached, used and shared.")
      .def("table", &PyPool::Table, nb::arg("sequences"),
           nb::arg("group") = nb::none(),
           "The blocks of the committed tokens of each sequence, in a group if "
           "the pool has\ngroups; -1 for a block that was given up.")
      .def(
          "layer_table", &PyPool::LayerTable, nb::arg("sequences"),
          nb::arg("layer"),
          "The blocks of each sequence, padded with -1 to the longest, and the "
          "lengths in\ntokens, of the rows that a layer has: the committed "
          "ones, and those appended\nsince the last commit. "
          "Attention.plan_table takes both before `commit`.")
      .def("slots", &PyPool::Slots, nb::arg("sequence"), nb::arg("begin"),
           nb::arg("end"), nb::arg("group") = nb::none(),
           "block * block_size + offset for each of the positions; -1: the "
           "position has no\nrow. Pools with groups need the group.")
      .def("blocks", &PyPool::Blocks, nb::arg("layer"),
           nb::sig("def blocks(self, layer: int) -> tuple[kvtwin.Array, "
                   "kvtwin.Array]"),
           "K and V of all blocks of a layer, read-only arrays of the pool's "
           "memory: (blocks,\nblock_size, kv_heads, head_dim), or (blocks, "
           "kv_heads, block_size, head_dim) if\nhead-major.");
}

}  // namespace kvtwin::python
