#include "core/trace/trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string_view>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "core/trace/trace_fields.h"

namespace kvtwin {
namespace {

constexpr std::array<std::string_view, 14> kOpNames = {
    "start_forward", "set_causal",     "set_layer_type", "put",
    "get",           "reserved_mask",  "remove",         "copy_prefix",
    "can_resume",    "encoder_cached", "attend",         "commit",
    "find_prefix",   "checkpoint"};
constexpr std::array<std::string_view, 2> kPairingNames = {"adjacent",
                                                           "halves"};
constexpr std::array<std::string_view, 3> kPlacementNames = {
    "contiguous", "scatter", "other"};
// The possible results of start_forward and of remove.
constexpr std::array kStartResults = {StatusCode::kOk, StatusCode::kCacheFull};
constexpr std::array kRemoveResults = {
    StatusCode::kOk, StatusCode::kNotSupported, StatusCode::kSharedCells};

DenseTensor Mask(const JsonFields& op, std::string_view key, DType dtype) {
  const JsonFields fields = op.Object(key);
  DenseTensor mask{dtype, fields.Extents("shape", 2, 2), {}};
  const JsonValue* rows = fields.Need("rows");
  if (!op.ok()) return mask;
  if (!rows->IsStrings()) {
    fields.WrongList("rows", *rows, "a string");
    return mask;
  }
  const auto columns = AsSize(mask.shape[0]);
  if (static_cast<std::int64_t>(rows->strings) != mask.shape[1]) {
    fields.Fail("rows", fmt::format("has {} strings, its shape is [{}, {}]",
                                    rows->strings, columns, mask.shape[1]));
    return mask;
  }
  // The text has each row and its line end, and no other line ends.
  const std::string_view text = rows->text;
  const auto wrong = [&](std::size_t row, const std::string& has) {
    fields.Fail(
        fmt::format("rows[{}]", row),
        fmt::format("has {}, it must be {} times 0 or 1", has, columns));
    return mask;
  };
  std::size_t begin = 0;
  for (std::size_t row = 0; row < rows->strings; ++row, begin += columns + 1) {
    const std::size_t end = text.find('\n', begin);
    if (end == begin + columns) continue;
    return wrong(row, fmt::format("length {}", end - begin));
  }
  if (begin != text.size()) {
    fields.Fail("rows", "has a string with a line end in it");
    return mask;
  }
  mask = HidingMask(dtype, mask.shape[0], mask.shape[1]);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t row = i / (columns + 1);
    const std::size_t column = i % (columns + 1);
    if (column == columns) continue;  // The line end.
    if (text[i] != '0' && text[i] != '1') {
      return wrong(row, fmt::format("'{}' at column {}",
                                    Printable(text.substr(i, 1), 1), column));
    }
    if (text[i] != '1') continue;
    AllowInMask(mask, static_cast<std::int64_t>(column),
                static_cast<std::int64_t>(row));
  }
  return mask;
}

Rope ReadRope(const JsonFields& fields) {
  Rope rope;
  rope.pairing =
      static_cast<Rope::Pairing>(fields.Name("pairing", kPairingNames));
  rope.base = fields.Real("base");
  if (fields.Find("scale") != nullptr) rope.scale = fields.Real("scale");
  rope.dims = fields.OptionalInt("dims").value_or(0);
  return rope;
}

CacheSpec ReadSpec(const JsonValue& object, const std::string& path,
                   Placement placement, std::string& problem) {
  const JsonFields fields(object, path, problem);
  CacheSpec spec;
  spec.placement = placement;
  spec.kind = static_cast<Kind>(fields.Name("type", kKindNames));
  if (IsWrapper(spec.kind)) {
    const JsonValue* caches = fields.Need("caches");
    if (caches == nullptr) return spec;
    if (caches->type != JsonValue::Type::kList || caches->strings > 0 ||
        !caches->numbers.empty()) {
      fields.WrongList("caches", *caches, "an object");
      return spec;
    }
    if (caches->items.empty()) fields.Fail("caches", "is empty");
    for (std::size_t i = 0; i < caches->items.size(); ++i) {
      if (caches->items[i].type != JsonValue::Type::kObject) {
        fields.Wrong(fmt::format("caches[{}]", i), caches->items[i],
                     "an object");
        return spec;
      }
      spec.caches.push_back(ReadSpec(caches->items[i],
                                     fmt::format("{}caches[{}].", path, i),
                                     placement, problem));
    }
    return spec;
  }
  if (spec.kind == Kind::kEncoder) return spec;
  if (IsWindowed(spec.kind)) {
    spec.window = fields.OptionalInt("window");
  }
  if (spec.kind == Kind::kSwaMem) spec.memory = fields.OptionalInt("memory");
  if (spec.kind == Kind::kChunked) spec.chunk = fields.Int("chunk");
  if (spec.kind == Kind::kRecurrent) {
    spec.checkpoint_every = fields.OptionalInt("checkpoint_every").value_or(0);
    spec.checkpoints = fields.OptionalInt("checkpoints").value_or(0);
    spec.pins = fields.OptionalInt("pins").value_or(0);
    spec.drafts = fields.OptionalInt("drafts").value_or(0);
    return spec;
  }
  spec.shift.kind = static_cast<ShiftKind>(fields.Name("shift", kShiftNames));
  if (spec.shift.kind == ShiftKind::kRope) {
    spec.shift.rope = ReadRope(fields.Object("rope"));
  }
  return spec;
}

DType ValueDType(const TraceHeader& header) {
  return header.config.v_dtype.value_or(header.init.dtype);
}

CacheConfig ReadConfig(const JsonFields& fields) {
  CacheConfig config;
  config.cache_padding =
      std::max(1, fields.OptionalInt("cache_padding", 0).value_or(1));
  config.mask_batch_padding =
      std::max(1, fields.OptionalInt("mask_batch_padding", 0).value_or(1));
  const auto is = [&](std::string_view name) {
    return fields.Find(name) != nullptr && fields.Bool(name);
  };
  if (is("permuted_v")) config.v_layout = VLayout::kPermuted;
  if (is("tiled_v")) {
    if (config.v_layout == VLayout::kPermuted) {
      fields.Fail("tiled_v", "is true, and so is permuted_v");
    }
    config.v_layout = VLayout::kTiled;
    if (config.cache_padding % kTileCells != 0) {
      fields.Fail("cache_padding",
                  fmt::format("is {}, tiled V needs a multiple of {}",
                              config.cache_padding, kTileCells));
    }
  }
  if (fields.Find("mask_dtype") != nullptr) {
    config.mask_dtype = kMaskDTypes[fields.Name("mask_dtype", kMaskDTypeNames)];
  }
  if (fields.Find("v_dtype") != nullptr) {
    config.v_dtype = kRowDTypes[fields.Name("v_dtype", kRowDTypeNames)];
  }
  return config;
}

void ReadAttend(const JsonFields& fields, TraceHeader& header) {
  const JsonFields attend = fields.Object("attend");
  const TraceAttention attention = ReadTraceAttention(attend);
  header.attend_dtype = attention.dtype;
  header.attend_tolerance = attention.tolerance;
  header.attend_soft_cap = ReadSoftCap(attend);
  header.attend_sinks = ReadSinks(attend);
}

// K, V and the mask, if they are there, must have equal numbers of columns.
void CheckColumns(const JsonFields& fields, const TraceOp& op,
                  VLayout v_layout) {
  const std::int64_t columns = op.key.shape[2];
  if (op.mask->shape[0] != columns) {
    fields.Fail("mask", fmt::format("has {} columns, key has {}",
                                    op.mask->shape[0], columns));
  }
  if (!op.value) return;
  if (v_layout == VLayout::kTiled && op.value->shape[0] != kTileCells) {
    fields.Fail("value", fmt::format("has shape {}, tiled V begins with {}",
                                     ShapeText(op.value->shape), kTileCells));
  }
  const std::int64_t values = ColumnsOf(op.value->view(), v_layout);
  if (values != columns) {
    fields.Fail("value",
                fmt::format("has {} columns, key has {}", values, columns));
  }
}

void ReadGet(const JsonFields& fields, const TraceHeader& header, TraceOp& op) {
  op.first_cell = fields.OptionalInt("first_cell", 0);
  op.key = ReadTensor(fields, "key", header.init.dtype);
  if (fields.Find("value") != nullptr) {
    op.value = ReadTensor(fields, "value", ValueDType(header));
  }
  const JsonValue* mask = fields.Need("mask");
  if (mask == nullptr || mask->type == JsonValue::Type::kNull) return;
  op.mask = Mask(fields, "mask", header.config.mask_dtype);
  if (fields.ok()) CheckColumns(fields, op, header.config.v_layout);
}

// Checks that there is one cell for each token, or none if the pass has no
// cells: it was refused, it reserves, or the cache is an encoder.
void CheckCells(const JsonFields& fields, const TraceHeader& header,
                const TraceOp& op) {
  const bool wrapper = IsWrapper(header.spec.kind);
  const Kind kind = wrapper ? header.spec.caches[0].kind : header.spec.kind;
  const bool may_lack =
      op.result != StatusCode::kOk || op.reserve || kind == Kind::kEncoder;
  const bool lacks = may_lack && op.cells->empty();
  if (!lacks && op.cells->size() != op.positions.size()) {
    fields.Fail("cells", fmt::format("has {} numbers, positions has {}",
                                     op.cells->size(), op.positions.size()));
  }
  for (std::size_t i = 0; i < op.cells->size(); ++i) {
    const int cell = (*op.cells)[i];
    // A token whose state is not stored has none (R5).
    if (cell >= 0 || (cell == -1 && kind == Kind::kRecurrent)) continue;
    fields.Fail(fmt::format("cells[{}]", i),
                fmt::format("is {}, it must not be negative", cell));
    return;
  }
}

void ReadParents(const JsonFields& fields, const TraceHeader& header,
                 TraceOp& op) {
  if (header.version < 3) fields.Fail("parents", "needs kvtrace 3");
  op.parents = fields.Ints("parents");
  if (fields.ok() && op.parents.size() != op.positions.size()) {
    fields.Fail("parents", fmt::format("has {} numbers, positions has {}",
                                       op.parents.size(), op.positions.size()));
  }
}

void ReadStartForward(const JsonFields& fields, const TraceHeader& header,
                      TraceOp& op) {
  op.positions = fields.Ints("positions");
  op.sequences = fields.Ints("sequences");
  if (fields.ok() && op.sequences.size() != op.positions.size()) {
    fields.Fail("sequences",
                fmt::format("has {} numbers, positions has {}",
                            op.sequences.size(), op.positions.size()));
  }
  if (fields.Find("multimodal") != nullptr) {
    op.indices = fields.Ints("multimodal");
  }
  if (fields.Find("parents") != nullptr) ReadParents(fields, header, op);
  if (fields.Find("reserve") != nullptr) op.reserve = fields.Bool("reserve");
  op.result = ReadResult(fields, kStartResults);
  if (fields.Find("cells") == nullptr || !fields.ok()) return;
  op.cells = fields.Ints("cells");
  if (fields.ok()) CheckCells(fields, header, op);
}

// Returns the bytes of a mask row. `cells` may be too large for an integer.
double MaskRowBytes(DType dtype, double cells) {
  if (dtype == DType::kBits) return cells / 8 + 8;
  return cells * static_cast<double>(SizeOf(dtype));
}

void AppendMask(const DenseTensor& mask, std::string& text) {
  const TensorView view = mask.view();
  text += fmt::format(R"(,"mask":{{"shape":[{},{}],"rows":[)", view.shape[0],
                      view.shape[1]);
  for (std::int64_t row = 0; row < view.shape[1]; ++row) {
    text += row == 0 ? "\"" : ",\"";
    for (std::int64_t column = 0; column < view.shape[0]; ++column) {
      text += MaskAllows(view, column, row) ? '1' : '0';
    }
    text += '"';
  }
  text += "]}";
}

std::string SpecText(const CacheSpec& spec) {
  std::string text = fmt::format(R"({{"type":"{}")", KindName(spec.kind));
  if (IsWrapper(spec.kind)) {
    text += R"(,"caches":[)";
    for (std::size_t i = 0; i < spec.caches.size(); ++i) {
      if (i > 0) text += ',';
      text += SpecText(spec.caches[i]);
    }
    return text + "]}";
  }
  if (spec.kind == Kind::kEncoder) return text + "}";
  const bool windowed = IsWindowed(spec.kind);
  if (windowed && spec.window) {
    text += fmt::format(R"(,"window":{})", *spec.window);
  }
  if (spec.kind == Kind::kSwaMem && spec.memory) {
    text += fmt::format(R"(,"memory":{})", *spec.memory);
  }
  if (spec.kind == Kind::kChunked) {
    text += fmt::format(R"(,"chunk":{})", spec.chunk);
  }
  if (spec.kind == Kind::kRecurrent) {
    text += fmt::format(R"(,"checkpoint_every":{},"checkpoints":{})",
                        spec.checkpoint_every, spec.checkpoints);
    if (spec.pins != 0) text += fmt::format(R"(,"pins":{})", spec.pins);
    if (spec.drafts != 0) text += fmt::format(R"(,"drafts":{})", spec.drafts);
    return text + "}";
  }
  text += fmt::format(R"(,"shift":"{}")", At(kShiftNames, spec.shift.kind));
  if (spec.shift.kind == ShiftKind::kRope) {
    const Rope& rope = spec.shift.rope;
    text += fmt::format(
        R"(,"rope":{{"pairing":"{}","base":{},"scale":{},"dims":{}}})",
        At(kPairingNames, rope.pairing), rope.base, rope.scale, rope.dims);
  }
  return text + "}";
}

bool HasCustomShift(const CacheSpec& spec) {
  return spec.shift.kind == ShiftKind::kCustom ||
         std::any_of(spec.caches.begin(), spec.caches.end(), HasCustomShift);
}

// Whether the first line needs an `attend` (from version 3 on).
bool Attends(const TraceHeader& header) {
  return header.attend_dtype != DType::kF32 || header.attend_tolerance > 0 ||
         header.attend_soft_cap > 0 || !header.attend_sinks.empty();
}

std::string StartForwardText(const TraceOp& op) {
  std::string text =
      fmt::format(R"(,"positions":[{}],"sequences":[{}])",
                  fmt::join(op.positions, ","), fmt::join(op.sequences, ","));
  if (!op.parents.empty()) {
    text += fmt::format(R"(,"parents":[{}])", fmt::join(op.parents, ","));
  }
  if (op.reserve) text += R"(,"reserve":true)";
  if (!op.indices.empty()) {
    text += fmt::format(R"(,"multimodal":[{}])", fmt::join(op.indices, ","));
  }
  text += fmt::format(R"(,"result":"{}")", StatusName(op.result));
  if (op.cells) {
    text += fmt::format(R"(,"cells":[{}])", fmt::join(*op.cells, ","));
  }
  return text;
}

// Appends the fields of a get or put. Errors: a recording cannot hold the
// tensors.
Status AppendRows(const TraceOp& op, std::string& text) {
  text += fmt::format(R"(,"layer":{})", op.layer);
  if (op.first_cell) text += fmt::format(R"(,"first_cell":{})", *op.first_cell);
  Status status = AppendTensor("key", op.key, text);
  if (status.ok() && op.value) status = AppendTensor("value", *op.value, text);
  if (op.mask) {
    AppendMask(*op.mask, text);
  } else if (op.kind == TraceOpKind::kGet) {
    text += R"(,"mask":null)";
  }
  return status;
}

Status AppendFields(const TraceOp& op, std::string& text) {
  switch (op.kind) {
    case TraceOpKind::kStartForward:
      text += StartForwardText(op);
      break;
    case TraceOpKind::kSetCausal:
      text += fmt::format(R"(,"except":[{}])", fmt::join(op.indices, ","));
      break;
    case TraceOpKind::kSetLayerType:
      text += fmt::format(R"(,"type":{})", op.type);
      break;
    case TraceOpKind::kPut:
    case TraceOpKind::kGet:
      return AppendRows(op, text);
    case TraceOpKind::kReservedMask:
      text += fmt::format(R"(,"shape":[{},{}])", op.shape[0], op.shape[1]);
      if (op.first_cell) {
        text += fmt::format(R"(,"first_cell":{})", *op.first_cell);
      }
      break;
    case TraceOpKind::kRemove:
      text += fmt::format(R"(,"seq":{},"begin":{},"end":{},"result":"{}")",
                          op.seq, op.begin, op.end, StatusName(op.result));
      break;
    case TraceOpKind::kCopyPrefix:
      text +=
          fmt::format(R"(,"src":{},"dst":{},"len":{})", op.src, op.dst, op.len);
      break;
    case TraceOpKind::kCanResume:
      text += fmt::format(R"(,"seq":{},"pos":{},"result":{})", op.seq, op.pos,
                          op.answer);
      break;
    case TraceOpKind::kEncoderCached:
      text += fmt::format(R"(,"result":{})", op.answer);
      break;
    case TraceOpKind::kAttend: {
      text += fmt::format(R"(,"layer":{})", op.layer);
      Status status = AppendTensor("query", op.key, text);
      return status.ok() ? AppendTensor("out", *op.value, text) : status;
    }
    case TraceOpKind::kCommit:
      text += fmt::format(R"(,"seq":{},"path":[{}])", op.seq,
                          fmt::join(op.indices, ","));
      break;
    case TraceOpKind::kFindPrefix:
      text += fmt::format(R"(,"seq":{},"tokens":[{}],"len":{})", op.seq,
                          fmt::join(op.indices, ","), op.len);
      break;
    case TraceOpKind::kCheckpoint:
      text += fmt::format(R"(,"seq":{})", op.seq);
      break;
  }
  return {};
}

// Cells are unknown to the rules of prefixes (F1).
void ReadFindPrefix(const JsonFields& fields, const TraceHeader& header,
                    TraceOp& op) {
  if (!header.visibility_only) {
    fields.Fail("op", "find_prefix needs the placement \"other\"");
  }
  op.seq = fields.Int("seq");
  op.indices = fields.Ints("tokens");
  op.len = fields.Int("len");
}

}  // namespace

