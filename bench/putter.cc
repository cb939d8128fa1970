#include "bench/putter.h"

#include <algorithm>

#include "core/index.h"

namespace kvtwin::bench {
namespace {

constexpr int kHeads = 8;
constexpr int kHeadDim = 128;
constexpr std::size_t kRow = std::size_t{kHeads} * kHeadDim;

}  // namespace

Putter::Putter(const PutCase& what, int cells, std::string_view twin)
    : what_(what),
      cells_(cells),
      key_(SomeRows(what.source, {kHeadDim, kHeads, what.batch, 1}, 1)),
      value_(SomeRows(what.source, {kHeadDim, kHeads, what.batch, 1}, 2)),
      cache_(Make(Setup(cells), twin)) {
  for (int i = 0; i < cells / what.batch; ++i) Time();  // Touches all pages.
}

double Putter::Time() {
  if ((batches_ + 1) * what_.batch > cells_) TakeBack();
  Forward(*cache_, batches_++);
  return bench::Time([&] { Must(cache_->Put(key_.view(), value_.view())); });
}

void Putter::Check(const std::string& name) {
  const auto reference = Make(Setup(2 * what_.batch), "reference");
  TakeBack();
  for (int i = 0; i < 2; ++i) {
    Forward(*reference, i);
    Must(reference->Put(key_.view(), value_.view()));
    Time();
    const KvView view = Must(cache_->Get());
    const KvView other = Must(reference->Get());
    CheckTensors(name, view.key, other.key);
    CheckTensors(name, view.value, other.value);
  }
}

CacheSetup Putter::Setup(int cells) const {
  CacheSetup setup;
  setup.config.v_layout = what_.v_layout;
  setup.config.cache_padding = kTileCells;
  setup.config.mask_dtype = DType::kBits;
  setup.dtype = what_.stored;
  setup.capacity = cells;
  return setup;
}

void Putter::Forward(Cache& cache, int number) const {
  Tokens tokens;
  for (int i = 0; i < what_.batch; ++i) {
    tokens.Add(number / kSequences * what_.batch + i, number % kSequences);
  }
  Must(cache.StartForward(tokens, /*reserve=*/false));
}

void Putter::TakeBack() {
  for (int i = 0; i < kSequences; ++i) Must(cache_->Remove(i, 0, kOpenEnd));
  batches_ = 0;
}

CopyLimit::CopyLimit(const PutCase& what, int cells)
    : to_bytes_(AsSize(what.batch) * kRow * SizeOf(what.stored)),
      halves_(what.source != what.stored),
      key_(to_bytes_, AsSize(cells / what.batch)),
      value_(to_bytes_, AsSize(cells / what.batch)) {}

double CopyLimit::Time(const Putter& from, bool stream) {
  return CopyOne(from.key(), key_.Next(), stream) +
         CopyOne(from.value(), value_.Next(), stream);
}

double CopyLimit::CopyOne(const DenseTensor& from, std::byte* to,
                          bool stream) const {
  const std::byte* bytes = from.bytes.data();
  if (halves_) return HalveBytes(bytes, to, from.bytes.size(), stream);
  return stream ? StreamBytes(bytes, to, to_bytes_)
                : CopyBytes(bytes, to, to_bytes_);
}

OnePutter::OnePutter(DType dtype, VLayout v_layout, int cells,
                     std::string_view twin)
    : v_layout_(v_layout),
      cells_(cells),
      key_(SomeRows(dtype, {1, kHeads, 1, 1}, 1)),
      value_(SomeRows(dtype, {kHeadDim, kHeads, 1, 1}, 2)),
      cache_(Make(Setup(), twin)),
      touched_key_(WrittenBuffer(AsSize(cells) * key_.bytes.size())),
      touched_value_(WrittenBuffer(AsSize(cells) * value_.bytes.size())) {
  Must(cache_->Restore(State()));
  for (int i = 0; i < cells / kStep; ++i) Time();  // Touches all pages.
}

namespace {

void ForwardOne(Cache& cache, int sequence) {
  Tokens tokens;
  tokens.Add(0, sequence);
  Must(cache.StartForward(tokens, /*reserve=*/false));
}

}  // namespace

double OnePutter::Time() {
  if (sequences_ == cells_ / kStep) {
    for (; sequences_ > 0; --sequences_) {
      Must(cache_->Remove(sequences_, 0, kOpenEnd));
    }
  }
  ForwardOne(*cache_, ++sequences_);
  return bench::Time([&] { Must(cache_->Put(key_.view(), value_.view())); });
}

double OnePutter::TimeTouch(VLayout v_layout) {
  at_ = (at_ + kStep) % cells_;
  return value_.dtype == DType::kF32 ? Touch<std::uint32_t>(v_layout)
                                     : Touch<std::uint16_t>(v_layout);
}

void OnePutter::Check(const std::string& name) {
  const auto reference = Make(Setup(), "reference");
  if (sequences_ == cells_ / kStep) Time();
  Must(reference->Restore(Must(cache_->Snapshot())));
  Time();
  ForwardOne(*reference, sequences_);
  Must(reference->Put(key_.view(), value_.view()));
  const KvView view = Must(cache_->Get());
  const KvView other = Must(reference->Get());
  CheckTensors(name, view.key, other.key);
  CheckTensors(name, view.value, other.value);
}

CacheSetup OnePutter::Setup() const {
  CacheSetup setup;
  setup.spec.placement = Placement::kScatter;
  setup.config.v_layout = v_layout_;
  setup.config.cache_padding = kTileCells;
  setup.dtype = key_.dtype;
  setup.capacity = cells_;
  return setup;
}

CacheState OnePutter::State() const {
  CacheState state;
  for (int cell = 0; cell < cells_; ++cell) {
    if (cell % kStep != 0) state.cells.push_back({cell, cell, 0});
  }
  return state;
}

template <class T>
double OnePutter::Touch(VLayout v_layout) {
  const auto* key = reinterpret_cast<const T*>(key_.bytes.data());
  const auto* value = reinterpret_cast<const T*>(value_.bytes.data());
  const auto at = AsSize(at_);
  const bool tiled = v_layout == VLayout::kTiled;
  const auto column = AsSize(tiled ? kTileCells : cells_);
  T* keys = touched_key_.as<T>() + at * kHeads;
  T* values = touched_value_.as<T>();
  values += tiled ? at / kTileCells * kRow * kTileCells + at % kTileCells : at;
  return bench::Time([&] {
    std::copy_n(key, kHeads, keys);
    for (std::size_t i = 0; i < kRow; ++i) values[i * column] = value[i];
    KeepAlive(values);
  });
}

}  // namespace kvtwin::bench
