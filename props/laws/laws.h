// Laws: what holds for every cache, said without cells, ledger or twin.
//
// A law plays a history, does something that must not matter (or must matter in
// a known way), and compares what is seen. docs/laws.md lists them.

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
  std::int64_t judged = 0;  // How often the law had something to say.
  std::string wrong;        // Empty: it holds.
};

struct Law {
  std::string_view name;
  std::string_view statement;
  std::string_view rules;  // Of docs/semantics.md, "S29, S31".
  LawResult (*judge)(const History& history, const Subject& subject);
};

// All of them; the names are unique.
const std::vector<Law>& Laws();
// Null if there is none of that name.
const Law* FindLaw(std::string_view name);

// `law.judge`, with what the subject throws as a failure.
LawResult Judge(const Law& law, const History& history, const Subject& subject);

struct LawFailure {
  std::uint64_t number = 0;  // Of the seed's histories, from 0.
  History shrunk;
  std::string wrong;  // With `shrunk`.
};

struct LawRun {
  std::int64_t histories = 0;
  std::int64_t judged = 0;
  std::optional<LawFailure> failure;  // The first; the run ends with it.
};

// Judges `histories` random histories, the same for the same seed everywhere;
// fewer if it is interrupted.
LawRun RunLaw(const Law& law, const Subject& subject, std::uint64_t seed,
              std::int64_t histories);

// The shortest history that breaks the law as well. Requires: `history` does.
History ShrinkUnderLaw(const Law& law, const History& history,
                       const Subject& subject);

// "kvtwin laws --law frame --twin optimized --history 'kvt1 ...'"
std::string LawCommand(const Law& law, const History& history,
                       const Subject& subject);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_LAWS_H_
