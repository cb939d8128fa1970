// Hostile and unlucky callers: invalid enum values, shift functions that throw
// or call the cache, locales with a decimal comma, views that many threads
// read.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <clocale>
#include <cstring>
#include <locale>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "kvtwin/paged.h"
#include "kvtwin/save.h"
#include "props/history/history.h"
#include "props/paged/paged_runner.h"
#include "props/search/explore.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

template <class Enum>
std::vector<Enum> NoValues() {
  return {static_cast<Enum>(99), static_cast<Enum>(-1),
          static_cast<Enum>(1 << 30)};
}

CacheSpec OfKind(Kind kind) {
  CacheSpec spec;
  spec.kind = kind;
  return spec;
}

template <class T>
T OfV(DType dtype) {
  T made;
  made.v_dtype = dtype;
  return made;
}

CacheSpec OfShift(const Shift& shift) {
  CacheSpec spec;
  spec.shift = shift;
  return spec;
}

CacheSpec Shifted(ShiftFn fn) {
  return OfShift({ShiftKind::kCustom, {}, std::move(fn)});
}

CacheSpec Wrapped(const CacheSpec& spec) {
  CacheSpec wrapper = OfKind(Kind::kWrapper);
  wrapper.caches = {CacheSpec(), spec};
  return wrapper;
}

void ExpectNamed(const Status& status, std::string_view name, int value) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(fmt::format("{} is {}", name, value)),
            std::string::npos)
      << status.message();
}

// Sets an enum field of `T` to invalid values.
template <class T, class Enum, class Ask>
void ExpectEnumRefused(std::string_view name, Enum T::*field, const Ask& ask) {
  for (const Enum value : NoValues<Enum>()) {
    T made = {};
    made.*field = value;
    ExpectNamed(ask(made), name, AsInt(value));
  }
}

TEST(Abuse, EnumsOutOfRangeAreRefused) {
  for (const std::string_view twin : TwinNames()) {
    const auto make = [&](const CacheSpec& spec) {
      return MakeCache(spec, twin).status();
    };
    ExpectEnumRefused("kind", &CacheSpec::kind, make);
    ExpectEnumRefused("placement", &CacheSpec::placement, make);
    ExpectEnumRefused("shift", &Shift::kind,
                      [&](const Shift& shift) { return make(OfShift(shift)); });
    ExpectEnumRefused("rope pairing", &Rope::pairing, [&](const Rope& rope) {
      return make(Wrapped(OfShift({ShiftKind::kRope, rope, {}})));
    });
    const auto configure = [&](const CacheConfig& config) {
      return (*MakeCache({}, twin))->SetConfig(config);
    };
    ExpectEnumRefused("v_layout", &CacheConfig::v_layout, configure);
    ExpectEnumRefused("mask_dtype", &CacheConfig::mask_dtype, configure);
    ExpectEnumRefused("layout", &PagedSpec::layout, [&](const PagedSpec& spec) {
      return MakePagedPool(spec, twin).status();
    });
    ExpectEnumRefused("dtype", &PagedSpec::dtype, [&](const PagedSpec& spec) {
      return MakePagedPool(spec, twin).status();
    });
    for (const DType dtype : NoValues<DType>()) {
      const int value = AsInt(dtype);
      const auto cache = *MakeCache({}, twin);
      ExpectNamed(cache->SetConfig(OfV<CacheConfig>(dtype)), "v_dtype", value);
      ExpectNamed(cache->Init({dtype, 1, 4, 2}), "dtype", value);
      ExpectNamed(MakePagedPool(OfV<PagedSpec>(dtype), twin).status(),
                  "v_dtype", value);
      // The refused calls changed nothing.
      ASSERT_TRUE(cache->Init({DType::kF32, 1, 4, 2}).ok());
      const std::vector<std::int32_t> positions = {0};
      const std::vector<int> sequences = {0};
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      const float one = 1;
      const TensorView good = DenseView(&one, DType::kF32, {1, 1, 1, 1});
      TensorView bad = good;
      bad.dtype = dtype;
      ExpectNamed(cache->Put(bad, good), "key", value);
      ExpectNamed(cache->Put(good, bad), "value", value);
      EXPECT_TRUE(cache->Put(good, good).ok());
    }
  }
}

