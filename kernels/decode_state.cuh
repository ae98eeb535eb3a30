// A warp's running softmax and accumulators, its query operand, and the products of a tile.
#pragma once

#include "decode_shapes.cuh"

namespace kvtier {

// fp16 pairs (element i, element i + 4) of eight 16-bit floats.
template <bool is_bf16>
__device__ __forceinline__ void pair_elements(uint32 (&pairs)[4], uint4 elements) {
  const uint32 words[4] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (is_bf16) {
      pairs[2 * i] = to_half2(__uint_as_float(words[i] << 16), __uint_as_float(words[i + 2] << 16));
      pairs[2 * i + 1] = to_half2(__uint_as_float(words[i] & 0xFFFF0000u), __uint_as_float(words[i + 2] & 0xFFFF0000u));
    } else {
      pairs[2 * i] = __byte_perm(words[i], words[i + 2], 0x5410);
      pairs[2 * i + 1] = __byte_perm(words[i], words[i + 2], 0x7632);
    }
  }
}

// A warp's attention over part of a segment.
struct Attention {
  float values[kHeadTiles][kChunks][2][4];  // O^T: dimension 32 * chunk + 4g + (0, 1) or (2, 3), heads 2c, 2c + 1
  float sums[kHeadTiles][4];                // of P; [2] and [3] repeat [0] and [1]
  float negative_max[kHeadTiles][2];        // of heads 2c, 2c + 1

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[n][chunk][i / 4][i % 4] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
      negative_max[n][0] = negative_max[n][1] = infinity();
    }
  }

  __device__ __forceinline__ void scale_values(float factor) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[n][chunk][i / 4][i % 4] *= factor;
      }
    }
  }

  // Raises the running maxima to cover `maxima`, this lane's own of the tile.
  __device__ __forceinline__ void raise_max(const float (&maxima)[kHeadTiles][2]) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float raised = fmaxf(maxima[n][i], -negative_max[n][i]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          raised = fmaxf(raised, __shfl_xor_sync(kAllLanes, raised, distance));
        }
        const float factor = exp2_approximate(-negative_max[n][i] - raised);
        negative_max[n][i] = -raised;
        sums[n][i] *= factor;
        sums[n][i + 2] *= factor;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
          for (int j = i; j < 8; j += 2) values[n][chunk][j / 4][j % 4] *= factor;
        }
      }
    }
  }
};

using Logits = float[kRowTiles][kHeadTiles][4];           // S^T: tokens g, g + 8, heads 2c, 2c + 1
using Probabilities = uint32[kRowTiles][kHeadTiles][2];   // P^T as operand B

// Soft-caps logits in units of 1 / `scale` powers of two; returns their new scale.
// cap * tanh(x / cap) = cap - 2 cap / (1 + exp(2x / cap)).
__device__ __forceinline__ float cap_logits(Logits& logits, float scale, float softcap) {
  const float cap = softcap * kLog2E;
#pragma unroll
  for (int i = 0; i < kRowTiles * kHeadTiles * 4; ++i) {
    float& logit = logits[i / (kHeadTiles * 4)][i / 4 % kHeadTiles][i % 4];
    logit = cap - __fdividef(2.0f * cap, 1.0f + exp2_approximate(logit * scale * (2.0f * kLog2E / cap)));
  }
  return 1.0f;
}

// P of a tile; `scale` turns logits into powers of two.
__device__ __forceinline__ void softmax(Probabilities& p, Logits& logits, Attention& state, float scale) {
  float maxima[kHeadTiles][2];
  bool above = false;
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(logits[0][n][i], logits[0][n][i + 2]);
#pragma unroll
      for (int m = 1; m < kRowTiles; ++m) largest = fmaxf(largest, fmaxf(logits[m][n][i], logits[m][n][i + 2]));
      maxima[n][i] = largest * scale;
      above |= maxima[n][i] + state.negative_max[n][i] > kMaxSlack;
    }
  }
  if (__any_sync(kAllLanes, above)) state.raise_max(maxima);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      float powers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) powers[i] = exp2_approximate(logits[m][n][i] * scale + state.negative_max[n][i % 2]);
      p[m][n][0] = transpose_matrix(to_half2(powers[0], powers[1]));
      p[m][n][1] = transpose_matrix(to_half2(powers[2], powers[3]));
      constexpr uint32 kOnes = 0x3C003C00u;
      mma(state.sums[n], kOnes, kOnes, kOnes, kOnes, p[m][n][0], p[m][n][1]);
    }
  }
}

