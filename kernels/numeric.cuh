// Number formats that kvtier's kernels share: 16-bit and E4M3 values to fp32 and back, on every architecture from sm_80.
//
// No header of the CUDA toolkit is included: NVRTC finds none on a machine that has only the driver and the NVRTC wheel.
// Multiplications and additions that must not be fused are written as intrinsics, so no compiler flag can change a bit.
#pragma once

#include "stream.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2);

#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kMaxThreadsPerSm = 1536;
#else
constexpr int kMaxThreadsPerSm = 2048;
#endif

// ---- 16-bit values, two in a word ---------------------------------------------------------------------------------

struct Bf16 {
  static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  // The larger of each lane; a NaN loses against a number.
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 d;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }

  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
};

struct Fp16 {
  static __device__ __forceinline__ float low(u32 pair) {
    float d;
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.f32.f16 %0, x; }" : "=f"(d) : "r"(pair));
    return d;
  }
  static __device__ __forceinline__ float high(u32 pair) {
    float d;
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.f32.f16 %0, y; }" : "=f"(d) : "r"(pair));
    return d;
  }

  static __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }

  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }

  static __device__ __forceinline__ u32 smaller(u32 a, u32 b) {
    u32 d;
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }

  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }

  static __device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
};

// ---- fp32 ---------------------------------------------------------------------------------------------------------

// 1 / x, correctly rounded as __frcp_rn(x) is, without its branch: for x and 1 / x normal, with any mantissa. 0 gives NaN.
__device__ __forceinline__ float reciprocal(float x) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
  return __fmaf_rn(__fmaf_rn(-x, estimate, 1.f), estimate, estimate);
}

// x / divisor, correctly rounded as __fdiv_rn is, when `inverse` is reciprocal(divisor); same range, x at most 2^60
// times and, to be exact, at least 2^-40 times the divisor.
__device__ __forceinline__ float divide(float x, float divisor, float inverse) {
  float quotient = __fmul_rn(x, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-quotient, divisor, x), inverse, quotient);
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, x), inverse, quotient);
}

// ---- E4M3 ---------------------------------------------------------------------------------------------------------

constexpr float kE4m3Max = 448.f;
constexpr u32 kFp16Pair256 = 0x5C005C00u;  // 256 in both lanes

// E4M3 in the high byte of each lane -> two fp16, exactly; NaN stays NaN and every value keeps its sign.
__device__ __forceinline__ u32 e4m3_high_bytes_to_fp16(u32 lanes) {
#if __CUDA_ARCH__ >= 890
  u32 pair;
  asm("{ .reg .b16 x; cvt.u16.u32 x, %1; cvt.rn.f16x2.e4m3x2 %0, x; }" : "=r"(pair) : "r"(__byte_perm(lanes, 0, 0x4431)));
  return pair | (lanes & 0x80008000u);  // the instruction's NaN is positive
#else
  // The fields of E4M3, moved up against those of fp16, are the value times 2^-8, subnormal ones too.
  const u32 magnitude = (lanes >> 1) & 0x3F803F80u;
  const u32 nan = (magnitude + 0x00800080u) & 0x40004000u;  // one past the greatest number carries into this bit
  const u32 nan_exponent = (nan << 1) - (nan >> 4);
  return Fp16::multiply(magnitude | (lanes & 0x80008000u), kFp16Pair256) | nan_exponent;
#endif
}

// Four E4M3 values of a word, in order, as fp16.
__device__ __forceinline__ uint2 e4m3x4_to_fp16(u32 bytes) {
  return make_uint2(e4m3_high_bytes_to_fp16(__byte_perm(bytes, 0, 0x1404)),
                    e4m3_high_bytes_to_fp16(__byte_perm(bytes, 0, 0x3424)));
}

struct E4m3 {
  u32 code;
  float value;
};

// A magnitude rounded to the nearest E4M3, ties to even, saturating. Adding 2^20 times its power of two leaves exactly
// the bits that E4M3 keeps. NaN gives 448.
__device__ __forceinline__ E4m3 round_to_e4m3(float magnitude) {
  const float limited = fminf(magnitude, kE4m3Max);
  const u32 exponent = max(__float_as_uint(limited) & 0x7F800000u, 0x3C800000u);  // at least 2^-6: subnormal spacing
  const float offset = __fmul_rn(__uint_as_float(exponent), 1048576.f);
  const float sum = __fadd_rn(limited, offset);
  const u32 bits = __float_as_uint(sum);
  return {(bits & 0x1F) + (bits >> 20) - 1128, __fadd_rn(sum, -offset)};
}

// Two values as E4M3 in the low 16 bits, `low` in the low byte; saturating, NaN stays NaN.
__device__ __forceinline__ u32 pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
#else
  const auto one = [](float x) {
    const u32 code = x == x ? round_to_e4m3(fabsf(x)).code : 0x7Fu;
    return code | (__float_as_uint(x) >> 24 & 0x80u);
  };
  return one(low) | one(high) << 8;
#endif
}

// The same of two fp16 values.
__device__ __forceinline__ u32 fp16_to_e4m3(u32 pair) {
#if __CUDA_ARCH__ >= 890
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(pair));
  return d;
#else
  return pack_e4m3(Fp16::low(pair), Fp16::high(pair));
#endif
}
