// A set of cells: one bit per cell, and levels of summary bits above them, so
// that finding the first, last, next or previous cell takes a few steps in a
// cache of any size.
//
// Bit i of level 0 says that cell i is in the set. Bit i of level k + 1 says
// that word i of level k is not zero. The top level is one word.

#ifndef KVTWIN_OPTIMIZED_BIT_TREE_H_
#define KVTWIN_OPTIMIZED_BIT_TREE_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/aligned_buffer.h"

namespace kvtwin::optimized {

inline constexpr std::size_t kWordBits = 64;

// Returned if there is no such cell or word.
inline constexpr std::size_t kNone = SIZE_MAX;

constexpr std::size_t WordsFor(std::size_t bits) {
  return (bits + kWordBits - 1) / kWordBits;
}

class BitTree {
 public:
  // The empty set of cells 0 .. bits - 1. Requires: bits >= 1.
  explicit BitTree(std::size_t bits) {
    KVTWIN_ASSERT(bits >= 1);
    std::size_t total = 0;
    for (std::size_t count = bits; level_count_ == 0 || count > 1;
         count = WordsFor(count)) {
      KVTWIN_ASSERT(level_count_ < kLevelsMax);
      bits_[level_count_++] = count;
      total += WordsFor(count);
    }
    buffer_ = AlignedBuffer(total * sizeof(std::uint64_t));
    std::uint64_t* next = buffer_.as<std::uint64_t>();
    for (std::size_t level = 0; level < level_count_; ++level) {
      levels_[level] = next;
      next += WordsFor(bits_[level]);
    }
  }
  BitTree(const BitTree&) = delete;
  BitTree& operator=(const BitTree&) = delete;

  std::size_t size() const { return bits_[0]; }
  std::size_t word_count() const { return WordsFor(bits_[0]); }
  bool empty() const { return levels_[level_count_ - 1][0] == 0; }

  // Cells 64 w .. 64 w + 63, lowest bit first; bits past size() are zero.
  std::uint64_t word(std::size_t w) const {
    KVTWIN_DCHECK(w < word_count());
    return levels_[0][w];
  }
  const std::uint64_t* words() const { return levels_[0]; }

  // All functions below require: cell < size(), word index < word_count().

  bool Test(std::size_t cell) const {
    KVTWIN_DCHECK(cell < size());
    return (levels_[0][cell / kWordBits] >> cell % kWordBits & 1) != 0;
  }
  void Set(std::size_t cell) {
    KVTWIN_DCHECK(cell < size());
    SetFrom(0, cell);
  }
  void Clear(std::size_t cell) {
    KVTWIN_DCHECK(cell < size());
    ClearFrom(0, cell);
  }

  // Replaces a word. Requires: no bits past size().
  void SetWord(std::size_t w, std::uint64_t value) {
    KVTWIN_DCHECK(w < word_count());
    KVTWIN_DCHECK((value & ~CellsOf(w)) == 0);
    const bool was_empty = levels_[0][w] == 0;
    levels_[0][w] = value;
    if (was_empty == (value == 0) || level_count_ == 1) return;
    if (was_empty) {
      SetFrom(1, w);
    } else {
      ClearFrom(1, w);
    }
  }

  void SetAll() {
    for (std::size_t level = 0; level < level_count_; ++level) {
      const std::size_t words = WordsFor(bits_[level]);
      std::fill_n(levels_[level], words, ~std::uint64_t{0});
      const std::size_t unused = words * kWordBits - bits_[level];
      levels_[level][words - 1] >>= unused;
    }
  }

  // The first and last cell of the set, or kNone.
  std::size_t First() const { return NextAt(0, 0); }
  std::size_t Last() const { return Prev(size() - 1); }

  // The first cell of the set that is >= `cell`, or kNone; `cell` may be
  // size().
  std::size_t Next(std::size_t cell) const {
    KVTWIN_DCHECK(cell <= size());
    return NextAt(0, cell);
  }

  // The first nonzero word at or after w, or kNone; w may be word_count().
  std::size_t NextWord(std::size_t w) const {
    KVTWIN_DCHECK(w <= word_count());
    if (level_count_ > 1) return NextAt(1, w);
    return w == 0 && levels_[0][0] != 0 ? 0 : kNone;
  }

  // The last cell of the set that is <= `cell`, or kNone.
  std::size_t Prev(std::size_t cell) const {
    KVTWIN_DCHECK(cell < size());
    std::size_t level = 0;
    std::size_t i = cell;
    for (;;) {
      const std::uint64_t at_or_before = levels_[level][i / kWordBits]
                                         << (kWordBits - 1 - i % kWordBits);
      if (at_or_before != 0) {
        i -= AsSize(std::countl_zero(at_or_before));
        break;
      }
      if (i < kWordBits) return kNone;
      i = i / kWordBits - 1;
      ++level;
    }
    while (level > 0) {
      --level;
      i = i * kWordBits + AsSize(std::bit_width(levels_[level][i]) - 1);
    }
    return i;
  }

 private:
  // Enough levels: cells are counted in an int, and 64^6 > 2^31.
  static constexpr std::size_t kLevelsMax = 6;

  // The bits of word w that are cells.
  std::uint64_t CellsOf(std::size_t w) const {
    const std::size_t cells = std::min(kWordBits, size() - w * kWordBits);
    return ~std::uint64_t{0} >> (kWordBits - cells);
  }

  void SetFrom(std::size_t level, std::size_t i) {
    for (; level < level_count_; ++level, i /= kWordBits) {
      std::uint64_t& word = levels_[level][i / kWordBits];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << i % kWordBits;
      if (!was_empty) return;  // The levels above know of this word.
    }
  }

  void ClearFrom(std::size_t level, std::size_t i) {
    for (; level < level_count_; ++level, i /= kWordBits) {
      std::uint64_t& word = levels_[level][i / kWordBits];
      word &= ~(std::uint64_t{1} << i % kWordBits);
      if (word != 0) return;
    }
  }

  // The first set bit at or after bit i of level `base`, or kNone.
  std::size_t NextAt(std::size_t base, std::size_t i) const {
    std::size_t level = base;
    for (;; ++level) {
      if (level == level_count_ || i >= bits_[level]) return kNone;
      const std::uint64_t at_or_after =
          levels_[level][i / kWordBits] >> i % kWordBits;
      if (at_or_after != 0) {
        i += AsSize(std::countr_zero(at_or_after));
        break;
      }
      i = i / kWordBits + 1;
    }
    while (level > base) {
      --level;
      i = i * kWordBits + AsSize(std::countr_zero(levels_[level][i]));
    }
    return i;
  }

  AlignedBuffer buffer_;
  std::size_t level_count_ = 0;
  std::array<std::size_t, kLevelsMax> bits_ = {};
  std::array<std::uint64_t*, kLevelsMax> levels_ = {};
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_BIT_TREE_H_
