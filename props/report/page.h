// A failure as an HTML page. The page loads nothing from elsewhere.

#ifndef KVTWIN_PROPS_REPORT_PAGE_H_
#define KVTWIN_PROPS_REPORT_PAGE_H_

#include <string>
#include <string_view>

#include "kvtwin/status.h"
#include "props/compare/failure.h"

namespace kvtwin::props {

// Returns text that HTML and XML show as it is.
std::string EscapedMarkup(std::string_view text);

// Requires: the failure is explained, and its trace has a step.
std::string PageHtml(Failure failure);

// Errors: the file cannot be written.
Status WritePage(const Failure& failure, const std::string& path);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_PAGE_H_
