// Pools behind the table of <kvtwin/pool_backend.h>: the twin through the
// shared library, an example in C that places tokens by its own rules, and both
// with bugs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "props/backend/pool_backend.h"
#include "props/testing/pools.h"

// The C sources, compiled as C++ once each. Fields that they leave out are
// null.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
namespace twin {
#include "props/testing/twin_pool_backend.c"
}  // namespace twin
namespace example {
#include "docs/examples/c_pool.c"
}  // namespace example
#define POOL_BUG
namespace bad_example {
#include "docs/examples/c_pool.c"
}  // namespace bad_example
#pragma GCC diagnostic pop

namespace kvtwin::props {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t kOperations = 6000;

PagedFuzzResult FuzzAt(Level level, const kvtwin_pool_backend_v1& table,
                       std::uint64_t seed = 3, bool groups = false) {
  const auto backend = DescribePoolBackend(&table);
  EXPECT_TRUE(backend.ok()) << backend.status().ToString();
  FuzzOptions options;
  options.seed = seed;
  options.operations = kOperations;
  options.groups = groups;
  return FuzzPools(options, BackendSubject(*backend, level));
}
PagedFuzzResult FuzzGroupsAt(Level level, const kvtwin_pool_backend_v1& table) {
  return FuzzAt(level, table, /*seed=*/3, /*groups=*/true);
}

// The twin without attention, whose faults are in what it shows.
kvtwin_pool_backend_v1 TwinThatShowsRows() {
  kvtwin_pool_backend_v1 table = *twin::kvtwin_get_pool_backend_v1();
  table.attend = nullptr;
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    const int code = twin::Describe(out);
    out->can &= ~(KVTWIN_POOL_HAS_SOFT_CAP | KVTWIN_POOL_HAS_SINKS);
    return code;
  };
  return table;
}

std::string CallTrace(const PagedFuzzResult& result) {
  return TextOf(result.failure) + "\n" + ToText(result.shrunk);
}

TEST(PoolBackend, ATwinIsIdentical) {
  const auto backend = DescribePoolBackend(twin::kvtwin_get_pool_backend_v1());
  ASSERT_TRUE(backend.ok());
  EXPECT_EQ(backend->level, Level::kIdentity);
  EXPECT_EQ(backend->name, "twin");
  for (const Level level :
       {Level::kIdentity, Level::kVisibility, Level::kAttention}) {
    // At visibility, the twin shows rows alone.
    const PagedFuzzResult result =
        FuzzAt(level, level == Level::kVisibility
                          ? TwinThatShowsRows()
                          : *twin::kvtwin_get_pool_backend_v1());
    EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
    EXPECT_GE(result.counts.operations, kOperations);
  }
}

TEST(PoolBackend, ATwinWithGroupsIsIdentical) {
  for (const Level level :
       {Level::kIdentity, Level::kVisibility, Level::kAttention}) {
    const PagedFuzzResult result =
        FuzzGroupsAt(level, level == Level::kVisibility
                                ? TwinThatShowsRows()
                                : *twin::kvtwin_get_pool_backend_v1());
    EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
    EXPECT_EQ(result.counts.not_made, 0);
    EXPECT_GT(result.counts.found, 50);
    EXPECT_GT(result.counts.truncated, 10);
    EXPECT_GT(result.counts.full, 50);
  }
}

