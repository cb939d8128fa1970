// For each comparison of the harness, a cache that only this comparison can
// tell from a correct one. If a comparison is removed or weakened, a case
// fails.

#include "props/testing/faulty_twins.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/elements.h"
#include "core/index.h"
#include "props/compare/differential_driver.h"

namespace kvtwin::props {
namespace {

// Makes the changed tensor sparse: gaps between its elements, or between its
// runs.
View Apart(DenseTensor OwnedView::*tensor, TensorView KvView::*shown,
           std::size_t dimension, const View& change) {
  return [=](OwnedView& view) {
    change(view);
    DenseTensor& from = view.*tensor;
    const TensorView dense = from.view();
    TensorView wide = dense;
    for (std::size_t d = dimension; d < 4; ++d) wide.stride[d] *= 3;
    std::vector<std::byte> bytes(3 * from.bytes.size());
    const auto element =
        AsSize(dimension == 0 ? dense.stride[0] : dense.stride[1]);
    const auto& [ni, nj, nk, nl] = dense.shape;
    for (std::int64_t l = 0; l < nl; ++l) {
      for (std::int64_t k = 0; k < nk; ++k) {
        for (std::int64_t j = 0; j < nj; ++j) {
          for (std::int64_t i = 0; i < (dimension == 0 ? ni : 1); ++i) {
            const auto to = wide.stride[0] * i + wide.stride[1] * j +
                            wide.stride[2] * k + wide.stride[3] * l;
            std::memcpy(&At(bytes, to), dense.at(i, j, k, l), element);
          }
        }
      }
    }
    from.bytes = std::move(bytes);
    wide.data = from.bytes.data();
    view.view->*shown = wide;
  };
}

Fault Lists(std::function<void(std::vector<CellEntry>&)> cells, int type = -1) {
  return {.cells = std::move(cells), .type = type};
}
Fault Batches(std::function<void(std::vector<int>&)> batch, int type = -1) {
  return {.batch = std::move(batch), .type = type};
}
Fault Counts(std::function<int(int)> count) {
  return {.count = std::move(count)};
}
Fault Caches(std::function<bool(bool)> cached) {
  return {.encoder_cached = std::move(cached)};
}
Fault Saves(std::function<void(CacheState&)> saved) {
  return {.saved = std::move(saved)};
}
Fault Restores(std::function<void(CacheState&)> restored,
               bool in_place = false) {
  return {.restored = std::move(restored), .in_place = in_place};
}
Fault Parks(std::function<void(CacheState&)> sequence) {
  return {.sequence = std::move(sequence)};
}
Fault Adds(std::function<Status(Cache&, int, const CacheState&)> add) {
  return {.add = std::move(add)};
}

// Identity ------------------------------------------------------------------

const std::string kTwoLayers = "layers=2 dims=2,2,2 | put 0*3";
// Cell 0 holds a token that is hidden from all rows of the second batch; cell 3
// is free.
const std::string kHidden = "pad=4 | put 1*1 | put 0*2";
TEST(FaultyTwins, EveryPartOfAViewIsCompared) {
  std::vector<Case> cases = {
      {"a K, first", kTwoLayers, Shows(First(kKey)), "subject: K bytes", ""},
      {"a K, last", kTwoLayers, Shows(Last(kKey)), "subject: K bytes", ""},
      {"a V, first", kTwoLayers, Shows(First(kValue)), "subject: V bytes", ""},
      {"a V, last", kTwoLayers, Shows(Last(kValue)), "subject: V bytes", ""},
      {"a mask, first", kTwoLayers, Shows(First(kMask)), "subject: mask bytes",
       "row 0 of the mask"},
      {"a mask, last", kTwoLayers, Shows(Last(kMask)), "subject: mask bytes",
       "row 2 of the mask"},
      {"the last layer", kTwoLayers, Shows(Last(kKey), 1), "subject: K bytes",
       ""},
      {"a hidden token", kHidden, Shows(First(kKey)), "subject: K bytes",
       "an element of K"},
      {"a hidden token's V", kHidden, Shows(First(kValue)), "subject: V bytes",
       ""},
      {"a free cell", kHidden, Shows(Last(kKey)), "subject: K bytes", ""},
      {"a padding row", "maskpad=4 | put 0*2", Shows(Last(kMask)),
       "subject: mask bytes", "row 3 of the mask"},
      {"the last cache of a wrapper", kWrapper + "| put 0*2",
       Shows(Last(kValue), -1, 1), "subject: V bytes", ""},
      {"a view after SetCausal", "| put 0*3 | causal 0",
       Shows([](OwnedView& view) {
         // Row 0 is excepted and sees all tokens.
         if (view.mask.bytes[8] == std::byte{0}) ChangeByte(view.mask.bytes[8]);
       }),
       "subject: mask bytes", "row 0"},
      {"a view after a removal", "| put 0*2 | drop 0:1- | get",
       Shows(Last(kKey)), "subject: K bytes", ""},
      {"an encoder's K", "kind=encoder seqs=1 | put 0*1 image=0",
       Shows(Last(kKey)), "subject: K bytes", ""},
  };
  // A tiled view has two tiles, and the second one is compared as well.
  for (const char* layout :
       {"permuted=1", "tiled=1 pad=32", "tiled=1 pad=64"}) {
    const std::string history = std::string(layout) + " dims=1,2,3 | put 0*3";
    cases.push_back({std::string("V, ") + layout + ", first", history,
                     Shows(First(kValue)), "subject: V bytes", ""});
    cases.push_back({std::string("V, ") + layout + ", last", history,
                     Shows(Last(kValue)), "subject: V bytes", ""});
  }
  for (const char* dtype : {"f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0"}) {
    const std::string history = std::string("vdtype=") + dtype +
                                " dtype=" + dtype + " dims=32,2,32 | put 0*2";
    cases.push_back({std::string("K of ") + dtype, history, Shows(Last(kKey)),
                     "subject: K bytes", ""});
    cases.push_back({std::string("V of ") + dtype, history, Shows(Last(kValue)),
                     "subject: V bytes", ""});
  }
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    cases.push_back({std::string("a mask of ") + dtype,
                     std::string("mask=") + dtype + " | put 0*3",
                     Shows(Last(kMask)), "subject: mask bytes", ""});
  }
  ExpectFound(cases, Level::kIdentity);
}

TEST(FaultyTwins, EveryBitOfAMaskIsCompared) {
  const auto bit = [](std::size_t row, std::size_t byte) {
    return
        [=](OwnedView& view) { ChangeByte(view.mask.bytes[row * 8 + byte]); };
  };
  ExpectFound({{"a bit", "mask=bits | put 0*3", Shows(bit(2, 0)),
                "subject: mask bytes", "row 2 of the mask (#"},
               {"a bit past the columns", "mask=bits | put 0*3",
                Shows(bit(2, 7)), "subject: mask bytes",
                "row 2 of the mask has bits past its 3 columns"}},
              Level::kIdentity);
}

// Every run of a view with gaps is compared, to its end.
TEST(FaultyTwins, ViewsWithGapsAreComparedCompletely) {
  std::vector<Case> cases;
  for (const std::size_t dimension : {0U, 1U}) {
    const auto add = [&](const std::string& name, const std::string& check,
                         DenseTensor OwnedView::*tensor,
                         TensorView KvView::*shown) {
      const View right =
          Apart(tensor, shown, dimension, [](const OwnedView&) {});
      const auto wrong = Seen(kTwoLayers, Shows(right), Level::kIdentity);
      EXPECT_FALSE(wrong) << name << wrong->text;
      for (const bool last : {false, true}) {
        cases.push_back({name + (last ? ", last" : ", first"), kTwoLayers,
                         Shows(Apart(tensor, shown, dimension,
                                     last ? Last(tensor) : First(tensor))),
                         check, ""});
      }
    };
    add("K", "subject: K bytes", kKey, &KvView::key);
    add("V", "subject: V bytes", kValue, &KvView::value);
    add("mask", "subject: mask bytes", kMask, &KvView::mask);
  }
  ExpectFound(cases, Level::kIdentity);
  // Views of the reference are not dense: two of 8 cells are shown.
  for (const View& change : {First(kValue), Last(kValue)}) {
    ExpectFound({{"of a part of the cells", "permuted=1 dims=1,2,2 | put 0*2",
                  Shows(change), "subject: V bytes", ""}},
                Level::kIdentity);
  }
}

TEST(FaultyTwins, ShapesAreCompared) {
  const auto shape = [](TensorView KvView::*tensor, std::size_t dimension) {
    return [=](OwnedView& view) { --(view.view->*tensor).shape[dimension]; };
  };
  const auto dtype = [](TensorView KvView::*tensor) {
    return [=](OwnedView& view) {
      (view.view->*tensor).dtype = DType::kF16;
      (view.view->*tensor).shape[0] *= 2;
    };
  };
  const std::string check = "subject: view shape";
  ExpectFound(
      {{"columns", kTwoLayers, Shows(shape(&KvView::mask, 0)), check, "mask"},
       {"rows", kTwoLayers, Shows(shape(&KvView::mask, 1)), check, "mask"},
       {"K", kTwoLayers, Shows(shape(&KvView::key, 2)), check, "K is"},
       {"heads", kTwoLayers, Shows(shape(&KvView::key, 1)), check, "K is"},
       {"V", kTwoLayers, Shows(shape(&KvView::value, 0)), check, "V is"},
       {"K's dtype", kTwoLayers, Shows(dtype(&KvView::key)), check, "f16"},
       {"V's dtype", kTwoLayers, Shows(dtype(&KvView::value)), check, "f16"},
       {"the mask's dtype", kTwoLayers,
        Shows([](OwnedView& view) { view.view->mask.dtype = DType::kF16; }),
        check, "f16 [3, 3, 1] by faulty"},
       {"a first cell", kTwoLayers,
        Shows([](OwnedView& view) { ++view.view->first_cell; }),
        "subject: view cells", "starts at cell 0 by the reference, 1"},
       {"no mask", kTwoLayers,
        Shows([](OwnedView& view) { view.view->mask.data = nullptr; }),
        "subject: mask bytes", "only one of them has a mask"},
       {"a mask of an encoder", "kind=encoder seqs=1 | put 0*1 image=0",
        Shows([](OwnedView& view) { view.view->mask = view.view->key; }),
        "subject: mask bytes", "only one of them has a mask"}},
      Level::kIdentity);
}

// The result of every call is compared, and the report names the first cache
// with a wrong result.
TEST(FaultyTwins, EveryResultIsCompared) {
  const std::vector<std::pair<std::string, std::string>> calls = {
      {"SetConfig", "| put 0*1"},
      {"Init", "| put 0*1"},
      {"StartForward", "| put 0*1"},
      {"Put", "| put 0*1"},
      {"SetCausal", "| put 0*2 except=0"},
      {"Remove", "| put 0*2 | drop 0:1-"},
      {"CopyPrefix", "| put 0*2 | copy 0>1:1"},
      {"CanResume", "| put 0*2 | ask 0@1"},
      {"EncoderCached", "kind=encoder seqs=1 | put 0*1 image=0"},
  };
  std::vector<Case> cases;
  for (const auto& [call, history] : calls) {
    cases.push_back({call, history, Refuses(call), "subject: result",
                     call + (call == "EncoderCached" ? " is" : "")});
    cases.push_back({call + " of both", history, Refuses(call),
                     "reference: result", "by the ledger", Who::kBoth});
  }
  for (const char* call : {"SetLayer", "Get"}) {
    for (const Who who : {Who::kSubject, Who::kReference}) {
      cases.push_back({call, "| put 0*1", Refuses(call), "subject: result",
                       "is refused", who});
    }
  }
  for (const Who who : {Who::kSubject, Who::kReference}) {
    cases.push_back({"SetLayerType", kWrapper + "| put 0*1",
                     Refuses("SetLayerType"), "subject: result",
                     "SetLayerType(1) is refused", who});
  }
  cases.push_back({"Get of both", "| put 0*1", Refuses("Get"),
                   "reference: result", "is refused", Who::kBoth});
  // Snapshot may answer not_supported.
  cases.push_back({"Snapshot", "| put 0*2 | reload",
                   Refuses("Snapshot", StatusCode::kCacheFull),
                   "subject: result", "Snapshot is ok by the reference"});
  cases.push_back({"Snapshot of both", "| put 0*2 | reload",
                   Refuses("Snapshot", StatusCode::kCacheFull),
                   "reference: result", "Snapshot is", Who::kBoth});
  ExpectFound(cases, Level::kIdentity);
}

TEST(FaultyTwins, ACacheThatCannotBeMadeIsADifference) {
  Subject subject = Tampered({}, Level::kIdentity);
  subject.make = [](const CacheSpec&) -> Result<std::unique_ptr<Cache>> {
    return Status(StatusCode::kInvalidArgument, "not today");
  };
  const History history = *ParseHistory("kvt1 | put 0*1");
  const auto difference = RunHistory(history, subject).failure;
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->check, "subject: result");
  EXPECT_NE(difference->text.find("making the cache"), std::string::npos);
  // A kind that the subject does not have is skipped.
  subject.make = [](const CacheSpec&) -> Result<std::unique_ptr<Cache>> {
    return Status(StatusCode::kNotSupported, "no such kind");
  };
  const RunResult passed = RunHistory(history, subject);
  EXPECT_FALSE(passed.failure);
  EXPECT_FALSE(passed.ran);
}

