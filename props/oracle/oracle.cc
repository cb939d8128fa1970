#include "props/oracle/oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/index.h"
#include "props/base/counted.h"
#include "props/oracle/recorded_cache.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::Ledger;
using reference::LedgerToken;

Batch BatchOf(const TraceOp& op) {
  return {op.positions, op.sequences, op.indices, op.parents};
}

// Returns rows that are put as a cache of this dtype shows them, if it has
// blocks: a recording has the numbers that these stand for. `shown` keeps them.
TensorView AsShown(const DenseTensor& rows, DType dtype, DenseTensor& shown) {
  if (!IsBlockDType(dtype)) return rows.view();
  shown = CopyOf(CopyOf(rows.view(), dtype).view(), rows.dtype);
  return shown.view();
}

// Lets the ledger remove from the middle of a sequence even without a shift
// function: a recording may show that where our caches refuse.
void AllowShifts(CacheSpec& spec) {
  if (spec.shift.kind == ShiftKind::kNone) {
    spec.shift.kind = ShiftKind::kIdentity;
  }
  for (CacheSpec& cache : spec.caches) AllowShifts(cache);
}

}  // namespace

void MakeRoom(TraceHeader& header) {
  InitArgs& init = header.init;
  const auto unbound = [&](CacheSpec& spec) {
    const bool windowed = IsWindowed(spec.kind);
    if (windowed && !spec.window) spec.memory.reset();  // Unbounded (S2, S3).
    if (!windowed || !spec.window) return;
    std::int64_t memory = *spec.window;
    if (spec.kind == Kind::kSwaMem) memory = spec.memory.value_or(*spec.window);
    if (init.max_sequences > 1) {
      memory = std::max(memory, std::int64_t{*spec.window} + 1);
    }
    if (memory < init.capacity) return;  // The memory stays bounded.
    spec.kind = Kind::kSwaMem;
    spec.memory = kOpenEnd;
  };
  unbound(header.spec);
  for (CacheSpec& spec : header.spec.caches) unbound(spec);
  header.config.cache_padding = 1;
  init.max_sequences = std::min(init.max_sequences, 2);
  init.capacity = kOpenEnd / init.max_sequences;
  init.max_batch = kOpenEnd / 2;
}

const Cache* Oracle::twin() const {
  return twins_.empty() ? nullptr : twins_.front().cache.get();
}

KvView Oracle::RecordedView(const TraceOp& op) {
  KvView view;
  view.key = op.key.view();
  if (op.value) view.value = op.value->view();
  if (op.mask) view.mask = op.mask->view();
  view.first_cell = op.first_cell.value_or(0);
  return view;
}

KvView Oracle::ExpectedView(const TraceOp& op) const {
  return twins_.empty() ? KvView() : Ask(*twins_.front().cache, op).view;
}

std::string Oracle::RowLabel(int row) const {
  const auto i = AsSize(row);
  if (i >= positions_.size()) return "padding";
  return fmt::format("sequence {}, position {}", sequences_[i], positions_[i]);
}

const CacheSpec& Oracle::ActiveSpec() const {
  const bool wrapper = IsWrapper(header_.spec.kind);
  return wrapper ? header_.spec.caches[active_] : header_.spec;
}

Status Oracle::StartLedger() {
  TraceHeader header = header_;
  AllowShifts(header.spec);
  if (header_.visibility_only) {
    // It only matters whether there is padding. The number of cells (S4), which
    // may be more than an int holds, does not.
    header.config.cache_padding = std::min(header.config.cache_padding, 2);
    InitArgs& init = header.init;
    init.max_sequences = std::min(init.max_sequences, 2);
    init.capacity = std::min(init.capacity, kOpenEnd / 4);
    init.max_batch = std::min(init.max_batch, kOpenEnd / 4);
  }
  ledger_.emplace(header.spec);
  Status status = ledger_->Init(header.config, header.init);
  if (!status.ok() || !header.visibility_only) return status;
  MakeRoom(header);
  ledger_.emplace(header.spec);
  if (!IsWrapper(header.spec.kind)) ledger_->NeedLayers(0, header.layers);
  status = ledger_->Init(header.config, header.init);
  ledger_->IgnoreCapacity();
  return status;
}

