/* kvtwin from C, and from any language that can call C: the caches, recordings
 * and their check, and the table of functions by which a cache of your own is
 * driven (`kvtwin fuzz --backend ./libyours.so`, docs/live.md). Link with
 * -lkvtwin (pkg-config kvtwin); docs/c_interface.md has an example.
 *
 * No exception leaves this library. Words, units and rules are those of
 * <kvtwin/cache.h>, <kvtwin/paged.h> and docs/semantics.md. Shapes are first
 * dimension fastest.
 *
 * Sizes: a struct that may grow begins with its size, sizeof as the caller's
 * header has it; the ..._default_params functions set it, too. One smaller than
 * in version 0.1 is an error that names it. Of a caller that is older than the
 * library, what the struct lacks has its default, and no more is filled in than
 * its size. Of a newer caller, what the library does not know must be 0, and is
 * left as it is in answers. Structs without a size never change.
 *
 * Lists that are answers: `room` says for how many there is room, *count
 * becomes how many there are, and as many as fit are written. With a room of 0,
 * the list may be NULL.
 *
 * Arguments that are NULL are errors, unless said otherwise. Threads: a handle
 * is used by one at a time, different handles at once. */

#ifndef KVTWIN_KVTWIN_H_
#define KVTWIN_KVTWIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a call answers: 0 is done, positive is refused (an outcome that a
 * correct caller meets and handles), negative is an error. Neither a refusal
 * nor an error changes anything, but for what <kvtwin/status.h> says. */
typedef enum kvtwin_status {
  KVTWIN_OK = 0,
  KVTWIN_CACHE_FULL = 1,    /* No cells for the batch. */
  KVTWIN_NOT_SUPPORTED = 2, /* This kind of cache cannot do that. */
  KVTWIN_SHARED_CELLS = 3,  /* A token to be moved is of other sequences too. */
  KVTWIN_INVALID_ARGUMENT = -1,
  KVTWIN_FAILED_PRECONDITION = -2, /* The call comes at the wrong time. */
  KVTWIN_OUT_OF_MEMORY = -3,
  KVTWIN_INTERNAL = -4,    /* Something else was thrown; the cache is lost. */
  KVTWIN_DEVICE_ERROR = -5 /* A device (CUDA) refused or failed. */
} kvtwin_status;

/* "ok", "cache_full", ...; "unknown" for any other number. */
const char* kvtwin_status_name(int status);

/* Why the last call by this thread that did not answer KVTWIN_OK did not: names
 * the argument and its value. Empty if there was none. Lives until this
 * thread's next call that does not, or its end. */
const char* kvtwin_last_error(void);

/* Of the library, "0.1.0". */
const char* kvtwin_version(void);

/* As the end of a range: everything from its begin on. */
#define KVTWIN_OPEN_END INT32_MAX

typedef enum kvtwin_dtype {
  KVTWIN_AS_K = -1, /* Of v_dtype in parameters: that of K. */
  KVTWIN_F32 = 0,
  KVTWIN_F16 = 1,
  KVTWIN_BF16 = 2,
  KVTWIN_F8_E4M3 = 3,
  KVTWIN_Q8_0 = 4,
  KVTWIN_Q4_0 = 5,
  KVTWIN_BITS = 6 /* Of masks only. */
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
  KVTWIN_V_PLAIN = 0,    /* [v_head_dim, kv_heads, cells] */
  KVTWIN_V_PERMUTED = 1, /* [cells, v_head_dim, kv_heads] */
  KVTWIN_V_TILED = 2     /* [32, v_head_dim, kv_heads, cells / 32] */
} kvtwin_v_layout;

/* How K rows change when positions move (docs/semantics.md, S34). */
typedef enum kvtwin_shift_kind {
  KVTWIN_SHIFT_NONE = 0, /* They cannot: Remove from the middle is refused. */
  KVTWIN_SHIFT_IDENTITY = 1,
  KVTWIN_SHIFT_ADD = 2,
  KVTWIN_SHIFT_TAG_ADD = 3,
  KVTWIN_SHIFT_ROPE = 4,
  KVTWIN_SHIFT_CUSTOM = 5 /* kvtwin_shift.fn */
} kvtwin_shift_kind;

