// The cells of one sequence. While they are in few words of 64 cells, the set
// is a list of these words; in more words, it has a bit for every cell of the
// table. So the memory of a sequence is bounded by its tokens, and not by the
// cells that there are.

#ifndef KVTWIN_OPTIMIZED_CELL_SET_H_
#define KVTWIN_OPTIMIZED_CELL_SET_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "optimized/bit_tree.h"

namespace kvtwin::optimized {

class CellSet {
 public:
  // The empty set of cells 0 .. cells - 1. Requires: cells >= 1.
  explicit CellSet(std::size_t cells);

  // The set has a bit for every cell from now on: it never allocates again.
  void Reserve();
  // So many words will come: the set has bits at once, if it is to have them.
  void Expect(std::size_t words);
  // Gives back memory that so few cells do not need. Requires: the set has
  // `count` cells.
  void Trim(std::size_t count);

  // Requires of all below: the cell is one of the table's, and so is the word.

  // Cells 64 w .. 64 w + 63, lowest bit first.
  std::uint64_t word(std::size_t w) const {
    return bits_ ? bits_->word(w) : WordOfList(w);
  }
  // Replaces a word.
  void SetWord(std::size_t w, std::uint64_t value) {
    if (bits_) return bits_->SetWord(w, value);
    SetWordOfList(w, value);
  }
  void Set(std::size_t cell) {
    if (bits_) return bits_->Set(cell);
    const std::size_t w = cell / kWordBits;
    SetWordOfList(w, WordOfList(w) | Bit(cell));
  }
  void Clear(std::size_t cell) {
    if (bits_) return bits_->Clear(cell);
    const std::size_t w = cell / kWordBits;
    SetWordOfList(w, WordOfList(w) & ~Bit(cell));
  }
  void ClearAll();

  // The first and last cell of the set, the first one >= `cell`, or kNone.
  std::size_t First() const { return bits_ ? bits_->First() : NextOfList(0); }
  std::size_t Last() const { return bits_ ? bits_->Last() : LastOfList(); }
  std::size_t Next(std::size_t cell) const {
    return bits_ ? bits_->Next(cell) : NextOfList(cell);
  }

  // The words begin .. end - 1: where they are, or else written to `scratch`,
  // which has room for them.
  const std::uint64_t* Words(std::size_t begin, std::size_t end,
                             std::uint64_t* scratch) const {
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

  std::optional<BitTree> bits_;                // In place of the list.
  std::map<std::size_t, std::uint64_t> list_;  // Words that are not zero.
  std::size_t cells_;                          // Of the table.
  bool reserved_ = false;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_SET_H_
