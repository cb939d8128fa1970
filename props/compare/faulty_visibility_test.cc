// Faulty caches at the levels that do not compare placement: visibility,
// numeric.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/elements.h"
#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/visibility.h"
#include "props/testing/faulty_twins.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

constexpr float kHides = -std::numeric_limits<float>::infinity();
const std::string kThree = "layers=2 dims=2,2,2 maskpad=4 | put 0*3";
const std::string kEncoder = "kind=encoder seqs=1 | put 0*1 image=0";

// Writes an element of an f32 mask.
void Say(OwnedView& view, std::int64_t row, std::int64_t column, float what) {
  const auto at = AsSize(row * view.mask.shape[0] + column);
  StoreElement(what, &view.mask.bytes[4 * at], DType::kF32);
}
View Says(std::int64_t row, std::int64_t column, float what) {
  return [=](OwnedView& view) { Say(view, row, column, what); };
}

// Gives column 0 the rows of column 1.
void Repeat(DenseTensor& rows) {
  const auto size =
      std::ssize(rows.bytes) / static_cast<std::ptrdiff_t>(rows.shape[2]);
  std::copy_n(rows.bytes.begin() + size, size, rows.bytes.begin());
}

TEST(FaultyTwins, VisibilitySeesWrongRows) {
  const std::string check = "subject: rows";
  ExpectFound(
      {{"K, first", kThree, Shows(First(kKey)), check, "layer 0: row 0 sees"},
       {"K, last", kThree, Shows(Last(kKey)), check, "layer 0: row 2 sees"},
       {"V, first", kThree, Shows(First(kValue)), check, "row 0 sees"},
       {"V, last", kThree, Shows(Last(kValue)), check, "row 2 sees"},
       {"the last layer", kThree, Shows(Last(kValue), 1), check,
        "layer 1: row 2 sees"},
       {"a wrapper's last cache", kWrapper + "| put 0*2",
        Shows(Last(kValue), -1, 1), check, "layer 1"},
       {"a sibling", "layers=1 | put 0*2:-1,-1", Shows(Says(1, 0, 0)), check,
        "row 1 sees at column 0 the token (draft 0 of sequence 0, position 0)"},
       {"by a sibling", "layers=1 | put 0*2:-1,-1", Shows(Says(1, 0, 0)), check,
        "row 1 is draft 1 of sequence 0 at position 0"},
       {"the row of another token", kThree, Shows([](OwnedView& view) {
          Repeat(view.key);
          Repeat(view.value);
        }),
        check, "row 0 sees at column 0"},
       {"K of another token", kThree,
        Shows([](OwnedView& view) { Repeat(view.key); }), check, "row 0 sees"},
       {"V of another token", kThree,
        Shows([](OwnedView& view) { Repeat(view.value); }), check,
        "row 0 sees"},
       {"a token too few", kThree, Shows(Says(2, 0, kHides)), check,
        "row 2 misses the token (sequence 0, position 0)"},
       {"a token too many", kThree, Shows(Says(1, 2, 0)), check,
        "row 1 sees at column 2"},
       {"another one instead", kThree, Shows([](OwnedView& view) {
          Say(view, 1, 2, 0);
          Say(view, 1, 0, kHides);
        }),
        check, "row 1 sees at column 2"},
       {"neither", kThree, Shows(Says(0, 2, 0.5)), check,
        "neither 0 nor -inf (S15)"},
       {"a padding row", kThree, Shows(Says(3, 0, 0)), check,
        "a padding row sees something"},
       {"neither in a padding row", kThree, Shows(Says(3, 2, -1)), check,
        "neither 0 nor -inf (S15)"},
       {"after SetCausal", "| put 0*2 | causal 0", Shows(Says(0, 1, kHides)),
        check, "row 0 misses"},
       {"a sliding window", "kind=swa window=1 seqs=1 | put 0*4",
        Shows(Says(3, 1, 0)), check, "row 3 sees at column 1"}},
      Level::kVisibility);
}

