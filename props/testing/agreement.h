// Histories that the twins must agree on.

#ifndef KVTWIN_PROPS_TESTING_AGREEMENT_H_
#define KVTWIN_PROPS_TESTING_AGREEMENT_H_

#include <gtest/gtest.h>

#include <string>

#include "props/search/explain.h"

namespace kvtwin::props {

// Runs the optimized twin beside the ledger and the reference.
inline void ExpectAgreement(const History& history) {
  const Subject subject = TwinSubject("optimized");
  const RunResult result = RunHistory(history, subject);
  EXPECT_TRUE(result.ran) << ToText(history);
  ASSERT_FALSE(result.failure)
      << FailureText(history, *result.failure, subject);
}

inline void ExpectAgreement(const std::string& line) {
  SCOPED_TRACE(line);
  const Result<History> history = ParseHistory(line);
  ASSERT_TRUE(history.ok()) << history.status().ToString();
  ExpectAgreement(*history);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_AGREEMENT_H_
