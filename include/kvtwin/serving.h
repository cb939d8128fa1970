// Parts of a server over sessions (sessions.h): the text of an answer, with its
// stop strings; drawing tokens; conversations on disk; and a thread that
// answers requests with all of these. Each can be used without the others.
//
// Misuse returns invalid_argument or failed_precondition and changes nothing.
// If memory runs out, std::bad_alloc passes through. Service and Answer are
// thread-safe; the others are not: one call at a time on one object.

#ifndef KVTWIN_SERVING_H_
#define KVTWIN_SERVING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
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

  // Takes the first `count` bytes out of the held text.
  std::string Take(std::size_t count);

  std::vector<Stop> stops_;
  std::deque<char> held_;         // The text that is not shown yet.
  std::size_t shown_ = 0;         // The number of bytes before it.
  std::deque<std::size_t> ends_;  // The ends of its tokens in the whole text.
  std::int64_t removed_ = 0;
  bool ended_ = false;
};

// Draws tokens. Equal samplers of one build draw equal tokens.
class Sampler {
 public:
  // A token's weight is exp(logit / temperature). Only the likeliest tokens
  // that together have the part `top_p` of all weight are drawn, and the
  // likeliest in any case. A temperature of 0 draws only the likeliest.
  Sampler(double temperature, double top_p, std::uint64_t seed)
      : temperature_(temperature), top_p_(top_p), random_(seed) {}

  // Returns the index of a logit; the logit is NaN only if all logits are NaN.
  // Requires: there is a logit.
  std::int32_t operator()(std::span<const float> logits);

 private:
  double temperature_, top_p_;
  std::mt19937_64 random_;
};

// Where conversations are parked, and for which model.
struct ParkingSpec {
  std::string folder = {};  // Is made if it is missing.
  // Everything that the rows depend on beside the tokens and their dtype, such
  // as the file of the weights and its time, in UTF-8. Files of other models
  // are left alone.
  std::string model = {};
  DType rows = DType::kF32;          // The dtype of the cache.
  std::optional<DType> v_rows = {};  // The dtype of V rows. Unset: `rows`.
  int limit = 64;                    // Conversations of this model, at most.
};

// Numbers of conversations.
struct ParkingGauges {
  std::int64_t parked = 0;   // Parked now, also if they are being written.
  std::int64_t writing = 0;  // In memory now, until they are on disk.
  // Totals since the parking lot was made.
  std::int64_t written = 0;  // Written to disk.
  std::int64_t loaded = 0;   // Loaded into a slot.
  std::int64_t failed = 0;   // Could not be written or loaded.
  bool operator==(const ParkingGauges&) const = default;
};

// Whether the file of a conversation is read.
enum class Fetched {
  kNothing,  // No file has the beginning of the prompt.
  kReading,  // Unpark would wait for the disk.
  kReady,    // Unpark would not wait.
};

// Conversations on disk, so that they outlive the process and their slot. Each
// is a file of SaveState (save.h), complete or absent, whose label has the
// model, the dtypes and the inputs. The rows of an encoder are not saved: after
// Unpark it is not EncoderCached. While no thread can start for the background,
// calls wait for the disk themselves. Memory that runs out while a file is
// written or read is an error of the file. Everyone who can read the
// folder can read the conversations. Two parking lots of one model need two
// folders.
class ParkingLot {
 public:
  virtual ~ParkingLot() = default;  // Waits until all is written.

  // Copies the reusable record of a free slot, writes it in the background, one
  // file after another, and then removes the files whose conversations it
  // continues, and the oldest ones over the limit. Nothing is written if a
  // parked conversation begins with it. Errors: a slot that does not exist or
  // is in use; those of SnapshotOf; rows of another dtype.
  virtual Status Park(const Sessions& sessions, const Cache& cache,
                      int slot) = 0;

  // Begins to read the file of Unpark in the background, and returns whether it
  // is read. One file is read at a time; with `replace`, it takes the place of
  // one that was read for another prompt and not used.
  virtual Fetched Fetch(std::span<const SessionInput> prompt, int least,
                        bool replace) = 0;

  // Finds the parked conversation with the longest common prefix with the
  // prompt, loads so much of it into a free slot as the cache can resume after,
  // and returns its number of tokens. If that is less than `least`, or the
  // cache has too few free cells for the whole conversation, 0 is returned, and
  // the slot is unchanged or empty. A file that the cache has too few cells
  // for, free or not, is then left alone, and a file that has too little of a
  // prompt is not read again for such prompts: all caches of a parking lot must
  // have the same spec and sizes. Errors: a slot that does not exist or is in
  // use; a file that cannot be read, or does not hold what its label says: it
  // is forgotten, and the slot is empty.
  virtual Result<int> Unpark(Sessions& sessions, Cache& cache, int slot,
                             std::span<const SessionInput> prompt,
                             int least) = 0;

