// Reads the sequence and the block that each entry of a line names, for lines
// of views, of a block table, of its CSR form, and of slots.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/tensor.h"
#include "props/oracle/paged_oracle.h"
#include "props/oracle/wrong_answer.h"

namespace kvtwin::props {

using Kind = PagedTraceOpKind;

int RowCount(const PagedTraceOp& op) {
  return op.key ? AsInt(op.key->shape[2]) : 0;
}

KvView RowsOf(const PagedTraceOp& op) {
  KvView view;
  if (op.key) view.key = op.key->view();
  if (op.value) view.value = op.value->view();
  return view;
}

std::optional<Failure> PagedOracle::ReadPlaces(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  if (op.kind == Kind::kTable) return ReadTable(op, places);
  if (op.kind == Kind::kCsr) return ReadCsr(op, places);
  if (op.kind == Kind::kSlots) return ReadSlots(op, places);
  if (op.kind == Kind::kViews) return ReadViews(op, places);
  return std::nullopt;
}

std::optional<Failure> PagedOracle::ReadViews(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  const KvView actual = RowsOf(op);
  const int count = RowCount(op);
  const int group = GroupOfLayer(op.layer);
  const PagedSpec& spec = SpecOf(group);
  const int first = op.start.value_or(0);
  std::int64_t index = first / spec.block_size;
  for (const int block : op.blocks.value_or(std::vector<int>())) {
    if (op.positions) {  // A block has one state.
      const auto at = places.size();
      if (at == op.positions->size()) break;
      index = At(*op.positions, at);
    }
    // CheckExtent reports it.
    if (index < 0 || index > std::numeric_limits<int>::max()) break;
    places.push_back({op.seq, AsInt(index++), block, group});
  }
  for (const auto& [name, view, head_dim] :
       {std::tuple("key", &actual.key, spec.k_head_dim),
        {"value", &actual.value, spec.v_head_dim}}) {
    if (view->data == nullptr) continue;
    const Shape expected = {head_dim, spec.kv_heads, count, 1};
    if (view->shape == expected) continue;
    return WrongAnswer("the shape of {} is {}, expected {}", name,
                       ShapeText(view->shape), ShapeText(expected));
  }
  if (ledger_holds_) {
    if (auto failure = CheckExtent(op)) return failure;
  }
  // A view without rows may leave out the block of the next row.
  if (!op.blocks || (count == 0 && op.blocks->empty())) return std::nullopt;
  const int blocks =
      op.positions ? count : BlocksFor(first % spec.block_size + count, group);
  return WrongUnlessEqual("the number of blocks", Size(*op.blocks), blocks);
}

// Checks that the states are of tokens of the sequence, in ascending order, and
// that the states which the next token or a pass needs are there: after the
// last committed token and after the last token (P13).
std::optional<Failure> PagedOracle::CheckStates(const PagedTraceOp& op) const {
  const int end = ledger_->RowCount(op.seq, op.layer);
  const int len = ledger_->SeqLen(op.seq);
  int before = -1;
  for (const int position : *op.positions) {
    if (position <= before || position >= end) {
      return WrongAnswer(
          "positions has {} after {}, the sequence has states of {} tokens",
          position, before, end);
    }
    before = position;
  }
  const bool in_place = header_.rules.states_in_place && end > len;
  for (const int needed : {in_place ? -1 : len - 1, end - 1}) {
    if (needed < 0 || std::ranges::count(*op.positions, needed) > 0) continue;
    return WrongAnswer("the state after the token at position {} is missing",
                       needed);
  }
  return std::nullopt;
}

// Checks that the rows cover all positions; with a window, at least the
// positions that the window sees.
std::optional<Failure> PagedOracle::CheckExtent(const PagedTraceOp& op) const {
  const int count = RowCount(op);
  const int end = ledger_->RowCount(op.seq, op.layer);
  const int first = op.start.value_or(0);
  if (op.positions) return CheckStates(op);
  const int group = GroupOfLayer(op.layer);
  const std::optional<int> window =
      header_.rules.window ? header_.rules.window : SpecOf(group).window;
  if (!window) {
    if (first != 0) {
      return WrongAnswer("start is {}, a pool without a window shows all rows",
                         first);
    }
    auto failure = WrongUnlessEqual("the number of rows", count, end);
    if (failure && count < end) {
      failure->text += fmt::format(": {} are missing", end - count);
    }
    return failure;
  }
  const int low = ledger_->Low(op.seq, group);
  if (count == 0 && low >= end) return std::nullopt;
  if (first + std::int64_t{count} != end) {
    return WrongAnswer("the rows end at position {}, expected {}",
                       first + std::int64_t{count}, end);
  }
  if (first <= low) return std::nullopt;
  return WrongAnswer(
      "the rows begin at position {}, a window of {} positions needs them from "
      "{} on",
      first, *window, low);
}

std::optional<Failure> PagedOracle::ReadTable(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  auto block = op.table.blocks.begin();
  for (std::size_t i = 0; i < op.sequences.size(); ++i) {
    const int sequence = op.sequences[i];
    const int len = SeqLen(sequence);
    if (op.table.seq_lens[i] != len) {
      return WrongAnswer("seq_lens[{}] is {}, sequence {} has {} tokens", i,
                         op.table.seq_lens[i], sequence, len);
    }
    const int count = BlocksFor(len, op.group);
    if (op.table.columns < count) {
      return WrongAnswer("columns is {}, sequence {} has {} blocks",
                         op.table.columns, sequence, count);
    }
    for (int j = 0; j < op.table.columns; ++j, ++block) {
      if (j < count) {
        places.push_back(
            {sequence, PlaceOf(op.group, j, len), *block, op.group});
      } else if (*block != -1) {
        return WrongAnswer(
            "column {} of sequence {}, which has {} blocks, is {}", j, sequence,
            count, *block);
      }
    }
  }
  return std::nullopt;
}

std::optional<Failure> PagedOracle::ReadCsr(const PagedTraceOp& op,
                                            std::vector<Place>& places) const {
  const PagedCsr& csr = op.csr;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < op.sequences.size(); ++i) {
    const int sequence = op.sequences[i];
    const int len = SeqLen(sequence);
    const int count = BlocksFor(len, op.group);
    const std::int64_t begin = std::exchange(end, end + count);
    if (csr.indptr[i] != begin || csr.indptr[i + 1] != end) {
      return WrongAnswer(
          "indptr has {} and {} for sequence {}, expected {} and {}",
          csr.indptr[i], csr.indptr[i + 1], sequence, begin, end);
    }
    if (end > std::ssize(csr.indices)) break;
    for (int j = 0; j < count; ++j) {
      places.push_back({sequence, PlaceOf(op.group, j, len),
                        At(csr.indices, begin + j), op.group});
    }
    const int last = len - std::max(0, count - 1) * SpecOf(op.group).block_size;
    if (csr.last_page_len[i] != last) {
      return WrongAnswer("last_page_len[{}] is {}, sequence {} has {} tokens",
                         i, csr.last_page_len[i], sequence, len);
    }
  }
  if (op.sequences.empty()) {
    const auto failure = WrongUnlessEqual("indptr[0]", csr.indptr[0], 0);
    if (failure) return failure;
  }
  return WrongUnlessEqual("the number of indices", std::ssize(csr.indices),
                          end);
}

