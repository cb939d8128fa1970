#include "props/history/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "props/base/did_you_mean.h"
#include "props/base/hash.h"
#include "props/history/knobs.h"
#include "props/history/line_reader.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

RelativePos ReadPos(LineReader& reader) {
  if (reader.Take("~")) return {true, -reader.Number()};
  if (reader.Take("^")) return {true, reader.Number()};
  return {false, reader.Number()};
}

Kind ReadKind(std::string_view name) {
  if (const auto kind = FromName<Kind>(kKindNames, name)) return *kind;
  throw BadLine{name, fmt::format("{} is not a kind of cache", Quoted(name))};
}

constexpr std::string_view kCustomShift = "custom";

CacheSpec ReadPart(std::string_view text, const CacheSpec& wrapper) {
  const auto fields = Split(text, ":");
  if (fields.empty()) throw BadLine{text, "a wrapper's cache is empty"};
  CacheSpec spec;
  spec.kind = ReadKind(fields[0]);
  spec.placement = wrapper.placement;
  spec.shift = wrapper.shift;
  for (std::size_t i = 1; i < fields.size(); ++i) {
    if (fields[i] == "otherplace") {
      spec.placement = wrapper.placement == Placement::kScatter
                           ? Placement::kContiguous
                           : Placement::kScatter;
      continue;
    }
    if (const auto kind = FromName<ShiftKind>(kShiftNames, fields[i])) {
      spec.shift.kind = *kind;
      continue;
    }
    if (fields[i] == kCustomShift) {
      spec.shift = CustomShift();
      continue;
    }
    LineReader reader(fields[i]);
    if (reader.Take("w")) {
      spec.window = reader.Number();
    } else if (reader.Take("m")) {
      spec.memory = reader.Number();
    } else if (reader.Take("e")) {
      spec.checkpoint_every = reader.Number();
    } else if (reader.Take("k")) {
      spec.checkpoints = reader.Number();
    } else if (reader.Take("p")) {
      spec.pins = reader.Number();
    } else if (reader.Take("d")) {
      spec.drafts = reader.Number();
    } else {
      reader.Expect("c");
      spec.chunk = reader.Number();
    }
    reader.ExpectEnd();
  }
  return spec;
}

Shift ReadShift(std::string_view name) {
  if (name == kCustomShift) return CustomShift();
  Shift shift;
  if (name == "rope_halves") {
    shift.kind = ShiftKind::kRope;
    shift.rope.pairing = Rope::Pairing::kHalves;
    return shift;
  }
  if (const auto kind = FromName<ShiftKind>(kShiftNames, name)) {
    shift.kind = *kind;
    return shift;
  }
  throw BadLine{name, fmt::format("{} is not a shift function", Quoted(name))};
}

struct Setting {
  std::string_view key;
  void (*read)(std::string_view value, Setup& setup);
};
// The settings that are neither knobs nor read last.
constexpr auto kSettings = std::to_array<Setting>({
    {"kind", [](auto value, Setup& to) { to.spec.kind = ReadKind(value); }},
    {"window", [](auto value, Setup& to) { to.spec.window = ReadSize(value); }},
    {"memory", [](auto value, Setup& to) { to.spec.memory = ReadSize(value); }},
    {"chunk", [](auto value, Setup& to) { to.spec.chunk = ReadSize(value); }},
    {"every",
     [](auto value, Setup& to) { to.spec.checkpoint_every = ReadSize(value); }},
    {"keep",
     [](auto value, Setup& to) { to.spec.checkpoints = ReadSize(value); }},
    {"pins", [](auto value, Setup& to) { to.spec.pins = ReadSize(value); }},
    {"drafts", [](auto value, Setup& to) { to.spec.drafts = ReadSize(value); }},
    {"shift", [](auto value, Setup& to) { to.spec.shift = ReadShift(value); }},
    {"place", [](auto, Setup& to) { to.spec.placement = Placement::kScatter; }},
    {"ropebase",
     [](auto value, Setup& to) { to.spec.shift.rope.base = ReadSize(value); }},
    {"ropescale",
     [](auto value, Setup& to) { to.spec.shift.rope.scale = ReadSize(value); }},
    {"ropedims",
     [](auto value, Setup& to) { to.spec.shift.rope.dims = ReadSize(value); }},
    {"seqs",
     [](auto value, Setup& to) { to.init.max_sequences = ReadSize(value); }},
    {"cap", [](auto value, Setup& to) { to.init.capacity = ReadSize(value); }},
    {"batch",
     [](auto value, Setup& to) { to.init.max_batch = ReadSize(value); }},
});

