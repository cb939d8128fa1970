// Tells failures that are known from others.

#ifndef KVTWIN_PROPS_REPORT_SIEVE_H_
#define KVTWIN_PROPS_REPORT_SIEVE_H_

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "props/compare/failure.h"

namespace kvtwin::props {

// Returns the first part of a bucket, the name of a backend. A dash replaces
// each blank, each "+" and whatever else a shell would split or change.
inline std::string NameInBucket(std::string_view name) {
  std::string bucket(name);
  for (char& c : bucket) {
    const auto code = static_cast<unsigned char>(c);
    const bool kept = std::isalnum(code) != 0 || code >= 0x80 ||
                      std::string_view("._-").find(c) != std::string_view::npos;
    if (!kept) c = '-';
  }
  return bucket;
}

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

// What tells failures of recordings apart: the kind of the wrong line and the
// sentence on what is wrong there, without numbers and what is in parentheses.
inline std::string BucketOfReason(const std::string& reason) {
  std::string bucket;
  int depth = 0;
  for (const char c : reason.substr(0, reason.find(';'))) {
    if (c == '(') ++depth;
    if (depth == 0 && std::isdigit(static_cast<unsigned char>(c)) == 0) {
      const bool twice = c == ' ' && bucket.ends_with(' ');
      if (!twice) bucket += c;
    }
    if (c == ')') depth = std::max(0, depth - 1);
  }
  while (bucket.ends_with(' ')) bucket.pop_back();
  return bucket;
}

// Returns the bucket of a failure without its history: the system under test,
// and the check that fails; of a pool, the words of the sentence.
inline std::string SignatureOf(std::string_view name, const Failure& failure) {
  std::string bucket = NameInBucket(name);
  if (failure.Is("subject: pool")) {
    const std::string sentence =
        failure.text.substr(0, failure.text.find('\n'));
    AppendWords(BucketOfReason(sentence), std::isalpha, bucket);
  } else {
    AppendWords(failure.check, std::isalnum, bucket);
  }
  return bucket;
}

// What each operation of a history is called in its line: "put", "copy". Single
// calls are called as what they are part of.
template <class History>
std::vector<std::string> OperationNames(const History& history) {
  std::vector<std::string> names;
  const std::string line = ToText(history);
  for (std::size_t bar = line.find('|'); bar != line.npos;
       bar = line.find('|', bar + 1)) {
    const std::size_t name = bar + 2;  // Behind "| ".
    names.push_back(line.substr(name, line.find(' ', name) - name));
    std::string& last = names.back();
    if (last == "start" || last == "store" || last == "reput") last = "put";
    if (last == "read") last = "get";
    // Where a pool has no sequence, any operation opens one.
    if (names.size() == 1 && line.starts_with("kvp")) last = "open";
  }
  return names;
}

// Appends what a shortest history is made of to the bucket of its check:
// "toy-subject-rows+swa+put+copy", the kinds of caches, if they are not causal,
// and the operations.
template <class History>
void AppendHistory(const History& shrunk, std::string& bucket) {
  for (const std::string& kind : KindNames(shrunk)) bucket += "+" + kind;
  for (const std::string& name : OperationNames(shrunk)) bucket += "+" + name;
}

// A finding that is known, by its bucket.
class KnownFinding {
 public:
  explicit KnownFinding(const std::string& bucket) : bucket_(bucket) {
    std::size_t end = std::min(bucket.find('+'), bucket.size());
    while (end < bucket.size()) {
      const std::size_t begin = end + 1;
      end = std::min(bucket.find('+', begin), bucket.size());
      parts_.push_back(bucket.substr(begin, end - begin));
    }
  }

  const std::string& bucket() const { return bucket_; }
  // Kinds and operations; none if the finding is all failures of a check.
  const std::vector<std::string>& parts() const { return parts_; }

  bool Is(const std::string& bucket) const {
    return bucket == bucket_ ||
           (parts_.empty() && bucket.starts_with(bucket_ + "+"));
  }

  // Whether the finding's kinds are among these, and its operations among
  // these, in this order.
  bool IsIn(const std::vector<std::string>& kinds,
            const std::vector<std::string>& operations) const {
    auto part = parts_.begin();
    if (part == parts_.end()) return false;
    while (part != parts_.end() && std::ranges::count(kinds, *part) > 0) ++part;
    for (const std::string& name : operations) {
      if (part != parts_.end() && name == *part) ++part;
    }
    return part == parts_.end();
  }

 private:
  std::string bucket_;
  std::vector<std::string> parts_;
};

// Passes failures over whose bucket is known, and finds those that the known
// ones hide.
class Sieve {
 public:
  // To shrink a failure takes about as long as so many operations. A search
  // that shrinks once in so many spends half of its time on it.
  static constexpr std::int64_t kOperationsABucket = 200'000;

