// Shrinks a failing recording of a program that cannot be driven live: the
// program gets shorter lists of calls, and the oracle judges its answers.

#ifndef KVTWIN_PROPS_SEARCH_SHRINK_RECORDING_H_
#define KVTWIN_PROPS_SEARCH_SHRINK_RECORDING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvtwin/status.h"
#include "props/oracle/judge.h"

namespace kvtwin::props {

// Returns the recording that the program prints for the calls. Errors: the
// program fails.
using Recorder = std::function<Result<std::string>(const std::string& calls)>;

struct RecordingShrinkOptions {
  std::vector<std::string> twins;
  std::int64_t runs = 2000;  // Limit for runs of the program.
  // Called after each run.
  std::function<void(std::int64_t runs, std::size_t calls)> progress = {};
};

struct ShrunkRecording {
  std::string text;  // As printed by the program.
  Judgement judgement;
  std::size_t calls_before = 0;
  std::size_t calls = 0;
  std::int64_t runs = 0;
  bool is_shortest = true;  // False if the runs were used up.
};

// Errors: the recording is accepted, or cannot be parsed up to its first wrong
// line; the program fails; its output for all of the recording's calls is not
// rejected with the same bucket, or its output for no calls is.
Result<ShrunkRecording> ShrinkRecording(const std::string& recording,
                                        const Recorder& record,
                                        const RecordingShrinkOptions& options);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_SHRINK_RECORDING_H_
