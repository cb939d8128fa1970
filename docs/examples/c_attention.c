/* An engine that computes attention and does not show its rows: a backend for
 * the level `attention` (docs/live.md).
 *
 *   gcc -shared -fPIC -I include -o mine.so docs/examples/c_attention.c -lm
 *   build/kvtwin fuzz --backend ./mine.so
 *
 * With -DBUG, its window is one token too long. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvtwin/kvtwin.h"

enum { kSequences = 4, kLayers = 4, kSinks = 64 };

typedef struct {
  int layers, heads, k_dim, v_dim, window;
  float *k[kSequences][kLayers], *v[kSequences][kLayers];
  float soft_cap, sinks[kSinks];
  int sink_count;
  int sequence, first, tokens; /* The batch: positions from `first` on. */
} Mine;

static int Describe(kvtwin_description_v1* out) {
  out->name = "c_attention";
  out->level = KVTWIN_ATTENTION;
  out->kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA;
  out->can = KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_SOFT_CAP | KVTWIN_CAN_SINKS;
  out->max_sequences = kSequences;
  out->max_layers = kLayers;
  return KVTWIN_OK;
}

static int Init(const kvtwin_setup_v1* setup, void** cache) {
  if (setup->sink_count > kSinks) return KVTWIN_NOT_SUPPORTED;
  Mine* c = calloc(1, sizeof(Mine));
  c->soft_cap = setup->soft_cap;
  c->sink_count = setup->sink_count;
  for (int h = 0; h < c->sink_count; ++h) c->sinks[h] = setup->sinks[h];
  size_t capacity = (size_t)setup->cache->capacity;
  c->layers = setup->layers;
  c->heads = setup->kv_heads;
  c->k_dim = setup->k_head_dim;
  c->v_dim = setup->v_head_dim;
  c->window = setup->cache->window;
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
  free(c);
}

static int StartForward(void* cache, const kvtwin_batch* batch, int reserve) {
  Mine* c = cache;
  (void)reserve;
  c->sequence = batch->sequences[0];
  c->first = batch->positions[0];
  c->tokens = batch->tokens;
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

/* The attention of one head of one row: `now` is the position of the row,
 * `sink` the score of its sink, -INFINITY without a sink. Weights are relative
 * to the largest score so far, since expf of a score may overflow. */
static void AttendOne(const Mine* c, int layer, int head, int now, float sink,
                      const float* query, float* out) {
  const float* k = c->k[c->sequence][layer] + head * c->k_dim;
  const float* v = c->v[c->sequence][layer] + head * c->v_dim;
  int oldest = c->window < 0 ? 0 : now - c->window;
#ifdef BUG
  --oldest;
#endif
  if (oldest < 0) oldest = 0;
  float largest = sink;
  float sum = sink > -INFINITY ? 1 : 0;
  memset(out, 0, (size_t)c->v_dim * sizeof(float));
  for (int at = oldest; at <= now; ++at) {
    const float* key = k + at * c->heads * c->k_dim;
    const float* value = v + at * c->heads * c->v_dim;
    float score = 0;
    for (int i = 0; i < c->k_dim; ++i) score += query[i] * key[i];
    score /= sqrtf((float)c->k_dim);
    if (c->soft_cap > 0) score = c->soft_cap * tanhf(score / c->soft_cap);
    if (score > largest) {
      float scale = expf(largest - score);
      largest = score;
      sum *= scale;
      for (int i = 0; i < c->v_dim; ++i) out[i] *= scale;
    }
    float weight = expf(score - largest);
    sum += weight;
    for (int i = 0; i < c->v_dim; ++i) out[i] += weight * value[i];
  }
  for (int i = 0; i < c->v_dim; ++i) out[i] /= sum;
}

static int Attend(void* cache, int32_t layer, const kvtwin_tensor* query,
                  float* out) {
  Mine* c = cache;
  int heads = (int)query->shape[1];
  for (int row = 0; row < c->tokens; ++row) {
    for (int h = 0; h < heads; ++h) {
      int one = row * heads + h;
      float sink = h < c->sink_count ? c->sinks[h] : -INFINITY;
      AttendOne(c, layer, h / (heads / c->heads), c->first + row, sink,
                (const float*)query->data + one * c->k_dim,
                out + one * c->v_dim);
    }
  }
  return KVTWIN_OK;
}

static int Remove(void* cache, int32_t sequence, int32_t begin, int32_t end) {
  (void)cache, (void)sequence, (void)begin, (void)end;
  return KVTWIN_OK; /* The tokens that follow overwrite the rows. */
}

static const kvtwin_backend_v1 kBackend = {
    .size = sizeof(kvtwin_backend_v1),
    .describe = Describe,
    .init = Init,
    .close = Close,
    .start_forward = StartForward,
    .put = Put,
    .remove = Remove,
    .attend = Attend,
};

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) { return &kBackend; }
