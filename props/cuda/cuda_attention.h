// Compares decode attention on the device with the textbook's
// (reference/attention.h).
//
// How far apart the results may be. Let u be 2^-23: what an f32 sum loses if it
// is truncated rather than rounded (how tensor cores round is not documented).
// A sum of N products and an addend then loses (N + 1) u of their magnitudes.
// For each 16 elements there are c such sums: c is 1, or 4 where K and V are
// split into three parts as well.
//
// 1. A query keeps all its digits but r = 2^-21 (bf16 rows: 2^-15) and 2^-39 of
//    the head's largest number. Where K is split, products below 2^-21 are left
//    out. With A = |scale| |q|.|k|, s times c sums and the steps after them, a
//    score is off by d1 = A (r + ((N + 1) c s + 4) u) + 2^-39 |scale| max |q|
//    |k|.
// 2. Scores become logarithms, are multiplied and subtracted: this loses less
//    than 2 (R + 16) u, where R is their range. The base changes at most once
//    with each of T tiles and once when splits are combined; exp2 is good to
//    2 u. With the weight's own error, d = d1 + 2 (R + 16) u + 2 (T + 2) u.
// 3. Weights that are off by e^d are off by at most e^(2 d) once normalized.
// 4. A weight keeps all its digits but r and 2^-39 of the largest weight.
//    Weighted sums take 2 c T products and T + 2 S + 4 more steps, where S is
//    the number of splits; the sum of the weights takes 8 T + 2 S + 4.
//
// So an element of the result is off by B (e^(2 d) - 1 + r + ...) + 2^-39 C,
// where B is the weighted sum of |v|, and C the sum of |v|.

#ifndef KVTWIN_PROPS_CUDA_CUDA_ATTENTION_H_
#define KVTWIN_PROPS_CUDA_CUDA_ATTENTION_H_

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "reference/attention.h"

namespace kvtwin::props {

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}

  int Between(int low, int high) {
    return std::uniform_int_distribution(low, high)(random_);
  }
  bool Once(int in) { return Between(1, in) == 1; }
  template <class T>
  T Of(const std::vector<T>& all) {
    return At(all, Between(0, Size(all) - 1));
  }
  float Number() { return std::normal_distribution<float>()(random_); }

 private:
  std::mt19937 random_;
};

// The parameters that views and block tables share.
struct Question {
  int k_head_dim = 64;
  int v_head_dim = 64;
  int kv_heads = 2;
  int group = 4;
  int rows = 2;
  int splits = 0;
  DType k_dtype = DType::kF16;
  DType v_dtype = DType::kF16;
  VLayout layout = VLayout::kPlain;
  float size = 1;  // Scale of the queries; scores stay as they are.

  int heads() const { return kv_heads * group; }
  float scale() const {
    return 1 / std::sqrt(static_cast<float>(k_head_dim)) / size;
  }
};

inline std::string Text(const Question& q) {
  return fmt::format(
      "{} rows of {} x {} heads, K {} x {}, V {} x {} {}, {} "
      "splits, queries of {}",
      q.rows, q.kv_heads, q.group, q.k_head_dim, DTypeName(q.k_dtype),
      q.v_head_dim, DTypeName(q.v_dtype), At(kVLayoutNames, q.layout), q.splits,
      q.size);
}

inline Question DrawQuestion(Draw& draw) {
  const std::vector<int> dims = draw.Once(3)
                                    ? std::vector{1, 3, 17, 40, 72, 130}
                                    : std::vector{16, 32, 64, 80, 128, 144};
  const std::vector<DType> dtypes(kRowDTypes.begin(), kRowDTypes.end());
  Question q;
  q.k_head_dim = draw.Of(dims);
  q.v_head_dim = draw.Once(2) ? q.k_head_dim : draw.Of(dims);
  q.kv_heads = draw.Between(1, 3);
  q.group = draw.Of<int>({1, 2, 4, 7, 8, 9, 16});
  q.rows = draw.Between(1, 3);
  q.splits = draw.Of<int>({0, 1, 2, 3, 7});
  q.k_dtype = draw.Of(dtypes);
  q.v_dtype = draw.Once(4) ? draw.Of(dtypes) : q.k_dtype;
  q.layout = draw.Of<VLayout>(
      {VLayout::kPlain, VLayout::kPlain, VLayout::kPermuted, VLayout::kTiled});
  q.size = draw.Of<float>({1, 1, 0x1p-45F, 0x1p45F});
  const auto whole = [](int dim) { return (dim + 31) / 32 * 32; };
  if (IsBlockDType(q.k_dtype)) q.k_head_dim = whole(q.k_head_dim);
  if (IsBlockDType(q.v_dtype)) {
    q.v_head_dim = whole(q.v_head_dim);
    q.layout = VLayout::kPlain;
  }
  return q;
}

