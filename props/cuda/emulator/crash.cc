// Reports which thread touched which memory before a fault ends the process.

#include <csignal>
#include <cstddef>
#include <cstdio>
#include <memory>

#include "props/cuda/emulator/internal.h"

namespace kvtwin::emulator {
namespace {

struct sigaction before;  // The handler that was installed before.

void Say(const void* address) {
  const Kernel* const kernel = RunningKernel();
  std::ptrdiff_t offset = 0;
  const Memory::Piece* const piece = TheDevice().memory.Near(address, &offset);
  if (kernel == nullptr && piece == nullptr) return;  // Not the emulator's.
  if (kernel != nullptr) {
    std::fprintf(stderr,
                 "emulator: block (%u, %u, %u), thread (%u, %u, %u) of %s\n",
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y,
                 threadIdx.z, NameOf(*kernel).c_str());
  } else {
    std::fprintf(stderr, "emulator: the host\n");
  }
  if (piece == nullptr) {
    std::fprintf(stderr,
                 "  touches %p, which is not the device's (or more of its "
                 "stack than it has)\n",
                 address);
    return;
  }
  std::fprintf(stderr, "  touches byte %td of %zu bytes of %s memory\n", offset,
               piece->bytes,
               piece->kind == Memory::Kind::kDevice ? "device" : "pinned");
}

// Say calls functions that are not safe in a signal handler. But the fault is
// in a kernel, or in code that used a wrong pointer, not in those functions.
void OnFault(int signal, siginfo_t* info, void* /*context*/) {
  sigaction(signal, &before, nullptr);
  Say(info->si_addr);
  // The fault occurs again and is handled as it would have been.
}

// A stack for the handler, because a kernel may have used up its own. Each host
// thread has one.
class SignalStack {
 public:
  SignalStack() {
    stack_t old = {};
    sigaltstack(nullptr, &old);
    if ((old.ss_flags & SS_DISABLE) == 0) return;
    bytes_ = std::make_unique<std::byte[]>(kBytes);
    stack_t stack = {};
    stack.ss_sp = bytes_.get();
    stack.ss_size = kBytes;
    sigaltstack(&stack, nullptr);
  }
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;
  ~SignalStack() {
    if (bytes_ == nullptr) return;
    stack_t none = {};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
  }

 private:
  static constexpr std::size_t kBytes = 64 << 10;
  std::unique_ptr<std::byte[]> bytes_;
};

}  // namespace

void ReportFaults() {
  static thread_local const SignalStack stack;
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &before) == 0;
  }();
  static_cast<void>(installed);
}

}  // namespace kvtwin::emulator
