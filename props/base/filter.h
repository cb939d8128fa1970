// Runs a shell command with a text as its standard input.

#ifndef KVTWIN_PROPS_BASE_FILTER_H_
#define KVTWIN_PROPS_BASE_FILTER_H_

#include <cstddef>
#include <string>

#include "kvtwin/status.h"

namespace kvtwin::props {

struct FilterLimits {
  double seconds = 10;  // For the whole command.
  // Limit of standard output, and of standard error.
  std::size_t bytes = std::size_t{64} << 20;
};

// Returns what the command prints on its standard output for `input`.
// Errors: the command cannot be run, takes too long, prints too much, or does
// not exit with 0; the message has the end of its standard error. All processes
// in the command's process group have ended when Filter returns.
Result<std::string> Filter(const std::string& command, const std::string& input,
                           const FilterLimits& limits);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_FILTER_H_
