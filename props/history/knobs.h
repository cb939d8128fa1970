// The knobs of a history: the settings of a cache, and of the rows that are put
// into it, that do not depend on each other. One table says everything about a
// knob: how a line has it, how it is drawn, which values are plainer, what it
// adds to the cost of a history, and what a backend must be able to do. The
// line, the generator, the shrinker and the abilities read the table, so that a
// new knob is one row of it.
//
// The kind of the cache with its windows, its placement and its shift are a
// CacheSpec, which wrappers nest; the sizes of Init depend on each other
// (SetCells).

#ifndef KVTWIN_PROPS_HISTORY_KNOBS_H_
#define KVTWIN_PROPS_HISTORY_KNOBS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "props/base/pick.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The generator draws the groups one after the other, and other parts of the
// setup between them; the search draws kAttention, for caches that attend.
enum class KnobGroup { kSizes, kClient, kStorage, kAttention };

struct Knob {
  std::string_view key;  // In a line: "layers=2".
  KnobGroup group;
  // Returns the value as a line has it; "" for the default.
  std::function<std::string(const Setup&)> text = {};
  // Sets the value that a line has. Throws BadLine.
  std::function<void(std::string_view, Setup&)> read = {};
  // Each sets a value that the shrinker tries; the first is the default.
  std::vector<std::function<void(Setup&)>> plainer = {};
  // Draws a value. Null: another knob draws it.
  std::function<void(const Pick&, Setup&)> draw = {};
  // Changes the value to one that the backend supports. Null: every backend
  // supports every value.
  std::function<void(const Abilities&, Setup&)> fit = {};
  // Returns what its numbers add to the cost of a history
  // (props/shrink/cost.h). Null: nothing. A value other than the default always
  // adds something.
  std::function<std::int64_t(const Setup&)> numbers = {};

  void Reset(Setup& setup) const { plainer.front()(setup); }
};

// Returns the table, in the order in which a line has the knobs.
const std::vector<Knob>& Knobs();

// Draws the knobs of a group.
void DrawKnobs(const Pick& pick, KnobGroup group, Setup& setup);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_KNOBS_H_
