#include "props/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <set>
#include <type_traits>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "props/check_name.h"
#include "props/entitlement.h"
#include "props/hash.h"
#include "props/misuse.h"
#include "props/rows.h"
#include "reference/ledger.h"

namespace kvtwin::props {
namespace {

// Thrown at the first difference, caught in RunHistory.
struct Differs {
  std::string check;
  std::string text;
  int row = -1;
  int column = -1;
  int first_cell = 0;
};

std::string CellsText(const Cache& cache) {
  std::vector<CellEntry> entries;
  cache.ListCells(entries);
  std::string text;
  for (std::size_t i = 0; i < entries.size() && i < 24; ++i) {
    const CellEntry& entry = entries[i];
    const bool same = i > 0 && entries[i - 1].cell == entry.cell;
    text += same ? fmt::format("+s{}", entry.sequence)
                 : fmt::format(" {}:{}@s{}", entry.cell, entry.position,
                               entry.sequence);
  }
  return entries.size() > 24 ? text + " ..." : text;
}

class Run {
 public:
  Run(const History& history, const Subject& subject, Story* story,
      Observer* observer, RunResult& result)
      : setup_(history.setup),
        subject_(subject),
        story_(story),
        observer_(observer),
        result_(result),
        ledger_(setup_.spec) {}

  // False if the caches cannot be made of this setup.
  bool SetUp();
  void Do(const Op& op);
  void TearDown();

 private:
  struct Pass {
    std::vector<std::int32_t> positions;
    std::vector<int> sequences;
    std::vector<int> multimodal;
    bool active = false;
    bool reserve = false;
    // The ledger can judge the mask: no Remove since it was built, and no
    // CopyPrefix since the view was chosen, which may now be too narrow.
    bool fresh = false;
    bool copied = false;
    std::int64_t first_serial = 0;
  };

  // Comparing.
  // Texts may be given as functions that make them: most are never needed.
  template <class Text>
  static std::string Made(const Text& text) {
    if constexpr (std::is_invocable_v<Text>) {
      return text();
    } else {
      return std::string(text);
    }
  }
  template <class Text>
  void Check(bool holds, CheckName check, const Text& text) {
    if (!holds) throw Differs{std::string(check.name()), Made(text)};
  }
  template <class Call>
  void CheckCodes(const Call& call, StatusCode ledger, StatusCode reference,
                  StatusCode subject);
  void CheckAllCells();
  void CheckCells();
  void CheckTokens();
  void CheckViews(int layer);
  void CheckBytes(std::string_view what, const TensorView& reference,
                  const TensorView& subject, std::size_t cell_dim);
  std::string Picture(std::string_view what, const TensorView& reference,
                      const TensorView& subject,
                      std::array<std::int64_t, 3> index, std::size_t cell_dim);
  void Hash(const void* data, std::size_t size) {
    result_.digest = HashBytes(data, size, result_.digest);
  }
  void HashInt(std::int64_t value) { Hash(&value, sizeof(value)); }
  // Before a call that the observer compares the state around.
  void Look() {
    if (observer_ != nullptr) observer_->Look(ledger_, *reference_);
  }
  void Tell(std::string call, std::string_view answer);
  bool drawing() const {
    return story_ != nullptr && !story_->steps.empty() &&
           story_->steps.back().drawn;
  }
  void DrawCellsNow();
  void DrawViewNow(int layer, const KvView& reference, const KvView& subject);

  // Calls, each to all three.
  bool StartForward(bool reserve);
  void PutAll(const Op& op);
  void GetAll();
  void PutRows(int layer);
  void SetLayer(int layer);
  void SetCausal(const std::vector<int>& except);
  StatusCode Remove(int seq, std::int32_t begin, std::int32_t end);
  void CopyPrefix(int src, int dst, std::int32_t len);
  bool CanResume(int seq, std::int32_t pos);
  void EncoderCached();

  // Operations.
  void Put(const Op& op);
  void Drop(const Op& op);
  void Copy(const Op& op);
  void Misuse(int which);
  void Poison();
  void Reload();
  void MakeBatch(const Op& op);
  Segment Legalized(Segment segment, std::size_t batch_room);
  void AppendSegment(const Segment& segment);

  // The state, as the ledger tells it.
  int TypeOf(int layer) const {
    return wrapper_ ? layer % static_cast<int>(setup_.spec.caches.size()) : 0;
  }
  bool IsEncoder(int type) const {
    const CacheSpec& spec = setup_.spec;
    return (wrapper_ ? spec.caches[static_cast<std::size_t>(type)] : spec)
               .kind == Kind::kEncoder;
  }
  int types() const {
    return wrapper_ ? static_cast<int>(setup_.spec.caches.size()) : 1;
  }
  void SetType(int type);
  std::int32_t Next(int seq);
  std::int64_t Free();
  std::int32_t Resolve(int seq, const RelativePos& pos);
  // The id of the sequence that an operation calls `seq`.
  int IdOf(int seq) const {
    const std::int64_t legal =
        setup_.legal ? seq % setup_.init.max_sequences : seq;
    return static_cast<int>(
        std::min<std::int64_t>(legal + setup_.first_id, kOpenEnd));
  }

