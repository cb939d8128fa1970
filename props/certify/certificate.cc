#include "props/certify/certificate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "core/dialects/profiles.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "props/base/hash.h"
#include "props/base/interrupt.h"
#include "props/compare/cited_rules.h"
#include "props/report/page.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;

constexpr std::array<std::string_view, 3> kOutcomeNames = {"holds", "broken",
                                                           "not judged"};

std::string_view NameOf(Outcome outcome) { return At(kOutcomeNames, outcome); }

// Returns the rules in which a profile differs from kvtwin's own.
std::vector<std::string> Differences(const Rules& rules) {
  std::vector<std::string> differs;
  for (const RuleInfo& rule : AllRules()) {
    if (rule.get(rules) == rule.get(Rules())) continue;
    differs.push_back(fmt::format("{} {} (kvtwin: {})", rule.name,
                                  rule.ValueOf(rules), rule.ValueOf(Rules())));
  }
  return differs;
}

// Adds the rules of a list, "S31, S32", to a set.
void AddRules(std::string_view list, std::set<std::string>& rules) {
  std::istringstream words{std::string(list)};
  for (std::string word; words >> word;) {
    if (word.ends_with(',')) word.pop_back();
    rules.insert(word);
  }
}

// Returns the operations that histories of the backend may have.
std::vector<OpKind> OperationsOf(const Abilities& abilities, Level level) {
  std::vector<OpKind> operations = {OpKind::kPut, OpKind::kGet};
  const auto add = [&](bool has, OpKind operation) {
    if (has) operations.push_back(operation);
  };
  add(abilities.Can(KVTWIN_CAN_REMOVE_TAIL), OpKind::kDrop);
  add(abilities.Can(KVTWIN_CAN_REMOVE_MIDDLE), OpKind::kShift);
  add(abilities.Can(KVTWIN_CAN_COPY_PREFIX), OpKind::kCopy);
  add(abilities.can_resume, OpKind::kAsk);
  add(abilities.set_causal, OpKind::kCausal);
  add(abilities.Can(KVTWIN_CAN_REFUSE_MISUSE), OpKind::kMisuse);
  add(level == Level::kIdentity && abilities.snapshots, OpKind::kSnapshot);
  return operations;
}

constexpr auto kIdentityChecks = std::to_array<std::string_view>(
    {"subject: batch cells", "subject: cell count", "subject: view shape",
     "subject: view cells", "subject: mask bytes", "subject: K bytes",
     "subject: V bytes"});

// Returns the rules that calls and laws cite, but that no history of the
// backend can break, because it lacks an ability.
std::set<std::string> OutOfReach(const Abilities& abilities, Level holds) {
  const bool wraps =
      abilities.HasKind(Kind::kWrapper) || abilities.HasKind(Kind::kHybrid);
  std::set<std::string> rules;
  const auto needs = [&](bool has, std::string_view list) {
    if (!has) AddRules(list, rules);
  };
  needs(holds == Level::kIdentity, "S9, S10, S11, S14");
  needs(abilities.Can(KVTWIN_CAN_RESERVE), "S18");
  needs(abilities.set_causal, "S19");
  needs(abilities.Can(KVTWIN_CAN_COPY_PREFIX), "S26, S27");
  needs(abilities.can_resume, "S28, S44");
  needs(abilities.Can(KVTWIN_CAN_REMOVE_MIDDLE), "S31, S32");
  needs(abilities.HasKind(Kind::kEncoder), "S38, S40");
  needs(wraps, "S41, S42, S43, S44, S45");
  return rules;
}

