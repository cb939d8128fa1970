#include "props/search/fuzz.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "core/names.h"
#include "core/threads.h"
#include "props/base/clock.h"
#include "props/base/counted.h"
#include "props/base/crash.h"
#include "props/base/hash.h"
#include "props/base/interrupt.h"
#include "props/history/generate.h"
#include "props/history/knobs.h"
#include "props/history/rarities.h"
#include "props/history/speculate.h"
#include "props/paged/paged_client.h"
#include "props/report/finding_filter.h"
#include "props/search/explain.h"
#include "props/sessions/session_runner.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsInHistory = 100;
// A third-party cache may be slow: most of its histories are short, so that it
// is tried in many setups.
constexpr int kOpsInShortHistory = 15;
// One in twenty histories is run twice, and so is each that fails (S50).
constexpr std::uint64_t kRepeatEvery = 20;
// One in seven histories of a twin may have a custom shift function, another
// one may begin with a large defrag. Seven has no common divisor with the
// number of dtypes, so that each dtype has such histories.
constexpr std::uint64_t kTwinsEvery = 7;
// One in eleven histories of a legal client gives up passes, another one warms
// up, a third has batches that do not fit. Eleven has no common divisor with
// the other numbers that choose histories.
constexpr std::uint64_t kLegalEvery = 11;
// One in this many histories has ids of sequences that are far apart.
constexpr std::uint64_t kSpreadEvery = 17;
// One in this many histories of a backend begins with a long sequence.
constexpr std::uint64_t kLongEvery = 37;
// Of this many successive histories of a backend, three have each declared kind
// of KindOf. All of them have prompts, or drafts, or neither. Thirteen has no
// common divisor with the other numbers that choose histories.
constexpr std::uint64_t kKindsEvery = 13;
// A search ends if, after this many histories, the subject had a cache for
// fewer than one in a hundred.
constexpr std::int64_t kVain = 1000;

// The source of a search's histories, by number. Tell is called for each
// history in the order of the numbers, between blocks of histories.
class CacheSource {
 public:
  using History = props::History;
  using Result = FuzzResult;
  // Histories between two checks of the clock and the count.
  static constexpr std::size_t kBlock = 64;
  // Whether a history counts that the subject has no cache for.
  static constexpr bool kCountsRefused = true;

  CacheSource(const FuzzOptions& options, const Subject& subject)
      : options_(options), subject_(subject) {}

  std::optional<History> At(std::uint64_t number) const {
    const std::optional<Kind> kind = KindOf(number);
    const bool is_short = !subject_.is_twin() && number % 4 != 0;
    const int ops = is_short ? kOpsInShortHistory : kOpsInHistory;
    History history =
        HasDrafts(number, kind) ? MakeSpeculation(options_.seed, number, kind,
                                                  ops, options_.cells_max)
        : HasPrompts(number, kind)
            ? MakePrefixes(options_.seed, number, kind, ops, options_.cells_max,
                           HasDraftsToo(number, kind))
            : MakeHistory(options_.seed, number, kind, ops, options_.cells_max,
                          /*rarities=*/true);
    if (options_.dtypes) {
      Setup& setup = history.setup;
      setup.init.dtype = kRowDTypes.at(number % kRowDTypes.size());
      setup.config.v_dtype =
          kRowDTypes.at(number / kRowDTypes.size() % kRowDTypes.size());
      FitStorage(setup);
    }
    if (subject_.level == Level::kAttention) {
      const Pick pick = SeededPick(~options_.seed, number);
      DrawKnobs(pick, KnobGroup::kAttention, history.setup);
      if (options_.cells_max == 0 && Chance(pick, 4)) {
        AddLongBatch(pick, history);
      }
    }
    if (number % kSpreadEvery == 10) {
      SpreadIds(SeededPick(options_.seed ^ 0x51DE5, number), history.setup);
    }
    AddForTwins(number, history);
    AddForLegal(number, history);
    FitBackend(number, history);
    return history;
  }
  void Tell(const History& /*history*/, bool /*ran*/) {}

  bool IsCounted() const { return options_.count_marks; }
  History Shrunk(const History& history, const Subject& subject,
                 const RefusesHistory& refuses) const {
    return Shrink(history, subject, options_.kind, refuses);
  }
  Failure Explained(const History& history, const Failure& failure,
                    const Subject& subject) const {
    return Explain(history, failure, subject, options_.drawn);
  }

