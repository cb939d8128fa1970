// Prints a recording as text: each step with drawings of the cells, the views
// and the masks, and a mark at the error. Also draws cells alone.

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
  bool all = false;   // Continue after the first wrong line.
  bool color = false;
  std::int64_t from = 1;  // Lines to show.
  std::int64_t to = std::numeric_limits<std::int64_t>::max();
};

// Prints a recording to stdout. `name` is the name to print for it.
Judgement Show(std::istream& in, const std::string& name,
               const ShowOptions& options);

// Returns the failure of a recording and the steps that led to it; nullopt if
// the recording is right, or the file cannot be read again.
std::optional<Failure> ExplainRecording(const std::string& path,
                                        const std::vector<std::string>& twins);

// Returns the held cells with their tokens, and which of `cells` cells are
// free; without a number, the tokens alone. Shows the first kHeldShown and
// counts the others.
inline constexpr std::size_t kHeldShown = 48;
std::string HeldText(const std::vector<Held>& held, std::optional<int> cells);

// Returns the text in lines of at most 80 columns, broken at spaces.
std::string Wrapped(std::string_view text, std::size_t indent);

// Begin and end of a range of numbers.
using Run = std::pair<std::int64_t, std::int64_t>;
// Returns "4, 7-17", or "none"; of many runs, the first ones and the number of
// the others.
std::string RunsText(const std::vector<Run>& runs);

// Returns the judgement as one line of JSON.
std::string JudgementJson(const std::string& name, const Judgement& judgement);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_SHOW_H_
