#include "props/laws/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/index.h"
#include "core/mask_elements.h"
#include "props/compare/differential_driver.h"
#include "props/compare/visibility.h"
#include "props/history/rows.h"

namespace kvtwin::props {

std::optional<Session> Session::Open(const Setup& setup,
                                     const Subject& subject) {
  Session session(setup, subject);
  if (!subject.is_twin() && !subject.abilities.Fits(setup)) return std::nullopt;
  Result<std::unique_ptr<Cache>> cache = subject.Make(setup);
  if (!cache.ok()) return std::nullopt;
  session.cache_ = std::move(*cache);
  const InitArgs& init = setup.init;
  if (!session.cache_->SetConfig(setup.config).ok()) return std::nullopt;
  if (!session.cache_->Init(init).ok()) {
    return std::nullopt;
  }
  if (!subject.is_twin()) {
    session.record_.emplace(setup.spec);
    if (!session.record_->Init(setup.config, init).ok()) return std::nullopt;
    session.record_->IgnoreCapacity();
  }
  return session;
}

Session Session::Clone() const {
  Session clone = *Open(setup_, *subject_);
  for (const Call& call : calls_) clone.Do(call);
  return clone;
}

bool Session::Reload() {
  const Result<CacheState> state = cache_->Snapshot();
  if (!state.ok()) return false;
  Session fresh = *Open(setup_, *subject_);
  if (!fresh.cache_->Restore(*state).ok()) return false;
  cache_ = std::move(fresh.cache_);
  pass_.reset();
  return true;
}

bool Session::MayCopyToItself() const {
  return can_.Can(KVTWIN_CAN_COPY_PREFIX) && can_.Can(KVTWIN_CAN_SHARE) &&
         !can_.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF);
}

int Session::types() const {
  if (!IsWrapper(setup_.spec.kind)) return 1;
  return Size(setup_.spec.caches);
}

int Session::TypeOf(int layer) const { return layer % types(); }

const CacheSpec& Session::spec(int type) const {
  if (!IsWrapper(setup_.spec.kind)) return setup_.spec;
  return At(setup_.spec.caches, type);
}

bool Session::HasEncoder() const {
  for (int type = 0; type < types(); ++type) {
    if (IsEncoder(type)) return true;
  }
  return false;
}

void Session::SetType(int type) {
  if (types() > 1) static_cast<void>(cache_->SetLayerType(type).ok());
}

void Session::SetLayer(int layer) {
  SetType(TypeOf(layer));
  static_cast<void>(cache_->SetLayer(layer).ok());
}

Answer Session::Do(const Call& call) {
  const Answer answer = Try(call);
  if (!sees_cells() && answer.code == StatusCode::kCacheFull) throw NotJudged();
  return answer;
}

Answer Session::Try(const Call& call) {
  calls_.push_back(call);
  if (is_twin_) return Make(call);
  const bool asks = call.kind == Call::Kind::kAsk;
  if (asks && (!can_.can_resume || call.end > can_.LastPosition())) return {};
  const bool in_pass =
      call.kind == Call::Kind::kPut || call.kind == Call::Kind::kCausal;
  if (in_pass && !pass_) return {};
  const auto put = pass_puts_.find(call.layer);
  if (call.kind == Call::Kind::kPut && can_.OnlyGoesOn() &&
      put != pass_puts_.end() && put->second.key == call.key &&
      put->second.value == call.value) {
    return {};  // It is there.
  }
  CheckCall(call);
  const Answer answer = Make(call);
  Record(call, answer);
  return answer;
}

void Session::PutAny() { PutRows(put_layers_); }

void Session::PutAll() {
  std::set<int> layers;
  for (int layer = 0; layer < setup_.layers; ++layer) layers.insert(layer);
  PutRows(layers);
}

