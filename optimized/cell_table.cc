#include "optimized/cell_table.h"

#include <algorithm>
#include <bit>

namespace kvtwin::optimized {

CellTable::CellTable(std::size_t cells)
    : positions_(WordsFor(cells) * kWordBits * sizeof(std::int32_t)),
      free_(cells),
      free_count_(cells) {
  free_.SetAll();
}

std::size_t CellTable::FindRun(std::size_t count) const {
  if (count > free_count_) return kNone;
  std::size_t start = free_.First();
  while (start != kNone && count <= size() - start) {
    // Clear in the free map is used.
    const std::size_t used = free_.NextClear(start, start + count);
    if (used == start + count) return start;
    start = free_.Next(used);
  }
  return kNone;
}

Sequence& CellTable::New(int id) {
  if (spare_.empty()) {
    all_.push_back(std::make_unique<Sequence>(size()));
    // So that Release never allocates.
    spare_.reserve(all_.capacity());
    spare_.push_back(all_.back().get());
  }
  Sequence& sequence = *spare_.back();
  spare_.pop_back();
  sequence.id = id;
  sequence.live_index = live_.size();
  sequence.batch = 0;
  live_.push_back(&sequence);
  by_id_.Insert(id, &sequence);
  return sequence;
}

void CellTable::Release(Sequence& sequence) {
  by_id_.Erase(sequence.id);
  live_[sequence.live_index] = live_.back();
  live_[sequence.live_index]->live_index = sequence.live_index;
  live_.pop_back();
  spare_.push_back(&sequence);
}

void CellTable::Clear() {
  while (!live_.empty()) {
    Sequence& sequence = *live_.back();
    const Extent extent = ExtentOf(sequence);
    for (std::size_t w = extent.begin; w < extent.end; ++w) {
      sequence.members.SetWord(w, 0);
    }
    sequence.count = 0;
    Release(sequence);
  }
  free_.SetAll();
  free_count_ = size();
}

Sequence& CellTable::Add(int id, std::size_t cell, std::int32_t position) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) {
    sequence = &New(id);
    sequence->extremes = {position, position};
  }
  PosRange& extremes = sequence->extremes;
  extremes.first = std::min(extremes.first, position);
  extremes.last = std::max(extremes.last, position);
  sequence->members.Set(cell);
  ++sequence->count;
  positions_.as<std::int32_t>()[cell] = position;
  if (free_.Test(cell)) {
    free_.Clear(cell);
    --free_count_;
  }
  return *sequence;
}

CellTable::Extent CellTable::ExtentOf(const Sequence& sequence) {
  const BitTree& members = sequence.members;
  return {members.First() / kWordBits, members.Last() / kWordBits + 1};
}

Members CellTable::MembersIn(const Sequence& sequence, Extent extent) const {
  return {.positions = positions() + extent.begin * kWordBits,
          .words = sequence.members.words() + extent.begin,
          .word_count = extent.end - extent.begin};
}

void CellTable::Select(const Sequence& sequence, PosRange range,
                       Selection& out) const {
  out.words.resize(free_.word_count());
  out.begin = out.end = out.count = 0;
  if (range.first > sequence.extremes.last ||
      range.last < sequence.extremes.first) {
    return;
  }
  const Extent extent = ExtentOf(sequence);
  out.begin = extent.begin;
  out.end = extent.end;
  const Members members = MembersIn(sequence, extent);
  std::uint64_t* selected = out.words.data() + extent.begin;
  if (range.first <= sequence.extremes.first &&
      sequence.extremes.last <= range.last) {
    std::copy_n(members.words, members.word_count, selected);  // All of them.
    out.count = sequence.count;
  } else {
    out.count = SelectCells(members, range, selected);
  }
}

std::size_t CellTable::FirstIn(const Sequence& sequence, PosRange range) const {
  const Extent extent = ExtentOf(sequence);
  const std::size_t cell = FirstCellIn(MembersIn(sequence, extent), range);
  return cell == kNone ? kNone : extent.begin * kWordBits + cell;
}

