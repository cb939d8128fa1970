/* Records the calls to a KV cache and its answers, for `kvtwin check`. Copy
 * this file into your project: it needs only C99 or C++11.
 *
 *   #include "kvtwin_recorder.h"
 *
 *   kvrec r;
 *   kvrec_header header = kvrec_default_header();
 *   header.producer = "my cache 1.2";
 *   header.max_sequences = 2, header.capacity = 64, header.max_batch = 8;
 *   header.layers = 1;
 *   header.k_head_dim = 64, header.kv_heads = 2, header.v_head_dim = 64;
 *   kvrec_open(&r, "my.jsonl", &header);
 *
 *   int32_t positions[] = {0, 1, 2}, sequences[] = {0, 0, 0};
 *   const char* result = my_start_forward(...) ? "ok" : "cache_full";
 *   kvrec_pass pass = kvrec_batch(3, positions, sequences, result);
 *   kvrec_start_forward(&r, &pass);
 *   my_put(0, k, v);
 *   kvrec_put(&r, 0, kvrec_dense(k, 64, 2, 3), kvrec_dense(v, 64, 2, 3));
 *   n = my_get(0, &k_view, &v_view, &mask);
 *   kvrec_tensor value = kvrec_dense(v_view, 64, 2, n);
 *   kvrec_mask sees = kvrec_mask_f32(mask, n, 3);
 *   kvrec_get(&r, 0, KVREC_NONE, kvrec_dense(k_view, 64, 2, n), &value, &sees);
 *
 * An engine that does not show its rows, but what its attention made of them
 * (header.attend_dtype = "bf16"), has in place of the last four lines:
 *
 *   my_attend(0, queries, outputs);
 *   kvrec_attend(&r, 0, kvrec_dense(queries, 64, 8, 3),
 *                kvrec_dense(outputs, 64, 8, 3));
 *
 *   if (kvrec_close(&r) != 0) fprintf(stderr, "%s\n", r.error);
 *
 * Call each function after your cache has answered the call that it records. It
 * writes one line, and returns 0, or -1 if the line cannot be written. The
 * first error is kept in `error`; after it nothing is written, and kvrec_close
 * returns -1, too. So it is enough to check the result of kvrec_close. A line
 * is handed to the system at once: if your program crashes, all lines before
 * the crash are in the file.
 *
 * The fields have the names that kvtwin's docs/trace_format.md explains. Calls
 * that your cache rejects as misuse are not recorded. The functions check only
 * whether a line can be written; `kvtwin check` says what else is wrong with a
 * recording, and in which line.
 *
 * Not supported: pools of blocks (`"type": "paged"`), whose lines are on the
 * same page. Not thread-safe: one call at a time with the same kvrec. */

#ifndef KVTWIN_RECORDER_H_
#define KVTWIN_RECORDER_H_

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define KVREC_NONE (-1)          /* As first_cell: it is not recorded. */
#define KVREC_OPEN_END INT32_MAX /* As the end of kvrec_remove. */
#define KVREC_CACHES 4           /* Caches of a wrapper, at most. */
#define KVREC_NUMBERS_MAX ((int64_t)64 << 20) /* Numbers of one tensor. */

/* Fields that are NULL or 0 have their default, if a default is stated. */

typedef struct kvrec_cache {
  /* "causal" (default), "swa", "swa_mem", "chunked", "encoder" or "recurrent".
   */
  const char* type;
  /* For swa and swa_mem: how many positions before its own a token sees. An
   * engine whose window of n includes the token records n - 1. Negative: not
   * recorded. */
  int32_t window;
  int32_t memory; /* For swa_mem. Negative: not recorded. */
  int32_t chunk;  /* For chunked. Negative: not recorded. */
  /* "none" (default), "identity", "add", "tag_add" or "rope". */
  const char* shift;
  /* For "rope": "adjacent" (default) or "halves"; base 10000, scale 1. */
  const char* rope_pairing;
  double rope_base, rope_scale;
  int32_t rope_dims;
  int32_t checkpoint_every, checkpoints, pins, drafts; /* For recurrent. */
} kvrec_cache;

