// SIGINT and SIGTERM: the first asks long work to stop, which then cleans up
// and tells how far it came; the second ends the process at once.

#ifndef KVTWIN_PROPS_BASE_INTERRUPT_H_
#define KVTWIN_PROPS_BASE_INTERRUPT_H_

namespace kvtwin::props {

// From now on. Until then both signals end the process.
void CatchInterrupts();

// From any thread.
bool Interrupted();

// As a shell has it of a process that a signal ended: 130 of SIGINT, 143 of
// SIGTERM. Without a signal, `exit_code`.
int ExitCodeAfter(int exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_INTERRUPT_H_
