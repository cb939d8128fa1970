// The goals of recurrent state and of hybrids: a state is stored at the speed
// of memcpy, and a decode step of a hybrid takes as long as those of its parts,
// however many tokens it has.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

// A sequence with a state of 8 MiB and a small convolution window.
class Stater {
 public:
  Stater(int v_head_dim, std::string_view twin)
      : key_(SomeRows(DType::kF32, {4, kHeads, 1, 1}, 1)),
        value_(SomeRows(DType::kF32, {v_head_dim, kHeads, 1, 1}, 2)) {
    CacheSetup setup;
    setup.spec = {
        .kind = Kind::kRecurrent, .checkpoint_every = 1, .checkpoints = 1};
    setup.dtype = DType::kF32;
    cache_ = Make(setup, twin);
    for (int i = 0; i < 2 * cache_->CellCount(); ++i) Step();
  }

  // One more token: its state becomes a checkpoint.
  void Step() {
    const std::vector<std::int32_t> positions = {length_++};
    const std::vector<int> sequences = {0};
    Must(cache_->StartForward({.positions = positions, .sequences = sequences},
                              /*reserve=*/false));
    Must(cache_->Put(key_.view(), value_.view()));
  }
  // Goes back by a token, and stores another state after it.
  void StepAgain() {
    Must(cache_->Remove(0, --length_, kOpenEnd));
    Step();
  }

  void Check(const std::string& name, Stater& reference) {
    for (Stater* stater : {this, &reference}) {
      stater->Step();
      stater->StepAgain();
    }
    CheckCells(name, *cache_, *reference.cache_);
    const KvView view = Must(cache_->Get());
    const KvView other = Must(reference.cache_->Get());
    CheckTensors(name, view.key, other.key);
    CheckTensors(name, view.value, other.value);
  }

  const DenseTensor& value() const { return value_; }
  std::size_t cells() const { return AsSize(cache_->CellCount()); }

 private:
  static constexpr int kHeads = 128;

  DenseTensor key_;
  DenseTensor value_;
  std::unique_ptr<Cache> cache_;
  std::int32_t length_ = 0;
};

void JudgeStates(Goals& goals) {
  const int v_head_dim = goals.Cells(1 << 14);
  std::unique_ptr<Stater> stater;
  std::unique_ptr<ColdMemory> memory;
  for (const int threads : ThreadCounts()) {
    const std::string what =
        fmt::format("{} / copy, {}", goals.quick() ? "512 KiB" : "8 MiB",
                    ThreadsName(threads));
    const std::string store = "checkpoint a state of " + what;
    const std::string again = "roll back and store a state of " + what;
    if (!goals.Wanted(store) && !goals.Wanted(again)) continue;
    UseThreads(threads);
    if (stater == nullptr) {
      stater = std::make_unique<Stater>(v_head_dim, "optimized");
      Stater reference(v_head_dim, "reference");
      stater->Check(store, reference);
      memory = std::make_unique<ColdMemory>(stater->value().bytes.size(),
                                            stater->cells());
    }
    const std::vector<std::byte>& from = stater->value().bytes;
    const auto limits = OnAnyThreads(
        {[&] { return CopyBytes(from.data(), memory->Next(), from.size()); },
         [&] {
           return StreamBytes(from.data(), memory->Next(), from.size());
         }});
    goals.Judge(
        store, 1 / 0.85, [&] { return Time([&] { stater->Step(); }); }, limits,
        51);
    goals.Judge(
        again, 1 / 0.85, [&] { return Time([&] { stater->StepAgain(); }); },
        limits, 51);
  }
}