// Returns the rules of all checks that ran and can fail, sorted: S2, S10, D1.
std::vector<std::string> RulesHeldTo(const BackendInfo& info, Level holds,
                                     const Abilities& abilities,
                                     const Certificate& certificate) {
  std::set<std::string> found;
  if (holds != Level::kNone) {
    const bool rows = holds <= Level::kVisibility;
    AddRules(
        CitedRules(rows ? "subject: rows" : "subject: attention", OpKind::kGet),
        found);
    if (info.attend)
      AddRules(CitedRules("subject: output", OpKind::kGet), found);
    if (holds == Level::kIdentity) {
      for (const std::string_view check : kIdentityChecks) {
        AddRules(CitedRules(check, OpKind::kGet), found);
      }
    }
    for (const OpKind operation : OperationsOf(abilities, holds)) {
      AddRules(CitedRules("subject: result", operation), found);
    }
  }
  for (const CertifiedLaw& law : certificate.laws) {
    if (law.outcome == Outcome::kHolds) AddRules(law.rules, found);
  }
  std::vector<std::string> rules(found.begin(), found.end());
  const std::set<std::string> out = OutOfReach(abilities, holds);
  std::erase_if(rules, [&](const std::string& rule) {
    return out.contains(rule) || (rule[0] == 'D' && !abilities.CanDraft());
  });
  std::ranges::sort(rules, {}, [](const std::string& rule) {
    return std::pair(std::string("SRHDPQ").find(rule[0]),
                     std::stoi("0" + rule.substr(1)));
  });
  return rules;
}

// Adds the answers of all laws that the backend can be judged by.
void JudgeLaws(const BackendInfo& info, const CertifyOptions& options,
               const Subject& subject, Certificate& certificate) {
  std::string why_not;
  if (info.rules != RulesAt(info, Level::kIdentity)) {
    why_not = "laws follow our rules, and the backend those of " + info.profile;
  } else if (subject.level > Level::kVisibility) {
    why_not = "laws compare rows bit for bit";
  }
  BackendLaws laws(subject, options.laws, options.judge);
  for (const Law& law : Laws()) {
    CertifiedLaw certified{.name = std::string(law.name),
                           .rules = std::string(law.rules),
                           .text = why_not};
    if (why_not.empty() && !Interrupted()) {
      const LawAnswer answer = laws.Run(law);
      certified.histories = answer.run.histories;
      certified.judged = answer.run.judged;
      certified.text = answer.why_not;
      if (answer.why_not.empty()) certified.outcome = Outcome::kHolds;
      if (answer.run.failure) {
        certified.outcome = Outcome::kBroken;
        certified.text = answer.run.failure->text;
        certified.rerun = LawCommand(law, answer.run.shrunk, subject);
      }
    }
    certificate.laws.push_back(std::move(certified));
  }
}

// Counts the rare states that the same histories reach in the optimized twin;
// those of drafts, states and hybrids only if the histories have any.
void CountMarks(const FuzzOptions& options, const Subject& subject,
                Certificate& certificate) {
  Subject twin = TwinSubject("optimized");
  twin.abilities = subject.abilities;
  FuzzOptions counting = options;
  counting.count_marks = true;
  counting.known_buckets.clear();
  const FuzzResult result = Fuzz(counting, twin);
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    if (OfUnusedGroup(result.counts, i)) continue;
    certificate.marks[std::string(kCoverageMarks[i].name)] =
        At(result.counts.hits, i);
  }
}

}  // namespace

CertifiedFinding FindingOf(Level level, const Failure& failure) {
  return {.level = std::string(LevelName(level)),
          .check = failure.check,
          .bucket = failure.bucket,
          .rules = failure.rules,
          .reason = failure.text,
          .history = failure.history,
          .rerun = failure.rerun};
}

