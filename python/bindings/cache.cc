#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/dense_tensor.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "kvtwin/save.h"
#include "tensor.h"

namespace kvtwin::python {
namespace {

using Sinks =
    nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Result<DType> FindDType(const std::string& name) {
  if (const auto found = DTypeFromName(name)) return *found;
  return Status(StatusCode::kInvalidArgument, "no dtype: " + name);
}

using Slot = std::pair<const Cache*, int>;  // A layer of a cache.

// The state that views check for their validity. An array keeps `cache` alive,
// whose memory does not move before its end, except masks and encoders' slots,
// of which an array has a copy.
struct Life {
  std::shared_ptr<Cache> cache;   // Null: closed.
  std::uint64_t passes = 0;       // Goes up when all views become invalid.
  std::map<Slot, int> slot_puts;  // The same for views of an encoder's layer.

  Cache& open() const {
    if (cache == nullptr) {
      Raise({StatusCode::kFailedPrecondition, "the cache is closed"});
    }
    return *cache;
  }
};

// One of the three tensors of a view.
class Tensor {
 public:
  Tensor(std::shared_ptr<Life> life, std::optional<Slot> slot, TensorView view,
         std::size_t rank, bool lasts)
      : life_(std::move(life)),
        slot_(slot),
        passes_(life_->passes),
        puts_(slot_ ? life_->slot_puts[*slot_] : 0),
        view_(view),
        rank_(rank),
        lasts_(lasts) {}

  const TensorView& fresh() const {
    if (life_->cache == nullptr || passes_ != life_->passes ||
        (slot_ && puts_ != life_->slot_puts.at(*slot_))) {
      PyErr_SetString(
          ErrorType("StaleViewError").ptr(),
          "this view ended with a later start_forward, set_causal, restore, "
          "close, or put to the layer of an encoder: get it again");
      throw nb::python_error();
    }
    return view_;
  }
  std::size_t rank() const { return rank_; }
  nb::tuple shape() const { return ShapeOf(fresh(), rank_); }
  std::string dtype_name() const {
    return std::string(DTypeName(fresh().dtype));
  }
  nb::object numpy() const {
    auto [view, owner] = Kept();
    return NumpyView(view, rank_, std::move(owner));
  }
  nb::object float32() const { return Float32Copy(fresh(), rank_); }
  nb::object Dlpack(const nb::kwargs& kwargs) const {
    auto [view, owner] = Kept();
    const nb::object array = DlpackView(view, rank_, std::move(owner));
    return array.attr("__dlpack__")(**kwargs);
  }
  std::string Text() const {
    const nb::object shape_text = nb::str(shape());
    return fmt::format("<kvtwin.Tensor {} of {}>", dtype_name(),
                       nb::borrow<nb::str>(shape_text).c_str());
  }

 private:
  // Returns the tensor for an array, and the object that the array keeps alive.
  std::pair<TensorView, std::shared_ptr<const void>> Kept() const {
    if (lasts_) return {fresh(), life_->cache};
    if (copy_ == nullptr) {
      copy_ = std::make_shared<DenseTensor>(CopyOf(fresh(), fresh().dtype));
    }
    fresh();
    return {copy_->view(), copy_};
  }

  std::shared_ptr<Life> life_;
  std::optional<Slot> slot_;
  std::uint64_t passes_;
  int puts_;
  TensorView view_;
  std::size_t rank_;
  bool lasts_;
  mutable std::shared_ptr<DenseTensor> copy_;
};

struct View {
  Tensor key;
  Tensor value;
  std::optional<Tensor> mask;
  int first_cell;
  VLayout v_layout;
};

class PyCache {
 public:
  PyCache(nb::handle setup, std::string twin)
      : making_(MakingOf(setup)),
        twin_(std::move(twin)),
        life_(std::make_shared<Life>()) {
    life_->cache = Make();
  }

  void StartForward(const std::vector<std::int32_t>& positions,
                    const std::vector<int>& sequences, bool reserve,
                    const std::vector<int>& multimodal,
                    const std::vector<int>& parents) {
    const Status status = cache().StartForward(
        {positions, sequences, multimodal, parents}, reserve);
    if (!IsMisuse(status)) ++life_->passes;
    Check(status);
  }

  void SetCausal(const std::vector<int>& except) {
    Check(cache().SetCausal(except));
    ++life_->passes;
  }

