// The ledger of sessions: it knows what a request must compute, whatever other
// requests do. It knows neither cells nor calls of the cache.

#ifndef KVTWIN_PROPS_SESSIONS_SESSION_JUDGE_H_
#define KVTWIN_PROPS_SESSIONS_SESSION_JUDGE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "kvtwin/sessions.h"
#include "props/sessions/stand_in_model.h"

namespace kvtwin::props {

// Returns the inputs that a request computes in place of a prompt that is too
// long. Requires: no groups.
std::vector<SessionInput> Truncated(std::vector<SessionInput> prompt, int keep,
                                    int context);

class SessionJudge {
 public:
  // `every_prefix` says that the cache can resume wherever it holds tokens.
  SessionJudge(const SessionsSpec& spec, std::vector<Sight> sights,
               bool every_prefix)
      : spec_(spec),
        sights_(std::move(sights)),
        every_prefix_(every_prefix),
        slots_(static_cast<std::size_t>(spec.slots)) {}

  void Submit(int request, std::vector<SessionInput> prompt,
              const RequestOptions& options);

  // Judges a plan. Returns what is wrong with it, or nothing.
  std::string Plan(const Sessions& sessions, const SessionBatch& batch);
  // Judges the states of the batch that was planned last. `batch` has its
  // tokens, also those sampled since then.
  std::string Compute(const SessionBatch& batch,
                      const std::vector<States>& states);

  // Requests with outputs that are computed and not sampled.
  std::vector<int> Unsampled() const;
  // The unsampled tokens that the planned batch needs to be computed.
  bool Needs(int request) const;
  std::uint64_t NextOutput(int request) const;
  // Returns how the request must end now.
  Ending Sampled(int request, std::int32_t token);
  void Finish(int request, std::int64_t removed);
  // The inputs of a free slot, up to the first that a shift has touched.
  std::vector<SessionInput> ExactOf(int slot) const;
  // The slot was given these tokens (Q13).
  void Adopt(int slot, std::vector<SessionInput> record);

  struct Told {
    std::vector<SessionInput> prompt;
    RequestOptions options;
    int slot = -1;
    Story story;
    std::deque<SessionInput> pending;  // Known, and not planned.
    int exact = 0;         // Inputs of the story that no shift has touched.
    int planned = 0;       // In the batch that is not computed yet.
    bool unknown = false;  // The last of these is not sampled.
    int in_flight = 0;     // Outputs of that batch.
    std::deque<std::uint64_t> unsampled;  // Outputs that are computed.
    std::int64_t answered = 0;
    std::int64_t outputs = 0;
    std::int64_t removed = -1;  // -1: it has not ended.
    int missed = 0;             // Batches since it was served.
  };
  const std::map<int, Told>& requests() const { return requests_; }

 private:
  struct Held {
    std::vector<SessionInput> inputs;
    int exact = 0;
    int request = -1;
  };

  std::string Admitted(const Sessions& sessions);
  static bool IsEmptied(const Sessions& sessions, const Told& told);
  int LongestReuse(const Told& told) const;
  std::string PlanToken(int request, const SessionBatch& batch, int index);
  std::string Place(Told& told, int position);
  std::string PlanEnds(const SessionBatch& batch,
                       const std::vector<bool>& outputs);
  bool IsReady(const Told& told) const;
  std::int64_t Most(const Told& told) const;
  int Keep(const Told& told) const;
  void AddTo(Told& told, const SessionInput& input, const States*& states);
  void Leave(int request);

  SessionsSpec spec_;
  std::vector<Sight> sights_;
  bool every_prefix_;
  std::map<int, Told> requests_;
  std::vector<Held> slots_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_SESSION_JUDGE_H_
