// Bring the tokens of cached prefixes from the pages of one layer into one workspace, K and V in one launch.
//
// Compiled for one case; macros:
//   PAGE_FORMAT  0 nvfp4, 1 fp8, 2 bf16
//   OUTPUT       0 bf16, 1 fp16, 2 e4m3 (saturating)
//   HEAD_DIM, PAGE_SIZE
//
// A thread makes 16 bytes of output at a time, so that every store of a warp writes whole lines, and has
// kItemsPerThread loads under way. A thread block holds adjacent rows of one side of one page.
#include "numeric.cuh"

constexpr int kThreads = 256;  // blockDim.x
constexpr int kItemsPerThread = 4;
constexpr int kItemsPerBlock = kThreads * kItemsPerThread;

constexpr int kOutputBytes = OUTPUT == 2 ? 1 : 2;
constexpr int kValues = 16 / kOutputBytes;  // of one item
constexpr u32 kItemsPerRow = HEAD_DIM / kValues;

constexpr int kStoredBits = PAGE_FORMAT == 0 ? 4 : PAGE_FORMAT == 1 ? 8 : 16;
constexpr int kStoredBytes = kValues * kStoredBits / 8;  // of one item: 4, 8, 16 or 32
constexpr int kStoredWords = kStoredBytes / 4;

// What a page holds for one item.
struct Stored {
  u32 word[kStoredWords];
  u32 scale;  // E4M3, nvfp4 only
};

// Regions are dense, so items lie one behind the other in a page.
__device__ __forceinline__ Stored load_item(const u8* data, const u8* scales, u32 item) {
  Stored stored;
  const u8* const address = data + item * kStoredBytes;
  if constexpr (kStoredBytes == 4) {
    stored.word[0] = *reinterpret_cast<const u32*>(address);
  } else if constexpr (kStoredBytes == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(address);
    stored.word[0] = words.x, stored.word[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < kStoredWords / 4; ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(address)[i];
      stored.word[4 * i] = words.x, stored.word[4 * i + 1] = words.y;
      stored.word[4 * i + 2] = words.z, stored.word[4 * i + 3] = words.w;
    }
  }
  if constexpr (PAGE_FORMAT == 0) stored.scale = scales[item * kValues / 16];
  return stored;
}

// Eight E2M1 codes times their block scale. E2M1's fields, moved up against those of fp16, are the value times 2^-14,
// and the product with an E4M3 number is exact: at most 6 significant bits, a multiple of 2^-24, below 0.17.
__device__ __forceinline__ void decode_codes(u32 codes, u32 scale_pair, float multiplier, float* value) {
  const u32 even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0E0E0E0Eu);
  const u32 odd = (codes & 0x80808080u) | (codes >> 3 & 0x0E0E0E0Eu);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // bytes 2i and 2i + 1 hold elements 4i to 4i + 3
    const u32 spread = i == 0 ? 0x1404 : 0x3424;
    const u32 evens = Fp16::multiply(__byte_perm(even, 0, spread), scale_pair);
    const u32 odds = Fp16::multiply(__byte_perm(odd, 0, spread), scale_pair);
    value[4 * i] = __fmul_rn(Fp16::low(evens), multiplier);
    value[4 * i + 1] = __fmul_rn(Fp16::low(odds), multiplier);
    value[4 * i + 2] = __fmul_rn(Fp16::high(evens), multiplier);
    value[4 * i + 3] = __fmul_rn(Fp16::high(odds), multiplier);
  }
}

