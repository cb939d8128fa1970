#include "props/paged/paged_history.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <locale>
#include <sstream>
#include <utility>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/names.h"
#include "props/history/line_reader.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

constexpr int kTokensMax = 1 << 14;  // Limit of parsed histories.
constexpr std::size_t kOpsMax = 100000;
struct Setting {
  std::string_view name;
  int PagedSpec::*number;
};
constexpr std::array<Setting, 7> kSettings = {{
    {"block", &PagedSpec::block_size},
    {"blocks", &PagedSpec::blocks},
    {"most", &PagedSpec::max_seq_len},
    {"layers", &PagedSpec::layers},
    {"heads", &PagedSpec::kv_heads},
    {"kdim", &PagedSpec::k_head_dim},
    {"vdim", &PagedSpec::v_head_dim},
}};

bool IsTooLarge(const PagedSpec& spec) {
  const std::int64_t rows =
      std::int64_t{spec.blocks} * spec.block_size * spec.layers * spec.kv_heads;
  return rows * std::max(spec.k_head_dim, spec.v_head_dim) > 64 * kTokensMax;
}

void ReadSetting(std::string_view key, std::string_view value,
                 PagedSpec& spec) {
  if (key == "layout" && (value == "head" || value == "token")) {
    spec.layout =
        value == "head" ? PagedLayout::kHeadMajor : PagedLayout::kTokenMajor;
    return;
  }
  if (key == "dtype") return void(spec.dtype = ReadRowDType(value));
  if (key == "vdtype") return void(spec.v_dtype = ReadRowDType(value));
  const auto known = std::ranges::find(kSettings, key, &Setting::name);
  if (known == kSettings.end()) {
    throw BadLine{key, key == "layout"
                           ? fmt::format("{} is not a layout", Quoted(value))
                           : fmt::format("{} is not a setting", Quoted(key))};
  }
  const int number = ReadSize(value);
  if (number < 1 || number > kTokensMax) {
    throw BadLine{value, fmt::format("{} is {}, it must be from 1 to {}", key,
                                     number, kTokensMax)};
  }
  spec.*known->number = number;
}

PagedOp ReadOp(std::string_view text) {
  const auto words = Split(text, kBlanks);
  if (words.empty()) throw BadLine{text, "an operation is empty"};
  PagedOp op;
  const auto name = std::ranges::find(kPagedOpNames, words[0]);
  if (name == kPagedOpNames.end() || words.size() != 4) {
    throw BadLine{words[0],
                  fmt::format("{} is not an operation with three numbers",
                              Quoted(words[0]))};
  }
  op.kind = static_cast<PagedOpKind>(name - kPagedOpNames.begin());
  std::size_t word = 1;
  for (int* number : {&op.a, &op.b, &op.c}) {
    LineReader reader(words[word++]);
    *number = reader.Number();
    reader.ExpectEnd();
  }
  return op;
}

}  // namespace

std::string ToText(const PagedHistory& history) {
  const PagedSpec& spec = history.spec;
  std::string text = "kvp1";
  for (const Setting& setting : kSettings) {
    text += fmt::format(" {}={}", setting.name, spec.*setting.number);
  }
  text += fmt::format(" dtype={}", DTypeName(spec.dtype));
  if (spec.v_dtype) text += fmt::format(" vdtype={}", DTypeName(*spec.v_dtype));
  if (spec.layout == PagedLayout::kHeadMajor) text += " layout=head";
  std::ostringstream ops;
  ops.imbue(std::locale::classic());  // 1000 is not 1,000.
  for (const PagedOp& op : history.ops) ops << " | " << op;
  return text + ops.str();
}

Result<PagedHistory> ParsePagedHistory(std::string_view text) {
  try {
    const LineParts parts = SplitLine(text, "kvp1");
    if (parts.operations.size() > kOpsMax) {
      throw BadLine{text, fmt::format("more than {} operations", kOpsMax)};
    }
    PagedHistory history;
    ReadSettings(parts.settings,
                 [&](std::string_view key, std::string_view value) {
                   ReadSetting(key, value, history.spec);
                 });
    for (const std::string_view operation : parts.operations) {
      history.ops.push_back(ReadOp(operation));
    }
    if (IsTooLarge(history.spec)) {
      throw BadLine{text, "a pool of this size is too large for a test"};
    }
    if (Status status = CheckPagedSpec(history.spec); !status.ok()) {
      return status;
    }
    return history;
  } catch (const BadLine& bad) {
    return StatusOf(bad, text);
  }
}

PagedHistory MakePagedHistory(std::uint64_t seed, std::uint64_t number) {
  return DrawPagedHistory(SeededPick(seed, number));
}

