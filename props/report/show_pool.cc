#include "props/report/show_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <span>

#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "core/trace/trace.h"
#include "props/compare/visibility.h"
#include "props/report/show.h"

namespace kvtwin::props {
namespace {

// Limits of the drawing: the rest is counted, or left out.
constexpr std::size_t kListsShown = 16;
constexpr std::size_t kBlocksShown = 32;

std::string NumbersText(std::span<const int> numbers) {
  return IntsText(numbers, kBlocksShown);
}

// Returns ", salt 's', extra 'x' 'y'", without the parts that the key lacks.
std::string KeyText(const PrefixKey& key) {
  constexpr std::size_t kLength = 60;
  std::string text;
  if (!key.salt.empty()) {
    text += fmt::format(", salt '{}'", Printable(key.salt, kLength));
  }
  for (std::size_t i = 0; i < key.extra.size(); ++i) {
    if (i == kListsShown) return text + " ...";
    text += fmt::format("{} '{}'", i == 0 ? ", extra" : "",
                        Printable(key.extra[i], kLength));
  }
  for (std::size_t i = 0; i < key.media.size(); ++i) {
    if (i == kListsShown) return text + " ...";
    text += fmt::format("{} '{}' at {}", i == 0 ? ", media" : "",
                        Printable(key.media[i].hash, kLength),
                        key.media[i].position);
  }
  return text;
}

std::string GroupText(const PagedTraceOp& op) {
  return op.group > 0 ? fmt::format(", group {}", op.group) : "";
}

// Returns ", which keeps 4", if a fork or truncate says so.
std::string KeptText(const PagedTraceOp& op) {
  return op.kept ? fmt::format(", which keeps {}", *op.kept) : "";
}

// Returns "  blocks 0* 3", where * marks a block that is shared.
template <class IsShared>
std::string ListText(const std::vector<int>& blocks,
                     const IsShared& is_shared) {
  std::string text;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i == kBlocksShown) return text + " ...";
    text += fmt::format("{} {}{}", i == 0 ? "  blocks" : "", blocks[i],
                        is_shared(blocks[i]) ? "*" : "");
  }
  return text;
}

// Returns which blocks of a sequence a list has, if these are not the first:
// "  from 3 on,", or for states "  of the states at 3 6,".
std::string WhichText(const std::map<int, int>& list, bool states) {
  if (!states) {
    const int first = list.begin()->first;
    return first == 0 ? "" : fmt::format("  from {} on,", first);
  }
  std::vector<int> positions;
  for (const auto& [position, block] : list) positions.push_back(position);
  return fmt::format("  of the states at {},", NumbersText(positions));
}

// Returns the list of a sequence in a group, whose first layer is `layer`.
BlockList ListOf(const PagedOracle& oracle, int sequence, int group,
                 int layer) {
  BlockList list;
  list.sequence = sequence;
  if (!oracle.header().spec.groups.empty()) list.group = group;
  list.len = oracle.SeqLen(sequence);
  if (oracle.twin() != nullptr) {
    const auto views = oracle.twin()->Views(sequence, layer);
    if (!views.ok()) return list;
    for (const PagedView& view : *views) list.blocks.push_back(view.block);
    const int end =
        views->empty() ? 0 : views->back().start + views->back().length;
    list.appended = std::max(0, end - list.len);
    return list;
  }
  list.appended = oracle.Appended(sequence);
  const auto shown = oracle.blocks().find(sequence);
  if (shown == oracle.blocks().end()) return list;
  for (const auto& [spot, block] : shown->second) {
    if (spot.first == group) list.blocks.push_back(block.block);
  }
  return list;
}

}  // namespace

void BlockLists::Follow(const PagedOracle& oracle, const PagedTraceOp& op) {
  std::set<int> changed(op.sequences.begin(), op.sequences.end());
  changed.insert({op.seq, op.made});
  if (const bool of_twin = oracle.twin() != nullptr; of_twin_ != of_twin) {
    *this = {};
    of_twin_ = of_twin;
    changed = oracle.sequences();
  }
  for (const int sequence : changed) {
    Remove(sequence);
    if (oracle.sequences().contains(sequence)) Add(oracle, sequence);
  }
}

