#include "props/backend/backend_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "core/refusals.h"
#include "kvtwin/save.h"
#include "props/base/check_name.h"
#include "props/base/optional_calls.h"
#include "props/compare/failure.h"

namespace kvtwin::props {
namespace {

// Views of histories are smaller than these limits.
constexpr std::int64_t kColumnsMax = 1 << 22;
constexpr std::int64_t kViewBytesMax = std::int64_t{1} << 30;
// The columns of a view before `get` sets them.
constexpr std::int32_t kColumnsBefore = -1;

[[noreturn]] void ThrowWrong(CheckName check, std::string text) {
  throw MakeFailure(check, std::move(text));
}

// Converts the parameters of a cache, perhaps one of a wrapper's, to C.
kvtwin_cache_params ToC(const CacheSpec& spec, const CacheConfig& config,
                        const InitArgs& init) {
  std::vector<kvtwin_cache_params> caches;
  kvtwin_cache_params params = CCacheParams({spec, config, init}, caches);
  params.v_dtype =
      static_cast<kvtwin_dtype>(config.v_dtype.value_or(init.dtype));
  return params;
}

// Tells the MemoryWatch that a call of the backend runs, while it exists.
class Watched {
 public:
  Watched(MemoryWatch* watch, const char* function) : watch_(watch) {
    if (watch_ != nullptr) watch_->Enter(function);
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() {
    if (watch_ != nullptr) watch_->Leave();
  }

 private:
  MemoryWatch* watch_;
};

class BackendCache final : public Cache,
                           public Shifting,
                           public Attending,
                           public PrefixFinding {
 public:
  // `padded`: the expected mask has padding rows.
  BackendCache(const kvtwin_backend_v1& table, const Setup& setup,
               std::vector<float> sinks, bool padded, MemoryWatch* watch)
      : table_(table),
        setup_(setup),
        sinks_(std::move(sinks)),
        padded_(padded),
        watch_(watch) {}
  BackendCache(const BackendCache&) = delete;
  BackendCache& operator=(const BackendCache&) = delete;
  ~BackendCache() override {
    try {
      Close();
    } catch (const Failure&) {  // Another failure is reported already.
    }
  }

  Status SetConfig(const CacheConfig& config) override {
    if (configured_ || open_) return Untimely("SetConfig comes too late");
    if (std::min(config.cache_padding, config.mask_batch_padding) < 1) {
      return Invalid("a padding is below 1");  // The table has no SetConfig.
    }
    config_ = config;
    configured_ = true;
    return {};
  }

  Status Init(const InitArgs& args) override {
    if (open_) return Untimely("Init is called a second time");
    std::vector<kvtwin_cache_params> parts;
    for (const CacheSpec& part : setup_.spec.caches) {
      parts.push_back(ToC(part, config_, args));
    }
    kvtwin_cache_params params = ToC(setup_.spec, config_, args);
    params.caches = parts.empty() ? nullptr : parts.data();
    params.cache_count = static_cast<std::int32_t>(parts.size());
    const kvtwin_setup_v1 setup = {
        .size = sizeof(setup),
        .cache = &params,
        .layers = setup_.layers,
        .kv_heads = setup_.rows.kv_heads,
        .k_head_dim = setup_.rows.k_head_dim,
        .v_head_dim = setup_.rows.v_head_dim,
        .soft_cap = static_cast<float>(setup_.soft_cap),
        .sinks = sinks_.empty() ? nullptr : sinks_.data(),
        .sink_count = static_cast<std::int32_t>(sinks_.size())};
    void* cache = nullptr;
    const Status status =
        Call("init", [&] { return table_.init(&setup, &cache); });
    if (!status.ok()) return status;
    cache_ = cache;
    open_ = true;
    return {};
  }

  void Close() override {
    if (!std::exchange(open_, false)) return;
    (void)Call("close", [&] {
      table_.close(cache_);
      return 0;
    });
  }

  Status SetLayer(int layer) override {
    if (layer < 0) {  // The table has no set_layer: get must refuse it.
      if (table_.get == nullptr) return Invalid("layer {}", layer);
      kvtwin_view view = {};
      view.size = sizeof(view);
      return Call("get", [&] { return table_.get(cache_, layer, &view); });
    }
    layer_ = layer;
    return {};
  }

  Status StartForward(const Batch& batch, bool reserve) override {
    // The batch in C has one count for all three lists.
    const auto parents = batch.parents.size();
    if (batch.positions.size() != batch.sequences.size() ||
        (parents != 0 && parents != batch.positions.size())) {
      return Invalid("{} positions, {} sequences, {} parents",
                     batch.positions.size(), batch.sequences.size(), parents);
    }
    const kvtwin_batch c = {
        .size = sizeof(c),
        .positions = lender_.Lend("positions", batch.positions),
        .sequences = lender_.Lend("sequences", batch.sequences),
        .tokens = static_cast<std::int32_t>(batch.positions.size()),
        .multimodal = lender_.Lend("multimodal", batch.multimodal),
        .multimodal_count = static_cast<std::int32_t>(batch.multimodal.size()),
        .parents =
            parents == 0 ? nullptr : lender_.Lend("parents", batch.parents)};
    Status status = Call("start_forward", [&] {
      return table_.start_forward(cache_, &c, reserve ? 1 : 0);
    });
    if (status.ok()) {
      tokens_ = c.tokens;
      reserves_ = reserve;
      type_ = 0;
    }
    ReadCells();
    return status;
  }

  Status SetCausal(std::span<const int> except) override {
    if (table_.set_causal == nullptr) return Missing("set_causal");
    const int* lent = lender_.Lend("except", except);
    return Call("set_causal", [&] {
      return table_.set_causal(cache_, lent,
                               static_cast<std::int32_t>(except.size()));
    });
  }

  Status Put(const TensorView& key, const TensorView& value) override {
    // The memory of a misused tensor may be smaller than its shape.
    const bool right = IsRight(key, setup_.rows.k_head_dim) &&
                       IsRight(value, setup_.rows.v_head_dim);
    const kvtwin_tensor k = right ? lender_.Lend("key", key) : CTensor(key);
    const kvtwin_tensor v =
        right ? lender_.Lend("value", value) : CTensor(value);
    Status status =
        Call("put", [&] { return table_.put(cache_, layer_, &k, &v); });
    if (!status.ok()) return status;
    const bool permuted =
        config_.v_layout == VLayout::kPermuted && EncoderIsActive();
    // A reserving pass replaces no storage (S20). After a restore, the storage
    // is not known.
    const std::pair place = {type_, layer_};
    if (reserves_ && (restored_ || put_.contains(place))) return status;
    put_[place] = {key, permuted ? PermutedView(value) : value};
    return status;
  }

  Result<KvView> Get() override;
  Status Attend(const TensorView& query, std::span<float> out) override;

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    if (table_.copy_prefix == nullptr) return Missing("copy_prefix");
    return Call("copy_prefix",
                [&] { return table_.copy_prefix(cache_, src, dst, len); });
  }

