// Runs a random history of a paged pool on the ledger, the reference and the
// optimized twin, and compares them. Each comparison follows the call whose
// answer it judges, so that the last call of a report is the wrong one.

#ifndef KVTWIN_PROPS_PAGED_PAGED_DRIVER_H_
#define KVTWIN_PROPS_PAGED_PAGED_DRIVER_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtwin/paged.h"
#include "props/attention/pool_asker.h"
#include "props/compare/failure.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

enum class PagedOpKind {
  kOpen,
  kFork,
  kAppend,  // To all layers, or to one only.
  kCommit,
  kCommitUnknown,  // By the number of tokens, without their ids.
  kTruncate,
  kFree,
  kMisuse,
  // Histories of pools with groups only.
  kLayers,  // Appends the pending tokens to some of the layers without them.
  kMedia,   // Adds media at a position that is not committed yet.
};

// Names of operations, in the order of the enum.
inline constexpr std::array<std::string_view, 10> kPagedOpNames = {
    "open",     "fork", "append", "commit", "commit_unknown",
    "truncate", "free", "misuse", "layers", "media"};

// One operation. Its numbers are mapped to what the state allows, so that any
// number is valid.
struct PagedOp {
  PagedOpKind kind = PagedOpKind::kOpen;
  int a = 0;
  int b = 0;
  int c = 0;
};
std::ostream& operator<<(std::ostream& out, const PagedOp& op);

// From this `c` on, a misuse is of a call that only pools with groups get.
inline constexpr int kNewMisuse = 256;

// A client's knowledge about a sequence.
struct PagedClient {
  PrefixKey key;
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> pending;  // Appended, but not committed.
  int layers = 0;                     // The first layers have the pending rows.
  // In pools with groups, the rest of the prompt, which is appended next.
  std::vector<std::int32_t> rest;
  // Media for later prompts: those that the last Truncate dropped, or those of
  // the sequence that was freed last.
  std::vector<PrefixMedia> dropped;
  std::vector<int> unknown;  // Positions whose tokens the pool was not told.

  void Add(const PrefixMedia& media) {
    key.media.push_back(media);
    std::ranges::stable_sort(key.media, {}, &PrefixMedia::position);
  }
  // Commits these tokens, and discards the other pending tokens. `known`: the
  // pool is told their ids.
  void Commit(std::span<const std::int32_t> committed, bool known);
  // Keeps the first `len` tokens, and discards the pending tokens.
  void Truncate(int len);
  // As Truncate, for a fork, which gets no later media and no prompt.
  void Fork(int len);

 private:
  void Shorten(int len);
};

// Defined in props/paged/paged_client.h.
template <class Actor>
void Act(Actor& actor, bool any_sequence, const PagedOp& op);

// Counts of the operations that ran and of the rare events among them.
struct PagedCoverageCounts {
  std::int64_t operations = 0;
  std::int64_t not_made = 0;   // Histories of pools that the backend lacks.
  std::int64_t found = 0;      // Blocks that a prompt found.
  std::int64_t copied = 0;     // Blocks that were copied on write.
  std::int64_t evicted = 0;    // Cached blocks that were reused.
  std::int64_t truncated = 0;  // Truncations that took tokens away.
  std::int64_t full = 0;       // Appends that were refused.
  std::int64_t longest = 0;    // Most tokens of a successful append.
  std::int64_t whole = 0;      // Times that all layers got rows of a token.
  std::int64_t outputs = 0;    // Rows of attention that were compared.
  std::set<std::pair<DType, DType>> dtypes;  // Dtypes of K and V that ran.

  void Add(const PagedCoverageCounts& other);
  // Whether the pools refused so many appends that no token could be committed.
  bool StoredNothing() const { return full > 0 && whole == 0; }
};

// Counts the dtypes of all layers of a pool.
void AddDTypes(const PagedSpec& spec, PagedCoverageCounts& counts);

// Makes the pool of a twin; for "optimized", perhaps the pool under test.
using PagedMaker = std::function<Result<std::unique_ptr<PagedPool>>(
    const PagedSpec& spec, std::string_view twin)>;

