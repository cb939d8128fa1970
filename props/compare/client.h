// A client: turns a history into calls of a driver.

#ifndef KVTWIN_PROPS_COMPARE_CLIENT_H_
#define KVTWIN_PROPS_COMPARE_CLIENT_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "core/index.h"
#include "props/compare/driver.h"
#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Turns the operations of a history, whose arguments are relative to the state,
// into calls. If the setup is legal, only calls of operations that are
// `overfull` may be refused.
class Client {
 public:
  // Adds the operations that the client carries out, legal or not, to `done`,
  // if given. Tells `trace`, if given, which removals are the client's own.
  Client(const Setup& setup, const Subject& subject, Driver& driver,
         std::vector<Op>* done = nullptr, CallTrace* trace = nullptr);

  void Do(const Op& op);

 private:
  void Note(const Op& op) {
    if (done_ != nullptr) done_->push_back(op);
  }
  void Note(OpKind kind, int seq, std::int32_t begin, std::int32_t end,
            int dst = 0);
  StatusCode Remove(int seq, std::int32_t begin, std::int32_t end);
  // The same, where no operation says so: to make room, or to begin anew.
  StatusCode RemoveOwn(int seq, std::int32_t begin, std::int32_t end);
  void Mark(OwnCall call);
  bool CanResume(int seq, std::int32_t pos);
  // Returns whether the client makes the call.
  bool CopyPrefix(int src, int dst, std::int32_t len);
  // Returns false if no rule says which tokens would move; then it does
  // nothing.
  bool Shift(int seq, std::int32_t begin, std::int32_t end, std::int32_t delta);

  void Put(const Op& op);
  bool MayGiveUp(const Op& op) const;
  void GiveUp(const Tokens& batch);
  void TakeBack();
  void Find(const Op& op);
  void Drop(const Op& op);
  void Copy(const Op& op);
  bool EndsInTheOpen(int seq, std::int32_t length) const;
  void CopyTo(int dst, const Op& op);
  void DoPlain(const Op& op);
  void DoCall(const Op& op);
  bool MayUse(Place place) const;
  std::vector<Segment> MakeSegments(const Op& op);
  bool SettleEnd(int seq);
  void BeginAnew(int seq);
  Segment Legalized(Segment segment, std::size_t batch_room);
  Segment Reserved(Segment segment, std::size_t batch_room);
  bool Overfill(std::size_t batch_room, Segment& segment);
  void AppendSegment(const Segment& segment, Tokens& batch);

  void Commit(int seq, const std::vector<int>& choices);
  void CommitFirst(const Segment& segment);
  int CountDrafts(int seq) const;
  std::int32_t EndWithDrafts(int seq);
  int DraftRoom(int seq) const;
  void PlaceDrafts(const Segment& segment, Tokens& batch);
  bool CanDraft(int seq) const;

  // The state according to the ledger.
  std::int32_t Next(int seq);
  std::int64_t Free();
  std::int32_t Resolve(int seq, const RelativePos& pos);
  // Returns the id of the sequence that an operation calls `seq`.
  int IdOf(int seq) const {
    const bool within =
        setup_.legal || !abilities_.Can(KVTWIN_CAN_ANY_SEQUENCE);
    return setup_.IdOf(within ? seq % setup_.init.max_sequences : seq);
  }

  const Setup& setup_;
  const Abilities& abilities_;
  const bool is_twin_;
  const bool overfills_;
  Driver& driver_;
  std::vector<Op>* done_;
  CallTrace* trace_;
  const bool has_states_;  // Batches must continue their sequences (R3).
  std::set<int> held_;     // Sequences put and not cleared since.
  // The length of each sequence before the pass that was given up.
  std::map<int, std::int32_t> given_up_;
  bool pass_ended_ = false;  // The pass was given up, or a prompt came.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_CLIENT_H_
