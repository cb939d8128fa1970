// Laws: statements that hold for every cache. Few of them look at cells or use
// the ledger.
//
// A law plays a history, does something that must not matter (or must matter in
// a known way), and compares what the caches show. docs/laws.md lists them.

#ifndef KVTWIN_PROPS_LAWS_LAWS_H_
#define KVTWIN_PROPS_LAWS_LAWS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

struct LawResult {
  std::int64_t judged = 0;  // How many times the law was checked.
  // Its check is the law's name, or that of another failure: "backend: crash".
  std::optional<Failure> failure = {};
};

// Requirements of laws on third-party caches, beyond the calls of a history.
enum LawNeeds : unsigned {
  kNeedsCells = 1U << 0,     // The level of identity: it compares cells.
  kNeedsOurs = 1U << 1,      // A twin: no other may be called after Close.
  kNeedsLook = 1U << 2,      // Masks of passes that only reserve.
  kNeedsSnapshot = 1U << 3,  // And Restore.
  kNeedsResume = 1U << 4,    // CanResume.
  kNeedsCausal = 1U << 5,    // SetCausal.
  // An ability of kvtwin_ability, as the backend's table says.
  kNeedsRemove = 1U << 6,
  kNeedsMiddle = 1U << 7,
  kNeedsCopy = 1U << 8,
  kNeedsReserve = 1U << 9,
  kNeedsAnyOrder = 1U << 10,
  kNeedsMisuse = 1U << 11,
  kNeedsPoison = 1U << 12,
  kNeedsAnySequence = 1U << 13,
  kNeedsStates = 1U << 14,  // Recurrent caches.
  kNeedsDrafts = 1U << 15,  // Drafts; and these may follow any draft.
  kNeedsTrees = 1U << 16,
  kNeedsHybrids = 1U << 17,
  kNeedsTokens = 1U << 18,  // Masks that show tokens, not states (R6).
};

struct Law {
  std::string_view name;
  std::string_view statement;
  std::string_view rules;  // Rules of docs/semantics.md: "S29, S31".
  LawResult (*judge)(const History& history, const Subject& subject);
  unsigned needs = 0;  // Flags of LawNeeds.
};

// Returns all laws; their names are unique.
const std::vector<Law>& Laws();
// Returns null if no law has that name.
const Law* FindLaw(std::string_view name);

// Says what a third-party cache lacks that the law needs: "the backend has no
// can_resume". Empty: the law is judged.
std::string WhyNotJudged(const Law& law, const Subject& subject);

// Returns why a law, which can judge the subject, judged none of `count` random
// histories, or not `history`.
std::string WhyNoneJudged(const Law& law, const Subject& subject,
                          std::uint64_t seed,
                          const std::optional<History>& history,
                          std::int64_t count);

// Calls `law.judge`; an exception of the subject is a failure. A third-party
// cache gets only the calls that it says that it has: where a law would make
// another call, or the rules leave open what a correct cache answers, the
// history is not judged any further.
LawResult Judge(const Law& law, const History& history, const Subject& subject);

// Judges a law in another process, with a shorter timeout if the history is
// known to hang.
using LawJudge = std::function<LawResult(const Law& law, const History& history,
                                         bool known_to_hang)>;

struct LawRun {
  std::int64_t histories = 0;
  std::int64_t judged = 0;
  // The first failure, which ends the run: its check and text. `shrunk` is the
  // shortest history that shows it.
  std::optional<Failure> failure = {};
  History shrunk = {};
};

// Judges `histories` random histories, the same for the same seed everywhere;
// fewer if the run is interrupted. Uses `judge` if it is not null.
LawRun RunLaw(const Law& law, const Subject& subject, std::uint64_t seed,
              std::int64_t histories, const LawJudge& judge = nullptr);

// Returns the shortest history that also breaks the law. Requires: `history`
// breaks it.
History ShrinkUnderLaw(const Law& law, const History& history,
                       const Subject& subject, const LawJudge& judge = nullptr);

// Returns "kvtwin laws --law frame --twin optimized --history 'kvt1 ...'".
std::string LawCommand(const Law& law, const History& history,
                       const Subject& subject);
// As above, with the name of the law and the line of the history.
std::string LawCommand(std::string_view law, const std::string& history,
                       const Subject& subject);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_LAWS_H_
