#include "props/testing/other_families.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

Status Ok() { return {}; }

Status OnlyTheEnd() {
  return {StatusCode::kNotSupported, "only the end of a sequence can go"};
}

}  // namespace

// Lists ---------------------------------------------------------------------

bool Lists::IsShared(int seq, const Item& item) const {
  return std::ranges::any_of(lists_, [&](const auto& list) {
    return list.first != seq &&
           std::ranges::any_of(list.second, [&](const Item& other) {
             return other.rows == item.rows;
           });
  });
}

Status Lists::RemoveAnswer(int seq, std::int64_t begin,
                           std::int64_t end) const {
  const auto list = lists_.find(seq);
  const bool open = end == std::numeric_limits<std::int64_t>::max();
  if (open || list == lists_.end()) return Ok();
  bool keeps = false;
  bool moves = false;
  for (const Item& item : list->second) {
    if (item.position >= begin && item.position < end) continue;
    keeps = true;
    moves = moves || item.position >= end;
    if (item.position >= end && shares_ && IsShared(seq, item)) {
      return {StatusCode::kSharedCells, "it has moved for others as well"};
    }
  }
  if (!keeps || spec_.shift.kind != ShiftKind::kNone) return Ok();
  if (!moves && !shares_) return Ok();  // As not_supported, it is right.
  return {StatusCode::kNotSupported, "K rows cannot be turned"};
}

void Lists::DoRemove(int seq, std::int64_t begin, std::int64_t end) {
  const auto at = lists_.find(seq);
  if (at == lists_.end()) return;
  std::vector<Item>& list = at->second;
  std::erase_if(list, [&](const Item& item) {
    return item.position >= begin && item.position < end;
  });
  for (Item& item : list) {
    if (item.position < end) continue;
    const std::int64_t delta = begin - end;
    item.position += delta;
    (void)Turn(static_cast<std::int32_t>(delta), *item.rows);
  }
  if (list.empty()) lists_.erase(at);
}

void Lists::DoCopy(int src, int dst, std::int32_t len) {
  const int short_by = Is(CacheFault::kCopiesShort) && len > 1 ? 1 : 0;
  std::vector<Item> copy;
  if (lists_.contains(src)) copy = lists_[src];
  std::erase_if(copy,
                [&](Item& item) { return item.position >= len - short_by; });
  if (!shares_ && src != dst) {
    for (Item& item : copy) item.rows = std::make_shared<OtherRows>(*item.rows);
  }
  lists_[dst] = std::move(copy);
  if (lists_[dst].empty()) lists_.erase(dst);
}

// Evicts at once the tokens that their sequence no longer needs.
void Lists::MakeRoom(const Batch& batch) {
  if (!keep_) return;
  const auto lows = Lows(batch);
  for (auto& [seq, list] : lists_) {
    std::int64_t low = 0;
    for (const Item& item : list) low = std::max(low, item.position + 1);
    const auto at = lows.find(seq);
    if (at != lows.end()) low = at->second;
    if (at == lows.end() && Is(CacheFault::kEvictsItsOwn)) continue;
    std::erase_if(list,
                  [&](Item& item) { return item.position < low - Kept(); });
  }
  std::erase_if(lists_, [](const auto& list) { return list.second.empty(); });
}

std::shared_ptr<OtherRows> Lists::Store(int seq, std::int64_t position) {
  lists_[seq].push_back({position, std::make_shared<OtherRows>()});
  return lists_[seq].back().rows;
}

std::vector<OtherCache::Stored> Lists::All() const {
  std::vector<Stored> all;
  for (const auto& [seq, list] : lists_) {
    for (const Item& item : list) all.push_back({item, seq});
  }
  return all;
}

bool Lists::StillHas(int seq, std::int32_t pos) const {
  if (!keep_) return true;
  const auto list = lists_.find(seq);
  if (list == lists_.end()) return false;
  const auto [lowest, highest] =
      std::ranges::minmax_element(list->second, {}, &Item::position);
  return lowest->position <= std::max<std::int64_t>(0, pos - *reach_) &&
         pos <= highest->position + 1;
}

// LlamaCells ----------------------------------------------------------------

Status LlamaCells::Init(const InitArgs& args) {
  Status status = OtherCache::Init(args);
  when_ = static_cast<When>(Draw(4));
  below_too_ = Coin();
  shares_ = true;
  return status;
}