// The twin's outputs are compared at each level, also those of groups.
TEST(PoolBackend, AWrongOutputIsFound) {
  kvtwin_pool_backend_v1 table = *twin::kvtwin_get_pool_backend_v1();
  table.attend =
      [](void* pool, std::int32_t layer, const std::int32_t* sequences,
         const std::int32_t* query_rows, std::size_t count,
         const kvtwin_tensor* query, const kvtwin_attention_options* options,
         float* out) -> int {
    const int code = twin::Attend(pool, layer, sequences, query_rows, count,
                                  query, options, out);
    out[0] += 1;
    return code;
  };
  for (const Level level :
       {Level::kIdentity, Level::kVisibility, Level::kAttention}) {
    for (const bool groups : {false, true}) {
      const PagedFuzzResult result = FuzzAt(level, table, 3, groups);
      EXPECT_THAT(TextOf(result.failure), HasSubstr("the output of row 0"));
    }
  }
  // At the level attention, views are not asked for.
  table = *twin::kvtwin_get_pool_backend_v1();
  table.views = [](void*, std::int32_t, std::int32_t, kvtwin_paged_view*,
                   std::size_t,
                   std::size_t*) -> int { return KVTWIN_INTERNAL; };
  EXPECT_EQ(TextOf(FuzzAt(Level::kAttention, table).failure), "");
  EXPECT_NE(TextOf(FuzzAt(Level::kVisibility, table).failure), "");
}

// A library that declares no groups never sees any.
TEST(PoolBackend, GroupsMustBeDeclared) {
  const kvtwin_pool_backend_v1& table = *example::kvtwin_get_pool_backend_v1();
  const PagedFuzzResult result = FuzzGroupsAt(Level::kVisibility, table);
  EXPECT_EQ(result.ran, 0);
  EXPECT_GE(result.counts.not_made, 1000);
  kvtwin_pool_backend_v1 odd = *twin::kvtwin_get_pool_backend_v1();
  static std::uint32_t can = 0;
  const auto why = [&](std::uint32_t said) {
    can = said;
    odd.describe = [](kvtwin_pool_description_v1* out) -> int {
      out->can = can;
      return KVTWIN_OK;
    };
    return DescribePoolBackend(&odd).status().message();
  };
  EXPECT_EQ(why(KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_STATES_IN_PLACE), "");
  EXPECT_THAT(why(KVTWIN_POOL_STATES_IN_PLACE), HasSubstr("for pools with"));
  EXPECT_EQ(why(KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_ONE_STOCK), "");
  EXPECT_THAT(why(KVTWIN_POOL_ONE_STOCK), HasSubstr("for pools with"));
  EXPECT_THAT(why(KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_DEDUPLICATES),
              HasSubstr("not for pools with groups"));
  odd.add_media = nullptr;
  EXPECT_THAT(why(KVTWIN_POOL_HAS_MEDIA), HasSubstr("table lacks add_media"));
}

// The last line of a report is the call that failed, with the lines of its
// message.
TEST(PoolBackend, ACallWithoutAnAnswerIsShown) {
  kvtwin_pool_backend_v1 table = *example::kvtwin_get_pool_backend_v1();
  table.views = [](void*, std::int32_t, std::int32_t, kvtwin_paged_view*,
                   std::size_t,
                   std::size_t*) -> int { return KVTWIN_INTERNAL; };
  table.message = [](void*) { return "KeyError\n  at line 7"; };
  const auto backend = DescribePoolBackend(&table);
  ASSERT_TRUE(backend.ok());
  const auto failure =
      RunHistory(*ParsePagedHistory("kvp1 block=2 blocks=2 dtype=f32 | "
                                    "open 0 0 0 | append 0 1 0"),
                 BackendSubject(*backend, Level::kVisibility))
          .failure;
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->text, "views answers internal: KeyError\n  at line 7");
  ASSERT_FALSE(failure->trace.empty());
  EXPECT_EQ(failure->trace.back().call, "views  sequence 0, layer 0");
  EXPECT_EQ(failure->trace.back().number, 2);
}

TEST(PoolBackend, AnExampleWithItsOwnPlacement) {
  const kvtwin_pool_backend_v1& table = *example::kvtwin_get_pool_backend_v1();
  const PagedFuzzResult result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
  // The example cannot be compared at a stronger level.
  EXPECT_NE(TextOf(FuzzAt(Level::kIdentity, table).failure), "");
}

TEST(PoolBackend, ABugIsFoundAndShrunk) {
  const PagedFuzzResult result =
      FuzzAt(Level::kVisibility, *bad_example::kvtwin_get_pool_backend_v1());
  EXPECT_THAT(TextOf(result.failure), HasSubstr("views"));
  EXPECT_LE(result.shrunk.ops.size(), 4) << CallTrace(result);
}

