// SaveState and LoadState beside other processes, and beside other files in a
// folder.

#include <fcntl.h>
#include <fmt/format.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "props/testing/test_states.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using NameSet = std::set<std::string>;

constexpr auto kUntimely = StatusCode::kFailedPrecondition;

class SavedFiles : public WithFolder {
 protected:
  std::string At(const std::string& name) const {
    return (folder_ / name).string();
  }
};

// A child process that calls `does`.
class Child {
 public:
  explicit Child(const std::function<void()>& does) : id_(::fork()) {
    EXPECT_GE(id_, 0);
    if (id_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // The child ends with the test.
    does();
    ::_exit(0);
  }
  ~Child() {
    if (id_ <= 0) return;
    Signal(SIGKILL);
    Wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Signal(int signal) const { EXPECT_EQ(::kill(id_, signal), 0); }
  // Returns the exit code; -1 if the process was killed.
  int Wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(id_, &status, 0), id_);
    id_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Stops the process. Returns false if it has ended.
  bool Stop() const {
    Signal(SIGSTOP);
    siginfo_t info = {};
    const auto id = static_cast<id_t>(id_);
    EXPECT_EQ(::waitid(P_PID, id, &info, WEXITED | WSTOPPED | WNOWAIT), 0);
    return info.si_code == CLD_STOPPED;
  }
  bool Ended() const {
    siginfo_t info = {};
    const auto id = static_cast<id_t>(id_);
    EXPECT_EQ(::waitid(P_PID, id, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    return info.si_pid == id_;
  }

 private:
  pid_t id_;
};

// Exits with 0 if all saves were ok. Saves as the first process of a container,
// if this process may make one.
void SaveAsProcessOne(const CacheState& state, const std::string& path,
                      int saves) {
  static_cast<void>(::unshare(CLONE_NEWUSER | CLONE_NEWPID));
  Child saver([&] {
    bool ok = true;
    for (int i = 0; i < saves; ++i) ok = ok && SaveState(state, path).ok();
    ::_exit(ok ? 0 : 1);
  });
  ::_exit(saver.Wait());
}

// Two containers share a folder.
TEST_F(SavedFiles, AreWholeIfOtherProcessesSave) {
  const std::vector<CacheState> states = {SomeState(3000, 1),
                                          SomeState(4000, 2)};
  ASSERT_TRUE(SaveState(states[0], Path()).ok());
  constexpr int kSaves = 60;
  Child first([&] { SaveAsProcessOne(states[0], Path(), kSaves); });
  Child second([&] { SaveAsProcessOne(states[1], Path(), kSaves); });
  std::array<int, 2> found = {};
  while (!first.Ended() || !second.Ended()) {
    const Result<CacheState> loaded = LoadState(Path());
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    const std::size_t which = *loaded == states[0] ? 0 : 1;
    ASSERT_TRUE(*loaded == states[which]);
    ++found[which];
  }
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(second.Wait(), 0);
  EXPECT_GT(found[0], 0);
  EXPECT_GT(found[1], 0);
  EXPECT_EQ(Names(), (NameSet{"state"}));
}

TEST_F(SavedFiles, AreWholeIfOtherThreadsSave) {
  const std::vector<CacheState> states = {SomeState(300, 1), SomeState(400, 2),
                                          SomeState(500, 3)};
  std::vector<std::thread> threads;
  for (const CacheState& state : states) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(SaveState(state, Path()).ok());
        const Result<CacheState> loaded = LoadState(Path());
        EXPECT_TRUE(loaded.ok() &&
                    (*loaded == states[0] || *loaded == states[1] ||
                     *loaded == states[2]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Names(), (NameSet{"state"}));
}

// A process that saves two states in turn is killed at a random moment: one of
// them is there, whole.
TEST_F(SavedFiles, AreWholeIfTheProcessDies) {
  const std::vector<CacheState> states = {SomeState(4000, 1),
                                          SomeState(5000, 2)};
  ASSERT_TRUE(SaveState(states[0], Path()).ok());
  // The child is killed within up to four times the duration of a save.
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(SaveState(states[0], Path()).ok());
  const auto some = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - start);
  std::mt19937 random(1);
  int changed = 0;
  int left = 0;
  std::size_t last = 0;
  // On a busy machine it takes more rounds until both cases have occurred.
  for (int i = 0; i < 40 || (i < 1000 && (changed < 4 || left < 4)); ++i) {
    Child child([&] {
      for (std::size_t n = last + 1;; ++n) {
        static_cast<void>(SaveState(states[n % 2], Path()).ok());
      }
    });
    std::this_thread::sleep_for(some * (random() % 1000) * (1 + i % 4) / 1000);
    child.Signal(SIGKILL);
    ASSERT_EQ(child.Wait(), -1);
    const Result<CacheState> loaded = LoadState(Path());
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    const std::size_t now = *loaded == states[0] ? 0 : 1;
    ASSERT_TRUE(*loaded == states[now]);
    changed += now == last ? 0 : 1;
    last = now;
    // The part file of the last child that died, and no others.
    ASSERT_LE(Names().size(), 2U);
    left += Names().size() == 2 ? 1 : 0;
  }
  EXPECT_GT(changed, 3);  // Some died after a save, some before.
  EXPECT_GT(left, 3);
  ASSERT_TRUE(SaveState(states[0], Path()).ok());
  EXPECT_EQ(Names(), (NameSet{"state"}));
}

// Whether a saver holds a lock on the only file besides the state.
bool HasLockedPart(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() == "state") continue;
    const int part = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_GE(part, 0);
    const bool locked = ::flock(part, LOCK_SH | LOCK_NB) != 0;
    ::close(part);
    return locked;
  }
  return false;
}

// A saver is stopped once its part file exists.
TEST_F(SavedFiles, PartFilesOfTheLivingStay) {
  const std::vector<CacheState> states = {SomeState(40, 1), SomeState(50, 2)};
  ASSERT_TRUE(SaveState(states[0], Path()).ok());
  for (int i = 0; i < 3; ++i) {
    const fs::path end = folder_ / "end";
    Child child([&] {
      bool ok = true;
      while (!fs::exists(end)) ok = ok && SaveState(states[0], Path()).ok();
      ::_exit(ok ? 0 : 1);
    });
    bool locked = false;
    while (!locked && child.Stop()) {
      locked = HasLockedPart(folder_);
      if (!locked) child.Signal(SIGCONT);
    }
    ASSERT_TRUE(locked);
    const NameSet names = Names();
    ASSERT_TRUE(SaveState(states[1], Path()).ok());
    EXPECT_EQ(Names(), names);
    ASSERT_TRUE(*LoadState(Path()) == states[1]);
    std::ofstream(end) << "now";
    child.Signal(SIGCONT);
    EXPECT_EQ(child.Wait(), 0);
    fs::remove(end);
    EXPECT_EQ(Names(), (NameSet{"state"}));
  }
}

// Only part files of the same path are removed; files with similar names stay.
TEST_F(SavedFiles, OtherFilesStay) {
  std::string part;
  while (part.empty()) {
    Child child([&] {
      for (;;) static_cast<void>(SaveState(SomeState(40, 1), Path()).ok());
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    child.Signal(SIGKILL);
    child.Wait();
    for (const std::string& name : Names()) {
      if (name != "state") part = name;
    }
  }
  const NameSet others = {
      part + "x",       "x" + part,
      part.substr(1),   part.substr(0, part.size() - 1),
      "state.1.1.part", part.substr(0, part.size() - 5) + ".keep"};
  for (const std::string& name : others) fs::copy_file(At(part), At(name));
  const std::string pipe = part.substr(0, part.size() - 6) + "x.part";
  ASSERT_EQ(::mkfifo(At(pipe).c_str(), 0666), 0);
  ASSERT_TRUE(SaveState(SomeState(1, 1), At("other")).ok());
  EXPECT_TRUE(Names().contains(part));
  ASSERT_TRUE(SaveState(SomeState(1, 1), Path()).ok());
  NameSet expected = others;
  expected.insert({"state", "other", pipe});
  EXPECT_EQ(Names(), expected);
}

// Anything with that name but a regular file is neither replaced nor followed.
TEST_F(SavedFiles, OnlyRegularFilesAreReplaced) {
  const CacheState state = SomeState(1, 1);
  fs::create_directory(At("folder"));
  ASSERT_TRUE(SaveState(SomeState(2, 2), At("target")).ok());
  const std::string target = ReadFile(At("target"));
  fs::create_symlink(At("target"), At("link"));
  fs::create_symlink(At("nowhere"), At("dangling"));
  ASSERT_EQ(::mkfifo(At("pipe").c_str(), 0666), 0);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(At("socket").size(), sizeof(address.sun_path));
  std::strcpy(address.sun_path, At("socket").c_str());
  ASSERT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address),
                   sizeof(address)),
            0);
  // This device is the test's own: a faulty SaveState would replace it.
  const bool device =
      ::mknod(At("device").c_str(), S_IFCHR | 0666, ::makedev(1, 3)) == 0;
  const NameSet before = Names();
  for (const auto& [name, what] :
       {std::pair("folder", "a folder"),
        std::pair(device ? "device" : "folder",
                  device ? "a device" : "a folder"),
        std::pair("link", "a symbolic link"),
        std::pair("dangling", "a symbolic link"), std::pair("pipe", "a pipe"),
        std::pair("socket", "a socket")}) {
    const Status status = SaveState(state, At(name));
    EXPECT_EQ(status.code(), kUntimely);
    EXPECT_EQ(
        status.message(),
        fmt::format("'{}' is not a regular file, but {}", At(name), what));
  }
  EXPECT_EQ(Names(), before);
  EXPECT_EQ(ReadFile(At("target")), target);
  EXPECT_TRUE(fs::is_symlink(At("link")));
  ::close(listener);
}

