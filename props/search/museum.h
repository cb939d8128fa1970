// The museum: real bugs of public KV caches, each a patch to kvtwin's sources
// (props/museum/*.patch). Each bug is built into a copy of the command, which
// must find it.

#ifndef KVTWIN_PROPS_SEARCH_MUSEUM_H_
#define KVTWIN_PROPS_SEARCH_MUSEUM_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvtwin/status.h"
#include "props/compare/failure.h"
#include "props/page_judge/page_token.h"

namespace kvtwin::props {

// A patch and the fields of its header.
struct Exhibit {
  std::filesystem::path patch;
  std::string id;         // "X01", as in the file's name.
  std::string also;       // Other names of the same bug, "H11", or none.
  std::string reference;  // Where the bug was public.
  std::string wrong;      // The wrong behaviour, in one line.
  std::string operation;  // The operation that has the bug.
  std::string needs;      // "fast paths" if the bug is in one, or "".
  std::string kind;       // The kind of cache that has it, or "".
  std::string speculate;  // "yes" if drafts show the bug, or "".
  std::string level;      // The level that shows the bug, or "": identity.
  std::string twin;       // The only twin that has the bug, or "".
};

// Returns the exhibits in a folder of patches, by id. Errors: a patch whose
// header is incomplete; no patches.
Result<std::vector<Exhibit>> ReadExhibits(const std::filesystem::path& folder);

// The finding of one seed: a difference, or a history in which the twin
// crashes.
struct Catch {
  std::int64_t operations = 0;  // 0 if it crashed: unknown.
  double seconds = 0;
  Failure failure = {};  // Its check, and its shortest history.
  // The judge's verdict on the failure's page, if it was asked for; a twin that
  // crashes has no page.
  std::optional<PageVerdict> page = {};
};

struct ExhibitReport {
  Exhibit exhibit;
  std::string error;           // Why not tried, or a crash not counted.
  std::vector<Catch> catches;  // One for each seed that found the bug.
};

// The program or library that bugs are built into.
enum class Planted {
  kCommand,
  kLibrary,  // The shared one, for the optimized twin as a backend
             // (props/testing/twin_backend.c).
  kCuda,     // The command with the twin cuda, on the emulator.
};

// A build folder, from which the objects that a patch does not change are
// taken.
struct Workshop {
  struct Object {
    std::string name;     // As in the link command.
    std::string compile;  // The command without -o and the name.
    std::filesystem::path source;
  };

  std::filesystem::path sources;
  std::filesystem::path build;
  std::vector<Object> objects;
  std::string link;
  std::string linked;  // "kvtwin", as in the link command.
  Planted planted = Planted::kCommand;
};

// Errors: kvtwin was not built in that folder.
Result<Workshop> FindWorkshop(const std::filesystem::path& build,
                              Planted planted);

struct MuseumOptions {
  int seeds = 20;
  double seconds = 5;  // For each seed.
  int threads = 1;
  bool apply_only = false;  // Only check that the patches apply.
  bool pages = false;       // Judge the page of each failure.
  // Called before each exhibit, from any thread, one call at a time.
  std::function<void(std::size_t done, const Exhibit& next)> progress;
};

// Returns a report for each exhibit, in their order. If interrupted, returns
// the reports that were complete by then.
std::vector<ExhibitReport> VisitMuseum(const Workshop& workshop,
                                       const std::vector<Exhibit>& exhibits,
                                       const MuseumOptions& options);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_MUSEUM_H_
