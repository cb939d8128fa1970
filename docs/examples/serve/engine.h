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
#include <list>
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

// A request, and its answer in the making.
struct Answer {
  // The request. It does not change after Engine::Ask.
  Inputs prompt;
  int max_tokens = 16;
  double temperature = 1;  // 0: the likeliest token.
  double top_p = 1;
  std::vector<std::string> stop;
  std::mt19937_64 random;
  std::chrono::steady_clock::time_point asked;

  std::atomic<bool> cancelled = false;  // The client does not want the rest.

  // The engine writes these. Others read them when Engine::Next has returned a
  // finish.
  int tokens = 0;  // The tokens of the answer.
  int cached = 0;  // The tokens of the prompt that the cache had.
  int slot = -1;
  std::string text;  // Not shown yet.
  std::string held;  // May be the begin of a stop string or of a character.
  std::string finish;
  std::condition_variable changed;
};

struct EngineOptions {
  kvtwin::SessionsSpec sessions = {.slots = 16, .context = 4096, .batch = 512};
  int threads = 2;
  bool share = true;  // Prefixes of prompts.
  int keep = -1;  // Tokens that a context shift keeps; -1: answers end instead.
  kvtwin::DType rows = kvtwin::DType::kF16;  // K and V.
};

class Engine {
 public:
  // Does not own the model, the tokenizer and the parked conversations; the
  // latter may be null. Throws what the cache refuses.
  Engine(Model& model, const Tokenizer& tokenizer, const EngineOptions& options,
         ParkingLot* parked);
  ~Engine();

  // These are thread-safe.
  //
  // Requires: 1 to context tokens; with a context shift, any number but 0.
  void Ask(std::shared_ptr<Answer> answer);
  // Waits up to 100 ms for new text, in whole characters. The finish is "stop",
  // "length" or "error" with the last part.
  struct Part {
    std::string text, finish;
  };
  Part Next(Answer& answer);
  std::string Metrics();  // For Prometheus.

 private:
  void Loop();
  void SubmitWaiting();
  bool MustWait(const Answer& answer) const;
  void Unpark(const Inputs& prompt);
  void DropCancelled();
  void Pass(std::unique_lock<std::mutex>& lock);
  void Add(int number, std::int32_t token);
  void Report(Answer& answer, const std::string& finish);
  void End(int number, const std::string& finish);
  void Park(const Answer& answer);

  Model& model_;
  const Tokenizer& tokenizer_;
  ParkingLot* parked_;
  const EngineOptions options_;
  std::unique_ptr<kvtwin::Cache> cache_;
  std::unique_ptr<kvtwin::Sessions> sessions_;

  std::mutex mutex_;  // Guards the rest and the sessions, but not the cache.
  std::condition_variable asked_;
  std::list<std::shared_ptr<Answer>> waiting_;
  std::map<int, std::shared_ptr<Answer>> running_;  // By number in sessions.
  std::int64_t requests_ = 0, cancelled_ = 0, tokens_ = 0;
  double forward_seconds_ = 0, first_token_seconds_ = 0;
  int cells_used_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace serve

#endif  // SERVE_ENGINE_H_
