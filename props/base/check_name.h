// The names of all checks. Failures are distinguished by these names, so the
// list is closed: a name that is not here does not compile.

#ifndef KVTWIN_PROPS_BASE_CHECK_NAME_H_
#define KVTWIN_PROPS_BASE_CHECK_NAME_H_

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace kvtwin::props {

// Who is wrong.
enum class Party {
  kSubject,  // The system under test differs from the reference or the ledger.
  kReference,  // The reference twin differs from the ledger.
  kBackend,  // A third-party cache crashes, hangs, or writes where it may not.
  kHarness,  // Two runs of the same history differ.
  kEither,   // Subject or reference, before Init or after Close.
};

// Each name says who is wrong, and about what.
inline constexpr auto kCheckNames = std::to_array<std::string_view>({
    "subject: result",
    "subject: cells",
    "subject: batch cells",
    "subject: cell count",
    "subject: underlying cache",
    "subject: view shape",
    "subject: view cells",
    "subject: mask bytes",
    "subject: K bytes",
    "subject: V bytes",
    "subject: rows",
    "subject: resume",
    "subject: prefix",
    "subject: encoder cached",
    "subject: misuse",
    "subject: snapshot",
    "subject: exception",
    "subject: room",
    "subject: attention",
    "subject: output",
    "subject: pool",
    "backend: crash",
    "backend: hang",
    "backend: memory",
    "backend: out of bounds",
    "backend: garbage",
    "backend: error",
    "reference: result",
    "reference: tokens",
    "reference: cell count",
    "reference: rows",
    "reference: resume",
    "reference: a legal client is refused",
    "reference: misuse",
    "reference: saved state",
    "reference: snapshot",
    "harness: not the same twice",
    "misuse: before Init",
    "misuse: after Close",
});

class CheckName {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): made of literals only.
  consteval CheckName(const char* name) : name_(name) {
    const auto at = std::find(kCheckNames.begin(), kCheckNames.end(), name_);
    if (at == kCheckNames.end()) throw "no such check";
  }
  constexpr std::string_view name() const { return name_; }

  // Reads the name of a check that another process sent. Returns nothing if
  // there is no such check.
  static std::optional<CheckName> Find(std::string_view name) {
    const auto at = std::find(kCheckNames.begin(), kCheckNames.end(), name);
    if (at == kCheckNames.end()) return std::nullopt;
    return CheckName(*at, 0);
  }

  constexpr Party party() const {
    constexpr std::array<std::pair<std::string_view, Party>, 5> kParties = {{
        {"subject", Party::kSubject},
        {"reference", Party::kReference},
        {"backend", Party::kBackend},
        {"harness", Party::kHarness},
        {"misuse", Party::kEither},
    }};
    for (const auto& [word, party] : kParties) {
      if (name_.substr(0, name_.find(':')) == word) return party;
    }
    return Party::kSubject;
  }

 private:
  constexpr CheckName(std::string_view name, int /*found*/) : name_(name) {}

  std::string_view name_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_CHECK_NAME_H_