/* A shift function of your own: rewrites one token's K row, `key` =
 * [k_head_dim, kv_heads], for a position that changed by `offset`. Anything but
 * KVTWIN_OK refuses the remove, which then changes nothing and answers the
 * same. It may be called for rows that are then thrown away, and from several
 * threads at once, and throws nothing. */
typedef int (*kvtwin_shift_fn)(void* user, int32_t layer, int32_t offset,
                               int32_t k_head_dim, int32_t kv_heads,
                               float* key);

typedef struct kvtwin_shift {
  kvtwin_shift_kind kind;
  int rope_halves; /* Pairs are (i, i + dims / 2), else (2i, 2i + 1). */
  int rope_dims;   /* Elements that rotate, an even number; 0: all. Of a head
                      that has fewer, all rotate, of an odd one all but the
                      last: min(rope_dims, k_head_dim) / 2 * 2. A NaN keeps
                      its bits; what becomes one is 0x7FC00000. */
  double rope_base;
  double rope_scale;
  kvtwin_shift_fn fn; /* Of KVTWIN_SHIFT_CUSTOM, of which no backend hears. */
  void* user;         /* Handed to it. */
} kvtwin_shift;

/* A tensor in memory that somebody else owns. Element (i, j, k, l) lies
 * stride[0]*i + ... + stride[3]*l bytes after `data`; unused dimensions are 1.
 * Of bits and of blocks (q8_0, q4_0), stride[0] is 0: see <kvtwin/tensor.h>.
 * Strides that are all 0 stand for dense. */
typedef struct kvtwin_tensor {
  const void* data; /* NULL: there is none. */
  kvtwin_dtype dtype;
  int64_t shape[4];
  int64_t stride[4];
} kvtwin_tensor;

/* The tokens of one forward pass, entry i being token i. */
typedef struct kvtwin_batch {
  size_t size;
  const int32_t* positions; /* `tokens` of them, >= 0. */
  const int32_t* sequences; /* `tokens` of them, >= 0. */
  int32_t tokens;
  const int32_t* multimodal; /* Batch indices (encoders). */
  int32_t multimodal_count;
} kvtwin_batch;

/* What attention reads: pointers into the cache. */
typedef struct kvtwin_view {
  size_t size;
  kvtwin_tensor key;   /* [k_head_dim, kv_heads, columns] */
  kvtwin_tensor value; /* [v_head_dim, kv_heads, columns], or as v_layout says.
                        */
  kvtwin_tensor mask;  /* [columns, rows]: 0 may attend, -inf may not. */
  int32_t first_cell;  /* The cell of column 0. */
  int32_t columns;     /* As in the shapes above. */
} kvtwin_view;

/* A membership: `cell` holds the token of `sequence` at `position`. */
typedef struct kvtwin_cell {
  int32_t cell;
  int32_t position;
  int32_t sequence;
} kvtwin_cell;

/* What a cache is made of. */
typedef struct kvtwin_cache_params {
  size_t size;
  kvtwin_kind kind;
  kvtwin_placement placement;
  int32_t window; /* -1: unbounded. */
  int32_t memory; /* -1: the window. With several sequences at least window
                     + 1 is kept (S3 of docs/semantics.md). */
  int32_t chunk;
  kvtwin_shift shift;
  const struct kvtwin_cache_params* caches; /* Of a wrapper: one after another,
                                               each of its own `size` bytes. */
  int32_t cache_count;
  /* Wishes of the kernels that read the views. */
  int32_t cache_padding;
  int32_t mask_batch_padding;
  kvtwin_v_layout v_layout;
  kvtwin_dtype mask_dtype;
  /* Storage. */
  kvtwin_dtype dtype;
  kvtwin_dtype v_dtype;
  int32_t max_sequences;
  int32_t capacity; /* Tokens of each sequence. */
  int32_t max_batch;
} kvtwin_cache_params;

/* Caches ------------------------------------------------------------------- */

