#include "props/laws/alike.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// Returns the (sequence, position) pairs of a cache, sorted.
std::vector<std::pair<int, std::int32_t>> Memberships(Session& session,
                                                      int type) {
  std::vector<std::pair<int, std::int32_t>> held;
  for (const CellEntry& entry : session.Cells(type)) {
    held.emplace_back(entry.sequence, entry.position);
  }
  std::sort(held.begin(), held.end());
  return held;
}

std::optional<std::string> CompareMemberships(Session& left, Session& right) {
  for (int type = 0; type < left.types(); ++type) {
    const auto a = Memberships(left, type);
    const auto b = Memberships(right, type);
    if (a == b) continue;
    const auto [at, bt] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    const bool in_left = at != a.end() && (bt == b.end() || *at < *bt);
    const auto& [seq, position] = in_left ? *at : *bt;
    return fmt::format("only {} holds position {} of sequence {}",
                       in_left ? "the first" : "the second", position, seq);
  }
  return std::nullopt;
}

LawResult Finished(const Session& left, const Session& right,
                   std::int64_t compared) {
  const std::int64_t extra =
      std::max(std::ssize(left.calls()), std::ssize(right.calls())) -
      std::min(std::ssize(left.calls()), std::ssize(right.calls()));
  return {.judged = extra > 0 ? extra : compared};
}

void NeverEvict(CacheSpec& spec) {
  if (spec.kind == Kind::kSwa) spec.kind = Kind::kSwaMem;
  spec.memory.reset();
  if (spec.window) spec.memory = kOpenEnd;
}

bool IsStart(const Call& call) { return call.kind == Call::Kind::kStart; }

}  // namespace

LawResult Violation(std::string text) {
  return {.judged = 1, .failure = Failure{.text = std::move(text)}};
}

std::optional<std::string> Compare(Session& left, Session& right, Alike alike,
                                   double slack) {
  if (alike == Alike::kBytes && left.sees_cells()) {
    return ComparePictures(left.Show(), right.Show());
  }
  if (!left.sees_cells() && left.stale() != right.stale()) return std::nullopt;
  if (left.sees_cells()) {
    if (auto wrong = CompareMemberships(left, right)) return wrong;
  }
  return CompareRows(left.PassRows(), right.PassRows(), left.setup().init.dtype,
                     slack);
}

Answer PlayPlain(Session& session, const Script& script, std::size_t i) {
  return session.Do(script.calls[i]);
}

bool MayDiffer(const Session& session, const Call& call, const Answer& a,
               const Answer& b) {
  if (session.sees_cells()) return false;
  const bool a_ok = a.code == StatusCode::kOk;
  const bool b_ok = b.code == StatusCode::kOk;
  return a_ok == b_ok && (!a_ok || call.kind == Call::Kind::kAsk);
}

LawResult Matched(const Script& script, std::optional<Session> left,
                  std::optional<Session> right, const Match& match,
                  const Play& play_left, const Play& play_right) {
  if (!left || !right) return {};
  std::int64_t compared = 0;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Answer a = play_left(*left, script, i);
    const bool full = IsStart(script.calls[i]) && a.code != StatusCode::kOk;
    if (match.more_room && full) return Finished(*left, *right, compared);
    const Answer b = play_right(*right, script, i);
    if (a != b) {
      // They go different ways from here.
      if (MayDiffer(*left, script.calls[i], a, b)) {
        return Finished(*left, *right, compared);
      }
      return Violation(After(
          script, i,
          fmt::format("one answers {}, the other {}", ToText(a), ToText(b))));
    }
    if (!AtRest(script, i)) continue;
    ++compared;
    if (auto wrong = Compare(*left, *right, match.alike, match.slack)) {
      return Violation(After(script, i, *wrong));
    }
  }
  const std::vector<Query> queries = left->Queries();
  std::vector<SeenRow> seen = left->Look(queries);
  std::vector<SeenRow> expected = right->Look(queries);
  if (!left->is_twin()) KeepCommon(seen, expected);
  const auto wrong =
      CompareRows(seen, expected, left->setup().init.dtype, match.slack);
  if (wrong) return Violation("in the end: " + *wrong);
  return Finished(*left, *right, compared);
}

