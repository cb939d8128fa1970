// What `show` says of a line of a pool's recording, and of its blocks.

#ifndef KVTWIN_PROPS_REPORT_SHOW_POOL_H_
#define KVTWIN_PROPS_REPORT_SHOW_POOL_H_

#include <cstddef>
#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "core/trace/paged_trace.h"
#include "props/compare/step.h"
#include "props/oracle/paged_oracle.h"

namespace kvtwin::props {

// A sequence of a pool: a twin's blocks, or those that the recording showed.
struct BlockList {
  int sequence = 0;
  int len = 0;
  int appended = 0;
  std::vector<int> blocks;
};
std::vector<BlockList> ListsOf(const PagedOracle& oracle);

// "sequence 0, layer 0, K [2, 1, 3]: ok".
std::string PoolCallText(const PagedTraceOp& op);
std::string PoolText(const PagedTraceHeader& header);
// Returns a step for each call that changed the pool before `line` of its
// recording, and for `line` itself, with the numbers of the recording.
std::vector<Step> PoolSteps(std::istream& recording, std::int64_t line);

bool ShowsBlocks(const PagedOracle& oracle, const PagedTraceOp& op);
// "    sequence 1  5 tokens  blocks 0* 3", for each.
std::string BlocksText(const PagedOracle& oracle);
// The blocks that the last line itself gave, if any.
std::string GivenText(const PagedOracle& oracle);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_SHOW_POOL_H_
