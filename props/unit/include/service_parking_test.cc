// A service that keeps conversations on disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvtwin/serving.h"
#include "props/base/scratch_folder.h"
#include "props/unit/include/letters.h"

namespace kvtwin::props {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

TEST(Service, AConversationIsParkedAndLoaded) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.path(), .model = "letters"};
  std::string text;
  {
    Letters letters(spec);
    text = WholeOf(letters.service(), RequestOf("hello", 8)).text;
    WaitFor(letters.service(), "conversations_parked", 1);
  }
  Letters letters(spec);
  EXPECT_EQ(Metric(letters.service(), "conversations_parked"), 1);
  const std::string prompt = "hello" + text + "world";
  const AnswerPart part = WholeOf(letters.service(), RequestOf(prompt, 4));
  EXPECT_EQ(part.text, ExpectedText(prompt, 4));
  EXPECT_EQ(part.reused, 5 + 7);  // The last token was not computed.
}

// Conversations of `worth` tokens are parked, and shorter ones are not.
TEST(Service, AShortConversationIsNotParked) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.path(), .model = "letters"};
  for (const std::string prompt : {"the", "word"}) {
    Letters letters(spec);
    WholeOf(letters.service(), RequestOf(prompt, 1));
    letters.End();  // It has written all files.
    EXPECT_EQ(std::filesystem::is_empty(folder.path()), prompt == "the");
  }
}

// The conversation of an answer that is dropped is parked before another
// request takes its slot. A conversation whose prompt was not computed is not
// parked.
TEST(Service, ADroppedConversationIsParked) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf(1);
  spec.parking = {.folder = folder.path(), .model = "letters"};
  std::vector<std::string> said;
  spec.log = [&](const Status& status) { said.push_back(status.message()); };
  {
    Letters letters(spec);
    ServiceRequest request = RequestOf("hello", 0);
    HoldAfter(2, letters, request);
    auto dropped = letters.Ask(std::move(request));
    WaitFor(letters.service(), "answer_tokens_total", 2);
    auto other = letters.Ask(RequestOf("other", 1));
    dropped.reset();
    letters.hold = false;
    Whole(*other);

    letters.hold = true;
    dropped = letters.Ask(RequestOf("itneedsmorethanabatch", 1));
    WaitFor(letters.service(), "requests_running", 1);
    dropped.reset();
    letters.hold = false;
    WaitFor(letters.service(), "cancelled_total", 2);
  }
  EXPECT_THAT(said, testing::IsEmpty());
  Letters letters(spec);
  EXPECT_EQ(Metric(letters.service(), "conversations_parked"), 2);
  const std::string prompt = "hello" + ExpectedText("hello", 2);
  EXPECT_EQ(WholeOf(letters.service(), RequestOf(prompt + "x", 1)).reused, 7);
}

// A file is loaded into the free slot with the fewest tokens. The slot in use
// has fewer, but is not taken.
TEST(Service, AFileTakesThePlaceOfLittle) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.sessions.context = 4096;
  spec.keep = 2;  // The running request never ends.
  spec.parking = {.folder = folder.path(), .model = "letters"};
  {
    Letters letters(spec);
    WholeOf(letters.service(), RequestOf("thesameprefix", 1));
  }
  std::vector<std::string> said;
  spec.log = [&](const Status& status) { said.push_back(status.message()); };
  Letters letters(spec);
  const std::string first(300, 'c'), little(200, 'e'), second(300, 'd');
  for (const std::string& prompt : {first, little, second}) {
    WholeOf(letters.service(), RequestOf(prompt, 1));
  }
  WaitFor(letters.service(), "conversations_parked", 4);
  auto running = letters.Ask(SlowRequestOf("b"));
  WaitFor(letters.service(), "requests_running", 1);
  EXPECT_EQ(
      WholeOf(letters.service(), RequestOf("thesameprefixother", 1)).reused,
      13);
  running.reset();
  WaitFor(letters.service(), "cancelled_total", 1);
  for (int i = 0; i < 5000; ++i) {
    if (Metric(letters.service(), "conversations_writing") == 0) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
    std::filesystem::remove(file.path());
  }
  EXPECT_EQ(WholeOf(letters.service(), RequestOf(first + "x", 1)).reused, 300);
  EXPECT_EQ(WholeOf(letters.service(), RequestOf(second + "x", 1)).reused, 300);
  EXPECT_THAT(said, testing::IsEmpty());
}