bool BlockLists::IsShared(int group, int block) const {
  const auto owners = owners_.find({group, block});
  return owners != owners_.end() && owners->second > 1;
}

void BlockLists::Add(const PagedOracle& oracle, int sequence) {
  const std::vector<PagedSpec>& groups = oracle.header().spec.groups;
  std::vector<BlockList>& lists = lists_[sequence];
  int layer = 0;
  for (int group = 0; group < std::max(1, Size(groups)); ++group) {
    lists.push_back(ListOf(oracle, sequence, group, layer));
    for (const int block : lists.back().blocks) ++owners_[{group, block}];
    if (!groups.empty()) layer += At(groups, group).layers;
  }
}

void BlockLists::Remove(int sequence) {
  const auto lists = lists_.find(sequence);
  if (lists == lists_.end()) return;
  for (const BlockList& list : lists->second) {
    for (const int block : list.blocks) {
      --owners_[{list.group.value_or(0), block}];
    }
  }
  lists_.erase(lists);
}

bool ShowsBlocks(const PagedOracle& oracle, const PagedTraceOp& op) {
  return ChangesBlocks(op.kind) ||
         (oracle.twin() == nullptr && !oracle.blocks().empty());
}

std::string BlocksText(const PagedOracle& oracle, const BlockLists& lists) {
  const std::size_t groups =
      std::max<std::size_t>(1, oracle.header().spec.groups.size());
  std::string text;
  std::size_t shown = 0;
  for (const auto& [of_sequence, of_groups] : lists.of()) {
    if (shown >= kListsShown) break;
    for (const auto& [sequence, group, len, appended, blocks] : of_groups) {
      if (shown == kListsShown) break;
      ++shown;
      std::string line =
          fmt::format("sequence {:<3} {:>4} tokens", sequence, len);
      if (appended > 0) line += fmt::format(" and {} appended", appended);
      if (group) line += fmt::format("  group {}", *group);
      line += ListText(blocks, [&, of = group.value_or(0)](int block) {
        return lists.IsShared(of, block);
      });
      text += Wrapped(line, 4);
    }
  }
  const std::size_t count = lists.of().size() * groups;
  if (shown < count) {
    text += fmt::format("    ... and {} more\n", count - shown);
  }
  if (oracle.twin() == nullptr) return text;
  const PagedUsage usage = oracle.twin()->Usage();
  return text + fmt::format("    free {}, cached {}, used {}, shared {}\n",
                            usage.free, usage.cached, usage.used, usage.shared);
}

std::string PoolCallText(const PagedTraceOp& op) {
  const std::string sequence = fmt::format("sequence {}", op.seq);
  const std::string rows =
      fmt::format("{}, layer {}, {}", sequence, op.layer,
                  op.key ? "K " + ShapeText(op.key->shape) : "no rows");
  switch (op.kind) {
    case PagedTraceOpKind::kOpen:
      return fmt::format("prompt {}{}: sequence {}, {} tokens found",
                         NumbersText(op.tokens.value_or(std::vector<int>())),
                         KeyText(op.prefix_key), op.made, op.len);
    case PagedTraceOpKind::kFork:
      return fmt::format("{}, len {}{}: sequence {}", sequence, op.len,
                         KeptText(op), op.made);
    case PagedTraceOpKind::kAppend:
      return fmt::format("{}: {}", rows, StatusName(op.result));
    case PagedTraceOpKind::kCommit:
      if (op.tokens) return sequence + ", tokens " + NumbersText(*op.tokens);
      return fmt::format("{}, {} tokens", sequence, op.new_tokens);
    case PagedTraceOpKind::kTruncate:
    case PagedTraceOpKind::kSeqLen:
      return fmt::format("{}, len {}{}", sequence, op.len, KeptText(op));
    case PagedTraceOpKind::kMedia:
      return fmt::format("{}, '{}' at {}", sequence,
                         Printable(op.media.hash, 60), op.media.position);
    case PagedTraceOpKind::kFree:
      return sequence;
    case PagedTraceOpKind::kViews:
      return fmt::format(
          "{}{}{}", rows,
          op.positions ? ", at " + NumbersText(*op.positions) : "",
          op.blocks ? ", blocks " + NumbersText(*op.blocks) : "");
    case PagedTraceOpKind::kSlots:
      return fmt::format("{}, from {}{}: {}", sequence, op.begin, GroupText(op),
                         NumbersText(op.slots));
    case PagedTraceOpKind::kTable:
      return fmt::format("sequences {}{}: {}, seq_lens {}",
                         NumbersText(op.sequences), GroupText(op),
                         NumbersText(op.table.blocks),
                         NumbersText(op.table.seq_lens));
    case PagedTraceOpKind::kCsr:
      return fmt::format(
          "sequences {}{}: {}, indptr {}, last_page_len {}",
          NumbersText(op.sequences), GroupText(op), NumbersText(op.csr.indices),
          NumbersText(op.csr.indptr), NumbersText(op.csr.last_page_len));
    case PagedTraceOpKind::kAttend:
      return fmt::format(
          "layer {}, the last {} rows of sequences {}{}{}", op.layer,
          NumbersText(op.query_rows), NumbersText(op.sequences),
          op.soft_cap > 0 ? fmt::format(", soft cap {}", op.soft_cap) : "",
          op.sinks.empty() ? "" : ", with sinks");
    case PagedTraceOpKind::kUsage:
      return fmt::format("free {}, cached {}, used {}, shared {}",
                         op.usage.free, op.usage.cached, op.usage.used,
                         op.usage.shared);
  }
  return "";
}

