// Quantise the K and V of new tokens of one layer into their places in the pages, K and V in one launch.
//
// Compiled for one case; macros:
//   INPUT        0 bf16, 1 fp16, 2 e4m3
//   PAGE_FORMAT  0 nvfp4, 1 fp8, 2 bf16
//   HEAD_DIM, PAGE_SIZE
//   SCALE_SEARCH 0: block scales are amax / 6 (as FlashInfer's writer does); 1: the best of 11 around it
//
// A thread turns 16 values of K and the same 16 of V, one NVFP4 block each, into 8 bytes and a scale. A thread block
// holds consecutive tokens of one head, because their rows are adjacent in a page: whole sectors are written, of codes
// and of scales. Heads are the fastest grid dimension, because the heads of a token are adjacent in the input.
#include "numeric.cuh"

constexpr int kBlocksPerRow = HEAD_DIM / 16;
constexpr int kTokensPerTile = 128 / kBlocksPerRow;
constexpr int kThreads = kTokensPerTile * kBlocksPerRow;  // blockDim.x

// Registers are held to 32, so that as many threads as the chip can hold wait for memory: 15% of the time of a long
// prefill. E4M3 input needs more of them. The search computes for so long that it does not wait.
constexpr int kThreadsPerSm = INPUT == 2 ? kMaxThreadsPerSm / 4 * 3 : kMaxThreadsPerSm;
constexpr int kThreadBlocksPerSm = SCALE_SEARCH ? 1 : kThreadsPerSm / kThreads;

#if INPUT == 0
using Pairs = Bf16;
#else
using Pairs = Fp16;
#endif
constexpr int kInputBytes = INPUT == 2 ? 1 : 2;

// 16 values as 8 pairs of 16-bit floats; E4M3 becomes fp16, which holds it exactly.
struct Block {
  u32 pair[8];
};

