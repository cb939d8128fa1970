#include "props/history/knobs.h"

#include <fmt/format.h>

#include <bit>

#include "core/index.h"
#include "core/names.h"
#include "props/history/line_reader.h"

namespace kvtwin::props {
namespace {

// A knob that is one value of type T, in each of the functions below: `field`
// returns a reference to it in a Setup, `parse` reads it, `name` writes it.
template <class T, class Field>
Knob ValueKnob(std::string_view key, KnobGroup group, Field field,
               T (*parse)(std::string_view), std::string (*name)(const T&),
               const std::vector<T>& plainer) {
  Knob knob = {.key = key, .group = group};
  knob.text = [=](const Setup& setup) {
    static const Setup kDefaults;
    const T& value = field(setup);
    return value == field(kDefaults) ? "" : name(value);
  };
  knob.read = [=](std::string_view text, Setup& setup) {
    field(setup) = parse(text);
  };
  for (const T& value : plainer) {
    knob.plainer.emplace_back([=](Setup& setup) { field(setup) = value; });
  }
  return knob;
}

// A number; `counts`: it adds to the cost of a history.
template <class Field>
Knob NumberKnob(std::string_view key, KnobGroup group, Field field,
                const std::vector<int>& plainer, bool counts,
                std::function<int(const Pick&)> draw,
                std::function<void(const Abilities&, int&)> fit) {
  Knob knob = ValueKnob<int>(
      key, group, field, &ReadSize,
      +[](const int& value) { return fmt::format("{}", value); }, plainer);
  if (counts) knob.numbers = [=](const Setup& setup) { return field(setup); };
  knob.draw = [=](const Pick& pick, Setup& setup) {
    field(setup) = draw(pick);
  };
  knob.fit = [=](const Abilities& abilities, Setup& setup) {
    fit(abilities, field(setup));
  };
  return knob;
}

// A flag that is drawn with a chance of `percent`.
Knob FlagKnob(std::string_view key, KnobGroup group, bool Setup::*flag,
              int percent, std::function<void(const Abilities&, bool&)> fit) {
  Knob knob = ValueKnob<bool>(
      key, group, [=](auto& setup) -> auto& { return setup.*flag; },
      +[](std::string_view text) { return ReadSize(text) != 0; },
      +[](const bool&) { return std::string("1"); }, {false});
  knob.draw = [=](const Pick& pick, Setup& setup) {
    setup.*flag = Chance(pick, percent);
  };
  knob.fit = [=](const Abilities& abilities, Setup& setup) {
    fit(abilities, setup.*flag);
  };
  return knob;
}

DType ReadMaskDType(std::string_view name) {
  return ReadDType(name, kMaskDTypes, "masks");
}

std::string NameOf(const DType& dtype) { return std::string(DTypeName(dtype)); }

DType DrawRowDType(const Pick& pick) {
  return kRowDTypes.at(AsSize(pick(0, Size(kRowDTypes) - 1)));
}

// One of the two knobs of V's layout: 1 for `layout`.
Knob LayoutKnob(std::string_view key, VLayout layout) {
  Knob knob = {.key = key, .group = KnobGroup::kStorage};
  knob.text = [=](const Setup& setup) {
    return setup.config.v_layout == layout ? "1" : "";
  };
  knob.read = [=](std::string_view text, Setup& setup) {
    if (ReadSize(text) == 0) return;
    if (setup.config.v_layout != VLayout::kPlain) {
      throw BadLine{text, "V is permuted or tiled, not both"};
    }
    setup.config.v_layout = layout;
  };
  knob.plainer = {
      [](Setup& setup) { setup.config.v_layout = VLayout::kPlain; }};
  return knob;
}

Knob PermutedKnob() {
  Knob knob = LayoutKnob("permuted", VLayout::kPermuted);
  // Draws and fits both knobs.
  knob.draw = [](const Pick& pick, Setup& setup) {
    setup.config.v_layout =
        OneOf(pick, {VLayout::kPlain, VLayout::kPlain, VLayout::kPermuted,
                     VLayout::kPermuted, VLayout::kTiled});
  };
  knob.fit = [](const Abilities& able, Setup& setup) {
    // Tiled V needs a large padding.
    const bool tiles = able.max_padding == 0 || able.max_padding >= kTileCells;
    VLayout& layout = setup.config.v_layout;
    layout = Nearest(
        tiles ? able.v_layouts : able.v_layouts & ~(1U << KVTWIN_V_TILED),
        layout, 3);
  };
  return knob;
}

Knob MaskKnob() {
  Knob knob = ValueKnob<DType>(
      "mask", KnobGroup::kStorage,
      [](auto& setup) -> auto& { return setup.config.mask_dtype; },
      &ReadMaskDType, &NameOf, {DType::kF32});
  knob.draw = [](const Pick& pick, Setup& setup) {
    setup.config.mask_dtype =
        OneOf(pick, {DType::kF32, DType::kF32, DType::kF16, DType::kBF16,
                     DType::kBits, DType::kBits});
  };
  knob.fit = [](const Abilities& able, Setup& setup) {
    DType& dtype = setup.config.mask_dtype;
    dtype = Nearest(able.mask_dtypes, dtype, 7);
  };
  return knob;
}

Knob DTypeKnob() {
  Knob knob =
      ValueKnob<DType>("dtype", KnobGroup::kStorage,
                       [](auto& setup) -> auto& { return setup.init.dtype; },
                       &ReadRowDType, &NameOf, {DType::kF32});
  knob.draw = [](const Pick& pick, Setup& setup) {
    setup.init.dtype = Chance(pick, 40) ? DType::kF32 : DrawRowDType(pick);
  };
  knob.fit = [](const Abilities& able, Setup& setup) {
    setup.init.dtype = Nearest(able.dtypes, setup.init.dtype, 6);
  };
  return knob;
}

Knob VDTypeKnob() {
  using Optional = std::optional<DType>;
  Knob knob = ValueKnob<Optional>(
      "vdtype", KnobGroup::kStorage,
      [](auto& setup) -> auto& { return setup.config.v_dtype; },
      +[](std::string_view text) { return Optional(ReadRowDType(text)); },
      +[](const Optional& dtype) { return NameOf(*dtype); }, {std::nullopt});
  knob.draw = [](const Pick& pick, Setup& setup) {
    if (Chance(pick, 20)) setup.config.v_dtype = DrawRowDType(pick);
  };
  knob.fit = [](const Abilities& able, Setup& setup) {
    Optional& dtype = setup.config.v_dtype;
    const bool may = able.Can(KVTWIN_CAN_MIX_DTYPES);
    if (dtype && !(may && HasBit(able.dtypes, *dtype))) dtype.reset();
  };
  return knob;
}

RowDims ReadDims(std::string_view text) {
  LineReader reader(text);
  RowDims rows;
  rows.k_head_dim = reader.Number();
  reader.Expect(",");
  rows.kv_heads = reader.Number();
  reader.Expect(",");
  rows.v_head_dim = reader.Number();
  reader.ExpectEnd();
  for (const int dim : {rows.k_head_dim, rows.kv_heads, rows.v_head_dim}) {
    if (dim < 1 || dim > 4096) {
      throw BadLine{text, fmt::format("{} is not in 1 to 4096", dim)};
    }
  }
  return rows;
}

Knob DimsKnob() {
  std::vector<RowDims> plainer = {Setup().rows};
  for (const int v_head_dim : {1, 2, 3}) {
    for (const int kv_heads : {1, 2}) {
      for (const int k_head_dim : {1, 2, 3, 4}) {
        plainer.push_back({k_head_dim, kv_heads, v_head_dim});
      }
    }
  }
  Knob knob = ValueKnob<RowDims>(
      "dims", KnobGroup::kSizes,
      [](auto& setup) -> auto& { return setup.rows; }, &ReadDims,
      +[](const RowDims& rows) {
        return fmt::format("{},{},{}", rows.k_head_dim, rows.kv_heads,
                           rows.v_head_dim);
      },
      plainer);
  // Most rows are tiny; a few are wider than a vector, have many heads, or
  // heads as wide as those of models: K of latent attention has 576 elements,
  // V 512. Each size takes as many draws.
  knob.draw = [](const Pick& pick, Setup& setup) {
    const int size = pick(0, 99);
    if (size == 99) {
      const int wide = OneOf(pick, {64, 80, 96, 128, 128, 192, 256, 576});
      const int usual = wide == 576 ? 512 : wide;
      setup.rows.k_head_dim = wide;
      setup.rows.kv_heads = pick(1, 2);
      setup.rows.v_head_dim =
          OneOf(pick, {1, 64, 72, 128, usual, usual, usual});
      return;
    }
    const RowDims most = size < 92   ? RowDims{4, 2, 3}
                         : size < 97 ? RowDims{16, 8, 3}
                         : size < 98 ? RowDims{40, 3, 40}
                                     : RowDims{4, 16, 4};
    setup.rows.k_head_dim = pick(1, most.k_head_dim);
    setup.rows.kv_heads = pick(size == 98 ? 9 : 1, most.kv_heads);
    setup.rows.v_head_dim = pick(1, most.v_head_dim);
  };
  knob.numbers = [](const Setup& setup) {
    const RowDims& rows = setup.rows;
    return rows.k_head_dim + rows.kv_heads + rows.v_head_dim;
  };
  return knob;
}

// The search spreads the ids of some histories (SpreadIds).
Knob IdStepKnob() {
  Knob knob = ValueKnob<int>(
      "idstep", KnobGroup::kClient,
      [](auto& setup) -> auto& { return setup.id_step; },
      +[](std::string_view text) {
        const int step = ReadSize(text);
        if (step < 1) throw BadLine{text, "ids are at least 1 apart"};
        return step;
      },
      +[](const int& step) { return fmt::format("{}", step); },
      {1, 4, 64, 256, 1024, 65536});
  knob.numbers = [](const Setup& setup) {
    return std::bit_width(AsSize(setup.id_step)) - 1;
  };
  knob.fit = [](const Abilities& able, Setup& setup) {
    if (!able.Can(KVTWIN_CAN_ANY_SEQUENCE)) setup.id_step = 1;
  };
  return knob;
}

Knob SoftCapKnob() {
  return NumberKnob(
      "softcap", KnobGroup::kAttention,
      [](auto& setup) -> auto& { return setup.soft_cap; }, {0, 4},
      /*counts=*/true,
      [](const Pick& pick) {  // A smaller cap makes all tokens alike.
        return Chance(pick, 25) ? OneOf(pick, {4, 4, 8, 30}) : 0;
      },
      [](const Abilities& able, int& cap) {
        if (!able.Can(KVTWIN_CAN_SOFT_CAP)) cap = 0;
      });
}

Knob GroupKnob() {
  return NumberKnob(
      "group", KnobGroup::kAttention,
      [](auto& setup) -> auto& { return setup.group; }, {0, 3},
      /*counts=*/true,
      [](const Pick& pick) {  // Models have these numbers.
        return Chance(pick, 30) ? OneOf(pick, {3, 5, 6, 7, 8, 12, 16}) : 0;
      },
      [](const Abilities&, int&) {});
}

std::vector<Knob> MakeKnobs() {
  return {
      NumberKnob(
          "pad", KnobGroup::kSizes,
          [](auto& setup) -> auto& { return setup.config.cache_padding; },
          {1, 2, 3}, /*counts=*/true,
          [](const Pick& pick) {
            return OneOf(pick, {1, 1, 1, 2, 3, 4, 8});
          },
          [](const Abilities& able, int& padding) {
            LimitTo(able.max_padding, padding);
          }),
      NumberKnob(
          "maskpad", KnobGroup::kSizes,
          [](auto& setup) -> auto& { return setup.config.mask_batch_padding; },
          {1, 2, 3}, /*counts=*/true,
          [](const Pick& pick) {
            return OneOf(pick, {1, 1, 1, 2, 4});
          },
          [](const Abilities& able, int& padding) {
            LimitTo(able.max_mask_padding > 0 ? able.max_mask_padding
                                              : able.max_padding,
                    padding);
          }),
      PermutedKnob(),
      LayoutKnob("tiled", VLayout::kTiled),
      MaskKnob(),
      DTypeKnob(),
      VDTypeKnob(),
      DimsKnob(),
      NumberKnob(
          "layers", KnobGroup::kSizes,
          [](auto& setup) -> auto& { return setup.layers; }, {1, 2},
          /*counts=*/true,
          [](const Pick& pick) {
            return OneOf(pick, {1, 1, 1, 1, 2, 2, 3});
          },
          [](const Abilities& able, int& layers) {
            LimitTo(able.max_layers, layers);
          }),
      FlagKnob("legal", KnobGroup::kClient, &Setup::legal, 35,
               [](const Abilities& able, bool& legal) {
                 legal = legal || able.OnlyGoesOn();
               }),
      FlagKnob("strided", KnobGroup::kClient, &Setup::strided, 15,
               [](const Abilities& able, bool& strided) {
                 strided = strided && able.Can(KVTWIN_CAN_TAKE_STRIDED);
               }),
      NumberKnob(
          "firstid", KnobGroup::kClient,
          [](auto& setup) -> auto& { return setup.first_id; }, {0, 4, 64, 1024},
          /*counts=*/false,
          [](const Pick& pick) {  // Ids go up to the largest possible id.
            return Chance(pick, 10) ? OneOf(pick, {1000, 0x7FFFFFFF - 40}) : 0;
          },
          [](const Abilities& able, int& id) {
            if (!able.Can(KVTWIN_CAN_ANY_SEQUENCE)) id = 0;
          }),
      IdStepKnob(),
      SoftCapKnob(),
      FlagKnob("sinks", KnobGroup::kAttention, &Setup::sinks, 25,
               [](const Abilities& able, bool& sinks) {
                 sinks = sinks && able.Can(KVTWIN_CAN_SINKS);
               }),
      GroupKnob(),
  };
}

}  // namespace

const std::vector<Knob>& Knobs() {
  static const std::vector<Knob> knobs = MakeKnobs();
  return knobs;
}

void DrawKnobs(const Pick& pick, KnobGroup group, Setup& setup) {
  for (const Knob& knob : Knobs()) {
    if (knob.group == group && knob.draw) knob.draw(pick, setup);
  }
}

}  // namespace kvtwin::props
