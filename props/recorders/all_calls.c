/* all_calls FOLDER [--comma]: what all recorders must do, in C. Writes
 * FOLDER/all_calls.jsonl, recordings with every call there is, and FOLDER/
 * refused.txt, what the recorder says of what it cannot write. Both are the
 * same in each language. Exits with 1 if a number does not read back, or if
 * something is written after an error. --comma: in a locale with a decimal
 * comma. */

#include <locale.h>
#include <stdlib.h>

#include "kvtwin_recorder.h"

enum { kMany = 65536, kFew = 512 };

static int wrong;

static void expect(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "all_calls: %s\n", what);
  wrong = 1;
}

static float from_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

/* Zeros, the ends of ranges, ties in the ninth digit, powers of ten at which
 * the form changes; then any bits. */
static void fill(float* numbers, int count) {
  const uint32_t special[] = {
      0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
      0xff7fffff, 0x39000000, 0x38800000, 0x39c00000, 0x3a600000, 0x3dcccccd,
      0x3f800001, 0x4b800000, 0x4cbebc1f, 0x4cbebc20, 0x4e6e6b27, 0x4e6e6b28,
      0x38d1b716, 0x38d1b717, 0x3727c5ac, 0x501502f9, 0x42c80000, 0x461c4000};
  const int specials = (int)(sizeof special / sizeof special[0]);
  uint32_t bits = 1;
  int i;
  for (i = 0; i < count; ++i) {
    do {
      bits = bits * 1664525u + 1013904223u;
    } while ((bits & 0x7f800000u) == 0x7f800000u);
    numbers[i] = from_bits(i < specials ? special[i] : bits);
  }
}

static kvrec_header sizes(void) {
  kvrec_header header = kvrec_default_header();
  header.producer = "all calls";
  header.max_sequences = 1;
  header.capacity = 8;
  header.max_batch = 2;
  header.layers = header.kv_heads = header.v_head_dim = 1;
  header.k_head_dim = 2;
  return header;
}

static void record_encoder(FILE* out) {
  const int32_t zero[] = {0};
  const float row[] = {1.5f, -2};
  const kvrec_tensor key = kvrec_dense(row, 2, 1, 1);
  const kvrec_tensor value = kvrec_dense(row, 1, 1, 2);
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(1, zero, zero, "ok");
  kvrec r;
  header.caches[0].type = "encoder";
  pass.multimodal = zero;
  pass.multimodal_count = 1;
  kvrec_to(&r, out, &header);
  kvrec_start_forward(&r, &pass);
  kvrec_put(&r, 0, key, value);
  kvrec_encoder_cached(&r, 1);
  kvrec_get(&r, 0, KVREC_NONE, key, &value, NULL);
  kvrec_remove(&r, 0, 0, KVREC_OPEN_END, NULL);
  kvrec_encoder_cached(&r, 0);
  expect(kvrec_close(&r) == 0, r.error);
}

static void record_causal(FILE* out) {
  const int32_t positions[] = {0, 1}, sequences[] = {0, 0};
  const float hide = -from_bits(0x7f800000);
  /* Two elements of a row, one of another purpose, and so on. */
  const float rows[] = {1, 2, 99, 3, 4, 99, 0, 0, 99, 0, 0, 99};
  const float values[] = {5, 6, -0.0f, 0};
  const float mask[] = {0,    -0.0f, hide, hide, 0,    0,    hide, hide,
                        hide, hide,  hide, hide, hide, hide, hide, hide};
  kvrec_tensor key = kvrec_dense(rows, 2, 1, 2);
  kvrec_tensor value = kvrec_dense(values, 4, 1, 1);
  kvrec_mask sees = kvrec_mask_f32(mask, 4, 4);
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(2, positions, sequences, NULL);
  kvrec r;
  header.producer = "quote \" backslash \\ tab \t, \xc3\xa9";
  header.placement = "contiguous";
  header.caches[0].shift = "identity";
  header.cache_padding = header.mask_batch_padding = 4;
  header.permuted_v = 1;
  header.mask_dtype = "bits";
  header.dtype = "f16";
  header.v_dtype = "f32";
  kvrec_to(&r, out, &header);
  pass.reserve = 1;
  kvrec_start_forward(&r, &pass);
  kvrec_reserved_mask(&r, 8, 4, 0);
  pass.reserve = 0;
  pass.cells = positions;
  kvrec_start_forward(&r, &pass);
  kvrec_set_causal(&r, positions, 1);
  key.stride[0] = 4, key.stride[1] = key.stride[2] = 12;
  kvrec_put(&r, 0, key, kvrec_dense(values, 1, 1, 2));
  key.shape[2] = 4;
  kvrec_get(&r, 0, 0, key, &value, &sees);
  kvrec_get(&r, 0, KVREC_NONE, key, NULL, &sees);
  kvrec_can_resume(&r, 0, 2, 1);
  kvrec_copy_prefix(&r, 0, 1, 1);
  kvrec_remove(&r, 1, 0, 1, "ok");
  kvrec_remove(&r, 0, 0, 1, "ok");
  expect(kvrec_close(&r) == 0, r.error);
}

