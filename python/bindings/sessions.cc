// The sessions of a server (kvtwin/sessions.h), over a cache or a pool.

#include "kvtwin/sessions.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/index.h"
#include "core/names.h"
#include "tensor.h"

namespace kvtwin::python {
namespace {

// In the order of the enums.
constexpr std::array<std::string_view, 2> kSlotChoiceNames = {"own_prefix",
                                                              "any_prefix"};
constexpr std::array<const char*, 3> kEndingNames = {nullptr, "limit",
                                                     "context"};

// An input is a token, or (token, multimodal, same_batch).
std::vector<SessionInput> InputsOf(const nb::sequence& from) {
  std::vector<SessionInput> inputs;
  for (const nb::handle item : from) {
    SessionInput& input = inputs.emplace_back();
    if (nb::try_cast(item, input.token)) continue;
    nb::tuple parts;
    if (!nb::try_cast(item, parts) || parts.size() != 3 ||
        !nb::try_cast(parts[0], input.token) ||
        !nb::try_cast(parts[1], input.multimodal) ||
        !nb::try_cast(parts[2], input.same_batch)) {
      Wrong(fmt::format("input {}", inputs.size() - 1), item,
            "an int of 32 bits, or (token, multimodal, same_batch)");
    }
  }
  return inputs;
}

std::vector<std::int32_t> TokensOf(std::span<const SessionInput> inputs) {
  std::vector<std::int32_t> tokens;
  for (const SessionInput& input : inputs) tokens.push_back(input.token);
  return tokens;
}

// The sessions and what they are over.
struct Server {
  nb::object over;  // A kvtwin.Cache or a kvtwin.Pool.
  std::shared_ptr<PagedPool> pool;
  std::shared_ptr<Cache> cache;  // The cache of the kvtwin.Cache, or the slots.
  PoolSlots* slots = nullptr;    // The same over a pool; else null.
  std::unique_ptr<Sessions> sessions;
  SessionBatch batch;
  std::int64_t batches = 0;  // The number of the current batch.
};

class PyBatch {
 public:
  // `sessions` is the kvtwin.Sessions that has the server.
  PyBatch(nb::object sessions, const Server& server)
      : sessions_(std::move(sessions)),
        server_(&server),
        number_(server.batches) {}

  const nb::object& sessions() const { return sessions_; }

  const SessionBatch& batch() const {
    if (number_ != server_->batches) {
      Raise({StatusCode::kFailedPrecondition,
             "this batch ended with a later next_batch"});
    }
    return server_->batch;
  }
  std::size_t size() const { return batch().inputs.size(); }
  std::vector<std::int32_t> tokens() const { return TokensOf(batch().inputs); }
  std::vector<std::uint64_t> multimodal() const {
    std::vector<std::uint64_t> hashes;
    for (const SessionInput& input : batch().inputs) {
      hashes.push_back(input.multimodal);
    }
    return hashes;
  }
  std::vector<std::int32_t> positions() const {
    return {batch().positions.begin(), batch().positions.end()};
  }
  std::vector<int> sequences() const {
    return {batch().sequences.begin(), batch().sequences.end()};
  }
  std::vector<int> requests() const {
    return {batch().requests.begin(), batch().requests.end()};
  }
  std::vector<int> outputs() const {
    return {batch().outputs.begin(), batch().outputs.end()};
  }

