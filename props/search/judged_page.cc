#include "props/search/judged_page.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/trace/trace.h"
#include "props/base/forwarding_cache.h"
#include "props/page_judge/logging_pool.h"
#include "props/paged/paged_runner.h"
#include "props/report/page.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

// The calls of a run. Where a history loads a state, there are two caches for a
// while, and the calls of the older one count.
struct CallLog {
  std::vector<JudgedCall> calls;
  std::vector<const Cache*> caches;  // Those that exist, the oldest first.
};

// Writes down each call between Init and Close.
class LoggingCache final : public ForwardingCache {
 public:
  LoggingCache(std::unique_ptr<Cache> cache, CallLog& log)
      : ForwardingCache(std::move(cache)), log_(log) {
    if (log_.caches.empty()) log_.calls.clear();
    log_.caches.push_back(this);
  }
  LoggingCache(const LoggingCache&) = delete;
  LoggingCache& operator=(const LoggingCache&) = delete;
  ~LoggingCache() override { std::erase(log_.caches, this); }

  Status Init(const InitArgs& args) override {
    Status status = ForwardingCache::Init(args);
    begun_ = begun_ || status.ok();
    return status;
  }
  void Close() override {
    closed_ = true;
    ForwardingCache::Close();
  }
  Status SetLayer(int layer) override {
    layer_ = layer;
    return ForwardingCache::SetLayer(layer);
  }
  Status SetLayerType(int type) override {
    TraceOp op;
    op.kind = TraceOpKind::kSetLayerType;
    op.type = type;
    return Logged(op, [&] { return ForwardingCache::SetLayerType(type); });
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    TraceOp op;
    op.kind = TraceOpKind::kStartForward;
    op.positions = {batch.positions.begin(), batch.positions.end()};
    op.sequences = {batch.sequences.begin(), batch.sequences.end()};
    op.indices = {batch.multimodal.begin(), batch.multimodal.end()};
    op.parents = {batch.parents.begin(), batch.parents.end()};
    op.reserve = reserve;
    return Logged(
        op, [&] { return ForwardingCache::StartForward(batch, reserve); });
  }
  Status SetCausal(std::span<const int> except) override {
    TraceOp op;
    op.kind = TraceOpKind::kSetCausal;
    op.indices = {except.begin(), except.end()};
    return Logged(op, [&] { return ForwardingCache::SetCausal(except); });
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    TraceOp op;
    op.kind = TraceOpKind::kPut;
    op.layer = layer_;
    op.key = CopyOf(key, key.dtype);
    op.value = CopyOf(value, value.dtype);
    return Logged(op, [&] { return ForwardingCache::Put(key, value); });
  }
  Result<KvView> Get() override {
    TraceOp op;
    op.kind = TraceOpKind::kGet;
    op.layer = layer_;
    return Logged(op, [&] {
      Result<KvView> view = ForwardingCache::Get();
      if (view.ok() && view->mask.data != nullptr) {
        op.first_cell = view->first_cell;
        op.key = CopyOf(view->key, view->key.dtype);
        op.value = CopyOf(view->value, view->value.dtype);
        op.mask = CopyOf(view->mask, view->mask.dtype);
      }
      return view;
    });
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    TraceOp op;
    op.kind = TraceOpKind::kCopyPrefix;
    op.src = src;
    op.dst = dst;
    op.len = len;
    return Logged(op,
                  [&] { return ForwardingCache::CopyPrefix(src, dst, len); });
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    TraceOp op;
    op.kind = TraceOpKind::kCanResume;
    op.seq = seq;
    op.pos = pos;
    return Logged(op, [&] {
      Result<bool> answer = ForwardingCache::CanResume(seq, pos);
      op.answer = answer.ok() && *answer;
      return answer;
    });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    TraceOp op;
    op.kind = TraceOpKind::kRemove;
    op.seq = seq;
    op.begin = begin;
    op.end = end;
    return Logged(op, [&] { return ForwardingCache::Remove(seq, begin, end); });
  }
  Status Commit(int seq, std::span<const int> path) override {
    TraceOp op;
    op.kind = TraceOpKind::kCommit;
    op.seq = seq;
    op.indices = {path.begin(), path.end()};
    return Logged(op, [&] { return ForwardingCache::Commit(seq, path); });
  }
  Status SnapshotTo(CacheState& state) const override {
    const Status status = ForwardingCache::SnapshotTo(state);
    if (status.ok() && !away_) present_ = state;
    return status;
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    restored_ = false;
    return ForwardingCache::SnapshotOf(sequence);
  }
  Status Restore(const CacheState& state) override {
    if (is_first()) {
      away_ = !away_ && state != present_;
      restored_ = true;
    }
    return ForwardingCache::Restore(state);
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    // The restored state is an earlier one, even if it equals the present one.
    if (is_first() && restored_) away_ = true;
    Status status = ForwardingCache::AddSequence(sequence, added);
    Result<CacheState> after = cache_->Snapshot();
    if (is_written() && status.ok() && after.ok()) {
      JudgedCall call{{}, false, HeldCells(*cache_), std::move(*after)};
      log_.calls.push_back(std::move(call));
    }
    return status;
  }
  Status Checkpoint(int seq) override {
    TraceOp op;
    op.kind = TraceOpKind::kCheckpoint;
    op.seq = seq;
    return Logged(op, [&] { return ForwardingCache::Checkpoint(seq); });
  }

