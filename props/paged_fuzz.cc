#include "props/paged_fuzz.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <iterator>
#include <sstream>
#include <utility>

#include "core/names.h"
#include "props/generate.h"

namespace kvtwin::props {
namespace {

constexpr int kTokensMax = 1 << 14;  // Of a history that somebody typed.
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

Status Bad(std::string_view word, std::string_view why) {
  return {StatusCode::kInvalidArgument, fmt::format("'{}' {}", word, why)};
}

bool ReadNumber(std::string_view text, int& number) {
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

Status ReadSetting(std::string_view word, PagedSpec& spec) {
  const std::size_t equals = word.find('=');
  if (equals == std::string_view::npos) return Bad(word, "is no setting");
  const std::string_view name = word.substr(0, equals);
  const std::string_view value = word.substr(equals + 1);
  if (name == "layout" && (value == "head" || value == "token")) {
    spec.layout =
        value == "head" ? PagedLayout::kHeadMajor : PagedLayout::kTokenMajor;
    return {};
  }
  if (name == "dtype" || name == "vdtype") {
    const auto dtype = FromName<DType>(kRowDTypeNames, value);
    if (!dtype) return Bad(word, "names no dtype of rows");
    if (name == "dtype") {
      spec.dtype = *dtype;
    } else {
      spec.v_dtype = dtype;
    }
    return {};
  }
  const auto known = std::ranges::find(kSettings, name, &Setting::name);
  if (known == kSettings.end()) return Bad(word, "is no setting");
  int& number = spec.*known->number;
  if (!ReadNumber(value, number) || number < 1 || number > kTokensMax) {
    return Bad(word, fmt::format("must be from 1 to {}", kTokensMax));
  }
  return {};
}

Result<PagedOp> ReadOp(const std::vector<std::string>& words) {
  PagedOp op;
  const auto name = std::ranges::find(kPagedOpNames, words[0]);
  if (name == kPagedOpNames.end() || words.size() != 4) {
    return Bad(words[0], "is no operation with three numbers");
  }
  op.kind = static_cast<PagedOpKind>(name - kPagedOpNames.begin());
  for (const auto& [word, number] :
       {std::pair(&words[1], &op.a), {&words[2], &op.b}, {&words[3], &op.c}}) {
    if (!ReadNumber(*word, *number)) return Bad(*word, "is no number");
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
  for (const PagedOp& op : history.ops) ops << " | " << op;
  return text + ops.str();
}

Result<PagedHistory> ParsePagedHistory(std::string_view text) {
  PagedHistory history;
  bool first = true;
  while (!text.empty()) {
    const std::size_t bar = std::min(text.find('|'), text.size());
    std::istringstream part{std::string(text.substr(0, bar))};
    text.remove_prefix(std::min(bar + 1, text.size()));
    const std::vector<std::string> words{
        std::istream_iterator<std::string>(part), {}};
    if (words.empty()) return Bad("|", "has nothing beside it");
    if (first) {
      if (words[0] != "kvp1") return Bad(words[0], "is not kvp1");
      for (std::size_t i = 1; i < words.size(); ++i) {
        Status status = ReadSetting(words[i], history.spec);
        if (!status.ok()) return status;
      }
      first = false;
      continue;
    }
    Result<PagedOp> op = ReadOp(words);
    if (!op.ok()) return op.status();
    history.ops.push_back(*op);
    if (history.ops.size() > kOpsMax) {
      return Bad("|", fmt::format("comes more than {} times", kOpsMax));
    }
  }
  const PagedSpec& spec = history.spec;
  const std::int64_t elements =
      std::int64_t{spec.blocks} * spec.block_size * spec.layers * spec.kv_heads;
  if (first ||
      elements * std::max(spec.k_head_dim, spec.v_head_dim) > 64 * kTokensMax) {
    return Bad("kvp1", first ? "is missing" : "names a pool that is too large");
  }
  return history;
}

PagedHistory MakePagedHistory(std::uint64_t seed, std::uint64_t number) {
  const Pick pick = SeededPick(seed, number);
  PagedHistory history;
  PagedSpec& spec = history.spec;
  spec.block_size = pick(1, 5);
  spec.blocks = pick(1, 14);
  spec.max_seq_len = pick(1, 60);
  spec.layers = pick(1, 2);
  spec.kv_heads = pick(1, 3);
  spec.k_head_dim = pick(1, 3);
  spec.v_head_dim = pick(1, 3);
  const auto type = [&] {
    return kRowDTypes.at(static_cast<std::size_t>(pick(0, 5)));
  };
  spec.dtype = type();
  if (pick(0, 1) == 1) spec.v_dtype = type();
  constexpr int kBlock = kBlockElements;
  if (IsBlockDType(spec.dtype)) spec.k_head_dim *= kBlock;
  if (IsBlockDType(spec.v_dtype.value_or(spec.dtype))) {
    spec.v_head_dim *= kBlock;
  }
  if (pick(0, 1) == 1) spec.layout = PagedLayout::kHeadMajor;
  // Weights are random, so that each kind dominates now and then.
  std::vector<PagedOpKind> kinds;
  for (std::size_t i = 0; i < kPagedOpNames.size(); ++i) {
    const auto kind = static_cast<PagedOpKind>(i);
    const bool often =
        kind == PagedOpKind::kAppend || kind == PagedOpKind::kCommit;
    kinds.insert(kinds.end(),
                 static_cast<std::size_t>(often ? 4 + pick(0, 4) : pick(0, 3)),
                 kind);
  }
  const int ops = pick(5, 80);
  for (int i = 0; i < ops; ++i) {
    const auto kind =
        static_cast<std::size_t>(pick(0, static_cast<int>(kinds.size()) - 1));
    history.ops.push_back(
        {kinds[kind], pick(0, 63), pick(0, 63), pick(0, 255)});
  }
  return history;
}

std::string RunPaged(const PagedHistory& history, PagedCensus* census) {
  PagedTrio trio(history.spec, census);
  for (const PagedOp& op : history.ops) {
    std::string wrong = trio.Do(op);
    if (!wrong.empty()) return wrong;
  }
  return trio.End();
}

PagedHistory ShrinkPaged(PagedHistory history) {
  // Halves, quarters, ... and in the end each operation alone.
  for (std::size_t size = history.ops.size(); size > 0; size /= 2) {
    for (std::size_t at = 0; at < history.ops.size();) {
      PagedHistory shorter = history;
      const std::size_t end = std::min(at + size, shorter.ops.size());
      shorter.ops.erase(shorter.ops.begin() + static_cast<std::ptrdiff_t>(at),
                        shorter.ops.begin() + static_cast<std::ptrdiff_t>(end));
      if (RunPaged(shorter).empty()) {
        at += size;
      } else {
        history = std::move(shorter);
      }
    }
  }
  return history;
}

PagedFuzzResult FuzzPaged(
    std::uint64_t seed, std::int64_t operations, double seconds,
    const std::function<void(std::int64_t, double)>& progress) {
  PagedFuzzResult result;
  const auto start = std::chrono::steady_clock::now();
  const auto goes_on = [&] {
    return operations > 0 ? result.census.operations < operations
                          : result.seconds < seconds;
  };
  while (goes_on()) {
    const PagedHistory history =
        MakePagedHistory(seed, static_cast<std::uint64_t>(result.histories++));
    result.wrong = RunPaged(history, &result.census);
    const PagedSpec& spec = history.spec;
    result.dtypes.emplace(spec.dtype, spec.v_dtype.value_or(spec.dtype));
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count();
    if (progress) progress(result.census.operations, result.seconds);
    if (result.wrong.empty()) continue;
    result.shrunk = ShrinkPaged(history);
    result.wrong = RunPaged(result.shrunk);
    break;
  }
  return result;
}

}  // namespace kvtwin::props
