#include "props/search/explore.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <istream>
#include <iterator>
#include <locale>
#include <numeric>
#include <ostream>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/index.h"
#include "core/names.h"
#include "core/threads.h"
#include "props/base/hash.h"
#include "props/search/explore_state.h"
#include "props/search/explore_step.h"
#include "props/search/explore_worker.h"

namespace kvtwin::props {
namespace {

constexpr double kMostStates = 4e9;  // One bit each: half a gigabyte.
constexpr double kMostKeys = 1e19;   // They fit a StateKey.

// The keys of the states that were seen: a bit for each key, or a set of keys
// if `few` states are seen, or for a wrapper, where most keys have no state.
class KeySet {
 public:
  KeySet(double keys, bool few)
      : keys_(static_cast<StateKey>(keys)),
        bits_(keys <= kMostStates && !few ? keys_ : 0) {}
  bool IsKey(StateKey key) const { return key < keys_; }
  bool Has(StateKey key) const {
    return bits_.empty() ? set_.contains(key) : bits_[key];
  }
  void Add(StateKey key) {
    if (bits_.empty()) {
      set_.insert(key);
    } else {
      bits_[key] = true;
    }
  }

 private:
  StateKey keys_;
  std::vector<bool> bits_;
  std::unordered_set<StateKey> set_;
};

// The step, and the state before it, by which a state was first reached.
struct Origin {
  std::uint32_t state = 0;
  std::uint32_t step = 0;
};

ExploreEntry EntryOf(const ExploreWay& way,
                     const std::vector<ExploreStep>& steps) {
  ExploreEntry entry{.base = way.base, .names = way.names};
  for (const auto& [step, names] : way.path) {
    entry.path.push_back(Renamed(steps.at(step), names));
  }
  return entry;
}

class ExplorerOfKeys final : public Explorer {
 public:
  ExplorerOfKeys(const ExploreSize& size, const ExploreCase& what,
                 const Subject& subject, const ExpandFn& expand,
                 bool few = false)
      : size_(size),
        what_(what),
        subject_(subject),
        expand_(expand),
        round_(expand ? 16 : 1024),
        codec_(size, Size(what.setup.spec.caches)),
        steps_(AllSteps(size, subject.abilities)),
        seen_(codec_.keys(), few) {
    Add(0, {});
  }

  // Adds the states of `path`, which begins at the empty cache, and expands the
  // last one. Returns null if `path` is not a path.
  const ExploreResult* Along(std::span<const FoundState> path) {
    for (const FoundState& next : path) {
      if (!seen_.IsKey(next.state) || seen_.Has(next.state) ||
          next.step >= steps_.size() || next.parent != keys_.back()) {
        return nullptr;
      }
      Add(next.state, {static_cast<std::uint32_t>(keys_.size() - 1),
                       static_cast<std::uint32_t>(next.step)});
    }
    expanded_ = keys_.size() - 1;
    Expand(1, 1);
    return &result_;
  }

  const ExploreResult& Run(
      int threads,
      const std::function<bool(const ExploreResult&)>& stop) override {
    const auto start = std::chrono::steady_clock::now();
    const double before = result_.seconds;
    while (expanded_ < keys_.size()) {
      const std::size_t count =
          std::min<std::size_t>(round_, keys_.size() - expanded_);
      Expand(threads, count);
      result_.seconds = before + std::chrono::duration<double>(
                                     std::chrono::steady_clock::now() - start)
                                     .count();
      if (stop(result_) || result_.ended) break;
    }
    result_.fixed_point = expanded_ == keys_.size() && !result_.ended;
    return result_;
  }

  void Save(std::ostream& out) const override {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << Header() << '\n'
         << expanded_ << ' ' << keys_.size() << ' ' << result_.transitions
         << ' ' << result_.differences << '\n';
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      text << keys_[i] << ' ' << origins_[i].state << ' ' << origins_[i].step
           << '\n';
    }
    out << text.view() << ChecksumLine(text.view());
  }

