// Pieces of code that run by turns on one thread of the host, each on a stack
// of its own.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_

#include <boost/context/fiber.hpp>
#include <cstddef>

namespace kvtwin::emulator {

class Fiber {
 public:
  // What calls: it has a stack already.
  Fiber() = default;
  // Of code that never returns, and is given this. It does not begin before the
  // first switch.
  explicit Fiber(void (*code)(Fiber&));
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Goes on with `to`; returns when something switches back to `from`, which is
  // what runs. One that was left may be gone on with by another thread.
  static void Switch(Fiber& from, Fiber& to);

 private:
  void Arrive(boost::context::fiber&& left);

  boost::context::fiber rest_;  // What it does when it is switched to.
  // For the sanitizers, which have to be told.
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  [[maybe_unused]] void* sanitizer_ = nullptr;
};

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_FIBERS_H_
