// Tells failures that are known from others.

#ifndef KVTWIN_PROPS_SIEVE_H_
#define KVTWIN_PROPS_SIEVE_H_

#include <cctype>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace kvtwin::props {

// Appends the words of a text to a bucket, in lower case and each after a dash.
// `is_kept` is std::isalnum, or std::isalpha to leave numbers out.
inline void AppendWords(std::string_view text, int (*is_kept)(int),
                        std::string& bucket) {
  bool dash = true;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    const bool kept = is_kept(code) != 0;
    if (kept && dash) bucket += '-';
    if (kept) bucket += static_cast<char>(std::tolower(code));
    dash = !kept;
  }
}

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
