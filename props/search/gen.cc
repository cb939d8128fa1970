#include "props/search/gen.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>

#include "core/index.h"
#include "core/trace/trace.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/runner.h"
#include "props/history/generate.h"
#include "props/history/speculate.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsInRecording = 40;
// Returns the number up to which all integers are exact in the dtype. (Block
// dtypes keep only the largest of a block exact.)
std::int64_t LastNumber(DType dtype) {
  if (dtype == DType::kF8) return 16;
  return dtype == DType::kBF16 ? 256 : 2048;
}

// Returns the oldest version of the format that has the calls of a history.
int VersionOf(const History& history) {
  int version = 1;
  for (const Op& op : history.ops) {
    const bool drafts = std::ranges::any_of(
        op.segments, [](auto& segment) { return !segment.parents.empty(); });
    if (drafts || op.kind == OpKind::kCommit) version = std::max(version, 3);
    if (op.kind == OpKind::kPin) version = 4;
  }
  return version;
}

TraceHeader HeaderOf(const History& history) {
  const Setup& setup = history.setup;
  return {.version = VersionOf(history),
          .producer = "kvtwin gen",
          .visibility_only = false,
          .spec = setup.spec,
          .config = setup.config,
          .init = setup.init,
          .layers = setup.layers,
          .rows = setup.rows};
}

// Writes the calls that a recording may have. The caller gets the answers of a
// twin; they are not written.
class CallWriter : public ForwardingCache {
 public:
  CallWriter(std::unique_ptr<Cache> cache, const History& history,
             std::ostream& out, std::int64_t& calls)
      : ForwardingCache(std::move(cache)),
        history_(history),
        out_(out),
        calls_(calls) {}