inline DenseTensor DrawTensor(Draw& draw, DType dtype, const Shape& shape) {
  DenseTensor floats = FilledTensor(DType::kF32, shape, 0);
  auto* numbers = reinterpret_cast<float*>(floats.bytes.data());
  for (std::int64_t i = 0; i < floats.view().elements(); ++i) {
    numbers[i] = draw.Number();
  }
  return CopyOf(floats.view(), dtype);
}

// Fills a row [head_dim, heads], at any strides, with NaN.
inline void SpoilRow(const TensorView& row) {
  for (std::int64_t head = 0; head < row.shape[1]; ++head) {
    auto* run = const_cast<std::byte*>(row.at(0, head));
    if (IsBlockDType(row.dtype)) {
      std::memset(run, 0xFF, AsSize(RunBytes(row.dtype, row.shape[0])));
      continue;
    }
    for (std::int64_t i = 0; i < row.shape[0]; ++i) {
      StoreElement(std::numeric_limits<float>::quiet_NaN(),
                   run + i * row.stride[0], row.dtype);
    }
  }
}

inline std::vector<float> DrawQuery(Draw& draw, const Question& q) {
  std::vector<float> query(AsSize(q.k_head_dim * q.heads() * q.rows));
  for (float& number : query) number = draw.Number() * q.size;
  return query;
}

// Whether runs can be read 16 bytes at a time (attention.h).
inline bool IsWhole(const TensorView& rows, VLayout layout) {
  const bool plain = layout == VLayout::kPlain;
  auto bits = reinterpret_cast<std::uintptr_t>(rows.data);
  for (std::size_t i = 1; i < 4; ++i) {
    if (rows.shape[i] > 1) bits |= static_cast<std::uintptr_t>(rows.stride[i]);
  }
  return bits % 16 == 0 && rows.shape[plain ? 0 : 1] % 16 == 0;
}

// Whether K and V have to be read element by element.
inline bool IsByElement(const Question& q, const KvView& view) {
  return q.k_dtype != q.v_dtype || q.k_dtype == DType::kF32 ||
         IsBlockDType(q.k_dtype) || !IsWhole(view.key, VLayout::kPlain) ||
         !IsWhole(view.value, q.layout);
}

// The cells that a head of a row sees, as far as the bound above needs them.
struct Seen {
  double products = 0;    // The largest A.
  double remainders = 0;  // The largest factor of 2^-39.
  double lowest = std::numeric_limits<double>::infinity();  // Lowest score.
  double highest = -lowest;
  int cells = 0;
  int tiles = 0;
};

// Compares the device's results with the textbook's.
class Checker {
 public:
  // `by_element`: K and V are not read 16 bytes at a time.
  Checker(const Question& q, const std::vector<float>& query,
          const std::vector<float>& out, bool by_element)
      : q_(q), query_(query), out_(out), by_element_(by_element) {}

  // `view` is the view of row `row`, in host memory; `mask_row` is the row's
  // index in the view's mask.
  void Check(int row, const KvView& view, int mask_row) {
    Eigen::MatrixXd queries(q_.k_head_dim, q_.heads());
    for (int head = 0; head < q_.heads(); ++head) {
      for (int i = 0; i < q_.k_head_dim; ++i) {
        queries(i, head) = query_[Index(row, head, i, q_.k_head_dim)];
      }
    }
    const Eigen::MatrixXd expected =
        reference::Attend(view, q_.layout, mask_row, queries, q_.scale());
    Eigen::MatrixXd sums;  // C in the bound.
    const DenseTensor sizes = SizesOfValues(view, mask_row, sums);
    KvView sized = view;
    sized.value = sizes.view();
    const Eigen::MatrixXd weighted = reference::Attend(
        sized, VLayout::kPlain, mask_row, queries, q_.scale());
    for (int head = 0; head < q_.heads(); ++head) {
      const double share = Share(SeenBy(view, mask_row, queries, head));
      for (int i = 0; i < q_.v_head_dim; ++i) {
        const double bound =
            weighted(i, head) * share + 0x1p-39 * sums(i, head / q_.group);
        const float is = out_[Index(row, head, i, q_.v_head_dim)];
        const double apart = std::abs(is - expected(i, head));
        ASSERT_LE(apart, bound)
            << "row " << row << ", head " << head << ", element " << i << " is "
            << is << " and should be " << expected(i, head);
        if (bound > 0) max_ = std::max(max_, apart / bound);
      }
    }
  }

