// Attention over tiles of NVFP4 pages: copied to the warp's ring, unpacked in registers.
#pragma once

#include "decode_state.cuh"

namespace kvtier {

// A row's 16-byte chunks lie in shared memory at `chunk ^ swizzle(row)`, so that no two lanes that read together meet
// in a bank. K is read as whole rows of a lane quad, V as columns of 8 rows.
__device__ __forceinline__ constexpr int k_swizzle(int row) { return kHeadDim == 256 ? row % 2 : 0; }
__device__ __forceinline__ constexpr int v_swizzle(int row) {
  return kHeadDim == 256 ? row % 8 : kHeadDim == 128 ? row / 2 % 4 : row / 4 % 2;
}

// Copies tiles of one segment from pages to this warp's ring.
struct TileCopier {
  const uint8* k;  // in page 0, of this lane, like the next
  int scales;      // bytes from there, of K's or V's scales; in a tile of several pages each lane's are of one page
  uint32 k_destination, v_destination, scale_destination;  // in stage 0, of this lane
  const int* pages;
  int first_page, last_page;  // that may be read

  __device__ __forceinline__ TileCopier(const Arguments& arguments, const Segment& segment, const Work& work,
                                        uint32 ring) {
    const int lane = threadIdx.x % 32;
    const int data_start = segment.head * (kPageSize * kDataRow) + lane * 16;
    const int scale_start = segment.head * (kPageSize * kScaleRow) + lane % kScaleLanesPerPage * 16;
    k = arguments.layer + data_start;
    scales = static_cast<int>(lane < 16 ? arguments.k_scales : arguments.v_scales) + scale_start - data_start;
    const int row = lane * 16 / kDataRow, chunk = lane * 16 % kDataRow / 16;
    k_destination = ring + row * kDataRow + (chunk ^ k_swizzle(row)) * 16;
    v_destination = ring + kDataBytes + row * kDataRow + (chunk ^ v_swizzle(row)) * 16;
    scale_destination = ring + 2 * kDataBytes + lane * 16;
    pages = arguments.page_table + static_cast<long long>(segment.sequence) * arguments.page_table_stride;
    first_page = work.first_token / kPageSize;
    last_page = (work.page_tokens - 1) / kPageSize;
    keep(k), keep(scales), keep(k_destination), keep(v_destination), keep(pages);
    if constexpr (kHeadDim == 256) {
      keep(scale_destination);
    } else {
      scale_destination = k_destination + 2 * kDataBytes;  // K has no swizzle
    }
  }

  // The page numbers of a tile. NOTE: the table is read between first_page and last_page only.
  __device__ __forceinline__ void find_pages(int (&found)[kPagesPerTile], int tile) const {
#pragma unroll
    for (int i = 0; i < kPagesPerTile; ++i) {
      if constexpr (kPagesPerTile > 1) {
        found[i] = load_constant(pages + max(min(tile * kPagesPerTile + i, last_page), first_page));
      } else {
        found[i] = load_constant(pages + static_cast<uint32>(tile) / kTilesPerPage);
      }
    }
  }