TEST_F(SavedFiles, OnlyRegularFilesAreLoaded) {
  EXPECT_EQ(LoadState(Path()).status().code(), kUntimely);
  EXPECT_EQ(LoadState(folder_).status().message(),
            fmt::format("'{}' is not a regular file, but a folder",
                        folder_.string()));
  EXPECT_EQ(LoadState("/dev/zero").status().message(),
            "'/dev/zero' is not a regular file, but a device");
  ASSERT_EQ(::mkfifo(At("pipe").c_str(), 0666), 0);
  // No process writes to it.
  EXPECT_EQ(LoadState(At("pipe")).status().message(),
            fmt::format("'{}' is not a regular file, but a pipe", At("pipe")));
  fs::create_symlink(At("loop"), At("loop"));
  EXPECT_NE(LoadState(At("loop")).status().message().find("Too many levels"),
            std::string::npos);
  // Loading follows a link that the user made.
  ASSERT_TRUE(SaveState(SomeState(2, 2), Path()).ok());
  fs::create_symlink(Path(), At("link"));
  EXPECT_TRUE(*LoadState(At("link")) == SomeState(2, 2));
}

TEST_F(SavedFiles, NamesAreChecked) {
  const CacheState state = SomeState(1, 1);
  const auto why = [&](const std::string& path) {
    const Status status = SaveState(state, path);
    EXPECT_FALSE(status.ok()) << path;
    return status.message();
  };
  EXPECT_NE(why(At("no/folder")).find("No such file"), std::string::npos);
  EXPECT_NE(why(At(std::string(256, 'x'))).find("name too long"),
            std::string::npos);
  EXPECT_EQ(why(""), "'' does not name a file");
  EXPECT_EQ(why(At("")),
            fmt::format("'{}/' does not name a file", folder_.string()));
  EXPECT_EQ(why(At("..")), fmt::format("'{}' does not name a file", At("..")));
  const std::string nul = At(std::string("a\0b", 3));
  EXPECT_NE(why(nul).find("has a NUL"), std::string::npos);
  EXPECT_EQ(LoadState(nul).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Names(), NameSet());
  for (const std::string& name :
       {std::string(255, 'x'), std::string(".hidden"), std::string("a b\n")}) {
    ASSERT_TRUE(SaveState(state, At(name)).ok());
    EXPECT_TRUE(*LoadState(At(name)) == state);
    EXPECT_EQ(Names(), (NameSet{name}));
    fs::remove(At(name));
  }
  fs::current_path(folder_);  // Saves here, without a folder's name.
  EXPECT_TRUE(SaveState(state, "here").ok());
  EXPECT_EQ(Names(), (NameSet{"here"}));
  fs::current_path("/");
}

