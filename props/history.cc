#include "props/history.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "core/names.h"

namespace kvtwin::props {
namespace {

// A number or a text in the history's grammar, or why there is none.
struct Bad {
  std::string why;
};

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
    if (error != std::errc() || value > kLargest || value < -kLargest) {
      throw Bad{fmt::format("'{}' does not start with a number of at most {}",
                            text_, kLargest)};
    }
    text_.remove_prefix(static_cast<std::size_t>(end - begin));
    return value;
  }
  void Expect(std::string_view token) {
    if (!Take(token)) {
      throw Bad{fmt::format("'{}' should go on with '{}'", text_, token)};
    }
  }
  RelativePos Pos() {
    if (Take("~")) return {true, -Number()};
    if (Take("^")) return {true, Number()};
    return {false, Number()};
  }
  bool empty() const { return text_.empty(); }
  void ExpectEnd() const {
    if (!text_.empty()) throw Bad{fmt::format("'{}' is left over", text_)};
  }

 private:
  // Large enough for every test, small enough that sums do not overflow.
  static constexpr int kLargest = 0x7FFFFFF0;
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

std::string PosText(const RelativePos& pos) {
  if (!pos.from_end) return fmt::format("{}", pos.offset);
  return pos.offset > 0 ? fmt::format("^{}", pos.offset)
                        : fmt::format("~{}", -pos.offset);
}

// One cache of a wrapper: "swa:w2", "chunked:c3".
std::string PartText(const CacheSpec& spec, const CacheSpec& wrapper) {
  std::string text(KindName(spec.kind));
  if (spec.window) text += fmt::format(":w{}", *spec.window);
  if (spec.memory) text += fmt::format(":m{}", *spec.memory);
  if (spec.chunk != 0) text += fmt::format(":c{}", spec.chunk);
  if (spec.placement != wrapper.placement) text += ":otherplace";
  if (spec.shift.kind != wrapper.shift.kind) {
    text += fmt::format(
        ":{}", kShiftNames.at(static_cast<std::size_t>(spec.shift.kind)));
  }
  return text;
}

std::string SegmentText(const Segment& segment) {
  std::string text = fmt::format(" {}*", segment.seq);
  if (segment.count >= Segment::kFree / 2) {
    text += fmt::format("free{:+}", segment.count - Segment::kFree);
  } else {
    text += fmt::format("{}", segment.count);
  }
  if (segment.delta != 0) text += fmt::format("@{:+}", segment.delta);
  if (segment.order == Segment::Order::kDown) text += "r";
  if (segment.order == Segment::Order::kSame) text += "=";
  return text;
}

Kind ReadKind(std::string_view name) {
  if (const auto kind = FromName<Kind>(kKindNames, name)) return *kind;
  throw Bad{fmt::format("kind is '{}'", name)};
}

CacheSpec ReadPart(std::string_view text, const CacheSpec& wrapper) {
  const auto fields = Split(text, ':');
  if (fields.empty()) throw Bad{"a wrapper's cache is empty"};
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
  throw Bad{fmt::format("shift is '{}'", name)};
}

DType ReadDType(std::string_view name) {
  if (const auto dtype = DTypeFromName(name)) return *dtype;
  throw Bad{fmt::format("dtype is '{}'", name)};
}

int ReadSize(std::string_view text) {
  Reader reader(text);
  const int value = reader.Number();
  reader.ExpectEnd();
  if (value < 0) throw Bad{fmt::format("{} must not be negative", value)};
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
    if (dim < 1 || dim > 4096) throw Bad{fmt::format("dims '{}'", text)};
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
  if (key == "permuted") return void(config.permuted_v = ReadSize(value) != 0);
  if (key == "mask") return void(config.mask_dtype = ReadDType(value));
  if (key == "dtype") return void(setup.init.dtype = ReadDType(value));
  if (key == "seqs") return void(setup.init.max_sequences = ReadSize(value));
  if (key == "cap") return void(setup.init.capacity = ReadSize(value));
  if (key == "batch") return void(setup.init.max_batch = ReadSize(value));
  if (key == "dims") return ReadDims(value, setup.rows);
  if (key == "layers") return void(setup.layers = ReadSize(value));
  if (key == "legal") return void(setup.legal = ReadSize(value) != 0);
  if (key == "strided") return void(setup.strided = ReadSize(value) != 0);
  if (key == "firstid") return void(setup.first_id = ReadSize(value));
  throw Bad{fmt::format("unknown setting '{}={}'", key, value)};
}

// A line may be a mistake: nothing is made that would not fit into memory.
void CheckSizes(const Setup& setup) {
  constexpr std::int64_t kCellsMax = 1 << 20;
  constexpr std::int64_t kElementsMax = 1 << 26;
  const InitArgs& init = setup.init;
  const std::int64_t cells = std::int64_t{init.max_sequences} * init.capacity +
                             init.max_batch + setup.config.cache_padding;
  const std::int64_t rows =
      std::int64_t{init.max_batch} + setup.config.mask_batch_padding;
  if (cells > kCellsMax || rows > kCellsMax) {
    throw Bad{fmt::format("more than {} cells or mask rows", kCellsMax)};
  }
  const std::int64_t row_elements =
      std::int64_t{setup.rows.kv_heads} *
      (setup.rows.k_head_dim + setup.rows.v_head_dim);
  if (setup.layers < 1 || setup.layers > 64) {
    throw Bad{fmt::format("layers is {}, there can be 1 to 64", setup.layers)};
  }
  if (cells * rows > kElementsMax ||
      cells * row_elements > kElementsMax / setup.layers) {
    throw Bad{"a cache of this size is too large for a test"};
  }
}

// A setting that its kind does not have is a mistake, too.
void CheckKind(const CacheSpec& spec) {
  const bool windowed = spec.kind == Kind::kSwa || spec.kind == Kind::kSwaMem;
  const auto check = [&](bool given, bool allowed, std::string_view key) {
    if (!given || allowed) return;
    throw Bad{fmt::format("kind {} has no {}", KindName(spec.kind), key)};
  };
  check(spec.window.has_value(), windowed, "window");
  check(spec.memory.has_value(), spec.kind == Kind::kSwaMem, "memory");
  check(spec.chunk != 0, spec.kind == Kind::kChunked, "chunk");
  check(!spec.caches.empty(), spec.kind == Kind::kWrapper, "caches");
  for (const CacheSpec& inner : spec.caches) CheckKind(inner);
}

void ReadSetup(const std::vector<std::string_view>& words, Setup& setup) {
  if (words.empty() || words[0] != "kvt1") {
    throw Bad{"a history starts with 'kvt1'"};
  }
  std::string_view caches;  // Read last: they take after the wrapper.
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::size_t at = words[i].find('=');
    if (at == std::string_view::npos) {
      throw Bad{fmt::format("'{}' is not a setting", words[i])};
    }
    const std::string_view key = words[i].substr(0, at);
    const std::string_view value = words[i].substr(at + 1);
    if (key == "caches") {
      caches = value;
    } else {
      ReadSetting(key, value, setup);
    }
  }
  for (const auto part : Split(caches, '/')) {
    setup.spec.caches.push_back(ReadPart(part, setup.spec));
  }
  if (setup.spec.caches.size() > 16) throw Bad{"more than 16 caches"};
  CheckKind(setup.spec);
  CheckSizes(setup);
}

