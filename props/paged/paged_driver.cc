#include "props/paged/paged_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <ostream>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/hash.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

constexpr std::string_view kSlots = "SlotMapping of the reference";

std::vector<std::byte> BytesOf(const TensorView& view) {
  return CopyOf(view, view.dtype).bytes;
}

// Returns whether the row at index `i` of `dimension` is equal to `expected`.
bool IsRow(const TensorView& view, int dimension, int i,
           const DenseTensor& expected) {
  return BytesOf(Slice(view, dimension, i)) == expected.bytes;
}

// Returns whether the views have the same block and equal rows.
bool SameViews(const PagedView& a, const PagedView& b) {
  return a.start == b.start && a.length == b.length && a.block == b.block &&
         a.key.shape == b.key.shape && a.value.shape == b.value.shape &&
         BytesOf(a.key) == BytesOf(b.key) &&
         BytesOf(a.value) == BytesOf(b.value);
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
  dtypes.insert(other.dtypes.begin(), other.dtypes.end());
}

PagedDriver::PagedDriver(const PagedSpec& spec, PagedCoverageCounts* counts,
                         const PagedMaker& make, bool same_messages)
    : spec_(spec),
      make_(make),
      same_messages_(same_messages),
      ledger_(spec),
      counts_(counts) {}

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
               "{}: {} by the reference, {} by the optimized "
               "twin",
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

void PagedDriver::Open(const PagedOp& op) {
  if (clients_.size() > 5) return;
  PagedClient client = DrawPrompt(op, seen_);
  const Result<int> reference = reference_->Open(client.tokens, client.key);
  const Result<int> optimized = optimized_->Open(client.tokens, client.key);
  ExpectSame(reference.status(), optimized.status(), "Open");
  if (!reference.ok()) return;
  Expect(*reference == *optimized, "Open: other numbers");
  const int taken =
      Need(reference_->SeqLen(*reference), "SeqLen of the reference");
  Expect(ledger_.MayOpen(client.tokens, client.key, taken), [&] {
    return fmt::format("Open: {} tokens are taken over that were never there",
                       taken);
  });
  ledger_.Open(*reference, client.tokens, client.key, taken);
  client.tokens.resize(AsSize(taken));
  clients_[*reference] = client;
  if (counts_ != nullptr) counts_->found += taken / spec_.block_size;
}

void PagedDriver::Fork(const PagedOp& op) {
  if (clients_.size() > 5) return;
  const int from = Pick(op.a);
  const int len = Mod(op.b, ledger_.SeqLen(from) + 1);
  const Result<int> reference = reference_->Fork(from, len);
  const Result<int> optimized = optimized_->Fork(from, len);
  ExpectSame(reference.status(), optimized.status(), "Fork");
  if (!reference.ok()) return;
  Expect(*reference == *optimized, "Fork: other numbers");
  ledger_.Fork(from, *reference, len);
  PagedClient client = clients_.at(from);
  client.tokens.resize(AsSize(len));
  client.pending.clear();
  clients_[*reference] = client;
}

void PagedDriver::Append(const PagedOp& op) {
  const int sequence = Pick(op.a);
  PagedClient& client = clients_.at(sequence);
  const std::vector<std::int32_t> tokens = DrawTokens(op, spec_);
  const int count = Size(tokens);
  const std::vector<std::int32_t> before = client.pending;
  client.pending = tokens;
  // Some appends go to the first layer only, so that no token can be committed.
  // Layers with rows of different tokens would be a mistake of the client.
  const int layers = op.c % 5 == 0 && before.empty() ? 1 : spec_.layers;
  for (int layer = 0; layer < layers; ++layer) {
    PagedRows rows = PendingRows(client, spec_, layer);
    if (op.c % 2 == 1) rows = AsStored(rows, spec_);
    const auto& [key, value] = rows;
    const PagedUsage usage = reference_->Usage();
    const int len = ledger_.SeqLen(sequence);
    // The slot of the last token changes if its block is copied.
    const auto last = Need(
        reference_->SlotMapping(sequence, std::max(0, len - 1), len), kSlots);
    const auto reference =
        reference_->Append(sequence, layer, key.view(), value.view());
    const auto optimized =
        optimized_->Append(sequence, layer, key.view(), value.view());
    ExpectSame(reference.status(), optimized.status(), "Append");
    if (!reference.ok()) {
      if (counts_ != nullptr) ++counts_->full;
      Expect(reference_->Usage() == usage, "Append: refused, but not nothing");
      // If the first layer was appended to, its old pending rows are replaced.
      if (layer == 0) client.pending = before;
      return;
    }
    if (counts_ != nullptr) {
      const PagedUsage now = reference_->Usage();
      const auto moved = Need(
          reference_->SlotMapping(sequence, std::max(0, len - 1), len), kSlots);
      counts_->copied += moved != last ? 1 : 0;
      counts_->evicted += std::max(0, usage.cached - now.cached);
      counts_->longest = std::max<std::int64_t>(counts_->longest, count);
    }
    ledger_.Append(sequence, layer, key.view(), value.view());
    Expect(reference->start == ledger_.SeqLen(sequence) &&
               optimized->start == reference->start &&
               optimized->views.size() == reference->views.size(),
           "Append: other views");
    int at = reference->start;
    for (std::size_t i = 0; i < reference->views.size(); ++i) {
      const PagedView& view = reference->views[i];
      Expect(view.start == at && SameViews(view, optimized->views[i]),
             "Append: other views");
      at += view.length;
    }
    Expect(at == reference->start + count, "Append: views of other rows");
  }
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
  if (!reference.ok()) return;
  ledger_.Commit(sequence, count,
                 known ? std::span<const std::int32_t>(tokens)
                       : std::span<const std::int32_t>());
  client.tokens.insert(client.tokens.end(), tokens.begin(), tokens.end());
  client.pending.clear();
  if (seen_.size() < 20) seen_.push_back(client.tokens);
}