// Tables of the twin, each with one wrong function.
int SharesOfOthers(void* pool, const kvtwin_prompt* prompt,
                   std::int32_t* sequence) {
  kvtwin_prompt without_salt = *prompt;
  without_salt.salt = nullptr;
  return twin::Open(pool, &without_salt, sequence);
}
int ForgetsNothing(void* pool, std::int32_t sequence, std::int32_t length) {
  std::int32_t all = 0;
  twin::SeqLen(pool, sequence, &all);
  return twin::Truncate(pool, sequence, length < all ? length + 1 : length);
}
int WithoutEnd(void*, std::int32_t, std::int32_t, kvtwin_paged_view*,
               std::size_t, std::size_t* count) {
  *count = SIZE_MAX;
  return KVTWIN_OK;
}
int OfNoStatus(void*, std::int32_t) { return 99; }
int Refused(void*, std::int32_t, std::int32_t*) {
  return KVTWIN_FAILED_PRECONDITION;
}
int Narrow(void* pool, std::int32_t sequence, std::int32_t layer,
           kvtwin_paged_view* views, std::size_t room, std::size_t* count) {
  const int status = twin::Views(pool, sequence, layer, views, room, count);
  if (room > 0) views[0].key.shape[0] += 1000;
  return status;
}
int Nowhere(void* pool, std::int32_t sequence, std::int32_t layer,
            kvtwin_paged_view* views, std::size_t room, std::size_t* count) {
  const int status = twin::Views(pool, sequence, layer, views, room, count);
  if (room > 0) views[0].value.data = nullptr;
  return status;
}

TEST(PoolBackend, EachFaultHasItsMessage) {
  struct Case {
    std::string why;
    std::function<void(kvtwin_pool_backend_v1&)> damage;
  };
  const std::vector<Case> cases = {
      {"", [](auto& table) { table.open = SharesOfOthers; }},
      {"", [](auto& table) { table.truncate = ForgetsNothing; }},
      {"gives a list of", [](auto& table) { table.views = WithoutEnd; }},
      {"free answers 99", [](auto& table) { table.free = OfNoStatus; }},
      {"is failed_precondition", [](auto& table) { table.seq_len = Refused; }},
      {"key is ", [](auto& table) { table.views = Narrow; }},
      {"value is NULL", [](auto& table) { table.views = Nowhere; }}};
  for (const Case& test_case : cases) {
    kvtwin_pool_backend_v1 table = TwinThatShowsRows();
    test_case.damage(table);
    for (const Level level : {Level::kIdentity, Level::kVisibility}) {
      const PagedFuzzResult result = FuzzAt(level, table);
      EXPECT_NE(TextOf(result.failure), "") << test_case.why;
      EXPECT_THAT(TextOf(result.failure), HasSubstr(test_case.why));
      EXPECT_LE(result.shrunk.ops.size(), 12) << CallTrace(result);
    }
  }
}

