#include "optimized/cell_set.h"

#include <algorithm>
#include <bit>

#include "core/index.h"
#include "optimized/fast_paths.h"

namespace kvtwin::optimized {
namespace {

// A word in the list takes as much memory as this many words of bits.
constexpr std::size_t kListedWord = 8;

// Converts back to the list only if the set became much smaller, so that it
// does not switch to and fro.
constexpr std::size_t kMuchSmaller = 4;

}  // namespace

CellSet::CellSet(std::size_t cells) : cells_(cells) {
  KVTWIN_ASSERT(cells >= 1);
  if (TakeFastPath(WordsFor(cells) <= kListedWord)) Reserve();
}

void CellSet::Reserve() {
  reserved_ = true;
  if (TakeFastPath(true) && !bits_) MakeBits();
}

void CellSet::Expect(std::size_t words) {
  if (!bits_ && TakeFastPath(kListedWord * words > WordsFor(cells_))) {
    MakeBits();
  }
}

void CellSet::Trim(std::size_t count) {
  KVTWIN_DCHECK(count == CountCells());
  const std::size_t max = kMuchSmaller * kListedWord * count;
  if (reserved_ || !bits_ || TakeFastPath(max >= WordsFor(cells_))) return;
  for (std::size_t w = bits_->NextWord(0); w != kNone;
       w = bits_->NextWord(w + 1)) {
    list_.emplace_hint(list_.end(), w, bits_->word(w));
  }
  bits_.reset();
}

void CellSet::MakeBits() {
  bits_.emplace(cells_);
  for (const auto& [w, word] : list_) bits_->SetWord(w, word);
  list_.clear();
}

std::size_t CellSet::CountCells() const {
  std::size_t count = 0;
  for (std::size_t w = 0; w < WordsFor(cells_); ++w) {
    count += AsSize(std::popcount(word(w)));
  }
  return count;
}

void CellSet::ClearAll() {
  list_.clear();
  if (!bits_) return;
  for (std::size_t w = bits_->NextWord(0); w != kNone;
       w = bits_->NextWord(w + 1)) {
    bits_->SetWord(w, 0);
  }
}

std::uint64_t CellSet::WordOfList(std::size_t w) const {
  const auto found = list_.find(w);
  return found == list_.end() ? 0 : found->second;
}

void CellSet::SetWordOfList(std::size_t w, std::uint64_t value) {
  if (value == 0) {
    list_.erase(w);
    return;
  }
  list_[w] = value;
  if (TakeFastPath(kListedWord * list_.size() > WordsFor(cells_))) MakeBits();
}

std::size_t CellSet::NextOfList(std::size_t cell) const {
  const std::size_t w = cell / kWordBits;
  for (auto at = list_.lower_bound(w); at != list_.end(); ++at) {
    std::uint64_t word = at->second;
    if (at->first == w) word &= ~std::uint64_t{0} << cell % kWordBits;
    if (word == 0) continue;
    return at->first * kWordBits + AsSize(std::countr_zero(word));
  }
  return kNone;
}

std::size_t CellSet::LastOfList() const {
  if (list_.empty()) return kNone;
  const auto& [w, word] = *list_.rbegin();
  return w * kWordBits + AsSize(std::bit_width(word)) - 1;
}

void CellSet::WordsOfList(std::size_t begin, std::size_t end,
                          std::uint64_t* out) const {
  std::fill_n(out, end - begin, 0);
  for (auto at = list_.lower_bound(begin); at != list_.end(); ++at) {
    if (at->first >= end) break;
    out[at->first - begin] = at->second;
  }
}

}  // namespace kvtwin::optimized
