// The laws hold for each twin, can be broken, and are listed in docs/laws.md.

#include "props/laws/laws.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <map>
#include <set>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/mask_elements.h"
#include "props/base/forwarding_cache.h"
#include "props/laws/alike.h"
#include "props/laws/pool_laws.h"
#include "props/testing/arbitrary.h"
#include "props/testing/tampered_cache.h"

namespace kvtwin::props {
namespace {

struct LawOfTwin {
  const Law* law;
  std::string_view twin;
};

std::vector<LawOfTwin> Cases() {
  std::vector<LawOfTwin> cases;
  for (const Law& law : Laws()) {
    const bool states = (law.needs & (kNeedsStates | kNeedsDrafts)) != 0;
    for (const std::string_view twin : TwinNames()) {
      // The twin cuda refuses recurrent caches and drafts.
      if (twin != "cuda" || !states) cases.push_back({&law, twin});
    }
  }
  return cases;
}

class LawProps : public ::testing::TestWithParam<LawOfTwin> {};
INSTANTIATE_TEST_SUITE_P(All, LawProps, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<LawOfTwin>& info) {
                           return fmt::format("{}_{}", info.param.law->name,
                                              info.param.twin);
                         });

TEST_P(LawProps, Holds) {
  const Law* law = GetParam().law;
  const Subject subject = TwinSubject(GetParam().twin);
  std::int64_t judged = 0;
  EXPECT_TRUE(rc::check(std::string(law->statement), [&] {
    const History history = *ArbitraryHistory(std::nullopt, 20);
    const LawResult result = Judge(*law, history, subject);
    judged += result.judged;
    if (!result.failure) return;
    RC_FAIL(result.failure->text + "\n  rerun   " +
            LawCommand(*law, ShrinkUnderLaw(*law, history, subject), subject));
  }));
  // A law that never judges anything would be useless.
  EXPECT_GT(judged, 0);
}

TEST(Laws, AreListedInTheDocs) {
  std::ifstream in(KVTWIN_DOCS "/laws.md");
  std::vector<std::string> listed;
  bool in_law = false;
  for (std::string line; std::getline(in, line);) {
    const bool continues = in_law && line.starts_with("  ");
    if (continues) listed.back() += line.substr(1);
    in_law = continues || line.starts_with("- **");
    if (in_law && !continues) listed.push_back(line);
  }
  std::vector<std::string> expected;
  for (const Law& law : Laws()) {
    expected.push_back(
        fmt::format("- **{}** {} ({})", law.name, law.statement, law.rules));
  }
  for (const PoolLaw& law : PoolLaws()) {
    expected.push_back(
        fmt::format("- **{}** {} ({})", law.name, law.statement, law.rules));
  }
  EXPECT_EQ(listed, expected);
}

// The optimized twin with one bug.
class Broken : public ForwardingCache {
 public:
  explicit Broken(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "optimized")) {}
};

// The bug is a different spec.
template <void (*change)(CacheSpec&)>
class OtherSpec : public Broken {
 public:
  explicit OtherSpec(CacheSpec spec) : Broken(Changed(std::move(spec))) {}

 private:
  static CacheSpec Changed(CacheSpec spec) {
    for (CacheSpec& part : spec.caches) change(part);
    change(spec);
    return spec;
  }
};

void ShiftNothing(CacheSpec& spec) {
  if (spec.shift.kind != ShiftKind::kNone) {
    spec.shift.kind = ShiftKind::kIdentity;
  }
}

void SeeOneMore(CacheSpec& spec) {
  if (spec.window) ++*spec.window;
  if (spec.memory) ++*spec.memory;
}

void ShiftIfScattered(CacheSpec& spec) {
  if (spec.placement == Placement::kScatter) {
    spec.shift.kind = ShiftKind::kIdentity;
  }
}

class CopyCutsTheSource : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = cache_->CopyPrefix(src, dst, len);
    if (!status.ok() || src == dst) return status;
    return cache_->Remove(src, len, kOpenEnd);
  }
};