KvRows RowsOf(const Shape& shape) {
  KvRows rows;
  rows.key = FilledTensor(DType::kF32, shape, 1);
  rows.value = rows.key;
  return rows;
}

// A state with an empty slot cannot be restored, so it must not load either.
TEST(Abuse, ASlotWithoutRowsIsNotAState) {
  CacheState state;
  state.cached = true;
  state.layers[0] = RowsOf({2, 1, 3, 1});
  const auto encoder = *MakeCache(OfKind(Kind::kEncoder));
  ASSERT_TRUE(encoder->Init({DType::kF32, 1, 4, 4}).ok());
  ASSERT_TRUE(encoder->Restore(state).ok());
  ASSERT_TRUE(StateFromBytes(StateToBytes(state)).ok());
  for (DenseTensor KvRows::*empty : {&KvRows::key, &KvRows::value}) {
    CacheState bad = state;
    (bad.layers[0].*empty) = FilledTensor(DType::kF32, {2, 1, 0, 1}, 1);
    EXPECT_FALSE(encoder->Restore(bad).ok());
    EXPECT_FALSE(StateFromBytes(StateToBytes(bad)).ok());
  }
}

TEST(Abuse, TensorsWithOverflowingSizesAreRefused) {
  CacheState state;
  state.cells = {{0, 0, 0}};
  state.layers[0] = RowsOf({1, 1, 1, 1});
  ASSERT_TRUE(StateFromBytes(StateToBytes(state)).ok());
  for (const std::int64_t extent :
       {std::int64_t{1} << 62, std::int64_t{1} << 33, std::int64_t{-1},
        std::int64_t{2}}) {
    CacheState bad = state;
    bad.layers[0].key.shape[0] = extent;
    EXPECT_TRUE(StateToBytes(bad).empty()) << extent;
    CacheState wrapper;
    wrapper.caches = {state, bad};
    EXPECT_TRUE(StateToBytes(wrapper).empty()) << extent;
  }
  state.layers[0].value.dtype = static_cast<DType>(99);
  EXPECT_TRUE(StateToBytes(state).empty());
}

// Returns a cache with three tokens of sequence 0 in one layer; of a wrapper,
// in one layer of each of its caches.
std::unique_ptr<Cache> WithTokens(const CacheSpec& spec,
                                  std::string_view twin) {
  auto cache = *MakeCache(spec, twin);
  EXPECT_TRUE(cache->Init({DType::kF32, 1, 8, 4}).ok());
  const std::vector<std::int32_t> positions = {0, 1, 2};
  const std::vector<int> sequences = {0, 0, 0};
  EXPECT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  const std::vector<float> rows = {1, 2, 3};
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 3, 1});
  for (std::size_t i = 0; i < std::max<std::size_t>(1, spec.caches.size());
       ++i) {
    if (!spec.caches.empty()) {
      EXPECT_TRUE(cache->SetLayerType(AsInt(i)).ok());
    }
    EXPECT_TRUE(cache->Put(view, view).ok());
  }
  return cache;
}

TEST(Abuse, AShiftThatThrowsRefusesTheRemove) {
  const std::vector<ShiftFn> throwing = {
      [](auto&&...) -> Status { throw std::runtime_error("no cos today"); },
      [](auto&&...) -> Status { throw 7; }};
  const std::vector<std::string> said = {"no cos today", "no std::exception"};
  for (const std::string_view twin : TwinNames()) {
    for (std::size_t i = 0; i < throwing.size(); ++i) {
      const CacheSpec spec = Shifted(throwing[i]);
      for (const CacheSpec& made : {spec, Wrapped(spec)}) {
        // The first cache of a wrapper can shift.
        CacheSpec able = made;
        if (!able.caches.empty()) {
          able.caches[0].shift.kind = ShiftKind::kIdentity;
        }
        const auto cache = WithTokens(able, twin);
        const CacheState before = *cache->Snapshot();
        const Status status = cache->Remove(0, 0, 1);
        EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
        EXPECT_EQ(status.message(), "the shift function threw: " + said[i]);
        EXPECT_EQ(*cache->Snapshot(), before);
        EXPECT_TRUE(cache->Remove(0, 2, kOpenEnd).ok());
      }
    }
  }
}

