// Tests how a backend describes itself, and how that changes a history. (Tests
// of props/backend/backend_test.sh and of profiles look at its answers.)

#include "props/backend/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "core/index.h"
#include "props/backend/c_conversions.h"
#include "props/backend/host_child.h"
#include "props/backend/host_process.h"
#include "props/backend/ledger_backend.h"
#include "props/backend/live.h"
#include "props/base/scratch_folder.h"
#include "props/compare/runner.h"
#include "props/history/generate.h"
#include "props/history/knobs.h"

namespace kvtwin::props {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The answer of Describe below, instead of the defaults.
kvtwin_description_v1 said;
int answer = KVTWIN_OK;

int Describe(kvtwin_description_v1* out) {
  if (said.size != 0) *out = said;
  return answer;
}

// A table of functions that are never called.
kvtwin_backend_v1 Table() {
  kvtwin_backend_v1 table = {};
  table.size = sizeof(table);
  table.describe = Describe;
  table.init = [](const kvtwin_setup_v1*, void**) { return 0; };
  table.close = [](void*) {};
  table.start_forward = [](void*, const kvtwin_batch*, int) { return 0; };
  table.put = [](void*, std::int32_t, const kvtwin_tensor*,
                 const kvtwin_tensor*) { return 0; };
  table.get = [](void*, std::int32_t, kvtwin_view*) { return 0; };
  said = {};
  answer = KVTWIN_OK;
  return table;
}

kvtwin_description_v1 Right() {
  kvtwin_description_v1 right = {};
  right.size = sizeof(right);
  right.name = "mine";
  right.profile = "ollama-0.15";
  right.level = KVTWIN_VISIBILITY;
  right.kinds = right.dtypes = right.v_layouts = right.shifts = 1;
  right.mask_dtypes = 1;
  return right;
}

void ExpectRefused(const kvtwin_backend_v1* table, const std::string& text) {
  const Result<BackendInfo> info = DescribeBackend(table);
  EXPECT_EQ(info.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(info.status().message(), HasSubstr(text));
}

TEST(Backend, TheSmallestTableHasDefaults) {
  const kvtwin_backend_v1 table = Table();
  const Result<BackendInfo> info = DescribeBackend(&table);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->claims, Level::kVisibility);
  EXPECT_EQ(info->abilities.kinds, KVTWIN_HAS_CAUSAL);
  EXPECT_EQ(info->abilities.max_sequences, 1);
  EXPECT_TRUE(info->abilities.OnlyGoesOn());
  EXPECT_FALSE(info->has_cells);
}

TEST(Backend, InvalidTablesAreRefusedByName) {
  ExpectRefused(nullptr, "backend is NULL");
  kvtwin_backend_v1 table = Table();
  table.size = offsetof(kvtwin_backend_v1, message) - 1;
  ExpectRefused(&table, "size");
  table = Table();
  table.put = nullptr;
  ExpectRefused(&table, "put");
  table = Table();
  answer = KVTWIN_INTERNAL;
  ExpectRefused(&table, "describe answers -4");
}

// A newer table may be longer if every byte after the known functions is 0.
TEST(Backend, TablesThatAreTooLongAreRefused) {
  struct {
    kvtwin_backend_v1 table;
    std::uint64_t more = 0;
  } longer = {*LedgerBackend("mlx")};
  longer.table.size = sizeof(longer);
  EXPECT_TRUE(DescribeBackend(&longer.table).ok());
  longer.more = 1;
  EXPECT_NE(DescribeBackend(&longer.table)
                .status()
                .message()
                .find("the library knows nothing"),
            std::string::npos);
  longer.more = 0;
  // Sizes are accepted up to kStructBytesMax, if all unknown bytes are 0.
  std::vector<std::byte> bytes(kStructBytesMax + 8);
  const auto with_size = [&](std::size_t size) {
    longer.table.size = size;
    std::memcpy(bytes.data(), &longer.table, sizeof(longer.table));
    return DescribeBackend(
               reinterpret_cast<const kvtwin_backend_v1*>(bytes.data()))
        .status();
  };
  EXPECT_TRUE(with_size(kStructBytesMax).ok());
  EXPECT_EQ(with_size(kStructBytesMax + 8).message(),
            "backend.size is 4104, no struct is that large");
}

TEST(Backend, InvalidDescriptionsAreRefused) {
  const kvtwin_backend_v1 table = Table();
  const auto refused = [&](auto change, const std::string& text) {
    said = Right();
    ASSERT_TRUE(DescribeBackend(&table).ok());
    change(said);
    ExpectRefused(&table, text);
  };
  const std::string endless(300, 'x');
  refused([](auto& description) { description.name = nullptr; }, "name");
  refused([&](auto& description) { description.name = endless.c_str(); },
          "name");
  refused([](auto& description) { description.profile = "vllm"; }, "vllm");
  refused(
      [](auto& description) { description.profile = "mlx except copy flies"; },
      "flies");
  const std::string long_profile = "mlx" + std::string(5000, ' ');
  refused(
      [&](auto& description) { description.profile = long_profile.c_str(); },
      "profile");
  refused([](auto& description) { description.placements = 1U << 2; },
          "placements");
  refused([](auto& description) { description.max_position = -1; },
          "max_position of the backend's description is -1, it must not be");
  refused([](auto& description) { description.max_mask_padding = -1; },
          "max_mask_padding of the backend's description is -1");
  refused(
      [](auto& description) {
        const int unknown = 4;  // C may store any number.
        std::memcpy(&description.level, &unknown, sizeof(unknown));
      },
      "level");
  refused([](auto& description) { description.kinds = KVTWIN_HAS_WRAPPER; },
          "kind");
  refused([](auto& description) { description.dtypes = 0; }, "dtype");
  refused([](auto& description) { description.max_layers = -1; },
          "max_layers of the backend's description is -1");
  refused([](auto& description) { description.tolerance = -1; },
          "tolerance of the backend's description is -1, it must be finite");
  refused([](auto& description) { description.attend_tolerance = NAN; },
          "attend_tolerance of the backend's description is nan");
}

TEST(Backend, UnknownFlagsAreRefusedByName) {
  const kvtwin_backend_v1 table = Table();
  using Field = std::uint32_t kvtwin_description_v1::*;
  using Said = kvtwin_description_v1;
  const std::array<std::tuple<std::string, Field, unsigned>, 8> fields = {
      {{"kinds", &Said::kinds, 8},
       {"can", &Said::can, 20},
       {"dtypes", &Said::dtypes, 6},
       {"v_layouts", &Said::v_layouts, 3},
       {"shifts", &Said::shifts, 5},
       {"mask_dtypes", &Said::mask_dtypes, 3},
       {"cannot", &Said::cannot, 4},
       {"placements", &Said::placements, 2}}};
  for (const auto& [name, field, first_unknown] : fields) {
    said = Right();
    said.*field |= 1U << first_unknown;
    ExpectRefused(&table, name + " of the backend's description is 0x");
  }
}

// At visibility the places of tokens are the backend's own affair.
TEST(Backend, CellsAreListedAtIdentityOnly) {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  static int calls;
  calls = 0;
  table.cells = [](void*, kvtwin_cell*, std::size_t, std::size_t* count,
                   std::int32_t*, std::size_t, std::size_t* batch,
                   std::int32_t* total) {
    ++calls;
    *count = *batch = 0;
    *total = 1;
    return 0;
  };
  const BackendInfo info = *DescribeBackend(&table);
  const History history = *ParseHistory("kvt1 cells=4 legal=1 | put 0*1");
  EXPECT_FALSE(RunHistory(history, BackendSubject(info, Level::kVisibility, ""))
                   .failure);
  EXPECT_EQ(calls, 0);
  EXPECT_TRUE(
      RunHistory(history, BackendSubject(info, Level::kIdentity, "")).failure);
  EXPECT_GT(calls, 0);
}

// Expects that a pass of one token ends with an answer that cannot be right.
void ExpectGarbage(const kvtwin_backend_v1& table, Level level,
                   const std::string& text) {
  const BackendInfo info = *DescribeBackend(&table);
  const History history = *ParseHistory("kvt1 cells=4 legal=1 | put 0*1");
  const auto failure =
      RunHistory(history, BackendSubject(info, level, "")).failure;
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->check, "backend: garbage");
  EXPECT_EQ(failure->text, text);
}

