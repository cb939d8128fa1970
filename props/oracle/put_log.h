// The rows that a recording put, to say later whose row a view shows.

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
  std::size_t cache;  // Of a wrapper's.
  int layer;
  int sequence;
  std::int32_t position;
  std::size_t key_hash;
  std::size_t tag_hash;  // Of the first element of each K head.
  std::size_t value_hash;
};

class PutLog {
 public:
  // Rows of these tokens that a line put into a layer of a cache.
  void Add(std::int64_t line, const KvView& rows, std::size_t cache, int layer,
           std::span<const int> sequences,
           std::span<const std::int32_t> positions);

  // The last put of the row that is the most similar to a column's, those of
  // this cache and layer before others; null if none is similar.
  const PutRow* Find(const KvView& view, std::int64_t column, VLayout v_layout,
                     std::size_t cache, int layer) const;

 private:
  std::vector<PutRow> puts_;
};

// "the row of token sequence 1, position 3 (put on line 14)", and in which
// cache if that is not `cache`.
std::string PutText(const PutRow* put, std::size_t cache);
// Of a pool: "the row of sequence 1, position 3 (appended on line 14)", and to
// which layer if that is not `layer`.
std::string AppendedText(const PutRow* put, int layer);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_PUT_LOG_H_
