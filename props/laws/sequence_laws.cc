// Laws of CopyPrefix, Remove and CanResume.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "core/index.h"
#include "core/shift_row.h"
#include "props/history/rows.h"
#include "props/laws/alike.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using CallKind = Call::Kind;

bool Done(const Call& call, CallKind kind) {
  return call.kind == kind && call.code == StatusCode::kOk;
}

// Returns the slack of K rows that are shifted in a different number of steps:
// six times the error of one rounding, relative to the largest element
// (docs/dtypes.md). For q4_0 that error is the clipping of a block's largest
// element if it has the other sign.
double ShiftSlack(const Setup& setup) {
  switch (setup.init.dtype) {
    case DType::kF32:
      return 1e-5;
    case DType::kF16:
      return 6 * 0x1p-11;
    case DType::kBF16:
      return 6 * 0x1p-8;
    case DType::kF8:
      return 6 * 0x1p-4;
    case DType::kQ8:
      return 6 * 0.5625 / 127;
    default:
      return 6 * 1.004 / 8;
  }
}

// Whether the cache can shift, and a shift by a + b is one by a, then one by b.
bool CanShift(const Setup& setup) {
  const auto can = [](const CacheSpec& spec) {
    const ShiftKind kind = spec.shift.kind;
    return spec.kind == Kind::kEncoder ||
           (kind != ShiftKind::kNone && kind != ShiftKind::kCustom);
  };
  if (!IsWrapper(setup.spec.kind)) return can(setup.spec);
  return std::all_of(setup.spec.caches.begin(), setup.spec.caches.end(), can);
}

// The sequences that a call may change.
std::set<int> Touched(const Call& call) {
  if (call.kind == CallKind::kStart) {
    return {call.sequences.begin(), call.sequences.end()};
  }
  if (call.kind == CallKind::kCopy || call.kind == CallKind::kAdd) {
    return {call.dst};
  }
  if (call.kind == CallKind::kRemove) return {call.seq};
  return {};
}

// Returns what the queries would see. Encoders, which have only one sequence,
// are left out.
std::vector<SeenRow> LookAhead(Session& session,
                               const std::vector<Query>& queries) {
  std::vector<SeenRow> rows = session.Look(queries);
  std::erase_if(rows, [&](const SeenRow& row) {
    return session.IsEncoder(session.TypeOf(row.layer));
  });
  return rows;
}

// Compares the sequences that a call does not touch before and after it.
LawResult OthersAreUntouched(const History& history, const Subject& subject) {
  const Script script =
      Resolve(Without(history, {OpKind::kCausal, OpKind::kGet, OpKind::kReput}),
              subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const std::set<int> touched = Touched(script.calls[i]);
    std::vector<Query> others;
    for (const int seq : session->Sequences()) {
      if (!touched.contains(seq)) others.push_back({session->Next(seq), seq});
    }
    const std::vector<SeenRow> before = LookAhead(*session, others);
    const std::set<int> layers = session->put_layers();
    PlayPlain(*session, script, i);
    for (const Call& put : PutsOf(script, i)) {
      if (script.calls[i].kind == CallKind::kStart) session->Do(put);
    }
    if (session->put_layers() != layers || others.empty()) continue;
    ++result.judged;
    if (auto wrong = CompareRows(before, LookAhead(*session, others),
                                 script.setup.init.dtype, 0)) {
      return Violation(After(script, i, *wrong));
    }
  }
  return result;
}