typedef struct kvrec_header {
  const char* producer;  /* Free text, in UTF-8. */
  const char* placement; /* "contiguous", "scatter" or "other" (default). */
  kvrec_cache caches[KVREC_CACHES]; /* Several: those of a wrapper. */
  int32_t cache_count;              /* Default: 1. */
  int hybrid;                       /* Not 0: those of a hybrid cache. */
  int32_t cache_padding, mask_batch_padding; /* Default: 1. */
  int permuted_v, tiled_v;                   /* Layout of V in kvrec_get. */
  const char* mask_dtype; /* "f32" (default), "f16", "bf16" or "bits". */
  const char* v_dtype;    /* Default: same as dtype. */
  const char* dtype;      /* "f32" (default), "f16", "bf16", "f8_e4m3", ... */
  int32_t max_sequences, capacity, max_batch;
  int32_t layers, k_head_dim, kv_heads, v_head_dim;

  /* For kvrec_attend: "f32", or the "f16" or "bf16" to which the engine rounds
   * queries, scores, weights or outputs. NULL: it is not called. */
  const char* attend_dtype;
  double attend_tolerance;   /* The error of its number formats. */
  double attend_soft_cap;    /* Default: none. */
  const float* attend_sinks; /* A logit for each query head; default: none. */
  int32_t attend_sink_count;

  int drafts;  /* Not 0: passes have parents, and kvrec_commit is called. */
  int prompts; /* Not 0: kvrec_find_prefix or kvrec_checkpoint is called. */
} kvrec_header;

/* Rows as f32; convert rows of other dtypes, exactly. K is [k_head_dim,
 * kv_heads, n], V [v_head_dim, kv_heads, n], first dimension fastest; shape[3]
 * is 0 unless V is tiled. Strides are in bytes, like `nb` in ggml; if all are
 * 0, the tensor is dense. */
typedef struct kvrec_tensor {
  const float* data;
  int64_t shape[4];
  int64_t stride[4];
} kvrec_tensor;

/* A mask [columns, rows], columns fastest, dense. Set one of the two pointers:
 * `f32` to 0 (may attend) or -inf, or `boolean` to bytes, 0 if the row may not
 * attend. */
typedef struct kvrec_mask {
  const float* f32;
  const unsigned char* boolean;
  int64_t columns, rows;
} kvrec_mask;

typedef struct kvrec_pass {
  int32_t tokens;
  const int32_t* positions; /* `tokens` positions. */
  const int32_t* sequences; /* `tokens` sequences. */
  int reserve;
  const int32_t* multimodal; /* Indices of tokens; may be NULL. */
  int32_t multimodal_count;
  const char* result;   /* "ok" (default) or "cache_full". */
  const int32_t* cells; /* `tokens` cells; NULL: not recorded. */
  /* `tokens` parents: the number of the draft that each draft follows, -1 for
   * the committed tokens, -2 for a token that is not a draft. NULL: there are
   * no drafts. */
  const int32_t* parents;
} kvrec_pass;

typedef struct kvrec {
  FILE* out;
  int owned;       /* kvrec_close closes `out`. */
  char error[200]; /* The first error; empty if there was none. */
} kvrec;

/* Returns a dense tensor. */
static inline kvrec_tensor kvrec_dense(const float* data, int64_t head_dim,
                                       int64_t heads, int64_t n) {
  kvrec_tensor tensor = {data, {0, 0, 0, 0}, {0, 0, 0, 0}};
  tensor.shape[0] = head_dim;
  tensor.shape[1] = heads;
  tensor.shape[2] = n;
  return tensor;
}

static inline kvrec_mask kvrec_mask_f32(const float* data, int64_t columns,
                                        int64_t rows) {
  kvrec_mask mask = {data, NULL, columns, rows};
  return mask;
}