// Makes every call; used inside a shift function.
std::vector<Status> CallAll(Cache& cache) {
  const std::vector<std::int32_t> positions = {3};
  const std::vector<int> sequences = {0};
  const float one = 1;
  const TensorView row = DenseView(&one, DType::kF32, {1, 1, 1, 1});
  CacheState state;
  cache.Close();
  return {cache.StartForward({positions, sequences}, false),
          cache.SetCausal({}),
          cache.SetLayer(0),
          cache.SetLayerType(0),
          cache.Put(row, row),
          cache.Get().status(),
          cache.CopyPrefix(0, 1, 1),
          cache.CanResume(0, 1).status(),
          cache.Remove(0, 0, kOpenEnd),
          cache.Remove(0, 0, 1),
          cache.EncoderCached().status(),
          cache.SnapshotTo(state),
          cache.SnapshotOf(0).status(),
          cache.Restore({}),
          cache.AddSequence(1, {})};
}

TEST(Abuse, AShiftThatCallsTheCacheIsRefused) {
  for (const std::string_view twin : TwinNames()) {
    for (const bool wrapped : {false, true}) {
      Cache* cache = nullptr;
      std::vector<Status> answers;
      CacheSpec spec = Shifted([&](auto&&...) -> Status {
        if (answers.empty()) answers = CallAll(*cache);
        return {};
      });
      if (wrapped) spec = Wrapped(spec);
      if (wrapped) spec.caches[0].shift.kind = ShiftKind::kIdentity;
      const auto made = WithTokens(spec, twin);
      cache = made.get();
      ASSERT_TRUE(cache->Remove(0, 0, 1).ok());
      ASSERT_EQ(answers.size(), 15U);
      for (const Status& status : answers) {
        EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
        EXPECT_EQ(status.message(),
                  "the cache is called by its own shift function");
      }
      EXPECT_TRUE(cache->CanResume(0, 2).ok());  // Close did nothing.
      const CacheState state = *cache->Snapshot();
      const auto& cells = wrapped ? state.caches[1].cells : state.cells;
      EXPECT_EQ(cells.size(), 2U);
    }
  }
}

// The number format of German for streams: 1.234,5.
class German : public std::numpunct<char> {
 protected:
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

// Sets the C and the C++ locale of the process while it exists.
class Abroad {
 public:
  Abroad()
      : before_(std::locale::global(
            std::locale(std::locale::classic(), new German))),
        c_before_(std::setlocale(LC_ALL, nullptr)) {
    // Uses the first that is installed; no locale is installed everywhere.
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"}) {
      if (std::setlocale(LC_ALL, name) != nullptr) break;
    }
  }
  Abroad(const Abroad&) = delete;
  Abroad& operator=(const Abroad&) = delete;
  ~Abroad() {
    std::locale::global(before_);
    std::setlocale(LC_ALL, c_before_.c_str());
  }

 private:
  std::locale before_;
  std::string c_before_;
};

template <class T>
T Read(const Result<T>& read) {
  EXPECT_TRUE(read.ok()) << read.status().message();
  return read.ok() ? *read : T();
}

// Returns every kind of text that kvtwin prints and reads.
std::string AllTexts() {
  std::string all;
  const History history = Read(ParseHistory(
      "kvt1 kind=swa window=1234 shift=rope cap=5678 dims=2,1,2 | put 0*1234 | "
      "drop 0:1-1000"));
  all += ToText(Read(ParseHistory(ToText(history))));
  const PagedHistory pool = Read(ParsePagedHistory(
      "kvp1 block=2 blocks=4 most=8000 | open 1234 5678 0 | append 0 3 1000"));
  all += ToText(Read(ParsePagedHistory(ToText(pool))));

  std::istringstream in(Lines({kHeader, kStart, kPut, kGet}));
  TraceReader reader(in);
  std::ostringstream out;
  EXPECT_TRUE(reader.ReadHeader());
  EXPECT_TRUE(WriteTraceHeader(reader.header(), out).ok());
  for (TraceOp op; reader.ReadOp(op);) {
    op.layer = 0;
    if (op.kind == TraceOpKind::kPut) {
      op.key = FilledTensor(DType::kF32, op.key.shape, 1234.5F);
    }
    EXPECT_TRUE(WriteTraceOp(op, out).ok());
  }
  all += out.str();

  CacheState state;
  state.cached = true;
  state.position = 123456;
  state.layers[0] = RowsOf({2, 1, 3, 1});
  const std::vector<std::byte> bytes = StateToBytes(state);
  const Result<CacheState> read = StateFromBytes(bytes);
  EXPECT_TRUE(read.ok() && *read == state);
  all.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return all;
}

