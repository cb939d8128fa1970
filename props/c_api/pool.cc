#include <algorithm>
#include <cstddef>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

namespace {

// Calls `call` with the pool, if there is one.
template <class Call>
kvtwin_status OnPool(kvtwin_pool* pool, const Call& call) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"pool", pool}});
    return status.ok() ? call(*pool->pool) : status;
  });
}

// Does the same with `ask`, whose answer goes to *number.
template <class Ask>
kvtwin_status AskPool(kvtwin_pool* pool, std::string_view name,
                      std::int32_t* number, const Ask& ask) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    Status status = NeedAll({{name, number}});
    if (!status.ok()) return status;
    const Result<int> answer = ask(target);
    if (answer.ok()) *number = *answer;
    return answer.status();
  });
}

struct Prompt {
  std::span<const std::int32_t> tokens;
  PrefixKey key;
};

Result<Prompt> PromptFromC(const kvtwin_prompt* from) {
  Prompt prompt;
  if (from == nullptr) return prompt;
  kvtwin_prompt read{};
  Status status = ReadStruct("prompt", from, read);
  if (!status.ok()) return status;
  const auto tokens = ListFromC("prompt.tokens", read.tokens, read.token_count);
  if (!tokens.ok()) return tokens.status();
  const auto extra = ListFromC("prompt.extra", read.extra, read.extra_count);
  if (!extra.ok()) return extra.status();
  prompt.tokens = *tokens;
  prompt.key.salt = TextOf(read.salt);
  for (const char* text : *extra) {
    status = NeedAll({{"a text of prompt.extra", text}});
    if (!status.ok()) return status;
    prompt.key.extra.emplace_back(text);
  }
  const auto media = ListFromC("prompt.media", read.media, read.media_count);
  if (!media.ok()) return media.status();
  for (const kvtwin_media& one : *media) {
    status = NeedAll({{"a hash of prompt.media", one.hash}});
    if (!status.ok()) return status;
    prompt.key.media.push_back({one.position, one.hash});
  }
  return prompt;
}

kvtwin_paged_view CPagedView(const PagedView& view) {
  kvtwin_paged_view made{};
  made.key = CTensor(view.key);
  made.value = CTensor(view.value);
  made.start = view.start;
  made.length = view.length;
  made.block = view.block;
  return made;
}

void WriteViews(const std::vector<PagedView>& from, kvtwin_paged_view* views,
                std::size_t room, std::size_t* count) {
  *count = from.size();
  std::transform(from.begin(), IteratorAt(from, std::min(room, from.size())),
                 views, CPagedView);
}

using ViewsFn = Result<std::vector<PagedView>> (PagedPool::*)(int, int) const;

kvtwin_status ViewsBy(ViewsFn ask, kvtwin_pool* pool, int sequence, int layer,
                      kvtwin_paged_view* views, std::size_t room,
                      std::size_t* count) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    Status status = CheckList("views", views, room, count);
    if (!status.ok()) return status;
    const auto answer = (target.*ask)(sequence, layer);
    if (answer.ok()) WriteViews(*answer, views, room, count);
    return answer.status();
  });
}

// Calls `call` with a group of the pool, or with the pool itself.
template <class Call>
kvtwin_status OnGroup(kvtwin_pool* pool, std::optional<int> group,
                      const Call& call) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    const PagedPool* const of = group ? target.Group(*group) : &target;
    return of == nullptr ? NoSuchGroup(target.spec(), *group) : call(*of);
  });
}

kvtwin_status UsageOf(kvtwin_pool* pool, std::optional<int> group,
                      kvtwin_usage* usage) {
  return OnGroup(pool, group, [&](const PagedPool& target) -> Status {
    const auto size = SizeOfStruct("usage", usage, sizeof(kvtwin_usage));
    if (!size.ok()) return size.status();
    const PagedUsage answer = target.Usage();
    WriteStruct(
        kvtwin_usage{0, answer.free, answer.cached, answer.used, answer.shared},
        usage);
    return {};
  });
}

