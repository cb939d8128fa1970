// Compares the caches of the C interface with those of C++ in every history
// that the generator makes. Tests what only C has: struct sizes, null pointers,
// texts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "props/base/scratch_folder.h"
#include "props/c_api/c_api_adapters.h"
#include "props/c_api/small_cache.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/testing/pools.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class CTwins : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, CTwins, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

void ExpectNoDifference(const std::string& twin, const FuzzOptions& options) {
  const FuzzResult result = Fuzz(options, SubjectByC(twin));
  ASSERT_FALSE(result.failure) << FailureText(*result.failure);
  EXPECT_GE(result.operations, options.operations);
}

TEST_P(CTwins, CachesAreThoseOfCpp) {
  FuzzOptions options;
  options.operations = 60'000;
  options.dtypes = true;
  ExpectNoDifference(GetParam(), options);
}

TEST_P(CTwins, DraftsAreThoseOfCpp) {
  FuzzOptions options;
  options.operations = 30'000;
  options.speculate = true;
  ExpectNoDifference(GetParam(), options);
}

// Programs that were compiled before there were drafts have shorter batches.
TEST(CInterface, BatchesWithoutParentsHaveNoDrafts) {
  SmallCache small;
  small.params.capacity = small.params.max_batch = 4;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  const std::array<std::int32_t, 2> positions = {0, 0};
  const std::array<std::int32_t, 2> parents = {KVTWIN_COMMITTED,
                                               KVTWIN_COMMITTED};
  const std::array<std::int32_t, 2> sequences = {0, 0};
  kvtwin_batch batch{};
  batch.size = offsetof(kvtwin_batch, parents);
  batch.positions = positions.data();
  batch.sequences = sequences.data();
  batch.tokens = 2;
  batch.parents = parents.data();
  EXPECT_EQ(kvtwin_cache_start_forward(small.cache, &batch, 0), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_remove(small.cache, 0, 0, KVTWIN_OPEN_END), KVTWIN_OK);
  batch.size = sizeof(batch);
  EXPECT_EQ(kvtwin_cache_start_forward(small.cache, &batch, 0), KVTWIN_OK);
  const std::array<std::int32_t, 1> path = {1};
  EXPECT_EQ(kvtwin_cache_commit(small.cache, 0, nullptr, 1),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("path is NULL"));
  EXPECT_EQ(kvtwin_cache_commit(small.cache, 0, path.data(), 1), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_commit(small.cache, 0, path.data(), 1),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("the path has draft 1"));
  kvtwin_cell cell{};
  std::size_t count = 0;
  EXPECT_EQ(kvtwin_cache_cells(small.cache, &cell, 1, &count), KVTWIN_OK);
  EXPECT_EQ(count, 1U);
}

TEST_P(CTwins, StatesAreThoseOfCpp) {
  FuzzOptions options;
  options.operations = 10'000;
  options.kind = Kind::kHybrid;
  ExpectNoDifference(GetParam(), options);
}

TEST(CInterface, DefaultsAreACacheOfOneToken) {
  SmallCache small;
  small.params.capacity = small.params.max_batch = 1;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  std::int32_t cells = 0;
  EXPECT_EQ(kvtwin_cache_cell_count(small.cache, &cells), KVTWIN_OK);
  EXPECT_EQ(cells, 1);
  EXPECT_STREQ(kvtwin_twin_name(0), "reference");
  EXPECT_STREQ(kvtwin_twin_name(1), "optimized");
  EXPECT_EQ(kvtwin_twin_name(2), nullptr);
  EXPECT_STREQ(kvtwin_version(), "0.1.0");
}

