// Runs the ledger, the reference twin and a subject side by side: every call
// goes to all three, and after each call all their answers are compared.

#ifndef KVTWIN_PROPS_COMPARE_DIFFERENTIAL_DRIVER_H_
#define KVTWIN_PROPS_COMPARE_DIFFERENTIAL_DRIVER_H_

#include <fmt/format.h>

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/cache.h"
#include "props/base/check_name.h"
#include "props/base/hash.h"
#include "props/compare/coverage_marks.h"
#include "props/compare/driver.h"
#include "props/compare/failure.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/history/rows.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Returns the tokens as text, " 0:1@s0+s1 2:0@s1": cell, position, sequences.
std::string CellsText(const Cache& cache);

// Removes the first layer's rows from a state, or from each of its caches.
void LeaveOutALayer(CacheState& state);

// Makes the reference twin; the tests of the harness make faulty ones.
using CacheMaker =
    std::function<Result<std::unique_ptr<Cache>>(const CacheSpec&)>;
inline Result<std::unique_ptr<Cache>> MakeReference(const CacheSpec& spec) {
  return MakeCache(spec, "reference");
}

// One tensor of a view.
enum class ViewPart { kKey, kValue, kMask };

class DifferentialDriver final : public Driver {
 public:
  // Requires: all outlive this. `trace` and `observer` may be null.
  DifferentialDriver(const Setup& setup, const Subject& subject,
                     CallTrace* trace, Observer* observer, RunResult& result,
                     CacheMaker make_reference = MakeReference)
      : setup_(setup),
        subject_(subject),
        make_reference_(std::move(make_reference)),
        trace_(trace),
        observer_(observer),
        result_(result),
        ledger_(setup_.spec) {}

  bool SetUp() override;
  void TearDown() override;

  bool StartForward(Tokens tokens, bool reserve) override;
  void PutAll(const Op& op) override;
  void GetAll() override;
  void SetCausal(const std::vector<int>& except) override;
  StatusCode Remove(int seq, std::int32_t begin, std::int32_t end) override;
  void CopyPrefix(int src, int dst, std::int32_t len) override;
  bool CanResume(int seq, std::int32_t pos) override;
  void Commit(int seq, const std::vector<int>& path) override;
  void Checkpoint(int seq) override;
  void SelectLayer(int layer) override;
  void SelectType(int type) override;
  void Store() override;
  void Read() override;
  void Except(const std::vector<int>& except) override;
  void Cached() override;
  void Snapshot(int seq) override;
  void Add(int seq, int dst) override;
  void Misuse(int which) override;
  void Poison() override;
  void Reload() override;

  const reference::Ledger& ledger() const override { return ledger_; }
  // Hands over the reference twin. Call nothing else afterwards.
  std::unique_ptr<Cache> TakeReference() { return std::move(reference_); }
  bool in_pass() const override { return pass_.active; }
  Place place() const override { return {active_type_, layer_}; }

 private:
  struct Pass {
    Tokens tokens;
    bool active = false;
    bool reserve = false;
    // A cache is fresh if the ledger can judge its mask: no Remove since the
    // mask was built, and no CopyPrefix since the view was chosen, because the
    // view may now be too narrow.
    bool copied = false;
    std::bitset<kCachesMost> fresh;  // By cache of a wrapper.
    std::int64_t first_serial = 0;
  };

