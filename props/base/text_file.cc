#include "props/base/text_file.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <system_error>

#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "core/save/file.h"
#include "core/save/part_file.h"

namespace kvtwin::props {

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Status CheckInput(const std::string& path, std::int64_t most,
                  std::string_view what) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0 || access(path.c_str(), R_OK) != 0) {
    return SystemError("cannot be read", path);
  }
  Status regular = CheckRegular(path, found.st_mode);
  if (!regular.ok() || found.st_size <= most) return regular;
  return Invalid("'{}' is too large for {}: {} bytes", Printable(path, 200),
                 what, found.st_size);
}

Result<std::string> ReadInput(const std::string& path, std::int64_t most,
                              std::string_view what) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return SystemError("cannot be read", path, EISDIR);
  }
  std::ifstream in(path, std::ios::binary);
  std::string text;
  std::array<char, 65536> some;
  while (in.read(some.data(), some.size()), in.gcount() > 0) {
    text.append(some.data(), AsSize(in.gcount()));
    if (std::ssize(text) <= most) continue;
    return Invalid("'{}' is too large for {}: more than {} bytes",
                   Printable(path, 200), what, most);
  }
  if (!in.eof()) return SystemError("cannot be read", path);
  return text;
}

namespace {

// Writes into the file in place, as much as it takes.
Status WriteThere(const std::string& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  int error = file == nullptr ? errno : 0;
  if (file != nullptr) {
    errno = 0;
    if (std::fwrite(text.data(), 1, text.size(), file) != text.size() ||
        std::fflush(file) != 0) {
      error = errno == 0 ? EIO : errno;
    }
    // A network file system may report an error only now.
    if (std::fclose(file) != 0 && error == 0) error = errno;
  }
  if (error == 0) return {};
  return {StatusCode::kFailedPrecondition,
          fmt::format("{} cannot be written: {}", Printable(path, path.size()),
                      std::strerror(error))};
}

// Returns the file that is replaced to write to the path. Returns nothing if it
// is written to in place.
std::optional<std::string> FileToReplace(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status there = fs::status(path, error);
  // A file that another program has open, such as standard output, is not
  // replaced.
  const bool open_already =
      path.starts_with("/dev/") || path.starts_with("/proc/");
  if (open_already || (fs::exists(there) && !fs::is_regular_file(there))) {
    return std::nullopt;
  }
  // A symbolic link stays a link: the file that it points to is replaced.
  if (!fs::is_symlink(fs::symlink_status(path, error))) return path;
  const fs::path target = fs::weakly_canonical(path, error);
  return error ? std::nullopt : std::optional(target.string());
}

}  // namespace

Status CheckWritable(const std::string& path) {
  const std::optional<std::string> target = FileToReplace(path);
  if (target) return PartFile(*target).Make();
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return SystemError("cannot be written", path, EISDIR);
  }
  if (::access(path.c_str(), W_OK) == 0) return {};
  return SystemError("cannot be written", path);
}

Status WriteFile(const std::string& path, std::string_view text) {
  const std::optional<std::string> target = FileToReplace(path);
  if (!target) return WriteThere(path, text);
  PartFile part(*target);
  Status status = part.Make();
  if (!status.ok()) return status;
  if (!part.file().Write(0, std::as_bytes(std::span(text)))) {
    return SystemError("cannot be written", path, part.file().error());
  }
  return part.Rename();
}

}  // namespace kvtwin::props