/* Views stay valid until the next start_forward, set_causal, put to the same
 * encoder layer, restore, add_sequence or destroy. After KVTWIN_OUT_OF_MEMORY
 * and KVTWIN_INTERNAL a cache may only be destroyed. */
typedef struct kvtwin_cache kvtwin_cache;

/* "reference", "optimized", with CUDA "cuda"; NULL if there are no more than
 * `index`. */
const char* kvtwin_twin_name(size_t index);

/* A causal cache, contiguous, without a shift, of f32, one sequence of 1
 * token. `size` is sizeof(kvtwin_cache_params). */
kvtwin_status kvtwin_cache_default_params(kvtwin_cache_params* params,
                                          size_t size);

/* `twin` is one of the names above; NULL is "optimized". */
kvtwin_status kvtwin_cache_create(const kvtwin_cache_params* params,
                                  const char* twin, kvtwin_cache** cache);

/* NULL is fine. */
void kvtwin_cache_destroy(kvtwin_cache* cache);

/* Finds a cell for each token. With `reserve` (not 0) nothing is stored or
 * changed, and views have their worst-case size. */
kvtwin_status kvtwin_cache_start_forward(kvtwin_cache* cache,
                                         const kvtwin_batch* batch,
                                         int reserve);

/* The batch entries at these indices also see tokens after them. `except` may
 * be NULL if `count` is 0. */
kvtwin_status kvtwin_cache_set_causal(kvtwin_cache* cache,
                                      const int32_t* except, size_t count);

/* Of a wrapper: which of its caches is the active one, 0 after each
 * start_forward. All that follows but remove, copy_prefix, can_resume and
 * states goes to that. */
kvtwin_status kvtwin_cache_set_layer_type(kvtwin_cache* cache, int32_t type);

/* Stores the batch's rows in a layer: key [k_head_dim, kv_heads, tokens], value
 * [v_head_dim, kv_heads, tokens], any strides, f32 or the dtype of the stored
 * rows. Of an encoder, any shape. */
kvtwin_status kvtwin_cache_put(kvtwin_cache* cache, int32_t layer,
                               const kvtwin_tensor* key,
                               const kvtwin_tensor* value);

/* Sets all fields of `view` but its size. */
kvtwin_status kvtwin_cache_get(kvtwin_cache* cache, int32_t layer,
                               kvtwin_view* view);

/* `target` becomes the tokens of `source` at positions < length. */
kvtwin_status kvtwin_cache_copy_prefix(kvtwin_cache* cache, int32_t source,
                                       int32_t target, int32_t length);

kvtwin_status kvtwin_cache_can_resume(kvtwin_cache* cache, int32_t sequence,
                                      int32_t position, int32_t* yes);

/* Tokens at positions in [begin, end) leave the sequence; unless end is
 * KVTWIN_OPEN_END, later ones move down by end - begin. */
kvtwin_status kvtwin_cache_remove(kvtwin_cache* cache, int32_t sequence,
                                  int32_t begin, int32_t end);

kvtwin_status kvtwin_cache_encoder_cached(kvtwin_cache* cache, int32_t* yes);

/* A wrapper's active cache, else the cache itself. It belongs to `cache`, goes
 * with it, and is not to be destroyed. */
kvtwin_status kvtwin_cache_underlying(kvtwin_cache* cache,
                                      kvtwin_cache** active);

/* Cells in all. */
kvtwin_status kvtwin_cache_cell_count(kvtwin_cache* cache, int32_t* cells);

/* All memberships, by cell, then by sequence. */
kvtwin_status kvtwin_cache_cells(kvtwin_cache* cache, kvtwin_cell* cells,
                                 size_t room, size_t* count);

/* The cell of each token of the current pass; none without one. */
kvtwin_status kvtwin_cache_batch_cells(kvtwin_cache* cache, int32_t* cells,
                                       size_t room, size_t* count);

/* States: what a cache holds ----------------------------------------------- */

typedef struct kvtwin_state kvtwin_state;

/* Frees what this library gave out as bytes or text. NULL is fine. */
void kvtwin_free(void* memory);

