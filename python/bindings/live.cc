#include "props/backend/live.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "bindings.h"
#include "core/names.h"
#include "core/refusals.h"
#include "props/backend/backend.h"
#include "props/backend/backend_laws.h"
#include "props/backend/profile.h"
#include "props/certify/certificate.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/report/page.h"
#include "props/report/page_file.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"

namespace kvtwin::python {
namespace {

// The harness gives up a backend that has made no cache after this many calls
// of `progress`.
constexpr int kVainLooks = 4;

// Whether an __init__ failed, with an exception that is a status or another.
bool IsOfInit(const props::Failure& failure) {
  return failure.function == "init" || failure.text.starts_with("Init is ");
}

class Driver {
 public:
  // `rerun` makes the command that runs a history again.
  Driver(nb::object adapter, nb::object rerun)
      : backend_(std::move(adapter)),
        info_(Value(props::DescribeBackend(&backend_.table()))),
        rerun_(std::move(rerun)) {}

  const props::BackendInfo& info() const { return info_; }
  const Backend& backend() const { return backend_; }

  props::Subject SubjectAt(props::Level level) const {
    return props::BackendSubject(info_, level, "");
  }

  // The level that the user asks for; or else the level that the backend
  // claims, and the weaker ones.
  std::vector<props::Level> Levels(
      const std::optional<std::string>& asked = std::nullopt) const {
    std::vector<props::Level> levels = props::LevelsOf(info_);
    if (asked) return {AskedLevel(*asked, levels)};
    std::erase_if(levels,
                  [&](props::Level level) { return level < info_.claims; });
    return levels;
  }

  // Returns the finding, with the command of Python that shows it again, and
  // writes its page if there is a path for it.
  Finding Report(props::Failure failure,
                 const std::optional<FilePath>& page) const {
    // A failed init has no cache whose message() could be read.
    if (IsOfInit(failure)) {
      failure.text = fmt::format("init fails: {}", backend_.init_error());
    }
    failure.rerun = TextOf(rerun_(failure.history));
    failure.report.clear();
    failure.report =
        props::FailureText(failure) +
        props::HintOn(failure, "kvtwin.profile", info_.abilities.can_resume);
    if (page) Check(props::WritePage(failure, page->text));
    return FindingOf(failure, failure.level);
  }

