// Writing what a warp holds: results, or a partial result for others to merge.
#pragma once

#include "decode_state.cuh"

namespace kvtier {

__device__ __forceinline__ uint32 to_query_pair(float low, float high) {
  return kQueryIsBf16 ? to_bfloat162(low, high) : to_half2(low, high);
}

__device__ __forceinline__ long long output_row(const Arguments& arguments, const Segment& segment, int row) {
  const int num_heads = arguments.num_heads * arguments.group;
  return static_cast<long long>(segment.sequence) * num_heads + segment.head * arguments.group + row;
}

__device__ __forceinline__ float natural_lse(float max, float sum) { return (max + log2f(sum)) * (1.0f / kLog2E); }

// Calls visit(row, statistics are this lane's to write, max, sum, chunk, four values) for all a warp holds.
template <typename Visitor>
__device__ __forceinline__ void for_each_row(const Attention& state, Visitor visit) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float(&v)[2][4] = state.values[n][chunk];
        visit(n * 8 + c * 2 + i, -state.negative_max[n][i], state.sums[n][i], chunk,
              make_float4(v[0][i], v[0][i + 2], v[1][i], v[1][i + 2]));
      }
    }
  }
}

__device__ __forceinline__ void store_output(const Attention& state, const Arguments& arguments,
                                             const Segment& segment) {
  const int g = threadIdx.x % 32 / 4;
  for_each_row(state, [&](int row, float max, float sum, int chunk, float4 values) {
    if (row >= arguments.group) return;
    const long long out_row = output_row(arguments, segment, row);
    const float factor = kCodeUnit * arguments.v_global_scale / sum;
    uint2 packed = make_uint2(to_query_pair(values.x * factor, values.y * factor),
                              to_query_pair(values.z * factor, values.w * factor));
    *reinterpret_cast<uint2*>(arguments.out + out_row * kHeadDim + chunk * 32 + g * 4) = packed;
    if (g == 0 && chunk == 0 && arguments.lse != nullptr) arguments.lse[out_row] = natural_lse(max, sum);
  });
}

__device__ __forceinline__ void store_partial(const Attention& state, Partial partial) {
  const int g = threadIdx.x % 32 / 4;
  for_each_row(state, [&](int row, float max, float sum, int chunk, float4 values) {
    *reinterpret_cast<float4*>(partial.row(row) + chunk * 32 + g * 4) = values;
    if (g == 0 && chunk == 0) *partial.max_and_sum(row) = make_float2(max, sum);
  });
}

__device__ __forceinline__ void store_slice(const Partial::Slice& merged, const Arguments& arguments,
                                            const Segment& segment, int row, int slice) {
  const int lane = threadIdx.x % 32;
  const long long out_row = output_row(arguments, segment, row);
  const float factor = kCodeUnit * arguments.v_global_scale / merged.sum;
  uint32* out = reinterpret_cast<uint32*>(arguments.out + out_row * kHeadDim + slice * Partial::kSliceDims) +
                lane * (Partial::kPerLane / 2);
#pragma unroll
  for (int i = 0; i < Partial::kPerLane / 2; ++i) {
    out[i] = to_query_pair(merged.values[2 * i] * factor, merged.values[2 * i + 1] * factor);
  }
  if (lane == 0 && slice == 0 && arguments.lse != nullptr) arguments.lse[out_row] = natural_lse(merged.max, merged.sum);
}

// Zeros, and an lse of -inf, for the sequences that have no token.
__device__ __forceinline__ void store_empty(const Arguments& arguments, const Plan& plan) {
  const int num_heads = arguments.num_heads * arguments.group;
  for (int sequence = blockIdx.x; sequence < arguments.num_sequences; sequence += gridDim.x) {
    if (plan.work(sequence).num_tiles() > 0) continue;
    const long long first = static_cast<long long>(sequence) * num_heads;
    uint4* out = reinterpret_cast<uint4*>(arguments.out + first * kHeadDim);
    for (int i = threadIdx.x; i < num_heads * (kHeadDim / 8); i += blockDim.x) out[i] = make_uint4(0, 0, 0, 0);
    if (arguments.lse == nullptr) continue;
    for (int i = threadIdx.x; i < num_heads; i += blockDim.x) arguments.lse[first + i] = -infinity();
  }
}

}  // namespace kvtier
