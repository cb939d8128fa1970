// What the command writes to files.

#ifndef KVTWIN_PROPS_WRITE_FILE_H_
#define KVTWIN_PROPS_WRITE_FILE_H_

#include <string>
#include <string_view>

#include "kvtwin/status.h"

namespace kvtwin::props {

// Replaces what is there; a pipe or a device is written to. Errors: it is not
// whole, with what the system said.
Status WriteFile(const std::string& path, std::string_view text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_WRITE_FILE_H_
