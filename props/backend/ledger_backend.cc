#include "props/backend/ledger_backend.h"

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "core/refusals.h"
#include "props/backend/c_conversions.h"
#include "props/base/optional_calls.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using reference::LedgerToken;

class LedgerCache final : public Cache, public Shifting {
 public:
  LedgerCache(const CacheSpec& spec, const Rules& rules)
      : ledger_(spec, rules), rules_(rules) {}

  Status SetConfig(const CacheConfig& config) override {
    config_ = config;
    return {};
  }
  Status Init(const InitArgs& args) override {
    dtype_ = args.dtype;
    const Status status = ledger_.Init(config_, args);
    ledger_.IgnoreCapacity();
    return status;
  }
  void Close() override {}
  Status SetLayer(int layer) override {
    layer_ = layer;
    return {};
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    if (reserve) return {StatusCode::kNotSupported, "nothing is reserved"};
    return ledger_.StartForward(batch, reserve);
  }
  Status SetCausal(std::span<const int> except) override {
    return ledger_.active().SetCausal(except);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    ledger_.active().Put(layer_, key, value);
    dims_ = {key.shape, value.shape};
    return {};
  }
  Result<KvView> Get() override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return ledger_.CopyPrefix(src, dst, len);
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const bool can = ledger_.CanResume(seq, pos);
    // A yes promises that the tokens of the window are stored. If first tokens
    // stay, the tokens that a row sees depend on the stored tokens.
    if (can) ledger_.Resumes(seq, pos);
    return can;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return ledger_.Remove(seq, begin, end);
  }
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) override {
    return ledger_.Shift(seq, begin, end, delta);
  }
  Status SetLayerType(int) override {
    return {StatusCode::kNotSupported, "there is one cache"};
  }
  Cache* UnderlyingCache() override { return this; }
  Result<bool> EncoderCached() override {
    return Status(StatusCode::kNotSupported, "there is no encoder");
  }
  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

 private:
  // Returns the rows of all tokens in order; zeros where no row was put.
  TensorView Gather(DenseTensor KvRows::*part, DType dtype, Shape shape,
                    std::vector<std::byte>& bytes) const;

  reference::Ledger ledger_;
  const Rules rules_;
  CacheConfig config_;
  DType dtype_ = DType::kF32;
  int layer_ = 0;
  std::pair<Shape, Shape> dims_ = {};  // The shapes of the last K and V.
  // The memory of the current view.
  std::vector<std::byte> key_;
  std::vector<std::byte> value_;
  std::vector<float> mask_;
};

TensorView LedgerCache::Gather(DenseTensor KvRows::*part, DType dtype,
                               Shape shape,
                               std::vector<std::byte>& bytes) const {
  const auto& tokens = ledger_.active().tokens();
  shape[2] = 1;
  const std::size_t row = DenseBytes(dtype, shape);
  bytes.assign(row * tokens.size(), {});
  std::size_t at = 0;
  for (const LedgerToken& token : tokens) {
    if (const auto rows = token.rows.find(layer_); rows != token.rows.end()) {
      std::ranges::copy((rows->second.*part).bytes, IteratorAt(bytes, at));
    }
    at += row;
  }
  shape[2] = std::ssize(tokens);
  return DenseView(bytes.data(), dtype, shape);
}

Result<KvView> LedgerCache::Get() {
  const reference::CacheLedger& ledger = ledger_.active();
  if (ledger.rows() == 0 || dims_.first[0] == 0) {
    return Untimely("there is no pass, or nothing was put");
  }
  std::int64_t rows = ledger.rows();
  if (rules_.mask_rows == Rules::MaskRows::kPadded) {
    while (rows % config_.mask_batch_padding != 0) ++rows;
  }
  const std::int64_t columns = std::ssize(ledger.tokens());
  mask_.assign(AsSize(rows * columns), -std::numeric_limits<float>::infinity());
  auto element = mask_.begin();
  for (int row = 0; row < ledger.rows(); ++row) {
    for (const LedgerToken& token : ledger.tokens()) {
      if (ledger.MaySee(row, token)) *element = 0;
      ++element;
    }
  }
  KvView view;
  view.key = Gather(&KvRows::key, dtype_, dims_.first, key_);
  view.value = Gather(&KvRows::value, config_.v_dtype.value_or(dtype_),
                      dims_.second, value_);
  view.mask = DenseView(mask_.data(), DType::kF32, {columns, rows, 1, 1});
  return view;
}

