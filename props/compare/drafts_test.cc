// Drafts in histories: caches with a fault that only drafts show, and the
// coverage marks of drafts.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/mask_elements.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

// A correct cache, except for what its faults change.
struct DraftFault {
  // Changes the path of a Commit.
  std::function<void(std::vector<int>&)> path = {};
  std::function<void(Cache&, int src, std::int32_t len)> before_copy = {};
  bool saves = false;  // Snapshots have the drafts, without their rows.
};

class FaultyDrafts final : public ForwardingCache {
 public:
  FaultyDrafts(std::unique_ptr<Cache> cache, DraftFault fault)
      : ForwardingCache(std::move(cache)), fault_(std::move(fault)) {}

  Status Commit(int seq, std::span<const int> path) override {
    std::vector<int> changed(path.begin(), path.end());
    if (fault_.path && !changed.empty()) fault_.path(changed);
    return cache_->Commit(seq, changed);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    if (fault_.before_copy) fault_.before_copy(*cache_, src, len);
    return cache_->CopyPrefix(src, dst, len);
  }
  Status SnapshotTo(CacheState& state) const override {
    Status status = cache_->SnapshotTo(state);
    if (fault_.saves) cache_->ListCells(state.cells);
    return status;
  }

 private:
  const DraftFault fault_;
};

std::optional<Failure> SeenWith(const std::string& history,
                                const DraftFault& fault) {
  Subject subject;
  subject.name = "faulty";
  subject.make = [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(
        std::make_unique<FaultyDrafts>(*MakeReference(spec), fault));
  };
  return RunHistory(*ParseHistory("kvt1 " + history), subject).failure;
}

TEST(FaultyDrafts, AreFound) {
  const std::vector<std::tuple<std::string, std::string, DraftFault, CheckName>>
      cases = {
          {"a rejected draft stays",
           "| put 0*2:-1 | commit 0:0",
           {.path = [](auto& path) { path.push_back(Size(path)); }},
           "subject: cells"},
          {"an accepted draft goes",
           "| put 0*2:-1 | commit 0:0,0",
           {.path = [](auto& path) { path.pop_back(); }},
           "subject: cells"},
          {"the wrong branch is kept",
           "| put 0*2:-1,-1 | commit 0:1",
           {.path = [](auto& path) { path[0] = 1 - path[0]; }},
           "subject: cells"},
          {"a copy has the drafts",
           "| put 0*2:-1 | copy 0>1:9",
           {.before_copy =
                [](Cache& cache, int src, std::int32_t /*len*/) {
                  // It is also called before Init.
                  (void)cache.Commit(src, std::vector<int>{0, 1});
                }},
           "subject: cells"},
          // Its length is within the tokens and drafts.
          {"a copy of a legal client has the drafts",
           "legal=1 | put 0*1 | put 0*1:-1 | copy 0>1:2",
           {.before_copy =
                [](Cache& cache, int src, std::int32_t len) {
                  if (len == 2) (void)cache.Commit(src, std::vector<int>{0});
                }},
           "subject: cells"},
          {"a draft is saved",
           "| start 0*1:-1 | snapshot 0",
           {.saves = true},
           "subject: snapshot"},
      };
  for (const auto& [name, history, fault, check] : cases) {
    SCOPED_TRACE(name);
    EXPECT_FALSE(SeenWith(history, {}));
    const auto found = SeenWith(history, fault);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->check, check.name()) << found->text;
  }
}

// Lets row `row` of the mask see a column.
View SeesColumn(int row, std::int64_t column) {
  return [=](OwnedView& view) {
    if (view.mask.shape[0] > column && view.mask.shape[1] > row) {
      AllowInMask(view.mask, column, row);
    }
  };
}

TEST(FaultyDrafts, AreFoundInViewsAndCells) {
  const auto drop_first = [](std::vector<CellEntry>& cells) {
    if (cells.size() == 5) cells.erase(cells.begin());
  };
  const auto move_last = [](std::vector<CellEntry>& cells) {
    if (cells.size() == 3) ++cells.back().position;
  };
  ExpectFound(
      {{"a sibling is visible", "| put 0*2:-1,-1", Shows(SeesColumn(0, 1)),
        "subject: mask bytes", "row 0 of the mask"},
       {"a nephew is visible", "| put 0*3:-1,-1,0", Shows(SeesColumn(1, 2)),
        "subject: mask bytes", "row 1 of the mask"},
       {"a rejected draft is visible",
        "| put 0*2 | put 0*2:-1,-1 | commit 0:1 | causal",
        Shows(SeesColumn(0, 2)), "subject: mask bytes", "row 0 of the mask"},
       {"a draft is hidden from its child", "| put 0*2:-1",
        Shows([](OwnedView& view) {
          if (view.mask.shape[1] == 2) ChangeByte(view.mask.bytes[8]);
        }),
        "subject: mask bytes", "row 1 of the mask"},
       {"the drafts' positions evict",
        "kind=swa window=2 seqs=1 cap=9 batch=4 | put 0*2 | put 0*3:-1",
        Fault{.cells = drop_first}, "subject: cells", ""},
       {"a committed token has another position",
        "| put 0*2 | put 0*1:-1 | commit 0:0", Fault{.cells = move_last},
        "subject: cells", ""}},
      Level::kIdentity);
}

