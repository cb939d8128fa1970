/* kvtwin from C, and from any language that can call C: the caches, recordings
 * and their check, and the table of functions by which a cache of your own is
 * driven (`kvtwin fuzz --backend ./libyours.so`, docs/backends.md).
 *
 * No exception leaves this library. Every struct that may grow begins with its
 * size, which the caller sets (the ..._default_... functions do): a library
 * that is newer than its caller fills in no more than that.
 *
 * Words, units and rules are those of <kvtwin/cache.h> and docs/semantics.md.
 * Shapes are first dimension fastest. */

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
  KVTWIN_INTERNAL = -4 /* Something else was thrown; the cache is lost. */
} kvtwin_status;

/* As the end of a range: everything from its begin on. */
#define KVTWIN_OPEN_END INT32_MAX

typedef enum kvtwin_dtype {
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
  KVTWIN_SHIFT_ROPE = 4
} kvtwin_shift_kind;

typedef struct kvtwin_shift {
  kvtwin_shift_kind kind;
  int rope_halves; /* Pairs are (i, i + dims / 2), else (2i, 2i + 1). */
  int rope_dims;   /* Elements that rotate; 0: all. */
  double rope_base;
  double rope_scale;
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
  int32_t memory; /* -1: the window. */
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
      1 << 6, /* Positions with gaps, that go back, repeat. */
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

/* How much a backend claims to be held to. */
typedef enum kvtwin_level {
  KVTWIN_NUMERIC = 0,     /* Attention over its views, within a tolerance. */
  KVTWIN_ENTITLEMENT = 1, /* Each row sees the tokens that are due. */
  KVTWIN_IDENTITY = 2     /* Same errors, cells, view bounds and bytes. */
} kvtwin_level;

typedef struct kvtwin_description_v1 {
  size_t size;
  const char* name;
  /* Whose rules it follows, "ollama-0.15" unless said otherwise: one of
   * `kvtwin profile --list`. */
  const char* profile;
  kvtwin_level level;    /* ENTITLEMENT unless said otherwise. */
  uint32_t kinds;        /* KVTWIN_HAS_..., CAUSAL unless said otherwise. */
  uint32_t can;          /* KVTWIN_CAN_..., 0 unless said otherwise. */
  uint32_t dtypes;       /* 1 << kvtwin_dtype of stored rows; f32. */
  uint32_t v_layouts;    /* 1 << kvtwin_v_layout; plain. */
  uint32_t shifts;       /* 1 << kvtwin_shift_kind; none. */
  uint32_t mask_dtypes;  /* 1 << kvtwin_dtype; f32. */
  int32_t max_sequences; /* 0: any number; 1 unless said otherwise. */
  int32_t max_layers;    /* 0: any number. */
  int32_t max_padding;   /* Largest cache or mask padding; 1. */
  double tolerance;      /* Of NUMERIC: largest error of an element of the
                            attention's output; 0.01. */
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
  int (*remove)(void* cache, int32_t sequence, int32_t begin, int32_t end);
  int (*copy_prefix)(void* cache, int32_t source, int32_t target,
                     int32_t length);
  /* *yes: 1 if the sequence can go on at `position` with its whole window. */
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
