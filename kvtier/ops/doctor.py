"""`kvtier doctor`: what this machine has, what runs each operation and why, and whether it computes what it should.

The self-test transforms keys and queries as the recipes `balanced` and `full` do, writes a small pool with
`quantize_append`, reads it back with `gather_dequantize` and attends to it with `decode_attention`, on the device and,
by the torch references, on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from kvtier.ops import operations
from kvtier.ops.cuda.cubin_cache import default_directory
from kvtier.ops.dispatch import (
    Choice,
    DecodeCase,
    PrefillCase,
    choose_append,
    choose_balance,
    choose_decode,
    choose_gather,
    choose_multiply,
    choose_prefill,
    platform_of,
)
from kvtier.ops.reference import append, attention, gather, transform
from kvtier.ops.reference.codec import GlobalScales
from kvtier.ops.reference.gather import Workspace
from kvtier.ops.reference.transform import Balance, Matrices
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import LayerView, layer_view

MAX_RELATIVE_ERROR = 3e-3  # in BF16, of decode attention and products: relative L2 distance from the reference in fp32

Result = TypeVar("Result")

_LAYOUT = PageLayout(PageFormat.NVFP4, num_layers=2, num_kv_heads=2, head_dim=128, page_size=64)
_GROUP = 5
_LENGTHS = (1, 64, 300, 0)
_SCALES = GlobalScales(k=0.5, v=2.0)


class Fact(NamedTuple):
    """A line of the report."""

    name: str
    value: str


class Check(NamedTuple):
    """An outcome of the self-test. `seconds` includes what a first call does: compiling, or loading from the cache."""

    name: str
    passed: bool
    detail: str
    seconds: float


class Report(NamedTuple):
    """What `kvtier doctor` prints."""

    facts: list[Fact]
    choices: dict[str, Choice]
    checks: list[Check]

    @property
    def is_healthy(self) -> bool:
        """Whether all of the self-test passed."""
        return all(check.passed for check in self.checks)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        names = [fact.name for fact in self.facts] + list(self.choices) + [check.name for check in self.checks]
        width = max(map(len, names))
        for fact in self.facts:
            yield f"{fact.name:{width}}  {fact.value}"
        yield ""
        for operation, choice in self.choices.items():
            yield f"{operation:{width}}  {choice.implementation}: {choice.reason}"
        yield ""
        for check in self.checks:
            outcome = "ok" if check.passed else "WRONG"
            yield f"{check.name:{width}}  {outcome}: {check.detail}, {check.seconds * 1e3:.0f} ms"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "healthy": self.is_healthy,
            "facts": {fact.name: fact.value for fact in self.facts},
            "choices": {operation: choice._asdict() for operation, choice in self.choices.items()},
            "checks": [check._asdict() for check in self.checks],
        }


def examine() -> Report:
    """Looks at the first GPU, or at the CPU where there is none, and tests it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return Report(list(_facts(device)), dict(_choices(device)), list(_self_test(device)))


