// The PTX instructions that the kernels use, as functions. Everything here runs from SM80 on.
#pragma once

namespace kvtier {

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr uint32 kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, past L1 and first to leave L2; see commit_copies and wait_for_copies.
__device__ __forceinline__ void copy_16_bytes(uint32 shared_destination, const void* global_source) {
  asm volatile(
      "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
      " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy; }" ::"r"(shared_destination),
      "l"(global_source)
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when all but the `pending` newest committed groups of this thread have arrived.
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Asks for the 128 bytes around an address to be brought into L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Reads what no kernel writes meanwhile.
__device__ __forceinline__ int load_constant(const int* pointer) {
  int loaded;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(loaded) : "l"(pointer));
  return loaded;
}

// Reads of shared memory by 32-bit address. NOTE: volatile, so that they stay behind the wait for what they read.
__device__ __forceinline__ uint4 load_shared_16(uint32 address) {
  uint4 loaded;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded.x), "=r"(loaded.y), "=r"(loaded.z), "=r"(loaded.w)
               : "r"(address));
  return loaded;
}

__device__ __forceinline__ uint2 load_shared_8(uint32 address) {
  uint2 loaded;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(loaded.x), "=r"(loaded.y) : "r"(address));
  return loaded;
}

// The low `bytes` of a word, the rest zero.
template <int bytes>
__device__ __forceinline__ uint32 load_shared_word(uint32 address) {
  uint32 loaded;
  if constexpr (bytes == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(loaded) : "r"(address));
  } else if constexpr (bytes == 2) {
    asm volatile("{ .reg .u16 half; ld.shared.u16 half, [%1]; cvt.u32.u16 %0, half; }" : "=r"(loaded) : "r"(address));
  } else {
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(loaded) : "r"(address));
  }
  return loaded;
}

__device__ __forceinline__ void store_shared_8(uint32 address, uint2 stored) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(stored.x), "r"(stored.y) : "memory");
}

// Keeps a value in its register: the assembler would rather compute loop invariants again in every turn, at five to ten
// instructions each, than hold them. What comes out of a shuffle it cannot compute.
template <typename Value>
__device__ __forceinline__ void keep(Value& value) {
  value = __shfl_sync(kAllLanes, value, threadIdx.x % 32);
}

template <typename Value>
__device__ __forceinline__ void keep(Value*& pointer) {
  pointer = reinterpret_cast<Value*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64>(pointer), threadIdx.x % 32));
}

// D += A * B on 16x16 fp16 A, 16x8 fp16 B, 16x8 fp32 D. With g = lane / 4 and c = lane % 4, a lane holds
// a[0], a[1]: rows g, g + 8, columns 2c, 2c + 1; a[2], a[3]: the same rows, columns 2c + 8, 2c + 9;
// b[0], b[1]: column g, rows 2c, 2c + 1 and 2c + 8, 2c + 9; d: row g, columns 2c, 2c + 1, then row g + 8.
__device__ __forceinline__ void mma(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads four 8x8 matrices of 16-bit elements, transposed. Lanes 8i to 8i + 7 give the rows of matrix i; a lane gets
// of each matrix the elements of rows 2c and 2c + 1 in column g.
__device__ __forceinline__ void load_matrices_transposed(uint32 (&words)[4], uint32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements held as row g, columns 2c and 2c + 1.
__device__ __forceinline__ uint32 transpose_matrix(uint32 elements) {
  uint32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(elements));
  return transposed;
}

// Bits of `ones` where `mask` is 1, else of `zeros`: one instruction, which the compiler does not always find.
__device__ __forceinline__ uint32 select_bits(uint32 mask, uint32 ones, uint32 zeros) {
  uint32 selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(selected) : "r"(mask), "r"(ones), "r"(zeros));
  return selected;
}

__device__ __forceinline__ uint32 multiply_half2(uint32 a, uint32 b) {
  uint32 product;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32 to_half2(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32 to_bfloat162(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

}  // namespace kvtier
