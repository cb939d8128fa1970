#include "props/program.h"

#include "props/page.h"

namespace kvtwin::props {
namespace {

std::string program = "kvtwin";

}  // namespace

void SetProgram(std::string_view name) { program = name; }

const std::string& Program() { return program; }

std::string CommandLine(std::string_view arguments) {
  return ShellWord(program) + " " + std::string(arguments);
}

}  // namespace kvtwin::props
