"""Chain keys: the one name of a page in every process, host and release.

`root = digest(fingerprint, namespace)` and `key = digest(parent key, extra, tokens of the page)`, where `extra` is
the digest of what else changes the KV from this page on (a LoRA adapter, an image, a salt) and mostly empty.
BLAKE2b-256 of canonical little-endian bytes; no seed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import numpy as np

from kvtier.errors import InvalidRequestError

KEY_BYTES = 32
TOKEN_BYTES = 4  # little-endian uint32
MAX_EXTRA_BYTES = 32

Extras = Mapping[int, bytes]
"""Digests by the index of the page from which on they apply, counted from the start of the sequence."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_namespace(namespace: str) -> str:
    """Returns `namespace`; raises `InvalidRequestError` when it is empty or has characters that keys cannot carry."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise InvalidRequestError(
            f"namespace {namespace!r:.80} is not valid; name the tenant with 1 to 64 letters, digits, '.', '_' or '-'"
        )
    return namespace


def root_key(fingerprint: bytes, namespace: str) -> bytes:
    """The parent of a namespace's first pages."""
    digest = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"kvtier root")
    digest.update(namespace.encode())
    return digest.digest()


def next_key(parent: bytes, page_tokens: bytes, extra: bytes = b"") -> bytes:
    """Key of the page with `page_tokens` behind the page named `parent`."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"kvtier page")
    digest.update(len(extra).to_bytes(4, "little"))
    digest.update(extra)
    digest.update(page_tokens)
    return digest.digest()


def chain_keys(parent: bytes, tokens: bytes, page_size: int, extras: Extras, first_page: int = 0) -> list[bytes]:
    """Keys of the whole pages in `tokens`, of which the first is page `first_page` of its sequence."""
    stride = page_size * TOKEN_BYTES
    keys: list[bytes] = []
    for index in range(len(tokens) // stride):
        parent = next_key(parent, tokens[index * stride : (index + 1) * stride], extras.get(first_page + index, b""))
        keys.append(parent)
    return keys


def check_tokens(tokens: bytes, vocab_size: int) -> int:
    """Number of token ids in `tokens`; raises `InvalidRequestError` when they are not ids of this vocabulary."""
    if len(tokens) % TOKEN_BYTES:
        raise InvalidRequestError(f"tokens has {len(tokens)} bytes; send little-endian uint32, 4 bytes a token")
    ids = np.frombuffer(tokens, dtype="<u4")
    if ids.size and int(ids.max()) >= vocab_size:
        position = int(np.argmax(ids >= vocab_size))
        raise InvalidRequestError(
            f"token {int(ids[position])} at position {position} is not below the vocabulary size {vocab_size}; "
            "attach with the model's own vocabulary size"
        )
    return ids.size


def extras_by_page(extra_keys: Iterable[tuple[int, bytes]], page_size: int) -> dict[int, bytes]:
    """Extras by page from (token position, digest) pairs; several in one page are hashed together in their order."""
    by_page: dict[int, bytes] = {}
    for position, digest in sorted(extra_keys):
        if not 1 <= len(digest) <= MAX_EXTRA_BYTES:
            raise InvalidRequestError(
                f"the extra key at token {position} has {len(digest)} bytes; send a digest of 1 to {MAX_EXTRA_BYTES}"
            )
        page, offset = divmod(position, page_size)
        link = offset.to_bytes(4, "little") + digest
        by_page[page] = hashlib.blake2b(by_page.get(page, b"") + link, digest_size=MAX_EXTRA_BYTES).digest()
    return by_page