std::int64_t LlamaCells::End(int seq) const {
  std::int64_t end = 0;
  for (const Cell& cell : cells_) {
    if (cell.sequences.contains(seq)) {
      end = std::max(end, cell.item.position + 1);
    }
  }
  return end;
}

bool LlamaCells::GoesOn(int seq, std::int64_t position) const {
  const std::int64_t end = End(seq);
  return end == 0 ? position <= kOpenEnd : position == end;
}

bool LlamaCells::IsMasked(const Cell& cell,
                          const std::map<int, std::int64_t>& ends) const {
  return std::ranges::all_of(cell.sequences, [&](int seq) {
    return cell.item.position < ends.at(seq) - Kept();
  });
}

void LlamaCells::Evict(Cell& cell) {
  const std::set<int> sequences = std::exchange(cell.sequences, {});
  const std::int64_t position = cell.item.position;
  cell.item = {};
  if (!below_too_) {
    thinned_.insert(sequences.begin(), sequences.end());
    return;
  }
  for (Cell& other : cells_) {
    if (other.item.position > position) continue;
    for (const int seq : sequences) other.sequences.erase(seq);
  }
}

void LlamaCells::MakeRoom(const Batch& batch) {
  if (!keep_) return;
  std::map<int, std::int64_t> ends = Lows(batch);
  for (const Cell& cell : cells_) {
    for (const int seq : cell.sequences) ends.try_emplace(seq, End(seq));
  }
  auto wanted = when_ == When::kWhenWanted ? std::ssize(batch.positions) : 0;
  for (Cell& cell : cells_) {
    if (cell.sequences.empty() || !IsMasked(cell, ends)) continue;
    const bool now = when_ == When::kAtOnce || wanted-- > 0 ||
                     (when_ == When::kByChance && Coin());
    if (now) Evict(cell);
  }
}

std::shared_ptr<OtherRows> LlamaCells::Store(int seq, std::int64_t position) {
  const Item item{position, std::make_shared<OtherRows>()};
  const auto free = std::ranges::find_if(
      cells_, [](const Cell& cell) { return cell.sequences.empty(); });
  if (free == cells_.end()) {
    cells_.push_back({item, {seq}});
  } else {
    *free = {item, {seq}};
  }
  return item.rows;
}

void LlamaCells::DoRemove(int seq, std::int64_t begin, std::int64_t end) {
  for (Cell& cell : cells_) {
    if (cell.item.position < begin || cell.item.position >= end) continue;
    cell.sequences.erase(seq);
  }
  if (End(seq) == 0) thinned_.erase(seq);
}

void LlamaCells::DoCopy(int src, int dst, std::int32_t len) {
  const int short_by = Is(CacheFault::kCopiesShort) && len > 1 ? 1 : 0;
  for (Cell& cell : cells_) {
    if (!cell.sequences.contains(src)) continue;
    if (cell.item.position < len - short_by) cell.sequences.insert(dst);
  }
  if (thinned_.contains(src)) thinned_.insert(dst);
}

Status LlamaCells::ShiftAnswer() const {
  if (spec_.shift.kind != ShiftKind::kNone) return {};
  return {StatusCode::kNotSupported, "K rows cannot be turned"};
}

void LlamaCells::DoShift(int seq, std::int64_t begin, std::int64_t end,
                         std::int32_t delta) {
  for (Cell& cell : cells_) {
    if (!cell.sequences.contains(seq)) continue;
    if (cell.item.position < begin || cell.item.position >= end) continue;
    cell.item.position += delta;
    if (cell.item.position < 0) {
      cell = {};
    } else {
      (void)Turn(delta, *cell.item.rows);
    }
  }
}

std::vector<OtherCache::Stored> LlamaCells::All() const {
  std::vector<Stored> all;
  for (const Cell& cell : cells_) {
    for (const int seq : cell.sequences) all.push_back({cell.item, seq});
  }
  return all;
}

bool LlamaCells::StillHas(int seq, std::int32_t pos) const {
  if (!keep_) return true;
  std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
  for (const Cell& cell : cells_) {
    if (!cell.sequences.contains(seq)) continue;
    lowest = std::min(lowest, cell.item.position);
  }
  return !thinned_.contains(seq) && pos <= End(seq) &&
         lowest <= std::max<std::int64_t>(0, pos - *reach_);
}