  Status Init(const InitArgs& args) override {
    Status status = ForwardingCache::Init(args);
    if (status.ok()) WriteHeader();
    return status;
  }
  Status SetLayer(int layer) override {
    layer_ = layer;
    return ForwardingCache::SetLayer(layer);
  }
  Status SetLayerType(int type) override {
    Status status = ForwardingCache::SetLayerType(type);
    if (status.ok()) type_ = type;
    return status;
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = ForwardingCache::StartForward(batch, reserve);
    if (!status.ok() && status.code() != StatusCode::kCacheFull) return status;
    TraceOp op = Call(TraceOpKind::kStartForward);
    op.positions.assign(batch.positions.begin(), batch.positions.end());
    op.sequences.assign(batch.sequences.begin(), batch.sequences.end());
    op.indices.assign(batch.multimodal.begin(), batch.multimodal.end());
    op.parents.assign(batch.parents.begin(), batch.parents.end());
    op.reserve = reserve;
    Write(op);
    positions_ = op.positions;
    reserving_ = reserve;
    if (status.ok()) type_ = written_type_ = 0;
    return status;
  }
  Status SetCausal(std::span<const int> except) override {
    Status status = ForwardingCache::SetCausal(except);
    TraceOp op = Call(TraceOpKind::kSetCausal);
    op.indices.assign(except.begin(), except.end());
    if (status.ok()) WriteToActive(op);
    return status;
  }
  // The written rows have numbers that identify them: the caller's rows may
  // have values that JSON cannot express.
  Status Put(const TensorView& key, const TensorView& value) override {
    Status status = ForwardingCache::Put(key, value);
    if (!status.ok()) return status;
    TraceOp op = Call(TraceOpKind::kPut);
    op.key = FilledTensor(DType::kF32, key.shape, 0);
    op.value = FilledTensor(DType::kF32, value.shape, 0);
    for (std::int64_t i = 0; i < key.shape[2]; ++i, ++rows_) {
      const Setup& setup = history_.setup;
      // With number + position, the shift `add` never turns the K row of a
      // token into that of another token.
      const std::int64_t position = At(positions_, i);
      const CacheSpec& spec =
          setup.spec.caches.empty() ? setup.spec : At(setup.spec.caches, type_);
      const bool adds = spec.shift.kind == ShiftKind::kAdd;
      FillRow(op.key, i, adds ? rows_ + position : rows_, position,
              LastNumber(setup.init.dtype));
      FillRow(*op.value, i, rows_, rows_, LastNumber(setup.v_dtype()));
    }
    WriteToActive(op);
    return status;
  }
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    if (!view.ok() || (reserving_ && view->mask.data == nullptr)) return view;
    WriteToActive(
        Call(reserving_ ? TraceOpKind::kReservedMask : TraceOpKind::kGet));
    return view;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = ForwardingCache::CopyPrefix(src, dst, len);
    TraceOp op = Call(TraceOpKind::kCopyPrefix);
    op.src = src;
    op.dst = dst;
    op.len = len;
    if (status.ok()) Write(op);
    return status;
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    Result<bool> answer = ForwardingCache::CanResume(seq, pos);
    TraceOp op = Call(TraceOpKind::kCanResume);
    op.seq = seq;
    op.pos = pos;
    if (answer.ok()) Write(op);
    return answer;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    Status status = ForwardingCache::Remove(seq, begin, end);
    TraceOp op = Call(TraceOpKind::kRemove);
    op.seq = seq;
    op.begin = begin;
    op.end = end;
    if (status.code() != StatusCode::kInvalidArgument &&
        status.code() != StatusCode::kFailedPrecondition) {
      Write(op);
    }
    return status;
  }
  Status Commit(int seq, std::span<const int> path) override {
    Status status = ForwardingCache::Commit(seq, path);
    TraceOp op = Call(TraceOpKind::kCommit);
    op.seq = seq;
    op.indices.assign(path.begin(), path.end());
    if (status.ok()) Write(op);
    return status;
  }
  Status Checkpoint(int seq) override {
    Status status = ForwardingCache::Checkpoint(seq);
    TraceOp op = Call(TraceOpKind::kCheckpoint);
    op.seq = seq;
    if (status.ok()) Write(op);
    return status;
  }
  Result<bool> EncoderCached() override {
    Result<bool> answer = ForwardingCache::EncoderCached();
    if (answer.ok()) WriteToActive(Call(TraceOpKind::kEncoderCached));
    return answer;
  }

 private:
  TraceOp Call(TraceOpKind kind) const {
    TraceOp op;
    op.kind = kind;
    op.layer = layer_;
    return op;
  }

  // Fills each head of a row with `first`, then `rest`.
  static void FillRow(DenseTensor& rows, std::int64_t row, std::int64_t first,
                      std::int64_t rest, std::int64_t last) {
    auto* elements = reinterpret_cast<float*>(rows.bytes.data());
    for (std::int64_t j = 0; j < rows.shape[1]; ++j) {
      for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        const std::int64_t number = i == 0 ? first : rest;
        elements[(row * rows.shape[1] + j) * rows.shape[0] + i] =
            static_cast<float>(number % last);
      }
    }
  }

  void WriteHeader() {
    std::ostringstream line;
    if (!WriteTraceHeader(HeaderOf(history_), line).ok()) return;
    auto json = nlohmann::ordered_json::parse(line.str());
    json["history"] = ToText(history_);
    out_ << json.dump() << '\n';
  }

  // Writes a call to the active cache of a wrapper, after a set_layer_type if
  // another cache is active in the recording.
  void WriteToActive(const TraceOp& op) {
    if (type_ != written_type_) {
      TraceOp set = Call(TraceOpKind::kSetLayerType);
      set.type = written_type_ = type_;
      Write(set);
    }
    Write(op);
  }

  void Write(const TraceOp& op) {
    std::ostringstream line;
    if (!WriteTraceOp(op, line).ok()) return;
    out_ << CallLine(line.str()) << '\n';
    ++calls_;
  }

  const History& history_;
  std::ostream& out_;
  std::int64_t& calls_;
  int layer_ = 0;
  int type_ = 0;
  int written_type_ = 0;
  bool reserving_ = false;
  std::vector<std::int32_t> positions_;  // Positions of the pass.
  std::int64_t rows_ = 1;                // The number of the next row.
};

// Changes the dtype of K and V in all groups.
void SetDType(DType dtype, PagedSpec& spec) {
  for (PagedSpec& group : spec.groups) SetDType(dtype, group);
  const auto set = [&](int& head_dim, DType before) {
    if (IsBlockDType(before)) head_dim /= AsInt(kBlockElements);
    if (IsBlockDType(dtype)) head_dim *= kBlockElements;
  };
  set(spec.k_head_dim, spec.dtype);
  set(spec.v_head_dim, spec.v_dtype.value_or(spec.dtype));
  spec.dtype = dtype;
  spec.v_dtype.reset();
}

