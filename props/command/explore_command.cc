// The subcommand `explore`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>

#include "core/index.h"
#include "core/names.h"
#include "props/base/clock.h"
#include "props/base/interrupt.h"
#include "props/base/text_file.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/command/explore_batches.h"
#include "props/command/option_checks.h"
#include "props/paged/explore_pools.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"
#include "props/search/explore.h"
#include "props/search/fuzz.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

// The limit of a saved exploration.
constexpr std::int64_t kStateBytesMax = std::int64_t{16} << 30;

struct ExploreArguments {
  ExploreSize size;
  int depth = 4;  // Operations of a paged history.
  std::string kind;
  std::string twin = "optimized";
  std::string state;
  int threads = std::clamp(AsInt(std::thread::hardware_concurrency()), 1, 256);
  double seconds = 0;
  bool json = false;
  bool batches = false;
  BackendArguments backend;  // Instead of a twin, if one is given.
};

// Returns the failure of the shortest history that shows it, explained. Nothing
// if the history that leads to it does not fail by itself.
std::optional<Failure> Explained(const ExploreResult& result,
                                 const Subject& subject) {
  const auto found = RunHistory(result.history, subject).failure;
  if (!found) return std::nullopt;
  const RefusesHistory is_another = [&](const History&, const Failure& other) {
    return other.check != found->check;
  };
  const History shrunk =
      Shrink(result.history, WithShortTimeout(subject, *found), {}, is_another);
  const auto again = RunHistory(shrunk, subject).failure;
  return Explain(shrunk, again.value_or(*found), subject);
}

// Returns the text of the failure, as `fuzz` prints it if it was explained.
std::string ExploredText(const ExploreResult& result,
                         const std::optional<Failure>& explained,
                         const Subject& subject) {
  const Failure& failure = *result.failure;
  if (explained && explained->check == failure.check) {
    return FailureText(*explained) +
           fmt::format("  found   in the state{}\n          {}\n", result.from,
                       failure.text);
  }
  std::string text = fmt::format(
      "FAIL {}    {} against the reference and the ledger\n\n"
      "  from{}\n  {}\n  history {}\n",
      failure.check, subject.name, result.from, failure.text,
      ToText(result.history));
  if (explained) {
    text +=
        "\nWithout the states that it restores, the history fails in another "
        "way:\n\n" +
        FailureText(*explained);
  }
  return text;
}

// Says why a third-party cache cannot be explored; empty if it can.
std::string WhyNotExplored(const BackendInfo& info, const Subject& subject,
                           const ExploreSize& size) {
  const auto why = [&](const std::string& text) {
    return fmt::format(
        "{} cannot be explored: {}; `kvtwin fuzz --backend` does not need "
        "this",
        info.name, text);
  };
  std::vector<std::string> lacks = info.lacks;
  std::erase_if(lacks, [](const std::string& function) {
    return function != "cells" && function != "snapshot" &&
           function != "restore";
  });
  if (!lacks.empty()) {
    return why(fmt::format("its table has no {}", fmt::join(lacks, ", ")));
  }
  if (subject.level != Level::kIdentity) {
    return why(fmt::format("it is compared at {}, not at identity",
                           LevelName(subject.level)));
  }
  if (info.abilities.OnlyGoesOn()) {
    return why("it does not declare KVTWIN_CAN_ANY_ORDER");
  }
  if (size.drafts && !info.abilities.CanDraft()) {
    return why("--speculate: it does not declare KVTWIN_CAN_DRAFT");
  }
  if (size.sequences > 1 && !info.abilities.Can(KVTWIN_CAN_ANY_SEQUENCE)) {
    return why(
        "it does not declare KVTWIN_CAN_ANY_SEQUENCE, so there is one "
        "sequence: "
        "--sequences 1");
  }
  return "";
}

class Exploration {
 public:
  Exploration(const ExploreArguments& arguments, Subject subject,
              ExpandFn expand = nullptr)
      : arguments_(arguments),
        subject_(std::move(subject)),
        expand_(std::move(expand)),
        terminal_(isatty(STDERR_FILENO) == 1) {}

