#include "props/search/explore_worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/save.h"
#include "props/compare/failure.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

void CheckCodes(const Status& ledger, const Status& reference,
                const Status& subject) {
  if (ledger.code() == reference.code() && ledger.code() == subject.code()) {
    return;
  }
  Check(ledger.code() == reference.code(), "reference: result",
        fmt::format("{} by the ledger, {} by the reference",
                    StatusName(ledger.code()), StatusName(reference.code())));
  Check(ledger.code() == subject.code(), "subject: result",
        fmt::format("expected {}, got {}", StatusName(ledger.code()),
                    StatusName(subject.code())));
}

// The tags of the batch of step `i` of a path; the step that is checked has
// those from 1 on.
int FirstTag(std::size_t i) { return 3 + 2 * AsInt(i); }

// Makes a call other than StartForward.
template <class Model>
Status MakeOn(Model& model, const ExploreStep& step) {
  switch (step.kind) {
    case OpKind::kDrop:
      return model.Remove(step.seq, step.begin, step.end);
    case OpKind::kCommit:
      return model.Commit(step.seq, step.path);
    default:
      return model.CopyPrefix(step.seq, step.dst, step.end);
  }
}

// Returns whether the tensor has no gaps; its last dimension must be 1, so that
// its stride there does not matter.
bool IsDense(const TensorView& view) {
  const Shape expected = DenseView(nullptr, view.dtype, view.shape).stride;
  return view.shape[3] == 1 &&
         std::equal(expected.begin(), expected.end() - 1, view.stride.begin());
}

bool SameBytes(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  if (IsDense(a) && IsDense(b)) {
    return std::memcmp(a.data, b.data, DenseBytes(a.dtype, a.shape)) == 0;
  }
  return CopyOf(a, a.dtype) == CopyOf(b, b.dtype);
}

// Compares masks, whose rows may have gaps between them.
bool SameMasks(const TensorView& a, const TensorView& b) {
  const auto element = static_cast<std::int64_t>(SizeOf(a.dtype));
  if (a.shape != b.shape || a.stride[0] != element || b.stride[0] != element) {
    return SameBytes(a, b);
  }
  bool same = a.dtype == b.dtype;
  const Shape row{a.shape[0], 1, 1, 1};
  for (std::int64_t i = 0; i < a.shape[1]; ++i) {
    same = same && SameBytes(DenseView(a.at(0, i), a.dtype, row),
                             DenseView(b.at(0, i), b.dtype, row));
  }
  return same;
}

// Returns whether row `row` of `rows`, of shape [head_dim, kv_heads, n], is
// equal to `one`, of shape [head_dim, kv_heads].
bool HasRow(const DenseTensor& rows, std::size_t row, const DenseTensor& one) {
  const std::size_t line = one.bytes.size();
  return one.dtype == rows.dtype && one.shape[0] == rows.shape[0] &&
         one.shape[1] == rows.shape[1] &&
         std::memcmp(one.bytes.data(), &rows.bytes[row * line], line) == 0;
}

// Whether the cache says that it holds exactly that.
bool Holds(const Cache& cache, const CacheState& expected) {
  const Result<CacheState> actual = cache.Snapshot();
  return actual.ok() && *actual == expected;
}

}  // namespace

ExploreWorker::ExploreWorker(const Setup& setup, const StateCodec& codec,
                             const Subject& subject)
    : codec_(codec),
      can_(subject.abilities),
      is_twin_(subject.is_twin()),
      types_(std::max(Size(setup.spec.caches), 1)),
      ledger_(setup.spec),
      entered_(setup.spec),
      reference_(*MakeCache(setup.spec, "reference")),
      tested_(*subject.Make(setup)) {
  const InitArgs& init = setup.init;
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    Status status = cache->SetConfig(setup.config);
    if (status.ok()) {
      status = cache->Init(init);
    }
    const bool refuses = status.code() == StatusCode::kNotSupported;
    if (refuses && !subject.is_twin()) throw NotMade();
    Check(status.ok(), "subject: result", "Init is refused");
  }
  Check(ledger_.Init(setup.config, init).ok(), "reference: result",
        "Init is refused by the ledger");
}