// Returns ", did you mean 'cells'?", or "".
std::string NearestSetting(std::string_view key) {
  std::vector<std::string> names = {"caches", "cells"};
  for (const Setting& setting : kSettings) names.emplace_back(setting.key);
  for (const Knob& knob : Knobs()) names.emplace_back(knob.key);
  return DidYouMean(key, names);
}

void ReadSetting(std::string_view key, std::string_view value, Setup& setup) {
  if (key == "place" && value != "scatter") {
    throw BadLine{key, fmt::format("{} is not a placement", Quoted(value))};
  }
  const auto* setting = std::ranges::find(kSettings, key, &Setting::key);
  if (setting != kSettings.end()) return setting->read(value, setup);
  const auto knob = std::ranges::find(Knobs(), key, &Knob::key);
  if (knob != Knobs().end()) return knob->read(value, setup);
  throw BadLine{key, fmt::format("{} is not a setting{}", Quoted(key),
                                 NearestSetting(key))};
}

// Refuses sizes that would not fit into memory: the line may be a mistake.
void CheckSizes(const Setup& setup, std::string_view where) {
  if (std::string why = WhyTooLarge(setup); !why.empty()) {
    throw BadLine{where, std::move(why)};
  }
  if (setup.layers < 1 || setup.layers > kLayersMax) {
    throw BadLine{where, fmt::format("layers is {}, there can be 1 to {}",
                                     setup.layers, kLayersMax)};
  }
  if (setup.group > kGroupMax) {
    throw BadLine{where, fmt::format("group is {}, there can be up to {} query "
                                     "heads for each KV head",
                                     setup.group, kGroupMax)};
  }
  Setup fitting = setup;
  FitStorage(fitting);
  if (fitting.rows != setup.rows ||
      fitting.config.v_layout != setup.config.v_layout) {
    throw BadLine{
        where, fmt::format("blocks ({}, V {}) need head_dims (dims=K,heads,V) "
                           "that are multiples of {}, and V that is neither "
                           "permuted nor tiled: vdtype may be another",
                           DTypeName(setup.init.dtype),
                           DTypeName(setup.v_dtype()), kBlockElements)};
  }
  if (fitting.config.cache_padding != setup.config.cache_padding) {
    throw BadLine{where,
                  fmt::format("pad is {}, tiled V needs a multiple of {}",
                              setup.config.cache_padding, kTileCells)};
  }
}

// Refuses settings that the kind does not have.
void CheckKind(const CacheSpec& spec, std::string_view where) {
  const bool windowed = spec.kind == Kind::kSwa || spec.kind == Kind::kSwaMem;
  const auto check = [&](bool given, bool allowed, std::string_view key) {
    if (!given || allowed) return;
    throw BadLine{where,
                  fmt::format("kind {} has no {}", KindName(spec.kind), key)};
  };
  check(spec.window.has_value(), windowed, "window");
  check(spec.memory.has_value(), spec.kind == Kind::kSwaMem, "memory");
  check(spec.chunk != 0, spec.kind == Kind::kChunked, "chunk");
  const bool recurrent = spec.kind == Kind::kRecurrent;
  check(spec.checkpoint_every != 0, recurrent, "every");
  check(spec.checkpoints != 0, recurrent, "keep");
  check(spec.pins != 0, recurrent, "pins");
  check(spec.drafts != 0, recurrent, "drafts");
  check(!spec.caches.empty(), IsWrapper(spec.kind), "caches");
  for (const CacheSpec& inner : spec.caches) CheckKind(inner, where);
}

void ReadCells(std::string_view text, const std::set<std::string_view>& seen,
               Setup& setup) {
  if (seen.contains("seqs") || seen.contains("cap")) {
    throw BadLine{text, "cells goes without seqs and cap"};
  }
  const int cells = ReadSize(text);
  const int batch = setup.init.max_batch;
  SetCells(cells, setup);
  if (seen.contains("batch")) setup.init.max_batch = batch;
  CheckSizes(setup, text);
  if (const std::string why = WhyNotOfCells(setup); !why.empty()) {
    throw BadLine{text, fmt::format("no such cache has exactly {} cells: {}",
                                    cells, why)};
  }
}

