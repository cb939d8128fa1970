// Compares a view with the ledger, for the visibility level: every batch row
// sees each token it may see exactly once, with the right K and V rows, and
// nothing else.

#ifndef KVTWIN_PROPS_COMPARE_VISIBILITY_H_
#define KVTWIN_PROPS_COMPARE_VISIBILITY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvtwin/cache.h"
#include "props/compare/failure.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Compares the view of `layer` with the active ledger. Requires: the view is of
// the ledger's current pass, without a Remove or CopyPrefix since its
// StartForward. Rows that were never put in this layer may hold anything. The
// rows of `view` have the dtype of the cache. Without V (null data), K alone is
// compared. The failure names the mask row, and the column of the view, or -1
// if a token is missing.
std::optional<Failure> FindWrongRow(const reference::Ledger& ledger, int layer,
                                    const KvView& view, VLayout v_layout);

// Says why CanResume must not be true of the sequence (S28).
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

class RowOwners {
 public:
  // Requires: all arguments outlive this; rows in `view` have the shape of the
  // rows that were put.
  RowOwners(const reference::CacheLedger& ledger, int layer, const KvView& view,
            VLayout v_layout);
  // Returns the owner of a column: a token of `due` that was never put here,
  // which may have any rows; if there is none, the token with equal rows, first
  // from `due`.
  RowOwner Of(std::int64_t column,
              const std::vector<const reference::LedgerToken*>& due) const;

 private:
  struct Hashes {
    const reference::LedgerToken* token;
    std::uint64_t key;
    std::uint64_t value;
  };
  int layer_;
  const KvView& view_;
  VLayout v_layout_;
  std::vector<Hashes> tokens_;  // The tokens that were put.
};

// Returns the bytes of one cell's row of a K or V view, dense, first dimension
// fastest. For K, pass the plain layout.
std::vector<std::byte> RowBytes(const TensorView& view, std::int64_t column,
                                VLayout layout);

// Returns "[3, 1, 4]", or the first `most` values and "...".
std::string IntsText(std::span<const int> values, std::size_t most);

// Returns "0.1"; for a NaN, also its bits, because NaNs differ in their bits:
// "nan (0x7fc00001)".
std::string ElementText(const TensorView& rows, std::int64_t i,
                        std::int64_t j = 0, std::int64_t k = 0,
                        std::int64_t l = 0);

// Returns "K [100, 1000] V [100, 100100]".
std::string RowText(const KvView& view, std::int64_t column, VLayout v_layout);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_VISIBILITY_H_
