#include "core/grouped_pool.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/assert.h"
#include "core/index.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

Status NoTables(std::string_view call) {
  return {StatusCode::kNotSupported,
          fmt::format("{}: a pool with groups has tables by group", call)};
}

}  // namespace

GroupedPool::GroupedPool(const PagedSpec& spec, Groups groups)
    : spec_(Completed(spec)), groups_(std::move(groups)) {
  KVTWIN_ASSERT(!groups_.empty() && groups_.size() == spec_.groups.size());
}

Result<GroupedPool::Place> GroupedPool::Find(int layer) const {
  if (layer < 0 || layer >= spec_.layers) {
    return Invalid("layer is {}, it must be 0 to {}", layer, spec_.layers - 1);
  }
  const int group = GroupOf(spec_, layer);
  return Place{At(groups_, group).get(), layer};
}

Result<GroupedPool::Place> GroupedPool::Find(int sequence, int layer) const {
  if (Status status = SeqLen(sequence).status(); !status.ok()) return status;
  return Find(layer);
}

Result<int> GroupedPool::Find(std::span<const std::int32_t> prompt,
                              const PrefixKey& key) const {
  Status status = GuardedPaged::CheckPrompt(prompt, key);
  if (!status.ok()) return status;
  return DoFind(prompt, key);
}

// With one token more, each group begins with exactly these tokens (P1).
Result<int> GroupedPool::Open(std::span<const std::int32_t> prompt,
                              const PrefixKey& key) {
  const Result<int> found = Find(prompt, key);
  if (!found.ok()) return found;
  const auto known = prompt.first(std::min(prompt.size(), AsSize(*found) + 1));
  std::optional<int> opened;
  for (const auto& group : groups_) {
    const Result<int> number = group->Open(known, key);
    KVTWIN_ASSERT(number.ok() && *number == opened.value_or(*number));
    KVTWIN_ASSERT(*group->SeqLen(*number) == *found);
    opened = *number;
  }
  return *opened;
}

Status GroupedPool::AddMedia(int sequence, const PrefixMedia& media) {
  for (const auto& group : groups_) {
    Status status = group->AddMedia(sequence, media);
    if (!status.ok()) return status;  // The first group refuses.
  }
  return {};
}

Result<int> GroupedPool::ResumeBefore(int sequence, int len) const {
  const Result<int> first = groups_[0]->ResumeBefore(sequence, len);
  if (!first.ok()) return first;
  return DoResumeBefore(sequence, len);
}

Result<int> GroupedPool::Fork(int sequence, int len) {
  const Result<int> kept = ResumeBefore(sequence, len);
  if (!kept.ok()) return kept;
  int forked = 0;
  for (const auto& group : groups_) forked = *group->Fork(sequence, *kept);
  return forked;
}

Result<int> GroupedPool::SeqLen(int sequence) const {
  return groups_[0]->SeqLen(sequence);
}

Result<PagedAppend> GroupedPool::Append(int sequence, int layer,
                                        const TensorView& key,
                                        const TensorView& value) {
  const Result<Place> at = Find(sequence, layer);
  if (!at.ok()) return at.status();
  return at->group->Append(sequence, at->layer, key, value);
}

Status GroupedPool::CheckCommit(int sequence, std::int64_t new_tokens) const {
  for (const auto& group : groups_) {
    Status status = group->CheckCommit(sequence, new_tokens);
    if (!status.ok()) return status;
  }
  return {};
}

Status GroupedPool::Commit(int sequence, int new_tokens) {
  Status status = CheckCommit(sequence, new_tokens);
  if (!status.ok()) return status;
  for (const auto& group : groups_) {
    status = group->Commit(sequence, new_tokens);
    KVTWIN_ASSERT(status.ok());
  }
  return status;
}

Status GroupedPool::Commit(int sequence, std::span<const std::int32_t> tokens) {
  Status status = CheckCommit(sequence, std::ssize(tokens));
  if (status.ok()) status = GuardedPaged::CheckTokens(tokens);
  if (!status.ok()) return status;
  for (const auto& group : groups_) {
    status = group->Commit(sequence, tokens);
    KVTWIN_ASSERT(status.ok());
  }
  return status;
}

Result<std::vector<PagedView>> GroupedPool::Views(int sequence,
                                                  int layer) const {
  const Result<Place> at = Find(sequence, layer);
  if (!at.ok()) return at.status();
  return at->group->Views(sequence, at->layer);
}

Result<std::vector<PagedView>> GroupedPool::ViewsPacked(int sequence,
                                                        int layer) const {
  const Result<Place> at = Find(sequence, layer);
  if (!at.ok()) return at.status();
  return at->group->ViewsPacked(sequence, at->layer);
}

Result<std::optional<PagedKv>> GroupedPool::ContiguousKV(int sequence,
                                                         int layer,
                                                         int kv_len) const {
  const Result<Place> at = Find(sequence, layer);
  if (!at.ok()) return at.status();
  return at->group->ContiguousKV(sequence, at->layer, kv_len);
}

Status GroupedPool::Truncate(int sequence, int len) {
  const Result<int> kept = ResumeBefore(sequence, len);
  if (!kept.ok()) return kept.status();
  for (const auto& group : groups_) {
    const Status status = group->Truncate(sequence, *kept);
    KVTWIN_ASSERT(status.ok());
  }
  return {};
}

Status GroupedPool::Free(int sequence) {
  for (const auto& group : groups_) {
    Status status = group->Free(sequence);
    if (!status.ok()) return status;  // The first group refuses.
  }
  return {};
}

Result<Device> GroupedPool::LayerDevice(int layer) const {
  const Result<Place> at = Find(layer);
  if (!at.ok()) return at.status();
  return at->group->LayerDevice(at->layer);
}

PagedUsage GroupedPool::Usage() const {
  PagedUsage all;
  for (const auto& group : groups_) {
    const PagedUsage usage = group->Usage();
    all.free += usage.free;
    all.cached += usage.cached;
    all.used += usage.used;
    all.shared += usage.shared;
  }
  return all;
}

const PagedPool* GroupedPool::Group(int group) const {
  const bool exists = group >= 0 && group < Size(groups_);
  return exists ? At(groups_, group).get() : nullptr;
}

Result<PagedCsr> GroupedPool::ExportCsr(std::span<const int>) const {
  return NoTables("ExportCsr");
}

Result<PagedTable> GroupedPool::ExportTable(std::span<const int>) const {
  return NoTables("ExportTable");
}

Result<PagedTable> GroupedPool::ExportLayerTable(std::span<const int> sequences,
                                                 int layer) const {
  const Result<Place> at = Find(layer);
  if (!at.ok()) return at.status();
  return at->group->ExportLayerTable(sequences, at->layer);
}

Result<std::vector<std::int64_t>> GroupedPool::SlotMapping(int, int,
                                                           int) const {
  return NoTables("SlotMapping");
}

Result<PagedKv> GroupedPool::Blocks(int layer) const {
  const Result<Place> at = Find(layer);
  if (!at.ok()) return at.status();
  return at->group->Blocks(at->layer);
}

}  // namespace kvtwin
