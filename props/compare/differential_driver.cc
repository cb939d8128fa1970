#include "props/compare/differential_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/index.h"
#include "kvtwin/save.h"
#include "props/base/runs_of.h"
#include "props/history/misuse.h"

namespace kvtwin::props {

bool DifferentialDriver::SetUp() {
  Result<std::unique_ptr<Cache>> reference = make_reference_(setup_.spec);
  Begin("making the cache");
  Result<std::unique_ptr<Cache>> subject = subject_.Make(setup_);
  if (subject.status().code() == StatusCode::kNotSupported) {
    ++result_.operations;  // The subject does not have this kind.
    return false;
  }
  if (!reference.ok() || !subject.ok()) {
    CheckCodes({}, "making the cache", reference.status().code(),
               reference.status().code(), subject.status().code());
    return false;
  }
  reference_ = std::move(*reference);
  tested_ = std::move(*subject);
  CheckOutsideOfLife("misuse: before Init");
  const InitArgs& init = setup_.init;
  const CacheConfig& config = setup_.config;
  // The ledger does not check arguments, so the refusals of sizes are repeated
  // here.
  const auto expected = [](std::initializer_list<int> sizes) {
    return std::min(sizes) < 1 ? StatusCode::kInvalidArgument : StatusCode::kOk;
  };
  const StatusCode configured =
      expected({config.cache_padding, config.mask_batch_padding});
  Begin("SetConfig");
  CheckCodes({}, "SetConfig", configured, reference_->SetConfig(config).code(),
             tested_->SetConfig(config).code());
  StatusCode by_ledger =
      expected({init.max_sequences, init.capacity, init.max_batch});
  if (configured != StatusCode::kOk) return false;
  if (by_ledger == StatusCode::kOk) {
    by_ledger = ledger_.Init(config, init).code();
  }
  const auto init_of = [&](Cache& cache) { return cache.Init(init).code(); };
  Begin("Init");
  const StatusCode by_subject = init_of(*tested_);
  if (!subject_.is_twin() && by_subject == StatusCode::kNotSupported) {
    ++result_.operations;  // The subject does not have such a cache.
    return false;
  }
  CheckCodes({}, "Init", by_ledger, init_of(*reference_), by_subject);
  if (by_ledger != StatusCode::kOk) return false;
  Check(reference_->CellCount() == tested_->CellCount(), "subject: cell count",
        [&] {
          return fmt::format("{} cells by the reference, {} by {}",
                             reference_->CellCount(), tested_->CellCount(),
                             subject_.name);
        });
  const std::int64_t cells = ledger_.active().cells();
  Check(cells == reference_->CellCount(), "reference: cell count", [&] {
    return fmt::format("{} cells by the ledger, {} by the reference", cells,
                       reference_->CellCount());
  });
  return true;
}

void DifferentialDriver::TearDown() {
  Begin("Close");
  reference_->Close();
  tested_->Close();
  CheckOutsideOfLife("misuse: after Close");
}

void DifferentialDriver::CheckOutsideOfLife(CheckName check) {
  Begin("");
  if (!subject_.tried_outside_of_life) return;
  Begin(check.name());
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    if (const auto wrong = MisuseOutsideOfLife(*cache)) {
      Check(false, check, *wrong);
    }
  }
  Begin("");
}

void DifferentialDriver::SetType(int type) {
  ledger_.SetLayerType(type);
  if (!wrapper_ || active_type_ == type) return;
  active_type_ = type;
  const auto call = [&] { return fmt::format("SetLayerType({})", type); };
  Begin(call);
  if (!reference_->SetLayerType(type).ok() ||
      !tested_->SetLayerType(type).ok()) {
    throw WrongResult(OpKind::kType, call() + " is refused");
  }
  Begin("");
}

void DifferentialDriver::GoTo(int layer) {
  SetType(TypeOf(setup_, layer));
  layer_ = layer;
  if (observer_ != nullptr) observer_->Select(/*type=*/false);
  const auto call = [&] { return fmt::format("SetLayer({})", layer); };
  Begin(call);
  if (!reference_->SetLayer(layer).ok() || !tested_->SetLayer(layer).ok()) {
    throw WrongResult(OpKind::kLayer, call() + " is refused");
  }
  Begin("");
}

