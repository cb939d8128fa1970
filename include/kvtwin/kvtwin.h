/* kvtwin from C, and from any language that can call C.
 *
 * This header has caches, pools, attention, sessions, recordings and their
 * check, and the table of functions by which the harness drives your own cache
 * (`kvtwin fuzz --backend ./libyours.so`, docs/live.md). Link with -lkvtwin
 * (pkg-config kvtwin); docs/c_interface.md has an example.
 *
 * No exception leaves this library. Terms, units and rules are those of
 * <kvtwin/cache.h>, <kvtwin/paged.h> and docs/semantics.md. Shapes have the
 * first dimension fastest.
 *
 * Sizes: a struct that may grow begins with its size, which is sizeof in the
 * caller's header; the functions for defaults set it, too. A size that is too
 * small is an error that names the struct. If the caller is older than the
 * library, fields that its struct lacks have their defaults, and the library
 * writes no further than the struct's size. If the caller is newer, fields that
 * the library does not know must be 0, and the library leaves them unchanged in
 * its output. Structs without a size never change.
 *
 * Output lists: `room` is the number of entries that fit into the list, and
 * *count becomes the number of entries that there are; as many as fit are
 * written. If room is 0, the list may be NULL.
 *
 * An argument that is NULL is an error, unless its comment allows it. One
 * thread at a time may use a handle; different handles may be used at once. */

#ifndef KVTWIN_KVTWIN_H_
#define KVTWIN_KVTWIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The result of a call: 0 is ok, positive is a refusal (an outcome that a
 * correct caller expects and handles), negative is an error. Neither a refusal
 * nor an error changes anything, except as <kvtwin/status.h> says. */
typedef enum kvtwin_status {
  KVTWIN_OK = 0,
  KVTWIN_CACHE_FULL = 1,    /* No cells for the batch. */
  KVTWIN_NOT_SUPPORTED = 2, /* This kind of cache cannot do what was asked. */
  KVTWIN_SHARED_CELLS = 3,  /* A token that would move is shared. */
  KVTWIN_INVALID_ARGUMENT = -1,
  KVTWIN_FAILED_PRECONDITION = -2, /* The call comes at the wrong time. */
  KVTWIN_OUT_OF_MEMORY = -3,
  KVTWIN_INTERNAL = -4,    /* An unexpected exception; the cache is unusable. */
  KVTWIN_DEVICE_ERROR = -5 /* CUDA returned an error. */
} kvtwin_status;

/* "ok", "cache_full", ...; "unknown" for any other number. */
const char* kvtwin_status_name(int status);

/* The message of this thread's last call that did not return KVTWIN_OK: it
 * names the argument and its value. Empty if there was no such call. Valid
 * until this thread's next such call, or the thread's end. */
const char* kvtwin_last_error(void);

/* The version of the library, "0.1.0". */
const char* kvtwin_version(void);

/* As the end of a range: the range has every position from its begin on. */
#define KVTWIN_OPEN_END INT32_MAX

/* As the parent of a batch token: it is an ordinary token, or a draft that
 * follows the committed tokens of its sequence. */
#define KVTWIN_NOT_A_DRAFT (-2)
#define KVTWIN_COMMITTED (-1)

/* Element types, as DType of <kvtwin/tensor.h>. */
typedef enum kvtwin_dtype {
  KVTWIN_AS_K = -1, /* Only as v_dtype in parameters: the dtype of K. */
  KVTWIN_F32 = 0,
  KVTWIN_F16 = 1,
  KVTWIN_BF16 = 2,
  KVTWIN_F8_E4M3 = 3,
  KVTWIN_Q8_0 = 4,
  KVTWIN_Q4_0 = 5,
  KVTWIN_BITS = 6 /* Only for masks. */
} kvtwin_dtype;

/* The tokens that a token sees, as Kind of <kvtwin/cache.h>. */
typedef enum kvtwin_kind {
  KVTWIN_CAUSAL = 0,
  KVTWIN_SWA = 1,
  KVTWIN_SWA_MEM = 2,
  KVTWIN_CHUNKED = 3,
  KVTWIN_ENCODER = 4,
  KVTWIN_WRAPPER = 5,
  KVTWIN_RECURRENT = 6,
  KVTWIN_HYBRID = 7
} kvtwin_kind;

/* How a batch gets its cells, as Placement of <kvtwin/cache.h>. */
typedef enum kvtwin_placement {
  KVTWIN_CONTIGUOUS = 0,
  KVTWIN_SCATTER = 1
} kvtwin_placement;

/* How the V rows of a cache lie in memory, first dimension fastest. */
typedef enum kvtwin_v_layout {
  KVTWIN_V_PLAIN = 0,    /* [v_head_dim, kv_heads, cells] */
  KVTWIN_V_PERMUTED = 1, /* [cells, v_head_dim, kv_heads] */
  KVTWIN_V_TILED = 2     /* [32, v_head_dim, kv_heads, cells / 32] */
} kvtwin_v_layout;

/* How K rows change when their position does (docs/semantics.md, S34). */
typedef enum kvtwin_shift_kind {
  KVTWIN_SHIFT_NONE = 0, /* No shift: Remove from the middle is refused. */
  KVTWIN_SHIFT_IDENTITY = 1,
  KVTWIN_SHIFT_ADD = 2,
  KVTWIN_SHIFT_TAG_ADD = 3,
  KVTWIN_SHIFT_ROPE = 4,
  KVTWIN_SHIFT_CUSTOM = 5 /* kvtwin_shift.fn */
} kvtwin_shift_kind;

/* The caller's shift function: rewrites one token's K row, `key` = [k_head_dim,
 * kv_heads], for a position that changed by `offset`. If it does not return
 * KVTWIN_OK, the remove changes nothing and returns the same refusal or error;
 * it returns KVTWIN_NOT_SUPPORTED for KVTWIN_OUT_OF_MEMORY, KVTWIN_INTERNAL and
 * unknown numbers. The function may be called for rows that are then discarded,
 * and from several threads at once. It must not throw. */
typedef int (*kvtwin_shift_fn)(void* user, int32_t layer, int32_t offset,
                               int32_t k_head_dim, int32_t kv_heads,
                               float* key);

/* The shift function of a cache. */
typedef struct kvtwin_shift {
  kvtwin_shift_kind kind; /* Which function. */
  int rope_halves;    /* Not 0: pairs are (i, i + dims / 2); 0: (2i, 2i + 1). */
  int rope_dims;      /* Elements of a head that rotate, an even number; 0: all.
                         A head with fewer elements rotates all of them, without
                         the last of an odd number: min(rope_dims, k_head_dim)
                         / 2 * 2. A NaN keeps its bits; a result that becomes
                         NaN is 0x7FC00000. */
  double rope_base;   /* > 0, finite. */
  double rope_scale;  /* Finite. */
  kvtwin_shift_fn fn; /* For KVTWIN_SHIFT_CUSTOM, which backends never get. */
  void* user;         /* The first argument of `fn`. */
} kvtwin_shift;

/* A tensor in memory that this struct does not own. Element (i, j, k, l) lies
 * stride[0]*i + ... + stride[3]*l bytes after `data`; unused dimensions are 1.
 * For bits and blocks (q8_0, q4_0) stride[0] is 0: see <kvtwin/tensor.h>.
 * Strides that are all 0 mean that the tensor is dense. */
typedef struct kvtwin_tensor {
  const void* data;   /* NULL if the tensor is absent. */
  kvtwin_dtype dtype; /* The type of the elements. */
  int64_t shape[4];   /* Elements of each dimension. */
  int64_t stride[4];  /* In bytes; not all 0, except for one element. */
} kvtwin_tensor;

/* The tokens of one forward pass. Entry i of each list is for token i. */
typedef struct kvtwin_batch {
  size_t size;               /* sizeof this struct, see the top. */
  const int32_t* positions;  /* `tokens` positions, >= 0. */
  const int32_t* sequences;  /* `tokens` sequences, >= 0. */
  int32_t tokens;            /* >= 1 */
  const int32_t* multimodal; /* Indices of tokens that carry an image or sound
                                (encoder caches). */
  int32_t multimodal_count;  /* Entries of `multimodal`. */
  /* Speculative decoding (docs/speculation.md): NULL, or `tokens` parents.
   * Token i is a draft that follows draft number parents[i] of its sequence, or
   * the committed tokens (KVTWIN_COMMITTED); or it is an ordinary token
   * (KVTWIN_NOT_A_DRAFT). */
  const int32_t* parents;
} kvtwin_batch;

