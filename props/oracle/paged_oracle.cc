#include "props/oracle/paged_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/refusals.h"
#include "core/trace/trace.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

using Kind = PagedTraceOpKind;

// About the bytes that are kept for a token of a sequence or a row that it may
// have, and for a sequence itself.
constexpr double kPoolTokenBytes = 96;
constexpr double kPoolSequenceBytes = 256;
// About the bytes that are kept, besides the data itself, for each row ever
// appended, for a prefix key, and for each `extra` of a key.
constexpr double kRowBytes = 512;
constexpr double kKeyBytes = 256;
constexpr double kExtraBytes = 48;
// A message names at most this many of the expected rows.
constexpr std::size_t kExpectedShown = 4;

std::span<const int> TokensOf(const PagedTraceOp& op) {
  return op.tokens ? std::span<const int>(*op.tokens) : std::span<const int>();
}

double KeyBytes(const PrefixKey& key) {
  auto bytes = static_cast<double>(key.salt.size());
  for (const PrefixMedia& media : key.media) {
    bytes += kExtraBytes + static_cast<double>(media.hash.size());
  }
  for (const std::string& extra : key.extra) {
    bytes += kExtraBytes + static_cast<double>(extra.size());
  }
  return bytes;
}

bool SameAs(const TensorView& actual, const TensorView& expected) {
  return CopyOf(actual, actual.dtype).bytes ==
         CopyOf(expected, actual.dtype).bytes;
}

// Whether `actual`, which is f32, becomes `expected` when it is stored.
bool IsAsPut(const TensorView& actual, const TensorView& expected,
             DType stored) {
  return actual.dtype != stored &&
         SameAs(CopyOf(CopyOf(actual, stored).view(), actual.dtype).view(),
                expected);
}

}  // namespace

bool ChangesBlocks(PagedTraceOpKind kind) {
  return kind == Kind::kOpen || kind == Kind::kFork || kind == Kind::kAppend ||
         kind == Kind::kCommit || kind == Kind::kTruncate ||
         kind == Kind::kFree;
}

bool ChangesPool(PagedTraceOpKind kind) {
  return ChangesBlocks(kind) || kind == Kind::kMedia;
}

const PagedPool* PagedOracle::twin() const {
  return twins_.empty() ? nullptr : twins_.front().pool.get();
}

int PagedOracle::Appended(int sequence) const {
  // After a wrong line, the ledger no longer follows.
  if (!ledger_->Has(sequence)) return 0;
  const int len = ledger_->SeqLen(sequence);
  return len == SeqLen(sequence) ? ledger_->End(sequence) - len : 0;
}

bool PagedOracle::IsGone(int sequence, int index, int group) const {
  if (!ledger_->Has(sequence)) return false;
  const PagedSpec& spec = SpecOf(group);
  if (!header_.rules.window && !spec.window && !spec.states) return false;
  const int last = ledger_->End(sequence, group);
  if (spec.states) {
    const bool read = index == ledger_->SeqLen(sequence) - 1 &&
                      !WroteOverState(sequence, group);
    return !read && index != last - 1;
  }
  const std::int64_t end = (std::int64_t{index} + 1) * spec.block_size;
  return std::min(end, std::int64_t{last}) <= ledger_->Low(sequence, group);
}

bool PagedOracle::WroteOverState(int sequence, int group) const {
  return header_.rules.states_in_place && SpecOf(group).states &&
         ledger_->End(sequence, group) > ledger_->SeqLen(sequence);
}

int PagedOracle::BlocksFor(int tokens, int group) const {
  const int size = SpecOf(group).block_size;
  return tokens / size + (tokens % size == 0 ? 0 : 1);
}

int PagedOracle::PlaceOf(int group, int block, int len) const {
  const PagedSpec& spec = SpecOf(group);
  if (!spec.states) return block;
  const std::int64_t after = (std::int64_t{block} + 1) * spec.block_size;
  return AsInt(std::min<std::int64_t>(after, len)) - 1;
}