  const Setup& setup_;
  const Subject& subject_;
  Story* story_;
  Observer* observer_;
  RunResult& result_;
  const bool wrapper_ = setup_.spec.kind == Kind::kWrapper;

  reference::Ledger ledger_;
  std::unique_ptr<Cache> reference_;
  std::unique_ptr<Cache> tested_;
  int active_type_ = 0;
  Pass pass_;
  std::int64_t serial_ = 0;
  int first_cell_ = 0;  // Of the views that are compared.
  std::set<int> put_layers_;
  RowBuffer keys_;
  RowBuffer values_;
  std::vector<CellEntry> reference_cells_;
  std::vector<CellEntry> tested_cells_;
};

bool SameShape(const KvView& a, const KvView& b) {
  return a.mask.shape == b.mask.shape && a.key.shape == b.key.shape &&
         a.value.shape == b.value.shape;
}

template <class Call>
void Run::CheckCodes(const Call& call, StatusCode ledger, StatusCode reference,
                     StatusCode subject) {
  ++result_.operations;
  HashInt(static_cast<std::int64_t>(subject));
  if (observer_ != nullptr) observer_->Outcome(subject);
  if (story_ != nullptr) Tell(Made(call), StatusName(subject));
  Check(ledger == reference, "reference: result", [&] {
    return fmt::format("{} is {} by the ledger, {} by the reference",
                       Made(call), StatusName(ledger), StatusName(reference));
  });
  Check(reference == subject, "subject: result", [&] {
    return fmt::format("{} is {} by the reference, {} by {}", Made(call),
                       StatusName(reference), StatusName(subject),
                       subject_.name);
  });
}

void Run::Tell(std::string call, std::string_view answer) {
  if (story_ == nullptr) return;
  Step& step = story_->steps.emplace_back();
  step.number = std::ssize(story_->steps);
  step.call = std::move(call);
  step.answer = answer;
  step.begins_pass = step.call.starts_with("StartForward");
  if (story_->frame && step.number >= story_->from) DrawCellsNow();
}

void Run::DrawCellsNow() {
  if (reference_ == nullptr || tested_ == nullptr) return;
  Step& step = story_->steps.back();
  DrawCells(*story_->frame, HeldCells(*reference_), HeldCells(*tested_),
            reference_->CellCount(), step);
  step.cache = active_type_;
}

void Run::DrawViewNow(int layer, const KvView& reference,
                      const KvView& subject) {
  if (!SameShape(reference, subject)) return;
  DrawView(*story_->frame,
           {.ledger = ledger_.active(),
            .layer = layer,
            .found = subject,
            .due = reference,
            .permuted_v = setup_.config.permuted_v,
            .fresh = pass_.fresh,
            .positions = pass_.positions,
            .sequences = pass_.sequences},
           story_->steps.back());
}

void Run::SetType(int type) {
  ledger_.SetLayerType(type);
  if (!wrapper_ || active_type_ == type) return;
  active_type_ = type;
  Check(reference_->SetLayerType(type).ok() && tested_->SetLayerType(type).ok(),
        "subject: result",
        [&] { return fmt::format("SetLayerType({}) is refused", type); });
}

// Memberships are equal, and so is the multiset of tokens, in all of a
// wrapper's caches.
void Run::CheckAllCells() {
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    CheckCells();
    Check(tested_->UnderlyingCache() != nullptr, "subject: underlying cache",
          "UnderlyingCache is null");
  }
  SetType(kept_type);
}

void Run::CheckCells() {
  reference_->ListCells(reference_cells_);
  tested_->ListCells(tested_cells_);
  if (reference_cells_ != tested_cells_) {
    if (drawing()) DrawCellsNow();  // Of this cache.
    Check(false, "subject: cells", [&] {
      return fmt::format("cells are\n  reference {}\n  {}{}",
                         CellsText(*reference_), subject_.name,
                         CellsText(*tested_));
    });
  }
  Hash(tested_cells_.data(), tested_cells_.size() * sizeof(CellEntry));
  CheckTokens();
}

void Run::CheckTokens() {
  const auto mix = [](std::int64_t a, std::uint64_t seed) {
    std::uint64_t z =
        static_cast<std::uint64_t>(a) + seed + 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  std::uint64_t in_cells = 0;
  std::uint64_t owners = 0;
  for (std::size_t i = 0; i < reference_cells_.size(); ++i) {
    const CellEntry& entry = reference_cells_[i];
    owners += mix(entry.sequence, 0);
    const bool last = i + 1 == reference_cells_.size() ||
                      reference_cells_[i + 1].cell != entry.cell;
    if (!last) continue;
    in_cells += mix(entry.position, owners);
    owners = 0;
  }
  std::uint64_t in_ledger = 0;
  for (const auto& token : ledger_.active().tokens()) {
    for (const int seq : token.sequences) owners += mix(seq, 0);
    in_ledger += mix(token.position, owners);
    owners = 0;
  }
  if (in_cells == in_ledger) return;
  std::string text = "the reference's cells do not hold the ledger's tokens";
  text += "\n  reference" + CellsText(*reference_) + "\n  ledger   ";
  for (const auto& token : ledger_.active().tokens()) {
    text += fmt::format(" {}@s{}", token.position,
                        fmt::join(token.sequences, "+s"));
  }
  Check(false, "reference: tokens", text);
}

void Run::CheckBytes(std::string_view what, const TensorView& reference,
                     const TensorView& subject, std::size_t cell_dim) {
  Check(subject.dtype == reference.dtype && subject.shape == reference.shape,
        "subject: view shape", [&] {
          return fmt::format("{} is {} {} by the reference, {} {} by {}", what,
                             DTypeName(reference.dtype),
                             ShapeText(reference.shape),
                             DTypeName(subject.dtype), ShapeText(subject.shape),
                             subject_.name);
        });
  // Ours are dense in dimension 0, so that whole runs can be compared; other
  // backends' are made so.
  const std::size_t size = SizeOf(reference.dtype);
  if (subject.stride[0] != static_cast<std::int64_t>(size)) {
    const DenseTensor dense = CopyOf(subject, subject.dtype);
    return CheckBytes(what, reference, dense.view(), cell_dim);
  }
  const std::size_t run = size * static_cast<std::size_t>(reference.shape[0]);
  const auto dense = [&](const TensorView& view) {
    return view.stride[1] == static_cast<std::int64_t>(run) &&
           view.stride[2] == view.stride[1] * view.shape[1];
  };
  if (dense(reference)) {
    // In one piece, if they are equal.
    const std::size_t all =
        size * static_cast<std::size_t>(reference.elements());
    Hash(reference.data, all);
    if (dense(subject) && std::memcmp(reference.data, subject.data, all) == 0) {
      return;
    }
  }
  for (std::int64_t k = 0; k < reference.shape[2]; ++k) {
    for (std::int64_t j = 0; j < reference.shape[1]; ++j) {
      const std::byte* due = reference.at(0, j, k);
      const std::byte* found = subject.at(0, j, k);
      if (!dense(reference)) Hash(due, run);
      if (std::memcmp(due, found, run) == 0) continue;
      std::int64_t i = 0;
      while (std::memcmp(reference.at(i, j, k), subject.at(i, j, k), size) == 0)
        ++i;
      const CheckName check = what == "mask" ? CheckName("subject: mask bytes")
                              : what == "K"  ? CheckName("subject: K bytes")
                                             : CheckName("subject: V bytes");
      throw Differs{std::string(check.name()),
                    Picture(what, reference, subject, {i, j, k}, cell_dim),
                    what == "mask" ? static_cast<int>(j) : -1,
                    static_cast<int>(std::array{i, j, k}.at(cell_dim))};
    }
  }
}

// The cells around the first element that differs, side by side.
std::string Run::Picture(std::string_view what, const TensorView& reference,
                         const TensorView& subject,
                         std::array<std::int64_t, 3> index,
                         std::size_t cell_dim) {
  constexpr std::int64_t kShown = 8;
  const std::int64_t wrong = index[cell_dim];
  const std::int64_t first = std::max<std::int64_t>(0, wrong - kShown / 2);
  const std::int64_t end = std::min(reference.shape[cell_dim], first + kShown);
  std::array<std::string, 5> lines = {
      "    cell      ", "    holds     ", "    reference ",
      fmt::format("    {:<9} ", subject_.name.substr(0, 9)), "              "};
  reference_->ListCells(reference_cells_);
  for (index[cell_dim] = first; index[cell_dim] < end; ++index[cell_dim]) {
    const std::int64_t cell = first_cell_ + index[cell_dim];
    std::string holds;
    for (const CellEntry& entry : reference_cells_) {
      if (entry.cell != cell) continue;
      holds += fmt::format("{}{}", holds.empty() ? "" : "+", entry.sequence);
      if (&entry == &reference_cells_.back() || (&entry + 1)->cell != cell) {
        holds += fmt::format("@{}", entry.position);
      }
    }
    const auto value = [&](const TensorView& tensor) {
      const float element =
          LoadElement(tensor.at(index[0], index[1], index[2]), tensor.dtype);
      if (what != "mask") return fmt::format("{:g}", element);
      return std::string(element == 0 ? "#" : std::isinf(element) ? "." : "?");
    };
    lines[0] += fmt::format("{:<9} ", cell);
    lines[1] += fmt::format("{:<9} ", holds.empty() ? "-" : holds);
    lines[2] += fmt::format("{:<9} ", value(reference));
    lines[3] += fmt::format("{:<9} ", value(subject));
    lines[4] += fmt::format("{:<9} ", index[cell_dim] == wrong ? "^" : "");
  }
  for (std::string& line : lines) line.erase(line.find_last_not_of(' ') + 1);
  const std::string where =
      what == "mask"
          ? fmt::format("row {} of the mask (# visible, . hidden)", index[1])
          : fmt::format("an element of {}", what);
  return fmt::format("{} differs (sequence@position)\n\n{}", where,
                     fmt::join(lines, "\n"));
}

void Run::CheckViews(int layer) {
  Result<KvView> reference = reference_->Get();
  Result<KvView> subject = tested_->Get();
  ++result_.operations;
  if (story_ != nullptr) {
    Tell(fmt::format("Get(layer {})", layer),
         subject.ok() ? "" : StatusName(subject.status().code()));
  }
  Check(reference.ok() && subject.ok(), "subject: result", [&] {
    return fmt::format("Get of layer {} is refused: reference {}, {} {}", layer,
                       reference.status().ToString(), subject_.name,
                       subject.status().ToString());
  });
  Check(reference->first_cell == subject->first_cell, "subject: view cells",
        [&] {
          return fmt::format(
              "the view starts at cell {} by the reference, {} by {}",
              reference->first_cell, subject->first_cell, subject_.name);
        });
  HashInt(subject->first_cell);
  first_cell_ = reference->first_cell;
  const bool has_mask = reference->mask.data != nullptr;
  Check(has_mask == (subject->mask.data != nullptr), "subject: mask bytes",
        "only one of them has a mask");
  if (drawing() && has_mask) {
    DrawViewNow(layer, *reference, *subject);
  }
  const bool permuted = setup_.config.permuted_v;
  const bool judged = pass_.fresh || !has_mask;
  try {
    if (has_mask) CheckBytes("mask", reference->mask, subject->mask, 0);
    CheckBytes("K", reference->key, subject->key, 2);
    CheckBytes("V", reference->value, subject->value, permuted ? 0 : 2);
    if (observer_ != nullptr) {
      observer_->Get(static_cast<std::size_t>(TypeOf(layer)), layer, *reference,
                     ledger_, *reference_);
    }
    if (!judged) return;
    const auto wrong = FindWrongRow(ledger_, layer, *reference, permuted);
    Check(!wrong, "reference: rows",
          [&] { return fmt::format("layer {}: {}", layer, wrong->text); });
  } catch (Differs& differs) {
    differs.first_cell = first_cell_;
    // A row that sees what it has no right to says more than the first byte.
    if (has_mask && judged && SameShape(*reference, *subject)) {
      const auto wrong = FindWrongRow(ledger_, layer, *subject, permuted);
      if (wrong && wrong->column >= 0) {
        differs.row = wrong->row;
        differs.column = wrong->column;
      }
    }
    throw;
  }
}

bool Run::SetUp() {
  Result<std::unique_ptr<Cache>> reference =
      MakeCache(setup_.spec, "reference");
  Result<std::unique_ptr<Cache>> subject = subject_.make(setup_.spec);
  if (subject.status().code() == StatusCode::kNotSupported) {
    ++result_.operations;  // A kind that the subject does not have.
    return false;
  }
  if (!reference.ok() || !subject.ok()) {
    CheckCodes("making the cache", reference.status().code(),
               reference.status().code(), subject.status().code());
    return false;
  }
  reference_ = std::move(*reference);
  tested_ = std::move(*subject);
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    if (const auto wrong = MisuseOutsideOfLife(*cache)) {
      Check(false, "misuse: before Init", *wrong);
    }
  }
  const InitArgs& init = setup_.init;
  const CacheConfig& config = setup_.config;
  // The ledger has no gate: what that refuses is said here once more.
  const auto due = [](std::initializer_list<int> sizes) {
    return std::min(sizes) < 1 ? StatusCode::kInvalidArgument : StatusCode::kOk;
  };
  const StatusCode configured =
      due({config.cache_padding, config.mask_batch_padding});
  CheckCodes("SetConfig", configured, reference_->SetConfig(config).code(),
             tested_->SetConfig(config).code());
  StatusCode by_ledger =
      due({init.max_sequences, init.capacity, init.max_batch});
  if (configured != StatusCode::kOk) return false;
  if (by_ledger == StatusCode::kOk) {
    by_ledger = ledger_.Init(config, init).code();
  }
  const auto init_of = [&](Cache& cache) {
    return cache
        .Init(init.dtype, init.max_sequences, init.capacity, init.max_batch)
        .code();
  };
  CheckCodes("Init", by_ledger, init_of(*reference_), init_of(*tested_));
  if (by_ledger != StatusCode::kOk) return false;
  Check(reference_->CellCount() == tested_->CellCount(), "subject: cell count",
        [&] {
          return fmt::format("{} cells by the reference, {} by {}",
                             reference_->CellCount(), tested_->CellCount(),
                             subject_.name);
        });
  const std::int64_t cells = ledger_.active().cells();
  Check(cells == reference_->CellCount(), "reference: cell count", [&] {
    return fmt::format("{} cells by the ledger, {} by the reference", cells,
                       reference_->CellCount());
  });
  return true;
}

void Run::TearDown() {
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    cache->Close();
    if (const auto wrong = MisuseOutsideOfLife(*cache)) {
      Check(false, "misuse: after Close", *wrong);
    }
  }
}

