// The museum: real bugs of public KV caches, each a patch to our own sources
// (props/museum/*.patch). Every one is built into a copy of the command, which
// then has to find it.

#ifndef KVTWIN_PROPS_SEARCH_MUSEUM_H_
#define KVTWIN_PROPS_SEARCH_MUSEUM_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "kvtwin/status.h"

namespace kvtwin::props {

// A patch and what its header says.
struct Exhibit {
  std::filesystem::path patch;
  std::string id;         // "X01", as in the file's name.
  std::string also;       // Other names of the same bug, "H11", or none.
  std::string reference;  // Where it was public.
  std::string wrong;      // What went wrong, in one line.
  std::string operation;  // Which operation does it.
  std::string needs;      // "fast paths" if it is in one of these, or none.
  std::string kind;       // "paged" if that kind of cache has it, or none.
  std::string twin;       // The only one that has it, or none.
};

// The exhibits in a folder of patches, by id; or what is wrong with one.
Result<std::vector<Exhibit>> ReadExhibits(const std::filesystem::path& folder);

// The finding of one seed: a difference, or a history in which the twin
// crashes.
struct Catch {
  std::int64_t operations = 0;  // 0 if it crashed: nobody could say.
  double seconds = 0;
  std::int64_t shrunk_to = 0;
  std::string check;
  std::string history;
};

struct ExhibitReport {
  Exhibit exhibit;
  std::string error;           // It could not be tried, or a crash is not its.
  std::vector<Catch> catches;  // One for each seed that found it.
};

// What bugs are built into.
enum class Planted {
  kCommand,
  kLibrary,  // The shared one, for the optimized twin as a backend
             // (props/testing/twin_backend.c).
  kCuda,     // The command with the twin cuda, on the emulator.
};

// Where the command was built: what is not changed by a patch is taken from
// there.
struct Workshop {
  struct Object {
    std::string name;     // As a link has it.
    std::string compile;  // The command, but for that.
    std::filesystem::path source;
  };

  std::filesystem::path sources;
  std::filesystem::path build;
  std::vector<Object> objects;
  std::string link;
  std::string linked;  // "kvtwin", as the link names it.
  Planted planted = Planted::kCommand;
};

// Or why that folder is none.
Result<Workshop> FindWorkshop(const std::filesystem::path& build,
                              Planted planted);

struct MuseumOptions {
  int seeds = 20;
  double seconds = 5;  // For each seed.
  int threads = 1;
  bool apply_only = false;  // Whether the patches apply, and no more.
  // Called before each exhibit, from any thread but never at once.
  std::function<void(std::size_t done, const Exhibit& next)> progress;
};

// In the order of the exhibits. Interrupted, those that were seen by then.
std::vector<ExhibitReport> VisitMuseum(const Workshop& workshop,
                                       const std::vector<Exhibit>& exhibits,
                                       const MuseumOptions& options);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_MUSEUM_H_
