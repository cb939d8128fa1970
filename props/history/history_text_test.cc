// The line of a history: the sizes that it may ask for, and how it is read and
// written.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"
#include "props/history/abilities.h"
#include "props/history/history.h"
#include "props/paged/paged_runner.h"
#include "props/search/explore_state.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

std::string WhyNot(const std::string& line) {
  const Result<History> history = ParseHistory(line);
  return history.ok() ? "" : history.status().message();
}

TEST(Line, SetsTheNumberOfCells) {
  for (const std::string setup :
       {"", "kind=swa window=0", "kind=swa window=2", "kind=swa window=9",
        "kind=swa", "kind=swa_mem window=1 memory=3", "kind=chunked chunk=3",
        "kind=wrapper caches=causal/swa:w2/encoder pad=1", "batch=2 pad=4",
        "kind=swa window=3 pad=4"}) {
    for (const int cells : {4, 8}) {
      const std::string line =
          "kvt1 " + setup + " cells=" + std::to_string(cells);
      const Result<History> history = ParseHistory(line);
      ASSERT_TRUE(history.ok()) << line << history.status().ToString();
      const auto cache = MakeCache(history->setup.spec, "reference");
      ASSERT_TRUE((*cache)->SetConfig(history->setup.config).ok());
      ASSERT_TRUE((*cache)->Init(history->setup.init).ok());
      EXPECT_EQ((*cache)->CellCount(), cells) << line;
      const std::string text = ToText(*history);
      EXPECT_NE(text.find("cells="), text.npos) << text;
    }
  }
}

TEST(Line, RefusesCellsThatNoCacheHas) {
  const std::string none = "no such cache has exactly ";
  EXPECT_EQ(WhyNot("kvt1 cells=3 pad=4"),
            "character 12: " + none + "3 cells: it would have 4");
  EXPECT_EQ(WhyNot("kvt1 kind=encoder cells=3"),
            "character 25: " + none + "3 cells: an encoder has no cells");
  EXPECT_EQ(WhyNot("kvt1 cells=0"),
            "character 12: " + none + "0 cells: its sizes must be at least 1");
  EXPECT_EQ(WhyNot("kvt1 kind=wrapper caches=swa:w1/swa:w2 cells=4"),
            "character 46: " + none + "4 cells: it would have 3");
  EXPECT_EQ(WhyNot("kvt1 kind=swa window=2 cells=4 batch=1"),
            "character 30: " + none + "4 cells: it would have 3");
  EXPECT_NE(WhyNot("kvt1 cells=4 cap=4"), "");
}

TEST(Line, SaysWhereItIsWrong) {
  const std::map<std::string, std::string> lines = {
      {"", "character 1: a history starts with 'kvt1'"},
      {"put 0*1", "character 1: a history starts with 'kvt1'"},
      {"kvt2 | put 0*1",
       "character 1: 'kvt2' is another version, this program reads kvt1"},
      {"kvt1 cap=x", "character 10: 'x' does not start with a number"},
      {"kvt1 cels=3",
       "character 6: 'cels' is not a setting, did you mean 'cells'?"},
      {"kvt1 shfit=rope",
       "character 6: 'shfit' is not a setting, did you mean 'shift'?"},
      {"kvt1 | put 0*1 | caual",
       "character 18: 'caual' is not an operation, did you mean 'causal'?"},
      {"kvt1 place=here", "character 6: 'here' is not a placement"},
      {"kvt1 cap=3 cap=3", "character 12: 'cap' comes twice"},
      {"kvt1 | put 0*1 | fly", "character 18: 'fly' is not an operation"},
      {"kvt1 | put 0*1 | drop 0:1-2z", "character 28: 'z' is left over"},
      {"kvt1 | put 0*1 except=0,-1", "character 25: -1 must not be negative"},
      {"kvt1 | move 0:1-2", "character 18: '' should continue with '@'"},
      {"kvt1 | move 0:1-@x",
       "character 18: 'x' does not start with a number of at most 2147483647"},
      {"kvt1 | get now", "character 8: 'get' is not an operation"},
      {"kvt1 | drop 0:1- 2", "character 18: '2' is left over"},
      {"kvt1 mask=bit", "character 11: 'bit' is not a dtype"},
      {"kvt1 dtype=f64", "character 12: 'f64' is not a dtype"},
      {"kvt1 dtype=bits", "character 12: 'bits' is not a dtype of rows"},
      {"kvt1 \x01", "character 6: '\\x01' is not a setting"},
  };
  for (const auto& [line, why] : lines) {
    EXPECT_EQ(WhyNot(line).substr(0, why.size()), why) << line;
  }
  // The first word is near no name; the second is a name.
  EXPECT_EQ(WhyNot("kvt1 frobnicate=3"),
            "character 6: 'frobnicate' is not a setting");
  EXPECT_EQ(WhyNot("kvt1 | get now"), "character 8: 'get' is not an operation");
}

