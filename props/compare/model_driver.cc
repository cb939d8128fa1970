#include "props/compare/model_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/attention/numeric_view.h"
#include "props/base/check_name.h"
#include "props/base/counted.h"
#include "props/base/hash.h"
#include "props/base/optional_calls.h"
#include "props/base/runs_of.h"
#include "props/compare/failure.h"
#include "props/compare/step.h"
#include "props/history/misuse.h"

namespace kvtwin::props {

using reference::LedgerToken;

ModelDriver::ModelDriver(const Setup& setup, const Subject& subject,
                         CallTrace* trace, RunResult& result)
    : setup_(setup),
      subject_(subject),
      trace_(trace),
      result_(result),
      shifts_(Shifts(setup.spec)),
      ledger_(setup.spec, subject.rules) {}

void ModelDriver::HashInt(std::int64_t value) {
  result_.digest = HashBytes(&value, sizeof(value), result_.digest);
}

bool ModelDriver::SetUp() {
  Begin("Init");
  Result<std::unique_ptr<Cache>> cache = subject_.Make(setup_);
  Status status = cache.status();
  if (status.ok()) {
    tested_ = std::move(*cache);
    status = tested_->SetConfig(setup_.config);
  }
  const InitArgs& init = setup_.init;
  if (status.ok()) {
    status = tested_->Init(init);
  }
  ++result_.operations;
  HashInt(static_cast<std::int64_t>(status.code()));
  if (status.code() == StatusCode::kNotSupported) return false;
  // No cache has such sizes, and the ledger does not check arguments.
  const CacheConfig& config = setup_.config;
  if (std::min({init.max_sequences, init.capacity, init.max_batch,
                config.cache_padding, config.mask_batch_padding}) < 1) {
    return false;
  }
  // Sizes, too, decide whether such a cache can exist.
  const Status expected = ledger_.Init(config, init);
  if (!expected.ok()) return false;
  CheckResult({}, "Init", expected, status);
  Begin("");
  // CheckRoom judges cache_full instead.
  ledger_.IgnoreCapacity();
  std::map<int, int> layers;  // By type.
  for (int i = 0; i < setup_.layers; ++i) ++layers[TypeOf(setup_, i)];
  for (const auto& [type, count] : layers) {
    ledger_.NeedLayers(AsSize(type), count);
  }
  return true;
}

void ModelDriver::TearDown() {
  Begin("Close");
  tested_->Close();
  Begin("");
}

void ModelDriver::AddStep(const std::string& call, StatusCode code,
                          std::string_view answer) {
  ++result_.operations;
  HashInt(static_cast<std::int64_t>(code));
  if (trace_ == nullptr) return;
  trace_->Add(call, answer.empty() ? StatusName(code) : answer, code);
}

void ModelDriver::DrawCellsNow() {
  if (trace_ == nullptr || !trace_->frame || trace_->steps.empty()) return;
  Step& step = trace_->steps.back();
  if (step.number < trace_->from) return;
  const std::vector<Held> held = HeldTokens(ledger_.active());
  DrawCells(*trace_->frame, held, held, 0, step);
  step.cache = type_;
}

void ModelDriver::CheckResult(std::optional<OpKind> kind,
                              const std::string& call, const Status& expected,
                              const Status& actual) {
  if (expected.code() == actual.code()) return;
  throw WrongResult(kind, fmt::format("{} is {}, expected {}", call,
                                      actual.ToString(), expected.ToString()));
}

void ModelDriver::SetType(int type) {
  ledger_.SetLayerType(type);
  if (!wrapper_ || (type_ == type && type_is_sure_)) return;
  type_ = type;
  type_is_sure_ = true;
  const auto call = [&] { return fmt::format("SetLayerType({})", type); };
  Begin(call);
  CheckResult(OpKind::kType, call(), {}, tested_->SetLayerType(type));
  Begin("");
}

void ModelDriver::SelectLayer(int layer) {
  layer_ = layer;
  const auto call = [&] { return fmt::format("SetLayer({})", layer); };
  Begin(call);
  CheckResult(OpKind::kLayer, call(), {}, tested_->SetLayer(layer));
  Begin("");
}

void ModelDriver::SelectType(int type) {
  if (wrapper_) SetType(type);
}

void ModelDriver::GoTo(int layer) {
  SetType(TypeOf(setup_, layer));
  SelectLayer(layer);
}

bool ModelDriver::StartForward(Tokens tokens, bool reserve) {
  if (reference::NeedsCommit(ledger_.parts(), tokens.batch())) {
    // Nothing changes, and the pass continues (D4).
    const std::string call = StartForwardText(tokens, reserve);
    Begin(call);
    const Status refused = tested_->StartForward(tokens.batch(), reserve);
    AddStep(call, refused.code());
    CheckResult(OpKind::kPut, call,
                ledger_.StartForward(tokens.batch(), reserve), refused);
    return false;
  }
  const auto before = std::tuple(batch_, active_, copied_, pass_is_open_,
                                 fresh_, type_, type_is_sure_);
  batch_ = std::move(tokens);
  const Batch batch = batch_.batch();
  const std::string call = StartForwardText(batch_, reserve);
  active_ = copied_ = pass_is_open_ = false;
  fresh_.reset();
  Begin(call, /*begins_pass=*/true);
  const Status actual = tested_->StartForward(batch, reserve);
  AddStep(call, actual.code());
  type_is_sure_ = actual.ok();
  if (actual.code() == StatusCode::kCacheFull) {
    CheckRoom(call, ledger_, batch_);
    // It may have evicted tokens first (S12); with states, the tokens that
    // remain are open.
    ledger_.Refused(batch);
    pass_is_open_ = !AreOurs(subject_.rules);
    const bool goes_on = setup_.legal && subject_.Overfills();
    over_ = ledger_.HasStates() || (Bounded() && pass_is_open_ && !goes_on);
    DrawCellsNow();
    return false;
  }
  if (actual.ok()) type_ = 0;
  const Status expected = ledger_.StartForward(batch, reserve, actual.code());
  CheckResult(OpKind::kPut, call, expected, actual);
  if (!actual.ok()) {  // The ledger expects this refusal, too.
    // By our rules, the pass before a wrong batch continues (S5); by others, it
    // may have ended.
    const bool ours = AreOurs(subject_.rules);
    pass_is_open_ = !ours;
    if (ours && actual.code() == StatusCode::kInvalidArgument) {
      std::tie(batch_, active_, copied_, pass_is_open_, fresh_, type_,
               type_is_sure_) = before;
    }
    return false;
  }
  active_ = true;
  ++pass_;
  reserving_ = reserve;
  if (!reserve) fresh_.set();
  DrawCellsNow();
  return true;
}

bool ModelDriver::Bounded() const {
  return HasWindow(setup_.spec) || ledger_.HasStates();
}

// Throws if a call was refused that every cache has room for: no sequence is
// longer than the capacity, and there are no more sequences than the cache was
// made for.
void ModelDriver::CheckRoom(const std::string& call,
                            const reference::Ledger& after,
                            const Tokens& batch) const {
  // A bounded memory has room for sequences that continue (S4).
  if (!setup_.legal && Bounded()) return;
  std::map<int, std::int64_t> tokens;
  std::int64_t last = 0;
  for (const auto& part : after.parts()) {
    std::map<int, std::int64_t> held;
    for (const LedgerToken& token : part.tokens()) {
      for (const int seq : token.owners()) ++held[seq];
      last = std::max(last, token.position);
    }
    for (const auto& [seq, count] : held) {
      tokens[seq] = std::max(tokens[seq], count);
    }
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    ++tokens[batch.sequences[i]];
    last = std::max<std::int64_t>(last, batch.positions[i]);
  }
  bool fits = std::ssize(tokens) <= setup_.init.max_sequences &&
              last < setup_.init.capacity;
  for (const auto& [seq, count] : tokens) {
    fits = fits && count <= setup_.init.capacity &&
           seq < setup_.init.max_sequences;
  }
  Check(!fits, "subject: room", [&] {
    return fmt::format(
        "{} is cache_full, but with it the cache has {}, of {} at most, and "
        "none is longer than the capacity of {}",
        call, Counted(std::ssize(tokens), "sequence"),
        setup_.init.max_sequences, setup_.init.capacity);
  });
}

// Chooses new rows for the next Put, different from all rows before.
void ModelDriver::NewRows(int layer) {
  NumberedRows rows{serial_, {}, batch_, pass_, layer};
  serial_ += std::ssize(batch_.positions);
  const reference::PrefixBook& prefixes = ledger_.prefixes();
  for (std::size_t i = 0; i < batch_.positions.size() && !prefixes.empty();
       ++i) {
    const int prefix =
        prefixes.PrefixAt(batch_.sequences[i], batch_.positions[i]);
    std::int64_t serial = rows.first + static_cast<std::int64_t>(i);
    if (prefix != 0) {
      serial = prefix_serials_.try_emplace(prefix, serial).first->second;
    }
    rows.serials.push_back(serial);
  }
  rows_.push_back(std::move(rows));
}

TensorView ModelDriver::Fill(const NumberedRows& rows, RowRole role,
                             RowBuffer& buffer) const {
  const bool distinct = subject_.level == Level::kAttention;
  const bool plain = subject_.level == Level::kNumeric || distinct;
  // Rows of a prefix are the same each time.
  const bool as_stored =
      ((rows.serials.empty() ? rows.first : std::int64_t{0}) + layer_) % 2 == 1;
  const bool key = role == RowRole::kKey;
  const RowDims& dims = setup_.rows;
  const DType stored = key ? setup_.init.dtype : setup_.v_dtype();
  const DType dtype = as_stored ? stored : DType::kF32;
  // No rule says what a NaN is converted to, when it is stored or shifted, nor
  // what the shift of a number is that is too large for its dtype.
  const bool extremes = !plain && !(key && shifts_);
  return buffer.Fill({key ? dims.k_head_dim : dims.v_head_dim, dims.kv_heads,
                      std::ssize(rows.batch.positions), 1},
                     dtype,
                     {.role = role,
                      .layer = layer_,
                      .first = rows.first,
                      .plain = plain,
                      .nan = extremes && dtype == stored,
                      .extremes = extremes,
                      .distinct = distinct,
                      .tokens = rows.serials},
                     setup_.strided);
}

void ModelDriver::PutRows() {
  // No rule says whether a copy made in this pass gets the rows, too.
  if (copied_) return;
  NumberedRows& rows = rows_.back();
  rows.put = true;
  const TensorView key = Fill(rows, RowRole::kKey, keys_);
  const TensorView value = Fill(rows, RowRole::kValue, values_);
  const std::string call =
      PutText(layer_, rows.first, std::ssize(rows.batch.positions));
  Begin(call);
  const Status found = tested_->Put(key, value);
  AddStep(call, found.code());
  CheckResult(OpKind::kReput, call, {}, found);
  ledger_.Put(layer_, key, value);
  put_.insert(place());
  DrawCellsNow();
}

void ModelDriver::PutAll(const Op& op) {
  NewRows();
  const int layers = LayersOf(op, setup_);
  for (int layer = 0; layer < layers; ++layer) {
    GoTo(layer);
    if (op.keep_rows || (IsEncoder() && op.images.empty())) continue;
    PutRows();
  }
}

void ModelDriver::GetAll() {
  for (int layer = 0; layer < setup_.layers; ++layer) {
    if (!put_.contains({TypeOf(setup_, layer), layer})) continue;
    GoTo(layer);
    CheckView();
    Cached();
  }
}

void ModelDriver::Store() {
  NewRows(layer_);
  PutRows();
}

void ModelDriver::Read() {
  if (put_.contains(place())) CheckView();
}

void ModelDriver::Cached() {
  if (!IsEncoder()) return;
  SetType(type_);  // A refused batch may have reset it.
  Begin("EncoderCached");
  const Result<bool> cached = tested_->EncoderCached();
  const StatusCode code = cached.status().code();
  if (trace_ != nullptr) {
    trace_->Add("EncoderCached",
                cached.ok() ? YesOrNo(cached) : StatusName(code), code);
  }
  CheckResult(OpKind::kCached, "EncoderCached", {}, cached.status());
  Check(!*cached || ledger_.active().slots().cached, "subject: encoder cached",
        [] { return "EncoderCached is true, but nothing is cached"; });
}

std::vector<int> ModelDriver::IndicesOf(const std::vector<int>& except) const {
  std::vector<int> indices;
  for (const int index : except) {
    indices.push_back(index % Size(batch_.positions));
  }
  return indices;
}

void ModelDriver::ExceptActive(const std::vector<int>& indices) {
  const std::string call = fmt::format("SetCausal([{}])", RunsOf(indices));
  Begin(call);
  const Status found = tested_->SetCausal(indices);
  AddStep(call, found.code());
  CheckResult(OpKind::kCausal, call, ledger_.active().SetCausal(indices),
              found);
  if (ledger_.active().recurrent()) return;  // There is no new mask.
  At(fresh_, type_) = !reserving_ && !ledger_.active().narrow();
  DrawCellsNow();
}

void ModelDriver::Except(const std::vector<int>& except) {
  ExceptActive(IndicesOf(except));
}

void ModelDriver::SetCausal(const std::vector<int>& except) {
  const std::vector<int> indices = IndicesOf(except);
  const int kept = type_;
  for (int type = 0; type < std::ssize(ledger_.parts()); ++type) {
    SetType(type);
    ExceptActive(indices);
  }
  SetType(kept);
}

std::set<int> ModelDriver::SharersOfMoved(int seq, std::int32_t begin,
                                          std::int32_t end) const {
  const Rules& rules = subject_.rules;
  std::set<int> sharers;
  if (begin >= end || end == kOpenEnd ||
      rules.middle != Rules::Middle::kShifts ||
      rules.shared_shift != Rules::SharedShift::kRefused) {
    return sharers;
  }
  for (const auto& part : ledger_.parts()) {
    for (const LedgerToken& token : part.tokens()) {
      if (!token.HeldBy(seq) || token.position < end) continue;
      if (token.sequences.size() < 2) continue;
      sharers.insert(token.sequences.begin(), token.sequences.end());
    }
  }
  return sharers;
}

StatusCode ModelDriver::Remove(int seq, std::int32_t begin, std::int32_t end) {
  const std::string call =
      fmt::format("Remove({}, {}, {})", seq, begin,
                  end == kOpenEnd ? "open" : fmt::to_string(end));
  Begin(call);
  const std::set<int> sharers = SharersOfMoved(seq, begin, end);
  const Status actual = tested_->Remove(seq, begin, end);
  AddStep(call, actual.code());
  if (actual.ok() && begin == 0 && end == kOpenEnd) moved_.erase(seq);
  if (actual.ok()) {
    found_.erase(seq);
    for (const int sharer : sharers) moved_[sharer] = call;
    const auto promise = promises_.find(seq);
    if (promise != promises_.end()) {
      promise->second.before = std::min(promise->second.before, begin);
    }
  }
  const Status expected = ledger_.Remove(seq, begin, end, actual.code());
  CheckResult(OpKind::kDrop, call, expected, actual);
  fresh_.reset();
  DrawCellsNow();
  return actual.code();
}

void ModelDriver::CopyPrefix(int src, int dst, std::int32_t len) {
  const std::string call = fmt::format("CopyPrefix({}, {}, {})", src, dst, len);
  Begin(call);
  const Status found = tested_->CopyPrefix(src, dst, len);
  AddStep(call, found.code());
  if (found.code() == StatusCode::kCacheFull) {  // This cache copies rows.
    reference::Ledger after = ledger_;
    (void)after.CopyPrefix(src, dst, len);
    CheckRoom(call, after, {});
    return DrawCellsNow();
  }
  CheckResult(OpKind::kCopy, call,
              ledger_.CopyPrefix(src, dst, len, found.code()), found);
  if (found.ok()) {
    promises_.erase(dst);
    found_.erase(dst);
  }
  fresh_.reset();
  copied_ = copied_ || found.ok();
  DrawCellsNow();
}

bool ModelDriver::CanResume(int seq, std::int32_t pos) {
  if (!subject_.abilities.can_resume) {
    return ledger_.CanResume(seq, pos, /*surely=*/true);
  }
  const std::string call = fmt::format("CanResume({}, {})", seq, pos);
  Begin(call);
  const Result<bool> actual = tested_->CanResume(seq, pos);
  AddStep(call, actual.status().code(), YesOrNo(actual));
  CheckResult(OpKind::kAsk, call, {}, actual.status());
  HashInt(*actual ? 1 : 0);
  result_.answers.resumes.Count(*actual);
  // A cache may refuse to resume, except after the last state of a sequence
  // (R8, R10).
  Check(*actual || !ledger_.MustResume(seq, pos), "subject: resume", [&] {
    const auto prefix = found_.find(seq);
    if (prefix != found_.end() && prefix->second.length == pos) {
      return fmt::format(
          "{} is false, but {} was {}: the prompt continues there", call,
          prefix->second.call, pos);
    }
    return fmt::format("{} is false, but the sequence ends with a state there",
                       call);
  });
  Check(!*actual || ledger_.MayResume(seq, pos), "subject: resume", [&] {
    return call + " is true, but " + WhyNotResumed(ledger_, seq, pos);
  });
  Promise promise{.call = call, .before = pos};
  for (std::size_t i = 0; i < ledger_.parts().size(); ++i) {
    promise.caches[i] =
        *actual && !ledger_.parts()[i].CanResume(seq, pos, /*surely=*/true);
  }
  if (promise.caches.any()) promises_[seq] = std::move(promise);
  if (*actual) ledger_.Resumes(seq, pos);
  return *actual;
}

void ModelDriver::Commit(int seq, const std::vector<int>& path) {
  const std::string call = fmt::format("Commit({}, [{}])", seq, RunsOf(path));
  Begin(call);
  const Status found = tested_->Commit(seq, path);
  AddStep(call, found.code());
  CheckResult(OpKind::kCommit, call, ledger_.Commit(seq, path), found);
  fresh_.reset();
  DrawCellsNow();
}

void ModelDriver::Checkpoint(int seq) {
  const std::string call = fmt::format("Checkpoint({})", seq);
  Begin(call);
  const Status found = tested_->Checkpoint(seq);
  AddStep(call, found.code());
  CheckResult(OpKind::kPin, call, ledger_.Checkpoint(seq), found);
}

void ModelDriver::FindPrefix(int seq, const std::vector<int>& ids) {
  auto* finding = dynamic_cast<PrefixFinding*>(tested_.get());
  if (finding == nullptr) return;
  const std::string call =
      fmt::format("FindPrefix({}, [{}])", seq, RunsOf(ids));
  Begin(call);
  const Result<std::int32_t> length = finding->FindPrefix(seq, ids);
  AddStep(call, length.status().code(),
          length.ok() ? fmt::to_string(*length) : "");
  CheckResult(OpKind::kFind, call, {}, length.status());
  HashInt(*length);
  result_.answers.prefixes.Count(*length > 0);
  const Status right = ledger_.FindPrefix(seq, ids, *length);
  Check(right.ok(), "subject: prefix", [&] {
    return fmt::format("{} is {}, but {}", call, *length, right.message());
  });
  found_[seq] = {call, *length};
  pass_is_open_ = true;
  fresh_.reset();
  DrawCellsNow();
}

void ModelDriver::Shift(int seq, std::int32_t begin, std::int32_t end,
                        std::int32_t delta) {
  auto* shifting = dynamic_cast<Shifting*>(tested_.get());
  if (shifting == nullptr) return;
  const std::string call =
      fmt::format("Shift({}, {}, {}, {})", seq, begin,
                  end == kOpenEnd ? "open" : fmt::to_string(end), delta);
  Begin(call);
  const Status found = shifting->Shift(seq, begin, end, delta);
  AddStep(call, found.code());
  CheckResult(OpKind::kShift, call, ledger_.Shift(seq, begin, end, delta),
              found);
  fresh_.reset();
  DrawCellsNow();
}

void ModelDriver::Misuse(int which) {
  if (pass_is_open_) return;
  const MisuseContext context{
      .setup = setup_,
      .pass_tokens = active_ ? Size(batch_.positions) : 0,
      .encoder = IsEncoder(),
      .no_causal = IsEncoder() || ledger_.active().recurrent(),
      .layer_put = put_.contains(place()) && active_,
      .layer = layer_,
      .hash_sights = HashSights};
  const std::string call =
      fmt::format("misuse {}: {}", which, MisuseName(which));
  Begin(call);
  const auto wrong = TryMisuse(*tested_, which, context);
  AddStep(call, StatusCode::kOk, wrong ? "not as expected" : "refused");
  Check(!wrong, "subject: misuse", [&] { return *wrong; });
}

}  // namespace kvtwin::props
