// The subcommand `museum`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "optimized/fast_paths.h"
#include "props/base/interrupt.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"
#include "props/paged/paged_history.h"
#include "props/search/judged_page.h"
#include "props/search/museum.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

struct MuseumArguments {
  MuseumOptions options;
  std::vector<std::string> only;
  std::string build;
  std::string patches;
  bool json = false;
  bool backend = false;
  std::string twin = "optimized";
  std::string judge;  // The history whose page is judged.
};

struct Numbers {
  double median = 0;
  double worst = 0;
};

Numbers NumbersOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.back()};
}

// Summarizes the catches of an exhibit.
struct Summary {
  bool found = false;  // Every seed found the bug.
  Numbers operations, seconds, shrunk;
  std::string check;
  std::string history;   // The most frequent shrunk history,
  double identical = 0;  // and its share of the catches.
};

Summary Summarize(const ExhibitReport& finding, int seeds) {
  Summary sum;
  std::vector<double> operations;
  std::vector<double> seconds;
  std::vector<double> shrunk;
  std::map<std::string, int> histories;
  for (const Catch& caught : finding.catches) {
    operations.push_back(static_cast<double>(caught.operations));
    seconds.push_back(caught.seconds);
    shrunk.push_back(static_cast<double>(caught.failure.operations));
    ++histories[caught.failure.history];
  }
  sum.found = finding.error.empty() && std::ssize(operations) == seeds;
  sum.operations = NumbersOf(operations);
  sum.seconds = NumbersOf(seconds);
  sum.shrunk = NumbersOf(shrunk);
  int most = 0;
  for (const Catch& caught : finding.catches) {
    const Failure& failure = caught.failure;
    if (histories[failure.history] <= most) continue;
    most = histories[failure.history];
    sum.history = failure.history;
    sum.check = failure.check;
  }
  if (!shrunk.empty()) {
    sum.identical = most / static_cast<double>(shrunk.size());
  }
  return sum;
}

std::string NameOf(const Exhibit& exhibit) {
  return exhibit.also.empty()
             ? exhibit.id
             : fmt::format("{} ({})", exhibit.id, exhibit.also);
}

