// Short forms for tests of pools.

#ifndef KVTWIN_PROPS_TESTING_POOLS_H_
#define KVTWIN_PROPS_TESTING_POOLS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "props/paged/paged_runner.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {

// Returns the text of the failure; empty if there is none.
inline std::string TextOf(const std::optional<Failure>& failure) {
  return failure ? failure->text : "";
}
inline std::string TextOf(const RunResult& result) {
  return TextOf(result.failure);
}

inline PagedFuzzResult FuzzPools(std::uint64_t seed, std::int64_t operations,
                                 const Subject& subject,
                                 const std::set<std::string>& known = {}) {
  FuzzOptions options;
  options.seed = seed;
  options.operations = operations;
  options.known_buckets = known;
  return FuzzPools(options, subject);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_POOLS_H_