void ExploreWorker::Enter(const ExploreEntry& entry) {
  EnterBase(entry.base);
  if (entry.path.empty()) return;
  for (const ExploreStep& given : entry.path) {
    const ExploreStep step = *Resolved(given);
    if (step.kind != OpKind::kPut) {
      const Status ignored = MakeOn(ledger_, step);
    } else if (ledger_.StartForward(step.batch(), step.reserve).ok()) {
      const KvRows put = RowsOfBatch(step, FirstTag(path_.size()));
      for (int type = 0; type < types_; ++type) {
        ledger_.SetLayerType(type);
        ledger_.active().Put(type, put.key.view(), put.value.view());
      }
      ledger_.SetLayerType(0);
    }
    path_.push_back(step);
  }
  entered_ = ledger_;
  RestoreCaches();
  CheckCodes({}, reference_->SnapshotTo(expected_), {});
  state_ = expected_;
  FindDrafts();
  entered_drafts_ = drafts_;
}

void ExploreWorker::EnterBase(StateKey key) {
  base_ = state_ = codec_.Decode(key);
  path_.clear();
  entered_drafts_.clear();
  drafts_.clear();
  turn_ = AsInt(key % 64);
  ledger_.Restore(state_);
  entered_ = ledger_;
  RestoreCaches();
  Check(Holds(*reference_, state_), "reference: snapshot",
        "what was restored is not what was saved");
  Check(Holds(*tested_, state_), "subject: snapshot",
        "what was restored is not what was saved");
  // Checked in one of 16 states, because it costs as much as some steps.
  if ((key * 0x9E3779B97F4A7C15U) >> 60 == 0) {
    const auto read = StateFromBytes(StateToBytes(state_));
    Check(read.ok() && *read == state_, "subject: snapshot",
          "what was written as bytes is not what is read");
  }
  if (!can_.Can(KVTWIN_CAN_REFUSE_MISUSE)) return;
  CacheState damaged = state_;
  damaged.cells.push_back({reference_->CellCount(), 0, 0});
  Check(!tested_->Restore(damaged).ok() && Holds(*tested_, state_),
        "subject: snapshot", "a damaged state is not refused");
}

void ExploreWorker::Note(const Failure& failure, std::int64_t step,
                         Expansion& expansion) const {
  if (expansion.failure) return;
  expansion.failure = failure;
  expansion.failed = {.step = step,
                      .except = except_,
                      .reserved = reserved_,
                      .reserved_again = reserved_again_,
                      .positions = reserving_.positions,
                      .sequences = reserving_.sequences};
}

Expansion ExploreWorker::Expand(
    const ExploreEntry& entry, const std::vector<ExploreStep>& steps,
    const std::function<void(std::size_t)>& on_step) {
  Expansion expansion;
  const auto enter = [&](std::int64_t step) {
    try {
      Enter(entry);
      return true;
    } catch (const Failure& differs) {
      if (step < 0) ++expansion.differences;
      Note(differs, step, expansion);
      return false;
    }
  };
  except_.clear();
  reserved_ = reserved_again_ = false;
  if (!enter(-1)) return expansion;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (on_step) on_step(i);
    try {
      const bool renamed = !entry.path.empty();
      if (!Do(renamed ? Renamed(steps[i], entry.names) : steps[i],
              expansion.checked)) {
        continue;
      }
      const std::vector<int>* renaming = nullptr;
      Expansion::Found& found = expansion.found.emplace_back();
      found.state = Key(&renaming);
      found.step = static_cast<std::uint32_t>(i);
      if (drafts_.empty()) continue;
      found.names.resize(renaming->size());
      for (int s = 0; s < Size(*renaming); ++s) {
        At(found.names, At(*renaming, s)) = s;
      }
    } catch (const Failure& differs) {
      const auto step = static_cast<std::int64_t>(i);
      ++expansion.differences;
      Note(differs, step, expansion);
      // Later steps in the same process would fail, too.
      if (differs.party() == Party::kBackend) return expansion;
      if (!enter(step)) return expansion;
    }
  }
  return expansion;
}

