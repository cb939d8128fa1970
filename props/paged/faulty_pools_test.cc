// Runs pools with injected faults: each comparison that PagedDriver makes must
// find the fault that no other comparison can find. For caches see
// faulty_twins_test.cc.

#include "props/paged/faulty_pools.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "props/oracle/judge.h"
#include "props/page_judge/logging_pool.h"
#include "props/page_judge/page_judge.h"
#include "props/page_judge/pool_page_judge.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_log.h"
#include "props/paged/pool_workload.h"
#include "props/report/page.h"
#include "props/search/explain.h"
#include "props/search/judged_page.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// Expects that a recording of the history, judged, cites the same rules as the
// failure of the history. Returns whether the recording is wrong: a fault in an
// answer that recordings do not have is not.
bool ExpectSameRules(const PagedHistory& history, const PagedMaker& make) {
  const auto run = RunJudged(history, make);
  std::stringstream recording;
  // The recording ends with the fault.
  (void)WritePagedRecording(history, "optimized", recording, make);
  const Judgement judged = Judge(recording, {"reference", "optimized"});
  if (!judged.failure) return false;
  EXPECT_EQ(run ? run->failure.rules : "", judged.failure->rules)
      << (run ? run->failure.report : "") << judged.reason();
  return true;
}

// Each label on the page of each failure is true, too, and its rules are those
// that `kvtwin check` cites.
void ExpectFound(const std::vector<PoolCase>& cases) {
  std::int64_t labels = 0;
  std::int64_t recorded = 0;
  for (const PoolCase& one : cases) {
    SCOPED_TRACE(one.name);
    const auto history = ParsePagedHistory("kvp1 " + one.history);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    EXPECT_EQ(TextOf(RunPaged(*history)), "");
    const std::string wrong =
        TextOf(RunPaged(*history, nullptr, WrongPools(one.wrong, one.who)));
    EXPECT_NE(wrong.find(one.text), std::string::npos) << wrong;
    EXPECT_NE(wrong, "");
    const auto page = JudgePageOf(*history, WrongPools(one.wrong, one.who));
    ASSERT_TRUE(page);
    labels += page->labels;
    for (const std::string& lie : page->lies) ADD_FAILURE() << lie;
    recorded +=
        ExpectSameRules(*history, WrongPools(one.wrong, one.who)) ? 1 : 0;
  }
  fmt::print("faulty pools: {} pages, {} labels, {} wrong recordings\n",
             cases.size(), labels, recorded);
}

// Keeps copies of tensors alive. Change points a view to such a copy, in which
// the first or the last byte differs.
std::vector<std::byte>& Kept(std::vector<std::byte> bytes) {
  static std::deque<std::vector<std::byte>> kept;
  return kept.emplace_back(std::move(bytes));
}
void Change(TensorView& view, bool last) {
  std::int64_t end = RunBytes(view.dtype, view.shape[0]);
  for (std::size_t d = 1; d < 4; ++d) {
    end += (view.shape[d] - 1) * view.stride[d];
  }
  auto& bytes = Kept({view.at(0), view.at(0) + end});
  (last ? bytes.back() : bytes.front()) ^= std::byte{1};
  view.data = bytes.data();
}

using ChangeViews = std::function<void(std::vector<PagedView>&)>;
ChangeViews Bytes(TensorView PagedView::*tensor, bool last) {
  return [=](std::vector<PagedView>& views) {
    if (views.empty()) return;
    PagedView& view = last ? views.back() : views.front();
    Change(view.*tensor, last);
  };
}
// Changes the last view, if there are any.
ChangeViews InLast(const std::function<void(PagedView&)>& change) {
  return [=](std::vector<PagedView>& views) {
    if (!views.empty()) change(views.back());
  };
}

void LeaveOutTheLast(std::vector<PagedView>& views) {
  if (!views.empty()) views.pop_back();
}

// Adds one to the last number of a list, if it has any.
template <class T>
void AddToLast(std::vector<T>& list) {
  if (!list.empty()) ++list.back();
}

// Three tokens in two blocks, appended; then committed.
const std::string kPool =
    "block=2 blocks=6 most=12 layers=2 heads=2 kdim=2 vdim=2 dtype=f32 ";
