#include "props/compare/client.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/history/misuse.h"

namespace kvtwin::props {
namespace {

// Splits each segment of several sequences into a segment per sequence.
std::vector<Segment> OneSequenceEach(const std::vector<Segment>& segments) {
  std::vector<Segment> all;
  for (Segment segment : segments) {
    for (; segment.more >= 0; ++segment.seq, --segment.more) {
      all.push_back(segment);
      all.back().more = 0;
    }
  }
  return all;
}

}  // namespace

Client::Client(const Setup& setup, const Subject& subject, Driver& driver,
               std::vector<Op>* done, CallTrace* trace)
    : setup_(setup),
      abilities_(subject.abilities),
      is_twin_(subject.is_twin()),
      overfills_(setup.legal && subject.Overfills()),
      driver_(driver),
      done_(done),
      trace_(trace),
      has_states_(driver.ledger().HasStates()) {}

void Client::Note(OpKind kind, int seq, std::int32_t begin, std::int32_t end,
                  int dst) {
  if (done_ == nullptr) return;
  Op& op = done_->emplace_back();
  op.kind = kind;
  op.seq = setup_.NameOf(seq);
  op.dst = dst;
  op.begin.offset = begin;
  op.open = end == kOpenEnd;
  if (!op.open) op.end.offset = end;
}

StatusCode Client::Remove(int seq, std::int32_t begin, std::int32_t end) {
  const auto bit =
      end == kOpenEnd ? KVTWIN_CAN_REMOVE_TAIL : KVTWIN_CAN_REMOVE_MIDDLE;
  if (!abilities_.Can(bit) || driver_.ledger().RemoveIsOpen(seq, begin, end)) {
    return StatusCode::kNotSupported;
  }
  const bool whole = begin == 0 && end == kOpenEnd;
  if (whole) held_.erase(seq);
  Note(OpKind::kDrop, seq, begin, end);
  const StatusCode code = driver_.Remove(seq, begin, end);
  // No rule says which tokens are left, so the client clears the sequence.
  if (code != StatusCode::kOk && !whole &&
      abilities_.Cannot(KVTWIN_CANNOT_UNDO_REMOVE)) {
    RemoveOwn(seq, 0, kOpenEnd);
  }
  return code;
}

// Marks the next calls in the trace.
void Client::Mark(OwnCall call) {
  if (trace_ != nullptr) trace_->own_call = call;
}

StatusCode Client::RemoveOwn(int seq, std::int32_t begin, std::int32_t end) {
  Mark(end == kOpenEnd ? OwnCall::kRemoveToTheEnd : OwnCall::kRemoveRange);
  const StatusCode code = Remove(seq, begin, end);
  Mark(OwnCall::kNone);
  return code;
}

bool Client::CanResume(int seq, std::int32_t pos) {
  if (driver_.ledger().IsOpenBefore(seq, pos)) return false;
  if (!abilities_.can_resume || pos > abilities_.LastPosition()) {
    return driver_.ledger().CanResume(seq, pos, /*surely=*/true);
  }
  Note(OpKind::kAsk, seq, 0, pos);
  return driver_.CanResume(seq, pos);
}

bool Client::CopyPrefix(int src, int dst, std::int32_t len) {
  if (!abilities_.Can(KVTWIN_CAN_COPY_PREFIX)) return false;
  if (src == dst && abilities_.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF)) {
    return false;
  }
  if (!abilities_.Can(KVTWIN_CAN_SHARE)) len = Next(src);
  Note(OpKind::kCopy, src, 0, len, setup_.NameOf(dst));
  driver_.CopyPrefix(src, dst, len);
  return true;
}

bool Client::Shift(int seq, std::int32_t begin, std::int32_t end,
                   std::int32_t delta) {
  if (!abilities_.shift) return true;
  if (driver_.ledger().MoveIsOpen(seq, begin, end)) return false;
  if (abilities_.max_position > 0) {
    delta = std::min(delta, abilities_.LastEnd() - Next(seq));
  }
  Note(OpKind::kShift, seq, begin, end);
  if (done_ != nullptr) done_->back().delta = delta;
  driver_.Shift(seq, begin, end, delta);
  return true;
}