class CopyStopsShort : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, len > 1 ? len - 1 : len);
  }
};

// The same copy a second time undoes it.
class CopyToggles : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    const std::array<int, 3> copy = {src, dst, len};
    const bool again = copy == last_;
    last_ = again ? std::array<int, 3>() : copy;
    Status status = cache_->CopyPrefix(src, dst, len);
    if (!status.ok() || !again) return status;
    return cache_->Remove(dst, 0, kOpenEnd);
  }

 private:
  std::array<int, 3> last_ = {0, 0, 0};
};

class ClearTakesTheSource : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    source_[dst] = src;
    return cache_->CopyPrefix(src, dst, len);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const auto source = source_.find(seq);
    if (begin == 0 && end == kOpenEnd && source != source_.end()) {
      static_cast<void>(cache_->Remove(source->second, 0, kOpenEnd).ok());
    }
    return cache_->Remove(seq, begin, end);
  }

 private:
  std::map<int, int> source_;  // The source of each copy.
};

class SequenceZeroIsSpecial : public Broken {
 public:
  using Broken::Broken;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() && seq == 0 ? Result<bool>(false) : can;
  }
};

class LongRemovesTakeMore : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool takes = end != kOpenEnd && end - begin > 1;
    return cache_->Remove(seq, begin, takes ? end + 1 : end);
  }
};

class OpenRemoveKeepsOne : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool keeps = end == kOpenEnd && begin % 2 == 1;
    return cache_->Remove(seq, begin + (keeps ? 1 : 0), end);
  }
};

class EmptyRemoveShifts : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool shifts = begin == end && end > 0 && end < kOpenEnd;
    return cache_->Remove(seq, shifts ? begin - 1 : begin, end);
  }
};

class RefusedRemoveCuts : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    Status status = cache_->Remove(seq, begin, end);
    if (status.code() == StatusCode::kSharedCells) {
      static_cast<void>(cache_->Remove(seq, begin, kOpenEnd).ok());
    }
    return status;
  }
};

// Stores the first token of a refused batch, if that is the first StartForward.
class FirstRefusalStores : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = cache_->StartForward(batch, reserve);
    if (std::exchange(first_, false) &&
        status.code() == StatusCode::kCacheFull) {
      static_cast<void>(cache_->StartForward(
          {batch.positions.first(1), batch.sequences.first(1), {}}, reserve));
    }
    return status;
  }

 private:
  bool first_ = true;
};

// Ignores a Remove of a whole sequence.
class ClearsNothing : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    if (begin == 0 && end == kOpenEnd) return {};
    return cache_->Remove(seq, begin, end);
  }
};

class ResumesAnywhere : public Broken {
 public:
  using Broken::Broken;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() ? Result<bool>(true) : can;
  }
};

class AskingCuts : public Broken {
 public:
  using Broken::Broken;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    Result<bool> can = cache_->CanResume(seq, pos);
    if (pos > 0) {
      static_cast<void>(cache_->Remove(seq, pos - 1, kOpenEnd).ok());
    }
    return can;
  }
};

class AnswersByTheHour : public Broken {
 public:
  using Broken::Broken;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    static int hour = 0;
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() ? Result<bool>(++hour % 2 == 0) : can;
  }
};

class ReserveStores : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    return cache_->StartForward(batch, reserve && batch.positions.size() < 2);
  }
};

class FullTooEarly : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    std::vector<CellEntry> cells;
    ListCells(cells);
    if (!reserve && CellCount() > 1 && std::ssize(cells) + 1 == CellCount()) {
      return {StatusCode::kCacheFull, "one cell is not enough"};
    }
    return cache_->StartForward(batch, reserve);
  }
};

class FirstSeesAhead : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = cache_->StartForward(batch, reserve);
    const std::array<int, 1> first = {0};
    if (status.ok()) static_cast<void>(cache_->SetCausal(first).ok());
    return status;
  }
};

class KeepsExceptions : public Broken {
 public:
  using Broken::Broken;
  Status SetCausal(std::span<const int> except) override {
    if (except.empty()) return {};
    return cache_->SetCausal(except);
  }
};

