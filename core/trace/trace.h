// Recordings of a cache: the calls to it, and its answers. The format is
// kvtrace, version 1, 2 with outputs of attention, 3 with drafts, or 4 with
// prompts and pinned states (docs/trace_format.md), one JSON object per line.
//
// Recordings are untrusted input: for each fault the reader returns an error
// with a line number, and a reason that names key and value. It does not look
// for faults that only a cache can find, such as an empty batch or a call out
// of order.

#ifndef KVTWIN_CORE_TRACE_TRACE_H_
#define KVTWIN_CORE_TRACE_TRACE_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"
#include "core/json_line.h"

namespace kvtwin {

// Limits for recordings: the bytes of a line; of a cache that is made; and, if
// no cache is made, of the data kept about tokens. core/json_line.h has more
// limits.
inline constexpr std::size_t kTraceLineBytesMax = std::size_t{256} << 20;
inline constexpr double kTraceCacheBytesMax = 256 << 20;
inline constexpr double kTraceTokenBytesMax = 64 << 20;

// The line where a recording is wrong, counted from 1, and the reason.
struct TraceError {
  std::int64_t line = 0;
  std::string reason;
};

struct TraceHeader {
  int version = 1;
  std::string producer;
  bool visibility_only = false;  // Placement "other".
  CacheSpec spec;                // Each cache of a wrapper has a placement.
  CacheConfig config;
  InitArgs init;
  int layers = 1;
  RowDims rows;  // The model's dimensions; a layer may have other ones.
  // From version 2 on: the dtype to which the outputs were rounded, the error
  // of the cache's own number formats, the soft cap (0: none), and the sinks,
  // one for each query head (empty: none).
  DType attend_dtype = DType::kF32;
  double attend_tolerance = 0;
  double attend_soft_cap = 0;
  std::vector<float> attend_sinks = {};
};

enum class TraceOpKind {
  kStartForward,
  kSetCausal,
  kSetLayerType,
  kPut,
  kGet,
  kReservedMask,
  kRemove,
  kCopyPrefix,
  kCanResume,
  kEncoderCached,
  kAttend,      // From version 2 on.
  kCommit,      // From version 3 on.
  kFindPrefix,  // From version 4 on, as kCheckpoint.
  kCheckpoint,
};

// "start_forward", ...
std::string_view TraceOpName(TraceOpKind kind);

// One line. Fields that its kind does not have keep the defaults below. Tensors
// have the dtype of the cache, converted as Put does it.
struct TraceOp {
  std::int64_t line = 0;
  TraceOpKind kind = TraceOpKind::kStartForward;
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  // `multimodal`, `except`, `path` or `tokens`.
  std::vector<int> indices;
  std::vector<int> parents = {};  // Empty if there are no drafts.
  bool reserve = false;
  std::optional<std::vector<int>> cells;
  StatusCode result = StatusCode::kOk;  // start_forward, remove
  bool answer = false;                  // can_resume, encoder_cached
  int type = 0;
  int layer = 0;
  std::optional<int> first_cell;
  DenseTensor key;  // attend: the queries, [k_head_dim, heads, rows], f32.
  std::optional<DenseTensor> value;  // attend: the outputs, f32.
  std::optional<DenseTensor> mask;   // [columns, rows], in the mask dtype.
  Shape shape = {1, 1, 1, 1};        // reserved_mask
  int seq = 0;
  std::int32_t pos = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  int src = 0;
  int dst = 0;
  std::int32_t len = 0;  // copy_prefix, find_prefix
};

// Returns an upper bound of the bytes that a cache of this header needs for its
// cells, masks, sequences, and rows of these dimensions in all layers.
double CacheBytesBound(const TraceHeader& header, const RowDims& rows,
                       std::size_t sequences);

// Read the first line, and an operation, for TraceReader (trace_reader.h).
TraceHeader ReadHeaderFields(const JsonFields& fields, std::string& problem);
TraceOp ReadOpFields(const JsonFields& fields, const TraceHeader& header);

// Write lines that TraceReader reads back equal. Errors: the format cannot
// express the value (a custom shift, a number that is not finite); nothing is
// written then.
Status WriteTraceHeader(const TraceHeader& header, std::ostream& out);
Status WriteTraceOp(const TraceOp& op, std::ostream& out);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_TRACE_H_