void PagedDriver::Truncate(const PagedOp& op) {
  const int sequence = Pick(op.a);
  const int all = ledger_.SeqLen(sequence);
  const int len = Mod(op.b, all + 1);
  ExpectSame(reference_->Truncate(sequence, len),
             optimized_->Truncate(sequence, len), "Truncate");
  ledger_.Truncate(sequence, len);
  PagedClient& client = clients_.at(sequence);
  client.tokens.resize(AsSize(len));
  client.pending.clear();
  if (counts_ != nullptr && len < all) ++counts_->truncated;
}

void PagedDriver::Free(int sequence) {
  ExpectSame(reference_->Free(sequence), optimized_->Free(sequence), "Free");
  ledger_.Free(sequence);
  clients_.erase(sequence);
}

// Makes a call that is misuse: both twins must refuse it.
void PagedDriver::Misuse(const PagedOp& op) {
  const int sequence = Pick(op.a);
  const int none = 1000 + Mod(op.b, 3);
  const float number = 0;
  const Shape shape = {spec_.k_head_dim + 1, spec_.kv_heads, 1, 1};
  TensorView wide = DenseView(&number, DType::kF32, shape);
  wide.stride = {0, 0, 0, 0};
  TensorView right = wide;
  right.shape[0] = spec_.k_head_dim;
  TensorView value = right;
  value.shape[0] = spec_.v_head_dim;
  TensorView nothing = right;
  nothing.data = nullptr;
  const std::array<std::int32_t, 2> negative = {0, -1};
  const std::array<int, 1> sequences = {none};
  const auto call = [&](PagedPool& pool) -> Status {
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
        return pool.ExportCsr(sequences).status();
      case 16:
        return pool.ExportTable(sequences).status();
      default:
        return pool.SlotMapping(sequence, 1, 0).status();
    }
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

void PagedDriver::CompareSequence(int sequence) {
  const int len = ledger_.SeqLen(sequence);
  Expect(Need(reference_->SeqLen(sequence), "SeqLen of the reference") == len &&
             Need(optimized_->SeqLen(sequence), "SeqLen") == len,
         "SeqLen differs");
  for (int layer = 0; layer < spec_.layers; ++layer) {
    const auto rows = ledger_.RowsOf(sequence, layer);
    CompareViews(sequence, layer, rows);
    ComparePacked(sequence, layer, rows);
    if (!rows.empty()) {
      const int all = Size(rows);
      CompareContiguous(sequence, layer, rows, all);
      // The blocks of the first tokens may be in order even if later ones are
      // not.
      CompareContiguous(sequence, layer, rows, (all + 1) / 2);
    }
  }
  const auto slots =
      Need(optimized_->SlotMapping(sequence, 0, len), "SlotMapping");
  Expect(Need(reference_->SlotMapping(sequence, 0, len), kSlots) == slots,
         "SlotMapping differs");
  CheckSlots(sequence);
}

// Both twins take SlotMapping from core/, so comparing them shows nothing: the
// slots of any range, up to the last appended token, are checked by the views.
void PagedDriver::CheckSlots(int sequence) {
  const int end = ledger_.End(sequence);
  int layer = 0;  // A layer that has rows up to `end`.
  while (ledger_.RowCount(sequence, layer) < end) ++layer;
  std::vector<std::int64_t> all;
  for (const PagedView& view :
       Need(optimized_->Views(sequence, layer), "Views")) {
    for (int i = 0; i < view.length; ++i) {
      const int offset = (view.start + i) % spec_.block_size;
      all.push_back(std::int64_t{view.block} * spec_.block_size + offset);
    }
  }
  Expect(std::ssize(all) >= end, "Views: not all rows");
  const auto check = [&](int first, int last) {
    const std::vector<std::int64_t> expected(all.begin() + first,
                                             all.begin() + last);
    Expect(Need(optimized_->SlotMapping(sequence, first, last),
                "SlotMapping") == expected,
           [&] {
             return fmt::format(
                 "SlotMapping: positions {} to {} of sequence {} are not where "
                 "the views are",
                 first, last, sequence);
           });
  };
  // Each comparison checks a range with another begin, a range with another
  // end, and a range with both.
  const int first = Mod(comparisons_, end + 1);
  const int last = first + Mod(comparisons_ / 2, end - first + 1);
  check(first, end);
  check(0, last);
  check(first, last);
}

void PagedDriver::CompareViews(int sequence, int layer, const Rows& rows) {
  const auto a =
      Need(reference_->Views(sequence, layer), "Views of the reference");
  const auto b = Need(optimized_->Views(sequence, layer), "Views");
  Expect(a.size() == b.size(), "Views differ");
  std::size_t position = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    Expect(SameViews(a[i], b[i]) && a[i].key.stride == b[i].key.stride &&
               a[i].value.stride == b[i].value.stride,
           [&] {
             return fmt::format("Views: block {} of sequence {} differs", i,
                                sequence);
           });
    Expect(a[i].start == AsInt(position), "Views: not one after another");
    for (int t = 0; t < a[i].length; ++t, ++position) {
      Expect(position < rows.size() &&
                 IsRow(a[i].key, 2, t, rows[position].key) &&
                 IsRow(a[i].value, 2, t, rows[position].value),
             [&] {
               return fmt::format("position {} of sequence {} has another row",
                                  position, sequence);
             });
    }
  }
  Expect(position == rows.size(), "Views: not all rows");
  CheckBlocks(*reference_, "Blocks of the reference", layer, a);
  CheckBlocks(*optimized_, "Blocks", layer, b);
}

