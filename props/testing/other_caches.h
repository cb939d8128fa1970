// Correct caches for the rules of each profile, written independently of the
// ledger and the twins: each keeps its tokens in another way, and makes a
// random choice where its profile leaves one open. The harness must find
// nothing in them, and must find the faults that are planted in them.

#ifndef KVTWIN_PROPS_TESTING_OTHER_CACHES_H_
#define KVTWIN_PROPS_TESTING_OTHER_CACHES_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "props/base/optional_calls.h"
#include "props/compare/runner.h"

namespace kvtwin::props {

// The fault that is planted.
enum class CacheFault {
  kNone,
  kShortWindow,     // A window's oldest position is hidden.
  kLongWindow,      // One position past the window is seen.
  kSeesTheFuture,   // A row also sees the next position.
  kMixesRows,       // Two columns of four or more swap their V.
  kKeepsRemoved,    // The first removed token stays.
  kCopiesShort,     // The last token of a copy is missing.
  kForgetsTheTurn,  // A token moves without its K shift.
  kTakesAnyBatch,   // Positions that do not follow are taken.
  kAlwaysResumes,   // can_resume is always true.
  kFullTooEarly,    // cache_full, with room for a token.
  kSeesOthers,      // Rows see others at their position.
  kEvictsTooMuch,   // One position more than the memory allows.
  // A batch evicts only in its own sequences, which is right by lazy eviction.
  // Only caches of lists (ollama's) have this fault.
  kEvictsItsOwn,
  // A ring has room for batches of up to four tokens, and loses tokens of
  // longer batches. Only caches of rings (executorch's) have this fault.
  kShortRing,
};
// The faults that the rules of every profile exclude.
inline constexpr std::array kFaults = {
    CacheFault::kShortWindow,    CacheFault::kLongWindow,
    CacheFault::kSeesTheFuture,  CacheFault::kMixesRows,
    CacheFault::kKeepsRemoved,   CacheFault::kCopiesShort,
    CacheFault::kForgetsTheTurn, CacheFault::kTakesAnyBatch,
    CacheFault::kAlwaysResumes,  CacheFault::kFullTooEarly,
    CacheFault::kSeesOthers,     CacheFault::kEvictsTooMuch};

// The rows of a token, by layer.
using OtherRows = std::map<int, KvRows>;

// The part that all these caches share: drawn choices, rows, and views. Each
// family keeps its tokens in its own way, and by its own rules.
class OtherCache : public Cache, public Shifting {
 public:
  OtherCache(const CacheSpec& spec, std::uint64_t choices, CacheFault fault)
      : spec_(spec), random_(choices), fault_(fault) {}

  Status SetConfig(const CacheConfig& config) override;
  Status Init(const InitArgs& args) override;
  void Close() override {}
  Status SetLayer(int layer) override;
  Status StartForward(const Batch& batch, bool reserve) override;
  Status SetCausal(std::span<const int> except) override;
  Status Put(const TensorView& key, const TensorView& value) override;
  Result<KvView> Get() override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override;
  Result<bool> CanResume(int seq, std::int32_t pos) override;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override;
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) override;
  Status SetLayerType(int) override;
  Cache* UnderlyingCache() override { return this; }
  Result<bool> EncoderCached() override;
  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

  // The answer to a call, and its effect once the answer is ok: a wrapper asks
  // all of its caches first.
  Status BatchAnswer(const Batch& batch) const;
  void Begin(const Batch& batch);
  virtual Status RemoveAnswer(int seq, std::int64_t begin,
                              std::int64_t end) const = 0;
  virtual void DoRemove(int seq, std::int64_t begin, std::int64_t end) = 0;
  virtual Status CopyAnswer(int src, int dst, std::int32_t len) const;
  virtual void DoCopy(int src, int dst, std::int32_t len) = 0;
  virtual Status ShiftAnswer() const;
  virtual void DoShift(int, std::int64_t, std::int64_t, std::int32_t) {}
  bool Resumes(int seq, std::int32_t pos) const;

