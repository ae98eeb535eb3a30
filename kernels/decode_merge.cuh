// The merge of what warps and blocks did of one segment: warps through shared memory, then blocks through the
// workspace, where the block that arrives last merges. One warp merges a slice of one query head at a time.
#pragma once

#include "decode_results.cuh"

namespace kvtier {

// What a warp did of a segment that it shares with other warps.
struct Share {
  Segment segment;
  float* partial;  // null: none
};

// Brings a share that was stored before the warp's last tile from the workspace to shared memory.
__device__ __forceinline__ void gather_early_share(Share& share, uint8* warp_memory) {
  constexpr int kBytes = Partial::kFloats * 4;
  if constexpr (2 * kBytes > kWarpBytes) return;
  const float* source = share.partial;
  if (source == nullptr || source == reinterpret_cast<float*>(warp_memory)) return;
  float* destination = reinterpret_cast<float*>(warp_memory) + Partial::kFloats;
  const int lane = threadIdx.x % 32;
  for (int byte = lane * 16; byte < kBytes; byte += 512) {
    copy_16_bytes(shared_address(destination) + byte, reinterpret_cast<const uint8*>(source) + byte);
  }
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();
  if (lane == 0) share.partial = destination;
}

// A segment that this block shares with others: [0] that reaches into this block, [1] that it begins and another ends.
struct BlockShare {
  Segment segment;
  int first_block, num_blocks;  // 0: none
  bool arrived_last;
};

// The i-th block's part of a segment. Each block has two buffers: for what reaches into it and for what it begins.
__device__ __forceinline__ Partial block_buffer(const Arguments& arguments, int first_block, int i) {
  return {arguments.workspace + static_cast<long long>((first_block + i) * 2 + (i == 0)) * Partial::kFloats};
}

// A slice to merge: its parts, and the segment it belongs to.
struct MergeItem {
  Segment segment;
  int row, slice, count;
  bool from_blocks;
  float* first;           // from warps: the first part; those of the next warps' incoming shares follow
  const Share* following;
  int first_block;        // from blocks: see BlockShare::buffer

  __device__ __forceinline__ Partial part(const Arguments& arguments, int i) const {
    if (from_blocks) return block_buffer(arguments, first_block, i);
    return {i == 0 ? first : following[i - 1].partial};
  }
};

// Announces that this block's part of each shared segment is in the workspace, and learns whether all parts now are.
__device__ __forceinline__ void announce(const Arguments& arguments, BlockShare* shares) {
  __syncthreads();
  if (threadIdx.x % 32 == 0 && threadIdx.x < 64 && shares[threadIdx.x / 32].num_blocks > 0) {
    BlockShare& share = shares[threadIdx.x / 32];
    int* arrivals = arguments.arrivals + share.segment.sequence * arguments.num_heads + share.segment.head;
    share.arrived_last = count_arrival(arrivals) == share.num_blocks - 1;
    if (share.arrived_last) *arrivals = 0;
  }
  __syncthreads();
}

// Merges what the warps share: first those of this block, into results or, where other blocks share a segment too, into
// the workspace; then the parts of all blocks in the segments that this block was the last to finish.
// A chain is a segment's shares in this block: it begins at a warp's outgoing share, or, for a segment that began in an
// earlier block, at the incoming share of warp 0; incoming shares of the next warps follow.
__device__ __forceinline__ void merge_shares(const Arguments& arguments, const Plan& plan, const Share* incoming,
                                             const Share* outgoing, BlockShare* block_shares) {
  const int lane = threadIdx.x % 32;
  const int items_per_segment = arguments.group * Partial::kSlices;
  const int first_worker = blockIdx.x * plan.workers_per_block;
  const int block_begin = plan.start_of(first_worker);
  const int block_end = plan.start_of(min(first_worker + plan.workers_per_block, plan.num_workers));
  const bool starts = lane == 0 ? incoming[0].partial != nullptr
                                : lane <= kWarps && outgoing[lane - 1].partial != nullptr;
  const uint32 chains = __ballot_sync(kAllLanes, starts);
  // NOTE: one loop for both passes, since this code runs once, and its instructions come from memory.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) announce(arguments, block_shares);
    const int num_items = (pass == 0 ? __popc(chains) : 2) * items_per_segment;
#pragma unroll 1
    for (int index = threadIdx.x / 32; index < num_items; index += kWarps) {
      MergeItem item = {{}, index % items_per_segment / Partial::kSlices, index % Partial::kSlices};
      bool is_final = true, began_here = false;
      if (pass == 0) {
        uint32 rest = chains;
        for (int i = index / items_per_segment; i > 0; --i) rest &= rest - 1;
        const int chain = __ffs(rest) - 1, next = max(chain, 1);
        const Share& start = chain == 0 ? incoming[0] : outgoing[chain - 1];
        item.segment = start.segment;
        item.first = start.partial;
        item.following = incoming + next;
        const bool follows = lane >= next && lane < kWarps && incoming[lane].partial != nullptr &&
                             incoming[lane].segment.begin == item.segment.begin;
        item.count = 1 + __popc(__ballot_sync(kAllLanes, follows));
        began_here = item.segment.begin >= block_begin;
        is_final = began_here && item.segment.end <= block_end;
      } else {
        const BlockShare& share = block_shares[index / items_per_segment];
        if (!share.arrived_last) continue;
        item.segment = share.segment;
        item.from_blocks = true;
        item.first_block = share.first_block;
        item.count = share.num_blocks;
      }
      const auto merged = merge_slices<Partial>(item.count, item.row, item.slice,
                                                [&](int i) { return item.part(arguments, i); });
      if (is_final) {
        store_slice(merged, arguments, item.segment, item.row, item.slice);
        continue;
      }
      // Lane 0 looks for the segment's first block, the others for its last.
      const int end_block =
          plan.worker_of(lane == 0 ? item.segment.begin : item.segment.end - 1) / plan.workers_per_block;
      const int first_block = __shfl_sync(kAllLanes, end_block, 0);
      const int num_blocks = __shfl_sync(kAllLanes, end_block, 1) - first_block + 1;
      block_buffer(arguments, first_block, blockIdx.x - first_block).store(item.row, item.slice, merged);
      if (item.row == 0 && item.slice == 0 && lane == 0) {
        block_shares[began_here] = {item.segment, first_block, num_blocks, false};
      }
    }
  }
}

}  // namespace kvtier
