// Compares a wrapper with its caches driven separately. Rules S41 to S46 of
// docs/semantics.md are implemented again here, because all twins share one
// wrapper. Calls come in any order that the interface allows, and in some that
// it does not allow.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr int kMaxBatch = 4;

struct Case {
  std::vector<CacheSpec> caches;
  CacheConfig config = {};
  int max_sequences = 2;
  int capacity = 8;
};

CacheSpec Of(Kind kind, ShiftKind shift = ShiftKind::kNone,
             std::optional<std::int32_t> window = {},
             Placement placement = Placement::kContiguous) {
  CacheSpec spec;
  spec.kind = kind;
  spec.shift.kind = shift;
  spec.window = window;
  spec.placement = placement;
  spec.chunk = 3;
  return spec;
}

std::vector<Case> Cases() {
  const CacheSpec causal = Of(Kind::kCausal, ShiftKind::kAdd);
  const CacheSpec window = Of(Kind::kSwa, ShiftKind::kAdd, 2);
  const CacheSpec fixed = Of(Kind::kSwa, ShiftKind::kNone, 1);
  const CacheSpec far =
      Of(Kind::kSwaMem, ShiftKind::kRope, 3, Placement::kScatter);
  const CacheSpec chunked =
      Of(Kind::kChunked, ShiftKind::kIdentity, {}, Placement::kScatter);
  const CacheSpec encoder = Of(Kind::kEncoder);
  // The last cache has to be asked, too: it alone is full, cannot resume, or
  // refuses a removal.
  std::vector<CacheSpec> many(8, causal);
  many.push_back(fixed);
  return {
      {{window, causal}},
      {{causal, fixed}},
      {{window, chunked, causal}, {.cache_padding = 2}},
      {{far, window, fixed}, {.v_layout = VLayout::kPermuted}},
      {{far, window, causal}},
      {{encoder, window, causal}, {}, 1},
      {{causal}},
      {{encoder, window}, {}, 1},
      {{causal, encoder, encoder}, {.mask_batch_padding = 3}, 1},
      {many},
  };
}

std::unique_ptr<Cache> Made(const CacheSpec& spec, const Case& test_case,
                            const std::string& twin) {
  auto cache = *MakeCache(spec, twin);
  EXPECT_TRUE(cache->SetConfig(test_case.config).ok());
  EXPECT_TRUE(cache
                  ->Init({DType::kF32, test_case.max_sequences,
                          test_case.capacity, kMaxBatch})
                  .ok());
  return cache;
}

// A state without the tokens of these cells.
CacheState Without(const CacheState& state, const std::set<int>& cells) {
  CacheState rest = state;
  std::erase_if(rest.cells, [&](const CellEntry& entry) {
    return cells.contains(entry.cell);
  });
  std::vector<bool> kept;  // By row: one for each held cell.
  int last = -1;
  for (const CellEntry& entry : state.cells) {
    if (entry.cell != last) kept.push_back(!cells.contains(entry.cell));
    last = entry.cell;
  }
  const auto rows = std::ranges::count(kept, true);
  for (auto& [layer, pair] : rest.layers) {
    for (DenseTensor* tensor : {&pair.key, &pair.value}) {
      const std::size_t size = tensor->bytes.size() / kept.size();
      std::vector<std::byte> bytes;
      for (std::size_t row = 0; row < kept.size(); ++row) {
        if (!kept[row]) continue;
        const auto first = IteratorAt(tensor->bytes, row * size);
        bytes.insert(bytes.end(), first,
                     first + static_cast<std::ptrdiff_t>(size));
      }
      tensor->bytes = bytes;
      tensor->shape[2] = rows;
    }
  }
  return rest;
}

// The caches of a wrapper, each driven alone.
class Alone {
 public:
  Alone(const Case& test_case, const std::string& twin)
      : case_(test_case), twin_(twin) {
    for (const CacheSpec& spec : test_case.caches) {
      caches_.push_back(Made(spec, test_case, twin));
    }
  }

