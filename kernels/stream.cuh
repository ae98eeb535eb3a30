// A kernel and its neighbours in the stream: programmatic dependent launch.
//
// Without effect unless the kernel is launched with programmatic stream serialization.
#pragma once

// Lets the stream's next kernel be brought onto the chip while this one runs.
__device__ __forceinline__ void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the stream's previous kernel has finished and its writes are seen.
//
// NOTE: every thread block calls it before it touches memory and before it returns: a kernel that ends without having
// waited would let the next one overtake the previous one. Hints to the L2 cache alone may come before it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void join_stream() {
  let_next_kernel_come();
  wait_for_previous_kernel();
}

#if __CUDA_ARCH__ >= 900
// Asks for bytes to be brought into L2; address and number are multiples of 16. It reads no value, so it does not matter
// if they are about to be written.
__device__ __forceinline__ void prefetch_to_l2(const void* address, unsigned int num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(num_bytes) : "memory");
}
#endif

// A word as it is in L2 now, for a hint that may be wrong.
__device__ __forceinline__ int peek(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
