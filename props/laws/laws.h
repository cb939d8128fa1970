// Laws: statements that hold for every cache. Few of them look at cells or use
// the ledger.
//
// A law plays a history, does something that must not matter (or must matter in
// a known way), and compares what the caches show. docs/laws.md lists them.

#ifndef KVTWIN_PROPS_LAWS_LAWS_H_
#define KVTWIN_PROPS_LAWS_LAWS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

struct LawResult {
  std::int64_t judged = 0;  // How many times the law was checked.
  std::string wrong;        // Empty if the law holds.
};

struct Law {
  std::string_view name;
  std::string_view statement;
  std::string_view rules;  // Rules of docs/semantics.md: "S29, S31".
  LawResult (*judge)(const History& history, const Subject& subject);
};

// Returns all laws; their names are unique.
const std::vector<Law>& Laws();
// Returns null if no law has that name.
const Law* FindLaw(std::string_view name);

// Calls `law.judge`; an exception of the subject is a failure.
LawResult Judge(const Law& law, const History& history, const Subject& subject);

struct LawFailure {
  std::uint64_t number = 0;  // The number of the history, from 0.
  History shrunk;
  std::string wrong;  // The failure of `shrunk`.
};

struct LawRun {
  std::int64_t histories = 0;
  std::int64_t judged = 0;
  std::optional<LawFailure> failure;  // The first failure, which ends the run.
};

// Judges `histories` random histories, the same for the same seed everywhere;
// fewer if the run is interrupted.
LawRun RunLaw(const Law& law, const Subject& subject, std::uint64_t seed,
              std::int64_t histories);

// Returns the shortest history that also breaks the law. Requires: `history`
// breaks it.
History ShrinkUnderLaw(const Law& law, const History& history,
                       const Subject& subject);

// Returns "kvtwin laws --law frame --twin optimized --history 'kvt1 ...'".
std::string LawCommand(const Law& law, const History& history,
                       const Subject& subject);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_LAWS_H_