static inline kvrec_mask kvrec_mask_bool(const unsigned char* data,
                                         int64_t columns, int64_t rows) {
  kvrec_mask mask = {NULL, data, columns, rows};
  return mask;
}

/* Returns a pass without the optional fields. */
static inline kvrec_pass kvrec_batch(int32_t tokens, const int32_t* positions,
                                     const int32_t* sequences,
                                     const char* result) {
  kvrec_pass pass;
  memset(&pass, 0, sizeof pass);
  pass.tokens = tokens;
  pass.positions = positions;
  pass.sequences = sequences;
  pass.result = result;
  return pass;
}

/* Returns a header with all defaults; fill in max_sequences to v_head_dim. */
static inline kvrec_header kvrec_default_header(void) {
  kvrec_header header;
  memset(&header, 0, sizeof header);
  return header;
}

/* ---- Helpers of the functions at the end. ---- */

#ifdef __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
static inline int
kvrec_fail(kvrec* r, const char* format, ...) {
  if (r->error[0] == '\0') {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->error, sizeof r->error, format, arguments);
    va_end(arguments);
  }
  return -1;
}

static inline const char* kvrec_or(const char* text, const char* other) {
  return text == NULL ? other : text;
}

static inline void kvrec_text(kvrec* r, const char* text) {
  fputc('"', r->out);
  for (; *text != '\0'; ++text) {
    const unsigned char c = (unsigned char)*text;
    if (c < 0x20) {
      fprintf(r->out, "\\u%04x", c);
    } else {
      if (c == '"' || c == '\\') fputc('\\', r->out);
      fputc(c, r->out);
    }
  }
  fputc('"', r->out);
}

static inline void kvrec_text_key(kvrec* r, const char* key, const char* text) {
  fprintf(r->out, ",\"%s\":", key);
  kvrec_text(r, text);
}

/* Writes a number with a decimal point in any locale. */
static inline void kvrec_number(kvrec* r, double number, int digits) {
  char text[40];
  int i, in_point = 0;
  snprintf(text, sizeof text, "%.*g", digits, number);
  for (i = 0; text[i] != '\0'; ++i) {
    const int plain = strchr("0123456789+-e", text[i]) != NULL;
    if (plain) fputc(text[i], r->out);
    if (!plain && !in_point) fputc('.', r->out);
    in_point = !plain;
  }
}

/* Converts by the bits: with -ffast-math, which flushes denormal numbers, a
 * conversion to double would make them 0. */
static inline void kvrec_f32(kvrec* r, float number) {
  uint32_t bits, magnitude;
  memcpy(&bits, &number, sizeof bits);
  magnitude = bits & 0x7fffffffu;
  if (bits != magnitude) fputc('-', r->out);
  memcpy(&number, &magnitude, sizeof number);
  kvrec_number(r,
               magnitude < 0x00800000u
                   ? (double)magnitude * 1.4012984643248171e-45 /* 2^-149 */
                   : (double)number,
               9);
}

static inline void kvrec_ints(kvrec* r, const char* key, const int32_t* numbers,
                              int32_t count) {
  int32_t i;
  fprintf(r->out, ",\"%s\":[", key);
  for (i = 0; i < count; ++i) {
    fprintf(r->out, i == 0 ? "%d" : ",%d", (int)numbers[i]);
  }
  fputc(']', r->out);
}

/* Looks at the bits: a build with -ffast-math assumes finite numbers. */
static inline int kvrec_finite(double number) {
  const uint64_t exponent = (uint64_t)0x7ff << 52;
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  return (bits & exponent) != exponent;
}

static inline int64_t kvrec_extent(const kvrec_tensor* tensor, int dimension) {
  const int64_t extent = tensor->shape[dimension];
  return dimension == 3 && extent == 0 ? 1 : extent;
}

