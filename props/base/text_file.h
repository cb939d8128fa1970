// Reading and writing whole text files.

#ifndef KVTWIN_PROPS_BASE_TEXT_FILE_H_
#define KVTWIN_PROPS_BASE_TEXT_FILE_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "kvtwin/status.h"

namespace kvtwin::props {

// Returns the bytes of the file, or nothing if it cannot be read.
std::string ReadFile(const std::filesystem::path& path);

// Finds out early whether WriteFile can begin to write. Leaves an existing file
// as it is, and makes none. Errors: as for WriteFile.
Status CheckWritable(const std::string& path);

// Returns the bytes of a file, a pipe or a device. Errors: the path cannot be
// read, is a folder, or has more than `most` bytes; the message then says that
// it is too large for `what`.
Result<std::string> ReadInput(const std::string& path, std::int64_t most,
                              std::string_view what);

// Checks a file that must be a regular file before it is read. Errors: as for
// ReadInput, or it is not a regular file.
Status CheckInput(const std::string& path, std::int64_t most,
                  std::string_view what);

// Replaces the file as a whole, or leaves it as it was. A path that is not a
// regular file, such as a pipe or a device, is written to in place. Errors: the
// text was not written completely, with the system's reason.
Status WriteFile(const std::string& path, std::string_view text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_TEXT_FILE_H_
