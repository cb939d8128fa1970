#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>
#include <utility>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/serving.h"

namespace kvtwin {
namespace {

using Clock = std::chrono::steady_clock;

// The lock that the service and its answers share.
struct Board {
  std::mutex mutex;
  std::condition_variable_any changed;
};

// A request, and its answer in the making. The mutex guards the members after
// `dropped`.
struct Job {
  ServiceRequest request;  // With the prompt that is computed, without stops.
  Clock::time_point asked = Clock::now();
  std::atomic<bool> dropped = false;  // By its owner, who wants no more.
  int keep = 0;                       // Of a context shift.
  AnswerText shown;
  AnswerPart part;
  int slot = -1;
};

class JobAnswer : public Answer {
 public:
  JobAnswer(std::shared_ptr<Board> board, std::shared_ptr<Job> job)
      : board_(std::move(board)), job_(std::move(job)) {}
  ~JobAnswer() override { job_->dropped = true; }

  AnswerPart Next(bool whole, std::chrono::milliseconds wait) override {
    std::unique_lock lock(board_->mutex);
    AnswerPart& part = job_->part;
    // The clock overflows if it waits for long.
    using std::chrono::milliseconds, std::chrono::hours;
    wait = std::clamp<milliseconds>(wait, milliseconds(0), hours(24));
    board_->changed.wait_for(lock, wait, [&] {
      return part.finish != Finish::kNone || (!whole && !part.text.empty());
    });
    std::string text = std::exchange(part.text, {});
    AnswerPart next = part;
    (whole && part.finish == Finish::kNone ? part : next).text =
        std::move(text);
    return next;
  }

 private:
  const std::shared_ptr<Board> board_;
  const std::shared_ptr<Job> job_;
};

class BatchService : public Service {
 public:
  BatchService(Cache& cache, std::unique_ptr<Sessions> sessions,
               ServiceSpec spec, ServiceModel model,
               std::unique_ptr<ParkingLot> parking)
      : cache_(cache),
        spec_(std::move(spec)),
        model_(std::move(model)),
        sessions_(std::move(sessions)),
        parking_(std::move(parking)),
        parked_(parking_ ? parking_->Gauges() : ParkingGauges()),
        cells_(CountCells(cache)),
        thread_([this](const std::stop_token& stop) { Loop(stop); }) {}

  Result<std::unique_ptr<Answer>> Ask(ServiceRequest request) override {
    if (!request.sample) return Invalid("the request lacks sample");
    const SessionsSpec& sizes = spec_.sessions;
    Status status =
        CheckRequest(sizes, request.prompt,
                     {.limit = request.limit, .truncate = spec_.keep >= 0});
    if (!status.ok()) return status;
    const auto job = std::make_shared<Job>();
    job->shown = AnswerText(std::move(request.stops));
    job->request = std::move(request);
    job->keep = std::max(spec_.keep, 0);
    // The answer is made first: without it, a request would run and no caller
    // could read or drop it.
    auto answer = std::make_unique<JobAnswer>(board_, job);
    if (std::vector<SessionInput>& prompt = job->request.prompt;
        std::ssize(prompt) > sizes.context) {
      job->keep = CutMiddle(prompt, job->keep, sizes.context);
    }
    const std::lock_guard lock(board_->mutex);
    if (spec_.queue > 0 &&
        Size(waiting_) + Size(running_) - sizes.slots >= spec_.queue) {
      ++refused_;
      return Untimely("the queue has {} requests, which is its limit",
                      spec_.queue);
    }
    ++requests_;
    if (status_.ok()) {
      waiting_.push_back(job);
    } else {
      End(*job, Finish::kFailed, status_);
    }
    board_->changed.notify_all();
    return std::unique_ptr<Answer>(std::move(answer));
  }

  std::string Metrics() const override {
    const std::lock_guard lock(board_->mutex);
    std::string text;
    const auto add = [&text](std::string_view name, auto value) {
      const std::string_view type =
          name.ends_with("_total") ? "counter" : "gauge";
      text += fmt::format("# TYPE kvtwin_{0} {1}\nkvtwin_{0} {2}\n", name, type,
                          value);
    };
    add("requests_total", requests_);
    add("requests_refused_total", refused_);
    add("cancelled_total", cancelled_);
    add("prompt_tokens_total", gauges_.prompt_tokens);
    add("hit_tokens_total", gauges_.hit_tokens);
    add("evicted_tokens_total", gauges_.evicted_tokens);
    add("shifts_total", gauges_.shifts);
    add("answer_tokens_total", tokens_);
    add("batches_total", gauges_.batches);
    add("refusals_total", gauges_.refusals);
    add("forward_seconds_total", forward_.count());
    add("first_token_seconds_total", first_token_.count());
    add("requests_waiting", waiting_.size());
    add("requests_running", running_.size());
    add("cells_used", cells_.used);
    add("cells_free", cells_.cells - cells_.used);
    add("conversations_parked", parked_.parked);
    add("conversations_writing", parked_.writing);
    add("parking_failures_total", parked_.failed);
    return text;
  }

