#include "engine.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <span>

namespace serve {
namespace {

using kvtwin::DType, kvtwin::Result, kvtwin::Status;
using Clock = std::chrono::steady_clock;

// A file is loaded, or a prompt waits for another one to be computed, only if
// that saves this many tokens.
constexpr std::size_t kWorthIt = 32;

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
    candidates.push_back(
        {weight, static_cast<std::int32_t>(candidates.size())});
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
    const std::size_t size = byte >= 0xf0   ? 4
                             : byte >= 0xe0 ? 3
                             : byte >= 0xc0 ? 2
                                            : 1;
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

std::vector<kvtwin::SessionInput> ToInputs(const Tokens& tokens) {
  std::vector<kvtwin::SessionInput> inputs;
  for (const std::int32_t token : tokens) inputs.push_back({.token = token});
  return inputs;
}

// Returns how many tokens of a prompt the slot that has most of them has.
std::size_t Stored(const kvtwin::Sessions& sessions, const Tokens& prompt) {
  std::size_t most = 0;
  for (int i = 0; i < sessions.spec().slots; ++i) {
    const auto record = sessions.Slot(i)->record;
    const auto ends = std::mismatch(
        record.begin(), record.end(), prompt.begin(), prompt.end(),
        [](const auto& input, int token) { return input.token == token; });
    most = std::max(most, std::size_t(ends.second - prompt.begin()));
  }
  return most;
}

// Returns the free slot that holds least. Requires: there is a free slot.
int EmptiestSlot(const kvtwin::Sessions& sessions) {
  int best = -1;
  std::size_t least = 0;
  for (int i = 0; i < sessions.spec().slots; ++i) {
    const auto slot = *sessions.Slot(i);
    if (slot.request >= 0 || (best >= 0 && slot.record.size() >= least)) {
      continue;
    }
    best = i;
    least = slot.record.size();
  }
  return best;
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

Result<std::unique_ptr<Engine>> Engine::Make(Model& model,
                                             const Tokenizer& tokenizer,
                                             const EngineOptions& options,
                                             ParkingLot* parked) {
  std::unique_ptr<Engine> engine(new Engine(model, tokenizer, parked, options));
  auto cache = kvtwin::MakeCache(model.cache_spec());
  if (!cache.ok()) return cache.status();
  engine->cache_ = *std::move(cache);
  const kvtwin::SessionsSpec spec = {.slots = options.slots,
                                     .context = options.context,
                                     .batch = options.batch};
  Status status = engine->cache_->SetConfig({.mask_dtype = DType::kBits});
  if (status.ok()) {
    status = engine->cache_->Init(kvtwin::InitOf(spec, options.rows));
  }
  if (!status.ok()) return status;
  auto sessions = kvtwin::MakeSessions(*engine->cache_, spec);
  if (!sessions.ok()) return sessions.status();
  engine->sessions_ = *std::move(sessions);
  engine->UpdateCounters();
  engine->thread_ = std::thread([raw = engine.get()] { raw->Loop(); });
  return engine;
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  asked_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Answer> Engine::Ask(Tokens prompt, Sampling sampling) {
  Request request;
  request.answer = std::make_shared<Answer>();
  request.prompt = std::move(prompt);
  request.random.seed(sampling.seed);
  request.sampling = std::move(sampling);
  request.asked = Clock::now();
  auto answer = request.answer;
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(request));
  }
  asked_.notify_one();
  return answer;
}

Counters Engine::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void Engine::Loop() {
  omp_set_num_threads(options_.threads);
  for (bool stopping = false; !stopping;) {
    TakeNew();
    DropCancelled();
    const Status status = Pass();
    if (!status.ok()) {
      std::cerr << "engine: " << status.ToString() << "\n";
      while (!running_.empty()) End(running_.begin()->first, "error");
      // A batch was perhaps planned and not computed: no slot is trusted.
      for (int i = 0; i < options_.slots; ++i) (void)sessions_->Adopt(i, {});
    }
    UpdateCounters();
    std::unique_lock lock(mutex_);
    asked_.wait(lock, [this] {
      return stopping_ || !new_.empty() || !waiting_.empty() ||
             !running_.empty();
    });
    stopping = stopping_;
  }
  TakeNew();
  while (!running_.empty()) End(running_.begin()->first, "error");
  for (Request& request : waiting_) Report(request, "error");
}

// Submits requests while there are free slots.
void Engine::TakeNew() {
  {
    const std::lock_guard lock(mutex_);
    counted_.requests += static_cast<double>(new_.size());
    std::move(new_.begin(), new_.end(), std::back_inserter(waiting_));
    new_.clear();
  }
  for (auto request = waiting_.begin();
       request != waiting_.end() &&
       running_.size() < std::size_t(options_.slots);) {
    if (MustWait(request->prompt)) {
      ++request;
      continue;
    }
    Submit(std::move(*request));
    request = waiting_.erase(request);
  }
}

// Whether another request is about to compute more of this prompt than is
// stored.
bool Engine::MustWait(const Tokens& prompt) const {
  std::size_t promised = 0;
  for (const auto& [number, request] : running_) {
    if (request.tokens == 0) {
      promised = std::max(promised, CommonPrefix(request.prompt, prompt));
    }
  }
  return options_.share && promised >= Stored(*sessions_, prompt) + kWorthIt;
}

void Engine::Submit(Request request) {
  if (options_.share && parked_ != nullptr) Unpark(request.prompt);
  const kvtwin::RequestOptions options = {.limit = request.sampling.max_tokens,
                                          .reuse = options_.share,
                                          .shift = false};
  const auto number = sessions_->Submit(ToInputs(request.prompt), options);
  if (number.ok()) {
    running_.emplace(*number, std::move(request));
  } else {
    std::cerr << "engine: " << number.status().ToString() << "\n";
    Report(request, "error");
  }
}

// Loads a parked conversation into a free slot if it has more of the prompt
// than all slots.
void Engine::Unpark(const Tokens& prompt) {
  const auto [file, common] = parked_->Find(prompt);
  if (common < Stored(*sessions_, prompt) + kWorthIt) return;
  const int slot = EmptiestSlot(*sessions_);
  const auto length = static_cast<std::int32_t>(common);
  const auto state = parked_->Load(file);
  Status status = state.status();
  if (status.ok()) status = sessions_->Adopt(slot, {});
  if (status.ok()) status = cache_->CopyPrefix(slot, slot, 0);
  if (status.ok()) status = cache_->AddSequence(slot, *state);
  if (status.ok()) status = cache_->CopyPrefix(slot, slot, length);
  if (status.ok()) {
    status = sessions_->Adopt(
        slot, ToInputs({prompt.begin(), prompt.begin() + length}));
  }
  // Then the prompt is computed.
  if (!status.ok()) std::cerr << "unpark: " << status.ToString() << "\n";
}

void Engine::DropCancelled() {
  std::vector<int> cancelled;
  for (const auto& [number, request] : running_) {
    if (request.answer->cancelled_) cancelled.push_back(number);
  }
  for (const int number : cancelled) End(number, "stop");
  counted_.cancelled += static_cast<double>(cancelled.size());
  counted_.cancelled +=
      static_cast<double>(std::erase_if(waiting_, [](const Request& request) {
        return request.answer->cancelled_.load();
      }));
}

// Computes a batch, and gives its requests a token each.
Status Engine::Pass() {
  const auto batch = sessions_->NextBatch();
  if (!batch.ok() || batch->inputs.empty()) return batch.status();
  const auto begin = Clock::now();
  Tokens tokens;
  for (const auto& input : batch->inputs) tokens.push_back(input.token);
  const auto logits =
      model_.Forward(*cache_, tokens, batch->positions, batch->outputs);
  if (!logits.ok()) return logits.status();
  counted_.forward_seconds += SecondsSince(begin);
  const auto vocab = static_cast<std::size_t>(model_.config().vocab);
  for (std::size_t i = 0; i < batch->outputs.size(); ++i) {
    const auto output = static_cast<std::size_t>(batch->outputs[i]);
    const int number = batch->requests[output];
    Request& request = running_.at(number);
    if (request.tokens == 0) {
      counted_.first_token_seconds += SecondsSince(request.asked);
      request.slot = batch->sequences[output];
      request.cached = sessions_->Request(number)->reused;
    }
    Add(number, request,
        Sample(logits->subspan(i * vocab, vocab), request.sampling,
               request.random));
  }
  return {};
}

// Adds a token to an answer, which may end it.
void Engine::Add(int number, Request& request, std::int32_t token) {
  ++request.tokens;
  ++counted_.answer_tokens;
  const bool text_ends = token == model_.config().end;
  if (text_ends) return End(number, "stop");
  request.held += tokenizer_.Bytes(token);
  std::size_t stop = std::string::npos;
  for (const std::string& text : request.sampling.stop) {
    stop = std::min(stop, request.held.find(text));
  }
  if (stop != std::string::npos) {
    request.held.resize(stop);
    return End(number, "stop");
  }
  const auto ending = sessions_->Sampled(number, token);
  if (!ending.ok()) return End(number, "error");
  if (*ending != kvtwin::Ending::kNone) return End(number, "length");
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
    part.cached_tokens = request.cached;
    part.prompt_tokens = static_cast<int>(request.prompt.size());
  }
  request.held.erase(0, end);
  request.answer->changed_.notify_one();
}

void Engine::End(int number, const std::string& finish) {
  Request& request = running_.at(number);
  // Sessions have ended it already if it has as many tokens as it may have.
  if (sessions_->Request(number).ok()) {
    const Status status = sessions_->Finish(number);
    if (!status.ok()) std::cerr << "engine: " << status.ToString() << "\n";
  }
  if (finish != "error") Park(request);
  Report(request, finish);
  running_.erase(number);
}

void Engine::Park(const Request& request) {
  if (parked_ == nullptr || request.slot < 0) return;
  const auto record = sessions_->Slot(request.slot)->record;
  Tokens tokens;
  for (const auto& input : record) tokens.push_back(input.token);
  if (tokens.size() < kWorthIt) return;
  auto state = cache_->SnapshotOf(request.slot);
  if (state.ok()) parked_->Park(tokens, *std::move(state));
}

void Engine::UpdateCounters() {
  counted_.sessions = sessions_->Gauges();
  counted_.waiting = static_cast<int>(waiting_.size());
  counted_.parked = parked_ != nullptr ? parked_->size() : 0;
  counted_.cells = cache_->CellCount();
  counted_.cells_used = kvtwin::CountCells(*cache_).used;
  const std::lock_guard lock(mutex_);
  counters_ = counted_;
}

}  // namespace serve