class FirstPutCounts : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    put_.clear();
    return cache_->StartForward(batch, reserve);
  }
  Status SetLayer(int layer) override {
    layer_ = layer;
    return cache_->SetLayer(layer);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    if (!put_.insert(layer_).second) return {};
    return cache_->Put(key, value);
  }

 private:
  std::set<int> put_;
  int layer_ = 0;
};

class IgnoresStrides : public Broken {
 public:
  using Broken::Broken;
  Status Put(const TensorView& key, const TensorView& value) override {
    return cache_->Put(DenseView(key.data, key.dtype, key.shape), value);
  }
};

// Truncates V to f16 precision instead of rounding it.
class Truncates : public Broken {
 public:
  using Broken::Broken;
  Status Put(const TensorView& key, const TensorView& value) override {
    if (value.data == nullptr || value.dtype != DType::kF32) {
      return cache_->Put(key, value);
    }
    DenseTensor cut = CopyOf(value, DType::kF32);
    for (std::size_t at = 0; at < cut.bytes.size(); at += 4) {
      cut.bytes[at] = std::byte{0};  // Little endian.
      cut.bytes[at + 1] &= std::byte{0xE0};
    }
    return cache_->Put(key, cut.view());
  }
};

// Rounds to f16 correctly, except that ties go away from zero.
class RoundsTiesAway : public Broken {
 public:
  using Broken::Broken;
  Status Init(const InitArgs& args) override {
    is_f16_ = args.dtype == DType::kF16;
    return cache_->Init(args);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    if (!is_f16_ || key.data == nullptr || key.dtype != DType::kF32) {
      return cache_->Put(key, value);
    }
    DenseTensor rows = CopyOf(key, DType::kF32);
    for (std::size_t at = 0; at < rows.bytes.size(); at += sizeof(float)) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &rows.bytes[at], sizeof(bits));
      const std::uint32_t exponent = bits >> 23 & 0xFF;
      const bool normal = exponent > 112 && exponent < 142;
      if (normal && (bits & 0x1FFF) == 0x1000) bits += 0x1000;
      std::memcpy(&rows.bytes[at], &bits, sizeof(bits));
    }
    return cache_->Put(rows.view(), value);
  }

 private:
  bool is_f16_ = false;
};

class IgnoresPadding : public Broken {
 public:
  using Broken::Broken;
  Status SetConfig(const CacheConfig& config) override {
    CacheConfig other = config;
    if (config.cache_padding > 0) other.cache_padding = 1;
    return cache_->SetConfig(other);
  }
};

class ForgetsToClose : public Broken {
 public:
  using Broken::Broken;
  void Close() override {}
};

class OnePartForAll : public Broken {
 public:
  using Broken::Broken;
  Status SetLayerType(int type) override {
    return cache_->SetLayerType(std::min(type, 0));
  }
};

class RestoresElsewhere : public Broken {
 public:
  using Broken::Broken;
  Status Restore(const CacheState& state) override {
    CacheState other = state;
    for (CellEntry& entry : other.cells) ++entry.position;
    return cache_->Restore(other);
  }
};

// Changes the cache's mask.
class Remasked : public Broken {
 public:
  using Broken::Broken;
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || view->mask.data == nullptr) return view;
    mask_ = CopyOf(view->mask, view->mask.dtype);
    Change(view->first_cell);
    view->mask = mask_.view();
    return view;
  }

 protected:
  virtual void Change(int first_cell) = 0;

  DenseTensor mask_;
};

class ShowsFreeCells final : public Remasked {
 public:
  using Remasked::Remasked;

 private:
  void Change(int first_cell) override {
    std::vector<CellEntry> used;
    ListCells(used);
    for (int column = 0; column < mask_.shape[0]; ++column) {
      const bool free = std::none_of(used.begin(), used.end(), [&](auto& one) {
        return one.cell == first_cell + column;
      });
      if (free) AllowInMask(mask_, column, 0);
    }
  }
};