TEST(CInterface, SizesOfStructsAreChecked) {
  SmallCache small;
  small.params.size -= 1;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), StartsWith("params.size is "));
  small.params.size = 0;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  small.params.size = std::size_t{1} << 40;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("no struct is that large"));
  // The caller is newer.
  struct {
    kvtwin_cache_params params;
    std::int64_t more;
  } newer;
  std::memset(static_cast<void*>(&newer), 0xFF, sizeof(newer));
  ASSERT_EQ(kvtwin_cache_default_params(&newer.params, sizeof(newer)),
            KVTWIN_OK);
  EXPECT_EQ(newer.more, 0);
  EXPECT_EQ(kvtwin_cache_create(&newer.params, nullptr, &small.cache),
            KVTWIN_OK);
  newer.more = 1 << 8;
  kvtwin_cache* none = nullptr;
  EXPECT_EQ(kvtwin_cache_create(&newer.params, nullptr, &none),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("knows nothing"));
  EXPECT_EQ(none, nullptr);
  // A struct that is smaller than the smallest accepted one is refused.
  kvtwin_cache_params old{};
  EXPECT_EQ(kvtwin_cache_default_params(&old, sizeof(old) - 8),
            KVTWIN_INVALID_ARGUMENT);
  kvtwin_view view{};
  EXPECT_EQ(kvtwin_cache_get(small.cache, 0, &view), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), StartsWith("view.size is 0"));
}

TEST(CInterface, AnswersOfALargerStructAreLeftAlone) {
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  ASSERT_EQ(small.Fill(), KVTWIN_OK);
  struct {
    kvtwin_view view;
    std::int64_t more;
  } newer{{}, 77};
  newer.view.size = sizeof(newer);
  ASSERT_EQ(kvtwin_cache_get(small.cache, 0, &newer.view), KVTWIN_OK);
  EXPECT_EQ(newer.more, 77);
  EXPECT_EQ(newer.view.size, sizeof(newer));
  EXPECT_EQ(newer.view.columns, 3);
}

TEST(CInterface, CachesOfAWrapperHaveTheirCallersSize) {
  using Params = Later<kvtwin_cache_params>;
  std::vector<Params> caches(3, Params(&kvtwin_cache_default_params));
  for (Params& params : caches) params.known.kind = KVTWIN_SWA;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    caches[i].known.window = static_cast<std::int32_t>(i);
  }
  Params wrapper(&kvtwin_cache_default_params);
  wrapper.known.kind = KVTWIN_WRAPPER;
  wrapper.known.caches = &caches[0].known;
  wrapper.known.cache_count = 3;
  wrapper.known.capacity = wrapper.known.max_batch = 4;
  kvtwin_cache* cache = nullptr;
  ASSERT_EQ(kvtwin_cache_create(&wrapper.known, nullptr, &cache), KVTWIN_OK)
      << kvtwin_last_error();
  // Each cache has its own window: of three tokens, the last sees i + 1.
  constexpr std::array<std::int32_t, 3> kPositions = {0, 1, 2};
  constexpr std::array<std::int32_t, 3> kSequences = {};
  Later<kvtwin_batch> batch;
  batch.known.positions = kPositions.data();
  batch.known.sequences = kSequences.data();
  batch.known.tokens = 3;
  ASSERT_EQ(kvtwin_cache_start_forward(cache, &batch.known, 0), KVTWIN_OK);
  constexpr std::array<float, 3> kRows = {1, 2, 3};
  const kvtwin_tensor rows{kRows.data(), KVTWIN_F32, {1, 1, 3, 1}, {}};
  for (std::int32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(kvtwin_cache_set_layer_type(cache, i), KVTWIN_OK);
    ASSERT_EQ(kvtwin_cache_put(cache, i, &rows, &rows), KVTWIN_OK);
    Later<kvtwin_view> view;
    ASSERT_EQ(kvtwin_cache_get(cache, i, &view.known), KVTWIN_OK);
    const kvtwin_tensor& mask = view.known.mask;
    std::array<float, 3> last = {};
    std::memcpy(last.data(),
                static_cast<const std::byte*>(mask.data) + 2 * mask.stride[1],
                sizeof(last));
    EXPECT_EQ(std::count(last.begin(), last.end(), 0.0F), i + 1);
  }
  kvtwin_cache_destroy(cache);
  caches[2].known.size -= 1 << 12;
  EXPECT_EQ(kvtwin_cache_create(&wrapper.known, nullptr, &cache),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("caches[2].size is "));
}

