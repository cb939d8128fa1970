// Runs pools with injected faults: each comparison that PagedDriver makes must
// find the fault that no other comparison can find. For caches see
// faulty_twins_test.cc.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "props/base/forwarding_pool.h"
#include "props/page_judge/logging_pool.h"
#include "props/page_judge/page_judge.h"
#include "props/page_judge/pool_page_judge.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_log.h"
#include "props/paged/pool_workload.h"
#include "props/report/page.h"
#include "props/search/judged_page.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// The faults to inject into a pool. Members that are not set inject nothing.
struct Wrong {
  std::string call = {};  // Returns `with` in place of ok.
  Status with = {StatusCode::kCacheFull, "so it is"};
  bool throws = false;                  // `call` throws.
  std::optional<Status> refusal = {};   // Replaces every refusal.
  std::function<int(int)> number = {};  // Changes the answer of `call`.
  std::function<void(std::vector<PagedView>&)> views = {};
  std::function<void(std::vector<PagedView>&)> packed = {};
  std::function<void(PagedAppend&)> append = {};
  std::function<void(std::optional<PagedKv>&)> whole = {};
  std::function<void(PagedCsr&)> csr = {};
  std::function<void(PagedTable&)> table = {};
  std::function<void(std::vector<std::int64_t>&)> slots = {};
  std::function<void(PagedKv&)> blocks = {};
  bool later_slots_only = false;  // Keep ranges from position 0.
  std::function<void(PagedUsage&)> usage = {};
  bool refusals_cost = false;  // Each uses up a block in Usage.
  // Gets the sequences and layers that Views is asked for.
  std::set<std::pair<int, int>>* viewed = nullptr;
};

class WrongPool final : public ForwardingPool {
 public:
  WrongPool(std::unique_ptr<PagedPool> pool, Wrong wrong)
      : ForwardingPool(std::move(pool)), wrong_(std::move(wrong)) {}

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return Number("Open", pool_->Open(prompt, key));
  }
  Result<int> Fork(int sequence, int len) override {
    return Number("Fork", pool_->Fork(sequence, len));
  }
  Result<int> SeqLen(int sequence) const override {
    return Number("SeqLen", pool_->SeqLen(sequence));
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    return Changed("Append", pool_->Append(sequence, layer, key, value),
                   wrong_.append);
  }
  Status Commit(int sequence, int new_tokens) override {
    return Said("CommitUnknown", pool_->Commit(sequence, new_tokens));
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    return Said("Commit", pool_->Commit(sequence, tokens));
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    if (wrong_.viewed != nullptr) wrong_.viewed->insert({sequence, layer});
    return Changed("Views", pool_->Views(sequence, layer), wrong_.views);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return Changed("ViewsPacked", pool_->ViewsPacked(sequence, layer),
                   wrong_.packed);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return Changed("ContiguousKV", pool_->ContiguousKV(sequence, layer, kv_len),
                   wrong_.whole);
  }
  Status Truncate(int sequence, int len) override {
    return Said("Truncate", pool_->Truncate(sequence, len));
  }
  Status Free(int sequence) override {
    return Said("Free", pool_->Free(sequence));
  }
  PagedUsage Usage() const override {
    PagedUsage usage = pool_->Usage();
    if (wrong_.usage) wrong_.usage(usage);
    if (wrong_.refusals_cost) {
      usage.free -= refused_;
      usage.cached += refused_;
    }
    return usage;
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return Changed("ExportCsr", pool_->ExportCsr(sequences), wrong_.csr);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return Changed("ExportTable", pool_->ExportTable(sequences), wrong_.table);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    auto slots = pool_->SlotMapping(sequence, begin, end);
    if (begin == 0 && wrong_.later_slots_only) return slots;
    return Changed("SlotMapping", std::move(slots), wrong_.slots);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return Changed("Blocks", pool_->Blocks(layer), wrong_.blocks);
  }

 private:
  Status Said(std::string_view call, Status status) const {
    if (!status.ok()) {
      if (status.code() == StatusCode::kCacheFull) ++refused_;
      return wrong_.refusal.value_or(status);
    }
    if (call != wrong_.call || wrong_.number) return status;
    if (wrong_.throws) throw std::out_of_range("no such block");
    return wrong_.with;
  }
  Result<int> Number(std::string_view call, Result<int> number) const {
    Status status = Said(call, number.status());
    if (!status.ok()) return status;
    return call == wrong_.call && wrong_.number ? wrong_.number(*number)
                                                : *number;
  }
  template <class T>
  Result<T> Changed(std::string_view call, Result<T> answer,
                    const std::function<void(T&)>& change) const {
    Status status = Said(call, answer.status());
    if (!status.ok()) return status;
    if (change) change(*answer);
    return answer;
  }

  const Wrong wrong_;
  mutable int refused_ = 0;
};

enum class Who { kOptimized, kReference, kBoth };