  void Put(int layer, nb::handle key, nb::handle value) {
    // Converting an array may run Python, and so put rows to another layer.
    const auto layer_of = [&]() -> Cache& {
      Check(cache().SetLayer(layer));
      return cache();
    };
    layer_of();
    const DType dtype = making_.init.dtype;
    const DType v_dtype = making_.config.v_dtype.value_or(dtype);
    try {
      const ArrayArgument k(key, "key", dtype);
      const ArrayArgument v(value, "value", v_dtype);
      Check(layer_of().Put(k.view(), v.view()));
    } catch (const nb::python_error&) {
      // The error of a missing pass comes before the error of an argument that
      // is not an array (S47).
      const Status status = layer_of().Put({}, {});
      if (status.code() == StatusCode::kFailedPrecondition) Check(status);
      throw;
    }
    ++life_->slot_puts[SlotOf(layer)];
  }

  View Get(int layer) {
    Check(cache().SetLayer(layer));
    const KvView view = Value(cache().Get());
    const bool encoder = view.mask.data == nullptr;
    std::optional<Slot> slot;
    if (encoder) slot = SlotOf(layer);
    const auto tensor = [&](const TensorView& rows, std::size_t rank,
                            bool lasts) {
      return Tensor(life_, slot, rows, rows.shape[3] > 1 ? 4 : rank, lasts);
    };
    const bool tiled = !encoder && making_.config.v_layout == VLayout::kTiled;
    View views{.key = tensor(view.key, 3, !encoder),
               .value = tensor(view.value, tiled ? 4 : 3, !encoder),
               .mask = std::nullopt,
               .first_cell = view.first_cell,
               .v_layout = encoder ? VLayout::kPlain : making_.config.v_layout};
    if (!encoder) views.mask = tensor(view.mask, 2, false);
    return views;
  }

  // Put, unless `key` is None, and attention of a layer, over tensors of torch.
  // Writes to `out`, dense [batch * tokens, heads, v_head_dim] of float32.
  void AttendLayer(nb::handle attention, int layer, nb::handle key,
                   nb::handle value, const std::string& rows, nb::handle query,
                   const std::string& query_dtype, float scale, float soft_cap,
                   const std::optional<Sinks>& sinks, bool bf16_products,
                   nb::handle out) {
    AttentionOptions options{
        .scale = scale, .soft_cap = soft_cap, .bf16_products = bf16_products};
    if (sinks) options.sinks = {sinks->data(), sinks->size()};
    Check(cache().SetLayer(layer));
    if (!key.is_none()) {
      const DType dtype = Value(FindDType(rows));
      Check(cache().Put(TorchRows(key, dtype), TorchRows(value, dtype)));
      ++life_->slot_puts[SlotOf(layer)];
    }
    const KvView view = Value(cache().Get());
    const TensorView q = TorchRows(query, Value(FindDType(query_dtype)));
    const std::int64_t numbers = view.value.shape[0] * q.shape[1] * q.shape[2];
    if (nb::cast<std::int64_t>(out.attr("numel")()) != numbers) {
      Raise({StatusCode::kInvalidArgument,
             fmt::format("out must have {} numbers", numbers)});
    }
    auto* results = reinterpret_cast<float*>(
        nb::cast<std::uintptr_t>(out.attr("data_ptr")()));
    Check(AttentionOf(attention).Attend(q, view, VLayout::kPlain, options,
                                        {.out = results}));
  }

  void CopyPrefix(int source, int target, std::int32_t length) {
    Check(cache().CopyPrefix(source, target, length));
  }
  bool CanResume(int sequence, std::int32_t position) {
    return Value(cache().CanResume(sequence, position));
  }
  std::int32_t ResumeBefore(int sequence, std::int32_t position) {
    return Value(cache().ResumeBefore(sequence, position));
  }
  void Remove(int sequence, std::int32_t begin, std::int32_t end) {
    Check(cache().Remove(sequence, begin, end));
  }
  void Commit(int sequence, const std::vector<int>& path) {
    Check(cache().Commit(sequence, path));
  }
  void Checkpoint(int sequence) { Check(cache().Checkpoint(sequence)); }
  void SetLayerType(int type) { Check(cache().SetLayerType(type)); }
  bool EncoderCached() { return Value(cache().EncoderCached()); }

