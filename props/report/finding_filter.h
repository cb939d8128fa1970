// Tells known failures from new failures.

#ifndef KVTWIN_PROPS_REPORT_FINDING_FILTER_H_
#define KVTWIN_PROPS_REPORT_FINDING_FILTER_H_

#include <fmt/format.h>

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

// Returns the bucket of a recording's failure: the kind of the wrong line and
// the sentence about it, without numbers and parentheses.
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

// Appends the first words of a sentence that tell it from others: without
// articles, verbs such as "is", and the numbers' nouns.
inline void AppendSentence(std::string_view sentence, std::string& bucket) {
  constexpr std::size_t kWordsMax = 6;
  static const std::set<std::string_view> kLeftOut = {
      "a",    "an",  "and", "are", "as",   "at",   "by",       "has",
      "have", "in",  "is",  "it",  "its",  "of",   "position", "sequence",
      "that", "the", "to",  "was", "were", "which"};
  std::string words;
  AppendWords(sentence, std::isalpha, words);
  std::size_t count = 0;
  for (std::size_t at = 0; at < words.size() && count < kWordsMax;) {
    const std::size_t end = std::min(words.find('-', at + 1), words.size());
    const std::string_view word(words.data() + at + 1, end - at - 1);
    at = end;
    if (kLeftOut.contains(word)) continue;
    bucket += fmt::format("-{}", word);
    ++count;
  }
}

// Whether a sentence says what is wrong, and not the check alone.
inline bool HasSentence(const Failure& failure) {
  return failure.Is("subject: pool") || failure.check == "sessions";
}

// Returns the check that fails; for a pool and for sessions, the sentence that
// says what is wrong, without numbers.
inline std::string SentenceOf(const Failure& failure) {
  if (!HasSentence(failure)) return failure.check;
  return BucketOfReason(failure.text.substr(0, failure.text.find('\n')));
}

// Returns the bucket of a failure without its history: the system under test
// and the check that fails; for a pool, the first words of the sentence.
inline std::string SignatureOf(std::string_view name, const Failure& failure) {
  std::string bucket = NameInBucket(name);
  if (HasSentence(failure)) {
    AppendSentence(SentenceOf(failure), bucket);
  } else {
    AppendWords(failure.check, std::isalnum, bucket);
  }
  return bucket;
}

// Returns the name of each operation in the history's line: "put", "copy".
// Single calls get the name of the operation that they are part of.
template <class History>
std::vector<std::string> OperationNames(const History& history) {
  std::vector<std::string> names;
  const std::string line = ToText(history);
  for (std::size_t bar = line.find('|'); bar != line.npos;
       bar = line.find('|', bar + 1)) {
    const std::size_t name = bar + 2;  // After "| ".
    names.push_back(line.substr(name, line.find(' ', name) - name));
    std::string& last = names.back();
    if (last == "start" || last == "store" || last == "reput") last = "put";
    if (last == "read") last = "get";
    if (names.size() == 1 && FirstOperationOpens(history)) last = "open";
  }
  return names;
}

// Appends the parts of a shortest history to the bucket of its check: the kinds
// of caches that are not causal, and the operations:
// "toy-subject-rows+swa+put+copy".
template <class History>
void AppendHistory(const History& shrunk, std::string& bucket) {
  for (const std::string& kind : KindNames(shrunk)) bucket += "+" + kind;
  for (const std::string& name : OperationNames(shrunk)) bucket += "+" + name;
}

// A known finding, named by its bucket.
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
  // Kinds and operations; empty if the finding is all failures of a check.
  const std::vector<std::string>& parts() const { return parts_; }

  bool Is(const std::string& bucket) const {
    return bucket == bucket_ ||
           (parts_.empty() && bucket.starts_with(bucket_ + "+"));
  }

  // Returns whether `kinds` contains the finding's kinds, and `operations` its
  // operations, in this order.
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

// Passes over failures with known buckets, and finds failures that known ones
// hide.
class FindingFilter {
 public:
  // Shrinking a failure takes about as long as running this many operations, so
  // a search that shrinks at this interval spends half of its time shrinking.
  static constexpr std::int64_t kOperationsABucket = 200'000;

  // Returns whether a shorter history, which fails with this bucket of a check,
  // shows a known finding.
  template <class History>
  using IsKnown = std::function<bool(const History&, const std::string&)>;

  explicit FindingFilter(const std::set<std::string>& known)
      : known_(known.begin(), known.end()) {}

  // Returns whether a failure is known, and counts it if so. `check` is its
  // bucket up to the check, `operations` the number that the search has run so
  // far. `run(history)` returns that bucket for another history, or nullopt if
  // it does not fail. `bucket_of(history, is_known)` shrinks the history that
  // ran last and returns its whole bucket; if `is_known` is not null, shrinking
  // avoids known histories. It is called for the first failure of a sort, and
  // again after kOperationsABucket: failures of the sort in between are taken
  // for the same bug.
  //
  // A history with the operations of a known finding may have another bug,
  // which shrinking would miss, because the known bug is simpler. So the
  // history runs without these operations. If it still fails, it is shrunk, at
  // first like any history. If the result is a known finding of another check,
  // or one whose kinds or operations the history does not have, it is shrunk
  // again, avoiding such findings.
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
          const auto is_known = [&](const History& tried,
                                    const std::string& its_check) {
            return std::ranges::any_of(known_, [&](const KnownFinding& other) {
              return other.Is(its_check) ||
                     (Holds(tried, other) && !Holds(candidate, other));
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
    const KnownFinding* known = nullptr;  // The finding of the latest bucket.
    std::int64_t next = 0;  // Operations until the next bucket_of.
  };

  const KnownFinding* Find(const std::string& bucket) const {
    for (const KnownFinding& finding : known_) {
      if (finding.Is(bucket)) return &finding;
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
    for (const KnownFinding& known : known_) {
      if (Holds(history, known)) held.push_back(&known);
    }
    return held;
  }

  // Returns every way to leave out one operation of each known finding that the
  // history contains: sets of names; only the empty set if it contains none.
  template <class History>
  std::set<std::set<std::string>> Escapes(const History& history) const {
    constexpr std::size_t kMost = 64;
    const std::vector<std::string> kinds = KindNames(history);
    std::set<std::set<std::string>> ways = {{}};
    for (const KnownFinding* known : HeldBy(history)) {
      std::set<std::set<std::string>> longer;
      for (const auto& way : ways) {
        for (const std::string& part : known->parts()) {
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
  std::map<std::string, Met> met_;  // By sort of failure.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_FINDING_FILTER_H_
