#include "props/compare/visibility.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/elements.h"
#include "core/mask_elements.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

std::uint64_t HashDense(const DenseTensor& row, std::uint64_t seed) {
  return HashBytes(row.bytes.data(), row.bytes.size(), seed);
}

// Returns the hash of a whole row; equal rows have equal hashes.
std::uint64_t HashRow(const TensorView& row, std::uint64_t seed) {
  const TensorView dense = DenseView(row.data, row.dtype, row.shape);
  if (row.stride[0] == dense.stride[0] && row.stride[1] == dense.stride[1]) {
    return HashBytes(row.data, DenseBytes(row.dtype, row.shape), seed);
  }
  return HashDense(CopyOf(row, row.dtype), seed);
}

std::uint64_t HashColumn(const KvView& view, std::int64_t column,
                         VLayout v_layout) {
  const std::uint64_t key = HashRow(Slice(view.key, 2, column), 0);
  if (view.value.data == nullptr) return key;
  return HashRow(RowOf(view.value, v_layout, column), key);
}

std::string ElementsText(const TensorView& row) {
  constexpr std::int64_t kShown = 8;
  std::string text = "[";
  const std::int64_t count = row.elements();
  for (std::int64_t n = 0; n < std::min(count, kShown); ++n) {
    const auto& [d0, d1, d2, d3] = row.shape;
    text += fmt::format("{}{}", n == 0 ? "" : ", ",
                        ElementText(row, n % d0, n / d0 % d1, n / d0 / d1 % d2,
                                    n / d0 / d1 / d2));
  }
  return text + (count > 8 ? ", ...]" : "]");
}

std::string TokenText(const LedgerToken& token, int layer) {
  std::string text =
      fmt::format("the token (sequence {}, position {})",
                  fmt::join(token.sequences, "+"), token.position);
  const auto rows = token.rows.find(layer);
  if (rows == token.rows.end()) return text;
  return text + fmt::format(" K {} V {}", ElementsText(rows->second.key.view()),
                            ElementsText(rows->second.value.view()));
}

Failure WrongRow(int row, int column, std::string text) {
  Failure failure = MakeFailure("subject: rows", std::move(text));
  failure.row = row;
  failure.column = column;
  return failure;
}

// Returns the hashes of all tokens in a layer; 0 for tokens that were never put
// there.
std::vector<std::uint64_t> HashTokens(const CacheLedger& ledger, int layer,
                                      bool with_value) {
  std::vector<std::uint64_t> hashes;
  hashes.reserve(ledger.tokens().size());
  for (const LedgerToken& token : ledger.tokens()) {
    const auto rows = token.rows.find(layer);
    hashes.push_back(0);
    if (rows == token.rows.end()) continue;
    hashes.back() = HashDense(rows->second.key, 0);
    if (!with_value) continue;
    hashes.back() = HashDense(rows->second.value, hashes.back());
  }
  return hashes;
}

