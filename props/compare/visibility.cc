#include "props/compare/visibility.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "core/assert.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

std::uint64_t HashDense(const DenseTensor& row, std::uint64_t seed) {
  return HashBytes(row.bytes.data(), row.bytes.size(), seed);
}

// Returns the hash of a stored row as a view like `shown` has it: a recording
// has rows of q8_0 and q4_0 as the numbers that they stand for.
std::uint64_t HashStored(const DenseTensor& row, const TensorView& shown,
                         std::uint64_t seed) {
  if (!IsBlockDType(row.dtype) || IsBlockDType(shown.dtype)) {
    return HashDense(row, seed);
  }
  return HashDense(CopyOf(row.view(), shown.dtype), seed);
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

constexpr std::int64_t kElementsShown = 8;

// Returns element `n` of a row, where those of the first head come first.
std::string ElementAt(const TensorView& row, std::int64_t n) {
  const auto& [d0, d1, d2, d3] = row.shape;
  return ElementText(row, n % d0, n / d0 % d1, n / d0 / d1 % d2,
                     n / d0 / d1 / d2);
}

std::string ElementsText(const TensorView& row) {
  std::string text = "[";
  const std::int64_t count = row.elements();
  for (std::int64_t n = 0; n < std::min(count, kElementsShown); ++n) {
    text += fmt::format("{}{}", n == 0 ? "" : ", ", ElementAt(row, n));
  }
  return text + (count > kElementsShown ? ", ...]" : "]");
}

// Returns "the token (sequence 0+1, position 3)"; siblings differ only in their
// numbers: "the token (draft 1 of sequence 0, position 3)".
std::string NameOf(const LedgerToken& token) {
  const std::string draft =
      token.IsDraft() ? fmt::format("draft {} of ", token.draft) : "";
  return fmt::format("the token ({}sequence {}, position {})", draft,
                     fmt::join(token.owners(), "+"), token.position);
}

std::string TokenText(const LedgerToken& token, int layer) {
  std::string text = NameOf(token);
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
                                      const KvView& view) {
  std::vector<std::uint64_t> hashes;
  hashes.reserve(ledger.tokens().size());
  for (const LedgerToken& token : ledger.tokens()) {
    const auto rows = token.rows.find(layer);
    hashes.push_back(0);
    if (rows == token.rows.end()) continue;
    hashes.back() = HashStored(rows->second.key, view.key, 0);
    if (view.value.data == nullptr) continue;
    hashes.back() = HashStored(rows->second.value, view.value, hashes.back());
  }
  return hashes;
}

// Returns the part that is wrong in a column that is shown in place of a token,
// or in addition to all tokens.
WrongPart PartOf(const RowOwner& owner, bool replaces, bool left) {
  if (owner.token == nullptr) {
    return replaces && !left ? WrongPart::kRows : WrongPart::kMask;
  }
  if (!owner.key) return WrongPart::kKey;
  return owner.value ? WrongPart::kMask : WrongPart::kValue;
}

// Names the token whose rows are in the column of `wrong`, and notes how they
// are wrong. `replaces`: the row misses a token.
std::string OwnerText(const RowOwner& owner, const ViewNames& names,
                      bool replaces, Failure& wrong) {
  FormerRows former;
  if (owner.token == nullptr && names.former) {
    former = names.former(wrong.column);
  }
  wrong.of_left = former.left;
  wrong.part = PartOf(owner, replaces, former.left);
  if (names.owner) return names.owner(wrong.column);
  if (owner.token == nullptr) {
    return former.name.empty() ? "no token's rows" : former.name;
  }
  const std::string token = NameOf(*owner.token);
  if (owner.key && owner.value) return token;
  return fmt::format("the {} row of {} with another {} row",
                     owner.key ? "K" : "V", token, owner.key ? "V" : "K");
}

std::string NameOf(int row, const ViewNames& names) {
  return names.row ? names.row(row) : fmt::format("row {}", row);
}

// Returns the failure that the mask shows what no mask may show.
Failure WrongElement(int row, std::int64_t column, std::string text,
                     const ViewNames& names) {
  if (names.owner) {
    text = fmt::format("{} sees at column {} {}: {}", NameOf(row, names),
                       column, names.owner(column), text);
  }
  return WrongRow(row, AsInt(column), std::move(text));
}

// Returns what is wrong with `row`, if anything.
std::optional<Failure> Explain(const CacheLedger& ledger, int layer,
                               const KvView& view, VLayout v_layout, int row,
                               const ViewNames& names) {
  const RowOwners owners(ledger, layer, view, v_layout);
  RowOwners::Torn torn;
  const RowSights actual = owners.SightsOf(row, torn);
  const std::size_t at = actual.sights.find_first_of("x+");
  Failure wrong = WrongRow(row, -1, "");
  const LedgerToken* expected =
      actual.missing.empty() ? nullptr : actual.missing[0].token;
  if (at != std::string::npos) {
    wrong.column = AsInt(at);
    if (actual.sights[at] == 'x') expected = actual.tokens[at];
    const RowOwner owner = owners.Of(wrong.column, {});
    wrong.text =
        fmt::format("{} sees at column {} {} {}", NameOf(row, names), at,
                    OwnerText(owner, names, expected != nullptr, wrong),
                    RowText(view, wrong.column, v_layout));
  }
  if (expected != nullptr) {
    wrong.text += fmt::format(
        "{} {}",
        wrong.text.empty() ? NameOf(row, names) + " misses" : "; expected",
        TokenText(*expected, layer));
    const auto rows = expected->rows.find(layer);
    if (wrong.column >= 0 && rows != expected->rows.end()) {
      wrong.text +=
          LaterDifference(view, wrong.column, v_layout, rows->second.key.view(),
                          rows->second.value.view());
    }
    if (names.expected) wrong.text += names.expected(row, *expected);
    return wrong;
  }
  if (wrong.column < 0) return std::nullopt;
  std::vector<const LedgerToken*> visible;
  for (const LedgerToken& token : ledger.tokens()) {
    if (!token.rows.contains(layer) || !ledger.MaySee(row, token)) continue;
    visible.push_back(&token);
  }
  const RowOwner owner = owners.Of(wrong.column, visible);
  const bool again =
      owner.key && owner.value && std::ranges::count(visible, owner.token) > 0;
  wrong.text +=
      again ? ", which it sees more than once" : ", which it must not see";
  if (wrong.of_left && names.owner) wrong.text += "; that token has left";
  return wrong;
}

Failure WrongEncoder(std::string text) {
  Failure failure = WrongRow(0, -1, std::move(text));
  failure.part = WrongPart::kEncoder;
  return failure;
}

std::optional<Failure> FindWrongEncoderRow(const std::map<int, KvRows>& slots,
                                           int layer, const KvView& view) {
  const auto same = [](const DenseTensor& expected, const TensorView& actual) {
    return expected.shape == actual.shape &&
           HashStored(expected, actual, 0) == HashRow(actual, 0);
  };
  const auto slot = slots.find(layer);
  if (slot == slots.end()) return WrongEncoder("nothing was ever put here");
  const auto& [key, value] = slot->second;
  if (!same(key, view.key)) return WrongEncoder("K differs");
  if (!same(value, view.value)) return WrongEncoder("V differs");
  if (view.mask.data != nullptr) return WrongEncoder("there is a mask");
  return std::nullopt;
}

}  // namespace

