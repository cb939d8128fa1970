#include "props/laws/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/differential_driver.h"
#include "props/compare/failure.h"
#include "props/compare/visibility.h"
#include "props/history/rows.h"

namespace kvtwin::props {
namespace {

bool IsMisuse(StatusCode code) {
  return code == StatusCode::kInvalidArgument ||
         code == StatusCode::kFailedPrecondition;
}

class Recorder;

// The data that the recorders of one history share.
struct Tape {
  std::vector<Recorder*> alive;  // The oldest is the history's own cache.
  std::vector<Call> calls;       // The calls of the last recorder.
  std::string lost;              // A recorded call that no script can have.
};

// Records every call that changes the cache, except misuse. If a history calls
// two caches at once (`reload`), their calls are kept apart: a new recorder
// begins with the calls of the one that it takes over from, and the script has
// the calls of the recorder that the history kept.
class Recorder final : public ForwardingCache {
 public:
  Recorder(std::unique_ptr<Cache> cache, Tape& tape)
      : ForwardingCache(std::move(cache)), tape_(tape) {
    if (!tape_.alive.empty()) {
      before_ = tape_.alive.front();
      calls_ = before_->calls_;
      lost_ = before_->lost_;
    }
    tape_.alive.push_back(this);
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() override {
    std::erase(tape_.alive, this);
    if (!tape_.alive.empty()) return;
    tape_.calls = std::move(calls_);
    tape_.lost = std::move(lost_);
  }

  Status SetLayer(int layer) override {
    Status status = cache_->SetLayer(layer);
    if (status.ok()) layer_ = layer;
    return status;
  }
  Status SetLayerType(int type) override {
    Status status = cache_->SetLayerType(type);
    if (status.ok()) type_ = type;
    return status;
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    Call call =
        StartCall({batch.positions.begin(), batch.positions.end()},
                  {batch.sequences.begin(), batch.sequences.end()}, reserve);
    call.indices = {batch.multimodal.begin(), batch.multimodal.end()};
    Status status = cache_->StartForward(batch, reserve);
    if (status.ok()) type_ = 0;
    return Keep(std::move(call), std::move(status));
  }
  Status SetCausal(std::span<const int> except) override {
    Call call = Of(Call::Kind::kCausal);
    call.indices = {except.begin(), except.end()};
    return Keep(std::move(call), cache_->SetCausal(except));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    Status status = cache_->Put(key, value);
    if (!status.ok()) return status;
    Call call = Of(Call::Kind::kPut);
    call.key = CopyOf(key, key.dtype);
    call.value = CopyOf(value, value.dtype);
    return Keep(std::move(call), std::move(status));
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return Keep(CopyCall(src, dst, len), cache_->CopyPrefix(src, dst, len));
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    Call call = Of(Call::Kind::kAsk);
    call.seq = seq;
    call.end = pos;
    Result<bool> can = cache_->CanResume(seq, pos);
    static_cast<void>(Keep(std::move(call), can.status()));
    return can;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return Keep(RemoveCall(seq, begin, end), cache_->Remove(seq, begin, end));
  }
  // A script contains no state: each cache that plays it, of any dtype and
  // size, restores its own snapshot.
  Status Restore(const CacheState& state) override {
    const Recorder& from = before_ != nullptr ? *before_ : *this;
    const Result<CacheState> held = from.cache_->Snapshot();
    Status status = cache_->Restore(state);
    if (IsMisuse(status.code())) return status;
    if (!held.ok() || *held != state) Lose("Restore of another state");
    before_ = nullptr;
    Call call;
    call.kind = Call::Kind::kRestore;
    call.state = state;
    return KeepLast(std::move(call), std::move(status));
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    last_asked_ = sequence;
    return cache_->SnapshotOf(sequence);
  }
  // Adds the sequence that the last SnapshotOf asked for.
  Status AddSequence(int sequence, const CacheState& added) override {
    Call call;
    call.kind = Call::Kind::kAdd;
    call.seq = last_asked_;
    call.dst = sequence;
    Result<CacheState> one = cache_->SnapshotOf(last_asked_);
    call.lacks_layer = one.ok() && *one != added;
    if (one.ok() && call.lacks_layer) LeaveOutALayer(*one);
    const bool known = one.ok() && *one == added;
    Status status = cache_->AddSequence(sequence, added);
    if (!known && !IsMisuse(status.code())) {
      Lose("AddSequence of another state");
    }
    const Result<CacheState> after = cache_->Snapshot();
    if (after.ok()) call.state = *after;
    return KeepLast(std::move(call), std::move(status));
  }

 private:
  Call Of(Call::Kind kind) const {
    Call call;
    call.kind = kind;
    call.layer = layer_;
    call.type = type_;
    return call;
  }
  Status Keep(Call call, Status status) {
    if (IsMisuse(status.code())) return status;
    call.code = status.code();
    calls_.push_back(std::move(call));
    return status;
  }
  // Keeps a call that, if it succeeds, ends the pass and selects layer and type
  // 0.
  Status KeepLast(Call call, Status status) {
    if (status.ok()) layer_ = type_ = 0;
    return Keep(std::move(call), std::move(status));
  }
  void Lose(std::string_view what) {
    if (lost_.empty()) lost_ = what;
  }

  Tape& tape_;
  const Recorder* before_ = nullptr;  // The recorder before, until Restore.
  std::vector<Call> calls_;
  std::string lost_;
  mutable int last_asked_ = 0;
  int layer_ = 0;
  int type_ = 0;
};

std::string TokensText(const SeenRow& row) {
  std::vector<std::int32_t> positions;
  positions.reserve(row.tokens.size());
  for (const SeenToken& token : row.tokens) {
    positions.push_back(token.position);
  }
  return fmt::format("positions [{}]", fmt::join(positions, " "));
}

// Returns a stored row as numbers.
std::vector<float> Numbers(const std::vector<std::byte>& row, DType dtype) {
  const std::int64_t step = IsBlockDType(dtype) ? kBlockElements : 1;
  const std::int64_t count = std::ssize(row) / RunBytes(dtype, step) * step;
  std::vector<float> numbers(AsSize(count));
  WriteDense(DenseView(row.data(), dtype, {count, 1, 1, 1}), DType::kF32,
             std::as_writable_bytes(std::span(numbers)).data());
  return numbers;
}

double Largest(const std::vector<float>& numbers) {
  double largest = 0;
  for (const float number : numbers) {
    const double size = std::fabs(number);
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  return largest;
}

bool Close(const std::vector<std::byte>& left,
           const std::vector<std::byte>& right, DType dtype, double slack,
           double size) {
  if (left == right) return true;
  if (slack == 0 || left.size() != right.size()) return false;
  const std::vector<float> lefts = Numbers(left, dtype);
  const std::vector<float> rights = Numbers(right, dtype);
  const double most = slack * std::max({size, Largest(lefts), Largest(rights)});
  for (std::size_t i = 0; i < lefts.size(); ++i) {
    const double a = lefts[i];
    const double b = rights[i];
    const bool both_nan = std::isnan(a) && std::isnan(b);
    if (!both_nan && a != b && !(std::fabs(a - b) <= most)) return false;
  }
  return true;
}

}  // namespace

Call RemoveCall(int seq, std::int32_t begin, std::int32_t end) {
  Call call;
  call.kind = Call::Kind::kRemove;
  call.seq = seq;
  call.begin = begin;
  call.end = end;
  return call;
}

Call CopyCall(int src, int dst, std::int32_t len) {
  Call call;
  call.kind = Call::Kind::kCopy;
  call.seq = src;
  call.dst = dst;
  call.end = len;
  return call;
}

Call StartCall(std::vector<std::int32_t> positions, std::vector<int> sequences,
               bool reserve) {
  Call call;
  call.positions = std::move(positions);
  call.sequences = std::move(sequences);
  call.reserve = reserve;
  return call;
}

std::string ToText(const Call& call) {
  switch (call.kind) {
    case Call::Kind::kStart:
      return fmt::format("StartForward(positions [{}], sequences [{}]{})",
                         fmt::join(call.positions, " "),
                         fmt::join(call.sequences, " "),
                         call.reserve ? ", reserve" : "");
    case Call::Kind::kCausal:
      return fmt::format("SetCausal([{}])", fmt::join(call.indices, " "));
    case Call::Kind::kPut:
      return fmt::format("Put(layer {})", call.layer);
    case Call::Kind::kCopy:
      return fmt::format("CopyPrefix({}, {}, {})", call.seq, call.dst,
                         call.end);
    case Call::Kind::kRemove:
      return fmt::format(
          "Remove({}, {}, {})", call.seq, call.begin,
          call.end == kOpenEnd ? "open" : fmt::to_string(call.end));
    case Call::Kind::kAsk:
      return fmt::format("CanResume({}, {})", call.seq, call.end);
    case Call::Kind::kRestore:
      return "Restore(its own Snapshot)";
    case Call::Kind::kAdd:
      return fmt::format("AddSequence({}, SnapshotOf({}){})", call.dst,
                         call.seq, call.lacks_layer ? " less a layer" : "");
  }
  return "";
}

std::string ToText(const Answer& answer) {
  return fmt::format("{}{}", StatusName(answer.code),
                     answer.yes ? " (yes)" : "");
}

Script Resolve(const History& history, const Subject& subject) {
  History plain = history;
  for (Op& op : plain.ops) op.keep_rows = false;
  Tape tape;
  const auto recorded = [&tape](Result<std::unique_ptr<Cache>> cache)
      -> Result<std::unique_ptr<Cache>> {
    if (!cache.ok()) return cache.status();
    return std::unique_ptr<Cache>(
        std::make_unique<Recorder>(std::move(*cache), tape));
  };
  Subject recorder = {.name = "recorder", .make = [&](const CacheSpec& spec) {
                        return recorded(MakeCache(spec, "reference"));
                      }};
  if (!subject.is_twin()) {
    const bool by_reference = subject.level == Level::kIdentity;
    recorder.make_of = [&recorded, &subject, by_reference](const Setup& setup) {
      return recorded(by_reference ? MakeCache(setup.spec, "reference")
                                   : subject.Make(setup));
    };
    recorder.abilities = subject.abilities;
    recorder.level = subject.level;
    if (!by_reference) recorder.rules = subject.rules;
    recorder.tried_outside_of_life = false;
  }
  const auto failure = RunHistory(plain, recorder).failure;
  if (failure && failure->party() == Party::kBackend) throw *failure;
  // An incomplete script would make a correct cache fail.
  if (!tape.lost.empty()) {
    throw std::logic_error("no call of a script is " + tape.lost);
  }
  return {.setup = plain.setup, .calls = std::move(tape.calls)};
}

std::optional<Session> Session::Open(const Setup& setup,
                                     const Subject& subject) {
  Session session(setup, subject);
  if (!subject.is_twin() && !subject.abilities.Fits(setup)) return std::nullopt;
  Result<std::unique_ptr<Cache>> cache = subject.Make(setup);
  if (!cache.ok()) return std::nullopt;
  session.cache_ = std::move(*cache);
  const InitArgs& init = setup.init;
  if (!session.cache_->SetConfig(setup.config).ok()) return std::nullopt;
  if (!session.cache_->Init(init).ok()) {
    return std::nullopt;
  }
  if (!subject.is_twin()) {
    session.record_.emplace(setup.spec);
    if (!session.record_->Init(setup.config, init).ok()) return std::nullopt;
    session.record_->NeverFull();
  }
  return session;
}

void Session::CheckWhole() const {
  if (half_removed_ >= 0) throw NotJudged();
}

// A batch that the abilities allow.
void Session::CheckStart(const Call& call) {
  const auto need = [](bool has) {
    if (!has) throw NotJudged();
  };
  need(!call.reserve || can_.Can(KVTWIN_CAN_RESERVE));
  std::map<int, std::int64_t> next;
  for (std::size_t i = 0; i < call.positions.size(); ++i) {
    const int seq = call.sequences[i];
    const std::int64_t position = call.positions[i];
    need(position <= can_.LastPosition());
    const auto at =
        next.try_emplace(seq, can_.OnlyGoesOn() ? Next(seq) : 0).first;
    if (!can_.OnlyGoesOn()) continue;
    need(position == at->second++ && position < setup_.init.capacity);
  }
  need(next.size() <= 1 || can_.Can(KVTWIN_CAN_MIX));
}

void Session::CheckCall(const Call& call) {
  if (is_twin_) return;
  const auto need = [](bool has) {
    if (!has) throw NotJudged();
  };
  const auto known = [&](int seq) {
    return can_.Can(KVTWIN_CAN_ANY_SEQUENCE) || seq < setup_.init.max_sequences;
  };
  const bool is_remove = call.kind == Call::Kind::kRemove;
  const bool open = call.end == kOpenEnd;
  const bool clears =
      is_remove && call.seq == half_removed_ && call.begin == 0 && open;
  if (!clears) CheckWhole();
  need(known(call.seq) && known(call.dst) &&
       std::ranges::all_of(call.sequences, known));
  switch (call.kind) {
    case Call::Kind::kStart:
      return CheckStart(call);
    case Call::Kind::kCausal:
      return need(can_.set_causal);
    case Call::Kind::kPut:
      return need(!can_.OnlyGoesOn() || !pass_puts_.contains(call.layer));
    case Call::Kind::kCopy:
      need(can_.Can(KVTWIN_CAN_COPY_PREFIX));
      need(call.seq != call.dst || !can_.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF));
      need(can_.Can(KVTWIN_CAN_SHARE) || call.end == Next(call.seq));
      return need(call.end <= can_.LastEnd());
    case Call::Kind::kRemove: {
      need(can_.Can(open ? KVTWIN_CAN_REMOVE_TAIL : KVTWIN_CAN_REMOVE_MIDDLE));
      need(call.begin <= can_.LastEnd() &&
           (open || call.end <= can_.LastEnd()));
      if (!can_.OnlyGoesOn() || !open || call.begin == 0) return;
      if (call.begin >= Next(call.seq)) return;
      // It is asked before it goes back.
      if (!can_.can_resume) {
        return need(record_->CanResume(call.seq, call.begin, /*surely=*/true));
      }
      const Result<bool> yes = cache_->CanResume(call.seq, call.begin);
      return need(yes.ok() && *yes);
    }
    case Call::Kind::kAsk:
      return;
    case Call::Kind::kRestore:
    case Call::Kind::kAdd:
      return need(can_.snapshots);
  }
}

// The record follows what the cache answers.
void Session::Record(const Call& call, const Answer& answer) {
  const bool ok = answer.code == StatusCode::kOk;
  record_->SetLayerType(call.type);
  Status ignored;
  switch (call.kind) {
    case Call::Kind::kStart: {
      pass_puts_.clear();
      const Batch batch{call.positions, call.sequences, call.indices};
      if (ok) ignored = record_->StartForward(batch, call.reserve, answer.code);
      return;
    }
    case Call::Kind::kPut:
      pass_puts_.insert_or_assign(call.layer, call);
      record_->SetLayerType(TypeOf(call.layer));
      if (ok && pass_) {
        record_->active().Put(call.layer, call.key.view(), call.value.view());
      }
      return;
    case Call::Kind::kCopy:
      if (!ok) return;
      ignored = record_->CopyPrefix(call.seq, call.dst, call.end, answer.code);
      return;
    case Call::Kind::kRemove:
      half_removed_ = -1;
      if (ok) {
        ignored = record_->Remove(call.seq, call.begin, call.end, answer.code);
      } else if (can_.Cannot(KVTWIN_CANNOT_UNDO_REMOVE)) {
        half_removed_ = call.seq;
      }
      return;
    case Call::Kind::kRestore:
    case Call::Kind::kAdd:
      if (ok) record_->Restore(*cache_->Snapshot());
      return;
    case Call::Kind::kCausal:
    case Call::Kind::kAsk:
      return;
  }
}

Session Session::Clone() const {
  Session clone = *Open(setup_, *subject_);
  for (const Call& call : calls_) clone.Do(call);
  return clone;
}

bool Session::Reload() {
  const Result<CacheState> state = cache_->Snapshot();
  if (!state.ok()) return false;
  Session fresh = *Open(setup_, *subject_);
  if (!fresh.cache_->Restore(*state).ok()) return false;
  cache_ = std::move(fresh.cache_);
  pass_.reset();
  return true;
}

bool Session::MayCopyToItself() const {
  return can_.Can(KVTWIN_CAN_COPY_PREFIX) && can_.Can(KVTWIN_CAN_SHARE) &&
         !can_.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF);
}

int Session::types() const {
  if (setup_.spec.kind != Kind::kWrapper) return 1;
  return Size(setup_.spec.caches);
}

int Session::TypeOf(int layer) const { return layer % types(); }

const CacheSpec& Session::spec(int type) const {
  if (setup_.spec.kind != Kind::kWrapper) return setup_.spec;
  return At(setup_.spec.caches, type);
}

bool Session::HasEncoder() const {
  for (int type = 0; type < types(); ++type) {
    if (IsEncoder(type)) return true;
  }
  return false;
}

void Session::SetType(int type) {
  if (types() > 1) static_cast<void>(cache_->SetLayerType(type).ok());
}

void Session::SetLayer(int layer) {
  SetType(TypeOf(layer));
  static_cast<void>(cache_->SetLayer(layer).ok());
}

Answer Session::Do(const Call& call) {
  const Answer answer = Try(call);
  if (!sees_cells() && answer.code == StatusCode::kCacheFull) throw NotJudged();
  return answer;
}

Answer Session::Try(const Call& call) {
  calls_.push_back(call);
  if (is_twin_) return Make(call);
  const bool asks = call.kind == Call::Kind::kAsk;
  if (asks && (!can_.can_resume || call.end > can_.LastPosition())) return {};
  const bool in_pass =
      call.kind == Call::Kind::kPut || call.kind == Call::Kind::kCausal;
  if (in_pass && !pass_) return {};
  const auto put = pass_puts_.find(call.layer);
  if (call.kind == Call::Kind::kPut && can_.OnlyGoesOn() &&
      put != pass_puts_.end() && put->second.key == call.key &&
      put->second.value == call.value) {
    return {};  // It is there.
  }
  CheckCall(call);
  const Answer answer = Make(call);
  Record(call, answer);
  return answer;
}

void Session::PutAny() {
  constexpr std::int64_t kBeyondHistories = 1 << 20;
  const std::set<int> layers = put_layers_;
  for (const int layer : layers) {
    if (!pass_ || IsEncoder(TypeOf(layer))) continue;
    const auto count = std::ssize(pass_->positions);
    RowBuffer buffer;
    const auto rows = [&](RowRole role, int dim) {
      return CopyOf(
          buffer.Fill({dim, setup_.rows.kv_heads, count, 1}, DType::kF32,
                      {role, layer, kBeyondHistories + pass_->positions[0],
                       false, false},
                      /*strided=*/false),
          DType::kF32);
    };
    Call put;
    put.kind = Call::Kind::kPut;
    put.layer = layer;
    put.type = TypeOf(layer);
    put.key = rows(RowRole::kKey, setup_.rows.k_head_dim);
    put.value = rows(RowRole::kValue, setup_.rows.v_head_dim);
    Do(put);
  }
}

Answer Session::Make(const Call& call) {
  switch (call.kind) {
    case Call::Kind::kStart: {
      const Batch batch{call.positions, call.sequences, call.indices};
      const Status status = cache_->StartForward(batch, call.reserve);
      pass_.reset();
      if (status.ok()) pass_ = call;
      stale_ = copied_ = narrow_ = false;
      return {status.code()};
    }
    case Call::Kind::kCausal:
      if (!pass_) return {};
      narrow_ = narrow_ || copied_;
      SetType(call.type);
      return {cache_->SetCausal(call.indices).code()};
    case Call::Kind::kPut: {
      if (!pass_) return {};
      SetLayer(call.layer);
      const Status status = cache_->Put(call.key.view(), call.value.view());
      if (status.ok()) put_layers_.insert(call.layer);
      return {status.code()};
    }
    case Call::Kind::kCopy:
      stale_ = copied_ = true;
      return {cache_->CopyPrefix(call.seq, call.dst, call.end).code()};
    case Call::Kind::kRemove:
      stale_ = true;
      return {cache_->Remove(call.seq, call.begin, call.end).code()};
    case Call::Kind::kAsk: {
      const Result<bool> can = cache_->CanResume(call.seq, call.end);
      return {can.status().code(), can.ok() && *can};
    }
    case Call::Kind::kRestore: {
      const Result<CacheState> state = cache_->Snapshot();
      if (!state.ok()) return {state.status().code()};
      return {AfterLoading(cache_->Restore(*state))};
    }
    case Call::Kind::kAdd: {
      Result<CacheState> one = cache_->SnapshotOf(call.seq);
      if (!one.ok()) return {one.status().code()};
      if (call.lacks_layer) LeaveOutALayer(*one);
      return {AfterLoading(cache_->AddSequence(call.dst, *one))};
    }
  }
  return {};
}

StatusCode Session::AfterLoading(const Status& status) {
  if (status.ok()) pass_.reset();
  return status.code();
}

std::vector<CellEntry> Session::Cells(int type) {
  std::vector<CellEntry> cells;
  if (!sees_cells()) {
    int cell = 0;
    for (const auto& token : At(record_->parts(), type).tokens()) {
      for (const int seq : token.sequences) {
        cells.push_back({cell, static_cast<std::int32_t>(token.position), seq});
      }
      ++cell;
    }
    return cells;
  }
  CheckWhole();
  SetType(type);
  cache_->ListCells(cells);
  return cells;
}

std::vector<int> Session::BatchCells(int type) {
  SetType(type);
  const auto cells = cache_->BatchCells();
  return {cells.begin(), cells.end()};
}

KvView Session::View(int layer) {
  CheckWhole();
  // A cache that goes on only is asked for what was put.
  if (!is_twin_ && can_.OnlyGoesOn() && !IsEncoder(TypeOf(layer)) &&
      !pass_puts_.contains(layer)) {
    throw NotJudged();
  }
  SetLayer(layer);
  const Result<KvView> view = cache_->Get();
  return view.ok() ? *view : KvView();
}

std::set<int> Session::Sequences() {
  std::set<int> sequences;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) sequences.insert(entry.sequence);
  }
  return sequences;
}

