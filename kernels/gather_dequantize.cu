// Bring the tokens of cached prefixes from the pages of one layer into one workspace, K and V in one launch.
//
// Compiled for one case; macros:
//   PAGE_FORMAT  0 nvfp4, 1 fp8, 2 bf16
//   OUTPUT       0 bf16, 1 fp16, 2 e4m3 (saturating)
//   HEAD_DIM, PAGE_SIZE
//   UNIT_SCALES  1: nvfp4 whose global scales are both 1
//   VALUES       that a thread makes: 32 or 64
//
// A thread makes its values in items of 16 bytes of output, so that every store of a warp writes whole lines, and has the
// loads of all of them under way. A thread block holds adjacent rows of one side of one page.
//
// While the stream's previous kernel runs, a thread block finds its page, has it brought into L2 and computes its
// addresses. It loads from that page as soon as it may, and again if the previous kernel named another one.
#include "numeric.cuh"
#include "ptx.cuh"

constexpr int kOutputBytes = OUTPUT == 2 ? 1 : 2;
constexpr int kValues = 16 / kOutputBytes;  // of one item
constexpr u32 kItemsPerRow = HEAD_DIM / kValues;

constexpr int kThreads = 512;  // blockDim.x
constexpr int kItemsPerThread = VALUES / kValues;
constexpr int kItemsPerBlock = kThreads * kItemsPerThread;
constexpr int kBlocksPerSm = PAGE_FORMAT == 0 ? kMaxThreadsPerSm / kThreads : 2;  // that registers leave room for

// A thread's items are kThreads apart. Where that is a number of whole rows, it is a step to other tokens of a head or to
// other heads, the same for all threads. The compiler cannot know that it carries nowhere else.
constexpr int kStepRows = kThreads / kItemsPerRow;
constexpr int kStepsPerHead = kStepRows < PAGE_SIZE ? PAGE_SIZE / kStepRows : 1;
constexpr int kStepHeads = kStepRows < PAGE_SIZE ? 1 : kStepRows / PAGE_SIZE;
constexpr bool kStepsAreEqual =
    kThreads % kItemsPerRow == 0 && (kStepRows % PAGE_SIZE == 0 || PAGE_SIZE % kStepRows == 0);

struct Place {
  int token;  // in its page
  int head;
  u32 column;  // in items
};

// Of item `i` of the thread whose first one is `item`.
__device__ __forceinline__ Place place_of(u32 item, int i) {
  const u32 found = kStepsAreEqual ? item : item + i * kThreads, row = found / kItemsPerRow;
  Place place{static_cast<int>(row % PAGE_SIZE), static_cast<int>(row / PAGE_SIZE), found % kItemsPerRow};
  if constexpr (kStepsAreEqual) {
    place.token += i % kStepsPerHead * kStepRows;
    place.head += i / kStepsPerHead * kStepHeads;
  }
  return place;
}

constexpr int kStoredBits = PAGE_FORMAT == 0 ? 4 : PAGE_FORMAT == 1 ? 8 : 16;
constexpr int kStoredBytes = kValues * kStoredBits / 8;  // of one item: 4, 8, 16 or 32
constexpr int kStoredWords = kStoredBytes / 4;

// What a page holds for one item.
struct Stored {
  u32 word[kStoredWords];
  u32 scale;  // E4M3, nvfp4 only
};

// Regions are dense, so items lie one behind the other in a page.
__device__ __forceinline__ Stored load_item(const u8* address, const u8* scale) {
  Stored stored;
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
  if constexpr (PAGE_FORMAT == 0) stored.scale = *scale;
  return stored;
}

// Brings what this thread block will read of a page into L2; with 64 values a thread the scales alone, since that many
// loads of codes get there sooner by themselves.
__device__ __forceinline__ void prefetch_items(const u8* data, const u8* scales, u32 num_items) {
#if __CUDA_ARCH__ >= 900
  const u32 first = blockIdx.x * kItemsPerBlock;
  const u32 count = min(num_items - first, static_cast<u32>(kItemsPerBlock));
  if constexpr (VALUES < 64) prefetch_to_l2(data + first * kStoredBytes, count * kStoredBytes);
  // NOTE: a block's items are a multiple of 1,024 or end a page: their scales are multiples of 16 bytes.
  if constexpr (PAGE_FORMAT == 0) prefetch_to_l2(scales + first * kValues / 16, count * kValues / 16);
#endif
}

// Four E2M1 codes, moved up against the fields of fp16: each is its value times 2^-14.
struct Codes {
  u32 even;  // codes 0 and 2
  u32 odd;   // codes 1 and 3
};

