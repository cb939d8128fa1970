// The subcommands of `kvtwin`. Each function adds its subcommand to the command
// line. When it runs, the subcommand sets the exit code: 0 success, 1 a
// difference, 2 bad input.

#ifndef KVTWIN_PROPS_COMMAND_COMMAND_H_
#define KVTWIN_PROPS_COMMAND_COMMAND_H_

namespace CLI {
class App;
}

namespace kvtwin::props {

// Adds a subcommand to the command line.
using AddCommand = void (*)(CLI::App& app, int& exit_code);

// Runs the whole command, with one subcommand more unless it is null, and
// returns its exit code.
int RunCommandLine(int argc, char** argv, AddCommand more);

void AddFuzzCommand(CLI::App& app, int& exit_code);
void AddGenCommand(CLI::App& app, int& exit_code);
void AddLawsCommand(CLI::App& app, int& exit_code);
void AddMuseumCommand(CLI::App& app, int& exit_code);
void AddExploreCommand(CLI::App& app, int& exit_code);
void AddStateCommand(CLI::App& app, int& exit_code);
void AddShrinkCommand(CLI::App& app, int& exit_code);
void AddBisectCommand(CLI::App& app, int& exit_code);
void AddCertifyCommand(CLI::App& app, int& exit_code);
void AddProfileCommand(CLI::App& app, int& exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_COMMAND_H_