// By all of a wrapper's caches: one may have evicted what another still has.
std::int32_t Run::Next(int seq) {
  std::int64_t next = 0;
  for (const auto& part : ledger_.parts()) {
    for (const auto& token : part.tokens()) {
      if (token.HeldBy(seq)) next = std::max(next, token.position + 1);
    }
  }
  return static_cast<std::int32_t>(std::min<std::int64_t>(next, kOpenEnd));
}

std::int64_t Run::Free() {
  std::int64_t free = setup_.init.max_batch;
  for (const auto& part : ledger_.parts()) {
    if (part.encoder()) continue;
    free = std::min(free, part.cells() - std::ssize(part.tokens()));
  }
  return free;
}

std::int32_t Run::Resolve(int seq, const RelativePos& pos) {
  const std::int64_t from = pos.from_end ? Next(seq) : 0;
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(from + pos.offset, 0, kOpenEnd));
}

// A segment as a legal client would send it, after making room for it.
Segment Run::Legalized(Segment segment, std::size_t batch_room) {
  const int capacity = setup_.init.capacity;
  segment.delta = 0;
  segment.order = Segment::Order::kUp;
  segment.count =
      std::min({segment.count, capacity, static_cast<int>(batch_room)});
  const std::int64_t over =
      std::int64_t{Next(segment.seq)} + segment.count - capacity;
  if (over > 0) {  // A context shift: half of it goes.
    const auto discard =
        static_cast<std::int32_t>(std::max<std::int64_t>(over, capacity / 2));
    const StatusCode code = Remove(segment.seq, 0, discard);
    if (code != StatusCode::kOk) Remove(segment.seq, 0, kOpenEnd);
  }
  return segment;
}

