// The system calls of a save: what a disk may hold if the machine dies after
// any of them, and how a save ends if one of them fails.
//
// This is a separate program because the linker wraps the C library's
// functions.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/serving.h"
#include "props/testing/test_states.h"

namespace {

struct Call {
  std::string_view name;
  std::string path = {};  // The path argument.
  // The inode of the descriptor; in openat, of the opened file.
  ino_t inode = 0;
  int flags = 0;
  std::size_t at = 0;
  std::string bytes = {};  // The written bytes.
  std::string to = {};     // The new name, in a rename.
  bool ok = false;
};

// A call that fails instead of being made.
struct Fault {
  std::size_t at = 0;  // The index of the call.
  int error = 0;
  std::optional<ssize_t> writes;  // The call writes this many bytes instead.
};

// The recorder of system calls, which can also make a call fail.
struct Recorder {
  std::mutex mutex;
  bool on = false;
  std::vector<Call> calls;
  std::optional<Fault> fault;
  bool known_names = false;  // Random bits are zeros.
  int lock_error = 0;        // No file can be locked.
  int syncfs_error = 0;      // No file system can be synced.
  std::function<void(const std::string&)>
      on_lock;  // Gets the last path opened.
  std::string last_opened;
};
Recorder recorder;

ino_t InodeOf(int descriptor);

// Makes the call, or lets it fail; every failure returns -1.
template <class Answer>
Answer Do(Call call, const std::function<Answer(const Call&)>& real) {
  const std::lock_guard lock(recorder.mutex);
  if (!recorder.on) return real(call);
  const bool fails =
      recorder.fault && recorder.fault->at == recorder.calls.size();
  Answer answer = -1;
  if (fails && !recorder.fault->writes) {
    errno = recorder.fault->error;
  } else {
    if (fails) call.bytes.resize(kvtwin::AsSize(*recorder.fault->writes));
    answer = real(call);
  }
  const int error = errno;
  call.ok = answer != -1;
  if (call.ok && call.name == "openat") {
    call.inode = InodeOf(kvtwin::AsInt(answer));
  }
  recorder.calls.push_back(std::move(call));
  errno = error;
  return answer;
}

int Simple(std::string_view name, int descriptor,
           const std::function<int()>& real) {
  Call call;
  call.name = name;
  if (recorder.on) call.inode = InodeOf(descriptor);
  return Do<int>(call, [&](const Call&) { return real(); });
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the linker names these.
int __real_open(const char* path, int flags, ...);
int __real_openat(int folder, const char* path, int flags, ...);
ssize_t __real_pwrite(int file, const void* bytes, size_t size, off_t at);
int __real_fsync(int file);
int __real_fdatasync(int file);
int __real_sync_file_range(int file, off_t at, off_t size, unsigned flags);
int __real_syncfs(int file);
int __real_renameat(int from, const char* path, int to, const char* name);
int __real_unlinkat(int folder, const char* path, int flags);
int __real_ftruncate(int file, off_t size);
int __real_fchmod(int file, mode_t mode);
int __real_fchown(int file, uid_t owner, gid_t group);
int __real_flock(int file, int operation);
int __real_fstat(int file, struct stat* about);
int __real_fstatat(int folder, const char* path, struct stat* about, int flags);
int __real_faccessat(int folder, const char* path, int mode, int flags);
int __real_getentropy(void* bytes, size_t size);

int __wrap_open(const char* path, int flags, ...) {
  std::va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  Call call{.name = "open", .path = path, .flags = flags};
  return Do<int>(call,
                 [&](const Call&) { return __real_open(path, flags, mode); });
}
int __wrap_openat(int folder, const char* path, int flags, ...) {
  std::va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  Call call{.name = "openat", .path = path, .flags = flags};
  if (recorder.on) recorder.last_opened = path;
  return Do<int>(call, [&](const Call&) {
    return __real_openat(folder, path, flags, mode);
  });
}
ssize_t __wrap_pwrite(int file, const void* bytes, size_t size, off_t at) {
  if (!recorder.on) return __real_pwrite(file, bytes, size, at);
  Call call{.name = "pwrite",
            .inode = InodeOf(file),
            .at = kvtwin::AsSize(at),
            .bytes = std::string(static_cast<const char*>(bytes), size)};
  return Do<ssize_t>(call, [&](const Call& done) {
    return __real_pwrite(file, bytes, done.bytes.size(), at);
  });
}
int __wrap_fsync(int file) {
  return Simple("fsync", file, [&] { return __real_fsync(file); });
}
int __wrap_fdatasync(int file) {
  return Simple("fsync", file, [&] { return __real_fdatasync(file); });
}
int __wrap_sync_file_range(int file, off_t at, off_t size, unsigned flags) {
  return Simple("sync_file_range", file,
                [&] { return __real_sync_file_range(file, at, size, flags); });
}
int __wrap_syncfs(int file) {
  return Simple("syncfs", file, [&] {
    if (recorder.syncfs_error == 0) return __real_syncfs(file);
    errno = recorder.syncfs_error;
    return -1;
  });
}
int __wrap_renameat(int from, const char* path, int to, const char* name) {
  Call call{.name = "renameat", .path = path, .to = name};
  return Do<int>(
      call, [&](const Call&) { return __real_renameat(from, path, to, name); });
}
int __wrap_unlinkat(int folder, const char* path, int flags) {
  Call call{.name = "unlinkat", .path = path};
  return Do<int>(
      call, [&](const Call&) { return __real_unlinkat(folder, path, flags); });
}
int __wrap_ftruncate(int file, off_t size) {
  return Simple("ftruncate", file,
                [&] { return __real_ftruncate(file, size); });
}
int __wrap_fchmod(int file, mode_t mode) {
  return Simple("fchmod", file, [&] { return __real_fchmod(file, mode); });
}
int __wrap_fchown(int file, uid_t owner, gid_t group) {
  return Simple("fchown", file,
                [&] { return __real_fchown(file, owner, group); });
}
int __wrap_flock(int file, int operation) {
  if (recorder.on && recorder.on_lock) {
    std::exchange(recorder.on_lock, nullptr)(recorder.last_opened);
  }
  return Simple("flock", file, [&] {
    if (recorder.lock_error == 0) return __real_flock(file, operation);
    errno = recorder.lock_error;
    return -1;
  });
}
int __wrap_fstat(int file, struct stat* about) {
  return Simple("fstat", file, [&] { return __real_fstat(file, about); });
}
int __wrap_fstatat(int folder, const char* path, struct stat* about,
                   int flags) {
  Call call{.name = "fstatat", .path = path, .flags = flags};
  return Do<int>(call, [&](const Call&) {
    return __real_fstatat(folder, path, about, flags);
  });
}
int __wrap_faccessat(int folder, const char* path, int mode, int flags) {
  Call call{.name = "faccessat", .path = path};
  return Do<int>(call, [&](const Call&) {
    return __real_faccessat(folder, path, mode, flags);
  });
}
int __wrap_getentropy(void* bytes, size_t size) {
  return Do<int>({.name = "getentropy"}, [&](const Call&) {
    if (!recorder.known_names) return __real_getentropy(bytes, size);
    std::memset(bytes, 0, size);
    return 0;
  });
}
// NOLINTEND
}

namespace {

ino_t InodeOf(int descriptor) {
  struct stat about = {};
  return __real_fstat(descriptor, &about) == 0 ? about.st_ino : 0;
}

}  // namespace

namespace kvtwin::props {
namespace {

using Calls = std::vector<Call>;

class SaveCalls : public WithFolder {
 protected:
  void SetUp() override {
    WithFolder::SetUp();
    states_ = {SomeState(5, 1), SomeState(7, 2)};
    ASSERT_TRUE(SaveState(states_[0], Path()).ok());
  }