// Sets the logits of tokens outside [first, last) to -inf; `token` is the tile's first.
__device__ __forceinline__ void mask_logits(Logits& logits, int token, int first, int last) {
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    const int row = token + i * 8 + threadIdx.x % 32 / 4;
    if (row >= first && row < last) continue;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) logits[i / 2][n][i % 2 * 2] = logits[i / 2][n][i % 2 * 2 + 1] = -infinity();
  }
}

// Q of a segment as operand B, in registers or in shared memory.
struct Query {
  uint32 pairs[kQueryInShared ? 1 : kHeadTiles][kQueryInShared ? 1 : kWords][4];
  uint32 address;  // this lane's part in shared memory

  __device__ __forceinline__ void load(const Arguments& arguments, const Segment& segment, uint8* shared) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    uint4* own = reinterpret_cast<uint4*>(shared) + lane;
    address = shared_address(own);
    keep(address);
    const int num_heads = arguments.num_heads * arguments.group;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const int head = segment.head * arguments.group + n * 8 + row;
      const long long query_row = static_cast<long long>(segment.sequence) * num_heads + head;
      const uint16* source = arguments.query + query_row * kHeadDim + lane % 4 * (kHeadDim / 4);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        uint4 elements = make_uint4(0, 0, 0, 0);
        if (n * 8 + row < arguments.group) elements = reinterpret_cast<const uint4*>(source)[word];
        uint32 loaded[4];
        pair_elements<kQueryIsBf16>(loaded, elements);
        if constexpr (kQueryInShared) {
          own[(n * kWords + word) * 32] = make_uint4(loaded[0], loaded[1], loaded[2], loaded[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[n][word][i] = loaded[i];
        }
      }
    }
  }

  __device__ __forceinline__ void get(uint32 (&operand)[4], int n, int word) const {
    if constexpr (kQueryInShared) {
      const uint4 loaded = load_shared_16(address + (n * kWords + word) * 512);
      operand[0] = loaded.x, operand[1] = loaded.y, operand[2] = loaded.z, operand[3] = loaded.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) operand[i] = pairs[n][word][i];
    }
  }
};

// Adds K Q^T of 16 tokens and one word a lane: `low` of token g, `high` of token g + 8, as fp16 pairs.
__device__ __forceinline__ void multiply_keys(float (&logits)[kHeadTiles][4], const uint32 (&low)[4],
                                              const uint32 (&high)[4], const Query& query, int word) {
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
    uint32 q[4];
    query.get(q, n, word);
    mma(logits[n], low[0], high[0], low[1], high[1], q[0], q[1]);
    mma(logits[n], low[2], high[2], low[3], high[3], q[2], q[3]);
  }
}

// Adds V^T P^T of 16 tokens and 32 dimensions: `low` of tokens 2c, 2c + 1, `high` of 2c + 8, 2c + 9, as fp16 pairs.
__device__ __forceinline__ void multiply_values(Attention& state, int chunk, const uint32 (&low)[4],
                                                const uint32 (&high)[4], const uint32 (&p)[kHeadTiles][2]) {
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
    mma(state.values[n][chunk][0], low[0], low[1], high[0], high[1], p[n][0], p[n][1]);
    mma(state.values[n][chunk][1], low[2], low[3], high[2], high[3], p[n][0], p[n][1]);
  }
}

}  // namespace kvtier
