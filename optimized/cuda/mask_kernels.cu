#include <algorithm>

#include "optimized/cuda/mask_kernels.h"

namespace kvtwin::optimized::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxPiecesAtOnce = 65535;  // Limit of CUDA's grids.

// Consecutive cells of a thread; for bits, a thread has an output word.
constexpr int kCellsOfThread = 8;
constexpr int kCellsOfWord = 64;

__global__ void UpdateWordsKernel(const WordUpdate* updates, std::int64_t count,
                                  std::int32_t* positions, PosRange* ranges,
                                  BatchCells cells) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < cells.count; i += std::int64_t{gridDim.x} * blockDim.x) {
    cells.to[i] = cells.from[i];
  }
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const WordUpdate& update = updates[i];
    const auto cell = static_cast<int>(threadIdx.x);
    positions[update.index * kCellsOfWord + cell] = update.positions[cell];
    if (cell == 0) {
      ranges[update.index] = update.range;
      update.members[update.index] = update.word;
    }
  }
}

struct Table {
  const std::int32_t* positions;
  const PosRange* ranges;
  std::int64_t words;
};

// Which of `count` cells, all in one word, are in `bits` and at positions in
// the range.
__device__ std::uint64_t Within(const Table& table, std::int64_t cell,
                                std::uint64_t bits, PosRange range, int count) {
  if (bits == 0) return 0;
  const PosRange known = table.ranges[cell / kCellsOfWord];
  if (range.first <= known.first && known.last <= range.last) return bits;
  if (known.last < range.first || range.last < known.first) return 0;
  const std::int32_t* positions = table.positions + cell;
  std::uint64_t within = 0;
  for (int i = 0; i < count; ++i) {
    const std::int32_t position = positions[i];
    const bool in = range.first <= position && position <= range.last;
    within |= static_cast<std::uint64_t>(in) << i;
  }
  return bits & within;
}

// Writes elements as unsigned integers: 0, or -inf.
template <class Element>
__device__ void Expand(std::uint64_t visible, Element hidden, std::byte* out,
                       int count) {
  auto* elements = reinterpret_cast<Element*>(out);
  if (count < kCellsOfThread) {
    for (int i = 0; i < count; ++i) {
      elements[i] = (visible >> i & 1) != 0 ? Element{0} : hidden;
    }
    return;
  }
  constexpr int kParts = kCellsOfThread * static_cast<int>(sizeof(Element)) /
                         static_cast<int>(sizeof(uint4));
  constexpr int kElements = 4 / static_cast<int>(sizeof(Element));
  for (int part = 0; part < kParts; ++part) {
    unsigned int words[4];
    for (int w = 0; w < 4; ++w) {
      words[w] = 0;
      for (int e = 0; e < kElements; ++e) {
        const int i = (part * 4 + w) * kElements + e;
        const unsigned int element = (visible >> i & 1) != 0 ? 0U : hidden;
        words[w] |= element << (e * 8 * static_cast<int>(sizeof(Element)));
      }
    }
    reinterpret_cast<uint4*>(out)[part] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class Element>
__global__ void WriteNumbers(const MaskPiece* pieces, std::int64_t count,
                             Table table, Element hidden) {
  const std::int64_t step =
      std::int64_t{gridDim.x} * blockDim.x * kCellsOfThread;
  for (std::int64_t p = blockIdx.y; p < count; p += gridDim.y) {
    const MaskPiece& piece = pieces[p];
    const std::int64_t thread =
        std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (std::int64_t at = piece.first + thread * kCellsOfThread;
         at < piece.end; at += step) {
      std::uint64_t visible = 0;
      if (piece.members != nullptr) {
        const std::uint64_t bits =
            piece.members[at / kCellsOfWord] >> (at % kCellsOfWord) & 0xFF;
        visible = Within(table, at, bits, piece.range, kCellsOfThread);
      }
      const std::int64_t left = piece.end - at;
      Expand(visible, hidden,
             piece.out + (at - piece.first) *
                             static_cast<std::int64_t>(sizeof(Element)),
             left < kCellsOfThread ? static_cast<int>(left) : kCellsOfThread);
    }
  }
}

// The visible bits of 64 cells from `cell` on; the table may end before.
__device__ std::uint64_t VisibleWord(const Table& table, const MaskPiece& piece,
                                     std::int64_t cell) {
  const std::int64_t w = cell / kCellsOfWord;
  const auto skipped = static_cast<int>(cell % kCellsOfWord);
  std::uint64_t word = Within(table, w * kCellsOfWord, piece.members[w],
                              piece.range, kCellsOfWord) >>
                       skipped;
  if (skipped > 0 && w + 1 < table.words) {
    word |= Within(table, (w + 1) * kCellsOfWord, piece.members[w + 1],
                   piece.range, kCellsOfWord)
            << (kCellsOfWord - skipped);
  }
  return word;
}

__global__ void WriteBits(const MaskPiece* pieces, std::int64_t count,
                          Table table) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x * kCellsOfWord;
  for (std::int64_t p = blockIdx.y; p < count; p += gridDim.y) {
    const MaskPiece& piece = pieces[p];
    auto* out = reinterpret_cast<std::uint64_t*>(piece.out);
    const std::int64_t thread =
        std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (std::int64_t at = piece.first + thread * kCellsOfWord; at < piece.end;
         at += step) {
      std::uint64_t word =
          piece.members == nullptr ? 0 : VisibleWord(table, piece, at);
      const std::int64_t left = piece.end - at;
      if (left < kCellsOfWord) word &= (std::uint64_t{1} << left) - 1;
      out[(at - piece.first) / kCellsOfWord] = word;
    }
  }
}

}  // namespace

