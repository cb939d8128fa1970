// Parts of a server over sessions (sessions.h): the text of an answer, with its
// stop strings, and conversations on disk. Each can be used without the other.
//
// Misuse returns invalid_argument or failed_precondition and changes nothing.
// If memory runs out, std::bad_alloc passes through. Not thread-safe: one call
// at a time on one object.

#ifndef KVTWIN_SERVING_H_
#define KVTWIN_SERVING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/sessions.h"
#include "kvtwin/status.h"

namespace kvtwin {

// The text of an answer while its tokens come. It ends before the first stop
// string. Its parts are whole characters, as far as the bytes are UTF-8.
//
// The text does not depend on how tokens divide it: the stop string that is
// complete first ends it, and of those that end at the same byte the longest.
class AnswerText {
 public:
  // Empty stop strings do not count.
  explicit AnswerText(std::vector<std::string> stops = {});

  // Adds the bytes of the next token, and returns the text that can be shown
  // now. The beginning of a stop string or of a character is held back. After
  // the end of the answer the text is empty.
  std::string Add(std::string_view bytes);
  // Ends the answer, and returns the text that was held back.
  std::string End();

  // Whether a stop string has ended the answer.
  bool stopped() const { return removed_ > 0; }
  // The number of last tokens that have bytes of the stop string or after it,
  // or 0 if no stop string has ended the answer. The session keeps the tokens
  // before: Sessions::Finish takes the number of those that were Sampled.
  std::int64_t removed() const { return removed_; }

 private:
  // How much of a stop string the text ends with.
  struct Stop {
    bool Add(char byte);

    std::string text;
    std::size_t matched = 0;
    // The longest border of each prefix that was matched so far, by its length
    // - 1: a shorter prefix that it ends with.
    std::vector<std::size_t> borders = {};
  };

  // Takes the bytes before `end` out of the held text.
  std::string Take(std::size_t end);

  std::vector<Stop> stops_;
  std::string held_;               // Not shown yet.
  std::vector<std::size_t> ends_;  // Of the tokens in the held text.
  std::int64_t removed_ = 0;
  bool ended_ = false;
};

// Where conversations are parked, and for which model.
struct ParkingSpec {
  std::string folder;  // Is made if it is missing.
  // Everything that the rows depend on beside the tokens and their dtype, such
  // as the file of the weights and its time. Files of other models are left
  // alone.
  std::string model;
  DType rows = DType::kF32;  // The dtype of the cache.
  int limit = 64;            // Conversations of this model, at most.
};

// Numbers of conversations.
struct ParkingGauges {
  std::int64_t parked = 0;   // On disk now.
  std::int64_t written = 0;  // Since the parking lot was made, as the rest.
  std::int64_t loaded = 0;
  std::int64_t failed = 0;  // Could not be written or loaded.
  bool operator==(const ParkingGauges&) const = default;
};

// Conversations on disk, so that they outlive the process and their slot. Each
// is a file of SaveState (save.h), complete or absent, whose label has the
// model, the dtype and the inputs. Whoever can read the folder can read the
// conversations.
class ParkingLot {
 public:
  virtual ~ParkingLot() = default;  // Waits until all is written.

  // Writes the reusable record of a free slot in the background, and then
  // removes the files whose conversations it continues, and the oldest ones
  // over the limit. Nothing is written if a parked conversation begins with it.
  // Waits for the file before. Errors: a slot that does not exist or is in use;
  // those of SnapshotOf; rows of another dtype.
  virtual Status Park(const Sessions& sessions, const Cache& cache,
                      int slot) = 0;

  // Finds the parked conversation with the longest common prefix with the
  // prompt, loads so much of it into a free slot as the cache can resume after,
  // and returns its number of tokens. If that is less than `least`, 0 is
  // returned, and the slot is unchanged or empty. Errors: a slot that does not
  // exist or is in use; a file that cannot be read, or does not hold what its
  // label says: it is forgotten, and the slot is empty.
  virtual Result<int> Unpark(Sessions& sessions, Cache& cache, int slot,
                             std::span<const SessionInput> prompt,
                             int least) = 0;

  // Waits until all is written. Returns the error of the last Park if its file
  // could not be written; this is said once. What it would have replaced stays.
  virtual Status Wait() = 0;

  virtual ParkingGauges Gauges() const = 0;
};

// Finds the files of the model in the folder. Files that are damaged, or
// something else, are left alone; what writers that died have left is removed.
// Errors: an empty folder; a limit < 1; a dtype that rows cannot have; a folder
// that cannot be made or listed.
Result<std::unique_ptr<ParkingLot>> MakeParkingLot(const ParkingSpec& spec);

}  // namespace kvtwin

#endif  // KVTWIN_SERVING_H_
