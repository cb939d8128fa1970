// The sessions of <kvtwin/kvtwin.h>.

#include "kvtwin/sessions.h"

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

struct kvtwin_sessions {
  Cache* cache = nullptr;
  std::unique_ptr<Sessions> sessions;
  std::vector<kvtwin_session_input> inputs;  // The inputs of the last batch.
};

namespace {

// Calls `call` with the sessions, if there are some.
template <class Call>
kvtwin_status OnSessions(kvtwin_sessions* sessions, const Call& call) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"sessions", sessions}});
    return status.ok() ? call(*sessions->sessions) : status;
  });
}

kvtwin_sessions_params DefaultSessionsParams() {
  kvtwin_sessions_params params{};
  params.size = sizeof(params);
  params.slots = params.context = params.batch = 1;
  params.choice = KVTWIN_ANY_PREFIX;
  return params;
}

kvtwin_request_options DefaultRequestOptions() {
  kvtwin_request_options options{};
  options.size = sizeof(options);
  options.reuse = options.shift = 1;
  return options;
}

Result<SessionsSpec> SessionsSpecFromC(const kvtwin_sessions_params* params) {
  kvtwin_sessions_params read = DefaultSessionsParams();
  Status status = NeedAll({{"params", params}});
  if (status.ok()) status = ReadStruct("params", params, read);
  if (!status.ok()) return status;
  // An unknown choice is refused by MakeSessions.
  return SessionsSpec{.slots = read.slots,
                      .context = read.context,
                      .batch = read.batch,
                      .choice = static_cast<SlotChoice>(RawEnum(read.choice)),
                      .ahead = read.ahead != 0};
}

Result<RequestOptions> RequestOptionsFromC(
    const kvtwin_request_options* options) {
  kvtwin_request_options read = DefaultRequestOptions();
  if (options != nullptr) {
    Status status = ReadStruct("options", options, read);
    if (!status.ok()) return status;
  }
  return RequestOptions{.keep = read.keep,
                        .limit = read.limit,
                        .reuse = read.reuse != 0,
                        .shift = read.shift != 0,
                        .truncate = read.truncate != 0};
}

Result<std::vector<SessionInput>> InputsFromC(std::string_view name,
                                              const kvtwin_session_input* from,
                                              std::size_t count) {
  const auto list = ListFromC(name, from, count);
  if (!list.ok()) return list.status();
  std::vector<SessionInput> inputs;
  for (const kvtwin_session_input& input : *list) {
    inputs.push_back({input.token, input.multimodal, input.same_batch});
  }
  return inputs;
}

kvtwin_session_batch SessionBatchOf(kvtwin_sessions& sessions,
                                    const SessionBatch& batch) {
  sessions.inputs.clear();
  for (const SessionInput& input : batch.inputs) {
    sessions.inputs.push_back(
        {input.token, input.same_batch, input.multimodal});
  }
  kvtwin_session_batch made{};
  made.inputs = sessions.inputs.data();
  made.positions = batch.positions.data();
  made.sequences = batch.sequences.data();
  made.requests = batch.requests.data();
  made.count = batch.inputs.size();
  made.outputs = batch.outputs.data();
  made.output_count = batch.outputs.size();
  return made;
}

}  // namespace

kvtwin_status kvtwin_sessions_default_params(kvtwin_sessions_params* params,
                                             size_t size) {
  return Answer([&] {
    return WriteDefaults("params", DefaultSessionsParams(), params, size);
  });
}

kvtwin_status kvtwin_pool_cache_create(kvtwin_pool* pool,
                                       const kvtwin_sessions_params* params,
                                       kvtwin_cache** cache) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"pool", pool}, {"cache", cache}});
    if (!status.ok()) return status;
    const Result<SessionsSpec> spec = SessionsSpecFromC(params);
    if (!spec.ok()) return spec.status();
    auto made = MakePoolSlots(*pool->pool, *spec);
    if (!made.ok()) return made.status();
    auto handle = std::make_unique<kvtwin_cache>();
    handle->owned = std::move(*made);
    handle->cache = handle->owned.get();
    *cache = handle.release();
    return {};
  });
}

kvtwin_status kvtwin_pool_cache_sequence(kvtwin_cache* cache, int32_t slot,
                                         int32_t* sequence) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"sequence", sequence}});
    if (!status.ok()) return status;
    const auto* slots = dynamic_cast<const PoolSlots*>(cache->cache);
    if (slots == nullptr) return Invalid("the cache is not over a pool");
    const Result<int> found = slots->Sequence(slot);
    if (found.ok()) *sequence = *found;
    return found.status();
  });
}

