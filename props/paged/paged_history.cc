#include "props/paged/paged_history.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <locale>
#include <numeric>
#include <sstream>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/names.h"
#include "props/base/did_you_mean.h"
#include "props/base/hash.h"
#include "props/history/line_reader.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

constexpr int kTokensMax = 1 << 14;  // Limit of parsed histories.
constexpr std::size_t kOpsMax = 100000;
constexpr std::size_t kGroupsMax = 16;
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

// Returns the elements of the larger of K and V, of all groups together.
// They may be more than an integer can count.
double ElementsOf(const PagedSpec& spec) {
  if (spec.groups.empty()) {
    return double{1} * spec.blocks * spec.block_size * spec.layers *
           spec.kv_heads * std::max(spec.k_head_dim, spec.v_head_dim);
  }
  double elements = 0;
  for (const PagedSpec& group : spec.groups) elements += ElementsOf(group);
  return elements;
}

bool IsTooLarge(const PagedSpec& spec) {
  return ElementsOf(spec) > 64 * kTokensMax;
}

int ReadCount(std::string_view key, std::string_view value) {
  const int number = ReadSize(value);
  if (number >= 1 && number <= kTokensMax) return number;
  throw BadLine{value, fmt::format("{} is {}, it must be from 1 to {}", key,
                                   number, kTokensMax)};
}

void ReadSetting(std::string_view key, std::string_view value, PagedSpec& spec,
                 bool of_group);

// Reads "block:2,blocks:8,window:3".
PagedSpec ReadGroup(std::string_view text) {
  PagedSpec group;
  for (const std::string_view setting : Split(text, ",")) {
    const std::size_t colon = std::min(setting.find(':'), setting.size());
    const std::string_view key = setting.substr(0, colon);
    if (colon == setting.size() || key == "groups" || key == "most") {
      throw BadLine{setting, fmt::format("{} is not a setting of a group",
                                         Quoted(setting))};
    }
    const std::string_view value = setting.substr(colon + 1);
    if (key == "window") {
      group.window = ReadCount(key, value);
    } else if (key == "states") {
      group.states = ReadCount(key, value) == 1;
    } else {
      ReadSetting(key, value, group, /*of_group=*/true);
    }
  }
  return group;
}

// Returns ", did you mean 'blocks'?", or "".
std::string NearestSetting(std::string_view key, bool of_group) {
  std::vector<std::string> names = {"layout", "dtype", "vdtype"};
  for (const Setting& setting : kSettings) names.emplace_back(setting.name);
  if (of_group) {
    std::erase(names, "most");
    names.insert(names.end(), {"window", "states"});
  } else {
    names.insert(names.end(), {"groups", "softcap", "sinks"});
  }
  return DidYouMean(key, names);
}

void ReadSetting(std::string_view key, std::string_view value, PagedSpec& spec,
                 bool of_group) {
  if (key == "groups") {
    if (value.empty()) throw BadLine{key, "groups is empty"};
    for (const std::string_view group : Split(value, "/")) {
      if (spec.groups.size() == kGroupsMax) {
        throw BadLine{key, fmt::format("more than {} groups", kGroupsMax)};
      }
      spec.groups.push_back(ReadGroup(group));
    }
    return;
  }
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
                           : fmt::format("{} is not a setting{}", Quoted(key),
                                         NearestSetting(key, of_group))};
  }
  spec.*known->number = ReadCount(key, value);
}

