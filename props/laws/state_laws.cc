// The laws of recurrent state and of hybrids. Their client knows the tokens of
// each sequence and nothing of cells: the state after a token is the hash of
// all tokens up to it. It plays the operations of any history on a cache of its
// own spec.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/base/hash.h"
#include "props/laws/alike.h"

namespace kvtwin::props {
namespace {

// Four numbers that an f32 holds exactly: two in the K row, two in the V row.
using StateRow = std::array<float, 4>;

StateRow RowOfFold(std::uint64_t fold) {
  StateRow row;
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<float>(fold >> (16 * i) & 0xFFFF);
  }
  return row;
}

// A cache, and what its client knows of it.
class StateClient {
 public:
  // `every` and `kept` are the checkpoints of a recurrent cache.
  StateClient(std::unique_ptr<Cache> cache, const Setup& setup, bool hybrid)
      : cache_(std::move(cache)), setup_(setup), hybrid_(hybrid) {}

  // Makes a client of a cache like that of the history; null if the subject has
  // no such cache.
  static std::unique_ptr<StateClient> Make(const History& history,
                                           const Subject& subject, int policy,
                                           bool hybrid);

  std::int64_t judged = 0;
  // The first difference; empty if the law holds.
  std::string wrong;

  void Do(const Op& op);
  // Makes a batch of `count` tokens, or what there is room for, and checks the
  // state that it reads.
  void Append(int seq, int count);
  // Makes a tree of up to `count` drafts in one or two batches, checks the
  // states that they read, and commits a path.
  void Draft(int seq, int count);
  // Pins the last state.
  void Pin(int seq);
  void Remove(int seq, std::int32_t begin);
  void Copy(int src, int dst, std::int32_t len);
  // Snapshot, and Restore.
  void Reload();

  int sequences() const { return setup_.init.max_sequences; }
  std::int32_t Length(int seq) { return AsInt(folds_[seq].size()); }
  // Returns the greatest position up to `pos` where `seq` can resume.
  std::int32_t ResumeBefore(int seq, std::int32_t pos) {
    const Result<std::int32_t> at = cache_->ResumeBefore(seq, pos);
    Expect(at.ok() && *at <= pos, "ResumeBefore({}, {}) is {}", seq, pos,
           at.ok() ? *at : -1);
    return at.ok() ? *at : 0;
  }
  bool CanResume(int seq, std::int32_t pos) {
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() && *can;
  }
  Cache& cache() { return *cache_; }
  const Setup& setup() const { return setup_; }

 private:
  template <class... Args>
  void Expect(bool right, fmt::format_string<Args...> text, Args&&... args) {
    ++judged;
    if (right || !wrong.empty()) return;
    wrong = fmt::format(text, std::forward<Args>(args)...);
  }
  // The layer of the states: of a hybrid, its second cache has it.
  void GoToStates() {
    if (hybrid_) Expect(cache_->SetLayerType(1).ok(), "SetLayerType(1)");
  }
  // The fold of a state, 0 if there is none.
  using Folds = std::vector<std::uint64_t>;
  // The drafts of a sequence.
  struct Tree {
    Folds folds;
    std::vector<int> parents;
    std::vector<std::int32_t> positions;
  };
  std::uint64_t Next(std::uint64_t fold) {
    const std::uint64_t token = ++tokens_;
    return HashBytes(&token, sizeof(token), fold);
  }
  std::uint64_t LastFold(int seq) {
    return folds_[seq].empty() ? 0 : folds_[seq].back();
  }
  void Grow(int seq, int count, Tree& tree);
  void StartDrafts(int seq, const Tree& tree, int first);
  void CheckRead(int seq, const Folds& expected);
  void PutStates(const Folds& folds);
  void CheckPins();
  void CheckResumes(int seq, std::int32_t before);
  void CheckEnds();
  bool Continues(int seq);