TEST(FaultyTwins, VisibilitySeesWrongEncoders) {
  const std::string check = "subject: rows";
  const View turned = [](OwnedView& view) {
    std::swap(view.view->key.shape[0], view.view->key.shape[1]);
    std::swap(view.view->key.stride[0], view.view->key.stride[1]);
  };
  const View masked = [](OwnedView& view) { view.view->mask = view.view->key; };
  Fault always;
  always.encoder_cached = [](bool) { return true; };
  ExpectFound({{"K", kEncoder, Shows(First(kKey)), check, "K differs"},
               {"V", kEncoder, Shows(Last(kValue)), check, "V differs"},
               {"a mask", kEncoder, Shows(masked), check, "there is a mask"},
               {"a shape", kEncoder, Shows(turned), check, "K differs"},
               {"a slot that is gone", kEncoder + " | drop 0:0- | get", always,
                "subject: encoder cached", "but nothing is cached"}},
              Level::kVisibility);
}

// At each Get the columns come in another order: it is what the rows see that
// a refused call must not change.
TEST(FaultyTwins, MisuseChangesNothingThatRowsSee) {
  const auto seen = [](const View& change) {
    const auto misused = std::make_shared<bool>(false);
    const auto turned = std::make_shared<bool>(false);
    Fault fault = Shows([=](OwnedView& view) {
      if (*misused && change) change(view);
      if (*turned) TurnColumns(view);
      *turned = !*turned;
    });
    fault.misuse = [=](Cache&, Status status) {
      *misused = true;
      return status;
    };
    const auto wrong = Seen("pad=4 dims=2,2,2 maskpad=4 | put 0*3 | misuse 0",
                            fault, Level::kVisibility);
    return wrong ? wrong->text : "";
  };
  EXPECT_EQ(seen(nullptr), "");
  // No row sees the last column.
  EXPECT_EQ(seen(Last(kKey)), "");
  const std::vector<View> changes = {First(kKey), First(kValue),
                                     Says(2, 0, kHides), Says(0, 1, 0),
                                     Says(0, 0, 0.5), Says(3, 0, 0),
                                     // Rows 0 and 1 change places.
                                     [](OwnedView& view) {
                                       Say(view, 0, 1, 0);
                                       Say(view, 1, 1, kHides);
                                     }};
  for (const View& change : changes) {
    EXPECT_EQ(seen(change), "an empty batch is refused, but changes the cache");
  }
}

// Refuses each Commit of two drafts in one way.
class Refusing final : public ForwardingCache {
 public:
  Refusing(std::unique_ptr<Cache> cache, StatusCode code)
      : ForwardingCache(std::move(cache)), code_(code) {}
  Status Commit(int seq, std::span<const int> path) override {
    if (path.size() == 2) return {code_, "so it is"};
    return ForwardingCache::Commit(seq, path);
  }

 private:
  StatusCode code_;
};

// Without room for drafts, a Commit of a wrong path may be refused as misuse or
// as not supported, whichever part of a hybrid has none.
TEST(FaultyTwins, CommitsWithoutDraftsAreRefusedInTwoWays) {
  const auto fails = [](const std::string& kind, StatusCode code) {
    Subject subject = Tampered({}, Level::kVisibility);
    subject.make =
        [=](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(
          std::make_unique<Refusing>(*MakeReference(spec), code));
    };
    const auto history =
        ParseHistory("kvt1 " + kind + " | put 0*1 | misuse 1011");
    EXPECT_TRUE(history.ok()) << history.status().ToString();
    return RunHistory(*history, subject).failure.has_value();
  };
  for (const std::string kind :
       {"kind=recurrent", "kind=hybrid caches=recurrent/causal",
        "kind=hybrid caches=causal/recurrent"}) {
    EXPECT_FALSE(fails(kind, StatusCode::kInvalidArgument)) << kind;
    EXPECT_FALSE(fails(kind, StatusCode::kNotSupported)) << kind;
    EXPECT_TRUE(fails(kind, StatusCode::kCacheFull)) << kind;
  }
  EXPECT_FALSE(fails("kind=causal", StatusCode::kInvalidArgument));
  EXPECT_TRUE(fails("kind=causal", StatusCode::kNotSupported));
}

