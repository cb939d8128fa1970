// Laws of StartForward, SetCausal and Put, and of refusals.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "core/index.h"
#include "props/base/runs_of.h"
#include "props/compare/visibility.h"
#include "props/history/misuse.h"
#include "props/laws/alike.h"

namespace kvtwin::props {
namespace {

using CallKind = Call::Kind;

bool Stores(const Call& call) {
  return call.kind == CallKind::kStart && !call.reserve;
}

// Whether the batch appends, each sequence upwards. Then a token sees what it
// would see if it came alone, and nothing that a later token needs is evicted
// earlier.
bool Splits(Session& session, const Call& start) {
  if (!Stores(start) || start.positions.size() < 2) return false;
  std::map<int, std::int64_t> next;
  for (std::size_t i = 0; i < start.positions.size(); ++i) {
    const int seq = start.sequences[i];
    const auto [at, first] = next.try_emplace(seq, session.Next(seq));
    if (start.positions[i] < at->second) return false;
    at->second = std::int64_t{start.positions[i]} + 1;
  }
  return true;
}

Call OneRow(const Call& put, std::int64_t row) {
  Call call = put;
  call.key = CopyOf(Slice(put.key.view(), 2, row), put.key.dtype);
  call.value = CopyOf(Slice(put.value.view(), 2, row), put.value.dtype);
  return call;
}

LawResult BatchSplitting(const History& history, const Subject& subject) {
  const Script script =
      Resolve(Without(history, {OpKind::kCausal, OpKind::kGet, OpKind::kReput}),
              subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session || session->HasEncoder()) return {};
  const DType dtype = script.setup.init.dtype;
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    if (!Splits(*session, call)) {
      PlayPlain(*session, script, i);
      continue;
    }
    Session single = session->Clone();
    if (PlayPlain(*session, script, i).code != StatusCode::kOk) continue;
    const std::vector<Call> puts = PutsOf(script, i);
    for (const Call& put : puts) session->Do(put);
    const std::vector<SeenRow> together = session->PassRows();
    std::vector<SeenRow> alone;
    const std::size_t tokens = call.positions.size();
    for (std::size_t row = 0; row < tokens; ++row) {
      const Answer answer = single.Do(
          StartCall({call.positions[row]}, {call.sequences[row]}, false));
      if (answer.code != StatusCode::kOk) {
        return Violation(After(
            script, i,
            fmt::format("token {} alone is refused: {}", row, ToText(answer))));
      }
      for (const Call& put : puts) {
        single.Do(OneRow(put, static_cast<std::int64_t>(row)));
      }
      for (SeenRow& seen : single.PassRows()) alone.push_back(std::move(seen));
    }
    // Sorts by layer, then by token, as in one batch.
    std::stable_sort(alone.begin(), alone.end(),
                     [](auto& a, auto& b) { return a.layer < b.layer; });
    ++result.judged;
    if (auto wrong = CompareRows(together, alone, dtype, 0)) {
      return Violation(
          After(script, i, "one batch, and one by one: " + *wrong));
    }
  }
  return result;
}

// Reserves before each StartForward, with the same batch and its rows. A
// reserving pass ends the pass before it, so a batch that is invalid_argument
// is left out: after it, the earlier pass must continue (S5).
LawResult Reserve(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Call& call = script.calls[i];
        if (Stores(call) && call.code != StatusCode::kInvalidArgument) {
          Call reserve = call;
          reserve.reserve = true;
          session.Do(reserve);
          for (const Call& put : PutsOf(script, i)) session.Do(put);
        }
        return PlayPlain(session, script, i);
      });
}

// Returns the free cells after the eviction by `start`, counted from the list
// of memberships alone.
std::int64_t RoomFor(Session& session, int type, const Call& start) {
  const Limits limits = LimitsOf(session.spec(type), session.setup());
  const std::vector<CellEntry> cells = session.Cells(type);
  std::map<int, std::int64_t> low;  // By sequence.
  for (const CellEntry& entry : cells) {
    low[entry.sequence] =
        std::max(low[entry.sequence], std::int64_t{entry.position} + 1);
  }
  for (const int seq : start.sequences) low[seq] = kOpenEnd;
  for (std::size_t i = 0; i < start.positions.size(); ++i) {
    std::int64_t& lowest = low[start.sequences[i]];
    lowest = std::min<std::int64_t>(lowest, start.positions[i]);
  }
  std::set<int> used;
  for (const CellEntry& entry : cells) {
    const bool stays = !limits.memory ||
                       entry.position >= low[entry.sequence] - *limits.memory;
    if (stays) used.insert(entry.cell);
  }
  return limits.cells - std::ssize(used);
}