TEST(CInterface, StructsOfALaterVersionAreRead) {
  Later<kvtwin_pool_params> params(&kvtwin_pool_default_params);
  params.known.block_size = 2;
  params.known.blocks = 3;
  params.known.max_seq_len = 4;
  kvtwin_pool* pool = nullptr;
  ASSERT_EQ(kvtwin_pool_create(&params.known, nullptr, &pool), KVTWIN_OK);
  constexpr std::array<std::int32_t, 3> kTokens = {7, 8, 9};
  Later<kvtwin_prompt> prompt;
  prompt.known.tokens = kTokens.data();
  prompt.known.token_count = kTokens.size();
  std::int32_t sequence = -1;
  EXPECT_EQ(kvtwin_pool_open(pool, &prompt.known, &sequence), KVTWIN_OK);
  EXPECT_EQ(sequence, 0);
  prompt.more = 1;
  EXPECT_EQ(kvtwin_pool_open(pool, &prompt.known, &sequence),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("knows nothing"));
  Later<kvtwin_usage> usage;
  usage.more = 77;
  EXPECT_EQ(kvtwin_pool_usage(pool, &usage.known), KVTWIN_OK);
  EXPECT_EQ(usage.known.free, 3);
  EXPECT_EQ(usage.known.size, sizeof(usage));
  EXPECT_EQ(usage.more, 77);
  kvtwin_pool_destroy(pool);

  const ScratchFolder folder("later");
  const std::string path = folder.path() / "recording.jsonl";
  Later<kvtwin_cache_params> cache(&kvtwin_cache_default_params);
  Later<kvtwin_recorder_params> recorded(&kvtwin_recorder_default_params);
  recorded.known.cache = &cache.known;
  kvtwin_recorder* recorder = nullptr;
  ASSERT_EQ(kvtwin_recorder_create(&recorded.known, path.c_str(), &recorder),
            KVTWIN_OK);
  EXPECT_EQ(kvtwin_recorder_close(recorder), KVTWIN_OK);
  Later<kvtwin_verdict> verdict;
  verdict.more = 77;
  ASSERT_EQ(kvtwin_check_file(path.c_str(), nullptr, &verdict.known),
            KVTWIN_OK);
  EXPECT_EQ(verdict.known.outcome, KVTWIN_ACCEPTED);
  EXPECT_EQ(verdict.known.size, sizeof(verdict));
  EXPECT_EQ(verdict.more, 77);
}

TEST(CInterface, PinsStates) {
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_checkpoint(small.cache, 0), KVTWIN_NOT_SUPPORTED);
  EXPECT_EQ(kvtwin_cache_checkpoint(nullptr, 0), KVTWIN_INVALID_ARGUMENT);
  SmallCache states;
  states.params.kind = KVTWIN_RECURRENT;
  states.params.pins = 1;
  states.params.drafts = 3;
  ASSERT_EQ(states.Create(), KVTWIN_OK);
  std::int32_t cells = 0;
  ASSERT_EQ(kvtwin_cache_cell_count(states.cache, &cells), KVTWIN_OK);
  EXPECT_EQ(cells, 6);
  EXPECT_EQ(kvtwin_cache_checkpoint(states.cache, 0), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_checkpoint(states.cache, -1), KVTWIN_INVALID_ARGUMENT);
}

