// The comparisons that a DifferentialDriver makes after each call (identity,
// S51), those of snapshots, and the texts that describe a difference.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/save.h"
#include "props/compare/differential_driver.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

bool SameShape(const KvView& a, const KvView& b) {
  return a.mask.shape == b.mask.shape && a.key.shape == b.key.shape &&
         a.value.shape == b.value.shape;
}

// Returns the first element of run (j, k, l) that differs; a number past the
// end if only the unused bits of a bit mask differ. Requires: the runs differ.
std::int64_t FirstDifference(const TensorView& a, const TensorView& b,
                             std::int64_t j, std::int64_t k, std::int64_t l) {
  std::int64_t i = 0;
  if (a.dtype == DType::kBits) {
    while (i < a.shape[0] && MaskAllows(a, i, j) == MaskAllows(b, i, j)) ++i;
    return i;
  }
  // In blocks, this is the first element of the block.
  const std::int64_t step = IsBlockDType(a.dtype) ? kBlockElements : 1;
  const auto size = AsSize(RunBytes(a.dtype, step));
  const std::byte* left = a.at(0, j, k, l);
  const std::byte* right = b.at(0, j, k, l);
  for (; std::memcmp(left, right, size) == 0; i += step) {
    left += size;
    right += size;
  }
  return i;
}

// Returns the column that an element belongs to.
std::int64_t ColumnAt(const Shape& index, VLayout layout) {
  if (layout == VLayout::kPlain) return index[2];
  return layout == VLayout::kTiled ? index[3] * kTileCells + index[0]
                                   : index[0];
}

void SetColumn(std::int64_t column, VLayout layout, Shape& index) {
  const bool tiled = layout == VLayout::kTiled;
  index[layout == VLayout::kPlain ? 2 : 0] =
      tiled ? column % kTileCells : column;
  if (tiled) index[3] = column / kTileCells;
}

}  // namespace

std::string CellsText(const Cache& cache) {
  std::vector<CellEntry> entries;
  cache.ListCells(entries);
  std::string text;
  for (std::size_t i = 0; i < entries.size() && i < 24; ++i) {
    const CellEntry& entry = entries[i];
    const bool same = i > 0 && entries[i - 1].cell == entry.cell;
    text += same ? fmt::format("+s{}", entry.sequence)
                 : fmt::format(" {}:{}@s{}", entry.cell, entry.position,
                               entry.sequence);
  }
  return entries.size() > 24 ? text + " ..." : text;
}

void DifferentialDriver::AddStep(std::string call, std::string_view answer,
                                 StatusCode code) {
  if (trace_ == nullptr) return;
  const Step& step = trace_->Add(std::move(call), answer, code);
  if (trace_->frame && step.number >= trace_->from) DrawCellsNow();
}

void DifferentialDriver::DrawCellsNow() {
  if (reference_ == nullptr || tested_ == nullptr) return;
  Step& step = trace_->steps.back();
  std::vector<Held> expected = HeldCells(*reference_);
  // The ledger decides what is expected where the reference is wrong.
  const std::vector<Held> tokens = HeldTokens(ledger_.active());
  if (!SameTokens(expected, tokens)) expected = tokens;
  DrawCells(*trace_->frame, std::move(expected), HeldCells(*tested_),
            reference_->CellCount(), step);
  step.cache = active_type_;
}

void DifferentialDriver::DrawViewNow(int layer, const KvView& reference,
                                     const KvView& subject) {
  std::optional<KvView> expected = reference;
  const VLayout v_layout = setup_.config.v_layout;
  if (fresh() && FindWrongRow(ledger_, layer, reference, v_layout))
    expected.reset();
  DrawView(*trace_->frame,
           {.ledger = ledger_.active(),
            .layer = layer,
            .actual = subject,
            .expected = expected,
            .v_layout = setup_.config.v_layout,
            .fresh = fresh(),
            .positions = pass_.tokens.positions,
            .sequences = pass_.tokens.sequences},
           trace_->steps.back());
}

// Checks in all of a wrapper's caches that memberships are equal, and so is the
// multiset of tokens.
void DifferentialDriver::CheckAllCells() {
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    CheckCells();
    Check(tested_->UnderlyingCache() != nullptr, "subject: underlying cache",
          "UnderlyingCache is null");
  }
  SetType(kept_type);
}

