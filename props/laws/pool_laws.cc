#include "props/laws/pool_laws.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/laws/laws.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

// The rows that a sequence shows, by layer and position.
struct PoolPicture {
  int len = 0;
  std::map<std::pair<int, int>, KvRows> rows;
};

}  // namespace

// A pool, its sequences, and the operation after which the law is checked.
struct LawProbe {
  LawProbe(PagedPool& pool, const PoolAbilities& abilities,
           const PoolRules& rules, const PoolWorkload& workload)
      : pool(pool), abilities(abilities), rules(rules), workload(workload) {}

  const PoolWorkload::Sequence& Of(int number) const {
    return workload.sequences().at(number);
  }
  // Returns a sequence without appended rows, if any.
  std::optional<int> Idle() const {
    std::vector<int> idle;
    for (const auto& [number, of] : workload.sequences()) {
      if (of.client.pending.empty() && !of.again) idle.push_back(number);
    }
    if (idle.empty()) return std::nullopt;
    return At(idle, Mod(op.a, Size(idle)));
  }
  bool HasRoom(int more = 1) const { return workload.Room() >= more; }

  PoolPicture PictureOf(int sequence) const {
    PoolPicture picture{.len = Need(pool.SeqLen(sequence), "SeqLen"),
                        .rows = {}};
    for (int layer = 0; layer < pool.spec().layers; ++layer) {
      for (const PagedView& view : Need(pool.Views(sequence, layer), "Views")) {
        for (int i = 0; i < view.length; ++i) {
          picture.rows[{layer, view.start + i}] = {
              CopyOf(Slice(view.key, 2, i), view.key.dtype),
              CopyOf(Slice(view.value, 2, i), view.value.dtype)};
        }
      }
    }
    return picture;
  }
  std::map<int, PoolPicture> PictureOfAll() const {
    std::map<int, PoolPicture> all;
    for (const auto& [number, of] : workload.sequences()) {
      all[number] = PictureOf(number);
    }
    return all;
  }

  // The first position that the token after `len` tokens needs in a layer.
  int FirstNeeded(int layer, int len) const {
    const PagedSpec& spec = SpecOfLayer(pool.spec(), layer);
    if (spec.states) return std::max(0, len - 1);
    if (spec.window) return std::max(0, len - *spec.window);
    return rules.FirstSeen(len);
  }

  // Expects that `now` shows the same first `len` tokens as `before`, as far as
  // the next token needs them.
  void ExpectSame(const PoolPicture& before, const PoolPicture& now, int len,
                  std::string_view what) const {
    for (const auto& [place, row] : before.rows) {
      const int layer = place.first;
      const int position = place.second;
      if (position >= len) continue;
      const auto shown = now.rows.find(place);
      const bool gone = shown == now.rows.end();
      if (gone && position < FirstNeeded(layer, len)) continue;
      Expect(!gone && shown->second == row, [&] {
        return fmt::format("{}: layer {} has {} at position {}", what, layer,
                           gone ? "no row" : "another row", position);
      });
    }
  }
  void ExpectSame(const std::map<int, PoolPicture>& before,
                  std::string_view what) const {
    for (const auto& each : before) {
      const int number = each.first;
      const PoolPicture& picture = each.second;
      const PoolPicture now = PictureOf(number);
      Expect(now.len == picture.len, [&] {
        return fmt::format("{}: sequence {} has {} tokens, and had {}", what,
                           number, now.len, picture.len);
      });
      ExpectSame(picture, now, picture.len,
                 fmt::format("{}: sequence {}", what, number));
    }
  }

  // Opens a sequence, frees it, and returns its length.
  int LengthOf(const std::vector<std::int32_t>& prompt, const PrefixKey& key) {
    const int made = Need(pool.Open(prompt, key), "Open");
    const int len = Need(pool.SeqLen(made), "SeqLen");
    Need(pool.Free(made), "Free");
    return len;
  }
  // Appends `count` tokens, which no sequence has committed, to the first
  // `layers` layers. Returns false if the pool is full; some layers may then
  // have the tokens.
  bool AppendNew(int sequence, int count, int layers) {
    const auto known = workload.sequences().find(sequence);
    PagedClient client;  // That of a sequence which the law made is empty.
    if (known != workload.sequences().end()) client = known->second.client;
    client.pending = NewTokens(count);
    return AppendPending(pool, sequence, client, layers) == layers;
  }
  // Drops the appended rows of a sequence.
  void GiveUp(int sequence) {
    if (abilities.truncate && op.b % 2 == 0) {
      return Need(pool.Truncate(sequence, Size(Of(sequence).client.tokens)),
                  "Truncate");
    }
    Need(pool.Commit(sequence, std::span<const std::int32_t>()), "Commit");
  }

