// Judges whole recordings of caches and of pools.

#ifndef KVTWIN_PROPS_ORACLE_JUDGE_H_
#define KVTWIN_PROPS_ORACLE_JUDGE_H_

#include <cstdint>
#include <functional>
#include <istream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "props/base/level.h"
#include "props/compare/failure.h"
#include "props/oracle/oracle.h"
#include "props/oracle/paged_oracle.h"

namespace kvtwin::props {

enum class Verdict { kAccept, kReject, kBadInput };
std::string_view VerdictName(Verdict verdict);

// How much of a recording was judged, up to the line where judging ended.
struct Judged {
  std::int64_t calls = 0;         // Lines after the header.
  std::int64_t answers = 0;       // Lines with an answer that was compared.
  std::int64_t gets = 0;          // Lines with `get` or `views`.
  std::int64_t without_v = 0;     // Those of them that have K rows alone.
  std::int64_t with_unknown = 0;  // Those with tokens that were never put.
  std::int64_t rows = 0;          // K rows in these lines, of one layer each.
  std::int64_t outputs = 0;       // Lines with `attend`.
  std::int64_t output_rows = 0;   // Their rows, and those that were judged.
  std::int64_t output_rows_judged = 0;
  std::int64_t refusals = 0;     // Answers such as cache_full, compared or not.
  std::int64_t prefix_hits = 0;  // Lines with an `open` that found a prefix.
};

struct Judgement {
  Level level = Level::kNone;  // The strongest level that held to the end.
  std::optional<Failure> failure = {};  // The first wrong answer.
  // The first line that is not in the format, perhaps after a wrong answer.
  std::optional<TraceError> bad_input = {};
  Judged judged = {};

  Verdict verdict() const;
  // Returns the first wrong line; 0 if the recording is accepted, or cannot be
  // read at all.
  std::int64_t line() const;
  // Returns why the recording is not accepted. Of an accepted recording, says
  // so if nothing was judged; otherwise empty.
  std::string reason() const;
};

// "12 lines: 3 gets of 40 rows, 1 refusal, 2 prefixes found".
std::string JudgedText(const Judged& judged);

// Called after each line that is not bad input; returning false stops.
struct OracleWatch {
  std::function<bool(const Oracle& oracle, const TraceOp& op,
                     const OracleStep& step)>
      cache;
  std::function<bool(const PagedOracle& oracle, const PagedTraceOp& op,
                     const OracleStep& step)>
      pool;
};

// Judges a recording. With `watch`, continues after a wrong line.
Judgement Judge(TraceReader& reader, const std::vector<std::string>& twins,
                const OracleWatch& watch = {});
Judgement Judge(std::istream& in, const std::vector<std::string>& twins,
                const OracleWatch& watch = {});

// Judges calls of a pool, as AsRead returns them, as if they were the lines of
// a recording. Each has its line.
Judgement Judge(const PagedTraceHeader& header,
                std::span<const PagedTraceOp> ops,
                const std::vector<std::string>& twins);

// Opens the file for `judge`. A file that cannot be read is bad input too.
Judgement OnFile(const std::string& path,
                 const std::function<Judgement(std::istream&)>& judge);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_JUDGE_H_