std::optional<Failure> PagedOracle::ReadSlots(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  const int size = PlaceSize(op.group);
  std::int64_t position = op.begin;
  for (const int slot : op.slots) {
    const bool gone = IsGone(op.seq, AsInt(position / size), op.group);
    if (!gone && (slot < 0 || slot % size != position % size)) {
      return WrongAnswer(
          "slot {} of position {} is not at offset {} of a block of {}", slot,
          position, position % size, size);
    }
    places.push_back({op.seq, AsInt(position / size),
                      slot < 0 ? -1 : slot / size, op.group});
    ++position;
  }
  return std::nullopt;
}

std::optional<Failure> PagedOracle::CheckStock(const Place& place) const {
  if (!header_.rules.one_stock) return std::nullopt;
  const auto& [sequence, index, block, group] = place;
  for (int other = 0; other < GroupCount(); ++other) {
    const auto found = owners_.find({other, block});
    if (other == group || found == owners_.end()) continue;
    const Owners& owners = found->second;
    return WrongAnswer(
        "block {} is {} of sequence {} in group {}, and {} of sequence {} in "
        "group {}",
        block, PlaceText(other, owners.index), owners.by_end.rbegin()->second,
        other, PlaceText(group, index), sequence, group);
  }
  return std::nullopt;
}