static inline int64_t kvrec_count(const kvrec_tensor* tensor) {
  return kvrec_extent(tensor, 0) * kvrec_extent(tensor, 1) *
         kvrec_extent(tensor, 2) * kvrec_extent(tensor, 3);
}

/* Returns element `at`, counted with the first dimension fastest. */
static inline float kvrec_element(const kvrec_tensor* tensor, int64_t at) {
  int64_t offset = 0, rest = at;
  int i, dense = 1;
  float number;
  for (i = 0; i < 4; ++i) {
    dense = dense && tensor->stride[i] == 0;
    offset += rest % kvrec_extent(tensor, i) * tensor->stride[i];
    rest /= kvrec_extent(tensor, i);
  }
  if (dense) offset = at * (int64_t)sizeof number;
  memcpy(&number, (const char*)tensor->data + offset, sizeof number);
  return number;
}

static inline int kvrec_check_tensor(kvrec* r, const char* name,
                                     const kvrec_tensor* tensor) {
  int64_t count = 1, i;
  int d;
  if (tensor->data == NULL) return kvrec_fail(r, "%s has no data", name);
  for (d = 0; d < 4; ++d) {
    const int64_t extent = kvrec_extent(tensor, d);
    if (extent < 1) {
      return kvrec_fail(r, "%s: extent %d is %lld, it must be 1 or more", name,
                        d, (long long)extent);
    }
    if (extent > KVREC_NUMBERS_MAX / count) {
      return kvrec_fail(r, "%s: more than %lld numbers", name,
                        (long long)KVREC_NUMBERS_MAX);
    }
    count *= extent;
  }
  for (i = 0; i < count; ++i) {
    if (kvrec_finite((double)kvrec_element(tensor, i))) continue;
    return kvrec_fail(
        r, "%s: element %lld is not finite, which no recording can hold", name,
        (long long)i);
  }
  return 0;
}

static inline void kvrec_tensor_key(kvrec* r, const char* key,
                                    const kvrec_tensor* tensor) {
  const int64_t count = kvrec_count(tensor);
  int64_t i;
  fprintf(r->out, ",\"%s\":{\"shape\":[%lld,%lld,%lld", key,
          (long long)tensor->shape[0], (long long)tensor->shape[1],
          (long long)tensor->shape[2]);
  if (tensor->shape[3] != 0) {
    fprintf(r->out, ",%lld", (long long)tensor->shape[3]);
  }
  fputs("],\"data\":[", r->out);
  for (i = 0; i < count; ++i) {
    if (i > 0) fputc(',', r->out);
    kvrec_f32(r, kvrec_element(tensor, i));
  }
  fputs("]}", r->out);
}

/* Returns '1' or '0'; -1 if the element is neither 0 nor -inf. */
static inline int kvrec_sees(const kvrec_mask* mask, int64_t at) {
  uint32_t bits;
  if (mask->f32 == NULL) return mask->boolean[at] != 0 ? '1' : '0';
  memcpy(&bits, &mask->f32[at], sizeof bits);
  if (bits == 0xff800000u) return '0';
  return (bits & 0x7fffffffu) == 0 ? '1' : -1;
}

static inline int kvrec_check_mask(kvrec* r, const kvrec_mask* mask) {
  int64_t i;
  if ((mask->f32 == NULL) == (mask->boolean == NULL)) {
    return kvrec_fail(r, "get: mask must be f32 or bool, one of them");
  }
  if (mask->columns < 1 || mask->rows < 1 ||
      mask->rows > KVREC_NUMBERS_MAX / mask->columns) {
    return kvrec_fail(r, "get: mask has %lld columns and %lld rows",
                      (long long)mask->columns, (long long)mask->rows);
  }
  for (i = 0; i < mask->columns * mask->rows; ++i) {
    if (kvrec_sees(mask, i) >= 0) continue;
    return kvrec_fail(r, "get: mask: element %lld is neither 0 nor -inf",
                      (long long)i);
  }
  return 0;
}

