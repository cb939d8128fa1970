// Reports of a process that crashes: how to run its history again, and the name
// of the signal.

#ifndef KVTWIN_PROPS_BASE_CRASH_H_
#define KVTWIN_PROPS_BASE_CRASH_H_

#include <functional>
#include <string>

namespace kvtwin::props {

// Returns "SEGV" for SIGSEGV, or "34" for a signal without a name.
std::string ShortSignalName(int signal);

// From now on a crash (a failed assertion, a bad address) prints the command
// that runs the current history again, as it is, before the process dies.
void ReportCrashes();

// While an object lives, this thread is running the history whose command
// `rerun` returns. After ReportCrashes, a crash prints that command. If a
// thread has several objects, the last one counts.
class CrashReport {
 public:
  explicit CrashReport(std::function<std::string()> rerun);
  ~CrashReport();
  CrashReport(const CrashReport&) = delete;
  CrashReport& operator=(const CrashReport&) = delete;

  const std::function<std::string()>& rerun() const { return rerun_; }

 private:
  std::function<std::string()> rerun_;
  const CrashReport* before_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_CRASH_H_
