// Compares the optimized twin's table of cells with a naive one, and mask rows
// that are kept with rows that are written anew, in caches of many words; the
// harness's caches are small.

#include "optimized/cell_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/guarded_cache.h"
#include "core/index.h"
#include "optimized/bit_tree.h"
#include "optimized/mask.h"
#include "optimized/targets.h"

namespace kvtwin::props {
namespace {

using optimized::BitTree;
using optimized::CellMove;
using optimized::CellTable;
using optimized::HostMask;
using optimized::kNone;
using optimized::kWordBits;
using optimized::Mask;
using optimized::PosRange;
using optimized::RowRule;
using optimized::Selection;
using optimized::Sequence;

struct NaiveCell {
  std::int32_t position = 0;
  std::set<int> owners;
};

// Drives a table and the naive one through the same random changes.
class Tables {
 public:
  Tables(std::uint32_t seed, std::size_t cells)
      : random_(seed), cells_(cells), table_(cells, 2, cells) {}

  CellTable& table() { return table_; }
  std::size_t size() const { return cells_.size(); }

  int Pick(int end) {
    return std::uniform_int_distribution<int>(0, end - 1)(random_);
  }

  void Change() {
    const int seq = Pick(kSequences);
    Sequence* sequence = table_.Find(seq);
    const int kind = Pick(20);
    if (kind < 9 || sequence == nullptr) return Append(seq);
    if (kind < 11) return Drop(*sequence, RangeIn(*sequence));
    if (kind < 13) return DropOldest(*sequence);
    if (kind < 15) return DropLast(*sequence);
    if (kind < 17) return Copy(*sequence, Pick(kSequences));
    if (kind < 19) return ShiftFrom(*sequence);
    const int rare = Pick(8);
    if (rare < 2) return Clear();
    if (rare < 5) return Defrag();
    if (rare < 6) return Mark(*sequence);
    table_.ClearGrown();
    grown_.clear();
  }

  // Compares everything that the two tables report.
  void Check() {
    std::vector<CellEntry> expected;
    std::vector<CellEntry> actual;
    std::size_t free = 0;
    std::map<int, PosRange> extremes;
    for (std::size_t cell = 0; cell < size(); ++cell) {
      const auto& [position, owners] = cells_[cell];
      if (owners.empty()) ++free;
      for (const int id : owners) {
        expected.push_back({AsInt(cell), position, id});
        auto& range = extremes.try_emplace(id, PosRange{position, position})
                          .first->second;
        range.first = std::min(range.first, position);
        range.last = std::max(range.last, position);
      }
    }
    table_.List(actual);
    ASSERT_EQ(actual, expected);
    ASSERT_EQ(table_.free_count(), free);
    for (int id = 0; id < kSequences; ++id) {
      ASSERT_EQ(table_.Find(id) != nullptr, extremes.contains(id)) << id;
      if (!extremes.contains(id)) grown_.erase(id);
    }
    std::set<int> grown;
    for (const Sequence* grown_sequence : table_.grown())
      grown.insert(grown_sequence->id);
    ASSERT_EQ(grown, grown_);
    ASSERT_EQ(table_.grown().size(), grown.size());
    for (const auto& [id, range] : extremes) {
      ASSERT_EQ(table_.Find(id)->extremes.first, range.first);
      ASSERT_EQ(table_.Find(id)->extremes.last, range.last);
    }
    CheckWords();
    CheckRuns();
    CheckFree();
    if (!extremes.empty()) CheckSequence(*table_.Find(extremes.begin()->first));
  }

  // A range of its stored positions, or a little around them.
  PosRange RangeIn(const Sequence& sequence) {
    const auto [first, last] = sequence.extremes;
    const std::int32_t from = std::max(0, first - 2 + Pick(last - first + 4));
    return {from, from + Pick(last - from + 3 > 0 ? last - from + 3 : 1)};
  }

 private:
  static constexpr int kSequences = 5;

  void CheckWords() const {
    for (std::size_t w = 0; w * kWordBits < size(); ++w) {
      PosRange range{INT32_MAX, -1};
      std::uint64_t shared = 0;
      const std::size_t end = std::min(size(), (w + 1) * kWordBits);
      for (std::size_t cell = w * kWordBits; cell < end; ++cell) {
        const auto& [position, owners] = cells_[cell];
        if (owners.empty()) continue;
        range.first = std::min(range.first, position);
        range.last = std::max(range.last, position);
        if (owners.size() > 1) shared |= std::uint64_t{1} << cell % kWordBits;
      }
      ASSERT_EQ(table_.ranges()[w].first, range.first) << "word " << w;
      ASSERT_EQ(table_.ranges()[w].last, range.last) << "word " << w;
      ASSERT_EQ(table_.shared(w), shared) << "word " << w;
    }
  }

