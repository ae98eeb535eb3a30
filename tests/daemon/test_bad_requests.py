"""Bad input on every call: the right gRPC status, a message that says what to do, and nothing changed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_SIZE,
    VOCAB_SIZE,
    RawSession,
    other_identity,
    small_config,
    some_tokens,
    state_of,
)

from kvtier.daemon.operator import Operator
from kvtier.daemon.server import running
from kvtier.protocol import ERROR_METADATA_KEY, identity_to_message
from kvtier.v1 import admin_pb2 as admin
from kvtier.v1 import admin_pb2_grpc, cache_pb2_grpc
from kvtier.v1 import cache_pb2 as pb

INVALID, NOT_FOUND, EXHAUSTED, PRECONDITION = 3, 5, 8, 9
TOKENS = some_tokens(4, seed=1).astype("<u4").tobytes()
ONE_PAGE = TOKENS[: 4 * PAGE_SIZE]
BEYOND = np.full(PAGE_SIZE, VOCAB_SIZE, "<u4").tobytes()


def u4(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


class Scene(NamedTuple):
    """A daemon, a session with a lease that matches two pages and reserves three, and leases that are not its own."""

    operator: Operator
    session: RawSession
    lease_id: int
    reserved: list[int]
    released_id: int
    foreign_id: int
    foreign_page: int


@contextlib.asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    async with running(small_config(directory)) as operator, RawSession(directory) as a, RawSession(directory) as b:
        await a.attach()
        await b.attach()
        first = await a.acquire("tenant", reserve_pages=2)
        commit = pb.CommitRequest(lease_id=first.lease_id, tokens=TOKENS[: 8 * PAGE_SIZE], pages=first.reserved_pages)
        assert (await a.ask(commit=commit)).commit.committed_tokens == 2 * PAGE_SIZE
        assert (await a.ask(release=pb.ReleaseRequest(lease_ids=[first.lease_id]))).HasField("release")
        lease = await a.acquire("tenant", TOKENS, reserve_pages=3)
        foreign = await b.acquire("tenant", reserve_pages=1)
        reserved = np.frombuffer(lease.reserved_pages, "<u4").tolist()
        (foreign_page,) = np.frombuffer(foreign.reserved_pages, "<u4").tolist()
        yield Scene(operator, a, lease.lease_id, reserved, first.lease_id, foreign.lease_id, foreign_page)


def acquire(**fields: Any) -> Callable[[Scene], dict[str, Any]]:
    return lambda _: {"acquire": pb.AcquireRequest(**{"namespace": "tenant", **fields})}


def acquire_behind(which: str, namespace: str = "tenant") -> Callable[[Scene], dict[str, Any]]:
    return lambda s: {"acquire": pb.AcquireRequest(namespace=namespace, parent_lease_id=getattr(s, which))}


def extend(which: str, pages: int = 1) -> Callable[[Scene], dict[str, Any]]:
    return lambda s: {"extend": pb.ExtendRequest(lease_id=getattr(s, which), reserve_pages=pages)}


def commit(
    tokens: bytes = ONE_PAGE,
    pages: Callable[[Scene], bytes] = lambda s: u4(s.reserved[0]),
    which: str = "lease_id",
    **more: Any,
) -> Callable[[Scene], dict[str, Any]]:
    return lambda s: {"commit": pb.CommitRequest(lease_id=getattr(s, which), tokens=tokens, pages=pages(s), **more)}


def release(*which: str) -> Callable[[Scene], dict[str, Any]]:
    return lambda s: {"release": pb.ReleaseRequest(lease_ids=[getattr(s, name) for name in which])}


def extra(*digests: bytes) -> list[pb.ExtraKey]:
    return [pb.ExtraKey(token_position=0, digest=digest) for digest in digests]


class Refusal(NamedTuple):
    """A request, and how it is refused."""

    request: Any
    code: int
    kind: str
    advice: str


def invalid(request: object, advice: str) -> Refusal:
    return Refusal(request, INVALID, "InvalidRequestError", advice)


def unknown(request: object, advice: str) -> Refusal:
    return Refusal(request, NOT_FOUND, "LeaseUnknownError", advice)


def full(request: object, advice: str) -> Refusal:
    return Refusal(request, EXHAUSTED, "CacheFullError", advice)


SESSION_CASES: dict[str, Refusal] = {
    "empty": invalid(lambda _: {}, "empty, or of a newer release; update the daemon"),
    "attach twice": Refusal(
        lambda _: {"attach": pb.AttachRequest(identity=identity_to_message(IDENTITY))},
        PRECONDITION,
        "NotAttachedError",
        "open another session",
    ),
    "no namespace": invalid(acquire(namespace=""), "name the tenant with 1 to 64 letters"),
    "namespace with a colon": invalid(acquire(namespace="a:b"), "'a:b' is not valid"),
    "namespace too long": invalid(acquire(namespace="n" * 65), "1 to 64 letters"),
    "half a token": invalid(acquire(tokens=TOKENS[:-1]), "255 bytes; send little-endian uint32"),
    "token beyond": invalid(
        acquire(tokens=ONE_PAGE + BEYOND),
        "token 1000 at position 16 is not below the vocabulary size 1000; attach with the model's own",
    ),
    "tokens in two places": invalid(acquire(tokens=TOKENS, token_file_bytes=4), "send them in one of the two"),
    "more tokens than the file has": invalid(
        acquire(token_file_bytes=(1 << 20) + 4), "0 bytes of tokens, and 1048580 more in a token file of 1048576"
    ),
    "half a token in the file": invalid(acquire(token_file_bytes=6), "6 bytes; send little-endian uint32"),
    "extra key of 0 bytes": invalid(acquire(extra_keys=extra(b"")), "send a digest of 1 to 32"),
    "extra key of 33 bytes": invalid(acquire(extra_keys=extra(b"x" * 33)), "has 33 bytes"),
    "wait too long": invalid(acquire(wait_ms=60_001), "wait at most 60000"),
    "rate below none": invalid(acquire(prefill_tokens_per_second=-1.0), "or 0"),
    "rate not a number": invalid(acquire(prefill_tokens_per_second=float("nan")), "or 0"),
    "reserve over the pool": full(
        acquire(tokens=TOKENS, reserve_pages=65),
        "65 pages asked, but leases, pins and transfers hold 6 of the 64 on the device; release leases",
    ),
    "reserve over what is left": full(acquire(reserve_pages=59), "hold 6 of the 64"),
    "foreign parent": unknown(acquire_behind("foreign_id"), "not one of this session's"),
    "released parent": unknown(acquire_behind("released_id"), "released or never acquired"),
    "parent elsewhere": invalid(acquire_behind("lease_id", "other"), "a sequence stays in its namespace"),
    "extend foreign": unknown(extend("foreign_id"), "not one of this session's"),
    "extend released": unknown(extend("released_id"), "was released"),
    "extend over the pool": full(extend("lease_id", 2**32 - 1), "ask for fewer pages"),
    "commit foreign": unknown(commit(which="foreign_id"), "not one of this session's"),
    "commit released": unknown(commit(which="released_id"), "was released"),
    "commit nothing": invalid(commit(b"", lambda _: b""), "0 tokens do not fill 0 pages of 16; commit one or more"),
    "commit half a token": invalid(commit(ONE_PAGE[:-2]), "62 bytes; send little-endian uint32"),
    "commit half a page number": invalid(commit(pages=lambda s: u4(s.reserved[0])[:3]), "pages has 3 bytes"),
    "commit short of a page": invalid(commit(ONE_PAGE[:-4]), "15 tokens do not fill 1 pages of 16"),
    "commit pages short": invalid(commit(TOKENS), "64 tokens do not fill 1 pages of 16"),
    "commit token beyond": invalid(commit(BEYOND), "token 1000 at position 0"),
    "commit a page never reserved": invalid(commit(pages=lambda _: u4(63)), "[63] are not reserved by lease"),
    "commit a page of another lease": invalid(
        commit(pages=lambda s: u4(s.foreign_page)), "only pages that Acquire or Extend gave you"
    ),
    "commit a page beyond the pool": invalid(commit(pages=lambda _: u4(2**32 - 1)), "are not reserved by lease"),
    "commit a page twice": invalid(
        commit(TOKENS[: 8 * PAGE_SIZE], lambda s: u4(s.reserved[0], s.reserved[0])), "names a page twice"
    ),
    "commit with an extra key of 0 bytes": invalid(commit(extra_keys=extra(b"")), "send a digest of 1 to 32"),
    "commit with an extra key of 33 bytes": invalid(commit(extra_keys=extra(b"x" * 33)), "send a digest of 1 to 32"),
    "release foreign": unknown(release("foreign_id"), "not one of this session's"),
    "release one that is and one that is not": unknown(release("lease_id", "released_id"), "was released"),
}


@pytest.mark.parametrize("case", SESSION_CASES)
async def test_a_session_refuses_a_bad_request_and_goes_on(case: str, directory: Path) -> None:
    request, code, kind, advice = SESSION_CASES[case]
    async with scene(directory) as s:
        before = state_of(s.operator)
        error = (await s.session.ask(**request(s))).error
        assert (error.code, error.kind) == (code, kind)
        assert advice in error.message
        assert state_of(s.operator) == before
        tokens = TOKENS[8 * PAGE_SIZE : 12 * PAGE_SIZE]
        good = pb.CommitRequest(lease_id=s.lease_id, tokens=tokens, pages=u4(s.reserved[2]))
        assert (await s.session.ask(commit=good)).commit.committed_tokens == 3 * PAGE_SIZE


async def test_releasing_a_lease_twice_in_one_request_releases_it_once(directory: Path) -> None:
    async with scene(directory) as s:
        assert (await s.session.ask(**release("lease_id", "lease_id")(s))).HasField("release")
        (cache,) = state_of(s.operator).caches
        assert (cache.leases, cache.device.held_pages) == (1, 1)


def identity_message(**changes: Any) -> pb.CacheIdentity:
    message = identity_to_message(IDENTITY)
    message.MergeFrom(pb.CacheIdentity(**changes))
    return message


def without(field: str) -> pb.CacheIdentity:
    message = identity_to_message(IDENTITY)
    message.ClearField(field)
    return message


ATTACH_CASES: dict[str, Refusal] = {
    "nothing": invalid(pb.AttachRequest(), "page_format 0 is not one of nvfp4, fp8, bf16"),
    "unknown format": invalid(pb.AttachRequest(identity=identity_message(page_format=9)), "page_format 9"),
    "no model": invalid(pb.AttachRequest(identity=without("model")), "give the name or path"),
    "no vocabulary": invalid(pb.AttachRequest(identity=without("vocab_size")), "vocab_size is 0; it must be"),
    "head dimension": invalid(pb.AttachRequest(identity=identity_message(head_dim=24)), "multiple of 16"),
    "page size": invalid(pb.AttachRequest(identity=identity_message(page_size=48)), "use one of 16, 32, 64, 128"),
    "no layers": invalid(pb.AttachRequest(identity=without("num_layers")), "must be positive"),
    "layout version": invalid(
        pb.AttachRequest(identity=identity_message(layout_version=99)), "run the same kvtier release"
    ),
    "rank": invalid(pb.AttachRequest(identity=identity_message(rank=1)), "0 to world_size - 1"),
    "pages larger than the pools": Refusal(
        pb.AttachRequest(identity=identity_message(num_layers=2**32 - 1, num_kv_heads=2**32 - 1, model="huge")),
        PRECONDITION,
        "ConfigurationError",
        "set device_bytes to",
    ),
    "a device that is not there": invalid(
        pb.AttachRequest(identity=identity_message(), device_uuids=["GPU-1"]), "load the model on the CPU"
    ),
    "all parts of the memory in use": full(
        pb.AttachRequest(identity=identity_message(model="another")), "--max-caches"
    ),
}


@pytest.mark.parametrize("case", ATTACH_CASES)
async def test_attach_refuses_what_cannot_be_served_and_may_be_sent_again(case: str, directory: Path) -> None:
    request, code, kind, advice = ATTACH_CASES[case]
    async with scene(directory) as s, RawSession(directory) as session:
        not_attached = (await session.ask(acquire=pb.AcquireRequest(namespace="tenant"))).error
        assert (not_attached.code, not_attached.kind) == (PRECONDITION, "NotAttachedError")
        assert "send Attach first" in not_attached.message
        before = state_of(s.operator)
        error = (await session.ask(attach=request)).error
        assert (error.code, error.kind) == (code, kind)
        assert advice in error.message
        assert state_of(s.operator) == before
        assert (await session.attach()).fingerprint == IDENTITY.fingerprint


async def test_a_refused_attach_does_not_close_the_idle_cache(directory: Path) -> None:
    async with running(small_config(directory)) as operator:
        async with RawSession(directory) as first:
            await first.attach()
        async with RawSession(directory) as second:
            huge = pb.AttachRequest(identity=identity_message(num_layers=2**31, model="huge"))
            assert (await second.ask(attach=huge)).error.kind == "ConfigurationError"
            assert [cache.identity.model for cache in state_of(operator).caches] == ["test-model"]


@pytest.mark.parametrize("kind", ["extend", "commit", "release", "heartbeat"])
async def test_what_comes_before_attach_is_refused(kind: str, directory: Path) -> None:
    requests = {
        "extend": pb.ExtendRequest(lease_id=1, reserve_pages=1),
        "commit": pb.CommitRequest(lease_id=1, tokens=ONE_PAGE, pages=u4(0)),
        "release": pb.ReleaseRequest(lease_ids=[1]),
        "heartbeat": pb.HeartbeatRequest(),
    }
    async with running(small_config(directory)), RawSession(directory) as session:
        response = await session.ask(**{kind: requests[kind]})
        if kind == "heartbeat":  # says nothing about a cache
            assert response.HasField("heartbeat")
        else:
            assert (response.error.code, response.error.kind) == (PRECONDITION, "NotAttachedError")


KNOWN = IDENTITY.fingerprint
UNKNOWN = other_identity(model="never-attached").fingerprint
_PROMPT_CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown fingerprint": ({"fingerprint": UNKNOWN}, NOT_FOUND, "it opens when a worker attaches"),
    "no fingerprint": ({"fingerprint": b""}, NOT_FOUND, "(empty)"),
    "no namespace": ({"namespace": ""}, INVALID, "name the tenant"),
    "illegal namespace": ({"namespace": "a/b"}, INVALID, "'a/b' is not valid"),
    "half a token": ({"tokens": TOKENS[:-1]}, INVALID, "255 bytes; send little-endian uint32"),
    "token beyond": ({"tokens": BEYOND}, INVALID, "token 1000 at position 0"),
    "extra key of 0 bytes": ({"extra_keys": extra(b"")}, INVALID, "send a digest of 1 to 32"),
    "extra key of 33 bytes": ({"extra_keys": extra(b"x" * 33)}, INVALID, "send a digest of 1 to 32"),
}
UNARY_CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    f"{method}: {case}": (
        method,
        {"fingerprint": KNOWN, "namespace": "tenant", "tokens": TOKENS, **fields},
        code,
        advice,
    )
    for method in ("Lookup", "Prefetch", "Pin")
    for case, (fields, code, advice) in _PROMPT_CASES.items()
} | {
    "Pin: no time": ("Pin", {"fingerprint": KNOWN, "namespace": "tenant", "ttl_seconds": 0}, INVALID, "for how long"),
    "Unpin: unknown": ("Unpin", {"pin_id": 77}, NOT_FOUND, "pin 77 was removed, has run out, or never was"),
    "FlushNamespace: none": ("FlushNamespace", {}, INVALID, "name the tenant"),
    "FlushNamespace: illegal": ("FlushNamespace", {"namespace": "*"}, INVALID, "'*' is not valid"),
}


@pytest.mark.parametrize("case", UNARY_CASES)
async def test_a_unary_call_refuses_bad_input_with_its_status(case: str, directory: Path) -> None:
    method, fields, code, advice = UNARY_CASES[case]
    if method == "Pin":
        fields = {"ttl_seconds": 60, **fields}
    async with scene(directory) as s, grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock") as channel:
        services = {"Lookup": (cache_pb2_grpc.CacheServiceStub, pb), "Prefetch": (cache_pb2_grpc.CacheServiceStub, pb)}
        stub, messages = services.get(method, (admin_pb2_grpc.AdminServiceStub, admin))
        before = state_of(s.operator)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(stub(channel), method)(getattr(messages, f"{method}Request")(**fields))
        assert refused.value.code().value[0] == code
        assert advice in (refused.value.details() or "")
        assert ERROR_METADATA_KEY in dict(refused.value.trailing_metadata())
        assert state_of(s.operator) == before


async def test_a_message_over_the_limit_is_refused_by_its_size(directory: Path) -> None:
    config = small_config(directory, max_message_bytes=64 << 10)
    async with running(config) as operator, RawSession(directory) as session:
        await session.attach()
        before = state_of(operator)
        async with grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock") as channel:
            request = pb.LookupRequest(fingerprint=KNOWN, namespace="tenant", tokens=bytes(65 << 10))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cache_pb2_grpc.CacheServiceStub(channel).Lookup(request)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in (refused.value.details() or "")
        assert state_of(operator) == before
        assert (await session.acquire("tenant")).lease_id == 1