 private:
  using JobPointer = std::shared_ptr<Job>;

  void Loop(const std::stop_token& stop) {
    std::unique_lock lock(board_->mutex);
    const auto busy = [this] {
      return status_.ok() &&
             (!running_.empty() || (!waiting_.empty() && !waits_for_disk_));
    };
    // Returns whether the service continues. The disk is looked at now and
    // then.
    const auto wait = [&] {
      using std::chrono::milliseconds, std::chrono::hours;
      const bool disk = waits_for_disk_ || parked_.writing > 0;
      board_->changed.wait_for(
          lock, stop, disk ? milliseconds(5) : milliseconds(hours(24)), busy);
      return !stop.stop_requested();
    };
    while (wait()) {
      waits_for_disk_ = false;
      const auto work = [&] {
        DropCancelled();
        ParkEnded(lock);
        SubmitWaiting(lock);
        return Pass(lock);
      };
      if (status_.ok()) Report(Try(lock, work));
      Report(Try(lock, [&] {
        ParkEnded(lock);
        return Status();
      }));
      DropEnded(lock);
    }
    Report(Try(lock, [] { return Untimely("the service has ended"); }));
    DropEnded(lock);
    lock.unlock();
    try {
      if (parking_) Log(parking_->Wait());
    } catch (...) {
      return;  // No answer is left that could have the error.
    }
  }

  // Calls does(), and returns its error; the lock is held afterwards.
  template <class Does>
  static Status Try(std::unique_lock<std::mutex>& lock, const Does& does) {
    Status status;
    try {
      try {
        status = does();
      } catch (const std::exception& error) {
        status = Untimely("the model failed: {}", error.what());
      } catch (...) {
        status = Untimely("the model failed");
      }
    } catch (const std::bad_alloc&) {
      status = NoMemory();
    }
    if (!lock.owns_lock()) lock.lock();
    return status;
  }
  // The text fits in the string itself, so that it needs no memory.
  static Status NoMemory() {
    return {StatusCode::kFailedPrecondition, "no memory"};
  }

  // Wakes the threads that wait, and updates the metrics. An error ends all
  // answers.
  void Report(Status status) {
    if (!status.ok()) FailAll(std::move(status));
    gauges_ = sessions_->Gauges();
    if (parking_) parked_ = parking_->Gauges();
    board_->changed.notify_all();
  }

  static void End(Job& job, Finish finish, const Status& status) {
    try {
      job.part.status = status;
    } catch (const std::bad_alloc&) {
      job.part.status = NoMemory();
    }
    job.part.finish = finish;
  }

  void FailAll(Status status) {
    if (status_.ok()) status_ = std::move(status);
    for (const JobPointer& job : waiting_) End(*job, Finish::kFailed, status_);
    for (const auto& [number, job] : running_) {
      End(*job, Finish::kFailed, status_);
    }
    ended_waiting_.splice(ended_waiting_.end(), waiting_);
    ended_running_.merge(running_);
  }

  // An exception of the log is dropped.
  void Log(const Status& status) const {
    if (status.ok() || !spec_.log) return;
    try {
      spec_.log(status);
    } catch (...) {
      return;
    }
  }

  // Destroys the ended requests. A destructor of their captures may call the
  // service, which would wait for the mutex.
  void DropEnded(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    ended_waiting_.clear();
    ended_running_.clear();
    lock.lock();
  }

  // Ends the requests whose answers were dropped.
  void DropCancelled() {
    const auto dropped = [](const JobPointer& job) -> bool {
      return job->dropped;
    };
    for (auto job = waiting_.begin(); job != waiting_.end();) {
      const auto next = std::next(job);
      if (dropped(*job)) {
        ended_waiting_.splice(ended_waiting_.end(), waiting_, job);
        ++cancelled_;
      }
      job = next;
    }
    for (const int number : sessions_->Requests()) {
      if (!dropped(running_.at(number))) continue;
      End(number, Finish::kStop);
      ++cancelled_;
    }
  }

  // Others may add requests meanwhile.
  void SubmitWaiting(std::unique_lock<std::mutex>& lock) {
    for (auto job = waiting_.begin(); job != waiting_.end();) {
      job = Submit(*job, lock) ? waiting_.erase(job) : std::next(job);
    }
  }