void ExploreWorker::RestoreCaches() {
  Check(reference_->Restore(base_).ok(), "reference: snapshot", "refused");
  const Status restored = tested_->Restore(base_);
  Check(restored.ok(), "subject: snapshot",
        [&] { return "Restore answers " + restored.ToString(); });
  for (std::size_t i = 0; i < path_.size(); ++i) {
    for (Cache* cache : {reference_.get(), tested_.get()}) {
      Replay(path_[i], FirstTag(i), *cache);
    }
  }
  changed_ = false;
  type_ = 0;
  if (types_ < 2 || path_.empty()) return;
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    Status status = cache->SetLayerType(0);
    if (status.ok()) status = cache->SetLayer(0);
    CheckCodes({}, {}, status);
  }
}

// The step was checked when the state was found.
void ExploreWorker::Replay(const ExploreStep& step, int first, Cache& cache) {
  if (step.kind != OpKind::kPut) {
    const Status ignored = MakeOn(cache, step);
    return;
  }
  if (!cache.StartForward(step.batch(), step.reserve).ok()) return;
  const KvRows put = RowsOfBatch(step, first);
  for (int type = 0; type < types_; ++type) {
    Status status = types_ > 1 ? cache.SetLayerType(type) : Status();
    if (status.ok()) status = cache.SetLayer(type);
    if (status.ok()) status = cache.Put(put.key.view(), put.value.view());
    CheckCodes({}, {}, status);
  }
}

std::optional<ExploreStep> ExploreWorker::Resolved(
    const ExploreStep& step) const {
  if (step.kind == OpKind::kCommit) return ResolvedCommit(step);
  if (step.parents.empty()) return step;
  return ResolvedDrafts(step);
}

// As the client of histories places drafts.
std::optional<ExploreStep> ExploreWorker::ResolvedDrafts(
    ExploreStep step) const {
  std::map<int, std::map<int, std::int64_t>> drafts;  // By sequence and number.
  std::map<int, std::set<std::int64_t>> ends;         // The ends in each cache.
  for (const auto& part : ledger_.parts()) {
    std::map<int, std::int64_t> end;
    for (const auto& token : part.tokens()) {
      if (token.IsDraft()) {
        drafts[token.drafted_by][token.draft] = token.position;
      }
      for (const int seq : token.sequences) {
        end[seq] = std::max(end[seq], token.position + 1);
      }
    }
    for (const auto& [seq, last] : end) ends[seq].insert(last);
  }
  std::size_t count = 0;
  for (const auto& [seq, stored] : drafts) count += stored.size();
  for (std::size_t i = 0; i < step.parents.size(); ++i) {
    const int parent = step.parents[i];
    if (parent == kNotADraft) continue;
    auto& stored = drafts[step.sequences[i]];
    const std::set<std::int64_t>& last = ends[step.sequences[i]];
    const bool agree = last.size() < 2;
    if (!agree || parent >= Size(stored) || ++count > kBatchTags.size()) {
      return std::nullopt;
    }
    const std::int64_t next = last.empty() ? 0 : *last.begin();
    const std::int64_t position = parent >= 0      ? stored.at(parent) + 1
                                  : stored.empty() ? next
                                                   : stored.at(0);
    if (position >= codec_.size().positions) return std::nullopt;
    step.positions[i] = static_cast<std::int32_t>(position);
    stored[Size(stored)] = position;
  }
  return step;
}

std::optional<ExploreStep> ExploreWorker::ResolvedCommit(
    ExploreStep step) const {
  int last = kCommitted;
  for (int& choice : step.path) {
    std::set<int> children;
    for (const auto& token : ledger_.parts()[0].tokens()) {
      if (token.drafted_by == step.seq && token.parent == last) {
        children.insert(token.draft);
      }
    }
    if (choice >= Size(children)) return std::nullopt;
    choice = last = *std::next(children.begin(), choice);
  }
  return step;
}

