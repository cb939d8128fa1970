// Tells failures that are known from others.

#ifndef KVTWIN_PROPS_SIEVE_H_
#define KVTWIN_PROPS_SIEVE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

namespace kvtwin::props {

class Sieve {
 public:
  // Requires: `known` outlives it.
  explicit Sieve(const std::set<std::string>& known) : known_(known) {}

  // Whether a failure of this check is known; it is counted then. Its bucket is
  // asked for at the first one, the 10th, the 100th, and so on, for it takes
  // long: those between pass for the same.
  bool Passes(const std::string& check,
              const std::function<std::string()>& bucket_of,
              std::map<std::string, std::int64_t>& passed_over) {
    Met& met = met_[check];
    ++met.count;
    if (met.bucket.empty() || IsPowerOf10(met.count)) {
      std::string bucket = bucket_of();
      if (!known_.contains(bucket)) return false;
      met.bucket = std::move(bucket);
    }
    ++passed_over[met.bucket];
    return true;
  }

 private:
  struct Met {
    std::int64_t count = 0;
    std::string bucket;  // Of the latest that was asked for.
  };

  static bool IsPowerOf10(std::int64_t number) {
    while (number % 10 == 0) number /= 10;
    return number == 1;
  }

  const std::set<std::string>& known_;
  std::map<std::string, Met> met_;  // By check.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SIEVE_H_
