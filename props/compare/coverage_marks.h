// Coverage marks: rare states, by name. A harness that never reaches a state
// proves nothing about it. Marks are observed from outside, in the calls, the
// ledger and the cells of the reference twin; the twins do not know of them.

#ifndef KVTWIN_PROPS_COMPARE_COVERAGE_MARKS_H_
#define KVTWIN_PROPS_COMPARE_COVERAGE_MARKS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtwin/cache.h"
#include "props/history/history.h"
#include "reference/dialects.h"

namespace kvtwin::props {

struct CoverageMark {
  std::string_view name;
  std::string_view statement;
};

// All coverage marks. A run that misses a mark proves less than it seems to.
inline constexpr auto kCoverageMarks = std::to_array<CoverageMark>({
    // StartForward.
    {"filled", "the batch takes the last free cells: the cache is full"},
    {"full_by_one", "the batch is refused, with one free cell more it fits"},
    {"full_when_empty", "the batch has more tokens than the cache has cells"},
    {"full_after_eviction", "refused, though tokens were evicted for it"},
    {"full_ends_a_pass", "a refused batch ends the pass before it"},
    {"batch_of_capacity", "the batch has as many tokens as the capacity"},
    {"batch_of_all_cells", "the batch has as many tokens as there are cells"},
    {"unsorted", "positions of one sequence go down within the batch"},
    {"repeated", "a sequence has a position twice in the batch"},
    {"position_again", "a position is put that the sequence already stores"},
    {"gap", "a position is put that does not follow the last stored one"},
    {"interleaved", "two sequences take turns within the batch"},
    {"position_max", "a token is stored at position INT32_MAX"},
    {"sequence_max", "a sequence has an id above 2^30"},
    {"evicted", "a sequence of the batch loses tokens to its window"},
    {"evicted_idle", "a sequence that is not in the batch is evicted from"},
    {"evicted_one_owner", "a shared token is evicted by one owner only"},
    {"evicted_all_owners", "a shared token is evicted by all of its owners"},
    {"evicted_whole", "a sequence loses all that it had stored"},
    {"eviction_makes_room", "without the eviction the batch would not fit"},
    {"run_too_short", "contiguous: the first free run is too short"},
    {"run_exact", "contiguous: the run has just the length, used on each side"},
    {"run_at_end", "contiguous: the batch takes the very last cell"},
    {"scattered", "scatter: the batch's cells are not neighbours"},
    {"defrag_one_hole", "defrag with a single free cell below used ones"},
    {"defrag_two_runs", "defrag with several runs of free cells"},
    {"defrag_full", "defrag, and still there is no room"},
    {"defrag_shared", "defrag moves a token that several sequences hold"},
    {"defrag_layers", "defrag moves rows of more than one layer"},
    {"wrapper_second_full", "the first cache has room, a later one is full"},
    {"wrapper_encoder_back", "an encoder gives back a batch of images"},
    {"reserved", "a reserving pass with tokens in the cache"},
    {"reserved_full", "a reserving pass on a full cache"},
    {"reserved_twice", "a reserving pass right after another"},
    {"legal_pass", "a batch of a legal client, which may not be refused"},
    // SetCausal, Put and Get.
    {"except_first", "the first token of several is excepted"},
    {"except_last", "the last token of several is excepted"},
    {"except_several", "several tokens are excepted"},
    {"except_sees_later", "an excepted token sees a token after it"},
    {"except_cleared", "exceptions are taken back within the pass"},
    {"view_not_at_zero", "the view starts after the first cell"},
    {"hole_below_view", "a free cell lies below the view"},
    {"hole_in_view", "a free cell lies between used ones of the view"},
    {"view_padded", "padding adds columns to the view that no row sees"},
    {"view_cuts_sequence", "a token of the batch's sequence is not in view"},
    {"view_strangers", "the view holds tokens of sequences not in the batch"},
    {"mask_padded", "the mask has rows that belong to no token"},
    {"mask_bits_within_word", "the view of a bit mask begins within a word"},
    {"mask_bits_two_words", "a word of a bit mask takes bits of two words"},
    {"window_edge", "the oldest token lies just inside of the window"},
    {"window_past_edge", "the oldest token in view lies just outside of it"},
    {"chunk_edge", "a token begins a chunk, the one before it is stored"},
    {"row_never_put", "a token is seen whose rows were never put"},
    {"put_rounded", "f32 rows are put into a cache of another dtype"},
    {"v_dtype", "V is stored in another dtype than K"},
    {"reput", "rows are put a second time in a pass"},
    {"layer_reserved", "a layer is first put in a reserving pass"},
    {"pass_outlived", "Get after the pass's own tokens are partly gone"},
    // Calls in other orders than a server's.
    {"layer_before_type", "a layer is picked before its cache, and put"},
    {"layers_back", "a layer is put after a higher one"},
    {"get_between_puts", "a layer is put in a pass after another was read"},
    {"change_before_put", "Remove or CopyPrefix between StartForward and Put"},
    {"layer_of_another_type", "a layer is put into two of a wrapper's caches"},
    {"snapshot_in_pass", "a snapshot while there is a pass"},
    {"added_in_pass", "a sequence is added while there is a pass"},
    // Sizes above what the code processes in one step.
    {"owners_65", "a token has more than 64 owners"},
    {"sequences_65", "more than 64 sequences hold tokens"},
    {"batch_65", "a batch has more than 64 tokens"},
    {"batch_257", "a batch has more than 256 tokens"},
    {"except_65", "a token of an index above 64 is excepted"},
    {"columns_257", "a view has more than 256 columns"},
    {"columns_1025", "a view has more than 1024 columns"},
    {"layers_17", "there are more than 16 layers"},
    {"row_257", "a row of K has more than 256 elements"},
    {"mask_padded_by_64", "the mask has more than 64 rows without a token"},
    // Remove.
    {"remove_nothing", "a range without tokens of a sequence that has some"},
    {"remove_unknown", "from a sequence that holds nothing"},
    {"remove_all_open", "everything, with the open end"},
    {"remove_all_range", "everything, with a range that ends"},
    {"remove_zero_length", "a range of length zero, of a sequence with tokens"},
    {"remove_past_end", "a range that ends after the last token"},
    {"remove_one_owner", "a shared token leaves one of its sequences"},
    {"remove_at_window", "a range from the middle, begun at the window's edge"},
    {"remove_in_pass", "tokens of the current batch"},
    {"shift", "later tokens move down"},
    {"shift_shared_earlier", "tokens move while an earlier one is shared"},
    {"shift_refused_shared", "refused: a later token is shared"},
    {"shift_refused_none", "refused: there is no shift function"},
    {"shift_f16", "a shift rewrites f16 rows"},
    {"shift_bf16", "a shift rewrites bf16 rows"},
    {"shift_f8", "a shift rewrites f8 rows"},
    {"shift_blocks", "a shift rewrites rows of q8_0 or q4_0"},
    {"shift_layers", "a shift rewrites rows of more than one layer"},
    {"shift_bare", "a shift moves a token without rows"},
    {"wrapper_remove_refused", "a later cache refuses what the first would do"},
    // CopyPrefix.
    {"copy_self", "a sequence onto itself, which truncates it"},
    {"copy_self_whole", "a sequence onto itself, all of it"},
    {"copy_onto_live", "onto a sequence that holds other tokens"},
    {"copy_onto_copy", "onto a sequence that shares tokens with the source"},
    {"copy_nothing", "of an empty sequence onto one with tokens"},
    {"copy_third", "a token gets its third owner"},
    {"copy_beyond", "a length beyond the last token"},
    {"copy_refused", "refused: there is an encoder"},
    {"copy_in_pass", "tokens of the current batch"},
    // CanResume.
    {"resume_edge", "yes, with the oldest token just at the window's edge"},
    {"resume_evicted", "no: a token of the window is gone"},
    {"resume_past_end", "no: past the token after the last"},
    {"resume_unknown", "no: the sequence holds nothing"},
    {"resume_split", "no, because of one of a wrapper's caches only"},
    // Encoder.
    {"encoder_reput", "an encoder's slot is put again"},
    {"encoder_forgets", "a Remove covers the position of the slot"},
    {"encoder_keeps", "a Remove elsewhere leaves the slot cached"},
    // Drafts: only histories that speculate have any.
    {"draft_chain", "a draft follows a draft of its batch"},
    {"draft_siblings", "two drafts of a batch have one parent"},
    {"draft_level", "a draft follows a draft of an earlier batch"},
    {"draft_of_nothing", "a draft of a sequence without tokens"},
    {"draft_beside_plain", "a batch of drafts and of ordinary tokens"},
    {"draft_past_window", "a draft's window ends among its ancestors"},
    {"draft_evicts", "a batch of drafts evicts a token"},
    {"draft_full", "a batch of drafts is refused: the cache is full"},
    {"commit_all", "a commit of all drafts"},
    {"commit_some", "a commit of some drafts of a sequence"},
    {"commit_none", "a commit of no draft of a sequence that has some"},
    {"commit_later_child", "a commit takes a draft that has an older sibling"},
    {"commit_in_pass", "a commit of drafts of the current batch"},
    {"drop_drafts_copy", "a copy to a sequence that has drafts"},
    {"drop_drafts_remove", "a Remove from a sequence that has drafts"},
    {"copy_beside_drafts", "a copy from a sequence that has drafts"},
    // States of recurrent caches.
    {"state_inside", "a batch stores a checkpoint before its last state"},
    {"state_passed_over", "a checkpoint of the batch has no cell"},
    {"state_evicted", "a pass evicts a checkpoint of an earlier batch"},
    {"state_evicted_shared", "a pass evicts a state that others hold"},
    {"state_taken_back", "a Remove goes back to the state before the batch"},
    {"state_rollback", "a Remove goes back to a checkpoint before that"},
    {"state_cut", "a Remove ends before the length that was asked for"},
    {"state_fork", "a copy ends at a state that is not the last"},
    {"state_fork_cut", "a copy ends before the length that was asked for"},
    {"pin_keeps", "a pass keeps a state for its pin alone"},
    {"pin_again", "Checkpoint of a state that is pinned"},
    {"pin_undone", "Checkpoint undoes the oldest pin"},
    {"pin_evicted", "a pass evicts a state whose pin was undone"},
    {"pin_forked", "a copy gets a pin of a state before its last"},
    {"pin_removed", "a Remove takes a pin away"},
    // States of drafts.
    {"draft_state_chain", "a draft follows another, and reads what it reads"},
    {"draft_state_read", "a draft reads the state of a draft"},
    {"draft_state_first", "a draft of a sequence without a state"},
    {"commit_state_inside", "a commit keeps a checkpoint within the path"},
    {"commit_state_evicts", "a commit evicts a checkpoint"},
    {"commit_state_pin", "a commit keeps a state for its pin alone"},
    // Hybrids.
    {"hybrid_cut", "a Remove goes farther back, because of a second cache"},
    {"hybrid_emptied", "a Remove finds no common length, and takes all"},
    {"hybrid_fork_cut", "a copy is shorter, because of a second cache"},
    {"hybrid_full", "one cache of several has no cells for the batch"},
});

// The first marks of drafts, states, states of drafts and hybrids. The marks of
// each of these groups are expected only if some of them are hit.
inline constexpr std::string_view kFirstDraftMark = "draft_chain";
inline constexpr std::string_view kFirstStateMark = "state_inside";
inline constexpr std::string_view kFirstDraftStateMark = "draft_state_chain";
inline constexpr std::string_view kFirstHybridMark = "hybrid_cut";

// Returns the index of a mark in the table. An unknown name does not compile.
consteval std::size_t Mark(std::string_view name) {
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    if (kCoverageMarks[i].name == name) return i;
  }
  throw "no such mark";
}

