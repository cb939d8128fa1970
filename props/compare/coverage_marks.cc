#include "props/compare/coverage_marks.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/index.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

// The number of cells that the optimized twin processes at a time.
constexpr std::size_t kWordCells = 64;

// The tokens of a sequence: their number, the first and the last position.
struct Extent {
  std::int64_t count = 0;
  std::int64_t first = -1;
  std::int64_t last = -1;
};

Extent ExtentOf(const CacheLedger& ledger, int seq) {
  Extent extent;
  for (const LedgerToken& token : ledger.tokens()) {
    if (!token.HeldBy(seq)) continue;
    const bool only = extent.count++ == 0;
    extent.first =
        only ? token.position : std::min(extent.first, token.position);
    extent.last = std::max(extent.last, token.position);
  }
  return extent;
}

bool Holds(const CacheLedger& ledger, int seq, std::int64_t position) {
  return std::any_of(ledger.tokens().begin(), ledger.tokens().end(),
                     [&](const LedgerToken& token) {
                       return token.position == position && token.HeldBy(seq);
                     });
}

// Whether `seq` holds a token at this position, from before the current pass.
bool Kept(const CacheLedger& ledger, int seq, std::int64_t position) {
  return std::any_of(ledger.tokens().begin(), ledger.tokens().end(),
                     [&](const LedgerToken& token) {
                       return token.row < 0 && token.position == position &&
                              token.HeldBy(seq);
                     });
}

// Whether the memory is bounded. Asks about a sequence that does not exist: a
// cache with unbounded memory can resume even that sequence.
bool BoundedMemory(const CacheLedger& ledger) {
  return !ledger.encoder() && !ledger.CanResume(-1, 0);
}

bool Windowed(const CacheSpec& spec) {
  return IsWindowed(spec.kind) && spec.window.has_value();
}

}  // namespace

void CoverageCounts::Add(const CoverageCounts& other) {
  for (std::size_t i = 0; i < hits.size(); ++i) hits[i] += other.hits[i];
  histories += other.histories;
  discarded += other.discarded;
  full += other.full;
  calls += other.calls;
  refused += other.refused;
}

bool OfUnusedGroup(const CoverageCounts& counts, std::size_t mark) {
  constexpr std::array kGroups = {
      Mark(kFirstDraftMark), Mark(kFirstStateMark), Mark(kFirstDraftStateMark),
      Mark(kFirstHybridMark), kCoverageMarks.size()};
  const auto end = std::ranges::upper_bound(kGroups, mark);
  if (end == kGroups.begin()) return false;
  return std::all_of(IteratorAt(counts.hits, *(end - 1)),
                     IteratorAt(counts.hits, *end),
                     [](std::int64_t hits) { return hits == 0; });
}

std::vector<std::string> CoverageGaps(const CoverageCounts& counts) {
  std::vector<std::string> reasons;
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    if (counts.hits[i] > 0 || OfUnusedGroup(counts, i)) continue;
    reasons.push_back(fmt::format("never: {} ({})", kCoverageMarks[i].name,
                                  kCoverageMarks[i].statement));
  }
  const auto within = [&](std::string_view what, std::int64_t count,
                          std::int64_t of, double low, double high) {
    const double percent = 100.0 * static_cast<double>(count) /
                           static_cast<double>(std::max<std::int64_t>(of, 1));
    if (percent >= low && percent <= high) return;
    reasons.push_back(fmt::format("{:.1f} % of {}, expected {} to {} %",
                                  percent, what, low, high));
  };
  within("calls refused", counts.refused, counts.calls, 2, 20);
  within("histories discarded", counts.discarded, counts.histories, 0, 5);
  within("histories with a full cache", counts.full, counts.histories, 20, 100);
  return reasons;
}