 private:
  // Changes some histories of twins. Draws nothing.
  void AddForTwins(std::uint64_t number, History& history) const {
    // Only a cache in this process can call our function.
    if (subject_.make && number % kTwinsEvery == 3) {
      UseCustomShift(history.setup.spec);
    }
    const bool may_grow = subject_.is_twin() && options_.cells_max == 0;
    if (may_grow && number % kTwinsEvery == 5) AddDefrag(history);
  }

  // Changes some histories of legal clients, by draws that no other history
  // has.
  void AddForLegal(std::uint64_t number, History& history) const {
    const bool goes_on = subject_.abilities.OnlyGoesOn();
    if (!history.setup.legal && !goes_on) return;
    const Pick pick = SeededPick(options_.seed ^ 0x1E6A1, number);
    const std::uint64_t turn = number % kLegalEvery;
    if (turn == 2) AddStops(pick, history);
    if (turn == 6) AddWarmUps(pick, history);
    if (turn == 9 && subject_.Overfills()) AddOverfull(pick, history);
  }

  // Makes some histories of backends long, by draws that no other history has,
  // and fits all of them to what the backend declares.
  void FitBackend(std::uint64_t number, History& history) const {
    if (subject_.is_twin()) return;
    if (options_.cells_max == 0 && number % kLongEvery == 5) {
      AddLongSequence(SeededPick(options_.seed ^ 0x10465, number), history);
    }
    subject_.abilities.Fit(history.setup);
  }

  // The kinds that only a backend which declares them gets without being asked:
  // digests of other subjects stay as they were.
  std::vector<Kind> DeclaredKinds() const {
    std::vector<Kind> kinds;
    if (options_.kind || subject_.make) return kinds;  // A twin.
    for (const Kind kind : {Kind::kRecurrent, Kind::kHybrid}) {
      const bool may = !options_.speculate || subject_.abilities.CanDraft(kind);
      if (may && subject_.abilities.HasKind(kind)) kinds.push_back(kind);
    }
    return kinds;
  }

  // The kind of a history; none: any kind.
  std::optional<Kind> KindOf(std::uint64_t number) const {
    const std::vector<Kind> kinds = DeclaredKinds();
    const std::size_t turn = number % kKindsEvery / 3;
    return turn < kinds.size() ? kinds[turn] : options_.kind;
  }

  bool CanDraft(std::optional<Kind> kind) const {
    return !subject_.make && (kind ? subject_.abilities.CanDraft(*kind)
                                   : subject_.abilities.CanDraft());
  }
  // Every second history of a backend that declares drafts has drafts; if it
  // finds prefixes as well, every third.
  bool HasDrafts(std::uint64_t number, std::optional<Kind> kind) const {
    return options_.speculate ||
           (CanDraft(kind) && Turn(number, kind) == (FindsPrefixes() ? 1 : 0));
  }
  // Every second history with prompts also has drafts.
  bool HasDraftsToo(std::uint64_t number, std::optional<Kind> kind) const {
    return !options_.speculate && CanDraft(kind) &&
           number / kKindsEvery / 3 % 2 == 0;
  }
  // Every second history of a backend that finds prefixes has prompts; if it
  // declares drafts as well, every third, so that a third has neither.
  bool HasPrompts(std::uint64_t number, std::optional<Kind> kind) const {
    return FindsPrefixes() && Turn(number, kind) == 0;
  }
  // At identity a backend is compared with a twin, which finds no prefixes.
  bool FindsPrefixes() const {
    return !subject_.make && subject_.level != Level::kIdentity &&
           subject_.abilities.Can(KVTWIN_CAN_FIND_PREFIX);
  }
  std::uint64_t Turn(std::uint64_t number, std::optional<Kind> kind) const {
    const bool both = FindsPrefixes() && CanDraft(kind);
    return number / kKindsEvery % (both ? 3 : 2);
  }

  const FuzzOptions& options_;
  const Subject& subject_;
};

// The members that are the same for pools and for sessions.
template <class AnyHistory, class Refuses>
class PlainSource {
 public:
  using History = AnyHistory;
  static constexpr bool kCountsRefused = false;

  static bool IsCounted() { return true; }
  static History Shrunk(const History& history, const Subject& subject,
                        const Refuses& refuses) {
    return Shrink(history, subject, refuses);
  }
  static Failure Explained(const History& history, const Failure& failure,
                           const Subject& subject) {
    return Explain(history, failure, subject);
  }
};