/* The tensors that attention reads. They point into the cache. */
typedef struct kvtwin_view {
  size_t size;         /* sizeof this struct, see the top. */
  kvtwin_tensor key;   /* [k_head_dim, kv_heads, columns] */
  kvtwin_tensor value; /* [v_head_dim, kv_heads, columns], or see v_layout. */
  kvtwin_tensor mask;  /* [columns, rows]: 0 may attend, -inf may not. */
  int32_t first_cell;  /* The cell of column 0. */
  int32_t columns;     /* As in the shapes above. */
} kvtwin_view;

/* A membership: `cell` holds the token of `sequence` at `position`. */
typedef struct kvtwin_cell {
  int32_t cell;     /* >= 0 */
  int32_t position; /* >= 0 */
  int32_t sequence; /* >= 0 */
} kvtwin_cell;

/* The parameters of a cache. */
typedef struct kvtwin_cache_params {
  size_t size;                /* sizeof this struct, see the top. */
  kvtwin_kind kind;           /* The tokens that a token sees. */
  kvtwin_placement placement; /* How a batch gets its cells. */
  int32_t window;             /* Positions that a token sees before its own: one
                                 less than the sliding_window of Hugging Face.
                                 -1: unbounded. */
  int32_t memory;     /* -1: the window. With several sequences the memory is at
                         least window + 1 (S3 of docs/semantics.md). */
  int32_t chunk;      /* Positions, > 0 for KVTWIN_CHUNKED. */
  kvtwin_shift shift; /* How K rows change when their position does. */
  const struct kvtwin_cache_params* caches; /* For a wrapper or a hybrid: one
                                               after another, with `size` bytes
                                               each. */
  int32_t cache_count;                      /* Entries of `caches`. */
  /* How the kernels that read the views need them to be. */
  int32_t cache_padding;
  int32_t mask_batch_padding;
  kvtwin_v_layout v_layout;
  kvtwin_dtype mask_dtype;
  /* Storage. */
  kvtwin_dtype dtype;
  kvtwin_dtype v_dtype;
  int32_t max_sequences;
  int32_t capacity; /* Tokens for each sequence. */
  int32_t max_batch;
  /* For KVTWIN_RECURRENT: a sequence keeps its last `checkpoints` states after
   * a multiple of `checkpoint_every` tokens; 0: none. */
  int32_t checkpoint_every;
  int32_t checkpoints;
  /* The same: a sequence keeps its last `pins` states that
   * kvtwin_cache_checkpoint pinned, and has room for the states of `drafts`
   * drafts. */
  int32_t pins;
  int32_t drafts;
} kvtwin_cache_params;

/* Caches ------------------------------------------------------------------- */

/* Views stay valid until the next start_forward, set_causal, put to the same
 * encoder layer, restore, add_sequence or destroy. After KVTWIN_OUT_OF_MEMORY
 * or KVTWIN_INTERNAL a cache may only be destroyed. */
typedef struct kvtwin_cache kvtwin_cache;

/* The name of twin `index`: "reference", "optimized", with CUDA also "cuda".
 * NULL if there are at most `index` twins. */
const char* kvtwin_twin_name(size_t index);

/* Sets the defaults: a causal cache, contiguous, without a shift, of f32, one
 * sequence of 1 token. `size` is sizeof(kvtwin_cache_params). */
kvtwin_status kvtwin_cache_default_params(kvtwin_cache_params* params,
                                          size_t size);

/* `twin` is one of the names above; NULL is "optimized". */
kvtwin_status kvtwin_cache_create(const kvtwin_cache_params* params,
                                  const char* twin, kvtwin_cache** cache);

/* Frees `cache`, which may be NULL. */
void kvtwin_cache_destroy(kvtwin_cache* cache);

/* Finds a cell for each token. If `reserve` is not 0, nothing is stored or
 * changed, and views have their worst-case size. */
kvtwin_status kvtwin_cache_start_forward(kvtwin_cache* cache,
                                         const kvtwin_batch* batch,
                                         int reserve);

/* The batch tokens at the indices `except` also see tokens at later positions.
 * `except` may be NULL if `count` is 0. */
kvtwin_status kvtwin_cache_set_causal(kvtwin_cache* cache,
                                      const int32_t* except, size_t count);

/* Selects the active cache of a wrapper, which is 0 after each start_forward.
 * The functions below call the active cache only, except for copy_prefix,
 * remove, can_resume, resume_before, commit, checkpoint and the functions of
 * states: these call all caches. */
kvtwin_status kvtwin_cache_set_layer_type(kvtwin_cache* cache, int32_t type);

/* Stores the batch's rows in a layer: key [k_head_dim, kv_heads, tokens], value
 * [v_head_dim, kv_heads, tokens], any strides (the first is 0 if the rows
 * are in blocks), f32 or the dtype of the stored rows. An encoder takes any
 * shape. */
kvtwin_status kvtwin_cache_put(kvtwin_cache* cache, int32_t layer,
                               const kvtwin_tensor* key,
                               const kvtwin_tensor* value);

/* Sets all fields of `view` except its size. */
kvtwin_status kvtwin_cache_get(kvtwin_cache* cache, int32_t layer,
                               kvtwin_view* view);

/* Replaces `target`'s tokens by those of `source` at positions < length. */
kvtwin_status kvtwin_cache_copy_prefix(kvtwin_cache* cache, int32_t source,
                                       int32_t target, int32_t length);

/* Sets *yes to 1 if the sequence can continue at `position` with its whole
 * window still stored, else to 0. */
kvtwin_status kvtwin_cache_can_resume(kvtwin_cache* cache, int32_t sequence,
                                      int32_t position, int32_t* yes);

/* Sets *at to the greatest position <= `position` where the sequence can
 * continue, 0 if there is none. */
kvtwin_status kvtwin_cache_resume_before(kvtwin_cache* cache, int32_t sequence,
                                         int32_t position, int32_t* at);

/* Removes the tokens at positions in [begin, end) from the sequence; unless end
 * is KVTWIN_OPEN_END, later tokens move down by end - begin. */
kvtwin_status kvtwin_cache_remove(kvtwin_cache* cache, int32_t sequence,
                                  int32_t begin, int32_t end);

/* The drafts of the sequence with the numbers in `path` become ordinary tokens,
 * its other drafts are gone; an empty path rejects all. `path` may be NULL if
 * `count` is 0. */
kvtwin_status kvtwin_cache_commit(kvtwin_cache* cache, int32_t sequence,
                                  const int32_t* path, size_t count);

/* Pins the last state of a sequence of a recurrent cache, so that later passes
 * keep it. A hybrid or a wrapper does this in each of its recurrent caches that
 * have pins. Any other cache returns NOT_SUPPORTED. */
kvtwin_status kvtwin_cache_checkpoint(kvtwin_cache* cache, int32_t sequence);

/* Sets *yes to 1 if the slot of an encoder holds something, else to 0. */
kvtwin_status kvtwin_cache_encoder_cached(kvtwin_cache* cache, int32_t* yes);

/* Returns a wrapper's active cache, else the cache itself. `cache` owns it: do
 * not destroy it. */
kvtwin_status kvtwin_cache_underlying(kvtwin_cache* cache,
                                      kvtwin_cache** active);

/* Sets *cells to the number of cells of the cache. */
kvtwin_status kvtwin_cache_cell_count(kvtwin_cache* cache, int32_t* cells);

/* Lists all memberships, sorted by cell, then by sequence. */
kvtwin_status kvtwin_cache_cells(kvtwin_cache* cache, kvtwin_cell* cells,
                                 size_t room, size_t* count);

/* Lists the cell of each batch token; empty without a current pass. */
kvtwin_status kvtwin_cache_batch_cells(kvtwin_cache* cache, int32_t* cells,
                                       size_t room, size_t* count);

/* States: all that a cache holds ------------------------------------------- */

typedef struct kvtwin_state kvtwin_state;

/* Frees bytes or text that this library returned; `memory` may be NULL. */
void kvtwin_free(void* memory);

/* Frees `state`, which may be NULL. */
void kvtwin_state_destroy(kvtwin_state* state);

/* Set *state to all that a cache holds, without the current pass; and to the
 * part of one sequence. */
