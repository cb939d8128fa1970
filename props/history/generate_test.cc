// Tests that histories are varied enough: the search must find faults that only
// a few setups or calls show.

#include "props/history/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "optimized/fast_paths.h"
#include "props/base/forwarding_cache.h"
#include "props/history/abilities.h"
#include "props/history/speculate.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {
namespace {

// The reference twin, with a spec that is changed.
class OtherSpec : public ForwardingCache {
 public:
  OtherSpec(CacheSpec spec, void (*change)(CacheSpec&))
      : ForwardingCache(
            *MakeCache(Changed(std::move(spec), change), "reference")) {}

 private:
  static CacheSpec Changed(CacheSpec spec, void (*change)(CacheSpec&)) {
    change(spec);
    for (CacheSpec& part : spec.caches) change(part);
    return spec;
  }
};

// The oldest token of a window of 6 to 63 positions is hidden.
class NarrowsWindows : public OtherSpec {
 public:
  explicit NarrowsWindows(const CacheSpec& spec)
      : OtherSpec(
            spec, +[](CacheSpec& part) {
              if (!part.window || *part.window < 6 || *part.window > 63) return;
              // The tokens that a window shows stay stored.
              part.memory = part.memory.value_or(*part.window + 1);
              part.kind = Kind::kSwaMem;
              --*part.window;
            }) {}
};

// A window of 64 or more positions sees a token too many.
class WidensWindows : public OtherSpec {
 public:
  explicit WidensWindows(const CacheSpec& spec)
      : OtherSpec(
            spec, +[](CacheSpec& part) {
              if (part.kind == Kind::kSwa && part.window && *part.window > 63) {
                ++*part.window;
              }
            }) {}
};

// Chunks of more than 7 positions are longer by a position.
class LengthensChunks : public OtherSpec {
 public:
  explicit LengthensChunks(const CacheSpec& spec)
      : OtherSpec(
            spec, +[](CacheSpec& part) {
              if (part.chunk > 7) ++part.chunk;
            }) {}
};

// The cache uses only the last bits of the ids of sequences.
template <int kBits>
class ShortIds : public ForwardingCache {
 public:
  explicit ShortIds(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "reference")) {}

  Status StartForward(const Batch& batch, bool reserve) override {
    std::vector<int> ids(batch.sequences.begin(), batch.sequences.end());
    for (int& id : ids) id &= kMask;
    Batch other = batch;
    other.sequences = ids;
    return cache_->StartForward(other, reserve);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src & kMask, dst & kMask, len);
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return cache_->CanResume(seq & kMask, pos);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return cache_->Remove(seq & kMask, begin, end);
  }

 private:
  static constexpr int kMask = (1 << kBits) - 1;
};

// A copy of a sequence to itself changes nothing.
class CopiesToOthersOnly : public ForwardingCache {
 public:
  explicit CopiesToOthersOnly(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "reference")) {}

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return src == dst ? Status() : cache_->CopyPrefix(src, dst, len);
  }
};

// After two copies of a sequence, the next copies are empty.
class FewCopies : public ForwardingCache {
 public:
  explicit FewCopies(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "reference")) {}

  Status StartForward(const Batch& batch, bool reserve) override {
    copies_.clear();
    return cache_->StartForward(batch, reserve);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, ++copies_[src] > 2 ? 0 : len);
  }

 private:
  std::map<int, int> copies_;  // By source, since the last batch.
};

// Whether the search finds the fault in this many operations, with clients of
// a server, whose sequences are numbered from 0 and only continue.
template <class Backend>
bool IsFound(std::int64_t operations, std::optional<Kind> kind = {},
             std::uint64_t seed = 1, bool any_ids = false) {
  Subject subject = {.name = "faulty"};
  subject.level = Level::kVisibility;
  subject.make_of = [](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(std::make_unique<Backend>(setup.spec));
  };
  subject.abilities.can &=
      ~std::uint32_t{KVTWIN_CAN_ANY_SEQUENCE | KVTWIN_CAN_ANY_ORDER |
                     KVTWIN_CAN_REFUSE_MISUSE | KVTWIN_CAN_DRAFT};
  if (any_ids) subject.abilities.can |= KVTWIN_CAN_ANY_SEQUENCE;
  FuzzOptions options;
  options.seed = seed;
  options.operations = operations;
  options.kind = kind;
  options.unshrunk = true;
  return Fuzz(options, subject).failure.has_value();
}

