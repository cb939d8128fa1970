#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "core/assert.h"
#include "core/dense_tensor.h"
#include "core/mask_elements.h"
#include "core/state_checks.h"
#include "core/trace/trace.h"
#include "props/c_api/c_api.h"
#include "props/oracle/judge.h"

using namespace kvtwin;
using namespace kvtwin::props;

struct kvtwin_recorder {
  TraceHeader header;
  std::ofstream out;
  bool reserving = false;  // In the current pass.
  bool attends = false;    // kvtwin_recorder_params::attends.
  bool prompts = false;    // kvtwin_recorder_params::prompts.
};

namespace {

constexpr int kRemoveAnswersMax = KVTWIN_SHARED_CELLS;

Status NoDrafts() {
  return Untimely("the recorder was made with params.drafts = 0");
}

TraceOp Call(TraceOpKind kind) {
  TraceOp op;
  op.kind = kind;
  return op;
}

Status WriteOp(kvtwin_recorder& recorder, const TraceOp& op) {
  Status status = WriteTraceOp(op, recorder.out);
  if (!status.ok()) return status;
  recorder.out.flush();
  if (recorder.out) return {};
  return Untimely("the recording could not be written: {}",
                  std::strerror(errno));
}

// Writes the line that `make` fills in, or returns its error.
template <class Make>
kvtwin_status Record(kvtwin_recorder* recorder, TraceOpKind kind,
                     const Make& make) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"recorder", recorder}});
    if (!status.ok()) return status;
    TraceOp op = Call(kind);
    status = make(op);
    return status.ok() ? WriteOp(*recorder, op) : status;
  });
}

// Errors: an answer other than 0 to `last`.
Result<StatusCode> AnswerFromC(const kvtwin_status& answer, int last) {
  const int raw = RawEnum(answer);
  if (raw >= KVTWIN_OK && raw <= last) return StatusFromC(raw);
  return Invalid(
      "answer is {} ({}), which no recording has: it must be 0 to {}, and "
      "misuse is left out",
      raw, kvtwin_status_name(raw), last);
}

// Errors: more than `most` elements, which no line of a recording holds.
// Requires: every extent is at least 1.
Status CheckElements(std::string_view name, const Shape& shape,
                     std::size_t most) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) {
    KVTWIN_DCHECK(extent >= 1);
    if (__builtin_mul_overflow(elements, extent, &elements) ||
        std::cmp_greater(elements, most)) {
      return Invalid(
          "{} has shape {}, a line of a recording holds at most {} elements",
          name, ShapeText(shape), most);
    }
  }
  return {};
}

// Returns rows of any shape as f32.
Result<DenseTensor> RowsFromC(std::string_view name,
                              const kvtwin_tensor* tensor) {
  const Result<TensorView> view = TensorFromC(name, tensor);
  if (!view.ok()) return view.status();
  if (view->data == nullptr) return Invalid("{} has no data", name);
  Status status = CheckShape(name, view->shape, view->dtype);
  if (status.ok()) status = CheckElements(name, view->shape, kJsonElementsMax);
  if (!status.ok()) return status;
  return CopyOf(*view, DType::kF32);
}

Status CheckMask(const TensorView& mask) {
  if (!IsMaskDType(mask.dtype)) {
    return Invalid("view.mask.dtype is {}, no dtype of masks",
                   DTypeName(mask.dtype));
  }
  if (mask.shape[0] >= 1 && mask.shape[1] >= 1 && mask.shape[2] == 1 &&
      mask.shape[3] == 1) {
    return CheckElements("view.mask", mask.shape, kTraceLineBytesMax);
  }
  return Invalid("view.mask has shape {}, it must be [columns, rows]",
                 ShapeText(mask.shape));
}

Result<DenseTensor> MaskFromC(const TensorView& mask) {
  if (Status status = CheckMask(mask); !status.ok()) return status;
  for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
    for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
      if (MaskElementAt(mask, column, row) != MaskElement::kNeither) continue;
      return Invalid("view.mask has neither 0 nor -inf in column {} of row {}",
                     column, row);
    }
  }
  DenseTensor copy = HidingMask(mask.dtype, mask.shape[0], mask.shape[1]);
  WriteDense(mask, mask.dtype, copy.bytes.data());
  return copy;
}

// Returns a line with the mask's shape, if there is a mask.
Result<std::optional<TraceOp>> ReservedOp(const TensorView& mask, TraceOp op) {
  if (mask.data == nullptr) return std::optional<TraceOp>();
  op.kind = TraceOpKind::kReservedMask;
  op.shape = mask.shape;
  if (Status status = CheckMask(mask); !status.ok()) return status;
  return std::optional(std::move(op));
}

