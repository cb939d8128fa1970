// Intel's AMX in plain C++, in the place of optimized::AmxTiles. Each thread
// has its own tiles, as on the processor. Where an instruction would raise an
// exception, it does nothing but note a fault.

#ifndef KVTWIN_PROPS_UNIT_ATTENTION_AMX_EMULATOR_H_
#define KVTWIN_PROPS_UNIT_ATTENTION_AMX_EMULATOR_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optimized/amx_products.h"

namespace kvtwin::props {

// The tiles of a thread.
struct TileState {
  static constexpr std::size_t kTiles = 8;
  static constexpr std::size_t kRows = 16;
  static constexpr std::size_t kRowBytes = 64;
  using Tile = std::array<std::array<std::byte, kRowBytes>, kRows>;

  bool is_configured = false;
  optimized::TileConfig config;
  std::array<Tile, kTiles> tiles = {};
};

class EmulatedTiles {
 public:
  static void Configure(const optimized::TileConfig& config) {
    const auto is_zero = [](auto number) { return number == 0; };
    bool valid = config.palette <= 1 && config.start_row == 0 &&
                 std::ranges::all_of(config.reserved, is_zero);
    for (std::size_t t = 0; t < config.rows.size(); ++t) {
      const std::size_t rows = config.rows.at(t);
      const std::size_t bytes = config.row_bytes.at(t);
      const bool is_unused = rows == 0 && bytes == 0;
      const bool is_used = t < TileState::kTiles && rows >= 1 &&
                           rows <= TileState::kRows && bytes >= 1 &&
                           bytes <= TileState::kRowBytes;
      valid = valid && (is_unused || is_used);
    }
    if (!valid) return Fault("ldtilecfg: #GP");
    state_ = {};
    if (config.palette == 1) {
      state_.config = config;
      state_.is_configured = true;
    }
  }

  template <int tile>
  static void Load(const float* from, std::size_t stride) {
    if (!IsUsable(tile)) return Fault("tileloadd: #UD");
    Tile loaded = {};
    for (std::size_t r = 0; r < Rows(tile); ++r) {
      std::memcpy(loaded.at(r).data(),
                  reinterpret_cast<const std::byte*>(from) + r * stride,
                  Bytes(tile));
    }
    state_.tiles.at(tile) = loaded;
  }

  template <int tile>
  static void Zero() {
    if (!IsUsable(tile)) return Fault("tilezero: #UD");
    state_.tiles.at(tile) = {};
  }

  template <int tile>
  static void Store(float* to, std::size_t stride) {
    if (!IsUsable(tile)) return Fault("tilestored: #UD");
    for (std::size_t r = 0; r < Rows(tile); ++r) {
      std::memcpy(reinterpret_cast<std::byte*>(to) + r * stride,
                  state_.tiles.at(tile).at(r).data(), Bytes(tile));
    }
  }

  // The sums of the first and of the second numbers of the pairs are apart from
  // each other until the end.
  template <int sum, int a, int b>
  static void Multiply() {
    const bool fits = IsUsable(sum) && IsUsable(a) && IsUsable(b) && sum != a &&
                      sum != b && a != b && Bytes(sum) % 4 == 0 &&
                      Bytes(a) % 4 == 0 && Bytes(b) % 4 == 0 &&
                      Rows(sum) == Rows(a) && Bytes(sum) == Bytes(b) &&
                      Bytes(a) == 4 * Rows(b);
    if (!fits) return Fault("tdpbf16ps: #UD");
    ++multiplications_;
    const Numbers left = NumbersOf(a);
    const Numbers right = NumbersOf(b);
    Tile result = {};
    for (std::size_t row = 0; row < Rows(sum); ++row) {
      for (std::size_t n = 0; n < Bytes(sum) / 4; ++n) {
        std::array<float, 2> sums = {};
        for (std::size_t k = 0; k < Rows(b); ++k) {
          const auto& x = left[row][k];
          const auto& y = right[k][n];
          sums[0] = MulAdd(x[0], y[0], sums[0]);
          sums[1] = MulAdd(x[1], y[1], sums[1]);
        }
        const float before = Flushed(std::bit_cast<float>(Word(sum, row, n)));
        const float both = Flushed(sums[0] + sums[1]);
        const float after = Flushed(before + both);
        std::memcpy(&result.at(row).at(4 * n), &after, sizeof(after));
      }
    }
    state_.tiles.at(sum) = result;
  }

