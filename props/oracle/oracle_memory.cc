// The memory that a recording needs.

#include <fmt/format.h>

#include <algorithm>

#include "core/index.h"
#include "props/oracle/oracle.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

// About the bytes that the ledger keeps for a token, for each sequence that
// holds it, and for each of its layers besides the rows themselves.
constexpr double kTokenBytes = 128;
constexpr double kSequenceBytes = 48;
constexpr double kLayerBytes = 192;
// About the bytes of each prefix of a prompt.
constexpr double kPrefixBytes = 128;

double RowsBytes(const DenseTensor& key, const DenseTensor& value) {
  return kLayerBytes + static_cast<double>(key.bytes.size()) +
         static_cast<double>(value.bytes.size());
}

}  // namespace

double Oracle::PutBytes(const TraceOp& op) const {
  return RowsBytes(op.key, *op.value) +
         kLayerBytes * static_cast<double>(positions_.size() - 1);
}

std::string Oracle::FindExcess(const TraceOp& op) {
  if (op.kind == TraceOpKind::kPut && ActiveSpec().kind != Kind::kEncoder) {
    const auto widen = [](int& most, std::int64_t extent) {
      most = std::max(most, AsInt(extent));
    };
    widen(rows_max_.k_head_dim, op.key.shape[0]);
    widen(rows_max_.kv_heads, op.key.shape[1]);
    widen(rows_max_.v_head_dim, op.value->shape[0]);
  } else if (op.kind == TraceOpKind::kStartForward) {
    all_sequences_.insert(op.sequences.begin(), op.sequences.end());
  } else if (op.kind == TraceOpKind::kFindPrefix) {
    return FindPromptExcess(op);
  } else if (op.kind == TraceOpKind::kCopyPrefix) {
    all_sequences_.insert(op.dst);
  } else if (op.kind != TraceOpKind::kRemove) {
    return "";
  }
  const double bytes =
      header_.visibility_only
          ? LedgerExcess(op)
          : CacheBytesBound(header_, rows_max_, all_sequences_.size());
  const double most =
      header_.visibility_only ? kTraceTokenBytesMax : kTraceCacheBytesMax;
  if (bytes <= most) return "";
  return fmt::format(
      "the cache would now need {:.3g} bytes, this program stops at {:.3g}",
      bytes, most);
}

double Oracle::LedgerBytes() const {
  double bytes = 0;
  for (const CacheLedger& part : ledger_->parts()) {
    for (const LedgerToken& token : part.tokens()) {
      bytes += kTokenBytes +
               kSequenceBytes * static_cast<double>(token.sequences.size());
      for (const auto& [layer, rows] : token.rows) {
        bytes += RowsBytes(rows.key, rows.value);
      }
    }
  }
  return bytes;
}

// Visits the tokens only if they may exceed the limit, so that a call does not
// take longer with each token.
double Oracle::LedgerBound(double more) {
  if (ledger_bytes_ + more - put_bytes_ > kTraceTokenBytesMax) {
    ledger_bytes_ = LedgerBytes();
  }
  return ledger_bytes_;
}

// Returns the bytes that the ledgers keep besides the rows that the recording
// brought, or an upper bound if that is within the limit.
double Oracle::LedgerExcess(const TraceOp& op) {
  if (op.kind == TraceOpKind::kPut) return 0;
  const double added =
      static_cast<double>(op.positions.size() * fresh_.size()) *
      (kTokenBytes + kSequenceBytes);
  const double bytes = LedgerBound(added) + added;
  // Other calls can at most copy the tokens, or add a sequence to them.
  ledger_bytes_ =
      op.kind == TraceOpKind::kStartForward ? bytes : 2 * ledger_bytes_;
  return bytes - put_bytes_;
}

// As FindExcess, for a prompt: the ledger keeps each prefix, and may copy all
// rows that were put.
std::string Oracle::FindPromptExcess(const TraceOp& op) {
  prompt_bytes_ += static_cast<double>(op.indices.size()) * kPrefixBytes;
  const double bytes = LedgerBound(prompt_bytes_) + prompt_bytes_ - put_bytes_;
  ledger_bytes_ += put_bytes_;
  if (bytes <= kTraceTokenBytesMax) return "";
  return fmt::format(
      "prompts and tokens would now need {:.3g} bytes, this program stops at "
      "{:.3g}",
      bytes, kTraceTokenBytesMax);
}

}  // namespace kvtwin::props