// A batch that is cache_full may have evicted the tokens of other sequences:
// where a draft begins is then open, so that none is drawn.
TEST(FaultyTwins, NoDraftBeginsWhereTheEndIsOpen) {
  const auto wrong = Seen(
      "kind=swa window=0 cells=3 | put 0*2 1*1:-1 | put 0*3 | put 0*1@-2 | "
      "put 0*1:-1",
      {}, Level::kVisibility);
  EXPECT_FALSE(wrong) << wrong->text;
}

// A cache that says ok to a call without making it.
class Idle final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status CopyPrefix(int, int, std::int32_t) override { return {}; }
  Status Remove(int, std::int32_t, std::int32_t) override { return {}; }
  Status Put(const TensorView& key, const TensorView& value) override {
    return std::exchange(puts_, true) ? Status()
                                      : ForwardingCache::Put(key, value);
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    puts_ = false;
    return ForwardingCache::StartForward(batch, reserve);
  }

 private:
  bool puts_ = false;
};

// After a CopyPrefix in a pass, SetCausal's mask is judged, unless a sequence
// of the batch got tokens: the view may lack their cells.
TEST(FaultyTwins, VisibilitySeesWrongMasksAfterACopy) {
  const std::string check = "subject: rows";
  ExpectFound(
      {{"of nothing to others", "| put 0*2 | copy 2>1:0 | causal 0",
        Shows(Says(0, 1, kHides)), check,
        "row 0 misses the token (sequence 0, position 1)"},
       {"to others", "| put 0*2 | copy 0>1:2 | causal 0",
        Shows(Says(0, 1, kHides)), check,
        "row 0 misses the token (sequence 0+1, position 1)"},
       {"of nothing to the batch", "| put 0*2 1*1 | copy 2>1:0 | causal",
        Shows(Says(2, 2, 0)), check, "which left before"}},
      Level::kVisibility);
  // The second token of sequence 1 is not in the view.
  EXPECT_FALSE(Seen("| put 0*2 | put 1*1 | copy 0>1:2 | causal 0", {},
                    Level::kVisibility));
}

// If rows are those of a token, reports name the token, and say why no row may
// see it.
TEST(FaultyTwins, RowsOfTokensThatLeftAreNamed) {
  Subject subject = Tampered({}, Level::kVisibility);
  subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(std::make_unique<Idle>(*MakeReference(spec)));
  };
  const std::string left =
      "layer 0: row 0 sees at column 1 the rows of token 1 (sequence 0, "
      "position 1), which left before, K [";
  const std::map<std::string, std::string> texts = {
      {"kvt1 | put 0*2 | drop 0:1- | put 0*1", left},
      {"kvt1 | put 0*2 | copy 0>0:1 | put 0*1", left},
      {"kvt1 | put 0*2 | copy 1>0:0 | causal",
       "layer 0: row 0 sees at column 0 the rows of token 0 (sequence 0, "
       "position 0), which left before, K ["},
      {"kvt1 | put 0*1 | reput | get",
       "layer 0: row 0 sees at column 0 the rows of token 0 (sequence 0, "
       "position 0), which were replaced, K ["},
  };
  for (const auto& [line, text] : texts) {
    const RunResult result = RunHistory(*ParseHistory(line), subject);
    ASSERT_TRUE(result.failure) << line;
    EXPECT_EQ(result.failure->text.substr(0, text.size()), text);
  }
}

// A cache that copies rows may move shared tokens. If a cache moves them
// without a copy, the report names the call that it should have refused.
TEST(FaultyTwins, ARemoveOfSharedTokensIsNamed) {
  Subject subject = Tampered({}, Level::kVisibility);
  subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(std::make_unique<Idle>(*MakeReference(spec)));
  };
  const auto text = [&](const std::string& line) {
    const RunResult result = RunHistory(*ParseHistory(line), subject);
    return result.failure ? result.failure->text : "";
  };
  const std::string named =
      "\n  Remove(0, 0, 1) was ok, so the cache must have copied the rows that "
      "it moved: another sequence holds their tokens, too (else: "
      "shared_cells, S32)";
  const std::string begin =
      "kvt1 shift=identity | put 0*2 | copy 0>1:2 | drop ";
  EXPECT_TRUE(text(begin + "0:0-1 | put 0*1").ends_with(named));
  EXPECT_NE(text(begin + "0:1- | put 0*1"), "");
  EXPECT_EQ(text(begin + "0:1- | put 0*1").find("S32"), std::string::npos);
}

