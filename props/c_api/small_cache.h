// A cache, and structs of a later version, of the C interface, for a few calls
// by hand.

#ifndef KVTWIN_PROPS_C_API_SMALL_CACHE_H_
#define KVTWIN_PROPS_C_API_SMALL_CACHE_H_

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvtwin/kvtwin.h"

namespace kvtwin::props {

// A struct of a later version, with one more field.
template <class T>
struct Later {
  Later() { known.size = sizeof(*this); }
  explicit Later(kvtwin_status (*defaults)(T*, std::size_t)) {
    EXPECT_EQ(defaults(&known, sizeof(*this)), KVTWIN_OK);
  }
  T known{};
  std::int64_t more = 0;
};

struct SmallCache {
  SmallCache() {
    EXPECT_EQ(kvtwin_cache_default_params(&params, sizeof(params)), KVTWIN_OK);
    params.capacity = 8;
    params.max_batch = 4;
  }
  ~SmallCache() { kvtwin_cache_destroy(cache); }
  SmallCache(const SmallCache&) = delete;
  SmallCache& operator=(const SmallCache&) = delete;

  kvtwin_status Create() {
    return kvtwin_cache_create(&params, nullptr, &cache);
  }
  // Stores three tokens, whose K and V are 1, 2 and 3.
  kvtwin_status Fill() {
    static constexpr std::array<std::int32_t, 3> kPositions = {0, 1, 2};
    static constexpr std::array<std::int32_t, 3> kSequences = {0, 0, 0};
    static constexpr std::array<float, 3> kRows = {1, 2, 3};
    kvtwin_batch batch{};
    batch.size = sizeof(batch);
    batch.positions = kPositions.data();
    batch.sequences = kSequences.data();
    batch.tokens = 3;
    const kvtwin_status started = kvtwin_cache_start_forward(cache, &batch, 0);
    if (started != KVTWIN_OK) return started;
    kvtwin_tensor rows{kRows.data(), KVTWIN_F32, {1, 1, 3, 1}, {}};
    return kvtwin_cache_put(cache, 0, &rows, &rows);
  }

  kvtwin_cache_params params{};
  kvtwin_cache* cache = nullptr;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_C_API_SMALL_CACHE_H_
