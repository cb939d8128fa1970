// Third-party caches: laws and clients make only calls that a cache declares
// and allows, and laws find its faults.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/base/optional_calls.h"
#include "props/compare/runner.h"
#include "props/history/generate.h"
#include "props/laws/laws.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

// The optimized twin as a cache that appends to one sequence at a time, removes
// their ends and, if it can, copies prefixes and removes ranges. A range that
// it refuses to remove must be followed by the removal of the whole sequence.
// Every other call throws. (It does not list its cells, as ForwardingCache
// would: this is for visibility.)
class Plain final : public ForwardingCache {
 public:
  Plain(std::unique_ptr<Cache> cache, int layers, const Abilities& can)
      : ForwardingCache(std::move(cache)), layers_(layers), can_(can) {}

  Status SetLayer(int layer) override {
    layer_ = layer;
    return ForwardingCache::SetLayer(layer);
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    Never(reserve, "a pass that reserves");
    Never(half_ >= 0, "a batch before a sequence was cleared");
    Never(started_ && std::ssize(put_) != layers_,
          "a batch before the rows of the last one");
    int& length = lengths_[batch.sequences[0]];
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      Never(batch.sequences[i] != batch.sequences[0], "a batch of two");
      Never(batch.positions[i] != length++, "another position than the next");
    }
    put_.clear();
    Status status = ForwardingCache::StartForward(batch, reserve);
    started_ = status.ok();
    return status;
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    Never(!put_.insert(layer_).second, "a second Put");
    return ForwardingCache::Put(key, value);
  }
  Result<KvView> Get() override {
    Never(std::ssize(put_) != layers_, "Get before the last Put");
    Never(half_ >= 0, "Get before a sequence was cleared");
    return ForwardingCache::Get();
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool open = end == kOpenEnd;
    Never(!open && !can_.Can(KVTWIN_CAN_REMOVE_MIDDLE), "a range");
    Never(half_ >= 0 && !(seq == half_ && begin == 0 && open),
          "Remove before a sequence was cleared");
    Status status = ForwardingCache::Remove(seq, begin, end);
    half_ = status.ok() ? -1 : seq;
    if (!status.ok()) return status;
    int& length = lengths_[seq];
    length -= std::max(0, std::min(end, length) - begin);
    return status;
  }
  Status SetCausal(std::span<const int>) override { Throw("SetCausal"); }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Never(!can_.Can(KVTWIN_CAN_COPY_PREFIX), "a copy");
    Never(src == dst, "a copy to itself");
    Never(half_ >= 0, "a copy before a sequence was cleared");
    lengths_[dst] = std::min(len, lengths_[src]);
    return ForwardingCache::CopyPrefix(src, dst, len);
  }
  Result<bool> CanResume(int, std::int32_t) override { Throw("CanResume"); }
  Status SnapshotTo(CacheState&) const override { Throw("a snapshot"); }
  Status Restore(const CacheState&) override { Throw("a restore"); }
  void ListCells(std::vector<CellEntry>&) const override { Throw("cells"); }

 private:
  [[noreturn]] static void Throw(const char* what) {
    throw std::logic_error(std::string("it was asked for ") + what);
  }
  static void Never(bool asked, const char* what) {
    if (asked) Throw(what);
  }

  int layers_;
  const Abilities can_;
  int layer_ = 0;
  int half_ = -1;  // The sequence that must be cleared.
  std::map<int, int> lengths_;
  bool started_ = false;
  std::set<int> put_;
};

// `window`: what it makes of one. With these abilities, too.
Subject PlainSubject(int window = 0, std::uint32_t more = 0) {
  Subject subject;
  subject.name = "plain";
  subject.level = Level::kVisibility;
  subject.make_of =
      [window, more](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    CacheSpec spec = setup.spec;
    if (spec.window) *spec.window += window;
    Result<std::unique_ptr<Cache>> cache = MakeCache(spec, "optimized");
    if (!cache.ok()) return cache.status();
    return std::unique_ptr<Cache>(std::make_unique<Plain>(
        std::move(*cache), setup.layers, Abilities{.can = more}));
  };
  subject.abilities = {
      .kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA,
      .can = KVTWIN_CAN_REMOVE_TAIL | more,
      .cannot = KVTWIN_CANNOT_COPY_TO_ITSELF | KVTWIN_CANNOT_UNDO_REMOVE,
      .can_resume = false,
      .set_causal = false,
      .shift = false,
      .snapshots = false};
  return subject;
}

