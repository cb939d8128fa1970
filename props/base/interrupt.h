// SIGINT and SIGTERM: the first one asks long work to stop, clean up and report
// how far it came; the second one ends the process at once.

#ifndef KVTWIN_PROPS_BASE_INTERRUPT_H_
#define KVTWIN_PROPS_BASE_INTERRUPT_H_

namespace kvtwin::props {

// Handles both signals from now on. Until then they end the process.
void CatchInterrupts();

// Whether a signal has arrived. Any thread may call it.
bool Interrupted();

// Returns the exit code that a shell reports for a process that a signal ended:
// 130 for SIGINT, 143 for SIGTERM. Without a signal, returns `exit_code`.
int ExitCodeAfter(int exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_INTERRUPT_H_
