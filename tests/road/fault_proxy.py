"""A TCP proxy before a real S3 server, which goes wrong at chosen requests. One connection a request."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from listener import Listener

_PATIENCE_S = 60.0
UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
)
_BODY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True)
class Request:
    """What the proxy knows of a request before it decides."""

    number: int
    """Counted from the moment of arming."""
    method: str
    target: str


Fault = Callable[[Request], str | bytes | None]
"""None: pass it on. Bytes: answer that. "drop": close at once. "cut request": half of it reaches the server.
"cut answer": half of the answer comes back. "lose answer": the server does it, nothing comes back."""


class FaultProxy(Listener):
    """Decides at each request, while it is armed, what becomes of it."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream, socket.create_server(("127.0.0.1", 0), backlog=128))
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self._count = 0
        self.seen: list[Request] = []
        """Requests since arming."""

    def arm(self, fault: Fault) -> None:
        with self._lock:
            self._fault, self._count, self.seen = fault, 0, []

    def disarm(self) -> None:
        with self._lock:
            self._fault = None

    @contextmanager
    def armed(self, fault: Fault) -> Iterator[None]:
        self.arm(fault)
        try:
            yield
        finally:
            self.disarm()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_PATIENCE_S)
        with client, suppress(OSError):
            data = _read_request(client)
            if data is None:
                return
            fault = self._decide(data)
            if isinstance(fault, bytes):
                client.sendall(fault)
            elif fault != "drop":
                self._forward(client, data, fault)

    def _decide(self, data: bytes) -> str | bytes | None:
        method, target, _ = data.split(b"\r\n", 1)[0].decode().split(" ", 2)
        with self._lock:
            request = Request(self._count, method, target)
            self._count += 1
            self.seen.append(request)
            fault = self._fault
        return fault(request) if fault is not None else None

    def _forward(self, client: socket.socket, data: bytes, fault: str | None) -> None:
        with socket.create_connection(self._upstream, _PATIENCE_S) as server:
            if fault == "cut request":
                server.sendall(data[: len(data) - max(1, len(data) // 4)])
                return
            server.sendall(data)
            answer = _read_all(server)
        if fault == "lose answer":
            return
        client.sendall(answer if fault != "cut answer" else answer[: len(answer) // 2])


def unavailable() -> bytes:
    return UNAVAILABLE % (len(_BODY), _BODY)


def status(code: int, name: str) -> bytes:
    """An error answer of a store."""
    body = f"<Error><Code>{name}</Code><Message>as ordered by the test</Message></Error>".encode()
    head = f"HTTP/1.1 {code} {name}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _read_request(client: socket.socket) -> bytes | None:
    """A whole request, told to be the last of its connection; None if the client hangs up instead."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return None
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    parts = [body]
    missing = (int(length[1]) if length else 0) - len(body)
    while missing > 0:
        part = client.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return head + b"\r\nConnection: close\r\n\r\n" + b"".join(parts)


def _read_all(server: socket.socket) -> bytes:
    parts = []
    while part := server.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)
