// The engine: a thread that computes the answers of all requests together.
// kvtwin's sessions say which request uses which sequence of the cache, what of
// its prompt is stored already, and which tokens the next batch has; the engine
// computes the batches and draws the tokens. An error of the cache ends the
// program.

#ifndef SERVE_ENGINE_H_
#define SERVE_ENGINE_H_

#include <kvtwin/serving.h>
#include <kvtwin/sessions.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <iostream>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <sstream>
#include <thread>

#include "model.h"

namespace serve {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

struct Options {
  std::string model;             // The folder that convert.py made.
  std::string weights = "bf16";  // Products are of f32 or bf16.
  std::string rows = "f16";      // K and V.
  kvtwin::SessionsSpec sessions = {.slots = 16, .context = 4096, .batch = 512};
  int threads = 2;
  bool share = true;  // Prefixes of prompts.
  int keep = -1;  // Tokens that a context shift keeps; -1: answers end instead.
  // The folder of parked conversations, and how many it keeps. Empty: none.
  std::string park;
  int parked = 64;
};

// A request, and its answer in the making.
struct Answer {
  // The request. It does not change after Engine::Ask.
  Tokens prompt;
  int max_tokens = 16;
  double temperature = 1;  // 0: the likeliest token.
  double top_p = 1;
  kvtwin::AnswerText shown;  // With the stop strings.
  std::mt19937_64 random;

  std::atomic<bool> cancelled = false;  // The client does not want the rest.

  // The engine writes these. Others read them when Engine::Next has returned a
  // finish.
  Clock::time_point asked;
  int tokens = 0;            // The tokens of the answer.
  kvtwin::RequestInfo info;  // At the first token.
  std::string text;          // Not shown yet.
  std::string finish;        // "stop" or "length" with the last text.
};

// A file is loaded, or a prompt waits for another one to be computed, only if
// that saves this many tokens.
constexpr int kWorthIt = 32;

// Returns the number of tokens that two lists begin with.
inline int Common(std::span<const kvtwin::SessionInput> left,
                  std::span<const kvtwin::SessionInput> right) {
  return std::ranges::mismatch(left, right).in1 - left.begin();
}

// Opens the folder of parked conversations.
inline std::unique_ptr<kvtwin::ParkingLot> OpenParking(const Options& options) {
  if (options.park.empty()) return nullptr;
  const auto changed = fs::last_write_time(options.model + "/model.safetensors")
                           .time_since_epoch();
  return Value(
      kvtwin::MakeParkingLot({.folder = options.park,
                              .model = options.model + " " + options.weights +
                                       " " + std::to_string(changed.count()),
                              .rows = *kvtwin::DTypeFromName(options.rows),
                              .limit = options.parked}));
}

// Says that a conversation could not be parked or loaded.
inline void Log(const kvtwin::Status& status) {
  if (!status.ok()) std::cerr << "park: " << status.ToString() << "\n";
}

// Draws a token.
inline int Sample(const Eigen::Ref<const Eigen::ArrayXf>& logits,
                  Answer& answer) {
  Eigen::Index token = 0;
  const float largest = logits.maxCoeff(&token);
  if (answer.temperature == 0) return token;
  Eigen::ArrayXd weights =
      ((logits - largest).cast<double>() / answer.temperature).exp();
  const double most = answer.top_p * weights.sum();
  for (;;) {
    token = std::discrete_distribution<int>(weights.begin(),
                                            weights.end())(answer.random);
    // A token is refused, with all less likely tokens, if the likelier tokens
    // have the weight top_p.
    Eigen::ArrayXd likelier = (weights > weights[token]).select(weights, 0);
    if (!(likelier.sum() > most)) return token;
    weights = likelier;
  }
}

class Engine {
 public:
  // Does not own the model and the tokenizer. Throws what the cache refuses.
  Engine(Model& model, const Tokenizer& tokenizer, const Options& options)
      : model_(model),
        tokenizer_(tokenizer),
        options_(options),
        parking_(OpenParking(options)),
        cache_(model.MakeCache(kvtwin::InitOf(
            options.sessions, *kvtwin::DTypeFromName(options.rows)))),
        sessions_(Value(kvtwin::MakeSessions(*cache_, options.sessions))),
        thread_([this](std::stop_token stop) { Loop(stop); }) {}

