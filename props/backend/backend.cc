#include "props/backend/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "props/backend/c_conversions.h"
#include "props/backend/pool_backend.h"

namespace kvtwin::props {
namespace {

// Errors: a function is missing that each backend has.
Status CheckTable(const kvtwin_backend_v1& table) {
  const std::array<std::pair<const char*, bool>, 6> needed = {
      {{"describe", table.describe != nullptr},
       {"init", table.init != nullptr},
       {"close", table.close != nullptr},
       {"start_forward", table.start_forward != nullptr},
       {"put", table.put != nullptr},
       {"get", table.get != nullptr || table.attend != nullptr}}};
  for (const auto& [name, there] : needed) {
    if (!there) return Invalid("backend has no {}", name);
  }
  return {};
}

// The description before the backend changes it.
kvtwin_description_v1 PlainDescription() {
  kvtwin_description_v1 plain = {};
  plain.size = sizeof(plain);
  plain.name = "backend";
  plain.profile = "ollama-0.15";
  plain.level = KVTWIN_VISIBILITY;
  plain.kinds = KVTWIN_HAS_CAUSAL;
  plain.dtypes = 1U << KVTWIN_F32;
  plain.v_layouts = 1U << KVTWIN_V_PLAIN;
  plain.shifts = 1U << KVTWIN_SHIFT_NONE;
  plain.mask_dtypes = 1U << KVTWIN_F32;
  plain.max_sequences = 1;
  plain.max_padding = 1;
  plain.tolerance = 0.01;
  return plain;
}

constexpr std::uint32_t kRowFlags = (1U << KVTWIN_BITS) - 1;

struct FlagField {
  std::string_view name;
  std::uint32_t flags;
  std::uint32_t known;
};

// Errors: a flag that this version does not know. A flag without meaning here
// may forbid a call or change a rule.
Status CheckFlags(std::span<const FlagField> fields) {
  for (const FlagField& field : fields) {
    if ((field.flags & ~field.known) == 0) continue;
    return Invalid(
        "{} of the backend's description is {:#x}, but the known flags are "
        "{:#x}",
        field.name, field.flags, field.known);
  }
  return {};
}

Status CheckFlags(const kvtwin_description_v1& said) {
  constexpr std::uint32_t kMasks = 1U << KVTWIN_F32 | 1U << KVTWIN_F16 |
                                   1U << KVTWIN_BF16 | 1U << KVTWIN_BITS;
  const std::array<FlagField, 8> fields = {
      {{"kinds", said.kinds, 2 * KVTWIN_HAS_HYBRID - 1},
       {"can", said.can, 2 * KVTWIN_CAN_REFUSE_FULL - 1},
       {"dtypes", said.dtypes, kRowFlags},
       {"v_layouts", said.v_layouts, (2U << KVTWIN_V_TILED) - 1},
       {"shifts", said.shifts, (1U << KVTWIN_SHIFT_CUSTOM) - 1},
       {"mask_dtypes", said.mask_dtypes, kMasks},
       {"cannot", said.cannot, 2 * KVTWIN_CANNOT_BOUND_MEMORY - 1},
       {"placements", said.placements, (2U << KVTWIN_SCATTER) - 1}}};
  return CheckFlags(fields);
}

// Errors: a number that is negative or not finite.
Status CheckNumbers(const kvtwin_description_v1& said) {
  const std::array<std::pair<const char*, std::int32_t>, 5> limits = {
      {{"max_sequences", said.max_sequences},
       {"max_layers", said.max_layers},
       {"max_padding", said.max_padding},
       {"max_position", said.max_position},
       {"max_mask_padding", said.max_mask_padding}}};
  for (const auto& [name, limit] : limits) {
    if (limit >= 0) continue;
    return Invalid(
        "{} of the backend's description is {}, it must not be negative", name,
        limit);
  }
  if (said.tolerance >= 0 && std::isfinite(said.tolerance)) return {};
  return Invalid(
      "tolerance of the backend's description is {}, it must be finite and not "
      "negative",
      said.tolerance);
}

// Errors: flags or numbers that describe no backend. The profile is read
// elsewhere.
Status CheckDescription(const kvtwin_description_v1& said) {
  const int level = RawEnum(said.level);
  if (level < KVTWIN_NUMERIC || level > KVTWIN_ATTENTION) {
    return Invalid("level of the backend's description is {}", level);
  }
  Status status = CheckFlags(said);
  if (!status.ok()) return status;
  // A wrapper and a hybrid need another kind to wrap.
  constexpr std::uint32_t kWrappers = KVTWIN_HAS_WRAPPER | KVTWIN_HAS_HYBRID;
  if ((said.kinds & ~kWrappers) == 0 || said.dtypes == 0 ||
      said.v_layouts == 0 || said.shifts == 0 || said.mask_dtypes == 0) {
    return Invalid(
        "the backend's description has no kind, dtype, V layout, shift or mask "
        "dtype");
  }
  return CheckNumbers(said);
}

// Errors: a level without the function that it needs; those of
// CheckAttendFields.
Status CheckAttend(const kvtwin_description_v1& said,
                   const kvtwin_backend_v1& table) {
  if (said.level == KVTWIN_ATTENTION && table.attend == nullptr) {
    return Invalid("the backend claims ATTENTION, but its table has no attend");
  }
  if (said.level != KVTWIN_ATTENTION && table.get == nullptr) {
    return Invalid(
        "the backend has no get: it can claim the level ATTENTION only");
  }
  return CheckAttendFields(said);
}

// Errors: an ability without the function, or the ability, that it needs.
Result<Abilities> AbilitiesOf(const kvtwin_description_v1& said,
                              const kvtwin_backend_v1& table) {
  std::uint32_t can = said.can;
  const bool removes_middle = (can & KVTWIN_CAN_REMOVE_MIDDLE) != 0;
  if (removes_middle) can |= KVTWIN_CAN_REMOVE_TAIL;
  if (table.remove == nullptr && (can & KVTWIN_CAN_REMOVE_TAIL) != 0) {
    return Invalid("the backend declares {}, but its table has no remove",
                   removes_middle ? "CAN_REMOVE_MIDDLE" : "CAN_REMOVE_TAIL");
  }
  if (table.copy_prefix == nullptr && (can & KVTWIN_CAN_COPY_PREFIX) != 0) {
    return Invalid(
        "the backend declares CAN_COPY_PREFIX, but its table has no "
        "copy_prefix");
  }
  if ((can & KVTWIN_CAN_SHARE) != 0 && (can & KVTWIN_CAN_COPY_PREFIX) == 0) {
    return Invalid("the backend declares CAN_SHARE, but not CAN_COPY_PREFIX");
  }
  constexpr std::uint32_t kAttends = KVTWIN_CAN_SOFT_CAP | KVTWIN_CAN_SINKS;
  if (table.attend == nullptr && (can & kAttends) != 0) {
    return Invalid(
        "the backend declares CAN_SOFT_CAP or CAN_SINKS, but its table has no "
        "attend");
  }
  if ((can & KVTWIN_CAN_DRAFT_TREES) != 0) can |= KVTWIN_CAN_DRAFT;
  if (table.commit == nullptr && (can & KVTWIN_CAN_DRAFT) != 0) {
    return Invalid(
        "the backend declares CAN_DRAFT, but its table has no commit");
  }
  if (table.find_prefix == nullptr && (can & KVTWIN_CAN_FIND_PREFIX) != 0) {
    return Invalid(
        "the backend declares CAN_FIND_PREFIX, but its table has no "
        "find_prefix");
  }
  if (table.checkpoint == nullptr && (can & KVTWIN_CAN_PIN) != 0) {
    return Invalid(
        "the backend declares CAN_PIN, but its table has no checkpoint");
  }
  return Abilities{
      .kinds = said.kinds,
      .can = can,
      .dtypes = said.dtypes,
      .v_layouts = said.v_layouts,
      .shifts = said.shifts,
      .mask_dtypes = said.mask_dtypes,
      .placements = said.placements == 0 ? ~0U : said.placements,
      .cannot = said.cannot,
      .max_sequences = said.max_sequences,
      .max_layers = said.max_layers,
      .max_padding = said.max_padding,
      .max_mask_padding = said.max_mask_padding,
      .max_position = said.max_position,
      .can_resume = table.can_resume != nullptr,
      .set_causal = table.set_causal != nullptr,
      .shift = table.shift != nullptr,
      .snapshots = table.snapshot != nullptr && table.restore != nullptr};
}

std::vector<std::string> MissingFunctions(const kvtwin_backend_v1& table) {
  std::vector<std::string> missing;
  const std::array<std::pair<const char*, bool>, 12> optional = {
      {{"remove", table.remove != nullptr},
       {"copy_prefix", table.copy_prefix != nullptr},
       {"can_resume", table.can_resume != nullptr},
       {"set_causal", table.set_causal != nullptr},
       {"set_layer_type", table.set_layer_type != nullptr},
       {"encoder_cached", table.encoder_cached != nullptr},
       {"cells", table.cells != nullptr},
       {"snapshot", table.snapshot != nullptr},
       {"restore", table.restore != nullptr},
       {"commit", table.commit != nullptr},
       {"find_prefix", table.find_prefix != nullptr},
       {"checkpoint", table.checkpoint != nullptr}}};
  for (const auto& [name, there] : optional) {
    if (!there) missing.emplace_back(name);
  }
  return missing;
}

Status CheckTable(const kvtwin_pool_backend_v1& table) {
  return NeedAll({{"describe", reinterpret_cast<const void*>(table.describe)},
                  {"init", reinterpret_cast<const void*>(table.init)},
                  {"close", reinterpret_cast<const void*>(table.close)},
                  {"open", reinterpret_cast<const void*>(table.open)},
                  {"seq_len", reinterpret_cast<const void*>(table.seq_len)},
                  {"append", reinterpret_cast<const void*>(table.append)},
                  {"commit", reinterpret_cast<const void*>(table.commit)},
                  {"free", reinterpret_cast<const void*>(table.free)}});
}

// Reads how the pool attends. Errors: a level without the function that it
// needs; those of CheckAttendFields.
Result<std::optional<PoolAttention>> DeclaredAttention(
    const kvtwin_pool_description_v1& said,
    const kvtwin_pool_backend_v1& table) {
  const bool claims = RawEnum(said.level) == KVTWIN_ATTENTION;
  if (claims && table.attend == nullptr) {
    return Invalid("the backend claims ATTENTION, but its table has no attend");
  }
  if (!claims && table.views == nullptr) {
    return Invalid(
        "the backend has no views: it needs an attend, and the level "
        "ATTENTION");
  }
  if (table.attend == nullptr) return std::optional<PoolAttention>();
  Status status = CheckAttendFields(said);
  if (!status.ok()) return status;
  PoolAttention attention = {
      .precision = {.dtype = static_cast<DType>(said.attend_dtype),
                    .tolerance = said.attend_tolerance}};
  if (said.max_query_heads > 0) {
    attention.query_heads = said.max_query_heads;
  }
  return std::optional(attention);
}

// Reads what `attend` follows, and the pools that `init` makes.
Result<Abilities> DeclaredPools(const kvtwin_pool_description_v1& said,
                                bool attends) {
  Abilities abilities = {.can = 0};
  constexpr std::pair<std::uint32_t, std::uint32_t> kWeighs[] = {
      {KVTWIN_POOL_HAS_SOFT_CAP, KVTWIN_CAN_SOFT_CAP},
      {KVTWIN_POOL_HAS_SINKS, KVTWIN_CAN_SINKS}};
  for (const auto& [said_bit, bit] : kWeighs) {
    if ((said.can & said_bit) != 0) abilities.can |= bit;
  }
  if (abilities.can != 0 && !attends) {
    return Invalid(
        "the backend declares HAS_SOFT_CAP or HAS_SINKS, but its table has no "
        "attend");
  }
  Status status =
      CheckFlags(std::array{FlagField{"dtypes", said.dtypes, kRowFlags}});
  if (!status.ok()) return status;
  if (said.dtypes != 0) abilities.dtypes = said.dtypes;
  for (const auto& [name, said_number, number] :
       {std::tuple("block_multiple", said.block_multiple,
                   &abilities.block_multiple),
        std::tuple("head_dim_multiple", said.head_dim_multiple,
                   &abilities.head_dim_multiple)}) {
    if (said_number < 0 || said_number > kPoolMultipleMost) {
      return Invalid(
          "{} of the backend's description is {}, it must be from 0 to {}",
          name, said_number, kPoolMultipleMost);
    }
    *number = std::max(said_number, 1);
  }
  if (said.max_sequences < 0) {
    return Invalid(
        "max_sequences of the backend's description is {}, it must not be "
        "negative",
        said.max_sequences);
  }
  abilities.max_sequences =
      said.max_sequences > 0 ? said.max_sequences : kOpenClientsMost;
  return abilities;
}

Result<PoolRules> DeclaredRules(const kvtwin_pool_description_v1& said) {
  constexpr std::uint32_t kAll =
      KVTWIN_POOL_DEDUPLICATES | KVTWIN_POOL_RECOMPUTES_LAST |
      KVTWIN_POOL_HAS_WINDOW | KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_HAS_MEDIA |
      KVTWIN_POOL_STATES_IN_PLACE | KVTWIN_POOL_ONE_STOCK |
      KVTWIN_POOL_HAS_SOFT_CAP | KVTWIN_POOL_HAS_SINKS | KVTWIN_POOL_NO_RESERVE;
  if ((said.can & ~kAll) != 0) {
    return Invalid("can is {:#x}; this kvtwin does not know its flags {:#x}",
                   said.can, said.can & ~kAll);
  }
  PoolRules rules;
  rules.deduplicates = (said.can & KVTWIN_POOL_DEDUPLICATES) != 0;
  rules.recomputes_last = (said.can & KVTWIN_POOL_RECOMPUTES_LAST) != 0;
  rules.states_in_place = (said.can & KVTWIN_POOL_STATES_IN_PLACE) != 0;
  rules.one_stock = (said.can & KVTWIN_POOL_ONE_STOCK) != 0;
  rules.no_reserve = (said.can & KVTWIN_POOL_NO_RESERVE) != 0;
  const bool has_groups = (said.can & KVTWIN_POOL_HAS_GROUPS) != 0;
  const bool differs =
      (said.can & (KVTWIN_POOL_DEDUPLICATES | KVTWIN_POOL_RECOMPUTES_LAST |
                   KVTWIN_POOL_HAS_WINDOW)) != 0;
  if (has_groups ? differs : rules.need_groups()) {
    return Invalid("can is {:#x}, which is {} groups", said.can,
                   has_groups ? "not for pools with" : "for pools with");
  }
  if ((said.can & KVTWIN_POOL_HAS_WINDOW) == 0) return rules;
  if (said.window < 0) {
    return Invalid("window is {}, it must not be negative", said.window);
  }
  rules.window = said.window;
  return rules;
}

}  // namespace

Result<BackendInfo> DescribeBackend(const kvtwin_backend_v1* given) {
  constexpr std::size_t kNeeded = offsetof(kvtwin_backend_v1, message);
  const auto size = SizeOfStruct("backend", given, kNeeded);
  if (!size.ok()) return size.status();
  Status status = CheckRest("backend", given, sizeof(kvtwin_backend_v1), *size);
  if (!status.ok()) return status;
  BackendInfo info;
  kvtwin_backend_v1& table = info.table;
  std::memcpy(&table, given, std::min(*size, sizeof(table)));
  status = CheckTable(table);
  if (!status.ok()) return status;
  kvtwin_description_v1 said = PlainDescription();
  if (const int code = table.describe(&said); code != KVTWIN_OK) {
    return Invalid("the backend's describe answers {}", code);
  }
  const auto has_text = [](const char* text, std::size_t length_max) {
    return text != nullptr && ::strnlen(text, length_max + 1) <= length_max;
  };
  if (!has_text(said.name, 200) || !has_text(said.profile, 4000)) {
    return Invalid(
        "name or profile of the backend's description is not a text");
  }
  const Result<Rules> rules = ParseRules(said.profile);
  if (!rules.ok()) {
    return Invalid("profile of the backend's description: {}",
                   rules.status().message());
  }
  status = CheckDescription(said);
  if (status.ok()) status = CheckAttend(said, table);
  if (!status.ok()) return status;
  Result<Abilities> abilities = AbilitiesOf(said, table);
  if (!abilities.ok()) return abilities.status();
  info.name = Printable(said.name, 200);
  info.profile = FirstProfile(said.profile);
  info.rules = *rules;
  info.claims = said.level == KVTWIN_IDENTITY     ? Level::kIdentity
                : said.level == KVTWIN_VISIBILITY ? Level::kVisibility
                : said.level == KVTWIN_NUMERIC    ? Level::kNumeric
                                                  : Level::kAttention;
  info.abilities = *abilities;
  info.tolerance = said.tolerance;
  info.has_cells = table.cells != nullptr;
  info.has_get = table.get != nullptr;
  if (table.attend != nullptr) {
    info.attend = {.dtype = static_cast<DType>(said.attend_dtype),
                   .query_heads = said.max_query_heads,
                   .tolerance = said.attend_tolerance};
  }
  info.lacks = MissingFunctions(table);
  return info;
}

void UseProfile(const std::string& profile, BackendInfo& info) {
  if (profile.empty()) return;
  info.profile = FirstProfile(profile);
  info.rules = *ParseRules(profile);
}

Rules RulesAt(const BackendInfo& info, Level level) {
  if (level != Level::kIdentity) return info.rules;
  return {.mask_rows = info.rules.mask_rows};
}

std::string WhyNotMade(const BackendInfo& info, const Setup& setup) {
  if (info.abilities.Fits(setup)) {
    return fmt::format("the init of {} refuses such a cache: '{}'", info.name,
                       ToText(setup));
  }
  Setup legal = setup;
  legal.legal = true;
  if (info.abilities.Fits(legal)) {
    return fmt::format(
        "{} does not declare CAN_ANY_ORDER, so its histories need legal=1: "
        "'{}'",
        info.name, ToText(legal));
  }
  Setup nearest = setup;
  info.abilities.Fit(nearest);
  return fmt::format(
      "{} does not declare such a cache: '{}'; the nearest that it declares is "
      "'{}'",
      info.name, ToText(setup), ToText(nearest));
}

void SetAttend(const BackendInfo& info, Subject& subject) {
  subject.tolerance = info.tolerance;
  if (subject.level != Level::kAttention || !info.attend) return;
  subject.tolerance = info.attend->tolerance;
  subject.attend_dtype = info.attend->dtype;
  LimitTo(info.attend->query_heads, subject.query_heads);
  subject.abilities.kinds &= ~std::uint32_t{KVTWIN_HAS_ENCODER};
  // Misuse of `get` is tried, too.
  if (!info.has_get)
    subject.abilities.can &= ~std::uint32_t{KVTWIN_CAN_REFUSE_MISUSE};
}

Subject BackendSubject(const BackendInfo& info, Level level,
                       std::string arguments, MemoryWatch* watch) {
  Subject subject;
  subject.name = info.name;
  subject.rules = RulesAt(info, level);
  const bool padded = subject.rules.mask_rows == Rules::MaskRows::kPadded;
  kvtwin_backend_v1 table = info.table;
  subject.abilities = info.abilities;
  if (level != Level::kIdentity) {  // The places of tokens are its own affair.
    table.cells = nullptr;
    table.snapshot = nullptr;
    table.restore = nullptr;
    subject.abilities.snapshots = false;
  }
  subject.can_be_poisoned = info.abilities.Can(KVTWIN_CAN_BE_POISONED);
  subject.tried_outside_of_life = false;
  subject.level = level;
  SetAttend(info, subject);
  subject.make_of = [=, dtype = subject.attend_dtype,
                     most = subject.query_heads](
                        const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    const int kv_heads = setup.rows.kv_heads;
    const int heads =
        kv_heads * QueriesPerKvHead(dtype, kv_heads, setup.group, most);
    return MakeBackendCache(table, setup, SinksOf(setup.sinks ? heads : 0),
                            padded, watch);
  };
  subject.arguments = std::move(arguments);
  return subject;
}

Result<PoolBackend> DescribePoolBackend(const kvtwin_pool_backend_v1* given) {
  constexpr std::size_t kNeeded = offsetof(kvtwin_pool_backend_v1, message);
  const auto size = SizeOfStruct("backend", given, kNeeded);
  if (!size.ok()) return size.status();
  Status status =
      CheckRest("backend", given, sizeof(kvtwin_pool_backend_v1), *size);
  if (!status.ok()) return status;
  PoolBackend backend;
  std::memcpy(&backend.table, given, std::min(*size, sizeof(backend.table)));
  status = CheckTable(backend.table);
  if (!status.ok()) return status;
  kvtwin_pool_description_v1 said{};
  said.size = sizeof(said);
  said.name = "pool";
  said.level = KVTWIN_VISIBILITY;
  if (const int code = backend.table.describe(&said); code != KVTWIN_OK) {
    return Invalid("describe answers {}", code);
  }
  if (said.name == nullptr) return Invalid("name is NULL");
  const int level = RawEnum(said.level);
  if (level != KVTWIN_VISIBILITY && level != KVTWIN_IDENTITY &&
      level != KVTWIN_ATTENTION) {
    return Invalid("level is {}, pools have visibility, identity and attention",
                   level);
  }
  backend.name = Printable(said.name, 200);
  if (level == KVTWIN_IDENTITY) backend.level = Level::kIdentity;
  if (level == KVTWIN_ATTENTION) backend.level = Level::kAttention;
  const auto attention = DeclaredAttention(said, backend.table);
  if (!attention.ok()) return attention.status();
  backend.attention = *attention;
  const auto abilities = DeclaredPools(said, backend.attention.has_value());
  if (!abilities.ok()) return abilities.status();
  backend.abilities = *abilities;
  const Result<PoolRules> rules = DeclaredRules(said);
  if (!rules.ok()) return rules.status();
  backend.rules = *rules;
  backend.groups = (said.can & KVTWIN_POOL_HAS_GROUPS) != 0;
  backend.media = (said.can & KVTWIN_POOL_HAS_MEDIA) != 0;
  if (backend.media && backend.table.add_media == nullptr) {
    return Invalid("can is {:#x}, but the table lacks add_media", said.can);
  }
  if (rules->any() && level == KVTWIN_IDENTITY) {
    return Invalid("can is {:#x}, at identity a pool does as P1 to P18 say",
                   said.can);
  }
  return backend;
}

}  // namespace kvtwin::props
