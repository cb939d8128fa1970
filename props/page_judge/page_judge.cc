#include "props/page_judge/page_judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "props/base/runs_of.h"
#include "props/oracle/oracle.h"
#include "props/page_judge/page_judge_headline.h"
#include "props/page_judge/page_judge_view.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using nlohmann::json;
using reference::Ledger;
using reference::LedgerToken;
using Source = JudgedCalls::Source;

class PageJudge {
 public:
  PageJudge(const json& page, const JudgedCalls& calls)
      : page_(page), calls_(calls), ledger_(calls.spec, calls.rules) {
    TraceHeader header;
    header.spec = calls.spec;
    header.config = calls.config;
    header.init = calls.init;
    if (is_recording()) AllowShifts(header.spec);
    if (calls.visibility_only) MakeRoom(header);
    ledger_ = Ledger(header.spec, calls.rules);
    Expect(ledger_.Init(header.config, header.init).ok(), "the ledger begins");
    if (calls.source == Source::kLedger) ledger_.IgnoreCapacity();
    fresh_.assign(ledger_.parts().size(), false);
  }

  PageVerdict Run() {
    const json& steps = page_["steps"];
    std::vector<const json*> drawn;
    for (const json& step : steps) {
      if (!IsJudged(step["call"].get<std::string>())) continue;
      drawn.push_back(&step);
    }
    std::vector<const JudgedCall*> made;
    for (const JudgedCall& call : calls_.calls) {
      if (!CallText(call).empty()) made.push_back(&call);
    }
    Expect(drawn.size() <= made.size(), "a call of the page was not made");
    if (page_["left_out"] == 0) {
      Expect(drawn.size() == made.size(), "each call is in the list");
    }
    std::size_t next = made.size() - std::min(drawn.size(), made.size());
    std::size_t at = 0;
    std::size_t number = 0;
    for (const JudgedCall& call : calls_.calls) {
      Follow(call);
      if (CallText(call).empty() || number++ < next) continue;
      if (at < drawn.size()) JudgeStep(*drawn[at++], call);
    }
    JudgePageHeadline(page_, labels_);
    return std::move(labels_.verdict());
  }

 private:
  static void AllowShifts(CacheSpec& spec) {
    if (spec.shift.kind == ShiftKind::kNone) {
      spec.shift.kind = ShiftKind::kIdentity;
    }
    for (CacheSpec& one : spec.caches) AllowShifts(one);
  }

  bool is_recording() const { return calls_.source == Source::kRecording; }

  void Expect(bool holds, const std::string& what) {
    labels_.Expect(holds, what);
  }

  bool IsJudged(const std::string& call) const {
    if (is_recording()) return true;
    for (const char* name :
         {"StartForward(", "Put(", "Get(", "SetCausal(", "Remove(",
          "CopyPrefix(", "CanResume(", "Commit("}) {
      if (call.starts_with(name)) return true;
    }
    return false;
  }

  // Returns the call as the page must show it; empty if pages do not show it.
  std::string CallText(const JudgedCall& call) const {
    if (call.state) return "";
    const TraceOp& op = call.op;
    if (is_recording()) {
      return std::string(TraceOpName(op.kind));
    }
    switch (op.kind) {
      case TraceOpKind::kStartForward:
        return fmt::format("StartForward({}positions [{}], sequences [{}]{}{})",
                           op.parents.empty() ? "" : "drafts, ",
                           RunsOf(op.positions), RunsOf(op.sequences),
                           op.parents.empty() ? ""
                                              : fmt::format(", parents [{}]",
                                                            RunsOf(op.parents)),
                           op.reserve ? ", reserve" : "");
      case TraceOpKind::kCommit:
        return fmt::format("Commit({}, [{}])", op.seq, RunsOf(op.indices));
      case TraceOpKind::kPut:
        return fmt::format("Put(layer {},", op.layer);
      case TraceOpKind::kGet:
        return fmt::format("Get(layer {})", op.layer);
      case TraceOpKind::kSetCausal:
        return fmt::format("SetCausal([{}])", RunsOf(op.indices));
      case TraceOpKind::kRemove:
        return fmt::format(
            "Remove({}, {}, {})", op.seq, op.begin,
            op.end == kOpenEnd ? "open" : fmt::to_string(op.end));
      case TraceOpKind::kCopyPrefix:
        return fmt::format("CopyPrefix({}, {}, {})", op.src, op.dst, op.len);
      case TraceOpKind::kCanResume:
        return fmt::format("CanResume({}, {})", op.seq, op.pos);
      default:
        return "";
    }
  }

