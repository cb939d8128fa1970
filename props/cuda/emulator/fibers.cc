#include "props/cuda/emulator/fibers.h"

#include <boost/context/preallocated.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <memory>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#define KVTWIN_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define KVTWIN_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVTWIN_ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define KVTWIN_THREAD_SANITIZER 1
#endif
#endif
#ifdef KVTWIN_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef KVTWIN_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace kvtwin::emulator {
namespace {

namespace context = boost::context;

// The stack of a kernel's thread: as much as a device gives a thread, and the
// same again for unoptimized builds. An inaccessible page lies below it.
constexpr std::size_t kStackBytes = 256 << 10;
// The used part of a stack is its end. The ends are not all a multiple of the
// page size apart, as a processor's caches hold only a few lines at such
// distances.
constexpr std::size_t kSkipBytes = 320;
constexpr std::size_t kSkips = 13;

// The fiber that was left; the fiber that is switched to reads it.
Fiber* left_fiber = nullptr;

}  // namespace

Fiber::Fiber(void (*code)(Fiber&)) {
  context::protected_fixedsize_stack stacks(kStackBytes);
  const context::stack_context stack = stacks.allocate();
  static std::size_t made = 0;
  const std::size_t skipped = made++ % kSkips * kSkipBytes;
  bytes_ = stack.size - skipped;
  bottom_ = static_cast<std::byte*>(stack.sp) - stack.size;
#ifdef KVTWIN_THREAD_SANITIZER
  sanitizer_ = __tsan_create_fiber(0);
#endif
  rest_ = context::fiber(
      std::allocator_arg,
      context::preallocated(static_cast<std::byte*>(stack.sp) - skipped, bytes_,
                            stack),
      stacks, [this, code](context::fiber&& left) {
        Arrive(std::move(left));
        code(*this);
        return context::fiber();
      });
}

void Fiber::Switch(Fiber& from, Fiber& to) {
  left_fiber = &from;
#ifdef KVTWIN_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&from.sanitizer_, to.bottom_, to.bytes_);
#endif
#ifdef KVTWIN_THREAD_SANITIZER
  from.sanitizer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.sanitizer_, 0);
#endif
  from.Arrive(std::move(to.rest_).resume());
}

// `left`: the rest of the fiber that was running before the switch.
void Fiber::Arrive(context::fiber&& left) {
#ifdef KVTWIN_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(sanitizer_, &left_fiber->bottom_,
                                  &left_fiber->bytes_);
#endif
  left_fiber->rest_ = std::move(left);
}

}  // namespace kvtwin::emulator
