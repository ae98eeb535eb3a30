// Attention of one query a sequence over NVFP4 pages, read packed from the page-first pool.
//
// Every warp works alone: it takes a stretch of the line of tiles (decode_schedule.cuh), keeps its own ring of tiles in
// flight, its own running maximum, sums and accumulators, and meets the other warps only at the end (decode_merge.cuh).
//
// Per tile: S^T = K Q^T, P = exp2(S - m), O^T += V^T P^T, by fp16 tensor cores with fp32 sums. Tokens, or dimensions,
// are on the 16-row side of the instruction and query heads on its 8-column side. The order of the contraction index is
// free, so that K's codes stay where they lie in memory and Q is put in their order once.
#include "decode_merge.cuh"
#include "decode_pages.cuh"
#include "decode_tail.cuh"
#include "stream.cuh"

namespace kvtier {

// Attends the tiles of a warp's segment from `position` of the line to the end of its stretch or of the segment.
// `state.values` end in units of V's codes times 1 / kCodeUnit, before the global scale.
//
// NOTE: tiles of the tail stand first in the line, but are attended last: they have arrived in L2 by then.
__device__ __forceinline__ void attend_segment(Attention& state, const Arguments& arguments, const Task& task,
                                               uint8* warp_memory, int position) {
  const Segment segment = task.segment;
  const Work work = task.work;
  const int begin = position - segment.begin, end = min(task.end, segment.end) - segment.begin;
  const int page_begin = work.first_page_tile + max(begin - work.num_tail_tiles, 0);
  const int page_end = work.first_page_tile + max(end - work.num_tail_tiles, 0);
  if (begin < work.num_tail_tiles) prefetch_tail(arguments, work, segment);
  uint32 ring = shared_address(warp_memory);
  keep(ring);
  const TileCopier copier(arguments, segment, work, ring);
  int pages[kStages][kPagesPerTile];
  if (page_begin < page_end) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) copier.find_pages(pages[i], min(page_begin + i, page_end - 1));
  }
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (page_begin + i < page_end) copier.copy_tile(arguments, i * kStageBytes, page_begin + i, pages[i]);
    commit_copies();
  }
  Query query;
  query.load(arguments, segment, warp_memory + kRingBytes);
  state.clear();
  attend_pages(state, arguments, task.work, copier, query, ring, page_begin, page_end, pages[kStages - 1]);
  const int tail_end = min(end, work.num_tail_tiles);
  if (begin < tail_end) {
    const float unit = kCodeUnit * arguments.v_global_scale;
    state.scale_values(unit);
    for (int tile = begin; tile < tail_end; ++tile) {
      attend_tail_tile(state, arguments, work, segment, query, work.first_tail_tile + tile);
    }
    state.scale_values(1.0f / unit);
  }
  wait_for_copies<0>();
}

}  // namespace kvtier

extern "C" __global__ void __launch_bounds__(kvtier::kWarps * 32, 1)
    decode_attention(
        const kvtier::uint16* query, kvtier::uint16* out, float* lse, const kvtier::uint8* layer,
        kvtier::uint32 k_scales, kvtier::uint32 v_data, kvtier::uint32 v_scales, kvtier::uint32 page_bytes,
        const int* page_table, int page_table_stride, const int* lengths, const kvtier::uint16* tail_k,
        const kvtier::uint16* tail_v, const int* tail_lengths, long long tail_sequence_stride,
        long long tail_token_stride, long long tail_head_stride, float* workspace, int* arrivals, int num_sequences,
        int num_heads, int group, int window, float softmax_scale, float softcap, float k_global_scale,
        float v_global_scale) {
  using namespace kvtier;
  const Arguments arguments = {
      query, out, lse, layer, k_scales, v_data, v_scales, page_bytes, page_table, page_table_stride, lengths, tail_k,
      tail_v, tail_lengths, tail_sequence_stride, tail_token_stride, tail_head_stride, workspace, arrivals,
      num_sequences, num_heads, group, window, softmax_scale, softcap, k_global_scale, v_global_scale};

  extern __shared__ __align__(128) uint8 shared_memory[];
  __shared__ Share incoming[kWarps], outgoing[kWarps];
  __shared__ BlockShare block_shares[2];
  __shared__ Task tasks[kWarps];
  const int warp = threadIdx.x / 32;
  uint8* warp_memory = shared_memory + warp * kWarpBytes;

  wait_for_previous_kernel();
  Task& task = tasks[warp];
  {
    Plan plan{arguments.lengths, arguments.tail_lengths, arguments.num_sequences, arguments.num_heads,
              arguments.window};
    plan.plan(gridDim.x, kWarps, kMinLengthPerWorker);
    store_empty(arguments, plan);
    const int worker = blockIdx.x * plan.workers_per_block + warp;
    const bool works = warp < plan.workers_per_block && worker < plan.num_workers;
    const int begin = works ? plan.start_of(worker) : 0;
    Segment segment = {};
    if (works) segment = plan.find(begin);
    if (threadIdx.x % 32 == 0) {
      task = {plan, segment, plan.work(segment.sequence), begin, works ? plan.start_of(worker + 1) : 0};
      incoming[warp].partial = outgoing[warp].partial = nullptr;
      if (warp == 0) block_shares[0] = block_shares[1] = {};
    }
    __syncwarp();
  }
  for (int position = max(task.begin, task.segment.begin); position < task.end;) {
    Attention state;
    attend_segment(state, arguments, task, warp_memory, position);
    const Segment segment = task.segment;
    const bool is_last = segment.end + kSegmentGap >= task.end;
    if (segment.begin >= task.begin && segment.end <= task.end) {
      store_output(state, arguments, segment);
    } else {
      // NOTE: the ring is free only after the warp's last tile.
      const long long buffer = gridDim.x * 2 + blockIdx.x * task.plan.workers_per_block + warp;
      float* partial =
          is_last ? reinterpret_cast<float*>(warp_memory) : arguments.workspace + buffer * Partial::kFloats;
      store_partial(state, Partial{partial});
      if (threadIdx.x % 32 == 0) (segment.begin < task.begin ? incoming : outgoing)[warp] = {segment, partial};
      __syncwarp();
    }
    if (is_last) break;
    const Segment next = task.plan.next(segment);
    const Work work = task.plan.work(next.sequence);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      task.segment = next;
      task.work = work;
    }
    __syncwarp();
    position = next.begin;
  }
  gather_early_share(incoming[warp], warp_memory);
  __syncthreads();
  merge_shares(arguments, task.plan, incoming, outgoing, block_shares);
}
