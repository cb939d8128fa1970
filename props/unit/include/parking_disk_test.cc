// Conversations that are written and read in the background, on disks that are
// full or slow, and without threads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "kvtwin/serving.h"
#include "props/unit/include/parking_server.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Writes fail, as on a full disk, by a limit on the size of files.
class FullDisk {
 public:
  FullDisk() {
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    struct rlimit full = before_;
    full.rlim_cur = 64;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  }
  ~FullDisk() {
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  struct rlimit before_ = {};
  void (*handler_)(int) = std::signal(SIGXFSZ, SIG_IGN);
};

// No thread can start: none has room for a stack.
class NoThreads {
 public:
  NoThreads() {
    EXPECT_EQ(pthread_getattr_default_np(&before_), 0);
    pthread_attr_t huge;
    EXPECT_EQ(pthread_getattr_default_np(&huge), 0);
    EXPECT_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 60), 0);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
    EXPECT_THROW(std::thread([] {}).join(), std::system_error);
  }
  ~NoThreads() {
    EXPECT_EQ(pthread_setattr_default_np(&before_), 0);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_ = {};
};

TEST_F(Parked, FilesAreWrittenAndReadWithoutThreads) {
  const auto parking = Open();
  const Prompt prompt = PromptOf({1, 2, 3}), longer = PromptOf({1, 2, 3, 4});
  ParkAll(*parking, {prompt});
  ParkingServer server;
  const int slot = server.Compute(longer);
  {
    const NoThreads none;
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
    EXPECT_TRUE(parking->Wait(/*all=*/false).ok());
    EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 1, .written = 2}));
    EXPECT_EQ(Files().size(), 1);
    EXPECT_EQ(parking->Fetch(longer, 1, true), Fetched::kReady);
  }
  EXPECT_EQ(Unparked(*parking, longer), 4);
  EXPECT_EQ(parking->Gauges(),
            (ParkingGauges{.parked = 1, .written = 2, .loaded = 1}));
}

// The last file is written by the destructor.
TEST_F(Parked, TheEndWritesWithoutThreads) {
  const Prompt prompt = PromptOf({1, 2, 3});
  ParkingServer server;
  const int slot = server.Compute(prompt);
  {
    const NoThreads none;
    const auto parking = Open();
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  }
  EXPECT_EQ(Unparked(*Open(), prompt), 3);
}

TEST_F(Parked, AServiceNeedsAThread) {
  ParkingServer server;
  const NoThreads none;
  const auto service = MakeService(
      server.cache(), {.sessions = kParkingSpec, .parking = Spec()},
      {.forward = [](auto&, auto&) { return std::span<const float>(); },
       .bytes = [](auto) { return std::string(); }});
  EXPECT_EQ(service.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(service.status().message(),
              HasSubstr("the thread of the service cannot start: "));
}

// A folder that cannot be written to, and a disk that is full: what would have
// been replaced stays.
TEST_F(Parked, AFileThatCannotBeWrittenIsForgotten) {
  const auto parking = Open(1);
  ParkAll(*parking, {PromptOf({1, 2})});
  const auto park = [&](const Prompt& prompt) {
    ParkingServer server;
    const int slot = server.Compute(prompt);
    EXPECT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
    return parking->Wait();
  };
  const auto park_on_full_disk = [&](const Prompt& prompt) {
    const FullDisk full;
    return park(prompt);
  };
  const Status status = park_on_full_disk(PromptOf({1, 2, 3}));
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("cannot be written"));
  EXPECT_TRUE(parking->Wait().ok());  // It is said once.
  EXPECT_EQ(parking->Gauges(),
            (ParkingGauges{.parked = 1, .written = 1, .failed = 1}));
  EXPECT_EQ(Files().size(), 1);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 2);

  fs::rename(Spec().folder, folder_.File("moved"));
  EXPECT_FALSE(park(PromptOf({4})).ok());
  fs::rename(folder_.File("moved"), Spec().folder);
  EXPECT_EQ(parking->Gauges().failed, 2);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 2);
  EXPECT_TRUE(park(PromptOf({1, 2, 3})).ok());
  EXPECT_EQ(Files().size(), 1);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 3);
}

// Park writes a conversation again after its file has failed, also without a
// Wait in between.
TEST_F(Parked, AFileThatFailedIsWrittenAgain) {
  const auto parking = Open();
  const Prompt prompt = PromptOf({1, 2, 3});
  ParkingServer server;
  const int slot = server.Compute(prompt);
  {
    const NoThreads none;  // The file is written by the second Park.
    const FullDisk full;
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  }
  EXPECT_FALSE(parking->Wait().ok());  // The first file.
  EXPECT_EQ(parking->Gauges(),
            (ParkingGauges{.parked = 1, .written = 1, .failed = 1}));
  EXPECT_EQ(Unparked(*parking, prompt), 3);
}

// A conversation is wanted before its file has failed: what the file would have
// replaced is loaded instead.
TEST_F(Parked, AFileMayFailWhileItIsWanted) {
  const auto parking = Open();
  ParkAll(*parking, {PromptOf({1, 2})});
  ParkingServer server;
  const int slot = server.Compute(PromptOf({1, 2, 3}));
  const FullDisk full;
  ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 2);
  EXPECT_FALSE(parking->Wait().ok());
  EXPECT_EQ(
      parking->Gauges(),
      (ParkingGauges{.parked = 1, .written = 1, .loaded = 1, .failed = 1}));
}