std::int32_t Client::Next(int seq) {
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(driver_.ledger().Next(seq), kOpenEnd));
}

std::int64_t Client::Free() {
  std::int64_t free = setup_.init.max_batch;
  for (const auto& part : driver_.ledger().parts()) {
    if (part.encoder()) continue;
    free = std::min(free, part.cells() - std::ssize(part.tokens()));
  }
  return free;
}

std::int32_t Client::Resolve(int seq, const RelativePos& pos) {
  const std::int64_t from = pos.from_end ? Next(seq) : 0;
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(from + pos.offset, 0, abilities_.LastEnd()));
}

// The number of drafts of a sequence; for -1, of all sequences.
int Client::CountDrafts(int seq) const {
  std::int64_t count = 0;
  for (const auto& part : driver_.ledger().parts()) {
    count = std::max(count, std::ranges::count_if(part.tokens(), [&](auto& at) {
                       return at.IsDraft() && (seq < 0 || at.drafted_by == seq);
                     }));
  }
  return AsInt(count);
}

// The position after the last token or draft of a sequence.
std::int32_t Client::EndWithDrafts(int seq) {
  std::int64_t end = Next(seq);
  for (const auto& part : driver_.ledger().parts()) {
    for (const auto& token : part.tokens()) {
      if (token.drafted_by != seq) continue;
      end = std::max<std::int64_t>(end, token.position + 1);
    }
  }
  return AsInt(end);
}

// The number of drafts of a sequence that a legal client may still store (R11).
int Client::DraftRoom(int seq) const {
  int room = kOpenEnd;
  for (const auto& part : driver_.ledger().parts()) {
    if (part.recurrent()) room = std::min(room, part.most_drafts());
  }
  return room - CountDrafts(seq);
}

// Resolves the choices to the path of a Commit.
void Client::Commit(int seq, const std::vector<int>& choices) {
  if (!abilities_.CanDraft()) return;
  std::vector<int> path;
  int last = kCommitted;
  for (const int choice : choices) {
    std::vector<int> children;
    for (const auto& part : driver_.ledger().parts()) {
      for (const auto& token : part.tokens()) {
        if (token.drafted_by != seq || token.parent != last) continue;
        children.push_back(token.draft);
      }
      if (!children.empty()) break;
    }
    if (children.empty()) break;
    std::ranges::sort(children);
    last = At(children, choice % Size(children));
    path.push_back(last);
  }
  if (done_ != nullptr) {
    Op& op = done_->emplace_back();
    op.kind = OpKind::kCommit;
    op.seq = setup_.NameOf(seq);
    op.path = choices;
  }
  driver_.Commit(seq, path);
}

// Commits drafts that ordinary tokens of their sequence cannot follow (D4).
void Client::CommitFirst(const Segment& segment) {
  const int drafts = CountDrafts(segment.seq);
  if (drafts == 0 || !segment.parents.empty()) return;
  Mark(OwnCall::kCommit);
  Commit(segment.seq, std::vector<int>(AsSize(drafts % 3), 0));
  Mark(OwnCall::kNone);
}

// Whether drafts of the sequence may come: all caches of a wrapper must have
// its last token, or nothing of it, else they do not agree where drafts begin;
// and no eviction may leave this open.
bool Client::CanDraft(int seq) const {
  std::set<std::int64_t> ends;
  for (const auto& part : driver_.ledger().parts()) {
    if (const std::int64_t end = part.Next(seq); end > 0) ends.insert(end);
  }
  const bool refused =
      setup_.legal &&
      std::ranges::any_of(driver_.ledger().parts(), [](auto& at) {
        return at.encoder() || (at.recurrent() && at.most_drafts() == 0);
      });
  // A draft would end the prompt (F2), so a legal client computes it first.
  const auto& ledger = driver_.ledger();
  const bool prompted =
      setup_.legal && ledger.prefixes().PrefixAt(seq, ledger.Next(seq)) != 0;
  const bool ended = !ends.empty() && *ends.rbegin() > kOpenEnd;
  return abilities_.CanDraft() && !refused && !prompted && !ended &&
         ends.size() < 2 && !ledger.NextIsOpen(seq);
}