PagedOp ReadOp(std::string_view text) {
  const auto words = Split(text, kBlanks);
  if (words.empty()) throw BadLine{text, "an operation is empty"};
  PagedOp op;
  const auto name = std::ranges::find(kPagedOpNames, words[0]);
  if (name == kPagedOpNames.end() || words.size() != 4) {
    throw BadLine{words[0],
                  fmt::format("{} is not an operation with three numbers{}",
                              Quoted(words[0]),
                              DidYouMean(words[0], {kPagedOpNames.begin(),
                                                    kPagedOpNames.end()}))};
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

// Returns the settings in the form " block=4", or "block:4," for a group.
std::string SettingsText(const PagedSpec& spec, std::string_view before,
                         std::string_view between) {
  std::string text;
  const bool of_group = between == ":";
  const auto add = [&](std::string_view name, const auto& value) {
    text += fmt::format("{}{}{}{}", text.empty() && of_group ? "" : before,
                        name, between, value);
  };
  for (const Setting& setting : kSettings) {
    if (of_group && setting.number == &PagedSpec::max_seq_len) continue;
    add(setting.name, spec.*setting.number);
  }
  add("dtype", DTypeName(spec.dtype));
  if (spec.v_dtype) add("vdtype", DTypeName(*spec.v_dtype));
  if (spec.layout == PagedLayout::kHeadMajor) add("layout", "head");
  if (spec.window) add("window", *spec.window);
  if (spec.states) add("states", 1);
  return text;
}

}  // namespace

std::string ToText(const PagedHistory& history) {
  const PagedSpec& spec = history.spec;
  std::string text = "kvp1";
  if (spec.groups.empty()) {
    text += SettingsText(spec, " ", "=");
  } else {
    text += fmt::format(" most={} groups=", spec.max_seq_len);
    for (const PagedSpec& group : spec.groups) {
      if (!text.ends_with('=')) text += '/';
      text += SettingsText(group, ",", ":");
    }
  }
  if (history.soft_cap > 0)
    text += fmt::format(" softcap={}", history.soft_cap);
  if (history.sinks) text += " sinks=1";
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
                   if (key == "softcap") {
                     history.soft_cap = ReadCount(key, value);
                   } else if (key == "sinks") {
                     if (value != "1") throw BadLine{value, "sinks is not 1"};
                     history.sinks = true;
                   } else {
                     ReadSetting(key, value, history.spec, /*of_group=*/false);
                   }
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

namespace {

// Makes one dimension of the pool large. Returns whether it is the number of
// blocks.
bool Enlarge(const Pick& pick, PagedSpec& spec) {
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
      spec.block_size = pick(1, 4);
      spec.blocks = 4 * near;
      spec.max_seq_len = pick(60, 2 * spec.block_size * spec.blocks);
      return true;
    case 2:
      spec.layers = near;
      break;
    case 3:
      spec.k_head_dim = 4 * near + pick(-1, 1);
      break;
    default:
      spec.kv_heads = near;
  }
  return false;
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
    const int most = props::TokensOf(spec);
    const int least = pick_(0, 1) == 0 ? 0 : std::max(0, most - 2);
    return kLongAppend + pick_(least, most);
  }

  int C(PagedOpKind kind) const {
    if (kind == PagedOpKind::kAppend) return alphabet_ * 256 + pick_(0, 255);
    if (kind != PagedOpKind::kOpen) return pick_(0, 255);
    if (way_ < 2) return pick_(0, 3) == 0 ? pick_(1, 3) : 0;
    // One prompt in eight has the empty key; the others have two keys that are
    // easily confused, or four.
    if (pick_(0, 7) == 0) return 0;
    return keys_ + (way_ == 2 ? pair_ * pick_(0, 1) : pick_(0, 3));
  }

 private:
  const Pick& pick_;
  const int way_;
  const int keys_;
  const int pair_;  // Offset of the second of two similar keys.
  const int alphabet_;
};

// Returns the first `count` kinds of operations, each as often as its random
// weight, so that every kind dominates in some histories. A server's sequences
// find what others left: it mostly opens, forks, appends, commits and frees.
std::vector<PagedOpKind> DrawKinds(const Pick& pick, std::size_t count,
                                   bool server) {
  std::vector<PagedOpKind> kinds;
  for (std::size_t i = 0; i < count; ++i) {
    const auto kind = static_cast<PagedOpKind>(i);
    int weight = pick(0, 4);
    switch (kind) {
      case PagedOpKind::kAppend:
      case PagedOpKind::kCommit:
        weight += 4;
        break;
      case PagedOpKind::kOpen:
      case PagedOpKind::kFree:
        weight += server ? 4 : 0;
        break;
      case PagedOpKind::kFork:
        weight += server ? 2 : 0;
        break;
      case PagedOpKind::kLayers:
        weight += server ? 0 : 4;
        break;
      default:
        weight = server ? weight / 2 : weight;
    }
    kinds.insert(kinds.end(), AsSize(weight), kind);
  }
  return kinds;
}

// Completes the last operation as a server would: an append goes to all layers,
// and a commit follows, in one case of ten without ids; a commit takes all
// tokens; in one case of four, a fork takes the place of its source.
void CompleteCall(const Pick& pick, std::vector<PagedOp>& ops) {
  PagedOp& op = ops.back();
  if (op.kind == PagedOpKind::kFork && pick(0, 3) == 0) {
    op.a = 0;  // The sequence with the lowest number.
    ops.push_back({.kind = PagedOpKind::kFree, .a = 0});
    return;
  }
  if (op.kind == PagedOpKind::kCommit) op.b = 1;
  if (op.kind != PagedOpKind::kAppend) return;
  if (op.c % 5 == 0) op.c ^= 1;  // Its tokens stay of one alphabet.
  const bool known = pick(0, 9) > 0;
  using enum PagedOpKind;
  ops.push_back({known ? kCommit : kCommitUnknown, op.a, 1, 0});
}

// Returns the number whose multiples heads of this dtype may have.
int HeadUnit(DType dtype, int multiple) {
  return IsBlockDType(dtype) ? std::lcm(multiple, AsInt(kBlockElements))
                             : multiple;
}

// Makes the pool small enough for a test; blocks and heads stay multiples.
void LimitSize(int block_multiple, int head_dim_multiple, PagedSpec& spec) {
  const auto halve = [](int unit, int& number) {
    if (number <= unit) return false;
    number = (number / unit + 1) / 2 * unit;
    return true;
  };
  while (IsTooLarge(spec) &&
         (halve(1, spec.blocks) || halve(1, spec.layers) ||
          halve(1, spec.kv_heads) || halve(block_multiple, spec.block_size) ||
          halve(HeadUnit(spec.dtype, head_dim_multiple), spec.k_head_dim) ||
          halve(HeadUnit(spec.v_dtype.value_or(spec.dtype), head_dim_multiple),
                spec.v_head_dim))) {
    continue;
  }
}

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
  LimitSize(1, 1, spec);
}

