// See limits.h. Highway compiles this file once for each target.

#include "bench/limits.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iostream>

#include "core/elements.h"
#include "core/index.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/limits.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/tile_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kLine = 64;

void StreamPiece(const std::byte* from, std::byte* to, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  const std::size_t whole = bytes / kLine * kLine;
  for (std::size_t i = 0; i < whole; i += lanes) {
    hn::Stream(hn::LoadU(d, in + i), d, out + i);
  }
  hwy::FlushStream();
  std::memcpy(to + whole, from + whole, bytes - whole);
}

// Writes the upper half of each f32: a conversion that computes nothing.
template <bool stream>
void HalvePiece(const std::byte* from, std::byte* to, std::size_t bytes) {
  const auto* in = reinterpret_cast<const std::uint32_t*>(from);
  auto* out = reinterpret_cast<std::uint16_t*>(to);
  const std::size_t count = bytes / sizeof(std::uint32_t);
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::uint16_t>(in[i] >> 16);
  }
#else
  const hn::ScalableTag<std::uint16_t> d;
  const hn::Repartition<std::uint32_t, decltype(d)> d32;
  const std::size_t lanes = hn::Lanes(d32);
  for (std::size_t i = 0; i < count; i += 2 * lanes) {
    const auto low = hn::BitCast(d, hn::LoadU(d32, in + i));
    const auto high = hn::BitCast(d, hn::LoadU(d32, in + i + lanes));
    const auto both = hn::ConcatOdd(d, high, low);
    stream ? hn::Stream(both, d, out + i) : hn::Store(both, d, out + i);
  }
  if (stream) hwy::FlushStream();
#endif
}

void HalveStored(const std::byte* from, std::byte* to, std::size_t bytes) {
  HalvePiece<false>(from, to, bytes);
}
void HalveStreamed(const std::byte* from, std::byte* to, std::size_t bytes) {
  HalvePiece<true>(from, to, bytes);
}

void ModifyPiece(std::byte* bytes, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  auto* values = reinterpret_cast<float*>(bytes);
  const auto factor = hn::Set(d, -1.0F);
  for (std::size_t i = 0; i < count / sizeof(float); i += lanes) {
    hn::Store(hn::Mul(hn::Load(d, values + i), factor), d, values + i);
  }
}

// Multiplies and adds at least `count` floats: 12 sums, which do not wait for
// each other, and fit into 16 registers.
float MultiplyAddInRegisters(std::size_t count) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.5f);
  hn::Vec<decltype(d)> sums[12];
  // Sums that begin equally would be computed once.
  HWY_UNROLL(12)
  for (std::size_t i = 0; i < 12; ++i) {
    sums[i] = hn::Set(d, 0.01f * static_cast<float>(i));
  }
  for (std::size_t i = 0; i < count; i += 12 * hn::Lanes(d)) {
    HWY_UNROLL(12)
    for (auto& sum : sums) sum = hn::MulAdd(sum, factor, factor);
  }
  auto all = hn::Zero(d);
  HWY_UNROLL(12)
  for (const auto& sum : sums) all = hn::Add(all, sum);
  return hn::GetLane(all);
}

// Reads four streams: one alone does not reach the memory's bandwidth.
std::uint32_t ReadPiece(const std::byte* bytes, std::size_t count) {
  const hn::ScalableTag<std::uint32_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto* values = reinterpret_cast<const std::uint32_t*>(bytes);
  const std::size_t quarter = count / sizeof(std::uint32_t) / 4;
  auto a = hn::Zero(d);
  auto b = a;
  auto c = a;
  auto e = a;
  for (std::size_t i = 0; i + lanes <= quarter; i += lanes) {
    a = hn::Xor(a, hn::LoadU(d, values + i));
    b = hn::Xor(b, hn::LoadU(d, values + quarter + i));
    c = hn::Xor(c, hn::LoadU(d, values + 2 * quarter + i));
    e = hn::Xor(e, hn::LoadU(d, values + 3 * quarter + i));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Xor(hn::Xor(a, b), hn::Xor(c, e))));
}

