/* props/testing/twin_backend.c as a cache that lacks features most caches have:
 * it is scattered, has no positions above 5, no window of 0, no copy of a
 * sequence to itself, no padding of cells, masks without padding rows, and a
 * refused remove leaves half of its work done. Any call that needs more ends
 * the process. KVTWIN_FEW names a limit that the description leaves out;
 * "calls": the cache has no remove, copy_prefix and can_resume; "resume":
 * can_resume is never true. */

#include <stdio.h>
#include <string.h>

#define kvtwin_get_backend_v1 WholeBackend
#include "twin_backend.c"
#undef kvtwin_get_backend_v1

enum { kLast = 5, kCaches = 64 };

/* The notes on each cache. */
static struct {
  void* cache;
  int32_t tokens; /* In its pass. */
  int32_t half;   /* The sequence to clear, + 1. */
} notes[kCaches];

static int NoteOf(const void* cache) {
  for (int i = 0; i < kCaches; ++i) {
    if (notes[i].cache == cache) return i;
  }
  fprintf(stderr, "too many caches\n");
  abort();
}

static int Says(const char* name) {
  const char* untold = getenv("KVTWIN_FEW");
  return untold == NULL || strcmp(untold, name) != 0;
}

static void Never(int asked, const char* what) {
  if (!asked) return;
  fprintf(stderr, "it was asked for %s\n", what);
  abort();
}

static void NotHalf(const void* cache) {
  Never(notes[NoteOf(cache)].half != 0, "more before a sequence was cleared");
}

static int FewDescribe(kvtwin_description_v1* out) {
  int code = Describe(out);
  const char* profile = getenv("KVTWIN_FEW_PROFILE");
  out->name = "few";
  if (!Says("calls")) {
    out->can &= ~(unsigned)(KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_REMOVE_MIDDLE |
                            KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE);
  }
  if (profile != NULL) out->profile = profile;
  out->max_padding = Says("padding") ? 1 : 0;
  out->max_mask_padding = Says("padding") ? INT32_MAX : 0;
  if (Says("placement")) out->placements = 1U << KVTWIN_SCATTER;
  if (Says("position")) out->max_position = kLast;
  out->cannot = (Says("window") ? KVTWIN_CANNOT_WINDOW_0 : 0U) |
                (Says("copy") ? KVTWIN_CANNOT_COPY_TO_ITSELF : 0U) |
                (Says("undo") ? KVTWIN_CANNOT_UNDO_REMOVE : 0U);
  return code;
}

static void CheckParams(const kvtwin_cache_params* cache) {
  Never(cache->placement != KVTWIN_SCATTER, "another placement");
  Never(cache->window == 0 || cache->memory == 0, "a window of 0");
  Never(cache->cache_padding > 1 && cache->v_layout != KVTWIN_V_TILED,
        "padding of cells");
}

static int FewInit(const kvtwin_setup_v1* setup, void** cache) {
  const kvtwin_cache_params* params = setup->cache;
  CheckParams(params);
  for (int32_t i = 0; i < params->cache_count; ++i) {
    CheckParams(&params->caches[i]);
  }
  /* No description mentions this limit. */
  if (params->max_batch == 3) return KVTWIN_NOT_SUPPORTED;
  int code = Init(setup, cache);
  if (code != KVTWIN_OK) return code;
  int note = NoteOf(NULL);
  notes[note].cache = *cache;
  notes[note].tokens = notes[note].half = 0;
  return code;
}

static void FewClose(void* cache) {
  notes[NoteOf(cache)].cache = NULL;
  Close(cache);
}

static int FewStartForward(void* cache, const kvtwin_batch* batch,
                           int reserve) {
  NotHalf(cache);
  for (int32_t i = 0; i < batch->tokens; ++i) {
    Never(batch->positions[i] > kLast, "a position beyond 5");
  }
  int code = StartForward(cache, batch, reserve);
  if (code == KVTWIN_OK) notes[NoteOf(cache)].tokens = batch->tokens;
  return code;
}

static int FewGet(void* cache, int32_t layer, kvtwin_view* view) {
  NotHalf(cache);
  int code = Get(cache, layer, view);
  int early = layer < 0 && notes[NoteOf(cache)].tokens == 0;
  if (early) return KVTWIN_FAILED_PRECONDITION; /* Without a pass (S47). */
  if (code == KVTWIN_OK && view->mask.data != NULL) {
    view->mask.shape[1] = notes[NoteOf(cache)].tokens;
  }
  return code;
}

static int FewRemove(void* cache, int32_t sequence, int32_t begin,
                     int32_t end) {
  int note = NoteOf(cache);
  int whole = begin == 0 && end == KVTWIN_OPEN_END;
  Never(notes[note].half != 0 && !(whole && notes[note].half == sequence + 1),
        "more before a sequence was cleared");
  Never(begin > kLast + 1 || (end > kLast + 1 && end != KVTWIN_OPEN_END),
        "a position beyond 5");
  int code = Remove(cache, sequence, begin, end);
  if (code == KVTWIN_OK) notes[note].half = 0;
  if (code != KVTWIN_NOT_SUPPORTED && code != KVTWIN_SHARED_CELLS) return code;
  (void)Remove(cache, sequence, begin, KVTWIN_OPEN_END);
  if (Says("undo")) notes[note].half = sequence + 1;
  return code;
}

static int FewCopyPrefix(void* cache, int32_t source, int32_t target,
                         int32_t length) {
  NotHalf(cache);
  Never(source == target, "a copy to itself");
  Never(length > kLast + 1, "a position beyond 5");
  return CopyPrefix(cache, source, target, length);
}

static int FewCanResume(void* cache, int32_t sequence, int32_t position,
                        int32_t* yes) {
  NotHalf(cache);
  Never(position > kLast, "a position beyond 5");
  int code = CanResume(cache, sequence, position, yes);
  if (!Says("resume")) *yes = 0;
  return code;
}

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) {
  static kvtwin_backend_v1 few;
  few = *WholeBackend();
  few.describe = FewDescribe;
  few.init = FewInit;
  few.close = FewClose;
  few.start_forward = FewStartForward;
  few.get = FewGet;
  few.remove = Says("calls") ? FewRemove : NULL;
  few.copy_prefix = Says("calls") ? FewCopyPrefix : NULL;
  few.can_resume = Says("calls") ? FewCanResume : NULL;
  return &few;
}
