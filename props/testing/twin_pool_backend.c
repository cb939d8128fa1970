/* The optimized pool as a backend, by the C interface alone: the harness must
 * find nothing in it, but every bug that is planted in the twin.
 * KVTWIN_BACKEND_TWIN names another twin. OLD_POOL: with the early header of
 * command_tests.cmake, which has no groups and no attention. */

#include <stdlib.h>
#include <string.h>

#include "kvtwin/pool_backend.h"

enum { kGroupsMax = 64 };

typedef struct {
  kvtwin_pool* pool;
  kvtwin_pool_params params;
#ifndef OLD_POOL
  kvtwin_pool_params groups[kGroupsMax];
  kvtwin_attention* attention;
#endif
} TwinPool;

static kvtwin_pool* PoolOf(void* pool) { return ((TwinPool*)pool)->pool; }

static int Describe(kvtwin_pool_description_v1* out) {
  out->name = "twin";
  out->level = KVTWIN_IDENTITY;
#ifndef OLD_POOL
  out->can = KVTWIN_POOL_HAS_GROUPS | KVTWIN_POOL_HAS_MEDIA |
             KVTWIN_POOL_HAS_SOFT_CAP | KVTWIN_POOL_HAS_SINKS;
#endif
  return KVTWIN_OK;
}

static int Init(const kvtwin_pool_params* params, void** pool) {
  TwinPool* made = (TwinPool*)calloc(1, sizeof(TwinPool));
  const char* twin = getenv("KVTWIN_BACKEND_TWIN");
  int code = kvtwin_pool_create(params, twin, &made->pool);
  made->params = *params;
#ifndef OLD_POOL
  if (params->group_count > kGroupsMax) code = KVTWIN_NOT_SUPPORTED;
  if (code == KVTWIN_OK && params->group_count > 0) {
    memcpy(made->groups, params->groups,
           params->group_count * sizeof(kvtwin_pool_params));
  }
  if (code == KVTWIN_OK) {
    code = kvtwin_attention_create(twin, &made->attention);
  }
#endif
  if (code == KVTWIN_OK) {
    *pool = made;
    return code;
  }
  kvtwin_pool_destroy(made->pool);
  free(made);
  return code;
}

static void Close(void* pool) {
  TwinPool* twin = (TwinPool*)pool;
#ifndef OLD_POOL
  kvtwin_attention_destroy(twin->attention);
#endif
  kvtwin_pool_destroy(twin->pool);
  free(twin);
}

static int Open(void* pool, const kvtwin_prompt* prompt, int32_t* sequence) {
  return kvtwin_pool_open(PoolOf(pool), prompt, sequence);
}

static int SeqLen(void* pool, int32_t sequence, int32_t* length) {
  return kvtwin_pool_seq_len(PoolOf(pool), sequence, length);
}

static int Append(void* pool, int32_t sequence, int32_t layer,
                  const kvtwin_tensor* key, const kvtwin_tensor* value) {
  return kvtwin_pool_append(PoolOf(pool), sequence, layer, key, value, NULL,
                            NULL, 0, NULL);
}

static int Commit(void* pool, int32_t sequence, const int32_t* tokens,
                  size_t count) {
  return kvtwin_pool_commit(PoolOf(pool), sequence, tokens, count);
}

static int Views(void* pool, int32_t sequence, int32_t layer,
                 kvtwin_paged_view* views, size_t room, size_t* count) {
  return kvtwin_pool_views(PoolOf(pool), sequence, layer, views, room, count);
}

static int Free(void* pool, int32_t sequence) {
  return kvtwin_pool_free(PoolOf(pool), sequence);
}

static const char* Message(void* pool) {
  (void)pool;
  return kvtwin_last_error();
}

static int Fork(void* pool, int32_t sequence, int32_t length, int32_t* made) {
  return kvtwin_pool_fork(PoolOf(pool), sequence, length, made);
}

static int Truncate(void* pool, int32_t sequence, int32_t length) {
  return kvtwin_pool_truncate(PoolOf(pool), sequence, length);
}

static int CommitUnknown(void* pool, int32_t sequence, int32_t new_tokens) {
  return kvtwin_pool_commit_unknown(PoolOf(pool), sequence, new_tokens);
}

static int Usage(void* pool, kvtwin_usage* usage) {
  return kvtwin_pool_usage(PoolOf(pool), usage);
}

static int ViewsPacked(void* pool, int32_t sequence, int32_t layer,
                       kvtwin_paged_view* views, size_t room, size_t* count) {
  return kvtwin_pool_views_packed(PoolOf(pool), sequence, layer, views, room,
                                  count);
}

static int ContiguousKv(void* pool, int32_t sequence, int32_t layer,
                        int32_t kv_len, int32_t* yes, kvtwin_tensor* key,
                        kvtwin_tensor* value) {
  return kvtwin_pool_contiguous_kv(PoolOf(pool), sequence, layer, kv_len, yes,
                                   key, value);
}