kvtwin_status kvtwin_cache_snapshot(kvtwin_cache* cache, kvtwin_state** state);
kvtwin_status kvtwin_cache_snapshot_of(kvtwin_cache* cache, int32_t sequence,
                                       kvtwin_state** state);

/* Makes the cache hold exactly `state`. */
kvtwin_status kvtwin_cache_restore(kvtwin_cache* cache,
                                   const kvtwin_state* state);
/* Adds a sequence that snapshot_of returned, under the number `sequence`. */
kvtwin_status kvtwin_cache_add_sequence(kvtwin_cache* cache, int32_t sequence,
                                        const kvtwin_state* added);

/* Converts a state to bytes, safetensors (<kvtwin/save.h>), and back. Free the
 * bytes with kvtwin_free. `model` is UTF-8 text, and must be the same in both
 * calls; NULL is "". */
kvtwin_status kvtwin_state_to_bytes(const kvtwin_state* state,
                                    const char* model, void** bytes,
                                    size_t* count);
kvtwin_status kvtwin_state_from_bytes(const void* bytes, size_t count,
                                      const char* model, kvtwin_state** state);

/* Save and load a state as a file. If the process dies while saving, the file
 * is still whole: the old or the new one. */
kvtwin_status kvtwin_state_save(const kvtwin_state* state, const char* path,
                                const char* model);
kvtwin_status kvtwin_state_load(const char* path, const char* model,
                                kvtwin_state** state);
/* Returns the `model` that a file was saved with; free it with kvtwin_free. */
kvtwin_status kvtwin_state_model(const char* path, char** model);

/* kvtwin_state_sequence sets *one to the part of a state that is of one
 * sequence. kvtwin_state_with_sequence sets *all to a state with one more
 * sequence: cells[i] is the number of cells of cache i of the wrapper; for any
 * other cache, cells[0] is its number of cells. */
kvtwin_status kvtwin_state_sequence(const kvtwin_state* state, int32_t sequence,
                                    kvtwin_state** one);
kvtwin_status kvtwin_state_with_sequence(const kvtwin_state* state,
                                         int32_t sequence,
                                         const kvtwin_state* added,
                                         const int32_t* cells, size_t count,
                                         kvtwin_state** all);

/* Pools of blocks that many sequences share -------------------------------- */

/* Views stay valid until the next open, fork, append, commit, truncate, free or
 * destroy. */
typedef struct kvtwin_pool kvtwin_pool;

/* The order of rows in a block. */
typedef enum kvtwin_paged_layout {
  KVTWIN_TOKEN_MAJOR = 0, /* [head_dim, kv_heads, tokens of the block] */
  KVTWIN_HEAD_MAJOR = 1   /* [head_dim, tokens of the block, kv_heads] */
} kvtwin_paged_layout;

/* The sizes of a pool, and of a group of layers in it. */
typedef struct kvtwin_pool_params {
  size_t size;         /* sizeof this struct, see the top. */
  int32_t block_size;  /* Tokens of a block. */
  int32_t blocks;      /* Blocks of the pool. */
  int32_t max_seq_len; /* Tokens of one sequence, at most. */
  /* The shape of the rows: K rows of a token are [k_head_dim, kv_heads]. */
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  kvtwin_dtype dtype;         /* The stored rows. */
  kvtwin_dtype v_dtype;       /* The stored V rows. */
  kvtwin_paged_layout layout; /* The order of rows in a block. */
  int32_t window; /* Positions that a token sees before its own; 0: all. */
  int32_t states; /* Not 0: a block has one row, the state after its tokens. */
  /* Groups of layers; if there are some, only max_seq_len of the above counts.
   * Their tables and slots are those of a group (kvtwin_pool_group_table). */
  const struct kvtwin_pool_params* groups;
  size_t group_count;
} kvtwin_pool_params;

/* An image or another input besides tokens. Rows from `position` on depend on
 * it. */
typedef struct kvtwin_media {
  int32_t position; /* The token where it begins. */
  const char* hash; /* Equal hashes mean equal contents. */
} kvtwin_media;

/* The tokens of a prompt, whose blocks a new sequence may share if they were
 * committed before with the same salt and extra, and the same media before the
 * end of the block. */
typedef struct kvtwin_prompt {
  size_t size;              /* sizeof this struct, see the top. */
  const int32_t* tokens;    /* >= 0 */
  size_t token_count;       /* Entries of `tokens`. */
  const char* salt;         /* Keeps tenants from sharing blocks. NULL is "". */
  const char* const* extra; /* An adapter and its version. */
  size_t extra_count;       /* Entries of `extra`. */
  const kvtwin_media* media; /* By position, ascending. */
  size_t media_count;        /* Entries of `media`. */
} kvtwin_prompt;

/* The rows of a sequence that are in one block. */
typedef struct kvtwin_paged_view {
  kvtwin_tensor key;   /* [k_head_dim, kv_heads, length]; packed: [k_head_dim,
                          length, kv_heads]. */
  kvtwin_tensor value; /* The same with v_head_dim. */
  int32_t start;       /* Position of the first row. */
  int32_t length;      /* Number of rows. */
  int32_t block;       /* The number of the block. */
} kvtwin_paged_view;

/* Numbers of blocks; the first three add up to all blocks of the pool. */
typedef struct kvtwin_usage {
  size_t size;    /* sizeof this struct, see the top. */
  int32_t free;   /* Blocks that hold nothing. */
  int32_t cached; /* Blocks that no sequence has, but a prompt may find. */
  int32_t used;   /* Blocks that at least one sequence has. */
  int32_t shared; /* Blocks that several sequences have. */
} kvtwin_usage;

/* Sets the defaults: one block of 16 tokens of f16, one layer, one head of one
 * element, sequences of 1 token. */
kvtwin_status kvtwin_pool_default_params(kvtwin_pool_params* params,
                                         size_t size);
kvtwin_status kvtwin_pool_create(const kvtwin_pool_params* params,
                                 const char* twin, kvtwin_pool** pool);
/* Frees `pool`, which may be NULL. */
void kvtwin_pool_destroy(kvtwin_pool* pool);

/* Makes a sequence with the blocks of the longest prefix of the prompt that is
 * stored; kvtwin_pool_seq_len returns its length. `prompt` may be NULL. */
kvtwin_status kvtwin_pool_open(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* sequence);

/* Sets *length to the length that kvtwin_pool_open would begin with. */
kvtwin_status kvtwin_pool_find(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* length);

/* Adds media to a sequence, for tokens that are committed later: `position` is
 * not below kvtwin_pool_seq_len. */
kvtwin_status kvtwin_pool_add_media(kvtwin_pool* pool, int32_t sequence,
                                    const kvtwin_media* media);

/* Sets *resume to the greatest length up to `length` at which the sequence can
 * resume. With a window or states, kvtwin_pool_fork and kvtwin_pool_truncate
 * take effect there. */
kvtwin_status kvtwin_pool_resume_before(kvtwin_pool* pool, int32_t sequence,
                                        int32_t length, int32_t* resume);

/* Makes a sequence of the first `length` tokens of another one. */
kvtwin_status kvtwin_pool_fork(kvtwin_pool* pool, int32_t sequence,
                               int32_t length, int32_t* made);

/* Sets *length to the number of committed tokens. */
kvtwin_status kvtwin_pool_seq_len(kvtwin_pool* pool, int32_t sequence,
                                  int32_t* length);

/* Stores rows of a layer after the committed ones, in place of rows appended
 * there before. *start becomes the position of the first row; `views` are the
 * views of the appended rows. `start` and `count` may be NULL. */
kvtwin_status kvtwin_pool_append(kvtwin_pool* pool, int32_t sequence,
                                 int32_t layer, const kvtwin_tensor* key,
                                 const kvtwin_tensor* value, int32_t* start,
                                 kvtwin_paged_view* views, size_t room,
                                 size_t* count);

/* Make the next tokens belong to the sequence. kvtwin_pool_commit gets their
 * ids, so that prompts find them; after kvtwin_pool_commit_unknown, no prompt
 * finds these tokens, or later ones of the sequence. */
kvtwin_status kvtwin_pool_commit(kvtwin_pool* pool, int32_t sequence,
                                 const int32_t* tokens, size_t count);
kvtwin_status kvtwin_pool_commit_unknown(kvtwin_pool* pool, int32_t sequence,
                                         int32_t new_tokens);

/* List the rows of a sequence in one layer, block by block, appended rows
 * included. kvtwin_pool_views_packed lists them packed, and needs the layout
 * KVTWIN_HEAD_MAJOR. */
