// Runs the ledger and a subject that places tokens by its own rules: every call
// goes to both, and what each row of the batch sees is compared, token by token
// (visibility, S53), by attention over the views (numeric, S54), or by the
// cache's own attention (attention, S58).

#ifndef KVTWIN_PROPS_COMPARE_MODEL_DRIVER_H_
#define KVTWIN_PROPS_COMPARE_MODEL_DRIVER_H_

#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/index.h"
#include "kvtwin/cache.h"
#include "props/attention/attention_question.h"
#include "props/compare/driver.h"
#include "props/compare/runner.h"
#include "props/compare/visibility.h"
#include "props/history/rows.h"
#include "reference/dialects.h"

namespace kvtwin::props {

class ModelDriver final : public Driver {
 public:
  // Requires: all outlive this. `trace` may be null.
  ModelDriver(const Setup& setup, const Subject& subject, CallTrace* trace,
              RunResult& result);

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
  void FindPrefix(int seq, const std::vector<int>& ids) override;
  void Shift(int seq, std::int32_t begin, std::int32_t end,
             std::int32_t delta) override;
  void SelectLayer(int layer) override;
  void SelectType(int type) override;
  void Store() override;
  void Read() override;
  void Except(const std::vector<int>& except) override;
  void Cached() override;
  void Misuse(int which) override;
  // Nothing is known about free cells, or about the format of a state.
  void Poison() override {}
  void Reload() override {}

  const reference::Ledger& ledger() const override { return ledger_; }
  bool in_pass() const override { return active_; }
  Place place() const override { return {type_, layer_}; }
  bool over() const override { return over_; }

 private:
  // Records a call before it is made, because it may fail without an answer.
  template <class Call>
  void Begin(const Call& call, bool begins_pass = false) {
    if (trace_ != nullptr) trace_->Begin(Made(call), begins_pass);
  }
  // Adds a step for a call and its answer to the trace, before anything is
  // compared. If `answer` is not empty, the step shows it instead of the code's
  // name.
  void AddStep(const std::string& call, StatusCode code,
               std::string_view answer = {});
  void CheckResult(std::optional<OpKind> kind, const std::string& call,
                   const Status& expected, const Status& actual);
  // `after`: what the cache will hold after the call, without `batch`.
  void CheckRoom(const std::string& call, const reference::Ledger& after,
                 const Tokens& batch) const;
  // Whether tokens may be evicted.
  bool Bounded() const;
  // Returns `seq` and the sequences that share the tokens which a Remove would
  // move; the empty set if it moves no shared token, or may move them.
  std::set<int> SharersOfMoved(int seq, std::int32_t begin,
                               std::int32_t end) const;
  // Returns a sentence on the Remove that moved tokens of this row's sequence,
  // or an empty string.
  std::string MovedText(std::int64_t row) const;
  // Returns a sentence on the answer of CanResume that promised a token which
  // this row does not see, or an empty string.
  std::string PromiseText(std::int64_t row,
                          const reference::LedgerToken& token) const;
  void CheckView();
  void CheckShapes(int layer, const KvView& view);
  void CheckAttention(int layer, const KvView& view);
  // Asks the cache for the attention of the current layer, and judges it.
  void CheckOutput();
  void GoTo(int layer);
  // The rows that a pass puts: each token has its own.
  struct NumberedRows {
    std::int64_t first = 0;             // The number of the first token.
    std::vector<std::int64_t> serials;  // Unless they are consecutive.
    Tokens batch;
    int pass = 0;
    int layer = kAllLayers;
    bool put = false;
  };
  static constexpr int kAllLayers = -1;

  void NewRows(int layer = kAllLayers);
  // Returns the rows of the current layer.
  TensorView Fill(const NumberedRows& rows, RowRole role,
                  RowBuffer& buffer) const;
  void PutRows();
  // Names the former token whose rows a column has, if they were ever put.
  FormerRows FormerRowsOf(const KvView& view, std::int64_t column) const;
  std::vector<int> IndicesOf(const std::vector<int>& except) const;
  void ExceptActive(const std::vector<int>& indices);
  bool fresh() const { return At(fresh_, type_); }
  void SetType(int type);
  void DrawCellsNow();
  bool IsEncoder() const { return ledger_.active().encoder(); }
  void HashInt(std::int64_t value);

  const Setup& setup_;
  const Subject& subject_;
  CallTrace* trace_;
  RunResult& result_;
  const bool wrapper_ = IsWrapper(setup_.spec.kind);

  // Whether a Remove changes K rows: rounding may then change a NaN.
  const bool shifts_;
  reference::Ledger ledger_;
  std::unique_ptr<Cache> tested_;
  Tokens batch_;
  bool active_ = false;
  // A prompt came after the last batch, or the cache refused a batch by other
  // rules than ours: a backend may still have the pass.
  bool pass_is_open_ = false;
  bool over_ = false;
  bool reserving_ = false;
  std::bitset<kCachesMost> fresh_;  // By cache: the ledger can judge the mask.
  bool copied_ = false;             // CopyPrefix was called in this pass.
  // By sequence: the last Remove that moved its shared tokens. Only a cache
  // that copies rows can allow it (S32).
  std::map<int, std::string> moved_;
  // A yes of CanResume to a sequence whose tokens may have been evicted: the
  // tokens that its next batch needs are stored (S28).
  struct Promise {
    std::string call;
    std::int32_t before = 0;  // Its tokens before this position are meant.
    // The caches that may have evicted tokens, by their number in a wrapper.
    std::bitset<kCachesMost> caches = {};
  };
  std::map<int, Promise> promises_;  // By sequence.
  // The FindPrefix that began a sequence, and the number of tokens it found.
  struct FoundPrefix {
    std::string call;
    std::int32_t length = 0;
  };
  std::map<int, FoundPrefix> found_;  // By sequence.
  int type_ = 0;
  bool type_is_sure_ = true;  // Not after a refused batch, which may reset it.
  int layer_ = 0;
  std::int64_t serial_ = 0;
  int pass_ = 0;
  std::vector<NumberedRows> rows_;  // The last ones are put.
  // The serials of prefixes, because rows of equal prefixes are equal (F3).
  std::map<int, std::int64_t> prefix_serials_;
  std::set<Place> put_;
  // The last questions, by place, at the level `attention`.
  std::map<Place, AttentionQuestion> questions_;
  RowBuffer keys_;
  RowBuffer values_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_MODEL_DRIVER_H_