class HidesTheFirstCell final : public Remasked {
 public:
  using Remasked::Remasked;

 private:
  void Change(int) override {
    const DenseTensor shown = mask_;
    mask_ = HidingMask(shown.dtype, shown.shape[0], shown.shape[1]);
    for (std::int64_t row = 0; row < shown.shape[1]; ++row) {
      for (std::int64_t column = 0; column < shown.shape[0]; ++column) {
        const bool first = column == 0 && row == 0;
        if (first || !MaskAllows(shown.view(), column, row)) continue;
        AllowInMask(mask_, column, row);
      }
    }
  }
};

template <class Backend>
Subject BrokenSubject() {
  return {.name = "broken",
          .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
            Result<std::unique_ptr<Cache>> cache = MakeCache(spec, "optimized");
            if (!cache.ok()) return cache.status();
            return std::unique_ptr<Cache>(std::make_unique<Backend>(spec));
          },
          .can_be_poisoned = true};
}

template <class Backend>
void Breaks(const std::vector<std::string_view>& laws) {
  const Subject subject = BrokenSubject<Backend>();
  for (const std::string_view name : laws) {
    const Law* law = FindLaw(name);
    ASSERT_NE(law, nullptr) << name;
    const LawRun run = RunLaw(*law, subject, /*seed=*/1, /*histories=*/300);
    ASSERT_TRUE(run.failure.has_value()) << name;
    EXPECT_LE(run.shrunk.ops.size(), 4U) << name << ": " << ToText(run.shrunk);
    EXPECT_FALSE(run.failure->text.empty());
    EXPECT_GT(Judge(*law, run.shrunk, subject).judged, 0) << name;
  }
}

// In turn, each cache of a wrapper lacks a token that no row sees.
TEST(Laws, CompareTheTokensOfEachCacheOfAWrapper) {
  const Script script = Resolve(*ParseHistory(
      "kvt1 kind=wrapper caches=swa:w2/causal layers=2 | put 1*1 | put 0*2"));
  for (const int type : {-1, 0, 1}) {
    Fault fault;
    fault.type = type;
    if (type >= 0) {
      fault.cells = [](std::vector<CellEntry>& cells) {
        std::erase_if(cells, [](const auto& one) { return one.sequence == 1; });
      };
    }
    Subject faulty;
    faulty.name = "faulty";
    faulty.make = [=](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
      auto cache = MakeCache(spec, "reference");
      return std::unique_ptr<Cache>(
          std::make_unique<TamperedCache>(std::move(*cache), fault));
    };
    auto left = Session::Open(script.setup, TwinSubject("reference"));
    auto right = Session::Open(script.setup, faulty);
    ASSERT_TRUE(left && right);
    for (const Call& call : script.calls) {
      ASSERT_TRUE(left->Do(call) == right->Do(call));
    }
    EXPECT_EQ(Compare(*left, *right, Alike::kTokens, 0).has_value(), type >= 0)
        << type;
  }
}

// Each of these histories broke a law for both twins when scripts of `reload`
// had a removal from another cache, and no loaded state.
TEST(Laws, HoldWhereStatesAreLoaded) {
  for (const char* line :
       {"kvt1 cells=2 | put 1*2 | reload | put 0*1",
        "kvt1 cells=2 | put 1*2 | reload | reload | put 0*1",
        "kvt1 kind=swa window=1 cells=5 | put 0*1 | put 0*2 | put 0*3 | "
        "put 0*3 | put 0*3 | reload | put 0*2@-1= | put 0*3",
        "kvt1 cells=8 | put 0*2 | add 0>1 | put 1*2 | drop 0:0- | put 2*1",
        "kvt1 cells=8 layers=2 | put 0*2 | put 1*1 | add 0>2 | put 2*2",
        "kvt1 kind=wrapper caches=swa:w2/causal layers=2 | put 0*3 | "
        "add 0>1 | reload | put 1*2 | add 1>2 | put 2*1"}) {
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << line << history.status().ToString();
    for (const Law& law : Laws()) {
      for (const std::string_view twin : TwinNames()) {
        EXPECT_FALSE(Judge(law, *history, TwinSubject(twin)).failure)
            << law.name << " " << twin << ": " << line;
      }
    }
  }
}