namespace {

// Makes one dimension of the pool large.
void Enlarge(const Pick& pick, PagedSpec& spec) {
  const int power = 1 << pick(4, 6);
  const int near = power + pick(-1, 1);
  switch (pick(0, 6)) {
    case 0:
    case 5:
      spec.block_size = near;
      spec.max_seq_len = pick(1, 4 * near);
      break;
    case 1:
    case 6:
      spec.blocks = 4 * near;
      spec.max_seq_len = pick(60, 300);
      break;
    case 2:
      spec.layers = near;
      break;
    case 3:
      spec.k_head_dim = 4 * near + pick(-1, 1);
      break;
    default:
      spec.kv_heads = near;
      break;
  }
}

// Draws an alphabet of PagedToken: the first for half of the histories.
int DrawAlphabet(const Pick& pick) {
  const int other = pick(0, 1);
  return other * pick(0, kPagedAlphabets - 1);
}

// Draws the numbers of a history's operations, so that their prefix keys are
// easily confused and their tokens are of one alphabet.
class PagedNumbers {
 public:
  explicit PagedNumbers(const Pick& pick)
      : pick_(pick),
        way_(pick(0, 3)),
        keys_(4 * pick(0, PagedKeyCount() / 4 - 1)),
        pair_(pick(1, 3)),
        alphabet_(DrawAlphabet(pick)) {}

  // Draws the `b` of an append of many tokens: half of these appends fill the
  // pool, or almost fill it.
  int LongB(const PagedSpec& spec) const {
    const int most = TokensOf(spec);
    const int least = pick_(0, 1) == 0 ? 0 : std::max(0, most - 2);
    return kLongAppend + pick_(least, most);
  }

  int C(PagedOpKind kind) const {
    if (kind == PagedOpKind::kAppend) return alphabet_ * 256 + pick_(0, 255);
    if (kind != PagedOpKind::kOpen) return pick_(0, 255);
    if (way_ < 2) return pick_(0, 3) == 0 ? pick_(1, 3) : 0;
    // Two keys that are easily confused, or four.
    return keys_ + (way_ == 2 ? pair_ * pick_(0, 1) : pick_(0, 3));
  }

 private:
  const Pick& pick_;
  const int way_;
  const int keys_;
  const int pair_;  // Offset of the second of two similar keys.
  const int alphabet_;
};

// Widens heads to whole blocks of their dtypes, and makes the pool small
// enough.
void Fit(PagedSpec& spec) {
  const auto widen = [](DType dtype, int& head_dim) {  // To whole blocks.
    constexpr int kBlock = kBlockElements;
    if (!IsBlockDType(dtype)) return;
    head_dim =
        head_dim < kBlock ? head_dim * kBlock : head_dim / kBlock * kBlock;
  };
  widen(spec.dtype, spec.k_head_dim);
  widen(spec.v_dtype.value_or(spec.dtype), spec.v_head_dim);
  while (IsTooLarge(spec)) spec.blocks = (spec.blocks + 1) / 2;
}

}  // namespace

PoolStorage StorageOf(const PagedSpec& spec) {
  return {spec.dtype, spec.v_dtype, spec.layout};
}

void UseStorage(const PoolStorage& storage, PagedSpec& spec) {
  const auto narrow = [](DType before, DType now, int& head_dim) {
    const bool was_widened = IsBlockDType(before) && !IsBlockDType(now);
    if (was_widened && head_dim % kBlockElements == 0) {
      head_dim = AsInt(head_dim / kBlockElements);
    }
  };
  const DType v_dtype = storage.v_dtype.value_or(storage.dtype);
  narrow(spec.dtype, storage.dtype, spec.k_head_dim);
  narrow(spec.v_dtype.value_or(spec.dtype), v_dtype, spec.v_head_dim);
  spec.dtype = storage.dtype;
  spec.v_dtype = storage.v_dtype;
  spec.layout = storage.layout;
  Fit(spec);
}

PagedHistory DrawPagedHistory(const Pick& pick) {
  PagedHistory history;
  PagedSpec& spec = history.spec;
  spec.block_size = pick(1, 5);
  spec.blocks = pick(1, 14);
  spec.max_seq_len = pick(1, 60);
  spec.layers = pick(1, 4);
  spec.kv_heads = pick(1, 3);
  spec.k_head_dim = pick(1, 3);
  spec.v_head_dim = pick(1, 3);
  const bool large = pick(0, 49) == 0;
  if (large) Enlarge(pick, spec);
  const auto type = [&] { return kRowDTypes.at(AsSize(pick(0, 5))); };
  spec.dtype = type();
  if (pick(0, 1) == 1) spec.v_dtype = type();
  Fit(spec);
  if (pick(0, 1) == 1) spec.layout = PagedLayout::kHeadMajor;
  // The weights are random, so that every kind dominates in some histories.
  std::vector<PagedOpKind> kinds;
  for (std::size_t i = 0; i < kPagedOpNames.size(); ++i) {
    const auto kind = static_cast<PagedOpKind>(i);
    const bool often =
        kind == PagedOpKind::kAppend || kind == PagedOpKind::kCommit;
    kinds.insert(kinds.end(), AsSize(often ? 4 + pick(0, 4) : pick(0, 3)),
                 kind);
  }
  const PagedNumbers numbers(pick);
  const int ops = large ? pick(5, 20) : pick(5, 80);
  for (int i = 0; i < ops; ++i) {
    const PagedOpKind kind = At(kinds, pick(0, Size(kinds) - 1));
    const int a = pick(0, 63);
    const bool is_long =
        kind == PagedOpKind::kAppend && pick(0, large ? 1 : 7) == 0;
    const int b = is_long ? numbers.LongB(spec) : pick(0, kLongAppend - 1);
    history.ops.push_back({kind, a, b, numbers.C(kind)});
  }
  return history;
}

}  // namespace kvtwin::props
