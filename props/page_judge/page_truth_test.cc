// Each label of each page is true: pages of recordings of foreign layouts, of
// rejected recordings, and of histories of faulty caches are compared with a
// ledger of their own.

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/base/scratch_folder.h"
#include "props/page_judge/foreign_layouts.h"
#include "props/page_judge/page_judge.h"
#include "props/report/page.h"
#include "props/report/show.h"
#include "props/search/judged_page.h"
#include "props/testing/faulty_twins.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::json;

// Counts what the judge compared.
struct Tally {
  std::int64_t pages = 0;
  std::int64_t labels = 0;
  std::int64_t lies = 0;
};

void ExpectTrue(const std::string& html, const JudgedCalls& calls,
                Tally& tally) {
  const PageVerdict verdict = JudgePage(PageData(html), calls);
  ++tally.pages;
  tally.labels += verdict.labels;
  tally.lies += std::ssize(verdict.lies);
  for (const std::string& lie : verdict.lies) ADD_FAILURE() << lie;
}

void Print(const std::string& what, const Tally& tally) {
  ::testing::Test::RecordProperty(what + "_labels",
                                  std::to_string(tally.labels));
  fmt::print("{}: {} pages, {} labels, {} lies\n", what, tally.pages,
             tally.labels, tally.lies);
}

// Recordings ------------------------------------------------------------------

JudgedCalls CallsOf(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  TraceReader reader(in);
  JudgedCalls calls;
  EXPECT_TRUE(reader.ReadHeader());
  calls.spec = reader.header().spec;
  calls.config = reader.header().config;
  calls.init = reader.header().init;
  calls.visibility_only = reader.header().visibility_only;
  TraceOp op;
  while (reader.ReadOp(op)) calls.calls.push_back({op, false, {}});
  return calls;
}

// Returns the calls up to the wrong line of the page.
JudgedCalls UpTo(JudgedCalls calls, const Json& page) {
  std::erase_if(calls.calls, [&](const JudgedCall& call) {
    return call.op.line > page["steps"].back()["number"];
  });
  return calls;
}

void JudgeRecording(const std::string& path, Tally& tally) {
  const auto failure = ExplainRecording(path, kTwins);
  ASSERT_TRUE(failure) << path;
  const std::string html = PageHtml(*failure);
  ExpectTrue(html, UpTo(CallsOf(path), PageData(html)), tally);
}

TEST(PageJudge, PagesOfForeignLayoutsAreTrue) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("foreign.jsonl");
  Tally tally;
  for (const ForeignLayout& layout : ForeignLayouts()) {
    for (const PlantedFault planted : kPlantedFaults) {
      SCOPED_TRACE(fmt::format("{}, fault {}", layout.name, AsInt(planted)));
      RecordForeign(layout, planted, path);
      JudgeRecording(path, tally);
    }
  }
  Print("foreign layouts", tally);
}

TEST(PageJudge, PagesOfEncodersAreTrue) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("encoder.jsonl");
  Tally tally;
  const std::string header =
      Replaced(Replaced(kHeader, R"("type":"causal","shift":"tag_add")",
                        R"("type":"encoder","shift":"none")"),
               "contiguous", "other");
  const std::string start =
      R"({"op":"start_forward","positions":[0,1],"sequences":[0,0],)"
      R"("multimodal":[1],"result":"ok"})";
  const std::string get =
      R"({"op":"get","layer":0,"mask":null,)"
      R"("key":{"shape":[2,1,2],"data":[100,1000,200,1001]},)"
      R"("value":{"shape":[1,1,2],"data":[100,200]}})";
  const std::string cached = R"({"op":"encoder_cached","result":true})";
  const std::string right = Lines({header, start, kPut, cached, get});
  ExpectAccept(right, Level::kVisibility);
  for (const auto& [from, to] :
       {std::pair{"[100,1000,200,1001]},\"value\":{\"shape\":[1,1,2],"
                  "\"data\":[100,200]}}\n",
                  "[100,1000,200,1001]},\"value\":{\"shape\":[1,1,2],"
                  "\"data\":[100,201]}}\n"}}) {
    std::string text = right;
    const std::size_t at = text.rfind(from);
    ASSERT_NE(at, text.npos) << text;
    text.replace(at, std::string(from).size(), to);
    ASSERT_TRUE(WriteFile(path, text).ok());
    JudgeRecording(path, tally);
  }
  const std::string early = Lines({header, start, cached});
  ASSERT_TRUE(WriteFile(path, early).ok());
  JudgeRecording(path, tally);
  Print("encoders", tally);
}