void ReadSetup(std::string_view line,
               const std::vector<std::string_view>& settings, Setup& setup) {
  // The caches and cells are read last: they depend on the other settings.
  std::string_view caches;
  std::optional<std::string_view> cells;
  std::set<std::string_view> seen;
  ReadSettings(settings, [&](std::string_view key, std::string_view value) {
    seen.insert(key);
    if (key == "caches") {
      caches = value;
    } else if (key == "cells") {
      cells = value;
    } else {
      ReadSetting(key, value, setup);
    }
  });
  for (const auto part : Split(caches, "/")) {
    setup.spec.caches.push_back(ReadPart(part, setup.spec));
  }
  if (setup.spec.caches.size() > kCachesMost) {
    throw BadLine{line, fmt::format("more than {} caches", kCachesMost)};
  }
  CheckKind(setup.spec, line);
  if (cells) ReadCells(*cells, seen, setup);
  CheckSizes(setup, line);
}

// Reads the end of a range of sequences; returns how many come after `first`.
int ReadMore(LineReader& reader, int first) {
  if (!reader.Take("-")) return 0;
  const std::int64_t more = std::int64_t{reader.Number()} - first;
  if (more < 1 || more >= kMostSequences) {
    reader.Fail(
        fmt::format("follows a range of sequences that is empty, or of "
                    "more than {}",
                    kMostSequences));
  }
  return AsInt(more);
}

Segment ReadSegment(std::string_view text) {
  LineReader reader(text);
  Segment segment;
  segment.seq = reader.Number();
  segment.more = ReadMore(reader, segment.seq);
  reader.Expect("*");
  const bool free = reader.Take("free");
  std::int64_t count = free ? Segment::kFree : 0;
  if (count == 0 || reader.Take("+") || reader.Sees("-")) {
    count += reader.Number();
  }
  const bool fits = free ? std::abs(count - Segment::kFree) <= Segment::kMost
                         : count >= 1 && count <= Segment::kMost;
  if (reader.Take("@")) {
    reader.Take("+");
    segment.delta = reader.Number();
  }
  if (reader.Take("r")) segment.order = Segment::Order::kDown;
  if (reader.Take("=")) segment.order = Segment::Order::kSame;
  if (reader.Take(":")) {
    do {
      segment.parents.push_back(std::max(reader.Number(), kCommitted));
    } while (reader.Take(","));
  }
  reader.ExpectEnd();
  if (segment.seq < 0 || !fits) {
    throw BadLine{text, fmt::format("segment {} is negative, empty or too long",
                                    Quoted(text))};
  }
  segment.count = AsInt(count);
  return segment;
}

std::vector<int> ReadIndices(std::string_view text) {
  std::vector<int> indices;
  for (const auto index : Split(text, ",")) indices.push_back(ReadSize(index));
  return indices;
}

void ReadPut(const std::vector<std::string_view>& words, Op& op) {
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "reserve") {
      op.reserve = true;
    } else if (words[i] == "keep") {
      op.keep_rows = true;
    } else if (words[i] == "overfull") {
      op.overfull = true;
    } else if (words[i].starts_with("stop=")) {
      op.stop = ReadSize(words[i].substr(5));
    } else if (words[i].starts_with("image=")) {
      op.images = ReadIndices(words[i].substr(6));
    } else if (words[i].starts_with("except=")) {
      op.except = ReadIndices(words[i].substr(7));
    } else {
      op.segments.push_back(ReadSegment(words[i]));
    }
  }
  if (op.segments.empty()) {
    throw BadLine{words[0], fmt::format("{} what?", words[0])};
  }
}

// Reads the range of a drop, or the range and distance of a move.
void ReadRange(std::string_view text, Op& op) {
  const bool moves = op.kind == OpKind::kShift;
  LineReader reader(text);
  op.seq = reader.Number();
  reader.Expect(":");
  op.begin = ReadPos(reader);
  reader.Expect("-");
  op.open = reader.empty() || (moves && reader.Sees("@"));
  if (!op.open) op.end = ReadPos(reader);
  if (moves) {
    reader.Expect("@");
    reader.Take("+");
    op.delta = reader.Number();
  }
  reader.ExpectEnd();
}