  using Does = std::function<Status(Cache&)>;
  using DoesPart = std::function<Status(Cache&, std::size_t)>;

  // Calls all caches or none (S41, S45): a copy of each is asked first.
  Status ToAll(const DoesPart& does) {
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      Status status = does(*CopyOf(i), i);
      if (!status.ok()) return status;
    }
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      EXPECT_TRUE(does(*caches_[i], i).ok());
    }
    return {};
  }
  Status ToAll(const Does& does) {
    return ToAll([&](Cache& cache, std::size_t) { return does(cache); });
  }

  Status SetLayer(int layer) {
    Status status = ToAll([&](Cache& cache) { return cache.SetLayer(layer); });
    if (status.ok()) layer_ = layer;
    return status;
  }

  StatusCode SetLayerType(int type) {
    if (type < 0 || type >= std::ssize(caches_)) return kInvalid;
    active_ = AsSize(type);
    return StatusCode::kOk;
  }

  // Implements S5, S42 and S43.
  Status StartForward(const Batch& batch, bool reserve) {
    Status status = CopyOf(0)->StartForward(batch, reserve);
    if (status.code() == kInvalid) return status;
    std::vector<CacheState> before;
    for (const auto& cache : caches_) before.push_back(*cache->Snapshot());
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      status = caches_[i]->StartForward(batch, reserve);
      if (status.ok()) continue;
      refused_ = i;
      for (std::size_t j = 0; j < caches_.size(); ++j) {
        Load(j, j < i ? GivenBack(j, before[j]) : *caches_[j]->Snapshot());
      }
      return status;
    }
    active_ = 0;
    return {};
  }

  // Implements S44.
  Result<bool> CanResume(int seq, std::int32_t pos) {
    bool all = true;
    for (const auto& cache : caches_) {
      const Result<bool> can = cache->CanResume(seq, pos);
      if (!can.ok()) return can;
      all = all && *can;
    }
    return all;
  }

  Status Restore(const CacheState& state) {
    if (state.caches.size() != caches_.size()) {
      return {kInvalid, "not as many caches"};
    }
    Status status = ToAll([&](Cache& cache, std::size_t i) {
      return cache.Restore(state.caches[i]);
    });
    if (status.ok()) Begin();
    return status;
  }

  Status AddSequence(int sequence, const CacheState& added) {
    if (added.caches.size() != caches_.size()) {
      return {kInvalid, "not as many caches"};
    }
    Status status = ToAll([&](Cache& cache, std::size_t i) {
      return cache.AddSequence(sequence, added.caches[i]);
    });
    if (status.ok()) Begin();
    return status;
  }

  CacheState Snapshot() const {
    CacheState state;
    for (const auto& cache : caches_) {
      state.caches.push_back(*cache->Snapshot());
    }
    return state;
  }
  CacheState SnapshotOf(int sequence) const {
    CacheState state;
    for (const auto& cache : caches_) {
      state.caches.push_back(*cache->SnapshotOf(sequence));
    }
    return state;
  }

  Cache& active() const { return *caches_[active_]; }
  int active_type() const { return AsInt(active_); }
  // The cache that refused in the latest refused pass.
  std::size_t refused() const { return refused_; }
  int size() const { return Size(caches_); }

 private:
  std::unique_ptr<Cache> CopyOf(std::size_t i) const {
    auto copy = Made(case_.caches[i], case_, twin_);
    EXPECT_TRUE(copy->Restore(*caches_[i]->Snapshot()).ok());
    return copy;
  }
  void Begin() {
    active_ = 0;
    layer_ = 0;
  }
  // Restores a cache, which then has no pass, and sets its layer.
  void Load(std::size_t i, const CacheState& state) {
    EXPECT_TRUE(caches_[i]->Restore(state).ok());
    EXPECT_TRUE(caches_[i]->SetLayer(layer_).ok());
  }
  // The tokens of a cache without those of its pass.
  CacheState GivenBack(std::size_t i, const CacheState& before) const {
    CacheState state = *caches_[i]->Snapshot();
    if (case_.caches[i].kind == Kind::kEncoder) {
      state.next_position = before.next_position;
      return state;
    }
    const std::span<const int> cells = caches_[i]->BatchCells();
    return Without(state, {cells.begin(), cells.end()});
  }

  Case case_;
  std::string twin_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::size_t active_ = 0;
  std::size_t refused_ = 0;
  int layer_ = 0;
};