// Writes the table that `table_of` makes of the listed sequences.
template <class TableOf>
Status WriteTable(const int32_t* sequences, size_t sequence_count,
                  int32_t* columns, int32_t* blocks, size_t room, size_t* count,
                  int32_t* seq_lens, const TableOf& table_of) {
  const auto list = ListFromC("sequences", sequences, sequence_count);
  if (!list.ok()) return list.status();
  Status status = CheckList("blocks", blocks, room, count);
  if (status.ok()) status = NeedAll({{"columns", columns}});
  if (status.ok()) {
    status = CheckList("seq_lens", seq_lens, sequence_count, count);
  }
  if (!status.ok()) return status;
  const Result<PagedTable> answer = table_of(*list);
  if (!answer.ok()) return answer.status();
  *columns = answer->columns;
  WriteList(answer->blocks, blocks, room, count);
  std::copy(answer->seq_lens.begin(), answer->seq_lens.end(), seq_lens);
  return {};
}

kvtwin_status TableOf(kvtwin_pool* pool, std::optional<int> group,
                      const int32_t* sequences, size_t sequence_count,
                      int32_t* columns, int32_t* blocks, size_t room,
                      size_t* count, int32_t* seq_lens) {
  return OnGroup(pool, group, [&](const PagedPool& target) {
    return WriteTable(
        sequences, sequence_count, columns, blocks, room, count, seq_lens,
        [&](std::span<const int> list) { return target.ExportTable(list); });
  });
}

kvtwin_status CsrOf(kvtwin_pool* pool, std::optional<int> group,
                    const int32_t* sequences, size_t sequence_count,
                    int32_t* indptr, int32_t* indices, size_t room,
                    size_t* count, int32_t* last_page_len) {
  return OnGroup(pool, group, [&](const PagedPool& target) -> Status {
    const auto list = ListFromC("sequences", sequences, sequence_count);
    if (!list.ok()) return list.status();
    Status status = CheckList("indices", indices, room, count);
    if (status.ok()) status = NeedAll({{"indptr", indptr}});
    if (status.ok()) {
      status = CheckList("last_page_len", last_page_len, sequence_count, count);
    }
    if (!status.ok()) return status;
    const Result<PagedCsr> answer = target.ExportCsr(*list);
    if (!answer.ok()) return answer.status();
    std::copy(answer->indptr.begin(), answer->indptr.end(), indptr);
    WriteList(answer->indices, indices, room, count);
    std::copy(answer->last_page_len.begin(), answer->last_page_len.end(),
              last_page_len);
    return {};
  });
}

kvtwin_status SlotsOf(kvtwin_pool* pool, std::optional<int> group,
                      int32_t sequence, int32_t begin, int32_t end,
                      int64_t* slots, size_t room, size_t* count) {
  return OnGroup(pool, group, [&](const PagedPool& target) -> Status {
    Status status = CheckList("slots", slots, room, count);
    if (!status.ok()) return status;
    const auto answer = target.SlotMapping(sequence, begin, end);
    if (answer.ok()) WriteList(*answer, slots, room, count);
    return answer.status();
  });
}

}  // namespace

kvtwin_status kvtwin_pool_default_params(kvtwin_pool_params* params,
                                         size_t size) {
  return Answer([&] {
    return WriteDefaults("params", DefaultPoolParams(), params, size);
  });
}

kvtwin_status kvtwin_pool_create(const kvtwin_pool_params* params,
                                 const char* twin, kvtwin_pool** pool) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"pool", pool}});
    if (!status.ok()) return status;
    const Result<PagedSpec> spec = PagedSpecFromC(params);
    if (!spec.ok()) return spec.status();
    auto made = MakePagedPool(*spec, TextOf(twin, "optimized"));
    if (made.ok()) *pool = new kvtwin_pool{std::move(*made)};
    return made.status();
  });
}

void kvtwin_pool_destroy(kvtwin_pool* pool) { delete pool; }

kvtwin_status kvtwin_pool_open(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* sequence) {
  return AskPool(pool, "sequence", sequence,
                 [&](PagedPool& target) -> Result<int> {
                   const Result<Prompt> read = PromptFromC(prompt);
                   if (!read.ok()) return read.status();
                   return target.Open(read->tokens, read->key);
                 });
}

kvtwin_status kvtwin_pool_find(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* length) {
  return AskPool(pool, "length", length, [&](PagedPool& target) -> Result<int> {
    const Result<Prompt> read = PromptFromC(prompt);
    if (!read.ok()) return read.status();
    return target.Find(read->tokens, read->key);
  });
}

