// The steps of a recording or of a history, as reports draw them: each call
// with its answer, the cells after it, and the view and the mask that it
// returned.

#ifndef KVTWIN_PROPS_COMPARE_STEP_H_
#define KVTWIN_PROPS_COMPARE_STEP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// A token in a cell. "0+1@4" is the token at position 4 of sequences 0 and 1.
struct Held {
  int cell = -1;  // -1: the cell is not known.
  std::int64_t position = 0;
  std::vector<int> sequences;  // Empty: the cell has no token.
  bool operator==(const Held&) const = default;
};

std::string TokenText(const Held& token);
// Returns the tokens of the entries, one for each cell.
std::vector<Held> HeldCells(const std::vector<CellEntry>& entries);
std::vector<Held> HeldCells(const Cache& cache);
// Returns the ledger's tokens, which have no cells.
std::vector<Held> HeldTokens(const reference::CacheLedger& ledger);
// Whether both are the same tokens, in whatever cells.
bool SameTokens(const std::vector<Held>& a, const std::vector<Held>& b);

// A mask as a picture.
struct MaskPicture {
  struct Row {
    int row = 0;
    std::optional<Held> token;  // The token of the batch; none: padding.
    // A character for each column that is drawn:
    // '#'  The row sees the column, and must see it.
    // '.'  The column is hidden, and must be.
    // 'x'  The row must see a token here, but K or V is not the token's.
    // '+'  The row sees the column, and must not see it.
    // '-'  The column is hidden, and the row must see it.
    // '?'  The element of the mask is neither 0 nor -inf.
    // Where the expected mask is not known, there are only '#', '.' and '?'.
    std::string sights;
    // The tokens that the row must see, and that no column of `sights` has. A
    // cell is given if the token is in a cell that is not drawn.
    std::vector<Held> missing;
  };
  int first_cell = 0;
  std::int64_t columns = 0;
  std::int64_t from = 0;  // The first column that is drawn.
  std::vector<Row> rows;
};

// The part of a large cache that is drawn: cells and mask rows.
struct Viewport {
  static constexpr int kCells = 64;
  static constexpr int kRows = 24;
  int from = 0;
  int to = kCells;  // Past the last cell.
  int row = -1;     // This row of the mask is drawn, even if it is past kRows.

  // Returns a frame with this column of the view; a negative column is none.
  static Viewport Around(int first_cell, int column, int row);
};

// The token that was found in a cell. In a view, the token that the K and V
// rows of a column are from.
struct FoundToken {
  Held token;
  bool differs = false;    // Another token is expected in this cell.
  bool key = true;         // The K row is the token's.
  bool value = true;       // The V row is the token's.
  std::uint64_t rows = 0;  // In a view: the hash of the K row and the V row.
  bool gone = false;  // The cache had a token with these rows, and has it no
                      // longer.
};

// A call that a legal client makes by itself: no operation says it.
enum class OwnCall { kNone, kRemoveToTheEnd, kRemoveRange, kCommit };
inline bool IsRemove(OwnCall call) {
  return call == OwnCall::kRemoveToTheEnd || call == OwnCall::kRemoveRange;
}

struct Step {
  std::int64_t number = 0;  // The line of a recording, or counted from 1.
  std::string call;         // "get", or the call as C++ has it.
  std::string arguments;    // "layer 0, K [3, 1, 5]", or empty.
  std::string answer;       // "ok", "cache_full", "true", ... or empty.
  StatusCode code = StatusCode::kOk;  // The code of the answer.

  bool begins_pass = false;
  OwnCall own_call = OwnCall::kNone;

  // The drawing, as far as the frame goes.
  bool drawn = false;
  int cache = 0;  // The index of the wrapper's cache that is drawn.
  int cell_count = 0;
  std::vector<Held> cells;  // The expected tokens.
  // The tokens in the cells or in the view; empty if they are the expected
  // tokens.
  std::vector<FoundToken> found;
  std::vector<Held> missing;        // The expected tokens that are in no cell.
  std::optional<MaskPicture> mask;  // The mask that Get returned.
  std::int64_t cells_left_out = 0;
  std::int64_t rows_left_out = 0;
  int wrong_row = -1;  // As in Failure.
  int wrong_column = -1;
};

// The answer of CanResume or EncoderCached as a word; empty for an error.
inline std::string_view YesOrNo(const Result<bool>& answer) {
  if (!answer.ok()) return "";
  return *answer ? "yes" : "no";
}

// Returns the whole mask. Rows past `positions` are padding.
MaskPicture PictureOf(const TensorView& mask, int first_cell,
                      const std::vector<std::int32_t>& positions,
                      const std::vector<int>& sequences);

// A view, and what is needed to find its mistakes.
struct ViewInQuestion {
  const reference::CacheLedger& ledger;
  int layer = 0;
  KvView actual;
  std::optional<KvView>
      expected;  // The view of a twin that follows the ledger.
  VLayout v_layout = VLayout::kPlain;
  bool fresh = false;  // The ledger can judge the mask.
  const std::vector<std::int32_t>& positions;
  const std::vector<int>& sequences;
};

// Draws the tokens that are in the frame into `step`: those that are expected
// in the cells, and those that are found in them. Expected tokens without cells
// may be in any cell; if there are no cells at all, `found` is `cells`.
void DrawCells(const Viewport& frame, std::vector<Held> cells,
               const std::vector<Held>& actual, int cell_count, Step& step);
// Draws the columns and the rows that are in the frame into `step`. A view of
// an encoder, or whose tensors do not fit together, is not drawn. Requires:
// DrawCells was called, and the view has a mask.
void DrawView(const Viewport& frame, const ViewInQuestion& view, Step& step);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_STEP_H_