// Counts of what happened in a run.
struct CoverageCounts {
  std::array<std::int64_t, kCoverageMarks.size()> hits = {};
  std::int64_t histories = 0;
  std::int64_t discarded = 0;  // No cache could be made from the setup.
  std::int64_t full = 0;       // Histories in which the cache was full.
  std::int64_t calls = 0;      // Calls that have an outcome.
  // Calls refused with cache_full or the like; no misuse.
  std::int64_t refused = 0;

  void Add(const CoverageCounts& other);
};

// Whether the mark belongs to drafts, states, states of drafts or hybrids, and
// no mark of this group has a hit: the caches of the run have no such thing.
bool OfUnusedGroup(const CoverageCounts& counts, std::size_t mark);

// Returns the reasons why the result of a run means less than it seems: marks
// without a hit, too many or too few refusals, too many discarded histories,
// caches that were hardly ever full.
std::vector<std::string> CoverageGaps(const CoverageCounts& counts);

// Watches one history. Call BeforeCall before a call; after it, report its
// arguments and answer, with the ledger and the reference twin as they are now.
class Observer {
 public:
  Observer(const Setup& setup, CoverageCounts& counts)
      : setup_(setup), counts_(counts) {}

  void BeforeCall(const reference::Ledger& ledger, const Cache& reference);
  // Counts the answer of any call.
  void Outcome(StatusCode code);
  // At the end of the history.
  void End(bool ran);