std::string NeitherText(const TensorView& mask, std::int64_t column, int row) {
  const float element = LoadElement(mask.at(column, row), mask.dtype);
  return fmt::format("the mask is {:g}, neither 0 nor -inf (S15){}", element,
                     element < -1000 ? "; show a mask of large negative numbers"
                                       " as -inf"
                                     : "");
}

RowOwners::RowOwners(const CacheLedger& ledger, int layer, const KvView& view,
                     VLayout v_layout)
    : ledger_(ledger), layer_(layer), view_(view), v_layout_(v_layout) {
  for (const LedgerToken& token : ledger.tokens()) {
    const auto stored = token.rows.find(layer);
    if (stored == token.rows.end()) continue;
    const auto& [key, value] = stored->second;
    const std::uint64_t hash = HashStored(key, view.key, 0);
    tokens_.push_back(
        {&token, hash, HashStored(value, view.value, 0),
         HasValue() ? HashStored(value, view.value, hash) : hash});
  }
  if (view.mask.data == nullptr) return;
  for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
    columns_.push_back(HashColumn(view, column, v_layout));
  }
}

RowOwner RowOwners::Of(std::int64_t column,
                       const std::vector<const LedgerToken*>& expected) const {
  const std::uint64_t rows = HashColumn(view_, column, v_layout_);
  for (const LedgerToken* token : expected) {
    if (!token->rows.contains(layer_)) return {token, true, true, rows};
  }
  const bool has_value = HasValue();
  const std::uint64_t key = HashRow(Slice(view_.key, 2, column), 0);
  const std::uint64_t value =
      has_value ? HashRow(RowOf(view_.value, v_layout_, column), 0) : 0;
  const auto is_expected = [&](const LedgerToken* token) {
    return std::find(expected.begin(), expected.end(), token) != expected.end();
  };
  RowOwner best{nullptr, false, false, rows};
  int best_score = 0;
  for (const Hashes& hashes : tokens_) {
    const RowOwner owner{hashes.token, hashes.key == key,
                         !has_value || hashes.value == value, rows};
    const int score = (owner.key ? 4 : 0) + (has_value && owner.value ? 2 : 0) +
                      (is_expected(hashes.token) ? 1 : 0);
    if (score < 2 || score <= best_score) continue;
    best = owner;
    best_score = score;
  }
  return best;
}