// Some of 20 wrong values have a larger hash than the right value, and some a
// smaller hash.
TEST(RowOwners, DistinguishKAndV) {
  reference::CacheLedger ledger({});
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 4, 4}).ok());
  const std::array<std::int32_t, 1> positions = {0};
  const std::array<int, 1> sequences = {0};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const float right = 1;
  const TensorView row = DenseView(&right, DType::kF32, {1, 1, 1, 1});
  ledger.Put(0, row, row);
  const reference::LedgerToken* token = ledger.tokens().data();
  for (int i = 2; i < 22; ++i) {
    const auto wrong = static_cast<float>(i);
    const TensorView other = DenseView(&wrong, DType::kF32, {1, 1, 1, 1});
    for (const bool key : {true, false}) {
      const KvView view = {key ? row : other, key ? other : row, {}, 0};
      const RowOwner owner =
          RowOwners(ledger, 0, view, VLayout::kPlain).Of(0, {token});
      EXPECT_EQ(owner.token, token);
      EXPECT_EQ(owner.key, key) << wrong;
      EXPECT_EQ(owner.value, !key) << wrong;
    }
  }
}

// Rows are not judged while no rule says what is visible: after a removal or a
// copy.
TEST(FaultyTwins, VisibilityIsComparedUntilTheMaskIsStale) {
  const auto seen = [](const std::string& history) {
    const auto gets = std::make_shared<int>(0);
    const Fault later = Shows([=](OwnedView& view) {
      if (++*gets > 1) ChangeByte(view.key.bytes.front());
    });
    return Seen(history, later, Level::kVisibility).has_value();
  };
  EXPECT_TRUE(seen("| put 0*3 | get"));
  EXPECT_FALSE(seen("| put 0*3 | drop 0:2- | get"));
  EXPECT_TRUE(seen("| put 0*3 | drop 0:2- | causal 0"));
  EXPECT_FALSE(seen("| put 0*3 | copy 0>1:2 | get"));
  EXPECT_TRUE(seen("| put 0*3 | copy 0>1:2 | causal 0"));
  EXPECT_TRUE(seen("| put 0*3 | copy 0>1:2 | put 1*1"));
  EXPECT_FALSE(seen("| put 0*3 | put 0*1 reserve"));
  EXPECT_FALSE(seen("| put 0*3 | put 0*1 reserve except=0"));
  EXPECT_TRUE(seen("kind=encoder seqs=1 | put 0*1 image=0 | drop 0:5-6 | get"));
}

// A token that was never put accounts for exactly one column, with any rows.
TEST(FaultyTwins, VisibilityCountsRowsThatWereNeverPut) {
  const std::string never = "| put 0*1 | put 0*2 keep | put 0*1";
  const auto at_last = [](const View& change) {
    return Shows([=](OwnedView& view) {
      if (view.mask.shape[0] == 4) change(view);
    });
  };
  const std::string check = "subject: rows";
  ExpectFound(
      {{"one is hidden", never, at_last(Says(0, 1, kHides)), check,
        "row 0 misses the token (sequence 0, position 1)"},
       {"all are hidden", never, at_last([](OwnedView& view) {
          Say(view, 0, 1, kHides);
          Say(view, 0, 2, kHides);
        }),
        check, "row 0 misses the token (sequence 0, position 1)"},
       {"K of one that was put", never, at_last(First(kKey)), check, "row 0 "}},
      Level::kVisibility);
  // No rule says what rows such a token shows.
  EXPECT_FALSE(Seen(never, at_last([](OwnedView& view) {
                      ChangeByte(view.key.bytes[2 * 4]);
                    }),
                    Level::kVisibility));
}

