#include "core/trace/paged_trace.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "core/index.h"
#include "core/names.h"
#include "core/trace/trace.h"
#include "core/trace/trace_fields.h"

namespace kvtwin {
namespace {

constexpr std::array<std::string_view, 12> kOpNames = {
    "open",    "fork",  "append", "commit", "truncate", "free",
    "seq_len", "views", "slots",  "table",  "csr",      "usage"};
constexpr std::array<std::string_view, 2> kPlacementNames = {"lowest", "other"};
constexpr std::array<std::string_view, 2> kLayoutNames = {"token_major",
                                                          "head_major"};
constexpr std::array kAppendResults = {StatusCode::kOk, StatusCode::kCacheFull};

// A size of the pool; `name` is its key in the recording's object "pool".
struct SpecSize {
  std::string_view name;
  int PagedSpec::*number;
  double max = JsonFields::kInt32Max;
};
constexpr std::array<SpecSize, 7> kSizes = {{
    {"block_size", &PagedSpec::block_size},
    {"blocks", &PagedSpec::blocks},
    {"max_seq_len", &PagedSpec::max_seq_len},
    {"layers", &PagedSpec::layers, kTracePoolLayersMax},
    {"kv_heads", &PagedSpec::kv_heads},
    {"k_head_dim", &PagedSpec::k_head_dim},
    {"v_head_dim", &PagedSpec::v_head_dim},
}};
struct Count {
  std::string_view name;
  int PagedUsage::*number;
};
constexpr std::array<Count, 4> kCounts = {{{"free", &PagedUsage::free},
                                           {"cached", &PagedUsage::cached},
                                           {"used", &PagedUsage::used},
                                           {"shared", &PagedUsage::shared}}};

DType ValueDType(const PagedSpec& spec) {
  return spec.v_dtype.value_or(spec.dtype);
}

double PoolBytes(const PagedSpec& spec) {
  constexpr double kBlockBytes = 128;  // Bookkeeping of a block.
  const std::int64_t head_bytes = RunBytes(spec.dtype, spec.k_head_dim) +
                                  RunBytes(ValueDType(spec), spec.v_head_dim);
  const double row_bytes = static_cast<double>(head_bytes) * spec.kv_heads;
  return spec.blocks *
         (kBlockBytes + spec.block_size * row_bytes * spec.layers);
}

void NeedCount(const JsonFields& fields, std::string_view key,
               std::size_t count, std::size_t expected) {
  if (count == expected) return;
  fields.Fail(key, fmt::format("has {} numbers, expected {}", count, expected));
}

void ReadOpen(const JsonFields& fields, PagedTraceOp& op) {
  if (fields.Find("prompt") != nullptr) op.tokens = fields.Ints("prompt");
  if (fields.Find("salt") != nullptr) {
    op.prefix_key.salt = fields.String("salt");
  }
  if (fields.Find("extra") != nullptr) {
    op.prefix_key.extra = fields.Strings("extra");
  }
  op.made = fields.Int("result", 0);
  op.len = fields.Int("len", 0);
}

void ReadCommit(const JsonFields& fields, PagedTraceOp& op) {
  if (fields.Find("tokens") == nullptr) {
    op.new_tokens = fields.Int("new_tokens");
    return;
  }
  op.tokens = fields.Ints("tokens");
  if (fields.Find("new_tokens") != nullptr) {
    fields.Fail("new_tokens", "is there, and tokens too");
  }
}

// Whether `tensor` is null, or a tensor without numbers whose shape says so.
bool IsOfNoRows(const JsonValue& tensor) {
  if (tensor.type == JsonValue::Type::kNull) return true;
  const JsonValue* shape = tensor.Find("shape");
  const JsonValue* data = tensor.Find("data");
  return shape != nullptr && data != nullptr && data->IsNumbers() &&
         data->numbers.empty() && shape->IsNumbers() &&
         shape->numbers.size() > 2 && shape->numbers[2] == 0;
}

void ReadViews(const JsonFields& fields, const PagedSpec& spec,
               PagedTraceOp& op) {
  if (fields.Find("blocks") != nullptr) op.blocks = fields.Ints("blocks");
  op.start = fields.OptionalInt("start", 0);
  const JsonValue* key = fields.Need("key");
  if (key == nullptr) return;
  const JsonValue* value = fields.Find("value");
  if (IsOfNoRows(*key)) {
    if (value == nullptr || IsOfNoRows(*value)) return;
    fields.Fail("value", "has rows, key has none");
    return;
  }
  op.key = ReadTensor(fields, "key", spec.dtype);
  if (value == nullptr) return;
  op.value = ReadTensor(fields, "value", ValueDType(spec));
  if (fields.ok() && op.value->shape[2] != op.key->shape[2]) {
    fields.Fail("value", fmt::format("has {} rows, key has {}",
                                     op.value->shape[2], op.key->shape[2]));
  }
}

void ReadTable(const JsonFields& fields, PagedTraceOp& op) {
  op.sequences = fields.Ints("seqs");
  op.table.columns = fields.Int("columns", 0);
  op.table.blocks = fields.Ints("blocks");
  op.table.seq_lens = fields.Ints("seq_lens");
  const std::size_t rows = op.sequences.size();
  NeedCount(fields, "blocks", op.table.blocks.size(),
            rows * AsSize(op.table.columns));
  NeedCount(fields, "seq_lens", op.table.seq_lens.size(), rows);
}

void ReadCsr(const JsonFields& fields, PagedTraceOp& op) {
  op.sequences = fields.Ints("seqs");
  op.csr = {fields.Ints("indptr"), fields.Ints("indices"),
            fields.Ints("last_page_len")};
  const std::size_t rows = op.sequences.size();
  NeedCount(fields, "indptr", op.csr.indptr.size(), rows + 1);
  NeedCount(fields, "last_page_len", op.csr.last_page_len.size(), rows);
}

template <class Numbers>
void AppendNumbers(std::string_view key, const Numbers& numbers,
                   std::string& text) {
  text += fmt::format(R"(,"{}":[{}])", key, fmt::join(numbers, ","));
}

Status AppendOpen(const PagedTraceOp& op, std::string& text) {
  if (op.tokens) AppendNumbers("prompt", *op.tokens, text);
  if (!op.prefix_key.salt.empty()) {
    text += fmt::format(R"(,"salt":{})", JsonString(op.prefix_key.salt));
  }
  if (!op.prefix_key.extra.empty()) {
    std::vector<std::string> extra;
    for (const std::string& extra_key : op.prefix_key.extra) {
      extra.push_back(JsonString(extra_key));
    }
    AppendNumbers("extra", extra, text);
  }
  text += fmt::format(R"(,"len":{},"result":{})", op.len, op.made);
  // Reads the line back: it differs if the prefix key is not UTF-8 text, or a
  // string of its list has a line end.
  JsonValue object;
  std::string problem = ParseJsonLine(text + "}", object);
  PagedTraceOp read;
  ReadOpen(JsonFields(object, "", problem), read);
  if (read.prefix_key == op.prefix_key) return {};
  return {StatusCode::kInvalidArgument,
          "the prefix key is not text, which no recording can hold"};
}

Status AppendRows(const PagedTraceOp& op, std::string& text) {
  text += fmt::format(R"(,"seq":{},"layer":{})", op.seq, op.layer);
  if (op.blocks) AppendNumbers("blocks", *op.blocks, text);
  if (op.start) text += fmt::format(R"(,"start":{})", *op.start);
  if (op.kind == PagedTraceOpKind::kAppend) {
    text += fmt::format(R"(,"result":"{}")", StatusName(op.result));
  }
  if (!op.key) {
    text += R"(,"key":null)";
    return {};
  }
  Status status = AppendTensor("key", *op.key, text);
  if (!status.ok() || !op.value) return status;
  return AppendTensor("value", *op.value, text);
}

void AppendTables(const PagedTraceOp& op, std::string& text) {
  AppendNumbers("seqs", op.sequences, text);
  if (op.kind == PagedTraceOpKind::kCsr) {
    AppendNumbers("indptr", op.csr.indptr, text);
    AppendNumbers("indices", op.csr.indices, text);
    AppendNumbers("last_page_len", op.csr.last_page_len, text);
    return;
  }
  text += fmt::format(R"(,"columns":{})", op.table.columns);
  AppendNumbers("blocks", op.table.blocks, text);
  AppendNumbers("seq_lens", op.table.seq_lens, text);
}

// Appends the fields of an operation, except tensors and tables.
void AppendPlain(const PagedTraceOp& op, std::string& text) {
  if (op.kind == PagedTraceOpKind::kUsage) {
    for (const Count& count : kCounts) {
      text += fmt::format(R"(,"{}":{})", count.name, op.usage.*count.number);
    }
    return;
  }
  text += fmt::format(R"(,"seq":{})", op.seq);
  if (op.kind == PagedTraceOpKind::kFree) return;
  if (op.kind == PagedTraceOpKind::kSlots) {
    text += fmt::format(R"(,"begin":{})", op.begin);
    AppendNumbers("slots", op.slots, text);
  } else if (op.kind != PagedTraceOpKind::kCommit) {
    text += fmt::format(R"(,"len":{})", op.len);
  } else if (op.tokens) {
    AppendNumbers("tokens", *op.tokens, text);
  } else {
    text += fmt::format(R"(,"new_tokens":{})", op.new_tokens);
  }
  if (op.kind == PagedTraceOpKind::kFork) {
    text += fmt::format(R"(,"result":{})", op.made);
  }
}

Status AppendFields(const PagedTraceOp& op, std::string& text) {
  switch (op.kind) {
    case PagedTraceOpKind::kOpen:
      return AppendOpen(op, text);
    case PagedTraceOpKind::kAppend:
    case PagedTraceOpKind::kViews:
      return AppendRows(op, text);
    case PagedTraceOpKind::kTable:
    case PagedTraceOpKind::kCsr:
      AppendTables(op, text);
      return {};
    default:
      AppendPlain(op, text);
      return {};
  }
}

// Reads the rules of a pool from the object `cache` of the first line.
PoolRules ReadRules(const JsonFields& cache, bool visibility_only) {
  PoolRules rules;
  const auto said = [&](std::string_view key) {
    return cache.Find(key) != nullptr && cache.Bool(key);
  };
  rules.deduplicates = said("deduplicates");
  rules.recomputes_last = said("recomputes_last");
  rules.window = cache.OptionalInt("window", 0);
  if (rules.any() && !visibility_only) {
    cache.Fail(rules.window         ? "window"
               : rules.deduplicates ? "deduplicates"
                                    : "recomputes_last",
               "needs the placement other");
  }
  return rules;
}

std::string RulesText(const PoolRules& rules) {
  std::string text;
  if (rules.deduplicates) text += R"(,"deduplicates":true)";
  if (rules.recomputes_last) text += R"(,"recomputes_last":true)";
  if (rules.window) text += fmt::format(R"(,"window":{})", *rules.window);
  return text;
}

}  // namespace

std::string_view TraceOpName(PagedTraceOpKind kind) {
  return At(kOpNames, kind);
}

PagedTraceHeader ReadPagedHeader(const JsonFields& fields,
                                 std::string& problem) {
  PagedTraceHeader header;
  if (const JsonValue* producer = fields.Find("producer")) {
    header.producer = producer->text;
  }
  header.visibility_only = fields.Name("placement", kPlacementNames) == 1;
  header.rules = ReadRules(fields.Object("cache"), header.visibility_only);
  const JsonFields pool = fields.Object("pool");
  PagedSpec& spec = header.spec;
  for (const SpecSize& size : kSizes) {
    spec.*size.number = pool.Int(size.name, 1, size.max);
  }
  spec.dtype = kRowDTypes[pool.Name("dtype", kRowDTypeNames)];
  if (pool.Find("v_dtype") != nullptr) {
    spec.v_dtype = kRowDTypes[pool.Name("v_dtype", kRowDTypeNames)];
  }
  if (pool.Find("layout") != nullptr) {
    spec.layout = static_cast<PagedLayout>(pool.Name("layout", kLayoutNames));
  }
  // No pool is made for the placement "other".
  if (!problem.empty() || header.visibility_only) return header;
  if (const double bytes = PoolBytes(spec); bytes > kTraceCacheBytesMax) {
    problem = fmt::format(
        "the pool would need {:.3g} bytes, this program stops at {:.3g}: "
        "blocks {}, block_size {}, layers {}",
        bytes, kTraceCacheBytesMax, spec.blocks, spec.block_size, spec.layers);
  }
  return header;
}

PagedTraceOp ReadPagedOp(const JsonFields& fields, const PagedSpec& spec) {
  PagedTraceOp op;
  op.kind = static_cast<PagedTraceOpKind>(fields.Name("op", kOpNames));
  if (!fields.ok()) return op;
  const bool of_all = op.kind == PagedTraceOpKind::kOpen ||
                      op.kind == PagedTraceOpKind::kTable ||
                      op.kind == PagedTraceOpKind::kCsr ||
                      op.kind == PagedTraceOpKind::kUsage;
  if (!of_all) op.seq = fields.Int("seq");
  switch (op.kind) {
    case PagedTraceOpKind::kOpen:
      ReadOpen(fields, op);
      break;
    case PagedTraceOpKind::kFork:
      op.len = fields.Int("len");
      op.made = fields.Int("result", 0);
      break;
    case PagedTraceOpKind::kAppend:
      op.layer = fields.Int("layer", 0, spec.layers - 1);
      op.key = ReadTensor(fields, "key", spec.dtype);
      op.value = ReadTensor(fields, "value", ValueDType(spec));
      op.result = ReadResult(fields, kAppendResults);
      op.start = fields.OptionalInt("start", 0);
      break;
    case PagedTraceOpKind::kCommit:
      ReadCommit(fields, op);
      break;
    case PagedTraceOpKind::kTruncate:
    case PagedTraceOpKind::kSeqLen:
      op.len = fields.Int("len");
      break;
    case PagedTraceOpKind::kFree:
      break;
    case PagedTraceOpKind::kViews:
      op.layer = fields.Int("layer", 0, spec.layers - 1);
      ReadViews(fields, spec, op);
      break;
    case PagedTraceOpKind::kSlots:
      op.begin = fields.Int("begin");
      op.slots = fields.Ints("slots");
      break;
    case PagedTraceOpKind::kTable:
      ReadTable(fields, op);
      break;
    case PagedTraceOpKind::kCsr:
      ReadCsr(fields, op);
      break;
    case PagedTraceOpKind::kUsage:
      for (const Count& count : kCounts) {
        op.usage.*count.number = fields.Int(count.name, 0);
      }
      break;
  }
  return op;
}

Status WriteTraceHeader(const PagedTraceHeader& header, std::ostream& out) {
  const PagedSpec& spec = header.spec;
  out << fmt::format(R"({{"kvtrace":1,"producer":{},"placement":"{}",)"
                     R"("cache":{{"type":"paged"{}}},"pool":{{)",
                     JsonString(header.producer),
                     kPlacementNames[header.visibility_only ? 1 : 0],
                     RulesText(header.rules));
  for (const SpecSize& size : kSizes) {
    out << fmt::format(R"("{}":{},)", size.name, spec.*size.number);
  }
  out << fmt::format(R"("dtype":"{}",)", DTypeName(spec.dtype));
  if (spec.v_dtype) {
    out << fmt::format(R"("v_dtype":"{}",)", DTypeName(*spec.v_dtype));
  }
  out << fmt::format(R"("layout":"{}"}}}})", At(kLayoutNames, spec.layout))
      << '\n';
  return {};
}

Status WriteTraceOp(const PagedTraceOp& op, std::ostream& out) {
  std::string text = fmt::format(R"({{"op":"{}")", TraceOpName(op.kind));
  Status status = AppendFields(op, text);
  if (status.ok()) out << text << "}\n";
  return status;
}

}  // namespace kvtwin