static inline void kvrec_mask_key(kvrec* r, const kvrec_mask* mask) {
  int64_t row, column;
  fprintf(r->out, ",\"mask\":{\"shape\":[%lld,%lld],\"rows\":[",
          (long long)mask->columns, (long long)mask->rows);
  for (row = 0; row < mask->rows; ++row) {
    fputs(row == 0 ? "\"" : ",\"", r->out);
    for (column = 0; column < mask->columns; ++column) {
      fputc(kvrec_sees(mask, row * mask->columns + column), r->out);
    }
    fputc('"', r->out);
  }
  fputs("]}", r->out);
}

static inline int kvrec_end(kvrec* r) {
  fputs("}\n", r->out);
  if (fflush(r->out) != 0 || ferror(r->out)) {
    return kvrec_fail(r, "the recording cannot be written: %s",
                      strerror(errno));
  }
  return 0;
}

static inline int kvrec_check_header(kvrec* r, const kvrec_header* header) {
  const int32_t sizes[] = {header->max_sequences, header->capacity,
                           header->max_batch,     header->layers,
                           header->k_head_dim,    header->kv_heads,
                           header->v_head_dim};
  const char* const names[] = {"max_sequences", "capacity",   "max_batch",
                               "layers",        "k_head_dim", "kv_heads",
                               "v_head_dim"};
  int i;
  for (i = 0; i < 7; ++i) {
    if (sizes[i] >= 1) continue;
    return kvrec_fail(r, "header: %s is %d, it must be 1 or more", names[i],
                      (int)sizes[i]);
  }
  if (header->cache_count < 0 || header->cache_count > KVREC_CACHES) {
    return kvrec_fail(r, "header: cache_count is %d, at most %d have a place",
                      (int)header->cache_count, KVREC_CACHES);
  }
  for (i = 0; i < KVREC_CACHES; ++i) {
    if (!kvrec_finite(header->caches[i].rope_base) ||
        !kvrec_finite(header->caches[i].rope_scale)) {
      return kvrec_fail(r, "header: rope_base or rope_scale is not finite");
    }
  }
  for (i = -1; i < header->attend_sink_count; ++i) {
    if (!kvrec_finite(i < 0 ? header->attend_tolerance + header->attend_soft_cap
                            : (double)header->attend_sinks[i])) {
      return kvrec_fail(r, "header: a number for attend is not finite");
    }
  }
  return 0;
}

static inline void kvrec_limit(kvrec* r, const char* key, int32_t number) {
  if (number >= 0) fprintf(r->out, ",\"%s\":%d", key, (int)number);
}

static inline void kvrec_cache_object(kvrec* r, const kvrec_cache* cache) {
  const char* const type = kvrec_or(cache->type, "causal");
  const char* const shift = kvrec_or(cache->shift, "none");
  fputs("{\"type\":", r->out);
  kvrec_text(r, type);
  if (strncmp(type, "swa", 3) == 0) kvrec_limit(r, "window", cache->window);
  if (strcmp(type, "swa_mem") == 0) kvrec_limit(r, "memory", cache->memory);
  if (strcmp(type, "chunked") == 0) kvrec_limit(r, "chunk", cache->chunk);
  if (strcmp(type, "recurrent") == 0) {
    fprintf(r->out,
            ",\"checkpoint_every\":%d,\"checkpoints\":%d,\"pins\":%d,"
            "\"drafts\":%d",
            (int)cache->checkpoint_every, (int)cache->checkpoints,
            (int)cache->pins, (int)cache->drafts);
  } else if (strcmp(type, "encoder") != 0) {
    kvrec_text_key(r, "shift", shift);
  }
  if (strcmp(shift, "rope") == 0) {
    fputs(",\"rope\":{\"pairing\":", r->out);
    kvrec_text(r, kvrec_or(cache->rope_pairing, "adjacent"));
    fputs(",\"base\":", r->out);
    kvrec_number(r, cache->rope_base == 0 ? 10000 : cache->rope_base, 17);
    fputs(",\"scale\":", r->out);
    kvrec_number(r, cache->rope_scale == 0 ? 1 : cache->rope_scale, 17);
    fprintf(r->out, ",\"dims\":%d}", (int)cache->rope_dims);
  }
  fputc('}', r->out);
}