// All (token, sequence) pairs of a ledger as one batch with its rows.
struct Refill {
  Call start;
  std::vector<Call> puts;
};
std::optional<Refill> RefillOf(const reference::CacheLedger& ledger,
                               const Setup& setup) {
  Refill refill;
  std::map<int, Call> puts;
  for (const reference::LedgerToken& token : ledger.tokens()) {
    for (const int seq : token.sequences) {
      refill.start.positions.push_back(
          static_cast<std::int32_t>(token.position));
      refill.start.sequences.push_back(seq);
      for (const auto& [layer, rows] : token.rows) {
        Call& put = puts[layer];
        put.kind = CallKind::kPut;
        put.layer = layer;
        put.key.dtype = setup.init.dtype;
        put.value.dtype = setup.config.v_dtype.value_or(setup.init.dtype);
        const auto append = [](DenseTensor& to, const DenseTensor& row) {
          to.shape = {row.shape[0], row.shape[1], to.shape[2] + 1, 1};
          to.bytes.insert(to.bytes.end(), row.bytes.begin(), row.bytes.end());
        };
        if (put.key.bytes.empty()) put.key.shape[2] = put.value.shape[2] = 0;
        append(put.key, rows.key);
        append(put.value, rows.value);
      }
    }
  }
  const auto count = std::ssize(refill.start.positions);
  for (const auto& [layer, put] : puts) {
    if (put.key.shape[2] != count) return std::nullopt;
    refill.puts.push_back(put);
  }
  return refill;
}

void Do(reference::Ledger& ledger, const Call& call) {
  ledger.SetLayerType(call.type);
  const Batch batch{call.positions, call.sequences, call.indices};
  Status ignored;
  switch (call.kind) {
    case CallKind::kStart:
      ignored = ledger.StartForward(batch, call.reserve);
      break;
    case CallKind::kPut:
      ledger.active().Put(call.layer, call.key.view(), call.value.view());
      break;
    case CallKind::kCopy:
      ignored = ledger.CopyPrefix(call.seq, call.dst, call.end);
      break;
    case CallKind::kRemove:
      ignored = ledger.Remove(call.seq, call.begin, call.end, call.code);
      break;
    case CallKind::kPin:
      ignored = ledger.Checkpoint(call.seq);
      break;
    case CallKind::kRestore:
    case CallKind::kAdd:
      if (call.code == StatusCode::kOk) ledger.Restore(call.state);
      break;
    case CallKind::kCausal:
    case CallKind::kAsk:
      break;
  }
}

LawResult Replay(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  reference::Ledger ledger(script.setup.spec);
  if (!session || !ledger.Init(script.setup.config, script.setup.init).ok()) {
    return {};
  }
  if (!session->sees_cells()) ledger.IgnoreCapacity();
  // The caches of a wrapper need not end at the same position.
  if (!session->sees_cells() && session->types() > 1) return {};
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Answer answer = PlayPlain(*session, script, i);
    if (answer.code != script.calls[i].code) {
      return Violation(After(script, i, "answers " + ToText(answer)));
    }
    Do(ledger, script.calls[i]);
  }
  LawResult result;
  const std::vector<Query> queries = session->Queries();
  const std::vector<SeenRow> seen = session->Look(queries);
  for (int type = 0; type < session->types(); ++type) {
    const auto& part = At(ledger.parts(), type);
    if (part.encoder() || part.tokens().empty()) continue;
    const std::optional<Refill> refill = RefillOf(part, script.setup);
    if (!refill) continue;
    Setup setup = script.setup;
    setup.spec = session->spec(type);
    setup = WithoutEviction(setup, std::ssize(refill->start.positions));
    std::optional<Session> fresh = Session::Open(setup, subject);
    if (!fresh && !subject.is_twin()) continue;  // It has no such cache.
    if (!fresh || fresh->Do(refill->start).code != StatusCode::kOk) {
      return Violation("a fresh cache refuses the surviving tokens");
    }
    for (const Call& put : refill->puts) fresh->Do(put);
    std::vector<SeenRow> expected = seen;
    std::erase_if(expected, [&](const SeenRow& row) {
      return session->TypeOf(row.layer) != type ||
             !fresh->put_layers().contains(row.layer);
    });
    std::vector<SeenRow> actual = fresh->Look(queries);
    if (!subject.is_twin()) KeepCommon(expected, actual);
    ++result.judged;
    if (auto wrong = CompareRows(expected, actual, setup.init.dtype, 0)) {
      return Violation("against a fresh cache: " + *wrong);
    }
  }
  return result;
}