Status Oracle::Start(const TraceHeader& header,
                     const std::vector<std::string>& twins) {
  header_ = header;
  past_ = RowPast::Of(header.spec, header.config);
  past_.visibility = header.visibility_only;
  fresh_.assign(std::max<std::size_t>(1, header.spec.caches.size()), false);
  for (const std::string& name : twins) {
    auto cache = MakeCache(header.spec, name);
    if (!cache.ok()) return cache.status();
    // MakeCache was the check of the spec.
    if (header.visibility_only) continue;
    Status status = (*cache)->SetConfig(header.config);
    if (status.ok()) {
      status = (*cache)->Init(header.init);
    }
    if (!status.ok()) return status;
    twins_.push_back({name, std::move(*cache)});
  }
  gate_ = MakeRecordedCache(header.spec, &recorded_,
                            [this](int seq) { return ledger_->Next(seq) - 1; });
  Status status = gate_->SetConfig(header.config);
  if (status.ok()) status = gate_->Init(header.init);
  return status.ok() ? StartLedger() : status;
}

Oracle::Answer Oracle::Ask(Cache& cache, const TraceOp& op) const {
  const auto viewed = [&](int layer) {
    (void)cache.SetLayer(layer);
    const auto view = cache.Get();
    return view.ok() ? Answer{{}, false, *view} : Answer{view.status()};
  };
  const auto said = [](const Result<bool>& yes) {
    return Answer{yes.status(), yes.ok() && *yes};
  };
  switch (op.kind) {
    case TraceOpKind::kStartForward:
      return {cache.StartForward(BatchOf(op), op.reserve)};
    case TraceOpKind::kSetCausal:
      return {cache.SetCausal(op.indices)};
    case TraceOpKind::kSetLayerType:
      return {cache.SetLayerType(op.type)};
    case TraceOpKind::kPut: {
      Status status = cache.SetLayer(op.layer);
      if (status.ok()) status = cache.Put(op.key.view(), op.value->view());
      return {status};
    }
    case TraceOpKind::kGet:
      return viewed(op.layer);
    case TraceOpKind::kReservedMask: {
      // Get needs a layer with rows. This layer is not one of the model's, and
      // a Put in a reserving pass stores nothing.
      const auto batch = std::ssize(positions_);
      const DenseTensor rows =
          FilledTensor(DType::kF32, {kBlockElements, 1, batch, 1}, 0);
      Status status = cache.SetLayer(header_.layers);
      if (status.ok()) status = cache.Put(rows.view(), rows.view());
      return status.ok() ? viewed(header_.layers) : Answer{status};
    }
    case TraceOpKind::kRemove:
      return {cache.Remove(op.seq, op.begin, op.end)};
    case TraceOpKind::kCopyPrefix:
      return {cache.CopyPrefix(op.src, op.dst, op.len)};
    case TraceOpKind::kCanResume:
      return said(cache.CanResume(op.seq, op.pos));
    case TraceOpKind::kEncoderCached:
      return said(cache.EncoderCached());
    case TraceOpKind::kCommit:
      return {cache.Commit(op.seq, op.indices)};
    case TraceOpKind::kCheckpoint:
      return {cache.Checkpoint(op.seq)};
    case TraceOpKind::kFindPrefix:  // Only backends find prefixes.
    case TraceOpKind::kAttend:      // Only backends attend.
      return {};
  }
  return {};
}