std::string JsonText(const std::vector<ExhibitReport>& findings, int seeds) {
  const auto whole = [](double number) {
    return static_cast<std::int64_t>(number);
  };
  auto list = nlohmann::ordered_json::array();
  for (const ExhibitReport& finding : findings) {
    const Summary sum = Summarize(finding, seeds);
    list.push_back({{"id", finding.exhibit.id},
                    {"also", finding.exhibit.also},
                    {"reference", finding.exhibit.reference},
                    {"wrong", finding.exhibit.wrong},
                    {"operation", finding.exhibit.operation},
                    {"found", sum.found},
                    {"found_by_seeds", finding.catches.size()},
                    {"seeds", seeds},
                    {"error", finding.error},
                    {"operations", whole(sum.operations.median)},
                    {"worst_operations", whole(sum.operations.worst)},
                    {"seconds", sum.seconds.median},
                    {"worst_seconds", sum.seconds.worst},
                    {"shrunk_to", whole(sum.shrunk.median)},
                    {"worst_shrunk_to", whole(sum.shrunk.worst)},
                    {"identical", sum.identical},
                    {"check", sum.check},
                    {"history", sum.history}});
  }
  return list.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

// Returns the table of docs/museum.md, in Markdown.
std::string TableText(const std::vector<ExhibitReport>& findings, int seeds) {
  std::string text =
      "| bug | reference | what went wrong | operations | seconds | shrunk to "
      "| same line | check | shortest history |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  std::vector<double> seconds;
  std::vector<double> shrunk;
  double identical = 0;
  std::size_t found = 0;
  for (const ExhibitReport& finding : findings) {
    const Summary sum = Summarize(finding, seeds);
    found += sum.found ? 1 : 0;
    identical += sum.identical;
    for (const Catch& caught : finding.catches) {
      seconds.push_back(caught.seconds);
      shrunk.push_back(static_cast<double>(caught.failure.operations));
    }
    std::string check = sum.check;
    if (!sum.found) {
      check = fmt::format(
          "**not found** {}",
          finding.error.empty()
              ? fmt::format("by {} of {} seeds",
                            seeds - std::ssize(finding.catches), seeds)
              : finding.error);
    }
    std::string history = sum.history;
    for (std::size_t at = 0; (at = history.find('|', at)) != history.npos;
         at += 2) {
      history.insert(at, 1, '\\');
    }
    text += fmt::format(
        "| {} | {} | {} | {:.0f}, {:.0f} | {:.3f}, {:.3f} | {:.0f}, {:.0f} | "
        "{:.0f} % | {} | `{}` |\n",
        NameOf(finding.exhibit), finding.exhibit.reference,
        finding.exhibit.wrong, sum.operations.median, sum.operations.worst,
        sum.seconds.median, sum.seconds.worst, sum.shrunk.median,
        sum.shrunk.worst, 100 * sum.identical, check, history);
  }
  const Numbers time = NumbersOf(seconds);
  const Numbers length = NumbersOf(shrunk);
  text += fmt::format(
      "\n{} of {} found by all of {} seeds: in {:.3f} s (median) and {:.2f} s "
      "(worst), shrunk to {:.0f} operations (median) and {:.0f} (worst); "
      "{:.0f} "
      "% of the seeds end with the same line.\n",
      found, findings.size(), seeds, time.median, time.worst, length.median,
      length.worst,
      100 * identical /
          static_cast<double>(std::max<std::size_t>(findings.size(), 1)));
  return text;
}

// Returns what the judge says of the pages: each label that is false, and how
// many were compared.
std::string PagesText(const std::vector<ExhibitReport>& findings) {
  std::string text;
  std::int64_t pages = 0;
  std::int64_t labels = 0;
  std::int64_t false_labels = 0;
  for (const ExhibitReport& finding : findings) {
    for (const Catch& caught : finding.catches) {
      if (!caught.page) continue;
      ++pages;
      labels += caught.page->labels;
      false_labels += std::ssize(caught.page->lies);
      for (const std::string& lie : caught.page->lies) {
        text += fmt::format("{} {}\n    {}\n", finding.exhibit.id,
                            caught.failure.history, lie);
      }
    }
  }
  return text + fmt::format("\n{} pages, {} labels, {} false\n", pages, labels,
                            false_labels);
}

// Judges the page of a history that this command fails.
int JudgeOnePage(const std::string& line, const std::string& twin) {
  std::optional<PageVerdict> verdict;
  if (const auto history = ParseHistory(line); history.ok()) {
    verdict = JudgePageOf(*history, TwinSubject(twin));
  } else if (const auto pool = ParsePagedHistory(line); pool.ok()) {
    verdict =
        JudgePageOf(*pool, [&](const PagedSpec& spec, std::string_view name) {
          return MakePagedPool(spec, name == "optimized" ? twin : name);
        });
  }
  if (!verdict)
    return Complain("the history does not fail, so it has no page: " + line);
  const nlohmann::ordered_json json = {{"labels", verdict->labels},
                                       {"lies", verdict->lies}};
  PrintJson(json);
  return verdict->lies.empty() ? 0 : 1;
}

// Returns why the bug cannot occur with this twin or backend and these fast
// paths, or "".
std::string WhyNot(const Exhibit& exhibit, const MuseumArguments& arguments) {
  if (!exhibit.twin.empty() && exhibit.twin != arguments.twin) {
    return fmt::format("only the twin {} has such code", exhibit.twin);
  }
  if (!exhibit.level.empty() && arguments.backend) {
    return fmt::format("the backend has no level {}", exhibit.level);
  }
  const bool states = exhibit.kind == "recurrent" || exhibit.kind == "hybrid";
  if (arguments.twin == "cuda" && (states || !exhibit.speculate.empty())) {
    return fmt::format("the twin cuda has no {}", states ? "states" : "drafts");
  }
  if (exhibit.needs == "fast paths" && !optimized::TakeFastPath(true)) {
    return "fast paths are off";
  }
  return "";
}

// Returns the exhibits that the user chose. Errors: an unknown name.
Result<std::vector<Exhibit>> Chosen(const fs::path& folder,
                                    const MuseumArguments& arguments) {
  Result<std::vector<Exhibit>> all = ReadExhibits(folder);
  if (!all.ok()) return all;
  const std::vector<std::string>& only = arguments.only;
  if (!arguments.options.apply_only) {
    std::map<std::string, std::string> left_out;  // Ids by reason.
    std::erase_if(*all, [&](const Exhibit& exhibit) {
      const std::string why = WhyNot(exhibit, arguments);
      if (why.empty()) return false;
      left_out[why] += " " + exhibit.id;
      return true;
    });
    for (const auto& [why, ids] : left_out) {
      fmt::print(stderr, "left out, as {}:{}\n", why, ids);
    }
  }
  if (only.empty()) return all;
  std::vector<Exhibit> chosen;
  for (const std::string& name : only) {
    const auto named = [&](const Exhibit& exhibit) {
      return exhibit.id == name ||
             (" " + exhibit.also + " ").find(" " + name + " ") !=
                 std::string::npos;
    };
    const auto at = std::find_if(all->begin(), all->end(), named);
    if (at == all->end()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("unknown bug '{}': {} has no such patch", name,
                                folder.string()));
    }
    chosen.push_back(*at);
  }
  return chosen;
}

