#include "props/compare/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/mask_elements.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

Held HeldOf(const LedgerToken& token, int cell) {
  return {
      cell, token.position, {token.sequences.begin(), token.sequences.end()}};
}

// The ledger's tokens that a cell may hold: one, unless positions are repeated.
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
  const auto i = static_cast<std::size_t>(row);
  if (i >= positions.size()) return std::nullopt;
  return Held{-1, positions[i], {sequences[i]}};
}

// How one row of the mask shows one column.
char Sight(bool seen, bool due, bool differs) {
  if (seen != due) return seen ? '+' : '-';
  if (!seen) return '.';
  return differs ? 'x' : '#';
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

Frame Frame::Around(int first_cell, int column, int row) {
  Frame frame{.row = row};
  const std::int64_t cell = std::int64_t{first_cell} + std::max(column, 0);
  if (cell < kCells || cell > kOpenEnd - kCells) return frame;
  frame.from = static_cast<int>(cell) - kCells / 2;
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
    picture.rows.push_back({static_cast<int>(row),
                            RowToken(row, positions, sequences),
                            std::move(sights)});
  }
  return picture;
}

void DrawCells(const Frame& frame, std::vector<Held> cells,
               const std::vector<Held>& found, int cell_count, Step& step) {
  step.drawn = true;
  step.cell_count = cell_count;
  step.found.clear();
  const auto is_out = [&](int at) { return at < frame.from || at >= frame.to; };
  if (found != cells) {
    std::map<int, const Held*> due;
    for (const Held& held : cells) due[held.cell] = &held;
    for (const Held& held : found) {
      const auto at = due.find(held.cell);
      const bool differs = at == due.end() || *at->second != held;
      if (at != due.end()) due.erase(at);
      if (!is_out(held.cell)) step.found.push_back({held, differs});
    }
    for (const auto& [cell, held] : due) {
      if (!is_out(cell)) step.found.push_back({{cell, 0, {}}, true});
    }
  }
  const auto all = std::ssize(cells);
  int next = 0;  // Tokens without cells are counted instead.
  std::erase_if(cells, [&](const Held& held) {
    return is_out(held.cell < 0 ? next++ : held.cell);
  });
  step.cells_left_out = all - std::ssize(cells);
  step.cells = std::move(cells);
}

void DrawView(const Frame& frame, const ViewInQuestion& view, Step& step) {
  const CacheLedger& ledger = view.ledger;
  const TensorView& mask = view.found.mask;
  const int first_cell = view.found.first_cell;
  MaskPicture picture{first_cell, mask.shape[0], 0, {}};
  picture.from =
      std::max<std::int64_t>(0, std::int64_t{frame.from} - first_cell);
  const std::int64_t to = std::min<std::int64_t>(
      mask.shape[0], std::int64_t{frame.to} - first_cell);

  std::map<int, std::vector<const LedgerToken*>> held;
  for (const Held& one : step.cells) held[one.cell] = TokensOf(ledger, one);
  const RowOwners owners(ledger, view.layer, view.found, view.v_layout);
  std::vector<const LedgerToken*> tokens;
  step.found.clear();
  for (std::int64_t column = picture.from; column < to; ++column) {
    const int cell = first_cell + static_cast<int>(column);
    const auto& due = held[cell];
    const RowOwner owner = owners.Of(column, due);
    FoundToken found;
    found.token.cell = cell;
    if (owner.token != nullptr) found.token = HeldOf(*owner.token, cell);
    found.key = owner.key;
    found.value = owner.value;
    found.rows = owner.rows;
    const bool is_due =
        std::find(due.begin(), due.end(), owner.token) != due.end();
    found.differs = !due.empty() && (!is_due || !owner.key || !owner.value);
    step.found.push_back(found);
    tokens.push_back(owner.token);
  }

  const bool by_twin = view.due && view.due->mask.data != nullptr &&
                       view.due->mask.shape == mask.shape &&
                       view.due->first_cell == first_cell;
  for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
    if (row >= Frame::kRows && row != frame.row) {
      ++step.rows_left_out;
      continue;
    }
    std::string sights;
    for (std::int64_t column = picture.from; column < to; ++column) {
      const auto i = static_cast<std::size_t>(column - picture.from);
      const bool seen = MaskAllows(mask, column, row);
      bool due = seen;
      if (by_twin) {
        due = MaskAllows(view.due->mask, column, row);
      } else if (view.fresh) {
        due = row < ledger.rows() && tokens[i] != nullptr &&
              ledger.MaySee(static_cast<int>(row), *tokens[i]);
      }
      sights += Sight(seen, due, step.found[i].differs);
    }
    picture.rows.push_back({static_cast<int>(row),
                            RowToken(row, view.positions, view.sequences),
                            std::move(sights)});
  }
  step.mask = std::move(picture);
}

}  // namespace kvtwin::props
