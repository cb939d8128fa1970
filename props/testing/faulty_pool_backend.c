/* docs/examples/c_pool.c with faults that can end a process. KVTWIN_FAULT names
 * the fault: crash, behind (writes past a buffer's end), hang, memory, close
 * (writes past a buffer's end when no answer is expected any more), attend (a
 * crash in attend), full (each append is refused), lost (after a refused
 * append, a sequence holds one token less), slots (there are no slots), wide
 * (no slot fits into 32 bits), tokens (commit changes the numbers of its
 * tokens), rows (append changes its rows) or none (it has no pool). */

#define kvtwin_get_pool_backend_v1 HealthyPool
#include "../docs/examples/c_pool.c"
#undef kvtwin_get_pool_backend_v1

static char* volatile kept;
static int refused; /* Whether the pool has refused an append. */

static int FaultyAppend(void* pool, int32_t sequence, int32_t layer,
                        const kvtwin_tensor* key, const kvtwin_tensor* value) {
  const char* name = getenv("KVTWIN_FAULT");
  volatile int spin = 1;
  if (name != NULL && strcmp(name, "full") == 0) return KVTWIN_CACHE_FULL;
  if (name != NULL && key->shape[2] > 1) {
    kept = NULL;
    if (strcmp(name, "crash") == 0) *kept = 1;
    if (strcmp(name, "behind") == 0) {
      kept = (char*)malloc(8);
      kept[8] = 1;
    }
    if (strcmp(name, "rows") == 0) ++*(float*)value->data;
    while (strcmp(name, "hang") == 0 && spin) {
    }
    while (strcmp(name, "memory") == 0) {
      kept = (char*)malloc(1 << 20);
      if (kept == NULL) return KVTWIN_OUT_OF_MEMORY;
      memset(kept, 1, 1 << 20);
    }
  }
  if (refused && ((Pool*)pool)->sequence[sequence].length + key->shape[2] >=
                     (int64_t)((Pool*)pool)->room) {
    return KVTWIN_CACHE_FULL;
  }
  const int status = Append(pool, sequence, layer, key, value);
  if (status == KVTWIN_CACHE_FULL && name != NULL &&
      strcmp(name, "lost") == 0) {
    refused = 1;
  }
  return status;
}

static int FaultyCommit(void* pool, int32_t sequence, const int32_t* tokens,
                        size_t count) {
  const int status = Commit(pool, sequence, tokens, count);
  if (count > 1) ++*(int32_t*)tokens;
  return status;
}

static int FaultyInit(const kvtwin_pool_params* params, void** pool) {
  const char* name = getenv("KVTWIN_FAULT");
  if (name != NULL && strcmp(name, "none") == 0) return KVTWIN_NOT_SUPPORTED;
  refused = 0;
  return Init(params, pool);
}

static void FaultyClose(void* pool) {
  const char* name = getenv("KVTWIN_FAULT");
  if (name != NULL && strcmp(name, "close") == 0) {
    kept = (char*)malloc(8);
    kept[8] = 1;
    free((void*)kept);
  }
  Close(pool);
}

static int FaultyAttend(void* pool, int32_t layer, const int32_t* sequences,
                        const int32_t* query_rows, size_t sequence_count,
                        const kvtwin_tensor* query,
                        const kvtwin_attention_options* options, float* out) {
  (void)pool, (void)layer, (void)sequences, (void)query_rows;
  (void)sequence_count, (void)query, (void)options, (void)out;
  kept = NULL;
  *kept = 1;
  return KVTWIN_OK;
}

static int NoSlots(void* pool, int32_t sequence, int32_t begin, int32_t end,
                   int64_t* slots, size_t room, size_t* count) {
  (void)pool, (void)sequence, (void)begin, (void)end, (void)slots, (void)room;
  *count = 0;
  return KVTWIN_OK;
}

static int WideSlots(void* pool, int32_t sequence, int32_t begin, int32_t end,
                     int64_t* slots, size_t room, size_t* count) {
  (void)pool, (void)sequence;
  *count = (size_t)(end - begin);
  for (size_t i = 0; i < *count && i < room; ++i) slots[i] = 1LL << 32;
  return KVTWIN_OK;
}

static kvtwin_pool_backend_v1 faulty;

const kvtwin_pool_backend_v1* kvtwin_get_pool_backend_v1(void) {
  faulty = *HealthyPool();
  faulty.init = FaultyInit;
  faulty.append = FaultyAppend;
  faulty.close = FaultyClose;
  const char* name = getenv("KVTWIN_FAULT");
  if (name != NULL && strcmp(name, "attend") == 0) faulty.attend = FaultyAttend;
  if (name != NULL && strcmp(name, "tokens") == 0) {
    faulty.commit = FaultyCommit;
  }
  if (name != NULL && strcmp(name, "slots") == 0) faulty.slots = NoSlots;
  if (name != NULL && strcmp(name, "wide") == 0) faulty.slots = WideSlots;
  return &faulty;
}