std::string Oracle::FindMisuse(const TraceOp& op) {
  if (op.kind == TraceOpKind::kReservedMask) {
    if (!reserving_) return "no start_forward with reserve came before";
    if (ActiveSpec().kind == Kind::kEncoder) return "an encoder has no mask";
  }
  if (op.kind == TraceOpKind::kAttend) return FindWrongShape(op);
  if (op.kind == TraceOpKind::kFindPrefix && ledger_holds_) {
    ledger_->ContinuesAt(op.seq, 0);  // It is empty (F1).
    return FindWrongPrompt(op);
  }
  if (op.kind == TraceOpKind::kStartForward && ledger_holds_) FollowEnds(op);
  recorded_ = op.result;
  const Status status = Ask(*gate_, op).status;
  const bool as_recorded = (op.kind == TraceOpKind::kStartForward ||
                            op.kind == TraceOpKind::kRemove) &&
                           status.code() == op.result;
  return status.ok() || as_recorded ? "" : status.ToString();
}

// A batch says where its sequences end, if that is open (S12): the first draft
// of a sequence by its position, which is checked before the batch may be
// refused (D1), and in caches with states each first token of an accepted batch
// (R3).
void Oracle::FollowEnds(const TraceOp& op) {
  const bool ok = op.result == StatusCode::kOk;
  const bool states = ok && !op.reserve && ledger_->HasStates();
  const bool drafts =
      !op.parents.empty() && (ok || op.result == StatusCode::kCacheFull);
  if (!states && !drafts) return;
  std::set<int> ended;  // Sequences whose ends are known.
  for (const CacheLedger& part : ledger_->parts()) {
    for (const LedgerToken& token : part.tokens()) {
      if (token.IsDraft()) ended.insert(token.drafted_by);
    }
  }
  // The gate will refuse lists of other lengths.
  std::size_t count = std::min(op.sequences.size(), op.positions.size());
  if (drafts) count = std::min(count, op.parents.size());
  for (std::size_t i = 0; i < count; ++i) {
    const int seq = op.sequences[i];
    const bool tells = states || op.parents[i] == kCommitted;
    if (tells && ended.insert(seq).second) {
      ledger_->ContinuesAt(seq, op.positions[i]);
    }
  }
}

bool Oracle::HasPut(int layer) const {
  return ActiveSpec().kind == Kind::kEncoder || put_.contains({active_, layer});
}

bool Oracle::ShowsUnknown(int layer) const {
  const CacheLedger& ledger = ledger_->active();
  return std::ranges::any_of(ledger.tokens(), [&](const LedgerToken& token) {
    if (token.rows.contains(layer)) return false;
    for (int row = 0; row < Size(ledger.batch()); ++row) {
      if (ledger.MaySee(row, token)) return true;
    }
    return false;
  });
}

// Returns why no prompt may be given here (F1).
std::string Oracle::FindWrongPrompt(const TraceOp& op) const {
  const auto& parts = ledger_->parts();
  if (std::ranges::any_of(parts, [](auto& part) { return part.encoder(); })) {
    return "an encoder has no tokens";
  }
  const auto drafts = [&](auto& part) {
    return reference::CountDrafts(part.tokens(), op.seq) > 0;
  };
  if (op.seq < 0) return NotNegative("seq", op.seq).message();
  if (ledger_->Next(op.seq) > 0 || std::ranges::any_of(parts, drafts)) {
    return fmt::format("sequence {} has tokens: remove them first", op.seq);
  }
  return "";
}

void Oracle::RememberPromise(const TraceOp& op) {
  const auto forget = [&](int sequence, std::int32_t after) {
    promises_.erase(promises_.upper_bound({sequence, after}),
                    promises_.upper_bound({sequence, kOpenEnd}));
  };
  switch (op.kind) {
    case TraceOpKind::kCanResume:
      promises_.erase({op.seq, op.pos});
      if (op.answer) promises_[{op.seq, op.pos}] = op.line;
      return;
    case TraceOpKind::kRemove:
      if (op.result == StatusCode::kOk) forget(op.seq, op.begin);
      return;
    case TraceOpKind::kCopyPrefix:
      return forget(op.dst, -1);
    case TraceOpKind::kCommit:
    case TraceOpKind::kFindPrefix:
      return forget(op.seq, -1);
    case TraceOpKind::kStartForward: {
      resumed_.clear();
      std::map<int, std::int32_t> begins;  // By sequence.
      for (std::size_t i = 0; i < sequences_.size(); ++i) {
        const auto begin =
            begins.try_emplace(sequences_[i], positions_[i]).first;
        begin->second = std::min(begin->second, positions_[i]);
      }
      for (const auto& [sequence, position] : begins) {
        const auto promise = promises_.find({sequence, position});
        if (promise == promises_.end()) continue;
        resumed_[sequence] = {position, promise->second};
      }
      // A batch, even a refused one, may evict tokens of other sequences.
      if (!reserving_) promises_.clear();
      return;
    }
    default:
      return;
  }
}

