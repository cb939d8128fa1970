// Runs a random history on one paged pool. The client follows the pool's
// answers and makes no misuse: the pool decides where blocks lie, which tokens
// of a prompt it finds, and when it is full. The client compares nothing: see
// PoolRecorder and Judge.

#ifndef KVTWIN_PROPS_PAGED_POOL_WORKLOAD_H_
#define KVTWIN_PROPS_PAGED_POOL_WORKLOAD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/dialects/pool_rules.h"
#include "kvtwin/paged.h"
#include "props/compare/runner.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_driver.h"

namespace kvtwin::props {

// Which of the optional operations a pool has.
struct PoolAbilities {
  bool fork = true;
  bool truncate = true;
  bool commit_unknown = true;
  bool usage = true;
  bool table = true;
  bool csr = true;
  bool slots = true;
  bool views = true;
  bool media = false;                    // Prompts may have media.
  int max_sequences = kOpenClientsMost;  // At most this many may be open.
  // Set if the pool attends.
  std::optional<PoolAttention> attention = {};
};

// Every call throws a Failure if the pool refuses a call that it must not
// refuse, or its answer makes no sense.
class PoolWorkload {
 public:
  // Requires: `pool` and `census`, if not null, outlive the PoolWorkload.
  PoolWorkload(PagedPool& pool, const PoolAbilities& abilities,
               const PoolRules& rules = {},
               PagedCoverageCounts* counts = nullptr)
      : pool_(pool),
        abilities_(abilities),
        rules_(rules),
        counts_(counts == nullptr ? own_counts_ : *counts) {
    if (!abilities.attention) return;
    asker_.emplace(pool.spec(), *abilities.attention);
    ledger_.emplace(pool.spec(), rules);
  }

  // Executes the operation, then reads everything that the pool shows.
  void Do(const PagedOp& op);
  // Frees all sequences.
  void End();

  // The client's knowledge about a sequence.
  struct Sequence {
    PagedClient client;
    std::vector<int> appended;  // Appended tokens, by layer.
    // If Open found all of the prompt but its last token, that token: the next
    // append must begin with it.
    std::optional<std::int32_t> again = {};
  };
  const std::map<int, Sequence>& sequences() const { return sequences_; }
  const Answered& opens() const { return opens_; }
  // Whether an append was refused because the pool was full.
  bool was_full() const { return was_full_; }
  // The number of sequences that may still be opened.
  int Room() const { return abilities_.max_sequences - Size(sequences_); }

 private:
  template <class Actor>
  friend void Act(Actor& actor, bool any_sequence, const PagedOp& op);

  int Pick(int number) const;
  void Add(std::string_view call, int sequence, PagedClient client);
  void Open(const PagedOp& op);
  void Fork(const PagedOp& op);
  void Append(const PagedOp& op);
  bool AppendTo(int sequence, int layer, bool as_stored);
  void Commit(const PagedOp& op, bool known);
  void Truncate(const PagedOp& op);
  void Free(int sequence);
  void Misuse(const PagedOp& /*op*/) {}
  void AppendLayers(const PagedOp& op);
  void AddMedia(const PagedOp& op);
  // Discards the appended tokens of a sequence, or frees the sequence if they
  // cannot be discarded.
  void GiveUp(int sequence);
  bool MayGiveUp(const Sequence& of) const;
  int CountToCommit(const Sequence& of, const PagedOp& op) const;
  void Keep(int sequence, int len);
  void Look();
  void LookAtSlots(const PagedPool& of, int sequence);
  void LookAtTables(const PagedPool& of, const std::vector<int>& sequences);
  void LookAtOutputs();
  bool has_groups() const { return !pool_.spec().groups.empty(); }

  PagedPool& pool_;
  PoolAbilities abilities_;
  PoolRules rules_;
  PagedCoverageCounts own_counts_;  // In place of a caller's census.
  PagedCoverageCounts& counts_;
  Answered opens_;
  bool was_full_ = false;
  std::uint64_t appends_ = 0;
  std::map<int, Sequence> sequences_;
  std::vector<PagedClient> seen_;         // Past sequences.
  std::vector<PrefixMedia> freed_media_;  // Of the sequence freed last.
  // Set if the pool attends. `ledger_` is reset when the pool finds tokens that
  // were never committed.
  std::optional<PoolAsker> asker_;
  std::optional<reference::PagedLedger> ledger_;
};

// The tokens that fit into a pool, and whether it refused one more token to a
// sequence that may have it.
struct PoolRoom {
  int tokens = 0;
  bool is_full = false;
};
// Fills the pool with new sequences whose tokens differ, at most `sequences`,
// and at most six, and frees them. A right pool has the same room each time,
// whichever blocks it takes and wherever its free rows lie, because the last
// appends have one token. Throws a Failure if the pool refuses another call.
PoolRoom FillAndFree(PagedPool& pool, const PoolRules& rules, int sequences);

// Expects that a new pool has no more room than an emptied pool of its kind.
void ExpectNoMoreRoom(PagedPool& pool, const PoolRules& rules, int sequences,
                      const PoolRoom& emptied);

// Returns tokens that no history has; the first one follows from `begin`.
std::vector<std::int32_t> NewTokens(int count, int begin = 0);

// Appends the client's pending tokens to the first `layers` layers of its
// sequence. Returns how many layers took them before the pool was full.
int AppendPending(PagedPool& pool, int sequence, const PagedClient& client,
                  int layers);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_POOL_WORKLOAD_H_