std::vector<std::byte> Dense(const TensorView& view) {
  if (view.data == nullptr) return {};
  return CopyOf(view, view.dtype).bytes;
}

// Makes the same random calls to the wrapper and to its separate caches.
class Both {
 public:
  Both(const Case& test_case, const std::string& twin, std::uint32_t seed)
      : alone_(test_case, twin), random_(seed) {
    CacheSpec spec;
    spec.kind = Kind::kWrapper;
    spec.caches = test_case.caches;
    wrapper_ = Made(spec, test_case, twin);
  }

  // How often each call had each answer.
  const std::map<std::string, int>& reached() const { return reached_; }

  void Step() {
    const int kind = Pick(20);
    if (kind < 5) return Start();
    if (kind < 8) return Put();
    if (kind < 10) return SetLayer();
    if (kind < 12) return SetType();
    if (kind < 13) return SetCausal();
    if (kind < 14) return Copy();
    if (kind < 16) return Remove();
    if (kind < 17) return Move();
    if (kind < 18) return Resume();
    Compare();
  }

  // Compares all answers of the wrapper and of the separate caches.
  void Compare() {
    ASSERT_TRUE(*wrapper_->Snapshot() == alone_.Snapshot());
    const int type = alone_.active_type();
    for (int each = 0; each < alone_.size(); ++each) {
      const int next = (type + each) % alone_.size();
      if (each > 0) {
        ASSERT_TRUE(wrapper_->SetLayerType(next).ok());
        ASSERT_EQ(alone_.SetLayerType(next), StatusCode::kOk);
      }
      CompareActive(*wrapper_);
      CompareActive(*wrapper_->UnderlyingCache());
    }
    ASSERT_TRUE(wrapper_->SetLayerType(type).ok());
    ASSERT_EQ(alone_.SetLayerType(type), StatusCode::kOk);
  }

 private:
  int Pick(int end) { return AsInt(random_() % static_cast<unsigned>(end)); }

  void Same(const char* call, const Status& actual, StatusCode expected) {
    ++reached_[fmt::format("{} {}", call, StatusName(expected))];
    ASSERT_EQ(StatusName(actual.code()), StatusName(expected))
        << call << ": " << actual.message();
  }

  void CompareActive(Cache& cache) {
    Cache& expected = alone_.active();
    ASSERT_EQ(cache.CellCount(), expected.CellCount());
    ASSERT_TRUE(std::ranges::equal(cache.BatchCells(), expected.BatchCells()));
    std::vector<CellEntry> found_cells(1);
    std::vector<CellEntry> due_cells;
    cache.ListCells(found_cells);
    expected.ListCells(due_cells);
    ASSERT_EQ(found_cells, due_cells);
    const Result<bool> found_cached = cache.EncoderCached();
    const Result<bool> due_cached = expected.EncoderCached();
    Same("encoder_cached", found_cached.status(), due_cached.status().code());
    if (due_cached.ok()) {
      ASSERT_EQ(*found_cached, *due_cached);
    }
    const Result<KvView> actual = cache.Get();
    const Result<KvView> view = expected.Get();
    Same("get", actual.status(), view.status().code());
    if (!actual.ok() || !view.ok()) return;
    ASSERT_EQ(actual->first_cell, view->first_cell);
    for (const auto part : {&KvView::key, &KvView::value, &KvView::mask}) {
      const TensorView& tensor = *actual.*part;
      const TensorView& other = *view.*part;
      ASSERT_EQ(tensor.data == nullptr, other.data == nullptr);
      ASSERT_EQ(tensor.dtype, other.dtype);
      ASSERT_EQ(tensor.shape, other.shape);
      ASSERT_EQ(Dense(tensor), Dense(other));
    }
  }