  PagedPool& pool;
  const PoolAbilities& abilities;
  const PoolRules& rules;
  const PoolWorkload& workload;
  PagedOp op;
};

namespace {

bool Always(const PoolAbilities& /*abilities*/, const PoolRules& /*rules*/) {
  return true;
}
bool IfPassesEnd(const PoolAbilities& /*abilities*/, const PoolRules& rules) {
  return !rules.states_in_place;
}
bool IfForks(const PoolAbilities& abilities, const PoolRules& /*rules*/) {
  return abilities.fork;
}
bool IfRowsAreTheSame(const PoolAbilities& /*abilities*/,
                      const PoolRules& rules) {
  return !rules.deduplicates && !rules.recomputes_last;
}
bool IfItHasTables(const PoolAbilities& abilities, const PoolRules& /*rules*/) {
  return abilities.table;
}

bool GivenUpPass(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence) return false;
  const auto before = probe.PictureOfAll();
  const int layers = 1 + Mod(probe.op.c, probe.pool.spec().layers);
  probe.AppendNew(*sequence, 1 + Mod(probe.op.b, 4), layers);
  probe.GiveUp(*sequence);
  probe.ExpectSame(before, "after a pass that was given up");
  return true;
}

bool PlannedTokens(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence || !probe.HasRoom()) return false;
  const PagedClient& client = probe.Of(*sequence).client;
  const int count = probe.pool.spec().block_size + Mod(probe.op.b, 3);
  std::vector<std::int32_t> prompt = client.tokens;
  for (const std::int32_t token : NewTokens(count + 1)) {
    prompt.push_back(token);
  }
  const bool appended =
      probe.AppendNew(*sequence, count, probe.pool.spec().layers);
  const int planned = probe.LengthOf(prompt, client.key);
  probe.GiveUp(*sequence);
  const int given_up = probe.LengthOf(prompt, client.key);
  const int committed = Size(client.tokens);
  Expect(planned <= committed && given_up <= committed, [&] {
    return fmt::format(
        "{} tokens are committed, {} are found while a pass runs, {} after it "
        "was given up",
        committed, planned, given_up);
  });
  return appended;
}

bool Forked(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence || !probe.HasRoom()) return false;
  const auto before = probe.PictureOfAll();
  const int all = Size(probe.Of(*sequence).client.tokens);
  const int asked = Mod(probe.op.b, all + 1);
  const int made = Need(probe.pool.Fork(*sequence, asked), "Fork");
  const PoolPicture forked = probe.PictureOf(made);
  Expect(forked.len <= asked, [&] {
    return fmt::format("a fork of {} tokens has {}", asked, forked.len);
  });
  probe.ExpectSame(before.at(*sequence), forked, forked.len, "the fork");
  Need(probe.pool.Free(made), "Free");
  probe.ExpectSame(before, "after a fork was freed");
  return true;
}

bool OtherKey(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence || !probe.HasRoom()) return false;
  const PagedClient& client = probe.Of(*sequence).client;
  std::vector<std::int32_t> prompt = client.tokens;
  prompt.push_back(0);
  PrefixKey key = client.key;
  key.salt += "other";
  const auto expect_none = [&](std::string_view what) {
    const int found = probe.LengthOf(prompt, key);
    Expect(found == 0, [&] {
      return fmt::format("{} tokens are found under {}", found, what);
    });
  };
  expect_none("another salt");
  key = client.key;
  key.extra.emplace_back("other");
  expect_none("one more extra key");
  if (!probe.abilities.media) return true;
  key = client.key;
  key.media.insert(key.media.begin(), {0, "other"});
  expect_none("an image at the first position");
  return true;
}

bool AHit(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence || !probe.HasRoom()) return false;
  const PagedClient& client = probe.Of(*sequence).client;
  std::vector<std::int32_t> prompt = client.tokens;
  prompt.push_back(0);
  const PoolPicture whole = probe.PictureOf(*sequence);
  const int made = Need(probe.pool.Open(prompt, client.key), "Open");
  const PoolPicture found = probe.PictureOf(made);
  for (int layer = 0; layer < probe.pool.spec().layers; ++layer) {
    for (int position = probe.FirstNeeded(layer, found.len);
         position < found.len; ++position) {
      const auto place = std::pair(layer, position);
      const auto row = found.rows.find(place);
      Expect(row != found.rows.end(), [&] {
        return fmt::format(
            "a prompt finds {} tokens, but layer {} has no row at {}",
            found.len, layer, position);
      });
      const auto expected = whole.rows.find(place);
      Expect(expected == whole.rows.end() || expected->second == row->second,
             [&] {
               return fmt::format(
                   "a prompt finds {} tokens, but layer {} has another row at "
                   "{} than the sequence of the prompt",
                   found.len, layer, position);
             });
    }
  }
  Need(probe.pool.Free(made), "Free");
  return found.len > 0;
}