// The low four of a word's eight codes, or the high four.
__device__ __forceinline__ Codes spread_codes(u32 codes, bool high) {
  const u32 even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0E0E0E0Eu);
  const u32 odd = (codes & 0x80808080u) | (codes >> 3 & 0x0E0E0E0Eu);
  const u32 bytes = high ? 0x3424 : 0x1404;
  return {__byte_perm(even, 0, bytes), __byte_perm(odd, 0, bytes)};
}

// Eight E2M1 codes times their block scale. The product with an E4M3 number is exact: at most 6 significant bits, a
// multiple of 2^-24, below 0.17.
__device__ __forceinline__ void decode_codes(u32 word, u32 scale_pair, float multiplier, float* value) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Codes codes = spread_codes(word, i);
    const u32 evens = Fp16::multiply(codes.even, scale_pair), odds = Fp16::multiply(codes.odd, scale_pair);
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

#if UNIT_SCALES && OUTPUT == 2
// Four E4M3 values in the order of the fp16 pairs.
__device__ __forceinline__ u32 fp16_to_e4m3x4(u32 low, u32 high) {
#if __CUDA_ARCH__ >= 890
  u32 d;
  asm("{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f16x2 x, %1; cvt.rn.satfinite.e4m3x2.f16x2 y, %2;"
      " mov.b32 %0, {x, y}; }"
      : "=r"(d)
      : "r"(low), "r"(high));
  return d;
#else
  return fp16_to_e4m3(low) | fp16_to_e4m3(high) << 16;
#endif
}

