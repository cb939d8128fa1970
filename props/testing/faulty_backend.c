/* docs/examples/c_cache.c with a fault: it does what KVTWIN_FAULT names once a
 * sequence has a third token. props/backend/backend_test.sh checks reports. */

#define _GNU_SOURCE

#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define kvtwin_get_backend_v1 HealthyBackend
#include "../docs/examples/c_cache.c"
#undef kvtwin_get_backend_v1

enum { kAnswers = 4 };

static const char* fault;
static char* volatile kept;

static int Is(const char* name) { return strcmp(fault, name) == 0; }

static void SpendMemory(size_t step, int touched) {
  for (size_t all = 0; all < (size_t)10 << 30; all += step) {
    kept = malloc(step);
    if (kept == NULL) return;
    for (size_t i = 0; touched && i < step; i += 4096) kept[i] = 1;
  }
}

static char* Map(size_t size, int shared) {
  int flags = MAP_ANONYMOUS | MAP_NORESERVE;
  flags |= shared ? MAP_SHARED : MAP_PRIVATE;
  void* data = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  return data == MAP_FAILED ? NULL : data;
}

/* Starts a process that does not end, once: in this process group, or as a
 * daemon, whose parent is gone. */
static void Fork(int daemon) {
  static int forked;
  if (forked++) return;
  pid_t child = fork();
  if (child > 0 && daemon) waitpid(child, NULL, 0);
  if (child != 0) return;
  if (daemon) {
    setsid();
    if (fork() != 0) _exit(0);
  }
  for (;;) pause();
}

/* Starts more processes than a backend may have; none of them ends. */
static void Crowd(void) {
  for (int i = 0; i < 300; ++i) {
    if (fork() == 0) {
      for (;;) pause();
    }
  }
}

/* Returns from the call in two processes, of which one waits. */
static void Stray(void) {
  pid_t child = fork();
  if (child > 0) waitpid(child, NULL, 0);
}

static void FallIll(Mine* c) {
  float* rows = c->k[c->sequence][0];
  if (Is("crash")) {
    kept = NULL;
    kept[8] = 1;
  }
  if (Is("abort")) {
    fprintf(stderr, "cell %d is lost\n", 7);
    abort();
  }
  if (Is("real-time")) raise(SIGRTMIN);
  if (Is("exit")) _exit(3);
  /* These write to the pipe on which kvtwin-host answers: no JSON, an answer
   * that lacks everything, and an answer that does not end. */
  if (Is("nonsense")) dprintf(kAnswers, "cell %d is lost\n", 7);
  if (Is("answers")) dprintf(kAnswers, "{\"digest\":-1}\n");
  while (Is("endless")) dprintf(kAnswers, "%01000000d", 7);
  if (Is("closes")) {
    close(kAnswers);
    for (;;) pause();
  }
  while (Is("hang")) pause(); /* Takes no processor from other tests. */
  while (Is("spins")) kept = NULL;
  if (Is("memory")) SpendMemory(1 << 20, 1);
  if (Is("address-space")) SpendMemory((size_t)1 << 30, 0);
  if (Is("map")) kept = Map((size_t)100 << 30, 0);
  if (Is("map-shared")) kept = Map((size_t)100 << 30, 1);
  if (Is("share")) { /* Written pages, but no private ones. */
    int file = memfd_create("faulty", 0);
    for (size_t i = 0; file >= 0 && i < 128; ++i) {
      size_t size = 1 << 20;
      kept = ftruncate(file, (off_t)(size * (i + 1))) != 0
                 ? MAP_FAILED
                 : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                        (off_t)(size * i));
      if (kept != MAP_FAILED) memset(kept, 1, size);
    }
  }
  if (Is("leak")) kept = malloc(1000);
  if (Is("leak-map")) kept = Map(1 << 20, 0);
  if (Is("forks")) Fork(0);
  if (Is("daemon")) Fork(1);
  if (Is("crowd")) Crowd();
  if (Is("strays")) Stray();
  while (Is("floods")) printf("%01000000d", 7);
  if (Is("prints")) printf("%0100000d", 7);
  if (Is("before")) ((volatile float*)rows)[-1] = 1;
  if (Is("freed") || Is("freed-large") || Is("twice")) {
    size_t size = Is("freed-large") ? 3 << 20 : 100;
    char* volatile gone = malloc(size); /* Else compilers would warn. */
    kept = gone;
    free(gone);
    if (Is("twice")) free((void*)kept);
    if (!Is("twice")) kept[size / 2] = 1;
  }
}