std::string PoolText(const PagedTraceHeader& header) {
  const PagedSpec& spec = header.spec;
  if (!spec.groups.empty()) {
    std::string text = fmt::format("pool of {} groups, sequences up to {}",
                                   spec.groups.size(), spec.max_seq_len);
    for (const PagedSpec& group : spec.groups) {
      text += fmt::format("; {} blocks of {} tokens, {}", group.blocks,
                          group.block_size, DTypeName(group.dtype));
      if (group.v_dtype) {
        text += fmt::format(" (V {})", DTypeName(*group.v_dtype));
      }
      if (group.window) text += fmt::format(", window {}", *group.window);
      if (group.states) text += ", states";
    }
    return text + fmt::format("; {} placement; recorded by '{}'",
                              header.visibility_only ? "other" : "lowest",
                              Printable(header.producer, 60));
  }
  return fmt::format(
      "pool of {} blocks of {} tokens, sequences up to {}; {}{}; {} placement; "
      "recorded by '{}'",
      spec.blocks, spec.block_size, spec.max_seq_len, DTypeName(spec.dtype),
      spec.v_dtype ? fmt::format(" (V {})", DTypeName(*spec.v_dtype)) : "",
      header.visibility_only ? "other" : "lowest",
      Printable(header.producer, 60));
}

std::string GivenText(const PagedOracle& oracle) {
  const PagedSpec& spec = oracle.header().spec;
  std::map<int, std::map<int, int>> lists;
  bool states = false;  // All places of a line are in one group.
  for (const auto& [sequence, index, block, group] : oracle.places()) {
    lists[sequence].emplace(index, block);
    states = !spec.groups.empty() && At(spec.groups, group).states;
  }
  std::string text = lists.empty() ? "" : "    this line has\n";
  std::size_t shown = 0;
  for (const auto& [sequence, list] : lists) {
    if (shown++ == kListsShown) return text + "    ...\n";
    std::vector<int> blocks;
    for (const auto& [index, block] : list) blocks.push_back(block);
    text += Wrapped(
        fmt::format("sequence {:<3}{}{}", sequence, WhichText(list, states),
                    ListText(blocks, [](int) { return false; })),
        4);
  }
  return text;
}

std::vector<Step> PoolSteps(std::span<const PagedTraceOp> ops,
                            std::int64_t line) {
  std::vector<Step> steps;
  for (const PagedTraceOp& op : ops) {
    if (op.line > line) break;
    if (op.line < line && !ChangesPool(op.kind)) continue;
    Step& step = steps.emplace_back();
    step.number = op.line;
    step.call = fmt::format("{}  {}", TraceOpName(op.kind), PoolCallText(op));
  }
  return steps;
}

}  // namespace kvtwin::props