  void Start();
  void Put();
  void SetLayer();
  void SetType();
  void SetCausal();
  void Copy();
  void Remove();
  void Move();
  void Resume();
  void AfterARefusal();

  Alone alone_;
  std::mt19937 random_;
  std::unique_ptr<Cache> wrapper_;
  std::map<int, std::int32_t> next_;  // Positions, by sequence.
  int tokens_ = 0;                    // In the last batch.
  std::map<std::string, int> reached_;
};

// Draws a batch of up to two sequences, which mostly continue where they are.
void Both::Start() {
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::map<int, std::int32_t> next = next_;
  tokens_ =
      Pick(12) == 0 ? Pick(6) : 1 + Pick(3);  // Perhaps none, or too many.
  for (int i = 0; i < tokens_; ++i) {
    const int sequence = Pick(2);
    if (Pick(15) == 0) next[sequence] += Pick(3) - 1;
    positions.push_back(next[sequence]++);
    sequences.push_back(sequence);
  }
  std::vector<int> multimodal;
  if (Pick(2) == 0) multimodal.push_back(Pick(tokens_ + 1));
  const bool reserve = Pick(6) == 0;
  const Batch batch = {positions, sequences, multimodal};
  const Status expected = alone_.StartForward(batch, reserve);
  Same("start", wrapper_->StartForward(batch, reserve), expected.code());
  if (expected.ok() && !reserve) next_ = next;
  if (expected.code() != StatusCode::kCacheFull) return;
  ++reached_[fmt::format("refused by cache {}", alone_.refused())];
  AfterARefusal();
}

// After a refusal the rows of free cells may differ, so both are restored.
// Before that, a reserving pass shows their layer and layer type.
void Both::AfterARefusal() {
  Compare();
  Put();  // There is no pass.
  const std::vector<std::int32_t> positions = {0};
  const std::vector<int> sequences = {0};
  const Batch batch = {positions, sequences};
  Same("reserve", wrapper_->StartForward(batch, true),
       alone_.StartForward(batch, true).code());
  tokens_ = 1;
  Put();
  ASSERT_TRUE(*wrapper_->Snapshot() == alone_.Snapshot());
  const CacheState state = alone_.Snapshot();
  Same("restore", wrapper_->Restore(state), alone_.Restore(state).code());
  if (Pick(2) == 0) return;
  // This makes room again.
  for (const int sequence : {0, 1}) {
    const Alone::Does remove = [&](Cache& cache) {
      return cache.Remove(sequence, 0, kOpenEnd);
    };
    Same("clear", wrapper_->Remove(sequence, 0, kOpenEnd),
         alone_.ToAll(remove).code());
    next_[sequence] = 0;
  }
}

void Both::Put() {
  const std::int64_t tokens = Pick(12) == 0 ? Pick(4) : tokens_;
  const std::int64_t dim = Pick(12) == 0 ? 3 : 2;
  std::vector<float> numbers(AsSize(2 * dim * tokens) + 1);
  for (float& number : numbers) number = static_cast<float>(Pick(1000));
  const TensorView key =
      DenseView(numbers.data(), DType::kF32, {dim, 2, tokens, 1});
  const TensorView value =
      DenseView(numbers.data() + 1, DType::kF32, {dim, 2, tokens, 1});
  Same("put", wrapper_->Put(key, value),
       alone_.active().Put(key, value).code());
}

void Both::SetLayer() {
  const int layer = Pick(4) - (Pick(8) == 0 ? 1 : 0);
  Same("layer", wrapper_->SetLayer(layer), alone_.SetLayer(layer).code());
}

void Both::SetType() {
  const int type = Pick(alone_.size() + 2) - 1;
  Same("type", wrapper_->SetLayerType(type), alone_.SetLayerType(type));
}