TEST(FaultyTwins, VisibilitySeesWrongShapes) {
  const std::string check = "subject: view shape";
  const auto shape = [](TensorView KvView::*tensor, std::size_t dimension,
                        std::int64_t by) {
    return Shows(
        [=](OwnedView& view) { (view.view->*tensor).shape[dimension] += by; });
  };
  std::vector<Case> cases = {
      {"no mask", kThree,
       Shows([](OwnedView& view) { view.view->mask.data = nullptr; }), check,
       "there is no mask"},
      {"K", kThree, shape(&KvView::key, 2, -1), check, "the shape of K"},
      {"heads", kThree, shape(&KvView::key, 1, -1), check, "the shape of K"},
      {"V", kThree, shape(&KvView::value, 0, -1), check, "the shape of V"},
      {"V's columns", kThree, shape(&KvView::value, 2, -1), check, "of V"},
      {"too few rows", kThree, shape(&KvView::mask, 1, -2), check,
       "the mask has 2 rows, the batch 3"},
      {"no padding", kThree, shape(&KvView::mask, 1, -1), check,
       "the mask has 3 rows, expected 4"},
  };
  for (const char* layout : {"permuted=1", "tiled=1 pad=32"}) {
    const std::string history = std::string(layout) + " dims=1,2,3 | put 0*3";
    for (const std::size_t dimension : {0U, 1U, 2U}) {
      cases.push_back({layout, history, shape(&KvView::value, dimension, -1),
                       check, "the shape of V"});
    }
  }
  ExpectFound(cases, Level::kVisibility);
}

TEST(FaultyTwins, VisibilitySeesWrongResults) {
  std::vector<Case> cases;
  for (const auto& [call, history] :
       std::vector<std::pair<std::string, std::string>>{
           {"Put", "| put 0*1"},
           {"Get", "| put 0*1"},
           {"SetLayer", "| put 0*1"},
           {"SetLayerType", kWrapper + "| put 0*1"},
           {"StartForward", "| put 0*1"},
           {"SetCausal", "| put 0*2 except=0"},
           {"Remove", "| put 0*2 | drop 0:1-"},
           {"CopyPrefix", "| put 0*2 | copy 0>1:1"},
           {"CanResume", "| put 0*2 | ask 0@1"},
           {"EncoderCached", kEncoder}}) {
    cases.push_back({call, history, Refuses(call), "subject: result", call});
  }
  for (const char* call : {"SetConfig", "Init"}) {
    cases.push_back({call, "| put 0*1",
                     Refuses(call, StatusCode::kInvalidArgument),
                     "subject: result", "Init is"});
  }
  Fault throwing;
  throwing.throws = true;
  cases.push_back({"a throw", "| put 0*1 | copy 0>1:1", throwing,
                   "subject: exception", "no copy today"});
  cases.push_back({"a yes",
                   "kind=swa window=1 seqs=1 | put 0*4 | put 0*4 "
                   "| ask 0@1",
                   Resumes([](bool) { return true; }), "subject: resume",
                   "CanResume(0, 1) is true, but the sequence's tokens begin "
                   "at position 3, later than the window (S28): a batch evicts "
                   "tokens before it (S7)"});
  const auto yes = [](bool) { return true; };
  // Sequence 0 begins at position 1, and nothing was evicted.
  const std::string begun = "kind=swa window=1 cap=4 | put 0*1@+1 | put 1*1 ";
  cases.push_back({"a yes before the first token", begun + "| ask 0@1",
                   Resumes(yes), "subject: resume",
                   "begin at position 1, later than the window (S28)"});
  cases.push_back({"a yes after eviction",
                   "kind=swa window=1 | put 0*3 | put 1*1 | ask 0@1",
                   Resumes(yes), "subject: resume",
                   "begin at position 1, later than the window (S28): a batch "
                   "also evicts in sequences that are not in it (S7)"});
  const std::string states = "kind=recurrent seqs=1 | put 0*4 ";
  cases.push_back({"a yes without a state", states + "| ask 0@2", Resumes(yes),
                   "subject: resume",
                   "the sequence has no state at position 1 (R8)"});
  cases.push_back({"misuse", "| put 0*2 | misuse 0",
                   Misused([](Cache&, const Status&) { return Status(); }),
                   "subject: misuse", "expected invalid_argument"});
  ExpectFound(cases, Level::kVisibility);
  // A cache may always refuse to resume, or answer that nothing is cached.
  const auto none = [](bool) { return false; };
  Fault empty;
  empty.resume = empty.encoder_cached = none;
  EXPECT_FALSE(Seen("| put 0*2 | ask 0@1", empty, Level::kVisibility));
  EXPECT_FALSE(Seen(kEncoder, empty, Level::kVisibility));
}