 private:
  nb::object sessions_;
  const Server* server_;
  std::int64_t number_;
};

struct PySlot {
  int request = -1;
  std::vector<std::int32_t> record;
  int reusable = 0;
};

class PySessions {
 public:
  PySessions(const nb::object& over, int slots, int context, int batch,
             const std::string& choice, bool ahead, const std::string& twin)
      : server_(std::make_unique<Server>()) {
    const auto chosen = FromName<SlotChoice>(kSlotChoiceNames, choice);
    if (!chosen) {
      Raise({StatusCode::kInvalidArgument,
             fmt::format("choice is '{}', it must be one of {}", choice,
                         fmt::join(kSlotChoiceNames, ", "))});
    }
    const SessionsSpec spec = {.slots = slots,
                               .context = context,
                               .batch = batch,
                               .choice = *chosen,
                               .ahead = ahead};
    server_->over = over;
    server_->pool = PoolOf(over);
    if (server_->pool != nullptr) {
      auto made = Value(MakePoolSlots(*server_->pool, spec));
      server_->slots = made.get();
      server_->cache = std::move(made);
    } else {
      server_->cache = CacheOf(over);
    }
    if (server_->cache == nullptr) {
      throw nb::type_error("sessions are over a kvtwin.Cache or a kvtwin.Pool");
    }
    server_->sessions = Value(MakeSessions(*server_->cache, spec, twin));
  }

  int Submit(const nb::sequence& prompt, int keep, std::int64_t limit,
             bool reuse, bool shift, bool truncate) {
    return Value(
        server().sessions->Submit(InputsOf(prompt), {.keep = keep,
                                                     .limit = limit,
                                                     .reuse = reuse,
                                                     .shift = shift,
                                                     .truncate = truncate}));
  }
  // `self` is the object of these sessions.
  PyBatch NextBatch(nb::object self) {
    Server& server = this->server();
    ++server.batches;
    server.batch = {};
    const auto batch = server.sessions->NextBatch();
    if (server.slots == nullptr) EndViews(server.over);
    server.batch = Value(batch);
    return {std::move(self), server};
  }
  const char* Sampled(int request, std::int32_t token) {
    return At(kEndingNames, Value(server().sessions->Sampled(request, token)));
  }
  void Finish(int request, std::int64_t removed) {
    Check(server().sessions->Finish(request, removed));
  }
  void Adopt(int slot, const nb::sequence& record) {
    Check(server().sessions->Adopt(slot, InputsOf(record)));
  }
  void Put(int layer, nb::handle key, nb::handle value) {
    PoolSlots& slots = this->slots();
    const PagedSpec& spec = server_->pool->spec();
    const ArrayArgument k(key, "key", spec.dtype);
    const ArrayArgument v(value, "value", spec.v_dtype.value_or(spec.dtype));
    Check(slots.SetLayer(layer));
    Check(slots.Put(k.view(), v.view()));
  }
  const nb::object& over() const { return server_->over; }
  int Sequence(int slot) { return Value(slots().Sequence(slot)); }

  RequestInfo Request(int request) {
    return Value(server().sessions->Request(request));
  }
  std::vector<int> Requests() { return server().sessions->Requests(); }
  PySlot Slot(int slot) {
    const SlotInfo info = Value(server().sessions->Slot(slot));
    return {info.request, TokensOf(info.record), info.reusable};
  }
  SessionGauges Gauges() { return server().sessions->Gauges(); }
  void CheckAll() { Check(CheckSessions(*server().sessions, *server_->cache)); }
  std::string Dump() {
    return DumpSessions(*server().sessions, *server_->cache);
  }

 private:
  // Errors: raised, if the kvtwin.Cache has another cache now.
  Server& server() {
    if (server_->slots == nullptr && CacheOf(server_->over) != server_->cache) {
      Raise({StatusCode::kFailedPrecondition,
             "the cache was restored: make new sessions"});
    }
    return *server_;
  }
  PoolSlots& slots() {
    if (server().slots == nullptr) {
      Raise({StatusCode::kFailedPrecondition,
             "the sessions are over a cache: call its put and get"});
    }
    return *server_->slots;
  }