static inline void kvrec_config_object(kvrec* r, const kvrec_header* header) {
  fprintf(
      r->out,
      "{\"cache_padding\":%d,\"mask_batch_padding\":%d,"
      "\"permuted_v\":%s,\"tiled_v\":%s",
      (int)(header->cache_padding == 0 ? 1 : header->cache_padding),
      (int)(header->mask_batch_padding == 0 ? 1 : header->mask_batch_padding),
      header->permuted_v ? "true" : "false",
      header->tiled_v ? "true" : "false");
  kvrec_text_key(r, "mask_dtype", kvrec_or(header->mask_dtype, "f32"));
  if (header->v_dtype != NULL) kvrec_text_key(r, "v_dtype", header->v_dtype);
  fputc('}', r->out);
}

static inline void kvrec_attend_object(kvrec* r, const kvrec_header* header) {
  int32_t i;
  fputs(",\"attend\":{\"dtype\":", r->out);
  kvrec_text(r, header->attend_dtype);
  fputs(",\"tolerance\":", r->out);
  kvrec_number(r, header->attend_tolerance, 17);
  fputs(",\"soft_cap\":", r->out);
  kvrec_number(r, header->attend_soft_cap, 17);
  fputs(",\"sinks\":[", r->out);
  for (i = 0; i < header->attend_sink_count; ++i) {
    if (i > 0) fputc(',', r->out);
    kvrec_f32(r, header->attend_sinks[i]);
  }
  fputs("]}", r->out);
}

/* ---- The recording. ---- */

/* Records to your own FILE, which stays open: a pipe, memory, or a file with
 * several recordings one after the other. */
static inline int kvrec_to(kvrec* r, FILE* out, const kvrec_header* header) {
  int i;
  memset(r, 0, sizeof *r);
  r->out = out;
  if (kvrec_check_header(r, header) != 0) return -1;
  fprintf(out, "{\"kvtrace\":%d,\"producer\":",
          header->prompts                ? 4
          : header->drafts               ? 3
          : header->attend_dtype == NULL ? 1
                                         : 2);
  kvrec_text(r, kvrec_or(header->producer, ""));
  kvrec_text_key(r, "placement", kvrec_or(header->placement, "other"));
  fputs(",\"cache\":", out);
  if (header->cache_count > 1) {
    fprintf(out, "{\"type\":\"%s\",\"caches\":[",
            header->hybrid ? "hybrid" : "wrapper");
    for (i = 0; i < header->cache_count; ++i) {
      if (i > 0) fputc(',', out);
      kvrec_cache_object(r, &header->caches[i]);
    }
    fputs("]}", out);
  } else {
    kvrec_cache_object(r, &header->caches[0]);
  }
  fputs(",\"config\":", out);
  kvrec_config_object(r, header);
  fputs(",\"init\":{\"dtype\":", out);
  kvrec_text(r, kvrec_or(header->dtype, "f32"));
  fprintf(out, ",\"max_sequences\":%d,\"capacity\":%d,\"max_batch\":%d}",
          (int)header->max_sequences, (int)header->capacity,
          (int)header->max_batch);
  fprintf(out,
          ",\"model\":{\"layers\":%d,\"k_head_dim\":%d,\"kv_heads\":%d,"
          "\"v_head_dim\":%d}",
          (int)header->layers, (int)header->k_head_dim, (int)header->kv_heads,
          (int)header->v_head_dim);
  if (header->attend_dtype != NULL) kvrec_attend_object(r, header);
  return kvrec_end(r);
}

