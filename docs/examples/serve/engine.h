// The engine: a thread that computes the answers of all requests together.

#ifndef SERVE_ENGINE_H_
#define SERVE_ENGINE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "model.h"
#include "slots.h"
#include "tokenizer.h"

namespace serve {

// How an answer is drawn, and where it ends.
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

// The counters of /metrics.
struct Counters {
  std::atomic<std::int64_t> requests = 0, cancelled = 0, prompt_tokens = 0,
                            hit_tokens = 0, answer_tokens = 0, batches = 0,
                            refusals = 0;
  std::atomic<std::int64_t> waiting = 0, running = 0, cells_used = 0,
                            parked = 0;
  std::atomic<double> forward_seconds = 0, first_token_seconds = 0;
};

class Engine {
 public:
  // Computes with `threads` threads.
  Engine(Model& model, const Tokenizer& tokenizer, Slots& slots,
         ParkingLot* parked, int threads);
  ~Engine();

  // Thread-safe. Requires: 1 to context - 1 tokens.
  std::shared_ptr<Answer> Ask(Tokens prompt, Sampling sampling);
  const Counters& counters() const { return counters_; }

 private:
  struct Request {
    std::shared_ptr<Answer> answer;
    Tokens prompt;
    Sampling sampling;
    std::mt19937_64 random;
    std::chrono::steady_clock::time_point asked;
    std::string held;  // Text that may be the begin of a stop string.
    int tokens = 0;
  };

  void Loop(int threads);
  kvtwin::Status Pass();
  void TakeNew();
  void DropCancelled();
  void Add(int number, Request& request, std::int32_t token);
  void Report(Request& request, const std::string& finish);
  void End(int number, const std::string& finish);
  void UpdateGauges();

  Model& model_;
  const Tokenizer& tokenizer_;
  Slots& slots_;
  ParkingLot* parked_;
  Counters counters_;
  std::mutex mutex_;
  std::condition_variable asked_;
  std::vector<Request> new_;  // Guarded by mutex_, as is stopping_.
  bool stopping_ = false;
  std::map<int, Request> requests_;
  int next_number_ = 0;
  std::thread thread_;
};

}  // namespace serve

#endif  // SERVE_ENGINE_H_