// Every name that a line may have is suggested if a letter follows it.
TEST(Line, SuggestsEveryName) {
  std::set<std::string> settings = {"caches", "every", "keep", "pins"};
  std::set<std::string> operations = {"start",    "read", "store",  "except",
                                      "layer",    "type", "pin",    "add",
                                      "snapshot", "find", "cached", "commit"};
  for (std::uint64_t number = 0; number < 2000; ++number) {
    const std::string text = ToText(MakeHistory(5, number, {}, 20));
    std::istringstream parts(text);
    std::string part;
    std::getline(parts, part, '|');
    std::istringstream words(part.substr(4));
    for (std::string word; words >> word;) {
      settings.insert(word.substr(0, word.find('=')));
    }
    while (std::getline(parts, part, '|')) {
      operations.insert(part.substr(1, part.find(' ', 1) - 1));
    }
  }
  EXPECT_GT(settings.size(), 20);
  EXPECT_GT(operations.size(), 12);
  for (const std::string& name : settings) {
    const std::string why = WhyNot("kvt1 " + name + "~=1");
    EXPECT_NE(why.find("did you mean '" + name + "'?"), why.npos) << why;
  }
  for (const std::string& name : operations) {
    const std::string why = WhyNot("kvt1 | " + name + "~");
    EXPECT_NE(why.find("did you mean '" + name + "'?"), why.npos) << why;
  }
}

TEST(Line, IsReadBackAsWritten) {
  for (std::uint64_t number = 0; number < 2000; ++number) {
    const std::string text = ToText(MakeHistory(5, number, {}, 20));
    const Result<History> read = ParseHistory(text);
    ASSERT_TRUE(read.ok()) << text << "\n" << read.status().message();
    EXPECT_EQ(ToText(*read), text);
  }
}

TEST(Line, HasACustomShift) {
  const std::string line =
      "kvt1 kind=wrapper shift=custom caches=causal/swa:w2:add";
  const CacheSpec spec = ParseHistory(line)->setup.spec;
  EXPECT_EQ(ToText(ParseHistory(line)->setup), line);
  EXPECT_EQ(spec.caches[0].shift.kind, ShiftKind::kCustom);
  EXPECT_EQ(spec.caches[1].shift.kind, ShiftKind::kAdd);
  EXPECT_TRUE(spec.shift.fn && spec.caches[0].shift.fn);
  const std::string other = "kvt1 kind=wrapper caches=causal/swa:w2:custom";
  EXPECT_EQ(ToText(ParseHistory(other)->setup), other);
  EXPECT_TRUE(ParseHistory(other)->setup.spec.caches[1].shift.fn);
}

// Each argument, and each element, changes some element of the result.
TEST(Line, ACustomShiftDependsOnAllArguments) {
  const auto shifted = [](int layer, std::int32_t offset, int k_head_dim,
                          int kv_heads, std::vector<float> key, int times = 1) {
    for (int i = 0; i < times; ++i) {
      EXPECT_TRUE(
          CustomShift().fn(layer, offset, k_head_dim, kv_heads, key).ok());
    }
    return key;
  };
  const std::vector<float> key = {1, 2, 3, 4, 5, 6};
  const std::set<std::vector<float>> results = {
      key,
      shifted(0, -1, 3, 2, key),
      shifted(0, 1, 3, 2, key),
      shifted(0, -2, 3, 2, key),
      shifted(0, -1, 3, 2, key, 2),
      shifted(1, -1, 3, 2, key),
      shifted(0, -1, 2, 3, key),
      shifted(0, -1, 3, 2, {2, 1, 3, 4, 5, 6}),
      shifted(0, -1, 3, 2, {1, 2, 3, 4, 5, 7})};
  EXPECT_EQ(results.size(), 9);
  std::vector<float> longer = {1, 2, 3};
  EXPECT_EQ(CustomShift().fn(0, -1, 2, 1, longer).code(),
            StatusCode::kInvalidArgument);
}

