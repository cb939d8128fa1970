// Compares a view with the ledger, for the visibility level: every batch row
// sees each token it may see exactly once, with the right K and V rows, and
// nothing else.

#ifndef KVTWIN_PROPS_COMPARE_VISIBILITY_H_
#define KVTWIN_PROPS_COMPARE_VISIBILITY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/guarded_cache.h"
#include "kvtwin/cache.h"
#include "props/compare/failure.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// The rows of a column that belong to no token of the ledger.
struct FormerRows {
  std::string name;   // Empty if they are not known.
  bool left = false;  // The cache has dropped their token.
};

// The names that a failure gives to parts of a view. Each function may be null.
struct ViewNames {
  std::function<std::string(int row)> row = {};  // Instead of "row 3".
  // Instead of the token that owns the rows of a column.
  std::function<std::string(std::int64_t column)> owner = {};
  std::function<FormerRows(std::int64_t column)> former = {};
  // A sentence on a token that the row must see and does not.
  std::function<std::string(int row, const reference::LedgerToken& token)>
      expected = {};
};

// Compares the view of `layer` with the active ledger. Requires: the view is of
// the ledger's current pass, without a Remove or CopyPrefix since its
// StartForward. Rows that were never put in this layer may hold anything. The
// rows of `view` have the dtype of the cache. Without V (null data), K alone is
// compared. The failure names the mask row, and the column of the view, or -1
// if a token is missing.
std::optional<Failure> FindWrongRow(const reference::Ledger& ledger, int layer,
                                    const KvView& view, VLayout v_layout,
                                    const ViewNames& names = {});

// Returns a hash of the rows and columns that a view's mask shows. It does not
// depend on the order of the columns, on hidden columns, or on later rows that
// see nothing. Requires: the view has a mask.
std::uint64_t HashSights(const KvView& view, VLayout v_layout);

// Returns why CanResume must not be true for the sequence (S28). Requires: the
// ledger's MayResume is false.
std::string WhyNotResumed(const reference::Ledger& ledger, int seq,
                          std::int32_t pos);

// The token whose K and V rows a column of a view has: the token that has both
// rows, else a token that has one of them.
struct RowOwner {
  const reference::LedgerToken* token = nullptr;
  bool key = false;
  bool value = false;
  std::uint64_t rows = 0;  // The hash of the column's rows.
};

// How one row of the mask sees the columns of a view, by the ledger's rules.
struct RowSights {
  std::string sights;  // A character for each column, as in MaskPicture.
  // By column: the token whose place the column takes. Null: none.
  std::vector<const reference::LedgerToken*> tokens;
  struct Missing {
    const reference::LedgerToken* token = nullptr;
    std::int64_t column = -1;  // The hidden column that has its rows, or -1.
  };
  // The tokens that the row must see, and whose rows it does not see.
  std::vector<Missing> missing;
};

class RowOwners {
 public:
  // Requires: all arguments outlive this; rows in `view` have the shape of the
  // rows that were put.
  RowOwners(const reference::CacheLedger& ledger, int layer, const KvView& view,
            VLayout v_layout);
  // Returns the owner of a column: a token of `expected` that was never put
  // here, which may have any rows; if there is none, the token with equal rows,
  // first from `expected`.
  RowOwner Of(std::int64_t column,
              const std::vector<const reference::LedgerToken*>& expected) const;
  // Matches the columns that the row sees with the tokens that it must see, one
  // by one. A token that was never put in this layer may be any column that is
  // left. Requires: the mask is of the ledger's pass.
  //
  // A column with only the K or only the V of a token takes the place of one
  // token in all rows: `torn` has the token by column, from rows before.
  using Torn = std::map<std::int64_t, const reference::LedgerToken*>;
  RowSights SightsOf(int row, Torn& torn) const;
  // Returns `token` as the owner of a column, and whether the column's K row
  // and V row are the token's.
  RowOwner As(const reference::LedgerToken& token, std::int64_t column) const;

 private:
  struct Hashes {
    const reference::LedgerToken* token;
    std::uint64_t key;
    std::uint64_t value;
    std::uint64_t rows;
  };
  class Matcher;  // Matches the columns of one row.
  bool HasValue() const { return view_.value.data != nullptr; }

  const reference::CacheLedger& ledger_;
  int layer_;
  const KvView& view_;
  VLayout v_layout_;
  std::vector<Hashes> tokens_;          // The tokens that were put.
  std::vector<std::uint64_t> columns_;  // The hashes of the mask's columns.
};

// The view that a cache without cells would return: a column for each token of
// the ledger that has rows in the layer, and a row for each token of the batch.
struct LedgerView {
  DenseTensor key;    // [k_head_dim, kv_heads, columns]
  DenseTensor value;  // [v_head_dim, kv_heads, columns]
  DenseTensor mask;   // [columns, rows], f32

  KvView view() const;
};
// Returns nothing if a row may see a token that has no rows, or may miss a
// token that it may see.
std::optional<LedgerView> ViewOf(const reference::CacheLedger& ledger,
                                 int layer, const RowDims& dims, DType k_dtype,
                                 DType v_dtype);

// Returns the bytes of one cell's row of a K or V view, dense, first dimension
// fastest. For K, pass the plain layout.
std::vector<std::byte> RowBytes(const TensorView& view, std::int64_t column,
                                VLayout layout);

// Returns "[3, 1, 4]", or the first `limit` values and "...".
std::string IntsText(std::span<const int> values, std::size_t limit);

// Returns "0.1"; for a NaN, also its bits, because NaNs differ in their bits:
// "nan (0x7fc00001)".
std::string ElementText(const TensorView& rows, std::int64_t i,
                        std::int64_t j = 0, std::int64_t k = 0,
                        std::int64_t l = 0);

// Names the first element in which a column differs from the rows of a token:
// "; element 20 of head 0 of K is 3, expected 4". The text is empty if RowText
// shows the difference, and for equal rows. `key` and `value` have the shape
// [head_dim, kv_heads, 1, 1].
std::string LaterDifference(const KvView& view, std::int64_t column,
                            VLayout v_layout, const TensorView& key,
                            const TensorView& value);
// Returns "K [100, 1000] V [100, 100100]".
std::string RowText(const KvView& view, std::int64_t column, VLayout v_layout);

// Returns the text of a failure: this element of the mask is neither 0 nor
// -inf.
std::string NeitherText(const TensorView& mask, std::int64_t column, int row);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_VISIBILITY_H_
