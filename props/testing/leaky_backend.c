/* props/testing/twin_backend.c with two faults: a remove of a range leaves its
 * last token, and a single sequence cannot be restored. It does not have the
 * shift function tag_add, which the explorer prefers. */

#define kvtwin_get_backend_v1 WholeBackend
#include "twin_backend.c"
#undef kvtwin_get_backend_v1

static int LeakyDescribe(kvtwin_description_v1* out) {
  int code = Describe(out);
  out->name = "leaky";
  out->shifts = 1U << KVTWIN_SHIFT_NONE | 1U << KVTWIN_SHIFT_IDENTITY |
                1U << KVTWIN_SHIFT_ADD;
  return code;
}

static int LeakyRemove(void* cache, int32_t sequence, int32_t begin,
                       int32_t end) {
  int range = end != KVTWIN_OPEN_END && end > begin + 1;
  return Remove(cache, sequence, begin, range ? end - 1 : end);
}

static int LeakyRestore(void* cache, int32_t sequence, const void* bytes,
                        size_t count) {
  if (sequence >= 0) return KVTWIN_NOT_SUPPORTED;
  return Restore(cache, sequence, bytes, count);
}

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) {
  static kvtwin_backend_v1 leaky;
  leaky = *WholeBackend();
  leaky.describe = LeakyDescribe;
  leaky.remove = LeakyRemove;
  leaky.restore = LeakyRestore;
  return &leaky;
}