  // Returns the exit code.
  int Run() {
    const bool states = arguments_.kind == KindName(Kind::kRecurrent) ||
                        arguments_.kind == KindName(Kind::kHybrid);
    std::vector<ExploreCase> cases = ExploreCases(arguments_.size, states);
    if (!arguments_.kind.empty()) {
      std::erase_if(cases, [&](const ExploreCase& explored) {
        return KindName(explored.setup.spec.kind) != arguments_.kind;
      });
    }
    if (!subject_.is_twin()) {
      std::erase_if(cases, [&](ExploreCase& explored) {
        return !FitCase(subject_.abilities, explored);
      });
    }
    if (cases.empty()) {
      fmt::print(stderr, "kvtwin explore: no cache of {} cells of that kind\n",
                 arguments_.size.cells);
      return 2;
    }
    if (arguments_.batches) {
      return AnswerBatches(arguments_.size, cases, subject_, expand_,
                           [&](const ExploreResult& result) {
                             nlohmann::ordered_json json;
                             AddFailure(result, json);
                             return json;
                           });
    }
    for (const ExploreCase& explored : cases) {
      if (Interrupted()) {
        total_.fixed_point = false;
        break;
      }
      if (!RunCase(explored)) return 2;
    }
    if (not_made_ == std::ssize(cases)) {
      return Complain(
          fmt::format("{} supports none of these caches", subject_.name));
    }
    if (arguments_.json) {
      json_["states"] = total_.states;
      json_["transitions"] = total_.transitions;
      json_["differences"] = total_.differences;
      json_["fixed_point"] = total_.fixed_point;
      json_["seconds"] = total_.seconds;
      json_["cases"] = cases_;
      PrintJson(json_);
    } else {
      Print("all", total_);
    }
    return total_.differences == 0 ? 0 : 1;
  }

 private:
  std::string FileOf(const ExploreCase& explored) const {
    std::string name = explored.name;
    std::replace(name.begin(), name.end(), ' ', '-');
    return arguments_.state + "/" + name;
  }

  bool RunCase(const ExploreCase& explored) {
    auto explorer =
        Explorer::Make(arguments_.size, explored, subject_, expand_);
    if (!explorer.ok()) {
      fmt::print(stderr, "kvtwin explore: {}\n", explorer.status().message());
      return false;
    }
    const std::string file = FileOf(explored);
    std::error_code error;
    if (!arguments_.state.empty() && fs::exists(file, error)) {
      const Status input = CheckInput(file, kStateBytesMax, "an exploration");
      if (!input.ok()) {
        fmt::print(stderr, "kvtwin explore: {}\n", input.message());
        return false;
      }
      std::ifstream in(file);
      const Status status = (*explorer)->Load(in);
      if (!status.ok()) {
        fmt::print(stderr, "kvtwin explore: {}: {}\n", file, status.message());
        return false;
      }
    }
    const double before = total_.seconds;
    const ExploreResult& result =
        (*explorer)->Run(arguments_.threads, [&](const ExploreResult& so_far) {
          if (terminal_) {
            fmt::print(stderr, "\r{:>10} states, {:>12} transitions, {:.0f} s ",
                       so_far.states, so_far.transitions, so_far.seconds);
          }
          return Interrupted() ||
                 (arguments_.seconds > 0 &&
                  before + so_far.seconds > arguments_.seconds);
        });
    if (terminal_) fmt::print(stderr, "\r{:60}\r", "");
    if (!arguments_.state.empty()) {
      std::ostringstream text;
      (*explorer)->Save(text);
      if (Status status = WriteFile(FileOf(explored), text.view());
          !status.ok()) {
        fmt::print(stderr, "kvtwin explore: {}\n", status.message());
        return false;
      }
    }
    if (result.not_made) {
      ++not_made_;
      if (!arguments_.json) {
        fmt::print("{:36} the init of {} refuses such a cache\n", explored.name,
                   subject_.name);
      }
      return true;
    }
    Report(explored, result);
    return true;
  }

  void Report(const ExploreCase& explored, const ExploreResult& result) {
    total_.states += result.states;
    total_.transitions += result.transitions;
    total_.differences += result.differences;
    total_.fixed_point = total_.fixed_point && result.fixed_point;
    total_.depth = std::max(total_.depth, result.depth);
    total_.seconds += result.seconds;
    if (!arguments_.json) {
      Print(explored.name, result);
      if (!result.failure) return;
      if (IsKnown(*result.failure)) {
        fmt::print("{}, as above, in the state{}\n  {}\n",
                   result.failure->check, result.from, result.failure->text);
      } else {
        fmt::print("{}",
                   ExploredText(result, Explained(result, subject_), subject_));
      }
      return;
    }
    nlohmann::ordered_json json = {{"case", explored.name},
                                   {"states", result.states},
                                   {"transitions", result.transitions},
                                   {"differences", result.differences},
                                   {"depth", result.depth},
                                   {"fixed_point", result.fixed_point},
                                   {"seconds", result.seconds}};
    if (result.failure) AddFailure(result, json);
    cases_.push_back(json);
  }