Status PagedOracle::Start(const PagedTraceHeader& header,
                          const std::vector<std::string>& twins) {
  header_ = header;
  if (Status status = CheckPagedSpec(header.spec); !status.ok()) return status;
  for (const std::string& name : twins) {
    if (header.visibility_only) break;
    auto pool = MakePagedPool(header.spec, name);
    if (!pool.ok()) return pool.status();
    twins_.push_back({name, std::move(*pool)});
  }
  gate_ = MakeRecordedPool(header.spec, &recorded_);
  ledger_.emplace(header.spec, header.rules);
  return {};
}

PagedOracle::Answer PagedOracle::Ask(PagedPool& pool, const PagedTraceOp& op) {
  const auto answer = [](const Result<int>& number) {
    return Answer{number.status(), number.ok() ? *number : 0};
  };
  switch (op.kind) {
    case Kind::kOpen:
      return answer(pool.Open(TokensOf(op), op.prefix_key));
    case Kind::kFork:
      return answer(pool.Fork(op.seq, op.len));
    case Kind::kAppend: {
      const auto appended =
          pool.Append(op.seq, op.layer, op.key->view(), op.value->view());
      return {appended.status(), appended.ok() ? appended->start : 0};
    }
    case Kind::kCommit:
      return {op.tokens ? pool.Commit(op.seq, TokensOf(op))
                        : pool.Commit(op.seq, op.new_tokens)};
    case Kind::kTruncate:
      return {pool.Truncate(op.seq, op.len)};
    case Kind::kFree:
      return {pool.Free(op.seq)};
    case Kind::kMedia:
      return {pool.AddMedia(op.seq, op.media)};
    case Kind::kSeqLen:
    case Kind::kViews:
    case Kind::kSlots:
      return answer(pool.SeqLen(op.seq));
    case Kind::kTable:
    case Kind::kCsr:
    case Kind::kAttend:
      for (const int sequence : op.sequences) {
        const auto len = pool.SeqLen(sequence);
        if (!len.ok()) return {len.status()};
      }
      return {};
    case Kind::kUsage:
      return {};
  }
  return {};
}

std::string PagedOracle::FindMisuse(const PagedTraceOp& op) {
  recorded_ = {op.made, op.len, op.result != StatusCode::kOk, op.kept};
  const Status status = Ask(*gate_, op).status;
  if (!status.ok() && status.code() != StatusCode::kCacheFull) {
    return status.ToString();
  }
  if (op.kind == Kind::kAttend) return FindWrongQuery(op);
  if (op.kind != Kind::kSlots || !ledger_holds_) return "";
  const std::int64_t end = std::int64_t{op.begin} + std::ssize(op.slots);
  const int most = ledger_->End(op.seq, op.group);
  if (op.begin >= 0 && end <= most) return "";
  return fmt::format("positions {} to {} are not within the {} of sequence {}",
                     op.begin, end, most, op.seq);
}

std::string PagedOracle::FindExcess(const PagedTraceOp& op) {
  int added = 0;
  const bool makes = op.kind == Kind::kOpen || op.kind == Kind::kFork;
  if (makes && std::ssize(sequences_) >= kTracePoolSequencesMax) {
    return fmt::format("there are {} sequences, this program stops there",
                       kTracePoolSequencesMax);
  }
  if (op.kind == Kind::kAppend && op.result == StatusCode::kOk) {
    // A row that is computed again is kept twice.
    const int rows = RowCount(op);
    const int copies = header_.rules.recomputes_last ? rows + 1 : rows;
    const std::size_t bytes = op.key->bytes.size() + op.value->bytes.size();
    kept_bytes_ += copies * (kRowBytes + static_cast<double>(bytes) / rows);
  } else if (op.kind == Kind::kCommit) {
    longest_ = std::max(longest_, SeqLen(op.seq));
  } else if (op.kind == Kind::kFork) {
    added = op.len;
  } else if (op.kind == Kind::kOpen) {
    added = std::min(op.len, Size(TokensOf(op)));
    const double key_bytes = KeyBytes(op.prefix_key);
    key_bytes_ = std::max(key_bytes_, key_bytes);
    if (!ledger_->KnowsKey(op.prefix_key)) kept_bytes_ += kKeyBytes + key_bytes;
  } else {
    return "";
  }
  const auto excess = [](double bytes, double most) {
    if (bytes <= most) return std::string();
    return fmt::format(
        "the pool would now need {:.3g} bytes, this program stops at {:.3g}",
        bytes, most);
  };
  std::string found;
  if (op.kind != Kind::kAppend) {
    found = excess(
        kPoolTokenBytes * (static_cast<double>(ledger_->Held()) + added) +
            (kPoolSequenceBytes + header_.spec.layers * double{sizeof(int)}) *
                static_cast<double>(sequences_.size()),
        kTraceTokenBytesMax);
  }
  if (!found.empty()) return found;
  double bytes = kept_bytes_;
  if (!header_.visibility_only) {
    // The twins keep a prefix and a key for each block, and a key for each
    // sequence.
    const double blocks = header_.spec.blocks;
    bytes += blocks * double{sizeof(int)} * longest_ +
             (blocks + static_cast<double>(sequences_.size())) * key_bytes_;
  }
  return excess(bytes, kTraceCacheBytesMax);
}