// Reload makes a second cache to restore the state into.
TEST(FaultyTwins, ASecondCacheThatCannotBeMadeIsADifference) {
  const auto made = std::make_shared<int>(0);
  const CacheMaker once =
      [=](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    if (++*made % 2 == 0) return Status(StatusCode::kInvalidArgument, "no");
    return MakeReference(spec);
  };
  const History history = *ParseHistory("kvt1 | put 0*3 | reload");
  Subject subject = TwinSubject("reference");
  const auto reference = RunAgainst(once, history, subject).failure;
  ASSERT_TRUE(reference);
  EXPECT_EQ(reference->check, "reference: snapshot");
  subject.make = once;
  const auto tested = RunHistory(history, subject).failure;
  ASSERT_TRUE(tested);
  EXPECT_EQ(tested->check, "subject: snapshot");
}

TEST(FaultyTwins, CellsAreComparedAfterEachCall) {
  // The last membership is wrong if the cache has exactly `count` memberships.
  const auto at = [](std::size_t count, int type = -1) {
    return Lists(
        [=](std::vector<CellEntry>& cells) {
          if (cells.size() == count) ++cells.back().position;
        },
        type);
  };
  const std::string check = "subject: cells";
  std::vector<Case> cases = {
      {"a pass", "| put 0*2", at(2), check, "2:"},
      {"Remove", "| put 0*2 | drop 0:1-", at(1), check, ""},
      {"CopyPrefix", "| put 0*2 | copy 0>1:2", at(4), check, ""},
      {"a wrapper's last cache", kWrapper + "| put 0*2", at(2, 1), check, ""},
      {"Remove in a wrapper", kWrapper + "| put 0*2 | drop 0:1-", at(1, 1),
       check, ""},
  };
  cases[0].text = "0:0@s0 1:1@s0\n  faulty 0:0@s0 1:2@s0";
  for (Case both : std::vector<Case>(cases)) {
    both.name += " of both";
    both.who = Who::kBoth;
    both.check = "reference: tokens";
    both.text = "the reference's cells do not hold the ledger's tokens";
    cases.push_back(both);
  }
  // A wrong owner of a cell with one owner, and of a cell with several.
  const auto owner = [](std::vector<CellEntry>& cells) {
    if (!cells.empty()) ++cells.back().sequence;
  };
  cases.push_back({"an owner", "| put 0*2", Lists(owner), check, ""});
  cases.push_back({"an owner of both", "| put 0*2", Lists(owner),
                   "reference: tokens", "", Who::kBoth});
  cases.push_back({"a second owner of both", "| put 0*2 | copy 0>1:2",
                   Lists([](std::vector<CellEntry>& cells) {
                     if (cells.size() == 4) cells.erase(cells.begin() + 2);
                   }),
                   "reference: tokens", "", Who::kBoth});
  // Two tokens swap their owners; each owner appears as often as expected.
  cases.push_back({"owners of one another", "| put 0*1 1*1",
                   Lists([](std::vector<CellEntry>& cells) {
                     if (cells.size() != 2) return;
                     cells[0].position = 1;
                     cells[1].position = -1;
                   }),
                   "reference: tokens", "", Who::kBoth});
  ExpectFound(cases, Level::kIdentity);
}