TEST(LawsOfThirdPartyCaches, CallOnlyDeclaredOperations) {
  const Subject plain = PlainSubject();
  std::map<std::string_view, std::int64_t> judged;
  for (const Law& law : Laws()) {
    const LawRun run = RunLaw(law, plain, /*seed=*/1, /*histories=*/200);
    EXPECT_FALSE(run.failure)
        << law.name << ": " << run.failure->text << " " << ToText(run.shrunk);
    const bool none = !WhyNotJudged(law, plain).empty();
    EXPECT_EQ(run.judged == 0, none) << law.name;
    judged[law.name] = run.judged;
  }
  for (const char* law : {"frame", "renaming", "batch_splitting", "asking",
                          "visibility", "window_hides", "legal_client"}) {
    EXPECT_GT(judged[law], 100) << law;
  }
  EXPECT_EQ(WhyNotJudged(*FindLaw("snapshot_is_all"), plain),
            "the backend has no snapshot and restore and is not held to "
            "identity, and the law asks for cells or states");
  EXPECT_EQ(WhyNotJudged(*FindLaw("copy_twice"), plain),
            "the backend has no copy_prefix");
}

TEST(LawsOfThirdPartyCaches, ClearASequenceBeforeUsingIt) {
  const Subject sharing = PlainSubject(
      /*window=*/0,
      KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE | KVTWIN_CAN_REMOVE_MIDDLE);
  for (const Law& law : Laws()) {
    const LawRun run = RunLaw(law, sharing, /*seed=*/1, /*histories=*/150);
    EXPECT_FALSE(run.failure)
        << law.name << ": " << run.failure->text << " " << ToText(run.shrunk);
    EXPECT_EQ(run.judged == 0, !WhyNotJudged(law, sharing).empty()) << law.name;
  }
}

// The mask of a recurrent cache shows its state (R6), and no tokens.
TEST(LawsOfThirdPartyCaches, OfTokensAreNotJudgedOnRecurrentCaches) {
  Subject mixed = PlainSubject(0, KVTWIN_CAN_REMOVE_MIDDLE);
  mixed.abilities.kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_RECURRENT;
  Subject recurrent = mixed;
  recurrent.abilities.kinds = KVTWIN_HAS_RECURRENT;
  for (const char* name : {"visibility", "window_hides", "batch_splitting"}) {
    const Law& law = *FindLaw(name);
    const LawRun run = RunLaw(law, mixed, /*seed=*/1, /*histories=*/100);
    EXPECT_FALSE(run.failure) << name << ": " << run.failure->text;
    EXPECT_GT(run.judged, 100) << name;
    EXPECT_EQ(WhyNotJudged(law, recurrent),
              "the backend has no attention caches");
    const History history = *ParseHistory("kvt1 kind=recurrent | put 0*2");
    EXPECT_EQ(Judge(law, history, mixed).judged, 0) << name;
  }
  EXPECT_EQ(WhyNotJudged(*FindLaw("frame"), recurrent), "");
}

// Each law holds for our twins on recurrent caches, alone and in other caches.
TEST(Laws, HoldOnRecurrentCaches) {
  for (const std::string_view twin : {"reference", "optimized"}) {
    const Subject subject = TwinSubject(twin);
    for (const Law& law : Laws()) {
      std::int64_t judged = 0;
      for (std::uint64_t number = 0; number < 40; ++number) {
        const Kind kind = number % 2 == 0 ? Kind::kRecurrent : Kind::kHybrid;
        History history = MakeHistory(/*seed=*/1, number, kind, /*ops=*/20);
        if (!HasStates(history.setup.spec)) continue;
        if (number % 4 == 3) history.setup.spec.kind = Kind::kWrapper;
        const LawResult result = Judge(law, history, subject);
        judged += result.judged;
        EXPECT_FALSE(result.failure) << law.name << " " << ToText(history)
                                     << ": " << result.failure->text;
      }
      // The laws of drafts play on attention caches of their own.
      const bool states = (law.needs & (kNeedsTokens | kNeedsDrafts)) == 0 ||
                          (law.needs & kNeedsStates) != 0;
      EXPECT_EQ(judged > 0, states) << law.name;
    }
  }
}

