"""A server that sends back what it gets, on a bidirectional stream: the least a lookup over gRPC can cost.

Run as `python -m kvtier.bench.echo SOCKET`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from kvtier.daemon.server import READ_BYTES
from kvtier.memory import keep_memory_at_hand

METHOD = "/kvtier.bench.Echo/Echo"
OPTIONS = (
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.experimental.tcp_read_chunk_size", READ_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
)


async def _echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    async for request in requests:
        await context.write(request)


async def main(socket: str) -> None:
    """Serves until it is killed."""
    server = grpc.aio.server(options=OPTIONS)
    service, method = METHOD[1:].split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    keep_memory_at_hand()  # as the daemon does
    asyncio.run(main(sys.argv[1]))
