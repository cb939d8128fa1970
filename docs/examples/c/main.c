/* Runs one forward pass of two tokens through a cache of kvtwin, from C;
 * records it, as you would do for your own cache, and checks the recording. */

#include <kvtwin/kvtwin.h>
#include <stdio.h>

static int failed(const char* call, kvtwin_status status) {
  fprintf(stderr, "%s: %s: %s\n", call, kvtwin_status_name(status),
          kvtwin_last_error());
  return 1;
}

int main(int argc, char** argv) {
  const char* path = argc > 1 ? argv[1] : "pass.jsonl";
  const int32_t positions[] = {0, 1};
  const int32_t sequences[] = {0, 0};
  const float rows[] = {1, 2, 3, 4}; /* Two heads of one element. */
  const kvtwin_tensor tokens = {rows, KVTWIN_F32, {1, 2, 2, 1}, {0}};
  const kvtwin_batch batch = {sizeof(batch), positions, sequences, 2,
                              NULL,          0,         NULL};
  kvtwin_view view = {.size = sizeof(view)};
  kvtwin_verdict verdict = {.size = sizeof(verdict)};
  kvtwin_cache_params params;
  kvtwin_recorder_params recording;
  kvtwin_cache* cache = NULL;
  kvtwin_recorder* recorder = NULL;
  kvtwin_status status;

  kvtwin_cache_default_params(&params, sizeof(params));
  params.capacity = 16;
  params.max_batch = 4;
  status = kvtwin_cache_create(&params, NULL, &cache);
  if (status != KVTWIN_OK) return failed("kvtwin_cache_create", status);

  kvtwin_recorder_default_params(&recording, sizeof(recording));
  recording.cache = &params;
  recording.own_placement = 0;
  recording.kv_heads = 2;
  status = kvtwin_recorder_create(&recording, path, &recorder);
  if (status != KVTWIN_OK) return failed("kvtwin_recorder_create", status);

  status = kvtwin_cache_start_forward(cache, &batch, 0);
  kvtwin_record_start_forward(recorder, &batch, 0, status, NULL);
  if (status == KVTWIN_OK) {
    status = kvtwin_cache_put(cache, 0, &tokens, &tokens);
    kvtwin_record_put(recorder, 0, &tokens, &tokens);
  }
  if (status == KVTWIN_OK) status = kvtwin_cache_get(cache, 0, &view);
  if (status != KVTWIN_OK) return failed("the pass", status);
  kvtwin_record_get(recorder, 0, &view);
  printf("kvtwin %s: %d tokens, K is [%d, %d, %d]\n", kvtwin_version(),
         (int)view.columns, (int)view.key.shape[0], (int)view.key.shape[1],
         (int)view.key.shape[2]);
  kvtwin_cache_destroy(cache);

  status = kvtwin_recorder_close(recorder);
  if (status == KVTWIN_OK) status = kvtwin_check_file(path, NULL, &verdict);
  if (status != KVTWIN_OK) return failed("the check", status);
  if (verdict.outcome != KVTWIN_ACCEPTED) {
    printf("%s, line %ld: %s\n", path, (long)verdict.line, verdict.reason);
    return 1;
  }
  printf("%s: accepted\n", path);
  return 0;
}
