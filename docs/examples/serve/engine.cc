#include "engine.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <span>
#include <sstream>

namespace serve {
namespace {

using Clock = std::chrono::steady_clock;

// A file is loaded, or a prompt waits for another one to be computed, only if
// that saves this many tokens.
constexpr int kWorthIt = 32;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Draws a token.
std::int32_t Sample(const float* logits, std::int32_t vocab, Answer& answer) {
  const float* largest = std::max_element(logits, logits + vocab);
  if (answer.temperature <= 0) {
    return static_cast<std::int32_t>(largest - logits);
  }
  std::vector<std::pair<double, std::int32_t>> heap;  // Weights and tokens.
  double sum = 0;
  for (std::int32_t token = 0; token < vocab; ++token) {
    heap.emplace_back(std::exp((logits[token] - *largest) / answer.temperature),
                      token);
    sum += heap.back().first;
  }
  // Moves the likeliest tokens to the end, until their weights are top_p of
  // all.
  auto kept = answer.top_p < 1 ? heap.end() : heap.begin();
  if (answer.top_p < 1) {
    const double wanted = answer.top_p * sum;
    std::make_heap(heap.begin(), heap.end());
    sum = 0;
    do {
      std::pop_heap(heap.begin(), kept);
      sum += (--kept)->first;
    } while (kept != heap.begin() && sum < wanted);
  }
  double drawn = std::uniform_real_distribution<double>(0, sum)(answer.random);
  auto token = kept;
  while (token + 1 != heap.end() && (drawn -= token->first) >= 0) ++token;
  return token->second;
}

// Returns how much of a text can be shown now: its end may be a part of a
// character, or the begin of a stop string.
std::size_t Showable(std::string_view text,
                     const std::vector<std::string>& stops) {
  std::size_t end = text.size();
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, end); ++back) {
    // The first byte of a character of n bytes begins with n ones.
    const int ones =
        std::countl_one(static_cast<unsigned char>(text[text.size() - back]));
    if (ones == 1) continue;
    if (ones > static_cast<int>(back)) end -= back;
    break;
  }
  for (const std::string& stop : stops) {
    for (std::size_t at = text.size() - std::min(text.size(), stop.size());
         at < end; ++at) {
      if (stop.starts_with(text.substr(at))) end = at;
    }
  }
  return end;
}

// Returns the length of the longest prefix of the prompt that a slot has.
int Stored(const kvtwin::Sessions& sessions, const Inputs& prompt) {
  int most = 0;
  for (int i = 0; i < sessions.spec().slots; ++i) {
    const kvtwin::SlotInfo slot = *sessions.Slot(i);
    most = std::max(most,
                    std::min(slot.reusable, CommonPrefix(slot.record, prompt)));
  }
  return most;
}

}  // namespace

Engine::Engine(Model& model, const Tokenizer& tokenizer,
               const EngineOptions& options, ParkingLot* parked)
    : model_(model),
      tokenizer_(tokenizer),
      parked_(parked),
      options_(options),
      cache_(Value(kvtwin::MakeCache(model.cache_spec()))) {
  Check(cache_->SetConfig({.mask_dtype = kvtwin::DType::kBits}));
  Check(cache_->Init(kvtwin::InitOf(options.sessions, options.rows)));
  sessions_ = Value(kvtwin::MakeSessions(*cache_, options.sessions));
  thread_ = std::thread([this] { Loop(); });
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  asked_.notify_one();
  thread_.join();
}

void Engine::Ask(std::shared_ptr<Answer> answer) {
  answer->asked = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    ++requests_;
    waiting_.push_back(std::move(answer));
  }
  asked_.notify_one();
}

Engine::Part Engine::Next(Answer& answer) {
  std::unique_lock lock(mutex_);
  answer.changed.wait_for(lock, std::chrono::milliseconds(100), [&] {
    return !answer.text.empty() || !answer.finish.empty();
  });
  return {std::exchange(answer.text, ""), answer.finish};
}

