// Attention on the CPU (kvtwin/attention.h) over arrays.

#include "kvtwin/attention.h"

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/index.h"
#include "core/names.h"
#include "tensor.h"

namespace kvtwin::python {
namespace {

// Returns the value of Enum with this name. Errors: raised, naming `what`.
template <class Enum, std::size_t n>
Enum Named(std::string_view what, std::string_view name,
           const std::array<std::string_view, n>& names) {
  const auto found = FromName<Enum>(names, name);
  if (found) return *found;
  Raise({StatusCode::kInvalidArgument,
         fmt::format("{} is '{}', it must be one of {}", what, name,
                     fmt::join(names, ", "))});
}

// An argument that is a kvtwin.Tensor, which is read where it lies, or an
// array.
class TensorArgument {
 public:
  TensorArgument(nb::handle object, const char* name, DType dtype)
      : object_(nb::borrow(object)) {
    if (!ViewOfTensor(object_)) array_.emplace(object_, name, dtype);
  }
  // Errors: raised, if a kvtwin.Tensor has become stale, as when converting
  // another argument closes the cache.
  TensorView view() const {
    return array_ ? array_->view() : *ViewOfTensor(object_);
  }

 private:
  nb::object object_;
  std::optional<ArrayArgument> array_;
};

// An array of float32 that results are written to.
class Numbers {
 public:
  // Makes a new array if `array` is None. Errors: raised, naming `name`.
  Numbers(nb::handle array, const char* name, const nb::tuple& shape)
      : array_(array.is_none() ? nb::module_::import_("numpy").attr("empty")(
                                     shape, "float32")
                               : nb::borrow(array)) {
    if (!nb::try_cast(array_, numbers_, /*convert=*/false) ||
        !nb::tuple(array_.attr("shape")).equal(shape)) {
      Raise({StatusCode::kInvalidArgument,
             fmt::format("{} must be a writable, dense array of float32, {}",
                         name, nb::repr(shape).c_str())});
    }
  }
  const nb::object& array() const { return array_; }
  float* data() const { return numbers_.data(); }

 private:
  nb::object array_;
  nb::ndarray<float, nb::c_contig, nb::device::cpu> numbers_;  // Keeps memory.
};

using Sinks =
    nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// AttentionOptions as arguments, and the array to write to.
struct PyOptions {
  float scale;
  float soft_cap;
  std::optional<Sinks> sinks;
  int splits;
  bool bf16_products;
  nb::object out;

  AttentionOptions options() const {
    AttentionOptions options{.scale = scale, .soft_cap = soft_cap};
    options.splits = splits;
    options.bf16_products = bf16_products;
    if (sinks) options.sinks = {sinks->data(), sinks->size()};
    return options;
  }
};

// The K and V of a layer: tensors or arrays.
struct Kv {
  Kv(nb::handle k, nb::handle v, std::string_view dtype,
     std::string_view v_dtype)
      : key(k, "key", Named<DType>("dtype", dtype, kDTypeNames)),
        value(v, "value", Named<DType>("v_dtype", v_dtype, kDTypeNames)) {}

  TensorArgument key;
  TensorArgument value;
};

// The limit of a table, 256 MiB: each row gets the length of the longest row.
constexpr std::size_t kTableEntries = std::size_t{1} << 26;

class PyAttention {
 public:
  explicit PyAttention(const std::string& twin)
      : attention_(Value(MakeAttention(twin))) {}

  void Plan(nb::handle mask, std::optional<int> rows, int first_row) {
    const TensorArgument argument(mask, "mask", DType::kF32);
    const TensorView view = argument.view();
    // Too many rows for an int are refused, as 0 rows are.
    const std::int64_t rest = view.shape[1] - first_row;
    const int all = static_cast<int>(rest < INT32_MAX ? rest : 0);
    Check(attention_->Plan(view, rows.value_or(all), first_row));
  }

  // The rows of `blocks` become as long as the longest.
  void PlanTable(const std::vector<std::vector<std::int32_t>>& blocks,
                 const std::vector<std::int32_t>& lengths,
                 const std::vector<std::int32_t>& query_rows, int block_size,
                 std::int32_t window, bool sees_all) {
    std::size_t columns = 0;
    for (const auto& row : blocks) columns = std::max(columns, row.size());
    if (columns > kTableEntries / std::max<std::size_t>(blocks.size(), 1)) {
      Raise({StatusCode::kInvalidArgument,
             fmt::format("blocks has {} rows, and the longest has {} blocks: a "
                         "table has at most {} entries",
                         blocks.size(), columns, kTableEntries)});
    }
    std::vector<std::int32_t> table;
    table.reserve(blocks.size() * columns);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      table.insert(table.end(), blocks[i].begin(), blocks[i].end());
      table.resize((i + 1) * columns, -1);
    }
    Check(attention_->Plan({.blocks = table,
                            .columns = AsInt(columns),
                            .lengths = lengths,
                            .query_rows = query_rows,
                            .block_size = block_size,
                            .window = window,
                            .sees_all = sees_all}));
  }

  nb::tuple Attend(nb::handle query, const Kv& kv, VLayout v_layout,
                   const PyOptions& options) {
    const Shape shape = kv.value.view().shape;
    return Write(query, shape[v_layout == VLayout::kPlain ? 0 : 1], options,
                 [&](const TensorView& q, const AttentionOut& out) {
                   KvView view;
                   view.key = kv.key.view();
                   view.value = kv.value.view();
                   return attention_->Attend(q, view, v_layout,
                                             options.options(), out);
                 });
  }

