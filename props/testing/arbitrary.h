// RapidCheck generators on top of generate.h: histories that shrink by
// themselves and print as one line.

#ifndef KVTWIN_PROPS_TESTING_ARBITRARY_H_
#define KVTWIN_PROPS_TESTING_ARBITRARY_H_

#include <rapidcheck/gtest.h>

#include <optional>
#include <ostream>

#include "props/compare/runner.h"
#include "props/history/generate.h"
#include "props/search/explain.h"

namespace kvtwin::props {

inline void showValue(const History& history, std::ostream& out) {
  out << ToText(history);
}

inline int PickByRapidCheck(int lo, int hi) {
  return *rc::gen::inRange(lo, hi + 1);
}

inline rc::Gen<History> ArbitraryHistory(std::optional<Kind> kind,
                                         int ops_max) {
  return rc::gen::exec([kind, ops_max] {
    const int ops = *rc::gen::inRange(1, ops_max + 1);
    return DrawHistory(PickByRapidCheck, kind, ops);
  });
}

// Fails with the text of the shrunk failure.
inline void AssertAgreement(const History& history, const Subject& subject) {
  const RunResult result = RunHistory(history, subject);
  if (!result.failure) return;
  RC_FAIL(FailureText(history, *result.failure, subject));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_ARBITRARY_H_