std::int32_t Session::Next(int seq) {
  std::int64_t next = 0;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) {
      if (entry.sequence != seq) continue;
      next = std::max(next, std::int64_t{entry.position} + 1);
    }
  }
  return static_cast<std::int32_t>(std::min<std::int64_t>(next, kOpenEnd));
}

std::vector<Query> Session::Queries() {
  std::map<int, std::set<std::int32_t>> positions;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) {
      positions[entry.sequence].insert(entry.position);
    }
  }
  std::vector<Query> queries;
  for (auto& [seq, stored] : positions) {
    if (*stored.rbegin() < kOpenEnd) stored.insert(*stored.rbegin() + 1);
    for (const std::int32_t position : stored) {
      queries.push_back({position, seq});
    }
  }
  return queries;
}

void Session::AddRows(const std::vector<Query>& queries, bool slots,
                      std::vector<SeenRow>& rows) {
  const VLayout v_layout = setup_.config.v_layout;
  for (const int layer : put_layers_) {
    const int type = TypeOf(layer);
    // Whether an encoder still has its slots is its own affair.
    if (IsEncoder(type) && !sees_cells()) continue;
    const KvView view = View(layer);
    if (view.key.data == nullptr) continue;
    if (IsEncoder(type)) {
      if (!slots) continue;
      const Result<bool> cached = cache_->EncoderCached();
      TensorView value = view.value;
      if (v_layout == VLayout::kPermuted) {
        std::rotate(value.shape.begin(), value.shape.begin() + 1,
                    value.shape.begin() + 3);
        std::rotate(value.stride.begin(), value.stride.begin() + 1,
                    value.stride.begin() + 3);
      }
      rows.push_back(
          {layer,
           {},
           {{cached.ok() && *cached ? 1 : 0, CopyOf(value, value.dtype).bytes,
             CopyOf(view.key, view.key.dtype).bytes}}});
      continue;
    }
    if (view.mask.data == nullptr || view.mask.shape[1] < std::ssize(queries)) {
      throw std::runtime_error(
          fmt::format("layer {}: the mask has the shape {}, for {} tokens",
                      layer, ShapeText(view.mask.shape), queries.size()));
    }
    const std::vector<CellEntry> cells =
        sees_cells() ? Cells(type) : std::vector<CellEntry>();
    const std::int64_t columns = view.mask.shape[0];
    std::vector<SeenToken> tokens;
    tokens.reserve(AsSize(columns));
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto cell = AsInt(view.first_cell + column);
      const auto at = std::lower_bound(
          cells.begin(), cells.end(), cell,
          [](const CellEntry& entry, int c) { return entry.cell < c; });
      const bool held = at != cells.end() && at->cell == cell;
      tokens.push_back({held ? at->position : -1,
                        RowBytes(view.value, column, v_layout),
                        RowBytes(view.key, column, VLayout::kPlain)});
    }
    for (std::size_t i = 0; i < queries.size(); ++i) {
      SeenRow row{layer, queries[i], {}};
      const auto positions = PositionsOf(queries[i].seq, layer);
      for (std::int64_t column = 0; column < columns; ++column) {
        if (!MaskAllows(view.mask, column, static_cast<std::int64_t>(i)))
          continue;
        SeenToken token = At(tokens, column);
        if (!sees_cells()) {
          const auto at = positions.find(token.value);
          if (at != positions.end()) token.position = at->second;
        }
        if (token.position >= 0 || !stale_) {
          row.tokens.push_back(std::move(token));
        }
      }
      std::sort(row.tokens.begin(), row.tokens.end());
      rows.push_back(std::move(row));
    }
  }
}

