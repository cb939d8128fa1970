#include "props/base/program.h"

namespace kvtwin::props {
namespace {

std::string program = "kvtwin";

}  // namespace

void SetProgram(std::string_view name) { program = name; }

const std::string& Program() { return program; }

std::string ShellWord(std::string_view text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-+:,@";
  if (!text.empty() && text.find_first_not_of(kPlain) == text.npos) {
    return std::string(text);
  }
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

std::string CommandLine(std::string_view arguments) {
  return ShellWord(program) + " " + std::string(arguments);
}

}  // namespace kvtwin::props
