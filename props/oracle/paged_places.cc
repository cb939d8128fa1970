// Reads the sequence and the block that each entry of a line names, for lines
// of views, of a block table, of its CSR form, and of slots.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/tensor.h"
#include "props/oracle/paged_oracle.h"
#include "props/oracle/wrong_answer.h"

namespace kvtwin::props {

using Kind = PagedTraceOpKind;

int RowCount(const PagedTraceOp& op) {
  return op.key ? AsInt(op.key->shape[2]) : 0;
}

KvView RowsOf(const PagedTraceOp& op) {
  KvView view;
  if (op.key) view.key = op.key->view();
  if (op.value) view.value = op.value->view();
  return view;
}

std::optional<Failure> PagedOracle::ReadPlaces(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  if (op.kind == Kind::kTable) return ReadTable(op, places);
  if (op.kind == Kind::kCsr) return ReadCsr(op, places);
  if (op.kind == Kind::kSlots) return ReadSlots(op, places);
  if (op.kind == Kind::kViews) return ReadViews(op, places);
  return std::nullopt;
}

std::optional<Failure> PagedOracle::ReadViews(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  const KvView actual = RowsOf(op);
  const int count = RowCount(op);
  const PagedSpec& spec = header_.spec;
  const int first = op.start.value_or(0);
  std::int64_t index = first / spec.block_size;
  for (const int block : op.blocks.value_or(std::vector<int>())) {
    // CheckExtent reports it.
    if (index > std::numeric_limits<int>::max()) break;
    places.push_back({op.seq, AsInt(index++), block});
  }
  for (const auto& [name, view, head_dim] :
       {std::tuple("key", &actual.key, spec.k_head_dim),
        {"value", &actual.value, spec.v_head_dim}}) {
    if (view->data == nullptr) continue;
    const Shape expected = {head_dim, spec.kv_heads, count, 1};
    if (view->shape == expected) continue;
    return WrongAnswer("the shape of {} is {}, expected {}", name,
                       ShapeText(view->shape), ShapeText(expected));
  }
  if (ledger_holds_) {
    if (auto failure = CheckExtent(op)) return failure;
  }
  if (!op.blocks) return std::nullopt;
  return WrongUnlessEqual("the number of blocks", Size(places),
                          BlocksFor(first % spec.block_size + count));
}

// Checks that the rows cover all positions; with a window, at least the
// positions that the window sees.
std::optional<Failure> PagedOracle::CheckExtent(const PagedTraceOp& op) const {
  const int count = RowCount(op);
  const int end = ledger_->RowCount(op.seq, op.layer);
  const int first = op.start.value_or(0);
  if (!header_.rules.window) {
    if (first != 0) {
      return WrongAnswer("start is {}, a pool without a window shows all rows",
                         first);
    }
    auto failure = WrongUnlessEqual("the number of rows", count, end);
    if (failure && count < end) {
      failure->text += fmt::format(": {} are missing", end - count);
    }
    return failure;
  }
  const int low = ledger_->Low(op.seq);
  if (count == 0 && low >= end) return std::nullopt;
  if (first + std::int64_t{count} != end) {
    return WrongAnswer("the rows end at position {}, expected {}",
                       first + std::int64_t{count}, end);
  }
  if (first <= low) return std::nullopt;
  return WrongAnswer(
      "the rows begin at position {}, a window of {} positions needs them from "
      "{} on",
      first, *header_.rules.window, low);
}

std::optional<Failure> PagedOracle::ReadTable(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  auto block = op.table.blocks.begin();
  for (std::size_t i = 0; i < op.sequences.size(); ++i) {
    const int sequence = op.sequences[i];
    const int len = SeqLen(sequence);
    if (op.table.seq_lens[i] != len) {
      return WrongAnswer("seq_lens[{}] is {}, sequence {} has {} tokens", i,
                         op.table.seq_lens[i], sequence, len);
    }
    const int count = BlocksFor(len);
    if (op.table.columns < count) {
      return WrongAnswer("columns is {}, sequence {} has {} blocks",
                         op.table.columns, sequence, count);
    }
    for (int j = 0; j < op.table.columns; ++j, ++block) {
      if (j < count) {
        places.push_back({sequence, j, *block});
      } else if (*block != -1) {
        return WrongAnswer(
            "column {} of sequence {}, which has {} blocks, is {}", j, sequence,
            count, *block);
      }
    }
  }
  return std::nullopt;
}

std::optional<Failure> PagedOracle::ReadCsr(const PagedTraceOp& op,
                                            std::vector<Place>& places) const {
  const PagedCsr& csr = op.csr;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < op.sequences.size(); ++i) {
    const int sequence = op.sequences[i];
    const int len = SeqLen(sequence);
    const int count = BlocksFor(len);
    const std::int64_t begin = std::exchange(end, end + count);
    if (csr.indptr[i] != begin || csr.indptr[i + 1] != end) {
      return WrongAnswer(
          "indptr has {} and {} for sequence {}, expected {} and {}",
          csr.indptr[i], csr.indptr[i + 1], sequence, begin, end);
    }
    if (end > std::ssize(csr.indices)) break;
    for (int j = 0; j < count; ++j) {
      places.push_back({sequence, j, At(csr.indices, begin + j)});
    }
    const int last = len - std::max(0, count - 1) * header_.spec.block_size;
    if (csr.last_page_len[i] != last) {
      return WrongAnswer("last_page_len[{}] is {}, sequence {} has {} tokens",
                         i, csr.last_page_len[i], sequence, len);
    }
  }
  if (op.sequences.empty()) {
    const auto failure = WrongUnlessEqual("indptr[0]", csr.indptr[0], 0);
    if (failure) return failure;
  }
  return WrongUnlessEqual("the number of indices", std::ssize(csr.indices),
                          end);
}

std::optional<Failure> PagedOracle::ReadSlots(
    const PagedTraceOp& op, std::vector<Place>& places) const {
  const int size = header_.spec.block_size;
  std::int64_t position = op.begin;
  for (const int slot : op.slots) {
    const bool gone = IsGone(op.seq, AsInt(position / size));
    if (!gone && (slot < 0 || slot % size != position % size)) {
      return WrongAnswer(
          "slot {} of position {} is not at offset {} of a block of {}", slot,
          position, position % size, size);
    }
    places.push_back({op.seq, AsInt(position / size), slot / size});
    ++position;
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