// Adds an append to all layers, and a commit of its tokens.
void AddTokens(const PagedNumbers& numbers, int sequence, int b,
               std::vector<PagedOp>& ops) {
  const int any = numbers.C(PagedOpKind::kAppend);
  const int c = any % 5 == 0 ? std::max(any - 1, 1) : any;  // To all layers.
  ops.push_back({PagedOpKind::kAppend, sequence, b, c});
  ops.push_back({PagedOpKind::kCommit, sequence, 1, 0});
}

// Adds a sequence of many tokens, in most cases a fork of it that continues in
// the middle of a block, and a prompt that has all tokens of either.
void AddLongFork(const Pick& pick, const PagedNumbers& numbers,
                 const PagedSpec& spec, std::vector<PagedOp>& ops) {
  ops.push_back({PagedOpKind::kOpen, 0, 0, 0});
  AddTokens(numbers, 0, numbers.LongB(spec), ops);
  if (pick(0, 3) > 0) {
    ops.push_back({PagedOpKind::kFork, 0, pick(0, spec.max_seq_len), 0});
    AddTokens(numbers, 1, pick(0, kLongAppend - 1), ops);
  }
  ops.push_back({PagedOpKind::kOpen, pick(0, 63), 1, 0});
}

// Adds 8 to 68 sequences of a few tokens each: about as many as a power of two.
// A third are forks; or most are, of the first sequence.
void AddManySequences(const Pick& pick, const PagedNumbers& numbers,
                      std::vector<PagedOp>& ops) {
  using enum PagedOpKind;
  const int power = 1 << pick(3, 6);
  const bool of_first = pick(0, 1) == 0;
  ops.push_back({kOpen, 0, 0, 0});
  AddTokens(numbers, 0, pick(0, kLongAppend - 1), ops);
  for (int count = power + pick(-1, 3); count > 0; --count) {
    const int b = kManyOpen + pick(0, 3);
    if (pick(0, 7) < (of_first ? 7 : 3)) {
      ops.push_back({kFork, of_first ? 0 : pick(0, 63), b, 0});
    } else {
      ops.push_back({kOpen, pick(0, 63), b, numbers.C(kOpen)});
    }
    const int tokens = pick(-4, 3);
    if (tokens >= 0) AddTokens(numbers, pick(0, 63), tokens, ops);
  }
}

}  // namespace

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