// The table ----------------------------------------------------------------

// The object that `init` makes.
struct Session {
  std::unique_ptr<LedgerCache> cache;
  std::string message;  // The message of the last call.

  int Answer(const Status& status) {
    message = status.message();
    switch (status.code()) {
      case StatusCode::kOk:
        return KVTWIN_OK;
      case StatusCode::kCacheFull:
        return KVTWIN_CACHE_FULL;
      case StatusCode::kNotSupported:
        return KVTWIN_NOT_SUPPORTED;
      case StatusCode::kSharedCells:
        return KVTWIN_SHARED_CELLS;
      case StatusCode::kFailedPrecondition:
        return KVTWIN_FAILED_PRECONDITION;
      default:
        return KVTWIN_INVALID_ARGUMENT;
    }
  }
};

// Calls `fn` with the cache. No exception leaves the table.
template <class Fn>
int Do(void* session, const Fn& fn) {
  auto& opened = *static_cast<Session*>(session);
  try {
    return opened.Answer(fn(*opened.cache));
  } catch (const std::bad_alloc&) {
    return KVTWIN_OUT_OF_MEMORY;
  } catch (...) {
    return KVTWIN_INTERNAL;
  }
}

int Init(const kvtwin_setup_v1* setup, const Rules& rules, void** out) {
  const kvtwin_cache_params& params = *setup->cache;
  if (params.kind > KVTWIN_CHUNKED || params.v_layout != KVTWIN_V_PLAIN ||
      params.mask_dtype != KVTWIN_F32) {
    return KVTWIN_NOT_SUPPORTED;
  }
  const Result<CacheParts> parts = CachePartsFromC(&params);
  if (!parts.ok()) return CStatus(parts.status().code());
  auto session = std::make_unique<Session>();
  session->cache = std::make_unique<LedgerCache>(parts->spec, rules);
  const int code = Do(session.get(), [&](Cache& cache) {
    Status status = cache.SetConfig(parts->config);
    return status.ok() ? cache.Init(parts->init) : status;
  });
  if (code == KVTWIN_OK) *out = session.release();
  return code;
}

int Describe(const char* name, const char* profile,
             kvtwin_description_v1* out) {
  out->name = name;
  if (profile != nullptr) out->profile = profile;
  out->kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA | KVTWIN_HAS_SWA_MEM |
               KVTWIN_HAS_CHUNKED;
  out->can = KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_REMOVE_MIDDLE |
             KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE | KVTWIN_CAN_MIX |
             KVTWIN_CAN_ANY_ORDER;
  out->dtypes = (1U << KVTWIN_BITS) - 1;
  out->shifts = (1U << (KVTWIN_SHIFT_ROPE + 1)) - 1;
  out->max_sequences = 0;
  out->max_layers = 0;
  out->max_padding = 0;
  return KVTWIN_OK;
}

void Close(void* session) { delete static_cast<Session*>(session); }

int StartForward(void* session, const kvtwin_batch* batch, int reserve) {
  return Do(session, [&](Cache& cache) {
    const auto tokens = AsSize(batch->tokens);
    return cache.StartForward(
        {{batch->positions, tokens}, {batch->sequences, tokens}}, reserve != 0);
  });
}

int Put(void* session, std::int32_t layer, const kvtwin_tensor* key,
        const kvtwin_tensor* value) {
  return Do(session, [&](Cache& cache) {
    (void)cache.SetLayer(layer);
    const Result<TensorView> k = TensorFromC("K", key);
    if (!k.ok()) return k.status();
    const Result<TensorView> v = TensorFromC("V", value);
    return v.ok() ? cache.Put(*k, *v) : v.status();
  });
}