// Whether the token of a put of the active cache has left its sequence: a token
// that has not was put again. If tokens never move, it has also left if the
// sequence lost tokens before another one came to its position.
bool Oracle::Left(const PutRow& put) const {
  if (put.cache != active_) return false;
  const bool any = std::ranges::any_of(
      ledger_->active().tokens(), [&](const LedgerToken& token) {
        return token.HeldBy(put.sequence) && token.position == put.position;
      });
  if (!any) return true;
  const auto cut = cuts_.find(put.sequence);
  return !past_.moves && cut != cuts_.end() && put.line < cut->second &&
         cut->second < puts_.Latest(put).line;
}

std::string Oracle::LayerText(int layer) const {
  if (header_.layers == 1) return "";
  if (!IsWrapper(header_.spec.kind)) return fmt::format("layer {}: ", layer);
  return fmt::format("cache {}, layer {}: ", active_, layer);
}

std::string Oracle::ReasonText(const TraceOp& op,
                               const Failure& failure) const {
  const auto row = AsSize(failure.row);
  if (failure.row < 0 || !op.mask || row >= sequences_.size() ||
      ActiveSpec().kind == Kind::kEncoder) {
    return "";
  }
  const KvView view = RecordedView(op);
  const RowOwners owners(ledger_->active(), op.layer, view,
                         header_.config.v_layout);
  RowOwners::Torn torn;
  const RowSights sights = owners.SightsOf(failure.row, torn);
  const bool promised = failure.column < 0 && IsPromised(row, sights);
  if (promised) {
    const auto& [seq, promise] = *resumed_.find(sequences_[row]);
    return fmt::format(
        " (can_resume on line {} promised sequence {} the tokens before "
        "position {})",
        promise.line, seq, promise.position);
  }
  // In a shorter window, whichever token is wrong is often next to its edge.
  constexpr int kLeastWindow = 3;
  const std::int64_t window = ActiveSpec().window.value_or(0);
  if (!IsWindowed(ActiveSpec().kind) || window < kLeastWindow) return "";
  const std::int64_t now = ledger_->active().batch()[row].position;
  const auto as_if = [](std::int64_t other) {
    return fmt::format(
        " (as if the window were {}: a recording's window does not count the "
        "token itself, S16)",
        other);
  };
  if (failure.column >= 0) {
    const bool more =
        sights.missing.empty() && sights.sights.find('x') == std::string::npos;
    const PutRow* put = FindPut(op.layer, view, failure.column).put;
    const bool before = put != nullptr && put->sequence == sequences_[row] &&
                        put->position == now - window - 1;
    return more && before && !failure.of_left ? as_if(window + 1) : "";
  }
  const bool first = sights.missing.size() == 1 &&
                     sights.missing[0].token->position == now - window;
  const bool shown = whole_window_.contains(active_);
  return first && !shown ? as_if(window - 1) : "";
}

bool Oracle::IsPromised(std::size_t row, const RowSights& sights) const {
  const auto resumed = resumed_.find(sequences_[row]);
  return resumed != resumed_.end() &&
         std::ranges::any_of(sights.missing, [&](const auto& missing) {
           return missing.token->position < resumed->second.position;
         });
}