TEST(FaultyTwins, QueriesAreCompared) {
  const auto other = [](std::vector<int>& cells) {
    if (!cells.empty()) ++cells.back();
  };
  const auto more = [](int count) { return count + 1; };
  const auto flip = [](bool yes) { return !yes; };
  const std::string encoder = "kind=encoder seqs=1 | put 0*1 image=0";
  ExpectFound(
      {{"a batch cell", "| put 0*2", Batches(other), "subject: batch cells",
        "[0 1] by the reference, [0 2]"},
       {"one cell more", "| put 0*2",
        Batches([](std::vector<int>& cells) { cells.push_back(7); }),
        "subject: batch cells", "[0 1 7]"},
       {"a wrapper's last cache", kWrapper + "| put 0*2", Batches(other, 1),
        "subject: batch cells", ""},
       {"cells in all", "| put 0*1", Counts(more), "subject: cell count",
        "16 cells by the reference, 17"},
       {"cells of both", "| put 0*1", Counts(more), "reference: cell count",
        "16 cells by the ledger, 17", Who::kBoth},
       {"a yes", "| put 0*2 | ask 0@1", Resumes(flip), "subject: resume",
        "CanResume(0, 1) is true by the reference, false"},
       {"a yes of both", "| put 0*2 | ask 0@1", Resumes(flip),
        "reference: resume", "true by the ledger, false", Who::kBoth},
       {"a slot", encoder, Caches(flip), "subject: encoder cached",
        "true by the reference, false by faulty"},
       {"a slot of the reference", encoder, Caches(flip),
        "subject: encoder cached", "false by the reference, true by faulty",
        Who::kReference},
       {"a slot of both", encoder, Caches(flip), "subject: encoder cached",
        "true by the ledger, false", Who::kBoth},
       {"underlying",
        "| put 0*1 | drop 0:0-",
        {.no_underlying = true},
        "subject: underlying cache",
        ""},
       {"a throw",
        "| put 0*1 | copy 0>1:1",
        {.throws = true},
        "subject: exception",
        "no copy today"}},
      Level::kIdentity);
}