/* NULL is fine. */
void kvtwin_state_destroy(kvtwin_state* state);

/* All that a cache holds, without the current pass; and of one sequence. */
kvtwin_status kvtwin_cache_snapshot(kvtwin_cache* cache, kvtwin_state** state);
kvtwin_status kvtwin_cache_snapshot_of(kvtwin_cache* cache, int32_t sequence,
                                       kvtwin_state** state);

/* Holds exactly that from now on. */
kvtwin_status kvtwin_cache_restore(kvtwin_cache* cache,
                                   const kvtwin_state* state);
/* And one sequence more, of what snapshot_of gave. */
kvtwin_status kvtwin_cache_add_sequence(kvtwin_cache* cache, int32_t sequence,
                                        const kvtwin_state* added);

/* As bytes, safetensors (<kvtwin/save.h>); kvtwin_free them. `model` is a name
 * of your own, and must be the same to read them; NULL is "". */
kvtwin_status kvtwin_state_to_bytes(const kvtwin_state* state,
                                    const char* model, void** bytes,
                                    size_t* count);
kvtwin_status kvtwin_state_from_bytes(const void* bytes, size_t count,
                                      const char* model, kvtwin_state** state);

/* The same as a file, which a process that dies leaves whole. */
kvtwin_status kvtwin_state_save(const kvtwin_state* state, const char* path,
                                const char* model);
kvtwin_status kvtwin_state_load(const char* path, const char* model,
                                kvtwin_state** state);
/* The `model` that a file was saved with; kvtwin_free it. */
kvtwin_status kvtwin_state_model(const char* path, char** model);

/* What one sequence has of a state; and a state with one sequence more, where
 * cells[i] is how many the wrapper's cache i has, or the cache itself. */
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

typedef enum kvtwin_paged_layout {
  KVTWIN_TOKEN_MAJOR = 0, /* [head_dim, kv_heads, tokens of the block] */
  KVTWIN_HEAD_MAJOR = 1   /* [head_dim, tokens of the block, kv_heads] */
} kvtwin_paged_layout;

typedef struct kvtwin_pool_params {
  size_t size;
  int32_t block_size;  /* Tokens. */
  int32_t blocks;      /* In all. */
  int32_t max_seq_len; /* Tokens of one sequence. */
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  kvtwin_dtype dtype;   /* Of the stored rows. */
  kvtwin_dtype v_dtype; /* Of those of V. */
  kvtwin_paged_layout layout;
} kvtwin_pool_params;

/* What a new sequence may share: tokens that were committed before with the
 * same salt and extra. */
typedef struct kvtwin_prompt {
  size_t size;
  const int32_t* tokens;
  size_t token_count;
  const char* salt; /* Of a tenant, who must not see others'. NULL is "". */
  const char* const* extra; /* An adapter, the image that a token names. */
  size_t extra_count;
} kvtwin_prompt;

/* The rows of a sequence that are in one block. */
typedef struct kvtwin_paged_view {
  kvtwin_tensor key;   /* [k_head_dim, kv_heads, length]; packed: [k_head_dim,
                          length, kv_heads]. */
  kvtwin_tensor value; /* The same of V. */
  int32_t start;       /* Position of the first. */
  int32_t length;
  int32_t block;
} kvtwin_paged_view;

/* Blocks; the first three add up to all. */
typedef struct kvtwin_usage {
  size_t size;
  int32_t free;   /* That hold nothing. */
  int32_t cached; /* That no sequence has, but a prompt may find. */
  int32_t used;   /* That sequences have. */
  int32_t shared; /* Of these, several. */
} kvtwin_usage;

/* One block of 16 tokens of f16, one layer, one head of one element, sequences
 * of 1 token. */
kvtwin_status kvtwin_pool_default_params(kvtwin_pool_params* params,
                                         size_t size);
kvtwin_status kvtwin_pool_create(const kvtwin_pool_params* params,
                                 const char* twin, kvtwin_pool** pool);
/* NULL is fine. */
void kvtwin_pool_destroy(kvtwin_pool* pool);