  // Saves states_[1] and records the calls; one of them may fail.
  Status Save(const std::optional<Fault>& fault = {}) {
    recorder.calls.clear();
    recorder.fault = fault;
    recorder.on = true;
    Status status = SaveState(states_[1], Path());
    recorder.on = false;
    recorder.fault.reset();
    calls_ = recorder.calls;
    return status;
  }

  // The index of the only successful call of that name, on that inode unless it
  // is 0.
  std::size_t Only(std::string_view name, ino_t inode = 0) const {
    std::optional<std::size_t> found;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      const Call& call = calls_[i];
      if (call.name != name || !call.ok) continue;
      if (inode != 0 && call.inode != inode) continue;
      EXPECT_FALSE(found) << "a second " << name;
      found = i;
    }
    EXPECT_TRUE(found) << "no " << name;
    return found.value_or(0);
  }
  const Call& PartOpened() const {
    const auto found = std::ranges::find_if(calls_, [](const Call& call) {
      return call.name == "openat" && (call.flags & O_CREAT) != 0;
    });
    EXPECT_NE(found, calls_.end());
    return *found;
  }
  ino_t FolderInode() const {
    struct stat about = {};
    EXPECT_EQ(::stat(folder_.c_str(), &about), 0);
    return about.st_ino;
  }
  // The index of the state that the file holds, whole; -1 if there is none.
  int Found() const {
    const Result<CacheState> loaded = LoadState(Path());
    if (loaded.ok() && *loaded == states_[0]) return 0;
    return loaded.ok() && *loaded == states_[1] ? 1 : -1;
  }