// See MultiplyRows: four rows at a time, each of another quarter of the rows.
template <class Format>
float MultiplyRowsOf(const std::byte* rows, std::size_t row_bytes,
                     std::size_t count, const float* queries, bool fetch) {
  namespace tiles = optimized::HWY_NAMESPACE;
  using V = tiles::V;
  constexpr std::size_t kAhead = 16;  // Rows from a fetch to its use.
  const tiles::F32 d;
  const std::size_t quarter = count / 4 * row_bytes;
  V sums[kDecodeQueries][4];
  HWY_UNROLL(4)
  for (auto& sum : sums) sum[0] = sum[1] = sum[2] = sum[3] = hn::Zero(d);
  for (std::size_t r = 0; r < count / 4; ++r, rows += row_bytes) {
    for (std::size_t at = 0; fetch && at < 4 * row_bytes; at += kLine) {
      const std::byte* row = rows + at / row_bytes * quarter;
      __builtin_prefetch(row + kAhead * row_bytes + at % row_bytes, 0, 2);
    }
    const auto multiply = [&](std::size_t i, V row0, V row1, V row2,
                              V row3) HWY_ATTR {
      HWY_UNROLL(4)
      for (std::size_t q = 0; q < kDecodeQueries; ++q) {
        const V query = hn::Load(d, queries + q * kDecodeElements + i);
        sums[q][0] = hn::MulAdd(query, row0, sums[q][0]);
        sums[q][1] = hn::MulAdd(query, row1, sums[q][1]);
        sums[q][2] = hn::MulAdd(query, row2, sums[q][2]);
        sums[q][3] = hn::MulAdd(query, row3, sums[q][3]);
      }
    };
    tiles::ForEachVector<Format>(
        {rows, rows + quarter, rows + 2 * quarter, rows + 3 * quarter},
        kDecodeElements, multiply);
  }
  V all = hn::Zero(d);
  HWY_UNROLL(4)
  for (const auto& sum : sums) {
    all = hn::Add(all, hn::Add(hn::Add(sum[0], sum[1]),  //
                               hn::Add(sum[2], sum[3])));
  }
  return hn::GetLane(hn::SumOfLanes(d, all));
}

float MultiplyRowsPiece(DType dtype, const std::byte* rows,
                        std::size_t row_bytes, std::size_t count,
                        const float* queries, bool fetch) {
  float sum = 0;
  optimized::HWY_NAMESPACE::WithRows(dtype, [&](auto format) HWY_ATTR {
    sum = MultiplyRowsOf<decltype(format)>(rows, row_bytes, count, queries,
                                           fetch);
  });
  return sum;
}

}  // namespace kvtwin::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::bench {

HWY_EXPORT(StreamPiece);
HWY_EXPORT(HalveStored);
HWY_EXPORT(HalveStreamed);
HWY_EXPORT(ModifyPiece);
HWY_EXPORT(ReadPiece);
HWY_EXPORT(MultiplyAddInRegisters);
HWY_EXPORT(MultiplyRowsPiece);

namespace {

// Nanoseconds of body(begin, end) for pieces of whole pages, one for each
// thread.
template <class Body>
double TimePieces(std::size_t bytes, const Body& body) {
#ifdef _OPENMP
  constexpr std::size_t kPage = 4096;
  const auto threads = AsSize(omp_get_max_threads());
  const std::size_t piece =
      (bytes + threads * kPage - 1) / (threads * kPage) * kPage;
  if (threads > 1) {
    return Time([&] {
#pragma omp parallel for schedule(static)
      for (std::size_t i = 0; i < threads; ++i) {
        const std::size_t begin = std::min(bytes, i * piece);
        const std::size_t end = std::min(bytes, begin + piece);
        if (begin < end) body(begin, end);
      }
    });
  }
#endif
  return Time([&] { body(0, bytes); });
}

}  // namespace

