// The gate of both twins of sessions: refuses misuse, and hands valid calls on.

#ifndef KVTWIN_CORE_GUARDED_SESSIONS_H_
#define KVTWIN_CORE_GUARDED_SESSIONS_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "kvtwin/sessions.h"

namespace kvtwin {

// Returns the error of MakeSessions for a bad spec.
Status CheckSessionsSpec(const SessionsSpec& spec);

// Returns the error of Submit for a bad request.
Status CheckRequest(const SessionsSpec& spec,
                    std::span<const SessionInput> prompt,
                    const RequestOptions& options);

// Returns where the group of inputs begins and ends that a cut before `index`
// would divide; both are `index` if it divides no group. Requires: the index is
// in [0, size].
std::pair<int, int> DividedGroup(std::span<const SessionInput> inputs,
                                 int index);

// Cuts the middle out of a prompt that is longer than the context, as the twins
// do (Q2, Q3), and returns the number of inputs before the cut. Requires:
// CheckRequest accepts the prompt and `keep`, which is not negative.
int CutMiddle(std::vector<SessionInput>& prompt, int keep, int context);

// Returns the number of inputs that two lists begin with.
inline int CommonInputs(std::span<const SessionInput> left,
                        std::span<const SessionInput> right) {
  return static_cast<int>(std::ranges::mismatch(left, right).in1 -
                          left.begin());
}

class GuardedSessions : public Sessions {
 public:
  // Requires: CheckSessionsSpec accepts `spec`.
  explicit GuardedSessions(const SessionsSpec& spec) : spec_(spec) {
    KVTWIN_ASSERT(CheckSessionsSpec(spec).ok());
  }

  const SessionsSpec& spec() const final { return spec_; }
  Result<int> Submit(std::span<const SessionInput> prompt,
                     const RequestOptions& options) final;
  Result<Ending> Sampled(int request, std::int32_t token) final;
  Status Finish(int request, std::int64_t removed) final;
  Status Adopt(int slot, std::span<const SessionInput> record) final;
  Result<RequestInfo> Request(int request) const final;
  Result<SlotInfo> Slot(int slot) const final;

 protected:
  // The twin's part, called with valid arguments only. Requests have the
  // numbers 0, 1, 2, ...
  virtual int DoSubmit(std::span<const SessionInput> prompt,
                       const RequestOptions& options) = 0;
  virtual Ending DoSampled(int request, std::int32_t token) = 0;
  virtual void DoFinish(int request, std::int64_t removed) = 0;
  virtual void DoAdopt(int slot, std::span<const SessionInput> record) = 0;
  // Returns null for a request that has ended or was never submitted.
  virtual const RequestInfo* DoRequest(int request) const = 0;
  virtual SlotInfo DoSlot(int slot) const = 0;

 private:
  SessionsSpec spec_;
  int next_request_ = 0;  // The number of the next request.
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_SESSIONS_H_
