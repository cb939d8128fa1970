#include "core/save/part_file.h"

#include <dirent.h>
#include <sys/file.h>
#include <sys/random.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvtwin {
namespace {

constexpr std::string_view kPrefix = ".kvtwin-";
constexpr std::size_t kHashDigits = 16;
constexpr std::size_t kRandomDigits = 32;
constexpr std::string_view kSuffix = ".part";

// Returns the common prefix of the names of all part files for the target
// `name`. It has a hash of the target's name, which may already have 255 bytes,
// the most that a name can have.
std::string PartPrefix(const std::string& name) {
  return fmt::format("{}{:016x}-", kPrefix,
                     XXH3_64bits(name.data(), name.size()));
}

// Whether this is the name of a part file that begins with `prefix`.
bool IsPart(std::string_view name, std::string_view prefix) {
  return name.size() == kPrefix.size() + kHashDigits + 1 + kRandomDigits +
                            kSuffix.size() &&
         name.starts_with(prefix) && name.ends_with(kSuffix);
}

// Removes the part file `name` if its saver is dead. A saver holds a lock on
// its part file as long as it lives.
void RemoveIfDead(int folder, const char* name) {
  File part;
  // Other programs may have put anything there.
  const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  if (!part.Own(::openat(folder, name, flags))) return;
  struct stat info = {};
  if (::fstat(part.descriptor(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  if (::flock(part.descriptor(), LOCK_SH | LOCK_NB) != 0) return;
  ::unlinkat(folder, name, 0);
}

// Removes the part files of dead savers, unless the folder cannot be listed.
void RemoveDead(int folder, std::string_view prefix) {
  const int copy = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const auto close = [](DIR* list) { ::closedir(list); };
  const std::unique_ptr<DIR, decltype(close)> list(::fdopendir(copy), close);
  if (list == nullptr) {
    ::close(copy);
    return;
  }
  while (const dirent* entry = ::readdir(list.get())) {
    if (IsPart(entry->d_name, prefix)) RemoveIfDead(folder, entry->d_name);
  }
}

}  // namespace

void RemoveDeadParts(const std::string& folder) {
  const File list(folder, O_RDONLY | O_DIRECTORY);
  if (list.is_open()) RemoveDead(list.descriptor(), kPrefix);
}

Status PartFile::OpenFolder() {
  const std::filesystem::path path(path_);
  name_ = path.filename().string();
  if (name_.empty() || name_ == "." || name_ == "..") {
    return Untimely("'{}' does not name a file", Printable(path_, 200));
  }
  const std::string folder = (path.parent_path() / ".").string();
  const auto open = [&](int flags) {
    return folder_.Own(Uninterrupted([&] {
      return ::open(folder.c_str(), flags | O_DIRECTORY | O_CLOEXEC);
    }));
  };
  // O_PATH is enough for a folder that may be written to, but not read.
  if (open(O_RDONLY) || (errno == EACCES && open(O_PATH))) return {};
  return SystemError("is in a folder that cannot be opened", path_);
}

Status PartFile::Make() {
  if (Status status = OpenFolder(); !status.ok()) return status;
  replaces_ = Uninterrupted([&] {
                return ::fstatat(folder_.descriptor(), name_.c_str(), &before_,
                                 AT_SYMLINK_NOFOLLOW);
              }) == 0;
  if (!replaces_ && errno != ENOENT) {
    return SystemError("cannot be looked at", path_);
  }
  if (replaces_) {
    Status status = CheckRegular(path_, before_.st_mode);
    if (!status.ok()) return status;
  }
  const std::string prefix = PartPrefix(name_);
  RemoveDead(folder_.descriptor(), prefix);
  return MakeLocked(prefix);
}

Status PartFile::MakeLocked(const std::string& prefix) {
  const int folder = folder_.descriptor();
  // Another saver that looks for dead ones may find the part file before it is
  // locked, and remove it.
  for (int attempt = 0; attempt < 16; ++attempt) {
    std::array<std::uint64_t, 2> random = {};
    if (::getentropy(random.data(), sizeof(random)) != 0) {
      return SystemError("cannot be written beside: no random name", path_);
    }
    part_ = fmt::format("{}{:016x}{:016x}{}", prefix, random[0], random[1],
                        kSuffix);
    // The part file is readable to its owner only, until it has the mode of
    // the file that it replaces.
    const mode_t mode = replaces_ ? 0600 : 0666;
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const auto open = [&] {
      return ::openat(folder, part_.c_str(), flags, mode);
    };
    if (!file_.Own(Uninterrupted(open))) {
      const int error = errno;
      part_.clear();  // A file of that name is not ours.
      return SystemError("cannot be written beside", path_, error);
    }
    const auto lock = [&] {
      return ::flock(file_.descriptor(), LOCK_EX | LOCK_NB);
    };
    // If there are no locks, no other saver takes this saver for dead.
    const bool locked = Uninterrupted(lock) == 0 || errno != EWOULDBLOCK;
    if (locked && ::faccessat(folder, part_.c_str(), F_OK, 0) == 0) return {};
    Remove();
  }
  return Untimely("'{}' cannot be written beside: others remove the file",
                  Printable(path_, 200));
}

// Gives the part file the mode and owner of the file that it replaces, as far
// as this process may.
void PartFile::KeepModeAndOwner() const {
  const int part = file_.descriptor();
  struct stat now = {};
  if (!replaces_ || ::fstat(part, &now) != 0) return;
  mode_t mode = before_.st_mode & 0777;
  const auto give = [part](uid_t owner, gid_t group) {
    return ::fchown(part, owner, group) == 0;
  };
  if (now.st_uid != before_.st_uid || now.st_gid != before_.st_gid) {
    const bool group = give(before_.st_uid, before_.st_gid) ||
                       now.st_gid == before_.st_gid ||
                       give(static_cast<uid_t>(-1), before_.st_gid);
    // If the group is not kept, it gets only the permissions of others.
    if (!group) mode = (mode & 0707) | (mode & 07) << 3;
  }
  if (mode == (now.st_mode & 07777)) return;
  static_cast<void>(::fchmod(part, mode));
}

// Syncs the folder, so that the new name is on disk, too.
bool PartFile::SyncFolder() const {
  if (folder_.Sync()) return true;
  // The folder is only open as a path, or the file system cannot sync folders.
  const int error = folder_.error();
  if (error != EBADF && error != EINVAL && error != ENOTSUP) return false;
  return ::syncfs(file_.descriptor()) == 0;
}

Status PartFile::Rename() {
  KeepModeAndOwner();
  if (!file_.Sync()) {
    return SystemError("cannot be written", path_, file_.error());
  }
  const int folder = folder_.descriptor();
  if (::renameat(folder, part_.c_str(), folder, name_.c_str()) != 0) {
    return SystemError("cannot be replaced", path_);
  }
  part_.clear();
  if (SyncFolder()) return {};
  return SystemError("is written, but perhaps not on disk", path_);
}

void PartFile::Remove() {
  if (part_.empty()) return;
  const int folder = folder_.descriptor();
  Uninterrupted([&] { return ::unlinkat(folder, part_.c_str(), 0); });
  part_.clear();
  file_.Own(-1);
}

}  // namespace kvtwin
