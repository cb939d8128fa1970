#include "props/laws/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "core/elements.h"
#include "core/mask_elements.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/trio.h"
#include "props/compare/visibility.h"

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
  std::vector<float> numbers(static_cast<std::size_t>(count));
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

Script Resolve(const History& history) {
  History plain = history;
  for (Op& op : plain.ops) op.keep_rows = false;
  Tape tape;
  const Subject recorder = {
      .name = "recorder",
      .make = [&tape](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        Result<std::unique_ptr<Cache>> cache = MakeCache(spec, "reference");
        if (!cache.ok()) return cache.status();
        return std::unique_ptr<Cache>(
            std::make_unique<Recorder>(std::move(*cache), tape));
      }};
  RunHistory(plain, recorder);
  // An incomplete script would make a correct cache fail.
  if (!tape.lost.empty()) {
    throw std::logic_error("no call of a script is " + tape.lost);
  }
  return {.setup = plain.setup, .calls = std::move(tape.calls)};
}

std::optional<Session> Session::Open(const Setup& setup,
                                     const Subject& subject) {
  Session session(setup, subject);
  Result<std::unique_ptr<Cache>> cache = subject.make(setup.spec);
  if (!cache.ok()) return std::nullopt;
  session.cache_ = std::move(*cache);
  const InitArgs& init = setup.init;
  if (!session.cache_->SetConfig(setup.config).ok()) return std::nullopt;
  if (!session.cache_
           ->Init(init.dtype, init.max_sequences, init.capacity, init.max_batch)
           .ok()) {
    return std::nullopt;
  }
  return session;
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

int Session::types() const {
  if (setup_.spec.kind != Kind::kWrapper) return 1;
  return static_cast<int>(setup_.spec.caches.size());
}

int Session::TypeOf(int layer) const { return layer % types(); }

const CacheSpec& Session::spec(int type) const {
  if (setup_.spec.kind != Kind::kWrapper) return setup_.spec;
  return setup_.spec.caches[static_cast<std::size_t>(type)];
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
  calls_.push_back(call);
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
  SetType(type);
  std::vector<CellEntry> cells;
  cache_->ListCells(cells);
  return cells;
}

std::vector<int> Session::BatchCells(int type) {
  SetType(type);
  const auto cells = cache_->BatchCells();
  return {cells.begin(), cells.end()};
}

KvView Session::View(int layer) {
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
    const std::vector<CellEntry> cells = Cells(type);
    const std::int64_t columns = view.mask.shape[0];
    std::vector<SeenToken> tokens;
    tokens.reserve(static_cast<std::size_t>(columns));
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto cell = static_cast<int>(view.first_cell + column);
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
      for (std::int64_t column = 0; column < columns; ++column) {
        if (!MaskAllows(view.mask, column, static_cast<std::int64_t>(i)))
          continue;
        const SeenToken& token = tokens[static_cast<std::size_t>(column)];
        if (token.position >= 0 || !stale_) row.tokens.push_back(token);
      }
      std::sort(row.tokens.begin(), row.tokens.end());
      rows.push_back(std::move(row));
    }
  }
}

std::vector<SeenRow> Session::PassRows() {
  std::vector<SeenRow> rows;
  if (!pass_ || narrow_) return rows;
  std::vector<Query> queries;
  for (std::size_t i = 0; i < pass_->positions.size(); ++i) {
    queries.push_back({pass_->positions[i], pass_->sequences[i]});
  }
  AddRows(queries, /*slots=*/true, rows);
  return rows;
}

std::vector<SeenRow> Session::Look(const std::vector<Query>& queries) {
  std::vector<SeenRow> rows;
  const auto most = static_cast<std::size_t>(setup_.init.max_batch);
  for (std::size_t first = 0; first < queries.size(); first += most) {
    const std::vector<Query> some(
        queries.begin() + static_cast<std::ptrdiff_t>(first),
        queries.begin() + static_cast<std::ptrdiff_t>(
                              std::min(first + most, queries.size())));
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

std::optional<std::string> ComparePictures(const Picture& left,
                                           const Picture& right) {
  if (left.cells != right.cells) return "the cells differ";
  if (left.batch_cells != right.batch_cells) return "the batch's cells differ";
  if (left.views != right.views) return "the bytes of a view differ";
  return std::nullopt;
}

}  // namespace kvtwin::props