// Appends a segment of drafts, until one would be past the last position.
void Client::PlaceDrafts(const Segment& segment, Tokens& batch) {
  // The positions of the drafts, by number.
  std::map<int, std::int64_t> drafts;
  for (const auto& part : driver_.ledger().parts()) {
    for (const auto& token : part.tokens()) {
      if (token.drafted_by == segment.seq) drafts[token.draft] = token.position;
    }
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    if (batch.sequences[i] != segment.seq) continue;
    if (batch.parents[i] == kNotADraft) return;  // It has ordinary tokens.
    drafts[Size(drafts)] = batch.positions[i];
  }
  for (int i = 0; i < segment.count; ++i) {
    const int count = Size(drafts);
    int parent = i < Size(segment.parents) ? At(segment.parents, i) : count - 1;
    if (!abilities_.Can(KVTWIN_CAN_DRAFT_TREES)) parent = count - 1;
    parent = count == 0 || parent < 0 ? kCommitted : parent % count;
    const std::int64_t position = parent >= 0  ? drafts[parent] + 1
                                  : count == 0 ? Next(segment.seq)
                                               : drafts[0];
    if (position > abilities_.LastPosition()) return;
    batch.positions.push_back(static_cast<std::int32_t>(position));
    batch.sequences.push_back(segment.seq);
    batch.parents.push_back(parent);
    drafts[count] = position;
  }
}

// Settles where the sequence ends, and returns whether that is known now. Lazy
// eviction may have removed its end, so the client asks.
bool Client::SettleEnd(int seq) {
  const auto& ledger = driver_.ledger();
  if (ledger.EndIsOpen(seq) && !CanResume(seq, Next(seq))) {
    RemoveOwn(seq, 0, kOpenEnd);
  }
  return !ledger.EndIsOpen(seq);
}

// Tells the backend that the sequence begins anew, if all of it was evicted.
void Client::BeginAnew(int seq) {
  if (abilities_.OnlyGoesOn() && Next(seq) == 0 && held_.contains(seq)) {
    RemoveOwn(seq, 0, kOpenEnd);
  }
}

// Returns the segment as a legal client would send it, after making room for
// it.
Segment Client::Legalized(Segment segment, std::size_t batch_room) {
  BeginAnew(segment.seq);
  const int capacity = setup_.init.capacity;
  const int drafts = CountDrafts(segment.seq);
  if (!segment.parents.empty()) {
    segment.count = std::min({segment.count, AsInt(batch_room),
                              capacity - Next(segment.seq) - drafts});
    return segment;
  }
  CommitFirst(segment);
  segment.delta = 0;
  segment.order = Segment::Order::kUp;
  segment.count = std::min({segment.count, capacity, AsInt(batch_room)});
  const std::int64_t over =
      std::int64_t{Next(segment.seq)} + segment.count - capacity;
  if (over > 0) {  // A context shift discards half.
    const auto discard =
        static_cast<std::int32_t>(std::max<std::int64_t>(over, capacity / 2));
    const StatusCode code = RemoveOwn(segment.seq, 0, discard);
    if (code != StatusCode::kOk) RemoveOwn(segment.seq, 0, kOpenEnd);
    // The Remove may have left a gap.
    const bool gap = Next(segment.seq) + segment.count - capacity == over;
    if (gap && !Shift(segment.seq, discard, kOpenEnd, -discard)) {
      RemoveOwn(segment.seq, 0, kOpenEnd);
    }
  }
  // If nothing could be removed, the segment is cut to the room that is left.
  segment.count = AsInt(std::min<std::int64_t>(
      segment.count, std::max(0, capacity - Next(segment.seq))));
  return segment;
}