  Status Load(std::istream& saved) override {
    const auto bad = [](std::string_view why) {
      return Status(StatusCode::kInvalidArgument, std::string(why));
    };
    const std::string expected = Header() + '\n';
    std::string all(expected.size(), '\0');
    saved.read(all.data(), std::ssize(all));
    if (all != expected) return bad("it is of another exploration");
    all.append(std::istreambuf_iterator<char>(saved), {});
    const std::size_t checksum =
        all.size() - std::min(all.size(), ChecksumLine("").size());
    const std::string found = all.substr(checksum);
    all.resize(checksum);
    if (found != ChecksumLine(all)) {
      return bad("its checksum is wrong: it was changed or cut short");
    }
    std::istringstream in(std::move(all));
    in.imbue(std::locale::classic());
    std::string header;
    std::getline(in, header);
    std::size_t expanded = 0;
    std::size_t count = 0;
    ExploreResult result;
    in >> expanded >> count >> result.transitions >> result.differences;
    if (!in || expanded > count || count == 0) return bad("its counts");
    ExplorerOfKeys loaded(size_, what_, subject_, expand_);
    for (std::size_t i = 0; i < count; ++i) {
      StateKey key = 0;
      Origin origin;
      in >> key >> origin.state >> origin.step;
      if (!in) return bad("it ends too early");
      const bool valid =
          i == 0 ? key == 0
                 : loaded.seen_.IsKey(key) && !loaded.seen_.Has(key) &&
                       origin.state < i && origin.step < steps_.size();
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
  static constexpr std::size_t kChunk = 8;  // States a thread takes.

  struct Found {
    StateKey key;
    Origin origin;
    std::vector<int> names;  // As Expansion::Found.
  };
  struct Chunk {
    std::vector<Found> found;
    ExploreResult result;  // The result of this chunk alone.
  };

  std::string Header() const {
    return fmt::format(
        "kvtwin-explore 2 {}={} cells={} sequences={} positions={} {}",
        subject_.is_twin() ? "twin" : "backend", subject_.name, size_.cells,
        size_.sequences, size_.positions, what_.name);
  }

  // The last line of a saved exploration: the checksum of the lines before it.
  static std::string ChecksumLine(std::string_view text) {
    return fmt::format("checksum {:016x}\n",
                       HashBytes(text.data(), text.size(), 0));
  }

  void Add(StateKey key, Origin origin) {
    seen_.Add(key);
    const int depth = keys_.empty() ? 0 : depths_[origin.state] + 1;
    keys_.push_back(key);
    origins_.push_back(origin);
    depths_.push_back(static_cast<std::uint8_t>(std::min(depth, 255)));
    ++result_.states;
    result_.depth = std::max(result_.depth, depth);
  }

  // Expands the next `count` states. Threads take chunks of them; their results
  // are merged in the order of the states.
  void Expand(int threads, std::size_t count) {
    std::vector<Chunk> chunks((count + kChunk - 1) / kChunk);
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      std::optional<ExploreWorker> worker;
      if (!expand_) worker.emplace(what_.setup, codec_, subject_);
      for (std::size_t c = next++; c < chunks.size(); c = next++) {
        const std::size_t end = std::min(count, (c + 1) * kChunk);
        for (std::size_t i = c * kChunk; i < end && !chunks[c].result.ended;
             ++i) {
          const ExploreWay way = WayTo(expanded_ + i);
          Note(expanded_ + i,
               expand_ ? expand_(size_, what_, way)
                       : worker->Expand(EntryOf(way, steps_), steps_),
               chunks[c]);
        }
      }
    };
    OnThreads(threads, work);
    for (Chunk& chunk : chunks) {
      ExploreResult& result = chunk.result;
      result_.transitions += result.transitions;
      result_.differences += result.differences;
      result_.ended = result_.ended || result.ended;
      result_.not_made = result_.not_made || result.not_made;
      if (!result_.failure && result.failure) {
        result_.failure = std::move(result.failure);
        result_.from = std::move(result.from);
        result_.history = std::move(result.history);
      }
      for (const Found& found : chunk.found) {
        if (seen_.Has(found.key)) continue;
        Add(found.key, found.origin);
        if (found.names.empty()) continue;
        names_[keys_.size() - 1] = found.names;
      }
    }
    expanded_ += count;
  }

  // Whether all steps, sequences and tokens of `expansion`, which another
  // process may have written, exist.
  bool IsValid(const Expansion& expansion) const {
    const auto are_below = [](int end) {
      return [end](std::span<const int> numbers) {
        return std::ranges::all_of(numbers,
                                   [end](int n) { return n >= 0 && n < end; });
      };
    };
    const auto are_sequences = are_below(size_.sequences);
    const Expansion::StepTaken& failed = expansion.failed;
    const int tokens = failed.step >= 0 && failed.step < std::ssize(steps_)
                           ? Size(At(steps_, failed.step).positions)
                           : 0;
    return are_below(tokens)(failed.except) &&
           are_sequences(failed.sequences) &&
           failed.sequences.size() == failed.positions.size() &&
           std::ranges::all_of(
               expansion.found, [&](const Expansion::Found& found) {
                 return found.step < steps_.size() &&
                        are_sequences(found.names) &&
                        (found.names.empty() ||
                         std::ssize(found.names) == size_.sequences);
               });
  }

  // Adds the result of expanding a state to `chunk`.
  void Note(std::size_t state, const Expansion& expansion, Chunk& chunk) {
    if (!IsValid(expansion)) {
      Note(state,
           {.differences = 1,
            .ended = true,
            .failure = MakeFailure("backend: crash",
                                   WroteNonsense("a step, token or sequence "
                                                 "that does not exist"))},
           chunk);
      return;
    }
    ExploreResult& result = chunk.result;
    result.transitions += expansion.checked;
    result.differences += expansion.differences;
    result.ended = expansion.ended;
    result.not_made = expansion.not_made;
    for (const Expansion::Found& found : expansion.found) {
      if (!seen_.IsKey(found.state) || seen_.Has(found.state)) continue;
      chunk.found.push_back({found.state,
                             {static_cast<std::uint32_t>(state), found.step},
                             found.names});
    }
    if (!expansion.failure || result.failure || result_.failure) return;
    const Expansion::StepTaken& failed = expansion.failed;
    std::optional<ExploreStep> step;
    if (failed.step >= 0 && failed.step < std::ssize(steps_)) {
      step = At(steps_, failed.step);
      step->except = failed.except;
    }
    result.failure = expansion.failure;
    if (step) {
      result.failure->text = ToText(*step) + ": " + result.failure->text;
    }
    result.from = codec_.TextOf(keys_[state]);
    result.history = PathTo(state, step, failed);
  }

  // The names of a state's sequences in its base (ExploreEntry).
  std::vector<int> NamesOf(std::size_t state) const {
    if (const auto found = names_.find(state); found != names_.end()) {
      return found->second;
    }
    std::vector<int> names(AsSize(size_.sequences));
    std::iota(names.begin(), names.end(), 0);
    return names;
  }

  ExploreWay WayTo(std::size_t state) const {
    ExploreWay way{.names = NamesOf(state)};
    for (; names_.contains(state); state = origins_[state].state) {
      const Origin& origin = origins_[state];
      way.path.push_back({origin.step, NamesOf(origin.state)});
    }
    way.base = keys_[state];
    std::ranges::reverse(way.path);
    return way;
  }

  // Returns the history that leads to a state and ends with `last`, if there is
  // a last step, with the reserving passes that `by` names around it.
  History PathTo(std::size_t state, const std::optional<ExploreStep>& last,
                 const Expansion::StepTaken& by) const {
    std::vector<ExploreStep> path;
    std::vector<std::size_t> states;
    if (last) {
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
    ExploreWorker worker(what_.setup, codec_, TwinSubject("reference"));
    // The original name of each sequence, by its name in the base.
    std::vector<int> names = NamesOf(0);
    for (std::size_t i = 0; i < path.size(); ++i) {
      const ExploreEntry entry = EntryOf(WayTo(states[i]), steps_);
      const ExploreStep step = Renamed(path[i], entry.names);
      worker.Enter(entry);
      CacheState before = worker.entered();
      const bool is_last = last && i + 1 == path.size();
      const ExploreStep reserving = {.positions = by.positions,
                                     .sequences = by.sequences,
                                     .reserve = true};
      if (is_last && by.reserved) {
        history.ops.push_back(ToOp(reserving, before, names));
      }
      history.ops.push_back(ToOp(step, before, names));
      if (is_last && !by.reserved_again) break;  // It may fail here, too.
      std::int64_t checked = 0;
      const std::vector<int>* renaming = nullptr;
      worker.Do(step, checked);
      if (is_last && by.reserved_again) {
        before = worker.state();
        history.ops.push_back(ToOp(reserving, before, names));
      }
      worker.Key(&renaming);
      if (!worker.drafts().empty()) continue;  // The base stays the same.
      std::vector<int> renamed(names.size());
      for (std::size_t s = 0; s < names.size(); ++s) {
        At(renamed, (*renaming)[s]) = names[s];
      }
      names = renamed;
    }
    return history;
  }

  ExploreSize size_;
  ExploreCase what_;
  Subject subject_;
  ExpandFn expand_;
  std::size_t round_;  // States expanded at a time.
  StateCodec codec_;
  std::vector<ExploreStep> steps_;
  KeySet seen_;
  std::vector<StateKey> keys_;  // In the order of discovery.
  std::vector<Origin> origins_;
  std::unordered_map<std::size_t, std::vector<int>> names_;  // With drafts.
  std::vector<std::uint8_t> depths_;
  std::size_t expanded_ = 0;
  ExploreResult result_;
};

}  // namespace

StateExpander::StateExpander(const ExploreSize& size, const ExploreCase& what,
                             const Subject& subject, ExpandFn expand)
    : size_(size),
      what_(what),
      subject_(subject),
      expand_(std::move(expand)),
      codec_(std::make_unique<StateCodec>(size, Size(what.setup.spec.caches))),
      steps_(AllSteps(size, subject.abilities)) {}

StateExpander::~StateExpander() = default;

bool StateExpander::IsKey(std::uint64_t state) const {
  return state < static_cast<StateKey>(std::min(codec_->keys(), kMostKeys));
}

FoundStates StateExpander::Expand(std::span<const std::uint64_t> states) {
  FoundStates batch;
  std::unordered_set<StateKey> seen;
  std::vector<int> names(AsSize(size_.sequences));
  std::iota(names.begin(), names.end(), 0);
  if (!expand_ && !worker_) {
    worker_ = std::make_unique<ExploreWorker>(what_.setup, *codec_, subject_);
  }
  for (const StateKey state : states) {
    const Expansion expansion =
        expand_ ? expand_(size_, what_, {.base = state, .names = names})
                : worker_->Expand({.base = state}, steps_);
    batch.checked += expansion.checked;
    batch.differences += expansion.differences;
    batch.ended = expansion.ended;
    batch.not_made = expansion.not_made;
    if (expansion.differences > 0 && !batch.failed) batch.failed = state;
    for (const Expansion::Found& found : expansion.found) {
      if (!IsKey(found.state) || !seen.insert(found.state).second) continue;
      batch.found.push_back({found.state, state, found.step});
    }
    if (batch.ended) break;
  }
  std::ranges::sort(batch.found, {}, &FoundState::state);
  return batch;
}

std::optional<ExploreResult> ExploreAlong(const ExploreSize& size,
                                          const ExploreCase& what,
                                          const Subject& subject,
                                          const ExpandFn& expand,
                                          std::span<const FoundState> path) {
  ExplorerOfKeys explorer(size, what, subject, expand, /*few=*/true);
  const ExploreResult* result = explorer.Along(path);
  if (result == nullptr) return std::nullopt;
  return *result;
}

Expansion ExpandState(const ExploreSize& size, const ExploreCase& what,
                      const Subject& subject, const ExploreWay& way) {
  const StateCodec codec(size, Size(what.setup.spec.caches));
  try {
    ExploreWorker worker(what.setup, codec, subject);
    const std::vector<ExploreStep> steps = AllSteps(size, subject.abilities);
    return worker.Expand(EntryOf(way, steps), steps, subject.on_step);
  } catch (const NotMade&) {
    return {.not_made = true};
  } catch (const Failure& differs) {  // It cannot even be made.
    return {.differences = 1, .failure = differs};
  }
}

namespace {

// "swa window=1 memory=2"; of a hybrid "hybrid of causal, swa window=1".
std::string NameOf(const CacheSpec& spec) {
  std::string name(KindName(spec.kind));
  if (spec.window) name += fmt::format(" window={}", *spec.window);
  if (spec.memory) name += fmt::format(" memory={}", *spec.memory);
  if (spec.chunk > 0) name += fmt::format(" chunk={}", spec.chunk);
  if (spec.kind == Kind::kRecurrent) {
    name += fmt::format(" every={} keep={}", spec.checkpoint_every,
                        spec.checkpoints);
  }
  std::vector<std::string> parts;
  for (const CacheSpec& part : spec.caches) parts.push_back(NameOf(part));
  return parts.empty() ? name
                       : fmt::format("{} of {}", name, fmt::join(parts, ", "));
}

// The caches with recurrent state; each keeps as many checkpoints as it has
// cells for (R2).
std::vector<CacheSpec> SpecsWithStates(const ExploreSize& size) {
  std::vector<CacheSpec> specs;
  CacheSpec recurrent;
  recurrent.kind = Kind::kRecurrent;
  recurrent.drafts = size.drafts ? 2 : 0;
  recurrent.checkpoints = std::max(size.cells - 2 - recurrent.drafts, 0);
  for (const int every : {1, 2}) {
    recurrent.checkpoint_every = every;
    specs.push_back(recurrent);
  }
  CacheSpec windowed;
  windowed.kind = Kind::kSwa;
  windowed.window = 1;
  CacheSpec& hybrid = specs.emplace_back();
  hybrid.kind = Kind::kHybrid;
  hybrid.caches = {CacheSpec(), windowed, recurrent};
  return specs;
}

}  // namespace

std::vector<ExploreCase> ExploreCases(const ExploreSize& size, bool states) {
  std::vector<ExploreCase> cases;
  const auto add = [&](CacheSpec spec, std::int32_t memory) {
    const int batch = size.cells - memory;
    if (batch < std::ssize(kBatchTags)) return;
    for (const Placement placement :
         {Placement::kContiguous, Placement::kScatter}) {
      spec.placement = placement;
      spec.shift.kind = ShiftKind::kTagAdd;
      for (CacheSpec& part : spec.caches) {
        part.placement = placement;
        part.shift = spec.shift;
      }
      ExploreCase what;
      what.setup.spec = spec;
      what.setup.rows = {.k_head_dim = 2, .kv_heads = 1, .v_head_dim = 1};
      // Memory for one sequence; any number of sequences may share it.
      what.setup.init = {.dtype = size.dtype,
                         .max_sequences = 1,
                         .capacity = size.cells,
                         .max_batch = batch};
      FitStorage(what.setup);
      what.setup.layers = std::max(Size(spec.caches), 1);
      what.name = NameOf(spec);
      if (placement == Placement::kScatter) what.name += " place=scatter";
      if (size.dtype != DType::kF32) {
        what.name += fmt::format(" dtype={}", DTypeName(size.dtype));
      }
      cases.push_back(std::move(what));
    }
  };
  if (states) {
    // A hybrid has a window of 1, whose memory it leaves room for.
    for (const CacheSpec& spec : SpecsWithStates(size)) {
      if (size.cells > 2) add(spec, spec.caches.empty() ? 0 : 1);
    }
    return cases;
  }
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

bool FitCase(const Abilities& abilities, ExploreCase& what) {
  CacheSpec& spec = what.setup.spec;
  ShiftKind& shift = spec.shift.kind;
  // The more a shift changes, the more shows.
  for (const ShiftKind kind :
       {ShiftKind::kTagAdd, ShiftKind::kAdd, ShiftKind::kRope,
        ShiftKind::kIdentity, ShiftKind::kNone}) {
    shift = kind;
    if (HasBit(abilities.shifts, kind)) break;
  }
  for (CacheSpec& part : spec.caches) part.shift = spec.shift;
  if (shift != ShiftKind::kTagAdd) {
    what.name += fmt::format(" shift={}", At(kShiftNames, shift));
  }
  return abilities.Fits(what.setup);
}

Result<std::unique_ptr<Explorer>> Explorer::Make(const ExploreSize& size,
                                                 const ExploreCase& what,
                                                 const Subject& subject,
                                                 const ExpandFn& expand) {
  const int caches = Size(what.setup.spec.caches);
  const double keys = StateCodec(size, caches).keys();
  if (keys > (caches > 0 ? kMostKeys : kMostStates)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{:.3g} states could be, this program stops at "
                              "{:.3g}",
                              keys, caches > 0 ? kMostKeys : kMostStates));
  }
  return std::unique_ptr<Explorer>(
      std::make_unique<ExplorerOfKeys>(size, what, subject, expand));
}

}  // namespace kvtwin::props
