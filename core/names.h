// The names of kinds of caches, shift functions, dtypes and V layouts in
// recordings, in histories and on the command line.

#ifndef KVTWIN_CORE_NAMES_H_
#define KVTWIN_CORE_NAMES_H_

#include <array>
#include <optional>
#include <string_view>

#include "core/index.h"
#include "kvtwin/cache.h"

namespace kvtwin {

// In the order of the enums. A custom shift function has no name.
inline constexpr std::array<std::string_view, 8> kKindNames = {
    "causal",  "swa",     "swa_mem",   "chunked",
    "encoder", "wrapper", "recurrent", "hybrid"};
inline constexpr std::array<std::string_view, 5> kShiftNames = {
    "none", "identity", "add", "tag_add", "rope"};
inline constexpr std::array<std::string_view, 7> kDTypeNames = {
    "f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0", "bits"};
inline constexpr std::array<std::string_view, 3> kVLayoutNames = {
    "plain", "permuted", "tiled"};

inline constexpr std::array kRowDTypes = {
    DType::kF32, DType::kF16, DType::kBF16, DType::kF8, DType::kQ8, DType::kQ4};
inline constexpr std::array kMaskDTypes = {DType::kF32, DType::kF16,
                                           DType::kBF16, DType::kBits};

inline constexpr std::array kVLayouts = {VLayout::kPlain, VLayout::kPermuted,
                                         VLayout::kTiled};

template <std::size_t n>
constexpr std::array<std::string_view, n> NamesOf(
    const std::array<DType, n>& dtypes) {
  std::array<std::string_view, n> names;
  for (std::size_t i = 0; i < n; ++i) {
    names[i] = At(kDTypeNames, dtypes[i]);
  }
  return names;
}
inline constexpr auto kRowDTypeNames = NamesOf(kRowDTypes);
inline constexpr auto kMaskDTypeNames = NamesOf(kMaskDTypes);

inline std::string_view KindName(Kind kind) { return At(kKindNames, kind); }

inline std::string_view VLayoutName(VLayout layout) {
  return At(kVLayoutNames, layout);
}

// Returns the value of Enum whose name is `name` in one of the lists above.
template <class Enum, std::size_t n>
std::optional<Enum> FromName(const std::array<std::string_view, n>& names,
                             std::string_view name) {
  for (std::size_t i = 0; i < n; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_NAMES_H_
