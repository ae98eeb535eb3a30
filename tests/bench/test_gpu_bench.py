"""The GPU benchmarks: what they refuse, how they read their cases, and how they print."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvtier.bench import codec, decode
from kvtier.bench.decode_cases import Case, Geometry, Load
from kvtier.bench.table import plot_decode, table_of
from kvtier.cli.common import require_matplotlib
from kvtier.errors import ConfigurationError, InvalidRequestError, KernelError
from kvtier.pages.layout import PageFormat

LLAMA = Geometry(64, 8, 128)
ROW = decode.Row("kvtier", "nvfp4", "64/8/128", 64, 8192, 64, 170.2, 3548.0, 0.8012, 1.7e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_they_say_so() -> None:
    with pytest.raises(KernelError, match="on an NVIDIA GPU"):
        decode.run([LLAMA], [Load(1, 64)], [64], 1)
    with pytest.raises(KernelError, match="on an NVIDIA GPU"):
        codec.run([LLAMA], [64], 64, 1)


def test_cases_are_read_as_they_are_written() -> None:
    assert Geometry.parse("24/4/256") == Geometry(24, 4, 256)
    assert str(Geometry(24, 4, 256)) == "24/4/256"
    assert Load.parse("64x8192") == Load(64, 8192)


@pytest.mark.parametrize("text", ["24/4", "24/4/x", "-1/2/3", ""])
def test_what_is_no_geometry_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no geometry"):
        Geometry.parse(text)


@pytest.mark.parametrize("text", ["64", "64x", "0x64", "64x0", "64x8x1"])
def test_what_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no load"):
        Load.parse(text)


def test_bytes_of_a_step() -> None:
    case = Case(LLAMA, Load(64, 8192), 64)
    values = 64 * 8192 * 8 * 128 * 2
    assert case.cache_bytes(PageFormat.NVFP4) == values * 9 // 16
    assert case.cache_bytes(PageFormat.FP8) == values
    assert case.cache_bytes(PageFormat.BF16) == 2 * values


def test_rows_print_as_a_table() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table_of([ROW._asdict()]))
    cells = capture.get().splitlines()[3].replace("│", " ").split()
    assert cells == ["kvtier", "nvfp4", "64/8/128", "64", "8192", "64", "170.2", "3548.0", "80.1%", "1.7e-03"]


def test_a_plot_is_drawn_or_refused_before_anything_runs(tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigurationError, match="pip install matplotlib"):
            require_matplotlib()
        return
    require_matplotlib()
    plot_decode([ROW, ROW._replace(impl="flashinfer fa2", median_us=661.0)], tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
