"""Between protobuf messages and kvtier's own types, for daemon and client alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtier.errors import ConfigurationError, InvalidRequestError
from kvtier.index.pool import SlotArray, slot_array
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.tiers.base import CudaIpc, PoolHandle, SharedMemoryFile
from kvtier.v1 import cache_pb2 as pb

ERROR_METADATA_KEY = "kvtier-error"
_MAX_EXTRA_KEYS = 16_384  # less than a megabyte, which a message has room for beside the most tokens
"""Trailing metadata of a failed unary call: the name of the exception class."""

_FORMATS = {
    PageFormat.NVFP4: pb.PAGE_FORMAT_NVFP4,
    PageFormat.FP8: pb.PAGE_FORMAT_FP8,
    PageFormat.BF16: pb.PAGE_FORMAT_BF16,
}


def identity_to_message(identity: CacheIdentity) -> pb.CacheIdentity:
    """The identity as it travels."""
    layout = identity.layout
    return pb.CacheIdentity(
        model=identity.model,
        revision=identity.revision,
        vocab_size=identity.vocab_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        page_format=_FORMATS[layout.page_format],
        rope=identity.rope,
        recipe=identity.recipe,
        layout_version=identity.layout_version,
        rank=identity.rank,
        world_size=identity.world_size,
    )


def identity_from_message(message: pb.CacheIdentity) -> CacheIdentity:
    """The identity of an Attach; raises `InvalidRequestError`."""
    formats = {number: page_format for page_format, number in _FORMATS.items()}
    if message.page_format not in formats:
        raise InvalidRequestError(f"page_format {message.page_format} is not one of {', '.join(PageFormat)}")
    layout = PageLayout(
        formats[message.page_format], message.num_layers, message.num_kv_heads, message.head_dim, message.page_size
    )
    return CacheIdentity(
        model=message.model,
        revision=message.revision,
        vocab_size=message.vocab_size,
        layout=layout,
        rope=message.rope,
        recipe=message.recipe,
        rank=message.rank,
        world_size=message.world_size,
        layout_version=message.layout_version,
    )


def pool_to_message(handle: PoolHandle) -> pb.DevicePool:
    """The handle of a device pool as it travels."""
    message = pb.DevicePool(num_pages=handle.num_pages, page_bytes=handle.page_bytes)
    if isinstance(handle.memory, CudaIpc):
        message.cuda_ipc.CopyFrom(pb.CudaIpcMemory(**handle.memory._asdict()))
    else:
        message.shared_memory_path = handle.memory.path
    return message


def pool_from_message(message: pb.DevicePool) -> PoolHandle:
    """The handle of an Attach; raises `ConfigurationError` for a kind of memory that this release does not know."""
    kind = message.WhichOneof("memory")
    memory: SharedMemoryFile | CudaIpc
    if kind == "cuda_ipc":
        memory = CudaIpc(message.cuda_ipc.ipc_handle, message.cuda_ipc.device_uuid)
    elif kind == "shared_memory_path":
        memory = SharedMemoryFile(message.shared_memory_path)
    else:
        raise ConfigurationError("the daemon's pool lies in memory that this release cannot map; update the worker")
    return PoolHandle(memory, message.num_pages, message.page_bytes)


def pages_to_bytes(pages: SlotArray) -> bytes:
    """Page numbers as little-endian uint32."""
    return pages.astype("<u4").tobytes()


def pages_from_bytes(data: bytes) -> SlotArray:
    """Page numbers from little-endian uint32; raises `InvalidRequestError` for a broken length."""
    if len(data) % 4:
        raise InvalidRequestError(f"pages has {len(data)} bytes; send little-endian uint32, 4 bytes a page")
    return slot_array(np.frombuffer(data, dtype="<u4").astype(np.int64).clip(max=2**31 - 1))


def extra_keys_to_messages(extra_keys: Iterable[tuple[int, bytes]]) -> list[pb.ExtraKey]:
    """Extra keys, given as (token position, digest), as they travel; raises `InvalidRequestError`."""
    try:
        messages = [pb.ExtraKey(token_position=position, digest=digest) for position, digest in extra_keys]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"extra_keys cannot be sent: {error}; give (token position, digest) pairs") from error
    if len(messages) > _MAX_EXTRA_KEYS:
        raise InvalidRequestError(f"{len(messages):,} extra_keys do not fit into one message; send {_MAX_EXTRA_KEYS:,}")
    return messages
