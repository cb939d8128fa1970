#include "props/compare/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

Held HeldOf(const LedgerToken& token, int cell) {
  const std::set<int> owners = token.owners();
  return {cell, token.position, {owners.begin(), owners.end()}};
}

// Returns the ledger's tokens that a cell may hold: one, unless a sequence has
// a position more than once.
std::vector<const LedgerToken*> TokensOf(const CacheLedger& ledger,
                                         const Held& held) {
  std::vector<const LedgerToken*> tokens;
  for (const LedgerToken& token : ledger.tokens()) {
    if (HeldOf(token, held.cell) == held) tokens.push_back(&token);
  }
  return tokens;
}

std::optional<Held> RowToken(std::int64_t row,
                             const std::vector<std::int32_t>& positions,
                             const std::vector<int>& sequences) {
  const auto i = AsSize(row);
  if (i >= positions.size()) return std::nullopt;
  return Held{-1, positions[i], {sequences[i]}};
}

// Returns how a row of the mask sees a column.
char SightLetter(MaskElement element, bool expected, bool differs) {
  if (element == MaskElement::kNeither) return '?';
  const bool seen = element == MaskElement::kAllows;
  if (seen != expected) return seen ? '+' : '-';
  if (!seen) return '.';
  return differs ? 'x' : '#';
}

// Whether each column of the mask has a K row and a V row.
bool FitsTogether(const KvView& view, VLayout v_layout) {
  const std::int64_t columns = view.mask.shape[0];
  return view.key.shape[2] == columns &&
         (view.value.data == nullptr ||
          ColumnsOf(view.value, v_layout) == columns);
}

// Returns the token whose rows are in a column. `expected` are the tokens that
// should be there; `torn` is the token of which it has only the K or the V.
FoundToken FoundAt(const RowOwners& owners, std::int64_t column, int cell,
                   const std::vector<const LedgerToken*>& expected,
                   const LedgerToken* torn, bool has_cells) {
  const RowOwner owner =
      torn == nullptr ? owners.Of(column, expected) : owners.As(*torn, column);
  FoundToken actual;
  actual.token.cell = cell;
  if (owner.token != nullptr) actual.token = HeldOf(*owner.token, cell);
  actual.key = owner.key;
  actual.value = owner.value;
  actual.rows = owner.rows;
  const bool is_expected = std::find(expected.begin(), expected.end(),
                                     owner.token) != expected.end();
  const bool wrong = !is_expected || !owner.key || !owner.value;
  actual.differs = torn != nullptr || (has_cells && !expected.empty() && wrong);
  return actual;
}

// Finds a token among others, in whatever cell.
auto FindToken(std::vector<Held>& tokens, const Held& token) {
  return std::ranges::find_if(tokens, [&](const Held& other) {
    return other.position == token.position &&
           other.sequences == token.sequences;
  });
}

}  // namespace

std::string TokenText(const Held& token) {
  return fmt::format("{}@{}", fmt::join(token.sequences, "+"), token.position);
}

std::vector<Held> HeldCells(const std::vector<CellEntry>& entries) {
  std::vector<Held> held;
  for (const CellEntry& entry : entries) {
    if (held.empty() || held.back().cell != entry.cell) {
      held.push_back({entry.cell, entry.position, {}});
    }
    held.back().sequences.push_back(entry.sequence);
  }
  return held;
}

std::vector<Held> HeldCells(const Cache& cache) {
  std::vector<CellEntry> entries;
  cache.ListCells(entries);
  return HeldCells(entries);
}

std::vector<Held> HeldTokens(const CacheLedger& ledger) {
  std::vector<Held> held;
  for (const auto& token : ledger.tokens()) held.push_back(HeldOf(token, -1));
  return held;
}

bool SameTokens(const std::vector<Held>& a, const std::vector<Held>& b) {
  std::vector<Held> rest = b;
  for (const Held& token : a) {
    const auto at = FindToken(rest, token);
    if (at == rest.end()) return false;
    rest.erase(at);
  }
  return rest.empty();
}

Viewport Viewport::Around(int first_cell, int column, int row) {
  Viewport frame{.row = row};
  const std::int64_t cell = std::int64_t{first_cell} + std::max(column, 0);
  if (cell < kCells || cell > kOpenEnd - kCells) return frame;
  frame.from = AsInt(cell) - kCells / 2;
  frame.to = frame.from + kCells;
  return frame;
}

MaskPicture PictureOf(const TensorView& mask, int first_cell,
                      const std::vector<std::int32_t>& positions,
                      const std::vector<int>& sequences) {
  MaskPicture picture{first_cell, mask.shape[0], 0, {}};
  for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
    std::string sights;
    for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
      sights += MaskAllows(mask, column, row) ? '#' : '.';
    }
    picture.rows.push_back({AsInt(row),
                            RowToken(row, positions, sequences),
                            std::move(sights),
                            {}});
  }
  return picture;
}

