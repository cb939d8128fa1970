/* A pool whose sequences share nothing: the smallest backend for
 * <kvtwin/pool_backend.h>. With -DPOOL_BUG a fork does not copy V rows.
 *
 *   cc -std=c99 -I include -shared -fPIC -o libpool.so docs/examples/c_pool.c */

#include <kvtwin/pool_backend.h>
#include <stdlib.h>
#include <string.h>

enum { kSequences = 64 };

typedef struct {
  kvtwin_pool_params is;
  size_t room;    /* Tokens of a sequence, at most. */
  size_t key_row; /* Elements of a token's K row. */
  size_t value_row;
  struct {
    float* rows; /* NULL: there is no such sequence. */
    int32_t length;
    int32_t* appended; /* Appended rows, by layer. */
  } sequence[kSequences];
} Pool;

/* Returns the K rows of a layer; its V rows lie after them. */
static float* Keys(Pool* pool, int32_t sequence, int32_t layer) {
  return pool->sequence[sequence].rows +
         (size_t)layer * pool->room * (pool->key_row + pool->value_row);
}

static float* Values(Pool* pool, int32_t sequence, int32_t layer) {
  return Keys(pool, sequence, layer) + pool->room * pool->key_row;
}

static int Describe(kvtwin_pool_description_v1* out) {
  out->name = "c_pool";
  return KVTWIN_OK;
}

static int Init(const kvtwin_pool_params* params, void** made) {
  Pool* pool;
  if (params->dtype != KVTWIN_F32 || params->v_dtype != KVTWIN_F32) {
    return KVTWIN_NOT_SUPPORTED;
  }
  pool = (Pool*)calloc(1, sizeof(Pool));
  if (pool == NULL) return KVTWIN_OUT_OF_MEMORY;
  pool->is = *params;
  pool->room = (size_t)params->blocks * (size_t)params->block_size;
  if (pool->room > (size_t)params->max_seq_len) {
    pool->room = (size_t)params->max_seq_len;
  }
  pool->key_row = (size_t)(params->k_head_dim * params->kv_heads);
  pool->value_row = (size_t)(params->v_head_dim * params->kv_heads);
  *made = pool;
  return KVTWIN_OK;
}

static int Free(void* handle, int32_t sequence) {
  Pool* pool = (Pool*)handle;
  free(pool->sequence[sequence].rows);
  free(pool->sequence[sequence].appended);
  pool->sequence[sequence].rows = NULL;
  pool->sequence[sequence].appended = NULL;
  return KVTWIN_OK;
}

static void Close(void* handle) {
  int32_t i;
  for (i = 0; i < kSequences; ++i) Free(handle, i);
  free(handle);
}

static int Open(void* handle, const kvtwin_prompt* prompt, int32_t* made) {
  Pool* pool = (Pool*)handle;
  const size_t layers = (size_t)pool->is.layers;
  const size_t row = pool->key_row + pool->value_row;
  const size_t rows = layers * pool->room * row;
  int32_t i = 0;
  (void)prompt; /* This pool finds no prefixes. */
  while (i < kSequences && pool->sequence[i].rows != NULL) ++i;
  if (i == kSequences) return KVTWIN_OUT_OF_MEMORY;
  pool->sequence[i].length = 0;
  pool->sequence[i].rows = (float*)calloc(rows, sizeof(float));
  pool->sequence[i].appended = (int32_t*)calloc(layers, sizeof(int32_t));
  *made = i;
  return pool->sequence[i].appended == NULL ? KVTWIN_OUT_OF_MEMORY : KVTWIN_OK;
}

static int SeqLen(void* handle, int32_t sequence, int32_t* length) {
  *length = ((Pool*)handle)->sequence[sequence].length;
  return KVTWIN_OK;
}

static int Append(void* handle, int32_t sequence, int32_t layer,
                  const kvtwin_tensor* key, const kvtwin_tensor* value) {
  Pool* pool = (Pool*)handle;
  const size_t length = (size_t)pool->sequence[sequence].length;
  const size_t tokens = (size_t)key->shape[2];
  if (length + tokens > pool->room) return KVTWIN_CACHE_FULL;
  memcpy(Keys(pool, sequence, layer) + length * pool->key_row, key->data,
         tokens * pool->key_row * sizeof(float));
  memcpy(Values(pool, sequence, layer) + length * pool->value_row, value->data,
         tokens * pool->value_row * sizeof(float));
  pool->sequence[sequence].appended[layer] = (int32_t)tokens;
  return KVTWIN_OK;
}

static int Truncate(void* handle, int32_t sequence, int32_t length) {
  Pool* pool = (Pool*)handle;
  int32_t layer;
  pool->sequence[sequence].length = length;
  for (layer = 0; layer < pool->is.layers; ++layer) {
    pool->sequence[sequence].appended[layer] = 0;
  }
  return KVTWIN_OK;
}

static int Commit(void* handle, int32_t sequence, const int32_t* tokens,
                  size_t count) {
  Pool* pool = (Pool*)handle;
  (void)tokens;
  return Truncate(pool, sequence,
                  pool->sequence[sequence].length + (int32_t)count);
}

static int Fork(void* handle, int32_t sequence, int32_t length, int32_t* made) {
  Pool* pool = (Pool*)handle;
  int32_t layer;
  int status = Open(handle, NULL, made);
  for (layer = 0; status == KVTWIN_OK && layer < pool->is.layers; ++layer) {
    memcpy(Keys(pool, *made, layer), Keys(pool, sequence, layer),
           (size_t)length * pool->key_row * sizeof(float));
#ifndef POOL_BUG
    memcpy(Values(pool, *made, layer), Values(pool, sequence, layer),
           (size_t)length * pool->value_row * sizeof(float));
#endif
  }
  if (status == KVTWIN_OK) status = Truncate(handle, *made, length);
  return status;
}

static int Views(void* handle, int32_t sequence, int32_t layer,
                 kvtwin_paged_view* views, size_t room, size_t* count) {
  Pool* pool = (Pool*)handle;
  const int32_t tokens = pool->sequence[sequence].length +
                         pool->sequence[sequence].appended[layer];
  *count = tokens > 0 ? 1 : 0;
  if (*count > room || tokens == 0) return KVTWIN_OK;
  memset(views, 0, sizeof(*views));
  views->length = tokens;
  views->block = -1;
  views->key.data = Keys(pool, sequence, layer);
  views->value.data = Values(pool, sequence, layer);
  views->key.dtype = views->value.dtype = KVTWIN_F32;
  views->key.shape[0] = pool->is.k_head_dim;
  views->value.shape[0] = pool->is.v_head_dim;
  views->key.shape[1] = views->value.shape[1] = pool->is.kv_heads;
  views->key.shape[2] = views->value.shape[2] = tokens;
  views->key.shape[3] = views->value.shape[3] = 1;
  return KVTWIN_OK;
}

static const kvtwin_pool_backend_v1 kPool = {
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
    .fork = Fork,
    .truncate = Truncate,
};

const kvtwin_pool_backend_v1* kvtwin_get_pool_backend_v1(void) {
  return &kPool;
}
