#include "optimized/cell_table.h"

#include <algorithm>
#include <bit>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/fast_paths.h"

namespace kvtwin::optimized {
namespace {

constexpr PosRange kNoPositions = {.first = INT32_MAX, .last = -1};

// Greater than all positions.
constexpr std::int64_t kNever = INT64_MAX;

}  // namespace

CellTable::CellTable(std::size_t cells, std::size_t sequences,
                     std::size_t max_ordered)
    : max_ordered_(std::min(max_ordered, cells)),
      positions_(WordsFor(cells) * kWordBits * sizeof(std::int32_t)),
      ranges_(WordsFor(cells) * sizeof(PosRange)),
      shared_(WordsFor(cells) * sizeof(std::uint64_t)),
      free_(cells),
      free_runs_(free_),
      free_count_(cells),
      words_(WordsFor(cells) * sizeof(std::uint64_t)) {
  KVTWIN_ASSERT(cells <= INT32_MAX);  // BitTree checks that there are some.
  targets_.reserve(cells);
  free_.SetAll();
  std::fill_n(ranges_.as<PosRange>(), free_.word_count(), kNoPositions);
  for (std::size_t i = 0; i < sequences; ++i) {
    Sequence& sequence = *Make();
    sequence.reserved = true;
    sequence.members.Reserve();
    sequence.order.Reserve(max_ordered_);
    spare_reserved_.push_back(&sequence);
  }
}

std::size_t CellTable::FindRun(std::size_t count) {
  if (count > free_count_) return kNone;
  return count == 1 ? free_.First() : free_runs_.Find(count);
}

void CellTable::FindFree(std::size_t count, std::vector<int>& out) const {
  KVTWIN_ASSERT(count <= free_count_);
  out.resize(count);
  int* next = out.data();
  int* const end = next + count;
  for (std::size_t w = 0; next != end; ++w) {
    w = free_.NextWord(w);
    std::uint64_t word = free_.word(w);
    const int first = AsInt(w * kWordBits);
    if (end - next >= static_cast<std::ptrdiff_t>(kWordBits)) {
      next += ListCells(word, first, next);
      continue;
    }
    for (; word != 0 && next != end; word &= word - 1) {
      *next++ = first + std::countr_zero(word);
    }
  }
}

Sequence* CellTable::Make() {
  all_.push_back(std::make_unique<Sequence>(size()));
  // So that Release and New never allocate.
  spare_.reserve(all_.capacity());
  spare_reserved_.reserve(all_.capacity());
  live_.reserve(all_.capacity());
  return all_.back().get();
}

Sequence& CellTable::New(int id) {
  auto& spare = spare_reserved_.empty() ? spare_ : spare_reserved_;
  if (spare.empty()) spare.push_back(Make());
  Sequence& sequence = *spare.back();
  spare.pop_back();
  sequence.id = id;
  sequence.live_index = live_.size();
  sequence.batch = 0;
  // Invalidates what is recorded about the sequence that had this object
  // before.
  sequence.changes += Sequence::kRecent + 1;
  sequence.since = kNever;
  if (ordered()) sequence.order.Clear();
  live_.push_back(&sequence);
  Grows(sequence);
  by_id_.Insert(id, &sequence);
  return sequence;
}

void CellTable::Release(Sequence& sequence) {
  by_id_.Erase(sequence.id);
  if (sequence.live_index < grown_count_) Exchange(sequence, --grown_count_);
  Exchange(sequence, live_.size() - 1);
  live_.pop_back();
  if (sequence.reserved) return spare_reserved_.push_back(&sequence);
  // The next new sequence takes over the memory of this one; the other spare
  // sequences keep none.
  if (!spare_.empty()) {
    spare_.back()->members.Trim(0);
    spare_.back()->order = CellOrder();
  }
  spare_.push_back(&sequence);
}

void CellTable::Clear() {
  while (!live_.empty()) {
    Sequence& sequence = *live_.back();
    sequence.members.ClearAll();
    sequence.count = 0;
    Release(sequence);
  }
  free_.SetAll();
  free_runs_.AllChanged();
  free_count_ = size();
  std::fill_n(ranges_.as<PosRange>(), free_.word_count(), kNoPositions);
  std::fill_n(shared_.as<std::uint64_t>(), free_.word_count(), 0);
}

Sequence& CellTable::Add(int id, std::size_t cell, std::int32_t position) {
  Sequence* sequence = Find(id);
  if (sequence == nullptr) {
    sequence = &New(id);
    sequence->extremes = {position, position};
  }
  Grows(*sequence);
  PosRange& extremes = sequence->extremes;
  extremes.first = std::min(extremes.first, position);
  extremes.last = std::max(extremes.last, position);
  sequence->members.Set(cell);
  ++sequence->count;
  sequence->Changed(cell / kWordBits);
  sequence->since_first = std::min(sequence->since_first, cell);
  sequence->since_last = std::max(sequence->since_last, cell);
  if (!free_.Test(cell)) {
    KVTWIN_DCHECK(positions()[cell] == position);
    shared_.as<std::uint64_t>()[cell / kWordBits] |= std::uint64_t{1}
                                                     << cell % kWordBits;
  } else {
    Take(cell, position);
  }
  sequence->order.Add(cell, positions());
  return *sequence;
}

void CellTable::Take(std::size_t cell, std::int32_t position) {
  free_.Clear(cell);
  free_runs_.Changed(cell / kWordBits);
  --free_count_;
  positions_.as<std::int32_t>()[cell] = position;
  PosRange& range = ranges_.as<PosRange>()[cell / kWordBits];
  range.first = std::min(range.first, position);
  range.last = std::max(range.last, position);
}

void CellTable::Join(int id, std::size_t cell) {
  free_.Set(cell);
  ++free_count_;
  Add(id, cell, positions()[cell]);
}

void CellTable::Give(std::size_t w, std::uint64_t cells) {
  free_.SetWord(w, free_.word(w) | cells);
  free_runs_.Changed(w);
  free_count_ += AsSize(std::popcount(cells));
  UpdateRange(w);
}

// Recomputes the range of word w after some of its cells became free.
void CellTable::UpdateRange(std::size_t w) {
  const std::size_t cells = std::min(kWordBits, size() - w * kWordBits);
  const std::uint64_t used =
      ~free_.word(w) & (~std::uint64_t{0} >> (kWordBits - cells));
  ranges_.as<PosRange>()[w] = RangeOf(positions() + w * kWordBits, used);
}

CellTable::Extent CellTable::ExtentOf(const Sequence& sequence) {
  const CellSet& members = sequence.members;
  return {members.First() / kWordBits, members.Last() / kWordBits + 1};
}

Members CellTable::MembersIn(const Sequence& sequence, Extent extent) const {
  return {.positions = positions() + extent.begin * kWordBits,
          .words = sequence.members.Words(extent.begin, extent.end,
                                          words_.as<std::uint64_t>()),
          .free = free_.words() + extent.begin,
          .ranges = ranges() + extent.begin,
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
    std::copy_n(members.words, members.word_count, selected);  // All cells.
    out.count = sequence.count;
  } else {
    out.count = SelectCells(members, range, selected);
  }
}

CellBounds CellTable::Since(Sequence& sequence, std::int32_t since) const {
  CellBounds bounds{sequence.members.First(), sequence.members.Last()};
  if (since >= sequence.since && TakeFastPath(true)) {
    bounds = {std::max(bounds.first, sequence.since_first),
              std::min(bounds.last, sequence.since_last)};
  }
  const Extent extent{bounds.first / kWordBits, bounds.last / kWordBits + 1};
  const Members members = MembersIn(sequence, extent);
  const std::size_t first = FirstCellIn(members, {since, INT32_MAX});
  const std::size_t last = LastCellIn(members, {since, INT32_MAX});
  KVTWIN_ASSERT(first <= last && last != kNone);
  sequence.since = since;
  sequence.since_first = extent.begin * kWordBits + first;
  sequence.since_last = extent.begin * kWordBits + last;
  return {sequence.since_first, sequence.since_last};
}

std::span<const std::int32_t> CellTable::CellsAt(Sequence& sequence,
                                                 PosRange range) const {
  KVTWIN_ASSERT(ordered());
  const auto cells = sequence.order.Cells(sequence.members, positions());
  const auto begin = std::partition_point(
      cells.begin(), cells.end(),
      [&](std::int32_t cell) { return positions()[cell] < range.first; });
  const auto end = std::partition_point(
      begin, cells.end(),
      [&](std::int32_t cell) { return positions()[cell] <= range.last; });
  return {begin, end};
}

// Those of `cells`, in word w, that at least two sequences other than
// `sequence` hold.
std::uint64_t CellTable::SharedByOthers(const Sequence& sequence, std::size_t w,
                                        std::uint64_t cells) const {
  std::uint64_t once = 0;
  std::uint64_t twice = 0;
  for (const Sequence* other : live_) {
    if (other == &sequence) continue;
    twice |= once & other->members.word(w);
    once |= other->members.word(w);
    if ((cells & ~twice) == 0) break;
  }
  return cells & twice;
}

void CellTable::DropFromWord(Sequence& sequence, std::size_t w,
                             std::uint64_t leaving) {
  std::uint64_t& shared = shared_.as<std::uint64_t>()[w];
  const std::uint64_t freed = leaving & ~shared;
  if (freed != leaving) {
    shared &= ~leaving | SharedByOthers(sequence, w, leaving & shared);
  }
  sequence.members.SetWord(w, sequence.members.word(w) & ~leaving);
  sequence.Changed(w);
  if (freed == 0) return;
  free_.SetWord(w, free_.word(w) | freed);
  free_runs_.Changed(w);
  free_count_ += AsSize(std::popcount(freed));
  UpdateRange(w);
}

void CellTable::Drop(Sequence& sequence, const Selection& cells) {
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    if (cells.words[w] != 0) DropFromWord(sequence, w, cells.words[w]);
  }
  sequence.count -= cells.count;
  if (cells.count > 0) sequence.order.Invalidate();
}