// Sets drafts_ to the cells of drafts: those that no snapshot has (D7).
void ExploreWorker::FindDrafts() {
  drafts_.clear();
  if (!codec_.size().drafts) return;
  const int kept = type_;
  for (int type = 0; type < types_; ++type) {
    GoTo(type);
    std::vector<CellEntry> cells;
    std::vector<CellEntry> tested;
    reference_->ListCells(cells);
    tested_->ListCells(tested);
    Check(cells == tested, "subject: cells", [&] {
      return fmt::format("cells with drafts are{}, expected{}",
                         CellsText(tested), CellsText(cells));
    });
    const CacheState& part =
        expected_.caches.empty() ? expected_ : At(expected_.caches, type);
    std::vector<CellEntry>& drafts = drafts_.emplace_back();
    std::ranges::copy_if(cells, std::back_inserter(drafts), [&](auto& cell) {
      return std::ranges::count(part.cells, cell) == 0;
    });
    std::multiset<std::pair<std::int64_t, int>> found;
    for (const CellEntry& cell : drafts) {
      found.insert({cell.position, cell.sequence});
    }
    std::multiset<std::pair<std::int64_t, int>> known;
    for (const auto& token : ledger_.active().tokens()) {
      if (token.IsDraft()) known.insert({token.position, token.drafted_by});
    }
    Check(found == known, "reference: tokens",
          "the drafts are not those of the ledger");
  }
  GoTo(kept);
  if (std::ranges::all_of(drafts_, [](auto& one) { return one.empty(); })) {
    drafts_.clear();
  }
}

bool ExploreWorker::Do(const ExploreStep& given, std::int64_t& checked) {
  if (changed_) {
    ledger_ = entered_;
    RestoreCaches();
  }
  const std::optional<ExploreStep> resolved = Resolved(given);
  if (!resolved) return false;
  const ExploreStep& step = *resolved;
  ++checked;
  ++turn_;
  except_.clear();
  reserved_ = reserved_again_ = false;
  if (step.kind == OpKind::kAsk) {
    Ask(step);
    return false;
  }
  // Reserves before every fourth step, and in other states before others of the
  // steps: a reserving pass costs half as much as a step.
  const bool drafts = !entered_drafts_.empty() || !step.parents.empty();
  if (turn_ % 4 == 0 && can_.Can(KVTWIN_CAN_RESERVE) && !drafts) Reserve(step);
  switch (step.kind) {
    case OpKind::kPut:
      DoBatch(step, checked);
      break;
    case OpKind::kDrop:
      Remove(step);
      break;
    case OpKind::kCommit:
      CheckCodes(ledger_.Commit(step.seq, step.path),
                 reference_->Commit(step.seq, step.path),
                 tested_->Commit(step.seq, step.path));
      break;
    default:
      CheckCodes(ledger_.CopyPrefix(step.seq, step.dst, step.end),
                 reference_->CopyPrefix(step.seq, step.dst, step.end),
                 tested_->CopyPrefix(step.seq, step.dst, step.end));
      break;
  }
  CheckAll();
  if (reserved_ && step.kind != OpKind::kPut) ReserveAgain();
  return changed_;
}

void ExploreWorker::Remove(const ExploreStep& step) {
  const auto remove = [&](std::int32_t begin, std::int32_t end) {
    Status status = tested_->Remove(step.seq, begin, end);
    CheckCodes(ledger_.Remove(step.seq, begin, end),
               reference_->Remove(step.seq, begin, end), status);
    return status.ok();
  };
  const bool removed = remove(step.begin, step.end);
  // After a refusal no rule says which tokens are left.
  if (!removed && can_.Cannot(KVTWIN_CANNOT_UNDO_REMOVE)) remove(0, kOpenEnd);
}

// Makes a reserving pass before the step. It does not change the state, but the
// cache under test may keep masks of these sequences.
void ExploreWorker::Reserve(const ExploreStep& step) {
  reserved_ = true;
  reserving_.reserve = true;
  reserving_.sequences = step.sequences;
  if (step.kind == OpKind::kDrop) reserving_.sequences = {step.seq};
  if (step.kind == OpKind::kCopy) reserving_.sequences = {step.dst, step.seq};
  if (step.kind == OpKind::kCommit) reserving_.sequences = {step.seq};
  if (!can_.Can(KVTWIN_CAN_MIX)) reserving_.sequences.resize(1);
  reserving_.positions.assign(reserving_.sequences.size(),
                              turn_ / 4 % codec_.size().positions);
  CheckCodes({}, {},
             tested_->StartForward(
                 {reserving_.positions, reserving_.sequences, {}}, true));
}

