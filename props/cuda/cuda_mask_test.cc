// Compares the kernels that write masks with a loop over the cells. (`fuzz
// --twin cuda` tests when which part is written, and columns that are not
// aligned with the cells.)

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "optimized/cuda/mask_kernels.h"
#include "props/cuda/cuda_rows.h"

namespace kvtwin::optimized::cuda {
namespace {

constexpr std::int64_t kWord = 64;
constexpr std::byte kBefore{0x5A};

// Positions of cells, the cells of one sequence, and the range of the
// sequence's positions in each word.
struct Cells {
  explicit Cells(Random& random, std::int64_t count)
      : count(count),
        positions(AsSize((count + kWord - 1) / kWord * kWord)),
        members(positions.size() / kWord),
        ranges(members.size()) {
    for (std::size_t w = 0; w < members.size(); ++w) {
      const int base = random.Pick(20);
      const int spread = random.OneOf({1, 4, 20});
      ranges[w] = {std::numeric_limits<std::int32_t>::max(), -1};
      members[w] = random.OneOf<std::uint64_t>(
          {0, ~std::uint64_t{0},
           random.Bits() | std::uint64_t{random.Bits()} << 32});
      for (std::int64_t i = 0; i < kWord; ++i) {
        const std::int64_t cell = static_cast<std::int64_t>(w) * kWord + i;
        if (cell >= count) members[w] &= ~(std::uint64_t{1} << i);
        std::int32_t& position = At(positions, cell);
        position = random.Pick(100);  // The position of a free cell.
        if ((members[w] >> i & 1) == 0) continue;
        position = base + random.Pick(spread);
        ranges[w] = {std::min(ranges[w].first, position),
                     std::max(ranges[w].last, position)};
      }
    }
  }

  bool Shows(std::int64_t cell, PosRange range) const {
    const auto c = AsSize(cell);
    return (members[c / kWord] >> (c % kWord) & 1) != 0 &&
           range.first <= positions[c] && positions[c] <= range.last;
  }