void Run::AppendSegment(const Segment& segment) {
  const std::int64_t first = std::int64_t{Next(segment.seq)} + segment.delta;
  for (int i = 0; i < segment.count; ++i) {
    std::int64_t position = first;
    if (segment.order == Segment::Order::kUp) position += i;
    if (segment.order == Segment::Order::kDown) {
      position += segment.count - 1 - i;
    }
    pass_.positions.push_back(static_cast<std::int32_t>(
        std::clamp<std::int64_t>(position, 0, kOpenEnd)));
    pass_.sequences.push_back(segment.seq);
  }
}

void Run::MakeBatch(const Op& op) {
  const auto max_batch = static_cast<std::size_t>(setup_.init.max_batch);
  std::vector<Segment> segments;
  std::set<int> seen;
  std::size_t room = max_batch;
  for (Segment segment : op.segments) {
    if (segment.count >= Segment::kFree / 2) {
      segment.count = static_cast<int>(std::clamp<std::int64_t>(
          Free() + segment.count - Segment::kFree, 1, setup_.init.max_batch));
    }
    if (room == 0) break;
    segment.seq = IdOf(segment.seq);
    if (setup_.legal) {
      if (!seen.insert(segment.seq).second) continue;
      segment = Legalized(segment, room);
    }
    segment.count = std::min(segment.count, static_cast<int>(room));
    room -= static_cast<std::size_t>(segment.count);
    segments.push_back(segment);
  }
  pass_ = Pass();
  for (const Segment& segment : segments) AppendSegment(segment);
  for (const int index : op.images) {
    pass_.multimodal.push_back(index %
                               static_cast<int>(pass_.positions.size()));
  }
}