Segment ReadSegment(std::string_view text) {
  Reader reader(text);
  Segment segment;
  segment.seq = reader.Number();
  reader.Expect("*");
  if (reader.Take("free")) {
    segment.count = Segment::kFree;
    if (reader.Take("+") || reader.Sees("-")) segment.count += reader.Number();
  } else {
    segment.count = reader.Number();
  }
  if (reader.Take("@")) {
    reader.Take("+");
    segment.delta = reader.Number();
  }
  if (reader.Take("r")) segment.order = Segment::Order::kDown;
  if (reader.Take("=")) segment.order = Segment::Order::kSame;
  reader.ExpectEnd();
  if (segment.seq < 0 || segment.count < 1) {
    throw Bad{fmt::format("segment '{}' is negative or empty", text)};
  }
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
  if (op.segments.empty()) throw Bad{"put what?"};
}

void ReadDrop(std::string_view text, Op& op) {
  Reader reader(text);
  op.seq = reader.Number();
  reader.Expect(":");
  op.begin = reader.Pos();
  reader.Expect("-");
  op.open = reader.empty();
  if (!op.open) op.end = reader.Pos();
  reader.ExpectEnd();
}

void ReadCopy(std::string_view text, Op& op) {
  Reader reader(text);
  op.seq = reader.Number();
  reader.Expect(">");
  op.dst = reader.Number();
  reader.Expect(":");
  op.end = reader.Pos();
  reader.ExpectEnd();
}

Op ReadOp(std::string_view text) {
  const auto words = Split(text, ' ');
  if (words.empty()) throw Bad{"an operation is empty"};
  const std::string_view name = words[0];
  const std::string_view argument = words.size() > 1 ? words[1] : "";
  Op op;
  if (name == "put") {
    ReadPut(words, op);
    return op;
  }
  if (words.size() > 2) throw Bad{fmt::format("'{}' has too many words", text)};
  if (name == "drop") {
    op.kind = OpKind::kDrop;
    ReadDrop(argument, op);
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
  } else {
    throw Bad{fmt::format("unknown operation '{}'", text)};
  }
  if (op.seq < 0 || op.dst < 0) throw Bad{"a sequence is negative"};
  return op;
}

}  // namespace

