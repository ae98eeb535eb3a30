// Quantise the K and V of new tokens of one layer into their places in the pages, K and V in one launch.
//
// Compiled for one case; macros:
//   INPUT        0 bf16, 1 fp16, 2 e4m3
//   PAGE_FORMAT  0 nvfp4, 1 fp8, 2 bf16
//   HEAD_DIM, PAGE_SIZE
//   SCALE_SEARCH 0: block scales are amax / 6 (as FlashInfer's writer does); 1: the best of five around it
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
constexpr int kThreadBlocksPerSm = kThreadsPerSm / (SCALE_SEARCH ? 2 : 1) / kThreads;

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
// The search computes errors in fp16, two values at a time, in units of the plain step. See `scale_search.py`.

__device__ __forceinline__ float value_of_e4m3(u32 code) {
  return __fmul_rn(Fp16::low(code << 7), 256.f);
}

__device__ __forceinline__ u32 in_both_lanes(float value) { return Fp16::pack(value, value); }

constexpr u32 kTwoToMinus7 = 0x20002000u;    // in both lanes
constexpr u32 kLargestScaled = 0x0E000E00u;  // 6 * 2^-14
constexpr int kSearched[] = {4, 121};        // codes whose candidates all lie in E4M3

// Values and their errors are in units of the plain step. `shrink`: 2^-7 times the plain scale over the candidate;
// `minus_grow`: -2^14 times the candidate over the plain scale.
//
// The nearest E2M1 comes from the bits of an fp16 number 2^-14 times as large: E2M1's subnormal numbers are fp16's then,
// and one mantissa bit is left by rounding ten bits to one.
template <bool kCanSaturate>
__device__ __forceinline__ float squared_error(const u32* magnitudes, const u32* small, u32 shrink, u32 minus_grow) {
  u32 sums = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 scaled = Fp16::multiply(small[i], shrink);
    if constexpr (kCanSaturate) scaled = Fp16::smaller(scaled, kLargestScaled);
    const u32 nearest = (scaled + 0x01000100u) & 0x7E007E00u;
    const u32 error = Fp16::multiply_add(nearest, minus_grow, magnitudes[i]);
    sums = Fp16::multiply_add(error, error, sums);
  }
  return __fadd_rn(Fp16::low(sums), Fp16::high(sums));
}

struct Candidate {
  E4m3 scale;
  float error;
};

// The better of `best` and the scale whose code is `kOffset` away from the plain one; the first of equals.
template <int kOffset>
__device__ __forceinline__ void consider(const u32* magnitudes, const u32* small, E4m3 plain, float plain_reciprocal,
                                         Candidate& best) {
  const u32 code = plain.code + kOffset;
  const float scale = value_of_e4m3(code);
  const u32 shrink = in_both_lanes(__fmul_rn(__fmul_rn(plain.value, reciprocal(scale)), 0.0078125f));
  const u32 minus_grow = in_both_lanes(__fmul_rn(__fmul_rn(scale, plain_reciprocal), -16384.f));
  // A larger scale than the plain one saturates nowhere.
  const float error = squared_error<(kOffset < 0)>(magnitudes, small, shrink, minus_grow);
  if (error < best.error) best = {{code, scale}, error};  // NaN compares false
}

// The scale of least squared error among the E4M3 codes 0, -1, 1, 4 and 5 away from the plain one.
__device__ __forceinline__ E4m3 choose_scale(const Block& block, float global_scale, E4m3 plain) {
  const float inverse_step = reciprocal(__fmul_rn(plain.value, global_scale));
  u32 magnitudes[8], small[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    magnitudes[i] = Fp16::pack(__fmul_rn(Pairs::low(block.pair[i]), inverse_step),
                               __fmul_rn(Pairs::high(block.pair[i]), inverse_step)) &
                    0x7FFF7FFFu;
    small[i] = Fp16::multiply(magnitudes[i], kTwoToMinus7);
  }
  Candidate best{plain, squared_error<false>(magnitudes, small, kTwoToMinus7, 0xF400F400u)};
  const float plain_reciprocal = reciprocal(plain.value);
  consider<-1>(magnitudes, small, plain, plain_reciprocal, best);
  consider<1>(magnitudes, small, plain, plain_reciprocal, best);
  consider<4>(magnitudes, small, plain, plain_reciprocal, best);
  consider<5>(magnitudes, small, plain, plain_reciprocal, best);
  const bool is_searched = plain.code - kSearched[0] <= static_cast<u32>(kSearched[1] - kSearched[0]);
  return is_searched ? best.scale : plain;
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