  // Submits a request, unless it must wait for a slot, for the disk, or for
  // another request that is about to compute more of its prompt than is stored.
  bool Submit(const JobPointer& job, std::unique_lock<std::mutex>& lock) {
    const std::vector<SessionInput>& prompt = job->request.prompt;
    if (Size(running_) == spec_.sessions.slots) return false;
    // The copies of conversations that a slow disk does not take are limited:
    // each that runs may add one.
    if (Size(running_) + parked_.writing > spec_.sessions.slots) {
      waits_for_disk_ = true;
      return false;
    }
    if (spec_.share) {
      const Found found = Find(prompt);
      const auto more = [&](int than) {
        return than + std::min(spec_.worth, INT_MAX - than);
      };
      // With kOwnPrefix, a request takes nothing from a slot in use.
      const bool waits = !OwnPrefix();
      for (const auto& [number, other] : running_) {
        if (waits && other->part.tokens == 0 &&
            CommonInputs(other->request.prompt, prompt) >= more(found.held)) {
          return false;
        }
      }
      const int wanted = more(found.stored);
      if (parking_) {
        // Only the first request that waits for a file may replace another.
        const Fetched file = parking_->Fetch(prompt, wanted, !waits_for_disk_);
        if (file == Fetched::kReading) waits_for_disk_ = true;
        // A request that has no slot yet might take the one that is loaded.
        if (file == Fetched::kReading ||
            (file == Fetched::kReady && sessions_->Gauges().waiting > 0)) {
          return false;
        }
        lock.unlock();
        Log(parking_->Unpark(*sessions_, cache_, found.unused, prompt, wanted)
                .status());
        lock.lock();
      }
    }
    // Ask has checked the request.
    running_[*sessions_->Submit(prompt, {.keep = job->keep,
                                         .limit = job->request.limit,
                                         .reuse = spec_.share,
                                         .shift = spec_.keep >= 0})] = job;
    return true;
  }

  bool OwnPrefix() const {
    return spec_.sessions.choice == SlotChoice::kOwnPrefix;
  }

  // The prefixes of a prompt that slots have.
  struct Found {
    int held = 0;     // The length of the longest prefix.
    int stored = 0;   // The length of the longest that can be reused.
    int unused = -1;  // The free slot that holds least.
  };
  // Requires: a slot is free.
  Found Find(std::span<const SessionInput> prompt) const {
    Found found;
    std::size_t least = SIZE_MAX;
    for (int i = 0; i < spec_.sessions.slots; ++i) {
      const SlotInfo slot = *sessions_->Slot(i);
      const int common =
          std::min(slot.reusable, CommonInputs(slot.record, prompt));
      found.held = std::max(found.held, common);
      const bool in_use = slot.request >= 0;
      if (common > found.stored && !(in_use && OwnPrefix()) &&
          CanResume(i, std::min(common, Size(prompt) - 1))) {
        found.stored = common;
      }
      if (!in_use && slot.record.size() < least) {
        least = slot.record.size();
        found.unused = i;
      }
    }
    return found;
  }

  // Sessions reuse a prefix only where the cache can resume (Q5).
  bool CanResume(int slot, int position) const {
    const Result<bool> can = cache_.CanResume(slot, position);
    return can.ok() && *can;
  }

  struct Drawn {
    std::int32_t token = 0;
    std::string bytes = {};  // Empty for the token that ends an answer.
  };

  // Draws the next token of a request.
  Result<Drawn> Draw(const Job& job, std::span<const float> logits) const {
    std::string_view called = "sample";
    try {
      Drawn drawn{.token = job.request.sample(logits)};
      if (drawn.token < 0)
        return Invalid("the token {} was drawn", drawn.token);
      called = "bytes";
      if (drawn.token != model_.end) drawn.bytes = model_.bytes(drawn.token);
      return drawn;
    } catch (const std::exception& error) {
      return Untimely("{} failed: {}", called, error.what());
    } catch (...) {
      return Untimely("{} failed", called);
    }
  }

  // Computes a batch, and gives its requests a token each.
  Status Pass(std::unique_lock<std::mutex>& lock) {
    const Result<SessionBatch> batch = sessions_->NextBatch();
    if (!batch.ok()) return batch.status();
    if (batch->inputs.empty()) return {};
    cells_ = CountCells(cache_);
    const auto begin = Clock::now();
    lock.unlock();
    // Only this thread changes the running requests.
    const std::span<const float> logits = model_.forward(cache_, *batch);
    const std::size_t outputs = batch->outputs.size();
    const std::size_t size = outputs == 0 ? 0 : logits.size() / outputs;
    if (size * outputs != logits.size() || (outputs > 0 && size == 0)) {
      return Invalid("the model has {} logits for {} outputs", logits.size(),
                     outputs);
    }
    std::vector<std::pair<int, Result<Drawn>>> drawn;
    for (std::size_t i = 0; i < outputs; ++i) {
      const int number = At(batch->requests, batch->outputs[i]);
      drawn.emplace_back(
          number, Draw(*running_.at(number), logits.subspan(i * size, size)));
    }
    lock.lock();
    forward_ += Clock::now() - begin;
    for (const auto& [number, token] : drawn) Add(number, token);
    return {};
  }