class PoolSource : public PlainSource<PagedHistory, RefusesPaged> {
 public:
  using Result = PagedFuzzResult;
  // Few: after each block, the storage is picked that the pool accepts.
  static constexpr std::size_t kBlock = 8;

  PoolSource(const FuzzOptions& options, const Subject& subject)
      : options_(options), subject_(subject) {}
  virtual ~PoolSource() = default;

  virtual std::optional<History> At(std::uint64_t number) const {
    History history = OfNumber(number);
    if (subject_.run_pool || subject_.level == Level::kAttention) {
      DrawWeighing(SeededPick(~options_.seed, number), subject_.abilities,
                   history);
    }
    if (subject_.run_pool) FitPool(subject_.abilities, history);
    if (options_.cells_max > 0 && !options_.groups) {
      PagedSpec& spec = history.spec;
      const int most = std::max(options_.cells_max / spec.block_size, 1);
      spec.blocks = std::min(spec.blocks, most);
    }
    return history;
  }

  // After the subject has refused a pool, picks the storage of every other
  // history: the plainest, or, if the subject refuses that, one that it
  // accepted.
  void Tell(const History& history, bool ran) {
    const PoolStorage storage = StorageOf(history.spec);
    if (ran && (!had_ || storage == Fitted(PoolStorage()))) had_ = storage;
    refuses_ = refuses_ || !ran;
    if (!ran && had_ && storage == Fitted(used_)) used_ = *had_;
  }

 protected:
  const FuzzOptions& options_;
  const Subject& subject_;

 private:
  PoolStorage Fitted(const PoolStorage& storage) const {
    return subject_.run_pool ? FitStorage(subject_.abilities, storage)
                             : storage;
  }
  History OfNumber(std::uint64_t number) const {
    if (options_.groups) {
      History history = MakeGroupsHistory(options_.seed, number);
      if (!refuses_ || number % 2 == 0) return history;
      for (PagedSpec& group : history.spec.groups) UseStorage(used_, group);
      return history;
    }
    History history = MakePagedHistory(options_.seed, number);
    PagedSpec& spec = history.spec;
    if (options_.dtypes) {
      UseStorage({kRowDTypes.at(number % kRowDTypes.size()),
                  kRowDTypes.at(number / kRowDTypes.size() % kRowDTypes.size()),
                  spec.layout},
                 spec);
    }
    if (options_.cells_max > 0) {
      spec.block_size = std::min(spec.block_size, options_.cells_max);
      spec.blocks = std::min(spec.blocks, options_.cells_max / spec.block_size);
    }
    if (refuses_ && number % 2 == 1) UseStorage(used_, spec);
    return history;
  }

  bool refuses_ = false;
  PoolStorage used_;
  std::optional<PoolStorage> had_;
};

class SessionSource : public PlainSource<SessionHistory, RefusesSessions> {
 public:
  using Result = SessionFuzzResult;
  static constexpr std::size_t kBlock = 16;

  explicit SessionSource(const FuzzOptions& options) : options_(options) {}

  std::optional<History> At(std::uint64_t number) const {
    return MakeSessionHistory(options_.seed, number);
  }
  static void Tell(const History& /*history*/, bool /*ran*/) {}

 private:
  const FuzzOptions& options_;
};

template <class Source>
class Search {
 public:
  using History = typename Source::History;
  using Result = typename Source::Result;

  Search(const FuzzOptions& options, const Subject& subject, Source& source)
      : options_(options),
        subject_(subject),
        counted_(subject),
        source_(source),
        filter_(options.known_buckets),
        start_(Now()) {
    // A subject that is known to hang gets a short timeout.
    counted_.known_to_hang =
        options.known.contains(std::string(CheckName("backend: hang").name()));
  }

  Result Run() {
    while (!Done() && !result_.failure && !exhausted_) {
      const std::uint64_t first =
          options_.first + static_cast<std::uint64_t>(result_.histories);
      RunBlock(first);
      // Counts in the order of the seed, whichever thread finished first.
      for (std::size_t i = 0; i < block_.size(); ++i) {
        Count(first + i, block_[i]);
        if (result_.failure) break;
        if (options_.operations > 0 && Done()) break;
      }
      if (!result_.failure) result_.seconds = Passed();
      if (options_.progress) {
        options_.progress(result_.operations, result_.seconds);
      }
    }
    return std::move(result_);
  }

 private:
  struct Ran {
    std::optional<History> history;
    RunResult result;
    decltype(Result::counts) counts;
  };