void PagedOracle::Remember(const PagedTraceOp& op) {
  if (ChangesBlocks(op.kind)) {
    needs_.reset();
    unshared_blocks_.reset();
    if (ledger_holds_) RememberReach(op);
  }
  // A fork or open keeps the blocks of all other sequences, its source too.
  const bool makes = op.kind == Kind::kOpen || op.kind == Kind::kFork;
  if (ChangesBlocks(op.kind) && !makes) ForgetBlocks(op.seq);
  if (op.kind == Kind::kFree) sequences_.erase(op.seq);
  if (op.kind != Kind::kAppend || op.result != StatusCode::kOk) return;
  const std::vector<int> sequences(AsSize(RowCount(op)), op.seq);
  std::vector<std::int32_t> positions(sequences.size());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    positions[i] = SeqLen(op.seq) + AsInt(i);
  }
  puts_.Add(op.line, RowsOf(op), 0, op.layer, sequences, positions);
}

void PagedOracle::ForgetBlocks(int sequence) {
  const auto list = blocks_.find(sequence);
  if (list == blocks_.end()) return;
  for (const auto& [spot, shown] : list->second) {
    const Spot block = {spot.first, shown.block};
    auto& by_end = owners_.at(block).by_end;
    by_end.erase({shown.end, sequence});
    if (by_end.size() == 1) --shared_;
    if (by_end.empty()) owners_.erase(block);
  }
  blocks_.erase(list);
}

OracleStep PagedOracle::Step(const PagedTraceOp& op) {
  OracleStep step;
  step.bad_input = FindMisuse(op);
  if (step.bad_input.empty()) step.bad_input = FindExcess(op);
  if (!step.bad_input.empty()) return step;
  Remember(op);
  if (ChangesPool(op.kind)) last_change_ = op.kind;
  if (!twins_hold_) twins_.clear();
  places_.clear();
  output_rows_judged_ = 0;
  const std::optional<Failure> malformed = ReadPlaces(op, places_);
  if (!twins_.empty()) {
    step.identity = malformed ? malformed : CompareTwins(op, places_);
  }
  twins_hold_ = !step.identity;
  if (ledger_holds_) {
    step.visibility = malformed ? malformed : FollowLedger(op, places_);
  }
  ledger_holds_ = ledger_holds_ && !step.visibility;
  if (ledger_->MostCommits() > kTracePoolCommitsMax) {
    step.bad_input = fmt::format(
        "the same tokens were committed more than {} times, this program stops "
        "there",
        kTracePoolCommitsMax);
  }
  if (op.kind == Kind::kOpen || op.kind == Kind::kFork) {
    sequences_.insert(op.made);
  }
  return step;
}

// Identity
// ---------------------------------------------------------------------------

std::optional<Failure> PagedOracle::CompareTwins(
    const PagedTraceOp& op, const std::vector<Place>& places) {
  std::vector<TwinFailure> failures;
  for (Twin& twin : twins_) {
    failures.emplace_back(twin.name, Compare(op, *twin.pool, places));
  }
  return Together(failures);
}