// The ledger sees a fault that both twins share.
TEST(FaultyTwins, TheReferenceIsComparedWithTheLedger) {
  ExpectFound(
      {{"K", kTwoLayers, Shows(Last(kKey), 1), "reference: rows",
        "layer 1: row 2 sees", Who::kBoth},
       {"V", kTwoLayers, Shows(Last(kValue)), "reference: rows", "layer 0",
        Who::kBoth},
       {"a mask", kTwoLayers, Shows(Last(kMask)), "reference: rows",
        "neither 0 nor -inf", Who::kBoth},
       {"after SetCausal", "| put 0*2 | causal 0", Shows([](OwnedView& view) {
          // Row 0 misses position 1, which it may see.
          if (LoadElement(&view.mask.bytes[4], DType::kF32) == 0) {
            StoreElement(-std::numeric_limits<float>::infinity(),
                         &view.mask.bytes[4], DType::kF32);
          }
        }),
        "reference: rows", "row 0 misses the token (sequence 0, position 1)",
        Who::kBoth},
       {"an encoder's K", "kind=encoder seqs=1 | put 0*1 image=0",
        Shows(Last(kKey)), "reference: rows", "K differs", Who::kBoth},
       {"an encoder's V", "kind=encoder seqs=1 | put 0*1 image=0",
        Shows(Last(kValue)), "reference: rows", "V differs", Who::kBoth},
       {"an encoder's mask", "kind=encoder seqs=1 | put 0*1 image=0",
        Shows([](OwnedView& view) { view.view->mask = view.view->key; }),
        "reference: rows", "there is a mask", Who::kBoth}},
      Level::kIdentity);
}

