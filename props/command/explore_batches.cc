#include "props/command/explore_batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/json_line.h"
#include "props/command/backend_command.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

// Numbers are written as they lie in memory.
static_assert(std::endian::native == std::endian::little);
static_assert(sizeof(FoundState) == 3 * sizeof(std::uint64_t));

constexpr std::size_t kLineMost = 100;
constexpr std::size_t kBatchMost = std::size_t{1} << 24;
constexpr std::size_t kReadMost = std::size_t{1} << 16;

// "expand 3 1000": a word, the number of a case, and the number of the states
// that follow the line.
struct Request {
  std::string word;
  std::size_t case_number = 0;
  std::size_t count = 0;
};

// Reads a line. Returns nothing at the end of the input, and "" for a line that
// is too long.
std::optional<std::string> ReadLine() {
  std::string line;
  for (int c = std::getchar(); c != '\n'; c = std::getchar()) {
    if (c == EOF && line.empty()) return std::nullopt;
    if (c == EOF) break;
    if (line.size() == kLineMost) return "";
    line += static_cast<char>(c);
  }
  return line;
}

std::optional<Request> Parse(std::string_view line) {
  Request request;
  const auto next = [&] {
    const std::string_view word = line.substr(0, line.find(' '));
    line.remove_prefix(std::min(line.size(), word.size() + 1));
    return word;
  };
  const auto number = [&](std::size_t& value) {
    const std::string_view word = next();
    const auto [end, error] =
        std::from_chars(word.data(), word.data() + word.size(), value);
    return error == std::errc() && end == word.data() + word.size();
  };
  request.word = next();
  if (request.word == "cases") {
    if (!line.empty()) return std::nullopt;
    return request;
  }
  if (!number(request.case_number) || !number(request.count) || !line.empty()) {
    return std::nullopt;
  }
  return request;
}

// The memory grows with what is read, and not with what a line announces.
template <class Number>
std::optional<std::vector<Number>> ReadNumbers(std::size_t count) {
  std::vector<Number> numbers;
  while (numbers.size() < count) {
    const std::size_t begin = numbers.size();
    numbers.resize(std::min(count, begin + kReadMost));
    const std::size_t wanted = numbers.size() - begin;
    if (std::fread(&numbers[begin], sizeof(Number), wanted, stdin) != wanted) {
      return std::nullopt;
    }
  }
  return numbers;
}

// Returns whether everything was written.
bool Print(const Json& json, std::span<const FoundState> found = {}) {
  PrintJson(json);
  const bool whole = std::fwrite(found.data(), sizeof(FoundState), found.size(),
                                 stdout) == found.size();
  return std::fflush(stdout) == 0 && whole;
}

}  // namespace

int AnswerBatches(
    const ExploreSize& size, const std::vector<ExploreCase>& cases,
    const Subject& subject, const ExpandFn& expand,
    const std::function<Json(const ExploreResult&)>& failure_json) {
  std::map<std::size_t, StateExpander> expanders;
  const auto refuse = [](std::string_view what) {
    return Complain(fmt::format("explore --batches: {}", what));
  };
  const auto refuse_line = [&](const std::string& line) {
    return refuse(
        fmt::format("not a request: '{}'", Printable(line, kLineMost)));
  };
  while (const auto line = ReadLine()) {
    const std::optional<Request> request = Parse(*line);
    if (!request) return refuse_line(*line);
    if (request->word == "cases") {
      Json names = Json::array();
      for (const ExploreCase& one : cases) names.push_back(one.name);
      if (!Print(names)) return 2;
      continue;
    }
    if (request->case_number >= cases.size()) return refuse("no such case");
    if (request->count > kBatchMost) {
      return refuse(fmt::format("COUNT is {}, it may be at most {}",
                                request->count, kBatchMost));
    }
    const ExploreCase& what = cases[request->case_number];
    if (request->word == "expand") {
      const auto states = ReadNumbers<std::uint64_t>(request->count);
      if (!states) return refuse("the states end too early");
      StateExpander& expander =
          expanders
              .try_emplace(request->case_number, size, what, subject, expand)
              .first->second;
      for (const std::uint64_t state : *states) {
        if (!expander.IsKey(state)) {
          return refuse(fmt::format("no state has the number {}", state));
        }
      }
      const std::clock_t start = std::clock();
      const FoundStates batch = expander.Expand(*states);
      const std::clock_t used = std::clock() - start;
      const Json json = {
          {"checked", batch.checked},
          {"differences", batch.differences},
          {"ended", batch.ended},
          {"not_made", batch.not_made},
          {"failed", batch.failed ? Json(*batch.failed) : Json()},
          {"found", batch.found.size()},
          {"cpu_seconds", static_cast<double>(used) / CLOCKS_PER_SEC}};
      if (!Print(json, batch.found)) return 2;
    } else if (request->word == "along") {
      const auto path = ReadNumbers<FoundState>(request->count);
      if (!path) return refuse("the path ends too early");
      const auto result = ExploreAlong(size, what, subject, expand, *path);
      if (!result) return refuse("not a path");
      if (!Print(result->failure ? failure_json(*result) : Json::object())) {
        return 2;
      }
    } else {
      return refuse_line(*line);
    }
  }
  return 0;
}

}  // namespace kvtwin::props