TEST(LawsOfThirdPartyCaches, AllowColumnsInAnotherOrderAtEachGet) {
  const auto turned = std::make_shared<bool>(false);
  const Subject twin = Tampered(Shows([=](OwnedView& view) {
                                  if (*turned) TurnColumns(view);
                                  *turned = !*turned;
                                }),
                                Level::kVisibility);
  Subject turning = twin;
  turning.make_of = [=](const props::Setup& setup) {
    return twin.make(setup.spec);
  };
  turning.abilities = {
      .kinds = KVTWIN_HAS_CAUSAL, .v_layouts = 1, .mask_dtypes = 1};
  const LawRun run =
      RunLaw(*FindLaw("refusals"), turning, /*seed=*/1, /*histories=*/50);
  EXPECT_FALSE(run.failure) << run.failure->text << " " << ToText(run.shrunk);
  EXPECT_GT(run.judged, 100);
}

TEST(LawsOfThirdPartyCaches, FailForAWindowThatIsTooWide) {
  const Subject wide = PlainSubject(/*window=*/1);
  for (const char* name : {"visibility", "window_hides"}) {
    const Law& law = *FindLaw(name);
    const LawRun run = RunLaw(law, wide, /*seed=*/1, /*histories=*/200);
    ASSERT_TRUE(run.failure) << name;
    EXPECT_LE(run.shrunk.ops.size(), 2U) << ToText(run.shrunk);
    EXPECT_TRUE(Judge(law, run.shrunk, wide).failure);
  }
}

// At visibility, without batches in any order and without passes that reserve.
TEST(LawsOfThirdPartyCaches, FailForKRowsThatAreNotShifted) {
  Subject forgets = PlainSubject(/*window=*/0, KVTWIN_CAN_REMOVE_MIDDLE);
  const Law& law = *FindLaw("shift_back");
  const LawRun right = RunLaw(law, forgets, /*seed=*/1, /*histories=*/200);
  EXPECT_FALSE(right.failure) << right.failure->text;
  EXPECT_GT(right.judged, 100);
  forgets.make_of = [make = forgets.make_of](const props::Setup& setup) {
    props::Setup without = setup;
    const bool shifts = setup.spec.shift.kind != ShiftKind::kNone;
    if (shifts) without.spec.shift.kind = ShiftKind::kIdentity;
    return make(without);
  };
  const LawRun run = RunLaw(law, forgets, /*seed=*/1, /*histories=*/200);
  ASSERT_TRUE(run.failure);
  EXPECT_NE(run.failure->text.find("another K row"), std::string::npos)
      << run.failure->text;
}

TEST(LawsOfThirdPartyCaches, NameAllThatIsMissingAtOnce) {
  EXPECT_EQ(WhyNotJudged(*FindLaw("copy_shows"), PlainSubject()),
            "the backend has no copy_prefix and does not say "
            "KVTWIN_CAN_RESERVE and does not say KVTWIN_CAN_ANY_ORDER and is "
            "not held to identity, and the law asks for cells or states");
}

// A judge somewhere else is asked instead, in haste once it is known to hang.
TEST(LawsOfThirdPartyCaches, CanBeJudgedByAnotherProcess) {
  std::vector<bool> hurried;
  const LawJudge hangs = [&](const Law&, const History& history,
                             bool known_to_hang) {
    hurried.push_back(known_to_hang);
    LawResult result{.judged = 1};
    if (!history.ops.empty()) {
      result.failure = MakeFailure("backend: hang", "put is slow");
    }
    return result;
  };
  const Law& law = *FindLaw("frame");
  const LawRun run =
      RunLaw(law, PlainSubject(), /*seed=*/1, /*histories=*/9, hangs);
  ASSERT_TRUE(run.failure);
  EXPECT_EQ(run.shrunk.ops.size(), 1U);
  EXPECT_EQ(run.failure->check, "backend: hang");
  ASSERT_GT(hurried.size(), 4U);
  EXPECT_FALSE(hurried[0] || hurried.back());
  EXPECT_TRUE(hurried[hurried.size() - 2]);
}

// Writes down the copies, removals and questions of a client.
class Noting : public ForwardingCache {
 public:
  Noting(std::unique_ptr<Cache> cache, std::string& calls)
      : ForwardingCache(std::move(cache)), calls_(calls) {}

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    calls_ += "copy " + std::to_string(len) + ", ";
    return cache_->CopyPrefix(src, dst, len);
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    calls_ += "ask " + std::to_string(pos) + ", ";
    return cache_->CanResume(seq, pos);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    calls_ += "remove " + std::to_string(begin) + ", ";
    return cache_->Remove(seq, begin, end);
  }

 private:
  std::string& calls_;
};