void Both::SetCausal() {
  std::vector<int> except;
  for (int i = Pick(3); i > 0; --i) except.push_back(Pick(tokens_ + 1));
  Same("causal", wrapper_->SetCausal(except),
       alone_.active().SetCausal(except).code());
}

void Both::Copy() {
  const int source = Pick(3);
  const int target = Pick(3) - (Pick(15) == 0 ? 1 : 0);
  const std::int32_t len = Pick(6) - (Pick(15) == 0 ? 1 : 0);
  const Alone::Does copy = [&](Cache& cache) {
    return cache.CopyPrefix(source, target, len);
  };
  const Status expected = alone_.ToAll(copy);
  Same("copy", wrapper_->CopyPrefix(source, target, len), expected.code());
  if (expected.ok()) next_[target] = std::min(next_[source], len);
}

void Both::Remove() {
  const int sequence = Pick(3);
  const std::int32_t begin = Pick(6) - (Pick(15) == 0 ? 1 : 0);
  const bool open = Pick(2) == 0;
  const std::int32_t end = open ? kOpenEnd : begin + Pick(4) - Pick(2);
  const Alone::Does remove = [&](Cache& cache) {
    return cache.Remove(sequence, begin, end);
  };
  const Status expected = alone_.ToAll(remove);
  Same("remove", wrapper_->Remove(sequence, begin, end), expected.code());
  if (!expected.ok()) return;
  std::int32_t& next = next_[sequence];
  next = open ? std::min(next, begin) : std::max(begin, next - end + begin);
}

// Takes a sequence out of the state and adds it again, perhaps under another
// number.
void Both::Move() {
  const int sequence = Pick(3);
  const CacheState single = alone_.SnapshotOf(sequence);
  ASSERT_TRUE(*wrapper_->SnapshotOf(sequence) == single);
  if (Pick(3) == 0) {
    CacheState state = alone_.Snapshot();
    if (Pick(4) == 0) state.caches.back().cells.push_back({-1, 0, 0});
    if (Pick(8) == 0) state.caches.pop_back();
    Same("restore", wrapper_->Restore(state), alone_.Restore(state).code());
    return;
  }
  CacheState added = single;
  if (Pick(8) == 0) added.caches.pop_back();
  const int number = Pick(3) + Pick(2);
  const Status expected = alone_.AddSequence(number, added);
  Same("add", wrapper_->AddSequence(number, added), expected.code());
  if (expected.ok()) next_[number] = next_[sequence];
}

void Both::Resume() {
  const int sequence = Pick(4) - 1;
  const std::int32_t position = Pick(8) - 1;
  const Result<bool> expected = alone_.CanResume(sequence, position);
  const Result<bool> actual = wrapper_->CanResume(sequence, position);
  Same("resume", actual.status(), expected.status().code());
  if (!expected.ok() || !actual.ok()) return;
  ASSERT_EQ(*actual, *expected);
  ++reached_[*expected ? "resume yes" : "resume no"];
}

class Wrappers : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, Wrappers, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(Wrappers, BehaveAsTheirCachesAlone) {
  std::map<std::string, int> reached;
  std::uint32_t seed = 0;
  for (const Case& test_case : Cases()) {
    for (int history = 0; history < 12; ++history) {
      SCOPED_TRACE(fmt::format("seed {}", seed));
      Both both(test_case, GetParam(), seed++);
      for (int step = 0; step < 120; ++step) {
        both.Step();
        if (HasFatalFailure()) return;
      }
      both.Compare();
      if (HasFatalFailure()) return;
      for (const auto& [what, times] : both.reached()) reached[what] += times;
    }
  }
  for (const char* what : {"start ok",
                           "start cache_full",
                           "refused by cache 0",
                           "refused by cache 1",
                           "refused by cache 2",
                           "start invalid_argument",
                           "put ok",
                           "put invalid_argument",
                           "put failed_precondition",
                           "get ok",
                           "get failed_precondition",
                           "layer ok",
                           "layer invalid_argument",
                           "type ok",
                           "type invalid_argument",
                           "causal ok",
                           "causal invalid_argument",
                           "causal not_supported",
                           "causal failed_precondition",
                           "copy ok",
                           "copy invalid_argument",
                           "copy not_supported",
                           "remove ok",
                           "remove invalid_argument",
                           "remove not_supported",
                           "remove shared_cells",
                           "restore ok",
                           "restore invalid_argument",
                           "add ok",
                           "add cache_full",
                           "add invalid_argument",
                           "encoder_cached ok",
                           "encoder_cached not_supported",
                           "resume yes",
                           "resume no",
                           "resume invalid_argument",
                           "reserve ok"}) {
    EXPECT_GT(reached[what], 5) << what;
  }
}