// The same for pools with groups.
int WithoutMedia(void* pool, const kvtwin_prompt* prompt,
                 std::int32_t* sequence) {
  kvtwin_prompt without = *prompt;
  without.media_count = 0;
  return twin::Open(pool, &without, sequence);
}
int OfTheFirstGroup(void* pool, std::int32_t, const std::int32_t* sequences,
                    std::size_t sequence_count, std::int32_t* columns,
                    std::int32_t* blocks, std::size_t room, std::size_t* count,
                    std::int32_t* seq_lens) {
  return twin::GroupTable(pool, 0, sequences, sequence_count, columns, blocks,
                          room, count, seq_lens);
}
int SlotsOfTheFirstGroup(void* pool, std::int32_t, std::int32_t sequence,
                         std::int32_t begin, std::int32_t end,
                         std::int64_t* slots, std::size_t room,
                         std::size_t* count) {
  return twin::GroupSlots(pool, 0, sequence, begin, end, slots, room, count);
}
int WithoutTheFirst(void* pool, std::int32_t sequence, std::int32_t layer,
                    kvtwin_paged_view* views, std::size_t room,
                    std::size_t* count) {
  const int status = twin::Views(pool, sequence, layer, views, room, count);
  if (status != KVTWIN_OK || *count < 2) return status;
  if (room > 0) std::copy(views + 1, views + room, views);
  --*count;
  return status;
}
int WithoutTheLast(void* pool, std::int32_t sequence, std::int32_t layer,
                   kvtwin_paged_view* views, std::size_t room,
                   std::size_t* count) {
  const int status = twin::Views(pool, sequence, layer, views, room, count);
  if (status == KVTWIN_OK && *count > 0) --*count;
  return status;
}
int ForgetsAll(void* pool, std::int32_t sequence, std::int32_t /*length*/) {
  return twin::Truncate(pool, sequence, 0);
}
int ForksTooFew(void* pool, std::int32_t sequence, std::int32_t length,
                std::int32_t* made) {
  return twin::Fork(pool, sequence, length > 0 ? length - 1 : 0, made);
}

TEST(PoolBackend, EachFaultOfGroupsHasItsMessage) {
  struct Case {
    std::string why;  // The reason at visibility.
    std::function<void(kvtwin_pool_backend_v1&)> damage;
  };
  const std::vector<Case> cases = {
      {"tokens", [](auto& table) { table.open = WithoutMedia; }},
      {"", [](auto& table) { table.group_table = OfTheFirstGroup; }},
      {"", [](auto& table) { table.group_slots = SlotsOfTheFirstGroup; }},
      {"", [](auto& table) { table.views = WithoutTheFirst; }},
      {"", [](auto& table) { table.views = WithoutTheLast; }},
      {"", [](auto& table) { table.truncate = ForgetsAll; }},
      {"", [](auto& table) { table.fork = ForksTooFew; }}};
  for (const Case& test_case : cases) {
    kvtwin_pool_backend_v1 table = TwinThatShowsRows();
    test_case.damage(table);
    for (const Level level : {Level::kIdentity, Level::kVisibility}) {
      const PagedFuzzResult result = FuzzGroupsAt(level, table);
      EXPECT_NE(TextOf(result.failure), "") << test_case.why;
      if (level == Level::kVisibility) {
        EXPECT_THAT(TextOf(result.failure), HasSubstr(test_case.why));
      }
      EXPECT_LE(result.shrunk.ops.size(), 12) << CallTrace(result);
    }
  }
}

// From most seeds, a bug is shrunk to the same line.
TEST(PoolBackend, ABugShrinksToTheSameLine) {
  kvtwin_pool_backend_v1 shares = TwinThatShowsRows();
  shares.open = SharesOfOthers;
  kvtwin_pool_backend_v1 forgets = TwinThatShowsRows();
  forgets.truncate = ForgetsNothing;
  for (const kvtwin_pool_backend_v1& table :
       {shares, forgets, *bad_example::kvtwin_get_pool_backend_v1()}) {
    std::map<std::string, int> lines;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const PagedFuzzResult result = FuzzAt(Level::kVisibility, table, seed);
      EXPECT_NE(TextOf(result.failure), "");
      ++lines[ToText(result.shrunk)];
    }
    int most = 0;
    for (const auto& [line, count] : lines) most = std::max(most, count);
    EXPECT_GE(most, 4) << testing::PrintToString(lines);
  }
}