std::vector<std::string> CallsOf(const std::string& line) {
  const Result<History> history = ParseHistory(line);
  EXPECT_TRUE(history.ok()) << line;
  std::vector<std::string> calls;
  if (!history.ok()) return calls;
  for (const Call& call : Resolve(*history).calls) {
    calls.push_back(ToText(call));
  }
  return calls;
}

// A script has every call that changes the cache, in the order of the history,
// and no call of another cache in between.
TEST(Laws, ScriptsHaveEveryCallThatChangesTheCache) {
  EXPECT_EQ(
      CallsOf("kvt1 | put 0*2 | causal 0 | copy 0>1:1 | drop 0:0- | "
              "ask 1@1 | reload | add 1>2 | reload | snapshot 1 | "
              "start 3*1 | layer 0 | store | except 0 | drop 1:0-1"),
      std::vector<std::string>(
          {"StartForward(positions [0 1], sequences [0 0])", "Put(layer 0)",
           "SetCausal([0])", "CopyPrefix(0, 1, 1)", "Remove(0, 0, open)",
           "CanResume(1, 1)", "Restore(its own Snapshot)",
           "AddSequence(2, SnapshotOf(1))", "Restore(its own Snapshot)",
           "StartForward(positions [0], sequences [3])", "Put(layer 0)",
           "SetCausal([0])", "Remove(1, 0, 1)"}));
}

// A legal client continues only where its window is still stored: here the last
// positions leave, in the middle of a window and at the end of a sequence.
TEST(Laws, WindowsHideNothingElseFromALegalClient) {
  for (const char* line :
       {"kvt1 kind=wrapper caches=swa:w1:identity/causal:identity cells=3 "
        "| put 0*2 | put 0*1 | drop 0:1-3 | put 0*1",
        "kvt1 kind=swa window=4 shift=identity seqs=1 cap=12 batch=8 "
        "| put 0*8 | put 0*1 | drop 0:6-8 | put 0*2"}) {
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    const LawResult result =
        Judge(*FindLaw("window_hides"), *history, TwinSubject("reference"));
    EXPECT_FALSE(result.failure) << line;
    EXPECT_GT(result.judged, 0) << line;
  }
}

// Only K has blocks: the V row of a token is shorter than a block, or permuted.
TEST(Laws, RoundingIsJudgedWhereOnlyVIsF32) {
  for (const char* line :
       {"kvt1 dtype=q8_0 vdtype=f32 dims=32,1,3 | put 0*2",
        "kvt1 dtype=q8_0 vdtype=f32 dims=32,1,3 permuted=1 | put 0*2",
        "kvt1 dtype=bf16 vdtype=f32 | put 0*2"}) {
    const LawResult result = Judge(*FindLaw("rounding"), *ParseHistory(line),
                                   TwinSubject("reference"));
    EXPECT_FALSE(result.failure) << line;
    EXPECT_GT(result.judged, 0) << line;
  }
}

template <class Backend>
std::string ViolationOf(std::string_view law, const std::string& line) {
  const LawResult result =
      Judge(*FindLaw(law), *ParseHistory(line), BrokenSubject<Backend>());
  return result.failure ? result.failure->text : "";
}

TEST(Laws, RefusalsAreJudgedFromTheFirstCallOn) {
  const std::string wrong = ViolationOf<FirstRefusalStores>(
      "refusals", "kvt1 cells=1 batch=2 | put 0*1 1*1");
  EXPECT_NE(wrong.find("is refused, but stores tokens"), wrong.npos) << wrong;
}

// The second prompt and the first have no tokens in common.
TEST(Laws, ALegalClientClearsASequenceBeforeReuse) {
  const std::string wrong = ViolationOf<ClearsNothing>(
      "legal_client",
      "kvt1 shift=identity seqs=1 cap=2 batch=2 | put 0*2 "
      "| drop 0:0- | put 0*2");
  EXPECT_NE(wrong.find("cache_full"), wrong.npos) << wrong;
}

