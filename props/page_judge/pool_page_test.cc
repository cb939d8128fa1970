// Each label on the pages of recorded pools is true.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"
#include "props/page_judge/page_judge.h"
#include "props/page_judge/pool_page_judge.h"
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

TEST(PageJudge, FindsEachChangedLabelOfAPool) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("pool.jsonl");
  const std::string text = WrongRecordings().back();
  ASSERT_TRUE(WriteFile(path, text).ok());
  const auto failure = ExplainRecording(path, kTwins);
  ASSERT_TRUE(failure);
  const PageJson page = PageData(PageHtml(*failure));
  const JudgedPool pool = {.recording =
                               FirstLines(text, JudgeText(text).line())};
  ASSERT_TRUE(JudgePoolPage(page, pool).lies.empty());
  const auto expect_found = [&](const PageJson& changed) {
    EXPECT_FALSE(JudgePoolPage(changed, pool).lies.empty())
        << PageJson::diff(page, changed).dump();
  };
  for (std::size_t i = 0; i < page["steps"].size(); ++i) {
    PageJson changed = page;
    changed["steps"][i]["call"] = "close";
    expect_found(changed);
    changed = page;
    changed["steps"][i]["number"] = 99;
    expect_found(changed);
    const std::string arguments = page["steps"][i]["arguments"];
    const std::string call = page["steps"][i]["call"];
    if (call != "open" && call != "fork" && call != "append" &&
        call != "commit" && call != "truncate" && call != "free") {
      continue;
    }
    for (std::size_t c = 0; c < arguments.size(); ++c) {
      if (std::isdigit(static_cast<unsigned char>(arguments[c])) == 0) continue;
      std::string other = arguments;
      other[c] = other[c] == '7' ? '8' : '7';
      changed = page;
      changed["steps"][i]["arguments"] = other;
      expect_found(changed);
    }
  }
  PageJson changed = page;
  changed["steps"].erase(0);
  expect_found(changed);
  for (const auto& [key, value] : {std::pair<std::string, PageJson>{
                                       "headline", "free gave a wrong answer."},
                                   {"more", "another reason"}}) {
    changed = page;
    changed[key] = value;
    expect_found(changed);
  }
}

}  // namespace
}  // namespace kvtwin::props