  std::unique_ptr<Cache> cache_;
  const Setup setup_;
  const bool hybrid_;
  bool put_ = false;
  std::uint64_t tokens_ = 0;
  // For each sequence, the fold of its tokens up to each token.
  std::map<int, Folds> folds_;
  std::map<int, std::vector<std::int32_t>> pins_;  // Lengths.
};

CacheSpec StateSpecOf(const Setup& setup, const Abilities& can, int policy,
                      bool hybrid) {
  const int size = setup.init.capacity + setup.init.max_batch;
  CacheSpec recurrent;
  recurrent.kind = Kind::kRecurrent;
  recurrent.placement = setup.spec.placement;
  recurrent.checkpoint_every = 1 + (size + policy) % 4;
  recurrent.checkpoints = (setup.init.capacity + 2 * policy) % 4;
  if (can.Can(KVTWIN_CAN_PIN)) recurrent.pins = 2;
  if (can.CanDraft(Kind::kRecurrent)) recurrent.drafts = 8;
  if (!hybrid) return recurrent;
  CacheSpec causal;
  causal.placement = setup.spec.placement;
  CacheSpec windowed = causal;
  windowed.kind = Kind::kSwa;
  windowed.window = 1 + size % 5;
  CacheSpec spec;
  spec.kind = Kind::kHybrid;
  spec.placement = setup.spec.placement;
  spec.caches = {causal, recurrent, windowed};
  return spec;
}

std::unique_ptr<StateClient> StateClient::Make(const History& history,
                                               const Subject& subject,
                                               int policy, bool hybrid) {
  Setup setup = history.setup;
  setup.spec = StateSpecOf(setup, subject.abilities, policy, hybrid);
  setup.rows = {.k_head_dim = 2, .kv_heads = 1, .v_head_dim = 2};
  setup.layers = hybrid ? 3 : 1;
  setup.init.dtype = DType::kF32;
  setup.config = CacheConfig();
  setup.first_id = 0;
  setup.id_step = 1;
  for (int* size : {&setup.init.max_sequences, &setup.init.capacity,
                    &setup.init.max_batch}) {
    *size = std::clamp(*size, 1, 16);
  }
  const Abilities& can = subject.abilities;
  const bool all = can.Can(KVTWIN_CAN_SHARE) && can.max_position == 0 &&
                   !can.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF);
  if (!subject.is_twin() && !(all && can.Fits(setup))) return nullptr;
  Result<std::unique_ptr<Cache>> cache = subject.Make(setup);
  if (!cache.ok()) return nullptr;
  if (!(*cache)->SetConfig(setup.config).ok()) return nullptr;
  if (!(*cache)->Init(setup.init).ok()) return nullptr;
  return std::make_unique<StateClient>(std::move(*cache), setup, hybrid);
}

// Checks that each row of the batch reads the state of this fold, and no other.
void StateClient::CheckRead(int seq, const Folds& expected) {
  GoToStates();
  if (!put_) return;
  const Result<KvView> view = cache_->Get();
  Expect(view.ok(), "Get is {}", view.status().ToString());
  if (!view.ok()) return;
  for (int row = 0; row < Size(expected); ++row) {
    const StateRow state = RowOfFold(At(expected, row));
    int seen = 0;
    bool same = true;
    for (std::int64_t column = 0; column < view->mask.shape[0]; ++column) {
      if (!MaskAllows(view->mask, column, row)) continue;
      ++seen;
      for (int i = 0; i < 2; ++i) {
        same = same && LoadFrom(view->key, i, 0, column, 0) == At(state, i) &&
               LoadFrom(view->value, i, 0, column, 0) == At(state, i + 2);
      }
    }
    Expect(seen == (At(expected, row) == 0 ? 0 : 1),
           "row {} of sequence {} sees {} states", row, seq, seen);
    Expect(same, "row {} of sequence {} sees another state than it continues",
           row, seq);
  }
}

// Puts the states of the batch; rows without a cell hold anything.
void StateClient::PutStates(const Folds& folds) {
  GoToStates();
  std::vector<float> keys;
  std::vector<float> values;
  const auto cells = cache_->BatchCells();
  for (int i = 0; i < Size(folds); ++i) {
    const bool stored = i < Size(cells) && At(cells, i) >= 0;
    const StateRow row = RowOfFold(stored ? At(folds, i) : ~std::uint64_t{0});
    keys.insert(keys.end(), {row[0], row[1]});
    values.insert(values.end(), {row[2], row[3]});
  }
  const Shape shape = {2, 1, std::ssize(folds), 1};
  const Status put = cache_->Put(DenseView(keys.data(), DType::kF32, shape),
                                 DenseView(values.data(), DType::kF32, shape));
  Expect(put.ok(), "Put is {}", put.ToString());
  put_ = true;
}

// Whether a batch at another position than the end is refused (R3).
bool StateClient::Continues(int seq) {
  const std::array<std::int32_t, 1> wrong_position = {Length(seq) + 1};
  const std::array<int, 1> sequence = {seq};
  const Status status = cache_->StartForward(
      {.positions = wrong_position, .sequences = sequence}, false);
  return status.code() == StatusCode::kInvalidArgument;
}