void UseThreads(int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

std::vector<Timing> OnAnyThreads(const std::vector<Timing>& runs) {
  std::vector<Timing> all = runs;
#ifdef _OPENMP
  const int threads = omp_get_max_threads();
  if (threads == 1) return all;
  for (const Timing& run : runs) {
    all.push_back([run, threads] {
      UseThreads(1);
      const double time = run();
      UseThreads(threads);
      return time;
    });
  }
#endif
  return all;
}

Buffer WrittenBuffer(std::size_t bytes) {
  Buffer buffer(bytes);
  std::memset(buffer.data(), 1, bytes);
  return buffer;
}

double SetBytes(std::byte* to, int value, std::size_t bytes) {
  return TimePieces(bytes, [&](std::size_t begin, std::size_t end) {
    std::memset(to + begin, value, end - begin);
    KeepAlive(to);
  });
}

double CopyBytes(const std::byte* from, std::byte* to, std::size_t bytes) {
  return TimePieces(bytes, [&](std::size_t begin, std::size_t end) {
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

double StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes) {
  return TimePieces(bytes, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(StreamPiece)(from + begin, to + begin, end - begin);
  });
}

double HalveBytes(const std::byte* from, std::byte* to, std::size_t from_bytes,
                  bool stream) {
  return TimePieces(from_bytes, [&](std::size_t begin, std::size_t end) {
    if (stream) {
      HWY_DYNAMIC_DISPATCH(HalveStreamed)
      (from + begin, to + begin / 2, end - begin);
    } else {
      HWY_DYNAMIC_DISPATCH(HalveStored)
      (from + begin, to + begin / 2, end - begin);
    }
  });
}

double ModifyBytes(std::byte* bytes, std::size_t count) {
  return TimePieces(count, [&](std::size_t begin, std::size_t end) {
    HWY_DYNAMIC_DISPATCH(ModifyPiece)(bytes + begin, end - begin);
  });
}

double ReadBytes(const std::byte* bytes, std::size_t count) {
  return Time(
      [&] { KeepAlive(HWY_DYNAMIC_DISPATCH(ReadPiece)(bytes, count)); });
}

double ReadOnThreads(const std::byte* bytes, std::size_t count) {
  return TimePieces(count, [&](std::size_t begin, std::size_t end) {
    KeepAlive(HWY_DYNAMIC_DISPATCH(ReadPiece)(bytes + begin, end - begin));
  });
}

double MultiplyAdd(std::size_t operations) {
  // The operations are counted in pages, which no thread shares.
  return TimePieces(operations, [&](std::size_t begin, std::size_t end) {
    KeepAlive(HWY_DYNAMIC_DISPATCH(MultiplyAddInRegisters)(end - begin));
  });
}

double MultiplyRows(DType dtype, const std::byte* rows, std::size_t count,
                    bool fetch) {
  alignas(64) std::array<float, kDecodeQueries * kDecodeElements> queries;
  queries.fill(0.5f);
  const auto bytes = AsSize(RunBytes(dtype, kDecodeElements));
  return TimePieces(count, [&](std::size_t begin, std::size_t end) {
    KeepAlive(HWY_DYNAMIC_DISPATCH(MultiplyRowsPiece)(
        dtype, rows + begin * bytes, bytes, end - begin, queries.data(),
        fetch));
  });
}

int ServeLimits() {
  constexpr std::size_t kBytes = std::size_t{512} << 20;
  constexpr std::size_t kOperations = std::size_t{1} << 30;
  const Buffer buffer = WrittenBuffer(kBytes);
  for (int threads = 1; std::cin >> threads;) {
    UseThreads(threads);
    const double read = ReadOnThreads(buffer.data(), kBytes);
    const double multiplied = MultiplyAdd(kOperations);
    std::cout << kBytes / read << ' ' << 2 * kOperations / multiplied
              << std::endl;
  }
  return 0;
}

namespace {

constexpr std::size_t kLineWords = 64 / sizeof(std::uint32_t);

}  // namespace

LineChase::LineChase(std::size_t bytes) : buffer_(WrittenBuffer(bytes)) {
  const std::size_t lines = bytes / 64;
  auto* words = buffer_.as<std::uint32_t>();
  // A generator of full period visits every line once, and prefetchers cannot
  // predict it.
  for (std::size_t i = 0; i < lines; ++i) {
    words[i * kLineWords] =
        static_cast<std::uint32_t>((i * 1664525 + 1013904223) & (lines - 1));
  }
}

double LineChase::Time() {
  constexpr int kWrites = 2000;
  auto* words = buffer_.as<std::uint32_t>();
  std::uint32_t at = next_;
  const double time = bench::Time([&] {
    for (int i = 0; i < kWrites; ++i) {
      std::uint32_t* line = words + std::size_t{at} * kLineWords;
      at = line[0];
      line[1] = at;
    }
    KeepAlive(at);
  });
  next_ = at;
  return time / kWrites;
}

}  // namespace kvtwin::bench
#endif  // HWY_ONCE