// Concatenated --------------------------------------------------------------

const Concatenated::Tensor* Concatenated::Find(int seq) const {
  const auto at = tensors_.find(seq);
  return at == tensors_.end() ? nullptr : &at->second;
}

bool Concatenated::GoesOn(int seq, std::int64_t position) const {
  const Tensor* tensor = Find(seq);
  if (tensor != nullptr) return position == tensor->next();
  return position <= kOpenEnd;
}

// Keeps the first tokens and the last tokens of a tensor that is longer than
// the window.
void Concatenated::MakeRoom(const Batch& batch) {
  for (const auto& low : Lows(batch)) {
    const auto at = tensors_.find(low.first);
    if (at == tensors_.end() || !IsFull(at->second)) continue;
    std::deque<Item>& items = at->second.items;
    const std::int64_t less = Is(CacheFault::kEvictsTooMuch) ? 1 : 0;
    const std::int64_t room = std::max<std::int64_t>(0, *reach_ - less);
    const std::int64_t stay = std::min<std::int64_t>(sinks_, room);
    while (std::ssize(items) > std::max(room, stay)) {
      items.erase(IteratorAt(items, stay));
    }
  }
}

std::shared_ptr<OtherRows> Concatenated::Store(int seq, std::int64_t position) {
  const auto [at, is_new] = tensors_.try_emplace(seq);
  Tensor& tensor = at->second;
  if (is_new) tensor.first = position;
  ++tensor.length;
  tensor.items.push_back({position, std::make_shared<OtherRows>()});
  return tensor.items.back().rows;
}

std::vector<OtherCache::Stored> Concatenated::All() const {
  std::vector<Stored> all;
  for (const auto& [seq, tensor] : tensors_) {
    for (const Item& item : tensor.items) all.push_back({item, seq});
  }
  return all;
}

// Counts the tokens that are stored: tokens in between may be gone.
bool Concatenated::InWindow(const Row& row, const Stored& token) const {
  if (sinks_ == 0) return OtherCache::InWindow(row, token);
  const auto& items = Find(row.sequence)->items;
  const auto behind = std::ranges::count_if(items, [&](const Item& item) {
    return item.position > token.item.position && item.position <= row.position;
  });
  return behind <= Seen();
}

Status Concatenated::RemoveAnswer(int seq, std::int64_t begin,
                                  std::int64_t end) const {
  const Tensor* tensor = Find(seq);
  if (tensor == nullptr) return Ok();
  const bool open = end == std::numeric_limits<std::int64_t>::max();
  if (end < tensor->next()) return OnlyTheEnd();
  if (begin <= tensor->first) return Ok();
  if (!open && !takes_tail_) return OnlyTheEnd();
  if (begin >= tensor->next() || !IsFull(*tensor)) return Ok();
  return {StatusCode::kNotSupported, "the window is full"};
}

void Concatenated::DoRemove(int seq, std::int64_t begin, std::int64_t) {
  const auto at = tensors_.find(seq);
  if (at == tensors_.end()) return;
  Tensor& tensor = at->second;
  while (!tensor.items.empty() && tensor.items.back().position >= begin) {
    tensor.items.pop_back();
    --tensor.length;
  }
  if (tensor.items.empty()) tensors_.erase(at);
}

Status Concatenated::CopyAnswer(int src, int dst, std::int32_t len) const {
  const Tensor* tensor = Find(src);
  if (tensor != nullptr && len < tensor->next() && IsFull(*tensor)) {
    return {StatusCode::kNotSupported, "the window is full"};
  }
  return OtherCache::CopyAnswer(src, dst, len);
}

void Concatenated::DoCopy(int src, int dst, std::int32_t len) {
  const int short_by = Is(CacheFault::kCopiesShort) && len > 1 ? 1 : 0;
  Tensor copy;
  if (const Tensor* tensor = Find(src)) copy = *tensor;
  while (!copy.items.empty() && copy.items.back().position >= len - short_by) {
    copy.items.pop_back();
    --copy.length;
  }
  if (!shares_ && src != dst) {
    for (Item& item : copy.items) {
      item.rows = std::make_shared<OtherRows>(*item.rows);
    }
  }
  tensors_.erase(dst);
  if (!copy.items.empty()) tensors_[dst] = std::move(copy);
}

