// Each law of drafts fails for a cache with one bug, and holds for the others.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include "core/dense_tensor.h"
#include "core/mask_elements.h"
#include "props/base/forwarding_cache.h"
#include "props/laws/laws.h"

namespace kvtwin::props {
namespace {

class FaultyDrafts : public ForwardingCache {
 public:
  explicit FaultyDrafts(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "optimized")) {}
  Status StartForward(const Batch& batch, bool reserve) override {
    parents_ = {batch.parents.begin(), batch.parents.end()};
    return ForwardingCache::StartForward(batch, reserve);
  }

 protected:
  std::vector<int> parents_;
};

// A rejection takes the last committed token with it.
class RejectTakesAToken final : public FaultyDrafts {
 public:
  using FaultyDrafts::FaultyDrafts;
  Status Commit(int seq, std::span<const int> path) override {
    Status status = ForwardingCache::Commit(seq, path);
    std::vector<CellEntry> cells;
    ListCells(cells);
    int last = -1;
    for (const CellEntry& cell : cells) {
      if (cell.sequence == seq) last = std::max(last, cell.position);
    }
    if (path.empty() && last > 0)
      return ForwardingCache::Remove(seq, last, kOpenEnd);
    return status;
  }
};

// Commits the first sibling, whichever was accepted.
class CommitsTheFirst final : public FaultyDrafts {
 public:
  using FaultyDrafts::FaultyDrafts;
  Status Commit(int seq, std::span<const int> path) override {
    const std::vector<int> first = {0};
    return ForwardingCache::Commit(seq, path.size() == 1 ? first : path);
  }
};

// Changes what the drafts of a batch see.
class SeesOtherDrafts : public FaultyDrafts {
 public:
  using FaultyDrafts::FaultyDrafts;
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    if (!view.ok() || view->mask.data == nullptr || parents_.empty()) {
      return view;
    }
    const DenseTensor shown = CopyOf(view->mask, view->mask.dtype);
    mask_ = HidingMask(shown.dtype, shown.shape[0], shown.shape[1]);
    const auto cells = BatchCells();
    for (std::int64_t row = 0; row < shown.shape[1]; ++row) {
      for (std::int64_t column = 0; column < shown.shape[0]; ++column) {
        const auto at =
            std::ranges::find(cells, view->first_cell + column) - cells.begin();
        if (Sees(row, at, MaskAllows(shown.view(), column, row))) {
          AllowInMask(mask_, column, row);
        }
      }
    }
    view->mask = mask_.view();
    return view;
  }

 private:
  // Whether row `row` sees a cell: that of batch token `at`, or, for -1, any
  // other cell.
  virtual bool Sees(std::int64_t row, std::int64_t at, bool right) const = 0;

  DenseTensor mask_;
};

// A draft sees the draft before it, also if it does not follow it.
class SeesSiblings final : public SeesOtherDrafts {
 public:
  using SeesOtherDrafts::SeesOtherDrafts;

 private:
  bool Sees(std::int64_t row, std::int64_t at, bool right) const override {
    return right || (row > 0 && at == row - 1);
  }
};

// In a batch with siblings, the last draft does not see its parent.
class MissesItsParent final : public SeesOtherDrafts {
 public:
  using SeesOtherDrafts::SeesOtherDrafts;

 private:
  bool Sees(std::int64_t row, std::int64_t at, bool right) const override {
    const auto count = std::ssize(parents_);
    const bool tree =
        std::ranges::count(parents_, kCommitted) > 1 && row == count - 1;
    return right && !(tree && at < count && at == parents_.back());
  }
};

template <class Cache>
Subject Faulty() {
  return {
      .name = "faulty",
      .make =
          [](const CacheSpec& spec) -> Result<std::unique_ptr<kvtwin::Cache>> {
        if (const auto made = MakeCache(spec); !made.ok()) {
          return made.status();
        }
        return std::unique_ptr<kvtwin::Cache>(std::make_unique<Cache>(spec));
      }};
}

// The laws of drafts that the cache breaks.
template <class Cache>
std::vector<std::string_view> BrokenBy() {
  std::vector<std::string_view> broken;
  for (const Law& law : Laws()) {
    if ((law.needs & kNeedsDrafts) == 0) continue;
    const LawRun run = RunLaw(law, Faulty<Cache>(), /*seed=*/1, 300);
    if (!run.failure) {
      EXPECT_GT(run.judged, 0) << law.name;
      continue;
    }
    EXPECT_LE(run.shrunk.ops.size(), 3U) << law.name << ToText(run.shrunk);
    broken.push_back(law.name);
  }
  return broken;
}

using Names = std::vector<std::string_view>;

TEST(DraftLaws, HoldForTheTwin) {
  EXPECT_EQ(BrokenBy<FaultyDrafts>(), Names());
}

TEST(DraftLaws, FailForFaultyCaches) {
  EXPECT_EQ(BrokenBy<RejectTakesAToken>(),
            Names({"drafts_are_folds", "reject_is_never", "tree_is_chains"}));
  EXPECT_EQ(BrokenBy<CommitsTheFirst>(),
            Names({"drafts_are_folds", "path_is_tokens", "drafts_are_hidden"}));
  EXPECT_EQ(BrokenBy<MissesItsParent>(), Names({"tree_is_chains"}));
  EXPECT_EQ(BrokenBy<SeesSiblings>(),
            Names({"drafts_are_folds", "tree_is_chains", "drafts_are_hidden"}));
}

// No other law sees them: no other law has drafts.
TEST(DraftLaws, AreNeeded) {
  for (const Law& law : Laws()) {
    if ((law.needs & (kNeedsDrafts | kNeedsStates)) != 0) continue;
    const LawRun run = RunLaw(law, Faulty<RejectTakesAToken>(), 1, 20);
    EXPECT_FALSE(run.failure) << law.name << ": " << run.failure->text;
  }
}

TEST(DraftLaws, AreNotJudgedWithoutDrafts) {
  Subject subject = Faulty<FaultyDrafts>();
  subject.make_of = [make = subject.make](const auto& setup) {
    return make(setup.spec);
  };
  subject.abilities.can = ~std::uint32_t{KVTWIN_CAN_DRAFT_TREES};
  EXPECT_EQ(WhyNotJudged(*FindLaw("tree_is_chains"), subject),
            "the backend does not say KVTWIN_CAN_DRAFT_TREES");
  EXPECT_EQ(WhyNotJudged(*FindLaw("path_is_tokens"), subject), "");
  subject.abilities.can = 0;
  EXPECT_EQ(WhyNotJudged(*FindLaw("path_is_tokens"), subject),
            "the backend does not say KVTWIN_CAN_DRAFT");
}

}  // namespace
}  // namespace kvtwin::props
