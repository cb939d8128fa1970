#include "core/trace/paged_trace.h"

#include <fmt/format.h>

#include <array>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/names.h"
#include "core/trace/trace.h"
#include "core/trace/trace_fields.h"

namespace kvtwin {
namespace {

constexpr std::array<std::string_view, 14> kOpNames = {
    "open",  "fork",  "append", "commit", "truncate", "free",  "seq_len",
    "views", "slots", "table",  "csr",    "usage",    "media", "attend"};
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
  if (!spec.groups.empty()) {
    double bytes = 0;
    for (const PagedSpec& group : spec.groups) bytes += PoolBytes(group);
    return bytes;
  }
  constexpr double kBlockBytes = 128;  // Bookkeeping of a block.
  const std::int64_t head_bytes = RunBytes(spec.dtype, spec.k_head_dim) +
                                  RunBytes(ValueDType(spec), spec.v_head_dim);
  const double row_bytes = static_cast<double>(head_bytes) * spec.kv_heads;
  return spec.blocks *
         (kBlockBytes + spec.block_size * row_bytes * spec.layers);
}

// A list of a table, and how many numbers it must have.
struct ListSize {
  std::string_view key;
  std::size_t count = 0;
  std::size_t expected = 0;
};

std::vector<ListSize> ListsOf(const PagedTraceOp& op) {
  const std::size_t rows = op.sequences.size();
  if (op.kind == PagedTraceOpKind::kTable) {
    return {{"blocks", op.table.blocks.size(), rows * AsSize(op.table.columns)},
            {"seq_lens", op.table.seq_lens.size(), rows}};
  }
  if (op.kind != PagedTraceOpKind::kCsr) return {};
  return {{"indptr", op.csr.indptr.size(), rows + 1},
          {"last_page_len", op.csr.last_page_len.size(), rows}};
}

std::string CountText(std::size_t count, std::size_t expected) {
  return fmt::format("has {} numbers, expected {}", count, expected);
}

void NeedCount(const JsonFields& fields, std::string_view key,
               std::size_t count, std::size_t expected) {
  if (count == expected) return;
  fields.Fail(key, CountText(count, expected));
}

void NeedLists(const JsonFields& fields, const PagedTraceOp& op) {
  for (const auto& [key, count, expected] : ListsOf(op)) {
    NeedCount(fields, key, count, expected);
  }
}

// Reads the media of a prompt: their hashes, and the position of each.
void ReadMedia(const JsonFields& fields, PagedTraceOp& op) {
  if (fields.Find("media") == nullptr) return;
  const std::vector<std::string> hashes = fields.Strings("media");
  const std::vector<int> positions = fields.Ints("media_at");
  NeedCount(fields, "media_at", positions.size(), hashes.size());
  if (!fields.ok()) return;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    op.prefix_key.media.push_back({positions[i], hashes[i]});
  }
}

void ReadOpen(const JsonFields& fields, PagedTraceOp& op) {
  ReadMedia(fields, op);
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
  if (spec.states) {
    op.positions = fields.Ints("positions");
    if (op.start) fields.Fail("start", "is there, and positions too");
  }
  const JsonValue* key = fields.Need("key");
  if (key == nullptr) return;
  const JsonValue* value = fields.Find("value");
  if (IsOfNoRows(*key)) {
    if (op.positions) NeedCount(fields, "positions", op.positions->size(), 0);
    if (value == nullptr || IsOfNoRows(*value)) return;
    fields.Fail("value", "has rows, key has none");
    return;
  }
  op.key = ReadTensor(fields, "key", spec.dtype);
  if (op.positions && fields.ok()) {
    NeedCount(fields, "positions", op.positions->size(),
              AsSize(op.key->shape[2]));
  }
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
  NeedLists(fields, op);
}

void ReadCsr(const JsonFields& fields, PagedTraceOp& op) {
  op.sequences = fields.Ints("seqs");
  op.csr = {fields.Ints("indptr"), fields.Ints("indices"),
            fields.Ints("last_page_len")};
  NeedLists(fields, op);
}