  Result<bool> CanResume(int seq, std::int32_t pos) override {
    if (table_.can_resume == nullptr) return Missing("can_resume");
    std::int32_t yes = -1;
    const Status status = Call("can_resume", [&] {
      return table_.can_resume(cache_, seq, pos, &yes);
    });
    if (!status.ok()) return status;
    if (yes != 0 && yes != 1) {
      ThrowWrong("backend: garbage",
                 fmt::format("can_resume says {}, neither 0 nor 1", yes));
    }
    return yes == 1;
  }

  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    if (table_.remove == nullptr) return Missing("remove");
    return Call("remove",
                [&] { return table_.remove(cache_, seq, begin, end); });
  }

  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) override {
    if (table_.shift == nullptr) return Missing("shift");
    return Call("shift",
                [&] { return table_.shift(cache_, seq, begin, end, delta); });
  }

  Status Commit(int seq, std::span<const int> path) override {
    if (table_.commit == nullptr) return Missing("commit");
    const int* lent = lender_.Lend("path", path);
    return Call("commit", [&] {
      return table_.commit(cache_, seq, lent,
                           static_cast<std::int32_t>(path.size()));
    });
  }

  Status Checkpoint(int seq) override {
    if (table_.checkpoint == nullptr) return Missing("checkpoint");
    return Call("checkpoint", [&] { return table_.checkpoint(cache_, seq); });
  }

