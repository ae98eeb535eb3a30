// How decode attention shares its work: every (sequence, KV head) is a segment of tiles; all segments stand in one
// line, sequences outside, heads inside, and each worker (a warp) takes an equal stretch of it. Before the tiles of a
// segment the line has a gap, worth the time that starting a segment takes. Computed on the device from the lengths, so
// that a captured graph stays right while they grow.
#pragma once

#include "ptx.cuh"

namespace kvtier {

// What one sequence asks for. Tokens count from the sequence's start; the window begins at `first_token`.
template <int tile_tokens>
struct SequenceWork {
  int first_token;
  int page_tokens;  // tokens in pages
  int tail_tokens;  // tokens after them, in the BF16 tail
  int first_page_tile, first_tail_tile;
  int num_page_tiles, num_tail_tiles;

  static __device__ __forceinline__ SequenceWork of(int page_tokens, int tail_tokens, int window) {
    const int total = page_tokens + tail_tokens;
    SequenceWork work;
    work.first_token = window > 0 && total > window ? total - window : 0;
    work.page_tokens = page_tokens;
    work.tail_tokens = tail_tokens;
    work.first_page_tile = work.first_token / tile_tokens;
    work.first_tail_tile = max(work.first_token - page_tokens, 0) / tile_tokens;
    work.num_page_tiles =
        work.first_token < page_tokens ? (page_tokens + tile_tokens - 1) / tile_tokens - work.first_page_tile : 0;
    work.num_tail_tiles = (tail_tokens + tile_tokens - 1) / tile_tokens - work.first_tail_tile;
    return work;
  }

  __device__ __forceinline__ int num_tiles() const { return num_tail_tiles + num_page_tiles; }
};

// A segment and where its tiles stand in the line.
struct Segment {
  int sequence, head;
  int begin, end;
};

template <int tile_tokens, int gap>
struct Schedule {
  const int* lengths;
  const int* tail_lengths;  // or null
  int num_sequences, num_heads, window;
  int line_length;  // tiles and gaps
  int num_workers;  // those with work, numbers 0 to num_workers - 1
  int workers_per_block;

  __device__ __forceinline__ SequenceWork<tile_tokens> work(int sequence) const {
    const int tail_tokens = tail_lengths == nullptr ? 0 : tail_lengths[sequence];
    return SequenceWork<tile_tokens>::of(lengths[sequence], tail_tokens, window);
  }

  __device__ __forceinline__ int segment_length(int sequence) const {
    const int tiles = work(sequence).num_tiles();
    return tiles > 0 ? gap + tiles : 0;
  }

  // Called by all lanes of a warp, like every other member.
  __device__ __forceinline__ void plan(int num_blocks, int warps_per_block, int min_length_per_worker) {
    int lane_length = 0;
    for (int sequence = threadIdx.x % 32; sequence < num_sequences; sequence += 32) {
      lane_length += segment_length(sequence);
    }
    line_length = __reduce_add_sync(kAllLanes, lane_length) * num_heads;
    const int wanted = max(line_length / min_length_per_worker, min(line_length, 1));
    workers_per_block = min(max((wanted + num_blocks - 1) / num_blocks, 1), warps_per_block);
    num_workers = min(wanted, workers_per_block * num_blocks);
  }

  // Where a worker's stretch begins; it ends where the next one's begins. worker * line_length / num_workers, which may
  // need more than 32 bits, by parts.
  __device__ __forceinline__ int start_of(int worker) const {
    const uint32 workers = num_workers, length = line_length;
    return worker * (length / workers) + worker * (length % workers) / workers;
  }

  __device__ __forceinline__ int worker_of(int position) const {
    int worker = static_cast<int>(static_cast<float>(position) * num_workers / line_length);
    while (start_of(worker) > position) --worker;
    while (start_of(worker + 1) <= position) ++worker;
    return worker;
  }

  // The segment at `position` of the line, or whose gap is there.
  __device__ __forceinline__ Segment find(int position) const {
    const int lane = threadIdx.x % 32;
    int begin = 0;  // of the 32 sequences looked at
    for (int base = 0;; base += 32) {
      const int sequence = base + lane;
      const int length = sequence < num_sequences ? segment_length(sequence) : 0;
      const int all = __reduce_add_sync(kAllLanes, length) * num_heads;
      if (position >= begin + all) {
        begin += all;
        continue;
      }
      int sum = length;  // of the sequences up to this lane's
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
      }
      const int found = __ffs(__ballot_sync(kAllLanes, begin + sum * num_heads > position)) - 1;
      const int found_length = __shfl_sync(kAllLanes, length, found);
      begin += (__shfl_sync(kAllLanes, sum, found) - found_length) * num_heads;
      const int head = (position - begin) / found_length;
      begin += head * found_length;
      return {base + found, head, begin + gap, begin + found_length};
    }
  }

  // The segment after one that is not the last.
  __device__ __forceinline__ Segment next(const Segment& segment) const {
    const int begin = segment.end + gap;
    if (segment.head + 1 < num_heads) {
      return {segment.sequence, segment.head + 1, begin, begin + segment.end - segment.begin};
    }
    int sequence = segment.sequence + 1;
    int tiles = work(sequence).num_tiles();
    while (tiles == 0) tiles = work(++sequence).num_tiles();
    return {sequence, 0, begin, begin + tiles};
  }
};

}  // namespace kvtier
