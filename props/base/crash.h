// The last words of a process that dies.

#ifndef KVTWIN_PROPS_BASE_CRASH_H_
#define KVTWIN_PROPS_BASE_CRASH_H_

#include <functional>
#include <string>

namespace kvtwin::props {

// From now on a crash (a failed assertion, a bad address) prints the command
// that runs its history again, as it is, before the process dies.
void ReportCrashes();

// While it lives, this thread is running what `rerun` gives the command of:
// that is printed if it crashes, after ReportCrashes. Of
// several, the last one counts.
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
