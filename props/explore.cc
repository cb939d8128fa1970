#include "props/explore.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <istream>
#include <numeric>
#include <ostream>
#include <thread>
#include <utility>

#include "core/elements.h"
#include "core/names.h"
#include "props/check_name.h"
#include "props/entitlement.h"
#include "reference/ledger.h"

namespace kvtwin::props {
namespace {

// A state: the cells as digits, cell 0 lowest. 0 is a free cell, and
// 1 + position * (2^sequences - 1) + owners - 1 a held one, owners being a set
// of bits. Of all that renaming its sequences gives, the least is its name.
using Key = std::uint64_t;

constexpr double kMostStates = 4e9;  // A bit for each, half a gigabyte.
constexpr int kKeyDims = 2;
constexpr std::size_t kMaxBatch = 2;

// The row of a token: its tag, and what tag_add shifts.
constexpr int kPositionBase = 1000;
constexpr std::array<float, kMaxBatch> kBatchTags = {101, 102};

struct Step {
  OpKind kind = OpKind::kPut;  // kPut, kDrop, kCopy or kAsk.
  std::vector<std::int32_t> positions = {};
  std::vector<int> sequences = {};
  bool reserve = false;
  std::vector<int> except = {};  // Filled in where it mattered.
  int seq = 0;
  int dst = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// Batches of one token, and of two unless they only reserve: what those show
// does not depend on more than one token.
std::vector<Step> Batches(const ExploreSize& size, bool reserve) {
  std::vector<Step> steps;
  for (std::int32_t p = 0; p < size.positions; ++p) {
    for (int s = 0; s < size.sequences; ++s) {
      steps.push_back({.positions = {p}, .sequences = {s}});
    }
  }
  const std::size_t singles = reserve ? 0 : steps.size();
  for (std::size_t i = 0; i < singles; ++i) {
    for (std::size_t j = 0; j < singles; ++j) {
      Step both = steps[i];
      both.positions.push_back(steps[j].positions[0]);
      both.sequences.push_back(steps[j].sequences[0]);
      steps.push_back(both);
    }
  }
  for (Step& step : steps) step.reserve = reserve;
  return steps;
}

std::vector<Step> AllSteps(const ExploreSize& size) {
  std::vector<Step> steps;
  for (int s = 0; s < size.sequences; ++s) {
    for (std::int32_t p = 0; p <= size.positions + 1; ++p) {
      steps.push_back({.kind = OpKind::kAsk, .seq = s, .end = p});
    }
  }
  for (const bool reserve : {true, false}) {
    for (Step& step : Batches(size, reserve)) steps.push_back(std::move(step));
  }
  for (int s = 0; s < size.sequences; ++s) {
    for (std::int32_t begin = 0; begin <= size.positions; ++begin) {
      for (std::int32_t end = begin; end <= size.positions; ++end) {
        steps.push_back(
            {.kind = OpKind::kDrop, .seq = s, .begin = begin, .end = end});
      }
      steps.push_back(
          {.kind = OpKind::kDrop, .seq = s, .begin = begin, .end = kOpenEnd});
    }
    for (int dst = 0; dst < size.sequences; ++dst) {
      for (std::int32_t len = 0; len <= size.positions; ++len) {
        steps.push_back(
            {.kind = OpKind::kCopy, .seq = s, .dst = dst, .end = len});
      }
    }
  }
  return steps;
}

std::string ToText(const Step& step) {
  switch (step.kind) {
    case OpKind::kPut: {
      std::string text = fmt::format(
          "StartForward(positions [{}], sequences [{}]{})",
          fmt::join(step.positions, " "), fmt::join(step.sequences, " "),
          step.reserve ? ", reserve" : "");
      if (!step.except.empty()) {
        text += fmt::format(", SetCausal([{}])", fmt::join(step.except, " "));
      }
      return text;
    }
    case OpKind::kDrop:
      return fmt::format(
          "Remove({}, {}, {})", step.seq, step.begin,
          step.end == kOpenEnd ? "open" : fmt::to_string(step.end));
    case OpKind::kCopy:
      return fmt::format("CopyPrefix({}, {}, {})", step.seq, step.dst,
                         step.end);
    default:
      return fmt::format("CanResume({}, {})", step.seq, step.end);
  }
}

// Thrown at a difference, caught where the step is known.
struct Differs {
  std::string check;
  std::string text;
};

void Check(bool holds, CheckName check, std::string_view text) {
  if (!holds) throw Differs{std::string(check.name()), std::string(text)};
}

// Keys and what they stand for.
class Codec {
 public:
  explicit Codec(const ExploreSize& size)
      : size_(size), owner_sets_((1 << size.sequences) - 1) {
    std::vector<int> names(static_cast<std::size_t>(size.sequences));
    std::iota(names.begin(), names.end(), 0);
    do {
      renamings_.push_back(names);
    } while (std::next_permutation(names.begin(), names.end()));
    for (const std::vector<int>& renaming : renamings_) {
      std::vector<Key> digits = {0};
      for (Key position = 0; position < PositionCount(); ++position) {
        for (Key owners = 1; owners <= owner_sets_; ++owners) {
          Key renamed = 0;
          for (std::size_t s = 0; s < names.size(); ++s) {
            if ((owners >> s & 1) != 0) renamed |= Key{1} << renaming[s];
          }
          digits.push_back(Digit(position, renamed));
        }
      }
      renamed_digits_.push_back(digits);
    }
  }

