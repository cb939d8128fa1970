// A recording as text: each step with the cells, the views and the masks as
// pictures, and a mark where it is wrong. And cells alone.

#ifndef KVTWIN_PROPS_REPORT_SHOW_H_
#define KVTWIN_PROPS_REPORT_SHOW_H_

#include <cstddef>
#include <cstdint>
#include <istream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "props/compare/step.h"
#include "props/oracle/judge.h"
#include "props/report/page.h"

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

// Held cells with their tokens, and which of so many cells are free; without a
// number the tokens alone. The first kHeldShown of them: the others are
// counted.
inline constexpr std::size_t kHeldShown = 48;
std::string HeldText(const std::vector<Held>& held, std::optional<int> cells);

// Lines of at most 80 columns, broken at blanks.
std::string Wrapped(std::string_view text, std::size_t indent);

// Begin and end.
using Run = std::pair<std::int64_t, std::int64_t>;
// "4, 7-17", or "none"; of many, the first and how many more there are.
std::string RunsText(const std::vector<Run>& runs);

// The judgement as one line of JSON.
std::string JudgementJson(const std::string& name, const Judgement& judgement);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_SHOW_H_