TEST(Backend, CellsThatAreMoreWithEachCallAreGarbage) {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  static std::size_t more;
  more = 0;
  table.cells = [](void*, kvtwin_cell*, std::size_t, std::size_t* count,
                   std::int32_t*, std::size_t, std::size_t* batch,
                   std::int32_t* total) {
    *count = ++more;
    *batch = 0;
    *total = 4;
    return 0;
  };
  ExpectGarbage(table, Level::kIdentity,
                "cells gives a different count each time");
}

TEST(Backend, AGetThatSetsNothingIsGarbage) {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  table.get = [](void*, std::int32_t, kvtwin_view*) { return 0; };
  ExpectGarbage(table, Level::kVisibility,
                "get: columns was not set: it is -1, as before the call");
}

TEST(Backend, SnapshotsInAnotherFormAreGarbage) {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  table.snapshot = [](void*, std::int32_t, const void** bytes,
                      std::size_t* count) {
    *bytes = "opaque";
    *count = 6;
    return 0;
  };
  table.restore = [](void*, std::int32_t, const void*, std::size_t) {
    return 0;
  };
  const BackendInfo info = *DescribeBackend(&table);
  const History history = *ParseHistory("kvt1 cells=4 legal=1");
  const auto cache =
      *BackendSubject(info, Level::kIdentity, "").Make(history.setup);
  ASSERT_TRUE(cache->Init(history.setup.init).ok());
  try {
    (void)cache->Snapshot();
    FAIL() << "is taken for a state";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.check, "backend: garbage");
    EXPECT_THAT(failure.text, HasSubstr("not a state (S56): "));
  }
}

