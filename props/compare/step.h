// The steps of a recording or of a history, as they are drawn: each call with
// its answer, the cells after it, and the view and the mask that it returned.

#ifndef KVTWIN_PROPS_COMPARE_STEP_H_
#define KVTWIN_PROPS_COMPARE_STEP_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// A token that is somewhere: "0+1@4" is held by sequences 0 and 1.
struct Held {
  int cell = -1;  // -1: cells are not known.
  std::int64_t position = 0;
  std::vector<int> sequences;  // Empty: no token.
  bool operator==(const Held&) const = default;
};

std::string TokenText(const Held& token);
// By cell.
std::vector<Held> HeldCells(const std::vector<CellEntry>& entries);
std::vector<Held> HeldCells(const Cache& cache);
// These have no cells.
std::vector<Held> HeldTokens(const reference::CacheLedger& ledger);

// A mask as a picture.
struct MaskPicture {
  struct Row {
    int row = 0;
    std::optional<Held> token;  // None: padding.
    // A character for each column that is drawn. '#': seen, '.': hidden. Where
    // it is known what is due, also 'x': seen, but the row there differs; '+':
    // seen, to be hidden; '-': hidden, to be seen.
    std::string sights;
  };
  int first_cell = 0;
  std::int64_t columns = 0;
  std::int64_t from = 0;  // The first column that is drawn.
  std::vector<Row> rows;
};

// The part of a large cache that is drawn, in cells and in mask rows.
struct Frame {
  static constexpr int kCells = 64;
  static constexpr int kRows = 24;
  int from = 0;
  int to = kCells;  // Not included.
  int row = -1;     // Drawn wherever it is.

  // Has the column of the view, if one is wrong.
  static Frame Around(int first_cell, int column, int row);
};

// What is in a cell. Of a view: whose K and V rows these are.
struct FoundToken {
  Held token;
  bool differs = false;  // It is not what is due.
  bool key = true;
  bool value = true;
  std::uint64_t rows = 0;  // Of a view: the hash of both rows.
  bool gone = false;       // The cache holds it no more.
};

struct Step {
  std::int64_t number = 0;  // The line of a recording, or counted from 1.
  std::string call;         // "get", or the call as C++ has it.
  std::string arguments;    // "layer 0, K [3, 1, 5]", or none.
  std::string answer;       // "ok", "cache_full", "true", ... or none.

  bool begins_pass = false;

  // The rest as far as the frame goes.
  bool drawn = false;
  int cache = 0;  // Of a wrapper's.
  int cell_count = 0;
  std::vector<Held> cells;          // What is due.
  std::vector<FoundToken> found;    // What is there, as far as it is known.
  std::optional<MaskPicture> mask;  // Of a Get.
  std::int64_t cells_left_out = 0;
  std::int64_t rows_left_out = 0;
  int wrong_row = -1;  // As in Failure.
  int wrong_column = -1;
};

// The answer of CanResume as a word; empty for an error.
inline std::string_view YesOrNo(const Result<bool>& answer) {
  if (!answer.ok()) return "";
  return *answer ? "yes" : "no";
}

// The whole mask, uncut. Rows beyond `positions` are padding.
MaskPicture PictureOf(const TensorView& mask, int first_cell,
                      const std::vector<std::int32_t>& positions,
                      const std::vector<int>& sequences);

// What is needed to tell what is wrong in a view.
struct ViewInQuestion {
  const reference::CacheLedger& ledger;
  int layer = 0;
  KvView found;
  std::optional<KvView> due;  // Of a twin.
  VLayout v_layout = VLayout::kPlain;
  bool fresh = false;  // The ledger can judge the mask.
  const std::vector<std::int32_t>& positions;
  const std::vector<int>& sequences;
};

// Draw into `step` what is within the frame.
// `found` is given where `cells` is not what there is.
void DrawCells(const Frame& frame, std::vector<Held> cells,
               const std::vector<Held>& found, int cell_count, Step& step);
// Requires: DrawCells, and a mask.
void DrawView(const Frame& frame, const ViewInQuestion& view, Step& step);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_STEP_H_