std::optional<Failure> PagedOracle::CheckPlace(const Place& place,
                                               std::int64_t line) {
  const auto& [sequence, index, block, group] = place;
  if (IsGone(sequence, index, group)) return std::nullopt;
  // With the placement "other", a group may take any part of the pool's blocks.
  const int blocks =
      header_.visibility_only ? header_.spec.blocks : SpecOf(group).blocks;
  if (block < 0 || block >= blocks) {
    return WrongAnswer("{} of sequence {} is {}, the pool has {}",
                       PlaceText(group, index), sequence, block, blocks);
  }
  if (auto failure = CheckStock(place)) return failure;
  const int end = ledger_->End(sequence, group);
  const Spot spot = {group, index};
  const auto known = blocks_[sequence].find(spot);
  if (known != blocks_[sequence].end()) {
    const Shown& before = known->second;
    if (before.block == block) return std::nullopt;
    return WrongAnswer("{} of sequence {} is {}, and was {} on line {}",
                       PlaceText(group, index), sequence, block, before.block,
                       before.line);
  }
  Owners& owners =
      owners_.try_emplace({group, block}, Owners{index, {}}).first->second;
  if (owners.by_end.empty()) {
    owners.by_end.emplace(end, sequence);
    blocks_[sequence][spot] = {block, line, end};
    return std::nullopt;
  }
  // All owners agree with the longest owner, so one comparison is enough.
  const auto [other_end, other] = *owners.by_end.rbegin();
  if (owners.index != index) {
    return WrongAnswer("block {} is {} of sequence {}, and {} of {}", block,
                       PlaceText(group, owners.index), other,
                       PlaceText(group, index), sequence);
  }
  const int begin = index * PlaceSize(group);
  const int stop = std::min({end, other_end, begin + PlaceSize(group)});
  for (int p = begin; p < stop; ++p) {
    const bool same = ledger_->SameToken(sequence, other, p);
    if (same && ledger_->ShareRows(sequence, other, p, group)) continue;
    return WrongAnswer(
        "block {} is shared by sequences {} and {}, whose {} at position {} "
        "are not the same (line {} shows the block for sequence {})",
        block, other, sequence, same ? "rows" : "tokens", p,
        blocks_.at(other).at(spot).line, other);
  }
  owners.by_end.emplace(end, sequence);
  if (owners.by_end.size() == 2) ++shared_;
  blocks_[sequence][spot] = {block, line, end};
  return std::nullopt;
}

std::string PagedOracle::PlaceText(int group, int index) const {
  return fmt::format(
      "{} {}",
      SpecOf(group).states ? "the block of the state at position" : "block",
      index);
}

int PagedOracle::NeededBlocks(int sequence, int group) const {
  const int low = ledger_->Low(sequence, group);
  const int len = SeqLen(sequence);
  if (low >= len) return 0;
  return BlocksFor(len, group) - low / SpecOf(group).block_size;
}

PagedOracle::BlockNeeds PagedOracle::NeedsOfSequences() const {
  BlockNeeds needs;
  for (int group = 0; group < GroupCount(); ++group) {
    int longest = 0;
    for (const int sequence : sequences_) {
      const int blocks = NeededBlocks(sequence, group);
      longest = std::max(longest, blocks);
      needs.all += blocks;
    }
    needs.longest += longest;
  }
  return needs;
}

void PagedOracle::RememberReach(const PagedTraceOp& op) {
  if (op.kind == Kind::kFree) {
    reached_.erase(op.seq);
  } else if (op.kind == Kind::kOpen) {
    // A pool may hold the block of a prompt's last token, too.
    const int all = op.tokens ? Size(*op.tokens) : 0;
    bool held = false;
    for (int group = 0; group < GroupCount(); ++group) {
      const int size = SpecOf(group).block_size;
      held = held || (all % size == 0 && op.len >= all - size);
    }
    reached_[op.made] = held ? all : 0;
  } else if (op.kind == Kind::kFork && op.len < ledger_->SeqLen(op.seq)) {
    reached_.erase(op.made);  // It has the blocks of these tokens only (P2).
  } else {
    // The call may drop rows of an append before it (P3, P8).
    const int end = std::max(reached_[op.seq], ledger_->End(op.seq));
    reached_[op.kind == Kind::kFork ? op.made : op.seq] = end;
  }
}