std::optional<Failure> PagedOracle::Compare(
    const PagedTraceOp& op, PagedPool& twin,
    const std::vector<Place>& places) const {
  const auto [status, number] = Ask(twin, op);
  if (op.kind == Kind::kAppend) {
    auto failure = WrongUnlessEqual("result", StatusName(op.result),
                                    StatusName(status.code()));
    if (failure && !status.ok()) {
      failure->text += fmt::format(" ({})", status.message());
    }
    if (failure || !status.ok() || !op.start) return failure;
    return WrongUnlessEqual("start", *op.start, number);
  }
  if (!status.ok()) return WrongAnswer("{}", status.ToString());
  if (op.kind == Kind::kOpen || op.kind == Kind::kFork) {
    auto failure = WrongUnlessEqual("result", op.made, number);
    if (failure) return failure;
    if (op.kind == Kind::kFork) {
      return WrongUnlessEqual("kept", op.kept.value_or(op.len),
                              *twin.SeqLen(number));
    }
    failure = WrongUnlessEqual("len", op.len, *twin.SeqLen(number));
    const std::string other = failure ? OtherKeyText(op) : "";
    if (!other.empty()) failure->text += ": " + other;
    return failure;
  }
  if (op.kind == Kind::kSeqLen) return WrongUnlessEqual("len", op.len, number);
  if (op.kind == Kind::kTruncate) {
    return WrongUnlessEqual("kept", op.kept.value_or(op.len),
                            *twin.SeqLen(op.seq));
  }
  if (op.kind == Kind::kUsage) {
    const PagedUsage expected = twin.Usage();
    for (const auto& [name, count] : {std::pair("free", &PagedUsage::free),
                                      {"cached", &PagedUsage::cached},
                                      {"used", &PagedUsage::used},
                                      {"shared", &PagedUsage::shared}}) {
      auto failure = WrongUnlessEqual(name, op.usage.*count, expected.*count);
      if (failure) return failure;
    }
    return std::nullopt;
  }
  if (op.kind == Kind::kViews) {
    if (auto failure = CompareViews(op, twin)) return failure;
  }
  for (const auto& [sequence, index, block, group] : places) {
    const int size = PlaceSize(group);
    const int position = index * size;
    const auto slot =
        twin.Group(group)->SlotMapping(sequence, position, position + 1);
    if (!slot.ok()) return WrongAnswer("{}", slot.status().ToString());
    const auto expected = slot->at(0) < 0 ? -1 : AsInt(slot->at(0) / size);
    if (block == expected) continue;
    return WrongAnswer("{} of sequence {} is {}, expected {}",
                       PlaceText(group, index), sequence, block, expected);
  }
  if (op.kind != Kind::kTable) return std::nullopt;
  int columns = 0;
  for (const int sequence : op.sequences) {
    columns = std::max(columns, BlocksFor(SeqLen(sequence), op.group));
  }
  return WrongUnlessEqual("columns", op.table.columns, columns);
}

std::optional<Failure> PagedOracle::CompareViews(const PagedTraceOp& op,
                                                 const PagedPool& twin) const {
  const auto views = twin.Views(op.seq, op.layer);
  if (!views.ok()) return WrongAnswer("{}", views.status().ToString());
  int rows = 0;
  for (const PagedView& view : *views) rows += view.length;
  if (auto failure =
          WrongUnlessEqual("the number of rows", RowCount(op), rows)) {
    return failure;
  }
  const KvView actual = RowsOf(op);
  int row = -1;
  for (const PagedView& view : *views) {
    for (int i = 0; i < view.length; ++i) {
      ++row;
      if (auto failure =
              WrongUnlessEqual(fmt::format("position of row {}", row),
                               PositionOf(op, row), view.start + i)) {
        return failure;
      }
      const auto same = [&](const TensorView& shown,
                            const TensorView& expected) {
        return RowBytes(shown, row, VLayout::kPlain) ==
               CopyOf(Slice(expected, 2, i), shown.dtype).bytes;
      };
      KvView expected;
      expected.key = Slice(view.key, 2, i);
      if (op.value) expected.value = Slice(view.value, 2, i);
      if (same(actual.key, view.key) &&
          (!op.value || same(actual.value, view.value))) {
        continue;
      }
      return Failure{.text = WrongRow(op, row, {expected}), .column = row};
    }
  }
  return std::nullopt;
}