class PagedDriver {
 public:
  // Without `same_messages`, only the codes of refusals must be equal. With
  // `attention`, the optimized pool attends.
  explicit PagedDriver(const PagedSpec& spec,
                       PagedCoverageCounts* counts = nullptr,
                       const PagedMaker& make = MakePagedPool,
                       bool same_messages = true,
                       const std::optional<PoolAttention>& attention = {});

  // Makes the pools. This and the calls below throw a Failure if answers
  // differ, a pool throws, or a pool refuses a call that it must not refuse.
  // Requires, after a Failure: no further call.
  void SetUp();
  void Do(const PagedOp& op);
  // Does the operation without comparing what the pools show after it.
  void Replay(const PagedOp& op);
  // Frees all sequences, and checks that no block has an owner then.
  void End();
  // Returns a text on which all later answers depend, if each later Open has a
  // prompt of its own (PromptOf).
  std::string StateText() const;
  int sequences() const { return Size(clients_); }
  // Returns a digest of the status codes, and of the usage after each
  // operation.
  std::uint64_t digest() const { return digest_; }

 private:
  template <class Actor>
  friend void Act(Actor& actor, bool any_sequence, const PagedOp& op);

  // Turns a std::exception that `action` throws into a Failure that names
  // `call`.
  template <class Action>
  void Guarded(std::string_view call, const Action& action);
  void ExpectSame(const Status& reference, const Status& optimized,
                  std::string_view call);
  int Pick(int number) const;  // Returns an open sequence.
  void Open(const PagedOp& op);
  void Fork(const PagedOp& op);
  void Append(const PagedOp& op);
  void AppendLayers(const PagedOp& op);
  void AddMedia(const PagedOp& op);
  bool AppendTo(int sequence, int layer, bool as_stored);
  void Commit(const PagedOp& op, bool known);
  bool MayCommit(int sequence, int count) const;
  void Truncate(const PagedOp& op);
  void Free(int sequence);
  void Misuse(const PagedOp& op);
  Status MakeMisuse(PagedPool& pool, const PagedOp& op) const;
  // Returns a group of a pool: the pool itself, if it has no groups.
  const PagedPool& GroupIn(const PagedPool& pool, int group) const;
  int GroupCount() const { return std::max(1, Size(spec_.groups)); }
  const PagedSpec& SpecOfGroup(int group) const;
  // The first layer of a group.
  int FirstLayer(int group) const;
  // `call` is the fork or the truncation that comes next.
  int ResumeBefore(int sequence, int len, PagedTraceOpKind call);
  using Rows = std::vector<KvRows>;  // Rows of a sequence in a layer.
  void CompareSequence(int sequence);
  void CompareViews(int sequence, int layer, const Rows& rows);
  void ComparePacked(int sequence, int layer, const Rows& rows);
  void CompareContiguous(int sequence, int layer, const Rows& rows, int kv_len);
  void CheckBlocks(const PagedPool& pool, std::string_view name, int layer,
                   const std::vector<PagedView>& views);
  void CheckShown(int sequence, int layer, const std::vector<PagedView>& views,
                  int rows) const;
  void CheckSlots(int group, int sequence);
  void CompareTables(int group, const std::vector<int>& sequences);
  void CompareUsage(int group);
  void CheckUsageOfAll(const PagedPool& pool);
  void CheckTables(int group, const std::vector<int>& sequences);
  void CheckLayerTable(int layer, const std::vector<int>& sequences);
  void CheckAttention();
  void CompareAll();

  PagedSpec spec_;
  PagedMaker make_;
  bool same_messages_;
  std::optional<PoolAsker> asker_;
  std::unique_ptr<PagedPool> reference_;
  std::unique_ptr<PagedPool> optimized_;
  reference::PagedLedger ledger_;
  std::map<int, PagedClient> clients_;
  int comparisons_ = 0;                   // Calls of CompareAll.
  std::vector<PagedClient> seen_;         // Past sequences.
  std::vector<PrefixMedia> freed_media_;  // Of the sequence freed last.
  PagedCoverageCounts* counts_;
  std::uint64_t digest_ = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_DRIVER_H_
