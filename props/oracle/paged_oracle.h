// The oracle for recordings of pools checks whether a recording shows a pool
// that obeys the rules (docs/semantics.md, P1 to P19).
//
// Like the oracle of caches (props/oracle/oracle.h), it replays the calls on
// one or two twins, for identity, and on the ledger, for visibility: which rows
// a sequence shows, and which sequences may share a block. For visibility, the
// recording decides what a prompt finds, which block comes next and when the
// pool is full.

#ifndef KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_
#define KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/trace/paged_trace.h"
#include "kvtwin/paged.h"
#include "props/oracle/oracle.h"
#include "props/oracle/put_log.h"
#include "props/oracle/recorded_pool.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

// Whether the call may move blocks, or change their owners.
bool ChangesBlocks(PagedTraceOpKind kind);
// Whether the call may change the blocks or the media of a sequence.
bool ChangesPool(PagedTraceOpKind kind);

// Returns the number of K rows in a line.
int RowCount(const PagedTraceOp& op);
// Returns the rows of a line; K alone if the line has no V.
KvView RowsOf(const PagedTraceOp& op);

class PagedOracle {
 public:
  // Starts a recording. Errors: a header that no pool accepts.
  Status Start(const PagedTraceHeader& header,
               const std::vector<std::string>& twins);
  // Judges the next line. Requires: no bad input before.
  OracleStep Step(const PagedTraceOp& op);

  const PagedTraceHeader& header() const { return header_; }
  // Returns a twin; null after the line on which a twin differs first.
  const PagedPool* twin() const;
  const std::set<int>& sequences() const { return sequences_; }
  // The last call that may change the pool, even if it was refused.
  std::optional<PagedTraceOpKind> last_change() const { return last_change_; }
  int SeqLen(int sequence) const { return *gate_->SeqLen(sequence); }
  // A block that the recording showed, and the first line that did so.
  struct Shown {
    int block = 0;
    std::int64_t line = 0;
    int end = 0;  // End of the sequence, with appended rows.
  };
  // A group (0 in a pool without groups) and a place in the list of a sequence:
  // the index of a block or, in a group with states, the position of a state.
  using Spot = std::pair<int, int>;
  // The blocks shown, by sequence and place, since the last call that may move
  // blocks of that sequence.
  const std::map<int, std::map<Spot, Shown>>& blocks() const { return blocks_; }
  // Returns how many rows after SeqLen the longest layer has; 0 if this is not
  // known any more.
  int Appended(int sequence) const;
  // A block in the list of a sequence.
  struct Place {
    int sequence = 0;
    int index = 0;
    int block = 0;
    int group = 0;
  };
  // The blocks that the last line shows.
  const std::vector<Place>& places() const { return places_; }
  // The number of rows of the last `attend` that were judged.
  std::int64_t output_rows_judged() const { return output_rows_judged_; }

 private:
  struct Twin {
    std::string name;
    std::unique_ptr<PagedPool> pool;
  };
  struct Answer {
    Status status;
    int number = 0;  // The new sequence, the start of an append, or a length.
  };
  // The sequences that have one block, all at the same place, by their ends.
  struct Owners {
    int index = 0;
    std::set<std::pair<int, int>> by_end;
  };

  static Answer Ask(PagedPool& pool, const PagedTraceOp& op);
  std::string FindMisuse(const PagedTraceOp& op);
  // Returns why an `attend` is misuse, or "".
  std::string FindWrongQuery(const PagedTraceOp& op) const;
  std::optional<Failure> CheckOutput(const PagedTraceOp& op);
  std::string FindExcess(const PagedTraceOp& op);
  void Remember(const PagedTraceOp& op);
  void RememberReach(const PagedTraceOp& op);
  void ForgetBlocks(int sequence);
  int GroupCount() const { return std::max(1, Size(header_.spec.groups)); }
  const PagedSpec& SpecOf(int group) const {
    return header_.spec.groups.empty() ? header_.spec
                                       : At(header_.spec.groups, group);
  }
  int GroupOfLayer(int layer) const { return GroupOf(header_.spec, layer); }
  int BlocksFor(int tokens, int group) const;
  // Returns the number of tokens from a place of a group to the next place.
  int PlaceSize(int group) const {
    return SpecOf(group).states ? 1 : SpecOf(group).block_size;
  }
  // Returns the place of a block of a sequence with `len` tokens.
  int PlaceOf(int group, int block, int len) const;
  // Returns what a place is: "block 2", or "the block of the state at position
  // 5", whose index is a position.
  std::string PlaceText(int group, int index) const;
  // Returns the position of a row of a line.
  static int PositionOf(const PagedTraceOp& op, int row) {
    return op.positions ? At(*op.positions, row) : op.start.value_or(0) + row;
  }
  // Whether a pass, whose tokens are not committed yet, wrote over the state
  // that it read.
  bool WroteOverState(int sequence, int group) const;
  // Whether no later token sees any token of this place of a sequence.
  bool IsGone(int sequence, int index, int group) const;