// A causal cache that is 15/16 full, a window of it, and its last state: behind
// one interface, or each alone.
class HybridDecoder {
 public:
  HybridDecoder(int cells, bool hybrid, std::string_view twin = "optimized")
      : stored_(cells / 16 * 15) {
    CacheSpec windowed;
    windowed.kind = Kind::kSwa;
    windowed.window = kWindow;
    const std::vector<CacheSpec> parts = {CacheSpec(), windowed,
                                          CacheSpec{.kind = Kind::kRecurrent,
                                                    .checkpoint_every = 64,
                                                    .checkpoints = 2}};
    CacheState whole;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      whole.caches.push_back(StateOf(i));
      if (!hybrid) Add(parts[i], whole.caches.back(), cells, twin);
    }
    CacheSpec spec;
    spec.kind = Kind::kHybrid;
    spec.caches = parts;
    if (hybrid) Add(spec, whole, cells, twin);
  }

  // Nanoseconds of a step: StartForward and Get of each part.
  double Time() {
    Reset();
    Step();
    return bench::Time([&] {
             for (int i = 0; i < kSteps; ++i) Step();
           }) /
           kSteps;
  }

  void Check(const std::string& name, HybridDecoder& other) {
    Reset();
    other.Reset();
    for (int i = 0; i < 3; ++i) {
      Step();
      other.Step();
      for (int part = 0; part < kParts; ++part) {
        CheckMasks(name, Part(part), other.Part(part));
      }
    }
  }

 private:
  static constexpr int kWindow = 128;
  static constexpr int kParts = 3;
  static constexpr int kSteps = 100;  // The view grows every 256 tokens.

  CacheState StateOf(std::size_t part) const {
    CacheState state = Interleaved(stored_, 1);
    const int kept = part == 0 ? stored_ : part == 1 ? kWindow : 1;
    if (part > 0) {
      for (int i = 0; i < kept; ++i) {
        At(state.cells, i).position = stored_ - kept + i;
      }
      state.cells.resize(AsSize(kept));
    }
    return state;
  }

  void Add(const CacheSpec& spec, CacheState state, int cells,
           std::string_view twin) {
    CacheSetup setup;
    setup.spec = spec;
    setup.config.cache_padding = 256;
    setup.capacity = cells;
    setup.max_batch = 256;
    caches_.push_back(Make(setup, twin));
    states_.push_back(std::move(state));
  }

  void Reset() {
    position_ = stored_;
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      Must(caches_[i]->Restore(states_[i]));
      AddTinyLayer(*caches_[i]);
      if (caches_.size() > 1) continue;
      const float element = 0;
      const TensorView row = DenseView(&element, DType::kF32, {1, 1, 1, 1});
      for (int part = 1; part < kParts; ++part) {
        Must(caches_[0]->SetLayerType(part));
        Must(caches_[0]->Put(row, row));
      }
    }
  }

  Cache& Part(int part) {
    if (caches_.size() > 1) return *At(caches_, part);
    Must(caches_[0]->SetLayerType(part));
    return *caches_[0];
  }

  void Step() {
    const std::array positions = {position_++};
    constexpr std::array kSequences = {0};
    const Batch batch = {.positions = positions, .sequences = kSequences};
    for (const auto& cache : caches_) {
      Must(cache->StartForward(batch, /*reserve=*/false));
    }
    for (int part = 0; part < kParts; ++part) {
      KeepAlive(Part(part).Get()->mask.data);
    }
  }

  std::int32_t stored_;
  std::int32_t position_ = 0;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<CacheState> states_;
};

void JudgeHybrids(Goals& goals) {
  const int large = goals.Cells(1 << 20);
  const int small = 1 << 12;  // Room for the steps of a round.
  const std::string flat = fmt::format("decode, hybrid of 3, {} / {} cells",
                                       SizeName(large), SizeName(small));
  const std::string sum =
      fmt::format("decode, hybrid of 3 / its parts, {} cells", SizeName(large));
  if (!goals.Wanted(flat) && !goals.Wanted(sum)) return;
  HybridDecoder above(large, /*hybrid=*/true);
  HybridDecoder below(small, /*hybrid=*/true);
  HybridDecoder parts(large, /*hybrid=*/false);
  HybridDecoder slow(small, /*hybrid=*/true, "reference");
  below.Check(flat, slow);
  above.Check(sum, parts);
  goals.Judge(flat, 2, [&] { return above.Time(); },
              {[&] { return below.Time(); }});
  goals.Judge(sum, 1.1, [&] { return above.Time(); },
              {[&] { return parts.Time(); }});
}

}  // namespace

void StateGoals(Goals& goals) {
  JudgeStates(goals);
  UseThreads(1);
  JudgeHybrids(goals);
}

}  // namespace kvtwin::bench