void CellTable::DropCell(Sequence& sequence, std::size_t cell) {
  DropFromWord(sequence, cell / kWordBits,
               std::uint64_t{1} << cell % kWordBits);
  --sequence.count;
  sequence.order.Invalidate();
}

void CellTable::DropOldest(Sequence& sequence, std::int32_t last) {
  const auto leaving = CellsAt(sequence, {0, last});
  for (const std::int32_t cell : leaving) {
    const auto gone = AsSize(cell);
    DropFromWord(sequence, gone / kWordBits,
                 std::uint64_t{1} << gone % kWordBits);
  }
  sequence.count -= leaving.size();
  if (sequence.count > 0) {
    sequence.extremes.first = positions()[*leaving.end()];
  }
  sequence.order.DropFirst(leaving.size());
  FinishUpdate(sequence, /*stale=*/false);
}

void CellTable::FinishUpdate(Sequence& sequence, bool stale) {
  if (sequence.count == 0) return Release(sequence);
  if (stale) {
    sequence.extremes = Extremes(MembersIn(sequence, ExtentOf(sequence)));
  }
  sequence.members.Trim(sequence.count);
}

void CellTable::AddToSelected(Sequence& sequence, const Selection& cells,
                              std::int32_t offset) {
  KVTWIN_ASSERT(offset <= 0);
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    if (cells.words[w] == 0) continue;
    KVTWIN_DCHECK((cells.words[w] & shared(w)) == 0);
    AddToPositions(positions_.as<std::int32_t>() + w * kWordBits,
                   cells.words[w], offset);
    if (cells.words[w] == ~free_.word(w)) {  // All that are used.
      PosRange& range = ranges_.as<PosRange>()[w];
      range = {range.first + offset, range.last + offset};
    } else {
      UpdateRange(w);
    }
    sequence.Changed(w);
  }
}