std::string_view TraceOpName(TraceOpKind kind) { return At(kOpNames, kind); }

TraceHeader ReadHeaderFields(const JsonFields& fields, std::string& problem) {
  TraceHeader header;
  if (const JsonValue* producer = fields.Find("producer")) {
    header.producer = producer->text;
  }
  const std::size_t placement = fields.Name("placement", kPlacementNames);
  header.visibility_only = placement == 2;
  (void)fields.Object("cache");
  if (!problem.empty()) return header;
  header.spec = ReadSpec(
      *fields.Find("cache"), "cache.",
      placement == 1 ? Placement::kScatter : Placement::kContiguous, problem);
  header.config = ReadConfig(fields.Object("config"));
  const JsonFields init = fields.Object("init");
  header.init.dtype = kRowDTypes[init.Name("dtype", kRowDTypeNames)];
  header.init.max_sequences = init.Int("max_sequences", 1);
  header.init.capacity = init.Int("capacity", 1);
  header.init.max_batch = init.Int("max_batch", 1);
  const JsonFields model = fields.Object("model");
  header.layers = model.Int("layers", 1);
  header.rows.k_head_dim = model.Int("k_head_dim", 1);
  header.rows.kv_heads = model.Int("kv_heads", 1);
  header.rows.v_head_dim = model.Int("v_head_dim", 1);
  if (fields.Find("attend") != nullptr) ReadAttend(fields, header);
  // For the placement "other" no cache is made: only tokens are kept.
  if (!problem.empty() || header.visibility_only) return header;
  const double bytes = CacheBytesBound(header, header.rows, 0);
  if (bytes > kTraceCacheBytesMax) {
    problem = fmt::format(
        "the cache would need {:.3g} bytes, this program stops at {:.3g}: "
        "max_sequences {}, capacity {}, max_batch {}, layers {}",
        bytes, kTraceCacheBytesMax, header.init.max_sequences,
        header.init.capacity, header.init.max_batch, header.layers);
  }
  return header;
}