  std::unique_ptr<Server> server_;
};

// `self` is a kvtwin.Sessions.
PyBatch NextBatchOf(const nb::object& self) {
  return nb::cast<PySessions&>(self).NextBatch(self);
}

// Python's garbage collector calls these to find cycles.
PyObject* OverOf(PyObject* self) {
  return nb::inst_ptr<PySessions>(self)->over().ptr();
}
PyObject* SessionsOf(PyObject* self) {
  return nb::inst_ptr<PyBatch>(self)->sessions().ptr();
}
PyType_Slot sessions_type_slots[] = {TraverseSlot<OverOf>(), {0, nullptr}};
PyType_Slot batch_type_slots[] = {TraverseSlot<SessionsOf>(), {0, nullptr}};

// The gauges by their names.
constexpr auto kGauges =
    std::to_array<std::pair<const char*, std::int64_t SessionGauges::*>>({
        {"waiting", &SessionGauges::waiting},
        {"running", &SessionGauges::running},
        {"bytes", &SessionGauges::bytes},
        {"prompt_tokens", &SessionGauges::prompt_tokens},
        {"hit_tokens", &SessionGauges::hit_tokens},
        {"planned_tokens", &SessionGauges::planned_tokens},
        {"batches", &SessionGauges::batches},
        {"forks", &SessionGauges::forks},
        {"evicted_tokens", &SessionGauges::evicted_tokens},
        {"shifts", &SessionGauges::shifts},
        {"reprocessed", &SessionGauges::reprocessed},
        {"missed", &SessionGauges::missed},
        {"refusals", &SessionGauges::refusals},
    });

std::string GaugesText(const SessionGauges& gauges) {
  std::string text;
  for (const auto& [name, member] : kGauges) {
    text +=
        fmt::format("{}{}={}", text.empty() ? "" : ", ", name, gauges.*member);
  }
  return fmt::format("SessionGauges({})", text);
}

void BindNumbers(nb::module_& m) {
  nb::class_<RequestInfo>(m, "RequestInfo", "What is known of a request.")
      .def_ro("slot", &RequestInfo::slot, "-1: it waits.")
      .def_ro("source", &RequestInfo::source,
              "The slot whose prefix it took over; -1: none.")
      .def_ro("reused", &RequestInfo::reused,
              "Tokens of the prompt that were not computed again.")
      .def_ro("prompt", &RequestInfo::prompt, "Tokens of the prompt.")
      .def_ro("answered", &RequestInfo::answered, "Tokens sampled so far.")
      .def_ro("outputs", &RequestInfo::outputs,
              "Planned outputs that are not sampled yet.")
      .def_ro("missed", &RequestInfo::missed,
              "A longer prefix that could not be used, and why.");
  nb::class_<PySlot>(m, "SlotInfo", "What a slot holds.")
      .def_ro("request", &PySlot::request, "-1: free.")
      .def_ro("record", &PySlot::record,
              "The tokens by position; -1: not sampled yet.")
      .def_ro("reusable", &PySlot::reusable,
              "A prompt may reuse this many of them.");
  nb::class_<SessionGauges> gauges(
      m, "SessionGauges", "Totals, except for waiting, running and bytes.");
  for (const auto& [name, member] : kGauges) {
    gauges.def_ro(name, member);
  }
  gauges.def("__repr__", &GaugesText);
}

void BindBatch(nb::module_& m) {
  nb::class_<PyBatch>(m, "SessionBatch", nb::type_slots(batch_type_slots),
                      "The tokens of a pass, one entry of each list for each. "
                      "Until the next next_batch.")
      .def("__len__", &PyBatch::size)
      .def_prop_ro("tokens", &PyBatch::tokens, "-1: not sampled yet.")
      .def_prop_ro("multimodal", &PyBatch::multimodal,
                   "The hash of an image or sound; 0: text.")
      .def_prop_ro("positions", &PyBatch::positions,
                   "The position of each token.")
      .def_prop_ro("sequences", &PyBatch::sequences,
                   "The sequence of each token in the cache.")
      .def_prop_ro("requests", &PyBatch::requests, "The request of each token.")
      .def_prop_ro("outputs", &PyBatch::outputs,
                   "Indices of the tokens after which one is to be sampled.");
}

constexpr const char* kInputs =
    "collections.abc.Sequence[int | tuple[int, int, int]]";

}  // namespace

void BindSessions(nb::module_& m) {
  BindNumbers(m);
  BindBatch(m);
  static const std::string submit = fmt::format(
      "def submit(self, prompt: {}, keep: int = 0, limit: int = 0, reuse: bool "
      "= True, shift: bool = True, truncate: bool = False) -> int",
      kInputs);
  static const std::string adopt =
      fmt::format("def adopt(self, slot: int, record: {}) -> None", kInputs);
  nb::class_<PySessions>(m, "Sessions", nb::type_slots(sessions_type_slots),
                         "Requests that share a cache or a pool, and reuse "
                         "what it holds (docs/serving.md).\nOne thread at a "
                         "time.")
      .def(nb::init<const nb::object&, int, int, int, const std::string&, bool,
                    const std::string&>(),
           nb::arg("over"), nb::kw_only(), nb::arg("slots"), nb::arg("context"),
           nb::arg("batch"), nb::arg("choice") = "any_prefix",
           nb::arg("ahead") = false, nb::arg("twin") = "optimized",
           nb::sig("def __init__(self, over: Cache | Pool, *, slots: int, "
                   "context: int, batch: int, choice: "
                   "typing.Literal['any_prefix', 'own_prefix'] = 'any_prefix', "
                   "ahead: bool = False, twin: typing.Literal['optimized', "
                   "'reference'] = 'optimized') -> None"))
      .def("submit", &PySessions::Submit, nb::arg("prompt"),
           nb::arg("keep") = 0, nb::arg("limit") = 0, nb::arg("reuse") = true,
           nb::arg("shift") = true, nb::arg("truncate") = false,
           nb::sig(submit.c_str()),
           "Adds a request to the queue and returns its number. An input is a "
           "token, or (token,\nmultimodal, same_batch).")
      .def("next_batch", &NextBatchOf,
           "Plans a batch and begins a pass; empty if nothing is to be "
           "computed.")
      .def("sampled", &PySessions::Sampled, nb::arg("request"),
           nb::arg("token"),
           nb::sig("def sampled(self, request: int, token: int) -> "
                   "typing.Literal['limit', 'context'] | None"),
           "Feeds a token. Returns why the request has ended, if it has.")
      .def("finish", &PySessions::Finish, nb::arg("request"),
           nb::arg("removed") = 0,
           "Ends a request; the last `removed` sampled tokens leave its "
           "record.")
      .def(
          "cancel",
          [](PySessions& self, int request) { self.Finish(request, 0); },
          nb::arg("request"), "Ends a request that is given up.")
      .def("adopt", &PySessions::Adopt, nb::arg("slot"), nb::arg("record"),
           nb::sig(adopt.c_str()),
           "Says that the caller has put these inputs into the sequence of a "
           "free slot, as by\nload_sequence.")
      .def("put", &PySessions::Put, nb::arg("layer"), nb::arg("key").none(),
           nb::arg("value").none(),
           nb::sig("def put(self, layer: int, key: numpy.typing.ArrayLike, "
                   "value: numpy.typing.ArrayLike) -> None"),
           "Over a pool: appends the batch's rows, (tokens, kv_heads, "
           "head_dim).")
      .def("sequence", &PySessions::Sequence, nb::arg("slot"),
           "Over a pool: the pool's sequence of a slot.")
      .def("request", &PySessions::Request, nb::arg("request"),
           "A request that has not ended.")
      .def("requests", &PySessions::Requests,
           "The requests that have not ended.")
      .def("slot", &PySessions::Slot, nb::arg("slot"), "What a slot holds now.")
      .def("gauges", &PySessions::Gauges,
           "Totals, and counts of what is there now.")
      .def("check", &PySessions::CheckAll,
           "Raises RuntimeError if the cache does not hold what the records "
           "say.")
      .def("dump", &PySessions::Dump, "A text for people.");
}

}  // namespace kvtwin::python