Certificate Certify(const BackendInfo& info, const CertifyOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at,
                    const std::function<void(const Failure&)>& found) {
  const LiveResult live = FuzzLive(options.fuzz, levels, subject_at, found);
  Certificate certificate{.backend = info.name,
                          .profile = info.profile,
                          .differs = Differences(info.rules),
                          .claims = std::string(LevelName(info.claims)),
                          .seed = static_cast<std::int64_t>(options.fuzz.seed),
                          .operations = live.operations,
                          .histories = live.histories,
                          .none_made = live.ran == 0 && live.findings.empty(),
                          .not_declared = NotDeclared(info)};
  for (const Level level : {Level::kIdentity, Level::kVisibility,
                            Level::kNumeric, Level::kAttention}) {
    if (level == Level::kAttention && !info.attend) continue;
    LevelVerdict verdict = VerdictOn(level, live, info);
    certificate.levels.push_back({.name = std::string(LevelName(level)),
                                  .outcome = verdict.outcome,
                                  .text = std::move(verdict.text)});
  }
  const Subject subject = subject_at(ClaimedOf(levels, info));
  if (live.ran > 0) {
    JudgeLaws(info, options, subject, certificate);
    CountMarks(options.fuzz, subject, certificate);
  }
  certificate.rules =
      RulesHeldTo(info, live.holds, subject.abilities, certificate);
  for (const Failure& finding : live.findings) {
    certificate.findings.push_back(FindingOf(finding.level, finding));
  }
  certificate.right =
      live.ran > 0 && live.Right(info) &&
      std::ranges::none_of(certificate.laws, [](const CertifiedLaw& law) {
        return law.outcome == Outcome::kBroken;
      });
  return certificate;
}

namespace {

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string HashOf(const Json& json) {
  const std::string text = Dump(json);
  return fmt::format("{:016x}", HashBytes(text.data(), text.size(), 0));
}

// Returns the outcome that a field names; kNotJudged if `problem` is set.
Outcome OutcomeIn(const JsonFields& fields) {
  return static_cast<Outcome>(fields.Name("outcome", kOutcomeNames));
}

// Calls `add` with the fields of each object of a list.
template <class Add>
void ForEach(const JsonFields& fields, std::string_view key,
             std::string& problem, const Add& add) {
  const JsonValue* list = fields.Need(key);
  if (list == nullptr) return;
  if (list->type != JsonValue::Type::kList || !list->numbers.empty() ||
      list->strings > 0) {
    fields.Wrong(key, *list, "a list of objects");
    return;
  }
  for (std::size_t i = 0; i < list->items.size() && problem.empty(); ++i) {
    const JsonValue& item = list->items[i];
    if (item.type != JsonValue::Type::kObject) {
      fields.Wrong(key, item, "a list of objects");
      return;
    }
    add(JsonFields(item, fmt::format("{}[{}].", key, i), problem));
  }
}

void ReadMarks(const JsonFields& fields, Certificate& certificate) {
  const JsonValue* marks = fields.Need("probes");
  if (marks == nullptr) return;
  if (marks->type != JsonValue::Type::kObject) {
    fields.Wrong("probes", *marks, "an object");
    return;
  }
  for (std::size_t i = 0; i < marks->keys.size(); ++i) {
    const JsonValue& count = marks->items[i];
    if (count.type != JsonValue::Type::kInteger || count.number < 0 ||
        count.number > 1e15) {
      fields.Wrong("probes", count, "a count");
      return;
    }
    certificate.marks[marks->keys[i]] = static_cast<std::int64_t>(count.number);
  }
}

Certificate CertificateFrom(const JsonFields& fields, std::string& problem) {
  Certificate read;
  fields.Int("certificate", kFormat, kFormat);
  read.version = fields.String("kvtwin");
  read.backend = fields.String("backend");
  read.profile = fields.String("profile");
  read.differs = fields.Strings("differs");
  read.claims = fields.String("claims");
  read.right = fields.Bool("right");
  read.seed = static_cast<std::int64_t>(fields.Real("seed"));
  read.operations = static_cast<std::int64_t>(fields.Real("operations"));
  read.histories = static_cast<std::int64_t>(fields.Real("histories"));
  ForEach(fields, "levels", problem, [&](const JsonFields& level) {
    read.levels.push_back({.name = level.String("level"),
                           .outcome = OutcomeIn(level),
                           .text = level.String("reason")});
  });
  ForEach(fields, "laws", problem, [&](const JsonFields& law) {
    read.laws.push_back(
        {.name = law.String("law"),
         .rules = law.String("rules"),
         .outcome = OutcomeIn(law),
         .histories = static_cast<std::int64_t>(law.Real("histories")),
         .judged = static_cast<std::int64_t>(law.Real("judged")),
         .text = law.String("reason"),
         .rerun = law.String("rerun")});
  });
  read.rules = fields.Strings("rules_held_to");
  read.not_declared = fields.Strings("not_declared");
  ReadMarks(fields, read);
  ForEach(fields, "findings", problem, [&](const JsonFields& finding) {
    read.findings.push_back({.level = finding.String("level"),
                             .check = finding.String("check"),
                             .bucket = finding.String("bucket"),
                             .rules = finding.String("rules"),
                             .reason = finding.String("reason"),
                             .history = finding.String("history"),
                             .rerun = finding.String("rerun")});
  });
  return read;
}

}  // namespace