void DifferentialDriver::SelectLayer(int layer) {
  const auto call = [&] { return fmt::format("SetLayer({})", layer); };
  Begin(call);
  CheckCodes(OpKind::kLayer, call, StatusCode::kOk,
             reference_->SetLayer(layer).code(),
             tested_->SetLayer(layer).code());
  layer_ = layer;
  if (observer_ != nullptr) observer_->Select(/*type=*/false);
}

void DifferentialDriver::SelectType(int type) {
  const auto call = [&] { return fmt::format("SetLayerType({})", type); };
  Begin(call);
  CheckCodes(OpKind::kType, call,
             wrapper_ ? StatusCode::kOk : StatusCode::kNotSupported,
             reference_->SetLayerType(type).code(),
             tested_->SetLayerType(type).code());
  if (!wrapper_) return;
  ledger_.SetLayerType(type);
  active_type_ = type;
  if (observer_ != nullptr) observer_->Select(/*type=*/true);
}

// A batch with ordinary tokens of a sequence that has drafts: nothing changes
// (D4).
void DifferentialDriver::RefusePlain(const Tokens& tokens, bool reserve) {
  const auto call = [&] { return StartForwardText(tokens, reserve); };
  Begin(call);
  const Batch batch = tokens.batch();
  CheckCodes(OpKind::kPut, call, ledger_.StartForward(batch, reserve).code(),
             reference_->StartForward(batch, reserve).code(),
             tested_->StartForward(batch, reserve).code());
  CheckAllCells();
}

bool DifferentialDriver::StartForward(Tokens tokens, bool reserve) {
  if (reference::NeedsCommit(ledger_.parts(), tokens.batch())) {
    RefusePlain(tokens, reserve);
    return false;
  }
  const Pass before = std::exchange(pass_, Pass());
  pass_.tokens = std::move(tokens);
  const Batch batch = pass_.tokens.batch();
  ObserveBefore();
  const auto call = [&] { return StartForwardText(pass_.tokens, reserve); };
  Begin(call, /*begins_pass=*/true);
  const StatusCode by_ledger = ledger_.StartForward(batch, reserve).code();
  const StatusCode reference = reference_->StartForward(batch, reserve).code();
  const Status answer = tested_->StartForward(batch, reserve);
  const StatusCode subject = answer.code();
  // The step, which CheckCodes draws, shows the first cache again.
  pass_.active = subject == StatusCode::kOk;
  if (pass_.active) active_type_ = 0;
  CheckCodes(OpKind::kPut, call, by_ledger, reference, subject, {},
             subject_.is_twin() ? "" : answer.message());
  if (subject == StatusCode::kInvalidArgument) {  // Nothing changed (S5).
    pass_ = before;
    CheckAllCells();
    return false;
  }
  if (observer_ != nullptr) {
    observer_->StartForward(batch, reserve, by_ledger, ledger_);
  }
  Hash(pass_.tokens.positions.data(),
       pass_.tokens.positions.size() * sizeof(std::int32_t));
  Hash(pass_.tokens.sequences.data(),
       pass_.tokens.sequences.size() * sizeof(int));
  if (!pass_.tokens.parents.empty()) {
    Hash(pass_.tokens.parents.data(),
         pass_.tokens.parents.size() * sizeof(int));
  }
  if (pass_.active) pass_.fresh.set();
  pass_.reserve = reserve;
  if (setup_.legal) {
    Check(pass_.active || reserve, "reference: a legal client is refused",
          [&] { return call() + " is refused"; });
  }
  CheckBatchCells();
  return pass_.active;
}

void DifferentialDriver::CheckBatchCells() {
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    CheckCells();
    const auto expected = reference_->BatchCells();
    const auto actual = tested_->BatchCells();
    Check(std::equal(expected.begin(), expected.end(), actual.begin(),
                     actual.end()),
          "subject: batch cells", [&] {
            return fmt::format(
                "the batch is in cells [{}] by the reference, [{}] by {}",
                fmt::join(expected, " "), fmt::join(actual, " "),
                subject_.name);
          });
    Hash(actual.data(), actual.size() * sizeof(int));
  }
  SetType(kept_type);
}