const std::string kAppend = "| open 0 0 0 | append 0 2 2 ";
const std::string kCommit = kAppend + "| commit 0 1 0 ";

TEST(FaultyPools, EveryPartOfAViewIsCompared) {
  std::vector<PoolCase> cases;
  const auto add = [&](const std::string& name, const ChangeViews& change,
                       const std::string& text) {
    for (const char* layout : {"", "layout=head "}) {
      cases.push_back(
          {name, kPool + layout + kAppend, {.views = change}, text});
    }
  };
  for (const bool last : {false, true}) {
    add("K", Bytes(&PagedView::key, last), "Views: block");
    add("V", Bytes(&PagedView::value, last), "Views: block");
  }
  add("a view less", LeaveOutTheLast, "Views differ");
  add("start", InLast([](PagedView& view) { ++view.start; }), "Views: block");
  add("length", InLast([](PagedView& view) { ++view.length; }), "Views: block");
  add("block", InLast([](PagedView& view) { ++view.block; }), "Views: block");
  add("K's shape", InLast([](PagedView& view) { --view.key.shape[0]; }),
      "Views: block");
  add("V's shape", InLast([](PagedView& view) { --view.value.shape[0]; }),
      "Views: block");
  add("K's strides", InLast([](PagedView& view) { ++view.key.stride[3]; }),
      "Views: block");
  add("V's strides", InLast([](PagedView& view) { ++view.value.stride[3]; }),
      "Views: block");
  // Both twins have the same fault, so that only the ledger can find it.
  for (const bool last : {false, true}) {
    for (const auto tensor : {&PagedView::key, &PagedView::value}) {
      cases.push_back({"both",
                       kPool + kCommit,
                       {.views = Bytes(tensor, last)},
                       fmt::format("position {} of sequence 0 has another row",
                                   last ? 2 : 0),
                       WrongIn::kBoth});
    }
  }
  cases.push_back({"a token too few",
                   kPool + kCommit,
                   {.views = LeaveOutTheLast},
                   "Views: not all rows",
                   WrongIn::kBoth});
  cases.push_back({"another start",
                   kPool + kCommit,
                   {.views = InLast([](PagedView& view) { ++view.start; })},
                   "Views: not one after another",
                   WrongIn::kBoth});
  cases.push_back({"a token too many",
                   kPool + kCommit,
                   {.views = InLast([](PagedView& view) {
                      ++view.length;
                      ++view.key.shape[2];
                      ++view.value.shape[2];
                    })},
                   "position 3 of sequence 0 has another row",
                   WrongIn::kBoth});
  ExpectFound(cases);
}

TEST(FaultyPools, PackedViewsAreCompared) {
  const std::string head = kPool + "layout=head " + kAppend;
  std::vector<PoolCase> cases;
  for (const bool last : {false, true}) {
    for (const auto tensor : {&PagedView::key, &PagedView::value}) {
      cases.push_back({"bytes",
                       head,
                       {.packed = Bytes(tensor, last)},
                       "ViewsPacked: other rows"});
    }
  }
  const auto other = [&](const std::string& name, const auto& change) {
    cases.push_back({name,
                     head,
                     {.packed = InLast(change)},
                     "ViewsPacked: other blocks than Views has"});
  };
  other("start", [](PagedView& view) { ++view.start; });
  other("length", [](PagedView& view) { --view.length; });
  other("block", [](PagedView& view) { ++view.block; });
  other("K's shape", [](PagedView& view) { ++view.key.shape[1]; });
  other("V's shape", [](PagedView& view) { ++view.value.shape[1]; });
  // A view of a single token with another stride to the next token.
  cases.push_back(
      {"K is not packed",
       head,
       {.packed = InLast([](PagedView& view) { ++view.key.stride[1]; })},
       "ViewsPacked: not packed"});
  cases.push_back(
      {"V is not packed",
       head,
       {.packed = InLast([](PagedView& view) { ++view.value.stride[1]; })},
       "ViewsPacked: not packed"});
  cases.push_back(
      {"a view less", head, {.packed = LeaveOutTheLast}, "ViewsPacked differ"});
  cases.push_back({"refused",
                   head,
                   {.call = "ViewsPacked"},
                   "ViewsPacked: ok by the reference, cache_full"});
  ExpectFound(cases);
}

