// A service over a model whose next token is a function of what the cache
// holds.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <latch>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/paged.h"
#include "kvtwin/rows.h"
#include "kvtwin/serving.h"
#include "props/base/scratch_folder.h"
#include "props/unit/include/letters.h"

namespace kvtwin::props {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

TEST(Service, AnswersRequestsTogether) {
  Letters letters(SpecOf());
  std::vector<std::string> prompts;
  std::vector<std::unique_ptr<Answer>> answers;
  for (int i = 0; i < 20; ++i) {
    prompts.push_back(std::string(AsSize(i % 7 + 1), 'b') +
                      static_cast<char>('a' + i));
    answers.push_back(letters.Ask(RequestOf(prompts.back(), 9)));
  }
  for (int i = 0; i < 20; ++i) {
    const AnswerPart part = Whole(*At(answers, i));
    EXPECT_EQ(part.text, ExpectedText(At(prompts, i), 9));
    EXPECT_EQ(part.finish, Finish::kLength);
    EXPECT_EQ(part.tokens, 9);
  }
  EXPECT_EQ(Metric(letters.service(), "requests_total"), 20);
  EXPECT_EQ(Metric(letters.service(), "answer_tokens_total"), 180);
}

TEST(Service, AnswersOverThePoolsSlots) {
  const ServiceSpec spec = SpecOf(2);
  const auto pool =
      *MakePagedPool({.block_size = 4,
                      .blocks = static_cast<int>(BlocksFor(spec.sessions, 4)),
                      .max_seq_len = spec.sessions.context,
                      .dtype = DType::kF32});
  const auto slots = *MakePoolSlots(*pool, spec.sessions);
  std::vector<float> logits;
  const auto forward = [&](Cache& cache, const SessionBatch& batch) {
    PutTokens(cache, batch);
    logits.assign(AsSize(Size(batch.outputs) * (kLetters + 1)), 0);
    for (int i = 0; i < Size(batch.outputs); ++i) {
      const int token = At(batch.outputs, i);
      const int sequence = *slots->Sequence(At(batch.sequences, token));
      float sum = 1;
      for (const PagedView& view : *pool->Views(sequence, 0)) {
        for (int row = 0; row < view.length; ++row) {
          if (view.start + row > At(batch.positions, token)) break;
          sum += ElementOf<float>(view.value, 0, 0, row);
        }
      }
      At(logits, i * (kLetters + 1) + static_cast<int>(sum) % kLetters) = 1;
    }
    return std::span<const float>(logits);
  };
  const auto service =
      *MakeService(*slots, spec,
                   {.forward = forward,
                    .bytes =
                        [](int token) {
                          return std::string(1, static_cast<char>('a' + token));
                        },
                    .end = kEnd});

  for (const std::string prompt : {"hello", "helloabc", "helloxyz"}) {
    const AnswerPart part = WholeOf(*service, RequestOf(prompt, 9));
    EXPECT_EQ(part.text, ExpectedText(prompt, 9));
    EXPECT_EQ(part.reused, prompt == "hello" ? 0 : 5);
  }
}

TEST(Service, StreamsTheText) {
  Letters letters(SpecOf());
  const auto answer = letters.Ask(RequestOf("hello", 12));
  std::string text;
  AnswerPart part;
  while (part.finish == Finish::kNone) {
    part = answer->Next(false, milliseconds(20));
    text += part.text;
  }
  EXPECT_EQ(text, ExpectedText("hello", 12));
  // Its end can be read again; its text cannot.
  EXPECT_EQ(answer->Next(false, milliseconds(0)).text, "");
  EXPECT_EQ(answer->Next(true, milliseconds(0)).finish, Finish::kLength);
}

// The text is there at once, and not only with the end of the answer.
TEST(Service, StreamsTheTextWhileTheModelComputes) {
  Letters letters(SpecOf());
  ServiceRequest request = RequestOf("hello", 12);
  HoldAfter(1, letters, request);
  const auto answer = letters.Ask(std::move(request));
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - begin; };
  const AnswerPart part = answer->Next(false, std::chrono::minutes(1));
  EXPECT_EQ(part.text, ExpectedText("hello", 1));
  EXPECT_EQ(part.finish, Finish::kNone);
  EXPECT_LT(waited(), std::chrono::seconds(30));
  // Without more text, Next waits for the given time.
  EXPECT_EQ(answer->Next(false, milliseconds(20)).text, "");
  EXPECT_GE(waited(), milliseconds(20));
  letters.hold = false;
}