TEST_F(Parked, FilesAreWrittenInOrder) {
  const auto parking = Open();
  for (const Prompt& prompt :
       {PromptOf({1}), PromptOf({1, 2}), PromptOf({3}), PromptOf({1, 2, 3})}) {
    ParkingServer server;
    const int slot = server.Compute(prompt);
    ASSERT_TRUE(parking->Park(server.sessions(), server.cache(), slot).ok());
  }
  EXPECT_TRUE(parking->Wait().ok());
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.parked = 2, .written = 4}));
  EXPECT_EQ(Files().size(), 2);
  EXPECT_EQ(Unparked(*parking, PromptOf({1, 2, 3})), 3);
}

// A file that could not be written does not come back with one that would have
// replaced it.
TEST_F(Parked, AFileMayFailWithTheOneThatItReplaces) {
  const auto parking = Open();
  ParkingServer first, second;
  const int slot = first.Compute(PromptOf({1, 2}));
  const int other = second.Compute(PromptOf({1, 2, 3}));
  {
    const FullDisk full;
    ASSERT_TRUE(parking->Park(first.sessions(), first.cache(), slot).ok());
    ASSERT_TRUE(parking->Park(second.sessions(), second.cache(), other).ok());
    EXPECT_FALSE(parking->Wait().ok());
  }
  EXPECT_EQ(parking->Gauges(), (ParkingGauges{.failed = 2}));
  EXPECT_TRUE(Files().empty());
}

TEST_F(Parked, AFileIsReadInTheBackground) {
  const auto parking = Open();
  const Prompt prompt = PromptOf({1, 2, 3}), other = PromptOf({4, 5});
  ParkAll(*parking, {prompt, other});
  const auto fetch = [&](const Prompt& wanted) {
    while (parking->Fetch(wanted, 1, true) != Fetched::kReady) usleep(1000);
  };
  for (const int least : {0, 1}) {
    EXPECT_EQ(parking->Fetch(PromptOf({9}), least, true), Fetched::kNothing);
    EXPECT_EQ(Unparked(*parking, PromptOf({9}), least), 0);
  }
  EXPECT_EQ(parking->Fetch(prompt, 4, true), Fetched::kNothing);
  fetch(prompt);
  EXPECT_EQ(parking->Fetch(other, 1, false), Fetched::kReading);
  fs::remove(Files().front());
  ASSERT_EQ(Unparked(*parking, prompt), 3);  // It was read before.
  fetch(prompt);
  fetch(other);
  EXPECT_EQ(Unparked(*parking, other), 2);
  EXPECT_EQ(Unparked(*parking, prompt), -1);
}

// A file that was read for one prompt is not loaded for another.
TEST_F(Parked, AnotherFileThanTheLastIsLoaded) {
  const Prompt first = PromptOf({1, 2, 3}), second = PromptOf({4, 5, 6});
  for (const auto& [read, wanted] :
       {std::pair(first, second), std::pair(second, first)}) {
    fs::remove_all(Spec().folder);
    const auto parking = Open();
    ParkAll(*parking, {first, second});
    while (parking->Fetch(read, 1, true) != Fetched::kReady) usleep(1000);
    EXPECT_EQ(Unparked(*parking, wanted), 3);
    EXPECT_EQ(Unparked(*parking, read), 3);
  }
}

// Fetch alone finds out that a file is written, and then reads it. Unpark waits
// for it.
TEST_F(Parked, AFileIsWantedWhileItIsWritten) {
  const Prompt prompt = PromptOf({1, 2, 3});
  const auto parking = Open();
  ParkingServer server;
  const int slot = server.Compute(prompt);
  const auto park = [&] {
    return parking->Park(server.sessions(), server.cache(), slot).ok();
  };
  ASSERT_TRUE(park());
  EXPECT_EQ(Unparked(*parking, prompt, 3), 3);
  fs::remove(Files().front());
  EXPECT_EQ(Unparked(*parking, prompt), -1);
  ASSERT_TRUE(park());
  Fetched fetched = Fetched::kReading;
  for (int i = 0; i < 5000 && fetched == Fetched::kReading; ++i) {
    usleep(1000);
    fetched = parking->Fetch(prompt, 3, true);
  }
  EXPECT_EQ(fetched, Fetched::kReady);
  EXPECT_EQ(Unparked(*parking, prompt, 3), 3);
}

// The part file of a writer that was killed.
TEST_F(Parked, RemovesWhatDeadWritersLeft) {
  ParkedFile(PromptOf({1}));
  const std::string left = Spec().folder + "/.kvtwin-0123456789abcdef-" +
                           std::string(32, 'a') + ".part";
  const std::string other = Spec().folder + "/.kvtwin-other.part";
  std::ofstream(left) << "x";
  std::ofstream(other) << "x";
  EXPECT_EQ(Open()->Gauges().parked, 1);
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(other));
}

}  // namespace
}  // namespace kvtwin::props