// The counts are only of histories that were judged.
TEST(PoolBackend, OnlyHistoriesThatRanAreCounted) {
  kvtwin_pool_backend_v1 table = TwinThatShowsRows();
  table.init = [](const kvtwin_pool_params*, void**) -> int {
    return KVTWIN_NOT_SUPPORTED;
  };
  PagedFuzzResult result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(result.ran, 0);
  EXPECT_EQ(result.counts.operations, 0);
  EXPECT_GE(result.counts.not_made, 1000);
  EXPECT_TRUE(result.counts.dtypes.empty());
  // A pool that supports only f32 gets f32 in every other history.
  table.init = [](const kvtwin_pool_params* params, void** pool) -> int {
    const bool plain = params->dtype == KVTWIN_F32 &&
                       params->v_dtype == KVTWIN_F32 &&
                       params->layout == KVTWIN_TOKEN_MAJOR;
    return plain ? twin::Init(params, pool) : KVTWIN_NOT_SUPPORTED;
  };
  result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
  EXPECT_GE(result.operations, kOperations);
  EXPECT_GT(result.ran, result.counts.not_made * 9 / 10);
  EXPECT_EQ(result.counts.dtypes.size(), 1U);
  EXPECT_GT(result.counts.found, 50);
  EXPECT_GT(result.counts.truncated, 50);
  EXPECT_GT(result.counts.full, 50);
  // A pool without f32 gets, in every other history, rows that it accepted
  // before.
  table.init = [](const kvtwin_pool_params* params, void** pool) -> int {
    return params->dtype == KVTWIN_F16 ? twin::Init(params, pool)
                                       : KVTWIN_NOT_SUPPORTED;
  };
  result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
  EXPECT_GT(result.ran, result.counts.not_made);
  // A pool that is always full was judged, and its refusals are counted.
  table = TwinThatShowsRows();
  table.append = [](void*, std::int32_t, std::int32_t, const kvtwin_tensor*,
                    const kvtwin_tensor*) -> int { return KVTWIN_CACHE_FULL; };
  result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
  EXPECT_GT(result.counts.full, 1000);
  EXPECT_EQ(result.counts.longest, 0);
}

// The backend is judged by the functions that it has.
TEST(PoolBackend, OptionalFunctionsMayBeMissing) {
  kvtwin_pool_backend_v1 table = TwinThatShowsRows();
  table.size = offsetof(kvtwin_pool_backend_v1, message);
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->level = KVTWIN_IDENTITY;
    return KVTWIN_OK;
  };
  const PagedFuzzResult result = FuzzAt(Level::kVisibility, table);
  EXPECT_EQ(TextOf(result.failure), "") << CallTrace(result);
  EXPECT_EQ(result.counts.operations >= kOperations, true);
  EXPECT_THAT(TextOf(FuzzAt(Level::kIdentity, table).failure),
              HasSubstr("the backend has no"));
}

TEST(PoolBackend, NamesWhatIsNotDeclared) {
  const auto missing = [](const kvtwin_pool_backend_v1& table) {
    return NotDeclared(*DescribePoolBackend(&table));
  };
  EXPECT_THAT(missing(*twin::kvtwin_get_pool_backend_v1()), IsEmpty());
  kvtwin_pool_backend_v1 table = TwinThatShowsRows();
  table.group_table = nullptr;
  table.group_slots = nullptr;
  EXPECT_THAT(missing(table),
              ElementsAre("attend", "group_table", "group_slots"));
  table.fork = nullptr;
  table.table = nullptr;
  table.describe = [](kvtwin_pool_description_v1* /*out*/) -> int {
    return KVTWIN_OK;
  };
  EXPECT_THAT(missing(table),
              ElementsAre("fork", "table", "attend", "groups", "media"));
}

TEST(PoolBackend, ATableMustBeComplete) {
  const auto why = [](const kvtwin_pool_backend_v1* table) {
    return DescribePoolBackend(table).status().message();
  };
  EXPECT_THAT(why(nullptr), HasSubstr("is NULL"));
  kvtwin_pool_backend_v1 table = TwinThatShowsRows();
  table.size = 16;
  EXPECT_THAT(why(&table), HasSubstr("size is 16"));
  table = TwinThatShowsRows();
  table.views = nullptr;
  EXPECT_THAT(why(&table), HasSubstr("the backend has no views"));
  table = TwinThatShowsRows();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->level = KVTWIN_NUMERIC;
    return KVTWIN_OK;
  };
  EXPECT_THAT(why(&table), HasSubstr("level is 0"));
}

}  // namespace
}  // namespace kvtwin::props
