"""The operations as CUDA kernels: the sources of `kernels/`, compiled at first use, one wrapper each.

Where `cuda-core` is not installed, only `cubin_cache`, `variants` and `workspace` may be imported.
"""