 private:
  Backend backend_;
  props::BackendInfo info_;
  nb::object rerun_;
};

struct Vain {};

// Raises NotSupported, because no history could make a cache.
void RefuseVain(const Driver& driver) {
  Raise(
      {StatusCode::kNotSupported, fmt::format("each __init__ refused: {}",
                                              driver.backend().init_error())});
}

// Returns the result if no history could make a cache.
Fuzzed NoneMade(const Driver& driver) {
  const std::string& error = driver.backend().init_error();
  if (!error.starts_with("exception: ")) RefuseVain(driver);
  const std::string text = fmt::format("each __init__ fails: {}\n", error);
  return {"none", false, true,
          0,      0,     {{"none", "backend: error", "", error, text, "", ""}},
          {},     {}};
}

// Writes the page of the first finding, if there is a path for it.
Fuzzed Fuzz(nb::object adapter, nb::object rerun, std::int64_t operations,
            double seconds, std::uint64_t seed,
            const std::vector<std::string>& known, double shrink_seconds,
            const std::optional<std::string>& level,
            const std::optional<std::string>& kind,
            const std::optional<FilePath>& page) {
  return Raising([&]() -> Fuzzed {
    if (page) Check(props::PreparePage(page->text));
    const Driver driver(std::move(adapter), std::move(rerun));
    int looks = 0;
    props::FuzzOptions options;
    options.operations = operations;
    options.seconds = seconds;
    options.seed = seed;
    options.known_buckets = {known.begin(), known.end()};
    options.drawn = page.has_value();
    if (kind) options.kind = FromName<Kind>(kKindNames, *kind);
    options.progress = [&](std::int64_t, double) {
      if (!driver.backend().made_one() && ++looks >= kVainLooks) throw Vain();
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    };
    props::LiveResult result;
    try {
      result =
          props::FuzzLive(options, driver.Levels(level), [&](props::Level at) {
            props::Subject subject = driver.SubjectAt(at);
            subject.shrink_seconds = shrink_seconds;
            return subject;
          });
    } catch (const Vain&) {
    }
    if (!driver.backend().made_one()) return NoneMade(driver);
    std::vector<Finding> findings;
    for (const props::Failure& failure : result.findings) {
      findings.push_back(
          driver.Report(failure, findings.empty() ? page : std::nullopt));
    }
    return {std::string(props::LevelName(result.holds)),
            result.Right(driver.info()),
            result.not_judged != props::Level::kNone,
            result.operations,
            result.histories,
            std::move(findings),
            result.passed_over,
            props::NotesOn(result.answers)};
  });
}

Ran Run(nb::object adapter, nb::object rerun, const std::string& history,
        const std::optional<std::string>& asked,
        const std::optional<FilePath>& page) {
  return Raising([&]() -> Ran {
    if (page) Check(props::PreparePage(page->text));
    const Driver driver(std::move(adapter), std::move(rerun));
    const props::History parsed = Value(props::ParseHistory(history));
    props::Level level =
        asked ? driver.Levels(asked).front() : driver.info().claims;
    props::CallTrace trace;
    props::RunResult result =
        props::RunHistory(parsed, driver.SubjectAt(level), {.trace = &trace});
    bool judged_nothing = !props::HasJudged(result, level);
    if (!asked && result.ran && !result.failure && driver.info().attend &&
        level != props::Level::kAttention) {  // Its rows are right.
      level = props::Level::kAttention;
      trace = {};
      result =
          props::RunHistory(parsed, driver.SubjectAt(level), {.trace = &trace});
      judged_nothing = judged_nothing && !props::HasJudged(result, level);
    }
    judged_nothing = judged_nothing && !result.failure;
    if (!result.ran && !result.failure) {
      Raise({StatusCode::kNotSupported,
             props::WhyNotMade(driver.info(), parsed.setup)});
    }
    std::vector<std::string> calls;
    for (const props::Step& step : trace.steps) {
      calls.push_back(props::CallLineOf(step));
    }
    std::optional<Finding> found;
    if (result.failure) {
      found = driver.Report(
          props::Explain(parsed, *result.failure, driver.SubjectAt(level),
                         /*drawn=*/page.has_value()),
          page);
    }
    return {std::move(calls), std::move(found),
            props::NotRun(parsed, driver.SubjectAt(level).abilities),
            judged_nothing ? std::string(props::kNothingJudged) : ""};
  });
}

// A law, and what came of it, as the fields of kvtwin.LawResult.
nb::dict LawDict(const props::Law& law, const props::LawAnswer& answer,
                 const nb::object& rerun) {
  nb::dict fields;
  fields["name"] = std::string(law.name);
  fields["statement"] = std::string(law.statement);
  fields["rules"] = std::string(law.rules);
  fields["histories"] = answer.run.histories;
  fields["judged"] = answer.run.judged;
  fields["not_judged"] = answer.why_not;
  const auto& failure = answer.run.failure;
  fields["check"] = failure ? failure->check : "";
  fields["reason"] = failure ? failure->text : "";
  const std::string history = failure ? props::ToText(answer.run.shrunk) : "";
  fields["history"] = history;
  fields["rerun"] =
      failure ? rerun(std::string(law.name), history) : nb::cast(std::string());
  return fields;
}

std::vector<std::string> LawNames() {
  std::vector<std::string> names;
  for (const props::Law& law : props::Laws()) names.emplace_back(law.name);
  return names;
}

// Judges the laws with these names; `rerun` makes the command that judges a law
// on a history again.
nb::typed<nb::list, nb::any> JudgeLaws(
    nb::object adapter, nb::object rerun, const std::vector<std::string>& names,
    std::uint64_t seed, std::int64_t count,
    const std::optional<std::string>& history) {
  return Raising([&] {
    const Driver driver(std::move(adapter), rerun);
    const props::BackendInfo& info = driver.info();
    if (info.rules != props::RulesAt(info, props::Level::kIdentity) ||
        info.claims > props::Level::kVisibility) {
      Raise({StatusCode::kNotSupported,
             fmt::format("a law compares rows bit for bit by kvtwin's rules; "
                         "{} follows {} and claims {}",
                         info.name, info.profile,
                         props::LevelName(info.claims))});
    }
    props::LawHistories histories{.seed = seed, .count = count, .history = {}};
    if (history) histories.history = Value(props::ParseHistory(*history));
    const props::Subject subject = driver.SubjectAt(info.claims);
    props::BackendLaws laws(
        subject, histories,
        [&](const props::Law& law, const props::History& tried, bool) {
          if (PyErr_CheckSignals() != 0) throw nb::python_error();
          return props::Judge(law, tried, subject);
        });
    nb::list answers;
    for (const std::string& name : names) {
      const props::Law& law = *props::FindLaw(name);
      answers.append(LawDict(law, laws.Run(law), rerun));
    }
    return answers;
  });
}

// Returns the fields of kvtwin.Certificate. `rerun` makes the command that runs
// a history again, `rerun_law` the command that judges a law again; `old` is
// the text of an earlier certificate.
nb::typed<nb::dict, nb::str, nb::any> Certify(
    nb::object adapter, const nb::object& rerun, const nb::object& rerun_law,
    std::int64_t operations, std::int64_t histories, std::uint64_t seed,
    const std::optional<std::string>& old) {
  return Raising([&] {
    if (old)
      Value(props::ReadCertificate(*old));  // Refuse it before a long run.
    const Driver driver(std::move(adapter), rerun);
    const std::vector<props::Level> levels = driver.Levels();
    props::CertifyOptions options;
    options.fuzz.operations = operations;
    options.fuzz.seed = seed;
    options.fuzz.progress = [](std::int64_t, double) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    };
    options.laws.seed = seed;
    options.laws.count = histories;
    const props::Subject claimed =
        driver.SubjectAt(props::ClaimedOf(levels, driver.info()));
    options.judge = [&](const props::Law& law, const props::History& history,
                        bool) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      return props::Judge(law, history, claimed);
    };
    std::set<std::string> unmade;  // Histories whose __init__ fails.
    props::Certificate certificate = props::Certify(
        driver.info(), options, levels,
        [&](props::Level level) { return driver.SubjectAt(level); },
        [&](const props::Failure& failure) {
          if (IsOfInit(failure)) unmade.insert(failure.history);
        });
    if (certificate.none_made) RefuseVain(driver);
    for (props::CertifiedFinding& finding : certificate.findings) {
      if (unmade.contains(finding.history)) {
        finding.reason += ": " + driver.backend().init_error();
      }
      finding.rerun = TextOf(rerun(finding.history));
    }
    for (props::CertifiedLaw& law : certificate.laws) {
      if (law.outcome != props::Outcome::kBroken) continue;
      law.rerun = TextOf(rerun_law(law.name));
    }
    return CertificateDict(certificate, old);
  });
}

