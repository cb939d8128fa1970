// Laws of pools: statements about the calls of one pool, which need neither a
// ledger nor a second pool (docs/laws.md). A random history is run on a pool;
// after each operation the law makes calls of its own and takes them back.

#ifndef KVTWIN_PROPS_LAWS_POOL_LAWS_H_
#define KVTWIN_PROPS_LAWS_POOL_LAWS_H_

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/dialects/pool_rules.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_workload.h"

namespace kvtwin::props {

struct LawProbe;

struct PoolLaw {
  std::string_view name;
  std::string_view statement;
  std::string_view rules;
  // Whether the law can judge a pool with these abilities and rules.
  bool (*applies)(const PoolAbilities& abilities, const PoolRules& rules);
  std::string_view needs;  // What pools have that it can judge, in words.
  // Throws a Failure if the law is broken. Returns whether it was judged.
  bool (*check)(LawProbe& probe);
};
std::span<const PoolLaw> PoolLaws();
// Returns null for an unknown name.
const PoolLaw* FindPoolLaw(std::string_view name);

// Returns the command that judges a history by a law.
std::string LawCommand(const PoolLaw& law, const PagedHistory& history,
                       const Subject& subject);

// Runs the history on `pool` and checks the law after each operation. The
// `views` of the result count how often it was judged. The failure of a law has
// the check "subject: pool", and its text begins with "law NAME: ".
RunResult JudgePool(const PoolLaw& law, const PagedHistory& history,
                    std::unique_ptr<PagedPool> pool,
                    const PoolAbilities& abilities, const PoolRules& rules,
                    PagedCoverageCounts* counts = nullptr,
                    PoolCalls* calls = nullptr);

// Returns a twin as a subject that a law judges.
Subject LawSubject(const PoolLaw& law, std::string_view twin);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_POOL_LAWS_H_
