#include "optimized/attention_plan.h"

#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvtwin::optimized {
namespace {

// Cells that the rows of a group read without seeing them, at most, for each
// cell that they see: in eighths.
constexpr std::size_t kUnseenEighths = 4;
// The bits of a word from `begin` to `end`, at most 64 of them.
std::uint64_t BitsBetween(std::int64_t begin, std::int64_t end) {
  begin = std::clamp<std::int64_t>(begin, 0, 64);
  end = std::clamp<std::int64_t>(end, 0, 64);
  if (begin >= end) return 0;
  const std::uint64_t ones = ~std::uint64_t{0};
  return (ones >> (64 - (end - begin))) << begin;
}

template <class T>
void ReadMaskRow(const TensorView& mask, std::int64_t row,
                 std::uint64_t* bits) {
  const std::byte* from = mask.at(0, row);
  for (std::int64_t begin = 0; begin < mask.shape[0]; begin += 64) {
    const std::int64_t count =
        std::min<std::int64_t>(64, mask.shape[0] - begin);
    std::uint64_t word = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      T element;
      std::memcpy(&element, from + (begin + i) * AsInt(sizeof(T)), sizeof(T));
      element = static_cast<T>(element << 1);  // -0 is 0, too.
      word |= std::uint64_t{element == 0} << i;
    }
    bits[begin / 64] = word;
  }
}

std::size_t Population(const std::vector<std::uint64_t>& words) {
  std::size_t count = 0;
  for (const std::uint64_t word : words) count += AsSize(std::popcount(word));
  return count;
}

}  // namespace

// Adds a group, whose rows see the cells `seen`.
void AttentionPlan::AddGroup(RowGroup group,
                             const std::vector<std::uint64_t>& seen) {
  group.all_before = FirstHidden(group, seen);
  group.first_run = runs_.size();
  group.cells = Population(seen);
  std::int64_t end = -1;  // The last run ends there.
  for (std::size_t w = 0; w < seen.size(); ++w) {
    const auto base = static_cast<std::int64_t>(w * 64);
    for (std::uint64_t word = seen[w]; word != 0;) {
      const int begin = std::countr_zero(word);
      const int length = std::countr_one(word >> begin);
      if (base + begin == end) {
        runs_.back().end += length;
      } else {
        runs_.push_back({base + begin, base + begin + length});
      }
      end = base + begin + length;
      word &= ~BitsBetween(begin, begin + length);
    }
  }
  groups_.push_back(group);
}

// Returns the first of the cells `seen` that one of the group's rows does not
// see. If they see all, it returns a number larger than that of any cell.
std::int64_t AttentionPlan::FirstHidden(
    const RowGroup& group, const std::vector<std::uint64_t>& seen) const {
  for (std::size_t w = 0; w < words_; ++w) {
    std::uint64_t hidden = 0;
    for (std::size_t row = 0; row < group.rows; ++row) {
      hidden |= seen[w] & ~RowBits(group.first_row + row)[w];
    }
    if (hidden == 0) continue;
    return static_cast<std::int64_t>(w * 64) + std::countr_zero(hidden);
  }
  return static_cast<std::int64_t>(words_ * 64);
}

void AttentionPlan::Make(const TensorView& mask, int rows, int first_row,
                         std::size_t most_rows) {
  groups_.clear();
  runs_.clear();
  blocks_.clear();
  ReadMask(mask, rows, first_row);
  GroupRows(AsSize(rows), most_rows);
  OrderGroups();
}

void AttentionPlan::ReadMask(const TensorView& mask, int rows, int first_row) {
  words_ = AsSize((mask.shape[0] + 63) / 64);
  const bool one_for_all = mask.stride[1] == 0;
  row_step_ = one_for_all ? 0 : words_;
  const int stored = one_for_all ? 1 : rows;
  bits_.assign(words_ * AsSize(stored), 0);
  for (int row = 0; row < stored; ++row) {
    std::uint64_t* bits = bits_.data() + AsSize(row) * words_;
    if (mask.dtype == DType::kBits) {
      std::memcpy(bits, mask.at(0, first_row + row), words_ * 8);
      // Bits past the columns are 0 in a valid mask.
      const auto last = static_cast<std::int64_t>(words_ - 1) * 64;
      bits[words_ - 1] &= BitsBetween(0, mask.shape[0] - last);
    } else if (mask.dtype == DType::kF32) {
      ReadMaskRow<std::uint32_t>(mask, first_row + row, bits);
    } else {
      ReadMaskRow<std::uint16_t>(mask, first_row + row, bits);
    }
  }
}