/* Records to a file, which is created or overwritten. */
static inline int kvrec_open(kvrec* r, const char* path,
                             const kvrec_header* header) {
  FILE* out;
  memset(r, 0, sizeof *r);
  if (kvrec_check_header(r, header) != 0) return -1;
  out = fopen(path, "wb");
  if (out == NULL) return kvrec_fail(r, "%s: %s", path, strerror(errno));
  if (kvrec_to(r, out, header) != 0) {
    fclose(out);
    return -1;
  }
  r->owned = 1;
  return 0;
}

/* Returns -1 if any call failed, for example because the disk was full; `error`
 * then has the first error. */
static inline int kvrec_close(kvrec* r) {
  if (r->owned && fclose(r->out) != 0) {
    kvrec_fail(r, "the recording cannot be written: %s", strerror(errno));
  }
  r->owned = 0;
  r->out = NULL;
  if (r->error[0] != '\0') return -1;
  snprintf(r->error, sizeof r->error, "the recording is closed");
  return 0;
}

static inline int kvrec_start_forward(kvrec* r, const kvrec_pass* pass) {
  if (r->error[0] != '\0') return -1;
  fputs("{\"op\":\"start_forward\"", r->out);
  kvrec_ints(r, "positions", pass->positions, pass->tokens);
  kvrec_ints(r, "sequences", pass->sequences, pass->tokens);
  if (pass->parents != NULL) {
    kvrec_ints(r, "parents", pass->parents, pass->tokens);
  }
  if (pass->reserve) fputs(",\"reserve\":true", r->out);
  if (pass->multimodal_count > 0) {
    kvrec_ints(r, "multimodal", pass->multimodal, pass->multimodal_count);
  }
  kvrec_text_key(r, "result", kvrec_or(pass->result, "ok"));
  if (pass->cells != NULL) kvrec_ints(r, "cells", pass->cells, pass->tokens);
  return kvrec_end(r);
}

/* Begins a line with a number. */
static inline int kvrec_op(kvrec* r, const char* op, const char* key,
                           int32_t number) {
  if (r->error[0] != '\0') return -1;
  fprintf(r->out, "{\"op\":\"%s\",\"%s\":%d", op, key, (int)number);
  return 0;
}

static inline int kvrec_set_causal(kvrec* r, const int32_t* except,
                                   int32_t count) {
  if (r->error[0] != '\0') return -1;
  fputs("{\"op\":\"set_causal\"", r->out);
  kvrec_ints(r, "except", except, count);
  return kvrec_end(r);
}

static inline int kvrec_set_layer_type(kvrec* r, int32_t type) {
  return kvrec_op(r, "set_layer_type", "type", type) ? -1 : kvrec_end(r);
}

static inline int kvrec_put(kvrec* r, int32_t layer, kvrec_tensor key,
                            kvrec_tensor value) {
  if (r->error[0] != '\0' || kvrec_check_tensor(r, "put: key", &key) != 0 ||
      kvrec_check_tensor(r, "put: value", &value) != 0) {
    return -1;
  }
  kvrec_op(r, "put", "layer", layer);
  kvrec_tensor_key(r, "key", &key);
  kvrec_tensor_key(r, "value", &value);
  return kvrec_end(r);
}

/* Records the view of a get. If first_cell is KVREC_NONE or value NULL, it is
 * not recorded. mask is NULL for an encoder. */
static inline int kvrec_get(kvrec* r, int32_t layer, int32_t first_cell,
                            kvrec_tensor key, const kvrec_tensor* value,
                            const kvrec_mask* mask) {
  if (r->error[0] != '\0' || kvrec_check_tensor(r, "get: key", &key) != 0 ||
      (value != NULL && kvrec_check_tensor(r, "get: value", value) != 0) ||
      (mask != NULL && kvrec_check_mask(r, mask) != 0)) {
    return -1;
  }
  kvrec_op(r, "get", "layer", layer);
  kvrec_limit(r, "first_cell", first_cell);
  kvrec_tensor_key(r, "key", &key);
  if (value != NULL) kvrec_tensor_key(r, "value", value);
  if (mask != NULL) {
    kvrec_mask_key(r, mask);
  } else {
    fputs(",\"mask\":null", r->out);
  }
  return kvrec_end(r);
}