TEST(Service, StopsBeforeAStopString) {
  Letters letters(SpecOf());
  const std::string text = ExpectedText("hello", 12);
  const std::string stop = text.substr(6, 3);
  const AnswerPart part =
      WholeOf(letters.service(), RequestOf("hello", 12, {"??", stop}));
  EXPECT_EQ(part.text, text.substr(0, text.find(stop)));
  EXPECT_EQ(part.finish, Finish::kStop);
  // The record has the text that was shown, and not the stop string.
  const std::string prompt = "hello" + part.text + stop[0] + "x";
  const AnswerPart next = WholeOf(letters.service(), RequestOf(prompt, 3));
  EXPECT_EQ(next.reused, 5 + Size(part.text));
  EXPECT_EQ(next.text, ExpectedText(prompt, 3));
}

// Text that might begin a stop string is shown when the answer ends.
TEST(Service, EndsWithTheBeginningOfAStopString) {
  Letters letters(SpecOf());
  const std::string text = ExpectedText("hello", 6);
  const AnswerPart part = WholeOf(
      letters.service(), RequestOf("hello", 6, {text.substr(4) + "??"}));
  EXPECT_EQ(part.text, text);
  EXPECT_EQ(part.finish, Finish::kLength);
}

TEST(Service, AFullSlotEndsTheAnswerOrShifts) {
  ServiceSpec spec = SpecOf();
  {
    Letters letters(spec);
    const AnswerPart part = WholeOf(letters.service(), RequestOf("hello", 0));
    EXPECT_EQ(part.finish, Finish::kLength);
    EXPECT_EQ(part.text, ExpectedText("hello", Size(part.text)));
    ExpectRefused(letters.service(), RequestOf(std::string(33, 'b'), 1),
                  StatusCode::kInvalidArgument, "prompt has 33 inputs");
    // The service still answers.
    EXPECT_EQ(WholeOf(letters.service(), RequestOf("b", 2)).text,
              ExpectedText("b", 2));
  }
  for (const int keep : {0, 2}) {
    spec.keep = keep;
    Letters letters(spec);
    EXPECT_EQ(WholeOf(letters.service(), RequestOf("hello", 100)).tokens, 100);
    EXPECT_GT(Metric(letters.service(), "shifts_total"), 1);
    // The beginning of a prompt that is too long is kept, too.
    const std::string begin(30, 'b'), end(40, 'd');
    EXPECT_EQ(WholeOf(letters.service(), RequestOf(begin + end, 1)).text,
              ExpectedText(begin.substr(0, AsSize(keep)) +
                               end.substr(0, AsSize(32 - keep)),
                           1));
    EXPECT_EQ(WholeOf(letters.service(), RequestOf(begin + end, 3)).tokens, 3);
  }
}

TEST(Service, ADroppedAnswerEnds) {
  Letters letters(SpecOf(1));
  letters.hold = true;
  auto running = letters.Ask(RequestOf("hello", 0));
  WaitFor(letters.service(), "requests_running", 1);
  auto waiting = letters.Ask(RequestOf("other", 3));
  running.reset();
  waiting.reset();
  letters.hold = false;
  WaitFor(letters.service(), "cancelled_total", 2);
  EXPECT_EQ(WholeOf(letters.service(), RequestOf("hello", 3)).text,
            ExpectedText("hello", 3));
}