bool Run::StartForward(bool reserve) {
  const Batch batch{pass_.positions, pass_.sequences, pass_.multimodal};
  Look();
  const StatusCode by_ledger = ledger_.StartForward(batch, reserve).code();
  const StatusCode reference = reference_->StartForward(batch, reserve).code();
  const StatusCode subject = tested_->StartForward(batch, reserve).code();
  const auto call = [&] {
    return fmt::format("StartForward(positions [{}], sequences [{}]{})",
                       fmt::join(pass_.positions, " "),
                       fmt::join(pass_.sequences, " "),
                       reserve ? ", reserve" : "");
  };
  CheckCodes(call, by_ledger, reference, subject);
  if (observer_ != nullptr) {
    observer_->StartForward(batch, reserve, by_ledger, ledger_);
  }
  Hash(pass_.positions.data(), pass_.positions.size() * sizeof(std::int32_t));
  Hash(pass_.sequences.data(), pass_.sequences.size() * sizeof(int));
  pass_.active = pass_.fresh = subject == StatusCode::kOk;
  pass_.reserve = reserve;
  if (pass_.active) active_type_ = 0;
  if (setup_.legal) {
    Check(pass_.active || reserve, "reference: a legal client is refused",
          [&] { return call() + " is refused"; });
  }
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    CheckCells();
    const auto due = reference_->BatchCells();
    const auto found = tested_->BatchCells();
    Check(std::equal(due.begin(), due.end(), found.begin(), found.end()),
          "subject: batch cells", [&] {
            return fmt::format(
                "the batch is in cells [{}] by the reference, [{}] by {}",
                fmt::join(due, " "), fmt::join(found, " "), subject_.name);
          });
    Hash(found.data(), found.size() * sizeof(int));
  }
  SetType(kept_type);
  return pass_.active;
}