LawResult MatchedBytes(const Script& script, const Subject& subject,
                       const Play& changed) {
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(script.setup, subject), Match(), PlayPlain,
                 changed);
}

bool AtRest(const Script& script, std::size_t i) {
  if (i + 1 == script.calls.size()) return true;
  const Call::Kind next = script.calls[i + 1].kind;
  if (next == Call::Kind::kPut) return false;
  if (next != Call::Kind::kCausal) return true;
  // The SetCausal may stand between StartForward and Put.
  for (std::size_t j = i + 1; j-- > 0;) {
    if (script.calls[j].kind == Call::Kind::kStart) return false;
    if (script.calls[j].kind != Call::Kind::kCausal) return true;
  }
  return true;
}

std::vector<Call> PutsOf(const Script& script, std::size_t start) {
  std::vector<Call> puts;
  for (std::size_t i = start + 1; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    if (call.kind == Call::Kind::kPut) puts.push_back(call);
    if (call.kind != Call::Kind::kPut && call.kind != Call::Kind::kCausal) {
      break;
    }
  }
  return puts;
}

Script WithoutRefused(Script script) {
  std::erase_if(script.calls,
                [](const Call& call) { return call.code != StatusCode::kOk; });
  return script;
}

History Without(History history, std::initializer_list<OpKind> kinds) {
  std::erase_if(history.ops, [&](const Op& op) {
    return std::find(kinds.begin(), kinds.end(), op.kind) != kinds.end();
  });
  return history;
}

History Legal(History history) {
  history.setup.legal = true;
  return history;
}

Limits LimitsOf(const CacheSpec& spec, const Setup& setup) {
  const InitArgs& init = setup.init;
  Limits limits;
  if (IsWindowed(spec.kind)) {
    limits.window = spec.window;
    limits.memory = spec.window;
    if (spec.kind == Kind::kSwaMem && spec.memory) limits.memory = spec.memory;
  }
  if (limits.memory && limits.window && init.max_sequences > 1) {
    limits.memory = std::max(*limits.memory, *limits.window + 1);
  }
  if (limits.memory && (!limits.window || *limits.memory >= init.capacity)) {
    limits.memory.reset();
  }
  limits.cells = init.max_sequences * limits.memory.value_or(init.capacity);
  if (limits.memory) limits.cells += init.max_batch;
  const std::int64_t padding = setup.config.cache_padding;
  limits.cells += (padding - limits.cells % padding) % padding;
  return limits;
}

std::int64_t LowestSeen(const CacheSpec& spec, const Setup& setup,
                        std::int64_t position) {
  if (spec.kind == Kind::kChunked) return position - position % spec.chunk;
  const Limits limits = LimitsOf(spec, setup);
  return limits.window ? std::max<std::int64_t>(0, position - *limits.window)
                       : 0;
}

void ForEachCausal(Setup& setup,
                   const std::function<void(CacheSpec&)>& change) {
  const auto one = [&](CacheSpec& spec) {
    if (spec.kind != Kind::kEncoder) change(spec);
  };
  if (!IsWrapper(setup.spec.kind)) return one(setup.spec);
  for (CacheSpec& spec : setup.spec.caches) one(spec);
}

Setup WithMoreRoom(Setup setup) {
  constexpr int kMore = 40;
  ForEachCausal(setup, [&](CacheSpec& spec) {
    if (LimitsOf(spec, setup).memory) return;
    NeverEvict(spec);
  });
  setup.init.capacity += kMore;
  setup.init.max_batch += kMore;
  return setup;
}

Setup WithoutEviction(Setup setup, std::int64_t tokens) {
  ForEachCausal(setup, NeverEvict);
  setup.init.capacity += AsInt(tokens);
  setup.init.max_batch += AsInt(tokens);
  return setup;
}

std::string After(const Script& script, std::size_t i,
                  const std::string& text) {
  return fmt::format("after call {}, {}: {}", i + 1, ToText(script.calls[i]),
                     text);
}

}  // namespace kvtwin::props
