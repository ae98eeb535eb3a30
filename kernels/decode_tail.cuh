// Attention over the BF16 tail: tokens after those in pages, read straight from global memory.
#pragma once

#include "decode_state.cuh"

namespace kvtier {

__device__ __forceinline__ long long tail_offset(const Arguments& arguments, const Segment& segment) {
  return segment.sequence * arguments.tail_sequence_stride + segment.head * arguments.tail_head_stride;
}

// Asks for a tail to be brought into L2, well before it is attended: its tiles have no ring, and wait for what they read.
__device__ __forceinline__ void prefetch_tail(const Arguments& arguments, const Work& work, const Segment& segment) {
  constexpr int kLineElements = 64;
  const long long start = tail_offset(arguments, segment);
  for (int row = work.first_tail_tile * kTileTokens + threadIdx.x % 32; row < work.tail_tokens; row += 32) {
    const long long offset = start + row * arguments.tail_token_stride;
#pragma unroll
    for (int element = 0; element < kHeadDim; element += kLineElements) {
      prefetch_line(arguments.tail_k + offset + element);
      prefetch_line(arguments.tail_v + offset + element);
    }
  }
}

// Attends tile `tile` of the tail, leaving `state.values` in units of V itself.
__device__ __forceinline__ void attend_tail_tile(Attention& state, const Arguments& arguments, const Work& work,
                                                 const Segment& segment, const Query& query, int tile) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int first = max(work.first_token - work.page_tokens, 0), last = work.tail_tokens;
  const long long start = tail_offset(arguments, segment);
  const int token = tile * kTileTokens;
  Logits logits;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[m][n][i] = 0.0f;
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32 halves[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = token + m * 16 + half * 8 + g;
        uint4 elements = make_uint4(0, 0, 0, 0);
        if (row < last) {
          const uint16* key = arguments.tail_k + start + row * arguments.tail_token_stride + c * (kHeadDim / 4);
          elements = reinterpret_cast<const uint4*>(key)[word];
        }
        pair_elements<true>(halves[half], elements);
      }
      multiply_keys(logits[m], halves[0], halves[1], query, word);
    }
  }
  float scale = arguments.softmax_scale * kLog2E;
  if (arguments.softcap > 0.0f) scale = cap_logits(logits, scale, arguments.softcap);
  mask_logits(logits, token, first, last);
  Probabilities p;
  softmax(p, logits, state, scale);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32 halves[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint2 elements[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = token + m * 16 + half * 8 + c * 2 + i;
          elements[i] = make_uint2(0, 0);
          if (row < last) {
            const uint16* value = arguments.tail_v + start + row * arguments.tail_token_stride + chunk * 32 + g * 4;
            elements[i] = *reinterpret_cast<const uint2*>(value);
          }
        }
        halves[half][0] = to_half2(__uint_as_float(elements[0].x << 16), __uint_as_float(elements[1].x << 16));
        halves[half][1] =
            to_half2(__uint_as_float(elements[0].x & 0xFFFF0000u), __uint_as_float(elements[1].x & 0xFFFF0000u));
        halves[half][2] = to_half2(__uint_as_float(elements[0].y << 16), __uint_as_float(elements[1].y << 16));
        halves[half][3] =
            to_half2(__uint_as_float(elements[0].y & 0xFFFF0000u), __uint_as_float(elements[1].y & 0xFFFF0000u));
      }
      multiply_values(state, chunk, halves[0], halves[1], p[m]);
    }
  }
}

}  // namespace kvtier