struct stat About(const std::string& path) {
  struct stat about = {};
  EXPECT_EQ(::stat(path.c_str(), &about), 0);
  return about;
}

TEST_F(SavedFiles, KeepTheModeOfTheFileBefore) {
  const CacheState state = SomeState(1, 1);
  const mode_t before = ::umask(0);
  EXPECT_TRUE(SaveState(state, At("open")).ok());
  EXPECT_EQ(About(At("open")).st_mode & 07777, 0666U);  // Like any new file.
  ::umask(027);
  EXPECT_TRUE(SaveState(state, Path()).ok());
  EXPECT_EQ(About(Path()).st_mode & 07777, 0640U);
  for (const mode_t mode : {0600U, 0666U, 0444U, 0757U}) {
    ASSERT_EQ(::chmod(Path().c_str(), mode), 0);
    EXPECT_TRUE(SaveState(state, Path()).ok());
    EXPECT_EQ(About(Path()).st_mode & 07777, mode);
  }
  ::umask(before);
}

// Only root may give files away; others keep the group if they belong to it.
TEST_F(SavedFiles, KeepTheOwnerOfTheFileBefore) {
  const CacheState state = SomeState(1, 1);
  ASSERT_TRUE(SaveState(state, Path()).ok());
  // Only root may give a file to another user: without that there is no owner
  // to keep.
  if (::chown(Path().c_str(), 1234, 4321) != 0) GTEST_SKIP() << "not as root";
  for (const auto& [user, group] :
       {std::pair(1234U, 4321U), std::pair(1234U, ::getegid()),
        std::pair(::geteuid(), 4321U)}) {
    ASSERT_EQ(::chown(Path().c_str(), user, group), 0);
    ASSERT_EQ(::chmod(Path().c_str(), 0640), 0);
    ASSERT_TRUE(SaveState(state, Path()).ok());
    EXPECT_EQ(About(Path()).st_uid, user);
    EXPECT_EQ(About(Path()).st_gid, group);
    EXPECT_EQ(About(Path()).st_mode & 07777, 0640U);
  }
  // Users who may write to the folder: in the group of the file, in another
  // group, and in both.
  ASSERT_EQ(::chmod(folder_.c_str(), 0777), 0);
  const gid_t file_group = 4321;
  for (const auto& [group, groups] :
       {std::pair(4321U, 0U), std::pair(77U, 0U), std::pair(77U, 1U)}) {
    ASSERT_EQ(::chown(Path().c_str(), 1234, 4321), 0);
    ASSERT_EQ(::chmod(Path().c_str(), 0664), 0);
    Child child([&, group = group, groups = groups] {
      const bool changed = ::setgroups(groups, &file_group) == 0 &&
                           ::setgid(group) == 0 && ::setuid(99) == 0;
      if (!changed || ::access(folder_.c_str(), W_OK) != 0) ::_exit(77);
      ::_exit(SaveState(state, Path()).ok() ? 0 : 1);
    });
    const int code = child.Wait();
    // The temp folder itself may be closed to other users (a private TMPDIR):
    // then the second user cannot reach the file at all.
    if (code == 77) GTEST_SKIP() << "other users cannot reach the temp folder";
    ASSERT_EQ(code, 0);
    EXPECT_EQ(About(Path()).st_uid, 99U);
    const bool kept = group == file_group || groups > 0;
    EXPECT_EQ(About(Path()).st_gid, kept ? file_group : group);
    // Another group gets no more access than all other users.
    EXPECT_EQ(About(Path()).st_mode & 07777, kept ? 0664U : 0644U);
  }
}

