// A cache of somebody else's, behind the table of include/kvtwin/kvtwin.h.

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

// What a backend says of itself.
struct BackendInfo {
  kvtwin_backend_v1 table = {};  // What an older one lacks is null.
  std::string name;
  std::string profile;  // As it is said.
  Rules rules;          // Those of it.
  Level claims = Level::kVisibility;
  Abilities abilities;
  double tolerance = 0.01;
  bool has_cells = false;          // So that identity can be tried.
  std::vector<std::string> lacks;  // Functions that its table has not.
};

// Errors: a table that is too small or lacks a function; a description that
// makes no sense.
Result<BackendInfo> DescribeBackend(const kvtwin_backend_v1* table);

// Held to that profile instead of the one that it names, unless it is empty.
// Requires: ParseRules reads it.
void UseProfile(const std::string& profile, BackendInfo& info);

// Who looks at what a backend does to memory; see props/backend/host/.
class MemoryWatch {
 public:
  virtual ~MemoryWatch() = default;
  // Around each call of `function`. What was allocated in between is theirs.
  virtual void Enter(const char* function) = 0;
  virtual void Leave() = 0;
  // What is wrong with their memory, if anything.
  virtual std::optional<std::string> Damage() = 0;
  // How many bytes there are from `data` to the end of what was allocated
  // there; nothing if it is not known.
  virtual std::optional<std::size_t> BytesFrom(const void* data) = 0;
};

// The rules of a level: those of the backend's profile; at identity, where the
// reference twin is compared, our own with the backend's rows of masks.
Rules RulesAt(const BackendInfo& info, Level level);

// Of its caches, at a level. Requires: `watch`, if given, outlives it.
// `arguments` name the backend on the command line.
Subject BackendSubject(const BackendInfo& info, Level level,
                       std::string arguments, MemoryWatch* watch = nullptr);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_BACKEND_H_