Json ToJson(const Certificate& certificate) {
  Json json = {{"certificate", kFormat},
               {"kvtwin", certificate.version},
               {"backend", certificate.backend},
               {"profile", certificate.profile},
               {"differs", certificate.differs},
               {"claims", certificate.claims},
               {"right", certificate.right},
               {"seed", certificate.seed},
               {"operations", certificate.operations},
               {"histories", certificate.histories},
               {"levels", Json::array()},
               {"laws", Json::array()},
               {"rules_held_to", certificate.rules},
               {"not_declared", certificate.not_declared},
               {"probes", Json::object()},
               {"findings", Json::array()}};
  for (const CertifiedLevel& level : certificate.levels) {
    json["levels"].push_back({{"level", level.name},
                              {"outcome", NameOf(level.outcome)},
                              {"reason", level.text}});
  }
  for (const CertifiedLaw& law : certificate.laws) {
    json["laws"].push_back({{"law", law.name},
                            {"rules", law.rules},
                            {"outcome", NameOf(law.outcome)},
                            {"histories", law.histories},
                            {"judged", law.judged},
                            {"reason", law.text},
                            {"rerun", law.rerun}});
  }
  for (const auto& [name, hits] : certificate.marks) {
    json["probes"][name] = hits;
  }
  for (const CertifiedFinding& finding : certificate.findings) {
    json["findings"].push_back({{"level", finding.level},
                                {"check", finding.check},
                                {"bucket", finding.bucket},
                                {"rules", finding.rules},
                                {"reason", finding.reason},
                                {"history", finding.history},
                                {"rerun", finding.rerun}});
  }
  json["hash"] = HashOf(json);
  return json;
}

Result<Certificate> ReadCertificate(const std::string& text) {
  const auto refuse = [](std::string_view why) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("not a certificate: {}", why));
  };
  // A certificate is one line.
  const std::string line = text.substr(0, text.find_last_not_of(" \r\n") + 1);
  JsonValue object;
  std::string problem = ParseJsonLine(line, object);
  if (!problem.empty()) return refuse(problem);
  const Certificate read =
      CertificateFrom(JsonFields(object, "", problem), problem);
  if (!problem.empty()) return refuse(problem);
  // ParseJsonLine has limited depth and size.
  Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  json.erase("changes");
  const Json hash = json.value("hash", Json());
  json.erase("hash");
  if (hash != HashOf(json)) return refuse("its hash is wrong");
  return read;
}

namespace {

// Returns a line for each law that was judged; the others share a line.
std::string LawsText(const std::vector<CertifiedLaw>& laws) {
  std::string text;
  std::vector<std::string> not_judged;
  std::set<std::string> reasons;
  for (const CertifiedLaw& law : laws) {
    if (law.outcome == Outcome::kNotJudged) {
      not_judged.push_back(law.name);
      reasons.insert(law.text);
      continue;
    }
    text +=
        fmt::format("  {:<6}  {:<22}  judged {} times in {} histories\n",
                    NameOf(law.outcome), law.name, law.judged, law.histories);
    if (law.outcome == Outcome::kBroken) {
      text += fmt::format("    {}\n    rerun {}\n", law.text, law.rerun);
    }
  }
  if (not_judged.empty()) return text;
  const std::string why =
      reasons.size() == 1 ? *reasons.begin() : "`kvtwin laws` says why";
  return text + fmt::format("  not judged ({}): {}\n", why,
                            fmt::join(not_judged, ", "));
}

}  // namespace