TEST(CInterface, NullIsAnErrorThatNamesTheArgument) {
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  const auto message = [](kvtwin_status status) {
    EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT);
    return std::string(kvtwin_last_error());
  };
  kvtwin_cache* const no = nullptr;
  EXPECT_EQ(message(kvtwin_cache_create(nullptr, nullptr, &small.cache)),
            "params is NULL");
  EXPECT_EQ(message(kvtwin_cache_create(&small.params, nullptr, nullptr)),
            "cache is NULL");
  EXPECT_EQ(message(kvtwin_cache_remove(no, 0, 0, 1)), "cache is NULL");
  EXPECT_EQ(message(kvtwin_cache_start_forward(small.cache, nullptr, 0)),
            "batch is NULL");
  EXPECT_EQ(message(kvtwin_cache_can_resume(small.cache, 0, 0, nullptr)),
            "yes is NULL");
  EXPECT_EQ(message(kvtwin_cache_resume_before(small.cache, 0, 0, nullptr)),
            "at is NULL");
  EXPECT_EQ(message(kvtwin_cache_cells(small.cache, nullptr, 0, nullptr)),
            "count is NULL");
  std::size_t count = 0;
  EXPECT_EQ(message(kvtwin_cache_cells(small.cache, nullptr, 1, &count)),
            "cells is NULL, but has room for 1");
  EXPECT_EQ(message(kvtwin_cache_set_causal(small.cache, nullptr, 2)),
            "except is NULL, it should have 2 entries");
  kvtwin_batch batch{};
  batch.size = sizeof(batch);
  batch.tokens = -1;
  EXPECT_EQ(message(kvtwin_cache_start_forward(small.cache, &batch, 0)),
            "batch.positions has -1 entries");
  EXPECT_EQ(message(kvtwin_pool_free(nullptr, 0)), "pool is NULL");
  EXPECT_EQ(message(kvtwin_state_save(nullptr, "x", "")), "state is NULL");
  EXPECT_EQ(message(kvtwin_record_can_resume(nullptr, 0, 0, 0)),
            "recorder is NULL");
  EXPECT_EQ(message(kvtwin_check_file(nullptr, nullptr, nullptr)),
            "path is NULL");
  // These calls accept NULL.
  kvtwin_cache_destroy(nullptr);
  kvtwin_state_destroy(nullptr);
  kvtwin_pool_destroy(nullptr);
  kvtwin_free(nullptr);
  EXPECT_EQ(kvtwin_recorder_close(nullptr), KVTWIN_OK);
}

// Asks for a list with room for no entry, for fewer entries than there are, for
// all, and for more. ask(list, room, &count) writes the list.
template <class Entry, class Ask>
void ExpectRooms(std::string_view what, const Ask& ask) {
  std::size_t all = 0;
  Entry* const none = nullptr;
  ASSERT_EQ(ask(none, std::size_t{0}, &all), KVTWIN_OK) << what;
  ASSERT_GT(all, 1U) << what;
  // No answer contains these bytes.
  std::vector<Entry> untouched(all + 2);
  std::memset(static_cast<void*>(untouched.data()), 0xA5,
              untouched.size() * sizeof(Entry));
  std::vector<Entry> expected = untouched;
  ASSERT_EQ(ask(expected.data(), all, &all), KVTWIN_OK) << what;
  for (std::size_t room = 0; room <= all + 1; ++room) {
    std::vector<Entry> list = untouched;
    std::size_t count = 0;
    ASSERT_EQ(ask(list.data(), room, &count), KVTWIN_OK) << what;
    EXPECT_EQ(count, all) << what << ", room for " << room;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const bool written = i < std::min(room, all);
      const Entry& entry = written ? expected[i] : untouched[i];
      EXPECT_EQ(std::memcmp(&list[i], &entry, sizeof(Entry)), 0)
          << what << ", room for " << room << ", entry " << i;
    }
  }
}