void ReadCopy(std::string_view text, Op& op) {
  LineReader reader(text);
  op.seq = reader.Number();
  reader.Expect(">");
  op.dst = reader.Number();
  if (op.kind == OpKind::kCopy) {
    op.more = ReadMore(reader, op.dst);
    reader.Expect(":");
    op.end = ReadPos(reader);
  }
  reader.ExpectEnd();
}

// Reads "0:1,0", or "0:" for an empty path.
void ReadCommit(std::string_view text, Op& op) {
  LineReader reader(text);
  op.kind = OpKind::kCommit;
  op.seq = reader.Number();
  reader.Expect(":");
  while (!reader.empty()) {
    if (!op.path.empty()) reader.Expect(",");
    op.path.push_back(std::max(reader.Number(), 0));
  }
}

// Reads "0:3,1,4", a sequence and the ids of its prompt.
void ReadFind(std::string_view text, Op& op) {
  LineReader reader(text);
  op.kind = OpKind::kFind;
  op.seq = reader.Number();
  do {
    reader.Expect(op.ids.empty() ? ":" : ",");
    op.ids.push_back(std::max(reader.Number(), 0));
  } while (!reader.empty());
}

// Reads an operation that makes a single call; false if `name` is not such an
// operation.
bool ReadCall(std::string_view name, std::string_view argument, Op& op) {
  const auto is = [&](std::string_view call, OpKind kind, bool bare) {
    if (name != call || (bare && !argument.empty())) return false;
    op.kind = kind;
    return true;
  };
  if (is("read", OpKind::kGet, true) || is("store", OpKind::kReput, true)) {
    op.single = true;
  } else if (is("except", OpKind::kCausal, false)) {
    op.single = true;
    op.except = ReadIndices(argument);
  } else if (is("layer", OpKind::kLayer, false) ||
             is("type", OpKind::kType, false)) {
    op.number = ReadSize(argument);
  } else if (is("snapshot", OpKind::kSnapshot, false) ||
             is("pin", OpKind::kPin, false)) {
    op.seq = ReadSize(argument);
  } else if (is("add", OpKind::kAdd, false)) {
    ReadCopy(argument, op);
  } else {
    return is("cached", OpKind::kCached, true);
  }
  return true;
}

// Returns the names of all operations that ReadOp reads.
const std::vector<std::string>& OperationsOfLines() {
  static const std::vector<std::string> kNames = {
      "put",    "start",  "drop",   "move",   "copy",    "ask",
      "commit", "find",   "causal", "get",    "reput",   "reload",
      "poison", "misuse", "read",   "store",  "except",  "layer",
      "type",   "pin",    "add",    "cached", "snapshot"};
  return kNames;
}

Op ReadOp(std::string_view text) {
  const auto words = Split(text, kBlanks);
  if (words.empty()) throw BadLine{text, "an operation is empty"};
  const std::string_view name = words[0];
  const std::string_view argument =
      words.size() > 1 ? words[1] : name.substr(name.size());
  Op op;
  if (name == "put" || name == "start") {
    op.single = name == "start";
    ReadPut(words, op);
    return op;
  }
  if (words.size() > 2) {
    throw BadLine{words[2], fmt::format("{} is left over", Quoted(words[2]))};
  }
  if (name == "drop") {
    op.kind = OpKind::kDrop;
    ReadRange(argument, op);
  } else if (name == "move") {
    op.kind = OpKind::kShift;
    ReadRange(argument, op);
  } else if (name == "copy") {
    op.kind = OpKind::kCopy;
    ReadCopy(argument, op);
  } else if (name == "ask") {
    op.kind = OpKind::kAsk;
    LineReader reader(argument);
    op.seq = reader.Number();
    reader.Expect("@");
    op.end = ReadPos(reader);
    reader.ExpectEnd();
  } else if (name == "commit") {
    ReadCommit(argument, op);
  } else if (name == "find") {
    ReadFind(argument, op);
  } else if (name == "causal") {
    op.kind = OpKind::kCausal;
    op.except = ReadIndices(argument);
  } else if (name == "misuse") {
    op.kind = OpKind::kMisuse;
    op.misuse = ReadSize(argument);
  } else if (name == "get" && argument.empty()) {
    op.kind = OpKind::kGet;
  } else if (name == "reput" && argument.empty()) {
    op.kind = OpKind::kReput;
  } else if (name == "reload" && argument.empty()) {
    op.kind = OpKind::kReload;
  } else if (name == "poison" && argument.empty()) {
    op.kind = OpKind::kPoison;
  } else if (!ReadCall(name, argument, op)) {
    throw BadLine{name, fmt::format("{} is not an operation{}", Quoted(name),
                                    DidYouMean(name, OperationsOfLines()))};
  }
  if (op.seq < 0 || op.dst < 0)
    throw BadLine{argument, "a sequence is negative"};
  return op;
}

}  // namespace