static int FaultyInit(const kvtwin_setup_v1* setup, void** cache) {
  if (Is("init")) return 99;
  return Is("nothing") ? KVTWIN_NOT_SUPPORTED : Init(setup, cache);
}

static int FaultyStartForward(void* cache, const kvtwin_batch* batch,
                              int reserve) {
  int code = StartForward(cache, batch, reserve);
  Mine* c = cache;
  if (Is("positions") && batch->tokens > 2) ++*(int32_t*)batch->positions;
  if (c->length[c->sequence] < 3) return code;
  FallIll(c);
  if (Is("full")) return KVTWIN_CACHE_FULL;
  return Is("status") ? 77 : Is("internal") ? KVTWIN_INTERNAL : code;
}

static int FaultyPut(void* cache, int32_t layer, const kvtwin_tensor* key,
                     const kvtwin_tensor* value) {
  Mine* c = cache;
  /* Writes to its K rows, reads past their end, or writes past that of V. */
  if (c->length[c->sequence] > 2) {
    volatile float* k = (float*)key->data;
    volatile char* v = (char*)value->data;
    int rest = c->tokens * c->heads * c->k_dim;
    for (int i = 0; Is("rotates") && i < rest; ++i) k[i] = -k[i];
    if (Is("past")) (void)k[rest + 3];
    if (Is("padding")) ++v[value->stride[3]];
  }
  int code = Put(cache, layer, key, value);
  float* values = c->v[c->sequence][layer];
  for (int i = 0; Is("rounds") && i < c->tokens * c->heads * c->v_dim; ++i) {
    float* one = values + c->first * c->heads * c->v_dim + i;
    *one = roundf(*one * 256) / 256; /* Its own number format. */
  }
  if (c->length[c->sequence] < 3 || !Is("behind")) return code;
  /* Writes one row past the end of the buffer. */
  volatile float* rows = c->v[c->sequence][layer];
  rows[c->capacity * c->heads * c->v_dim] = 1;
  return code;
}

static int FaultyGet(void* cache, int32_t layer, kvtwin_view* view) {
  int code = Get(cache, layer, view);
  Mine* c = cache;
  if (c->length[c->sequence] < 3) return code;
  if (Is("columns")) view->columns = 2000000000;
  if (Is("negative")) view->columns = -5;
  if (Is("shape")) view->key.shape[2] = (int64_t)1 << 40;
  if (Is("stride")) view->value.stride[2] = -4;
  if (Is("dtype")) view->key.dtype = (kvtwin_dtype)99;
  if (Is("null")) view->value.data = NULL;
  if (Is("wild")) view->value.data = (const void*)64;
  if (Is("short")) view->columns = 3000; /* More than is allocated. */
  if (Is("mask")) c->mask[0] = 0.5F;
  if (Is("unset")) { /* Elements that a row may see are not written. */
    float* buffer = malloc(3 << 20);
    float* mask = buffer + (1 << 19);
    for (int i = 0; i < c->tokens * view->columns; ++i) {
      if (c->mask[i] < 0) mask[i] = c->mask[i];
    }
    free(c->mask);
    c->mask = buffer;
    view->mask.data = mask;
  }
  return code;
}

static int FaultyDescribe(kvtwin_description_v1* out) {
  if (Is("describe")) abort();
  int code = Describe(out);
  out->name = "faulty";
  if (Is("level")) out->level = (kvtwin_level)9;
  return code;
}

static kvtwin_backend_v1 faulty = {
    .size = sizeof(kvtwin_backend_v1),
    .describe = FaultyDescribe,
    .init = FaultyInit,
    .close = Close,
    .start_forward = FaultyStartForward,
    .put = FaultyPut,
    .get = FaultyGet,
    .remove = Remove,
};

const kvtwin_backend_v1* kvtwin_get_backend_v1(void) {
  fault = getenv("KVTWIN_FAULT");
  if (fault == NULL) fault = "";
  return &faulty;
}