RowOwner RowOwners::As(const LedgerToken& token, std::int64_t column) const {
  RowOwner owner{&token, true, true, HashColumn(view_, column, v_layout_)};
  const auto stored = token.rows.find(layer_);
  if (stored == token.rows.end()) return owner;
  const auto same = [](const DenseTensor& expected, const TensorView& row) {
    return HashStored(expected, row, 0) == HashRow(row, 0);
  };
  owner.key = same(stored->second.key, Slice(view_.key, 2, column));
  owner.value = !HasValue() || same(stored->second.value,
                                    RowOf(view_.value, v_layout_, column));
  return owner;
}

// Matches the columns that a row sees with the tokens that it must see.
class RowOwners::Matcher {
 public:
  Matcher(const RowOwners& owners, int number)
      : own_(owners), row_(number), columns_(owners.columns_.size()) {
    found_.sights.assign(columns_, '.');
    found_.tokens.resize(columns_);
  }

  RowSights Match(Torn& torn) {
    ReadMask();
    if (row_ >= own_.ledger_.rows()) return std::move(found_);
    ListExpected();
    MatchWhole();
    MatchParts(torn);
    FindMissing();
    return std::move(found_);
  }

 private:
  using Index = std::multimap<std::uint64_t, std::size_t>;

  void ReadMask() {
    const TensorView& mask = own_.view_.mask;
    for (std::size_t i = 0; i < columns_; ++i) {
      const auto column = static_cast<std::int64_t>(i);
      const MaskElement element = MaskElementAt(mask, column, row_);
      if (element == MaskElement::kAllows) found_.sights[i] = '+';
      if (element == MaskElement::kNeither) found_.sights[i] = '?';
    }
  }