TraceOp ReadOpFields(const JsonFields& fields, const TraceHeader& header) {
  TraceOp op;
  op.kind = static_cast<TraceOpKind>(fields.Name("op", kOpNames));
  if (!fields.ok()) return op;
  if (op.kind == TraceOpKind::kPut || op.kind == TraceOpKind::kGet ||
      op.kind == TraceOpKind::kAttend) {
    op.layer = fields.Int("layer", 0, header.layers - 1);
  }
  switch (op.kind) {
    case TraceOpKind::kStartForward:
      ReadStartForward(fields, header, op);
      break;
    case TraceOpKind::kSetCausal:
      op.indices = fields.Ints("except");
      break;
    case TraceOpKind::kSetLayerType:
      op.type = fields.Int("type");
      break;
    case TraceOpKind::kPut:
      op.key = ReadTensor(fields, "key", header.init.dtype);
      op.value = ReadTensor(fields, "value", ValueDType(header));
      break;
    case TraceOpKind::kGet:
      ReadGet(fields, header, op);
      break;
    case TraceOpKind::kReservedMask:
      op.shape = fields.Extents("shape", 2, 2);
      op.first_cell = fields.OptionalInt("first_cell", 0);
      break;
    case TraceOpKind::kRemove:
      op.seq = fields.Int("seq");
      op.begin = fields.Int("begin");
      op.end = fields.Int("end");
      op.result = ReadResult(fields, kRemoveResults);
      break;
    case TraceOpKind::kCopyPrefix:
      op.src = fields.Int("src");
      op.dst = fields.Int("dst");
      op.len = fields.Int("len");
      break;
    case TraceOpKind::kCanResume:
      op.seq = fields.Int("seq");
      op.pos = fields.Int("pos");
      op.answer = fields.Bool("result");
      break;
    case TraceOpKind::kEncoderCached:
      op.answer = fields.Bool("result");
      break;
    case TraceOpKind::kAttend:
      if (header.version < 2) fields.Fail("op", "attend needs kvtrace 2");
      op.key = ReadTensor(fields, "query", DType::kF32);
      op.value = ReadTensor(fields, "out", DType::kF32);
      break;
    case TraceOpKind::kCommit:
      if (header.version < 3) fields.Fail("op", "commit needs kvtrace 3");
      op.seq = fields.Int("seq");
      op.indices = fields.Ints("path");
      break;
    case TraceOpKind::kFindPrefix:
      ReadFindPrefix(fields, header, op);
      break;
    case TraceOpKind::kCheckpoint:
      op.seq = fields.Int("seq");
      break;
  }
  if (op.kind >= TraceOpKind::kFindPrefix && header.version < 4) {
    fields.Fail("op", fmt::format("{} needs kvtrace 4", TraceOpName(op.kind)));
  }
  return op;
}

