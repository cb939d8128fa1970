// One cache under a law: it is asked what a history asks, and what it then
// shows is read in a form that does not depend on cells.

#ifndef KVTWIN_PROPS_LAWS_SESSION_H_
#define KVTWIN_PROPS_LAWS_SESSION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/cache.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Thrown where the law cannot be judged any further: a third-party cache does
// not have a call, or the rules leave open what a right one answers.
struct NotJudged {};

// A call with all that it is given, nothing relative.
struct Call {
  enum class Kind {
    kStart,
    kCausal,
    kPut,
    kCopy,
    kRemove,
    kAsk,
    kRestore,  // Of the cache's own Snapshot.
    kAdd       // AddSequence of the cache's own SnapshotOf.
  };
  Kind kind = Kind::kStart;
  // What the reference answered where the call comes from.
  StatusCode code = StatusCode::kOk;
  // kStart
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  bool reserve = false;
  // kStart: images; kCausal: excepted tokens.
  std::vector<int> indices;
  // kPut; kCausal has a type only.
  int layer = 0;
  int type = 0;  // Of a wrapper's caches.
  DenseTensor key;
  DenseTensor value;
  // kRemove (seq, begin, end), kCopy (seq to dst, end), kAsk (seq, end), kAdd
  // (seq as dst)
  int seq = 0;
  int dst = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  bool lacks_layer = false;  // kAdd: without the first layer's rows.
  // kRestore, kAdd: what the reference held then. Only a ledger takes it.
  CacheState state;
};

Call RemoveCall(int seq, std::int32_t begin, std::int32_t end);
Call CopyCall(int src, int dst, std::int32_t len);
Call StartCall(std::vector<std::int32_t> positions, std::vector<int> sequences,
               bool reserve);

// "Remove(1, 0, 3)".
std::string ToText(const Call& call);

// What a history asks of a cache, from the reference twin's point of view.
struct Script {
  Setup setup;
  std::vector<Call> calls;
};

// `keep` is ignored: laws speak of rows, so every batch brings its own. Of a
// third-party cache, what its abilities allow; at visibility from its own point
// of view, up to where it differs from the ledger.
Script Resolve(const History& history,
               const Subject& subject = TwinSubject("reference"));

struct Answer {
  StatusCode code = StatusCode::kOk;
  bool yes = false;  // CanResume's.
  bool operator==(const Answer&) const = default;
};

std::string ToText(const Answer& answer);

// A token as a batch row sees it. Position -1: a cell that is free by now.
struct SeenToken {
  std::int32_t position = 0;
  std::vector<std::byte> value;  // [v_head_dim, kv_heads], dense.
  std::vector<std::byte> key;    // [k_head_dim, kv_heads], dense.
  // NOLINTNEXTLINE(modernize-use-nullptr): there is no pointer here.
  auto operator<=>(const SeenToken&) const = default;
};

struct Query {
  std::int32_t position = 0;
  int seq = 0;
};

// What a query sees in a layer, by position; of an encoder, its slot.
struct SeenRow {
  int layer = 0;
  Query query;
  std::vector<SeenToken> tokens;
};

// Everything that a caller can see, byte for byte. By cache of a wrapper.
struct Picture {
  std::vector<std::vector<CellEntry>> cells = {};
  std::vector<std::vector<int>> batch_cells = {};
  // By layer; empty without a pass.
  std::vector<std::vector<std::byte>> views = {};
  bool shown = true;  // Else no rule says what would be seen.
};

class Session {
 public:
  // Null if no cache can be made of the setup.
  static std::optional<Session> Open(const Setup& setup,
                                     const Subject& subject);
  // The same state, by the same calls.
  Session Clone() const;

  // Goes on with a new cache that holds a snapshot of this one, without a
  // pass. False if one of the two calls is refused.
  bool Reload();

  // Calls that need a pass are left out if there is none. At visibility, where
  // no rule says what a full cache has evicted, a full cache ends the law.
  Answer Do(const Call& call);
  // The same, but a full cache is an answer, too.
  Answer Try(const Call& call);
  // Puts rows that no history has into every layer that has some.
  void PutAny();

  Cache& cache() { return *cache_; }
  bool is_twin() const { return is_twin_; }
  // What lies in which cell can be asked. Else cells are those of the record:
  // a ledger that notes what the cache was asked, and answered.
  bool sees_cells() const { return is_twin_ || level_ == Level::kIdentity; }
  const Setup& setup() const { return setup_; }
  const std::vector<Call>& calls() const { return calls_; }
  bool in_pass() const { return pass_.has_value(); }
  // The mask is older than the last CopyPrefix or Remove, and may show cells
  // that are free by now.
  bool stale() const { return stale_; }
  // SetCausal came after a CopyPrefix: the view may be too narrow for what the
  // batch's sequences have got since (S19), and so depends on the cells.
  bool narrow() const { return narrow_; }
  // StartForward of the current pass. Requires: in_pass().
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
  // Of a layer, in the current pass.
  KvView View(int layer);

  // Sequences that hold a token in any cache.
  std::set<int> Sequences();
  // One after the highest position that `seq` has in any cache.
  std::int32_t Next(int seq);
  // Each sequence at its next and its stored positions.
  std::vector<Query> Queries();

  // What the batch sees in the current pass, in every layer; nothing if the
  // view is narrow.
  std::vector<SeenRow> PassRows();
  // What the queries would see, by layer, from reserving passes. Ends the
  // current pass.
  std::vector<SeenRow> Look(const std::vector<Query>& queries);
  Picture Show();

 private:
  Session(const Setup& setup, const Subject& subject)
      : setup_(setup),
        subject_(&subject),
        is_twin_(subject.is_twin()),
        level_(subject.level),
        can_(subject.abilities) {}
  void SetType(int type);
  void SetLayer(int layer);
  // Throws NotJudged if a third-party cache does not have the call.
  void CheckCall(const Call& call);
  void CheckStart(const Call& call);
  // The same while it may hold anything.
  void CheckWhole() const;
  void Record(const Call& call, const Answer& answer);
  Answer Make(const Call& call);
  // By row, the position of a token that the sequence has in the layer.
  std::map<std::vector<std::byte>, std::int32_t> PositionsOf(int seq,
                                                             int layer) const;
  std::vector<SeenRow> LookByGoingOn(const std::vector<Query>& queries);
  // Restore and AddSequence end the pass if they succeed.
  StatusCode AfterLoading(const Status& status);
  // With `slots`, those of encoders too.
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

  // Of a third-party cache.
  std::optional<reference::Ledger> record_;
  std::map<int, Call> pass_puts_;  // By layer, of the pass.
  int half_removed_ = -1;          // A sequence that must be cleared first.
};

// The first difference between what is seen, if any. K elements may differ by
// `slack` times the row's largest, at least `size`; 0 compares bits.
std::optional<std::string> CompareRows(const std::vector<SeenRow>& left,
                                       const std::vector<SeenRow>& right,
                                       DType dtype, double slack,
                                       double size = 1);
// Leaves the queries that both could ask: caches of other sizes have room for
// other tokens.
void KeepCommon(std::vector<SeenRow>& left, std::vector<SeenRow>& right);
std::optional<std::string> ComparePictures(const Picture& left,
                                           const Picture& right);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_SESSION_H_