// After a removal, rows are judged only if the cache has no mask, or a new one;
// after a copy, expected tokens may lie outside of the view.
TEST(FaultyTwins, RowsAreComparedUntilTheMaskIsStale) {
  const auto seen = [](const std::string& history) {
    const auto gets = std::make_shared<int>(0);
    const Fault later = Shows([=](OwnedView& view) {
      if (++*gets > 2) ChangeByte(view.key.bytes.front());  // In both caches.
    });
    const auto wrong = Seen(history, later, Level::kIdentity, Who::kBoth);
    return wrong ? wrong->check : "";
  };
  const std::string encoder = "kind=encoder seqs=1 | put 0*1 image=0 ";
  EXPECT_EQ(seen(encoder + "| drop 0:5-6 | get"), "reference: rows");
  EXPECT_EQ(seen("| put 0*3 | get"), "reference: rows");
  EXPECT_EQ(seen("| put 0*3 | reput"), "reference: rows");
  EXPECT_EQ(seen("| put 0*3 | drop 0:2- | get"), "");
  EXPECT_EQ(seen("| put 0*3 | drop 0:2- | causal 0"), "reference: rows");
  EXPECT_EQ(seen("| put 0*3 | copy 0>1:2 | get"), "");
  EXPECT_EQ(seen("| put 0*3 | copy 0>1:2 | causal 0"), "");
  EXPECT_EQ(seen("| put 0*3 | copy 0>1:2 | put 1*1"), "reference: rows");
}

void ChangeLastRow(CacheState& state) {
  if (!state.layers.empty() && !state.cells.empty()) {
    ChangeByte(state.layers.rbegin()->second.value.bytes.back());
  }
}

// After three tokens, the history continues with new caches.
TEST(FaultyTwins, SnapshotsAreCompared) {
  const auto unsorted = [](CacheState& state) {
    std::reverse(state.cells.begin(), state.cells.end());
  };
  const std::string check = "subject: snapshot";
  const std::string by_reference = "reference: snapshot";
  const std::string not_saved = "what was restored is not what was saved";
  const std::string anew = "| put 0*3 | reload";
  const std::vector<Case> cases = {
      {"what is saved", anew, Saves(ChangeLastRow), check, "are not equal"},
      {"bytes that do not read back", anew, Saves(unsorted),
       "reference: saved state", "", Who::kBoth},
      {"what is restored", anew, Restores(ChangeLastRow), check, not_saved},
      {"what is restored by the reference", anew, Restores(ChangeLastRow),
       by_reference, not_saved, Who::kReference},
      {"what is restored in place", anew, Restores(ChangeLastRow, true), check,
       not_saved},
      {"what the reference restores in place", anew,
       Restores(ChangeLastRow, true), by_reference, not_saved, Who::kReference},
      {"a Restore that is refused", anew, Refuses("Restore"), check, not_saved},
      {"a Snapshot that is refused then", anew,
       Refuses("Snapshot after Restore"), check, not_saved},
  };
  ExpectFound(cases, Level::kIdentity);
}