// `before_` has the state before the batch.
void Observer::SeeDrafts(const Batch& batch, StatusCode code,
                         const CacheLedger& after) {
  Hit(Mark("draft_full"), code == StatusCode::kCacheFull);
  if (code != StatusCode::kOk || after.encoder()) return;
  const std::vector<LedgerToken>& before = before_.front().tokens();
  std::map<int, std::set<int>> parents;  // By sequence.
  bool chain = false, siblings = false, level = false, nothing = false;
  bool plain = false;
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const int seq = batch.sequences[i];
    const int parent = batch.parents[i];
    plain = plain || parent == kNotADraft;
    if (parent == kNotADraft) continue;
    const int stored = reference::CountDrafts(before, seq);
    chain = chain || parent >= stored;
    level = level || (parent >= 0 && parent < stored);
    siblings = siblings || !parents[seq].insert(parent).second;
    nothing = nothing || ExtentOf(before_.front(), seq).count == 0;
  }
  Hit(Mark("draft_chain"), chain);
  Hit(Mark("draft_siblings"), siblings);
  Hit(Mark("draft_level"), level);
  Hit(Mark("draft_of_nothing"), nothing);
  Hit(Mark("draft_beside_plain"), plain);
  const auto ordinary = [](const std::vector<LedgerToken>& tokens) {
    return std::ranges::count_if(tokens,
                                 [](auto& token) { return !token.IsDraft(); });
  };
  const auto added = std::ranges::count(batch.parents, kNotADraft);
  Hit(Mark("draft_evicts"),
      ordinary(after.tokens()) - added < ordinary(before));
  bool past = false;
  for (const LedgerToken& token : after.tokens()) {
    if (token.row < 0 || !token.IsDraft()) continue;
    const BatchToken at = {.sequence = token.drafted_by, .draft = token.draft};
    for (const LedgerToken& other : after.tokens()) {
      past = past || (reference::Follows(after.tokens(), at, other) &&
                      !after.MaySee(token.row, other));
    }
  }
  Hit(Mark("draft_past_window"), past);
}

void Observer::Commit(int seq, std::span<const int> path,
                      const reference::Ledger& ledger) {
  for (std::size_t i = 0; i < before_.size(); ++i) {
    SeeCommitted(seq, before_[i], ledger.parts()[i]);
  }
  const std::vector<LedgerToken>& before = before_.front().tokens();
  const int drafts = reference::CountDrafts(before, seq);
  if (drafts == 0) return;
  Hit(Mark("commit_all"), Size(path) == drafts);
  Hit(Mark("commit_some"), !path.empty() && Size(path) < drafts);
  Hit(Mark("commit_none"), path.empty());
  bool later = false;
  bool in_pass = false;
  for (const LedgerToken& token : before) {
    if (token.drafted_by != seq) continue;
    in_pass = in_pass || token.row >= 0;
    if (std::ranges::count(path, token.draft) == 0) continue;
    for (const LedgerToken& other : before) {
      later = later || (other.drafted_by == seq && other.draft < token.draft &&
                        other.parent == token.parent);
    }
  }
  Hit(Mark("commit_later_child"), later);
  Hit(Mark("commit_in_pass"), in_pass && pass_);
}

void Observer::BeforeCall(const reference::Ledger& ledger,
                          const Cache& reference) {
  before_ = ledger.parts();
  reference.ListCells(cells_);
  SeeOwners();
}

void Observer::Outcome(StatusCode code) {
  ++counts_.calls;
  counts_.refused += code == StatusCode::kCacheFull ||
                             code == StatusCode::kNotSupported ||
                             code == StatusCode::kSharedCells
                         ? 1
                         : 0;
  full_ = full_ || code == StatusCode::kCacheFull;
}

void Observer::End(bool ran) {
  ++counts_.histories;
  counts_.discarded += ran ? 0 : 1;
  counts_.full += full_ ? 1 : 0;
}

bool Observer::InBatch(int seq) const {
  return std::find(sequences_.begin(), sequences_.end(), seq) !=
         sequences_.end();
}

