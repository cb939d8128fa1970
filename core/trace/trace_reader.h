// Reads recordings of caches and of pools from a stream.

#ifndef KVTWIN_CORE_TRACE_TRACE_READER_H_
#define KVTWIN_CORE_TRACE_TRACE_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <istream>
#include <optional>
#include <string>

#include "core/json_line.h"
#include "core/trace/paged_trace.h"
#include "core/trace/trace.h"

namespace kvtwin {

// Reads a recording line by line, and does not keep the lines.
class TraceReader {
 public:
  // With `several`, `in` is standard input and may have several recordings, one
  // after another.
  explicit TraceReader(std::istream& in, bool several = false)
      : in_(in), several_(several) {}

  // Reads the first line; must be called first. False: see error().
  bool ReadHeader();
  // Reads the next operation of a cache, or of a pool, as the header says.
  // Returns false at the end, and if there is an error.
  bool ReadOp(TraceOp& op);
  bool ReadOp(PagedTraceOp& op);
  // Skips the rest of this recording, including the rest of a line that was not
  // read to its end. True: another recording follows; call ReadHeader next.
  bool SkipToHeader();

  // The header of a recording of a cache; valid unless paged() has a value.
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
  std::string chunk_;  // Bytes after the last line, from chunk_at_ on.
  std::size_t chunk_at_ = 0;
  bool too_long_ = false;  // The rest of the last line is not yet read.
  std::int64_t line_ = 0;
  TraceHeader header_;
  std::optional<PagedTraceHeader> paged_;
  std::optional<TraceError> error_;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TRACE_TRACE_READER_H_