// Returns the history without the operations that the limits leave out.
PagedHistory Limited(PagedHistory history, const PoolLimits& limits) {
  std::erase_if(history.ops, [&](const PagedOp& op) {
    return (limits.fork && op.kind == PagedOpKind::kFork) ||
           (limits.truncate && op.kind == PagedOpKind::kTruncate) ||
           (limits.commit_unknown && op.kind == PagedOpKind::kCommitUnknown) ||
           (limits.media && op.kind == PagedOpKind::kMedia);
  });
  for (PagedOp& op : history.ops) {  // Any operation may open one.
    // From 2 * kSeenMedia on, the prompt may have other media.
    const bool others = op.c >= 2 * kSeenMedia;
    if (others && (limits.media || limits.keys)) op.c = kSeenMedia;
    while (limits.keys && DrawPrompt(op, {}).key != PrefixKey()) ++op.c;
  }
  if (limits.dtype) SetDType(*limits.dtype, history.spec);
  return history;
}

}  // namespace

std::string CallLine(const std::string& line) {
  auto json = nlohmann::ordered_json::parse(line);
  for (const char* answer : {"result", "cells", "first_cell", "mask"}) {
    json.erase(answer);
  }
  const std::string op = json.value("op", "");
  if (op == "get") {
    json.erase("key");
    json.erase("value");
  }
  if (op == "reserved_mask") json.erase("shape");
  if (op == "attend") json.erase("out");
  if (op == "find_prefix") json.erase("len");
  return json.dump();
}

Result<std::int64_t> WriteCalls(History history, std::ostream& out) {
  std::erase_if(history.ops, [](const Op& op) {
    return op.kind == OpKind::kMisuse || op.kind == OpKind::kPoison ||
           op.kind == OpKind::kReload || op.kind == OpKind::kFind;
  });
  // A recording has only one placement.
  for (CacheSpec& part : history.setup.spec.caches) {
    part.placement = history.setup.spec.placement;
  }
  std::ostringstream header;
  if (Status status = WriteTraceHeader(HeaderOf(history), header);
      !status.ok()) {
    return status;
  }
  std::int64_t calls = 0;
  const Subject writer = {
      .name = "writer",
      .make = [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        auto cache = MakeCache(spec);
        if (!cache.ok()) return cache.status();
        return std::unique_ptr<Cache>(std::make_unique<CallWriter>(
            std::move(*cache), history, out, calls));
      }};
  if (!RunHistory(history, writer).ran) {
    return NoCache(history.setup, TwinSubject("optimized"));
  }
  return calls;
}

namespace {

// Without drafts, a history has no pins either.
History HistoryOf(const GenOptions& options, std::uint64_t number) {
  if (options.speculate) {
    return MakeSpeculation(options.seed, number, options.kind, kOpsInRecording,
                           /*cells_max=*/0);
  }
  History history =
      MakeHistory(options.seed, number, options.kind, kOpsInRecording);
  std::erase_if(history.ops,
                [](const Op& op) { return op.kind == OpKind::kPin; });
  return history;
}

}  // namespace

Status Generate(const GenOptions& options, std::ostream& out) {
  std::int64_t calls = 0;
  std::int64_t histories = 0;
  const auto done = [&] {
    return options.operations > 0 ? calls >= options.operations
                                  : histories >= options.histories;
  };
  for (std::uint64_t number = 0; !done() && out; ++number) {
    const Result<std::int64_t> written =
        options.paged || options.groups
            ? WritePagedRecording(
                  Limited(options.groups
                              ? MakeGroupsHistory(options.seed, number)
                              : MakePagedHistory(options.seed, number),
                          options.limits),
                  "reference", out)
            : WriteCalls(HistoryOf(options, number), out);
    // Some setups with drafts are refused: another history takes their place.
    if (!written.ok() && !options.paged && !options.groups) continue;
    if (!written.ok()) return written.status();
    calls += *written;
    if (*written > 0) ++histories;
  }
  return {};
}

}  // namespace kvtwin::props
