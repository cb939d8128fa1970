#include "props/command/page_file.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>

#include "core/json_line.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

// Whether the file begins as each page does (props/report/page.html).
bool IsPage(const std::string& path) {
  std::error_code unknown;
  if (!fs::is_regular_file(path, unknown)) return false;
  std::ifstream in(path, std::ios::binary);
  std::string begin(1024, '\0');
  in.read(begin.data(), std::ssize(begin));
  begin.resize(static_cast<std::size_t>(in.gcount()));
  return begin.starts_with("<!DOCTYPE html>") &&
         begin.find("<title>kvtwin: ") != begin.npos;
}

}  // namespace

void RemoveStalePage(const std::string& path) {
  if (!IsPage(path)) return;
  std::error_code error;
  fs::remove(path, error);  // If it stays, writing the new one says why.
}

int AfterPage(const Status& written, const std::string& path, int exit_code) {
  if (!written.ok()) {
    fmt::print(stderr, "kvtwin: {}\n", written.message());
    return 2;
  }
  fmt::print(stderr, "kvtwin: wrote {}\n", Printable(path, path.size()));
  return exit_code;
}

}  // namespace kvtwin::props
