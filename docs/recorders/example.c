/* A toy KV cache that records itself, and a program that uses it:
 *
 *   cc -std=c99 example.c -o example && ./example toy.jsonl
 *   kvtwin check toy.jsonl
 *
 * It has a list of tokens for each sequence, so its placement is "other". With
 * --bug it forgets the last token of each prefix that it copies. */

#include "kvtwin_recorder.h"

enum { kSequences = 2, kCapacity = 8, kLayers = 2, kHeads = 2, kHeadDim = 2 };
enum { kK = kHeads * kHeadDim, kV = kHeads };

typedef struct token {
  int32_t position;
  float key[kLayers][kK];
  float value[kLayers][kV];
} token;

static token lists[kSequences][kCapacity];
static int32_t lengths[kSequences];
static kvrec recorder;

static void copy_prefix(int32_t src, int32_t dst, int32_t len, int bug) {
  int32_t i;
  lengths[dst] = 0;
  for (i = 0; i < len - bug; ++i) {
    lists[dst][lengths[dst]++] = lists[src][i];
  }
  kvrec_copy_prefix(&recorder, src, dst, len);
}

/* Removes the tokens in [begin, end); later tokens move down, and "tag_add"
 * shifts their K rows. */
static void remove_range(int32_t seq, int32_t begin, int32_t end) {
  int32_t i, kept = 0;
  int layer, k;
  for (i = 0; i < lengths[seq]; ++i) {
    token moved = lists[seq][i];
    if (moved.position >= begin && moved.position < end) continue;
    if (moved.position >= end) {
      moved.position -= end - begin;
      for (layer = 0; layer < kLayers; ++layer) {
        for (k = 0; k < kK; ++k) {
          if (k % kHeadDim != 0) moved.key[layer][k] -= (float)(end - begin);
        }
      }
    }
    lists[seq][kept++] = moved;
  }
  lengths[seq] = kept;
  kvrec_remove(&recorder, seq, begin, end, "ok");
}

/* Records the view that attention reads: all lists, one after the other. */
static void get(int layer, const token* const* batch, const int32_t* sequences,
                int32_t tokens) {
  static float key[kSequences * kCapacity * kK];
  static float value[kSequences * kCapacity * kV];
  static unsigned char sees[kSequences * kCapacity * kCapacity];
  int32_t seq, at, row, n = 0, total = 0;
  kvrec_tensor values;
  kvrec_mask mask;
  for (seq = 0; seq < kSequences; ++seq) total += lengths[seq];
  for (seq = 0; seq < kSequences; ++seq) {
    for (at = 0; at < lengths[seq]; ++at, ++n) {
      const token* stored = &lists[seq][at];
      memcpy(&key[n * kK], stored->key[layer], sizeof stored->key[layer]);
      memcpy(&value[n * kV], stored->value[layer], sizeof stored->value[layer]);
      for (row = 0; row < tokens; ++row) {
        sees[row * total + n] =
            sequences[row] == seq && stored->position <= batch[row]->position;
      }
    }
  }
  values = kvrec_dense(value, 1, kHeads, n);
  mask = kvrec_mask_bool(sees, n, tokens);
  kvrec_get(&recorder, layer, KVREC_NONE, kvrec_dense(key, kHeadDim, kHeads, n),
            &values, &mask);
}

/* Runs a forward pass: one token for each of these sequences. */
static void forward(const int32_t* sequences, int32_t tokens) {
  static int32_t produced; /* The number of tokens made so far. */
  int32_t positions[kCapacity], lengths_after[kSequences], i;
  token* batch[kCapacity];
  float key[kCapacity][kK], value[kCapacity][kV];
  int layer, k, full = 0;
  kvrec_pass pass;
  memcpy(lengths_after, lengths, sizeof lengths);
  for (i = 0; i < tokens; ++i) {
    positions[i] = lengths_after[sequences[i]]++;
    full = full || positions[i] >= kCapacity;
  }
  pass = kvrec_batch(tokens, positions, sequences, full ? "cache_full" : "ok");
  kvrec_start_forward(&recorder, &pass);
  if (full) return;
  for (i = 0; i < tokens; ++i) {
    batch[i] = &lists[sequences[i]][lengths[sequences[i]]++];
    batch[i]->position = positions[i];
  }
  for (layer = 0; layer < kLayers; ++layer) {
    /* Each token has different rows: its number, and its position. */
    for (i = 0; i < tokens; ++i) {
      const float number = (float)(100 * (produced + i + 1) + layer);
      for (k = 0; k < kK; ++k) {
        key[i][k] = k % kHeadDim == 0 ? number : 1000 + (float)positions[i];
      }
      for (k = 0; k < kV; ++k) value[i][k] = number;
      memcpy(batch[i]->key[layer], key[i], sizeof key[i]);
      memcpy(batch[i]->value[layer], value[i], sizeof value[i]);
    }
    kvrec_put(&recorder, layer, kvrec_dense(key[0], kHeadDim, kHeads, tokens),
              kvrec_dense(value[0], 1, kHeads, tokens));
    get(layer, (const token* const*)batch, sequences, tokens);
  }
  produced += tokens;
}

int main(int argc, char** argv) {
  const int bug = argc > 2 && strcmp(argv[2], "--bug") == 0;
  const int32_t prompt[] = {0, 0, 0}, both[] = {1, 0, 1};
  const int32_t many[] = {0, 0, 0, 0, 0, 0, 0};
  kvrec_header header = kvrec_default_header();
  if (argc < 2) return 2;
  header.producer = "a toy";
  header.caches[0].shift = "tag_add";
  header.max_sequences = kSequences;
  header.capacity = header.max_batch = kCapacity;
  header.layers = kLayers;
  header.k_head_dim = kHeadDim;
  header.kv_heads = kHeads;
  header.v_head_dim = 1;
  kvrec_open(&recorder, argv[1], &header);

  forward(prompt, 3);
  copy_prefix(0, 1, 2, bug);
  forward(both, 3);
  remove_range(0, 0, 1);
  forward(both, 3);
  kvrec_can_resume(&recorder, 0, 4, 1);
  remove_range(1, 3, KVREC_OPEN_END);
  forward(both, 1);
  forward(many, 7);

  if (kvrec_close(&recorder) == 0) return 0;
  fprintf(stderr, "example: %s\n", recorder.error);
  return 1;
}