void ReadAttend(const JsonFields& fields, PagedTraceOp& op) {
  op.sequences = fields.Ints("seqs");
  op.query_rows = fields.Ints("rows");
  op.key = ReadTensor(fields, "query", DType::kF32);
  op.value = ReadTensor(fields, "out", DType::kF32);
  op.soft_cap = ReadSoftCap(fields);
  op.sinks = ReadSinks(fields);
  NeedCount(fields, "rows", op.query_rows.size(), op.sequences.size());
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
  if (!op.prefix_key.media.empty()) {
    std::vector<std::string> hashes;
    std::vector<int> positions;
    for (const PrefixMedia& media : op.prefix_key.media) {
      hashes.push_back(JsonString(media.hash));
      positions.push_back(media.position);
    }
    AppendNumbers("media", hashes, text);
    AppendNumbers("media_at", positions, text);
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
  if (op.positions) AppendNumbers("positions", *op.positions, text);
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

Status AppendAttend(const PagedTraceOp& op, std::string& text) {
  text += fmt::format(R"(,"layer":{})", op.layer);
  AppendNumbers("seqs", op.sequences, text);
  AppendNumbers("rows", op.query_rows, text);
  if (op.soft_cap > 0) text += fmt::format(R"(,"soft_cap":{})", op.soft_cap);
  if (!op.sinks.empty()) AppendNumbers("sinks", op.sinks, text);
  Status status = AppendTensor("query", *op.key, text);
  return status.ok() ? AppendTensor("out", *op.value, text) : status;
}

void AppendGroup(const PagedTraceOp& op, std::string& text) {
  if (op.group > 0) text += fmt::format(R"(,"group":{})", op.group);
}

void AppendTables(const PagedTraceOp& op, std::string& text) {
  AppendGroup(op, text);
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
  if (op.kind == PagedTraceOpKind::kMedia) {
    text += fmt::format(R"(,"at":{},"hash":{})", op.media.position,
                        JsonString(op.media.hash));
  } else if (op.kind == PagedTraceOpKind::kSlots) {
    AppendGroup(op, text);
    text += fmt::format(R"(,"begin":{})", op.begin);
    AppendNumbers("slots", op.slots, text);
  } else if (op.kind != PagedTraceOpKind::kCommit) {
    text += fmt::format(R"(,"len":{})", op.len);
  } else if (op.tokens) {
    AppendNumbers("tokens", *op.tokens, text);
  } else {
    text += fmt::format(R"(,"new_tokens":{})", op.new_tokens);
  }
  if (op.kept) text += fmt::format(R"(,"kept":{})", *op.kept);
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
    case PagedTraceOpKind::kAttend:
      return AppendAttend(op, text);
    default:
      AppendPlain(op, text);
      return {};
  }
}

// Returns the name of the first rule that a pool follows.
std::string_view FirstOf(const PoolRules& rules) {
  if (rules.window) return "window";
  if (rules.deduplicates) return "deduplicates";
  if (rules.recomputes_last) return "recomputes_last";
  if (rules.states_in_place) return "states_in_place";
  return rules.one_stock ? "one_stock" : "no_reserve";
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
  rules.states_in_place = said("states_in_place");
  rules.one_stock = said("one_stock");
  rules.no_reserve = said("no_reserve");
  if (rules.any() && !visibility_only) {
    cache.Fail(FirstOf(rules), "needs the placement other");
  }
  return rules;
}

std::string RulesText(const PoolRules& rules) {
  std::string text;
  if (rules.deduplicates) text += R"(,"deduplicates":true)";
  if (rules.recomputes_last) text += R"(,"recomputes_last":true)";
  if (rules.window) text += fmt::format(R"(,"window":{})", *rules.window);
  if (rules.states_in_place) text += R"(,"states_in_place":true)";
  if (rules.one_stock) text += R"(,"one_stock":true)";
  if (rules.no_reserve) text += R"(,"no_reserve":true)";
  return text;
}

// Reads a pool without groups, or a group, which has no max_seq_len.
PagedSpec ReadPoolSpec(const JsonFields& pool, bool is_group) {
  PagedSpec spec;
  for (const SpecSize& size : kSizes) {
    if (is_group && size.number == &PagedSpec::max_seq_len) continue;
    spec.*size.number = pool.Int(size.name, 1, size.max);
  }
  spec.dtype = kRowDTypes[pool.Name("dtype", kRowDTypeNames)];
  if (pool.Find("v_dtype") != nullptr) {
    spec.v_dtype = kRowDTypes[pool.Name("v_dtype", kRowDTypeNames)];
  }
  if (pool.Find("layout") != nullptr) {
    spec.layout = static_cast<PagedLayout>(pool.Name("layout", kLayoutNames));
  }
  if (!is_group) return spec;
  spec.window = pool.OptionalInt("window", 1);
  spec.states = pool.Find("states") != nullptr && pool.Bool("states");
  return spec;
}

// Reads a pool with groups, completed.
PagedSpec ReadPoolGroups(const JsonFields& pool, const JsonValue& groups,
                         std::string& problem) {
  PagedSpec spec;
  spec.max_seq_len = pool.Int("max_seq_len", 1);
  const bool is_list = groups.type == JsonValue::Type::kList &&
                       groups.strings == 0 && groups.numbers.empty();
  if (!is_list || groups.items.empty() ||
      groups.items.size() > AsSize(kTracePoolGroupsMax)) {
    pool.Wrong("groups", groups,
               fmt::format("a list of 1 to {} objects", kTracePoolGroupsMax));
    return spec;
  }
  for (std::size_t i = 0; i < groups.items.size() && problem.empty(); ++i) {
    const std::string path = fmt::format("pool.groups[{}].", i);
    if (groups.items[i].type != JsonValue::Type::kObject) {
      pool.Wrong(fmt::format("groups[{}]", i), groups.items[i], "an object");
      return spec;
    }
    const JsonFields group(groups.items[i], path, problem);
    spec.groups.push_back(ReadPoolSpec(group, /*is_group=*/true));
  }
  if (!problem.empty()) return spec;
  if (const Status status = CheckPagedSpec(spec); !status.ok()) {
    problem = status.message();
    return spec;
  }
  spec = Completed(spec);
  if (spec.layers > kTracePoolLayersMax) {
    pool.Fail("groups", fmt::format("have {} layers, at most {} are allowed",
                                    spec.layers, kTracePoolLayersMax));
  }
  return spec;
}

std::string PoolSpecText(const PagedSpec& spec, bool is_group) {
  std::string text;
  for (const SpecSize& size : kSizes) {
    if (is_group && size.number == &PagedSpec::max_seq_len) continue;
    text += fmt::format(R"("{}":{},)", size.name, spec.*size.number);
  }
  text += fmt::format(R"("dtype":"{}",)", DTypeName(spec.dtype));
  if (spec.v_dtype) {
    text += fmt::format(R"("v_dtype":"{}",)", DTypeName(*spec.v_dtype));
  }
  text += fmt::format(R"("layout":"{}")", At(kLayoutNames, spec.layout));
  if (is_group && spec.window) {
    text += fmt::format(R"(,"window":{})", *spec.window);
  }
  if (is_group && spec.states) text += R"(,"states":true)";
  return text;
}

// Reads the fields that only lines of pools with groups have.
void ReadOfGroups(const JsonFields& fields, const PagedSpec& spec,
                  PagedTraceOp& op) {
  const bool has_media = fields.Find("media") != nullptr;
  if (spec.groups.empty()) {
    if (op.kind == PagedTraceOpKind::kMedia) {
      fields.Fail("op", "media is for pools with groups");
    }
    if (op.kind == PagedTraceOpKind::kOpen && has_media) {
      fields.Fail("media", "is for pools with groups");
    }
    return;
  }
  const bool by_group = op.kind == PagedTraceOpKind::kSlots ||
                        op.kind == PagedTraceOpKind::kTable ||
                        op.kind == PagedTraceOpKind::kCsr;
  if (by_group && fields.Find("group") != nullptr) {
    op.group = fields.Int("group", 0, Size(spec.groups) - 1);
  }
  const bool keeps = op.kind == PagedTraceOpKind::kFork ||
                     op.kind == PagedTraceOpKind::kTruncate;
  if (keeps) op.kept = fields.OptionalInt("kept", 0);
  if (op.kind == PagedTraceOpKind::kMedia) {
    op.media = {fields.Int("at", 0), fields.String("hash")};
  }
}

}  // namespace

