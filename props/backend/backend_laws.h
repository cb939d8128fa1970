// The laws (props/laws/laws.h) on a third-party cache.

#ifndef KVTWIN_PROPS_BACKEND_BACKEND_LAWS_H_
#define KVTWIN_PROPS_BACKEND_BACKEND_LAWS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "props/backend/host_process.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/laws/laws.h"
#include "props/laws/pool_laws.h"

namespace kvtwin::props {

// The histories on which laws are judged.
struct LawHistories {
  std::uint64_t seed = 1;
  std::int64_t count = 200;        // Random histories for each law.
  std::optional<History> history;  // Instead of random ones.
};

// Judges a law. Uses `judge` if it is not null.
LawRun RunLawOn(const Law& law, const Subject& subject,
                const LawHistories& histories, const LawJudge& judge = nullptr);

struct LawAnswer {
  LawRun run;
  std::string why_not;  // Why the law is not judged; empty if it is.
};

// Judges laws one after another. A failure that is not about the law, such as a
// crash, is reported for the first law that meets it; other laws that meet it
// are not judged.
class BackendLaws {
 public:
  BackendLaws(const Subject& subject, const LawHistories& histories,
              LawJudge judge)
      : subject_(subject), histories_(histories), judge_(std::move(judge)) {}

  LawAnswer Run(const Law& law);

 private:
  const Subject& subject_;
  const LawHistories& histories_;
  LawJudge judge_;
  std::set<std::string> reported_;  // Checks other than laws.
};

// Returns why a law cannot judge the pools of a backend; "" if it can.
std::string WhyNotJudged(const PoolLaw& law, const PoolInfo& info);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_BACKEND_LAWS_H_
