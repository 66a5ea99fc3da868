// The few things of CUDA's header of this name that kernels here use; see cuda_emulator.h.
#pragma once
struct __half { unsigned short bits; };
inline __half __ushort_as_half(unsigned short a) { return {a}; }
inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline float __half2float(__half a) {
  _Float16 value;
  memcpy(&value, &a, 2);
  return (float)value;
}
inline __half __float2half_rn(float a) {
  const _Float16 value = (_Float16)a;
  __half half;
  memcpy(&half, &value, 2);
  return half;
}
inline __half __float2half(float a) { return __float2half_rn(a); }
