// The abilities of a backend. Histories leave out whatever it cannot do.

#ifndef KVTWIN_PROPS_HISTORY_ABILITIES_H_
#define KVTWIN_PROPS_HISTORY_ABILITIES_H_

#include <cstdint>

#include "kvtwin/kvtwin.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The bits are those of include/kvtwin/kvtwin.h. The default is every ability
// of our twins.
struct Abilities {
  std::uint32_t kinds = ~0U;
  std::uint32_t can = ~0U;
  std::uint32_t dtypes = ~0U;
  std::uint32_t v_layouts = ~0U;
  std::uint32_t shifts = ~0U;
  std::uint32_t mask_dtypes = ~0U;
  std::uint32_t placements = ~0U;
  std::uint32_t cannot = 0;
  int max_sequences = 0;  // 0: any number, as in the next two.
  int max_layers = 0;
  int max_padding = 0;
  int max_mask_padding = 0;       // 0: the same as max_padding.
  std::int32_t max_position = 0;  // The largest position of a token; 0: any.
  bool can_resume = true;
  bool set_causal = true;
  bool shift = true;
  bool snapshots = true;

  bool Can(std::uint32_t bit) const { return (can & bit) != 0; }
  bool Cannot(std::uint32_t bit) const { return (cannot & bit) != 0; }
  std::int32_t LastPosition() const {
    return max_position > 0 ? max_position : KVTWIN_OPEN_END;
  }
  // The largest end of a range of positions.
  std::int32_t LastEnd() const {
    return max_position > 0 && max_position < KVTWIN_OPEN_END ? max_position + 1
                                                              : KVTWIN_OPEN_END;
  }
  // Whether every batch must continue where its sequence ends, within its
  // capacity.
  bool OnlyGoesOn() const { return !Can(KVTWIN_CAN_ANY_ORDER); }

  bool HasKind(Kind kind) const {
    return (kinds >> static_cast<unsigned>(kind) & 1U) != 0;
  }

  // Changes `setup` to the nearest one that the backend supports.
  void Fit(Setup& setup) const;
  // Whether Fit would change nothing.
  bool Fits(const Setup& setup) const;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_ABILITIES_H_
