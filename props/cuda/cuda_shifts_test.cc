// Shifts of K rows by CUDA kernels; see cuda_rows_test.cc.

#include <gtest/gtest.h>

#include <limits>
#include <tuple>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "optimized/cuda/rows.h"
#include "optimized/row_shift.h"
#include "props/cuda/cuda_rows.h"

namespace kvtwin::optimized::cuda {
namespace {

std::vector<Shift> Shifts() {
  std::vector<Shift> shifts(7);
  shifts[0].kind = ShiftKind::kAdd;
  shifts[1].kind = ShiftKind::kTagAdd;
  for (std::size_t i = 2; i < shifts.size(); ++i) {
    shifts[i].kind = ShiftKind::kRope;
    shifts[i].rope.scale = 0.3;
    if (i % 2 == 1) shifts[i].rope.pairing = Rope::Pairing::kHalves;
  }
  shifts[4].rope.dims = 6;
  shifts[5].rope.dims = 32;
  // Some angles are not finite, so they have no cosine.
  shifts[6].rope.scale = std::numeric_limits<double>::max();
  shifts[6].rope.base = 1e-300;
  return shifts;
}

Selection SelectionOf(const std::vector<int>& cells, int count) {
  Selection selection;
  selection.words.resize(AsSize(count) / 64 + 1);
  selection.end = selection.words.size();
  selection.count = cells.size();
  for (const int cell : cells) {
    const auto at = AsSize(cell);
    selection.words[at / 64] |= std::uint64_t{1} << at % 64;
  }
  return selection;
}

TEST(CudaRows, ShiftAsTheHostDoes) {
  const std::vector<Shift> shifts = Shifts();
  for (std::uint32_t seed = 0; seed < 800; ++seed) {
    Random random(seed);
    Twin twin(random);
    const Shift& shift = shifts[seed % shifts.size()];
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    const int head_dim = twin.dims().k_head_dim;
    const std::int32_t offset = random.OneOf({-5, 1, 1000, -100000});
    const std::vector<int> cells =
        random.Cells(random.Pick(twin.cells() + 1), twin.cells());
    const Rows keys = twin.Keys();
    const DeviceBytes bytes(keys.bytes);
    const DeviceBytes list(cells);
    const ShiftThere there(shift, offset, head_dim);
    ASSERT_EQ(ShiftRows(On(bytes, keys), list.data<int>(), std::ssize(cells),
                        there.there, nullptr),
              cudaSuccess);
    RowShift host;
    host.Prepare(shift, offset, head_dim);
    twin.layer().Shift(SelectionOf(cells, twin.cells()), host, {}, Share{0, 1});
    ASSERT_TRUE(bytes.Download() == twin.Keys().bytes);
  }
}

// Every 16-bit or 8-bit number, repeated until the rows are full; or blocks of
// random bytes.
DenseTensor AllOf(DType dtype, std::int64_t head_dim) {
  constexpr std::int64_t kElements = 1 << 16;
  DenseTensor rows{dtype, {head_dim, kElements / head_dim, 1, 1}, {}};
  rows.bytes.resize(DenseBytes(dtype, rows.shape));
  Random random(1);
  for (std::size_t i = 0; i < rows.bytes.size(); ++i) {
    const std::size_t number = i / 2;
    const std::size_t byte = IsBlockDType(dtype)  ? random.Bits()
                             : SizeOf(dtype) == 1 ? i
                             : i % 2 == 0         ? number
                                                  : number >> 8;
    rows.bytes[i] = static_cast<std::byte>(byte);
  }
  return rows;
}

TEST(CudaRows, ShiftEveryNarrowNumber) {
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    for (const Shift& shift : Shifts()) {
      for (const int head_dim : {2, 64, 256, 1 << 14}) {
        if (IsBlockDType(dtype) && head_dim < kBlockElements) continue;
        DenseTensor expected = AllOf(dtype, head_dim);
        const DeviceBytes bytes(expected.bytes);
        const DeviceBytes cells(std::vector<int>{0});
        const ShiftThere there(shift, -5, head_dim);
        const StoredRows keys = {bytes.data(),
                                 dtype,
                                 VLayout::kPlain,
                                 head_dim,
                                 AsInt(expected.shape[1]),
                                 1};
        ASSERT_EQ(ShiftRows(keys, cells.data<int>(), 1, there.there, nullptr),
                  cudaSuccess);
        ASSERT_TRUE(ShiftStored(shift, 0, -5, expected).ok());
        ASSERT_TRUE(bytes.Download() == expected.bytes)
            << DTypeName(dtype) << ' ' << head_dim;
      }
    }
  }
}

TEST(CudaRows, ShiftMoreThanAGridHasThreads) {
  Shift shift;
  shift.kind = ShiftKind::kAdd;
  Random random(1);
  for (const auto& [dtype, head_dim, heads, cells] :
       {std::tuple(DType::kF8, 1, 1'100'000, 1),
        std::tuple(DType::kQ4, 32, 8, 4200)}) {
    DenseTensor expected{dtype, {head_dim, heads * cells, 1, 1}, {}};
    expected.bytes.resize(DenseBytes(dtype, expected.shape));
    for (std::byte& byte : expected.bytes) {
      byte = static_cast<std::byte>(random.Bits());
    }
    const DeviceBytes bytes(expected.bytes);
    const DeviceBytes list(Count(cells));
    const ShiftThere there(shift, 1, head_dim);
    ASSERT_EQ(ShiftRows({bytes.data(), dtype, VLayout::kPlain, head_dim, heads,
                         cells},
                        list.data<int>(), cells, there.there, nullptr),
              cudaSuccess);
    ASSERT_TRUE(ShiftStored(shift, 0, 1, expected).ok());
    EXPECT_TRUE(bytes.Download() == expected.bytes);
  }
}

}  // namespace
}  // namespace kvtwin::optimized::cuda
