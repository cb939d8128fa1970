// The rules by which caches that are right differ from each other.

#ifndef KVTWIN_CORE_RULES_H_
#define KVTWIN_CORE_RULES_H_

namespace kvtwin {

// The first value of each is ours (docs/semantics.md).
struct Rules {
  // A window of w: the w positions before the query and its own, or w with it.
  enum class Window { kBeforeQuery, kWithQuery };
  // CopyPrefix to a sequence that has tokens.
  enum class Copy { kReplaces, kAdds };
  // Later tokens after a Remove from the middle move down; stay where they are
  // until they are shifted; or there is no such Remove.
  enum class Middle { kShifts, kLeavesGap, kRefused };
  // A batch goes on anywhere; at the next position only; or anywhere, and what
  // was at its positions is replaced.
  enum class Positions { kAny, kContinue, kOverwrite };
  // Tokens beyond the memory leave with the next batch, or when room is needed.
  enum class Eviction { kEager, kLazy };
  // What moves a token that other sequences have too is refused, or moves it
  // for all of them.
  enum class SharedShift { kRefused, kMovesAll };
  // The mask has rows up to the mask batch padding, or as many as the batch.
  enum class MaskRows { kPadded, kBatch };

  Window window = Window::kBeforeQuery;
  Copy copy = Copy::kReplaces;
  Middle middle = Middle::kShifts;
  Positions positions = Positions::kAny;
  Eviction eviction = Eviction::kEager;
  SharedShift shared_shift = SharedShift::kRefused;
  MaskRows mask_rows = MaskRows::kPadded;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_RULES_H_
