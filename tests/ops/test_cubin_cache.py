"""The cache of compiled kernels: what it gives back, and that anything else in its place is a miss."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.ops.cuda.cubin_cache import DIGEST_BYTES, MAGIC, CubinCache, default_directory, entry_key

KEY = entry_key(["source", "sm_90a"])
CUBIN = bytes(range(256)) * 8


def test_an_entry_comes_back_and_is_private(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "kvtier" / "kernels")
    assert cache.read(KEY) is None
    cache.write(KEY, CUBIN)
    assert cache.read(KEY) == CUBIN
    assert cache.path(KEY).parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.path(KEY).parent.iterdir()] == [f"{KEY.hex()}.cubin"]


def _flip(position: int) -> Callable[[bytes], bytes]:
    return lambda entry: entry[:position] + bytes([entry[position] ^ 1]) + entry[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        _flip(0),
        _flip(len(MAGIC)),
        _flip(len(MAGIC) + len(KEY)),
        _flip(-1 + len(MAGIC) + len(KEY) + DIGEST_BYTES + len(CUBIN)),
        lambda entry: entry[:-1],
        lambda entry: entry + b"\0",
        lambda entry: b"",
        lambda entry: CUBIN,
    ],
    ids=["magic", "key", "digest", "cubin", "cut short", "longer", "empty", "bare cubin"],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CubinCache(tmp_path)
    cache.write(KEY, CUBIN)
    cache.path(KEY).write_bytes(damage(cache.path(KEY).read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert cache.read(KEY) is None
    assert "damaged or not ours" in caplog.text
    cache.write(KEY, CUBIN)
    assert cache.read(KEY) == CUBIN


def test_the_entry_of_another_key_is_a_miss(tmp_path: Path) -> None:
    cache, other = CubinCache(tmp_path), entry_key(["source", "sm_80"])
    cache.write(KEY, CUBIN)
    cache.path(KEY).rename(cache.path(other))
    assert cache.read(other) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_entry_of_another_user_is_a_miss(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    cache.write(KEY, CUBIN)
    os.chown(cache.path(KEY), 65534, -1)
    assert cache.read(KEY) is None


def test_a_directory_that_cannot_be_written_costs_no_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "kernels")
    with caplog.at_level(logging.WARNING):
        cache.write(KEY, CUBIN)
    assert cache.read(KEY) is None
    assert "is not kept" in caplog.text


def test_keys_tell_parts_apart() -> None:
    assert entry_key(["ab", "c"]) != entry_key(["a", "bc"])
    assert entry_key(["a"]) != entry_key(["a", ""])


def test_the_default_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "kvtier" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory() == Path("/home/someone/.cache/kvtier/kernels")