def _facts(device: torch.device) -> Iterator[Fact]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield Fact("device", f"{properties.name}, {properties.total_memory >> 30} GiB")
        yield Fact("capability", f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs")
        yield Fact("driver", _driver_version())
        yield Fact("compiled kernels", str(default_directory()))
    else:
        yield Fact("device", "no NVIDIA GPU: everything runs on the CPU")
    yield Fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    yield Fact("cuda-core", _imported_version(device))
    yield Fact("flashinfer-python", _version("flashinfer-python"))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _imported_version(device: torch.device) -> str:
    """Of cuda-core, which is imported here on a GPU: the times of the self-test are those of the kernels alone."""
    version = _version("cuda-core")
    if not platform_of(device).has_cuda_core:
        return version
    start = time.perf_counter()
    importlib.import_module("kvtier.ops.cuda.loader")
    return f"{version}, imported in {(time.perf_counter() - start) * 1e3:.0f} ms"


def _driver_version() -> str:
    """What the driver can run, such as "up to CUDA 13.0"."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"up to CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _choices(device: torch.device) -> Iterator[tuple[str, Choice]]:
    platform = platform_of(device)
    yield "quantize_append", choose_append(platform, torch.bfloat16, torch.bfloat16)
    yield "gather_dequantize", choose_gather(platform, torch.bfloat16)
    yield "transform, recipe balanced", choose_balance(platform, torch.bfloat16, _LAYOUT.head_dim)
    yield "transform, recipe full", choose_multiply(platform, torch.bfloat16, torch.float16, _LAYOUT.head_dim)
    for page_format in PageFormat:
        case = DecodeCase(page_format, _LAYOUT.head_dim, _GROUP, torch.bfloat16, has_tail=False)
        yield f"decode_attention, {page_format} pages", choose_decode(platform, case)
    for name, has_window in (("prefill_attention", False), ("prefill_attention, window", True)):
        prefill = PrefillCase(_LAYOUT.head_dim, torch.bfloat16, has_window, has_softcap=False)
        yield name, choose_prefill(platform, prefill)


class _Pages(NamedTuple):
    """The pages of the self-test on one device."""

    pool: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    query: torch.Tensor

    @property
    def view(self) -> LayerView:
        return layer_view(self.pool, _LAYOUT, 1)

    def to(self, device: torch.device) -> _Pages:
        return _Pages(*(tensor.to(device, copy=True) for tensor in self))


def _make_pages() -> _Pages:
    generator = torch.Generator().manual_seed(0)
    page_size, heads = _LAYOUT.page_size, (_LAYOUT.num_kv_heads, _LAYOUT.head_dim)
    num_pages = -(-max(_LENGTHS) // page_size)  # of every sequence, needed or not
    page_table = torch.randperm(len(_LENGTHS) * num_pages, generator=generator).view(len(_LENGTHS), num_pages)
    places = (page_table.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
    slots = torch.cat([row[:length] for row, length in zip(places, _LENGTHS, strict=True)])
    key, value = torch.randn(2, len(slots), *heads, generator=generator).bfloat16()
    query = torch.randn(len(_LENGTHS), heads[0] * _GROUP, heads[1], generator=generator).bfloat16()
    pool = torch.zeros(page_table.numel(), _LAYOUT.page_bytes, dtype=torch.uint8)
    return _Pages(pool, key, value, slots, page_table.int(), torch.tensor(_LENGTHS, dtype=torch.int32), query)


def _self_test(device: torch.device) -> Iterator[Check]:
    expected = _make_pages()
    found = expected.to(device)

    balance = Balance.of(torch.linspace(0.5, 2, expected.key[0].numel()).view(expected.key[0].shape))
    on_device = Balance(*(factors.to(device) for factors in balance))
    expected = expected._replace(key=transform.balanced(expected.key, balance.key))
    transformed, seconds = _timed(device, lambda: operations.transform_keys(found.key, on_device))
    found = found._replace(key=transformed)
    differing = int((transformed.cpu() != expected.key).sum())
    detail = f"{differing} of {expected.key.numel()} values differ"
    yield Check("transform, recipe balanced", differing == 0, detail, seconds)

    shape = (_LAYOUT.num_kv_heads, _LAYOUT.head_dim, _LAYOUT.head_dim)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    matrices = Matrices(matrix.to(device), matrix.to(device))
    product = transform.multiplied(expected.query.float(), matrix)
    multiplied, seconds = _timed(device, lambda: operations.transform_queries(found.query, matrices))
    error = _relative_error(multiplied, product)
    yield Check("transform, recipe full", error <= MAX_RELATIVE_ERROR, f"relative error {error:.1e}", seconds)

    rule = BlockScales.SEARCH
    append.quantize_append(expected.view, expected.key, expected.value, expected.slots, _SCALES, rule)
    _, seconds = _timed(
        device, lambda: operations.quantize_append(found.view, found.key, found.value, found.slots, _SCALES, rule)
    )
    differing = int((found.pool.cpu() != expected.pool).sum())
    yield Check("quantize_append", differing == 0, f"{differing} of {expected.pool.numel()} bytes differ", seconds)

    spaces = Workspace(*torch.zeros(2, *expected.key.shape, dtype=torch.bfloat16))
    found_spaces = Workspace(*(space.to(device) for space in spaces))
    starts = (expected.lengths.cumsum(0) - expected.lengths).int()
    gather.gather_dequantize(expected.view, expected.page_table, expected.lengths, starts, _SCALES, spaces)
    found_starts = starts.to(device)
    _, seconds = _timed(
        device,
        lambda: operations.gather_dequantize(
            found.view, found.page_table, found.lengths, found_starts, _SCALES, found_spaces
        ),
    )
    differing = sum(int((a.cpu() != b).sum()) for a, b in zip(found_spaces, spaces, strict=True))
    yield Check("gather_dequantize", differing == 0, f"{differing} of {2 * spaces.key.numel()} values differ", seconds)

    softmax_scale = _LAYOUT.head_dim**-0.5
    reference = attention.decode_attention(
        expected.query.float(), expected.view, expected.page_table, expected.lengths, _SCALES, softmax_scale
    )
    result, seconds = _timed(
        device,
        lambda: operations.decode_attention(
            found.query, found.view, found.page_table, found.lengths, _SCALES, softmax_scale
        ),
    )
    error = _relative_error(result.out, reference.out)
    yield Check("decode_attention", error <= MAX_RELATIVE_ERROR, f"relative error {error:.1e}", seconds)


def _timed(device: torch.device, run: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().float() - expected).norm() / expected.norm())