  std::string AnswerText(const JudgedCall& call) const {
    const TraceOp& op = call.op;
    const bool recording = is_recording();
    const bool asks = op.kind == TraceOpKind::kCanResume ||
                      op.kind == TraceOpKind::kEncoderCached;
    if (asks && !call.refused) {
      if (recording) return op.answer ? "true" : "false";
      return op.answer ? "yes" : "no";
    }
    const bool answers = op.kind == TraceOpKind::kStartForward ||
                         op.kind == TraceOpKind::kRemove;
    if (op.kind == TraceOpKind::kFindPrefix) return fmt::to_string(op.len);
    if (recording && !answers) return "";
    const bool got = op.kind == TraceOpKind::kGet && !call.refused;
    if (got && calls_.source == Source::kIdentity) return "";
    return std::string(StatusName(op.result));
  }

  // Makes the call on the ledger.
  void Follow(const JudgedCall& call) {
    if (call.state) {
      ledger_.Restore(*call.state);
      cells_[active_ = 0] = call.cells;
      SetFresh(false);
      Remember();
      return;
    }
    const TraceOp& op = call.op;
    switch (op.kind) {
      case TraceOpKind::kStartForward:
        FollowStart(op);
        break;
      case TraceOpKind::kSetLayerType:
        active_ = AsSize(op.type);
        ledger_.SetLayerType(op.type);
        break;
      case TraceOpKind::kSetCausal:
        FollowSetCausal(op);
        break;
      case TraceOpKind::kPut:
        ledger_.Put(op.layer, op.key.view(), op.value->view());
        Remember();
        break;
      case TraceOpKind::kRemove:
        FollowRemove(op);
        break;
      case TraceOpKind::kCopyPrefix:
        FollowCopy(op);
        break;
      case TraceOpKind::kCommit:
        (void)ledger_.Commit(op.seq, op.indices);
        SetFresh(false);
        break;
      case TraceOpKind::kFindPrefix:
        (void)ledger_.FindPrefix(op.seq, op.indices, op.len);
        SetFresh(false);
        break;
      case TraceOpKind::kCheckpoint:
        (void)ledger_.Checkpoint(op.seq);
        break;
      case TraceOpKind::kCanResume:
        if (calls_.source == Source::kLedger && op.answer &&
            op.result == StatusCode::kOk) {
          ledger_.Resumes(op.seq, op.pos);
        }
        break;
      default:
        break;
    }
    if (!is_recording()) cells_[active_] = call.cells;
    Remember();
  }

  void FollowStart(const TraceOp& op) {
    const bool ok = op.result == StatusCode::kOk;
    const Batch batch{op.positions, op.sequences, op.indices, op.parents};
    copied_ = false;
    reserving_ = ok && op.reserve;
    const bool unknown =
        calls_.source == Source::kLedger && op.result == StatusCode::kCacheFull;
    if (is_recording() && !ok) {
      Ledger after = ledger_;
      const bool same = !calls_.visibility_only &&
                        !after.StartForward(batch, op.reserve).ok();
      if (same) ledger_ = after;
    } else if (!unknown) {
      (void)ledger_.StartForward(batch, op.reserve, op.result);
    }
    SetFresh(ok && (calls_.source == Source::kIdentity || !op.reserve));
    positions_ = op.positions;
    sequences_ = op.sequences;
    if (ok) active_ = 0;
  }

