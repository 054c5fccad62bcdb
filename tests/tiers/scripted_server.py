"""An HTTP server that answers what a test says, for answers that no real server gives on demand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    method: str
    target: str
    body: bytes


@dataclass
class Answer:
    """`promised_bytes` beyond the body: the connection breaks off early. `silent`: nothing is ever said."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    promised_bytes: int | None = None
    silent: bool = False

    def raw(self) -> bytes:
        length = len(self.body) if self.promised_bytes is None else self.promised_bytes
        lines = [f"HTTP/1.1 {self.status} x", f"Content-Length: {length}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def error(status: int, code: str, more: str = "") -> Answer:
    text = f"<Error><Code>{code}</Code><Message>as scripted</Message><RequestId>R1</RequestId>{more}</Error>"
    return Answer(status, text.encode())


@asynccontextmanager
async def scripted(answer: Callable[[Request], Answer]) -> AsyncIterator[str]:
    """Serve; yields the endpoint."""
    open_connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            method, target, _ = head.split(" ", 2)
            said = answer(Request(method, target, body))
            if said.silent:
                await reader.read()  # until the client gives up
            else:
                writer.write(said.raw())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            open_connections.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in open_connections:
            writer.close()
        await server.wait_closed()