// Notes whether a row of a right view had to see the first token of its window:
// then the window is as wide as it should be.
void Oracle::RememberWindow(const TraceOp& op) {
  if (!op.mask || !ActiveSpec().window || whole_window_.contains(active_)) {
    return;
  }
  const CacheLedger& ledger = ledger_->active();
  for (int row = 0; row < Size(ledger.batch()); ++row) {
    const std::int64_t first =
        At(ledger.batch(), row).position - *ActiveSpec().window;
    const auto is_first = [&](const LedgerToken& token) {
      return token.position == first && token.rows.contains(op.layer) &&
             ledger.MaySee(row, token);
    };
    if (std::ranges::none_of(ledger.tokens(), is_first)) continue;
    whole_window_.insert(active_);
    return;
  }
}

void Oracle::Remember(const TraceOp& op) {
  const bool cuts =
      op.kind == TraceOpKind::kRemove || op.kind == TraceOpKind::kCommit;
  if (cuts && op.result == StatusCode::kOk) cuts_[op.seq] = op.line;
  if (op.kind == TraceOpKind::kCopyPrefix) cuts_[op.dst] = op.line;
  if (op.kind == TraceOpKind::kStartForward) {
    const bool ok = op.result == StatusCode::kOk;
    reserving_ = ok && op.reserve;
    positions_ = ok ? op.positions : std::vector<std::int32_t>();
    sequences_ = ok ? op.sequences : std::vector<int>();
    if (ok) active_ = 0;
    put_.clear();
  }
  RememberPromise(op);
  if (op.kind == TraceOpKind::kSetLayerType) {
    active_ = AsSize(op.type);
  }
  if (op.kind != TraceOpKind::kPut || ActiveSpec().kind == Kind::kEncoder) {
    return;
  }
  dims_[{active_, op.layer}] = {AsInt(op.key.shape[0]), AsInt(op.key.shape[1]),
                                AsInt(op.value->shape[0])};
  if (reserving_) return;
  put_.insert({active_, op.layer});
  const double bytes = PutBytes(op);
  put_bytes_ += bytes;
  ledger_bytes_ += bytes;
  const DType v_dtype = header_.config.v_dtype.value_or(header_.init.dtype);
  DenseTensor key;
  DenseTensor value;
  puts_.Add(op.line,
            {.key = AsShown(op.key, header_.init.dtype, key),
             .value = AsShown(*op.value, v_dtype, value)},
            active_, op.layer, sequences_, positions_);
}

OracleStep Oracle::Step(const TraceOp& op) {
  OracleStep step;
  step.bad_input = FindMisuse(op);
  if (step.bad_input.empty()) step.bad_input = FindExcess(op);
  if (!step.bad_input.empty()) return step;
  Remember(op);
  past_.Add(op);
  if (!twins_hold_) twins_.clear();
  step.identity = CompareTwins(op);
  twins_hold_ = !step.identity;
  if (ledger_holds_) step.visibility = FollowLedger(op);
  ledger_holds_ = ledger_holds_ && !step.visibility;
  return step;
}

PutMatch Oracle::FindPut(int layer, const KvView& view,
                         std::int64_t column) const {
  return puts_.Match(view, column, header_.config.v_layout, active_, layer);
}