// A slot has the prompt, but the second request cannot take it: the slot is in
// use, or its window has left the prefix. The file serves both.
TEST(Service, AFileServesWhereASlotCannot) {
  CacheSpec window;
  window.kind = Kind::kSwa;
  window.window = 4;
  for (const bool own : {true, false}) {
    const ScratchFolder folder("service");
    ServiceSpec spec = SpecOf();
    spec.sessions.context = 4096;
    spec.keep = 2;  // The first request never ends.
    if (own) spec.sessions.choice = SlotChoice::kOwnPrefix;
    spec.parking = {.folder = folder.path(), .model = "letters"};
    const CacheSpec cache = own ? CacheSpec() : window;
    {
      Letters letters(spec, cache);
      WholeOf(letters.service(), RequestOf("thesameprefix", 1));
      WaitFor(letters.service(), "conversations_parked", 1);
    }
    Letters letters(spec, cache);
    const auto first = letters.Ask(SlowRequestOf("thesameprefixanditsend"));
    WaitFor(letters.service(), "answer_tokens_total", 3);
    const auto second = letters.Ask(RequestOf("thesameprefixother", 1));
    EXPECT_EQ(Whole(*second).reused, 13) << own;
  }
}

TEST(Service, ThePromptThatIsComputedIsLoaded) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.keep = 2;
  spec.parking = {.folder = folder.path(), .model = "letters"};
  const std::string prompt = "xythemiddleleavesabcdefghijklmnopqrstuvwxyzabcd";
  for (const int reused : {0, 31}) {
    Letters letters(spec);
    EXPECT_EQ(WholeOf(letters.service(), RequestOf(prompt, 1)).reused, reused);
    WaitFor(letters.service(), "conversations_parked", 1);
  }
}

TEST(Service, ContinuesWithALogThatThrows) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.File("parked"), .model = "letters"};
  spec.log = [](const Status&) { throw std::runtime_error("it is full"); };
  Letters letters(spec);
  std::filesystem::remove(spec.parking.folder);
  WholeOf(letters.service(), RequestOf("hello", 8));
  WaitFor(letters.service(), "parking_failures_total", 1);
  EXPECT_EQ(WholeOf(letters.service(), RequestOf("world", 8)).text,
            ExpectedText("world", 8));
}

TEST(Service, SaysWhatWentWrongWithAFile) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.File("parked"), .model = "letters"};
  std::vector<std::string> said;
  spec.log = [&](const Status& status) { said.push_back(status.message()); };
  {
    Letters letters(spec);
    std::filesystem::remove(spec.parking.folder);
    WholeOf(letters.service(), RequestOf("hello", 8));
    EXPECT_EQ(WholeOf(letters.service(), RequestOf("world", 8)).text,
              ExpectedText("world", 8));
    WaitFor(letters.service(), "parking_failures_total", 1);
  }
  ASSERT_FALSE(said.empty());
  EXPECT_THAT(said[0], HasSubstr("cannot be opened"));
}

// Others ask and read metrics while the thread is busy with a file.
TEST(Service, NobodyWaitsForTheDisk) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.File("parked"), .model = "letters"};
  std::atomic<bool> logs = false, asked = false, late = false;
  spec.log = [&](const Status&) {
    logs = true;
    for (int i = 0; i < 1000 && !asked; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    if (!asked) late = true;
  };
  Letters letters(spec);
  std::filesystem::remove(spec.parking.folder);
  WholeOf(letters.service(), RequestOf("hello", 8));
  const auto second = letters.Ask(RequestOf("world", 8));
  while (!logs) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(Metric(letters.service(), "requests_total"), 2);
  const auto answer = letters.Ask(RequestOf("three", 8));
  asked = true;
  EXPECT_EQ(Whole(*second).text, ExpectedText("world", 8));
  EXPECT_EQ(Whole(*answer).text, ExpectedText("three", 8));
  EXPECT_FALSE(late);
}

TEST(Service, SaysAtItsEndWhatWentWrongWithAFile) {
  const ScratchFolder folder("service");
  ServiceSpec spec = SpecOf();
  spec.parking = {.folder = folder.File("parked"), .model = "letters"};
  std::vector<std::string> said;
  spec.log = [&](const Status& status) {
    said.push_back(status.message());
    throw 7;
  };
  {
    Letters letters(spec);
    std::filesystem::remove(spec.parking.folder);
    WholeOf(letters.service(), RequestOf("hello", 8));
  }
  ASSERT_EQ(said.size(), 1U);
  EXPECT_THAT(said[0], HasSubstr("cannot be opened"));
}

}  // namespace
}  // namespace kvtwin::props