  __device__ __forceinline__ void copy_tile(const Arguments& arguments, uint32 stage, int tile,
                                            const int (&found)[kPagesPerTile]) const {
    constexpr int kPieces = kDataBytes / 512;
    constexpr int kPiecesPerPage = kPieces / kPagesPerTile;
    const uint32 tile_in_page = static_cast<uint32>(tile) % kTilesPerPage;
    const uint32 k_stage = k_destination + stage, v_stage = v_destination + stage;
#pragma unroll
    for (int page = 0; page < kPagesPerTile; ++page) {
      const uint8* k_source = k + static_cast<uint64>(static_cast<uint32>(found[page])) * arguments.page_bytes;
      if constexpr (kTilesPerPage > 1) k_source += static_cast<uint64>(tile_in_page) * kDataBytes;
      const uint8* v_source = k_source + arguments.v_data;
#pragma unroll
      for (int piece = 0; piece < kPiecesPerPage; ++piece) {
        const int i = page * kPiecesPerPage + piece;
        copy_16_bytes(k_stage + i * 512, k_source + piece * 512);
        // Only with rows of 128 bytes does V's swizzle differ between one 512 bytes and the next, by chunk 4.
        copy_16_bytes((kHeadDim == 256 && i % 2 ? v_stage ^ 64 : v_stage) + i * 512, v_source + piece * 512);
      }
    }
    int page = found[0];
#pragma unroll
    for (int i = 1; i < kPagesPerTile; ++i) {
      page = threadIdx.x % 16 / kScaleLanesPerPage == i ? found[i] : page;
    }
    const uint8* source = k + static_cast<uint64>(static_cast<uint32>(page)) * arguments.page_bytes + scales;
    if constexpr (kTilesPerPage > 1) source += static_cast<uint64>(tile_in_page) * kScaleBytes;
    copy_16_bytes(scale_destination + stage, source);
  }
};

// Zeroes V's scales of tokens outside [first, last), which may decode to NaN.
__device__ __forceinline__ void clear_scales(uint32 v_scales, int token, int first, int last) {
  const int lane = threadIdx.x % 32;
  const uint32 address = v_scales + lane * 8;
  uint2 words = load_shared_8(address);
  const auto outside = [&](int row) { return row < first || row >= last; };
  if (outside(token + lane * 8 / kScaleRow)) words.x = 0;
  if (outside(token + (lane * 8 + 4) / kScaleRow)) words.y = 0;
  store_shared_8(address, words);
  __syncwarp();
}

// Where a lane reads in stage 0 of its warp's ring.
struct ReadAddresses {
  uint32 k, k_scales;  // of token g, its lane quad's part
  uint32 v;            // of the matrix row that this lane gives to ldmatrix
  uint32 v_scales;     // of token 2c
  uint32 v_selector;   // of a token pair's scale words: this lane's block (g / 4) of each chunk

  __device__ __forceinline__ explicit ReadAddresses(uint32 ring) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    k = ring + g * kDataRow + (kWords == 2 ? c * 8 : ((c * (kWords / 4)) ^ k_swizzle(g)) * 16);
    k_scales = ring + 2 * kDataBytes + g * kScaleRow + c * (kScaleRow / 4);
    const int row = lane % 16, chunk = lane / 16;  // ldmatrix: two matrices of 8 tokens, two chunks
    v = ring + kDataBytes + row * kDataRow + (chunk ^ v_swizzle(row)) * 16;
    v_scales = ring + 2 * kDataBytes + kScaleBytes + c * 2 * kScaleRow;
    v_selector = g < 4 ? 0x6240 : 0x7351;
    keep(k), keep(k_scales), keep(v), keep(v_scales), keep(v_selector);
  }
};

__device__ __forceinline__ void attend_keys(Logits& logits, const ReadAddresses& at, uint32 stage, const Query& query) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[m][n][i] = 0.0f;
    }
    uint32 codes[2][kWords];  // of tokens g and g + 8
    uint32 scales[2][(kWords + 3) / 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8;
      if constexpr (kWords == 2) {
        const uint2 loaded = load_shared_8(at.k + stage + row * kDataRow);
        codes[half][0] = loaded.x, codes[half][1] = loaded.y;
      } else {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
          const uint4 loaded = load_shared_16(((at.k + stage) ^ (i * 16)) + row * kDataRow);
          codes[half][i * 4] = loaded.x, codes[half][i * 4 + 1] = loaded.y;
          codes[half][i * 4 + 2] = loaded.z, codes[half][i * 4 + 3] = loaded.w;
        }
      }
      const uint32 loaded = load_shared_word<kScaleRow / 4>(at.k_scales + stage + row * kScaleRow);
      scales[half][0] = scales_to_half2<false>(loaded);
      if constexpr (kWords == 8) scales[half][1] = scales_to_half2<true>(loaded);
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32 halves[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unpack_codes(halves[half], codes[half][word]);
        const uint32 pair = scales[half][word / 4];
        const uint32 scale = word / 2 % 2 ? repeat_high_half(pair) : repeat_low_half(pair);
#pragma unroll
        for (int i = 0; i < 4; ++i) halves[half][i] = multiply_half2(halves[half][i], scale);
      }
      multiply_keys(logits[m], halves[0], halves[1], query, word);
    }
  }
}

