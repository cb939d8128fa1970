// Validators for options of the command line.

#ifndef KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_
#define KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/json_line.h"
#include "core/names.h"

namespace kvtwin::props {

// Accepts numbers from `low` to `high`. CLI::Range accepts NaN, which compares
// as not outside of the range: a run of NaN seconds would never end.
inline CLI::Validator RealRange(double low, double high) {
  const auto check = [low, high](const std::string& text) -> std::string {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value);
    if (is_number && value >= low && value <= high) return "";
    return fmt::format("'{}' is not a number from {} to {}", text, low, high);
  };
  return {check, fmt::format("FLOAT in [{} - {}]", low, high)};
}

// Accepts any 64-bit number in decimal.
inline CLI::Validator Whole() {
  return {[](const std::string& text) {
            const bool digits =
                text.find_first_not_of("0123456789") == std::string::npos;
            if (digits && text.size() < 20) return std::string();
            return fmt::format("'{}' is not a whole number from 0 to 10^19 - 1",
                               Printable(text, 40));
          },
          "UINT"};
}

// Adds --seed and --kind.
inline void AddSeedAndKind(CLI::App& command, std::uint64_t& seed,
                           std::string& kind,
                           const std::vector<std::string>& more = {}) {
  std::vector<std::string> kinds(kKindNames.begin(), kKindNames.end());
  kinds.emplace_back("paged");
  kinds.insert(kinds.end(), more.begin(), more.end());
  command.add_option("--seed", seed, "the seed of all random numbers")
      ->check(Whole())
      ->capture_default_str();
  command.add_option("--kind", kind, "only this kind of cache")
      ->check(CLI::IsMember(std::move(kinds)));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_
