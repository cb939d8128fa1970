// The names of all checks. Failures are told apart by these names, so the list
// is closed: a name that is not here does not compile.

#ifndef KVTWIN_PROPS_BASE_CHECK_NAME_H_
#define KVTWIN_PROPS_BASE_CHECK_NAME_H_

#include <algorithm>
#include <array>
#include <string_view>

namespace kvtwin::props {

// A name says which party is wrong, and about what: the subject if it differs
// from the reference, the reference if it differs from the ledger; "misuse" may
// be either. A backend is a third-party subject, which has failures of its own
// kind.
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
    "subject: encoder cached",
    "subject: misuse",
    "subject: snapshot",
    "subject: exception",
    "subject: room",
    "subject: attention",
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

 private:
  std::string_view name_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_CHECK_NAME_H_