  Key digits() const { return 1 + PositionCount() * owner_sets_; }
  double keys() const {
    return std::pow(static_cast<double>(digits()), size_.cells);
  }

  CacheState Decode(Key key) const {
    CacheState state;
    KvRows& rows = state.layers[0];
    std::vector<float> keys;
    std::vector<float> values;
    for (int cell = 0; cell < size_.cells; ++cell, key /= digits()) {
      const Key digit = key % digits();
      if (digit == 0) continue;
      const auto position = static_cast<int>((digit - 1) / owner_sets_);
      const Key owners = (digit - 1) % owner_sets_ + 1;
      for (int s = 0; s < size_.sequences; ++s) {
        if ((owners >> s & 1) != 0) state.cells.push_back({cell, position, s});
      }
      keys.push_back(static_cast<float>(cell + 1));
      keys.push_back(static_cast<float>(kPositionBase + position));
      values.push_back(static_cast<float>(cell + 1));
    }
    const auto tensor = [](int dims, const std::vector<float>& elements) {
      DenseTensor made{DType::kF32,
                       {dims, 1, std::ssize(elements) / dims, 1},
                       std::vector<std::byte>(elements.size() * sizeof(float))};
      if (!elements.empty()) {
        std::memcpy(made.bytes.data(), elements.data(), made.bytes.size());
      }
      return made;
    };
    rows.key = tensor(kKeyDims, keys);
    rows.value = tensor(1, values);
    return state;
  }

  // The name of what `cells` hold. `renaming`, if given, is what it takes.
  Key Encode(const std::vector<CellEntry>& cells,
             const std::vector<int>** renaming = nullptr) const {
    std::array<Key, 64> owners{};
    std::array<Key, 64> positions{};
    for (const auto& [cell, position, sequence] : cells) {
      owners[static_cast<std::size_t>(cell)] |= Key{1} << sequence;
      positions[static_cast<std::size_t>(cell)] = static_cast<Key>(position);
    }
    Key least = ~Key{0};
    for (std::size_t r = 0; r < renamings_.size(); ++r) {
      Key key = 0;
      for (auto i = static_cast<std::size_t>(size_.cells); i-- > 0;) {
        const Key digit = owners[i] == 0 ? 0 : Digit(positions[i], owners[i]);
        key = key * digits() + renamed_digits_[r][digit];
      }
      if (key >= least) continue;
      least = key;
      if (renaming != nullptr) *renaming = &renamings_[r];
    }
    return least;
  }

 private:
  Key PositionCount() const { return static_cast<Key>(size_.positions); }
  Key Digit(Key position, Key owners) const {
    return 1 + position * owner_sets_ + owners - 1;
  }