/* With a tensor of four dimensions, of one tile of V. */
static void record_wrapper(FILE* out) {
  static float tile[32], keys[64];
  static unsigned char sees[32];
  const int32_t zero[] = {0};
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(1, zero, zero, "ok");
  kvrec_mask mask = kvrec_mask_bool(sees, 32, 1);
  kvrec_tensor value = kvrec_dense(tile, 32, 1, 1);
  kvrec r;
  header.placement = "scatter";
  header.tiled_v = 1;
  header.cache_padding = 32;
  header.cache_count = 4;
  header.caches[0].type = "swa";
  header.caches[0].window = 0;
  header.caches[0].shift = "rope";
  header.caches[1].type = "chunked";
  header.caches[1].chunk = 2;
  header.caches[2].type = "swa_mem";
  header.caches[2].window = 1;
  header.caches[2].memory = 3;
  header.caches[2].shift = "rope";
  header.caches[2].rope_pairing = "halves";
  header.caches[2].rope_base = 1e6;
  header.caches[2].rope_scale = 0.1;
  header.caches[2].rope_dims = 2;
  header.caches[3].type = "swa_mem";
  header.caches[3].window = header.caches[3].memory = -1;
  kvrec_to(&r, out, &header);
  kvrec_start_forward(&r, &pass);
  kvrec_set_layer_type(&r, 1);
  keys[0] = 7, keys[1] = 8, tile[0] = 9, sees[0] = 1;
  kvrec_put(&r, 0, kvrec_dense(keys, 2, 1, 1), kvrec_dense(tile, 1, 1, 1));
  value.shape[3] = 1;
  kvrec_get(&r, 0, 0, kvrec_dense(keys, 2, 1, 32), &value, &mask);
  expect(kvrec_close(&r) == 0, r.error);
}

/* A window of one position, and a sink of the second head. Of two tokens
 * that a row sees, one has all of the weight that the sink leaves, or the
 * sink has all. With `wrong_one`, the last head of the last row sees the
 * first token, too. */
static void record_attention(FILE* out, int wrong_one) {
  const int32_t positions[] = {0, 1, 2}, sequences[] = {0, 0, 0};
  const float keys[] = {1, 0, 0, 1, 1, 1}, values[] = {1, 3, 8};
  const float queries[] = {0, 0, 0, 0, 0, 9999, 9999, 0, -9999, 0, 0, -9999};
  const float outputs[] = {0.9375f, 0.5f, 3, 1, 3, wrong_one ? 0.5f : 0};
  const float sinks[] = {-9999.5f, 0};
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(3, positions, sequences, "ok");
  kvrec r;
  header.caches[0].type = "swa";
  header.caches[0].window = 1;
  header.max_batch = 3;
  header.attend_dtype = "f32";
  header.attend_tolerance = 0.1;
  header.attend_soft_cap = 1e6;
  header.attend_sinks = sinks;
  header.attend_sink_count = 2;
  kvrec_to(&r, out, &header);
  kvrec_start_forward(&r, &pass);
  kvrec_put(&r, 0, kvrec_dense(keys, 2, 1, 3), kvrec_dense(values, 1, 1, 3));
  kvrec_attend(&r, 0, kvrec_dense(queries, 2, 2, 3),
               kvrec_dense(outputs, 1, 2, 3));
  expect(kvrec_close(&r) == 0, r.error);
}