// A row joins the group before it if the group then reads few cells for rows
// that do not see them.
void AttentionPlan::GroupRows(std::size_t rows, std::size_t most_rows) {
  std::vector<std::uint64_t> seen(words_);
  std::vector<std::uint64_t> joined(words_);
  std::size_t seen_sum = 0;  // Cells that the rows see, row by row.
  RowGroup group;
  for (std::size_t row = 0; row < rows; ++row) {
    std::size_t sees = 0;
    for (std::size_t w = 0; w < words_; ++w) {
      const std::uint64_t word = RowBits(row)[w];
      joined[w] = seen[w] | word;
      sees += AsSize(std::popcount(word));
    }
    const std::size_t reads = Population(joined) * (group.rows + 1);
    const bool joins = group.rows > 0 && group.rows < most_rows &&
                       8 * reads <= (8 + kUnseenEighths) * (seen_sum + sees);
    if (!joins && group.rows > 0) {
      AddGroup(group, seen);
      group = {.first_row = row};
      seen_sum = 0;
      std::copy_n(RowBits(row), words_, joined.data());
    }
    ++group.rows;
    seen_sum += sees;
    std::swap(seen, joined);
  }
  AddGroup(group, seen);
}

void AttentionPlan::Make(const AttentionTable& table, std::size_t most_rows) {
  groups_.clear();
  runs_.clear();
  bits_.clear();
  blocks_.assign(table.blocks.begin(), table.blocks.end());
  columns_ = AsSize(table.columns);
  window_ = table.window;
  const auto most = static_cast<std::int64_t>(most_rows);
  std::size_t row = 0;
  for (std::size_t i = 0; i < table.lengths.size(); ++i) {
    const std::int64_t length = table.lengths[i];
    const std::int64_t rows = table.query_rows[i];
    for (std::int64_t first = 0; first < rows; first += most) {
      RowGroup group = {.first_row = row, .sequence = i};
      const std::int64_t count = std::min(most, rows - first);
      group.rows = AsSize(count);
      group.first_position = length - rows + first;
      group.first_run = runs_.size();
      Run run = {
          .begin = std::max<std::int64_t>(0, group.first_position - window_),
          .end = group.first_position + count};
      const bool last_sees_first = run.begin >= run.end - 1 - window_;
      if (last_sees_first) group.all_before = group.first_position + 1;
      if (table.sees_all) {
        run = {.begin = 0, .end = length};
        group.all_before = length;
      }
      group.cells = AsSize(run.end - run.begin);
      runs_.push_back(run);
      groups_.push_back(group);
      row += group.rows;
    }
  }
  OrderGroups();
}

void AttentionPlan::OrderGroups() {
  longest_first_.resize(groups_.size());
  std::iota(longest_first_.begin(), longest_first_.end(), std::size_t{0});
  std::ranges::sort(longest_first_, {}, [&](std::size_t g) {
    return std::pair(~groups_[g].cells, g);
  });
}

void AttentionPlan::SetVisible(const RowGroup& group,
                               std::span<const std::int64_t> cells,
                               std::span<std::uint64_t> visible) const {
  if (cells.back() < group.all_before) {
    std::ranges::fill(visible.first(group.rows), FirstBits(cells.size()));
    return;
  }
  const std::int64_t first = cells.front();
  const auto count = static_cast<std::int64_t>(cells.size());
  const bool adjacent = cells.back() - first + 1 == count;
  for (std::size_t i = 0; i < group.rows; ++i) {
    if (!blocks_.empty()) {
      const std::int64_t position =
          group.first_position + static_cast<std::int64_t>(i);
      visible[i] =
          BitsBetween(position - window_ - first, position + 1 - first);
      continue;
    }
    const std::uint64_t* bits = RowBits(group.first_row + i);
    std::uint64_t word = 0;
    if (adjacent) {
      const std::size_t w = AsSize(first / 64);
      const int shift = AsInt(first % 64);
      word = bits[w] >> shift;
      if (shift != 0 && w + 1 < words_) word |= bits[w + 1] << (64 - shift);
    } else {
      for (std::size_t t = 0; t < cells.size(); ++t) {
        const std::size_t cell = AsSize(cells[t]);
        word |= (bits[cell / 64] >> (cell % 64) & 1) << t;
      }
    }
    visible[i] = word;
  }
}

}  // namespace kvtwin::optimized