  // Adds the keys of a failure, shrunk and explained.
  void AddFailure(const ExploreResult& result, nlohmann::ordered_json& json) {
    json["check"] = result.failure->check;
    json["reason"] = result.failure->text;
    if (!subject_.is_twin()) {
      json["reason"] =
          fmt::format("in the state{}: {}", result.from, result.failure->text);
    }
    const std::optional<Failure> explained =
        IsKnown(*result.failure) ? std::nullopt : Explained(result, subject_);
    json["history"] = explained ? explained->history : ToText(result.history);
    if (explained && !subject_.is_twin()) json["rerun"] = explained->rerun;
    if (explained) json["bucket"] = explained->bucket;
  }

  // Whether a failure of a third-party cache was reported before: it is shrunk
  // once.
  bool IsKnown(const Failure& failure) {
    return !subject_.is_twin() && !told_.insert(failure.check).second;
  }

  static void Print(const std::string& name, const ExploreResult& result) {
    fmt::print(
        "{:36} {:>9} states, {:>11} transitions, depth {:>2}, {} differences, "
        "{}, {:.1f} s\n",
        name, result.states, result.transitions, result.depth,
        result.differences, result.fixed_point ? "fixed point" : "not finished",
        result.seconds);
  }

  const ExploreArguments& arguments_;
  Subject subject_;
  ExpandFn expand_;  // For a third-party cache.
  bool terminal_;
  std::int64_t not_made_ = 0;   // Cases.
  std::set<std::string> told_;  // Checks of failures.
  ExploreResult total_{.fixed_point = true};
  nlohmann::ordered_json json_ = nlohmann::ordered_json::object();
  nlohmann::ordered_json cases_ = nlohmann::ordered_json::array();
};

// Explores pools by running all histories of some length, without states.
int RunPagedHistories(const ExploreArguments& arguments,
                      const Subject& subject) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  FuzzOptions options;
  options.threads = arguments.threads;
  options.groups = arguments.kind == "groups";
  options.progress = [&](std::int64_t operations, double seconds) {
    if (!terminal || operations % 65536 >= 64 * arguments.depth) return;
    fmt::print(stderr, "\r{:>12} operations, {:.0f} s ", operations, seconds);
  };
  const PagedFuzzResult result =
      ExplorePaged(arguments.depth, options, subject);
  if (terminal) fmt::print(stderr, "\r{:60}\r", "");
  if (result.ran == 0 && !Interrupted()) {
    return Complain(fmt::format("{} supports no such pool", subject.name));
  }
  const int differences = result.failure ? 1 : 0;
  const bool not_judged = SaysNotJudged(result.counts, subject.name);
  const int failed = differences > 0 || not_judged ? 1 : 0;
  if (arguments.json) {
    nlohmann::ordered_json json = {{"histories", result.histories},
                                   {"operations", result.counts.operations},
                                   {"differences", differences},
                                   {"depth", arguments.depth},
                                   {"seconds", result.seconds}};
    if (result.failure) json.update(FailureJson(*result.failure));
    PrintJson(json);
    return failed;
  }
  if (result.failure) fmt::print("{}", FailureText(*result.failure));
  fmt::print(
      "{}: {} histories, {} of {} operations, {} differences, {:.1f} s; "
      "{} blocks found by prompts, {} copied on write, {} evicted\n",
      arguments.kind, result.histories, Interrupted() ? "not all" : "all",
      arguments.depth, differences, result.seconds, result.counts.found,
      result.counts.copied, result.counts.evicted);
  return failed;
}

// Returns the failure of the shortest history that shows it, explained. Nothing
// if the path that leads to it does not fail by itself.
std::optional<Failure> Explained(const PoolSpaceResult& result,
                                 const Subject& subject) {
  const auto found = RunHistory(result.history, subject).failure;
  if (!found) return std::nullopt;
  const PagedHistory shrunk = Shrink(result.history, subject);
  const auto again = RunHistory(shrunk, subject).failure;
  return Explain(shrunk, again.value_or(*found), subject);
}

