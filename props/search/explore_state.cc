#include "props/search/explore_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/dense_tensor.h"
#include "core/index.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kMostCells = 64;

DenseTensor TensorOf(std::size_t dims, const std::vector<float>& elements) {
  DenseTensor made{DType::kF32,
                   {static_cast<std::int64_t>(dims), 1,
                    static_cast<std::int64_t>(elements.size() / dims), 1},
                   std::vector<std::byte>(elements.size() * sizeof(float))};
  if (!elements.empty()) {
    std::memcpy(made.bytes.data(), elements.data(), made.bytes.size());
  }
  return made;
}

void Round(DType dtype, DenseTensor& rows) {
  if (dtype != rows.dtype) rows = CopyOf(rows.view(), dtype);
}

}  // namespace

KvRows RowsOf(std::span<const ExploreRow> rows, DType dtype) {
  const bool blocks = IsBlockDType(dtype);
  const std::size_t k_dims = blocks ? kBlockElements : 2;
  const std::size_t v_dims = blocks ? kBlockElements : 1;
  std::vector<float> keys;
  std::vector<float> values;
  keys.reserve(rows.size() * k_dims);
  values.reserve(rows.size() * v_dims);
  for (const auto& [tag, position] : rows) {
    keys.push_back(tag);
    keys.insert(keys.end(), k_dims - 1,
                static_cast<float>(kPositionBase + position));
    values.insert(values.end(), v_dims, tag);
  }
  return {TensorOf(k_dims, keys), TensorOf(v_dims, values)};
}

StateCodec::StateCodec(const ExploreSize& size, int caches)
    : size_(size), caches_(caches), owner_sets_((1U << size.sequences) - 1) {
  std::vector<int> names(AsSize(size.sequences));
  std::iota(names.begin(), names.end(), 0);
  do {
    renamings_.push_back(names);
    renamed_digits_.push_back(RenamedDigits(names));
  } while (std::next_permutation(names.begin(), names.end()));
}

std::vector<StateKey> StateCodec::RenamedDigits(
    const std::vector<int>& renaming) const {
  std::vector<StateKey> digits = {0};
  for (StateKey position = 0; position < PositionCount(); ++position) {
    for (StateKey owners = 1; owners <= owner_sets_; ++owners) {
      StateKey renamed = 0;
      for (std::size_t s = 0; s < renaming.size(); ++s) {
        if ((owners >> s & 1) != 0) renamed |= StateKey{1} << renaming[s];
      }
      digits.push_back(Digit(position, renamed));
    }
  }
  if (!size_.drafts) return digits;
  for (StateKey position = 0; position < PositionCount(); ++position) {
    for (const int sequence : renaming) {
      digits.push_back(DraftDigit(position, static_cast<StateKey>(sequence)));
    }
  }
  return digits;
}

double StateCodec::keys() const {
  return std::pow(static_cast<double>(Digits()), CellCount());
}

CacheState StateCodec::Decode(StateKey key) const {
  CacheState state;
  if (caches_ == 0) DecodePart(0, key, state);
  state.caches.resize(AsSize(caches_));
  for (int i = 0; i < caches_; ++i) DecodePart(i, key, At(state.caches, i));
  return state;
}

// Reads a cache from the lowest digits of `key`, and removes them.
void StateCodec::DecodePart(int layer, StateKey& key, CacheState& part) const {
  std::vector<ExploreRow> rows;
  for (int cell = 0; cell < size_.cells; ++cell, key /= Digits()) {
    const StateKey digit = key % Digits();
    if (digit == 0 || digit >= TokenDigits()) continue;
    const auto position = AsInt((digit - 1) / owner_sets_);
    const StateKey owners = (digit - 1) % owner_sets_ + 1;
    for (int s = 0; s < size_.sequences; ++s) {
      if ((owners >> s & 1) != 0) part.cells.push_back({cell, position, s});
    }
    rows.push_back({static_cast<float>(cell + 1), position});
  }
  KvRows& stored = part.layers[layer];
  stored = RowsOf(rows, size_.dtype);
  Round(size_.dtype, stored.key);
  Round(size_.dtype, stored.value);
}

std::string StateCodec::TextOf(StateKey key) const {
  std::string text = CellsText(Decode(key));
  std::string drafts;
  for (int cell = 0; cell < CellCount(); ++cell, key /= Digits()) {
    const StateKey digit = key % Digits();
    if (digit < TokenDigits()) continue;
    const StateKey draft = digit - TokenDigits();
    drafts += fmt::format(" {}:{}@s{}", cell % size_.cells,
                          draft / SequenceCount(), draft % SequenceCount());
  }
  return drafts.empty() ? text : text + ", drafts" + drafts;
}

StateKey StateCodec::Encode(const CacheState& state, const DraftCells& drafts,
                            const std::vector<int>** renaming) const {
  const auto count = AsSize(CellCount());
  std::array<StateKey, kMostCells> owners{};
  std::array<StateKey, kMostCells> digits{};
  const auto read = [&](const CacheState& part, int first) {
    for (const auto& [cell, position, sequence] : part.cells) {
      const auto i = AsSize(first + cell);
      owners.at(i) |= StateKey{1} << sequence;
      digits[i] = Digit(static_cast<StateKey>(position), owners[i]);
    }
  };
  read(state, 0);
  for (int i = 0; i < caches_; ++i) read(At(state.caches, i), i * size_.cells);
  for (int i = 0; i < Size(drafts); ++i) {
    for (const auto& [cell, position, sequence] : At(drafts, i)) {
      digits.at(AsSize(i * size_.cells + cell)) = DraftDigit(
          static_cast<StateKey>(position), static_cast<StateKey>(sequence));
    }
  }
  StateKey least = ~StateKey{0};
  for (std::size_t r = 0; r < renamings_.size(); ++r) {
    const std::vector<StateKey>& renamed = renamed_digits_[r];
    StateKey key = 0;
    for (std::size_t i = count; i-- > 0;) {
      key = key * Digits() + renamed[digits[i]];
    }
    if (key >= least) continue;
    least = key;
    if (renaming != nullptr) *renaming = &renamings_[r];
  }
  return least;
}

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

std::string CellsText(const CacheState& state) {
  if (state.caches.empty()) return CellsText(state.cells);
  std::string text;
  for (const CacheState& part : state.caches) {
    text += (text.empty() ? "" : " /") + CellsText(part.cells);
  }
  return text;
}

}  // namespace kvtwin::props
