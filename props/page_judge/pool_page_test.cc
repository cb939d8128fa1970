// Each label on the pages of recorded pools is true.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "props/base/forwarding_pool.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"
#include "props/page_judge/page_judge.h"
#include "props/page_judge/pool_page_judge.h"
#include "props/paged/paged_history.h"
#include "props/report/page.h"
#include "props/report/show.h"
#include "props/search/judged_page.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using PageJson = nlohmann::json;

// Returns the first lines of a recording.
std::string FirstLines(const std::string& text, std::int64_t count) {
  std::size_t end = 0;
  for (; count > 0 && end < text.size(); --count) {
    end = text.find('\n', end) + 1;
  }
  return text.substr(0, end);
}

// Returns the recordings that differ from kPoolLines in one number, and that
// are wrong for it.
std::vector<std::string> WrongRecordings() {
  std::vector<std::string> wrong;
  for (std::size_t i = 1; i < kPoolLines.size(); ++i) {
    const PageJson flat = PageJson::parse(kPoolLines[i]).flatten();
    for (const auto& [key, value] : flat.items()) {
      if (!value.is_number()) continue;
      PageJson changed = flat;
      changed[key] = value.get<int>() + 1;
      std::vector<std::string> lines(kPoolLines.begin(), kPoolLines.end());
      lines[i] = changed.unflatten().dump();
      const std::string text = Lines(lines);
      if (JudgeText(text).verdict() == Verdict::kReject) wrong.push_back(text);
    }
  }
  return wrong;
}

TEST(PageJudge, PagesOfRecordedPoolsAreTrue) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("pool.jsonl");
  int pages = 0;
  std::int64_t labels = 0;
  for (const std::string& text : WrongRecordings()) {
    ASSERT_TRUE(WriteFile(path, text).ok());
    const auto failure = ExplainRecording(path, kTwins);
    ASSERT_TRUE(failure) << text;
    const std::int64_t line = JudgeText(text).line();
    const PageVerdict verdict = JudgePoolPage(
        PageData(PageHtml(*failure)), {.recording = FirstLines(text, line)});
    ++pages;
    labels += verdict.labels;
    for (const std::string& lie : verdict.lies) ADD_FAILURE() << lie;
  }
  fmt::print("recorded pools: {} pages, {} labels\n", pages, labels);
  EXPECT_GT(pages, 30);
}

// Changes the labels of a page one at a time, and expects the judge to find
// each change. Returns how many labels were changed.
int ExpectChangesFound(const PageJson& page, const JudgedPool& pool) {
  int changes = 0;
  const auto expect_found = [&](const PageJson& changed) {
    ++changes;
    EXPECT_FALSE(JudgePoolPage(changed, pool).lies.empty())
        << PageJson::diff(page, changed).dump();
  };
  EXPECT_TRUE(JudgePoolPage(page, pool).lies.empty());
  const auto change = [&](std::size_t i, const char* key,
                          const PageJson& value) {
    PageJson changed = page;
    changed["steps"][i][key] = value;
    expect_found(changed);
  };
  for (std::size_t i = 0; i < page["steps"].size(); ++i) {
    change(i, "call", "close");
    change(i, "number", 99);
    const std::string arguments = page["steps"][i]["arguments"];
    const std::string call = page["steps"][i]["call"];
    // The reads of a recording are not judged.
    const bool is_read = call == "views" || call == "table" || call == "csr" ||
                         call == "slots" || call == "usage" ||
                         call == "seq_len";
    const std::string key = arguments.empty() ? "call" : "arguments";
    const std::string text = page["steps"][i][key];
    if (is_read && key == "arguments") continue;
    for (std::size_t c = 0; c < text.size(); ++c) {
      if (std::isdigit(static_cast<unsigned char>(text[c])) == 0) continue;
      std::string other = text;
      other[c] = other[c] == '7' ? '8' : '7';
      change(i, key.c_str(), other);
    }
    change(i, key.c_str(), text + ": shared_cells");
  }
  PageJson changed = page;
  changed["steps"].erase(0);
  expect_found(changed);
  changed = page;
  changed["steps"].erase(page["steps"].size() - 1);
  expect_found(changed);
  changed = page;
  changed["steps"].push_back(page["steps"].back());
  expect_found(changed);
  for (const auto& [key, value] :
       {std::pair<std::string, PageJson>{"headline", "close gave no answer."},
        {"more", "another reason"}}) {
    changed = page;
    changed[key] = value;
    expect_found(changed);
  }
  return changes;
}

TEST(PageJudge, FindsEachChangedLabelOfAPool) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("pool.jsonl");
  const std::string text = WrongRecordings().back();
  ASSERT_TRUE(WriteFile(path, text).ok());
  const auto failure = ExplainRecording(path, kTwins);
  ASSERT_TRUE(failure);
  const int changes = ExpectChangesFound(
      PageData(PageHtml(*failure)),
      {.recording = FirstLines(text, JudgeText(text).line())});
  EXPECT_GT(changes, 20);
}

// A pool that goes wrong as `fault` says.
enum class PoolFault { kThrows, kRefuses, kOtherViews };
class FaultyPool final : public ForwardingPool {
 public:
  FaultyPool(std::unique_ptr<PagedPool> pool, PoolFault fault)
      : ForwardingPool(std::move(pool)), fault_(fault) {}

  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    if (layer == 1 && fault_ == PoolFault::kThrows) {
      throw std::out_of_range("no such layer");
    }
    if (layer == 1 && fault_ == PoolFault::kRefuses) {
      return Status(StatusCode::kCacheFull, "it is");
    }
    return ForwardingPool::Append(sequence, layer, key, value);
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    auto views = ForwardingPool::Views(sequence, layer);
    if (!views.ok() || views->empty()) return views;
    if (fault_ == PoolFault::kOtherViews) ++views->back().block;
    return views;
  }

 private:
  PoolFault fault_;
};

// A page lists the calls that were made: an append that goes wrong in a layer
// is not followed by the next layer's.
TEST(PageJudge, FindsEachChangedLabelOfAFaultyPool) {
  const auto history = ParsePagedHistory(
      "kvp1 block=2 blocks=6 most=12 layers=3 | open 0 0 0 | open 0 0 0 | "
      "append 0 0 2 | "
      "commit 0 1 0 | fork 0 1 0 | append 1 1 2");
  ASSERT_TRUE(history.ok());
  for (const auto& [fault, last] :
       {std::pair(PoolFault::kThrows, "append  sequence 0, layer 1, K "),
        std::pair(PoolFault::kRefuses, "append  sequence 0, layer 1, K "),
        std::pair(PoolFault::kOtherViews, "views  sequence 0, layer 0")}) {
    const auto run = RunJudged(
        *history,
        [&, each = fault](const PagedSpec& spec, std::string_view twin)
            -> Result<std::unique_ptr<PagedPool>> {
          auto pool = MakePagedPool(spec, twin);
          if (twin == "reference") return pool;
          return std::unique_ptr<PagedPool>(
              std::make_unique<FaultyPool>(std::move(*pool), each));
        });
    ASSERT_TRUE(run);
    SCOPED_TRACE(run->failure.report);
    EXPECT_TRUE(run->failure.trace.back().call.starts_with(last));
    EXPECT_GT(ExpectChangesFound(PageData(PageHtml(run->failure)), run->pool),
              10);
  }
}

}  // namespace
}  // namespace kvtwin::props
