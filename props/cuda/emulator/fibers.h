// Pieces of code that take turns on one host thread, each with its own stack.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_

#include <boost/context/fiber.hpp>
#include <cstddef>

namespace kvtwin::emulator {

class Fiber {
 public:
  // Represents the calling code, which already has a stack.
  Fiber() = default;
  // Runs `code`, which never returns and gets this fiber as its argument. It
  // begins at the first switch to this fiber.
  explicit Fiber(void (*code)(Fiber&));
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Continues with `to`; returns when something switches back to `from`, the
  // running fiber. Another thread may continue a fiber that was left.
  static void Switch(Fiber& from, Fiber& to);

 private:
  void Arrive(boost::context::fiber&& left);

  boost::context::fiber rest_;  // Resumed by a switch to this fiber.
  // The sanitizers have to be told about each switch.
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  [[maybe_unused]] void* sanitizer_ = nullptr;
};

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_
