/* Puts the K and V of three tokens into a cache and computes their attention,
 * from C. */

#include <kvtwin/kvtwin.h>
#include <stdio.h>

enum { kRows = 3, kHeads = 2, kHeadDim = 2 };

static int failed(const char* call, kvtwin_status status) {
  fprintf(stderr, "%s: %s: %s\n", call, kvtwin_status_name(status),
          kvtwin_last_error());
  return 1;
}

int main(void) {
  const int32_t positions[kRows] = {0, 1, 2};
  const int32_t sequences[kRows] = {0, 0, 0};
  const kvtwin_batch batch = {sizeof(batch), positions, sequences, kRows,
                              NULL,          0,         NULL};
  /* Two query heads share one KV head. */
  const float k[kRows][kHeadDim] = {{1, 0}, {0, 1}, {1, 1}};
  const float v[kRows][kHeadDim] = {{1, 2}, {3, 4}, {5, 6}};
  const float q[kRows][kHeads][kHeadDim] = {
      {{1, 0}, {0, 1}}, {{1, 0}, {0, 1}}, {{1, 0}, {0, 1}}};
  const kvtwin_tensor key = {k, KVTWIN_F32, {kHeadDim, 1, kRows, 1}, {0}};
  const kvtwin_tensor value = {v, KVTWIN_F32, {kHeadDim, 1, kRows, 1}, {0}};
  const kvtwin_tensor query = {
      q, KVTWIN_F32, {kHeadDim, kHeads, kRows, 1}, {0}};
  float result[kRows][kHeads][kHeadDim];
  const kvtwin_attention_out out = {.size = sizeof(out),
                                    .out = &result[0][0][0],
                                    .out_count = kRows * kHeads * kHeadDim};
  kvtwin_view view = {.size = sizeof(view)};
  kvtwin_cache_params params;
  kvtwin_attention_options options;
  kvtwin_cache* cache = NULL;
  kvtwin_attention* attention = NULL;
  kvtwin_status status;
  int row;

  kvtwin_cache_default_params(&params, sizeof(params));
  params.capacity = 16;
  params.max_batch = 4;
  status = kvtwin_cache_create(&params, NULL, &cache);
  if (status != KVTWIN_OK) return failed("kvtwin_cache_create", status);
  status = kvtwin_attention_create(NULL, &attention);
  if (status != KVTWIN_OK) return failed("kvtwin_attention_create", status);

  status = kvtwin_cache_start_forward(cache, &batch, 0);
  if (status == KVTWIN_OK) status = kvtwin_cache_put(cache, 0, &key, &value);
  if (status == KVTWIN_OK) status = kvtwin_cache_get(cache, 0, &view);
  if (status != KVTWIN_OK) return failed("the pass", status);

  /* A pass is planned once; each of its layers then has an attend. */
  status = kvtwin_attention_plan(attention, &view.mask, kRows, 0);
  if (status != KVTWIN_OK) return failed("kvtwin_attention_plan", status);
  kvtwin_attention_default_options(&options, sizeof(options));
  options.scale = 0.7071068f; /* 1 / sqrt(kHeadDim) */
  status = kvtwin_attention_attend(attention, &query, &view, KVTWIN_V_PLAIN,
                                   &options, &out);
  if (status != KVTWIN_OK) return failed("kvtwin_attention_attend", status);
  for (row = 0; row < kRows; ++row) {
    printf("token %d: [%.4f %.4f] [%.4f %.4f]\n", row, result[row][0][0],
           result[row][0][1], result[row][1][0], result[row][1][1]);
  }
  kvtwin_attention_destroy(attention);
  kvtwin_cache_destroy(cache);
  return 0;
}
