// A certificate: which levels, laws and rules a third-party cache was held to,
// how it was tried, and where it differs, as text, as JSON and as JUnit XML.

#ifndef KVTWIN_PROPS_CERTIFY_CERTIFICATE_H_
#define KVTWIN_PROPS_CERTIFY_CERTIFICATE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvtwin/status.h"
#include "props/backend/backend.h"
#include "props/backend/backend_laws.h"
#include "props/backend/host_process.h"
#include "props/backend/live.h"
#include "props/base/program.h"
#include "props/compare/failure.h"

namespace kvtwin::props {

struct CertifiedLevel {
  std::string name = {};
  Outcome outcome = Outcome::kNotJudged;
  std::string text = {};  // "holds, because it is weaker"
};

struct CertifiedLaw {
  std::string name = {};
  std::string rules = {};
  Outcome outcome = Outcome::kNotJudged;
  std::int64_t histories = 0;
  std::int64_t judged = 0;
  std::string text = {};  // Why it is not judged, or what breaks it.
  std::string rerun = {};
};

struct CertifiedFinding {
  std::string level = {};
  std::string check = {};
  std::string bucket = {};
  std::string rules = {};
  std::string reason = {};
  std::string history = {};
  std::string rerun = {};
};

struct Certificate {
  std::string version = std::string(kVersion);  // The version of kvtwin.
  std::string backend = {};
  std::string profile = {};
  // The rules in which the profile differs from kvtwin's: "copy adds".
  std::vector<std::string> differs = {};
  std::string claims = {};
  bool right = false;  // The claim holds, and no law is broken.
  std::int64_t seed = 1;
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  // Whether init refused each history's cache, or pool, so that nothing was
  // tried. A certificate that was read does not say so.
  bool none_made = false;
  std::vector<CertifiedLevel> levels = {};
  std::vector<CertifiedLaw> laws = {};
  std::vector<std::string> rules = {};         // The checks that ran test them.
  std::vector<std::string> not_declared = {};  // Abilities: "CAN_MIX".
  // How often the histories reached each rare state, in kvtwin's own cache.
  std::map<std::string, std::int64_t> marks = {};
  std::vector<CertifiedFinding> findings = {};
};

// Returns a failure at a level as a finding.
CertifiedFinding FindingOf(Level level, const Failure& failure);

struct CertifyOptions {
  FuzzOptions fuzz = {};
  LawHistories laws = {};
  LawJudge judge = {};  // Judges a law; in this process if it is null.
};

// Runs everything that the backend claims. Calls `found`, if not null, with
// each finding as soon as it is explained.
Certificate Certify(const BackendInfo& info, const CertifyOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at,
                    const std::function<void(const Failure&)>& found = nullptr);

// Certifies a pool. `subject_at` makes the subject, which the law judges if it
// is not null; `rerun_law` makes the command that judges a history by a law
// again.
Certificate CertifyPool(
    const PoolInfo& info, const CertifyOptions& options,
    const std::function<Subject(Level, const PoolLaw*)>& subject_at,
    const std::function<std::string(const PoolLaw&, const PagedHistory&,
                                    const Subject&)>& rerun_law);

// Returns the certificate as JSON; its last key, `hash`, is a hash of all
// others, so that a damaged certificate is seen (a forged one is not).
nlohmann::ordered_json ToJson(const Certificate& certificate);
// Reads the text of ToJson. Errors: any other text; a wrong hash.
Result<Certificate> ReadCertificate(const std::string& text);

std::string CertificateText(const Certificate& certificate);
// Each level and each law is a test case.
std::string JUnitText(const Certificate& certificate);

// A difference between two certificates of a backend.
struct Change {
  std::string text;
  bool worse = false;  // Less holds, or less was judged.
};
std::vector<Change> ChangesSince(const Certificate& old,
                                 const Certificate& now);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_CERTIFY_CERTIFICATE_H_
