// The calls of a history, each with all its arguments, which laws play on
// caches of any kind and size.

#ifndef KVTWIN_PROPS_LAWS_SCRIPT_H_
#define KVTWIN_PROPS_LAWS_SCRIPT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// A call with all its arguments, none of them relative.
struct Call {
  enum class Kind {
    kStart,
    kCausal,
    kPut,
    kCopy,
    kRemove,
    kAsk,
    kPin,      // Checkpoint.
    kRestore,  // Restore of the cache's own Snapshot.
    kAdd       // AddSequence of the cache's own SnapshotOf.
  };
  Kind kind = Kind::kStart;
  // The reference's answer when the call was recorded.
  StatusCode code = StatusCode::kOk;
  // kStart
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  bool reserve = false;
  // kStart: images; kCausal: excepted tokens.
  std::vector<int> indices;
  // kPut; kCausal has a type only.
  int layer = 0;
  int type = 0;  // The index of a wrapper's cache.
  DenseTensor key;
  DenseTensor value;
  // kRemove (seq, begin, end), kCopy (seq to dst, end), kAsk (seq, end), kPin
  // (seq), kAdd (seq as dst)
  int seq = 0;
  int dst = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  bool lacks_layer = false;  // kAdd: the first layer's rows are left out.
  // kRestore, kAdd: the reference's state after the call, for a ledger.
  CacheState state;
};

Call RemoveCall(int seq, std::int32_t begin, std::int32_t end);
Call CopyCall(int src, int dst, std::int32_t len);
Call StartCall(std::vector<std::int32_t> positions, std::vector<int> sequences,
               bool reserve);

// Returns "Remove(1, 0, 3)".
std::string ToText(const Call& call);

// The calls of a history, resolved with the reference twin.
struct Script {
  Setup setup;
  std::vector<Call> calls;
};

// Ignores `keep`: laws compare rows, so every batch puts its own. For a
// third-party cache, the script has what its abilities allow; at visibility it
// is made with that cache, up to where it differs from the ledger.
Script Resolve(const History& history,
               const Subject& subject = TwinSubject("reference"));

struct Answer {
  StatusCode code = StatusCode::kOk;
  bool yes = false;  // The answer of CanResume.
  bool operator==(const Answer&) const = default;
};

std::string ToText(const Answer& answer);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_SCRIPT_H_