  // Waits until all is written; with `all` = false, does not wait. Returns the
  // error of the last file that could not be written, each error once. The
  // files that this file would have replaced stay.
  virtual Status Wait(bool all = true) = 0;

  // Returns the numbers of conversations.
  virtual ParkingGauges Gauges() const = 0;
};

// Finds the files of the model in the folder. Damaged files and all others are
// left alone, but incomplete files of writers that died are removed.
// Errors: an empty folder; a limit < 1; a dtype that rows cannot have; a model
// that is not UTF-8; a folder that cannot be made or listed.
Result<std::unique_ptr<ParkingLot>> MakeParkingLot(const ParkingSpec& spec);

// How a service answers.
struct ServiceSpec {
  SessionsSpec sessions = {};  // The sizes.
  // Requests that may wait beside those that have a slot; 0: no limit.
  int queue = 1024;
  bool share = true;  // Reuse stored prefixes, of other requests as well.
  // A context shift keeps this many of the first tokens of a full slot, and a
  // prompt that is too long loses its middle; -1: the answer ends instead, and
  // such a prompt is refused.
  int keep = -1;
  // A prompt waits until another request has computed more of it, or is loaded
  // from disk, only if that saves this many tokens. Shorter conversations are
  // not parked.
  int worth = 32;
  ParkingSpec parking = {};  // Without a folder, nothing is parked.
  // Gets the errors of files of conversations: the service continues without
  // them, even if `log` throws. Called by the service's thread; must not call
  // the service.
  std::function<void(const Status&)> log = {};
};

// The model of a service, whose thread calls it. It must not call the service.
// An exception of `forward` fails the service.
struct ServiceModel {
  // Computes a batch, for which StartForward was called, and puts its rows into
  // the cache. Returns the logits after its outputs, one after another; they
  // are read until the next call.
  std::function<std::span<const float>(Cache&, const SessionBatch&)> forward =
      {};
  // Returns the bytes of a token. An exception ends the answer that has the
  // token, with Finish::kError.
  std::function<std::string(std::int32_t token)> bytes = {};
  std::int32_t end = -1;  // The token that ends an answer.
};

// A question to a service.
struct ServiceRequest {
  std::vector<SessionInput> prompt = {};  // Not empty.
  std::int64_t limit = 0;  // Tokens of the answer, at most; 0: no limit.
  std::vector<std::string> stops = {};  // Strings before which the answer ends.
  // Draws a token from its logits. Called by the service's thread. A negative
  // token or an exception ends this answer with Finish::kError. The service's
  // thread may destroy it: the destructors of its captures may call the
  // service, but must not destroy it.
  std::function<std::int32_t(std::span<const float> logits)> sample = {};
};

// Why an answer has ended, if it has.
enum class Finish {
  kNone,    // It has not ended.
  kStop,    // The token that ends an answer, or a stop string.
  kLength,  // The answer has `limit` tokens, or its slot is full.
  kError,   // Its `sample`, or `bytes`, failed: AnswerPart::status says why.
  kFailed,  // The service has failed or ended: AnswerPart::status says why.
};

// The next part of an answer.
struct AnswerPart {
  std::string text = {};          // In whole characters, except at the end.
  Finish finish = Finish::kNone;  // Whether this part is the last.
  std::int64_t tokens = 0;        // Tokens of the whole answer so far.
  int reused = 0;                 // Tokens of the prompt that were stored.
  Status status = {};             // The error of kError or kFailed.
};

// An answer in the making. It may outlive its service.
class Answer {
 public:
  virtual ~Answer() = default;  // Ends the request.

  // Waits for new text or the end of the answer; with `whole`, only for the
  // end. Waits no longer than `wait` or a day. Returns the text since the last
  // call.
  virtual AnswerPart Next(bool whole, std::chrono::milliseconds wait) = 0;
};

// Answers requests together, in batches, on a thread of its own. It does not
// limit the text that is not read yet.
class Service {
 public:
  virtual ~Service() = default;  // Answers that have not ended fail.

  // Queues a request. Errors: failed_precondition if the queue is full;
  // invalid_argument for a request without `sample`, or that sessions refuse
  // (Sessions::Submit). If the cache refuses a batch, or `forward` throws, all
  // answers end with Finish::kFailed, and later ones, too.
  virtual Result<std::unique_ptr<Answer>> Ask(ServiceRequest request) = 0;

  // Returns counters and gauges as Prometheus reads them; their names begin
  // with "kvtwin_".
  virtual std::string Metrics() const = 0;
};

// Starts a service. The cache was initialized with InitOf(spec.sessions), must
// outlive the service, and must have no other user. Errors: those of
// MakeSessions, and of MakeParkingLot if its folder has a name; a keep < -1; a
// worth < 1; a negative queue; a model without its functions; a thread that
// cannot start.
Result<std::unique_ptr<Service>> MakeService(Cache& cache,
                                             const ServiceSpec& spec,
                                             ServiceModel model);

}  // namespace kvtwin

#endif  // KVTWIN_SERVING_H_
