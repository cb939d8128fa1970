/* The optimized pool as a backend, by the C interface alone: the harness must
 * find nothing in it, but every bug that is planted in the twin.
 * KVTWIN_BACKEND_TWIN names another twin. OLD_POOL: with the header of version
 * 0.1.0, which has no groups. */

#include <stdlib.h>

#include "kvtwin/pool_backend.h"

static int Describe(kvtwin_pool_description_v1* out) {
  out->name = "twin";
  out->level = KVTWIN_IDENTITY;
#ifndef OLD_POOL
  out->can = KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_HAS_MEDIA;
#endif
  return KVTWIN_OK;
}

static int Init(const kvtwin_pool_params* params, void** pool) {
  kvtwin_pool* made = NULL;
  const int code =
      kvtwin_pool_create(params, getenv("KVTWIN_BACKEND_TWIN"), &made);
  if (code == KVTWIN_OK) *pool = made;
  return code;
}

static void Close(void* pool) { kvtwin_pool_destroy((kvtwin_pool*)pool); }

static int Open(void* pool, const kvtwin_prompt* prompt, int32_t* sequence) {
  return kvtwin_pool_open((kvtwin_pool*)pool, prompt, sequence);
}

static int SeqLen(void* pool, int32_t sequence, int32_t* length) {
  return kvtwin_pool_seq_len((kvtwin_pool*)pool, sequence, length);
}

static int Append(void* pool, int32_t sequence, int32_t layer,
                  const kvtwin_tensor* key, const kvtwin_tensor* value) {
  return kvtwin_pool_append((kvtwin_pool*)pool, sequence, layer, key, value,
                            NULL, NULL, 0, NULL);
}

static int Commit(void* pool, int32_t sequence, const int32_t* tokens,
                  size_t count) {
  return kvtwin_pool_commit((kvtwin_pool*)pool, sequence, tokens, count);
}

static int Views(void* pool, int32_t sequence, int32_t layer,
                 kvtwin_paged_view* views, size_t room, size_t* count) {
  return kvtwin_pool_views((kvtwin_pool*)pool, sequence, layer, views, room,
                           count);
}

static int Free(void* pool, int32_t sequence) {
  return kvtwin_pool_free((kvtwin_pool*)pool, sequence);
}

static const char* Message(void* pool) {
  (void)pool;
  return kvtwin_last_error();
}

static int Fork(void* pool, int32_t sequence, int32_t length, int32_t* made) {
  return kvtwin_pool_fork((kvtwin_pool*)pool, sequence, length, made);
}

static int Truncate(void* pool, int32_t sequence, int32_t length) {
  return kvtwin_pool_truncate((kvtwin_pool*)pool, sequence, length);
}

static int CommitUnknown(void* pool, int32_t sequence, int32_t new_tokens) {
  return kvtwin_pool_commit_unknown((kvtwin_pool*)pool, sequence, new_tokens);
}

static int Usage(void* pool, kvtwin_usage* usage) {
  return kvtwin_pool_usage((kvtwin_pool*)pool, usage);
}

static int ViewsPacked(void* pool, int32_t sequence, int32_t layer,
                       kvtwin_paged_view* views, size_t room, size_t* count) {
  return kvtwin_pool_views_packed((kvtwin_pool*)pool, sequence, layer, views,
                                  room, count);
}

static int ContiguousKv(void* pool, int32_t sequence, int32_t layer,
                        int32_t kv_len, int32_t* yes, kvtwin_tensor* key,
                        kvtwin_tensor* value) {
  return kvtwin_pool_contiguous_kv((kvtwin_pool*)pool, sequence, layer, kv_len,
                                   yes, key, value);
}

static int Table(void* pool, const int32_t* sequences, size_t sequence_count,
                 int32_t* columns, int32_t* blocks, size_t room, size_t* count,
                 int32_t* seq_lens) {
  return kvtwin_pool_table((kvtwin_pool*)pool, sequences, sequence_count,
                           columns, blocks, room, count, seq_lens);
}

static int Csr(void* pool, const int32_t* sequences, size_t sequence_count,
               int32_t* indptr, int32_t* indices, size_t room, size_t* count,
               int32_t* last_page_len) {
  return kvtwin_pool_csr((kvtwin_pool*)pool, sequences, sequence_count, indptr,
                         indices, room, count, last_page_len);
}

static int Slots(void* pool, int32_t sequence, int32_t begin, int32_t end,
                 int64_t* slots, size_t room, size_t* count) {
  return kvtwin_pool_slots((kvtwin_pool*)pool, sequence, begin, end, slots,
                           room, count);
}

#ifndef OLD_POOL
static int GroupTable(void* pool, int32_t group, const int32_t* sequences,
                      size_t sequence_count, int32_t* columns, int32_t* blocks,
                      size_t room, size_t* count, int32_t* seq_lens) {
  return kvtwin_pool_group_table((kvtwin_pool*)pool, group, sequences,
                                 sequence_count, columns, blocks, room, count,
                                 seq_lens);
}

static int GroupCsr(void* pool, int32_t group, const int32_t* sequences,
                    size_t sequence_count, int32_t* indptr, int32_t* indices,
                    size_t room, size_t* count, int32_t* last_page_len) {
  return kvtwin_pool_group_csr((kvtwin_pool*)pool, group, sequences,
                               sequence_count, indptr, indices, room, count,
                               last_page_len);
}

static int GroupSlots(void* pool, int32_t group, int32_t sequence,
                      int32_t begin, int32_t end, int64_t* slots, size_t room,
                      size_t* count) {
  return kvtwin_pool_group_slots((kvtwin_pool*)pool, group, sequence, begin,
                                 end, slots, room, count);
}

static int AddMedia(void* pool, int32_t sequence, const kvtwin_media* media) {
  return kvtwin_pool_add_media((kvtwin_pool*)pool, sequence, media);
}

static int GroupUsage(void* pool, int32_t group, kvtwin_usage* usage) {
  return kvtwin_pool_group_usage((kvtwin_pool*)pool, group, usage);
}

static int Find(void* pool, const kvtwin_prompt* prompt, int32_t* length) {
  return kvtwin_pool_find((kvtwin_pool*)pool, prompt, length);
}

static int ResumeBefore(void* pool, int32_t sequence, int32_t length,
                        int32_t* resume) {
  return kvtwin_pool_resume_before((kvtwin_pool*)pool, sequence, length,
                                   resume);
}

#endif

static const kvtwin_pool_backend_v1 kTwinPool = {
    .size = sizeof(kvtwin_pool_backend_v1),
    .describe = Describe,
    .init = Init,
    .close = Close,
    .open = Open,
    .seq_len = SeqLen,
    .append = Append,
    .commit = Commit,
    .views = Views,
    .free = Free,
    .message = Message,
    .fork = Fork,
    .truncate = Truncate,
    .commit_unknown = CommitUnknown,
    .usage = Usage,
    .views_packed = ViewsPacked,
    .contiguous_kv = ContiguousKv,
    .table = Table,
    .csr = Csr,
    .slots = Slots,
#ifndef OLD_POOL
    .group_table = GroupTable,
    .group_csr = GroupCsr,
    .group_slots = GroupSlots,
    .add_media = AddMedia,
    .group_usage = GroupUsage,
    .find = Find,
    .resume_before = ResumeBefore,
#endif
};

const kvtwin_pool_backend_v1* kvtwin_get_pool_backend_v1(void) {
  return &kTwinPool;
}
