// Pages of the faults of other systems' caches, judged by the ledger.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "props/history/generate.h"
#include "props/page_judge/page_judge.h"
#include "props/report/page.h"
#include "props/search/judged_page.h"
#include "props/testing/other_caches.h"

namespace kvtwin::props {
namespace {

TEST(PageJudge, PagesOfOtherCachesAreTrue) {
  int pages = 0;
  std::int64_t labels = 0;
  for (const Profile& profile : Profiles()) {
    for (const CacheFault fault : kFaults) {
      for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        const Subject subject =
            OtherSubject(profile.name, seed, /*any_order=*/false, fault);
        History history = MakeHistory(seed, 0, std::nullopt, 12);
        history.setup.legal = true;
        if (!subject.abilities.Fits(history.setup)) {
          subject.abilities.Fit(history.setup);
        }
        const auto run = RunJudged(history, subject);
        if (!run) continue;
        SCOPED_TRACE(fmt::format("{}, fault {}, seed {}\n{}", profile.name,
                                 AsInt(fault), seed, run->failure.report));
        const PageVerdict verdict =
            JudgePage(PageData(PageHtml(run->failure)), run->calls);
        ++pages;
        labels += verdict.labels;
        for (const std::string& lie : verdict.lies) ADD_FAILURE() << lie;
      }
    }
  }
  fmt::print("other caches: {} pages, {} labels\n", pages, labels);
  EXPECT_GT(pages, 50);
}

}  // namespace
}  // namespace kvtwin::props