kvtwin_status kvtwin_pool_add_media(kvtwin_pool* pool, int32_t sequence,
                                    const kvtwin_media* media) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    Status status = NeedAll({{"media", media}});
    if (status.ok()) status = NeedAll({{"media.hash", media->hash}});
    if (!status.ok()) return status;
    return target.AddMedia(sequence, {media->position, media->hash});
  });
}

kvtwin_status kvtwin_pool_resume_before(kvtwin_pool* pool, int32_t sequence,
                                        int32_t length, int32_t* resume) {
  return AskPool(pool, "resume", resume, [&](PagedPool& target) {
    return target.ResumeBefore(sequence, length);
  });
}

kvtwin_status kvtwin_pool_fork(kvtwin_pool* pool, int32_t sequence,
                               int32_t length, int32_t* made) {
  return AskPool(pool, "made", made, [&](PagedPool& target) {
    return target.Fork(sequence, length);
  });
}

kvtwin_status kvtwin_pool_seq_len(kvtwin_pool* pool, int32_t sequence,
                                  int32_t* length) {
  return AskPool(pool, "length", length,
                 [&](PagedPool& target) { return target.SeqLen(sequence); });
}

kvtwin_status kvtwin_pool_append(kvtwin_pool* pool, int32_t sequence,
                                 int32_t layer, const kvtwin_tensor* key,
                                 const kvtwin_tensor* value, int32_t* start,
                                 kvtwin_paged_view* views, size_t room,
                                 size_t* count) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    std::size_t not_asked = 0;
    std::size_t* const counted = count == nullptr ? &not_asked : count;
    Status status = CheckList("views", views, room, counted);
    if (!status.ok()) return status;
    const Result<TensorView> k = TensorFromC("key", key);
    if (!k.ok()) return k.status();
    const Result<TensorView> v = TensorFromC("value", value);
    if (!v.ok()) return v.status();
    const auto answer = target.Append(sequence, layer, *k, *v);
    if (!answer.ok()) return answer.status();
    if (start != nullptr) *start = answer->start;
    WriteViews(answer->views, views, room, counted);
    return {};
  });
}

kvtwin_status kvtwin_pool_commit(kvtwin_pool* pool, int32_t sequence,
                                 const int32_t* tokens, size_t count) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    const auto list = ListFromC("tokens", tokens, count);
    return list.ok() ? target.Commit(sequence, *list) : list.status();
  });
}

kvtwin_status kvtwin_pool_commit_unknown(kvtwin_pool* pool, int32_t sequence,
                                         int32_t new_tokens) {
  return OnPool(pool, [&](PagedPool& target) {
    return target.Commit(sequence, new_tokens);
  });
}

kvtwin_status kvtwin_pool_views(kvtwin_pool* pool, int32_t sequence,
                                int32_t layer, kvtwin_paged_view* views,
                                size_t room, size_t* count) {
  return ViewsBy(&PagedPool::Views, pool, sequence, layer, views, room, count);
}

kvtwin_status kvtwin_pool_views_packed(kvtwin_pool* pool, int32_t sequence,
                                       int32_t layer, kvtwin_paged_view* views,
                                       size_t room, size_t* count) {
  return ViewsBy(&PagedPool::ViewsPacked, pool, sequence, layer, views, room,
                 count);
}

kvtwin_status kvtwin_pool_contiguous_kv(kvtwin_pool* pool, int32_t sequence,
                                        int32_t layer, int32_t kv_len,
                                        int32_t* yes, kvtwin_tensor* key,
                                        kvtwin_tensor* value) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    Status status = NeedAll({{"yes", yes}, {"key", key}, {"value", value}});
    if (!status.ok()) return status;
    const auto answer = target.ContiguousKV(sequence, layer, kv_len);
    if (!answer.ok()) return answer.status();
    *yes = answer->has_value() ? 1 : 0;
    if (!answer->has_value()) return {};
    *key = CTensor((*answer)->key);
    *value = CTensor((*answer)->value);
    return {};
  });
}

kvtwin_status kvtwin_pool_truncate(kvtwin_pool* pool, int32_t sequence,
                                   int32_t length) {
  return OnPool(pool, [&](PagedPool& target) {
    return target.Truncate(sequence, length);
  });
}