// A waiting request is dropped at once, although the running request never
// ends.
TEST(Service, AWaitingRequestMayBeDropped) {
  ServiceSpec spec = SpecOf(1);
  spec.keep = 2;
  Letters letters(spec);
  const auto running = letters.Ask(RequestOf("hello", 0));
  WaitFor(letters.service(), "requests_running", 1);
  auto waiting = letters.Ask(RequestOf("other", 3));
  waiting.reset();
  WaitFor(letters.service(), "cancelled_total", 1);
  EXPECT_EQ(Metric(letters.service(), "requests_waiting"), 0);
  EXPECT_EQ(Metric(letters.service(), "requests_running"), 1);
}

// Its destructor asks for metrics.
struct LooksBack {
  ~LooksBack() { looked = !service->Metrics().empty(); }
  Service* service;
  std::atomic<bool>& looked;
};

// The captures of a request may call the service in their destructors, whether
// the request runs, waits, or ends with its model.
TEST(Service, ADroppedRequestMayCallTheService) {
  for (const std::string when : {"it runs", "it waits", "the model fails"}) {
    SCOPED_TRACE(when);
    ServiceSpec spec = SpecOf(1);
    spec.keep = 2;
    Letters letters(spec);
    letters.hold = true;
    std::atomic<bool> looked = false;
    const auto other =
        letters.Ask(RequestOf("other", when == "it waits" ? 0 : 1));
    ServiceRequest request = RequestOf("hello", 0);
    request.sample = [kept = std::shared_ptr<LooksBack>(new LooksBack{
                          &letters.service(), looked})](auto) { return 0; };
    auto answer = letters.Ask(std::move(request));
    letters.hold = false;
    if (when != "it waits")
      WaitFor(letters.service(), "answer_tokens_total", 2);
    if (when == "the model fails") {
      letters.hold = true;
      letters.fails = true;
    }
    answer.reset();
    letters.hold = false;
    for (int i = 0; i < 1000 && !looked; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    EXPECT_TRUE(looked);
  }
}

// The service ends while its model computes for a request that was dropped. The
// thread destroys the request, as its destructor may still call the service.
TEST(Service, ADroppedRequestEndsBeforeItsService) {
  std::thread::id destroyer;
  {
    Letters letters(SpecOf());
    letters.hold = true;
    ServiceRequest request = RequestOf("hello", 0);
    request.sample = [kept = std::shared_ptr<int>(nullptr, [&](int*) {
                        destroyer = std::this_thread::get_id();
                      })](auto) { return 0; };
    auto dropped = letters.Ask(std::exchange(request, {}));
    WaitFor(letters.service(), "requests_running", 1);
    dropped.reset();
    const std::jthread release([&] {
      std::this_thread::sleep_for(milliseconds(30));
      letters.hold = false;
    });
    letters.End();
  }
  EXPECT_NE(destroyer, std::thread::id());
  EXPECT_NE(destroyer, std::this_thread::get_id());
}

// The second request waits for the first one, and then shares its prefix.
TEST(Service, ARequestWaitsForItsPrefix) {
  for (const bool share : {true, false}) {
    ServiceSpec spec = SpecOf();
    spec.share = share;
    Letters letters(spec);
    letters.hold = true;
    const std::string prefix = "thesameprefix";
    const auto first = letters.Ask(RequestOf("aaa", 1));
    const auto second = letters.Ask(RequestOf(prefix + "x", 2));
    const auto third = letters.Ask(RequestOf(prefix + "y", 2));
    letters.hold = false;
    EXPECT_EQ(Whole(*second).text, ExpectedText(prefix + "x", 2));
    const AnswerPart part = Whole(*third);
    EXPECT_EQ(part.text, ExpectedText(prefix + "y", 2));
    EXPECT_EQ(part.reused, share ? Size(prefix) : 0);
  }
}

// A request may wait for a prompt that is cut as well: what counts is what both
// compute.
TEST(Service, ARequestWaitsForAPrefixThatIsComputed) {
  ServiceSpec spec = SpecOf();
  spec.keep = 2;
  Letters letters(spec);
  letters.hold = true;
  const std::string end = "abcdefghijklmnopqrstuvwxyzabcd";
  const auto first = letters.Ask(RequestOf("aaa", 1));
  const auto second = letters.Ask(RequestOf("xythemiddleleaves" + end, 1));
  const auto third = letters.Ask(RequestOf("xy" + end, 1));
  const auto fourth = letters.Ask(RequestOf("xythemiddleleavesz" + end, 1));
  letters.hold = false;
  EXPECT_EQ(Whole(*second).text, ExpectedText("xy" + end, 1));
  for (const auto& answer : {&third, &fourth}) {
    const AnswerPart part = Whole(**answer);
    EXPECT_EQ(part.text, ExpectedText("xy" + end, 1));
    EXPECT_GT(part.reused, 31 - spec.worth);
  }
}

TEST(Service, NoRequestWaitsIfThatIsNotWorthIt) {
  ServiceSpec spec = SpecOf();
  spec.worth = std::numeric_limits<int>::max();
  Letters letters(spec);
  WholeOf(letters.service(), RequestOf("the", 1));
  letters.hold = true;
  const auto first = letters.Ask(RequestOf("aaa", 1));
  WaitFor(letters.service(), "requests_running", 1);
  const auto second = letters.Ask(RequestOf("thesame", 2));
  const auto third = letters.Ask(RequestOf("thesame", 2));
  letters.hold = false;
  EXPECT_EQ(Whole(*second).reused, 3);
  EXPECT_EQ(Whole(*third).reused, 3);
}

TEST(Service, MetricsHaveTypes) {
  Letters letters(SpecOf());
  const auto begin = std::chrono::steady_clock::now();
  ServiceRequest request = RequestOf("hello", 4);
  request.sample = [](auto) {
    std::this_thread::sleep_for(milliseconds(5));
    return 0;
  };
  WholeOf(letters.service(), std::move(request));
  WaitFor(letters.service(), "batches_total", 4);
  const std::chrono::duration<double> time =
      std::chrono::steady_clock::now() - begin;
  const std::string text = letters.service().Metrics();
  for (const std::string name :
       {"requests", "requests_refused", "cancelled", "prompt_tokens",
        "hit_tokens", "evicted_tokens", "shifts", "answer_tokens", "batches",
        "refusals", "forward_seconds", "first_token_seconds",
        "parking_failures"}) {
    EXPECT_THAT(text, HasSubstr("# TYPE kvtwin_" + name +
                                "_total counter\nkvtwin_" + name + "_total "));
  }
  for (const std::string name :
       {"requests_waiting", "requests_running", "cells_used", "cells_free",
        "conversations_parked", "conversations_writing"}) {
    EXPECT_THAT(text, HasSubstr("# TYPE kvtwin_" + name + " gauge\nkvtwin_" +
                                name + " "));
  }
  EXPECT_EQ(Metric(letters.service(), "prompt_tokens_total"), 5);
  EXPECT_GE(Metric(letters.service(), "forward_seconds_total"), 0.02);
  EXPECT_LE(Metric(letters.service(), "forward_seconds_total"), time.count());
  // Only the first of the four tokens counts.
  EXPECT_GE(Metric(letters.service(), "first_token_seconds_total"), 0.005);
  EXPECT_LE(Metric(letters.service(), "first_token_seconds_total"),
            time.count() - 0.015);
}

// A service without work leaves the processor to others, also after its model
// has failed.
TEST(Service, AnIdleServiceTakesNoTime) {
  Letters letters(SpecOf());
  for (const bool fails : {false, true}) {
    letters.fails = fails;
    WholeOf(letters.service(), RequestOf("hello", 3));
    const std::clock_t before = std::clock();  // Of all threads.
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
  }
}

// Metrics count the cells of a wrapper's first cache, whichever the model
// leaves active.
TEST(Service, MetricsOfAWrapperCountItsFirstCache) {
  const auto cache = *MakeCache(
      {.kind = Kind::kWrapper,
       .caches = {{.kind = Kind::kCausal}, {.kind = Kind::kSwa, .window = 4}}});
  const ServiceSpec spec = SpecOf();
  ASSERT_TRUE(cache->Init(InitOf(spec.sessions, DType::kF32)).ok());
  const int cells = cache->CellCount();
  std::vector<float> logits;
  const auto forward = [&](Cache& layers, const SessionBatch& batch) {
    const std::vector<float> ones(batch.inputs.size(), 1);
    const TensorView rows =
        DenseView(ones.data(), DType::kF32, {1, 1, Size(ones), 1});
    for (const int type : {0, 1}) {
      EXPECT_TRUE(layers.SetLayerType(type).ok());
      EXPECT_TRUE(layers.SetLayer(0).ok());
      EXPECT_TRUE(layers.Put(rows, rows).ok());
    }
    logits.assign(batch.outputs.size(), 0);
    return std::span<const float>(logits);
  };
  const auto service = *MakeService(
      *cache, spec,
      {.forward = forward, .bytes = [](int) { return std::string("x"); }});
  EXPECT_EQ(Metric(*service, "cells_free"), cells);
  WholeOf(*service, RequestOf("hello", 4));
  EXPECT_EQ(Metric(*service, "cells_used"), 8);
  EXPECT_EQ(Metric(*service, "cells_free"), cells - 8);
}

// An error of the model ends all answers, and those after it.
TEST(Service, FailsWithItsModel) {
  const std::vector<std::pair<std::atomic<bool> Letters::*, const char*>>
      faults = {{&Letters::fails, "out of order"},
                {&Letters::odd, "the model failed"},
                {&Letters::closes, "used after Close"},
                {&Letters::mute, "logits for"},
                {&Letters::lies, "logits for"}};
  for (const auto& [fault, message] : faults) {
    Letters letters(SpecOf(2));  // The third request waits.
    letters.*fault = true;
    letters.hold = true;  // Until a batch can have several outputs.
    std::vector<std::unique_ptr<Answer>> answers;
    for (const std::string prompt : {"hello", "world", "three"}) {
      answers.push_back(letters.Ask(RequestOf(prompt, 0)));
    }
    letters.hold = false;
    for (const auto& answer : answers) {
      const AnswerPart part = Whole(*answer);
      EXPECT_EQ(part.finish, Finish::kFailed);
      EXPECT_THAT(part.status.message(), HasSubstr(message));
    }
    EXPECT_EQ(Metric(letters.service(), "requests_waiting"), 0);
    EXPECT_EQ(Metric(letters.service(), "requests_running"), 0);
    letters.*fault = false;
    const AnswerPart later = WholeOf(letters.service(), RequestOf("hello", 3));
    EXPECT_EQ(later.finish, Finish::kFailed);
    EXPECT_THAT(later.status.message(), HasSubstr(message));
  }
}

// With all slots taken, one request may wait. The others are refused at once,
// while the model computes.
TEST(Service, AFullQueueRefusesRequests) {
  ServiceSpec spec = SpecOf(2);
  spec.queue = 1;
  Letters letters(spec);
  letters.hold = true;
  std::vector<std::unique_ptr<Answer>> answers;
  for (const std::string prompt : {"hello", "world", "three"}) {
    answers.push_back(letters.Ask(RequestOf(prompt, 0)));
    WaitFor(letters.service(), "requests_running", 1);
  }
  for (int i = 0; i < 2; ++i) {
    ExpectRefused(letters.service(), RequestOf("other", 1),
                  StatusCode::kFailedPrecondition, "queue has 1 requests");
  }
  EXPECT_EQ(Metric(letters.service(), "requests_total"), 3);
  EXPECT_EQ(Metric(letters.service(), "requests_refused_total"), 2);
  answers.pop_back();
  letters.hold = false;
  WaitFor(letters.service(), "cancelled_total", 1);
  EXPECT_EQ(Whole(*letters.Ask(RequestOf("other", 3))).text,
            ExpectedText("other", 3));

  spec.queue = 0;
  Letters patient(spec);
  patient.hold = true;
  for (int i = 0; i < 100; ++i) {
    answers.push_back(patient.Ask(RequestOf("hello", 1)));
  }
  patient.hold = false;
  EXPECT_EQ(Whole(*answers.back()).text, ExpectedText("hello", 1));
}

// A token without bytes ends the answer that has it, and no other answer.
TEST(Service, FailsARequestWithItsBytes) {
  Letters letters(SpecOf());
  letters.hold = true;
  const auto other = letters.Ask(RequestOf("hello", 9));
  ServiceRequest request = RequestOf("world", 9);
  int drawn = 0;
  request.sample = [&drawn](auto) { return drawn++ < 2 ? 3 : kUnreadable; };
  const auto first = letters.Ask(request);
  letters.hold = false;
  const AnswerPart part = Whole(*first);
  EXPECT_EQ(part.finish, Finish::kError);
  EXPECT_EQ(part.tokens, 2);
  EXPECT_EQ(part.status.message(), "bytes failed: no bytes");
  EXPECT_EQ(Whole(*other).text, ExpectedText("hello", 9));
}

// A sampler that throws ends the answer to its request, and no other answer.
TEST(Service, FailsARequestWithItsSampler) {
  Letters letters(SpecOf());
  letters.hold = true;
  const auto other = letters.Ask(RequestOf("hello", 9));
  ServiceRequest request = RequestOf("world", 9);
  request.sample = [](auto) -> int { throw std::runtime_error("no dice"); };
  const auto first = letters.Ask(request);
  request.sample = [](auto) -> int { throw 7; };
  const auto second = letters.Ask(request);
  letters.hold = false;
  const AnswerPart part = Whole(*first);
  EXPECT_EQ(part.finish, Finish::kError);
  EXPECT_EQ(part.tokens, 0);
  EXPECT_THAT(part.status.message(), HasSubstr("no dice"));
  EXPECT_EQ(Whole(*second).finish, Finish::kError);
  EXPECT_EQ(Whole(*other).text, ExpectedText("hello", 9));
}

TEST(Service, WaitsAsLongAsItIsTold) {
  Letters letters(SpecOf());
  letters.hold = true;
  const auto answer = letters.Ask(RequestOf("hello", 20));
  EXPECT_EQ(answer->Next(true, milliseconds::min()).finish, Finish::kNone);
  letters.hold = false;
  const AnswerPart part = answer->Next(true, milliseconds::max());
  EXPECT_EQ(part.finish, Finish::kLength);
  EXPECT_EQ(part.tokens, 20);
}

TEST(Service, AnAnswerMayOutliveItsService) {
  std::unique_ptr<Answer> answer;
  {
    Letters letters(SpecOf());
    letters.hold = true;
    answer = letters.Ask(RequestOf("hello", 0));
    letters.hold = false;
  }
  ExpectRight("hello", Whole(*answer));
}

// Asks, reads some of the answers, drops others, and returns the rest.
std::vector<std::pair<std::string, std::unique_ptr<Answer>>> AskAndDrop(
    Service& service, int thread) {
  std::vector<std::pair<std::string, std::unique_ptr<Answer>>> kept;
  for (int i = 0; i < 12; ++i) {
    const std::string prompt = std::string(AsSize(i % 5 + 1), 'h') +
                               static_cast<char>('a' + thread % 2 + i % 3);
    auto answer = *service.Ask(RequestOf(prompt, i % 6 == 4 ? 0 : 9));
    if (i % 4 == 0) {
      ExpectRight(prompt, Whole(*answer));
    } else if (i % 4 == 1) {
      AnswerPart part, whole;
      while (part.finish == Finish::kNone) {
        part = answer->Next(false, milliseconds(20));
        whole.text += part.text;
      }
      part.text = whole.text;
      ExpectRight(prompt, part);
    } else if (i % 4 == 2) {
      answer->Next(i % 8 == 2, milliseconds(i % 3));
    } else {
      kept.emplace_back(prompt, std::move(answer));
    }
  }
  return kept;
}

// Threads ask, read and drop answers, while the service ends, its model breaks,
// or its folder goes. ThreadSanitizer watches in ./dev sanitize.
TEST(Service, ServesManyThreads) {
  enum class Trouble { kNone, kModel, kFolder };
  for (const Trouble trouble :
       {Trouble::kNone, Trouble::kModel, Trouble::kFolder}) {
    const ScratchFolder folder("service");
    ServiceSpec spec = SpecOf(3);
    spec.parking = {.folder = folder.File("parked"), .model = "letters"};
    std::vector<std::string> said;
    spec.log = [&](const Status& status) { said.push_back(status.message()); };
    auto letters = std::make_unique<Letters>(spec);
    if (trouble == Trouble::kModel) letters->passes = 40;
    std::latch asked(5);
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        const auto kept = AskAndDrop(letters->service(), thread);
        asked.count_down();
        for (const auto& [prompt, answer] : kept) {
          ExpectRight(prompt, Whole(*answer));
        }
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        EXPECT_LE(Metric(letters->service(), "requests_running"), 3);
        std::this_thread::sleep_for(milliseconds(1));
        if (i == 5 && trouble == Trouble::kFolder) {
          std::filesystem::rename(spec.parking.folder, folder.File("gone"));
        }
      }
      asked.count_down();
    });
    asked.wait();
    if (trouble == Trouble::kFolder) {
      ExpectRight("other", WholeOf(letters->service(), RequestOf("other", 5)));
    }
    letters.reset();
    threads.clear();
    EXPECT_EQ(said.empty(), trouble != Trouble::kFolder);
  }
}