bool HasWindow(const CacheSpec& spec) {
  return (IsWindowed(spec.kind) && spec.window) ||
         std::ranges::any_of(spec.caches, HasWindow);
}

bool Shifts(const CacheSpec& spec) {
  const ShiftKind kind = spec.shift.kind;
  return (kind != ShiftKind::kNone && kind != ShiftKind::kIdentity) ||
         std::ranges::any_of(spec.caches, Shifts);
}

Shift CustomShift() {
  Shift shift;
  shift.kind = ShiftKind::kCustom;
  shift.fn = [](int layer, std::int32_t offset, int k_head_dim, int kv_heads,
                std::span<float> key) -> Status {
    if (Size(key) != k_head_dim * kv_heads) {
      return {StatusCode::kInvalidArgument,
              fmt::format("a K row of {} elements", key.size())};
    }
    const std::array arguments = {layer, offset, k_head_dim, kv_heads};
    std::uint64_t hash = HashBytes(arguments.data(), sizeof(arguments), 0);
    const float first = key.front();
    for (std::size_t i = 0; i < key.size(); ++i) {
      const float next = i + 1 < key.size() ? key[i + 1] : first;
      // Elements stay small.
      key[i] = next / 2 + static_cast<float>(hash % 8);
      hash = HashBytes(&hash, sizeof(hash), 0);
    }
    return {};
  };
  return shift;
}

void UseCustomShift(CacheSpec& spec) {
  const ShiftKind kind = spec.shift.kind;
  if (kind == ShiftKind::kTagAdd || kind == ShiftKind::kRope) {
    spec.shift = CustomShift();
  }
  std::ranges::for_each(spec.caches, UseCustomShift);
}

std::string_view ShiftName(ShiftKind kind) {
  return kind == ShiftKind::kCustom ? kCustomShift : At(kShiftNames, kind);
}

int Setup::IdOf(int seq) const {
  const std::int64_t id = first_id + static_cast<std::int64_t>(seq) * id_step;
  return AsInt(std::min<std::int64_t>(id, kOpenEnd));
}

int Setup::NameOf(int id) const {
  // Rounds up: the largest int is at most a step after the sequence before it.
  const std::int64_t steps = static_cast<std::int64_t>(id) - first_id;
  return AsInt((steps + id_step - 1) / id_step);
}

void FitStorage(Setup& setup) {
  const auto widen = [](DType dtype, int& head_dim) {
    constexpr auto kBlock = AsInt(kBlockElements);
    if (!IsBlockDType(dtype)) return;
    head_dim = (head_dim + kBlock - 1) / kBlock * kBlock;
  };
  widen(setup.init.dtype, setup.rows.k_head_dim);
  widen(setup.v_dtype(), setup.rows.v_head_dim);
  CacheConfig& config = setup.config;
  if (IsBlockDType(setup.v_dtype())) config.v_layout = VLayout::kPlain;
  if (config.v_layout != VLayout::kTiled) return;
  const int tiles = (config.cache_padding + kTileCells - 1) / kTileCells;
  config.cache_padding = tiles * kTileCells;
}

namespace {

// Returns the number of cells of the largest cache; 0 if Init refuses the
// setup.
std::int64_t CellsOf(const Setup& setup) {
  reference::Ledger ledger(setup.spec);
  if (!ledger.Init(setup.config, setup.init).ok()) return 0;
  std::int64_t cells = 0;
  for (const auto& part : ledger.parts()) cells = std::max(cells, part.cells());
  return cells;
}

// Takes a state from each recurrent cache; false if there is none.
bool LoseStates(CacheSpec& spec) {
  bool any = false;
  for (std::int32_t* states : {&spec.checkpoints, &spec.pins, &spec.drafts}) {
    any = any || *states > 0;
    *states = std::max(*states - 1, 0);
  }
  for (CacheSpec& part : spec.caches) any = LoseStates(part) || any;
  return any;
}

}  // namespace

