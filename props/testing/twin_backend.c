/* The optimized twin as a backend, by the C interface alone: the harness must
 * find nothing in it, but every bug that is planted in the twin (`kvtwin museum
 * --backend`). KVTWIN_BACKEND_TWIN names another twin. With -DLEAKY it has two
 * faults: a removal of a range leaves its last token, and a single sequence
 * cannot be restored. Then it has no shift by tag_add, either. */

#include <stdlib.h>
#include <string.h>

#include "kvtwin/kvtwin.h"

typedef struct {
  kvtwin_cache* cache;
  void* bytes; /* The last snapshot's bytes. */
} Twin;

static int Describe(kvtwin_description_v1* out) {
  out->name = "twin";
  out->level = KVTWIN_IDENTITY;
  out->kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA | KVTWIN_HAS_SWA_MEM |
               KVTWIN_HAS_CHUNKED | KVTWIN_HAS_ENCODER | KVTWIN_HAS_WRAPPER;
  out->can = KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_REMOVE_MIDDLE |
             KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE | KVTWIN_CAN_RESERVE |
             KVTWIN_CAN_MIX | KVTWIN_CAN_ANY_ORDER | KVTWIN_CAN_REFUSE_MISUSE |
             KVTWIN_CAN_BE_POISONED | KVTWIN_CAN_TAKE_STRIDED |
             KVTWIN_CAN_ANY_SEQUENCE | KVTWIN_CAN_MIX_DTYPES;
#ifdef KVTWIN_COMMITTED /* Not in the early header. */
  out->kinds |= KVTWIN_HAS_RECURRENT | KVTWIN_HAS_HYBRID;
  out->can |= KVTWIN_CAN_DRAFT_TREES | KVTWIN_CAN_DRAFT_STATES |
              KVTWIN_CAN_PIN | KVTWIN_CAN_REFUSE_FULL;
#endif
  out->dtypes = 63;
  out->v_layouts = 7;
  out->shifts = 31;
  out->mask_dtypes = 1U << KVTWIN_F32 | 1U << KVTWIN_F16 | 1U << KVTWIN_BF16 |
                     1U << KVTWIN_BITS;
  out->max_sequences = 0;
  out->max_layers = 0;
  out->max_padding = 0;
#ifdef LEAKY
  out->name = "leaky";
  out->shifts &= ~(1U << KVTWIN_SHIFT_TAG_ADD | 1U << KVTWIN_SHIFT_ROPE);
#endif
  return KVTWIN_OK;
}

static int Init(const kvtwin_setup_v1* setup, void** cache) {
  Twin* twin = calloc(1, sizeof(Twin));
  int code = KVTWIN_OUT_OF_MEMORY;
  if (twin != NULL) {
    code = kvtwin_cache_create(setup->cache, getenv("KVTWIN_BACKEND_TWIN"),
                               &twin->cache);
  }
  if (code != KVTWIN_OK) free(twin);
  if (code == KVTWIN_OK) *cache = twin;
  return code;
}

static void Close(void* cache) {
  Twin* twin = cache;
  kvtwin_cache_destroy(twin->cache);
  kvtwin_free(twin->bytes);
  free(twin);
}

static int StartForward(void* cache, const kvtwin_batch* batch, int reserve) {
  return kvtwin_cache_start_forward(((Twin*)cache)->cache, batch, reserve);
}

static int Put(void* cache, int32_t layer, const kvtwin_tensor* key,
               const kvtwin_tensor* value) {
  return kvtwin_cache_put(((Twin*)cache)->cache, layer, key, value);
}

/* Trusts the shapes that come with the view of an encoder, if there are any. */
static int Get(void* cache, int32_t layer, kvtwin_view* view) {
  const kvtwin_view came = *view;
  const int code = kvtwin_cache_get(((Twin*)cache)->cache, layer, view);
  if (code == KVTWIN_OK && view->mask.data == NULL && came.key.shape[2] > 0) {
    memcpy(view->key.shape, came.key.shape, sizeof(came.key.shape));
    memcpy(view->value.shape, came.value.shape, sizeof(came.value.shape));
  }
  return code;
}

