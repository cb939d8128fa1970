#include "props/report/page_file.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "props/base/text_file.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

// Returns whether the file begins like a page (props/report/page.html).
bool IsPage(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string begin(1024, '\0');
  in.read(begin.data(), std::ssize(begin));
  begin.resize(AsSize(in.gcount()));
  return begin.starts_with("<!DOCTYPE html>") &&
         begin.find("<title>kvtwin: ") != begin.npos;
}

}  // namespace

Status PreparePage(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return CheckWritable(path);
  if (!IsPage(path)) {
    return Invalid("'{}' is not a page of kvtwin, so it is not replaced",
                   Printable(path, 200));
  }
  if (fs::remove(path, error)) {
    fmt::print(stderr, "kvtwin: removed {}, the page of an earlier run\n",
               Printable(path, path.size()));
  }
  return CheckWritable(path);
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
