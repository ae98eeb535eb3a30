"""What the GPU benchmarks share: median times of CUDA-graph replays, and the ceilings of the memory."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from kvtier.errors import KernelError

OURS = "kvtier"  # what our implementation is called beside the peers
ROTATED_BYTES = 1_200_000_000  # of inputs that repetitions take turns with: far more than any cache holds
_CEILING_BYTES = 2 << 30
_CEILING_ROUNDS = 3  # the best counts: a single round once gave 6% less than all other runs did
_WARM_UP_REPLAYS = 6
_REST_S = 1.0  # before each timing: right after a check in fp64 the clock is held low to save power, for 10% and more

Call = Callable[[], object]


def require_gpu() -> torch.device:
    """The first GPU; raises `KernelError` where there is none."""
    if not torch.cuda.is_available():
        raise KernelError("this benchmark measures kernels on an NVIDIA GPU, and this machine has none")
    return torch.device("cuda", 0)


@contextlib.contextmanager
def measuring(impl: str, what: str) -> Iterator[None]:
    """Around all that an implementation does: what a peer refuses is named on stderr and does not end the run."""
    try:
        yield
    except Exception as error:  # the edge to other people's code
        if impl.startswith(OURS):
            raise
        print(f"{impl}, {what}: {type(error).__name__}: {error}", file=sys.stderr)


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of `calls` in a row; each runs once before, so that everything is compiled and allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def median_replay_us(graphs: Sequence[torch.cuda.CUDAGraph], replays: int) -> float:
    """Median microseconds of a replay; `graphs` take turns."""
    for index in range(_WARM_UP_REPLAYS):
        graphs[index % len(graphs)].replay()
    return _median_us([graphs[index % len(graphs)].replay for index in range(replays)])


def _median_us(calls: Sequence[Call]) -> float:
    torch.cuda.synchronize()
    time.sleep(_REST_S)
    times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for call in calls:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) * 1e3 for start, end in times)


def read_ceiling_gbps(device: torch.device) -> float:
    """GB/s at which a kernel that does nothing else reads 2 GiB."""
    from kvtier.ops.cuda.loader import kernels

    data = torch.randint(0, 256, (_CEILING_BYTES,), dtype=torch.uint8, device=device)
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    kernel = kernels().kernel("read_sweep", (), device)
    num_blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count

    def sweep() -> None:
        kernel.launch((num_blocks,), 512, (data.data_ptr(), _CEILING_BYTES // 16, sink.data_ptr()))

    graph = capture([sweep])
    return _CEILING_BYTES / min(median_replay_us([graph], 20) for _ in range(_CEILING_ROUNDS)) / 1e3


def copy_ceiling_gbps(device: torch.device) -> float:
    """GB/s, read and written, at which torch copies 2 GiB on the device."""
    source = torch.randint(0, 256, (_CEILING_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    # NOTE: not in a graph, where a copy becomes the copy engine's, which is slower than the kernel that torch starts.
    copies: list[Call] = [lambda: target.copy_(source)] * 12
    return 2 * _CEILING_BYTES / min(_median_us(copies) for _ in range(_CEILING_ROUNDS)) / 1e3