TEST(Backend, SaysWhyACacheIsNotMade) {
  const kvtwin_backend_v1 table = Table();
  const BackendInfo info = *DescribeBackend(&table);
  EXPECT_EQ(WhyNotMade(info, ParseHistory("kvt1 | put 0*1")->setup),
            "backend does not declare such a cache: 'kvt1'; the nearest that "
            "it declares is 'kvt1 cells=8 legal=1'");
  EXPECT_EQ(WhyNotMade(info, ParseHistory("kvt1 cells=4 | put 0*1")->setup),
            "backend does not declare CAN_ANY_ORDER, so its histories need "
            "legal=1: 'kvt1 cells=4 legal=1'");
  EXPECT_EQ(WhyNotMade(info, ParseHistory("kvt1 cells=4 legal=1")->setup),
            "the init of backend refuses such a cache: 'kvt1 cells=4 legal=1'");
}

// A history that makes no view, such as one that only reserves, proves nothing.
TEST(Backend, IsNotJudgedWhereNoViewIsCompared) {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  table.put = [](void*, std::int32_t, const kvtwin_tensor*,
                 const kvtwin_tensor*) -> int { return KVTWIN_INTERNAL; };
  const BackendInfo info = *DescribeBackend(&table);
  FuzzOptions options;
  options.operations = 3000;
  std::vector<std::string> reported;
  const LiveResult result = FuzzLive(
      options, {Level::kVisibility, Level::kNumeric},
      [&](Level level) { return BackendSubject(info, level, ""); },
      [&](const Failure& finding) { reported.push_back(finding.check); });
  EXPECT_EQ(result.not_judged, Level::kVisibility);
  EXPECT_EQ(result.holds, Level::kNone);
  EXPECT_FALSE(result.Right(info));
  EXPECT_THAT(reported, ElementsAre("backend: error"));
  EXPECT_EQ(VerdictOn(Level::kVisibility, result, info).text,
            "not judged: every history that compares a view ended in a "
            "finding");
  LiveResult nothing = result;
  nothing.findings.clear();
  nothing.known = 0;
  EXPECT_EQ(VerdictOn(Level::kVisibility, nothing, info).text,
            "not judged: no view was compared");
}