  double Passed() const { return Now() - start_ - shrinking_; }
  bool Done() const {
    if (Interrupted()) return true;
    if (result_.histories >= kVain + 100 * result_.ran) return true;
    if (options_.operations > 0) {
      return result_.operations >= options_.operations;
    }
    return Passed() >= options_.seconds;
  }
  bool IsKnown(const Failure& failure) const {
    return options_.known.contains(failure.check);
  }

  // Runs the histories from `first` on and fills the block with them, up to the
  // first failure or the end of the time.
  void RunBlock(std::uint64_t first) {
    block_ = std::vector<Ran>(Source::kBlock);
    const double until = start_ + shrinking_ + options_.seconds;
    std::atomic<std::size_t> next = 0;
    std::atomic<std::size_t> end = block_.size();
    const auto end_at = [&](std::size_t at) {
      std::size_t now = end;
      while (at < now && !end.compare_exchange_weak(now, at)) {
      }
    };
    const auto work = [&] {
      for (std::size_t i = next++; i < end; i = next++) {
        const bool late = options_.operations == 0 && Now() >= until;
        if ((i > 0 && late) || Interrupted()) return end_at(i);
        Ran& ran = block_[i];
        ran.history = source_.At(first + i);
        if (!ran.history) {
          exhausted_ = true;
          return end_at(i);
        }
        RunOne(first + i, ran);
        if (ran.result.failure && !IsKnown(*ran.result.failure)) end_at(i + 1);
      }
    };
    OnThreads(options_.threads, work);
    block_.resize(end);
  }

  void RunOne(std::uint64_t number, Ran& ran) const {
    const History& history = *ran.history;
    const CrashReport crash([&] { return RerunCommand(history, subject_); });
    auto* const counts = source_.IsCounted() ? &ran.counts : nullptr;
    ran.result = RunHistory(history, counted_, {.counts = counts});
    const auto& failure = ran.result.failure;
    const bool is_new = failure && !IsKnown(*failure);
    if (number % kRepeatEvery == 0 || is_new) RunAgain(history, ran.result);
  }

  // Runs the history again; if the answers differ, replaces `first` by a
  // failure: that of the run that ended the backend's process, if a run did. A
  // known death hides no other failure.
  void RunAgain(const History& history, RunResult& first) const {
    if (first.failure && IsHang(*first.failure)) return;
    RunResult again = RunHistory(history, counted_);
    const bool same = again.digest == first.digest &&
                      again.failure.has_value() == first.failure.has_value();
    if (same) return;
    // How far a process gets before it dies is random, and so may be the
    // answers of a run that survives: the death is the finding.
    const auto died = [](const RunResult& result) {
      return result.failure && result.failure->party() == Party::kBackend;
    };
    if (died(first)) return;
    if (died(again)) {
      const bool is_known = IsHang(*again.failure) || IsKnown(*again.failure) ||
                            !options_.known_buckets.empty();
      if (!first.failure || !is_known) first = std::move(again);
      return;
    }
    if (!again.failure) again.failure = first.failure;
    if (!again.failure) again.failure = {.step = history.ops.size()};
    Failure& failure = *again.failure;
    failure.check = kNotTheSame.name();
    failure.text =
        fmt::format("run twice, it gives the digests {:016x} and {:016x}\n{}",
                    first.digest, again.digest, failure.text);
    first = again;
  }

  void Count(std::uint64_t number, const Ran& ran) {
    const RunResult& one = ran.result;
    const bool has_cache = one.ran || one.failure;
    source_.Tell(*ran.history, has_cache);
    if (has_cache || Source::kCountsRefused) {
      result_.operations += std::max<std::int64_t>(1, one.operations);
    }
    result_.digest = HashBytes(&one.digest, sizeof(one.digest), result_.digest);
    ++result_.histories;
    result_.ran += has_cache ? 1 : 0;
    result_.repeated += number % kRepeatEvery == 0 ? 1 : 0;
    result_.counts.Add(ran.counts);
    result_.answers.Add(one.answers);
    // A leak shows when all views were compared already.
    const bool leaks = one.failure && one.failure->Is("backend: memory") &&
                       one.failure->step == ran.history->ops.size();
    result_.judged += (!one.failure || leaks) && one.views > 0 ? 1 : 0;
    if (!one.failure) return;
    if (IsKnown(*one.failure)) {
      ++result_.known;
      return;
    }
    result_.seconds = Passed();  // Excludes the shrinking.
    Report(*ran.history, *one.failure);
    if (result_.failure) {
      result_.failure->history_number = number;
      result_.failure->found_operations = ran.history->ops.size();
      result_.failure->found_check = one.failure->check;
    }
    shrinking_ += Passed() - result_.seconds;
  }