  void ListExpected() {
    // Tokens that may be missing come last: those with equal rows are matched
    // before them.
    for (const bool may_miss : {false, true}) {
      const auto is_expected = [&](const LedgerToken& token) {
        return own_.ledger_.MaySee(row_, token) &&
               own_.ledger_.MayMiss(row_, token) == may_miss;
      };
      for (const Hashes& hashes : own_.tokens_) {
        if (is_expected(*hashes.token)) expected_.push_back(hashes);
      }
      for (const LedgerToken& token : own_.ledger_.tokens()) {
        if (!token.rows.contains(own_.layer_) && is_expected(token)) {
          unknown_.insert(may_miss ? unknown_.end() : unknown_.begin(), &token);
        }
      }
    }
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      by_rows_.emplace(expected_[i].rows, i);
      by_part_.emplace(expected_[i].key, i);
      if (own_.HasValue()) by_part_.emplace(expected_[i].value, i);
    }
    taken_.assign(expected_.size(), false);
  }

  // Returns the place in `expected_` of a token of `index` that no column has
  // yet; nothing if there is none.
  template <class Fits>
  std::optional<std::size_t> Find(const Index& index, std::uint64_t hash,
                                  const Fits& fits) const {
    for (auto [at, end] = index.equal_range(hash); at != end; ++at) {
      if (!taken_[at->second] && fits(expected_[at->second])) return at->second;
    }
    return std::nullopt;
  }

  // Assigns this token to a column; null if there is none.
  const LedgerToken* Take(std::optional<std::size_t> found) {
    if (!found) return nullptr;
    taken_[*found] = true;
    return expected_[*found].token;
  }

  const LedgerToken* TakeWhole(std::size_t column) {
    return Take(
        Find(by_rows_, own_.columns_[column], [](auto&) { return true; }));
  }

  // Does the same as Find for a token whose K or V the column has: first by K.
  template <class Fits>
  std::optional<std::size_t> FindPart(std::size_t i, const Fits& fits) const {
    const auto column = static_cast<std::int64_t>(i);
    const auto find = [&](const TensorView& part, std::uint64_t Hashes::*hash) {
      const std::uint64_t value = HashRow(part, 0);
      return Find(by_part_, value, [&](const Hashes& hashes) {
        return hashes.*hash == value && fits(hashes);
      });
    };
    const auto found = find(Slice(own_.view_.key, 2, column), &Hashes::key);
    if (found || !own_.HasValue()) return found;
    return find(RowOf(own_.view_.value, own_.v_layout_, column),
                &Hashes::value);
  }

  void MatchWhole() {
    for (std::size_t i = 0; i < columns_; ++i) {
      if (found_.sights[i] != '+') continue;
      found_.tokens[i] = TakeWhole(i);
      if (found_.tokens[i] != nullptr) found_.sights[i] = '#';
    }
    // A column with the K or the V of a token is probably the token's.
    for (const bool with_parts : {false, true}) {
      for (std::size_t i = 0; i < columns_; ++i) {
        if (next_unknown_ == unknown_.size()) break;
        if (found_.sights[i] != '+') continue;
        if (!with_parts && FindPart(i, [](auto&) { return true; })) continue;
        found_.tokens[i] = unknown_[next_unknown_++];
        found_.sights[i] = '#';
      }
    }
    // A token without rows may show those of a token that may be missing.
    for (const LedgerToken*& token : found_.tokens) {
      const bool open = next_unknown_ < unknown_.size() && token != nullptr &&
                        own_.ledger_.MayMiss(row_, *token) &&
                        !own_.ledger_.MayMiss(row_, *unknown_[next_unknown_]);
      if (open) token = unknown_[next_unknown_++];
    }
    // The mask is wrong there, but the tokens are not missing.
    for (std::size_t i = 0; i < columns_; ++i) {
      if (found_.sights[i] != '?') continue;
      found_.tokens[i] = TakeWhole(i);
    }
  }

  void MatchParts(Torn& torn) {
    // A column with only the K or only the V of a token takes the token's
    // place, unless the column has the rows of another token.
    std::set<std::uint64_t> whole;
    for (const Hashes& hashes : own_.tokens_) whole.insert(hashes.rows);
    for (std::size_t i = 0; i < columns_; ++i) {
      if (found_.sights[i] != '+' || whole.contains(own_.columns_[i])) continue;
      const auto column = static_cast<std::int64_t>(i);
      const auto before = torn.find(column);
      found_.tokens[i] = Take(FindPart(i, [&](const Hashes& hashes) {
        return before == torn.end() || before->second == hashes.token;
      }));
      if (found_.tokens[i] == nullptr) continue;
      found_.sights[i] = 'x';
      torn[column] = found_.tokens[i];
    }
  }

  void FindMissing() {
    std::multimap<std::uint64_t, std::size_t> hidden;
    for (std::size_t i = 0; i < columns_; ++i) {
      if (found_.sights[i] == '.') hidden.emplace(own_.columns_[i], i);
    }
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (taken_[i] || own_.ledger_.MayMiss(row_, *expected_[i].token))
        continue;
      RowSights::Missing missing{expected_[i].token, -1};
      const auto at = hidden.find(expected_[i].rows);
      if (at != hidden.end()) {
        found_.sights[at->second] = '-';
        found_.tokens[at->second] = expected_[i].token;
        missing.column = static_cast<std::int64_t>(at->second);
        hidden.erase(at);
      }
      found_.missing.push_back(missing);
    }
    for (; next_unknown_ < unknown_.size(); ++next_unknown_) {
      if (own_.ledger_.MayMiss(row_, *unknown_[next_unknown_])) continue;
      found_.missing.push_back({unknown_[next_unknown_], -1});
    }
    // The ledger's order.
    std::ranges::sort(found_.missing, std::less<>(),
                      &RowSights::Missing::token);
  }

  const RowOwners& own_;
  const int row_;
  const std::size_t columns_;
  RowSights found_;
  std::vector<Hashes> expected_;
  std::vector<const LedgerToken*> unknown_;  // They have no rows here.
  std::size_t next_unknown_ = 0;
  Index by_rows_;
  Index by_part_;
  std::vector<bool> taken_;  // The tokens of expected_ that a column has.
};