// Returns the segment as a legal client would send it to reserve: at any
// positions below the capacity (S18, R3), whatever the sequence holds.
Segment Client::Reserved(Segment segment, std::size_t batch_room) {
  CommitFirst(segment);
  const int capacity = setup_.init.capacity;
  const std::int64_t next = Next(segment.seq);
  segment.order = Segment::Order::kUp;
  segment.count = std::min({segment.count, capacity, AsInt(batch_room)});
  const std::int64_t first = std::clamp<std::int64_t>(next + segment.delta, 0,
                                                      capacity - segment.count);
  segment.delta = AsInt(first - next);
  return segment;
}

// Makes the segment longer than the rest of the capacity of its sequence.
// Returns whether the batch and the positions have room for it; otherwise the
// segment stays as it is.
bool Client::Overfill(std::size_t batch_room, Segment& segment) {
  if (!segment.parents.empty()) return false;
  BeginAnew(segment.seq);
  CommitFirst(segment);
  const std::int64_t next = Next(segment.seq);
  const std::int64_t left =
      std::max<std::int64_t>(setup_.init.capacity - next, 0);
  const std::int64_t count = std::max<std::int64_t>(segment.count, left + 1);
  const auto most = static_cast<std::int64_t>(batch_room);
  if (count > most || next + count - 1 > abilities_.LastPosition()) {
    return false;
  }
  segment.count = AsInt(count);
  segment.delta = 0;
  segment.order = Segment::Order::kUp;
  return true;
}

void Client::AppendSegment(const Segment& segment, Tokens& batch) {
  if (!segment.parents.empty()) {
    PlaceDrafts(segment, batch);
    return;
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const bool draft = batch.parents[i] != kNotADraft;
    if (draft && batch.sequences[i] == segment.seq) return;
  }
  std::int64_t first = std::int64_t{Next(segment.seq)} + segment.delta;
  if (has_states_) {  // A sequence continues where the batch has left it.
    first += std::ranges::count(batch.sequences, segment.seq);
  }
  for (int i = 0; i < segment.count; ++i) {
    std::int64_t position = first;
    if (segment.order == Segment::Order::kUp) position += i;
    if (segment.order == Segment::Order::kDown) {
      position += segment.count - 1 - i;
    }
    batch.positions.push_back(static_cast<std::int32_t>(
        std::clamp<std::int64_t>(position, 0, abilities_.LastPosition())));
    batch.sequences.push_back(segment.seq);
    batch.parents.push_back(kNotADraft);
  }
}

// Returns segments whose `seq` is a sequence id.
std::vector<Segment> Client::MakeSegments(const Op& op) {
  const auto max_batch = AsSize(setup_.init.max_batch);
  std::vector<Segment> segments;
  std::set<int> seen;
  std::size_t room = max_batch;
  // A legal client leaves room for the drafts that are stored (D3).
  if (setup_.legal) room -= std::min(room, AsSize(CountDrafts(-1)));
  const std::vector<Segment> all = OneSequenceEach(op.segments);
  for (const Segment& each : all) {
    Segment segment = each;
    const bool last = &each == &all.back() || !abilities_.Can(KVTWIN_CAN_MIX);
    if (segment.count >= Segment::kFree / 2) {
      segment.count = AsInt(std::clamp<std::int64_t>(
          Free() + segment.count - Segment::kFree, 1, setup_.init.max_batch));
    }
    if (room == 0) break;
    segment.seq = IdOf(segment.seq);
    if (!segment.parents.empty()) {
      if (!CanDraft(segment.seq)) continue;
      if (setup_.legal) {
        segment.count = std::min(segment.count, DraftRoom(segment.seq));
      }
    }
    if (!segments.empty() && segment.seq != segments[0].seq &&
        !abilities_.Can(KVTWIN_CAN_MIX)) {
      continue;
    }
    if (setup_.legal && !seen.insert(segment.seq).second) continue;
    const bool reserves = setup_.legal && op.reserve && segment.parents.empty();
    const bool needs_end = !reserves && (setup_.legal || has_states_);
    if (needs_end && !SettleEnd(segment.seq)) continue;
    const bool overfull = overfills_ && op.overfull && last && !reserves;
    if (overfull && Overfill(room, segment)) {
      // The backend stores the batch whole, or refuses it.
    } else if (setup_.legal) {
      segment = reserves ? Reserved(segment, room) : Legalized(segment, room);
      if (segment.count < 1) continue;
    } else if (!abilities_.Can(KVTWIN_CAN_REFUSE_MISUSE)) {
      CommitFirst(segment);
    }
    segment.count = std::min(segment.count, AsInt(room));
    room -= AsSize(segment.count);
    segments.push_back(segment);
  }
  return segments;
}