kvtwin_status kvtwin_pool_views(kvtwin_pool* pool, int32_t sequence,
                                int32_t layer, kvtwin_paged_view* views,
                                size_t room, size_t* count);
kvtwin_status kvtwin_pool_views_packed(kvtwin_pool* pool, int32_t sequence,
                                       int32_t layer, kvtwin_paged_view* views,
                                       size_t room, size_t* count);
/* If the first kv_len of these rows lie one after another, sets *yes to 1, and
 * *key and *value to them as one tensor each; else sets *yes to 0. */
kvtwin_status kvtwin_pool_contiguous_kv(kvtwin_pool* pool, int32_t sequence,
                                        int32_t layer, int32_t kv_len,
                                        int32_t* yes, kvtwin_tensor* key,
                                        kvtwin_tensor* value);

/* Keeps the first `length` tokens, and discards the appended rows. */
kvtwin_status kvtwin_pool_truncate(kvtwin_pool* pool, int32_t sequence,
                                   int32_t length);
/* Ends a sequence. */
kvtwin_status kvtwin_pool_free(kvtwin_pool* pool, int32_t sequence);

/* Counts the blocks. In a pool with groups, the blocks of all groups are added
 * up. */
kvtwin_status kvtwin_pool_usage(kvtwin_pool* pool, kvtwin_usage* usage);

/* Sets *device to 0, the CPU. */
kvtwin_status kvtwin_pool_layer_device(kvtwin_pool* pool, int32_t layer,
                                       int32_t* device);

/* Tables for kernels, of the committed tokens of `sequence_count` sequences.
 *
 * Row i of `blocks` has the blocks of sequence i, padded with -1 to *columns
 * entries. seq_lens has room for `sequence_count` entries. */
kvtwin_status kvtwin_pool_table(kvtwin_pool* pool, const int32_t* sequences,
                                size_t sequence_count, int32_t* columns,
                                int32_t* blocks, size_t room, size_t* count,
                                int32_t* seq_lens);
/* Sequence i has the blocks indices[j] with indptr[i] <= j < indptr[i + 1]. Its
 * last block has last_page_len[i] tokens; 0 if the sequence has no block.
 * indptr has room for sequence_count + 1 entries, last_page_len for
 * sequence_count. */
kvtwin_status kvtwin_pool_csr(kvtwin_pool* pool, const int32_t* sequences,
                              size_t sequence_count, int32_t* indptr,
                              int32_t* indices, size_t room, size_t* count,
                              int32_t* last_page_len);
/* Lists block * block_size + offset for each of the positions begin .. end - 1,
 * which may be appended ones. */
kvtwin_status kvtwin_pool_slots(kvtwin_pool* pool, int32_t sequence,
                                int32_t begin, int32_t end, int64_t* slots,
                                size_t room, size_t* count);
/* The same for a group of layers of a pool with groups. A pool without groups
 * has the group 0, which is the pool itself. */
kvtwin_status kvtwin_pool_group_table(kvtwin_pool* pool, int32_t group,
                                      const int32_t* sequences,
                                      size_t sequence_count, int32_t* columns,
                                      int32_t* blocks, size_t room,
                                      size_t* count, int32_t* seq_lens);
kvtwin_status kvtwin_pool_group_csr(kvtwin_pool* pool, int32_t group,
                                    const int32_t* sequences,
                                    size_t sequence_count, int32_t* indptr,
                                    int32_t* indices, size_t room,
                                    size_t* count, int32_t* last_page_len);
kvtwin_status kvtwin_pool_group_slots(kvtwin_pool* pool, int32_t group,
                                      int32_t sequence, int32_t begin,
                                      int32_t end, int64_t* slots, size_t room,
                                      size_t* count);
kvtwin_status kvtwin_pool_group_usage(kvtwin_pool* pool, int32_t group,
                                      kvtwin_usage* usage);
/* The table of one layer: its committed rows, and the rows that were appended
 * to it since the last commit. Attention reads this table between append and
 * commit. A table serves all layers of a group that have as many rows. */
kvtwin_status kvtwin_pool_layer_table(kvtwin_pool* pool, int32_t layer,
                                      const int32_t* sequences,
                                      size_t sequence_count, int32_t* columns,
                                      int32_t* blocks, size_t room,
                                      size_t* count, int32_t* seq_lens);
/* Sets *key and *value to K and V of all blocks of a layer: [head_dim,
 * kv_heads, block_size, blocks], or [head_dim, block_size, kv_heads, blocks] if
 * head-major. Slots without a token may hold anything. */
kvtwin_status kvtwin_pool_blocks(kvtwin_pool* pool, int32_t layer,
                                 kvtwin_tensor* key, kvtwin_tensor* value);

/* Attention on the CPU ----------------------------------------------------- */

/* Computes attention over views of caches and over blocks of pools, as defined
 * in <kvtwin/attention.h>. A pass is planned once; attend then serves each of
 * its layers. KVTWIN_OUT_OF_MEMORY and KVTWIN_INTERNAL discard the plan and
 * leave the numbers of `out` unspecified. */
typedef struct kvtwin_attention kvtwin_attention;

/* How the scores of a layer are computed, and how exactly. */
typedef struct kvtwin_attention_options {
  size_t size;        /* sizeof this struct, see the top. */
  float scale;        /* The magnitude is 2^-50 to 2^50. Usually
                         1 / sqrt(k_head_dim). */
  float soft_cap;     /* From 2^-50 to 2^50; 0: none. */
  const float* sinks; /* [heads], learned logits of cells without V: from -2^50
                         to 2^50, or -infinity for a head without a sink. NULL:
                         none. */
  size_t sink_count;  /* 0 or heads. */
  int32_t splits;     /* Parts into which the cells of a row are split and
                         merged, up to 65,536. 0: chosen by the shape of the
                         work. */
  int32_t bf16_products; /* Not 0: numbers may be rounded to bf16 before they
                            are multiplied, as <kvtwin/attention.h> defines. */
} kvtwin_attention_options;

/* The numbers that attend and merge write. */
typedef struct kvtwin_attention_out {
  size_t size;        /* sizeof this struct, see the top. */
  float* out;         /* [v_head_dim, heads, rows], dense. */
  size_t out_count;   /* v_head_dim * heads * rows. */
  float* log_sum_exp; /* [heads, rows]: the logarithm of the sum of exp(score)
                         over the cells, plus exp(sink); -infinity if the sum is
                         0. NULL: not wanted. */
  size_t log_sum_exp_count; /* heads * rows, or 0. */
} kvtwin_attention_out;

/* Sequences of a pool, whose query rows come one after another. Sequence i has
 * query_rows[i] rows, which are its last tokens: row j of n is the token at
 * position lengths[i] - n + j and sees the tokens up to itself, or the last
 * `window` before itself and itself. */
typedef struct kvtwin_attention_table {
  size_t size;               /* sizeof this struct, see the top. */
  const int32_t* blocks;     /* [columns, sequences] */
  const int32_t* lengths;    /* [sequences], in tokens. */
  const int32_t* query_rows; /* [sequences] */
  int32_t sequences;         /* Sequences of the batch. */
  int32_t columns;           /* Entries of a row of `blocks`. */
  int32_t block_size;        /* Tokens of a block. */
  int32_t window;            /* >= 0. KVTWIN_OPEN_END: all tokens. */
  int32_t sees_all; /* Not 0: each row sees all tokens of its sequence. The rows
                       are then not its tokens, but come after them, as after a
                       prompt that several rows share: up to 2^24. There is no
                       window. */
} kvtwin_attention_table;

/* One part of an attention: the results over some of the cells. */
typedef struct kvtwin_attention_part {
  const float* out;         /* [v_head_dim, heads, rows] */
  const float* log_sum_exp; /* [heads, rows] */
} kvtwin_attention_part;

/* `twin` is "reference" or "optimized"; NULL is "optimized". "cuda" is an
 * error. */
kvtwin_status kvtwin_attention_create(const char* twin,
                                      kvtwin_attention** attention);
/* Frees `attention`, which may be NULL. */
void kvtwin_attention_destroy(kvtwin_attention* attention);

/* Plans the rows [first_row, first_row + rows) of the mask of a view, [columns,
 * rows], up to 2^24 of them. The mask is not needed after the call. An element
 * of these rows that is neither 0 nor -inf is INVALID_ARGUMENT. An error leaves
 * the plan unchanged. */