TEST(PageJudge, PagesOfPromptsAreTrue) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("prompts.jsonl");
  Tally tally;
  const std::string header =
      Replaced(Replaced(kHeader, "\"kvtrace\":1", "\"kvtrace\":4"),
               "contiguous", "other");
  const std::string find =
      R"({"op":"find_prefix","seq":0,"tokens":[5,6,7],"len":0})";
  const std::string drop =
      R"({"op":"remove","seq":0,"begin":0,"end":2147483647,"result":"ok"})";
  const std::string again = Replaced(find, "\"len\":0", "\"len\":2");
  const std::string start =
      R"({"op":"start_forward","positions":[2],"sequences":[0],"result":"ok"})";
  const std::string put =
      R"({"op":"put","layer":0,"key":{"shape":[2,1,1],"data":[300,1002]},)"
      R"("value":{"shape":[1,1,1],"data":[300]}})";
  const std::string lost =
      R"({"op":"get","layer":0,"key":{"shape":[2,1,1],"data":[300,1002]},)"
      R"("value":{"shape":[1,1,1],"data":[300]},)"
      R"("mask":{"shape":[1,1],"rows":["1"]}})";
  ASSERT_TRUE(WriteFile(path, Lines({header, find, kStart, kPut, kGet, drop,
                                     again, start, put, lost}))
                  .ok());
  JudgeRecording(path, tally);
  Print("prompts", tally);
}

TEST(PageJudge, PagesOfRejectedRecordingsAreTrue) {
  Tally tally;
  for (const auto& path : Recordings("reject")) {
    SCOPED_TRACE(path.string());
    std::ifstream in(path, std::ios::binary);
    TraceReader reader(in);
    if (!reader.ReadHeader() || reader.paged()) continue;
    JudgeRecording(path.string(), tally);
  }
  Print("rejected recordings", tally);
}

// Histories -------------------------------------------------------------------

// Judges the page of a history, if it fails.
void JudgeHistory(const History& history, const Subject& subject,
                  Tally& tally) {
  const auto run = RunJudged(history, subject);
  if (!run) return;
  SCOPED_TRACE(run->failure.report);
  ExpectTrue(PageHtml(run->failure), run->calls, tally);
}

// Sets an element of the last row that differs from the rest.
View Says(std::int64_t row, std::int64_t column, bool seen) {
  return [=](OwnedView& view) {
    const TensorView mask = view.mask.view();
    if (mask.data == nullptr || row >= mask.shape[1] ||
        column >= mask.shape[0]) {
      return;
    }
    auto* element = const_cast<std::byte*>(mask.at(column, row, 0, 0));
    const float value = seen ? 0 : -std::numeric_limits<float>::infinity();
    std::memcpy(element, &value, sizeof(value));
  };
}

std::vector<std::string> ShortHistories() {
  return {
      "| put 0*3",
      "layers=2 dims=2,2,2 | put 0*3",
      "pad=4 | put 1*1 | put 0*2",
      "maskpad=4 | put 0*2",
      "| put 0*3 | copy 0>1:2 | put 0*1 1*1",
      "| put 0*4 | drop 0:1-2 | put 0*1 | ask 0@1",
      "kind=swa window=1 seqs=1 | put 0*4 | ask 0@1",
      "kind=swa window=2 | put 0*3 1*2 | put 0*1 | put 1*2",
      "permuted=1 dims=1,2,3 | put 0*3 1*2",
      "tiled=1 pad=32 dims=1,2,3 | put 0*3",
      "kind=chunked chunk=2 | put 0*5",
      "| put 0*3 | causal 0",
      "| put 0*2 | drop 0:1- | get",
      "| put 0*1 | put 0*2 keep | put 0*1",
      "kind=encoder seqs=1 | put 0*1 image=0",
      kWrapper + "| put 0*2 | put 0*2",
      kWrapper + "| put 0*2 | put 0*2 | drop 0:1-",
      "| put 1*2 | reload | put 1*1",
      "| put 1*2 | reload | reload | put 1*1",
      "| put 1*2 | snapshot 1 | put 1*1 | reload | put 1*1 | reload | put 0*1",
      "cells=9 | put 1*2 | add 1>2 | put 0*1 2*1 | drop 2:1- | get",
      "kind=wrapper caches=swa:w2/causal layers=2 cells=9 | put 0*2 | add 0>1 "
      "| "
      "put 1*1 | reload | reload | put 1*1",
      "| put 0*2 | put 0*5:-1,-1,0,0,2 | commit 0:0,0 | put 0*1",
      "| put 0*1:-1 1*2:-1,0 | commit 0: | commit 1:0,0 | put 0*1 1*1",
      "kind=swa window=2 | put 0*2 | put 0*2:-1,0 | drop 0:2- | put 0*1",
      "cells=3 firstid=1000 | put 0*1 | poison | get | put 0*1",
      "kind=recurrent pins=1 | put 0*2 | pin 0 | put 0*1 | put 0*1",
      // Some columns are not drawn.
      "cells=140 | start 0*100 | store | put 0*3",
  };
}

