#include "optimized/mask.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "core/index.h"
#include "hwy/cache_control.h"
#include "optimized/fast_paths.h"
#include "optimized/mask_kernels.h"
#include "optimized/parallel.h"

namespace kvtwin::optimized {
namespace {

// Rows are cut into pieces of at most this many cells, so that several threads
// can write one long row. It is a multiple of a word.
constexpr std::size_t kPieceCells = std::size_t{64} * 1024;

// Masks of more bytes than this exceed the CPU caches, and are written past
// them.
constexpr std::size_t kBeyondCaches = std::size_t{16} << 20;

// With at least this many rows it pays to compute block ranges beforehand.
constexpr std::size_t kManyRows = 8;

// A buffer of at least kLarge bytes is freed after kSmallPasses passes in a row
// that use less than 1 / kSmallPart of it: the mask of a long prompt does not
// stay for the decode steps after it.
constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr std::size_t kSmallPart = 8;
constexpr int kSmallPasses = 16;

}  // namespace

// Frees a large buffer that the last passes hardly used.
void Mask::FreeUnused(std::size_t row_count, CellSpan view, DType dtype) {
  const std::size_t used = row_count * MaskRowBytes(dtype, view.size());
  const bool small = bytes_ >= kLarge && used < bytes_ / kSmallPart;
  small_passes_ = small ? small_passes_ + 1 : 0;
  if (small_passes_ < kSmallPasses) return;
  small_passes_ = 0;
  Release();
}

// Makes room for the rows. Rows that do not fit in the buffer are discarded.
void Mask::FindRoom(std::size_t row_count, CellSpan view, DType dtype,
                    std::size_t cells) {
  // A row of bits is addressable only in words of 64 columns.
  const bool words = dtype == DType::kBits;
  if (base_ <= view.first && view.end <= base_ + columns_ &&
      row_count <= rows_.size() && (!words || Word(view.first) == view.first)) {
    return;
  }
  const std::size_t wished = std::max(rows_.size(), 2 * row_count);
  rows_.clear();  // So that nothing is known if there is no memory.
  base_ = words ? view.first : view.first / kWordBits * kWordBits;
  // The view of a decode step grows by a cell at a time: reserve more than
  // that.
  const std::size_t needed = view.end - base_;
  columns_ = WordsFor(std::min(needed + needed / 2, cells - base_)) * kWordBits;
  const std::size_t row_bytes = MaskRowBytes(dtype, columns_);
  std::size_t bytes;
  if (__builtin_mul_overflow(row_bytes, row_count, &bytes)) {
    throw std::bad_alloc();
  }
  if (bytes > bytes_) {
    const std::size_t grown = std::max(bytes, bytes_ + bytes_ / 2);
    bytes_ = 0;
    data_ = Allocate(grown);
    bytes_ = grown;
  }
  rows_.assign(std::min(bytes_ / row_bytes, wished), Row{});
}

// Adds the cells of a row as pieces.
void Mask::Add(std::size_t row, CellSpan cells) {
  while (cells.first < cells.end) {
    const std::size_t end = std::min(cells.end, cells.first + kPieceCells);
    pieces_.push_back({.row = row, .cells = {cells.first, end}});
    cells.first = end;
  }
}

// The first cell of the 64-column word that contains `cell`.
std::size_t Mask::Word(std::size_t cell) const {
  return base_ + (cell - base_) / kWordBits * kWordBits;
}

// Adds the 64-column word that contains `cell`, unless a piece covers it: no
// two threads may write the same columns.
void Mask::AddWordOf(std::size_t row, CellSpan cells, std::size_t cell) {
  const std::size_t first = Word(cell);
  for (std::size_t i = pieces_.size(); i-- > 0 && pieces_[i].row == row;) {
    const CellSpan& known = pieces_[i].cells;
    if (known.first <= first && first < known.end) return;
  }
  Add(row, {first, std::min(first + kWordBits, cells.end)});
}

// Adds the columns of the row's cells at positions in `range`. Returns false if
// there are too many, or if the table keeps no order.
bool Mask::AddCellsAt(const CellTable& table, std::size_t row, CellSpan cells,
                      PosRange range) {
  const Row& before = rows_[row];
  Sequence& sequence = *before.rule.sequence;
  range.first =
      std::max({range.first, before.extremes.first, sequence.extremes.first});
  range.last =
      std::min({range.last, before.extremes.last, sequence.extremes.last});
  // No cell in `range` both was and is in the sequence.
  if (range.first > range.last) return true;
  if (!table.ordered()) return false;
  const auto found = table.CellsAt(sequence, range);
  if (found.size() > Sequence::kRecent) return false;
  for (const std::int32_t cell : found) {
    const auto changed = AsSize(cell);
    if (cells.first <= changed && changed < cells.end) {
      AddWordOf(row, cells, changed);
    }
  }
  return true;
}

// Adds the columns of a row that changed. Returns false if they are too many or
// unknown; some pieces may then have been added.
bool Mask::AddChanges(const CellTable& table, const RowRule& rule,
                      std::size_t row, CellSpan view) {
  const Row& before = rows_[row];
  if (before.cells.size() == 0 || before.rule.sequence != rule.sequence ||
      view.first < before.cells.first) {
    return false;
  }
  if (view.end != before.cells.end) {
    // From a word on: as bits, what lies beyond the view is zero.
    Add(row, {Word(std::min(view.end, before.cells.end)), view.end});
  }
  for (const std::int32_t cell : before.more) {
    const CellSpan cells{before.cells.first, view.end};
    const bool kept = cells.first <= AsSize(cell) && AsSize(cell) < cells.end;
    if (kept) AddWordOf(row, cells, AsSize(cell));
  }
  if (rule.sequence == nullptr) return true;
  const Sequence& sequence = *rule.sequence;
  if (sequence.changes - before.changes > Sequence::kRecent) return false;
  const CellSpan cells{before.cells.first, view.end};
  for (std::uint64_t i = before.changes; i < sequence.changes; ++i) {
    const std::size_t cell =
        std::size_t{sequence.recent[i % Sequence::kRecent]} * kWordBits;
    const std::size_t first = std::max(cell, cells.first);
    const std::size_t end = std::min(cell + kWordBits, cells.end);
    if (first >= end) continue;
    AddWordOf(row, cells, first);
    // A second word if words of columns are not words of cells.
    AddWordOf(row, cells, end - 1);
  }
  const PosRange was = before.rule.range;
  const PosRange is = rule.range;
  return (was.first == is.first ||
          AddCellsAt(table, row, cells,
                     {std::min(was.first, is.first),
                      std::max(was.first, is.first) - 1})) &&
         (was.last == is.last || AddCellsAt(table, row, cells,
                                            {std::min(was.last, is.last) + 1,
                                             std::max(was.last, is.last)}));
}

void Mask::Update(const CellTable& table, const RowRule& rule, std::size_t row,
                  CellSpan view) {
  const std::size_t written = pieces_.size();
  Row& state = rows_[row];
  if (TakeFastPath(true) && AddChanges(table, rule, row, view)) {
    state.cells.end = view.end;
  } else {
    pieces_.resize(written);
    state.cells = {Word(view.first), view.end};
    Add(row, state.cells);
  }
  state.more.assign(rule.more.begin(), rule.more.end());
  state.rule = rule;
  state.rule.more = {};
  if (rule.sequence == nullptr) return;
  state.changes = rule.sequence->changes;
  state.extremes = rule.sequence->extremes;
}

std::size_t Mask::RowBytes(DType dtype) const {
  return MaskRowBytes(dtype, columns_);
}

std::byte* Mask::At(std::size_t row, std::size_t cell, DType dtype) const {
  return data_ + row * RowBytes(dtype) + MaskRowBytes(dtype, cell - base_);
}

// The position range of each block that contains some of the cells.
const PosRange* HostMask::Blocks(const CellTable& table, CellSpan cells) {
  blocks_.resize(WordsFor(table.size()) / kBlockWords + 1);
  const PosRange* ranges = table.ranges();
  const std::size_t end = WordsFor(cells.end);
  for (std::size_t w = cells.first / kWordBits; w < end;) {
    PosRange block = ranges[w];
    const std::size_t next = std::min(end, (w / kBlockWords + 1) * kBlockWords);
    PosRange& of_block = blocks_[w / kBlockWords];
    for (; w < next; ++w) {
      block = {std::min(block.first, ranges[w].first),
               std::max(block.last, ranges[w].last)};
    }
    of_block = block;
  }
  return blocks_.data();
}

std::byte* HostMask::Allocate(std::size_t bytes) {
  buffer_ = AlignedBuffer();  // Free the old buffer before allocating.
  buffer_ = AlignedBuffer(bytes);
  return buffer_.data();
}

void HostMask::Write(const CellTable& table, CellSpan view, DType dtype) {
  std::size_t columns = 0;
  for (const Piece& piece : pieces()) columns += piece.cells.size();
  const std::size_t bytes = MaskRowBytes(dtype, columns);
  const bool stream = TakeFastPath(bytes > kBeyondCaches);
  // Block ranges pay off if many rows read the same words.
  const bool many =
      TakeFastPath(columns >= kManyRows * (view.end - first_cell()));
  const PosRange* blocks =
      many ? Blocks(table, {first_cell(), view.end}) : nullptr;
  const auto write = [&](const Piece& piece) {
    const auto& [row, cells] = piece;
    const Sequence* sequence = RuleOf(row).sequence;
    const PosRange range = RuleOf(row).range;
    // All positions of the sequence are in the range: no position is compared.
    const bool all = sequence != nullptr &&
                     range.first <= sequence->extremes.first &&
                     sequence->extremes.last <= range.last;
    // Room for the words of the piece, from the start of its first block on.
    constexpr std::size_t kBlockCells = kBlockWords * kWordBits;
    std::array<std::uint64_t, kPieceCells / kWordBits + kBlockWords + 1> words;
    const std::size_t block = cells.first / kBlockCells;
    const std::size_t begin = block * kBlockWords;
    const std::size_t from = block * kBlockCells;
    WriteMaskRow(
        {.positions = table.positions() + from,
         .members = sequence == nullptr
                        ? nullptr
                        : sequence->members.Words(begin, WordsFor(cells.end),
                                                  words.data()),
         .range = all ? PosRange{0, INT32_MAX} : range,
         .first = cells.first - from,
         .end = cells.end - from,
         .ranges = table.ranges() + begin,
         .blocks = blocks == nullptr ? nullptr : blocks + block,
         .stream = stream},
        dtype, At(row, cells.first, dtype));
  };
  ParallelShares(1, bytes, [&](std::size_t, Share share) {
    const std::size_t end = share.End(pieces().size());
    for (std::size_t i = share.Begin(pieces().size()); i < end; ++i) {
      write(pieces()[i]);
    }
    if (stream) hwy::FlushStream();  // Once: it waits for all of them.
  });
}

void HostMask::Allow(std::size_t row, CellSpan view,
                     std::span<const std::int32_t> cells, DType dtype) {
  for (const std::int32_t cell : cells) {
    if (AsSize(cell) < view.first || view.end <= AsSize(cell)) continue;
    if (dtype == DType::kBits) {
      const std::size_t column = AsSize(cell) - first_cell();
      std::byte* const words = At(row, first_cell(), dtype);
      words[column / 8] |= std::byte{1} << column % 8;
    } else {
      std::memset(At(row, AsSize(cell), dtype), 0, SizeOf(dtype));
    }
  }
}

void Mask::Build(const CellTable& table, std::span<const RowRule> rules,
                 std::size_t row_count, CellSpan view, DType dtype) {
  FreeUnused(row_count, view, dtype);
  FindRoom(row_count, view, dtype, table.size());
  pieces_.clear();
  for (std::size_t row = 0; row < row_count; ++row) {
    Update(table, row < rules.size() ? rules[row] : RowRule{nullptr, {0, -1}},
           row, view);
  }
  try {
    Write(table, view, dtype);
    for (std::size_t row = 0; row < rules.size(); ++row) {
      if (!rules[row].more.empty()) Allow(row, view, rules[row].more, dtype);
    }
  } catch (...) {
    rows_.clear();  // The contents of the rows are unknown now.
    throw;
  }
  view_ =
      DenseView(At(0, view.first, dtype), dtype,
                {std::ssize(view), static_cast<std::int64_t>(row_count), 1, 1});
  view_.stride[1] = static_cast<std::int64_t>(RowBytes(dtype));
}

void Mask::Release() {
  rows_.clear();
  bytes_ = 0;
  data_ = Allocate(0);
}

}  // namespace kvtwin::optimized
