#include "bench/operations.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/limits.h"

namespace kvtwin::bench {
namespace {

constexpr int kCopied = 1000;  // A sequence that is not stored.
constexpr std::int32_t kFirst = 5;

}  // namespace

Operations::Operations(int cells, int sequences, std::string_view twin)
    : half_(cells / 16 * 15 / sequences / 2) {
  CacheSetup setup;
  setup.spec.shift.kind = ShiftKind::kIdentity;
  setup.max_sequences = sequences;
  setup.capacity = cells / sequences;
  cache_ = Make(setup, twin);
  Must(cache_->Restore(Interleaved(cells / 16 * 15, sequences)));
}

double Operations::TimeRemove() {
  Status status;
  const double time =
      Time([&] { status = cache_->Remove(0, half_, half_ + 2); });
  Must(status);
  return time;
}

double Operations::TimeCopy() {
  Must(cache_->Remove(kCopied, 0, kOpenEnd));
  Status status;
  const double time =
      Time([&] { status = cache_->CopyPrefix(0, kCopied, half_); });
  Must(status);
  Must(cache_->Remove(kCopied, 0, kOpenEnd));
  return time;
}

void Operations::Check(const std::string& name, Operations& reference) {
  TimeRemove();
  reference.TimeRemove();
  CheckCells(name, *cache_, *reference.cache_);
  Must(cache_->CopyPrefix(0, kCopied, half_));
  Must(reference.cache_->CopyPrefix(0, kCopied, half_));
  CheckCells(name, *cache_, *reference.cache_);
  Must(cache_->Remove(kCopied, 0, kOpenEnd));
  Must(reference.cache_->Remove(kCopied, 0, kOpenEnd));
}

Committer::Committer(int cells, std::string_view twin)
    : length_(cells - std::max(cells / 16, kDrafts)) {
  CacheSetup setup;
  setup.max_sequences = 1;
  setup.capacity = cells;
  cache_ = Make(setup, twin);
  Must(cache_->Restore(Interleaved(length_, 1)));
}

double Committer::Time() {
  constexpr int kDepth = 8;
  std::vector<std::int32_t> positions;
  std::vector<int> parents;
  std::vector<int> path;
  // Chains of 8, side by side; the last one is accepted.
  for (int i = 0; i < kDrafts; ++i) {
    const bool first = i % kDepth == 0;
    positions.push_back(length_ + i % kDepth);
    parents.push_back(first ? kCommitted : i - 1);
    if (i >= kDrafts - kDepth) path.push_back(i);
  }
  const std::vector<int> sequences(kDrafts, 0);
  Must(cache_->StartForward(
      {.positions = positions, .sequences = sequences, .parents = parents},
      /*reserve=*/false));
  Status status;
  const double time = bench::Time([&] { status = cache_->Commit(0, path); });
  Must(status);
  Must(cache_->Remove(0, length_, kOpenEnd));
  return time;
}

void Committer::Check(const std::string& name, Committer& reference) {
  Time();
  reference.Time();
  CheckCells(name, *cache_, *reference.cache_);
}

Resumer::Resumer(int cells, std::string_view twin)
    : window_(cells / 2), last_(cells + kFirst - 1) {
  setup_.spec.kind = Kind::kSwaMem;
  setup_.spec.window = window_;
  setup_.spec.memory = cells;
  setup_.capacity = cells + 1;
  state_ = Interleaved(cells, 1);
  for (CellEntry& entry : state_.cells) entry.position += kFirst;
  cache_ = Make(setup_, twin);
  Must(cache_->Restore(state_));
}

double Resumer::Time(int rounds) {
  int yes = 0;
  const double time = bench::Time([&] {
    for (int i = 0; i < rounds; ++i) {
      yes += *cache_->CanResume(0, last_ - i % 2) ? 1 : 0;
    }
  });
  KeepAlive(yes);
  return time / rounds;
}

void Resumer::Check(const std::string& name) {
  const std::unique_ptr<Cache> reference = Make(setup_, "reference");
  Must(reference->Restore(state_));
  for (const std::int32_t at : {0, window_ + kFirst - 1, window_ + kFirst,
                                last_, last_ + 1, last_ + 2}) {
    if (*cache_->CanResume(0, at) != *reference->CanResume(0, at)) {
      Wrong(name, fmt::format("can it resume at {}?", at));
    }
  }
}

}  // namespace kvtwin::bench