void Observer::StartForward(const Batch& batch, bool reserve, StatusCode code,
                            const reference::Ledger& ledger) {
  const bool ok = code == StatusCode::kOk;
  const bool had_pass = pass_;
  const bool was_reserved = reserved_;
  positions_.assign(batch.positions.begin(), batch.positions.end());
  sequences_.assign(batch.sequences.begin(), batch.sequences.end());
  except_.clear();
  put_.clear();
  got_.clear();
  pass_ = ok;
  reserved_ = ok && reserve;
  changed_ = false;
  if (ok) type_was_last_ = false;  // The first cache is active again.
  last_put_ = -1;
  SeeSizes();
  const CacheLedger& first = ledger.parts().front();
  const auto room = first.cells() - std::ssize(first.tokens());
  if (reserve) {
    Hit(Mark("reserved"), !first.tokens().empty());
    Hit(Mark("reserved_full"), !first.encoder() && room == 0);
    Hit(Mark("reserved_twice"), was_reserved);
    return;
  }
  if (HasDrafts(batch)) SeeDrafts(batch, code, first);
  Hit(Mark("full_ends_a_pass"), !ok && had_pass);
  Hit(Mark("legal_pass"), ok && setup_.legal);
  Hit(Mark("wrapper_second_full"),
      !ok && !first.encoder() && room >= std::ssize(positions_));
  Hit(Mark("wrapper_encoder_back"),
      !ok && first.encoder() && !batch.multimodal.empty());
  SeeBatch();
  for (std::size_t i = 0; i < before_.size(); ++i) {
    if (before_[i].encoder()) continue;
    SeeEviction(code, before_[i], ledger.parts()[i]);
    if (ok) SeeStates(before_[i], ledger.parts()[i]);
  }
  Hit(Mark("hybrid_full"), code == StatusCode::kCacheFull &&
                               setup_.spec.kind == Kind::kHybrid &&
                               before_.size() > 1);
  if (!wrapper() && !first.encoder() && !first.recurrent()) {
    SeePlacement(code, first);
  }
}

void Observer::SeeBatch() {
  const std::size_t tokens = positions_.size();
  Hit(Mark("batch_of_capacity"),
      pass_ && std::ssize(positions_) == setup_.init.capacity);
  bool unsorted = false;
  bool repeated = false;
  for (std::size_t i = 0; i < tokens; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (sequences_[i] != sequences_[j]) continue;
      unsorted = unsorted || positions_[j] > positions_[i];
      repeated = repeated || positions_[j] == positions_[i];
    }
  }
  Hit(Mark("unsorted"), unsorted);
  Hit(Mark("repeated"), repeated);
  bool interleaved = false;
  for (std::size_t i = 2; i < tokens; ++i) {
    interleaved = interleaved || (sequences_[i] == sequences_[i - 2] &&
                                  sequences_[i] != sequences_[i - 1]);
  }
  Hit(Mark("interleaved"), interleaved);
  Hit(Mark("position_max"),
      pass_ && std::find(positions_.begin(), positions_.end(), kOpenEnd) !=
                   positions_.end());
  Hit(Mark("sequence_max"), pass_ && sequences_.front() > 1 << 30);
  const CacheLedger& before = before_.front();
  const Extent stored = ExtentOf(before, sequences_.front());
  const std::int64_t position = positions_.front();
  Hit(Mark("position_again"), Holds(before, sequences_.front(), position));
  Hit(Mark("gap"), stored.count > 0 && position > stored.last + 1);
}

void Observer::SeeEviction(StatusCode code, const CacheLedger& before,
                           const CacheLedger& after) {
  bool any = false;
  for (const LedgerToken& token : before.tokens()) {
    std::size_t lost = 0;
    for (const int seq : token.sequences) {
      if (Kept(after, seq, token.position)) continue;
      ++lost;
      Hit(Mark("evicted"), InBatch(seq));
      Hit(Mark("evicted_idle"), !InBatch(seq));
      Hit(Mark("evicted_whole"), token.position == ExtentOf(before, seq).last);
    }
    any = any || lost > 0;
    const std::size_t owners = token.sequences.size();
    Hit(Mark("evicted_one_owner"), lost > 0 && lost < owners);
    Hit(Mark("evicted_all_owners"), lost > 1 && lost == owners);
  }
  const auto needed = std::ssize(before.tokens()) + std::ssize(positions_);
  Hit(Mark("eviction_makes_room"), any && pass_ && needed > before.cells());
  Hit(Mark("full_after_eviction"), any && code == StatusCode::kCacheFull);
  full_ = full_ || std::ssize(after.tokens()) == after.cells();
}

