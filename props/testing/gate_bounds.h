// Tests of argument checks: an argument just outside of what the rules allow is
// refused and changes nothing; one just inside is accepted.

#ifndef KVTWIN_PROPS_TESTING_GATE_BOUNDS_H_
#define KVTWIN_PROPS_TESTING_GATE_BOUNDS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/names.h"
#include "kvtwin/status.h"

namespace kvtwin::props {

constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr auto kUntimely = StatusCode::kFailedPrecondition;
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();

// A call of a cache or of a pool on each side of a bound.
template <class Target>
struct Bound {
  std::string name;
  std::function<Status(Target&)> outside;
  std::string names;  // A part of the refusal's message.
  std::function<Status(Target&)> inside;
  StatusCode expected = kInvalid;
};

// Make a tensor wrong.
inline void NoData(TensorView& view) { view.data = nullptr; }
inline void NoStrides(TensorView& view) { view.stride = {}; }

inline std::vector<std::byte> Dense(const TensorView& view) {
  if (view.data == nullptr) return {};
  return CopyOf(view, view.dtype).bytes;
}

// Requires: `tried` and `other` have had the same calls.
// `expect_alike(tried, other)` expects that everything visible of them is
// equal.
template <class Target, class Alike>
void ExpectBound(const Bound<Target>& bound, Target& tried, Target& other,
                 const Alike& expect_alike) {
  const Status status = bound.outside(tried);
  EXPECT_EQ(StatusName(status.code()), StatusName(bound.expected));
  EXPECT_NE(status.message().find(bound.names), std::string::npos)
      << status.message();
  expect_alike(tried, other);
  // Later calls are answered as if the refused call had never happened.
  const Status taken = bound.inside(tried);
  EXPECT_TRUE(taken.ok()) << taken.ToString();
  EXPECT_TRUE(bound.inside(other).ok());
  expect_alike(tried, other);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_GATE_BOUNDS_H_
