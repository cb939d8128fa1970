#include "props/search/fuzz.h"

#include <fmt/format.h>

#include <atomic>
#include <cctype>
#include <thread>
#include <vector>

#include "core/names.h"
#include "optimized/targets.h"
#include "props/base/check_name.h"
#include "props/base/clock.h"
#include "props/base/crash.h"
#include "props/base/hash.h"
#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/compare/cited_rules.h"
#include "props/history/generate.h"
#include "props/report/sieve.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsInHistory = 100;
// Histories between two looks at the clock and the count.
constexpr std::size_t kBlock = 64;

History HistoryAt(const FuzzOptions& options, const Subject& subject,
                  std::uint64_t number) {
  History history = MakeHistory(options.seed, number, options.kind,
                                kOpsInHistory, options.cells_max,
                                /*rarities=*/true);
  if (options.dtypes) {
    Setup& setup = history.setup;
    setup.init.dtype = kRowDTypes.at(number % kRowDTypes.size());
    setup.config.v_dtype =
        kRowDTypes.at(number / kRowDTypes.size() % kRowDTypes.size());
    FitStorage(setup);
  }
  if (!subject.is_twin()) subject.abilities.Fit(history.setup);
  return history;
}

// One in twenty histories is run twice, and each that fails (S50).
constexpr std::uint64_t kRepeatEvery = 20;
constexpr std::string_view kNotTheSame =
    CheckName("harness: not the same twice").name();

RunResult RunAgain(const History& history, const Subject& subject,
                   const RunResult& first) {
  if (first.difference && IsHang(first.difference->check)) return first;
  RunResult again = RunHistory(history, subject);
  const bool same =
      again.digest == first.digest &&
      again.difference.has_value() == first.difference.has_value();
  if (same) return first;
  // How far a process gets that dies is chance.
  const auto died = [](const RunResult& result) {
    return result.difference && result.difference->check.starts_with("backend");
  };
  if (died(first) && died(again)) return first;
  if (!again.difference) again.difference = first.difference;
  if (!again.difference) again.difference = {history.ops.size(), "", ""};
  again.difference->check = kNotTheSame;
  again.difference->text =
      fmt::format("run twice, it gives the digests {:016x} and {:016x}\n{}",
                  first.digest, again.digest, again.difference->text);
  return again;
}

struct Ran {
  RunResult result;
  Census census;
};

// Runs the histories from `first` on, each into its place in `block`, of which
// those stay that come before the time is over, and up to the first failure.
void RunBlock(const FuzzOptions& options, const Subject& subject,
              std::uint64_t first, double until, std::vector<Ran>& block) {
  std::atomic<std::size_t> next = 0;
  std::atomic<std::size_t> end = block.size();
  const auto end_at = [&](std::size_t at) {
    std::size_t now = end;
    while (at < now && !end.compare_exchange_weak(now, at)) {
    }
  };
  const auto work = [&] {
    for (std::size_t i = next++; i < end; i = next++) {
      const bool late = options.operations == 0 && Now() >= until;
      if ((i > 0 && late) || Interrupted()) return end_at(i);
      const History history = HistoryAt(options, subject, first + i);
      const CrashReport crash([&] { return RerunCommand(history, subject); });
      RunResult& result = block[i].result;
      result = RunHistory(history, subject, nullptr,
                          options.probes ? &block[i].census : nullptr);
      const bool known =
          result.difference && options.known.contains(result.difference->check);
      if ((first + i) % kRepeatEvery == 0 || (result.difference && !known)) {
        result = RunAgain(history, subject, result);
      }
      if (result.difference &&
          !options.known.contains(result.difference->check)) {
        end_at(i + 1);
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < options.threads; ++i) helpers.emplace_back(work);
    work();
  }
  block.resize(end);
}

// `found` fails with this difference; its number and length are not filled in.
FuzzFailure Explain(std::optional<Kind> kind, const RefusesHistory& refuses,
                    const Subject& subject, const History& found,
                    const Difference& difference) {
  FuzzFailure failure;
  failure.check = difference.check;
  if (difference.check == kNotTheSame) {
    failure.shrunk = found;
    failure.difference = difference;
    return failure;
  }
  const CrashReport crash([&] { return RerunCommand(found, subject); });
  failure.shrunk =
      Shrink(found, Hastily(subject, difference.check), kind, refuses);
  auto sure = RunHistory(failure.shrunk, subject).difference;
  if (!sure && IsHang(difference.check)) {  // It was slow, and came back.
    failure.shrunk = Shrink(found, subject, kind, refuses);
    sure = RunHistory(failure.shrunk, subject).difference;
  }
  failure.difference = sure.value_or(difference);
  return failure;
}

std::string CheckBucket(std::string_view name, std::string_view check) {
  std::string bucket = NameInBucket(name);
  AppendWords(check, std::isalnum, bucket);
  return bucket;
}

// The failure of a history as it is reported; nothing if it is known.
std::optional<FuzzFailure> NewFailure(const FuzzOptions& options,
                                      const Subject& subject,
                                      const History& found,
                                      const Difference& first, Sieve& sieve,
                                      FuzzResult& result) {
  FuzzFailure failure;
  Difference difference = first;  // Of the history that ran last.
  const auto run = [&](const History& history) -> std::optional<std::string> {
    auto fails = RunHistory(history, Hastily(subject, first.check)).difference;
    if (!fails) return std::nullopt;
    difference = std::move(*fails);
    return CheckBucket(subject.name, difference.check);
  };
  const auto bucket_of = [&](const History& history,
                             const Sieve::IsKnown<History>& is_known) {
    const auto refuses = [&](const History& one, const Difference& fails) {
      return is_known(one, CheckBucket(subject.name, fails.check));
    };
    failure = Explain(options.kind, is_known ? refuses : RefusesHistory(),
                      subject, history, difference);
    failure.operations = found.ops.size();
    if (options.known_buckets.empty()) return std::string();
    return BucketOf(failure.shrunk, Hastily(subject, failure.difference.check));
  };
  const bool is_known =
      sieve.Passes(found, CheckBucket(subject.name, first.check),
                   result.operations, run, bucket_of, result.passed_over);
  if (is_known) return std::nullopt;
  return failure;
}

}  // namespace

FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject) {
  FuzzResult result;
  const double start = Now();
  // One that hangs is known to, if that is known of it.
  Subject counted = subject;
  for (const std::string& check : options.known) {
    counted = Hastily(std::move(counted), check);
  }
  Sieve sieve(options.known_buckets);
  double shrinking = 0;  // Of what is passed over.
  const auto passed = [&] { return Now() - start - shrinking; };
  const auto done = [&] {
    if (Interrupted()) return true;
    if (options.operations > 0) return result.operations >= options.operations;
    return passed() >= options.seconds;
  };
  while (!done() && !result.failure) {
    const std::uint64_t first =
        options.first + static_cast<std::uint64_t>(result.histories);
    std::vector<Ran> block(kBlock);
    RunBlock(options, counted, first, start + shrinking + options.seconds,
             block);
    // In the order of the seed, whichever thread was first.
    for (std::size_t i = 0; i < block.size(); ++i) {
      const RunResult& one = block[i].result;
      // A process that died in the first call counts, too.
      result.operations += std::max<std::int64_t>(1, one.operations);
      result.digest = HashBytes(&one.digest, sizeof(one.digest), result.digest);
      ++result.histories;
      result.ran += one.ran || one.difference ? 1 : 0;
      result.repeated += (first + i) % kRepeatEvery == 0 ? 1 : 0;
      result.census.Add(block[i].census);
      if (one.difference && options.known.contains(one.difference->check)) {
        ++result.known;
      } else if (one.difference) {
        result.seconds = passed();  // Without the shrinking.
        const History found = HistoryAt(options, subject, first + i);
        result.failure =
            NewFailure(options, subject, found, *one.difference, sieve, result);
        if (result.failure) result.failure->history_number = first + i;
        shrinking += passed() - result.seconds;
        if (result.failure) break;
      }
      if (options.operations > 0 && done()) break;
    }
    if (!result.failure) result.seconds = passed();
    if (options.progress) options.progress(result.operations, result.seconds);
  }
  return result;
}

std::string BucketOf(const History& shrunk, const Subject& subject) {
  const auto again = RunHistory(shrunk, subject).difference;
  // A backend whose answers change from run to run may pass this time.
  if (!again) return CheckBucket(subject.name, "not reproduced");
  const std::string active = optimized::ActiveTarget();
  bool on_all = true;
  for (const std::string& target : optimized::SupportedTargets()) {
    if (!subject.is_twin()) break;
    optimized::SelectTarget(target);
    const auto there = RunHistory(shrunk, subject).difference;
    on_all = on_all && there && there->check == again->check;
  }
  if (subject.is_twin()) optimized::SelectTarget(active);
  std::string bucket = CheckBucket(
      on_all ? subject.name : subject.name + "-" + active, again->check);
  AppendHistory(shrunk, bucket);
  return bucket;
}

std::vector<std::string> NeverMet(const PassedOver& passed_over,
                                  const std::set<std::string>& known_buckets) {
  std::vector<std::string> never;
  for (const std::string& bucket : known_buckets) {
    if (!passed_over.contains(bucket)) never.push_back(bucket);
  }
  return never;
}