RowSights RowOwners::SightsOf(int row, Torn& torn) const {
  return Matcher(*this, row).Match(torn);
}

KvView LedgerView::view() const {
  KvView shown;
  shown.key = key.view();
  shown.value = value.view();
  shown.mask = mask.view();
  return shown;
}

std::optional<LedgerView> ViewOf(const CacheLedger& ledger, int layer,
                                 const RowDims& dims, DType k_dtype,
                                 DType v_dtype) {
  const auto rows = Size(ledger.batch());
  std::vector<const LedgerToken*> known;
  for (const LedgerToken& token : ledger.tokens()) {
    if (token.rows.contains(layer)) {
      known.push_back(&token);
      continue;
    }
    for (int row = 0; row < rows; ++row) {
      if (ledger.MaySee(row, token)) return std::nullopt;
    }
  }
  const auto count = std::ssize(known);
  LedgerView made = {
      .key =
          FilledTensor(k_dtype, {dims.k_head_dim, dims.kv_heads, count, 1}, 0),
      .value =
          FilledTensor(v_dtype, {dims.v_head_dim, dims.kv_heads, count, 1}, 0),
      .mask = FilledTensor(DType::kF32, {count, rows, 1, 1}, 0)};
  for (std::size_t i = 0; i < known.size(); ++i) {
    const KvRows& stored = known[i]->rows.at(layer);
    std::ranges::copy(stored.key.bytes,
                      IteratorAt(made.key.bytes, i * stored.key.bytes.size()));
    std::ranges::copy(
        stored.value.bytes,
        IteratorAt(made.value.bytes, i * stored.value.bytes.size()));
    for (int row = 0; row < rows; ++row) {
      const bool sees = ledger.MaySee(row, *known[i]);
      if (sees && ledger.MayMiss(row, *known[i])) return std::nullopt;
      const std::size_t at = AsSize(row) * known.size() + i;
      StoreElement(sees ? 0 : -std::numeric_limits<float>::infinity(),
                   &made.mask.bytes[at * sizeof(float)], DType::kF32);
    }
  }
  return made;
}

std::vector<std::byte> RowBytes(const TensorView& view, std::int64_t column,
                                VLayout layout) {
  const TensorView row = RowOf(view, layout, column);
  return CopyOf(row, row.dtype).bytes;
}

