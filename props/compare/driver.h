// A driver carries out the calls of a history on the specification and on a
// subject, and compares their answers.

#ifndef KVTWIN_PROPS_COMPARE_DRIVER_H_
#define KVTWIN_PROPS_COMPARE_DRIVER_H_

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/index.h"
#include "kvtwin/status.h"
#include "props/base/runs_of.h"
#include "props/history/history.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// The tokens of a batch.
struct Tokens {
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::vector<int> multimodal;
  std::vector<int> parents = {};  // Empty if there are no drafts.

  Batch batch() const { return {positions, sequences, multimodal, parents}; }
};

// Returns the call as text, which for drafts has their parents.
inline std::string StartForwardText(const Tokens& tokens, bool reserve) {
  const std::string parents =
      tokens.parents.empty()
          ? ""
          : fmt::format(", parents [{}]", RunsOf(tokens.parents));
  return fmt::format("StartForward({}positions [{}], sequences [{}]{}{})",
                     parents.empty() ? "" : "drafts, ",
                     RunsOf(tokens.positions), RunsOf(tokens.sequences),
                     parents, reserve ? ", reserve" : "");
}

// Returns which of a wrapper's caches a layer belongs to; 0 for other caches.
inline int TypeOf(const Setup& setup, int layer) {
  const auto types = Size(setup.spec.caches);
  return IsWrapper(setup.spec.kind) ? layer % types : 0;
}

// Returns the number of layers into which an operation puts rows.
inline int LayersOf(const Op& op, const Setup& setup) {
  return op.stop < 0 ? setup.layers : std::min(op.stop, setup.layers);
}

// Returns "Put(layer 0, rows of tokens 2 to 4)". Tokens are numbered from 0 in
// the order of the batches.
inline std::string PutText(int layer, std::int64_t first, std::int64_t count) {
  const std::string tokens =
      count == 1 ? fmt::format("token {}", first)
                 : fmt::format("tokens {} to {}", first, first + count - 1);
  return fmt::format("Put(layer {}, rows of {})", layer, tokens);
}

// A layer in one of a wrapper's caches, or in the only cache.
struct Place {
  int type = 0;
  int layer = 0;
  auto operator<=>(const Place&) const = default;
};

// Carries out calls. Any call may throw Failure.
class Driver {
 public:
  virtual ~Driver() = default;

  // Returns false if no cache can be made from the setup.
  virtual bool SetUp() = 0;
  virtual void TearDown() = 0;

  virtual bool StartForward(Tokens tokens, bool reserve) = 0;
  // Puts rows into each layer: new rows, unless the operation keeps the old
  // ones.
  virtual void PutAll(const Op& op) = 0;
  virtual void GetAll() = 0;
  // `except` has indices as in an operation: modulo the size of the batch.
  virtual void SetCausal(const std::vector<int>& except) = 0;
  virtual StatusCode Remove(int seq, std::int32_t begin, std::int32_t end) = 0;
  virtual void CopyPrefix(int src, int dst, std::int32_t len) = 0;
  virtual bool CanResume(int seq, std::int32_t pos) = 0;
  virtual void Commit(int seq, const std::vector<int>& path) = 0;
  virtual void Checkpoint(int seq) = 0;
  // Gives `seq` a prompt, if the cache can find prefixes. Requires: it has no
  // tokens.
  virtual void FindPrefix(int /*seq*/, const std::vector<int>& /*ids*/) {}
  // Shifts positions, if the cache can shift positions.
  virtual void Shift(int /*seq*/, std::int32_t /*begin*/, std::int32_t /*end*/,
                     std::int32_t /*delta*/) {}
  // Each of these functions makes a single call, whatever calls came before it.
  // Requires: the cache has this `layer`, or this `type`.
  virtual void SelectLayer(int layer) = 0;
  virtual void SelectType(int type) = 0;
  // Puts rows into the current layer of the active cache. Requires: in_pass().
  virtual void Store() = 0;
  virtual void Read() = 0;
  // As SetCausal, but for the active cache alone. Requires: in_pass().
  virtual void Except(const std::vector<int>& except) = 0;
  virtual void Cached() = 0;
  // Takes a snapshot of a sequence, if the cache can take snapshots.
  virtual void Snapshot(int /*seq*/) {}
  virtual void Add(int /*seq*/, int /*dst*/) {}
  virtual void Misuse(int which) = 0;
  virtual void Poison() = 0;
  virtual void Reload() = 0;

  virtual const reference::Ledger& ledger() const = 0;
  virtual bool in_pass() const = 0;
  // The layer and the cache that the next Put and Get refer to.
  virtual Place place() const = 0;
  // Whether the contents of the cache are no longer known, so that no further
  // call can be judged.
  virtual bool over() const { return false; }
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_DRIVER_H_
