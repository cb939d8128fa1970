// The oracle: does a recording show a cache that does what it must?
//
// It replays the calls on one or two twins and on the ledger, and compares
// every answer: with the twins' for identity, with the ledger's for visibility
// (docs/semantics.md, S51 to S53). The ledger follows the recorded results, so
// that visibility can be judged beyond the first difference from the twins,
// and for caches that place tokens by rules of their own.

#ifndef KVTWIN_PROPS_ORACLE_ORACLE_H_
#define KVTWIN_PROPS_ORACLE_ORACLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/trace/trace.h"
#include "kvtwin/cache.h"
#include "props/oracle/put_log.h"
#include "props/oracle/wrong_answer.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// What makes a ledger that never refuses a batch, in two sequences or one: a
// cache of another kind may have more room than ours.
void MakeRoom(TraceHeader& header);

// What one line showed.
struct OracleStep {
  std::string bad_input;            // The call cannot be made; or empty.
  std::optional<Failure> identity;  // Once: there is no next comparison.
  std::optional<Failure> visibility;
};

// What twins have to say of a line together. Requires: not empty.
using TwinFinding = std::pair<std::string, std::optional<Failure>>;
std::optional<Failure> Together(const std::vector<TwinFinding>& findings);

class Oracle {
 public:
  // First. Errors: a header that no cache accepts.
  Status Start(const TraceHeader& header,
               const std::vector<std::string>& twins);
  // The next line. Requires: no bad input before.
  OracleStep Step(const TraceOp& op);

  const TraceHeader& header() const { return header_; }
  // A twin, until the line after the first one that it differs on; else null.
  const Cache* twin() const;
  // What it answers to this get; without one, or refused, null data.
  KvView DueView(const TraceOp& op) const;
  // The view of a get that was recorded.
  static KvView RecordedView(const TraceOp& op);
  // The ledger can judge the mask of a get: it is of this pass, and no Remove
  // or CopyPrefix came between.
  bool fresh() const { return fresh_[active_]; }
  const reference::Ledger& ledger() const { return *ledger_; }
  // "sequence 1, position 4" for a row of the mask, or "padding".
  std::string RowLabel(int row) const;
  // Of a wrapper's caches, the one that calls go to.
  int active() const { return static_cast<int>(active_); }
  // Of the current pass.
  const std::vector<std::int32_t>& positions() const { return positions_; }
  const std::vector<int>& sequences() const { return sequences_; }

 private:
  struct Twin {
    std::string name;
    std::unique_ptr<Cache> cache;
  };
  struct Answer {
    Status status;
    bool yes = false;
    KvView view;
  };

  Status StartLedger();
  const CacheSpec& ActiveSpec() const;
  Answer Ask(Cache& cache, const TraceOp& op) const;
  std::string FindMisuse(const TraceOp& op);
  std::string FindExcess(const TraceOp& op);
  double LedgerExcess(const TraceOp& op);
  void Remember(const TraceOp& op);

  std::optional<Failure> CompareTwins(const TraceOp& op);
  std::optional<Failure> Compare(const TraceOp& op, const Answer& due,
                                 const Cache& twin) const;
  std::optional<Failure> CompareView(const TraceOp& op, const KvView& due,
                                     const Cache& twin) const;
  std::optional<Failure> CompareMask(const DenseTensor& mask, const KvView& due,
                                     const Cache& twin) const;
  std::optional<Failure> CompareRows(const TraceOp& op, const KvView& due,
                                     const Cache& twin) const;

  std::optional<Failure> FollowLedger(const TraceOp& op);
  std::optional<Failure> FollowStart(const TraceOp& op);
  std::optional<Failure> FollowRemove(const TraceOp& op);
  std::optional<Failure> CheckDims(const TraceOp& op) const;
  std::optional<Failure> CheckVisibility(const TraceOp& op) const;

  std::string SightText(int layer, const KvView& found, int row, int column,
                        int first_cell) const;
  std::string DueText(int layer, const KvView& due, int row, int column,
                      const std::vector<CellEntry>& cells) const;
  const PutRow* FindPut(int layer, const KvView& view,
                        std::int64_t column) const;

  TraceHeader header_;
  std::unique_ptr<Cache> gate_;  // Knows misuse, and answers as recorded.
  StatusCode recorded_ = StatusCode::kOk;
  std::vector<Twin> twins_;
  bool twins_hold_ = true;
  std::optional<reference::Ledger> ledger_;
  bool ledger_holds_ = true;

  std::size_t active_ = 0;   // Of a wrapper's caches.
  std::vector<bool> fresh_;  // By cache: the mask shows what is stored.
  bool reserving_ = false;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  RowDims rows_max_;
  std::set<int> all_sequences_;
  std::map<std::pair<std::size_t, int>, RowDims> dims_;  // By cache and layer.
  double put_bytes_ = 0;     // As much as the puts brought.
  double ledger_bytes_ = 0;  // The ledgers have no more.
  PutLog puts_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_ORACLE_H_