void StateClient::Append(int seq, int count) {
  const std::int32_t length = Length(seq);
  count =
      std::min({count, setup_.init.max_batch, setup_.init.capacity - length});
  if (count < 1) return Remove(seq, length / 2);
  Expect(Continues(seq), "a batch that leaves a gap is not refused");
  std::vector<std::int32_t> positions;
  for (int i = 0; i < count; ++i) positions.push_back(length + i);
  const std::vector<int> sequences(AsSize(count), seq);
  const Status status = cache_->StartForward(
      {.positions = positions, .sequences = sequences}, false);
  Expect(status.ok(), "a batch at the end, {}, is {}", length,
         status.ToString());
  if (!status.ok()) return;
  const Folds read(AsSize(count), LastFold(seq));
  CheckRead(seq, read);
  Folds added;
  for (int i = 0; i < count; ++i) {
    added.push_back(Next(added.empty() ? LastFold(seq) : added.back()));
  }
  PutStates(added);
  CheckRead(seq, read);  // It is not overwritten.
  folds_[seq].insert(folds_[seq].end(), added.begin(), added.end());
  CheckResumes(seq, length);
}

// Adds `count` drafts to the tree; three of four follow the last one.
void StateClient::Grow(int seq, int count, Tree& tree) {
  for (int i = 0; i < count; ++i) {
    const int number = Size(tree.folds);
    const auto any = static_cast<int>(Next(0) % 64);
    const int parent = any % 4 > 0 ? number - 1 : any / 4 % (number + 1) - 1;
    tree.parents.push_back(parent);
    tree.positions.push_back(parent < 0 ? Length(seq)
                                        : At(tree.positions, parent) + 1);
    tree.folds.push_back(
        Next(parent < 0 ? LastFold(seq) : At(tree.folds, parent)));
  }
}

// Makes a batch of the drafts from number `first` on. Each reads the state of
// the last draft before these that it follows (R12).
void StateClient::StartDrafts(int seq, const Tree& tree, int first) {
  const auto from = AsSize(first);
  const auto positions = std::span(tree.positions).subspan(from);
  const std::vector<int> sequences(positions.size(), seq);
  const Status status =
      cache_->StartForward({.positions = positions,
                            .sequences = sequences,
                            .parents = std::span(tree.parents).subspan(from)},
                           false);
  Expect(status.ok(), "a batch of drafts is {}", status.ToString());
  if (!status.ok()) return;
  Folds read;
  for (int i = first; i < Size(tree.folds); ++i) {
    int number = i;
    while (number >= first) number = At(tree.parents, number);
    read.push_back(number < 0 ? LastFold(seq) : At(tree.folds, number));
  }
  CheckRead(seq, read);
  PutStates({tree.folds.begin() + first, tree.folds.end()});
  CheckRead(seq, read);
}

void StateClient::Draft(int seq, int count) {
  const std::int32_t length = Length(seq);
  count = std::min(
      {count, setup_.init.max_batch, setup_.init.capacity - length, 8});
  if (count < 1) return Remove(seq, length / 2);
  Tree tree;
  const int level = Next(0) % 2 == 0 ? count : (count + 1) / 2;
  Grow(seq, level, tree);
  StartDrafts(seq, tree, 0);
  if (level < count) {
    Grow(seq, count - level, tree);
    StartDrafts(seq, tree, level);
  }
  std::vector<int> path;
  const auto chosen = static_cast<int>(Next(0) % (AsSize(count) + 1)) - 1;
  for (int at = chosen; at >= 0; at = At(tree.parents, at)) path.push_back(at);
  std::ranges::reverse(path);
  const Status status = cache_->Commit(seq, path);
  Expect(status.ok(), "Commit is {}", status.ToString());
  for (const int number : path) {
    folds_[seq].push_back(At(tree.folds, number));
  }
  CheckResumes(seq, length);
}

void StateClient::Pin(int seq) {
  const Status status = cache_->Checkpoint(seq);
  Expect(status.ok(), "Checkpoint is {}", status.ToString());
  std::vector<std::int32_t>& pins = pins_[seq];
  const std::int32_t length = Length(seq);
  if (length == 0 || (!pins.empty() && pins.back() == length)) return;
  pins.push_back(length);
  if (pins.size() > 2) pins.erase(pins.begin());
}

// A sequence can resume where a state is pinned (R14, R15).
void StateClient::CheckPins() {
  for (const auto& [seq, pins] : pins_) {
    for (const std::int32_t length : pins) {
      Expect(CanResume(seq, length), "sequence {} cannot resume at its pin {}",
             seq, length);
    }
  }
}

