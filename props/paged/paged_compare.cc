// The comparisons of PagedDriver: what the pools show against the ledger, and
// against one another.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/base/hash.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_driver.h"

namespace kvtwin::props {
namespace {

std::vector<std::byte> BytesOf(const TensorView& view) {
  return CopyOf(view, view.dtype).bytes;
}

std::string UsageText(const PagedUsage& usage) {
  return fmt::format("{} free, {} cached, {} used, {} shared", usage.free,
                     usage.cached, usage.used, usage.shared);
}

// Returns whether the row at index `i` of `dimension` is equal to `expected`.
bool IsRow(const TensorView& view, std::size_t dimension, int i,
           const DenseTensor& expected) {
  return BytesOf(Slice(view, dimension, i)) == expected.bytes;
}

// Returns the blocks of the first `tokens` tokens of the sequence that the
// views show; -1 for a block of which no row is shown.
std::vector<std::int32_t> BlocksIn(const std::vector<PagedView>& views,
                                   int tokens, int block_size) {
  std::vector<std::int32_t> blocks(
      AsSize((tokens + block_size - 1) / block_size), -1);
  for (const PagedView& view : views) {
    if (view.start < tokens) At(blocks, view.start / block_size) = view.block;
  }
  return blocks;
}

// Returns the table of sequences that have these blocks and lengths.
PagedTable TableOf(std::vector<std::vector<std::int32_t>> sequences,
                   const std::vector<int>& lens) {
  PagedTable table;
  table.seq_lens = lens;
  for (const auto& blocks : sequences) {
    table.columns = std::max(table.columns, Size(blocks));
  }
  for (auto& blocks : sequences) {
    blocks.resize(AsSize(table.columns), -1);
    table.blocks.insert(table.blocks.end(), blocks.begin(), blocks.end());
  }
  return table;
}

}  // namespace

bool SameViews(const PagedView& a, const PagedView& b) {
  return a.start == b.start && a.length == b.length && a.block == b.block &&
         a.key.shape == b.key.shape && a.value.shape == b.value.shape &&
         BytesOf(a.key) == BytesOf(b.key) &&
         BytesOf(a.value) == BytesOf(b.value);
}

void PagedDriver::CompareSequence(int sequence) {
  const int len = ledger_.SeqLen(sequence);
  const int reference =
      Need(reference_->SeqLen(sequence), "SeqLen of the reference");
  const int optimized = Need(optimized_->SeqLen(sequence), "SeqLen");
  Expect(reference == len && optimized == len, [&] {
    return fmt::format(
        "SeqLen differs: {} by the reference, {} by the pool under test; the "
        "sequence has {} committed tokens",
        reference, optimized, len);
  });
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
  for (int group = 0; group < GroupCount(); ++group) {
    const auto slots =
        Need(GroupIn(*optimized_, group).SlotMapping(sequence, 0, len),
             "SlotMapping");
    ExpectEqual(
        "SlotMapping",
        Need(GroupIn(*reference_, group).SlotMapping(sequence, 0, len), kSlots),
        slots);
    CheckSlots(group, sequence);
  }
}

// Both twins take SlotMapping from core/, so comparing them shows nothing: the
// slots of any range, up to the last appended token, are checked by the views.
void PagedDriver::CheckSlots(int group, int sequence) {
  const PagedSpec& spec = SpecOfGroup(group);
  int layer = FirstLayer(group);  // The layer that has the most rows.
  int end = 0;
  for (int i = layer, last = layer + spec.layers; i < last; ++i) {
    if (ledger_.RowCount(sequence, i) <= end) continue;
    layer = i;
    end = ledger_.RowCount(sequence, i);
  }
  std::vector<std::int64_t> all(AsSize(end), -1);
  const int rows = spec.states ? 1 : spec.block_size;
  for (const PagedView& view :
       Need(optimized_->Views(sequence, layer), "Views")) {
    for (int i = 0; i < view.length; ++i) {
      Expect(view.start + i < end, "Views: rows of no token");
      At(all, view.start + i) =
          std::int64_t{view.block} * rows + (view.start + i) % rows;
    }
  }
  const auto check = [&](int first, int last) {
    const std::vector<std::int64_t> expected(all.begin() + first,
                                             all.begin() + last);
    Expect(Need(GroupIn(*optimized_, group).SlotMapping(sequence, first, last),
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
  for (std::size_t i = 0; i < a.size(); ++i) {
    Expect(SameViews(a[i], b[i]) && a[i].key.stride == b[i].key.stride &&
               a[i].value.stride == b[i].value.stride,
           [&] {
             return fmt::format("Views: block {} of sequence {} differs", i,
                                sequence);
           });
  }
  CheckShown(sequence, layer, a, Size(rows));
  for (const PagedView& view : a) {
    for (int t = 0; t < view.length; ++t) {
      const int position = view.start + t;
      Expect(position < Size(rows) &&
                 IsRow(view.key, 2, t, At(rows, position).key) &&
                 IsRow(view.value, 2, t, At(rows, position).value),
             [&] {
               return fmt::format("position {} of sequence {} has another row",
                                  position, sequence);
             });
    }
  }
  CheckBlocks(*reference_, "Blocks of the reference", layer, a);
  CheckBlocks(*optimized_, "Blocks", layer, b);
}

// The views show all rows that the next token sees, one after another; of a
// group of states, the last state (P12, P13).
void PagedDriver::CheckShown(int sequence, int layer,
                             const std::vector<PagedView>& views,
                             int rows) const {
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  const int len = ledger_.SeqLen(sequence);
  if (spec.states) {
    const auto shows = [&](int position) {
      return position < 0 ||
             std::ranges::count(views, position, &PagedView::start) == 1;
    };
    Expect(shows(len - 1) && shows(rows - 1), "Views: the state is missing");
    return;
  }
  int position = spec.window ? std::max(0, len - *spec.window) : 0;
  if (!views.empty() && spec.window) {
    // Earlier rows of the block are still there.
    Expect(views[0].start <= position, "Views: rows in the window are missing");
    position = views[0].start;
  }
  for (const PagedView& view : views) {
    Expect(view.start == position, "Views: not one after another");
    position += view.length;
  }
  Expect(position >= rows, "Views: not all rows");
}

// The rows of the views, which are right, lie in the blocks. A backend has no
// Blocks.
void PagedDriver::CheckBlocks(const PagedPool& pool, std::string_view name,
                              int layer, const std::vector<PagedView>& views) {
  const Result<PagedKv> blocks = pool.Blocks(layer);
  if (blocks.status().code() == StatusCode::kNotSupported) return;
  Need(blocks.status(), name);
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  const bool head_major = spec.layout == PagedLayout::kHeadMajor;
  const int in_block = spec.states ? 1 : spec.block_size;
  const auto holds = [&](const TensorView& all, const PagedView& view,
                         const TensorView& rows) {
    Shape shape = {rows.shape[0], spec.kv_heads, in_block, spec.blocks};
    std::size_t heads = 1;
    std::size_t tokens = 2;
    if (head_major) {
      std::swap(shape[1], shape[2]);
      std::swap(heads, tokens);
    }
    const std::int64_t offset = view.start % in_block;
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
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const PagedView& view = (*packed)[i];
    Expect(view.start == views[i].start && view.length == views[i].length &&
               view.block == views[i].block &&
               view.key.shape[1] == view.length &&
               view.value.shape[1] == view.length,
           "ViewsPacked: other blocks than Views has");
    for (int t = 0; t < view.length; ++t) {
      const auto& expected = At(rows, view.start + t);
      Expect(IsRow(view.key, 1, t, expected.key) &&
                 IsRow(view.value, 1, t, expected.value),
             "ViewsPacked: other rows");
    }
    Expect(view.key.stride[1] == RunBytes(spec.dtype, spec.k_head_dim) &&
               view.value.stride[1] ==
                   RunBytes(spec.v_dtype.value_or(spec.dtype), spec.v_head_dim),
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
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  bool in_order = !spec.states && !views.empty() && views[0].start == 0;
  for (std::size_t i = 1; i < views.size() && views[i].start < kv_len; ++i) {
    in_order = in_order && spec.layout == PagedLayout::kTokenMajor &&
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
void PagedDriver::CheckTables(int group, const std::vector<int>& sequences) {
  const int size = SpecOfGroup(group).block_size;
  const PagedPool& pool = GroupIn(*optimized_, group);
  PagedCsr expected;
  expected.indptr.push_back(0);
  std::vector<int> lens;
  std::vector<std::vector<std::int32_t>> all;
  for (const int sequence : sequences) {
    const int len = ledger_.SeqLen(sequence);
    const auto views =
        Need(optimized_->Views(sequence, FirstLayer(group)), "Views");
    const auto& blocks = all.emplace_back(BlocksIn(views, len, size));
    int last = 0;
    for (const PagedView& view : views) {
      if (view.start >= len) break;  // Not committed.
      last = (std::min(view.start + view.length, len) - 1) % size + 1;
    }
    expected.indices.insert(expected.indices.end(), blocks.begin(),
                            blocks.end());
    expected.indptr.push_back(
        static_cast<std::int32_t>(expected.indices.size()));
    expected.last_page_len.push_back(last);
    lens.push_back(len);
  }
  Expect(Need(pool.ExportCsr(sequences), "ExportCsr") == expected,
         "ExportCsr: not what the views are");
  Expect(Need(pool.ExportTable(sequences), "ExportTable") ==
             TableOf(std::move(all), lens),
         "ExportTable: not what the views are");
}

// Checks the table of a layer by the views. A backend has no such table.
void PagedDriver::CheckLayerTable(int layer,
                                  const std::vector<int>& sequences) {
  std::vector<int> lens;
  std::vector<std::vector<std::int32_t>> all;
  for (const int sequence : sequences) {
    lens.push_back(ledger_.RowCount(sequence, layer));
    all.push_back(BlocksIn(Need(optimized_->Views(sequence, layer), "Views"),
                           lens.back(), SpecOfLayer(spec_, layer).block_size));
  }
  const PagedTable expected = TableOf(std::move(all), lens);
  for (const auto& [pool, name] :
       {std::pair(reference_.get(), "ExportLayerTable of the reference"),
        std::pair(optimized_.get(), "ExportLayerTable")}) {
    const auto table = pool->ExportLayerTable(sequences, layer);
    const StatusCode code = table.status().code();
    if (!same_messages_ && code == StatusCode::kNotSupported) continue;
    Expect(Need(table, name) == expected,
           "ExportLayerTable: not what the views are");
  }
}

void PagedDriver::CheckAttention() {
  if (!asker_) return;
  ForEachAsked(*asker_, ledger_, [&](int layer, const std::vector<int>& batch) {
    const std::int64_t judged =
        AskOutputs(*asker_, ledger_, layer, batch, *optimized_);
    if (counts_ != nullptr) counts_->outputs += judged;
  });
}

void PagedDriver::CompareTables(int group, const std::vector<int>& sequences) {
  const PagedPool& reference = GroupIn(*reference_, group);
  const PagedPool& optimized = GroupIn(*optimized_, group);
  Expect(Need(reference.ExportCsr(sequences), "ExportCsr of the reference") ==
             Need(optimized.ExportCsr(sequences), "ExportCsr"),
         "ExportCsr differs");
  Expect(
      Need(reference.ExportTable(sequences), "ExportTable of the reference") ==
          Need(optimized.ExportTable(sequences), "ExportTable"),
      "ExportTable differs");
  CheckTables(group, sequences);
}

void PagedDriver::CompareUsage(int group) {
  const PagedUsage usage = GroupIn(*reference_, group).Usage();
  const PagedUsage tested = GroupIn(*optimized_, group).Usage();
  if (usage != tested) {  // Their texts are made for a failure alone.
    ExpectEqual("Usage", UsageText(usage), UsageText(tested));
  }
  digest_ = HashBytes(&usage, sizeof(usage), digest_);
  Expect(usage.free + usage.cached + usage.used == SpecOfGroup(group).blocks,
         "Usage does not add up");
}

// The usage of a pool with groups is the sum of theirs (P15).
void PagedDriver::CheckUsageOfAll(const PagedPool& pool) {
  if (spec_.groups.empty()) return;
  PagedUsage all;
  for (int group = 0; group < GroupCount(); ++group) {
    const PagedUsage usage = GroupIn(pool, group).Usage();
    all.free += usage.free;
    all.cached += usage.cached;
    all.used += usage.used;
    all.shared += usage.shared;
  }
  const PagedUsage usage = pool.Usage();
  Expect(usage == all, [&] {
    return fmt::format("Usage: {}, the groups have {}", UsageText(usage),
                       UsageText(all));
  });
}

void PagedDriver::CompareAll() {
  ++comparisons_;
  std::vector<int> sequences;
  for (const auto& [sequence, client] : clients_) {
    sequences.push_back(sequence);
    CompareSequence(sequence);
  }
  const auto batches = BatchesOf(sequences);
  for (int layer = 0; layer < spec_.layers; ++layer) {
    CheckLayerTable(layer,
                    At(batches, Mod(comparisons_ + layer, Size(batches))));
  }
  for (int group = 0; group < GroupCount(); ++group) {
    for (const std::vector<int>& batch : batches) CompareTables(group, batch);
    CompareUsage(group);
  }
  CheckUsageOfAll(*reference_);
  if (same_messages_) CheckUsageOfAll(*optimized_);  // A backend may have none.
  CheckAttention();
}

}  // namespace kvtwin::props