  void CheckRuns() {
    // A run that exists, one that may exist, one that does not exist.
    const std::size_t longest = LongestRun();
    for (const std::size_t count :
         {std::size_t{1}, std::size_t{1} + longest / 2, longest, longest + 1,
          AsSize(Pick(300)) + 1}) {
      if (count == 0) continue;
      ASSERT_EQ(table_.FindRun(count), NaiveRun(count)) << count;
    }
  }

  void CheckFree() {
    std::vector<int> expected;
    for (std::size_t cell = 0; cell < size(); ++cell) {
      if (cells_[cell].owners.empty()) expected.push_back(AsInt(cell));
    }
    const int count = Pick(Size(expected) + 1);
    expected.resize(AsSize(count));
    std::vector<int> actual{-1};
    table_.FindFree(expected.size(), actual);
    ASSERT_EQ(actual, expected);
  }

  std::size_t LongestRun() const {
    std::size_t longest = 0;
    std::size_t length = 0;
    for (const NaiveCell& cell : cells_) {
      length = cell.owners.empty() ? length + 1 : 0;
      longest = std::max(longest, length);
    }
    return longest;
  }

  std::size_t NaiveRun(std::size_t count) const {
    std::size_t length = 0;
    for (std::size_t cell = 0; cell < size(); ++cell) {
      length = cells_[cell].owners.empty() ? length + 1 : 0;
      if (length == count) return cell + 1 - count;
    }
    return kNone;
  }

  void CheckSequence(Sequence& sequence) {
    // The position mostly grows, as in decoding.
    since_ = Pick(8) == 0 ? 0 : since_ + Pick(3);
    since_ = std::min(since_, sequence.extremes.last);
    const std::vector<std::size_t> later =
        CellsAt(sequence.id, {since_, INT32_MAX});
    const optimized::CellBounds bounds = table_.Since(sequence, since_);
    ASSERT_EQ(bounds.first, later.front());
    ASSERT_EQ(bounds.last, later.back());

    const PosRange range = RangeIn(sequence);
    std::vector<std::size_t> expected = CellsAt(sequence.id, range);
    Selection selected;
    table_.Select(sequence, range, selected);
    ASSERT_EQ(selected.count, expected.size());
    const auto in_order = table_.CellsAt(sequence, range);
    ASSERT_EQ(in_order.size(), expected.size());
    ASSERT_TRUE(std::is_sorted(
        in_order.begin(), in_order.end(), [&](std::int32_t a, std::int32_t b) {
          return table_.positions()[a] < table_.positions()[b];
        }));
    std::vector<std::size_t> actual(in_order.begin(), in_order.end());
    std::sort(actual.begin(), actual.end());
    ASSERT_EQ(actual, expected);
  }

  std::vector<std::size_t> CellsAt(int id, PosRange range) const {
    std::vector<std::size_t> actual;
    for (std::size_t cell = 0; cell < size(); ++cell) {
      const auto& [position, owners] = cells_[cell];
      if (owners.contains(id) && position >= range.first &&
          position <= range.last) {
        actual.push_back(cell);
      }
    }
    return actual;
  }

  void Append(int seq) {
    const Sequence* sequence = table_.Find(seq);
    std::int32_t position = sequence == nullptr
                                ? Pick(3)
                                : std::min(sequence->extremes.last, 1 << 20);
    if (Pick(30) == 0) position = Pick(100);
    const bool run = Pick(2) == 0;
    for (int count = Pick(3) == 0 ? Pick(150) : 1; count > 0; --count) {
      const std::size_t from = run ? 0 : AsSize(Pick(AsInt(size())));
      const std::size_t cell = table_.free().Next(from);
      if (cell == kNone) return;
      table_.Add(seq, cell, ++position);
      grown_.insert(seq);
      cells_[cell] = {position, {seq}};
    }
  }

  void Leave(int id, PosRange range) {
    for (const std::size_t cell : CellsAt(id, range)) {
      cells_[cell].owners.erase(id);
    }
  }

  void Drop(Sequence& sequence, PosRange range) {
    Leave(sequence.id, range);
    Selection leaving;
    table_.Select(sequence, range, leaving);
    table_.Drop(sequence, leaving);
    table_.FinishUpdate(sequence, /*stale=*/true);
  }

