// The page that `--html` asks for.

#ifndef KVTWIN_PROPS_COMMAND_PAGE_FILE_H_
#define KVTWIN_PROPS_COMMAND_PAGE_FILE_H_

#include <string>

#include "kvtwin/status.h"

namespace kvtwin::props {

// Removes the page of an earlier run, and says so, so that there is a page
// afterwards only if this run wrote it. Errors: an empty path; a file that is
// no page of ours, which stays as it is.
Status PreparePage(const std::string& path);

// Returns `exit_code` if the page was written, and says where on standard
// error; otherwise says why not, and returns 2.
int AfterPage(const Status& written, const std::string& path, int exit_code);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_PAGE_FILE_H_