// Explores the states of small pools with groups.
int RunGroups(const ExploreArguments& arguments, const Subject& subject) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  const PagedMaker make = [&](const PagedSpec& spec, std::string_view twin) {
    return MakePagedPool(spec, twin == "optimized" ? subject.name : twin);
  };
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  PoolSpaceResult total;
  total.fixed_point = true;
  const double start = Now();
  for (const PoolSpace& space : PoolSpaces()) {
    const double begin = Now();
    const PoolSpaceResult result =
        ExploreSpace(space, make, [&](const PoolSpaceResult& so_far) {
          if (terminal && so_far.states % 64 == 0) {
            fmt::print(stderr, "\r{:>10} states, {:>12} transitions ",
                       so_far.states, so_far.transitions);
          }
          return Interrupted() ||
                 (arguments.seconds > 0 && Now() - start > arguments.seconds);
        });
    if (terminal) fmt::print(stderr, "\r{:60}\r", "");
    total.states += result.states;
    total.transitions += result.transitions;
    total.depth = std::max(total.depth, result.depth);
    total.fixed_point = total.fixed_point && result.fixed_point;
    nlohmann::ordered_json json = {{"case", space.name},
                                   {"states", result.states},
                                   {"transitions", result.transitions},
                                   {"differences", result.failure ? 1 : 0},
                                   {"depth", result.depth},
                                   {"fixed_point", result.fixed_point},
                                   {"seconds", Now() - begin}};
    if (!arguments.json) {
      fmt::print(
          "{:36} {:>9} states, {:>11} transitions, depth {:>2}, {} "
          "differences, {}, {:.1f} s\n",
          space.name, result.states, result.transitions, result.depth,
          result.failure ? 1 : 0,
          result.fixed_point ? "fixed point" : "not finished", Now() - begin);
    }
    if (result.failure) {
      const auto explained = Explained(result, subject);
      const Failure& shown = explained ? *explained : *result.failure;
      if (!arguments.json) fmt::print("{}", FailureText(shown));
      json.update(FailureJson(shown));
      total.failure = result.failure;
    }
    cases.push_back(std::move(json));
    if (total.failure) break;
  }
  if (arguments.json) {
    PrintJson({{"cases", cases},
               {"states", total.states},
               {"transitions", total.transitions},
               {"differences", total.failure ? 1 : 0},
               {"depth", total.depth},
               {"fixed_point", total.fixed_point},
               {"seconds", Now() - start}});
  } else {
    fmt::print("{} states, {} transitions, {} differences, {}\n", total.states,
               total.transitions, total.failure ? 1 : 0,
               total.fixed_point ? "fixed point" : "not finished");
  }
  return total.failure ? 1 : 0;
}

int RunOnBackend(const ExploreArguments& arguments) {
  if (arguments.kind == "paged" || arguments.kind == "groups") {
    return OnPoolBackend(arguments.backend, arguments.kind == "groups",
                         [&](const Subject& subject, const PoolInfo*) {
                           return RunPagedHistories(arguments, subject);
                         });
  }
  return OnOurBackend(
      arguments.backend, "the explorer",
      [&](Host& host, const BackendInfo& info, const Subject& subject) {
        const std::string why = WhyNotExplored(info, subject, arguments.size);
        if (!why.empty()) return Complain(why);
        const ExpandFn expand =
            [&](const ExploreSize& size, const ExploreCase& what,
                const ExploreWay& way) { return host.Expand(size, what, way); };
        return Exploration(arguments, subject, expand).Run();
      });
}

// Refuses the options that belong to other kinds of exploring.
void RefuseOtherKind(const CLI::App& explore,
                     const ExploreArguments& arguments) {
  const bool groups = arguments.kind == "groups";
  const bool of_states = groups && !arguments.backend.given();
  const bool paged = arguments.kind == "paged" || groups;
  for (const char* option :
       {"--cells", "--sequences", "--positions", "--dtype", "--state",
        "--seconds", "--profile", "--depth", "--batches"}) {
    if (explore.count(option) == 0) continue;
    const std::string_view name = option;
    if (of_states && name == "--seconds") continue;
    if (of_states && name == "--depth") {
      throw CLI::ValidationError(option, "is for --kind groups of a backend");
    }
    const bool of_paged = name == "--depth";
    if (of_paged == paged) continue;
    throw CLI::ValidationError(
        option,
        paged ? fmt::format("is for caches, not for --kind {}", arguments.kind)
              : "is for --kind paged only");
  }
}

