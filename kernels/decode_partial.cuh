// Partial results of decode attention: where they lie, and the sum of several.
#pragma once

#include "decode_schedule.cuh"

namespace kvtier {

// Attention of one query head over some of its tokens, a slice of dimensions spread over a warp: lane i has values
// i * n to (i + 1) * n - 1. `values` is the sum of exp2(logit - max) * V and `sum` that of exp2(logit - max), with
// logits in powers of two.
template <int values_per_lane>
struct PartialSlice {
  float values[values_per_lane];
  float max, sum;
};

// Where a partial result of `rows` query heads lies: `rows` times `head_dim` values, then max and sum of each row.
template <int rows, int head_dim>
struct PartialBuffer {
  static constexpr int kFloats = rows * (head_dim + 2);
  static constexpr int kSliceDims = head_dim < 128 ? head_dim : 128;
  static constexpr int kSlices = head_dim / kSliceDims;
  static constexpr int kPerLane = kSliceDims / 32;
  using Slice = PartialSlice<kPerLane>;
  float* data;

  __device__ __forceinline__ float* row(int row_index) const { return data + row_index * head_dim; }
  __device__ __forceinline__ float2* max_and_sum(int row_index) const {
    return reinterpret_cast<float2*>(data + rows * head_dim) + row_index;
  }
  // This lane's values of a slice.
  __device__ __forceinline__ float2* slice(int row_index, int slice_index) const {
    return reinterpret_cast<float2*>(row(row_index) + slice_index * kSliceDims) + threadIdx.x % 32 * (kPerLane / 2);
  }

  __device__ __forceinline__ void store(int row_index, int slice_index, const Slice& stored) const {
    float2* values = slice(row_index, slice_index);
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) values[i] = make_float2(stored.values[2 * i], stored.values[2 * i + 1]);
    if (threadIdx.x % 32 == 0 && slice_index == 0) *max_and_sum(row_index) = make_float2(stored.max, stored.sum);
  }
};

// Loads of what other warps or blocks have written. NOTE: past L1, which is not coherent.
__device__ __forceinline__ float2 load_pair(const float2* pair) {
  float2 loaded;
  asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(loaded.x), "=f"(loaded.y) : "l"(pair) : "memory");
  return loaded;
}

// Adds one to a counter, after all that this thread has seen written, and before all that it reads next.
__device__ __forceinline__ int count_arrival(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The merged slice of `count` partial results, of which `buffer_of(i)` is the i-th.
template <typename Buffer, typename BufferOf>
__device__ __forceinline__ typename Buffer::Slice merge_slices(int count, int row, int slice, BufferOf buffer_of) {
  constexpr int kPairs = Buffer::kPerLane / 2;
    constexpr int kBatch = 8;  // whose loads are in flight together
  typename Buffer::Slice merged = {{}, -infinity(), 0.0f};
#pragma unroll 1
  for (int base = 0; base < count; base += kBatch) {
    const int own = base + threadIdx.x % kBatch;
    const uint64 own_buffer = reinterpret_cast<uint64>(buffer_of(min(own, count - 1)).data);
    float2 max_and_sum = load_pair(Buffer{reinterpret_cast<float*>(own_buffer)}.max_and_sum(row));
    float2 values[kBatch][kPairs];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Buffer buffer{reinterpret_cast<float*>(__shfl_sync(kAllLanes, own_buffer, i))};
#pragma unroll
      for (int j = 0; j < kPairs; ++j) values[i][j] = load_pair(buffer.slice(row, slice) + j);
    }
    if (own >= count) max_and_sum = make_float2(-infinity(), 0.0f);
    float max = fmaxf(merged.max, max_and_sum.x);
#pragma unroll
    for (int distance = 1; distance < kBatch; distance *= 2) {
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, distance));
    }
    const float old_weight = exp2_approximate(merged.max - max);
    const float weight = exp2_approximate(max_and_sum.x - max);
    float sum = max_and_sum.y * weight;
#pragma unroll
    for (int distance = 1; distance < kBatch; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    merged.max = max;
    merged.sum = merged.sum * old_weight + sum;
#pragma unroll
    for (float& value : merged.values) value *= old_weight;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float shared_weight = __shfl_sync(kAllLanes, weight, i);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        merged.values[2 * j] += values[i][j].x * shared_weight;
        merged.values[2 * j + 1] += values[i][j].y * shared_weight;
      }
    }
  }
  return merged;
}

}  // namespace kvtier
