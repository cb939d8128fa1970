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
#include "kvtwin/status.h"

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
  constexpr std::array<std::string_view, 7> kChanges = {
      "open", "fork", "append", "commit", "truncate", "free", "media"};
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

// Returns the calls that the page of a history lists: those that change the
// pool, counted from 1, and the last call.
std::vector<Line> ListedOf(const std::vector<json>& calls) {
  std::vector<Line> lines;
  for (const json& call : calls) {
    if (!ChangesThePool(call) && &call != &calls.back()) continue;
    lines.push_back({std::ssize(lines) + 1, call});
  }
  return lines;
}

// Returns the name of a status at the end of the text: "...: ok"; or "".
std::string StatusAtEnd(const std::string& text) {
  const std::size_t at = text.rfind(": ");
  if (at == text.npos) return "";
  std::string word = text.substr(at + 2);
  for (int code = 0; code <= AsInt(StatusCode::kDeviceError); ++code) {
    if (word == StatusName(static_cast<StatusCode>(code))) return word;
  }
  return "";
}

// Returns the numbers that a page must show for a call.
std::vector<std::int64_t> NumbersOf(const json& call, bool with_answer) {
  const std::string op = call["op"];
  std::vector<std::int64_t> numbers;
  if (op == "open") {
    AddList(call.value("prompt", json::array()), numbers);
    AddList(call.value("media_at", json::array()), numbers);
  } else if (call.contains("seq")) {
    numbers.push_back(call["seq"]);
  }
  if (call.contains("layer")) numbers.push_back(call["layer"]);
  if (call.contains("group")) numbers.push_back(call["group"]);
  if (op == "append") {
    AddList(call["key"]["shape"], numbers);
  } else if (op == "commit" && call.contains("tokens")) {
    AddList(call["tokens"], numbers);
  } else if (op == "commit") {
    numbers.push_back(call["new_tokens"]);
  } else if (op == "fork" || op == "truncate") {
    numbers.push_back(call["len"]);
    if (call.contains("kept")) numbers.push_back(call["kept"]);
  } else if (op == "media") {
    numbers.push_back(call["at"]);
  }
  if (with_answer && (op == "open" || op == "fork")) {
    numbers.push_back(call["result"]);
  }
  if (with_answer && call.contains("len") && op == "open") {
    numbers.push_back(call["len"]);
  }
  return numbers;
}

class PoolPageJudge {
 public:
  PoolPageJudge(const json& page, const JudgedPool& pool)
      : page_(page),
        is_history_(pool.recording.empty()),
        lines_(is_history_ ? ListedOf(pool.calls) : LinesOf(pool.recording)) {}

  PageVerdict Run() {
    const json& steps = page_["steps"];
    const auto left_out = page_["left_out"].get<std::int64_t>();
    const std::int64_t drawn = left_out + std::ssize(steps);
    if (lines_.empty()) {
      labels_.Expect(drawn == 1 && steps[0]["call"] == "setup", "no call");
    } else {
      labels_.Expect(drawn <= std::ssize(lines_), "a call was not made");
      labels_.Expect(drawn == std::ssize(lines_), "each call is in the list");
    }
    for (std::int64_t i = 0; i < std::ssize(steps); ++i) {
      const auto at = AsSize(left_out + i);
      if (at >= lines_.size()) break;
      JudgeStep(At(steps, i), lines_[at]);
    }
    JudgeHeadline();
    return std::move(labels_.verdict());
  }

 private:
  void JudgeStep(const json& step, const Line& line) {
    const std::string call = step["call"];
    const std::string arguments = step["arguments"];
    const std::string text = arguments.empty() ? call : call + " " + arguments;
    labels_.SetPlace(fmt::format("step {} {}: ", step["number"].dump(), text));
    labels_.Expect(step["number"] == line.number, "the number of the line");
    const std::string name = call.substr(0, call.find_first_of(" :"));
    labels_.Expect(name == line.call["op"], "the call was " + line.call.dump());
    if (name != line.call["op"]) return;
    // The reads of a recording have more than these numbers.
    if (!is_history_ && !ChangesThePool(line.call)) return;
    const std::string status =
        line.call.value("status", is_history_ ? "" : "ok");
    const auto expected = NumbersOf(line.call, status == "ok");
    const auto shown = NumbersIn(text);
    labels_.Expect(
        shown == expected,
        fmt::format("it shows [{}], the call has [{}]", fmt::join(shown, " "),
                    fmt::join(expected, " ")));
    std::string answer = status == "ok" ? "" : status;
    if (name == "append") {
      answer = is_history_ ? status : line.call.value("result", "ok");
    }
    labels_.Expect(StatusAtEnd(text) == answer, "the answer was " + answer);
  }

  void JudgeHeadline() {
    labels_.SetPlace("headline: ");
    const std::string call = page_["steps"].back()["call"];
    const std::string headline = page_["headline"];
    const std::string reason = page_["reason"];
    const bool failed =
        page_["check"].get<std::string>().starts_with("backend:");
    labels_.Expect(
        headline == (failed ? "The backend failed."
                            : call.substr(0, call.find_first_of(" :")) +
                                  " gave a wrong answer."),
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
