// The certificate of a third-party pool.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "props/base/interrupt.h"
#include "props/certify/certificate.h"
#include "props/compare/failure.h"
#include "props/laws/pool_laws.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {
namespace {

// The results of one subject, on pools without groups and, if the backend
// declares groups, on pools with them.
struct Tried {
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  std::int64_t judged = 0;
  bool of_groups = false;       // Pools with groups were made.
  bool stored_nothing = false;  // With groups, or without.
  PagedCoverageCounts counts;
  std::vector<PagedFuzzResult> failed;
};

Tried Try(const FuzzOptions& options, const PoolInfo& info,
          const Subject& subject) {
  Tried tried;
  for (const bool groups : {false, true}) {
    if ((groups && !info.groups) || Interrupted()) continue;
    FuzzOptions of = options;
    of.groups = groups;
    PagedFuzzResult result = FuzzPools(of, subject);
    tried.operations += result.counts.operations;
    tried.histories += result.ran;
    tried.judged += result.judged;
    tried.stored_nothing |= result.counts.StoredNothing();
    tried.counts.Add(result.counts);
    tried.of_groups = tried.of_groups || (groups && result.ran > 0);
    if (result.failure) tried.failed.push_back(std::move(result));
  }
  return tried;
}

CertifiedLevel LevelOf(std::string_view name, const Tried& tried) {
  if (!tried.failed.empty()) {
    return {std::string(name), Outcome::kBroken,
            "broken: " + tried.failed[0].failure->text};
  }
  if (tried.histories == 0) {
    return {std::string(name), Outcome::kNotJudged,
            "not judged: the backend supports none of the pools"};
  }
  if (tried.stored_nothing) {
    return {std::string(name), Outcome::kNotJudged,
            "not judged: no append to all layers succeeded"};
  }
  return {std::string(name), Outcome::kHolds, "holds"};
}

CertifiedLaw LawOf(
    const PoolLaw& law, const Tried& tried, std::string why_not,
    const std::function<std::string(const PagedHistory&)>& rerun) {
  CertifiedLaw certified{.name = std::string(law.name),
                         .rules = std::string(law.rules),
                         .histories = tried.histories,
                         .judged = tried.judged};
  if (tried.histories == 0) {
    if (why_not.empty()) why_not = "no history of the law has a pool";
    certified.text = std::move(why_not);
    return certified;
  }
  if (tried.failed.empty()) {
    if (tried.judged > 0) {
      certified.outcome = Outcome::kHolds;
    } else {
      certified.text = "no history has what the law judges";
    }
    return certified;
  }
  certified.outcome = Outcome::kBroken;
  certified.text = tried.failed[0].failure->text;
  certified.rerun = rerun(tried.failed[0].shrunk);
  return certified;
}

void AddMarks(const PagedCoverageCounts& counts, bool at_identity,
              Certificate& certificate) {
  certificate.marks = {{"found", counts.found},
                       {"truncated", counts.truncated},
                       {"full", counts.full}};
  if (!at_identity) return;
  certificate.marks["copied"] = counts.copied;
  certificate.marks["evicted"] = counts.evicted;
}

}  // namespace

Certificate CertifyPool(
    const PoolInfo& info, const CertifyOptions& options,
    const std::function<Subject(Level, const PoolLaw*)>& subject_at,
    const std::function<std::string(const PoolLaw&, const PagedHistory&,
                                    const Subject&)>& rerun_law) {
  Certificate certificate{.backend = info.name,
                          .profile = "pools of kvtwin",
                          .claims = std::string(LevelName(info.claims)),
                          .seed = static_cast<std::int64_t>(options.fuzz.seed),
                          .not_declared = info.not_declared};
  Tried claimed;
  for (const Level level :
       {Level::kIdentity, Level::kVisibility, Level::kAttention}) {
    const bool can = std::ranges::count(info.levels, level) > 0;
    if (level == Level::kAttention && !can) continue;
    if (!can) {
      certificate.levels.push_back({std::string(LevelName(level)),
                                    Outcome::kNotJudged,
                                    "not judged: it is not claimed"});
      continue;
    }
    Tried tried = Try(options.fuzz, info, subject_at(level, nullptr));
    certificate.levels.push_back(LevelOf(LevelName(level), tried));
    certificate.operations += tried.operations;
    certificate.histories += tried.histories;
    for (const PagedFuzzResult& result : tried.failed) {
      certificate.findings.push_back(FindingOf(level, *result.failure));
    }
    if (level == info.claims) claimed = std::move(tried);
  }
  certificate.none_made =
      certificate.histories == 0 && certificate.findings.empty();
  AddMarks(claimed.counts, info.claims == Level::kIdentity, certificate);
  const bool holds = claimed.histories > 0 && claimed.failed.empty() &&
                     !claimed.stored_nothing;
  if (holds) {
    const int last = claimed.of_groups ? 18 : 11;
    for (int rule = 1; rule <= last; ++rule) {
      // Views were not compared at the level attention (P7).
      if (rule == 7 && info.claims == Level::kAttention) continue;
      // Places and misuse are judged at identity only.
      const bool by_identity = rule == 4 || rule == 11;
      if (by_identity && info.claims != Level::kIdentity) continue;
      certificate.rules.push_back(fmt::format("P{}", rule));
    }
    if (std::ranges::count(info.levels, Level::kAttention) > 0) {
      certificate.rules.emplace_back("P19");
    }
  }
  FuzzOptions of_laws = options.fuzz;
  of_laws.operations = options.laws.count * kPoolLawOperations;
  for (const PoolLaw& law : PoolLaws()) {
    if (claimed.histories == 0 || Interrupted()) break;
    const Subject subject = subject_at(info.claims, &law);
    std::string why_not = WhyNotJudged(law, info);
    const Tried tried = why_not.empty() ? Try(of_laws, info, subject) : Tried();
    certificate.laws.push_back(
        LawOf(law, tried, std::move(why_not), [&](const PagedHistory& history) {
          return rerun_law(law, history, subject);
        }));
  }
  certificate.right =
      holds &&
      std::ranges::none_of(certificate.laws, [](const CertifiedLaw& law) {
        return law.outcome == Outcome::kBroken;
      });
  return certificate;
}

}  // namespace kvtwin::props
