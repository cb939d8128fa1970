#include "props/testing/other_caches.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/dense_tensor.h"
#include "core/dialects/profiles.h"
#include "core/index.h"
#include "core/refusals.h"
#include "props/testing/other_families.h"

namespace kvtwin::props {

Status OtherCache::SetConfig(const CacheConfig& config) {
  config_ = config;
  return {};
}

int OtherCache::Draw(int count) {
  random_ = random_ * 6364136223846793005U + 1442695040888963407U;
  return AsInt((random_ >> 33) % static_cast<std::uint64_t>(count));
}

Status OtherCache::Init(const InitArgs& args) {
  args_ = args;
  const bool windowed = IsWindowed(spec_.kind);
  if (windowed && spec_.window) {
    const int own = WindowCountsQuery() ? 1 : 0;
    reach_ = *spec_.window - own;
    if (*reach_ < 0) return Invalid("a window of 0 has no room");
    keep_ = reach_;
    if (spec_.kind == Kind::kSwaMem && spec_.memory) {
      keep_ = *spec_.memory - own;
    }
    if (args.max_sequences > 1) keep_ = std::max(*keep_, *reach_ + 1);
    if (KeepsTheFirst()) keep_ = reach_;
    if (*keep_ >= args.capacity) keep_.reset();
    if (keep_ && *keep_ < *reach_) return Invalid("a memory below the window");
  }
  // Caches of other sizes make other choices.
  for (const int size : {args.max_sequences, args.capacity, args.max_batch,
                         spec_.chunk, AsInt(spec_.kind)}) {
    random_ =
        (random_ ^ static_cast<std::uint64_t>(size)) * 0x9E3779B97F4A7C15U;
  }
  shares_ = Coin();
  takes_tail_ = Coin();
  tight_ = Coin() || Is(CacheFault::kFullTooEarly);
  says_no_ = Draw(3);
  shuffles_ = Coin();
  noise_ = Draw(3);
  extra_rows_ = Draw(3);
  gap_ = Coin() ? 0 : 16;
  return {};
}

Status OtherCache::SetLayer(int layer) {
  layer_ = layer;
  return {};
}

std::map<int, std::int64_t> OtherCache::Lows(const Batch& batch) {
  std::map<int, std::int64_t> lows;
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const std::int64_t position = batch.positions[i];
    const auto at = lows.try_emplace(batch.sequences[i], position).first;
    at->second = std::min(at->second, position);
  }
  return lows;
}

bool OtherCache::HasRoom(const std::map<int, std::int64_t>& more,
                         std::int64_t last, int replaced) const {
  std::map<int, std::int64_t> held = more;
  for (const Stored& token : All()) {
    if (token.sequence == replaced) continue;
    ++held[token.sequence];
    last = std::max(last, token.item.position);
  }
  const int room =
      Is(CacheFault::kFullTooEarly) ? args_.capacity - 1 : args_.capacity;
  bool fits = std::ssize(held) <= args_.max_sequences && last < room;
  for (const auto& [seq, count] : held) {
    fits = fits && count <= room && seq < args_.max_sequences;
  }
  return fits;
}

Status OtherCache::BatchAnswer(const Batch& batch) const {
  std::map<int, std::int64_t> next;
  std::map<int, std::int64_t> more;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const int seq = batch.sequences[i];
    const std::int64_t position = batch.positions[i];
    const bool is_first = !next.contains(seq);
    const bool goes_on =
        is_first ? GoesOn(seq, position)
                 : next[seq] == position || GoesOn(seq, kOpenEnd + 1LL);
    if (!goes_on && !Is(CacheFault::kTakesAnyBatch)) {
      return Invalid("position {} does not continue sequence {}", position,
                     seq);
    }
    next[seq] = position + 1;
    ++more[seq];
    last = std::max(last, position);
  }
  if (!tight_ || HasRoom(more, last)) return {};
  return {StatusCode::kCacheFull, "there is no room"};
}

void OtherCache::Begin(const Batch& batch) {
  batch_.clear();
  batch_rows_.clear();
  MakeRoom(batch);
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const Row row{batch.positions[i], batch.sequences[i], false};
    batch_.push_back(row);
    batch_rows_.push_back(Store(row.sequence, row.position));
  }
  in_pass_ = true;
}

