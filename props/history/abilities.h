// What a backend can be asked for. What it cannot is left out of histories.

#ifndef KVTWIN_PROPS_HISTORY_ABILITIES_H_
#define KVTWIN_PROPS_HISTORY_ABILITIES_H_

#include <cstdint>

#include "kvtwin/kvtwin.h"
#include "props/history/history.h"

namespace kvtwin::props {

// In the bits of include/kvtwin/kvtwin.h. By default, all that our twins can.
struct Abilities {
  std::uint32_t kinds = ~0U;
  std::uint32_t can = ~0U;
  std::uint32_t dtypes = ~0U;
  std::uint32_t v_layouts = ~0U;
  std::uint32_t shifts = ~0U;
  std::uint32_t mask_dtypes = ~0U;
  std::uint32_t placements = ~0U;
  std::uint32_t cannot = 0;
  int max_sequences = 0;  // 0: any number. The next two, too.
  int max_layers = 0;
  int max_padding = 0;
  int max_mask_padding = 0;       // 0: as max_padding.
  std::int32_t max_position = 0;  // Of a token; 0: any.
  bool can_resume = true;
  bool set_causal = true;
  bool shift = true;
  bool snapshots = true;

  bool Can(std::uint32_t bit) const { return (can & bit) != 0; }
  bool Cannot(std::uint32_t bit) const { return (cannot & bit) != 0; }
  std::int32_t LastPosition() const {
    return max_position > 0 ? max_position : KVTWIN_OPEN_END;
  }
  // The end of a range of positions, at most.
  std::int32_t LastEnd() const {
    return max_position > 0 && max_position < KVTWIN_OPEN_END ? max_position + 1
                                                              : KVTWIN_OPEN_END;
  }
  // Only batches that go on where a sequence ends, within its capacity.
  bool OnlyGoesOn() const { return !Can(KVTWIN_CAN_ANY_ORDER); }

  bool HasKind(Kind kind) const {
    return (kinds >> static_cast<unsigned>(kind) & 1U) != 0;
  }

  // Makes of `setup` the nearest one that the backend may have.
  void Fit(Setup& setup) const;
  // Fit would change nothing.
  bool Fits(const Setup& setup) const;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_ABILITIES_H_