LawResult Fullness(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    bool room = true;
    if (Stores(call)) {
      for (int type = 0; type < session->types(); ++type) {
        if (session->IsEncoder(type)) continue;
        const std::int64_t free = RoomFor(*session, type, call);
        room = room && free >= std::ssize(call.positions);
      }
    }
    const Answer answer = PlayPlain(*session, script, i);
    if (!Stores(call)) continue;
    ++result.judged;
    const StatusCode expected = room ? StatusCode::kOk : StatusCode::kCacheFull;
    if (answer.code == expected) continue;
    return Violation(After(script, i,
                           fmt::format("there is {}room, the answer is {}",
                                       room ? "" : "no ", ToText(answer))));
  }
  return result;
}

LawResult CapacityReturns(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*session, script, i);
  }
  for (const int seq : session->Sequences()) {
    session->Do(RemoveCall(seq, 0, kOpenEnd));
  }
  std::int64_t room = kOpenEnd;
  bool keeps = true;  // Idle sequences keep their last token.
  for (int type = 0; type < session->types(); ++type) {
    if (session->IsEncoder(type)) continue;
    if (!session->Cells(type).empty()) return Violation("a cell is still used");
    const Limits limits = LimitsOf(session->spec(type), script.setup);
    room = std::min(room, limits.cells);
    keeps = keeps && limits.memory.value_or(1) > 0;
  }
  if (room == kOpenEnd || !keeps) return {};
  // Each token is a sequence of its own, so that nothing is evicted.
  int seq = 0;
  while (room > 0) {
    Call start = StartCall({}, {}, /*reserve=*/false);
    for (int i = 0; i < script.setup.init.max_batch && room > 0; ++i, --room) {
      start.positions.push_back(0);
      start.sequences.push_back(seq++);
    }
    const Answer answer = session->Do(start);
    if (answer.code != StatusCode::kOk) {
      return Violation(fmt::format("with {} cells free, {} answers {}",
                                   room + std::ssize(start.positions),
                                   ToText(start), ToText(answer)));
    }
  }
  const Answer over = session->Do(StartCall({0}, {seq}, /*reserve=*/false));
  if (over.code == StatusCode::kCacheFull) return {.judged = 1};
  return Violation("a full cache answers " + ToText(over));
}

// Adds SetCausal calls that a later call must override.
LawResult CausalLast(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Call& call = script.calls[i];
        Call other;
        other.kind = CallKind::kCausal;
        if (call.kind == CallKind::kCausal && session.in_pass()) {
          for (int k = 0; k < std::ssize(session.pass().positions); k += 2) {
            other.indices.push_back(k);
          }
          other.type = call.type;
          session.Do(other);
        }
        const Answer answer = PlayPlain(session, script, i);
        if (call.kind != CallKind::kStart || !session.in_pass()) return answer;
        other.indices = {0};
        session.Do(other);
        other.indices.clear();
        session.Do(other);
        return answer;
      });
}

// Before each Put comes a Put of the same bytes in reverse order.
LawResult PutLast(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Call& call = script.calls[i];
        if (call.kind == CallKind::kPut) {
          Call other = call;
          std::reverse(other.key.bytes.begin(), other.key.bytes.end());
          std::reverse(other.value.bytes.begin(), other.value.bytes.end());
          session.Do(other);
        }
        return PlayPlain(session, script, i);
      });
}

LawResult Asking(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Answer answer = PlayPlain(session, script, i);
        if (!AtRest(script, i)) return answer;
        Call ask;
        ask.kind = CallKind::kAsk;
        ask.seq = script.setup.first_id;
        ask.end = session.Next(ask.seq);
        session.Do(ask);
        session.PassRows();  // Get, ListCells, EncoderCached.
        if (session.sees_cells()) {
          static_cast<void>(session.cache().CellCount());
        }
        return answer;
      });
}

// Returns all (cache, sequence, position).
std::set<std::array<int, 3>> Held(Session& session) {
  std::set<std::array<int, 3>> held;
  for (int type = 0; type < session.types(); ++type) {
    for (const CellEntry& entry : session.Cells(type)) {
      held.insert({type, entry.sequence, entry.position});
    }
  }
  return held;
}