// Chooses new rows for the next Put, different from all rows before.
void DifferentialDriver::NewRows() {
  pass_.first_serial = serial_;
  serial_ += std::ssize(pass_.tokens.positions);
}

void DifferentialDriver::PutRows() {
  const int layer = layer_;
  const bool as_stored = (pass_.first_serial + layer) % 2 == 1;
  const DType k_dtype = as_stored ? setup_.init.dtype : DType::kF32;
  const DType v_dtype =
      as_stored ? setup_.config.v_dtype.value_or(k_dtype) : DType::kF32;
  const RowDims& rows = setup_.rows;
  const auto count = std::ssize(pass_.tokens.positions);
  const std::int64_t first = pass_.first_serial;
  // An encoder takes any shape: here, also another shape of equal size (S37).
  const auto shape = [&](int head_dim, DType stored) -> Shape {
    const bool turned = IsEncoder(active_type_) && first / 2 % 2 == 1;
    if (turned && !IsBlockDType(stored)) {
      return {rows.kv_heads, head_dim, count, 1};
    }
    return {head_dim, rows.kv_heads, count, 1};
  };
  const TensorView key =
      keys_.Fill(shape(rows.k_head_dim, setup_.init.dtype), k_dtype,
                 {.role = RowRole::kKey,
                  .layer = layer,
                  .first = first,
                  .extremes = !Shifts(setup_.spec)},
                 setup_.strided);
  const TensorView value =
      values_.Fill(shape(rows.v_head_dim, setup_.v_dtype()), v_dtype,
                   {.role = RowRole::kValue,
                    .layer = layer,
                    .first = first,
                    .extremes = true},
                   setup_.strided);
  const auto call = [&] { return PutText(layer, first, count); };
  Begin(call);
  const StatusCode reference = reference_->Put(key, value).code();
  const StatusCode subject = tested_->Put(key, value).code();
  CheckCodes(OpKind::kReput, call, StatusCode::kOk, reference, subject);
  // Only rows that the twins accept: the ledger does not check them.
  ledger_.active().Put(layer, key, value);
  put_.insert(place());
  if (observer_ != nullptr) {
    observer_->Put(AsSize(active_type_), layer, k_dtype);
  }
}

void DifferentialDriver::PutAll(const Op& op) {
  NewRows();
  const int layers = LayersOf(op, setup_);
  for (int layer = 0; layer < layers; ++layer) {
    GoTo(layer);
    if (op.keep_rows) continue;
    // Without new images, a model encodes nothing.
    if (IsEncoder(active_type_) && op.images.empty()) continue;
    PutRows();
  }
}

void DifferentialDriver::GetAll() {
  for (int layer = 0; layer < setup_.layers; ++layer) {
    if (!put_.contains({TypeOf(setup_, layer), layer})) continue;
    GoTo(layer);
    CheckViews();
    if (IsEncoder(active_type_)) CheckEncoderCached();
  }
}

void DifferentialDriver::Store() {
  NewRows();
  PutRows();
}

void DifferentialDriver::Read() {
  if (put_.contains(place())) return CheckViews();
  if (!subject_.abilities.Can(KVTWIN_CAN_REFUSE_MISUSE)) return;
  const auto call = [&] { return fmt::format("Get(layer {})", layer_); };
  Begin(call);
  CheckCodes(OpKind::kGet, call, StatusCode::kFailedPrecondition,
             reference_->Get().status().code(), tested_->Get().status().code());
}

std::vector<int> DifferentialDriver::IndicesOf(
    const std::vector<int>& except) const {
  std::vector<int> indices;
  indices.reserve(except.size());
  for (const int index : except) {
    indices.push_back(index % Size(pass_.tokens.positions));
  }
  return indices;
}

void DifferentialDriver::ExceptActive(const std::vector<int>& indices) {
  const auto call = [&] {
    return fmt::format("SetCausal([{}])", RunsOf(indices));
  };
  Begin(call);
  const StatusCode by_ledger = ledger_.active().SetCausal(indices).code();
  CheckCodes(OpKind::kCausal, call, by_ledger,
             reference_->SetCausal(indices).code(),
             tested_->SetCausal(indices).code());
  if (KindOf(active_type_) == Kind::kRecurrent) return;  // No new mask.
  At(pass_.fresh, active_type_) = !pass_.copied;
}

