// The cells of one sequence. While they lie in few words of 64 cells, the set
// is a list of these words; otherwise it has a bit for every cell of the table.
// So the memory of a sequence is bounded by its tokens, not by the size of the
// table.

#ifndef KVTWIN_OPTIMIZED_CELL_SET_H_
#define KVTWIN_OPTIMIZED_CELL_SET_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "core/assert.h"
#include "optimized/bit_tree.h"

namespace kvtwin::optimized {

class CellSet {
 public:
  // The empty set of cells 0 .. cells - 1. Requires: cells >= 1.
  explicit CellSet(std::size_t cells);

  // From now on the set has a bit for every cell, and never allocates again.
  void Reserve();
  // Announces that this many words will be set: converts to bits right away if
  // that many words would be stored as bits.
  void Expect(std::size_t words);
  // Frees memory that a set of `count` cells does not need. Requires: the set
  // has `count` cells.
  void Trim(std::size_t count);

  // All functions below require a cell, or a word, of the table.

  // Cells 64 w .. 64 w + 63, lowest bit first.
  std::uint64_t word(std::size_t w) const {
    KVTWIN_DCHECK(w < WordsFor(cells_));
    return bits_ ? bits_->word(w) : WordOfList(w);
  }
  // Replaces a word.
  void SetWord(std::size_t w, std::uint64_t value) {
    KVTWIN_DCHECK(w < WordsFor(cells_));
    if (bits_) return bits_->SetWord(w, value);
    SetWordOfList(w, value);
  }
  void Set(std::size_t cell) {
    KVTWIN_DCHECK(cell < cells_);
    if (bits_) return bits_->Set(cell);
    const std::size_t w = cell / kWordBits;
    SetWordOfList(w, WordOfList(w) | Bit(cell));
  }
  void Clear(std::size_t cell) {
    KVTWIN_DCHECK(cell < cells_);
    if (bits_) return bits_->Clear(cell);
    const std::size_t w = cell / kWordBits;
    SetWordOfList(w, WordOfList(w) & ~Bit(cell));
  }
  void ClearAll();

  // The first cell, the last cell, and the first cell >= `cell`; or kNone.
  std::size_t First() const { return bits_ ? bits_->First() : NextOfList(0); }
  std::size_t Last() const { return bits_ ? bits_->Last() : LastOfList(); }
  std::size_t Next(std::size_t cell) const {
    KVTWIN_DCHECK(cell <= cells_);
    return bits_ ? bits_->Next(cell) : NextOfList(cell);
  }

  // The words begin .. end - 1: the set's own, or a copy in `scratch`, which
  // must have room for them.
  const std::uint64_t* Words(std::size_t begin, std::size_t end,
                             std::uint64_t* scratch) const {
    KVTWIN_DCHECK(begin <= end && end <= WordsFor(cells_));
    if (bits_) return bits_->words() + begin;
    WordsOfList(begin, end, scratch);
    return scratch;
  }

 private:
  static std::uint64_t Bit(std::size_t cell) {
    return std::uint64_t{1} << cell % kWordBits;
  }
  std::uint64_t WordOfList(std::size_t w) const;
  void SetWordOfList(std::size_t w, std::uint64_t value);
  std::size_t NextOfList(std::size_t cell) const;
  std::size_t LastOfList() const;
  void WordsOfList(std::size_t begin, std::size_t end,
                   std::uint64_t* out) const;
  void MakeBits();
  std::size_t CountCells() const;

  std::optional<BitTree> bits_;                // Replaces the list.
  std::map<std::size_t, std::uint64_t> list_;  // Nonzero words.
  std::size_t cells_;                          // Number of cells of the table.
  bool reserved_ = false;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_SET_H_