// Widens the rows of one pool in eight, chosen by its other sizes: a head has
// more than three elements.
void WidenSome(PagedSpec& spec) {
  constexpr std::array kWide = {4, 8, 17, 33, 64};
  const std::array sizes = {spec.block_size, spec.blocks,     spec.layers,
                            spec.kv_heads,   spec.k_head_dim, spec.v_head_dim};
  const std::uint64_t drawn = HashBytes(sizes.data(), sizeof(sizes), 0);
  if (drawn % 8 != 0) return;
  spec.k_head_dim = kWide[drawn / 8 % kWide.size()];
  spec.v_head_dim = kWide[drawn / 64 % kWide.size()];
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
  const bool large = pick(0, 15) == 0;
  const bool blocks = large && Enlarge(pick, spec);
  const auto type = [&] { return kRowDTypes.at(AsSize(pick(0, 5))); };
  spec.dtype = type();
  if (pick(0, 1) == 1) spec.v_dtype = type();
  if (!large) WidenSome(spec);
  Fit(spec);
  if (pick(0, 1) == 1) spec.layout = PagedLayout::kHeadMajor;
  const bool server = !large && pick(0, 1) == 1;
  const std::vector<PagedOpKind> kinds =
      DrawKinds(pick, AsSize(PagedOpKind::kLayers), server);
  const PagedNumbers numbers(pick);
  const int ops = large ? pick(5, 20) : pick(5, 80);
  if (blocks && pick(0, 1) == 0) {
    AddManySequences(pick, numbers, history.ops);
  } else if (large) {
    AddLongFork(pick, numbers, spec, history.ops);
  }
  for (int i = 0; i < ops; ++i) {
    const PagedOpKind kind = At(kinds, pick(0, Size(kinds) - 1));
    const int a = pick(0, 63);
    const bool is_long =
        kind == PagedOpKind::kAppend && pick(0, large ? 1 : 7) == 0;
    const int b = is_long ? numbers.LongB(spec) : pick(0, kLongAppend - 1);
    history.ops.push_back({kind, a, b, numbers.C(kind)});
    if (server && pick(0, 3) > 0) CompleteCall(pick, history.ops);
  }
  return history;
}