// Reports where the batch went, in a cache that is not a wrapper.
void Observer::SeePlacement(StatusCode code, const CacheLedger& after) {
  const bool full = code == StatusCode::kCacheFull;
  const auto cells = AsSize(after.cells());
  const std::size_t tokens = positions_.size();
  // The number of owners of each cell, after the eviction.
  std::vector<std::size_t> owners(cells);
  for (const CellEntry& entry : cells_) {
    if (!Kept(after, entry.sequence, entry.position)) continue;
    ++At(owners, entry.cell);
  }
  const std::size_t free = AsSize(std::count(owners.begin(), owners.end(), 0U));
  Hit(Mark("filled"), !full && tokens == free);
  Hit(Mark("full_by_one"), full && tokens == free + 1);
  Hit(Mark("full_when_empty"), full && tokens > cells);
  Hit(Mark("batch_of_all_cells"), !full && tokens == cells);
  std::size_t begin = 0;
  std::size_t length = 0;  // The run of free cells from `begin` on.
  for (std::size_t i = 0; i < cells && length < tokens; ++i) {
    if (owners[i] > 0) {
      length = 0;
      begin = i + 1;
    } else {
      ++length;
    }
  }
  const bool found = length == tokens;
  const auto first_free = std::find(owners.begin(), owners.end(), 0U);
  const bool skips = first_free < IteratorAt(owners, begin);
  if (setup_.spec.placement == Placement::kScatter) {
    return Hit(Mark("scattered"), !full && (!found || skips));
  }
  if (!found) return SeeDefrag(code, owners);
  const std::size_t end = begin + length;
  Hit(Mark("run_too_short"), skips);
  Hit(Mark("run_exact"), begin > 0 && end < cells && owners[end] > 0);
  Hit(Mark("run_at_end"), end == cells);
}

void Observer::SeeDefrag(StatusCode code,
                         const std::vector<std::size_t>& owners) {
  std::size_t last = owners.size();
  while (last > 0 && owners[last - 1] == 0) --last;
  std::size_t holes = 0;
  std::size_t runs = 0;
  for (std::size_t i = 0; i < last; ++i) {
    if (owners[i] > 0) continue;
    ++holes;
    runs += owners[i + 1] > 0 ? 1 : 0;
  }
  if (holes == 0) return;  // There is nothing to move.
  Hit(Mark("defrag_one_hole"), holes == 1);
  Hit(Mark("defrag_two_runs"), runs > 1);
  Hit(Mark("defrag_full"), code == StatusCode::kCacheFull);
  Hit(Mark("defrag_layers"), places_.size() > 1);
  const auto moved = IteratorAt(owners, last - holes);
  Hit(Mark("defrag_shared"),
      std::any_of(moved, owners.end(), [](std::size_t n) { return n > 1; }));
}

void Observer::SeeSizes() {
  const std::size_t tokens = positions_.size();
  Hit(Mark("batch_65"), tokens > 64);
  Hit(Mark("batch_257"), tokens > 256);
  Hit(Mark("layers_17"), pass_ && setup_.layers > 16);
}

// Reports owners and sequences before a call.
void Observer::SeeOwners() {
  if (cells_.size() <= 64) return;
  std::set<int> sequences;
  std::size_t of_cell = 0;
  std::size_t owners = 0;
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    sequences.insert(cells_[i].sequence);
    const bool same = i > 0 && cells_[i - 1].cell == cells_[i].cell;
    of_cell = same ? of_cell + 1 : 1;
    owners = std::max(owners, of_cell);
  }
  Hit(Mark("sequences_65"), sequences.size() > 64);
  Hit(Mark("owners_65"), owners > 64);
}

void Observer::Snapshot() { Hit(Mark("snapshot_in_pass"), pass_); }
void Observer::Add(bool any) { Hit(Mark("added_in_pass"), pass_ && any); }

void Observer::SetCausal(std::span<const int> except) {
  const std::set<int> now(except.begin(), except.end());
  const int last = Size(positions_) - 1;
  Hit(Mark("except_first"), last > 0 && now.contains(0));
  Hit(Mark("except_last"), last > 0 && now.contains(last));
  Hit(Mark("except_several"), now.size() > 1);
  Hit(Mark("except_65"), !now.empty() && *now.rbegin() > 64);
  Hit(Mark("except_cleared"), now.empty() && !except_.empty());
  except_ = now;
}

void Observer::Put(std::size_t part, int layer, DType dtype) {
  const std::pair place(layer, part);
  const bool known = places_.contains(place);
  Hit(Mark("put_rounded"),
      setup_.init.dtype != DType::kF32 && dtype == DType::kF32);
  Hit(Mark("v_dtype"),
      setup_.config.v_dtype.value_or(setup_.init.dtype) != setup_.init.dtype);
  Hit(Mark("reput"), put_.contains(place));
  Hit(Mark("layer_reserved"), reserved_ && !known);
  Hit(Mark("encoder_reput"),
      known && !reserved_ && SpecOf(part).kind == Kind::kEncoder);
  SeeOrder(part, layer);
  const RowDims& rows = setup_.rows;
  Hit(Mark("row_257"), rows.k_head_dim * rows.kv_heads > 256);
  put_.insert(place);
}