kvtwin_status kvtwin_attention_plan(kvtwin_attention* attention,
                                    const kvtwin_tensor* mask, int32_t rows,
                                    int32_t first_row);

/* Sets the defaults: no sequence, a block_size of 0, no window. `size` is
 * sizeof(kvtwin_attention_table). */
kvtwin_status kvtwin_attention_default_table(kvtwin_attention_table* table,
                                             size_t size);
/* Plans the rows of sequences of a pool, up to 2^24 in all. The lists are not
 * needed after the call. An error leaves the plan unchanged: lists of
 * invalid lengths, a length that is longer than its blocks or, without
 * sees_all, shorter than its query rows, a window with sees_all, a negative
 * block where a row sees it. */
kvtwin_status kvtwin_attention_plan_table(kvtwin_attention* attention,
                                          const kvtwin_attention_table* table);

/* Sets the defaults: a scale of 1, no soft cap, no sinks, splits of 0, products
 * of f32. `size` is sizeof(kvtwin_attention_options). */
kvtwin_status kvtwin_attention_default_options(
    kvtwin_attention_options* options, size_t size);

/* Computes the attention of a layer over the K and V of `view`, whose mask is
 * not read. query = [k_head_dim, heads, rows], f32, f16 or bf16, any strides.
 * FAILED_PRECONDITION without a plan of a mask. An error writes nothing: shapes
 * or counts that do not fit to each other or to the plan, a tensor without
 * data, an option outside of its range. */
kvtwin_status kvtwin_attention_attend(kvtwin_attention* attention,
                                      const kvtwin_tensor* query,
                                      const kvtwin_view* view,
                                      kvtwin_v_layout v_layout,
                                      const kvtwin_attention_options* options,
                                      const kvtwin_attention_out* out);

/* Does the same over all blocks of a layer, as kvtwin_pool_blocks returns them.
 * FAILED_PRECONDITION without a plan of a table. */
kvtwin_status kvtwin_attention_attend_blocks(
    kvtwin_attention* attention, const kvtwin_tensor* query,
    const kvtwin_tensor* key, const kvtwin_tensor* value,
    kvtwin_paged_layout layout, const kvtwin_attention_options* options,
    const kvtwin_attention_out* out);

/* Merges parts of an attention whose cells are disjoint; only one part may have
 * the sinks. `count` = heads * rows. `out` may be one of the parts. */
kvtwin_status kvtwin_attention_merge(const kvtwin_attention_part* parts,
                                     size_t part_count, int32_t v_head_dim,
                                     int64_t count,
                                     const kvtwin_attention_out* out);

/* Sessions of a server ----------------------------------------------------- */

/* Requests that share a cache and reuse what it holds of their prompts
 * (docs/serving.md). The cache must outlive the sessions; its sequences 0 ..
 * slots - 1 belong to them. It may be a cache of kvtwin_pool_cache_create. */
typedef struct kvtwin_sessions kvtwin_sessions;

/* The slots in which a request may find its prefix. */
typedef enum kvtwin_slot_choice {
  KVTWIN_OWN_PREFIX = 0, /* In free slots. */
  KVTWIN_ANY_PREFIX = 1  /* In all slots. The prefix of a slot that is in use,
                            or that holds more, is shared with another slot. */
} kvtwin_slot_choice;

/* The sizes of the sessions. The defaults are 1 slot of 1 token, batches of 1
 * token, KVTWIN_ANY_PREFIX, and `ahead` 0. If the cache was created with slots,
 * context and batch as max_sequences, capacity and max_batch, it has cells for
 * every batch. */
typedef struct kvtwin_sessions_params {
  size_t size;               /* sizeof this struct, see the top. */
  int32_t slots;             /* Requests that run at once, at most. */
  int32_t context;           /* Tokens of a slot, at most. */
  int32_t batch;             /* Tokens of a batch, at most. */
  kvtwin_slot_choice choice; /* Where a prefix is looked for. */
  int32_t ahead; /* 1: a batch may be planned before the tokens of the last
                    batch are sampled. */
} kvtwin_sessions_params;

/* An input of the model. */
typedef struct kvtwin_session_input {
  int32_t token;       /* In a batch, -1 if it is not sampled yet. */
  int32_t same_batch;  /* The number of next inputs in the same batch. */
  uint64_t multimodal; /* The hash of an image or sound; 0: text. */
} kvtwin_session_input;

/* How a request is answered. */
typedef struct kvtwin_request_options {
  size_t size;   /* sizeof this struct, see the top. */
  int32_t keep;  /* First tokens that a context shift keeps; -1: the prompt. */
  int32_t reuse; /* 1, the default: look for a stored prefix. */
  int32_t shift; /* 1, the default: a full slot drops the older half of the
                    tokens after the first `keep`. */
  int32_t truncate; /* 1: cut the middle out of a prompt that is too long. */
  int64_t limit;    /* Tokens of the answer, at most; 0: no limit. */
} kvtwin_request_options;

/* Why a request has ended, if it has. */
typedef enum kvtwin_ending {
  KVTWIN_GOES_ON = 0,        /* The request has not ended. */
  KVTWIN_ENDS_BY_LIMIT = 1,  /* The answer has `limit` tokens. */
  KVTWIN_ENDS_BY_CONTEXT = 2 /* The slot is full and does not shift. */
} kvtwin_ending;

/* The tokens of a pass; entry i of the first four lists is for token i. Valid
 * until the next call for these sessions. */
typedef struct kvtwin_session_batch {
  size_t size;                        /* sizeof this struct, see the top. */
  const kvtwin_session_input* inputs; /* The inputs of the model. */
  const int32_t* positions;           /* >= 0 */
  const int32_t* sequences;           /* The sequences in the cache. */
  const int32_t* requests;            /* The requests that have the tokens. */
  size_t count;                       /* Tokens of the batch. */
  const int32_t* outputs; /* Indices of the tokens after which a token is to be
                             sampled. */
  size_t output_count;    /* Entries of `outputs`. */
} kvtwin_session_batch;

/* Counts of requests and tokens, as SessionGauges of <kvtwin/sessions.h>:
 * totals since the sessions were made, except for waiting, running and bytes.
 */
typedef struct kvtwin_session_gauges {
  size_t size;            /* sizeof this struct, see the top. */
  int64_t waiting;        /* Requests that wait now. */
  int64_t running;        /* Requests that run now. */
  int64_t prompt_tokens;  /* Tokens of prompts that got a slot. */
  int64_t hit_tokens;     /* The reused part of the prompts. */
  int64_t planned_tokens; /* Tokens of all batches. */
  int64_t batches;        /* Batches that were planned. */
  int64_t forks;          /* Prefixes copied from another slot. */
  int64_t evicted_tokens; /* Tokens that another request replaced. */
  int64_t shifts;         /* Context shifts. */
  int64_t reprocessed;    /* Shifts that had to compute a slot again. */
  int64_t missed;         /* Requests with a prefix that could not resume. */
  int64_t refusals;       /* Batches that the cache refused. */
  int64_t bytes; /* Size of the records and of the inputs still to compute. */
} kvtwin_session_gauges;

/* Sets the defaults above. */
kvtwin_status kvtwin_sessions_default_params(kvtwin_sessions_params* params,
                                             size_t size);
/* Makes a cache of a pool, for kvtwin_sessions_create with the same params. The
 * pool must outlive it, and have slots * ceil(context / block_size) blocks and
 * no other sequences. kvtwin_cache_put appends the batch's rows to the pool,
 * layer by layer; attention reads the views or the tables of the pool's
 * sequences. Shifts, kvtwin_cache_get and snapshots are NOT_SUPPORTED.
 */
kvtwin_status kvtwin_pool_cache_create(kvtwin_pool* pool,
                                       const kvtwin_sessions_params* params,
                                       kvtwin_cache** cache);
/* Sets *sequence to the pool's sequence of a slot. */
kvtwin_status kvtwin_pool_cache_sequence(kvtwin_cache* cache, int32_t slot,
                                         int32_t* sequence);

/* Makes sessions over a cache. `twin` is "reference" or "optimized"; NULL is
 * "optimized". */
kvtwin_status kvtwin_sessions_create(kvtwin_cache* cache,
                                     const kvtwin_sessions_params* params,
                                     const char* twin,
                                     kvtwin_sessions** sessions);