std::optional<std::string> Misused(Session& session, int which) {
  const int layer = session.setup().layers - 1;
  const int type = session.in_pass() ? session.TypeOf(layer) : 0;
  const bool encoder = session.IsEncoder(type);
  if (session.in_pass()) session.View(layer);  // Selects the layer.
  const MisuseContext context{
      .setup = session.setup(),
      .pass_tokens = session.in_pass() ? Size(session.pass().positions) : 0,
      .encoder = encoder,
      .no_causal = encoder || session.spec(type).kind == Kind::kRecurrent,
      .layer_put = session.in_pass() && session.put_layers().contains(layer),
      .layer = layer,
      .hash_sights = session.sees_cells() ? nullptr : HashSights};
  if (!session.in_pass()) session.Cells(0);
  return TryMisuse(session.cache(), which, context);
}

LawResult Refusals(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    // Between StartForward and Put only a twin is asked anything else.
    const auto rests = [&](std::size_t call) {
      return subject.is_twin() || call == 0 || AtRest(script, call - 1);
    };
    const Picture before = rests(i) ? session->Show() : Picture{.shown = false};
    const auto held = Held(*session);
    const Answer answer = PlayPlain(*session, script, i);
    if (answer.code == StatusCode::kCacheFull) {
      ++result.judged;
      const auto kept = Held(*session);
      if (!std::includes(held.begin(), held.end(), kept.begin(), kept.end())) {
        return Violation(After(script, i, "is refused, but stores tokens"));
      }
    } else if (answer.code != StatusCode::kOk && rests(i + 1)) {
      ++result.judged;
      if (auto wrong = ComparePictures(before, session->Show())) {
        return Violation(After(script, i, "is refused, but " + *wrong));
      }
    }
    if (!rests(i + 1)) continue;
    const Picture kept = session->Show();
    const int which = AsInt(i * 7) % MisuseCount();
    const CacheSpec& spec = script.setup.spec;
    if (!HasMisuse(subject.abilities, spec, which)) continue;
    auto wrong = Misused(*session, which);
    if (!wrong) wrong = ComparePictures(kept, session->Show());
    ++result.judged;
    if (!wrong) continue;
    return Violation(After(
        script, i, fmt::format("misuse {}: {}", MisuseName(which), *wrong)));
  }
  return result;
}

LawResult Repeatable(const History& history, const Subject& subject) {
  return MatchedBytes(Resolve(history, subject), subject, PlayPlain);
}

LawResult CloseIsFinal(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*session, script, i);
  }
  for (int time = 0; time < 2; ++time) {
    session->cache().Close();
    if (auto wrong = MisuseOutsideOfLife(session->cache())) {
      return Violation("after Close: " + *wrong);
    }
  }
  return {.judged = 1};
}

// Compares with ListCells, until a CopyPrefix or Remove comes.
LawResult Visibility(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  LawResult result;
  std::map<int, std::set<int>> excepted;  // By cache.
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    PlayPlain(*session, script, i);
    if (call.kind == CallKind::kStart) excepted.clear();
    if (call.kind == CallKind::kCausal) {
      excepted[call.type] = {call.indices.begin(), call.indices.end()};
    }
    if (session->stale() || !AtRest(script, i)) continue;
    int row = -1;  // Its number within its layer.
    int layer = -1;
    for (const SeenRow& seen : session->PassRows()) {
      const int type = session->TypeOf(seen.layer);
      if (session->IsEncoder(type)) continue;
      row = seen.layer == layer ? row + 1 : 0;
      layer = seen.layer;
      const auto& [position, seq] = seen.query;
      const std::int64_t low =
          LowestSeen(session->spec(type), script.setup, position);
      const std::int32_t high =
          excepted[type].contains(row) ? kOpenEnd : position;
      std::vector<std::int32_t> expected;
      for (const CellEntry& entry : session->Cells(type)) {
        const bool in_range = entry.position >= low && entry.position <= high;
        if (entry.sequence == seq && in_range)
          expected.push_back(entry.position);
      }
      std::sort(expected.begin(), expected.end());
      ++result.judged;
      const bool same =
          std::equal(expected.begin(), expected.end(), seen.tokens.begin(),
                     seen.tokens.end(),
                     [](auto at, auto& token) { return at == token.position; });
      if (same) continue;
      return Violation(
          After(script, i,
                fmt::format("row {} of layer {} sees {} tokens, or not "
                            "those at positions [{}]",
                            row, layer, seen.tokens.size(), RunsOf(expected))));
    }
  }
  return result;
}