std::string_view TraceOpName(PagedTraceOpKind kind) {
  return At(kOpNames, kind);
}

PagedTraceHeader ReadPagedHeader(const JsonFields& fields, int version,
                                 std::string& problem) {
  PagedTraceHeader header;
  if (const JsonValue* producer = fields.Find("producer")) {
    header.producer = producer->text;
  }
  header.visibility_only = fields.Name("placement", kPlacementNames) == 1;
  header.rules = ReadRules(fields.Object("cache"), header.visibility_only);
  if (version == 2) {
    header.attention.emplace();
    if (fields.Find("attend") != nullptr) {
      const JsonFields attend = fields.Object("attend");
      header.attention = ReadTraceAttention(attend);
      for (const char* key : {"soft_cap", "sinks"}) {
        if (attend.Find(key) == nullptr) continue;
        attend.Fail(key, "is a field of each line");
      }
    }
  }
  const JsonFields pool = fields.Object("pool");
  PagedSpec& spec = header.spec;
  const JsonValue* const groups = pool.Find("groups");
  spec = groups == nullptr ? ReadPoolSpec(pool, /*is_group=*/false)
                           : ReadPoolGroups(pool, *groups, problem);
  PoolRules without = header.rules;
  without.states_in_place = without.one_stock = without.no_reserve = false;
  if (groups != nullptr && without.any()) {
    pool.Fail("groups", fmt::format("and the rule {} exclude each other",
                                    FirstOf(without)));
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

PagedTraceOp ReadPagedOp(const JsonFields& fields,
                         const PagedTraceHeader& header) {
  const PagedSpec& spec = header.spec;
  PagedTraceOp op;
  op.kind = static_cast<PagedTraceOpKind>(fields.Name("op", kOpNames));
  if (!fields.ok()) return op;
  const bool of_all = op.kind == PagedTraceOpKind::kOpen ||
                      op.kind == PagedTraceOpKind::kTable ||
                      op.kind == PagedTraceOpKind::kCsr ||
                      op.kind == PagedTraceOpKind::kUsage ||
                      op.kind == PagedTraceOpKind::kAttend;
  if (!of_all) op.seq = fields.Int("seq");
  const bool of_layer = op.kind == PagedTraceOpKind::kAppend ||
                        op.kind == PagedTraceOpKind::kViews ||
                        op.kind == PagedTraceOpKind::kAttend;
  if (of_layer) op.layer = fields.Int("layer", 0, spec.layers - 1);
  ReadOfGroups(fields, spec, op);
  if (!fields.ok()) return op;
  const PagedSpec& stored = SpecOfLayer(spec, op.layer);
  switch (op.kind) {
    case PagedTraceOpKind::kOpen:
      ReadOpen(fields, op);
      break;
    case PagedTraceOpKind::kFork:
      op.len = fields.Int("len");
      op.made = fields.Int("result", 0);
      break;
    case PagedTraceOpKind::kAppend:
      op.key = ReadTensor(fields, "key", stored.dtype);
      op.value = ReadTensor(fields, "value", ValueDType(stored));
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
    case PagedTraceOpKind::kMedia:
      break;
    case PagedTraceOpKind::kViews:
      ReadViews(fields, stored, op);
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
    case PagedTraceOpKind::kAttend:
      if (!header.attention) fields.Fail("op", "attend needs kvtrace 2");
      ReadAttend(fields, op);
      break;
    case PagedTraceOpKind::kUsage:
      for (const Count& count : kCounts) {
        op.usage.*count.number = fields.Int(count.name, 0);
      }
      break;
  }
  return op;
}

Result<PagedTraceOp> AsRead(PagedTraceOp op, const PagedTraceHeader& header) {
  const auto least = [](std::string_view key, int number) -> Status {
    if (number >= 0) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("{} is {}, it must be at least 0", key, number)};
  };
  for (const Count& count : kCounts) {
    Status status = least(count.name, op.usage.*count.number);
    if (!status.ok()) return status;
  }
  if (Status status = least("columns", op.table.columns); !status.ok()) {
    return status;
  }
  for (const auto& [key, count, expected] : ListsOf(op)) {
    if (count == expected) continue;
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} {}", key, CountText(count, expected)));
  }
  const bool attends = op.kind == PagedTraceOpKind::kAttend;
  const PagedSpec& stored = SpecOfLayer(header.spec, op.layer);
  const DType key = attends ? DType::kF32 : stored.dtype;
  const DType value = attends ? DType::kF32 : ValueDType(stored);
  if (op.key) {
    Status status = StoreTensor(attends ? "query" : "key", key, *op.key);
    if (!status.ok()) return status;
  }
  if (op.value) {
    Status status = StoreTensor(attends ? "out" : "value", value, *op.value);
    if (!status.ok()) return status;
  }
  return op;
}

