// A random history of one paged pool, by a client that follows its answers and
// asks for nothing that is misuse: where blocks lie, what a prompt finds and
// when it is full is the pool's own affair. The client compares nothing: see
// PoolRecorder, and Judge.

#ifndef KVTWIN_PROPS_PAGED_PAGED_SOLO_H_
#define KVTWIN_PROPS_PAGED_PAGED_SOLO_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "core/dialects/pool_rules.h"
#include "kvtwin/paged.h"
#include "props/paged/paged_trio.h"

namespace kvtwin::props {

// Whether a pool has what it may leave out.
struct PoolAbilities {
  bool fork = true;
  bool truncate = true;
  bool commit_unknown = true;
  bool usage = true;
  bool table = true;
  bool csr = true;
  bool slots = true;
};

// Any call throws a Failure where the pool refuses what it may not, or
// answers what makes no sense.
class PagedSolo {
 public:
  // Requires: `pool` and `census`, if there is one, outlive it.
  PagedSolo(PagedPool& pool, const PoolAbilities& abilities,
            const PoolRules& rules = {}, PagedCensus* census = nullptr)
      : pool_(pool),
        abilities_(abilities),
        rules_(rules),
        census_(census == nullptr ? own_census_ : *census) {}

  // Then looks at all that there is to see.
  void Do(const PagedOp& op);
  // Frees all sequences.
  void End();

 private:
  template <class Actor>
  friend void Act(Actor& actor, bool any_sequence, const PagedOp& op);

  struct Sequence {
    PagedClient client;
    std::vector<int> appended;  // Tokens, of each layer.
    // The last token of a prompt that was found to there: the next to append.
    std::optional<std::int32_t> again = {};
  };

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
  void Forget(int sequence);
  void Look();

  PagedPool& pool_;
  PoolAbilities abilities_;
  PoolRules rules_;
  PagedCensus own_census_;  // Counts where the caller wants no census.
  PagedCensus& census_;
  std::uint64_t appends_ = 0;
  std::map<int, Sequence> sequences_;
  std::vector<std::vector<std::int32_t>> seen_;  // Tokens of sequences, once.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_SOLO_H_
