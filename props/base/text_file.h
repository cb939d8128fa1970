// Whole files as texts.

#ifndef KVTWIN_PROPS_BASE_TEXT_FILE_H_
#define KVTWIN_PROPS_BASE_TEXT_FILE_H_

#include <filesystem>
#include <string>
#include <string_view>

#include "kvtwin/status.h"

namespace kvtwin::props {

// Returns the bytes of the file; nothing if it cannot be read.
std::string ReadFile(const std::filesystem::path& path);

// Replaces the file as a whole, or leaves it as it was; what is no regular
// file, as a pipe or a device, is written to. Errors: the text was not written
// as a whole, with the reason from the system.
Status WriteFile(const std::string& path, std::string_view text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_TEXT_FILE_H_