void Client::Put(const Op& op) {
  if (op.reserve && !abilities_.Can(KVTWIN_CAN_RESERVE)) return;
  const std::vector<Segment> segments = MakeSegments(op);
  if (segments.empty()) return;
  Note(op);
  if (done_ != nullptr) {
    done_->back().segments = segments;
    done_->back().overfull = false;
    for (Segment& segment : done_->back().segments)
      segment.seq = setup_.NameOf(segment.seq);
  }
  Tokens batch;
  for (const Segment& segment : segments) AppendSegment(segment, batch);
  if (batch.positions.empty()) return;
  if (std::ranges::count(batch.parents, kNotADraft) ==
      std::ssize(batch.parents)) {
    batch.parents.clear();
  }
  for (const int index : op.images) {
    batch.multimodal.push_back(index % Size(batch.positions));
  }
  pass_ended_ = false;
  if (!driver_.StartForward(batch, op.reserve)) return;
  for (const Segment& segment : segments) {
    if (!op.reserve || !segment.parents.empty()) held_.insert(segment.seq);
  }
  if (!op.except.empty() && abilities_.set_causal) {
    driver_.SetCausal(op.except);
  }
  if (op.single && !abilities_.OnlyGoesOn()) return;
  Op put = op;  // Without cells, there are no older rows to keep.
  if (abilities_.OnlyGoesOn()) put.keep_rows = false;
  if (!MayGiveUp(op)) put.stop = -1;
  driver_.PutAll(put);
  if (put.stop >= 0) return GiveUp(batch);
  driver_.GetAll();
}

// Whether the client can give up the pass: it then takes its tokens back.
bool Client::MayGiveUp(const Op& op) const {
  return setup_.legal && op.stop >= 0 && op.stop < setup_.layers &&
         !op.reserve && abilities_.Can(KVTWIN_CAN_REMOVE_TAIL);
}

// Notes where the sequences of the pass were before it.
void Client::GiveUp(const Tokens& batch) {
  pass_ended_ = true;
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    given_up_.try_emplace(batch.sequences[i], batch.positions[i]);
  }
}

// Removes the tokens of a pass that was given up, or clears its sequences, as
// engines without prefixes of prompts do: their caches need not remove a tail
// that some layers lack. As in Drop, the client asks before a sequence goes
// back. The states before the last batch are always stored (R4).
void Client::TakeBack() {
  const bool clears = !is_twin_ && !abilities_.Can(KVTWIN_CAN_FIND_PREFIX);
  for (const auto& [seq, first] : std::exchange(given_up_, {})) {
    std::int32_t begin = clears ? 0 : std::min(first, Next(seq));
    if (begin > 0 && !has_states_ && !CanResume(seq, begin)) begin = 0;
    const StatusCode code = RemoveOwn(seq, begin, kOpenEnd);
    if (code != StatusCode::kOk && begin > 0) RemoveOwn(seq, 0, kOpenEnd);
  }
}

