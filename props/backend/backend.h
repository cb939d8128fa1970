// A third-party cache behind the table of include/kvtwin/kvtwin.h.

#ifndef KVTWIN_PROPS_BACKEND_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_BACKEND_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"
#include "props/compare/runner.h"
#include "props/history/abilities.h"

namespace kvtwin::props {

// A backend's description of itself.
struct BackendInfo {
  kvtwin_backend_v1 table = {};  // Functions of newer tables may be null.
  std::string name;
  std::string profile;  // As the backend names it.
  Rules rules;          // The rules of the profile.
  Level claims = Level::kVisibility;
  Abilities abilities;
  double tolerance = 0.01;
  bool has_cells = false;          // Required for identity.
  std::vector<std::string> lacks;  // The functions that the table lacks.
};

// Reads the description of a backend. Errors: a table that is too small or
// lacks a function; an invalid description.
Result<BackendInfo> DescribeBackend(const kvtwin_backend_v1* table);

// Replaces the profile that the backend names by `profile`, unless that is
// empty. Requires: ParseRules can parse it.
void UseProfile(const std::string& profile, BackendInfo& info);

// Watches what a backend does to memory; see props/backend/host/.
class MemoryWatch {
 public:
  virtual ~MemoryWatch() = default;
  // Enclose each call of `function`. Memory allocated in between belongs to the
  // backend.
  virtual void Enter(const char* function) = 0;
  virtual void Leave() = 0;
  // Returns what is wrong with the backend's memory, if anything.
  virtual std::optional<std::string> Damage() = 0;
  // Returns the number of bytes from `data` to the end of its buffer; nullopt
  // if the buffer is unknown.
  virtual std::optional<std::size_t> BytesFrom(const void* data) = 0;
};

// Returns the rules of a level: those of the backend's profile; at identity,
// which compares with the reference twin, kvtwin's own rules, except for the
// number of mask rows.
Rules RulesAt(const BackendInfo& info, Level level);

// Returns the backend's caches as a subject, at a level. `arguments` name the
// backend on the command line. Requires: `watch`, if given, outlives the
// subject.
Subject BackendSubject(const BackendInfo& info, Level level,
                       std::string arguments, MemoryWatch* watch = nullptr);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_BACKEND_H_