// Two snapshots: the first is restored before the second.
TEST(FaultyTwins, EarlierSnapshotsAreRestored) {
  const std::string twice = "| put 0*3 | snapshot 0 | put 1*2 | reload";
  const Fault changed = Restores([](CacheState& state) {
    if (state.cells.size() == 3) ChangeLastRow(state);
  });
  // A fault from the first Restore on, in the batch of a wrapper's cache.
  const auto placed = [](int type) {
    const auto restored = std::make_shared<bool>(false);
    Fault fault;
    fault.restored = [=](CacheState&) { *restored = true; };
    fault.batch = [=](std::vector<int>& cells) {
      if (*restored) ++cells.back();
    };
    fault.type = type;
    return fault;
  };
  const std::string not_earlier = "an earlier state is not restored";
  ExpectFound(
      {{"an earlier state", twice, changed, "subject: snapshot", not_earlier},
       {"an earlier state of the reference", twice, changed,
        "reference: snapshot", not_earlier, Who::kReference},
       {"a batch after it", twice, placed(-1), "subject: snapshot",
        "a batch after Restore has other cells"},
       {"a batch of a wrapper after it",
        "kind=wrapper caches=causal/swa " + twice, placed(1),
        "subject: snapshot", "a batch after Restore has other cells"},
       {"a batch that is refused after it",
        twice,
        {.call = "StartForward after Restore"},
        "subject: snapshot",
        "a batch after Restore has other cells"}},
      Level::kIdentity);
}

// After two tokens, the history continues with the caches that were restored in
// place, and sequence 1 is taken out and added again.
TEST(FaultyTwins, ASequenceThatComesBackIsCompared) {
  const std::string check = "subject: snapshot";
  const std::string by_reference = "reference: snapshot";
  const std::string not_back = "does not leave and come back";
  const std::string not_taken = "a new cache does not take the sequence";
  const std::string in_place = "| put 1*1 0*1 | reload";
  std::vector<Case> cases = {
      {"SnapshotOf", in_place, Parks(ChangeLastRow), check, not_back},
      {"SnapshotOf of the reference", in_place, Parks(ChangeLastRow),
       by_reference, not_back, Who::kReference},
      {"a SnapshotOf that is refused", in_place, Refuses("SnapshotOf"), check,
       not_back},
      {"a Remove that is refused", in_place, Refuses("Remove"), check,
       not_back},
      {"an AddSequence that is refused", in_place,
       Refuses("AddSequence", StatusCode::kCacheFull), check, not_taken},
  };
  const auto added = [&](const std::string& name, auto add,
                         const std::string& text) {
    cases.push_back({"AddSequence: " + name, in_place, Adds(add), check, text});
    cases.push_back({"AddSequence of the reference: " + name, in_place,
                     Adds(add), by_reference, text, Who::kReference});
  };
  added(
      "nothing", [](Cache&, int, const CacheState&) { return Status(); },
      not_taken);
  const auto other_rows = [](Cache& cache, int sequence, CacheState state) {
    ChangeLastRow(state);
    return cache.AddSequence(sequence, state);
  };
  added("other rows", other_rows, not_taken);
  added(
      "other rows beside other sequences",
      [=](Cache& cache, int sequence, const CacheState& state) {
        const bool empty = cache.Snapshot()->cells.empty();
        return empty ? cache.AddSequence(sequence, state)
                     : other_rows(cache, sequence, state);
      },
      not_back);
  added(
      "another sequence",
      [](Cache& cache, int sequence, const CacheState& state) {
        return cache.AddSequence(sequence + 7, state);
      },
      not_taken);
  // The second time, the sequence exists already: AddSequence refuses it and
  // changes nothing.
  added(
      "refused, but with a change",
      [](Cache& cache, int sequence, const CacheState& state) {
        Status status = cache.AddSequence(sequence, state);
        if (!status.ok()) (void)cache.Remove(0, 0, kOpenEnd);
        return status;
      },
      not_back);
  added(
      "never refused",
      [](Cache& cache, int sequence, const CacheState& state) {
        (void)cache.AddSequence(sequence, state);
        return Status();
      },
      not_back);
  ExpectFound(cases, Level::kIdentity);
}

