// The plan of an attention: the rows that are computed together, and the cells
// that they read.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_PLAN_H_
#define KVTWIN_OPTIMIZED_ATTENTION_PLAN_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "core/assert.h"
#include "core/index.h"
#include "kvtwin/attention.h"
#include "kvtwin/tensor.h"
#include "optimized/attention_kernels.h"

namespace kvtwin::optimized {

// Rows that follow each other and see nearly the same cells.
struct RowGroup {
  std::size_t first_row = 0;
  std::size_t rows = 0;
  std::size_t cells = 0;  // Cells that at least one row sees: the runs.
  std::size_t first_run = 0;
  std::int64_t all_before = 0;      // All rows see the runs before this cell.
  std::size_t sequence = 0;         // Its number in a table.
  std::int64_t first_position = 0;  // The position of first_row, in a table.

  std::size_t tiles() const {
    return (cells + kAttentionTile - 1) / kAttentionTile;
  }
};

class AttentionPlan {
 public:
  // Plans rows of a mask, or of sequences of a table, in place of the plan
  // before. Groups have up to `most_rows` rows, at most kMostGroupRows.
  void Make(const TensorView& mask, int rows, int first_row,
            std::size_t most_rows);
  void Make(const AttentionTable& table, std::size_t most_rows);

  const std::vector<RowGroup>& groups() const { return groups_; }
  // The indices of the groups, those with the most cells first: if they are
  // computed in this order, no thread waits long for another at the end.
  const std::vector<std::size_t>& longest_first() const {
    return longest_first_;
  }
  // The blocks of a group's sequence. Null: the plan is that of a mask.
  const std::int32_t* BlocksOf(const RowGroup& group) const {
    return blocks_.empty() ? nullptr
                           : blocks_.data() + group.sequence * columns_;
  }
  // Calls does(cells) with the cells of each tile of one of `parts` parts of a
  // group, up to `most` tiles. The cells of full tiles are `streams` streams of
  // equal length, one after another, and a full tile has equally many cells of
  // each stream. Cells that SetVisible takes are in one stream. Requires:
  // `streams` is 1 or kStreams.
  template <class Does>
  void ForEachTile(const RowGroup& group, std::size_t part, std::size_t parts,
                   std::size_t streams, std::size_t most,
                   const Does& does) const;
  // Sets bit t of visible[i] if row i of the group sees cells[t].
  void SetVisible(const RowGroup& group, std::span<const std::int64_t> cells,
                  std::span<std::uint64_t> visible) const;

 private:
  struct Run {
    std::int64_t begin;
    std::int64_t end;
  };

  // A place in the runs of a group.
  class Cursor {
   public:
    explicit Cursor(const Run* run = nullptr) : run_(run) {}

    // Calls does(begin, count) for each range of the next `count` cells.
    template <class Does>
    void Take(std::size_t count, const Does& does) {
      while (count > 0) {
        const std::int64_t begin = run_->begin + taken_;
        const std::size_t some = std::min(count, AsSize(run_->end - begin));
        does(begin, some);
        count -= some;
        taken_ += AsInt(some);
        if (begin + AsInt(some) < run_->end) continue;
        ++run_;
        taken_ = 0;
      }
    }
    void Skip(std::size_t count) {
      Take(count, [](std::int64_t, std::size_t) {});
    }
    // Sets `cells` to the next cells.
    void Take(std::span<std::int64_t> cells) {
      Take(cells.size(), [&](std::int64_t begin, std::size_t count) {
        std::iota(cells.begin(), cells.begin() + AsInt(count), begin);
        cells = cells.subspan(count);
      });
    }

   private:
    const Run* run_;
    std::int64_t taken_ = 0;  // Cells of the run before this place.
  };

  void ReadMask(const TensorView& mask, int rows, int first_row);
  void GroupRows(std::size_t rows, std::size_t most_rows);
  void OrderGroups();
  void AddGroup(RowGroup group, const std::vector<std::uint64_t>& seen);
  // Returns the words whose bits say which cells a row of a mask sees.
  const std::uint64_t* RowBits(std::size_t row) const {
    return bits_.data() + row * row_step_;
  }
  std::int64_t FirstHidden(const RowGroup& group,
                           const std::vector<std::uint64_t>& seen) const;

  std::vector<RowGroup> groups_;
  std::vector<std::size_t> longest_first_;
  std::vector<Run> runs_;
  // [words_, rows] of a mask; one row if the mask has one row for all.
  std::vector<std::uint64_t> bits_;
  std::size_t words_ = 0;
  std::size_t row_step_ = 0;          // Words from one row to the next.
  std::vector<std::int32_t> blocks_;  // [columns_, sequences] of a table.
  std::size_t columns_ = 0;
  std::int64_t window_ = 0;
};

template <class Does>
void AttentionPlan::ForEachTile(const RowGroup& group, std::size_t part,
                                std::size_t parts, std::size_t streams,
                                std::size_t most, const Does& does) const {
  KVTWIN_DCHECK(streams == 1 || streams == kStreams);
  const std::size_t begin = group.tiles() * part / parts * kAttentionTile;
  const std::size_t end = std::min(
      group.tiles() * (part + 1) / parts * kAttentionTile, group.cells);
  if (begin >= end) return;
  const std::size_t tiles = (end - begin) / kAttentionTile;
  const std::size_t length = kAttentionTile / streams;
  std::array<Cursor, kStreams> cursors;
  Cursor cursor(runs_.data() + group.first_run);
  cursor.Skip(begin);
  for (std::size_t s = 0; s < streams; ++s) {
    At(cursors, s) = cursor;
    cursor.Skip(tiles * length);
  }
  std::array<std::int64_t, kAttentionTile> cells;
  for (std::size_t tile = 0; tile < std::min(tiles, most); ++tile) {
    for (std::size_t s = 0; s < streams; ++s) {
      At(cursors, s).Take(std::span(cells).subspan(s * length, length));
    }
    does(std::span(cells));
  }
  const auto rest =
      std::span(cells).first(end - begin - tiles * kAttentionTile);
  if (rest.empty() || tiles >= most) return;
  cursor.Take(rest);
  does(rest);
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_PLAN_H_
