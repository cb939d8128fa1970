#include "props/history/history.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

// Thrown with the reason, and the part of the line that is wrong.
struct Bad {
  std::string_view where;
  std::string why;
};

// Returns `text` for a message: shortened if it is long, and in ASCII.
std::string Quoted(std::string_view text) {
  constexpr std::size_t kShown = 40;
  return fmt::format("'{}'", Printable(text, kShown));
}

// Reads `text` from its front.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool Take(std::string_view token) {
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool Sees(std::string_view token) const { return text_.starts_with(token); }
  int Number() {
    int value = 0;
    const char* begin = text_.data();
    const auto [end, error] =
        std::from_chars(begin, begin + text_.size(), value);
    if (error != std::errc() || value < -kOpenEnd) {
      throw Bad{text_, fmt::format("{} does not start with a number of at most "
                                   "{}",
                                   Quoted(text_), kOpenEnd)};
    }
    text_.remove_prefix(AsSize(end - begin));
    return value;
  }
  void Expect(std::string_view token) {
    if (!Take(token)) {
      throw Bad{text_,
                fmt::format("{} should go on with '{}'", Quoted(text_), token)};
    }
  }
  RelativePos Pos() {
    if (Take("~")) return {true, -Number()};
    if (Take("^")) return {true, Number()};
    return {false, Number()};
  }
  bool empty() const { return text_.empty(); }
  void ExpectEnd() const {
    if (!text_.empty()) Fail("is left over");
  }
  [[noreturn]] void Fail(std::string_view why) const {
    throw Bad{text_, fmt::format("{} {}", Quoted(text_), why)};
  }

 private:
  std::string_view text_;
};

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    if (at != 0 && !text.empty()) parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Kind ReadKind(std::string_view name) {
  if (const auto kind = FromName<Kind>(kKindNames, name)) return *kind;
  throw Bad{name, fmt::format("{} is no kind of cache", Quoted(name))};
}

CacheSpec ReadPart(std::string_view text, const CacheSpec& wrapper) {
  const auto fields = Split(text, ':');
  if (fields.empty()) throw Bad{text, "a wrapper's cache is empty"};
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
    Reader reader(fields[i]);
    if (reader.Take("w")) {
      spec.window = reader.Number();
    } else if (reader.Take("m")) {
      spec.memory = reader.Number();
    } else {
      reader.Expect("c");
      spec.chunk = reader.Number();
    }
    reader.ExpectEnd();
  }
  return spec;
}

Shift ReadShift(std::string_view name) {
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
  throw Bad{name, fmt::format("{} is no shift function", Quoted(name))};
}

DType ReadDType(std::string_view name) {
  if (const auto dtype = DTypeFromName(name)) return *dtype;
  throw Bad{name, fmt::format("{} is no dtype", Quoted(name))};
}

DType ReadRowDType(std::string_view name) {
  if (const DType dtype = ReadDType(name); IsRowDType(dtype)) return dtype;
  throw Bad{name, fmt::format("{} is no dtype of rows", Quoted(name))};
}

DType ReadMaskDType(std::string_view name) {
  if (const DType dtype = ReadDType(name); IsMaskDType(dtype)) return dtype;
  throw Bad{name, fmt::format("{} is no dtype of masks", Quoted(name))};
}

int ReadSize(std::string_view text) {
  Reader reader(text);
  const int value = reader.Number();
  reader.ExpectEnd();
  if (value < 0) {
    throw Bad{text, fmt::format("{} must not be negative", value)};
  }
  return value;
}

void ReadDims(std::string_view text, RowDims& rows) {
  Reader reader(text);
  rows.k_head_dim = reader.Number();
  reader.Expect(",");
  rows.kv_heads = reader.Number();
  reader.Expect(",");
  rows.v_head_dim = reader.Number();
  reader.ExpectEnd();
  for (const int dim : {rows.k_head_dim, rows.kv_heads, rows.v_head_dim}) {
    if (dim < 1 || dim > 4096) {
      throw Bad{text, fmt::format("{} is not in 1 to 4096", dim)};
    }
  }
}

