// NVFP4 in registers: codes to fp16.
//
// A code is sign, two exponent bits, mantissa bit. Put at the same places of an fp16 number, with the exponent's other
// bits zero, it is the code's value times 2^-14, subnormals included. Multiplied by an E4M3 scale it has at most six
// significant bits and is a multiple of 2^-24: exact in fp16. Whoever sums such numbers multiplies by kCodeUnit later.
#pragma once

#include "ptx.cuh"

namespace kvtier {

constexpr float kCodeUnit = 16384.0f;  // 2^14

// The eight codes of a word as fp16 pairs: halves[i] has code i of the word's low half and code i of its high half.
__device__ __forceinline__ void unpack_codes(uint32 (&halves)[4], uint32 word) {
  constexpr uint32 kSigns = 0x80808080u;
  constexpr uint32 kKept = 0x8E008E00u;
  // In each byte: sign of the code at bit 7, its other bits at 3 to 1, and foreign bits between, masked off at the end.
  const uint32 odd = select_bits(kSigns, word, word >> 3);
  const uint32 even = select_bits(kSigns, word << 4, word << 1);
  halves[0] = (even << 8) & kKept;
  halves[1] = (odd << 8) & kKept;
  halves[2] = even & kKept;
  halves[3] = odd & kKept;
}

// Two of the four E4M3 numbers in a word as fp16: the low two, or the high two.
template <bool high>
__device__ __forceinline__ uint32 scales_to_half2(uint32 scales) {
  uint32 halves;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 pair<2>; mov.b32 {pair0, pair1}, %1; cvt.rn.f16x2.e4m3x2 %0, pair%2; }"
      : "=r"(halves)
      : "r"(scales), "n"(high ? 1 : 0));
#else
  const uint32 spread = __byte_perm(scales, 0, high ? 0x4342 : 0x4140);
  // Exponent biases 7 and 15: the bits moved to their places are the number times 2^-8.
  halves = multiply_half2(((spread & 0x00800080u) << 8) | ((spread & 0x007F007Fu) << 7), 0x5C005C00u);
#endif
  return halves;
}

__device__ __forceinline__ uint32 repeat_low_half(uint32 halves) { return __byte_perm(halves, 0, 0x1010); }
__device__ __forceinline__ uint32 repeat_high_half(uint32 halves) { return __byte_perm(halves, 0, 0x3232); }

}  // namespace kvtier