cudaError_t UpdateWords(const WordUpdate* updates, std::int64_t count,
                        std::int32_t* positions, PosRange* ranges,
                        const BatchCells& cells, cudaStream_t stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 16;
  const std::int64_t blocks =
      std::min(std::max(count, (cells.count + kCellsOfWord - 1) / kCellsOfWord),
               kMaxBlocks);
  if (blocks == 0) return cudaSuccess;
  return Launch(UpdateWordsKernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kCellsOfWord), 0, stream, updates, count, positions,
                ranges, cells);
}

cudaError_t WriteMask(const MaskPiece* pieces, std::int64_t count,
                      std::int64_t longest, const std::int32_t* positions,
                      const PosRange* ranges, std::int64_t cells, DType dtype,
                      cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const Table table{positions, ranges,
                    (cells + kCellsOfWord - 1) / kCellsOfWord};
  const std::int64_t of_thread =
      dtype == DType::kBits ? kCellsOfWord : kCellsOfThread;
  const std::int64_t threads = (longest + of_thread - 1) / of_thread;
  // Short pieces give work to few threads.
  const std::int64_t in_block =
      std::min<std::int64_t>(kThreads, (threads + 31) / 32 * 32);
  const dim3 grid(static_cast<unsigned>((threads + in_block - 1) / in_block),
                  static_cast<unsigned>(std::min(count, kMaxPiecesAtOnce)));
  const dim3 block(static_cast<unsigned>(in_block));
  switch (dtype) {
    case DType::kF32:
      return Launch(WriteNumbers<std::uint32_t>, grid, block, 0, stream, pieces,
                    count, table, 0xFF800000U);
    case DType::kF16:
      return Launch(WriteNumbers<std::uint16_t>, grid, block, 0, stream, pieces,
                    count, table, std::uint16_t{0xFC00});
    case DType::kBF16:
      return Launch(WriteNumbers<std::uint16_t>, grid, block, 0, stream, pieces,
                    count, table, std::uint16_t{0xFF80});
    case DType::kBits:
      return Launch(WriteBits, grid, block, 0, stream, pieces, count, table);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kvtwin::optimized::cuda
