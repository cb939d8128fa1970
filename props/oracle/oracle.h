// The oracle checks whether a recording shows a cache that obeys the rules.
//
// It replays the calls on one or two twins and on the ledger, and compares
// every answer: with the twins' answers for identity, with the ledger's for
// visibility (docs/semantics.md, S51 to S53). The ledger follows the recorded
// results, so that visibility can be judged after the first difference from the
// twins, and for caches that place tokens by rules of their own.

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

#include "core/index.h"
#include "core/trace/trace.h"
#include "kvtwin/cache.h"
#include "props/compare/cited_rules.h"
#include "props/compare/visibility.h"
#include "props/oracle/put_log.h"
#include "props/oracle/wrong_answer.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Changes the header so that a ledger of one or two sequences never refuses a
// batch: a third-party cache may have more room than ours.
void MakeRoom(TraceHeader& header);

// The result of one line.
struct OracleStep {
  std::string bad_input;            // The call cannot be made; or empty.
  std::optional<Failure> identity;  // Once: there is no next comparison.
  std::optional<Failure> visibility;
};

// Combines the failures of all twins about a line. Requires: not empty.
using TwinFailure = std::pair<std::string, std::optional<Failure>>;
std::optional<Failure> Together(const std::vector<TwinFailure>& failures);

class Oracle {
 public:
  // Starts a recording. Errors: a header that no cache accepts.
  Status Start(const TraceHeader& header,
               const std::vector<std::string>& twins);
  // Judges the next line. Requires: no bad input before.
  OracleStep Step(const TraceOp& op);

