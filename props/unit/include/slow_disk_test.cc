// A service whose disk stands still, or that runs out of memory for its files.
//
// This is a separate program because the linker wraps the C library's
// functions.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <ctime>
#include <filesystem>
#include <future>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/index.h"
#include "kvtwin/serving.h"
#include "props/base/scratch_folder.h"

namespace {

std::atomic<bool> stands = false;
std::atomic<int> writers = 0;  // Files that wait for the disk to be written.
std::atomic<bool> memory_is_out = false;  // For files of conversations.

void WaitForDisk() {
  while (stands) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the linker names these.
int __real_open(const char* path, int flags, ...);
int __real_flock(int file, int operation);

int __wrap_open(const char* path, int flags, ...) {
  std::va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  const std::string_view name(path);
  const bool reads = name.ends_with(".safetensors");
  const bool writes = name.ends_with("parked/.");  // A writer opens its folder.
  if (memory_is_out && (reads || writes)) throw std::bad_alloc();
  if (reads) WaitForDisk();
  return __real_open(path, flags, mode);
}
// A file is locked before it is written.
int __wrap_flock(int file, int operation) {
  ++writers;
  WaitForDisk();
  --writers;
  return __real_flock(file, operation);
}
// NOLINTEND
}

namespace kvtwin::props {
namespace {

using std::chrono::milliseconds;

// Puts rows of a pass.
void PutOnes(Cache& cache, int tokens) {
  const std::vector<float> ones(AsSize(tokens), 1);
  const TensorView rows =
      DenseView(ones.data(), DType::kF32, {1, 1, tokens, 1});
  EXPECT_TRUE(cache.SetLayer(0).ok());
  EXPECT_TRUE(cache.Put(rows, rows).ok());
}

// A service whose answers are of one token.
class SlowDisk : public testing::Test {
 protected:
  ~SlowDisk() override {
    stands = false;
    memory_is_out = false;
  }

  void MakeService() {
    service_.reset();
    cache_ = *MakeCache({});
    const SessionsSpec sizes = {.slots = 2, .context = 32, .batch = 16};
    ASSERT_TRUE(cache_->Init(InitOf(sizes, DType::kF32)).ok());
    service_ = *kvtwin::MakeService(
        *cache_,
        {.sessions = sizes,
         .worth = 2,
         .parking = {.folder = folder_.File("parked"), .model = "m"},
         .log = [this](const Status& status) { log_ = status.message(); }},
        {.forward =
             [this](Cache& cache, const SessionBatch& batch) {
               PutOnes(cache, Size(batch.inputs));
               logits_.assign(batch.outputs.size(), 0);
               return std::span<const float>(logits_);
             },
         .bytes = [](int) { return std::string("x"); }});
  }

  // Makes a service for which two conversations are on a disk that stands
  // still.
  void ParkTwoAndRestart() {
    MakeService();
    EXPECT_EQ(Whole(*Ask(1)).finish, Finish::kLength);
    EXPECT_EQ(Whole(*Ask(2)).finish, Finish::kLength);
    MakeService();
    stands = true;
  }

  // Asks for an answer to `equal` tokens that are equal, and `others` more.
  std::unique_ptr<Answer> Ask(int token, int others = 0, int equal = 4) {
    std::vector<SessionInput> prompt(AsSize(equal), SessionInput{token});
    prompt.insert(prompt.end(), AsSize(others), SessionInput{0});
    return *service_->Ask(
        {.prompt = prompt, .limit = 1, .stops = {}, .sample = [](auto) {
           return 0;
         }});
  }

  static AnswerPart Whole(Answer& answer, int wait = 10000) {
    return answer.Next(true, milliseconds(wait));
  }

  // The service leaves the processor to others while an answer waits.
  static void ExpectWaits(Answer& answer) {
    const std::clock_t before = std::clock();  // Of all threads.
    EXPECT_EQ(Whole(answer, 100).finish, Finish::kNone);
    EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
  }

