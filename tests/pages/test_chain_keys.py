"""Chain keys: golden values, separation of namespaces, extras, and the same keys in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvtier.errors import InvalidRequestError
from kvtier.pages.chain import (
    KEY_BYTES,
    chain_keys,
    check_namespace,
    check_tokens,
    extras_by_page,
    next_key,
    root_key,
)

FINGERPRINT = bytes(range(32))
PAGE_SIZE = 16
TOKENS = np.arange(100, dtype="<u4").tobytes()  # 6 whole pages and 4 tokens
GOLDEN_ROOT = "61d48f50f9de4034d511f3a772998b9142abb2344c3526fb13a5a2e0556cf329"
GOLDEN_KEYS = [
    "39b515dd1235fa16f7f45158de3c94e31b478812fe8482c14397fbe5edf9edae",
    "8f5f4049f1a1ad58907b4a6987670703a2cfe9263486759d7823ad07c941146e",
]
GOLDEN_EXTRA_KEY = "957acba33e1a497a403beed1ba6ca71afd2ae07a8342cd87b0b92b4cf836bb97"


def _keys(namespace: str = "tenant-a", extras: dict[int, bytes] | None = None, tokens: bytes = TOKENS) -> list[bytes]:
    return chain_keys(root_key(FINGERPRINT, namespace), tokens, PAGE_SIZE, extras or {})


def test_keys_never_change() -> None:
    """NOTE: pages in Redis are found by these bytes; another value loses what every earlier release stored."""
    assert root_key(FINGERPRINT, "tenant-a").hex() == GOLDEN_ROOT
    assert [key.hex() for key in _keys()[:2]] == GOLDEN_KEYS
    assert _keys(extras={0: b"adapter"})[0].hex() == GOLDEN_EXTRA_KEY


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_keys_are_the_same_in_another_process(hash_seed: str) -> None:
    script = (
        "from kvtier.pages.chain import *; import numpy as np; "
        "root = root_key(bytes(range(32)), 'tenant-a'); "
        "extras = extras_by_page([(40, b'image'), (3, b'adapter')], 16); "
        "print(*[k.hex() for k in chain_keys(root, np.arange(100, dtype='<u4').tobytes(), 16, extras)], sep='\\n')"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    extras = extras_by_page([(40, b"image"), (3, b"adapter")], PAGE_SIZE)
    assert completed.stdout.split() == [key.hex() for key in _keys(extras=extras)]


def test_only_whole_pages_have_keys() -> None:
    keys = _keys()
    assert len(keys) == len(set(keys)) == 6
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert _keys(tokens=TOKENS[: 4 * PAGE_SIZE - 4]) == []


def test_namespaces_and_fingerprints_share_no_key() -> None:
    others = chain_keys(root_key(bytes(32), "tenant-a"), TOKENS, PAGE_SIZE, {})
    assert len({*_keys("tenant-a"), *_keys("tenant-b"), *_keys("tenant-a."), *others}) == 24


def test_a_changed_token_changes_the_keys_from_its_page_on() -> None:
    changed = bytearray(TOKENS)
    changed[4 * (2 * PAGE_SIZE + 5)] ^= 1
    keys, changed_keys = _keys(), _keys(tokens=bytes(changed))
    assert [key == other for key, other in zip(keys, changed_keys, strict=True)] == [True] * 2 + [False] * 4


def test_the_order_of_pages_matters() -> None:
    page = np.arange(16, dtype="<u4").tobytes()
    other = np.arange(16, 32, dtype="<u4").tobytes()
    assert not set(_keys(tokens=page + other)) & set(_keys(tokens=other + page))


def test_a_chain_continues_from_any_of_its_keys() -> None:
    extras = {0: b"adapter", 3: b"image", 5: b"salt"}
    keys = _keys(extras=extras)
    for cut in range(1, 6):
        rest = chain_keys(keys[cut - 1], TOKENS[cut * PAGE_SIZE * 4 :], PAGE_SIZE, extras, first_page=cut)
        assert rest == keys[cut:]


@pytest.mark.parametrize("page", range(6))
def test_extras_change_keys_from_their_page_on(page: int) -> None:
    equal = [key == other for key, other in zip(_keys(), _keys(extras={page: b"image"}), strict=True)]
    assert equal == [True] * page + [False] * (6 - page)


def test_extra_and_tokens_do_not_run_together() -> None:
    parent, tokens = bytes(32), bytes(range(64))
    assert next_key(parent, tokens, b"") != next_key(parent, tokens[1:], tokens[:1])


def test_extras_go_to_the_page_of_their_position() -> None:
    by_page = extras_by_page([(0, b"adapter"), (16, b"image"), (47, b"salt")], PAGE_SIZE)
    assert sorted(by_page) == [0, 1, 2]
    assert len(set(by_page.values())) == 3
    assert extras_by_page([], PAGE_SIZE) == {}


def test_extras_depend_on_digest_position_and_page_but_not_on_the_order_of_the_call() -> None:
    pairs = [(5, b"image"), (9, b"other"), (40, b"image")]
    expected = extras_by_page(pairs, PAGE_SIZE)
    assert extras_by_page(reversed(pairs), PAGE_SIZE) == expected
    variants = [
        extras_by_page(changed, PAGE_SIZE)[0]
        for changed in (
            [(5, b"image")],
            [(6, b"image"), (9, b"other")],
            [(5, b"other"), (9, b"image")],
            [(5, b"imag"), (9, b"eother")],
        )
    ]
    assert len({expected[0], *variants}) == 5


@pytest.mark.parametrize("digest", [b"", bytes(33)])
def test_extras_of_wrong_length_are_refused(digest: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"at token 7 has {len(digest)} bytes; send a digest of 1 to 32"):
        extras_by_page([(7, digest)], PAGE_SIZE)


@pytest.mark.parametrize("namespace", ["a", "tenant-1.prod_x", "A" * 64])
def test_valid_namespaces(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize("namespace", ["", "a" * 65, "a b", "a/b", "a:b", "{a}", "ä", "a\n", "*"])
def test_invalid_namespaces_are_refused(namespace: str) -> None:
    with pytest.raises(InvalidRequestError, match="name the tenant with 1 to 64 letters"):
        check_namespace(namespace)


def test_tokens_are_counted() -> None:
    assert check_tokens(TOKENS, vocab_size=100) == 100
    assert check_tokens(b"", vocab_size=100) == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[:-1], "tokens has 399 bytes; send little-endian uint32"),
        (TOKENS, "token 99 at position 99 is not below the vocabulary size 99"),
        (b"\xff\xff\xff\xff", "token 4294967295 at position 0"),
    ],
)
def test_tokens_that_are_not_ids_are_refused(tokens: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_tokens(tokens, vocab_size=99)