Status OtherCache::StartForward(const Batch& batch, bool reserve) {
  if (reserve) return {StatusCode::kNotSupported, "nothing is reserved"};
  Status status = BatchAnswer(batch);
  if (status.ok()) Begin(batch);
  if (status.code() == StatusCode::kCacheFull) in_pass_ = false;
  return status;
}

Status OtherCache::SetCausal(std::span<const int> except) {
  for (Row& row : batch_) row.excepted = false;
  for (const int i : except) At(batch_, i).excepted = true;
  return {};
}

Status OtherCache::Put(const TensorView& key, const TensorView& value) {
  const DType v_dtype = config_.v_dtype.value_or(args_.dtype);
  for (std::size_t i = 0; i < batch_rows_.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    (*batch_rows_[i])[layer_] = {CopyOf(Slice(key, 2, at), args_.dtype),
                                 CopyOf(Slice(value, 2, at), v_dtype)};
  }
  const KvRows& first = batch_rows_[0]->at(layer_);
  KvRows garbage = first;
  for (DenseTensor* part : {&garbage.key, &garbage.value}) {
    std::ranges::fill(part->bytes, std::byte{0x7F});
  }
  garbage_[layer_] = garbage;
  return {};
}

bool OtherCache::InWindow(const Row& row, const Stored& token) const {
  return row.position - token.item.position <= Seen();
}

bool OtherCache::Sees(const Row& row, const Stored& token) const {
  const std::int64_t position = token.item.position;
  if (token.sequence != row.sequence) {
    return Is(CacheFault::kSeesOthers) && position == row.position;
  }
  const std::int64_t now =
      row.position + (Is(CacheFault::kSeesTheFuture) ? 1 : 0);
  if (position > now && !row.excepted) return false;
  if (reach_ && !InWindow(row, token)) return false;
  return spec_.kind != Kind::kChunked ||
         position / spec_.chunk >= row.position / spec_.chunk;
}

void OtherCache::AddNoise(std::vector<Column>& columns) {
  for (int i = 0; i < noise_; ++i) {
    columns.push_back({&garbage_.at(layer_), std::vector<bool>(batch_.size())});
  }
  if (!shuffles_) return;
  for (std::size_t i = columns.size(); i > 1; --i) {
    std::swap(columns[i - 1], At(columns, Draw(AsInt(i))));
  }
}

std::vector<OtherCache::Column> OtherCache::Columns() {
  std::vector<Column> columns;
  const bool hidden_too = noise_ > 1;
  std::map<const OtherRows*, std::size_t> known;  // Shared rows are shown once.
  for (const Stored& token : All()) {
    const auto rows = token.item.rows->find(layer_);
    Column column{
        rows == token.item.rows->end() ? &garbage_.at(layer_) : &rows->second,
        {}};
    for (const Row& row : batch_) column.seen.push_back(Sees(row, token));
    const bool shown = std::ranges::count(column.seen, true) > 0;
    if (!shown && !hidden_too) continue;
    const auto [at, is_new] =
        known.try_emplace(token.item.rows.get(), columns.size());
    if (is_new) {
      columns.push_back(std::move(column));
      continue;
    }
    std::vector<bool>& seen = columns[at->second].seen;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      seen[i] = seen[i] || column.seen[i];
    }
  }
  AddNoise(columns);
  return columns;
}

TensorView OtherCache::Gather(const std::vector<Column>& columns,
                              DenseTensor KvRows::*part,
                              std::vector<std::byte>& bytes) {
  const DenseTensor& like = garbage_.at(layer_).*part;
  const std::size_t step = like.bytes.size() + AsSize(gap_);
  bytes.assign(step * columns.size() + 1, std::byte{0x55});
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const bool mixed =
        Is(CacheFault::kMixesRows) && columns.size() > 3 && i < 2;
    const KvRows& rows =
        *columns[mixed && part == &KvRows::value ? 1 - i : i].rows;
    std::ranges::copy((rows.*part).bytes, IteratorAt(bytes, i * step));
  }
  Shape shape = like.shape;
  shape[2] = std::ssize(columns);
  TensorView view = DenseView(bytes.data(), like.dtype, shape);
  view.stride[2] = static_cast<std::int64_t>(step);
  return view;
}

