#include "props/paged/pool_workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/base/counted.h"

namespace kvtwin::props {

int PoolWorkload::Pick(int number) const { return PickOf(sequences_, number); }

void PoolWorkload::Do(const PagedOp& op) {
  ++counts_.operations;
  Act(*this, !sequences_.empty(), op);
  Look();
}

void PoolWorkload::End() {
  while (!sequences_.empty()) Free(sequences_.begin()->first);
  Look();
}

// Adds a new sequence with the first SeqLen of the client's tokens.
void PoolWorkload::Add(std::string_view call, int sequence,
                       PagedClient client) {
  Expect(!sequences_.contains(sequence), [&] {
    return fmt::format("{}: there is a sequence {} already", call, sequence);
  });
  const int len = Need(pool_.SeqLen(sequence), "SeqLen");
  Expect(len >= 0 && AsSize(len) <= client.tokens.size(), [&] {
    return fmt::format("{}: sequence {} begins with {} tokens, it may have {}",
                       call, sequence, len, client.tokens.size());
  });
  client.tokens.resize(AsSize(len));
  client.pending.clear();
  const auto layers = AsSize(pool_.spec().layers);
  sequences_.try_emplace(
      sequence, Sequence{std::move(client), std::vector<int>(layers, 0)});
}

void PoolWorkload::Open(const PagedOp& op) {
  if (!MayAddClient(op, sequences_.size(), abilities_.max_sequences)) return;
  PagedClient client = DrawPrompt(op, seen_, freed_media_);
  if (!abilities_.media) client.key.media.clear();
  const std::vector<std::int32_t> prompt = client.tokens;
  const int made = Need(pool_.Open(prompt, client.key), "Open");
  const PrefixKey key = client.key;
  Add("Open", made, std::move(client));
  if (ledger_) {
    const int taken = Size(sequences_.at(made).client.tokens);
    if (ledger_->MayOpen(prompt, key, taken)) {
      ledger_->Open(made, prompt, key, taken);
    } else {
      ledger_.reset();
    }
  }
  Sequence& opened = sequences_.at(made);
  const bool last = prompt.size() == opened.client.tokens.size() + 1;
  if (rules_.recomputes_last && last) opened.again = prompt.back();
  if (has_groups()) {
    opened.client.rest.assign(prompt.begin() + std::ssize(opened.client.tokens),
                              prompt.end());
  }
  const int found = Size(opened.client.tokens) + (opened.again ? 1 : 0);
  counts_.found += found / pool_.spec().block_size;
  // The last token of a prompt is never found.
  if (prompt.size() > 1) opens_.Count(found > 0);
}

void PoolWorkload::Fork(const PagedOp& op) {
  if (!abilities_.fork) return;
  if (!MayAddClient(op, sequences_.size(), abilities_.max_sequences)) return;
  const int from = Pick(op.a);
  if (!MayGiveUp(sequences_.at(from))) return;
  PagedClient client = sequences_.at(from).client;
  const int len = Mod(op.b, Size(client.tokens) + 1);
  client.Fork(len);
  const int made = Need(pool_.Fork(from, len), "Fork");
  Add("Fork", made, std::move(client));
  PagedClient& forked = sequences_.at(made).client;
  forked.Fork(Size(forked.tokens));  // The pool may keep fewer tokens (P14).
  if (ledger_) ledger_->Fork(from, made, Size(forked.tokens));
}

// Returns false if the pool is full.
bool PoolWorkload::AppendTo(int sequence, int layer, bool as_stored) {
  Sequence& to = sequences_.at(sequence);
  // If the pool may replace rows by other rows of the same tokens, each
  // append's rows are unique.
  const bool differ = rules_.deduplicates || rules_.recomputes_last;
  const PagedSpec& spec = SpecOfLayer(pool_.spec(), layer);
  PagedRows rows = PendingRows(to.client, spec, layer, asker_,
                               /*salt=*/differ ? appends_ : 0);
  // Rows appended in a block dtype may get another scale in a recording.
  as_stored = as_stored && !IsBlockDType(spec.dtype) &&
              !IsBlockDType(spec.v_dtype.value_or(spec.dtype));
  if (as_stored) rows = AsStored(rows, spec);
  const auto answer =
      pool_.Append(sequence, layer, rows.key.view(), rows.value.view());
  if (answer.status().code() == StatusCode::kCacheFull) {
    ++counts_.full;
    was_full_ = true;
    return false;
  }
  Need(answer.status(), "Append");
  const int count = Size(to.client.pending);
  counts_.longest = std::max<std::int64_t>(counts_.longest, count);
  At(to.appended, layer) = count;
  if (ledger_) {
    ledger_->Append(sequence, layer, rows.key.view(), rows.value.view());
  }
  return true;
}

void PoolWorkload::Append(const PagedOp& op) {
  const PagedSpec& spec = pool_.spec();
  const int sequence = Pick(op.a);
  PagedClient& client = sequences_.at(sequence).client;
  const std::vector<std::int32_t> before = client.pending;
  if (!before.empty() && !MayGiveUp(sequences_.at(sequence))) return;
  client.pending = DrawTokens(op, spec);
  UseRest(client);
  if (sequences_.at(sequence).again) {
    client.pending[0] = *sequences_.at(sequence).again;
  }
  ++appends_;
  const bool as_stored = op.c % 2 == 1;
  // As in PagedDriver: layers with different tokens are never committed.
  const int layers = op.c % 5 == 0 && before.empty() ? 1 : spec.layers;
  for (int i = 0; i < layers; ++i) {
    if (!AppendTo(sequence, LayerOf(op, i, spec.layers), as_stored)) {
      client.pending = before;
      if (i > 0) GiveUp(sequence);
      return;
    }
    client.layers = FirstLayers(op, i, spec.layers);
  }
  counts_.whole += layers == spec.layers;
  // Prompts must not find planned tokens.
  if (has_groups()) Remember(client, client.pending, seen_);
}

void PoolWorkload::AppendLayers(const PagedOp& op) {
  const int sequence = Pick(op.a);
  Sequence& of = sequences_.at(sequence);
  PagedClient& client = of.client;
  if (client.pending.empty()) return;
  const int all = pool_.spec().layers;
  const int end = std::min(all, client.layers + 1 + Mod(op.b, all));
  for (int layer = client.layers; layer < end; ++layer) {
    // A state in place takes each token once (P13).
    const bool has_them = At(of.appended, layer) > 0 && !MayGiveUp(of);
    if (!has_them && !AppendTo(sequence, layer, op.c % 2 == 1)) return;
    client.layers = layer + 1;
    counts_.whole += client.layers == all;
  }
}

void PoolWorkload::AddMedia(const PagedOp& op) {
  if (!abilities_.media) return;
  const int sequence = Pick(op.a);
  PagedClient& client = sequences_.at(sequence).client;
  const PrefixMedia media = DrawMedia(op, client, pool_.spec());
  Need(pool_.AddMedia(sequence, media), "AddMedia");
  client.Add(media);
  if (ledger_) ledger_->AddMedia(sequence, media);
}

bool PoolWorkload::MayGiveUp(const Sequence& of) const {
  if (!rules_.states_in_place) return true;
  int layer = 0;
  for (const PagedSpec& group : pool_.spec().groups) {
    const auto begin = of.appended.begin() + layer;
    layer += group.layers;
    const auto end = of.appended.begin() + layer;
    if (group.states &&
        std::any_of(begin, end, [](int rows) { return rows > 0; })) {
      return false;
    }
  }
  return true;
}

// The tokens are discarded by committing none of them.
void PoolWorkload::GiveUp(int sequence) {
  Sequence& of = sequences_.at(sequence);
  if (!MayGiveUp(of)) return Free(sequence);
  Need(pool_.Commit(sequence, std::span<const std::int32_t>()), "Commit");
  if (ledger_) ledger_->Commit(sequence, 0, {});
  Keep(sequence, Size(of.client.tokens));
}

// Keeps the first `len` tokens, and discards the appended tokens.
void PoolWorkload::Keep(int sequence, int len) {
  Sequence& of = sequences_.at(sequence);
  if (len < Size(of.client.tokens)) of.again.reset();
  of.client.Truncate(len);
  std::fill(of.appended.begin(), of.appended.end(), 0);
}

// Returns how many tokens a commit takes: usually all; none where a group of
// states has no state (P13).
int PoolWorkload::CountToCommit(const Sequence& of, const PagedOp& op) const {
  const auto [least, most] = std::ranges::minmax(of.appended);
  const int count = op.b % 4 == 0 ? Mod(op.c, least + 1) : least;
  if (!MayGiveUp(of)) return least == most ? most : 0;
  const int end = Size(of.client.tokens) + count;
  for (const PagedSpec& group : pool_.spec().groups) {
    if (!group.states || end % group.block_size == 0 || count == 0) continue;
    if (least != most || count != most) return least == most ? most : 0;
  }
  return count;
}

void PoolWorkload::Commit(const PagedOp& op, bool known) {
  if (!known && !abilities_.commit_unknown) return;
  const int sequence = Pick(op.a);
  Sequence& of = sequences_.at(sequence);
  PagedClient& client = of.client;
  const int count = CountToCommit(of, op);
  if (count == 0 && !MayGiveUp(of)) return;
  std::vector<std::int32_t> tokens = client.pending;
  tokens.resize(AsSize(count));
  Need(known ? pool_.Commit(sequence, tokens) : pool_.Commit(sequence, count),
       "Commit");
  if (ledger_) {
    ledger_->Commit(sequence, count,
                    known ? std::span<const std::int32_t>(tokens)
                          : std::span<const std::int32_t>());
  }
  client.Commit(tokens, known);
  if (count > 0) of.again.reset();
  std::fill(of.appended.begin(), of.appended.end(), 0);
  Remember(client, {}, seen_);
}

void PoolWorkload::Truncate(const PagedOp& op) {
  if (!abilities_.truncate) return;
  const int sequence = Pick(op.a);
  Sequence& of = sequences_.at(sequence);
  const int len = Mod(op.b, Size(of.client.tokens) + 1);
  if (!MayGiveUp(of)) return;
  Need(pool_.Truncate(sequence, len), "Truncate");
  const int kept = has_groups() ? Need(pool_.SeqLen(sequence), "SeqLen") : len;
  Expect(kept >= 0 && kept <= len, [&] {
    return fmt::format("Truncate: sequence {} has {} tokens, it may have {}",
                       sequence, kept, len);
  });
  if (Size(of.client.tokens) > kept) ++counts_.truncated;
  if (ledger_) ledger_->Truncate(sequence, kept);
  Keep(sequence, kept);
}

void PoolWorkload::Free(int sequence) {
  Need(pool_.Free(sequence), "Free");
  if (ledger_) ledger_->Free(sequence);
  freed_media_ = sequences_.at(sequence).client.key.media;
  sequences_.erase(sequence);
}

void PoolWorkload::Look() {
  std::vector<int> all;
  for (const auto& [sequence, of] : sequences_) {
    all.push_back(sequence);
    Need(pool_.SeqLen(sequence), "SeqLen");
    for (int layer = 0; layer < pool_.spec().layers; ++layer) {
      if (abilities_.views) Need(pool_.Views(sequence, layer), "Views");
    }
    for (int group = 0; const PagedPool* in = pool_.Group(group); ++group) {
      LookAtSlots(*in, sequence);
    }
  }
  for (int group = 0; const PagedPool* in = pool_.Group(group); ++group) {
    for (const auto& batch : BatchesOf(all)) LookAtTables(*in, batch);
  }
  if (abilities_.usage) static_cast<void>(pool_.Usage());
  if (ledger_) LookAtOutputs();
}

// The recorder cannot write a NaN. So each output is judged here, before the
// recording is.
void PoolWorkload::LookAtOutputs() {
  ForEachAsked(*asker_, *ledger_, [&](int layer, const auto& batch) {
    counts_.outputs += AskOutputs(*asker_, *ledger_, layer, batch, pool_);
  });
}

void PoolWorkload::LookAtSlots(const PagedPool& of, int sequence) {
  if (!abilities_.slots) return;
  const int len = Size(sequences_.at(sequence).client.tokens);
  // All tokens, and the last half of them, such as a step computes.
  for (const int begin : std::set{0, len / 2}) {
    const auto slots =
        Need(of.SlotMapping(sequence, begin, len), "SlotMapping");
    Expect(Size(slots) == len - begin, [&] {
      return fmt::format("slots: {} for {} from position {} on, of sequence {}",
                         Counted(Size(slots), "slot"),
                         Counted(len - begin, "token"), begin, sequence);
    });
  }
}

void PoolWorkload::LookAtTables(const PagedPool& of,
                                const std::vector<int>& sequences) {
  if (abilities_.table) Need(of.ExportTable(sequences), "ExportTable");
  if (abilities_.csr) Need(of.ExportCsr(sequences), "ExportCsr");
}

std::vector<std::int32_t> NewTokens(int count, int begin) {
  constexpr int kFirst = 1000;  // Histories draw smaller tokens.
  std::vector<std::int32_t> tokens(AsSize(count));
  std::iota(tokens.begin(), tokens.end(), kFirst + begin);
  return tokens;
}

int AppendPending(PagedPool& pool, int sequence, const PagedClient& client,
                  int layers) {
  for (int layer = 0; layer < layers; ++layer) {
    const PagedRows rows =
        PendingRows(client, SpecOfLayer(pool.spec(), layer), layer);
    const auto appended =
        pool.Append(sequence, layer, rows.key.view(), rows.value.view());
    if (appended.status().code() == StatusCode::kCacheFull) return layer;
    Need(appended.status(), "Append");
  }
  return layers;
}

PoolRoom FillAndFree(PagedPool& pool, const PoolRules& rules, int sequences) {
  const PagedSpec& spec = pool.spec();
  int longest = 1;  // Few appends fill a large pool.
  for (int group = 0; const PagedPool* of = pool.Group(group); ++group) {
    longest = std::max({longest, of->spec().block_size,
                        of->spec().blocks / 32 * of->spec().block_size});
  }
  PoolRoom room;
  std::vector<int> opened;
  sequences = std::min(sequences, kOpenClientsMost);
  while (Size(opened) < sequences && !room.is_full) {
    const int sequence = opened.emplace_back(Need(pool.Open({}, {}), "Open"));
    PagedClient client;
    for (int count = longest; !room.is_full;) {
      count = std::min(count, spec.max_seq_len - Size(client.tokens));
      if (count == 0) break;
      client.pending = NewTokens(count, room.tokens);
      const int taken = AppendPending(pool, sequence, client, spec.layers);
      const bool fits = taken == spec.layers;
      // A pass over states in place cannot be given up.
      room.is_full =
          !fits && (count == 1 || (rules.states_in_place && taken > 0));
      if (room.is_full) break;
      std::vector<std::int32_t> tokens;
      if (fits) tokens = client.pending;
      if (taken > 0) Need(pool.Commit(sequence, tokens), "Commit");
      client.Commit(tokens, /*known=*/true);
      room.tokens += Size(tokens);
      if (!fits) count /= 2;
    }
  }
  for (const int sequence : opened) Need(pool.Free(sequence), "Free");
  return room;
}

void ExpectNoMoreRoom(PagedPool& pool, const PoolRules& rules, int sequences,
                      const PoolRoom& emptied) {
  const PoolRoom room = FillAndFree(pool, rules, sequences);
  Expect(emptied.tokens >= room.tokens, [&] {
    return fmt::format(
        "{} tokens fit into the pool after all its sequences were freed, and "
        "{} into a new pool",
        emptied.tokens, room.tokens);
  });
}

}  // namespace kvtwin::props