// The summary; the values of each rule that fit the answers; the histories that
// no rules explain, and how the class ended in them ("" if it answered); what
// was tried; and the number of histories.
using Profiled =
    std::tuple<std::string, std::map<std::string, std::vector<std::string>>,
               std::vector<std::pair<std::string, std::string>>, std::string,
               int>;

Profiled Profile(nb::object adapter, std::int64_t operations) {
  return Raising([&]() -> Profiled {
    const Driver driver(std::move(adapter), nb::none());
    const props::InferredProfile profile =
        props::InferProfile(driver.info(), {.operations = operations});
    std::map<std::string, std::vector<std::string>> rules;
    for (const props::FoundRule& found : profile.found) {
      const RuleInfo& rule = AllRules()[found.rule];
      for (const int value : found.values) {
        rules[std::string(rule.name)].emplace_back(
            rule.values[static_cast<std::size_t>(value)]);
      }
    }
    std::vector<std::pair<std::string, std::string>> unexplained;
    for (const auto& [history, ended, answered] : profile.unexplained) {
      unexplained.emplace_back(history, ended);
    }
    std::string summary = props::SummaryOf(profile);
    if (!driver.backend().made_one() && unexplained.empty()) {
      summary += ": " + driver.backend().init_error();
    }
    return {std::move(summary), rules, std::move(unexplained),
            props::TriedText(profile), profile.asked};
  });
}

}  // namespace

props::Level AskedLevel(const std::string& asked,
                        const std::vector<props::Level>& levels) {
  std::vector<std::string_view> names;
  for (const props::Level level : levels) {
    names.push_back(props::LevelName(level));
    if (names.back() == asked) return level;
  }
  Raise(Invalid("level is '{}', the class can be compared at {}", asked,
                fmt::join(names, ", ")));
}

nb::typed<nb::dict, nb::str, nb::any> CertificateDict(
    const props::Certificate& certificate,
    const std::optional<std::string>& old) {
  nb::list changes;
  bool worse = false;
  if (old) {
    const props::Certificate before = Value(props::ReadCertificate(*old));
    for (const props::Change& change :
         props::ChangesSince(before, certificate)) {
      changes.append(change.text);
      worse = worse || change.worse;
    }
  }
  nb::typed<nb::dict, nb::str, nb::any> fields;
  fields["right"] = certificate.right;
  fields["text"] = props::CertificateText(certificate);
  fields["json"] = props::ToJson(certificate).dump();
  fields["junit"] = props::JUnitText(certificate);
  fields["changes"] = nb::tuple(changes);
  fields["worse"] = worse;
  return fields;
}

void BindLive(nb::module_& m) {
  m.def("certify", &Certify, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("rerun_law"), nb::arg("operations"), nb::arg("histories"),
        nb::arg("seed"), nb::arg("old").none());
  m.def("profile", &Profile, nb::arg("adapter"), nb::arg("operations"));
  m.def("law_names", &LawNames);
  m.def("judge_laws", &JudgeLaws, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("names"), nb::arg("seed"), nb::arg("count"),
        nb::arg("history").none());
  m.def("fuzz", &Fuzz, nb::arg("adapter"), nb::arg("rerun"),
        nb::arg("operations"), nb::arg("seconds"), nb::arg("seed"),
        nb::arg("known"), nb::arg("shrink_seconds"), nb::arg("level").none(),
        nb::arg("kind").none(), nb::arg("page").none());
  m.def("run", &Run, nb::arg("adapter"), nb::arg("rerun"), nb::arg("history"),
        nb::arg("level").none(), nb::arg("page").none());
}

}  // namespace kvtwin::python