// A leak is found after close, when the views of the history were compared.
TEST(Backend, ALevelIsJudgedWhereEachHistoryLeaks) {
  const BackendInfo info = *DescribeBackend(LedgerBackend("ollama-0.15"));
  FuzzOptions options;
  options.operations = 3000;
  const auto leaks_after = [&](bool all) {
    return FuzzLive(options, {Level::kVisibility}, [&](Level level) {
      Subject subject = BackendSubject(info, level, "");
      subject.run = [all, whole = subject](const History& history,
                                           const RunOptions& run_options) {
        RunResult result = RunHistory(history, whole, run_options);
        const std::size_t ops = history.ops.size();
        result.failure = {.step = all ? ops : ops / 2,
                          .check = "backend: memory",
                          .text = "4 bytes are not freed"};
        return result;
      };
      return subject;
    });
  };
  const LiveResult result = leaks_after(true);
  EXPECT_EQ(result.holds, Level::kVisibility);
  EXPECT_EQ(VerdictOn(Level::kVisibility, result, info).text,
            "holds, except for findings of the backend");
  EXPECT_FALSE(result.Right(info));
  EXPECT_EQ(leaks_after(false).not_judged, Level::kVisibility);
}

TEST(Backend, ABugIsReportedAtOneLevel) {
  kvtwin_backend_v1 table = *LedgerBackend("mlx");
  BackendInfo info = *DescribeBackend(&table);
  UseProfile("ollama-0.15", info);
  FuzzOptions options;
  options.operations = 20000;
  const LiveResult result =
      FuzzLive(options, {Level::kVisibility, Level::kNumeric},
               [&](Level level) { return BackendSubject(info, level, ""); });
  EXPECT_EQ(result.findings.size(), 1U);
  EXPECT_THAT(result.broken_again, ElementsAre(Level::kNumeric));
  EXPECT_EQ(result.holds, Level::kNone);
}

// A library that was compiled with an older header has a shorter table.
TEST(Backend, FunctionsThatAnOlderTableLacksAreNull) {
  kvtwin_backend_v1 table = Table();
  table.cells = [](void*, kvtwin_cell*, std::size_t, std::size_t*,
                   std::int32_t*, std::size_t, std::size_t*,
                   std::int32_t*) { return 0; };
  ASSERT_TRUE(DescribeBackend(&table)->has_cells);
  table.size = offsetof(kvtwin_backend_v1, cells);
  EXPECT_FALSE(DescribeBackend(&table)->has_cells);
}

TEST(Backend, DraftsNeedACommit) {
  kvtwin_backend_v1 table = Table();
  said = Right();
  said.can = KVTWIN_CAN_DRAFT;
  ExpectRefused(&table, "declares CAN_DRAFT, but its table has no commit");
  table.commit = [](void*, std::int32_t, const std::int32_t*, std::int32_t) {
    return 0;
  };
  EXPECT_FALSE(DescribeBackend(&table)->abilities.Can(KVTWIN_CAN_DRAFT_TREES));
  said.can = KVTWIN_CAN_DRAFT_TREES;
  EXPECT_TRUE(DescribeBackend(&table)->abilities.CanDraft());
  table.size = offsetof(kvtwin_backend_v1, commit);
  ExpectRefused(&table, "declares CAN_DRAFT");
  table.size = sizeof(table);
  said.can = KVTWIN_CAN_FIND_PREFIX;
  ExpectRefused(&table, "CAN_FIND_PREFIX, but its table has no find_prefix");
  said.can = KVTWIN_CAN_PIN;
  ExpectRefused(&table, "CAN_PIN, but its table has no checkpoint");
}

TEST(Backend, PrefixesNeedACopy) {
  kvtwin_backend_v1 table = Table();
  table.copy_prefix = [](void*, std::int32_t, std::int32_t, std::int32_t) {
    return 0;
  };
  said = Right();
  said.can = KVTWIN_CAN_SHARE;
  ExpectRefused(&table, "declares CAN_SHARE, but not CAN_COPY_PREFIX");
  said.can |= KVTWIN_CAN_COPY_PREFIX;
  EXPECT_TRUE(DescribeBackend(&table).ok());
}