/* Records what attention over the batch's pass answered: query [k_head_dim,
 * heads, tokens], out [v_head_dim, heads, tokens]. */
static inline int kvrec_attend(kvrec* r, int32_t layer, kvrec_tensor query,
                               kvrec_tensor out) {
  if (r->error[0] != '\0' ||
      kvrec_check_tensor(r, "attend: query", &query) != 0 ||
      kvrec_check_tensor(r, "attend: out", &out) != 0) {
    return -1;
  }
  kvrec_op(r, "attend", "layer", layer);
  kvrec_tensor_key(r, "query", &query);
  kvrec_tensor_key(r, "out", &out);
  return kvrec_end(r);
}

/* Records the shape of a reserving pass's mask; first_cell as in kvrec_get. */
static inline int kvrec_reserved_mask(kvrec* r, int32_t columns, int32_t rows,
                                      int32_t first_cell) {
  if (r->error[0] != '\0') return -1;
  fprintf(r->out, "{\"op\":\"reserved_mask\",\"shape\":[%d,%d]", (int)columns,
          (int)rows);
  kvrec_limit(r, "first_cell", first_cell);
  return kvrec_end(r);
}

/* `result` is "ok" (also NULL), "not_supported" or "shared_cells". */
static inline int kvrec_remove(kvrec* r, int32_t seq, int32_t begin,
                               int32_t end, const char* result) {
  if (kvrec_op(r, "remove", "seq", seq)) return -1;
  fprintf(r->out, ",\"begin\":%d,\"end\":%d", (int)begin, (int)end);
  kvrec_text_key(r, "result", kvrec_or(result, "ok"));
  return kvrec_end(r);
}

static inline int kvrec_copy_prefix(kvrec* r, int32_t src, int32_t dst,
                                    int32_t len) {
  if (kvrec_op(r, "copy_prefix", "src", src)) return -1;
  fprintf(r->out, ",\"dst\":%d,\"len\":%d", (int)dst, (int)len);
  return kvrec_end(r);
}

/* The drafts with these numbers become tokens, the others are gone. */
static inline int kvrec_commit(kvrec* r, int32_t seq, const int32_t* path,
                               int32_t count) {
  if (kvrec_op(r, "commit", "seq", seq)) return -1;
  kvrec_ints(r, "path", path, count);
  return kvrec_end(r);
}

/* `ids`: the prompt of a sequence without tokens; it begins with `len` of
 * them. */
static inline int kvrec_find_prefix(kvrec* r, int32_t seq, const int32_t* ids,
                                    int32_t count, int32_t len) {
  if (kvrec_op(r, "find_prefix", "seq", seq)) return -1;
  kvrec_ints(r, "tokens", ids, count);
  fprintf(r->out, ",\"len\":%d", (int)len);
  return kvrec_end(r);
}

static inline int kvrec_checkpoint(kvrec* r, int32_t seq) {
  return kvrec_op(r, "checkpoint", "seq", seq) ? -1 : kvrec_end(r);
}

static inline int kvrec_can_resume(kvrec* r, int32_t seq, int32_t pos,
                                   int result) {
  if (kvrec_op(r, "can_resume", "seq", seq)) return -1;
  fprintf(r->out, ",\"pos\":%d,\"result\":%s", (int)pos,
          result ? "true" : "false");
  return kvrec_end(r);
}

static inline int kvrec_encoder_cached(kvrec* r, int result) {
  if (r->error[0] != '\0') return -1;
  fprintf(r->out, "{\"op\":\"encoder_cached\",\"result\":%s",
          result ? "true" : "false");
  return kvrec_end(r);
}

#endif /* KVTWIN_RECORDER_H_ */
