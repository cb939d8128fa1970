/* A version of <kvtwin/pool_backend.h> from before 0.1.0. */

#ifndef KVTWIN_POOL_BACKEND_H_
#define KVTWIN_POOL_BACKEND_H_

#include "kvtwin/kvtwin.h"

typedef enum kvtwin_pool_ability {
  KVTWIN_POOL_DEDUPLICATES = 1,
  KVTWIN_POOL_RECOMPUTES_LAST = 2,
  KVTWIN_POOL_HAS_WINDOW = 4
} kvtwin_pool_ability;

typedef struct kvtwin_pool_description_v1 {
  size_t size;
  const char* name;
  kvtwin_level level;
  uint32_t can;
  int32_t window;
} kvtwin_pool_description_v1;

typedef struct kvtwin_pool_backend_v1 {
  size_t size;
  int (*describe)(kvtwin_pool_description_v1* out);
  int (*init)(const kvtwin_pool_params* params, void** pool);
  void (*close)(void* pool);
  int (*open)(void* pool, const kvtwin_prompt* prompt, int32_t* sequence);
  int (*seq_len)(void* pool, int32_t sequence, int32_t* length);
  int (*append)(void* pool, int32_t sequence, int32_t layer,
                const kvtwin_tensor* key, const kvtwin_tensor* value);
  int (*commit)(void* pool, int32_t sequence, const int32_t* tokens,
                size_t count);
  int (*views)(void* pool, int32_t sequence, int32_t layer,
               kvtwin_paged_view* views, size_t room, size_t* count);
  int (*free)(void* pool, int32_t sequence);
  const char* (*message)(void* pool);
  int (*fork)(void* pool, int32_t sequence, int32_t length, int32_t* made);
  int (*truncate)(void* pool, int32_t sequence, int32_t length);
  int (*commit_unknown)(void* pool, int32_t sequence, int32_t new_tokens);
  int (*usage)(void* pool, kvtwin_usage* usage);
  int (*views_packed)(void* pool, int32_t sequence, int32_t layer,
                      kvtwin_paged_view* views, size_t room, size_t* count);
  int (*contiguous_kv)(void* pool, int32_t sequence, int32_t layer,
                       int32_t kv_len, int32_t* yes, kvtwin_tensor* key,
                       kvtwin_tensor* value);
  int (*table)(void* pool, const int32_t* sequences, size_t sequence_count,
               int32_t* columns, int32_t* blocks, size_t room, size_t* count,
               int32_t* seq_lens);
  int (*csr)(void* pool, const int32_t* sequences, size_t sequence_count,
             int32_t* indptr, int32_t* indices, size_t room, size_t* count,
             int32_t* last_page_len);
  int (*slots)(void* pool, int32_t sequence, int32_t begin, int32_t end,
               int64_t* slots, size_t room, size_t* count);
} kvtwin_pool_backend_v1;

typedef const kvtwin_pool_backend_v1* (*kvtwin_get_pool_backend_v1_fn)(void);
#define KVTWIN_GET_POOL_BACKEND_V1 "kvtwin_get_pool_backend_v1"

#endif /* KVTWIN_POOL_BACKEND_H_ */