// Returns the calls for a copy to itself of a sequence of 6 tokens, of which
// the window keeps the last 2.
std::string CallsOfCopy(std::uint32_t can, std::uint32_t cannot,
                        const std::string& len) {
  std::string calls;
  Subject subject;
  subject.name = "noting";
  subject.level = Level::kVisibility;
  subject.abilities.can = can;
  subject.abilities.cannot = cannot;
  subject.make_of = [&](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(
        std::make_unique<Noting>(*MakeCache(setup.spec, "reference"), calls));
  };
  const History history = *ParseHistory(
      "kvt1 kind=swa window=1 seqs=1 cap=8 batch=8 legal=1 | put 0*5 | put 0*1 "
      "| copy 0>0:" +
      len);
  EXPECT_FALSE(RunHistory(history, subject).failure.has_value());
  return calls;
}

TEST(LegalClient, CutsASequenceOnlyWhereItCanContinue) {
  constexpr std::uint32_t kCopies = KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE;
  EXPECT_EQ(CallsOfCopy(kCopies, 0, "5"), "ask 5, copy 5, ask 5, ");
  EXPECT_EQ(CallsOfCopy(kCopies, 0, "2"), "ask 2, ");
  EXPECT_EQ(CallsOfCopy(kCopies, 0, "6"), "copy 6, ask 6, ");
  // Without the ability to share, the whole sequence is copied.
  EXPECT_EQ(CallsOfCopy(KVTWIN_CAN_COPY_PREFIX, 0, "5"),
            "ask 5, copy 6, ask 6, ");
}

TEST(LegalClient, ClearsNoSequenceForACopyThatItDoesNotMake) {
  EXPECT_EQ(CallsOfCopy(KVTWIN_CAN_REMOVE_TAIL, 0, "2").find("remove"),
            std::string::npos);
  EXPECT_EQ(CallsOfCopy(KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_REMOVE_TAIL,
                        KVTWIN_CANNOT_COPY_TO_ITSELF, "6"),
            "");
}

// Looks for a NaN in the rows of K and of V.
class LooksForNaN : public ForwardingCache {
 public:
  LooksForNaN(std::unique_ptr<Cache> cache, bool& in_key, bool& in_value)
      : ForwardingCache(std::move(cache)),
        in_key_(in_key),
        in_value_(in_value) {}

  Status Put(const TensorView& key, const TensorView& value) override {
    in_key_ = in_key_ || HasNaN(key);
    in_value_ = in_value_ || HasNaN(value);
    return cache_->Put(key, value);
  }

 private:
  static bool HasNaN(const TensorView& rows) {
    for (std::int64_t row = 0; row < rows.shape[2]; ++row) {
      for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        if (std::isnan(LoadFrom(rows, i, 0, row))) return true;
      }
    }
    return false;
  }
  bool& in_key_;
  bool& in_value_;
};

// No rule says which NaN a shift makes of a NaN. Token 5 has one.
TEST(ThirdPartyRows, HaveNoNaNInKThatIsShifted) {
  for (const std::string shift : {"none", "add"}) {
    bool in_key = false;
    bool in_value = false;
    Subject subject = {.name = "looking"};
    subject.level = Level::kVisibility;
    subject.make_of = [&](const auto& setup) {
      return Result<std::unique_ptr<Cache>>(std::make_unique<LooksForNaN>(
          *MakeCache(setup.spec, "reference"), in_key, in_value));
    };
    const History history =
        *ParseHistory("kvt1 shift=" + shift +
                      " dtype=bf16 dims=4,1,4 cap=16 | put 0*3 | put 0*8");
    EXPECT_FALSE(RunHistory(history, subject).failure);
    EXPECT_EQ(in_key, shift == "none");
    EXPECT_TRUE(in_value);
  }
}

// Stores other numbers than those of f32 rows.
class StoresOthers : public ForwardingCache {
 public:
  using Change = void (*)(std::span<float> head);
  StoresOthers(std::unique_ptr<Cache> cache, Change change)
      : ForwardingCache(std::move(cache)), change_(change) {}

  Status Put(const TensorView& key, const TensorView& value) override {
    if (key.dtype != DType::kF32) return cache_->Put(key, value);
    const DenseTensor keys = Changed(key);
    const DenseTensor values = Changed(value);
    return cache_->Put(keys.view(), values.view());
  }