// A cache that is full too early and a cache that is never full, each at its
// limit.
TEST(FaultyTwins, CacheFullIsWrongForSequencesWithinTheCapacity) {
  const auto is_room = [](const std::string& history) {
    const auto wrong = Seen("seqs=2 cap=3 batch=8 " + history,
                            Refuses("StartForward", StatusCode::kCacheFull),
                            Level::kVisibility);
    EXPECT_TRUE(!wrong || wrong->check == "subject: room") << wrong->text;
    return wrong.has_value();
  };
  EXPECT_TRUE(is_room("| put 0*3 1*3"));
  EXPECT_TRUE(is_room("kind=chunked chunk=2 | put 0*3 1*3"));
  EXPECT_TRUE(is_room("| put 0*1@+2"));
  EXPECT_TRUE(is_room("kind=swa | put 0*1"));
  EXPECT_TRUE(is_room("kind=swa window=1 legal=1 | put 0*1"));
  EXPECT_TRUE(
      is_room("kind=wrapper caches=causal/chunked:c2 layers=2 | put 0*1"));
  EXPECT_FALSE(is_room("| put 0*1@+3"));
  EXPECT_FALSE(is_room("| put 0*4="));
  EXPECT_FALSE(is_room("| put 0*1 1*1 2*1"));
  EXPECT_FALSE(is_room("| put 2*1"));
  EXPECT_FALSE(is_room("kind=swa window=1 | put 0*1"));
  EXPECT_FALSE(is_room("kind=wrapper caches=causal/swa:w1 layers=2 | put 0*1"));
}

