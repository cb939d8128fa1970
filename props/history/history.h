// A history is a cache's setup and the operations on it, as one line that a
// person can read and edit:
//
//   kvt1 kind=swa window=2 cells=4 | put 0*2 | copy 0>1:2 | drop 1:0-1
//
// Arguments are relative to the state (tokens are appended, ends are counted
// from the end), so that a history still makes sense when parts of it are
// removed. docs/histories.md has the grammar.

#ifndef KVTWIN_PROPS_HISTORY_HISTORY_H_
#define KVTWIN_PROPS_HISTORY_HISTORY_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/guarded_cache.h"
#include "kvtwin/cache.h"

namespace kvtwin::props {

// The most caches that a wrapper may have.
inline constexpr std::size_t kCachesMost = 16;

// The description of a cache, and the dimensions of the rows put into it.
// The largest window and chunk that is drawn, apart from large histories.
inline constexpr int kWidest = 20;

struct Setup {
  CacheSpec spec;
  CacheConfig config;
  InitArgs init = {
      .dtype = DType::kF32, .max_sequences = 2, .capacity = 8, .max_batch = 8};
  RowDims rows = {.k_head_dim = 2, .kv_heads = 1, .v_head_dim = 1};
  int layers = 1;
  // The client is legal: it appends, stays within the capacity, asks CanResume,
  // and drops a sequence after an error. The cache must never refuse its
  // batches.
  bool legal = false;
  // K and V come with gaps between their elements.
  bool strided = false;
  // The id of the sequence that operations call 0, and how far the ids of two
  // successive sequences are apart.
  int first_id = 0;
  int id_step = 1;
  // The soft cap of a cache that computes attention, 0 for none, and whether
  // each of its query heads has a sink.
  int soft_cap = 0;
  bool sinks = false;
  // How many query heads share a KV head there; 0: QueriesPerKvHead chooses.
  int group = 0;

  DType v_dtype() const { return config.v_dtype.value_or(init.dtype); }
  // Returns the id of the sequence that operations call `seq`: at most the
  // largest int.
  int IdOf(int seq) const;
  // Returns what operations call the sequence with this id.
  int NameOf(int id) const;
};

// The most query heads that share a KV head.
inline constexpr int kGroupMax = 128;
// The most layers of a line.
inline constexpr int kLayersMax = 128;

// Makes the setup valid for its storage. Rows in blocks need whole blocks:
// widens the heads, and makes V plain. Tiled V needs whole tiles: raises the
// padding.
void FitStorage(Setup& setup);

// A position: `offset`, or `offset` from the sequence's next position.
struct RelativePos {
  bool from_end = false;
  int offset = 0;
  bool operator==(const RelativePos&) const = default;
};

// Batch tokens of one sequence.
struct Segment {
  enum class Order { kUp, kDown, kSame };  // The order of the positions.
  int seq = 0;
  // The number of tokens. A count near kFree means as many tokens as there are
  // free cells, plus count - kFree.
  int count = 1;
  int delta = 0;  // The first position minus the next position of the sequence.
  Order order = Order::kUp;
  int more = 0;  // Sequences after `seq` that also get `count` tokens each.
  // If not empty, the tokens are drafts, at the positions after their parents.
  // Token i follows the committed tokens if parents[i] is -1, else the draft
  // with this number, modulo the drafts that there are; tokens beyond the list
  // follow the token before them.
  std::vector<int> parents = {};