 private:
  // Requires: one KV head.
  DenseTensor Changed(const TensorView& rows) const {
    DenseTensor changed = CopyOf(rows, DType::kF32);
    std::vector<float> head(AsSize(rows.shape[0]));
    for (std::int64_t i = 0; i < rows.shape[2]; ++i) {
      std::byte* stored = &changed.bytes[AsSize(i) * head.size() * 4];
      std::memcpy(head.data(), stored, head.size() * 4);
      change_(head);
      std::memcpy(stored, head.data(), head.size() * 4);
    }
    return changed;
  }
  Change change_;
};

// Numbers whose conversion goes wrong in practice (docs/dtypes.md).
TEST(ThirdPartyRows, HaveExtremeNumbers) {
  using Head = std::span<float>;
  struct Case {
    std::string dtype;
    StoresOthers::Change change;
  };
  const auto nothing = [](Head) {};
  const auto no_sign = [](Head head) {
    for (float& x : head) x = x == 0 ? 0 : x;
  };
  const auto flushes = [](Head head) {
    for (float& x : head) x = std::abs(x) < 0x1p-14F ? x * 0 : x;
  };
  const auto flushes_f8 = [](Head head) {
    for (float& x : head) x = std::abs(x) < 0x1p-6F ? x * 0 : x;
  };
  const auto flushes_f32 = [](Head head) {
    for (float& x : head) x = std::abs(x) < 0x1p-126F ? x * 0 : x;
  };
  const auto saturates = [](Head head) {
    for (float& x : head) x = std::abs(x) > 65504 ? 65504 : x;
  };
  const auto overflows = [](Head head) {
    for (float& x : head) x = std::abs(x) > 464 ? NAN : x;
  };
  const auto finite = [](Head head) {
    for (float& x : head) x = std::isinf(x) ? 3e38F : x;
  };
  const auto divides_by_0 = [](Head head) {
    for (std::size_t block = 0; block < head.size(); block += kBlockElements) {
      const Head numbers = head.subspan(block, kBlockElements);
      const bool zero =
          std::ranges::all_of(numbers, [](float x) { return x == 0; });
      if (zero) std::ranges::fill(numbers, NAN);
    }
  };
  for (const Case& wrong : std::vector<Case>{{"f32", no_sign},
                                             {"f16", no_sign},
                                             {"f16", flushes},
                                             {"f8_e4m3", flushes_f8},
                                             {"f32", flushes_f32},
                                             {"f16", saturates},
                                             {"f8_e4m3", overflows},
                                             {"f32", finite},
                                             {"q8_0", divides_by_0},
                                             {"q4_0", divides_by_0}}) {
    const History history =
        *ParseHistory("kvt1 dims=64,1,64 cap=16 dtype=" + wrong.dtype +
                      " | put 0*8 | put 0*8");
    const auto fails = [&](StoresOthers::Change change) {
      Subject subject = {.name = "storing"};
      subject.level = Level::kVisibility;
      subject.make_of = [&](const auto& setup) {
        return Result<std::unique_ptr<Cache>>(std::make_unique<StoresOthers>(
            *MakeCache(setup.spec, "reference"), change));
      };
      return RunHistory(history, subject).failure.has_value();
    };
    EXPECT_FALSE(fails(nothing)) << wrong.dtype;
    EXPECT_TRUE(fails(wrong.change)) << wrong.dtype;
  }
}

// States have no attention.
class AttendsToTokensOnly : public ForwardingCache, public Attending {
 public:
  using ForwardingCache::ForwardingCache;
  Status Attend(const TensorView& /*query*/,
                std::span<float> /*out*/) override {
    return {StatusCode::kNotSupported, "a state"};
  }
};

TEST(ThirdPartyAttention, IsNotAskedForStates) {
  Subject subject = {.name = "attending"};
  subject.level = Level::kAttention;
  subject.make_of = [](const auto& setup) {
    return Result<std::unique_ptr<Cache>>(std::make_unique<AttendsToTokensOnly>(
        *MakeCache(setup.spec, "reference")));
  };
  const auto failure = [&](const std::string& line) {
    return RunHistory(*ParseHistory("kvt1 legal=1 " + line), subject).failure;
  };
  EXPECT_FALSE(failure("kind=recurrent | put 0*2 | put 0*1"));
  EXPECT_TRUE(failure("| put 0*2 | put 0*1"));
}

}  // namespace
}  // namespace kvtwin::props