std::vector<Fault> FaultsOfViewsAndCalls() {
  const auto swapped = [](DenseTensor OwnedView::*tensor) {
    return [=](OwnedView& view) {
      std::vector<std::byte>& bytes = (view.*tensor).bytes;
      std::rotate(bytes.begin(), bytes.begin() + std::ssize(bytes) / 2,
                  bytes.end());
    };
  };
  const auto neither = [](OwnedView& view) {
    if (view.mask.bytes.empty()) return;
    ChangeByte(view.mask.bytes.front());
  };
  const auto lists = [](const std::function<void(std::vector<CellEntry>&)>& f) {
    return Fault{.cells = f};
  };
  return {
      Shows(First(kKey)),
      Shows(Last(kKey)),
      Shows(First(kValue)),
      Shows(Last(kValue)),
      Shows(swapped(kKey)),
      Shows(swapped(kValue)),
      Shows(neither),
      Shows(Says(0, 1, true)),
      Shows(Says(0, 2, true)),
      Shows(Says(1, 0, false)),
      Shows(Says(2, 1, false)),
      Shows(Says(3, 0, true)),
      Shows(Last(kKey), -1, 1),
      Shows(Says(1, 0, false), -1, 1),
      lists([](auto& cells) {
        if (!cells.empty()) ++cells.back().position;
      }),
      lists([](auto& cells) {
        if (cells.size() > 1) cells.pop_back();
      }),
      lists([](auto& cells) {
        if (!cells.empty()) ++cells.back().cell;
      }),
      Resumes([](bool yes) { return !yes; }),
      Refuses("StartForward", StatusCode::kCacheFull),
      Refuses("CopyPrefix"),
      Refuses("Remove"),
      Refuses("Put"),
      Refuses("Get"),
      Refuses("CanResume"),
      Refuses("Commit"),
      // The calls to the cache that is loaded and then dropped do not count.
      Refuses("AddSequence"),
      Fault{.throws = true},
      Fault{.call = "StartForward", .throws = true},
      Fault{.call = "Put", .throws = true},
      Fault{.call = "Get", .throws = true},
      Fault{.call = "Remove", .throws = true},
      Fault{.call = "CanResume", .throws = true},
      Fault{.call = "Commit", .throws = true},
  };
}

TEST(PageJudge, PagesOfFaultyTwinsAreTrue) {
  const std::vector<Fault> faults = FaultsOfViewsAndCalls();
  for (const Level level :
       {Level::kIdentity, Level::kVisibility, Level::kNumeric}) {
    Tally tally;
    for (const std::string& text : ShortHistories()) {
      const Result<History> history = ParseHistory("kvt1 " + text);
      ASSERT_TRUE(history.ok()) << text;
      for (std::size_t i = 0; i < faults.size(); ++i) {
        SCOPED_TRACE(
            fmt::format("{}, fault {}, {}", text, i, LevelName(level)));
        Subject subject = Tampered(faults[i], level);
        subject.can_be_poisoned = true;
        JudgeHistory(*history, subject, tally);
      }
    }
    Print(fmt::format("faulty twins, {}", LevelName(level)), tally);
    EXPECT_GT(tally.pages, 100);
  }
}

// Changed labels --------------------------------------------------------------

using JudgeFn = std::function<PageVerdict(const Json& page)>;

// Changes the labels of a page one at a time, and expects the judge to find
// each change.
class LabelChanger {
 public:
  LabelChanger(Json page, JudgeFn judge)
      : page_(std::move(page)), judge_(std::move(judge)), changed_(page_) {}

  // Returns how many labels were changed.
  int Run() {
    EXPECT_TRUE(judge_(page_).lies.empty());
    for (std::size_t i = 0; i < page_["steps"].size(); ++i) ChangeStep(i);
    ChangeList();
    ChangePlace();
    return changes_;
  }

 private:
  // Judges the changed page, and takes the change back.
  void ExpectFound(const std::string& what) {
    ++changes_;
    EXPECT_FALSE(judge_(changed_).lies.empty()) << what;
    changed_ = page_;
  }