// Compares with a causal cache, which shows all of the past.
LawResult WindowHides(const History& history, const Subject& subject) {
  const Script script = Resolve(Legal(history), subject);
  Setup wide = script.setup;
  ForEachCausal(wide, [](CacheSpec& spec) {
    spec.kind = Kind::kCausal;
    spec.window.reset();
    spec.memory.reset();
  });
  std::int64_t tokens = 0;
  for (const Call& call : script.calls) tokens += std::ssize(call.positions);
  wide = WithoutEviction(wide, tokens);
  std::optional<Session> left = Session::Open(script.setup, subject);
  std::optional<Session> right = Session::Open(wide, subject);
  if (!left || !right) return {};
  const DType dtype = script.setup.init.dtype;
  LawResult result;
  bool comparable = false;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Call& call = script.calls[i];
    // The client relies on stored tokens: once a sequence is evicted
    // completely, it starts anew, while a causal cache still has the old
    // tokens.
    for (const int seq : call.sequences) {
      if (left->Next(seq) != right->Next(seq)) return result;
    }
    const Answer a = PlayPlain(*left, script, i);
    const Answer b = PlayPlain(*right, script, i);
    // A token that is evicted on the left may make a Remove fail on the right.
    if (call.kind != CallKind::kAsk && a != b) return result;
    if (call.kind == CallKind::kStart) comparable = !call.reserve;
    const bool keeps_mask =
        call.kind == CallKind::kRemove || call.kind == CallKind::kCopy;
    if (keeps_mask) comparable = false;
    if (!comparable || !AtRest(script, i)) continue;
    std::vector<SeenRow> expected = right->PassRows();
    for (SeenRow& row : expected) {
      const int type = left->TypeOf(row.layer);
      if (left->IsEncoder(type)) continue;
      const std::int64_t low =
          LowestSeen(left->spec(type), script.setup, row.query.position);
      std::erase_if(row.tokens, [low](const SeenToken& token) {
        return token.position < low;
      });
    }
    ++result.judged;
    if (auto wrong = CompareRows(left->PassRows(), expected, dtype, 0)) {
      return Violation(After(script, i, "against a causal cache: " + *wrong));
    }
  }
  return result;
}

}  // namespace

std::vector<Law> PassLaws() {
  return {
      {"batch_splitting",
       "Each token of a batch of n sees what it sees in n batches of "
       "one.",
       "S5, S16", BatchSplitting, kNeedsTokens},
      {"reserve", "A reserving pass changes nothing.", "S18", Reserve,
       kNeedsReserve},
      {"fullness",
       "StartForward succeeds exactly when the cells that are free after its "
       "eviction are enough.",
       "S7, S9, S10, S12", Fullness, kNeedsCells | kNeedsTokens},
      LegalClientLaw(),
      {"capacity_returns",
       "Once all sequences are removed, every cell can be used again, and not "
       "one more.",
       "S4, S8", CapacityReturns,
       kNeedsCells | kNeedsAnySequence | kNeedsAnyOrder | kNeedsTokens},
      {"causal_last",
       "The last SetCausal of a pass counts, and the next pass has no "
       "exceptions.",
       "S19", CausalLast, kNeedsCausal},
      {"put_last", "The last Put of a layer in a pass counts.", "S21", PutLast,
       kNeedsAnyOrder},
      {"asking", "CanResume, Get, EncoderCached and ListCells change nothing.",
       "S24, S25, S28, S40", Asking},
      {"refusals",
       "A refused call changes nothing; a full StartForward may evict, but "
       "stores nothing.",
       "S5, S33, S47, S48", Refusals, kNeedsMisuse},
      {"repeatable", "The same calls give the same answers and the same bytes.",
       "S50", Repeatable},
      {"close_is_final",
       "After Close, every call but Close is a failed_precondition.", "S1",
       CloseIsFinal, kNeedsOurs},
      {"visibility",
       "A row sees its sequence's tokens from the start of its window "
       "or chunk to itself or, if excepted, to the end.",
       "S2, S16, S17, S19", Visibility, kNeedsTokens},
      {"window_hides",
       "A window or chunk hides the past beyond it from a legal client, and "
       "nothing else.",
       "S2, S7, S16", WindowHides, kNeedsTokens},
  };
}

}  // namespace kvtwin::props
