#include "props/laws/seen.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "props/base/runs_of.h"

namespace kvtwin::props {
namespace {

std::string TokensText(const SeenRow& row) {
  std::vector<std::int32_t> positions;
  positions.reserve(row.tokens.size());
  for (const SeenToken& token : row.tokens) {
    if (token.position >= 0) positions.push_back(token.position);
  }
  const std::size_t free_cells = row.tokens.size() - positions.size();
  return fmt::format(
      "positions [{}]{}", RunsOf(positions),
      free_cells == 0 ? "" : fmt::format(", free cells: {}", free_cells));
}

// Returns a stored row as numbers.
std::vector<float> Numbers(const std::vector<std::byte>& row, DType dtype) {
  const std::int64_t step = IsBlockDType(dtype) ? kBlockElements : 1;
  const std::int64_t count = std::ssize(row) / RunBytes(dtype, step) * step;
  std::vector<float> numbers(AsSize(count));
  WriteDense(DenseView(row.data(), dtype, {count, 1, 1, 1}), DType::kF32,
             std::as_writable_bytes(std::span(numbers)).data());
  return numbers;
}

double Largest(const std::vector<float>& numbers) {
  double largest = 0;
  for (const float number : numbers) {
    const double size = std::fabs(number);
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  return largest;
}

bool Close(const std::vector<std::byte>& left,
           const std::vector<std::byte>& right, DType dtype, double slack,
           double size) {
  if (left == right) return true;
  if (slack == 0 || left.size() != right.size()) return false;
  const std::vector<float> lefts = Numbers(left, dtype);
  const std::vector<float> rights = Numbers(right, dtype);
  const double most = slack * std::max({size, Largest(lefts), Largest(rights)});
  for (std::size_t i = 0; i < lefts.size(); ++i) {
    const double a = lefts[i];
    const double b = rights[i];
    const bool both_nan = std::isnan(a) && std::isnan(b);
    if (!both_nan && a != b && !(std::fabs(a - b) <= most)) return false;
  }
  return true;
}

}  // namespace

std::optional<std::string> CompareRows(const std::vector<SeenRow>& left,
                                       const std::vector<SeenRow>& right,
                                       DType dtype, double slack, double size) {
  if (left.size() != right.size()) {
    return fmt::format("{} rows are seen, and {}", left.size(), right.size());
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    const SeenRow& a = left[i];
    const SeenRow& b = right[i];
    const std::string row =
        fmt::format("in layer {}, sequence {} at position {}", a.layer,
                    a.query.seq, a.query.position);
    const std::string a_text = TokensText(a);
    if (a_text != TokensText(b)) {
      return fmt::format("{} sees {}, and {}", row, a_text, TokensText(b));
    }
    for (std::size_t t = 0; t < a.tokens.size(); ++t) {
      const bool keys =
          Close(a.tokens[t].key, b.tokens[t].key, dtype, slack, size);
      if (keys && a.tokens[t].value == b.tokens[t].value) continue;
      const std::int32_t position = a.tokens[t].position;
      return fmt::format("{} sees another {} row {}", row, keys ? "V" : "K",
                         position < 0
                             ? "in a free cell"
                             : fmt::format("at position {}", position));
    }
  }
  return std::nullopt;
}

void KeepCommon(std::vector<SeenRow>& left, std::vector<SeenRow>& right) {
  const auto keep = [](std::vector<SeenRow>& rows,
                       const std::vector<SeenRow>& others) {
    std::erase_if(rows, [&](const SeenRow& row) {
      return std::ranges::none_of(others, [&](const SeenRow& other) {
        return other.layer == row.layer && other.query.seq == row.query.seq &&
               other.query.position == row.query.position;
      });
    });
  };
  keep(left, right);
  keep(right, left);
}

std::optional<std::string> ComparePictures(const Picture& left,
                                           const Picture& right) {
  if (!left.shown || !right.shown) return std::nullopt;
  if (left.cells != right.cells) return "the cells differ";
  if (left.batch_cells != right.batch_cells) return "the batch's cells differ";
  if (left.views != right.views) return "the bytes of a view differ";
  return std::nullopt;
}

}  // namespace kvtwin::props