  ExploreSize size_;
  Key owner_sets_;
  std::vector<std::vector<int>> renamings_;
  std::vector<std::vector<Key>> renamed_digits_;  // By renaming, by digit.
};

std::string CellsText(const std::vector<CellEntry>& cells) {
  std::string text;
  int last = -1;
  for (const auto& [cell, position, sequence] : cells) {
    text += cell == last ? fmt::format("+s{}", sequence)
                         : fmt::format(" {}:{}@s{}", cell, position, sequence);
    last = cell;
  }
  return text.empty() ? " none" : text;
}

// Of f32 tensors whose first dimension is dense.
bool SameBytes(const TensorView& a, const TensorView& b) {
  if (a.shape != b.shape) return false;
  const auto line = static_cast<std::size_t>(a.shape[0]) * sizeof(float);
  for (std::int64_t k = 0; k < a.shape[2]; ++k) {
    for (std::int64_t j = 0; j < a.shape[1]; ++j) {
      if (std::memcmp(a.at(0, j, k), b.at(0, j, k), line) != 0) return false;
    }
  }
  return true;
}

// Three caches that are put into one state after another.
class Worker {
 public:
  Worker(const Setup& setup, const Codec& codec, const Subject& subject)
      : codec_(codec),
        ledger_(setup.spec),
        reference_(std::move(*MakeCache(setup.spec, "reference"))),
        tested_(std::move(*subject.make(setup.spec))) {
    const InitArgs& init = setup.init;
    for (Cache* cache : {reference_.get(), tested_.get()}) {
      Check(cache->SetConfig(setup.config).ok() &&
                cache
                    ->Init(init.dtype, init.max_sequences, init.capacity,
                           init.max_batch)
                    .ok(),
            "subject: result", "Init is refused");
    }
    Check(ledger_.Init(setup.config, init).ok(), "reference: result",
          "Init is refused by the ledger");
  }

  int cells() const { return reference_->CellCount(); }

  void Enter(Key key) {
    state_ = codec_.Decode(key);
    Restore();
    Check(*reference_->Snapshot() == state_, "reference: snapshot",
          "what was restored is not what was saved");
    Check(*tested_->Snapshot() == state_, "subject: snapshot",
          "what was restored is not what was saved");
    CacheState damaged = state_;
    damaged.cells.push_back({cells(), 0, 0});
    Check(!tested_->Restore(damaged).ok() && *tested_->Snapshot() == state_,
          "subject: snapshot", "a damaged state is not refused");
  }

  // Does it, checks it, and returns the cells. `step.except` is changed on the
  // way, and holds what went wrong when a difference is thrown.
  const std::vector<CellEntry>& Do(Step& step, std::int64_t& checked) {
    if (changed_) Restore();
    ++checked;
    switch (step.kind) {
      case OpKind::kPut:
        DoBatch(step, checked);
        break;
      case OpKind::kDrop:
        CheckCodes(ledger_.Remove(step.seq, step.begin, step.end),
                   reference_->Remove(step.seq, step.begin, step.end),
                   tested_->Remove(step.seq, step.begin, step.end));
        break;
      case OpKind::kCopy:
        CheckCodes(ledger_.CopyPrefix(step.seq, step.dst, step.end),
                   reference_->CopyPrefix(step.seq, step.dst, step.end),
                   tested_->CopyPrefix(step.seq, step.dst, step.end));
        break;
      default: {
        const bool due = ledger_.CanResume(step.seq, step.end);
        Check(due == *reference_->CanResume(step.seq, step.end),
              "reference: resume", "not what the ledger says");
        Check(due == *tested_->CanResume(step.seq, step.end), "subject: resume",
              "not what the ledger says");
        return cells_;
      }
    }
    CheckAll();
    return cells_;
  }

 private:
  void Restore() {
    Check(reference_->Restore(state_).ok(), "reference: snapshot", "refused");
    Check(tested_->Restore(state_).ok(), "subject: snapshot", "refused");
    ledger_.Restore(state_);
    cells_ = state_.cells;
    changed_ = false;
  }