// Throws if the caches do not have drafts that are wanted.
void CheckDrafts(const ExploreArguments& arguments) {
  if (!arguments.size.drafts) return;
  const auto refuse = [](const std::string& why) {
    throw CLI::ValidationError("--speculate", why);
  };
  for (const char* kind : {"paged", "groups"}) {
    if (arguments.kind == kind) {
      refuse(fmt::format("kind {} has no drafts", kind));
    }
  }
  if (arguments.twin == "cuda") refuse("the twin cuda has no drafts");
  if (!arguments.state.empty()) refuse("the progress cannot be saved: --state");
  if (arguments.batches) refuse("states with drafts have no number: --batches");
}

int RunExplore(const ExploreArguments& arguments) {
  CheckDrafts(arguments);
  if (arguments.backend.given()) return RunOnBackend(arguments);
  if (arguments.kind == "paged") {
    return RunPagedHistories(arguments, TwinSubject(arguments.twin));
  }
  if (arguments.kind == "groups") {
    if (arguments.twin == "cuda") {
      throw CLI::ValidationError("--twin", "cuda has no pools with groups");
    }
    return RunGroups(arguments, TwinSubject(arguments.twin));
  }
  return Exploration(arguments, TwinSubject(arguments.twin)).Run();
}

// Adds the options of the caches to explore.
void AddSizeOptions(CLI::App& explore, ExploreArguments& arguments) {
  ExploreSize& size = arguments.size;
  explore.add_option("--cells", size.cells, "cells of the cache")
      ->check(CLI::Range(2, 16))
      ->capture_default_str();
  explore
      .add_option("--sequences", size.sequences, "sequences that hold tokens")
      ->check(CLI::Range(1, 4))
      ->capture_default_str();
  explore.add_option("--positions", size.positions, "positions of a sequence")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  explore
      .add_option_function<std::string>(
          "--dtype",
          [&arguments](const std::string& name) {
            arguments.size.dtype = *DTypeFromName(name);
          },
          "the dtype of K and V rows")
      ->check(CLI::IsMember(std::vector<std::string>(kRowDTypeNames.begin(),
                                                     kRowDTypeNames.end())))
      ->default_str("f32");
  explore.add_flag("--speculate", size.drafts,
                   "batches of drafts, two at a time at most, and commits");
  explore.add_option("--kind", arguments.kind, "only this kind of cache")
      ->check(CLI::IsMember(
          std::vector<std::string>{"causal", "swa", "swa_mem", "chunked",
                                   "recurrent", "hybrid", "paged", "groups"}));
}

}  // namespace

void AddExploreCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<ExploreArguments>();
  CLI::App* explore = app.add_subcommand(
      "explore",
      "Check every state that small caches can reach, of a twin or of a "
      "third-party cache");
  AddSizeOptions(*explore, *arguments);
  explore
      ->add_option(
          "--depth", arguments->depth,
          "with --kind paged, or groups of a backend: run all histories of "
          "this many operations")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  explore->add_option("--twin", arguments->twin, "the twin to check")
      ->check(CLI::IsMember(
          std::vector<std::string>(TwinNames().begin(), TwinNames().end())))
      ->capture_default_str();
  explore
      ->add_option("--threads", arguments->threads,
                   "number of threads; does not change the result")
      ->check(CLI::Range(1, 256))
      ->default_str("one for each core");
  explore
      ->add_option("--seconds", arguments->seconds,
                   "stop after this many seconds")
      ->check(RealRange(0.0, 1e7));
  explore
      ->add_option("--state", arguments->state,
                   "a folder for the progress, from which a stopped "
                   "exploration continues")
      ->check(CLI::ExistingDirectory);
  AddBackendOptions(*explore, arguments->backend);
  AddProfileOption(*explore, arguments->backend);
  explore
      ->add_flag("--batches", arguments->batches,
                 "expand the states that are in the standard input "
                 "(docs/campaign.md)")
      ->excludes("--state")
      ->excludes("--seconds");
  explore->add_flag("--json", arguments->json, "print one JSON object");
  explore->callback([arguments, explore, &exit_code] {
    SetKindOfPool(arguments->backend, arguments->kind);
    RefuseOtherKind(*explore, *arguments);
    CatchInterrupts();
    exit_code = RunExplore(*arguments);
  });
}

}  // namespace kvtwin::props