  void ChangeStep(std::size_t i) {
    const Json& right = page_["steps"][i];
    const auto step = [&]() -> Json& { return changed_["steps"][i]; };
    step()["call"] = "Close()";
    ExpectFound("the call");
    step()["answer"] = "refused";
    ExpectFound("an answer");
    step()["refused"] = !right.value("refused", false);
    ExpectFound("whether the call was refused");
    if (!right.contains("cells")) return;
    for (std::size_t j = 0; j < right["cells"].size(); ++j) {
      step()["cells"][j]["position"] = 99;
      ExpectFound("the token of a cell");
      step()["cells"][j]["sequences"] = Json::array({7});
      ExpectFound("the sequence of a cell");
    }
    for (std::size_t j = 0; j < right["found"].size(); ++j) ChangeFound(i, j);
    if (!right.contains("mask")) return;
    for (std::size_t j = 0; j < right["mask"]["rows"].size(); ++j) {
      ChangeRow(i, j);
    }
  }

  void ChangeFound(std::size_t i, std::size_t j) {
    const Json found = page_["steps"][i]["found"][j];
    const auto change = [&](const std::string& key, const Json& value) {
      changed_["steps"][i]["found"][j][key] = value;
      ExpectFound("found: " + key);
    };
    change("differs", !found.value("differs", false));
    if (!found["sequences"].empty()) change("position", 99);
    if (!page_["steps"][i].contains("mask")) return;
    change("gone", !found.value("gone", false));
    if (found["sequences"].empty()) return;
    change("key", !found.value("key", true));
    change("value", !found.value("value", true));
  }

  void ChangeRow(std::size_t i, std::size_t j) {
    const Json& row = page_["steps"][i]["mask"]["rows"][j];
    const auto here = [&]() -> Json& {
      return changed_["steps"][i]["mask"]["rows"][j];
    };
    const std::string sights = row["sights"];
    for (std::size_t c = 0; c < sights.size(); ++c) {
      for (const char sight : std::string("#x.+-?")) {
        if (sight == sights[c]) continue;
        std::string other = sights;
        other[c] = sight;
        here()["sights"] = other;
        ExpectFound(
            fmt::format("step {} row {}: {} for {}", i, j, other, sights));
      }
    }
    here()["token"]["position"] = 99;
    here()["token"]["sequences"] = Json::array({0});
    ExpectFound("the token of a row");
    if (!row.contains("missing")) return;
    here().erase("missing");
    ExpectFound("no missing token");
  }

  void ChangeList() {
    changed_["steps"].erase(0);
    ExpectFound("a call that is not in the list");
    changed_["steps"].erase(changed_["steps"].size() - 1);
    ExpectFound("no failing call");
  }

  void ChangePlace() {
    changed_["headline"] =
        "The token at position 99 of sequence 0 reads what it must not see.";
    ExpectFound("the headline");
    for (const Json& row : page_["steps"].back().value(
             "/mask/rows"_json_pointer, Json::array())) {
      if (row["row"] == page_["wrong"]["row"]) continue;
      if (row["sights"].get<std::string>().find_first_of("x+-?") !=
          std::string::npos) {
        continue;
      }
      changed_["wrong"]["row"] = row["row"];
      ExpectFound("the wrong row");
    }
    changed_["wrong"]["cell"] = 63;
    ExpectFound("the wrong cell");
  }

  const Json page_;
  JudgeFn judge_;
  Json changed_;
  int changes_ = 0;
};

TEST(PageJudge, FindsEachChangedLabelOfARecording) {
  const ScratchFolder folder("pages");
  const std::string path = folder.File("foreign.jsonl");
  int changes = 0;
  for (const PlantedFault planted :
       {PlantedFault::kValue, PlantedFault::kMisses, PlantedFault::kNowhere,
        PlantedFault::kTooMany}) {
    RecordForeign(ForeignLayouts()[0], planted, path);
    const auto failure = ExplainRecording(path, kTwins);
    ASSERT_TRUE(failure);
    const Json page = PageData(PageHtml(*failure));
    const JudgedCalls calls = UpTo(CallsOf(path), page);
    changes += LabelChanger(page, [&](const Json& changed) {
                 return JudgePage(changed, calls);
               }).Run();
  }
  fmt::print("{} changed labels, each found\n", changes);
  EXPECT_GT(changes, 1000);
}

// At the numeric level a page marks no sight as wrong, because only what
// attention makes of them is compared.
TEST(PageJudge, FindsEachChangedLabelOfTheNumericLevel) {
  const auto run =
      RunJudged(*ParseHistory("kvt1 | put 0*3 | put 0*1 1*1"),
                Tampered(Shows(Says(2, 1, false)), Level::kNumeric));
  ASSERT_TRUE(run);
  const int changes =
      LabelChanger(PageData(PageHtml(run->failure)), [&](const Json& changed) {
        return JudgePage(changed, run->calls);
      }).Run();
  fmt::print("{} changed labels, each found\n", changes);
  EXPECT_GT(changes, 50);
}

}  // namespace
}  // namespace kvtwin::props