__device__ __forceinline__ Block load_block(const u8* address) {
#if INPUT == 2
  const uint4 bytes = *reinterpret_cast<const uint4*>(address);
  const uint2 a = e4m3x4_to_fp16(bytes.x), b = e4m3x4_to_fp16(bytes.y);
  const uint2 c = e4m3x4_to_fp16(bytes.z), d = e4m3x4_to_fp16(bytes.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
#else
  const uint4 a = reinterpret_cast<const uint4*>(address)[0], b = reinterpret_cast<const uint4*>(address)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
#endif
}

__device__ __forceinline__ float largest_magnitude(const Block& block) {
  u32 largest = block.pair[0] & 0x7FFF7FFFu;
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = Pairs::larger(largest, block.pair[i] & 0x7FFF7FFFu);
  // NOTE: fmaxf passes over NaN, and the 0 stands for a block of nothing else.
  return fmaxf(fmaxf(Pairs::low(largest), Pairs::high(largest)), 0.f);
}

constexpr float kInteger = 8388608.f;  // 2^23: a sum with it is rounded to an integer, ties to even

// E2M1 code of |value| * 2 * half_reciprocal as kInteger + code. Codes are linear in three ranges, 0 to 2, 2 to 4 and
// 4 to 6; what falls into each is cut out by saturation (which turns NaN into 0) and rounded where it is added. All
// the steps between the first product and the sums are exact.
__device__ __forceinline__ float round_to_e2m1(float value, float half_reciprocal) {
  const float half = __fmul_rn(fabsf(value), half_reciprocal);
  float code = __fmaf_rn(__saturatef(half), 4.f, kInteger);
  code = __fmaf_rn(__saturatef(__fadd_rn(half, -1.f)), 2.f, code);
  return __fadd_rn(code, __saturatef(__fadd_rn(half, -2.f)));
}

// The low three bits of four codes as 16 bits, the first in the low nibble; higher bits are undefined.
__device__ __forceinline__ u32 pack_codes(float a, float b, float c, float d) {
  const u32 bc = __float_as_uint(b) + ((__float_as_uint(c) + (__float_as_uint(d) << 4)) << 4);
  return __float_as_uint(a) + (bc << 4);
}

// Signs of eight values, given as four pairs, in bit 3 of each nibble.
__device__ __forceinline__ u32 pack_signs(const u32* pair) {
  const u32 a = __byte_perm(pair[0], pair[1], 0x7351), b = __byte_perm(pair[2], pair[3], 0x7351);
  const u32 even = __byte_perm(a, b, 0x5410), odd = __byte_perm(a, b, 0x7632);
  return (odd & 0x80808080u) | (even >> 4 & 0x08080808u);
}

__device__ __forceinline__ u32 quantize_eight(const u32* pair, float half_reciprocal) {
  float code[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    code[2 * i] = round_to_e2m1(Pairs::low(pair[i]), half_reciprocal);
    code[2 * i + 1] = round_to_e2m1(Pairs::high(pair[i]), half_reciprocal);
  }
  const u32 magnitudes = __byte_perm(pack_codes(code[0], code[1], code[2], code[3]),
                                     pack_codes(code[4], code[5], code[6], code[7]), 0x5410);
  return magnitudes | pack_signs(pair);
}

// NOTE: the reciprocal is correctly rounded and then multiplied with. Dividing by the step gives other codes at ties.
// A scale of 0 gives NaN, and every code becomes 0.
__device__ __forceinline__ float half_reciprocal_of(float scale, float global_scale) {
  return __fmul_rn(0.5f, reciprocal(__fmul_rn(scale, global_scale)));
}

#if SCALE_SEARCH
constexpr int kFirstCandidate = -4, kLastCandidate = 6;

__device__ __forceinline__ float value_of_e4m3(u32 code) {
  return __fmul_rn(Fp16::low(code << 7), 256.f);
}

// Squared error of 16 magnitudes at one scale, summed in halves: 8 + 8, 4 + 4, ...
__device__ __forceinline__ float squared_error(const float* magnitude, float scale, float global_scale) {
  const float step = __fmul_rn(scale, global_scale);
  const float half_reciprocal = half_reciprocal_of(scale, global_scale);
  float error[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float code = __fadd_rn(round_to_e2m1(magnitude[i], half_reciprocal), -kInteger);
    const float e2m1 = fmaxf(fmaxf(__fmul_rn(0.5f, code), __fadd_rn(code, -2.f)), __fmaf_rn(2.f, code, -8.f));
    const float difference = __fmaf_rn(-e2m1, step, magnitude[i]);
    error[i] = __fmul_rn(difference, difference);
  }
#pragma unroll
  for (int width = 8; width; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) error[i] = __fadd_rn(error[i], error[i + width]);
  return error[0];
}

// The scale of least squared error among the E4M3 codes -4 to +6 around the plain one; the smallest of equals.
// Values that are not finite have no say.
__device__ __forceinline__ E4m3 choose_scale(const Block& block, float global_scale, E4m3 plain) {
  if (plain.code == 0) return plain;  // all codes are 0
  float magnitude[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    magnitude[i] = fabsf(i & 1 ? Pairs::high(block.pair[i / 2]) : Pairs::low(block.pair[i / 2]));
    if (!(magnitude[i] < __uint_as_float(0x7F800000u))) magnitude[i] = 0.f;
  }
  E4m3 best = plain;
  float least_error = __uint_as_float(0x7F800000u);
  const int first = max(static_cast<int>(plain.code) + kFirstCandidate, 1);
  const int last = min(static_cast<int>(plain.code) + kLastCandidate, 126);
#pragma unroll 1
  for (int code = first; code <= last; ++code) {
    const float scale = value_of_e4m3(code);
    const float error = squared_error(magnitude, scale, global_scale);
    if (error < least_error) {
      least_error = error;
      best = {static_cast<u32>(code), scale};
    }
  }
  return best;
}
#else
__device__ __forceinline__ E4m3 choose_scale(const Block&, float, E4m3 plain) { return plain; }
#endif

// Where the 16 values of a thread go: `row` counts (head, token) in a page, `column` blocks in a row.
struct Place {
  i64 page_offset;
  u32 row;
  u32 column;
};

__device__ __forceinline__ void store_nvfp4(const Block& block, float global_scale, const Place& place, u8* data,
                                            u8* scales) {
  const float divisor = __fmul_rn(6.f, global_scale);
  // NOTE: 512 saturates like everything above it, and keeps infinity out of the division.
  const float amax = fminf(largest_magnitude(block), __fmul_rn(512.f, divisor));
  const E4m3 plain = round_to_e4m3(divide(amax, divisor, reciprocal(divisor)));
  const E4m3 scale = choose_scale(block, global_scale, plain);
  const float half_reciprocal = half_reciprocal_of(scale.value, global_scale);
  uint2 codes;
  codes.x = quantize_eight(block.pair, half_reciprocal);
  codes.y = quantize_eight(block.pair + 4, half_reciprocal);
  const u32 index = place.row * kBlocksPerRow + place.column;
  *reinterpret_cast<uint2*>(data + place.page_offset + index * 8) = codes;
  scales[place.page_offset + index] = static_cast<u8>(scale.code);
}

__device__ __forceinline__ void store_fp8(const Block& block, float global_scale, const Place& place, u8* data) {
  u32 bytes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bytes[i] = pack_e4m3(__fdiv_rn(Pairs::low(block.pair[i]), global_scale),
                         __fdiv_rn(Pairs::high(block.pair[i]), global_scale));
  }
  const u32 index = place.row * kBlocksPerRow + place.column;
  *reinterpret_cast<uint4*>(data + place.page_offset + index * 16) =
      make_uint4(__byte_perm(bytes[0], bytes[1], 0x5410), __byte_perm(bytes[2], bytes[3], 0x5410),
                 __byte_perm(bytes[4], bytes[5], 0x5410), __byte_perm(bytes[6], bytes[7], 0x5410));
}

