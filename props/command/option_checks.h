// Validators for options of the command line.

#ifndef KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_
#define KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace kvtwin::props {

// Accepts numbers from `low` to `high`. CLI::Range accepts NaN, which compares
// as not outside of the range: a run of NaN seconds would never end.
inline CLI::Validator RealRange(double low, double high) {
  const auto check = [low, high](const std::string& text) -> std::string {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value);
    if (is_number && value >= low && value <= high) return "";
    return fmt::format("'{}' is no number from {} to {}", text, low, high);
  };
  return {check, fmt::format("FLOAT in [{} - {}]", low, high)};
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_OPTION_CHECKS_H_