// Returns a saved state of an exploration.
std::string Explored() {
  ExploreSize size;
  size.cells = 4;
  const ExploreCase explored = ExploreCases(size)[0];
  auto explorer = *Explorer::Make(size, explored, TwinSubject("optimized"));
  explorer->Run(
      1, [](const ExploreResult& so_far) { return so_far.transitions > 1000; });
  std::stringstream saved;
  explorer->Save(saved);
  const std::string text = saved.str();
  EXPECT_TRUE(explorer->Load(saved).ok());
  return text;
}

TEST(Abuse, ExplorationsIgnoreTheLocale) {
  const std::string at_home = Explored();
  const Abroad abroad;
  EXPECT_TRUE(Explored() == at_home);
}

TEST(Abuse, NumbersIgnoreTheLocale) {
  const std::string at_home = AllTexts();
  const Abroad abroad;
  std::ostringstream probe;
  probe << 1234567;
  ASSERT_EQ(probe.str(), "1.234.567");
  EXPECT_EQ(AllTexts(), at_home);
  JsonValue object;
  EXPECT_EQ(ParseJsonLine(R"({"a":1234.5,"b":1e3})", object), "");
  EXPECT_EQ(object.items[0].number, 1234.5);
  EXPECT_EQ(object.items[1].number, 1000);
}

// Checks the thread-safety that kvtwin/cache.h promises. TSan finds races that
// leave the bytes right.
TEST(Abuse, ManyThreadsReadAViewDuringCallsThatKeepIt) {
  for (const std::string_view twin : TwinNames()) {
    CacheSpec spec = OfKind(Kind::kSwa);
    spec.window = 2;
    const auto cache = *MakeCache(spec, twin);
    ASSERT_TRUE(cache->Init({DType::kF32, 2, 64, 32}).ok());
    std::vector<std::int32_t> positions(32);
    std::vector<int> sequences(32);
    for (int i = 0; i < 32; ++i) At(positions, i) = i;
    ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
    const DenseTensor rows = FilledTensor(DType::kF32, {8, 2, 32, 1}, 3);
    ASSERT_TRUE(cache->Put(rows.view(), rows.view()).ok());
    const KvView view = *cache->Get();
    const auto copy = [&] {
      std::vector<std::byte> bytes;
      for (const TensorView* tensor : {&view.key, &view.value, &view.mask}) {
        const auto part = CopyOf(*tensor, DType::kF32).bytes;
        bytes.insert(bytes.end(), part.begin(), part.end());
      }
      return bytes;
    };
    const std::vector<std::byte> expected = copy();
    std::atomic<bool> over = false;
    std::atomic<int> wrong = 0;
    std::vector<std::thread> readers;
    for (int i = 0; i < 4; ++i) {
      readers.emplace_back([&] {
        do {
          wrong += copy() == expected ? 0 : 1;
        } while (!over);
      });
    }
    for (int i = 1; i < 20; ++i) {
      EXPECT_TRUE(cache->SetLayer(i).ok());
      EXPECT_TRUE(cache->Put(rows.view(), rows.view()).ok());
      EXPECT_TRUE(cache->Get().ok());
      EXPECT_TRUE(cache->CopyPrefix(0, 1, i).ok());
      EXPECT_TRUE(cache->CanResume(0, i).ok());
      EXPECT_TRUE(cache->Remove(1, 0, kOpenEnd).ok());
      EXPECT_TRUE(cache->Snapshot().ok());
      EXPECT_TRUE(cache->SnapshotOf(0).ok());
    }
    over = true;
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(wrong, 0) << twin;
  }
}

}  // namespace
}  // namespace kvtwin::props
