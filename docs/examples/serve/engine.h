// The engine: a thread that computes the answers of all requests together.
//
// kvtwin's sessions say which request uses which sequence of the cache, what of
// its prompt is stored already, and which tokens the next batch has. The engine
// computes the batches and draws the tokens.

#ifndef SERVE_ENGINE_H_
#define SERVE_ENGINE_H_

#include <kvtwin/sessions.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "model.h"
#include "park.h"
#include "tokenizer.h"

namespace serve {

// Options: how the tokens of an answer are drawn, and where the answer ends.
struct Sampling {
  int max_tokens = 16;
  double temperature = 1;  // 0: the likeliest token.
  double top_p = 1;
  std::uint64_t seed = 0;
  std::vector<std::string> stop;
};

// An answer in the making: the engine writes it, and another thread reads it.
class Answer {
 public:
  struct Part {
    std::string text;    // New text, in whole characters.
    std::string finish;  // "stop", "length" or "error" with the last part.
    int prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
  };

  // Waits up to 100 ms for something new.
  Part Next();
  // The client does not want the rest.
  void Cancel() { cancelled_ = true; }

 private:
  friend class Engine;
  std::mutex mutex_;
  std::condition_variable changed_;
  Part part_;
  std::atomic<bool> cancelled_ = false;
};

// The counters of /metrics; kvtwin's sessions have others.
struct Counters {
  double requests = 0, cancelled = 0, answer_tokens = 0;
  double forward_seconds = 0, first_token_seconds = 0;
  int waiting = 0, parked = 0, cells = 0, cells_used = 0;
  kvtwin::SessionGauges sessions;
};

struct EngineOptions {
  int slots = 16, context = 4096, batch = 512;
  int threads = 2;
  bool share = true;                         // Prefixes of prompts.
  kvtwin::DType rows = kvtwin::DType::kF16;  // K and V.
};

class Engine {
 public:
  // Does not own the model, the tokenizer and the parked conversations; the
  // latter may be null.
  static kvtwin::Result<std::unique_ptr<Engine>> Make(
      Model& model, const Tokenizer& tokenizer, const EngineOptions& options,
      ParkingLot* parked);
  ~Engine();

  // These two are thread-safe. Requires: 1 to context - 1 tokens.
  std::shared_ptr<Answer> Ask(Tokens prompt, Sampling sampling);
  Counters counters() const;

 private:
  struct Request {
    std::shared_ptr<Answer> answer;
    Tokens prompt;
    Sampling sampling;
    std::mt19937_64 random;
    std::chrono::steady_clock::time_point asked;
    std::string held;  // Text that may be the begin of a stop string.
    int tokens = 0;    // The answer's.
    int slot = -1, cached = 0;
  };

  Engine(Model& model, const Tokenizer& tokenizer, ParkingLot* parked,
         const EngineOptions& options)
      : model_(model),
        tokenizer_(tokenizer),
        parked_(parked),
        options_(options) {}

  void Loop();
  void TakeNew();
  void DropCancelled();
  bool MustWait(const Tokens& prompt) const;
  void Unpark(const Tokens& prompt);
  void Submit(Request request);
  kvtwin::Status Pass();
  void Add(int number, Request& request, std::int32_t token);
  void Report(Request& request, const std::string& finish);
  void End(int number, const std::string& finish);
  void Park(const Request& request);
  void UpdateCounters();

  Model& model_;
  const Tokenizer& tokenizer_;
  ParkingLot* parked_;
  const EngineOptions options_;
  std::unique_ptr<kvtwin::Cache> cache_;
  std::unique_ptr<kvtwin::Sessions> sessions_;
  std::deque<Request> waiting_;
  std::map<int, Request> running_;  // By their number in the sessions.
  Counters counted_;

  mutable std::mutex mutex_;  // Guards the rest.
  std::condition_variable asked_;
  std::deque<Request> new_;
  Counters counters_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace serve

#endif  // SERVE_ENGINE_H_