std::optional<Failure> Oracle::FollowLedger(const TraceOp& op) {
  switch (op.kind) {
    case TraceOpKind::kStartForward:
      return FollowStart(op);
    case TraceOpKind::kSetCausal:
      // The gate has checked the indices.
      (void)ledger_->active().SetCausal(op.indices);
      fresh_[active_] = !reserving_ && !ledger_->active().narrow();
      return std::nullopt;
    case TraceOpKind::kSetLayerType:
      ledger_->SetLayerType(op.type);
      return std::nullopt;
    case TraceOpKind::kPut:
      ledger_->Put(op.layer, op.key.view(), op.value->view());
      return std::nullopt;
    case TraceOpKind::kGet:
      return CheckVisibility(op);
    case TraceOpKind::kAttend:
      return CheckOutput(op);
    case TraceOpKind::kReservedMask:
      return std::nullopt;
    case TraceOpKind::kRemove:
      return FollowRemove(op);
    case TraceOpKind::kCopyPrefix:
      (void)ledger_->CopyPrefix(op.src, op.dst, op.len);
      fresh_.assign(fresh_.size(), false);
      return std::nullopt;
    case TraceOpKind::kCommit:  // The gate has checked the path.
      (void)ledger_->Commit(op.seq, op.indices);
      fresh_.assign(fresh_.size(), false);
      return std::nullopt;
    case TraceOpKind::kCheckpoint:
      (void)ledger_->Checkpoint(op.seq);
      return std::nullopt;
    case TraceOpKind::kFindPrefix:
      return FollowPrompt(op);
    case TraceOpKind::kCanResume:  // "false" is right but at the last state.
      if (!op.answer && ledger_->MustResume(op.seq, op.pos)) {
        return WrongAnswer(
            "result is false, but the sequence ends with a state there");
      }
      if (!op.answer || ledger_->MayResume(op.seq, op.pos)) return std::nullopt;
      return WrongAnswer("result is true, but {}",
                         WhyNotResumed(*ledger_, op.seq, op.pos));
    case TraceOpKind::kEncoderCached:
      if (!op.answer || ledger_->active().slots().cached) return std::nullopt;
      return WrongAnswer("result is true, but nothing is cached");
  }
  return std::nullopt;
}

std::optional<Failure> Oracle::FollowPrompt(const TraceOp& op) {
  fresh_.assign(fresh_.size(), false);
  if (op.len >= std::ssize(op.indices)) {
    return WrongAnswer(
        "len is {}, but the prompt has {}: its last token is "
        "computed, for its output",
        op.len, Counted(std::ssize(op.indices), "token"));
  }
  const Status status = ledger_->FindPrefix(op.seq, op.indices, op.len);
  if (status.ok()) return std::nullopt;
  return WrongAnswer("len is {}, but {}", op.len, status.message());
}

std::optional<Failure> Oracle::FollowStart(const TraceOp& op) {
  const bool ok = op.result == StatusCode::kOk;
  const Batch batch = BatchOf(op);
  fresh_.assign(fresh_.size(), ok && !op.reserve);
  if (!ok) {
    if (header_.visibility_only) {
      std::optional<Failure> failure = CheckRoom(op);
      if (op.result == StatusCode::kCacheFull) ledger_->Refused(batch);
      return failure;
    }
    // Tokens that our caches evict before they refuse leave the ledger too.
    Ledger after = *ledger_;
    if (!after.StartForward(batch, op.reserve).ok()) ledger_ = after;
    return std::nullopt;
  }
  const Status status = ledger_->StartForward(batch, op.reserve);
  if (status.ok()) return std::nullopt;
  return WrongAnswer("result is ok, expected {}", status.ToString());
}

// A cache without tokens has room for a batch of new sequences with at most
// `capacity` tokens: such a cache has at least `capacity` or `max_batch` cells
// (S4), all of them free (S8), and only a lack of cells is cache_full (S12).
// Each token of the batch counts, also if others have its position.
std::optional<Failure> Oracle::CheckRoom(const TraceOp& op) const {
  const InitArgs& init = header_.init;
  const auto tokens = std::ssize(op.positions);  // The gate: <= max_batch.
  std::map<int, std::int32_t> next;  // The next position, by sequence.
  bool fits = tokens <= init.capacity;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const int sequence = At(op.sequences, i);
    fits = fits && At(op.positions, i) == next[sequence]++ &&
           sequence < init.max_sequences;
  }
  const bool empty = std::ranges::all_of(
      ledger_->parts(), [](const auto& part) { return part.tokens().empty(); });
  if (!empty || !fits) return std::nullopt;
  return WrongAnswer(
      "result is cache_full, but the cache has no tokens, and the batch is "
      "within capacity {} and max_sequences {}",
      init.capacity, init.max_sequences);
}

