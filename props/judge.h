// Judges whole recordings, of caches and of pools.

#ifndef KVTWIN_PROPS_JUDGE_H_
#define KVTWIN_PROPS_JUDGE_H_

#include <cstdint>
#include <functional>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace.h"
#include "props/level.h"
#include "props/oracle.h"
#include "props/paged_oracle.h"

namespace kvtwin::props {

enum class Verdict { kAccept, kReject, kBadInput };
std::string_view VerdictName(Verdict verdict);

struct Judgement {
  Verdict verdict = Verdict::kAccept;
  Level level = Level::kNone;  // The strongest that held to the end.
  std::int64_t line = 0;       // The first wrong one; 0 if accepted.
  std::string reason;          // Empty if accepted.
  std::string twin;            // The one that disagrees, unless all do.
};

// Called after each line that a cache can be asked; false stops.
struct OracleWatch {
  std::function<bool(const Oracle& oracle, const TraceOp& op,
                     const OracleStep& step)>
      cache;
  std::function<bool(const PagedOracle& oracle, const PagedTraceOp& op,
                     const OracleStep& step)>
      pool;
};

// With `watch`, goes on behind what is wrong.
Judgement Judge(TraceReader& reader, const std::vector<std::string>& twins,
                const OracleWatch& watch = {});
Judgement Judge(std::istream& in, const std::vector<std::string>& twins,
                const OracleWatch& watch = {});

// Opens the file for `judge`; what goes wrong on the way is bad input too.
Judgement OnFile(const std::string& path,
                 const std::function<Judgement(std::istream&)>& judge);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_JUDGE_H_
