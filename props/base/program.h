// The program: its version, and command lines that reproduce a failure.

#ifndef KVTWIN_PROPS_BASE_PROGRAM_H_
#define KVTWIN_PROPS_BASE_PROGRAM_H_

#include <string>
#include <string_view>

namespace kvtwin::props {

// The version in CMakeLists.txt, which a test compares.
inline constexpr std::string_view kVersion = "0.1.0";

// `kvtwin` as the user called it: argv[0]. Before SetProgram it is "kvtwin".
// Requires: no other thread runs yet.
void SetProgram(std::string_view program);
const std::string& Program();

// Returns the text as a word of a shell command, quoted where it must be.
std::string ShellWord(std::string_view text);

// Returns "build/kvtwin run 'kvt1 ...'": a command to run in the folder where
// kvtwin ran.
std::string CommandLine(std::string_view arguments);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_PROGRAM_H_