// Returns "position 3 of sequence 0 has the row of ...; expected ...". `column`
// is the column of the view, where any of the rows in `expected` is right.
std::string PagedOracle::WrongRow(const PagedTraceOp& op, int column,
                                  const std::vector<KvView>& expected) const {
  const KvView actual = RowsOf(op);
  const TensorView key = Slice(actual.key, 2, column);
  const TensorView value = op.value ? Slice(actual.value, 2, column) : key;
  const bool key_wrong = std::ranges::none_of(
      expected, [&](const KvView& row) { return SameAs(key, row.key); });
  const bool value_wrong = op.value && !SameAs(value, expected[0].value);
  std::string what =
      fmt::format("position {} of sequence {} has{} ", PositionOf(op, column),
                  op.seq, key_wrong ? "" : ", as its V, that of");
  KvView whose = actual;
  if (key_wrong) whose.value = {};  // K is wrong, V may be right.
  what += AppendedText(puts_.Find(whose, column, VLayout::kPlain, 0, op.layer),
                       op.layer);
  const PagedSpec& spec = SpecOfLayer(header_.spec, op.layer);
  const DType key_dtype = spec.dtype;
  const DType value_dtype = spec.v_dtype.value_or(spec.dtype);
  const bool as_put =
      expected.size() == 1 &&
      (!key_wrong || IsAsPut(key, expected[0].key, key_dtype)) &&
      (!value_wrong || IsAsPut(value, expected[0].value, value_dtype));
  if (as_put) {
    what += fmt::format(" as it was put, not as {} stores it",
                        DTypeName(key_wrong ? key_dtype : value_dtype));
  } else {
    what += ExpectedText(expected, op.layer);
  }
  std::vector<std::string> rows;
  for (const KvView& row : expected) {
    if (rows.size() == kExpectedShown) break;
    rows.push_back(RowText(row, 0, VLayout::kPlain));
  }
  const std::string later =
      expected.size() > 1
          ? ""
          : LaterDifference(actual, column, VLayout::kPlain,
                            Slice(expected[0].key, 2, 0),
                            op.value ? Slice(expected[0].value, 2, 0) : key);
  return fmt::format(
      "{}; found {}, expected {}{}{}", what,
      RowText(actual, column, VLayout::kPlain), fmt::join(rows, " or "),
      expected.size() > kExpectedShown ? " or another" : "", later);
}

// Returns "; expected the row of ...", or "; expected any of 3 rows: ...".
std::string PagedOracle::ExpectedText(const std::vector<KvView>& expected,
                                      int layer) const {
  std::vector<std::string> rows;
  for (const KvView& row : expected) {
    if (rows.size() == kExpectedShown) {
      rows.push_back(fmt::format("{} more", expected.size() - kExpectedShown));
      break;
    }
    const PutRow* put = puts_.Find(row, 0, VLayout::kPlain, 0, layer);
    rows.push_back(AppendedText(put, layer));
  }
  if (expected.size() == 1) return "; expected " + rows[0];
  return fmt::format("; expected any of {} rows: {}", expected.size(),
                     fmt::join(rows, ", "));
}

// Visibility
// ---------------------------------------------------------------------------

