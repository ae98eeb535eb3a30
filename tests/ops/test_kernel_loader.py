"""Compiling kernels with NVRTC, which needs no GPU. Skipped where cuda-core or NVRTC is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from kvtier.errors import KernelError
from kvtier.ops.cuda.cubin_cache import CubinCache
from kvtier.ops.cuda.loader import KernelLoader, architecture, nvrtc_version
from kvtier.ops.cuda.variants import SHARED_BYTES_A_BLOCK, sources_directory, variants_in_use

HOPPER = (9, 0)
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        nvrtc_version()
    except KernelError:
        pytest.skip("NVRTC is not installed")


def _source(directory: Path, body: str) -> None:
    (directory / "numbers.cuh").write_text("constexpr int kNumber = 7;\n")
    (directory / "store.cu").write_text(
        f'#include "numbers.cuh"\nextern "C" __global__ void store(int* out) {{ {body} }}\n'
    )


def test_every_variant_in_use_compiles_for_hopper(tmp_path: Path) -> None:
    loader = KernelLoader(CubinCache(tmp_path), sources_directory())
    variants = list(variants_in_use("sm_90a"))
    for name, macros in variants:
        assert loader.cubin(name, macros, HOPPER).startswith(ELF)
    assert len(list(tmp_path.iterdir())) == len(variants)


def test_a_compiled_kernel_is_kept_until_its_source_changes(tmp_path: Path) -> None:
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    _source(sources, "*out = FACTOR * kNumber;")
    loader = KernelLoader(CubinCache(cache), sources)
    first = loader.cubin("store", (("FACTOR", 3),), HOPPER)
    (entry,) = cache.iterdir()
    written = entry.stat().st_mtime_ns
    assert loader.cubin("store", (("FACTOR", 3),), HOPPER) == first
    assert entry.stat().st_mtime_ns == written

    (sources / "numbers.cuh").write_text("constexpr int kNumber = 8;\n")
    changed = loader.cubin("store", (("FACTOR", 3),), HOPPER)
    assert changed != first
    assert loader.cubin("store", (("FACTOR", 4),), HOPPER) != changed
    assert loader.cubin("store", (("FACTOR", 3),), (8, 0)) != changed
    assert len(list(cache.iterdir())) == 4


def test_a_broken_entry_is_compiled_anew(tmp_path: Path) -> None:
    _source(tmp_path, "*out = kNumber;")
    cache = tmp_path / "cache"
    loader = KernelLoader(CubinCache(cache), tmp_path)
    first = loader.cubin("store", (), HOPPER)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-100])
    assert loader.cubin("store", (), HOPPER) == first
    assert entry.read_bytes() == whole


def test_the_message_of_a_source_that_does_not_compile_has_the_compilers_log(tmp_path: Path) -> None:
    _source(tmp_path, "*out = missing;")
    with pytest.raises(Exception, match='identifier "missing" is undefined'):
        KernelLoader(CubinCache(tmp_path / "cache"), tmp_path).cubin("store", (), HOPPER)


def test_architectures() -> None:
    names = [architecture(capability) for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert names == list(SHARED_BYTES_A_BLOCK)