bool HasTarget(const Call& call) {
  return call.kind == CallKind::kCopy || call.kind == CallKind::kAdd;
}

// Reverses the order of the ids: the largest becomes the smallest.
LawResult Renaming(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  std::map<int, int> names;
  for (const Call& call : script.calls) {
    for (const int seq : call.sequences) names[seq];
    if (HasTarget(call)) names[call.dst];
    if (call.kind != CallKind::kStart) names[call.seq];
  }
  std::map<int, int> back;
  // A cache that knows only some ids gets these.
  const bool few = !subject.abilities.Can(KVTWIN_CAN_ANY_SEQUENCE);
  const int step = few ? 1 : 3;
  int next = few ? script.setup.init.max_sequences : step * Size(names);
  for (auto& [id, name] : names) {
    name = next -= step;
    back[name] = id;
  }
  Script renamed = script;
  for (Call& call : renamed.calls) {
    for (int& seq : call.sequences) seq = names[seq];
    if (call.kind == CallKind::kStart) continue;
    call.seq = names[call.seq];
    if (HasTarget(call)) call.dst = names[call.dst];
  }
  std::optional<Session> left = Session::Open(script.setup, subject);
  std::optional<Session> right = Session::Open(script.setup, subject);
  if (!left || !right) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    const Answer a = PlayPlain(*left, script, i);
    const Answer b = PlayPlain(*right, renamed, i);
    if (MayDiffer(*left, script.calls[i], a, b)) return result;
    if (a != b)
      return Violation(After(script, i, ToText(a) + " and " + ToText(b)));
    if (!subject.is_twin() && !AtRest(script, i)) continue;
    Picture picture = right->Show();
    for (std::vector<CellEntry>& cells : picture.cells) {
      for (CellEntry& entry : cells) entry.sequence = back[entry.sequence];
      std::sort(cells.begin(), cells.end(), [](auto& x, auto& y) {
        return std::tie(x.cell, x.sequence) < std::tie(y.cell, y.sequence);
      });
    }
    ++result.judged;
    if (auto wrong = ComparePictures(left->Show(), picture)) {
      return Violation(After(script, i, *wrong));
    }
  }
  return result;
}

LawResult CopyTwice(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        if (script.calls[i].kind == CallKind::kCopy) {
          session.Do(script.calls[i]);
        }
        return PlayPlain(session, script, i);
      });
}

// Clears the target before each copy; one side copies before that, too.
LawResult CopyThenClear(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  const auto clear = [](bool copy_first) {
    return [copy_first](Session& session, const Script& of, std::size_t i) {
      const Call& call = of.calls[i];
      if (Done(call, CallKind::kCopy) && call.seq != call.dst) {
        if (copy_first) session.Do(call);
        session.Do(RemoveCall(call.dst, 0, kOpenEnd));
      }
      return PlayPlain(session, of, i);
    };
  };
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(script.setup, subject), Match(), clear(false),
                 clear(true));
}

LawResult CopyShows(const History& history, const Subject& subject) {
  const Script script =
      Resolve(Without(history, {OpKind::kCausal, OpKind::kGet, OpKind::kReput}),
              subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  LawResult result;
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*session, script, i);
    const Call& call = script.calls[i];
    if (!Done(call, CallKind::kCopy) || call.end == 0) continue;
    std::vector<Query> of_src;
    std::vector<Query> of_dst;
    for (std::int32_t back = 1; back <= std::min(call.end, 3); ++back) {
      of_src.push_back({call.end - back, call.seq});
      of_dst.push_back({call.end - back, call.dst});
    }
    ++result.judged;
    if (auto wrong = CompareRows(session->Look(of_src), session->Look(of_dst),
                                 script.setup.init.dtype, 0)) {
      return Violation(After(script, i, *wrong));
    }
    if (session->Next(call.dst) > call.end) {
      return Violation(After(script, i, "the copy is longer than the prefix"));
    }
  }
  return result;
}