__device__ __forceinline__ void attend_values(Attention& state, const ReadAddresses& at, uint32 stage,
                                              const Probabilities& p) {
  constexpr int kScaleWords = kScaleRow / 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    uint32 scales[2][kChunks];  // of tokens 2c, 2c + 1 and 2c + 8, 2c + 9
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 rows = at.v_scales + stage + (m * 16 + half * 8) * kScaleRow;
      uint32 words[2 * kScaleWords];
      if constexpr (kScaleWords == 1) {
        const uint2 loaded = load_shared_8(rows);
        words[0] = loaded.x, words[1] = loaded.y;
      } else {
#pragma unroll
        for (int i = 0; i < kScaleWords / 2; ++i) {
          const uint4 loaded = load_shared_16(rows + i * 16);
          words[i * 4] = loaded.x, words[i * 4 + 1] = loaded.y;
          words[i * 4 + 2] = loaded.z, words[i * 4 + 3] = loaded.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kScaleWords; ++i) {
        const uint32 blocks = __byte_perm(words[i], words[kScaleWords + i], at.v_selector);
        scales[half][2 * i] = scales_to_half2<false>(blocks);
        scales[half][2 * i + 1] = scales_to_half2<true>(blocks);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      uint32 words[4];
      load_matrices_transposed(words, ((at.v + stage) ^ (pair * 32)) + m * 16 * kDataRow);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = pair * 2 + i;
        uint32 low[4], high[4];
        unpack_codes(low, words[2 * i]);
        unpack_codes(high, words[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          low[j] = multiply_half2(low[j], scales[0][chunk]);
          high[j] = multiply_half2(high[j], scales[1][chunk]);
        }
        multiply_values(state, chunk, low, high, p[m]);
      }
    }
  }
}

// Attends page tiles [begin, end), counted from the sequence's start; `next_pages` are of tile begin + kStages - 1.
__device__ __forceinline__ void attend_pages(Attention& state, const Arguments& arguments, const Work& work,
                                             const TileCopier& copier, const Query& query, uint32 ring, int begin,
                                             int end, int (&next_pages)[kPagesPerTile]) {
  const ReadAddresses at(ring);
  float scale = arguments.softmax_scale * arguments.k_global_scale * (kCodeUnit * kLog2E);
  keep(scale);
  const int first_whole = (work.first_token + kTileTokens - 1) / kTileTokens;
  const int num_whole = max(work.page_tokens / kTileTokens - first_whole, 0);
  uint32 stage = 0, free_stage = (kStages - 1) * kStageBytes;
  for (int tile = begin; tile < end; ++tile) {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    if (tile + kStages - 1 < end) {
      copier.copy_tile(arguments, free_stage, tile + kStages - 1, next_pages);
      copier.find_pages(next_pages, min(tile + kStages, end - 1));
    }
    commit_copies();
    Logits logits;
    attend_keys(logits, at, stage, query);
    float tile_scale = scale;
    if (arguments.softcap > 0.0f) tile_scale = cap_logits(logits, scale, arguments.softcap);
    if (static_cast<uint32>(tile - first_whole) >= static_cast<uint32>(num_whole)) {
      const int token = tile * kTileTokens;
      mask_logits(logits, token, work.first_token, work.page_tokens);
      clear_scales(ring + stage + 2 * kDataBytes + kScaleBytes, token, work.first_token, work.page_tokens);
    }
    Probabilities p;
    softmax(p, logits, state, tile_scale);
    attend_values(state, at, stage, p);
    free_stage = stage;
    stage = stage + kStageBytes == kRingBytes ? 0 : stage + kStageBytes;
  }
  __syncwarp();
}

}  // namespace kvtier
