// Signed indices and sizes. Positions, cells and counts are int or int64_t,
// containers want size_t: these functions convert. Builds with checks
// (core/assert.h) abort if the number does not fit.

#ifndef KVTWIN_CORE_INDEX_H_
#define KVTWIN_CORE_INDEX_H_

#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "core/assert.h"

namespace kvtwin {

template <typename T>
concept Countable = std::integral<T> || std::is_enum_v<T>;

// Returns the number, or the enumerator's number, as one that std::in_range
// accepts: no bool, no char.
template <Countable T>
constexpr auto Promoted(T number) {
  if constexpr (std::is_enum_v<T>) {
    return +static_cast<std::underlying_type_t<T>>(number);
  } else {
    return +number;
  }
}

// Returns `number` as a size. Requires: it is not negative.
template <Countable T>
constexpr std::size_t AsSize(T number) {
  KVTWIN_DCHECK(std::in_range<std::size_t>(Promoted(number)));
  return static_cast<std::size_t>(number);
}

// Returns `number` as an int. Requires: an int holds it.
template <Countable T>
constexpr int AsInt(T number) {
  KVTWIN_DCHECK(std::in_range<int>(Promoted(number)));
  return static_cast<int>(number);
}

// Returns the number of elements. Requires: an int holds it.
template <typename Container>
constexpr int Size(const Container& container) {
  return AsInt(std::size(container));
}

// Returns the element at `index`, which may be an enumerator. Requires: it is
// in [0, size).
template <typename Container, Countable Index>
constexpr decltype(auto) At(Container&& container, Index index) {
  KVTWIN_DCHECK(AsSize(index) < std::size(container));
  return container[static_cast<std::size_t>(index)];
}

// Returns the iterator at `index`. Requires: it is in [0, size].
template <typename Container, Countable Index>
constexpr auto IteratorAt(Container& container, Index index) {
  KVTWIN_DCHECK(AsSize(index) <= std::size(container));
  return std::begin(container) + static_cast<std::ptrdiff_t>(index);
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_INDEX_H_