// Removes [a, c) as [a, b) and the rest, or, where shared tokens forbid that,
// as [b, c) and [a, b).
LawResult RemoveSplits(const History& history, const Subject& subject) {
  const Script script = Resolve(history, subject);
  // At larger distances, float rounding hides everything else.
  constexpr std::int32_t kFar = 4096;
  if (!CanShift(script.setup)) return {};
  for (const Call& call : script.calls) {
    if (call.end != kOpenEnd && call.end - call.begin > kFar) return {};
  }
  const Play split = [](Session& session, const Script& of, std::size_t i) {
    const auto& [seq, a, c] =
        std::tie(of.calls[i].seq, of.calls[i].begin, of.calls[i].end);
    if (!Done(of.calls[i], CallKind::kRemove) || c - a < 2 || c == kOpenEnd ||
        session.HasEncoder()) {
      return PlayPlain(session, of, i);
    }
    const std::int32_t b = a + 1 + static_cast<std::int32_t>(i) % (c - a - 1);
    const Answer first = session.Do(RemoveCall(seq, a, b));
    if (first.code == StatusCode::kOk) {
      return session.Do(RemoveCall(seq, a, a + c - b));
    }
    session.Do(RemoveCall(seq, b, c));
    return session.Do(RemoveCall(seq, a, b));
  };
  return Matched(script, Session::Open(script.setup, subject),
                 Session::Open(script.setup, subject),
                 {.alike = Alike::kTokens, .slack = ShiftSlack(script.setup)},
                 PlayPlain, split);
}

// Removes [a, open) as [b, open) and then [a, open), or then by CopyPrefix of
// the sequence to itself. Encoders have no copy and are left out.
LawResult RemoveOpen(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Call& call = script.calls[i];
        const bool open =
            call.kind == CallKind::kRemove && call.end == kOpenEnd;
        if (!open || session.HasEncoder()) return PlayPlain(session, script, i);
        const bool last = call.begin == kOpenEnd;
        session.Do(RemoveCall(call.seq, call.begin + (last ? 0 : 1), kOpenEnd));
        const bool copies = session.MayCopyToItself();
        if (i % 2 == 0 || !copies) return PlayPlain(session, script, i);
        return session.Do(CopyCall(call.seq, call.seq, call.begin));
      });
}

// Shifts the K rows of `put`, except the first, by +distance.
void ShiftRows(const Setup& setup, int distance, Call& put) {
  const auto count = AsSize(put.key.shape[0] * put.key.shape[1]);
  std::vector<float> row(count);
  const std::size_t size = count * sizeof(float);
  for (std::size_t at = size; at < put.key.bytes.size(); at += size) {
    std::memcpy(row.data(), &put.key.bytes[at], size);
    static_cast<void>(ShiftRow(setup.spec.shift, /*layer=*/0, distance,
                               setup.rows.k_head_dim, setup.rows.kv_heads, row)
                          .ok());
    std::memcpy(&put.key.bytes[at], row.data(), size);
  }
}

