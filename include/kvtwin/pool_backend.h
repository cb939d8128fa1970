/* The table of functions by which the harness drives your own pool of blocks,
 * as it drives caches (<kvtwin/kvtwin.h>, "A cache of your own"). */

#ifndef KVTWIN_POOL_BACKEND_H_
#define KVTWIN_POOL_BACKEND_H_

#include "kvtwin/kvtwin.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The abilities of a pool, as flags. With one of the first three,
 * STATES_IN_PLACE, ONE_STOCK or NO_RESERVE, a pool differs from P1 to P18; it
 * is then checked by the rules that its flags state, at the level of
 * visibility. */
typedef enum kvtwin_pool_ability {
  /* A commit swaps the whole blocks of a sequence for others of the same tokens
   * under the same key. */
  KVTWIN_POOL_DEDUPLICATES = 1,
  /* A prompt of whole blocks may be found up to its last token: open begins
   * with all its tokens except the last one, which the client appends next, and
   * which is stored in the block where it was found. */
  KVTWIN_POOL_RECOMPUTES_LAST = 2,
  /* A token sees `window` positions before its own. Tokens that no later token
   * sees may be gone: views then begin at a later position, and entries of
   * table, csr and slots for such blocks may be anything. In a pool without
   * groups, fork and truncate still keep the length that they were asked for.
   */
  KVTWIN_POOL_HAS_WINDOW = 4,
  /* `init` may get params with groups of layers (P12 to P18): each group has a
   * block size, and perhaps a window, or states in place of rows. Without this
   * flag `init` never gets groups. Fork and truncate may keep fewer tokens than
   * they were asked for (P14); seq_len says how many. */
  KVTWIN_POOL_HAS_GROUPS = 8,
  /* Prompts may have media, and the table has add_media (P17). */
  KVTWIN_POOL_HAS_MEDIA = 16,
  /* In groups with states, a pass may write over the state that it reads. A
   * pass is then committed as a whole, or its sequence is freed. */
  KVTWIN_POOL_STATES_IN_PLACE = 32,
  /* All groups take their blocks from one stock, and number them alike. A block
   * must be in one group at a time. */
  KVTWIN_POOL_ONE_STOCK = 64,
  /* `attend` takes the soft cap, or the sinks, of its options into account. */
  KVTWIN_POOL_HAS_SOFT_CAP = 128,
  KVTWIN_POOL_HAS_SINKS = 256,
  /* A sequence never holds more blocks than it needed when it had the most
   * tokens and appended rows: `usage` counts no other block as used. */
  KVTWIN_POOL_NO_RESERVE = 512
} kvtwin_pool_ability;

/* The abilities of your pool. */
typedef struct kvtwin_pool_description_v1 {
  size_t size;      /* sizeof(kvtwin_pool_description_v1) */
  const char* name; /* For reports. */
  /* Default: VISIBILITY, which does not check what a prompt finds, which blocks
   * are taken and when the pool is full; but once all sequences are freed, a
   * pool without `usage` must have the room of a new pool. IDENTITY: everything
   * is as P1 to P18 say, misuse is refused, and the table has every function
   * above `attend`. ATTENTION: as VISIBILITY, but the outputs of `attend` are
   * compared in place of views. */
  kvtwin_level level;
  uint32_t can;   /* Flags of kvtwin_pool_ability. */
  int32_t window; /* Positions, with KVTWIN_POOL_HAS_WINDOW. */

  /* For `attend`, as in kvtwin_description_v1. */
  kvtwin_dtype attend_dtype; /* F32, or the F16 or BF16 to which it rounds
                                queries, scores, weights or outputs. */
  int32_t max_query_heads;   /* For each KV head. 0: any number. */
  double attend_tolerance;   /* The error of the pool's own number formats. It
                                is added to the bound of rounding. */

  /* The pools that `init` makes; histories have no others. `init` may still
   * refuse some of them. */
  uint32_t dtypes;           /* 1 << kvtwin_dtype of stored rows. 0: any. */
  int32_t block_multiple;    /* block_size is a multiple of it. 0: any. */
  int32_t head_dim_multiple; /* k_head_dim and v_head_dim are multiples of it.
                                0: any. */
  int32_t max_sequences;     /* Sequences that may be open at a time. 0: six.
                                Histories have 72 at most; those at IDENTITY
                                may have 72, whatever this is. */
} kvtwin_pool_description_v1;