// Bytes of a and b, chosen by the low four nibbles of `selector`, which are below 8.
__device__ __forceinline__ u32 choose_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// A code is a sign and the number of one of 8 magnitudes, whose products with the block's scale are rounded only once.
__device__ __forceinline__ uint4 recode_item(const Stored& stored, float) {
  const u32 scale_pair = Fp16::multiply((stored.scale << 7) * 0x10001u, kFp16Pair256);
  const auto product = [&](u32 magnitudes) { return Fp16::multiply(magnitudes, scale_pair); };
  const u32 low = fp16_to_e4m3x4(product(0x38000000u), product(0x3E003C00u));   // of 0, 0.5, 1, 1.5
  const u32 high = fp16_to_e4m3x4(product(0x42004000u), product(0x46004400u));  // of 2, 3, 4, 6
  u32 word[4];
#pragma unroll
  for (int i = 0; i < kStoredWords; ++i) {
    const u32 codes = stored.word[i], numbers = codes & 0x77777777u, even_signs = codes << 4;
    const u32 signs[2] = {__byte_perm(even_signs, codes, 0x5140), __byte_perm(even_signs, codes, 0x7362)};
    word[2 * i] = choose_bytes(low, high, numbers) | (signs[0] & 0x80808080u);
    word[2 * i + 1] = choose_bytes(low, high, numbers >> 16) | (signs[1] & 0x80808080u);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
#elif UNIT_SCALES
// Codes times their block scale are exact in fp16, in fewer instructions: they limit a gather as much as memory does.
__device__ __forceinline__ uint4 recode_item(const Stored& stored, float) {
  constexpr u32 kTwoTo14 = 0x74007400u;  // in both lanes
  const u32 scale_pair = Fp16::multiply((stored.scale << 7) * 0x10001u, kFp16Pair256);
  u32 word[4];
#pragma unroll
  for (int i = 0; i < kValues / 4; ++i) {
    const Codes codes = spread_codes(stored.word[i / 2], i % 2);
    const u32 evens = Fp16::multiply(Fp16::multiply(codes.even, kTwoTo14), scale_pair);
    const u32 odds = Fp16::multiply(Fp16::multiply(codes.odd, kTwoTo14), scale_pair);
    if constexpr (OUTPUT == 0) {
      word[2 * i] = Bf16::pack(Fp16::low(evens), Fp16::low(odds));
      word[2 * i + 1] = Bf16::pack(Fp16::high(evens), Fp16::high(odds));
    } else if constexpr (OUTPUT == 1) {
      word[2 * i] = __byte_perm(evens, odds, 0x5410), word[2 * i + 1] = __byte_perm(evens, odds, 0x7632);
    } else {
      word[i] = __byte_perm(fp16_to_e4m3(evens), fp16_to_e4m3(odds), 0x5140);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
#else
__device__ __forceinline__ uint4 recode_item(const Stored& stored, float global_scale) {
  float decoded[kValues];
  decode_item(stored, global_scale, decoded);
  return encode_item(decoded);
}
#endif

// Grid (ceil(KV heads * PAGE_SIZE * kItemsPerRow / kItemsPerBlock), pages a sequence at most, 2 * sequences); block
// kThreads. Strides are in bytes, save that of the page table.
//
// Thread blocks behind the end of a sequence return at once. Tokens in pages that are not in the pool, and rows that
// are not in the workspace, are skipped.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gather_dequantize(const u8* k_data, const u8* k_scales, const u8* v_data, const u8* v_scales, i64 page_stride,
                      const int* page_table, i64 page_table_stride, const int* lengths, const int* starts, u8* key,
                      i64 key_token_stride, i64 key_head_stride, u8* value, i64 value_token_stride,
                      i64 value_head_stride, float k_global_scale, float v_global_scale, int num_heads, int num_pages,
                      int num_rows) {
  const bool is_key = (blockIdx.z & 1) == 0;
  const int sequence = blockIdx.z >> 1;
  const int first_token = blockIdx.y * PAGE_SIZE;
  const int* const page_address = page_table + sequence * page_table_stride + blockIdx.y;
  const u32 num_items = num_heads * PAGE_SIZE * kItemsPerRow;
  const u8* const side_data = is_key ? k_data : v_data;
  const u8* const side_scales = is_key ? k_scales : v_scales;
  let_next_kernel_come();

  __shared__ int shared_page;  // that this block will read, as far as can be seen by now; negative: none
  if (threadIdx.x == 0) {
    int page = peek(page_address);
    if (first_token >= peek(lengths + sequence) || static_cast<u32>(page) >= static_cast<u32>(num_pages)) page = -1;
    if (page >= 0) prefetch_items(side_data + page * page_stride, side_scales + page * page_stride, num_items);
    shared_page = page;
  }
  __syncthreads();
  const int seen_page = shared_page;

  const u32 item = blockIdx.x * kItemsPerBlock + threadIdx.x;  // the thread's first
  const u8* data = side_data + seen_page * page_stride + static_cast<u64>(item) * kStoredBytes;
  const u8* scales = side_scales + seen_page * page_stride + item * kValues / 16;
  const i64 token_stride = is_key ? key_token_stride : value_token_stride;
  // NOTE: in units of 16 bytes offsets have 32 bits, and an address costs a third of the instructions.
  const u32 token_step = static_cast<u32>(token_stride >> 4);
  const u32 head_step = static_cast<u32>((is_key ? key_head_stride : value_head_stride) >> 4);
  const auto offset_of = [&](const Place& place) {
    return place.token * token_step + place.head * head_step + place.column;
  };
  if constexpr (VALUES == 64) {  // else the assembler computes them again for each of the many loads, behind the wait
    kvtier::keep(data), kvtier::keep(scales);
    __builtin_assume(__isGlobal(data)), __builtin_assume(__isGlobal(scales));
  }
  // NOTE: never so; but what decides about a branch is computed before it. The assembler would move it behind the wait.
  const bool is_nowhere = data == nullptr || (PAGE_FORMAT == 0 && scales == nullptr);
  if (is_nowhere || offset_of(place_of(item, 0)) == ~0u) return;
  wait_for_previous_kernel();

  // NOTE: the whole page is read, also behind the end of the sequence, to keep loads free of branches.
  Stored stored[kItemsPerThread];
  const auto load_items = [&]() {
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      if (place_of(item, i).head >= num_heads) continue;
      stored[i] = load_item(data + i * kThreads * kStoredBytes, scales + i * kThreads * kValues / 16);
    }
  };
  // NOTE: everything is loaded before any of it is looked at, so that the latencies overlap. The start's address depends on
  // the thread, by a zero: the assembler would move a value that all share to a uniform register, and wait for it at once.
  const int length = lengths[sequence], page = *page_address, start = starts[sequence + (item >> 31)];
  if (seen_page >= 0) load_items();
  if (first_token >= length || static_cast<u32>(page) >= static_cast<u32>(num_pages)) return;
  if (page != seen_page) {
    data += (page - seen_page) * page_stride;
    scales += (page - seen_page) * page_stride;
    load_items();
  }

  const float global_scale = is_key ? k_global_scale : v_global_scale;
  const int first_row = start + first_token;
  uint4* const target = reinterpret_cast<uint4*>((is_key ? key : value) + first_row * token_stride);
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const Place place = place_of(item, i);
    const bool is_in_workspace = static_cast<u32>(first_row + place.token) < static_cast<u32>(num_rows);
    if (place.head >= num_heads || first_token + place.token >= length || !is_in_workspace) continue;
    target[offset_of(place)] = recode_item(stored[i], global_scale);
  }
}