void Engine::Loop() {
  omp_set_num_threads(options_.threads);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    DropCancelled();
    SubmitWaiting();
    try {
      Pass(lock);
    } catch (const std::runtime_error& error) {
      if (!lock.owns_lock()) lock.lock();
      std::cerr << "engine: " << error.what() << "\n";
      while (!running_.empty()) End(running_.begin()->first, "error");
      // A batch was perhaps planned and not computed: no slot is trusted.
      for (int i = 0; i < options_.sessions.slots; ++i) {
        (void)sessions_->Adopt(i, {});
      }
    }
    asked_.wait(lock, [this] {
      return stopping_ || !waiting_.empty() || !running_.empty();
    });
  }
  while (!running_.empty()) End(running_.begin()->first, "error");
  for (const auto& answer : waiting_) Report(*answer, "error");
}

// Submits requests while there are free slots.
void Engine::SubmitWaiting() {
  std::erase_if(waiting_, [this](const std::shared_ptr<Answer>& answer) {
    const auto slots = static_cast<std::size_t>(options_.sessions.slots);
    if (running_.size() == slots || MustWait(*answer)) return false;
    if (options_.share && parked_ != nullptr) Unpark(answer->prompt);
    const bool shift = options_.keep >= 0;
    const auto number =
        sessions_->Submit(answer->prompt, {.keep = std::max(options_.keep, 0),
                                           .limit = answer->max_tokens,
                                           .reuse = options_.share,
                                           .shift = shift,
                                           .truncate = shift});
    if (number.ok()) {
      running_[*number] = answer;
    } else {
      std::cerr << "engine: " << number.status().ToString() << "\n";
      Report(*answer, "error");
    }
    return true;
  });
}

// Whether another request is about to compute more of this prompt than is
// stored.
bool Engine::MustWait(const Answer& answer) const {
  int promised = 0;
  for (const auto& [number, other] : running_) {
    if (other->tokens == 0) {
      promised = std::max(promised, CommonPrefix(other->prompt, answer.prompt));
    }
  }
  return options_.share &&
         promised >= Stored(*sessions_, answer.prompt) + kWorthIt;
}

// Loads a parked conversation into the free slot that holds least, if it has
// more of the prompt than all slots. Requires: there is a free slot.
void Engine::Unpark(const Inputs& prompt) {
  const auto [file, common] = parked_->Find(prompt);
  if (common < Stored(*sessions_, prompt) + kWorthIt) return;
  int slot = -1;
  for (int i = 0; i < options_.sessions.slots; ++i) {
    const kvtwin::SlotInfo info = *sessions_->Slot(i);
    if (info.request < 0 &&
        (slot < 0 ||
         info.record.size() < sessions_->Slot(slot)->record.size())) {
      slot = i;
    }
  }
  try {
    const kvtwin::CacheState state = Value(parked_->Load(file));
    Check(sessions_->Adopt(slot, {}));
    Check(cache_->CopyPrefix(slot, slot, 0));
    Check(cache_->AddSequence(slot, state));
    Check(cache_->CopyPrefix(slot, slot, common));
    Check(sessions_->Adopt(slot, std::span(prompt).first(common)));
  } catch (const std::runtime_error& error) {  // Then the prompt is computed.
    std::cerr << "unpark: " << error.what() << "\n";
  }
}

void Engine::DropCancelled() {
  const auto left = [](const auto& answer) { return answer->cancelled.load(); };
  cancelled_ += std::erase_if(waiting_, left);
  for (const int number : sessions_->Requests()) {
    if (!left(running_.at(number))) continue;
    End(number, "stop");
    ++cancelled_;
  }
}

// Computes a batch, and gives its requests a token each.
void Engine::Pass(std::unique_lock<std::mutex>& lock) {
  const kvtwin::SessionBatch batch = Value(sessions_->NextBatch());
  if (batch.inputs.empty()) return;
  cells_used_ = kvtwin::CountCells(*cache_).used;
  const auto begin = Clock::now();
  Tokens tokens;
  for (const auto& input : batch.inputs) tokens.push_back(input.token);
  lock.unlock();
  const Rows& logits =
      model_.Forward(*cache_, tokens, batch.positions, batch.outputs);
  lock.lock();
  forward_seconds_ += SecondsSince(begin);
  for (std::size_t i = 0; i < batch.outputs.size(); ++i) {
    const auto output = static_cast<std::size_t>(batch.outputs[i]);
    const int number = batch.requests[output];
    Answer& answer = *running_.at(number);
    if (answer.tokens == 0) {
      first_token_seconds_ += SecondsSince(answer.asked);
      answer.slot = batch.sequences[output];
      answer.cached = sessions_->Request(number)->reused;
    }
    Add(number, Sample(logits.col(static_cast<Eigen::Index>(i)).data(),
                       model_.config().vocab, answer));
  }
}

