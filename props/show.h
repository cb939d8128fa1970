// A recording as text: each step with the cells, the views and the masks as
// pictures, and a mark where it is wrong.

#ifndef KVTWIN_PROPS_SHOW_H_
#define KVTWIN_PROPS_SHOW_H_

#include <cstdint>
#include <istream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "props/judge.h"
#include "props/page.h"

namespace kvtwin::props {

struct ShowOptions {
  std::vector<std::string> twins;
  bool json = false;  // One object for each step, then one for the verdict.
  bool all = false;   // Go on behind the first wrong line.
  bool color = false;
  std::int64_t from = 1;  // Lines to show.
  std::int64_t to = std::numeric_limits<std::int64_t>::max();
};

// Prints to stdout. `name` is what to call the recording.
Judgement Show(std::istream& in, const std::string& name,
               const ShowOptions& options);

// What is wrong in a recording, and what led there; nothing if nothing is, or
// if the file cannot be read again.
std::optional<Failure> ExplainRecording(const std::string& path,
                                        const std::vector<std::string>& twins);

// The judgement as one line of JSON.
std::string JudgementJson(const std::string& name, const Judgement& judgement);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHOW_H_
