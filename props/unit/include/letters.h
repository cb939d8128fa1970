// A service over a model of letters, for tests: its next token is a function of
// what the cache holds.

#ifndef KVTWIN_PROPS_UNIT_INCLUDE_LETTERS_H_
#define KVTWIN_PROPS_UNIT_INCLUDE_LETTERS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/rows.h"
#include "kvtwin/serving.h"

namespace kvtwin::props {

using Prompt = std::vector<SessionInput>;

inline constexpr int kLetters = 26;
inline constexpr std::int32_t kEnd = kLetters;
inline constexpr std::int32_t kUnreadable = 1000;  // Has no bytes.

inline Prompt PromptOf(const std::string& text) {
  Prompt prompt;
  for (const char letter : text) prompt.push_back({letter - 'a'});
  return prompt;
}

// Puts the numbers of the tokens as their K and V.
inline void PutTokens(Cache& cache, const SessionBatch& batch) {
  std::vector<float> rows;
  for (const SessionInput& input : batch.inputs) {
    rows.push_back(static_cast<float>(input.token));
  }
  const TensorView view =
      DenseView(rows.data(), DType::kF32, {1, 1, std::ssize(rows), 1});
  EXPECT_TRUE(cache.SetLayer(0).ok());
  EXPECT_TRUE(cache.Put(view, view).ok());
}

// A cache, and a model of letters: the next letter is the sum of the letters
// that its token sees, so that a wrong row changes the answer.
class Letters {
 public:
  explicit Letters(const ServiceSpec& spec, const CacheSpec& cache = {})
      : cache_(*MakeCache(cache)) {
    EXPECT_TRUE(cache_->Init(InitOf(spec.sessions, DType::kF32)).ok());
    names_.resize(kLetters + 1);
    for (int i = 0; i < kLetters; ++i) At(names_, i) = AsLetter(i);
    service_ = *MakeService(
        *cache_, spec,
        {.forward = [this](Cache& cache,
                           const auto& batch) { return Forward(cache, batch); },
         .bytes =
             [this](int token) {
               if (token == kUnreadable) throw std::out_of_range("no bytes");
               return At(names_, token);
             },
         .end = kEnd});
  }

  Service& service() { return *service_; }
  void End() { service_.reset(); }
  std::unique_ptr<Answer> Ask(ServiceRequest request) {
    return *service_->Ask(std::move(request));
  }
  std::atomic<bool> hold = false;     // The model waits.
  std::atomic<bool> fails = false;    // The model throws.
  std::atomic<bool> odd = false;      // It throws a number.
  std::atomic<bool> closes = false;   // It closes the cache.
  std::atomic<bool> mute = false;     // It has no logits.
  std::atomic<bool> lies = false;     // It has too few for several outputs.
  std::atomic<int> passes = 1000000;  // After these the model throws.
  std::atomic<int> computed = 0;      // Tokens.

 private:
  static char AsLetter(int i) { return static_cast<char>('a' + i); }

  std::span<const float> Forward(Cache& cache, const SessionBatch& batch) {
    while (hold) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (fails || passes-- == 0) throw std::runtime_error("out of order");
    if (odd) throw 7;
    computed += Size(batch.inputs);
    PutTokens(cache, batch);
    const KvView stored = *cache.Get();
    if (mute) return {};
    logits_.assign(AsSize(Size(batch.outputs) * (kLetters + 1)), 0);
    if (lies) logits_.resize(AsSize(1 + Size(batch.outputs) * 2));
    for (int i = 0; i < Size(batch.outputs) && !lies; ++i) {
      float sum = 1;
      for (int cell = 0; cell < stored.value.shape[2]; ++cell) {
        if (MayAttend(stored.mask, cell, At(batch.outputs, i))) {
          sum += ElementOf<float>(stored.value, 0, 0, cell);
        }
      }
      const int next = static_cast<int>(sum) % kLetters;
      At(logits_, i * (kLetters + 1) + next) = 1;
    }
    if (closes) cache.Close();
    return logits_;
  }

  std::unique_ptr<Cache> cache_;
  std::vector<std::string> names_;
  std::vector<float> logits_;
  std::unique_ptr<Service> service_;
};

inline ServiceSpec SpecOf(int slots = 4) {
  return {.sessions = {.slots = slots, .context = 32, .batch = 16}, .worth = 4};
}

// The answer of the model, by its definition.
inline std::string ExpectedText(const std::string& prompt, int count) {
  std::string text = prompt;
  for (int i = 0; i < count; ++i) {
    int sum = 1;
    for (const char letter : text) sum += letter - 'a';
    text += static_cast<char>('a' + sum % kLetters);
  }
  return text.substr(prompt.size());
}

inline ServiceRequest RequestOf(const std::string& prompt, int limit,
                                std::vector<std::string> stops = {}) {
  return {.prompt = PromptOf(prompt),
          .limit = limit,
          .stops = std::move(stops),
          .sample = Sampler(0, 1, 0)};
}

// A token takes a millisecond at least.
inline ServiceRequest SlowRequestOf(const std::string& prompt) {
  ServiceRequest request = RequestOf(prompt, 0);
  request.sample = [](auto) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  };
  return request;
}

// The model waits after this many tokens of the request.
inline void HoldAfter(int tokens, Letters& letters, ServiceRequest& request) {
  request.sample = [&letters, tokens,
                    draw = request.sample](auto logits) mutable {
    if (--tokens == 0) letters.hold = true;
    return draw(logits);
  };
}

inline AnswerPart Whole(Answer& answer) {
  AnswerPart part;
  for (int i = 0; i < 1000 && part.finish == Finish::kNone; ++i) {
    part = answer.Next(true, std::chrono::milliseconds(20));
  }
  EXPECT_NE(part.finish, Finish::kNone);
  return part;
}

inline AnswerPart WholeOf(Service& service, ServiceRequest request) {
  return Whole(**service.Ask(std::move(request)));
}

// Expects the text of an answer, or the beginning that an error has left.
inline void ExpectRight(const std::string& prompt, const AnswerPart& part) {
  EXPECT_EQ(part.text, ExpectedText(prompt, Size(part.text)));
  EXPECT_TRUE(part.finish == Finish::kLength || part.finish == Finish::kFailed);
  EXPECT_EQ(part.status.ok(), part.finish == Finish::kLength);
}

inline void ExpectRefused(Service& service, ServiceRequest request,
                          StatusCode code, const std::string& message) {
  const Status status = service.Ask(std::move(request)).status();
  EXPECT_EQ(status.code(), code);
  EXPECT_THAT(status.message(), testing::HasSubstr(message));
}

inline double Metric(const Service& service, const std::string& name) {
  const std::string text = service.Metrics();
  const std::size_t at = text.find("\nkvtwin_" + name + " ");
  EXPECT_NE(at, std::string::npos) << name;
  return std::stod(text.substr(at + name.size() + 9));
}

// Waits until a metric has at least this value.
inline void WaitFor(const Service& service, const std::string& name,
                    double value) {
  for (int i = 0; i < 1000 && Metric(service, name) < value; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(Metric(service, name), value) << name;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_UNIT_INCLUDE_LETTERS_H_