TEST(Line, KeepsMovesAsWritten) {
  for (const std::string move :
       {"move 0:2-4@-1", "move 1:0-@+3", "move 0:~2-^1@+1"}) {
    const Result<History> history = ParseHistory("kvt1 | " + move);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    EXPECT_EQ(ToText(history->ops.at(0)), move);
  }
}

TEST(Line, NamesSequencesByTheirIds) {
  const auto near_end =
      ParseHistory("kvt1 firstid=2147483600 idstep=40")->setup;
  EXPECT_EQ(near_end.IdOf(1), 2147483640);
  EXPECT_EQ(near_end.IdOf(2), 2147483647);
  EXPECT_EQ(near_end.NameOf(2147483640), 1);
  EXPECT_EQ(near_end.NameOf(2147483647), 2);
  const auto far = ParseHistory("kvt1 firstid=7 idstep=65536")->setup;
  EXPECT_EQ(far.IdOf(3), 7 + 3 * 65536);
  EXPECT_EQ(far.NameOf(7 + 3 * 65536), 3);
  EXPECT_EQ(ToText(*ParseHistory("kvt1 idstep=4 | put 1*2")),
            "kvt1 idstep=4 | put 1*2");
  EXPECT_EQ(WhyNot("kvt1 idstep=0 | put 1*2"),
            "character 13: ids are at least 1 apart");
}

TEST(Line, ParsesOrRefusesAnyChangedText) {
  const std::string bytes = "kvt1 |:*@~^->=,+0129azput\xff\x01";
  std::uint64_t state = 1;
  const auto draw = [&state](std::size_t below) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return AsSize(state >> 33) % below;
  };
  int refused = 0;
  for (std::uint64_t number = 0; number < 5000; ++number) {
    std::string text = ToText(MakeHistory(6, number, {}, 3));
    for (int change = 0; change < 3; ++change) {
      text[draw(text.size())] = bytes[draw(bytes.size())];
      if (draw(4) == 0) text.resize(draw(text.size()) + 1);
    }
    const std::string why = WhyNot(text);
    if (why.empty()) continue;
    ++refused;
    EXPECT_TRUE(why.starts_with("character ")) << text << ": " << why;
  }
  EXPECT_GT(refused, 2000);
}

TEST(Line, LimitsTheTokensOfASegment) {
  for (const int n : {499, 500, 501, 999, 1000, 1001}) {
    const std::string line = fmt::format(
        "kvt1 cells=1100 batch=1050 | start 0*{} | start 1*free-3", n);
    const History history = *ParseHistory(line);
    EXPECT_EQ(ToText(history), line);
    std::vector<CellEntry> cells;
    ReferenceAfter(history)->ListCells(cells);
    EXPECT_EQ(std::ssize(cells), std::min(n + 1050, 1097));
  }
  for (const auto& [most, more] : {std::pair("put 0*1048576", "put 0*1048577"),
                                   {"put 0*free-1048576", "put 0*free-1048577"},
                                   {"put 0*free+1048576", "put 0*free+1048577"},
                                   {"put 0-4095*1", "put 0-4096*1"},
                                   {"copy 0>1-4096:1", "copy 0>1-4097:1"}}) {
    const std::string setup = "kvt1 cells=8 | ";
    EXPECT_TRUE(ParseHistory(setup + most).ok()) << most;
    EXPECT_FALSE(ParseHistory(setup + more).ok()) << more;
  }
}