// Returns the line for a get, if the recording has one.
Result<std::optional<TraceOp>> GetOp(const kvtwin_recorder& recorder, int layer,
                                     const kvtwin_view* from) {
  kvtwin_view view{};
  Status status = ReadStruct("view", from, view);
  if (!status.ok()) return status;
  const Result<TensorView> mask = TensorFromC("view.mask", &view.mask);
  if (!mask.ok()) return mask.status();
  TraceOp op = Call(TraceOpKind::kGet);
  op.layer = layer;
  const bool own = recorder.header.visibility_only;
  if (view.first_cell >= 0 && !own) op.first_cell = view.first_cell;
  if (recorder.reserving) return ReservedOp(*mask, std::move(op));
  Result<DenseTensor> key = RowsFromC("view.key", &view.key);
  if (!key.ok()) return key.status();
  op.key = std::move(*key);
  if (view.value.data != nullptr) {
    Result<DenseTensor> value = RowsFromC("view.value", &view.value);
    if (!value.ok()) return value.status();
    op.value = std::move(*value);
  }
  if (mask->data != nullptr) {
    Result<DenseTensor> copy = MaskFromC(*mask);
    if (!copy.ok()) return copy.status();
    op.mask = std::move(*copy);
  }
  return std::optional(std::move(op));
}

// Fills in how the cache attends, if it does.
Status FillAttend(const kvtwin_recorder_params& params, TraceHeader& header) {
  if (params.attends == 0) return {};
  const int dtype = RawEnum(params.attend_dtype);
  if (dtype != KVTWIN_F32 && dtype != KVTWIN_F16 && dtype != KVTWIN_BF16) {
    return Invalid("attend_dtype is {}, it must be f32, f16 or bf16", dtype);
  }
  for (const auto& [name, number] :
       {std::pair("attend_tolerance", params.attend_tolerance),
        {"soft_cap", double{params.soft_cap}}}) {
    if (!(number >= 0) || !std::isfinite(number)) {
      return Invalid("{} is {}, it must be finite and not negative", name,
                     number);
    }
  }
  const auto sinks = ListFromC("sinks", params.sinks, params.sink_count);
  if (!sinks.ok()) return sinks.status();
  for (const float sink : *sinks) {
    if (!(std::abs(sink) <= kLogitMost)) {
      return Invalid("sinks has {}, which no recording can hold", sink);
    }
  }
  header.version = std::max(header.version, 2);
  header.attend_dtype = static_cast<DType>(dtype);
  header.attend_tolerance = params.attend_tolerance;
  header.attend_soft_cap = params.soft_cap;
  header.attend_sinks.assign(sinks->begin(), sinks->end());
  return {};
}

bool HasPins(const CacheSpec& spec) {
  return spec.pins > 0 || std::ranges::any_of(spec.caches, HasPins);
}

Status FillHeader(const kvtwin_recorder_params& params, TraceHeader& header) {
  Result<CacheParts> parts = CachePartsFromC(params.cache);
  if (!parts.ok()) return parts.status();
  // The factory checks whether there is such a cache.
  if (const auto made = MakeCache(parts->spec); !made.ok()) {
    return made.status();
  }
  const InitArgs& init = parts->init;
  for (const auto& [name, number] :
       {std::pair("max_sequences", init.max_sequences),
        {"capacity", init.capacity},
        {"max_batch", init.max_batch},
        {"layers", params.layers},
        {"kv_heads", params.kv_heads},
        {"k_head_dim", params.k_head_dim},
        {"v_head_dim", params.v_head_dim}}) {
    if (Status status = AtLeastOne(name, number); !status.ok()) return status;
  }
  if (Status status = CheckRowDType("dtype", init.dtype); !status.ok()) {
    return status;
  }
  header.producer = TextOf(params.producer);
  header.visibility_only = params.own_placement != 0;
  header.spec = std::move(parts->spec);
  header.config = parts->config;
  header.init = init;
  header.layers = params.layers;
  if (params.drafts != 0) header.version = 3;
  if (params.prompts != 0 || HasPins(header.spec)) header.version = 4;
  header.rows = {params.k_head_dim, params.kv_heads, params.v_head_dim};
  return FillAttend(params, header);
}

kvtwin_recorder_params DefaultRecorderParams() {
  kvtwin_recorder_params params{};
  params.size = sizeof(params);
  params.own_placement = 1;
  params.layers = 1;
  params.kv_heads = 1;
  params.k_head_dim = 1;
  params.v_head_dim = 1;
  return params;
}

}  // namespace