// Adds a token to an answer, which may end it.
void Engine::Add(int number, std::int32_t token) {
  Answer& answer = *running_.at(number);
  ++answer.tokens;
  ++tokens_;
  if (token == model_.config().end) return End(number, "stop");
  answer.held += tokenizer_.Bytes(token);
  std::size_t stop = std::string::npos;
  for (const std::string& text : answer.stop) {
    stop = std::min(stop, answer.held.find(text));
  }
  if (stop != std::string::npos) {
    answer.held.resize(stop);
    return End(number, "stop");
  }
  if (Value(sessions_->Sampled(number, token)) != kvtwin::Ending::kNone) {
    return End(number, "length");
  }
  Report(answer, "");
}

// Shows the reader of an answer what is new; `finish` comes with the rest.
void Engine::Report(Answer& answer, const std::string& finish) {
  const std::size_t end =
      finish.empty() ? Showable(answer.held, answer.stop) : answer.held.size();
  answer.text += answer.held.substr(0, end);
  answer.held.erase(0, end);
  answer.finish = finish;
  answer.changed.notify_one();
}

void Engine::End(int number, const std::string& finish) {
  const auto answer = running_.extract(number).mapped();
  // Refused if the answer has as many tokens as it may have: it has ended then.
  (void)sessions_->Finish(number);
  if (finish != "error") Park(*answer);
  Report(*answer, finish);
}

// Parks what a later prompt may continue.
void Engine::Park(const Answer& answer) {
  if (parked_ == nullptr || answer.slot < 0) return;
  const kvtwin::SlotInfo slot = *sessions_->Slot(answer.slot);
  if (slot.reusable < kWorthIt) return;
  auto state = cache_->SnapshotOf(answer.slot);
  if (!state.ok()) return;
  const auto tokens = slot.record.begin();
  parked_->Park({tokens, tokens + slot.reusable}, *std::move(state));
}

std::string Engine::Metrics() {
  const std::lock_guard lock(mutex_);
  const kvtwin::SessionGauges gauges = sessions_->Gauges();
  std::ostringstream out;
  const auto metric = [&out](const std::string& name, auto value,
                             const char* help) {
    out << "# HELP kvtwin_" << name << " " << help << "\n# TYPE kvtwin_" << name
        << (name.ends_with("_total") ? " counter" : " gauge") << "\nkvtwin_"
        << name << " " << value << "\n";
  };
  metric("requests_total", requests_, "Requests");
  metric("cancelled_total", cancelled_, "Clients that left");
  metric("prompt_tokens_total", gauges.prompt_tokens, "Tokens of prompts");
  metric("hit_tokens_total", gauges.hit_tokens,
         "Tokens of prompts that were in the cache");
  metric("evicted_tokens_total", gauges.evicted_tokens,
         "Tokens that made place for others");
  metric("shifts_total", gauges.shifts, "Full slots that made place");
  metric("answer_tokens_total", tokens_, "Tokens of answers");
  metric("batches_total", gauges.batches, "Passes of the model");
  metric("refusals_total", gauges.refusals, "Passes that the cache refused");
  metric("forward_seconds_total", forward_seconds_, "Time in passes");
  metric("first_token_seconds_total", first_token_seconds_,
         "Time from requests to first tokens");
  metric("requests_waiting", waiting_.size(), "Requests without a slot");
  metric("requests_running", gauges.running, "Requests with a slot");
  metric("cells_used", cells_used_, "Cells that hold a token");
  metric("cells_free", cache_->CellCount() - cells_used_, "Free cells");
  metric("conversations_parked", parked_ != nullptr ? parked_->size() : 0,
         "Files of conversations");
  return std::move(out).str();
}

}  // namespace serve