  void DropOldest(Sequence& sequence) {
    const std::int32_t last =
        sequence.extremes.first + (Pick(20) == 0 ? 1 << 21 : Pick(3));
    Leave(sequence.id, {0, last});
    table_.DropOldest(sequence, last);
  }

  // Drops the cells of its last position one by one, like a pass that is
  // undone.
  void DropLast(Sequence& sequence) {
    const std::int32_t last = sequence.extremes.last;
    for (const std::size_t cell : CellsAt(sequence.id, {last, last})) {
      table_.DropCell(sequence, cell);
      cells_[cell].owners.erase(sequence.id);
    }
    table_.FinishUpdate(sequence, /*stale=*/true);
  }

  void Copy(const Sequence& sequence, int to) {
    if (to == sequence.id) return;
    Sequence* old = table_.Find(to);
    if (old != nullptr) Drop(*old, {0, INT32_MAX});
    const std::int32_t len = RangeIn(sequence).last;
    for (const std::size_t cell : CellsAt(sequence.id, {0, len - 1})) {
      cells_[cell].owners.insert(to);
      grown_.insert(to);
    }
    Selection scratch;
    table_.CopyPrefix(sequence, to, len, scratch);
  }

  // Like Remove: some tokens leave, and all later ones move down accordingly.
  void ShiftFrom(Sequence& sequence) {
    const int id = sequence.id;
    const PosRange later{RangeIn(sequence).first, INT32_MAX};
    for (const std::size_t cell : CellsAt(id, later)) {
      if (cells_[cell].owners.size() > 1) return;
    }
    const std::int32_t offset = -Pick(std::min(later.first, 40) + 1);
    const PosRange leaving{later.first + offset, later.first - 1};
    Selection out;
    Selection moving;
    table_.Select(sequence, leaving, out);
    table_.Select(sequence, later, moving);
    table_.Drop(sequence, out);
    table_.AddToSelected(sequence, moving, offset);
    table_.FinishUpdate(sequence, /*stale=*/true);
    Leave(id, leaving);
    for (const std::size_t cell : CellsAt(id, later)) {
      cells_[cell].position += offset;
    }
  }

  void Mark(Sequence& sequence) {
    table_.Grows(sequence);
    grown_.insert(sequence.id);
  }

  void Clear() {
    table_.Clear();
    grown_.clear();
    cells_.assign(size(), {});
  }

  void Defrag() {
    std::vector<CellMove> moves;
    table_.Defrag(moves);
    for (const CellMove& move : moves) {
      ASSERT_TRUE(cells_[move.to].owners.empty());
      std::swap(cells_[move.to], cells_[move.from]);
    }
    ASSERT_EQ(table_.free_count() == 0 ? size() : table_.free().First(),
              size() - table_.free_count());
  }