kvtwin_status kvtwin_recorder_default_params(kvtwin_recorder_params* params,
                                             size_t size) {
  return Answer([&] {
    return WriteDefaults("params", DefaultRecorderParams(), params, size);
  });
}

kvtwin_status kvtwin_recorder_create(const kvtwin_recorder_params* params,
                                     const char* path,
                                     kvtwin_recorder** recorder) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"path", path}, {"recorder", recorder}});
    kvtwin_recorder_params read = DefaultRecorderParams();
    if (status.ok()) status = ReadStruct("params", params, read);
    if (status.ok()) status = NeedAll({{"params.cache", read.cache}});
    auto made = std::make_unique<kvtwin_recorder>();
    made->attends = read.attends != 0;
    made->prompts = read.prompts != 0;
    if (status.ok()) status = FillHeader(read, made->header);
    // The header comes first: if it is invalid, no file is made.
    std::ostringstream line;
    if (status.ok()) status = WriteTraceHeader(made->header, line);
    if (!status.ok()) return status;
    std::istringstream header(line.str());
    const Judgement found = Judge(header, {"reference"});
    if (found.verdict() != Verdict::kAccept)
      return Invalid("{}", found.reason());
    made->out.open(path, std::ios::binary);
    made->out << line.str() << std::flush;
    if (!made->out) {
      return Untimely("'{}' cannot be written: {}", path, std::strerror(errno));
    }
    *recorder = made.release();
    return {};
  });
}

kvtwin_status kvtwin_recorder_close(kvtwin_recorder* recorder) {
  return Answer([&]() -> Status {
    const std::unique_ptr<kvtwin_recorder> owned(recorder);
    if (owned == nullptr) return {};
    owned->out.close();
    if (owned->out) return {};
    return Untimely("not all of the recording could be written");
  });
}

kvtwin_status kvtwin_record_start_forward(kvtwin_recorder* recorder,
                                          const kvtwin_batch* batch,
                                          int reserve, kvtwin_status answer,
                                          const int32_t* cells) {
  return Record(recorder, TraceOpKind::kStartForward, [&](TraceOp& op) {
    const Result<Batch> read = BatchFromC(batch);
    if (!read.ok()) return read.status();
    const auto result = AnswerFromC(answer, KVTWIN_CACHE_FULL);
    if (!result.ok()) return result.status();
    if (!read->parents.empty() && recorder->header.version < 3)
      return NoDrafts();
    op.parents.assign(read->parents.begin(), read->parents.end());
    op.positions.assign(read->positions.begin(), read->positions.end());
    op.sequences.assign(read->sequences.begin(), read->sequences.end());
    op.indices.assign(read->multimodal.begin(), read->multimodal.end());
    op.reserve = reserve != 0;
    op.result = *result;
    const bool placed =
        *result == StatusCode::kOk && !recorder->header.visibility_only;
    if (cells != nullptr && placed) {
      op.cells.emplace(cells, cells + read->positions.size());
    }
    recorder->reserving = op.reserve;
    return Status();
  });
}

kvtwin_status kvtwin_record_set_causal(kvtwin_recorder* recorder,
                                       const int32_t* except, size_t count) {
  return Record(recorder, TraceOpKind::kSetCausal, [&](TraceOp& op) {
    const auto list = ListFromC("except", except, count);
    if (list.ok()) op.indices.assign(list->begin(), list->end());
    return list.status();
  });
}

kvtwin_status kvtwin_record_set_layer_type(kvtwin_recorder* recorder,
                                           int32_t type) {
  return Record(recorder, TraceOpKind::kSetLayerType, [&](TraceOp& op) {
    op.type = type;
    return Status();
  });
}

kvtwin_status kvtwin_record_put(kvtwin_recorder* recorder, int32_t layer,
                                const kvtwin_tensor* key,
                                const kvtwin_tensor* value) {
  return Record(recorder, TraceOpKind::kPut, [&](TraceOp& op) -> Status {
    op.layer = layer;
    Result<DenseTensor> k = RowsFromC("key", key);
    if (!k.ok()) return k.status();
    Result<DenseTensor> v = RowsFromC("value", value);
    if (!v.ok()) return v.status();
    op.key = std::move(*k);
    op.value = std::move(*v);
    return {};
  });
}