void CellTable::CopyPrefix(const Sequence& src, int id, std::int32_t len,
                           Selection& scratch) {
  KVTWIN_DCHECK(Find(id) == nullptr);
  Select(src, {.first = 0, .last = len - 1}, scratch);
  if (scratch.count == 0) return;
  Sequence& dst = New(id);
  const auto words = std::span(scratch.words)
                         .subspan(scratch.begin, scratch.end - scratch.begin);
  dst.members.Expect(words.size() - AsSize(std::ranges::count(words, 0U)));
  for (std::size_t w = scratch.begin; w < scratch.end; ++w) {
    if (scratch.words[w] == 0) continue;
    dst.members.SetWord(w, scratch.words[w]);
    shared_.as<std::uint64_t>()[w] |= scratch.words[w];
  }
  dst.order.Invalidate();
  dst.count = scratch.count;
  dst.extremes = src.extremes;
  FinishUpdate(dst, /*stale=*/len <= src.extremes.last);
}

void CellTable::Defrag(std::vector<CellMove>& moves) {
  moves.clear();
  const std::size_t used_count = size() - free_count_;
  // Afterwards cells 0 .. used_count - 1 are used. So every used cell at or
  // after used_count moves, once, and every hole before it is filled, once.
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
  // The free and shared bits of a cell, and its owners, move with the token.
  std::uint64_t* shared = shared_.as<std::uint64_t>();
  for (const CellMove& move : moves) {
    free_.Clear(move.to);
    free_.Set(move.from);
    free_runs_.Changed(move.to / kWordBits);
    free_runs_.Changed(move.from / kWordBits);
    const std::uint64_t bit = std::uint64_t{1} << move.from % kWordBits;
    const bool was_shared = (shared[move.from / kWordBits] & bit) != 0;
    shared[move.from / kWordBits] &= ~bit;
    if (was_shared) {
      shared[move.to / kWordBits] |= std::uint64_t{1} << move.to % kWordBits;
    }
  }
  for (Sequence* sequence : live_) {
    CellSet& members = sequence->members;
    for (std::size_t cell = members.Next(used_count); cell != kNone;
         cell = members.Next(cell + 1)) {
      const std::size_t target = targets_[cell - used_count];
      members.Clear(cell);
      members.Set(target);
      sequence->Changed(cell / kWordBits);
      sequence->Changed(target / kWordBits);
    }
    sequence->order.Invalidate();
    sequence->since = kNever;
  }
  for (std::size_t w = 0; w < free_.word_count(); ++w) UpdateRange(w);
}

void CellTable::List(std::vector<CellEntry>& out) const {
  out.clear();
  for (const Sequence* sequence : live_) {
    const CellSet& members = sequence->members;
    for (std::size_t cell = members.First(); cell != kNone;
         cell = members.Next(cell + 1)) {
      out.push_back({.cell = AsInt(cell),
                     .position = positions()[cell],
                     .sequence = sequence->id});
    }
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
    return a.cell != b.cell ? a.cell < b.cell : a.sequence < b.sequence;
  });
}

}  // namespace kvtwin::optimized
