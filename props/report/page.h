// A failure as an HTML page that needs nothing but itself.

#ifndef KVTWIN_PROPS_REPORT_PAGE_H_
#define KVTWIN_PROPS_REPORT_PAGE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/status.h"
#include "props/compare/step.h"

namespace kvtwin::props {

struct Failure {
  // At most so many steps are drawn.
  static constexpr std::int64_t kSteps = 40;

  std::string name;     // Of the recording or the history.
  std::string setup;    // What cache it is.
  std::string unit;     // What steps are numbered by: "Line", "Call".
  std::string check;    // "subject: K bytes", or the call.
  std::string reason;   // In full.
  std::string rules;    // That are broken: "S31, S32".
  std::string command;  // Shows it again.
  std::string text;     // The failing step, for browsers without JavaScript.
  Frame frame;
  std::vector<Step> steps;    // Not empty; the last one is wrong.
  std::int64_t left_out = 0;  // Steps before them.
};

std::string PageHtml(Failure failure);

// Errors: the file cannot be written.
Status WritePage(const Failure& failure, const std::string& path);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_PAGE_H_