  static void Release() { state_ = {}; }

  static bool IsConfigured() { return state_.is_configured; }
  // Multiplications of all threads so far.
  static std::size_t Multiplications() { return multiplications_; }
  // The faults of all threads since the last call.
  static std::vector<std::string> TakeFaults() {
    const std::lock_guard lock(mutex_);
    return std::exchange(faults_, {});
  }

 private:
  using Tile = TileState::Tile;
  static constexpr std::uint32_t kUpper = 0xFFFF0000;

  static std::size_t Rows(int tile) {
    return state_.config.rows.at(static_cast<std::size_t>(tile));
  }
  static std::size_t Bytes(int tile) {
    return state_.config.row_bytes.at(static_cast<std::size_t>(tile));
  }
  static bool IsUsable(int tile) {
    return state_.is_configured && Rows(tile) != 0;
  }
  static std::uint32_t Word(int tile, std::size_t row, std::size_t column) {
    std::uint32_t word = 0;
    std::memcpy(
        &word,
        &state_.tiles.at(static_cast<std::size_t>(tile)).at(row).at(4 * column),
        sizeof(word));
    return word;
  }
  // Zero in the place of a number that is subnormal.
  static float Flushed(float number) {
    constexpr std::uint32_t kExponent = 0x7F800000;
    constexpr std::uint32_t kSign = 0x80000000;
    const auto bits = std::bit_cast<std::uint32_t>(number);
    return (bits & kExponent) == 0 ? std::bit_cast<float>(bits & kSign)
                                   : number;
  }
  // Returns x y + sum. The sum is rounded as if there were smaller exponents,
  // and is 0 if it then is below 2^-126. A sum of f32 rounds what is below
  // 2^-126 to fewer digits, and may round it to 2^-126.
  static float MulAdd(float x, float y, float sum) {
    constexpr float kUp = 0x1p24f;
    const float larger = std::fma(x * kUp, y, sum * kUp);
    if (std::abs(larger) < 0x1p-102f) return std::copysign(0.0f, larger);
    return std::fma(x, y, sum);
  }
  // The pairs of a tile, flushed.
  using Numbers =
      std::array<std::array<std::array<float, 2>, TileState::kRowBytes / 4>,
                 TileState::kRows>;
  static Numbers NumbersOf(int tile) {
    Numbers numbers = {};
    for (std::size_t r = 0; r < Rows(tile); ++r) {
      for (std::size_t i = 0; i < Bytes(tile) / 4; ++i) {
        const std::uint32_t word = Word(tile, r, i);
        numbers[r][i] = {Flushed(std::bit_cast<float>(word << 16)),
                         Flushed(std::bit_cast<float>(word & kUpper))};
      }
    }
    return numbers;
  }
  static void Fault(std::string_view text) {
    const std::lock_guard lock(mutex_);
    faults_.emplace_back(text);
  }

  inline static thread_local TileState state_;
  inline static std::atomic<std::size_t> multiplications_ = 0;
  inline static std::mutex mutex_;
  inline static std::vector<std::string> faults_;
};

// Returns the products by the AMX of this processor, or null if it has none or
// if an older instruction set is selected.
inline optimized::MultiplyBf16 MultiplierByAmx() {
  const optimized::MultiplyBf16 own = optimized::Bf16Multiplier();
  return own == optimized::MultiplyInRegisters ? nullptr : own;
}

// For tests of code that rounds by AVX-512 BF16. They are skipped on a
// processor without it, as the instructions would end the program; the emulator
// of AMX and the five targets of AttentionInBf16 are tested everywhere.
class Avx512Bf16 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (optimized::Bf16Multiplier() == nullptr) {
      GTEST_SKIP() << "this processor has no AVX-512 BF16";
    }
  }
};

// Whether two numbers have the same bits, or both are NaN.
inline bool HaveSameBits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_UNIT_ATTENTION_AMX_EMULATOR_H_