// The same for the histories of a twin, whose cells are compared.
template <class Twin>
bool IsFoundInATwin(std::int64_t operations) {
  Subject subject = TwinSubject("reference");
  subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(std::make_unique<Twin>(spec));
  };
  FuzzOptions options;
  options.seed = 1;
  options.operations = operations;
  options.unshrunk = true;
  return Fuzz(options, subject).failure.has_value();
}

enum class Wrong { kOffset, kLayer, kHeads, kTwice, kNever };

// Calls a custom shift function in a wrong way.
template <Wrong kWrong>
class ShiftsOtherwise : public OtherSpec {
 public:
  explicit ShiftsOtherwise(const CacheSpec& spec)
      : OtherSpec(
            spec, +[](CacheSpec& part) {
              if (part.shift.kind != ShiftKind::kCustom) return;
              part.shift.fn = [right = part.shift.fn](
                                  int layer, std::int32_t offset, int dim,
                                  int heads, std::span<float> key) -> Status {
                if (kWrong == Wrong::kNever) return {};
                if (kWrong == Wrong::kTwice) {
                  (void)right(layer, offset, dim, heads, key).ok();
                }
                if (kWrong == Wrong::kHeads) std::swap(dim, heads);
                return right(layer + (kWrong == Wrong::kLayer ? 1 : 0),
                             kWrong == Wrong::kOffset ? -offset : offset, dim,
                             heads, key);
              };
            }) {}
};

TEST(Histories, HaveCustomShifts) {
  EXPECT_TRUE(IsFoundInATwin<ShiftsOtherwise<Wrong::kOffset>>(20000));
  EXPECT_TRUE(IsFoundInATwin<ShiftsOtherwise<Wrong::kLayer>>(20000));
  EXPECT_TRUE(IsFoundInATwin<ShiftsOtherwise<Wrong::kHeads>>(50000));
  EXPECT_TRUE(IsFoundInATwin<ShiftsOtherwise<Wrong::kTwice>>(20000));
  EXPECT_TRUE(IsFoundInATwin<ShiftsOtherwise<Wrong::kNever>>(20000));
}

// Shows a wrong K after some calls.
class SpoilsKeys : public ForwardingCache {
 public:
  explicit SpoilsKeys(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "reference")) {}

  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || !IsSpoilt(*view)) return view;
    key_ = CopyOf(view->key, view->key.dtype);
    key_.bytes.front() ^= std::byte{1};
    view->key = key_.view();
    return view;
  }

 protected:
  virtual bool IsSpoilt(const KvView& view) = 0;

 private:
  DenseTensor key_;
};

// Work that is divided into this many shares is wrong.
template <std::size_t kShares>
class SharesBadly : public SpoilsKeys {
 public:
  using SpoilsKeys::SpoilsKeys;

 private:
  bool IsSpoilt(const KvView& view) override {
    const auto bytes = AsSize(view.key.stride[2] * view.key.shape[2]);
    return optimized::SharesInTurn::Count(bytes) == kShares;
  }
};

TEST(Histories, AreRunWithWorkInShares) {
  EXPECT_TRUE(IsFoundInATwin<SharesBadly<2>>(1000));
  EXPECT_TRUE(IsFoundInATwin<SharesBadly<3>>(1000));
  EXPECT_TRUE(IsFoundInATwin<SharesBadly<4>>(1000));
  EXPECT_FALSE(IsFoundInATwin<SharesBadly<5>>(1000));
}

// A token of a window that moves from cell 64 or later to an earlier cell is
// wrong from then on.
class MovesBadly : public SpoilsKeys {
 public:
  explicit MovesBadly(const CacheSpec& spec)
      : SpoilsKeys(spec), has_window_(HasWindow(spec)) {}

  Status StartForward(const Batch& batch, bool reserve) override {
    const std::map<Token, int> before = Cells();
    Status status = cache_->StartForward(batch, reserve);
    for (const auto& [token, cell] : Cells()) {
      const auto found = before.find(token);
      moved_ =
          moved_ || (found != before.end() && found->second >= 64 && cell < 64);
    }
    return status;
  }

 private:
  using Token = std::pair<std::int32_t, int>;  // Its position and sequence.

  bool IsSpoilt(const KvView&) override { return has_window_ && moved_; }
  std::map<Token, int> Cells() const {
    std::vector<CellEntry> cells;
    cache_->ListCells(cells);
    std::map<Token, int> by_token;
    for (const CellEntry& entry : cells) {
      by_token[{entry.position, entry.sequence}] = entry.cell;
    }
    return by_token;
  }

  const bool has_window_;
  bool moved_ = false;
};

TEST(Histories, HaveLargeDefragsOfWindows) {
  EXPECT_TRUE(IsFoundInATwin<MovesBadly>(20000));
}