/* Two drafts of one position, of which the second is committed. */
static void record_drafts(FILE* out) {
  const int32_t positions[] = {0, 0}, sequences[] = {0, 0}, next[] = {1};
  const int32_t parents[] = {-1, -1}, path[] = {1};
  const float rows[] = {1, 2, 3, 4, 5, 6}, values[] = {7, 8, 9};
  const unsigned char one_each[] = {1, 0, 0, 1}, both[] = {1, 1};
  const kvrec_tensor key = kvrec_dense(rows, 2, 1, 2);
  const kvrec_tensor value = kvrec_dense(values, 1, 1, 2);
  const kvrec_tensor later = kvrec_dense(values + 1, 1, 1, 2);
  const kvrec_mask drafts = kvrec_mask_bool(one_each, 2, 2);
  const kvrec_mask tokens = kvrec_mask_bool(both, 2, 1);
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(2, positions, sequences, "ok");
  kvrec r;
  header.drafts = 1;
  pass.parents = parents;
  kvrec_to(&r, out, &header);
  kvrec_start_forward(&r, &pass);
  kvrec_put(&r, 0, key, value);
  kvrec_get(&r, 0, KVREC_NONE, key, &value, &drafts);
  kvrec_commit(&r, 0, path, 1);
  pass = kvrec_batch(1, next, sequences, "ok");
  kvrec_start_forward(&r, &pass);
  kvrec_put(&r, 0, kvrec_dense(rows + 4, 2, 1, 1),
            kvrec_dense(values + 2, 1, 1, 1));
  kvrec_get(&r, 0, KVREC_NONE, kvrec_dense(rows + 2, 2, 1, 2), &later, &tokens);
  expect(kvrec_close(&r) == 0, r.error);
}

/* A hybrid cache whose second part has recurrent state. A later sequence
 * begins with two tokens of the first one. */
static void record_hybrid(FILE* out) {
  const int32_t positions[] = {0, 1}, sequences[] = {0, 0}, next[] = {2};
  const int32_t ids[] = {7, 8, 9};
  const float rows[] = {1, 2, 3, 4, 5, 6}, values[] = {7, 8, 9};
  const unsigned char causal[] = {1, 0, 1, 1, 1, 1};
  const kvrec_tensor key = kvrec_dense(rows, 2, 1, 2);
  const kvrec_tensor value = kvrec_dense(values, 1, 1, 2);
  const kvrec_tensor state = kvrec_dense(values + 1, 1, 1, 1);
  const kvrec_tensor all = kvrec_dense(values, 1, 1, 3);
  const kvrec_mask two = kvrec_mask_bool(causal, 2, 2);
  const kvrec_mask one = kvrec_mask_bool(causal, 1, 1);
  const kvrec_mask three = kvrec_mask_bool(causal + 2, 3, 1);
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(2, positions, sequences, "ok");
  kvrec r;
  header.cache_count = 2;
  header.hybrid = header.prompts = 1;
  header.caches[1].type = "recurrent";
  header.caches[1].checkpoint_every = 1;
  header.caches[1].checkpoints = 2;
  header.caches[1].pins = 1;
  kvrec_to(&r, out, &header);
  kvrec_find_prefix(&r, 0, ids, 2, 0);
  kvrec_start_forward(&r, &pass);
  kvrec_set_layer_type(&r, 0);
  kvrec_put(&r, 0, key, value);
  kvrec_get(&r, 0, KVREC_NONE, key, &value, &two);
  kvrec_set_layer_type(&r, 1);
  kvrec_put(&r, 0, key, value);
  kvrec_checkpoint(&r, 0);
  kvrec_remove(&r, 0, 0, KVREC_OPEN_END, NULL);
  kvrec_find_prefix(&r, 0, ids, 3, 2);
  pass = kvrec_batch(1, next, sequences, "ok");
  kvrec_start_forward(&r, &pass);
  kvrec_set_layer_type(&r, 0);
  kvrec_put(&r, 0, kvrec_dense(rows + 4, 2, 1, 1),
            kvrec_dense(values + 2, 1, 1, 1));
  kvrec_get(&r, 0, KVREC_NONE, kvrec_dense(rows, 2, 1, 3), &all, &three);
  kvrec_set_layer_type(&r, 1);
  kvrec_get(&r, 0, KVREC_NONE, kvrec_dense(rows + 2, 2, 1, 1), &state, &one);
  expect(kvrec_close(&r) == 0, r.error);
}