  std::vector<CacheState> states_;  // The old state, and the saved state.
  Calls calls_;                     // The calls of the last save.
};

TEST_F(SaveCalls, SyncTheFileThenRenameThenSyncTheFolder) {
  ASSERT_EQ(::chmod(Path().c_str(), 0640), 0);
  ASSERT_TRUE(Save().ok());
  EXPECT_EQ(Found(), 1);
  const Call& part = PartOpened();
  EXPECT_EQ(part.flags & (O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_TRUNC),
            O_EXCL | O_NOFOLLOW | O_CLOEXEC);
  const std::size_t synced = Only("fsync", part.inode);
  const std::size_t renamed = Only("renameat");
  const std::size_t name_synced = Only("fsync", FolderInode());
  EXPECT_LT(synced, renamed);
  EXPECT_LT(renamed, name_synced);
  EXPECT_EQ(calls_[renamed].path, part.path);
  EXPECT_EQ(calls_[renamed].to, "state");
  EXPECT_LT(Only("fchmod", part.inode), synced);
  EXPECT_LT(Only("flock", part.inode), synced);
  std::size_t writes = 0;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].name != "pwrite") continue;
    ++writes;
    EXPECT_EQ(calls_[i].inode, part.inode);
    EXPECT_LT(i, synced);
  }
  EXPECT_GT(writes, 3U);
  // Each save uses another name for its part file.
  const std::string before = part.path;
  ASSERT_TRUE(Save().ok());
  EXPECT_NE(PartOpened().path, before);
}

// Several threads write a large state.
TEST_F(SaveCalls, AreInTheSameOrderIfManyWrite) {
  states_[1] = SomeState(200000, 3);
  ASSERT_TRUE(Save().ok());
  const ino_t part = PartOpened().inode;
  const std::size_t synced = Only("fsync", part);
  for (std::size_t i = synced; i < calls_.size(); ++i) {
    EXPECT_NE(calls_[i].name, "pwrite");
  }
  EXPECT_LT(synced, Only("renameat"));
}

// A disk that keeps synced data, and any part of the rest: each unsynced write
// may be missing, partial or whole, in any order; each name may refer to any of
// its files since the folder was synced.
class Disk {
 public:
  using Files = std::set<std::optional<std::string>>;  // nullopt: no file.

  Disk(ino_t folder, ino_t file, std::string content) : folder_(folder) {
    files_[file].durable = std::move(content);
    names_["state"] = {file};
  }