void Session::PutRows(std::set<int> layers) {
  constexpr std::int64_t kBeyondHistories = 1 << 20;
  for (const int layer : layers) {
    if (!pass_ || IsEncoder(TypeOf(layer))) continue;
    const auto count = std::ssize(pass_->positions);
    RowBuffer buffer;
    const auto rows = [&](RowRole role, int dim) {
      return CopyOf(
          buffer.Fill({dim, setup_.rows.kv_heads, count, 1}, DType::kF32,
                      {role, layer, kBeyondHistories + pass_->positions[0],
                       false, false},
                      /*gaps=*/false),
          DType::kF32);
    };
    Call put;
    put.kind = Call::Kind::kPut;
    put.layer = layer;
    put.type = TypeOf(layer);
    put.key = rows(RowRole::kKey, setup_.rows.k_head_dim);
    put.value = rows(RowRole::kValue, setup_.rows.v_head_dim);
    Do(put);
  }
}

Answer Session::Make(const Call& call) {
  switch (call.kind) {
    case Call::Kind::kStart: {
      const Batch batch{call.positions, call.sequences, call.indices};
      const Status status = cache_->StartForward(batch, call.reserve);
      pass_.reset();
      if (status.ok()) pass_ = call;
      stale_ = copied_ = narrow_ = false;
      return {status.code()};
    }
    case Call::Kind::kCausal:
      if (!pass_) return {};
      narrow_ = narrow_ || copied_;
      SetType(call.type);
      return {cache_->SetCausal(call.indices).code()};
    case Call::Kind::kPut: {
      if (!pass_) return {};
      SetLayer(call.layer);
      const Status status = cache_->Put(call.key.view(), call.value.view());
      if (status.ok()) put_layers_.insert(call.layer);
      return {status.code()};
    }
    case Call::Kind::kCopy:
      stale_ = copied_ = true;
      return {cache_->CopyPrefix(call.seq, call.dst, call.end).code()};
    case Call::Kind::kRemove:
      stale_ = true;
      return {cache_->Remove(call.seq, call.begin, call.end).code()};
    case Call::Kind::kAsk: {
      const Result<bool> can = cache_->CanResume(call.seq, call.end);
      return {can.status().code(), can.ok() && *can};
    }
    case Call::Kind::kPin:
      return {cache_->Checkpoint(call.seq).code()};
    case Call::Kind::kRestore: {
      const Result<CacheState> state = cache_->Snapshot();
      if (!state.ok()) return {state.status().code()};
      return {AfterLoading(cache_->Restore(*state))};
    }
    case Call::Kind::kAdd: {
      Result<CacheState> one = cache_->SnapshotOf(call.seq);
      if (!one.ok()) return {one.status().code()};
      if (call.lacks_layer) LeaveOutALayer(*one);
      return {AfterLoading(cache_->AddSequence(call.dst, *one))};
    }
  }
  return {};
}

StatusCode Session::AfterLoading(const Status& status) {
  if (status.ok()) pass_.reset();
  return status.code();
}

std::vector<CellEntry> Session::Cells(int type) {
  std::vector<CellEntry> cells;
  if (!sees_cells()) {
    int cell = 0;
    for (const auto& token : At(record_->parts(), type).tokens()) {
      for (const int seq : token.sequences) {
        cells.push_back({cell, static_cast<std::int32_t>(token.position), seq});
      }
      ++cell;
    }
    return cells;
  }
  CheckWhole();
  SetType(type);
  cache_->ListCells(cells);
  return cells;
}

std::vector<int> Session::BatchCells(int type) {
  SetType(type);
  const auto cells = cache_->BatchCells();
  return {cells.begin(), cells.end()};
}

KvView Session::View(int layer) {
  CheckWhole();
  // A cache that only appends is asked only for layers that were put.
  if (!is_twin_ && can_.OnlyGoesOn() && !IsEncoder(TypeOf(layer)) &&
      !pass_puts_.contains(layer)) {
    throw NotJudged();
  }
  SetLayer(layer);
  const Result<KvView> view = cache_->Get();
  return view.ok() ? *view : KvView();
}

