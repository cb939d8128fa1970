#include "props/base/interrupt.h"

#include <atomic>
#include <csignal>

namespace kvtwin::props {
namespace {

std::atomic<int> caught = 0;
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void OnInterrupt(int signal) {
  caught = signal;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    // A job in the background ignores SIGINT already, and continues to.
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
}

bool Interrupted() { return caught != 0; }

int ExitCodeAfter(int exit_code) {
  return Interrupted() ? 128 + caught : exit_code;
}

}  // namespace kvtwin::props