  nb::bytes Snapshot() {
    const std::vector<std::byte> bytes =
        StateToBytes(Value(cache().Snapshot()));
    return nb::bytes(bytes.data(), bytes.size());
  }
  // Restores into a new cache, so that arrays of the old one stay unchanged.
  void Restore(const nb::bytes& bytes) {
    cache();
    const CacheState state = Value(StateFromBytes(
        {static_cast<const std::byte*>(bytes.data()), bytes.size()}));
    std::shared_ptr<Cache> other = Make();
    Check(other->Restore(state));
    Replace(std::move(other));
  }
  void SaveSequence(int sequence, const FilePath& path,
                    const std::string& model) {
    Check(SaveState(Value(cache().SnapshotOf(sequence)), path.text, model));
  }
  void LoadSequence(int sequence, const FilePath& path,
                    const std::string& model) {
    Check(cache().AddSequence(sequence, Value(LoadState(path.text, model))));
    ++life_->passes;
  }
  void Close() { Replace(nullptr); }
  std::shared_ptr<Cache> shared() const {
    life_->open();
    return life_->cache;
  }
  void EndViews() { ++life_->passes; }

  int CellCount() { return cache().CellCount(); }
  std::vector<int> BatchCells() {
    return {cache().BatchCells().begin(), cache().BatchCells().end()};
  }
  std::vector<std::tuple<int, std::int32_t, int>> Cells() {
    std::vector<CellEntry> entries;
    cache().ListCells(entries);
    std::vector<std::tuple<int, std::int32_t, int>> cells;
    for (const CellEntry& entry : entries) {
      cells.emplace_back(entry.cell, entry.position, entry.sequence);
    }
    return cells;
  }

 private:
  static bool IsMisuse(const Status& status) {
    return status.code() == StatusCode::kInvalidArgument ||
           status.code() == StatusCode::kFailedPrecondition;
  }

  Cache& cache() { return life_->open(); }
  Slot SlotOf(int layer) { return {cache().UnderlyingCache(), layer}; }

  std::shared_ptr<Cache> Make() const {
    std::unique_ptr<Cache> made = Value(MakeCache(making_.spec, twin_));
    Check(made->SetConfig(making_.config));
    const InitArgs& init = making_.init;
    Check(made->Init(init));
    return made;
  }

  void Replace(std::shared_ptr<Cache> other) {
    life_->cache = std::move(other);
    life_->slot_puts.clear();
    ++life_->passes;
  }

