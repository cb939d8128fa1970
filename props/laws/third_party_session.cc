// Sessions of third-party caches make only calls that the cache declares and
// whose answers the rules determine. A ledger records the calls.

#include <map>
#include <vector>

#include "props/laws/session.h"

namespace kvtwin::props {

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
      // CanResume is called before a sequence goes back.
      if (!can_.can_resume) {
        return need(record_->CanResume(call.seq, call.begin, /*surely=*/true));
      }
      const Result<bool> yes = cache_->CanResume(call.seq, call.begin);
      return need(yes.ok() && *yes);
    }
    case Call::Kind::kAsk:
      return;
    case Call::Kind::kPin:
      return need(can_.Can(KVTWIN_CAN_PIN));
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
    case Call::Kind::kPin:
      if (ok) ignored = record_->Checkpoint(call.seq);
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

}  // namespace kvtwin::props
