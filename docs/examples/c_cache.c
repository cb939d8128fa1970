/* A cache with one K and one V tensor for each sequence and layer: the smallest
 * backend that kvtwin can drive (docs/live.md):
 *
 *   gcc -shared -fPIC -I include -o mine.so docs/examples/c_cache.c
 *   build/kvtwin fuzz --backend ./mine.so
 *
 * With -DBUG, its window is one token too short. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvtwin/kvtwin.h"

enum { kSequences = 4, kLayers = 4 };

typedef struct {
  int layers, heads, k_dim, v_dim, capacity, window;
  int length[kSequences]; /* Tokens stored, including those of the batch. */
  float *k[kSequences][kLayers], *v[kSequences][kLayers];
  int sequence, first, tokens; /* The batch: positions from `first` on. */
  float* mask;
} Mine;

static int Describe(kvtwin_description_v1* out) {
  out->name = "c_cache";
  out->kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA;
  out->can = KVTWIN_CAN_REMOVE_TAIL;
  out->max_sequences = kSequences;
  out->max_layers = kLayers;
  return KVTWIN_OK;
}

static int Init(const kvtwin_setup_v1* setup, void** cache) {
  Mine* c = calloc(1, sizeof(Mine));
  size_t capacity = (size_t)setup->cache->capacity;
  size_t batch = (size_t)setup->cache->max_batch;
  c->capacity = setup->cache->capacity;
  c->layers = setup->layers;
  c->heads = setup->kv_heads;
  c->k_dim = setup->k_head_dim;
  c->v_dim = setup->v_head_dim;
  c->window = setup->cache->window;
  c->mask = malloc(batch * capacity * sizeof(float));
  for (int s = 0; s < kSequences; ++s) {
    for (int l = 0; l < c->layers; ++l) {
      c->k[s][l] = malloc(capacity * (size_t)(c->heads * c->k_dim) * 4);
      c->v[s][l] = malloc(capacity * (size_t)(c->heads * c->v_dim) * 4);
    }
  }
  *cache = c;
  return KVTWIN_OK;
}

static void Close(void* cache) {
  Mine* c = cache;
  for (int s = 0; s < kSequences; ++s) {
    for (int l = 0; l < c->layers; ++l) {
      free(c->k[s][l]);
      free(c->v[s][l]);
    }
  }
  free(c->mask);
  free(c);
}

static int StartForward(void* cache, const kvtwin_batch* batch, int reserve) {
  Mine* c = cache;
  (void)reserve;
  c->sequence = batch->sequences[0];
  c->first = batch->positions[0];
  c->tokens = batch->tokens;
  c->length[c->sequence] = c->first + c->tokens;
  return KVTWIN_OK;
}

static int Put(void* cache, int32_t layer, const kvtwin_tensor* key,
               const kvtwin_tensor* value) {
  Mine* c = cache;
  size_t k_row = (size_t)(c->heads * c->k_dim);
  size_t v_row = (size_t)(c->heads * c->v_dim);
  memcpy(c->k[c->sequence][layer] + (size_t)c->first * k_row, key->data,
         (size_t)c->tokens * k_row * 4);
  memcpy(c->v[c->sequence][layer] + (size_t)c->first * v_row, value->data,
         (size_t)c->tokens * v_row * 4);
  return KVTWIN_OK;
}

static int Get(void* cache, int32_t layer, kvtwin_view* view) {
  Mine* c = cache;
  int length = c->length[c->sequence];
  for (int row = 0; row < c->tokens; ++row) {
    int now = c->first + row;
    int oldest = c->window < 0 ? 0 : now - c->window;
#ifdef BUG
    oldest = c->window < 0 ? 0 : now - c->window + 1;
#endif
    for (int at = 0; at < length; ++at) {
      c->mask[row * length + at] = at <= now && at >= oldest ? 0 : -INFINITY;
    }
  }
  view->columns = length;
  view->key.data = c->k[c->sequence][layer];
  view->value.data = c->v[c->sequence][layer];
  view->mask.data = c->mask;
  return KVTWIN_OK;
}

static int Remove(void* cache, int32_t sequence, int32_t begin, int32_t end) {
  Mine* c = cache;
  (void)end; /* Always the open end: CAN_REMOVE_MIDDLE is not declared. */
  if (begin < c->length[sequence]) c->length[sequence] = begin;
  return KVTWIN_OK;
}

static const kvtwin_backend_v1 kBackend = {
    .size = sizeof(kvtwin_backend_v1),
    .describe = Describe,
    .init = Init,
    .close = Close,
    .start_forward = StartForward,
    .put = Put,
    .get = Get,
    .remove = Remove,
};

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) { return &kBackend; }