// After a batch, or the commit of a path, the sequence can resume at its end,
// before the batch, and at the last checkpoints of the batch (R4, R5, R13).
void StateClient::CheckResumes(int seq, std::int32_t before) {
  if (hybrid_) return;
  const CacheSpec& spec = setup_.spec;
  std::vector<std::int32_t> expected = {before, Length(seq)};
  int left = spec.checkpoints;
  for (std::int32_t at = Length(seq); at > before && left > 0; --at) {
    if (at % spec.checkpoint_every != 0) continue;
    expected.push_back(at);
    --left;
  }
  for (const std::int32_t at : expected) {
    Expect(CanResume(seq, at), "sequence {} cannot resume at {}", seq, at);
  }
  int states = 0;
  for (std::int32_t at = 1; at <= Length(seq); ++at) {
    states += CanResume(seq, at) ? 1 : 0;
  }
  Expect(states <= spec.checkpoints + 2 + spec.pins,
         "sequence {} keeps {} states", seq, states);
}

void StateClient::Remove(int seq, std::int32_t begin) {
  const std::int32_t at = ResumeBefore(seq, std::min(begin, Length(seq)));
  const Status status = cache_->Remove(seq, begin, kOpenEnd);
  Expect(status.ok(), "Remove is {}", status.ToString());
  if (begin < Length(seq)) folds_[seq].resize(AsSize(at));
  std::erase_if(pins_[seq], [&](std::int32_t pin) { return pin > begin; });
}

void StateClient::Copy(int src, int dst, std::int32_t len) {
  const std::int32_t at = ResumeBefore(src, len);
  const Status status = cache_->CopyPrefix(src, dst, len);
  Expect(status.ok(), "CopyPrefix is {}", status.ToString());
  std::vector<std::uint64_t> folds = folds_[src];
  folds.resize(AsSize(std::min(at, Length(src))));
  folds_[dst] = std::move(folds);
  pins_[dst] = pins_[src];
  std::erase_if(pins_[dst], [&](std::int32_t pin) { return pin > len; });
}

void StateClient::Reload() {
  const Result<CacheState> state = cache_->Snapshot();
  if (!state.ok()) return;
  const Status status = cache_->Restore(*state);
  Expect(status.ok(), "Restore is {}", status.ToString());
  pins_.clear();
}

// Every cache of a hybrid ends where the client's sequence ends (H3).
void StateClient::CheckEnds() {
  if (!hybrid_) return;
  std::vector<CellEntry> entries;
  for (int type = 0; type < 3; ++type) {
    Expect(cache_->SetLayerType(type).ok(), "SetLayerType({})", type);
    cache_->ListCells(entries);
    for (int seq = 0; seq < sequences(); ++seq) {
      std::int32_t end = 0;
      for (const CellEntry& entry : entries) {
        if (entry.sequence == seq) end = std::max(end, entry.position + 1);
      }
      Expect(end == Length(seq),
             "sequence {} has {} tokens, cache {} ends at {}", seq, Length(seq),
             type, end);
    }
  }
  for (int seq = 0; seq < sequences(); ++seq) {
    const std::int32_t end = Length(seq);
    Expect(end == 0 || CanResume(seq, end), "sequence {} cannot resume at {}",
           seq, end);
  }
}

void StateClient::Do(const Op& op) {
  const auto seq_of = [&](int seq) { return seq % sequences(); };
  const auto at = [&](const RelativePos& pos) {
    const int from = pos.from_end ? Length(seq_of(op.seq)) : 0;
    return std::clamp(from + std::min(pos.offset, 1 << 20), 0, 1 << 20);
  };
  switch (op.kind) {
    case OpKind::kPut:
      for (const Segment& segment : op.segments) {
        Append(seq_of(segment.seq), std::min(segment.count, 16));
      }
      break;
    case OpKind::kDrop:
      Remove(seq_of(op.seq), at(op.begin));
      break;
    case OpKind::kCopy:
      Copy(seq_of(op.seq), seq_of(op.dst), at(op.end));
      break;
    case OpKind::kReload:
      Reload();
      break;
    default:
      ResumeBefore(seq_of(op.seq), at(op.end));
  }
  CheckEnds();
  CheckPins();
}

LawResult ResultOf(const StateClient& client) {
  if (!client.wrong.empty()) return Violation(client.wrong);
  return {.judged = client.judged};
}

LawResult PlayStates(const History& history, const Subject& subject,
                     bool hybrid) {
  const auto client = StateClient::Make(history, subject, 0, hybrid);
  if (client == nullptr) return {};
  for (const Op& op : history.ops) client->Do(op);
  return ResultOf(*client);
}

