// The text that `show` prints for a line of a pool's recording, and for blocks.

#ifndef KVTWIN_PROPS_REPORT_SHOW_POOL_H_
#define KVTWIN_PROPS_REPORT_SHOW_POOL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/trace/paged_trace.h"
#include "props/compare/step.h"
#include "props/oracle/paged_oracle.h"

namespace kvtwin::props {

// A sequence of a pool with its blocks, from a twin or from the recording. With
// groups, it has a list for each group.
struct BlockList {
  int sequence = 0;
  std::optional<int> group = {};
  int len = 0;
  int appended = 0;
  std::vector<int> blocks;
};

// The block lists of all sequences. A line of a recording changes the lists of
// the sequences that it names, and no others: only these are read again.
class BlockLists {
 public:
  // Reads the lists that `op` may have changed; all lists at first, and once
  // they no longer come from a twin. Afterwards, every line has to be followed.
  void Follow(const PagedOracle& oracle, const PagedTraceOp& op);
  // The lists of each sequence, one for each group.
  const std::map<int, std::vector<BlockList>>& of() const { return lists_; }
  // Whether several lists of the group have the block.
  bool IsShared(int group, int block) const;

 private:
  void Add(const PagedOracle& oracle, int sequence);
  void Remove(int sequence);

  std::optional<bool> of_twin_;
  std::map<int, std::vector<BlockList>> lists_;
  std::map<std::pair<int, int>, int> owners_;  // By group and block.
};

// Whether a list of calls shows the call, because it changes the blocks or the
// key of a sequence.
bool ChangesPool(PagedTraceOpKind kind);

// Returns "sequence 0, layer 0, K [2, 1, 3]: ok".
std::string PoolCallText(const PagedTraceOp& op);
std::string PoolText(const PagedTraceHeader& header);
// Returns a line of text for each call that changed the pool before `line` of
// its recording, and for `line` itself, with the recording's line numbers.
std::vector<Step> PoolSteps(std::span<const PagedTraceOp> ops,
                            std::int64_t line);

bool ShowsBlocks(const PagedOracle& oracle, const PagedTraceOp& op);
// Returns a line for each sequence: "    sequence 1  5 tokens  blocks 0* 3".
std::string BlocksText(const PagedOracle& oracle, const BlockLists& lists);
// Returns the blocks that the recording's last read line gives, if any.
std::string GivenText(const PagedOracle& oracle);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_SHOW_POOL_H_
