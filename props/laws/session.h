// One cache under a law: it gets the calls of a script, and what it shows is
// read in a form that does not depend on cells.

#ifndef KVTWIN_PROPS_LAWS_SESSION_H_
#define KVTWIN_PROPS_LAWS_SESSION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "kvtwin/cache.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/laws/script.h"
#include "props/laws/seen.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Thrown where a law cannot be judged any further: a third-party cache does not
// have a call, or the rules leave open what a correct cache answers.
struct NotJudged {};

class Session {
 public:
  // Returns null if no cache can be made of the setup.
  static std::optional<Session> Open(const Setup& setup,
                                     const Subject& subject);
  // Returns a session in the same state, reached by the same calls.
  Session Clone() const;

  // Continues with a new cache that holds a snapshot of this one, without a
  // pass. Returns false if Snapshot or Restore is refused.
  bool Reload();

  // Makes the call, unless it needs a pass and there is none. At visibility a
  // full cache ends the law: no rule says which tokens a full cache evicts.
  Answer Do(const Call& call);
  // The same, but a full cache is an answer, too.
  Answer Try(const Call& call);
  // Puts rows that no history has into every layer that has some.
  void PutAny();
  // Puts such rows into every layer of the setup, as a model does.
  void PutAll();

  Cache& cache() { return *cache_; }
  bool is_twin() const { return is_twin_; }
  // Whether the cache can say which token is in which cell. Otherwise the cells
  // are those of a ledger, which gets the same calls and the cache's answers.
  bool sees_cells() const { return is_twin_ || level_ == Level::kIdentity; }
  const Setup& setup() const { return setup_; }
  const std::vector<Call>& calls() const { return calls_; }
  bool in_pass() const { return pass_.has_value(); }
  // The mask is older than the last CopyPrefix or Remove, and may show cells
  // that are free by now.
  bool stale() const { return stale_; }
  // SetCausal came after a CopyPrefix: the view may be too narrow for the
  // tokens that the batch's sequences got since (S19), so it depends on the
  // cells.
  bool narrow() const { return narrow_; }
  // Returns the StartForward of the current pass. Requires: in_pass().
  const Call& pass() const { return *pass_; }
  const std::set<int>& put_layers() const { return put_layers_; }

  // CopyPrefix of a sequence to itself can be asked, of any length.
  bool MayCopyToItself() const;

  int types() const;
  int TypeOf(int layer) const;
  const CacheSpec& spec(int type) const;
  bool IsEncoder(int type) const { return spec(type).kind == Kind::kEncoder; }
  bool HasEncoder() const;

  std::vector<CellEntry> Cells(int type);
  std::vector<int> BatchCells(int type);
  // Returns the view of a layer in the current pass.
  KvView View(int layer);

  // Returns the sequences that hold a token in any cache.
  std::set<int> Sequences();
  // Returns the highest position that `seq` has in any cache, plus 1.
  std::int32_t Next(int seq);
  // Returns queries of each sequence at its stored positions and the next one.
  std::vector<Query> Queries();

  // Returns what the batch sees in the current pass, in every layer; nothing if
  // the view is narrow.
  std::vector<SeenRow> PassRows();
  // Returns what the queries would see, by layer, from reserving passes. Ends
  // the current pass.
  std::vector<SeenRow> Look(const std::vector<Query>& queries);
  // Look is by batches of next tokens: it leaves out queries that lie before
  // the next position of their sequence.
  bool LooksByGoingOn() const {
    return !sees_cells() || !can_.Can(KVTWIN_CAN_RESERVE) || can_.OnlyGoesOn();
  }
  Picture Show();

 private:
  Session(const Setup& setup, const Subject& subject)
      : setup_(setup),
        subject_(&subject),
        is_twin_(subject.is_twin()),
        level_(subject.level),
        can_(subject.abilities) {}
  void PutRows(std::set<int> layers);
  void SetType(int type);
  void SetLayer(int layer);
  // Throws NotJudged if a third-party cache does not have the call.
  void CheckCall(const Call& call);
  void CheckStart(const Call& call);
  // Throws NotJudged while a sequence may hold anything, after a Remove that
  // could not be undone.
  void CheckWhole() const;
  void Record(const Call& call, const Answer& answer);
  Answer Make(const Call& call);
  // By row, the position of a token that the sequence has in the layer.
  std::map<std::vector<std::byte>, std::int32_t> PositionsOf(int seq,
                                                             int layer) const;
  std::vector<SeenRow> LookByGoingOn(const std::vector<Query>& queries);
  // Restore and AddSequence end the pass if they succeed.
  StatusCode AfterLoading(const Status& status);
  // Adds what the queries see in each layer; with `slots`, encoders' slots too.
  void AddRows(const std::vector<Query>& queries, bool slots,
               std::vector<SeenRow>& rows);

  Setup setup_;
  const Subject* subject_;  // For Clone and Reload.
  bool is_twin_;
  Level level_;
  Abilities can_;
  std::unique_ptr<Cache> cache_;
  std::vector<Call> calls_;
  std::optional<Call> pass_;
  bool stale_ = false;
  bool copied_ = false;
  bool narrow_ = false;
  std::set<int> put_layers_;

  // Set for a third-party cache.
  std::optional<reference::Ledger> record_;
  std::map<int, Call> pass_puts_;  // By layer, of the pass.
  int half_removed_ = -1;          // A sequence that must be cleared first.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_SESSION_H_