  void Apply(const Call& call) {
    if (!call.ok) return;
    if (call.name == "openat" && (call.flags & O_CREAT) != 0) {
      names_.try_emplace(call.path, std::vector<ino_t>{0});
      names_[call.path].push_back(call.inode);
      files_[call.inode];
    }
    if (call.name == "openat" && (call.flags & O_TRUNC) != 0) {
      files_[call.inode].pending.push_back({0, {}, true});
    }
    if (call.name == "pwrite") {
      files_[call.inode].pending.push_back({call.at, call.bytes, false});
    }
    if (call.name == "renameat") {
      names_.try_emplace(call.to, std::vector<ino_t>{0});
      names_.try_emplace(call.path, std::vector<ino_t>{0});
      names_[call.to].push_back(names_[call.path].back());
      names_[call.path].push_back(0);
    }
    if (call.name == "unlinkat") names_[call.path].push_back(0);
    if (call.name == "syncfs" || call.inode == folder_) SyncNames(call);
    if (call.name == "syncfs") {
      for (auto& [inode, file] : files_) Sync(file);
    } else if (call.name == "fsync" && files_.contains(call.inode)) {
      Sync(files_[call.inode]);
    }
  }

  // All contents that `name` may have if the machine died now.
  Files MayBe(const std::string& name) const {
    Files all;
    for (const ino_t inode : names_.at(name)) {
      if (inode == 0) {
        all.insert(std::nullopt);
      } else {
        AddContents(files_.at(inode), all);
      }
    }
    return all;
  }

 private:
  struct Write {
    std::size_t at = 0;
    std::string bytes;
    bool truncates = false;  // The size becomes `at`.
  };
  struct OnDisk {
    std::string durable;
    std::vector<Write> pending;
  };

  static void Put(const Write& write, std::string& content) {
    if (write.truncates) {
      content.resize(write.at);
      return;
    }
    const std::size_t end = write.at + write.bytes.size();
    if (content.size() < end) content.resize(end);
    content.replace(write.at, write.bytes.size(), write.bytes);
  }
  static void Sync(OnDisk& file) {
    for (const Write& write : file.pending) Put(write, file.durable);
    file.pending.clear();
  }
  void SyncNames(const Call& call) {
    if (call.name != "fsync" && call.name != "syncfs") return;
    for (auto& [name, inodes] : names_) inodes = {inodes.back()};
  }

  // Adds the contents after every subset of a file's writes; and, for each
  // write, the contents where only a part of it, or zeros in its place, reached
  // the disk.
  static void AddContents(const OnDisk& file, Files& all) {
    const std::size_t count = file.pending.size();
    ASSERT_LE(count, 12U);
    for (std::size_t set = 0; set < std::size_t{1} << count; ++set) {
      std::string content = file.durable;
      for (std::size_t i = 0; i < count; ++i) {
        if ((set >> i & 1) != 0) Put(file.pending[i], content);
      }
      all.insert(content);
    }
    for (std::size_t torn = 0; torn < count; ++torn) {
      const std::size_t size = file.pending[torn].bytes.size();
      for (const std::size_t left :
           {size / 2, size - std::min<std::size_t>(size, 1)}) {
        for (const bool zeros : {false, true}) {
          std::string content = file.durable;
          for (std::size_t i = 0; i < count; ++i) {
            Write write = file.pending[i];
            if (i == torn) write.bytes.resize(left);
            if (i == torn && zeros) write.bytes.resize(size);
            Put(write, content);
          }
          all.insert(content);
        }
      }
    }
  }

  ino_t folder_;
  std::map<ino_t, OnDisk> files_;
  // For each name: its file at the last folder sync, and later ones; 0: none.
  std::map<std::string, std::vector<ino_t>> names_;
};