// Puts K rows that are shifted by +distance, after filler; then removes the
// filler, which shifts them back.
std::optional<std::string> ShiftedAndBack(const Setup& setup, int distance,
                                          const Subject& subject) {
  constexpr std::int32_t kTokens = 3;
  constexpr std::int64_t kFirst = 32;
  std::optional<Session> session = Session::Open(setup, subject);
  if (!session) return std::nullopt;
  // The filler is one token, unless every position must be filled.
  const bool goes_on = session->LooksByGoingOn();
  const int filler = goes_on ? distance : 1;
  Call start = StartCall({}, {}, /*reserve=*/false);
  for (std::int32_t i = 0; i < filler + kTokens; ++i) {
    start.positions.push_back(i < filler ? i : distance + i - filler);
    start.sequences.push_back(setup.first_id);
  }
  RowBuffer buffer;
  const auto fill = [&](RowRole role, int dim) {
    return CopyOf(buffer.Fill({dim, setup.rows.kv_heads, filler + kTokens, 1},
                              DType::kF32,
                              {role, 0, kFirst, /*plain=*/false, /*nan=*/false},
                              setup.strided),
                  DType::kF32);
  };
  Call put;
  put.kind = CallKind::kPut;
  put.key = fill(RowRole::kKey, setup.rows.k_head_dim);
  put.value = fill(RowRole::kValue, setup.rows.v_head_dim);
  const Query last{goes_on ? kTokens : kTokens - 1, setup.first_id};
  std::vector<SeenRow> expected = {{0, last, {}}};
  const auto low = LowestSeen(setup.spec, setup, last.position);
  for (auto i = static_cast<std::int32_t>(low); i < kTokens; ++i) {
    const auto stored = [&](const DenseTensor& rows, DType dtype) {
      return CopyOf(Slice(rows.view(), 2, filler + i), dtype).bytes;
    };
    const DType k_dtype = setup.init.dtype;
    expected[0].tokens.push_back(
        {i, stored(put.value, setup.config.v_dtype.value_or(k_dtype)),
         stored(put.key, k_dtype)});
  }
  ShiftRows(setup, distance, put);
  session->Do(start);
  session->Do(put);
  const Answer answer = session->Do(RemoveCall(setup.first_id, 0, distance));
  if (answer.code != StatusCode::kOk) {
    return "Remove of the filler answers " + ToText(answer);
  }
  // The elements were rounded at the size that they have while shifted.
  const bool exact = setup.spec.shift.kind == ShiftKind::kIdentity;
  return CompareRows(session->Look({last}), expected, setup.init.dtype,
                     exact ? 0 : ShiftSlack(setup), distance);
}

// Returns the last position that ShiftedAndBack may use. If every position must
// be filled, one batch fills them.
std::int32_t LastShifted(const Setup& setup, const Subject& subject) {
  const Abilities& can = subject.abilities;
  const bool gaps = subject.level == Level::kIdentity && !can.OnlyGoesOn() &&
                    can.Can(KVTWIN_CAN_RESERVE);
  if (gaps) return can.LastPosition();
  return std::min(
      {can.LastPosition(), setup.init.capacity - 1, setup.init.max_batch - 1});
}

LawResult ShiftBack(const History& history, const Subject& subject) {
  Setup setup = history.setup;
  if (IsWrapper(setup.spec.kind)) {
    setup.spec = CacheSpec(setup.spec.caches.front());
  }
  if (setup.spec.kind == Kind::kEncoder || !CanShift(setup)) return {};
  setup = WithoutEviction(setup, 8);
  if (!subject.is_twin()) setup.layers = 1;  // It may want rows in each layer.
  LimitTo(subject.abilities.LastEnd(), setup.init.capacity);
  if (!Session::Open(setup, subject)) return {};
  LawResult result;
  for (const int distance : {1, 2, 5, 700}) {
    if (distance + 2 > LastShifted(setup, subject)) break;
    // f8 cannot hold the shifted elements.
    if (setup.init.dtype == DType::kF8 && distance > 448) continue;
    ++result.judged;
    if (auto wrong = ShiftedAndBack(setup, distance, subject)) {
      return Violation(
          fmt::format("shifted by {} and back: {}", distance, *wrong));
    }
  }
  return result;
}

LawResult OffsetZero(const History& history, const Subject& subject) {
  return MatchedBytes(
      Resolve(history, subject), subject,
      [](Session& session, const Script& script, std::size_t i) {
        const Call& call = script.calls[i];
        const Answer answer = PlayPlain(session, script, i);
        if (!AtRest(script, i)) return answer;
        const int seq =
            call.kind == CallKind::kStart ? call.sequences[0] : call.seq;
        const std::int32_t at = i % 2 == 0 ? 0 : session.Next(seq) / 2;
        session.Do(RemoveCall(seq, at, at));
        return answer;
      });
}