void Observer::SeeOrder(std::size_t part, int layer) {
  Hit(Mark("layer_before_type"), type_was_last_);
  Hit(Mark("layers_back"), layer < last_put_);
  const std::pair place(layer, part);
  Hit(Mark("get_between_puts"),
      !put_.contains(place) && got_.size() > got_.count(place));
  Hit(Mark("change_before_put"), changed_);
  places_.insert(place);
  const auto other = places_.lower_bound({layer, 0});
  Hit(Mark("layer_of_another_type"),
      std::next(other) != places_.end() && std::next(other)->first == layer);
  last_put_ = layer;
}

void Observer::Get(std::size_t part, int layer, const KvView& view,
                   const reference::Ledger& ledger, const Cache& reference) {
  got_.emplace(layer, part);
  if (view.mask.data == nullptr) return;
  Hit(Mark("columns_257"), view.mask.shape[0] > 256);
  Hit(Mark("columns_1025"), view.mask.shape[0] > 1024);
  Hit(Mark("mask_padded_by_64"),
      view.mask.shape[1] > std::ssize(positions_) + 64);
  if (reserved_) return;
  std::vector<CellEntry> cells;
  reference.ListCells(cells);
  SeeView(view, cells, reference.CellCount());
  SeeRows(part, layer, ledger.parts()[part]);
  const CacheSpec& spec = SpecOf(part);
  if (Windowed(spec)) SeeWindow(*spec.window, view, cells);
}

void Observer::SeeView(const KvView& view, const std::vector<CellEntry>& cells,
                       int cell_count) {
  const auto first = AsSize(view.first_cell);
  const std::size_t end = first + AsSize(view.mask.shape[0]);
  std::vector<bool> used(AsSize(cell_count));
  std::vector<bool> mine(used.size());
  for (const CellEntry& entry : cells) {
    const auto cell = AsSize(entry.cell);
    used[cell] = true;
    mine[cell] = mine[cell] || InBatch(entry.sequence);
  }
  bool strangers = false;
  bool cut = false;
  bool below = false;
  bool hole = false;  // A free cell after a used cell.
  bool hole_in_view = false;
  for (std::size_t i = 0; i < used.size(); ++i) {
    const bool in_view = i >= first && i < end;
    strangers = strangers || (in_view && used[i] && !mine[i]);
    cut = cut || (!in_view && mine[i]);
    below = below || (i < first && !used[i]);
    hole = hole || (in_view && i > first && used[i - 1] && !used[i]);
    hole_in_view = hole_in_view || (in_view && hole && used[i]);
  }
  Hit(Mark("view_not_at_zero"), first > 0);
  Hit(Mark("hole_below_view"), below);
  Hit(Mark("hole_in_view"), hole_in_view);
  Hit(Mark("view_padded"), setup_.config.cache_padding > 1 && !used[end - 1]);
  Hit(Mark("view_cuts_sequence"), cut);
  Hit(Mark("view_strangers"), strangers);
  Hit(Mark("mask_padded"), view.mask.shape[1] > std::ssize(positions_));
  const bool within_word =
      view.mask.dtype == DType::kBits && first % kWordCells != 0;
  Hit(Mark("mask_bits_within_word"), within_word);
  Hit(Mark("mask_bits_two_words"),
      within_word && first / kWordCells != (end - 1) / kWordCells);
}

void Observer::SeeRows(std::size_t part, int layer, const CacheLedger& ledger) {
  const CacheSpec& spec = SpecOf(part);
  std::size_t of_pass = 0;
  bool never_put = false;
  bool later = false;
  for (const LedgerToken& token : ledger.tokens()) {
    of_pass += token.row >= 0 ? 1 : 0;
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      const int row = AsInt(i);
      if (!ledger.MaySee(row, token)) continue;
      never_put = never_put || !token.rows.contains(layer);
      // Only an excepted token can see a later one.
      later = later || token.position > positions_[i];
    }
  }
  bool chunk_edge = false;
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    chunk_edge = chunk_edge || (spec.kind == Kind::kChunked &&
                                positions_[i] % spec.chunk == 0 &&
                                Kept(ledger, sequences_[i], positions_[i] - 1));
  }
  Hit(Mark("row_never_put"), never_put);
  Hit(Mark("except_sees_later"), later);
  Hit(Mark("chunk_edge"), chunk_edge);
  Hit(Mark("pass_outlived"), of_pass < positions_.size());
}

