#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

namespace {

// Calls `call` with the cache, if there is one.
template <class Call>
kvtwin_status OnCache(kvtwin_cache* cache, const Call& call) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}});
    return status.ok() ? call(*cache->cache) : status;
  });
}

// Does the same with `ask`, whose answer goes to *yes.
template <class Ask>
kvtwin_status AskCache(kvtwin_cache* cache, std::int32_t* yes, const Ask& ask) {
  return OnCache(cache, [&](Cache& called) -> Status {
    Status status = NeedAll({{"yes", yes}});
    if (!status.ok()) return status;
    const Result<bool> answer = ask(called);
    if (answer.ok()) *yes = *answer ? 1 : 0;
    return answer.status();
  });
}

}  // namespace

const char* kvtwin_twin_name(size_t index) {
  // The names are literals, so they end with a zero.
  return index < TwinNames().size() ? TwinNames()[index].data() : nullptr;
}

kvtwin_status kvtwin_cache_default_params(kvtwin_cache_params* params,
                                          size_t size) {
  return Answer([&] {
    return WriteDefaults("params", DefaultCacheParams(), params, size);
  });
}

kvtwin_status kvtwin_cache_create(const kvtwin_cache_params* params,
                                  const char* twin, kvtwin_cache** cache) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}});
    if (!status.ok()) return status;
    const Result<CacheParts> parts = CachePartsFromC(params);
    if (!parts.ok()) return parts.status();
    auto made = MakeCache(parts->spec, TextOf(twin, "optimized"));
    if (!made.ok()) return made.status();
    const InitArgs& init = parts->init;
    status = (*made)->SetConfig(parts->config);
    if (status.ok()) {
      status = (*made)->Init(init);
    }
    if (!status.ok()) return status;
    auto handle = std::make_unique<kvtwin_cache>();
    handle->owned = std::move(*made);
    handle->cache = handle->owned.get();
    *cache = handle.release();
    return {};
  });
}

void kvtwin_cache_destroy(kvtwin_cache* cache) { delete cache; }

kvtwin_status kvtwin_cache_start_forward(kvtwin_cache* cache,
                                         const kvtwin_batch* batch,
                                         int reserve) {
  return OnCache(cache, [&](Cache& called) -> Status {
    const Result<Batch> read = BatchFromC(batch);
    if (!read.ok()) return read.status();
    return called.StartForward(*read, reserve != 0);
  });
}

kvtwin_status kvtwin_cache_set_causal(kvtwin_cache* cache,
                                      const int32_t* except, size_t count) {
  return OnCache(cache, [&](Cache& called) -> Status {
    const auto list = ListFromC("except", except, count);
    return list.ok() ? called.SetCausal(*list) : list.status();
  });
}

kvtwin_status kvtwin_cache_set_layer_type(kvtwin_cache* cache, int32_t type) {
  return OnCache(cache,
                 [&](Cache& called) { return called.SetLayerType(type); });
}

kvtwin_status kvtwin_cache_put(kvtwin_cache* cache, int32_t layer,
                               const kvtwin_tensor* key,
                               const kvtwin_tensor* value) {
  return OnCache(cache, [&](Cache& called) -> Status {
    const Result<TensorView> k = TensorFromC("key", key);
    if (!k.ok()) return k.status();
    const Result<TensorView> v = TensorFromC("value", value);
    if (!v.ok()) return v.status();
    Status status = called.SetLayer(layer);
    return status.ok() ? called.Put(*k, *v) : status;
  });
}

kvtwin_status kvtwin_cache_get(kvtwin_cache* cache, int32_t layer,
                               kvtwin_view* view) {
  return OnCache(cache, [&](Cache& called) -> Status {
    const auto size = SizeOfStruct("view", view, sizeof(kvtwin_view));
    if (!size.ok()) return size.status();
    Status status = called.SetLayer(layer);
    if (!status.ok()) return status;
    const Result<KvView> got = called.Get();
    if (!got.ok()) return got.status();
    kvtwin_view answer{};
    answer.key = CTensor(got->key);
    answer.value = CTensor(got->value);
    answer.mask = CTensor(got->mask);
    answer.first_cell = got->first_cell;
    const bool encoder = got->mask.data == nullptr;
    answer.columns = static_cast<std::int32_t>(encoder ? got->key.shape[2]
                                                       : got->mask.shape[0]);
    WriteStruct(answer, view);
    return {};
  });
}