/* Frees `sessions`, which may be NULL. */
void kvtwin_sessions_destroy(kvtwin_sessions* sessions);

/* Sets the defaults above; keep and limit are 0. */
kvtwin_status kvtwin_sessions_default_options(kvtwin_request_options* options,
                                              size_t size);
/* Adds a request to the queue and sets *request to its number. `options` may be
 * NULL. */
kvtwin_status kvtwin_sessions_submit(kvtwin_sessions* sessions,
                                     const kvtwin_session_input* prompt,
                                     size_t count,
                                     const kvtwin_request_options* options,
                                     int32_t* request);
/* Plans a batch and calls kvtwin_cache_start_forward; count is 0 if there is
 * nothing to compute. */
kvtwin_status kvtwin_sessions_next_batch(kvtwin_sessions* sessions,
                                         kvtwin_session_batch* batch);
/* Feeds the token that was sampled from the request's oldest output. */
kvtwin_status kvtwin_sessions_sampled(kvtwin_sessions* sessions,
                                      int32_t request, int32_t token,
                                      kvtwin_ending* ending);
/* Ends a request; the last `removed` sampled tokens leave its record. */
kvtwin_status kvtwin_sessions_finish(kvtwin_sessions* sessions, int32_t request,
                                     int64_t removed);
/* Says that the caller has replaced the tokens of a free slot's sequence, as by
 * kvtwin_cache_add_sequence: it now holds exactly these inputs, which prompts
 * may reuse. */
kvtwin_status kvtwin_sessions_adopt(kvtwin_sessions* sessions, int32_t slot,
                                    const kvtwin_session_input* record,
                                    size_t count);
/* Sets all fields of `gauges` except its size. */
kvtwin_status kvtwin_sessions_gauges(kvtwin_sessions* sessions,
                                     kvtwin_session_gauges* gauges);
/* Returns FAILED_PRECONDITION if the cache does not hold exactly the tokens of
 * the records of the sessions. */
kvtwin_status kvtwin_sessions_check(kvtwin_sessions* sessions);
/* Sets *text to a text for people; free it with kvtwin_free. */
kvtwin_status kvtwin_sessions_dump(kvtwin_sessions* sessions, char** text);

/* Rows as numbers ---------------------------------------------------------- */

/* Sets *bytes to the size of `count` elements in a row. For q8_0 and q4_0, a
 * count that is not a multiple of 32 is an error. */
kvtwin_status kvtwin_row_bytes(kvtwin_dtype dtype, size_t count, size_t* bytes);
/* Convert `count` elements: from a stored row, exactly, and to a stored row,
 * rounded to the nearest (docs/dtypes.md). `bytes` must be the size of the
 * row. */
kvtwin_status kvtwin_row_to_f32(kvtwin_dtype dtype, const void* row,
                                size_t bytes, float* numbers, size_t count);
kvtwin_status kvtwin_row_from_f32(kvtwin_dtype dtype, const float* numbers,
                                  size_t count, void* row, size_t bytes);
/* Sets *number to element (i, j, k, l) of K or V. An index outside of the shape
 * is an error. */
kvtwin_status kvtwin_tensor_element(const kvtwin_tensor* tensor, int64_t i,
                                    int64_t j, int64_t k, int64_t l,
                                    float* number);
/* Sets *yes to 1 if the mask lets the batch's token `row` attend to `column`,
 * else to 0. */
kvtwin_status kvtwin_mask_may_attend(const kvtwin_tensor* mask, int64_t column,
                                     int64_t row, int32_t* yes);

/* Recording a cache of your own -------------------------------------------- */

/* Writes a recording (docs/trace_format.md) of your own cache. After each call
 * of your cache, call the function here with the same arguments and the answer
 * of your cache. Calls that your cache refused as misuse are not recorded: a
 * negative `answer` is an error here. A line is written whole or not at all,
 * and is handed to the system before the function returns, so that the file has
 * all calls that led to a crash. */
typedef struct kvtwin_recorder kvtwin_recorder;

/* The cache of a recording. The rows of a token are [k_head_dim, kv_heads] and
 * [v_head_dim, kv_heads] in each layer. */
typedef struct kvtwin_recorder_params {
  size_t size;                      /* sizeof this struct, see the top. */
  const kvtwin_cache_params* cache; /* The parameters of your cache, without a
                                       custom shift, which has no name in
                                       recordings. */
  /* 1: your cache finds cells by its own rules, such as a ring or pages; it is
   * then checked at the level of visibility. 0: as cache->placement says. */
  int32_t own_placement;
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  const char* producer; /* Name of your program, any text. NULL is "". */

  /* The fields below are 0 by default. */
  int32_t attends; /* Not 0: kvtwin_record_attend may be called. */
  /* The next two are as in kvtwin_description_v1, the three after them as in
   * kvtwin_setup_v1. */
  kvtwin_dtype attend_dtype;
  double attend_tolerance;
  float soft_cap;
  const float* sinks; /* For each query head. NULL: none. */
  int32_t sink_count; /* The number of query heads, or 0. */
  int32_t drafts;     /* Not 0: batches may have parents, and
                         kvtwin_record_commit may be called. */
  int32_t prompts;    /* Not 0: kvtwin_record_find_prefix may be called. */
} kvtwin_recorder_params;

/* Sets the defaults: own_placement is 1, one layer, one head of one element,
 * `cache` is NULL and must be set. */
kvtwin_status kvtwin_recorder_default_params(kvtwin_recorder_params* params,
                                             size_t size);
kvtwin_status kvtwin_recorder_create(const kvtwin_recorder_params* params,
                                     const char* path,
                                     kvtwin_recorder** recorder);
/* Closes and destroys the recorder, whatever the answer is.
 * FAILED_PRECONDITION: part of the recording could not be written, perhaps
 * because the disk is full. `recorder` may be NULL. */
kvtwin_status kvtwin_recorder_close(kvtwin_recorder* recorder);

/* `answer` is KVTWIN_OK or KVTWIN_CACHE_FULL. `cells`: the cell that each token
 * got; NULL: unknown. With own_placement they are not recorded. */
kvtwin_status kvtwin_record_start_forward(kvtwin_recorder* recorder,
                                          const kvtwin_batch* batch,
                                          int reserve, kvtwin_status answer,
                                          const int32_t* cells);
kvtwin_status kvtwin_record_set_causal(kvtwin_recorder* recorder,
                                       const int32_t* except, size_t count);
kvtwin_status kvtwin_record_set_layer_type(kvtwin_recorder* recorder,
                                           int32_t type);
kvtwin_status kvtwin_record_put(kvtwin_recorder* recorder, int32_t layer,
                                const kvtwin_tensor* key,
                                const kvtwin_tensor* value);
/* Records the view that attention would read. The mask has the cache's
 * mask_dtype, or no data for an encoder. first_cell < 0: unknown. If `value`
 * has no data, V is not checked. In a reserving pass only the mask's shape is
 * recorded, and nothing if the mask has no data. */
kvtwin_status kvtwin_record_get(kvtwin_recorder* recorder, int32_t layer,
                                const kvtwin_view* view);
/* Records an output of your attention over what the batch sees: query
 * [k_head_dim, heads, rows], a row for each token of the batch, and out
 * [v_head_dim, heads, rows]. Scores are multiplied by 1 / sqrt(k_head_dim). The
 * call may replace kvtwin_record_get. FAILED_PRECONDITION: params.attends was
 * 0. */
kvtwin_status kvtwin_record_attend(kvtwin_recorder* recorder, int32_t layer,
                                   const kvtwin_tensor* query,
                                   const kvtwin_tensor* out);
/* `answer` is KVTWIN_OK, KVTWIN_NOT_SUPPORTED or KVTWIN_SHARED_CELLS. */
kvtwin_status kvtwin_record_remove(kvtwin_recorder* recorder, int32_t sequence,
                                   int32_t begin, int32_t end,
                                   kvtwin_status answer);
kvtwin_status kvtwin_record_copy_prefix(kvtwin_recorder* recorder,
                                        int32_t source, int32_t target,
                                        int32_t length);
kvtwin_status kvtwin_record_can_resume(kvtwin_recorder* recorder,
                                       int32_t sequence, int32_t position,
                                       int32_t yes);
kvtwin_status kvtwin_record_encoder_cached(kvtwin_recorder* recorder,
                                           int32_t yes);