  static constexpr int kFree = 1 << 22;
  static constexpr int kMost = 1 << 20;
};
// The most sequences that one segment, or one copy, may name.
inline constexpr int kMostSequences = 4096;

enum class OpKind {
  kPut,     // A pass: StartForward, then Put and Get of every layer.
  kDrop,    // Remove.
  kCopy,    // CopyPrefix.
  kAsk,     // CanResume.
  kCausal,  // SetCausal in the current pass, then Get of every layer.
  kGet,     // Get of every layer, once more.
  kReput,   // Put of other rows in the current pass, after any call.
  kMisuse,  // One of the calls that must be refused and change nothing.
  kPoison,  // Overwrites the rows of free cells, without the cache knowing.
  kReload,  // Snapshot, then Restore, in place and into new caches.
  kShift,   // Shift, which our twins do not have: drawn only on demand.
  // Each of these is a single call, at any time.
  kLayer,     // SetLayer.
  kType,      // SetLayerType.
  kCached,    // EncoderCached.
  kSnapshot,  // Snapshot, and SnapshotOf a sequence.
  kAdd,       // SnapshotOf a sequence, and AddSequence of it as another one.
  kCommit,    // Commit of some drafts of a sequence.
  kPin,       // Checkpoint.
  kFind,      // FindPrefix of a backend.
};

struct Op {
  OpKind kind = OpKind::kPut;
  // kPut
  std::vector<Segment> segments;
  bool reserve = false;
  bool keep_rows = false;  // No Put: rows of earlier owners stay.
  // kPut: if not -1, the pass is given up after the Put of `stop` layers: the
  // client removes its tokens before any operation except kFind.
  int stop = -1;
  // kPut: a legal client makes the last segment longer than the rest of the
  // capacity of its sequence, for backends that declare CAN_REFUSE_FULL.
  bool overfull = false;
  // kPut, kCausal, kGet, kReput: one call instead of several. "start":
  // StartForward without Put. "except": SetCausal of the active cache. "read",
  // "store": Get and Put of the current layer in the active cache.
  bool single = false;
  // kPut: batch entries that are images; kPut and kCausal: entries excepted
  // from the causal mask. All are taken modulo the batch.
  std::vector<int> images;
  std::vector<int> except;
  // kDrop (seq, begin, end), kCopy (seq to dst and `more` after it, end), kAsk
  // (seq, end), kShift (seq, begin, end, delta), kSnapshot (seq), kPin (seq),
  // kAdd (seq as dst)
  int seq = 0;
  int dst = 0;
  int more = 0;
  RelativePos begin;
  RelativePos end;
  bool open = false;
  int delta = 0;
  int misuse = 0;  // kMisuse: the misuse, modulo their number.
  // kLayer: the layer; kType: the cache of a wrapper. Both modulo their number.
  int number = 0;
  // kCommit (seq): from the committed tokens on, which child comes next, modulo
  // the number of children. Choices beyond the end of a path are ignored.
  std::vector<int> path = {};
  // kFind (seq): the ids of a prompt.
  std::vector<int> ids = {};
};

struct History {
  Setup setup;
  std::vector<Op> ops;
};

// Whether the cache, or a cache of a wrapper, has a window.
bool HasWindow(const CacheSpec& spec);
// Whether a removal changes K rows.
bool Shifts(const CacheSpec& spec);
// Makes each cache as small as `cells_max` cells, or nearly.
void LimitCells(int cells_max, Setup& setup);
// Sets the sizes for a cache of `cells` cells: one sequence of that capacity.
// The batch is as large, or what a bounded memory leaves (docs/histories.md).
void SetCells(int cells, Setup& setup);
// Returns why a cache of this setup does not have one sequence and as many
// cells as its capacity; empty if it has.
std::string WhyNotOfCells(const Setup& setup);
// Returns why no line has a cache of these sizes; empty if lines have it.
std::string WhyTooLarge(const Setup& setup);

// Returns the custom shift function of lines: shift=custom. A new element
// depends on the next one and on all arguments; shifting by a, then by b,
// differs from shifting by a + b. Answers invalid_argument if the size of the
// row is not that of its dimensions.
Shift CustomShift();
// Replaces each tag_add and rope, also in the caches of a wrapper, by
// CustomShift.
void UseCustomShift(CacheSpec& spec);
// Returns the name of a shift function in lines.
std::string_view ShiftName(ShiftKind kind);

// Returns the kinds other than causal: "swa", or "wrapper", "encoder", "swa".
std::vector<std::string> KindNames(const History& history);

// Whether the first operation opens a sequence, whichever operation it is.
inline bool FirstOperationOpens(const History&) { return false; }

std::string ToText(const Setup& setup);
std::string ToText(const Op& op);
std::string ToText(const History& history);

// Returns the history that ToText wrote, or why `text` is not a history.
Result<History> ParseHistory(std::string_view text);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_HISTORY_H_