LawResult StateIsAFold(const History& history, const Subject& subject) {
  return PlayStates(history, subject, /*hybrid=*/false);
}

// Every second batch is a tree of drafts.
LawResult DraftsAreFolds(const History& history, const Subject& subject) {
  if (!subject.abilities.CanDraft(Kind::kRecurrent)) return {};
  const auto client = StateClient::Make(history, subject, 0, /*hybrid=*/false);
  if (client == nullptr) return {};
  bool drafts = false;
  for (const Op& op : history.ops) {
    drafts = op.kind == OpKind::kPut && !drafts;
    if (!drafts) {
      client->Do(op);
      continue;
    }
    for (const Segment& segment : op.segments) {
      client->Draft(segment.seq % client->sequences(),
                    std::min(segment.count, 16));
    }
  }
  return ResultOf(*client);
}

// Every third operation is followed by a Checkpoint.
LawResult PinsStay(const History& history, const Subject& subject) {
  if (!subject.abilities.Can(KVTWIN_CAN_PIN)) return {};
  const auto client = StateClient::Make(history, subject, 0, /*hybrid=*/false);
  if (client == nullptr) return {};
  int count = 0;
  for (const Op& op : history.ops) {
    client->Do(op);
    if (++count % 3 > 0) continue;
    const int seq = op.kind == OpKind::kPut ? op.segments.front().seq : op.seq;
    client->Pin(seq % client->sequences());
  }
  return ResultOf(*client);
}

LawResult HybridOneLength(const History& history, const Subject& subject) {
  return PlayStates(history, subject, /*hybrid=*/true);
}

// Both clients go back to the same position, and read the state there. Their
// states are folds of the same tokens.
LawResult PolicyIsInvisible(const History& history, const Subject& subject) {
  const auto left = StateClient::Make(history, subject, 0, /*hybrid=*/false);
  const auto right = StateClient::Make(history, subject, 1, /*hybrid=*/false);
  if (left == nullptr || right == nullptr) return {};
  const auto both = [&](int seq, std::int32_t pos) {
    std::int32_t at = pos;
    do {
      pos = at;
      at = right->ResumeBefore(seq, left->ResumeBefore(seq, pos));
    } while (at != pos);
    return at;
  };
  for (const Op& op : history.ops) {
    const bool put = op.kind == OpKind::kPut;
    const int seq =
        (put ? op.segments.front().seq : op.seq) % left->sequences();
    const int dst = op.dst % left->sequences();
    const bool full = left->Length(seq) == left->setup().init.capacity;
    const std::int32_t at = both(seq, left->Length(seq) / 2);
    for (StateClient* client : {left.get(), right.get()}) {
      if (put && !full) {
        client->Append(seq, std::min(op.segments.front().count, 16));
      } else if (put || op.kind == OpKind::kDrop) {
        client->Remove(seq, at);
      } else if (op.kind == OpKind::kCopy && seq != dst) {
        client->Copy(seq, dst, at);
      }
    }
    if (left->Length(seq) != right->Length(seq)) {
      return Violation("the lengths differ after a step to a common position");
    }
  }
  return left->wrong.empty() ? ResultOf(*right) : ResultOf(*left);
}

}  // namespace

std::vector<Law> StateLaws() {
  // ResumeBefore of a third-party cache asks for its cells.
  constexpr unsigned kNeeds = kNeedsStates | kNeedsRemove | kNeedsCopy |
                              kNeedsResume | kNeedsMisuse | kNeedsCells;
  return {
      {"state_is_a_fold",
       "A batch reads the state that the sequence's tokens before it make, and "
       "can be taken back.",
       "R1, R2, R3, R4, R5, R6, R7, R8, R10", StateIsAFold, kNeeds},
      {"drafts_are_folds",
       "A draft reads the state from which its fold continues, and a committed "
       "path leaves the same states as a batch.",
       "D1, D5, R11, R12, R13", DraftsAreFolds,
       kNeeds | kNeedsDrafts | kNeedsTrees},
      {"pins_stay",
       "A sequence, and its forks, can resume at their last pinned states "
       "until these are removed.",
       "R14, R15", PinsStay, kNeeds},
      {"policy_is_invisible",
       "Caches with different checkpoints serve the same states wherever both "
       "can resume.",
       "R4, R8, R9", PolicyIsInvisible, kNeeds},
      {"one_length",
       "All caches of a hybrid end at the same position, where the sequence "
       "can resume.",
       "H1, H2, H3, H4", HybridOneLength, kNeeds | kNeedsHybrids},
  };
}

}  // namespace kvtwin::props