// Replays the log of a save call by call; after each call, loads every content
// that the disk may hold.
TEST_F(SaveCalls, LeaveAWholeStateIfTheMachineDies) {
  struct stat about = {};
  ASSERT_EQ(::stat(Path().c_str(), &about), 0);
  Disk disk(FolderInode(), about.st_ino, ReadFile(Path()));
  ASSERT_TRUE(Save().ok());
  std::map<std::optional<std::string>, int> known;
  const auto found = [&](const std::optional<std::string>& content) {
    const auto [place, is_new] = known.try_emplace(content, -1);
    if (is_new && content) {
      std::ofstream(Path(), std::ios::binary) << *content;
      place->second = Found();
    }
    return place->second;
  };
  const std::string now = ReadFile(Path());
  std::set<int> seen;
  std::size_t states = 0;
  for (std::size_t i = 0; i <= calls_.size(); ++i) {
    const Disk::Files may_be = disk.MayBe("state");
    states += may_be.size();
    for (const auto& content : may_be) {
      const int which = found(content);
      ASSERT_NE(which, -1) << "after " << i << " calls, before "
                           << (i < calls_.size() ? calls_[i].name : "the end");
      // After a save has returned ok, its state is on the disk.
      if (i == calls_.size()) {
        EXPECT_EQ(which, 1);
      }
      seen.insert(which);
    }
    if (i < calls_.size()) disk.Apply(calls_[i]);
  }
  EXPECT_EQ(seen, (std::set<int>{0, 1}));
  EXPECT_GT(states, calls_.size());
  // No write was missed: the simulated disk has the content of the file.
  EXPECT_EQ(disk.MayBe("state"), Disk::Files{now});
}

// The simulated disk detects mistakes: after the same calls in another order,
// or without one of them, it may hold other content.
TEST_F(SaveCalls, MustBeInThisOrder) {
  struct stat about = {};
  ASSERT_EQ(::stat(Path().c_str(), &about), 0);
  const std::string before = ReadFile(Path());
  ASSERT_TRUE(Save().ok());
  const std::string now = ReadFile(Path());
  // Whether other content is possible at any time, or the old one at the end.
  const auto wrong = [&](const Calls& calls) {
    Disk disk(FolderInode(), about.st_ino, before);
    bool found = false;
    for (const Call& call : calls) {
      disk.Apply(call);
      for (const auto& content : disk.MayBe("state")) {
        found = found || (content != before && content != now);
      }
    }
    return found || disk.MayBe("state") != Disk::Files{now};
  };
  EXPECT_FALSE(wrong(calls_));
  const std::size_t synced = Only("fsync", PartOpened().inode);
  const std::size_t renamed = Only("renameat");
  Calls other = calls_;
  std::swap(other[synced], other[renamed]);
  EXPECT_TRUE(wrong(other));
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].name != "fsync" && calls_[i].name != "pwrite") continue;
    other = calls_;
    other.erase(IteratorAt(other, i));
    EXPECT_TRUE(wrong(other)) << i;
  }
}

std::size_t OpenFiles() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return AsSize(std::distance(begin(all), end(all)));
}

// Whether the save succeeds although this call fails.
bool MayFail(const Call& call, int error) {
  static const std::set<std::string_view> kWishes = {
      "sync_file_range", "flock", "fchmod", "fchown", "fstat", "faccessat"};
  if (kWishes.contains(call.name)) return true;
  // The list of part files; and calls that are repeated after a signal.
  return call.path == "." || (error == EINTR && call.name != "renameat" &&
                              call.name != "getentropy");
}