  void StartForward(const Batch& batch, bool reserve, StatusCode code,
                    const reference::Ledger& ledger);
  void SetCausal(std::span<const int> except);
  // `part`: the index of the active cache in its wrapper, or 0.
  void Put(std::size_t part, int layer, DType dtype);
  void Get(std::size_t part, int layer, const KvView& view,
           const reference::Ledger& ledger, const Cache& reference);
  void Remove(int seq, std::int32_t begin, std::int32_t end, StatusCode code,
              const reference::Ledger& ledger);
  void CopyPrefix(int src, int dst, std::int32_t len, StatusCode code,
                  const reference::Ledger& ledger);
  void Commit(int seq, std::span<const int> path,
              const reference::Ledger& ledger);
  void Checkpoint(int seq, const reference::Ledger& ledger);
  void EndPass() { pass_ = reserved_ = false; }
  // Reports a SetLayer, or with `type` a SetLayerType.
  void Select(bool type) { type_was_last_ = type; }
  void Snapshot();
  void Add(bool any);
  void CanResume(int seq, std::int32_t pos, const reference::Ledger& ledger);

 private:
  void Hit(std::size_t mark, bool seen) {
    if (seen) ++counts_.hits[mark];
  }
  const CacheSpec& SpecOf(std::size_t part) const {
    return setup_.spec.caches.empty() ? setup_.spec : setup_.spec.caches[part];
  }
  bool wrapper() const { return !setup_.spec.caches.empty(); }
  bool InBatch(int seq) const;