kvtwin_status kvtwin_cache_copy_prefix(kvtwin_cache* cache, int32_t source,
                                       int32_t target, int32_t length) {
  return OnCache(cache, [&](Cache& called) {
    return called.CopyPrefix(source, target, length);
  });
}

kvtwin_status kvtwin_cache_can_resume(kvtwin_cache* cache, int32_t sequence,
                                      int32_t position, int32_t* yes) {
  return AskCache(cache, yes, [&](Cache& called) {
    return called.CanResume(sequence, position);
  });
}

kvtwin_status kvtwin_cache_resume_before(kvtwin_cache* cache, int32_t sequence,
                                         int32_t position, int32_t* at) {
  return OnCache(cache, [&](Cache& called) {
    Status status = NeedAll({{"at", at}});
    if (!status.ok()) return status;
    const Result<std::int32_t> found = called.ResumeBefore(sequence, position);
    if (found.ok()) *at = *found;
    return found.status();
  });
}

kvtwin_status kvtwin_cache_checkpoint(kvtwin_cache* cache, int32_t sequence) {
  return OnCache(cache,
                 [&](Cache& called) { return called.Checkpoint(sequence); });
}

kvtwin_status kvtwin_cache_remove(kvtwin_cache* cache, int32_t sequence,
                                  int32_t begin, int32_t end) {
  return OnCache(cache, [&](Cache& called) {
    return called.Remove(sequence, begin, end);
  });
}

kvtwin_status kvtwin_cache_commit(kvtwin_cache* cache, int32_t sequence,
                                  const int32_t* path, size_t count) {
  return OnCache(cache, [&](Cache& called) -> Status {
    const auto list = ListFromC("path", path, count);
    return list.ok() ? called.Commit(sequence, *list) : list.status();
  });
}

kvtwin_status kvtwin_cache_encoder_cached(kvtwin_cache* cache, int32_t* yes) {
  return AskCache(cache, yes,
                  [](Cache& called) { return called.EncoderCached(); });
}

kvtwin_status kvtwin_cache_underlying(kvtwin_cache* cache,
                                      kvtwin_cache** active) {
  return OnCache(cache, [&](Cache& called) -> Status {
    Status status = NeedAll({{"active", active}});
    if (!status.ok()) return status;
    Cache* const underlying = called.UnderlyingCache();
    if (underlying == &called) {
      *active = cache;
      return {};
    }
    auto& handle = cache->inner[underlying];
    if (handle == nullptr) {
      handle = std::make_unique<kvtwin_cache>();
      handle->cache = underlying;
    }
    *active = handle.get();
    return {};
  });
}

kvtwin_status kvtwin_cache_cell_count(kvtwin_cache* cache, int32_t* cells) {
  return OnCache(cache, [&](Cache& called) -> Status {
    Status status = NeedAll({{"cells", cells}});
    if (status.ok()) *cells = called.CellCount();
    return status;
  });
}

kvtwin_status kvtwin_cache_cells(kvtwin_cache* cache, kvtwin_cell* cells,
                                 size_t room, size_t* count) {
  return OnCache(cache, [&](Cache& called) -> Status {
    Status status = CheckList("cells", cells, room, count);
    if (!status.ok()) return status;
    called.ListCells(cache->cells);
    *count = cache->cells.size();
    for (std::size_t i = 0; i < std::min(room, *count); ++i) {
      const CellEntry& entry = cache->cells[i];
      cells[i] = {entry.cell, entry.position, entry.sequence};
    }
    return {};
  });
}

kvtwin_status kvtwin_cache_batch_cells(kvtwin_cache* cache, int32_t* cells,
                                       size_t room, size_t* count) {
  return OnCache(cache, [&](Cache& called) -> Status {
    Status status = CheckList("cells", cells, room, count);
    if (status.ok()) WriteList(called.BatchCells(), cells, room, count);
    return status;
  });
}