__device__ __forceinline__ void store_bf16(const Block& block, const Place& place, u8* data) {
  u32 pair[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pair[i] = INPUT == 0 ? block.pair[i] : Bf16::pack(Pairs::low(block.pair[i]), Pairs::high(block.pair[i]));
  }
  const u32 index = place.row * kBlocksPerRow + place.column;
  uint4* const target = reinterpret_cast<uint4*>(data + place.page_offset + index * 32);
  target[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  target[1] = make_uint4(pair[4], pair[5], pair[6], pair[7]);
}

__device__ __forceinline__ void store(const Block& block, float global_scale, const Place& place, u8* data,
                                      u8* scales) {
  if constexpr (PAGE_FORMAT == 0) store_nvfp4(block, global_scale, place, data, scales);
  if constexpr (PAGE_FORMAT == 1) store_fp8(block, global_scale, place, data);
  if constexpr (PAGE_FORMAT == 2) store_bf16(block, place, data);
}

// Grid (KV heads, ceil(tokens / kTokensPerTile)); block kThreads. Strides are in bytes.
//
// A slot is page * PAGE_SIZE + offset; a token whose slot is negative, or not below num_slots, is skipped.
extern "C" __global__ void __launch_bounds__(kThreads, kThreadBlocksPerSm)
    quantize_append(const u8* key, i64 key_token_stride, i64 key_head_stride, const u8* value, i64 value_token_stride,
                    i64 value_head_stride, const i64* slots, u8* k_data, u8* k_scales, u8* v_data, u8* v_scales,
                    i64 page_stride, i64 num_slots, float k_global_scale, float v_global_scale, int num_tokens) {
  const u32 column = threadIdx.x % kBlocksPerRow;
  const int token = blockIdx.y * kTokensPerTile + threadIdx.x / kBlocksPerRow;
  const u32 head = blockIdx.x;
  join_stream();
  if (token >= num_tokens) return;
  const u64 slot = static_cast<u64>(slots[token]);
  const u32 offset = column * (16 * kInputBytes);
  const Block k_block = load_block(key + token * key_token_stride + head * key_head_stride + offset);
  const Block v_block = load_block(value + token * value_token_stride + head * value_head_stride + offset);
  if (slot >= static_cast<u64>(num_slots)) return;
  const Place place{static_cast<i64>(slot / PAGE_SIZE) * page_stride,
                    head * PAGE_SIZE + static_cast<u32>(slot % PAGE_SIZE), column};
  store(k_block, k_global_scale, place, k_data, k_scales);
  store(v_block, v_global_scale, place, v_data, v_scales);
}