std::string CertificateText(const Certificate& certificate) {
  std::string text = fmt::format("{}, by the rules of {}; kvtwin {}, seed {}\n",
                                 certificate.backend, certificate.profile,
                                 certificate.version, certificate.seed);
  text += "levels\n";
  for (const CertifiedLevel& level : certificate.levels) {
    text += fmt::format("  {:<11} {}{}\n", level.name, level.text,
                        level.name == certificate.claims ? " (claimed)" : "");
  }
  if (!certificate.laws.empty()) text += "laws\n" + LawsText(certificate.laws);
  for (const CertifiedFinding& finding : certificate.findings) {
    text += fmt::format("finding {}\n  {} ({})\n  rerun {}\n", finding.bucket,
                        finding.reason, finding.rules, finding.rerun);
  }
  const auto list = [&](std::string_view title,
                        const std::vector<std::string>& names) {
    if (names.empty()) return;
    text += fmt::format("{}\n  {}\n", title, fmt::join(names, ", "));
  };
  list("rules of the checks that ran", certificate.rules);
  list("rules that differ from kvtwin's", certificate.differs);
  list("not declared, so never tried", certificate.not_declared);
  std::vector<std::string> missed;
  for (const auto& [name, hits] : certificate.marks) {
    if (hits == 0) missed.push_back(name);
  }
  if (!certificate.marks.empty()) {
    list(fmt::format("rare states: {} of {} reached, not these",
                     certificate.marks.size() - missed.size(),
                     certificate.marks.size()),
         missed);
  }
  return text + fmt::format(
                    "{}: {} operations in {} histories, {} findings, "
                    "hash {}\n",
                    certificate.right ? "right" : "WRONG",
                    certificate.operations, certificate.histories,
                    certificate.findings.size(),
                    ToJson(certificate)["hash"].get<std::string>());
}

namespace {

struct TestCase {
  std::string group;
  std::string name;
  Outcome outcome;
  std::string text;
};

std::vector<TestCase> CasesOf(const Certificate& certificate) {
  std::vector<TestCase> cases;
  std::set<std::string> levels;
  for (const CertifiedLevel& level : certificate.levels) {
    std::string text = level.text;
    for (const CertifiedFinding& finding : certificate.findings) {
      if (finding.level != level.name) continue;
      text += fmt::format("\n{}\nhistory: {}\nrerun: {}", finding.reason,
                          finding.history, finding.rerun);
    }
    // A level that is not claimed may be broken.
    const bool above = level.outcome == Outcome::kBroken &&
                       level.name != certificate.claims && certificate.right;
    cases.push_back({"level", level.name,
                     above ? Outcome::kNotJudged : level.outcome, text});
  }
  for (const CertifiedLaw& law : certificate.laws) {
    cases.push_back({"law", law.name, law.outcome,
                     law.text + (law.rerun.empty() ? "" : "\n" + law.rerun)});
  }
  return cases;
}

}  // namespace

std::string JUnitText(const Certificate& certificate) {
  const std::vector<TestCase> cases = CasesOf(certificate);
  const auto count = [&](Outcome outcome) {
    return std::ranges::count(cases, outcome, &TestCase::outcome);
  };
  std::string text = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<testsuite name=\"kvtwin certify {}\" tests=\"{}\" failures=\"{}\" "
      "skipped=\"{}\">\n",
      EscapedMarkup(certificate.backend), cases.size(), count(Outcome::kBroken),
      count(Outcome::kNotJudged));
  for (const TestCase& test : cases) {
    text += fmt::format("  <testcase classname=\"kvtwin.{}\" name=\"{}\"",
                        test.group, EscapedMarkup(test.name));
    if (test.outcome == Outcome::kHolds) {
      text += "/>\n";
      continue;
    }
    const bool broken = test.outcome == Outcome::kBroken;
    text +=
        fmt::format(">\n    <{0} message=\"{1}\">{2}</{0}>\n  </testcase>\n",
                    broken ? "failure" : "skipped",
                    EscapedMarkup(test.text.substr(0, test.text.find('\n'))),
                    EscapedMarkup(test.text));
  }
  return text + "</testsuite>\n";
}