std::string IntsText(std::span<const int> values, std::size_t limit) {
  return fmt::format(
      "[{}{}]", fmt::join(values.first(std::min(limit, values.size())), ", "),
      values.size() > limit ? ", ..." : "");
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

std::string LaterDifference(const KvView& view, std::int64_t column,
                            VLayout v_layout, const TensorView& key,
                            const TensorView& value) {
  const auto first = [](std::string_view name, const TensorView& found,
                        const TensorView& expected) -> std::string {
    if (found.shape != expected.shape) return "";
    for (std::int64_t n = 0; n < found.elements(); ++n) {
      const std::string text = ElementAt(found, n);
      const std::string other = ElementAt(expected, n);
      if (text == other) continue;
      if (n < kElementsShown) break;
      return fmt::format("; element {} of head {} of {} is {}, expected {}",
                         n % found.shape[0], n / found.shape[0], name, text,
                         other);
    }
    return "";
  };
  const std::string of_key = first("K", Slice(view.key, 2, column), key);
  if (!of_key.empty() || view.value.data == nullptr) return of_key;
  return first("V", RowOf(view.value, v_layout, column), value);
}

std::uint64_t HashSights(const KvView& view, VLayout v_layout) {
  KVTWIN_DCHECK(view.mask.data != nullptr);
  // Shapes may be wrong: another check judges them.
  std::int64_t columns = std::min(view.mask.shape[0], view.key.shape[2]);
  if (view.value.data != nullptr) {
    const bool whole = v_layout != VLayout::kTiled ||
                       view.value.shape[0] == std::int64_t{kTileCells};
    columns = std::min(columns, whole ? ColumnsOf(view.value, v_layout) : 0);
  }
  std::uint64_t hash = 0;
  for (std::int64_t row = 0; row < view.mask.shape[1]; ++row) {
    // As in FindWrongRow, a sum of hashes stands for a multiset.
    std::uint64_t sum = 0;
    for (std::int64_t column = 0; column < columns; ++column) {
      const MaskElement element = MaskElementAt(view.mask, column, row);
      if (element == MaskElement::kHides) continue;
      sum += HashBytes(&element, sizeof(element),
                       HashColumn(view, column, v_layout));
    }
    if (sum != 0) hash = HashBytes(&sum, sizeof(sum), hash + AsSize(row));
  }
  return hash;
}

std::string WhyNotResumed(const reference::Ledger& ledger, int seq,
                          std::int32_t pos) {
  const auto refusing = std::ranges::find_if(
      ledger.parts(),
      [&](const CacheLedger& part) { return !part.MayResume(seq, pos); });
  KVTWIN_DCHECK(refusing != ledger.parts().end());
  const CacheLedger& part = *refusing;
  const std::int64_t end = part.Next(seq);
  if (end == 0) return "the sequence has no tokens";
  if (pos > end) {
    return fmt::format("position {} is beyond the end, which is {}", pos, end);
  }
  if (part.recurrent()) {
    return fmt::format("the sequence has no state at position {} (R8)",
                       pos - 1);
  }
  std::int64_t first = end;
  for (const LedgerToken& token : part.tokens()) {
    if (token.HeldBy(seq)) first = std::min(first, token.position);
  }
  const auto& batch = part.batch();
  const bool of_others =
      !batch.empty() &&
      std::ranges::count(batch, seq, &BatchToken::sequence) == 0;
  const std::string_view why =
      !part.IsBeyondMemory(seq, first - 1) ? ""
      : of_others ? ": a batch also evicts in sequences that are not in it (S7)"
                  : ": a batch evicts tokens before it (S7)";
  return fmt::format(
      "the sequence's tokens begin at position {}, later than the window "
      "(S28){}",
      first, why);
}

std::optional<Failure> FindWrongRow(const reference::Ledger& ledger, int layer,
                                    const KvView& view, VLayout v_layout,
                                    const ViewNames& names) {
  const CacheLedger& active = ledger.active();
  if (active.encoder()) {
    return FindWrongEncoderRow(active.slots().layers, layer, view);
  }
  const std::vector<std::uint64_t> tokens = HashTokens(active, layer, view);
  const std::int64_t columns = view.mask.shape[0];
  std::vector<std::uint64_t> column_hashes(AsSize(columns));
  if (view.mask.shape[1] < active.rows()) {
    return WrongRow(0, -1,
                    fmt::format("the mask has {} rows, the batch {} tokens",
                                view.mask.shape[1], active.rows()));
  }
  for (int row = 0; row < AsInt(view.mask.shape[1]); ++row) {
    // Sums of hashes compare multisets: equal multisets always agree, and
    // different ones agree once in 2^64.
    std::uint64_t seen_sum = 0;
    std::int64_t seen = 0;
    for (std::int64_t column = 0; column < columns; ++column) {
      const MaskElement element = MaskElementAt(view.mask, column, row);
      if (element == MaskElement::kHides) continue;
      const bool neither = element == MaskElement::kNeither;
      if (neither || row >= active.rows()) {
        return WrongElement(row, column,
                            neither ? NeitherText(view.mask, column, row)
                                    : "a padding row sees something",
                            names);
      }
      std::uint64_t& hash = At(column_hashes, column);
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
    auto wrong = Explain(active, layer, view, v_layout, row, names);
    if (wrong) return wrong;
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