kvtwin_status kvtwin_record_get(kvtwin_recorder* recorder, int32_t layer,
                                const kvtwin_view* view) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"recorder", recorder}});
    if (!status.ok()) return status;
    const auto op = GetOp(*recorder, layer, view);
    if (!op.ok() || !op->has_value()) return op.status();
    return WriteOp(*recorder, **op);
  });
}

kvtwin_status kvtwin_record_attend(kvtwin_recorder* recorder, int32_t layer,
                                   const kvtwin_tensor* query,
                                   const kvtwin_tensor* out) {
  return Record(recorder, TraceOpKind::kAttend, [&](TraceOp& op) -> Status {
    if (!recorder->attends) {
      return Untimely("the recorder was made with params.attends = 0");
    }
    Result<DenseTensor> queries = RowsFromC("query", query);
    if (!queries.ok()) return queries.status();
    Result<DenseTensor> outputs = RowsFromC("out", out);
    if (!outputs.ok()) return outputs.status();
    if (queries->shape[1] != outputs->shape[1] ||
        queries->shape[2] != outputs->shape[2]) {
      return Invalid("out has shape {}, query has {}: heads and rows differ",
                     ShapeText(outputs->shape), ShapeText(queries->shape));
    }
    op.layer = layer;
    op.key = std::move(*queries);
    op.value = std::move(*outputs);
    return {};
  });
}

kvtwin_status kvtwin_record_remove(kvtwin_recorder* recorder, int32_t sequence,
                                   int32_t begin, int32_t end,
                                   kvtwin_status answer) {
  return Record(recorder, TraceOpKind::kRemove, [&](TraceOp& op) -> Status {
    const auto result = AnswerFromC(answer, kRemoveAnswersMax);
    if (!result.ok()) return result.status();
    if (*result == StatusCode::kCacheFull) {
      return Invalid("answer is cache_full, which no remove answers");
    }
    op.seq = sequence;
    op.begin = begin;
    op.end = end;
    op.result = *result;
    return {};
  });
}

kvtwin_status kvtwin_record_copy_prefix(kvtwin_recorder* recorder,
                                        int32_t source, int32_t target,
                                        int32_t length) {
  return Record(recorder, TraceOpKind::kCopyPrefix, [&](TraceOp& op) {
    op.src = source;
    op.dst = target;
    op.len = length;
    return Status();
  });
}

kvtwin_status kvtwin_record_can_resume(kvtwin_recorder* recorder,
                                       int32_t sequence, int32_t position,
                                       int32_t yes) {
  return Record(recorder, TraceOpKind::kCanResume, [&](TraceOp& op) {
    op.seq = sequence;
    op.pos = position;
    op.answer = yes != 0;
    return Status();
  });
}

kvtwin_status kvtwin_record_commit(kvtwin_recorder* recorder, int32_t sequence,
                                   const int32_t* path, size_t count) {
  return Record(recorder, TraceOpKind::kCommit, [&](TraceOp& op) -> Status {
    if (recorder->header.version < 3) return NoDrafts();
    const auto list = ListFromC("path", path, count);
    if (!list.ok()) return list.status();
    op.seq = sequence;
    op.indices.assign(list->begin(), list->end());
    return {};
  });
}

kvtwin_status kvtwin_record_find_prefix(kvtwin_recorder* recorder,
                                        int32_t sequence, const int32_t* tokens,
                                        size_t count, int32_t length) {
  return Record(recorder, TraceOpKind::kFindPrefix, [&](TraceOp& op) -> Status {
    if (!recorder->prompts || !recorder->header.visibility_only) {
      return Untimely(
          "the recorder was made without params.prompts, or without "
          "own_placement");
    }
    const auto list = ListFromC("tokens", tokens, count);
    if (!list.ok()) return list.status();
    if (length < 0 || length >= std::ssize(*list)) {
      return Invalid("length is {}, the prompt has {} tokens", length,
                     list->size());
    }
    op.seq = sequence;
    op.indices.assign(list->begin(), list->end());
    op.len = length;
    return {};
  });
}

kvtwin_status kvtwin_record_checkpoint(kvtwin_recorder* recorder,
                                       int32_t sequence) {
  return Record(recorder, TraceOpKind::kCheckpoint, [&](TraceOp& op) -> Status {
    if (!HasPins(recorder->header.spec)) {
      return Untimely("params.cache has no room for pins");
    }
    op.seq = sequence;
    return {};
  });
}

kvtwin_status kvtwin_record_encoder_cached(kvtwin_recorder* recorder,
                                           int32_t yes) {
  return Record(recorder, TraceOpKind::kEncoderCached, [&](TraceOp& op) {
    op.answer = yes != 0;
    return Status();
  });
}
