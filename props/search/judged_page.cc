#include "props/search/judged_page.h"

#include <algorithm>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "core/trace/trace.h"
#include "props/base/forwarding_cache.h"
#include "props/page_judge/pool_page_judge.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_recorder.h"
#include "props/report/page.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

// Writes down each call between Init and Close.
class LoggingCache final : public ForwardingCache {
 public:
  // `alive` counts the caches of a run: where a history loads a state, a new
  // cache continues the log.
  LoggingCache(std::unique_ptr<Cache> cache, std::vector<JudgedCall>& log,
               int& alive)
      : ForwardingCache(std::move(cache)), log_(log), alive_(alive) {
    if (alive_++ == 0) log_.clear();
  }
  LoggingCache(const LoggingCache&) = delete;
  LoggingCache& operator=(const LoggingCache&) = delete;
  ~LoggingCache() override { --alive_; }

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
    return Log(op, ForwardingCache::SetLayerType(type));
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    TraceOp op;
    op.kind = TraceOpKind::kStartForward;
    op.positions = {batch.positions.begin(), batch.positions.end()};
    op.sequences = {batch.sequences.begin(), batch.sequences.end()};
    op.indices = {batch.multimodal.begin(), batch.multimodal.end()};
    op.reserve = reserve;
    return Log(op, ForwardingCache::StartForward(batch, reserve));
  }
  Status SetCausal(std::span<const int> except) override {
    TraceOp op;
    op.kind = TraceOpKind::kSetCausal;
    op.indices = {except.begin(), except.end()};
    return Log(op, ForwardingCache::SetCausal(except));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    TraceOp op;
    op.kind = TraceOpKind::kPut;
    op.layer = layer_;
    op.key = CopyOf(key, key.dtype);
    op.value = CopyOf(value, value.dtype);
    return Log(op, ForwardingCache::Put(key, value));
  }
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    TraceOp op;
    op.kind = TraceOpKind::kGet;
    op.layer = layer_;
    if (view.ok() && view->mask.data != nullptr) {
      op.first_cell = view->first_cell;
      op.key = CopyOf(view->key, view->key.dtype);
      op.value = CopyOf(view->value, view->value.dtype);
      op.mask = CopyOf(view->mask, view->mask.dtype);
    }
    (void)Log(op, view.status());
    return view;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    TraceOp op;
    op.kind = TraceOpKind::kCopyPrefix;
    op.src = src;
    op.dst = dst;
    op.len = len;
    try {
      return Log(op, ForwardingCache::CopyPrefix(src, dst, len));
    } catch (...) {
      (void)Log(op, {StatusCode::kFailedPrecondition, "it threw"});
      throw;
    }
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    TraceOp op;
    op.kind = TraceOpKind::kCanResume;
    op.seq = seq;
    op.pos = pos;
    Result<bool> answer = ForwardingCache::CanResume(seq, pos);
    op.answer = answer.ok() && *answer;
    (void)Log(op, answer.status());
    return answer;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    TraceOp op;
    op.kind = TraceOpKind::kRemove;
    op.seq = seq;
    op.begin = begin;
    op.end = end;
    return Log(op, ForwardingCache::Remove(seq, begin, end));
  }

 private:
  Status Log(TraceOp op, Status status) {
    if (!begun_ || closed_) return status;
    op.result = status.code();
    log_.push_back({std::move(op), !status.ok(), HeldCells(*cache_)});
    return status;
  }

  std::vector<JudgedCall>& log_;
  int& alive_;
  bool begun_ = false;
  bool closed_ = false;
  int layer_ = 0;
};

}  // namespace

std::optional<JudgedHistory> RunJudged(const History& history,
                                       Subject subject) {
  std::vector<JudgedCall> log;
  int alive = 0;
  const auto logged = [&](Result<std::unique_ptr<Cache>> cache)
      -> Result<std::unique_ptr<Cache>> {
    if (!cache.ok()) return cache;
    return std::unique_ptr<Cache>(
        std::make_unique<LoggingCache>(std::move(*cache), log, alive));
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
                  .calls = std::move(log)};
  return judged;
}

std::optional<PageVerdict> JudgePageOf(const History& history,
                                       const Subject& subject) {
  const auto run = RunJudged(history, subject);
  if (!run) return std::nullopt;
  return JudgePage(PageData(PageHtml(run->failure)), run->calls);
}

std::optional<PageVerdict> JudgePageOf(const PagedHistory& history,
                                       const PagedMaker& make) {
  std::ostringstream recording;
  const auto recorded =
      [&](const PagedSpec& spec,
          std::string_view name) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = make(spec, name);
    if (!pool.ok() || name != "optimized") return pool;
    recording.str("");
    return std::unique_ptr<PagedPool>(std::make_unique<PoolRecorder>(
        std::move(*pool), "the pool under test", recording));
  };
  Subject subject = TwinSubject("optimized");
  subject.run_pool = [&](const PagedHistory& one,
                         const PoolRunOptions& options) {
    return RunPaged(one, options.counts, recorded);
  };
  const auto failure = RunHistory(history, subject).failure;
  if (!failure) return std::nullopt;
  PagedHistory shortest = history;  // It ends where it fails, as if shrunk.
  shortest.ops.resize(std::min(history.ops.size(), failure->step + 1));
  const Failure explained = Explain(shortest, *failure, subject);
  return JudgePoolPage(PageData(PageHtml(explained)),
                       {.recording = recording.str(), .is_history = true});
}

}  // namespace kvtwin::props
