// Reads a buffer once: the memory's read ceiling.
extern "C" __global__ void __launch_bounds__(512) read_sweep(const uint4* data, unsigned long long count, unsigned* sink) {
  unsigned sum = 0;
  const unsigned long long step = (unsigned long long)gridDim.x * 512;
  unsigned long long i = (unsigned long long)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}
