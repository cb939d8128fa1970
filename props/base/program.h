// The command lines that show a failure again.

#ifndef KVTWIN_PROPS_BASE_PROGRAM_H_
#define KVTWIN_PROPS_BASE_PROGRAM_H_

#include <string>
#include <string_view>

namespace kvtwin::props {

// `kvtwin` as it was called: argv[0]. Until this is known it is "kvtwin".
// Requires: no other thread is there yet.
void SetProgram(std::string_view program);
const std::string& Program();

// Returns the text as a word of a shell command, quoted where it must be.
std::string ShellWord(std::string_view text);

// "build/kvtwin run 'kvt1 ...'", as a shell takes it where kvtwin was called.
std::string CommandLine(std::string_view arguments);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_PROGRAM_H_