std::optional<Failure> PagedOracle::FollowLedger(
    const PagedTraceOp& op, const std::vector<Place>& places) {
  switch (op.kind) {
    case Kind::kOpen:
      return FollowOpen(op);
    case Kind::kFork:
      return FollowFork(op);
    case Kind::kAppend:
      return FollowAppend(op);
    case Kind::kCommit:
      return FollowCommit(op);
    case Kind::kTruncate:
      if (auto failure = CheckKept(op)) return failure;
      ledger_->Truncate(op.seq, op.kept.value_or(op.len));
      return std::nullopt;
    case Kind::kMedia:
      ledger_->AddMedia(op.seq, op.media);
      return std::nullopt;
    case Kind::kFree:
      ledger_->Free(op.seq);
      return std::nullopt;
    case Kind::kSeqLen:
      return WrongUnlessEqual("len", op.len, ledger_->SeqLen(op.seq));
    case Kind::kUsage:
      return CheckUsage(op.usage);
    case Kind::kAttend:
      return CheckOutput(op);
    case Kind::kViews:
      if (auto failure = CheckViews(op)) return failure;
      break;
    default:
      break;
  }
  for (const Place& place : places) {
    if (auto failure = CheckPlace(place, op.line)) return failure;
  }
  return std::nullopt;
}

std::optional<Failure> PagedOracle::FollowFork(const PagedTraceOp& op) {
  if (sequences_.contains(op.made)) {
    return WrongAnswer("result is {}, but that sequence exists already",
                       op.made);
  }
  if (auto failure = CheckKept(op)) return failure;
  ledger_->Fork(op.seq, op.made, op.kept.value_or(op.len));
  return std::nullopt;
}

// Checks the length at which a fork or a truncation took effect (P14). A pool
// that gave up rows that the next token needs at `len`, or wrote over the
// state, chooses a length; the next views show whether it has the rows for
// `kept`.
std::optional<Failure> PagedOracle::CheckKept(const PagedTraceOp& op) const {
  const int kept = op.kept.value_or(op.len);
  if (kept > op.len) {
    return WrongAnswer("kept is {}, the first {} tokens were asked for", kept,
                       op.len);
  }
  const bool cuts = op.len < ledger_->SeqLen(op.seq);
  bool may = false;
  for (int number = 0; number < Size(header_.spec.groups); ++number) {
    const PagedSpec& group = SpecOf(number);
    const bool gives_up = group.window || group.states;
    may = may || (cuts && gives_up) || WroteOverState(op.seq, number);
  }
  if (kept == op.len || may) return std::nullopt;
  return WrongAnswer("kept is {}, sequence {} can continue at {}", kept, op.seq,
                     op.len);
}

std::optional<Failure> PagedOracle::FollowOpen(const PagedTraceOp& op) {
  if (sequences_.contains(op.made)) {
    return WrongAnswer("result is {}, but that sequence exists already",
                       op.made);
  }
  if (!ledger_->MayOpen(TokensOf(op), op.prefix_key, op.len)) {
    return WrongAnswer("len is {}: {}", op.len, WhyNotFoundText(op));
  }
  ledger_->Open(op.made, TokensOf(op), op.prefix_key, op.len);
  return std::nullopt;
}

// Returns the reason why no prompt may find `len` tokens.
std::string PagedOracle::WhyNotFoundText(const PagedTraceOp& op) const {
  const PagedSpec& spec = header_.spec;
  const auto prompt = Size(TokensOf(op));
  if (op.len > prompt) {
    return fmt::format("the prompt has {} tokens", prompt);
  }
  if (!ledger_->IsWhole(TokensOf(op), op.len)) {
    if (op.len % spec.block_size != 0) {
      return fmt::format("a prefix is found in whole blocks of {}",
                         spec.block_size);
    }
    return header_.rules.recomputes_last
               ? fmt::format(
                     "this prompt of {} tokens is not whole blocks of "
                     "{}, so that its last token is not found",
                     prompt, spec.block_size)
               : "a prefix is found without the prompt's last token, which is "
                 "still to be computed";
  }
  if (op.len > spec.max_seq_len) {
    return fmt::format("max_seq_len is {}", spec.max_seq_len);
  }
  const std::string other = OtherKeyText(op);
  if (!other.empty()) return other;
  return fmt::format(
      "the first {} tokens of the prompt were never committed, by `tokens`, "
      "one after another from the start of a sequence",
      op.len % spec.block_size == 0 ? op.len : op.len + 1);
}

