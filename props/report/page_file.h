// The file of the page that `--html`, and html= in Python, write.

#ifndef KVTWIN_PROPS_REPORT_PAGE_FILE_H_
#define KVTWIN_PROPS_REPORT_PAGE_FILE_H_

#include <string>

#include "kvtwin/status.h"

namespace kvtwin::props {

// Removes the page of an earlier run and reports that, so that the page exists
// afterwards only if this run wrote it. Errors: a file that is not a page of
// kvtwin, which stays as it is; a path that cannot be written.
Status PreparePage(const std::string& path);

// If the page was written, prints its path to standard error and returns
// `exit_code`; otherwise prints why not, and returns 2.
int AfterPage(const Status& written, const std::string& path, int exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_PAGE_FILE_H_