TEST(FaultyPools, TensorsAreComparedCompletely) {
  // The tokens fit in one block, so that the view is in one piece.
  const std::string one = kPool + "| open 0 0 0 | append 0 1 2 ";
  std::vector<PoolCase> cases;
  for (const WrongIn who : {WrongIn::kOptimized, WrongIn::kReference}) {
    const std::string text = who == WrongIn::kReference
                                 ? "ContiguousKV of the reference: other rows"
                                 : "ContiguousKV: other rows";
    for (const bool last : {false, true}) {
      for (const auto tensor : {&PagedKv::key, &PagedKv::value}) {
        cases.push_back({"bytes",
                         one,
                         {.whole =
                              [=](std::optional<PagedKv>& whole) {
                                if (whole) Change((*whole).*tensor, last);
                              }},
                         text,
                         who});
        cases.push_back({"another length",
                         one,
                         {.whole =
                              [=](std::optional<PagedKv>& whole) {
                                if (whole) ++((*whole).*tensor).shape[2];
                              }},
                         text,
                         who});
      }
    }
    cases.push_back(
        {"none",
         one,
         {.whole = [](std::optional<PagedKv>& whole) { whole.reset(); }},
         "ContiguousKV differs",
         who});
  }
  ExpectFound(cases);
}

TEST(FaultyPools, AppendsAnswerWithTheRowsThatTheyStored) {
  std::vector<PoolCase> cases;
  const auto in_last = [](const auto& change) {
    return [=](PagedAppend& append) { change(append.views.back()); };
  };
  const auto add = [&](const std::string& name,
                       const std::function<void(PagedAppend&)>& change) {
    cases.push_back(
        {name, kPool + kAppend, {.append = change}, "Append: other views"});
  };
  add("start", [](PagedAppend& append) { ++append.start; });
  add("a view less", [](PagedAppend& append) { append.views.pop_back(); });
  add("a view's start", in_last([](PagedView& view) { ++view.start; }));
  add("a length", in_last([](PagedView& view) { ++view.length; }));
  add("a block", in_last([](PagedView& view) { ++view.block; }));
  for (const bool last : {false, true}) {
    add("K", in_last([=](PagedView& view) { Change(view.key, last); }));
    add("V", in_last([=](PagedView& view) { Change(view.value, last); }));
  }
  cases.push_back({"start, both",
                   kPool + kAppend,
                   {.append = [](PagedAppend& append) { ++append.start; }},
                   "Append: other views",
                   WrongIn::kBoth});
  cases.push_back(
      {"a view less, both",
       kPool + kAppend,
       {.append = [](PagedAppend& append) { append.views.pop_back(); }},
       "Append: views of other rows",
       WrongIn::kBoth});
  cases.push_back({"a view's start, both",
                   kPool + kAppend,
                   {.append = in_last([](PagedView& view) { ++view.start; })},
                   "Append: other views",
                   WrongIn::kBoth});
  ExpectFound(cases);
}

