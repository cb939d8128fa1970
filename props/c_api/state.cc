#include "core/state_checks.h"
#include "kvtwin/save.h"
#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

namespace {

// Hands a state out as a new handle.
Status GiveState(Result<CacheState> made, kvtwin_state** state) {
  if (!made.ok()) return made.status();
  *state = new kvtwin_state{std::move(*made)};
  return {};
}

}  // namespace

void kvtwin_state_destroy(kvtwin_state* state) { delete state; }

kvtwin_status kvtwin_cache_snapshot(kvtwin_cache* cache, kvtwin_state** state) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"state", state}});
    return status.ok() ? GiveState(cache->cache->Snapshot(), state) : status;
  });
}

kvtwin_status kvtwin_cache_snapshot_of(kvtwin_cache* cache, int32_t sequence,
                                       kvtwin_state** state) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"state", state}});
    if (!status.ok()) return status;
    return GiveState(cache->cache->SnapshotOf(sequence), state);
  });
}

kvtwin_status kvtwin_cache_restore(kvtwin_cache* cache,
                                   const kvtwin_state* state) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"state", state}});
    return status.ok() ? cache->cache->Restore(state->state) : status;
  });
}

kvtwin_status kvtwin_cache_add_sequence(kvtwin_cache* cache, int32_t sequence,
                                        const kvtwin_state* added) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"added", added}});
    if (!status.ok()) return status;
    return cache->cache->AddSequence(sequence, added->state);
  });
}

kvtwin_status kvtwin_state_to_bytes(const kvtwin_state* state,
                                    const char* model, void** bytes,
                                    size_t* count) {
  return Answer([&]() -> Status {
    Status status =
        NeedAll({{"state", state}, {"bytes", bytes}, {"count", count}});
    if (!status.ok()) return status;
    status = CheckModel(TextOf(model));
    if (!status.ok()) return status;
    const auto made = StateToBytes(state->state, TextOf(model));
    *bytes = CopyOut(made);
    *count = made.size();
    return {};
  });
}

kvtwin_status kvtwin_state_from_bytes(const void* bytes, size_t count,
                                      const char* model, kvtwin_state** state) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"state", state}});
    if (!status.ok()) return status;
    const auto list =
        ListFromC("bytes", static_cast<const std::byte*>(bytes), count);
    if (!list.ok()) return list.status();
    return GiveState(StateFromBytes(*list, TextOf(model)), state);
  });
}

kvtwin_status kvtwin_state_save(const kvtwin_state* state, const char* path,
                                const char* model) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"state", state}, {"path", path}});
    return status.ok() ? SaveState(state->state, path, TextOf(model)) : status;
  });
}

kvtwin_status kvtwin_state_load(const char* path, const char* model,
                                kvtwin_state** state) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"path", path}, {"state", state}});
    if (!status.ok()) return status;
    return GiveState(LoadState(path, TextOf(model)), state);
  });
}

kvtwin_status kvtwin_state_model(const char* path, char** model) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"path", path}, {"model", model}});
    if (!status.ok()) return status;
    const Result<std::string> made = ModelOf(path);
    if (!made.ok()) return made.status();
    *model = static_cast<char*>(CopyOut(std::as_bytes(std::span(*made))));
    return {};
  });
}

kvtwin_status kvtwin_state_sequence(const kvtwin_state* state, int32_t sequence,
                                    kvtwin_state** one) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"state", state}, {"one", one}});
    if (status.ok()) status = NotNegative("sequence", sequence);
    if (!status.ok()) return status;
    return GiveState(SequenceOf(state->state, sequence), one);
  });
}

kvtwin_status kvtwin_state_with_sequence(const kvtwin_state* state,
                                         int32_t sequence,
                                         const kvtwin_state* added,
                                         const int32_t* cells, size_t count,
                                         kvtwin_state** all) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"state", state}, {"added", added}, {"all", all}});
    if (!status.ok()) return status;
    const auto list = ListFromC("cells", cells, count);
    if (!list.ok()) return list.status();
    return GiveState(WithSequence(state->state, sequence, added->state, *list),
                     all);
  });
}