  // Adds a token to an answer, which may end it. An error ends it.
  void Add(int number, const Result<Drawn>& drawn) {
    Job& job = *running_.at(number);
    if (job.part.tokens == 0) {
      const RequestInfo info = *sessions_->Request(number);
      first_token_ += Clock::now() - job.asked;
      job.part.reused = info.reused;
      job.slot = info.slot;
    }
    if (!drawn.ok()) return End(number, Finish::kError, drawn.status());
    ++job.part.tokens;
    ++tokens_;
    if (drawn->token == model_.end) return End(number, Finish::kStop);
    job.part.text += job.shown.Add(drawn->bytes);
    if (job.shown.stopped()) return End(number, Finish::kStop);
    if (*sessions_->Sampled(number, drawn->token) != Ending::kNone) {
      End(number, Finish::kLength);
    }
  }

  // Ends an answer, and lists its slot to be parked if a later prompt may
  // continue the conversation.
  void End(int number, Finish finish, const Status& status = {}) {
    const JobPointer job = running_.at(number);
    // The session has ended an answer that is as long as it may be. The last
    // token of a stop string was not given to it.
    static_cast<void>(sessions_->Finish(
        number, std::max<std::int64_t>(job->shown.removed() - 1, 0)));
    job->part.text += job->shown.End();
    if (parking_ != nullptr && job->slot >= 0 &&
        sessions_->Slot(job->slot)->reusable >= spec_.worth) {
      ended_.push_back(job->slot);
    }
    // If memory runs out above, the answer still runs, and FailAll ends it.
    End(*job, finish, status);
    ended_running_.insert(running_.extract(number));
  }

  // Parks the conversations of the slots that became free. Others do not wait:
  // they have the ends of the answers already.
  void ParkEnded(std::unique_lock<std::mutex>& lock) {
    if (!parking_) return;
    lock.unlock();
    for (const int slot : std::exchange(ended_, {})) {
      Log(parking_->Park(*sessions_, cache_, slot));
    }
    Log(parking_->Wait(/*all=*/false));
    lock.lock();
    parked_ = parking_->Gauges();
  }

  Cache& cache_;  // The thread alone calls it.
  const ServiceSpec spec_;
  const ServiceModel model_;
  // The thread alone uses these.
  const std::unique_ptr<Sessions> sessions_;
  const std::unique_ptr<ParkingLot> parking_;  // Null: nothing is parked.
  std::vector<int> ended_;                     // Slots to be parked.
  bool waits_for_disk_ = false;                // A request does, in this round.
  // Ended requests, which DropEnded destroys without the mutex.
  std::list<JobPointer> ended_waiting_;
  std::map<int, JobPointer> ended_running_;
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();
  // The mutex of the board guards the rest, which the thread alone changes,
  // except that others add to waiting_, requests_ and refused_.
  SessionGauges gauges_;
  ParkingGauges parked_;
  CellGauges cells_;  // When the last batch was planned.
  Status status_;     // Why the service has failed.
  std::list<JobPointer> waiting_;
  std::map<int, JobPointer> running_;  // By number in sessions.
  std::int64_t requests_ = 0, refused_ = 0, cancelled_ = 0, tokens_ = 0;
  std::chrono::duration<double> forward_{}, first_token_{};
  std::jthread thread_;  // Ends first.
};

}  // namespace

Result<std::unique_ptr<Service>> MakeService(Cache& cache,
                                             const ServiceSpec& spec,
                                             ServiceModel model) {
  if (spec.keep < -1) {
    return Invalid("keep is {}, it must be at least -1", spec.keep);
  }
  Status status = AtLeastOne("worth", spec.worth);
  if (status.ok()) status = NotNegative("queue", spec.queue);
  if (!status.ok()) return status;
  if (!model.forward || !model.bytes) {
    return Invalid("the model lacks forward or bytes");
  }
  auto sessions = MakeSessions(cache, spec.sessions);
  if (!sessions.ok()) return sessions.status();
  std::unique_ptr<ParkingLot> parking;
  if (!spec.parking.folder.empty()) {
    auto made = MakeParkingLot(spec.parking);
    if (!made.ok()) return made.status();
    parking = *std::move(made);
  }
  try {
    return std::unique_ptr<Service>(
        std::make_unique<BatchService>(cache, *std::move(sessions), spec,
                                       std::move(model), std::move(parking)));
  } catch (const std::system_error& error) {
    return Untimely("the thread of the service cannot start: {}", error.what());
  }
}

}  // namespace kvtwin