  // Shrinks and explains the failure, unless its bucket is known.
  void Report(const History& found, const Failure& first) {
    Failure latest = first;  // Failure of the last history.
    const auto run = [&](const History& one) -> std::optional<std::string> {
      auto fails = RunHistory(one, WithShortTimeout(subject_, first)).failure;
      if (!fails) return std::nullopt;
      latest = std::move(*fails);
      return SignatureOf(subject_.name, latest);
    };
    std::optional<Failure> explained;
    const auto bucket_of =
        [&](const History& one,
            const FindingFilter::IsKnown<History>& is_known) {
          const auto refuses = [&](const History& tried, const Failure& fails) {
            return is_known(tried, SignatureOf(subject_.name, fails));
          };
          explained = is_known ? Shortest(one, latest, refuses)
                               : Shortest(one, latest, nullptr);
          return explained->bucket;
        };
    const bool passes =
        filter_.Passes(found, SignatureOf(subject_.name, first),
                       result_.operations, run, bucket_of, result_.passed_over);
    if (!passes) result_.failure = std::move(explained);
  }

  template <class Refuses>
  Failure Shortest(const History& found, const Failure& failure,
                   const Refuses& refuses) {
    result_.shrunk = found;
    // Whether a finding is known shows in its shortest history.
    const bool unshrunk = options_.unshrunk && options_.known_buckets.empty();
    if (failure.Is(kNotTheSame) || unshrunk) {
      return source_.Explained(found, failure, subject_);
    }
    const CrashReport crash([&] { return RerunCommand(found, subject_); });
    result_.shrunk =
        source_.Shrunk(found, WithShortTimeout(subject_, failure), refuses);
    auto sure = RunHistory(result_.shrunk, subject_).failure;
    if (!sure && IsHang(failure)) {  // The call was only slow.
      result_.shrunk = source_.Shrunk(found, subject_, refuses);
      sure = RunHistory(result_.shrunk, subject_).failure;
    }
    return source_.Explained(result_.shrunk, sure.value_or(failure), subject_);
  }

  static constexpr CheckName kNotTheSame = "harness: not the same twice";

  const FuzzOptions& options_;
  const Subject& subject_;
  Subject counted_;  // subject_, perhaps known to hang.
  Source& source_;
  FindingFilter filter_;
  const double start_;
  double shrinking_ = 0;  // Seconds spent on failures passed over.
  std::atomic<bool> exhausted_ = false;
  std::vector<Ran> block_;
  Result result_;
};

// Operations on sequences 0 and 1 and on new sequences. See PagedOp for the
// meaning of the numbers.
constexpr std::array kExplored = {
    PagedOp{PagedOpKind::kOpen, 0, 1, 0},
    PagedOp{PagedOpKind::kOpen, 1, 2, 0},
    PagedOp{PagedOpKind::kOpen, 0, 1, 1},  // With a salt.
    PagedOp{PagedOpKind::kFork, 0, 1, 0},
    PagedOp{PagedOpKind::kFork, 0, 2, 0},
    PagedOp{PagedOpKind::kFork, 1, 3, 0},
    PagedOp{PagedOpKind::kAppend, 0, 0, 2},
    PagedOp{PagedOpKind::kAppend, 0, 1, 2},
    PagedOp{PagedOpKind::kAppend, 0, 3, 1},
    PagedOp{PagedOpKind::kAppend, 1, 0, 1},
    PagedOp{PagedOpKind::kAppend, 1, 1, 2},
    PagedOp{PagedOpKind::kCommit, 0, 1, 0},
    PagedOp{PagedOpKind::kCommit, 0, 0, 1},
    PagedOp{PagedOpKind::kCommit, 1, 1, 0},
    PagedOp{PagedOpKind::kCommitUnknown, 0, 1, 0},
    PagedOp{PagedOpKind::kTruncate, 0, 1, 0},
    PagedOp{PagedOpKind::kTruncate, 1, 2, 0},
    PagedOp{PagedOpKind::kFree, 0, 0, 0},
    PagedOp{PagedOpKind::kFree, 1, 0, 0},
};

