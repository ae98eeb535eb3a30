"""The CUDA driver as the daemon and its clients use it: GPUs by UUID, memory that processes share, and errors.

Needs `cuda-bindings`, which comes with the extra `gpu`, and no torch: import it only where a GPU is wanted. A process
uses the primary context of a GPU, as torch does, so that both see the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import driver

from kvtier.errors import ConfigurationError, GpuError

SUCCESS = driver.CUresult.CUDA_SUCCESS
OUT_OF_MEMORY = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_BATCH_COPIES_SINCE = 12080  # of driver and bindings: cuMemcpyBatchAsync


def check(result: tuple[Any, ...], what: str) -> Any:
    """What a driver call returned beside its status; raises `GpuError` when that is not success."""
    status, *values = result
    if status != SUCCESS:
        raise GpuError(f"{what} failed: {describe(status)}")
    return values[0] if len(values) == 1 else values


def describe(status: driver.CUresult) -> str:
    """A status by name and in words."""
    known, text = driver.cuGetErrorString(status)
    return f"{status.name} ({text.decode()})" if known == SUCCESS else status.name


class MemoryInfo(NamedTuple):
    """Bytes of a GPU's memory."""

    free_bytes: int
    total_bytes: int


def parse_cpus(text: str) -> frozenset[int]:
    """CPUs as Linux lists them: "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


class Gpu:
    """One GPU that this process sees, with its primary context. Use `gpus()`."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        name: bytes = check(driver.cuDeviceGetName(256, self._device), "cuDeviceGetName")
        self.name = name.split(b"\0")[0].decode()
        # The older of two functions gives all slices of a GPU the GPU's own; bindings since 13.0 have the newer alone.
        get_uuid = driver.cuDeviceGetUuid if driver.CUDA_VERSION >= 13000 else driver.cuDeviceGetUuid_v2
        identifier: bytes = check(get_uuid(self._device), "cuDeviceGetUuid").bytes
        self.uuid = f"GPU-{uuid.UUID(bytes=identifier)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"

    @functools.cached_property
    def _context(self) -> driver.CUcontext:
        # Who waits for this GPU sleeps instead of spinning. A context that is there already (torch's) keeps its way.
        _, is_active = check(driver.cuDevicePrimaryCtxGetState(self._device), "cuDevicePrimaryCtxGetState")
        if not is_active:
            flags = driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
            check(driver.cuDevicePrimaryCtxSetFlags(self._device, flags), "cuDevicePrimaryCtxSetFlags")
        return check(driver.cuDevicePrimaryCtxRetain(self._device), f"opening a context on {self}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the GPU the one that driver calls of this thread go to."""
        check(driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def local_cpus(self) -> frozenset[int]:
        """The CPUs whose memory is next to this GPU; none where the machine does not say."""
        bus_id: bytes = check(driver.cuDeviceGetPCIBusId(32, self._device), "cuDeviceGetPCIBusId")
        path = _PCI_DEVICES / bus_id.split(b"\0")[0].decode().lower() / "local_cpulist"
        return parse_cpus(path.read_text()) if path.is_file() else frozenset()

    def memory_info(self) -> MemoryInfo:
        """What is free now, and all there is."""
        with self.current():
            free_bytes, total_bytes = check(driver.cuMemGetInfo(), "cuMemGetInfo")
        return MemoryInfo(free_bytes, total_bytes)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process sees, in its own order; raises `GpuError` where there is none, or no driver."""
    try:
        check(driver.cuInit(0), "cuInit")
    except RuntimeError as error:  # cuda.bindings does not find libcuda.so.1
        raise GpuError(f"the NVIDIA driver is missing: {error}") from error
    count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
    if count == 0:
        raise GpuError("this process sees no GPU")
    return tuple(Gpu(ordinal) for ordinal in range(count))


def find_gpu(identifier: str) -> Gpu:
    """The GPU with a UUID, as nvidia-smi prints it; raises `ConfigurationError` when this process does not see it."""
    wanted = _bare(identifier)
    found = next((gpu for gpu in gpus() if _bare(gpu.uuid) == wanted), None)
    if found is None:
        visible = ", ".join(map(str, gpus()))
        raise ConfigurationError(
            f"this process does not see {identifier}, it sees {visible}; let CUDA_VISIBLE_DEVICES (containers: "
            "--gpus) name that one too"
        )
    return found


def _bare(identifier: str) -> str:
    """A UUID without its prefix: GPU or, for a slice of one, MIG."""
    return identifier.partition("-")[2].lower()


def has_batch_copies() -> bool:
    """Whether driver and bindings queue many copies in one call."""
    version = check(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    # A driver lacks what the bindings of a later major version call.
    is_new_enough = version // 1000 >= driver.CUDA_VERSION // 1000
    return bool(is_new_enough and min(version, driver.CUDA_VERSION) >= _BATCH_COPIES_SINCE)


class CudaMemory:
    """`num_pages` page images in the memory of `gpu`, shape (num_pages, page_bytes), uint8.

    `torch.as_tensor(memory)` is a tensor on these bytes, without a copy; so are views by CuPy, Numba and JAX. They keep
    this object alive, and it keeps the memory mapped.
    """

    def __init__(self, gpu: Gpu, address: int, num_pages: int, page_bytes: int) -> None:
        self.gpu = gpu
        self.address = address
        self.shape = (num_pages, page_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    @classmethod
    def open(cls, ipc_handle: bytes, device_uuid: str, num_pages: int, page_bytes: int) -> CudaMemory:
        """Maps what another process exported, until nothing refers to the object any more.

        Raises `ConfigurationError` when this process does not see the GPU or may not map the memory.
        """
        gpu = find_gpu(device_uuid)
        handle = driver.CUipcMemHandle()
        handle.reserved = ipc_handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with gpu.current():
            status, pointer = driver.cuIpcOpenMemHandle(handle, flags)
        if status != SUCCESS:
            raise ConfigurationError(
                f"cannot map the pool on {gpu}: {describe(status)}; its owner must be another process of this host, "
                "alive, in the same IPC and PID namespace (containers: --ipc=host --pid=host)"
            )
        memory = cls(gpu, int(pointer), num_pages, page_bytes)
        # Not at the end of the process, which takes context and mappings down in its own order.
        weakref.finalize(memory, _unmap, gpu, memory.address).atexit = False
        return memory


def _unmap(gpu: Gpu, address: int) -> None:
    with gpu.current():
        driver.cuCtxSynchronize()  # a kernel that was launched on the memory may run still
        driver.cuIpcCloseMemHandle(address)