bool Tables(LawProbe& probe) {
  const auto sequence = probe.Idle();
  if (!sequence) return false;
  const std::vector<int> sequences = {*sequence};
  int layer = 0;  // The first layer of the group.
  for (int group = 0; const PagedPool* of = probe.pool.Group(group); ++group) {
    const PagedTable table = Need(of->ExportTable(sequences), "ExportTable");
    const int len = Need(probe.pool.SeqLen(*sequence), "SeqLen");
    for (const PagedView& view :
         Need(probe.pool.Views(*sequence, layer), "Views")) {
      if (view.block < 0 || view.start >= len) continue;
      if (view.start < probe.FirstNeeded(layer, len)) continue;
      const int at = view.start / of->spec().block_size;
      const int block = at < table.columns ? At(table.blocks, at) : -1;
      Expect(block == view.block, [&] {
        return fmt::format(
            "the table of group {} has block {} for position {}, layer {} "
            "shows block {}",
            group, block, view.start, layer, view.block);
      });
    }
    layer += of->spec().layers;
  }
  return true;
}

// Takes the room of `count` tokens in one of these ways, and gives it back: in
// a pass, in a sequence that is cut to nothing and stays, in one that is freed,
// in a fork that is freed. Returns false if the pool is full.
enum class RoomUse { kPass, kCut, kFreed, kForked };
bool UsesRoom(LawProbe& probe, RoomUse use, int sequence, int count) {
  PagedPool& pool = probe.pool;
  int made = sequence;
  std::optional<int> source;
  bool stored = true;
  if (use == RoomUse::kFreed) made = Need(pool.Open({}, {}), "Open");
  if (use == RoomUse::kForked) {
    // A fork of the same sequence each time would lose the same block again.
    source = Need(pool.Open({}, {}), "Open");
    stored = probe.AppendNew(*source, count, pool.spec().layers);
    if (stored) {
      Need(pool.Commit(*source, NewTokens(count)), "Commit");
    }
    made = Need(pool.Fork(*source, stored ? count : 0), "Fork");
  }
  const bool room = probe.AppendNew(made, count, pool.spec().layers);
  if (use == RoomUse::kPass) {
    probe.GiveUp(made);
    return room;
  }
  if (room && use != RoomUse::kForked) {
    Need(pool.Commit(made, NewTokens(count)), "Commit");
  }
  Need(use == RoomUse::kCut ? pool.Truncate(made, 0) : pool.Free(made),
       use == RoomUse::kCut ? "Truncate" : "Free");
  if (source) Need(pool.Free(*source), "Free");
  return room && stored;
}

// Returns the tokens of one block of each group, and one more.
int MoreThanABlock(const PagedPool& pool) {
  int most = 0;
  for (int group = 0; const PagedPool* of = pool.Group(group); ++group) {
    most = std::max(most, of->spec().block_size);
  }
  return most + 1;
}

// An append that is refused takes no room. Returns false if none was refused.
bool RefusalsTakeNoRoom(LawProbe& probe) {
  const auto fill = [&] {
    return FillAndFree(probe.pool, probe.rules, probe.workload.Room());
  };
  const PoolRoom room = fill();
  if (!room.is_full || room.tokens == 0) return false;
  for (int round = 0; round < 3; ++round) {
    const int now = fill().tokens;
    Expect(now >= room.tokens, [&] {
      return fmt::format(
          "{} tokens filled the pool and were freed; the next time {} fill it",
          room.tokens, now);
    });
  }
  return true;
}

// A pool of few blocks that loses one each time is full at last.
bool RoomComesBack(LawProbe& probe) {
  const auto idle = probe.Idle();
  if (!idle || !probe.HasRoom()) return false;
  const int way = Mod(probe.op.a + probe.op.c, 5);
  if (way == 4) return RefusalsTakeNoRoom(probe);
  auto use = static_cast<RoomUse>(way);
  if (use == RoomUse::kCut && !probe.abilities.truncate) use = RoomUse::kFreed;
  const bool forks = probe.abilities.fork && probe.HasRoom(2);
  if (use == RoomUse::kForked && !forks) use = RoomUse::kFreed;
  const bool own = use == RoomUse::kCut;
  const int sequence = own ? Need(probe.pool.Open({}, {}), "Open") : *idle;
  const int count = MoreThanABlock(probe.pool);
  const int rounds = std::min(probe.pool.spec().blocks + 2, 50);
  int round = 0;
  while (round < rounds && UsesRoom(probe, use, sequence, count)) ++round;
  if (own) Need(probe.pool.Free(sequence), "Free");
  Expect(round == 0 || round == rounds, [&] {
    return fmt::format(
        "{} tokens were appended and given up {} times, and the next time the "
        "pool is full",
        count, round);
  });
  return round > 0;
}

