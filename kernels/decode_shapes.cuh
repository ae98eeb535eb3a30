// The compile-time shapes of decode attention, and its arguments.
//
// Macros: KVTIER_HEAD_DIM 64, 128, 256; KVTIER_PAGE_SIZE 16, 32, 64, 128; KVTIER_HEAD_TILES 1 for groups of up to 8
// query heads a KV head, 2 for up to 16; KVTIER_QUERY_BF16 1 or 0 (fp16); KVTIER_WARPS a block; KVTIER_STAGES of each
// warp's ring; KVTIER_QUERY_IN_SHARED 1 if Q does not fit in registers.
#pragma once

#include "decode_partial.cuh"
#include "nvfp4.cuh"

namespace kvtier {

constexpr int kHeadDim = KVTIER_HEAD_DIM;
constexpr int kPageSize = KVTIER_PAGE_SIZE;
constexpr int kHeadTiles = KVTIER_HEAD_TILES;
constexpr int kWarps = KVTIER_WARPS;
constexpr int kStages = KVTIER_STAGES;
constexpr bool kQueryInShared = KVTIER_QUERY_IN_SHARED;
constexpr bool kQueryIsBf16 = KVTIER_QUERY_BF16;

constexpr int kTileTokens = 4096 / kHeadDim;
constexpr int kRowTiles = kTileTokens / 16;  // of 16 tokens
constexpr int kDataRow = kHeadDim / 2;       // bytes of a token
constexpr int kScaleRow = kHeadDim / 16;
constexpr int kWords = kHeadDim / 32;   // words of a token's codes that one lane multiplies
constexpr int kChunks = kHeadDim / 32;  // of 16 bytes, 32 dimensions
constexpr int kPagesPerTile = kTileTokens > kPageSize ? kTileTokens / kPageSize : 1;
constexpr int kTilesPerPage = kPageSize > kTileTokens ? kPageSize / kTileTokens : 1;

// A stage of the ring: K data, V data, K scales, V scales of one tile.
constexpr int kDataBytes = kTileTokens * kDataRow;
constexpr int kScaleBytes = kTileTokens * kScaleRow;
constexpr int kStageBytes = 2 * (kDataBytes + kScaleBytes);
constexpr int kScaleLanesPerPage = 16 / kPagesPerTile;  // of the 16 lanes that copy a tile's K or V scales
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kQueryBytes = kQueryInShared ? kHeadTiles * kWords * 32 * 16 : 0;
constexpr int kWarpBytes = kRingBytes + kQueryBytes;

constexpr int kRows = 8 * kHeadTiles;  // query heads of a KV head, padded
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMaxSlack = 8.0f;  // the running maximum may lag by this many powers of two
constexpr int kSegmentGap = 2;  // starting a segment costs a warp about as much as so many tiles
constexpr int kMinLengthPerWorker = 2;

using Partial = PartialBuffer<kRows, kHeadDim>;
using Work = SequenceWork<kTileTokens>;
using Plan = Schedule<kTileTokens, kSegmentGap>;

static_assert(kDataBytes == 2048 && kScaleBytes == 256, "copy_tile counts on it");
static_assert(Partial::kFloats * 4 <= kWarpBytes, "a warp leaves its last partial result where its ring was");

// The arguments of the kernel; tensors are dense unless strides are given, strides are in elements.
struct Arguments {
  const uint16* query;                // (sequences, heads * group, kHeadDim), fp16 or bf16
  uint16* out;                        // like query
  float* lse;                         // (sequences, heads * group), natural logarithm; or null
  const uint8* layer;                 // of page 0: the layer's K data, at a multiple of 16
  uint32 k_scales, v_data, v_scales;  // bytes from there
  uint32 page_bytes;                  // from page to page
  const int* page_table;              // (sequences, page_table_stride)
  int page_table_stride;
  const int* lengths;             // of each sequence, tokens in pages
  const uint16 *tail_k, *tail_v;  // bf16 (sequences, tokens, heads, kHeadDim) by strides
  const int* tail_lengths;        // or null: no tail
  long long tail_sequence_stride, tail_token_stride, tail_head_stride;
  float* workspace;  // blocks * (2 + kWarps) * Partial::kFloats
  int* arrivals;     // (sequences, heads), zero before the first launch; every launch leaves them zero
  int num_sequences, num_heads, group;
  int window;      // 0: none
  float softmax_scale;
  float softcap;  // 0: none
  float k_global_scale, v_global_scale;
};

// What a warp needs only now and then, kept out of its registers.
struct Task {
  Plan plan;
  Segment segment;
  Work work;
  int begin, end;  // of the warp's stretch
};

}  // namespace kvtier