static void record_numbers(FILE* out, int count) {
  static float numbers[kMany];
  const int32_t zero[] = {0};
  kvrec_header header = sizes();
  kvrec_pass pass = kvrec_batch(1, zero, zero, "ok");
  kvrec r;
  fill(numbers, count);
  header.k_head_dim = count;
  kvrec_to(&r, out, &header);
  kvrec_start_forward(&r, &pass);
  kvrec_put(&r, 0, kvrec_dense(numbers, count, 1, 1),
            kvrec_dense(numbers, 1, 1, 1));
  expect(kvrec_close(&r) == 0, r.error);
}

/* The first list of data that was written has the same numbers, bit by bit. */
static void read_back(int count) {
  static float numbers[kMany];
  static char text[kMany * 20];
  char* at;
  FILE* file = tmpfile();
  int i;
  if (file == NULL) exit(2);
  record_numbers(file, count);
  rewind(file);
  expect(fread(text, 1, sizeof text - 1, file) < sizeof text - 1, "too long");
  fclose(file);
  fill(numbers, count);
  at = strstr(text, "\"data\":");
  expect(at != NULL, "no numbers were written");
  if (at == NULL) return;
  at += strlen("\"data\":");
  setlocale(LC_NUMERIC, "C"); /* For strtof. */
  for (i = 0; i < count; ++i) {
    const float number = strtof(at + 1, &at);
    expect(memcmp(&number, &numbers[i], sizeof number) == 0,
           "a number reads back as another one");
  }
  expect(*at == ']', "the numbers do not end where they should");
}

/* One call that cannot be recorded: `r` was opened before and is closed here.
 * The file still has only what it had `before`. */
static void refused(FILE* out, kvrec* r, long before, int result) {
  char first[sizeof r->error];
  FILE* const file = r->out;
  memcpy(first, r->error, sizeof first);
  fprintf(out, "%s\n", first);
  expect(result != 0 && first[0] != '\0', "a call is not refused");
  expect(kvrec_can_resume(r, 0, 0, 1) != 0, "a call is written after an error");
  expect(kvrec_close(r) != 0, "close does not return the error");
  expect(strcmp(first, r->error) == 0, "the first error does not stay");
  expect(ftell(file) == before, "something is written in spite of an error");
  fclose(file);
}

static long start(kvrec* r) {
  const kvrec_header header = sizes();
  FILE* const file = tmpfile();
  if (file == NULL) exit(2);
  expect(kvrec_to(r, file, &header) == 0, r->error);
  return ftell(file);
}