  static void CheckCodes(const Status& ledger, const Status& reference,
                         const Status& subject) {
    if (ledger.code() == reference.code() && ledger.code() == subject.code()) {
      return;
    }
    Check(ledger.code() == reference.code(), "reference: result",
          fmt::format("{} by the ledger, {} by the reference",
                      StatusName(ledger.code()), StatusName(reference.code())));
    Check(ledger.code() == subject.code(), "subject: result",
          fmt::format("{} is due, it is {}", StatusName(ledger.code()),
                      StatusName(subject.code())));
  }

  void DoBatch(Step& step, std::int64_t& checked) {
    const Batch batch{step.positions, step.sequences, {}};
    const Status status = tested_->StartForward(batch, step.reserve);
    CheckCodes(ledger_.StartForward(batch, step.reserve),
               reference_->StartForward(batch, step.reserve), status);
    if (!status.ok()) return;
    const auto due = reference_->BatchCells();
    const auto found = tested_->BatchCells();
    if (!std::equal(due.begin(), due.end(), found.begin(), found.end())) {
      Check(false, "subject: batch cells",
            fmt::format("the batch is in cells [{}], due are [{}]",
                        fmt::join(found, " "), fmt::join(due, " ")));
    }
    PutRows(step);
    CheckView();
    const auto tokens = static_cast<int>(step.positions.size());
    for (int set = 1; set < 1 << tokens; ++set) {
      step.except.clear();
      for (int i = 0; i < tokens; ++i) {
        if ((set >> i & 1) != 0) step.except.push_back(i);
      }
      ++checked;
      CheckCodes(ledger_.active().SetCausal(step.except),
                 reference_->SetCausal(step.except),
                 tested_->SetCausal(step.except));
      CheckView();
    }
    step.except.clear();
  }

  void PutRows(const Step& step) {
    const auto tokens = static_cast<std::int64_t>(step.positions.size());
    std::array<float, kKeyDims * kMaxBatch> keys{};
    for (std::size_t i = 0; i < step.positions.size(); ++i) {
      keys[i * kKeyDims] = kBatchTags[i];
      keys[i * kKeyDims + 1] =
          static_cast<float>(kPositionBase + step.positions[i]);
    }
    const TensorView key =
        DenseView(keys.data(), DType::kF32, {kKeyDims, 1, tokens, 1});
    const TensorView value =
        DenseView(kBatchTags.data(), DType::kF32, {1, 1, tokens, 1});
    ledger_.active().Put(0, key, value);
    CheckCodes({}, reference_->Put(key, value), tested_->Put(key, value));
  }

  void CheckView() {
    const Result<KvView> due = reference_->Get();
    const Result<KvView> found = tested_->Get();
    CheckCodes({}, due.status(), found.status());
    if (due->first_cell != found->first_cell ||
        due->mask.shape != found->mask.shape) {
      Check(false, "subject: view cells",
            fmt::format("the view is {} cells from {} on, due are {} from {}",
                        found->mask.shape[0], found->first_cell,
                        due->mask.shape[0], due->first_cell));
    }
    Check(SameBytes(due->mask, found->mask), "subject: mask bytes",
          "the masks are not equal");
    Check(
        SameBytes(due->key, found->key) && SameBytes(due->value, found->value),
        "subject: rows", "the rows of the view are not equal");
    const auto wrong = FindWrongRow(ledger_, 0, *due, false);
    if (wrong) Check(false, "reference: rows", wrong->text);
  }

  // Cells, positions, owners and rows, also of what no view shows.
  void CheckAll() {
    CheckCodes({}, reference_->SnapshotTo(due_), tested_->SnapshotTo(found_));
    cells_ = due_.cells;
    if (due_ != found_) {
      const bool cells = due_.cells != found_.cells;
      Check(false,
            cells ? CheckName("subject: cells") : CheckName("subject: rows"),
            cells ? fmt::format("cells are{}, due are{}",
                                CellsText(found_.cells), CellsText(due_.cells))
                  : "rows that the view does not show are not equal");
    }
    changed_ = due_ != state_;
    CheckTokens(due_);
  }