/* A new sequence, with the blocks of the longest prefix of the prompt that is
 * there; kvtwin_pool_seq_len says how long that is. `prompt` may be NULL. */
kvtwin_status kvtwin_pool_open(kvtwin_pool* pool, const kvtwin_prompt* prompt,
                               int32_t* sequence);

/* A new sequence of the first `length` tokens of another one. */
kvtwin_status kvtwin_pool_fork(kvtwin_pool* pool, int32_t sequence,
                               int32_t length, int32_t* made);

/* Tokens that are committed. */
kvtwin_status kvtwin_pool_seq_len(kvtwin_pool* pool, int32_t sequence,
                                  int32_t* length);

/* Stores rows of a layer behind the committed ones, in place of what was
 * appended there before. *start: the position of the first; `views` of them.
 * `start` and `count` may be NULL. */
kvtwin_status kvtwin_pool_append(kvtwin_pool* pool, int32_t sequence,
                                 int32_t layer, const kvtwin_tensor* key,
                                 const kvtwin_tensor* value, int32_t* start,
                                 kvtwin_paged_view* views, size_t room,
                                 size_t* count);

/* The next tokens belong to the sequence: these, so that prompts find them; or
 * so many that nobody knows. */
kvtwin_status kvtwin_pool_commit(kvtwin_pool* pool, int32_t sequence,
                                 const int32_t* tokens, size_t count);
kvtwin_status kvtwin_pool_commit_unknown(kvtwin_pool* pool, int32_t sequence,
                                         int32_t new_tokens);

/* What the layer has of a sequence, block by block, appended rows included;
 * and the same packed, of KVTWIN_HEAD_MAJOR alone. */
kvtwin_status kvtwin_pool_views(kvtwin_pool* pool, int32_t sequence,
                                int32_t layer, kvtwin_paged_view* views,
                                size_t room, size_t* count);
kvtwin_status kvtwin_pool_views_packed(kvtwin_pool* pool, int32_t sequence,
                                       int32_t layer, kvtwin_paged_view* views,
                                       size_t room, size_t* count);
/* The first kv_len tokens of these as one tensor, if they lie one after
 * another: *yes is 1 then, and the tensors are set. */
kvtwin_status kvtwin_pool_contiguous_kv(kvtwin_pool* pool, int32_t sequence,
                                        int32_t layer, int32_t kv_len,
                                        int32_t* yes, kvtwin_tensor* key,
                                        kvtwin_tensor* value);

/* Keeps the first `length` tokens, and nothing that was appended. */
kvtwin_status kvtwin_pool_truncate(kvtwin_pool* pool, int32_t sequence,
                                   int32_t length);
/* Ends a sequence. */
kvtwin_status kvtwin_pool_free(kvtwin_pool* pool, int32_t sequence);

kvtwin_status kvtwin_pool_usage(kvtwin_pool* pool, kvtwin_usage* usage);

/* *device: 0, the CPU. */
kvtwin_status kvtwin_pool_layer_device(kvtwin_pool* pool, int32_t layer,
                                       int32_t* device);

/* Tables for kernels, of the committed tokens of so many sequences.
 *
 * Row i of `blocks`, of *columns, is sequence i's, filled up with -1. seq_lens
 * has room for `sequence_count`. */
kvtwin_status kvtwin_pool_table(kvtwin_pool* pool, const int32_t* sequences,
                                size_t sequence_count, int32_t* columns,
                                int32_t* blocks, size_t room, size_t* count,
                                int32_t* seq_lens);
/* Sequence i has blocks indices[indptr[i]] to before indices[indptr[i + 1]], of
 * which the last has last_page_len[i] tokens; 0 if there is none. indptr has
 * room for sequence_count + 1, last_page_len for sequence_count. */
kvtwin_status kvtwin_pool_csr(kvtwin_pool* pool, const int32_t* sequences,
                              size_t sequence_count, int32_t* indptr,
                              int32_t* indices, size_t room, size_t* count,
                              int32_t* last_page_len);
/* block * block_size + offset, of positions begin .. end - 1, appended ones
 * included. */
