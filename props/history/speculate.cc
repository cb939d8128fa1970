#include "props/history/speculate.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/history/generate.h"
#include "props/history/misuse.h"

namespace kvtwin::props {
namespace {

// Writes what a server with speculative decoding does with one sequence.
class Speculation {
 public:
  Speculation(const Pick& pick, const Setup& setup, std::vector<Op>& ops)
      : pick_(pick), setup_(setup), ops_(ops) {}

  void Add(int seq) {
    if (Chance(pick_, 12)) return AddChain(seq);
    const int levels = OneOf(pick_, {1, 1, 1, 2, 2, 3, 4});
    for (int level = 0; level < levels; ++level) {
      Draft(seq, level);
      if (Chance(pick_, 20)) Between(seq);
    }
    if (Chance(pick_, 10)) return;  // No commit: the next batch is refused.
    Commit(seq, /*nothing=*/levels > 1 && Chance(pick_, 30));
    if (Chance(pick_, 40)) Between(seq);
  }

 private:
  int AnySequence() { return pick_(0, setup_.init.max_sequences); }

  // A chain over several batches, of which a commit takes many drafts: masks of
  // 32 bits and limits of 16 drafts show nowhere else.
  void AddChain(int seq) {
    const int most = std::min(setup_.init.max_batch, 12);
    int all = 0;
    for (int batches = pick_(1, 4); batches > 0; --batches) {
      Segment& drafts = ops_.emplace_back().segments.emplace_back();
      drafts.seq = seq;
      drafts.count = pick_(std::min(most, 4), most);
      drafts.parents = {all - 1};
      all += drafts.count;
    }
    Op& commit = ops_.emplace_back();
    commit.kind = OpKind::kCommit;
    commit.seq = seq;
    commit.path.assign(AsSize(pick_(0, all)), 0);
  }

  // A Remove or a copy that may end among the drafts, or after them.
  void CutDrafts(int seq) {
    Op& op = ops_.emplace_back();
    op.seq = seq;
    // From the last committed token to a draft of the fifth level.
    const RelativePos at = {.from_end = true, .offset = pick_(-1, 5)};
    if (Chance(pick_, 50)) {
      op.kind = OpKind::kDrop;
      op.begin = at;
      op.open = true;
    } else {
      op.kind = OpKind::kCopy;
      op.dst = AnySequence();
      op.end = at;
    }
  }

  void Draft(int seq, int level) {
    Op& put = ops_.emplace_back();
    Segment& drafts = put.segments.emplace_back();
    drafts.seq = seq;
    drafts.count =
        Chance(pick_, 90) ? pick_(1, 6) : pick_(1, setup_.init.max_batch);
    drafts.parents = Parents(drafts.count, level);
    if (Chance(pick_, 20)) {  // Another sequence, with or without drafts.
      Segment& other = put.segments.emplace_back();
      other.seq = AnySequence();
      other.count = pick_(1, 3);
      if (Chance(pick_, 50)) other.parents = Parents(other.count, 0);
      if (Chance(pick_, 50)) std::swap(put.segments[0], put.segments[1]);
    }
    put.reserve = Chance(pick_, 3);
    put.keep_rows = Chance(pick_, 2);
    put.single = Chance(pick_, 5);
    if (Chance(pick_, 10)) put.except.push_back(pick_(0, 7));
    if (Chance(pick_, 5)) put.images.push_back(pick_(0, 7));
  }

  // A chain, siblings, or any tree. The first level has no drafts before it.
  std::vector<int> Parents(int count, int level) {
    const int way = pick_(0, 9);
    const int begin =
        level == 0 || Chance(pick_, 15) ? kCommitted : pick_(0, 12);
    if (way < 3) return {begin};
    std::vector<int> parents(AsSize(count), begin);
    if (way < 5) return parents;
    for (int i = 1; i < count; ++i) {
      At(parents, i) = pick_(kCommitted, i + (level == 0 ? -1 : 12));
    }
    return parents;
  }