/* FAILED_PRECONDITION: params.drafts was 0. */
kvtwin_status kvtwin_record_commit(kvtwin_recorder* recorder, int32_t sequence,
                                   const int32_t* path, size_t count);
/* Records the prompt of a new sequence; the sequence begins with the first
 * `length` of its tokens (F1). FAILED_PRECONDITION: params.prompts or
 * params.own_placement was 0. */
kvtwin_status kvtwin_record_find_prefix(kvtwin_recorder* recorder,
                                        int32_t sequence, const int32_t* tokens,
                                        size_t count, int32_t length);
/* Records that the last state of a sequence was pinned (R14).
 * FAILED_PRECONDITION: no cache of params.cache has room for pins. */
kvtwin_status kvtwin_record_checkpoint(kvtwin_recorder* recorder,
                                       int32_t sequence);

/* Checking a recording ----------------------------------------------------- */

typedef enum kvtwin_outcome {
  KVTWIN_ACCEPTED = 0,
  KVTWIN_REJECTED = 1,
  KVTWIN_NOT_A_RECORDING = 2 /* It has another format, or cannot be read. */
} kvtwin_outcome;

/* The outcome of a check. */
typedef struct kvtwin_verdict {
  size_t size;            /* sizeof this struct, see the top. */
  kvtwin_outcome outcome; /* The outcome of the check. */
  int32_t
      level;    /* The strongest kvtwin_level that held to the end; -1: none. */
  int64_t line; /* The first wrong line, from 1; 0 if there is none. */
  /* Why it was not accepted. Of an accepted recording it is empty, or says that
   * nothing was judged. Valid until this thread's next check, or the thread's
   * end. */
  const char* reason;
} kvtwin_verdict;

/* Checks a recording against `twin`; NULL is all twins. If it returns
 * KVTWIN_OK, `verdict` has the outcome, also a rejection. */
kvtwin_status kvtwin_check_file(const char* path, const char* twin,
                                kvtwin_verdict* verdict);
/* Does the same for a recording in memory. */
kvtwin_status kvtwin_check_memory(const void* bytes, size_t count,
                                  const char* twin, kvtwin_verdict* verdict);

/* A cache of your own ------------------------------------------------------ */

/* The abilities that a backend declares. The harness never calls operations
 * that the backend does not declare. */
enum kvtwin_kind_flag {
  /* Kinds, as 1 << kvtwin_kind. A wrapper or a hybrid needs another kind. */
  KVTWIN_HAS_CAUSAL = 1 << 0,
  KVTWIN_HAS_SWA = 1 << 1,
  KVTWIN_HAS_SWA_MEM = 1 << 2,
  KVTWIN_HAS_CHUNKED = 1 << 3,
  KVTWIN_HAS_ENCODER = 1 << 4,
  KVTWIN_HAS_WRAPPER = 1 << 5,
  KVTWIN_HAS_RECURRENT = 1 << 6,
  KVTWIN_HAS_HYBRID = 1 << 7
};
enum kvtwin_ability {
  KVTWIN_CAN_REMOVE_TAIL = 1 << 0,   /* remove(s, begin, OPEN_END) */
  KVTWIN_CAN_REMOVE_MIDDLE = 1 << 1, /* Any remove. */
  KVTWIN_CAN_COPY_PREFIX = 1 << 2,
  KVTWIN_CAN_SHARE = 1 << 3,   /* Copy a prefix shorter than the sequence. */
  KVTWIN_CAN_RESERVE = 1 << 4, /* start_forward with reserve, at any positions
                                  below the capacity */
  KVTWIN_CAN_MIX = 1 << 5,     /* Several sequences in one batch. */
  /* Positions may have gaps, go back or repeat. A layer may have two puts in a
   * pass, or none. Layers, and calls in a pass, come in any order. */
  KVTWIN_CAN_ANY_ORDER = 1 << 6,
  /* Misuse (docs/semantics.md, S47) is an error and changes nothing. */
  KVTWIN_CAN_REFUSE_MISUSE = 1 << 7,
  /* The harness may write through the pointers of `get`, to overwrite the rows
   * of free cells. */
  KVTWIN_CAN_BE_POISONED = 1 << 8,
  /* K and V of a put may have gaps (strides); else they are dense. */
  KVTWIN_CAN_TAKE_STRIDED = 1 << 9,
  /* Any sequence numbers; else only 0 to max_sequences - 1. */
  KVTWIN_CAN_ANY_SEQUENCE = 1 << 10,
  /* V may have another dtype than K. */
  KVTWIN_CAN_MIX_DTYPES = 1 << 11,
  /* `attend` takes the soft cap, or the sinks, of the setup into account. */
  KVTWIN_CAN_SOFT_CAP = 1 << 12,
  KVTWIN_CAN_SINKS = 1 << 13,
  /* Drafts: batches with parents, and `commit` (D1 to D8). With CAN_DRAFT each
   * draft follows the draft before it; with CAN_DRAFT_TREES, any draft. */
  KVTWIN_CAN_DRAFT = 1 << 14,
  KVTWIN_CAN_DRAFT_TREES = 1 << 15,
  /* `find_prefix` (F1 to F5): prompts come with token ids, and sequences may
   * begin with rows that were computed before. */
  KVTWIN_CAN_FIND_PREFIX = 1 << 16,
  /* For recurrent and hybrid caches: states of drafts, as many as `drafts` of
   * the setup says (R11 to R13), with CAN_DRAFT; and `checkpoint`, for as many
   * pinned states as `pins` says (R14, R15). */
  KVTWIN_CAN_DRAFT_STATES = 1 << 17,
  KVTWIN_CAN_PIN = 1 << 18,
  /* Some batches are longer than the rest of the capacity of their sequence.
   * The cache stores such a batch whole, or refuses it with KVTWIN_CACHE_FULL:
   * then no sequence changes, except for what the batch evicts (S12). */
  KVTWIN_CAN_REFUSE_FULL = 1 << 19
};
/* Abilities that most backends have. If yours declares that it lacks one, the
 * harness does not use or expect it. */
enum kvtwin_inability {
  /* A window of 0 positions before the query. Without this ability, windows
   * are >= 1. */
  KVTWIN_CANNOT_WINDOW_0 = 1 << 0,
  /* copy_prefix with source == target. */
  KVTWIN_CANNOT_COPY_TO_ITSELF = 1 << 1,
  /* A refused remove changes nothing. Without this ability it may have removed
   * or moved a part of that sequence, but of no other. The next call is then
   * remove(s, 0, OPEN_END) to clear the sequence; it must not be refused. */
  KVTWIN_CANNOT_UNDO_REMOVE = 1 << 2,
  /* A memory that is shorter than the capacity (swa_mem). Without this ability,
   * tokens that have left the window are kept until the sequence ends. */
  KVTWIN_CANNOT_BOUND_MEMORY = 1 << 3
};

/* How much of a backend is compared (S51, S53, S54, S58). */
typedef enum kvtwin_level {
  KVTWIN_NUMERIC = 0,    /* Attention over its views, within a tolerance. */
  KVTWIN_VISIBILITY = 1, /* Each row sees the expected tokens. */
  KVTWIN_IDENTITY = 2,   /* Same errors, cells, view bounds and bytes. */
  KVTWIN_ATTENTION = 3,  /* The outputs of its `attend`; weaker than NUMERIC. */
  KVTWIN_ENTITLEMENT = KVTWIN_VISIBILITY /* Former name of VISIBILITY. */
} kvtwin_level;

/* The abilities of your cache, and the rules that it follows. A backend that
 * must also run with a kvtwin that is older than its header sets a new field
 * only if `size`, which kvtwin has set, includes the field. */