bool Concatenated::StillHas(int seq, std::int32_t pos) const {
  const Tensor* tensor = Find(seq);
  if (tensor != nullptr && IsFull(*tensor) && pos < tensor->next()) {
    return false;
  }
  if (!keep_) return true;
  if (tensor == nullptr || pos > tensor->next()) return false;
  const std::int64_t lowest =
      IsFull(*tensor) ? tensor->next() - *reach_ : tensor->first;
  return lowest <= std::max<std::int64_t>(0, pos - *reach_);
}

// Rings ---------------------------------------------------------------------

Status Rings::Init(const InitArgs& args) {
  Status status = OtherCache::Init(args);
  const int most = Is(CacheFault::kShortRing) ? 4 : args.max_batch + Draw(4);
  size_ = keep_ ? std::max<std::int64_t>(1, Kept() + most)
                : std::numeric_limits<std::int64_t>::max();
  forgets_ = Coin();
  return status;
}

const Rings::Ring* Rings::Find(int seq) const {
  const auto at = rings_.find(seq);
  return at == rings_.end() ? nullptr : &at->second;
}

std::int64_t Rings::Oldest(const Ring& ring) {
  std::int64_t oldest = ring.next;
  for (const auto& [slot, item] : ring.slots) {
    oldest = std::min(oldest, item.position);
  }
  return oldest;
}

void Rings::CutAt(Ring& ring, std::int64_t next) const {
  std::erase_if(ring.slots,
                [&](const auto& slot) { return slot.second.position >= next; });
  ring.next = std::min(ring.next, next);
  if (ring.slots.empty() && forgets_) ring.next = 0;
}

bool Rings::GoesOn(int seq, std::int64_t position) const {
  const Ring* ring = Find(seq);
  return position <= (ring == nullptr ? 0 : ring->next);
}

void Rings::MakeRoom(const Batch& batch) {
  for (const auto& [seq, low] : Lows(batch)) {
    Ring& ring = rings_[seq];
    CutAt(ring, low);
    ring.next = low;
  }
}

std::shared_ptr<OtherRows> Rings::Store(int seq, std::int64_t position) {
  Ring& ring = rings_[seq];
  Item& item = ring.slots[position % size_];
  item = {position, std::make_shared<OtherRows>()};
  ring.next = position + 1;
  return item.rows;
}

std::vector<OtherCache::Stored> Rings::All() const {
  std::vector<Stored> all;
  for (const auto& [seq, ring] : rings_) {
    for (const auto& [slot, item] : ring.slots) all.push_back({item, seq});
  }
  return all;
}

Status Rings::RemoveAnswer(int seq, std::int64_t begin,
                           std::int64_t end) const {
  const Ring* ring = Find(seq);
  const bool open = end == std::numeric_limits<std::int64_t>::max();
  if (open || ring == nullptr || ring->slots.empty()) return Ok();
  if (end < ring->next) return OnlyTheEnd();
  if (begin <= Oldest(*ring) || takes_tail_) return Ok();
  return OnlyTheEnd();
}

void Rings::DoRemove(int seq, std::int64_t begin, std::int64_t) {
  const auto at = rings_.find(seq);
  if (at != rings_.end()) CutAt(at->second, begin);
}

void Rings::DoCopy(int src, int dst, std::int32_t len) {
  const int short_by = Is(CacheFault::kCopiesShort) && len > 1 ? 1 : 0;
  Ring copy;
  if (const Ring* ring = Find(src)) copy = *ring;
  CutAt(copy, len - short_by);
  if (!shares_ && src != dst) {
    for (auto& [slot, item] : copy.slots) {
      item.rows = std::make_shared<OtherRows>(*item.rows);
    }
  }
  rings_[dst] = std::move(copy);
}

bool Rings::StillHas(int seq, std::int32_t pos) const {
  if (!keep_) return true;
  const Ring* ring = Find(seq);
  if (ring == nullptr || ring->slots.empty() || pos > ring->next) return false;
  return Oldest(*ring) <= std::max<std::int64_t>(0, pos - *reach_);
}

}  // namespace kvtwin::props
