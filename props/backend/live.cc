#include "props/backend/live.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "props/base/interrupt.h"

namespace kvtwin::props {
namespace {

// The search ends when a backend has this many findings.
constexpr std::size_t kFindingsMax = 6;

}  // namespace

std::vector<Level> LevelsOf(const BackendInfo& info) {
  std::vector<Level> levels;
  // The reference twin follows kvtwin's own rules only; its masks can do
  // without padding rows.
  const bool ours = info.rules == RulesAt(info, Level::kIdentity);
  if (info.has_cells && ours) levels.push_back(Level::kIdentity);
  levels.push_back(Level::kVisibility);
  levels.push_back(Level::kNumeric);
  return levels;
}

bool LiveResult::Right(const BackendInfo& info) const {
  // Without the claimed level, the strongest level that was tried must hold.
  const bool claimed = std::ranges::count(tried, info.claims) > 0;
  return (holds <= info.claims || (!claimed && holds == tried.front())) &&
         std::ranges::none_of(findings, IsOfBackend);
}

LiveResult FuzzLive(const FuzzOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at) {
  LiveResult result;
  for (const Level level : levels) {
    result.tried.push_back(level);
    const Subject subject = subject_at(level);
    FuzzOptions rest = options;
    for (const Failure& finding : result.findings) {
      if (IsOfBackend(finding)) rest.known.insert(finding.check);
    }
    std::int64_t operations = 0;
    double seconds = 0;
    std::int64_t ran = 0;
    std::int64_t failed = 0;  // Of these, histories with any finding.
    bool broken = false;
    bool passed_over = false;
    while (!broken && result.findings.size() < kFindingsMax) {
      const FuzzResult fuzzed = Fuzz(rest, subject);
      operations += fuzzed.operations;
      seconds += fuzzed.seconds;
      result.histories += fuzzed.histories;
      result.ran += fuzzed.ran;
      ran += fuzzed.ran;
      failed += fuzzed.known + (fuzzed.failure ? 1 : 0);
      result.known += fuzzed.known;
      for (const auto& [bucket, count] : fuzzed.passed_over) {
        result.passed_over[bucket] += count;
        failed += count;
        passed_over = true;
      }
      result.digest = fuzzed.digest;
      if (!fuzzed.failure) break;
      const Failure& failure = *fuzzed.failure;
      broken = !IsOfBackend(failure);
      // A failure of another check may shrink to a known one.
      const bool again = rest.known.contains(failure.check);
      if (again) ++result.known;
      if (!again) result.findings.push_back(failure);
      rest.known.insert({failure.found_check, failure.check});
      rest.first = failure.history_number + 1;
      rest.operations = options.operations - operations;
      rest.seconds = options.seconds - seconds;
      if (options.operations > 0 ? rest.operations <= 0 : rest.seconds <= 0) {
        break;
      }
    }
    result.operations += operations;
    result.seconds += seconds;
    if (broken && !Interrupted()) continue;
    if (broken) break;
    if (ran > failed) result.holds = level;
    if (ran > 0 && ran <= failed) result.unjudged = level;
    result.holds_but = passed_over;
    break;
  }
  return result;
}

std::string FindingText(const Failure& finding) {
  constexpr std::array<std::string_view, 3> kConventions = {
      "subject: rows", "subject: resume", "subject: result"};
  const bool may_be_convention =
      std::ranges::count(kConventions, finding.check) > 0;
  return fmt::format(
      "{}  found   history {}; shrunk from {} operations to {}\n{}",
      FailureText(finding), finding.history_number, finding.found_operations,
      finding.operations,
      may_be_convention ? "  hint    other conventions are no bug: `kvtwin "
                          "profile` works out which it follows\n"
                        : "");
}

}  // namespace kvtwin::props
