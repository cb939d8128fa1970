// Recordings of small third-party caches. Each has a layout of its own, and the
// last view of a recording may have a fault.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_FOREIGN_LAYOUTS_H_
#define KVTWIN_PROPS_PAGE_JUDGE_FOREIGN_LAYOUTS_H_

#include <array>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvtwin::props {

// A token of a foreign cache, with different rows from all others.
struct ForeignToken {
  int position = 0;
  std::set<int> sequences;
  float number = 0;
};

// A column of a foreign view.
struct ForeignColumn {
  int token = -1;     // Its index; -1: a free cell, with any rows.
  int sequence = -1;  // Only this sequence sees the column; -1: each may.
  std::vector<bool> seen = {};
  float key = 0;  // Added to K and V.
  float value = 0;
};

enum class PlantedFault {
  kNone,
  kKey,      // A changed K row.
  kValue,    // A changed V row.
  kTooMany,  // A row sees a column that its token must not see.
  kMisses,   // A row misses a column that its token must see.
  kNowhere,  // A token is in no column.
  kSwap,     // Two columns have each other's V row.
};

// How a foreign cache lays out its views.
struct ForeignLayout {
  std::string name;
  std::function<std::vector<ForeignColumn>(const std::vector<ForeignToken>&)>
      columns;
  bool shares = true;  // Sequence 1 begins with a prefix of sequence 0.
  std::optional<int> window = {};
  int first_cell = 0;
  int row_padding = 1;
  bool wrapper = false;
};

inline constexpr std::array kPlantedFaults = {
    PlantedFault::kKey,    PlantedFault::kValue,   PlantedFault::kTooMany,
    PlantedFault::kMisses, PlantedFault::kNowhere, PlantedFault::kSwap};

// The layouts: a ring, blocks, padding, a tensor for each sequence, ...
std::vector<ForeignLayout> ForeignLayouts();

// Writes the recording of a cache with this layout. The fault is in its last
// view.
void RecordForeign(const ForeignLayout& layout, PlantedFault planted,
                   const std::string& path);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_FOREIGN_LAYOUTS_H_