// Returns what exactly is wrong with `row`, if anything: matches the columns
// that it sees with the expected tokens, one by one. Tokens that were never put
// in this layer may be any of the remaining columns.
std::optional<Failure> Explain(const CacheLedger& ledger, int layer,
                               const KvView& view, VLayout v_layout, int row,
                               const std::vector<std::uint64_t>& token_hashes) {
  std::vector<const LedgerToken*> due;
  std::vector<std::uint64_t> due_hashes;
  // Among tokens with equal rows, tokens that must be present are matched
  // first.
  for (const bool may_miss : {false, true}) {
    for (std::size_t t = 0; t < token_hashes.size(); ++t) {
      const LedgerToken& token = ledger.tokens()[t];
      if (!ledger.MaySee(row, token)) continue;
      if (ledger.MayMiss(row, token) != may_miss) continue;
      due.push_back(&token);
      due_hashes.push_back(token_hashes[t]);
    }
  }
  auto unknown = std::count(due_hashes.begin(), due_hashes.end(), 0U);
  std::ptrdiff_t spare = 0;  // Unknown tokens that may be missing.
  for (std::size_t i = 0; i < due.size(); ++i) {
    if (due_hashes[i] == 0 && ledger.MayMiss(row, *due[i])) ++spare;
  }
  Failure wrong = WrongRow(row, -1, "");
  for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
    if (!MaskAllows(view.mask, column, row)) continue;
    const std::uint64_t hash = HashColumn(view, column, v_layout);
    bool found = false;
    for (std::size_t i = 0; i < due.size() && !found; ++i) {
      if (due[i] == nullptr || due_hashes[i] != hash) continue;
      due[i] = nullptr;
      found = true;
    }
    if (!found && unknown-- > 0) continue;
    if (!found && wrong.column < 0) {
      wrong.column = static_cast<int>(column);
      wrong.text = fmt::format("row {} sees at column {} (cell {}) {}", row,
                               column, view.first_cell + column,
                               RowText(view, column, v_layout));
    }
  }
  // Reports the first token that is missing and may not be missing. A token
  // that was never put may be any remaining column.
  for (std::size_t i = 0; i < due.size(); ++i) {
    if (due[i] == nullptr || ledger.MayMiss(row, *due[i])) continue;
    if (due_hashes[i] == 0 && unknown <= spare) continue;
    wrong.text += fmt::format(
        "{} {}",
        wrong.text.empty() ? fmt::format("row {} misses", row) : "; due is",
        TokenText(*due[i], layer));
    return wrong;
  }
  if (wrong.column < 0) return std::nullopt;
  const std::uint64_t seen = HashColumn(view, wrong.column, v_layout);
  const bool again = std::ranges::find(due_hashes, seen) != due_hashes.end();
  wrong.text +=
      again ? ", which it sees more than once" : ", which it must not see";
  return wrong;
}

std::optional<Failure> FindWrongEncoderRow(const std::map<int, KvRows>& slots,
                                           int layer, const KvView& view) {
  const auto same = [](const DenseTensor& due, const TensorView& found) {
    return due.dtype == found.dtype && due.shape == found.shape &&
           due.bytes == CopyOf(found, found.dtype).bytes;
  };
  const auto slot = slots.find(layer);
  if (slot == slots.end()) return WrongRow(0, -1, "nothing was ever put here");
  const auto& [key, value] = slot->second;
  if (!same(key, view.key)) return WrongRow(0, -1, "K differs");
  if (!same(value, view.value)) return WrongRow(0, -1, "V differs");
  if (view.mask.data != nullptr) return WrongRow(0, -1, "there is a mask");
  return std::nullopt;
}

}  // namespace

RowOwners::RowOwners(const CacheLedger& ledger, int layer, const KvView& view,
                     VLayout v_layout)
    : layer_(layer), view_(view), v_layout_(v_layout) {
  for (const LedgerToken& token : ledger.tokens()) {
    const auto rows = token.rows.find(layer);
    if (rows == token.rows.end()) continue;
    tokens_.push_back({&token, HashRow(rows->second.key.view(), 0),
                       HashRow(rows->second.value.view(), 0)});
  }
}

RowOwner RowOwners::Of(std::int64_t column,
                       const std::vector<const LedgerToken*>& due) const {
  const std::uint64_t rows = HashColumn(view_, column, v_layout_);
  for (const LedgerToken* token : due) {
    if (!token->rows.contains(layer_)) return {token, true, true, rows};
  }
  const bool has_value = view_.value.data != nullptr;
  const std::uint64_t key = HashRow(Slice(view_.key, 2, column), 0);
  const std::uint64_t value =
      has_value ? HashRow(RowOf(view_.value, v_layout_, column), 0) : 0;
  const auto is_due = [&](const LedgerToken* token) {
    return std::find(due.begin(), due.end(), token) != due.end();
  };
  RowOwner best{nullptr, false, false, rows};
  int best_score = 0;
  for (const Hashes& one : tokens_) {
    const RowOwner owner{one.token, one.key == key,
                         !has_value || one.value == value, rows};
    const int score = (owner.key ? 4 : 0) + (has_value && owner.value ? 2 : 0) +
                      (is_due(one.token) ? 1 : 0);
    if (score < 2 || score <= best_score) continue;
    best = owner;
    best_score = score;
  }
  return best;
}

