#include "backend.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "props/backend/c_conversions.h"
#include "props/compare/failure.h"
#include "tensor.h"

namespace kvtwin::python {

thread_local Backend* Backend::current_ = nullptr;

// The object that `init` returns as the cache.
struct Backend::Instance {
  nb::object cache;  // A kvtwin._live.Instance.
  std::string message;
};

namespace {

std::size_t Count(std::int32_t count) { return AsSize(std::max(count, 0)); }

// No Put of a history has more elements.
constexpr double kElementsMax = 1 << 26;

using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

template <std::size_t n>
nb::str Named(const std::array<std::string_view, n>& names, int at) {
  const std::string_view name = names.at(AsSize(at));
  return nb::str(name.data(), name.size());
}

nb::dict FieldsOf(const kvtwin_cache_params& cache) {
  nb::dict rope;
  rope["halves"] = cache.shift.rope_halves != 0;
  rope["base"] = cache.shift.rope_base;
  rope["scale"] = cache.shift.rope_scale;
  rope["dims"] = cache.shift.rope_dims;
  nb::dict fields;
  const auto optional = [](std::int32_t number) {
    return number < 0 ? nb::object(nb::none()) : nb::object(nb::int_(number));
  };
  fields["kind"] = Named(kKindNames, cache.kind);
  fields["placement"] =
      cache.placement == KVTWIN_SCATTER ? "scatter" : "contiguous";
  fields["window"] = optional(cache.window);
  fields["memory"] = optional(cache.memory);
  fields["chunk"] = cache.chunk;
  fields["checkpoint_every"] = cache.checkpoint_every;
  fields["checkpoints"] = cache.checkpoints;
  fields["pins"] = cache.pins;
  fields["drafts"] = cache.drafts;
  fields["shift"] = Named(kShiftNames, cache.shift.kind);
  fields["rope"] = rope;
  fields["cache_padding"] = cache.cache_padding;
  fields["mask_batch_padding"] = cache.mask_batch_padding;
  fields["v_layout"] = Named(kVLayoutNames, cache.v_layout);
  fields["mask_dtype"] = Named(kDTypeNames, cache.mask_dtype);
  fields["dtype"] = Named(kDTypeNames, cache.dtype);
  fields["v_dtype"] = Named(kDTypeNames, cache.v_dtype);
  fields["max_sequences"] = cache.max_sequences;
  fields["capacity"] = cache.capacity;
  fields["max_batch"] = cache.max_batch;
  return fields;
}

}  // namespace

nb::list Ints(const std::int32_t* numbers, std::size_t count) {
  nb::list list;
  for (std::size_t i = 0; i < count; ++i) list.append(numbers[i]);
  return list;
}

nb::object Rows(const kvtwin_tensor& rows) {
  if (rows.data == nullptr) return nb::none();  // Misuse: no data.
  TensorView view{.data = rows.data,
                  .dtype = static_cast<DType>(rows.dtype),
                  .shape = {},
                  .stride = {}};
  std::ranges::copy(rows.shape, view.shape.begin());
  std::ranges::copy(rows.stride, view.stride.begin());
  double elements = 1;
  for (const std::int64_t extent : view.shape) {
    elements *= static_cast<double>(extent);
  }
  if (elements > kElementsMax) return nb::none();  // Too large for an array.
  // Misuse puts bits, which would look like rows of f8 in an array.
  if (view.dtype == DType::kBits) return nb::none();
  const auto copy = std::make_shared<DenseTensor>(CopyOf(view, view.dtype));
  return NumpyView(copy->view(), view.shape[3] > 1 ? 4 : 3, copy);
}

void Point(nb::handle array, kvtwin_tensor& tensor) {
  static const std::int64_t nothing = 0;
  // A conversion would make a copy, which ends with this function.
  const auto bytes = nb::cast<Bytes>(array, /*convert=*/false);
  tensor.data = bytes.size() == 0 ? &nothing : bytes.data();
  std::ranges::fill(tensor.stride, 0);
}

namespace {

// Sets the dtype and shape of an encoder's tensor, which may be anything.
void Declare(nb::handle array, int dtype, kvtwin_tensor& tensor) {
  const auto bytes = nb::cast<Bytes>(array);
  tensor.dtype = static_cast<kvtwin_dtype>(dtype);
  for (std::size_t i = 0; i < 4; ++i) {
    tensor.shape[i] =
        i < bytes.ndim()
            ? static_cast<std::int64_t>(bytes.shape(bytes.ndim() - 1 - i))
            : 1;
  }
  const auto stored = static_cast<DType>(dtype);
  if (!IsBlockDType(stored)) return;
  tensor.shape[0] =
      tensor.shape[0] / RunBytes(stored, kBlockElements) * kBlockElements;
}

}  // namespace

Backend::Backend(nb::object adapter) : adapter_(std::move(adapter)) {
  if (current_ != nullptr) {
    Raise({StatusCode::kFailedPrecondition,
           "a backend cannot be driven from within another one"});
  }
  table_.size = sizeof(table_);
  table_.describe = [](kvtwin_description_v1* out) {
    return current_->Describe(out);
  };
  table_.init = [](const kvtwin_setup_v1* setup, void** cache) {
    return current_->Init(setup, cache);
  };
  table_.close = [](void* cache) {
    const std::unique_ptr<Instance> instance(static_cast<Instance*>(cache));
    if (const auto failure = FailureOfClose(instance->cache)) throw *failure;
  };
  table_.start_forward = [](void* cache, const kvtwin_batch* batch,
                            int reserve) {
    const auto start = [&](Instance& instance) {
      instance.cache.attr("start_forward")(
          Ints(batch->positions, Count(batch->tokens)),
          Ints(batch->sequences, Count(batch->tokens)),
          Ints(batch->multimodal, Count(batch->multimodal_count)),
          Ints(batch->parents,
               batch->parents == nullptr ? 0 : Count(batch->tokens)),
          reserve != 0);
    };
    return On(cache, start, Refusals::kInvalid);
  };
  table_.put = [](void* cache, std::int32_t layer, const kvtwin_tensor* key,
                  const kvtwin_tensor* value) {
    return On(cache, [&](Instance& instance) {
      instance.cache.attr("put")(layer, Rows(*key), Rows(*value));
    });
  };
  table_.message = [](void* cache) {
    return cache == nullptr ? ""
                            : static_cast<Instance*>(cache)->message.c_str();
  };
  FillOptional(adapter_, table_);
  current_ = this;
}

Backend::~Backend() { current_ = nullptr; }

void Backend::FillOptional(nb::handle adapter, kvtwin_backend_v1& table) {
  const nb::object methods = adapter.attr("has");
  const auto has = [&](const char* name) {
    return nb::cast<bool>(methods.attr("__contains__")(name));
  };
  if (has("get")) FillGet(table);
  if (has("attend")) FillAttend(table);
  if (has("remove")) {
    table.remove = [](void* cache, std::int32_t sequence, std::int32_t begin,
                      std::int32_t end) {
      return On(cache, [&](Instance& instance) {
        instance.cache.attr("remove")(sequence, begin, end);
      });
    };
  }
  if (has("copy_prefix")) {
    table.copy_prefix = [](void* cache, std::int32_t source,
                           std::int32_t target, std::int32_t length) {
      return On(cache, [&](Instance& instance) {
        instance.cache.attr("copy_prefix")(source, target, length);
      });
    };
  }
  if (has("can_resume")) {
    table.can_resume = [](void* cache, std::int32_t sequence,
                          std::int32_t position, std::int32_t* yes) {
      return On(cache, [&](Instance& instance) {
        *yes = nb::cast<bool>(
            instance.cache.attr("can_resume")(sequence, position));
      });
    };
  }
  if (has("shift")) {
    table.shift = [](void* cache, std::int32_t sequence, std::int32_t begin,
                     std::int32_t end, std::int32_t delta) {
      return On(cache, [&](Instance& instance) {
        instance.cache.attr("shift")(sequence, begin, end, delta);
      });
    };
  }
  if (has("set_causal")) {
    table.set_causal = [](void* cache, const std::int32_t* except,
                          std::int32_t count) {
      return On(cache, [&](Instance& instance) {
        instance.cache.attr("set_causal")(Ints(except, Count(count)));
      });
    };
  }
  if (has("set_layer_type")) {
    table.set_layer_type = [](void* cache, std::int32_t type) {
      return On(cache, [&](Instance& instance) {
        instance.cache.attr("set_layer_type")(type);
      });
    };
  }
  if (has("encoder_cached")) {
    table.encoder_cached = [](void* cache, std::int32_t* yes) {
      return On(cache, [&](Instance& instance) {
        *yes = nb::cast<bool>(instance.cache.attr("encoder_cached")());
      });
    };
  }
  if (has("commit")) FillCommit(table);
  if (has("find_prefix")) FillFindPrefix(table);
  if (has("checkpoint")) FillCheckpoint(table);
  if (has("cells")) FillCells(table);
}

void Backend::FillCommit(kvtwin_backend_v1& table) {
  table.commit = [](void* cache, std::int32_t sequence,
                    const std::int32_t* path, std::int32_t count) {
    return On(cache, [&](Instance& instance) {
      instance.cache.attr("commit")(sequence, Ints(path, Count(count)));
    });
  };
}

void Backend::FillCheckpoint(kvtwin_backend_v1& table) {
  table.checkpoint = [](void* cache, std::int32_t sequence) {
    return On(cache, [&](Instance& instance) {
      instance.cache.attr("checkpoint")(sequence);
    });
  };
}

void Backend::FillFindPrefix(kvtwin_backend_v1& table) {
  table.find_prefix = [](void* cache, std::int32_t sequence,
                         const std::int32_t* tokens, std::int32_t count,
                         std::int32_t* length) {
    return On(cache, [&](Instance& instance) {
      *length = nb::cast<std::int32_t>(instance.cache.attr("find_prefix")(
          sequence, Ints(tokens, Count(count))));
    });
  };
}

void Backend::FillGet(kvtwin_backend_v1& table) {
  table.get = [](void* cache, std::int32_t layer, kvtwin_view* view) {
    return On(cache, [&](Instance& instance) { Get(instance, layer, view); });
  };
}

void Backend::FillAttend(kvtwin_backend_v1& table) {
  table.attend = [](void* cache, std::int32_t layer, const kvtwin_tensor* query,
                    float* out) {
    return On(cache, [&](Instance& instance) {
      const nb::object answer =
          instance.cache.attr("attend")(layer, Rows(*query));
      const auto numbers = nb::cast<Numbers>(answer);
      std::copy_n(numbers.data(), numbers.size(), out);
    });
  };
}

void Backend::FillCells(kvtwin_backend_v1& table) {
  table.cells = [](void* cache, kvtwin_cell* cells, std::size_t room,
                   std::size_t* count, std::int32_t* batch,
                   std::size_t batch_room, std::size_t* batch_count,
                   std::int32_t* total) {
    return On(cache, [&](Instance& instance) {
      using Entry = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
      const auto [entries, of_batch, all] = nb::cast<
          std::tuple<std::vector<Entry>, std::vector<int>, std::int32_t>>(
          instance.cache.attr("cells")());
      *count = entries.size();
      *batch_count = of_batch.size();
      *total = all;
      for (std::size_t i = 0; i < std::min(room, entries.size()); ++i) {
        const auto& [cell, position, sequence] = entries[i];
        cells[i] = {cell, position, sequence};
      }
      std::copy_n(of_batch.begin(), std::min(batch_room, of_batch.size()),
                  batch);
    });
  };
}

template <class Fn>
int Backend::On(void* cache, const Fn& fn, Refusals refusals) {
  auto& instance = *static_cast<Instance*>(cache);
  return current_->Guarded(instance.message, refusals, [&] { fn(instance); });
}

template <class Fn>
int Backend::Guarded(std::string& message, Refusals refusals, const Fn& fn) {
  if (nb::cast<bool>(adapter_.attr("refuses_misuse"))) {
    refusals = Refusals::kMisuse;
  }
  return kvtwin::python::Guarded(message, refusals, fn);
}

int StatusOf(nb::python_error& error, Refusals refusals, std::string& message) {
  const nb::module_ live = nb::module_::import_("kvtwin._live");
  if (!error.matches(PyExc_Exception) &&
      nb::cast<bool>(live.attr("ends_run")(error.value()))) {
    throw Interrupted{error};
  }
  const auto is = [&](nb::handle type) { return error.matches(type); };
  const auto refused = [&](int status) {
    message = TextOf(error.value());
    return status;
  };
  if (is(ErrorType("CacheFull"))) return refused(KVTWIN_CACHE_FULL);
  if (is(ErrorType("NotSupported"))) return refused(KVTWIN_NOT_SUPPORTED);
  if (is(ErrorType("SharedCells"))) return refused(KVTWIN_SHARED_CELLS);
  if (refusals == Refusals::kMisuse) {
    if (is(PyExc_ValueError)) return refused(KVTWIN_INVALID_ARGUMENT);
    if (is(PyExc_RuntimeError)) return refused(KVTWIN_FAILED_PRECONDITION);
  }
  message = TextOf(live.attr("story_of")(error.value()));
  // A ValueError may also be a bug of the class: then the story is needed.
  if (refusals == Refusals::kInvalid && is(PyExc_ValueError)) {
    return KVTWIN_INVALID_ARGUMENT;
  }
  return KVTWIN_INTERNAL;
}

Finding FindingOf(const props::Failure& failure, props::Level level) {
  return {std::string(props::LevelName(level)),
          failure.check,
          failure.history,
          failure.text,
          failure.report,
          failure.bucket,
          failure.rerun};
}

std::optional<props::Failure> FailureOfClose(nb::handle instance) {
  std::string message;
  try {
    if (Guarded(message, Refusals::kNone, [&] { instance.attr("close")(); }) ==
        KVTWIN_OK) {
      return std::nullopt;
    }
  } catch (Interrupted& interrupted) {  // Close may run during unwinding.
    if (interrupted.error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    } else {
      interrupted.error.discard_as_unraisable("close");
    }
    return std::nullopt;
  }
  props::Failure failure =
      props::MakeFailure("backend: error", "close fails: " + message);
  failure.function = "close";
  return failure;
}

int Backend::Describe(kvtwin_description_v1* out) {
  return Guarded(init_error_, Refusals::kNone, [&] {
    const nb::tuple said(adapter_.attr("describe")());
    name_ = TextOf(said[0]);
    profile_ = TextOf(said[1]);
    out->name = name_.c_str();
    out->profile = profile_.c_str();
    out->level = static_cast<kvtwin_level>(nb::cast<int>(said[2]));
    out->kinds = nb::cast<std::uint32_t>(said[3]);
    out->can = nb::cast<std::uint32_t>(said[4]);
    out->dtypes = nb::cast<std::uint32_t>(said[5]);
    out->v_layouts = nb::cast<std::uint32_t>(said[6]);
    out->shifts = nb::cast<std::uint32_t>(said[7]);
    out->max_sequences = nb::cast<std::int32_t>(said[8]);
    out->max_layers = nb::cast<std::int32_t>(said[9]);
    out->max_padding = nb::cast<std::int32_t>(said[10]);
    out->tolerance = nb::cast<double>(said[11]);
    out->cannot = nb::cast<std::uint32_t>(said[12]);
    out->placements = nb::cast<std::uint32_t>(said[13]);
    out->max_position = nb::cast<std::int32_t>(said[14]);
    out->max_mask_padding = nb::cast<std::int32_t>(said[15]);
    out->attend_dtype = static_cast<kvtwin_dtype>(nb::cast<int>(said[16]));
    out->max_query_heads = nb::cast<std::int32_t>(said[17]);
    out->attend_tolerance = nb::cast<double>(said[18]);
  });
}

int Backend::Init(const kvtwin_setup_v1* setup, void** cache) {
  std::string message;
  const int status = Guarded(message, Refusals::kInvalid, [&] {
    const auto fields_of = [&](const kvtwin_cache_params& params) {
      nb::dict fields = FieldsOf(params);
      fields["layers"] = setup->layers;
      fields["kv_heads"] = setup->kv_heads;
      fields["k_head_dim"] = setup->k_head_dim;
      fields["v_head_dim"] = setup->v_head_dim;
      return fields;
    };
    nb::dict fields = fields_of(*setup->cache);
    nb::list caches;
    const auto* part = reinterpret_cast<const char*>(setup->cache->caches);
    for (std::int32_t i = 0; i < setup->cache->cache_count; ++i) {
      const auto& params = *reinterpret_cast<const kvtwin_cache_params*>(part);
      caches.append(fields_of(params));
      part += params.size;
    }
    fields["caches"] = caches;
    fields["soft_cap"] = setup->soft_cap;
    fields["sinks"] = nb::tuple(nb::cast(
        std::vector<float>(setup->sinks, setup->sinks + setup->sink_count)));
    auto instance = std::make_unique<Instance>();
    instance->cache = adapter_.attr("init")(fields);
    *cache = instance.release();
    made_one_ = true;
  });
  if (!message.empty()) init_error_ = props::PrintableLines(message);
  return status;
}

void Backend::Get(Instance& instance, int layer, kvtwin_view* view) {
  const nb::tuple shown(instance.cache.attr("get")(layer, view->mask.shape[1]));
  view->first_cell = nb::cast<std::int32_t>(shown[3]);
  Point(shown[0], view->key);
  Point(shown[1], view->value);
  if (shown[2].is_none()) {
    const auto [k, v] = nb::cast<std::tuple<int, int>>(shown[4]);
    Declare(shown[0], k, view->key);
    Declare(shown[1], v, view->value);
    return;
  }
  Point(shown[2], view->mask);
  view->mask.shape[1] =
      nb::cast<std::int64_t>(shown[2].attr("shape")[nb::int_(0)]);
  view->columns = nb::cast<std::int32_t>(shown[0].attr("shape")[0]);
}

}  // namespace kvtwin::python
