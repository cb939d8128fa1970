// A log of the rows that a recording put, to tell whose row a view shows.

#ifndef KVTWIN_PROPS_ORACLE_PUT_LOG_H_
#define KVTWIN_PROPS_ORACLE_PUT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::props {

struct PutRow {
  std::int64_t line;
  std::size_t cache;  // The index of a wrapper's cache.
  int layer;
  int sequence;
  std::int32_t position;
  std::size_t key_hash;
  std::size_t tag_hash;  // Hash of the first element of each K head.
  std::size_t value_hash;
};

// A put whose row is similar to a column of a view.
struct PutMatch {
  const PutRow* put = nullptr;  // Null: no row is similar.
  bool key = false;             // The K row is the put's, perhaps shifted.
  bool value = false;           // The V row is the put's.
};

class PutLog {
 public:
  // Adds the rows of these tokens, which a line put into a layer of a cache.
  void Add(std::int64_t line, const KvView& rows, std::size_t cache, int layer,
           std::span<const int> sequences,
           std::span<const std::int32_t> positions);

  // Returns the put of the row that is most similar to the column, preferring
  // this cache and layer, then the latest; null if no row is similar.
  const PutRow* Find(const KvView& view, std::int64_t column, VLayout v_layout,
                     std::size_t cache, int layer) const;
  // Returns the latest put of the same token: of its layer and position.
  const PutRow& Latest(const PutRow& put) const;
  // The same as Find, but a row may also be found by K alone.
  PutMatch Match(const KvView& view, std::int64_t column, VLayout v_layout,
                 std::size_t cache, int layer) const;

 private:
  PutMatch Best(const KvView& view, std::int64_t column, VLayout v_layout,
                std::size_t cache, int layer, bool by_key) const;

  std::vector<PutRow> puts_;
};

// Returns "the row of token sequence 1, position 3 (put on line 14)", and its
// cache if that is not `cache`. If only one row is the token's: "the K row of
// token sequence 1, position 3 (put on line 14) with another V row".
std::string PutText(const PutMatch& match, std::size_t cache);
// For a pool, returns "the row of sequence 1, position 3 (appended on line
// 14)", and its layer if that is not `layer`.
std::string AppendedText(const PutRow* put, int layer);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_PUT_LOG_H_