// A pool of blocks of two tokens, in which a sequence has five.
std::unique_ptr<kvtwin_pool, DestroyC> PoolOfFive(
    const std::array<float, 5>& rows) {
  kvtwin_pool_params params{};
  EXPECT_EQ(kvtwin_pool_default_params(&params, sizeof(params)), KVTWIN_OK);
  params.block_size = 2;
  params.blocks = 4;
  params.max_seq_len = 8;
  params.dtype = KVTWIN_F32;
  kvtwin_pool* pool = nullptr;
  EXPECT_EQ(kvtwin_pool_create(&params, nullptr, &pool), KVTWIN_OK);
  std::int32_t sequence = -1;
  EXPECT_EQ(kvtwin_pool_open(pool, nullptr, &sequence), KVTWIN_OK);
  const kvtwin_tensor five{rows.data(), KVTWIN_F32, {1, 1, 5, 1}, {}};
  EXPECT_EQ(kvtwin_pool_append(pool, 0, 0, &five, &five, nullptr, nullptr, 0,
                               nullptr),
            KVTWIN_OK);
  EXPECT_EQ(kvtwin_pool_commit_unknown(pool, 0, 5), KVTWIN_OK);
  return std::unique_ptr<kvtwin_pool, DestroyC>(pool);
}

TEST(CInterface, ListsAreWrittenUpToTheirRoom) {
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  ASSERT_EQ(small.Fill(), KVTWIN_OK);
  ExpectRooms<kvtwin_cell>("cells", [&](auto* list, auto room, auto* count) {
    return kvtwin_cache_cells(small.cache, list, room, count);
  });
  ExpectRooms<std::int32_t>("batch", [&](auto* list, auto room, auto* count) {
    return kvtwin_cache_batch_cells(small.cache, list, room, count);
  });
  static constexpr std::array<float, 5> kRows = {1, 2, 3, 4, 5};
  const auto owned = PoolOfFive(kRows);
  kvtwin_pool* const pool = owned.get();
  ExpectRooms<kvtwin_paged_view>(
      "views", [&](auto* list, auto room, auto* count) {
        return kvtwin_pool_views(pool, 0, 0, list, room, count);
      });
  ExpectRooms<std::int64_t>("slots", [&](auto* list, auto room, auto* count) {
    return kvtwin_pool_slots(pool, 0, 0, 5, list, room, count);
  });
  const std::int32_t zero = 0;
  ExpectRooms<std::int32_t>("table", [&](auto* list, auto room, auto* count) {
    std::int32_t columns = 0;
    std::int32_t len = 0;
    const auto status =
        kvtwin_pool_table(pool, &zero, 1, &columns, list, room, count, &len);
    EXPECT_EQ(std::pair(columns, len), std::pair(3, 5));
    return status;
  });
  ExpectRooms<std::int32_t>("csr", [&](auto* list, auto room, auto* count) {
    std::array<std::int32_t, 2> indptr = {};
    std::int32_t last = 0;
    const auto status = kvtwin_pool_csr(pool, &zero, 1, indptr.data(), list,
                                        room, count, &last);
    EXPECT_EQ(std::tuple(indptr[0], indptr[1], last), std::tuple(0, 3, 1));
    return status;
  });
}

// Append returns two answers; a caller may leave either one out.
TEST(CInterface, AppendWritesTheRequestedOutputs) {
  static constexpr std::array<float, 5> kRows = {1, 2, 3, 4, 5};
  const auto owned = PoolOfFive(kRows);
  kvtwin_pool* const pool = owned.get();
  const kvtwin_tensor three{kRows.data(), KVTWIN_F32, {1, 1, 3, 1}, {}};
  for (const bool asks_start : {true, false}) {
    const std::string what = asks_start ? "append" : "append without start";
    std::int32_t start = -1;
    std::int32_t* const to = asks_start ? &start : nullptr;
    ExpectRooms<kvtwin_paged_view>(
        what, [&](auto* list, auto room, auto* count) {
          start = -1;
          std::vector<kvtwin_paged_view> views(list, list + room);
          const auto status = kvtwin_pool_append(pool, 0, 0, &three, &three, to,
                                                 list, room, count);
          EXPECT_EQ(start, asks_start ? 5 : -1);
          if (room == 0) return status;
          // The views are the same if the caller does not ask for their number.
          EXPECT_EQ(kvtwin_pool_append(pool, 0, 0, &three, &three, to,
                                       views.data(), room, nullptr),
                    status);
          EXPECT_EQ(std::memcmp(static_cast<void*>(views.data()),
                                static_cast<void*>(list),
                                room * sizeof(kvtwin_paged_view)),
                    0)
              << what << ", room for " << room;
          return status;
        });
  }
}

