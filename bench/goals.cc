#include "bench/goals.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "optimized/targets.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvtwin::bench {
namespace {

constexpr int kTries = 6;

constexpr double kMuch = 2;  // Noise does not make a row miss by this factor.

void PrintHead(std::string_view about) {
  fmt::print(
      "{}. value and limit are times,\n"
      "ratio = value / limit, met if ratio <= goal; 90 % of the speed of a\n"
      "limit is 1.11 of its time.\n\n",
      about);
  fmt::print("{:<67}{:>10}{:>10}{:>10}{:>9}  met\n", "value / limit", "value",
             "limit", "ratio", "goal");
}

void Print(const Goal& row) {
  const auto number = [](double x) {
    return x < 0.1 ? fmt::format("1/{:.0f}", 1 / x) : fmt::format("{:.2f}", x);
  };
  fmt::print("{:<67}{:>10}{:>10}{:>10}{:>9}  {}\n", row.name,
             TimeText(row.value), TimeText(row.limit), number(row.ratio),
             number(row.goal), row.met ? "yes" : "NO");
  std::fflush(stdout);
}

// See Judge.
Goal Measure(const Timing& value, const std::vector<Timing>& limits,
             int rounds) {
  std::vector<std::vector<Goal>> tries(limits.size());
  for (int round = 0; round < rounds; ++round) {
    const auto time_limits = [&] {
      for (std::size_t i = 0; i < limits.size(); ++i) {
        tries[i].emplace_back().limit = limits[i]();
      }
    };
    const bool limits_first = round % 2 == 1;
    if (limits_first) time_limits();
    const double time = value();
    if (!limits_first) time_limits();
    for (std::vector<Goal>& of_limit : tries) {
      Goal& row = of_limit.back();
      row.value = time;
      row.ratio = time / row.limit;
    }
  }
  Goal hardest;
  for (std::vector<Goal>& of_limit : tries) {
    const auto median = of_limit.begin() + rounds / 2;
    std::ranges::nth_element(of_limit, median, {}, &Goal::ratio);
    if (median->ratio > hardest.ratio) hardest = *median;
  }
  return hardest;
}

void Spin(double seconds, const Timing& run) {
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start <
         std::chrono::duration<double>(seconds)) {
    run();
  }
}

// Writes one row per line.
std::string Json(const std::vector<Goal>& rows) {
  std::string text;
  const char* separator = "[";
  for (const Goal& row : rows) {
    const nlohmann::ordered_json object = {
        {"name", row.name},   {"value", row.value}, {"limit", row.limit},
        {"ratio", row.ratio}, {"goal", row.goal},   {"met", row.met}};
    text += fmt::format("{}\n {}", separator, object.dump());
    separator = ",";
  }
  return text + "\n]\n";
}

}  // namespace

bool Goals::Wanted(std::string_view name) const {
  return name.find(options_.only) != std::string_view::npos;
}

void Goals::Judge(const std::string& name, double goal, const Timing& value,
                  const std::vector<Timing>& limits, int rounds) {
  if (!Wanted(name)) return;
  if (options_.spin > 0) return Spin(options_.spin, value);
  Goal best;
  for (int i = 0; i < (quick() ? 1 : kTries); ++i) {
    const Goal row = Measure(value, limits, quick() ? 3 : rounds);
    if (i == 0 || row.ratio < best.ratio) best = row;
    if (best.ratio <= goal || best.ratio > kMuch * goal) break;
  }
  Add(name, goal, best.value, best.limit);
}

void Goals::Add(const std::string& name, double goal, double value,
                double limit) {
  const double ratio = value / limit;
  rows_.push_back({.name = name,
                   .value = value,
                   .limit = limit,
                   .ratio = ratio,
                   .goal = goal,
                   .met = ratio <= goal});
  if (!options_.json) Print(rows_.back());
}

int RunGoals(const GoalOptions& options, std::string_view about,
             std::span<const GoalPart> parts) {
  Goals goals(options);
  if (!options.json) PrintHead(about);
  for (const GoalPart part : parts) part(goals);
  const std::vector<Goal>& rows = goals.rows();
  const auto met = std::ranges::count(rows, true, &Goal::met);
  if (rows.empty()) return 2;
  if (!options.save.empty()) std::ofstream(options.save) << Json(rows);
  if (options.json) {
    fmt::print("{}", Json(rows));
  } else {
    fmt::print("\n{} of {} goals are met\n", met, rows.size());
  }
  return options.quick || met == std::ssize(rows) ? 0 : 1;
}

int (*run_cuda_goals)(const GoalOptions& options) = nullptr;

int RunGoals(const GoalOptions& options) {
  constexpr GoalPart kParts[] = {DecodeGoals,   MaskGoals,   FindGoals,
                                 PrefixGoals,   PutGoals,    MoveGoals,
                                 MetadataGoals, StateGoals,  PassGoals,
                                 SaveGoals,     AttendGoals, ChatGoals};
  return RunGoals(options,
                  fmt::format("The optimized twin on {}, {} at most",
                              optimized::ActiveTarget(),
                              ThreadsName(ThreadCounts().back())),
                  kParts);
}

std::string SizeName(int size) {
  constexpr int kMega = 1024 * 1024;
  if (size >= kMega && size % kMega == 0) {
    return fmt::format("{}M", size / kMega);
  }
  if (size >= 1024 && size % 1024 == 0) return fmt::format("{}k", size / 1024);
  return fmt::format("{}", size);
}

std::string TimeText(double nanoseconds) {
  constexpr const char* kUnits[] = {"ns", "us", "ms", "s"};
  std::size_t unit = 0;
  while (unit < 3 && nanoseconds >= 1000) {
    nanoseconds /= 1000;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", nanoseconds, nanoseconds < 10 ? 2 : 1,
                     kUnits[unit]);
}

std::vector<int> ThreadCounts() {
#ifdef _OPENMP
  if (omp_get_num_procs() > 1) return {1, 2};
#endif
  return {1};
}

std::string ThreadsName(int threads) {
  return threads == 1 ? "1 thread" : fmt::format("{} threads", threads);
}

}  // namespace kvtwin::bench
