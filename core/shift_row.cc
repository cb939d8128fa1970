#include "core/shift_row.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <string_view>

#include "core/index.h"

namespace kvtwin {
namespace {

// Compilers differ in which of two NaNs a sum keeps, so this defines it.
float Turned(float before, float after) {
  if (std::isnan(before)) return before;
  return std::isnan(after) ? std::numeric_limits<float>::quiet_NaN() : after;
}

void RopeHead(const Rope& rope, std::int32_t offset, std::span<float> head) {
  const int dims = RopeDims(rope, Size(head));
  const bool halves = rope.pairing == Rope::Pairing::kHalves;
  for (int p = 0; p < dims / 2; ++p) {
    float& x = At(head, halves ? p : 2 * p);
    float& y = At(head, halves ? p + dims / 2 : 2 * p + 1);
    const Turn turn = RopeTurn(rope, dims, p, offset);
    const float turned_x = x * turn.cosine - y * turn.sine;
    const float turned_y = x * turn.sine + y * turn.cosine;
    x = Turned(x, turned_x);
    y = Turned(y, turned_y);
  }
}

// Catches all exceptions: none may leave a helper thread.
Status CallCustom(const ShiftFn& fn, int layer, std::int32_t offset,
                  int k_head_dim, int kv_heads, std::span<float> key) {
  const auto thrown = [](std::string_view what) {
    return Status(StatusCode::kFailedPrecondition,
                  fmt::format("the shift function threw: {}", what));
  };
  try {
    return fn(layer, offset, k_head_dim, kv_heads, key);
  } catch (const std::exception& error) {
    return thrown(error.what());
  } catch (...) {
    return thrown("no std::exception");
  }
}

}  // namespace

int RopeDims(const Rope& rope, int k_head_dim) {
  const int dims = rope.dims == 0 ? k_head_dim : rope.dims;
  return std::min(dims, k_head_dim) / 2 * 2;
}

Turn RopeTurn(const Rope& rope, int dims, int p, std::int32_t offset) {
  const double angle =
      offset * rope.scale * std::pow(rope.base, -2.0 * p / dims);
  return {static_cast<float>(std::cos(angle)),
          static_cast<float>(std::sin(angle))};
}

Status ShiftRow(const Shift& shift, int layer, std::int32_t offset,
                int k_head_dim, int kv_heads, std::span<float> key) {
  if (offset == 0) return {};
  if (shift.kind == ShiftKind::kCustom) {
    return CallCustom(shift.fn, layer, offset, k_head_dim, kv_heads, key);
  }
  const auto head_dim = AsSize(k_head_dim);
  for (std::size_t h = 0; h < AsSize(kv_heads); ++h) {
    const auto head = key.subspan(h * head_dim, head_dim);
    if (shift.kind == ShiftKind::kAdd || shift.kind == ShiftKind::kTagAdd) {
      const std::size_t first = shift.kind == ShiftKind::kTagAdd ? 1 : 0;
      for (float& element : head.subspan(first)) {
        element += static_cast<float>(offset);
      }
    }
    if (shift.kind == ShiftKind::kRope) RopeHead(shift.rope, offset, head);
  }
  return {};
}

}  // namespace kvtwin
