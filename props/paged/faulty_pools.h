// Pools with injected faults, for tests that each comparison finds the fault
// that no other comparison can find. For caches see
// props/testing/faulty_twins.h.

#ifndef KVTWIN_PROPS_PAGED_FAULTY_POOLS_H_
#define KVTWIN_PROPS_PAGED_FAULTY_POOLS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/base/forwarding_pool.h"
#include "props/paged/paged_runner.h"

namespace kvtwin::props {

// The faults to inject into a pool. Members that are not set inject nothing.
struct Wrong {
  std::string call = {};  // Returns `with` in place of ok.
  Status with = {StatusCode::kCacheFull, "so it is"};
  bool throws = false;                  // `call` throws.
  std::optional<Status> refusal = {};   // Replaces every refusal.
  std::function<int(int)> number = {};  // Changes the answer of `call`.
  std::function<int(int)> len = {};     // Changes what Fork and Truncate keep.
  std::function<void(std::vector<PagedView>&)> views = {};
  std::function<void(std::vector<PagedView>&)> packed = {};
  std::function<void(PagedAppend&)> append = {};
  std::function<void(std::optional<PagedKv>&)> whole = {};
  std::function<void(PagedCsr&)> csr = {};
  std::function<void(PagedTable&)> table = {};
  std::function<void(PagedTable&)> layer_table = {};
  std::function<void(std::vector<std::int64_t>&)> slots = {};
  std::function<void(PagedKv&)> blocks = {};
  bool later_slots_only = false;  // Keep ranges from position 0.
  // This call, of a pool and of its groups, takes the sequences in ascending
  // order: "ExportCsr".
  std::string sorts = {};
  std::vector<int> Taken(std::string_view of_call,
                         std::span<const int> asked) const {
    std::vector<int> sequences(asked.begin(), asked.end());
    if (sorts == of_call) std::ranges::sort(sequences);
    return sequences;
  }
  std::function<void(PagedUsage&)> usage = {};
  // Changes the usage of a pool with groups, and leaves that of each group.
  std::function<void(PagedUsage&)> usage_of_all = {};
  bool refusals_cost = false;  // Each uses up a block in Usage.
  // Gets the sequences and layers that Views is asked for.
  std::set<std::pair<int, int>>* viewed = nullptr;
};

class WrongPool final : public ForwardingPool {
 public:
  WrongPool(std::unique_ptr<PagedPool> pool, Wrong wrong)
      : ForwardingPool(std::move(pool)), wrong_(std::move(wrong)) {
    for (int group = 0; group < Size(spec().groups); ++group) {
      groups_.push_back(
          std::make_unique<WrongGroup>(*pool_->Group(group), wrong_));
    }
  }

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return Number("Open", pool_->Open(prompt, key));
  }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    return Number("Find", pool_->Find(prompt, key));
  }
  Result<int> ResumeBefore(int sequence, int len) const override {
    return Number("ResumeBefore", pool_->ResumeBefore(sequence, len));
  }
  Result<int> Fork(int sequence, int len) override {
    return Number("Fork", pool_->Fork(sequence, Kept(len)));
  }
  Result<int> SeqLen(int sequence) const override {
    return Number("SeqLen", pool_->SeqLen(sequence));
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    return Changed("Append", pool_->Append(sequence, layer, key, value),
                   wrong_.append);
  }
  Status Commit(int sequence, int new_tokens) override {
    return Said("CommitUnknown", pool_->Commit(sequence, new_tokens));
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    return Said("Commit", pool_->Commit(sequence, tokens));
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    if (wrong_.viewed != nullptr) wrong_.viewed->insert({sequence, layer});
    return Changed("Views", pool_->Views(sequence, layer), wrong_.views);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return Changed("ViewsPacked", pool_->ViewsPacked(sequence, layer),
                   wrong_.packed);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return Changed("ContiguousKV", pool_->ContiguousKV(sequence, layer, kv_len),
                   wrong_.whole);
  }
  Status Truncate(int sequence, int len) override {
    return Said("Truncate", pool_->Truncate(sequence, Kept(len)));
  }
  Status Free(int sequence) override {
    return Said("Free", pool_->Free(sequence));
  }
  PagedUsage Usage() const override {
    PagedUsage usage = pool_->Usage();
    if (wrong_.usage) wrong_.usage(usage);
    if (wrong_.usage_of_all) wrong_.usage_of_all(usage);
    if (wrong_.refusals_cost) {
      usage.free -= refused_;
      usage.cached += refused_;
    }
    return usage;
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    const auto taken = wrong_.Taken("ExportCsr", sequences);
    return Changed("ExportCsr", pool_->ExportCsr(taken), wrong_.csr);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    const auto taken = wrong_.Taken("ExportTable", sequences);
    return Changed("ExportTable", pool_->ExportTable(taken), wrong_.table);
  }
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override {
    return Changed("ExportLayerTable",
                   pool_->ExportLayerTable(sequences, layer),
                   wrong_.layer_table);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    auto slots = pool_->SlotMapping(sequence, begin, end);
    if (begin == 0 && wrong_.later_slots_only) return slots;
    return Changed("SlotMapping", std::move(slots), wrong_.slots);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return Changed("Blocks", pool_->Blocks(layer), wrong_.blocks);
  }
  const PagedPool* Group(int group) const override {
    const bool exists = group >= 0 && group < Size(groups_);
    return exists ? At(groups_, group).get() : ForwardingPool::Group(group);
  }

 private:
  // Has the faults of a group's own answers.
  class WrongGroup final : public ForwardingGroup {
   public:
    WrongGroup(const PagedPool& group, const Wrong& wrong)
        : ForwardingGroup(group), wrong_(wrong) {}

    PagedUsage Usage() const override {
      PagedUsage usage = reads_.Usage();
      if (wrong_.usage) wrong_.usage(usage);
      return usage;
    }
    Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
      const auto taken = wrong_.Taken("ExportCsr", sequences);
      return Changed(reads_.ExportCsr(taken), wrong_.csr);
    }
    Result<PagedTable> ExportTable(
        std::span<const int> sequences) const override {
      const auto taken = wrong_.Taken("ExportTable", sequences);
      return Changed(reads_.ExportTable(taken), wrong_.table);
    }
    Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                  int end) const override {
      return Changed(reads_.SlotMapping(sequence, begin, end), wrong_.slots);
    }

   private:
    template <class T>
    static Result<T> Changed(Result<T> answer,
                             const std::function<void(T&)>& change) {
      if (answer.ok() && change) change(*answer);
      return answer;
    }

    const Wrong& wrong_;
  };

  int Kept(int len) const { return wrong_.len ? wrong_.len(len) : len; }
  Status Said(std::string_view call, Status status) const {
    if (!status.ok()) {
      refused_ += status.code() == StatusCode::kCacheFull ||
                          status.code() == StatusCode::kInvalidArgument
                      ? 1
                      : 0;
      return wrong_.refusal.value_or(status);
    }
    if (call != wrong_.call || wrong_.number) return status;
    if (wrong_.throws) throw std::out_of_range("no such block");
    return wrong_.with;
  }
  Result<int> Number(std::string_view call, Result<int> number) const {
    Status status = Said(call, number.status());
    if (!status.ok()) return status;
    return call == wrong_.call && wrong_.number ? wrong_.number(*number)
                                                : *number;
  }
  template <class T>
  Result<T> Changed(std::string_view call, Result<T> answer,
                    const std::function<void(T&)>& change) const {
    Status status = Said(call, answer.status());
    if (!status.ok()) return status;
    if (change) change(*answer);
    return answer;
  }

  const Wrong wrong_;
  mutable int refused_ = 0;
  std::vector<std::unique_ptr<WrongGroup>> groups_;
};

// The pools that have the fault.
enum class WrongIn { kOptimized, kReference, kBoth };

struct PoolCase {
  std::string name;
  std::string history;  // Without "kvp1 ".
  Wrong wrong;
  std::string text;  // Part of the expected failure.
  WrongIn who = WrongIn::kOptimized;
};

// Makes the pools of a history, some of which have the fault.
inline PagedMaker WrongPools(const Wrong& wrong, WrongIn who) {
  return [=](const PagedSpec& spec,
             std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = MakePagedPool(spec, twin);
    const bool is_reference = twin == "reference";
    const bool meant =
        who == WrongIn::kBoth || is_reference == (who == WrongIn::kReference);
    if (!pool.ok() || !meant) return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<WrongPool>(std::move(*pool), wrong));
  };
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_FAULTY_POOLS_H_
