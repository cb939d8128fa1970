// Visits every state that a small cache can reach, and tries from each every
// operation with every argument, checked against the ledger and the reference.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_H_

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "props/compare/failure.h"
#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The size of an exploration: positions 0 .. positions - 1 of sequences
// 0 .. sequences - 1.
struct ExploreSize {
  int cells = 5;
  int sequences = 2;
  int positions = 4;
  DType dtype = DType::kF32;  // The dtype of stored rows.
  // Batches may have drafts, as long as there are two at most, and there are
  // commits.
  bool drafts = false;
};

// The setup of a cache with exactly `ExploreSize::cells` cells, of one kind,
// with the shift function tag_add.
struct ExploreCase {
  std::string name;  // "swa window=1 memory=2 place=scatter"
  Setup setup;
};

// Returns the cases: causal, windows 0 to 2, the same windows with a memory of
// one position more, and chunks of two; each with both placements. Leaves out
// cases without room for a batch of two besides their memory. With `states`,
// returns recurrent caches and a hybrid of attention, a window and such a cache
// instead.
std::vector<ExploreCase> ExploreCases(const ExploreSize& size,
                                      bool states = false);

// Returns whether a third-party cache has the case. If it does not declare
// tag_add, the case gets another shift function, and its name says which. It
// gets none only if the cache declares no other: without a shift function, a
// Remove in the middle is refused.
bool FitCase(const Abilities& abilities, ExploreCase& what);

// The result of all steps from one state.
struct Expansion {
  struct Found {
    std::uint64_t state = 0;
    std::uint32_t step = 0;  // The step that leads to the state.
    // For a state with drafts: the name of each of its sequences in the state
    // that was restored last (ExploreEntry).
    std::vector<int> names = {};
  };
  // A step, with what a history needs to repeat it.
  struct StepTaken {
    std::int64_t step = -1;  // -1: the state could not be entered.
    std::vector<int> except = {};
    // A reserving pass of these came before the step, and after it.
    bool reserved = false;
    bool reserved_again = false;
    std::vector<std::int32_t> positions = {};
    std::vector<int> sequences = {};
  };
  std::int64_t checked = 0;
  std::int64_t differences = 0;
  bool ended = false;     // The process ended; the other steps were not made.
  bool not_made = false;  // There is no such cache.
  std::vector<Found> found = {};
  std::optional<Failure> failure = {};  // The first, and the step that failed.
  StepTaken failed = {};
};
// How a state is reached, in numbers (ExploreEntry has the steps).
struct ExploreWay {
  // A step by its number, with sequence s renamed names[s].
  struct Taken {
    std::uint32_t step = 0;
    std::vector<int> names = {};
  };
  std::uint64_t base = 0;
  std::vector<Taken> path = {};
  std::vector<int> names = {};
};

// Expands a state somewhere else.
using ExpandFn = std::function<Expansion(
    const ExploreSize& size, const ExploreCase& what, const ExploreWay& way)>;
// Expands a state here. Before each step, `subject.on_step` is called.
Expansion ExpandState(const ExploreSize& size, const ExploreCase& what,
                      const Subject& subject, const ExploreWay& way);

struct ExploreResult {
  std::int64_t states = 0;
  std::int64_t transitions = 0;  // Operations checked.
  std::int64_t differences = 0;
  int depth = 0;  // Operations up to the farthest state.
  bool fixed_point = false;
  bool ended = false;     // A step ended the process of the cache.
  bool not_made = false;  // There is no such cache.
  double seconds = 0;
  std::optional<Failure> failure = {};  // The first.
  std::string from = {};  // The cells of the state in which it happened.
  History history = {};   // Leads to that state and fails.
};

// Explores breadth first, from the empty cache to the fixed point. States are
// equal if they differ only in the names of tokens and of sequences.
class Explorer {
 public:
  // Errors: there could be more states than fit in memory.
  static Result<std::unique_ptr<Explorer>> Make(
      const ExploreSize& size, const ExploreCase& what, const Subject& subject,
      const ExpandFn& expand = nullptr);
  virtual ~Explorer() = default;

  // Continues until all states are expanded or `stop` returns true; `stop` is
  // called now and then with the result so far. The result is the same for any
  // number of `threads`.
  virtual const ExploreResult& Run(
      int threads, const std::function<bool(const ExploreResult&)>& stop) = 0;

  // Save writes the progress of Run as text; Load reads it. Errors of Load: the
  // text is damaged, or belongs to another exploration.
  virtual void Save(std::ostream& out) const = 0;
  virtual Status Load(std::istream& in) = 0;
};

// A state, and the state and the step by which it was found: three numbers of
// 64 bits, as programs exchange them.
struct FoundState {
  std::uint64_t state = 0;
  std::uint64_t parent = 0;
  std::uint64_t step = 0;
};

// The results of all steps from several states.
struct FoundStates {
  std::int64_t checked = 0;
  std::int64_t differences = 0;
  bool ended = false;                        // As in Expansion.
  bool not_made = false;                     // As in Expansion.
  std::optional<std::uint64_t> failed = {};  // The first state that failed.
  // Each state once, in ascending order, with the first way that led to it.
  std::vector<FoundState> found = {};
};

class ExploreWorker;
class StateCodec;
struct ExploreStep;

// Expands states that another program keeps: an exploration that does not
// remember the states that it has seen. Batches have no drafts.
class StateExpander {
 public:
  StateExpander(const ExploreSize& size, const ExploreCase& what,
                const Subject& subject, ExpandFn expand);
  ~StateExpander();

  // Returns whether a state can have this number.
  bool IsKey(std::uint64_t state) const;
  // Requires: IsKey for each state.
  FoundStates Expand(std::span<const std::uint64_t> states);

 private:
  ExploreSize size_;
  ExploreCase what_;
  Subject subject_;
  ExpandFn expand_;
  std::unique_ptr<StateCodec> codec_;
  std::vector<ExploreStep> steps_;
  std::unique_ptr<ExploreWorker> worker_;
};

// Expands the last state of a path from the empty cache. Returns nothing if
// `path` is not a path, or has a state twice.
std::optional<ExploreResult> ExploreAlong(const ExploreSize& size,
                                          const ExploreCase& what,
                                          const Subject& subject,
                                          const ExpandFn& expand,
                                          std::span<const FoundState> path);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_H_
