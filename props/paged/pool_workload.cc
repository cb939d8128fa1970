#include "props/paged/pool_workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/index.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kSequencesMax = 5;
constexpr std::size_t kSeenMax = 20;

}  // namespace

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
  if (sequences_.size() > kSequencesMax) return;
  PagedClient client = DrawPrompt(op, seen_);
  const std::vector<std::int32_t> prompt = client.tokens;
  const int made = Need(pool_.Open(prompt, client.key), "Open");
  Add("Open", made, std::move(client));
  Sequence& opened = sequences_.at(made);
  const bool last = prompt.size() == opened.client.tokens.size() + 1;
  if (rules_.recomputes_last && last) opened.again = prompt.back();
  const int found = Size(opened.client.tokens) + (opened.again ? 1 : 0);
  counts_.found += found / pool_.spec().block_size;
}

void PoolWorkload::Fork(const PagedOp& op) {
  if (!abilities_.fork || sequences_.size() > kSequencesMax) return;
  const int from = Pick(op.a);
  PagedClient client = sequences_.at(from).client;
  const int len = Mod(op.b, Size(client.tokens) + 1);
  client.tokens.resize(AsSize(len));
  const int made = Need(pool_.Fork(from, len), "Fork");
  Add("Fork", made, std::move(client));
}

// Returns false if the pool is full.
bool PoolWorkload::AppendTo(int sequence, int layer, bool as_stored) {
  Sequence& to = sequences_.at(sequence);
  // If the pool may replace rows by other rows of the same tokens, each
  // append's rows are unique.
  const bool differ = rules_.deduplicates || rules_.recomputes_last;
  PagedRows rows = PendingRows(to.client, pool_.spec(), layer,
                               /*salt=*/differ ? appends_ : 0);
  if (as_stored) rows = AsStored(rows, pool_.spec());
  const auto answer =
      pool_.Append(sequence, layer, rows.key.view(), rows.value.view());
  if (answer.status().code() == StatusCode::kCacheFull) {
    ++counts_.full;
    return false;
  }
  Need(answer.status(), "Append");
  const int count = Size(to.client.pending);
  counts_.longest = std::max<std::int64_t>(counts_.longest, count);
  At(to.appended, layer) = count;
  return true;
}

void PoolWorkload::Append(const PagedOp& op) {
  const PagedSpec& spec = pool_.spec();
  const int sequence = Pick(op.a);
  PagedClient& client = sequences_.at(sequence).client;
  const std::vector<std::int32_t> before = client.pending;
  client.pending = DrawTokens(op, spec);
  if (sequences_.at(sequence).again) {
    client.pending[0] = *sequences_.at(sequence).again;
  }
  ++appends_;
  // Rows appended in a block dtype may get another scale in a recording.
  const bool as_stored = op.c % 2 == 1 && !IsBlockDType(spec.dtype) &&
                         !IsBlockDType(spec.v_dtype.value_or(spec.dtype));
  // As in PagedDriver: layers with different tokens are never committed.
  const int layers = op.c % 5 == 0 && before.empty() ? 1 : spec.layers;
  for (int layer = 0; layer < layers; ++layer) {
    if (AppendTo(sequence, layer, as_stored)) continue;
    client.pending = before;
    if (layer > 0) Forget(sequence);
    return;
  }
}

// Discards the appended tokens, by committing none of them.
void PoolWorkload::Forget(int sequence) {
  Need(pool_.Commit(sequence, std::span<const std::int32_t>()), "Commit");
  Sequence& of = sequences_.at(sequence);
  of.client.pending.clear();
  std::fill(of.appended.begin(), of.appended.end(), 0);
}

void PoolWorkload::Commit(const PagedOp& op, bool known) {
  if (!known && !abilities_.commit_unknown) return;
  const int sequence = Pick(op.a);
  Sequence& of = sequences_.at(sequence);
  PagedClient& client = of.client;
  const int most = *std::min_element(of.appended.begin(), of.appended.end());
  const int count = op.b % 4 == 0 ? Mod(op.c, most + 1) : most;
  std::vector<std::int32_t> tokens = client.pending;
  tokens.resize(AsSize(count));
  Need(known ? pool_.Commit(sequence, tokens) : pool_.Commit(sequence, count),
       "Commit");
  client.tokens.insert(client.tokens.end(), tokens.begin(), tokens.end());
  if (count > 0) of.again.reset();
  client.pending.clear();
  std::fill(of.appended.begin(), of.appended.end(), 0);
  if (seen_.size() < kSeenMax) seen_.push_back(client);
}

void PoolWorkload::Truncate(const PagedOp& op) {
  if (!abilities_.truncate) return;
  const int sequence = Pick(op.a);
  Sequence& of = sequences_.at(sequence);
  const int len = Mod(op.b, Size(of.client.tokens) + 1);
  Need(pool_.Truncate(sequence, len), "Truncate");
  const bool shorter = std::ssize(of.client.tokens) > len;
  if (shorter) {
    of.again.reset();
    ++counts_.truncated;
  }
  of.client.tokens.resize(AsSize(len));
  of.client.pending.clear();
  std::fill(of.appended.begin(), of.appended.end(), 0);
}

void PoolWorkload::Free(int sequence) {
  Need(pool_.Free(sequence), "Free");
  sequences_.erase(sequence);
}

void PoolWorkload::Look() {
  std::vector<int> all;
  for (const auto& [sequence, of] : sequences_) {
    all.push_back(sequence);
    Need(pool_.SeqLen(sequence), "SeqLen");
    for (int layer = 0; layer < pool_.spec().layers; ++layer) {
      Need(pool_.Views(sequence, layer), "Views");
    }
    if (abilities_.slots) {
      const int len = Size(of.client.tokens);
      Need(pool_.SlotMapping(sequence, 0, len), "SlotMapping");
    }
  }
  if (abilities_.table) Need(pool_.ExportTable(all), "ExportTable");
  if (abilities_.csr) Need(pool_.ExportCsr(all), "ExportCsr");
  if (abilities_.usage) static_cast<void>(pool_.Usage());
}

}  // namespace kvtwin::props
