#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "bindings.h"
#include "core/names.h"

namespace kvtwin::python {
namespace {

constexpr std::array<std::string_view, 2> kPlacements = {"contiguous",
                                                         "scatter"};

[[noreturn]] void Wrong(const char* field, nb::handle value,
                        std::string_view expected) {
  Raise({StatusCode::kInvalidArgument,
         fmt::format("{} is {}, it must be {}", field, nb::repr(value).c_str(),
                     expected)});
}

template <class Enum, std::size_t n>
Enum Name(nb::handle setup, const char* field,
          const std::array<std::string_view, n>& names) {
  const nb::object value = setup.attr(field);
  if (nb::isinstance<nb::str>(value)) {
    const auto found =
        FromName<Enum>(names, nb::borrow<nb::str>(value).c_str());
    if (found) return *found;
  }
  Wrong(field, value, fmt::format("one of {}", fmt::join(names, ", ")));
}

int Int(nb::handle setup, const char* field) {
  const nb::object value = setup.attr(field);
  std::int32_t number = 0;
  if (!nb::try_cast(value, number)) Wrong(field, value, "an int of 32 bits");
  return number;
}

std::optional<std::int32_t> OptionalInt(nb::handle setup, const char* field) {
  if (setup.attr(field).is_none()) return std::nullopt;
  return Int(setup, field);
}

Shift ShiftOf(nb::handle setup) {
  Shift shift{.kind = Name<ShiftKind>(setup, "shift", kShiftNames),
              .rope = {},
              .fn = nullptr};
  const nb::object rope = setup.attr("rope");
  shift.rope.pairing = nb::cast<bool>(rope.attr("halves"))
                           ? Rope::Pairing::kHalves
                           : Rope::Pairing::kAdjacent;
  shift.rope.base = nb::cast<double>(rope.attr("base"));
  shift.rope.scale = nb::cast<double>(rope.attr("scale"));
  shift.rope.dims = Int(rope, "dims");
  return shift;
}

CacheSpec SpecOf(nb::handle setup) {
  CacheSpec spec{.kind = Name<Kind>(setup, "kind", kKindNames),
                 .placement = Name<Placement>(setup, "placement", kPlacements),
                 .window = OptionalInt(setup, "window"),
                 .memory = OptionalInt(setup, "memory"),
                 .chunk = Int(setup, "chunk"),
                 .checkpoint_every = Int(setup, "checkpoint_every"),
                 .checkpoints = Int(setup, "checkpoints"),
                 .pins = Int(setup, "pins"),
                 .drafts = Int(setup, "drafts"),
                 .shift = ShiftOf(setup),
                 .caches = {}};
  if (!IsWrapper(spec.kind)) return spec;
  for (nb::handle inner : setup.attr("caches")) {
    spec.caches.push_back(SpecOf(inner));
  }
  return spec;
}

}  // namespace

Making MakingOf(nb::handle setup) {
  Making making{.spec = SpecOf(setup), .config = {}, .init = {}};
  CacheConfig& config = making.config;
  config.cache_padding = Int(setup, "cache_padding");
  config.mask_batch_padding = Int(setup, "mask_batch_padding");
  config.v_layout = Name<VLayout>(setup, "v_layout", kVLayoutNames);
  config.mask_dtype = Name<DType>(setup, "mask_dtype", kDTypeNames);
  if (!setup.attr("v_dtype").is_none()) {
    config.v_dtype = Name<DType>(setup, "v_dtype", kDTypeNames);
  }
  making.init = {.dtype = Name<DType>(setup, "dtype", kDTypeNames),
                 .max_sequences = Int(setup, "max_sequences"),
                 .capacity = Int(setup, "capacity"),
                 .max_batch = Int(setup, "max_batch")};
  return making;
}

PagedSpec PagedSpecOf(nb::handle setup) {
  PagedSpec spec = {
      .block_size = Int(setup, "block_size"),
      .blocks = Int(setup, "blocks"),
      .max_seq_len = Int(setup, "max_seq_len"),
      .layers = Int(setup, "layers"),
      .kv_heads = Int(setup, "kv_heads"),
      .k_head_dim = Int(setup, "k_head_dim"),
      .v_head_dim = Int(setup, "v_head_dim"),
      .dtype = Name<DType>(setup, "dtype", kDTypeNames),
      .v_dtype = Name<DType>(setup, "v_dtype", kDTypeNames),
      .layout = Name<PagedLayout>(setup, "layout", kPagedLayoutNames),
      .window = OptionalInt(setup, "window"),
      .states = nb::cast<bool>(setup.attr("states"))};
  for (nb::handle group : setup.attr("groups")) {
    spec.groups.push_back(PagedSpecOf(group));
  }
  return spec;
}

}  // namespace kvtwin::python
