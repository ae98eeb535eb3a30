"""The fingerprint: fixed for ever for one identity, and different when any field differs."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kvtier.errors import InvalidRequestError
from kvtier.pages.fingerprint import DIGEST_BYTES, CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout

LAYOUT = PageLayout(PageFormat.NVFP4, num_layers=30, num_kv_heads=3, head_dim=64, page_size=64)
IDENTITY = CacheIdentity(
    "SmolLM2-135M-Instruct",
    "main",
    49152,
    LAYOUT,
    rope="default theta=100000",
    recipe="plain",
    rank=0,
    world_size=2,
)
GOLDEN = "8a2c70b624ba4ae260108dbbda2954e12b93aaaa82c52d0dc3017c234ca25b5a"

CHANGED_FIELDS = {
    "model": "SmolLM2-360M-Instruct",
    "revision": "v2",
    "vocab_size": 49153,
    "rope": "default theta=10000",
    "recipe": "0123abcd",
    "rank": 1,
    "world_size": 4,
}
CHANGED_LAYOUT = {
    "page_format": PageFormat.FP8,
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 128,
    "page_size": 32,
}


def test_fingerprint_of_a_fixed_identity_never_changes() -> None:
    """NOTE: a change here makes every stored page of every release before it unreachable: raise LAYOUT_VERSION too."""
    assert IDENTITY.fingerprint.hex() == GOLDEN
    assert len(IDENTITY.fingerprint) == DIGEST_BYTES


def test_every_field_is_part_of_the_fingerprint() -> None:
    variants = [dataclasses.replace(IDENTITY, **{name: value}) for name, value in CHANGED_FIELDS.items()]
    variants += [
        dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, **{name: value}))
        for name, value in CHANGED_LAYOUT.items()
    ]
    assert len({IDENTITY.fingerprint, *(variant.fingerprint for variant in variants)}) == 1 + len(variants)


def test_the_list_of_changed_fields_is_complete() -> None:
    identity_fields = {field.name for field in dataclasses.fields(CacheIdentity)}
    assert identity_fields == {*CHANGED_FIELDS, "layout", "layout_version"}
    assert {field.name for field in dataclasses.fields(PageLayout)} == set(CHANGED_LAYOUT)


def test_layout_version_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.pages.fingerprint.LAYOUT_VERSION", 2)
    assert dataclasses.replace(IDENTITY, layout_version=2).fingerprint != IDENTITY.fingerprint


def test_neighbouring_fields_do_not_run_together() -> None:
    first = dataclasses.replace(IDENTITY, model="ab", revision="c")
    second = dataclasses.replace(IDENTITY, model="a", revision="bc")
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, "the model's name is empty"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"rank": 2}, "rank is 2 of 2"),
        ({"rank": -1}, "rank is -1 of 2"),
        ({"layout_version": 2}, "page layout version 2 is not 1"),
    ],
)
def test_impossible_identities_are_refused(changed: dict[str, int | str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        dataclasses.replace(IDENTITY, **changed)
