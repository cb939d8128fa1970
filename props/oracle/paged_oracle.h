// The oracle for recordings of pools: does one show a pool that does what it
// must (docs/semantics.md, P1 to P11)?
//
// As that of caches (props/oracle/oracle.h), it replays the calls on one or two
// twins, for identity, and on the ledger, for visibility: which rows a
// sequence shows, and which sequences may share a block. What a prompt finds,
// which block comes next and when the pool is full is then the recording's own.

#ifndef KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_
#define KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/trace/paged_trace.h"
#include "kvtwin/paged.h"
#include "props/oracle/oracle.h"
#include "props/oracle/put_log.h"
#include "props/oracle/recorded_pool.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

// Whether it may move blocks, or change who has them.
bool ChangesBlocks(PagedTraceOpKind kind);

// Returns how many K rows a line has.
int RowCount(const PagedTraceOp& op);
// Returns the rows of a line; K alone, if it has no V.
KvView RowsOf(const PagedTraceOp& op);

class PagedOracle {
 public:
  // First. Errors: a header that no pool accepts.
  Status Start(const PagedTraceHeader& header,
               const std::vector<std::string>& twins);
  // The next line. Requires: no bad input before.
  OracleStep Step(const PagedTraceOp& op);

  const PagedTraceHeader& header() const { return header_; }
  // A twin, until the line after the first one that it differs on; else null.
  const PagedPool* twin() const;
  const std::set<int>& sequences() const { return sequences_; }
  int SeqLen(int sequence) const { return *gate_->SeqLen(sequence); }
  // A block that the recording showed, and on which line it did so first.
  struct Shown {
    int block = 0;
    std::int64_t line = 0;
    int end = 0;  // Of the sequence, with what is appended.
  };
  // By sequence and place in its list: those shown since the last call that may
  // move blocks of that sequence.
  const std::map<int, std::map<int, Shown>>& blocks() const { return blocks_; }
  // Rows of the layer that has the most, behind SeqLen; 0 if they are not
  // known any more.
  int Appended(int sequence) const;
  // A block in the list of a sequence.
  struct Place {
    int sequence = 0;
    int index = 0;
    int block = 0;
  };
  // Those of the last line.
  const std::vector<Place>& places() const { return places_; }

 private:
  struct Twin {
    std::string name;
    std::unique_ptr<PagedPool> pool;
  };
  struct Answer {
    Status status;
    int number = 0;  // Sequence made, start of what was appended, or length.
  };
  // Sequences that have a block at the same place, by their ends.
  struct Owners {
    int index = 0;
    std::set<std::pair<int, int>> by_end;
  };

  static Answer Ask(PagedPool& pool, const PagedTraceOp& op);
  std::string FindMisuse(const PagedTraceOp& op);
  std::string FindExcess(const PagedTraceOp& op);
  void Remember(const PagedTraceOp& op);
  void ForgetBlocks(int sequence);
  int BlocksFor(int tokens) const;
  // Whether no later token sees any token of this block of a sequence.
  bool IsGone(int sequence, int index) const;
  DType key_dtype() const { return header_.spec.dtype; }
  DType value_dtype() const {
    return header_.spec.v_dtype.value_or(header_.spec.dtype);
  }

  // What is wrong with a list or a shape, whatever blocks the pool has; else,
  // the blocks that the line shows.
  std::optional<Failure> ReadPlaces(const PagedTraceOp& op,
                                    std::vector<Place>& places) const;
  std::optional<Failure> ReadViews(const PagedTraceOp& op,
                                   std::vector<Place>& places) const;
  std::optional<Failure> CheckExtent(const PagedTraceOp& op) const;
  std::optional<Failure> ReadTable(const PagedTraceOp& op,
                                   std::vector<Place>& places) const;
  std::optional<Failure> ReadCsr(const PagedTraceOp& op,
                                 std::vector<Place>& places) const;
  std::optional<Failure> ReadSlots(const PagedTraceOp& op,
                                   std::vector<Place>& places) const;

  std::optional<Failure> CompareTwins(const PagedTraceOp& op,
                                      const std::vector<Place>& places);
  std::optional<Failure> Compare(const PagedTraceOp& op, PagedPool& twin,
                                 const std::vector<Place>& places) const;
  std::optional<Failure> CompareViews(const PagedTraceOp& op,
                                      const PagedPool& twin) const;

  std::optional<Failure> FollowLedger(const PagedTraceOp& op,
                                      const std::vector<Place>& places);
  std::optional<Failure> FollowOpen(const PagedTraceOp& op);
  std::optional<Failure> FollowAppend(const PagedTraceOp& op);
  std::optional<Failure> FollowCommit(const PagedTraceOp& op);
  std::string WhyNotFoundText(const PagedTraceOp& op) const;
  std::string OtherKeyText(const PagedTraceOp& op) const;
  std::optional<Failure> CheckViews(const PagedTraceOp& op);
  std::optional<Failure> CheckPlace(const Place& place, std::int64_t line);
  std::optional<Failure> CheckUsage(const PagedUsage& usage);
  std::string WrongRow(const PagedTraceOp& op, int column,
                       const std::vector<KvView>& due) const;
  std::string DueText(const std::vector<KvView>& due, int layer) const;

  PagedTraceHeader header_;
  RecordedAnswers recorded_;
  std::unique_ptr<GuardedPaged>
      gate_;  // Knows misuse, and answers as recorded.
  std::vector<Twin> twins_;
  bool twins_hold_ = true;
  std::optional<reference::PagedLedger> ledger_;
  bool ledger_holds_ = true;

  std::set<int> sequences_;
  std::map<int, std::map<int, Shown>> blocks_;
  std::map<int, Owners> owners_;       // By block.
  int shared_ = 0;                     // Blocks of several owners.
  std::optional<int> longest_blocks_;  // Of one sequence; by CheckUsage.
  double key_bytes_ = 0;               // Of the longest prefix key,
  int longest_ = 0;                    // and of the longest sequence, so far.
  double kept_bytes_ = 0;              // Of all rows and prefix keys so far.
  PutLog puts_;
  std::vector<Place> places_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_
