#include "optimized/cuda/mask.h"

#include <algorithm>
#include <cstring>

namespace kvtwin::optimized::cuda {

std::byte* DeviceMask::Allocate(std::size_t bytes) {
  row_bytes_ = 0;
  rows_ = nullptr;  // Free the old rows before allocating.
  if (bytes == 0) ForgetTable();
  if (bytes > 0) rows_ = gpu_.Allocate(bytes);
  row_bytes_ = bytes;
  return rows_.get();
}

TensorView DeviceMask::Show() {
  if (!gpu_.host_views()) return view();
  return mirror_.Show(gpu_, view(), rows_.get(), row_bytes_);
}

void DeviceMask::ForgetTable() {
  cells_ = 0;
  positions_ = nullptr;
  ranges_ = nullptr;
  copies_.clear();
}

void DeviceMask::NeedTable(const CellTable& table) {
  if (cells_ == table.size()) return;
  ForgetTable();
  const std::size_t words = WordsFor(table.size());
  positions_ = gpu_.Allocate(words * kWordBits * sizeof(std::int32_t));
  ranges_ = gpu_.Allocate(words * sizeof(PosRange));
  cells_ = table.size();
}

void DeviceMask::AddUpdate(const CellTable& table, const Sequence& sequence,
                           const Copy& copy, std::size_t word) {
  WordUpdate& update = updates_.emplace_back();
  update.members = reinterpret_cast<std::uint64_t*>(copy.words.get());
  update.word = sequence.members.word(word);
  update.index = static_cast<std::int64_t>(word);
  update.range = table.ranges()[word];
  std::memcpy(update.positions, table.positions() + word * kWordBits,
              sizeof(update.positions));
}

// Adds the words of a sequence that changed since the device's copy to the
// updates. Returns the address of that copy.
const std::uint64_t* DeviceMask::AskFor(const CellTable& table,
                                        const Sequence& sequence) {
  Copy& copy = copies_[&sequence];
  if (copy.words == nullptr) {
    copy.words = gpu_.Allocate(WordsFor(cells_) * sizeof(std::uint64_t));
  }
  const std::uint64_t changes = sequence.changes - copy.changes;
  if (changes > Sequence::kRecent) {
    Check(cudaMemsetAsync(copy.words.get(), 0,
                          WordsFor(cells_) * sizeof(std::uint64_t),
                          gpu_.stream()),
          "clearing the cells of a sequence");
    const std::size_t last = sequence.members.Last() / kWordBits;
    for (std::size_t w = sequence.members.First() / kWordBits; w <= last; ++w) {
      if (sequence.members.word(w) != 0) AddUpdate(table, sequence, copy, w);
    }
  } else {
    const auto begun = std::ssize(updates_);
    for (std::uint64_t i = copy.changes; i < sequence.changes; ++i) {
      const auto word = sequence.recent[i % Sequence::kRecent];
      const bool again = std::any_of(
          updates_.begin() + begun, updates_.end(),
          [&](const WordUpdate& update) { return update.index == word; });
      if (!again) AddUpdate(table, sequence, copy, word);
    }
  }
  copy.changes = sequence.changes;
  return reinterpret_cast<const std::uint64_t*>(copy.words.get());
}

void DeviceMask::Write(const CellTable& table, CellSpan, DType dtype) {
  try {
    NeedTable(table);
    updates_.clear();
    out_.clear();
    std::int64_t longest = 0;
    for (const auto& [row, cells] : pieces()) {
      const Sequence* sequence = RuleOf(row).sequence;
      const PosRange range = RuleOf(row).range;
      MaskPiece& piece = out_.emplace_back();
      piece = {.out = At(row, cells.first, dtype),
               .members = nullptr,
               .range = range,
               .first = static_cast<std::int64_t>(cells.first),
               .end = static_cast<std::int64_t>(cells.end)};
      longest = std::max(longest, piece.end - piece.first);
      if (sequence != nullptr) piece.members = AskFor(table, *sequence);
    }
    Send(dtype, longest);
  } catch (const MemoryError&) {
    ForgetTable();  // The state of the device's copy is unknown.
    throw;
  }
}

// Sends all data in one copy, and launches the kernels.
void DeviceMask::Send(DType dtype, std::int64_t longest) {
  const auto [updates, pieces, cells] = gpu_.Upload<3>(
      {std::as_bytes(std::span(updates_)), std::as_bytes(std::span(out_)),
       std::as_bytes(cells_due_)});
  auto* positions = reinterpret_cast<std::int32_t*>(positions_.get());
  auto* ranges = reinterpret_cast<PosRange*>(ranges_.get());
  Check(UpdateWords(reinterpret_cast<const WordUpdate*>(updates),
                    std::ssize(updates_), positions, ranges,
                    {reinterpret_cast<const int*>(cells), cells_to_,
                     std::ssize(cells_due_)},
                    gpu_.stream()),
        "bringing the cells up to date");
  cells_due_ = {};
  Check(WriteMask(reinterpret_cast<const MaskPiece*>(pieces), std::ssize(out_),
                  longest, positions, ranges, static_cast<std::int64_t>(cells_),
                  dtype, gpu_.stream()),
        "writing the mask");
}

}  // namespace kvtwin::optimized::cuda