  // The reference's cells hold the ledger's tokens, with their rows.
  void CheckTokens(const CacheState& state) {
    const auto& tokens = ledger_.active().tokens();
    std::vector<bool> matched(tokens.size());
    std::int64_t row = -1;
    const KvRows& rows = state.layers.at(0);
    for (std::size_t i = 0; i < state.cells.size();) {
      const int cell = state.cells[i].cell;
      const std::int32_t position = state.cells[i].position;
      ++row;
      std::set<int> owners;
      for (; i < state.cells.size() && state.cells[i].cell == cell; ++i) {
        owners.insert(state.cells[i].sequence);
      }
      bool found = false;
      for (std::size_t t = 0; t < tokens.size() && !found; ++t) {
        const auto& token = tokens[t];
        if (matched[t] || token.position != position ||
            token.sequences != owners) {
          continue;
        }
        const KvRows& stored = token.rows.at(0);
        found =
            SameBytes(stored.key.view(), Slice(rows.key.view(), 2, row)) &&
            SameBytes(stored.value.view(), Slice(rows.value.view(), 2, row));
        matched[t] = found;
      }
      if (!found) {
        Check(false, "reference: tokens",
              fmt::format("cell {} of{} holds no token of the ledger", cell,
                          CellsText(state.cells)));
      }
    }
    Check(row + 1 == std::ssize(tokens), "reference: tokens",
          "the ledger has tokens that no cell holds");
  }

  const Codec& codec_;
  reference::Ledger ledger_;
  std::unique_ptr<Cache> reference_;
  std::unique_ptr<Cache> tested_;
  CacheState state_;
  CacheState due_;
  CacheState found_;
  bool changed_ = true;
  std::vector<CellEntry> cells_;
};

// How a state was first reached.
struct Origin {
  std::uint32_t state = 0;
  std::uint32_t step = 0;
};

class ExplorerOfKeys final : public Explorer {
 public:
  ExplorerOfKeys(const ExploreSize& size, const ExploreCase& what,
                 const Subject& subject)
      : size_(size),
        what_(what),
        subject_(subject),
        codec_(size),
        steps_(AllSteps(size)),
        seen_(static_cast<std::size_t>(codec_.keys())) {
    Add(0, {});
  }

  const ExploreResult& Run(
      int threads,
      const std::function<bool(const ExploreResult&)>& stop) override {
    const auto start = std::chrono::steady_clock::now();
    const double before = result_.seconds;
    while (expanded_ < keys_.size()) {
      const std::size_t count =
          std::min<std::size_t>(kRound, keys_.size() - expanded_);
      Expand(threads, count);
      result_.seconds = before + std::chrono::duration<double>(
                                     std::chrono::steady_clock::now() - start)
                                     .count();
      if (stop(result_)) break;
    }
    result_.fixed_point = expanded_ == keys_.size();
    return result_;
  }

  void Save(std::ostream& out) const override {
    out << Header() << '\n'
        << expanded_ << ' ' << keys_.size() << ' ' << result_.transitions << ' '
        << result_.differences << '\n';
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      out << keys_[i] << ' ' << origins_[i].state << ' ' << origins_[i].step
          << '\n';
    }
  }

  Status Load(std::istream& in) override {
    const auto bad = [](std::string_view why) {
      return Status(StatusCode::kInvalidArgument, std::string(why));
    };
    std::string header;
    std::getline(in, header);
    if (header != Header()) return bad("it is of another exploration");
    std::size_t expanded = 0;
    std::size_t count = 0;
    ExploreResult result;
    in >> expanded >> count >> result.transitions >> result.differences;
    if (!in || expanded > count || count == 0) return bad("its counts");
    ExplorerOfKeys loaded(size_, what_, subject_);
    for (std::size_t i = 0; i < count; ++i) {
      Key key = 0;
      Origin origin;
      in >> key >> origin.state >> origin.step;
      if (!in) return bad("it ends too early");
      const bool valid = i == 0 ? key == 0
                                : key < loaded.seen_.size() &&
                                      !loaded.seen_[key] && origin.state < i &&
                                      origin.step < steps_.size();
      if (!valid) return bad(fmt::format("state {} of it", i));
      if (i > 0) loaded.Add(key, origin);
    }
    keys_ = std::move(loaded.keys_);
    origins_ = std::move(loaded.origins_);
    depths_ = std::move(loaded.depths_);
    seen_ = std::move(loaded.seen_);
    result.states = loaded.result_.states;
    result.depth = loaded.result_.depth;
    result_ = result;
    expanded_ = expanded;
    return {};
  }

