// Files: read and written at any place by several threads, and made whole.

#ifndef KVTWIN_CORE_FILE_H_
#define KVTWIN_CORE_FILE_H_

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/json_line.h"
#include "core/refusals.h"

namespace kvtwin {

inline Status SystemError(std::string_view what, const std::string& path,
                          int error = errno) {
  return Untimely("'{}' {}: {}", Printable(path, 200), what,
                  std::strerror(error));
}

class File {
 public:
  File(const std::string& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // What the system said when something failed, on whatever thread; 0: nothing.
  int error() const { return error_; }

  // What is written is on its way to the disk from then on.
  bool Write(std::size_t at, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(),
                                       static_cast<off_t>(at));
      if (written <= 0) return Failed();
#ifdef SYNC_FILE_RANGE_WRITE
      // A hint: fsync is what counts.
      static_cast<void>(::sync_file_range(descriptor_, static_cast<off_t>(at),
                                          written, SYNC_FILE_RANGE_WRITE));
#endif
      at += static_cast<std::size_t>(written);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return true;
  }

  bool Sync() const { return ::fsync(descriptor_) == 0 || Failed(); }

  bool Read(std::size_t at, std::span<std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t read = ::pread(descriptor_, bytes.data(), bytes.size(),
                                   static_cast<off_t>(at));
      if (read < 0) return Failed();
      if (read == 0) return false;
      at += static_cast<std::size_t>(read);
      bytes = bytes.subspan(static_cast<std::size_t>(read));
    }
    return true;
  }

 private:
  bool Failed() const {
    error_ = errno;
    return false;
  }

  int descriptor_;
  mutable std::atomic<int> error_ = 0;
};

// Goes with this object, unless it got its name.
class PartFile {
 public:
  explicit PartFile(const std::string& path)
      : path_(fmt::format("{}.{}.{}.part", path, ::getpid(), ++count_)) {}
  ~PartFile() {
    if (!renamed_) ::unlink(path_.c_str());
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  const std::string& path() const { return path_; }
  bool Rename(const std::string& path) {
    renamed_ = ::rename(path_.c_str(), path.c_str()) == 0;
    return renamed_;
  }

 private:
  inline static std::atomic<int> count_ = 0;  // Two threads may save at once.
  std::string path_;
  bool renamed_ = false;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_FILE_H_
