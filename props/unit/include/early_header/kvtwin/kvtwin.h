/* A version of <kvtwin/kvtwin.h> from before 0.1.0, as far as the backends use
 * it that command_tests.cmake compiles with it. */

#ifndef KVTWIN_KVTWIN_H_
#define KVTWIN_KVTWIN_H_

#include <stddef.h>
#include <stdint.h>

typedef enum kvtwin_status {
  KVTWIN_OK = 0,
  KVTWIN_CACHE_FULL = 1,
  KVTWIN_NOT_SUPPORTED = 2,
  KVTWIN_SHARED_CELLS = 3,
  KVTWIN_INVALID_ARGUMENT = -1,
  KVTWIN_FAILED_PRECONDITION = -2,
  KVTWIN_OUT_OF_MEMORY = -3,
  KVTWIN_INTERNAL = -4,
  KVTWIN_DEVICE_ERROR = -5
} kvtwin_status;

const char* kvtwin_last_error(void);

#define KVTWIN_OPEN_END INT32_MAX

typedef enum kvtwin_dtype {
  KVTWIN_AS_K = -1,
  KVTWIN_F32 = 0,
  KVTWIN_F16 = 1,
  KVTWIN_BF16 = 2,
  KVTWIN_F8_E4M3 = 3,
  KVTWIN_Q8_0 = 4,
  KVTWIN_Q4_0 = 5,
  KVTWIN_BITS = 6
} kvtwin_dtype;

typedef enum kvtwin_kind {
  KVTWIN_CAUSAL = 0,
  KVTWIN_SWA = 1,
  KVTWIN_SWA_MEM = 2,
  KVTWIN_CHUNKED = 3,
  KVTWIN_ENCODER = 4,
  KVTWIN_WRAPPER = 5
} kvtwin_kind;

typedef enum kvtwin_placement {
  KVTWIN_CONTIGUOUS = 0,
  KVTWIN_SCATTER = 1
} kvtwin_placement;

typedef enum kvtwin_v_layout {
  KVTWIN_V_PLAIN = 0,
  KVTWIN_V_PERMUTED = 1,
  KVTWIN_V_TILED = 2
} kvtwin_v_layout;

typedef enum kvtwin_shift_kind {
  KVTWIN_SHIFT_NONE = 0,
  KVTWIN_SHIFT_IDENTITY = 1,
  KVTWIN_SHIFT_ADD = 2,
  KVTWIN_SHIFT_TAG_ADD = 3,
  KVTWIN_SHIFT_ROPE = 4,
  KVTWIN_SHIFT_CUSTOM = 5
} kvtwin_shift_kind;

typedef int (*kvtwin_shift_fn)(void* user, int32_t layer, int32_t offset,
                               int32_t k_head_dim, int32_t kv_heads,
                               float* key);

typedef struct kvtwin_shift {
  kvtwin_shift_kind kind;
  int rope_halves;
  int rope_dims;
  double rope_base;
  double rope_scale;
  kvtwin_shift_fn fn;
  void* user;
} kvtwin_shift;

typedef struct kvtwin_tensor {
  const void* data;
  kvtwin_dtype dtype;
  int64_t shape[4];
  int64_t stride[4];
} kvtwin_tensor;

typedef struct kvtwin_batch {
  size_t size;
  const int32_t* positions;
  const int32_t* sequences;
  int32_t tokens;
  const int32_t* multimodal;
  int32_t multimodal_count;
} kvtwin_batch;

typedef struct kvtwin_view {
  size_t size;
  kvtwin_tensor key;
  kvtwin_tensor value;
  kvtwin_tensor mask;
  int32_t first_cell;
  int32_t columns;
} kvtwin_view;

typedef struct kvtwin_cell {
  int32_t cell;
  int32_t position;
  int32_t sequence;
} kvtwin_cell;

typedef struct kvtwin_cache_params {
  size_t size;
  kvtwin_kind kind;
  kvtwin_placement placement;
  int32_t window;
  int32_t memory;
  int32_t chunk;
  kvtwin_shift shift;
  const struct kvtwin_cache_params* caches;
  int32_t cache_count;
  int32_t cache_padding;
  int32_t mask_batch_padding;
  kvtwin_v_layout v_layout;
  kvtwin_dtype mask_dtype;
  kvtwin_dtype dtype;
  kvtwin_dtype v_dtype;
  int32_t max_sequences;
  int32_t capacity;
  int32_t max_batch;
} kvtwin_cache_params;

typedef struct kvtwin_cache kvtwin_cache;

kvtwin_status kvtwin_cache_create(const kvtwin_cache_params* params,
                                  const char* twin, kvtwin_cache** cache);
void kvtwin_cache_destroy(kvtwin_cache* cache);
kvtwin_status kvtwin_cache_start_forward(kvtwin_cache* cache,
                                         const kvtwin_batch* batch,
                                         int reserve);
kvtwin_status kvtwin_cache_set_causal(kvtwin_cache* cache,
                                      const int32_t* except, size_t count);