  std::int64_t count;
  std::vector<std::int32_t> positions;
  std::vector<std::uint64_t> members;
  std::vector<PosRange> ranges;
};

// The bytes from one piece to the next.
std::int64_t Stride(DType dtype, std::int64_t cells) {
  return RunBytes(dtype, (cells + kWord - 1) / kWord * kWord) + 64;
}

// The expected bytes after the piece was written over kBefore.
Bytes Due(const Cells& cells, const MaskPiece& piece, DType dtype) {
  Bytes expected(AsSize(Stride(dtype, cells.count)), kBefore);
  const std::int64_t columns = piece.end - piece.first;
  if (dtype == DType::kBits) {
    std::fill_n(expected.begin(), (columns + kWord - 1) / kWord * 8,
                std::byte{0});
  }
  for (std::int64_t i = 0; i < columns; ++i) {
    const bool shows =
        piece.members != nullptr && cells.Shows(piece.first + i, piece.range);
    const auto at = AsSize(i);
    const std::uint32_t hidden = dtype == DType::kF32   ? 0xFF800000
                                 : dtype == DType::kF16 ? 0xFC00
                                                        : 0xFF80;
    const std::uint32_t element = shows ? 0 : hidden;
    if (dtype == DType::kBits) {
      expected[at / 8] |= static_cast<std::byte>(shows) << (at % 8);
    } else {
      std::memcpy(&expected[at * SizeOf(dtype)], &element, SizeOf(dtype));
    }
  }
  return expected;
}

void ExpectWritten(const Cells& cells, std::vector<MaskPiece> pieces,
                   DType dtype) {
  const std::int64_t stride = Stride(dtype, cells.count);
  const DeviceBytes members(cells.members);
  const DeviceBytes positions(cells.positions);
  const DeviceBytes ranges(cells.ranges);
  const DeviceBytes out(Bytes(AsSize(stride) * pieces.size(), kBefore));
  std::int64_t longest = 0;
  Bytes expected;
  for (MaskPiece& piece : pieces) {
    const Bytes row = Due(cells, piece, dtype);
    expected.insert(expected.end(), row.begin(), row.end());
    longest = std::max(longest, piece.end - piece.first);
    piece.out = out.data() + stride * (&piece - pieces.data());
    if (piece.members != nullptr) piece.members = members.data<std::uint64_t>();
  }
  const DeviceBytes list(pieces);
  ASSERT_EQ(WriteMask(list.data<MaskPiece>(), std::ssize(pieces), longest,
                      positions.data<std::int32_t>(), ranges.data<PosRange>(),
                      cells.count, dtype, nullptr),
            cudaSuccess);
  const Bytes got = out.Download();
  const auto [differs, of_due] = std::ranges::mismatch(got, expected);
  EXPECT_EQ(differs, got.end())
      << DTypeName(dtype) << ", " << cells.count << " cells, byte "
      << (differs - got.begin()) % stride << " of piece "
      << (differs - got.begin()) / stride;
}

TEST(CudaMask, FollowsItsRules) {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    Random random(seed);
    const Cells cells(random, 1 + random.Pick(seed % 8 == 0 ? 5000 : 400));
    for (const DType dtype :
         {DType::kF32, DType::kF16, DType::kBF16, DType::kBits}) {
      std::vector<MaskPiece> pieces;
      for (int i = 0; i < 12; ++i) {
        MaskPiece& piece = pieces.emplace_back();
        const auto first = std::int64_t{random.Pick(AsInt(cells.count))};
        // Views of bits begin at any cell.
        piece.first = dtype == DType::kBits ? first : first / kWord * kWord;
        piece.end =
            std::min(cells.count,
                     piece.first + 1 +
                         random.Pick(random.OneOf({64, AsInt(cells.count)})));
        piece.members = random.Pick(8) == 0 ? nullptr : cells.members.data();
        const int low = random.Pick(25);
        piece.range = random.OneOf<PosRange>({{0, INT32_MAX},
                                              {0, -1},
                                              {low, INT32_MAX},
                                              {low, low + random.Pick(10)}});
      }
      ExpectWritten(cells, pieces, dtype);
    }
  }
}

TEST(CudaMask, WritesMorePiecesThanAGridHasRows) {
  Random random(3);
  const Cells cells(random, 70);
  std::vector<MaskPiece> pieces;
  for (std::int32_t i = 0; i < 65535 + 9; ++i) {
    pieces.push_back({.out = nullptr,
                      .members = cells.members.data(),
                      .range = {i % 20, i % 20 + 3},
                      .first = 64,
                      .end = 70});
  }
  for (const DType dtype : {DType::kF16, DType::kBits}) {
    ExpectWritten(cells, pieces, dtype);
  }
}

void ExpectUpdated(Random& random, std::size_t words, std::size_t updates,
                   std::size_t batch) {
  std::vector<std::uint64_t> members(words, 1);
  std::vector<PosRange> ranges(words, PosRange{2, 3});
  std::vector<std::int32_t> positions(words * kWord, 4);
  const DeviceBytes device_members(members);
  const DeviceBytes device_ranges(ranges);
  const DeviceBytes device_positions(positions);
  std::vector<WordUpdate> list;
  for (const int index : random.Cells(AsInt(updates), AsInt(words))) {
    const auto w = AsSize(index);
    WordUpdate& update = list.emplace_back();
    update.members = device_members.data<std::uint64_t>();
    update.index = index;
    update.word = members[w] = random.Bits();
    update.range = ranges[w] = {random.Pick(10), random.Pick(100)};
    for (std::size_t i = 0; i < kWord; ++i) {
      update.positions[i] = positions[w * kWord + i] = random.Pick(1000);
    }
  }
  std::vector<int> cells(batch);
  for (int& cell : cells) cell = random.Pick(1 << 30);
  const DeviceBytes from(cells);
  const DeviceBytes to(batch * sizeof(int));
  const DeviceBytes device_list(list);
  ASSERT_EQ(UpdateWords(device_list.data<WordUpdate>(), std::ssize(list),
                        device_positions.data<std::int32_t>(),
                        device_ranges.data<PosRange>(),
                        {from.data<int>(), to.data<int>(), std::ssize(cells)},
                        nullptr),
            cudaSuccess);
  const auto expect = [](const DeviceBytes& got, auto expected) {
    const auto bytes = std::as_bytes(std::span(expected));
    EXPECT_TRUE(std::ranges::equal(got.Download(), bytes));
  };
  expect(device_members, members);
  expect(device_ranges, ranges);
  expect(device_positions, positions);
  expect(to, cells);
}

TEST(CudaMask, UpdatesWordsAndCells) {
  Random random(1);
  for (const std::size_t updates : {0U, 1U, 7U}) {
    for (const std::size_t cells : {0U, 1U, 63U, 64U, 65U, 300U}) {
      ExpectUpdated(random, 9, updates, cells);
    }
  }
}

TEST(CudaMask, UpdatesMoreThanAGridHasBlocks) {
  Random random(2);
  ExpectUpdated(random, 65536 + 30, 65536 + 3, 100);
  ExpectUpdated(random, 9, 3, 65536 * 64 + 5);
}

}  // namespace
}  // namespace kvtwin::optimized::cuda
