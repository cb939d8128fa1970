// The rules by which correct caches differ from each other.

#ifndef KVTWIN_CORE_DIALECTS_RULES_H_
#define KVTWIN_CORE_DIALECTS_RULES_H_

namespace kvtwin {

// The first value of each rule is kvtwin's (docs/semantics.md).
// docs/profiles.md says which program follows which value, with sources.
struct Rules {
  // A window of w is the w positions before the query and its own position, or
  // w positions including its own.
  enum class Window { kBeforeQuery, kWithQuery };
  // CopyPrefix to a sequence that has tokens replaces them, or adds to them.
  enum class Copy { kReplaces, kAdds };
  // After a Remove from the middle, later tokens move down, or stay where they
  // are until they are shifted; or such a Remove is refused.
  enum class Middle { kShifts, kLeavesGap, kRefused };
  // The positions that a batch may have: any; only the next one, unless the
  // sequence is empty; or any up to the next one, and the sequence's tokens
  // from that position on leave.
  enum class Positions { kAny, kContinue, kOverwrite };
  // Tokens beyond the memory leave with the next batch, or when their cells are
  // needed: until then a row may or may not see them.
  enum class Eviction { kEager, kLazy };
  // A sequence can go back as far as its tokens are stored; or only until it is
  // longer than the window.
  enum class Back { kWhileStored, kUntilFull };
  // The first tokens of a sequence leave like others; or the first kFirst stay,
  // or as many as the window has room for. Then the window is the memory too,
  // and counts stored tokens instead of positions.
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

// Whether the rules are kvtwin's, whatever number of rows a mask has.
inline bool AreOurs(const Rules& rules) {
  return rules == Rules{.mask_rows = rules.mask_rows};
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DIALECTS_RULES_H_