bool Has(std::uint32_t bits, auto value) {
  return (bits >> static_cast<unsigned>(value) & 1U) != 0;
}

RC_GTEST_PROP(Backend, HistoriesUseDeclaredAbilitiesOnly,
              (std::uint32_t number)) {
  const auto bits = [](int count) {
    return *rc::gen::inRange<std::uint32_t>(1, 1U << count);
  };
  Abilities abilities;
  abilities.kinds = bits(6);
  // A wrapper needs another kind to wrap.
  if (abilities.kinds == KVTWIN_HAS_WRAPPER) abilities.kinds |= 1;
  abilities.can = *rc::gen::arbitrary<std::uint32_t>();
  abilities.dtypes = bits(6);
  abilities.shifts = bits(5);
  abilities.max_sequences = *rc::gen::inRange(0, 3);
  abilities.max_layers = *rc::gen::inRange(0, 3);
  abilities.max_padding = *rc::gen::inRange(0, 3);
  abilities.max_mask_padding = *rc::gen::inRange(0, 4);
  abilities.max_position = *rc::gen::inRange(0, 6);
  abilities.placements = bits(2);
  abilities.cannot = *rc::gen::inRange<std::uint32_t>(0, 16);
  Setup setup = MakeHistory(1, number, {}, 4).setup;
  DrawKnobs(SeededPick(2, number), KnobGroup::kAttention, setup);
  abilities.Fit(setup);
  RC_ASSERT(abilities.Fits(setup));
  RC_ASSERT(Has(abilities.kinds, setup.spec.kind));
  RC_ASSERT(Has(abilities.dtypes, setup.init.dtype));
  RC_ASSERT(Has(abilities.dtypes, setup.v_dtype()));
  RC_ASSERT(Has(abilities.shifts, setup.spec.shift.kind));
  const auto within = [](int value, int most) {
    return most == 0 || value <= most;
  };
  RC_ASSERT(within(setup.init.max_sequences, abilities.max_sequences));
  RC_ASSERT(within(setup.layers, abilities.max_layers));
  if (setup.config.v_layout != VLayout::kTiled) {
    RC_ASSERT(within(setup.config.cache_padding, abilities.max_padding));
  }
  RC_ASSERT(setup.soft_cap == 0 || abilities.Can(KVTWIN_CAN_SOFT_CAP));
  RC_ASSERT(!setup.sinks || abilities.Can(KVTWIN_CAN_SINKS));
  RC_ASSERT(setup.legal || abilities.Can(KVTWIN_CAN_ANY_ORDER));
  const int mask_padding = abilities.max_mask_padding > 0
                               ? abilities.max_mask_padding
                               : abilities.max_padding;
  RC_ASSERT(within(setup.config.mask_batch_padding, mask_padding));
  if (abilities.max_position > 0) {
    RC_ASSERT(setup.init.capacity <= abilities.max_position + 1);
  }
  const bool no_0 = abilities.Cannot(KVTWIN_CANNOT_WINDOW_0);
  std::vector<CacheSpec> specs = setup.spec.caches;
  specs.push_back(setup.spec);
  for (const CacheSpec& spec : specs) {
    RC_ASSERT(Has(abilities.placements, spec.placement));
    RC_ASSERT(!no_0 ||
              (spec.window.value_or(1) > 0 && spec.memory.value_or(1) > 0));
    // RC_ASSERT evaluates both sides of ||.
    const int capacity = setup.init.capacity;
    RC_ASSERT(!abilities.Cannot(KVTWIN_CANNOT_BOUND_MEMORY) ||
              spec.memory.value_or(capacity) >= capacity);
  }
}

const kvtwin_backend_v1& Ledger() { return *LedgerBackend("ollama-0.12"); }

// Calls of the backend below, in order.
std::vector<std::string> calls;