  double max() const { return max_; }  // As a share of its bound.

 private:
  std::size_t Index(int row, int head, int i, int head_dim) const {
    return AsSize((row * q_.heads() + head) * head_dim + i);
  }

  // |v| as plain f32 rows. `sums` gets their sums over the visible cells.
  DenseTensor SizesOfValues(const KvView& view, int mask_row,
                            Eigen::MatrixXd& sums) const {
    const std::int64_t cells = view.key.shape[2];
    DenseTensor sizes =
        FilledTensor(DType::kF32, {q_.v_head_dim, q_.kv_heads, cells, 1}, 0);
    sums = Eigen::MatrixXd::Zero(q_.v_head_dim, q_.kv_heads);
    for (std::int64_t cell = 0; cell < cells; ++cell) {
      if (!MaskAllows(view.mask, cell, mask_row)) continue;
      const TensorView value = RowOf(view.value, q_.layout, cell);
      for (int head = 0; head < q_.kv_heads; ++head) {
        for (int i = 0; i < q_.v_head_dim; ++i) {
          const float size = std::abs(LoadFrom(value, i, head));
          sums(i, head) += size;
          StoreElement(size,
                       const_cast<std::byte*>(sizes.view().at(i, head, cell)),
                       DType::kF32);
        }
      }
    }
    return sizes;
  }

  Seen SeenBy(const KvView& view, int mask_row, const Eigen::MatrixXd& queries,
              int head) const {
    Seen seen;
    const double largest = queries.col(head).cwiseAbs().maxCoeff();
    std::int64_t tile = -1;
    for (std::int64_t cell = 0; cell < view.key.shape[2]; ++cell) {
      if (!MaskAllows(view.mask, cell, mask_row)) continue;
      ++seen.cells;
      if (cell / kTileCells != tile) ++seen.tiles;
      tile = cell / kTileCells;
      double products = 0;
      double keys = 0;
      double score = 0;
      for (int i = 0; i < q_.k_head_dim; ++i) {
        const double key = LoadFrom(view.key, i, head / q_.group, cell);
        keys += std::abs(key) * q_.scale();
        score += queries(i, head) * key * q_.scale();
        products += std::abs(queries(i, head) * key) * q_.scale();
      }
      seen.products = std::max(seen.products, products);
      seen.remainders = std::max(seen.remainders, largest * keys);
      seen.lowest = std::min(seen.lowest, score);
      seen.highest = std::max(seen.highest, score);
    }
    return seen;
  }

  // The factor of B in the bound.
  double Share(const Seen& seen) const {
    if (seen.cells == 0) return 0;
    const double u = 0x1p-23;
    const bool halves = q_.k_dtype == DType::kBF16 && !by_element_;
    const double r = halves ? 0x1p-15 : 0x1p-21;
    const double c = by_element_ ? 4 : 1;
    const double range = (seen.highest - seen.lowest) / std::log(2.0);
    const double splits = q_.splits == 0 ? 1 : q_.splits;
    const double s = (q_.k_head_dim + 15) / 16;
    const double n = std::min(q_.k_head_dim, 16);
    const double d = seen.products * (r + ((n + 1) * c * s + 4) * u) +
                     seen.remainders * 0x1p-39 + 2 * (range + 16) * u +
                     2 * (seen.tiles + 2) * u;
    const double weights = std::min(seen.cells, 16);
    const double steps =
        (weights + 1) * 2 * c * seen.tiles + 9 * seen.tiles + 4 * splits + 8;
    return std::exp(2 * d) - 1 + r + steps * u;
  }

  const Question& q_;
  const std::vector<float>& query_;
  const std::vector<float>& out_;
  const bool by_element_;
  double max_ = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_CUDA_CUDA_ATTENTION_H_