  void FollowSetCausal(const TraceOp& op) {
    if (op.result == StatusCode::kOk) {
      (void)ledger_.active().SetCausal(op.indices);
    }
    fresh_[active_] = is_recording() ? !reserving_
                      : calls_.source == Source::kLedger
                          ? !reserving_ && !ledger_.active().narrow()
                          : !copied_;
  }

  void FollowRemove(const TraceOp& op) {
    if (is_recording() && op.result != StatusCode::kOk) return;
    const bool strict = calls_.strict && op.result == StatusCode::kNotSupported;
    (void)ledger_.Remove(
        op.seq, op.begin, op.end,
        strict ? reference::Heard() : reference::Heard(op.result));
    SetFresh(false);
  }

  void FollowCopy(const TraceOp& op) {
    if (calls_.source != Source::kLedger ||
        op.result != StatusCode::kCacheFull) {
      (void)ledger_.CopyPrefix(op.src, op.dst, op.len, op.result);
      SetFresh(false);
    }
    copied_ = copied_ || op.result == StatusCode::kOk ||
              calls_.source == Source::kIdentity;
  }

  void SetFresh(bool fresh) { fresh_.assign(fresh_.size(), fresh); }

  // Remembers the rows that tokens have had.
  void Remember() {
    for (const LedgerToken& token : ledger_.active().tokens()) {
      for (const auto& [layer, rows] : token.rows) {
        had_.insert({PageTokenOf(token), RowPairOf(token, layer)});
      }
    }
  }

  void JudgeStep(const json& step, const JudgedCall& call) {
    const std::string text = step["call"];
    labels_.SetPlace(
        fmt::format("step {} {}: ", step["number"].get<int>(), text));
    const bool same = is_recording() ? text == CallText(call) &&
                                           step["number"] == call.op.line
                                     : text.starts_with(CallText(call));
    Expect(same, "the call was " + CallText(call));
    if (!same) return;
    // The call of the last step may fail before it answers.
    const bool is_last = &step == &page_["steps"].back();
    const std::string answer = step["answer"];
    Expect(
        answer == AnswerText(call) || (is_last && answer.empty()),
        fmt::format("the answer was '{}', not '{}'", AnswerText(call), answer));
    const bool refused = !answer.empty() && call.op.result != StatusCode::kOk;
    Expect(step.value("refused", false) == refused,
           refused ? "the call was refused" : "the call was not refused");
    if (!step.contains("cells")) return;
    drawn_ = step["cache"].get<std::size_t>();
    if (is_last) {  // The cache that is wrong was looked at after the call.
      const auto at = std::ranges::find_if(
          calls_.calls, [&](const auto& one) { return &one == &call; });
      for (auto one = at; one != calls_.calls.end(); ++one) {
        if (one->op.kind != TraceOpKind::kSetLayerType) continue;
        cells_[AsSize(one->op.type)] = one->cells;
      }
    } else {
      Expect(drawn_ == active_, "another cache is active");
    }
    JudgeCells(step);
    Expect(call.op.mask || !step.contains("mask"), "there is no mask");
    if (step.contains("mask") && call.op.mask) {
      Expect(drawn_ == active_, "another cache is active");
      JudgeView(step, call.op);
    } else {
      JudgeFoundCells(step);
    }
  }

  bool InFrame(std::int64_t cell) const {
    return cell >= page_["from"] && cell < page_["to"];
  }

  // The expected tokens are the ledger's, each in a cell of its own.
  void JudgeCells(const json& step) {
    std::multiset<PageToken> expected;
    for (const LedgerToken& token : ledger_.parts()[drawn_].tokens()) {
      expected.insert(PageTokenOf(token));
    }
    std::set<std::int64_t> cells;
    for (const json& token : step["cells"]) {
      const auto at = expected.find(PageTokenOf(token));
      Expect(at != expected.end(), "must not hold " + token.dump());
      if (at != expected.end()) expected.erase(at);
      if (!token.contains("cell")) continue;
      Expect(cells.insert(token["cell"].get<std::int64_t>()).second,
             "two tokens in a cell");
    }
    Expect(std::ssize(expected) == step["cells_left_out"],
           fmt::format("{} expected tokens are not drawn", expected.size()));
  }