// Each law can fail.
TEST(Laws, SequenceLawsFailForFaultyCaches) {
  Breaks<CopyCutsTheSource>({"frame"});
  Breaks<CopyStopsShort>({"replay", "copy_shows"});
  Breaks<SequenceZeroIsSpecial>({"renaming"});
  Breaks<CopyToggles>({"copy_twice"});
  Breaks<ClearTakesTheSource>({"copy_then_clear"});
  Breaks<LongRemovesTakeMore>({"remove_splits"});
  Breaks<OpenRemoveKeepsOne>({"remove_open"});
  Breaks<OtherSpec<ShiftNothing>>({"shift_back"});
  Breaks<EmptyRemoveShifts>({"offset_zero"});
  Breaks<ResumesAnywhere>({"resume_is_honest"});
}

// Puts the state before a token in the place of the state after it.
class PutsTheStateBefore : public Broken {
 public:
  using Broken::Broken;
  Status Put(const TensorView& key, const TensorView& value) override {
    if (value.data == nullptr || value.shape[2] < 2) {
      return cache_->Put(key, value);
    }
    TensorView rows = value;
    rows.stride[2] = 0;
    return cache_->Put(key, rows);
  }
};

// Commits only the first draft of a path.
class CommitStopsShort : public Broken {
 public:
  using Broken::Broken;
  Status Commit(int seq, std::span<const int> path) override {
    return cache_->Commit(seq,
                          path.first(std::min<std::size_t>(path.size(), 1)));
  }
};

class PinsNothing : public Broken {
 public:
  using Broken::Broken;
  Status Checkpoint(int) override { return {}; }
};

// A hybrid whose caches copy as far as each of them can.
void BeAWrapper(CacheSpec& spec) {
  if (spec.kind == Kind::kHybrid) spec.kind = Kind::kWrapper;
}

TEST(Laws, StateLawsFailForFaultyCaches) {
  Breaks<OpenRemoveKeepsOne>({"state_is_a_fold", "one_length"});
  Breaks<PutsTheStateBefore>({"state_is_a_fold"});
  Breaks<CopyStopsShort>({"policy_is_invisible"});
  Breaks<CommitStopsShort>({"drafts_are_folds"});
  Breaks<PinsNothing>({"pins_stay"});
  Breaks<OtherSpec<BeAWrapper>>({"one_length"});
}

TEST(Laws, PassLawsFailForFaultyCaches) {
  Breaks<FirstSeesAhead>({"batch_splitting", "visibility"});
  Breaks<ReserveStores>({"reserve"});
  Breaks<FullTooEarly>({"fullness", "legal_client", "capacity_returns"});
  Breaks<KeepsExceptions>({"causal_last"});
  Breaks<FirstPutCounts>({"put_last"});
  Breaks<AskingCuts>({"asking"});
  Breaks<RefusedRemoveCuts>({"refusals"});
  Breaks<AnswersByTheHour>({"repeatable"});
  Breaks<ForgetsToClose>({"close_is_final"});
  Breaks<OtherSpec<SeeOneMore>>({"window_hides"});
}

TEST(Laws, StorageLawsFailForFaultyCaches) {
  Breaks<OtherSpec<ShiftIfScattered>>({"placement_is_invisible"});
  Breaks<HidesTheFirstCell>({"defrag_is_invisible", "cell_order"});
  Breaks<IgnoresStrides>({"layouts"});
  Breaks<IgnoresPadding>({"padding"});
  Breaks<Truncates>({"rounding"});
  Breaks<RoundsTiesAway>({"rounding"});
  Breaks<ShowsFreeCells>({"poison_never_shows"});
  Breaks<OnePartForAll>({"wrapper_parts"});
  Breaks<RestoresElsewhere>({"snapshot_is_all"});
}

}  // namespace
}  // namespace kvtwin::props