std::optional<Failure> PagedOracle::FollowCommit(const PagedTraceOp& op) {
  const int count = SeqLen(op.seq) - ledger_->SeqLen(op.seq);
  const auto again = ledger_->NextAgain(op.seq);
  if (again && op.tokens && count > 0 && op.tokens->front() != *again) {
    return WrongAnswer(
        "tokens[0] is {}: the prompt of sequence {} was found to its last "
        "token, which is {} and is computed again in place",
        op.tokens->front(), op.seq, *again);
  }
  ledger_->Commit(op.seq, count, TokensOf(op), op.line);
  return std::nullopt;
}

// Returns a text if the tokens were committed, but under another key or with
// other media.
std::string PagedOracle::OtherKeyText(const PagedTraceOp& op) const {
  if (!ledger_holds_ || ledger_->MayOpen(TokensOf(op), op.prefix_key, op.len)) {
    return "";
  }
  auto line = ledger_->FirstCommit(TokensOf(op), op.len, op.prefix_key);
  const bool media = line.has_value();
  if (!line) line = ledger_->FirstCommit(TokensOf(op), op.len, std::nullopt);
  if (!line) return "";
  return fmt::format("these tokens were committed {}, line {}",
                     media ? "with other media" : "under another key", *line);
}

std::optional<Failure> PagedOracle::FollowAppend(const PagedTraceOp& op) {
  if (op.result != StatusCode::kOk) return std::nullopt;
  const PagedSpec& spec = header_.spec;
  const int len = ledger_->SeqLen(op.seq);
  if (op.start && *op.start != len) {
    return WrongAnswer("start is {}, sequence {} has {} tokens", *op.start,
                       op.seq, len);
  }
  const std::int64_t end = len + std::int64_t{RowCount(op)};
  if (end > spec.max_seq_len) {
    return WrongAnswer(
        "result is ok, but sequence {} cannot have {} tokens: "
        "max_seq_len is {}",
        op.seq, end, spec.max_seq_len);
  }
  // Blocks before the first block in the window may be gone; earlier states,
  // too. A group may take any part of the pool's blocks.
  const int group = GroupOfLayer(op.layer);
  const int gone = ledger_->Low(op.seq, group) / SpecOf(group).block_size;
  const int needed =
      SpecOf(group).states ? 1 : BlocksFor(AsInt(end), group) - gone;
  if (needed > spec.blocks) {
    return WrongAnswer(
        "result is ok, but sequence {} cannot have {} tokens: the "
        "pool has {} blocks, {} are needed",
        op.seq, end, spec.blocks, needed);
  }
  ledger_->Append(op.seq, op.layer, op.key->view(), op.value->view());
  return std::nullopt;
}

std::optional<Failure> PagedOracle::CheckViews(const PagedTraceOp& op) {
  const int count = RowCount(op);
  const KvView actual = RowsOf(op);
  for (int i = 0; i < count; ++i) {
    const int position = PositionOf(op, i);
    const TensorView key = Slice(actual.key, 2, i);
    const TensorView value =
        op.value ? Slice(actual.value, 2, i) : TensorView();
    if (ledger_->See(op.seq, op.layer, position, key,
                     op.value ? &value : nullptr)) {
      continue;
    }
    std::vector<KvRows> rows = ledger_->Candidates(op.seq, op.layer, position);
    std::vector<KvView> expected;
    std::vector<KvRows*> distinct;
    for (KvRows& row : rows) {
      const auto same = [&](const KvRows* other_rows) {
        return *other_rows == row;
      };
      if (std::ranges::none_of(distinct, same)) distinct.push_back(&row);
    }
    for (KvRows* distinct_row : distinct) {
      KvRows& row = *distinct_row;
      row.key = CopyOf(row.key.view(), op.key->dtype);
      if (op.value) row.value = CopyOf(row.value.view(), op.value->dtype);
      KvView& view = expected.emplace_back();
      view.key = row.key.view();
      if (op.value) view.value = row.value.view();
    }
    return Failure{.text = WrongRow(op, i, expected), .column = i};
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
