#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bindings.h"
#include "core/names.h"
#include "core/refusals.h"

namespace kvtwin::python {
namespace {

constexpr std::array<std::string_view, 2> kPlacements = {"contiguous",
                                                         "scatter"};

template <class Enum, std::size_t n>
Enum Name(nb::handle setup, const char* field,
          const std::array<std::string_view, n>& names) {
  const nb::object value = setup.attr(field);
  if (nb::isinstance<nb::str>(value)) {
    const auto found = FromName<Enum>(names, TextOf(value));
    if (found) return *found;
  }
  Wrong(field, value, fmt::format("one of {}", fmt::join(names, ", ")));
}

template <class T>
T Field(nb::handle setup, const char* field, std::string_view expected) {
  const nb::object value = setup.attr(field);
  T made{};
  if (!nb::try_cast(value, made)) Wrong(field, value, expected);
  return made;
}

int Int(nb::handle setup, const char* field) {
  return Field<std::int32_t>(setup, field, "an int of 32 bits");
}

double Number(nb::handle setup, const char* field) {
  return Field<double>(setup, field, "a number");
}

bool Flag(nb::handle setup, const char* field) {
  return Field<bool>(setup, field, "True or False");
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
  shift.rope.pairing =
      Flag(rope, "halves") ? Rope::Pairing::kHalves : Rope::Pairing::kAdjacent;
  shift.rope.base = Number(rope, "base");
  shift.rope.scale = Number(rope, "scale");
  shift.rope.dims = Int(rope, "dims");
  return shift;
}

CacheSpec SpecOf(nb::handle setup, bool is_inner) {
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
  // The recursion ends here; deeper setups could overflow the stack.
  if (is_inner) Raise(Invalid("caches: a wrapper holds another wrapper"));
  for (nb::handle inner : setup.attr("caches")) {
    spec.caches.push_back(SpecOf(inner, /*is_inner=*/true));
  }
  return spec;
}

PagedSpec PoolSpecOf(nb::handle setup, bool is_group) {
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
      .states = Flag(setup, "states")};
  for (nb::handle group : setup.attr("groups")) {
    if (is_group) Raise(Invalid("groups: a group has groups"));
    spec.groups.push_back(PoolSpecOf(group, /*is_group=*/true));
  }
  return spec;
}

}  // namespace

Making MakingOf(nb::handle setup) {
  Making making{
      .spec = SpecOf(setup, /*is_inner=*/false), .config = {}, .init = {}};
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
  return PoolSpecOf(setup, /*is_group=*/false);
}

}  // namespace kvtwin::python
