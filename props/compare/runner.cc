#include "props/compare/runner.h"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtwin/attention.h"
#include "optimized/fast_paths.h"
#include "props/attention/attending_twin.h"
#include "props/base/check_name.h"
#include "props/compare/client.h"
#include "props/compare/differential_driver.h"
#include "props/compare/model_driver.h"

namespace kvtwin::props {

Subject TwinSubject(std::string_view twin) {
  return {.name = std::string(twin),
          .make = [name = std::string(twin)](
                      const CacheSpec& spec) { return MakeCache(spec, name); },
          .can_be_poisoned = true,
          // Each run allocates, and is slower still on the emulator.
          .start_work = twin == "cuda" ? 250'000 : 2'500};
}

Subject TwinSubject(std::string_view twin, Level level) {
  Subject subject = TwinSubject(twin);
  if (level == Level::kIdentity) return subject;
  subject.level = level;
  subject.arguments =
      fmt::format("--twin {} --level {}", twin, LevelName(level));
  subject.abilities.snapshots = false;
  subject.tolerance = level == Level::kNumeric ? 1e-9 : 0;
  subject.make_of = [make = subject.make](const Setup& setup) {
    return make(setup.spec);
  };
  if (level != Level::kAttention) return subject;
  subject.abilities.kinds &= ~std::uint32_t{KVTWIN_HAS_ENCODER};
  subject.make_of = [make = subject.make, name = std::string(twin)](
                        const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    auto cache = make(setup.spec);
    if (!cache.ok()) return cache;
    auto attention = MakeAttention(name);
    if (!attention.ok()) return attention.status();
    return std::unique_ptr<Cache>(std::make_unique<AttendingTwin>(
        std::move(*cache), setup.config.v_layout, setup.soft_cap, setup.sinks,
        std::move(*attention)));
  };
  return subject;
}

std::string CallLineOf(const Step& step) {
  if (step.answer.empty()) return step.call;
  return fmt::format("{} -> {}", step.call, step.answer);
}

namespace {

// Returns the cache of ReferenceAfter. Adds the operations that were carried
// out to `open`, if given.
std::unique_ptr<Cache> RunReference(const History& history,
                                    std::vector<Op>* open) {
  static const Subject reference = TwinSubject("reference");
  RunResult result;
  DifferentialDriver driver(history.setup, reference, nullptr, nullptr, result);
  try {
    Client client(history.setup, reference, driver, open);
    if (!driver.SetUp()) return nullptr;
    for (const Op& op : history.ops) client.Do(op);
  } catch (const Failure&) {  // The reference is wrong: stop there.
  }
  return driver.TakeReference();
}

}  // namespace

History ExpandImplicit(const History& history) {
  History open{.setup = history.setup, .ops = {}};
  open.setup.legal = false;
  RunReference(history, &open.ops);
  return open;
}

std::unique_ptr<Cache> ReferenceAfter(const History& history) {
  return RunReference(history, nullptr);
}

Step& CallTrace::Add(std::string call, std::string_view answer,
                     StatusCode code) {
  calling.clear();
  Step& step = steps.emplace_back();
  step.number = std::ssize(steps);
  step.call = std::move(call);
  step.answer = answer;
  step.code = code;
  step.begins_pass = std::exchange(calls_start_forward, false);
  step.own_call = own_call;
  if (told) told(step);
  return step;
}

namespace {

void Run(const History& history, const Subject& subject, Driver& driver,
         CallTrace* trace, RunResult& result) {
  std::size_t step = history.ops.size();
  try {
    Client client(history.setup, subject, driver, nullptr, trace);
    result.ran = driver.SetUp();
    if (!result.ran) return;
    for (step = 0; step < history.ops.size() && !driver.over(); ++step) {
      if (subject.on_step) subject.on_step(step);
      client.Do(history.ops[step]);
    }
    driver.TearDown();
  } catch (const Failure& failure) {
    result.failure = failure;
  } catch (const std::exception& error) {
    result.failure = MakeFailure("subject: exception", error.what());
  }
  if (result.failure) result.failure->step = step;
}

// Adds the call that failed before its answer was told.
void TellUnanswered(CallTrace* trace) {
  if (trace == nullptr || trace->calling.empty()) return;
  trace->Add(trace->calling, "");
}

}  // namespace

RunResult RunHistory(const History& history, const Subject& subject,
                     RunOptions options) {
  options.known_to_hang = options.known_to_hang || subject.known_to_hang;
  if (subject.run) return subject.run(history, options);
  RunResult result;
  if (subject.make_of && !subject.abilities.Fits(history.setup)) return result;
  const optimized::SharesInTurn shares_in_turn;
  std::optional<Observer> observer;
  if (options.counts != nullptr) {
    observer.emplace(history.setup, *options.counts);
  }
  if (subject.level == Level::kIdentity) {
    DifferentialDriver driver(history.setup, subject, options.trace,
                              observer ? &*observer : nullptr, result);
    Run(history, subject, driver, options.trace, result);
  } else {
    ModelDriver driver(history.setup, subject, options.trace, result);
    Run(history, subject, driver, options.trace, result);
  }
  if (result.failure) TellUnanswered(options.trace);
  if (observer) observer->End(result.ran);
  return result;
}

Status NoCache(const Setup& setup, const Subject& subject) {
  Result<std::unique_ptr<Cache>> cache = subject.Make(setup);
  Status status = cache.status();
  if (status.ok()) status = (*cache)->SetConfig(setup.config);
  if (status.ok()) status = (*cache)->Init(setup.init);
  return {StatusCode::kInvalidArgument,
          fmt::format("no cache can be made from '{}': {}", ToText(setup),
                      status.message())};
}

RunResult RunAgainst(const CacheMaker& make_reference, const History& history,
                     const Subject& subject) {
  RunResult result;
  DifferentialDriver driver(history.setup, subject, nullptr, nullptr, result,
                            make_reference);
  Run(history, subject, driver, nullptr, result);
  return result;
}

namespace {

struct Note {
  Answered AnswerCounts::*counted;
  std::string_view never;
  std::string_view asked;  // What there were some of.
};
constexpr std::array kNotes = {
    Note{&AnswerCounts::prefixes, "find_prefix found nothing", "prompts"},
    Note{&AnswerCounts::resumes, "can_resume was never true", "calls"},
    Note{&AnswerCounts::opens, "open found nothing", "prompts"},
};

}  // namespace

void AnswerCounts::Add(const AnswerCounts& other) {
  for (const Note& note : kNotes) {
    (this->*note.counted).Add(other.*note.counted);
  }
}

AnswerCounts::AllNumbers AnswerCounts::Numbers() const {
  return {prefixes.asked, prefixes.came, resumes.asked,
          resumes.came,   opens.asked,   opens.came};
}

AnswerCounts AnswerCounts::Of(const AllNumbers& numbers) {
  return {{numbers[0], numbers[1]},
          {numbers[2], numbers[3]},
          {numbers[4], numbers[5]}};
}

std::vector<std::string> NotesOn(const AnswerCounts& counts) {
  std::vector<std::string> notes;
  for (const Note& note : kNotes) {
    const Answered& answered = counts.*note.counted;
    if (answered.asked == 0 || answered.came > 0) continue;
    notes.push_back(
        fmt::format("{} in {} {}", note.never, answered.asked, note.asked));
  }
  return notes;
}

}  // namespace kvtwin::props
