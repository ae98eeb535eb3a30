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


def open_envelope(value: bytes | memoryview, name: PageName, image_bytes: int) -> memoryview:
    """The page image inside `value`, a view of it.

    Raises `CorruptPageError` when the value is of another version, of another page, not `image_bytes` long, or when its
    checksum (XXH3-128 of the image) does not match.
    """
    view = memoryview(value)
    header_bytes = len(view) - image_bytes
    if header_bytes <= 0:
        raise CorruptPageError(f"stored value has {len(view)} bytes, a page image alone has {image_bytes}")
    try:
        header = msgpack.unpackb(view[:header_bytes])
        version, fingerprint, key, rank, stored_bytes, checksum = (header[field] for field in _FIELDS)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise CorruptPageError(f"stored value has no readable header: {error!r}") from error
    if version != ENVELOPE_VERSION:
        raise CorruptPageError(f"stored value has envelope version {version}, this release reads {ENVELOPE_VERSION}")
    if (fingerprint, key, rank) != name:
        raise CorruptPageError(f"stored value is another page than {name.key.hex()[:16]} of rank {name.rank}")
    image = view[header_bytes:]
    if stored_bytes != len(image) or xxhash.xxh3_128_digest(image) != checksum:
        raise CorruptPageError(f"page {name.key.hex()[:16]} does not match its checksum")
    return image