std::set<int> Session::Sequences() {
  std::set<int> sequences;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) sequences.insert(entry.sequence);
  }
  return sequences;
}

std::int32_t Session::Next(int seq) {
  std::int64_t next = 0;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) {
      if (entry.sequence != seq) continue;
      next = std::max(next, std::int64_t{entry.position} + 1);
    }
  }
  return static_cast<std::int32_t>(std::min<std::int64_t>(next, kOpenEnd));
}

std::vector<Query> Session::Queries() {
  std::map<int, std::set<std::int32_t>> positions;
  for (int type = 0; type < types(); ++type) {
    for (const CellEntry& entry : Cells(type)) {
      positions[entry.sequence].insert(entry.position);
    }
  }
  std::vector<Query> queries;
  for (auto& [seq, stored] : positions) {
    if (*stored.rbegin() < kOpenEnd) stored.insert(*stored.rbegin() + 1);
    for (const std::int32_t position : stored) {
      queries.push_back({position, seq});
    }
  }
  return queries;
}

void Session::AddRows(const std::vector<Query>& queries, bool slots,
                      std::vector<SeenRow>& rows) {
  const VLayout v_layout = setup_.config.v_layout;
  for (const int layer : put_layers_) {
    const int type = TypeOf(layer);
    // An encoder may drop its slots.
    if (IsEncoder(type) && !sees_cells()) continue;
    const KvView view = View(layer);
    if (view.key.data == nullptr) continue;
    if (IsEncoder(type)) {
      if (!slots) continue;
      const Result<bool> cached = cache_->EncoderCached();
      TensorView value = view.value;
      if (v_layout == VLayout::kPermuted) {
        std::rotate(value.shape.begin(), value.shape.begin() + 1,
                    value.shape.begin() + 3);
        std::rotate(value.stride.begin(), value.stride.begin() + 1,
                    value.stride.begin() + 3);
      }
      rows.push_back(
          {layer,
           {},
           {{cached.ok() && *cached ? 1 : 0, CopyOf(value, value.dtype).bytes,
             CopyOf(view.key, view.key.dtype).bytes}}});
      continue;
    }
    if (view.mask.data == nullptr || view.mask.shape[1] < std::ssize(queries)) {
      throw std::runtime_error(
          fmt::format("layer {}: the mask has the shape {}, for {} tokens",
                      layer, ShapeText(view.mask.shape), queries.size()));
    }
    const std::vector<CellEntry> cells =
        sees_cells() ? Cells(type) : std::vector<CellEntry>();
    const std::int64_t columns = view.mask.shape[0];
    std::vector<SeenToken> tokens;
    tokens.reserve(AsSize(columns));
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto cell = AsInt(view.first_cell + column);
      const auto at = std::lower_bound(
          cells.begin(), cells.end(), cell,
          [](const CellEntry& entry, int c) { return entry.cell < c; });
      const bool held = at != cells.end() && at->cell == cell;
      tokens.push_back({held ? at->position : -1,
                        RowBytes(view.value, column, v_layout),
                        RowBytes(view.key, column, VLayout::kPlain)});
    }
    for (std::size_t i = 0; i < queries.size(); ++i) {
      SeenRow row{layer, queries[i], {}};
      const auto positions = PositionsOf(queries[i].seq, layer);
      for (std::int64_t column = 0; column < columns; ++column) {
        if (!MaskAllows(view.mask, column, static_cast<std::int64_t>(i)))
          continue;
        SeenToken token = At(tokens, column);
        if (!sees_cells()) {
          const auto at = positions.find(token.value);
          if (at != positions.end()) token.position = at->second;
        }
        if (token.position >= 0 || !stale_) {
          row.tokens.push_back(std::move(token));
        }
      }
      std::sort(row.tokens.begin(), row.tokens.end());
      rows.push_back(std::move(row));
    }
  }
}