  Result<std::int32_t> FindPrefix(
      int seq, std::span<const std::int32_t> tokens) override {
    if (table_.find_prefix == nullptr) return Missing("find_prefix");
    std::int32_t length = -1;
    const std::int32_t* lent = lender_.Lend("tokens", tokens);
    const Status status = Call("find_prefix", [&] {
      return table_.find_prefix(
          cache_, seq, lent, static_cast<std::int32_t>(tokens.size()), &length);
    });
    if (!status.ok()) return status;
    return length;
  }

  Status SetLayerType(int type) override {
    if (table_.set_layer_type == nullptr) return Missing("set_layer_type");
    Status status = Call("set_layer_type",
                         [&] { return table_.set_layer_type(cache_, type); });
    if (status.ok()) type_ = type;
    ReadCells();
    return status;
  }

  Cache* UnderlyingCache() override { return this; }

  Result<bool> EncoderCached() override {
    if (table_.encoder_cached == nullptr) return Missing("encoder_cached");
    std::int32_t yes = 0;
    const Status status = Call(
        "encoder_cached", [&] { return table_.encoder_cached(cache_, &yes); });
    if (!status.ok()) return status;
    return yes != 0;
  }

  Status SnapshotTo(CacheState& state) const override {
    Result<CacheState> read = ReadState(-1);
    if (read.ok()) state = std::move(*read);
    return read.status();
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    if (sequence < 0) return NotNegative("sequence", sequence);
    return ReadState(sequence);
  }
  Status Restore(const CacheState& state) override {
    Status status = WriteState(-1, state);
    if (!status.ok()) return status;
    type_ = layer_ = tokens_ = 0;
    put_.clear();
    restored_ = true;
    return status;
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    if (sequence < 0) return NotNegative("sequence", sequence);
    return WriteState(sequence, added);
  }

  int CellCount() const override {
    ReadCells();
    return total_;
  }
  std::span<const int> BatchCells() const override { return batch_cells_; }
  void ListCells(std::vector<CellEntry>& out) const override {
    ReadCells();
    out.clear();
    for (const kvtwin_cell& cell : cells_) {
      out.push_back({cell.cell, cell.position, cell.sequence});
    }
  }

 private:
  struct LastPut {
    TensorView key;
    TensorView value;
  };

  // Makes a call of the backend. Throws a Failure if the call damages memory or
  // returns an invalid status or an internal error.
  template <class Fn>
  Status Call(const char* function, const Fn& fn) const {
    int code = KVTWIN_OK;
    {
      const Watched watched(watch_, function);
      code = fn();
    }
    CheckMemory(function, watch_, lender_);
    if (code == KVTWIN_OK) return {};
    if (code > KVTWIN_SHARED_CELLS || code < KVTWIN_DEVICE_ERROR) {
      ThrowWrong("backend: garbage",
                 fmt::format("{} answers {}, which is not a kvtwin_status",
                             function, code));
    }
    const char* said = "without a message";
    if (table_.message != nullptr && open_) said = table_.message(cache_);
    const std::string message = PrintableLines(said == nullptr ? "" : said);
    if (code < KVTWIN_FAILED_PRECONDITION) {
      Failure failure = MakeFailure(
          "backend: error",
          fmt::format("{} answers {}: {}", function, ErrorName(code), message));
      failure.function = function;
      throw failure;
    }
    return {StatusFromC(code), message};
  }

  // Whether the rows have the shape of the batch's rows.
  bool IsRight(const TensorView& rows, int head_dim) const {
    return rows.data != nullptr &&
           rows.shape == Shape{head_dim, setup_.rows.kv_heads, tokens_, 1};
  }

  static Status Missing(std::string_view function) {
    return {StatusCode::kNotSupported,
            fmt::format("the backend has no {}", function)};
  }