kvtwin_status kvtwin_cache_set_layer_type(kvtwin_cache* cache, int32_t type);
kvtwin_status kvtwin_cache_put(kvtwin_cache* cache, int32_t layer,
                               const kvtwin_tensor* key,
                               const kvtwin_tensor* value);
kvtwin_status kvtwin_cache_get(kvtwin_cache* cache, int32_t layer,
                               kvtwin_view* view);
kvtwin_status kvtwin_cache_copy_prefix(kvtwin_cache* cache, int32_t source,
                                       int32_t target, int32_t length);
kvtwin_status kvtwin_cache_can_resume(kvtwin_cache* cache, int32_t sequence,
                                      int32_t position, int32_t* yes);
kvtwin_status kvtwin_cache_remove(kvtwin_cache* cache, int32_t sequence,
                                  int32_t begin, int32_t end);
kvtwin_status kvtwin_cache_encoder_cached(kvtwin_cache* cache, int32_t* yes);
kvtwin_status kvtwin_cache_cell_count(kvtwin_cache* cache, int32_t* cells);
kvtwin_status kvtwin_cache_cells(kvtwin_cache* cache, kvtwin_cell* cells,
                                 size_t room, size_t* count);
kvtwin_status kvtwin_cache_batch_cells(kvtwin_cache* cache, int32_t* cells,
                                       size_t room, size_t* count);

typedef struct kvtwin_state kvtwin_state;

void kvtwin_free(void* memory);
void kvtwin_state_destroy(kvtwin_state* state);
kvtwin_status kvtwin_cache_snapshot(kvtwin_cache* cache, kvtwin_state** state);
kvtwin_status kvtwin_cache_snapshot_of(kvtwin_cache* cache, int32_t sequence,
                                       kvtwin_state** state);
kvtwin_status kvtwin_cache_restore(kvtwin_cache* cache,
                                   const kvtwin_state* state);
kvtwin_status kvtwin_cache_add_sequence(kvtwin_cache* cache, int32_t sequence,
                                        const kvtwin_state* added);
kvtwin_status kvtwin_state_to_bytes(const kvtwin_state* state,
                                    const char* model, void** bytes,
                                    size_t* count);
kvtwin_status kvtwin_state_from_bytes(const void* bytes, size_t count,
                                      const char* model, kvtwin_state** state);

typedef struct kvtwin_pool kvtwin_pool;

typedef enum kvtwin_paged_layout {
  KVTWIN_TOKEN_MAJOR = 0,
  KVTWIN_HEAD_MAJOR = 1
} kvtwin_paged_layout;

typedef struct kvtwin_pool_params {
  size_t size;
  int32_t block_size;
  int32_t blocks;
  int32_t max_seq_len;
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  kvtwin_dtype dtype;
  kvtwin_dtype v_dtype;
  kvtwin_paged_layout layout;
} kvtwin_pool_params;

typedef struct kvtwin_prompt {
  size_t size;
  const int32_t* tokens;
  size_t token_count;
  const char* salt;
  const char* const* extra;
  size_t extra_count;
} kvtwin_prompt;

typedef struct kvtwin_paged_view {
  kvtwin_tensor key;
  kvtwin_tensor value;
  int32_t start;
  int32_t length;
  int32_t block;
} kvtwin_paged_view;

typedef struct kvtwin_usage {
  size_t size;
  int32_t free;
  int32_t cached;
  int32_t used;
  int32_t shared;
} kvtwin_usage;

kvtwin_status kvtwin_pool_create(const kvtwin_pool_params* params,
                                 const char* twin, kvtwin_pool** pool);
void kvtwin_pool_destroy(kvtwin_pool* pool);
kvtwin_status kvtwin_pool_open(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* sequence);
kvtwin_status kvtwin_pool_fork(kvtwin_pool* pool, int32_t sequence,
                               int32_t length, int32_t* made);
kvtwin_status kvtwin_pool_seq_len(kvtwin_pool* pool, int32_t sequence,
                                  int32_t* length);
kvtwin_status kvtwin_pool_append(kvtwin_pool* pool, int32_t sequence,
                                 int32_t layer, const kvtwin_tensor* key,
                                 const kvtwin_tensor* value, int32_t* start,
                                 kvtwin_paged_view* views, size_t room,
                                 size_t* count);
kvtwin_status kvtwin_pool_commit(kvtwin_pool* pool, int32_t sequence,
                                 const int32_t* tokens, size_t count);
kvtwin_status kvtwin_pool_commit_unknown(kvtwin_pool* pool, int32_t sequence,
                                         int32_t new_tokens);
kvtwin_status kvtwin_pool_views(kvtwin_pool* pool, int32_t sequence,
                                int32_t layer, kvtwin_paged_view* views,
                                size_t room, size_t* count);
kvtwin_status kvtwin_pool_views_packed(kvtwin_pool* pool, int32_t sequence,
                                       int32_t layer, kvtwin_paged_view* views,
                                       size_t room, size_t* count);
kvtwin_status kvtwin_pool_contiguous_kv(kvtwin_pool* pool, int32_t sequence,
                                        int32_t layer, int32_t kv_len,
                                        int32_t* yes, kvtwin_tensor* key,
                                        kvtwin_tensor* value);