TEST_F(SaveCalls, MayEachFail) {
  ASSERT_EQ(::chmod(Path().c_str(), 0640), 0);
  ASSERT_TRUE(Save().ok());
  const Calls all = calls_;
  std::set<std::string_view> failed;
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const int error : {EIO, ENOSPC, EDQUOT, EINTR}) {
      ASSERT_TRUE(SaveState(states_[0], Path()).ok());
      ASSERT_EQ(::chmod(Path().c_str(), 0640), 0);
      const std::size_t files = OpenFiles();
      SCOPED_TRACE(
          fmt::format("call {}, {}: {}", i, all[i].name, std::strerror(error)));
      const Status status = Save(Fault{i, error, {}});
      EXPECT_EQ(status.ok(), MayFail(all[i], error));
      EXPECT_EQ(Names(), (std::set<std::string>{"state"}));
      EXPECT_EQ(OpenFiles(), files);
      const bool last = i + 1 == all.size();  // The sync of the folder.
      EXPECT_EQ(Found(), status.ok() || last ? 1 : 0);
      if (status.ok()) continue;
      failed.insert(all[i].name);
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
      EXPECT_NE(status.message().find(Path()), std::string::npos);
      EXPECT_NE(status.message().find(std::strerror(error)), std::string::npos);
      EXPECT_EQ(
          status.message().find("perhaps not on disk") != std::string::npos,
          last);
    }
  }
  EXPECT_EQ(failed, (std::set<std::string_view>{"open", "fstatat", "getentropy",
                                                "openat", "pwrite", "fsync",
                                                "renameat"}));
}

TEST_F(SaveCalls, MayWriteLessThanRequested) {
  ASSERT_TRUE(Save().ok());
  const Calls all = calls_;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].name != "pwrite") continue;
    for (const ssize_t writes : {0, 1, 7}) {
      ASSERT_TRUE(SaveState(states_[0], Path()).ok());
      const Status status = Save(Fault{i, 0, writes});
      EXPECT_EQ(status.ok(), writes > 0);
      EXPECT_EQ(Found(), writes > 0 ? 1 : 0);
      EXPECT_EQ(Names(), (std::set<std::string>{"state"}));
    }
  }
}

// A program that is started meanwhile gets none of the files: it would hold the
// lock of a part file for as long as it runs.
TEST_F(SaveCalls, KeepTheirFilesFromOtherPrograms) {
  recorder.known_names = true;
  ASSERT_TRUE(Save().ok());
  const std::string part = PartOpened().path;
  recorder.known_names = false;
  std::ofstream(folder_ / part) << "of a dead saver";
  ASSERT_TRUE(Save().ok());
  EXPECT_FALSE(std::filesystem::exists(folder_ / part));
  int opened = 0;
  for (const Call& call : calls_) {
    if (call.name != "open" && call.name != "openat") continue;
    EXPECT_NE(call.flags & O_CLOEXEC, 0) << call.path;
    ++opened;
  }
  EXPECT_EQ(opened, 4);  // The folder, its list and both part files.
}

// Others may not read the new state of a private file, even before it is
// complete.
TEST_F(SaveCalls, APartFileIsPrivate) {
  const mode_t before = ::umask(0);
  ASSERT_EQ(::chmod(Path().c_str(), 0600), 0);
  mode_t mode = 0;
  recorder.on_lock = [&](const std::string& part) {
    struct stat about = {};
    EXPECT_EQ(::stat((folder_ / part).c_str(), &about), 0);
    mode = about.st_mode & 07777;
  };
  EXPECT_TRUE(Save().ok());
  ::umask(before);
  EXPECT_EQ(mode, 0600U);
}

// Some file systems have no locks.
TEST_F(SaveCalls, NeedNoLocks) {
  for (const int error : {EIO, ENOLCK}) {
    ASSERT_TRUE(SaveState(states_[0], Path()).ok());
    recorder.lock_error = error;
    EXPECT_TRUE(Save().ok());
    recorder.lock_error = 0;
    EXPECT_EQ(Found(), 1);
    EXPECT_EQ(Names(), (std::set<std::string>{"state"}));
  }
}

// On some file systems, a folder cannot be synced alone.
TEST_F(SaveCalls, SyncAllWhereAFolderCannotBeSynced) {
  ASSERT_TRUE(Save().ok());
  const std::size_t last = calls_.size() - 1;
  ASSERT_EQ(calls_[last].name, "fsync");
  for (const int error : {EINVAL, EBADF, ENOTSUP}) {
    ASSERT_TRUE(Save(Fault{last, error, {}}).ok());
    EXPECT_GT(Only("syncfs"), Only("renameat"));
    recorder.syncfs_error = EIO;
    const Status status = Save(Fault{last, error, {}});
    recorder.syncfs_error = 0;
    EXPECT_NE(status.message().find("perhaps not on disk"), std::string::npos);
  }
}

