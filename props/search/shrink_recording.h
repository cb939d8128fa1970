// Shorter recordings with the same failure, of a program that cannot be driven
// live: it is given shorter lists of calls, and its answers are judged.

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

// The recording that the program prints for these calls. Errors: the program
// fails.
using Recorder = std::function<Result<std::string>(const std::string& calls)>;

struct RecordingShrinkOptions {
  std::vector<std::string> twins;
  std::int64_t runs = 2000;  // Of the program, at most.
  // Called after each run.
  std::function<void(std::int64_t runs, std::size_t calls)> progress = {};
};

struct ShrunkRecording {
  std::string text;  // As the program printed it.
  Judgement judgement;
  std::size_t calls_before = 0;
  std::size_t calls = 0;
  std::int64_t runs = 0;
  bool is_shortest = true;  // Else the runs were used up.
};

// Requires: the recording can be parsed as far as its first wrong line. Errors:
// it is not rejected; the program fails, or what it prints for all of the
// recording's calls is not rejected with the same bucket, or what it prints for
// none of them is.
Result<ShrunkRecording> ShrinkRecording(const std::string& recording,
                                        const Recorder& record,
                                        const RecordingShrinkOptions& options);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_SHRINK_RECORDING_H_