TEST(FaultyPools, EveryResultIsCompared) {
  const std::string two = kPool + kCommit;
  std::vector<PoolCase> cases;
  const auto add = [&](const std::string& history, const Wrong& wrong,
                       const std::string& text,
                       WrongIn who = WrongIn::kOptimized) {
    cases.push_back({text, history, wrong, text, who});
  };
  for (const auto& [call, more, refused] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"Open", "", "Open: refused"},
           {"Fork", "| fork 0 1 0", "Fork: refused"},
           {"Append", "", "Append: refused, although there is room"},
           {"Commit", "", "are refused"},
           {"CommitUnknown", "| append 0 0 2 | commit_unknown 0 1 0",
            "are refused"},
           {"Truncate", "| truncate 0 1 0", ""},
           {"Free", "| free 0 0 0", ""}}) {
    const std::string name = call == "CommitUnknown" ? "Commit" : call;
    add(two + more, {.call = call}, name + ": ok by the reference, cache_full");
    add(two + more, {.call = call},
        name + ": cache_full: so it is by the reference, ok",
        WrongIn::kReference);
    if (refused.empty()) continue;
    add(two + more, {.call = call}, refused, WrongIn::kBoth);
  }
  // There is one block, and the append needs it.
  add("block=1 blocks=1 most=1 layers=1 | open 0 0 0 | append 0 0 0",
      {.call = "Append"}, "Append: refused, although", WrongIn::kBoth);
  add(kPool + kAppend + "| commit 0 0 4", {.refusal = Status()}, "are accepted",
      WrongIn::kBoth);
  for (const std::string call :
       {"SeqLen", "Views", "ContiguousKV", "SlotMapping", "ExportCsr",
        "ExportTable", "ExportLayerTable", "Blocks"}) {
    add(two, {.call = call}, call + " is cache_full: so it is");
    add(two, {.call = call}, call + " of the reference is cache_full",
        WrongIn::kReference);
  }
  for (const std::string call : {"Open", "Views", "Free", "SlotMapping"}) {
    add(two, {.call = call, .throws = true}, "exception: ");
    add(two, {.call = call, .throws = true}, ": no such block",
        WrongIn::kReference);
  }
  const auto next = [](int number) { return number + 1; };
  cases.push_back({"Open",
                   two,
                   {.call = "Open", .number = next},
                   "Open: the number differs: 0 by"});
  cases.push_back({"Fork",
                   two + "| fork 0 1 0",
                   {.call = "Fork", .number = next},
                   "Fork: the number differs: 1 by"});
  for (const WrongIn who : {WrongIn::kOptimized, WrongIn::kReference}) {
    cases.push_back(
        {"SeqLen", two, {.call = "SeqLen", .number = next}, "", who});
  }
  ExpectFound(cases);
}

TEST(FaultyPools, BlocksAreCompared) {
  std::vector<PoolCase> cases;
  const auto add = [&](const auto& change) {
    for (const WrongIn who : {WrongIn::kOptimized, WrongIn::kReference}) {
      for (const auto tensor : {&PagedKv::key, &PagedKv::value}) {
        for (const char* layout : {"", "layout=head "}) {
          cases.push_back(
              {"blocks",
               kPool + layout + kAppend,
               {.blocks = [=](PagedKv& blocks) { change(blocks.*tensor); }},
               "Blocks: not what the views are",
               who});
        }
      }
    }
  };
  for (const std::size_t extent : {0U, 1U, 2U, 3U}) {
    add([=](TensorView& all) { ++all.shape[extent]; });
    add([=](TensorView& all) { ++all.stride[extent]; });
  }
  add([](TensorView& all) { all.dtype = DType::kF16; });
  add([](TensorView& all) { all.data = all.at(1); });
  ExpectFound(cases);
}

TEST(FaultyPools, TablesAreCompared) {
  const std::string two = kPool + kCommit + "| fork 0 1 0";
  const auto slot = [](std::vector<std::int64_t>& slots) { AddToLast(slots); };
  const auto index = [](PagedCsr& csr) { AddToLast(csr.indices); };
  const auto last = [](PagedCsr& csr) { AddToLast(csr.last_page_len); };
  const auto block = [](PagedTable& table) { AddToLast(table.blocks); };
  const auto len = [](PagedTable& table) { AddToLast(table.seq_lens); };
  const std::vector<PoolCase> cases = {
      {"a slot of the reference",
       two,
       {.slots = slot},
       "SlotMapping differs",
       WrongIn::kReference},
      {"an index", two, {.csr = index}, "ExportCsr differs"},
      {"a last page", two, {.csr = last}, "ExportCsr differs"},
      {"a block", two, {.table = block}, "ExportTable differs"},
      {"a length", two, {.table = len}, "ExportTable differs"},
      {"indices in another order than asked for",
       two,
       {.sorts = "ExportCsr"},
       "ExportCsr differs"},
      {"blocks in another order than asked for",
       two,
       {.sorts = "ExportTable"},
       "ExportTable differs"},
      {"a slot of both",
       two,
       {.slots = slot},
       "not where the views are",
       WrongIn::kBoth},
      {"a slot that is asked for alone, of both",
       two,
       {.slots = slot, .later_slots_only = true},
       "not where the views are",
       WrongIn::kBoth},
      {"an index of both",
       two,
       {.csr = index},
       "not what the views are",
       WrongIn::kBoth},
      {"a last page of both",
       two,
       {.csr = last},
       "ExportCsr: not what",
       WrongIn::kBoth},
      {"a block of both",
       two,
       {.table = block},
       "ExportTable: not what",
       WrongIn::kBoth},
      {"a length of both",
       two,
       {.table = len},
       "ExportTable: not what",
       WrongIn::kBoth},
      {"a block of a layer",
       two,
       {.layer_table = block},
       "ExportLayerTable: not what"},
      {"a length of a layer, with appended rows",
       kPool + kAppend,
       {.layer_table = len},
       "ExportLayerTable: not what"},
  };
  ExpectFound(cases);
}