constexpr std::array kPoolLaws = {
    PoolLaw{
        "given_up_pass", "A pass that is given up leaves no trace.",
        "P3, P8, P13, P15", IfPassesEnd,
        "passes that leave states alone until a commit (no states_in_place)",
        GivenUpPass},
    PoolLaw{
        "planned_tokens", "No prompt finds tokens before their commit.",
        "P6, P18", IfPassesEnd,
        "passes that leave states alone until a commit (no states_in_place)",
        PlannedTokens},
    PoolLaw{"a_fork_is_equal",
            "A fork shows the rows of its tokens, and ends without a trace.",
            "P2, P14", IfForks, "fork", Forked},
    PoolLaw{"keys_keep_apart",
            "A prompt under another key finds nothing: another salt, one more "
            "extra key, an image at the first position.",
            "P1, P17", Always, "", OtherKey},
    PoolLaw{
        "a_hit_is_whole", "Each layer has the rows that a found prefix needs.",
        "P1, P12, P13, P16", IfRowsAreTheSame,
        "one row for each token (no deduplicates, no recomputes_last)", AHit},
    PoolLaw{"tables_are_views", "Tables name the blocks that views are in.",
            "P10, P15", IfItHasTables, "table", Tables},
    PoolLaw{
        "room_comes_back",
        "Tokens that fitted and were given up fit again: a pass, a sequence "
        "that is cut or freed, a fork, also after a refused append.",
        "P3, P4, P5, P8", IfPassesEnd,
        "passes that leave states alone until a commit (no states_in_place)",
        RoomComesBack}};

}  // namespace

std::span<const PoolLaw> PoolLaws() { return kPoolLaws; }

const PoolLaw* FindPoolLaw(std::string_view name) {
  const auto* const law = std::ranges::find(kPoolLaws, name, &PoolLaw::name);
  return law == kPoolLaws.end() ? nullptr : law;
}

std::string LawCommand(const PoolLaw& law, const PagedHistory& history,
                       const Subject& subject) {
  return LawCommand(law.name, ToText(history), subject);
}

RunResult JudgePool(const PoolLaw& law, const PagedHistory& history,
                    std::unique_ptr<PagedPool> pool,
                    const PoolAbilities& abilities, const PoolRules& rules,
                    PagedCoverageCounts* counts, PoolCalls* calls) {
  RunResult result = {.ran = true};
  PoolCalls own;
  PoolCalls& noted = calls == nullptr ? own : *calls;
  PoolLog log(std::move(pool), noted);
  std::size_t step = 0;
  try {
    PoolWorkload workload(log, abilities, rules, counts);
    LawProbe probe(log, abilities, rules, workload);
    for (; step < history.ops.size(); ++step, ++result.operations) {
      workload.Do(history.ops[step]);
      probe.op = history.ops[step];
      try {
        result.views += law.check(probe) ? 1 : 0;
      } catch (Failure& failure) {
        if (failure.party() == Party::kSubject) {
          failure.text = fmt::format("law {}: {}", law.name, failure.text);
        }
        throw;
      }
    }
    workload.End();
  } catch (const Failure& found) {
    result.failure = found;
  } catch (const std::exception& error) {
    result.failure = PoolFailure(error.what());
  }
  if (!result.failure) return result;
  result.failure->step = step;
  if (result.failure->trace.empty()) result.failure->trace = noted.Steps();
  return result;
}

Subject LawSubject(const PoolLaw& law, std::string_view twin) {
  const auto run = [&law, name = std::string(twin)](
                       const PagedHistory& history,
                       const PoolRunOptions& options) {
    auto pool = MakePagedPool(history.spec, name);
    if (!pool.ok()) return RunResult();
    const bool groups = !history.spec.groups.empty();
    return JudgePool(law, history, std::move(*pool), {.media = groups}, {},
                     options.counts);
  };
  return {
      .name = std::string(twin), .run_pool = run, .level = Level::kVisibility};
}

}  // namespace kvtwin::props