  void JudgeView(const json& step, const TraceOp& op) {
    JudgePageView(step,
                  {.op = op,
                   .ledger = ledger_.active(),
                   .v_layout = calls_.config.v_layout,
                   .fresh = fresh_[active_] && !calls_.numeric,
                   .has_twin = calls_.source == Source::kIdentity ||
                               (is_recording() && !calls_.visibility_only),
                   .positions = positions_,
                   .sequences = sequences_,
                   .had = had_},
                  labels_);
  }

  // Without a view: the tokens that the cache says that it holds.
  void JudgeFoundCells(const json& step) {
    if (calls_.source != Source::kIdentity) {
      Expect(step["found"].empty(), "cells are not known");
      return;
    }
    std::map<std::int64_t, PageToken> held;
    for (const Held& one : cells_[drawn_]) held[one.cell] = PageTokenOf(one);
    std::map<std::int64_t, PageToken> expected = ExpectedInCells(step);
    if (step["found"].empty()) {
      if (!HasCells(step)) return;
      for (const auto& [cell, name] : held) {
        if (InFrame(cell)) Expect(expected[cell] == name, "a cell differs");
      }
      return;
    }
    std::multiset<PageToken> tokens;
    for (const LedgerToken& token : ledger_.parts()[drawn_].tokens()) {
      tokens.insert(PageTokenOf(token));
    }
    std::set<std::int64_t> drawn;
    for (const json& one : step["found"]) {
      const std::int64_t cell = one["cell"];
      drawn.insert(cell);
      const bool differs = one.value("differs", false);
      if (one["sequences"].empty()) {
        Expect(!held.contains(cell) && differs, "the cell has a token");
        continue;
      }
      const PageToken name = PageTokenOf(one);
      Expect(held.contains(cell) && held[cell] == name,
             "the cache does not hold " + one.dump());
      if (HasCells(step)) {
        Expect(differs == !(expected.contains(cell) && expected[cell] == name),
               "differs: " + one.dump());
      } else {
        const auto at = tokens.find(name);
        Expect(differs == (at == tokens.end()), "differs: " + one.dump());
        if (at != tokens.end()) tokens.erase(at);
      }
    }
    for (const auto& [cell, name] : held) {
      if (InFrame(cell)) Expect(drawn.contains(cell), "a token is not drawn");
    }
    if (HasCells(step)) {
      for (const auto& [cell, name] : expected) {
        Expect(drawn.contains(cell), "a lost token is not drawn");
      }
      return;
    }
    for (const json& one : step.value("missing", json::array())) {
      const auto at = tokens.find(PageTokenOf(one));
      Expect(at != tokens.end(), "is not missing: " + one.dump());
      if (at != tokens.end()) tokens.erase(at);
    }
    Expect(tokens.empty(), "a missing token is not drawn");
  }

  const json& page_;
  const JudgedCalls& calls_;
  Ledger ledger_;
  PageLabels labels_;
  std::size_t active_ = 0;
  std::size_t drawn_ = 0;  // The cache that the step shows.
  std::vector<bool> fresh_;
  bool copied_ = false;
  bool reserving_ = false;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  std::map<std::size_t, std::vector<Held>> cells_;  // By cache.
  std::set<std::pair<PageToken, RowPair>> had_;
};

}  // namespace

json PageData(const std::string& page) {
  constexpr std::string_view kBegin =
      R"(<script type="application/json" id="failure">)";
  const std::size_t begin = page.find(kBegin) + kBegin.size();
  return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

PageVerdict JudgePage(const json& page, const JudgedCalls& calls) {
  return PageJudge(page, calls).Run();
}

}  // namespace kvtwin::props
