// The few things of CUDA's header of this name that kernels here use; see cuda_emulator.h.
#pragma once
struct __nv_bfloat16 { unsigned short bits; };
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) { return {a}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline float __bfloat162float(__nv_bfloat16 a) { return __uint_as_float((unsigned)a.bits << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float a) {
  const unsigned bits = __float_as_uint(a);
  if (a != a) return {0x7FFF};
  return {(unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float a) { return __float2bfloat16_rn(a); }
