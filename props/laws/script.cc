#include "props/laws/script.h"

#include <fmt/format.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "props/base/forwarding_cache.h"
#include "props/base/runs_of.h"
#include "props/compare/differential_driver.h"
#include "props/compare/failure.h"

namespace kvtwin::props {
namespace {

bool IsMisuse(StatusCode code) {
  return code == StatusCode::kInvalidArgument ||
         code == StatusCode::kFailedPrecondition;
}

class ScriptRecorder;

// The data that the recorders of one history share.
struct Tape {
  std::vector<ScriptRecorder*> alive;  // The oldest is the history's own cache.
  std::vector<Call> calls;             // The calls of the last recorder.
  std::string lost;  // A recorded call that no script can have.
};

// Records every call that changes the cache, except misuse. If a history calls
// two caches at once (`reload`), their calls are kept apart: a new recorder
// begins with the calls of the one that it takes over from, and the script has
// the calls of the recorder that the history kept.
class ScriptRecorder final : public ForwardingCache {
 public:
  ScriptRecorder(std::unique_ptr<Cache> cache, Tape& tape)
      : ForwardingCache(std::move(cache)), tape_(tape) {
    if (!tape_.alive.empty()) {
      before_ = tape_.alive.front();
      calls_ = before_->calls_;
      lost_ = before_->lost_;
    }
    tape_.alive.push_back(this);
  }
  ScriptRecorder(const ScriptRecorder&) = delete;
  ScriptRecorder& operator=(const ScriptRecorder&) = delete;
  ~ScriptRecorder() override {
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
  Status Checkpoint(int seq) override {
    Call call = Of(Call::Kind::kPin);
    call.seq = seq;
    return Keep(std::move(call), cache_->Checkpoint(seq));
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return Keep(RemoveCall(seq, begin, end), cache_->Remove(seq, begin, end));
  }
  // A script contains no state: each cache that plays it, of any dtype and
  // size, restores its own snapshot.
  Status Restore(const CacheState& state) override {
    const ScriptRecorder& from = before_ != nullptr ? *before_ : *this;
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
  const ScriptRecorder* before_ =
      nullptr;  // The recorder before, until Restore.
  std::vector<Call> calls_;
  std::string lost_;
  mutable int last_asked_ = 0;
  int layer_ = 0;
  int type_ = 0;
};

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
                         RunsOf(call.positions), RunsOf(call.sequences),
                         call.reserve ? ", reserve" : "");
    case Call::Kind::kCausal:
      return fmt::format("SetCausal([{}])", RunsOf(call.indices));
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
    case Call::Kind::kPin:
      return fmt::format("Checkpoint({})", call.seq);
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
        std::make_unique<ScriptRecorder>(std::move(*cache), tape));
  };
  Subject recorder = {.name = "recorder", .make = [&](const CacheSpec& spec) {
                        return recorded(MakeCache(spec, "reference"));
                      }};
  recorder.restores_earlier_states = false;  // No call of a script has a state.
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

}  // namespace kvtwin::props