std::size_t CellTable::LastIn(const Sequence& sequence, PosRange range) const {
  const Extent extent = ExtentOf(sequence);
  const std::size_t cell = LastCellIn(MembersIn(sequence, extent), range);
  return cell == kNone ? kNone : extent.begin * kWordBits + cell;
}

std::uint64_t CellTable::OwnedByOthers(const Sequence& sequence,
                                       std::size_t w) const {
  std::uint64_t others = 0;
  for (const Sequence* other : live_) {
    if (other != &sequence) others |= other->members.word(w);
  }
  return others;
}

void CellTable::Drop(Sequence& sequence, const Selection& cells) {
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    const std::uint64_t leaving = cells.words[w];
    if (leaving == 0) continue;
    const std::uint64_t freed = leaving & ~OwnedByOthers(sequence, w);
    sequence.members.SetWord(w, sequence.members.word(w) & ~leaving);
    free_.SetWord(w, free_.word(w) | freed);
    free_count_ += static_cast<std::size_t>(std::popcount(freed));
  }
  sequence.count -= cells.count;
}

void CellTable::Settle(Sequence& sequence, bool stale) {
  if (sequence.count == 0) {
    Release(sequence);
  } else if (stale) {
    sequence.extremes = Extremes(MembersIn(sequence, ExtentOf(sequence)));
  }
}

void CellTable::AddToSelected(const Selection& cells, std::int32_t offset) {
  AddToPositions(positions_.as<std::int32_t>() + cells.begin * kWordBits,
                 cells.words.data() + cells.begin, cells.end - cells.begin,
                 offset);
}

void CellTable::CopyPrefix(const Sequence& src, int id, std::int32_t len,
                           Selection& scratch) {
  Select(src, {.first = 0, .last = len - 1}, scratch);
  if (scratch.count == 0) return;
  Sequence& dst = New(id);
  for (std::size_t w = scratch.begin; w < scratch.end; ++w) {
    if (scratch.words[w] != 0) dst.members.SetWord(w, scratch.words[w]);
  }
  dst.count = scratch.count;
  dst.extremes = src.extremes;
  Settle(dst, /*stale=*/len <= src.extremes.last);
}

void CellTable::Defrag(std::vector<CellMove>& moves) {
  moves.clear();
  const std::size_t used_count = size() - free_count_;
  // Afterwards cells 0 .. used_count - 1 are used. So every used cell beyond
  // them moves, once, and every hole among them is filled, once.
  targets_.assign(free_count_, kNone);
  std::int32_t* positions = positions_.as<std::int32_t>();
  std::size_t from = size();
  for (std::size_t hole = free_.First(); hole < used_count;
       hole = free_.Next(hole + 1)) {
    do {
      --from;
    } while (free_.Test(from));
    moves.push_back({.from = from, .to = hole});
    targets_[from - used_count] = hole;
    positions[hole] = positions[from];
  }
  for (const CellMove& move : moves) {
    free_.Clear(move.to);
    free_.Set(move.from);
  }
  for (Sequence* sequence : live_) {
    BitTree& members = sequence->members;
    for (std::size_t cell = members.Next(used_count); cell != kNone;
         cell = members.Next(cell + 1)) {
      members.Clear(cell);
      members.Set(targets_[cell - used_count]);
    }
  }
}

void CellTable::List(std::vector<CellEntry>& out) const {
  out.clear();
  for (const Sequence* sequence : live_) {
    const BitTree& members = sequence->members;
    for (std::size_t cell = members.First(); cell != kNone;
         cell = members.Next(cell + 1)) {
      out.push_back({.cell = static_cast<int>(cell),
                     .position = positions()[cell],
                     .sequence = sequence->id});
    }
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
    return a.cell != b.cell ? a.cell < b.cell : a.sequence < b.sequence;
  });
}

}  // namespace kvtwin::optimized
