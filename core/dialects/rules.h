// The rules by which correct caches differ from each other.

#ifndef KVTWIN_CORE_DIALECTS_RULES_H_
#define KVTWIN_CORE_DIALECTS_RULES_H_

namespace kvtwin {

// The first value of each is ours (docs/semantics.md). Which program follows
// which, and where that is written, is in docs/profiles.md.
struct Rules {
  // A window of w: the w positions before the query and its own, or w with it.
  enum class Window { kBeforeQuery, kWithQuery };
  // CopyPrefix to a sequence that has tokens.
  enum class Copy { kReplaces, kAdds };
  // Later tokens after a Remove from the middle move down; stay where they are
  // until they are shifted; or there is no such Remove.
  enum class Middle { kShifts, kLeavesGap, kRefused };
  // Which positions a batch may have: any; only the next one, unless the
  // sequence is empty; or any up to the next one, and the tokens of the
  // sequence from there on leave.
  enum class Positions { kAny, kContinue, kOverwrite };
  // Tokens beyond the memory leave with the next batch, or when room is needed:
  // until then a row may see them or not.
  enum class Eviction { kEager, kLazy };
  // A sequence can go back as far as its tokens are stored; or not at all, once
  // it is longer than the window.
  enum class Back { kWhileStored, kUntilFull };
  // The first tokens of a sequence leave like others; or kFirst of them stay,
  // as many as the window has room for, and the window, which is the memory,
  // counts tokens that are there, not positions.
  enum class First { kLeave, kStay };
  // A call that moves a token of several sequences is refused, or moves it for
  // all of them.
  enum class SharedShift { kRefused, kMovesAll };
  // The mask has rows up to the mask batch padding, or one for each token.
  enum class MaskRows { kPadded, kBatch };

  static constexpr int kFirst = 4;

  Window window = Window::kBeforeQuery;
  Copy copy = Copy::kReplaces;
  Middle middle = Middle::kShifts;
  Positions positions = Positions::kAny;
  Eviction eviction = Eviction::kEager;
  Back back = Back::kWhileStored;
  First first = First::kLeave;
  SharedShift shared_shift = SharedShift::kRefused;
  MaskRows mask_rows = MaskRows::kPadded;

  bool operator==(const Rules&) const = default;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DIALECTS_RULES_H_