kvtwin_status kvtwin_pool_free(kvtwin_pool* pool, int32_t sequence) {
  return OnPool(pool, [&](PagedPool& target) { return target.Free(sequence); });
}

kvtwin_status kvtwin_pool_usage(kvtwin_pool* pool, kvtwin_usage* usage) {
  return UsageOf(pool, std::nullopt, usage);
}

kvtwin_status kvtwin_pool_layer_device(kvtwin_pool* pool, int32_t layer,
                                       int32_t* device) {
  return AskPool(pool, "device", device, [&](PagedPool& target) -> Result<int> {
    const Result<Device> answer = target.LayerDevice(layer);
    if (!answer.ok()) return answer.status();
    return AsInt(*answer);
  });
}

kvtwin_status kvtwin_pool_table(kvtwin_pool* pool, const int32_t* sequences,
                                size_t sequence_count, int32_t* columns,
                                int32_t* blocks, size_t room, size_t* count,
                                int32_t* seq_lens) {
  return TableOf(pool, std::nullopt, sequences, sequence_count, columns, blocks,
                 room, count, seq_lens);
}

kvtwin_status kvtwin_pool_csr(kvtwin_pool* pool, const int32_t* sequences,
                              size_t sequence_count, int32_t* indptr,
                              int32_t* indices, size_t room, size_t* count,
                              int32_t* last_page_len) {
  return CsrOf(pool, std::nullopt, sequences, sequence_count, indptr, indices,
               room, count, last_page_len);
}

kvtwin_status kvtwin_pool_slots(kvtwin_pool* pool, int32_t sequence,
                                int32_t begin, int32_t end, int64_t* slots,
                                size_t room, size_t* count) {
  return SlotsOf(pool, std::nullopt, sequence, begin, end, slots, room, count);
}

kvtwin_status kvtwin_pool_group_table(kvtwin_pool* pool, int32_t group,
                                      const int32_t* sequences,
                                      size_t sequence_count, int32_t* columns,
                                      int32_t* blocks, size_t room,
                                      size_t* count, int32_t* seq_lens) {
  return TableOf(pool, group, sequences, sequence_count, columns, blocks, room,
                 count, seq_lens);
}

kvtwin_status kvtwin_pool_group_csr(kvtwin_pool* pool, int32_t group,
                                    const int32_t* sequences,
                                    size_t sequence_count, int32_t* indptr,
                                    int32_t* indices, size_t room,
                                    size_t* count, int32_t* last_page_len) {
  return CsrOf(pool, group, sequences, sequence_count, indptr, indices, room,
               count, last_page_len);
}

kvtwin_status kvtwin_pool_group_slots(kvtwin_pool* pool, int32_t group,
                                      int32_t sequence, int32_t begin,
                                      int32_t end, int64_t* slots, size_t room,
                                      size_t* count) {
  return SlotsOf(pool, group, sequence, begin, end, slots, room, count);
}

kvtwin_status kvtwin_pool_group_usage(kvtwin_pool* pool, int32_t group,
                                      kvtwin_usage* usage) {
  return UsageOf(pool, group, usage);
}

kvtwin_status kvtwin_pool_layer_table(kvtwin_pool* pool, int32_t layer,
                                      const int32_t* sequences,
                                      size_t sequence_count, int32_t* columns,
                                      int32_t* blocks, size_t room,
                                      size_t* count, int32_t* seq_lens) {
  return OnPool(pool, [&](PagedPool& target) {
    return WriteTable(sequences, sequence_count, columns, blocks, room, count,
                      seq_lens, [&](std::span<const int> list) {
                        return target.ExportLayerTable(list, layer);
                      });
  });
}

kvtwin_status kvtwin_pool_blocks(kvtwin_pool* pool, int32_t layer,
                                 kvtwin_tensor* key, kvtwin_tensor* value) {
  return OnPool(pool, [&](PagedPool& target) -> Status {
    Status status = NeedAll({{"key", key}, {"value", value}});
    if (!status.ok()) return status;
    const Result<PagedKv> answer = target.Blocks(layer);
    if (!answer.ok()) return answer.status();
    *key = CTensor(answer->key);
    *value = CTensor(answer->value);
    return {};
  });
}
