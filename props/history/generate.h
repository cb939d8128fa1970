// Random setups and operations, for RapidCheck and for the fuzzer alike.
//
// Values are few on purpose: bugs live at boundaries, and small caches reach
// theirs often. Half of all histories draw their operations evenly, half with
// random weights, so that every operation dominates now and then. Of those of
// legal clients, most are what a model server sends.

#ifndef KVTWIN_PROPS_HISTORY_GENERATE_H_
#define KVTWIN_PROPS_HISTORY_GENERATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "props/base/pick.h"
#include "props/history/history.h"

namespace kvtwin::props {

// How likely each kind of operation is, by OpKind.
using Weights = std::array<int, 10>;

// With a `cells_max`, of at most so many cells (each cache of a wrapper).
Setup DrawSetup(const Pick& pick, std::optional<Kind> kind, int cells_max = 0);
Weights DrawWeights(const Pick& pick);
// `live`: the sequences that are likely to hold tokens.
Op DrawOp(const Pick& pick, const Setup& setup, const Weights& weights,
          const std::vector<int>& live);

// The numbers of a seed, the same on every machine.
Pick SeededPick(std::uint64_t seed, std::uint64_t number);

// A whole history of about `ops` operations. The same for the same arguments,
// on every machine. With `rarities`, one in fifty is large in one dimension,
// and in some passes are taken apart into single calls
// (props/history/rarities.h).
History DrawHistory(const Pick& pick, std::optional<Kind> kind, int ops,
                    int cells_max = 0, bool rarities = false);
History MakeHistory(std::uint64_t seed, std::uint64_t number,
                    std::optional<Kind> kind, int ops, int cells_max = 0,
                    bool rarities = false);

// Replaces every `step`-th operation from the `first` on by a Shift of the last
// few positions of a sequence, for caches that can move positions.
void AddShifts(History& history, std::size_t first, std::size_t step);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_GENERATE_H_
