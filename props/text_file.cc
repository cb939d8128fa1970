#include "props/text_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "core/json_line.h"

namespace kvtwin::props {

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Status WriteFile(const std::string& path, std::string_view text) {
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

}  // namespace kvtwin::props