  void ReadCells() const;
  Result<CacheState> ReadState(int sequence) const;
  Status WriteState(int sequence, const CacheState& state);
  TensorView ToView(const char* what, const kvtwin_tensor& tensor,
                    DType dtype) const;
  void ReadAll(const char* what, const TensorView& view,
               std::int64_t extent) const;
  void FillColumns(kvtwin_view& view) const;
  bool EncoderIsActive() const {
    const auto& caches = setup_.spec.caches;
    const auto type = AsSize(type_);
    return (type < caches.size() ? caches[type] : setup_.spec).kind ==
           Kind::kEncoder;
  }

  const kvtwin_backend_v1 table_;
  const Setup setup_;
  const std::vector<float> sinks_;  // For each query head, or empty.
  const bool padded_;
  MemoryWatch* watch_;
  mutable Lender lender_;
  CacheConfig config_;
  void* cache_ = nullptr;
  bool configured_ = false;
  bool open_ = false;
  int layer_ = 0;
  int type_ = 0;
  std::int32_t tokens_ = 0;  // Tokens of the pass.
  bool restored_ = false;
  bool reserves_ = false;                       // The pass stores nothing.
  std::map<std::pair<int, int>, LastPut> put_;  // By type and layer.

  mutable std::vector<kvtwin_cell> cells_;
  mutable std::vector<int> batch_cells_;
  mutable std::int32_t total_ = 0;
};

void BackendCache::ReadCells() const {
  if (table_.cells == nullptr || !open_) return;
  std::size_t count = 0;
  std::size_t batch = 0;
  for (int i = 0; i < 3; ++i) {
    const Status status = Call("cells", [&] {
      return table_.cells(cache_, cells_.data(), cells_.size(), &count,
                          batch_cells_.data(), batch_cells_.size(), &batch,
                          &total_);
    });
    const auto max = AsSize(kColumnsMax);
    if (!status.ok() || count > max || batch > max) {
      ThrowWrong(
          "backend: garbage",
          fmt::format("cells answers {}, with {} memberships and {} cells of "
                      "the batch",
                      status.ToString(), count, batch));
    }
    const bool fits = count <= cells_.size() && batch <= batch_cells_.size();
    cells_.resize(count);
    batch_cells_.resize(batch);
    if (fits) return;
  }
  ThrowWrong("backend: garbage", "cells gives a different count each time");
}

Result<CacheState> BackendCache::ReadState(int sequence) const {
  if (table_.snapshot == nullptr) return Missing("snapshot");
  const void* bytes = nullptr;
  std::size_t count = 0;
  const Status status = Call("snapshot", [&] {
    return table_.snapshot(cache_, sequence, &bytes, &count);
  });
  if (!status.ok()) return status;
  Result<CacheState> state =
      StateFromBytes({static_cast<const std::byte*>(bytes), count});
  if (!state.ok()) {
    ThrowWrong(
        "backend: garbage",
        fmt::format("snapshot returns bytes that are not a state (S56): {}",
                    state.status().message()));
  }
  return state;
}

Status BackendCache::WriteState(int sequence, const CacheState& state) {
  if (table_.restore == nullptr) return Missing("restore");
  const std::vector<std::byte> bytes = StateToBytes(state);
  return Call("restore", [&] {
    return table_.restore(cache_, sequence, bytes.data(), bytes.size());
  });
}

DType RowDTypeOf(const char* what, const kvtwin_tensor& tensor) {
  if (tensor.dtype < KVTWIN_F32 || tensor.dtype > KVTWIN_Q4_0) {
    ThrowWrong("backend: garbage", fmt::format("get: {} has the dtype {}", what,
                                               AsInt(tensor.dtype)));
  }
  return static_cast<DType>(tensor.dtype);
}

// Returns the number of bytes from the first to past the last element.
std::int64_t ExtentOf(const TensorView& view) {
  std::int64_t extent =
      view.stride[0] == 0
          ? RunBytes(view.dtype, view.shape[0])
          : view.stride[0] * (view.shape[0] - 1) +
                std::max<std::int64_t>(1, RunBytes(view.dtype, 1));
  for (std::size_t i = 1; i < 4; ++i) {
    extent += view.stride[i] * (view.shape[i] - 1);
  }
  return extent;
}