void ReadSetting(std::string_view key, std::string_view value, Setup& setup) {
  CacheSpec& spec = setup.spec;
  if (key == "kind") return void(spec.kind = ReadKind(value));
  if (key == "window") return void(spec.window = ReadSize(value));
  if (key == "memory") return void(spec.memory = ReadSize(value));
  if (key == "chunk") return void(spec.chunk = ReadSize(value));
  if (key == "shift") return void(spec.shift = ReadShift(value));
  if (key == "place" && value == "scatter") {
    return void(spec.placement = Placement::kScatter);
  }
  Rope& rope = spec.shift.rope;
  if (key == "ropebase") return void(rope.base = ReadSize(value));
  if (key == "ropescale") return void(rope.scale = ReadSize(value));
  if (key == "ropedims") return void(rope.dims = ReadSize(value));
  CacheConfig& config = setup.config;
  if (key == "pad") return void(config.cache_padding = ReadSize(value));
  if (key == "maskpad") {
    return void(config.mask_batch_padding = ReadSize(value));
  }
  if (key == "permuted" || key == "tiled") {
    if (ReadSize(value) == 0) return;
    if (config.v_layout != VLayout::kPlain) {
      throw Bad{key, "V is permuted or tiled, not both"};
    }
    return void(config.v_layout =
                    key == "tiled" ? VLayout::kTiled : VLayout::kPermuted);
  }
  if (key == "mask") return void(config.mask_dtype = ReadMaskDType(value));
  if (key == "dtype") return void(setup.init.dtype = ReadRowDType(value));
  if (key == "vdtype") return void(config.v_dtype = ReadRowDType(value));
  if (key == "seqs") return void(setup.init.max_sequences = ReadSize(value));
  if (key == "cap") return void(setup.init.capacity = ReadSize(value));
  if (key == "batch") return void(setup.init.max_batch = ReadSize(value));
  if (key == "dims") return ReadDims(value, setup.rows);
  if (key == "layers") return void(setup.layers = ReadSize(value));
  if (key == "legal") return void(setup.legal = ReadSize(value) != 0);
  if (key == "strided") return void(setup.strided = ReadSize(value) != 0);
  if (key == "firstid") return void(setup.first_id = ReadSize(value));
  throw Bad{key, fmt::format("{} is no setting with the value {}", Quoted(key),
                             Quoted(value))};
}

// Refuses sizes that would not fit into memory: the line may be a mistake.
void CheckSizes(const Setup& setup, std::string_view where) {
  constexpr std::int64_t kCellsMax = 1 << 20;
  constexpr std::int64_t kElementsMax = 1 << 26;
  const InitArgs& init = setup.init;
  const std::int64_t cells = std::int64_t{init.max_sequences} * init.capacity +
                             init.max_batch + setup.config.cache_padding;
  const std::int64_t rows =
      std::int64_t{init.max_batch} + setup.config.mask_batch_padding;
  if (cells > kCellsMax || rows > kCellsMax) {
    throw Bad{where, fmt::format("more than {} cells or mask rows", kCellsMax)};
  }
  const std::int64_t row_elements =
      std::int64_t{setup.rows.kv_heads} *
      (setup.rows.k_head_dim + setup.rows.v_head_dim);
  if (setup.layers < 1 || setup.layers > 64) {
    throw Bad{where,
              fmt::format("layers is {}, there can be 1 to 64", setup.layers)};
  }
  if (cells * rows > kElementsMax ||
      cells * row_elements > kElementsMax / setup.layers) {
    throw Bad{where, "a cache of this size is too large for a test"};
  }
  Setup fitting = setup;
  FitStorage(fitting);
  if (fitting.rows != setup.rows ||
      fitting.config.v_layout != setup.config.v_layout) {
    throw Bad{where,
              fmt::format("blocks ({}, V {}) need head_dims (dims=K,heads,V) "
                          "that are multiples of {}, and V that is neither "
                          "permuted nor tiled: vdtype may be another",
                          DTypeName(setup.init.dtype),
                          DTypeName(setup.v_dtype()), kBlockElements)};
  }
  if (fitting.config.cache_padding != setup.config.cache_padding) {
    throw Bad{where, fmt::format("pad is {}, tiled V needs a multiple of {}",
                                 setup.config.cache_padding, kTileCells)};
  }
}

// Refuses settings that the kind does not have.
void CheckKind(const CacheSpec& spec, std::string_view where) {
  const bool windowed = IsWindowed(spec.kind);
  const auto check = [&](bool given, bool allowed, std::string_view key) {
    if (!given || allowed) return;
    throw Bad{where,
              fmt::format("kind {} has no {}", KindName(spec.kind), key)};
  };
  check(spec.window.has_value(), windowed, "window");
  check(spec.memory.has_value(), spec.kind == Kind::kSwaMem, "memory");
  check(spec.chunk != 0, spec.kind == Kind::kChunked, "chunk");
  check(!spec.caches.empty(), spec.kind == Kind::kWrapper, "caches");
  for (const CacheSpec& inner : spec.caches) CheckKind(inner, where);
}

void ReadCells(std::string_view text, const std::set<std::string_view>& seen,
               Setup& setup) {
  if (seen.contains("seqs") || seen.contains("cap")) {
    throw Bad{text, "cells goes without seqs and cap"};
  }
  const int cells = ReadSize(text);
  const int batch = setup.init.max_batch;
  SetCells(cells, setup);
  if (seen.contains("batch")) setup.init.max_batch = batch;
  CheckSizes(setup, text);
  if (const std::string why = WhyNotOfCells(setup); !why.empty()) {
    throw Bad{text, fmt::format("no such cache has exactly {} cells: {}", cells,
                                why)};
  }
}

void ReadVersion(std::string_view word) {
  if (word == "kvt1") return;
  if (word.starts_with("kvt")) {
    throw Bad{word,
              fmt::format("{} is another version, this program reads kvt1",
                          Quoted(word))};
  }
  throw Bad{word, "a history starts with 'kvt1'"};
}