// Makes the same pass after the step, and compares the masks.
void ExploreWorker::ReserveAgain() {
  reserved_again_ = true;
  const Batch batch{reserving_.positions, reserving_.sequences, {}};
  CheckCodes({}, reference_->StartForward(batch, true),
             tested_->StartForward(batch, true));
  const Result<KvView> expected = reference_->Get();
  const Result<KvView> actual = tested_->Get();
  CheckCodes(expected.status(), expected.status(), actual.status());
  Check(!expected.ok() || SameMasks(expected->mask, actual->mask),
        "subject: mask bytes", "the masks of the pass after it are not equal");
}

void ExploreWorker::Ask(const ExploreStep& step) {
  const bool expected = ledger_.CanResume(step.seq, step.end);
  Check(expected == *reference_->CanResume(step.seq, step.end),
        "reference: resume", "not what the ledger says");
  Check(expected == *tested_->CanResume(step.seq, step.end), "subject: resume",
        "not what the ledger says");
  const std::int32_t before = ledger_.ResumeBefore(step.seq, step.end);
  Check(before == *reference_->ResumeBefore(step.seq, step.end),
        "reference: resume", "ResumeBefore is not what the ledger says");
  Check(!is_twin_ || before == *tested_->ResumeBefore(step.seq, step.end),
        "subject: resume", "ResumeBefore is not what the ledger says");
}

void ExploreWorker::GoTo(int type) {
  ledger_.SetLayerType(type);
  if (type_ == type) return;
  type_ = type;
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    CheckCodes({}, cache->SetLayerType(type), cache->SetLayer(type));
  }
}

void ExploreWorker::DoBatch(const ExploreStep& step, std::int64_t& checked) {
  const Batch batch = step.batch();
  const Status status = tested_->StartForward(batch, step.reserve);
  CheckCodes(ledger_.StartForward(batch, step.reserve),
             reference_->StartForward(batch, step.reserve), status);
  if (!status.ok()) return;
  for (int type = types_; type-- > 0;) {  // Cache 0 is active already.
    GoTo(type);
    CheckBatchCells();
    PutRows(step);
    CheckView();
  }
  const auto tokens = Size(step.positions);
  for (int set = 1; can_.set_causal && set < 1 << tokens; ++set) {
    except_.clear();
    for (int i = 0; i < tokens; ++i) {
      if ((set >> i & 1) != 0) except_.push_back(i);
    }
    ++checked;
    for (int type = types_; type-- > 0;) {
      GoTo(type);
      SetCausal();
      CheckView();
    }
  }
  except_.clear();
}

void ExploreWorker::CheckBatchCells() {
  const auto expected = reference_->BatchCells();
  const auto actual = tested_->BatchCells();
  if (!std::equal(expected.begin(), expected.end(), actual.begin(),
                  actual.end())) {
    Check(false, "subject: batch cells",
          fmt::format("the batch is in cells [{}], expected [{}]",
                      fmt::join(actual, " "), fmt::join(expected, " ")));
  }
}

void ExploreWorker::SetCausal() {
  CheckCodes(ledger_.active().SetCausal(except_),
             reference_->SetCausal(except_), tested_->SetCausal(except_));
}

KvRows ExploreWorker::RowsOfBatch(const ExploreStep& step, int first) const {
  std::array<ExploreRow, kBatchTags.size()> rows{};
  for (std::size_t i = 0; i < step.positions.size(); ++i) {
    rows[i] = {static_cast<float>(-first - AsInt(i)), step.positions[i]};
  }
  return RowsOf(std::span(rows).first(step.positions.size()),
                codec_.size().dtype);
}