void Run::SetLayer(int layer) {
  SetType(TypeOf(layer));
  Check(reference_->SetLayer(layer).ok() && tested_->SetLayer(layer).ok(),
        "subject: result",
        [&] { return fmt::format("SetLayer({}) is refused", layer); });
}

void Run::PutRows(int layer) {
  const bool half_input =
      setup_.init.dtype == DType::kF16 && (pass_.first_serial + layer) % 2 == 1;
  const DType dtype = half_input ? DType::kF16 : DType::kF32;
  const RowDims& rows = setup_.rows;
  const auto count = static_cast<std::int64_t>(pass_.positions.size());
  const std::int64_t first = pass_.first_serial;
  const TensorView key =
      keys_.Fill({rows.k_head_dim, rows.kv_heads, count, 1}, dtype,
                 {RowRole::kKey, layer, first}, setup_.strided);
  const TensorView value =
      values_.Fill({rows.v_head_dim, rows.kv_heads, count, 1}, dtype,
                   {RowRole::kValue, layer, first}, setup_.strided);
  const StatusCode reference = reference_->Put(key, value).code();
  const StatusCode subject = tested_->Put(key, value).code();
  ledger_.active().Put(layer, key, value);
  const auto call = [&] {
    return fmt::format("Put(layer {}, rows of tokens {} to {})", layer, first,
                       first + count - 1);
  };
  CheckCodes(call, StatusCode::kOk, reference, subject);
  put_layers_.insert(layer);
  if (observer_ != nullptr) {
    observer_->Put(static_cast<std::size_t>(TypeOf(layer)), layer, dtype);
  }
}

void Run::GetAll() {
  for (int layer = 0; layer < setup_.layers; ++layer) {
    if (!put_layers_.contains(layer)) continue;
    SetLayer(layer);
    CheckViews(layer);
    if (IsEncoder(TypeOf(layer))) EncoderCached();
  }
}

void Run::PutAll(const Op& op) {
  pass_.first_serial = serial_;
  serial_ += static_cast<std::int64_t>(pass_.positions.size());
  for (int layer = 0; layer < setup_.layers; ++layer) {
    SetLayer(layer);
    if (op.keep_rows) continue;
    // A model encodes only what is new.
    if (IsEncoder(TypeOf(layer)) && op.images.empty()) continue;
    PutRows(layer);
  }
}

void Run::Put(const Op& op) {
  MakeBatch(op);
  if (!StartForward(op.reserve)) return;
  if (!op.except.empty()) SetCausal(op.except);
  PutAll(op);
  GetAll();
}

void Run::SetCausal(const std::vector<int>& except) {
  std::vector<int> indices;
  indices.reserve(except.size());
  for (const int index : except) {
    indices.push_back(index % static_cast<int>(pass_.positions.size()));
  }
  const int kept_type = active_type_;
  for (int type = 0; type < types(); ++type) {
    SetType(type);
    CheckCodes(
        [&] { return fmt::format("SetCausal([{}])", fmt::join(indices, " ")); },
        ledger_.active().SetCausal(indices).code(),
        reference_->SetCausal(indices).code(),
        tested_->SetCausal(indices).code());
  }
  SetType(kept_type);
  if (observer_ != nullptr) observer_->SetCausal(indices);
  pass_.fresh = !pass_.copied;
}

