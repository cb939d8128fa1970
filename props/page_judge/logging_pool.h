// A pool that writes down each call for the judge of pages, in the words of
// recordings (docs/trace_format.md). The judge does not rely on PoolLog, from
// which pages are made.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_LOGGING_POOL_H_
#define KVTWIN_PROPS_PAGE_JUDGE_LOGGING_POOL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvtwin/status.h"
#include "props/base/forwarding_pool.h"

namespace kvtwin::props {

class LoggingPool final : public ForwardingPool {
 public:
  using Json = nlohmann::json;

  // The log gets an object for each call, with "status" if the call returned.
  // Requires: `log`, which is cleared, outlives the pool.
  LoggingPool(std::unique_ptr<PagedPool> pool, std::vector<Json>& log)
      : ForwardingPool(std::move(pool)), log_(log) {
    log_.clear();
    for (const PagedSpec& group : spec().groups) {
      const auto number = static_cast<int>(&group - spec().groups.data());
      groups_.push_back(
          std::make_unique<LoggingGroup>(*pool_->Group(number), *this, number));
    }
  }

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    std::vector<int> media_at;
    for (const PrefixMedia& media : key.media) {
      media_at.push_back(media.position);
    }
    Note("open", {{"prompt", prompt}, {"media_at", media_at}});
    return Opened(ForwardingPool::Open(prompt, key));
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    Note("media", {{"seq", sequence}, {"at", media.position}});
    return Said(ForwardingPool::AddMedia(sequence, media));
  }
  Result<int> Fork(int sequence, int len) override {
    Note("fork", {{"seq", sequence}, {"len", len}});
    return Opened(ForwardingPool::Fork(sequence, len));
  }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    Note("find", Json::object());
    return Said(ForwardingPool::Find(prompt, key));
  }
  Result<int> ResumeBefore(int sequence, int len) const override {
    Note("resume_before", {{"seq", sequence}});
    return Said(ForwardingPool::ResumeBefore(sequence, len));
  }
  Result<int> SeqLen(int sequence) const override {
    Note("seq_len", {{"seq", sequence}});
    const Result<int> len = Said(ForwardingPool::SeqLen(sequence));
    const auto open =
        std::find_if(log_.rbegin(), log_.rend(),
                     [](const Json& call) { return call["op"] == "open"; });
    // How many tokens of its prompt a sequence has is asked after Open.
    const bool is_new = open != log_.rend() && !open->contains("len") &&
                        open->value("result", -1) == sequence;
    if (is_new && len.ok()) (*open)["len"] = *len;
    return len;
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    Note("append", {{"seq", sequence}, {"layer", layer}});
    log_.back()["key"]["shape"] = {key.shape[0], key.shape[1], key.shape[2]};
    return Said(ForwardingPool::Append(sequence, layer, key, value));
  }
  Status Commit(int sequence, int new_tokens) override {
    Note("commit", {{"seq", sequence}, {"new_tokens", new_tokens}});
    return Said(ForwardingPool::Commit(sequence, new_tokens));
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    Note("commit", {{"seq", sequence}, {"tokens", tokens}});
    return Said(ForwardingPool::Commit(sequence, tokens));
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    Note("views", {{"seq", sequence}, {"layer", layer}});
    return Said(ForwardingPool::Views(sequence, layer));
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    Note("views_packed", {{"seq", sequence}, {"layer", layer}});
    return Said(ForwardingPool::ViewsPacked(sequence, layer));
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    Note("contiguous_kv", {{"seq", sequence}, {"layer", layer}});
    return Said(ForwardingPool::ContiguousKV(sequence, layer, kv_len));
  }
  Status Truncate(int sequence, int len) override {
    Note("truncate", {{"seq", sequence}, {"len", len}});
    return Said(ForwardingPool::Truncate(sequence, len));
  }
  Status Free(int sequence) override {
    Note("free", {{"seq", sequence}});
    return Said(ForwardingPool::Free(sequence));
  }
  PagedUsage Usage() const override {
    Note("usage", Json::object());
    return ForwardingPool::Usage();
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    Note("csr", Json::object());
    return Said(ForwardingPool::ExportCsr(sequences));
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    Note("table", Json::object());
    return Said(ForwardingPool::ExportTable(sequences));
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    Note("slots", {{"seq", sequence}});
    return Said(ForwardingPool::SlotMapping(sequence, begin, end));
  }
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override {
    Note("layer_table", {{"layer", layer}});
    return Said(ForwardingPool::ExportLayerTable(sequences, layer));
  }
  Result<PagedKv> Blocks(int layer) const override {
    Note("blocks", {{"layer", layer}});
    return Said(ForwardingPool::Blocks(layer));
  }
  const PagedPool* Group(int group) const override {
    const bool exists = group >= 0 && group < std::ssize(groups_);
    return exists ? groups_[static_cast<std::size_t>(group)].get()
                  : ForwardingPool::Group(group);
  }

 private:
  // Writes down the calls that a group gets.
  class LoggingGroup final : public ForwardingGroup {
   public:
    LoggingGroup(const PagedPool& group, const LoggingPool& pool, int number)
        : ForwardingGroup(group), pool_(pool), number_(number) {}

    PagedUsage Usage() const override {
      pool_.Note("usage", {{"group", number_}});
      return reads_.Usage();
    }
    Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
      pool_.Note("csr", {{"group", number_}});
      return pool_.Said(reads_.ExportCsr(sequences));
    }
    Result<PagedTable> ExportTable(
        std::span<const int> sequences) const override {
      pool_.Note("table", {{"group", number_}});
      return pool_.Said(reads_.ExportTable(sequences));
    }
    Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                  int end) const override {
      pool_.Note("slots", {{"seq", sequence}, {"group", number_}});
      return pool_.Said(reads_.SlotMapping(sequence, begin, end));
    }

   private:
    const LoggingPool& pool_;
    const int number_;
  };

  void Note(const char* name, Json call) const {
    call["op"] = name;
    log_.push_back(std::move(call));
  }
  // Writes down how the last call was answered.
  Status Said(Status status) const {
    log_.back()["status"] = StatusName(status.code());
    return status;
  }
  template <class T>
  Result<T> Said(Result<T> answer) const {
    (void)Said(answer.status());
    return answer;
  }
  Result<int> Opened(Result<int> made) {
    if (made.ok()) log_.back()["result"] = *made;
    return Said(std::move(made));
  }

  std::vector<Json>& log_;
  std::vector<std::unique_ptr<LoggingGroup>> groups_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_LOGGING_POOL_H_
