// A file that several threads may read and write, at any offset.

#ifndef KVTWIN_CORE_SAVE_FILE_H_
#define KVTWIN_CORE_SAVE_FILE_H_

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"

namespace kvtwin {

inline Status SystemError(std::string_view what, const std::string& path,
                          int error = errno) {
  return Untimely("'{}' {}: {}", Printable(path, 200), what,
                  std::strerror(error));
}

// Returns failed_precondition unless `mode`, that of the file at `path`, is the
// mode of a regular file.
inline Status CheckRegular(const std::string& path, mode_t mode) {
  if (S_ISREG(mode)) return {};
  std::string_view what = "a device";
  if (S_ISDIR(mode)) what = "a folder";
  if (S_ISLNK(mode)) what = "a symbolic link";
  if (S_ISFIFO(mode)) what = "a pipe";
  if (S_ISSOCK(mode)) what = "a socket";
  return Untimely("'{}' is not a regular file, but {}", Printable(path, 200),
                  what);
}

// A path with a NUL would name another file to the system.
inline Status CheckPath(const std::string& path) {
  if (path.find('\0') == std::string::npos) return {};
  return Invalid("the path '{}' has a NUL", Printable(path, 200));
}

// Repeats a system call while a signal interrupts it, and returns its answer.
template <class Call>
auto Uninterrupted(const Call& call) {
  auto answer = call();
  while (answer == -1 && errno == EINTR) answer = call();
  return answer;
}

class File {
 public:
  // Makes an object without a file.
  File() = default;
  File(const std::string& path, int flags) {
    Own(Uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC); }));
  }
  ~File() { Own(-1); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Takes over `descriptor`, and closes the file that was open before. Returns
  // false if the descriptor is negative.
  bool Own(int descriptor) {
    if (is_open()) ::close(descriptor_);
    descriptor_ = descriptor;
    return is_open();
  }

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  // The system's error if a call failed, on any thread; else 0.
  int error() const { return error_; }

  // Writes the bytes, and asks the system to start writing them to disk.
  bool Write(std::size_t at, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = Uninterrupted([&] {
        return ::pwrite(descriptor_, bytes.data(), bytes.size(),
                        static_cast<off_t>(at));
      });
      if (written <= 0) return Failed(written == 0 ? EIO : errno);
#ifdef SYNC_FILE_RANGE_WRITE
      // Only a hint; Sync makes sure.
      static_cast<void>(::sync_file_range(descriptor_, static_cast<off_t>(at),
                                          written, SYNC_FILE_RANGE_WRITE));
#endif
      at += AsSize(written);
      bytes = bytes.subspan(AsSize(written));
    }
    return true;
  }

  bool Sync() const {
    return Uninterrupted([&] { return ::fsync(descriptor_); }) == 0 ||
           Failed(errno);
  }

  bool Read(std::size_t at, std::span<std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t read = Uninterrupted([&] {
        return ::pread(descriptor_, bytes.data(), bytes.size(),
                       static_cast<off_t>(at));
      });
      if (read < 0) return Failed(errno);
      if (read == 0) return false;
      at += AsSize(read);
      bytes = bytes.subspan(AsSize(read));
    }
    return true;
  }

 private:
  bool Failed(int error) const {
    error_ = error;
    return false;
  }

  int descriptor_ = -1;
  mutable std::atomic<int> error_ = 0;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_SAVE_FILE_H_