// A restored cache may hold what was saved, but show something else.
TEST(FaultyTwins, ARestoredCacheIsCompared) {
  for (const char* line :
       {"| put 0*3 | reload", "| put 0*2 | put 1*2 | reload"}) {
    const auto restored = std::make_shared<bool>(false);
    Fault fault;
    fault.restored = [=](CacheState&) { *restored = true; };
    fault.cells = [=](std::vector<CellEntry>& cells) {
      if (*restored && !cells.empty()) ++cells.back().position;
    };
    const auto wrong = Seen(line, fault, Level::kIdentity);
    ASSERT_TRUE(wrong) << line;
    EXPECT_EQ(wrong->check, "subject: cells") << wrong->text;
  }
}

// Calls that must be refused. Misuse 0 is a StartForward.
TEST(FaultyTwins, MisuseIsRefusedWithAMessageAndChangesNothing) {
  const std::string history = "| put 0*2 | misuse 0";
  const auto answers = [](const Status& status) {
    return [=](Cache&, const Status&) { return status; };
  };
  std::vector<Case> cases;
  for (const Who who : {Who::kSubject, Who::kReference}) {
    const std::string check =
        who == Who::kSubject ? "subject: misuse" : "reference: misuse";
    cases.push_back({"accepted", history, Misused(answers({})), check,
                     "is 'ok', expected invalid_argument", who});
    cases.push_back({"without a message", history,
                     Misused(answers({StatusCode::kInvalidArgument, ""})),
                     check, "is refused without a message", who});
    cases.push_back({"with a change", history,
                     Misused([](Cache& cache, Status status) {
                       (void)cache.Remove(0, 1, kOpenEnd);
                       return status;
                     }),
                     check, "is refused, but changes the cache", who});
    // The change is visible in a view only.
    cases.push_back({"with another mask", history,
                     Misused([](Cache& cache, Status status) {
                       const std::array<int, 1> except = {0};
                       (void)cache.SetCausal(except);
                       return status;
                     }),
                     check, "is refused, but changes the cache", who});
    cases.push_back({"with another pass", history,
                     Misused([](Cache& cache, Status status) {
                       const std::array<std::int32_t, 1> position = {0};
                       const std::array<int, 1> sequence = {0};
                       (void)cache.StartForward({position, sequence}, true);
                       return status;
                     }),
                     check, "is refused, but changes the cache", who});
    // K rows alone change, or V rows alone.
    for (TensorView KvView::*tensor : {&KvView::key, &KvView::value}) {
      cases.push_back({"with other rows", history,
                       Misused([=](Cache& cache, const Status& status) {
                         const KvView view = *cache.Get();
                         DenseTensor key = CopyOf(view.key, DType::kF32);
                         DenseTensor value = CopyOf(view.value, DType::kF32);
                         const bool of_key = tensor == &KvView::key;
                         ChangeByte((of_key ? key : value).bytes.back());
                         EXPECT_TRUE(cache.Put(key.view(), value.view()).ok());
                         return status;
                       }),
                       check, "is refused, but changes the cache", who});
    }
  }
  ExpectFound(cases, Level::kIdentity);
}

// A change made by a refused call may show in a single answer only.
TEST(FaultyTwins, MisuseChangesNoAnswer) {
  const auto seen = [](const auto& change) {
    const auto misused = std::make_shared<bool>(false);
    Fault fault = change(misused);
    fault.misuse = [=](Cache&, Status status) {
      *misused = true;
      return status;
    };
    const auto wrong = Seen("| put 0*2 | misuse 0", fault, Level::kIdentity);
    return wrong ? wrong->text : "";
  };
  const std::string changes =
      "an empty batch is refused, but changes the cache";
  using Flag = std::shared_ptr<bool>;
  EXPECT_EQ(seen([](const Flag&) { return Fault(); }), "");
  EXPECT_EQ(seen([](const Flag& misused) {
              return Batches([=](std::vector<int>& cells) {
                if (*misused) ++cells.back();
              });
            }),
            changes);
  EXPECT_EQ(seen([](const Flag& misused) {
              return Lists([=](std::vector<CellEntry>& cells) {
                if (*misused) ++cells.back().position;
              });
            }),
            changes);
  EXPECT_EQ(seen([](const Flag& misused) {
              return Shows([=](OwnedView& view) {
                if (*misused) ++view.view->first_cell;
              });
            }),
            changes);
}