 private:
  static constexpr std::size_t kRound = 256;  // States expanded at a time.
  static constexpr std::size_t kChunk = 16;   // By one thread.

  struct Found {
    Key key;
    Origin origin;
  };
  struct Chunk {
    std::vector<Found> found;
    std::int64_t checked = 0;
    std::int64_t differences = 0;
    std::optional<ExploreFailure> failure;
  };

  std::string Header() const {
    return fmt::format("kvtwin-explore 1 cells={} sequences={} positions={} {}",
                       size_.cells, size_.sequences, size_.positions,
                       what_.name);
  }

  void Add(Key key, Origin origin) {
    seen_[key] = true;
    const int depth = keys_.empty() ? 0 : depths_[origin.state] + 1;
    keys_.push_back(key);
    origins_.push_back(origin);
    depths_.push_back(static_cast<std::uint8_t>(std::min(depth, 255)));
    ++result_.states;
    result_.depth = std::max(result_.depth, depth);
  }

  // The next `count` states. Threads take chunks of them; what they find is
  // put together in the order of the states.
  void Expand(int threads, std::size_t count) {
    std::vector<Chunk> chunks((count + kChunk - 1) / kChunk);
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      Worker worker(what_.setup, codec_, subject_);
      for (std::size_t c = next++; c < chunks.size(); c = next++) {
        const std::size_t end = std::min(count, (c + 1) * kChunk);
        for (std::size_t i = c * kChunk; i < end; ++i) {
          ExpandOne(worker, expanded_ + i, chunks[c]);
        }
      }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    for (Chunk& chunk : chunks) {
      result_.transitions += chunk.checked;
      result_.differences += chunk.differences;
      if (!result_.failure) result_.failure = std::move(chunk.failure);
      for (const Found& found : chunk.found) {
        if (!seen_[found.key]) Add(found.key, found.origin);
      }
    }
    expanded_ += count;
  }

  void ExpandOne(Worker& worker, std::size_t state, Chunk& chunk) {
    const auto differs = [&](const Differs& difference, const Step* step) {
      ++chunk.differences;
      if (chunk.failure || result_.failure) return;
      chunk.failure = ExploreFailure{
          difference.check,
          (step == nullptr ? "" : ToText(*step) + ": ") + difference.text,
          CellsText(codec_.Decode(keys_[state]).cells), PathTo(state, step)};
    };
    try {
      worker.Enter(keys_[state]);
    } catch (const Differs& difference) {
      return differs(difference, nullptr);
    }
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      Step step = steps_[i];
      try {
        const Key key = codec_.Encode(worker.Do(step, chunk.checked));
        if (seen_[key]) continue;
        chunk.found.push_back({key,
                               {static_cast<std::uint32_t>(state),
                                static_cast<std::uint32_t>(i)}});
      } catch (const Differs& difference) {
        differs(difference, &step);
        worker.Enter(keys_[state]);
      }
    }
  }

  // The history that leads to a state, and then `last`.
  History PathTo(std::size_t state, const Step* last) const {
    std::vector<Step> path;
    std::vector<std::size_t> states;
    if (last != nullptr) {
      path.push_back(*last);
      states.push_back(state);
    }
    for (; state != 0; state = origins_[state].state) {
      path.push_back(steps_[origins_[state].step]);
      states.push_back(origins_[state].state);
    }
    std::reverse(path.begin(), path.end());
    std::reverse(states.begin(), states.end());
    History history{what_.setup, {}};
    Worker worker(what_.setup, codec_, TwinSubject("reference"));
    // By what they are called now, what they were called in the beginning.
    std::vector<int> names(static_cast<std::size_t>(size_.sequences));
    std::iota(names.begin(), names.end(), 0);
    for (std::size_t i = 0; i < path.size(); ++i) {
      const CacheState before = codec_.Decode(keys_[states[i]]);
      history.ops.push_back(ToOp(path[i], before, names));
      if (i + 1 == path.size()) break;
      worker.Enter(keys_[states[i]]);
      std::int64_t checked = 0;
      const std::vector<int>* renaming = nullptr;
      Step step = path[i];
      codec_.Encode(worker.Do(step, checked), &renaming);
      std::vector<int> renamed(names.size());
      for (std::size_t s = 0; s < names.size(); ++s) {
        renamed[static_cast<std::size_t>((*renaming)[s])] = names[s];
      }
      names = renamed;
    }
    return history;
  }

