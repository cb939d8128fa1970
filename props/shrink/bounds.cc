#include "props/shrink/bounds.h"

#include <set>

namespace kvtwin::props {

bool Bounds::Allow(const Setup& setup) const {
  return (!kind || setup.spec.kind == *kind) && WhyTooLarge(setup).empty() &&
         (!abilities || abilities->Fits(setup));
}

bool Bounds::Allow(const Op& op, bool legal) const {
  const Abilities able = abilities.value_or(Abilities());
  const bool goes_on = able.OnlyGoesOn();
  if (IsCall(op) && goes_on) return false;
  switch (op.kind) {
    case OpKind::kPut: {
      std::set<int> sequences;
      for (const Segment& segment : op.segments) {
        const bool is_new = sequences.insert(segment.seq).second;
        const bool plain = is_new && segment.delta == 0 &&
                           segment.order == Segment::Order::kUp;
        if (legal && !plain && !(op.reserve && is_new)) return false;
      }
      return (sequences.size() < 2 || able.Can(KVTWIN_CAN_MIX)) &&
             (!op.reserve || able.Can(KVTWIN_CAN_RESERVE)) &&
             (!op.overfull || (legal && able.Can(KVTWIN_CAN_REFUSE_FULL))) &&
             (op.except.empty() || able.set_causal) &&
             (able.CanDraft() ||
              std::ranges::all_of(op.segments,
                                  [](const Segment& segment) {
                                    return segment.parents.empty();
                                  })) &&
             !(op.keep_rows && goes_on);
    }
    case OpKind::kDrop:
      return able.Can(op.open ? KVTWIN_CAN_REMOVE_TAIL
                              : KVTWIN_CAN_REMOVE_MIDDLE);
    case OpKind::kCopy:
      return able.Can(KVTWIN_CAN_COPY_PREFIX) &&
             !(op.seq == op.dst && able.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF));
    case OpKind::kAsk:
      return able.can_resume;
    case OpKind::kCausal:
      return able.set_causal;
    case OpKind::kReput:
      return !goes_on;
    case OpKind::kReload:
    case OpKind::kSnapshot:
      return able.snapshots;
    case OpKind::kAdd:
      return able.snapshots && !legal;
    case OpKind::kCommit:
      return able.CanDraft();
    case OpKind::kPin:
      return able.Can(KVTWIN_CAN_PIN);
    case OpKind::kFind:
      return legal && able.Can(KVTWIN_CAN_FIND_PREFIX);
    default:
      return true;
  }
}

}  // namespace kvtwin::props