std::map<std::vector<std::byte>, std::int32_t> Session::PositionsOf(
    int seq, int layer) const {
  std::map<std::vector<std::byte>, std::int32_t> positions;
  if (sees_cells()) return positions;
  const auto type = AsSize(TypeOf(layer));
  for (const auto& token : record_->parts()[type].tokens()) {
    if (!token.HeldBy(seq)) continue;
    const auto rows = token.rows.find(layer);
    // What was never put may be anything, and equal rows anybody's.
    if (rows == token.rows.end() ||
        !positions
             .emplace(rows->second.value.bytes,
                      static_cast<std::int32_t>(token.position))
             .second) {
      throw NotJudged();
    }
  }
  return positions;
}

std::vector<SeenRow> Session::PassRows() {
  std::vector<SeenRow> rows;
  if (!pass_ || narrow_) return rows;
  // No rule says what a mask shows after that, wherever the tokens lie.
  if (!sees_cells() && (stale_ || pass_->reserve)) return rows;
  std::vector<Query> queries;
  for (std::size_t i = 0; i < pass_->positions.size(); ++i) {
    queries.push_back({pass_->positions[i], pass_->sequences[i]});
  }
  AddRows(queries, /*slots=*/true, rows);
  return rows;
}

// By a batch of the next token of each sequence, on a cache of its own: all
// that a third-party cache may be asked.
std::vector<SeenRow> Session::LookByGoingOn(const std::vector<Query>& queries) {
  Session clone = Clone();
  std::vector<SeenRow> rows;
  for (const Query& query : queries) {
    const bool beyond = query.position >= setup_.init.capacity ||
                        query.position > can_.LastPosition();
    if (beyond || query.position < clone.Next(query.seq)) continue;
    const Answer answer =
        clone.Do(StartCall({query.position}, {query.seq}, false));
    if (answer.code != StatusCode::kOk) throw NotJudged();
    clone.PutAny();
    for (SeenRow& row : clone.PassRows()) {
      std::erase_if(row.tokens, [&](const SeenToken& token) {
        return token.position == query.position;
      });
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

std::vector<SeenRow> Session::Look(const std::vector<Query>& queries) {
  std::vector<SeenRow> rows;
  if (!sees_cells() || !can_.Can(KVTWIN_CAN_RESERVE) || can_.OnlyGoesOn()) {
    rows = LookByGoingOn(queries);
    pass_.reset();
    std::stable_sort(rows.begin(), rows.end(),
                     [](auto& a, auto& b) { return a.layer < b.layer; });
    return rows;
  }
  std::vector<Query> asked = queries;
  std::erase_if(asked, [&](const Query& query) {
    return query.position > can_.LastPosition();
  });
  const auto most =
      can_.Can(KVTWIN_CAN_MIX) ? AsSize(setup_.init.max_batch) : std::size_t{1};
  for (std::size_t first = 0; first < asked.size(); first += most) {
    const std::vector<Query> some(
        IteratorAt(asked, first),
        IteratorAt(asked, std::min(first + most, asked.size())));
    Call probe = StartCall({}, {}, /*reserve=*/true);
    for (const Query& query : some) {
      probe.positions.push_back(query.position);
      probe.sequences.push_back(query.seq);
    }
    if (Do(probe).code == StatusCode::kOk) {
      AddRows(some, /*slots=*/first == 0, rows);
    }
    calls_.pop_back();  // A probe is not one of the session's calls.
  }
  pass_.reset();
  std::stable_sort(rows.begin(), rows.end(),
                   [](auto& a, auto& b) { return a.layer < b.layer; });
  return rows;
}

Picture Session::Show() {
  Picture picture;
  if (!sees_cells()) {  // What is seen, wherever it lies.
    for (const SeenRow& row : PassRows()) {
      std::vector<std::byte>& bytes = picture.views.emplace_back();
      for (const SeenToken& token : row.tokens) {
        bytes.insert(bytes.end(), token.value.begin(), token.value.end());
        bytes.insert(bytes.end(), token.key.begin(), token.key.end());
      }
    }
    picture.shown = !picture.views.empty();
    return picture;
  }
  for (int type = 0; type < types(); ++type) {
    picture.cells.push_back(Cells(type));
    picture.batch_cells.push_back(BatchCells(type));
  }
  if (!pass_) return picture;
  for (const int layer : put_layers_) {
    const KvView view = View(layer);
    std::vector<std::byte>& bytes = picture.views.emplace_back();
    bytes.push_back(static_cast<std::byte>(view.first_cell & 0xFF));
    bytes.push_back(static_cast<std::byte>(view.first_cell >> 8 & 0xFF));
    for (const TensorView* tensor : {&view.key, &view.value, &view.mask}) {
      if (tensor->data == nullptr) continue;
      const DenseTensor copy = CopyOf(*tensor, tensor->dtype);
      bytes.insert(bytes.end(), copy.bytes.begin(), copy.bytes.end());
    }
  }
  return picture;
}

std::optional<std::string> CompareRows(const std::vector<SeenRow>& left,
                                       const std::vector<SeenRow>& right,
                                       DType dtype, double slack, double size) {
  if (left.size() != right.size()) {
    return fmt::format("{} rows are seen, and {}", left.size(), right.size());
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    const SeenRow& a = left[i];
    const SeenRow& b = right[i];
    const std::string row =
        fmt::format("in layer {}, sequence {} at position {}", a.layer,
                    a.query.seq, a.query.position);
    const std::string a_text = TokensText(a);
    if (a_text != TokensText(b)) {
      return fmt::format("{} sees {}, and {}", row, a_text, TokensText(b));
    }
    for (std::size_t t = 0; t < a.tokens.size(); ++t) {
      const bool keys =
          Close(a.tokens[t].key, b.tokens[t].key, dtype, slack, size);
      if (keys && a.tokens[t].value == b.tokens[t].value) continue;
      return fmt::format("{} sees another {} row at position {}", row,
                         keys ? "V" : "K", a.tokens[t].position);
    }
  }
  return std::nullopt;
}

void KeepCommon(std::vector<SeenRow>& left, std::vector<SeenRow>& right) {
  const auto keep = [](std::vector<SeenRow>& rows,
                       const std::vector<SeenRow>& others) {
    std::erase_if(rows, [&](const SeenRow& row) {
      return std::ranges::none_of(others, [&](const SeenRow& other) {
        return other.layer == row.layer && other.query.seq == row.query.seq &&
               other.query.position == row.query.position;
      });
    });
  };
  keep(left, right);
  keep(right, left);
}

std::optional<std::string> ComparePictures(const Picture& left,
                                           const Picture& right) {
  if (!left.shown || !right.shown) return std::nullopt;
  if (left.cells != right.cells) return "the cells differ";
  if (left.batch_cells != right.batch_cells) return "the batch's cells differ";
  if (left.views != right.views) return "the bytes of a view differ";
  return std::nullopt;
}

}  // namespace kvtwin::props