int RunMuseum(const MuseumArguments& arguments) {
  const auto refuse = [](const Status& status) {
    fmt::print(stderr, "kvtwin museum: {}\n", status.message());
    return 2;
  };
  std::error_code error;
  fs::path build = arguments.build;
  if (build.empty())
    build = fs::read_symlink("/proc/self/exe", error).parent_path();
  const Result<Workshop> workshop =
      FindWorkshop(fs::absolute(build, error),
                   arguments.backend          ? Planted::kLibrary
                   : arguments.twin == "cuda" ? Planted::kCuda
                                              : Planted::kCommand);
  if (!workshop.ok()) return refuse(workshop.status());
  fs::path patches = arguments.patches;
  if (patches.empty()) patches = workshop->sources / "props/museum";
  const Result<std::vector<Exhibit>> exhibits = Chosen(patches, arguments);
  if (!exhibits.ok()) return refuse(exhibits.status());

  MuseumOptions options = arguments.options;
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal) {
    options.progress = [&](std::size_t done, const Exhibit& next) {
      fmt::print(stderr, "\r{} of {}: {:<10}", done + 1, exhibits->size(),
                 next.id);
    };
  }
  const std::vector<ExhibitReport> findings =
      VisitMuseum(*workshop, *exhibits, options);
  if (terminal) fmt::print(stderr, "\r{:40}\r", "");

  if (options.apply_only) {
    int wrong = 0;
    for (const ExhibitReport& finding : findings) {
      if (finding.error.empty()) continue;
      ++wrong;
      fmt::print("{}: {}\n", finding.exhibit.id, finding.error);
    }
    fmt::print("{} patches, {} do not apply\n", findings.size(), wrong);
    return wrong == 0 ? 0 : 1;
  }
  fmt::print("{}", arguments.json ? JsonText(findings, options.seeds)
                                  : TableText(findings, options.seeds));
  bool false_labels = false;
  if (options.pages) {
    fmt::print("{}", PagesText(findings));
    for (const ExhibitReport& finding : findings) {
      false_labels =
          false_labels ||
          std::ranges::any_of(finding.catches, [](const Catch& caught) {
            return caught.page && !caught.page->lies.empty();
          });
    }
  }
  const bool all =
      !false_labels && findings.size() == exhibits->size() &&
      std::all_of(findings.begin(), findings.end(), [&](const auto& each) {
        return Summarize(each, options.seeds).found;
      });
  return all ? 0 : 1;
}

}  // namespace

void AddMuseumCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<MuseumArguments>();
  CLI::App* museum = app.add_subcommand(
      "museum",
      "Build known bugs into copies of the command, which must find them "
      "(docs/museum.md)");
  MuseumOptions& options = arguments->options;
  museum
      ->add_option("--seeds", options.seeds,
                   "the number of seeds, each of which must find the bug")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  museum->add_option("--seconds", options.seconds, "seconds for each seed")
      ->check(RealRange(0.01, 60.0))
      ->capture_default_str();
  museum->add_option("--only", arguments->only,
                     "only these bugs, such as X01 H16");
  museum
      ->add_option("--threads", options.threads,
                   "the number of bugs to try at a time")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  museum->add_option("--build", arguments->build,
                     "the build folder; by default that of this command");
  museum->add_option("--patches", arguments->patches,
                     "the folder of the patches; by default props/museum");
  museum->add_flag("--apply-only", options.apply_only,
                   "only check whether the patches apply");
  museum
      ->add_option("--twin", arguments->twin,
                   "the twin to plant the bugs in; cuda: in kvtwin-emulated")
      ->check(CLI::IsMember({"optimized", "cuda"}))
      ->capture_default_str();
  museum
      ->add_flag("--backend", arguments->backend,
                 "plant each bug in the shared library, which the command "
                 "then drives as a backend")
      ->excludes("--twin");
  auto* json = museum->add_flag("--json", arguments->json, "print a JSON list");
  museum
      ->add_flag(
          "--pages", options.pages,
          "compare each label on the pages of the failures with a ledger")
      ->excludes("--backend")
      ->excludes(json);
  museum->add_option(
      "--judge", arguments->judge,
      "compare the labels on the page of this history, which must fail; "
      "for the copies that --pages builds");
  museum->callback([arguments, &exit_code] {
    if (!arguments->judge.empty()) {
      exit_code = JudgeOnePage(arguments->judge, arguments->twin);
      return;
    }
    CatchInterrupts();
    exit_code = RunMuseum(*arguments);
  });
}

}  // namespace kvtwin::props
