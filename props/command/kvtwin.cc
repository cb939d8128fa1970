// The command `kvtwin`. A build without tests has no museum, which needs the
// build folder and the sources.

#include "props/command/command.h"

int main(int argc, char** argv) {
  kvtwin::props::AddCommand museum = nullptr;
#ifdef KVTWIN_MUSEUM
  museum = kvtwin::props::AddMuseumCommand;
#endif
  return kvtwin::props::RunCommandLine(argc, argv, museum);
}