// Whether a Remove may move tokens that other sequences share (S32, F4). Caches
// with windows may have kept such tokens for longer.
bool Oracle::MovesShared(const TraceOp& op) const {
  if (op.end == kOpenEnd) return false;
  return !ledger_->prefixes().empty() ||
         std::ranges::any_of(ledger_->parts(), [&](const auto& part) {
           return part.Forgets() ||
                  std::ranges::any_of(part.tokens(), [&](const auto& token) {
                    return token.HeldBy(op.seq) && token.position >= op.end &&
                           token.sequences.size() > 1;
                  });
         });
}

std::optional<Failure> Oracle::FollowRemove(const TraceOp& op) {
  if (op.result == StatusCode::kSharedCells && !MovesShared(op)) {
    return WrongAnswer(
        "result is shared_cells, but no shared token would move");
  }
  if (op.result != StatusCode::kOk) return std::nullopt;
  fresh_.assign(fresh_.size(), false);
  const Status status = ledger_->Remove(op.seq, op.begin, op.end, op.result);
  if (status.ok()) return std::nullopt;
  return WrongAnswer("result is ok, expected {}", status.ToString());
}

// Checks that the rows have the shape of the rows that were put.
std::optional<Failure> Oracle::CheckDims(const TraceOp& op) const {
  const auto dims = dims_.find({active_, op.layer});
  if (dims == dims_.end()) return std::nullopt;
  const auto& [k_head_dim, kv_heads, v_head_dim] = dims->second;
  const std::int64_t columns = op.key.shape[2];
  const auto differs = [](std::string_view what, const Shape& recorded,
                          const Shape& expected) -> std::optional<Failure> {
    if (recorded == expected) return std::nullopt;
    return WrongAnswer("the shape of {} is {}, expected {}", what,
                       ShapeText(recorded), ShapeText(expected));
  };
  auto failure =
      differs("key", op.key.shape, {k_head_dim, kv_heads, columns, 1});
  if (failure || !op.value) return failure;
  Shape expected = {v_head_dim, kv_heads, columns, 1};
  if (header_.config.v_layout == VLayout::kPermuted) {
    expected = {columns, v_head_dim, kv_heads, 1};
  } else if (header_.config.v_layout == VLayout::kTiled) {
    expected = {kTileCells, v_head_dim, kv_heads, columns / kTileCells};
  }
  return differs("value", op.value->shape, expected);
}

std::optional<Failure> Oracle::CheckVisibility(const TraceOp& op) {
  if (auto failure = CheckDims(op)) return failure;
  if (!fresh_[active_]) return std::nullopt;
  KvView view = RecordedView(op);
  const CacheLedger& active = ledger_->active();
  if (!active.encoder() && !op.mask) {
    return WrongAnswer("mask is null, expected a mask");
  }
  if (active.encoder() && !op.value) {
    view.value = active.slots().layers.at(op.layer).value.view();
  }
  // The line of the Put takes the place of the name of the token.
  const ViewNames names{
      .row =
          [this](int row) {
            return fmt::format("mask row {} ({})", row, RowLabel(row));
          },
      .owner =
          [&](std::int64_t column) {
            return PutText(FindPut(op.layer, view, column), active_);
          },
      .former = [&](std::int64_t column) -> FormerRows {
        const PutMatch match = FindPut(op.layer, view, column);
        return {.name = "",
                .left = match.key && match.value && Left(*match.put)};
      }};
  std::optional<Failure> failure =
      FindWrongRow(*ledger_, op.layer, view, header_.config.v_layout, names);
  if (!failure) {
    RememberWindow(op);
    return std::nullopt;
  }
  failure->text =
      LayerText(op.layer) + failure->text + ReasonText(op, *failure);
  if (active.encoder()) failure->row = -1;  // It has no mask.
  return failure;
}

}  // namespace kvtwin::props
