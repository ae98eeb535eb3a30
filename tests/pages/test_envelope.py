"""The envelope of a stored page: no other bytes than those of the page that was asked for pass the check."""

from __future__ import annotations

import msgpack
import pytest
import xxhash

from kvtier.errors import CorruptPageError
from kvtier.pages.envelope import ENVELOPE_VERSION, MAX_HEADER_BYTES, PageName, check_envelope, encode_header

IMAGE = memoryview(bytes(range(48)))
NAME = PageName(fingerprint=bytes(range(32)), key=bytes(range(100, 132)), rank=1)
HEADER = encode_header(NAME, IMAGE)
FIELDS = {
    "version": ENVELOPE_VERSION,
    "fingerprint": NAME.fingerprint,
    "key": NAME.key,
    "rank": NAME.rank,
    "image_bytes": len(IMAGE),
    "xxh3_128": xxhash.xxh3_128_digest(IMAGE),
}


def test_the_stored_form_never_changes() -> None:
    """NOTE: values of earlier releases are in people's Redis; another form needs another ENVELOPE_VERSION."""
    assert ENVELOPE_VERSION == 1
    assert msgpack.packb(FIELDS) == HEADER
    assert xxhash.xxh3_128_digest(IMAGE).hex() == "d750a7889a2e7adaf6b46e1097bd1836"


@pytest.mark.parametrize("rank", [0, 1, 127, 128, 65536])
def test_every_single_bit_flip_is_found(rank: int) -> None:
    name = NAME._replace(rank=rank)
    header = encode_header(name, IMAGE)
    check_envelope(header, IMAGE, name)
    value = header + IMAGE
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPageError):
            check_envelope(bytes(flipped[: len(header)]), memoryview(flipped)[len(header) :], name)


def test_truncation_at_every_length_is_found() -> None:
    for length in range(len(HEADER)):
        with pytest.raises(CorruptPageError, match="no readable header"):
            check_envelope(HEADER[:length], IMAGE, NAME)
    for length in range(len(IMAGE)):
        with pytest.raises(CorruptPageError, match="does not match its checksum"):
            check_envelope(HEADER, IMAGE[:length], NAME)


def test_bytes_too_many_are_found() -> None:
    for header in (HEADER + b"\x00", HEADER + b"\xc0", b"\xc0" + HEADER, HEADER + HEADER):
        with pytest.raises(CorruptPageError, match="no readable header"):
            check_envelope(header, IMAGE, NAME)
    with pytest.raises(CorruptPageError, match="does not match its checksum"):
        check_envelope(HEADER, memoryview(bytes(IMAGE) + b"\x00"), NAME)


def test_a_right_checksum_does_not_excuse_a_wrong_length() -> None:
    with pytest.raises(CorruptPageError, match="does not match its checksum"):
        check_envelope(msgpack.packb({**FIELDS, "image_bytes": 47}), IMAGE, NAME)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(CorruptPageError, match=f"envelope version {version!r}, not 1"):
        check_envelope(msgpack.packb({**FIELDS, "version": version}), IMAGE, NAME)


@pytest.mark.parametrize(
    "asked",
    [
        NAME._replace(fingerprint=bytes(32)),
        NAME._replace(key=bytes(32)),
        NAME._replace(key=NAME.key[:-1]),
        NAME._replace(rank=0),
    ],
)
def test_another_page_is_refused(asked: PageName) -> None:
    with pytest.raises(CorruptPageError, match="lies another page"):
        check_envelope(HEADER, IMAGE, asked)


@pytest.mark.parametrize("field", list(FIELDS))
def test_a_header_without_a_field_is_refused(field: str) -> None:
    fields = {name: value for name, value in FIELDS.items() if name != field}
    with pytest.raises(CorruptPageError, match="no readable header"):
        check_envelope(msgpack.packb(fields), IMAGE, NAME)


@pytest.mark.parametrize("header", [7, None, [1, 2], "text", {}])
def test_a_header_that_is_no_map_of_fields_is_refused(header: object) -> None:
    with pytest.raises(CorruptPageError, match="no readable header"):
        check_envelope(msgpack.packb(header), IMAGE, NAME)


@pytest.mark.parametrize("wrong", [None, 5, "text", 10**12, [1], {"a": 1}])
@pytest.mark.parametrize("field", ["fingerprint", "key", "rank", "image_bytes", "xxh3_128"])
def test_a_header_with_a_field_of_another_type_is_refused(field: str, wrong: object) -> None:
    with pytest.raises(CorruptPageError, match="another page|checksum"):
        check_envelope(msgpack.packb({**FIELDS, field: wrong}), IMAGE, NAME)


def test_the_longest_header_is_within_its_bound() -> None:
    header = encode_header(NAME._replace(rank=2**32 - 1), IMAGE)
    assert len(HEADER) < len(header) <= MAX_HEADER_BYTES
    # An image of 4 GiB and more has a length of nine bytes instead of one.
    assert len(header) + 8 <= MAX_HEADER_BYTES
