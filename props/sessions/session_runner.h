// Runs and shrinks histories of sessions (props/sessions/session_history.h).

#ifndef KVTWIN_PROPS_SESSIONS_SESSION_RUNNER_H_
#define KVTWIN_PROPS_SESSIONS_SESSION_RUNNER_H_

#include <functional>

#include "props/compare/runner.h"
#include "props/sessions/session_history.h"

namespace kvtwin::props {

inline constexpr const char* kSessionsCheck = "sessions";

// Plays a history with the sessions and the cache of a twin, beside those of
// the reference. The calls are the trace of a failure.
RunResult RunHistory(const SessionHistory& history, const Subject& subject,
                     RunOptionsOf<PlayCounts> options = {});

// The same with other sessions, for tests.
RunResult RunSessions(const SessionHistory& history, const SessionsMaker& make,
                      const PlayOptions& play, PlayCounts* counts = nullptr);

// Returns the shortest failing history, with the fewest and smallest numbers,
// that is found in the subject's `shrink_seconds`.
using RefusesSessions =
    std::function<bool(const SessionHistory&, const Failure&)>;
SessionHistory Shrink(const SessionHistory& history, const Subject& subject,
                      const RefusesSessions& refuses = nullptr);
// `run` returns the failure of a history.
SessionHistory ShrinkSessions(
    const SessionHistory& history,
    const std::function<std::optional<Failure>(const SessionHistory&)>& run);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_SESSION_RUNNER_H_