void DrawCells(const Viewport& frame, std::vector<Held> cells,
               const std::vector<Held>& actual, int cell_count, Step& step) {
  step.drawn = true;
  step.cell_count = cell_count;
  step.found.clear();
  step.missing.clear();
  const auto is_out = [&](int at) { return at < frame.from || at >= frame.to; };
  if (actual != cells) {
    const bool in_any_cell = !cells.empty() && cells.front().cell < 0;
    std::vector<Held> expected = cells;
    for (const Held& held : actual) {
      const auto at = in_any_cell
                          ? FindToken(expected, held)
                          : std::find(expected.begin(), expected.end(), held);
      const bool differs = at == expected.end();
      if (!differs) expected.erase(at);
      if (!is_out(held.cell)) step.found.push_back({held, differs});
    }
    for (const Held& held : expected) {
      if (in_any_cell) {
        step.missing.push_back(held);
      } else if (!is_out(held.cell) &&
                 std::ranges::none_of(actual, [&](const Held& other) {
                   return other.cell == held.cell;
                 })) {
        step.found.push_back({{held.cell, 0, {}}, true});
      }
    }
  }
  const auto all = std::ssize(cells);
  int next = 0;  // Stands for the cell of a token without one.
  std::erase_if(cells, [&](const Held& held) {
    return is_out(held.cell < 0 ? next++ : held.cell);
  });
  step.cells_left_out = all - std::ssize(cells);
  step.cells = std::move(cells);
}

namespace {

// Adds the sights of the columns up to `to` to each row, with a mask that is
// right.
void AddSights(const TensorView& mask, const TensorView& right, std::int64_t to,
               const std::vector<FoundToken>& found, MaskPicture& picture) {
  for (MaskPicture::Row& row : picture.rows) {
    for (std::int64_t column = picture.from; column < to; ++column) {
      const auto i = AsSize(column - picture.from);
      row.sights +=
          SightLetter(MaskElementAt(mask, column, row.row),
                      MaskAllows(right, column, row.row), found[i].differs);
    }
  }
}

}  // namespace

void DrawView(const Viewport& frame, const ViewInQuestion& view, Step& step) {
  const CacheLedger& ledger = view.ledger;
  if (ledger.encoder() || !FitsTogether(view.actual, view.v_layout)) return;
  const TensorView& mask = view.actual.mask;
  const int first_cell = view.actual.first_cell;
  MaskPicture picture{first_cell, mask.shape[0], 0, {}};
  picture.from =
      std::max<std::int64_t>(0, std::int64_t{frame.from} - first_cell);
  const std::int64_t to = std::min<std::int64_t>(
      mask.shape[0], std::int64_t{frame.to} - first_cell);
  const auto is_drawn = [&](std::int64_t column) {
    return column >= picture.from && column < to;
  };
  const bool by_twin = view.expected && view.expected->mask.data != nullptr &&
                       view.expected->mask.shape == mask.shape &&
                       view.expected->first_cell == first_cell;

  const RowOwners owners(ledger, view.layer, view.actual, view.v_layout);
  // The tokens that are expected in a column; without cells, the tokens that
  // the rows match with it.
  std::map<std::int64_t, std::vector<const LedgerToken*>> expected;
  const bool has_cells = !step.cells.empty() && step.cells.front().cell >= 0;
  for (const Held& held : step.cells) {
    if (has_cells) expected[held.cell - first_cell] = TokensOf(ledger, held);
  }
  RowOwners::Torn torn;
  const auto by_ledger = [&](int row, MaskPicture::Row& drawn) {
    const RowSights sights = owners.SightsOf(row, torn);
    for (std::int64_t column = picture.from; column < to; ++column) {
      const auto i = AsSize(column);
      drawn.sights += sights.sights[i];
      auto& tokens = expected[column];
      if (tokens.empty() && sights.tokens[i] != nullptr) {
        tokens.push_back(sights.tokens[i]);
      }
    }
    for (const auto& [token, column] : sights.missing) {
      if (is_drawn(column)) continue;
      const int cell = column < 0 ? -1 : first_cell + AsInt(column);
      drawn.missing.push_back(HeldOf(*token, cell));
    }
  };
  for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
    if (row >= Viewport::kRows && row != frame.row) {
      ++step.rows_left_out;
      continue;
    }
    const auto number = AsInt(row);
    picture.rows.push_back(
        {number, RowToken(row, view.positions, view.sequences), "", {}});
    if (!by_twin && view.fresh) by_ledger(number, picture.rows.back());
  }

  step.found.clear();
  for (std::int64_t column = picture.from; column < to; ++column) {
    const auto part = torn.find(column);
    step.found.push_back(
        FoundAt(owners, column, first_cell + AsInt(column), expected[column],
                part == torn.end() ? nullptr : part->second, has_cells));
  }
  if (by_twin || !view.fresh) {
    const TensorView& right = by_twin ? view.expected->mask : mask;
    AddSights(mask, right, to, step.found, picture);
  }
  step.mask = std::move(picture);
}

}  // namespace kvtwin::props
