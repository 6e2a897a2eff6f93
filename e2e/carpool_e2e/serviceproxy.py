"""The Service `kubernetes` on a node, in place of kube-proxy: forwards its address to the API server.

Started by `nodes`. Pods reach the address through the node's end of their link. No packet filter is needed, which a
container may lack.
"""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

CHUNK_BYTES = 65536


async def copy(reader: StreamReader, writer: StreamWriter) -> None:
    """Copy one direction of a connection until either side closes it."""
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(address: str, port: int, server_address: str, server_port: int) -> None:
    """Forward connections until cancelled; one that the API server does not accept is closed."""

    async def forward(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(server_address, server_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    async with await asyncio.start_server(forward, address, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