  bool HasMetric(const std::string& line) const {
    return service_->Metrics().find("\nkvtwin_" + line + "\n") !=
           std::string::npos;
  }
  void ExpectMetric(const std::string& line) {
    EXPECT_TRUE(HasMetric(line)) << line << service_->Metrics();
  }
  // The same, if the service is given some seconds.
  void ExpectMetricSoon(const std::string& line) {
    const auto end = std::chrono::steady_clock::now() + milliseconds(10000);
    while (!HasMetric(line) && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    ExpectMetric(line);
  }

  ScratchFolder folder_{"slow_disk"};
  std::unique_ptr<Cache> cache_;
  std::vector<float> logits_;
  std::string log_;  // The last error of a file.
  std::unique_ptr<Service> service_;
};

// Answers continue, until copies of as many conversations wait as there are
// slots, and one more. One file is written after another.
TEST_F(SlowDisk, BatchesContinueWhileFilesAreWritten) {
  MakeService();
  stands = true;
  for (const int token : {1, 2, 3}) {
    EXPECT_EQ(Whole(*Ask(token)).finish, Finish::kLength) << token;
  }
  const auto answer = Ask(4);
  ExpectWaits(*answer);
  ExpectMetric("conversations_writing 3");
  while (writers == 0) std::this_thread::yield();
  EXPECT_EQ(writers, 1);
  stands = false;
  EXPECT_EQ(Whole(*answer).finish, Finish::kLength);
  service_.reset();
  EXPECT_EQ(
      std::distance(std::filesystem::directory_iterator(folder_.File("parked")),
                    std::filesystem::directory_iterator()),
      4);
}

TEST_F(SlowDisk, BatchesContinueWhileAFileIsRead) {
  ParkTwoAndRestart();
  const auto first = Ask(1, 3), second = Ask(2, 3);
  auto dropped = Ask(1, 5);
  EXPECT_EQ(Whole(*Ask(5)).finish, Finish::kLength);
  EXPECT_EQ(Whole(*Ask(6)).finish, Finish::kLength);
  ExpectWaits(*first);
  ExpectWaits(*second);
  dropped.reset();
  stands = false;
  EXPECT_EQ(Whole(*first).reused, 4);
  EXPECT_EQ(Whole(*second).reused, 4);
}

// An answer of an ending service ends before the service has written its files.
TEST_F(SlowDisk, AnswersEndBeforeTheFilesAreWritten) {
  MakeService();
  stands = true;
  for (const int token : {1, 2, 3}) Whole(*Ask(token));
  const auto answer = Ask(4);
  ExpectMetricSoon("conversations_writing 3");
  const auto end = std::async(std::launch::async, [&] { service_.reset(); });
  auto read = std::async(std::launch::async, [&] {
    Whole(*answer);
    std::this_thread::sleep_for(milliseconds(20));
    return Whole(*answer).finish;  // While the service waits for the disk.
  });
  EXPECT_EQ(read.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  stands = false;
  EXPECT_EQ(read.get(), Finish::kFailed);
}

// The prompt shares its first token alone with the file that is being written.
TEST_F(SlowDisk, OnlyAFileOfUseIsWaitedFor) {
  MakeService();
  stands = true;
  EXPECT_EQ(Whole(*Ask(1)).finish, Finish::kLength);
  ExpectMetricSoon("conversations_writing 1");
  EXPECT_EQ(Whole(*Ask(1, 3, 1), 2000).finish, Finish::kLength);
}

// A file is not read before it is written.
TEST_F(SlowDisk, AFileIsFetchedAfterItIsWritten) {
  cache_ = *MakeCache({});
  const SessionsSpec sizes = {.slots = 2, .context = 8, .batch = 8};
  ASSERT_TRUE(cache_->Init(InitOf(sizes, DType::kF32)).ok());
  const auto sessions = *MakeSessions(*cache_, sizes);
  const std::vector<SessionInput> prompt(3, SessionInput{1});
  const int request = *sessions->Submit(prompt);
  ASSERT_TRUE(sessions->NextBatch().ok());
  PutOnes(*cache_, 3);
  const int slot = sessions->Request(request)->slot;
  ASSERT_TRUE(sessions->Finish(request).ok());
  const auto parking =
      *MakeParkingLot({.folder = folder_.File("parked"), .model = "m"});
  stands = true;
  ASSERT_TRUE(parking->Park(*sessions, *cache_, slot).ok());
  EXPECT_EQ(parking->Fetch(prompt, 1, true), Fetched::kReading);
  std::this_thread::sleep_for(milliseconds(20));
  stands = false;
  EXPECT_TRUE(parking->Wait().ok());
  while (parking->Fetch(prompt, 1, true) != Fetched::kReady) {
    std::this_thread::yield();
  }
  EXPECT_EQ(*parking->Unpark(*sessions, *cache_, 1 - slot, prompt, 1), 3);
}

// A file that was read for a request that was dropped gives place to another.
TEST_F(SlowDisk, AReadingMayBeDropped) {
  ParkTwoAndRestart();
  auto dropped = Ask(1, 3);
  EXPECT_EQ(Whole(*dropped, 50).finish, Finish::kNone);
  dropped.reset();
  const auto answer = Ask(2, 3);
  EXPECT_EQ(Whole(*answer, 50).finish, Finish::kNone);
  stands = false;
  EXPECT_EQ(Whole(*answer).reused, 4);
}

// A file that is not written is not listed, whatever its writer throws, and the
// file that it would have replaced is. A file that is not read is forgotten.
TEST_F(SlowDisk, MemoryMayRunOutForAFile) {
  MakeService();
  EXPECT_EQ(Whole(*Ask(1)).finish, Finish::kLength);
  ExpectMetricSoon("conversations_parked 1");
  ExpectMetricSoon("conversations_writing 0");
  memory_is_out = true;
  EXPECT_EQ(Whole(*Ask(1, 3)).finish, Finish::kLength);
  ExpectMetricSoon("parking_failures_total 1");
  ExpectMetric("conversations_parked 1");
  ExpectMetric("conversations_writing 0");
  EXPECT_TRUE(log_.ends_with(".safetensors': std::bad_alloc")) << log_;
  memory_is_out = false;
  MakeService();
  ExpectMetric("conversations_parked 1");
  log_.clear();
  memory_is_out = true;
  EXPECT_EQ(Whole(*Ask(1, 1)).reused, 0);
  ExpectMetricSoon("parking_failures_total 2");  // It is not written either.
  ExpectMetric("conversations_parked 0");
  EXPECT_TRUE(log_.ends_with(".safetensors': std::bad_alloc")) << log_;
}

}  // namespace
}  // namespace kvtwin::props