typedef struct kvtwin_description_v1 {
  size_t size;      /* sizeof this struct, see the top. */
  const char* name; /* For reports. */
  /* The rules that it follows: a profile of `kvtwin profile --list`, perhaps
   * with exceptions, as `kvtwin profile` prints them: "llama.cpp except copy
   * replaces, middle removal shifts". Default: "ollama-0.15". */
  const char* profile;
  kvtwin_level level;    /* Default: VISIBILITY. */
  uint32_t kinds;        /* KVTWIN_HAS_... flags. Default: CAUSAL. */
  uint32_t can;          /* KVTWIN_CAN_... flags. Default: 0. */
  uint32_t dtypes;       /* 1 << kvtwin_dtype of stored rows. Default: f32. */
  uint32_t v_layouts;    /* 1 << kvtwin_v_layout. Default: plain. */
  uint32_t shifts;       /* 1 << kvtwin_shift_kind. Default: none. */
  uint32_t mask_dtypes;  /* 1 << kvtwin_dtype. Default: f32. */
  int32_t max_sequences; /* 0: any number. Default: 1. */
  int32_t max_layers;    /* 0: any number, up to 65 in histories. */
  int32_t max_padding;   /* Largest cache or mask padding; 0: any. Default: 1 */
  double tolerance;      /* For NUMERIC: largest error of an element of the
                            attention's output. Default: 0.01. */

  /* The fields below are 0 by default. */
  uint32_t cannot;          /* KVTWIN_CANNOT_... flags. */
  uint32_t placements;      /* 1 << kvtwin_placement. 0: both. */
  int32_t max_position;     /* Largest position of a token; the capacity is then
                               at most max_position + 1. 0: any. */
  int32_t max_mask_padding; /* Largest mask padding. 0: max_padding is for both.
                               INT32_MAX: any. */

  /* For `attend`. */
  kvtwin_dtype attend_dtype; /* F32, or the F16 or BF16 to which it rounds
                                queries, scores, weights or outputs. */
  int32_t max_query_heads;   /* For each KV head. 0: any number. */
  double attend_tolerance;   /* The error of the cache's own number formats. It
                                is added to the bound of rounding. */
} kvtwin_description_v1;

/* The cache to make: its parameters, and the dimensions of its model. */
typedef struct kvtwin_setup_v1 {
  size_t size;                      /* sizeof this struct, see the top. */
  const kvtwin_cache_params* cache; /* Valid during `init` only. */
  /* The shape of the rows: K rows of a token are [k_head_dim, kv_heads]. */
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;

  /* For `attend`, with CAN_SOFT_CAP and CAN_SINKS. */
  float soft_cap;     /* A score s becomes soft_cap * tanh(s / soft_cap), after
                         it was scaled. 0: none. */
  const float* sinks; /* For each query head, the logit of a token without V;
                         valid during `init` only. NULL: none. */
  int32_t sink_count; /* The number of query heads, or 0. */
} kvtwin_setup_v1;

/* Your cache as a table. Every function except `describe` and `init` gets the
 * pointer that `init` wrote to `*cache`. They are called from one thread at a
 * time; several caches may live at once. They write only to their output
 * arguments; rows, lists and queries are valid until the function returns. They
 * return a kvtwin_status: KVTWIN_OK if the function cannot fail. Functions
 * below "Optional" may be NULL, and are not called then. A kvtwin that is older
 * than your header refuses functions that it does not know, unless they are
 * NULL. */
typedef struct kvtwin_backend_v1 {
  size_t size; /* sizeof(kvtwin_backend_v1) */

  /* `out` has the defaults above; change what differs. */
  int (*describe)(kvtwin_description_v1* out);
  /* NOT_SUPPORTED: you have no such cache; its histories are skipped. */
  int (*init)(const kvtwin_setup_v1* setup, void** cache);
  void (*close)(void* cache);

  /* Finds a place for every token of the batch, or returns CACHE_FULL. */
  int (*start_forward)(void* cache, const kvtwin_batch* batch, int reserve);
  /* Stores the batch's rows: key [k_head_dim, kv_heads, tokens], value
   * [v_head_dim, kv_heads, tokens], f32 or the dtype of the cache; strides may
   * have gaps with KVTWIN_CAN_TAKE_STRIDED. */
  int (*put)(void* cache, int32_t layer, const kvtwin_tensor* key,
             const kvtwin_tensor* value);
  /* Returns the current view of a layer. `view` comes with the expected shapes
   * and dtypes, except for the number of columns: set `columns` and the three
   * `data`, and the strides of tensors that are not dense. An encoder's K and V
   * come with the shapes that were put, a permuted V as S37 says; with 0 tokens
   * after a restore. The memory must stay unchanged until the next call with
   * this cache. May be NULL if there is an `attend`; the level is then
   * ATTENTION. */
  int (*get)(void* cache, int32_t layer, kvtwin_view* view);
  /* The next three functions may be NULL, too. The comments of the first two
   * state the default rules; your profile may have others. */
  /* Removes the tokens at positions in [begin, end) from the sequence; unless
   * end is KVTWIN_OPEN_END, later tokens move down by end - begin, and their K
   * rows are shifted. */
  int (*remove)(void* cache, int32_t sequence, int32_t begin, int32_t end);
  /* Replaces `target`'s tokens by those of `source` at positions < length. If
   * both are the same sequence, this truncates it. */
  int (*copy_prefix)(void* cache, int32_t source, int32_t target,
                     int32_t length);
  /* *yes: 1 if the sequence can continue at `position` with its whole window.
   * If memory is bounded, 0 for a sequence without tokens (S28). */
  int (*can_resume)(void* cache, int32_t sequence, int32_t position,
                    int32_t* yes);

  /* Optional. */
  /* Returns the message of the last call that did not return KVTWIN_OK. */
  const char* (*message)(void* cache);
  /* Adds `delta` to the positions in [begin, end) of a sequence, and rewrites
   * their K rows: for profiles whose remove leaves a gap. */
  int (*shift)(void* cache, int32_t sequence, int32_t begin, int32_t end,
               int32_t delta);
  int (*set_causal)(void* cache, const int32_t* except, int32_t count);
  int (*set_layer_type)(void* cache, int32_t type);
  int (*encoder_cached)(void* cache, int32_t* yes);
  /* Lists all memberships, those of drafts included, sorted by cell, then by
   * sequence, of which `room` fit into `cells`; and the cells of the batch.
   * *count and *batch_count: how many there are. *total: the number of cells of
   * the cache. */
  int (*cells)(void* cache, kvtwin_cell* cells, size_t room, size_t* count,
               int32_t* batch, size_t batch_room, size_t* batch_count,
               int32_t* total);
  /* For identity only. Bytes are a state as docs/semantics.md (S56) defines it,
   * with the model "", such as kvtwin_state_to_bytes makes; docs/live.md has an
   * example. `snapshot` returns the whole state (sequence -1) or the part of
   * one sequence, valid until the next call. `restore` with -1 replaces
   * everything by the state; with a sequence that has no tokens, it adds the
   * tokens of the bytes as this sequence and keeps the others (S57). There is
   * no pass after a restore. */
  int (*snapshot)(void* cache, int32_t sequence, const void** bytes,
                  size_t* count);
  int (*restore)(void* cache, int32_t sequence, const void* bytes,
                 size_t count);
  /* Computes the attention of the batch over a layer (S58): query [k_head_dim,
   * heads, tokens of the batch], f32 and dense; `out` has room for [v_head_dim,
   * heads, tokens], dense. heads / kv_heads heads share a KV head; scores are
   * multiplied by 1 / sqrt(k_head_dim). The output of a token that sees no
   * token is zeros. */
  int (*attend)(void* cache, int32_t layer, const kvtwin_tensor* query,
                float* out);
  /* For CAN_DRAFT: the drafts with the numbers in `path` become tokens of the
   * sequence; its other drafts are gone. The path is empty, or its first draft
   * follows the committed tokens, and each other draft the one before it.
   * `remove` and `copy_prefix` drop the drafts of the sequence that they
   * change. */
  int (*commit)(void* cache, int32_t sequence, const int32_t* path,
                int32_t count);
  /* For CAN_FIND_PREFIX: `sequence`, which has no tokens, gets a prompt: its
   * token at position i is tokens[i], 0 <= i < count. *length: how many first
   * tokens it has from now on, 0 to count - 1; their rows, as far as the next
   * token sees them, are those of equal first tokens that were computed before.
   * The other tokens of the prompt are computed as usual; tokens after the
   * prompt have no known ids. */
  int (*find_prefix)(void* cache, int32_t sequence, const int32_t* tokens,
                     int32_t count, int32_t* length);
  /* For CAN_PIN: pins the last state of the sequence. If the sequence then has
   * more than `pins` pinned states, the pinned state at the lowest position
   * loses its pin (R14, R15). */
  int (*checkpoint)(void* cache, int32_t sequence);
} kvtwin_backend_v1;

/* The function that your shared library exports. */
typedef const kvtwin_backend_v1* (*kvtwin_get_backend_v1_fn)(void);
/* The name of that function. */
#define KVTWIN_GET_BACKEND_V1 "kvtwin_get_backend_v1"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVTWIN_KVTWIN_H_ */