  // Whether a shorter history that fails this check, by its bucket, is known.
  template <class History>
  using IsKnown = std::function<bool(const History&, const std::string&)>;

  explicit Sieve(const std::set<std::string>& known)
      : known_(known.begin(), known.end()) {}

  // Whether a failure is known; the failure is counted then. `check` is its
  // bucket up to the check, `operations` how many the search has run so far.
  // `run(history)` answers that bucket of another history, or nothing if the
  // history does not fail. `bucket_of(history, is_known)` shrinks the history
  // that ran last, past those that are known, if that is not null, and answers
  // its whole bucket; it is asked at the first failure like this, and again
  // after kOperationsABucket: failures between them pass for the same.
  //
  // A history of the operations of a known finding may have another bug, which
  // shrinking would not find: the known one is the plainer. So the history is
  // run without these operations. If it still fails it is shrunk, first as any
  // history. Where that leads to a known finding of another check, or whose
  // kinds or operations the history has not, it is shrunk again past those.
  template <class History, class Run, class BucketOf>
  bool Passes(const History& history, const std::string& check,
              std::int64_t operations, const Run& run,
              const BucketOf& bucket_of,
              std::map<std::string, std::int64_t>& passed_over) {
    const KnownFinding* found = Find(check);
    if (found != nullptr) {
      ++passed_over[found->bucket()];
      return true;
    }
    for (const auto& left_out : Escapes(history)) {
      const History candidate = Without(history, left_out);
      const std::optional<std::string> fails =
          left_out.empty() ? check : run(candidate);
      if (!fails) continue;
      std::string like = *fails;
      for (const std::string& kind : KindNames(history)) like += " " + kind;
      for (const std::string& name : left_out) like += " without " + name;
      Met& met = met_[like];
      if (met.known == nullptr || operations >= met.next) {
        const KnownFinding* known = Find(bucket_of(candidate, nullptr));
        if (known != nullptr && !Holds(candidate, *known)) {
          const auto is_known = [&](const History& one,
                                    const std::string& its_check) {
            return std::ranges::any_of(known_, [&](const KnownFinding& other) {
              return other.Is(its_check) ||
                     (Holds(one, other) && !Holds(candidate, other));
            });
          };
          known = Find(bucket_of(candidate, is_known));
        }
        if (known == nullptr) return false;
        met = {known, operations + kOperationsABucket};
      }
      if (found == nullptr) found = met.known;
    }
    if (found == nullptr) found = HeldBy(history).front();
    ++passed_over[found->bucket()];
    return true;
  }

 private:
  struct Met {
    const KnownFinding* known = nullptr;  // What the latest bucket is of.
    std::int64_t next = 0;  // When a bucket is asked for again, in operations.
  };

  const KnownFinding* Find(const std::string& bucket) const {
    for (const KnownFinding& one : known_) {
      if (one.Is(bucket)) return &one;
    }
    return nullptr;
  }

  template <class History>
  static bool Holds(const History& history, const KnownFinding& finding) {
    return finding.IsIn(KindNames(history), OperationNames(history));
  }

  template <class History>
  std::vector<const KnownFinding*> HeldBy(const History& history) const {
    std::vector<const KnownFinding*> held;
    for (const KnownFinding& one : known_) {
      if (Holds(history, one)) held.push_back(&one);
    }
    return held;
  }

  // Each way to leave out an operation of every known finding that the history
  // holds; nothing is left out if it holds none.
  template <class History>
  std::set<std::set<std::string>> Escapes(const History& history) const {
    constexpr std::size_t kMost = 64;
    const std::vector<std::string> kinds = KindNames(history);
    std::set<std::set<std::string>> ways = {{}};
    for (const KnownFinding* one : HeldBy(history)) {
      std::set<std::set<std::string>> longer;
      for (const auto& way : ways) {
        for (const std::string& part : one->parts()) {
          if (std::ranges::count(kinds, part) > 0) continue;
          auto more = way;
          more.insert(part);
          if (longer.size() < kMost) longer.insert(std::move(more));
        }
      }
      ways = std::move(longer);
    }
    return ways;
  }

  template <class History>
  static History Without(History history, const std::set<std::string>& names) {
    const std::vector<std::string> all = OperationNames(history);
    std::size_t i = 0;
    std::erase_if(history.ops,
                  [&](const auto&) { return names.contains(all[i++]); });
    return history;
  }

  const std::vector<KnownFinding> known_;
  std::map<std::string, Met> met_;  // By what failures are like.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_SIEVE_H_