  // Comparisons. `message` is what the subject says of its refusal.
  template <class Call>
  void CheckCodes(std::optional<OpKind> kind, const Call& call,
                  StatusCode ledger, StatusCode reference, StatusCode subject,
                  std::string_view answer = {}, std::string_view message = {});
  void CheckOutsideOfLife(CheckName check);
  // Compares the snapshots of both caches and returns the snapshot, which stays
  // valid until the next call; null if the subject has none.
  const CacheState* SameSnapshot();
  void GoBack(const CacheState& earlier, int sequence, const CacheState& added,
              const std::vector<int>& cells);
  std::vector<int> CellCounts() const;  // Of each cache of a wrapper.
  void CheckAllCells();
  void CheckCells();
  void CheckTokens();
  void CheckViews();
  void CheckBytes(ViewPart part, const TensorView& reference,
                  const TensorView& subject, VLayout layout);
  std::string Picture(ViewPart part, const TensorView& reference,
                      const TensorView& subject, Shape index, VLayout layout);
  void Hash(const void* data, std::size_t size) {
    result_.digest = HashBytes(data, size, result_.digest);
  }
  void HashInt(std::int64_t value) { Hash(&value, sizeof(value)); }
  // Shows the observer the state before a call.
  void ObserveBefore() {
    if (observer_ != nullptr) observer_->BeforeCall(ledger_, *reference_);
  }
  // Records a call before it is made, because it may fail without an answer.
  template <class Call>
  void Begin(const Call& call, bool begins_pass = false) {
    if (trace_ != nullptr) trace_->Begin(Made(call), begins_pass);
  }
  void AddStep(std::string call, std::string_view answer,
               StatusCode code = StatusCode::kOk);
  bool drawing() const {
    return trace_ != nullptr && !trace_->steps.empty() &&
           trace_->steps.back().drawn;
  }
  void DrawCellsNow();
  void DrawViewNow(int layer, const KvView& reference, const KvView& subject);

  bool fresh() const { return At(pass_.fresh, active_type_); }
  void RefusePlain(const Tokens& tokens, bool reserve);
  void CheckBatchCells();
  void NewRows();
  void PutRows();
  void GoTo(int layer);
  void CheckEncoderCached();
  void CheckResumeBefore(int seq, std::int32_t pos);
  std::vector<int> IndicesOf(const std::vector<int>& except) const;
  void ExceptActive(const std::vector<int>& indices);
  void EndPass();

  Kind KindOf(int type) const {
    const CacheSpec& spec = setup_.spec;
    return (wrapper_ ? At(spec.caches, type) : spec).kind;
  }
  bool IsEncoder(int type) const { return KindOf(type) == Kind::kEncoder; }
  int types() const { return wrapper_ ? Size(setup_.spec.caches) : 1; }
  void SetType(int type);

  const Setup& setup_;
  const Subject& subject_;
  const CacheMaker make_reference_;
  CallTrace* trace_;
  Observer* observer_;
  RunResult& result_;
  const bool wrapper_ = IsWrapper(setup_.spec.kind);

  reference::Ledger ledger_;
  std::unique_ptr<Cache> reference_;
  std::unique_ptr<Cache> tested_;
  int active_type_ = 0;
  Pass pass_;
  std::int64_t serial_ = 0;
  int first_cell_ = 0;  // The first cell of the compared views.
  int layer_ = 0;
  std::set<Place> put_;
  RowBuffer keys_;
  RowBuffer values_;
  std::optional<CacheState> last_snapshot_;
  std::vector<CellEntry> reference_cells_;
  std::vector<CellEntry> tested_cells_;
};

template <class Call>
void DifferentialDriver::CheckCodes(std::optional<OpKind> kind,
                                    const Call& call, StatusCode ledger,
                                    StatusCode reference, StatusCode subject,
                                    std::string_view answer,
                                    std::string_view message) {
  ++result_.operations;
  HashInt(static_cast<std::int64_t>(subject));
  if (observer_ != nullptr) observer_->Outcome(subject);
  if (trace_ != nullptr) {
    AddStep(Made(call), answer.empty() ? StatusName(subject) : answer, subject);
  }
  Check(ledger == reference, "reference: result", [&] {
    return fmt::format("{} is {} by the ledger, {} by the reference",
                       Made(call), StatusName(ledger), StatusName(reference));
  });
  if (reference == subject) return;
  throw WrongResult(
      kind, fmt::format("{} is {} by the reference, {} by {}{}{}", Made(call),
                        StatusName(reference), StatusName(subject),
                        subject_.name, message.empty() ? "" : ": ", message));
}

// As RunHistory at identity, with this reference in place of kvtwin's.
RunResult RunAgainst(const CacheMaker& make_reference, const History& history,
                     const Subject& subject);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_DIFFERENTIAL_DRIVER_H_