 private:
  static const Status& StatusOf(const Status& status) { return status; }
  template <class T>
  static Status StatusOf(const Result<T>& result) {
    return result.status();
  }

  // Makes the call, and writes it down, even if it throws.
  template <class Call>
  auto Logged(TraceOp& op, const Call& call) -> decltype(call()) {
    try {
      auto answer = call();
      Log(op, StatusOf(answer).code());
      return answer;
    } catch (...) {
      Log(op, StatusCode::kFailedPrecondition);
      throw;
    }
  }
  bool is_first() const { return log_.caches.front() == this; }
  bool is_written() const { return begun_ && !closed_ && !away_ && is_first(); }
  void Log(TraceOp& op, StatusCode code) {
    if (!is_written()) return;
    op.result = code;
    log_.calls.push_back({op, code != StatusCode::kOk, HeldCells(*cache_)});
  }

  CallLog& log_;
  // A history that loads a state first goes back to an earlier state, adds a
  // sequence and begins a pass there. Pages do not show these calls, and the
  // next Restore takes them back.
  mutable CacheState present_;
  mutable bool restored_ =
      false;  // Restore was called, and SnapshotOf not since.
  bool away_ = false;
  bool begun_ = false;
  bool closed_ = false;
  int layer_ = 0;
};

}  // namespace

std::optional<JudgedHistory> RunJudged(const History& history,
                                       Subject subject) {
  CallLog log;
  const auto logged = [&](Result<std::unique_ptr<Cache>> cache)
      -> Result<std::unique_ptr<Cache>> {
    if (!cache.ok()) return cache;
    return std::unique_ptr<Cache>(
        std::make_unique<LoggingCache>(std::move(*cache), log));
  };
  if (subject.make_of) {
    subject.make_of = [logged, make = subject.make_of](const Setup& setup) {
      return logged(make(setup));
    };
  } else {
    subject.make = [logged, make = subject.make](const CacheSpec& spec) {
      return logged(make(spec));
    };
  }
  const auto failure = RunHistory(history, subject).failure;
  if (!failure) return std::nullopt;
  JudgedHistory judged;
  judged.failure = Explain(history, *failure, subject, /*drawn=*/true, "");
  judged.calls = {.source = subject.level == Level::kIdentity
                                ? JudgedCalls::Source::kIdentity
                                : JudgedCalls::Source::kLedger,
                  .spec = history.setup.spec,
                  .config = history.setup.config,
                  .init = history.setup.init,
                  .numeric = subject.level == Level::kNumeric,
                  .rules = subject.rules,
                  .strict = subject.mask_rows_too,
                  .calls = std::move(log.calls)};
  return judged;
}

std::optional<JudgedPagedHistory> RunJudged(const PagedHistory& history,
                                            const PagedMaker& make) {
  std::vector<nlohmann::json> calls;
  const auto logged =
      [&](const PagedSpec& spec,
          std::string_view name) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = make(spec, name);
    if (!pool.ok() || name != "optimized") return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<LoggingPool>(std::move(*pool), calls));
  };
  Subject subject = TwinSubject("optimized");
  subject.run_pool = [&](const PagedHistory& one,
                         const PoolRunOptions& options) {
    return RunPaged(one, options.counts, logged);
  };
  const auto failure = RunHistory(history, subject).failure;
  if (!failure) return std::nullopt;
  PagedHistory shortest = history;  // It ends where it fails, as if shrunk.
  shortest.ops.resize(std::min(history.ops.size(), failure->step + 1));
  const Failure explained = Explain(shortest, *failure, subject);
  return JudgedPagedHistory{explained, {.calls = std::move(calls)}};
}

std::optional<PageVerdict> JudgePageOf(const History& history,
                                       const Subject& subject) {
  const auto run = RunJudged(history, subject);
  if (!run) return std::nullopt;
  return JudgePage(PageData(PageHtml(run->failure)), run->calls);
}

std::optional<PageVerdict> JudgePageOf(const PagedHistory& history,
                                       const PagedMaker& make) {
  const auto run = RunJudged(history, make);
  if (!run) return std::nullopt;
  return JudgePoolPage(PageData(PageHtml(run->failure)), run->pool);
}

}  // namespace kvtwin::props
