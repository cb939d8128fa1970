#include "props/sessions/session_history.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <random>

#include "core/index.h"

namespace kvtwin::props {
namespace {

constexpr std::string_view kBegin = "kvs1";
constexpr std::string_view kStep = "step";
constexpr int kSteps = 60;
constexpr int kSetupDraws = 24;
constexpr int kStepDraws = 64;  // Few steps draw more.
constexpr int kLargest = 999;
constexpr std::size_t kStepsMax = 10'000;

// Reads "WORD 1 2 3". Returns nothing if it is not.
std::optional<std::vector<int>> ReadDraws(std::string_view word,
                                          std::string_view text) {
  while (text.ends_with(' ')) text.remove_suffix(1);
  if (!text.starts_with(word)) return std::nullopt;
  text.remove_prefix(word.size());
  std::vector<int> draws;
  while (!text.empty()) {
    if (text.front() != ' ') return std::nullopt;
    text.remove_prefix(1);
    int& draw = draws.emplace_back();
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), draw);
    if (error != std::errc() || draw < 0 || draw > kLargest) {
      return std::nullopt;
    }
    text.remove_prefix(AsSize(end - text.data()));
  }
  return draws;
}

std::string DrawsText(std::string_view word, const std::vector<int>& draws) {
  return draws.empty() ? std::string(word)
                       : fmt::format("{} {}", word, fmt::join(draws, " "));
}

}  // namespace

std::string ToText(const SessionHistory& history) {
  std::string text = DrawsText(kBegin, history.setup);
  for (const SessionStep& step : history.ops) {
    text += " | " + DrawsText(kStep, step.draws);
  }
  return text;
}

Result<SessionHistory> ParseSessionHistory(std::string_view text) {
  SessionHistory history;
  for (std::size_t part = 0; !text.empty() || part == 0; ++part) {
    const std::size_t bar = std::min(text.find("| "), text.size());
    const auto draws =
        ReadDraws(part == 0 ? kBegin : kStep, text.substr(0, bar));
    if (!draws || part > kStepsMax) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("part {} is not '{} NUMBER ...', numbers of 0 "
                      "to {}, and at most {} steps",
                      part, part == 0 ? kBegin : kStep, kLargest, kStepsMax));
    }
    if (part == 0) {
      history.setup = *draws;
    } else {
      history.ops.push_back({*draws});
    }
    text.remove_prefix(std::min(bar + 2, text.size()));
  }
  return history;
}

SessionHistory MakeSessionHistory(std::uint64_t seed, std::uint64_t number) {
  std::seed_seq both = {seed, seed >> 32, number, number >> 32};
  std::mt19937 random(both);
  const auto draw = [&](int count) {
    std::vector<int> draws;
    for (int i = 0; i < count; ++i) {
      draws.push_back(AsInt(random() % (kLargest + 1)));
    }
    return draws;
  };
  SessionHistory history = {.setup = draw(kSetupDraws), .ops = {}};
  for (int i = 0; i < kSteps; ++i) history.ops.push_back({draw(kStepDraws)});
  return history;
}

PlayResult PlayHistory(const SessionHistory& history, const SessionsMaker& make,
                       const PlayOptions& options, PlayCounts& counts,
                       std::size_t& steps) {
  steps = 0;
  const std::vector<int>* draws = &history.setup;
  std::size_t drawn = 0;
  const Pick pick = [&](int lo, int hi) {
    if (drawn == draws->size()) return hi;
    return lo + At(*draws, drawn++) % (hi - lo + 1);
  };
  PlayOptions stepped = options;
  stepped.begin_step = [&] {
    if (steps == history.ops.size()) return false;
    draws = &history.ops[steps++].draws;
    drawn = 0;
    return true;
  };
  return RunPlay(pick, make, stepped, counts);
}

}  // namespace kvtwin::props