Status WriteTraceHeader(const PagedTraceHeader& header, std::ostream& out) {
  const PagedSpec& spec = header.spec;
  const std::string attend =
      header.attention
          ? fmt::format(R"("attend":{{"dtype":"{}","tolerance":{}}},)",
                        DTypeName(header.attention->dtype),
                        header.attention->tolerance)
          : "";
  out << fmt::format(R"({{"kvtrace":{},"producer":{},"placement":"{}",)"
                     R"("cache":{{"type":"paged"{}}},{}"pool":{{)",
                     header.attention ? 2 : 1, JsonString(header.producer),
                     kPlacementNames[header.visibility_only ? 1 : 0],
                     RulesText(header.rules), attend);
  if (spec.groups.empty()) {
    out << PoolSpecText(spec, /*is_group=*/false);
  } else {
    std::vector<std::string> groups;
    for (const PagedSpec& group : spec.groups) {
      groups.push_back("{" + PoolSpecText(group, /*is_group=*/true) + "}");
    }
    out << fmt::format(R"("max_seq_len":{},"groups":[{}])", spec.max_seq_len,
                       fmt::join(groups, ","));
  }
  out << "}}\n";
  return {};
}

Status WriteTraceOp(const PagedTraceOp& op, std::ostream& out) {
  std::string text = fmt::format(R"({{"op":"{}")", TraceOpName(op.kind));
  Status status = AppendFields(op, text);
  if (status.ok()) out << text << "}\n";
  return status;
}

}  // namespace kvtwin