  // These are thread-safe.

  // Requires: 1 to context tokens; with a context shift, any number but 0.
  void Ask(std::shared_ptr<Answer> answer) {
    answer->asked = Clock::now();
    const std::lock_guard lock(mutex_);
    ++requests_;
    waiting_.push_back(std::move(answer));
    changed_.notify_all();
  }

  // Waits up to 100 ms for new text, in whole characters, or for the `whole`
  // answer. Returns it, and the finish.
  std::pair<std::string, std::string> Next(Answer& answer, bool whole) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(100), [&] {
      return !answer.finish.empty() || (!whole && !answer.text.empty());
    });
    if (whole && answer.finish.empty()) return {};
    return {std::exchange(answer.text, ""), answer.finish};
  }

  // For Prometheus.
  std::string Metrics() {
    const std::lock_guard lock(mutex_);
    const kvtwin::SessionGauges gauges = sessions_->Gauges();
    const std::pair<const char*, double> metrics[] = {
        {"requests_total", requests_},
        {"cancelled_total", cancelled_},
        {"prompt_tokens_total", gauges.prompt_tokens},
        {"hit_tokens_total", gauges.hit_tokens},
        {"evicted_tokens_total", gauges.evicted_tokens},
        {"shifts_total", gauges.shifts},
        {"answer_tokens_total", tokens_},
        {"batches_total", gauges.batches},
        {"refusals_total", gauges.refusals},
        {"forward_seconds_total", forward_.count()},
        {"first_token_seconds_total", first_token_.count()},
        {"requests_waiting", waiting_.size()},
        {"requests_running", gauges.running},
        {"cells_used", cells_used_},
        {"cells_free", cache_->CellCount() - cells_used_},
        {"conversations_parked", parking_ ? parking_->Gauges().parked : 0}};
    std::ostringstream out;
    out.precision(15);
    for (const auto& [name, value] : metrics) {
      const bool total = std::string_view(name).ends_with("_total");
      out << "# TYPE kvtwin_" << name << (total ? " counter" : " gauge")
          << "\nkvtwin_" << name << " " << value << "\n";
    }
    return std::move(out).str();
  }

 private:
  void Loop(const std::stop_token& stop) {
    omp_set_num_threads(options_.threads);
    std::unique_lock lock(mutex_);
    const auto busy = [this] { return !waiting_.empty() || !running_.empty(); };
    while (changed_.wait(lock, stop, busy) && !stop.stop_requested()) {
      DropCancelled();
      std::erase_if(waiting_, [this](auto& answer) { return Submit(answer); });
      Pass(lock);
      changed_.notify_all();
    }
  }

  // Ends the requests of clients that have left.
  void DropCancelled() {
    const auto left = [](const auto& answer) -> bool {
      return answer->cancelled;
    };
    cancelled_ += std::erase_if(waiting_, left);
    for (const int number : sessions_->Requests()) {
      if (!left(running_.at(number))) continue;
      End(number, "stop");
      ++cancelled_;
    }
  }

  // Submits a request, unless it must wait for a slot, or for another request
  // that is about to compute more of its prompt than is stored.
  bool Submit(const std::shared_ptr<Answer>& answer) {
    if (std::ssize(running_) == options_.sessions.slots) return false;
    if (options_.share) {
      int stored = 0, unused = -1;  // Tokens; the free slot that holds least.
      std::size_t least = SIZE_MAX;
      for (int i = 0; i < options_.sessions.slots; ++i) {
        const kvtwin::SlotInfo slot = *sessions_->Slot(i);
        stored = std::max(
            stored,
            std::min(slot.reusable, Common(slot.record, answer->prompt)));
        if (slot.request < 0 && slot.record.size() < least) {
          least = slot.record.size();
          unused = i;
        }
      }
      const int wanted = stored + kWorthIt;
      for (const auto& [number, other] : running_) {
        if (other->tokens == 0 &&
            Common(other->prompt, answer->prompt) >= wanted) {
          return false;
        }
      }
      if (parking_) {  // Without what it could load, the prompt is computed.
        Log(parking_
                ->Unpark(*sessions_, *cache_, unused, answer->prompt, wanted)
                .status());
      }
    }
    const bool shift = options_.keep >= 0;
    const int number = Value(
        sessions_->Submit(answer->prompt, {.keep = std::max(options_.keep, 0),
                                           .limit = answer->max_tokens,
                                           .reuse = options_.share,
                                           .shift = shift,
                                           .truncate = shift}));
    running_[number] = answer;
    return true;
  }

  // Computes a batch, and gives its requests a token each.
  void Pass(std::unique_lock<std::mutex>& lock) {
    const kvtwin::SessionBatch batch = Value(sessions_->NextBatch());
    if (batch.inputs.empty()) return;
    cells_used_ = kvtwin::CountCells(*cache_).used;
    const auto begin = Clock::now();
    lock.unlock();
    const Eigen::ArrayXXf logits = model_.Forward(*cache_, batch);
    lock.lock();
    forward_ += Clock::now() - begin;
    for (Eigen::Index i = 0; i < logits.cols(); ++i) {
      const int number = batch.requests[batch.outputs[i]];
      Answer& answer = *running_.at(number);
      if (answer.tokens == 0) {
        first_token_ += Clock::now() - answer.asked;
        answer.info = *sessions_->Request(number);
      }
      Add(number, Sample(logits.col(i), answer));
    }
  }

  // Adds a token to an answer, which may end it.
  void Add(int number, int token) {
    Answer& answer = *running_.at(number);
    ++answer.tokens;
    ++tokens_;
    if (token == model_.config.end) return End(number, "stop");
    answer.text += answer.shown.Add(tokenizer_.Bytes(token));
    if (answer.shown.stopped()) return End(number, "stop");
    if (Value(sessions_->Sampled(number, token)) != kvtwin::Ending::kNone) {
      End(number, "length");
    }
  }

  // Ends an answer, and parks what a later prompt may continue.
  void End(int number, const std::string& finish) {
    const auto answer = running_.extract(number).mapped();
    // The last token of a stop string was not given to the session, which has
    // ended an answer that is as long as it may be.
    (void)sessions_->Finish(
        number, std::max<std::int64_t>(answer->shown.removed() - 1, 0));
    answer->text += answer->shown.End();
    answer->finish = finish;
    if (parking_ == nullptr || answer->tokens == 0) return;
    const int slot = answer->info.slot;
    if (sessions_->Slot(slot)->reusable < kWorthIt) return;
    Log(parking_->Wait());
    Log(parking_->Park(*sessions_, *cache_, slot));
  }

  Model& model_;
  const Tokenizer& tokenizer_;
  const Options options_;
  const std::unique_ptr<kvtwin::ParkingLot> parking_;  // Null: none.
  const std::unique_ptr<kvtwin::Cache> cache_;
  const std::unique_ptr<kvtwin::Sessions> sessions_;

  std::mutex mutex_;  // Guards the rest, and all of the above but the cache.
  std::condition_variable_any changed_;
  std::list<std::shared_ptr<Answer>> waiting_;
  std::map<int, std::shared_ptr<Answer>> running_;  // By number in sessions.
  std::int64_t requests_ = 0, cancelled_ = 0, tokens_ = 0, cells_used_ = 0;
  std::chrono::duration<double> forward_{}, first_token_{};
  std::jthread thread_;  // Ends first.
};

}  // namespace serve

#endif  // SERVE_ENGINE_H_