  // Each returns what is wrong with a list or a shape, whichever blocks the
  // pool has; otherwise adds the blocks that the line shows to `places`.
  std::optional<Failure> ReadPlaces(const PagedTraceOp& op,
                                    std::vector<Place>& places) const;
  std::optional<Failure> ReadViews(const PagedTraceOp& op,
                                   std::vector<Place>& places) const;
  std::optional<Failure> CheckExtent(const PagedTraceOp& op) const;
  std::optional<Failure> CheckStates(const PagedTraceOp& op) const;
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
  std::optional<Failure> FollowFork(const PagedTraceOp& op);
  std::optional<Failure> CheckKept(const PagedTraceOp& op) const;
  std::optional<Failure> FollowAppend(const PagedTraceOp& op);
  std::optional<Failure> FollowCommit(const PagedTraceOp& op);
  std::string WhyNotFoundText(const PagedTraceOp& op) const;
  std::string OtherKeyText(const PagedTraceOp& op) const;
  std::optional<Failure> CheckViews(const PagedTraceOp& op);
  // Whether another group has the block, although all groups share one stock.
  std::optional<Failure> CheckStock(const Place& place) const;
  std::optional<Failure> CheckPlace(const Place& place, std::int64_t line);
  std::optional<Failure> CheckUsage(const PagedUsage& usage);
  // Returns how many blocks the next token needs of a sequence.
  int NeededBlocks(int sequence, int group) const;
  // The blocks that sequences need, added up over the groups.
  struct BlockNeeds {
    int longest = 0;       // Of the sequence that needs the most in a group.
    std::int64_t all = 0;  // Of all sequences.
  };
  BlockNeeds NeedsOfSequences() const;
  std::int64_t UnsharedBlocks() const;
  // Checks a pool that holds no blocks in reserve.
  std::optional<Failure> CheckReserve(const PagedUsage& usage) const;
  std::string SharedBlockText() const;
  std::string WrongRow(const PagedTraceOp& op, int column,
                       const std::vector<KvView>& expected) const;
  std::string ExpectedText(const std::vector<KvView>& expected,
                           int layer) const;

  PagedTraceHeader header_;
  RecordedAnswers recorded_;
  // Finds misuse, and answers as recorded.
  std::unique_ptr<PagedPool> gate_;
  std::vector<Twin> twins_;
  bool twins_hold_ = true;
  std::optional<reference::PagedLedger> ledger_;
  bool ledger_holds_ = true;

  std::set<int> sequences_;
  std::optional<PagedTraceOpKind> last_change_;
  std::map<int, std::map<Spot, Shown>> blocks_;
  std::map<Spot, Owners> owners_;    // By group and block.
  int shared_ = 0;                   // Blocks of several owners.
  std::optional<BlockNeeds> needs_;  // Set by CheckUsage.
  // The least number of blocks that are not shared; set by CheckUsage.
  std::optional<std::int64_t> unshared_blocks_;
  // By sequence: the greatest length that it had, with appended rows. A pool
  // may keep blocks of a sequence that became shorter, copy its whole list for
  // a fork of all tokens, and hold the block of a prompt's last token.
  std::map<int, int> reached_;
  double key_bytes_ = 0;   // The largest prefix key so far.
  int longest_ = 0;        // The longest sequence so far.
  double kept_bytes_ = 0;  // All rows and prefix keys so far.
  PutLog puts_;
  std::vector<Place> places_;
  std::int64_t output_rows_judged_ = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_PAGED_ORACLE_H_