// Before Init or after Close, all answers but one are right.
class AnswersOutsideOfLife : public ForwardingCache {
 public:
  AnswersOutsideOfLife(const CacheSpec& spec, std::string_view call,
                       bool before, Status with)
      : ForwardingCache(*MakeCache(spec, "reference")),
        call_(call),
        outside_(before),
        before_(before),
        with_(std::move(with)) {}

  Status Init(const InitArgs& args) override {
    outside_ = false;
    return cache_->Init(args);
  }
  void Close() override {
    outside_ = !before_;
    cache_->Close();
  }
  Status SetLayer(int layer) override {
    return Said("SetLayer", cache_->SetLayer(layer));
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    return Said("StartForward", cache_->StartForward(batch, reserve));
  }
  Status SetCausal(std::span<const int> except) override {
    return Said("SetCausal", cache_->SetCausal(except));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    return Said("Put", cache_->Put(key, value));
  }
  Result<KvView> Get() override { return Or("Get", cache_->Get()); }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return Said("CopyPrefix", cache_->CopyPrefix(src, dst, len));
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return Or("CanResume", cache_->CanResume(seq, pos));
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return Said("Remove", cache_->Remove(seq, begin, end));
  }
  Status SetLayerType(int type) override {
    return Said("SetLayerType", cache_->SetLayerType(type));
  }
  Result<bool> EncoderCached() override {
    return Or("EncoderCached", cache_->EncoderCached());
  }
  Status SnapshotTo(CacheState& state) const override {
    return Said("Snapshot", cache_->SnapshotTo(state));
  }
  Status Restore(const CacheState& state) override {
    return Said("Restore", cache_->Restore(state));
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    return Or("SnapshotOf", cache_->SnapshotOf(sequence));
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    return Said("AddSequence", cache_->AddSequence(sequence, added));
  }

 private:
  Status Said(std::string_view call, const Status& status) const {
    return outside_ && call == call_ ? with_ : status;
  }
  template <class T>
  Result<T> Or(std::string_view call, Result<T> answer) const {
    if (!outside_ || call != call_) return answer;
    return with_.ok() ? Result<T>(T()) : Result<T>(with_);
  }

  const std::string_view call_;
  bool outside_;
  const bool before_;
  const Status with_;
};

TEST(FaultyTwins, CallsBeforeInitAndAfterCloseAreRefused) {
  const Status ok;
  const Status mute(StatusCode::kFailedPrecondition, "");
  const Status other(StatusCode::kInvalidArgument, "no");
  for (const bool before : {true, false}) {
    for (const char* call :
         {"SetLayer", "StartForward", "SetCausal", "Put", "Get", "CopyPrefix",
          "CanResume", "Remove", "SetLayerType", "EncoderCached", "Snapshot",
          "Restore", "SnapshotOf", "AddSequence"}) {
      for (const Status& with : {ok, mute, other}) {
        SCOPED_TRACE(call + with.ToString());
        const CacheMaker make =
            [=](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
          return std::unique_ptr<Cache>(
              std::make_unique<AnswersOutsideOfLife>(spec, call, before, with));
        };
        Subject subject;
        subject.name = "faulty";
        subject.make = make;
        const History history = *ParseHistory("kvt1 | put 0*1");
        const auto difference = RunHistory(history, subject).failure;
        ASSERT_TRUE(difference);
        EXPECT_EQ(difference->check,
                  before ? "misuse: before Init" : "misuse: after Close");
        EXPECT_TRUE(difference->text.starts_with(std::string(call) + " is "))
            << difference->text;
        // A faulty reference is found as well.
        EXPECT_TRUE(
            RunAgainst(make, history, TwinSubject("reference")).failure);
      }
    }
  }
}

// A refused batch of a legal client is a failure even if the ledger and both
// caches agree on it, because a legal client must always have room.
TEST(FaultyTwins, ALegalClientIsNeverRefused) {
  const History history = *ParseHistory("kvt1 legal=1 seqs=1 cap=2 batch=4");
  const Subject subject = TwinSubject("reference");
  RunResult result;
  DifferentialDriver driver(history.setup, subject, nullptr, nullptr, result);
  ASSERT_TRUE(driver.SetUp());
  const Tokens many = {
      .positions = {0, 1, 2}, .sequences = {0, 0, 0}, .multimodal = {}};
  EXPECT_TRUE(driver.StartForward(many, /*reserve=*/true));
  try {
    driver.StartForward(many, /*reserve=*/false);
    FAIL() << "was not found";
  } catch (const Failure& differs) {
    EXPECT_EQ(differs.check, "reference: a legal client is refused");
  }
}

}  // namespace
}  // namespace kvtwin::props
