// The instructions of emulated_intrinsics.h, except the copies (see grid.cc).

#include <array>
#include <bit>
#include <cstring>

#include "props/cuda/emulator/emulated_intrinsics.h"

namespace kvtwin::emulator {
namespace {

constexpr unsigned kAllLanes = 0xffffffff;

float FromHalf(std::uint32_t bits) {
  // Read as a subnormal f32, the f16's bits are 2^112 times too small.
  const float magnitude =
      std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112F;
  std::uint32_t out = std::bit_cast<std::uint32_t>(magnitude);
  if ((bits & 0x7c00) == 0x7c00) out = 0x7f800000 | (bits & 0x3ff) << 13;
  return std::bit_cast<float>(out | (bits & 0x8000) << 16);
}

float FromUpper(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

std::uint32_t ToHalf(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above.
  if (magnitude < 0x38800000) {
    // Below 2^-14 the last place is 2^-24, as for 0.5 in f32.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000);
  }
  const std::uint32_t odd = magnitude >> 13 & 1;
  return sign | (magnitude - 0x38000000 + 0xfff + odd) >> 13;
}

std::uint32_t HalfFromF8(std::uint32_t bits) {
  const std::uint32_t sign = (bits & 0x80) << 8;
  const std::uint32_t magnitude = bits & 0x7f;
  if (magnitude == 0x7f) return sign | 0x7fff;
  if (magnitude >= 8) return sign | ((magnitude << 7) + (8 << 10));
  // A subnormal number is an integer times 2^-9.
  return sign | ToHalf(static_cast<float>(magnitude) * 0x1p-9F);
}

// A lane's input to a matrix product.
struct Operands {
  std::array<std::uint32_t, 4> left;
  std::array<std::uint32_t, 2> right;
  std::array<float, 4> sums;
};

std::uint32_t Element(std::uint32_t two, int which) {
  return which == 0 ? two & 0xffff : two >> 16;
}

template <float (*kFrom)(std::uint32_t)>
void Multiply(unsigned /*mask*/, const Lane* lanes) {
  float left[16][16];
  float right[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<const Operands*>(lanes[lane].in);
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = g + i / 2 % 2 * 8;
      const int column = 2 * t + i % 2 + i / 4 * 8;
      left[row][column] =
          kFrom(Element(in.left[static_cast<std::size_t>(i / 2)], i % 2));
    }
    for (int i = 0; i < 4; ++i) {
      right[2 * t + i % 2 + i / 2 * 8][g] =
          kFrom(Element(in.right[static_cast<std::size_t>(i / 2)], i % 2));
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<const Operands*>(lanes[lane].in);
    auto& out = *static_cast<std::array<float, 4>*>(lanes[lane].out);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8;
      const int column = lane % 4 * 2 + i % 2;
      float sum = in.sums[static_cast<std::size_t>(i)];
      for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
      out[static_cast<std::size_t>(i)] = sum;
    }
  }
}

void Mma(const char* name, uint4 left, uint2 right, float (&sums)[4],
         Combine multiply) {
  const Operands in = {{left.x, left.y, left.z, left.w},
                       {right.x, right.y},
                       {sums[0], sums[1], sums[2], sums[3]}};
  std::array<float, 4> out = {};
  Meet(name, kAllLanes, &in, &out, multiply);
  std::copy(out.begin(), out.end(), sums);
}

// The `in` of a lane is the address of a row.
template <bool kTransposed>
void LoadMatrices(unsigned /*mask*/, const Lane* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    std::uint32_t out[4];
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint32_t two = 0;
      for (int i = 0; i < 2; ++i) {
        const int across = lane % 4 * 2 + i;
        const int row = kTransposed ? across : lane / 4;
        const int column = kTransposed ? lane / 4 : across;
        const auto* const elements =
            static_cast<const std::uint16_t*>(lanes[8 * matrix + row].in);
        std::uint16_t element = 0;
        std::memcpy(&element, elements + column, sizeof(element));
        two |= std::uint32_t{element} << (16 * i);
      }
      out[matrix] = two;
    }
    *static_cast<uint4*>(lanes[lane].out) = {out[0], out[1], out[2], out[3]};
  }
}

uint4 LdMatrix(const char* name, const void* shared, Combine load) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 16 != 0) {
    Misuse(name, "the address is not a multiple of 16");
  }
  uint4 out = {};
  Meet(name, kAllLanes, shared, &out, load);
  return out;
}

}  // namespace

void MmaF16(uint4 left, uint2 right, float (&sums)[4]) {
  Mma("MmaF16", left, right, sums, Multiply<FromHalf>);
}

void MmaBF16(uint4 left, uint2 right, float (&sums)[4]) {
  Mma("MmaBF16", left, right, sums, Multiply<FromUpper>);
}

uint4 LdMatrix4(const void* shared) {
  return LdMatrix("LdMatrix4", shared, LoadMatrices<false>);
}

uint4 LdMatrix4Trans(const void* shared) {
  return LdMatrix("LdMatrix4Trans", shared, LoadMatrices<true>);
}

std::uint32_t PackHalf2(float low, float high) {
  return ToHalf(low) | ToHalf(high) << 16;
}

std::uint32_t HalvesFromF8(std::uint32_t bytes) {
  return HalfFromF8(bytes & 0xff) | HalfFromF8(bytes >> 8 & 0xff) << 16;
}

}  // namespace kvtwin::emulator