double CacheBytesBound(const TraceHeader& header, const RowDims& rows,
                       std::size_t sequences) {
  constexpr double kCellBytes = 64;  // Position, sequences, bookkeeping.
  const bool wrapper = IsWrapper(header.spec.kind);
  const double max_batch = header.init.max_batch;
  const std::int64_t head_bytes = RunBytes(header.init.dtype, rows.k_head_dim) +
                                  RunBytes(ValueDType(header), rows.v_head_dim);
  const double row_bytes = static_cast<double>(rows.kv_heads) *
                           static_cast<double>(head_bytes) * header.layers;
  const double mask_rows = max_batch + header.config.mask_batch_padding;
  double bytes = 0;
  for (const CacheSpec& spec :
       wrapper ? header.spec.caches : std::vector{header.spec}) {
    if (spec.kind == Kind::kEncoder) continue;
    double kept = header.init.capacity;
    if (spec.window) {  // + 1: room for the stop token (S3).
      const int memory = spec.memory.value_or(0);
      kept = std::min(kept, std::max(*spec.window, memory) + 1.0);
    }
    if (spec.kind == Kind::kRecurrent) {
      kept = 2.0 + spec.checkpoints + spec.pins + spec.drafts;
    }
    const double cells = header.init.max_sequences * kept + max_batch +
                         header.config.cache_padding;
    bytes +=
        cells * (kCellBytes + row_bytes + static_cast<double>(sequences) / 8) +
        mask_rows * MaskRowBytes(header.config.mask_dtype, cells);
  }
  return bytes;
}

