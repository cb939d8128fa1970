#include "engine.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <span>

namespace serve {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Draws a token.
std::int32_t Sample(std::span<const float> logits, const Sampling& sampling,
                    std::mt19937_64& random) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (sampling.temperature <= 0) {
    return static_cast<std::int32_t>(largest - logits.begin());
  }
  struct Candidate {
    double weight;
    std::int32_t token;
    bool operator<(const Candidate& other) const {
      return weight < other.weight;
    }
  };
  std::vector<Candidate> candidates;
  double sum = 0;
  for (const float logit : logits) {
    const double weight = std::exp((logit - *largest) / sampling.temperature);
    candidates.push_back({weight, static_cast<std::int32_t>(candidates.size())});
    sum += weight;
  }
  // The likeliest tokens, until their weights are top_p of all.
  auto end = candidates.end();
  if (sampling.top_p < 1) {
    double kept = 0;
    std::make_heap(candidates.begin(), end);
    while (end != candidates.begin() && kept < sampling.top_p * sum) {
      std::pop_heap(candidates.begin(), end);
      kept += (--end)->weight;
    }
    std::reverse(candidates.begin(), candidates.end());
    end = candidates.begin() + (candidates.end() - end);
    sum = kept;
  }
  double drawn = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
  for (auto candidate = candidates.begin(); candidate != end; ++candidate) {
    drawn -= candidate->weight;
    if (drawn < 0) return candidate->token;
  }
  return static_cast<std::int32_t>(largest - logits.begin());
}

// Returns how much of a text can be shown now: its end may be a part of a
// character, or the begin of a stop string.
std::size_t Showable(const std::string& text,
                     const std::vector<std::string>& stops) {
  std::size_t end = text.size();
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, end); ++back) {
    const auto byte = static_cast<unsigned char>(text[end - back]);
    if ((byte & 0xc0) == 0x80) continue;
    const std::size_t size = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3
                             : byte >= 0xc0 ? 2 : 1;
    if (size > back) end -= back;
    break;
  }
  for (const std::string& stop : stops) {
    for (std::size_t at = text.size() - std::min(text.size(), stop.size());
         at < end; ++at) {
      if (stop.starts_with(std::string_view(text).substr(at))) end = at;
    }
  }
  return end;
}

}  // namespace

Answer::Part Answer::Next() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(100), [this] {
    return !part_.text.empty() || !part_.finish.empty();
  });
  Part part = part_;
  part_.text.clear();
  return part;
}

Engine::Engine(Model& model, const Tokenizer& tokenizer, Slots& slots,
               ParkingLot* parked, int threads)
    : model_(model), tokenizer_(tokenizer), slots_(slots), parked_(parked) {
  UpdateGauges();
  thread_ = std::thread([this, threads] { Loop(threads); });
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  asked_.notify_one();
  thread_.join();
}

std::shared_ptr<Answer> Engine::Ask(Tokens prompt, Sampling sampling) {
  Request request{.answer = std::make_shared<Answer>(),
                  .prompt = std::move(prompt),
                  .sampling = std::move(sampling),
                  .random = {},
                  .asked = Clock::now(),
                  .held = {}};
  request.random.seed(request.sampling.seed);
  auto answer = request.answer;
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(request));
  }
  asked_.notify_one();
  return answer;
}

void Engine::Loop(int threads) {
  omp_set_num_threads(threads);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      asked_.wait(lock, [this] {
        return stopping_ || !new_.empty() || !requests_.empty();
      });
      if (stopping_) break;
    }
    TakeNew();
    DropCancelled();
    const kvtwin::Status status = Pass();
    if (!status.ok()) {
      std::cerr << "engine: " << status.ToString() << "\n";
      ++counters_.refusals;
      while (!requests_.empty()) End(requests_.begin()->first, "error");
    }
    UpdateGauges();
  }
  TakeNew();
  while (!requests_.empty()) End(requests_.begin()->first, "error");
}

void Engine::TakeNew() {
  std::vector<Request> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(new_);
  }
  for (Request& request : taken) {
    ++counters_.requests;
    counters_.prompt_tokens += static_cast<std::int64_t>(request.prompt.size());
    slots_.Submit(next_number_, request.prompt);
    requests_.emplace(next_number_++, std::move(request));
  }
}

void Engine::DropCancelled() {
  std::vector<int> cancelled;
  for (const auto& [number, request] : requests_) {
    if (request.answer->cancelled_) cancelled.push_back(number);
  }
  counters_.cancelled += static_cast<std::int64_t>(cancelled.size());
  for (const int number : cancelled) End(number, "stop");
}

// Computes a batch, and gives its requests a token each.
kvtwin::Status Engine::Pass() {
  const auto batch = slots_.NextBatch();
  if (!batch.ok() || batch->tokens.empty()) return batch.status();
  const auto begin = Clock::now();
  std::vector<int> outputs;
  for (const auto& output : batch->outputs) outputs.push_back(output.index);
  const auto logits = model_.Forward(slots_.cache(), batch->tokens,
                                     batch->positions, outputs);
  if (!logits.ok()) return logits.status();
  counters_.forward_seconds += SecondsSince(begin);
  ++counters_.batches;
  const auto vocab = static_cast<std::size_t>(model_.config().vocab);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const int number = batch->outputs[i].request;
    Request& request = requests_.at(number);
    if (request.tokens == 0) {
      counters_.first_token_seconds += SecondsSince(request.asked);
      counters_.hit_tokens += slots_.Reused(number);
    }
    Add(number, request,
        Sample(logits->subspan(i * vocab, vocab), request.sampling,
               request.random));
  }
  return {};
}

// Adds a token to an answer, which may end it.
void Engine::Add(int number, Request& request, std::int32_t token) {
  ++counters_.answer_tokens;
  ++request.tokens;
  const auto& stops = request.sampling.stop;
  if (token == model_.config().end || token == 0) {
    return End(number, "stop");
  }
  request.held += tokenizer_.Bytes(token);
  std::size_t stop = std::string::npos;
  for (const std::string& text : stops) {
    stop = std::min(stop, request.held.find(text));
  }
  if (stop != std::string::npos) {
    request.held.resize(stop);
    return End(number, "stop");
  }
  const bool room = slots_.Sampled(number, token);
  if (!room || request.tokens >= request.sampling.max_tokens) {
    return End(number, "length");
  }
  Report(request, "");
}

// Shows the reader of an answer what is new; `finish` comes with the rest.
void Engine::Report(Request& request, const std::string& finish) {
  const std::size_t end = finish.empty()
                              ? Showable(request.held, request.sampling.stop)
                              : request.held.size();
  {
    const std::lock_guard lock(request.answer->mutex_);
    Answer::Part& part = request.answer->part_;
    part.text += request.held.substr(0, end);
    part.finish = finish;
    part.answer_tokens = request.tokens;
    part.prompt_tokens = static_cast<int>(request.prompt.size());
  }
  request.held.erase(0, end);
  request.answer->changed_.notify_one();
}

void Engine::End(int number, const std::string& finish) {
  Request& request = requests_.at(number);
  {
    const std::lock_guard lock(request.answer->mutex_);
    request.answer->part_.cached_tokens = slots_.Reused(number);
  }
  slots_.Finish(number);
  Report(request, finish);
  requests_.erase(number);
}

void Engine::UpdateGauges() {
  counters_.waiting = static_cast<std::int64_t>(slots_.waiting());
  counters_.running = slots_.running();
  counters_.cells_used = slots_.used_cells();
  if (parked_ != nullptr) {
    counters_.parked = static_cast<std::int64_t>(parked_->size());
  }
}

}  // namespace serve