  nb::tuple AttendBlocks(nb::handle query, const Kv& kv, PagedLayout layout,
                         const PyOptions& options) {
    return Write(query, kv.value.view().shape[0], options,
                 [&](const TensorView& q, const AttentionOut& out) {
                   const PagedKv blocks = {kv.key.view(), kv.value.view()};
                   return attention_->Attend(q, blocks, layout,
                                             options.options(), out);
                 });
  }

  Attention& attention() { return *attention_; }

 private:
  // Makes the arrays that `attend` writes to, and returns them.
  template <class Call>
  static nb::tuple Write(nb::handle query, std::int64_t v_head_dim,
                         const PyOptions& options, const Call& attend) {
    const TensorArgument q(query, "query", DType::kF32);
    const Shape shape = q.view().shape;
    const Numbers out(options.out, "out",
                      nb::make_tuple(shape[2], shape[1], v_head_dim));
    const Numbers sums(nb::none(), "log_sum_exp",
                       nb::make_tuple(shape[2], shape[1]));
    Check(attend(q.view(), {.out = out.data(), .log_sum_exp = sums.data()}));
    return nb::make_tuple(out.array(), sums.array());
  }

  std::unique_ptr<Attention> attention_;
};

using PartNumbers = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

// Merges the parts, whose arrays have the same shapes.
nb::tuple Merge(const std::vector<std::pair<PartNumbers, PartNumbers>>& parts,
                const nb::tuple& shape) {
  const nb::tuple results = nb::make_tuple(shape[0], shape[1]);
  const Numbers out(nb::none(), "out", shape);
  const Numbers sums(nb::none(), "log_sum_exp", results);
  std::vector<AttentionPart> list;
  for (const auto& [of, sum] : parts) {
    list.push_back({.out = of.data(), .log_sum_exp = sum.data()});
  }
  const auto count =
      nb::cast<std::int64_t>(shape[0]) * nb::cast<std::int64_t>(shape[1]);
  Check(MergeAttention(list, nb::cast<int>(shape[2]), count,
                       {.out = out.data(), .log_sum_exp = sums.data()}));
  return nb::make_tuple(out.array(), sums.array());
}

}  // namespace

Attention& AttentionOf(nb::handle twin) {
  return nb::cast<PyAttention&>(twin).attention();
}

// The signatures are those of kvtwin._attention, which converts the arguments.
void BindAttention(nb::module_& m) {
  nb::class_<PyAttention>(m, "AttentionTwin")
      .def(nb::init<std::string>(), nb::arg("twin"))
      .def("plan", &PyAttention::Plan, nb::arg("mask").none(),
           nb::arg("rows").none(), nb::arg("first_row"),
           nb::sig("def plan(self, mask: typing.Any, rows: int | None, "
                   "first_row: int) -> None"))
      .def("plan_table", &PyAttention::PlanTable, nb::arg("blocks"),
           nb::arg("lengths"), nb::arg("query_rows"), nb::arg("block_size"),
           nb::arg("window"), nb::arg("sees_all"),
           nb::sig("def plan_table(self, blocks: typing.Any, lengths: "
                   "typing.Any, query_rows: typing.Any, block_size: int, "
                   "window: int, sees_all: bool) -> None"))
      .def(
          "attend",
          [](PyAttention& self, nb::handle query, nb::handle key,
             nb::handle value, bool blocks, const std::string& layout,
             const std::string& dtype, const std::string& v_dtype, float scale,
             float soft_cap, std::optional<Sinks> sinks, int splits,
             bool bf16_products, nb::object out) {
            const Kv kv(key, value, dtype, v_dtype);
            const PyOptions options{scale,  soft_cap,      std::move(sinks),
                                    splits, bf16_products, std::move(out)};
            if (blocks) {
              return self.AttendBlocks(
                  query, kv,
                  Named<PagedLayout>("layout", layout, kPagedLayoutNames),
                  options);
            }
            return self.Attend(
                query, kv, Named<VLayout>("v_layout", layout, kVLayoutNames),
                options);
          },
          nb::arg("query"), nb::arg("key").none(), nb::arg("value").none(),
          nb::arg("blocks"), nb::arg("layout"), nb::arg("dtype"),
          nb::arg("v_dtype"), nb::arg("scale"), nb::arg("soft_cap"),
          nb::arg("sinks").none(), nb::arg("splits"), nb::arg("bf16_products"),
          nb::arg("out").none(),
          nb::sig("def attend(self, query: typing.Any, key: typing.Any, value: "
                  "typing.Any, blocks: bool, layout: str, dtype: str, v_dtype: "
                  "str, scale: float, soft_cap: float, sinks: typing.Any, "
                  "splits: int, bf16_products: bool, out: typing.Any) -> "
                  "tuple[kvtwin.Float32Array, kvtwin.Float32Array]"));
  m.def("merge_attention", &Merge, nb::arg("parts"), nb::arg("shape"),
        nb::sig("def merge_attention(parts: typing.Any, shape: tuple[int, ...])"
                " -> tuple[kvtwin.Float32Array, kvtwin.Float32Array]"));
}

}  // namespace kvtwin::python