namespace {

PagedSpec DrawGroup(const Pick& pick, int unit) {
  PagedSpec group;
  group.block_size = unit * pick(1, 3);
  group.blocks = pick(2, 14);
  group.layers = pick(1, 3);
  group.kv_heads = pick(1, 2);
  group.k_head_dim = pick(1, 3);
  group.v_head_dim = pick(1, 3);
  WidenSome(group);
  group.dtype = kRowDTypes.at(AsSize(pick(0, 5)));
  if (pick(0, 3) == 0) group.v_dtype = kRowDTypes.at(AsSize(pick(0, 5)));
  if (pick(0, 3) == 0) group.layout = PagedLayout::kHeadMajor;
  const int way = pick(0, 5);
  group.states = way == 3 || way == 4;
  if (way == 2 || way > 3) {
    const int blocks = pick(0, 2);
    group.window = group.block_size * blocks + pick(1, 2);
  }
  Fit(group);
  return group;
}

// Appends often miss layers; keys often have the media of an earlier sequence
// or, if `salted`, no media and perhaps a salt.
int DrawGroupsC(const Pick& pick, const PagedNumbers& numbers, bool salted,
                PagedOpKind kind) {
  const int c = numbers.C(kind);
  if (kind == PagedOpKind::kAppend && pick(0, 2) == 0) return c - c % 5;
  if (kind == PagedOpKind::kMisuse) return c + kNewMisuse * pick(0, 1);
  if (kind != PagedOpKind::kOpen) return c;
  if (salted && pick(0, 1) == 0) return c;
  return c + kSeenMedia * (pick(0, 1) == 0 ? 1 : pick(0, 4));
}

// Adds a fork of a sequence with images, which continues, and prompts with the
// images of either, or with one image fewer.
void AddForkWithMedia(const Pick& pick, const PagedNumbers& numbers, int source,
                      std::vector<PagedOp>& ops) {
  const auto last = [&] { return pick(0, 1) == 0 ? kLastItem : pick(0, 63); };
  ops.push_back({PagedOpKind::kFork, source, last(), 0});
  for (int appends = pick(1, 2); appends > 0; --appends) {
    constexpr auto kAppend = PagedOpKind::kAppend;
    ops.push_back(
        {kAppend, last(), pick(0, kLongAppend - 1), numbers.C(kAppend)});
    CompleteCall(pick, ops);
  }
  for (int opens = pick(1, 4); opens > 0; --opens) {
    ops.push_back({PagedOpKind::kOpen, last(), 0,
                   kSeenMedia * (pick(0, 1) == 0 ? 4 : 1)});
  }
}

// Adds an append to one layer, the first or the last, of the sequence with the
// lowest number; then a fork of this sequence, or the end of its pass; then
// appends to the other layers.
void AddInterruption(const Pick& pick, const PagedNumbers& numbers,
                     std::vector<PagedOp>& ops) {
  using enum PagedOpKind;
  constexpr int kLastFirst = LastOf(kOpenClientsMost) + 1;
  static_assert(BeginsWithTheLastLayer({.a = kLastFirst}));
  const int c = numbers.C(kAppend);
  ops.push_back({kAppend, kLastFirst * pick(0, 1), pick(0, 7), c - c % 5});
  const PagedOpKind next =
      std::array{kFork, kTruncate, kCommit}[AsSize(pick(0, 2))];
  ops.push_back({next, 0, next == kCommit ? 0 : kLastItem, 0});
  ops.push_back({kLayers, 0, kLastItem, 0});
}

// Makes a group whose pool is hardly larger than its window of several blocks,
// so that some of these are needed for other tokens.
void DrawTightWindow(const Pick& pick, PagedSpec& group) {
  const int blocks = pick(2, 3);
  group.states = false;
  group.window = (blocks - 1) * group.block_size + 1;
  group.blocks = blocks + pick(1, 3);
}

}  // namespace

PagedHistory DrawGroupsHistory(const Pick& pick) {
  PagedHistory history;
  PagedSpec& spec = history.spec;
  spec.max_seq_len = pick(1, 60);
  const bool large = spec.max_seq_len > 56;
  if (large) spec.max_seq_len *= 8;
  const int unit = pick(1, 3) * (large ? 8 : 1);
  for (int groups = pick(1, 3); groups > 0; --groups) {
    spec.groups.push_back(DrawGroup(pick, unit));
  }
  const bool server = pick(0, 1) == 1;
  if (server && pick(0, 1) == 0) {
    DrawTightWindow(pick, spec.groups.front());
    if (pick(0, 2) > 0) spec.groups.resize(1);
  }
  const std::vector<PagedOpKind> kinds =
      DrawKinds(pick, kPagedOpNames.size(), server);
  const PagedNumbers numbers(pick);
  const bool salted = pick(0, 3) == 0;
  const PagedSpec all = Completed(spec);
  if (large) AddLongFork(pick, numbers, all, history.ops);
  for (int i = 0, ops = pick(5, large ? 20 : 80); i < ops; ++i) {
    PagedOp op = {.kind = At(kinds, pick(0, Size(kinds) - 1)),
                  .a = pick(0, 63)};
    const bool is_long = op.kind == PagedOpKind::kAppend && pick(0, 11) == 0;
    op.b = is_long ? numbers.LongB(all) : pick(0, kLongAppend - 1);
    op.c = DrawGroupsC(pick, numbers, salted, op.kind);
    const bool completes = server && pick(0, 3) > 0;
    const bool own_key = salted && op.c < kSeenMedia;
    if (completes && op.kind == PagedOpKind::kOpen && !own_key) {
      op.c = kSeenMedia * std::max(1, pick(0, 4));
    }
    history.ops.push_back(op);
    if (completes && op.kind == PagedOpKind::kMedia) {
      if (pick(0, 2) == 0) {  // The same image again, a few tokens later.
        history.ops.push_back({op.kind, op.a, op.b + pick(0, 2), op.c});
      }
      op.kind = PagedOpKind::kAppend;  // It has the tokens with these media.
      op.c = numbers.C(op.kind);
      history.ops.push_back(op);
      if (pick(0, 2) == 0) {  // Other tokens take their place.
        CompleteCall(pick, history.ops);
        history.ops.push_back({PagedOpKind::kTruncate, op.a, pick(0, 7), 0});
        op.c = numbers.C(op.kind);
        history.ops.push_back(op);
      } else if (pick(0, 1) == 0) {
        CompleteCall(pick, history.ops);
        AddForkWithMedia(pick, numbers, op.a, history.ops);
      }
    }
    if (completes) CompleteCall(pick, history.ops);
    if (!server && pick(0, 15) == 0) {
      AddInterruption(pick, numbers, history.ops);
    }
  }
  return history;
}

