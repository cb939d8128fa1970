// Random setups and operations, for RapidCheck and for the fuzzer alike.
//
// The drawn values are small: bugs live at boundaries, and small caches reach
// their boundaries often. Half of all histories draw their operations with
// fixed weights, half with random weights, so that every operation dominates
// now and then. Most histories of legal clients are the calls of a model
// server.

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

// With a `cells_max`, the cache (each cache of a wrapper) has at most that many
// cells.
Setup DrawSetup(const Pick& pick, std::optional<Kind> kind, int cells_max = 0);
Weights DrawWeights(const Pick& pick);
// Returns a Put of `count` tokens to each sequence from `first` to
// `first` + `more`.
Op PutOf(int first, int more, int count);
// Adds a Remove of the tokens of `seq` from its end plus `offset` on, and a Put
// of one token there.
void GoBack(int seq, int offset, std::vector<Op>& ops);
// `live` lists the sequences that are likely to hold tokens.
Op DrawOp(const Pick& pick, const Setup& setup, const Weights& weights,
          const std::vector<int>& live);

// Returns the random numbers of a seed, the same on every machine.
Pick SeededPick(std::uint64_t seed, std::uint64_t number);

// Returns a whole history of about `ops` operations, the same for the same
// arguments on every machine. With `rarities`, one history in twenty is large
// in one dimension, and some histories have passes that are taken apart into
// single calls (props/history/rarities.h).
History DrawHistory(const Pick& pick, std::optional<Kind> kind, int ops,
                    int cells_max = 0, bool rarities = false);
History MakeHistory(std::uint64_t seed, std::uint64_t number,
                    std::optional<Kind> kind, int ops, int cells_max = 0,
                    bool rarities = false);

// As MakeHistory, for backends that find prefixes of prompts (F1 to F5). The
// client is legal, and its sequences often begin with a prompt. Many prompts
// have a common prefix. Some passes are given up, and other prompts come before
// their tokens are removed. With `drafts`, there are drafts and commits as
// well.
History MakePrefixes(std::uint64_t seed, std::uint64_t number,
                     std::optional<Kind> kind, int ops, int cells_max,
                     bool drafts = false);

// Replaces every `step`-th operation, from operation `first` on, with a Shift
// of the last few positions of a sequence, for caches that can move positions.
void AddShifts(History& history, std::size_t first, std::size_t step);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_GENERATE_H_