  std::mt19937 random_;
  std::vector<NaiveCell> cells_;
  CellTable table_;
  std::set<int> grown_;  // See CellTable::grown.
  std::int32_t since_ = 0;
};

constexpr std::size_t kSizes[] = {1, 63, 64, 65, 200, 640, 3000};

TEST(Table, AgreesWithANaiveTable) {
  for (const std::size_t cells : kSizes) {
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      Tables tables(seed, cells);
      for (int step = 0; step < 400; ++step) {
        tables.Change();
        SCOPED_TRACE(testing::Message()
                     << cells << " cells, seed " << seed << ", step " << step);
        ASSERT_NO_FATAL_FAILURE(tables.Check());
      }
    }
  }
}

TEST(Table, FindsExtremesAcrossWordsOfOtherSequences) {
  const std::vector<std::string> targets = optimized::SupportedTargets();
  for (const std::string& target : targets) {
    ASSERT_TRUE(optimized::SelectTarget(target));
    CellTable table(400, 2, 0);
    table.Add(0, 0, 10);
    table.Add(1, 100, 3);
    table.Add(1, 101, 50);
    table.Add(0, 200, 12);
    table.Add(0, 300, 5);
    Sequence& sequence = *table.Find(0);
    Selection leaving;
    table.Select(sequence, {5, 5}, leaving);
    table.Drop(sequence, leaving);
    table.FinishUpdate(sequence, /*stale=*/true);
    EXPECT_EQ(sequence.extremes.first, 10);
    EXPECT_EQ(sequence.extremes.last, 12);
  }
  ASSERT_TRUE(optimized::SelectTarget(targets.front()));
}

// Kernels write whole vectors, but nothing past the end of the list.
TEST(Table, WritesOnlyTheRequestedFreeCells) {
  constexpr std::size_t kCells = 640;
  constexpr std::size_t kPast = 64;
  CellTable table(kCells, 1, 0);
  for (std::size_t cell = 0; cell < kCells; ++cell) {
    // One to seven free cells in a word.
    if (cell % (9 + cell / kWordBits * 6) != 3) table.Add(0, cell, 1);
  }
  const std::vector<std::string> targets = optimized::SupportedTargets();
  for (const std::string& target : targets) {
    ASSERT_TRUE(optimized::SelectTarget(target));
    for (std::size_t count = 1; count <= table.free_count(); ++count) {
      std::vector<int> found(count + kPast, -1);
      table.FindFree(count, found);
      ASSERT_EQ(found.size(), count);
      const int* past = found.data() + count;  // The vector has room for them.
      ASSERT_TRUE(
          std::all_of(past, past + kPast, [](int n) { return n == -1; }))
          << target << ", " << count << " cells";
    }
  }
  ASSERT_TRUE(optimized::SelectTarget(targets.front()));
}

// Expects that the rows of two masks show the same cells.
void ExpectSame(const Mask& kept, const Mask& fresh, DType dtype) {
  ASSERT_EQ(kept.view().shape, fresh.view().shape);
  const auto bytes = AsSize(RunBytes(dtype, kept.view().shape[0]));
  for (std::int64_t row = 0; row < kept.view().shape[1]; ++row) {
    ASSERT_EQ(
        0, std::memcmp(kept.view().at(0, row), fresh.view().at(0, row), bytes))
        << "row " << row;
  }
}

// Batches like those of a server: mostly the next token of each sequence,
// sometimes other shapes, other sequences, tokens that see the future, other
// views.
class Batches {
 public:
  explicit Batches(Tables& tables) : tables_(tables) {}

  const std::vector<RowRule>& Next() {
    if (rules_.empty() || tables_.Pick(12) == 0) {
      ids_.clear();
      for (int n = 1 + tables_.Pick(6); n > 0; --n) {
        ids_.push_back(tables_.Pick(6));
      }
      window_ = tables_.Pick(2) == 0 ? 1 << 22 : 1 + tables_.Pick(70);
    }
    rules_.clear();
    for (const int id : ids_) {
      Sequence* sequence = tables_.table().Find(id);
      std::int32_t position = sequence == nullptr ? 0 : sequence->extremes.last;
      if (tables_.Pick(25) == 0) position = tables_.Pick(position + 3);
      const bool sees_all = tables_.Pick(20) == 0;
      rules_.push_back(
          {sequence,
           {std::max(0, position - window_), sees_all ? INT32_MAX : position}});
    }
    return rules_;
  }

  optimized::CellSpan View() {
    const auto padding = std::size_t{1}
                         << (tables_.Pick(10) == 0 ? tables_.Pick(9) : 5);
    std::size_t first = tables_.size();
    std::size_t end = 0;
    for (const RowRule& rule : rules_) {
      if (rule.sequence == nullptr) continue;
      first = std::min(first, rule.sequence->members.First());
      end = std::max(end, rule.sequence->members.Last() + 1);
    }
    if (first >= end) return {0, tables_.size()};
    return {first / padding * padding,
            std::min(tables_.size(), (end / padding + 1) * padding)};
  }

 private:
  Tables& tables_;
  std::vector<int> ids_;
  std::vector<RowRule> rules_;
  std::int32_t window_ = 0;
};

TEST(Table, KeptRowsEqualNewOnes) {
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kBits}) {
    for (const std::size_t cells : kSizes) {
      for (std::uint32_t seed = 0; seed < 6; ++seed) {
        Tables tables(seed, cells);
        Batches batches(tables);
        HostMask kept;
        for (int step = 0; step < 400; ++step) {
          for (int n = tables.Pick(3); n > 0; --n) tables.Change();
          const std::vector<RowRule>& rules = batches.Next();
          const std::size_t rows = rules.size() + AsSize(tables.Pick(2));
          const optimized::CellSpan view = batches.View();
          HostMask fresh;
          kept.Build(tables.table(), rules, rows, view, dtype);
          fresh.Build(tables.table(), rules, rows, view, dtype);
          SCOPED_TRACE(testing::Message() << cells << " cells, seed " << seed
                                          << ", step " << step);
          ASSERT_NO_FATAL_FAILURE(ExpectSame(kept, fresh, dtype));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