std::map<std::vector<std::byte>, std::int32_t> Session::PositionsOf(
    int seq, int layer) const {
  std::map<std::vector<std::byte>, std::int32_t> positions;
  if (sees_cells()) return positions;
  const auto type = AsSize(TypeOf(layer));
  for (const auto& token : record_->parts()[type].tokens()) {
    if (!token.HeldBy(seq)) continue;
    const auto rows = token.rows.find(layer);
    // Rows that were never put may be anything, and equal rows do not tell
    // which token they are from.
    if (rows == token.rows.end() ||
        !positions
             .emplace(rows->second.value.bytes,
                      static_cast<std::int32_t>(token.position))
             .second) {
      throw NotJudged();
    }
  }
  return positions;
}

std::vector<SeenRow> Session::PassRows() {
  std::vector<SeenRow> rows;
  if (!pass_ || narrow_) return rows;
  // No rule says what a mask shows after that, wherever the tokens lie.
  if (!sees_cells() && (stale_ || pass_->reserve)) return rows;
  std::vector<Query> queries;
  for (std::size_t i = 0; i < pass_->positions.size(); ++i) {
    queries.push_back({pass_->positions[i], pass_->sequences[i]});
  }
  AddRows(queries, /*slots=*/true, rows);
  return rows;
}

std::vector<SeenRow> Session::Look(const std::vector<Query>& queries) {
  std::vector<SeenRow> rows;
  if (LooksByGoingOn()) {
    rows = LookByGoingOn(queries);
    pass_.reset();
    std::stable_sort(rows.begin(), rows.end(),
                     [](auto& a, auto& b) { return a.layer < b.layer; });
    return rows;
  }
  std::vector<Query> asked = queries;
  std::erase_if(asked, [&](const Query& query) {
    return query.position > can_.LastPosition();
  });
  const auto most =
      can_.Can(KVTWIN_CAN_MIX) ? AsSize(setup_.init.max_batch) : std::size_t{1};
  for (std::size_t first = 0; first < asked.size(); first += most) {
    const std::vector<Query> some(
        IteratorAt(asked, first),
        IteratorAt(asked, std::min(first + most, asked.size())));
    Call probe = StartCall({}, {}, /*reserve=*/true);
    for (const Query& query : some) {
      probe.positions.push_back(query.position);
      probe.sequences.push_back(query.seq);
    }
    if (Do(probe).code == StatusCode::kOk) {
      AddRows(some, /*slots=*/first == 0, rows);
    }
    calls_.pop_back();  // A probe is not one of the session's calls.
  }
  pass_.reset();
  std::stable_sort(rows.begin(), rows.end(),
                   [](auto& a, auto& b) { return a.layer < b.layer; });
  return rows;
}

Picture Session::Show() {
  Picture picture;
  if (!sees_cells()) {  // The rows that are seen, in whatever cells.
    for (const SeenRow& row : PassRows()) {
      std::vector<std::byte>& bytes = picture.views.emplace_back();
      for (const SeenToken& token : row.tokens) {
        bytes.insert(bytes.end(), token.value.begin(), token.value.end());
        bytes.insert(bytes.end(), token.key.begin(), token.key.end());
      }
    }
    picture.shown = !picture.views.empty();
    return picture;
  }
  for (int type = 0; type < types(); ++type) {
    picture.cells.push_back(Cells(type));
    picture.batch_cells.push_back(BatchCells(type));
  }
  if (!pass_) return picture;
  for (const int layer : put_layers_) {
    const KvView view = View(layer);
    std::vector<std::byte>& bytes = picture.views.emplace_back();
    bytes.push_back(static_cast<std::byte>(view.first_cell & 0xFF));
    bytes.push_back(static_cast<std::byte>(view.first_cell >> 8 & 0xFF));
    for (const TensorView* tensor : {&view.key, &view.value, &view.mask}) {
      if (tensor->data == nullptr) continue;
      const DenseTensor copy = CopyOf(*tensor, tensor->dtype);
      bytes.insert(bytes.end(), copy.bytes.begin(), copy.bytes.end());
    }
  }
  return picture;
}

}  // namespace kvtwin::props