std::string PassedOverText(const PassedOver& passed_over,
                           const std::set<std::string>& known_buckets) {
  std::int64_t count = 0;
  std::vector<std::string> each;
  for (const auto& [bucket, met] : passed_over) {
    count += met;
    each.push_back(fmt::format("{} x {}", bucket, met));
  }
  std::string text;
  if (count > 0) {
    text = fmt::format("{} findings passed over: {}\n", count,
                       fmt::join(each, ", "));
  }
  const std::vector<std::string> never = NeverMet(passed_over, known_buckets);
  if (!never.empty()) {
    text += fmt::format("known, but never met: {}\n", fmt::join(never, ", "));
  }
  return text;
}

namespace {

// Describes the failure of a second run, if it differs from the first: a
// backend may differ from run to run, and how far a run gets before it is ended
// is chance.
std::string RepeatNote(const Difference& first,
                       const std::optional<Difference>& again) {
  if (!again) return "It does not repeat: another run shows no difference.";
  if (again->check != first.check) {
    return fmt::format("It does not repeat: another run fails {}.",
                       again->check);
  }
  const bool ended =
      IsHang(first.check) || first.check == CheckName("backend: memory").name();
  if (ended || again->step == first.step) return "";
  return fmt::format(
      "It does not repeat: another run goes wrong in operation {} instead of "
      "{}.",
      again->step + 1, first.step + 1);
}

}  // namespace

std::string FailureText(const History& history, const Difference& difference,
                        const Subject& subject,
                        const std::optional<std::string>& bucket) {
  const Subject told = Hastily(subject, difference.check);
  Story story;
  const std::string note =
      RepeatNote(difference, RunHistory(history, told, &story).difference);
  std::string text = fmt::format(
      "FAIL {}    {} against {}the ledger\n\n", difference.check, subject.name,
      subject.level == Level::kIdentity ? "the reference and " : "");
  const std::size_t calls = story.steps.size();
  for (std::size_t i = 0; i < calls; ++i) {
    if (i >= 40 && i + 10 < calls) continue;  // The middle of a long one.
    const bool then = i + 1 == calls && note.empty();
    text += fmt::format("  {:3} {}{}\n", i + 1, StoryLine(story.steps[i]),
                        then ? "   <- then" : "");
  }
  text += fmt::format("\n  {}\n", difference.text);
  if (!note.empty()) text += fmt::format("  {}\n", note);
  text += fmt::format("\n  bucket: {}\n",
                      bucket ? *bucket : BucketOf(history, told));
  const std::string_view rules = CitedRules(difference, history);
  if (!rules.empty()) {
    text += fmt::format("  rules   {} (docs/semantics.md)\n", rules);
  }
  text += fmt::format("  rerun   {}\n", RerunCommand(history, subject));
  return text;
}

std::string RerunCommand(const History& history, const Subject& subject) {
  const std::string arguments =
      subject.arguments.empty() ? "--twin " + subject.name : subject.arguments;
  return CommandLine(fmt::format("run '{}' {}", ToText(history), arguments));
}

Failure ExplainHistory(const History& history, const Difference& difference,
                       const Subject& subject) {
  Failure failure{.name = "a history of calls",
                  .setup = ToText(history.setup),
                  .unit = "Call",
                  .check = difference.check,
                  .reason = difference.text,
                  .rules = std::string(CitedRules(difference, history)),
                  .command = RerunCommand(history, subject),
                  .text = FailureText(history, difference, subject),
                  .frame = Frame::Around(difference.first_cell,
                                         difference.column, difference.row),
                  .steps = {},
                  .left_out = 0};
  // Once to count the calls, and once more to draw the last of them.
  const Subject told = Hastily(subject, difference.check);
  Story story;
  const auto first = RunHistory(history, told, &story).difference;
  const auto calls = std::ssize(story.steps);
  failure.left_out = std::max<std::int64_t>(0, calls - Failure::kSteps);
  Story drawn = {
      .steps = {}, .frame = failure.frame, .from = failure.left_out + 1};
  const auto second = RunHistory(history, told, &drawn).difference;
  // A rerun with other steps shows nothing of this failure.
  if (std::ssize(drawn.steps) == calls) story = std::move(drawn);
  for (const auto& again : {first, second}) {
    const std::string note = RepeatNote(difference, again);
    if (note.empty()) continue;
    failure.reason += "\n" + note;
    break;
  }
  failure.steps.assign(story.steps.begin() + failure.left_out,
                       story.steps.end());
  if (failure.steps.empty()) failure.steps.emplace_back().call = "setup";
  failure.steps.back().wrong_row = difference.row;
  failure.steps.back().wrong_column = difference.column;
  return failure;
}

}  // namespace kvtwin::props