static int Table(void* pool, const int32_t* sequences, size_t sequence_count,
                 int32_t* columns, int32_t* blocks, size_t room, size_t* count,
                 int32_t* seq_lens) {
  return kvtwin_pool_table(PoolOf(pool), sequences, sequence_count, columns,
                           blocks, room, count, seq_lens);
}

static int Csr(void* pool, const int32_t* sequences, size_t sequence_count,
               int32_t* indptr, int32_t* indices, size_t room, size_t* count,
               int32_t* last_page_len) {
  return kvtwin_pool_csr(PoolOf(pool), sequences, sequence_count, indptr,
                         indices, room, count, last_page_len);
}

static int Slots(void* pool, int32_t sequence, int32_t begin, int32_t end,
                 int64_t* slots, size_t room, size_t* count) {
  return kvtwin_pool_slots(PoolOf(pool), sequence, begin, end, slots, room,
                           count);
}

#ifndef OLD_POOL
static int GroupTable(void* pool, int32_t group, const int32_t* sequences,
                      size_t sequence_count, int32_t* columns, int32_t* blocks,
                      size_t room, size_t* count, int32_t* seq_lens) {
  return kvtwin_pool_group_table(PoolOf(pool), group, sequences, sequence_count,
                                 columns, blocks, room, count, seq_lens);
}

static int GroupCsr(void* pool, int32_t group, const int32_t* sequences,
                    size_t sequence_count, int32_t* indptr, int32_t* indices,
                    size_t room, size_t* count, int32_t* last_page_len) {
  return kvtwin_pool_group_csr(PoolOf(pool), group, sequences, sequence_count,
                               indptr, indices, room, count, last_page_len);
}

static int GroupSlots(void* pool, int32_t group, int32_t sequence,
                      int32_t begin, int32_t end, int64_t* slots, size_t room,
                      size_t* count) {
  return kvtwin_pool_group_slots(PoolOf(pool), group, sequence, begin, end,
                                 slots, room, count);
}

static int AddMedia(void* pool, int32_t sequence, const kvtwin_media* media) {
  return kvtwin_pool_add_media(PoolOf(pool), sequence, media);
}

static int GroupUsage(void* pool, int32_t group, kvtwin_usage* usage) {
  return kvtwin_pool_group_usage(PoolOf(pool), group, usage);
}

static int Find(void* pool, const kvtwin_prompt* prompt, int32_t* length) {
  return kvtwin_pool_find(PoolOf(pool), prompt, length);
}

static int ResumeBefore(void* pool, int32_t sequence, int32_t length,
                        int32_t* resume) {
  return kvtwin_pool_resume_before(PoolOf(pool), sequence, length, resume);
}

/* Attends over the blocks of a layer. Its table has the appended tokens, too.
 */
static int Attend(void* pool, int32_t layer, const int32_t* sequences,
                  const int32_t* query_rows, size_t sequence_count,
                  const kvtwin_tensor* query,
                  const kvtwin_attention_options* options, float* out) {
  TwinPool* twin = (TwinPool*)pool;
  const kvtwin_pool_params* of = &twin->params;
  int32_t before = layer;
  for (size_t i = 0; i < twin->params.group_count; ++i) {
    of = &twin->groups[i];
    if (before < of->layers) break;
    before -= of->layers;
  }
  kvtwin_attention_table table;
  kvtwin_attention_default_table(&table, sizeof(table));
  int32_t* lengths = (int32_t*)calloc(sequence_count, sizeof(int32_t));
  size_t count = 0;
  int code =
      kvtwin_pool_layer_table(twin->pool, layer, sequences, sequence_count,
                              &table.columns, NULL, 0, &count, lengths);
  int32_t* blocks = (int32_t*)calloc(count + 1, sizeof(int32_t));
  if (code == KVTWIN_OK) {
    code =
        kvtwin_pool_layer_table(twin->pool, layer, sequences, sequence_count,
                                &table.columns, blocks, count, &count, lengths);
  }
  table.blocks = blocks;
  table.lengths = lengths;
  table.query_rows = query_rows;
  table.sequences = (int32_t)sequence_count;
  table.block_size = of->block_size;
  if (of->window > 0) table.window = of->window;
  kvtwin_tensor key, value;
  if (code == KVTWIN_OK) {
    code = kvtwin_attention_plan_table(twin->attention, &table);
  }
  if (code == KVTWIN_OK) {
    code = kvtwin_pool_blocks(twin->pool, layer, &key, &value);
  }
  kvtwin_attention_out result = {sizeof(result), out, 0, NULL, 0};
  result.out_count =
      (size_t)(of->v_head_dim * query->shape[1] * query->shape[2]);
  if (code == KVTWIN_OK) {
    code = kvtwin_attention_attend_blocks(twin->attention, query, &key, &value,
                                          of->layout, options, &result);
  }
  free(blocks);
  free(lengths);
  return code;
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
    .attend = Attend,
#endif
};

const kvtwin_pool_backend_v1* kvtwin_get_pool_backend_v1(void) {
  return &kTwinPool;
}