StatusCode Run::Remove(int seq, std::int32_t begin, std::int32_t end) {
  Look();
  const StatusCode by_ledger = ledger_.Remove(seq, begin, end).code();
  const StatusCode reference = reference_->Remove(seq, begin, end).code();
  const StatusCode subject = tested_->Remove(seq, begin, end).code();
  CheckCodes(
      [&] {
        return fmt::format("Remove({}, {}, {})", seq, begin,
                           end == kOpenEnd ? "open" : fmt::to_string(end));
      },
      by_ledger, reference, subject);
  if (observer_ != nullptr) {
    observer_->Remove(seq, begin, end, by_ledger, ledger_);
  }
  pass_.fresh = false;
  CheckAllCells();
  return subject;
}

void Run::Drop(const Op& op) {
  const int seq = IdOf(op.seq);
  std::int32_t begin = Resolve(seq, op.begin);
  std::int32_t end = op.open ? kOpenEnd : Resolve(seq, op.end);
  if (begin > end) std::swap(begin, end);
  if (!setup_.legal) return void(Remove(seq, begin, end));
  // Going on at `begin`, or anew.
  if (op.open && begin > 0 && !CanResume(seq, begin)) begin = 0;
  const StatusCode code = Remove(seq, begin, end);
  if (code != StatusCode::kOk) Remove(seq, 0, kOpenEnd);
}

void Run::CopyPrefix(int src, int dst, std::int32_t len) {
  Look();
  const StatusCode by_ledger = ledger_.CopyPrefix(src, dst, len).code();
  CheckCodes(
      [&] { return fmt::format("CopyPrefix({}, {}, {})", src, dst, len); },
      by_ledger, reference_->CopyPrefix(src, dst, len).code(),
      tested_->CopyPrefix(src, dst, len).code());
  if (observer_ != nullptr) observer_->CopyPrefix(src, dst, len, by_ledger);
  pass_.fresh = false;
  pass_.copied = true;
  CheckAllCells();
}

void Run::Copy(const Op& op) {
  const int src = IdOf(op.seq);
  const int dst = IdOf(op.dst);
  std::int32_t len = Resolve(src, op.end);
  if (!setup_.legal) return CopyPrefix(src, dst, len);
  if (src == dst) return;
  len = std::min(len, Next(src));
  CopyPrefix(src, dst, len);
  if (len > 0 && !CanResume(dst, len)) Remove(dst, 0, kOpenEnd);
}

bool Run::CanResume(int seq, std::int32_t pos) {
  const bool by_ledger = ledger_.CanResume(seq, pos);
  const Result<bool> reference = reference_->CanResume(seq, pos);
  const Result<bool> subject = tested_->CanResume(seq, pos);
  CheckCodes([&] { return fmt::format("CanResume({}, {})", seq, pos); },
             StatusCode::kOk, reference.status().code(),
             subject.status().code());
  HashInt(*subject ? 1 : 0);
  if (observer_ != nullptr) observer_->CanResume(seq, pos, ledger_);
  Check(by_ledger == *reference, "reference: resume", [&] {
    return fmt::format(
        "CanResume({}, {}) is {} by the ledger, {} by the "
        "reference",
        seq, pos, by_ledger, *reference);
  });
  Check(*reference == *subject, "subject: resume", [&] {
    return fmt::format("CanResume({}, {}) is {} by the reference, {} by {}",
                       seq, pos, *reference, *subject, subject_.name);
  });
  return *subject;
}

void Run::EncoderCached() {
  const bool by_ledger = ledger_.active().slots().cached;
  const Result<bool> reference = reference_->EncoderCached();
  const Result<bool> subject = tested_->EncoderCached();
  CheckCodes("EncoderCached", StatusCode::kOk, reference.status().code(),
             subject.status().code());
  Check(by_ledger == *reference && by_ledger == *subject,
        "subject: encoder cached", [&] {
          return fmt::format(
              "EncoderCached is {} by the ledger, {} by the reference, "
              "{} by {}",
              by_ledger, *reference, *subject, subject_.name);
        });
}

void Run::Misuse(int which) {
  MisuseContext context{.setup = setup_,
                        .pass_tokens = 0,
                        .encoder = IsEncoder(active_type_),
                        .layer_put = false};
  if (pass_.active) {
    context.pass_tokens = static_cast<int>(pass_.positions.size());
  }
  // The last layer in use is the current one.
  const int layer = setup_.layers - 1;
  if (pass_.active) SetLayer(layer);
  context.encoder = IsEncoder(active_type_);
  context.layer_put = put_layers_.contains(layer) && pass_.active;
  ++result_.operations;
  for (Cache* cache : {reference_.get(), tested_.get()}) {
    if (const auto wrong = TryMisuse(*cache, which, context)) {
      Check(false,
            cache == tested_.get() ? CheckName("subject: misuse")
                                   : CheckName("reference: misuse"),
            *wrong);
    }
  }
  if (story_ != nullptr) {
    Tell(fmt::format("misuse {}: {}", which, MisuseName(which)), "");
  }
}

