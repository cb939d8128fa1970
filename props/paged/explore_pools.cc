#include "props/paged/explore_pools.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <set>
#include <utility>

#include "core/index.h"
#include "props/base/hash.h"
#include "props/paged/paged_client.h"

namespace kvtwin::props {
namespace {

// A prompt by its binary digits (kOwnPrompt).
constexpr PagedOp OpenOf(int digits) {
  return {PagedOpKind::kOpen, digits, 0, kOwnPrompt};
}

// Operations on sequences 0 and 1 and on new sequences. All tokens are 0,
// except one of sequence 1.
constexpr std::array kMoves = {
    OpenOf(0b1),
    OpenOf(0b1000),
    PagedOp{PagedOpKind::kFork, 0, 1, 0},
    PagedOp{PagedOpKind::kAppend, 0, 0, 4},  // A token.
    PagedOp{PagedOpKind::kAppend, 0, 1, 4},  // Two tokens.
    PagedOp{PagedOpKind::kAppend, 0, 1, 0},  // Two, to the first layer.
    PagedOp{PagedOpKind::kAppend, 1, 0, 3},  // Another token.
    PagedOp{PagedOpKind::kLayers, 0, 0, 0},
    PagedOp{PagedOpKind::kCommit, 0, 1, 0},  // All appended tokens.
    PagedOp{PagedOpKind::kCommit, 0, 0, 1},  // One of them.
    PagedOp{PagedOpKind::kCommit, 1, 1, 0},
    PagedOp{PagedOpKind::kTruncate, 0, 1, 0},
    PagedOp{PagedOpKind::kTruncate, 1, 0, 0},
    PagedOp{PagedOpKind::kFree, 0, 0, 0},
    PagedOp{PagedOpKind::kFree, 1, 0, 0},
};
constexpr int kSequencesMost = 2;

using Path = std::vector<unsigned char>;  // Indices of kMoves.

// Whether the operation names only sequences that exist. Otherwise it would be
// made on another sequence, and repeat another operation.
bool IsMade(const PagedOp& op, int sequences) {
  if (op.kind == PagedOpKind::kOpen) return sequences < kSequencesMost;
  if (op.kind == PagedOpKind::kFork && sequences == kSequencesMost) {
    return false;
  }
  return op.a < sequences;
}

class Space {
 public:
  Space(const PoolSpace& space, const PagedMaker& make)
      : spec_(space.spec), make_(make) {}

  PoolSpaceResult Run(const std::function<bool(const PoolSpaceResult&)>& stop) {
    Reach({});
    while (!waiting_.empty() && !result_.failure) {
      if (stop(result_)) return std::move(result_);
      const auto [path, sequences] = std::move(waiting_.front());
      waiting_.pop_front();
      for (std::size_t move = 0; move < kMoves.size(); ++move) {
        if (!IsMade(kMoves.at(move), sequences) || result_.failure) continue;
        ++result_.transitions;
        Path longer = path;
        longer.push_back(static_cast<unsigned char>(move));
        Reach(std::move(longer));
      }
    }
    result_.fixed_point = !result_.failure;
    return std::move(result_);
  }

 private:
  // Makes the operations of a path, and notes the state to which it leads.
  void Reach(Path path) {
    PagedDriver driver(spec_, nullptr, make_);
    std::size_t step = 0;
    try {
      driver.SetUp();
      for (; step + 1 < path.size(); ++step) {
        driver.Replay(kMoves.at(path[step]));
      }
      if (!path.empty()) driver.Do(kMoves.at(path.back()));
      const std::string state = driver.StateText();
      const std::uint64_t key = HashBytes(state.data(), state.size(), 0);
      if (!known_.insert(key).second) return;
      ++result_.states;
      result_.depth = std::max(result_.depth, Size(path));
      const int sequences = driver.sequences();
      step = path.size();
      driver.End();
      waiting_.emplace_back(std::move(path), sequences);
    } catch (const Failure& failure) {
      result_.failure = failure;
      result_.failure->step = step;
      result_.history.spec = spec_;
      for (const unsigned char move : path) {
        result_.history.ops.push_back(kMoves.at(move));
      }
    }
  }

  const PagedSpec spec_;
  const PagedMaker& make_;
  std::set<std::uint64_t> known_;
  std::deque<std::pair<Path, int>> waiting_;  // And the number of sequences.
  PoolSpaceResult result_;
};

}  // namespace

std::vector<PoolSpace> PoolSpaces() {
  const PagedSpec all = {.block_size = 1, .blocks = 2, .dtype = DType::kF32};
  PagedSpec window = all;
  window.window = 1;
  PagedSpec states = all;
  states.block_size = 2;
  states.states = true;
  const auto pool = [](std::vector<PagedSpec> groups) {
    return PagedSpec{.max_seq_len = 2, .groups = std::move(groups)};
  };
  return {{"all tokens, window of 1", pool({all, window})},
          {"all tokens, states", pool({all, states})},
          {"window of 1, states", pool({window, states})}};
}

PoolSpaceResult ExploreSpace(
    const PoolSpace& space, const PagedMaker& make,
    const std::function<bool(const PoolSpaceResult&)>& stop) {
  return Space(space, make).Run(stop);
}

}  // namespace kvtwin::props
