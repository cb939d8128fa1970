// A failure: what is wrong with a system under test. The code that finds a
// failure fills in the first part, and throws or returns it; Explain
// (props/search/explain.h) fills in the second part, once. Text, JSON, pages
// and exit codes are made from this value alone.

#ifndef KVTWIN_PROPS_COMPARE_FAILURE_H_
#define KVTWIN_PROPS_COMPARE_FAILURE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/trace/paged_trace.h"
#include "props/base/check_name.h"
#include "props/base/level.h"
#include "props/compare/step.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The part of a view, or of the answer to a batch, that is wrong.
enum class WrongPart {
  kMask,     // The mask: each column has the rows of a token. Or no view.
  kKey,      // A column has a token's V row with another K row.
  kValue,    // A column has a token's K row with another V row.
  kRows,     // A token is missing, and a column has rows that are no token's.
  kEncoder,  // K or V of an encoder.
  kCells,    // In a recording: the cells of a batch.
};

struct Failure {
  // Index into the operations of the history; the number of operations if the
  // set-up or the end fails. In a recording: the line.
  std::size_t step = 0;
  std::string check = {};  // The name of a CheckName, a law or a call.
  std::string text = {};   // The difference, and its place.
  // The place in a view: row of the mask, column, and the cell of column 0; -1
  // if the failure is not about a single row or column.
  int row = -1;
  int column = -1;
  int first_cell = 0;
  // In a recording: the twin that disagrees; empty if all twins disagree.
  std::string twin = {};
  // The function of a backend that answered with an error, or did not return.
  std::string function = {};
  // Where an answer is wrong: the operation that makes the answered call alone,
  // such as kDrop if a legal client removed tokens to make room for a batch.
  std::optional<OpKind> call = {};
  WrongPart part = WrongPart::kMask;
  bool of_left = false;  // A row sees a token that the cache has dropped.
  // For a pool: the call whose answer is wrong, as a recording has it.
  std::optional<PagedTraceOpKind> pool_call = {};
  // The last call before it that may change the pool, even if it was refused.
  std::optional<PagedTraceOpKind> pool_change = {};
  bool of_window = false;  // The pool has a window by its own rules.

  // Explain fills in the rest.
  std::string subject = {};  // The name of the system under test.
  Level level = Level::kIdentity;
  std::string rules = {};      // The broken rules: "S31, S32".
  std::string history = {};    // The shortest history that fails: "kvt1 ...".
  std::size_t operations = 0;  // The number of its operations.
  std::string bucket = {};     // Equal for failures that are likely one bug.
  std::string rerun = {};      // The command that shows the failure again.
  std::string note = {};       // How a second run differs, if it does.
  std::string name = {};       // The recording's, or "a history of calls".
  std::string setup = {};      // The cache, in words.
  std::string unit = {};       // The word for a step: "Line", "Call".
  // The calls up to the failure; the last call fails. If a page is asked for,
  // the last kSteps calls are drawn, and `left_out` counts the calls before
  // them.
  static constexpr std::int64_t kSteps = 40;
  std::vector<Step> trace = {};
  Viewport frame = {};
  std::int64_t left_out = 0;
  std::string report = {};  // The whole report as text.

  // Where a search found the failure.
  std::uint64_t history_number = 0;  // In the histories of the seed, from 0.
  std::size_t found_operations = 0;  // In the history as drawn.
  std::string found_check = {};      // The check that the drawn history failed.

  // Returns who is wrong. For a law or a recording: the subject.
  Party party() const {
    const std::optional<CheckName> known = CheckName::Find(check);
    return known ? known->party() : Party::kSubject;
  }
  bool Is(CheckName name) const { return check == name.name(); }
};

inline Failure MakeFailure(CheckName check, std::string text) {
  return {.check = std::string(check.name()), .text = std::move(text)};
}

// Returns the failure of the answer to a call. `call` is as in Failure.
inline Failure WrongResult(std::optional<OpKind> call, std::string text) {
  Failure failure = MakeFailure("subject: result", std::move(text));
  failure.call = call;
  return failure;
}

// Returns the text for a host whose answer cannot be right, for the reason
// `why`.
inline std::string WroteNonsense(const std::string& why) {
  return "wrote nonsense to its harness: " + why;
}

// Whether the failure is a call that does not return.
inline bool IsHang(const Failure& failure) {
  return failure.Is("backend: hang");
}

// Returns a text, which may be given as a function that makes the text, because
// most texts are never needed.
template <class Text>
std::string Made(const Text& text) {
  if constexpr (std::is_invocable_v<Text>) {
    return text();
  } else {
    return std::string(text);
  }
}

// Throws a Failure unless `holds`.
template <class Text>
void Check(bool holds, CheckName check, const Text& text) {
  if (!holds) throw MakeFailure(check, Made(text));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_FAILURE_H_