TEST(CInterface, AppendRefusesTheMostTokens) {
  static constexpr std::array<float, 5> kRows = {1, 2, 3, 4, 5};
  const auto owned = PoolOfFive(kRows);
  const kvtwin_tensor most{
      kRows.data(), KVTWIN_F32, {1, 1, INT64_MAX, 1}, {4, 4, 0, 0}};
  EXPECT_EQ(kvtwin_pool_append(owned.get(), 0, 0, &most, &most, nullptr,
                               nullptr, 0, nullptr),
            KVTWIN_CACHE_FULL);
}

TEST(CInterface, NumbersOutsideOfAnEnumAreRefused) {
  const int wild = 77;
  const auto refused = [](const SmallCache& small, std::string_view why) {
    kvtwin_cache* made = nullptr;
    EXPECT_EQ(kvtwin_cache_create(&small.params, nullptr, &made),
              KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), StartsWith(std::string(why)));
  };
  const auto write = [&](auto& to) { std::memcpy(&to, &wild, sizeof(wild)); };
  {
    SmallCache small;
    write(small.params.kind);
    refused(small, "kind is 77");
  }
  {
    SmallCache small;
    write(small.params.placement);
    refused(small, "placement is 77");
  }
  {
    SmallCache small;
    write(small.params.shift.kind);
    refused(small, "shift.kind is 77");
  }
  {
    SmallCache small;
    write(small.params.v_dtype);
    refused(small, "v_dtype is 77");
  }
  {
    SmallCache small;
    small.params.dtype = KVTWIN_AS_K;
    refused(small, "dtype is -1");
  }
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  kvtwin_tensor rows{&wild, KVTWIN_F32, {1, 1, 1, 1}, {}};
  write(rows.dtype);
  EXPECT_EQ(kvtwin_cache_put(small.cache, 0, &rows, &rows),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), StartsWith("key.dtype is 77"));
  EXPECT_STREQ(kvtwin_status_name(wild), "unknown");
  EXPECT_STREQ(kvtwin_status_name(KVTWIN_SHARED_CELLS), "shared_cells");
}

TEST(CInterface, AWrapperHasOneStructAfterAnother) {
  SmallCache small;
  std::vector<kvtwin_cache_params> caches(2, small.params);
  caches[1].kind = KVTWIN_SWA;
  caches[1].window = 2;
  small.params.kind = KVTWIN_WRAPPER;
  small.params.cache_count = 2;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  small.params.caches = caches.data();
  caches[1].size = 1;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), StartsWith("caches[1].size is 1"));
  caches[1].size = sizeof(caches[1]);
  // The wrapper contains itself.
  caches[1].kind = KVTWIN_WRAPPER;
  caches[1].caches = &small.params;
  caches[1].cache_count = 1;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  caches[1].kind = KVTWIN_SWA;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  kvtwin_cache* active = nullptr;
  ASSERT_EQ(kvtwin_cache_underlying(small.cache, &active), KVTWIN_OK);
  EXPECT_NE(active, small.cache);
  std::int32_t all = 0;
  std::int32_t inner = 0;
  ASSERT_EQ(kvtwin_cache_set_layer_type(small.cache, 1), KVTWIN_OK);
  kvtwin_cache* second = nullptr;
  ASSERT_EQ(kvtwin_cache_underlying(small.cache, &second), KVTWIN_OK);
  EXPECT_NE(second, active);
  EXPECT_EQ(kvtwin_cache_cell_count(small.cache, &all), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_cell_count(second, &inner), KVTWIN_OK);
  EXPECT_EQ(all, inner);
}