void ExploreWorker::PutRows(const ExploreStep& step) {
  const KvRows put = RowsOfBatch(step, 1);
  const TensorView key = put.key.view();
  const TensorView value = put.value.view();
  ledger_.active().Put(type_, key, value);
  CheckCodes({}, reference_->Put(key, value), tested_->Put(key, value));
}

void ExploreWorker::CheckView() {
  const Result<KvView> expected = reference_->Get();
  const Result<KvView> actual = tested_->Get();
  CheckCodes({}, expected.status(), actual.status());
  if (expected->first_cell != actual->first_cell ||
      expected->mask.shape != actual->mask.shape) {
    Check(false, "subject: view cells",
          fmt::format("the view is {} cells from {} on, expected {} from {}",
                      actual->mask.shape[0], actual->first_cell,
                      expected->mask.shape[0], expected->first_cell));
  }
  Check(SameMasks(expected->mask, actual->mask), "subject: mask bytes",
        "the masks are not equal");
  Check(SameBytes(expected->key, actual->key) &&
            SameBytes(expected->value, actual->value),
        "subject: rows", "the rows of the view are not equal");
  const auto wrong = FindWrongRow(ledger_, type_, *expected, VLayout::kPlain);
  if (wrong) Check(false, "reference: rows", wrong->text);
}

// Compares cells, positions, owners and rows, including rows outside the view.
void ExploreWorker::CheckAll() {
  CheckCodes({}, reference_->SnapshotTo(expected_),
             tested_->SnapshotTo(actual_));
  if (expected_ != actual_) {
    const std::string expected = CellsText(expected_);
    const std::string actual = CellsText(actual_);
    const bool cells = expected != actual;
    Check(false,
          cells ? CheckName("subject: cells") : CheckName("subject: rows"),
          cells ? fmt::format("cells are{}, expected{}", actual, expected)
                : "rows that the view does not show are not equal");
  }
  FindDrafts();
  changed_ = expected_ != state_ || drafts_ != entered_drafts_;
  const int kept = type_;
  for (int type = 0; type < types_; ++type) {
    ledger_.SetLayerType(type_ = type);
    CheckTokens(expected_.caches.empty() ? expected_
                                         : At(expected_.caches, type));
  }
  ledger_.SetLayerType(type_ = kept);
}

// Checks that the reference's cells hold the ledger's tokens and their rows.
void ExploreWorker::CheckTokens(const CacheState& part) {
  const auto& tokens = ledger_.active().tokens();
  taken_.assign(tokens.size(), false);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    taken_[t] = tokens[t].IsDraft();  // FindDrafts has seen it.
  }
  const auto drafts =
      static_cast<std::size_t>(std::ranges::count(taken_, true));
  const std::vector<CellEntry>& cells = part.cells;
  if (cells.empty() && taken_.empty()) return;
  std::size_t row = 0;
  for (std::size_t i = 0; i < cells.size(); ++row) {
    const std::size_t first = i;
    while (i < cells.size() && cells[i].cell == cells[first].cell) ++i;
    if (TakeToken(std::span(cells).subspan(first, i - first), row,
                  part.layers.at(type_))) {
      continue;
    }
    Check(false, "reference: tokens",
          fmt::format("cell {} of{} holds no token of the ledger",
                      cells[first].cell, CellsText(cells)));
  }
  Check(row == taken_.size() - drafts, "reference: tokens",
        "the ledger has tokens that no cell holds");
}

// Finds a token of the ledger, not taken yet, that is equal to a cell's token,
// and takes it.
bool ExploreWorker::TakeToken(std::span<const CellEntry> owners,
                              std::size_t row, const KvRows& rows) {
  const auto& tokens = ledger_.active().tokens();
  const auto& [keys, values] = rows;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const reference::LedgerToken& token = tokens[t];
    if (taken_[t] || token.position != owners[0].position ||
        !std::ranges::equal(owners, token.sequences, {},
                            &CellEntry::sequence)) {
      continue;
    }
    const auto& [key, value] = token.rows.at(type_);
    if (!HasRow(keys, row, key) || !HasRow(values, row, value)) continue;
    taken_[t] = true;
    return true;
  }
  return false;
}

}  // namespace kvtwin::props