// A Remove, from the position where a sequence continued, may take all that the
// sequence still had. The sequence then begins anew, and a backend that only
// appends gets a Remove of it first.
TEST(Backend, ALegalClientClearsASequenceBeforeItStartsAgain) {
  kvtwin_backend_v1 table = Ledger();
  table.start_forward = [](void* cache, const kvtwin_batch* batch,
                           int reserve) {
    calls.push_back("at " + std::to_string(batch->positions[0]));
    return Ledger().start_forward(cache, batch, reserve);
  };
  table.remove = [](void* cache, std::int32_t sequence, std::int32_t begin,
                    std::int32_t end) {
    calls.push_back("remove from " + std::to_string(begin));
    return Ledger().remove(cache, sequence, begin, end);
  };
  const Result<BackendInfo> info = DescribeBackend(&table);
  ASSERT_TRUE(info.ok());
  Subject subject = BackendSubject(*info, Level::kVisibility, "");
  subject.abilities.can &= ~std::uint32_t{KVTWIN_CAN_ANY_ORDER};
  const Result<History> history = ParseHistory(
      "kvt1 kind=swa window=0 seqs=1 cap=8 legal=1 | put 0*3 | put 0*1 | "
      "drop 0:3- | put 0*1");
  ASSERT_TRUE(history.ok());
  calls.clear();
  const RunResult result = RunHistory(*history, subject);
  ASSERT_TRUE(result.ran);
  EXPECT_FALSE(result.failure);
  EXPECT_THAT(calls, ElementsAre("at 0", "at 3", "remove from 3",
                                 "remove from 0", "at 0"));
}

// Calls that would move a position past the largest are left out.
TEST(Backend, NoTokenGetsAPositionBeyondTheLargest) {
  kvtwin_backend_v1 table = *LedgerBackend("llama.cpp");
  table.describe = [](kvtwin_description_v1* out) {
    LedgerBackend("llama.cpp")->describe(out);
    out->max_position = 5;
    return 0;
  };
  table.start_forward = [](void* cache, const kvtwin_batch* batch,
                           int reserve) {
    calls.push_back("to " +
                    std::to_string(batch->positions[batch->tokens - 1]));
    return Ledger().start_forward(cache, batch, reserve);
  };
  table.shift = [](void* cache, std::int32_t sequence, std::int32_t begin,
                   std::int32_t end, std::int32_t delta) {
    calls.push_back("by " + std::to_string(delta));
    return Ledger().shift(cache, sequence, begin, end, delta);
  };
  table.copy_prefix = [](void* cache, std::int32_t source, std::int32_t target,
                         std::int32_t length) {
    calls.push_back("copy " + std::to_string(length));
    return Ledger().copy_prefix(cache, source, target, length);
  };
  const Result<BackendInfo> info = DescribeBackend(&table);
  ASSERT_TRUE(info.ok());
  const Result<History> history = ParseHistory(
      "kvt1 shift=identity cap=6 | put 0*4 | move 0:0-@+3 | put 0*1 | "
      "copy 0>1:9 | put 2*1@+9");
  ASSERT_TRUE(history.ok());
  calls.clear();
  const RunResult result =
      RunHistory(*history, BackendSubject(*info, Level::kVisibility, ""));
  ASSERT_TRUE(result.ran);
  EXPECT_FALSE(result.failure) << result.failure->text;
  EXPECT_THAT(calls, ElementsAre("to 3", "by 2", "to 5", "copy 6", "to 5"));
}

// The numeric level checks masks itself, padding rows included.
TEST(Backend, MasksOfTheNumericLevelHideOrAllow) {
  kvtwin_backend_v1 table = Ledger();
  static int at;
  static float element;
  table.get = [](void* cache, std::int32_t layer, kvtwin_view* view) {
    const int code = Ledger().get(cache, layer, view);
    auto* mask = static_cast<float*>(const_cast<void*>(view->mask.data));
    if (code == KVTWIN_OK && at >= 0) mask[at] = element;
    return code;
  };
  const Result<BackendInfo> info = DescribeBackend(&table);
  ASSERT_TRUE(info.ok());
  const Subject subject = BackendSubject(*info, Level::kNumeric, "");
  const Result<History> history = ParseHistory("kvt1 maskpad=2 | put 0*1");
  ASSERT_TRUE(history.ok());
  const auto wrong = [&](int where, float what) {
    at = where;
    element = what;
    const RunResult result = RunHistory(*history, subject);
    return result.failure ? result.failure->text : "";
  };
  EXPECT_EQ(wrong(-1, 0), "");
  EXPECT_EQ(wrong(0, 0.5F), "the mask is 0.5, neither 0 nor -inf (S15)");
  EXPECT_EQ(
      wrong(0, -1e9F),
      "the mask is -1e+09, neither 0 nor -inf (S15); show a mask of large "
      "negative numbers as -inf");
  EXPECT_EQ(wrong(1, 0), "a padding row sees something");
}