// Adds up, for each group and sequence, the blocks that the sequence needs and
// whose tokens no other sequence has: sequences share blocks of the same tokens
// only (P2, P3, P6). Takes away blocks that another sequence may still have:
// the block of its last tokens, if it is not full, and blocks past its end.
std::int64_t PagedOracle::UnsharedBlocks() const {
  const auto order = ledger_->InOrder();
  std::int64_t all = 0;
  for (int group = 0; group < GroupCount(); ++group) {
    const int size = PlaceSize(group);
    const auto places = [&](int tokens) {
      return SpecOf(group).states ? tokens : BlocksFor(tokens, group);
    };
    int after = 0;          // The tokens in common with the next sequence.
    int longer = 0;         // The length of the next sequence.
    bool extended = false;  // Whether another sequence continues this one.
    for (std::size_t i = order.size(); i-- > 0;) {
      const auto& [sequence, before] = order[i];
      const int len = SeqLen(sequence);
      extended = after == len && (longer > len || (longer == len && extended));
      const int common = std::max(before, after);
      if (common < len) {
        const int own = places(len) - common / size;
        all += std::min(own, NeededBlocks(sequence, group));
      } else if (extended && len % size != 0) {
        --all;
      }
      const auto reached = reached_.find(sequence);
      if (reached != reached_.end()) {
        all -= places(std::max(len, reached->second)) - places(len);
      }
      after = before;
      longer = len;
    }
  }
  return all;
}

// A sequence may have the blocks of its greatest length so far, windows that it
// left included, and in a group with states a block for each token. A block
// that is shared has two owners at least.
std::optional<Failure> PagedOracle::CheckReserve(
    const PagedUsage& usage) const {
  if (!header_.rules.no_reserve) return std::nullopt;
  std::int64_t most = 0;
  for (const int sequence : sequences_) {
    const auto reached = reached_.find(sequence);
    const int before = reached == reached_.end() ? 0 : reached->second;
    const int rows = std::max(before, ledger_->End(sequence));
    for (int group = 0; group < GroupCount(); ++group) {
      most += SpecOf(group).states ? rows : BlocksFor(rows, group);
    }
  }
  const std::int64_t owned = std::int64_t{usage.used} + usage.shared;
  if (owned <= most) return std::nullopt;
  return WrongAnswer(
      "used and shared add up to {}, the sequences had {} blocks when they had "
      "the most tokens, and the pool keeps none in reserve",
      owned, most);
}

// Names a block that several sequences have.
std::string PagedOracle::SharedBlockText() const {
  const auto found = std::ranges::find_if(
      owners_, [](const auto& each) { return each.second.by_end.size() > 1; });
  const auto& [place, owners] = *found;
  const std::string in = header_.spec.groups.empty()
                             ? ""
                             : fmt::format(" of group {}", place.first);
  const auto [low, high] = std::minmax(
      {owners.by_end.begin()->second, owners.by_end.rbegin()->second});
  return fmt::format(": block {}{} is shown in sequences {} and {}",
                     place.second, in, low, high);
}

std::optional<Failure> PagedOracle::CheckUsage(const PagedUsage& usage) {
  const auto& [free, cached, used, shared] = usage;
  const std::int64_t all = std::int64_t{free} + cached + used;
  if (all != header_.spec.blocks) {
    return WrongAnswer("free, cached and used add up to {}, the pool has {}",
                       all, header_.spec.blocks);
  }
  if (!needs_) needs_ = NeedsOfSequences();
  const int used_least = std::max(needs_->longest, Size(owners_));
  const int used_most = sequences_.empty() ? 0 : used;
  const int shared_most = sequences_.size() < 2 ? 0 : used;
  const auto outside = [](std::string_view name, std::int64_t count,
                          std::int64_t least,
                          std::int64_t most) -> std::optional<Failure> {
    if (count >= least && count <= most) return std::nullopt;
    return WrongAnswer("{} is {}, it must be {} {}", name, count,
                       count < least ? "at least" : "at most",
                       count < least ? least : most);
  };
  auto failure = outside("used", used, used_least, used_most);
  if (!failure) {
    failure = outside("shared", shared, shared_, shared_most);
    if (failure && shared < shared_) failure->text += SharedBlockText();
  }
  if (!failure) failure = CheckReserve(usage);
  // UnsharedBlocks sorts the sequences, and is at most `all`.
  if (failure || used - shared >= needs_->all) return failure;
  if (!unshared_blocks_) unshared_blocks_ = UnsharedBlocks();
  const std::int64_t unshared = *unshared_blocks_;
  failure = outside("used", used, unshared, used);
  if (!failure) failure = outside("shared", shared, 0, used - unshared);
  if (failure) {
    failure->text += fmt::format(
        ": the number of blocks with tokens that only one sequence has is at "
        "least {}, and used is {}",
        unshared, used);
  }
  return failure;
}

}  // namespace kvtwin::props