static void write_refusals(FILE* out) {
  const float nan = from_bits(0x7fc00000), infinite = from_bits(0x7f800000);
  const float good[] = {1, 2, 3, 4}, with_nan[] = {1, nan, 3, 4};
  const float with_inf[] = {1, 2, 3, infinite}, half[] = {0, 0.5f};
  const float plus[] = {infinite, 0}, not_a_number[] = {0, nan};
  const kvrec_tensor g = kvrec_dense(good, 2, 1, 2), v = g;
  const kvrec_tensor n = kvrec_dense(with_nan, 2, 1, 2);
  const kvrec_tensor i = kvrec_dense(with_inf, 2, 1, 2);
  const kvrec_tensor none = kvrec_dense(good, 2, 0, 2);
  const int64_t huge = (int64_t)1 << 40;
  const kvrec_tensor large = kvrec_dense(good, huge, huge, huge);
  const kvrec_tensor missing = kvrec_dense(NULL, 2, 1, 2);
  const kvrec_mask m = kvrec_mask_f32(good, 0, 2);
  const kvrec_mask between = kvrec_mask_f32(half, 2, 1);
  const kvrec_mask above = kvrec_mask_f32(plus, 2, 1);
  const kvrec_mask odd = kvrec_mask_f32(not_a_number, 1, 2);
  const kvrec_mask both = {good, (const unsigned char*)good, 2, 1};
  kvrec_header header = sizes();
  FILE* const unused = tmpfile();
  long at;
  kvrec r;
  at = start(&r), refused(out, &r, at, kvrec_put(&r, 0, n, g));
  at = start(&r), refused(out, &r, at, kvrec_put(&r, 0, g, i));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, i, &g, NULL));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, g, &n, NULL));
  at = start(&r), refused(out, &r, at, kvrec_put(&r, 0, none, g));
  at = start(&r), refused(out, &r, at, kvrec_put(&r, 0, g, large));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, g, &v, &m));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, g, &v, &between));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, g, &v, &above));
  at = start(&r), refused(out, &r, at, kvrec_get(&r, 0, 0, g, &v, &odd));
  at = start(&r), refused(out, &r, at, kvrec_attend(&r, 0, n, g));
  at = start(&r), refused(out, &r, at, kvrec_attend(&r, 0, g, i));
  /* The types of the other languages make these calls impossible. */
  at = start(&r);
  expect(kvrec_put(&r, 0, g, missing) != 0, "a tensor without data");
  fclose(r.out);
  at = start(&r);
  expect(kvrec_get(&r, 0, 0, g, &v, &both) != 0, "two masks");
  fclose(r.out);

  if (unused == NULL) exit(2);
  header.kv_heads = 0;
  expect(kvrec_to(&r, unused, &header) != 0, "no heads");
  fprintf(out, "%s\n", r.error);
  header = sizes();
  header.caches[0].rope_scale = (double)nan;
  expect(kvrec_to(&r, unused, &header) != 0, "a scale that is no number");
  fprintf(out, "%s\n", r.error);
  header = sizes();
  header.attend_sinks = with_nan;
  header.attend_sink_count = 2;
  expect(kvrec_to(&r, unused, &header) != 0, "a sink that is no number");
  fprintf(out, "%s\n", r.error);
  header = sizes();
  header.cache_count = KVREC_CACHES + 1;
  expect(kvrec_to(&r, unused, &header) != 0, "too many caches");
  expect(ftell(unused) == 0, "a header is written in spite of an error");
  fclose(unused);

  header = sizes();
  expect(kvrec_open(&r, "/no/such/folder/file", &header) != 0, "no folder");
  expect(strstr(r.error, "/no/such/folder/file") != NULL, "no path in error");
  expect(kvrec_can_resume(&r, 0, 0, 1) != 0, "a recorder that is not open");
  expect(kvrec_close(&r) != 0, "close does not return the error");
}

static FILE* create(const char* folder, const char* name) {
  char path[1000];
  FILE* out;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  out = fopen(path, "wb");
  if (out == NULL) exit(2);
  return out;
}

int main(int argc, char** argv) {
  FILE* out;
  if (argc < 2) return 2;
  setlocale(LC_ALL, "");
  if (argc > 2) {
    expect(localeconv()->decimal_point[0] == ',', "no decimal comma here");
  }
  out = create(argv[1], "all_calls.jsonl");
  record_encoder(out);
  record_causal(out);
  record_wrapper(out);
  record_attention(out, 0);
  record_drafts(out);
  record_hybrid(out);
  record_numbers(out, kFew);
  fclose(out);
  out = create(argv[1], "wrong_attention.jsonl");
  record_attention(out, 1);
  fclose(out);
  out = create(argv[1], "refused.txt");
  write_refusals(out);
  fclose(out);
  read_back(kMany);
  return wrong;
}