/* Your own pool as a table, used like kvtwin_backend_v1 for caches. Each
 * function must do what the function of its name in kvtwin.h does: `open` as
 * kvtwin_pool_open, and so on. */
typedef struct kvtwin_pool_backend_v1 {
  size_t size; /* sizeof(kvtwin_pool_backend_v1) */

  /* `out` has the defaults above; change what differs. */
  int (*describe)(kvtwin_pool_description_v1* out);
  /* NOT_SUPPORTED: you have no such pool; its histories are skipped. */
  int (*init)(const kvtwin_pool_params* params, void** pool);
  void (*close)(void* pool);

  /* A sequence has at most max_seq_len tokens, and at most as many as all
   * blocks hold. Prompts are never NULL. In a pool that shares nothing a
   * sequence begins without tokens. */
  int (*open)(void* pool, const kvtwin_prompt* prompt, int32_t* sequence);
  int (*seq_len)(void* pool, int32_t sequence, int32_t* length);
  /* The rows are f32, or of the dtypes of the pool, and dense. Rows of f32 are
   * converted to the dtypes of the pool, as by kvtwin_pool_append. */
  int (*append)(void* pool, int32_t sequence, int32_t layer,
                const kvtwin_tensor* key, const kvtwin_tensor* value);
  /* `count` may be 0, which drops the appended rows; `tokens` may then be
   * NULL. */
  int (*commit)(void* pool, int32_t sequence, const int32_t* tokens,
                size_t count);
  /* Views may have any lengths, and have the dtypes of the pool. `block` is -1
   * if the pool has no blocks. In a group with states, a view has one row, the
   * state after the token at `start`; views of earlier states may be left out.
   * May be NULL if there is an `attend`; the level is then ATTENTION. */
  int (*views)(void* pool, int32_t sequence, int32_t layer,
               kvtwin_paged_view* views, size_t room, size_t* count);
  int (*free)(void* pool, int32_t sequence);

  /* Optional. */
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
  /* A slot for each of the end - begin positions. */
  int (*slots)(void* pool, int32_t sequence, int32_t begin, int32_t end,
               int64_t* slots, size_t room, size_t* count);

  /* Optional. For pools with groups, the next three take the place of table,
   * csr and slots; usage adds all groups up. */
  int (*group_table)(void* pool, int32_t group, const int32_t* sequences,
                     size_t sequence_count, int32_t* columns, int32_t* blocks,
                     size_t room, size_t* count, int32_t* seq_lens);
  int (*group_csr)(void* pool, int32_t group, const int32_t* sequences,
                   size_t sequence_count, int32_t* indptr, int32_t* indices,
                   size_t room, size_t* count, int32_t* last_page_len);
  int (*group_slots)(void* pool, int32_t group, int32_t sequence, int32_t begin,
                     int32_t end, int64_t* slots, size_t room, size_t* count);
  int (*add_media)(void* pool, int32_t sequence, const kvtwin_media* media);
  /* For pools with groups at the level of identity. */
  int (*group_usage)(void* pool, int32_t group, kvtwin_usage* usage);
  int (*find)(void* pool, const kvtwin_prompt* prompt, int32_t* length);
  int (*resume_before)(void* pool, int32_t sequence, int32_t length,
                       int32_t* resume);
  /* Optional. Computes attention over a layer (P19); the harness compares the
   * outputs at every level. query = [k_head_dim, heads, rows], f32 and dense,
   * has a row for each of the last query_rows[i] tokens of sequences[i], one
   * sequence after another; these tokens were appended to the layer and are not
   * committed. `out` has room for [v_head_dim, heads, rows], dense. heads /
   * kv_heads heads share a KV head. A token sees itself and the tokens of its
   * sequence before it; with a window, only the `window` positions before it.
   * `options` has the scale, 1 / sqrt(k_head_dim), and, if `can` declares them,
   * a soft cap or sinks; its other fields are 0. */
  int (*attend)(void* pool, int32_t layer, const int32_t* sequences,
                const int32_t* query_rows, size_t sequence_count,
                const kvtwin_tensor* query,
                const kvtwin_attention_options* options, float* out);
} kvtwin_pool_backend_v1;

/* The function that your shared library exports. */
typedef const kvtwin_pool_backend_v1* (*kvtwin_get_pool_backend_v1_fn)(void);
/* The name of that function. */
#define KVTWIN_GET_POOL_BACKEND_V1 "kvtwin_get_pool_backend_v1"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVTWIN_POOL_BACKEND_H_ */