kvtwin_status kvtwin_sessions_create(kvtwin_cache* cache,
                                     const kvtwin_sessions_params* params,
                                     const char* twin,
                                     kvtwin_sessions** sessions) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"cache", cache}, {"sessions", sessions}});
    if (!status.ok()) return status;
    const Result<SessionsSpec> spec = SessionsSpecFromC(params);
    if (!spec.ok()) return spec.status();
    auto made = MakeSessions(*cache->cache, *spec, TextOf(twin, "optimized"));
    if (made.ok()) {
      *sessions = new kvtwin_sessions{cache->cache, std::move(*made), {}};
    }
    return made.status();
  });
}

void kvtwin_sessions_destroy(kvtwin_sessions* sessions) { delete sessions; }

kvtwin_status kvtwin_sessions_default_options(kvtwin_request_options* options,
                                              size_t size) {
  return Answer([&] {
    return WriteDefaults("options", DefaultRequestOptions(), options, size);
  });
}

kvtwin_status kvtwin_sessions_submit(kvtwin_sessions* sessions,
                                     const kvtwin_session_input* prompt,
                                     size_t count,
                                     const kvtwin_request_options* options,
                                     int32_t* request) {
  return OnSessions(sessions, [&](Sessions& target) -> Status {
    Status status = NeedAll({{"request", request}});
    if (!status.ok()) return status;
    const auto inputs = InputsFromC("prompt", prompt, count);
    if (!inputs.ok()) return inputs.status();
    const Result<RequestOptions> read = RequestOptionsFromC(options);
    if (!read.ok()) return read.status();
    const Result<int> made = target.Submit(*inputs, *read);
    if (made.ok()) *request = *made;
    return made.status();
  });
}

kvtwin_status kvtwin_sessions_next_batch(kvtwin_sessions* sessions,
                                         kvtwin_session_batch* batch) {
  return OnSessions(sessions, [&](Sessions& target) -> Status {
    const auto size = SizeOfStruct("batch", batch, sizeof(*batch));
    if (!size.ok()) return size.status();
    const Result<SessionBatch> planned = target.NextBatch();
    if (planned.ok()) WriteStruct(SessionBatchOf(*sessions, *planned), batch);
    return planned.status();
  });
}

kvtwin_status kvtwin_sessions_sampled(kvtwin_sessions* sessions,
                                      int32_t request, int32_t token,
                                      kvtwin_ending* ending) {
  return OnSessions(sessions, [&](Sessions& target) -> Status {
    Status status = NeedAll({{"ending", ending}});
    if (!status.ok()) return status;
    const Result<Ending> how = target.Sampled(request, token);
    if (how.ok()) *ending = static_cast<kvtwin_ending>(*how);
    return how.status();
  });
}

kvtwin_status kvtwin_sessions_finish(kvtwin_sessions* sessions, int32_t request,
                                     int64_t removed) {
  return OnSessions(sessions, [&](Sessions& target) {
    return target.Finish(request, removed);
  });
}

kvtwin_status kvtwin_sessions_adopt(kvtwin_sessions* sessions, int32_t slot,
                                    const kvtwin_session_input* record,
                                    size_t count) {
  return OnSessions(sessions, [&](Sessions& target) -> Status {
    const auto inputs = InputsFromC("record", record, count);
    return inputs.ok() ? target.Adopt(slot, *inputs) : inputs.status();
  });
}

kvtwin_status kvtwin_sessions_gauges(kvtwin_sessions* sessions,
                                     kvtwin_session_gauges* gauges) {
  return OnSessions(sessions, [&](const Sessions& target) -> Status {
    const auto size = SizeOfStruct("gauges", gauges, sizeof(*gauges));
    if (!size.ok()) return size.status();
    const SessionGauges now = target.Gauges();
    WriteStruct(
        kvtwin_session_gauges{
            0, now.waiting, now.running, now.prompt_tokens, now.hit_tokens,
            now.planned_tokens, now.batches, now.forks, now.evicted_tokens,
            now.shifts, now.reprocessed, now.missed, now.refusals, now.bytes},
        gauges);
    return {};
  });
}

kvtwin_status kvtwin_sessions_check(kvtwin_sessions* sessions) {
  return OnSessions(sessions, [&](const Sessions& target) {
    return CheckSessions(target, *sessions->cache);
  });
}

kvtwin_status kvtwin_sessions_dump(kvtwin_sessions* sessions, char** text) {
  return OnSessions(sessions, [&](const Sessions& target) -> Status {
    Status status = NeedAll({{"text", text}});
    if (!status.ok()) return status;
    const std::string dump = DumpSessions(target, *sessions->cache);
    *text = static_cast<char*>(
        CopyOut(std::as_bytes(std::span(dump.c_str(), dump.size() + 1))));
    return {};
  });
}