kvtwin_status kvtwin_pool_truncate(kvtwin_pool* pool, int32_t sequence,
                                   int32_t length);
kvtwin_status kvtwin_pool_free(kvtwin_pool* pool, int32_t sequence);
kvtwin_status kvtwin_pool_usage(kvtwin_pool* pool, kvtwin_usage* usage);
kvtwin_status kvtwin_pool_table(kvtwin_pool* pool, const int32_t* sequences,
                                size_t sequence_count, int32_t* columns,
                                int32_t* blocks, size_t room, size_t* count,
                                int32_t* seq_lens);
kvtwin_status kvtwin_pool_csr(kvtwin_pool* pool, const int32_t* sequences,
                              size_t sequence_count, int32_t* indptr,
                              int32_t* indices, size_t room, size_t* count,
                              int32_t* last_page_len);
kvtwin_status kvtwin_pool_slots(kvtwin_pool* pool, int32_t sequence,
                                int32_t begin, int32_t end, int64_t* slots,
                                size_t room, size_t* count);

enum {
  KVTWIN_HAS_CAUSAL = 1 << 0,
  KVTWIN_HAS_SWA = 1 << 1,
  KVTWIN_HAS_SWA_MEM = 1 << 2,
  KVTWIN_HAS_CHUNKED = 1 << 3,
  KVTWIN_HAS_ENCODER = 1 << 4,
  KVTWIN_HAS_WRAPPER = 1 << 5
};
enum {
  KVTWIN_CAN_REMOVE_TAIL = 1 << 0,
  KVTWIN_CAN_REMOVE_MIDDLE = 1 << 1,
  KVTWIN_CAN_COPY_PREFIX = 1 << 2,
  KVTWIN_CAN_SHARE = 1 << 3,
  KVTWIN_CAN_RESERVE = 1 << 4,
  KVTWIN_CAN_MIX = 1 << 5,
  KVTWIN_CAN_ANY_ORDER = 1 << 6,
  KVTWIN_CAN_REFUSE_MISUSE = 1 << 7,
  KVTWIN_CAN_BE_POISONED = 1 << 8,
  KVTWIN_CAN_TAKE_STRIDED = 1 << 9,
  KVTWIN_CAN_ANY_SEQUENCE = 1 << 10,
  KVTWIN_CAN_MIX_DTYPES = 1 << 11
};

typedef enum kvtwin_level {
  KVTWIN_NUMERIC = 0,
  KVTWIN_ENTITLEMENT = 1,
  KVTWIN_IDENTITY = 2
} kvtwin_level;

typedef struct kvtwin_description_v1 {
  size_t size;
  const char* name;
  const char* profile;
  kvtwin_level level;
  uint32_t kinds;
  uint32_t can;
  uint32_t dtypes;
  uint32_t v_layouts;
  uint32_t shifts;
  uint32_t mask_dtypes;
  int32_t max_sequences;
  int32_t max_layers;
  int32_t max_padding;
  double tolerance;
} kvtwin_description_v1;

typedef struct kvtwin_setup_v1 {
  size_t size;
  const kvtwin_cache_params* cache;
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
} kvtwin_setup_v1;

typedef struct kvtwin_backend_v1 {
  size_t size;
  int (*describe)(kvtwin_description_v1* out);
  int (*init)(const kvtwin_setup_v1* setup, void** cache);
  void (*close)(void* cache);
  int (*start_forward)(void* cache, const kvtwin_batch* batch, int reserve);
  int (*put)(void* cache, int32_t layer, const kvtwin_tensor* key,
             const kvtwin_tensor* value);
  int (*get)(void* cache, int32_t layer, kvtwin_view* view);
  int (*remove)(void* cache, int32_t sequence, int32_t begin, int32_t end);
  int (*copy_prefix)(void* cache, int32_t source, int32_t target,
                     int32_t length);
  int (*can_resume)(void* cache, int32_t sequence, int32_t position,
                    int32_t* yes);
  const char* (*message)(void* cache);
  int (*shift)(void* cache, int32_t sequence, int32_t begin, int32_t end,
               int32_t delta);
  int (*set_causal)(void* cache, const int32_t* except, int32_t count);
  int (*set_layer_type)(void* cache, int32_t type);
  int (*encoder_cached)(void* cache, int32_t* yes);
  int (*cells)(void* cache, kvtwin_cell* cells, size_t room, size_t* count,
               int32_t* batch, size_t batch_room, size_t* batch_count,
               int32_t* total);
  int (*snapshot)(void* cache, int32_t sequence, const void** bytes,
                  size_t* count);
  int (*restore)(void* cache, int32_t sequence, const void* bytes,
                 size_t count);
} kvtwin_backend_v1;

typedef const kvtwin_backend_v1* (*kvtwin_get_backend_v1_fn)(void);
#define KVTWIN_GET_BACKEND_V1 "kvtwin_get_backend_v1"

#endif /* KVTWIN_KVTWIN_H_ */
