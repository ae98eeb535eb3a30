"""Compiles kvtier's CUDA sources with NVRTC, keeps the results on disk, and launches them on torch's current stream.

Nothing is compiled, opened or started when this module is imported.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from cuda.bindings import driver, nvrtc
from cuda.core import Device, Kernel, LaunchConfig, ObjectCode, Program, ProgramOptions, Stream
from cuda.core import launch as cuda_launch

from kvtier.errors import KernelError
from kvtier.ops.cuda.cubin_cache import CubinCache, default_directory, entry_key
from kvtier.ops.cuda.variants import Macros, sources_directory

ARCHITECTURE_SPECIFIC = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}  # their own instructions need the suffix "a"


@functools.cache
def kernels() -> KernelLoader:
    """The loader of this process."""
    return KernelLoader(CubinCache(default_directory()), sources_directory())


def architecture(capability: tuple[int, int]) -> str:
    """What NVRTC calls the GPU of a compute capability, such as "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability in ARCHITECTURE_SPECIFIC else "")


def nvrtc_version() -> str:
    """Of the library that compiles, such as "13.0"."""
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise KernelError("NVRTC, which compiles the kernels, is missing: pip install nvidia-cuda-nvrtc") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC does not tell its version: {status}")
    return f"{major}.{minor}"


@functools.cache
def _stream(device_index: int, handle: int) -> Stream:
    """torch's stream as `cuda.core` takes it; torch never destroys its streams."""
    return Stream.from_handle(handle)


@functools.lru_cache(4096)
def _launch_config(grid: tuple[int, ...], block: int, shared_bytes: int, overlaps: bool) -> LaunchConfig:
    return LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=overlaps)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device; launches are queued on torch's current stream of it and wait for nothing."""

    handle: Kernel
    device_index: int
    can_overlap: bool  # the GPU has programmatic dependent launch (from sm_90)
    shared_bytes: int  # dynamic shared memory of a thread block

    def launch(self, grid: tuple[int, ...], block: int, arguments: tuple[object, ...], overlaps: bool = False) -> None:
        """Arguments: addresses and 64-bit integers as `int`, all others as numpy scalars of exactly their type.
        With `overlaps`, where the GPU can, thread blocks are brought onto the chip while the kernel before still runs.

        NOTE: `overlaps` is for kernels alone in which every thread block calls `wait_for_previous_kernel`.
        """
        stream = _stream(self.device_index, torch.cuda.current_stream(self.device_index).cuda_stream)
        config = _launch_config(grid, block, self.shared_bytes, overlaps and self.can_overlap)
        # NOTE: torch's default stream has the same handle on every GPU; the driver takes it for the current one's.
        with torch.cuda.device(self.device_index):
            cuda_launch(stream, config, self.handle, *arguments)


class KernelLoader:
    """The kernels of one directory of CUDA sources, each compiled once for its macros and architecture.

    `<name>.cu` defines one `extern "C"` kernel called `<name>`. May be used from several threads.
    """

    def __init__(self, cache: CubinCache, sources: Path) -> None:
        self._cache = cache
        self._sources = sources
        self._kernels: dict[tuple[object, ...], LoadedKernel] = {}
        self._lock = threading.Lock()

    def kernel(self, name: str, macros: Macros, device: torch.device, shared_bytes: int = 0) -> LoadedKernel:
        """The kernel compiled for `macros`, loaded on `device`: a launch of it may be captured at once.

        Raises `KernelError` when NVRTC is missing, and what `cuda.core` raises when NVRTC refuses the source; its
        message holds the compiler's log.
        """
        key = (name, macros, device)
        loaded = self._kernels.get(key)
        if loaded is None:
            with self._lock:
                loaded = self._kernels.get(key) or self._load(name, macros, device, shared_bytes)
                self._kernels[key] = loaded
        return loaded

    def _load(self, name: str, macros: Macros, device: torch.device, shared_bytes: int) -> LoadedKernel:
        capability = torch.cuda.get_device_capability(device)
        code = ObjectCode.from_cubin(self.cubin(name, macros, capability))
        cuda_device = Device(device.index)
        with torch.cuda.device(device):
            cuda_device.set_current()
            kernel = code.get_kernel(name)
            # NOTE: reading an attribute loads the code on the device; CUDA would else do so at the first launch, which
            # must not happen while a graph is captured.
            _ = kernel.attributes.num_regs
            if shared_bytes:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device.index)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise KernelError(f"{name} cannot have {shared_bytes} bytes of shared memory: {status.name}")
        return LoadedKernel(kernel, device.index, capability >= (9, 0), shared_bytes)

    def cubin(self, name: str, macros: Macros, capability: tuple[int, int]) -> bytes:
        """Machine code from the cache on disk, or else from the compiler; needs no GPU."""
        source = (self._sources / f"{name}.cu").read_text()
        headers = [path.read_text() for path in sorted(self._sources.glob("*.cuh"))]
        definitions = [f"{macro}={value}" for macro, value in macros]
        arch = architecture(capability)
        key = entry_key([nvrtc_version(), arch, *definitions, name, source, *headers])
        cubin = self._cache.read(key)
        if cubin is None:
            cubin = self._compile(name, source, definitions, arch)
            self._cache.write(key, cubin)
        return cubin

    def _compile(self, name: str, source: str, definitions: list[str], arch: str) -> bytes:
        options = ProgramOptions(
            name=name, arch=arch, std="c++17", define_macro=definitions or None, include_path=str(self._sources)
        )
        return bytes(Program(source, "c++", options).compile("cubin").code)