struct PoolCase {
  std::string name;
  std::string history;  // Without "kvp1 ".
  Wrong wrong;
  std::string text;  // Part of the expected failure.
  Who who = Who::kOptimized;
};

PagedMaker WrongPools(const Wrong& wrong, Who who) {
  return [=](const PagedSpec& spec,
             std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = MakePagedPool(spec, twin);
    const bool is_reference = twin == "reference";
    const bool meant =
        who == Who::kBoth || is_reference == (who == Who::kReference);
    if (!pool.ok() || !meant) return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<WrongPool>(std::move(*pool), wrong));
  };
}

// Each label on the page of each failure is true, too.
void ExpectFound(const std::vector<PoolCase>& cases) {
  std::int64_t labels = 0;
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
  }
  fmt::print("faulty pools: {} pages, {} labels\n", cases.size(), labels);
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
  add(
      "a view less", [](auto& views) { views.pop_back(); }, "Views differ");
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
                       Who::kBoth});
    }
  }
  cases.push_back({"a token too few",
                   kPool + kCommit,
                   {.views =
                        [](auto& views) {
                          if (!views.empty()) views.pop_back();
                        }},
                   "Views: not all rows",
                   Who::kBoth});
  cases.push_back({"another start",
                   kPool + kCommit,
                   {.views = InLast([](PagedView& view) { ++view.start; })},
                   "Views: not one after another",
                   Who::kBoth});
  cases.push_back({"a token too many",
                   kPool + kCommit,
                   {.views = InLast([](PagedView& view) {
                      ++view.length;
                      ++view.key.shape[2];
                      ++view.value.shape[2];
                    })},
                   "position 3 of sequence 0 has another row",
                   Who::kBoth});
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
  cases.push_back({"a view less",
                   head,
                   {.packed = [](auto& views) { views.pop_back(); }},
                   "ViewsPacked differ"});
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
  for (const Who who : {Who::kOptimized, Who::kReference}) {
    const std::string text = who == Who::kReference
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
                   Who::kBoth});
  cases.push_back(
      {"a view less, both",
       kPool + kAppend,
       {.append = [](PagedAppend& append) { append.views.pop_back(); }},
       "Append: views of other rows",
       Who::kBoth});
  cases.push_back({"a view's start, both",
                   kPool + kAppend,
                   {.append = in_last([](PagedView& view) { ++view.start; })},
                   "Append: other views",
                   Who::kBoth});
  ExpectFound(cases);
}

TEST(FaultyPools, EveryResultIsCompared) {
  const std::string two = kPool + kCommit;
  std::vector<PoolCase> cases;
  for (const auto& [call, more] :
       std::vector<std::pair<std::string, std::string>>{
           {"Open", ""},
           {"Fork", "| fork 0 1 0"},
           {"Append", ""},
           {"Commit", ""},
           {"CommitUnknown", "| append 0 0 2 | commit_unknown 0 1 0"},
           {"Truncate", "| truncate 0 1 0"},
           {"Free", "| free 0 0 0"}}) {
    const std::string name = call == "CommitUnknown" ? "Commit" : call;
    cases.push_back({call,
                     two + more,
                     {.call = call},
                     name + ": ok by the reference, cache_full"});
    cases.push_back({call,
                     two + more,
                     {.call = call},
                     name + ": cache_full: so it is by the reference, ok",
                     Who::kReference});
  }
  for (const char* call : {"SeqLen", "Views", "ContiguousKV", "SlotMapping",
                           "ExportCsr", "ExportTable", "Blocks"}) {
    cases.push_back({call,
                     two,
                     {.call = call},
                     fmt::format("{} is cache_full: so it is", call)});
    cases.push_back({call,
                     two,
                     {.call = call},
                     fmt::format("{} of the reference is cache_full", call),
                     Who::kReference});
  }
  for (const char* call : {"Open", "Views", "Free", "SlotMapping"}) {
    cases.push_back({call, two, {.call = call, .throws = true}, "exception: "});
    cases.push_back({call,
                     two,
                     {.call = call, .throws = true},
                     ": no such block",
                     Who::kReference});
  }
  const auto next = [](int number) { return number + 1; };
  cases.push_back(
      {"Open", two, {.call = "Open", .number = next}, "Open: other numbers"});
  cases.push_back({"Fork",
                   two + "| fork 0 1 0",
                   {.call = "Fork", .number = next},
                   "Fork: other numbers"});
  for (const Who who : {Who::kOptimized, Who::kReference}) {
    cases.push_back(
        {"SeqLen", two, {.call = "SeqLen", .number = next}, "", who});
  }
  ExpectFound(cases);
}