void DifferentialDriver::CheckCells() {
  reference_->ListCells(reference_cells_);
  tested_->ListCells(tested_cells_);
  if (reference_cells_ != tested_cells_) {
    if (drawing()) DrawCellsNow();  // The cells of this cache.
    Check(false, "subject: cells", [&] {
      return fmt::format("cells are\n  reference {}\n  {}{}",
                         CellsText(*reference_), subject_.name,
                         CellsText(*tested_));
    });
  }
  Hash(tested_cells_.data(), tested_cells_.size() * sizeof(CellEntry));
  CheckTokens();
}

void DifferentialDriver::CheckTokens() {
  const auto mix = [](std::int64_t a, std::uint64_t seed) {
    std::uint64_t z =
        static_cast<std::uint64_t>(a) + seed + 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  std::uint64_t in_cells = 0;
  std::uint64_t owners = 0;
  for (std::size_t i = 0; i < reference_cells_.size(); ++i) {
    const CellEntry& entry = reference_cells_[i];
    owners += mix(entry.sequence, 0);
    const bool last = i + 1 == reference_cells_.size() ||
                      reference_cells_[i + 1].cell != entry.cell;
    if (!last) continue;
    in_cells += mix(entry.position, owners);
    owners = 0;
  }
  std::uint64_t in_ledger = 0;
  for (const auto& token : ledger_.active().tokens()) {
    for (const int seq : token.owners()) owners += mix(seq, 0);
    in_ledger += mix(token.position, owners);
    owners = 0;
  }
  if (in_cells == in_ledger) return;
  std::string text = "the reference's cells do not hold the ledger's tokens";
  text += "\n  reference" + CellsText(*reference_) + "\n  ledger   ";
  for (const auto& token : ledger_.active().tokens()) {
    text +=
        fmt::format(" {}@s{}", token.position, fmt::join(token.owners(), "+s"));
  }
  Check(false, "reference: tokens", text);
}

namespace {

std::string_view NameOf(ViewPart part) {
  switch (part) {
    case ViewPart::kKey:
      return "K";
    case ViewPart::kValue:
      return "V";
    default:
      return "mask";
  }
}

}  // namespace

void DifferentialDriver::CheckBytes(ViewPart part, const TensorView& reference,
                                    const TensorView& subject, VLayout layout) {
  Check(subject.dtype == reference.dtype && subject.shape == reference.shape,
        "subject: view shape", [&] {
          return fmt::format("{} is {} {} by the reference, {} {} by {}",
                             NameOf(part), DTypeName(reference.dtype),
                             ShapeText(reference.shape),
                             DTypeName(subject.dtype), ShapeText(subject.shape),
                             subject_.name);
        });
  // The reference's tensors are dense in dimension 0, so that whole runs can be
  // compared; a copy makes other tensors dense.
  if (subject.stride[0] != static_cast<std::int64_t>(SizeOf(reference.dtype))) {
    const DenseTensor dense = CopyOf(subject, subject.dtype);
    return CheckBytes(part, reference, dense.view(), layout);
  }
  const auto run = AsSize(RunBytes(reference.dtype, reference.shape[0]));
  const auto dense = [&](const TensorView& view) {
    return view.stride[1] == static_cast<std::int64_t>(run) &&
           view.stride[2] == view.stride[1] * view.shape[1] &&
           view.stride[3] == view.stride[2] * view.shape[2];
  };
  if (dense(reference)) {
    // Equal tensors are compared in one piece.
    const std::size_t all = DenseBytes(reference.dtype, reference.shape);
    Hash(reference.data, all);
    if (dense(subject) && std::memcmp(reference.data, subject.data, all) == 0) {
      return;
    }
  }
  const auto& [columns, lines, planes, tiles] = reference.shape;
  for (std::int64_t run_at = 0; run_at < lines * planes * tiles; ++run_at) {
    const std::int64_t j = run_at % lines;
    const std::int64_t k = run_at / lines % planes;
    const std::int64_t l = run_at / lines / planes;
    const std::byte* expected = reference.at(0, j, k, l);
    const std::byte* actual = subject.at(0, j, k, l);
    if (!dense(reference)) Hash(expected, run);
    if (std::memcmp(expected, actual, run) == 0) continue;
    const Shape at = {FirstDifference(reference, subject, j, k, l), j, k, l};
    const CheckName check =
        part == ViewPart::kMask  ? CheckName("subject: mask bytes")
        : part == ViewPart::kKey ? CheckName("subject: K bytes")
                                 : CheckName("subject: V bytes");
    if (at[0] == columns) {
      Failure failure = MakeFailure(
          check, fmt::format("row {} of the mask has bits past its {} columns",
                             j, columns));
      failure.row = AsInt(j);
      throw failure;
    }
    Failure failure =
        MakeFailure(check, Picture(part, reference, subject, at, layout));
    if (part == ViewPart::kMask) failure.row = AsInt(j);
    failure.column = AsInt(ColumnAt(at, layout));
    throw failure;
  }
}

// Returns a text of the cells around the first element that differs, side by
// side.
std::string DifferentialDriver::Picture(ViewPart part,
                                        const TensorView& reference,
                                        const TensorView& subject, Shape index,
                                        VLayout layout) {
  constexpr std::int64_t kShown = 8;
  const std::int64_t wrong = ColumnAt(index, layout);
  const std::int64_t first = std::max<std::int64_t>(0, wrong - kShown / 2);
  const std::int64_t end =
      std::min(ColumnsOf(reference, layout), first + kShown);
  std::array<std::string, 5> lines = {
      "    cell      ", "    holds     ", "    reference ",
      fmt::format("    {:<9} ", subject_.name.substr(0, 9)), "              "};
  reference_->ListCells(reference_cells_);
  for (std::int64_t column = first; column < end; ++column) {
    SetColumn(column, layout, index);
    const std::int64_t cell = first_cell_ + column;
    std::string holds;
    for (const CellEntry& entry : reference_cells_) {
      if (entry.cell != cell) continue;
      holds += fmt::format("{}{}", holds.empty() ? "" : "+", entry.sequence);
      if (&entry == &reference_cells_.back() || (&entry + 1)->cell != cell) {
        holds += fmt::format("@{}", entry.position);
      }
    }
    const auto value = [&](const TensorView& tensor) {
      const auto& [i, j, k, l] = index;
      if (part != ViewPart::kMask) {
        const float number = LoadFrom(tensor, i, j, k, l);
        if (std::isnan(number)) return ElementText(tensor, i, j, k, l);
        return fmt::format("{:g}", number);
      }
      switch (MaskElementAt(tensor, i, j)) {
        case MaskElement::kAllows:
          return std::string("#");
        case MaskElement::kHides:
          return std::string(".");
        default:
          return std::string("?");
      }
    };
    lines[0] += fmt::format("{:<9} ", cell);
    lines[1] += fmt::format("{:<9} ", holds.empty() ? "-" : holds);
    lines[2] += fmt::format("{:<9} ", value(reference));
    lines[3] += fmt::format("{:<9} ", value(subject));
    lines[4] += fmt::format("{:<9} ", column == wrong ? "^" : "");
  }
  for (std::string& line : lines) line.erase(line.find_last_not_of(' ') + 1);
  const std::string where =
      part == ViewPart::kMask
          ? fmt::format("row {} of the mask (# visible, . hidden)", index[1])
          : fmt::format("an element of {}", NameOf(part));
  return fmt::format("{} differs (sequence@position)\n\n{}", where,
                     fmt::join(lines, "\n"));
}

void DifferentialDriver::CheckViews() {
  const int layer = layer_;
  const auto call = [&] { return fmt::format("Get(layer {})", layer); };
  Begin(call);
  Result<KvView> reference = reference_->Get();
  Result<KvView> subject = tested_->Get();
  ++result_.operations;
  ++result_.views;
  const StatusCode code = subject.status().code();
  if (trace_ != nullptr) {
    AddStep(call(), subject.ok() ? "" : StatusName(code), code);
  }
  const auto refused = [&] {
    return fmt::format("Get of layer {} is refused: reference {}, {} {}", layer,
                       reference.status().ToString(), subject_.name,
                       subject.status().ToString());
  };
  Check(reference.ok() || subject.ok(), "reference: result", refused);
  const bool both = reference.ok() && subject.ok();
  if (!both) throw WrongResult(OpKind::kGet, refused());
  Check(reference->first_cell == subject->first_cell, "subject: view cells",
        [&] {
          return fmt::format(
              "the view starts at cell {} by the reference, {} by {}",
              reference->first_cell, subject->first_cell, subject_.name);
        });
  HashInt(subject->first_cell);
  first_cell_ = reference->first_cell;
  const bool has_mask = reference->mask.data != nullptr;
  Check(has_mask == (subject->mask.data != nullptr), "subject: mask bytes",
        "only one of them has a mask");
  // Under rules without mask padding, the mask may have no rows beyond the
  // batch.
  if (has_mask && subject_.rules.mask_rows == Rules::MaskRows::kBatch &&
      subject->mask.shape[1] != reference->mask.shape[1]) {
    reference->mask.shape[1] = std::ssize(pass_.tokens.positions);
  }
  if (drawing() && has_mask) {
    DrawViewNow(layer, *reference, *subject);
  }
  const VLayout v_layout = setup_.config.v_layout;
  const bool judged = fresh() || !has_mask;
  try {
    if (has_mask) {  // Dimension 0 of a mask is the columns.
      CheckBytes(ViewPart::kMask, reference->mask, subject->mask,
                 VLayout::kPermuted);
    }
    CheckBytes(ViewPart::kKey, reference->key, subject->key, VLayout::kPlain);
    CheckBytes(ViewPart::kValue, reference->value, subject->value, v_layout);
    if (observer_ != nullptr) {
      observer_->Get(AsSize(active_type_), layer, *reference, ledger_,
                     *reference_);
    }
    if (!judged) return;
    const auto wrong = FindWrongRow(ledger_, layer, *reference, v_layout);
    Check(!wrong, "reference: rows",
          [&] { return fmt::format("layer {}: {}", layer, wrong->text); });
  } catch (Failure& failure) {
    failure.first_cell = first_cell_;
    // A row that sees a wrong token explains more than the first wrong byte.
    if (has_mask && judged && SameShape(*reference, *subject)) {
      const auto wrong = FindWrongRow(ledger_, layer, *subject, v_layout);
      if (wrong && wrong->column >= 0) {
        failure.row = wrong->row;
        failure.column = wrong->column;
      }
    }
    throw;
  }
}

namespace {

// Whether the snapshot of the cache equals `expected`.
bool Holds(const Cache& cache, const CacheState& expected) {
  const Result<CacheState> actual = cache.Snapshot();
  return actual.ok() && *actual == expected;
}

// Returns the position after the last token of a sequence, in all caches.
std::int64_t EndOf(const CacheState& state, int sequence) {
  std::int64_t end = 0;
  for (const CellEntry& entry : state.cells) {
    if (entry.sequence != sequence) continue;
    end = std::max(end, std::int64_t{entry.position} + 1);
  }
  for (const CacheState& part : state.caches) {
    end = std::max(end, EndOf(part, sequence));
  }
  return end;
}

// Adds `added` to a cache that has the state `before`. Returns whether the
// result equals that of WithSequence on whole snapshots.
bool AddsAsDefined(Cache& cache, const CacheState& before, int sequence,
                   const CacheState& added, const std::vector<int>& cells) {
  const auto both = WithSequence(before, sequence, added, cells);
  const StatusCode answer = cache.AddSequence(sequence, added).code();
  if (answer == StatusCode::kNotSupported) return Holds(cache, before);
  return answer == both.status().code() &&
         Holds(cache, both.ok() ? *both : before);
}

// Takes a sequence out of the cache and adds it again. Returns whether the
// results equal those of SequenceOf and WithSequence on whole snapshots.
// `expected` is the cache's state.
bool MovesSequence(Cache& cache, const CacheState& expected, int sequence,
                   const std::vector<int>& cells) {
  const Result<CacheState> parked = cache.SnapshotOf(sequence);
  if (!parked.ok() || *parked != SequenceOf(expected, sequence)) return false;
  if (!cache.Remove(sequence, 0, kOpenEnd).ok()) return false;
  // The second round adds the sequence when it is there already, unless it is
  // empty.
  for (int i = 0; i < 2; ++i) {
    const Result<CacheState> before = cache.Snapshot();
    if (!before.ok() ||
        !AddsAsDefined(cache, *before, sequence, *parked, cells)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void LeaveOutALayer(CacheState& state) {
  if (!state.layers.empty()) state.layers.erase(state.layers.begin());
  for (CacheState& part : state.caches) LeaveOutALayer(part);
}

const CacheState* DifferentialDriver::SameSnapshot() {
  Begin("Snapshot");
  Result<CacheState> expected = reference_->Snapshot();
  const Result<CacheState> actual = tested_->Snapshot();
  if (actual.status().code() == StatusCode::kNotSupported) {
    Begin("");
    return nullptr;
  }
  CheckCodes(OpKind::kSnapshot, "Snapshot", StatusCode::kOk,
             expected.status().code(), actual.status().code());
  Check(*expected == *actual, "subject: snapshot",
        [&] { return "the snapshots are not equal" + CellsText(*tested_); });
  last_snapshot_ = std::move(*expected);
  return &*last_snapshot_;
}

std::vector<int> DifferentialDriver::CellCounts() const {
  std::vector<int> cells;
  for (const auto& part : ledger_.parts()) {
    cells.push_back(AsInt(part.cells()));
  }
  return cells;
}

// Restores an earlier state in place, adds a sequence of the present state to
// it, and starts a batch there. The caller restores the present state; no trace
// of the earlier state may remain.
void DifferentialDriver::GoBack(const CacheState& earlier, int sequence,
                                const CacheState& added,
                                const std::vector<int>& cells) {
  const auto restores = [&](Cache& cache) {
    return cache.Restore(earlier).ok() && Holds(cache, earlier);
  };
  constexpr std::string_view kRestores = "an earlier state is not restored";
  Check(restores(*reference_), "reference: snapshot", kRestores);
  Check(restores(*tested_), "subject: snapshot", kRestores);
  Begin("AddSequence");
  const auto adds = [&](Cache& cache) {
    return AddsAsDefined(cache, earlier, sequence, added, cells);
  };
  constexpr std::string_view kAdds =
      "an earlier state does not take the sequence";
  Check(adds(*reference_), "reference: snapshot", kAdds);
  Check(adds(*tested_), "subject: snapshot", kAdds);
  if (subject_.abilities.OnlyGoesOn()) return;
  // A batch of max_batch tokens shows which cells are free.
  std::vector<std::int32_t> positions;
  std::int64_t next = EndOf(*reference_->Snapshot(), sequence);
  for (int i = 0; i < setup_.init.max_batch; ++i, ++next) {
    if (next > subject_.abilities.LastPosition()) break;
    positions.push_back(static_cast<std::int32_t>(next));
  }
  if (positions.empty()) return;
  const std::vector<int> sequences(positions.size(), sequence);
  const Batch batch = {.positions = positions, .sequences = sequences};
  Begin("StartForward");
  bool same = reference_->StartForward(batch, false).code() ==
              tested_->StartForward(batch, false).code();
  for (int type = 0; same && type < types(); ++type) {
    if (wrapper_) {
      (void)reference_->SetLayerType(type);
      (void)tested_->SetLayerType(type);
    }
    same = std::ranges::equal(reference_->BatchCells(), tested_->BatchCells());
  }
  Check(same, "subject: snapshot", "a batch after Restore has other cells");
}

void DifferentialDriver::Reload() {
  const auto earlier = std::exchange(last_snapshot_, std::nullopt);
  const CacheState* const expected = SameSnapshot();
  if (!expected) return;
  Begin("Restore");
  const Result<CacheState> read = StateFromBytes(StateToBytes(*expected));
  Check(read.ok() && *read == *expected, "reference: saved state",
        [&] { return "bytes do not read back: " + read.status().ToString(); });
  Result<std::unique_ptr<Cache>> reference = make_reference_(setup_.spec);
  Result<std::unique_ptr<Cache>> subject = subject_.Make(setup_);
  // Some backends take only the sequences that Init declares (Client::IdOf).
  const bool any = subject_.abilities.Can(KVTWIN_CAN_ANY_SEQUENCE);
  const int count = any ? 3 : std::min(3, setup_.init.max_sequences);
  const int sequence = setup_.IdOf(AsInt(serial_ / 2 % count));
  const std::vector<int> cells = CellCounts();
  const CacheState added = SequenceOf(*expected, sequence);
  if (earlier && subject_.restores_earlier_states) {
    GoBack(*earlier, sequence, added, cells);
    Begin("Restore");
  }
  const auto restored = [&](Cache& cache) {
    return cache.Restore(*read).ok() && Holds(cache, *expected);
  };
  // A new cache gets the sequence before any layer was put (S57).
  const auto takes_sequence = [&](Cache& cache) {
    if (!cache.SetConfig(setup_.config).ok() || !cache.Init(setup_.init).ok()) {
      return false;
    }
    if (!subject_.restores_earlier_states) return true;
    const Result<CacheState> empty = cache.Snapshot();
    return empty.ok() && AddsAsDefined(cache, *empty, sequence, added, cells);
  };
  constexpr std::string_view kTakes = "a new cache does not take the sequence";
  Check(reference.ok() && takes_sequence(**reference), "reference: snapshot",
        kTakes);
  Check(subject.ok() && takes_sequence(**subject), "subject: snapshot", kTakes);
  constexpr std::string_view kRestored =
      "what was restored is not what was saved";
  Check(restored(*reference_) && restored(**reference), "reference: snapshot",
        kRestored);
  Check(restored(*tested_) && restored(**subject), "subject: snapshot",
        kRestored);
  // Continues with the caches that were restored in place, or with the new
  // ones.
  const bool in_place = serial_ % 2 == 0;
  if (in_place) {
    Check(MovesSequence(**reference, *expected, sequence, cells),
          "reference: snapshot",
          "a sequence does not leave and come back as it should");
    // A sequence leaves by Remove.
    Check(!subject_.abilities.Can(KVTWIN_CAN_REMOVE_TAIL) ||
              MovesSequence(**subject, *expected, sequence, cells),
          "subject: snapshot",
          "a sequence does not leave and come back as it should");
  } else {
    reference_ = std::move(*reference);
    tested_ = std::move(*subject);
  }
  AddStep(in_place ? "Restore in place" : "Restore into new caches", "");
  result_.operations += 6;  // The calls above that have no step of their own.
  ledger_.DropAllDrafts();
  ledger_.DropPins();
  EndPass();
}

// Snapshots do not end the pass.
void DifferentialDriver::Snapshot(int seq) {
  const CacheState* const expected = SameSnapshot();
  if (!expected) return;
  const auto call = [&] { return fmt::format("SnapshotOf({})", seq); };
  Begin(call);
  const Result<CacheState> expected_state = reference_->SnapshotOf(seq);
  const Result<CacheState> found_one = tested_->SnapshotOf(seq);
  CheckCodes(OpKind::kSnapshot, call, StatusCode::kOk,
             expected_state.status().code(), found_one.status().code());
  const CacheState state = SequenceOf(*expected, seq);
  Check(*expected_state == state, "reference: snapshot",
        [&] { return call() + " is not what the snapshot has of it"; });
  Check(*found_one == state, "subject: snapshot",
        [&] { return call() + " is not what the snapshot has of it"; });
  if (observer_ != nullptr) observer_->Snapshot();
}

void DifferentialDriver::Add(int seq, int dst) {
  Snapshot(seq);
  const CacheState before = *reference_->Snapshot();
  CacheState added = SequenceOf(before, seq);
  // A layer that is missing from the state gets rows of zeros.
  if (serial_ % 3 == 0) LeaveOutALayer(added);
  const Result<CacheState> expected =
      WithSequence(before, dst, added, CellCounts());
  const auto call = [&] {
    return fmt::format("AddSequence({}, that of {})", dst, seq);
  };
  Begin(call);
  const Status reference = reference_->AddSequence(dst, added);
  const Status subject = tested_->AddSequence(dst, added);
  if (subject.code() == StatusCode::kNotSupported) return Begin("");
  CheckCodes(OpKind::kAdd, call, expected.status().code(), reference.code(),
             subject.code());
  const CacheState& after = expected.ok() ? *expected : before;
  Check(*reference_->Snapshot() == after, "reference: snapshot",
        [&] { return call() + " does not make what WithSequence makes"; });
  Check(*tested_->Snapshot() == after, "subject: snapshot",
        [&] { return call() + " does not make what WithSequence makes"; });
  if (!expected.ok()) return;  // A refusal does not end the pass.
  if (observer_ != nullptr) observer_->Add(!added.cells.empty());
  ledger_.Restore(after);
  EndPass();
}

}  // namespace kvtwin::props