// A user may create files in the folder, but may not list it.
TEST_F(SavedFiles, AreSavedToAFolderThatCannotBeRead) {
  ASSERT_EQ(::chmod(folder_.c_str(), 0333), 0);
  Child child([&] {
    if (::geteuid() == 0) static_cast<void>(::setuid(99));
    if (::access(folder_.c_str(), W_OK) != 0) ::_exit(77);
    ::_exit(SaveState(SomeState(1, 1), Path()).ok() ? 0 : 1);
  });
  const int code = child.Wait();
  ASSERT_EQ(::chmod(folder_.c_str(), 0777), 0);
  // Root ignores the mode of a folder, so the child is another user, which a
  // private TMPDIR keeps out.
  if (code == 77) GTEST_SKIP() << "other users cannot reach the temp folder";
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(*LoadState(Path()) == SomeState(1, 1));
  EXPECT_EQ(Names(), (NameSet{"state"}));
}

// The state is larger than the largest file that this process may write.
TEST_F(SavedFiles, AFullDiskLeavesNothing) {
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = SaveState(SomeState(99, 1), Path());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(status.message(),
            fmt::format("'{}' cannot be written: File too large", Path()));
  EXPECT_EQ(Names(), NameSet());
}

}  // namespace
}  // namespace kvtwin::props