// The rows of the views, which are right, lie in the blocks. A backend has no
// Blocks.
void PagedDriver::CheckBlocks(const PagedPool& pool, std::string_view name,
                              int layer, const std::vector<PagedView>& views) {
  const Result<PagedKv> blocks = pool.Blocks(layer);
  if (blocks.status().code() == StatusCode::kNotSupported) return;
  Need(blocks.status(), name);
  const bool head_major = spec_.layout == PagedLayout::kHeadMajor;
  const auto holds = [&](const TensorView& all, const PagedView& view,
                         const TensorView& rows) {
    Shape shape = {rows.shape[0], spec_.kv_heads, spec_.block_size,
                   spec_.blocks};
    std::size_t heads = 1;
    std::size_t tokens = 2;
    if (head_major) {
      std::swap(shape[1], shape[2]);
      std::swap(heads, tokens);
    }
    const std::int64_t offset = view.start % spec_.block_size;
    return all.dtype == rows.dtype && all.shape == shape &&
           all.stride[0] == rows.stride[0] &&
           all.stride[heads] == rows.stride[1] &&
           all.stride[tokens] == rows.stride[2] &&
           static_cast<const std::byte*>(all.data) +
                   view.block * all.stride[3] + offset * all.stride[tokens] ==
               rows.data;
  };
  for (const PagedView& view : views) {
    Expect(holds(blocks->key, view, view.key) &&
               holds(blocks->value, view, view.value),
           "Blocks: not what the views are");
  }
}

void PagedDriver::ComparePacked(int sequence, int layer, const Rows& rows) {
  const Status reference = reference_->ViewsPacked(sequence, layer).status();
  std::vector<PagedView> views;
  if (reference.ok()) {
    views = Need(optimized_->Views(sequence, layer), "Views");
  }
  const auto packed = optimized_->ViewsPacked(sequence, layer);
  ExpectSame(reference, packed.status(), "ViewsPacked");
  if (!packed.ok()) return;
  Expect(packed->size() == views.size(), "ViewsPacked differ");
  std::size_t position = 0;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const PagedView& view = (*packed)[i];
    Expect(view.start == views[i].start && view.length == views[i].length &&
               view.block == views[i].block &&
               view.key.shape[1] == view.length &&
               view.value.shape[1] == view.length,
           "ViewsPacked: other blocks than Views has");
    for (int t = 0; t < view.length; ++t, ++position) {
      Expect(IsRow(view.key, 1, t, rows[position].key) &&
                 IsRow(view.value, 1, t, rows[position].value),
             "ViewsPacked: other rows");
    }
    Expect(
        view.key.stride[1] == RunBytes(spec_.dtype, spec_.k_head_dim) &&
            view.value.stride[1] ==
                RunBytes(spec_.v_dtype.value_or(spec_.dtype), spec_.v_head_dim),
        "ViewsPacked: not packed");
  }
}