// The mask is checked first, then the output of attention.
TEST(FaultyTwins, TheNumericLevelSeesWrongAttention) {
  const std::string history = "dims=2,2,2 maskpad=4 | put 0*3";
  const auto add = [](DenseTensor OwnedView::*tensor, std::size_t from_end,
                      float what) {
    return Shows([=](OwnedView& view) {
      auto& bytes = (view.*tensor).bytes;
      std::byte* at = &bytes[bytes.size() - 4 * from_end];
      StoreElement(LoadElement(at, DType::kF32) + what, at, DType::kF32);
    });
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::string rows = "subject: rows";
  const std::string check = "subject: attention";
  std::vector<Case> cases = {
      {"neither", history, Shows(Says(0, 2, 0.5)), rows, "neither 0 nor -inf"},
      {"a padding row", history, Shows(Says(3, 2, 0)), rows,
       "a padding row sees something"},
      {"neither in a padding row", history, Shows(Says(3, 2, 0.5)), rows, ""},
      {"a token too many", history, Shows(Says(1, 2, 0)), check, "row 1 "},
      {"a token too few", history, Shows(Says(2, 0, kHides)), check, "row 2 "},
      {"a token too few, named", history, Shows(Says(2, 0, kHides)), check,
       "; as if position 0 were missing"},
      {"K, first", history, add(kKey, 12, 0.5), check, "row 1 "},
      {"K, last", history, add(kKey, 1, 0.5), check, "row 2 "},
      {"a little in V", history, add(kValue, 1, 1e-4F), check,
       "row 2 (sequence 0, position 2) is "},
      {"an encoder", kEncoder, Shows(Last(kKey)), rows, "K differs"},
  };
  // A NaN in any element of a row, not in the first one only.
  for (const std::size_t from_end : {1U, 2U, 3U, 4U}) {
    cases.push_back({"NaN in V", history, add(kValue, from_end, nan), check,
                     "row 2 (sequence 0, position 2) is nan at element"});
  }
  cases.push_back(
      {"NaN in K", history, add(kKey, 1, nan), check, "is nan at element"});
  ExpectFound(cases, Level::kNumeric);
  EXPECT_FALSE(Seen(history, add(kValue, 1, 1e-7F), Level::kNumeric));
}

// Over one state, an output is V: K has no weight in it.
TEST(FaultyTwins, TheNumericLevelSeesWrongStates) {
  const std::string history = "kind=recurrent dims=2,2,2 | put 0*3 | put 0*1";
  const auto add = [](DenseTensor OwnedView::*tensor, float what) {
    return Shows([=](OwnedView& view) {
      auto& bytes = (view.*tensor).bytes;
      for (std::size_t at = 0; at < bytes.size(); at += 4) {
        StoreElement(LoadElement(&bytes[at], DType::kF32) + what, &bytes[at],
                     DType::kF32);
      }
    });
  };
  ExpectFound({{"K", history, add(kKey, 0.5), "subject: attention",
                "K of the state of row "},
               {"V", history, add(kValue, 0.5), "subject: attention",
                "V of the state of row "}},
              Level::kNumeric);
  EXPECT_FALSE(Seen(history, add(kKey, 1e-7F), Level::kNumeric));
}

// A view may have any number of hidden columns, and another in the next run.
TEST(FaultyTwins, HiddenColumnsMayVaryBetweenRuns) {
  const auto runs = std::make_shared<int>(0);
  // Every other time, the view has one more column, which no row sees.
  const View wider = [=](OwnedView& view) {
    if (++*runs % 2 == 0) return;
    for (auto [tensor, shown] : {std::pair(&view.key, &view.view->key),
                                 {&view.value, &view.view->value}}) {
      const auto columns = AsSize(tensor->shape[2]);
      tensor->bytes.resize(tensor->bytes.size() / columns * (columns + 1));
      ++tensor->shape[2];
      *shown = tensor->view();
    }
    DenseTensor mask = view.mask;
    ++mask.shape[0];
    mask.bytes.resize(4 * AsSize(mask.shape[0]) * AsSize(mask.shape[1]));
    const TensorView before = view.mask.view();
    for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
      for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
        const bool added = column == before.shape[0];
        StoreElement(
            added ? kHides : LoadElement(before.at(column, row), DType::kF32),
            &At(mask.bytes, 4 * (row * mask.shape[0] + column)), DType::kF32);
      }
    }
    view.mask = std::move(mask);
    view.view->mask = view.mask.view();
  };
  const Subject subject = Tampered(Shows(wider), Level::kVisibility);
  const History history = *ParseHistory("kvt1 | put 0*2");
  const RunResult one = RunHistory(history, subject);
  const RunResult other = RunHistory(history, subject);
  EXPECT_FALSE(one.failure) << one.failure->text;
  EXPECT_FALSE(other.failure) << other.failure->text;
  EXPECT_EQ(one.digest, other.digest);
}

// A text shows the first eight elements of a row.
TEST(FaultyVisibility, ADifferenceBehindTheShownElementsIsNamed) {
  const auto text = [](std::size_t key_at, std::size_t value_at) {
    const DenseTensor row = FilledTensor(DType::kF32, {5, 2, 1, 1}, 1);
    std::array<DenseTensor, 2> found = {row, row};
    const std::array<std::size_t, 2> at = {key_at, value_at};
    for (std::size_t i = 0; i < at.size(); ++i) {
      if (at[i] < 10) StoreElement(2, &found[i].bytes[4 * at[i]], row.dtype);
    }
    KvView view;
    view.key = found[0].view();
    view.value = found[1].view();
    return LaterDifference(view, 0, VLayout::kPlain, row.view(), row.view());
  };
  EXPECT_EQ(text(10, 10), "");
  EXPECT_EQ(text(7, 10), "");
  EXPECT_EQ(text(8, 10), "; element 3 of head 1 of K is 2, expected 1");
  EXPECT_EQ(text(7, 9), "; element 4 of head 1 of V is 2, expected 1");
}