  // If it takes `nothing`, the next tokens see what was there before the
  // drafts: no draft of any level has evicted it.
  void Commit(int seq, bool nothing) {
    Op& commit = ops_.emplace_back();
    commit.kind = OpKind::kCommit;
    commit.seq = Chance(pick_, 95) ? seq : AnySequence();
    if (nothing) return;
    const int length = Chance(pick_, 60) ? pick_(0, 3) : pick_(0, 12);
    for (int i = 0; i < length; ++i) commit.path.push_back(pick_(0, 2));
    // Goes back into the path: a state that the commit kept must be of it.
    if (length > 1 && Chance(pick_, 40)) GoBack(seq, -pick_(1, length), ops_);
  }

  // Calls while there are drafts, or right after a commit in the pass.
  void Between(int seq) {
    const int way = pick_(0, 9);
    if (way < 2) {
      Op& op = ops_.emplace_back();
      op.kind = OpKind::kCausal;
      if (Chance(pick_, 50)) op.except.push_back(pick_(0, 7));
    } else if (way < 4) {
      ops_.emplace_back().kind =
          OneOf(pick_, {OpKind::kGet, OpKind::kReput, OpKind::kPoison});
    } else if (way < 5) {
      Op& op = ops_.emplace_back();
      op.kind = OneOf(pick_, {OpKind::kSnapshot, OpKind::kAdd});
      op.seq = seq;
      op.dst = AnySequence();
    } else if (way < 6) {
      Op& op = ops_.emplace_back();
      op.kind = OpKind::kMisuse;
      op.misuse = kDraftMisuse + pick_(0, DraftMisuseCount() - 1);
    } else if (way < 7) {
      CutDrafts(seq);
    } else {
      // Put, drop, copy, ask, reload.
      const Weights any = {4, 10, 12, 8, 0, 0, 0, 2, 0, 1};
      ops_.push_back(DrawOp(pick_, setup_, any, {seq}));
    }
  }

  const Pick& pick_;
  const Setup& setup_;
  std::vector<Op>& ops_;
};

}  // namespace

void Speculate(const Pick& pick, History& history) {
  std::vector<Op> ops;
  Speculation speculation(pick, history.setup, ops);
  int seq = 0;  // The last sequence that got tokens.
  const auto last = pick(0, std::max(Size(history.ops) - 1, 0));
  int i = 0;
  for (Op& op : history.ops) {
    if (op.kind == OpKind::kPut) seq = op.segments.front().seq;
    ops.push_back(std::move(op));
    if (i++ == last || Chance(pick, 25)) speculation.Add(seq);
  }
  if (history.ops.empty()) speculation.Add(0);
  history.ops = std::move(ops);
}

void AddDrafts(const Pick& pick, int cells_max, History& history) {
  // An encoder refuses all drafts of its wrapper.
  auto& caches = history.setup.spec.caches;
  const auto is_encoder = [](const CacheSpec& spec) {
    return spec.kind == Kind::kEncoder;
  };
  if (!std::ranges::all_of(caches, is_encoder) && Chance(pick, 80)) {
    std::erase_if(caches, is_encoder);
  }
  const auto make_room = [&](CacheSpec& spec) {
    if (spec.kind != Kind::kRecurrent || Chance(pick, 3)) return;
    spec.drafts = OneOf(pick, {1, 2, 3, 4, 6, 8, 8});
  };
  make_room(history.setup.spec);
  std::ranges::for_each(caches, make_room);
  if (cells_max > 0) LimitCells(cells_max, history.setup);
  Speculate(pick, history);
}

History MakeSpeculation(std::uint64_t seed, std::uint64_t number,
                        std::optional<Kind> kind, int ops, int cells_max) {
  const Pick pick = SeededPick(~seed, number);
  if (!kind) {
    kind = OneOf(pick, {Kind::kCausal, Kind::kCausal, Kind::kSwa, Kind::kSwa,
                        Kind::kSwaMem, Kind::kSwaMem, Kind::kChunked,
                        Kind::kWrapper, Kind::kWrapper});
  }
  History history =
      MakeHistory(seed, number, kind, ops, cells_max, /*rarities=*/true);
  AddDrafts(pick, cells_max, history);
  return history;
}

}  // namespace kvtwin::props
