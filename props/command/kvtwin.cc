// The command `kvtwin`.

#include "props/command/command.h"

int main(int argc, char** argv) {
  return kvtwin::props::RunCommandLine(argc, argv);
}