// Both twins take ContiguousKV from core/, so it is checked by the views.
void PagedDriver::CompareContiguous(int sequence, int layer, const Rows& rows,
                                    int kv_len) {
  const auto views = Need(optimized_->Views(sequence, layer), "Views");
  const auto reference = Need(reference_->ContiguousKV(sequence, layer, kv_len),
                              "ContiguousKV of the reference");
  const auto optimized =
      Need(optimized_->ContiguousKV(sequence, layer, kv_len), "ContiguousKV");
  Expect(reference.has_value() == optimized.has_value(),
         "ContiguousKV differs");
  bool in_order = true;
  for (std::size_t i = 1; i < views.size() && views[i].start < kv_len; ++i) {
    in_order = in_order && spec_.layout == PagedLayout::kTokenMajor &&
               views[i].block == views[i - 1].block + 1;
  }
  Expect(reference.has_value() == in_order,
         "ContiguousKV: not what the views are");
  if (!reference) return;
  for (const auto& [whole, what] :
       {std::pair(&*reference, "ContiguousKV of the reference: other rows"),
        std::pair(&*optimized, "ContiguousKV: other rows")}) {
    Expect(whole->key.shape[2] == kv_len && whole->value.shape[2] == kv_len,
           what);
    for (int t = 0; t < kv_len; ++t) {
      const auto& expected = At(rows, t);
      Expect(IsRow(whole->key, 2, t, expected.key) &&
                 IsRow(whole->value, 2, t, expected.value),
             what);
    }
  }
}

// Both twins take the tables from core/, so they are checked by the views.
void PagedDriver::CheckTables(const std::vector<int>& sequences) {
  PagedCsr expected;
  PagedTable padded;
  expected.indptr.push_back(0);
  std::vector<std::vector<std::int32_t>> all;
  for (const int sequence : sequences) {
    const int len = ledger_.SeqLen(sequence);
    std::vector<std::int32_t>& blocks = all.emplace_back();
    std::vector<std::int64_t> slots;
    int last = 0;
    const auto views = Need(optimized_->Views(sequence, 0), "Views");
    for (const PagedView& view : views) {
      if (view.start >= len) break;  // Not committed.
      blocks.push_back(view.block);
      last = std::min(view.length, len - view.start);
      for (int i = 0; i < last; ++i) {
        slots.push_back(std::int64_t{view.block} * spec_.block_size + i);
      }
    }
    Expect(
        Need(optimized_->SlotMapping(sequence, 0, len), "SlotMapping") == slots,
        "SlotMapping: not where the views are");
    expected.indices.insert(expected.indices.end(), blocks.begin(),
                            blocks.end());
    expected.indptr.push_back(
        static_cast<std::int32_t>(expected.indices.size()));
    expected.last_page_len.push_back(last);
    padded.seq_lens.push_back(len);
    padded.columns = std::max(padded.columns, Size(blocks));
  }
  for (std::vector<std::int32_t>& blocks : all) {
    blocks.resize(AsSize(padded.columns), -1);
    padded.blocks.insert(padded.blocks.end(), blocks.begin(), blocks.end());
  }
  Expect(Need(optimized_->ExportCsr(sequences), "ExportCsr") == expected,
         "ExportCsr: not what the views are");
  Expect(Need(optimized_->ExportTable(sequences), "ExportTable") == padded,
         "ExportTable: not what the views are");
}

void PagedDriver::CompareAll() {
  ++comparisons_;
  std::vector<int> sequences;
  for (const auto& [sequence, client] : clients_) {
    sequences.push_back(sequence);
    CompareSequence(sequence);
  }
  Expect(Need(reference_->ExportCsr(sequences), "ExportCsr of the reference") ==
             Need(optimized_->ExportCsr(sequences), "ExportCsr"),
         "ExportCsr differs");
  Expect(Need(reference_->ExportTable(sequences),
              "ExportTable of the reference") ==
             Need(optimized_->ExportTable(sequences), "ExportTable"),
         "ExportTable differs");
  CheckTables(sequences);
  const PagedUsage usage = reference_->Usage();
  Expect(usage == optimized_->Usage(), "Usage differs");
  digest_ = HashBytes(&usage, sizeof(usage), digest_);
  Expect(usage.free + usage.cached + usage.used == spec_.blocks,
         "Usage does not add up");
}

void PagedDriver::End() {
  Guarded("free", [&] {
    while (!clients_.empty()) Free(clients_.begin()->first);
    CompareAll();
    Expect(reference_->Usage().used == 0, "blocks leak");
  });
}

}  // namespace kvtwin::props