namespace {

// Adds a change for each difference between two lists of levels or laws.
template <class Item>
void CompareOutcomes(std::string_view word, const std::vector<Item>& old,
                     const std::vector<Item>& now,
                     std::vector<Change>& changes) {
  const auto find = [](const std::vector<Item>& items,
                       const std::string& name) -> std::optional<Outcome> {
    const auto at = std::ranges::find(items, name, &Item::name);
    if (at == items.end()) return std::nullopt;
    return at->outcome;
  };
  for (const Item& item : now) {
    const auto before = find(old, item.name);
    if (before == item.outcome) continue;
    changes.push_back(
        {fmt::format("{} {}: {} before, now {}", word, item.name,
                     before ? NameOf(*before) : "absent", NameOf(item.outcome)),
         before == Outcome::kHolds || item.outcome == Outcome::kBroken});
  }
  for (const Item& item : old) {
    if (find(now, item.name)) continue;
    changes.push_back({fmt::format("{} {}: {} before, now absent", word,
                                   item.name, NameOf(item.outcome)),
                       item.outcome == Outcome::kHolds});
  }
}

// Adds a change for each name that only one of two lists has.
void CompareNames(std::string_view gone, bool gone_is_worse,
                  std::string_view come, bool come_is_worse,
                  const std::vector<std::string>& old,
                  const std::vector<std::string>& now,
                  std::vector<Change>& changes) {
  for (const std::string& name : old) {
    if (std::ranges::count(now, name) > 0) continue;
    changes.push_back({fmt::format("{}: {}", gone, name), gone_is_worse});
  }
  for (const std::string& name : now) {
    if (std::ranges::count(old, name) > 0) continue;
    changes.push_back({fmt::format("{}: {}", come, name), come_is_worse});
  }
}

std::vector<std::string> Reached(const Certificate& certificate) {
  std::vector<std::string> reached;
  for (const auto& [name, hits] : certificate.marks) {
    if (hits > 0) reached.push_back(name);
  }
  return reached;
}

std::vector<std::string> Buckets(const Certificate& certificate) {
  std::vector<std::string> buckets;
  for (const CertifiedFinding& finding : certificate.findings) {
    buckets.push_back(finding.bucket);
  }
  return buckets;
}

}  // namespace

std::vector<Change> ChangesSince(const Certificate& old,
                                 const Certificate& now) {
  std::vector<Change> changes;
  const auto compare = [&](std::string_view word, const std::string& before,
                           const std::string& after, bool worse) {
    if (before == after) return;
    changes.push_back(
        {fmt::format("{}: '{}' before, now '{}'", word, before, after), worse});
  };
  compare("backend", old.backend, now.backend, false);
  compare("version of kvtwin", old.version, now.version, false);
  compare("profile", old.profile, now.profile, false);
  compare("claimed level", old.claims, now.claims, false);
  compare("seed", std::to_string(old.seed), std::to_string(now.seed), false);
  CompareOutcomes("level", old.levels, now.levels, changes);
  CompareOutcomes("law", old.laws, now.laws, changes);
  CompareNames("finding gone", false, "new finding", true, Buckets(old),
               Buckets(now), changes);
  CompareNames("lost rule", true, "added rule", false, old.rules, now.rules,
               changes);
  CompareNames("declared ability", false, "withdrawn ability", true,
               old.not_declared, now.not_declared, changes);
  CompareNames("lost rare state", true, "added rare state", false, Reached(old),
               Reached(now), changes);
  CompareNames("no longer differs in a rule", false, "now differs in a rule",
               false, old.differs, now.differs, changes);
  return changes;
}

}  // namespace kvtwin::props
