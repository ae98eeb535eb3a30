// Multiply each head of K or Q with the matrix of its KV head, by fp16 tensor cores with sums in fp32.
//
// Compiled for one case; macros:
//   INPUT          0 bf16, 1 fp16: dtype of what is read, first rounded to fp16, and of what is written
//   HEAD_DIM       a multiple of 32, up to 256
//   COLUMN_WARPS   warps of a thread block that have the same rows and different columns
//   ROW_WARPS      warps that have the same columns and different rows
//   BLOCKS_PER_SM  thread blocks that registers must leave room for on a multiprocessor
//   PERSISTENT     0: a warp has one tile; 1: it has as many as there are for the grid
//
// A warp keeps 32 columns of one matrix in its registers and multiplies tiles of 16 rows with them; a row is one head
// of one token. Nothing goes through shared memory and no warp waits for another: rows that the warps of a thread block
// share come from L1. While a tile is multiplied, the next one is loaded into the registers that become free.
//
// The order of the contraction index and that of the columns are free. So that a lane reads and writes 16 bytes of a
// row at once it has, wherever the instruction speaks of other places (see `mma`) and with c = lane % 4, the values 8c
// to 8c + 7 of every 32 of a row, and the columns 8c to 8c + 7 of the warp's.
#include "numeric.cuh"
#include "ptx.cuh"

#if INPUT == 0
using Pairs = Bf16;
#else
using Pairs = Fp16;
#endif

constexpr int kThreads = 32 * COLUMN_WARPS * ROW_WARPS;  // blockDim.x
constexpr int kTileRows = 16;
constexpr int kColumns = 32;            // of a warp
constexpr int kSlices = HEAD_DIM / 32;  // of a row, 32 values each
constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kColumnBlocks = HEAD_DIM / (kColumns * COLUMN_WARPS);  // gridDim.y
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256 && kColumnBlocks * kColumns * COLUMN_WARPS == HEAD_DIM);

// A warp's columns of a matrix, as operands: pair[i][p][j] has rows 2p and 2p + 1, of the lane's eight in slice i, and
// of the warp's columns 4g + j, with g = lane / 4.
struct Columns {
  u32 pair[kSlices][4][4];

  // Loads columns 4g to 4g + 3, two in a word. NOTE: `arrange` puts a slice in order, once its words are needed.
  __device__ __forceinline__ void load(const u8* columns) {
    const u8* const rows = columns + threadIdx.x % 4 * 8 * kRowBytes + threadIdx.x % 32 / 4 * 8;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint2 even = *reinterpret_cast<const uint2*>(rows + (32 * i + 2 * p) * kRowBytes);
        const uint2 odd = *reinterpret_cast<const uint2*>(rows + (32 * i + 2 * p + 1) * kRowBytes);
        pair[i][p][0] = even.x, pair[i][p][1] = odd.x, pair[i][p][2] = even.y, pair[i][p][3] = odd.y;
      }
    }
  }

  __device__ __forceinline__ void arrange(int slice) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const u32 even = pair[slice][p][j], odd = pair[slice][p][j + 1];
        pair[slice][p][j] = __byte_perm(even, odd, 0x5410), pair[slice][p][j + 1] = __byte_perm(even, odd, 0x7632);
      }
    }
  }
};

// Where a row of a KV head is: which token it is of, and which of the `group` heads.
struct Row {
  u32 token, head;

  // `inverse` is 2^32 / group, rounded up: exact while index * group is below 2^32, and no division.
  __device__ __forceinline__ Row(u32 index, u32 group, u64 inverse)
      : token(static_cast<u32>(index * inverse >> 32)), head(index - token * group) {}

  __device__ __forceinline__ void advance(const Row& step, u32 group) {
    token += step.token, head += step.head;
    if (head >= group) head -= group, ++token;
  }
};

__device__ __forceinline__ u32 to_fp16(u32 pair) {
#if INPUT == 0
  return Fp16::pack(Pairs::low(pair), Pairs::high(pair));
#else
  return pair;
#endif
}

// Adds the product of a slice: `row` has the lane's values in it of rows g and g + 8 of the tile. The operands' columns
// are the lane's 8c + j, in sum[j][0] and sum[j][2], and 8c + 4 + j, in sum[j][1] and sum[j][3].
__device__ __forceinline__ void multiply_slice(float (&sum)[4][4], const uint4 (&row)[2], const u32 (&pair)[4][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const u32 a0 = to_fp16(step ? row[0].z : row[0].x), a1 = to_fp16(step ? row[1].z : row[1].x);
    const u32 a2 = to_fp16(step ? row[0].w : row[0].y), a3 = to_fp16(step ? row[1].w : row[1].y);
#pragma unroll
    for (int j = 0; j < 4; ++j) kvtier::mma(sum[j], a0, a1, a2, a3, pair[2 * step][j], pair[2 * step + 1][j]);
  }
}

