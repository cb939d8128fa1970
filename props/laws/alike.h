// The basis of most laws: two caches that must show the same.

#ifndef KVTWIN_PROPS_LAWS_ALIKE_H_
#define KVTWIN_PROPS_LAWS_ALIKE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "props/laws/laws.h"
#include "props/laws/session.h"

namespace kvtwin::props {

// The laws, by subject.
std::vector<Law> SequenceLaws();
std::vector<Law> PassLaws();
Law LegalClientLaw();
std::vector<Law> StorageLaws();
std::vector<Law> StateLaws();
std::vector<Law> DraftLaws();

enum class Alike {
  kBytes,   // The same cells and the same bytes.
  kTokens,  // The same tokens, and each query sees the same rows.
};

// Returns the result of a law that does not hold.
LawResult Violation(std::string text);

// Returns the first difference, if any. Reads both caches and changes nothing.
// `slack` is for K rows (CompareRows).
std::optional<std::string> Compare(Session& left, Session& right, Alike alike,
                                   double slack);

// Plays call `i` of the script. Both sides must return the same answer.
using Play = std::function<Answer(Session& session, const Script& script,
                                  std::size_t i)>;
Answer PlayPlain(Session& session, const Script& script, std::size_t i);
// Whether right caches may answer the call like this and like that: at
// visibility CanResume may say no where it could say yes, and what is refused
// may be so for another reason.
bool MayDiffer(const Session& session, const Call& call, const Answer& a,
               const Answer& b);

struct Match {
  Alike alike = Alike::kBytes;
  double slack = 0;
  // StartForward may be refused on the left only: the match ends there.
  bool more_room = false;
};

// Plays the script on both sessions, comparing after every call and, by Look,
// at the end. `judged` counts the additional calls of one side or, if there are
// none, the comparisons.
LawResult Matched(const Script& script, std::optional<Session> left,
                  std::optional<Session> right, const Match& match,
                  const Play& play_left, const Play& play_right);

// Matches two sessions with the script's own setup. Compares tokens where a
// cache does not list its cells.
LawResult MatchedBytes(const Script& script, const Subject& subject,
                       const Play& changed);

// Whether the caches can be compared after call `i`: no rows of its batch are
// still to come.
bool AtRest(const Script& script, std::size_t i);
// The Puts that belong to the StartForward `start`.
std::vector<Call> PutsOf(const Script& script, std::size_t start);

// Returns the script without the calls that the reference refused.
Script WithoutRefused(Script script);
// Returns the history without operations of these kinds.
History Without(History history, std::initializer_list<OpKind> kinds);
// Returns the history, played by a legal client (Setup::legal).
History Legal(History history);

// The sizes of one cache (S2 to S4). Unset means unbounded.
struct Limits {
  std::optional<std::int64_t> window;
  std::optional<std::int64_t> memory;
  std::int64_t cells = 0;
};
Limits LimitsOf(const CacheSpec& spec, const Setup& setup);
// Returns the lowest position that a query at `position` may see (S16).
std::int64_t LowestSeen(const CacheSpec& spec, const Setup& setup,
                        std::int64_t position);

// Calls `change` with the spec of each cache except encoders.
void ForEachCausal(Setup& setup, const std::function<void(CacheSpec&)>& change);
// Returns the setup with more cells and the same eviction.
Setup WithMoreRoom(Setup setup);
// Returns the setup with room for `tokens` more tokens and without eviction.
Setup WithoutEviction(Setup setup, std::int64_t tokens);

// Returns "after call 3, Remove(0, 1, 2): text".
std::string After(const Script& script, std::size_t i, const std::string& text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_ALIKE_H_
