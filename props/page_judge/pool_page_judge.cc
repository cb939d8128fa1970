#include "props/page_judge/pool_page_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/index.h"

namespace kvtwin::props {
namespace {

using nlohmann::json;

constexpr std::size_t kListShown = 32;

// A line of the recording, with its number.
struct Line {
  std::int64_t number = 0;
  json call;
};

std::vector<Line> LinesOf(const std::string& recording) {
  std::vector<Line> lines;
  std::istringstream in(recording);
  std::string text;
  std::getline(in, text);  // The header.
  for (std::int64_t number = 2; std::getline(in, text); ++number) {
    lines.push_back({number, json::parse(text)});
  }
  return lines;
}

bool ChangesThePool(const json& call) {
  constexpr std::array<std::string_view, 6> kChanges = {
      "open", "fork", "append", "commit", "truncate", "free"};
  return std::ranges::find(kChanges, call["op"].get<std::string>()) !=
         kChanges.end();
}

// Returns the numbers of a text, without those of the keys in quotes.
std::vector<std::int64_t> NumbersIn(const std::string& text) {
  std::vector<std::int64_t> numbers;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\'') quoted = !quoted;
    const bool digit = std::isdigit(static_cast<unsigned char>(text[i])) != 0;
    if (quoted || !digit) continue;
    std::size_t length = 0;
    const bool minus = i > 0 && text[i - 1] == '-';
    const std::int64_t number = std::stoll(text.substr(i), &length);
    numbers.push_back(minus ? -number : number);
    i += length - 1;
  }
  return numbers;
}

// Adds the numbers of a list, as many as a page shows.
void AddList(const json& list, std::vector<std::int64_t>& numbers) {
  for (std::size_t i = 0; i < std::min(list.size(), kListShown); ++i) {
    numbers.push_back(list[i]);
  }
}

// Returns the numbers that a page must show for a call that changes the pool.
std::vector<std::int64_t> NumbersOf(const json& call, bool with_answer) {
  const std::string op = call["op"];
  std::vector<std::int64_t> numbers;
  if (op == "open") {
    AddList(call.value("prompt", json::array()), numbers);
  } else {
    numbers.push_back(call["seq"]);
  }
  if (op == "append") {
    numbers.push_back(call["layer"]);
    AddList(call["key"]["shape"], numbers);
  } else if (op == "commit" && call.contains("tokens")) {
    AddList(call["tokens"], numbers);
  } else if (op == "commit") {
    numbers.push_back(call["new_tokens"]);
  } else if (op == "fork" || op == "truncate") {
    numbers.push_back(call["len"]);
  }
  if (with_answer && (op == "open" || op == "fork")) {
    numbers.push_back(call["result"]);
  }
  if (with_answer && op == "open") numbers.push_back(call["len"]);
  return numbers;
}

class PoolPageJudge {
 public:
  PoolPageJudge(const json& page, const JudgedPool& pool)
      : page_(page),
        is_history_(pool.is_history),
        lines_(LinesOf(pool.recording)) {}

  PageVerdict Run() {
    // The page of a history shows the calls that change the pool.
    if (is_history_) {
      std::erase_if(
          lines_, [](const Line& line) { return !ChangesThePool(line.call); });
    }
    const json& steps = page_["steps"];
    const auto left_out = page_["left_out"].get<std::int64_t>();
    const std::int64_t drawn = left_out + std::ssize(steps);
    labels_.Expect(drawn <= std::ssize(lines_), "a call was not made");
    if (!is_history_) {
      labels_.Expect(drawn == std::ssize(lines_), "each call is in the list");
    }
    for (std::int64_t i = 0; i < std::ssize(steps); ++i) {
      const auto at = AsSize(left_out + i);
      if (at >= lines_.size()) break;
      JudgeStep(At(steps, i), lines_[at], i + 1 == std::ssize(steps));
    }
    JudgeHeadline();
    return std::move(labels_.verdict());
  }

 private:
  void JudgeStep(const json& step, const Line& line, bool is_last) {
    const std::string call = step["call"];
    const std::string arguments = step["arguments"];
    const std::string text = arguments.empty() ? call : call + " " + arguments;
    labels_.SetPlace(fmt::format("step {} {}: ", step["number"].dump(), text));
    if (!is_history_) {
      labels_.Expect(step["number"] == line.number, "the number of the line");
    }
    const std::string name = call.substr(0, call.find(' '));
    labels_.Expect(name == line.call["op"], "the call was " + line.call.dump());
    if (name != line.call["op"] || !ChangesThePool(line.call)) return;
    const bool with_answer = !is_history_ || !is_last;
    const auto expected = NumbersOf(line.call, with_answer);
    const auto shown = NumbersIn(text);
    labels_.Expect(
        shown == expected,
        fmt::format("it shows [{}], the call has [{}]", fmt::join(shown, " "),
                    fmt::join(expected, " ")));
    if (name == "append" && with_answer) {
      const std::string result = line.call.value("result", "ok");
      labels_.Expect(text.ends_with(": " + result), "the answer was " + result);
    }
  }

  void JudgeHeadline() {
    labels_.SetPlace("headline: ");
    const std::string call = page_["steps"].back()["call"];
    const std::string headline = page_["headline"];
    const std::string reason = page_["reason"];
    labels_.Expect(
        headline == call.substr(0, call.find(' ')) + " gave a wrong answer.",
        headline);
    labels_.Expect(page_["more"] == reason.substr(0, reason.find('\n')),
                   page_["more"]);
    labels_.Expect(page_["wrong"]["row"] == -1 && page_["wrong"]["cell"] == -1,
                   "nothing is drawn");
  }

  const json& page_;
  bool is_history_;
  std::vector<Line> lines_;
  PageLabels labels_;
};

}  // namespace

PageVerdict JudgePoolPage(const json& page, const JudgedPool& pool) {
  return PoolPageJudge(page, pool).Run();
}

}  // namespace kvtwin::props
