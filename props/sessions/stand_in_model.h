// A stand-in for a language model. The state of a token in a layer is a hash of
// its state in the layer before and of the rows that it sees, so that one wrong
// row changes all that follows.

#ifndef KVTWIN_PROPS_SESSIONS_STAND_IN_MODEL_H_
#define KVTWIN_PROPS_SESSIONS_STAND_IN_MODEL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/sessions.h"

namespace kvtwin::props {

inline constexpr int kModelLayers = 2;

// The tokens that a layer sees: a window or a chunk of them.
struct Sight {
  std::optional<std::int32_t> window;
  std::int32_t chunk = 0;
  int type = 0;  // The cache of a wrapper.
};

// The sights of the layers of a model that uses such a cache. A wrapper's
// layers take turns.
std::vector<Sight> SightsOf(const CacheSpec& spec);

// The states of a token: before the first layer, ..., after the last one.
using States = std::vector<std::uint64_t>;

// Computes a batch, whose tokens are known, with the rows and the masks of the
// cache, whose shift is kTagAdd. Returns the states of each token; or, if the
// rows contradict themselves, what is wrong.
struct Computed {
  std::vector<States> states;
  std::string wrong;
};
Computed Compute(Cache& cache, const std::vector<Sight>& sights,
                 const SessionBatch& batch);

// The same over a pool: `slots` are slots of it.
Computed Compute(PagedPool& pool, PoolSlots& slots, const SessionBatch& batch);
// The pool of this model with no more blocks than the sessions need.
PagedSpec PoolOf(const SessionsSpec& spec, int block_size);

// A sequence that is computed without a cache.
class Story {
 public:
  explicit Story(std::vector<Sight> sights) : sights_(std::move(sights)) {}

  const States& Add(const SessionInput& input);
  void Erase(int begin, int end);
  int size() const { return static_cast<int>(inputs_.size()); }
  const std::vector<SessionInput>& inputs() const { return inputs_; }

 private:
  std::vector<Sight> sights_;
  std::vector<SessionInput> inputs_;
  std::vector<States> states_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_STAND_IN_MODEL_H_
