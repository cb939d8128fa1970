// The page of a failure: what it says and draws, that nothing in it comes
// alive, and that it stays small.

#include "props/report/page.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/base/program.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"
#include "props/report/show.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kDataBegin =
    R"(<script type="application/json" id="failure">)";
constexpr std::string_view kScriptEnd = "</script>";

// The data that the page draws.
Json DataOf(const std::string& page) {
  const std::size_t begin = page.find(kDataBegin) + kDataBegin.size();
  return Json::parse(page.substr(begin, page.find(kScriptEnd, begin) - begin));
}

std::size_t CountOf(std::string_view what, std::string_view text) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != text.npos; ++at) {
    ++count;
  }
  return count;
}

Failure DefragBug() {
  const auto failure = ExplainRecording(
      KVTWIN_RECORDINGS "/reject/ollama-0.12.9-defrag/contiguous-0016.jsonl",
      {"reference", "optimized"});
  EXPECT_TRUE(failure.has_value());
  return failure.value_or(Failure());
}

// As if the last call of the history had failed, at a place in its view.
Failure LastCallOf(const std::string& text, const std::string& check,
                   int row = -1, int column = -1) {
  Failure difference;
  difference.check = check;
  difference.row = row;
  difference.column = column;
  const Result<History> history = ParseHistory(text);
  EXPECT_TRUE(history.ok()) << text;
  return Explain(*history, difference, TwinSubject("optimized"),
                 /*drawn=*/true);
}

TEST(Page, HasTheWrongRowOfTheDefragBug) {
  const std::string page = PageHtml(DefragBug());
  const Json data = DataOf(page);
  EXPECT_EQ(data["headline"],
            "The token at position 6 of sequence 0 reads the wrong token.");
  EXPECT_EQ(data["more"],
            "Line 10 moved position 4 of sequence 0 to cell 0; what the cache "
            "returned there is the row of position 3.");
  EXPECT_EQ(data["wrong"], (Json{{"row", 1}, {"cell", 0}}));
  ASSERT_EQ(data["steps"].size(), 11U);
  const Json& last = data["steps"].back();
  EXPECT_EQ(last["number"], 12);
  EXPECT_EQ(last["cells"][0]["position"], 4);
  EXPECT_EQ(last["found"][0]["position"], 3);
  EXPECT_EQ(last["found"][0]["differs"], true);
  EXPECT_FALSE(last["found"][2].contains("differs"));
  EXPECT_EQ(last["mask"]["rows"][0]["sights"], "xx#....");
  EXPECT_EQ(last["mask"]["rows"][1]["sights"], "x.##...");
  EXPECT_EQ(last["mask"]["rows"][1]["token"]["position"], 6);
  EXPECT_EQ(data["steps"][8]["moved"],
            Json::parse(R"([{"cell":0,"from":4},{"cell":1,"from":3}])"));
  EXPECT_NE(page.find("kvtwin show "), std::string::npos);
  // For those without JavaScript.
  EXPECT_NE(page.find("0@6       #.##..."), std::string::npos);
}

TEST(Page, EscapesHostileText) {
  const std::string plain = PageHtml(DefragBug());
  const std::string hostile =
      "</script></pre><script>alert(1)</script><img src=x onerror=alert(1)>"
      "{{data}}<!--\"'&\xff\n";
  Failure failure = DefragBug();
  failure.name = failure.setup = failure.check = failure.text = hostile;
  failure.rerun = failure.report = failure.note = hostile;
  failure.trace.back().call = failure.trace.back().arguments = hostile;
  failure.trace.back().answer = hostile;
  const std::string page = PageHtml(failure);
  for (const std::string_view tag : {"<script", "</script", "<img", "<!--"}) {
    EXPECT_EQ(CountOf(tag, page), CountOf(tag, plain)) << tag;
  }
  EXPECT_EQ(CountOf(R"("headline":)", page), 1U);  // {{data}} stays as it is.
  const std::string call = DataOf(page)["steps"].back()["call"];
  EXPECT_EQ(call.substr(0, 20), hostile.substr(0, 20));
}