TEST(FaultyPools, BlocksAreCompared) {
  std::vector<PoolCase> cases;
  const auto add = [&](const auto& change) {
    for (const Who who : {Who::kOptimized, Who::kReference}) {
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
  const auto slot = [](std::vector<std::int64_t>& slots) {
    if (!slots.empty()) ++slots.back();
  };
  const auto index = [](PagedCsr& csr) {
    if (!csr.indices.empty()) ++csr.indices.back();
  };
  const auto last = [](PagedCsr& csr) {
    if (!csr.last_page_len.empty()) ++csr.last_page_len.back();
  };
  const auto block = [](PagedTable& table) {
    if (!table.blocks.empty()) ++table.blocks.back();
  };
  const auto len = [](PagedTable& table) {
    if (!table.seq_lens.empty()) ++table.seq_lens.back();
  };
  const std::vector<PoolCase> cases = {
      {"a slot of the reference",
       two,
       {.slots = slot},
       "SlotMapping differs",
       Who::kReference},
      {"an index", two, {.csr = index}, "ExportCsr differs"},
      {"a last page", two, {.csr = last}, "ExportCsr differs"},
      {"a block", two, {.table = block}, "ExportTable differs"},
      {"a length", two, {.table = len}, "ExportTable differs"},
      {"a slot of both",
       two,
       {.slots = slot},
       "not where the views are",
       Who::kBoth},
      {"a slot that is asked for alone, of both",
       two,
       {.slots = slot, .later_slots_only = true},
       "not where the views are",
       Who::kBoth},
      {"an index of both",
       two,
       {.csr = index},
       "not what the views are",
       Who::kBoth},
      {"a last page of both",
       two,
       {.csr = last},
       "ExportCsr: not what",
       Who::kBoth},
      {"a block of both",
       two,
       {.table = block},
       "ExportTable: not what",
       Who::kBoth},
      {"a length of both",
       two,
       {.table = len},
       "ExportTable: not what",
       Who::kBoth},
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
                     Who::kBoth});
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
                   Who::kBoth});
  ExpectFound(cases);
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
  EXPECT_EQ(TextOf(RunPaged(history, nullptr,
                            WrongPools({.refusals_cost = true}, Who::kBoth))),
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
                     Who::kBoth});
    const Status told(StatusCode::kInvalidArgument, "no");
    cases.push_back({"another message",
                     misuse,
                     {.refusal = told},
                     "invalid_argument: no by the optimized twin"});
  }
  ExpectFound(cases);
}

// Third-party pools may have messages of their own.
TEST(FaultyPools, MessagesAreComparedForOurTwinsOnly) {
  const auto history = *ParsePagedHistory("kvp1 " + kPool + "layout=head " +
                                          kCommit + "| misuse 0 0 1");
  const Status told(StatusCode::kInvalidArgument, "no");
  for (const bool same : {false, true}) {
    const std::string wrong =
        TextOf(RunPaged(history, nullptr,
                        WrongPools({.refusal = told}, Who::kOptimized), same));
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

// A fuzz run ends with the shortest history, whichever call fails.
TEST(FaultyPools, AreShrunkForEveryFault) {
  for (const Wrong& wrong :
       {Wrong{.call = "Views"}, Wrong{.call = "SlotMapping", .throws = true},
        Wrong{.call = "Append", .throws = true}}) {
    SCOPED_TRACE(wrong.call);
    Subject subject;
    int runs = 0;
    subject.run_pool = [&](const PagedHistory& history,
                           const PoolRunOptions& options) {
      ++runs;
      return RunPaged(history, options.counts,
                      WrongPools(wrong, Who::kOptimized));
    };
    const PagedFuzzResult result = FuzzPools(1, 500, subject);
    EXPECT_NE(TextOf(result.failure), "");
    EXPECT_LE(result.shrunk.ops.size(), 2U) << ToText(result.shrunk);
    // The search ends when nothing is plainer, long before its limit of 20,000.
    EXPECT_LT(runs, 1000);
  }
  // If one of two bugs is known, the other is found, even though the shortest
  // histories show the known bug.
  Subject subject;
  subject.name = "toy";
  subject.run_pool = [](const PagedHistory& history, const PoolRunOptions&) {
    Failure failure =
        PoolFailure(history.ops.size() < 3 ? "short: 1" : "long: 1");
    failure.step = history.ops.size();
    return RunResult{
        .ran = true, .operations = std::ssize(history.ops), .failure = failure};
  };
  const PagedFuzzResult result = FuzzPools(1, 10000, subject, {"toy-short"});
  EXPECT_EQ(TextOf(result.failure), "long: 1");
  EXPECT_EQ(result.shrunk.ops.size(), 3);
  // A pool that cannot be made, and a pool whose maker throws.
  const PagedMaker none = [](const PagedSpec&, std::string_view)
      -> Result<std::unique_ptr<PagedPool>> { throw std::bad_alloc(); };
  EXPECT_EQ(TextOf(RunPaged(MakePagedHistory(1, 0), nullptr, none)),
            "exception: init: std::bad_alloc");
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