void Observer::SeeWindow(std::int64_t window, const KvView& view,
                         const std::vector<CellEntry>& cells) {
  const std::int64_t first = view.first_cell;
  const std::int64_t end = first + view.mask.shape[0];
  bool edge = false;
  bool past = false;
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    const std::int64_t reach = positions_[i] - window;
    std::int64_t oldest = kOpenEnd;
    bool in_view = false;
    for (const CellEntry& entry : cells) {
      if (entry.sequence != sequences_[i] || entry.position >= oldest) continue;
      oldest = entry.position;
      in_view = entry.cell >= first && entry.cell < end;
    }
    edge = edge || (window > 0 && oldest == reach);
    past = past || (oldest == reach - 1 && in_view);
  }
  Hit(Mark("window_edge"), edge);
  Hit(Mark("window_past_edge"), past);
}

void Observer::Remove(int seq, std::int32_t begin, std::int32_t end,
                      StatusCode code, const reference::Ledger& ledger) {
  const bool ok = code == StatusCode::kOk;
  changed_ = changed_ || (pass_ && ok);
  Hit(Mark("shift_refused_shared"), code == StatusCode::kSharedCells);
  Hit(Mark("shift_refused_none"), code == StatusCode::kNotSupported);
  Hit(Mark("wrapper_remove_refused"),
      !ok && wrapper() && !before_.front().encoder() &&
          before_.front().Remove(seq, begin, end).ok());
  if (!ok) return;
  Hit(Mark("drop_drafts_remove"),
      reference::CountDrafts(before_.front().tokens(), seq) > 0);
  if (end == kOpenEnd) SeeOneLength(seq, begin, /*copied=*/false, ledger);
  for (std::size_t i = 0; i < before_.size(); ++i) {
    SeeRollback(seq, begin, before_[i], ledger.parts()[i]);
    if (before_[i].encoder()) {
      const bool cached = ledger.parts()[i].slots().cached;
      Hit(Mark("encoder_forgets"), before_[i].slots().cached && !cached);
      Hit(Mark("encoder_keeps"), cached && end > begin);
      continue;
    }
    SeeRange(seq, begin, end, i);
    if (end != kOpenEnd) SeeShift(seq, begin, end, before_[i]);
  }
}

void Observer::SeeRange(int seq, std::int64_t begin, std::int32_t end,
                        std::size_t part) {
  const CacheLedger& before = before_[part];
  const bool open = end == kOpenEnd;
  const Extent extent = ExtentOf(before, seq);
  std::int64_t leaving = 0;
  bool shared = false;
  bool in_pass = false;
  for (const LedgerToken& token : before.tokens()) {
    if (!token.HeldBy(seq) || token.position < begin) continue;
    if (token.position >= end && !open) continue;
    ++leaving;
    shared = shared || token.sequences.size() > 1;
    in_pass = in_pass || (pass_ && token.row >= 0);
  }
  const bool whole = leaving > 0 && leaving == extent.count;
  Hit(Mark("remove_unknown"), extent.count == 0);
  Hit(Mark("remove_nothing"), extent.count > 0 && leaving == 0 && begin < end);
  Hit(Mark("remove_zero_length"), extent.count > 0 && begin == end);
  Hit(Mark("remove_all_open"), whole && open);
  Hit(Mark("remove_all_range"), whole && !open);
  Hit(Mark("remove_past_end"), !open && leaving > 0 && end > extent.last + 1);
  Hit(Mark("remove_one_owner"), shared);
  Hit(Mark("remove_in_pass"), in_pass);
  const CacheSpec& spec = SpecOf(part);
  Hit(Mark("remove_at_window"),
      Windowed(spec) && leaving > 0 && !open && begin > extent.first &&
          end <= extent.last && begin == extent.last - *spec.window);
}