TEST(FaultyPools, UsageIsCompared) {
  const std::string two = kPool + kCommit + "| fork 0 1 0";
  std::vector<PoolCase> cases;
  for (int PagedUsage::*count : {&PagedUsage::free, &PagedUsage::cached,
                                 &PagedUsage::used, &PagedUsage::shared}) {
    const auto more = [=](PagedUsage& usage) { ++(usage.*count); };
    cases.push_back({"a count", two, {.usage = more}, "Usage differs"});
    if (count == &PagedUsage::shared) continue;  // Not part of the sum.
    cases.push_back({"a count of both",
                     two,
                     {.usage = more},
                     "Usage does not add up",
                     WrongIn::kBoth});
  }
  const auto leak = [](PagedUsage& usage) {
    if (usage.used > 0) return;
    --usage.free;
    ++usage.used;
  };
  cases.push_back({"a leak",
                   kPool + "| open 0 0 0",
                   {.usage = leak},
                   "blocks leak",
                   WrongIn::kBoth});
  ExpectFound(cases);
}

// A group answers for itself. A fork and a truncation of a pool with groups
// have an answer, the length that they keep.
TEST(FaultyPools, GroupsAreCompared) {
  const std::string groups =
      "most=12 groups=block:2,blocks:6,layers:2/block:2,blocks:6,window:3/"
      "block:4,blocks:6,states:1 | open 0 0 0 | append 0 2 2 | commit 0 1 0 ";
  const auto less = [](int len) { return std::max(0, len - 1); };
  const auto more = [](int number) { return number + 1; };
  const auto count = [](PagedUsage& usage) { ++usage.cached; };
  const std::vector<PoolCase> cases = {
      {"a slot",
       groups,
       {.slots = [](std::vector<std::int64_t>& slots) { AddToLast(slots); }},
       "SlotMapping"},
      {"a count of all groups", groups, {.usage_of_all = count}, "Usage: "},
      {"the same of both",
       groups,
       {.usage_of_all = count},
       "Usage: ",
       WrongIn::kBoth},
      {"an index",
       groups,
       {.csr = [](PagedCsr& csr) { AddToLast(csr.indices); }},
       "ExportCsr differs"},
      {"a block",
       groups,
       {.table = [](PagedTable& table) { AddToLast(table.blocks); }},
       "ExportTable differs"},
      {"a count",
       groups,
       {.usage = [](PagedUsage& usage) { ++usage.free; }},
       "Usage differs"},
      {"K", groups, {.views = Bytes(&PagedView::key, true)}, "Views: block"},
      {"a length",
       groups,
       {.call = "SeqLen", .number = more},
       "SeqLen differs"},
      {"a fork that keeps less",
       groups + "| fork 0 3 0",
       {.len = less},
       "SeqLen differs"},
      {"a truncation that keeps less",
       groups + "| truncate 0 3 0",
       {.len = less},
       "SeqLen differs"},
      {"a prompt", groups, {.call = "Find", .number = more}, "Find differs"},
      {"where to resume",
       groups + "| fork 0 3 0",
       {.call = "ResumeBefore", .number = more},
       "ResumeBefore differs"},
  };
  ExpectFound(cases);
}