// Asks for each sequence at a few positions. Where the answer is yes, a clone
// continues from there.
LawResult ResumeIsHonest(const History& history, const Subject& subject) {
  const Script script = Resolve(Legal(history), subject);
  std::optional<Session> session = Session::Open(script.setup, subject);
  if (!session) return {};
  for (std::size_t i = 0; i < script.calls.size(); ++i) {
    PlayPlain(*session, script, i);
  }
  LawResult result;
  for (const int seq : session->Sequences()) {
    const std::int32_t next = session->Next(seq);
    for (const std::int32_t pos : std::set{1, next / 2, next - 1, next}) {
      if (pos < 1 || pos >= script.setup.init.capacity) continue;
      Call ask;
      ask.kind = CallKind::kAsk;
      ask.seq = seq;
      ask.end = pos;
      if (!session->Do(ask).yes) continue;
      ++result.judged;
      Session clone = session->Clone();
      clone.Do(RemoveCall(seq, pos, kOpenEnd));
      const std::string yes =
          fmt::format("CanResume({}, {}) says yes, but ", seq, pos);
      const Answer answer = clone.Try(StartCall({pos}, {seq}, false));
      if (answer.code != StatusCode::kOk) {
        return Violation(yes + "the batch is refused: " + ToText(answer));
      }
      if (!subject.is_twin()) clone.PutAny();
      for (const SeenRow& row : clone.PassRows()) {
        const int type = clone.TypeOf(row.layer);
        if (clone.IsEncoder(type)) continue;
        const std::int64_t low =
            LowestSeen(clone.spec(type), script.setup, pos);
        std::int64_t expected = low;
        for (const SeenToken& token : row.tokens) {
          if (token.position == expected) ++expected;
        }
        if (expected == pos + 1 && std::ssize(row.tokens) == expected - low)
          continue;
        return Violation(yes +
                         fmt::format("layer {} does not show each position of "
                                     "{} to {} once",
                                     row.layer, low, pos));
      }
    }
  }
  return result;
}

}  // namespace

std::vector<Law> SequenceLaws() {
  return {
      {"frame",
       "A call on one sequence leaves what all others see, bit for bit.",
       "S8, S26, S29", OthersAreUntouched},
      {"replay",
       "Any history shows the same as a fresh cache that was given the "
       "surviving tokens, a copy for each sequence.",
       "S16, S26, S31", Replay, kNeedsAnyOrder | kNeedsTokens},
      {"renaming", "Other ids for the sequences change nothing but the ids.",
       "S4, S16", Renaming},
      {"copy_twice", "CopyPrefix twice is CopyPrefix once.", "S26", CopyTwice,
       kNeedsCopy},
      {"copy_then_clear",
       "CopyPrefix, then Remove of all of the target: only its own tokens are "
       "gone.",
       "S8, S26, S30", CopyThenClear, kNeedsCopy | kNeedsRemove},
      {"copy_shows",
       "After CopyPrefix the target sees what the source sees below the "
       "length, and has no token beyond.",
       "S26, S27", CopyShows, kNeedsCopy | kNeedsLook | kNeedsTokens},
      {"remove_splits",
       "Remove of [a, c) is Remove of [a, b), then of the rest.", "S29, S31",
       RemoveSplits, kNeedsMiddle},
      {"remove_open",
       "Remove to the open end has the same effect in two steps as in "
       "one, and as copying the prefix to itself.",
       "S27, S30", RemoveOpen, kNeedsRemove},
      {"shift_back",
       "K rows that were put shifted by +d are unshifted once Remove "
       "shifts them by -d; V rows never change.",
       "S34, S35", ShiftBack, kNeedsMiddle | kNeedsTokens},
      {"offset_zero", "Remove of an empty range changes nothing, bit for bit.",
       "S29, S36", OffsetZero, kNeedsMiddle},
      {"resume_is_honest",
       "Where CanResume says yes to a legal client, a batch there is taken and "
       "sees its full window.",
       "S28", ResumeIsHonest, kNeedsResume | kNeedsRemove | kNeedsTokens},
  };
}

}  // namespace kvtwin::props