void Observer::SeeShift(int seq, std::int64_t begin, std::int64_t end,
                        const CacheLedger& before) {
  bool moves = false;
  bool rows = false;
  bool layers = false;
  bool bare = false;
  bool shared = false;
  for (const LedgerToken& token : before.tokens()) {
    if (!token.HeldBy(seq)) continue;
    shared = shared || (token.position < begin && token.sequences.size() > 1);
    if (token.position < end) continue;
    moves = moves || begin < end;
    rows = rows || !token.rows.empty();
    layers = layers || token.rows.size() > 1;
    bare = bare || token.rows.empty();
  }
  Hit(Mark("shift"), moves);
  Hit(Mark("shift_shared_earlier"), moves && shared);
  const DType dtype = setup_.init.dtype;
  Hit(Mark("shift_f16"), moves && rows && dtype == DType::kF16);
  Hit(Mark("shift_bf16"), moves && rows && dtype == DType::kBF16);
  Hit(Mark("shift_f8"), moves && rows && dtype == DType::kF8);
  Hit(Mark("shift_blocks"), moves && rows && IsBlockDType(dtype));
  Hit(Mark("shift_layers"), moves && layers);
  Hit(Mark("shift_bare"), moves && bare);
}

void Observer::CopyPrefix(int src, int dst, std::int32_t len, StatusCode code,
                          const reference::Ledger& ledger) {
  Hit(Mark("copy_refused"), code == StatusCode::kNotSupported);
  if (code != StatusCode::kOk) return;
  changed_ = changed_ || pass_;
  for (std::size_t i = 0; i < before_.size() && src != dst; ++i) {
    SeeFork(src, dst, len, before_[i], ledger.parts()[i]);
  }
  if (src != dst) SeeOneLength(src, len, /*copied=*/true, ledger);
  const std::vector<LedgerToken>& tokens = before_.front().tokens();
  Hit(Mark("drop_drafts_copy"), reference::CountDrafts(tokens, dst) > 0);
  Hit(Mark("copy_beside_drafts"),
      src != dst && reference::CountDrafts(tokens, src) > 0);
  for (const CacheLedger& before : before_) {
    const Extent from = ExtentOf(before, src);
    const Extent to = ExtentOf(before, dst);
    const bool self = src == dst;
    bool any = false;
    bool others = false;  // Tokens that only `dst` holds.
    bool both = false;
    bool third = false;
    bool in_pass = false;
    for (const LedgerToken& token : before.tokens()) {
      others = others || (token.HeldBy(dst) && !token.HeldBy(src));
      if (!token.HeldBy(src)) continue;
      both = both || token.HeldBy(dst);
      if (token.position >= len) continue;
      any = true;
      third = third || (token.sequences.size() > 1 && !token.HeldBy(dst));
      in_pass = in_pass || (pass_ && token.row >= 0);
    }
    Hit(Mark("copy_self"), self && from.last >= len);
    Hit(Mark("copy_self_whole"), self && any && from.last < len);
    Hit(Mark("copy_nothing"), from.count == 0 && to.count > 0);
    if (self) continue;
    Hit(Mark("copy_onto_live"), any && others);
    Hit(Mark("copy_onto_copy"), any && both);
    Hit(Mark("copy_third"), third);
    Hit(Mark("copy_beyond"), any && len > from.last + 1);
    Hit(Mark("copy_in_pass"), in_pass);
  }
}

void Observer::CanResume(int seq, std::int32_t pos,
                         const reference::Ledger& ledger) {
  std::size_t yes = 0;
  for (std::size_t i = 0; i < ledger.parts().size(); ++i) {
    const CacheLedger& part = ledger.parts()[i];
    const bool can = part.CanResume(seq, pos);
    yes += can ? 1 : 0;
    if (!BoundedMemory(part)) continue;
    const Extent stored = ExtentOf(part, seq);
    const std::int64_t needed = pos - *SpecOf(i).window;
    const bool past_end = pos > stored.last + 1;
    Hit(Mark("resume_unknown"), stored.count == 0);
    Hit(Mark("resume_edge"), can && needed > 0 && stored.first == needed);
    Hit(Mark("resume_evicted"), !can && stored.count > 0 && !past_end);
    Hit(Mark("resume_past_end"), !can && stored.count > 0 && past_end);
  }
  Hit(Mark("resume_split"), yes > 0 && yes + 1 == ledger.parts().size());
}

}  // namespace kvtwin::props
