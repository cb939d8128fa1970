// The map from ids to sequences.

#include "optimized/id_map.h"

#include <gtest/gtest.h>

#include <array>

#include "core/index.h"

namespace kvtwin::props {
namespace {

TEST(IdMap, FindsIdsAfterOthersAreErased) {
  std::array<int, 100> values = {};
  // Each map grows at other ids, which lie in other slots.
  for (int step = 1; step < 8000; step += 61) {
    optimized::IdMap<int> map;
    for (int id = 0; id < 100; ++id) {
      map.Insert(id * step, &At(values, id));
    }
    for (int id = 0; id < 100; id += 2) {
      EXPECT_EQ(map.Find(id * step), &At(values, id));
      map.Erase(id * step);
    }
    for (int id = 0; id < 100; ++id) {
      EXPECT_EQ(map.Find(id * step), id % 2 == 0 ? nullptr : &At(values, id));
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