PoolStorage FitStorage(const Abilities& able, PoolStorage storage) {
  const auto fit = [&](DType dtype) {
    return Nearest(able.dtypes, dtype, kRowDTypes.size());
  };
  storage.dtype = fit(storage.dtype);
  if (storage.v_dtype) storage.v_dtype = fit(*storage.v_dtype);
  return storage;
}

void FitPool(const Abilities& able, PagedHistory& history) {
  const int blocks = able.block_multiple;
  const auto widen = [&](DType dtype, int& head_dim) {
    const int unit = HeadUnit(dtype, able.head_dim_multiple);
    const bool is_drawn_small = head_dim < 4;
    head_dim =
        is_drawn_small ? head_dim * unit : (head_dim + unit - 1) / unit * unit;
  };
  const auto fit = [&](PagedSpec& spec) {
    UseStorage(FitStorage(able, StorageOf(spec)), spec);
    spec.block_size = std::min(spec.block_size, kTokensMax / blocks) * blocks;
    if (spec.window) spec.window = std::min(*spec.window * blocks, kTokensMax);
    widen(spec.dtype, spec.k_head_dim);
    widen(spec.v_dtype.value_or(spec.dtype), spec.v_head_dim);
    LimitSize(blocks, able.head_dim_multiple, spec);
  };
  PagedSpec& spec = history.spec;
  spec.max_seq_len = std::min(spec.max_seq_len * blocks, kTokensMax);
  if (spec.groups.empty()) fit(spec);
  std::ranges::for_each(spec.groups, fit);
  while (spec.groups.size() > 1 && IsTooLarge(spec)) spec.groups.pop_back();
  // Long appends still fill the pool.
  for (PagedOp& op : history.ops) {
    if (op.kind != PagedOpKind::kAppend || op.b < kLongAppend) continue;
    op.b = kLongAppend + (op.b - kLongAppend) * blocks;
  }
}

bool FitsPool(const Abilities& able, const PagedSpec& spec) {
  if (!spec.groups.empty()) {
    return std::ranges::all_of(spec.groups, [&](const PagedSpec& group) {
      return FitsPool(able, group);
    });
  }
  const PoolStorage storage = StorageOf(spec);
  return FitStorage(able, storage) == storage &&
         spec.block_size % able.block_multiple == 0 &&
         spec.k_head_dim % able.head_dim_multiple == 0 &&
         spec.v_head_dim % able.head_dim_multiple == 0;
}

void DrawWeighing(const Pick& pick, const Abilities& can,
                  PagedHistory& history) {
  // A smaller cap makes all tokens alike.
  const int soft_cap = Chance(pick, 25) ? OneOf(pick, {4, 8, 30}) : 0;
  const bool sinks = Chance(pick, 25);
  if (can.Can(KVTWIN_CAN_SOFT_CAP)) history.soft_cap = soft_cap;
  history.sinks = sinks && can.Can(KVTWIN_CAN_SINKS);
}

}  // namespace kvtwin::props