// Two tokens with two heads, stored head by head: each head of a row is dense,
// and the other token's head lies between two heads.
TEST(FaultyVisibility, HeadsOfPackedTensorsAreCompared) {
  reference::Ledger ledger(CacheSpec{}, Rules{});
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 4, 4}).ok());
  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences = {0, 0};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const std::vector<float> put = {1, 2, 3, 4, 5, 6, 7, 8};
  const TensorView rows = DenseView(put.data(), DType::kF32, {2, 2, 2, 1});
  ledger.active().Put(0, rows, rows);

  const std::vector<float> mask = {0, kHides, 0, 0};
  const auto judged = [&](const std::vector<float>& key,
                          const std::vector<float>& value) {
    KvView view;
    for (const auto& [numbers, to] :
         {std::pair(&key, &view.key), std::pair(&value, &view.value)}) {
      *to = DenseView(numbers->data(), DType::kF32, {2, 2, 2, 1});
      std::swap(to->stride[1], to->stride[2]);
    }
    view.mask = DenseView(mask.data(), DType::kF32, {2, 2, 1, 1});
    return FindWrongRow(ledger, 0, view, VLayout::kPlain).has_value();
  };
  const std::vector<float> right = {1, 2, 5, 6, 3, 4, 7, 8};
  EXPECT_FALSE(judged(right, right));
  for (std::size_t i = 0; i < right.size(); ++i) {
    std::vector<float> wrong = right;
    wrong[i] += 9;
    EXPECT_TRUE(judged(wrong, right)) << i;
    EXPECT_TRUE(judged(right, wrong)) << i;
  }
}

// Says yes to each CanResume, as if it had evicted nothing. After a Remove of a
// whole sequence, or a copy, its views hide all.
struct AlwaysResumes : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    hides_ = hides_ || begin == 0;
    return cache_->Remove(seq, begin, end);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    hides_ = true;
    return cache_->CopyPrefix(src, dst, len);
  }
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || !hides_) return view;
    mask_.assign(AsSize(view->mask.shape[0] * view->mask.shape[1]), kHides);
    view->mask = DenseView(mask_.data(), DType::kF32, view->mask.shape);
    return view;
  }
  Result<bool> CanResume(int /*seq*/, std::int32_t /*pos*/) override {
    return true;
  }

 private:
  bool hides_ = false;
  std::vector<float> mask_;
};

// A cache that may have kept its tokens is believed, and a row that then misses
// such a token names the answer.
TEST(FaultyTwins, AYesIsNamedByTheRowThatReliesOnIt) {
  Subject subject;
  subject.name = "faulty";
  subject.level = Level::kVisibility;
  subject.rules.eviction = Rules::Eviction::kLazy;
  subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(
        std::make_unique<AlwaysResumes>(*MakeReference(spec)));
  };
  const auto text_of = [&](const std::string& calls,
                           const std::string& cache = "kind=swa window=2 ") {
    const RunResult result =
        RunHistory(*ParseHistory("kvt1 " + cache + calls), subject);
    return result.failure ? result.failure->text : "";
  };
  const std::string asked = "| put 0*6 | put 0*1 | drop 0:4- | ask 0@4 ";
  EXPECT_THAT(
      text_of(asked + "| put 0*1"),
      testing::HasSubstr("row 0 misses the token (sequence 0, position 2)"));
  const auto named = testing::HasSubstr(
      "\n  CanResume(0, 4) was yes, so the cache must have kept position 2 of "
      "sequence 0 (S28)");
  EXPECT_THAT(text_of(asked + "| put 0*1"), named);
  EXPECT_THAT(text_of(asked + "| put 1*2 | put 0*1"), named);
  // The answer was about other tokens than those that are missing now.
  for (const char* other : {"| drop 0:0- ", "| copy 1>0:2 "}) {
    const std::string text =
        text_of(asked + "| put 1*2 " + other + "| put 0*1");
    EXPECT_THAT(text, testing::HasSubstr("row 0 misses the token")) << other;
    EXPECT_THAT(text, testing::Not(testing::HasSubstr("CanResume"))) << other;
  }
  // A cache without a window evicts nothing.
  const std::string causal = text_of(asked + "| copy 0>1:1 | put 0*1",
                                     "kind=wrapper caches=causal/swa:w2 ");
  EXPECT_THAT(causal, testing::HasSubstr("row 0 misses the token"));
  EXPECT_THAT(causal, testing::Not(testing::HasSubstr("CanResume")));
}

}  // namespace
}  // namespace kvtwin::props
