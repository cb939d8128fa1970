#include "core/trace/trace_reader.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "core/index.h"

namespace kvtwin {
namespace {

bool IsPaged(const JsonFields& fields) {
  const JsonValue* cache = fields.Find("cache");
  const JsonValue* type = cache == nullptr ? nullptr : cache->Find("type");
  return type != nullptr && type->text == "paged";
}

bool LooksLikeHeader(std::string_view line) {
  return line.find("\"kvtrace\"") != line.npos;
}

}  // namespace

bool TraceReader::Fail(std::string reason) {
  error_ = TraceError{line_, std::move(reason)};
  return false;
}

bool TraceReader::ReadChunk() {
  constexpr std::size_t kChunkBytes = 1 << 16;
  chunk_.resize(kChunkBytes);
  in_.read(chunk_.data(), static_cast<std::streamsize>(kChunkBytes));
  chunk_.resize(AsSize(in_.gcount()));
  chunk_at_ = 0;
  return !chunk_.empty();
}

// Skips the rest of a line that exceeds the limit. Returns false if the next
// kTraceLineBytesMax bytes have no line end.
bool TraceReader::PassRestOfLine() {
  std::size_t end = chunk_.find('\n', chunk_at_);
  for (std::size_t passed = 0; end == chunk_.npos; end = chunk_.find('\n')) {
    passed += chunk_.size();
    if (passed > kTraceLineBytesMax || !ReadChunk()) return false;
  }
  chunk_at_ = end + 1;
  too_long_ = false;
  return true;
}

bool TraceReader::ReadLine(std::string& text) {
  text.clear();
  if (error_) return false;
  if (too_long_ && !PassRestOfLine()) {
    return in_.bad() ? Fail("cannot be read") : false;
  }
  ++line_;
  while (true) {
    const std::size_t end = chunk_.find('\n', chunk_at_);
    text.append(chunk_, chunk_at_, end - chunk_at_);
    chunk_at_ = end + 1;
    if (text.size() > kTraceLineBytesMax) {
      too_long_ = end == chunk_.npos;
      return Fail(
          fmt::format("the line is longer than {} bytes", kTraceLineBytesMax));
    }
    if (end != chunk_.npos) return true;
    const bool more = ReadChunk();
    if (in_.bad()) return Fail("cannot be read");
    if (!more) return !text.empty();
  }
}

bool TraceReader::ReadHeader() {
  std::string text = std::exchange(next_header_, "");
  if (next_error_) error_ = std::exchange(next_error_, std::nullopt);
  if (error_) return false;
  if (text.empty() && !ReadLine(text)) {
    if (error_) return false;
    return Fail(several_ ? "standard input is empty: did the program that "
                           "writes it answer any history?"
                         : "the file is empty");
  }
  JsonValue object;
  std::string problem = ParseJsonLine(text, object);
  if (!problem.empty()) return Fail(problem);
  const JsonFields fields(object, "", problem);
  if (fields.Find("kvtrace") == nullptr && fields.Find("op") != nullptr) {
    return Fail("an op comes before the header");
  }
  const JsonValue* version = fields.Need("kvtrace");
  const double latest = IsPaged(fields) ? 2 : 4;
  if (version != nullptr && (version->type != JsonValue::Type::kInteger ||
                             version->number < 1 || version->number > latest)) {
    fields.Wrong("kvtrace", *version, latest == 2 ? "1 or 2" : "1, 2, 3 or 4");
  }
  paged_.reset();
  if (problem.empty() && IsPaged(fields)) {
    paged_ =
        ReadPagedHeader(fields, static_cast<int>(version->number), problem);
  } else if (problem.empty()) {
    header_ = ReadHeaderFields(fields, problem);
    header_.version = static_cast<int>(version->number);
  }
  if (!problem.empty()) return Fail(problem);
  return true;
}

bool TraceReader::ReadOp(TraceOp& op) {
  return ReadObject([&](const JsonFields& fields) {
    op = ReadOpFields(fields, header_);
    op.line = line_;
  });
}

bool TraceReader::ReadOp(PagedTraceOp& op) {
  return ReadObject([&](const JsonFields& fields) {
    op = ReadPagedOp(fields, *paged_);
    op.line = line_;
  });
}

bool TraceReader::ReadObject(
    const std::function<void(const JsonFields&)>& read) {
  std::string text;
  if (!ReadLine(text)) {
    if (several_) KeepLongHeader(text);
    return false;
  }
  if (IsBlank(text)) {  // Only more blank lines may follow.
    const std::int64_t blank = line_;
    while (IsBlank(text) && ReadLine(text)) {
    }
    if (error_ || IsBlank(text)) return false;
    if (!several_ || !LooksLikeHeader(text)) {
      line_ = blank;
      return Fail("an empty line");
    }
  }
  JsonValue object;
  std::string problem = ParseJsonLine(text, object);
  if (!problem.empty()) return Fail(problem);
  const JsonFields fields(object, "", problem);
  if (fields.Find("kvtrace") != nullptr) {
    if (!several_) return Fail("a second header");
    next_header_ = std::move(text);
    return false;
  }
  read(fields);
  if (!problem.empty()) return Fail(problem);
  return true;
}

// Keeps the beginning of a header line that is too long.
bool TraceReader::KeepLongHeader(const std::string& text) {
  if (text.size() <= kTraceLineBytesMax || !LooksLikeHeader(text)) return false;
  next_header_ = "{";
  next_error_ = std::exchange(error_, std::nullopt);
  return true;
}

bool TraceReader::SkipToHeader() {
  std::string text;
  while (next_header_.empty()) {
    error_.reset();
    if (ReadLine(text)) {
      if (LooksLikeHeader(text)) next_header_ = std::move(text);
    } else if (!KeepLongHeader(text) && text.size() <= kTraceLineBytesMax) {
      return false;
    }
  }
  return true;
}

}  // namespace kvtwin