// Returns a tensor that `get` returned as a view. Throws a Failure if its
// dtype, shape, strides or memory are invalid. `what` names it in the message.
TensorView BackendCache::ToView(const char* what, const kvtwin_tensor& tensor,
                                DType dtype) const {
  const auto garbage = [&](const std::string& text) {
    ThrowWrong("backend: garbage", fmt::format("get: {} {}", what, text));
  };
  if (tensor.dtype != static_cast<kvtwin_dtype>(dtype)) {
    garbage(fmt::format("has the dtype {}, expected is {}", AsInt(tensor.dtype),
                        DTypeName(dtype)));
  }
  Shape shape;
  std::ranges::copy(tensor.shape, shape.begin());
  double bytes = 4;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || extent > kColumnsMax) {
      garbage(fmt::format("has the shape {}", ShapeText(shape)));
    }
    bytes *= static_cast<double>(extent);
  }
  if (bytes > static_cast<double>(kViewBytesMax)) {
    garbage(fmt::format("has the shape {}", ShapeText(shape)));
  }
  TensorView view = DenseView(tensor.data, dtype, shape);
  if (std::ranges::any_of(tensor.stride, [](auto s) { return s != 0; })) {
    std::ranges::copy(tensor.stride, view.stride.begin());
  }
  if (view.elements() == 0) return view;
  if (view.data == nullptr) garbage("is NULL");
  for (const std::int64_t stride : view.stride) {
    if (stride < 0 || stride > kViewBytesMax) {
      garbage(fmt::format("has a stride of {}", stride));
    }
  }
  const std::int64_t extent = ExtentOf(view);
  if (extent > kViewBytesMax) garbage(fmt::format("needs {} bytes", extent));
  if (watch_ != nullptr) ReadAll(what, view, extent);
  return view;
}

// Reads the memory of a view now, so that a crash here is the backend's.
void BackendCache::ReadAll(const char* what, const TensorView& view,
                           std::int64_t extent) const {
  const auto room = watch_->BytesFrom(view.data);
  if (room && static_cast<std::int64_t>(*room) < extent) {
    ThrowWrong("backend: out of bounds",
               fmt::format("get: {} of shape {} needs {} bytes, but what was "
                           "allocated there ends after {}",
                           what, ShapeText(view.shape), extent, *room));
  }
  const Watched watched(watch_, "get (reading what it returned)");
  const auto* bytes = static_cast<const volatile char*>(view.data);
  for (std::int64_t at = 0; at < extent; at += 1024) {
    static_cast<void>(bytes[at]);
  }
  static_cast<void>(bytes[extent - 1]);
}

// Sets the number of columns in the shapes that `get` left as they were.
void BackendCache::FillColumns(kvtwin_view& view) const {
  if (view.columns == kColumnsBefore) {
    ThrowWrong("backend: garbage",
               fmt::format("get: columns was not set: it is {}, as before the "
                           "call",
                           view.columns));
  }
  if (view.columns < 0 || view.columns > kColumnsMax) {
    ThrowWrong("backend: garbage",
               fmt::format("get: {} columns", view.columns));
  }
  const std::int64_t columns = view.columns;
  if (config_.v_layout == VLayout::kTiled && columns % kTileCells != 0) {
    ThrowWrong(
        "backend: garbage",
        fmt::format("get: {} columns, of tiles of {}", columns, kTileCells));
  }
  if (view.key.shape[2] == 0) view.key.shape[2] = columns;
  if (view.mask.shape[0] == 0) view.mask.shape[0] = columns;
  if (view.value.shape[2] != 0) return;
  const std::int64_t dim = setup_.rows.v_head_dim;
  const std::int64_t heads = setup_.rows.kv_heads;
  std::array<std::int64_t, 4> shape = {dim, heads, columns, 1};
  if (config_.v_layout == VLayout::kPermuted) {
    shape = {columns, dim, heads, 1};
  } else if (config_.v_layout == VLayout::kTiled) {
    shape = {kTileCells, dim, heads, columns / kTileCells};
  }
  std::ranges::copy(shape, view.value.shape);
}