// The views of a reserving pass span all cells.
void Run::Poison() {
  if (!subject_.can_be_poisoned) return;
  pass_ = Pass();
  pass_.positions = {0};
  pass_.sequences = {0};
  if (!StartForward(/*reserve=*/true)) return;
  for (const int layer : put_layers_) {
    SetLayer(layer);
    if (IsEncoder(TypeOf(layer))) continue;
    std::vector<CellEntry> used;
    reference_->ListCells(used);
    for (Cache* cache : {reference_.get(), tested_.get()}) {
      PoisonFreeCells(*cache->Get(), used, setup_.config.permuted_v);
    }
  }
}

void Run::Reload() {
  const Result<CacheState> due = reference_->Snapshot();
  const Result<CacheState> found = tested_->Snapshot();
  if (found.status().code() == StatusCode::kNotSupported) return;
  CheckCodes("Snapshot", StatusCode::kOk, due.status().code(),
             found.status().code());
  Check(*due == *found, "subject: snapshot",
        [&] { return "the snapshots are not equal" + CellsText(*tested_); });
  Result<std::unique_ptr<Cache>> reference =
      MakeCache(setup_.spec, "reference");
  Result<std::unique_ptr<Cache>> subject = subject_.make(setup_.spec);
  const auto restored = [&](Cache& cache) {
    return cache.Restore(*due).ok() && *cache.Snapshot() == *due;
  };
  const auto renewed = [&](Cache& cache) {
    const InitArgs& init = setup_.init;
    return cache.SetConfig(setup_.config).ok() &&
           cache
               .Init(init.dtype, init.max_sequences, init.capacity,
                     init.max_batch)
               .ok() &&
           restored(cache);
  };
  Check(restored(*reference_) && renewed(**reference), "reference: snapshot",
        "what was restored is not what was saved");
  Check(restored(*tested_) && renewed(**subject), "subject: snapshot",
        "what was restored is not what was saved");
  // Either goes on: what was restored in place, or what is new.
  const bool in_place = serial_ % 2 == 0;
  if (!in_place) {
    reference_ = std::move(*reference);
    tested_ = std::move(*subject);
  }
  Tell(in_place ? "Restore in place" : "Restore into new caches", "");
  result_.operations += 6;  // The calls above that have no line of their own.
  pass_ = Pass();
  if (observer_ != nullptr) observer_->EndPass();
  active_type_ = 0;
  CheckAllCells();
}

void Run::Do(const Op& op) {
  switch (op.kind) {
    case OpKind::kPut:
      return Put(op);
    case OpKind::kDrop:
      return Drop(op);
    case OpKind::kCopy:
      return Copy(op);
    case OpKind::kAsk:
      return void(CanResume(IdOf(op.seq), Resolve(IdOf(op.seq), op.end)));
    case OpKind::kCausal:
      if (!pass_.active) return;
      SetCausal(op.except);
      return GetAll();
    case OpKind::kGet:
      return pass_.active ? GetAll() : void();
    case OpKind::kReput:
      if (!pass_.active) return;
      PutAll({});
      return GetAll();
    case OpKind::kMisuse:
      return Misuse(op.misuse);
    case OpKind::kPoison:
      return Poison();
    case OpKind::kReload:
      return Reload();
  }
}

}  // namespace

Subject TwinSubject(std::string_view twin) {
  return {.name = std::string(twin),
          .make = [name = std::string(twin)](
                      const CacheSpec& spec) { return MakeCache(spec, name); },
          .can_be_poisoned = true};
}

std::string StoryLine(const Step& step) {
  if (step.answer.empty()) return step.call;
  return fmt::format("{} -> {}", step.call, step.answer);
}

RunResult RunHistory(const History& history, const Subject& subject,
                     Story* story, Census* census) {
  RunResult result;
  std::optional<Observer> observer;
  if (census != nullptr) observer.emplace(history.setup, *census);
  std::size_t step = history.ops.size();
  try {
    Run run(history, subject, story, observer ? &*observer : nullptr, result);
    result.ran = run.SetUp();
    if (result.ran) {
      for (step = 0; step < history.ops.size(); ++step) {
        run.Do(history.ops[step]);
      }
      run.TearDown();
    }
  } catch (const Differs& differs) {
    result.difference = {.step = step,
                         .check = differs.check,
                         .text = differs.text,
                         .row = differs.row,
                         .column = differs.column,
                         .first_cell = differs.first_cell};
  } catch (const std::exception& error) {
    result.difference = {
        .step = step, .check = "subject: exception", .text = error.what()};
  }
  if (observer) observer->End(result.ran);
  return result;
}

}  // namespace kvtwin::props
