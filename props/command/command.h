// The subcommands of `kvtwin`. Each function adds its subcommand to the command
// line. When it runs, the subcommand sets the exit code: 0 success, 1 a
// difference, 2 bad input.

#ifndef KVTWIN_PROPS_COMMAND_COMMAND_H_
#define KVTWIN_PROPS_COMMAND_COMMAND_H_

namespace CLI {
class App;
}

namespace kvtwin::props {

// Runs the whole command, and returns its exit code.
int RunCommandLine(int argc, char** argv);

void AddFuzzCommand(CLI::App& app, int& exit_code);
void AddGenCommand(CLI::App& app, int& exit_code);
void AddLawsCommand(CLI::App& app, int& exit_code);
void AddMuseumCommand(CLI::App& app, int& exit_code);
void AddExploreCommand(CLI::App& app, int& exit_code);
void AddStateCommand(CLI::App& app, int& exit_code);
void AddShrinkCommand(CLI::App& app, int& exit_code);
void AddProfileCommand(CLI::App& app, int& exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_COMMAND_H_