int Get(void* session, std::int32_t layer, kvtwin_view* out) {
  return Do(session, [&](Cache& cache) {
    (void)cache.SetLayer(layer);
    const Result<KvView> view = cache.Get();
    if (!view.ok()) return view.status();
    out->key = CTensor(view->key);
    out->value = CTensor(view->value);
    out->mask = CTensor(view->mask);
    out->columns = static_cast<std::int32_t>(view->mask.shape[0]);
    return Status();
  });
}

int Remove(void* session, std::int32_t sequence, std::int32_t begin,
           std::int32_t end) {
  return Do(session,
            [&](Cache& cache) { return cache.Remove(sequence, begin, end); });
}

int CopyPrefix(void* session, std::int32_t source, std::int32_t target,
               std::int32_t length) {
  return Do(session, [&](Cache& cache) {
    return cache.CopyPrefix(source, target, length);
  });
}

int CanResume(void* session, std::int32_t sequence, std::int32_t position,
              std::int32_t* yes) {
  return Do(session, [&](Cache& cache) {
    const Result<bool> can = cache.CanResume(sequence, position);
    if (can.ok()) *yes = *can ? 1 : 0;
    return can.status();
  });
}

const char* Message(void* session) {
  return static_cast<Session*>(session)->message.c_str();
}

int ShiftRange(void* session, std::int32_t sequence, std::int32_t begin,
               std::int32_t end, std::int32_t delta) {
  return Do(session, [&](LedgerCache& cache) {
    return cache.Shift(sequence, begin, end, delta);
  });
}

int SetCausal(void* session, const std::int32_t* except, std::int32_t count) {
  return Do(session, [&](Cache& cache) {
    return cache.SetCausal({except, AsSize(count)});
  });
}

// The table of profile number `kIndex`.
template <std::size_t kIndex, bool kAnonymous>
const kvtwin_backend_v1 kTable = {
    .size = sizeof(kvtwin_backend_v1),
    .describe =
        [](kvtwin_description_v1* out) {
          static const std::string name =
              kAnonymous ? "ledger"
                         : "ledger:" + std::string(Profiles()[kIndex].name);
          return Describe(name.c_str(),
                          kAnonymous ? nullptr : Profiles()[kIndex].name.data(),
                          out);
        },
    .init =
        [](const kvtwin_setup_v1* setup, void** cache) {
          return Init(setup, Profiles()[kIndex].rules, cache);
        },
    .close = Close,
    .start_forward = StartForward,
    .put = Put,
    .get = Get,
    .remove = Remove,
    .copy_prefix = CopyPrefix,
    .can_resume = CanResume,
    .message = Message,
    .shift = ShiftRange,
    .set_causal = SetCausal,
    .set_layer_type = nullptr,
    .encoder_cached = nullptr,
    .cells = nullptr,
    .snapshot = nullptr,
    .restore = nullptr,
    .attend = nullptr,
    .commit = nullptr,
    .find_prefix = nullptr,
    .checkpoint = nullptr,
};

template <std::size_t... kIndex>
const kvtwin_backend_v1* TableOf(std::size_t index, bool anonymous,
                                 std::index_sequence<kIndex...>) {
  const std::array told = {&kTable<kIndex, false>...};
  const std::array untold = {&kTable<kIndex, true>...};
  return anonymous ? untold.at(index) : told.at(index);
}

}  // namespace

std::unique_ptr<Cache> MakeLedgerCache(const CacheSpec& spec,
                                       const Rules& rules) {
  return std::make_unique<LedgerCache>(spec, rules);
}

const kvtwin_backend_v1* LedgerBackend(std::string_view profile,
                                       bool anonymous) {
  const auto at = std::ranges::find(Profiles(), profile, &Profile::name);
  if (at == Profiles().end()) return nullptr;
  return TableOf(AsSize(at - Profiles().begin()), anonymous,
                 std::make_index_sequence<kProfileCount>());
}

}  // namespace kvtwin::props