// Gives a sequence without tokens a prompt.
void Client::Find(const Op& op) {
  const int seq = IdOf(op.seq);
  const auto& parts = driver_.ledger().parts();
  const bool encodes =
      std::ranges::any_of(parts, [](auto& part) { return part.encoder(); });
  if (!setup_.legal || encodes || op.ids.empty() ||
      !abilities_.Can(KVTWIN_CAN_FIND_PREFIX)) {
    return;
  }
  if (Next(seq) > 0 || held_.contains(seq) || CountDrafts(seq) > 0) {
    RemoveOwn(seq, 0, kOpenEnd);
  }
  if (Next(seq) > 0 || held_.contains(seq) || CountDrafts(seq) > 0) return;
  given_up_.erase(seq);
  std::vector<int> ids = op.ids;
  const auto most = std::min<std::int64_t>(
      setup_.init.capacity, std::int64_t{abilities_.LastPosition()} + 1);
  if (std::ssize(ids) > most) ids.resize(AsSize(most));
  Note(op);
  pass_ended_ = true;
  driver_.FindPrefix(seq, ids);
  if (Next(seq) > 0) held_.insert(seq);
}

// Whether the length of a sequence that is cut to `length` is open: with
// states, the sequence ends at the last state before `length`, and a found
// prefix may have more states than the ledger knows (F4).
bool Client::EndsInTheOpen(int seq, std::int32_t length) const {
  const auto& ledger = driver_.ledger();
  return ledger.IsOpenBefore(
      seq, has_states_ ? ledger.ResumeBefore(seq, length) : length);
}

void Client::Drop(const Op& op) {
  const int seq = IdOf(op.seq);
  std::int32_t begin = Resolve(seq, op.begin);
  std::int32_t end = op.open ? kOpenEnd : Resolve(seq, op.end);
  if (begin > end) std::swap(begin, end);
  if (!abilities_.Can(KVTWIN_CAN_REMOVE_MIDDLE)) end = kOpenEnd;
  if (!setup_.legal) return void(Remove(seq, begin, end));
  // The client continues at `begin`, or begins anew.
  // With states, Remove goes back to where it can continue (R10, H3).
  if (end == kOpenEnd && begin > 0 &&
      (has_states_ ? EndsInTheOpen(seq, begin) : !CanResume(seq, begin))) {
    begin = 0;
  }
  const StatusCode code = Remove(seq, begin, end);
  // The client continues only if the window before the next position is still
  // stored.
  const bool goes_on =
      code == StatusCode::kOk && (Next(seq) == 0 || CanResume(seq, Next(seq)));
  if (!goes_on) RemoveOwn(seq, 0, kOpenEnd);
}

void Client::Copy(const Op& op) {
  for (int i = 0; i <= op.more; ++i) CopyTo(IdOf(op.dst + i), op);
}

void Client::CopyTo(int dst, const Op& op) {
  const int src = IdOf(op.seq);
  std::int32_t len = Resolve(src, op.end);
  if (!setup_.legal) return void(CopyPrefix(src, dst, len));
  // The length may count the drafts, which stay with the sequence (D7).
  len = std::min(len, EndWithDrafts(src));
  if (EndsInTheOpen(src, std::min(len, Next(src)))) return;
  // A copy to itself cuts the sequence: as in Drop, the client asks before.
  const bool cuts = src == dst && len < Next(src) && !has_states_;
  if (cuts && len > 0 && !CanResume(src, len)) return;
  if (!CopyPrefix(src, dst, len)) return;
  const std::int32_t next = Next(dst);
  if (next > 0 && !CanResume(dst, next)) RemoveOwn(dst, 0, kOpenEnd);
}