kvtwin_status kvtwin_pool_slots(kvtwin_pool* pool, int32_t sequence,
                                int32_t begin, int32_t end, int64_t* slots,
                                size_t room, size_t* count);

/* Recording a cache of your own -------------------------------------------- */

/* Writes a recording (docs/trace_format.md) of a cache that is not kvtwin's:
 * beside each call of it, the function here with the same arguments and what it
 * answered. Calls that your cache refused as misuse are not recorded: a
 * negative answer is an error here. A line is written whole or not at all, and
 * is on its way to the file when the call is over, so that a crash of yours
 * leaves what led there. */
typedef struct kvtwin_recorder kvtwin_recorder;

typedef struct kvtwin_recorder_params {
  size_t size;
  const kvtwin_cache_params* cache; /* What it is. Custom shifts have no name in
                                       recordings. */
  /* 1: it finds cells by rules of its own, a ring, pages; then it is judged by
   * what attention can tell apart. 0: as cache->placement says. */
  int32_t own_placement;
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  const char* producer; /* Whose cache it is, any text. NULL is "". */
} kvtwin_recorder_params;

/* own_placement, and one layer of one head of one element. `cache` is NULL, to
 * be set. */
kvtwin_status kvtwin_recorder_default_params(kvtwin_recorder_params* params,
                                             size_t size);
kvtwin_status kvtwin_recorder_create(const kvtwin_recorder_params* params,
                                     const char* path,
                                     kvtwin_recorder** recorder);
/* Whatever it answers, the recorder is gone. FAILED_PRECONDITION: not all of it
 * could be written, perhaps for want of room on the disk. NULL is fine. */
kvtwin_status kvtwin_recorder_close(kvtwin_recorder* recorder);

/* `answer` is KVTWIN_OK or KVTWIN_CACHE_FULL. `cells`: the cell that each token
 * got; NULL: not known. With own_placement they are left out. */
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
/* What attention would read. The mask is of the cache's mask_dtype, and has no
 * data for an encoder; first_cell < 0 is not known. `value` may have no data:
 * not checked then. Of a reserving pass only the mask's shape is recorded, and
 * nothing if that has no data. */
kvtwin_status kvtwin_record_get(kvtwin_recorder* recorder, int32_t layer,
                                const kvtwin_view* view);
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

/* Checking a recording ----------------------------------------------------- */

typedef enum kvtwin_outcome {
  KVTWIN_ACCEPTED = 0,
  KVTWIN_REJECTED = 1,
  KVTWIN_NOT_A_RECORDING = 2 /* Or a file that cannot be read. */
} kvtwin_outcome;

typedef struct kvtwin_verdict {
  size_t size;
  kvtwin_outcome outcome;
  int32_t
      level;    /* The strongest kvtwin_level that held to the end; -1: none. */
  int64_t line; /* The first wrong one, from 1; 0 if there is none. */
  /* Why; empty if accepted. Lives until this thread's next check, or its end.
   */
  const char* reason;
} kvtwin_verdict;

/* `twin`: with which to compare; NULL is all of them. KVTWIN_OK: `verdict` has
 * the outcome, whichever. */
kvtwin_status kvtwin_check_file(const char* path, const char* twin,
                                kvtwin_verdict* verdict);
/* The bytes of such a file. */
kvtwin_status kvtwin_check_memory(const void* bytes, size_t count,
                                  const char* twin, kvtwin_verdict* verdict);

/* A cache of your own ------------------------------------------------------ */

/* What a backend may leave out. What it does not say that it has is never asked
 * of it. */
