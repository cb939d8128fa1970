// Runs a command of the shell on a text, as a pipe does.

#ifndef KVTWIN_PROPS_BASE_FILTER_H_
#define KVTWIN_PROPS_BASE_FILTER_H_

#include <cstddef>
#include <string>

#include "kvtwin/status.h"

namespace kvtwin::props {

struct FilterLimits {
  double seconds = 10;                        // For all of it.
  std::size_t bytes = std::size_t{64} << 20;  // Of what it prints.
};

// What the command prints on its standard output, when it is given `input`.
// Errors: it cannot be run, takes too long, prints too much, or does not end
// with 0; the message has the end of what it printed on its standard error.
// Nothing that it started in its process group is left.
Result<std::string> Filter(const std::string& command, const std::string& input,
                           const FilterLimits& limits);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_FILTER_H_
