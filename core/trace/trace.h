// Recordings of a cache: what it was asked, and what it answered. The format
// is kvtrace, version 1 (docs/trace_format.md), one JSON object a line.
//
// A recording comes from anywhere, so the reader trusts nothing: whatever is
// wrong with one is an error with a line and a reason that names key and value.
// What only a cache can judge (an empty batch, a call out of order) is not
// looked at here.

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

// What a recording may ask for at most: a longer line is not read, a larger
// cache not made. Where none is made, no more is kept about tokens than this.
// core/json_line.h has limits of its own.
inline constexpr std::size_t kTraceLineBytesMax = std::size_t{256} << 20;
inline constexpr double kTraceCacheBytesMax = 256 << 20;
inline constexpr double kTraceTokenBytesMax = 64 << 20;

// Where a recording is bad, counted from 1, and why.
struct TraceError {
  std::int64_t line = 0;
  std::string reason;
};

struct TraceHeader {
  std::string producer;
  bool entitlement_only = false;  // Placement "other".
  CacheSpec spec;  // With the placement, which each cache of a wrapper has.
  CacheConfig config;
  InitArgs init;
  int layers = 1;
  RowDims rows;  // Of the model; a layer may have others.
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

// At least as many bytes as a cache of this header needs for its cells, masks,
// rows of these dimensions in all layers, and so many sequences.
double CacheBytesBound(const TraceHeader& header, const RowDims& rows,
                       std::size_t sequences);

// Reads one line at a time and keeps none.
class TraceReader {
 public:
  // With `several`, recordings may follow one another.
  explicit TraceReader(std::istream& in, bool several = false)
      : in_(in), several_(several) {}

  // First. False: see error().
  bool ReadHeader();
  // The next operation, of a cache or of a pool, as the header says. False at
  // the end, and for an error.
  bool ReadOp(TraceOp& op);
  bool ReadOp(PagedTraceOp& op);
  // Passes over what is left of this recording, and of the line that it ended
  // in. True: another one follows, to begin with its header.
  bool SkipToHeader();

  // Of a cache, unless it is a pool's.
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
  std::optional<TraceError> next_error_;  // What is wrong with that one.
  std::string chunk_;  // Read, but not yet a line, from chunk_at_ on.
  std::size_t chunk_at_ = 0;
  bool too_long_ = false;  // The rest of the last line is still to come.
  std::int64_t line_ = 0;
  TraceHeader header_;
  std::optional<PagedTraceHeader> paged_;
  std::optional<TraceError> error_;
};

// Write lines that TraceReader reads back equal. Errors: what the format has no
// words for (a custom shift, a number that is not finite); nothing is written.
Status WriteTraceHeader(const TraceHeader& header, std::ostream& out);
Status WriteTraceOp(const TraceOp& op, std::ostream& out);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_TRACE_H_
