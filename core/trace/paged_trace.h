// Recordings of a paged pool: the types of the first line and the operations,
// which differ from those of caches (docs/trace_format.md). TraceReader reads
// them.

#ifndef KVTWIN_CORE_TRACE_PAGED_TRACE_H_
#define KVTWIN_CORE_TRACE_PAGED_TRACE_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "core/dialects/pool_rules.h"
#include "core/json_line.h"
#include "core/trace/trace_fields.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

inline constexpr int kTracePoolLayersMax = 4096;  // In all groups.
inline constexpr int kTracePoolGroupsMax = 64;
inline constexpr int kTracePoolSequencesMax = 4096;  // At the same time.
// How often the same tokens may be committed: a prompt that finds the tokens
// may get the rows of any of these commits.
inline constexpr int kTracePoolCommitsMax = 1024;

struct PagedTraceHeader {
  std::string producer;
  bool visibility_only = false;  // Placement "other".
  PagedSpec spec;                // With groups, completed.
  PoolRules rules = {};          // None, unless the placement is "other".
  // Version 2: the recording may have `attend`. Version 1: none.
  std::optional<TraceAttention> attention = {};
};

enum class PagedTraceOpKind {
  kOpen,
  kFork,
  kAppend,
  kCommit,
  kTruncate,
  kFree,
  kSeqLen,
  kViews,
  kSlots,
  kTable,
  kCsr,
  kUsage,
  kMedia,   // Only in pools with groups.
  kAttend,  // From version 2 on.
};

// "open", ...
std::string_view TraceOpName(PagedTraceOpKind kind);

// One line. Fields that its kind does not have keep the defaults below. Tensors
// have the dtype of the pool, converted as Append does it.
struct PagedTraceOp {
  std::int64_t line = 0;
  PagedTraceOpKind kind = PagedTraceOpKind::kOpen;
  int seq = 0;
  int made = 0;                                 // open, fork: `result`.
  StatusCode result = StatusCode::kOk;          // append
  std::optional<std::vector<int>> tokens = {};  // commit; open: the prompt.
  PrefixKey prefix_key = {};                    // open
  int new_tokens = 0;                           // commit, without `tokens`.
  int len = 0;                                  // open, fork, truncate, seq_len
  std::optional<int> kept = {};   // fork, truncate: where it took effect (P14).
  int layer = 0;                  // append, views, attend
  std::optional<int> start = {};  // append, views: first position.
  // append; views with rows. attend: the queries, [k_head_dim, heads, rows].
  std::optional<DenseTensor> key = {};
  // As `key`. attend: the outputs. Both are then f32.
  std::optional<DenseTensor> value = {};
  std::optional<std::vector<int>> blocks = {};  // views
  // views of states: the position of each.
  std::optional<std::vector<int>> positions = {};
  int group = 0;           // slots, table, csr
  PrefixMedia media = {};  // media
  int begin = 0;           // slots
  std::vector<int> slots = {};
  std::vector<int> sequences = {};   // table, csr, attend
  std::vector<int> query_rows = {};  // attend: of each sequence.
  double soft_cap = 0;               // attend; 0: none.
  std::vector<float> sinks = {};     // attend, of each head; empty: none.
  PagedTable table = {};
  PagedCsr csr = {};
  PagedUsage usage = {};
};

// Read the first line, and an operation, for TraceReader.
PagedTraceHeader ReadPagedHeader(const JsonFields& fields, int version,
                                 std::string& problem);
PagedTraceOp ReadPagedOp(const JsonFields& fields,
                         const PagedTraceHeader& header);

// Returns the operation as TraceReader reads its line. `op` has f32 tensors.
// Errors: an operation that no line can hold.
Result<PagedTraceOp> AsRead(PagedTraceOp op, const PagedTraceHeader& header);

// Write lines, like the functions for caches (core/trace/trace.h). Errors: a
// number that is not finite, a prefix key that is not text.
Status WriteTraceHeader(const PagedTraceHeader& header, std::ostream& out);
Status WriteTraceOp(const PagedTraceOp& op, std::ostream& out);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_PAGED_TRACE_H_
