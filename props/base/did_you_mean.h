// Hints for names that are misspelt.

#ifndef KVTWIN_PROPS_BASE_DID_YOU_MEAN_H_
#define KVTWIN_PROPS_BASE_DID_YOU_MEAN_H_

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtwin::props {

// Returns the number of characters to add, remove or replace to turn `a` into
// `b`.
inline std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// Returns ", did you mean 'check'?" if one of the names is nearly `word`.
// Returns "" if no name is near, or if `word` is itself a name.
inline std::string DidYouMean(std::string_view word,
                              const std::vector<std::string>& names) {
  std::string nearest;
  std::size_t least = 3;  // Larger distances are not typos.
  for (const std::string& name : names) {
    const std::size_t distance = EditDistance(word, name);
    if (distance == 0) return "";
    if (distance >= least) continue;
    least = distance;
    nearest = fmt::format(", did you mean '{}'?", name);
  }
  return nearest;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_DID_YOU_MEAN_H_