void Client::Do(const Op& op) {
  if (op.kind == OpKind::kFind) return Find(op);
  TakeBack();
  switch (op.kind) {
    case OpKind::kPut:
      return Put(op);
    case OpKind::kDrop:
      return Drop(op);
    case OpKind::kCopy:
      return Copy(op);
    case OpKind::kAsk:
      return void(CanResume(IdOf(op.seq), Resolve(IdOf(op.seq), op.end)));
    case OpKind::kShift: {
      const int seq = IdOf(op.seq);
      const auto [begin, end] = std::minmax(
          {Resolve(seq, op.begin), op.open ? kOpenEnd : Resolve(seq, op.end)});
      return void(Shift(seq, begin, end, op.delta));
    }
    case OpKind::kCommit:
      return Commit(IdOf(op.seq), op.path);
    case OpKind::kPin:
      if (!abilities_.Can(KVTWIN_CAN_PIN)) return;
      Note(op);
      return driver_.Checkpoint(IdOf(op.seq));
    // The operation ends sharing, and the sequence then takes up more room.
    case OpKind::kAdd:
      if (setup_.legal) return;
      [[fallthrough]];
    default:
      Note(op);
      return op.single || op.kind > OpKind::kShift ? DoCall(op) : DoPlain(op);
  }
}

// Any layer may be put into every cache of a wrapper of a twin. Other wrappers
// take a layer only in the cache that it usually belongs to.
bool Client::MayUse(Place place) const {
  return is_twin_ || TypeOf(setup_, place.layer) == place.type;
}

// Makes one call, in any order. Does nothing if the cache only takes calls in
// the usual order.
void Client::DoCall(const Op& op) {
  if (abilities_.OnlyGoesOn()) return;
  const auto types = Size(setup_.spec.caches);
  const Place place = driver_.place();
  switch (op.kind) {
    case OpKind::kLayer:
      return driver_.SelectLayer(op.number % setup_.layers);
    case OpKind::kType:
      return types > 0 ? driver_.SelectType(op.number % types) : void();
    case OpKind::kCausal:
      if (!driver_.in_pass() || !abilities_.set_causal) return;
      return driver_.Except(op.except);
    case OpKind::kGet:
      return driver_.in_pass() && MayUse(place) ? driver_.Read() : void();
    case OpKind::kReput:
      return driver_.in_pass() && MayUse(place) ? driver_.Store() : void();
    case OpKind::kCached:
      return driver_.Cached();
    case OpKind::kSnapshot:
      return abilities_.snapshots ? driver_.Snapshot(IdOf(op.seq)) : void();
    case OpKind::kAdd:
      if (!abilities_.snapshots) return;
      return driver_.Add(IdOf(op.seq), IdOf(op.dst));
    default:
      return;
  }
}

// Carries out an operation whose arguments mean the same for all clients.
void Client::DoPlain(const Op& op) {
  const bool reads = op.kind == OpKind::kCausal || op.kind == OpKind::kGet ||
                     op.kind == OpKind::kReput;
  if (pass_ended_ && reads) return;
  switch (op.kind) {
    case OpKind::kCausal:
      if (!driver_.in_pass() || !abilities_.set_causal) return;
      driver_.SetCausal(op.except);
      return driver_.GetAll();
    case OpKind::kGet:
      return driver_.in_pass() ? driver_.GetAll() : void();
    case OpKind::kReput:
      if (!driver_.in_pass() || abilities_.OnlyGoesOn()) return;
      driver_.PutAll({});
      return driver_.GetAll();
    case OpKind::kMisuse:
      if (!abilities_.Can(KVTWIN_CAN_REFUSE_MISUSE)) return;
      return HasMisuse(abilities_, setup_.spec, op.misuse)
                 ? driver_.Misuse(op.misuse)
                 : void();
    case OpKind::kPoison:
      return driver_.Poison();
    case OpKind::kReload:
      return abilities_.snapshots ? driver_.Reload() : void();
    default:
      return;
  }
}

}  // namespace kvtwin::props