// A parking lot does not list such a file, and removes it.
TEST_F(SaveCalls, MayLeaveNoFileOfAConversation) {
  const SessionsSpec sizes = {.slots = 1, .context = 4, .batch = 4};
  const auto cache = *MakeCache({});
  ASSERT_TRUE(cache->Init(InitOf(sizes, DType::kF32)).ok());
  const auto sessions = *MakeSessions(*cache, sizes);
  const auto parking = *MakeParkingLot({.folder = folder_, .model = "m"});
  const float one = 1;
  const TensorView row = DenseView(&one, DType::kF32, {1, 1, 1, 1});
  std::optional<Fault> fault;
  for (const int token : {1, 2}) {
    const SessionInput input = {token};
    const int request = *sessions->Submit({&input, 1});
    ASSERT_TRUE(sessions->NextBatch().ok());
    ASSERT_TRUE(cache->Put(row, row).ok());
    ASSERT_TRUE(sessions->Finish(request).ok());
    recorder.calls.clear();
    recorder.fault = fault;
    recorder.on = true;
    EXPECT_TRUE(parking->Park(*sessions, *cache, 0).ok());
    EXPECT_EQ(parking->Wait().message().find("perhaps not on disk") !=
                  std::string::npos,
              fault.has_value());
    recorder.on = false;
    ASSERT_EQ(recorder.calls.back().name, "fsync");  // That of the folder.
    fault = Fault{recorder.calls.size() - 1, EIO, {}};
  }
  recorder.fault.reset();
  EXPECT_EQ(Names().size(), 2U);  // The state, and the first conversation.
  EXPECT_EQ(parking->Gauges(),
            (ParkingGauges{.parked = 1, .written = 1, .failed = 1}));
}

// An attacker knows the part file's name and has put a link there.
TEST_F(SaveCalls, DoNotFollowAPlantedLink) {
  recorder.known_names = true;
  ASSERT_TRUE(Save().ok());
  const std::string part = folder_ / PartOpened().path;
  const std::string victim = folder_ / "victim";
  std::ofstream(victim) << "precious";
  for (const std::string& target : {victim, std::string("nowhere")}) {
    std::filesystem::create_symlink(target, part);
    ASSERT_TRUE(SaveState(states_[0], folder_ / "other").ok());
    const Status status = Save();
    EXPECT_NE(status.message().find("File exists"), std::string::npos);
    EXPECT_EQ(ReadFile(victim), "precious");
    EXPECT_TRUE(std::filesystem::is_symlink(part));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "nowhere"));
    std::filesystem::remove(part);
  }
  recorder.known_names = false;
  EXPECT_EQ(Found(), 1);
}

// Another saver finds the part file before it is locked, and takes it for the
// file of a dead saver.
TEST_F(SaveCalls, ContinueIfThePartFileIsRemoved) {
  for (const bool holds : {false, true}) {
    int other = -1;
    std::string first;
    recorder.on_lock = [&](const std::string& part) {
      first = part;
      other = __real_open((folder_ / part).c_str(), O_RDONLY);
      EXPECT_EQ(__real_flock(other, LOCK_SH | LOCK_NB), 0);
      if (!holds) {
        std::filesystem::remove(folder_ / part);
        ::close(other);
      }
    };
    ASSERT_TRUE(SaveState(states_[0], Path()).ok());
    ASSERT_TRUE(Save().ok());
    if (holds) ::close(other);
    EXPECT_EQ(Found(), 1);
    EXPECT_EQ(Names(), (std::set<std::string>{"state"}));
    EXPECT_NE(calls_[Only("renameat")].path, first);
  }
}

}  // namespace
}  // namespace kvtwin::props