// Adds ten times the offset; the second call is refused.
int ShiftByC(void* user, std::int32_t layer, std::int32_t offset,
             std::int32_t k_head_dim, std::int32_t kv_heads, float* key) {
  auto& calls = *static_cast<int*>(user);
  if (layer != 0 || k_head_dim != 1 || kv_heads != 1) return KVTWIN_INTERNAL;
  key[0] += static_cast<float>(10 * offset);
  return ++calls == 2 ? KVTWIN_SHARED_CELLS : KVTWIN_OK;
}

TEST(CInterface, AShiftFunctionOfC) {
  int calls = 0;
  SmallCache small;
  small.params.shift.kind = KVTWIN_SHIFT_CUSTOM;
  EXPECT_EQ(small.Create(), KVTWIN_INVALID_ARGUMENT);
  small.params.shift.fn = ShiftByC;
  small.params.shift.user = &calls;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  ASSERT_EQ(small.Fill(), KVTWIN_OK);
  EXPECT_EQ(kvtwin_cache_remove(small.cache, 0, 0, 1), KVTWIN_SHARED_CELLS);
  EXPECT_STREQ(kvtwin_last_error(), "the shift function answered 3");
  calls = 10;
  ASSERT_EQ(kvtwin_cache_remove(small.cache, 0, 0, 1), KVTWIN_OK);
  kvtwin_state* state = nullptr;
  ASSERT_EQ(kvtwin_cache_snapshot(small.cache, &state), KVTWIN_OK);
  const StateHandle owned(state);
  const DenseTensor key = StateByC(*state)->layers.at(0).key;
  EXPECT_EQ(LoadAs<float>(&key.bytes[0]), 2 - 10);
  EXPECT_EQ(LoadAs<float>(&key.bytes[4]), 3 - 10);
}

TEST(CInterface, AShiftFunctionGetsItsArguments) {
  struct Call {
    std::int32_t layer, offset, k_head_dim, kv_heads;
    float first, last;
    bool operator==(const Call&) const = default;
  };
  std::vector<Call> calls;
  SmallCache small;
  small.params.shift.kind = KVTWIN_SHIFT_CUSTOM;
  small.params.shift.user = &calls;
  small.params.shift.fn = [](void* user, std::int32_t layer,
                             std::int32_t offset, std::int32_t k_head_dim,
                             std::int32_t kv_heads, float* key) -> int {
    static_cast<std::vector<Call>*>(user)->push_back(
        {layer, offset, k_head_dim, kv_heads, key[0],
         key[k_head_dim * kv_heads - 1]});
    return KVTWIN_OK;
  };
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  ASSERT_EQ(small.Fill(), KVTWIN_OK);
  // Rows of two heads of one element, in a second layer.
  const std::array<float, 6> rows = {11, 12, 21, 22, 31, 32};
  const kvtwin_tensor tensor{rows.data(), KVTWIN_F32, {1, 2, 3, 1}, {}};
  ASSERT_EQ(kvtwin_cache_put(small.cache, 7, &tensor, &tensor), KVTWIN_OK);
  ASSERT_EQ(kvtwin_cache_remove(small.cache, 0, 0, 2), KVTWIN_OK);
  EXPECT_EQ(calls,
            (std::vector<Call>{{0, -2, 1, 1, 3, 3}, {7, -2, 1, 2, 31, 32}}));
}

