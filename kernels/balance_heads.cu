// Balance the channels of K or Q and mix them: each head times its factors, then its Walsh-Hadamard transform.
//
// Compiled for one case; macros:
//   INPUT     0 bf16, 1 fp16: dtype of what is read and of what is written
//   HEAD_DIM  a power of two, 16 to 512
//
// A thread has 16 adjacent values of a head. The first four butterflies are its own; in the others it meets the threads
// of the same head, by shuffles. Sums are in fp32 and in the order of the reference, so that no bit differs.
#include "numeric.cuh"

constexpr int kThreads = 256;  // blockDim.x
constexpr int kValues = 16;    // of a thread
constexpr int kThreadsPerHead = HEAD_DIM / kValues;
constexpr int kHeadsPerBlock = kThreads / kThreadsPerHead;
static_assert(kThreadsPerHead >= 1 && kThreadsPerHead <= 32 && (HEAD_DIM & (HEAD_DIM - 1)) == 0);

#if INPUT == 0
using Pairs = Bf16;
#else
using Pairs = Fp16;
#endif

__device__ __forceinline__ void load_scaled(const u8* address, const float* factors, float* value) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 words = reinterpret_cast<const uint4*>(address)[i];
    const u32 pair[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      value[8 * i + 2 * j] = Pairs::low(pair[j]), value[8 * i + 2 * j + 1] = Pairs::high(pair[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kValues / 4; ++i) {
    const float4 factor = reinterpret_cast<const float4*>(factors)[i];
    value[4 * i] = __fmul_rn(value[4 * i], factor.x), value[4 * i + 1] = __fmul_rn(value[4 * i + 1], factor.y);
    value[4 * i + 2] = __fmul_rn(value[4 * i + 2], factor.z), value[4 * i + 3] = __fmul_rn(value[4 * i + 3], factor.w);
  }
}

__device__ __forceinline__ void store_rounded(u8* address, const float* value) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = Pairs::pack(value[8 * i + 2 * j], value[8 * i + 2 * j + 1]);
    reinterpret_cast<uint4*>(address)[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

__device__ __forceinline__ void transform(float* value) {
#pragma unroll
  for (int width = 1; width < kValues; width *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & width) continue;
      const float first = value[i], second = value[i + width];
      value[i] = __fadd_rn(first, second), value[i + width] = __fsub_rn(first, second);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < kThreadsPerHead; lanes *= 2) {
    const bool is_first = (threadIdx.x & lanes) == 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, value[i], lanes);
      value[i] = is_first ? __fadd_rn(value[i], other) : __fsub_rn(other, value[i]);
    }
  }
}

// Grid ceil(tokens * heads / kHeadsPerBlock); block kThreads. Strides are in bytes. `factors` is (heads / group,
// HEAD_DIM) in fp32; `target` is dense.
extern "C" __global__ void __launch_bounds__(kThreads)
    balance_heads(const u8* source, i64 token_stride, i64 head_stride, u8* target, const float* factors, int num_heads,
                  int group, i64 num_rows) {
  join_stream();
  const i64 row = static_cast<i64>(blockIdx.x) * kHeadsPerBlock + threadIdx.x / kThreadsPerHead;
  // NOTE: rows behind the end are computed like the last one and not stored: whole warps take part in shuffles.
  const i64 read_row = min(row, num_rows - 1);
  const i64 token = read_row / num_heads;
  const int head = static_cast<int>(read_row - token * num_heads);
  const int column = threadIdx.x % kThreadsPerHead * kValues;
  float value[kValues];
  load_scaled(source + token * token_stride + head * head_stride + column * 2, factors + head / group * HEAD_DIM + column,
              value);
  transform(value);
  if (row < num_rows) store_rounded(target + (row * HEAD_DIM + column) * 2, value);
}
