// Recordings of a cache: what it was asked, and what it answered. The format
// is kvtrace, version 1 (docs/trace_format.md), one JSON object a line.
//
// A recording comes from anywhere, so the reader trusts nothing: each fault is
// an error with a line, and a reason that names key and value. The reader does
// not look for faults that only a cache can judge, such as an empty batch or a
// call out of order.

#ifndef KVTWIN_CORE_TRACE_TRACE_H_
#define KVTWIN_CORE_TRACE_TRACE_H_

#include <cstdint>
#include <functional>
#include <istream>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"
#include "core/json_line.h"
#include "core/trace/paged_trace.h"

namespace kvtwin {

// The most that a recording may ask for. A longer line is not read, a larger
// cache is not made; where no cache is made, no more is kept about tokens.
// core/json_line.h has more limits.
inline constexpr std::size_t kTraceLineBytesMax = std::size_t{256} << 20;
inline constexpr double kTraceCacheBytesMax = 256 << 20;
inline constexpr double kTraceTokenBytesMax = 64 << 20;

// Says where a recording is bad, counted from 1, and why.
struct TraceError {
  std::int64_t line = 0;
  std::string reason;
};

struct TraceHeader {
  std::string producer;
  bool visibility_only = false;  // Placement "other".
  CacheSpec spec;                // Each cache of a wrapper has its placement.
  CacheConfig config;
  InitArgs init;
  int layers = 1;
  RowDims rows;  // The model's; a layer may have others.
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
};

// "start_forward", ...
std::string_view TraceOpName(TraceOpKind kind);

// One line. Fields that its kind does not have stay as they are here. Tensors
// have the dtype of the cache, converted as Put does it.
struct TraceOp {
  std::int64_t line = 0;
  TraceOpKind kind = TraceOpKind::kStartForward;
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::vector<int> indices;  // `multimodal` or `except`.
  bool reserve = false;
  std::optional<std::vector<int>> cells;
  StatusCode result = StatusCode::kOk;  // start_forward, remove
  bool answer = false;                  // can_resume, encoder_cached
  int type = 0;
  int layer = 0;
  std::optional<int> first_cell;
  DenseTensor key;
  std::optional<DenseTensor> value;
  std::optional<DenseTensor> mask;  // [columns, rows], of the mask dtype.
  Shape shape = {1, 1, 1, 1};       // reserved_mask
  int seq = 0;
  std::int32_t pos = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  int src = 0;
  int dst = 0;
  std::int32_t len = 0;
};

// Returns at least as many bytes as a cache of this header needs for its cells,
// masks, sequences, and rows of these dimensions in all layers.
double CacheBytesBound(const TraceHeader& header, const RowDims& rows,
                       std::size_t sequences);

// Reads one line at a time and keeps none.
class TraceReader {
 public:
  // With `several`, recordings may follow one another.
  explicit TraceReader(std::istream& in, bool several = false)
      : in_(in), several_(several) {}

  // Comes first. False: see error().
  bool ReadHeader();
  // Reads the next operation of a cache, or of a pool, as the header says.
  // False at the end, and for an error.
  bool ReadOp(TraceOp& op);
  bool ReadOp(PagedTraceOp& op);
  // Skips the rest of this recording, and of the line that it ended in. True:
  // another recording follows; its header is next.
  bool SkipToHeader();

  // The header of a cache, unless there is one of a pool.
  const TraceHeader& header() const { return header_; }
  const std::optional<PagedTraceHeader>& paged() const { return paged_; }
  const std::optional<TraceError>& error() const { return error_; }

 private:
  bool ReadLine(std::string& text);
  bool PassRestOfLine();
  bool ReadChunk();
  bool KeepLongHeader(const std::string& text);
  bool ReadObject(const std::function<void(const JsonFields&)>& read);
  bool Fail(std::string reason);

  std::istream& in_;
  const bool several_;
  std::string next_header_;  // Read ahead, by ReadOp or SkipToHeader.
  std::optional<TraceError> next_error_;  // The fault of next_header_.
  std::string chunk_;  // Read, but not yet a line, from chunk_at_ on.
  std::size_t chunk_at_ = 0;
  bool too_long_ = false;  // The rest of the last line is still to come.
  std::int64_t line_ = 0;
  TraceHeader header_;
  std::optional<PagedTraceHeader> paged_;
  std::optional<TraceError> error_;
};

// Write lines that TraceReader reads back equal. Errors: the format cannot say
// it (a custom shift, a number that is not finite); then nothing is written.
Status WriteTraceHeader(const TraceHeader& header, std::ostream& out);
Status WriteTraceOp(const TraceOp& op, std::ostream& out);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_TRACE_H_