 protected:
  struct Item {
    std::int64_t position = 0;
    std::shared_ptr<OtherRows> rows;
  };
  struct Row {  // A token of the batch.
    std::int64_t position = 0;
    int sequence = 0;
    bool excepted = false;
  };
  struct Stored {
    Item item;
    int sequence = 0;
  };

  virtual bool WindowCountsQuery() const { return true; }
  virtual bool KeepsTheFirst() const { return false; }
  // Whether a batch may continue the sequence at this position.
  virtual bool GoesOn(int seq, std::int64_t position) const = 0;
  // Evicts tokens, if need be, before a batch is stored.
  virtual void MakeRoom(const Batch& batch) = 0;
  virtual std::shared_ptr<OtherRows> Store(int seq, std::int64_t position) = 0;
  // All stored tokens, once for each sequence that holds them.
  virtual std::vector<Stored> All() const = 0;
  virtual bool StillHas(int seq, std::int32_t pos) const = 0;
  virtual bool InWindow(const Row& row, const Stored& token) const;

  bool Coin() { return Draw(2) == 0; }
  int Draw(int count);
  bool Is(CacheFault fault) const { return fault_ == fault; }
  // The lowest position of each sequence in the batch.
  static std::map<int, std::int64_t> Lows(const Batch& batch);
  Status Turn(std::int32_t delta, OtherRows& rows) const;
  // Whether `more` tokens of each sequence fit, none above position `last`, if
  // the tokens of `replaced` leave.
  bool HasRoom(const std::map<int, std::int64_t>& more, std::int64_t last,
               int replaced = -1) const;
  // How many positions before its next one a sequence keeps.
  std::int64_t Kept() const {
    return *keep_ - (Is(CacheFault::kEvictsTooMuch) ? 1 : 0);
  }
  // How far a row sees.
  std::int64_t Seen() const {
    return *reach_ - (Is(CacheFault::kShortWindow) ? 1 : 0) +
           (Is(CacheFault::kLongWindow) ? 1 : 0);
  }

  CacheSpec spec_;
  CacheConfig config_;
  InitArgs args_;
  std::optional<std::int64_t> reach_;  // A row sees this many before its own.
  std::optional<std::int64_t> keep_;   // Positions kept before the next one.
  // Drawn by Init.
  bool shares_ = false;      // Copies share their rows.
  bool takes_tail_ = false;  // May remove [2, 5) of 5 tokens.
  bool tight_ = false;       // Refuses where it may.
  int says_no_ = 0;          // can_resume: never, sometimes, always.

 private:
  struct Column {
    const KvRows* rows = nullptr;
    std::vector<bool> seen;
  };
  bool Sees(const Row& row, const Stored& token) const;
  std::vector<Column> Columns();
  void AddNoise(std::vector<Column>& columns);
  TensorView Gather(const std::vector<Column>& columns,
                    DenseTensor KvRows::*part, std::vector<std::byte>& bytes);

  std::uint64_t random_;
  CacheFault fault_;
  bool shuffles_ = false;
  int noise_ = 0;       // Hidden columns.
  int extra_rows_ = 0;  // In the mask.
  int gap_ = 0;         // Bytes between columns.
  int layer_ = 0;
  bool in_pass_ = false;
  std::vector<Row> batch_;
  std::vector<std::shared_ptr<OtherRows>> batch_rows_;
  std::map<int, KvRows> garbage_;  // By layer, with the layer's dimensions.
  // The bytes of the current view.
  std::vector<std::byte> key_;
  std::vector<std::byte> value_;
  std::vector<float> mask_;
};

// Makes a cache of a profile, also a wrapper; `choices` seeds its choices.
std::unique_ptr<Cache> MakeOtherCache(std::string_view profile,
                                      const CacheSpec& spec,
                                      std::uint64_t choices, CacheFault fault);

// These caches with their abilities, driven live. `any_order`: calls may come
// in any order; otherwise they come from legal clients only.
Subject OtherSubject(std::string_view profile, std::uint64_t choices,
                     bool any_order, CacheFault fault = CacheFault::kNone);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_OTHER_CACHES_H_