void LimitCells(int cells_max, Setup& setup) {
  InitArgs& init = setup.init;
  // The largest size shrinks first, so that little changes.
  while (CellsOf(setup) > cells_max) {
    if (LoseStates(setup.spec)) continue;
    int& larger =
        init.capacity >= init.max_batch ? init.capacity : init.max_batch;
    if (larger > 1) {
      --larger;
    } else if (init.max_sequences > 1) {
      --init.max_sequences;
    } else if (setup.config.v_layout == VLayout::kTiled) {
      // Tiled V needs at least kTileCells cells.
      setup.config.v_layout = VLayout::kPermuted;
    } else if (setup.config.cache_padding > 1) {
      --setup.config.cache_padding;
    } else {
      return;
    }
  }
}

void SetCells(int cells, Setup& setup) {
  InitArgs& init = setup.init;
  init.max_sequences = 1;
  init.capacity = init.max_batch = cells;
  const auto leave = [&](const CacheSpec& spec) {
    const int memory = spec.memory.value_or(spec.window.value_or(cells));
    if (memory < cells)
      init.max_batch = std::min(init.max_batch, cells - memory);
  };
  leave(setup.spec);
  for (const CacheSpec& part : setup.spec.caches) leave(part);
}

std::string WhyTooLarge(const Setup& setup) {
  constexpr std::int64_t kCellsMax = 1 << 20;
  constexpr std::int64_t kElementsMax = 1 << 26;
  const InitArgs& init = setup.init;
  std::int64_t each = init.capacity;
  const auto count_states = [&](const CacheSpec& spec) {
    each = std::max(each,
                    std::int64_t{spec.checkpoints} + spec.pins + spec.drafts);
  };
  count_states(setup.spec);
  std::ranges::for_each(setup.spec.caches, count_states);
  const std::int64_t cells =
      init.max_sequences * each + init.max_batch + setup.config.cache_padding;
  const std::int64_t rows =
      std::int64_t{init.max_batch} + setup.config.mask_batch_padding;
  if (cells > kCellsMax || rows > kCellsMax) {
    return fmt::format("more than {} cells or mask rows", kCellsMax);
  }
  const std::int64_t row_elements =
      std::int64_t{setup.rows.kv_heads} *
      (setup.rows.k_head_dim + setup.rows.v_head_dim);
  // Queries and outputs have these numbers for each KV head.
  const std::int64_t group = std::max(setup.group, 8);
  const bool fits =
      cells * rows <= kElementsMax &&
      rows * row_elements <= kElementsMax / group &&
      cells * row_elements <= kElementsMax / std::max(setup.layers, 1);
  return fits ? "" : "a cache of this size is too large for a test";
}

std::string WhyNotOfCells(const Setup& setup) {
  const auto& [dtype, max_sequences, capacity, max_batch] = setup.init;
  if (max_sequences != 1) return "it has several sequences";
  if (std::min({capacity, max_batch, setup.config.cache_padding}) < 1) {
    return "its sizes must be at least 1";
  }
  reference::Ledger ledger(setup.spec);
  const Status status = ledger.Init(setup.config, setup.init);
  if (!status.ok()) return status.message();
  bool any = false;
  for (const auto& part : ledger.parts()) {
    if (part.encoder()) continue;
    any = true;
    if (part.cells() != capacity) {
      return fmt::format("it would have {}", part.cells());
    }
  }
  return any ? "" : "an encoder has no cells";
}

Result<History> ParseHistory(std::string_view text) {
  try {
    const LineParts parts = SplitLine(text, "kvt1");
    History history;
    ReadSetup(text, parts.settings, history.setup);
    for (const std::string_view operation : parts.operations) {
      history.ops.push_back(ReadOp(operation));
    }
    return history;
  } catch (const BadLine& bad) {
    return StatusOf(bad, text);
  }
}

}  // namespace kvtwin::props
