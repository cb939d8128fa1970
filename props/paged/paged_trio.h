// A random history of a paged pool, by the ledger, the reference and the
// optimized twin.

#ifndef KVTWIN_PROPS_PAGED_PAGED_TRIO_H_
#define KVTWIN_PROPS_PAGED_PAGED_TRIO_H_

#include <array>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtwin/paged.h"
#include "props/compare/failure.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

enum class PagedOpKind {
  kOpen,
  kFork,
  kAppend,  // To all layers, or the first few of them.
  kCommit,
  kCommitUnknown,  // By number.
  kTruncate,
  kFree,
  kMisuse,
};

// In the order of the enum.
inline constexpr std::array<std::string_view, 8> kPagedOpNames = {
    "open",           "fork",     "append", "commit",
    "commit_unknown", "truncate", "free",   "misuse"};

// Numbers mean what the state makes of them: any are fine.
struct PagedOp {
  PagedOpKind kind = PagedOpKind::kOpen;
  int a = 0;
  int b = 0;
  int c = 0;
};
std::ostream& operator<<(std::ostream& out, const PagedOp& op);

// What a client knows of a sequence.
struct PagedClient {
  PrefixKey key;
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> pending;  // Appended, to how many layers at most.
};

// props/paged/paged_client.h.
template <class Actor>
void Act(Actor& actor, bool any_sequence, const PagedOp& op);

// What was run, and how often something rare happened.
struct PagedCensus {
  std::int64_t operations = 0;
  std::int64_t not_made = 0;   // Histories whose pool the backend lacks.
  std::int64_t found = 0;      // Blocks that a prompt found.
  std::int64_t copied = 0;     // Blocks that were copied on write.
  std::int64_t evicted = 0;    // Cached blocks that had to go.
  std::int64_t truncated = 0;  // Truncations that took tokens away.
  std::int64_t full = 0;       // Appends that were refused.
  std::int64_t longest = 0;    // Tokens of an append that was not.
  std::set<std::pair<DType, DType>> dtypes;  // Of K and V, of pools that ran.

  void Add(const PagedCensus& other);
};

// Makes the pool of a twin, or what is to be compared in place of "optimized".
using PagedMaker = std::function<Result<std::unique_ptr<PagedPool>>(
    const PagedSpec& spec, std::string_view twin)>;

class PagedTrio {
 public:
  // Without `same_messages`, refusals need only have the same code.
  explicit PagedTrio(const PagedSpec& spec, PagedCensus* census = nullptr,
                     const PagedMaker& make = MakePagedPool,
                     bool same_messages = true);

  // Makes the pools. Throws, as all below, the Failure that a call shows: an
  // answer that differs, a call that throws, or one that is refused and must
  // not be. After a Failure nothing more may be called.
  void SetUp();
  void Do(const PagedOp& op);
  // Frees all sequences: no block may have an owner then.
  void End();
  // Of all answers.
  std::uint64_t digest() const { return digest_; }

 private:
  template <class Actor>
  friend void Act(Actor& actor, bool any_sequence, const PagedOp& op);

  // Names `call` where something was thrown that says no more.
  template <class Action>
  void Guarded(std::string_view call, const Action& action);
  void ExpectSame(const Status& reference, const Status& optimized,
                  std::string_view call);
  int Pick(int number) const;  // A sequence that there is.
  void Open(const PagedOp& op);
  void Fork(const PagedOp& op);
  void Append(const PagedOp& op);
  void Commit(const PagedOp& op, bool known);
  void Truncate(const PagedOp& op);
  void Free(int sequence);
  void Misuse(const PagedOp& op);
  using Rows = std::vector<KvRows>;  // Of a sequence, in a layer.
  void CompareSequence(int sequence);
  void CompareViews(int sequence, int layer, const Rows& rows);
  void ComparePacked(int sequence, int layer, const Rows& rows);
  void CompareContiguous(int sequence, int layer, const Rows& rows, int kv_len);
  void CheckSlots(int sequence);
  void CheckTables(const std::vector<int>& sequences);
  void CompareAll();

  PagedSpec spec_;
  PagedMaker make_;
  bool same_messages_;
  std::unique_ptr<PagedPool> reference_;
  std::unique_ptr<PagedPool> optimized_;
  reference::PagedLedger ledger_;
  std::map<int, PagedClient> clients_;
  int comparisons_ = 0;                          // Of all sequences.
  std::vector<std::vector<std::int32_t>> seen_;  // Tokens of sequences, once.
  PagedCensus* census_;
  std::uint64_t digest_ = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_TRIO_H_