// Runs a script of bash in place of kvtwin-host, asks it a question of so many
// bytes, and returns the failure with which it ends. All calls together may
// take 0.3 seconds, and each call a minute.
std::string EndOfHost(const std::string& script, std::size_t bytes) {
  const ScratchFolder folder("host");
  HostOptions options;
  options.library = folder.File("host.sh");
  options.call_seconds = 60;
  std::ofstream(options.library) << "echo '{}' >&4\n" << script;
  setenv("KVTWIN_HOST", "/bin/bash", /*replace=*/1);
  HostProcess process(options);
  unsetenv("KVTWIN_HOST");
  if (!process.Answer(60)) return process.died().text;
  const bool answered =
      process.Ask({{"history", std::string(bytes, 'x')}}, 0.3) &&
      process.Answer(60);
  return answered ? "it answers" : process.died().text;
}

// Reports, buckets and cited rules are made of these fields, not of texts.
TEST(Host, SendsWhatIsWrong) {
  const Failure sent = {.step = 3,
                        .check = "subject: rows",
                        .text = "row 1 misses",
                        .row = 1,
                        .column = 2,
                        .first_cell = 4,
                        .function = "get",
                        .call = OpKind::kFind,
                        .part = WrongPart::kRows,
                        .of_left = true,
                        .pool_call = PagedTraceOpKind::kAttend,
                        .pool_change = PagedTraceOpKind::kFork,
                        .of_window = true};
  const auto fields = [](const Failure& failure) {
    return std::tuple(failure.step, failure.check, failure.text, failure.row,
                      failure.column, failure.first_cell, failure.function,
                      failure.call, failure.part, failure.of_left,
                      failure.pool_call, failure.pool_change,
                      failure.of_window);
  };
  auto json = ToJson(sent);
  EXPECT_EQ(fields(FailureFromJson(json)), fields(sent));
  json["call"] = AsInt(OpKind::kFind) + 1;  // No operation has this number.
  EXPECT_ANY_THROW(FailureFromJson(json));
  json = ToJson(sent);
  for (const char* call : {"pool_call", "pool_change"}) {
    json[call] = AsInt(PagedTraceOpKind::kAttend) + 1;  // No call has it.
    EXPECT_ANY_THROW(FailureFromJson(json));
    json = ToJson(sent);
  }
  json["part"] = AsInt(WrongPart::kEncoder) + 1;  // No part has this number.
  EXPECT_ANY_THROW(FailureFromJson(json));
  EXPECT_EQ(FailureFromJson(ToJson(Failure())).call, std::nullopt);
  EXPECT_EQ(FailureFromJson(ToJson(Failure())).pool_call, std::nullopt);
  EXPECT_EQ(FailureFromJson(ToJson(Failure())).pool_change, std::nullopt);
}

TEST(Host, NoProcessRenewsItsOwnTime) {
  const std::string late =
      "the backend was running when all calls together had taken 0.3 seconds";
  // The script tells again and again, in HostState::calls, that a call begins.
  EXPECT_EQ(EndOfHost("for ((i = 16; i < 256; ++i)); do\n"
                      "  printf '\\0\\0\\0\\0\\0\\0\\0\\0\\x'$(printf %x $i) "
                      "1<>/dev/fd/5\n"
                      "  sleep 0.01\n"
                      "done",
                      1),
            late);
  // The script does not read the question, which is longer than a pipe holds.
  EXPECT_EQ(EndOfHost("sleep 2", std::size_t{1} << 20), late);
}

}  // namespace
}  // namespace kvtwin::props