enum {
  /* Kinds, as 1 << kvtwin_kind. 0 stands for causal alone. */
  KVTWIN_HAS_CAUSAL = 1 << 0,
  KVTWIN_HAS_SWA = 1 << 1,
  KVTWIN_HAS_SWA_MEM = 1 << 2,
  KVTWIN_HAS_CHUNKED = 1 << 3,
  KVTWIN_HAS_ENCODER = 1 << 4,
  KVTWIN_HAS_WRAPPER = 1 << 5
};
enum {
  KVTWIN_CAN_REMOVE_TAIL = 1 << 0,   /* remove(s, begin, OPEN_END) */
  KVTWIN_CAN_REMOVE_MIDDLE = 1 << 1, /* Any remove. */
  KVTWIN_CAN_COPY_PREFIX = 1 << 2,
  KVTWIN_CAN_SHARE = 1 << 3,   /* Copy a prefix that is not all of it. */
  KVTWIN_CAN_RESERVE = 1 << 4, /* start_forward with reserve */
  KVTWIN_CAN_MIX = 1 << 5,     /* Several sequences in one batch. */
  KVTWIN_CAN_ANY_ORDER =
      1 << 6, /* Positions with gaps, that go back, repeat; passes too. */
  /* Misuse (docs/semantics.md, S47) is an error and changes nothing. */
  KVTWIN_CAN_REFUSE_MISUSE = 1 << 7,
  /* What `get` points to may be written to, to overwrite rows of free cells. */
  KVTWIN_CAN_BE_POISONED = 1 << 8,
  /* K and V of a put may have gaps (strides), else they are dense. */
  KVTWIN_CAN_TAKE_STRIDED = 1 << 9,
  /* Sequences of any number, else of 0 to max_sequences - 1. */
  KVTWIN_CAN_ANY_SEQUENCE = 1 << 10,
  /* The dtype of V may be another than that of K. */
  KVTWIN_CAN_MIX_DTYPES = 1 << 11
};
/* What most backends have, and yours does not: it is never asked of it. */
enum {
  /* A window of 0 positions before the query; windows have 1 or more then. */
  KVTWIN_CANNOT_WINDOW_0 = 1 << 0,
  /* copy_prefix with a source that is the target. */
  KVTWIN_CANNOT_COPY_TO_ITSELF = 1 << 1,
  /* A remove that is refused changes nothing. Yours may then have removed or
   * moved a part of the sequence (of no other one): before anything else is
   * called, remove(s, 0, OPEN_END) clears it, and may not be refused. */
  KVTWIN_CANNOT_UNDO_REMOVE = 1 << 2
};

/* How much a backend claims to be held to. */
typedef enum kvtwin_level {
  KVTWIN_NUMERIC = 0,    /* Attention over its views, within a tolerance. */
  KVTWIN_VISIBILITY = 1, /* Each row sees the tokens that are due. */
  KVTWIN_IDENTITY = 2,   /* Same errors, cells, view bounds and bytes. */
  KVTWIN_ENTITLEMENT = KVTWIN_VISIBILITY /* Its name before. */
} kvtwin_level;

typedef struct kvtwin_description_v1 {
  size_t size;
  const char* name;
  /* Whose rules it follows, "ollama-0.15" unless said otherwise: one of
   * `kvtwin profile --list`, perhaps with exceptions, as `kvtwin profile`
   * prints them: "llama.cpp except copy replaces, middle removal shifts". */
  const char* profile;
  kvtwin_level level;    /* VISIBILITY unless said otherwise. */
  uint32_t kinds;        /* KVTWIN_HAS_..., CAUSAL unless said otherwise. */
  uint32_t can;          /* KVTWIN_CAN_..., 0 unless said otherwise. */
  uint32_t dtypes;       /* 1 << kvtwin_dtype of stored rows; f32. */
  uint32_t v_layouts;    /* 1 << kvtwin_v_layout; plain. */
  uint32_t shifts;       /* 1 << kvtwin_shift_kind; none. */
  uint32_t mask_dtypes;  /* 1 << kvtwin_dtype; f32. */
  int32_t max_sequences; /* 0: any number; 1 unless said otherwise. */
  int32_t max_layers;    /* 0: any number. */
  int32_t max_padding;   /* Largest cache or mask padding; 1; 0: any. */
  double tolerance;      /* Of NUMERIC: largest error of an element of the
                            attention's output; 0.01. */

  /* What follows came after version 0.1.0. Each is 0 unless said otherwise. If
   * yours is to run with that version, too, set them where `size` reaches them:
   * out->size >= sizeof(kvtwin_description_v1). */
  uint32_t cannot;          /* KVTWIN_CANNOT_... */
  uint32_t placements;      /* 1 << kvtwin_placement; 0: both. */
  int32_t max_position;     /* Largest position of a token; 0: any. The capacity
                               is max_position + 1 at most then. */
  int32_t max_mask_padding; /* Largest mask padding; 0: max_padding, which then
                               is that of both. INT32_MAX: any. */
} kvtwin_description_v1;