  const TraceHeader& header() const { return header_; }
  // Returns a twin; null after the line on which a twin differs first.
  const Cache* twin() const;
  // Returns the twin's view for this get; without a twin, or if it refuses, the
  // data is null.
  KvView ExpectedView(const TraceOp& op) const;
  // Returns the recorded view of a get.
  static KvView RecordedView(const TraceOp& op);
  // Whether the ledger can judge the mask of a get: the mask is of this pass,
  // and no Remove or CopyPrefix came after it.
  bool fresh() const { return fresh_[active_]; }
  // The number of rows of the last `attend` that were judged.
  std::int64_t output_rows_judged() const { return output_rows_judged_; }
  // Whether the rows of the batch are known in a layer: a pass may put none.
  bool HasPut(int layer) const;
  // Whether a row of the batch sees a token that has no rows in this layer, so
  // that any row is right for the token.
  bool ShowsUnknown(int layer) const;
  const reference::Ledger& ledger() const { return *ledger_; }
  // Returns "sequence 1, position 4" for a row of the mask, or "padding".
  std::string RowLabel(int row) const;
  // The index of a wrapper's active cache.
  int active() const { return AsInt(active_); }
  // The calls so far, for the rules that a failure cites.
  const RowPast& past() const { return past_; }
  // The batch of the current pass.
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
    KvView view = {};
  };

  Status StartLedger();
  const CacheSpec& ActiveSpec() const;
  Answer Ask(Cache& cache, const TraceOp& op) const;
  std::string FindMisuse(const TraceOp& op);
  void FollowEnds(const TraceOp& op);
  // Returns why the query or the output of an attend cannot be of this pass and
  // layer; empty if they can.
  std::string FindWrongShape(const TraceOp& op) const;
  std::string FindExcess(const TraceOp& op);
  double LedgerExcess(const TraceOp& op);
  double LedgerBytes() const;
  // Returns LedgerBytes, or an upper bound if the ledgers and `more` bytes are
  // within the limit.
  double LedgerBound(double more);
  // Returns the bytes of the rows of a put.
  double PutBytes(const TraceOp& op) const;
  std::string FindWrongPrompt(const TraceOp& op) const;
  std::string FindPromptExcess(const TraceOp& op);
  void Remember(const TraceOp& op);
  void RememberPromise(const TraceOp& op);
  void RememberWindow(const TraceOp& op);
  // Returns " (can_resume on line 6 promised ...)" if a row misses a token
  // that its sequence was promised; " (as if the window were 4: ...)" if it
  // misses the first of its window alone, and no row showed that token before,
  // or sees the token before its window in addition; otherwise an empty text.
  std::string ReasonText(const TraceOp& op, const Failure& failure) const;
  // Whether a row misses a token that its sequence was promised.
  bool IsPromised(std::size_t row, const RowSights& sights) const;
  bool Left(const PutRow& put) const;

  std::optional<Failure> CompareTwins(const TraceOp& op);
  std::optional<Failure> Compare(const TraceOp& op, const Answer& expected,
                                 const Cache& twin) const;
  std::optional<Failure> CompareView(const TraceOp& op, const KvView& expected,
                                     const Cache& twin) const;
  std::optional<Failure> CompareMask(const DenseTensor& mask,
                                     const KvView& expected,
                                     const Cache& twin) const;
  std::optional<Failure> CompareRows(const TraceOp& op, const KvView& expected,
                                     const Cache& twin) const;

  std::optional<Failure> FollowLedger(const TraceOp& op);
  std::optional<Failure> FollowStart(const TraceOp& op);
  std::optional<Failure> FollowPrompt(const TraceOp& op);
  std::optional<Failure> CheckRoom(const TraceOp& op) const;
  bool MovesShared(const TraceOp& op) const;
  std::optional<Failure> FollowRemove(const TraceOp& op);
  std::optional<Failure> CheckDims(const TraceOp& op) const;
  std::optional<Failure> CheckVisibility(const TraceOp& op);
  std::optional<Failure> CheckOutput(const TraceOp& op);
  // Returns "layer 2: ", in a wrapper "cache 1, layer 2: "; empty if the model
  // has one layer.
  std::string LayerText(int layer) const;

  std::string SightText(int layer, const KvView& actual, int row, int column,
                        int first_cell) const;
  std::string ExpectedText(int layer, const KvView& expected, int row,
                           int column,
                           const std::vector<CellEntry>& cells) const;
  PutMatch FindPut(int layer, const KvView& view, std::int64_t column) const;

  TraceHeader header_;
  RowPast past_;
  std::unique_ptr<Cache> gate_;  // Finds misuse, and answers as recorded.
  StatusCode recorded_ = StatusCode::kOk;
  std::vector<Twin> twins_;
  bool twins_hold_ = true;
  std::optional<reference::Ledger> ledger_;
  bool ledger_holds_ = true;

  std::size_t active_ = 0;   // The index of a wrapper's active cache.
  std::vector<bool> fresh_;  // By cache: the mask is up to date.
  bool reserving_ = false;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  // The lines of can_resume with the answer true, by sequence and position,
  // whose tokens no later call may have changed.
  std::map<std::pair<int, std::int32_t>, std::int64_t> promises_;
  // By sequence: the promise on which the current batch relies.
  struct Promise {
    std::int32_t position = 0;
    std::int64_t line = 0;
  };
  std::map<int, Promise> resumed_;
  // By sequence: the last line that may have taken tokens from it.
  std::map<int, std::int64_t> cuts_;
  std::set<std::size_t> whole_window_;         // Caches that showed all of it.
  std::set<std::pair<std::size_t, int>> put_;  // In this pass, as in dims_.
  RowDims rows_max_;
  std::set<int> all_sequences_;
  std::map<std::pair<std::size_t, int>, RowDims> dims_;  // By cache and layer.
  std::int64_t output_rows_judged_ = 0;
  double put_bytes_ = 0;     // Bytes of all rows put so far.
  double ledger_bytes_ = 0;  // An upper bound on the ledgers' bytes.
  double prompt_bytes_ = 0;  // Bytes of the prefixes of all prompts.
  PutLog puts_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_ORACLE_H_