// The largest size that a line may ask for is accepted, one more is refused.
TEST(Line, LimitsTheSizesOfACache) {
  const auto refusal = [](const std::string& line) {
    const bool paged = line.starts_with("kvp1");
    return paged ? ParsePagedHistory(line).status().message()
                 : ParseHistory(line).status().message();
  };
  const auto times = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  struct Case {
    std::string begin;
    int most;
    std::string end;
    std::string why;
  };
  for (const auto& [begin, most, end, why] : std::vector<Case>{
           {"kvt1 seqs=1 cap=", (1 << 20) - 2, " batch=1 | put 0*1",
            "more than 1048576 cells or mask rows"},
           // The mask has 16,380 * 4,097 elements.
           {"kvt1 seqs=1 cap=", 12'283, " batch=4096 | put 0*1",
            "a cache of this size is too large for a test"},
           // The rows of all layers have 64 * 1,024 * (512 + 512) elements.
           {"kvt1 seqs=1 batch=1 layers=64 dims=512,1,512 cap=", 1022,
            " | put 0*1", "a cache of this size is too large for a test"},
           // Queries and outputs have 128 * 128 * 4,096 elements.
           {"kvt1 seqs=1 cap=1 dims=4095,1,1 group=128 batch=", 127,
            " | put 0*1", "a cache of this size is too large for a test"},
           {"kvt1 layers=", 128, " | put 0*1", "there can be 1 to 128"},
           {"kvt1 group=", 128, " | put 0*1", "there can be up to 128"},
           {"kvp1 block=", 1 << 14, " | open 0 0 0", "must be from 1 to 16384"},
           {"kvp1 block=16384 kdim=1 vdim=1 layers=1 heads=1 blocks=", 64,
            " | open 0 0 0", "a pool of this size is too large for a test"},
           {"kvp1 groups=block:1024,kdim:1,vdim:1,layers:1,heads:1,blocks:512/"
            "block:1024,kdim:1,vdim:1,layers:1,heads:1,blocks:",
            512, " | open 0 0 0",
            "a pool of this size is too large for a test"}}) {
    EXPECT_EQ(refusal(begin + std::to_string(most) + end), "");
    EXPECT_NE(refusal(begin + std::to_string(most + 1) + end).find(why),
              std::string::npos)
        << refusal(begin + std::to_string(most + 1) + end);
  }
  const std::string caches = "kvt1 kind=wrapper caches=causal";
  EXPECT_EQ(refusal(caches + times(15, "/causal") + " | put 0*1"), "");
  EXPECT_NE(refusal(caches + times(16, "/causal") + " | put 0*1")
                .find("more than 16 caches"),
            std::string::npos);
  // A product of all settings does not fit into 64 bits.
  for (const std::string dim : {"256", "16384"}) {
    EXPECT_NE(refusal("kvp1 block=16384 blocks=16384 layers=16384 heads=16384 "
                      "kdim=" +
                      dim + " vdim=" + dim + " | open 0 0 0")
                  .find("a pool of this size is too large for a test"),
              std::string::npos);
  }
  const std::string group = "block:1,blocks:1";
  const std::string groups = "kvp1 groups=" + group;
  EXPECT_EQ(refusal(groups + times(15, "/" + group) + " | open 0 0 0"), "");
  EXPECT_NE(refusal(groups + times(16, "/" + group) + " | open 0 0 0")
                .find("more than 16 groups"),
            std::string::npos);
  EXPECT_EQ(refusal("kvp1" + times(100'000, " | open 0 0 0")), "");
  EXPECT_NE(refusal("kvp1" + times(100'001, " | open 0 0 0"))
                .find("more than 100000 operations"),
            std::string::npos);
}

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::string> NotRunOf(const std::string& operations,
                                  const Abilities& abilities) {
  return NotRun(*ParseHistory("kvt1 legal=1 | " + operations), abilities);
}

constexpr std::uint32_t kNothing = 0;

TEST(NotRun, NamesTheAbilityOfEachOperation) {
  const Abilities none = {.can = kNothing,
                          .can_resume = false,
                          .set_causal = false,
                          .shift = false,
                          .snapshots = false};
  for (const auto& [operation, why] :
       {std::pair("put 0*2:-1", "KVTWIN_CAN_DRAFT"),
        {"commit 0:0", "KVTWIN_CAN_DRAFT"},
        {"find 0:1,2", "KVTWIN_CAN_FIND_PREFIX"},
        {"pin 0", "KVTWIN_CAN_PIN"},
        {"misuse 7", "KVTWIN_CAN_REFUSE_MISUSE"},
        {"causal 0", "it has no set_causal"},
        {"ask 0@1", "it has no can_resume"},
        {"drop 0:0-", "KVTWIN_CAN_REMOVE_TAIL"},
        {"copy 0>1:1", "KVTWIN_CAN_COPY_PREFIX"},
        {"reload", "need snapshot and restore"}}) {
    const auto texts = NotRunOf(operation, none);
    ASSERT_EQ(texts.size(), 1) << operation;
    EXPECT_TRUE(texts[0].starts_with(std::string(operation) + ": "));
    EXPECT_TRUE(texts[0].ends_with(why)) << texts[0];
  }
  EXPECT_THAT(NotRunOf("put 0*2 | get", none), IsEmpty());
}

TEST(NotRun, SaysWhatRunsInstead) {
  const Abilities few = {.can =
                             KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_COPY_PREFIX};
  EXPECT_THAT(NotRunOf("drop 0:0-1", few),
              ElementsAre("drop 0:0-1: it runs as a removal up to the end, "
                          "because it does not declare "
                          "KVTWIN_CAN_REMOVE_MIDDLE"));
  EXPECT_THAT(NotRunOf("put 0*1 1*1", few),
              ElementsAre("put 0*1 1*1: its first sequence alone runs, "
                          "because it does not declare KVTWIN_CAN_MIX"));
  EXPECT_THAT(NotRunOf("copy 0>1:1", few),
              ElementsAre("copy 0>1:1: it copies the whole sequence, because "
                          "it does not declare KVTWIN_CAN_SHARE"));
  EXPECT_THAT(
      NotRunOf("put 0*1 overfull", few),
      ElementsAre("put 0*1 overfull: the client makes room for the batch, "
                  "because it does not declare "
                  "KVTWIN_CAN_REFUSE_FULL"));
}

TEST(NotRun, OnlyLegalClientsOverfill) {
  for (const std::uint32_t can : {~std::uint32_t{0}, kNothing}) {
    EXPECT_THAT(NotRun(*ParseHistory("kvt1 | put 0*1 overfull"), {.can = can}),
                ElementsAre("put 0*1 overfull: it runs as written, because it "
                            "needs legal=1"));
  }
}

TEST(NotRun, HasNothingOfABackendThatDeclaresAll) {
  const Abilities all = {.can = ~std::uint32_t{0}};
  EXPECT_THAT(
      NotRunOf("put 0*1 1*1 | drop 0:0-1 | copy 0>1:1 | find 0:1 | "
               "pin 0 | put 0*2:-1 | commit 0:0 | misuse 1 | causal 0 | "
               "put 0*1 overfull",
               all),
      IsEmpty());
}

using testing::HasSubstr;

PagedHistory HistoryOf(const std::string& line) {
  return *ParsePagedHistory("kvp1 most=4 " + line);
}

TEST(PoolNotRun, NamesTheOperationsThatThePoolLacks) {
  const PagedHistory history = HistoryOf(
      "block=2 blocks=2 | open 0 0 0 | fork 0 1 0 | free 0 0 0 | misuse 1 0 0");
  EXPECT_THAT(NotRun(history, Level::kVisibility, {"fork", "table"}),
              ElementsAre("fork 0 1 0: it does not declare fork",
                          "misuse 1 0 0: misuse is tried at identity only"));
  EXPECT_THAT(NotRun(history, Level::kIdentity, {}), IsEmpty());
}

// The first operation opens a sequence, whichever it is.
TEST(PoolNotRun, TheFirstOperationRuns) {
  EXPECT_THAT(NotRun(HistoryOf("block=2 blocks=2 | fork 0 1 0"),
                     Level::kVisibility, {"fork"}),
              IsEmpty());
}

TEST(PoolNotRun, SaysWhichPoolsAreDeclared) {
  const PagedHistory plain =
      HistoryOf("block=2 blocks=2 dtype=f32 | open 0 0 0");
  Abilities bf16;
  bf16.dtypes = 1U << KVTWIN_BF16;
  EXPECT_THAT(WhyNoPool("mine", bf16, false, plain),
              HasSubstr("mine declares the dtypes bf16: write dtype=bf16"));
  Abilities wide;
  wide.block_multiple = 16;
  EXPECT_THAT(WhyNoPool("mine", wide, false, plain),
              HasSubstr("blocks of a multiple of 16 tokens"));
  EXPECT_THAT(WhyNoPool("mine", {}, false, plain),
              HasSubstr("the init of mine refuses such a pool: 'kvp1 "));
  EXPECT_THAT(WhyNoPool("mine", {}, false,
                        HistoryOf("groups=block:2,blocks:2 | open 0 0 0")),
              HasSubstr("has groups, and mine declares none"));
}

TEST(DraftHistories, ReadBack) {
  for (const std::string line : {
           "kvt1 | put 0*5:-1,0,0,1,1 | commit 0:0,1 | commit 1:",
           "kvt1 | put 0*2:-1 1*1 reserve | start 0-1*1:2",
       }) {
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    EXPECT_EQ(ToText(*history), line);
  }
  EXPECT_FALSE(ParseHistory("kvt1 | commit 0").ok());
  EXPECT_FALSE(ParseHistory("kvt1 | put 0*1:").ok());
  EXPECT_FALSE(ParseHistory("kvt1 | commit 0:1,").ok());
}

}  // namespace
}  // namespace kvtwin::props