// Before Init and after Close, none of the caches accepts a call.
TEST_P(Wrappers, BeginAndEndAsTheirCachesDo) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {Of(Kind::kSwa, ShiftKind::kNone, 3), Of(Kind::kEncoder)};
  const auto cache = *MakeCache(spec, GetParam());
  constexpr auto kUntimely = StatusCode::kFailedPrecondition;
  const auto expect_untimely = [&] {
    EXPECT_EQ(cache->SetLayer(0).code(), kUntimely);
    EXPECT_EQ(cache->SetLayerType(0).code(), kUntimely);
    EXPECT_EQ(cache->CopyPrefix(0, 1, 0).code(), kUntimely);
    EXPECT_EQ(cache->Remove(0, 0, 1).code(), kUntimely);
    EXPECT_EQ(cache->CanResume(0, 0).status().code(), kUntimely);
    EXPECT_EQ(cache->EncoderCached().status().code(), kUntimely);
    EXPECT_EQ(cache->Get().status().code(), kUntimely);
    EXPECT_EQ(cache->Snapshot().status().code(), kUntimely);
    EXPECT_EQ(cache->Restore({}).code(), kUntimely);
    EXPECT_EQ(cache->AddSequence(0, {}).code(), kUntimely);
    EXPECT_EQ(cache->CellCount(), 0);
  };
  expect_untimely();
  // The encoder takes neither a padding nor two sequences, so no cache does.
  ASSERT_TRUE(cache->SetConfig({.cache_padding = 2}).ok());
  EXPECT_EQ(cache->SetConfig({}).code(), kUntimely);
  EXPECT_EQ(cache->Init({DType::kF32, 1, 4, 4}).code(), kInvalid);
  const auto other = *MakeCache(spec, GetParam());
  EXPECT_EQ(other->Init({DType::kF32, 2, 4, 4}).code(), kInvalid);
  EXPECT_EQ(other->CellCount(), 0);
  EXPECT_TRUE(other->Init({DType::kF32, 1, 4, 4}).ok());
  EXPECT_EQ(other->Init({DType::kF32, 1, 4, 4}).code(), kUntimely);
  cache->Close();
  expect_untimely();
}

// A snapshot overwrites every member of the state that it is given.
TEST_P(Wrappers, ASnapshotReplacesAnotherState) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {Of(Kind::kCausal), Of(Kind::kSwa)};
  TestCache wrapper(spec, GetParam());
  ASSERT_EQ(wrapper.Init(2, 8, 8), StatusCode::kOk);
  wrapper.Append(0, 0, {1, 2});
  TestCache single({}, GetParam());
  ASSERT_EQ(single.Init(2, 8, 8), StatusCode::kOk);
  single.Append(1, 0, {3});
  const CacheState of_wrapper = *wrapper->Snapshot();
  const CacheState of_single = *single->Snapshot();
  CacheState state = of_single;
  ASSERT_TRUE(wrapper->SnapshotTo(state).ok());
  EXPECT_TRUE(state == of_wrapper);
  ASSERT_TRUE(single->SnapshotTo(state).ok());
  EXPECT_TRUE(state == of_single);
}

}  // namespace
}  // namespace kvtwin::props