/* What a cache of the backend is to be: `cache`, and the rows of its model. */
typedef struct kvtwin_setup_v1 {
  size_t size;
  const kvtwin_cache_params* cache;
  int32_t layers;
  int32_t kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
} kvtwin_setup_v1;

/* Your cache as a table. Each function but `describe` gets what `init` wrote to
 * `*cache`. They are called from one thread at a time; several caches may live
 * at once. They answer with a kvtwin_status; where yours cannot fail, that is
 * KVTWIN_OK. Functions that are NULL below "optional" are not called. */
typedef struct kvtwin_backend_v1 {
  size_t size; /* sizeof(kvtwin_backend_v1) */

  /* `out` has the defaults above; change what differs. */
  int (*describe)(kvtwin_description_v1* out);
  /* NOT_SUPPORTED: you have no such cache, histories of it are passed over. */
  int (*init)(const kvtwin_setup_v1* setup, void** cache);
  void (*close)(void* cache);

  /* A place for every token of the batch, or CACHE_FULL. */
  int (*start_forward)(void* cache, const kvtwin_batch* batch, int reserve);
  /* The batch's rows: key [k_head_dim, kv_heads, tokens], value [v_head_dim,
   * kv_heads, tokens], f32 or the dtype of the cache, perhaps with gaps. */
  int (*put)(void* cache, int32_t layer, const kvtwin_tensor* key,
             const kvtwin_tensor* value);
  /* The current view of a layer. `view` comes with the shapes and dtypes that
   * are due, but for the number of columns: set `columns` and the three `data`,
   * and strides if they are not dense. The memory stays as it is until the next
   * call with this cache. */
  int (*get)(void* cache, int32_t layer, kvtwin_view* view);
  /* These three may be NULL, too. */
  int (*remove)(void* cache, int32_t sequence, int32_t begin, int32_t end);
  int (*copy_prefix)(void* cache, int32_t source, int32_t target,
                     int32_t length);
  /* *yes: 1 if the sequence can continue at `position` with its whole window; 0
   * for a sequence without tokens if memory is bounded (S28). */
  int (*can_resume)(void* cache, int32_t sequence, int32_t position,
                    int32_t* yes);

  /* Optional. */
  /* Why the last call did not answer OK. */
  const char* (*message)(void* cache);
  /* Adds `delta` to the positions in [begin, end) of a sequence, and rewrites
   * their K rows: for profiles whose remove leaves a gap. */
  int (*shift)(void* cache, int32_t sequence, int32_t begin, int32_t end,
               int32_t delta);
  int (*set_causal)(void* cache, const int32_t* except, int32_t count);
  int (*set_layer_type)(void* cache, int32_t type);
  int (*encoder_cached)(void* cache, int32_t* yes);
  /* All memberships, by cell, then by sequence, of which `room` fit into
   * `cells`; and the cells of the batch. *count and *batch_count: how many
   * there are. *total: cells in all. */
  int (*cells)(void* cache, kvtwin_cell* cells, size_t room, size_t* count,
               int32_t* batch, size_t batch_room, size_t* batch_count,
               int32_t* total);
  /* The state as bytes (<kvtwin/save.h>), of one sequence, or of all if
   * `sequence` is -1; they live until the next call. And back. */
  int (*snapshot)(void* cache, int32_t sequence, const void** bytes,
                  size_t* count);
  int (*restore)(void* cache, int32_t sequence, const void* bytes,
                 size_t count);
} kvtwin_backend_v1;

/* What a shared library of yours exports. */
typedef const kvtwin_backend_v1* (*kvtwin_get_backend_v1_fn)(void);
#define KVTWIN_GET_BACKEND_V1 "kvtwin_get_backend_v1"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVTWIN_KVTWIN_H_ */
