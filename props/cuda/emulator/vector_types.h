// CUDA's small structs, with the alignment that the real ones have.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_VECTOR_TYPES_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_VECTOR_TYPES_H_

struct alignas(8) int2 {
  int x, y;
};
struct int3 {
  int x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct float3 {
  float x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(4) ushort2 {
  unsigned short x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  // In CUDA a number converts to a dim3.
  constexpr dim3(unsigned vx = 1, unsigned vy = 1,  // NOLINT
                 unsigned vz = 1)
      : x(vx), y(vy), z(vz) {}
  constexpr explicit dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

constexpr int2 make_int2(int x, int y) { return {x, y}; }
constexpr int3 make_int3(int x, int y, int z) { return {x, y, z}; }
constexpr int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) {
  return {x, y, z};
}
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
constexpr float2 make_float2(float x, float y) { return {x, y}; }
constexpr float3 make_float3(float x, float y, float z) { return {x, y, z}; }
constexpr float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
constexpr double2 make_double2(double x, double y) { return {x, y}; }
constexpr uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z,
                             unsigned char w) {
  return {x, y, z, w};
}
constexpr ushort2 make_ushort2(unsigned short x, unsigned short y) {
  return {x, y};
}
constexpr ushort4 make_ushort4(unsigned short x, unsigned short y,
                               unsigned short z, unsigned short w) {
  return {x, y, z, w};
}
constexpr ulonglong2 make_ulonglong2(unsigned long long x,
                                     unsigned long long y) {
  return {x, y};
}

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_VECTOR_TYPES_H_