__device__ __forceinline__ void decode_item(const Stored& stored, float global_scale, float* value) {
  if constexpr (PAGE_FORMAT == 0) {
    const u32 scale_pair = Fp16::multiply((stored.scale << 7) * 0x10001u, kFp16Pair256);
    const float multiplier = __fmul_rn(global_scale, 16384.f);
#pragma unroll
    for (int i = 0; i < kStoredWords; ++i) decode_codes(stored.word[i], scale_pair, multiplier, value + 8 * i);
  } else if constexpr (PAGE_FORMAT == 1) {
#pragma unroll
    for (int i = 0; i < kStoredWords; ++i) {
      const uint2 pairs = e4m3x4_to_fp16(stored.word[i]);
      value[4 * i] = __fmul_rn(Fp16::low(pairs.x), global_scale);
      value[4 * i + 1] = __fmul_rn(Fp16::high(pairs.x), global_scale);
      value[4 * i + 2] = __fmul_rn(Fp16::low(pairs.y), global_scale);
      value[4 * i + 3] = __fmul_rn(Fp16::high(pairs.y), global_scale);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStoredWords; ++i) {
      value[2 * i] = Bf16::low(stored.word[i]), value[2 * i + 1] = Bf16::high(stored.word[i]);
    }
  }
}

__device__ __forceinline__ uint4 encode_item(const float* value) {
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (OUTPUT == 0) word[i] = Bf16::pack(value[2 * i], value[2 * i + 1]);
    if constexpr (OUTPUT == 1) word[i] = Fp16::pack(value[2 * i], value[2 * i + 1]);
    if constexpr (OUTPUT == 2) {
      word[i] = __byte_perm(pack_e4m3(value[4 * i], value[4 * i + 1]), pack_e4m3(value[4 * i + 2], value[4 * i + 3]),
                            0x5410);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Grid (ceil(KV heads * PAGE_SIZE * kItemsPerRow / kItemsPerBlock), pages a sequence at most, 2 * sequences); block
// kThreads. Strides are in bytes, save that of the page table.
//
// Thread blocks behind the end of a sequence return at once. Tokens in pages that are not in the pool, and rows that
// are not in the workspace, are skipped.
extern "C" __global__ void __launch_bounds__(kThreads)
    gather_dequantize(const u8* k_data, const u8* k_scales, const u8* v_data, const u8* v_scales, i64 page_stride,
                      const int* page_table, i64 page_table_stride, const int* lengths, const int* starts, u8* key,
                      i64 key_token_stride, i64 key_head_stride, u8* value, i64 value_token_stride,
                      i64 value_head_stride, float k_global_scale, float v_global_scale, int num_heads, int num_pages,
                      int num_rows) {
  join_stream();
  const bool is_key = (blockIdx.z & 1) == 0;
  const int sequence = blockIdx.z >> 1;
  const int first_token = blockIdx.y * PAGE_SIZE;
  // NOTE: all three are loaded before any is looked at, so that their latencies overlap.
  const int length = lengths[sequence];
  const int page = page_table[sequence * page_table_stride + blockIdx.y];
  const int first_row = starts[sequence] + first_token;
  if (first_token >= length || static_cast<u32>(page) >= static_cast<u32>(num_pages)) return;
  const u8* const data = (is_key ? k_data : v_data) + page * page_stride;
  const u8* const scales = (is_key ? k_scales : v_scales) + page * page_stride;
  const u32 num_items = num_heads * PAGE_SIZE * kItemsPerRow;
  const u32 tokens_here = min(length - first_token, PAGE_SIZE);
  const u32 first_item = blockIdx.x * kItemsPerBlock + threadIdx.x;

  Stored stored[kItemsPerThread];
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const u32 item = first_item + i * kThreads;
    // NOTE: the whole page is read, also behind the end of the sequence, to keep loads free of branches.
    if (item < num_items) stored[i] = load_item(data, scales, item);
  }

  u8* const target = is_key ? key : value;
  const i64 token_stride = is_key ? key_token_stride : value_token_stride;
  const i64 head_stride = is_key ? key_head_stride : value_head_stride;
  const float global_scale = is_key ? k_global_scale : v_global_scale;
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const u32 item = first_item + i * kThreads;
    const u32 column = item % kItemsPerRow, token = item / kItemsPerRow % PAGE_SIZE;
    const u32 head = item / (kItemsPerRow * PAGE_SIZE), row = first_row + token;
    if (item >= num_items || token >= tokens_here || row >= static_cast<u32>(num_rows)) continue;
    float decoded[kValues];
    decode_item(stored[i], global_scale, decoded);
    *reinterpret_cast<uint4*>(target + row * token_stride + head * head_stride + column * 16) = encode_item(decoded);
  }
}