std::vector<std::byte> RowBytes(const TensorView& view, std::int64_t column,
                                VLayout layout) {
  const TensorView row = RowOf(view, layout, column);
  return CopyOf(row, row.dtype).bytes;
}

std::string IntsText(std::span<const int> values, std::size_t most) {
  return fmt::format(
      "[{}{}]", fmt::join(values.first(std::min(most, values.size())), ", "),
      values.size() > most ? ", ..." : "");
}

std::string ElementText(const TensorView& rows, std::int64_t i, std::int64_t j,
                        std::int64_t k, std::int64_t l) {
  const float value = LoadFrom(rows, i, j, k, l);
  if (!std::isnan(value)) return fmt::format("{}", value);
  std::uint32_t bits = 0;
  if (IsBlockDType(rows.dtype)) {  // The bits of the f32 value.
    std::memcpy(&bits, &value, sizeof(bits));
    return fmt::format("nan ({:#010x})", bits);
  }
  const std::size_t size = SizeOf(rows.dtype);
  std::memcpy(&bits, rows.at(i, j, k, l), size);  // x86 has the low byte first.
  return fmt::format("nan ({:#0{}x})", bits, 2 + 2 * size);
}

std::string RowText(const KvView& view, std::int64_t column, VLayout v_layout) {
  std::string text = "K " + ElementsText(Slice(view.key, 2, column));
  if (view.value.data == nullptr) return text;
  return text + " V " + ElementsText(RowOf(view.value, v_layout, column));
}

std::string WhyNotResumed(const reference::Ledger& ledger, int seq,
                          std::int32_t pos) {
  std::int64_t end = 0;
  for (const CacheLedger& part : ledger.parts()) {
    for (const reference::LedgerToken& token : part.tokens()) {
      if (token.HeldBy(seq)) end = std::max(end, token.position + 1);
    }
  }
  if (end == 0) return "the sequence has no tokens";
  if (pos <= end) return "tokens in the window are gone";
  return fmt::format("position {} is beyond the end, which is {}", pos, end);
}

std::optional<Failure> FindWrongRow(const reference::Ledger& ledger, int layer,
                                    const KvView& view, VLayout v_layout) {
  const CacheLedger& active = ledger.active();
  if (active.encoder()) {
    return FindWrongEncoderRow(active.slots().layers, layer, view);
  }
  const std::vector<std::uint64_t> tokens =
      HashTokens(active, layer, view.value.data != nullptr);
  const std::int64_t columns = view.mask.shape[0];
  std::vector<std::uint64_t> column_hashes(static_cast<std::size_t>(columns));
  if (view.mask.shape[1] < active.rows()) {
    return WrongRow(0, -1,
                    fmt::format("the mask has {} rows, the batch {} tokens",
                                view.mask.shape[1], active.rows()));
  }
  for (int row = 0; row < static_cast<int>(view.mask.shape[1]); ++row) {
    // Sums of hashes compare multisets: equal multisets always agree, and
    // different ones agree once in 2^64.
    std::uint64_t seen_sum = 0;
    std::int64_t seen = 0;
    for (std::int64_t column = 0; column < columns; ++column) {
      const MaskElement element = MaskElementAt(view.mask, column, row);
      if (element == MaskElement::kHides) continue;
      const bool neither = element == MaskElement::kNeither;
      if (neither || row >= active.rows()) {
        return WrongRow(row, static_cast<int>(column),
                        neither ? "the mask is neither 0 nor -inf"
                                : "a padding row sees something");
      }
      std::uint64_t& hash = column_hashes[static_cast<std::size_t>(column)];
      if (hash == 0) hash = HashColumn(view, column, v_layout);
      seen_sum += hash;
      ++seen;
    }
    if (row >= active.rows()) continue;
    bool all_known = true;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      if (!active.MaySee(row, active.tokens()[t])) continue;
      all_known = all_known && tokens[t] != 0;
      seen_sum -= tokens[t];
      --seen;
    }
    if (seen == 0 && seen_sum == 0 && all_known) continue;
    auto wrong = Explain(active, layer, view, v_layout, row, tokens);
    if (wrong) return wrong;
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
