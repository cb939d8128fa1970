// The descriptions of third-party caches (include/kvtwin/kvtwin.h) and pools,
// and the cache as a subject.

#ifndef KVTWIN_PROPS_BACKEND_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_BACKEND_H_

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/refusals.h"
#include "kvtwin/kvtwin.h"
#include "props/backend/backend_cache.h"
#include "props/backend/c_conversions.h"
#include "props/compare/runner.h"
#include "props/history/abilities.h"

namespace kvtwin::props {

// How a backend's `attend` computes.
struct AttendInfo {
  DType dtype = DType::kF32;
  int query_heads = 0;  // At most, for each KV head; 0: any number.
  double tolerance = 0;
};

// Checks the fields for `attend` of a description of a cache or of a pool.
// Errors: a dtype that is not f32, f16 or bf16; a number of heads that is
// negative; a tolerance that is negative or not finite.
template <class Description>
Status CheckAttendFields(const Description& said) {
  const int dtype = RawEnum(said.attend_dtype);
  if (dtype != KVTWIN_F32 && dtype != KVTWIN_F16 && dtype != KVTWIN_BF16) {
    return Invalid("attend_dtype of the backend's description is {}", dtype);
  }
  if (said.max_query_heads < 0) {
    return Invalid(
        "max_query_heads of the backend's description is {}, it must not be "
        "negative",
        said.max_query_heads);
  }
  if (said.attend_tolerance >= 0 && std::isfinite(said.attend_tolerance)) {
    return {};
  }
  return Invalid(
      "attend_tolerance of the backend's description is {}, it must be finite "
      "and not negative",
      said.attend_tolerance);
}

// A backend's description of itself.
struct BackendInfo {
  kvtwin_backend_v1 table = {};  // Functions of newer tables may be null.
  std::string name;
  std::string profile;  // As the backend names it.
  Rules rules;          // The rules of the profile.
  Level claims = Level::kVisibility;
  Abilities abilities;
  double tolerance = 0.01;
  std::optional<AttendInfo> attend;  // Required for `attention`.
  bool has_get = true;               // Required for all other levels.
  bool has_cells = false;            // Required for identity.
  std::vector<std::string> lacks;    // The functions that the table lacks.
};

// Reads the description of a backend. Errors: a table that is too small or
// lacks a function; an invalid description.
Result<BackendInfo> DescribeBackend(const kvtwin_backend_v1* table);

// Replaces the profile that the backend names by `profile`, unless that is
// empty. Requires: ParseRules can parse it.
void UseProfile(const std::string& profile, BackendInfo& info);

// Returns the rules of a level: those of the backend's profile; at identity,
// which compares with the reference twin, kvtwin's own rules, except for the
// number of mask rows.
Rules RulesAt(const BackendInfo& info, Level level);

// Returns why the backend makes no cache of a setup: it does not declare such a
// cache, or its init refused it.
std::string WhyNotMade(const BackendInfo& info, const Setup& setup);

// Sets the subject's precision; at the level `attention`, also what histories
// must leave out there. Requires: the subject has its level and its abilities.
void SetAttend(const BackendInfo& info, Subject& subject);

// Returns the backend's caches as a subject, at a level. `arguments` name the
// backend on the command line. Requires: `watch`, if given, outlives the
// subject.
Subject BackendSubject(const BackendInfo& info, Level level,
                       std::string arguments, MemoryWatch* watch = nullptr);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_BACKEND_H_