// `part` is the line up to the first operation.
void ReadSetup(std::string_view part, Setup& setup) {
  const auto words = Split(part, ' ');
  ReadVersion(words.empty() ? part : words[0]);
  // The caches and cells are read last: they depend on the other settings.
  std::optional<std::string_view> caches;
  std::optional<std::string_view> cells;
  std::set<std::string_view> seen;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::size_t at = words[i].find('=');
    if (at == std::string_view::npos) {
      throw Bad{words[i], fmt::format("{} is no setting", Quoted(words[i]))};
    }
    const std::string_view key = words[i].substr(0, at);
    const std::string_view value = words[i].substr(at + 1);
    if (!seen.insert(key).second) {
      throw Bad{key, fmt::format("{} comes twice", Quoted(key))};
    }
    if (key == "caches") {
      caches = value;
    } else if (key == "cells") {
      cells = value;
    } else {
      ReadSetting(key, value, setup);
    }
  }
  for (const auto one : Split(caches.value_or(""), '/')) {
    setup.spec.caches.push_back(ReadPart(one, setup.spec));
  }
  if (setup.spec.caches.size() > kCachesMost) {
    throw Bad{part, fmt::format("more than {} caches", kCachesMost)};
  }
  CheckKind(setup.spec, part);
  if (cells) ReadCells(*cells, seen, setup);
  CheckSizes(setup, part);
}

// Reads the end of a range of sequences; returns how many come after `first`.
int ReadMore(Reader& reader, int first) {
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
  Reader reader(text);
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
  reader.ExpectEnd();
  if (segment.seq < 0 || !fits) {
    throw Bad{text, fmt::format("segment {} is negative, empty or too long",
                                Quoted(text))};
  }
  segment.count = AsInt(count);
  return segment;
}

std::vector<int> ReadIndices(std::string_view text) {
  std::vector<int> indices;
  for (const auto index : Split(text, ',')) indices.push_back(ReadSize(index));
  return indices;
}

void ReadPut(const std::vector<std::string_view>& words, Op& op) {
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "reserve") {
      op.reserve = true;
    } else if (words[i] == "keep") {
      op.keep_rows = true;
    } else if (words[i].starts_with("image=")) {
      op.images = ReadIndices(words[i].substr(6));
    } else if (words[i].starts_with("except=")) {
      op.except = ReadIndices(words[i].substr(7));
    } else {
      op.segments.push_back(ReadSegment(words[i]));
    }
  }
  if (op.segments.empty()) {
    throw Bad{words[0], fmt::format("{} what?", words[0])};
  }
}

// Reads the range of a drop, or the range and distance of a move.
void ReadRange(std::string_view text, Op& op) {
  const bool moves = op.kind == OpKind::kShift;
  Reader reader(text);
  op.seq = reader.Number();
  reader.Expect(":");
  op.begin = reader.Pos();
  reader.Expect("-");
  op.open = reader.empty() || (moves && reader.Sees("@"));
  if (!op.open) op.end = reader.Pos();
  if (moves) {
    reader.Expect("@");
    reader.Take("+");
    op.delta = reader.Number();
  }
  reader.ExpectEnd();
}

void ReadCopy(std::string_view text, Op& op) {
  Reader reader(text);
  op.seq = reader.Number();
  reader.Expect(">");
  op.dst = reader.Number();
  if (op.kind == OpKind::kCopy) {
    op.more = ReadMore(reader, op.dst);
    reader.Expect(":");
    op.end = reader.Pos();
  }
  reader.ExpectEnd();
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
  } else if (is("snapshot", OpKind::kSnapshot, false)) {
    op.seq = ReadSize(argument);
  } else if (is("add", OpKind::kAdd, false)) {
    ReadCopy(argument, op);
  } else {
    return is("cached", OpKind::kCached, true);
  }
  return true;
}

Op ReadOp(std::string_view text) {
  const auto words = Split(text, ' ');
  if (words.empty()) throw Bad{text, "an operation is empty"};
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
    throw Bad{words[2], fmt::format("{} is left over", Quoted(words[2]))};
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
    Reader reader(argument);
    op.seq = reader.Number();
    reader.Expect("@");
    op.end = reader.Pos();
    reader.ExpectEnd();
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
    throw Bad{name, fmt::format("{} is no operation", Quoted(name))};
  }
  if (op.seq < 0 || op.dst < 0) throw Bad{argument, "a sequence is negative"};
  return op;
}

}  // namespace

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
    const auto parts = Split(text, '|');
    History history;
    ReadSetup(parts.empty() ? text : parts[0], history.setup);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      history.ops.push_back(ReadOp(parts[i]));
    }
    return history;
  } catch (const Bad& bad) {
    // `bad.where` is always a part of `text`.
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("character {}: {}",
                              bad.where.data() - text.data() + 1, bad.why));
  }
}

}  // namespace kvtwin::props