// All histories of `depth` operations: the digits of a history's number name
// its operations.
class AllPools : public PoolSource {
 public:
  AllPools(int depth, const FuzzOptions& options, const Subject& subject)
      : PoolSource(options, subject), depth_(depth), groups_(options.groups) {}

  std::optional<PagedHistory> At(std::uint64_t number) const override {
    // Each history begins with a sequence of three tokens.
    PagedHistory history = {.spec = SpecOf(groups_),
                            .ops = {{PagedOpKind::kOpen, 0, 0, 0},
                                    {PagedOpKind::kAppend, 0, 2, 2},
                                    {PagedOpKind::kCommit, 0, 1, 0}}};
    for (int i = 0; i < depth_; ++i) {
      history.ops.push_back(kExplored.at(number % kExplored.size()));
      number /= kExplored.size();
    }
    if (number > 0) return std::nullopt;
    if (!subject_.run_pool) return history;
    // The operations have as many blocks of tokens as without a multiple.
    const int blocks = subject_.abilities.block_multiple;
    if (blocks > 1) {
      for (PagedOp& op : history.ops) {
        const bool cuts =
            op.kind == PagedOpKind::kFork || op.kind == PagedOpKind::kTruncate;
        if (cuts) op.b *= blocks;
        // FitPool multiplies long appends.
        if (op.kind == PagedOpKind::kAppend) op.b += kLongAppend;
      }
    }
    FitPool(subject_.abilities, history);
    return history;
  }

 private:
  // With groups, there are three: all tokens, a window, and states.
  static PagedSpec SpecOf(bool groups) {
    PagedSpec spec = {
        .block_size = 2, .blocks = 3, .max_seq_len = 5, .dtype = DType::kF32};
    if (!groups) return spec;
    PagedSpec window = spec;
    window.block_size = 1;
    window.window = 1;
    PagedSpec states = spec;
    states.states = true;
    spec.groups = {spec, window, states};
    return spec;
  }

  const int depth_;
  const bool groups_;
};

}  // namespace

FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject) {
  CacheSource source(options, subject);
  return Search(options, subject, source).Run();
}

PagedFuzzResult FuzzPools(const FuzzOptions& options, const Subject& subject) {
  PoolSource source(options, subject);
  return Search(options, subject, source).Run();
}

SessionFuzzResult FuzzSessions(const FuzzOptions& options,
                               const Subject& subject) {
  SessionSource source(options);
  return Search(options, subject, source).Run();
}

PagedFuzzResult JudgePools(FuzzOptions options, std::int64_t count,
                           const std::optional<PagedHistory>& history,
                           const Subject& subject) {
  if (!history) {
    options.operations = count * kPoolLawOperations;
    return FuzzPools(options, subject);
  }
  const RunResult ran = RunHistory(*history, subject);
  PagedFuzzResult result;
  result.ran = ran.ran ? 1 : 0;
  result.judged = ran.views > 0 ? 1 : 0;
  result.failure = ran.failure;
  result.shrunk = *history;
  return result;
}

PagedFuzzResult ExplorePaged(int depth, const FuzzOptions& options,
                             const Subject& subject) {
  FuzzOptions all = options;
  all.operations = std::numeric_limits<std::int64_t>::max();
  AllPools source(depth, all, subject);
  return Search<PoolSource>(all, subject, source).Run();
}

std::vector<std::string> NeverMet(const PassedOver& passed_over,
                                  const std::set<std::string>& known_buckets) {
  std::vector<std::string> never;
  for (const std::string& bucket : known_buckets) {
    if (!passed_over.contains(bucket)) never.push_back(bucket);
  }
  return never;
}

std::string PassedOverText(const PassedOver& passed_over,
                           const std::set<std::string>& known_buckets) {
  std::int64_t count = 0;
  std::vector<std::string> each;
  for (const auto& [bucket, met] : passed_over) {
    count += met;
    each.push_back(fmt::format("{} x {}", bucket, met));
  }
  std::string text;
  if (count > 0) {
    text = fmt::format("{} passed over: {}\n", Counted(count, "finding"),
                       fmt::join(each, ", "));
  }
  const std::vector<std::string> never = NeverMet(passed_over, known_buckets);
  if (!never.empty()) {
    text += fmt::format("known, but never met: {}\n", fmt::join(never, ", "));
  }
  return text;
}

std::string NotesText(const AnswerCounts& answers) {
  std::string text;
  for (const std::string& note : NotesOn(answers)) {
    text += fmt::format("note: {}\n", note);
  }
  return text;
}

}  // namespace kvtwin::props
