#include "props/paged/paged_driver.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <exception>
#include <ostream>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/hash.h"
#include "props/paged/paged_client.h"
#include "reference/pool_state.h"

namespace kvtwin::props {
namespace {

// Makes a call that is misuse, by c - kNewMisuse.
Status MakeNewMisuse(PagedPool& pool, int sequence, const PagedOp& op) {
  const std::array<std::int32_t, 2> negative = {0, -1};
  const std::array<std::int32_t, 2> prompt = {0, 1};
  const PrefixKey early{.media = {{-1, "a"}}};
  const PrefixKey mixed{.media = {{2, "a"}, {1, "b"}}};
  const int none = 1000 + Mod(op.b, 3);
  const int len = Need(pool.SeqLen(sequence), "SeqLen");
  switch (Mod(op.c - kNewMisuse, 9)) {
    case 0:
      return pool.Find(negative, {}).status();
    case 1:
      return pool.Find(prompt, early).status();
    case 2:
      return pool.Open(prompt, early).status();
    case 3:
      return pool.Open(prompt, mixed).status();
    case 4:
      return pool.AddMedia(sequence, {len - 1, "a"});
    case 5:
      return pool.AddMedia(none, {len, "a"});
    case 6:
      return pool.ResumeBefore(none, 0).status();
    case 7:
      return pool.ResumeBefore(sequence, len + 1).status();
    default:
      return pool.ResumeBefore(sequence, -1).status();
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const PagedOp& op) {
  return out << At(kPagedOpNames, op.kind) << ' ' << op.a << ' ' << op.b << ' '
             << op.c;
}

void PagedCoverageCounts::Add(const PagedCoverageCounts& other) {
  operations += other.operations;
  not_made += other.not_made;
  found += other.found;
  copied += other.copied;
  evicted += other.evicted;
  truncated += other.truncated;
  full += other.full;
  longest = std::max(longest, other.longest);
  whole += other.whole;
  outputs += other.outputs;
  dtypes.insert(other.dtypes.begin(), other.dtypes.end());
}

void AddDTypes(const PagedSpec& spec, PagedCoverageCounts& counts) {
  const PagedSpec all = Completed(spec);
  for (int layer = 0; layer < all.layers; ++layer) {
    const PagedSpec& of = SpecOfLayer(all, layer);
    counts.dtypes.emplace(of.dtype, of.v_dtype.value_or(of.dtype));
  }
}

PagedDriver::PagedDriver(const PagedSpec& spec, PagedCoverageCounts* counts,
                         const PagedMaker& make, bool same_messages,
                         const std::optional<PoolAttention>& attention)
    : spec_(Completed(spec)),
      make_(make),
      same_messages_(same_messages),
      ledger_(spec),
      counts_(counts) {
  if (attention) asker_.emplace(spec, *attention);
}

void PagedDriver::SetUp() {
  Guarded("init", [&] {
    for (auto* twin : {&reference_, &optimized_}) {
      auto made = make_(spec_, twin == &reference_ ? "reference" : "optimized");
      Expect(made.ok(), [&] { return made.status().ToString(); });
      *twin = std::move(*made);
    }
  });
}

// Any std::exception is a failure of the pool.
template <class Action>
void PagedDriver::Guarded(std::string_view call, const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    throw PoolFailure(fmt::format("exception: {}: {}", call, error.what()));
  }
}

void PagedDriver::ExpectSame(const Status& reference, const Status& optimized,
                             std::string_view call) {
  Expect(reference.code() == optimized.code() &&
             (!same_messages_ || reference.message() == optimized.message()),
         [&] {
           return fmt::format(
               "{}: {} by the reference, {} by the pool under "
               "test",
               call, reference.ToString(), optimized.ToString());
         });
  const auto code = AsInt(reference.code());
  digest_ = HashBytes(&code, sizeof(code), digest_);
}

int PagedDriver::Pick(int number) const { return PickOf(clients_, number); }

void PagedDriver::Do(const PagedOp& op) {
  Guarded(At(kPagedOpNames, op.kind), [&] {
    if (counts_ != nullptr) ++counts_->operations;
    Act(*this, !clients_.empty(), op);
    CompareAll();
  });
}

void PagedDriver::Replay(const PagedOp& op) {
  Guarded(At(kPagedOpNames, op.kind),
          [&] { Act(*this, !clients_.empty(), op); });
}

std::string PagedDriver::StateText() const {
  std::string text = reference::StateText(*reference_);
  for (const auto& [sequence, client] : clients_) {
    text += fmt::format("{}: {} {} {} {}", sequence, client.layers,
                        fmt::join(client.tokens, " "),
                        fmt::join(client.pending, "+"),
                        fmt::join(client.rest, ">"));
    for (const PrefixMedia& media : client.key.media) {
      text += fmt::format(" {}@{}", media.hash, media.position);
    }
    for (int layer = 0; layer < spec_.layers; ++layer) {
      std::uint64_t rows = 0;
      for (const KvRows& row : ledger_.RowsOf(sequence, layer)) {
        for (const auto* bytes : {&row.key.bytes, &row.value.bytes}) {
          rows = HashBytes(bytes->data(), bytes->size(), rows);
        }
      }
      text += fmt::format(" {} {:x}", ledger_.RowCount(sequence, layer), rows);
    }
  }
  return text;
}

void PagedDriver::Open(const PagedOp& op) {
  if (!MayAddClient(op, clients_.size())) return;
  PagedClient client = DrawPrompt(op, seen_, freed_media_);
  const Result<int> reference = reference_->Open(client.tokens, client.key);
  const Result<int> optimized = optimized_->Open(client.tokens, client.key);
  ExpectSame(reference.status(), optimized.status(), "Open");
  Expect(reference.ok(), "Open: refused");
  ExpectEqual("Open: the number", *reference, *optimized);
  const int taken =
      Need(reference_->SeqLen(*reference), "SeqLen of the reference");
  Expect(ledger_.MayOpen(client.tokens, client.key, taken), [&] {
    return fmt::format("Open: {} tokens are taken over that were never there",
                       taken);
  });
  ledger_.Open(*reference, client.tokens, client.key, taken);
  if (!spec_.groups.empty()) {
    const auto& key = client.key;
    ExpectEqual(
        "Find",
        Need(reference_->Find(client.tokens, key), "Find of the reference"),
        Need(optimized_->Find(client.tokens, key), "Find"));
    client.rest.assign(client.tokens.begin() + taken, client.tokens.end());
  }
  client.tokens.resize(AsSize(taken));
  clients_[*reference] = client;
  if (counts_ != nullptr) counts_->found += taken / spec_.block_size;
}

const PagedPool& PagedDriver::GroupIn(const PagedPool& pool, int group) const {
  const PagedPool* const in = pool.Group(group);
  Expect(in != nullptr, [&] { return fmt::format("Group: no {}", group); });
  return *in;
}

const PagedSpec& PagedDriver::SpecOfGroup(int group) const {
  return spec_.groups.empty() ? spec_ : At(spec_.groups, group);
}

int PagedDriver::FirstLayer(int group) const {
  int layer = 0;
  for (int before = 0; before < group; ++before) {
    layer += SpecOfGroup(before).layers;
  }
  return layer;
}

// Asks both twins where the sequence can resume.
int PagedDriver::ResumeBefore(int sequence, int len, PagedTraceOpKind call) {
  if (spec_.groups.empty()) return len;
  const int kept =
      Need(reference_->ResumeBefore(sequence, len), "ResumeBefore");
  ExpectEqual("ResumeBefore", kept,
              Need(optimized_->ResumeBefore(sequence, len), "ResumeBefore"),
              call);
  Expect(kept >= 0 && kept <= len, "ResumeBefore: a later position", call);
  Expect(kept == len || len < ledger_.SeqLen(sequence),
         "ResumeBefore: the sequence cannot continue", call);
  return kept;
}

void PagedDriver::Fork(const PagedOp& op) {
  if (!MayAddClient(op, clients_.size())) return;
  const int from = Pick(op.a);
  const int asked = Mod(op.b, ledger_.SeqLen(from) + 1);
  const int len = ResumeBefore(from, asked, PagedTraceOpKind::kFork);
  const Result<int> reference = reference_->Fork(from, asked);
  const Result<int> optimized = optimized_->Fork(from, asked);
  ExpectSame(reference.status(), optimized.status(), "Fork");
  Expect(reference.ok(), "Fork: refused");
  ExpectEqual("Fork: the number", *reference, *optimized);
  ledger_.Fork(from, *reference, len);
  PagedClient client = clients_.at(from);
  client.Fork(len);
  clients_[*reference] = client;
}

// Appends the pending tokens to a layer; returns false if the pools are full.
bool PagedDriver::AppendTo(int sequence, int layer, bool as_stored) {
  PagedClient& client = clients_.at(sequence);
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  PagedRows rows = PendingRows(client, spec, layer, asker_);
  if (as_stored) rows = AsStored(rows, spec);
  const auto& [key, value] = rows;
  const PagedUsage usage = reference_->Usage();
  const int len = ledger_.SeqLen(sequence);
  int in_group = layer;
  const int group = GroupOf(spec_, in_group);
  // The slot of the last token changes if its block is copied.
  const auto last = [&] {
    return Need(GroupIn(*reference_, group)
                    .SlotMapping(sequence, std::max(0, len - 1), len),
                kSlots);
  };
  const auto before = last();
  const auto reference =
      reference_->Append(sequence, layer, key.view(), value.view());
  const auto optimized =
      optimized_->Append(sequence, layer, key.view(), value.view());
  ExpectSame(reference.status(), optimized.status(), "Append");
  if (!reference.ok()) {
    if (counts_ != nullptr) ++counts_->full;
    // Recordings have one usage of an append.
    const PagedUsage room =
        spec_.groups.empty() ? usage : GroupIn(*reference_, group).Usage();
    const int end = len + Size(client.pending);
    // A last block that is not full may be copied (P2); a state is written
    // beside another.
    const int needed =
        (end + spec.block_size - 1) / spec.block_size - len / spec.block_size;
    Expect(end > spec_.max_seq_len || needed > room.free + room.cached,
           "Append: refused, although there is room");
    Expect(reference_->Usage() == usage, "Append: refused, but not nothing");
    return false;
  }
  const int count = Size(client.pending);
  if (counts_ != nullptr) {
    counts_->copied += last() != before ? 1 : 0;
    counts_->evicted += std::max(0, usage.cached - reference_->Usage().cached);
    counts_->longest = std::max<std::int64_t>(counts_->longest, count);
  }
  ledger_.Append(sequence, layer, key.view(), value.view());
  Expect(reference->start == ledger_.SeqLen(sequence) &&
             optimized->start == reference->start,
         "Append: other views");
  // The views that Append returns are those that Views shows (P7).
  constexpr auto kViews = PagedTraceOpKind::kViews;
  Expect(optimized->views.size() == reference->views.size(),
         "Append: other views", kViews);
  int at = reference->start;
  for (std::size_t i = 0; i < reference->views.size(); ++i) {
    const PagedView& view = reference->views[i];
    if (spec.states) at = view.start;
    Expect(view.start == at && SameViews(view, optimized->views[i]),
           "Append: other views", kViews);
    at += view.length;
  }
  Expect(at == reference->start + count, "Append: views of other rows", kViews);
  return true;
}

void PagedDriver::Append(const PagedOp& op) {
  const int sequence = Pick(op.a);
  PagedClient& client = clients_.at(sequence);
  const std::vector<std::int32_t> before = client.pending;
  client.pending = DrawTokens(op, spec_);
  UseRest(client);
  // Some appends go to one layer only, so that no token can be committed.
  // Layers with rows of different tokens would be a mistake of the client.
  const int layers = op.c % 5 == 0 && before.empty() ? 1 : spec_.layers;
  for (int i = 0; i < layers; ++i) {
    if (!AppendTo(sequence, LayerOf(op, i, spec_.layers), op.c % 2 == 1)) {
      // If a layer was appended to, its old pending rows are replaced.
      if (i == 0) client.pending = before;
      return;
    }
    client.layers = FirstLayers(op, i, spec_.layers);
  }
  if (counts_ != nullptr) counts_->whole += layers == spec_.layers;
  // Prompts must not find planned tokens.
  if (!spec_.groups.empty()) Remember(client, client.pending, seen_);
}

void PagedDriver::AppendLayers(const PagedOp& op) {
  const int sequence = Pick(op.a);
  PagedClient& client = clients_.at(sequence);
  if (client.pending.empty()) return;
  const int end =
      std::min(spec_.layers, client.layers + 1 + Mod(op.b, spec_.layers));
  for (int layer = client.layers; layer < end; ++layer) {
    if (!AppendTo(sequence, layer, op.c % 2 == 1)) return;
    client.layers = layer + 1;
    if (counts_ != nullptr) counts_->whole += client.layers == spec_.layers;
  }
}

void PagedDriver::AddMedia(const PagedOp& op) {
  const int sequence = Pick(op.a);
  PagedClient& client = clients_.at(sequence);
  const PrefixMedia media = DrawMedia(op, client, spec_);
  ExpectSame(reference_->AddMedia(sequence, media),
             optimized_->AddMedia(sequence, media), "AddMedia");
  ledger_.AddMedia(sequence, media);
  client.Add(media);
}

// Whether each layer has rows of so many tokens; of states, those after them
// (P13).
bool PagedDriver::MayCommit(int sequence, int count) const {
  const int end = ledger_.SeqLen(sequence) + count;
  for (int layer = 0; layer < spec_.layers; ++layer) {
    const int rows = ledger_.RowCount(sequence, layer);
    if (end > rows) return false;
    const PagedSpec& spec = SpecOfLayer(spec_, layer);
    const bool has_state =
        count == 0 || end == rows || end % spec.block_size == 0;
    if (spec.states && !has_state) return false;
  }
  return true;
}

void PagedDriver::Commit(const PagedOp& op, bool known) {
  const int sequence = Pick(op.a);
  PagedClient& client = clients_.at(sequence);
  // Usually all pending tokens; sometimes one more, which is refused.
  int count = Size(client.pending);
  if (op.b % 4 == 0) count = Mod(op.c, count + 2);
  std::vector<std::int32_t> tokens = client.pending;
  tokens.resize(AsSize(count));
  const auto commit = [&](PagedPool& pool) {
    return known ? pool.Commit(sequence, tokens) : pool.Commit(sequence, count);
  };
  const Status reference = commit(*reference_);
  const Status optimized = commit(*optimized_);
  ExpectSame(reference, optimized, "Commit");
  Expect(reference.ok() == MayCommit(sequence, count), [&] {
    return fmt::format("Commit: {} tokens are {}", count,
                       reference.ok() ? "accepted" : "refused");
  });
  if (!reference.ok()) return;
  ledger_.Commit(sequence, count,
                 known ? std::span<const std::int32_t>(tokens)
                       : std::span<const std::int32_t>());
  client.Commit(tokens, known);
  Remember(client, {}, seen_);
}

void PagedDriver::Truncate(const PagedOp& op) {
  const int sequence = Pick(op.a);
  const int all = ledger_.SeqLen(sequence);
  const int asked = Mod(op.b, all + 1);
  const int len = ResumeBefore(sequence, asked, PagedTraceOpKind::kTruncate);
  ExpectSame(reference_->Truncate(sequence, asked),
             optimized_->Truncate(sequence, asked), "Truncate");
  ledger_.Truncate(sequence, len);
  clients_.at(sequence).Truncate(len);
  if (counts_ != nullptr && len < all) ++counts_->truncated;
}

void PagedDriver::Free(int sequence) {
  ExpectSame(reference_->Free(sequence), optimized_->Free(sequence), "Free");
  ledger_.Free(sequence);
  freed_media_ = clients_.at(sequence).key.media;
  clients_.erase(sequence);
}

// Makes a call that is misuse.
Status PagedDriver::MakeMisuse(PagedPool& pool, const PagedOp& op) const {
  const int sequence = Pick(op.a);
  const int none = 1000 + Mod(op.b, 3);
  const float number = 0;
  const PagedSpec& first = SpecOfLayer(spec_, 0);
  const Shape shape = {first.k_head_dim + 1, first.kv_heads, 1, 1};
  TensorView wide = DenseView(&number, DType::kF32, shape);
  wide.stride = {0, 0, 0, 1};  // All elements are one.
  TensorView right = wide;
  right.shape[0] = first.k_head_dim;
  TensorView value = right;
  value.shape[0] = first.v_head_dim;
  TensorView nothing = right;
  nothing.data = nullptr;
  const std::array<std::int32_t, 2> negative = {0, -1};
  const std::array<int, 1> sequences = {none};
  const int len = Need(pool.SeqLen(sequence), "SeqLen");
  switch (Mod(op.c, 18)) {
    case 0:
      return pool.Open(negative, {}).status();
    case 1:
      return pool.Fork(none, 0).status();
    case 2:
      return pool.Fork(sequence, len + 1).status();
    case 3:
      return pool.SeqLen(none).status();
    case 4:
      return pool.Append(sequence, spec_.layers, right, value).status();
    case 5:
      return pool.Append(sequence, 0, wide, value).status();
    case 6:
      return pool.Append(sequence, 0, nothing, value).status();
    case 7:
      return pool.Append(none, 0, right, value).status();
    case 8:
      return pool.Commit(sequence, -1);
    case 9:
      return pool.Commit(sequence, spec_.max_seq_len + 1);
    case 10:
      return pool.Truncate(sequence, -1);
    case 11:
      return pool.Truncate(sequence, len + 1);
    case 12:
      return pool.Free(none);
    case 13:
      return pool.Views(sequence, -1).status();
    case 14:
      return pool.ContiguousKV(sequence, 0, 0).status();
    case 15:
      return GroupIn(pool, 0).ExportCsr(sequences).status();
    case 16:
      return GroupIn(pool, 0).ExportTable(sequences).status();
    default:
      return GroupIn(pool, 0).SlotMapping(sequence, 1, 0).status();
  }
}

// Both twins must refuse misuse.
void PagedDriver::Misuse(const PagedOp& op) {
  const bool is_new = op.c >= kNewMisuse;
  const auto call = [&](PagedPool& pool) {
    return is_new ? MakeNewMisuse(pool, Pick(op.a), op) : MakeMisuse(pool, op);
  };
  const Status reference = call(*reference_);
  ExpectSame(reference, call(*optimized_), "misuse");
  Expect(reference.code() == StatusCode::kInvalidArgument ||
             reference.code() == StatusCode::kFailedPrecondition,
         [&] {
           return fmt::format("misuse {} is answered by {}", Mod(op.c, 18),
                              reference.ToString());
         });
}

void PagedDriver::End() {
  Guarded("free", [&] {
    while (!clients_.empty()) Free(clients_.begin()->first);
    CompareAll();
    Expect(reference_->Usage().used == 0, "blocks leak");
  });
}

}  // namespace kvtwin::props