TEST(CInterface, StatesAsFiles) {
  const ScratchFolder folder("c-api");
  const std::string path = folder.File("state.safetensors");
  SmallCache small;
  ASSERT_EQ(small.Create(), KVTWIN_OK);
  ASSERT_EQ(small.Fill(), KVTWIN_OK);
  kvtwin_state* state = nullptr;
  ASSERT_EQ(kvtwin_cache_snapshot(small.cache, &state), KVTWIN_OK);
  const StateHandle all(state);
  ASSERT_EQ(kvtwin_state_save(state, path.c_str(), "m"), KVTWIN_OK);
  kvtwin_state* loaded = nullptr;
  EXPECT_EQ(kvtwin_state_load(path.c_str(), nullptr, &loaded),
            KVTWIN_INVALID_ARGUMENT);
  char* model = nullptr;
  ASSERT_EQ(kvtwin_state_model(path.c_str(), &model), KVTWIN_OK);
  EXPECT_STREQ(model, "m");
  ASSERT_EQ(kvtwin_state_load(path.c_str(), model, &loaded), KVTWIN_OK);
  kvtwin_free(model);
  const StateHandle from_file(loaded);
  EXPECT_EQ(*StateByC(*loaded), *StateByC(*state));
  // Sequence 0 is added as sequence 5 to the same state.
  kvtwin_state* single = nullptr;
  ASSERT_EQ(kvtwin_state_sequence(state, 0, &single), KVTWIN_OK);
  const StateHandle alone(single);
  EXPECT_EQ(kvtwin_state_sequence(state, -1, &single), KVTWIN_INVALID_ARGUMENT);
  kvtwin_state* both = nullptr;
  const std::int32_t cells = 12;
  ASSERT_EQ(kvtwin_state_with_sequence(state, 5, alone.get(), &cells, 1, &both),
            KVTWIN_OK);
  const StateHandle more(both);
  EXPECT_EQ(StateByC(*both)->cells.size(), 6);
  const std::int32_t few = 5;
  EXPECT_EQ(kvtwin_state_with_sequence(state, 5, alone.get(), &few, 1, &both),
            KVTWIN_CACHE_FULL);
  EXPECT_EQ(
      kvtwin_state_with_sequence(state, 5, alone.get(), nullptr, 0, &both),
      KVTWIN_INVALID_ARGUMENT);
  EXPECT_EQ(kvtwin_state_load("no/such/file", nullptr, &loaded),
            KVTWIN_FAILED_PRECONDITION);
  EXPECT_EQ(kvtwin_state_from_bytes("x", 1, nullptr, &loaded),
            KVTWIN_INVALID_ARGUMENT);
}

TEST(CInterface, EachThreadHasItsLastError) {
  EXPECT_EQ(kvtwin_pool_free(nullptr, 0), KVTWIN_INVALID_ARGUMENT);
  std::string there = "nothing was asked";
  std::thread([&] { there = kvtwin_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_STREQ(kvtwin_last_error(), "pool is NULL");
}

// A shift function that throws although it must not.
int ShiftThatThrows(void* user, std::int32_t, std::int32_t, std::int32_t,
                    std::int32_t, float*) {
  switch (*static_cast<int*>(user)) {
    case 0:
      throw std::bad_alloc();
    case 1:
      throw std::runtime_error("broken");
    default:
      throw 7;
  }
}

TEST(CInterface, NoExceptionLeavesIt) {
  int which = 0;
  for (const std::string what :
       {"std::bad_alloc", "broken", "no std::exception"}) {
    SmallCache small;
    small.params.shift.kind = KVTWIN_SHIFT_CUSTOM;
    small.params.shift.fn = ShiftThatThrows;
    small.params.shift.user = &which;
    ASSERT_EQ(kvtwin_cache_create(&small.params, "reference", &small.cache),
              KVTWIN_OK);
    ASSERT_EQ(small.Fill(), KVTWIN_OK);
    EXPECT_EQ(kvtwin_cache_remove(small.cache, 0, 0, 1),
              KVTWIN_FAILED_PRECONDITION);
    EXPECT_EQ(kvtwin_last_error(), "the shift function threw: " + what);
    ++which;
  }
}

}  // namespace
}  // namespace kvtwin::props