// The plain reference's mistakes are found as well, by the ledger.
TEST(FaultyDrafts, AreFoundInTheReference) {
  ExpectFound({{"a sibling is visible", "| put 0*2:-1,-1",
                Shows(SeesColumn(0, 1)), "reference: rows", "", Who::kBoth}},
              Level::kIdentity);
}

const std::vector<MarkRow> kDraftRows = {
    {"draft_chain", {"| put 0*2:-1"}, {"| put 0*2:-1,-1", "| put 0*1:-1"}},
    {"draft_siblings", {"| put 0*2:-1,-1"}, {"| put 0*2:-1"}},
    {"draft_level",
     {"| put 0*1:-1 | put 0*1:0"},
     {"| put 0*1:-1 | put 0*1:-1", "| put 0*2:-1,0"}},
    {"draft_of_nothing", {"| put 0*1:-1"}, {"| put 0*1 | put 0*1:-1"}},
    {"draft_beside_plain", {"| put 0*1:-1 1*1"}, {"| put 0*1:-1 1*1:-1"}},
    {"draft_past_window",
     {"kind=swa window=1 cells=9 | put 0*3:-1"},
     {"kind=swa window=2 cells=9 | put 0*3:-1", "| put 0*3:-1"}},
    {"draft_evicts",
     {"kind=swa window=1 cells=4 | put 0*3 | put 0*1:-1"},
     {"kind=swa window=1 cells=4 | put 0*1 | put 0*1:-1", "| put 0*1:-1"}},
    {"draft_full", {"cells=2 | put 0*2 | put 0*1:-1"}, {"| put 0*1:-1"}},
    {"commit_all",
     {"| put 0*2:-1 | commit 0:0,0"},
     {"| put 0*2:-1 | commit 0:0", "| commit 0:"}},
    {"commit_some",
     {"| put 0*2:-1 | commit 0:0"},
     {"| put 0*2:-1 | commit 0:0,0", "| put 0*2:-1 | commit 0:"}},
    {"commit_none",
     {"| put 0*2:-1 | commit 0:"},
     {"| put 0*2:-1 | commit 0:0", "| put 0*2 | commit 0:"}},
    {"commit_later_child",
     {"| put 0*2:-1,-1 | commit 0:1"},
     {"| put 0*2:-1,-1 | commit 0:0"}},
    {"commit_in_pass",
     {"| put 0*1:-1 | commit 0:0"},
     {"| put 0*1:-1 | put 1*1 | commit 0:0"}},
    {"drop_drafts_copy",
     {"| put 0*1:-1 | copy 1>0:1", "| put 0*1:-1 | copy 0>0:1"},
     {"| put 0*1:-1 | copy 0>1:1"}},
    {"drop_drafts_remove",
     {"| put 0*1:-1 | drop 0:0-"},
     {"| put 0*1:-1 | drop 1:0-"}},
    {"copy_beside_drafts",
     {"| put 0*1 | put 0*1:-1 | copy 0>1:1"},
     {"| put 0*1 | put 0*1:-1 | copy 0>0:1"}},
};

TEST(DraftMarks, AreHitByTheirOwnStateOnly) {
  CheckMarkRows(kDraftRows, kFirstDraftMark, kFirstStateMark);
}

// A wrapper that has refused drafts still has the layer type that it had.
TEST(RefusedDrafts, LeaveTheLayerType) {
  for (const std::string_view history :
       {"caches=encoder/causal cells=1 | type 1 | put 0*1:-1 | type 0 | cached",
        "caches=causal/encoder cells=1 | type 1 | put 0*1:-1 | cached"}) {
    Subject subject = TwinSubject("reference");
    subject.level = Level::kVisibility;
    const RunResult result = RunHistory(
        *ParseHistory("kvt1 kind=wrapper " + std::string(history)), subject);
    EXPECT_FALSE(result.failure) << history << ": " << result.failure->text;
  }
}

TEST(DraftHistories, ReadBack) {
  for (const std::string line : {
           "kvt1 | put 0*5:-1,0,0,1,1 | commit 0:0,1 | commit 1:",
           "kvt1 | put 0*2:-1 1*1 reserve | start 0-1*1:2",
       }) {
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    EXPECT_EQ(ToText(*history), line);
  }
  EXPECT_FALSE(ParseHistory("kvt1 | commit 0").ok());
  EXPECT_FALSE(ParseHistory("kvt1 | put 0*1:").ok());
  EXPECT_FALSE(ParseHistory("kvt1 | commit 0:1,").ok());
}

}  // namespace
}  // namespace kvtwin::props