void DifferentialDriver::Except(const std::vector<int>& except) {
  const std::vector<int> indices = IndicesOf(except);
  ExceptActive(indices);
  if (observer_ != nullptr) observer_->SetCausal(indices);
}

void DifferentialDriver::SetCausal(const std::vector<int>& except) {
  const std::vector<int> indices = IndicesOf(except);
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    ExceptActive(indices);
  }
  SetType(kept_type);
  if (observer_ != nullptr) observer_->SetCausal(indices);
}

StatusCode DifferentialDriver::Remove(int seq, std::int32_t begin,
                                      std::int32_t end) {
  ObserveBefore();
  const auto call = [&] {
    return fmt::format("Remove({}, {}, {})", seq, begin,
                       end == kOpenEnd ? "open" : fmt::to_string(end));
  };
  Begin(call);
  const StatusCode by_ledger = ledger_.Remove(seq, begin, end).code();
  const StatusCode reference = reference_->Remove(seq, begin, end).code();
  const StatusCode subject = tested_->Remove(seq, begin, end).code();
  CheckCodes(OpKind::kDrop, call, by_ledger, reference, subject);
  if (observer_ != nullptr) {
    observer_->Remove(seq, begin, end, by_ledger, ledger_);
  }
  pass_.fresh.reset();
  const bool in_part = subject != StatusCode::kOk &&
                       subject_.abilities.Cannot(KVTWIN_CANNOT_UNDO_REMOVE);
  // A sequence removed in part is compared after the client has cleared it.
  if (!in_part) CheckAllCells();
  return subject;
}

void DifferentialDriver::CopyPrefix(int src, int dst, std::int32_t len) {
  ObserveBefore();
  const auto call = [&] {
    return fmt::format("CopyPrefix({}, {}, {})", src, dst, len);
  };
  Begin(call);
  const StatusCode by_ledger = ledger_.CopyPrefix(src, dst, len).code();
  CheckCodes(OpKind::kCopy, call, by_ledger,
             reference_->CopyPrefix(src, dst, len).code(),
             tested_->CopyPrefix(src, dst, len).code());
  if (observer_ != nullptr) {
    observer_->CopyPrefix(src, dst, len, by_ledger, ledger_);
  }
  pass_.fresh.reset();
  pass_.copied = true;
  CheckAllCells();
}

bool DifferentialDriver::CanResume(int seq, std::int32_t pos) {
  const auto call = [&] { return fmt::format("CanResume({}, {})", seq, pos); };
  Begin(call);
  const bool by_ledger = ledger_.CanResume(seq, pos);
  const Result<bool> reference = reference_->CanResume(seq, pos);
  const Result<bool> subject = tested_->CanResume(seq, pos);
  CheckCodes(OpKind::kAsk, call, StatusCode::kOk, reference.status().code(),
             subject.status().code(), YesOrNo(subject));
  HashInt(*subject ? 1 : 0);
  if (observer_ != nullptr) observer_->CanResume(seq, pos, ledger_);
  Check(by_ledger == *reference, "reference: resume", [&] {
    return fmt::format(
        "CanResume({}, {}) is {} by the ledger, {} by the "
        "reference",
        seq, pos, by_ledger, *reference);
  });
  Check(*reference == *subject, "subject: resume", [&] {
    return fmt::format("CanResume({}, {}) is {} by the reference, {} by {}",
                       seq, pos, *reference, *subject, subject_.name);
  });
  if (subject_.is_twin()) CheckResumeBefore(seq, pos);
  return *subject;
}

void DifferentialDriver::CheckResumeBefore(int seq, std::int32_t pos) {
  const std::int32_t by_ledger = ledger_.ResumeBefore(seq, pos);
  const Result<std::int32_t> reference = reference_->ResumeBefore(seq, pos);
  const Result<std::int32_t> subject = tested_->ResumeBefore(seq, pos);
  const auto text = [&](std::int32_t other) {
    return fmt::format("ResumeBefore({}, {}) is {}, expected {}", seq, pos,
                       other, by_ledger);
  };
  Check(reference.ok() && *reference == by_ledger, "reference: resume",
        [&] { return text(reference.ok() ? *reference : -1); });
  Check(subject.ok() && *subject == by_ledger, "subject: resume",
        [&] { return text(subject.ok() ? *subject : -1); });
}

