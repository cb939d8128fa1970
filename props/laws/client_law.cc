// The law that a legal client, which drives the cache as a model server does,
// never finds it full. The client knows only its own record: how many tokens of
// each slot it can build on.

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/index.h"
#include "props/laws/alike.h"

namespace kvtwin::props {
namespace {

class Client {
 public:
  Client(Session& session, const Abilities& abilities)
      : session_(session),
        abilities_(abilities),
        setup_(session.setup()),
        slots_(AsSize(setup_.init.max_sequences)) {}

  std::int64_t batches() const { return batches_; }

  // Plays an operation as requests: a put continues some slots, a drop edits a
  // prompt, a copy forks another slot, and an ask computes a token that is then
  // discarded.
  void Do(const Op& op) {
    switch (op.kind) {
      case OpKind::kPut:
        for (const Segment& segment : op.segments) {
          const int slot = SlotOf(segment.seq);
          Load(slot, SlotAt(slot).record);
          SlotAt(slot).queue += std::min(segment.count, setup_.init.capacity);
        }
        return Forward();
      case OpKind::kDrop:
        return Load(SlotOf(op.seq), Prefix(SlotOf(op.seq), op.begin));
      case OpKind::kCopy:
        return Fork(SlotOf(op.seq), SlotOf(op.dst), op.end);
      case OpKind::kAsk:
        Load(SlotOf(op.seq), SlotAt(SlotOf(op.seq)).record);
        SlotAt(SlotOf(op.seq)).queue = 1;
        Forward();
        SlotAt(SlotOf(op.seq)).record -= 1;
        return;
      default:
        return;
    }
  }

 private:
  struct Slot {
    int record = 0;
    int queue = 0;    // Tokens that are still to come.
    int pending = 0;  // Tokens in the batch that is being filled.
  };

  int SlotOf(int seq) const { return seq % setup_.init.max_sequences; }
  Slot& SlotAt(int slot) { return At(slots_, slot); }
  int Prefix(int slot, const RelativePos& pos) {
    const int from = pos.from_end ? SlotAt(slot).record : 0;
    return std::clamp(from + pos.offset, 0, SlotAt(slot).record);
  }

  bool Remove(int slot, int begin, int end) {
    const Answer answer =
        session_.Do(RemoveCall(setup_.IdOf(slot), begin, end));
    return answer.code == StatusCode::kOk;
  }

  // Starts a request whose first `past` tokens are stored, as far as known.
  void Load(int slot, int past) {
    Call ask;
    ask.kind = Call::Kind::kAsk;
    ask.seq = setup_.IdOf(slot);
    ask.end = past;
    if (past > 0 && !session_.Do(ask).yes) past = 0;
    if (!Remove(slot, past, kOpenEnd)) {
      past = 0;
      Remove(slot, 0, kOpenEnd);
    }
    SlotAt(slot).record = past;
  }

  void Fork(int src, int dst, const RelativePos& end) {
    const int len = Prefix(src, end);
    if (src == dst || len == 0) return;
    if (!abilities_.Can(KVTWIN_CAN_COPY_PREFIX)) return;
    if (!abilities_.Can(KVTWIN_CAN_SHARE) && len != SlotAt(src).record) return;
    session_.Do(CopyCall(setup_.IdOf(src), setup_.IdOf(dst), len));
    Load(dst, len);
  }

  // Makes room in a full slot. Returns false if all its tokens must come again.
  bool Shift(int slot) {
    Slot& full = SlotAt(slot);
    const int keep = std::min(slot, setup_.init.capacity - 1);
    const int discard = std::max((setup_.init.capacity - keep) / 2, 1);
    full.record -= discard;
    if (abilities_.Can(KVTWIN_CAN_REMOVE_MIDDLE) &&
        Remove(slot, keep, keep + discard)) {
      return true;
    }
    Remove(slot, 0, kOpenEnd);
    full.queue += full.record;
    full.record = 0;
    return false;
  }

  void Fill(int slot, int batch, Call& start) {
    Slot& one = SlotAt(slot);
    while (one.queue > 0 && std::ssize(start.positions) < batch) {
      const int position = one.record + one.pending;
      if (position >= setup_.init.capacity) {
        if (one.pending > 0 || !Shift(slot)) return;
        continue;
      }
      start.positions.push_back(position);
      start.sequences.push_back(setup_.IdOf(slot));
      ++one.pending;
      --one.queue;
    }
  }

  void Forward() {
    const int batch = std::min(setup_.init.max_batch, setup_.init.capacity);
    const int count = setup_.init.max_sequences;
    while (std::any_of(slots_.begin(), slots_.end(),
                       [](const Slot& slot) { return slot.queue > 0; })) {
      Call start = StartCall({}, {}, /*reserve=*/false);
      for (int i = 0; i < count; ++i) {
        Fill((next_slot_ + i) % count, batch, start);
        const bool alone = !abilities_.Can(KVTWIN_CAN_MIX);
        if (alone && !start.positions.empty()) break;
      }
      next_slot_ = (next_slot_ + 1) % count;
      if (start.positions.empty()) continue;
      ++batches_;
      const Answer answer = session_.Try(start);
      if (answer.code != StatusCode::kOk) {
        throw Failure{.text = fmt::format("{} answers {}", ToText(start),
                                          ToText(answer))};
      }
      session_.PutAll();
      for (Slot& slot : slots_) {
        slot.record += slot.pending;
        slot.pending = 0;
      }
    }
  }

  Session& session_;
  const Abilities& abilities_;
  const Setup& setup_;
  std::vector<Slot> slots_;
  int next_slot_ = 0;
  std::int64_t batches_ = 0;
};

LawResult LegalClient(const History& history, const Subject& subject) {
  std::optional<Session> session = Session::Open(history.setup, subject);
  if (!session) return {};
  Client client(*session, subject.abilities);
  for (const Op& op : history.ops) client.Do(op);
  return {.judged = client.batches()};
}

}  // namespace

Law LegalClientLaw() {
  return {"legal_client",
          "A client that stays within its capacity, as a model server does, is "
          "never refused a batch.",
          "S4, S12", LegalClient, kNeedsRemove};
}

}  // namespace kvtwin::props