TEST(Histories, HaveWindowsThatTokensLeave) {
  EXPECT_TRUE(IsFound<NarrowsWindows>(100000, Kind::kSwa));
  EXPECT_TRUE(IsFound<WidensWindows>(1000000, Kind::kSwa));
}

TEST(Histories, HaveLongChunks) {
  EXPECT_TRUE(IsFound<LengthensChunks>(100000, Kind::kChunked));
}

TEST(Histories, HaveManySequences) {
  EXPECT_TRUE(IsFound<ShortIds<2>>(100000));
  EXPECT_TRUE(IsFound<ShortIds<6>>(1000000));
}

TEST(Histories, HaveIdsThatAreFarApart) {
  EXPECT_TRUE(IsFound<ShortIds<16>>(50000, {}, 1, /*any_ids=*/true));
  EXPECT_FALSE(IsFound<ShortIds<16>>(50000));
}

TEST(Histories, BranchIntoManySequences) {
  constexpr int kSeeds = 10;
  int found = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    found += IsFound<FewCopies>(20000, {}, AsSize(seed)) ? 1 : 0;
  }
  EXPECT_GE(found, 6);  // 8; 3 if sequences did not branch.
}

TEST(Histories, CopySequencesToThemselves) {
  EXPECT_TRUE(IsFound<CopiesToOthersOnly>(100000));
}

TEST(Histories, PinSeveralStates) {
  int several = 0;  // Histories whose cache pins three states of a sequence.
  for (std::uint64_t number = 0; number < 400; ++number) {
    const History history = MakeHistory(1, number, Kind::kRecurrent, 15);
    std::map<int, int> pinned;  // States, by sequence; one for each length.
    int most = 0;
    std::set<int> same;  // Sequences that have not grown since a pin.
    for (const Op& op : history.ops) {
      if (op.kind == OpKind::kDrop) pinned.erase(op.seq);
      for (const Segment& segment : op.segments) same.erase(segment.seq);
      if (op.kind != OpKind::kPin || !same.insert(op.seq).second) continue;
      most = std::max(most, ++pinned[op.seq]);
    }
    several += history.setup.spec.pins > 2 && most > 2 ? 1 : 0;
  }
  EXPECT_GE(several, 12);  // 18; 3 if no Checkpoint followed another.
}

// Returns how many of 400 histories have three operations, one after another,
// for which `does` is true.
int CountHistories(History (*make)(std::uint64_t number),
                   bool (*does)(const Op& first, const Op& second,
                                const Op& third)) {
  int count = 0;
  for (std::uint64_t number = 0; number < 400; ++number) {
    const std::vector<Op> ops = make(number).ops;
    bool found = false;
    for (std::size_t i = 2; i < ops.size(); ++i) {
      found = found || does(ops[i - 2], ops[i - 1], ops[i]);
    }
    count += found ? 1 : 0;
  }
  return count;
}

// Returns the number of tokens of the largest batch; counts that depend on free
// cells do not matter.
int LargestBatch(const History& history) {
  int largest = 0;
  for (const Op& op : history.ops) {
    if (op.kind != OpKind::kPut || op.reserve) continue;
    int tokens = 0;
    for (const Segment& segment : op.segments) {
      if (segment.count < Segment::kMost) tokens += segment.count;
    }
    largest = std::max(largest, tokens);
  }
  return std::min(largest, history.setup.init.max_batch);
}

int LargestSequence(const History& history) {
  int largest = 0;
  for (const Op& op : history.ops) {
    largest = std::max(largest, op.dst + op.more);
    for (const Segment& segment : op.segments) {
      largest = std::max(largest, segment.seq + segment.more);
    }
  }
  return largest;
}

TEST(Histories, AreLargeInEachDimension) {
  std::map<std::string, int> large;
  for (std::uint64_t number = 0; number < 5000; ++number) {
    const History history = MakeHistory(1, number, std::nullopt, 15, 0,
                                        /*rarities=*/true);
    // A backend gets the line of a history.
    const Result<History> read = ParseHistory(ToText(history));
    EXPECT_TRUE(read.ok()) << read.status().message();
    large["batch"] += LargestBatch(history) >= 256 ? 1 : 0;
    large["layers"] += history.setup.layers > 32 ? 1 : 0;
    large["sequences"] += LargestSequence(history) >= 256 ? 1 : 0;
    large["cells"] += history.setup.init.capacity >= 1024 ? 1 : 0;
  }
  EXPECT_GE(large["batch"], 15);
  EXPECT_GE(large["layers"], 8);
  EXPECT_GE(large["sequences"], 5);
  EXPECT_GE(large["cells"], 8);
}