// The rules are those of the call whose answer is wrong. Views show the effect
// of the operation before them, whose rules are added.
TEST(FaultyPools, CiteTheRulesOfTheWrongCall) {
  const auto cited = [](const std::string& history, const Wrong& wrong) {
    const auto run = RunJudged(*ParsePagedHistory("kvp1 " + history),
                               WrongPools(wrong, WrongIn::kOptimized));
    return run ? run->failure.rules : "no failure";
  };
  const std::string one = kPool + kAppend;
  EXPECT_EQ(cited(one, {.views = Bytes(&PagedView::key, true)}), "P7, P3, P4");
  // Changes the row of a sequence that has a single token.
  const auto single = [](std::vector<PagedView>& views) {
    if (views.size() == 1 && views[0].length == 1) {
      Change(views[0].key, /*last=*/true);
    }
  };
  EXPECT_EQ(cited(kPool + kCommit + "| fork 0 1 0", {.views = single}),
            "P7, P2");
  EXPECT_EQ(cited(kPool + kCommit + "| truncate 0 1 0", {.views = single}),
            "P7, P8");
  EXPECT_EQ(cited(one, {.append = [](auto& answer) { ++answer.start; }}),
            "P3, P4");
  EXPECT_EQ(
      cited(one, {.append = [](auto& answer) { answer.views.pop_back(); }}),
      "P7, P3, P4");
  EXPECT_EQ(cited(one, {.usage = [](PagedUsage& usage) { ++usage.free; }}),
            "P9");
  EXPECT_EQ(cited(one, {.blocks = [](auto& blocks) { blocks.key.data = {}; }}),
            "P10");
  EXPECT_EQ(cited(one, {.layer_table = [](auto& table) { ++table.columns; }}),
            "P10");
  EXPECT_EQ(cited(one, {.call = "Append"}), "P3, P4");
  const auto less = [](int len) { return std::max(0, len - 1); };
  EXPECT_EQ(cited(kPool + kCommit + "| truncate 0 3 0", {.len = less}),
            "P5, P8");
  // Misuse changes nothing, whichever call shows that it did.
  const std::string misuse =
      kPool + "layout=head " + kCommit + "| misuse 0 0 1";
  const Status other(StatusCode::kCacheFull, "no");
  EXPECT_EQ(cited(misuse, {.refusal = other}), "P11");
  EXPECT_EQ(cited(misuse, {.refusals_cost = true}), "P11");
  // The history fails without its misuse, too.
  Subject subject = TwinSubject("optimized");
  const Wrong wrong = {.views = Bytes(&PagedView::key, true)};
  subject.run_pool = [&](const PagedHistory& run, const PoolRunOptions&) {
    return RunPaged(run, nullptr, WrongPools(wrong, WrongIn::kOptimized));
  };
  const auto history = *ParsePagedHistory("kvp1 " + misuse);
  const Failure failure = *RunHistory(history, subject).failure;
  EXPECT_EQ(Explain(history, failure, subject).rules, "P7, P3, P4");
}

TEST(FaultyPools, RefusalsAreCompared) {
  // A pool of two blocks of one token each; it is full after the first commit.
  const std::string full =
      "block=1 blocks=2 most=9 layers=1 | open 0 0 0 | append 0 0 0 "
      "| append 0 1 2 | commit 0 1 0 | append 0 1 2";
  const auto history = *ParsePagedHistory("kvp1 " + full);
  PagedCoverageCounts counts;
  EXPECT_EQ(TextOf(RunPaged(history, &counts)), "");
  EXPECT_GT(counts.full, 0);
  EXPECT_EQ(
      TextOf(RunPaged(history, nullptr,
                      WrongPools({.refusals_cost = true}, WrongIn::kBoth))),
      "Append: refused, but not nothing");
  std::vector<PoolCase> cases;
  for (int which = 0; which < 18; ++which) {
    const std::string misuse = kPool + "layout=head " + kCommit +
                               fmt::format("| misuse 0 0 {}", which);
    const Status other(StatusCode::kCacheFull, "no");
    cases.push_back({"another code", misuse, {.refusal = other}, "misuse: "});
    cases.push_back({"of both",
                     misuse,
                     {.refusal = other},
                     fmt::format("misuse {} is answered by cache_full", which),
                     WrongIn::kBoth});
    const Status told(StatusCode::kInvalidArgument, "no");
    cases.push_back({"another message",
                     misuse,
                     {.refusal = told},
                     "invalid_argument: no by the pool under test"});
  }
  ExpectFound(cases);
}