  Making making_;
  std::string twin_;
  std::shared_ptr<Life> life_;
};

// Returns the numbers of rows that are bits or blocks of `dtype`.
nb::object NumbersOf(nb::handle rows, const char* name,
                     const std::string& dtype) {
  const ArrayArgument array(rows, name, Value(FindDType(dtype)));
  return Float32Copy(array.view(), nb::cast<std::size_t>(rows.attr("ndim")));
}

void BindTensor(nb::module_& m) {
  nb::class_<Tensor>(m, "Tensor",
                     "K, V or the mask of a view, without a copy, read-only.\n"
                     "\n"
                     "Every use of it raises StaleViewError once the view has "
                     "ended. Arrays made from\nit stay readable, and then show "
                     "whatever the cache has there.")
      .def_prop_ro("shape", &Tensor::shape,
                   nb::sig("def shape(self) -> tuple[int, ...]"),
                   "In numpy's order: K is (cells, kv_heads, k_head_dim).")
      .def_prop_ro("dtype_name", &Tensor::dtype_name,
                   "\"f32\", \"f16\", \"bf16\", \"f8_e4m3\", \"q8_0\", "
                   "\"q4_0\" or \"bits\".")
      .def("numpy", &Tensor::numpy, nb::sig("def numpy(self) -> kvtwin.Array"),
           "A read-only array: of K and V the cache's memory, of masks and "
           "encoders' rows a\ncopy. bf16 is uint16; f8, blocks and bits are "
           "uint8, blocks and bits with as many\nin the last dimension as a "
           "row has bytes.")
      .def("float32", &Tensor::float32,
           nb::sig("def float32(self) -> "
                   "kvtwin.Float32Array"),
           "The numbers, as a new array. Of a mask 0 and -inf, also of bits.")
      .def(
          "__array__",
          [](const Tensor& self, nb::handle dtype, nb::handle copy) {
            const nb::object array = self.numpy();
            nb::kwargs kwargs;
            kwargs["dtype"] = dtype;
            kwargs["copy"] = copy;
            return nb::module_::import_("numpy").attr("array")(array, **kwargs);
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
          nb::sig("def __array__(self, dtype: typing.Any = None, copy: "
                  "bool | None = None) -> kvtwin.Array"))
      .def("__dlpack__", &Tensor::Dlpack,
           nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> "
                   "typing.Any"))
      .def("__dlpack_device__",
           [](const Tensor&) {
             return std::tuple<int, int>(nb::device::cpu::value, 0);
           })
      .def("__repr__", &Tensor::Text);
}

void BindView(nb::module_& m) {
  nb::class_<View>(m, "View",
                   "What attention reads. Ends with the next start_forward, "
                   "set_causal, restore or\nclose; of an encoder, with the "
                   "next put to its layer. Unpacks to key, value, mask.")
      .def_ro("key", &View::key, "(cells, kv_heads, k_head_dim)")
      .def_ro("value", &View::value,
              "(cells, kv_heads, v_head_dim); permuted (kv_heads, v_head_dim, "
              "cells); tiled\n(cells / 32, kv_heads, v_head_dim, 32)")
      .def_ro("mask", &View::mask,
              "(rows, cells): 0 may attend, -inf may not. None of an encoder.")
      .def_prop_ro(
          "first_cell",
          [](const View& self) {
            self.key.fresh();
            return self.first_cell;
          },
          "The cell of column 0.")
      .def_prop_ro(
          "v_layout",
          [](const View& self) {
            return std::string(VLayoutName(self.v_layout));
          },
          nb::sig("def v_layout(self) -> typing.Literal['plain', 'permuted', "
                  "'tiled']"),
          "\"plain\", \"permuted\" or \"tiled\".")
      .def(
          "__iter__",
          [](const View& self) {
            return nb::iter(nb::make_tuple(self.key, self.value, self.mask));
          },
          nb::sig("def __iter__(self) -> "
                  "collections.abc.Iterator[typing.Any]"));
}

// Adds the functions that manage sequences.
void BindSequences(nb::class_<PyCache>& cache) {
  cache
      .def("copy_prefix", &PyCache::CopyPrefix, nb::arg("source"),
           nb::arg("target"), nb::arg("length"),
           "Replaces the tokens of `target` by those of `source` at positions "
           "< length.")
      .def("can_resume", &PyCache::CanResume, nb::arg("sequence"),
           nb::arg("position"),
           "Whether a sequence can continue with its whole window stored.")
      .def("resume_before", &PyCache::ResumeBefore, nb::arg("sequence"),
           nb::arg("position"),
           "The greatest position <= `position` where a sequence can continue; "
           "0 if there\nis none.")
      .def("remove", &PyCache::Remove, nb::arg("sequence"), nb::arg("begin"),
           nb::arg("end") = kOpenEnd,
           "Tokens at positions in [begin, end) leave; later ones move down, "
           "unless `end` is\nOPEN_END. Raises SharedCells, NotSupported.")
      .def("commit", &PyCache::Commit, nb::arg("sequence"), nb::arg("path"),
           nb::sig("def commit(self, sequence: int, path: "
                   "collections.abc.Sequence[int]) -> None"),
           "The drafts with these numbers become tokens of the sequence; its "
           "other drafts are\ngone.")
      .def(
          "checkpoint", &PyCache::Checkpoint, nb::arg("sequence"),
          "Pins the last state of a sequence of a recurrent cache or a hybrid, "
          "so that later\npasses keep it. Raises NotSupported.");
}

void BindStates(nb::class_<PyCache>& cache) {
  cache
      .def("snapshot", &PyCache::Snapshot,
           nb::sig("def snapshot(self) -> bytes"),
           "All that it holds, as the bytes of a safetensors file.")
      .def("restore", &PyCache::Restore, nb::arg("state"),
           "Holds exactly that from now on.")
      .def("save_sequence", &PyCache::SaveSequence, nb::arg("sequence"),
           nb::arg("path"), nb::arg("model") = "",
           "Writes a sequence to a file, in the format of `snapshot`.")
      .def("load_sequence", &PyCache::LoadSequence, nb::arg("sequence"),
           nb::arg("path"), nb::arg("model") = "",
           "Adds the sequence of a file, which was saved with the same model.");
}

}  // namespace

std::shared_ptr<Cache> CacheOf(nb::handle object) {
  if (!nb::isinstance<PyCache>(object)) return nullptr;
  return nb::cast<const PyCache&>(object).shared();
}

void EndViews(nb::handle cache) { nb::cast<PyCache&>(cache).EndViews(); }

std::optional<TensorView> ViewOfTensor(nb::handle object) {
  if (!nb::isinstance<Tensor>(object)) return std::nullopt;
  return nb::cast<const Tensor&>(object).fresh();
}

void BindCache(nb::module_& m) {
  BindTensor(m);
  BindView(m);
  m.def("numbers_of", &NumbersOf, nb::arg("rows"), nb::arg("name"),
        nb::arg("dtype"),
        nb::sig("def numbers_of(rows: kvtwin.Array, name: str, dtype: str) -> "
                "kvtwin.Float32Array"));
  nb::class_<PyCache> cache(m, "Cache",
                            "A cache of kvtwin's own (docs/semantics.md). One "
                            "thread at a time.");
  BindStates(cache);
  BindSequences(cache);
  cache
      .def(nb::init<nb::handle, std::string>(), nb::arg("setup"),
           nb::arg("twin") = "optimized",
           nb::sig("def __init__(self, setup: kvtwin.Setup, twin: "
                   "typing.Literal['optimized', 'reference'] = 'optimized') "
                   "-> None"))
      .def("start_forward", &PyCache::StartForward, nb::arg("positions"),
           nb::arg("sequences"), nb::arg("reserve") = false,
           nb::arg("multimodal") = std::vector<int>(),
           nb::arg("parents") = std::vector<int>(),
           nb::sig("def start_forward(self, positions: "
                   "collections.abc.Sequence[int], sequences: "
                   "collections.abc.Sequence[int], reserve: bool = False, "
                   "multimodal: collections.abc.Sequence[int] = (), "
                   "parents: collections.abc.Sequence[int] = ()) -> None"),
           "Finds a cell for each token of a batch, or raises CacheFull. "
           "Token i is a draft\nthat follows draft number parents[i] of its "
           "sequence, or COMMITTED; or it is\nNOT_A_DRAFT.")
      .def("set_causal", &PyCache::SetCausal, nb::arg("except_"),
           "These tokens of the batch see tokens after them, too.")
      .def("put", &PyCache::Put, nb::arg("layer"), nb::arg("key").none(),
           nb::arg("value").none(),
           nb::sig("def put(self, layer: int, key: numpy.typing.ArrayLike | "
                   "Tensor, value: numpy.typing.ArrayLike | Tensor) -> None"),
           "Stores the batch's rows, (tokens, kv_heads, head_dim): float32, "
           "or the cache's\ndtype as `Tensor.numpy` has it.")
      .def("get", &PyCache::Get, nb::arg("layer"),
           "The views and the mask of a layer.")
      .def("attend_layer", &PyCache::AttendLayer, nb::arg("attention"),
           nb::arg("layer"), nb::arg("key").none(), nb::arg("value").none(),
           nb::arg("rows"), nb::arg("query"), nb::arg("query_dtype"),
           nb::arg("scale"), nb::arg("soft_cap"), nb::arg("sinks").none(),
           nb::arg("bf16_products"), nb::arg("out"),
           nb::sig("def attend_layer(self, attention: typing.Any, layer: int, "
                   "key: typing.Any, value: typing.Any, rows: str, query: "
                   "typing.Any, query_dtype: str, scale: float, soft_cap: "
                   "float, sinks: typing.Any, bf16_products: bool, out: "
                   "typing.Any) -> None"),
           "For kvtwin.transformers: put, unless key is None, and attention.")
      .def("set_layer_type", &PyCache::SetLayerType, nb::arg("type"),
           "Of a wrapper: picks the active cache.")
      .def("encoder_cached", &PyCache::EncoderCached,
           "Of an encoder: whether there is something in it.")
      .def("close", &PyCache::Close,
           "Gives up the memory, but for what arrays still show.")
      .def("cell_count", &PyCache::CellCount, "The number of cells.")
      .def("batch_cells", &PyCache::BatchCells,
           "The cell of each token of the batch.")
      .def("cells", &PyCache::Cells,
           "All memberships as (cell, position, sequence), in order.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig("def __enter__(self) -> Cache"))
      .def(
          "__exit__", [](PyCache& self, const nb::args&) { self.Close(); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace kvtwin::python