TEST(Service, MisuseIsRefused) {
  Letters letters(SpecOf());
  ServiceRequest request = RequestOf("a", 1);
  request.sample = nullptr;
  const auto expect_refused = [&](const char* message) {
    ExpectRefused(letters.service(), request, StatusCode::kInvalidArgument,
                  message);
  };
  expect_refused("lacks sample");
  request = RequestOf("", 1);
  expect_refused("prompt is empty");
  request = RequestOf("a", -1);
  expect_refused("limit is -1");
  request = RequestOf("a", 1);
  request.prompt[0].token = -2;
  expect_refused("prompt[0].token is -2");
  EXPECT_EQ(Metric(letters.service(), "requests_total"), 0);
  request = RequestOf("a", 1);
  for (const int token : {-1, -5}) {
    request.sample = [token](auto) { return token; };
    EXPECT_EQ(WholeOf(letters.service(), request).finish, Finish::kError);
  }
  request.sample = [](auto) { return kEnd; };
  const AnswerPart ended = WholeOf(letters.service(), request);
  EXPECT_EQ(ended.finish, Finish::kStop);
  EXPECT_EQ(ended.text, "");

  const auto cache = *MakeCache({});
  ASSERT_TRUE(cache->Init(InitOf(SpecOf().sessions, DType::kF32)).ok());
  const ServiceModel model = {
      .forward = [](auto&, auto&) { return std::span<const float>(); },
      .bytes = [](auto) { return std::string(); }};
  ServiceSpec spec = SpecOf();
  EXPECT_FALSE(MakeService(*cache, spec, {.forward = model.forward}).ok());
  EXPECT_FALSE(MakeService(*cache, spec, {.bytes = model.bytes}).ok());
  spec.keep = -2;
  EXPECT_FALSE(MakeService(*cache, spec, model).ok());
  spec = SpecOf();
  spec.worth = 0;
  EXPECT_FALSE(MakeService(*cache, spec, model).ok());
  spec = SpecOf();
  spec.queue = -1;
  EXPECT_FALSE(MakeService(*cache, spec, model).ok());
  spec = SpecOf();
  spec.sessions.slots = 0;
  EXPECT_FALSE(MakeService(*cache, spec, model).ok());
  spec = SpecOf();
  spec.parking.folder = "/proc/nothing";
  EXPECT_FALSE(MakeService(*cache, spec, model).ok());
}

}  // namespace
}  // namespace kvtwin::props