TEST(Histories, HaveRowsAsWideAsThoseOfModels) {
  int wide = 0;
  int differ = 0;  // K and V are wide, but not equally.
  int many_heads = 0;
  int latent = 0;  // As wide as those of latent attention.
  for (std::uint64_t number = 0; number < 10000; ++number) {
    const RowDims rows = MakeHistory(1, number, {}, 1).setup.rows;
    const bool is_wide = rows.k_head_dim >= 64 && rows.v_head_dim >= 64;
    wide += rows.k_head_dim >= 64 ? 1 : 0;
    differ += is_wide && rows.k_head_dim != rows.v_head_dim ? 1 : 0;
    many_heads += rows.kv_heads > 8 ? 1 : 0;
    latent += rows.k_head_dim == 576 && rows.v_head_dim == 512 ? 1 : 0;
  }
  EXPECT_GE(wide, 50);
  EXPECT_GE(differ, 25);
  EXPECT_GE(many_heads, 50);
  EXPECT_GE(latent, 1);
}

// Only hybrids without states can remove from the middle (R10).
TEST(Histories, HaveHybridsWithoutStates) {
  int without = 0;
  for (std::uint64_t number = 0; number < 1000; ++number) {
    const History history = MakeHistory(1, number, Kind::kHybrid, 15);
    without += HasStates(history.setup.spec) ? 0 : 1;
  }
  EXPECT_GE(without, 150);
  EXPECT_LE(without, 250);
}

TEST(Histories, GoBackInForksOfPinnedSequences) {
  const int forks = CountHistories(
      [](std::uint64_t number) {
        return MakeHistory(1, number, Kind::kRecurrent, 15);
      },
      [](const Op& pin, const Op& copy, const Op& put) {
        return pin.kind == OpKind::kPin && copy.kind == OpKind::kCopy &&
               copy.seq == pin.seq && copy.dst != pin.seq &&
               put.kind == OpKind::kPut && put.segments[0].seq == copy.dst;
      });
  EXPECT_GE(forks, 45);  // 62.
}

TEST(Histories, GoBackIntoWhatACommitTook) {
  const int back = CountHistories(
      [](std::uint64_t number) {
        return MakeSpeculation(1, number, Kind::kRecurrent, 15, 0);
      },
      [](const Op& commit, const Op& drop, const Op& put) {
        return commit.kind == OpKind::kCommit && commit.path.size() > 1 &&
               drop.kind == OpKind::kDrop && drop.seq == commit.seq &&
               put.kind == OpKind::kPut && put.segments[0].seq == commit.seq;
      });
  EXPECT_GE(back, 220);  // 295.
}

TEST(Histories, CommitNothingAfterSeveralLevels) {
  int empty = 0;
  int commits = 0;
  for (std::uint64_t number = 0; number < 100; ++number) {
    const History history = MakeSpeculation(1, number, Kind::kSwa, 15, 0);
    int levels = 0;
    for (const Op& op : history.ops) {
      if (op.kind == OpKind::kPut) {
        levels += op.segments.front().parents.empty() ? 0 : 1;
      }
      if (op.kind != OpKind::kCommit) continue;
      commits += levels > 1 ? 1 : 0;
      empty += levels > 1 && op.path.empty() ? 1 : 0;
      levels = 0;
    }
  }
  EXPECT_GE(empty,
            commits * 3 / 10);  // 120 of 329; without extra ones, 59 of 322.
}

// Commits take more than 12 drafts of a chain; removals and copies end among
// the drafts.
TEST(Speculations, HaveLongChainsAndCutThem) {
  int long_paths = 0;
  int cuts = 0;
  for (std::uint64_t number = 0; number < 100; ++number) {
    const History history = MakeSpeculation(1, number, Kind::kSwa, 15, 0);
    for (const Op& op : history.ops) {
      const bool of_first =
          std::ranges::all_of(op.path, [](int i) { return i == 0; });
      long_paths += op.path.size() > 12 && of_first ? 1 : 0;
      const RelativePos at = op.kind == OpKind::kDrop ? op.begin : op.end;
      const bool cut = op.kind == OpKind::kDrop || op.kind == OpKind::kCopy;
      cuts += cut && at.from_end && at.offset > 1 ? 1 : 0;
    }
  }
  EXPECT_GE(long_paths, 1);  // 2; 0 without such chains.
  EXPECT_GE(cuts, 15);       // 27; 0 without such cuts.
}

}  // namespace
}  // namespace kvtwin::props