Result<KvView> OtherCache::Get() {
  if (!in_pass_ || !garbage_.contains(layer_)) {
    return Untimely("there is no pass, or nothing was put");
  }
  const std::vector<Column> columns = Columns();
  std::int64_t rows = std::ssize(batch_);
  while (rows % config_.mask_batch_padding != 0) ++rows;
  rows += extra_rows_;
  mask_.assign(columns.size() * AsSize(rows) + 1,
               -std::numeric_limits<float>::infinity());
  for (std::size_t column = 0; column < columns.size(); ++column) {
    for (std::size_t row = 0; row < batch_.size(); ++row) {
      if (columns[column].seen[row]) mask_[row * columns.size() + column] = 0;
    }
  }
  KvView view;
  view.key = Gather(columns, &KvRows::key, key_);
  view.value = Gather(columns, &KvRows::value, value_);
  view.mask =
      DenseView(mask_.data(), DType::kF32, {std::ssize(columns), rows, 1, 1});
  return view;
}

Status OtherCache::CopyAnswer(int src, int dst, std::int32_t len) const {
  if (shares_ || !tight_ || src == dst) return {};
  std::map<int, std::int64_t> more;
  for (const Stored& token : All()) {
    const bool copied = token.sequence == src && token.item.position < len;
    if (copied) ++more[dst];
  }
  if (HasRoom(more, 0, dst)) return {};
  return {StatusCode::kCacheFull, "there is no room for a copy"};
}

Status OtherCache::CopyPrefix(int src, int dst, std::int32_t len) {
  Status status = CopyAnswer(src, dst, len);
  if (status.ok()) DoCopy(src, dst, len);
  return status;
}

bool OtherCache::Resumes(int seq, std::int32_t pos) const {
  if (Is(CacheFault::kAlwaysResumes)) return true;
  const bool denies = says_no_ == 2 || (says_no_ == 1 && (seq + pos) % 3 == 0);
  return !denies && StillHas(seq, pos);
}

Result<bool> OtherCache::CanResume(int seq, std::int32_t pos) {
  return Resumes(seq, pos);
}

Status OtherCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  const std::int64_t last =
      end == kOpenEnd ? std::numeric_limits<std::int64_t>::max() : end;
  Status status = RemoveAnswer(seq, begin, last);
  const int kept =
      Is(CacheFault::kKeepsRemoved) && begin > 0 && begin < last ? 1 : 0;
  if (status.ok()) DoRemove(seq, begin + kept, last);
  return status;
}

Status OtherCache::ShiftAnswer() const {
  return {StatusCode::kNotSupported, "nothing is ever shifted"};
}

Status OtherCache::Shift(int seq, std::int32_t begin, std::int32_t end,
                         std::int32_t delta) {
  Status status = ShiftAnswer();
  const std::int64_t last =
      end == kOpenEnd ? std::numeric_limits<std::int64_t>::max() : end;
  if (status.ok()) DoShift(seq, begin, last, delta);
  return status;
}

Status OtherCache::Turn(std::int32_t delta, OtherRows& rows) const {
  if (Is(CacheFault::kForgetsTheTurn)) return {};
  for (auto& [layer, stored] : rows) {
    Status status = ShiftStored(spec_.shift, layer, delta, stored.key);
    if (!status.ok()) return status;
  }
  return {};
}

Status OtherCache::SetLayerType(int) {
  return {StatusCode::kNotSupported, "there is one cache"};
}

Result<bool> OtherCache::EncoderCached() {
  return Status(StatusCode::kNotSupported, "there is no encoder");
}

namespace {

std::unique_ptr<OtherCache> MakeOne(std::string_view profile,
                                    const CacheSpec& spec,
                                    std::uint64_t choices, CacheFault fault) {
  if (profile == "llama.cpp") {
    return std::make_unique<LlamaCells>(spec, choices, fault);
  }
  if (profile == "transformers" || profile == "mlx") {
    return std::make_unique<Concatenated>(spec, choices, fault,
                                          profile == "mlx" ? 4 : 0);
  }
  if (profile == "executorch") {
    return std::make_unique<Rings>(spec, choices, fault);
  }
  return std::make_unique<Lists>(spec, choices, fault);
}

// A wrapper of several caches; a call changes all of them or none.
class Several final : public Cache, public Shifting {
 public:
  explicit Several(std::vector<std::unique_ptr<OtherCache>> caches)
      : caches_(std::move(caches)) {}