void DifferentialDriver::Commit(int seq, const std::vector<int>& path) {
  ObserveBefore();
  const auto call = [&] {
    return fmt::format("Commit({}, [{}])", seq, RunsOf(path));
  };
  Begin(call);
  const StatusCode by_ledger = ledger_.Commit(seq, path).code();
  CheckCodes(OpKind::kCommit, call, by_ledger,
             reference_->Commit(seq, path).code(),
             tested_->Commit(seq, path).code());
  if (observer_ != nullptr) observer_->Commit(seq, path, ledger_);
  pass_.fresh.reset();
  CheckAllCells();
}

void DifferentialDriver::Checkpoint(int seq) {
  ObserveBefore();
  const auto call = [&] { return fmt::format("Checkpoint({})", seq); };
  Begin(call);
  const StatusCode by_ledger = ledger_.Checkpoint(seq).code();
  CheckCodes(OpKind::kPin, call, by_ledger, reference_->Checkpoint(seq).code(),
             tested_->Checkpoint(seq).code());
  if (observer_ != nullptr) observer_->Checkpoint(seq, ledger_);
}

void DifferentialDriver::Cached() {
  if (IsEncoder(active_type_)) return CheckEncoderCached();
  if (!subject_.is_twin()) return;
  Begin("EncoderCached");
  CheckCodes(OpKind::kCached, "EncoderCached", StatusCode::kNotSupported,
             reference_->EncoderCached().status().code(),
             tested_->EncoderCached().status().code());
}

void DifferentialDriver::CheckEncoderCached() {
  const bool by_ledger = ledger_.active().slots().cached;
  Begin("EncoderCached");
  const Result<bool> reference = reference_->EncoderCached();
  const Result<bool> subject = tested_->EncoderCached();
  CheckCodes(OpKind::kCached, "EncoderCached", StatusCode::kOk,
             reference.status().code(), subject.status().code(),
             YesOrNo(subject));
  Check(by_ledger == *reference && by_ledger == *subject,
        "subject: encoder cached", [&] {
          return fmt::format(
              "EncoderCached is {} by the ledger, {} by the reference, "
              "{} by {}",
              by_ledger, *reference, *subject, subject_.name);
        });
}

void DifferentialDriver::Misuse(int which) {
  const MisuseContext context{
      .setup = setup_,
      .pass_tokens = pass_.active ? Size(pass_.tokens.positions) : 0,
      .encoder = IsEncoder(active_type_),
      .no_causal =
          IsEncoder(active_type_) || KindOf(active_type_) == Kind::kRecurrent,
      .layer_put = put_.contains(place()) && pass_.active,
      .layer = layer_};
  ++result_.operations;
  const auto call = [&] {
    return fmt::format("misuse {}: {}", which, MisuseName(which));
  };
  Begin(call);
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    if (const auto wrong = TryMisuse(*cache, which, context)) {
      Check(false,
            cache == tested_.get() ? CheckName("subject: misuse")
                                   : CheckName("reference: misuse"),
            *wrong);
    }
  }
  if (trace_ != nullptr) {
    AddStep(call(), "");
  }
}

// In a reserving pass, the views span all cells.
void DifferentialDriver::Poison() {
  if (!subject_.can_be_poisoned) return;
  const Tokens tokens = {.positions = {0}, .sequences = {0}, .multimodal = {}};
  if (!StartForward(tokens, /*reserve=*/true)) return;
  for (const auto& [type, layer] : put_) {
    if (IsEncoder(type)) continue;
    SetType(type);
    SelectLayer(layer);
    std::vector<CellEntry> used;
    reference_->ListCells(used);
    for (Cache* cache : {reference_.get(), tested_.get()}) {
      PoisonFreeCells(*cache->Get(), used, setup_.config.v_layout);
    }
    AddStep(fmt::format("Get(layer {}), free cells are overwritten", layer_),
            "");
  }
}

// Ends the pass, as Restore and AddSequence do.
void DifferentialDriver::EndPass() {
  pass_ = Pass();
  if (observer_ != nullptr) observer_->EndPass();
  active_type_ = layer_ = 0;
  CheckAllCells();
}

}  // namespace kvtwin::props
