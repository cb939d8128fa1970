// What laws are made of: two caches that must show the same.

#ifndef KVTWIN_PROPS_LAWS_ALIKE_H_
#define KVTWIN_PROPS_LAWS_ALIKE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "props/laws/laws.h"
#include "props/laws/session.h"

namespace kvtwin::props {

// The laws, by what they are about.
std::vector<Law> SequenceLaws();
std::vector<Law> PassLaws();
Law LegalClientLaw();
std::vector<Law> StorageLaws();

enum class Alike {
  kBytes,   // The same cells and the same bytes.
  kTokens,  // The same tokens, and each query sees the same.
};

// The first difference, if any; reads both and changes nothing. `slack` is for
// K rows (CompareRows).
std::optional<std::string> Compare(Session& left, Session& right, Alike alike,
                                   double slack);

// Plays call `i` of the script; the answer is what the other side must answer
// too.
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
  // The left side's StartForward may be refused where the right side's is
  // not: the match ends there.
  bool more_room = false;
};

// Plays the script on both, comparing after every call and, by Look, at the
// end. Judged is each call that one of them was asked beyond the script, or,
// if there is none, each comparison.
LawResult Matched(const Script& script, std::optional<Session> left,
                  std::optional<Session> right, const Match& match,
                  const Play& play_left, const Play& play_right);

// Both with the script's own setup. Where cells cannot be asked, tokens are
// compared.
LawResult MatchedBytes(const Script& script, const Subject& subject,
                       const Play& changed);

// Whether call `i` completes something that can be compared: no rows of its
// batch are still to come.
bool AtRest(const Script& script, std::size_t i);
// The Puts that belong to the StartForward `start`.
std::vector<Call> PutsOf(const Script& script, std::size_t start);

// Without the calls that the reference refused.
Script WithoutRefused(Script script);
// Without operations of these kinds.
History Without(History history, std::initializer_list<OpKind> kinds);
// Played by a client as in Setup::legal.
History Legal(History history);

// S2 to S4, for one cache. Unset: unbounded.
struct Limits {
  std::optional<std::int64_t> window;
  std::optional<std::int64_t> memory;
  std::int64_t cells = 0;
};
Limits LimitsOf(const CacheSpec& spec, const Setup& setup);
// The lowest position that a query at `position` may see (S16).
std::int64_t LowestSeen(const CacheSpec& spec, const Setup& setup,
                        std::int64_t position);

// Calls `change` with the spec of each cache but encoders.
void ForEachCausal(Setup& setup, const std::function<void(CacheSpec&)>& change);
// With more cells; what is evicted stays the same.
Setup WithMoreRoom(Setup setup);
// With room for `tokens` more tokens, none of which is ever evicted.
Setup WithoutEviction(Setup setup, std::int64_t tokens);

// "after call 3, Remove(0, 1, 2): text"
std::string After(const Script& script, std::size_t i, const std::string& text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_ALIKE_H_