Status BackendCache::Attend(const TensorView& query, std::span<float> out) {
  if (table_.attend == nullptr) return Missing("attend");
  const kvtwin_tensor asked = lender_.Lend("query", query);
  return CallAttend(out, [&](float* to) {
    return Call("attend",
                [&] { return table_.attend(cache_, layer_, &asked, to); });
  });
}

Result<KvView> BackendCache::Get() {
  if (table_.get == nullptr) return Missing("get");
  const auto put = put_.find({type_, layer_});
  const bool encoder = EncoderIsActive();
  const bool has_rows = put != put_.end();
  const RowDims& rows = setup_.rows;
  const InitArgs& init = setup_.init;
  const DType v_dtype = config_.v_dtype.value_or(init.dtype);
  const std::int64_t padding = padded_ ? config_.mask_batch_padding : 1;
  const std::int64_t mask_rows =
      (std::int64_t{tokens_} + padding - 1) / padding * padding;
  TensorView key = {.dtype = init.dtype,
                    .shape = {rows.k_head_dim, rows.kv_heads, 0, 1}};
  TensorView value = {.dtype = v_dtype,
                      .shape = {rows.v_head_dim, rows.kv_heads, 0, 1}};
  if (encoder && has_rows) {
    key = {.dtype = put->second.key.dtype, .shape = put->second.key.shape};
    value = {.dtype = put->second.value.dtype,
             .shape = put->second.value.shape};
  }
  kvtwin_view c = {};
  c.size = sizeof(c);
  c.key = CTensor(key);
  c.value = CTensor(value);
  c.mask =
      CTensor({.dtype = config_.mask_dtype, .shape = {0, mask_rows, 1, 1}});
  c.columns = kColumnsBefore;
  const Status status =
      Call("get", [&] { return table_.get(cache_, layer_, &c); });
  if (!status.ok()) return status;
  if (!encoder) FillColumns(c);
  KvView view;
  view.first_cell = c.first_cell;
  if (encoder) {  // An encoder may return any row dtype.
    key.dtype = RowDTypeOf("K", c.key);
    value.dtype = RowDTypeOf("V", c.value);
  }
  view.key = ToView("K", c.key, key.dtype);
  view.value = ToView("V", c.value, value.dtype);
  if (!encoder || c.mask.data != nullptr) {
    view.mask = ToView("the mask", c.mask, config_.mask_dtype);
  }
  return view;
}

}  // namespace

void CheckMemory(std::string_view function, MemoryWatch* watch,
                 Lender& lender) {
  const auto damage = watch == nullptr ? std::nullopt : watch->Damage();
  if (damage) {
    ThrowWrong("backend: out of bounds",
               fmt::format("after {}: {}", function, *damage));
  }
  if (const char* wrong = lender.Return()) {
    ThrowWrong("backend: out of bounds",
               fmt::format("{} wrote to its {}", function, wrong));
  }
}

Status CallAttend(std::span<float> out,
                  const std::function<Status(float* out)>& attend) {
  constexpr std::size_t kMargin = 64;
  constexpr float kMark = -0x1.5a5a5ap-99F;
  std::vector<float> numbers(out.size() + 2 * kMargin, kMark);
  const auto answer = std::span(numbers).subspan(kMargin, out.size());
  std::ranges::copy(out, answer.begin());
  Status status = attend(answer.data());
  std::ranges::copy(answer, out.begin());
  std::ranges::fill(answer, kMark);
  if (std::ranges::count(numbers, kMark) != std::ssize(numbers)) {
    ThrowWrong(
        "backend: out of bounds",
        fmt::format("attend wrote outside of the {} numbers of its output",
                    out.size()));
  }
  return status;
}

std::unique_ptr<Cache> MakeBackendCache(const kvtwin_backend_v1& table,
                                        const Setup& setup,
                                        std::vector<float> sinks, bool padded,
                                        MemoryWatch* watch) {
  return std::make_unique<BackendCache>(table, setup, std::move(sinks), padded,
                                        watch);
}

}  // namespace kvtwin::props