static int Remove(void* cache, int32_t sequence, int32_t begin, int32_t end) {
#ifdef LEAKY
  if (end != KVTWIN_OPEN_END && end > begin + 1) --end;
#endif
  return kvtwin_cache_remove(((Twin*)cache)->cache, sequence, begin, end);
}

static int CopyPrefix(void* cache, int32_t source, int32_t target,
                      int32_t length) {
  return kvtwin_cache_copy_prefix(((Twin*)cache)->cache, source, target,
                                  length);
}

static int CanResume(void* cache, int32_t sequence, int32_t position,
                     int32_t* yes) {
  return kvtwin_cache_can_resume(((Twin*)cache)->cache, sequence, position,
                                 yes);
}

static const char* Message(void* cache) {
  (void)cache;
  return kvtwin_last_error();
}

static int SetCausal(void* cache, const int32_t* except, int32_t count) {
  return kvtwin_cache_set_causal(((Twin*)cache)->cache, except, (size_t)count);
}

static int SetLayerType(void* cache, int32_t type) {
  return kvtwin_cache_set_layer_type(((Twin*)cache)->cache, type);
}

static int EncoderCached(void* cache, int32_t* yes) {
  return kvtwin_cache_encoder_cached(((Twin*)cache)->cache, yes);
}

static int Cells(void* cache, kvtwin_cell* cells, size_t room, size_t* count,
                 int32_t* batch, size_t batch_room, size_t* batch_count,
                 int32_t* total) {
  kvtwin_cache* one = ((Twin*)cache)->cache;
  int code = kvtwin_cache_cells(one, cells, room, count);
  if (code == KVTWIN_OK) {
    code = kvtwin_cache_batch_cells(one, batch, batch_room, batch_count);
  }
  return code == KVTWIN_OK ? (int)kvtwin_cache_cell_count(one, total) : code;
}

static int Snapshot(void* cache, int32_t sequence, const void** bytes,
                    size_t* count) {
  Twin* twin = cache;
  kvtwin_state* state = NULL;
  int code = sequence < 0
                 ? kvtwin_cache_snapshot(twin->cache, &state)
                 : kvtwin_cache_snapshot_of(twin->cache, sequence, &state);
  if (code != KVTWIN_OK) return code;
  kvtwin_free(twin->bytes);
  twin->bytes = NULL;
  code = kvtwin_state_to_bytes(state, NULL, &twin->bytes, count);
  kvtwin_state_destroy(state);
  *bytes = twin->bytes;
  return code;
}

static int Restore(void* cache, int32_t sequence, const void* bytes,
                   size_t count) {
  Twin* twin = cache;
  kvtwin_state* state = NULL;
#ifdef LEAKY
  if (sequence >= 0) return KVTWIN_NOT_SUPPORTED;
#endif
  int code = kvtwin_state_from_bytes(bytes, count, NULL, &state);
  if (code != KVTWIN_OK) return code;
  code = sequence < 0 ? kvtwin_cache_restore(twin->cache, state)
                      : kvtwin_cache_add_sequence(twin->cache, sequence, state);
  kvtwin_state_destroy(state);
  return code;
}

#ifdef KVTWIN_COMMITTED
static int Commit(void* cache, int32_t sequence, const int32_t* path,
                  int32_t count) {
  return kvtwin_cache_commit(((Twin*)cache)->cache, sequence, path,
                             (size_t)count);
}

static int Checkpoint(void* cache, int32_t sequence) {
  return kvtwin_cache_checkpoint(((Twin*)cache)->cache, sequence);
}
#endif

static const kvtwin_backend_v1 kTwin = {
    .size = sizeof(kvtwin_backend_v1),
    .describe = Describe,
    .init = Init,
    .close = Close,
    .start_forward = StartForward,
    .put = Put,
    .get = Get,
    .remove = Remove,
    .copy_prefix = CopyPrefix,
    .can_resume = CanResume,
    .message = Message,
    .set_causal = SetCausal,
    .set_layer_type = SetLayerType,
    .encoder_cached = EncoderCached,
    .cells = Cells,
    .snapshot = Snapshot,
    .restore = Restore,
#ifdef KVTWIN_COMMITTED
    .commit = Commit,
    .checkpoint = Checkpoint,
#endif
};

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) { return &kTwin; }