  void SeeBatch();
  void SeeDrafts(const Batch& batch, StatusCode code,
                 const reference::CacheLedger& after);
  // Marks of recurrent caches and hybrids, in state_marks.cc. `before` and
  // `after` are the ledgers of a part.
  void SeeStates(const reference::CacheLedger& before,
                 const reference::CacheLedger& after);
  void SeeDraftStates(const reference::CacheLedger& before,
                      const reference::CacheLedger& after);
  void SeeRollback(int seq, std::int64_t begin,
                   const reference::CacheLedger& before,
                   const reference::CacheLedger& after);
  void SeeFork(int src, int dst, std::int64_t len,
               const reference::CacheLedger& before,
               const reference::CacheLedger& after);
  void SeeCommitted(int seq, const reference::CacheLedger& before,
                    const reference::CacheLedger& after);
  void SeeOneLength(int seq, std::int64_t asked, bool copied,
                    const reference::Ledger& ledger);
  void SeeSizes();
  void SeeOwners();
  void SeeOrder(std::size_t part, int layer);
  void SeeEviction(StatusCode code, const reference::CacheLedger& before,
                   const reference::CacheLedger& after);
  void SeePlacement(StatusCode code, const reference::CacheLedger& after);
  void SeeDefrag(StatusCode code, const std::vector<std::size_t>& owners);
  void SeeView(const KvView& view, const std::vector<CellEntry>& cells,
               int cell_count);
  void SeeRows(std::size_t part, int layer,
               const reference::CacheLedger& ledger);
  void SeeWindow(std::int64_t window, const KvView& view,
                 const std::vector<CellEntry>& cells);
  void SeeRange(int seq, std::int64_t begin, std::int32_t end,
                std::size_t part);
  void SeeShift(int seq, std::int64_t begin, std::int64_t end,
                const reference::CacheLedger& before);

  const Setup& setup_;
  CoverageCounts& counts_;
  bool full_ = false;  // At any time in this history.

  // The state before the call.
  std::vector<reference::CacheLedger> before_;
  std::vector<CellEntry> cells_;

  // The current pass.
  std::vector<std::int64_t> positions_;
  std::vector<int> sequences_;
  std::set<int> except_;
  std::set<std::pair<int, std::size_t>> put_;  // The layer, and the cache.
  std::set<std::pair<int, std::size_t>> got_;
  int last_put_ = -1;     // The layer of the last Put.
  bool changed_ = false;  // By Remove or CopyPrefix, in this pass.
  bool pass_ = false;
  bool reserved_ = false;
  std::set<std::pair<int, std::size_t>> places_;  // Put in any pass.
  bool type_was_last_ = false;

  std::map<int, std::int64_t>
      read_;  // By sequence, where its last batch began.
  std::set<std::pair<int, std::int64_t>> undone_;  // Pins: sequence, length.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_COVERAGE_MARKS_H_
