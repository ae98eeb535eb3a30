"""The stored form of a page: a msgpack header, then the page image.

The header repeats what the key already promises (fingerprint, chain key, rank), so that a value under a wrong key, of
another version, cut short or changed by a bit is found out on reading and never becomes a page.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import xxhash

from kvtier.errors import CorruptPageError

ENVELOPE_VERSION = 1
MAX_HEADER_BYTES = 256
_FIELDS = ("version", "fingerprint", "key", "rank", "image_bytes", "xxh3_128")


class PageName(NamedTuple):
    """Which page a stored value claims to be."""

    fingerprint: bytes
    key: bytes
    rank: int


def encode_header(name: PageName, image: memoryview) -> bytes:
    """The bytes that go before `image` in storage."""
    values = (ENVELOPE_VERSION, name.fingerprint, name.key, name.rank, len(image), xxhash.xxh3_128_digest(image))
    packed: bytes = msgpack.packb(dict(zip(_FIELDS, values, strict=True)))
    return packed


def check_envelope(header: bytes | memoryview, image: memoryview, name: PageName) -> None:
    """Raises `CorruptPageError` unless `header` and `image` together are the stored form of page `name`.

    Finds out another version, another page, another length, and an image that does not match its checksum.
    """
    try:
        fields = msgpack.unpackb(header)
        version, fingerprint, key, rank, image_bytes, checksum = (fields[field] for field in _FIELDS)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise CorruptPageError(f"page {_short(name)} has no readable header: {error!r}") from error
    if version != ENVELOPE_VERSION:
        raise CorruptPageError(f"page {_short(name)} has envelope version {version!r}, not {ENVELOPE_VERSION}")
    if PageName(fingerprint, key, rank) != name:
        raise CorruptPageError(f"under the key of page {_short(name)} lies another page")
    if image_bytes != len(image) or xxhash.xxh3_128_digest(image) != checksum:
        raise CorruptPageError(f"page {_short(name)} does not match its checksum")


def _short(name: PageName) -> str:
    return f"{name.key.hex()[:16]} of rank {name.rank}"