// The lane's eight columns of row g, or of row g + 8.
template <bool second>
__device__ __forceinline__ uint4 round_row(const float (&sum)[4][4]) {
  constexpr int kFirst = second ? 2 : 0;
  return make_uint4(Pairs::pack(sum[0][kFirst], sum[1][kFirst]), Pairs::pack(sum[2][kFirst], sum[3][kFirst]),
                    Pairs::pack(sum[0][kFirst + 1], sum[1][kFirst + 1]),
                    Pairs::pack(sum[2][kFirst + 1], sum[3][kFirst + 1]));
}

// Brings a matrix into L2 while the stream's previous kernel is still running; each of the thread blocks that have its
// columns asks for a part.
__device__ __forceinline__ void prefetch_matrix(const u8* matrix) {
#if __CUDA_ARCH__ >= 900
  constexpr u32 kPartBytes = HEAD_DIM * kRowBytes / kColumnBlocks;
  if (blockIdx.x == 0 && threadIdx.x == 0) prefetch_to_l2(matrix + blockIdx.y * kPartBytes, kPartBytes);
#endif
}

// Grid (ceil(num_rows / (kTileRows * ROW_WARPS)), or fewer with PERSISTENT; kColumnBlocks; KV heads); block kThreads.
// Strides are in bytes. `matrices` is (KV heads, HEAD_DIM, HEAD_DIM) in fp16 and dense, as is `target`. `num_rows` is
// tokens * group, the rows of one KV head.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    multiply_heads(const u8* source, i64 token_stride, i64 head_stride, u8* target, const u8* matrices, u32 group,
                   u64 inverse_group, u32 num_rows) {
  let_next_kernel_come();
  const u8* const matrix = matrices + static_cast<i64>(blockIdx.z) * HEAD_DIM * kRowBytes;
  prefetch_matrix(matrix);
  const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const u32 first_column = (blockIdx.y * COLUMN_WARPS + warp % COLUMN_WARPS) * kColumns;
  const u32 first_head = blockIdx.z * group;
  const u32 row_step = gridDim.x * ROW_WARPS * kTileRows;
  const Row step(row_step, group, inverse_group);
  u32 first_row = (blockIdx.x * ROW_WARPS + warp / COLUMN_WARPS) * kTileRows;  // of the tile
  Row row[2] = {{first_row + g, group, inverse_group}, {first_row + g + 8, group, inverse_group}};
  wait_for_previous_kernel();
  if (first_row >= num_rows) return;

  // NOTE: rows behind the end are not loaded and have any values: a row of a product depends on no other row.
  uint4 values[kSlices][2] = {};
  const u8* address[2];
  const auto find_rows = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      address[i] = source + row[i].token * token_stride + (first_head + row[i].head) * head_stride + c * 16;
    }
  };
  const auto load_slice = [&](int slice, u32 tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (tile + g + 8 * i < num_rows) values[slice][i] = *reinterpret_cast<const uint4*>(address[i] + slice * 64);
    }
  };
  find_rows();
#pragma unroll
  for (int i = 0; i < kSlices; ++i) load_slice(i, first_row);
  Columns columns;
  columns.load(matrix + first_column * 2);
  if constexpr (PERSISTENT) {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) columns.arrange(i);
  }
  do {
    const Row done[2] = {row[0], row[1]};
    row[0].advance(step, group), row[1].advance(step, group);
    find_rows();
    float sum[4][4] = {};
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      if constexpr (!PERSISTENT) columns.arrange(i);
      multiply_slice(sum, values[i], columns.pair[i]);
      if constexpr (PERSISTENT) load_slice(i, first_row + row_step);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i64 head = static_cast<i64>(done[i].token) * (gridDim.z * group) + first_head + done[i].head;
      uint4* const place = reinterpret_cast<uint4*>(target + head * kRowBytes + (first_column + c * 8) * 2);
      if (first_row + g + 8 * i < num_rows) *place = i ? round_row<true>(sum) : round_row<false>(sum);
    }
    first_row += row_step;
  } while (PERSISTENT && first_row < num_rows);
}
