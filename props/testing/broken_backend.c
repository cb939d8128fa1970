/* props/testing/twin_backend.c with a bug that KVTWIN_BROKEN names, each of a
 * call that touches what it should not: laws and the explorer see it. */

#include <string.h>

#define kvtwin_get_backend_v1 RightBackend
#include "twin_backend.c"
#undef kvtwin_get_backend_v1

static int Is(const char* name) {
  const char* bug = getenv("KVTWIN_BROKEN");
  return bug != NULL && strcmp(bug, name) == 0;
}

/* "reserve": a pass that only reserves stores its tokens. */
static int BrokenStartForward(void* cache, const kvtwin_batch* batch,
                              int reserve) {
  return StartForward(cache, batch, Is("reserve") ? 0 : reserve);
}

/* "frame": the end of the next sequence goes, too. "crash": it dies of a range
 * in the middle. */
static int BrokenRemove(void* cache, int32_t sequence, int32_t begin,
                        int32_t end) {
  if (Is("frame") && end == KVTWIN_OPEN_END) {
    (void)Remove(cache, sequence + 1, begin, end);
  }
  if (Is("crash") && end != KVTWIN_OPEN_END) abort();
  return Remove(cache, sequence, begin, end);
}

/* "copy": the last token of the prefix is left out. */
static int BrokenCopyPrefix(void* cache, int32_t source, int32_t target,
                            int32_t length) {
  if (Is("copy") && length > 0) --length;
  return CopyPrefix(cache, source, target, length);
}

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) {
  static kvtwin_backend_v1 broken;
  broken = *RightBackend();
  broken.start_forward = BrokenStartForward;
  broken.remove = BrokenRemove;
  broken.copy_prefix = BrokenCopyPrefix;
  return &broken;
}