// Third-party pools may have messages of their own.
TEST(FaultyPools, MessagesAreComparedForOurTwinsOnly) {
  const auto history = *ParsePagedHistory("kvp1 " + kPool + "layout=head " +
                                          kCommit + "| misuse 0 0 1");
  const Status told(StatusCode::kInvalidArgument, "no");
  for (const bool same : {false, true}) {
    const std::string wrong = TextOf(
        RunPaged(history, nullptr,
                 WrongPools({.refusal = told}, WrongIn::kOptimized), same));
    EXPECT_EQ(wrong.empty(), !same) << wrong;
  }
}

// The driver of a single pool checks the answers that it needs, and makes no
// calls that the pool does not have.
TEST(FaultyPools, AWorkloadStopsAtAnImpossibleAnswer) {
  const auto history = *ParsePagedHistory(
      "kvp1 " + kPool + kCommit +
      "| fork 0 3 0 | append 0 0 2 | commit_unknown 0 1 0 | truncate 0 1 0");
  const auto fault = [&](const Wrong& wrong, const PoolAbilities& abilities) {
    std::vector<nlohmann::json> log;
    PoolCalls calls;
    auto faulty = std::make_unique<WrongPool>(
        *MakePagedPool(history.spec, "reference"), wrong);
    PoolLog pool(std::make_unique<LoggingPool>(std::move(faulty), log), calls);
    PoolWorkload solo(pool, abilities);
    try {
      for (const PagedOp& op : history.ops) solo.Do(op);
      solo.End();
    } catch (Failure found) {
      found.trace = calls.Steps();
      const PageVerdict page =
          JudgePoolPage(PageData(PageHtml(found)), {.calls = log});
      for (const std::string& lie : page.lies) ADD_FAILURE() << lie;
      return found.text;
    }
    return std::string();
  };
  EXPECT_EQ(fault({}, {}), "");
  const Status no(StatusCode::kInvalidArgument, "no");
  for (const char* call :
       {"Open", "Fork", "SeqLen", "Append", "Commit", "CommitUnknown", "Views",
        "Truncate", "Free", "SlotMapping", "ExportTable", "ExportCsr"}) {
    const std::string found = fault({.call = call, .with = no}, {});
    EXPECT_NE(found.find(" is invalid_argument: no"), std::string::npos)
        << call << ": " << found;
  }
  for (const auto& [call, without] :
       std::vector<std::pair<std::string, PoolAbilities>>{
           {"Fork", {.fork = false}},
           {"Truncate", {.truncate = false}},
           {"CommitUnknown", {.commit_unknown = false}},
           {"ExportTable", {.table = false}},
           {"ExportCsr", {.csr = false}},
           {"SlotMapping", {.slots = false}}}) {
    EXPECT_EQ(fault({.call = call, .with = no}, without), "") << call;
  }
  // A pool may be full, but must not have tokens that were never appended.
  EXPECT_EQ(fault({.call = "Append"}, {}), "");
  const auto begins = [](int by) {
    return Wrong{.call = "SeqLen", .number = [=](int len) { return len + by; }};
  };
  EXPECT_EQ(fault(begins(9), {}),
            "Open: sequence 0 begins with 9 tokens, it may have 0");
  EXPECT_EQ(fault(begins(-1), {}),
            "Open: sequence 0 begins with -1 tokens, it may have 0");
  const Wrong same = {.call = "Fork", .number = [](int) { return 0; }};
  EXPECT_EQ(fault(same, {}), "Fork: there is a sequence 0 already");
}

// The oracle judges only what the driver reads: the driver must read
// everything.
TEST(PoolWorkload, ComparesEachLayerOfEachSequence) {
  const auto history =
      ParsePagedHistory("kvp1 layers=3 | open 0 0 0 | open 1 0 0");
  ASSERT_TRUE(history.ok()) << history.status().ToString();
  std::set<std::pair<int, int>> viewed;
  WrongPool pool(*MakePagedPool(history->spec, "reference"),
                 {.viewed = &viewed});
  PoolWorkload solo(pool, {});
  for (const PagedOp& op : history->ops) solo.Do(op);
  EXPECT_EQ(viewed, (std::set<std::pair<int, int>>{
                        {0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}}));
}

}  // namespace
}  // namespace kvtwin::props