  Status SetConfig(const CacheConfig& config) override {
    return Each([&](auto& cache) { return cache.SetConfig(config); });
  }
  Status Init(const InitArgs& args) override {
    return Each([&](auto& cache) { return cache.Init(args); });
  }
  void Close() override {}
  Status SetLayer(int layer) override {
    return Each([&](auto& cache) { return cache.SetLayer(layer); });
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    if (reserve) return active().StartForward(batch, reserve);
    Status status = Each([&](auto& cache) { return cache.BatchAnswer(batch); });
    if (!status.ok()) return status;
    for (auto& cach : caches_) cach->Begin(batch);
    active_ = 0;
    return {};
  }
  Status SetCausal(std::span<const int> except) override {
    return active().SetCausal(except);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    return active().Put(key, value);
  }
  Result<KvView> Get() override { return active().Get(); }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status =
        Each([&](auto& cache) { return cache.CopyAnswer(src, dst, len); });
    if (!status.ok()) return status;
    return Each([&](auto& cache) { return cache.CopyPrefix(src, dst, len); });
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return std::ranges::all_of(
        caches_, [&](auto& cache) { return cache->Resumes(seq, pos); });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const std::int64_t last =
        end == kOpenEnd ? std::numeric_limits<std::int64_t>::max() : end;
    Status status =
        Each([&](auto& cache) { return cache.RemoveAnswer(seq, begin, last); });
    if (!status.ok()) return status;
    return Each([&](auto& cache) { return cache.Remove(seq, begin, end); });
  }
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) override {
    Status status = Each([&](auto& inner) { return inner.ShiftAnswer(); });
    if (!status.ok()) return status;
    return Each(
        [&](auto& inner) { return inner.Shift(seq, begin, end, delta); });
  }
  Status SetLayerType(int type) override {
    active_ = AsSize(type);
    return {};
  }
  Cache* UnderlyingCache() override { return &active(); }
  Result<bool> EncoderCached() override { return active().EncoderCached(); }
  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

 private:
  OtherCache& active() { return *caches_[active_]; }
  // Calls the caches in order; returns the first answer that is not ok.
  template <class Call>
  Status Each(const Call& call) {
    for (auto& inner : caches_) {
      if (Status status = call(*inner); !status.ok()) return status;
    }
    return {};
  }

  std::vector<std::unique_ptr<OtherCache>> caches_;
  std::size_t active_ = 0;
};

}  // namespace

std::unique_ptr<Cache> MakeOtherCache(std::string_view profile,
                                      const CacheSpec& spec,
                                      std::uint64_t choices, CacheFault fault) {
  if (!IsWrapper(spec.kind)) {
    return MakeOne(profile, spec, choices, fault);
  }
  std::vector<std::unique_ptr<OtherCache>> caches;
  for (const CacheSpec& part : spec.caches) {
    caches.push_back(MakeOne(profile, part, choices++, fault));
  }
  return std::make_unique<Several>(std::move(caches));
}

Subject OtherSubject(std::string_view profile, std::uint64_t choices,
                     bool any_order, CacheFault fault) {
  Subject subject;
  subject.name = "other:" + std::string(profile);
  subject.make_of = [=](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    return MakeOtherCache(profile, setup.spec, choices, fault);
  };
  subject.tried_outside_of_life = false;
  subject.level = Level::kVisibility;
  subject.rules = FindProfile(profile)->rules;
  Abilities& abilities = subject.abilities;
  abilities.kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA | KVTWIN_HAS_SWA_MEM |
                    KVTWIN_HAS_CHUNKED | KVTWIN_HAS_WRAPPER;
  abilities.can = ~std::uint32_t{KVTWIN_CAN_RESERVE | KVTWIN_CAN_REFUSE_MISUSE |
                                 KVTWIN_CAN_BE_POISONED};
  abilities.can &= ~std::uint32_t{KVTWIN_CAN_DRAFT | KVTWIN_CAN_DRAFT_TREES};
  if (!any_order) abilities.can &= ~std::uint32_t{KVTWIN_CAN_ANY_ORDER};
  abilities.v_layouts = 1U << KVTWIN_V_PLAIN;
  abilities.mask_dtypes = 1U << KVTWIN_F32;
  abilities.snapshots = false;
  return subject;
}

}  // namespace kvtwin::props