  static Op ToOp(const Step& step, const CacheState& before,
                 const std::vector<int>& names) {
    const auto name = [&](int s) { return names[static_cast<std::size_t>(s)]; };
    Op op;
    op.kind = step.kind;
    op.reserve = step.reserve;
    op.except = step.except;
    op.seq = name(step.seq);
    op.dst = name(step.dst);
    op.begin.offset = step.begin;
    op.end.offset = step.end;
    op.open = step.end == kOpenEnd;
    if (op.open) op.end.offset = 0;
    for (std::size_t i = 0; i < step.positions.size(); ++i) {
      int next = 0;
      for (const CellEntry& entry : before.cells) {
        if (entry.sequence == step.sequences[i]) {
          next = std::max(next, entry.position + 1);
        }
      }
      op.segments.push_back({.seq = name(step.sequences[i]),
                             .count = 1,
                             .delta = step.positions[i] - next});
    }
    return op;
  }

  ExploreSize size_;
  ExploreCase what_;
  Subject subject_;
  Codec codec_;
  std::vector<Step> steps_;
  std::vector<bool> seen_;  // By key.
  std::vector<Key> keys_;   // In the order in which they were found.
  std::vector<Origin> origins_;
  std::vector<std::uint8_t> depths_;
  std::size_t expanded_ = 0;
  ExploreResult result_;
};

}  // namespace

std::vector<ExploreCase> ExploreCases(const ExploreSize& size) {
  std::vector<ExploreCase> cases;
  const auto add = [&](CacheSpec spec, std::int32_t memory) {
    const int batch = size.cells - memory;
    if (batch < static_cast<int>(kMaxBatch)) return;
    for (const Placement placement :
         {Placement::kContiguous, Placement::kScatter}) {
      spec.placement = placement;
      spec.shift.kind = ShiftKind::kTagAdd;
      ExploreCase what;
      what.setup.spec = spec;
      what.setup.rows = {
          .k_head_dim = kKeyDims, .kv_heads = 1, .v_head_dim = 1};
      // One sequence's worth of memory; any number may share it.
      what.setup.init = {.dtype = DType::kF32,
                         .max_sequences = 1,
                         .capacity = size.cells,
                         .max_batch = batch};
      what.name = KindName(spec.kind);
      if (spec.window) what.name += fmt::format(" window={}", *spec.window);
      if (spec.memory) what.name += fmt::format(" memory={}", *spec.memory);
      if (spec.chunk > 0) what.name += fmt::format(" chunk={}", spec.chunk);
      if (placement == Placement::kScatter) what.name += " place=scatter";
      cases.push_back(std::move(what));
    }
  };
  CacheSpec spec;
  add(spec, 0);
  for (std::int32_t window = 0; window <= 2; ++window) {
    spec.kind = Kind::kSwa;
    spec.window = window;
    spec.memory.reset();
    add(spec, window);
    spec.kind = Kind::kSwaMem;
    spec.memory = window + 1;
    add(spec, window + 1);
  }
  CacheSpec chunked;
  chunked.kind = Kind::kChunked;
  chunked.chunk = 2;
  add(chunked, 0);
  return cases;
}

Result<std::unique_ptr<Explorer>> Explorer::Make(const ExploreSize& size,
                                                 const ExploreCase& what,
                                                 const Subject& subject) {
  const double keys = Codec(size).keys();
  if (keys > kMostStates) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{:.3g} states could be, this program stops at "
                              "{:.3g}",
                              keys, kMostStates));
  }
  return std::unique_ptr<Explorer>(
      std::make_unique<ExplorerOfKeys>(size, what, subject));
}

}  // namespace kvtwin::props
