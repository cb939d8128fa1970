#include "props/base/crash.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <utility>

namespace kvtwin::props {
namespace {

constexpr unsigned kSeconds = 10;

thread_local const CrashReport* last = nullptr;

// A signal handler may not do this, but the process is lost anyway: if it
// hangs, an alarm ends it.
void OnCrash(int signal) {
  std::signal(signal, SIG_DFL);
  std::signal(SIGALRM, SIG_DFL);
  alarm(kSeconds);
  if (last != nullptr) {
    fmt::print(stderr, "\ncrashed in\n  rerun   {}\n", last->rerun()());
  }
  std::raise(signal);
}

}  // namespace

std::string ShortSignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? std::to_string(signal) : name;
}

void ReportCrashes() {
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    std::signal(signal, OnCrash);
  }
}

CrashReport::CrashReport(std::function<std::string()> rerun)
    : rerun_(std::move(rerun)), before_(std::exchange(last, this)) {}

CrashReport::~CrashReport() { last = before_; }

}  // namespace kvtwin::props