std::string ToText(const Setup& setup) {
  const Setup defaults;
  const CacheSpec& spec = setup.spec;
  std::string text = "kvt1";
  const auto add = [&](std::string_view key, const auto& value,
                       const auto& normal) {
    if (value != normal) text += fmt::format(" {}={}", key, value);
  };
  add("kind", KindName(spec.kind), KindName(Kind::kCausal));
  if (spec.window) text += fmt::format(" window={}", *spec.window);
  if (spec.memory) text += fmt::format(" memory={}", *spec.memory);
  add("chunk", spec.chunk, 0);
  if (spec.placement == Placement::kScatter) text += " place=scatter";
  const bool halves = spec.shift.kind == ShiftKind::kRope &&
                      spec.shift.rope.pairing == Rope::Pairing::kHalves;
  const auto shift = static_cast<std::size_t>(spec.shift.kind);
  add("shift", halves ? "rope_halves" : kShiftNames.at(shift), kShiftNames[0]);
  if (spec.shift.kind == ShiftKind::kRope) {
    const Rope& rope = spec.shift.rope;
    add("ropebase", rope.base, Rope().base);
    add("ropescale", rope.scale, Rope().scale);
    add("ropedims", rope.dims, 0);
  }
  for (std::size_t i = 0; i < spec.caches.size(); ++i) {
    text += i == 0 ? " caches=" : "/";
    text += PartText(spec.caches[i], spec);
  }
  add("seqs", setup.init.max_sequences, defaults.init.max_sequences);
  add("cap", setup.init.capacity, defaults.init.capacity);
  add("batch", setup.init.max_batch, defaults.init.max_batch);
  add("pad", setup.config.cache_padding, 1);
  add("maskpad", setup.config.mask_batch_padding, 1);
  add("permuted", setup.config.permuted_v ? 1 : 0, 0);
  add("mask", DTypeName(setup.config.mask_dtype), "f32");
  add("dtype", DTypeName(setup.init.dtype), "f32");
  if (setup.rows != defaults.rows) {
    text += fmt::format(" dims={},{},{}", setup.rows.k_head_dim,
                        setup.rows.kv_heads, setup.rows.v_head_dim);
  }
  add("layers", setup.layers, defaults.layers);
  add("legal", setup.legal ? 1 : 0, 0);
  add("strided", setup.strided ? 1 : 0, 0);
  add("firstid", setup.first_id, 0);
  return text;
}

std::string ToText(const Op& op) {
  switch (op.kind) {
    case OpKind::kPut: {
      std::string text = "put";
      for (const Segment& segment : op.segments) text += SegmentText(segment);
      if (op.reserve) text += " reserve";
      if (op.keep_rows) text += " keep";
      if (!op.images.empty()) {
        text += fmt::format(" image={}", fmt::join(op.images, ","));
      }
      if (!op.except.empty()) {
        text += fmt::format(" except={}", fmt::join(op.except, ","));
      }
      return text;
    }
    case OpKind::kDrop:
      return fmt::format("drop {}:{}-{}", op.seq, PosText(op.begin),
                         op.open ? "" : PosText(op.end));
    case OpKind::kCopy:
      return fmt::format("copy {}>{}:{}", op.seq, op.dst, PosText(op.end));
    case OpKind::kAsk:
      return fmt::format("ask {}@{}", op.seq, PosText(op.end));
    case OpKind::kCausal:
      return op.except.empty()
                 ? "causal"
                 : fmt::format("causal {}", fmt::join(op.except, ","));
    case OpKind::kGet:
      return "get";
    case OpKind::kReput:
      return "reput";
    case OpKind::kMisuse:
      return fmt::format("misuse {}", op.misuse);
    case OpKind::kPoison:
      return "poison";
    case OpKind::kReload:
      return "reload";
  }
  return "";
}

std::string ToText(const History& history) {
  std::string text = ToText(history.setup);
  for (const Op& op : history.ops) text += " | " + ToText(op);
  return text;
}

Result<History> ParseHistory(std::string_view text) {
  try {
    const auto parts = Split(text, '|');
    const auto words =
        parts.empty() ? std::vector<std::string_view>() : Split(parts[0], ' ');
    History history;
    ReadSetup(words, history.setup);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      history.ops.push_back(ReadOp(parts[i]));
    }
    return history;
  } catch (const Bad& bad) {
    return Status(StatusCode::kInvalidArgument, bad.why);
  }
}

}  // namespace kvtwin::props