Status WriteTraceHeader(const TraceHeader& header, std::ostream& out) {
  if (HasCustomShift(header.spec)) {
    return {StatusCode::kInvalidArgument,
            "shift is custom, which no recording can hold"};
  }
  const bool wrapper = IsWrapper(header.spec.kind);
  const CacheSpec& placed = wrapper ? header.spec.caches.at(0) : header.spec;
  const auto placement = AsSize(placed.placement);
  const CacheConfig& config = header.config;
  const InitArgs& init = header.init;
  out << fmt::format(
      R"({{"kvtrace":{},"producer":{},"placement":"{}","cache":{},)",
      header.version, JsonString(header.producer),
      kPlacementNames[header.visibility_only ? 2 : placement],
      SpecText(header.spec));
  out << fmt::format(
      R"("config":{{"cache_padding":{},"mask_batch_padding":{},)"
      R"("permuted_v":{},{}"mask_dtype":"{}"{}}},)",
      config.cache_padding, config.mask_batch_padding,
      config.v_layout == VLayout::kPermuted,
      config.v_layout == VLayout::kTiled ? R"("tiled_v":true,)" : "",
      DTypeName(config.mask_dtype),
      config.v_dtype
          ? fmt::format(R"(,"v_dtype":"{}")", DTypeName(*config.v_dtype))
          : "");
  out << fmt::format(
      R"("init":{{"dtype":"{}","max_sequences":{},"capacity":{},)"
      R"("max_batch":{}}},)",
      DTypeName(init.dtype), init.max_sequences, init.capacity, init.max_batch);
  if (header.version == 2 || Attends(header)) {
    out << fmt::format(
        R"("attend":{{"dtype":"{}","tolerance":{},"soft_cap":{},)"
        R"("sinks":[{}]}},)",
        DTypeName(header.attend_dtype), header.attend_tolerance,
        header.attend_soft_cap, fmt::join(header.attend_sinks, ","));
  }
  out << fmt::format(R"("model":{{"layers":{},"k_head_dim":{},"kv_heads":{},)"
                     R"("v_head_dim":{}}}}})",
                     header.layers, header.rows.k_head_dim,
                     header.rows.kv_heads, header.rows.v_head_dim);
  out << '\n';
  return {};
}

Status WriteTraceOp(const TraceOp& op, std::ostream& out) {
  std::string text = fmt::format(R"({{"op":"{}")", TraceOpName(op.kind));
  Status status = AppendFields(op, text);
  if (status.ok()) out << text << "}\n";
  return status;
}

}  // namespace kvtwin