TEST(Page, QuotesShellWords) {
  EXPECT_EQ(ShellWord("a/b-1.jsonl"), "a/b-1.jsonl");
  EXPECT_EQ(ShellWord("it's; rm *"), R"('it'\''s; rm *')");
  EXPECT_EQ(ShellWord(""), "''");
}

TEST(Page, StaysSmallAndCountsWhatItLeavesOut) {
  std::string history = "kvt1 cap=390 batch=100 seqs=1 | put 0*100";
  for (int i = 0; i < 38; ++i) history += " | put 0*5";
  history += " | put 0*100";
  const std::string page =
      PageHtml(LastCallOf(history, "subject: K bytes", 90, 300));
  EXPECT_LT(page.size(), 1U << 20);
  const Json data = DataOf(page);
  EXPECT_EQ(data["steps"].size(), AsSize(Failure::kSteps));
  EXPECT_EQ(data["left_out"], 2 + 3 * 40 - Failure::kSteps);
  EXPECT_EQ(data["from"], 268);
  const Json& last = data["steps"].back();
  EXPECT_EQ(last["cells"].size(), AsSize(Viewport::kCells));
  EXPECT_EQ(last["cells_left_out"], 390 - Viewport::kCells);
  const Json& rows = last["mask"]["rows"];
  ASSERT_EQ(rows.size(), Viewport::kRows + 1U);
  EXPECT_EQ(rows.back()["row"], 90);
  EXPECT_EQ(rows.back()["sights"].get<std::string>(),
            std::string(Viewport::kCells, '#'));
  EXPECT_EQ(last["rows_left_out"], 100 - Viewport::kRows - 1);
}

TEST(Page, NamesAllSequencesOfASharedCell) {
  const Json data = DataOf(PageHtml(
      LastCallOf("kvt1 cap=4 | put 0*2 | copy 0>1:2", "subject: cells")));
  EXPECT_EQ(data["steps"].back()["cells"][1],
            Json::parse(R"({"cell":1,"position":1,"sequences":[0,1]})"));
  EXPECT_EQ(data["headline"], "CopyPrefix gave a wrong answer.");
}

class ThrowsOnTwoTokens final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status StartForward(const Batch& batch, bool reserve) override {
    if (batch.positions.size() == 2) throw std::runtime_error("two tokens");
    return ForwardingCache::StartForward(batch, reserve);
  }
};

// Tokens move when a pass begins, also if it has no answer.
TEST(Page, PassesBeginWithStartForward) {
  const History history =
      *ParseHistory("kvt1 cap=4 | put 0*2 | copy 0>1:2 | put 1*1");
  const Failure wrong = {.check = "subject: rows", .text = "a row differs"};
  for (const Level level : {Level::kIdentity, Level::kVisibility}) {
    Subject subject = TwinSubject("optimized");
    subject.level = level;
    int passes = 0;
    for (const Step& step : Explain(history, wrong, subject).trace) {
      EXPECT_EQ(step.begins_pass, step.call.starts_with("StartForward("))
          << step.call;
      passes += step.begins_pass ? 1 : 0;
    }
    EXPECT_EQ(passes, 2);
    subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(
          std::make_unique<ThrowsOnTwoTokens>(*MakeCache(spec, "optimized")));
    };
    const Failure thrown = Explain(history, wrong, subject);
    EXPECT_TRUE(thrown.trace.back().begins_pass);
    EXPECT_TRUE(thrown.trace.back().call.starts_with("StartForward("));
  }
}

TEST(Page, IsWrittenOrExplainsWhyNot) {
  const ScratchFolder folder("page");
  const std::string path = folder.File("page.html");
  ASSERT_TRUE(WritePage(DefragBug(), path).ok());
  EXPECT_EQ(ReadFile(path), PageHtml(DefragBug()));
  EXPECT_FALSE(WritePage(DefragBug(), "/no/such/folder/page.html").ok());
}

}  // namespace
}  // namespace kvtwin::props
